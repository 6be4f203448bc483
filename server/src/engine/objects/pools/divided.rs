//! Device memory that the server divides itself into the allocations of a pool, in the order of streams.
//!
//! A freed range is reused at once by its stream, whose work comes behind, and by others as soon as the work in front of
//! the free is complete.

use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::pool_memory::Chunk;
use mpsshim_api::cuda::*;
use mpsshim_proto::arena::VIRTUAL_UNIT;
use std::collections::{BTreeMap, BTreeSet};

/// Allocations are multiples of this many bytes.
const UNIT: u64 = 512;
/// Largest step in bytes by which a pool grows for smaller allocations. The steps double until then.
const STEP: u64 = 32 << 20;

/// A point in the order of a stream: the stream's number, and how many operations were submitted before.
pub type Point = (u32, u64);

/// Free ranges; neighbours in one chunk are one range.
#[derive(Debug, Default)]
struct Ranges {
    by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
}

impl Ranges {
    fn insert(&mut self, start: u64, len: u64) {
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove(&mut self, start: u64, len: u64) {
        self.by_start.remove(&start);
        self.by_len.remove(&(len, start));
    }

    /// Takes the beginning of the smallest range that is long enough.
    fn take(&mut self, len: u64) -> Option<u64> {
        let &(room, start) = self.by_len.range((len, 0)..).next()?;
        self.remove(start, room);
        if room > len {
            self.insert(start + len, room - len);
        }
        Some(start)
    }

    /// Takes a range at an address.
    fn take_at(&mut self, start: u64, len: u64) -> Option<()> {
        let (&first, &room) = self.by_start.range(..=start).next_back()?;
        let (before, end) = (start - first, start.checked_add(len)?);
        let behind = (first + room).checked_sub(end)?;
        self.remove(first, room);
        if before > 0 {
            self.insert(first, before);
        }
        if behind > 0 {
            self.insert(end, behind);
        }
        Some(())
    }

    /// Adds a range. `begins` tells whether a chunk begins at an address.
    fn give_back(&mut self, (mut start, mut len): (u64, u64), begins: impl Fn(u64) -> bool) {
        let end = start + len;
        if !begins(end)
            && let Some(&room) = self.by_start.get(&end)
        {
            self.remove(end, room);
            len += room;
        }
        if !begins(start)
            && let Some((&before, &room)) = self.by_start.range(..start).next_back()
            && before + room == start
        {
            self.remove(before, room);
            start = before;
            len += room;
        }
        self.insert(start, len);
    }
}

/// Ranges that were freed in the order of a stream whose work may be in flight. The earlier ones wait for a point that does
/// not move, so that they become available also if the stream always has work in flight.
#[derive(Debug, Default)]
struct Behind {
    earlier: Batch,
    later: Batch,
}

/// Ranges, and the number of operations before the last free of them.
#[derive(Debug, Default)]
struct Batch {
    ranges: Ranges,
    ops: u64,
}

impl Behind {
    fn take(&mut self, len: u64) -> Option<u64> {
        let earlier = self.earlier.ranges.take(len);
        earlier.or_else(|| self.later.ranges.take(len))
    }

    fn is_empty(&self) -> bool {
        let batches = [&self.earlier, &self.later];
        batches
            .into_iter()
            .all(|batch| batch.ranges.by_start.is_empty())
    }

    /// Takes the ranges that are free for all streams. `is_done` tells whether all operations before are complete.
    fn take_done(&mut self, mut is_done: impl FnMut(u64) -> bool) -> Vec<(u64, u64)> {
        let mut done = Vec::new();
        for _ in 0..2 {
            let earlier = &mut self.earlier;
            if !earlier.ranges.by_start.is_empty() && !is_done(earlier.ops) {
                break;
            }
            done.extend(std::mem::take(&mut earlier.ranges.by_start));
            self.earlier = std::mem::take(&mut self.later);
        }
        done
    }
}

/// The memory of a pool.
#[derive(Debug)]
pub struct Divided {
    /// Server's ordinal.
    pub device: Ordinal,
    /// The pool was destroyed.
    pub has_ended: bool,
    /// `CUmemPoolProps::maxSize`; 0: no limit.
    pub max_size: u64,
    /// Access of other devices.
    pub accesses: Vec<CUmemAccessDesc>,
    chunks: BTreeMap<u64, Chunk>,
    ready: Ranges,
    /// By the number of the stream.
    behind: BTreeMap<u32, Behind>,
    /// Ranges that no allocation may have yet: work of an earlier server that runs again may use them.
    withheld: Vec<(u64, u64)>,
    /// How often freed ranges were made available to all streams.
    collected: u64,
    /// Bytes of all chunks.
    reserved: u64,
    /// Bytes in use, as requested.
    used: u64,
    /// Highest values since they were reset: bytes in use, bytes reserved.
    highest: [u64; 2],
}

fn rounded(len: u64) -> Option<u64> {
    len.max(1).checked_next_multiple_of(UNIT)
}

impl Divided {
    /// Memory of a pool without any yet.
    pub fn new(device: Ordinal) -> Divided {
        Divided {
            device,
            has_ended: false,
            max_size: 0,
            accesses: Vec::new(),
            chunks: BTreeMap::new(),
            ready: Ranges::default(),
            behind: BTreeMap::new(),
            withheld: Vec::new(),
            collected: 0,
            reserved: 0,
            used: 0,
            highest: [0; 2],
        }
    }

    /// Takes `len` bytes for the next work of the stream with this number; `None` if the pool has to grow. `is_done` tells
    /// whether the work before a point is complete.
    pub fn take(
        &mut self,
        len: u64,
        stream: u32,
        is_done: impl FnMut(Point) -> bool,
    ) -> Option<u64> {
        let room = rounded(len)?;
        let own = self.behind.get_mut(&stream);
        let found = own.and_then(|behind| behind.take(room));
        let found = found.or_else(|| self.ready.take(room));
        let found = found.or_else(|| match self.collect(is_done) {
            true => self.ready.take(room),
            false => None,
        })?;
        self.count(len);
        Some(found)
    }

    fn count(&mut self, len: u64) {
        self.used += len;
        self.highest[0] = self.highest[0].max(self.used);
    }

    /// Makes freed ranges available to all streams, if the work before is complete. Returns whether there were any.
    fn collect(&mut self, mut is_done: impl FnMut(Point) -> bool) -> bool {
        let mut any = false;
        for (stream, behind) in &mut self.behind {
            for range in behind.take_done(|ops| is_done((*stream, ops))) {
                any = true;
                let begins = |at| self.chunks.contains_key(&at);
                self.ready.give_back(range, begins);
            }
        }
        self.behind.retain(|_, behind| !behind.is_empty());
        self.collected += u64::from(any);
        any
    }

    /// How often freed ranges were made available to all streams: without the order of the free's stream.
    pub fn collected(&self) -> u64 {
        self.collected
    }

    /// Withholds free memory from allocations until [`Divided::release`].
    pub fn withhold(&mut self) {
        let ready = std::mem::take(&mut self.ready);
        self.withheld.extend(ready.by_start);
    }

    /// Whether ranges are withheld.
    pub fn withholds(&self) -> bool {
        !self.withheld.is_empty()
    }

    /// Makes withheld ranges available.
    pub fn release(&mut self) {
        for range in std::mem::take(&mut self.withheld) {
            let begins = |at| self.chunks.contains_key(&at);
            self.ready.give_back(range, begins);
        }
    }

    /// Bytes by which the pool is to grow for an allocation, the best value first.
    pub fn steps(&self, len: u64) -> impl Iterator<Item = u64> + use<> {
        let exact = len.max(1).checked_next_multiple_of(VIRTUAL_UNIT);
        let most = match self.max_size {
            0 => u64::MAX,
            max => max.saturating_sub(self.reserved),
        };
        let exact = exact.filter(|exact| *exact <= most);
        let usual = self
            .reserved
            .next_multiple_of(VIRTUAL_UNIT)
            .clamp(VIRTUAL_UNIT, STEP);
        let more = exact.filter(|exact| *exact < usual && usual <= most);
        more.map(|_| usual).into_iter().chain(exact)
    }

    /// Adds a chunk, which is free.
    pub fn add(&mut self, chunk: Chunk) {
        self.reserved += chunk.len;
        self.highest[1] = self.highest[1].max(self.reserved);
        self.ready.insert(chunk.start, chunk.len);
        self.chunks.insert(chunk.start, chunk);
    }

    /// Takes an allocation of an earlier server.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it is not free.
    pub fn adopt(&mut self, start: u64, len: u64) -> Result<(), CUresult> {
        let room = rounded(len).filter(|_| start.is_multiple_of(UNIT));
        let taken = room.and_then(|room| self.ready.take_at(start, room));
        taken.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        self.count(len);
        Ok(())
    }

    /// Frees an allocation behind the work before a point.
    pub fn free(&mut self, start: u64, len: u64, (stream, ops): Point) {
        let Some(room) = rounded(len) else { return };
        self.used -= len;
        let behind = &mut self.behind.entry(stream).or_default().later;
        behind.ops = behind.ops.max(ops);
        let begins = |at| self.chunks.contains_key(&at);
        behind.ranges.give_back((start, room), begins);
    }

    /// Whether `[address, address + len)` lies in one of its chunks.
    pub fn has(&self, address: u64, len: u64) -> bool {
        let below = self.chunks.range(..=address).next_back();
        below.is_some_and(|(start, chunk)| {
            address - start < chunk.len && len <= chunk.len - (address - start)
        })
    }

    /// Whether it may have a chunk without allocations.
    pub fn has_surplus(&self) -> bool {
        !self.behind.is_empty() || self.chunks.values().any(|chunk| self.is_free(chunk))
    }

    fn is_free(&self, chunk: &Chunk) -> bool {
        self.ready.by_start.get(&chunk.start) == Some(&chunk.len)
    }

    /// Removes free chunks until at most `keep` bytes are reserved. None of the session's work may be in flight.
    pub fn take_surplus(&mut self, keep: u64) -> Vec<Chunk> {
        self.collect(|_| true);
        let mut surplus = Vec::new();
        let free = self.chunks.values().filter(|chunk| self.is_free(chunk));
        let free: Vec<u64> = free.map(|chunk| chunk.start).collect();
        for start in free.into_iter().rev() {
            if self.reserved <= keep {
                break;
            }
            if let Some(chunk) = self.chunks.remove(&start) {
                self.ready.remove(start, chunk.len);
                self.reserved -= chunk.len;
                surplus.push(chunk);
            }
        }
        surplus
    }

    /// Gives other devices access to the memory, present and future, or revokes it.
    ///
    /// # Errors
    /// Driver errors.
    pub fn set_access(&mut self, gpu: &Gpu, accesses: &[CUmemAccessDesc]) -> Result<(), CUresult> {
        let own = gpu.devices[self.device].raw;
        let others = accesses.iter().filter(|access| access.location.id != own);
        let others: Vec<CUmemAccessDesc> = others.copied().collect();
        for chunk in self.chunks.values() {
            gpu.set_chunk_access(chunk, &others)?;
        }
        for access in others {
            let same = |known: &&mut CUmemAccessDesc| known.location.id == access.location.id;
            match self.accesses.iter_mut().find(same) {
                Some(known) => *known = access,
                None => self.accesses.push(access),
            }
        }
        Ok(())
    }

    /// Value of `CU_MEMPOOL_ATTR_USED_MEM_*` and `CU_MEMPOOL_ATTR_RESERVED_MEM_*`; 0 for other attributes.
    pub fn attribute(&self, attribute: u32) -> u64 {
        match attribute {
            CU_MEMPOOL_ATTR_USED_MEM_CURRENT => self.used,
            CU_MEMPOOL_ATTR_USED_MEM_HIGH => self.highest[0],
            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => self.reserved,
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => self.highest[1],
            _ => 0,
        }
    }

    /// Lowers a highest value to the present one.
    pub fn reset_highest(&mut self, attribute: u32) {
        match attribute {
            CU_MEMPOOL_ATTR_USED_MEM_HIGH => self.highest[0] = self.used,
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => self.highest[1] = self.reserved,
            _ => {}
        }
    }

    /// Highest values since they were reset: bytes in use, bytes reserved.
    pub fn highest(&self) -> [u64; 2] {
        self.highest
    }

    /// Raises the highest values to those of an earlier server.
    pub fn raise_highest(&mut self, earlier: [u64; 2]) {
        for (own, earlier) in self.highest.iter_mut().zip(earlier) {
            *own = (*own).max(earlier);
        }
    }

    /// Whether it has no memory.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Takes all memory. No work may access it any more.
    pub fn into_chunks(self) -> impl Iterator<Item = Chunk> {
        self.chunks.into_values()
    }
}
#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHUNK: u64 = 32 * UNIT;
    const CHUNKS: u64 = 3;

    fn begins(at: u64) -> bool {
        at.is_multiple_of(CHUNK) && at < CHUNKS * CHUNK
    }

    fn all_free() -> Ranges {
        let mut ranges = Ranges::default();
        (0..CHUNKS).for_each(|chunk| ranges.give_back((chunk * CHUNK, CHUNK), begins));
        ranges
    }

    proptest! {
        #[test]
        fn ranges_lie_apart_in_one_chunk_each_and_come_back_whole(
            ops in prop::collection::vec((any::<bool>(), 1u64..9, any::<prop::sample::Index>()), 1..200)
        ) {
            let mut ranges = all_free();
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (take, units, which) in ops {
                let len = units * UNIT;
                if take {
                    if let Some(start) = ranges.take(len) {
                        prop_assert_eq!(start / CHUNK, (start + len - 1) / CHUNK);
                        prop_assert!(live.iter().all(|(s, l)| start + len <= *s || s + l <= start));
                        live.push((start, len));
                    }
                } else if !live.is_empty() {
                    let range = live.swap_remove(which.index(live.len()));
                    ranges.give_back(range, begins);
                }
            }
            for range in live {
                ranges.give_back(range, begins);
            }
            prop_assert_eq!(ranges.by_start, all_free().by_start);
            prop_assert_eq!(ranges.by_len, all_free().by_len);
        }
    }

    #[test]
    fn ranges_become_available_behind_a_stream_that_always_has_work() {
        let mut memory = Divided::new(Ordinal::of_test(0));
        let mut grown = 0;
        for ops in 1..100 {
            // The latest operation is never complete.
            let is_done = |(_, before): Point| before + 1 < ops;
            let start = memory.take(UNIT, 1, is_done).unwrap_or_else(|| {
                grown += 1;
                memory.count(UNIT);
                grown * CHUNK
            });
            memory.free(start, UNIT, (2, ops));
        }
        assert!(grown <= 4, "{grown}");
        let own = memory.take(UNIT, 2, |_| false);
        assert!(own.is_some(), "in the order of the stream");
    }

    #[test]
    fn withheld_ranges_are_not_taken_until_they_are_released() {
        let mut memory = Divided::new(Ordinal::of_test(0));
        let range = (0, 4 * UNIT);
        memory.ready.insert(range.0, range.1);
        memory.adopt(UNIT, UNIT).expect("free");
        memory.withhold();
        assert!(memory.withholds());
        assert_eq!(memory.take(UNIT, 1, |_| true), None);
        // Freed since: behind the work that runs again in its stream.
        memory.free(UNIT, UNIT, (1, 5));
        assert_eq!(memory.take(UNIT, 1, |_| false), Some(UNIT));
        memory.release();
        assert!(!memory.withholds());
        let rest = [UNIT, 2 * UNIT, UNIT].map(|len| memory.take(len, 1, |_| true));
        assert_eq!(rest, [Some(0), Some(2 * UNIT), None]);
    }

    #[test]
    fn memory_that_leaves_the_order_of_its_stream_is_counted() {
        let mut memory = Divided::new(Ordinal::of_test(0));
        memory.ready.insert(0, UNIT);
        let start = memory.take(UNIT, 1, |_| false).expect("ready");
        memory.free(start, UNIT, (1, 1));
        assert_eq!(memory.take(UNIT, 1, |_| true), Some(start));
        assert_eq!(memory.collected(), 0, "in the order of the stream");
        memory.free(start, UNIT, (1, 2));
        assert_eq!(memory.take(UNIT, 2, |_| true), Some(start));
        assert_eq!(memory.collected(), 1);
    }

    #[test]
    fn the_smallest_range_that_is_long_enough_is_taken() {
        let mut ranges = Ranges::default();
        for (start, units) in [(0, 8), (0x10000, 2), (0x20000, 4)] {
            ranges.insert(start, units * UNIT);
        }
        let taken = [3, 1, 1, 5, 4].map(|units| ranges.take(units * UNIT));
        let expected = [0x20000, 0x20000 + 3 * UNIT, 0x10000, 0].map(Some);
        assert_eq!((&taken[..4], taken[4]), (&expected[..], None));
    }

    #[test]
    fn a_range_is_taken_at_an_address_if_all_of_it_is_free() {
        let mut ranges = all_free();
        assert_eq!(ranges.take_at(2 * UNIT, 4 * UNIT), Some(()));
        for (start, len) in [
            (2 * UNIT, UNIT),
            (UNIT, 2 * UNIT),
            (5 * UNIT, 2 * UNIT),
            (31 * UNIT, 2 * UNIT),
            (CHUNKS * CHUNK, UNIT),
            (UNIT, u64::MAX),
        ] {
            assert_eq!(ranges.take_at(start, len), None, "{start:#x}+{len:#x}");
        }
        assert_eq!(ranges.take_at(0, 2 * UNIT), Some(()));
        assert_eq!(ranges.take_at(6 * UNIT, 26 * UNIT), Some(()));
        assert_eq!(ranges.by_start.keys().next(), Some(&CHUNK));
    }
}
