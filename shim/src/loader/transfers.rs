//! The C library's calls by which the kernel stores into the program's memory, interposed.
//!
//! At a page that [`crate::store_hold`] protects for a moment, such a call fails with EFAULT or ends early. It is then
//! repeated. All other calls are only passed on.

use std::ffi::{c_int, c_void};
use std::mem;

use libc::{iovec, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};

use super::next::Symbol;
use crate::store_hold;

/// Whether a call that began at this epoch may have met a hold.
#[inline]
fn may_have_met(epoch: u32) -> bool {
    epoch % 2 == 1 || store_hold::epoch() != epoch
}

fn failed_to_store(got: ssize_t) -> bool {
    // SAFETY: the thread's own errno.
    got < 0 && unsafe { *libc::__errno_location() } == libc::EFAULT
}

/// Makes a call once more for each time that it fails because of a hold.
#[inline]
fn again(mut call: impl FnMut() -> ssize_t) -> ssize_t {
    loop {
        let epoch = store_hold::epoch();
        let got = call();
        if !(failed_to_store(got) && may_have_met(epoch)) {
            return got;
        }
    }
}

/// As [`again`]; also reads the rest of a regular file if a hold cut the call short. `call` reads behind the given
/// bytes.
#[inline]
fn all(file: c_int, wanted: size_t, mut call: impl FnMut(size_t) -> ssize_t) -> ssize_t {
    let mut done = 0;
    loop {
        let epoch = store_hold::epoch();
        let got = call(done);
        if failed_to_store(got) && may_have_met(epoch) {
            continue;
        }
        if got > 0 {
            done += got as size_t;
        }
        if got <= 0 || done >= wanted || !may_have_met(epoch) || !is_regular(file) {
            return if done > 0 { done as ssize_t } else { got };
        }
    }
}

fn is_regular(file: c_int) -> bool {
    // SAFETY: all zero is a value of the struct; the call writes into it.
    unsafe {
        let mut found: libc::stat = mem::zeroed();
        libc::fstat(file, &mut found) == 0 && found.st_mode & libc::S_IFMT == libc::S_IFREG
    }
}

/// Interposes functions: each has the C library's name and type, and `real` is the function of the C library.
macro_rules! interpose {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) => |$real:ident| $body:expr;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As the C library's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> ssize_t {
                type Real = unsafe extern "C-unwind" fn($($type),*) -> ssize_t;
                static REAL: Symbol = Symbol::new(
                    match std::ffi::CStr::from_bytes_with_nul(
                        concat!(stringify!($name), "\0").as_bytes(),
                    ) {
                        Ok(name) => name,
                        Err(_) => c"",
                    },
                );
                // SAFETY: the C library's function of this name has this type.
                let $real = unsafe { mem::transmute::<*mut (), Real>(REAL.address()) };
                $body
            }
        )*

        /// Names of the functions that are interposed here.
        #[cfg(test)]
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

/// `at` bytes further.
fn behind(buffer: *mut c_void, at: size_t) -> *mut c_void {
    buffer.wrapping_byte_add(at)
}

interpose! {
    /// `read`
    read(file: c_int, buffer: *mut c_void, len: size_t) =>
        // SAFETY: the program's arguments, the rest of its buffer.
        |real| all(file, len, |at| unsafe { real(file, behind(buffer, at), len - at) });
    /// `read` of programs that are built with `_FORTIFY_SOURCE`.
    __read_chk(file: c_int, buffer: *mut c_void, len: size_t, room: size_t) =>
        // SAFETY: as above.
        |real| all(file, len, |at| unsafe { real(file, behind(buffer, at), len - at, room - at.min(room)) });
    /// `pread`
    pread(file: c_int, buffer: *mut c_void, len: size_t, from: off_t) =>
        // SAFETY: as above.
        |real| all(file, len, |at| unsafe { real(file, behind(buffer, at), len - at, from + at as off_t) });
    /// `pread64`
    pread64(file: c_int, buffer: *mut c_void, len: size_t, from: off_t) =>
        // SAFETY: as above.
        |real| all(file, len, |at| unsafe { real(file, behind(buffer, at), len - at, from + at as off_t) });
    /// `pread` of programs that are built with `_FORTIFY_SOURCE`.
    __pread_chk(file: c_int, buffer: *mut c_void, len: size_t, from: off_t, room: size_t) =>
        // SAFETY: as above.
        |real| all(file, len, |at| unsafe { real(file, behind(buffer, at), len - at, from + at as off_t, room - at.min(room)) });
    /// `pread64` of programs that are built with `_FORTIFY_SOURCE`.
    __pread64_chk(file: c_int, buffer: *mut c_void, len: size_t, from: off_t, room: size_t) =>
        // SAFETY: as above.
        |real| all(file, len, |at| unsafe { real(file, behind(buffer, at), len - at, from + at as off_t, room - at.min(room)) });
    /// `readv`
    readv(file: c_int, parts: *const iovec, count: c_int) =>
        // SAFETY: the program's arguments.
        |real| again(|| unsafe { real(file, parts, count) });
    /// `preadv`
    preadv(file: c_int, parts: *const iovec, count: c_int, from: off_t) =>
        // SAFETY: as above.
        |real| again(|| unsafe { real(file, parts, count, from) });
    /// `preadv64`
    preadv64(file: c_int, parts: *const iovec, count: c_int, from: off_t) =>
        // SAFETY: as above.
        |real| again(|| unsafe { real(file, parts, count, from) });
    /// `recv`
    recv(socket: c_int, buffer: *mut c_void, len: size_t, flags: c_int) =>
        // SAFETY: as above.
        |real| again(|| unsafe { real(socket, buffer, len, flags) });
    /// `recv` of programs that are built with `_FORTIFY_SOURCE`.
    __recv_chk(socket: c_int, buffer: *mut c_void, len: size_t, room: size_t, flags: c_int) =>
        // SAFETY: as above.
        |real| again(|| unsafe { real(socket, buffer, len, room, flags) });
    /// `recvfrom`
    recvfrom(socket: c_int, buffer: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, room: *mut socklen_t) =>
        // SAFETY: as above.
        |real| again(|| unsafe { real(socket, buffer, len, flags, from, room) });
    /// `recvmsg`
    recvmsg(socket: c_int, message: *mut msghdr, flags: c_int) =>
        // SAFETY: as above.
        |real| again(|| unsafe { real(socket, message, flags) });
    /// `getrandom`
    getrandom(buffer: *mut c_void, len: size_t, flags: libc::c_uint) =>
        // SAFETY: as above.
        |real| again(|| unsafe { real(buffer, len, flags) });
}

type Fread = unsafe extern "C-unwind" fn(*mut c_void, size_t, size_t, *mut libc::FILE) -> size_t;

/// `fread`: also reads the rest if a hold cut it short.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fread(
    buffer: *mut c_void,
    size: size_t,
    count: size_t,
    file: *mut libc::FILE,
) -> size_t {
    static REAL: Symbol = Symbol::new(c"fread");
    // SAFETY: the C library's function has this type.
    let real = unsafe { mem::transmute::<*mut (), Fread>(REAL.address()) };
    let epoch = store_hold::epoch();
    let wanted = match size.checked_mul(count) {
        Some(bytes) if bytes > 0 => bytes,
        // SAFETY: the program's arguments.
        _ => return unsafe { real(buffer, size, count, file) },
    };
    // By bytes, so that a part of an element is known.
    // SAFETY: as above; as many bytes.
    let mut done = unsafe { real(buffer, 1, wanted, file) };
    let mut began = epoch;
    // SAFETY: the thread's own errno.
    let fault = || unsafe { *libc::__errno_location() } == libc::EFAULT;
    // SAFETY: the program's stream.
    while done < wanted && unsafe { libc::ferror(file) } != 0 && fault() && may_have_met(began) {
        began = store_hold::epoch();
        // SAFETY: as above; the rest of the buffer.
        done += unsafe {
            libc::clearerr(file);
            real(behind(buffer, done), 1, wanted - done, file)
        };
    }
    done / size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_one_of_the_c_library() {
        for name in NAMES.iter().chain(&["fread"]) {
            let name = std::ffi::CString::new(*name).expect("a name");
            // SAFETY: a C string.
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?}");
        }
    }

    #[test]
    fn what_was_cut_short_is_read_to_its_end() {
        let mut file = tempfile::tempfile().expect("a file");
        std::io::Write::write_all(&mut file, &[7; 100]).expect("written");
        let raw = std::os::fd::AsRawFd::as_raw_fd(&file);
        let mut calls = Vec::new();
        // Each call meets a hold that ends, and stores 40 bytes at most; the second one fails.
        let got = all(raw, 100, |at| {
            drop(store_hold::Hold::begin(0, 0));
            calls.push(at);
            if calls.len() == 2 {
                // SAFETY: the thread's own errno.
                unsafe { *libc::__errno_location() = libc::EFAULT };
                return -1;
            }
            (100 - at).min(40) as ssize_t
        });
        assert_eq!((got, calls), (100, vec![0, 40, 40, 80]));
        let short = all(raw, 100, |_| 40);
        assert_eq!(
            short, 40,
            "without a hold a short read is the kernel's answer"
        );
    }
}
