//! `dlopen`, interposed for the names that a SONAME does not catch: `libcuda.so` and any path to a driver.
//!
//! Every other name is passed to the real `dlopen` by a jump, so that it sees the program's own return address
//! and searches with the RUNPATH of the object that called. Nothing here allocates, and nothing runs before the
//! first call.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The loader's name for this library. The SONAME is used rather than the file, whose path may be relative to a folder
/// that the program has left.
const OWN_NAME: &CStr = c"libcuda.so.1";

/// The C library's `dlopen`, or that of another preloaded library before it.
static REAL: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// `void *dlopen(const char *name, int flags)`
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dlopen() {
    // The one push also aligns the stack for the call. The flags wait in it; the name comes back in rax, the
    // function to go on with in rdx.
    naked_asm!(
        "push rsi",
        "call {redirect}",
        "pop rsi",
        "mov rdi, rax",
        "jmp rdx",
        redirect = sym redirect,
    )
}

/// Opens a library as the program's call would, past the interposer.
///
/// # Safety
/// As `dlopen`: the library's constructors run.
pub unsafe fn open(name: &CStr, flags: c_int) -> *mut c_void {
    type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
    // SAFETY: `real` returns a function of dlopen's signature.
    let real = unsafe { std::mem::transmute::<*mut (), Dlopen>(real()) };
    // SAFETY: the name is a C string; the rest is the caller's promise.
    unsafe { real(name.as_ptr(), flags) }
}

/// Two registers' worth of answer.
#[repr(C)]
struct Forward {
    name: *const c_char,
    target: *mut (),
}

extern "C" fn redirect(name: *const c_char) -> Forward {
    let driver = !name.is_null() && {
        // SAFETY: not null, so a C string, as dlopen's contract has it.
        is_driver(unsafe { CStr::from_ptr(name) }.to_bytes())
    };
    Forward {
        name: if driver { OWN_NAME.as_ptr() } else { name },
        target: real(),
    }
}

/// Whether a library's name or path is one of the CUDA driver: `libcuda.so`, with or without a version.
fn is_driver(name: &[u8]) -> bool {
    let base = name.rsplit(|&byte| byte == b'/').next().unwrap_or(name);
    base.strip_prefix(b"libcuda.so")
        .is_some_and(|rest| rest.is_empty() || rest[0] == b'.')
}

fn real() -> *mut () {
    let known = REAL.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // Threads that come here together find the same address.
    let found = find_real();
    REAL.store(found, Ordering::Relaxed);
    found
}

fn find_real() -> *mut () {
    // SAFETY: the name is a C string; RTLD_NEXT is meant for this use.
    let mut found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr()) };
    for version in [c"GLIBC_2.34", c"GLIBC_2.2.5"] {
        if found.is_null() {
            // SAFETY: as above.
            found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlopen".as_ptr(), version.as_ptr()) };
        }
    }
    if found.is_null() {
        nothing as *mut ()
    } else {
        found.cast()
    }
}

/// Stands in for a missing `dlopen`.
unsafe extern "C" fn nothing(_name: *const c_char, _flags: c_int) -> *mut c_void {
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_drivers_names_are_redirected() {
        let own = [
            "libcuda.so",
            "libcuda.so.1",
            "/usr/lib/libcuda.so.1",
            "./libcuda.so.580.1",
            "a/libcuda.so",
        ];
        for name in own {
            assert!(is_driver(name.as_bytes()), "{name}");
        }
        let others = [
            "",
            "/",
            "libcuda.so/",
            "libcudart.so.12",
            "libcuda.so_old",
            "libcudadebugger.so.1",
            "/libcuda.so.1/x",
        ];
        for name in others {
            assert!(!is_driver(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn no_name_asks_for_the_program_itself() {
        assert!(redirect(ptr::null()).name.is_null());
    }

    #[test]
    fn other_libraries_open_as_ever() {
        type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
        // SAFETY: the interposer has the type of dlopen.
        let interposer = unsafe { std::mem::transmute::<*const (), Dlopen>(dlopen as *const ()) };
        // SAFETY: opens the C library, which is open already.
        assert!(!unsafe { interposer(c"libc.so.6".as_ptr(), libc::RTLD_NOW) }.is_null());
        // SAFETY: asks for a file that is not there.
        assert!(unsafe { interposer(c"libnosuch.so".as_ptr(), libc::RTLD_NOW) }.is_null());
    }
}
