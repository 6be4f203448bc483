//! The C library's functions behind those that this library interposes.

use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A symbol of the next object behind this one, looked up once.
#[derive(Debug)]
pub struct Symbol {
    name: &'static CStr,
    found: AtomicPtr<()>,
}

impl Symbol {
    /// The symbol of this name.
    pub const fn new(name: &'static CStr) -> Symbol {
        Symbol {
            name,
            found: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Its address. A missing symbol ends the process, as the loader would end a program that refers to it.
    #[inline]
    pub fn address(&self) -> *mut () {
        let known = self.found.load(Ordering::Relaxed);
        if known.is_null() {
            return self.find();
        }
        known
    }

    /// Looks it up ahead. It may be missing.
    pub fn look_up(&self) -> *mut () {
        // SAFETY: a C string; RTLD_NEXT is meant for this use.
        let found: *mut () = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) }.cast();
        // Threads that come here together find the same address.
        self.found.store(found, Ordering::Relaxed);
        found
    }

    #[cold]
    fn find(&self) -> *mut () {
        let found = self.look_up();
        if found.is_null() {
            // SAFETY: ends the process.
            unsafe { libc::abort() };
        }
        found
    }
}
