//! Turns: the gate in front of what submits work, and the thread that gives a turn up.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mpsshim_proto::cuda::{CUDA_ERROR_MPS_CLIENT_TERMINATED, CUresult};
use mpsshim_proto::direct::{GIVING, HELD, IDLE, NOT_ASKED, NOW, TERMINATED, WANTS};
use mpsshim_proto::shm;
use parking_lot::Mutex;
use std::os::fd::AsFd;

use super::{Direct, contexts, direct};
use crate::exports::{self, GATE, SUBMISSIONS};
use crate::thread;

/// Held while the gate is opened or closed.
static GATE_KEEPER: Mutex<()> = Mutex::new(());
/// Threads at the gate.
static WAITING: AtomicU32 = AtomicU32::new(0);
/// How often a thread at the gate looks whether the server is still there.
const LOOK: Duration = Duration::from_millis(100);
/// Between two looks at what the program does while others wait.
const PAUSE: Duration = Duration::from_micros(100);
/// A program that has submitted nothing for so long has nothing to do: longer than between two small kernels.
const PATIENCE: Duration = Duration::from_micros(400);
/// For ever.
const LONG: Duration = Duration::from_secs(3600);

/// Waits for the turn; gives the genuine function of the symbol with this index. Called by the gates.
pub extern "C" fn pass(index: usize) -> *const () {
    let Some(direct) = direct() else {
        return exports::behind(index);
    };
    if GATE.load(Ordering::Acquire) == 0 {
        WAITING.fetch_add(1, Ordering::SeqCst);
        while GATE.load(Ordering::Acquire) == 0 {
            if direct.page.turn.state.0.load(Ordering::SeqCst) == TERMINATED {
                WAITING.fetch_sub(1, Ordering::SeqCst);
                return terminated as *const ();
            }
            wait(direct);
        }
        WAITING.fetch_sub(1, Ordering::SeqCst);
    }
    exports::behind(index)
}

/// Stands in for an entry point of any signature: it reads no argument.
extern "C" fn terminated() -> CUresult {
    CUDA_ERROR_MPS_CLIENT_TERMINATED
}

/// One step on the way to a turn.
fn wait(direct: &Direct) {
    let turn = &direct.page.turn;
    let state = &turn.state.0;
    if turn.free.load(Ordering::Relaxed) != 0 || turn.devices.load(Ordering::Relaxed) == 0 {
        // No turns are taken, or none of the server's devices is used (yet).
        return open(state, false);
    }
    match state.load(Ordering::SeqCst) {
        HELD => open(state, true),
        TERMINATED => {}
        IDLE => {
            let wanted = state.compare_exchange(IDLE, WANTS, Ordering::SeqCst, Ordering::SeqCst);
            if wanted.is_ok() {
                direct.doorbell.ring();
            }
        }
        other => {
            shm::futex_wait(state, other, LOOK);
            if state.load(Ordering::SeqCst) == other && shm::is_hung_up(direct.socket.as_fd()) {
                // Nobody keeps order any more.
                tracing::warn!("the server has gone; no turns are taken from now on");
                open_for_good();
            }
        }
    }
}

/// Opens the gate, if the turn (still) is held, or whether it is or not.
fn open(state: &AtomicU32, only_if_held: bool) {
    let _keeper = GATE_KEEPER.lock();
    if !only_if_held || state.load(Ordering::SeqCst) == HELD {
        GATE.store(1, Ordering::Release);
    }
}

/// Nobody says any more when this process may submit.
pub fn open_for_good() {
    GATE.store(1, Ordering::Release);
}

/// Starts the thread that gives turns up.
pub fn start() {
    let spawned = thread::without_signals(|| {
        std::thread::Builder::new()
            .name("mpsshim-turns".into())
            .spawn(|| direct().map_or((), keep))
    });
    if let Err(error) = spawned {
        // Others wait until this process ends.
        tracing::error!(%error, "no thread to give turns up");
    }
}

fn keep(direct: &Direct) {
    let turn = &direct.page.turn;
    let (state, asked) = (&turn.state.0, &turn.asked.0);
    loop {
        if state.load(Ordering::SeqCst) == TERMINATED {
            let _keeper = GATE_KEEPER.lock();
            GATE.store(0, Ordering::SeqCst);
            return;
        }
        if asked.load(Ordering::SeqCst) == NOT_ASKED {
            shm::futex_wait(asked, NOT_ASKED, LONG);
            continue;
        }
        let now = state.load(Ordering::SeqCst);
        if now != HELD {
            // Given up already, or granted in this moment.
            shm::futex_wait(state, now, LOOK);
            continue;
        }
        let (mut seen, mut since) = (SUBMISSIONS.load(Ordering::Relaxed), Instant::now());
        while asked.load(Ordering::SeqCst) != NOW && asked.load(Ordering::SeqCst) != NOT_ASKED {
            shm::futex_wait(asked, asked.load(Ordering::SeqCst), PAUSE);
            let now = SUBMISSIONS.load(Ordering::Relaxed);
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > PATIENCE {
                break;
            }
        }
        if asked.load(Ordering::SeqCst) != NOT_ASKED {
            give_up(direct);
        }
    }
}

/// Gives the turn up and asks for another one: the program begins to use a device that the turn is not for.
pub fn renew() {
    if let Some(direct) = direct()
        && direct.page.turn.state.0.load(Ordering::SeqCst) == HELD
    {
        give_up(direct);
    }
}

/// Adds what was submitted since the last time.
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
    contexts::drain();
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
