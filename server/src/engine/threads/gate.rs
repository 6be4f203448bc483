//! The gate: where calls wait that can only be made while nothing is in flight.
//!
//! A load, the first function of a library, a launch that needs more local memory than any before: the driver makes such a
//! call wait for all that is queued, everyone's, and lets nobody submit anything meanwhile. So a session whose next call is
//! one ([`Session::must_be_alone`]) waits here, and the others go on. Meanwhile streams that have something long in flight,
//! and kernels known to be long, get no more to the device. When nothing long is left, all are held back for the moment that
//! the rest takes, everything that waits here is done at once, and all go on.
//!
//! Nothing is held back beside a kernel of which nobody knows when it ends: it may be waiting for what its own program submits
//! next, and those who wait here would wait for it anyway. They go to another side of the devices ([`crate::engine::scheduling::moving`]).

pub mod run;

use crate::engine::session::Session;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Sessions that wait for a moment in which nothing is in flight.
#[derive(Debug, Default)]
pub struct Gate {
    waiting: Mutex<Vec<Waiting>>,
    came: Condvar,
    /// How many moments there have been for sessions' calls.
    opened: AtomicU64,
}

#[derive(Debug)]
struct Waiting {
    session: Box<Session>,
    since: Instant,
    /// When it could not move.
    stayed: Option<Instant>,
    /// The log has it.
    told: bool,
}

impl Gate {
    /// The undertaker has waited for long.
    pub fn knock(&self) {
        let _waiting = self.waiting.lock();
        self.came.notify_one();
    }

    /// How many moments there have been for sessions' calls.
    pub fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }
}
