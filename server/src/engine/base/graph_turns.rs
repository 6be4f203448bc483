//! The turn of sessions whose graphs allocate memory.
//!
//! Memory of allocating graph nodes comes from a pool that the driver keeps for the context and never clears: a graph
//! can read data left there by a graph of any other session (measured on an H100, driver 580.159.04). So only one
//! session at a time has such graphs in flight, and before the turn passes on, `cuDeviceGraphMemTrim` returns unused
//! memory to the driver, which clears memory before handing it out. That takes 0.1 ms, and 2.3 ms for 1 GiB. A session
//! keeps its turn while no other wants it.
//!
//! Graphs with conditional nodes take turns in the same way, for another reason ([`crate::engine::base::loops`]).

pub mod session;

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Minimum time for which a session keeps its turn while another one waits for it.
const TURN: Duration = Duration::from_millis(5);
/// A waiting session asks again within this time.
const FRESH: Duration = Duration::from_millis(20);
/// After this time, a session continues beside another one of the same user, which may itself be waiting for it through
/// an interprocess event.
const PATIENCE: Duration = Duration::from_secs(1);

/// The turn to use graph memory.
#[derive(Debug, Default)]
pub struct GraphTurns(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    holder: Option<Holder>,
    /// The last holder, if no other session has left memory in the pool since.
    last: Option<u64>,
    waiter: Option<Waiter>,
    /// The holder beside which another session has continued after waiting for it.
    overtaken: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    session: u64,
    uid: u32,
    since: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    session: u64,
    began: Instant,
    asked: Instant,
}

/// The answer to a session that asks for the turn.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// Continue.
    Goes,
    /// Trim the pool's unused memory, then continue.
    Trims,
    /// Wait, and ask again.
    Waits,
    /// Drain, and pass the turn on.
    Yields,
}

impl State {
    /// `patience`: after this time, a session continues beside another one of the same user.
    fn ask_for(&mut self, (session, uid): (u64, u32), patience: Duration, now: Instant) -> Answer {
        let fresh = |waiter: &Waiter| now.duration_since(waiter.asked) < FRESH;
        let other = self
            .waiter
            .filter(|one| one.session != session && fresh(one));
        match self.holder {
            Some(holder) if holder.session == session => {
                if other.is_some() && now.duration_since(holder.since) >= TURN {
                    return Answer::Yields;
                }
            }
            None if other.is_none() => {
                self.holder = Some(Holder {
                    session,
                    uid,
                    since: now,
                });
                self.waiter = None;
            }
            holder => {
                if other.is_some() {
                    return Answer::Waits;
                }
                let mine = self
                    .waiter
                    .filter(|one| one.session == session && fresh(one));
                let began = mine.map_or(now, |one| one.began);
                self.waiter = Some(Waiter {
                    session,
                    began,
                    asked: now,
                });
                let is_akin = holder.is_some_and(|holder| holder.uid == uid);
                if !is_akin || now.duration_since(began) < patience {
                    return Answer::Waits;
                }
                self.last = None;
                self.overtaken = holder.map(|holder| holder.session);
                return Answer::Trims;
            }
        }
        match self.last.replace(session) {
            Some(last) if last == session => Answer::Goes,
            _ => Answer::Trims,
        }
    }

    fn ask(&mut self, session: u64, uid: u32, now: Instant) -> Answer {
        self.ask_for((session, uid), PATIENCE, now)
    }

    fn leave(&mut self, session: u64) {
        self.holder = self.holder.filter(|holder| holder.session != session);
        self.overtaken = self.overtaken.filter(|holder| *holder != session);
        self.waiter = self.waiter.filter(|waiter| waiter.session != session);
    }
}

impl GraphTurns {
    /// Requests the turn for a session.
    pub fn ask(&self, session: u64, uid: u32) -> Answer {
        self.0.lock().ask(session, uid, Instant::now())
    }

    /// Requests the turn for a session that continues beside another one, of whichever user, after this time.
    pub fn ask_any(&self, session: u64, patience: Duration) -> Answer {
        let mut state = self.0.lock();
        let holder = state.holder.map(|holder| holder.session);
        if holder.is_some() && holder != Some(session) && state.overtaken == holder {
            // It may never leave.
            return Answer::Goes;
        }
        state.ask_for((session, 0), patience, Instant::now())
    }

    /// Releases the session's turn.
    pub fn leave(&self, session: u64) {
        self.0.lock().leave(session);
    }

    /// Notes that graph memory was returned to the pool outside of a turn, so that the next turn begins with a trim.
    pub fn note_left(&self) {
        self.0.lock().last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_session_at_a_time_and_nobody_finds_what_another_one_left() {
        let (mut turns, start) = (State::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(turns.ask(1, 7, at(0)), Answer::Trims, "who was before?");
        assert_eq!(turns.ask(1, 7, at(1)), Answer::Goes);
        turns.leave(1);
        assert_eq!(
            turns.ask(1, 7, at(2)),
            Answer::Goes,
            "nobody was there meanwhile"
        );
        assert_eq!(turns.ask(2, 8, at(3)), Answer::Waits);
        assert_eq!(turns.ask(3, 8, at(3)), Answer::Waits);
        assert_eq!(turns.ask(1, 7, at(4)), Answer::Goes, "its time is not over");
        assert_eq!(turns.ask(1, 7, at(8)), Answer::Yields);
        turns.leave(1);
        assert_eq!(
            turns.ask(1, 7, at(9)),
            Answer::Waits,
            "another one was first"
        );
        assert_eq!(turns.ask(2, 8, at(10)), Answer::Trims);
        turns.leave(2);
        turns.last = None;
        assert_eq!(
            turns.ask(2, 8, at(11)),
            Answer::Trims,
            "another one has left something"
        );
    }

    #[test]
    fn a_session_that_asks_no_more_holds_nobody_up() {
        let (mut turns, start) = (State::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(turns.ask(1, 7, at(0)), Answer::Trims);
        assert_eq!(turns.ask(2, 8, at(1)), Answer::Waits);
        assert_eq!(turns.ask(1, 7, at(30)), Answer::Goes);
        turns.leave(1);
        assert_eq!(turns.ask(3, 9, at(31)), Answer::Trims);
    }

    #[test]
    fn who_has_waited_in_vain_for_a_session_does_not_wait_for_it_again() {
        let turns = GraphTurns::default();
        let now = Duration::ZERO;
        assert_eq!(turns.ask_any(1, now), Answer::Trims);
        assert_eq!(turns.ask_any(2, Duration::MAX), Answer::Waits);
        assert_eq!(turns.ask_any(2, now), Answer::Trims);
        for session in [2, 3] {
            assert_eq!(turns.ask_any(session, Duration::MAX), Answer::Goes);
        }
        turns.leave(1);
        assert_eq!(turns.ask_any(2, Duration::MAX), Answer::Trims);
        assert_eq!(turns.ask_any(3, Duration::MAX), Answer::Waits);
    }

    #[test]
    fn sessions_of_one_user_do_not_wait_for_each_other_for_ever() {
        let (mut turns, start) = (State::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(turns.ask(1, 7, at(0)), Answer::Trims);
        for ms in (1..=1000).step_by(3) {
            assert_eq!(turns.ask(2, 7, at(ms)), Answer::Waits);
        }
        assert_eq!(turns.ask(2, 7, at(1002)), Answer::Trims);
        // It does not have the turn, so each of its launches needs a trim.
        assert_eq!(turns.ask(2, 7, at(1004)), Answer::Trims);
        for ms in (1010..=3000).step_by(3) {
            assert_eq!(turns.ask(3, 8, at(ms)), Answer::Waits, "of another user");
        }
    }
}
