//! The journal of a session: the commands since its client last waited, in memory that outlives the server, for clients
//! whose kernels may run again from there (docs/design/0022-replay.md).
//!
//! It is an area of the description ([`crate::engine::base::description`]). A command is written down before it is executed
//! or deferred, with its position in the ring. Another server executes the commands again that the client had not waited
//! for, if they have the same effect then as at first; it executes the rest of the ring as always.

use mpsshim_proto::message::Op;
use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Bytes of the area; only written pages take memory.
pub const LEN: usize = 4 << 20;
/// Bytes of an entry before those of its message.
const ENTRY: usize = 24;
/// Most servers that execute the same commands again one after the other: the commands may be the cause of their end.
const MOST_ATTEMPTS: u32 = 3;

/// State of a journal, beside the area.
#[repr(C)]
#[derive(Debug)]
pub struct Head {
    /// 1: it is kept.
    on: AtomicU32,
    /// 1: another server is to execute the commands again, and has not begun to.
    owed: AtomicU32,
    /// Bytes in use.
    end: AtomicU64,
    /// Position behind the last command that was noted.
    noted: AtomicU64,
    /// Position behind the last command that cannot be executed again.
    unfit: AtomicU64,
    /// The client's point of rest before the commands that were last executed again, plus one.
    repeated_from: AtomicU64,
    /// Number of servers in a row that have executed these again.
    attempts: AtomicU32,
    /// Why `unfit` was set: a [`Refusal`] as a number.
    why: AtomicU32,
}

/// Reason why commands cannot be executed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The operation with this number cannot be executed again, or not behind others.
    Operation(u16),
    /// The journal is full.
    Full,
    /// The description has the state behind the commands.
    Saved,
    /// Memory of a pool was given to another stream, or back to the driver.
    Memory,
    /// Managed memory was moved.
    Managed,
}

impl Refusal {
    const FULL: u32 = 1 << 16;
    const SAVED: u32 = 2 << 16;
    const MEMORY: u32 = 3 << 16;
    const MANAGED: u32 = 4 << 16;

    fn number(self) -> u32 {
        match self {
            Refusal::Operation(number) => number.into(),
            Refusal::Full => Refusal::FULL,
            Refusal::Saved => Refusal::SAVED,
            Refusal::Memory => Refusal::MEMORY,
            Refusal::Managed => Refusal::MANAGED,
        }
    }

    fn of(number: u32) -> Refusal {
        match number {
            Refusal::FULL => Refusal::Full,
            Refusal::SAVED => Refusal::Saved,
            Refusal::MEMORY => Refusal::Memory,
            Refusal::MANAGED => Refusal::Managed,
            _ => Refusal::Operation(number as u16),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self {
            Refusal::Operation(number) => {
                return match Op::from_u16(*number) {
                    Some(op) => write!(to, "{op:?} cannot run again"),
                    None => to.write_str("an operation cannot run again"),
                };
            }
            Refusal::Full => "its commands take more room than the journal has",
            Refusal::Saved => "its state was saved behind it",
            Refusal::Memory => "memory of a pool went to another stream or back to the driver",
            Refusal::Managed => "managed memory was moved",
        };
        to.write_str(why)
    }
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Position in the ring behind it.
    pub position: u64,
    /// Its operation's number.
    pub op: u16,
    /// The token of its header.
    pub token: u64,
    /// The bytes behind its header.
    pub bytes: Vec<u8>,
}

/// How far the commands of a session have come.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    /// See [`mpsshim_proto::segment::Progress::rested`].
    pub rested: u64,
    /// See [`mpsshim_proto::segment::Progress::seen`].
    pub seen: u64,
}

/// A journal. Only the thread that runs the session writes it.
#[derive(Clone, Copy, Debug)]
pub struct Journal<'a> {
    head: &'a Head,
    area: *mut u8,
}

/// Whether a position in the ring lies behind another one.
pub fn is_behind(position: u64, other: u64) -> bool {
    (position.wrapping_sub(other) as i64) > 0
}

impl Entry {
    /// Whether the server has taken it from the ring, up to this position.
    pub fn is_taken(&self, taken: u64) -> bool {
        !is_behind(self.position, taken)
    }
}

impl<'a> Journal<'a> {
    /// A journal in this area.
    ///
    /// # Safety
    /// `area` has [`LEN`] bytes that can be written as long as `head` can be used.
    pub unsafe fn new(head: &'a Head, area: *mut u8) -> Journal<'a> {
        Journal { head, area }
    }

    /// Whether it is kept.
    pub fn is_on(&self) -> bool {
        self.head.on.load(Ordering::Acquire) != 0
    }

    /// Begins it.
    pub fn set_on(&self) {
        self.head.on.store(1, Ordering::Release);
    }

    /// Whether commands are to be executed again and none has been yet.
    pub fn is_owed(&self) -> bool {
        self.head.owed.load(Ordering::Acquire) != 0
    }

    /// Sets whether commands are to be executed again.
    pub fn set_owed(&self, owed: bool) {
        self.head.owed.store(owed.into(), Ordering::Release);
    }

    /// Whether the command that ends at this position was not noted yet.
    pub fn is_new(&self, position: u64) -> bool {
        is_behind(position, self.head.noted.load(Ordering::Relaxed))
    }

    /// Whether a command behind this position was noted.
    pub fn is_noted_behind(&self, position: u64) -> bool {
        is_behind(self.noted(), position)
    }

    /// Notes that all commands before this position need not be executed again.
    pub fn trim(&self, rested: u64) {
        let noted = self.head.noted.load(Ordering::Relaxed);
        if !is_behind(noted, rested) && self.head.end.load(Ordering::Relaxed) != 0 {
            self.head.end.store(0, Ordering::Release);
        }
    }

    /// Whether there are no commands that may have to be executed again.
    pub fn is_empty(&self) -> bool {
        self.head.end.load(Ordering::Relaxed) == 0
    }

    /// Notes a command that another server would not execute again, and need not.
    pub fn pass(&self, position: u64) {
        self.head.noted.store(position, Ordering::Release);
    }

    /// Notes a command that cannot be executed again: the session is lost if its server ends before the client has waited.
    pub fn refuse(&self, position: u64, why: Refusal) {
        let unfit = &self.head.unfit;
        if is_behind(position, unfit.load(Ordering::Relaxed)) {
            self.head.why.store(why.number(), Ordering::Relaxed);
            unfit.store(position, Ordering::SeqCst);
        }
        if self.is_new(position) {
            self.pass(position);
        }
    }

    /// Position behind the last command that was noted.
    pub fn noted(&self) -> u64 {
        self.head.noted.load(Ordering::Relaxed)
    }

    /// Writes down a command in one or several parts, each an operation, a token, and a length with a function that fills
    /// in the bytes. Refuses it if there is no room.
    pub fn append<'b>(&self, position: u64, parts: impl Iterator<Item = Part<'b>>) {
        let mut end = self.head.end.load(Ordering::Relaxed) as usize;
        for part in parts {
            let room = end + ENTRY + part.len.next_multiple_of(8);
            if room > LEN {
                return self.refuse(position, Refusal::Full);
            }
            let mut head = [0; ENTRY];
            head[..8].copy_from_slice(&position.to_le_bytes());
            head[8..16].copy_from_slice(&part.token.to_le_bytes());
            head[16..18].copy_from_slice(&part.op.to_le_bytes());
            head[20..].copy_from_slice(&(part.len as u32).to_le_bytes());
            // SAFETY: there is room, and readers stop at the published end.
            let to = unsafe { std::slice::from_raw_parts_mut(self.area.add(end), room - end) };
            to[..ENTRY].copy_from_slice(&head);
            (part.fill)(&mut to[ENTRY..ENTRY + part.len]);
            end = room;
        }
        self.head.end.store(end as u64, Ordering::Release);
        self.pass(position);
    }

    /// The commands that the client has not waited for, the oldest first. The last ones may still be in the ring.
    ///
    /// # Errors
    /// Why the session is lost.
    pub fn pending(&self, reach: Reach) -> Result<Vec<Entry>, Cow<'static, str>> {
        if !self.is_on() {
            return Err("it had work in flight".into());
        }
        if is_behind(self.head.unfit.load(Ordering::SeqCst), reach.rested) {
            let why = Refusal::of(self.head.why.load(Ordering::Relaxed));
            return Err(format!("it had work in flight, and {why}").into());
        }
        if is_behind(reach.seen, reach.rested) {
            return Err("its client has seen a part of its work in flight complete".into());
        }
        let entries = self.entries().ok_or("its journal is damaged")?;
        let entries = entries.into_iter();
        Ok(entries
            .filter(|entry| is_behind(entry.position, reach.rested))
            .collect())
    }

    /// Notes that this server repeats the commands since this point.
    ///
    /// # Errors
    /// Why it must not.
    pub fn note_attempt(&self, rested: u64) -> Result<(), &'static str> {
        let before = self
            .head
            .repeated_from
            .swap(rested.wrapping_add(1), Ordering::Relaxed);
        let attempts = match before == rested.wrapping_add(1) {
            true => self.head.attempts.load(Ordering::Relaxed) + 1,
            false => 1,
        };
        self.head.attempts.store(attempts, Ordering::Relaxed);
        let few = attempts <= MOST_ATTEMPTS;
        few.then_some(())
            .ok_or("servers end while its work runs again")
    }

    /// Number of servers in a row that have executed the same commands again.
    pub fn attempts(&self) -> u32 {
        self.head.attempts.load(Ordering::Relaxed)
    }

    fn entries(&self) -> Option<Vec<Entry>> {
        let end = self.head.end.load(Ordering::Acquire) as usize;
        if end > LEN {
            return None;
        }
        let mut copy = vec![0; end];
        // SAFETY: inside the area, and the copy is ours. If another thread writes meanwhile, the copy is damaged.
        unsafe { std::ptr::copy_nonoverlapping(self.area, copy.as_mut_ptr(), end) };
        let mut bytes = &copy[..];
        let mut entries = Vec::new();
        while !bytes.is_empty() {
            let head: [u8; ENTRY] = *bytes.first_chunk()?;
            let word = |at: usize| head[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            let len = (word(16) >> 32) as usize;
            entries.push(Entry {
                position: word(0),
                token: word(8),
                op: word(16) as u16,
                bytes: bytes.get(ENTRY..ENTRY + len)?.to_vec(),
            });
            bytes = bytes.get(ENTRY + len.next_multiple_of(8)..)?;
        }
        Some(entries)
    }
}

/// A part of a command.
pub struct Part<'a> {
    /// Its operation's number.
    pub op: u16,
    /// The token of its header.
    pub token: u64,
    /// Bytes behind the header.
    pub len: usize,
    /// Writes these.
    pub fill: Fill<'a>,
}

/// Writes the bytes of a part.
pub type Fill<'a> = Box<dyn FnOnce(&mut [u8]) + 'a>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::base::description::Description;

    fn part(bytes: &[u8]) -> impl Iterator<Item = Part<'_>> {
        std::iter::once(Part {
            op: 7,
            token: 9,
            len: bytes.len(),
            fill: Box::new(|to| to.copy_from_slice(bytes)),
        })
    }

    fn entry(position: u64, bytes: &[u8]) -> Entry {
        Entry {
            position,
            op: 7,
            token: 9,
            bytes: bytes.to_vec(),
        }
    }

    fn reach(rested: u64, seen: u64) -> Reach {
        Reach { rested, seen }
    }

    #[test]
    fn commands_between_the_last_wait_and_the_ring_are_pending() {
        let description = Description::new(mpsshim_proto::wire::OWN).expect("a description");
        let journal = description.journal();
        assert_eq!(
            journal.pending(reach(0, 0)),
            Err("it had work in flight".into())
        );
        journal.set_on();
        journal.append(32, part(b"one"));
        journal.append(64, part(b"another"));
        journal.append(96, part(b""));
        let all = [entry(32, b"one"), entry(64, b"another"), entry(96, b"")];
        assert_eq!(journal.pending(reach(0, 0)).as_deref(), Ok(&all[..]));
        assert_eq!(journal.pending(reach(32, 32)).as_deref(), Ok(&all[1..]));
        assert_eq!(journal.pending(reach(96, 0)).as_deref(), Ok(&[][..]));
        assert!(journal.pending(reach(32, 64)).is_err(), "seen");
    }

    #[test]
    fn a_command_is_noted_once_and_forgotten_at_rest() {
        let description = Description::new(mpsshim_proto::wire::OWN).expect("a description");
        let journal = description.journal();
        journal.set_on();
        journal.append(32, part(b"one"));
        assert!(!journal.is_new(32) && journal.is_new(48));
        journal.trim(16);
        assert!(!journal.is_empty());
        journal.trim(32);
        assert!(journal.is_empty());
        journal.append(64, part(b"next"));
        let next = [entry(64, b"next")];
        assert_eq!(journal.pending(reach(32, 0)).as_deref(), Ok(&next[..]));
    }

    #[test]
    fn what_cannot_run_again_is_refused_until_the_client_has_waited() {
        let description = Description::new(mpsshim_proto::wire::OWN).expect("a description");
        let journal = description.journal();
        journal.set_on();
        journal.append(32, part(b"one"));
        journal.refuse(48, Refusal::Full);
        assert!(journal.pending(reach(0, 0)).is_err());
        assert!(journal.pending(reach(48, 0)).is_ok());
    }

    #[test]
    fn a_full_journal_refuses_until_the_client_has_waited() {
        let description = Description::new(mpsshim_proto::wire::OWN).expect("a description");
        let journal = description.journal();
        journal.set_on();
        let long = vec![1; 100 << 10];
        let mut position = 0;
        while !is_behind(journal.head.unfit.load(Ordering::Relaxed), 0) {
            position += 16;
            journal.append(position, part(&long));
        }
        assert_eq!(position, 41 * 16, "4 MiB");
        assert!(journal.pending(reach(0, 0)).is_err());
        journal.trim(position);
        journal.append(position + 16, part(b"one"));
        let one = [entry(position + 16, b"one")];
        let after = reach(position, 0);
        assert_eq!(journal.pending(after).as_deref(), Ok(&one[..]));
    }

    #[test]
    fn the_same_commands_run_again_a_few_times_only() {
        let description = Description::new(mpsshim_proto::wire::OWN).expect("a description");
        let journal = description.journal();
        let tried = [0, 0, 0, 64, 64, 64, 64, 0].map(|at| journal.note_attempt(at).is_ok());
        assert_eq!(tried, [true, true, true, true, true, true, false, true]);
    }
}
