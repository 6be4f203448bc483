//! `sigaction` and the functions that block signals, interposed for SIGSEGV only.
//!
//! [`crate::store_hold`] needs a handler for SIGSEGV that is called before the program's, in every thread. So the
//! program's action is kept here, returned when the program queries it, and performed for every fault that is not ours.
//! No thread really blocks SIGSEGV, since the kernel ends a process if one of its threads faults while SIGSEGV is
//! blocked. Until the handler is installed the program's action is the kernel's.
//!
//! Programs that call the kernel themselves (rt_sigaction, rt_sigprocmask) bypass this: their action is taken over when the
//! next hold begins.

use std::cell::Cell;
use std::ffi::c_void;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, sigaction as Action, sighandler_t, siginfo_t, sigset_t};
use parking_lot::Mutex;

use super::next;

/// A handler with SA_SIGINFO.
pub type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
type Sigaction = unsafe extern "C" fn(c_int, *const Action, *mut Action) -> c_int;
type Mask = unsafe extern "C" fn(c_int, *const sigset_t, *mut sigset_t) -> c_int;

/// The handler is installed.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// The program's action while it is. The handler reads it without the lock, as the kernel would.
static mut PROGRAMS: mem::MaybeUninit<Action> = mem::MaybeUninit::zeroed();
static CHANGING: Mutex<()> = Mutex::new(());

thread_local! {
    /// The program wants SIGSEGV blocked in this thread.
    static BLOCKED: Cell<bool> = const { Cell::new(false) };
}

fn real() -> Sigaction {
    static REAL: next::Symbol = next::Symbol::new(c"sigaction");
    // SAFETY: the C library's function of this name has this type.
    unsafe { mem::transmute::<*mut (), Sigaction>(REAL.address()) }
}

fn empty() -> Action {
    // SAFETY: all zero is SIG_DFL with an empty mask.
    unsafe { mem::zeroed() }
}

/// The program's action, as it is now.
fn programs() -> Action {
    // SAFETY: initialized; a plain struct, which a reader may see half changed only where the program changes it while it
    // faults in another thread.
    unsafe { (&raw const PROGRAMS).read_volatile().assume_init() }
}

/// Installs a handler that is called for SIGSEGV before the program's action.
pub fn take_faults(handler: Handler) {
    let _changing = CHANGING.lock();
    let mut now = empty();
    // SAFETY: asks only.
    unsafe { real()(libc::SIGSEGV, ptr::null(), &mut now) };
    if now.sa_sigaction == handler as sighandler_t {
        return;
    }
    // SAFETY: under the lock; see `programs`.
    unsafe { (&raw mut PROGRAMS).write_volatile(mem::MaybeUninit::new(now)) };
    let mut ours = empty();
    ours.sa_sigaction = handler as sighandler_t;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // Handlers of other signals may fault too, which they must not while SIGSEGV is blocked.
    // SAFETY: our own set.
    unsafe { libc::sigfillset(&mut ours.sa_mask) };
    // SAFETY: the handler is async-signal-safe, and passes other faults to the previous action.
    unsafe { real()(libc::SIGSEGV, &ours, ptr::null_mut()) };
    TAKEN.store(true, Ordering::Release);
}

/// Performs the program's action for SIGSEGV. Async-signal-safe.
///
/// # Safety
/// The arguments are those of a handler with SA_SIGINFO that runs now.
pub unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let action = programs();
    // SAFETY: by the caller's promise.
    let sent = unsafe { (*info).si_code } <= 0;
    let blocked = !sent && BLOCKED.get();
    match action.sa_sigaction {
        libc::SIG_IGN if sent => return,
        libc::SIG_DFL | libc::SIG_IGN => return end(signal, sent),
        // As the kernel does with a fault whose signal is blocked.
        _ if blocked => return end(signal, sent),
        _ => {}
    }
    if action.sa_flags & libc::SA_RESETHAND != 0 {
        // SAFETY: see `programs`.
        unsafe { (&raw mut PROGRAMS).write_volatile(mem::MaybeUninit::new(empty())) };
    }
    let mut before = mem::MaybeUninit::<sigset_t>::uninit();
    // SAFETY: the masks of the interrupted code and of the program's handler; the handler has the type
    // that its flags name.
    unsafe {
        let mut mask = action.sa_mask;
        if let Some(context) = context.cast::<libc::ucontext_t>().as_ref() {
            for other in
                (1..=64).filter(|other| libc::sigismember(&context.uc_sigmask, *other) == 1)
            {
                libc::sigaddset(&mut mask, other);
            }
        }
        // The program's handler may use memory whose faults are ours.
        libc::sigdelset(&mut mask, signal);
        kernel_mask(libc::SIG_SETMASK, &mask, before.as_mut_ptr());
        if action.sa_flags & libc::SA_SIGINFO != 0 {
            mem::transmute::<sighandler_t, Handler>(action.sa_sigaction)(signal, info, context);
        } else {
            mem::transmute::<sighandler_t, unsafe extern "C" fn(c_int)>(action.sa_sigaction)(
                signal,
            );
        }
        kernel_mask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
    }
}

/// The default action. A fault comes again when the handler returns; a signal that was sent is sent once more.
fn end(signal: c_int, sent: bool) {
    // SAFETY: the default action; the signal is blocked until the handler returns.
    unsafe {
        real()(signal, &empty(), ptr::null_mut());
        if sent {
            libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), signal);
        }
    }
}

/// The kernel's call, which is async-signal-safe.
///
/// # Safety
/// As `rt_sigprocmask`; sets are null or there.
unsafe fn kernel_mask(how: c_int, set: *const sigset_t, before: *mut sigset_t) -> c_int {
    /// Bytes of the kernel's set, with which the C library's begins.
    const BYTES: usize = 8;
    if !before.is_null() {
        // SAFETY: there, by the caller's promise.
        unsafe { libc::sigemptyset(before) };
    }
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, set, before, BYTES) as c_int }
}

/// `int sigaction(int signal, const struct sigaction *action, struct sigaction *before)`
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sigaction(
    signal: c_int,
    action: *const Action,
    before: *mut Action,
) -> c_int {
    // SAFETY: null, or the program's struct.
    let mut wanted = unsafe { action.as_ref() }.copied();
    if let Some(wanted) = &mut wanted {
        // A handler that stores to a held page must not end the process.
        // SAFETY: the copy's own set.
        unsafe { libc::sigdelset(&mut wanted.sa_mask, libc::SIGSEGV) };
    }
    let given = wanted.as_ref().map_or(ptr::null(), ptr::from_ref);
    if signal != libc::SIGSEGV || !TAKEN.load(Ordering::Acquire) {
        // SAFETY: the program's arguments, but for the mask.
        return unsafe { real()(signal, given, before) };
    }
    let _changing = CHANGING.lock();
    let now = programs();
    if let Some(wanted) = wanted {
        // SAFETY: under the lock; see `programs`.
        unsafe { (&raw mut PROGRAMS).write_volatile(mem::MaybeUninit::new(wanted)) };
    }
    if !before.is_null() {
        // SAFETY: not null, so the program's struct.
        unsafe { before.write(now) };
    }
    0
}

/// `sighandler_t signal(int signal, sighandler_t handler)`
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn signal(number: c_int, handler: sighandler_t) -> sighandler_t {
    type Signal = unsafe extern "C" fn(c_int, sighandler_t) -> sighandler_t;
    static REAL: next::Symbol = next::Symbol::new(c"signal");
    if number != libc::SIGSEGV || !TAKEN.load(Ordering::Acquire) {
        // SAFETY: the C library's function has this type; the program's arguments.
        return unsafe { mem::transmute::<*mut (), Signal>(REAL.address())(number, handler) };
    }
    let mut wanted = empty();
    wanted.sa_sigaction = handler;
    wanted.sa_flags = libc::SA_RESTART;
    let mut before = empty();
    // SAFETY: both structs are ours.
    unsafe { sigaction(number, &wanted, &mut before) };
    before.sa_sigaction
}

/// Applies the program's changes for SIGSEGV to [`BLOCKED`], the others to the kernel's mask.
///
/// # Safety
/// As `sigprocmask`.
unsafe fn change_mask(
    real: Mask,
    how: c_int,
    set: *const sigset_t,
    before: *mut sigset_t,
) -> c_int {
    let was = BLOCKED.get();
    // SAFETY: null, or the program's set.
    let mut wanted = unsafe { set.as_ref() }.copied();
    let mut blocks = was;
    if let Some(wanted) = &mut wanted {
        // SAFETY: the copy is ours.
        let named = unsafe { libc::sigismember(wanted, libc::SIGSEGV) } == 1;
        blocks = match how {
            libc::SIG_BLOCK => was || named,
            libc::SIG_UNBLOCK => was && !named,
            _ => named,
        };
        if named && how != libc::SIG_UNBLOCK {
            // SAFETY: as above.
            unsafe { libc::sigdelset(wanted, libc::SIGSEGV) };
        }
    }
    let given = wanted.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the program's arguments, but for SIGSEGV.
    let done = unsafe { real(how, given, before) };
    if done == 0 {
        BLOCKED.set(blocks);
        if was && !before.is_null() {
            // SAFETY: not null, so the program's set.
            unsafe { libc::sigaddset(before, libc::SIGSEGV) };
        }
    }
    done
}

/// `int sigprocmask(int how, const sigset_t *set, sigset_t *before)`
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sigprocmask(
    how: c_int,
    set: *const sigset_t,
    before: *mut sigset_t,
) -> c_int {
    static REAL: next::Symbol = next::Symbol::new(c"sigprocmask");
    // SAFETY: the C library's function has this type; the program's arguments.
    unsafe {
        let real = mem::transmute::<*mut (), Mask>(REAL.address());
        change_mask(real, how, set, before)
    }
}

/// `int pthread_sigmask(int how, const sigset_t *set, sigset_t *before)`
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_sigmask(
    how: c_int,
    set: *const sigset_t,
    before: *mut sigset_t,
) -> c_int {
    static REAL: next::Symbol = next::Symbol::new(c"pthread_sigmask");
    // SAFETY: as above.
    unsafe {
        let real = mem::transmute::<*mut (), Mask>(REAL.address());
        change_mask(real, how, set, before)
    }
}
