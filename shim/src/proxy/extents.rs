//! Memory at addresses outside of granted slabs: the program's own mappings, memory from pools, memory that another
//! process shares.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;

use crate::proxy::context::Context;

/// Where the memory of an extent comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `cuMemMap`: handle of the allocation, while the program holds one.
    Mapped { allocation: u64, handle_types: u32 },
    /// `cuIpcOpenMemHandle`: how often it must be closed.
    Opened { count: u32 },
    /// `cuMemAllocAsync`: handle of the pool.
    Pooled { pool: u64 },
}

/// A range of addresses and its memory.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Bytes.
    pub len: u64,
    /// Server's ordinal of the device whose memory it is.
    pub device: u32,
    /// The context it was allocated in, if it has one.
    pub context: Option<&'static Context>,
    /// Unique in the life of the process, the same for all views of one allocation.
    pub id: u64,
    /// The device may use it.
    pub usable: bool,
    pub source: Source,
}

static EXTENTS: RwLock<BTreeMap<u64, Extent>> = RwLock::new(BTreeMap::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A number for an allocation, apart from those of blocks.
pub fn next_id() -> u64 {
    static IDS: AtomicU64 = AtomicU64::new(1 << 40);
    IDS.fetch_add(1, Ordering::Relaxed)
}

/// Adds an extent.
pub fn insert(start: u64, extent: Extent) {
    let mut table = EXTENTS.write();
    table.insert(start, extent);
    COUNT.store(table.len(), Ordering::Release);
}

/// Removes the extent that begins at `start`, if `fits`.
pub fn remove(start: u64, fits: impl Fn(&Extent) -> bool) -> Option<Extent> {
    let mut table = EXTENTS.write();
    if !table.get(&start).is_some_and(fits) {
        return None;
    }
    let removed = table.remove(&start);
    COUNT.store(table.len(), Ordering::Release);
    removed
}

/// Changes the extent that begins at `start`; whether there is one.
pub fn change(start: u64, with: impl FnOnce(&mut Extent)) -> bool {
    let mut table = EXTENTS.write();
    let found = table.get_mut(&start);
    let any = found.is_some();
    if let Some(extent) = found {
        with(extent);
    }
    any
}

/// Changes, or with `false` removes, the extents that overlap `[start, start + len)`.
pub fn retain_in(start: u64, len: u64, mut keep: impl FnMut(u64, &mut Extent) -> bool) {
    let mut table = EXTENTS.write();
    let before = table
        .range(..start)
        .next_back()
        .filter(|(at, extent)| **at + extent.len > start)
        .map(|(at, _)| *at);
    let first = before.unwrap_or(start);
    let mut gone = Vec::new();
    for (at, extent) in table.range_mut(first..start.saturating_add(len)) {
        if !keep(*at, extent) {
            gone.push(*at);
        }
    }
    for at in gone {
        table.remove(&at);
    }
    COUNT.store(table.len(), Ordering::Release);
}

/// The extent that contains an address, and its start.
#[inline]
pub fn find(address: u64) -> Option<(u64, Extent)> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let table = EXTENTS.read();
    let (start, found) = table.range(..=address).next_back()?;
    (address - start < found.len).then_some((*start, *found))
}

/// Whether `[address, address + len)` is usable memory of extents; `None` when it does not begin in one.
#[inline]
pub fn covers(address: u64, len: u64) -> Option<bool> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let table = EXTENTS.read();
    let mut at = address;
    let end = address.saturating_add(len);
    loop {
        let found = table.range(..=at).next_back();
        match found.filter(|(start, extent)| at - *start < extent.len) {
            Some((start, extent)) if extent.usable => {
                at = start + extent.len;
                if end <= at {
                    return Some(true);
                }
            }
            None if at == address => return None,
            _ => return Some(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(len: u64, usable: bool) -> Extent {
        Extent {
            len,
            device: 0,
            context: None,
            id: 1,
            usable,
            source: Source::Mapped {
                allocation: 0,
                handle_types: 0,
            },
        }
    }

    #[test]
    fn neighbours_are_one_range_and_gaps_are_none() {
        assert_eq!(covers(50, 1), None);
        insert(100, extent(100, true));
        insert(200, extent(50, true));
        insert(250, extent(50, false));
        assert_eq!(covers(100, 150), Some(true));
        assert_eq!(covers(199, 2), Some(true));
        assert_eq!(covers(199, 52), Some(false));
        assert_eq!(covers(99, 1), None);
        assert_eq!(covers(260, 1), Some(false));
        retain_in(150, 60, |_, extent| {
            extent.usable = false;
            true
        });
        assert_eq!(covers(100, 10), Some(false));
        assert_eq!(find(299).map(|(start, _)| start), Some(250));
        retain_in(100, 200, |_, _| false);
        assert!(find(100).is_none());
    }
}
