//! Streams that wait: for the client, until a host function has returned or a word in memory has a value; for what they
//! have in flight ([`crate::engine::objects::pace`]); for those who wait at the gate ([`crate::engine::threads::gate`]).
//!
//! Nothing is made to wait on the GPU for that. A stream that waits there (`cuStreamWaitValue32`) keeps its hardware
//! queue, which streams of other clients may share, and whatever waits for all work of the context (a module load of
//! anybody) would wait for this client. So the messages of such a stream are held back here, with those that must
//! not overtake them, and all others go on. When the client is gone, so is what it waited for, and nothing hangs.

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

/// Pauses between two looks at a word in memory: a wait of long ago is looked at more seldom.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// What a stream waits for.
#[derive(Debug)]
pub enum Awaited {
    /// The client writes this flag when the function has returned.
    Returned { flag: u32, value: u32 },
    /// A word of the client's memory.
    Word(Word),
    /// So many of its operations are done; since when.
    Passed(u64, Instant),
    /// Those who wait at the gate, as of this number of [`crate::engine::base::calm::Calm::pauses`].
    Gate(u32),
    /// A record of an event of several sessions, which is deferred in another one; since when.
    Record(Arc<Record>, Instant),
}

impl Awaited {
    /// So many of the stream's operations are done.
    pub fn passed(ops: u64) -> Awaited {
        Awaited::Passed(ops, Instant::now())
    }

    /// The driver has this record of an event.
    pub fn record(record: Arc<Record>) -> Awaited {
        Awaited::Record(record, Instant::now())
    }

    /// How soon to look again; `None` for what is told.
    fn pause(&self) -> Option<Duration> {
        match self {
            Awaited::Returned { .. } => None,
            Awaited::Word(word) => Some(word.pause()),
            // What the pause adds to it is a small part.
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
    /// Whether it lies in device memory: the GPU then copies it to the line behind the flag.
    pub on_device: bool,
    pub since: Instant,
    /// A flag of the server's, until it is given back, and the value that the GPU writes next.
    pub flag: Option<Flag>,
    pub expected: u32,
    pub phase: Phase,
}

/// How far the wait for a word is. What the flag is written behind says what it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The stream has to get here first: what it has in flight may write the word.
    Arriving,
    /// The GPU copies the word.
    Reading,
    /// The word did not hold; it is looked at again then.
    Again(Instant),
}

impl Word {
    /// The flag's number.
    fn slot(&self) -> u32 {
        self.flag.as_ref().map_or(0, |flag| flag.slot)
    }
    /// What the GPU wrote last.
    fn written(&self, gpu: &Gpu) -> u32 {
        gpu.flags.value(self.slot())
    }
    /// Nothing writes the flag any more.
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
    /// Position of the stream.
    stream: usize,
    awaited: Awaited,
}

/// A stream or event by position: a handle's successor must not overtake it either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Object {
    Stream(usize),
    Event(usize),
    /// An event that is only waited for, or asked about.
    Read(usize),
}

/// What a message's order depends on.
#[derive(Clone, Copy, Debug)]
enum Touches {
    /// On nothing: it may overtake.
    Nothing,
    /// On these only.
    Objects([Option<Object>; 2]),
    /// It takes something away that any earlier message may use, and nothing waits for it.
    Earlier,
    /// On everything before it.
    Everything,
}

#[derive(Debug)]
struct Deferred {
    op: Op,
    token: u64,
    bytes: Vec<u8>,
    touches: Touches,
    /// What it has of an event of several sessions.
    taken: Option<Taken>,
}

/// What a session holds back.
#[derive(Debug, Default)]
pub struct Held {
    holds: Vec<Hold>,
    backlog: VecDeque<Deferred>,
    bytes: usize,
    /// What later messages must not overtake.
    blocked: BTreeSet<Object>,
    /// For copies of messages that are judged before they are executed.
    pub buffer: Vec<u8>,
    /// What the message that is executed has of an event of several sessions.
    pub taken: Option<Taken>,
    /// It was deferred.
    replaying: bool,
    /// The message at the ring's tail has to wait for the backlog.
    stalled: bool,
    /// Something in the backlog waits for work in flight.
    full: bool,
}

/// What becomes of a message.
pub enum Order {
    /// It is executed now.
    Now,
    /// It was held back, or answered.
    Taken,
    /// It stays in the ring.
    Stays,
}

impl Held {
    /// Whether anything is held back.
    #[inline]
    pub fn any(&self) -> bool {
        !self.holds.is_empty() || !self.backlog.is_empty()
    }
    /// Whether a stream waits.
    pub fn holds(&self, stream: usize) -> bool {
        self.holds.iter().any(|hold| hold.stream == stream)
    }
    /// Messages that are held back.
    pub fn len(&self) -> usize {
        self.backlog.len()
    }
    /// Whether the message at the ring's tail waits for the backlog.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }
    /// Whether something waits for work in flight.
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
    /// How soon to look again at what nobody will tell.
    pub fn pause(&self) -> Option<Duration> {
        let pauses = self.holds.iter().filter_map(|hold| hold.awaited.pause());
        pauses.min()
    }
    /// Whether the message that is executed was deferred.
    pub fn is_replaying(&self) -> bool {
        self.replaying
    }

    /// Whether a host function has returned that a stream waits for.
    pub fn is_released(&self, segment: &Segment) -> bool {
        self.holds.iter().any(|hold| match hold.awaited {
            Awaited::Returned { flag, value } => reached(segment.flag(flag), value),
            _ => false,
        })
    }

    /// Whether launches of graphs are held back.
    fn has_launches(&self) -> bool {
        self.backlog.iter().any(|held| held.op == Op::GraphLaunch)
    }

    fn block(&mut self, touches: Touches) {
        if let Touches::Objects(objects) = touches {
            self.blocked.extend(objects.into_iter().flatten());
        }
    }

    fn is_blocked(&self, touches: Touches, streams: &Slots<Stream>) -> bool {
        match touches {
            Touches::Nothing => false,
            Touches::Earlier | Touches::Everything => self.any(),
            Touches::Objects(objects) => {
                let held = |object| self.blocked.contains(&object);
                objects.into_iter().flatten().any(|object| match object {
                    Object::Stream(at) => held(object) || self.is_behind(at, streams),
                    Object::Event(at) => held(object) || held(Object::Read(at)),
                    Object::Read(at) => held(Object::Event(at)),
                })
            }
        }
    }

    /// Whether legacy default-stream order puts a stream behind something that is held back.
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
