//! The table of a session's allocations from pools, in memory that outlives the server.
//!
//! It is an area of the description ([`crate::engine::base::description`]). Programs allocate and free from pools as often as
//! they launch kernels, so an allocation is an entry that is overwritten in place, not a record that is appended: the
//! areas of the records would have to be compacted all the time.

use crate::engine::base::bounds;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most allocations in the table.
pub const ENTRIES: usize = 128 << 10;
/// Bytes before the marks.
const HEAD: usize = 64;
/// Bytes of the area; only written pages take memory.
pub const LEN: usize =
    (HEAD + (bounds::POOLS + ENTRIES) * size_of::<Pair>()).next_multiple_of(4096);

/// An allocation: its address (0: none) and bytes. Or the highest marks of a pool: bytes in use and bytes reserved.
#[repr(C)]
struct Pair(AtomicU64, AtomicU64);

/// A table. Only the thread that runs the session writes it.
#[derive(Clone, Copy, Debug)]
pub struct BlockTable<'a> {
    /// Number of entries that were ever in use.
    end: &'a AtomicU64,
    marks: &'a [Pair; bounds::POOLS],
    entries: &'a [Pair; ENTRIES],
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("Pair")
    }
}

impl<'a> BlockTable<'a> {
    /// The table in this area.
    ///
    /// # Safety
    /// `area` is aligned to 64 bytes and has [`LEN`] bytes that stay mapped, and are accessed as atomics only, as long as
    /// the table is used.
    pub unsafe fn new(area: *mut u8) -> BlockTable<'a> {
        let marks = HEAD;
        let entries = marks + bounds::POOLS * size_of::<Pair>();
        // SAFETY: the three parts lie in the area one behind the other, and atomics have no invalid values.
        unsafe {
            BlockTable {
                end: &*area.cast(),
                marks: &*area.add(marks).cast(),
                entries: &*area.add(entries).cast(),
            }
        }
    }

    /// Notes an allocation in an entry.
    pub fn set(&self, entry: u32, address: u64, len: u64) {
        let Some(pair) = self.entries.get(entry as usize) else {
            return;
        };
        self.end.fetch_max(u64::from(entry) + 1, Ordering::Relaxed);
        pair.1.store(len, Ordering::Relaxed);
        pair.0.store(address, Ordering::Release);
    }

    /// Notes that an entry is free.
    pub fn clear(&self, entry: u32) {
        if let Some(pair) = self.entries.get(entry as usize) {
            pair.0.store(0, Ordering::Release);
        }
    }

    /// The allocations, by address: bytes and entry. Also returns the number of entries that were ever in use.
    pub fn allocations(&self) -> (BTreeMap<u64, (u64, u32)>, u32) {
        let end = self.end.load(Ordering::Acquire).min(ENTRIES as u64);
        let entries = self.entries.iter().take(end as usize).enumerate();
        let found = entries.filter_map(|(entry, pair)| {
            let address = pair.0.load(Ordering::Acquire);
            let len = pair.1.load(Ordering::Relaxed);
            (address != 0).then_some((address, (len, entry as u32)))
        });
        (found.collect(), end as u32)
    }

    /// Notes the highest marks of the pool at a position: bytes in use and bytes reserved.
    pub fn set_marks(&self, pool: usize, marks: [u64; 2]) {
        if let Some(pair) = self.marks.get(pool) {
            pair.0.store(marks[0], Ordering::Relaxed);
            pair.1.store(marks[1], Ordering::Relaxed);
        }
    }

    /// The highest marks of the pool at a position.
    pub fn marks(&self, pool: usize) -> [u64; 2] {
        let pair = self.marks.get(pool);
        let load = |pair: &Pair| {
            [
                pair.0.load(Ordering::Relaxed),
                pair.1.load(Ordering::Relaxed),
            ]
        };
        pair.map_or([0; 2], load)
    }
}

/// Entries of a table that are not in use.
#[derive(Debug, Default)]
pub struct FreeEntries {
    freed: Vec<u32>,
    /// No later entry was ever in use.
    end: u32,
}

impl FreeEntries {
    /// Those of a table of an earlier server.
    pub fn beside(used: &BTreeMap<u64, (u64, u32)>, end: u32) -> FreeEntries {
        let mut is_used = vec![false; end as usize];
        for (_, entry) in used.values() {
            is_used[*entry as usize] = true;
        }
        let all = is_used.into_iter().enumerate();
        FreeEntries {
            freed: all
                .filter_map(|(entry, used)| (!used).then_some(entry as u32))
                .collect(),
            end,
        }
    }

    /// Takes an entry; `None` if all are in use.
    pub fn take(&mut self) -> Option<u32> {
        if let Some(entry) = self.freed.pop() {
            return Some(entry);
        }
        let entry = self.end;
        ((entry as usize) < ENTRIES).then(|| {
            self.end += 1;
            entry
        })
    }

    /// Takes an entry back.
    pub fn give_back(&mut self, entry: u32) {
        self.freed.push(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::base::description::Description;

    #[test]
    fn another_process_finds_the_allocations_and_the_marks() {
        let description = Description::new(mpsshim_proto::wire::OWN).expect("a description");
        let table = description.blocks();
        let mut free = FreeEntries::default();
        let entries = [(); 3].map(|()| free.take().expect("an entry"));
        for (entry, address) in entries.into_iter().zip([0x3000, 0x1000, 0x2000]) {
            table.set(entry, address, address / 8);
        }
        table.clear(entries[1]);
        free.give_back(entries[1]);
        table.set_marks(7, [5, 9]);
        let file = description.file().try_clone_to_owned().expect("its file");
        let again = Description::open(file).expect("opened again");
        let (found, end) = again.blocks().allocations();
        let expected = [(0x2000, (0x400, entries[2])), (0x3000, (0x600, entries[0]))];
        assert_eq!((found.clone(), end), (BTreeMap::from(expected), 3));
        assert_eq!(again.blocks().marks(7), [5, 9]);
        assert_eq!(again.blocks().marks(8), [0, 0]);
        let mut free = FreeEntries::beside(&found, end);
        assert_eq!(free.take(), Some(entries[1]), "the freed one first");
        assert_eq!(free.take(), Some(3));
    }

    #[test]
    fn a_full_table_takes_no_more() {
        let mut free = FreeEntries::default();
        assert_eq!((0..).map_while(|_: u32| free.take()).count(), ENTRIES);
        free.give_back(5);
        assert_eq!([free.take(), free.take()], [Some(5), None]);
        let description = Description::new(mpsshim_proto::wire::OWN).expect("a description");
        description.blocks().set(ENTRIES as u32, 1, 1);
        assert!(description.blocks().allocations().0.is_empty());
    }
}
