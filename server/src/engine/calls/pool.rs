//! Memory pools and stream-ordered allocation.

use super::super::Shared;
use super::super::account::Memory;
use super::super::pools;
use super::super::session::{CallError, Session};
use super::Reply;
use mpsshim_proto::cuda::*;
use mpsshim_proto::message::memory::{PoolAccess, PoolAlloc, PoolAttribute, PoolCreate, PoolFree};
use mpsshim_proto::message::{Object, Range};
use mpsshim_proto::ring::Message;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long a trim waits to see that the session's work is done.
const SETTLING: Duration = Duration::from_micros(500);

impl Session {
    /// `cuMemPoolCreate`.
    pub fn pool_create(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: PoolCreate = self.body(message)?;
        let properties = self.properties(shared, &body.properties)?;
        let ordinal = body.properties.location.id as usize;
        shared
            .device(ordinal as u32)?
            .make_current(&shared.driver)?;
        let properties = CUmemPoolProps {
            kind: properties.kind,
            handle_types: properties.requested_handle_types,
            location: properties.location,
            max_size: body.max_size as usize,
            usage: properties.usage,
            ..CUmemPoolProps::default()
        };
        let mut raw = CUmemoryPool::NULL;
        shared.driver.memory.pool_create(&mut raw, &properties)?;
        if let Err(status) = self.pools.add(shared, body.handle, raw, ordinal) {
            let _ = shared.driver.memory.pool_destroy(raw);
            return Err(status.into());
        }
        Ok(Vec::new())
    }

    /// `cuMemPoolDestroy`.
    pub fn pool_destroy(&mut self, shared: &Shared, message: &Message) -> Result<(), CallError> {
        let body: Object = self.body(message)?;
        let pool = self
            .pools
            .pools
            .remove(body.object)
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        shared.devices[pool.device].make_current(&shared.driver)?;
        Ok(shared.driver.memory.pool_destroy(pool.raw)?)
    }

    /// The driver's pool of a handle; its device's context is made current.
    pub fn pool(&self, shared: &Shared, handle: u64) -> Result<CUmemoryPool, CUresult> {
        let Ok(pool) = self.pools.pools.get(handle) else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        shared.devices[pool.device].make_current(&shared.driver)?;
        Ok(pool.raw)
    }

    /// `cuMemAllocFromPoolAsync`. In a stream that is captured the driver makes a node of it.
    pub fn pool_alloc(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: PoolAlloc = self.body(message)?;
        let Ok(pool) = self.pools.pools.get(body.pool) else {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        };
        let (pool, device) = (pool.raw, pool.device);
        self.pools.has_room()?;
        let (index, stream) = self.prepare(shared, body.stream)?;
        let memory = Memory::Device(device);
        self.account.charge(memory, body.len)?;
        let mut start = 0;
        shared
            .driver
            .memory
            .pool_alloc(&mut start, body.len as usize, pool, stream)
            .inspect_err(|_| self.account.credit(memory, body.len))?;
        self.pools
            .note(start, body.len, body.len, body.pool, device);
        self.submitted(shared, index, 1)?;
        Ok(Range {
            start,
            len: body.len,
        }
        .as_bytes()
        .to_vec())
    }

    /// `cuMemFreeAsync` of memory from a pool.
    pub fn pool_free(&mut self, shared: &Shared, message: &Message) -> Result<(), CallError> {
        let body: PoolFree = self.body(message)?;
        let pooled = self.pools.device_of(body.address).is_some();
        if !pooled && !self.graphs.memory.begins(body.address) {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        let (index, stream) = self.prepare(shared, body.stream)?;
        shared.driver.memory.pool_free(body.address, stream)?;
        if pooled {
            self.pools.note_free(&self.account, body.address);
        } else {
            self.graphs.memory.freed(body.address);
            self.graphs.discharge();
        }
        self.submitted(shared, index, 1)
    }

    /// `cuMemPoolGetAttribute`.
    pub fn pool_get_attribute(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: PoolAttribute = self.body(message)?;
        let pool = self.pool(shared, body.pool)?;
        if body.attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD {
            return Ok(super::value(self.pools.pools.get(body.pool)?.threshold));
        }
        let mut value = 0;
        shared
            .driver
            .memory
            .pool_get_attribute(pool, body.attribute, &mut value)?;
        Ok(super::value(value))
    }

    /// `cuMemPoolSetAttribute`.
    pub fn pool_set_attribute(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: PoolAttribute = self.body(message)?;
        let pool = self.pool(shared, body.pool)?;
        if body.attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD {
            pools::set_threshold(shared, pool, body.value)?;
            self.pools.note_threshold(body.pool, body.value);
            return Ok(Vec::new());
        }
        let mut value = body.value;
        shared
            .driver
            .memory
            .pool_set_attribute(pool, body.attribute, &mut value)?;
        Ok(Vec::new())
    }

    /// `cuMemPoolSetAccess`.
    pub fn pool_set_access(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: PoolAccess = self.body(message)?;
        let accesses = self.accesses_behind::<PoolAccess>(shared, message, body.count)?;
        let pool = self.pool(shared, body.pool)?;
        shared
            .driver
            .memory
            .pool_set_access(pool, accesses.as_ptr(), accesses.len())?;
        Ok(Vec::new())
    }

    /// `cuMemPoolGetAccess`.
    pub fn pool_get_access(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: PoolAccess = self.body(message)?;
        let accesses = self.accesses_behind::<PoolAccess>(shared, message, body.count)?;
        let access = accesses.first().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let pool = self.pool(shared, body.pool)?;
        let mut flags = 0;
        shared
            .driver
            .memory
            .pool_get_access(&mut flags, pool, &access.location)?;
        Ok(super::value(flags as u64))
    }

    /// Has the pools of an idle session give back what they keep beyond their thresholds.
    pub fn trim_pools(&mut self, shared: &Shared) {
        if self.pools.is_untrimmed() && !self.has_work_in_flight(shared) {
            self.pools.take_untrimmed();
            self.synchronize_idle(shared);
        }
    }

    /// `cuMemPoolTrimTo`.
    pub fn pool_trim(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: PoolAttribute = self.body(message)?;
        // The driver takes notice of what was freed when it is synchronized with. The client may have waited for its
        // work, and the server not know yet that it is done.
        let began = Instant::now();
        while self.has_work_in_flight(shared) && began.elapsed() < SETTLING {
            std::hint::spin_loop();
        }
        self.synchronize_idle(shared);
        let pool = self.pool(shared, body.pool)?;
        shared
            .driver
            .memory
            .pool_trim_to(pool, body.value as usize)?;
        Ok(Vec::new())
    }
}
