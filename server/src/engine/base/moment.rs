//! Moments in which sessions make the calls that need a quiescent point (see [`crate::engine::base::calm`]).

use crate::engine::base::ordinal::Ordinal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long all are held back for the calls themselves. One that takes longer, since it compiles, goes on beside them.
const CALLS: Duration = Duration::from_millis(20);
/// Pause between two looks at work that is about to end.
pub const SHORT_LOOK: Duration = Duration::from_micros(20);

/// What a launch needs that can only be had while nothing is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// So many bytes of local memory for each thread of the device.
    Local(Ordinal, u32),
    /// The function of this handle, with the attributes that the session set: no instance has it.
    Function(u64),
}

/// A moment for some sessions' calls.
#[derive(Debug)]
pub struct Moment {
    /// Sessions that have not made theirs.
    pub left: AtomicUsize,
    /// Nobody begins any more.
    closed: AtomicBool,
}

impl Moment {
    /// One that does not end: nobody else is there yet.
    pub fn endless() -> Arc<Moment> {
        Moment::of(0)
    }

    /// One for so many sessions.
    pub fn of(count: usize) -> Arc<Moment> {
        Arc::new(Moment {
            left: AtomicUsize::new(count),
            closed: AtomicBool::new(false),
        })
    }

    /// Waits until all calls are made, for [`CALLS`] at most; whether they are.
    pub fn await_calls(&self) -> bool {
        let began = Instant::now();
        while self.left.load(Ordering::Acquire) > 0 && began.elapsed() < CALLS {
            std::thread::sleep(SHORT_LOOK);
        }
        self.closed.store(true, Ordering::Release);
        self.left.load(Ordering::Acquire) == 0
    }

    /// Nobody begins anything any more.
    pub fn is_over(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}
