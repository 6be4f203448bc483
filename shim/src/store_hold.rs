//! Holds stores to pages of this process while other pages with the same content take their place.
//!
//! The pages are write-protected ([`Hold`]). A thread that stores to them meanwhile gets SIGSEGV, waits in the handler
//! here until the hold ends, and repeats the store. Loads are not held up. System calls that store there fail with
//! EFAULT; the C library's functions repeat them ([`crate::loader::transfers`]).
//!
//! The handler is installed with the first hold and stays. The program's own action for SIGSEGV is kept beside it
//! ([`crate::loader::signals`]) and gets every fault that is not ours.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::loader::signals;
use crate::proxy::pages;

/// Counts beginnings and ends of holds: odd during a hold.
static EPOCH: AtomicU32 = AtomicU32::new(0);
/// The addresses that are held.
static START: AtomicU64 = AtomicU64::new(0);
static END: AtomicU64 = AtomicU64::new(0);
/// One hold at a time.
static HOLDING: Mutex<()> = Mutex::new(());
/// The handler's hooks: for each fault, and for a store that has waited for long.
static FAULTS: Mutex<Option<Hooks>> = Mutex::new(None);
static HOOKED: AtomicBool = AtomicBool::new(false);
static mut HOOKS: Hooks = Hooks {
    absent: |_| false,
    impatient: || (),
};

/// Functions that the handler calls; async-signal-safe.
#[derive(Clone, Copy, Debug)]
pub struct Hooks {
    /// For a fault at an address where nothing may be mapped. Returns whether memory is mapped there now.
    pub absent: fn(u64) -> bool,
    /// A store has waited for [`PATIENCE`].
    pub impatient: fn(),
}

/// How long a store waits before the holder is told.
static PATIENCE: libc::timespec = libc::timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

thread_local! {
    /// The last fault of this thread that was tried again without a hold in its way: address and epoch.
    static TRIED: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
}

/// The number of beginnings and ends of holds so far. A call during which it changed may have failed for that reason.
#[inline]
pub fn epoch() -> u32 {
    EPOCH.load(Ordering::Acquire)
}

/// Stores to `[start, end)` are held, once the caller has protected the pages, until this is dropped.
#[derive(Debug)]
pub struct Hold {
    _one: MutexGuard<'static, ()>,
}

impl Hold {
    /// Begins a hold. Until it ends, the calling thread must not allocate or call a function that takes a lock of the
    /// program's.
    pub fn begin(start: u64, end: u64) -> Hold {
        let one = HOLDING.lock();
        install();
        START.store(start, Ordering::Relaxed);
        END.store(end, Ordering::Relaxed);
        EPOCH.fetch_add(1, Ordering::Release);
        Hold { _one: one }
    }
}

impl Hold {
    /// The hold that this thread began and forgot.
    ///
    /// # Safety
    /// It did, once for each call.
    pub unsafe fn of_this_thread() -> Hold {
        // SAFETY: the caller's promise: the mutex is locked, by this thread.
        let one = unsafe { HOLDING.make_guard_unchecked() };
        Hold { _one: one }
    }
}

/// Lets held stores go on although the hold has not ended. The caller has made the pages writable again.
pub fn lift() {
    END.store(0, Ordering::Release);
    wake();
}

/// Holds stores to `[start, end)` again after [`lift`], during the same hold.
pub fn resume(start: u64, end: u64) {
    START.store(start, Ordering::Relaxed);
    END.store(end, Ordering::Release);
}

impl Drop for Hold {
    fn drop(&mut self) {
        EPOCH.fetch_add(1, Ordering::Release);
        wake();
    }
}

/// Sets the handler's hooks; only the first call has an effect.
pub fn hook(hooks: Hooks) {
    let mut known = FAULTS.lock();
    if known.is_none() {
        *known = Some(hooks);
        // SAFETY: written once, before the flag says that it is there.
        unsafe { HOOKS = hooks };
        HOOKED.store(true, Ordering::Release);
    }
}

/// In a forked child: nothing is held there, whatever the parent held.
///
/// # Safety
/// The calling thread is the only one.
pub unsafe fn forget() {
    if EPOCH.load(Ordering::Relaxed) % 2 == 1 {
        EPOCH.fetch_add(1, Ordering::Release);
    }
    if HOLDING.is_locked() {
        // SAFETY: the thread that held it is not in this process.
        unsafe { HOLDING.force_unlock() };
    }
}

/// Puts the handler first, if it is not.
pub fn install() {
    signals::take_faults(on_fault);
}

/// Waits for the end of a hold.
fn wait(epoch: u32) {
    const WAIT: libc::c_int = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word and the time are there.
    let done = unsafe { libc::syscall(libc::SYS_futex, EPOCH.as_ptr(), WAIT, epoch, &PATIENCE) };
    // SAFETY: the thread's own errno.
    let timed_out = done < 0 && unsafe { *libc::__errno_location() } == libc::ETIMEDOUT;
    if timed_out && HOOKED.load(Ordering::Acquire) {
        // SAFETY: written before the flag was.
        (unsafe { HOOKS.impatient })();
    }
}

fn wake() {
    const WAKE: libc::c_int = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is there.
    unsafe { libc::syscall(libc::SYS_futex, EPOCH.as_ptr(), WAKE, i32::MAX) };
}

/// SIGSEGV. Async-signal-safe: system calls and atomics only.
unsafe extern "C" fn on_fault(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: the thread's own errno, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel's struct, given to every handler with SA_SIGINFO.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr() as u64) };
    let again = code > 0 && (pages::fault(address, is_store(context)) || is_ours(address));
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !again {
        // SAFETY: the kernel's own arguments.
        unsafe { signals::pass_on(signal, info, context) };
    }
}

/// Whether a fault was a store, by the error code of the page fault.
fn is_store(context: *mut c_void) -> bool {
    const WRITE: i64 = 2;
    // SAFETY: the kernel's struct, given to every handler with SA_SIGINFO.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    context.uc_mcontext.gregs[libc::REG_ERR as usize] & WRITE != 0
}

/// Whether the access is to be repeated.
fn is_ours(address: u64) -> bool {
    let held = |epoch| {
        epoch % 2 == 1
            && address >= START.load(Ordering::Relaxed)
            && address < END.load(Ordering::Relaxed)
    };
    let mut epoch = EPOCH.load(Ordering::Acquire);
    let mut waited = false;
    while held(epoch) {
        wait(epoch);
        waited = true;
        epoch = EPOCH.load(Ordering::Acquire);
    }
    // SAFETY: written before the flag was.
    let made = HOOKED.load(Ordering::Acquire) && (unsafe { HOOKS.absent })(address);
    if waited || made {
        return true;
    }
    // The fault may belong to a hold that has ended since. If it comes again, it does not.
    TRIED.with(|tried| tried.replace((address, epoch)) != (address, epoch))
}

/// Sets the protection of whole pages; whether the kernel does.
pub fn set_protection(start: u64, len: u64, protection: libc::c_int) -> bool {
    // SAFETY: the pages are the program's, and keep their content.
    unsafe { libc::mprotect(start as *mut c_void, len as usize, protection) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;
    use std::sync::Arc;
    use std::time::Duration;

    fn page() -> u64 {
        // SAFETY: new memory.
        let got = unsafe {
            libc::mmap(
                ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(got, libc::MAP_FAILED);
        got as u64
    }

    #[test]
    fn stores_wait_for_the_end_of_a_hold_and_loads_do_not() {
        let at = page();
        // SAFETY: a word of a page that stays.
        let word = unsafe { &*(at as *const AtomicU32) };
        word.store(1, Ordering::Relaxed);
        let hold = Hold::begin(at, at + 4096);
        assert!(set_protection(at, 4096, libc::PROT_READ));
        let begun = Arc::new(AtomicBool::new(false));
        let theirs = begun.clone();
        let writer = std::thread::spawn(move || {
            // SAFETY: as above.
            let word = unsafe { &*(at as *const AtomicU32) };
            assert_eq!(word.load(Ordering::Relaxed), 1);
            theirs.store(true, Ordering::Release);
            word.store(2, Ordering::Release);
        });
        while !begun.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(word.load(Ordering::Acquire), 1, "the store was not held");
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        assert!(set_protection(at, 4096, rw));
        drop(hold);
        writer.join().expect("the writer");
        assert_eq!(word.load(Ordering::Acquire), 2);
    }
}
