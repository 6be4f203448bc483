//! Quiescent points in which sessions make the calls that need them (see [`crate::engine::base::calm`]).

use crate::engine::base::ordinal::Ordinal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Maximum time for which sessions are held back for the calls. A longer call, such as a compilation, continues
/// beside them.
const CALLS: Duration = Duration::from_millis(20);
/// Poll interval for work that is about to complete.
pub const SHORT_LOOK: Duration = Duration::from_micros(20);

/// A requirement of a launch that can only be met while nothing is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// This many bytes of local memory for each thread of the device.
    Local(Ordinal, u32),
    /// The function of this handle with the session's attributes, which no loaded instance can provide.
    Function(u64),
}

/// A quiescent point for the calls of some sessions.
#[derive(Debug)]
pub struct Moment {
    /// Number of sessions that have not finished their calls.
    pub left: AtomicUsize,
    /// No further call may begin.
    closed: AtomicBool,
}

impl Moment {
    /// A quiescent point without an end, for a server in which no other session runs yet.
    pub fn endless() -> Arc<Moment> {
        Moment::of(0)
    }

    /// A quiescent point for `count` sessions.
    pub fn of(count: usize) -> Arc<Moment> {
        Arc::new(Moment {
            left: AtomicUsize::new(count),
            closed: AtomicBool::new(false),
        })
    }

    /// Waits until all calls are made, for at most [`CALLS`]. Returns whether all are.
    pub fn await_calls(&self) -> bool {
        let began = Instant::now();
        while self.left.load(Ordering::Acquire) > 0 && began.elapsed() < CALLS {
            std::thread::sleep(SHORT_LOOK);
        }
        self.close();
        self.left.load(Ordering::Acquire) == 0
    }

    /// Lets no further call begin.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Whether no further call may begin.
    pub fn is_over(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}
