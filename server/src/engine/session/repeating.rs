//! Commands that another server may execute again ([`crate::engine::base::journal`]).

use crate::engine::base::call::Incoming;
use crate::engine::base::journal::{Entry, Journal, Part, Reach, Refusal, is_behind};
use crate::engine::gpu::Gpu;
use crate::engine::session::{Session, SessionShared};
use mpsshim_api::cuda::{
    CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_MEMSET,
};
use mpsshim_proto::message::array::CopyBox;
use mpsshim_proto::message::graph::{GraphNode, node_flags};
use mpsshim_proto::message::stream::HostFunction;
use mpsshim_proto::message::{
    Copy, CopyInline, INLINE_COPY_MAX, Mark, MarkEvent, Op, Side, UNAWAITED,
};
use mpsshim_proto::ops::Change;
use mpsshim_proto::ring::{ALIGN, Place, Violation};
use mpsshim_proto::segment::{ARRIVED, Header, reached};
use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use zerocopy::{FromBytes, IntoBytes};

/// Effect of a command on the execution of commands before it, and of itself, by another server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// It is executed again.
    Repeats,
    /// It need not be: it queries something, or makes an object, which the description has.
    Passes,
    /// It changes or ends an object: commands before it that the client has not waited for would find another one.
    Changes,
    /// It cannot be executed again.
    Cannot,
}

fn role_of(message: Incoming<'_>) -> Role {
    match message.op {
        Op::GraphNode => match message.body::<GraphNode>() {
            Ok(body) if sets_parameters(&body) => Role::Repeats,
            _ => Role::Cannot,
        },
        op => role(op),
    }
}

/// Whether a message sets parameters of a node of an instance, which gives the client no handle.
fn sets_parameters(body: &GraphNode) -> bool {
    const PLAIN: [u32; 3] = [
        CU_GRAPH_NODE_TYPE_KERNEL,
        CU_GRAPH_NODE_TYPE_MEMCPY,
        CU_GRAPH_NODE_TYPE_MEMSET,
    ];
    body.flags & node_flags::CHANGE != 0 && body.exec != 0 && PLAIN.contains(&body.kind)
}

fn role(op: Op) -> Role {
    match op {
        Op::Launch
        | Op::Mark
        | Op::CopyInline
        | Op::Copy
        | Op::CopyBox
        | Op::Memset
        | Op::EventRecord
        | Op::StreamWaitEvent
        | Op::MarkEvent
        | Op::HostFunction
        | Op::GraphLaunch => Role::Repeats,
        Op::StreamCreate | Op::EventCreate | Op::GraphUpload | Op::LimitMemory => Role::Passes,
        // The description has the allocations. Memory that goes to other work than behind its free is noted where it does.
        Op::PoolCreate | Op::PoolAlloc | Op::PoolFree => Role::Passes,
        // It binds the session if the description does not have it.
        Op::FileRegister => Role::Passes,
        Op::StreamDestroy
        | Op::EventDestroy
        | Op::MemRelease
        | Op::HostFree
        | Op::FileUnregister
        | Op::ImageUnload
        | Op::ImageLeave
        | Op::AddressFree
        | Op::PhysicalRelease
        | Op::ArrayDestroy
        | Op::IpcClose
        | Op::IpcForget
        | Op::TextureDestroy
        | Op::GreenDestroy
        | Op::StreamAttribute => Role::Changes,
        // These tell of work that is complete, or end the use of memory.
        Op::EventElapsed | Op::UnmapMemory | Op::SetAccess | Op::SetLimit => Role::Changes,
        _ if !op.is_request() => Role::Cannot,
        Op::PoolDestroy | Op::PoolSetAttribute | Op::PoolSetAccess => Role::Changes,
        _ => match op.change() {
            Change::Nothing | Change::Makes(_) | Change::Own => Role::Passes,
            Change::Sets(_) | Change::Ends(_) => Role::Changes,
            // The description does not have the change until the session is saved.
            Change::Binds => Role::Cannot,
        },
    }
}

/// The flag that a command writes, and its value.
fn mark_in(entry: &Entry) -> Option<(u32, u32)> {
    match Op::from_u16(entry.op)? {
        Op::Mark => {
            let (mark, _) = Mark::read_from_prefix(&entry.bytes).ok()?;
            Some((mark.slot, mark.value))
        }
        Op::MarkEvent => {
            let (mark, _) = MarkEvent::read_from_prefix(&entry.bytes).ok()?;
            Some((mark.slot, mark.value))
        }
        _ => None,
    }
}

/// The flag that is written when a host function is to run, and its value.
fn function_in(entry: &Entry) -> Option<(u32, u32)> {
    let is_function = Op::from_u16(entry.op)? == Op::HostFunction;
    let (body, _) = HostFunction::read_from_prefix(&entry.bytes).ok()?;
    // A slot that is out of range is a violation when the message is executed.
    is_function.then(|| (body.slot.saturating_add(ARRIVED), body.value))
}

/// The commands without the marks that are written already. `has` tells whether a flag of the client has reached a value.
///
/// A client goes on when it sees a mark, unless it waits for others of the same token.
///
/// # Errors
/// The client may go on, although a part of its work is in flight, or a host function has run.
pub fn without_marks(
    mut commands: Vec<Entry>,
    has: impl Fn(u32, u32) -> bool,
) -> Result<Vec<Entry>, Cow<'static, str>> {
    let has_run = |entry: &Entry| function_in(entry).is_some_and(|(slot, value)| has(slot, value));
    if commands.iter().any(has_run) {
        return Err("a host function has run behind a part of its work in flight".into());
    }
    let is_written = |entry: &Entry| mark_in(entry).is_some_and(|(slot, value)| has(slot, value));
    let awaits = |entry: &Entry| mark_in(entry).is_some() && !is_written(entry) && entry.token != 0;
    let awaited: HashSet<u64> = commands
        .iter()
        .filter(|entry| awaits(entry))
        .map(|entry| entry.token)
        .collect();
    let goes_on = |entry: &Entry| {
        is_written(entry) && entry.token != UNAWAITED && !awaited.contains(&entry.token)
    };
    if commands.iter().any(goes_on) {
        return Err("a part of its work in flight is complete".into());
    }
    commands.retain(|entry| !is_written(entry));
    Ok(commands)
}

/// The commands that another server has to execute again, for a session with work in flight. `has` tells whether a flag of
/// the client has reached a value.
///
/// # Errors
/// Why the session is lost.
pub fn pending(
    journal: Journal<'_>,
    header: &Header,
    has: impl Fn(u32, u32) -> bool,
) -> Result<Vec<Entry>, Cow<'static, str>> {
    let progress = &header.replay.0;
    let reach = Reach {
        // Partner: the client, which publishes it after it has waited.
        rested: progress.rested.load(Ordering::Acquire),
        seen: progress.seen.load(Ordering::Acquire),
    };
    let mut commands = without_marks(journal.pending(reach)?, has)?;
    let taken = header.tail.0.load(Ordering::Acquire);
    commands.retain(|entry| entry.is_taken(taken));
    Ok(commands)
}

impl SessionShared {
    /// Whether another server can execute the work in flight again.
    pub fn may_repeat(&self) -> bool {
        if !self.description.journal().is_on() {
            return false;
        }
        let bonds = self.description.bonds_at(self.rested());
        let has = |slot, value| reached(self.flag(slot), value);
        let why = match pending(self.description.journal(), self.header(), has) {
            _ if !bonds.is_empty() => format!("it is bound to its context by {bonds}"),
            Ok(_) => return true,
            Err(why) => why.into_owned(),
        };
        tracing::info!(
            "Client {}: work in flight cannot run again: {why}",
            self.info
        );
        false
    }

    fn rested(&self) -> u64 {
        self.header().replay.0.rested.load(Ordering::Acquire)
    }
}

impl Session {
    /// Begins to note commands for another server, as the client has asked for.
    pub fn keep_journal(&mut self) {
        let journal = self.shared.description.journal();
        self.flow.repeats = true;
        self.flow.last_command.set(journal.noted());
        journal.set_on();
    }

    /// Called before the message at the ring's tail is executed or deferred.
    #[inline]
    pub fn note_command(&self, message: Incoming<'_>) {
        if self.flow.repeats {
            let place = self.inbox.consumer.place().after(message.len());
            self.note_for_repeat(place, message);
        }
    }

    /// As [`Session::note_command`], for all messages before this place.
    ///
    /// # Errors
    /// The client violated the ring protocol.
    #[inline]
    pub fn note_commands_before(&mut self, end: Place) -> Result<(), Violation> {
        if !self.flow.repeats {
            return Ok(());
        }
        let mut place = self.inbox.consumer.place();
        while place != end {
            let Some(found) = self.inbox.consumer.peek_at(&mut place)? else {
                break;
            };
            place = place.behind(&found);
            if let Some(op) = Op::from_u16(found.op) {
                let memory = *self.inbox.consumer.memory();
                self.note_for_repeat(place, Incoming::in_ring(op, memory, &found));
            }
        }
        Ok(())
    }

    /// Notes that the work in flight cannot run again, because of something that is in no journal.
    #[inline]
    pub fn note_unrepeatable(&self, why: Refusal) {
        if self.flow.repeats {
            let position = self.inbox.consumer.place().position();
            let journal = self.shared.description.journal();
            journal.refuse(position + u64::from(ALIGN), why);
        }
    }

    /// Notes work on an event that sessions share: the next server would execute the sessions' commands again in another order.
    pub fn note_work_of_several(&self, op: Op) {
        self.note_unrepeatable(Refusal::Operation(op as u16));
    }

    /// Notes that a request has failed: those in the journal have to succeed when they are executed again.
    pub fn note_failed_request(&self, op: Op) {
        if op == Op::GraphNode {
            self.note_unrepeatable(Refusal::Operation(op as u16));
        }
    }

    /// Whether the next message in the ring is a mark or a query, or makes an object.
    pub fn has_next_without_work(&mut self) -> bool {
        let memory = *self.inbox.consumer.memory();
        let Ok(Some(found)) = self.inbox.consumer.peek() else {
            return false;
        };
        Op::from_u16(found.op).is_some_and(|op| {
            op == Op::Mark || role_of(Incoming::in_ring(op, memory, &found)) == Role::Passes
        })
    }

    /// Whether there are commands that may have to be executed again: the client has not waited for them.
    pub fn has_unawaited(&self) -> bool {
        if !self.flow.repeats {
            return false;
        }
        let journal = self.shared.description.journal();
        journal.trim(self.shared.rested());
        !journal.is_empty()
    }

    /// Notes a point of rest if the client has waited for a part of its work, or a function of it has run, and nothing has been
    /// in flight since, nor executed. Called before further messages are executed.
    #[inline]
    pub fn note_rest(&mut self, gpu: &Gpu) {
        if self.flow.repeats && self.awaits_rest() {
            self.note_rest_if_idle(gpu);
        }
    }

    /// Whether its client has seen a part of its commands complete, and none has come since: queries may.
    fn awaits_rest(&self) -> bool {
        let progress = &self.shared.header().replay.0;
        let seen = progress.seen.load(Ordering::Acquire);
        let here = self.inbox.consumer.place().position();
        is_behind(seen, progress.rested.load(Ordering::Acquire))
            && !is_behind(seen, here)
            && !is_behind(self.flow.last_command.get(), seen)
    }

    #[cold]
    fn note_rest_if_idle(&mut self, gpu: &Gpu) {
        if !self.inbox.held.any() && !self.has_work_in_flight(gpu) && self.shared.is_at_rest() {
            self.note_rest_here();
        }
    }

    /// As [`Session::note_rest`], with nothing in flight.
    pub fn note_rest_here(&self) {
        if self.flow.repeats && self.awaits_rest() {
            let here = self.inbox.consumer.place().position();
            let progress = &self.shared.header().replay.0;
            progress.rested.fetch_max(here, Ordering::AcqRel);
        }
    }

    /// Notes that the commands for which the client has not waited, if there are any, cannot be executed again.
    pub fn note_amid_work(&self, why: Refusal) {
        if self.has_unawaited() {
            let journal = self.shared.description.journal();
            journal.refuse(journal.noted(), why);
        }
    }

    #[cold]
    #[inline(never)]
    fn note_for_repeat(&self, behind: Place, message: Incoming<'_>) {
        let (journal, position) = (self.shared.description.journal(), behind.position());
        if !journal.is_new(position) {
            return;
        }
        journal.trim(self.shared.rested());
        let role = role_of(message);
        if role != Role::Passes {
            self.flow.last_command.set(position);
        }
        match role {
            Role::Repeats => self.write_into(journal, position, message),
            Role::Passes => journal.pass(position),
            Role::Changes if journal.is_empty() => journal.pass(position),
            Role::Changes | Role::Cannot => {
                journal.refuse(position, Refusal::Operation(message.op as u16))
            }
        }
    }

    fn write_into(&self, journal: Journal<'_>, position: u64, message: Incoming<'_>) {
        let staging = Side::Staging as u32;
        let refuse = || journal.refuse(position, Refusal::Operation(message.op as u16));
        match message.op {
            Op::Copy => {
                // A message that is too short is a violation when it is executed.
                let Ok(body) = message.body::<Copy>() else {
                    return refuse();
                };
                let (to, from) = (body.sides & 0xff, body.sides >> 8 & 0xff);
                // The client uses the staging area for other copies soon.
                if from == staging {
                    return match self.staged(&body) {
                        Some(parts) if to == Side::Device as u32 => journal.append(position, parts),
                        _ => refuse(),
                    };
                }
            }
            Op::CopyBox => {
                let from = message.body::<CopyBox>().map(|body| body.from.side);
                if from.map_or(true, |side| side == staging) {
                    return refuse();
                }
            }
            _ => {}
        }
        let whole = Part {
            op: message.op as u16,
            token: message.token,
            len: message.len() as usize,
            fill: Box::new(|to| _ = message.copy_out(0, to)),
        };
        journal.append(position, std::iter::once(whole));
    }

    /// A copy from the staging area, as messages that contain the data.
    fn staged(&self, body: &Copy) -> Option<impl Iterator<Item = Part<'static>>> {
        let Copy {
            to,
            from,
            len,
            stream,
            ..
        } = *body;
        let data = self.shared.segment.staging_address(from, len).ok()?;
        Some((0..len).step_by(INLINE_COPY_MAX).map(move |at| {
            let len = (len - at).min(INLINE_COPY_MAX as u64);
            let head = CopyInline {
                to: to.wrapping_add(at),
                stream,
                len,
            };
            Part {
                op: Op::CopyInline as u16,
                token: 0,
                len: size_of::<CopyInline>() + len as usize,
                fill: Box::new(move |bytes| {
                    let (start, rest) = bytes.split_at_mut(size_of::<CopyInline>());
                    start.copy_from_slice(head.as_bytes());
                    // SAFETY: inside the staging area, which the session keeps; the client may change the bytes, which
                    // only affects its own copy.
                    unsafe {
                        let from = (data + at) as *const u8;
                        std::ptr::copy_nonoverlapping(from, rest.as_mut_ptr(), rest.len());
                    }
                }),
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn mark(position: u64, token: u64, slot: u32) -> Entry {
        let value = position as u32;
        let body = Mark {
            slot,
            value,
            ..Mark::new_zeroed()
        };
        Entry {
            position,
            op: Op::Mark as u16,
            token,
            bytes: body.as_bytes().to_vec(),
        }
    }

    #[test]
    fn marks_that_are_written_are_left_out_if_their_client_waits_for_others() {
        let alone = || vec![mark(32, 0, 1)];
        let together = || vec![mark(32, 9, 1), mark(64, 9, 2)];
        let flags = |written: &'static [u32]| move |slot, _| written.contains(&slot);
        assert_eq!(without_marks(alone(), flags(&[])), Ok(alone()));
        assert!(without_marks(alone(), flags(&[1])).is_err());
        assert_eq!(without_marks(together(), flags(&[])), Ok(together()));
        let rest = Ok(vec![mark(64, 9, 2)]);
        assert_eq!(without_marks(together(), flags(&[1])), rest);
        assert!(without_marks(together(), flags(&[1, 2])).is_err());
        let unawaited = vec![mark(32, UNAWAITED, 1), mark(64, 0, 2)];
        assert_eq!(
            without_marks(unawaited, flags(&[1])),
            Ok(vec![mark(64, 0, 2)])
        );
        let other = vec![mark(32, 9, 1), mark(64, 10, 2)];
        assert!(without_marks(other, flags(&[1])).is_err());
    }

    #[test]
    fn host_functions_run_once() {
        let function = |slot| Entry {
            op: Op::HostFunction as u16,
            bytes: HostFunction {
                stream: 1,
                slot,
                value: 64,
            }
            .as_bytes()
            .to_vec(),
            ..mark(64, 0, 0)
        };
        let commands = || vec![mark(32, 0, 1), function(5)];
        let flags = |written: &'static [u32]| move |slot, _| written.contains(&slot);
        assert_eq!(without_marks(commands(), flags(&[])), Ok(commands()));
        // The flag of a mark with the same slot.
        assert_eq!(without_marks(commands(), flags(&[5])), Ok(commands()));
        assert!(without_marks(commands(), flags(&[5 + ARRIVED])).is_err());
        assert!(without_marks(vec![function(u32::MAX)], flags(&[])).is_ok());
    }

    #[test]
    fn commands_with_effects_outside_of_the_session_are_not_repeated() {
        for op in [
            Op::MemOp,
            Op::ManagedMove,
            Op::GraphExecUpdate,
            Op::GraphInstantiate,
        ] {
            assert_eq!(role(op), Role::Cannot, "{op:?}");
        }
        for op in [
            Op::EventDestroy,
            Op::GraphExecDestroy,
            Op::FileUnregister,
            Op::GreenDestroy,
        ] {
            assert_eq!(role(op), Role::Changes, "{op:?}");
        }
        for op in [
            Op::MemGrant,
            Op::ImageLoad,
            Op::EventQuery,
            Op::EventCreate,
            Op::PoolFree,
            Op::FileRegister,
            Op::ResourceQuery,
            Op::ResourceSplit,
            Op::ResourceJoin,
            Op::GreenCreate,
            Op::Confine,
        ] {
            assert_eq!(role(op), Role::Passes, "{op:?}");
        }
    }
}
