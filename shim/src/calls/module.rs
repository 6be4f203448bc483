//! Modules.

use std::ffi::{OsStr, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt;

use mpsshim_proto::cuda::{
    CUDA_ERROR_FILE_NOT_FOUND, CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUresult,
};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::JitOption;

use super::entries;
use crate::context;
use crate::ffi::{In, Out, Status, Text, guard};
use crate::image::Image;
use crate::library;
use crate::module::{self, Load};
use crate::submit::session;

entries! {
    cuModuleLoad => load,
    cuModuleLoadData => load_data,
    cuModuleLoadDataEx => load_data_ex,
    cuModuleLoadFatBinary => load_data,
    cuModuleUnload => unload,
    cuModuleGetFunction => get_function,
    cuModuleGetGlobal_v2 => get_global,
    cuModuleGetFunctionCount => get_function_count,
    cuModuleEnumerateFunctions => enumerate_functions,
}

/// `CUjit_option`s that are not plain numbers for the compiler.
const WALL_TIME: u32 = 2;
const INFO_LOG_BUFFER: u32 = 3;
const INFO_LOG_LEN: u32 = 4;
const ERROR_LOG_BUFFER: u32 = 5;
const ERROR_LOG_LEN: u32 = 6;
/// Names and addresses in arrays; deprecated since CUDA 12 and dropped.
const ARRAYS: [u32; 7] = [17, 18, 19, 25, 26, 27, 28];

/// The options of a load: names, values and their count, as the program gave them.
#[derive(Clone, Copy)]
pub struct Options {
    names: In<u32>,
    values: Out<*mut c_void>,
    count: u32,
}

/// Where a log goes.
#[derive(Clone, Copy, Default)]
struct Log {
    buffer: Option<*mut u8>,
    len: u32,
    /// Position of the option that says, and is told, the length.
    len_at: Option<usize>,
}

impl Log {
    fn write(self, text: &[u8], values: Out<*mut c_void>) -> Status {
        let Some(buffer) = self.buffer.filter(|buffer| !buffer.is_null()) else {
            return Ok(());
        };
        if self.len == 0 {
            return Ok(());
        }
        // One byte stays for the NUL.
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        let len = text.len().min(self.len as usize - 1);
        // SAFETY: the program gave a buffer of `self.len` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, len);
            buffer.add(len).write(0);
        }
        match self.len_at {
            Some(at) => values.set_at(at, (len + usize::from(len > 0)) as *mut c_void),
            None => Ok(()),
        }
    }
}

/// No options.
pub const NO_OPTIONS: Options = Options {
    names: In::none(),
    values: Out::none(),
    count: 0,
};

impl Options {
    /// What a program gave.
    pub fn new(count: u32, names: In<u32>, values: Out<*mut c_void>) -> Options {
        Options {
            names,
            values,
            count,
        }
    }
}

/// Loads an image with the program's options: a module into the current context.
pub fn load_image(kind: Kind, content: &[u8], options: Options) -> Status<u64> {
    let session = session()?;
    let context = match kind {
        Kind::Library => None,
        _ => Some(context::current()?),
    };
    let (mut info, mut error) = (Log::default(), Log::default());
    let mut wall_time_at = None;
    let mut numbers = Vec::new();
    for at in 0..options.count as usize {
        let option = options.names.at(at)?;
        let value = options.values.get_at(at)?;
        match option {
            WALL_TIME => wall_time_at = Some(at),
            INFO_LOG_BUFFER => info.buffer = Some(value.cast()),
            ERROR_LOG_BUFFER => error.buffer = Some(value.cast()),
            INFO_LOG_LEN => (info.len, info.len_at) = (value as usize as u32, Some(at)),
            ERROR_LOG_LEN => (error.len, error.len_at) = (value as usize as u32, Some(at)),
            _ if ARRAYS.contains(&option) => {
                tracing::warn!(option, "option of an image dropped");
            }
            _ => numbers.push(JitOption {
                option,
                pad: 0,
                value: value as u64,
            }),
        }
    }
    let wanted = |log: &Log| if log.buffer.is_some() { log.len } else { 0 };
    let load = Load {
        content,
        options: &numbers,
        info_log: wanted(&info),
        error_log: wanted(&error),
    };
    let (status, loaded) = match context {
        Some(context) => module::load(session, context, load),
        None => library::load(session, load),
    };
    info.write(&loaded.info_log, options.values)?;
    error.write(&loaded.error_log, options.values)?;
    if let Some(at) = wall_time_at {
        let bits = loaded.wall_time_ms.to_bits() as usize;
        options.values.set_at(at, bits as *mut c_void)?;
    }
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
    let path = OsStr::from_bytes(name.get()?.to_bytes());
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
        out.required()?;
        out.set(load_file(Kind::Module, name, NO_OPTIONS)?)
    })
}

/// `cuModuleLoadData`, `cuModuleLoadFatBinary`.
pub unsafe extern "C" fn load_data(out: Out<u64>, image: In<u8>) -> CUresult {
    guard(|| {
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
        out.required()?;
        out.set(module::get_function(session()?, module, name.get()?)?)
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
        if address.is_null() && len.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        global_of(parent, name, address, len)
    })
}

/// Address and size of a module's global.
pub fn global_of(module: u64, name: Text, address: Out<CUdeviceptr>, len: Out<usize>) -> Status {
    let (start, bytes) = module::get_global(session()?, module, name.get()?)?;
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
