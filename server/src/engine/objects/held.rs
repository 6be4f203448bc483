//! Deferred streams. A stream is deferred while it waits for the client (for a host function to return, or for a word
//! in memory to have a value), for its own work in flight ([`crate::engine::objects::pace`]), or for sessions at the
//! gate ([`crate::engine::threads::gate`]).
//!
//! The wait never reaches the GPU. A stream that waits there (`cuStreamWaitValue32`) occupies its hardware queue, which
//! streams of other clients may share, and any call that waits for all work of the context, such as another client's
//! module load, would wait for this client. So the messages of such a stream are deferred here, together with those
//! that must not overtake them, and all others proceed. When the client exits, its deferred messages are dropped with
//! it, so nothing hangs.

mod session;

use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::slots::Slots;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::client_segment::Segment;
use crate::engine::gpu::host::Flag;
use crate::engine::objects::shared_events::{Record, Taken};
use crate::engine::objects::streams::{Role, Stream};
use mpsshim_api::cuda::*;
use mpsshim_proto::message::Op;
use mpsshim_proto::segment::reached;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Poll intervals for a word in memory: the interval grows with the time that the wait has lasted.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);
/// Poll interval for a deferred message that waits for work in flight, or is held back (`gpu::hold`): neither is signalled.
const FULL: Duration = Duration::from_micros(200);

/// Condition that ends a stream's deferral.
#[derive(Debug)]
pub enum Awaited {
    /// The host function has returned: the client has written `value` to this flag.
    Returned { flag: u32, value: u32 },
    /// A word of the client's memory compares true.
    Word(Word),
    /// The stream has completed this many of its operations. With the time at which the wait began.
    Passed(u64, Instant),
    /// The hold for sessions at the gate has ended: [`crate::engine::base::calm::Calm::pauses`] is no longer this
    /// number.
    Gate(u32),
    /// Another session's deferred record of a shared event has been made. With the time at which the wait began.
    Record(Arc<Record>, Instant),
}

impl Awaited {
    /// Waits until this many operations of the stream are done.
    pub fn passed(ops: u64) -> Awaited {
        Awaited::Passed(ops, Instant::now())
    }

    /// Waits until the driver has this record of an event.
    pub fn record(record: Arc<Record>) -> Awaited {
        Awaited::Record(record, Instant::now())
    }

    /// Poll interval for conditions that are not signalled; `None` if it is signalled.
    fn pause(&self) -> Option<Duration> {
        match self {
            Awaited::Returned { .. } => None,
            Awaited::Word(word) => Some(word.pause()),
            // The interval is a small fraction of the time that the wait has lasted.
            Awaited::Passed(_, since) | Awaited::Record(_, since) => {
                Some((since.elapsed() / 64).clamp(SHORTEST, LONGEST / 2))
            }
            Awaited::Gate(_) => Some(LONGEST / 2),
        }
    }
}

/// A comparison of `cuStreamWaitValue32/64`.
#[derive(Debug)]
pub struct Word {
    /// Device address, or address of pinned memory.
    pub address: u64,
    /// 64 bits instead of 32.
    pub wide: bool,
    /// `CU_STREAM_WAIT_VALUE_*`.
    pub flags: u32,
    pub value: u64,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Whether it lies in device memory: the GPU then copies it to host memory, 8 bytes behind the flag's address.
    pub on_device: bool,
    pub since: Instant,
    /// The server's flag used for the wait, until it is given back. `expected` is the value that the GPU writes to it
    /// next.
    pub flag: Option<Flag>,
    pub expected: u32,
    pub phase: Phase,
}

/// Progress of the wait for a word. The GPU writes the flag after the stream's earlier work, then after each copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The stream's earlier work is still in flight and may write the word.
    Arriving,
    /// The GPU is copying the word.
    Reading,
    /// The comparison was false; it is repeated at this time.
    Again(Instant),
}

impl Word {
    /// The flag's slot number.
    fn slot(&self) -> u32 {
        self.flag.as_ref().map_or(0, |flag| flag.slot)
    }
    /// Value that the GPU last wrote to the flag.
    fn written(&self, gpu: &Gpu) -> u32 {
        gpu.flags.value(self.slot())
    }
    /// Returns the flag; nothing may write it any more.
    fn give_back(&mut self, gpu: &Gpu) {
        if let Some(flag) = self.flag.take() {
            gpu.flags.give_back(flag);
        }
    }
    fn holds(&self, word: u64) -> bool {
        let (word, value) = if self.wide {
            (word, self.value)
        } else {
            (word as u32 as u64, self.value as u32 as u64)
        };
        match self.flags & 3 {
            CU_STREAM_WAIT_VALUE_GEQ if self.wide => word.wrapping_sub(value) as i64 >= 0,
            CU_STREAM_WAIT_VALUE_GEQ => reached(word as u32, value as u32),
            CU_STREAM_WAIT_VALUE_EQ => word == value,
            CU_STREAM_WAIT_VALUE_AND => word & value != 0,
            _ if self.wide => !(word | value) != 0,
            _ => !(word | value) as u32 != 0,
        }
    }

    fn len(&self) -> u64 {
        if self.wide { 8 } else { 4 }
    }

    fn pause(&self) -> Duration {
        (self.since.elapsed() / 8).clamp(SHORTEST, LONGEST)
    }
}

#[derive(Debug)]
struct Hold {
    /// Index of the stream.
    stream: usize,
    awaited: Awaited,
}

/// A stream or event, by table index rather than handle: a new object in the same place must not overtake it either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Object {
    Stream(usize),
    Event(usize),
    /// An event that is only waited for or queried.
    Read(usize),
}

/// Objects that determine which earlier messages a message must not overtake.
#[derive(Clone, Debug)]
enum Touches {
    /// None: it may overtake all.
    Nothing,
    /// Only these.
    Objects(Vec<Object>),
    /// It releases something that any earlier message may use. Later messages need not wait for it.
    Earlier,
    /// All: it must not overtake any earlier message.
    Everything,
}

#[derive(Debug)]
struct Deferred {
    op: Op,
    token: u64,
    bytes: Vec<u8>,
    touches: Touches,
    /// Its record of a shared event, or the record that it waits for.
    taken: Option<Taken>,
}

/// The deferred streams and messages of a session.
#[derive(Debug, Default)]
pub struct Held {
    holds: Vec<Hold>,
    backlog: VecDeque<Deferred>,
    bytes: usize,
    /// Objects whose later messages must not overtake the deferred ones.
    blocked: BTreeSet<Object>,
    /// Bytes of the message being executed, if it is not in the ring.
    pub buffer: Vec<u8>,
    /// The `taken` of the deferred message being executed.
    pub taken: Option<Taken>,
    /// Whether the message being executed was deferred.
    replaying: bool,
    /// Whether the message at the ring's tail has to wait for the backlog.
    stalled: bool,
    /// Whether a message in the backlog waits for work in flight.
    full: bool,
}

/// Outcome of the ordering check of a message.
pub enum Order {
    /// Execute it now.
    Now,
    /// It was deferred or answered.
    Taken,
    /// Leave it in the ring.
    Stays,
}

impl Held {
    /// Whether any stream or message is deferred.
    #[inline]
    pub fn any(&self) -> bool {
        !self.holds.is_empty() || !self.backlog.is_empty()
    }
    /// Whether a stream is deferred.
    pub fn holds(&self, stream: usize) -> bool {
        self.holds.iter().any(|hold| hold.stream == stream)
    }
    /// Number of deferred messages.
    pub fn len(&self) -> usize {
        self.backlog.len()
    }
    /// Whether the message at the ring's tail waits for the backlog.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }
    /// Whether a deferred message waits for work in flight.
    pub fn is_full(&self) -> bool {
        self.full
    }
    /// Whether the GPU may be reading the client's memory for a wait.
    pub fn is_reading(&self, gpu: &Gpu) -> bool {
        self.holds.iter().any(|hold| match &hold.awaited {
            Awaited::Word(word) => {
                word.phase == Phase::Reading && !reached(word.written(gpu), word.expected)
            }
            _ => false,
        })
    }
    /// Poll interval for conditions that are not signalled; `None` if all are.
    pub fn pause(&self) -> Option<Duration> {
        let pauses = self.holds.iter().filter_map(|hold| hold.awaited.pause());
        pauses.chain(self.full.then_some(FULL)).min()
    }
    /// Whether the message being executed was deferred.
    pub fn is_replaying(&self) -> bool {
        self.replaying
    }

    /// Whether a host function that a stream waits for has returned.
    pub fn is_released(&self, segment: &Segment) -> bool {
        self.holds.iter().any(|hold| match hold.awaited {
            Awaited::Returned { flag, value } => reached(segment.flag(flag), value),
            _ => false,
        })
    }

    /// Whether graph launches are deferred.
    fn has_launches(&self) -> bool {
        self.backlog.iter().any(|held| held.op == Op::GraphLaunch)
    }

    fn block(&mut self, touches: &Touches) {
        if let Touches::Objects(objects) = touches {
            self.blocked.extend(objects);
        }
    }

    fn is_blocked(&self, touches: &Touches, streams: &Slots<Stream>) -> bool {
        match touches {
            Touches::Nothing => false,
            Touches::Earlier | Touches::Everything => self.any(),
            Touches::Objects(objects) => {
                let held = |object| self.blocked.contains(&object);
                objects.iter().any(|object| match *object {
                    Object::Stream(at) => held(*object) || self.is_behind(at, streams),
                    Object::Event(at) => held(*object) || held(Object::Read(at)),
                    Object::Read(at) => held(Object::Event(at)),
                })
            }
        }
    }

    /// Whether legacy default-stream order places a stream after deferred work.
    fn is_behind(&self, at: usize, streams: &Slots<Stream>) -> bool {
        let held = |at: usize| self.blocked.contains(&Object::Stream(at));
        let Ok(stream) = streams.at(at) else {
            return false;
        };
        match stream.role {
            Role::Independent => false,
            Role::Blocking(legacy) => held(legacy),
            Role::Legacy => stream.members.iter().any(|member| held(*member)),
        }
    }
}
