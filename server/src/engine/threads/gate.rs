//! The gate: the queue of sessions whose next call can only be made while nothing is in flight.
//!
//! For a module load, the first use of a library's function or a launch that needs more local memory than any before,
//! the driver waits for all queued work of the context, of every client, and blocks all submissions meanwhile. So a
//! session whose next call is one of these ([`crate::engine::calls::alone::must_be_alone`]) waits here while the others
//! continue.
//! Meanwhile, streams that have long work in flight and kernels known to be long are deferred. When no long work is
//! left, all submissions are held back for the moment that the rest takes to finish, all calls waiting here are made at
//! once, and all sessions continue.
//!
//! Nothing is held back while a kernel with an unpredictable end runs: it may be waiting for later submissions of its
//! own program, and the sessions at the gate would have to wait for it anyway. They move to another side of the devices
//! ([`crate::engine::scheduling::moving`]).

pub mod run;

use crate::engine::session::Session;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Sessions that wait for a quiescent point.
#[derive(Debug, Default)]
pub struct Gate {
    waiting: Mutex<Vec<Waiting>>,
    came: Condvar,
    /// Number of quiescent points at which sessions made calls.
    opened: AtomicU64,
}

#[derive(Debug)]
struct Waiting {
    session: Box<Session>,
    since: Instant,
    /// When it was last found unable to move.
    stayed: Option<Instant>,
    /// Whether its long wait has been logged.
    told: bool,
}

impl Gate {
    /// Wakes the gate thread because the undertaker has waited for long.
    pub fn knock(&self) {
        let _waiting = self.waiting.lock();
        self.came.notify_one();
    }

    /// Returns the number of quiescent points at which sessions made calls.
    pub fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }
}
