//! What clients do, for whoever looks at the running service. The thread that has a session counts in plain words; every
//! millisecond, and before it sleeps, it publishes them. Nothing of it is on a launch's way but an addition.

mod session;

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// What is charged at most for the time between two samples: a session may have been on the slow lane meanwhile.
const LONGEST: Duration = Duration::from_millis(100);

/// As other threads see it. Written by the thread that has the session only, in cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Published {
    launches: AtomicU64,
    copies: AtomicU64,
    messages: AtomicU64,
    queued: AtomicU64,
    held_ns: AtomicU64,
    waited_ns: AtomicU64,
}

/// As the session's thread counts it.
#[derive(Debug, Default)]
pub struct Counts {
    /// Launches of kernels and graphs that the driver took.
    pub launches: u64,
    /// Copies and memsets that it took.
    pub copies: u64,
    held: Duration,
    waited: Duration,
    /// The last sample; `None`: the session had nothing to do, and its thread slept.
    last: Option<Sample>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    /// Work was on the device.
    busy: bool,
    /// A message waited for dispatch.
    waits: bool,
}

impl Sample {
    /// Of the time up to the next sample, how long it was so, as far as two samples can tell.
    fn charge(between: Duration, before: bool, after: bool) -> Duration {
        between * (u32::from(before) + u32::from(after)) / 2
    }
}

/// How long a session has been quiet.
#[derive(Debug, Default)]
pub struct Quiet {
    /// Messages dispatched when they were last counted.
    pub dispatched: u64,
    /// Counts without a new message since.
    pub counts: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_the_time_is_charged_where_one_sample_is_idle() {
        let charge = |before, after| Sample::charge(Duration::from_micros(10), before, after);
        assert_eq!(charge(true, true), Duration::from_micros(10));
        assert_eq!(charge(false, true), Duration::from_micros(5));
        assert_eq!(charge(true, false), Duration::from_micros(5));
        assert_eq!(charge(false, false), Duration::ZERO);
    }
}
