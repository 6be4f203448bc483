//! Allocates addresses in a fixed range.

use std::collections::BTreeMap;

/// A first-fit allocator of address ranges; it holds no memory itself.
#[derive(Debug)]
pub struct RangeAllocator {
    granularity: u64,
    free: BTreeMap<u64, u64>,
}

impl RangeAllocator {
    /// An allocator of `[start, start + len)`, all of it free. Allocations are multiples of `granularity` (a power of
    /// two).
    pub fn new(start: u64, len: u64, granularity: u64) -> Self {
        RangeAllocator {
            granularity,
            free: BTreeMap::from([(start, len)]),
        }
    }

    /// `len` bytes rounded up to the granularity; `None` on overflow.
    pub fn round_up(&self, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.granularity)
    }

    /// Takes a free range of `len` bytes (already rounded) and returns its start.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let (&start, &room) = self.free.iter().find(|(_, room)| **room >= len)?;
        self.free.remove(&start);
        if room > len {
            self.free.insert(start + len, room - len);
        }
        Some(start)
    }

    /// Takes the range that begins at `start`, if all of it is free.
    pub fn take_at(&mut self, start: u64, len: u64) -> Option<()> {
        if !start.is_multiple_of(self.granularity) || !len.is_multiple_of(self.granularity) {
            return None;
        }
        let end = start.checked_add(len)?;
        let (&first, &room) = self.free.range(..=start).next_back()?;
        if len == 0 || end > first + room {
            return None;
        }
        self.free.remove(&first);
        if first < start {
            self.free.insert(first, start - first);
        }
        if end < first + room {
            self.free.insert(end, first + room - end);
        }
        Some(())
    }

    /// The free ranges: start and bytes.
    pub fn free_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.free.iter().map(|(start, len)| (*start, *len))
    }

    /// Frees a range that was taken.
    pub fn give_back(&mut self, mut start: u64, mut len: u64) {
        if let Some((&before, &room)) = self.free.range(..start).next_back()
            && before + room == start
        {
            self.free.remove(&before);
            start = before;
            len += room;
        }
        if let Some(room) = self.free.remove(&(start + len)) {
            len += room;
        }
        self.free.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_never_overlap_and_come_back(ops in prop::collection::vec((any::<bool>(), 1u64..9, any::<prop::sample::Index>()), 1..300)) {
            let mut allocator = RangeAllocator::new(0x1000, 64 * 16, 16);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (take, units, which) in ops {
                if take {
                    if let Some(start) = allocator.take(units * 16) {
                        prop_assert!(start >= 0x1000 && start + units * 16 <= 0x1000 + 64 * 16);
                        prop_assert!(live.iter().all(|(s, l)| start + units * 16 <= *s || s + l <= start));
                        live.push((start, units * 16));
                    }
                } else if !live.is_empty() {
                    let (start, len) = live.swap_remove(which.index(live.len()));
                    allocator.give_back(start, len);
                }
            }
            for (start, len) in live.drain(..) {
                allocator.give_back(start, len);
            }
            prop_assert_eq!(allocator.take(64 * 16), Some(0x1000));
        }
    }

    #[test]
    fn a_range_is_taken_at_an_address_if_all_of_it_is_free() {
        let mut allocator = RangeAllocator::new(0x1000, 16 * 8, 16);
        assert_eq!(allocator.take_at(0x1020, 32), Some(()));
        for (start, len) in [
            (0x1020, 16),
            (0x1010, 32),
            (0x1030, 16),
            (0x1044, 16),
            (0x1040, 8),
            (0x1040, 0),
            (0x1070, 32),
            (0x0ff0, 32),
            (u64::MAX - 15, 16),
        ] {
            assert_eq!(allocator.take_at(start, len), None, "{start:#x}+{len}");
        }
        assert_eq!(allocator.take_at(0x1000, 32), Some(()));
        assert_eq!(allocator.take_at(0x1040, 64), Some(()));
        assert_eq!(allocator.take(16), None);
        allocator.give_back(0x1020, 32);
        assert_eq!(allocator.take(32), Some(0x1020));
    }
}
