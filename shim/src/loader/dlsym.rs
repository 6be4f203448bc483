//! `dlsym`, interposed for the functions of NVIDIA's management library that report processes ([`crate::nvml`]).
//!
//! Every other name is passed to the real `dlsym` by a jump, so that it sees the program's own return address, which
//! `RTLD_NEXT` depends on. Five comparisons decide that; nothing is called and nothing allocates.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::nvml;

/// The C library's `dlsym`, or that of another preloaded library behind this one. Null until the first call.
static REAL: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// `void *dlsym(void *handle, const char *name)`
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dlsym() {
    naked_asm!(
        "test rsi, rsi",
        "jz 2f",
        // Characters one by one: the name may end before the fourth.
        "cmp byte ptr [rsi], {n}",
        "jne 2f",
        "cmp byte ptr [rsi + 1], {v}",
        "jne 2f",
        "cmp byte ptr [rsi + 2], {m}",
        "jne 2f",
        "cmp byte ptr [rsi + 3], {l}",
        "jne 2f",
        // RTLD_DEFAULT and RTLD_NEXT, 0 and -1: the program's scope has this library's exports.
        "lea rax, [rdi + 1]",
        "cmp rax, 1",
        "ja {of_nvml}",
        "2:",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jz 3f",
        "jmp rax",
        "3:",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        n = const b'n',
        v = const b'v',
        m = const b'm',
        l = const b'l',
        real = sym REAL,
        of_nvml = sym nvml::symbol,
        find = sym find,
    )
}

/// Looks a symbol up past the interposer.
pub fn look_up(handle: *mut c_void, name: &CStr) -> *mut () {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut ();
    let mut real = REAL.load(Ordering::Relaxed);
    if real.is_null() {
        real = find();
    }
    // SAFETY: dlsym has this signature.
    let real = unsafe { std::mem::transmute::<*mut (), Dlsym>(real) };
    // SAFETY: a handle of the program's or this library's, and a C string.
    unsafe { real(handle, name.as_ptr()) }
}

/// Finds the real function by its versions: `dlsym` itself would come here. glibc has the older version in each
/// release, so that the first lookup succeeds, which allocates nothing.
extern "C" fn find() -> *mut () {
    let mut found: *mut c_void = ptr::null_mut();
    for version in [c"GLIBC_2.2.5", c"GLIBC_2.34"] {
        if found.is_null() {
            // SAFETY: both are C strings; RTLD_NEXT is meant for this use.
            found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        }
    }
    let found = if found.is_null() {
        nothing as *mut ()
    } else {
        found.cast()
    };
    // Threads that come here together find the same address.
    REAL.store(found, Ordering::Relaxed);
    found
}

/// Stands in for a missing `dlsym`.
unsafe extern "C" fn nothing(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

    #[test]
    fn other_names_are_found_as_ever() {
        // SAFETY: the interposer has the type of dlsym.
        let interposer = unsafe { std::mem::transmute::<*const (), Dlsym>(dlsym as *const ()) };
        // SAFETY: opens a library that is open already.
        let library = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOW) };
        for handle in [library, libc::RTLD_DEFAULT, libc::RTLD_NEXT] {
            for name in [
                c"getpid",
                c"no_such_function",
                c"nvm",
                c"n",
                c"",
                c"nvmlNone",
            ] {
                // SAFETY: handles and names as dlsym takes them.
                let (found, expected) = unsafe {
                    (
                        interposer(handle, name.as_ptr()),
                        libc::dlsym(handle, name.as_ptr()),
                    )
                };
                assert_eq!(found, expected, "{name:?}");
                assert_eq!(found.is_null(), name != c"getpid", "{name:?}");
            }
        }
    }
}
