//! The C library's calls by which the kernel reads or stores the program's memory, interposed.
//!
//! At a page that [`crate::store_hold`] protects for a moment, a call that stores fails with EFAULT or ends early. It is
//! then repeated. Pages of managed memory that are on the device ([`crate::proxy::pages`]) are fetched before the call, and
//! again if it fails because they were taken away meanwhile. All other calls are only passed on.

use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr;

use libc::{iovec, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};

use super::next::{Symbol, symbols};
use super::requests;
use crate::proxy::pages;
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

/// Times that managed memory may be taken away while the kernel uses it.
pub(super) const TRIES: usize = 1000;

/// Most elements of an array of buffers; the kernel refuses more.
pub(super) const MOST_PARTS: usize = 1024;

/// Reads an array of the program's. Returns whether all of it is there: if it is not, the call that has it as an argument
/// fails with EFAULT, and no signal is raised here. Leaves the error of the last call. Async-signal-safe.
///
/// `T` is a struct of the kernel's interface, all of whose bytes may have any value.
pub(super) fn read_own<T: Copy>(from: *const T, to: &mut [T]) -> bool {
    if from.is_null() {
        return to.is_empty();
    }
    let bytes = size_of_val(to);
    let part = |at: *mut c_void| iovec {
        iov_base: at,
        iov_len: bytes,
    };
    let (here, there) = (
        part(to.as_mut_ptr().cast()),
        part(from.cast_mut().cast::<c_void>()),
    );
    // SAFETY: `to` has room for the array, which the kernel reads. Where it refuses that system call, the program's argument
    // is relied on.
    unsafe {
        let error = *libc::__errno_location();
        let own = libc::getpid();
        // Not the interposed function, which comes here.
        let read = mem::transmute::<*mut (), requests::Copy>(requests::READ_OTHER.address());
        let got = read(own, &raw const here, 1, &raw const there, 1, 0);
        let refused = got < 0 && *libc::__errno_location() != libc::EFAULT;
        *libc::__errno_location() = error;
        if refused {
            ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
        }
        refused || got as usize == bytes
    }
}

/// A buffer of a call and its use by the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Buffer {
    /// Stores there.
    Stored(*const c_void, size_t),
    /// Reads it.
    Read(*const c_void, size_t),
    /// As `Stored` and `Read`, several.
    AllStored(*const iovec, usize),
    AllRead(*const iovec, usize),
    /// The buffers of a message.
    Message(*const msghdr, bool),
}

impl Buffer {
    /// Fetches managed memory. Returns whether there is any.
    #[cold]
    pub(super) fn fetch(self) -> bool {
        let one = |at: *const c_void, len: size_t, write| {
            let (at, len) = (at.addr() as u64, len as u64);
            pages::touch(at, len, write);
            pages::is_in(at)
        };
        let all = |parts: *const iovec, count: usize, write| {
            let count = count.min(MOST_PARTS);
            let mut any = one(parts.cast(), count * size_of::<iovec>(), false);
            let none = iovec {
                iov_base: ptr::null_mut(),
                iov_len: 0,
            };
            let (mut some, mut done) = ([none; 64], 0);
            while done < count {
                let next = some.len().min(count - done);
                if !read_own(parts.wrapping_add(done), &mut some[..next]) {
                    break;
                }
                for part in &some[..next] {
                    any |= one(part.iov_base, part.iov_len, write);
                }
                done += next;
            }
            any
        };
        match self {
            Buffer::Stored(at, len) => one(at, len, true),
            Buffer::Read(at, len) => one(at, len, false),
            Buffer::AllStored(parts, count) => all(parts, count, true),
            Buffer::AllRead(parts, count) => all(parts, count, false),
            Buffer::Message(message, write) => {
                let managed = one(message.cast(), size_of::<msghdr>(), true);
                // SAFETY: all zero is a value of the struct.
                let mut found = [unsafe { mem::zeroed::<msghdr>() }];
                if !read_own(message, &mut found) {
                    return managed;
                }
                let [message] = found;
                managed
                    | one(message.msg_name, message.msg_namelen as usize, write)
                    | one(message.msg_control, message.msg_controllen, write)
                    | all(message.msg_iov, message.msg_iovlen, write)
            }
        }
    }

    #[inline]
    fn fetch_if_any(self) -> bool {
        pages::any() && self.fetch()
    }
}

/// Makes a call once more for each time that it fails because of a hold, or because managed memory was taken away.
#[inline]
fn again(buffer: Buffer, mut call: impl FnMut() -> ssize_t) -> ssize_t {
    let managed = buffer.fetch_if_any();
    let mut tries = 0;
    loop {
        let epoch = store_hold::epoch();
        let got = call();
        if !failed_to_store(got) {
            return got;
        }
        if managed && tries < TRIES {
            tries += 1;
            buffer.fetch();
        } else if !may_have_met(epoch) {
            return got;
        }
    }
}

/// As [`again`]; also transfers the rest of a regular file if the call was cut short. `call` transfers the bytes
/// behind the given ones.
#[inline]
fn all(
    file: c_int,
    buffer: Buffer,
    wanted: size_t,
    mut call: impl FnMut(size_t) -> ssize_t,
) -> ssize_t {
    let managed = buffer.fetch_if_any();
    let (mut done, mut tries) = (0, 0);
    loop {
        let epoch = store_hold::epoch();
        let got = call(done);
        if failed_to_store(got) {
            if managed && tries < TRIES {
                tries += 1;
                buffer.fetch();
                continue;
            }
            if may_have_met(epoch) {
                continue;
            }
        }
        if got > 0 {
            done += got as size_t;
        }
        let cut = managed || may_have_met(epoch);
        if got <= 0 || done >= wanted || !cut || !is_regular(file) {
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
        symbols!($($name)*);

        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As the C library's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> ssize_t {
                type Real = unsafe extern "C-unwind" fn($($type),*) -> ssize_t;
                // SAFETY: the C library's function of this name has this type.
                let $real = unsafe { mem::transmute::<*mut (), Real>(found::$name.address()) };
                $body
            }
        )*
    };
}

/// Looks the functions up while the library is loaded: the first call may come from a signal handler, where that is not
/// possible.
extern "C" fn find_all() {
    for symbol in found::ALL {
        symbol.address();
    }
}

/// Called by the loader.
#[cfg_attr(not(test), used)]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
#[cfg_attr(test, allow(dead_code))]
static AT_LOAD: extern "C" fn() = find_all;

/// `at` bytes further.
fn behind(buffer: *mut c_void, at: size_t) -> *mut c_void {
    buffer.wrapping_byte_add(at)
}

/// As [`behind`], of a buffer that is read.
fn behind_read(buffer: *const c_void, at: size_t) -> *const c_void {
    buffer.wrapping_byte_add(at)
}

interpose! {
    /// `read`
    read(file: c_int, buffer: *mut c_void, len: size_t) =>
        // SAFETY: the program's arguments, the rest of its buffer.
        |real| all(file, Buffer::Stored(buffer, len), len, |at| unsafe { real(file, behind(buffer, at), len - at) });
    /// `read` of programs that are built with `_FORTIFY_SOURCE`.
    __read_chk(file: c_int, buffer: *mut c_void, len: size_t, room: size_t) =>
        // SAFETY: as above.
        |real| all(file, Buffer::Stored(buffer, len), len, |at| unsafe { real(file, behind(buffer, at), len - at, room - at.min(room)) });
    /// `pread`
    pread(file: c_int, buffer: *mut c_void, len: size_t, from: off_t) =>
        // SAFETY: as above.
        |real| all(file, Buffer::Stored(buffer, len), len, |at| unsafe { real(file, behind(buffer, at), len - at, from + at as off_t) });
    /// `pread64`
    pread64(file: c_int, buffer: *mut c_void, len: size_t, from: off_t) =>
        // SAFETY: as above.
        |real| all(file, Buffer::Stored(buffer, len), len, |at| unsafe { real(file, behind(buffer, at), len - at, from + at as off_t) });
    /// `pread` of programs that are built with `_FORTIFY_SOURCE`.
    __pread_chk(file: c_int, buffer: *mut c_void, len: size_t, from: off_t, room: size_t) =>
        // SAFETY: as above.
        |real| all(file, Buffer::Stored(buffer, len), len, |at| unsafe { real(file, behind(buffer, at), len - at, from + at as off_t, room - at.min(room)) });
    /// `pread64` of programs that are built with `_FORTIFY_SOURCE`.
    __pread64_chk(file: c_int, buffer: *mut c_void, len: size_t, from: off_t, room: size_t) =>
        // SAFETY: as above.
        |real| all(file, Buffer::Stored(buffer, len), len, |at| unsafe { real(file, behind(buffer, at), len - at, from + at as off_t, room - at.min(room)) });
    /// `readv`
    readv(file: c_int, parts: *const iovec, count: c_int) =>
        // SAFETY: the program's arguments.
        |real| again(Buffer::AllStored(parts, count as usize), || unsafe { real(file, parts, count) });
    /// `preadv`
    preadv(file: c_int, parts: *const iovec, count: c_int, from: off_t) =>
        // SAFETY: as above.
        |real| again(Buffer::AllStored(parts, count as usize), || unsafe { real(file, parts, count, from) });
    /// `preadv64`
    preadv64(file: c_int, parts: *const iovec, count: c_int, from: off_t) =>
        // SAFETY: as above.
        |real| again(Buffer::AllStored(parts, count as usize), || unsafe { real(file, parts, count, from) });
    /// `recv`
    recv(socket: c_int, buffer: *mut c_void, len: size_t, flags: c_int) =>
        // SAFETY: as above.
        |real| again(Buffer::Stored(buffer, len), || unsafe { real(socket, buffer, len, flags) });
    /// `recv` of programs that are built with `_FORTIFY_SOURCE`.
    __recv_chk(socket: c_int, buffer: *mut c_void, len: size_t, room: size_t, flags: c_int) =>
        // SAFETY: as above.
        |real| again(Buffer::Stored(buffer, len), || unsafe { real(socket, buffer, len, room, flags) });
    /// `recvfrom`
    recvfrom(socket: c_int, buffer: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, room: *mut socklen_t) =>
        // SAFETY: as above.
        |real| again(Buffer::Stored(buffer, len), || unsafe { real(socket, buffer, len, flags, from, room) });
    /// `recvmsg`
    recvmsg(socket: c_int, message: *mut msghdr, flags: c_int) =>
        // SAFETY: as above.
        |real| again(Buffer::Message(message, true), || unsafe { real(socket, message, flags) });
    /// `getrandom`
    getrandom(buffer: *mut c_void, len: size_t, flags: libc::c_uint) =>
        // SAFETY: as above.
        |real| again(Buffer::Stored(buffer, len), || unsafe { real(buffer, len, flags) });
    /// `write`
    write(file: c_int, buffer: *const c_void, len: size_t) =>
        // SAFETY: as above.
        |real| all(file, Buffer::Read(buffer, len), len, |at| unsafe { real(file, behind_read(buffer, at), len - at) });
    /// `pwrite`
    pwrite(file: c_int, buffer: *const c_void, len: size_t, to: off_t) =>
        // SAFETY: as above.
        |real| all(file, Buffer::Read(buffer, len), len, |at| unsafe { real(file, behind_read(buffer, at), len - at, to + at as off_t) });
    /// `pwrite64`
    pwrite64(file: c_int, buffer: *const c_void, len: size_t, to: off_t) =>
        // SAFETY: as above.
        |real| all(file, Buffer::Read(buffer, len), len, |at| unsafe { real(file, behind_read(buffer, at), len - at, to + at as off_t) });
    /// `writev`
    writev(file: c_int, parts: *const iovec, count: c_int) =>
        // SAFETY: as above.
        |real| again(Buffer::AllRead(parts, count as usize), || unsafe { real(file, parts, count) });
    /// `pwritev`
    pwritev(file: c_int, parts: *const iovec, count: c_int, to: off_t) =>
        // SAFETY: as above.
        |real| again(Buffer::AllRead(parts, count as usize), || unsafe { real(file, parts, count, to) });
    /// `pwritev64`
    pwritev64(file: c_int, parts: *const iovec, count: c_int, to: off_t) =>
        // SAFETY: as above.
        |real| again(Buffer::AllRead(parts, count as usize), || unsafe { real(file, parts, count, to) });
    /// `send`
    send(socket: c_int, buffer: *const c_void, len: size_t, flags: c_int) =>
        // SAFETY: as above.
        |real| again(Buffer::Read(buffer, len), || unsafe { real(socket, buffer, len, flags) });
    /// `sendto`
    sendto(socket: c_int, buffer: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, room: socklen_t) =>
        // SAFETY: as above.
        |real| again(Buffer::Read(buffer, len), || unsafe { real(socket, buffer, len, flags, to, room) });
    /// `sendmsg`
    sendmsg(socket: c_int, message: *const msghdr, flags: c_int) =>
        // SAFETY: as above.
        |real| again(Buffer::Message(message, false), || unsafe { real(socket, message, flags) });
}

type Fread = unsafe extern "C-unwind" fn(*mut c_void, size_t, size_t, *mut libc::FILE) -> size_t;
type Fwrite = unsafe extern "C-unwind" fn(*const c_void, size_t, size_t, *mut libc::FILE) -> size_t;

/// Transfers `wanted` bytes of a stream with `real`, which is given how many are done; repeats parts that a hold cut short,
/// or that were in managed memory which was taken away. Returns how many were transferred.
fn whole(
    file: *mut libc::FILE,
    buffer: Buffer,
    wanted: size_t,
    mut real: impl FnMut(size_t) -> size_t,
) -> size_t {
    let mut began = store_hold::epoch();
    let managed = buffer.fetch_if_any();
    let mut tries = 0;
    let mut done = real(0);
    // SAFETY: the thread's own errno.
    let fault = || unsafe { *libc::__errno_location() } == libc::EFAULT;
    // SAFETY: the program's stream.
    while done < wanted && unsafe { libc::ferror(file) } != 0 && fault() {
        let taken_away = managed && tries < TRIES;
        if !taken_away && !may_have_met(began) {
            break;
        }
        tries += 1;
        if taken_away {
            buffer.fetch();
        }
        began = store_hold::epoch();
        // SAFETY: as above.
        unsafe { libc::clearerr(file) };
        done += real(done);
    }
    done
}

/// `fread`: also reads the rest if it was cut short.
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
    let wanted = match size.checked_mul(count) {
        Some(bytes) if bytes > 0 => bytes,
        // SAFETY: the program's arguments.
        _ => return unsafe { real(buffer, size, count, file) },
    };
    // By bytes, so that a part of an element is known.
    // SAFETY: as above; the rest of the buffer.
    let rest = |done| unsafe { real(behind(buffer, done), 1, wanted - done, file) };
    whole(file, Buffer::Stored(buffer, wanted), wanted, rest) / size
}

/// `fwrite`: from managed memory too.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn fwrite(
    buffer: *const c_void,
    size: size_t,
    count: size_t,
    file: *mut libc::FILE,
) -> size_t {
    static REAL: Symbol = Symbol::new(c"fwrite");
    // SAFETY: the C library's function has this type.
    let real = unsafe { mem::transmute::<*mut (), Fwrite>(REAL.address()) };
    let wanted = match size.checked_mul(count) {
        Some(bytes) if bytes > 0 && pages::any() && pages::is_in(buffer.addr() as u64) => bytes,
        // SAFETY: the program's arguments.
        _ => return unsafe { real(buffer, size, count, file) },
    };
    // SAFETY: as above; the rest of the buffer.
    let rest = |done| unsafe { real(behind_read(buffer, done), 1, wanted - done, file) };
    whole(file, Buffer::Read(buffer, wanted), wanted, rest) / size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_one_of_the_c_library() {
        for name in NAMES.iter().chain(&["fread", "fwrite"]) {
            let name = std::ffi::CString::new(*name).expect("a name");
            // SAFETY: a C string.
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?}");
        }
    }

    #[test]
    fn arrays_that_are_not_there_are_left_to_the_kernel() {
        let absent = ptr::without_provenance::<iovec>(8);
        let mut byte = 0u8;
        let part = iovec {
            iov_base: (&raw mut byte).cast(),
            iov_len: 1,
        };
        let parts = [part; 100];
        // SAFETY: all zero is a value of the struct.
        let mut message = unsafe { mem::zeroed::<msghdr>() };
        message.msg_iov = absent.cast_mut();
        message.msg_iovlen = 3;
        // A negative number of elements, as a C program passes it.
        let negative = -1i32 as usize;
        for (at, count) in [(absent, 1), (absent, 100), (parts.as_ptr(), negative)] {
            assert!(!Buffer::AllRead(at, count).fetch());
            assert!(!Buffer::AllStored(at, count).fetch());
        }
        for write in [false, true] {
            assert!(!Buffer::Message(&raw const message, write).fetch());
            assert!(!Buffer::Message(absent.cast(), write).fetch());
        }
        // SAFETY: the thread's own errno.
        unsafe { *libc::__errno_location() = libc::EBADF };
        let mut found = [iovec {
            iov_base: ptr::null_mut(),
            iov_len: 0,
        }; 100];
        assert!(read_own(parts.as_ptr(), &mut found));
        assert!(
            found
                .iter()
                .all(|found| found.iov_base == part.iov_base && found.iov_len == 1)
        );
        assert!(!read_own(absent, &mut found));
        // SAFETY: as above.
        assert_eq!(unsafe { *libc::__errno_location() }, libc::EBADF);
    }

    #[test]
    fn what_was_cut_short_is_read_to_its_end() {
        let mut file = tempfile::tempfile().expect("a file");
        std::io::Write::write_all(&mut file, &[7; 100]).expect("written");
        let raw = std::os::fd::AsRawFd::as_raw_fd(&file);
        let mut calls = Vec::new();
        // Each call meets a hold that ends, and stores 40 bytes at most; the second one fails.
        let none = Buffer::Stored(ptr::null(), 0);
        let got = all(raw, none, 100, |at| {
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
        let short = all(raw, none, 100, |_| 40);
        assert_eq!(
            short, 40,
            "without a hold a short read is the kernel's answer"
        );
    }
}
