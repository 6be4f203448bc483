//! Physical memory (`cuMemCreate`): it exists as long as a handle or a mapping does.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::account::Charge;

/// One piece.
pub type Physical = Arc<Charge>;
/// Start, length and memory of a mapping.
type Mapping = (u64, u64, Physical);

#[derive(Debug)]
struct Handle {
    physical: Physical,
    /// How often it must be released.
    held: u64,
}

/// Handles and mappings.
#[derive(Debug, Default)]
pub struct Physicals {
    /// `None`: none yet; a map cannot be made in a constant.
    handles: Option<HashMap<u64, Handle>>,
    /// By start: length and memory.
    mappings: BTreeMap<u64, (u64, Physical)>,
}

impl Physicals {
    pub const fn new() -> Physicals {
        Physicals {
            handles: None,
            mappings: BTreeMap::new(),
        }
    }

    /// Adds memory. A known handle of the same value has ended unnoticed: the driver would not have reused it.
    pub fn add(&mut self, handle: u64, charge: Charge) {
        let physical = Arc::new(charge);
        let handles = self.handles.get_or_insert_default();
        handles.insert(handle, Handle { physical, held: 1 });
    }

    /// Makes a handle valid, or valid once more.
    pub fn hold(&mut self, handle: u64, physical: Physical) {
        let handles = self.handles.get_or_insert_default();
        let known = handles.entry(handle);
        known.or_insert(Handle { physical, held: 0 }).held += 1;
    }

    /// Releases a handle once; returns its memory.
    pub fn release(&mut self, handle: u64) -> Option<Physical> {
        let handles = self.handles.as_mut()?;
        let known = handles.get_mut(&handle)?;
        known.held -= 1;
        match known.held {
            0 => handles.remove(&handle).map(|last| last.physical),
            _ => Some(known.physical.clone()),
        }
    }

    /// The memory of a handle.
    pub fn of(&self, handle: u64) -> Option<Physical> {
        let known = self.handles.as_ref()?.get(&handle)?;
        Some(known.physical.clone())
    }

    /// The memory mapped at an address.
    pub fn at(&self, address: u64) -> Option<Physical> {
        let (start, (len, physical)) = self.mappings.range(..=address).next_back()?;
        (address - start < *len).then(|| physical.clone())
    }

    pub fn map(&mut self, start: u64, len: u64, physical: Physical) {
        self.mappings.insert(start, (len, physical));
    }

    /// Removes the mappings in `[start, start + len)`, which are about to be undone.
    pub fn unmap(&mut self, start: u64, len: u64) -> Vec<Mapping> {
        let inside = self.mappings.range(start..start.saturating_add(len));
        let starts: Vec<u64> = inside.map(|(start, _)| *start).collect();
        let taken = |start| {
            let (len, physical) = self.mappings.remove(&start)?;
            Some((start, len, physical))
        };
        starts.into_iter().filter_map(taken).collect()
    }

    /// The driver has refused to undo them.
    pub fn put_back(&mut self, mappings: Vec<Mapping>) {
        for (start, len, physical) in mappings {
            self.mappings.entry(start).or_insert((len, physical));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::account::tests::{account, held};
    use super::*;

    #[test]
    fn memory_counts_as_long_as_a_handle_or_a_mapping_is() {
        let account = account(u64::MAX);
        let mut physicals = Physicals::new();
        assert!(physicals.release(1).is_none() && physicals.of(1).is_none());
        physicals.add(1, account.take(10).unwrap());
        let memory = physicals.of(1).unwrap();
        physicals.map(0x1000, 0x100, memory.clone());
        physicals.map(0x1100, 0x100, memory);
        drop(physicals.release(1));
        assert!(physicals.release(1).is_none());
        assert_eq!(held(account), 10, "it is mapped");
        // A handle of it anew, as often as it was asked for.
        assert!(physicals.at(0x1200).is_none() && physicals.at(0xfff).is_none());
        for _ in 0..2 {
            let memory = physicals.at(0x11ff).unwrap();
            physicals.hold(2, memory);
        }
        let undone = physicals.unmap(0x1000, 0x200);
        assert_eq!(undone.len(), 2);
        drop(undone);
        drop(physicals.release(2));
        assert_eq!(held(account), 10);
        drop(physicals.release(2));
        assert_eq!(held(account), 0);
    }

    #[test]
    fn what_the_driver_refuses_stays() {
        let account = account(u64::MAX);
        let mut physicals = Physicals::new();
        physicals.add(1, account.take(10).unwrap());
        physicals.map(0x1000, 0x100, physicals.of(1).unwrap());
        let undone = physicals.unmap(0, u64::MAX);
        physicals.put_back(undone);
        let released = physicals.release(1).unwrap();
        physicals.hold(1, released);
        drop(physicals.unmap(0x1000, 1));
        assert_eq!(held(account), 10);
        drop(physicals.release(1));
        assert_eq!(held(account), 0);
    }
}
