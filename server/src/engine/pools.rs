//! Memory pools of sessions, and what is allocated from them.
//!
//! The driver's own pools, so that reuse in stream order, attributes and graph memory nodes are what the driver makes
//! of them. Each session has its own, the one in place of a device's default pool included: so its attributes are
//! its own, and what it keeps goes with it.

use super::Shared;
use super::account::{Account, Memory};
use super::slots::Slots;
use mpsshim_proto::cuda::*;
use mpsshim_proto::handle::Kind;
use std::collections::BTreeMap;

/// Pools a session may have at a time.
const MAX_POOLS: usize = 1 << 16;
/// Allocations from pools a session may have at a time.
const MAX_BLOCKS: usize = 1 << 22;
/// Bytes that a pool may keep whatever its threshold is. The driver gives memory back whenever a stream is
/// synchronized, which costs more than 100 µs each time; the server does that only when a session is idle.
const KEPT: u64 = 64 << 20;

/// A pool.
#[derive(Debug)]
pub struct Pool {
    /// The driver's.
    pub raw: CUmemoryPool,
    /// Server's ordinal.
    pub device: usize,
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` as the program set it; the driver's is [`KEPT`] at the least.
    pub threshold: u64,
    /// Bytes freed since it was last trimmed.
    freed: u64,
}

/// An allocation from a pool.
#[derive(Debug)]
struct Block {
    len: u64,
    /// Bytes charged to the session; 0 for what another has allocated.
    charged: u64,
    /// Handle of the pool, which may be gone.
    pool: u64,
    /// Server's ordinal.
    device: usize,
}

/// What a session has of all this.
#[derive(Debug)]
pub struct Pools {
    /// By handle.
    pub pools: Slots<Pool>,
    blocks: BTreeMap<u64, Block>,
    /// Some pool may keep more than it should.
    untrimmed: bool,
}

impl Default for Pools {
    fn default() -> Self {
        Pools {
            pools: Slots::new(Kind::MemPool, MAX_POOLS),
            blocks: BTreeMap::new(),
            untrimmed: false,
        }
    }
}

impl Pools {
    /// Adds a pool that was made.
    ///
    /// # Errors
    /// As [`Slots::insert`].
    pub fn add(
        &mut self,
        shared: &Shared,
        handle: u64,
        raw: CUmemoryPool,
        device: usize,
    ) -> Result<(), CUresult> {
        // An imported pool has no threshold.
        let _ = set_threshold(shared, raw, 0);
        let pool = Pool {
            raw,
            device,
            threshold: 0,
            freed: 0,
        };
        self.pools
            .insert(handle, pool)
            .map(drop)
            .map_err(|(status, _)| status)
    }

    /// Whether another allocation may be made.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn has_room(&self) -> Result<(), CUresult> {
        if self.blocks.len() < MAX_BLOCKS {
            Ok(())
        } else {
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        }
    }

    /// Notes an allocation for which `charged` bytes were charged: all of it, or nothing where it is another's.
    pub fn note(&mut self, address: u64, len: u64, charged: u64, pool: u64, device: usize) {
        let block = Block {
            len,
            charged,
            pool,
            device,
        };
        self.blocks.insert(address, block);
    }

    /// The device of the allocation that contains an address.
    pub fn device_at(&self, address: u64) -> Option<usize> {
        let (start, block) = self.blocks.range(..=address).next_back()?;
        (address - start < block.len).then_some(block.device)
    }

    /// Whether an allocation begins at this address, and on which device.
    pub fn device_of(&self, address: u64) -> Option<usize> {
        self.blocks.get(&address).map(|block| block.device)
    }

    /// Notes that the allocation at this address was freed.
    pub fn note_free(&mut self, account: &Account, address: u64) {
        if let Some(block) = self.blocks.remove(&address) {
            account.credit(Memory::Device(block.device), block.charged);
            if let Ok(pool) = self.pools.get_mut(block.pool) {
                pool.freed += block.len;
                self.untrimmed |= pool.freed > KEPT;
            }
        }
    }

    /// Notes a new threshold of a pool.
    pub fn note_threshold(&mut self, pool: u64, threshold: u64) {
        if let Ok(pool) = self.pools.get_mut(pool) {
            pool.threshold = threshold;
        }
    }

    /// Whether `[address, address + len)` lies in one allocation.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        self.blocks
            .range(..=address)
            .next_back()
            .is_some_and(|(start, block)| {
                address - start < block.len && len <= block.len - (address - start)
            })
    }

    /// Whether a pool may keep more than it should; asked once.
    pub fn take_untrimmed(&mut self) -> bool {
        for pool in self.pools.iter_mut().filter(|_| self.untrimmed) {
            pool.freed = 0;
        }
        std::mem::take(&mut self.untrimmed)
    }

    /// Whether a pool may keep more than it should.
    pub fn is_untrimmed(&self) -> bool {
        self.untrimmed
    }

    /// Frees everything, on a stream with no work of the session's.
    pub fn clear(&mut self, shared: &Shared, account: &Account) {
        for (address, block) in std::mem::take(&mut self.blocks) {
            account.credit(Memory::Device(block.device), block.charged);
            let device = &shared.devices[block.device];
            let freed = device
                .make_current(&shared.driver)
                .and_then(|()| device.take_stream(&shared.driver, 0))
                .and_then(|stream| {
                    let freed = shared.driver.memory.pool_free(address, stream);
                    device.keep_stream(0, stream);
                    freed
                });
            // An allocation of a graph that does not run is no memory.
            if let Err(status) = freed {
                tracing::debug!("cuMemFreeAsync of a session that ended: {status}");
                shared.note_status(status);
            }
        }
        for pool in self.pools.drain() {
            let _ = shared.devices[pool.device].make_current(&shared.driver);
            if let Err(status) = shared.driver.memory.pool_destroy(pool.raw) {
                tracing::error!("cuMemPoolDestroy of a session that ended: {status}");
                shared.note_status(status);
            }
        }
    }
}

/// Sets the threshold that a program asks for, and [`KEPT`] at the least.
///
/// # Errors
/// The driver's.
pub fn set_threshold(shared: &Shared, pool: CUmemoryPool, bytes: u64) -> Result<(), CUresult> {
    let mut value = bytes.max(KEPT);
    let which = CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let driver = &shared.driver.memory;
    driver.pool_set_attribute(pool, which, &mut value)
}
