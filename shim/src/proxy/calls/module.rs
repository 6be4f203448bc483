//! Modules.

use std::ffi::{OsStr, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt;

use mpsshim_api::cuda::{
    CUDA_ERROR_FILE_NOT_FOUND, CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUresult,
};
use mpsshim_proto::handle::Kind;

use super::entries;
use crate::ffi::{In, Out, Status, Text, guard};
use crate::proxy::context;
use crate::proxy::image::Image;
use crate::proxy::jit::{NO_OPTIONS, Options};
use crate::proxy::library;
use crate::proxy::module::{self, Load};
use crate::proxy::submit::session;

entries! {
    cuModuleLoad(_, _) => load,
    cuModuleLoadData(_, _) => load_data,
    cuModuleLoadDataEx(_, _, _, _, _) => load_data_ex,
    cuModuleLoadFatBinary(_, _) => load_data,
    cuModuleUnload(_) => unload,
    cuModuleGetFunction(_, _, _) => get_function,
    cuModuleGetGlobal_v2(_, _, _, _) => get_global,
    cuModuleGetFunctionCount(_, _) => get_function_count,
    cuModuleEnumerateFunctions(_, _, _) => enumerate_functions,
}

/// Loads an image with the program's options: a module into the current context.
pub fn load_image(kind: Kind, content: &[u8], options: Options) -> Status<u64> {
    let session = session()?;
    let context = match kind {
        Kind::Library => None,
        _ => Some(context::current()?.home()),
    };
    let options = options.parse()?;
    let load = Load {
        content,
        options: &options,
    };
    let (status, said) = match context {
        Some(context) => module::load(session, context, load),
        None => library::load(session, load),
    };
    options.places.write(&said)?;
    status
}

/// Loads an image from the program's memory.
pub fn load_memory(kind: Kind, image: In<u8>, options: Options) -> Status<u64> {
    // SAFETY: the program gave an image as CUDA takes it, which lives through this call.
    let content = unsafe { Image::find(image.address())?.content() };
    load_image(kind, content, options)
}

/// Loads an image from a file.
pub fn load_file(kind: Kind, name: Text, options: Options) -> Status<u64> {
    let path = OsStr::from_bytes(named(name)?.to_bytes());
    let mut content = fs::read(path).map_err(|error| {
        tracing::warn!(%error, path = %path.display(), "an image file cannot be read");
        CUDA_ERROR_FILE_NOT_FOUND
    })?;
    // PTX in a file has no NUL.
    content.push(0);
    load_image(kind, Image::find_in(&content)?, options)
}

/// `cuModuleLoad`.
pub unsafe extern "C" fn load(out: Out<u64>, name: Text) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        out.set(load_file(Kind::Module, name, NO_OPTIONS)?)
    })
}

/// `cuModuleLoadData`, `cuModuleLoadFatBinary`.
pub unsafe extern "C" fn load_data(out: Out<u64>, image: In<u8>) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        out.set(load_memory(Kind::Module, image, NO_OPTIONS)?)
    })
}

/// `cuModuleLoadDataEx`.
pub unsafe extern "C" fn load_data_ex(
    out: Out<u64>,
    image: In<u8>,
    count: u32,
    names: In<u32>,
    values: Out<*mut c_void>,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let options = Options::new(count, names, values);
        out.set(load_memory(Kind::Module, image, options)?)
    })
}

/// `cuModuleUnload`.
pub unsafe extern "C" fn unload(handle: u64) -> CUresult {
    guard(|| module::unload(session()?, handle))
}

/// `cuModuleGetFunction`.
pub unsafe extern "C" fn get_function(out: Out<u64>, module: u64, name: Text) -> CUresult {
    guard(|| {
        module::check(module)?;
        out.required()?;
        out.set(module::get_function(session()?, module, named(name)?)?)
    })
}

/// `cuModuleGetGlobal`.
pub unsafe extern "C" fn get_global(
    address: Out<CUdeviceptr>,
    len: Out<usize>,
    parent: u64,
    name: Text,
) -> CUresult {
    guard(|| {
        module::check(parent)?;
        if address.is_null() && len.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        global_of(parent, name, address, len)
    })
}

/// The name of something in an image, which is never empty.
pub fn named<'a>(name: Text) -> Status<&'a std::ffi::CStr> {
    let name = name.get()?;
    if name.is_empty() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(name)
}

/// Address and size of a module's global.
pub fn global_of(module: u64, name: Text, address: Out<CUdeviceptr>, len: Out<usize>) -> Status {
    let (start, bytes) = module::get_global(session()?, module, named(name)?)?;
    address.set_if_wanted(start);
    len.set_if_wanted(bytes as usize);
    Ok(())
}

/// `cuModuleGetFunctionCount`.
pub unsafe extern "C" fn get_function_count(out: Out<u32>, parent: u64) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(module::names(session()?, parent)?.len() as u32)
    })
}

/// `cuModuleEnumerateFunctions`.
pub unsafe extern "C" fn enumerate_functions(out: Out<u64>, count: u32, parent: u64) -> CUresult {
    guard(|| {
        out.required()?;
        let session = session()?;
        let names = module::names(session, parent)?;
        for (index, name) in names.iter().take(count as usize).enumerate() {
            out.set_at(index, module::get_function(session, parent, name)?)?;
        }
        Ok(())
    })
}
