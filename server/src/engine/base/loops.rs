//! Exclusive use of a side by a session that launches a graph with conditional nodes.
//!
//! The driver re-launches the body of a conditional node from the device. With three or more streams at work in one context,
//! two such graphs at a time end the context within some hundred launches, and one such graph beside other kernels does
//! so now and then, mostly among the first launches in a new context (`CUDA_ERROR_LAUNCH_FAILED`, Xid 13
//! `SKEDCHECK22_INVALIDATE_ACTIVE_QMD`; driver 580.159.04, H200, on the plain driver as well). Programs on the plain driver
//! have a context each, and are rarely affected. So one session at a time has such graphs in flight, and while one runs,
//! other sessions submit nothing, within bounds: as if the device took turns between contexts.

use crate::engine::base::graph_turns::{Answer, GraphTurns};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// [`Loops::holder`]: no session. Sessions count from 1.
const NOBODY: u64 = 0;

/// After an attempt in vain, others continue for this multiple of the time for which they were held back.
const AFTER_VAIN: u32 = 9;
/// How long a session waits for the turn.
const PATIENCE: Duration = Duration::from_secs(10);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Microseconds since the start of the server, plus some time from now.
fn after(time: Duration) -> u64 {
    (START.elapsed() + time)
        .as_micros()
        .try_into()
        .unwrap_or(u64::MAX)
}

/// The turn of a side's sessions with such graphs, and whether a session has the side to itself.
#[derive(Debug, Default)]
pub struct Loops {
    turns: GraphTurns,
    /// The session that has the side to itself.
    holder: AtomicU64,
    /// Until when, at most.
    until: AtomicU64,
    /// It waits for the work of others to end.
    waits: AtomicBool,
    /// No session has the side to itself before this.
    next: AtomicU64,
    /// The last session that waited for the work of others did so in vain.
    vain: AtomicBool,
}

impl Loops {
    /// Requests the turn for a session. After some time, it continues beside the session that has the turn: otherwise a loop
    /// without an end would keep all others waiting.
    pub fn ask(&self, session: u64) -> Answer {
        self.turns.ask_any(session, PATIENCE)
    }

    /// Releases the session's turn.
    pub fn leave(&self, session: u64) {
        self.turns.leave(session);
    }

    /// Holds back all other sessions of the side for at most this time. Returns `false` if another session holds them back.
    /// A session whose time is over holds back none: it may be ending.
    pub fn hold(&self, session: u64, most: Duration) -> bool {
        let holder = self.holder.load(Ordering::Relaxed);
        if holder != NOBODY && !self.is_over() {
            return false;
        }
        let (holds, fails) = (Ordering::SeqCst, Ordering::Relaxed);
        let taken = self.holder.compare_exchange(holder, session, holds, fails);
        if taken.is_err() {
            return false;
        }
        self.waits.store(true, Ordering::Relaxed);
        self.until.store(after(most), Ordering::SeqCst);
        // As [`crate::engine::base::calm::Calm::hush`].
        fence(Ordering::SeqCst);
        true
    }

    /// Notes that nothing else is in flight, and the graph is launched: the others are held back for at most this time.
    pub fn note_launch(&self, most: Duration) {
        self.waits.store(false, Ordering::Relaxed);
        self.until.store(after(most), Ordering::SeqCst);
    }

    /// Lets the other sessions continue that were held back for this time: for as long at least, or, if that was in vain, for
    /// [`AFTER_VAIN`] times as long.
    pub fn release(&self, session: u64, held: Duration) {
        if self.holder.load(Ordering::Relaxed) != session {
            return;
        }
        let vain = self.waits.load(Ordering::Relaxed);
        let pause = if vain { AFTER_VAIN * held } else { held };
        self.vain.store(vain, Ordering::Relaxed);
        self.next.store(after(pause), Ordering::Relaxed);
        self.waits.store(false, Ordering::Relaxed);
        self.holder.store(NOBODY, Ordering::SeqCst);
    }

    /// Whether a session may have the side to itself again.
    pub fn is_due(&self) -> bool {
        after(Duration::ZERO) >= self.next.load(Ordering::Relaxed)
    }

    /// Whether the last wait for the work of others was in vain: until the next one is due, graphs run beside that work.
    pub fn is_vain(&self) -> bool {
        self.vain.load(Ordering::Relaxed)
    }

    /// Whether a session waits for the work of the others to end.
    #[inline]
    pub fn waits(&self) -> bool {
        self.waits.load(Ordering::Relaxed) && !self.is_over()
    }

    /// Whether the time is over for which others are held back.
    fn is_over(&self) -> bool {
        after(Duration::ZERO) >= self.until.load(Ordering::Relaxed)
    }

    /// Whether a session is held back for another one.
    #[inline]
    pub fn holds_back(&self, session: u64) -> bool {
        let holder = self.holder.load(Ordering::Relaxed);
        holder != NOBODY && holder != session && !self.is_over()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(1000);

    #[test]
    fn one_session_holds_back_the_others_until_it_releases_them() {
        let loops = Loops::default();
        assert!(loops.is_due() && !loops.holds_back(1));
        assert!(loops.hold(1, LONG) && !loops.hold(2, LONG));
        assert!(loops.waits() && loops.holds_back(2) && !loops.holds_back(1));
        loops.note_launch(LONG);
        assert!(!loops.waits() && loops.holds_back(2));
        loops.release(2, LONG);
        assert!(loops.holds_back(2), "it is not the second one's");
        loops.release(1, LONG);
        assert!(!loops.holds_back(2) && !loops.is_due());
        assert!(!loops.is_vain());
        loops.hold(2, LONG);
        loops.release(2, Duration::ZERO);
        assert!(loops.is_due() && loops.is_vain());
    }

    #[test]
    fn a_session_that_forgets_to_release_the_others_holds_nobody_back_for_ever() {
        let loops = Loops::default();
        assert!(loops.hold(1, LONG));
        loops.note_launch(Duration::ZERO);
        assert!(!loops.holds_back(2));
        assert!(loops.hold(2, LONG) && loops.holds_back(1));
        // The first one no longer has anything to release.
        loops.release(1, LONG);
        assert!(loops.holds_back(1) && loops.waits());
    }

    #[test]
    fn a_wait_whose_time_is_over_is_none() {
        let loops = Loops::default();
        assert!(loops.hold(1, Duration::ZERO) && !loops.waits());
    }
}
