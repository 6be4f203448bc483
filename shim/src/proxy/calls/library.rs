//! Libraries and their kernels.
//!
//! A kernel's handle is valid wherever a function's is, and denotes the kernel in the current context.

use std::ffi::{c_char, c_void};

use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUdevice, CUdeviceptr,
    CUfunction_attribute, CUresult,
};
use mpsshim_proto::handle::Kind;

use super::entries;
use super::function::param_info;
use super::module::{global_of, load_file, load_memory};
use crate::ffi::{In, Out, Status, Text, guard};
use crate::proxy::jit::Options;
use crate::proxy::submit::session;
use crate::proxy::{context, library};

entries! {
    cuLibraryLoadData(_, _, _, _, _, _, _, _) => load_data,
    cuLibraryLoadFromFile(_, _, _, _, _, _, _, _) => load_from_file,
    cuLibraryUnload(_) => unload,
    cuLibraryGetKernel(_, _, _) => get_kernel,
    cuLibraryGetModule(_, _) => get_module,
    cuLibraryGetGlobal(_, _, _, _) => get_global,
    cuLibraryGetManaged(_, _, _, _) => get_managed,
    cuLibraryGetUnifiedFunction(_, _, _) => get_unified_function,
    cuLibraryGetKernelCount(_, _) => get_kernel_count,
    cuLibraryEnumerateKernels(_, _, _) => enumerate_kernels,
    cuKernelGetFunction(_, _) => kernel_get_function,
    cuKernelGetLibrary(_, _) => kernel_get_library,
    cuKernelGetName(_, _) => kernel_get_name,
    cuKernelGetParamInfo(_, _, _, _) => kernel_get_param_info,
    cuKernelGetAttribute(_, _, _, _) => kernel_get_attribute,
    cuKernelSetAttribute(_, _, _, _) => kernel_set_attribute,
    cuKernelSetCacheConfig(_, _, _) => kernel_set_cache_config,
}

/// `CU_LIBRARY_NUM_OPTIONS`.
const LIBRARY_OPTIONS: u32 = 2;

fn check_options(names: In<u32>, count: u32) -> Status {
    for at in 0..count.min(LIBRARY_OPTIONS + 1) as usize {
        if names.at(at)? >= LIBRARY_OPTIONS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    Ok(())
}

/// `cuLibraryLoadData`. Library options control how code is found and kept; none changes the loaded code.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn load_data(
    out: Out<u64>,
    image: In<u8>,
    jit_names: In<u32>,
    jit_values: Out<*mut c_void>,
    jit_count: u32,
    names: In<u32>,
    _values: In<*mut c_void>,
    count: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        check_options(names, count)?;
        let options = Options::new(jit_count, jit_names, jit_values);
        out.set(load_memory(Kind::Library, image, options)?)
    })
}

/// `cuLibraryLoadFromFile`.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn load_from_file(
    out: Out<u64>,
    name: Text,
    jit_names: In<u32>,
    jit_values: Out<*mut c_void>,
    jit_count: u32,
    names: In<u32>,
    _values: In<*mut c_void>,
    count: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        check_options(names, count)?;
        let options = Options::new(jit_count, jit_names, jit_values);
        out.set(load_file(Kind::Library, name, options)?)
    })
}

/// `cuLibraryUnload`.
pub unsafe extern "C" fn unload(handle: u64) -> CUresult {
    guard(|| library::unload(session()?, handle))
}

/// `cuLibraryGetKernel`.
pub unsafe extern "C" fn get_kernel(out: Out<u64>, handle: u64, name: Text) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(library::get_kernel(session()?, handle, name.get()?)?)
    })
}

/// `CUDA_ERROR_INVALID_HANDLE` for 0, which is checked before the context; unknown handles are checked after it.
fn given(handle: u64) -> Status {
    if handle == 0 {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(())
}

/// `cuLibraryGetModule`.
pub unsafe extern "C" fn get_module(out: Out<u64>, handle: u64) -> CUresult {
    guard(|| {
        out.required()?;
        given(handle)?;
        out.set(library::module_in(session()?, handle, context::current()?)?)
    })
}

/// `cuLibraryGetGlobal`: the variable of the current context.
pub unsafe extern "C" fn get_global(
    address: Out<CUdeviceptr>,
    len: Out<usize>,
    handle: u64,
    name: Text,
) -> CUresult {
    guard(|| {
        if address.is_null() && len.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        name.get()?;
        given(handle)?;
        let module = library::module_in(session()?, handle, context::current()?)?;
        global_of(module, name, address, len)
    })
}

/// `cuLibraryGetManaged`.
pub unsafe extern "C" fn get_managed(
    address: Out<CUdeviceptr>,
    len: Out<usize>,
    handle: u64,
    name: Text,
) -> CUresult {
    guard(|| {
        if address.is_null() && len.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (start, bytes) = library::managed(session()?, handle, name.get()?)?;
        address.set_if_wanted(start);
        len.set_if_wanted(bytes as usize);
        Ok(())
    })
}

/// `cuLibraryGetUnifiedFunction`: no device here has functions that the CPU and it can both call. The genuine driver
/// says so in the same way.
pub unsafe extern "C" fn get_unified_function(
    out: Out<*const c_void>,
    handle: u64,
    name: Text,
) -> CUresult {
    guard(|| {
        out.required()?;
        name.get()?;
        library::exists(handle)?;
        Err(CUDA_ERROR_INVALID_VALUE)
    })
}

/// `cuLibraryGetKernelCount`.
pub unsafe extern "C" fn get_kernel_count(out: Out<u32>, handle: u64) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(library::names(session()?, handle)?.len() as u32)
    })
}

/// `cuLibraryEnumerateKernels`.
pub unsafe extern "C" fn enumerate_kernels(out: Out<u64>, count: u32, handle: u64) -> CUresult {
    guard(|| {
        out.required()?;
        let kernels = library::kernels(session()?, handle, count as usize)?;
        for (index, kernel) in kernels.into_iter().enumerate() {
            out.set_at(index, kernel)?;
        }
        Ok(())
    })
}

/// `cuKernelGetFunction`: the kernel's function in the current context.
pub unsafe extern "C" fn kernel_get_function(out: Out<u64>, kernel: u64) -> CUresult {
    guard(|| {
        out.required()?;
        let kernel = library::kernel(kernel)?;
        session()?.check()?;
        out.set(library::function(kernel, context::current()?)?.handle())
    })
}

/// `cuKernelGetLibrary`.
pub unsafe extern "C" fn kernel_get_library(out: Out<u64>, kernel: u64) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(library::kernel(kernel)?.library())
    })
}

/// `cuKernelGetName`. The name lives as long as the process.
pub unsafe extern "C" fn kernel_get_name(out: Out<*const c_char>, kernel: u64) -> CUresult {
    guard(|| {
        out.required()?;
        if kernel == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.set(library::kernel(kernel)?.name().as_ptr())
    })
}

/// `cuKernelGetParamInfo`.
pub unsafe extern "C" fn kernel_get_param_info(
    kernel: u64,
    index: usize,
    offset: Out<usize>,
    size: Out<usize>,
) -> CUresult {
    guard(|| {
        if kernel == 0 || offset.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        context::current()?;
        let layout = library::layout(session()?, library::kernel(kernel)?)?;
        param_info(layout, index, offset, size)
    })
}

/// `cuKernelGetAttribute`.
pub unsafe extern "C" fn kernel_get_attribute(
    out: Out<i32>,
    attribute: CUfunction_attribute,
    kernel: u64,
    device: CUdevice,
) -> CUresult {
    guard(|| {
        out.required()?;
        let kernel = library::kernel(kernel)?;
        context::device(device)?;
        out.set(library::attribute(session()?, kernel, attribute, device)?)
    })
}

/// `cuKernelSetAttribute`.
pub unsafe extern "C" fn kernel_set_attribute(
    attribute: CUfunction_attribute,
    value: i32,
    kernel: u64,
    device: CUdevice,
) -> CUresult {
    guard(|| {
        let kernel = library::kernel(kernel)?;
        context::device(device)?;
        library::set_attribute(session()?, kernel, attribute, value, device)
    })
}

/// `cuKernelSetCacheConfig`: a preference that devices with one cache for both do not need.
pub unsafe extern "C" fn kernel_set_cache_config(
    kernel: u64,
    config: u32,
    device: CUdevice,
) -> CUresult {
    guard(|| {
        library::kernel(kernel)?;
        context::device(device)?;
        if config > 3 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    })
}
