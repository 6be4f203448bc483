//! Streams that wait: for the client, until a host function has returned or a word in memory has a value; for what they
//! have in flight ([`super::pace`]); for those who wait at the gate ([`super::gate`]).
//!
//! Nothing is made to wait on the GPU for that. A stream that waits there (`cuStreamWaitValue32`) keeps its hardware
//! queue, which streams of other clients may share, and whatever waits for all work of the context (a module load of
//! anybody) would wait for this client. So the messages of such a stream are held back here, with those that must
//! not overtake them, and all others go on. When the client is gone, so is what it waited for, and nothing hangs.

use super::calls::{self, Undone};
use super::gpu::Gpu;
use super::host::{Flag, read_word};
use super::ordinal::Ordinal;
use super::session::{Session, SessionShared};
use super::shared_events::{Record, Standing, Taken};
use super::slots::Slots;
use super::streams::{Role, Stream};
use super::{Shared, bounds};
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Handle;
use mpsshim_proto::message::{EventOnStream, Launch, MarkEvent, Op};
use mpsshim_proto::ops::{Ordering, Touch};
use mpsshim_proto::ring::Message;
use mpsshim_proto::segment::reached;
use std::collections::{BTreeSet, VecDeque};
use std::mem::{offset_of, take};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// [`Message::offset`] of a message that is not in the ring: its bytes are in [`Held::replay`].
const REPLAY: u64 = u64::MAX;
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
    /// Those who wait at the gate, as of this number of [`super::calm::Calm::pauses`].
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
    message: Message,
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
    /// The message that is executed, if it is not in the ring.
    replay: Vec<u8>,
    /// What that one has of an event of several sessions.
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

    /// A message with these bytes that is not in the ring, to be executed next.
    pub fn message_of(&mut self, op: Op, bytes: &[u8]) -> Message {
        self.replay.clear();
        self.replay.extend_from_slice(bytes);
        Message {
            op: op as u16,
            flags: 0,
            token: 0,
            offset: REPLAY,
            len: bytes.len() as u32,
        }
    }

    /// Bytes of a message that was held back.
    pub fn replayed(&self, message: &Message) -> Option<&[u8]> {
        (message.offset == REPLAY).then_some(&self.replay)
    }
    /// Whether a host function has returned that a stream waits for.
    pub fn is_released(&self, session: &SessionShared) -> bool {
        self.holds.iter().any(|hold| match hold.awaited {
            Awaited::Returned { flag, value } => reached(session.flag(flag), value),
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

impl Session {
    /// Holds back what follows on a stream.
    pub fn hold(&mut self, stream: usize, awaited: Awaited) {
        self.held.holds.push(Hold { stream, awaited });
        self.held.blocked.insert(Object::Stream(stream));
    }

    /// Takes a message out of the ring, to be judged and executed by what it says now: its client may change it there at any
    /// time.
    pub fn take_copy(&mut self, message: &Message) -> Message {
        let mut bytes = take(&mut self.held.replay);
        bytes.resize(message.len as usize, 0);
        let _ = self.consumer.copy_out(message, 0, &mut bytes);
        self.held.replay = bytes;
        Message {
            offset: REPLAY,
            ..*message
        }
    }

    /// Decides about the next message while something is held back.
    pub fn order(&mut self, op: Op, message: &Message) -> Order {
        let touches = self.touches(op, message);
        if !self.held.is_blocked(touches, &self.streams) {
            return Order::Now;
        }
        if matches!(op, Op::EventQuery | Op::EventElapsed) {
            self.answer(Err(CUDA_ERROR_NOT_READY), &[]);
            return Order::Taken;
        }
        let len = message.len as usize;
        let room = self.held.backlog.len() < bounds::HELD_MESSAGES
            && self.held.bytes + len <= bounds::HELD_BYTES;
        if !room || op.is_request() || matches!(touches, Touches::Everything) {
            self.held.stalled = true;
            return Order::Stays;
        }
        let mut bytes = vec![0; len];
        let _ = self.copy_out(message, 0, &mut bytes);
        let taken = self.take_event(op, message);
        self.held.bytes += len;
        self.held.block(touches);
        self.held.backlog.push_back(Deferred {
            op,
            message: Message {
                offset: REPLAY,
                ..*message
            },
            bytes,
            touches,
            taken,
        });
        Order::Taken
    }

    /// What a message that is being deferred has of an event of several sessions: other sessions wait for a deferred record
    /// from now on, and a deferred wait is for the last record of now.
    fn take_event(&self, op: Op, message: &Message) -> Option<Taken> {
        let (Op::EventRecord | Op::StreamWaitEvent | Op::MarkEvent) = op else {
            return None;
        };
        let event = self.event_in(op, message)?;
        let shared = self.events.get(event).ok()?.shared.as_ref()?;
        Some(match op {
            Op::EventRecord => Taken::Record(shared.defer_record()),
            _ => Taken::Wait(shared.latest()),
        })
    }

    /// The event that a message names.
    fn event_in(&self, op: Op, message: &Message) -> Option<u64> {
        let Ordering::Objects(touched) = op.ordering() else {
            return None;
        };
        let event = touched
            .iter()
            .find(|touch| !matches!(touch, Touch::Stream(_)));
        event.map(|touch| self.handle_in(message, *touch).0)
    }

    /// An event is one of several sessions from now on: what is deferred has its part of it, in order.
    pub fn share_deferred(&mut self, event: u64) {
        let Some(shared) = self
            .events
            .get(event)
            .ok()
            .and_then(|event| event.shared.clone())
        else {
            return;
        };
        for held in &mut self.held.backlog {
            let (offset, records) = match held.op {
                Op::EventRecord | Op::StreamWaitEvent => {
                    let records = held.op == Op::EventRecord;
                    (offset_of!(EventOnStream, event), records)
                }
                Op::MarkEvent => (offset_of!(MarkEvent, event), false),
                _ => continue,
            };
            let named = held.bytes.get(offset..).and_then(|rest| rest.first_chunk());
            if named.copied().map(u64::from_le_bytes) == Some(event) {
                held.taken = Some(match records {
                    true => Taken::Record(shared.defer_record()),
                    false => Taken::Wait(shared.latest()),
                });
            }
        }
    }

    /// Executes what need not be held back any more; whether there was any.
    ///
    /// # Errors
    /// The client broke the protocol.
    pub fn replay(&mut self, shared: &Shared) -> Result<bool, String> {
        let mut holds = take(&mut self.held.holds);
        let before = holds.len();
        holds.retain_mut(|hold| !self.is_over(shared, hold));
        let released = holds.len() < before;
        self.held.holds = holds;
        if !released && !self.held.full {
            return Ok(false);
        }
        let held = &mut self.held;
        (held.stalled, held.full) = (false, false);
        held.blocked = held
            .holds
            .iter()
            .map(|hold| Object::Stream(hold.stream))
            .collect();
        if released {
            tracing::trace!(session = self.shared.info.session, "lets streams go on");
        }
        let mut worked = released;
        for mut next in take(&mut held.backlog) {
            let waits = match next.touches {
                Touches::Earlier => !self.held.backlog.is_empty(),
                touches => self.held.is_blocked(touches, &self.streams),
            };
            if !waits {
                self.held.replay = take(&mut next.bytes);
                let outcome = if self.moment.as_ref().is_some_and(|moment| moment.is_over()) {
                    Err(Undone::Later)
                } else if self.must_be_alone(shared, next.op, &next.message) {
                    self.wants = None;
                    Err(Undone::Alone)
                } else {
                    self.held.replaying = true;
                    self.held.taken = next.taken.take();
                    let outcome = calls::execute(shared, self, next.op, &next.message);
                    self.held.replaying = false;
                    next.taken = self.held.taken.take();
                    outcome
                };
                match outcome {
                    Ok(()) => {
                        self.held.bytes -= self.held.replay.len();
                        worked = true;
                        continue;
                    }
                    // Maybe its stream is held now.
                    Err(Undone::Later) if self.held.is_blocked(next.touches, &self.streams) => {}
                    Err(Undone::Later) => self.held.full = true,
                    Err(Undone::Alone) => (self.held.full, self.wants_moment) = (true, true),
                    Err(Undone::Violation(why)) => return Err(why),
                }
                next.bytes = take(&mut self.held.replay);
            }
            self.held.block(next.touches);
            self.held.backlog.push_back(next);
        }
        Ok(worked)
    }

    /// Whether a stream need not be held any longer.
    fn is_over(&mut self, shared: &Shared, hold: &mut Hold) -> bool {
        match &mut hold.awaited {
            Awaited::Returned { flag, value } => reached(self.shared.flag(*flag), *value),
            Awaited::Word(word) => self.is_word_there(shared, word),
            Awaited::Passed(ops, _) => {
                let stream = self.streams.at_mut(hold.stream);
                stream.map_or(true, |stream| stream.is_past(&shared.gpu, *ops))
            }
            Awaited::Record(record, _) => !matches!(Record::standing(record), Standing::Pending),
            Awaited::Gate(pauses) => *pauses != shared.gpu.calm(self.side).pauses(),
        }
    }

    fn is_word_there(&self, shared: &Shared, word: &mut Word) -> bool {
        let arrived = reached(word.written(&shared.gpu), word.expected);
        let there = match word.phase {
            Phase::Arriving | Phase::Reading if !arrived => return false,
            Phase::Again(when) if Instant::now() < when => return false,
            // Memory that the client has given back is not read; nobody can say any more what it would hold.
            _ if self.check_device(word.address, word.len()).is_err() => true,
            Phase::Reading => {
                let copy = shared.gpu.flags.host_address(word.slot()) + 8;
                let there = word.holds(read_word(copy, word.wide));
                word.phase = Phase::Again(Instant::now() + word.pause());
                there
            }
            _ if word.on_device => self.ask_for_word(shared, word).is_err(),
            _ => {
                let there = word.holds(read_word(word.address, word.wide));
                word.phase = Phase::Again(Instant::now());
                there
            }
        };
        if there {
            word.give_back(&shared.gpu);
        }
        there
    }

    fn ask_for_word(&self, shared: &Shared, word: &mut Word) -> Result<(), CUresult> {
        word.expected = word.expected.wrapping_add(1);
        word.phase = Phase::Reading;
        let to = shared.gpu.flags.host_address(word.slot()) + 8;
        let flag = (shared.gpu.flags.device_address(word.slot()), word.expected);
        shared.gpu.devices[word.device]
            .read_word(
                &shared.gpu.driver,
                word.address,
                word.len() as usize,
                to,
                flag,
            )
            .inspect_err(|status| shared.gpu.note_status(*status))
    }

    /// Gives up what the session waits for; whether nothing reads its memory any more.
    pub fn forget_held(&mut self, shared: &Shared) -> bool {
        self.held.backlog.clear();
        self.held.holds.retain_mut(|hold| {
            let Awaited::Word(word) = &mut hold.awaited else {
                return false;
            };
            let written = matches!(word.phase, Phase::Again(_))
                || reached(word.written(&shared.gpu), word.expected);
            if written {
                word.give_back(&shared.gpu);
            }
            !written
        });
        self.held.holds.is_empty()
    }

    /// What a message's order depends on.
    fn touches(&self, op: Op, message: &Message) -> Touches {
        match op.ordering() {
            Ordering::Free => Touches::Nothing,
            Ordering::Objects(touched) => {
                let mut objects = [None; 2];
                for (object, touch) in objects.iter_mut().zip(touched) {
                    *object = Some(self.touched(message, *touch));
                }
                Touches::Objects(objects)
            }
            // They may name events.
            Ordering::Launch(_) if self.launch_has_attributes(message) => Touches::Everything,
            Ordering::Optional(stream) if self.handle_in(message, stream).0 == 0 => {
                Touches::Nothing
            }
            Ordering::Launch(stream) | Ordering::Optional(stream) => {
                Touches::Objects([Some(self.touched(message, stream)), None])
            }
            Ordering::Instances if self.held.has_launches() => Touches::Everything,
            Ordering::Instances => Touches::Nothing,
            Ordering::Earlier => Touches::Earlier,
            Ordering::Everything => Touches::Everything,
        }
    }

    fn touched(&self, message: &Message, touch: Touch) -> Object {
        let position = self.handle_in(message, touch).index() as usize;
        match touch {
            Touch::Stream(_) => Object::Stream(position),
            Touch::Event(_) => Object::Event(position),
            Touch::Read(_) => Object::Read(position),
        }
    }

    fn handle_in(&self, message: &Message, touch: Touch) -> Handle {
        let (Touch::Stream(at) | Touch::Event(at) | Touch::Read(at)) = touch;
        Handle(self.word(message, at))
    }

    fn launch_has_attributes(&self, message: &Message) -> bool {
        let events = self
            .held
            .blocked
            .iter()
            .any(|object| !matches!(object, Object::Stream(_)));
        let mut count = [0; 4];
        let _ = self.copy_out(message, offset_of!(Launch, attributes), &mut count);
        events && count != [0; 4]
    }
}
