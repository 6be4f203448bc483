//! What the engine tells a trace.
//!
//! The thread that has a session writes a record of each message into the session's ring of records: when it was begun and
//! ended here, and by which flag the GPU will tell that it is done. The collector reads the records, looks at the flags and
//! makes slices of both. Nobody waits for anybody: a record that finds no room is lost and counted.

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

/// Records of one session that the collector has not read.
const RECORDS: usize = 4096;
/// Names of kernels that are told apart.
const NAMES: usize = 1 << 16;
/// How often on average, in nanoseconds, streams get a flag besides those that they get anyway: kernels that take longer
/// are told apart. All sessions that want such flags share them, since all share the context's lock.
const APART: u64 = 100_000;
/// For how long, in nanoseconds, a session that wanted a flag is counted among those.
const LATELY: u64 = 10_000_000;
/// So many may follow each other at once, where there were few before: as many as a stream may have in flight.
const BURST: u64 = crate::engine::gpu::WINDOW;

/// What a thread that has a session has to say.
#[derive(Clone, Copy, Debug)]
struct Record {
    begun: u64,
    ended: u64,
    what: What,
}

// As many as docs/design/0013-trace.md says; a ring holds [`RECORDS`] of them.
const _: () = assert!(size_of::<Record>() == 48);

#[derive(Clone, Copy, Debug)]
enum What {
    /// An operation was given to a stream, after which it has had so many.
    Operation {
        stream: u32,
        ops: u64,
        kind: Kind,
        amount: u64,
    },
    /// This will tell when the stream has done so many.
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
    /// So many records found no room.
    Lost(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// By number of its name.
    Kernel(u32),
    Graph,
    Copy,
    Set,
    /// Whatever was in flight when the trace began.
    Earlier,
}

/// What a session keeps for a trace.
#[derive(Debug)]
pub struct Tracer {
    /// Number of the trace.
    of: u32,
    clock: Clock,
    records: Producer<Record>,
    lost: u64,
    /// Nanoseconds saved up for flags, and until when.
    saved: (u64, u64),
    wanting: Arc<Wanting>,
    /// When the trace began, by the clock.
    began: u64,
    /// The stretch of time in which a flag was last wanted.
    wanted: Option<u32>,
}

/// How many sessions want flags: stretches of [`LATELY`] are numbered; the last one's number, how many there were in it,
/// and in the one before.
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

    /// One more in this stretch.
    fn add(&self, stretch: u32) {
        let _ = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                let (now, before) = Wanting::read(word, stretch);
                let last = u64::from(stretch).max(word >> 32);
                Some(last << 32 | (now + 1).min(0xffff) << 16 | before)
            });
    }

    /// How many there are, at least one.
    fn count(&self, stretch: u32) -> u64 {
        let (now, before) = Wanting::read(self.0.load(Ordering::Relaxed), stretch);
        now.max(before).max(1)
    }
}

/// What a message is about, as far as a trace is concerned.
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
    /// Whether a stream may get a flag besides those that it gets anyway.
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

    /// Records the flags that will tell that the stream has got here: the client's mark, one that the stream has, or, if it
    /// `may_have` that, one more.
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
            // Where the driver refuses, the next one tells.
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
    /// When it began, by the clock of trace number `trace`, which itself began at `began`.
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
        // What was saved up before, and more.
        let settled = 100 * LATELY;
        granted(LATELY, settled, 8);
        let second = 100 * LATELY;
        let shared = granted(settled, settled + second, 8);
        assert!(
            (second / APART * 9 / 10..=second / APART).contains(&shared),
            "{shared}"
        );
        // The others want none any more.
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
