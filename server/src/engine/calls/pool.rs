//! Memory pools and stream-ordered allocation.

use super::Reply;
use crate::engine::base::account::Memory;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::objects::pools;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::memory::{PoolAccess, PoolAlloc, PoolAttribute, PoolCreate, PoolFree};
use mpsshim_proto::message::{Object, Range};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long a trim waits until the session's work completes.
const SETTLING: Duration = Duration::from_micros(500);

impl Session {
    /// `cuMemPoolCreate`.
    pub fn pool_create(&mut self, shared: &Shared, body: PoolCreate) -> Reply {
        let properties = self.properties(shared, &body.properties)?;
        let device = shared.gpu.device(body.properties.location.id as u32)?;
        device.make_current(&shared.gpu.driver)?;
        let properties = CUmemPoolProps {
            kind: properties.kind,
            handle_types: properties.requested_handle_types,
            location: properties.location,
            max_size: body.max_size as usize,
            usage: properties.usage,
            ..CUmemPoolProps::default()
        };
        let mut raw = CUmemoryPool::NULL;
        shared
            .gpu
            .driver
            .memory
            .pool_create(&mut raw, &properties)?;
        if let Err(status) =
            self.objects
                .pools
                .add(&shared.gpu, body.handle, &self.account, raw, device.ordinal)
        {
            let _ = shared.gpu.driver.memory.pool_destroy(raw);
            return Err(status.into());
        }
        Ok(Vec::new())
    }

    /// `cuMemPoolDestroy`.
    pub fn pool_destroy(&mut self, shared: &Shared, body: Object) -> Result<(), CallError> {
        let pool = self
            .objects
            .pools
            .pools
            .remove(body.object)
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        shared.gpu.devices[pool.device].make_current(&shared.gpu.driver)?;
        shared.gpu.driver.memory.pool_destroy(pool.raw)?;
        self.objects.leaving.push(pool.into_kept());
        Ok(())
    }

    /// The driver's pool behind a handle; its device's context is made current.
    pub fn pool(&self, shared: &Shared, handle: u64) -> Result<CUmemoryPool, CUresult> {
        let Ok(pool) = self.objects.pools.pools.get(handle) else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        shared.gpu.devices[pool.device].make_current(&shared.gpu.driver)?;
        Ok(pool.raw)
    }

    /// `cuMemAllocFromPoolAsync`. In a stream that captures, the driver makes it a node of the graph.
    pub fn pool_alloc(&mut self, shared: &Shared, body: PoolAlloc) -> Reply {
        let Ok(pool) = self.objects.pools.pools.get(body.pool) else {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        };
        let (pool, device) = (pool.raw, pool.device);
        self.objects.pools.has_room()?;
        let index = self.objects.streams.index(body.stream)?;
        if self.objects.streams.at(index)?.capturing {
            return self.pool_alloc_node(shared, &body, pool, device);
        }
        let charge = self.with_room(shared, (Memory::Device(device), body.len), |session| {
            session.objects.pools.take(body.pool, body.len)
        })?;
        let (index, stream) = match self.prepare(&shared.gpu, body.stream) {
            Ok(ready) => ready,
            Err(error) => {
                self.objects.pools.put_back(body.pool, charge);
                return Err(error);
            }
        };
        let mut start = 0;
        let made = shared
            .gpu
            .driver
            .memory
            .pool_alloc(&mut start, body.len as usize, pool, stream);
        if let Err(status) = made {
            self.objects.pools.put_back(body.pool, charge);
            return Err(status.into());
        }
        if let Err(status) = self.submitted(&shared.gpu, index, 1) {
            // The client never learns of this memory.
            let _ = shared.gpu.driver.memory.pool_free(start, stream);
            self.objects.pools.put_back(body.pool, charge);
            return Err(status);
        }
        self.objects
            .pools
            .note((start, body.len), Some(charge), body.pool, device);
        Ok(Range {
            start,
            len: body.len,
        }
        .as_bytes()
        .to_vec())
    }

    /// `cuMemAllocFromPoolAsync` in a capture: the memory belongs to the graph, and is charged with the graph's
    /// instances.
    fn pool_alloc_node(
        &mut self,
        shared: &Shared,
        body: &PoolAlloc,
        pool: CUmemoryPool,
        device: Ordinal,
    ) -> Reply {
        let (index, stream) = self.prepare(&shared.gpu, body.stream)?;
        let (mut start, len) = (0, body.len);
        shared
            .gpu
            .driver
            .memory
            .pool_alloc(&mut start, len as usize, pool, stream)?;
        let graph = match self.captured_graph(shared, index, body.stream) {
            Ok(graph) => graph,
            Err(status) => {
                // The client never learns of this memory.
                let _ = shared.gpu.driver.memory.pool_free(start, stream);
                return Err(status.into());
            }
        };
        self.objects.graphs.given((start, len), graph, device);
        Ok(Range { start, len }.as_bytes().to_vec())
    }

    /// `cuMemFreeAsync` of memory from a pool. In a stream that captures, the driver makes it a node of the graph, and
    /// the memory is freed when the graph is launched.
    pub fn pool_free(&mut self, shared: &Shared, body: PoolFree) -> Result<(), CallError> {
        let pooled = self.objects.pools.device_of(body.address).is_some();
        if !pooled && !self.objects.graphs.memory.begins(body.address) {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        if !pooled && !self.is_capturing(body.stream) && !self.may_use_graph_memory(&shared.gpu) {
            return Err(CallError::Full);
        }
        let (index, stream) = self.prepare(&shared.gpu, body.stream)?;
        shared.gpu.driver.memory.pool_free(body.address, stream)?;
        if self.objects.streams.at(index)?.capturing {
            let graph = self.captured_graph(shared, index, body.stream)?;
            self.objects.graphs.memory.freed_by(body.address, graph);
        } else if pooled {
            let charge = self.objects.pools.note_free(body.address);
            self.objects.leaving.extend(charge);
        } else {
            self.objects.graphs.memory.freed(body.address);
            self.objects.graphs.discharge();
        }
        self.submitted(&shared.gpu, index, 1)
    }

    /// `cuMemPoolGetAttribute`.
    pub fn pool_get_attribute(&mut self, shared: &Shared, body: PoolAttribute) -> Reply {
        let pool = self.pool(shared, body.pool)?;
        if body.attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD {
            return Ok(super::value(
                self.objects.pools.pools.get(body.pool)?.threshold,
            ));
        }
        let mut value = 0;
        shared
            .gpu
            .driver
            .memory
            .pool_get_attribute(pool, body.attribute, &mut value)?;
        Ok(super::value(value))
    }

    /// `cuMemPoolSetAttribute`.
    pub fn pool_set_attribute(&mut self, shared: &Shared, body: PoolAttribute) -> Reply {
        let pool = self.pool(shared, body.pool)?;
        if body.attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD {
            pools::set_threshold(&shared.gpu, pool, body.value)?;
            self.objects.pools.note_threshold(body.pool, body.value);
            return Ok(Vec::new());
        }
        let mut value = body.value;
        shared
            .gpu
            .driver
            .memory
            .pool_set_attribute(pool, body.attribute, &mut value)?;
        Ok(Vec::new())
    }

    /// `cuMemPoolSetAccess`.
    pub fn pool_set_access(&mut self, shared: &Shared, call: Call<'_, PoolAccess>) -> Reply {
        let Call { body, message } = call;
        let accesses = self.accesses_behind::<PoolAccess>(shared, message, body.count)?;
        let pool = self.pool(shared, body.pool)?;
        shared
            .gpu
            .driver
            .memory
            .pool_set_access(pool, accesses.as_ptr(), accesses.len())?;
        Ok(Vec::new())
    }

    /// `cuMemPoolGetAccess`.
    pub fn pool_get_access(&mut self, shared: &Shared, call: Call<'_, PoolAccess>) -> Reply {
        let Call { body, message } = call;
        let accesses = self.accesses_behind::<PoolAccess>(shared, message, body.count)?;
        let access = accesses.first().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let pool = self.pool(shared, body.pool)?;
        let mut flags = 0;
        shared
            .gpu
            .driver
            .memory
            .pool_get_access(&mut flags, pool, &access.location)?;
        Ok(super::value(flags as u64))
    }

    /// Makes pools return memory beyond their release thresholds to the driver, if the session's work completes soon.
    pub fn settle_pools(&mut self, shared: &Shared) {
        if !self.objects.pools.keep_any() {
            return;
        }
        let began = Instant::now();
        while self.has_work_in_flight(&shared.gpu) {
            if began.elapsed() > SETTLING {
                return;
            }
            std::hint::spin_loop();
        }
        self.objects
            .pools
            .settle(&shared.gpu, |pool| pool.threshold);
    }

    /// Makes the pools of an idle session return memory beyond their release thresholds to the driver.
    pub fn trim_pools(&mut self, shared: &Shared) {
        if self.objects.pools.is_untrimmed() && !self.has_work_in_flight(&shared.gpu) {
            self.objects.pools.take_untrimmed();
            self.synchronize_idle(&shared.gpu);
            self.objects
                .pools
                .settle(&shared.gpu, |pool| pool.threshold.max(pools::KEPT));
        }
    }

    /// `cuMemPoolTrimTo`.
    pub fn pool_trim(&mut self, shared: &Shared, body: PoolAttribute) -> Reply {
        // The driver notices freed memory only when it is synchronized with. The client may have waited for its work
        // before the server has learned of the completion.
        let began = Instant::now();
        while self.has_work_in_flight(&shared.gpu) && began.elapsed() < SETTLING {
            std::hint::spin_loop();
        }
        self.synchronize_idle(&shared.gpu);
        let pool = self.pool(shared, body.pool)?;
        shared
            .gpu
            .driver
            .memory
            .pool_trim_to(pool, body.value as usize)?;
        if !self.has_work_in_flight(&shared.gpu) {
            self.objects
                .pools
                .settle(&shared.gpu, |pool| pool.threshold.max(pools::KEPT));
        }
        Ok(Vec::new())
    }
}
