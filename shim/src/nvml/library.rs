//! The genuine NVML of the process, and its functions.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::status;
use crate::loader::{dlopen, dlsym};

const NAME: &CStr = c"libnvidia-ml.so.1";

/// Its handle. It stays loaded once it is known, so that addresses of its functions stay valid.
static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// A genuine function.
#[derive(Debug)]
pub struct Function {
    /// Its name.
    pub name: &'static CStr,
    found: AtomicPtr<()>,
}

impl Function {
    /// The function of this name.
    pub const fn new(name: &'static CStr) -> Function {
        Function {
            name,
            found: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Its address.
    ///
    /// # Errors
    /// NVML's status for a library, or a function, that is not found.
    pub fn address(&self) -> Result<*mut (), c_int> {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return Ok(known);
        }
        let handle = handle().ok_or(status::LIBRARY_NOT_FOUND)?;
        let found = dlsym::look_up(handle, self.name);
        if found.is_null() {
            return Err(status::FUNCTION_NOT_FOUND);
        }
        // Threads that come here together find the same address.
        self.found.store(found, Ordering::Relaxed);
        Ok(found)
    }
}

/// A C string that ends with the NUL in `text`.
pub const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("no NUL at the end"),
    }
}

/// The library that the program has loaded.
fn handle() -> Option<*mut c_void> {
    let known = HANDLE.load(Ordering::Acquire);
    if !known.is_null() {
        return Some(known);
    }
    // A program that is linked to it, or one of its libraries.
    keep(NAME)
}

/// Takes the library that has this function for the genuine one, unless there is one.
pub fn adopt(function: *mut ()) {
    if !HANDLE.load(Ordering::Acquire).is_null() {
        return;
    }
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: writes one `Dl_info`.
    let is_known = unsafe { libc::dladdr(function.cast_const().cast(), info.as_mut_ptr()) } != 0;
    // SAFETY: zero is a valid value.
    let file = unsafe { info.assume_init() }.dli_fname;
    if is_known && !file.is_null() {
        // SAFETY: a C string that lives as long as the library is loaded.
        keep(unsafe { CStr::from_ptr(file) });
    }
}

/// Keeps a library loaded that is loaded now.
fn keep(name: &CStr) -> Option<*mut c_void> {
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: loads nothing, so that nothing is run.
    let handle = unsafe { dlopen::open(name, flags) };
    if handle.is_null() {
        return None;
    }
    let set = HANDLE.compare_exchange(
        ptr::null_mut(),
        handle,
        // Orders nothing: the library was loaded before.
        Ordering::AcqRel,
        Ordering::Acquire,
    );
    Some(set.map_or_else(|first| first, |_| handle))
}
