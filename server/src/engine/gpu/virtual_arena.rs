//! Addresses of programs' reservations (`cuMemAddressReserve`), and of the memory of pools.

use crate::engine::base::driver::Driver;
use crate::engine::base::ranges::RangeAllocator;
use mpsshim_proto::arena::{VIRTUAL_ARENA, VIRTUAL_ARENA_LEN, VIRTUAL_UNIT};
use parking_lot::{Mutex, MutexGuard};

/// Minimum size of the arena, bytes; a smaller one is not worth having.
const LEAST_ARENA: u64 = 64 << 30;

/// The address range for programs' reservations.
#[derive(Debug)]
pub struct VirtualArena {
    ranges: Mutex<RangeAllocator>,
    is_empty: bool,
}

impl VirtualArena {
    /// Reserves the addresses with the driver, fewer if it refuses; initially all are free.
    pub fn new(driver: &Driver) -> VirtualArena {
        let mut len = VIRTUAL_ARENA_LEN;
        loop {
            let mut reserved = 0;
            let status =
                driver.mem_address_reserve(&mut reserved, len as usize, 0, VIRTUAL_ARENA, 0);
            match status {
                Ok(()) if reserved == VIRTUAL_ARENA => break,
                Ok(()) => {
                    let _ = driver.memory.mem_address_free(reserved, len as usize);
                }
                Err(_) => {}
            }
            len /= 2;
            if len < LEAST_ARENA {
                tracing::warn!(
                    "no addresses at {VIRTUAL_ARENA:#x} for programs' reservations; cuMemAddressReserve will fail"
                );
                len = 0;
                break;
            }
        }
        VirtualArena {
            ranges: Mutex::new(RangeAllocator::new(VIRTUAL_ARENA, len, VIRTUAL_UNIT)),
            is_empty: len == 0,
        }
    }

    /// Whether the driver has given it no addresses.
    pub fn is_empty(&self) -> bool {
        self.is_empty
    }

    /// The allocator of the addresses.
    pub fn lock(&self) -> MutexGuard<'_, RangeAllocator> {
        self.ranges.lock()
    }
}
