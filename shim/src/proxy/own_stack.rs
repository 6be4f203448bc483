//! Replaces pages of the calling thread's stack.
//!
//! A program may register a variable on its stack. The thread that replaces the pages must not run on them: values that
//! it pushes after the content was copied would be lost. So another thread does it, while the calling one sleeps in the
//! kernel.

use std::cell::Cell;
use std::fs;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use mpsshim_api::cuda::{CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY};

use crate::ffi::Status;

/// Bytes below the present frame that this module's own calls may use.
const BELOW: u64 = 256 << 10;
/// Interval between checks whether the calling thread sleeps.
const LOOK: Duration = Duration::from_micros(20);
/// Maximum number of checks.
const LOOKS: usize = 500_000;

thread_local! {
    /// End of the thread's stack; 0 before it is known.
    static TOP: Cell<u64> = const { Cell::new(0) };
}

/// Whether pages of `[first, last)` are in use as the calling thread's stack.
pub fn overlaps(first: u64, last: u64) -> bool {
    let here = ptr::from_ref(&first).addr() as u64;
    first < top() && last > here.saturating_sub(BELOW)
}

/// The end of the calling thread's stack.
fn top() -> u64 {
    TOP.with(|top| {
        if top.get() == 0 {
            top.set(find_top());
        }
        top.get()
    })
}

fn find_top() -> u64 {
    // SAFETY: all zero is a value of this type, which the call initializes and `pthread_attr_destroy` ends.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes) != 0 {
            return 0;
        }
        let (mut start, mut len) = (ptr::null_mut(), 0);
        libc::pthread_attr_getstack(&raw const attributes, &raw mut start, &raw mut len);
        libc::pthread_attr_destroy(&raw mut attributes);
        start.addr() as u64 + len as u64
    }
}

/// Runs `work` in another thread while the calling one does not touch its stack.
///
/// # Errors
/// `CUDA_ERROR_NOT_SUPPORTED` if it cannot be verified that it does not; `CUDA_ERROR_OUT_OF_MEMORY` if no thread can be
/// started; the errors of `work`.
pub fn aside(work: impl FnOnce() -> Status + Send + 'static) -> Status {
    let word = Arc::new(AtomicU32::new(0));
    let _signals = Blocked::all();
    // SAFETY: no arguments.
    let caller = unsafe { libc::gettid() };
    let theirs = word.clone();
    let thread = std::thread::Builder::new().spawn(move || {
        let outcome = match await_sleep(caller, &theirs) {
            true => work(),
            false => Err(CUDA_ERROR_NOT_SUPPORTED),
        };
        theirs.store(1, Ordering::Release);
        // SAFETY: the word is there.
        unsafe { libc::syscall(libc::SYS_futex, theirs.as_ptr(), WAKE, 1) };
        outcome
    });
    let thread = thread.map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    while word.load(Ordering::Acquire) == 0 {
        // SAFETY: the word is there; no timeout.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                WAIT,
                0,
                ptr::null::<libc::timespec>(),
            )
        };
    }
    thread.join().unwrap_or(Err(CUDA_ERROR_NOT_SUPPORTED))
}

const WAIT: libc::c_int = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
const WAKE: libc::c_int = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;

/// Waits until a thread of this process sleeps at a word; whether it does.
fn await_sleep(thread: libc::pid_t, word: &AtomicU32) -> bool {
    // The call's number and first argument, while the thread sleeps in it (proc(5)).
    let at_word = format!("{} {:#x} ", libc::SYS_futex, word.as_ptr().addr());
    let path = format!("/proc/self/task/{thread}/syscall");
    for _ in 0..LOOKS {
        match fs::read_to_string(&path) {
            Ok(call) if call.starts_with(&at_word) => return true,
            Ok(_) => std::thread::sleep(LOOK),
            Err(_) => return false,
        }
    }
    false
}

/// All signals are blocked for the calling thread: their handlers would run on its stack.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn all() -> Blocked {
        // SAFETY: all zero is a value of these types; both are initialized by the calls.
        unsafe {
            let (mut all, mut before): (libc::sigset_t, libc::sigset_t) =
                (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Blocked(before)
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the mask that the thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}
