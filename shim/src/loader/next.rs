//! The C library's functions behind the interposed ones.

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
        self.address_or(|_| None)
    }

    /// Its address, or that of a replacement for the name if it is missing.
    #[inline]
    pub fn address_or(&self, replacement: fn(&CStr) -> Option<*mut ()>) -> *mut () {
        let known = self.found.load(Ordering::Relaxed);
        if known.is_null() {
            return self.find(replacement);
        }
        known
    }

    /// Looks it up ahead, or a replacement for the name. Both may be missing.
    pub fn look_up_or(&self, replacement: fn(&CStr) -> Option<*mut ()>) -> *mut () {
        // SAFETY: a C string; RTLD_NEXT is meant for this use.
        let mut found: *mut () = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) }.cast();
        if found.is_null() {
            found = replacement(self.name).unwrap_or(ptr::null_mut());
        }
        // Threads that come here together find the same address.
        self.found.store(found, Ordering::Relaxed);
        found
    }

    #[cold]
    fn find(&self, replacement: fn(&CStr) -> Option<*mut ()>) -> *mut () {
        let found = self.look_up_or(replacement);
        if found.is_null() {
            // SAFETY: ends the process.
            unsafe { libc::abort() };
        }
        found
    }
}

/// Makes a module `found` with a [`Symbol`] for each function, and `ALL` of them.
macro_rules! symbols {
    ($($name:ident)*) => {
        /// The functions of the C library.
        #[allow(non_upper_case_globals, reason = "they have the names of the functions")]
        mod found {
            use crate::loader::next::Symbol;
            $(pub static $name: Symbol = Symbol::new(
                match std::ffi::CStr::from_bytes_with_nul(
                    concat!(stringify!($name), "\0").as_bytes(),
                ) {
                    Ok(name) => name,
                    Err(_) => c"",
                },
            );)*
            /// All of them.
            pub const ALL: &[&Symbol] = &[$(&$name),*];
        }

        /// Their names.
        #[cfg(test)]
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

pub(crate) use symbols;
