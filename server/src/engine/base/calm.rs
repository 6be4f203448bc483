//! Moments in which nothing is in flight, on one side of the devices ([`crate::engine::base::side`]).
//!
//! Some calls of the driver's wait for all work that is queued, everyone's, and keep everybody out meanwhile. They are made
//! only while no session has work in flight and none may submit any: then they wait for nothing, and nobody waits for
//! them. The undertaker ([`crate::engine::threads::undertaker`]) has such calls, which can wait for a moment that comes by itself, and the
//! gate ([`crate::engine::threads::gate`]), whose clients wait for them. What the undertaker has had for long waits at the gate too.

use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

/// Who wants a moment of calm, and whether there is one.
#[derive(Debug, Default)]
pub struct Calm {
    /// Nobody may submit anything now.
    hushed: AtomicBool,
    /// Only one at a time has a moment.
    turn: Mutex<()>,
    /// The undertaker has something to do when all is quiet.
    undertaker_waits: AtomicBool,
    /// It has waited for long.
    overdue: AtomicBool,
    /// Clients wait at the gate.
    gate_waits: AtomicBool,
    /// Long work is held back for them.
    holds: AtomicBool,
    /// Goes up whenever streams that are held back for the gate may go on.
    pauses: AtomicU32,
    /// Sessions that are over and have work in flight, or may have.
    dying: AtomicUsize,
    /// Some ended session's work does not end.
    stuck: AtomicBool,
    /// How long the work of an ended session has gone on since, in milliseconds.
    dying_for: AtomicU32,
    /// Who has begun to work, or wanted to, since the last moment began: a session's number, [`NOBODY`] or [`SEVERAL`].
    workers: AtomicU64,
}

/// [`Calm::workers`]: nobody. Sessions count from 1.
const NOBODY: u64 = 0;
/// [`Calm::workers`]: more than one.
const SEVERAL: u64 = u64::MAX;

/// A moment in which nobody submits anything; it is over with this.
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
    /// Holds back what anybody would submit. What is in flight goes on.
    pub fn hush(&self) -> Hush<'_> {
        let turn = self.turn.lock();
        self.workers.store(NOBODY, Ordering::Relaxed);
        self.hushed.store(true, Ordering::SeqCst);
        // Partner: `Session::may_work`. Either it sees the hush, or the session is seen to be at work.
        fence(Ordering::SeqCst);
        Hush {
            calm: self,
            _turn: turn,
        }
    }

    /// A session begins to work, or would.
    pub fn note_worker(&self, session: u64) {
        match self.workers.load(Ordering::Relaxed) {
            known if known == session || known == SEVERAL => {}
            NOBODY => self.workers.store(session, Ordering::Relaxed),
            _ => self.workers.store(SEVERAL, Ordering::Relaxed),
        }
    }
    /// Whether nobody but this session has worked, or wanted to, since the last moment began. A moment now would keep nobody
    /// from anything, however many there were before.
    pub fn is_left_to(&self, session: Option<u64>) -> bool {
        let worker = self.workers.load(Ordering::Relaxed);
        worker == NOBODY || Some(worker) == session
    }

    /// A session is over.
    pub fn begin_dying(&self) {
        self.dying.fetch_add(1, Ordering::SeqCst);
    }
    /// Nothing of it is in flight.
    pub fn end_dying(&self) {
        self.dying.fetch_sub(1, Ordering::SeqCst);
    }
    /// Whether no ended session has anything in flight.
    pub fn is_still(&self) -> bool {
        self.dying.load(Ordering::SeqCst) == 0
    }
    /// Whether there are ended sessions whose work does not end.
    pub fn set_stuck(&self, stuck: bool) {
        self.stuck.store(stuck, Ordering::Relaxed);
    }
    /// The same.
    pub fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed)
    }
    /// How long the work of an ended session has gone on since; zero where there is none.
    pub fn set_dying_for(&self, time: Duration) {
        let milliseconds = time.as_millis().try_into().unwrap_or(u32::MAX);
        self.dying_for.store(milliseconds, Ordering::Relaxed);
    }
    /// The same.
    pub fn dying_for(&self) -> Duration {
        Duration::from_millis(self.dying_for.load(Ordering::Relaxed).into())
    }
    /// Whether the undertaker has something to do.
    pub fn set_undertaker_waits(&self, waits: bool) {
        self.undertaker_waits.store(waits, Ordering::SeqCst);
    }
    /// Whether the undertaker has waited for long; it must not wait for ever.
    pub fn set_overdue(&self, overdue: bool) {
        self.overdue.store(overdue, Ordering::SeqCst);
    }
    /// The same.
    pub fn is_overdue(&self) -> bool {
        self.overdue.load(Ordering::SeqCst)
    }
    /// Whether clients wait at the gate. When none does any more, what was held back for them goes on.
    pub fn set_gate_waits(&self, waits: bool) {
        self.gate_waits.store(waits, Ordering::SeqCst);
        self.set_holds(waits);
    }
    /// Whether long work is held back for clients at the gate.
    pub fn set_holds(&self, holds: bool) {
        let before = self.holds.swap(holds, Ordering::SeqCst);
        if before && !holds {
            self.pauses.fetch_add(1, Ordering::SeqCst);
        }
    }
    /// The same.
    pub fn holds(&self) -> bool {
        self.holds.load(Ordering::SeqCst)
    }
    /// How often they could go on; a hold of an earlier number is over.
    pub fn pauses(&self) -> u32 {
        self.pauses.load(Ordering::Relaxed)
    }
    /// Number of the present hold of long work for clients at the gate, if there is one.
    pub fn hold(&self) -> Option<u32> {
        let pauses = self.pauses();
        self.holds().then_some(pauses)
    }
    /// Whether clients wait for a moment.
    #[inline]
    pub fn is_urgent(&self) -> bool {
        self.gate_waits.load(Ordering::Relaxed)
    }
    /// Whether sessions that are looked at anyway should say if they have work in flight.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.is_urgent() || self.undertaker_waits.load(Ordering::Relaxed)
    }
    /// Whether nobody may submit anything now; a moment.
    #[inline]
    pub fn is_hushed(&self) -> bool {
        self.hushed.load(Ordering::Relaxed)
    }
}
