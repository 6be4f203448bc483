//! Memory pools of sessions, and their allocations.
//!
//! Each session has its own pools, including one that replaces the device's default pool, so a pool's attributes are
//! private to the session, and the memory that it retains is freed with the session.
//!
//! The server divides the memory of most pools itself ([`divided`]), so that it can be given to the next server. The pool of
//! the driver behind it judges arguments and makes graph memory nodes. A pool that can be exported, or was imported,
//! has the driver's memory.

pub mod divided;

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::block_table::FreeEntries;
use crate::engine::base::bounds;
use crate::engine::base::description::Description;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::slots::Slots;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::pool_memory::Chunk;
use divided::{Divided, Point};
use mpsshim_api::cuda::*;
use mpsshim_model::bonds::Bonds;
use mpsshim_proto::handle::{Handle, Kind};
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
    /// Its settings, if the server divides its memory.
    pub settings: Option<Settings>,
}

/// Settings of a pool whose memory the server divides.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `CUmemAllocationType`.
    pub kind: u32,
    /// `CUmemPoolProps::maxSize`.
    pub max_size: u64,
    /// `CU_MEMPOOL_ATTR_REUSE_*`, in the order of their numbers from 1.
    pub reuse: [u64; 3],
}

impl Settings {
    /// First value of each of [`Settings::reuse`].
    pub const REUSE: u64 = 1;
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
    /// Whether it is memory that the server has divided.
    divided: bool,
    /// Its entry in the description's table.
    entry: Option<u32>,
}

/// The memory pools of a session, and their allocations.
#[derive(Debug)]
pub struct Pools {
    /// By handle.
    pub pools: Slots<Pool>,
    blocks: BTreeMap<u64, Block>,
    /// Memory that the server divides, by the handle of the pool, which may have been destroyed.
    divided: BTreeMap<u64, Divided>,
    /// Number of blocks of the driver's pools, and of blocks without an entry in the description's table.
    foreign: usize,
    /// Entries of the description's table without a block.
    entries: FreeEntries,
    /// Allocations of an earlier server whose memory has not been mapped yet, by address: bytes and entry.
    expected: Option<BTreeMap<u64, (u64, u32)>>,
    /// Whether a pool may retain more than its threshold.
    untrimmed: bool,
}

impl Default for Pools {
    fn default() -> Self {
        Pools {
            pools: Slots::new(Kind::MemPool, bounds::POOLS),
            blocks: BTreeMap::new(),
            divided: BTreeMap::new(),
            foreign: 0,
            entries: FreeEntries::default(),
            expected: None,
            untrimmed: false,
        }
    }
}

impl Pools {
    /// Bonds of pools and allocations that another server cannot make again.
    pub fn bonds(&self) -> Bonds {
        let bound = self.foreign > 0 || self.has_pools_of_driver();
        Bonds::default().with(Bonds::POOLS, bound)
    }

    /// Whether it has a pool with memory of the driver's.
    pub fn has_pools_of_driver(&self) -> bool {
        self.pools.iter().any(|pool| pool.settings.is_none())
    }

    /// Creates a pool (`cuMemPoolCreate`) under a handle, on a device. The server divides its memory, unless it can be
    /// exported or has a special use.
    ///
    /// # Errors
    /// The driver's status, or as [`Pools::add`].
    pub fn create(
        &mut self,
        gpu: &Gpu,
        (handle, device): (u64, Ordinal),
        account: &Account,
        properties: &CUmemPoolProps,
    ) -> Result<(), CUresult> {
        gpu.devices[device].make_current(&gpu.driver)?;
        let is_plain =
            properties.handle_types == 0 && properties.usage == 0 && !gpu.virtual_arena.is_empty();
        let settings = is_plain.then_some(Settings {
            kind: properties.kind,
            max_size: properties.max_size as u64,
            reuse: [Settings::REUSE; 3],
        });
        let driver = &gpu.driver.memory;
        let mut raw = CUmemoryPool::NULL;
        driver.pool_create(&mut raw, properties)?;
        self.add(gpu, handle, account, (raw, settings), device)
            .inspect_err(|_| {
                let _ = driver.pool_destroy(raw);
            })
    }

    /// Sets which devices may access a pool (`cuMemPoolSetAccess`).
    ///
    /// # Errors
    /// The driver's status; `CUDA_ERROR_INVALID_VALUE` for an unknown pool.
    pub fn set_access(
        &mut self,
        gpu: &Gpu,
        handle: u64,
        accesses: &[CUmemAccessDesc],
    ) -> Result<(), CUresult> {
        let pool = self.pools.get(handle);
        let pool = pool.map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        gpu.devices[pool.device].make_current(&gpu.driver)?;
        let driver = &gpu.driver.memory;
        driver.pool_set_access(pool.raw, accesses.as_ptr(), accesses.len())?;
        match self.divided.get_mut(&handle) {
            Some(memory) => memory.set_access(gpu, accesses),
            None => Ok(()),
        }
    }

    /// Adds a pool of the driver's. With `settings`, the server divides its memory.
    ///
    /// # Errors
    /// As [`Slots::insert`].
    fn add(
        &mut self,
        gpu: &Gpu,
        handle: u64,
        account: &Account,
        (raw, settings): (CUmemoryPool, Option<Settings>),
        device: Ordinal,
    ) -> Result<(), CUresult> {
        let kept = account.take(Memory::Device(device), 0)?;
        if settings.is_none() {
            // Fails for an imported pool, which has no threshold.
            let _ = set_threshold(gpu, raw, 0);
        }
        let max_size = settings.as_ref().map(|settings| settings.max_size);
        let pool = Pool {
            raw,
            device,
            threshold: 0,
            freed: 0,
            used: 0,
            kept,
            imported: false,
            settings,
        };
        self.pools
            .insert(handle, pool)
            .map_err(|(status, _)| status)?;
        if let Some(max_size) = max_size {
            let memory = self.divided.entry(handle);
            let memory = memory.or_insert_with(|| Divided::new(device));
            (memory.max_size, memory.has_ended) = (max_size, false);
        }
        Ok(())
    }

    /// Notes that a pool was destroyed. Its memory is freed once nothing is allocated from it.
    pub fn note_end(&mut self, handle: u64) {
        if let Some(memory) = self.divided.get_mut(&handle) {
            memory.has_ended = true;
            self.untrimmed = true;
        }
    }

    /// The memory of a pool that the server divides.
    pub fn divided_mut(&mut self, handle: u64) -> Option<&mut Divided> {
        self.divided.get_mut(&handle)
    }

    /// The memory of a pool that the server divides.
    pub fn divided(&self, handle: u64) -> Option<&Divided> {
        self.divided.get(&handle)
    }

    /// Whether the allocation that begins at this address is memory that the server has divided.
    pub fn is_divided(&self, address: u64) -> bool {
        self.blocks.get(&address).is_some_and(|block| block.divided)
    }

    /// Records an allocation of memory that the server has divided, also in the description if there is one.
    pub fn note_divided(
        &mut self,
        (start, len): (u64, u64),
        pool: u64,
        description: Option<&Description>,
    ) {
        let Some(memory) = self.divided.get(&pool) else {
            return;
        };
        let entry = description.and_then(|_| self.entries.take());
        if let (Some(description), Some(entry)) = (description, entry) {
            description.blocks().set(entry, start, len);
            note_highest(description, pool, memory);
        }
        self.foreign += usize::from(description.is_some() && entry.is_none());
        let block = Block {
            len,
            charge: None,
            pool,
            device: memory.device,
            divided: true,
            entry,
        };
        self.blocks.insert(start, block);
    }

    /// Notes the highest values of a new pool in a description.
    pub fn begin_marks(&self, handle: u64, description: &Description) {
        if let Some(memory) = self.divided.get(&handle) {
            note_highest(description, handle, memory);
        }
    }

    /// Resets a highest value of a pool (`CU_MEMPOOL_ATTR_*_HIGH`).
    pub fn reset_highest(&mut self, handle: u64, attribute: u32, description: &Description) {
        if let Some(memory) = self.divided.get_mut(&handle) {
            memory.reset_highest(attribute);
            note_highest(description, handle, memory);
        }
    }

    /// Records that such an allocation was freed behind the work before a point.
    pub fn note_divided_free(
        &mut self,
        address: u64,
        point: Point,
        description: Option<&Description>,
    ) {
        let Some(block) = self.blocks.remove(&address) else {
            return;
        };
        match (description, block.entry) {
            (Some(description), Some(entry)) => {
                description.blocks().clear(entry);
                self.entries.give_back(entry);
            }
            (Some(_), None) => self.foreign -= 1,
            (None, _) => {}
        }
        if let Some(memory) = self.divided.get_mut(&block.pool) {
            memory.free(address, block.len, point);
            self.untrimmed |= memory.has_ended;
        }
        if let Ok(pool) = self.pools.get_mut(block.pool) {
            pool.freed += block.len;
            self.untrimmed |= pool.freed > KEPT;
        }
    }

    /// Adds a chunk of an earlier server's to the memory of a pool, with the allocations in it.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for allocations that cannot be in it.
    pub fn adopt(
        &mut self,
        pool: u64,
        chunk: Chunk,
        description: &Description,
    ) -> Result<(), CUresult> {
        let expected = self.expected.get_or_insert_with(|| {
            let (expected, end) = description.blocks().allocations();
            self.entries = FreeEntries::beside(&expected, end);
            expected
        });
        let (start, end, device) = (chunk.start, chunk.start + chunk.len, chunk.device);
        let memory = self.divided.entry(pool).or_insert_with(|| {
            let mut memory = Divided::new(device);
            memory.has_ended = true;
            memory
        });
        memory.add(chunk);
        let inside: Vec<_> = expected
            .range(start..end)
            .map(|(at, found)| (*at, *found))
            .collect();
        for (at, (len, entry)) in inside {
            memory.adopt(at, len)?;
            let block = Block {
                len,
                charge: None,
                pool,
                device,
                divided: true,
                entry: Some(entry),
            };
            self.blocks.insert(at, block);
        }
        Ok(())
    }

    /// Withholds free memory from allocations: work of an earlier server that runs again may use it.
    pub fn withhold(&mut self) {
        self.divided.values_mut().for_each(Divided::withhold);
    }

    /// Removes free memory that the server divides from each pool, until at most `keep` bytes are left. None of the
    /// session's work may be in flight.
    pub fn take_surplus(&mut self, keep: &impl Fn(&Pool) -> u64) -> Vec<Chunk> {
        let mut surplus = Vec::new();
        for (handle, memory) in &mut self.divided {
            let keep = self.pools.get(*handle).map_or(0, keep);
            surplus.append(&mut memory.take_surplus(keep));
        }
        self.divided
            .retain(|_, memory| !memory.has_ended || !memory.is_empty());
        surplus
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
        self.add(gpu, handle, account, (raw, None), device)?;
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
            || self.divided.values().any(Divided::has_surplus)
    }

    /// Trims each pool to `keep` bytes of retained memory (`cuMemPoolTrimTo`) and updates the charges. None of the
    /// session's work may be in flight.
    pub fn settle(&mut self, gpu: &Gpu, keep: &impl Fn(&Pool) -> u64) {
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

    /// Records an allocation of the driver's and its charge.
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
            divided: false,
            entry: None,
        };
        if let Ok(pool) = self.pools.get_mut(pool) {
            pool.used += len;
        }
        self.foreign += 1;
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

    /// Records that the driver's allocation at this address was freed: its pool retains the memory. If the pool is imported or
    /// was destroyed, returns the allocation's charge: the driver has the memory once the session's work is done.
    pub fn note_free(&mut self, address: u64) -> Option<Charge> {
        let block = self.blocks.remove(&address)?;
        self.foreign -= 1;
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

    /// Length of the allocation that begins at an address, in bytes.
    pub fn len_of(&self, address: u64) -> Option<u64> {
        Some(self.blocks.get(&address)?.len)
    }

    /// Whether `[address, address + len)` lies in the memory of a pool that the server divides, allocated or not.
    pub fn has_memory(&self, address: u64, len: u64) -> bool {
        let mut all = self.divided.values();
        all.any(|memory| memory.has(address, len))
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
            if !block.divided {
                free(gpu, address, block.device);
            }
        }
        let divided = std::mem::take(&mut self.divided).into_values();
        for chunk in divided.flat_map(Divided::into_chunks) {
            gpu.free_chunk(chunk);
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

/// Notes the highest values of a pool in a description.
fn note_highest(description: &Description, handle: u64, memory: &Divided) {
    if !memory.has_ended {
        let pool = Handle(handle).index() as usize;
        description.blocks().set_marks(pool, memory.highest());
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
