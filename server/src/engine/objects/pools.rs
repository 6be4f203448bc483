//! Memory pools of sessions, and what is allocated from them.
//!
//! The driver's own pools, so that reuse in stream order, attributes and graph memory nodes are what the driver makes
//! of them. Each session has its own, the one in place of a device's default pool included: so its attributes are
//! its own, and what it keeps goes with it.

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::slots::Slots;
use crate::engine::gpu::Gpu;
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use std::collections::BTreeMap;

/// Bytes that a pool may keep whatever its threshold is. The driver gives memory back whenever a stream is
/// synchronized, which costs more than 100 µs each time; the server does that only when a session is idle.
pub const KEPT: u64 = 64 << 20;

/// A pool.
#[derive(Debug)]
pub struct Pool {
    /// The driver's.
    pub raw: CUmemoryPool,
    /// Server's ordinal.
    pub device: Ordinal,
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` as the program set it; the driver's is [`KEPT`] at the least.
    pub threshold: u64,
    /// Bytes freed since it was last trimmed.
    freed: u64,
    /// Bytes of its allocations.
    used: u64,
    /// What it keeps of freed memory, as far as is known.
    kept: Charge,
    /// Another's, in which nothing is allocated here.
    imported: bool,
}

impl Pool {
    /// What counts of the memory that it keeps: the driver has that when the session's work is done.
    pub fn into_kept(self) -> Charge {
        self.kept
    }
}

/// An allocation from a pool.
#[derive(Debug)]
struct Block {
    len: u64,
    charge: Option<Charge>,
    /// Handle of the pool, which may be gone.
    pool: u64,
    /// Server's ordinal.
    device: Ordinal,
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
            pools: Slots::new(Kind::MemPool, bounds::POOLS),
            blocks: BTreeMap::new(),
            untrimmed: false,
        }
    }
}

impl Pools {
    /// Whether it has no pool.
    pub fn is_untouched(&self) -> bool {
        self.pools.len() == 0 && self.blocks.is_empty()
    }

    /// Adds a pool that was made.
    ///
    /// # Errors
    /// As [`Slots::insert`].
    pub fn add(
        &mut self,
        gpu: &Gpu,
        handle: u64,
        account: &Account,
        raw: CUmemoryPool,
        device: Ordinal,
    ) -> Result<(), CUresult> {
        let kept = account.take(Memory::Device(device), 0)?;
        // An imported pool has no threshold.
        let _ = set_threshold(gpu, raw, 0);
        let pool = Pool {
            raw,
            device,
            threshold: 0,
            freed: 0,
            used: 0,
            kept,
            imported: false,
        };
        self.pools
            .insert(handle, pool)
            .map(drop)
            .map_err(|(status, _)| status)
    }

    /// Adds a pool that was imported.
    ///
    /// # Errors
    /// As [`Slots::insert`].
    pub fn add_imported(
        &mut self,
        gpu: &Gpu,
        handle: u64,
        account: &Account,
        raw: CUmemoryPool,
        device: Ordinal,
    ) -> Result<(), CUresult> {
        self.add(gpu, handle, account, raw, device)?;
        self.pools.get_mut(handle)?.imported = true;
        Ok(())
    }

    /// Whether another allocation may be made.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn has_room(&self) -> Result<(), CUresult> {
        if self.blocks.len() < bounds::POOL_BLOCKS {
            Ok(())
        } else {
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        }
    }

    /// Counts an allocation that is about to be made: what its pool keeps is taken first, the rest is new.
    ///
    /// # Errors
    /// As [`Account::take`], `CUDA_ERROR_INVALID_VALUE`.
    pub fn take(&mut self, pool: u64, len: u64) -> Result<Charge, CUresult> {
        let Ok(pool) = self.pools.get_mut(pool) else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        let mut charge = pool.kept.split(len);
        match charge.resize(len) {
            Ok(()) => Ok(charge),
            Err(status) => {
                pool.kept.merge(charge);
                Err(status)
            }
        }
    }

    /// The allocation came to nothing.
    pub fn put_back(&mut self, pool: u64, charge: Charge) {
        if let Ok(pool) = self.pools.get_mut(pool) {
            pool.kept.merge(charge);
        }
    }

    /// Whether some pool keeps freed memory.
    pub fn keep_any(&self) -> bool {
        self.pools.iter().any(|pool| pool.kept.bytes() > 0)
    }

    /// Has the driver take what pools keep, but for so many bytes of each, and counts what they have then. Nothing of the
    /// session's may be in flight.
    pub fn settle(&mut self, gpu: &Gpu, keep: impl Fn(&Pool) -> u64) {
        let driver = &gpu.driver.memory;
        for pool in self.pools.iter_mut() {
            if pool.kept.bytes() == 0 {
                continue;
            }
            let keep = keep(pool);
            let mut reserved = 0;
            let which = CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
            let known = gpu.devices[pool.device]
                .make_current(&gpu.driver)
                .and_then(|()| driver.pool_trim_to(pool.raw, keep as usize))
                .and_then(|()| driver.pool_get_attribute(pool.raw, which, &mut reserved));
            let now = reserved.saturating_sub(pool.used);
            // The driver's units are larger than what was asked for: never more than what was freed.
            let now = now.min(pool.kept.bytes());
            if let Err(status) = known.and_then(|()| pool.kept.resize(now)) {
                tracing::debug!("what a pool keeps: {status}");
            }
        }
    }

    /// Notes an allocation and what it counts as.
    pub fn note(
        &mut self,
        (address, len): (u64, u64),
        charge: Option<Charge>,
        pool: u64,
        device: Ordinal,
    ) {
        let block = Block {
            len,
            charge,
            pool,
            device,
        };
        if let Ok(pool) = self.pools.get_mut(pool) {
            pool.used += len;
        }
        self.blocks.insert(address, block);
    }

    /// The device of the allocation that contains an address.
    pub fn device_at(&self, address: u64) -> Option<Ordinal> {
        let (start, block) = self.blocks.range(..=address).next_back()?;
        (address - start < block.len).then_some(block.device)
    }

    /// Whether an allocation begins at this address, and on which device.
    pub fn device_of(&self, address: u64) -> Option<Ordinal> {
        self.blocks.get(&address).map(|block| block.device)
    }

    /// Notes that the allocation at this address was freed: its pool keeps it. What counts of it where the pool is gone:
    /// the driver has it when the session's work is done.
    pub fn note_free(&mut self, address: u64) -> Option<Charge> {
        let block = self.blocks.remove(&address)?;
        let Ok(pool) = self.pools.get_mut(block.pool) else {
            return block.charge;
        };
        pool.freed += block.len;
        pool.used -= block.len;
        if pool.imported {
            return block.charge;
        }
        self.untrimmed |= pool.freed > KEPT;
        pool.kept.merge(block.charge?);
        None
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
    pub fn clear(&mut self, gpu: &Gpu) {
        for (address, block) in std::mem::take(&mut self.blocks) {
            free(gpu, address, block.device);
        }
        for pool in self.pools.drain() {
            let _ = gpu.devices[pool.device].make_current(&gpu.driver);
            if let Err(status) = gpu.driver.memory.pool_destroy(pool.raw) {
                tracing::error!("cuMemPoolDestroy of a session that ended: {status}");
                gpu.note_status(status);
            }
        }
    }
}

/// Frees memory of a session that has ended, on a stream with no work of the session's.
pub fn free(gpu: &Gpu, address: u64, device: Ordinal) {
    let device = &gpu.devices[device];
    let freed = device
        .make_current(&gpu.driver)
        .and_then(|()| device.take_stream(&gpu.driver, 0))
        .and_then(|stream| {
            let freed = gpu.driver.memory.pool_free(address, stream);
            device.keep_stream(&gpu.driver, 0, stream);
            freed
        });
    // An allocation of a graph that has not run is no memory.
    if let Err(status) = freed {
        tracing::debug!("cuMemFreeAsync of a session that ended: {status}");
        gpu.note_status(status);
    }
}

/// Sets the threshold that a program asks for, and [`KEPT`] at the least.
///
/// # Errors
/// The driver's.
pub fn set_threshold(gpu: &Gpu, pool: CUmemoryPool, bytes: u64) -> Result<(), CUresult> {
    let mut value = bytes.max(KEPT);
    let which = CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let driver = &gpu.driver.memory;
    driver.pool_set_attribute(pool, which, &mut value)
}
