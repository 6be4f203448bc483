//! The heap of a context: memory for `malloc` and `free` in kernels.
//!
//! Its size is the context's limit at the first allocation; the memory goes with the context.

use std::collections::BTreeMap;

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::memory::{self, Kind};

/// Alignment of allocations, bytes.
const UNIT: u64 = 16;

#[derive(Default)]
pub struct Heap(Mutex<Option<Area>>);

/// First address and bytes of each free and each allocated part.
#[derive(Default)]
struct Area {
    free: BTreeMap<u64, u64>,
    used: BTreeMap<u64, u64>,
}

impl Heap {
    /// Whether a kernel has allocated: the size is fixed then.
    pub fn is_used(&self) -> bool {
        self.0.lock().is_some()
    }

    /// `malloc`: an address, or 0 if there is no room in a heap of `size` bytes.
    pub fn allocate(&self, (context, device): (u64, CUdevice), size: u64, bytes: u64) -> u64 {
        let mut area = self.0.lock();
        let area = area.get_or_insert_with(|| {
            let start = memory::allocate(context, device, size, Kind::Module);
            let free = start.map(|start| BTreeMap::from([(start, size)]));
            Area {
                free: free.unwrap_or_default(),
                used: BTreeMap::new(),
            }
        });
        let Some(bytes) = bytes.max(1).checked_next_multiple_of(UNIT) else {
            return 0;
        };
        let found = area.free.iter().find(|(_, room)| **room >= bytes);
        let Some((start, room)) = found.map(|(start, room)| (*start, *room)) else {
            return 0;
        };
        area.free.remove(&start);
        if room > bytes {
            area.free.insert(start + bytes, room - bytes);
        }
        area.used.insert(start, bytes);
        start
    }

    /// `free`: whether the address was allocated.
    pub fn free(&self, start: u64) -> bool {
        if start == 0 {
            return true;
        }
        let mut area = self.0.lock();
        let Some(area) = area.as_mut() else {
            return false;
        };
        let Some(mut bytes) = area.used.remove(&start) else {
            return false;
        };
        let mut start = start;
        if let Some(behind) = area.free.remove(&(start + bytes)) {
            bytes += behind;
        }
        let before = area.free.range(..start).next_back();
        if let Some((first, len)) = before.map(|(first, len)| (*first, *len))
            && first + len == start
        {
            area.free.remove(&first);
            (start, bytes) = (first, bytes + len);
        }
        area.free.insert(start, bytes);
        true
    }
}
