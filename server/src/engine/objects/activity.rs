//! Per-client activity counters, for monitoring. The thread that serves a session increments plain integers and
//! publishes them every millisecond and before it sleeps, so that they cost a launch only an addition.

pub mod managed;
pub mod session;

use mpsshim_proto::handshake::MAX_DEVICES;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// Most time charged between two samples: the session may have been on the slow lane meanwhile.
pub const LONGEST: Duration = Duration::from_millis(100);

/// The counters as other threads see them. Written only by the thread that serves the session, in separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Published {
    launches: AtomicU64,
    copies: AtomicU64,
    messages: AtomicU64,
    queued: AtomicU64,
    held_ns: AtomicU64,
    waited_ns: AtomicU64,
    managed: managed::Published,
}

/// The counters of the thread that serves the session.
#[derive(Debug, Default)]
pub struct Counts {
    /// Kernel and graph launches that the driver accepted.
    pub launches: u64,
    /// Copies and memsets that the driver accepted.
    pub copies: u64,
    /// Copies of managed memory.
    pub managed: managed::Moves,
    held: Duration,
    waited: Duration,
    /// The latest sample; `None` if the session was idle and its thread slept.
    last: Option<Sample>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    /// Whether work was in flight.
    busy: bool,
    /// Whether a message was waiting for dispatch.
    waits: bool,
    /// Part of each device that its kernels in flight could fill.
    fills: [f32; MAX_DEVICES],
}

impl Sample {
    /// Estimates for how much of the time between two samples a condition held, from its value in both.
    fn charge(between: Duration, before: bool, after: bool) -> Duration {
        between * (u32::from(before) + u32::from(after)) / 2
    }
}

/// How long a session has been idle.
#[derive(Debug, Default)]
pub struct Quiet {
    /// Number of messages dispatched at the latest count.
    pub dispatched: u64,
    /// Number of counts since the last new message.
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
