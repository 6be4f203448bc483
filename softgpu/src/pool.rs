//! Memory pools: stream-ordered allocation.
//!
//! Freed memory stays in the pool until it is trimmed or destroyed; the same stream can reuse it at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::api::{In, Out, R, api, api_streams};
use crate::context::{Context, live};
use crate::driver::{device, driver, new_handle};
use crate::memory::{self, Kind};
use crate::node_memory;
use crate::stream::{Stream, resolve};

/// Bytes that freed memory is told apart by.
const GRAIN: u64 = 4096;

pub struct Pool {
    handle: u64,
    device: CUdevice,
    /// Values of `CU_MEMPOOL_ATTR_*`, by number.
    attributes: [AtomicU64; 9],
    /// Freed memory: start, bytes, handle of the stream.
    freed: Mutex<Vec<(u64, u64, u64)>>,
    /// Addresses of nodes that no launch made memory: start and bytes. They take nothing of the device.
    addresses: Mutex<Vec<(u64, u64)>>,
    is_default: bool,
}

impl Pool {
    pub fn handle(&self) -> u64 {
        self.handle
    }

    fn make(ordinal: CUdevice, is_default: bool) -> Arc<Pool> {
        let pool = Pool {
            handle: new_handle(),
            device: ordinal,
            attributes: [0, 1, 1, 1, 0, 0, 0, 0, 0].map(AtomicU64::new),
            freed: Mutex::default(),
            addresses: Mutex::default(),
            is_default,
        };
        Arc::new(pool)
    }

    fn attribute(&self, which: u32) -> R<&AtomicU64> {
        match which {
            1..=8 => Ok(&self.attributes[which as usize]),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// What is allocated changes by so many bytes, and what the pool has by so many.
    pub fn count_node(&self, bytes: i64, room: i64) {
        self.count(CU_MEMPOOL_ATTR_USED_MEM_CURRENT, bytes);
        self.count(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, room);
    }

    /// Ordinal of its device.
    pub fn device(&self) -> CUdevice {
        self.device
    }

    /// Keeps freed memory, which counts as its own already.
    pub fn keep(&self, start: u64, room: u64, stream: u64) {
        self.freed.lock().push((start, room, stream));
    }

    /// Keeps addresses that are no memory.
    pub fn keep_addresses(&self, start: u64, room: u64) {
        self.addresses.lock().push((start, room));
    }

    /// Waits for the work in front of frees, if the pool has freed memory: what it gives back is not mapped any more.
    fn drain(&self) -> R<()> {
        if !self.freed.lock().is_empty() || !self.addresses.lock().is_empty() {
            live()?.wait_idle();
        }
        Ok(())
    }

    fn count(&self, which: u32, add: i64) {
        let now = self.attributes[which as usize].fetch_add(add as u64, Ordering::AcqRel);
        let now = now.wrapping_add(add as u64);
        self.attributes[which as usize + 1].fetch_max(now, Ordering::AcqRel);
    }

    /// Gives freed memory back, down to `keep` bytes.
    fn trim(&self, keep: u64) {
        for (start, room) in self.addresses.lock().drain(..) {
            memory::unmap_freed(start, room);
        }
        let reserved = &self.attributes[CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as usize];
        let mut freed = self.freed.lock();
        while reserved.load(Ordering::Acquire) > keep {
            let Some((start, bytes, _)) = freed.pop() else {
                return;
            };
            memory::give_back(self.device, start, bytes);
            reserved.fetch_sub(bytes, Ordering::AcqRel);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.trim(0);
    }
}

/// The pools of a device: its own, and the current one.
#[derive(Default)]
pub struct Pools {
    default: Mutex<Option<Arc<Pool>>>,
    current: Mutex<Option<Arc<Pool>>>,
}

fn default_pool(ordinal: CUdevice) -> R<Arc<Pool>> {
    let device = device(ordinal)?;
    let mut default = device.pools.default.lock();
    if let Some(pool) = &*default {
        return Ok(pool.clone());
    }
    let pool = Pool::make(ordinal, true);
    driver()?.pools.insert(pool.handle, pool.clone());
    *default = Some(pool.clone());
    Ok(pool)
}

fn current_pool(ordinal: CUdevice) -> R<Arc<Pool>> {
    let current = device(ordinal)?.pools.current.lock().clone();
    current.map_or_else(|| default_pool(ordinal), Ok)
}

fn set_current(ordinal: CUdevice, pool: CUmemoryPool) -> R<()> {
    let pool = find(pool)?;
    *device(ordinal)?.pools.current.lock() = Some(pool);
    Ok(())
}

fn find(pool: CUmemoryPool) -> R<Arc<Pool>> {
    let found = driver()?.pools.get(pool.0);
    found.map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

fn at(location: In<CUmemLocation>, kind: u32) -> R<CUdevice> {
    let location = location.get(0)?;
    if location.kind != CU_MEM_LOCATION_TYPE_DEVICE || kind != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(location.id)
}

fn allocate(
    out: Out<u64>,
    bytes: usize,
    pool: &Arc<Pool>,
    (context, stream): (&Context, &Stream),
) -> R<()> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if bytes == 0 {
        return out.set(0);
    }
    let bytes = bytes as u64;
    if let Some(start) = node_memory::capture_allocation(stream, pool, bytes)? {
        return out.set(start);
    }
    context.waits_its_turn();
    let stream = stream.handle;
    let room = bytes
        .checked_next_multiple_of(GRAIN)
        .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let kept = {
        let mut freed = pool.freed.lock();
        let found = freed
            .iter()
            .position(|(_, kept, by)| (*kept, *by) == (room, stream));
        found.map(|at| freed.swap_remove(at).0)
    };
    let kind = Kind::Pooled(pool.clone());
    let start = match kept {
        Some(start) => memory::take_again(pool.device, start, bytes, kind)?,
        None => {
            let start = memory::allocate(0, pool.device, bytes, kind)?;
            pool.count(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, room as i64);
            start
        }
    };
    pool.count(CU_MEMPOOL_ATTR_USED_MEM_CURRENT, bytes as i64);
    out.set(start)
}

/// Frees memory of a pool: work queued before still finds it.
pub fn free(address: u64, stream: u64) -> R<()> {
    if let Some(node) = node_memory::find(address)? {
        return node.free();
    }
    let range = memory::retire(address)?;
    if let Kind::Pooled(pool) = range.kind {
        // The pool may end with its last allocation.
        if find(CUmemoryPool(pool.handle)).is_err() {
            live()?.wait_idle();
        }
        pool.count(CU_MEMPOOL_ATTR_USED_MEM_CURRENT, -(range.bytes as i64));
        let room = range.bytes.next_multiple_of(GRAIN);
        pool.keep(address, room, stream);
    }
    Ok(())
}

api_streams! { TABLE_STREAMS;
    fn cuMemAllocAsync / cuMemAllocAsync_ptsz [own] (out: Out<u64>, bytes: usize, stream: CUstream) {
        let (context, stream) = resolve(stream, own)?;
        allocate(out, bytes, &current_pool(context.device)?, (&context, &stream))
    }
    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz [own] (out: Out<u64>, bytes: usize, pool: CUmemoryPool, stream: CUstream) {
        let (context, stream) = resolve(stream, own)?;
        allocate(out, bytes, &find(pool)?, (&context, &stream))
    }
    fn cuMemFreeAsync / cuMemFreeAsync_ptsz [own] (address: u64, stream: CUstream) {
        let (context, stream) = resolve(stream, own)?;
        if address == 0 {
            return Ok(());
        }
        if node_memory::capture_free(&stream, address)? {
            return Ok(());
        }
        context.waits_its_turn();
        if memory::is_allocated(address) {
            context.wait_idle();
            return memory::free(address);
        }
        free(address, stream.handle)
    }
}

api! { TABLE;
    fn cuDeviceGetDefaultMemPool(out: Out<CUmemoryPool>, device: CUdevice) { out.set(CUmemoryPool(default_pool(device)?.handle)) }
    fn cuDeviceGetMemPool(out: Out<CUmemoryPool>, device: CUdevice) { out.set(CUmemoryPool(current_pool(device)?.handle)) }
    fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) { set_current(device, pool) }
    fn cuMemGetDefaultMemPool(out: Out<CUmemoryPool>, location: In<CUmemLocation>, kind: u32) {
        out.set(CUmemoryPool(default_pool(at(location, kind)?)?.handle))
    }
    fn cuMemGetMemPool(out: Out<CUmemoryPool>, location: In<CUmemLocation>, kind: u32) {
        out.set(CUmemoryPool(current_pool(at(location, kind)?)?.handle))
    }
    fn cuMemSetMemPool(location: In<CUmemLocation>, kind: u32, pool: CUmemoryPool) { set_current(at(location, kind)?, pool) }
    fn cuMemPoolCreate(out: Out<CUmemoryPool>, props: In<CUmemPoolProps>) {
        let props = props.get(0)?;
        let known = props.kind == CU_MEM_ALLOCATION_TYPE_PINNED && props.location.kind == CU_MEM_LOCATION_TYPE_DEVICE;
        if !known || device(props.location.id).is_err() || out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let pool = Pool::make(props.location.id, false);
        let handle = pool.handle;
        driver()?.pools.insert(handle, pool);
        out.set(CUmemoryPool(handle))
    }
    fn cuMemPoolDestroy(pool: CUmemoryPool) {
        if find(pool)?.is_default {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        find(pool)?.drain()?;
        let pool = driver()?.pools.remove(pool.0)?;
        let mut current = device(pool.device)?.pools.current.lock();
        if current.as_ref().is_some_and(|c| c.handle == pool.handle) {
            *current = None;
        }
        Ok(())
    }
    fn cuMemPoolGetAttribute(pool: CUmemoryPool, which: u32, out: Out<u64>) {
        let value = find(pool)?.attribute(which)?.load(Ordering::Acquire);
        if which <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES {
            return Out::<i32>::to(out.address()).set(value as i32);
        }
        out.set(value)
    }
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, which: u32, value: In<u64>) {
        let pool = find(pool)?;
        match which {
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.attribute(which)?.store(value.get(0)?, Ordering::Release),
            1..=3 => pool.attribute(which)?.store(In::<u32>(value.0.cast()).get(0)?.into(), Ordering::Release),
            // The highest marks can only be reset.
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH | CU_MEMPOOL_ATTR_USED_MEM_HIGH if value.get(0)? == 0 => {
                let now = pool.attribute(which - 1)?.load(Ordering::Acquire);
                pool.attribute(which)?.store(now, Ordering::Release);
            }
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    }
    fn cuMemPoolSetAccess(pool: CUmemoryPool, accesses: In<CUmemAccessDesc>, count: usize) {
        let pool = find(pool)?;
        for access in accesses.list(count.min(64))? {
            let own = access.location.id == pool.device;
            if device(access.location.id).is_err() || own && access.flags == 0 {
                return Err(CUDA_ERROR_INVALID_DEVICE);
            }
        }
        Ok(())
    }
    fn cuMemPoolGetAccess(flags: Out<u32>, pool: CUmemoryPool, location: In<CUmemLocation>) {
        find(pool)?;
        device(location.get(0)?.id)?;
        flags.set(CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    }
    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) {
        let pool = find(pool)?;
        pool.drain()?;
        pool.trim(keep as u64);
        Ok(())
    }
}
