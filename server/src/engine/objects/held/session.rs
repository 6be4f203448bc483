//! Deferral of a session's messages, and their later execution.

use super::{Awaited, Deferred, Hold, Object, Order, Phase, Touches, Word};
use crate::engine::base::bounds;
use crate::engine::base::call::Incoming;
use crate::engine::base::call_error::CallError;
use crate::engine::calls::alone::must_be_alone;
use crate::engine::calls::{self, Undone};
use crate::engine::gpu::host::read_word;
use crate::engine::objects::shared_events::session::describe_first_record;
use crate::engine::objects::shared_events::{Record, Standing, Taken};
use crate::engine::objects::trace::session::execute;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Handle;
use mpsshim_proto::message::{ATTRIBUTES_MAX, EventOnStream, Launch, MarkEvent, Op};
use mpsshim_proto::ops::{Ordering, Touch};
use mpsshim_proto::segment::reached;
use std::mem::{offset_of, take};
use std::time::Instant;

impl Session {
    /// Defers all further messages of a stream until the condition is met.
    pub fn hold(&mut self, stream: usize, awaited: Awaited) {
        self.inbox.held.holds.push(Hold { stream, awaited });
        self.inbox.held.blocked.insert(Object::Stream(stream));
    }

    /// Decides whether the next message may be executed while others are deferred.
    pub fn order(&mut self, message: Incoming<'_>) -> Order {
        let touches = self.touches(message);
        if !self.inbox.held.is_blocked(&touches, &self.objects.streams) {
            return Order::Now;
        }
        if matches!(message.op, Op::EventQuery | Op::EventElapsed) {
            self.note_answering(message);
            self.answer(Err(CUDA_ERROR_NOT_READY), &[]);
            return Order::Taken;
        }
        let len = message.len() as usize;
        let room = self.inbox.held.backlog.len() < bounds::HELD_MESSAGES
            && self.inbox.held.bytes + len <= bounds::HELD_BYTES;
        // The journal does not have frees: a deferred one would be lost with this server.
        let would_be_lost = message.op == Op::PoolFree && self.flow.repeats;
        let may_be_deferred =
            !would_be_lost && !message.op.is_request() && !matches!(touches, Touches::Everything);
        if !room || !may_be_deferred {
            self.inbox.held.stalled = true;
            return Order::Stays;
        }
        let bytes = message.whole();
        let taken = self.take_event(message);
        self.inbox.held.bytes += len;
        self.inbox.held.block(&touches);
        self.inbox.held.backlog.push_back(Deferred {
            op: message.op,
            token: message.token,
            bytes,
            touches,
            taken,
        });
        Order::Taken
    }

    /// Defers a message that the server before had taken from the ring, behind all others.
    pub fn defer_again(&mut self, op: Op, token: u64, bytes: Vec<u8>) {
        let touches = self.touches(Incoming::copied(op, token, &bytes));
        let held = &mut self.inbox.held;
        held.bytes += bytes.len();
        held.block(&touches);
        held.backlog.push_back(Deferred {
            op,
            token,
            bytes,
            touches,
            taken: None,
        });
        // It waits for nothing but its turn.
        held.full = true;
    }

    /// Returns the state of a shared event that belongs to a message being deferred. A deferred record counts as the
    /// event's latest, for which other sessions wait from now on; a deferred wait is for the record that is the latest
    /// now.
    fn take_event(&mut self, message: Incoming<'_>) -> Option<Taken> {
        let (Op::EventRecord | Op::StreamWaitEvent | Op::MarkEvent) = message.op else {
            return None;
        };
        let event = self.event_in(message)?;
        let shared = self.objects.events.get(event).ok()?.shared.clone()?;
        if message.op == Op::EventRecord {
            describe_first_record(self, event);
        }
        Some(match message.op {
            Op::EventRecord => Taken::Record(shared.defer_record()),
            _ => Taken::Wait(shared.latest()),
        })
    }

    /// The event named by a message.
    fn event_in(&self, message: Incoming<'_>) -> Option<u64> {
        let Ordering::Objects(touched) = message.op.ordering() else {
            return None;
        };
        let event = touched
            .iter()
            .find(|touch| !matches!(touch, Touch::Stream(_)));
        event.map(|touch| self.handle_in(message, *touch).0)
    }

    /// Attaches an event that has just become shared to the deferred messages that use it, in order. Returns whether one of
    /// them records it.
    pub fn share_deferred(&mut self, event: u64) -> bool {
        let Some(shared) = self
            .objects
            .events
            .get(event)
            .ok()
            .and_then(|event| event.shared.clone())
        else {
            return false;
        };
        let mut is_recorded = false;
        for held in &mut self.inbox.held.backlog {
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
                is_recorded |= records;
                held.taken = Some(match records {
                    true => Taken::Record(shared.defer_record()),
                    false => Taken::Wait(shared.latest()),
                });
            }
        }
        is_recorded
    }

    /// Executes deferred messages whose wait is over. Returns whether it made progress.
    ///
    /// # Errors
    /// A description of the client's protocol violation.
    pub fn replay(&mut self, shared: &Shared) -> Result<bool, String> {
        let mut holds = take(&mut self.inbox.held.holds);
        let before = holds.len();
        holds.retain_mut(|hold| !self.is_over(shared, hold));
        let released = holds.len() < before;
        self.inbox.held.holds = holds;
        if !released && !self.inbox.held.full {
            return Ok(false);
        }
        let held = &mut self.inbox.held;
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
            let waits = match &next.touches {
                Touches::Earlier => !self.inbox.held.backlog.is_empty(),
                touches => self.inbox.held.is_blocked(touches, &self.objects.streams),
            };
            if !waits {
                let bytes = take(&mut next.bytes);
                let message = Incoming::copied(next.op, next.token, &bytes);
                let outcome = if self
                    .flow
                    .moment
                    .as_ref()
                    .is_some_and(|moment| moment.is_over())
                {
                    Err(Undone::Later)
                } else if must_be_alone(self, shared, message) {
                    self.flow.wants = None;
                    Err(Undone::Alone)
                } else {
                    self.inbox.held.replaying = true;
                    self.inbox.held.taken = next.taken.take();
                    let outcome = match next.op.is_request() {
                        true => self.execute_answered(shared, message),
                        false => execute(shared, self, message),
                    };
                    self.inbox.held.replaying = false;
                    next.taken = self.inbox.held.taken.take();
                    outcome
                };
                match outcome {
                    Ok(()) => {
                        self.inbox.held.bytes -= bytes.len();
                        worked = true;
                        continue;
                    }
                    // Its stream may have been deferred just now.
                    Err(Undone::Later)
                        if self
                            .inbox
                            .held
                            .is_blocked(&next.touches, &self.objects.streams) => {}
                    Err(Undone::Later) => self.inbox.held.full = true,
                    Err(Undone::Alone) => {
                        (self.inbox.held.full, self.flow.wants_moment) = (true, true)
                    }
                    Err(Undone::Violation(why)) => return Err(why),
                }
                next.bytes = bytes;
            }
            self.inbox.held.block(&next.touches);
            self.inbox.held.backlog.push_back(next);
        }
        Ok(worked)
    }

    /// Executes a request again that an earlier server has answered.
    fn execute_answered(&mut self, shared: &Shared, message: Incoming<'_>) -> Result<(), Undone> {
        match calls::replay(shared, self, message) {
            Ok(()) => {
                self.note_bonds(&shared.images);
                Ok(())
            }
            Err(CallError::Full) => Err(Undone::Later),
            Err(CallError::Alone) => Err(Undone::Alone),
            Err(error) => {
                let op = message.op;
                Err(Undone::Violation(format!(
                    "{op:?} failed when it ran again: {error}"
                )))
            }
        }
    }

    /// Whether a stream's deferral is over.
    fn is_over(&mut self, shared: &Shared, hold: &mut Hold) -> bool {
        match &mut hold.awaited {
            Awaited::Returned { flag, value } => reached(self.shared.flag(*flag), *value),
            Awaited::Word(word) => self.is_word_there(shared, word),
            Awaited::Passed(ops, _) => {
                let stream = self.objects.streams.at_mut(hold.stream);
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
            // Memory that the client has freed is not read. The wait ends, since its outcome can no longer be
            // determined.
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

    /// Drops all deferred messages and waits. Returns whether the GPU has stopped reading the session's memory for
    /// them.
    pub fn forget_held(&mut self, shared: &Shared) -> bool {
        self.inbox.held.backlog.clear();
        self.inbox.held.holds.retain_mut(|hold| {
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
        self.inbox.held.holds.is_empty()
    }

    /// Determines which objects a message's order depends on.
    fn touches(&self, message: Incoming<'_>) -> Touches {
        match message.op.ordering() {
            Ordering::Free => Touches::Nothing,
            Ordering::Objects(touched) => {
                let touched = touched.iter().map(|touch| self.touched(message, *touch));
                Touches::Objects(touched.collect())
            }
            Ordering::Optional(stream) if self.handle_in(message, stream).0 == 0 => {
                Touches::Nothing
            }
            Ordering::Optional(stream) => Touches::Objects(vec![self.touched(message, stream)]),
            Ordering::Launch(stream) => {
                let mut objects = self.events_of_launch(message);
                objects.push(self.touched(message, stream));
                Touches::Objects(objects)
            }
            Ordering::Instances if self.inbox.held.has_launches() => Touches::Everything,
            Ordering::Instances => Touches::Nothing,
            Ordering::Earlier => Touches::Earlier,
            Ordering::Everything => Touches::Everything,
        }
    }

    fn touched(&self, message: Incoming<'_>, touch: Touch) -> Object {
        let position = self.handle_in(message, touch).index() as usize;
        match touch {
            Touch::Stream(_) => Object::Stream(position),
            Touch::Event(_) => Object::Event(position),
            Touch::Read(_) => Object::Read(position),
        }
    }

    fn handle_in(&self, message: Incoming<'_>, touch: Touch) -> Handle {
        let (Touch::Stream(at) | Touch::Event(at) | Touch::Read(at)) = touch;
        Handle(message.word(at))
    }

    /// The events that a launch may record or wait for: those in a kernel's attributes, or all events of the session's graphs.
    fn events_of_launch(&self, message: Incoming<'_>) -> Vec<Object> {
        let event = |handle: u64| Object::Event(Handle(handle).index() as usize);
        if message.op == Op::GraphLaunch {
            return self.objects.graphs.events_in_use().map(event).collect();
        }
        let word = |at: usize| {
            let mut bytes = [0; 4];
            let is_there = message.copy_out(at, &mut bytes);
            is_there.then(|| u32::from_le_bytes(bytes))
        };
        let field = |at| word(at).unwrap_or_default() as usize;
        let count = field(offset_of!(Launch, attributes)).min(ATTRIBUTES_MAX);
        let params = field(offset_of!(Launch, param_len)).next_multiple_of(8);
        let first = size_of::<Launch>() + params;
        let attributes = (0..count).map(|at| first + at * size_of::<CUlaunchAttribute>());
        let named = attributes.filter_map(|at| match word(at)? {
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT
            | CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT => {
                let mut handle = [0; 8];
                let value = at + offset_of!(CUlaunchAttribute, value);
                message
                    .copy_out(value, &mut handle)
                    .then(|| u64::from_le_bytes(handle))
            }
            _ => None,
        });
        named.map(event).collect()
    }
}
