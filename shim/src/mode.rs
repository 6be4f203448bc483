//! The decision of `cuInit`: whether this process runs on the genuine driver or through a server.
//!
//! The first `cuInit` that succeeds decides for the life of the process. If it fails, nothing is decided, and the next one
//! tries again. As natively, a child that is forked after the decision cannot use CUDA without exec: in pass-through the
//! genuine driver refuses its calls, in proxy mode the child's slots do.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_MPS_CONNECTION_FAILED, CUDA_ERROR_NOT_INITIALIZED,
    CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUresult, CUuuid,
};
use mpsshim_api::table;
use parking_lot::ReentrantMutex;

use crate::connect::Served;
use crate::loader::exports;
use crate::loader::genuine::{self, Driver, Error};
use crate::loader::procaddr;
use crate::loader::symbols::{self, COUNT, SYMBOLS, Target};
use crate::proxy::calls::{SERVED, entries};
use crate::proxy::pages;
use crate::refusal::refuse;
use crate::{connect, daemon, direct, log, nvidia_mps, settings};

/// Where calls go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mode {
    /// No `cuInit` has succeeded yet. Calls go to the genuine driver, which decides which of them are allowed that
    /// early.
    Undecided,
    /// To the genuine driver.
    PassThrough,
    /// To the handlers of [`SERVED`].
    Proxy,
    /// To the genuine driver, within the turns and limits that the server grants ([`crate::direct`]).
    Direct,
}

// The calls that are the shim's own in every mode.
entries! {
    OWN:
    cuInit(_) => cu_init,
    cuGetProcAddress(_, _, _, _) => procaddr::get_proc_address,
    cuGetProcAddress_v2(_, _, _, _, _) => procaddr::get_proc_address_v2,
    cuGetExportTable(_, _) => cu_get_export_table,
}

static MODE: AtomicU8 = AtomicU8::new(Mode::Undecided as u8);
/// Set while some thread is inside the genuine `cuInit` or connects.
static DECIDING: AtomicBool = AtomicBool::new(false);

/// The mode now.
pub fn current() -> Mode {
    match MODE.load(Ordering::Acquire) {
        mode if mode == Mode::PassThrough as u8 => Mode::PassThrough,
        mode if mode == Mode::Proxy as u8 => Mode::Proxy,
        mode if mode == Mode::Direct as u8 => Mode::Direct,
        _ => Mode::Undecided,
    }
}

/// Whether the program runs on the genuine driver or, while nothing is decided, would if it called `cuInit` now.
pub fn goes_to_genuine() -> bool {
    // cudart asks for some hundred functions before cuInit: one connection that finds a daemon is enough.
    static DAEMON_SEEN: AtomicBool = AtomicBool::new(false);
    match current() {
        Mode::PassThrough | Mode::Direct => true,
        Mode::Proxy => false,
        Mode::Undecided if DAEMON_SEEN.load(Ordering::Relaxed) => false,
        Mode::Undecided => {
            let daemon = daemon_wanted();
            DAEMON_SEEN.store(daemon, Ordering::Relaxed);
            !daemon
        }
    }
}

/// Whether there is a daemon, and the program is not told to run without one.
fn daemon_wanted() -> bool {
    !settings::disabled() && daemon::is_reachable()
}

/// `cuInit`.
///
/// # Safety
/// None beyond the CUDA function's; the type is that of the exported symbol.
pub unsafe extern "C" fn cu_init(flags: u32) -> CUresult {
    // Held through the decision, so that a second thread's cuInit waits for it. Libraries that the genuine cuInit
    // loads (a profiler's, say) call cuInit themselves on this thread; those are for the genuine driver.
    static LOCK: ReentrantMutex<Cell<bool>> = ReentrantMutex::new(Cell::new(false));

    log::init();
    register_fork_handler();
    let deciding = LOCK.lock();
    if deciding.get() {
        return genuine_init(flags).map_or_else(Error::status, |(_, status)| status);
    }
    match current() {
        Mode::Proxy if flags != 0 => CUDA_ERROR_INVALID_VALUE,
        Mode::Proxy => CUDA_SUCCESS,
        Mode::PassThrough | Mode::Direct => {
            drop(deciding);
            genuine_init(flags).map_or_else(Error::status, |(_, status)| status)
        }
        Mode::Undecided => {
            deciding.set(true);
            DECIDING.store(true, Ordering::SeqCst);
            let status = decide(flags).map_or_else(|status| status, |()| CUDA_SUCCESS);
            DECIDING.store(false, Ordering::SeqCst);
            deciding.set(false);
            tracing::debug!(%status, mode = ?current(), "cuInit");
            status
        }
    }
}

/// Chooses the mode and installs it. An error leaves the process undecided.
fn decide(flags: u32) -> Result<(), CUresult> {
    let daemon = daemon_wanted();
    check_settings(daemon)?;
    if daemon {
        connect::hand_over_to_nvidia();
    }
    // In proxy mode too: the genuine driver's export tables are handed to the program, and work once it is
    // initialised. Nothing is made on the device by it.
    let driver = match genuine_init(flags) {
        Ok((driver, status)) => {
            status.ok()?;
            Some(driver)
        }
        // A client of a server needs no driver of its own, unless a particular one is configured.
        Err(Error::NotFound) if daemon && flags == 0 => None,
        Err(Error::NotFound) if daemon => return Err(CUDA_ERROR_INVALID_VALUE),
        Err(error) => return Err(error.status()),
    };
    let connected = if daemon {
        connect::connect().map_err(of_required)?
    } else {
        None
    };
    match (connected, driver) {
        (Some(Served::Directly), Some(driver)) => {
            install_direct(driver);
            Ok(())
        }
        // Direct mode needs a genuine driver in this process.
        (Some(Served::Directly), None) => Err(Error::NotFound.status()),
        (Some(_), _) => {
            install_proxy();
            Ok(())
        }
        // The daemon has gone meanwhile.
        (None, _) if settings::required() => Err(no_daemon()),
        (None, _) if is_in_partition() => Err(no_partition()),
        (None, Some(driver)) => {
            if !settings::disabled() {
                tracing::info!(directory = %searched(), "no daemon listens there: running on the genuine driver, unshared");
            }
            install_pass_through(driver);
            Ok(())
        }
        (None, None) => Err(Error::NotFound.status()),
    }
}

/// Refuses settings under which the program would not run as requested.
fn check_settings(daemon: bool) -> Result<(), CUresult> {
    if !settings::disabled()
        && let Err(mode) = settings::mode()
    {
        let why = format_args!("MPSSHIM_MODE={mode} is neither proxy nor direct");
        return Err(refuse(CUDA_ERROR_INVALID_VALUE, why));
    }
    if !daemon && is_in_partition() {
        return Err(no_partition());
    }
    if !settings::required() {
        return Ok(());
    }
    if settings::disabled() {
        let why = "MPSSHIM_REQUIRED asks for a server and MPSSHIM_DISABLE for none";
        return Err(refuse(CUDA_ERROR_MPS_CONNECTION_FAILED, why));
    }
    if let Some(given) = settings::nonsense_limit() {
        let why = format_args!("{given} is no limit, and MPSSHIM_REQUIRED is set");
        return Err(refuse(CUDA_ERROR_MPS_CONNECTION_FAILED, why));
    }
    if !daemon {
        return Err(no_daemon());
    }
    Ok(())
}

/// Whether the program names a static partition of this product's daemon, not of NVIDIA's.
fn is_in_partition() -> bool {
    settings::sm_partition().is_some() && !settings::disabled() && !nvidia_mps::listens()
}

fn no_partition() -> CUresult {
    let why = format_args!(
        "no control daemon listens in {}, and {} is set",
        searched(),
        settings::SM_PARTITION
    );
    refuse(CUDA_ERROR_MPS_CONNECTION_FAILED, why)
}

fn no_daemon() -> CUresult {
    let why = format_args!(
        "no control daemon listens in {}, and MPSSHIM_REQUIRED is set",
        searched()
    );
    refuse(CUDA_ERROR_MPS_CONNECTION_FAILED, why)
}

/// The directories in which a daemon was looked for, for a message.
fn searched() -> String {
    let directories = daemon::directories().into_iter();
    let directories: Vec<_> = directories.map(|path| path.display().to_string()).collect();
    directories.join(" or ")
}

/// Converts the error with which a session was refused, if the program requires a session.
fn of_required(status: CUresult) -> CUresult {
    if !settings::required() {
        return status;
    }
    let why = format_args!("there is no session ({status}), and MPSSHIM_REQUIRED is set");
    refuse(CUDA_ERROR_MPS_CONNECTION_FAILED, why)
}

/// Calls the genuine `cuInit`.
fn genuine_init(flags: u32) -> Result<(&'static Driver, CUresult), &'static Error> {
    let driver = genuine::driver()?;
    let Some(address) = driver.symbol("cuInit") else {
        return Ok((driver, CUDA_ERROR_NOT_SUPPORTED));
    };
    // SAFETY: the driver's cuInit has this signature.
    let init = unsafe { std::mem::transmute::<*const (), extern "C" fn(u32) -> CUresult>(address) };
    Ok((driver, init(flags)))
}

/// The driver's function for each symbol. A program would not have found a missing one; here a call of it returns an
/// error.
fn genuine_targets(driver: &Driver) -> Vec<Target> {
    let absent = Target::new(not_supported as *const ());
    let target = |symbol: &&str| driver.symbol(symbol).map_or(absent, Target::new);
    SYMBOLS.iter().map(target).collect()
}

fn install_pass_through(driver: &Driver) {
    let mut targets = genuine_targets(driver);
    // Still the shim's, so that one symbol keeps one address.
    overwrite(&mut targets, &OWN[1..3]);
    install(&targets, Mode::PassThrough);
}

fn install_direct(driver: &Driver) {
    let mut targets = genuine_targets(driver);
    let absent = Target::new(not_supported as *const ());
    let has = |symbol: &str| symbols::index_of(symbol).is_some_and(|at| targets[at] != absent);
    let mut wrapped = direct::wrapped();
    wrapped.retain(|(symbol, _)| has(symbol));
    overwrite(&mut targets, &wrapped);
    // `cuInit` and the functions that look up others stay the shim's, as in pass-through.
    overwrite(&mut targets, OWN);
    MODE.store(Mode::Direct as u8, Ordering::Release);
    for (index, target) in targets.iter().enumerate() {
        if direct::submits(SYMBOLS[index]) && *target != absent {
            exports::install_gated(index, *target);
        } else {
            exports::install(index, *target);
        }
    }
    direct::start(connect::renew);
}

fn install_proxy() {
    let mut targets: Vec<Target> = (0..COUNT).map(exports::absent).collect();
    overwrite(&mut targets, SERVED);
    let genuine: Vec<_> = SYMBOLS
        .iter()
        .filter(|symbol| table::is_genuine(symbol))
        .filter_map(|symbol| Some((*symbol, Target::new(genuine::symbol(symbol)?))))
        .collect();
    overwrite(&mut targets, &genuine);
    overwrite(&mut targets, OWN);
    install(&targets, Mode::Proxy);
}

fn overwrite(targets: &mut [Target], entries: &[(&str, Target)]) {
    for (symbol, target) in entries {
        match symbols::index_of(symbol) {
            Some(index) => targets[index] = *target,
            None => tracing::error!(symbol, "is served but is not a symbol of the driver"),
        }
    }
}

fn install(targets: &[Target], mode: Mode) {
    // The mode first, so that a call that still comes through `resolve` goes where the slots will lead.
    MODE.store(mode as u8, Ordering::Release);
    for (index, target) in targets.iter().enumerate() {
        exports::install(index, *target);
    }
}

/// `cuGetExportTable`. Tables taken before `cuInit` must already be the right ones.
///
/// # Safety
/// As the CUDA function: `table` and `uuid` are null or valid.
unsafe extern "C" fn cu_get_export_table(
    table: *mut *const c_void,
    uuid: *const CUuuid,
) -> CUresult {
    type GetExportTable = unsafe extern "C" fn(*mut *const c_void, *const CUuuid) -> CUresult;
    let served = || served("cuGetExportTable").map(Target::address);
    let genuine = goes_to_genuine() || current() == Mode::Undecided && connect::will_be_direct();
    let target = if genuine { None } else { served() };
    match target.or_else(|| genuine::symbol("cuGetExportTable")) {
        Some(address) => {
            // SAFETY: both are functions of this signature.
            let function = unsafe { std::mem::transmute::<*const (), GetExportTable>(address) };
            // SAFETY: the caller's arguments, unchanged.
            unsafe { function(table, uuid) }
        }
        None => CUDA_ERROR_NOT_SUPPORTED,
    }
}

fn served(symbol: &str) -> Option<Target> {
    SERVED
        .iter()
        .find(|(served, _)| *served == symbol)
        .map(|(_, target)| *target)
}

/// Where a call goes whose slot has not been written. Called by the export stubs.
pub extern "C" fn resolve(index: usize) -> *const () {
    log::init();
    let symbol = SYMBOLS[index];
    if let Some((_, own)) = OWN.iter().find(|(own, _)| *own == symbol) {
        return own.address();
    }
    if current() == Mode::Proxy {
        // The slots are being written just now.
        if table::is_genuine(symbol) {
            return genuine::symbol(symbol).unwrap_or(exports::absent(index).address());
        }
        return served(symbol).unwrap_or(exports::absent(index)).address();
    }
    match genuine::driver() {
        Ok(driver) => driver.symbol(symbol).unwrap_or(not_supported as *const ()),
        Err(_) => not_initialized as *const (),
    }
}

/// A call that proxy mode does not serve. Called by the export stubs.
pub extern "C" fn absent(index: usize) -> CUresult {
    static LOGGED: [AtomicBool; COUNT] = [const { AtomicBool::new(false) }; COUNT];
    if !LOGGED[index].swap(true, Ordering::Relaxed) {
        tracing::warn!(symbol = SYMBOLS[index], "called, but not supported");
    }
    CUDA_ERROR_NOT_SUPPORTED
}

// These two stand in for functions of any signature: they read no argument.

extern "C" fn not_supported() -> CUresult {
    CUDA_ERROR_NOT_SUPPORTED
}

extern "C" fn not_initialized() -> CUresult {
    CUDA_ERROR_NOT_INITIALIZED
}

fn register_fork_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler writes atomics and closes descriptors.
        let status = unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        if status != 0 {
            tracing::warn!(status, "no fork handler: a forked child must not use CUDA");
        }
    });
}

/// Runs in a forked child before all other code. The session is the parent's, and locks held by other threads stay
/// locked: no handler may run any more.
unsafe extern "C" fn after_fork_in_child() {
    pages::leave();
    if current() == Mode::Direct {
        // The genuine driver refuses the calls of a forked child.
        direct::leave();
        return;
    }
    if current() != Mode::Proxy && !DECIDING.load(Ordering::SeqCst) {
        return;
    }
    for (index, symbol) in SYMBOLS.iter().enumerate() {
        if !table::works_after_fork(symbol) {
            exports::install(index, Target::new(not_initialized as *const ()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_symbol_exists() {
        let wrapped = direct::wrapped();
        for (symbol, _) in OWN.iter().chain(SERVED).chain(&wrapped) {
            assert!(symbols::index_of(symbol).is_some(), "{symbol}");
        }
    }

    /// Calls an export that takes nothing or one integer.
    fn call(symbol: &str) -> CUresult {
        let target = exports::exported(symbols::index_of(symbol).unwrap());
        // SAFETY: the symbols below are called with 0 for their one argument.
        let function = unsafe {
            std::mem::transmute::<*const (), extern "C" fn(u32) -> CUresult>(target.address())
        };
        function(0)
    }

    #[test]
    fn proxy_mode_refuses_what_is_absent_and_a_forked_child() {
        const ABSENT: &str = "cuGLInit";
        register_fork_handler();
        install_proxy();
        assert_eq!(call(ABSENT), CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!(call("cuInit"), CUDA_SUCCESS);
        // SAFETY: the child makes two calls that allocate nothing, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused =
                [ABSENT, "cuInit"].map(|symbol| call(symbol) == CUDA_ERROR_NOT_INITIALIZED);
            // SAFETY: ends the child without the test harness's exit handlers.
            unsafe { libc::_exit(if refused == [true, true] { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child's calls were not refused");
        assert_eq!(call(ABSENT), CUDA_ERROR_NOT_SUPPORTED);
    }
}
