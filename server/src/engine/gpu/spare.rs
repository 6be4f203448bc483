//! Registered memory without a user, kept for the next session.

use crate::engine::base::memory_file::MemoryFile;
use crate::engine::gpu::client_segment::Segment;
use crate::engine::gpu::host::HostBlock;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of objects waiting to be destroyed; beyond it, clients get no further registered memory.
const MOST_WAITING: usize = 16 << 10;
/// Maximum bytes of registered memory kept here; beyond it, clients get no further registered memory.
const MOST_SPARE: u64 = 4 << 30;

/// Unused registered memory: reused by new sessions, or unregistered at a quiescent point.
///
/// It is reused only for clients of the same user, only when it is open or mapped in no other process, since its
/// former user cannot be made to release it, and only if it has lost no pages ([`MemoryFile::pass_on`]).
#[derive(Debug, Default)]
pub struct Spare {
    kept: Mutex<Kept>,
    /// Number of objects waiting for the undertaker, those in graves included.
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Kept {
    blocks: Vec<(u32, HostBlock)>,
    segments: Vec<(u32, Segment)>,
}

impl Kept {
    fn len(&self) -> usize {
        self.blocks.len() + self.segments.len()
    }
}

fn take_unshared<T>(
    kept: &mut Vec<(u32, T)>,
    uid: u32,
    fits: impl Fn(&T) -> bool,
    file: impl Fn(&mut T) -> &mut MemoryFile,
) -> Option<T> {
    let found = kept
        .iter_mut()
        .position(|(of, one)| *of == uid && fits(one) && file(one).pass_on())?;
    Some(kept.swap_remove(found).1)
}

impl Spare {
    /// A block of exactly `len` bytes for a client of this user, all zero.
    pub fn take_block(&self, uid: u32, len: u64) -> Option<HostBlock> {
        let mut block = take_unshared(
            &mut self.kept.lock().blocks,
            uid,
            |block| block.len() == len,
            |block| &mut block.file,
        )?;
        block.registration.clear();
        block.pin.set_idle(false);
        Some(block)
    }

    /// A segment for a client of this user, all zero.
    pub fn take_segment(&self, uid: u32) -> Option<Segment> {
        let mut segment = take_unshared(
            &mut self.kept.lock().segments,
            uid,
            |_| true,
            |segment| &mut segment.file,
        )?;
        segment.registration.clear();
        segment.pin.set_idle(false);
        Some(segment)
    }

    /// Adds a block.
    pub fn put_block(&self, uid: u32, mut block: HostBlock) {
        block.pin.set_idle(true);
        self.kept.lock().blocks.push((uid, block));
    }
    /// Adds a segment.
    pub fn put_segment(&self, uid: u32, mut segment: Segment) {
        segment.pin.set_idle(true);
        self.kept.lock().segments.push((uid, segment));
    }
    /// Number of blocks and segments.
    pub fn len(&self) -> usize {
        self.kept.lock().len()
    }
    /// Sets the number of objects waiting to be destroyed, those kept here included.
    pub fn note_waiting(&self, waiting: usize) {
        self.waiting.store(waiting, Ordering::Relaxed);
    }
    fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
    fn bytes(&self) -> u64 {
        let blocks = &self.kept.lock().blocks;
        blocks.iter().map(|(_, block)| block.len()).sum()
    }

    /// Removes one object that is to be unregistered, blocks first.
    pub fn take_any(&self) -> Option<Unused> {
        let mut kept = self.kept.lock();
        let block = kept.blocks.pop().map(|(_, block)| Unused::Block(block));
        block.or_else(|| {
            kept.segments
                .pop()
                .map(|(_, segment)| Unused::Segment(segment))
        })
    }

    /// Removes all objects.
    pub fn take_all(&self) -> impl Sized {
        std::mem::take(&mut *self.kept.lock())
    }

    /// Whether the limit of memory waiting to be unregistered is reached.
    pub fn is_full(&self) -> bool {
        self.waiting() >= MOST_WAITING || self.bytes() >= MOST_SPARE
    }
}

/// Registered memory without a user.
pub enum Unused {
    /// Pinned memory.
    Block(HostBlock),
    /// A session's segment.
    Segment(Segment),
}
