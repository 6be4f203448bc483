//! Trace records that the engine produces.
//!
//! The thread that serves a session writes a record of each message to the session's record ring: when its execution
//! began and ended in the server, and which flag the GPU writes when the work is done. The collector reads the records,
//! polls the flags and turns both into slices. No thread waits for another: a record that does not fit into the ring is
//! dropped and counted.

mod collect;
pub mod session;
pub mod traces;

use crate::engine::base::waits::Wait;
use crate::engine::gpu::Gpu;
use crate::engine::objects::streams::{Point, Stream};
use mpsshim_control::trace::{Blockers, Process};
use mpsshim_proto::message::{Mark, Op};
use quanta::Clock;
use rtrb::Producer;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Capacity of a session's record ring.
const RECORDS: usize = 4096;
/// Most kernel names that are distinguished.
const NAMES: usize = 1 << 16;
/// Average interval, in nanoseconds, at which streams get additional flags: kernels that take longer than this appear
/// as separate slices. All sessions that want such flags share the rate, because their writes contend for the context's
/// lock.
const APART: u64 = 100_000;
/// How long, in nanoseconds, a session counts as wanting flags after it last wanted one.
const LATELY: u64 = 10_000_000;
/// Burst allowance for additional flags: the in-flight limit of a stream.
const BURST: u64 = crate::engine::gpu::WINDOW;

/// One entry of a session's record ring.
#[derive(Clone, Copy, Debug)]
struct Record {
    begun: u64,
    ended: u64,
    what: What,
}

// The size given in docs/design/0013-trace.md; a ring holds [`RECORDS`] records.
const _: () = assert!(size_of::<Record>() == 48);

#[derive(Clone, Copy, Debug)]
enum What {
    /// An operation was submitted to a stream; `ops` counts the stream's operations including it.
    Operation {
        stream: u32,
        ops: u64,
        kind: Kind,
        amount: u64,
    },
    /// The flag that is written when the stream has completed `point.ops` operations. `own`: it is the server's flag.
    Point {
        stream: u32,
        point: Point,
        own: bool,
    },
    /// The client waits for this flag.
    Wait { slot: u32, value: u32 },
    /// A call that may take long.
    Call(Op),
    /// The session waited at the gate with this call.
    Gate(Op, Blockers),
    /// This many records were dropped because the ring was full.
    Lost(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A kernel, by the number of its name.
    Kernel(u32),
    Graph,
    Copy,
    Set,
    /// Work that was in flight when the trace began.
    Earlier,
}

/// A session's state for a trace.
#[derive(Debug)]
pub struct Tracer {
    /// Number of the trace.
    of: u32,
    clock: Clock,
    records: Producer<Record>,
    lost: u64,
    /// Nanoseconds accumulated for additional flags, and the time up to which they were counted.
    saved: (u64, u64),
    wanting: Arc<Wanting>,
    /// When the trace began, by `clock`.
    began: u64,
    /// Number of the [`LATELY`] interval in which a flag was last wanted.
    wanted: Option<u32>,
}

/// Number of sessions that want flags. Time is divided into numbered intervals of [`LATELY`]; the word holds the number
/// of the latest interval in which a session wanted a flag (32 bits), and the number of sessions in it and in the
/// interval before (16 bits each).
#[derive(Debug, Default)]
struct Wanting(AtomicU64);

impl Wanting {
    fn read(word: u64, stretch: u32) -> (u64, u64) {
        let (last, now, before) = ((word >> 32) as u32, word >> 16 & 0xffff, word & 0xffff);
        match stretch.saturating_sub(last) {
            0 => (now, before),
            1 => (0, now),
            _ => (0, 0),
        }
    }

    /// Counts one more session in this interval.
    fn add(&self, stretch: u32) {
        let _ = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                let (now, before) = Wanting::read(word, stretch);
                let last = u64::from(stretch).max(word >> 32);
                Some(last << 32 | (now + 1).min(0xffff) << 16 | before)
            });
    }

    /// Number of sessions that want flags, at least 1.
    fn count(&self, stretch: u32) -> u64 {
        let (now, before) = Wanting::read(self.0.load(Ordering::Relaxed), stretch);
        now.max(before).max(1)
    }
}

/// The information in a message that a trace needs.
enum Subject {
    Operation {
        stream: u64,
        kind: Kind,
        amount: u64,
    },
    Launch {
        stream: u64,
        function: u64,
        blocks: u64,
    },
    Wait(Mark),
    Call,
    Nothing,
}

impl Tracer {
    /// Whether the rate allows an additional flag for a stream now.
    fn may_point(&mut self, now: u64) -> bool {
        let (saved, until) = self.saved;
        let stretch = (self.clock.delta_as_nanos(self.began, now) / LATELY) as u32;
        if self.wanted != Some(stretch) {
            self.wanted = Some(stretch);
            self.wanting.add(stretch);
        }
        let each = APART * self.wanting.count(stretch);
        let more = self.clock.delta_as_nanos(until, now);
        let saved = saved.saturating_add(more).min(BURST * each);
        let may = saved >= each;
        self.saved = (if may { saved - each } else { saved }, now);
        may
    }

    /// Records the flags that show when the stream has reached this point: the client's mark or the stream's own
    /// checkpoint. If `may_have` is set and the rate allows, a checkpoint is added.
    fn record_points(
        &mut self,
        gpu: &Gpu,
        stream: &mut Stream,
        (mark, may_have): (Option<Mark>, bool),
        (begun, ended): (u64, u64),
    ) {
        let (number, ops) = (stream.number, stream.ops());
        if let Some(Mark { slot, value, .. }) = mark {
            let what = What::Point {
                stream: number,
                point: Point { ops, slot, value },
                own: false,
            };
            self.record(begun, ended, what);
            self.record(begun, ended, What::Wait { slot, value });
        } else if may_have && self.may_point(ended) {
            // If the driver refuses, a later checkpoint covers this operation.
            let _ = stream.checkpoint(gpu);
        }
        if let Some(point) = stream.last_point().filter(|point| point.ops == ops) {
            let what = What::Point {
                stream: number,
                point,
                own: true,
            };
            self.record(begun, ended, what);
        }
    }

    fn record(&mut self, begun: u64, ended: u64, what: What) {
        let mut push = |what| self.records.push(Record { begun, ended, what }).is_ok();
        if self.lost > 0 && push(What::Lost(self.lost)) {
            self.lost = 0;
        }
        self.lost += u64::from(!push(what));
    }
}

impl Wait {
    /// When it began, by the clock of trace number `trace`, but not before the trace itself, which began at `began`.
    fn begun_in(&self, trace: u32, began: u64) -> u64 {
        let begun = self.traced.filter(|(of, _)| *of == trace);
        begun.map_or(began, |(_, begun)| begun)
    }

    fn traced_blockers(&self) -> Blockers {
        let clients = self.ever.clients.iter().map(Process::from);
        Blockers::new(clients, self.ever.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtrb::RingBuffer;

    fn tracer(records: Producer<Record>) -> Tracer {
        Tracer {
            of: 1,
            clock: Clock::new(),
            records,
            lost: 0,
            saved: (0, 0),
            wanting: Arc::default(),
            began: 0,
            wanted: None,
        }
    }

    #[test]
    fn what_finds_no_room_is_counted() {
        let (producer, mut consumer) = RingBuffer::new(2);
        let mut tracer = tracer(producer);
        for _ in 0..5 {
            tracer.record(1, 2, What::Call(Op::ImageLoad));
        }
        let mut next = || consumer.pop().map(|record| record.what);
        assert!(matches!(
            (next(), next()),
            (Ok(What::Call(_)), Ok(What::Call(_)))
        ));
        tracer.record(1, 2, What::Call(Op::ImageLoad));
        assert!(matches!(
            (next(), next()),
            (Ok(What::Lost(3)), Ok(What::Call(_)))
        ));
    }

    #[test]
    fn flags_are_saved_up() {
        let mut tracer = tracer(RingBuffer::new(1).0);
        tracer.clock = Clock::mock().0;
        let first = 1_000 * APART;
        let burst = (0..BURST + 10).filter(|_| tracer.may_point(first)).count();
        assert_eq!(burst as u64, BURST);
        assert!(!tracer.may_point(first + APART / 2));
        assert!(tracer.may_point(first + APART));
        assert!(!tracer.may_point(first + APART));
    }

    #[test]
    fn sessions_that_want_flags_share_them() {
        let wanting = Arc::new(Wanting::default());
        let mut tracers: Vec<Tracer> = (0..8).map(|_| tracer(RingBuffer::new(1).0)).collect();
        for tracer in &mut tracers {
            tracer.clock = Clock::mock().0;
            tracer.wanting = Arc::clone(&wanting);
        }
        let mut granted = |from: u64, to: u64, sessions: usize| {
            (from..to)
                .step_by(APART as usize / 4)
                .map(|now| {
                    let some = &mut tracers[..sessions];
                    some.iter_mut()
                        .filter_map(|t| t.may_point(now).then_some(()))
                        .count() as u64
                })
                .sum::<u64>()
        };
        // Uses up the nanoseconds accumulated so far.
        let settled = 100 * LATELY;
        granted(LATELY, settled, 8);
        let second = 100 * LATELY;
        let shared = granted(settled, settled + second, 8);
        assert!(
            (second / APART * 9 / 10..=second / APART).contains(&shared),
            "{shared}"
        );
        // The other sessions no longer want flags.
        let alone = granted(settled + second, settled + 2 * second, 1);
        assert!(
            (second / APART * 9 / 10..=second / APART).contains(&alone),
            "{alone}"
        );
    }

    /// `cargo test --release -p mpsshim-server cost_of_a_record -- --ignored --nocapture`
    #[test]
    #[ignore = "a measurement"]
    fn cost_of_a_record() {
        let (producer, mut consumer) = RingBuffer::new(RECORDS);
        let mut tracer = tracer(producer);
        let mut least = std::time::Duration::MAX;
        for _ in 0..100 {
            let before = std::time::Instant::now();
            for _ in 0..RECORDS {
                let (begun, ended) = (tracer.clock.raw(), tracer.clock.raw());
                tracer.may_point(ended);
                tracer.record(begun, ended, What::Call(Op::Launch));
            }
            least = least.min(before.elapsed());
            while consumer.pop().is_ok() {}
        }
        assert_eq!(tracer.lost, 0);
        println!("{} ns", least.as_nanos() as f64 / RECORDS as f64);
    }
}
