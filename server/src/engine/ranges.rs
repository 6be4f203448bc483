//! Hands out addresses of a fixed range.

use std::collections::BTreeMap;

/// A first-fit allocator of address ranges; it holds no memory itself.
#[derive(Debug)]
pub struct RangeAllocator {
    granularity: u64,
    free: BTreeMap<u64, u64>,
}

impl RangeAllocator {
    /// All of `[start, start + len)` is free; what is handed out is a multiple of `granularity` (a power of two).
    pub fn new(start: u64, len: u64, granularity: u64) -> Self {
        RangeAllocator {
            granularity,
            free: BTreeMap::from([(start, len)]),
        }
    }

    /// `len` bytes rounded up as they will be handed out; `None` when that overflows.
    pub fn round_up(&self, len: u64) -> Option<u64> {
        len.max(1).checked_next_multiple_of(self.granularity)
    }

    /// The start of a free range of `len` bytes (already rounded), which is free no more.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let (&start, &room) = self.free.iter().find(|(_, room)| **room >= len)?;
        self.free.remove(&start);
        if room > len {
            self.free.insert(start + len, room - len);
        }
        Some(start)
    }

    /// Makes a range that was taken free again.
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
}
