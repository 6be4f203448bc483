//! The shared segment of a session: one sealed memfd, mapped by the client and the server.
//!
//! | offset | bytes | content | written by |
//! |---|---|---|---|
//! | 0 | 4 KiB | [`Header`] | as each field says |
//! | 4 KiB | 64 KiB | answer payload | server |
//! | 68 KiB | 2 MiB | command ring | client |
//! | [`EXPRESS`] | 16 KiB | express ring | client |
//! | [`REGISTERED`] | 64 KiB | flags, a 64-byte line for each stream: [`flag_offset`] | the GPU and the client |
//! | [`STAGING`] | 960 KiB | staging of copies | client and GPU |
//!
//! From [`REGISTERED`] on the server registers the memory with the driver (`cuMemHostRegister`).
//!
//! Each atomic names its partner. Everything the server reads here may be changed by a hostile client at any
//! time: it bounds every value before it uses it.

use crate::ring::Memory;
use crate::shm::{self, Mapping};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Bytes of the header.
pub const HEADER_LEN: usize = 4 << 10;
/// Where the answer's payload lies.
pub const ANSWER: usize = HEADER_LEN;
/// Bytes an answer may have.
pub const ANSWER_LEN: usize = 64 << 10;
/// Where the ring lies.
pub const RING: usize = ANSWER + ANSWER_LEN;
/// Bytes of the ring.
pub const RING_LEN: usize = 2 << 20;
/// Where the express ring lies: copies of pages of managed memory, and marks behind them, which pass the command ring.
pub const EXPRESS: usize = RING + RING_LEN;
/// Bytes of the express ring.
pub const EXPRESS_LEN: usize = 16 << 10;
/// Where the part that the GPU reaches begins.
pub const REGISTERED: usize = EXPRESS + EXPRESS_LEN;
/// Bytes between two flags: a cache line each, so that waiters do not contend for one.
pub const FLAG_STRIDE: usize = 64;
/// Completion flags of a session.
pub const FLAGS: usize = 1024;
/// `slot + ARRIVED`: the flag that tells that a stream has reached a host function. The GPU writes it.
pub const ARRIVED: u32 = FLAGS as u32;
/// `slot + RETURNED`: the flag that tells that the function has returned. The client writes it, then rings the doorbell
/// as after a message.
pub const RETURNED: u32 = 2 * FLAGS as u32;
/// Where staging begins.
pub const STAGING: usize = REGISTERED + FLAGS * FLAG_STRIDE;
/// Bytes of staging.
pub const STAGING_LEN: usize = 960 << 10;
/// Bytes the GPU reaches.
pub const REGISTERED_LEN: usize = FLAGS * FLAG_STRIDE + STAGING_LEN;
/// Bytes of the whole segment.
pub const SEGMENT_LEN: usize = REGISTERED + REGISTERED_LEN;
/// Threads of one client that can sleep at a time; further ones go on yielding.
pub const SLEEPERS: usize = 64;

const _: () = assert!(std::mem::size_of::<Header>() <= HEADER_LEN);
const _: () = assert!(
    RING_LEN.is_power_of_two()
        && EXPRESS_LEN.is_power_of_two()
        && REGISTERED.is_multiple_of(4096)
        && SEGMENT_LEN.is_multiple_of(4096)
);

/// A cache line of its own.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct Line<T>(pub T);

/// A thread of the client that sleeps until a flag reaches a value.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Sleeper {
    /// Flag (see [`flag_offset`]). Client, before `state`.
    pub slot: AtomicU32,
    /// Value awaited. Client, before `state`.
    pub value: AtomicU32,
    /// Futex word: [`sleeper::FREE`], [`sleeper::SLEEPS`] (client, release), [`sleeper::WOKEN`] (server's watcher,
    /// release, then a wake).
    pub state: AtomicU32,
}

/// Values of [`Sleeper::state`].
pub mod sleeper {
    /// Not in use.
    pub const FREE: u32 = 0;
    /// Claimed by a thread that fills it.
    pub const CLAIMED: u32 = 1;
    /// A thread sleeps on it.
    pub const SLEEPS: u32 = 2;
    /// Its thread was woken.
    pub const WOKEN: u32 = 3;
}

/// Values of [`Header::state`].
pub mod state {
    /// Calls are served.
    pub const LIVE: u32 = 0;
    /// No call is served any more; [`super::Header::error`] holds the status.
    pub const ENDED: u32 = 1;
}

/// Faults of the client's threads in managed memory. The client counts them; the server only shows the numbers to
/// operators.
#[repr(C)]
#[derive(Debug, Default)]
pub struct FaultCounts {
    /// Number of faults. Client: adds.
    pub faults: AtomicU64,
    /// Nanoseconds that threads waited for them. Client: adds.
    pub waited_ns: AtomicU64,
}

/// How far a client has waited for its work, if its kernels may run again ([`crate::message::REPLAYS`]). Positions in the
/// ring, bytes since the session began.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Progress {
    /// All commands before it were complete when the client had waited for them.
    pub rested: AtomicU64,
    /// Here the client last saw a part of its commands complete while others were in flight.
    pub seen: AtomicU64,
}

/// The first page.
#[repr(C)]
#[derive(Debug)]
pub struct Header {
    /// Bytes the client has put into the ring. Client: `publish_head`; server: `head`.
    pub head: Line<AtomicU64>,
    /// Bytes the server has taken. Server: `publish_tail`; client: `tail`.
    pub tail: Line<AtomicU64>,
    /// As `head`, of the express ring.
    pub express_head: Line<AtomicU64>,
    /// As `tail`, of the express ring.
    pub express_tail: Line<AtomicU64>,
    /// 1 while the server's dispatch thread sleeps and wants the doorbell. Server: stores 1, full fence, looks at
    /// `head` again; client: publishes `head`, full fence, reads it.
    pub server_sleeps: Line<AtomicU32>,
    /// Counts answers. Server: release after the payload; client: acquire before it.
    pub answers: Line<AtomicU32>,
    /// Status of the answer (`CUresult`). Server, before `answers`.
    pub answer_status: AtomicU32,
    /// Bytes of its payload. Server, before `answers`.
    pub answer_len: AtomicU32,
    /// 1 while a client thread sleeps on `answers` as a futex. Client: stores 1, full fence, reads `answers`;
    /// server: publishes `answers`, full fence, reads it.
    pub answer_sleeps: Line<AtomicU32>,
    /// [`state`]. Server: release after `error`; client: acquire.
    pub state: Line<AtomicU32>,
    /// Status of every further call once `state` is not [`state::LIVE`]. Server.
    pub error: AtomicU32,
    /// First error of an asynchronous command since the client took the last one (0: none). Server: compare-exchange
    /// from 0; client: swap with 0.
    pub posted_error: AtomicU32,
    /// 1 while threads outnumber CPUs: waiting clients should yield at once. Server, a hint.
    pub crowded: AtomicU32,
    /// Number of `sleepers` in use. Client: adds 1, full fence, rings the doorbell; a dispatch thread that then reads a
    /// number other than 0 wakes the server's watcher.
    pub sleeping: Line<AtomicU32>,
    /// The sleeping threads.
    pub sleepers: [Sleeper; SLEEPERS],
    /// Faults in managed memory. Client: adds, relaxed; server: reads, for display only.
    pub faults: Line<FaultCounts>,
    /// Progress that the client has seen. Client: release; server: acquire.
    pub replay: Line<Progress>,
}

/// The memory of a ring inside a mapped segment.
#[derive(Clone, Copy, Debug)]
pub struct RingMemory {
    base: *mut u8,
    /// The express ring instead of the command ring.
    express: bool,
}

// SAFETY: the pointer is to a shared mapping that both processes may touch at any time; all access goes through
// atomics or raw copies of plain bytes whose content is validated after the copy.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    /// The command ring of the segment mapped at `base`.
    ///
    /// # Safety
    /// `base` must be a readable and writable mapping of [`SEGMENT_LEN`] bytes that outlives this value.
    pub unsafe fn new(base: *mut u8) -> Self {
        RingMemory {
            base,
            express: false,
        }
    }
    /// The express ring of the segment mapped at `base`.
    ///
    /// # Safety
    /// As [`RingMemory::new`].
    pub unsafe fn express(base: *mut u8) -> Self {
        RingMemory {
            base,
            express: true,
        }
    }
    fn header(&self) -> &Header {
        // SAFETY: `new` vouches for the mapping; Header is all atomics, valid for any bytes, and page aligned.
        unsafe { &*self.base.cast::<Header>() }
    }
    fn cursors(&self) -> (&AtomicU64, &AtomicU64) {
        let header = self.header();
        match self.express {
            false => (&header.head.0, &header.tail.0),
            true => (&header.express_head.0, &header.express_tail.0),
        }
    }
    /// Offset in the segment, and bytes.
    const fn place(&self) -> (usize, usize) {
        match self.express {
            false => (RING, RING_LEN),
            true => (EXPRESS, EXPRESS_LEN),
        }
    }
    /// Address of a byte of the ring, for payloads that are handed to the driver in place.
    pub fn address(&self, offset: u64) -> *mut u8 {
        let (first, len) = self.place();
        assert!(offset < len as u64);
        // SAFETY: inside the mapping, just checked.
        unsafe { self.base.add(first + offset as usize) }
    }
}

impl Memory for RingMemory {
    #[inline]
    fn capacity(&self) -> u64 {
        self.place().1 as u64
    }
    #[inline]
    fn head(&self) -> u64 {
        self.cursors().0.load(Ordering::Acquire)
    }
    #[inline]
    fn publish_head(&self, head: u64) {
        self.cursors().0.store(head, Ordering::Release);
        fence(Ordering::SeqCst);
    }
    #[inline]
    fn tail(&self) -> u64 {
        self.cursors().1.load(Ordering::Acquire)
    }
    #[inline]
    fn publish_tail(&self, tail: u64) {
        self.cursors().1.store(tail, Ordering::Release);
    }
    #[inline]
    fn write(&self, offset: u64, bytes: &[u8]) {
        let (first, len) = self.place();
        assert!(offset as usize + bytes.len() <= len);
        // SAFETY: the range is inside the ring (just checked); the consumer reads it only after `publish_head`.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.base.add(first + offset as usize),
                bytes.len(),
            )
        }
    }
    #[inline]
    fn read(&self, offset: u64, bytes: &mut [u8]) {
        let (first, len) = self.place();
        assert!(offset as usize + bytes.len() <= len);
        // SAFETY: the range is inside the ring (just checked). A hostile producer may write meanwhile: the bytes are
        // then arbitrary, which every caller's validation of its copy allows for.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.base.add(first + offset as usize),
                bytes.as_mut_ptr(),
                bytes.len(),
            )
        }
    }
}

/// Where a flag lies in the segment: the completion flag of a slot, or one of its two for host functions, which
/// share the slot's line. `None`: there is no such flag.
#[inline]
pub const fn flag_offset(flag: u32) -> Option<usize> {
    let (slot, word) = (flag as usize % FLAGS, flag as usize / FLAGS);
    if word < 3 {
        Some(REGISTERED + slot * FLAG_STRIDE + word * 4)
    } else {
        None
    }
}

/// Ends a session from the client's point of view, through the header at the beginning of its segment: every further
/// call returns `status`, a `CUresult`, and sleeping threads are woken.
///
/// # Panics
/// When the mapping is shorter than a header.
pub fn end(segment: &Mapping, status: u32) {
    assert!(segment.len() >= size_of::<Header>());
    // SAFETY: the mapping has as many bytes and lives through the call; Header is all atomics.
    let header = unsafe { &*segment.base().cast::<Header>() };
    header.error.store(status, Ordering::Relaxed);
    header.state.0.store(state::ENDED, Ordering::Release);
    fence(Ordering::SeqCst);
    shm::futex_wake(&header.answers.0);
    for sleeper in &header.sleepers {
        if sleeper.state.load(Ordering::Acquire) == sleeper::SLEEPS {
            sleeper.state.store(sleeper::WOKEN, Ordering::Release);
            shm::futex_wake(&sleeper.state);
        }
    }
}

/// The current value of a flag; 0 if there is no such flag.
///
/// # Panics
/// When the mapping is shorter than a segment.
pub fn flag_of(segment: &Mapping, slot: u32) -> u32 {
    assert!(segment.len() >= SEGMENT_LEN);
    let Some(offset) = flag_offset(slot) else {
        return 0;
    };
    // SAFETY: inside the mapping, aligned to a word.
    let word = unsafe { &*segment.base().add(offset).cast::<AtomicU32>() };
    word.load(Ordering::Acquire)
}

/// Whether a flag that counts up, modulo 2^32, has reached a value.
#[inline]
pub fn reached(flag: u32, value: u32) -> bool {
    flag.wrapping_sub(value) as i32 >= 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::{Consumer, Producer};
    use std::os::fd::AsFd;
    use std::panic::catch_unwind;

    #[test]
    fn flags_of_a_slot_share_its_line() {
        let line = flag_offset(7).unwrap();
        assert!(line.is_multiple_of(FLAG_STRIDE));
        assert_eq!(flag_offset(7 + ARRIVED), Some(line + 4));
        assert_eq!(flag_offset(7 + RETURNED), Some(line + 8));
        assert_eq!(flag_offset(7 + RETURNED + FLAGS as u32), None);
        assert_eq!(flag_offset(u32::MAX), None);
    }

    #[test]
    fn flags_wrap() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(2, u32::MAX) && !reached(u32::MAX, 2));
    }

    #[test]
    fn the_parts_of_the_segment_lie_one_behind_the_other() {
        const KIB: usize = 1 << 10;
        assert_eq!((ANSWER, ANSWER_LEN), (4 * KIB, 64 * KIB));
        assert_eq!((RING, RING_LEN), (68 * KIB, 2048 * KIB));
        assert_eq!((EXPRESS, EXPRESS_LEN), (2116 * KIB, 16 * KIB));
        assert_eq!(REGISTERED, 2132 * KIB);
        assert_eq!((STAGING, STAGING_LEN), (2196 * KIB, 960 * KIB));
        assert_eq!(REGISTERED_LEN, 1024 * KIB);
        assert_eq!(SEGMENT_LEN, 3156 * KIB);
        // The flags fill the space up to the staging area.
        let last = flag_offset(RETURNED + FLAGS as u32 - 1).unwrap();
        assert_eq!(flag_offset(0), Some(REGISTERED));
        assert_eq!(last + FLAG_STRIDE - 8, STAGING);
    }

    /// A segment of this process alone, and the ring in it.
    fn segment() -> (Mapping, RingMemory) {
        let file = shm::sealed_memfd(c"test", SEGMENT_LEN as u64).unwrap();
        let mapping = Mapping::new(file.as_fd(), SEGMENT_LEN).unwrap();
        // SAFETY: the mapping is as long as a segment; each test keeps it as long as the ring.
        let memory = unsafe { RingMemory::new(mapping.base()) };
        (mapping, memory)
    }

    #[test]
    fn both_sides_find_the_ring_in_the_segment() {
        let (mapping, memory) = segment();
        assert_eq!(memory.capacity(), RING_LEN as u64);
        let mut producer = Producer::new(memory);
        let mut consumer = Consumer::new(memory);
        // More than once around.
        let payload = vec![7; 100_000];
        for token in 0..50 {
            let room = producer.reserve(payload.len()).unwrap();
            producer.fill(room, 0, &payload);
            producer.publish(room, 2, 0, token);
            assert_eq!(memory.head(), producer.position());
            let message = consumer.peek().unwrap().unwrap();
            assert_eq!(message.token, token);
            let mut copy = vec![0; payload.len()];
            assert!(consumer.copy_out(&message, 0, &mut copy));
            assert_eq!(copy, payload);
            let address = memory.address(message.offset) as usize;
            let base = mapping.base() as usize;
            assert_eq!(address, base + RING + message.offset as usize);
            consumer.consume(&message);
            assert_eq!(memory.tail(), memory.head());
        }
    }

    #[test]
    fn the_cursors_are_in_the_header_and_messages_in_the_ring() {
        let (mapping, memory) = segment();
        memory.publish_head(0x1234);
        memory.publish_tail(0x5678);
        memory.write(0, b"first");
        memory.write(RING_LEN as u64 - 4, b"last");
        let mut read = [0; 4];
        memory.read(RING_LEN as u64 - 4, &mut read);
        assert_eq!(&read, b"last");
        // SAFETY: inside the mapping, which nothing else uses.
        let bytes = unsafe { std::slice::from_raw_parts(mapping.base(), SEGMENT_LEN) };
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(word(std::mem::offset_of!(Header, head)), 0x1234);
        assert_eq!(word(std::mem::offset_of!(Header, tail)), 0x5678);
        assert_eq!(&bytes[RING..RING + 5], b"first");
        assert_eq!(&bytes[EXPRESS - 4..EXPRESS], b"last");
        assert!(bytes[EXPRESS..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn the_express_ring_is_apart_from_the_command_ring() {
        let (mapping, memory) = segment();
        // SAFETY: the mapping is kept as long as the ring.
        let express = unsafe { RingMemory::express(mapping.base()) };
        let (mut producer, mut consumer) = (Producer::new(express), Consumer::new(express));
        for token in 0..1000 {
            let room = producer.reserve(48).unwrap();
            producer.fill(room, 0, &[token as u8; 48]);
            producer.publish(room, 5, 0, token);
            assert!(consumer.has_message() && !Consumer::new(memory).has_message());
            let message = consumer.peek().unwrap().unwrap();
            let mut copy = [0; 48];
            assert!(consumer.copy_out(&message, 0, &mut copy));
            assert_eq!((message.token, copy), (token, [token as u8; 48]));
            consumer.consume(&message);
        }
        assert_eq!((memory.head(), memory.tail()), (0, 0));
        // SAFETY: inside the mapping, which nothing else uses.
        let bytes = unsafe { std::slice::from_raw_parts(mapping.base(), SEGMENT_LEN) };
        assert!(bytes[RING..EXPRESS].iter().all(|byte| *byte == 0));
        assert!(bytes[REGISTERED..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn nothing_is_read_or_written_past_the_end_of_the_ring() {
        let (_mapping, memory) = segment();
        let end = RING_LEN as u64;
        let writes = || memory.write(end - 1, &[1; 2]);
        assert!(catch_unwind(writes).is_err());
        let reads = || memory.read(end - 1, &mut [0; 2]);
        assert!(catch_unwind(reads).is_err());
        assert!(catch_unwind(|| memory.address(end)).is_err());
        memory.write(end, &[]);
        memory.read(end, &mut []);
    }
}
