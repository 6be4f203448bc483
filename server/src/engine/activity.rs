//! What clients do, for whoever looks at the running service. The thread that has a session counts in plain words; every
//! millisecond, and before it sleeps, it publishes them. Nothing of it is on a launch's way but an addition.

use super::gpu::Gpu;
use super::session::{Session, SessionShared};
use mpsshim_model::limits::Activity;
use mpsshim_proto::segment::RING_LEN;
use std::sync::atomic::{AtomicU64, Ordering};
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

impl Session {
    /// Looks at what the session has to do, and publishes what it has done. `rests`: its thread is about to sleep.
    pub fn sample(&mut self, gpu: &Gpu, now: Instant, rests: bool) {
        self.enter();
        self.publish_pace(gpu, now);
        if gpu.calm(self.side).is_urgent() {
            self.say_whether_at_work(gpu);
        }
        let streams = self.streams.iter_mut().filter(|stream| !stream.capturing);
        let in_flight: u64 = streams
            .map(|stream| stream.in_flight(gpu, &self.shared))
            .sum();
        let sample = Sample {
            at: now,
            busy: in_flight > 0,
            waits: self.consumer.has_message(),
        };
        if !gpu.is_tracing() {
            self.tracer = None;
        }
        let counts = &mut self.counts;
        if let Some(last) = counts.last {
            let between = now.duration_since(last.at).min(LONGEST);
            counts.held += Sample::charge(between, last.busy, sample.busy);
            counts.waited += Sample::charge(between, last.waits, sample.waits);
        }
        counts.last = (!rests || sample.busy).then_some(sample);
        let published = &self.shared.activity;
        let store = |to: &AtomicU64, value| to.store(value, Ordering::Relaxed);
        store(&published.launches, counts.launches);
        store(&published.copies, counts.copies);
        store(&published.messages, self.dispatched);
        store(&published.queued, in_flight + self.held.len() as u64);
        store(&published.held_ns, counts.held.as_nanos() as u64);
        store(&published.waited_ns, counts.waited.as_nanos() as u64);
    }
}

impl SessionShared {
    /// Launches, and what else the client has done, as last published.
    pub fn activity(&self) -> (u64, Activity) {
        let load = |from: &AtomicU64| from.load(Ordering::Relaxed);
        let (published, header) = (&self.activity, self.header());
        // The client may have written anything into its head.
        let unread = load(&header.head.0).saturating_sub(load(&header.tail.0));
        let activity = Activity {
            copies: load(&published.copies),
            messages: load(&published.messages),
            queued: load(&published.queued),
            ring: unread.min(RING_LEN as u64),
            held_ns: load(&published.held_ns),
            waited_ns: load(&published.waited_ns),
        };
        (load(&published.launches), activity)
    }
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
