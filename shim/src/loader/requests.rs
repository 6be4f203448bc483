//! Further calls of the C library by which the kernel uses the program's memory, interposed for managed memory only.
//!
//! The kernel gets EFAULT at a page of managed memory that is on the device, where faults come by signals
//! ([`crate::proxy::pages`]). These calls fetch the pages of their arguments first, and again if they fail because the pages
//! were taken away meanwhile. In a program without managed memory they test a flag and pass the call on.

use std::arch::naked_asm;
use std::borrow::Cow;
use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::mem;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{iovec, size_t, socklen_t, ssize_t};

use super::next::{Symbol, symbols};
use super::transfers::{Buffer, MOST_PARTS, TRIES, read_own};
use crate::proxy::pages;

/// Longest path.
const PATH: size_t = 4096;
/// Longest address of a socket.
const SOCKET_ADDRESS: size_t = 128;
const TIME: size_t = 16;
const STAT: size_t = 144;
const SET: size_t = 128;

type Pointer = *const c_void;

/// How a call says that the kernel could not use its memory.
trait Answer {
    fn is_fault(&self) -> bool;
}

fn errno_is_fault() -> bool {
    // SAFETY: the thread's own errno.
    unsafe { *libc::__errno_location() == libc::EFAULT }
}

impl Answer for c_int {
    fn is_fault(&self) -> bool {
        *self < 0 && errno_is_fault()
    }
}

impl Answer for ssize_t {
    fn is_fault(&self) -> bool {
        *self < 0 && errno_is_fault()
    }
}

impl Answer for c_long {
    fn is_fault(&self) -> bool {
        *self < 0 && errno_is_fault()
    }
}

impl Answer for *mut c_char {
    fn is_fault(&self) -> bool {
        self.is_null() && errno_is_fault()
    }
}

/// The answer of a call that returns its error.
#[derive(Debug)]
#[repr(transparent)]
pub struct ErrorNumber(c_int);

impl Answer for ErrorNumber {
    fn is_fault(&self) -> bool {
        self.0 == libc::EFAULT
    }
}

/// Makes a call with these buffers in a program that has managed memory.
#[cold]
fn with<T: Answer>(buffers: &[Buffer], mut call: impl FnMut() -> T) -> T {
    let fetch = || {
        buffers
            .iter()
            .fold(false, |any, buffer| buffer.fetch() | any)
    };
    let managed = fetch();
    let mut tries = 0;
    loop {
        let got = call();
        if !managed || !got.is_fault() || tries == TRIES {
            return got;
        }
        tries += 1;
        fetch();
    }
}

/// Interposes functions: each has the C library's name and type, and a list of its buffers.
macro_rules! interpose {
    ($($name:ident($($argument:ident: $type:ty),*) -> $answer:ty: [$($buffer:expr),*];)*) => {
        symbols!($($name)*);

        $(
            #[doc = concat!("`", stringify!($name), "`")]
            ///
            /// # Safety
            /// As the C library's.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $answer {
                type Real = unsafe extern "C-unwind" fn($($type),*) -> $answer;
                // SAFETY: the C library's function of this name has this type.
                let real = unsafe { mem::transmute::<*mut (), Real>(found::$name.address_or(older::replacement)) };
                if !pages::any() {
                    // SAFETY: the program's arguments.
                    return unsafe { real($($argument),*) };
                }
                // SAFETY: as above.
                with(&[$($buffer),*], || unsafe { real($($argument),*) })
            }
        )*
    };
}

/// Functions that C libraries before 2.33 lack: programs for those contain them, and call `__xstat`. This library is such a
/// program, and its own calls reach the interposed functions.
mod older {
    use super::{Pointer, c_int};
    use std::ffi::{CStr, c_long};

    unsafe extern "C-unwind" fn at(
        folder: c_int,
        path: Pointer,
        out: Pointer,
        flags: c_int,
    ) -> c_int {
        // SAFETY: the caller's arguments. On x86-64 the kernel's structure is the C library's.
        unsafe { libc::syscall(libc::SYS_newfstatat, folder, path, out, flags) as c_int }
    }

    unsafe extern "C-unwind" fn of_path(path: Pointer, out: Pointer) -> c_int {
        // SAFETY: the caller's arguments.
        unsafe { at(libc::AT_FDCWD, path, out, 0) }
    }

    unsafe extern "C-unwind" fn of_link(path: Pointer, out: Pointer) -> c_int {
        // SAFETY: the caller's arguments.
        unsafe { at(libc::AT_FDCWD, path, out, libc::AT_SYMLINK_NOFOLLOW) }
    }

    unsafe extern "C-unwind" fn of_file(file: c_int, out: Pointer) -> c_int {
        // SAFETY: the caller's arguments.
        unsafe { libc::syscall(libc::SYS_fstat, c_long::from(file), out) as c_int }
    }

    /// Does the same as the function of this name.
    pub fn replacement(name: &CStr) -> Option<*mut ()> {
        let found = match name.to_bytes() {
            b"stat" | b"stat64" => of_path as *const (),
            b"lstat" | b"lstat64" => of_link as *const (),
            b"fstat" | b"fstat64" => of_file as *const (),
            b"fstatat" | b"fstatat64" => at as *const (),
            _ => return None,
        };
        Some(found.cast_mut())
    }
}

/// Looks the functions up while the library is loaded: the first call may come from a signal handler, where that is not
/// possible.
extern "C" fn find_all() {
    for symbol in found::ALL.iter().chain(&[&READ_OTHER, &WRITE_OTHER]) {
        symbol.look_up_or(older::replacement);
    }
    find_syscall();
}

/// Called by the loader.
#[cfg_attr(not(test), used)]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
#[cfg_attr(test, allow(dead_code))]
static AT_LOAD: extern "C" fn() = find_all;

use Buffer::{AllRead, AllStored, Read, Stored};

// Variadic functions have their optional arguments in registers too; the C library reads only the given arguments.
interpose! {
    ioctl(file: c_int, request: c_ulong, argument: Pointer) -> c_int: [Stored(argument, 4096)];

    open(path: Pointer, flags: c_int, mode: c_uint) -> c_int: [Read(path, PATH)];
    open64(path: Pointer, flags: c_int, mode: c_uint) -> c_int: [Read(path, PATH)];
    __open_2(path: Pointer, flags: c_int) -> c_int: [Read(path, PATH)];
    __open64_2(path: Pointer, flags: c_int) -> c_int: [Read(path, PATH)];
    openat(folder: c_int, path: Pointer, flags: c_int, mode: c_uint) -> c_int: [Read(path, PATH)];
    openat64(folder: c_int, path: Pointer, flags: c_int, mode: c_uint) -> c_int: [Read(path, PATH)];
    __openat_2(folder: c_int, path: Pointer, flags: c_int) -> c_int: [Read(path, PATH)];
    __openat64_2(folder: c_int, path: Pointer, flags: c_int) -> c_int: [Read(path, PATH)];
    access(path: Pointer, mode: c_int) -> c_int: [Read(path, PATH)];
    faccessat(folder: c_int, path: Pointer, mode: c_int, flags: c_int) -> c_int: [Read(path, PATH)];
    stat(path: Pointer, out: Pointer) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    stat64(path: Pointer, out: Pointer) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    lstat(path: Pointer, out: Pointer) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    lstat64(path: Pointer, out: Pointer) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    fstat(file: c_int, out: Pointer) -> c_int: [Stored(out, STAT)];
    fstat64(file: c_int, out: Pointer) -> c_int: [Stored(out, STAT)];
    fstatat(folder: c_int, path: Pointer, out: Pointer, flags: c_int) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    fstatat64(folder: c_int, path: Pointer, out: Pointer, flags: c_int) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    __xstat(version: c_int, path: Pointer, out: Pointer) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    __xstat64(version: c_int, path: Pointer, out: Pointer) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    __lxstat(version: c_int, path: Pointer, out: Pointer) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    __lxstat64(version: c_int, path: Pointer, out: Pointer) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    __fxstat(version: c_int, file: c_int, out: Pointer) -> c_int: [Stored(out, STAT)];
    __fxstat64(version: c_int, file: c_int, out: Pointer) -> c_int: [Stored(out, STAT)];
    __fxstatat(version: c_int, folder: c_int, path: Pointer, out: Pointer, flags: c_int) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    __fxstatat64(version: c_int, folder: c_int, path: Pointer, out: Pointer, flags: c_int) -> c_int: [Read(path, PATH), Stored(out, STAT)];
    readlink(path: Pointer, out: Pointer, len: size_t) -> ssize_t: [Read(path, PATH), Stored(out, len)];
    readlinkat(folder: c_int, path: Pointer, out: Pointer, len: size_t) -> ssize_t: [Read(path, PATH), Stored(out, len)];
    __readlink_chk(path: Pointer, out: Pointer, len: size_t, room: size_t) -> ssize_t: [Read(path, PATH), Stored(out, len)];
    __readlinkat_chk(folder: c_int, path: Pointer, out: Pointer, len: size_t, room: size_t) -> ssize_t: [Read(path, PATH), Stored(out, len)];
    getcwd(out: Pointer, len: size_t) -> *mut c_char: [Stored(out, len)];
    __getcwd_chk(out: Pointer, len: size_t, room: size_t) -> *mut c_char: [Stored(out, len)];

    poll(entries: Pointer, count: c_ulong, timeout: c_int) -> c_int: [Stored(entries, count as size_t * 8)];
    __poll_chk(entries: Pointer, count: c_ulong, timeout: c_int, room: size_t) -> c_int: [Stored(entries, count as size_t * 8)];
    ppoll(entries: Pointer, count: c_ulong, timeout: Pointer, mask: Pointer) -> c_int: [Stored(entries, count as size_t * 8), Read(timeout, TIME), Read(mask, SET)];
    __ppoll_chk(entries: Pointer, count: c_ulong, timeout: Pointer, mask: Pointer, room: size_t) -> c_int: [Stored(entries, count as size_t * 8), Read(timeout, TIME), Read(mask, SET)];
    select(count: c_int, readable: Pointer, writable: Pointer, failed: Pointer, timeout: Pointer) -> c_int: [Stored(readable, SET), Stored(writable, SET), Stored(failed, SET), Stored(timeout, TIME)];
    pselect(count: c_int, readable: Pointer, writable: Pointer, failed: Pointer, timeout: Pointer, mask: Pointer) -> c_int: [Stored(readable, SET), Stored(writable, SET), Stored(failed, SET), Read(timeout, TIME), Read(mask, SET)];
    epoll_ctl(epoll: c_int, action: c_int, file: c_int, event: Pointer) -> c_int: [Read(event, 12)];
    epoll_wait(epoll: c_int, events: Pointer, count: c_int, timeout: c_int) -> c_int: [Stored(events, count as size_t * 12)];
    epoll_pwait(epoll: c_int, events: Pointer, count: c_int, timeout: c_int, mask: Pointer) -> c_int: [Stored(events, count as size_t * 12), Read(mask, SET)];

    clock_gettime(clock: c_int, out: Pointer) -> c_int: [Stored(out, TIME)];
    gettimeofday(out: Pointer, zone: Pointer) -> c_int: [Stored(out, TIME), Stored(zone, 8)];
    nanosleep(time: Pointer, rest: Pointer) -> c_int: [Read(time, TIME), Stored(rest, TIME)];
    clock_nanosleep(clock: c_int, flags: c_int, time: Pointer, rest: Pointer) -> ErrorNumber: [Read(time, TIME), Stored(rest, TIME)];
    uname(out: Pointer) -> c_int: [Stored(out, 390)];

    pipe(ends: Pointer) -> c_int: [Stored(ends, 8)];
    pipe2(ends: Pointer, flags: c_int) -> c_int: [Stored(ends, 8)];
    socketpair(domain: c_int, kind: c_int, protocol: c_int, ends: Pointer) -> c_int: [Stored(ends, 8)];
    bind(socket: c_int, address: Pointer, len: socklen_t) -> c_int: [Read(address, len as size_t)];
    connect(socket: c_int, address: Pointer, len: socklen_t) -> c_int: [Read(address, len as size_t)];
    accept(socket: c_int, address: Pointer, len: Pointer) -> c_int: [Stored(address, SOCKET_ADDRESS), Stored(len, 4)];
    accept4(socket: c_int, address: Pointer, len: Pointer, flags: c_int) -> c_int: [Stored(address, SOCKET_ADDRESS), Stored(len, 4)];
    getsockname(socket: c_int, address: Pointer, len: Pointer) -> c_int: [Stored(address, SOCKET_ADDRESS), Stored(len, 4)];
    getpeername(socket: c_int, address: Pointer, len: Pointer) -> c_int: [Stored(address, SOCKET_ADDRESS), Stored(len, 4)];
    getsockopt(socket: c_int, level: c_int, option: c_int, value: Pointer, len: Pointer) -> c_int: [Stored(value, 4096), Stored(len, 4)];
    setsockopt(socket: c_int, level: c_int, option: c_int, value: Pointer, len: socklen_t) -> c_int: [Read(value, len as size_t)];
}

pub(super) type Copy = unsafe extern "C-unwind" fn(
    libc::pid_t,
    *const iovec,
    c_ulong,
    *const iovec,
    c_ulong,
    c_ulong,
) -> ssize_t;

/// An array of the program's.
type Array = (*const iovec, c_ulong);

/// Copies between this process and another one, either of which may have its buffers in managed memory. Buffers of the
/// other one are fetched there if the call fails or ends early.
fn between(
    process: libc::pid_t,
    local: Array,
    remote: Array,
    write: bool,
    call: impl Fn() -> ssize_t,
) -> ssize_t {
    let buffer = match write {
        true => AllRead(local.0, local.1 as usize),
        false => AllStored(local.0, local.1 as usize),
    };
    let array = size_of::<iovec>().saturating_mul(remote.1 as usize);
    let call = || match pages::any() {
        true => with(&[buffer, Read(remote.0.cast(), array)], &call),
        false => call(),
    };
    let got = call();
    if got < 0 && !got.is_fault() {
        return got;
    }
    let [locals, remotes] = [local, remote].map(|array| elements(array, got >= 0));
    let sum = |parts: &[iovec]| {
        parts
            .iter()
            .fold(0usize, |sum, part| sum.saturating_add(part.iov_len))
    };
    let managed = || {
        let parts = remotes
            .iter()
            .map(|part| (part.iov_base.addr() as u64, part.iov_len as u64));
        parts.filter(|(address, _)| pages::is_in(*address))
    };
    let wanted = sum(&locals).min(sum(&remotes));
    let is_short = |got: ssize_t| got.is_fault() || (got >= 0 && (got as usize) < wanted);
    if !is_short(got) || managed().next().is_none() {
        return got;
    }
    for _ in 0..TRIES {
        if !pages::remote::ask(process as u32, managed(), write) {
            break;
        }
        let got = call();
        if !is_short(got) {
            return got;
        }
    }
    // With the error of the call.
    call()
}

/// The elements of an array; none if it is not there. `is_there`: the kernel has just read it. Otherwise it is read as the
/// kernel reads it, since the array may be the reason for EFAULT. Leaves the error of the last call.
fn elements<'a>((parts, count): Array, is_there: bool) -> Cow<'a, [iovec]> {
    let count = count as usize;
    if parts.is_null() || count == 0 || count > MOST_PARTS {
        return Cow::Borrowed(&[]);
    }
    if is_there {
        // SAFETY: the array has as many elements.
        return Cow::Borrowed(unsafe { std::slice::from_raw_parts(parts, count) });
    }
    let none = iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    };
    let mut copy = vec![none; count];
    if !read_own(parts, &mut copy) {
        copy.clear();
    }
    Cow::Owned(copy)
}

pub(super) static READ_OTHER: Symbol = Symbol::new(c"process_vm_readv");
static WRITE_OTHER: Symbol = Symbol::new(c"process_vm_writev");

/// `process_vm_readv`
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn process_vm_readv(
    process: libc::pid_t,
    local: *const iovec,
    locals: c_ulong,
    remote: *const iovec,
    remotes: c_ulong,
    flags: c_ulong,
) -> ssize_t {
    // SAFETY: the C library's function of this name has this type; the program's arguments.
    unsafe {
        let real = mem::transmute::<*mut (), Copy>(READ_OTHER.address());
        between(process, (local, locals), (remote, remotes), false, || {
            real(process, local, locals, remote, remotes, flags)
        })
    }
}

/// `process_vm_writev`
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn process_vm_writev(
    process: libc::pid_t,
    local: *const iovec,
    locals: c_ulong,
    remote: *const iovec,
    remotes: c_ulong,
    flags: c_ulong,
) -> ssize_t {
    // SAFETY: as above.
    unsafe {
        let real = mem::transmute::<*mut (), Copy>(WRITE_OTHER.address());
        between(process, (local, locals), (remote, remotes), true, || {
            real(process, local, locals, remote, remotes, flags)
        })
    }
}

/// The C library's `syscall`.
static SYSCALL: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn find_syscall() -> *mut () {
    static REAL: Symbol = Symbol::new(c"syscall");
    let found = REAL.address();
    SYSCALL.store(found, Ordering::Relaxed);
    found
}

/// `syscall`. Passed on without a frame of its own while there is no managed memory, and always if the call is not among
/// [`POINTERS`].
///
/// # Safety
/// As the C library's.
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn syscall(number: c_long) -> c_long {
    naked_asm!(
        "cmp byte ptr [rip + {any}], 0",
        "jne 3f",
        "2:",
        "mov rax, [rip + {real}]",
        "test rax, rax",
        "je 4f",
        "jmp rax",
        "3:",
        "cmp rdi, 1024",
        "jae 2b",
        "lea rax, [rip + {pointers}]",
        "cmp byte ptr [rax + rdi], 0",
        "je 2b",
        "jmp {managed}",
        "4:",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        any = sym pages::ANY,
        real = sym SYSCALL,
        pointers = sym POINTERS,
        managed = sym syscall_with_managed,
        find = sym find_syscall,
    )
}

/// The arguments that are pointers, a bit for each, by the number of the system call. All others are passed on: unused
/// arguments have any value, and some calls return twice or have addresses of memory that they do not access.
static POINTERS: [u8; 1024] = {
    let calls: &[(c_long, &[usize])] = &[
        (libc::SYS_read, &[1]),
        (libc::SYS_write, &[1]),
        (libc::SYS_open, &[0]),
        (libc::SYS_stat, &[0, 1]),
        (libc::SYS_fstat, &[1]),
        (libc::SYS_lstat, &[0, 1]),
        (libc::SYS_poll, &[0]),
        (libc::SYS_ioctl, &[2]),
        (libc::SYS_pread64, &[1]),
        (libc::SYS_pwrite64, &[1]),
        (libc::SYS_readv, &[1]),
        (libc::SYS_writev, &[1]),
        (libc::SYS_access, &[0]),
        (libc::SYS_pipe, &[0]),
        (libc::SYS_select, &[1, 2, 3, 4]),
        (libc::SYS_nanosleep, &[0, 1]),
        (libc::SYS_sendto, &[1, 4]),
        (libc::SYS_recvfrom, &[1, 4, 5]),
        (libc::SYS_sendmsg, &[1]),
        (libc::SYS_recvmsg, &[1]),
        (libc::SYS_accept, &[1, 2]),
        (libc::SYS_accept4, &[1, 2]),
        (libc::SYS_connect, &[1]),
        (libc::SYS_bind, &[1]),
        (libc::SYS_getsockname, &[1, 2]),
        (libc::SYS_getpeername, &[1, 2]),
        (libc::SYS_socketpair, &[3]),
        (libc::SYS_setsockopt, &[3]),
        (libc::SYS_getsockopt, &[3, 4]),
        (libc::SYS_wait4, &[1, 3]),
        (libc::SYS_uname, &[0]),
        (libc::SYS_getcwd, &[0]),
        (libc::SYS_chdir, &[0]),
        (libc::SYS_rename, &[0, 1]),
        (libc::SYS_mkdir, &[0]),
        (libc::SYS_rmdir, &[0]),
        (libc::SYS_unlink, &[0]),
        (libc::SYS_readlink, &[0, 1]),
        (libc::SYS_gettimeofday, &[0, 1]),
        (libc::SYS_getrusage, &[1]),
        (libc::SYS_sysinfo, &[0]),
        (libc::SYS_times, &[0]),
        (libc::SYS_statfs, &[0, 1]),
        (libc::SYS_fstatfs, &[1]),
        (libc::SYS_futex, &[0]),
        (libc::SYS_sched_setaffinity, &[2]),
        (libc::SYS_sched_getaffinity, &[2]),
        (libc::SYS_getdents64, &[1]),
        (libc::SYS_clock_gettime, &[1]),
        (libc::SYS_clock_getres, &[1]),
        (libc::SYS_clock_nanosleep, &[2, 3]),
        (libc::SYS_epoll_ctl, &[3]),
        (libc::SYS_epoll_wait, &[1]),
        (libc::SYS_epoll_pwait, &[1, 4]),
        (libc::SYS_openat, &[1]),
        (libc::SYS_mkdirat, &[1]),
        (libc::SYS_unlinkat, &[1]),
        (libc::SYS_newfstatat, &[1, 2]),
        (libc::SYS_readlinkat, &[1, 2]),
        (libc::SYS_faccessat, &[1]),
        (libc::SYS_faccessat2, &[1]),
        (libc::SYS_statx, &[1, 4]),
        (libc::SYS_pselect6, &[1, 2, 3, 4]),
        (libc::SYS_ppoll, &[0, 2, 3]),
        (libc::SYS_preadv, &[1]),
        (libc::SYS_pwritev, &[1]),
        (libc::SYS_preadv2, &[1]),
        (libc::SYS_pwritev2, &[1]),
        (libc::SYS_pipe2, &[0]),
        (libc::SYS_prlimit64, &[2, 3]),
        (libc::SYS_getrandom, &[0]),
        (libc::SYS_memfd_create, &[0]),
        (libc::SYS_process_vm_readv, &[1, 3]),
        (libc::SYS_process_vm_writev, &[1, 3]),
    ];
    let mut pointers = [0; 1024];
    let mut call = 0;
    while call < calls.len() {
        let (number, arguments) = calls[call];
        let mut at = 0;
        while at < arguments.len() {
            pointers[number as usize] |= 1 << arguments[at];
            at += 1;
        }
        call += 1;
    }
    pointers
};

/// `syscall` in a program that has managed memory.
unsafe extern "C-unwind" fn syscall_with_managed(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    type Real =
        unsafe extern "C-unwind" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;
    let mut real = SYSCALL.load(Ordering::Relaxed);
    if real.is_null() {
        real = find_syscall();
    }
    // SAFETY: the C library's function takes a number and up to six arguments, which it reads all.
    let real = unsafe { mem::transmute::<*mut (), Real>(real) };
    let arguments = [a, b, c, d, e, f];
    let pointers = POINTERS.get(number as usize).copied().unwrap_or(0);
    let managed = |at: usize| pointers & 1 << at != 0 && pages::is_in(arguments[at] as u64);
    let vectors = match number {
        libc::SYS_readv | libc::SYS_preadv | libc::SYS_preadv2 | libc::SYS_process_vm_readv => {
            Some(AllStored(b as *const iovec, c))
        }
        libc::SYS_writev | libc::SYS_pwritev | libc::SYS_pwritev2 | libc::SYS_process_vm_writev => {
            Some(AllRead(b as *const iovec, c))
        }
        libc::SYS_sendmsg => Some(Buffer::Message(b as *const libc::msghdr, false)),
        libc::SYS_recvmsg => Some(Buffer::Message(b as *const libc::msghdr, true)),
        _ => None,
    };
    if vectors.is_none() && !(0..arguments.len()).any(managed) {
        // SAFETY: the program's arguments.
        return unsafe { real(number, a, b, c, d, e, f) };
    }
    let long = |at: usize| match number {
        libc::SYS_read | libc::SYS_pread64 | libc::SYS_recvfrom if at == 1 => Some((c, true)),
        libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_sendto if at == 1 => Some((c, false)),
        libc::SYS_getrandom if at == 0 => Some((b, true)),
        libc::SYS_getdents64 if at == 1 => Some((c, true)),
        _ => None,
    };
    let none = Read(std::ptr::null(), 0);
    let mut buffers = [none; 7];
    for (at, argument) in arguments.iter().enumerate() {
        if managed(at) {
            let pointer = *argument as Pointer;
            buffers[at] = match long(at) {
                Some((len, true)) => Stored(pointer, len),
                Some((len, false)) => Read(pointer, len),
                None => Stored(pointer, 4096),
            };
        }
    }
    buffers[6] = vectors.unwrap_or(none);
    // SAFETY: as above.
    with(&buffers, || unsafe { real(number, a, b, c, d, e, f) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn every_name_is_one_of_the_c_library() {
        for name in NAMES
            .iter()
            .chain(&["process_vm_readv", "process_vm_writev", "syscall"])
        {
            let name = std::ffi::CString::new(*name).expect("a name");
            // SAFETY: a C string.
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?}");
        }
    }

    #[test]
    fn replacements_answer_as_the_c_library() {
        type Path = unsafe extern "C-unwind" fn(Pointer, *mut libc::stat) -> c_int;
        type File = unsafe extern "C-unwind" fn(c_int, *mut libc::stat) -> c_int;
        type At = unsafe extern "C-unwind" fn(c_int, Pointer, *mut libc::stat, c_int) -> c_int;
        let folder = tempfile::tempdir().expect("folder");
        let place = |name: &str| {
            let path = folder.path().join(name);
            std::ffi::CString::new(path.to_str().expect("text")).expect("text")
        };
        let (file, link, absent) = (place("file"), place("link"), place("absent"));
        std::fs::write(folder.path().join("file"), "words").expect("file");
        std::os::unix::fs::symlink("file", folder.path().join("link")).expect("link");
        let open = std::fs::File::open(folder.path().join("file")).expect("file");
        let function = |name| older::replacement(name).expect("a replacement");
        // SAFETY: the functions have these types; their arguments are there.
        let kinds = unsafe {
            let path = mem::transmute::<*mut (), Path>(function(c"stat64"));
            let of_link = mem::transmute::<*mut (), Path>(function(c"lstat"));
            let of_file = mem::transmute::<*mut (), File>(function(c"fstat64"));
            let at = mem::transmute::<*mut (), At>(function(c"fstatat"));
            let mut out: libc::stat = mem::zeroed();
            let mut kinds = Vec::new();
            assert_eq!(path(link.as_ptr().cast(), &raw mut out), 0);
            kinds.push((out.st_mode & libc::S_IFMT, out.st_size));
            assert_eq!(of_link(link.as_ptr().cast(), &raw mut out), 0);
            kinds.push((out.st_mode & libc::S_IFMT, 4));
            assert_eq!(of_file(open.as_raw_fd(), &raw mut out), 0);
            kinds.push((out.st_mode & libc::S_IFMT, out.st_size));
            assert_eq!(at(libc::AT_FDCWD, file.as_ptr().cast(), &raw mut out, 0), 0);
            kinds.push((out.st_mode & libc::S_IFMT, out.st_size));
            assert_eq!(path(absent.as_ptr().cast(), &raw mut out), -1);
            assert_eq!(*libc::__errno_location(), libc::ENOENT);
            kinds
        };
        let file = (libc::S_IFREG, 5);
        assert_eq!(kinds, [file, (libc::S_IFLNK, 4), file, file]);
        assert_eq!(older::replacement(c"read"), None);
    }

    #[test]
    fn arrays_that_are_not_there_are_the_kernels_error() {
        let mut word = 7u64;
        let mut other = 0u64;
        let part = |at: *mut u64| iovec {
            iov_base: at.cast(),
            iov_len: 8,
        };
        let (to, from) = (part(&raw mut other), part(&raw mut word));
        let absent = std::ptr::without_provenance::<iovec>(8);
        // SAFETY: the arrays are there, or an address where nothing is.
        unsafe {
            let own = libc::getpid();
            assert_eq!(
                process_vm_readv(own, &raw const to, 1, &raw const from, 1, 0),
                8
            );
            assert_eq!(other, 7);
            for (local, remote) in [(absent, &raw const from), (&raw const to, absent)] {
                assert_eq!(process_vm_readv(own, local, 1, remote, 1, 0), -1);
                assert_eq!(*libc::__errno_location(), libc::EFAULT);
            }
        }
    }

    #[test]
    fn system_calls_get_all_their_arguments() {
        type Call =
            unsafe extern "C-unwind" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;
        // SAFETY: callers give it up to seven integers.
        let call = unsafe { mem::transmute::<*const (), Call>(syscall as *const ()) };
        for call in [call, syscall_with_managed as Call] {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: new memory, which is given back.
            unsafe {
                let got = call(
                    libc::SYS_mmap,
                    0,
                    4096,
                    libc::PROT_READ as usize,
                    flags as usize,
                    usize::MAX,
                    0,
                );
                assert!(got > 0);
                assert_eq!(call(libc::SYS_munmap, got as usize, 4096, 0, 0, 0, 0), 0);
                // The sixth argument is an offset: not of a whole page.
                let got = call(libc::SYS_mmap, 0, 4096, 1, flags as usize, usize::MAX, 1);
                assert_eq!((got, *libc::__errno_location()), (-1, libc::EINVAL));
            }
        }
    }
}
