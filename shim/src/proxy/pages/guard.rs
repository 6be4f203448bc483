//! Two ways to learn of accesses to the host's pages of managed memory.
//!
//! By signals: pages are protected, and an access raises SIGSEGV. The kernel itself gets EFAULT there.
//!
//! By userfaultfd, where the kernel lets this process handle the kernel's own faults: the pages stay in the page cache and
//! are taken out of the page tables. An access waits, also one of the kernel in a system call, until the thread here has
//! made the page accessible. Pages that may only be read are write-protected in the page tables. Ranges without host pages
//! are reserved addresses in both ways: an access there raises SIGSEGV.

use std::ffi::{c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::settings::{self, ManagedFaults};
use crate::thread;

/// Address and bytes.
type Place = (u64, u64);

/// Resolves a fault: address, whether it is a store; returns whether the access is to be repeated.
type Handle = fn(u64, bool) -> bool;

/// Bytes of a page of the host.
pub const PAGE: u64 = 4096;

/// The descriptor of userfaultfd; -1 if pages are guarded by signals.
static FD: AtomicI32 = AtomicI32::new(-1);

// <linux/userfaultfd.h>
const NEW: u64 = 0xaa00;
const API: u64 = 0xc018_aa3f;
const REGISTER: u64 = 0xc020_aa00;
const WAKE: u64 = 0x8010_aa02;
const WRITEPROTECT: u64 = 0xc018_aa06;
const CONTINUE: u64 = 0xc020_aa07;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const FEATURE_WP_SHMEM: u64 = 1 << 12;
const REGISTER_WP: u64 = 1 << 1;
const REGISTER_MINOR: u64 = 1 << 2;
const CONTINUE_WP: u64 = 1 << 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const FAULT_WRITE: u64 = 1 << 0;
const FAULT_WP: u64 = 1 << 1;
const MADV_POPULATE_WRITE: c_int = 23;
/// As MADV_DONTNEED, of locked pages too.
const MADV_DONTNEED_LOCKED: c_int = 24;

/// `struct uffd_msg` of a page fault.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Message {
    event: u8,
    pad: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

/// The result of a system call, or its error.
fn result(got: c_long) -> Result<c_long, c_int> {
    match got {
        // SAFETY: the thread's own errno.
        -1 => Err(unsafe { *libc::__errno_location() }),
        got => Ok(got),
    }
}

fn ioctl<const N: usize>(fd: c_int, request: u64, words: &mut [u64; N]) -> Result<c_long, c_int> {
    // SAFETY: the structs of these requests consist of N words.
    result(unsafe { libc::syscall(libc::SYS_ioctl, fd, request, words.as_mut_ptr()) })
}

fn advise((start, len): Place, advice: c_int) -> Result<c_long, c_int> {
    // SAFETY: pages of managed memory; the advice changes no content of shared pages.
    result(unsafe { libc::syscall(libc::SYS_madvise, start, len, advice) })
}

/// Sets the protection of pages. Returns whether the kernel did.
fn protect((start, len): Place, protection: c_int) -> bool {
    // SAFETY: pages of a region, which nothing else maps.
    unsafe { libc::mprotect(start as *mut c_void, len as usize, protection) == 0 }
}

/// The descriptor, if pages are guarded by userfaultfd.
fn descriptor() -> Option<c_int> {
    Some(FD.load(Ordering::Relaxed)).filter(|fd| *fd >= 0)
}

/// Whether the kernel's own accesses wait too.
pub fn covers_the_kernel() -> bool {
    descriptor().is_some()
}

/// Chooses the way. To be called once, before there is a region. With userfaultfd `handle` is called in a thread.
pub fn start(handle: Handle) {
    let wanted = settings::managed_faults();
    let refused = match wanted {
        ManagedFaults::Signal => None,
        ManagedFaults::Auto | ManagedFaults::Userfaultfd => match open() {
            Ok(fd) => match serve(fd, handle) {
                Ok(()) => {
                    FD.store(fd, Ordering::Relaxed);
                    tracing::info!("faults of managed memory come by userfaultfd");
                    return;
                }
                Err(error) => {
                    close(fd);
                    Some(error)
                }
            },
            Err(error) => Some(std::io::Error::from_raw_os_error(error)),
        },
    };
    match refused {
        Some(error) if wanted == ManagedFaults::Userfaultfd => {
            tracing::warn!(%error, "no userfaultfd: faults of managed memory come by signals");
        }
        Some(error) => {
            tracing::info!(%error, "faults of managed memory come by signals, without userfaultfd");
        }
        None => tracing::info!("faults of managed memory come by signals"),
    }
}

/// In a forked child, which has no managed memory: closes the parent's descriptor. Async-signal-safe.
pub fn leave() {
    if let fd @ 0.. = FD.swap(-1, Ordering::Relaxed) {
        close(fd);
    }
}

fn close(fd: c_int) {
    // SAFETY: a descriptor of this module.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// A descriptor for faults of programs and of the kernel, once it has been tried.
fn open() -> Result<c_int, c_int> {
    let flags = libc::O_CLOEXEC;
    // SAFETY: a C string; further arguments are integers.
    let made = unsafe {
        let device = c"/dev/userfaultfd".as_ptr();
        let access = libc::O_RDWR | libc::O_CLOEXEC;
        let device = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, device, access);
        match device {
            0.. => {
                let made = result(libc::syscall(libc::SYS_ioctl, device, NEW, flags));
                close(device as c_int);
                made
            }
            _ => result(libc::syscall(libc::SYS_userfaultfd, flags)),
        }
    };
    let fd = made? as c_int;
    let features = FEATURE_PAGEFAULT_FLAG_WP | FEATURE_MINOR_SHMEM | FEATURE_WP_SHMEM;
    let tried = ioctl(fd, API, &mut [0xaa, features, 0]).and_then(|_| attempt(fd));
    if tried.is_err() {
        close(fd);
    }
    tried.map(|()| fd)
}

/// Does with a page of its own all that is done with pages of regions.
fn attempt(fd: c_int) -> Result<(), c_int> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a file and a mapping of this function's own.
    unsafe {
        let file = libc::syscall(libc::SYS_memfd_create, c"pages".as_ptr(), libc::MFD_CLOEXEC);
        let file = result(file)? as c_int;
        let sized = result(libc::syscall(libc::SYS_ftruncate, file, PAGE));
        let shared = libc::MAP_SHARED;
        let made = libc::mmap(ptr::null_mut(), PAGE as usize, access, shared, file, 0);
        close(file);
        sized?;
        if made == libc::MAP_FAILED {
            return Err(libc::ENOMEM);
        }
        let place = (made as u64, PAGE);
        let done = advise(place, MADV_POPULATE_WRITE)
            .and_then(|_| register(fd, place))
            .and_then(|()| advise(place, MADV_DONTNEED_LOCKED))
            .and_then(|_| map(fd, place, false))
            .and_then(|()| map(fd, place, true))
            .and_then(|()| advise(place, MADV_DONTNEED_LOCKED));
        libc::munmap(made, PAGE as usize);
        done.map(drop)
    }
}

fn register(fd: c_int, (start, len): Place) -> Result<(), c_int> {
    ioctl(
        fd,
        REGISTER,
        &mut [start, len, REGISTER_WP | REGISTER_MINOR, 0],
    )
    .map(drop)
}

/// Enters pages into the page tables and wakes the threads that wait for them. Pages that are there stay as they are, but
/// become writable if `write`.
fn map(fd: c_int, (start, len): Place, write: bool) -> Result<(), c_int> {
    let (mut at, end) = (start, start + len);
    let mut met = false;
    while at < end {
        let mode = if write { 0 } else { CONTINUE_WP };
        let mut words = [at, end - at, mode, 0];
        match ioctl(fd, CONTINUE, &mut words) {
            Ok(_) => break,
            // Some pages of the range, or none yet.
            Err(libc::EAGAIN) => at += u64::try_from(words[3] as i64).unwrap_or(0),
            Err(libc::EEXIST) => {
                met = true;
                at += PAGE;
            }
            Err(libc::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    if met && write {
        allow_stores(fd, (start, len))?;
    }
    if met {
        wake((start, len));
    }
    Ok(())
}

/// Ends the write protection of pages that are in the page tables.
fn allow_stores(fd: c_int, (start, len): Place) -> Result<(), c_int> {
    loop {
        match ioctl(fd, WRITEPROTECT, &mut [start, len, 0]) {
            Err(libc::EAGAIN | libc::EINTR) => {}
            done => return done.map(drop),
        }
    }
}

/// Lets threads that wait for a fault in a range try again.
pub fn wake((start, len): Place) {
    if let Some(fd) = descriptor() {
        let _ = ioctl(fd, WAKE, &mut [start, len]);
    }
}

/// The host's pages at `host` have just been mapped at `place` too, without access: from now on accesses there are
/// faults. Returns whether the kernel agrees.
pub fn attach(host: u64, place: Place) -> bool {
    let Some(fd) = descriptor() else {
        return true;
    };
    // A page that the file lacks would be made by the access, without a fault.
    let done = advise((host, place.1), MADV_POPULATE_WRITE).and_then(|_| register(fd, place));
    if let Err(error) = done {
        let error = std::io::Error::from_raw_os_error(error);
        tracing::warn!(%error, "userfaultfd does not take pages of managed memory");
    }
    done.is_ok() && protect(place, libc::PROT_READ | libc::PROT_WRITE)
}

/// From now on every access to these pages is a fault. Returns whether the kernel agrees.
pub fn deny(place: Place) -> bool {
    match descriptor() {
        None => protect(place, libc::PROT_NONE),
        Some(_) => advise(place, MADV_DONTNEED_LOCKED).is_ok(),
    }
}

/// Makes pages with host memory accessible: for loads, or for all. `is_mapped`: loads have been possible so far. Returns
/// whether the kernel agrees.
pub fn allow(place: Place, is_mapped: bool, write: bool) -> bool {
    let Some(fd) = descriptor() else {
        let stores = if write { libc::PROT_WRITE } else { 0 };
        let allowed = protect(place, libc::PROT_READ | stores);
        if allowed {
            populate(place, write);
        }
        return allowed;
    };
    let done = match is_mapped && write {
        true => allow_stores(fd, place),
        false => map(fd, place, write),
    };
    if let Err(error) = done {
        let error = std::io::Error::from_raw_os_error(error);
        tracing::warn!(%error, "pages of managed memory at {:#x} are not mapped", place.0);
    }
    done.is_ok()
}

/// A thread waits for a page of a range that is accessible: the kernel may have taken the page out of the page tables, or
/// the thread has come too late to be woken.
pub fn allow_again(address: u64, write: bool) {
    if let Some(fd) = descriptor() {
        let place = (address & !(PAGE - 1), PAGE);
        let _ = map(fd, place, write);
        wake(place);
    }
}

/// Fills in the page tables of pages that the host will use, where that takes less time than as many faults.
fn populate((start, len): Place, write: bool) {
    const WORTHWHILE: u64 = 128 << 10;
    const MADV_POPULATE_READ: c_int = 22;
    if len >= WORTHWHILE {
        let advice = match write {
            true => MADV_POPULATE_WRITE,
            false => MADV_POPULATE_READ,
        };
        // Older kernels refuse it.
        let _ = advise((start, len), advice);
    }
}

/// Starts the thread that handles faults.
fn serve(fd: c_int, handle: Handle) -> std::io::Result<()> {
    let builder = std::thread::Builder::new()
        .name("mpsshim-faults".into())
        .stack_size(256 << 10);
    thread::without_signals(|| builder.spawn(move || run(fd, handle))).map(drop)
}

fn run(fd: c_int, handle: Handle) {
    let mut messages = [Message::default(); 16];
    loop {
        let len = size_of_val(&messages);
        // SAFETY: the buffer has this length, and all its values are valid.
        let got = unsafe { libc::syscall(libc::SYS_read, fd, messages.as_mut_ptr(), len) };
        let count = match result(got) {
            Ok(bytes) => bytes as usize / size_of::<Message>(),
            Err(libc::EINTR | libc::EAGAIN) => 0,
            Err(error) => {
                let error = std::io::Error::from_raw_os_error(error);
                tracing::error!(%error, "faults of managed memory are not handled any more");
                return;
            }
        };
        let faults = messages[..count]
            .iter()
            .filter(|message| message.event == EVENT_PAGEFAULT);
        for fault in faults {
            let page = (fault.address & !(PAGE - 1), PAGE);
            if !handle(fault.address, fault.flags & (FAULT_WRITE | FAULT_WP) != 0) {
                // The access fails: as SIGSEGV, or in the kernel as EFAULT.
                protect(page, libc::PROT_NONE);
            }
            wake(page);
        }
    }
}
