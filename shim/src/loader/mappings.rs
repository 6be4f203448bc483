//! `madvise` and `mremap`, interposed for private memory that is registered: its pages are pages of a file
//! ([`crate::proxy::private_pages`]), for which the kernel behaves differently than for private memory.

use std::ffi::{c_int, c_void};
use std::mem;

use libc::size_t;

use super::next::Symbol;
use crate::proxy::private_pages;

type Madvise = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
type Mremap = unsafe extern "C" fn(*mut c_void, size_t, size_t, c_int, *mut c_void) -> *mut c_void;

/// `int madvise(void *start, size_t len, int advice)`
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn madvise(start: *mut c_void, len: size_t, advice: c_int) -> c_int {
    static REAL: Symbol = Symbol::new(c"madvise");
    // SAFETY: the C library's function has this type.
    let real = unsafe { mem::transmute::<*mut (), Madvise>(REAL.address()) };
    if private_pages::any() {
        let range = (start as u64, len as u64);
        match advice {
            // The next reads return zeros; devices keep the pages that they have.
            libc::MADV_DONTNEED | libc::MADV_FREE => private_pages::discard(range),
            // A child gets its own copy in any case.
            libc::MADV_DOFORK if private_pages::overlaps(range) => return 0,
            _ => {}
        }
    }
    // SAFETY: the program's arguments.
    unsafe { real(start, len, advice) }
}

/// `void *mremap(void *start, size_t len, size_t new_len, int flags, ... /* void *to */)`
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mremap(
    start: *mut c_void,
    len: size_t,
    new_len: size_t,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    static REAL: Symbol = Symbol::new(c"mremap");
    // SAFETY: the C library's function takes these, the last one if a flag says so.
    let real = unsafe { mem::transmute::<*mut (), Mremap>(REAL.address()) };
    let range = (start as u64, len as u64);
    if private_pages::any() && new_len > len && len > 0 && private_pages::overlaps(range) {
        return private_pages::grow(range, new_len as u64, flags, to as u64) as *mut c_void;
    }
    // SAFETY: the program's arguments.
    unsafe { real(start, len, new_len, flags, to) }
}
