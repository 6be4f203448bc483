//! Tables of the driver's functions, filled by name.

use mpsshim_api::cuda::{CUDA_ERROR_NOT_SUPPORTED, CUresult};
use std::ffi::{CString, c_void};
use thiserror::Error;

/// Reasons why the driver cannot be used.
#[derive(Debug, Error)]
pub enum DriverError {
    /// No library could be opened.
    #[error(
        "cannot open the CUDA driver {0}: {1}; set MPSSHIM_CUDA_LIBRARY to the genuine libcuda.so.1"
    )]
    Open(String, String),
    /// A required function is missing.
    #[error("the CUDA driver {0} has no {1}: it is too old")]
    Missing(String, &'static str),
    /// A preloaded mpsshim was found instead.
    #[error("{0} is mpsshim itself, not a CUDA driver; unset LD_PRELOAD for the server")]
    Shim(String),
}

/// Returns the address of a function by its name, null if it is missing.
pub type Find<'a> = dyn Fn(&str) -> *mut c_void + 'a;

/// Replaces a missing function of any signature: in the C ABI the caller cleans up the arguments.
pub extern "C" fn unsupported() -> CUresult {
    CUDA_ERROR_NOT_SUPPORTED
}

/// The address of a function in a library, null if it is missing.
pub fn symbol(handle: *mut c_void, name: &str) -> *mut c_void {
    let name = CString::new(name).expect("symbol names have no NUL");
    // SAFETY: an open handle and a NUL-terminated name.
    unsafe { libc::dlsym(handle, name.as_ptr()) }
}

macro_rules! functions {
    ($(#[$meta:meta])* $table:ident, $optional:expr; $($(#[$doc:meta])* $method:ident = $symbol:literal ( $($arg:ident : $ty:ty),* $(,)? );)*) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $table {
            $($method: unsafe extern "C" fn($($ty),*) -> CUresult,)*
        }
        impl $table {
            /// `find` returns the address of a function, null if it is missing; `path` is for errors.
            pub(super) fn load(find: &Find<'_>, path: &str) -> Result<$table, DriverError> {
                Ok($table {
                    $($method: {
                        let mut address = find($symbol);
                        if address.is_null() {
                            if !$optional($symbol) { return Err(DriverError::Missing(path.to_owned(), $symbol)); }
                            address = unsupported as *mut c_void;
                        }
                        // SAFETY: the exported function of this name has this C signature (cuda.h, CUDA 13.0).
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> CUresult>(address) }
                    },)*
                })
            }
            /// Names and signatures of all functions.
            #[cfg(test)]
            pub(super) fn signatures() -> Vec<mpsshim_signatures::Named> {
                vec![$(($symbol, mpsshim_signatures::signature!($($ty),*))),*]
            }
            $(
                $(#[$doc])*
                #[doc = concat!("`", $symbol, "`.")]
                #[inline]
                #[allow(clippy::too_many_arguments, reason = "the driver has them")]
                pub fn $method(&self $(, $arg: $ty)*) -> Result<(), CUresult> {
                    // SAFETY: references are valid for the call; host addresses are checked by the callers, see the
                    // module's documentation; handles and device addresses are checked by the driver.
                    unsafe { (self.$method)($($arg),*) }.ok()
                }
            )*
        }
    };
}
