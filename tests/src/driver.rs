//! The driver API as a program without bindings calls it: `dlopen("libcuda.so.1")`, then every function by name.

use std::ffi::{CString, c_void};
use std::sync::OnceLock;

struct Library(*mut c_void);
// SAFETY: a handle of dlopen may be used by any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

static DRIVER: OnceLock<Library> = OnceLock::new();

/// The address of an entry point.
///
/// # Panics
/// When there is no driver, or it has no such function.
pub fn symbol(name: &str) -> *mut c_void {
    let driver = DRIVER.get_or_init(|| {
        // SAFETY: a NUL-ended name.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "no libcuda.so.1");
        Library(handle)
    });
    let text = CString::new(name).expect("no NUL");
    // SAFETY: an open handle and a NUL-ended name.
    let address = unsafe { libc::dlsym(driver.0, text.as_ptr()) };
    assert!(!address.is_null(), "the driver has no {name}");
    address
}

/// The type to be inferred for an argument.
#[doc(hidden)]
#[macro_export]
macro_rules! any {
    ($e:expr) => {
        _
    };
}

/// Calls an entry point by its exported name; the arguments' types must be the C ones.
#[macro_export]
macro_rules! cu {
    ($name:ident $(, $arg:expr)* $(,)?) => {{
        let address = $crate::driver::symbol(stringify!($name));
        // SAFETY: the caller writes the arguments as cuda.h declares them.
        #[allow(clippy::missing_transmute_annotations)]
        let result: mpsshim_api::cuda::CUresult = unsafe {
            let function = std::mem::transmute::<
                *mut std::ffi::c_void,
                unsafe extern "C" fn($($crate::any!($arg)),*) -> mpsshim_api::cuda::CUresult,
            >(address);
            function($($arg),*)
        };
        result
    }};
}
