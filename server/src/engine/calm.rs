//! Moments in which nothing is in flight, on one side of the devices ([`super::side`]).
//!
//! Some calls of the driver's wait for all work that is queued, everyone's, and keep everybody out meanwhile. They are made
//! only while no session has work in flight and none may submit any: then they wait for nothing, and nobody waits for
//! them. The undertaker ([`super::undertaker`]) has such calls, which can wait for a moment that comes by itself, and the
//! gate ([`super::gate`]), whose clients wait for them. What the undertaker has had for long waits at the gate too.

use super::Shared;
use super::session::{Session, SessionShared};
use super::side::Side;
use super::streams::Point;
use mpsshim_proto::segment::reached;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
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
        // Partner: [`Session::may_work`]. Either it sees the hush, or the session is seen to be at work.
        fence(Ordering::SeqCst);
        Hush {
            calm: self,
            _turn: turn,
        }
    }

    /// A session begins to work, or would.
    fn note_worker(&self, session: u64) {
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

impl Shared {
    /// Whether nothing is in flight, as far as the sessions have said.
    pub fn is_quiet(&self, side: Side) -> bool {
        let works = |session: &Arc<SessionShared>| session.is_at_work(self);
        self.calm(side).is_still() && !self.sessions_of(side).any(|session| works(&session))
    }

    /// The sessions of a side.
    pub fn sessions_of(&self, side: Side) -> impl Iterator<Item = Arc<SessionShared>> {
        let all = self.session_list().into_iter();
        all.filter(move |session| session.side() == side)
    }
}

impl SessionShared {
    /// Whether it has work in flight, or may have.
    pub fn is_at_work(&self, shared: &Shared) -> bool {
        self.at_work.load(Ordering::SeqCst)
            && self.left.lock().as_ref().is_none_or(|points| {
                let ahead = |point: &Point| !reached(shared.flags.value(point.slot), point.value);
                points.iter().any(ahead)
            })
    }
}

impl Session {
    /// To be asked before anything is submitted: notes that the session is at work; false when it has to wait a moment.
    #[inline]
    pub fn may_work(&mut self, shared: &Shared) -> bool {
        if !self.shared.at_work.load(Ordering::Relaxed) {
            if self.moment.is_none() {
                let session = self.shared.info.session;
                shared.calm(self.side).note_worker(session);
            }
            if self.is_hushed(shared) {
                return false;
            }
            self.shared.at_work.store(true, Ordering::SeqCst);
            // Partner: [`Calm::hush`].
            fence(Ordering::SeqCst);
        }
        if self.is_hushed(shared) {
            self.say_whether_at_work(shared);
            return false;
        }
        true
    }

    /// Whether it may submit nothing now. In its own moment it may.
    #[inline]
    pub fn is_hushed(&self, shared: &Shared) -> bool {
        shared.calm(self.side).is_hushed() && self.moment.is_none()
    }

    /// The thread that has it is about to be away for long, and submits nothing meanwhile: others look themselves whether
    /// what is in flight has ended.
    pub fn go_away(&mut self, shared: &Shared) {
        self.say_whether_at_work(shared);
        if !self.shared.at_work.load(Ordering::Relaxed) {
            return;
        }
        let streams = self.streams.iter().chain(&self.retired);
        let points = streams.filter_map(|stream| stream.last_point()).collect();
        *self.shared.left.lock() = Some(points);
    }

    /// It is back.
    pub fn come_back(&self) {
        *self.shared.left.lock() = None;
    }

    /// Says whether anything is in flight.
    pub fn say_whether_at_work(&mut self, shared: &Shared) {
        self.enter();
        let at_work = self.has_work_in_flight(shared);
        self.shared.at_work.store(at_work, Ordering::Release);
    }
}
