//! Turns: the gate in front of entry points that submit work, and the thread that gives up the turn.

use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mpsshim_api::cuda::{CUDA_ERROR_MPS_CLIENT_TERMINATED, CUresult};
use mpsshim_proto::direct::{
    GIVING, GONE, HELD, IDLE, NOT_ASKED, NOW, REPORT, TERMINATED, WANTS, WHEN_IDLE,
};
use mpsshim_proto::shm;
use parking_lot::Mutex;

use super::drain::drain;
use super::state::{Direct, direct, set_current};
use crate::loader::gate::{self, GATE, SUBMISSIONS};
use crate::thread;

/// Held while the gate is opened or closed, and while one session follows another.
static GATE_KEEPER: Mutex<()> = Mutex::new(());
/// Threads at the gate.
static WAITING: AtomicU32 = AtomicU32::new(0);
/// Interval between checks of a turn that was asked for and is not held.
const LOOK: Duration = Duration::from_millis(100);
/// Interval between checks of the program's activity while others wait.
const PAUSE: Duration = Duration::from_micros(100);
/// Interval between reports of submissions while several clients have their turn at the same time.
const REPORTS: Duration = Duration::from_millis(50);
/// A program that has submitted nothing for this long is idle: longer than the gap between two small kernels.
const PATIENCE: Duration = Duration::from_micros(400);
/// For ever.
const LONG: Duration = Duration::from_secs(3600);

/// Waits for the turn; returns the genuine function of the symbol with this index. Called by the gates.
pub extern "C" fn pass(index: usize) -> *const () {
    WAITING.fetch_add(1, Ordering::SeqCst);
    let may_submit = wait();
    WAITING.fetch_sub(1, Ordering::SeqCst);
    match may_submit {
        true => gate::behind(index),
        false => terminated as *const (),
    }
}

/// Stands in for an entry point of any signature: it reads no argument.
extern "C" fn terminated() -> CUresult {
    CUDA_ERROR_MPS_CLIENT_TERMINATED
}

/// Waits until the calling thread may submit; `false`: it never may again.
fn wait() -> bool {
    while GATE.load(Ordering::Acquire) == 0 {
        // A different session after the server has gone.
        let Some(direct) = direct() else { return true };
        let turn = &direct.page.turn;
        let state = &turn.state.0;
        match state.load(Ordering::SeqCst) {
            TERMINATED => return false,
            // None of the server's devices is used (yet).
            _ if turn.devices.load(Ordering::Relaxed) == 0 => return true,
            _ if turn.free.load(Ordering::Relaxed) != 0 => open(direct),
            HELD => open(direct),
            IDLE => {
                let wanted =
                    state.compare_exchange(IDLE, WANTS, Ordering::SeqCst, Ordering::SeqCst);
                if wanted.is_ok() {
                    direct.doorbell.ring();
                }
            }
            // The gate has been opened, or another session has begun.
            GONE => {}
            other => shm::futex_wait(state, other, LONG),
        }
    }
    true
}

/// Opens the gate if the turn is (still) held, or none is needed.
fn open(direct: &Direct) {
    let _keeper = GATE_KEEPER.lock();
    let turn = &direct.page.turn;
    let may = turn.free.load(Ordering::Relaxed) != 0 || turn.state.0.load(Ordering::SeqCst) == HELD;
    if may && is_current(direct) {
        GATE.store(1, Ordering::Release);
    }
}

fn is_current(session: &Direct) -> bool {
    direct().is_some_and(|current| ptr::eq(current, session))
}

/// Takes turns in this session from now on; the devices in use stay the same.
pub fn take_up(session: &'static Direct) {
    let _keeper = GATE_KEEPER.lock();
    if let Some(before) = direct() {
        let devices = before.page.turn.devices.load(Ordering::SeqCst);
        let turn = &session.page.turn;
        turn.devices.store(devices, Ordering::SeqCst);
    }
    set_current(session);
    GATE.store(0, Ordering::SeqCst);
}

/// The server has gone: opens the gate until another session is taken up. `false`: the operator has ended the session.
pub fn lost(session: &Direct) -> bool {
    let turn = &session.page.turn;
    let (state, asked) = (&turn.state.0, &turn.asked.0);
    {
        let _keeper = GATE_KEEPER.lock();
        let over = |state: u32| (state != TERMINATED).then_some(GONE);
        let lost = state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, over);
        if lost.is_err() {
            return false;
        }
        GATE.store(1, Ordering::Release);
    }
    shm::futex_wake(state);
    // The thread that gives turns up checks the state whenever it is asked for something.
    asked.store(NOW, Ordering::SeqCst);
    shm::futex_wake(asked);
    true
}

/// Opens the gate permanently: this process is granted no more turns.
pub fn open_for_good() {
    GATE.store(1, Ordering::Release);
}

/// Starts the thread that gives a session's turns up.
pub fn start(direct: &'static Direct) {
    let spawned = thread::without_signals(|| {
        std::thread::Builder::new()
            .name("mpsshim-turns".into())
            .spawn(move || keep(direct))
    });
    if let Err(error) = spawned {
        // Others wait until this process ends.
        tracing::error!(%error, "no thread to give up turns");
    }
}

fn keep(direct: &Direct) {
    let turn = &direct.page.turn;
    let (state, asked) = (&turn.state.0, &turn.asked.0);
    loop {
        match state.load(Ordering::SeqCst) {
            TERMINATED => {
                let _keeper = GATE_KEEPER.lock();
                GATE.store(0, Ordering::SeqCst);
                return;
            }
            GONE => return,
            _ => {}
        }
        if asked.load(Ordering::SeqCst) == NOT_ASKED {
            // The server wakes this thread when an operator queries the activity.
            count(&turn.submissions);
            shm::futex_wait(asked, NOT_ASKED, LONG);
            continue;
        }
        let now = state.load(Ordering::SeqCst);
        if now != HELD {
            // Given up already, or granted just now.
            shm::futex_wait(state, now, LOOK);
            continue;
        }
        if asked.load(Ordering::SeqCst) == REPORT {
            count(&turn.submissions);
            shm::futex_wait(asked, REPORT, REPORTS);
            continue;
        }
        let (mut seen, mut since) = (SUBMISSIONS.load(Ordering::Relaxed), Instant::now());
        while asked.load(Ordering::SeqCst) == WHEN_IDLE {
            shm::futex_wait(asked, WHEN_IDLE, PAUSE);
            let now = SUBMISSIONS.load(Ordering::Relaxed);
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > PATIENCE {
                break;
            }
        }
        if matches!(asked.load(Ordering::SeqCst), WHEN_IDLE | NOW) {
            give_up(direct);
        }
    }
}

/// The program begins to use a device. A turn held now does not include it: it is given up, for one that includes all.
pub fn use_device(server: usize) {
    let session = {
        let _keeper = GATE_KEEPER.lock();
        let Some(direct) = direct() else { return };
        let turn = &direct.page.turn;
        let before = turn.devices.fetch_or(1 << server, Ordering::SeqCst);
        (before & (1 << server) == 0).then_some(direct)
    };
    if let Some(direct) = session {
        give_up(direct);
    }
}

/// Adds the submissions since the last call.
fn count(submissions: &AtomicU64) {
    static COUNTED: AtomicU32 = AtomicU32::new(0);
    let now = SUBMISSIONS.load(Ordering::Relaxed);
    let more = now.wrapping_sub(COUNTED.swap(now, Ordering::Relaxed));
    submissions.fetch_add(more.into(), Ordering::Relaxed);
}

fn give_up(direct: &Direct) {
    let state = &direct.page.turn.state.0;
    {
        let _keeper = GATE_KEEPER.lock();
        let given = state.compare_exchange(HELD, GIVING, Ordering::SeqCst, Ordering::SeqCst);
        if given.is_err() {
            return;
        }
        GATE.store(0, Ordering::SeqCst);
    }
    drain();
    count(&direct.page.turn.submissions);
    // A thread that comes to the gate from here on finds IDLE and asks by itself.
    let next = match WAITING.load(Ordering::SeqCst) {
        0 => IDLE,
        _ => WANTS,
    };
    let _ = state.compare_exchange(GIVING, next, Ordering::SeqCst, Ordering::SeqCst);
    shm::futex_wake(state);
    direct.doorbell.ring();
}
