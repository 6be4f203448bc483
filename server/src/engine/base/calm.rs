//! Quiescent points, at which nothing is in flight on one side of the devices ([`crate::engine::base::side`]).
//!
//! Some driver calls wait for all queued work, of every client, and block all other calls meanwhile. They are made only
//! while no session has work in flight and none may submit any; then they do not wait, and delay no other session. Such
//! calls come from the undertaker ([`crate::engine::threads::undertaker`]), which can wait for a quiescent point that
//! occurs by itself, and from the gate ([`crate::engine::threads::gate`]), where clients wait for them. Overdue calls
//! of the undertaker wait at the gate too.

use crate::engine::base::loops::Loops;
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

/// Pending requests for a quiescent point, and whether one is in effect.
#[derive(Debug, Default)]
pub struct Calm {
    /// No session may submit work now.
    hushed: AtomicBool,
    /// Held during a quiescent point, so that there is only one at a time.
    turn: Mutex<()>,
    /// The undertaker has calls to make at a quiescent point.
    undertaker_waits: AtomicBool,
    /// The undertaker has waited for too long.
    overdue: AtomicBool,
    /// Clients wait at the gate.
    gate_waits: AtomicBool,
    /// Long work is held back for clients at the gate.
    holds: AtomicBool,
    /// Incremented whenever streams held back for the gate may continue.
    pauses: AtomicU32,
    /// Number of ended sessions that have, or may have, work in flight.
    dying: AtomicUsize,
    /// Work of an ended session does not complete.
    stuck: AtomicBool,
    /// How long work of an ended session has kept running, in milliseconds.
    dying_for: AtomicU32,
    /// The session that has started to work, or wanted to, since the last quiescent point began: its number, [`NOBODY`]
    /// or [`SEVERAL`].
    workers: AtomicU64,
    /// Sessions whose graphs have conditional nodes.
    pub loops: Loops,
}

/// [`Calm::workers`]: no session. Sessions count from 1.
const NOBODY: u64 = 0;
/// [`Calm::workers`]: more than one session.
const SEVERAL: u64 = u64::MAX;

/// Holds back all submissions until it is dropped.
#[derive(Debug)]
pub struct Hush<'a> {
    calm: &'a Calm,
    _turn: MutexGuard<'a, ()>,
}

impl Drop for Hush<'_> {
    fn drop(&mut self) {
        self.calm.hushed.store(false, Ordering::SeqCst);
    }
}

impl Calm {
    /// Holds back new submissions of all sessions. Work in flight continues.
    pub fn hush(&self) -> Hush<'_> {
        let turn = self.turn.lock();
        self.workers.store(NOBODY, Ordering::Relaxed);
        self.hushed.store(true, Ordering::SeqCst);
        // Pairs with `Session::may_work`: either it sees the hush, or this thread sees that the session is working.
        fence(Ordering::SeqCst);
        Hush {
            calm: self,
            _turn: turn,
        }
    }

    /// Notes that a session starts to work, or wants to.
    pub fn note_worker(&self, session: u64) {
        match self.workers.load(Ordering::Relaxed) {
            known if known == session || known == SEVERAL => {}
            NOBODY => self.workers.store(session, Ordering::Relaxed),
            _ => self.workers.store(SEVERAL, Ordering::Relaxed),
        }
    }
    /// Whether no other session has worked, or wanted to, since the last quiescent point began. A quiescent point now
    /// would then delay no other session, however many there were before.
    pub fn is_left_to(&self, session: Option<u64>) -> bool {
        let worker = self.workers.load(Ordering::Relaxed);
        worker == NOBODY || Some(worker) == session
    }

    /// Notes that a session has ended.
    pub fn begin_dying(&self) {
        self.dying.fetch_add(1, Ordering::SeqCst);
    }
    /// Notes that an ended session has nothing in flight any more.
    pub fn end_dying(&self) {
        self.dying.fetch_sub(1, Ordering::SeqCst);
    }
    /// Whether no ended session has work in flight.
    pub fn is_still(&self) -> bool {
        self.dying.load(Ordering::SeqCst) == 0
    }
    /// Sets whether work of an ended session does not complete.
    pub fn set_stuck(&self, stuck: bool) {
        self.stuck.store(stuck, Ordering::Relaxed);
    }
    /// Whether work of an ended session does not complete.
    pub fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed)
    }
    /// Sets how long work of an ended session has kept running; zero if there is none.
    pub fn set_dying_for(&self, time: Duration) {
        let milliseconds = time.as_millis().try_into().unwrap_or(u32::MAX);
        self.dying_for.store(milliseconds, Ordering::Relaxed);
    }
    /// How long work of an ended session has kept running; zero if there is none.
    pub fn dying_for(&self) -> Duration {
        Duration::from_millis(self.dying_for.load(Ordering::Relaxed).into())
    }
    /// Sets whether the undertaker has calls to make.
    pub fn set_undertaker_waits(&self, waits: bool) {
        self.undertaker_waits.store(waits, Ordering::SeqCst);
    }
    /// Sets whether the undertaker has waited for too long, so that its calls go through the gate.
    pub fn set_overdue(&self, overdue: bool) {
        self.overdue.store(overdue, Ordering::SeqCst);
    }
    /// Whether the undertaker has waited for too long.
    pub fn is_overdue(&self) -> bool {
        self.overdue.load(Ordering::SeqCst)
    }
    /// Sets whether clients wait at the gate. When the last one leaves, work held back for them continues.
    pub fn set_gate_waits(&self, waits: bool) {
        self.gate_waits.store(waits, Ordering::SeqCst);
        self.set_holds(waits);
    }
    /// Sets whether long work is held back for clients at the gate.
    pub fn set_holds(&self, holds: bool) {
        let before = self.holds.swap(holds, Ordering::SeqCst);
        if before && !holds {
            self.pauses.fetch_add(1, Ordering::SeqCst);
        }
    }
    /// Whether long work is held back for clients at the gate.
    pub fn holds(&self) -> bool {
        self.holds.load(Ordering::SeqCst)
    }
    /// How often held-back streams were allowed to continue; a hold with an earlier number is over.
    pub fn pauses(&self) -> u32 {
        self.pauses.load(Ordering::Relaxed)
    }
    /// Number of the current hold of long work for clients at the gate, if there is one.
    pub fn hold(&self) -> Option<u32> {
        let pauses = self.pauses();
        self.holds().then_some(pauses)
    }
    /// Whether clients wait for a quiescent point.
    #[inline]
    pub fn is_urgent(&self) -> bool {
        self.gate_waits.load(Ordering::Relaxed) || self.loops.waits()
    }
    /// Whether sessions that are polled anyway should report if they have work in flight.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.is_urgent() || self.undertaker_waits.load(Ordering::Relaxed)
    }
    /// Whether submissions are held back now.
    #[inline]
    pub fn is_hushed(&self) -> bool {
        self.hushed.load(Ordering::Relaxed)
    }
}
