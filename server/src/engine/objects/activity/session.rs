//! Sampling of a session's activity.

use super::managed::Moves;
use super::{LONGEST, Sample};
use crate::engine::base::account::Home;
use crate::engine::gpu::Gpu;
use crate::engine::objects::levels::session::fills;
use crate::engine::objects::pace::session::publish_pace;
use crate::engine::session::{Session, SessionShared};
use mpsshim_model::limits::{Activity, ManagedUsage};
use mpsshim_proto::segment::RING_LEN;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Samples the session's state and publishes its counters. `rests`: its thread is about to sleep.
pub fn sample(session: &mut Session, gpu: &Gpu, now: Instant, rests: bool) {
    session.enter();
    publish_pace(session, gpu, now);
    if gpu.calm(session.side).is_urgent() {
        session.say_whether_at_work(gpu);
    }
    let streams = session
        .objects
        .streams
        .iter_mut()
        .filter(|stream| !stream.capturing);
    let in_flight: u64 = streams
        .map(|stream| stream.in_flight(gpu, &session.shared.segment))
        .sum();
    let sample = Sample {
        at: now,
        busy: in_flight > 0,
        waits: session.inbox.consumer.has_message(),
        fills: fills(session, gpu),
    };
    if !gpu.is_tracing() {
        session.tracer = None;
    }
    let published = session.shared.activity.messages.load(Ordering::Relaxed);
    if sample.busy || published != session.flow.dispatched {
        session.shared.suspension.note_active(now);
    }
    let counts = &mut session.flow.counts;
    if let Some(last) = counts.last {
        let between = now.duration_since(last.at).min(LONGEST);
        counts.held += Sample::charge(between, last.busy, sample.busy);
        counts.waited += Sample::charge(between, last.waits, sample.waits);
        for (device, (before, after)) in last.fills.iter().zip(&sample.fills).enumerate() {
            if before + after > 0.0 {
                let time = between.mul_f32((before + after) / 2.0);
                let in_flight = Sample::charge(between, *before > 0.0, *after > 0.0);
                session.shared.standing.add_wanted(device, time, in_flight);
            }
        }
    }
    counts.last = (!rests || sample.busy).then_some(sample);
    let published = &session.shared.activity;
    let store = |to: &AtomicU64, value| to.store(value, Ordering::Relaxed);
    store(&published.launches, counts.launches);
    store(&published.copies, counts.copies);
    store(&published.messages, session.flow.dispatched);
    store(
        &published.queued,
        in_flight + session.inbox.held.len() as u64,
    );
    store(&published.held_ns, counts.held.as_nanos() as u64);
    store(&published.waited_ns, counts.waited.as_nanos() as u64);
    published.managed.store(&counts.managed);
}

impl SessionShared {
    /// Copies of managed memory, as last published.
    pub fn moves(&self) -> Moves {
        self.activity.managed.load()
    }

    /// Its managed memory. The client can write any number of faults, and any waiting time.
    pub fn managed_usage(&self) -> ManagedUsage {
        let Moves { to_host, to_device } = self.moves();
        let (faults, waited_ns) = self.activity.managed.take(&self.header().faults.0);
        ManagedUsage {
            device: self.account.held_managed(Home::Device),
            host: self.account.held_managed(Home::Host),
            to_host,
            to_device,
            faults,
            waited_ns,
        }
    }

    /// Returns the number of launches and the other counters, as last published.
    pub fn activity(&self) -> (u64, Activity) {
        let load = |from: &AtomicU64| from.load(Ordering::Relaxed);
        let (published, header) = (&self.activity, self.header());
        // The client may have written any value to its head.
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
