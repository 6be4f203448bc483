//! Threads: how the shim starts its own, which of them run host functions, and which hold locks that handlers of faults use.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// A thread for host functions has been started: only then is it necessary to check whether the caller is one.
static ANY_FOR_HOST_FUNCTIONS: AtomicBool = AtomicBool::new(false);

thread_local! {
    static RUNS_HOST_FUNCTIONS: Cell<bool> = const { Cell::new(false) };
    static REQUESTING: Cell<u32> = const { Cell::new(0) };
}

/// The calling thread holds, or waits for, a lock that a request for host memory takes, until this is dropped.
#[derive(Debug)]
pub struct Requesting(PhantomData<*const ()>);

impl Requesting {
    pub fn new() -> Requesting {
        REQUESTING.set(REQUESTING.get() + 1);
        Requesting(PhantomData)
    }
}

impl Drop for Requesting {
    fn drop(&mut self) {
        REQUESTING.set(REQUESTING.get() - 1);
    }
}

/// Whether the code that the handler of a fault has interrupted in this thread holds, or waits for, such a lock.
pub fn is_requesting() -> bool {
    REQUESTING.get() != 0
}

/// The content of a lock.
#[inline]
pub fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`locked`]; `None` if a thread has it.
#[inline]
pub fn try_locked<T>(lock: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match lock.try_lock() {
        Ok(content) => Some(content),
        Err(TryLockError::Poisoned(content)) => Some(content.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Whether the calling thread runs host functions, which may make no CUDA calls.
#[inline]
pub fn runs_host_functions() -> bool {
    ANY_FOR_HOST_FUNCTIONS.load(Ordering::Relaxed) && RUNS_HOST_FUNCTIONS.get()
}

/// Starts a thread that runs host functions, with a stack of `stack` bytes.
pub fn spawn_for_host_functions(
    stack: usize,
    body: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    ANY_FOR_HOST_FUNCTIONS.store(true, Ordering::Relaxed);
    let builder = std::thread::Builder::new()
        .name("cuda-hostfn".into())
        .stack_size(stack);
    let marked = move || {
        RUNS_HOST_FUNCTIONS.set(true);
        body();
    };
    without_signals(|| builder.spawn(marked)).map(drop)
}

/// Calls `what` with all signals but SIGSEGV blocked, for example to start a thread: the program's signals are for the
/// program's threads, and a new thread inherits the mask of the thread that starts it.
pub fn without_signals<T>(what: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are ours; the calling thread gets its own mask back.
    let before = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        // A store to a held page raises this signal in the storing thread (`store_hold`).
        libc::sigdelset(&mut all, libc::SIGSEGV);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    let done = what();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    done
}
