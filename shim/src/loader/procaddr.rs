//! `cuGetProcAddress`: which function serves a name for a program of a given CUDA version.
//!
//! The result is always the shim's own export if it has one, never a function behind it, so that a pointer taken before
//! `cuInit` stays valid whatever `cuInit` decides.
//!
//! With a daemon the table answers: a name that it lacks does not exist. Without one the genuine driver answers, which
//! may be older or newer than the table.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use mpsshim_api::cuda::{
    CU_GET_PROC_ADDRESS_SUCCESS, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
    CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND,
    CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUresult,
};
use mpsshim_api::table::{self, Lookup};

use crate::mode;

use crate::loader::{exports, genuine, symbols};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`. `CU_GET_PROC_ADDRESS_LEGACY_STREAM`, 1, changes nothing, not even
/// beside it.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;
/// Both flags.
const ALL_FLAGS: u64 = 3;

/// An answer from the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The call's status.
    pub code: CUresult,
    /// The search's status, a `CUdriverProcAddressQueryResult`; for a successful call.
    pub status: u32,
    /// The exported symbol whose address is the answer.
    pub symbol: Option<&'static str>,
}

/// Answers a search from the table, as driver 580 does (`scripts/gpu/procaddress.py` compares the two). A search
/// that finds nothing is a successful call of `cuGetProcAddress_v2`; flags that do not exist and a version newer than
/// the table are invalid; a negative version stands for the newest.
pub fn answer(name: &str, cuda_version: c_int, flags: u64) -> Answer {
    let found = |status, symbol| Answer {
        code: CUDA_SUCCESS,
        status,
        symbol,
    };
    let version = u32::try_from(cuda_version).unwrap_or(table::CUDA_VERSION);
    if flags > ALL_FLAGS || version > table::CUDA_VERSION {
        return Answer {
            code: CUDA_ERROR_INVALID_VALUE,
            status: CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
            symbol: None,
        };
    }
    match table::lookup(name, version, flags & PER_THREAD_DEFAULT_STREAM != 0) {
        Lookup::Found(symbol) => found(CU_GET_PROC_ADDRESS_SUCCESS, Some(symbol)),
        Lookup::NotFound => found(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, None),
        Lookup::VersionNotSufficient => found(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, None),
    }
}

/// `cuGetProcAddress` as of CUDA 11.3: it has no status to say that a search found nothing, so it returns
/// `CUDA_ERROR_NOT_FOUND` and writes nothing.
///
/// # Safety
/// As the CUDA function: `symbol` is null or a C string, `function` null or writable.
pub unsafe extern "C" fn get_proc_address(
    symbol: *const c_char,
    function: *mut *mut c_void,
    cuda_version: c_int,
    flags: u64,
) -> CUresult {
    type Genuine = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> CUresult;
    if !from_genuine() {
        // SAFETY: the caller's promise.
        return unsafe { from_table(symbol, function, cuda_version, flags, None) };
    }
    let Some(genuine) = genuine::symbol("cuGetProcAddress") else {
        return CUDA_ERROR_NOT_SUPPORTED;
    };
    // SAFETY: the driver's function of this name has this signature.
    let genuine = unsafe { std::mem::transmute::<*const (), Genuine>(genuine) };
    // SAFETY: the caller's arguments, unchanged.
    let code = unsafe { genuine(symbol, function, cuda_version, flags) };
    // SAFETY: the caller's promise.
    unsafe { own_in_place_of_genuine(code, symbol, function) }
}

/// `cuGetProcAddress` as of CUDA 12.0 (`cuGetProcAddress_v2`).
///
/// # Safety
/// As the CUDA function: `symbol` is null or a C string, `function` and `status` null or writable.
pub unsafe extern "C" fn get_proc_address_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    cuda_version: c_int,
    flags: u64,
    status: *mut u32,
) -> CUresult {
    type Genuine =
        unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut u32) -> CUresult;
    if !from_genuine() {
        // SAFETY: the caller's promise.
        return unsafe { from_table(symbol, function, cuda_version, flags, Some(status)) };
    }
    let Some(genuine) = genuine::symbol("cuGetProcAddress_v2") else {
        return CUDA_ERROR_NOT_SUPPORTED;
    };
    // SAFETY: the driver's function of this name has this signature.
    let genuine = unsafe { std::mem::transmute::<*const (), Genuine>(genuine) };
    // SAFETY: the caller's arguments, unchanged.
    let code = unsafe { genuine(symbol, function, cuda_version, flags, status) };
    // SAFETY: the caller's promise.
    unsafe { own_in_place_of_genuine(code, symbol, function) }
}

/// Whether the genuine driver answers: the program runs on it, or will as things stand.
fn from_genuine() -> bool {
    mode::goes_to_genuine() && genuine::driver().is_ok()
}

/// `status`: `None` for the call without a status argument.
///
/// # Safety
/// `symbol` is null or a C string, `function` and `status` null or writable.
unsafe fn from_table(
    symbol: *const c_char,
    function: *mut *mut c_void,
    cuda_version: c_int,
    flags: u64,
    status: Option<*mut u32>,
) -> CUresult {
    if symbol.is_null() || function.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so a C string.
    let name = unsafe { CStr::from_ptr(symbol) };
    // A name that is not UTF-8 is no entry point's, and neither is the empty one.
    let answer = answer(name.to_str().unwrap_or(""), cuda_version, flags);
    if answer.code.is_ok() {
        if status.is_none() && answer.symbol.is_none() {
            return CUDA_ERROR_NOT_FOUND;
        }
        let target = answer
            .symbol
            .and_then(symbols::index_of)
            .map(exports::exported);
        // SAFETY: not null, so writable.
        unsafe {
            *function = target.map_or(ptr::null_mut(), |target| target.address().cast_mut().cast())
        };
        if let Some(status) = status.filter(|status| !status.is_null()) {
            // SAFETY: not null, so writable.
            unsafe { *status = answer.status };
        }
    }
    answer.code
}

/// Puts the shim's export in the place of the genuine driver's function of the same symbol.
///
/// # Safety
/// The genuine call took these arguments and returned `code`.
unsafe fn own_in_place_of_genuine(
    code: CUresult,
    symbol: *const c_char,
    function: *mut *mut c_void,
) -> CUresult {
    if !code.is_ok() || symbol.is_null() || function.is_null() {
        return code;
    }
    // SAFETY: not null, and the genuine driver read it as a C string.
    let name = unsafe { CStr::from_ptr(symbol) }.to_str().unwrap_or("");
    // SAFETY: not null, and the genuine driver wrote to it.
    let found: *const () = unsafe { *function }.cast_const().cast();
    let own = table::rows_of(name)
        .iter()
        .flat_map(|row| [row.legacy, row.per_thread].into_iter().flatten())
        .find(|symbol| genuine::symbol(symbol) == Some(found))
        .and_then(symbols::index_of);
    if let Some(index) = own {
        // SAFETY: as above.
        unsafe { *function = exports::exported(index).address().cast_mut().cast() };
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEGACY_STREAM: u64 = 1;

    fn found(symbol: &'static str) -> Answer {
        Answer {
            code: CUDA_SUCCESS,
            status: CU_GET_PROC_ADDRESS_SUCCESS,
            symbol: Some(symbol),
        }
    }

    #[test]
    fn flags_choose_the_default_stream() {
        assert_eq!(answer("cuLaunchKernel", 12000, 0), found("cuLaunchKernel"));
        assert_eq!(
            answer("cuLaunchKernel", 12000, LEGACY_STREAM),
            found("cuLaunchKernel")
        );
        assert_eq!(
            answer("cuLaunchKernel", 12000, PER_THREAD_DEFAULT_STREAM),
            found("cuLaunchKernel_ptsz")
        );
        assert_eq!(
            answer("cuLaunchKernel", 12000, ALL_FLAGS),
            found("cuLaunchKernel_ptsz")
        );
        assert_eq!(
            answer("cuLaunchKernel", 12000, 4).code,
            CUDA_ERROR_INVALID_VALUE
        );
        assert_eq!(
            answer("cuLaunchKernel", 12000, 1 << 40).code,
            CUDA_ERROR_INVALID_VALUE
        );
    }

    #[test]
    fn a_search_that_finds_nothing_is_a_successful_call() {
        let nothing = |status| Answer {
            code: CUDA_SUCCESS,
            status,
            symbol: None,
        };
        assert_eq!(
            answer("cuNoSuchCall", 12000, 0),
            nothing(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)
        );
        assert_eq!(
            answer("", 12000, 0),
            nothing(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)
        );
        assert_eq!(
            answer("cuLibraryLoadData", 11080, 0),
            nothing(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT)
        );
        assert_eq!(
            answer("cuInit", 0, 0),
            nothing(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT)
        );
        assert_eq!(answer("cuMemcpyHtoD", -1, 0), found("cuMemcpyHtoD_v2"));
    }

    #[test]
    fn a_version_newer_than_the_table_is_invalid() {
        assert_eq!(answer("cuInit", 13000, 0), found("cuInit"));
        assert_eq!(answer("cuInit", 13010, 0).code, CUDA_ERROR_INVALID_VALUE);
    }
}
