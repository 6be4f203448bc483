//! The description of a session, in memory that outlives the server: the objects its client has made, as the messages
//! that made them, and whether work is in flight.
//!
//! It is a memory file accessible to servers only; the keeper ([`crate::keeper`]) holds a descriptor of it. The first
//! pages hold the session's state; records follow, in one of two areas. A record is appended before its message is
//! answered, and takes effect once the header's end includes it. When an area is full, the current records are copied
//! to the other one. If the server is killed at any instant, the description is still correct.

use crate::engine::base::block_table::{self, BlockTable};
use crate::engine::base::journal::{self, Journal, is_behind};
use crate::engine::base::kinds::{End, FORMAT, Kind};
use crate::keeper;
use mpsshim_model::bonds::Bonds;
use mpsshim_proto::handshake::Wire;
use mpsshim_proto::message::{GetFunction, Op};
use mpsshim_proto::shm::{Mapping, sealed_memfd};
use mpsshim_proto::wire;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Number of streams whose progress is noted, by position.
pub const STREAMS: usize = 256;
/// Bytes before the first area.
const HEADER: usize = 8192;
/// Bytes of an area; only written pages take memory. A full area is compacted by the thread that runs the session,
/// which delays that thread's other sessions: 2 MiB of the shortest records take some 25 ms.
const AREA: usize = 2 << 20;
/// Maximum bytes of current records in an area; with more, it would be compacted again and again.
const FULL: usize = AREA / 4 * 3;
/// Bytes before the journal.
const JOURNAL: usize = HEADER + 2 * AREA;
/// Bytes before the table of allocations from pools.
const BLOCKS: usize = JOURNAL + journal::LEN;
/// Bytes of the whole file.
const LEN: usize = BLOCKS + block_table::LEN;
/// Bit of [`Header::end`] that selects the second area.
const SECOND: u64 = 1 << 63;

/// Progress of a stream.
#[repr(C)]
struct Progress {
    /// 1: work was submitted, or is about to be, that no completion marker covers.
    busy: AtomicU32,
    /// The client's flag behind everything submitted, plus one; 0: nothing is in flight.
    slot: AtomicU32,
    /// The flag's value upon completion.
    value: AtomicU32,
    _pad: u32,
}

#[repr(C)]
struct Header {
    /// [`fingerprint`] of the server that writes the description.
    fingerprint: AtomicU64,
    /// End of the records, relative to the area's start, combined with [`SECOND`].
    end: AtomicU64,
    /// Ring position after the last described message.
    described: AtomicU64,
    /// [`Bonds`].
    bonds: AtomicU32,
    /// Messages are deferred.
    deferred: AtomicU32,
    /// Destroyed streams may have work in flight.
    retired: AtomicU32,
    /// The server has lost the context while nothing of the session was in flight; messages since then were not
    /// executed.
    outlives: AtomicU32,
    /// Number of consecutive servers that continued with the same message, at `waiting_at` less one, as the session's
    /// next.
    attempts: AtomicU32,
    /// Number of consecutive servers that ended while restoring the session.
    remade: AtomicU32,
    /// The session's weight if an operator has set it; 0: its initial weight.
    weight: AtomicU32,
    waiting_at: AtomicU64,
    /// Position in the ring before the first command whose effect on variables, graphs or times is not saved.
    bound_from: AtomicU64,
    /// Process id of the server.
    server: AtomicU32,
    /// Number of answers once the request before `answered_at` is answered.
    answers: AtomicU32,
    /// Ring position after the request that was last answered, or is about to be.
    answered_at: AtomicU64,
    journal: journal::Head,
    streams: [Progress; STREAMS],
    begun: BegunHead,
}

/// The last message that began to change the session, and the state before it.
#[repr(C)]
struct BegunHead {
    /// Ring position after the message; 0: none is being executed.
    behind: AtomicU64,
    /// [`Header::end`].
    end: AtomicU64,
    /// [`Header::bonds`].
    bonds: AtomicU32,
}

/// A message that changes the session and was being executed when its server ended.
#[derive(Debug)]
pub struct Begun {
    /// Ring position after the message.
    pub behind: u64,
    /// Bonds before the message.
    pub bonds: Bonds,
    end: u64,
}

const _: () = assert!(size_of::<Header>() <= HEADER);

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its kind.
    pub kind: Kind,
    /// The operation, if it is a message; otherwise a part of the key, which few kinds use.
    pub op: u16,
    /// Identifies the object; the meaning depends on the kind.
    pub key: u64,
    /// Version of the kind, then its state in postcard's encoding.
    pub bytes: Vec<u8>,
}

/// Bytes of a record's header: length, operation, kind, key.
const RECORD: usize = 16;

impl Record {
    /// A record of a state; without content where it cannot be encoded, which the next server refuses to read.
    pub fn of(kind: Kind, op: u16, key: u64, state: &impl Serialize) -> Record {
        let bytes = postcard::to_extend(state, vec![kind.version()]);
        Record {
            kind,
            op,
            key,
            bytes: bytes.unwrap_or_default(),
        }
    }

    /// A record that invalidates others.
    pub fn ending(kind: Kind, op: u16, key: u64) -> Record {
        Record {
            kind,
            op,
            key,
            bytes: Vec::new(),
        }
    }

    /// Its state; `None` if it is malformed or of another version.
    pub fn state<T: DeserializeOwned>(&self) -> Option<T> {
        let (version, state) = self.bytes.split_first()?;
        let known = *version == self.kind.version();
        known.then(|| postcard::from_bytes(state).ok()).flatten()
    }

    fn len(&self) -> usize {
        RECORD + self.bytes.len().next_multiple_of(8)
    }
}

/// One line: kind, operation, key, and the bytes in hexadecimal digits.
impl fmt::Display for Record {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{:?} {} {} ", self.kind, self.op, self.key)?;
        self.bytes
            .iter()
            .try_for_each(|byte| write!(to, "{byte:02x}"))
    }
}

/// Version of the header's layout and meaning.
const LAYOUT: u64 = 4;

/// The formats of sessions that this release restores, its own first: one for each wire that their clients may speak.
pub const FORMATS: [u64; wire::SPOKEN.len()] = {
    let mut formats = [0; wire::SPOKEN.len()];
    let mut at = 0;
    while at < formats.len() {
        formats[at] = format_of(wire::SPOKEN[at]);
        at += 1;
    }
    formats
};

/// Fingerprint of the state that a server leaves to the next one: the formats of a description's messages, of its records
/// and of the keeper's descriptors.
const fn format_of(wire: Wire) -> u64 {
    let wire = wire.fingerprint ^ (wire.protocol as u64).rotate_right(16);
    wire ^ LAYOUT ^ FORMAT ^ keeper::FORMAT.rotate_right(8)
}

/// The mapped file. Any thread reads it; only the thread that runs the session writes it.
#[derive(Debug)]
pub struct Description {
    file: OwnedFd,
    mapping: Mapping,
}

impl Description {
    /// Creates an empty description of the session of a client that speaks this wire.
    ///
    /// # Errors
    /// If no memory or no descriptor is available.
    pub fn new(wire: Wire) -> io::Result<Description> {
        let file = sealed_memfd(c"mpsshim-session", LEN as u64)?;
        let this = Description::open(file)?;
        let header = this.header();
        header.fingerprint.store(format_of(wire), Ordering::Relaxed);
        this.take_over();
        Ok(this)
    }

    /// Maps a description that an earlier server created.
    ///
    /// # Errors
    /// Errors of `mmap(2)`.
    pub fn open(file: OwnedFd) -> io::Result<Description> {
        let mapping = Mapping::sparse(file.as_fd(), LEN)?;
        Ok(Description { file, mapping })
    }

    /// The format of the session, which servers that can restore it have in [`FORMATS`].
    pub fn format(&self) -> u64 {
        self.header().fingerprint.load(Ordering::Relaxed)
    }

    /// Whether this release can restore the session.
    pub fn is_readable(&self) -> bool {
        FORMATS.contains(&self.format())
    }

    /// Notes that the request before this position in the ring is about to be answered, which makes the number of answers this.
    #[inline]
    pub fn set_answering(&self, position: u64, answers: u32) {
        let header = self.header();
        header.answers.store(answers, Ordering::Relaxed);
        header.answered_at.store(position, Ordering::Release);
    }

    /// Notes that the message that ends at this position in the ring is executed from now on, and may change the session.
    #[inline]
    pub fn begin_change(&self, behind: u64) {
        let header = self.header();
        let begun = &header.begun;
        // No message counts as begun until its position is stored.
        begun.behind.store(0, Ordering::Relaxed);
        begun
            .end
            .store(header.end.load(Ordering::Relaxed), Ordering::Release);
        begun
            .bonds
            .store(header.bonds.load(Ordering::Relaxed), Ordering::Release);
        begun.behind.store(behind, Ordering::Release);
    }

    /// Notes that the message of the last [`Description::begin_change`] was not executed.
    pub fn cancel_change(&self) {
        self.header().begun.behind.store(0, Ordering::Release);
    }

    /// The message that was being executed, if the messages before `taken` were taken from the ring.
    pub fn begun(&self, taken: u64) -> Option<Begun> {
        let begun = &self.header().begun;
        let behind = begun.behind.load(Ordering::Acquire);
        let is_next = behind != 0 && is_behind(behind, taken);
        is_next.then(|| Begun {
            behind,
            bonds: Bonds(begun.bonds.load(Ordering::Relaxed)),
            end: begun.end.load(Ordering::Relaxed),
        })
    }

    /// Whether records were appended since the message began.
    pub fn has_changed(&self, begun: &Begun) -> bool {
        self.header().end.load(Ordering::Acquire) != begun.end
    }

    /// Drops the records that were appended since the message at `taken` began: it was not executed. Returns `false` if they
    /// were compacted with the ones before.
    #[must_use]
    pub fn undo(&self, begun: &Begun, taken: u64) -> bool {
        let header = self.header();
        let now = header.end.load(Ordering::Acquire);
        let is_same_area = (now ^ begun.end) & SECOND == 0;
        if is_same_area {
            header.end.store(begun.end, Ordering::Release);
            if is_behind(self.described(), taken) {
                self.set_described(taken);
            }
        }
        is_same_area
    }

    /// Position after the request at `taken`, if the number of answers tells that it was answered.
    pub fn answered(&self, taken: u64, answers: u32) -> Option<u64> {
        let header = self.header();
        let position = header.answered_at.load(Ordering::Acquire);
        let is_answered = header.answers.load(Ordering::Relaxed) == answers;
        (is_answered && is_behind(position, taken)).then_some(position)
    }

    /// Notes that this process is its server. Returns the process id of the one before.
    pub fn take_over(&self) -> i32 {
        let own = std::process::id();
        self.header().server.swap(own, Ordering::Relaxed) as i32
    }

    /// The file, for the keeper.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping's LEN bytes include the header and live as long as self; only its atomics are written.
        unsafe { &*self.mapping.base().cast::<Header>() }
    }

    fn area(&self, second: bool) -> *mut u8 {
        let at = HEADER + if second { AREA } else { 0 };
        // SAFETY: inside the mapping.
        unsafe { self.mapping.base().add(at) }
    }

    /// The session's commands since its client last waited.
    pub fn journal(&self) -> Journal<'_> {
        // SAFETY: the area is inside the mapping, behind the two of the records, and lives as long as self.
        unsafe { Journal::new(&self.header().journal, self.mapping.base().add(JOURNAL)) }
    }

    /// The session's allocations from pools.
    pub fn blocks(&self) -> BlockTable<'_> {
        // SAFETY: the area is inside the mapping, page-aligned behind the journal, and lives as long as self.
        unsafe { BlockTable::new(self.mapping.base().add(BLOCKS)) }
    }

    /// The reasons that bind the session to its context.
    pub fn bonds(&self) -> Bonds {
        Bonds(self.header().bonds.load(Ordering::Acquire))
    }

    /// Sets the reasons that bind the session to its context, because of a command behind this position in the ring.
    pub fn set_bonds(&self, bonds: Bonds, position: u64) {
        let header = self.header();
        let was_saved = self.bonds().0 & Bonds::UNTIL_SAVED.0 == 0;
        if was_saved && bonds.0 & Bonds::UNTIL_SAVED.0 != 0 {
            header.bound_from.store(position, Ordering::Relaxed);
        }
        header.bonds.store(bonds.0, Ordering::Release);
    }

    /// The reasons that also bind a session whose commands behind this position in the ring are executed again: these make
    /// changes that are not saved once more.
    pub fn bonds_at(&self, position: u64) -> Bonds {
        let bonds = self.bonds();
        let bound_from = self.header().bound_from.load(Ordering::Relaxed);
        match is_behind(position, bound_from) {
            true => bonds,
            false => Bonds(bonds.0 & !Bonds::UNTIL_SAVED.0),
        }
    }

    /// Sets whether messages are deferred.
    #[inline]
    pub fn set_deferred(&self, deferred: bool) {
        let (word, value) = (&self.header().deferred, u32::from(deferred));
        if word.load(Ordering::Relaxed) != value {
            word.store(value, Ordering::Release);
        }
    }

    /// Sets whether destroyed streams may have work in flight.
    pub fn set_retired(&self, any: bool) {
        self.header().retired.store(any.into(), Ordering::Release);
    }

    fn progress(&self, stream: usize) -> Option<&Progress> {
        self.header().streams.get(stream)
    }

    /// Notes that work is about to be submitted to the stream at this position.
    pub fn begin(&self, stream: usize) {
        if let Some(progress) = self.progress(stream) {
            progress.busy.store(1, Ordering::Release);
        }
    }

    /// Notes that all work submitted to the stream is complete once this flag of the client has the value.
    pub fn cover(&self, stream: usize, slot: u32, value: u32) {
        if let Some(progress) = self.progress(stream) {
            progress.value.store(value, Ordering::Relaxed);
            progress.slot.store(slot + 1, Ordering::Relaxed);
            progress.busy.store(0, Ordering::Release);
        }
    }

    /// The flag and value of the last [`Description::cover`]; `None` if nothing was in flight.
    pub fn covered(&self, stream: usize) -> Option<(u32, u32)> {
        let progress = self.progress(stream)?;
        let slot = progress.slot.load(Ordering::Relaxed).checked_sub(1)?;
        Some((slot, progress.value.load(Ordering::Relaxed)))
    }

    /// Undoes [`Description::cover`], because the driver has refused the flag: `before` does not cover the work that was
    /// begun since then.
    pub fn uncover(&self, stream: usize, before: Option<(u32, u32)>) {
        if let Some(progress) = self.progress(stream) {
            progress.busy.store(1, Ordering::SeqCst);
            progress
                .slot
                .store(before.map_or(0, |(slot, _)| slot + 1), Ordering::SeqCst);
            progress
                .value
                .store(before.map_or(0, |(_, value)| value), Ordering::SeqCst);
        }
    }

    /// Cancels [`Description::begin`]: nothing was submitted, so the last flag still covers all work.
    pub fn take_back(&self, stream: usize) {
        if let Some(progress) = self.progress(stream) {
            progress.busy.store(0, Ordering::Release);
        }
    }

    /// Notes that nothing of the stream is in flight.
    pub fn settle(&self, stream: usize) {
        if let Some(progress) = self.progress(stream) {
            progress.slot.store(0, Ordering::Relaxed);
            progress.busy.store(0, Ordering::Release);
        }
    }

    /// Whether nothing of the session is in flight or deferred. `has` tells whether a flag of the client has reached a value.
    pub fn is_at_rest(&self, has: impl Fn(u32, u32) -> bool) -> bool {
        let header = self.header();
        header.deferred.load(Ordering::Acquire) == 0
            && !self.journal().is_owed()
            && self.is_drained(has)
    }

    /// As [`Description::is_at_rest`], whatever is deferred.
    pub fn is_drained(&self, has: impl Fn(u32, u32) -> bool) -> bool {
        let header = self.header();
        let rests = |stream: &Progress| {
            let busy = stream.busy.load(Ordering::Acquire) != 0;
            let slot = stream.slot.load(Ordering::Relaxed).checked_sub(1);
            let reached = slot.is_none_or(|slot| has(slot, stream.value.load(Ordering::Relaxed)));
            !busy && reached
        };
        header.retired.load(Ordering::Acquire) == 0 && header.streams.iter().all(rests)
    }

    /// The weight that an operator has set for the session, if any.
    pub fn weight(&self) -> Option<u32> {
        let weight = self.header().weight.load(Ordering::Relaxed);
        (weight > 0).then_some(weight)
    }

    /// Sets the weight that an operator has given the session.
    pub fn set_weight(&self, weight: u32) {
        self.header().weight.store(weight, Ordering::Relaxed);
    }

    /// Whether the session was chosen to continue in the next server.
    #[inline]
    pub fn may_outlive(&self) -> bool {
        self.header().outlives.load(Ordering::Acquire) != 0
    }

    /// Chooses the session to continue in the next server.
    pub fn set_outlives(&self) {
        self.header().outlives.store(1, Ordering::SeqCst);
    }

    /// Notes that another server continues with the message at this position as the next. Returns the number of
    /// consecutive servers that did so with the same position, this one included.
    pub fn note_attempt(&self, position: u64) -> u32 {
        let header = self.header();
        let before = header.waiting_at.swap(position + 1, Ordering::Relaxed);
        let earlier = header.attempts.load(Ordering::Relaxed);
        let attempts = if before == position + 1 {
            earlier + 1
        } else {
            1
        };
        header.attempts.store(attempts, Ordering::Relaxed);
        attempts
    }

    /// Notes that another server starts restoring the session. Returns the number of attempts since the last successful
    /// one, this one included.
    pub fn note_remake(&self) -> u32 {
        self.header().remade.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Resets the state after another server has restored the session, because nothing is in flight any more.
    pub fn reset(&self) {
        self.header().remade.store(0, Ordering::Relaxed);
        self.header().outlives.store(0, Ordering::SeqCst);
        (0..STREAMS).for_each(|stream| self.settle(stream));
        self.set_deferred(false);
        self.set_retired(false);
    }

    /// Ring position after the last described message.
    pub fn described(&self) -> u64 {
        self.header().described.load(Ordering::Acquire)
    }

    fn end(&self) -> (bool, usize) {
        let end = self.header().end.load(Ordering::Acquire);
        (end & SECOND != 0, ((end & !SECOND) as usize).min(AREA))
    }

    /// Notes that the messages before this ring position are described.
    pub fn set_described(&self, position: u64) {
        self.header().described.store(position, Ordering::Release);
    }

    /// Appends a record. Returns `false` if there is no room, even after compacting.
    #[must_use]
    pub fn append(&self, record: &Record) -> bool {
        let (mut second, mut end) = self.end();
        if end + record.len() > AREA {
            match self.compact() {
                Some(new) if new.1 + record.len() <= FULL => (second, end) = new,
                _ => return false,
            }
        }
        self.write(second, end, record);
        self.publish(second, end + record.len());
        true
    }

    fn publish(&self, second: bool, end: usize) {
        let bit = if second { SECOND } else { 0 };
        self.header().end.store(end as u64 | bit, Ordering::Release);
    }

    fn write(&self, second: bool, at: usize, record: &Record) {
        let mut head = [0; RECORD];
        head[..4].copy_from_slice(&(record.bytes.len() as u32).to_le_bytes());
        head[4..6].copy_from_slice(&record.op.to_le_bytes());
        head[6..8].copy_from_slice(&(record.kind as u16).to_le_bytes());
        head[8..].copy_from_slice(&record.key.to_le_bytes());
        debug_assert!(at + record.len() <= AREA);
        // SAFETY: the callers have checked that there is room; readers stop at the published end.
        unsafe {
            let to = self.area(second).add(at);
            std::ptr::copy_nonoverlapping(head.as_ptr(), to, RECORD);
            let bytes = &record.bytes;
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.add(RECORD), bytes.len());
        }
    }

    /// Copies the current records to the other area and switches to it. Returns the area and its end.
    fn compact(&self) -> Option<(bool, usize)> {
        let second = !self.end().0;
        let mut end = 0;
        for record in self.records() {
            if end + record.len() > AREA {
                return None;
            }
            self.write(second, end, &record);
            end += record.len();
        }
        self.publish(second, end);
        // If the pages cannot be freed, they only waste memory.
        // SAFETY: a part of our own mapping without current records.
        unsafe { libc::madvise(self.area(!second).cast(), AREA, libc::MADV_REMOVE) };
        Some((second, end))
    }

    /// The current records, oldest first.
    pub fn records(&self) -> Vec<Record> {
        let (second, end) = self.end();
        // SAFETY: inside the mapping; only the thread that runs the session writes, past the end or in the other area.
        let bytes = unsafe { std::slice::from_raw_parts(self.area(second), end) };
        current(parse(bytes))
    }

    /// As [`Description::records`], while another process writes them; none if it compacts them meanwhile.
    pub fn records_beside_writer(&self) -> Vec<Record> {
        let (second, end) = self.end();
        let mut bytes = vec![0; end];
        // SAFETY: inside the mapping, and the copy is ours. Bytes that change meanwhile have no invalid values.
        unsafe { std::ptr::copy_nonoverlapping(self.area(second), bytes.as_mut_ptr(), end) };
        match self.end() {
            (now, _) if now == second => current(parse(&bytes)),
            _ => Vec::new(),
        }
    }
}

/// Parses all records up to the first incomplete one.
fn parse(mut bytes: &[u8]) -> Vec<Record> {
    let mut records = Vec::new();
    while let Some((head, rest)) = bytes.split_at_checked(RECORD) {
        let number = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let mut key = [0; 8];
        key.copy_from_slice(&head[8..]);
        let (Some(kind), Some((body, behind))) = (
            Kind::of(number(6)),
            rest.split_at_checked(len.next_multiple_of(8)),
        ) else {
            break;
        };
        records.push(Record {
            kind,
            op: number(4),
            key: u64::from_le_bytes(key),
            bytes: body[..len].to_vec(),
        });
        bytes = behind;
    }
    records
}

/// Filters out records that later ones have invalidated or replaced.
fn current(records: Vec<Record>) -> Vec<Record> {
    let mut kept: Vec<Option<Record>> = Vec::with_capacity(records.len());
    let mut made: HashMap<(Kind, u16, u64), usize> = HashMap::new();
    let mut set: HashSet<(u16, u64, Vec<u8>)> = HashSet::new();
    let mut of_object: HashMap<u64, Vec<usize>> = HashMap::new();
    for record in records {
        if record.kind == Kind::Ends {
            for at in of_object.remove(&record.key).into_iter().flatten() {
                if let Some(gone) = kept[at].take() {
                    made.remove(&(gone.kind, gone.op, gone.key));
                    set.remove(&(gone.op, gone.key, gone.bytes));
                }
            }
            continue;
        }
        if record.kind == Kind::Gone {
            for kind in Kind::of(record.op).into_iter().flat_map(Kind::gone_with) {
                if let Some(at) = made.remove(&(kind, 0, record.key)) {
                    kept[at] = None;
                }
            }
            continue;
        }
        if record.kind == Kind::Sets {
            // A repeated setting takes effect at its last position.
            let content = (record.op, record.key, record.bytes.clone());
            if !set.insert(content) {
                let same = |at: &&usize| kept[**at].as_ref() == Some(&record);
                let places = of_object.get_mut(&record.key);
                let places = places.map(|places| &*places);
                let earlier = places
                    .and_then(|places| places.iter().rev().find(same))
                    .copied();
                if let Some(earlier) = earlier {
                    kept[earlier] = None;
                }
            }
        } else {
            let name = (record.kind, record.op, record.key);
            if let Some(earlier) = made.insert(name, kept.len()) {
                kept[earlier] = None;
            }
        }
        if record.kind.end() == End::WithObject {
            of_object.entry(record.key).or_default().push(kept.len());
        }
        kept.push(Some(record));
    }
    let mut records: Vec<Record> = kept.into_iter().flatten().collect();
    forget_functions(&mut records);
    records
}

/// Drops functions whose images are gone, with their settings.
fn forget_functions(records: &mut Vec<Record>) {
    let of = |op: Op| move |record: &&Record| record.kind == Kind::Makes && record.op == op as u16;
    let images = records.iter().filter(of(Op::ImageLoad));
    let images: HashSet<u64> = images.map(|record| record.key).collect();
    let parent = |record: &Record| {
        let message: Vec<u8> = record.state()?;
        message.first_chunk().copied().map(u64::from_le_bytes)
    };
    let functions = records.iter().filter(of(Op::GetFunction));
    let gone =
        functions.filter(|function| parent(function).is_none_or(|image| !images.contains(&image)));
    let gone: HashSet<u64> = gone.map(|record| record.key).collect();
    records.retain(|record| {
        !matches!(record.kind, Kind::Makes | Kind::Sets) || !gone.contains(&record.key)
    });
}

const _: () = assert!(offset_of!(GetFunction, parent) == 0);

const _: () = assert!(offset_of!(Header, streams) % 8 == 0);

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: Kind, op: u16, key: u64, bytes: &[u8]) -> Record {
        Record {
            kind,
            op,
            key,
            bytes: bytes.to_vec(),
        }
    }

    fn described(records: &[Record]) -> Description {
        let description = Description::new(wire::OWN).expect("a description");
        for record in records {
            assert!(description.append(record));
        }
        description
    }

    #[test]
    fn a_request_that_was_answered_is_known_by_the_number_of_answers() {
        let description = Description::new(wire::OWN).expect("a description");
        assert_eq!(description.answered(0, 0), None);
        description.set_answering(64, 8);
        assert_eq!(description.answered(32, 7), None, "not yet");
        assert_eq!(description.answered(32, 8), Some(64));
        assert_eq!(description.answered(64, 8), None, "taken");
    }

    #[test]
    fn a_change_that_was_not_completed_is_undone() {
        let description = described(&[record(Kind::Makes, 7, 1, b"stream")]);
        assert!(description.begun(0).is_none());
        description.begin_change(64);
        let begun = description.begun(32).expect("a message");
        assert!(!description.has_changed(&begun));
        assert!(description.append(&record(Kind::Makes, 7, 2, b"stream")));
        assert!(description.append(&record(Kind::Ends, 0, 1, b"")));
        description.set_described(64);
        assert!(description.has_changed(&begun));
        assert!(description.undo(&begun, 32));
        assert_eq!(
            description.records(),
            [record(Kind::Makes, 7, 1, b"stream")]
        );
        assert_eq!(description.described(), 32);
        assert!(description.begun(64).is_none(), "it was taken");
        description.compact().expect("room");
        assert!(!description.undo(&begun, 32));
        description.cancel_change();
        assert!(description.begun(32).is_none());
    }

    #[test]
    fn bonds_behind_the_point_of_rest_do_not_count_there() {
        let description = Description::new(wire::OWN).expect("a description");
        let (images, other) = (Bonds::IMAGES, Bonds::ARRAYS);
        description.set_bonds(images, 64);
        description.set_bonds(images.with(Bonds::TIMES, true).with(other, true), 96);
        assert_eq!(description.bonds_at(64), other);
        assert_eq!(description.bonds_at(65), description.bonds());
        description.set_bonds(other, 128);
        description.set_bonds(images, 160);
        assert_eq!(description.bonds_at(160), Bonds::default());
    }

    #[test]
    fn what_was_ended_or_replaced_does_not_count() {
        let description = described(&[
            record(Kind::Client, 0, 0, b"who"),
            record(Kind::Makes, 7, 1, b"stream"),
            record(Kind::Sets, 502, 1, b"a"),
            record(Kind::Sets, 502, 1, b"b"),
            record(Kind::Sets, 502, 1, b"a"),
            record(Kind::Makes, 64, 0, b"first"),
            record(Kind::Makes, 64, 0, b"second"),
            record(Kind::Makes, 9, 2, b"event"),
            record(Kind::Sets, 502, 2, b"of the event"),
            record(Kind::Memory, 0, 2, b"at an address like a handle"),
            record(Kind::Host, 0, 3, b"pinned"),
            record(Kind::Gone, Kind::Host as u16, 3, b""),
            record(Kind::Ends, 0, 2, b""),
        ]);
        let expected = [
            record(Kind::Client, 0, 0, b"who"),
            record(Kind::Makes, 7, 1, b"stream"),
            record(Kind::Sets, 502, 1, b"b"),
            record(Kind::Sets, 502, 1, b"a"),
            record(Kind::Makes, 64, 0, b"second"),
            record(Kind::Memory, 0, 2, b"at an address like a handle"),
        ];
        assert_eq!(description.records(), expected);
        // Another process reads the same records.
        let file = description.file().try_clone_to_owned().expect("its file");
        let again = Description::open(file).expect("opened again");
        assert!(again.is_readable());
        assert_eq!(again.records(), expected);
        description.compact().expect("room");
        assert_eq!(again.records(), expected);
        assert!(again.append(&record(Kind::Gone, Kind::Memory as u16, 2, b"")));
        assert_eq!(description.records(), expected[..5]);
        description.set_described(77);
        assert_eq!(again.described(), 77);
    }

    #[test]
    fn a_full_area_is_compacted_and_one_that_stays_full_takes_no_more() {
        let description = described(&[record(Kind::Client, 0, 0, b"who")]);
        let big = vec![1; AREA / 8];
        for round in 0..20u8 {
            let mut bytes = big.clone();
            bytes[0] = round;
            assert!(description.append(&record(Kind::Makes, 64, 5, &bytes)));
        }
        let records = description.records();
        assert_eq!(records.len(), 2);
        assert_eq!(
            (records[0].bytes.as_slice(), records[1].bytes[0]),
            (&b"who"[..], 19)
        );
        let more = |key: u64| description.append(&record(Kind::Makes, 64, key, &big));
        let taken = (100..120).take_while(|key| more(*key)).count();
        assert_eq!(taken, 5, "of six eighths one is taken");
        assert_eq!(description.records().len(), 7);
        for key in 102..105 {
            assert!(description.append(&record(Kind::Ends, 0, key, b"")));
        }
        assert!(more(200), "there is room again");
    }

    #[test]
    fn a_session_is_at_rest_when_all_that_was_submitted_is_covered_by_a_reached_flag() {
        let description = Description::new(wire::OWN).expect("a description");
        let reached = |slot: u32, value: u32| (slot, value) == (3, 8);
        assert!(description.is_at_rest(reached));
        description.begin(1);
        assert!(!description.is_at_rest(reached));
        description.cover(1, 3, 9);
        assert!(
            !description.is_at_rest(reached),
            "the flag is not there yet"
        );
        description.cover(1, 3, 8);
        assert!(description.is_at_rest(reached));
        description.begin(1);
        assert!(!description.is_at_rest(reached), "behind the mark");
        description.settle(1);
        assert!(description.is_at_rest(|_, _| false));
        description.set_deferred(true);
        assert!(!description.is_at_rest(reached));
        description.set_deferred(false);
        description.set_retired(true);
        assert!(!description.is_at_rest(reached));
        description.reset();
        assert!(description.is_at_rest(|_, _| false));
        // A stream beyond the table binds the session and notes nothing.
        description.begin(STREAMS);
        assert!(description.is_at_rest(|_, _| false));
    }

    #[test]
    fn functions_go_with_their_images() {
        let (load, find, set) = (
            Op::ImageLoad as u16,
            Op::GetFunction as u16,
            Op::SetFunctionAttribute as u16,
        );
        let of = |image: u64| image.to_le_bytes().to_vec();
        let description = described(&[
            record(Kind::Makes, load, 1, b"one"),
            record(Kind::Makes, load, 2, b"other"),
            Record::of(Kind::Makes, find, 3, &of(1)),
            record(Kind::Sets, set, 3, b"an attribute"),
            Record::of(Kind::Makes, find, 4, &of(2)),
            record(Kind::Ends, 0, 1, b""),
        ]);
        let expected = [
            record(Kind::Makes, load, 2, b"other"),
            Record::of(Kind::Makes, find, 4, &of(2)),
        ];
        assert_eq!(description.records(), expected);
    }

    #[test]
    fn a_state_of_another_version_is_not_read() {
        let mut record = Record::of(Kind::Limit, 0, 1, &77u64);
        assert_eq!(record.state::<u64>(), Some(77));
        record.bytes[0] += 1;
        assert_eq!(record.state::<u64>(), None);
        record.bytes.clear();
        assert_eq!(record.state::<u64>(), None);
    }

    #[test]
    fn attempts_with_the_same_message_are_counted() {
        let description = Description::new(wire::OWN).expect("a description");
        assert_eq!(
            [0, 0, 64, 64, 64, 0].map(|at| description.note_attempt(at)),
            [1, 2, 1, 2, 3, 1]
        );
    }

    #[test]
    fn what_is_not_whole_is_not_read() {
        let whole = record(Kind::Makes, 7, 1, b"stream");
        let description = described(&[whole.clone(), whole.clone()]);
        let (second, end) = description.end();
        description.publish(second, end - 8);
        assert_eq!(description.records(), [whole]);
    }
}
