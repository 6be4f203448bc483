//! Memory pools of sessions, and their allocations.
//!
//! These are pools of the driver, which therefore determines stream-ordered reuse, attributes and graph memory nodes.
//! Each session has its own, including one that replaces the device's default pool, so a pool's attributes are private
//! to the session, and the memory that it retains is freed with the session.

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::slots::Slots;
use crate::engine::gpu::Gpu;
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use std::collections::BTreeMap;

/// Minimum release threshold of a pool, in bytes. The driver releases memory above the threshold whenever a stream is
/// synchronized, which costs more than 100 µs each time; the server does that only while a session is idle.
pub const KEPT: u64 = 64 << 20;

/// A pool.
#[derive(Debug)]
pub struct Pool {
    /// The driver's pool.
    pub raw: CUmemoryPool,
    /// Server's ordinal.
    pub device: Ordinal,
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` as the program set it; the driver's value is at least [`KEPT`].
    pub threshold: u64,
    /// Bytes freed since `take_untrimmed` last returned true.
    freed: u64,
    /// Bytes allocated from it.
    used: u64,
    /// Charge for the freed memory that it retains, as an upper bound.
    kept: Charge,
    /// Whether another process created it; the session does not allocate from it then.
    imported: bool,
}

impl Pool {
    /// Returns the charge for the memory that it retains, which the driver has once the session's work is done.
    pub fn into_kept(self) -> Charge {
        self.kept
    }
}

/// An allocation from a pool.
#[derive(Debug)]
struct Block {
    len: u64,
    charge: Option<Charge>,
    /// Handle of the pool, which may have been destroyed.
    pool: u64,
    /// Server's ordinal.
    device: Ordinal,
}

/// The memory pools of a session, and their allocations.
#[derive(Debug)]
pub struct Pools {
    /// By handle.
    pub pools: Slots<Pool>,
    blocks: BTreeMap<u64, Block>,
    /// Whether a pool may retain more than its threshold.
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
    /// Whether it has no pools and no allocations.
    pub fn is_untouched(&self) -> bool {
        self.pools.len() == 0 && self.blocks.is_empty()
    }

    /// Adds a pool that the session created.
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
        // Fails for an imported pool, which has no threshold.
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

    /// Adds an imported pool.
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

    /// Checks whether another allocation is allowed.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the session has too many.
    pub fn has_room(&self) -> Result<(), CUresult> {
        if self.blocks.len() < bounds::POOL_BLOCKS {
            Ok(())
        } else {
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        }
    }

    /// Charges an allocation of `len` bytes that is about to be made, first against the memory that its pool retains.
    ///
    /// # Errors
    /// As [`Account::take`]; `CUDA_ERROR_INVALID_VALUE` for an unknown pool.
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

    /// Returns the charge of an allocation that failed.
    pub fn put_back(&mut self, pool: u64, charge: Charge) {
        if let Ok(pool) = self.pools.get_mut(pool) {
            pool.kept.merge(charge);
        }
    }

    /// Whether any pool retains freed memory.
    pub fn keep_any(&self) -> bool {
        self.pools.iter().any(|pool| pool.kept.bytes() > 0)
    }

    /// Trims each pool to `keep` bytes of retained memory (`cuMemPoolTrimTo`) and updates the charges. None of the
    /// session's work may be in flight.
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
            // The driver's granularity exceeds the requested sizes; never charge more than was freed.
            let now = now.min(pool.kept.bytes());
            if let Err(status) = known.and_then(|()| pool.kept.resize(now)) {
                tracing::debug!("what a pool keeps: {status}");
            }
        }
    }

    /// Records an allocation and its charge.
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

    /// Returns the device of the allocation that contains an address.
    pub fn device_at(&self, address: u64) -> Option<Ordinal> {
        let (start, block) = self.blocks.range(..=address).next_back()?;
        (address - start < block.len).then_some(block.device)
    }

    /// Returns the device of the allocation that begins at this address, if there is one.
    pub fn device_of(&self, address: u64) -> Option<Ordinal> {
        self.blocks.get(&address).map(|block| block.device)
    }

    /// Records that the allocation at this address was freed: its pool retains the memory. If the pool is imported or
    /// was destroyed, returns the allocation's charge: the driver has the memory once the session's work is done.
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

    /// Records a new release threshold of a pool, in bytes.
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

    /// Whether a pool may retain more than its threshold; resets the state.
    pub fn take_untrimmed(&mut self) -> bool {
        for pool in self.pools.iter_mut().filter(|_| self.untrimmed) {
            pool.freed = 0;
        }
        std::mem::take(&mut self.untrimmed)
    }

    /// Whether a pool may retain more than its threshold.
    pub fn is_untrimmed(&self) -> bool {
        self.untrimmed
    }

    /// Frees all allocations on a stream without work of the session, and destroys the pools.
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

/// Frees memory of an ended session on a stream without work of that session (`cuMemFreeAsync`).
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
    // Fails for an allocation node whose graph has never run.
    if let Err(status) = freed {
        tracing::debug!("cuMemFreeAsync of a session that ended: {status}");
        gpu.note_status(status);
    }
}

/// Sets a pool's release threshold to the requested bytes, but at least [`KEPT`].
///
/// # Errors
/// The driver's status.
pub fn set_threshold(gpu: &Gpu, pool: CUmemoryPool, bytes: u64) -> Result<(), CUresult> {
    let mut value = bytes.max(KEPT);
    let which = CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let driver = &gpu.driver.memory;
    driver.pool_set_attribute(pool, which, &mut value)
}
