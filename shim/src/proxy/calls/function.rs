//! Functions.

use std::ffi::c_char;

use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUfunction_attribute, CUresult,
};

use super::entries;
use crate::ffi::{Out, Status, guard};
use crate::proxy::module::{self, FunctionRef, Layout};
use crate::proxy::submit::session;

entries! {
    cuFuncGetAttribute(_, _, _) => get_attribute,
    cuFuncSetAttribute(_, _, _) => set_attribute,
    cuFuncSetCacheConfig(_, _) => set_cache_config,
    cuFuncSetSharedMemConfig(_, _) => set_shared_config,
    cuFuncGetModule(_, _) => get_module,
    cuFuncGetName(_, _) => get_name,
    cuFuncGetParamInfo(_, _, _, _) => get_param_info,
    cuFuncIsLoaded(_, _) => is_loaded,
    cuFuncLoad(_) => load,
}

/// Resolves a function; kernels are refused here, as natively.
fn of_handle(handle: u64) -> Status<FunctionRef> {
    module::live_function(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// As [`of_handle`]; NULL is an invalid argument of some calls, as natively.
fn not_null(handle: u64) -> Status<FunctionRef> {
    if handle == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    of_handle(handle)
}

/// `cuFuncGetAttribute`.
pub unsafe extern "C" fn get_attribute(
    out: Out<i32>,
    attribute: CUfunction_attribute,
    function: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        let function = of_handle(function)?;
        out.set(module::attribute(session()?, function, attribute)?)
    })
}

/// `cuFuncSetAttribute`.
pub unsafe extern "C" fn set_attribute(
    function: u64,
    attribute: CUfunction_attribute,
    value: i32,
) -> CUresult {
    guard(|| module::set_own_attribute(session()?, of_handle(function)?, attribute, value))
}

/// `cuFuncSetCacheConfig`: a preference that devices with one cache for both do not need.
pub unsafe extern "C" fn set_cache_config(function: u64, config: u32) -> CUresult {
    guard(|| {
        of_handle(function)?;
        if config > 3 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    })
}

/// `cuFuncSetSharedMemConfig`: without effect on current devices.
pub unsafe extern "C" fn set_shared_config(function: u64, config: u32) -> CUresult {
    guard(|| {
        of_handle(function)?;
        if config > 2 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    })
}

/// `cuFuncGetModule`.
pub unsafe extern "C" fn get_module(out: Out<u64>, function: u64) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(not_null(function)?.parent())
    })
}

/// `cuFuncGetName`. The name lives as long as the process.
pub unsafe extern "C" fn get_name(out: Out<*const c_char>, function: u64) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(not_null(function)?.layout().name.as_ptr())
    })
}

/// Offset and size of a parameter; `CUDA_ERROR_INVALID_VALUE` past the last.
pub fn param_info(layout: &Layout, index: usize, offset: Out<usize>, size: Out<usize>) -> Status {
    let param = layout.params.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    offset.set(param.offset as usize)?;
    size.set_if_wanted(param.size as usize);
    Ok(())
}

/// `cuFuncGetParamInfo`.
pub unsafe extern "C" fn get_param_info(
    function: u64,
    index: usize,
    offset: Out<usize>,
    size: Out<usize>,
) -> CUresult {
    guard(|| {
        offset.required()?;
        param_info(not_null(function)?.layout(), index, offset, size)
    })
}

/// `cuFuncIsLoaded`: a function with a handle is always loaded.
pub unsafe extern "C" fn is_loaded(out: Out<u32>, function: u64) -> CUresult {
    guard(|| {
        out.required()?;
        of_handle(function)?;
        out.set(1)
    })
}

/// `cuFuncLoad`.
pub unsafe extern "C" fn load(function: u64) -> CUresult {
    guard(|| of_handle(function).map(drop))
}
