//! A session's segment as the benchmark's two sides map it, and how they wait.

use mpsshim_proto::segment::{ANSWER, Header, RingMemory, SEGMENT_LEN};
use mpsshim_proto::shm::{Doorbell, Mapping, sealed_memfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The shared segment and the server's doorbell.
#[derive(Debug)]
pub struct Segment {
    memory: OwnedFd,
    mapping: Mapping,
    /// Rung when there is a message for a server that sleeps.
    pub bell: Doorbell,
}

impl Segment {
    /// A fresh segment.
    ///
    /// # Errors
    /// No memory or no descriptors.
    pub fn new() -> io::Result<Segment> {
        Segment::open(
            sealed_memfd(c"transport", SEGMENT_LEN as u64)?,
            Doorbell::new()?,
        )
    }
    /// The segment in a memory file.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    pub fn open(memory: OwnedFd, bell: Doorbell) -> io::Result<Segment> {
        let mapping = Mapping::new(memory.as_fd(), SEGMENT_LEN)?;
        Ok(Segment {
            memory,
            mapping,
            bell,
        })
    }
    /// The memory file, for passing on.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
    /// The first page.
    pub fn header(&self) -> &Header {
        // SAFETY: the mapping has SEGMENT_LEN bytes and lives as long as `self`; Header is all atomics, valid for any
        // bytes, and page aligned.
        unsafe { &*self.mapping.base().cast::<Header>() }
    }
    /// The ring, valid while the segment is.
    pub fn ring(&self) -> RingMemory {
        // SAFETY: SEGMENT_LEN bytes, mapped for both; every user in this program keeps the segment for as long.
        unsafe { RingMemory::new(self.mapping.base()) }
    }
    /// The word of the answer's payload that the benchmark uses. Server, before `answers`.
    pub fn answer(&self) -> &AtomicU64 {
        // SAFETY: inside the mapping and aligned; both sides use it as an atomic.
        unsafe { &*self.mapping.base().add(ANSWER).cast::<AtomicU64>() }
    }
    /// How often the server has answered; what it wrote before is visible then.
    pub fn answers(&self) -> u32 {
        self.header().answers.0.load(Ordering::Acquire)
    }
}

/// Waits without sleeping until something holds. Yields now and then: there may be fewer CPUs than sides.
pub fn spin(mut done: impl FnMut() -> bool) {
    let mut turns = 0u32;
    while !done() {
        turns = turns.wrapping_add(1);
        if turns.is_multiple_of(1024) {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

/// Gives the other side, which has said that it will sleep, the time to do so.
pub fn pause() {
    let began = Instant::now();
    spin(|| began.elapsed() > Duration::from_micros(50));
}

/// Nanoseconds of a clock that all processes share (`CLOCK_MONOTONIC`).
pub fn now() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
