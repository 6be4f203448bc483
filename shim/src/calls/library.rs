//! Libraries and their kernels.
//!
//! A kernel's handle serves wherever a function's does, and the library's wherever a module's does.

use std::ffi::{c_char, c_void};

use mpsshim_proto::cuda::{CUDA_ERROR_INVALID_HANDLE, CUdevice, CUfunction_attribute, CUresult};
use mpsshim_proto::handle::{Handle, Kind};

use super::entries;
use super::function::param_info;
use super::module::{
    Options, enumerate_functions, get_function_count, get_global, load_file, load_memory,
};
use crate::ffi::{In, Out, Text, guard};
use crate::module;
use crate::submit::session;

entries! {
    cuLibraryLoadData => load_data,
    cuLibraryLoadFromFile => load_from_file,
    cuLibraryUnload => unload,
    cuLibraryGetKernel => get_kernel,
    cuLibraryGetModule => get_module,
    cuLibraryGetGlobal => get_global,
    cuLibraryGetKernelCount => get_function_count,
    cuLibraryEnumerateKernels => enumerate_functions,
    cuKernelGetFunction => kernel_get_function,
    cuKernelGetLibrary => kernel_get_library,
    cuKernelGetName => kernel_get_name,
    cuKernelGetParamInfo => kernel_get_param_info,
    cuKernelGetAttribute => kernel_get_attribute,
    cuKernelSetAttribute => kernel_set_attribute,
    cuKernelSetCacheConfig => kernel_set_cache_config,
}

/// `cuLibraryLoadData`. Library options say how code may be found and kept; none changes what is loaded.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn load_data(
    out: Out<u64>,
    image: In<u8>,
    jit_names: In<u32>,
    jit_values: Out<*mut c_void>,
    jit_count: u32,
    _names: In<u32>,
    _values: In<*mut c_void>,
    _count: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
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
    _names: In<u32>,
    _values: In<*mut c_void>,
    _count: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        let options = Options::new(jit_count, jit_names, jit_values);
        out.set(load_file(Kind::Library, name, options)?)
    })
}

/// `cuLibraryUnload`.
pub unsafe extern "C" fn unload(library: u64) -> CUresult {
    guard(|| match Handle(library).kind() {
        Some(Kind::Library) => module::unload(session()?, library),
        _ => Err(CUDA_ERROR_INVALID_HANDLE),
    })
}

/// `cuLibraryGetKernel`.
pub unsafe extern "C" fn get_kernel(out: Out<u64>, library: u64, name: Text) -> CUresult {
    guard(|| {
        out.required()?;
        if !module::is_library(library) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        out.set(module::get_function(session()?, library, name.get()?)?)
    })
}

/// `cuLibraryGetModule`.
pub unsafe extern "C" fn get_module(out: Out<u64>, library: u64) -> CUresult {
    guard(|| {
        if !module::is_library(library) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        out.set(library)
    })
}

/// `cuKernelGetFunction`.
pub unsafe extern "C" fn kernel_get_function(out: Out<u64>, kernel: u64) -> CUresult {
    guard(|| out.set(module::function(kernel)?.handle()))
}

/// `cuKernelGetLibrary`.
pub unsafe extern "C" fn kernel_get_library(out: Out<u64>, kernel: u64) -> CUresult {
    guard(|| out.set(module::function(kernel)?.parent()))
}

/// `cuKernelGetName`. The name lives as long as the process.
pub unsafe extern "C" fn kernel_get_name(out: Out<*const c_char>, kernel: u64) -> CUresult {
    guard(|| out.set(module::function(kernel)?.layout().name.as_ptr()))
}

/// `cuKernelGetParamInfo`.
pub unsafe extern "C" fn kernel_get_param_info(
    kernel: u64,
    index: usize,
    offset: Out<usize>,
    size: Out<usize>,
) -> CUresult {
    guard(|| param_info(module::function(kernel)?, index, offset, size))
}

/// `cuKernelGetAttribute`.
pub unsafe extern "C" fn kernel_get_attribute(
    out: Out<i32>,
    attribute: CUfunction_attribute,
    kernel: u64,
    _device: CUdevice,
) -> CUresult {
    guard(|| {
        out.required()?;
        let kernel = module::function(kernel)?;
        out.set(module::attribute(session()?, kernel, attribute)?)
    })
}

/// `cuKernelSetAttribute`.
pub unsafe extern "C" fn kernel_set_attribute(
    attribute: CUfunction_attribute,
    value: i32,
    kernel: u64,
    _device: CUdevice,
) -> CUresult {
    guard(|| module::set_attribute(session()?, module::function(kernel)?, attribute, value))
}

/// `cuKernelSetCacheConfig`: a preference that devices with one cache for both do not need.
pub unsafe extern "C" fn kernel_set_cache_config(
    kernel: u64,
    _config: u32,
    _device: CUdevice,
) -> CUresult {
    guard(|| module::function(kernel).map(drop))
}
