//! Device memory and pinned host memory.

use super::Reply;
use crate::engine::base::account::Memory;
use crate::engine::base::bounds;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::lasting::memory as lasting;
use crate::engine::lasting::memory::Place;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::message::{Attach, HostAlloc, MANAGED, MemGrant, MemInfo, PointerQuery, Range};
use mpsshim_proto::shm;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long freeing memory may block a slow-lane thread until the session's work completes.
const SETTLING: Duration = Duration::from_micros(100);
/// How long `cuMemGetInfo` waits for memory that the client has freed.
const MOMENT: Duration = Duration::from_millis(50);
/// How long an allocation waits for memory that its session has freed. Memory of images that the reaper unloads is free
/// within five seconds.
const PATIENCE: Duration = Duration::from_secs(6);

impl Session {
    /// Grants a mapping of device memory, from which the client serves its allocations.
    pub fn mem_grant(&mut self, shared: &Shared, body: MemGrant) -> Reply {
        let device = shared.gpu.device(body.device)?;
        let memory = Memory::Device(device.ordinal);
        let grant = self.with_room(shared, (memory, body.len), |session| {
            device.grant(&shared.gpu.driver, &session.account, body.len)
        })?;
        let range = Range {
            start: grant.start,
            len: grant.len,
        };
        let grant = Arc::new(grant);
        self.objects.grants.insert(range.start, grant.clone());
        if let Err(status) = self.share_with_peers(shared, range.start) {
            // The client never learns the address, so nothing can be in flight there.
            self.objects.grants.remove(&range.start);
            if let Err(status) = shared.gpu.revoke(grant) {
                tracing::error!("device memory that was not granted was not freed: {status}");
                shared.gpu.note_status(status);
            }
            return Err(status.into());
        }
        self.describe_memory(&shared.images, &grant);
        Ok(range.as_bytes().to_vec())
    }

    /// Takes device memory back. The client has waited for its work, and the server usually learns of the completion
    /// within microseconds; otherwise the memory is freed once the session has nothing in flight.
    pub fn mem_release(&mut self, shared: &Shared, body: Range) -> Result<(), CallError> {
        let grant = self
            .objects
            .grants
            .remove(&body.start)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        grant.left_by(&self.account);
        self.describe_gone::<lasting::Memory>(body.start);
        self.objects.releasing.push(grant);
        let began = Instant::now();
        while !self.finish_releases(shared) && began.elapsed() < SETTLING {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Calls `attempt` to allocate `bytes` of memory. If there is no room, but memory that the client has freed is not
    /// back at the driver yet, the message waits for it, like `cuMemFree` waits for work natively, but not forever. A
    /// request that exceeds the session's maximum does not wait.
    ///
    /// # Errors
    /// [`CallError::Full`] while the message waits; errors of `attempt`.
    pub fn with_room<T>(
        &mut self,
        shared: &Shared,
        (memory, bytes): (Memory, u64),
        attempt: impl Fn(&mut Session) -> Result<T, CUresult>,
    ) -> Result<T, CallError> {
        let mut first = attempt(self);
        // The keeper may still hold descriptors of freed memory.
        if matches!(first, Err(CUDA_ERROR_OUT_OF_MEMORY))
            && let Some(keeper) = shared.gpu.keeping.keeper()
        {
            keeper.settle();
            first = attempt(self);
        }
        if matches!(first, Err(CUDA_ERROR_OUT_OF_MEMORY)) && shared.gpu.is_short() {
            shared.images.give_up_residents();
        }
        let may_wait = || self.gives_back() && bytes <= self.most(shared, memory);
        if !matches!(first, Err(CUDA_ERROR_OUT_OF_MEMORY)) || !may_wait() {
            self.flow.short_since = None;
            return Ok(first?);
        }
        if self.finish_releases(shared) && !self.has_work_in_flight(&shared.gpu) {
            self.objects.pools.settle(&shared.gpu, |_| 0);
            let again = attempt(self);
            if again.is_ok() || !self.account.is_leaving() {
                self.flow.short_since = None;
                return Ok(again?);
            }
        }
        let since = *self.flow.short_since.get_or_insert_with(Instant::now);
        if since.elapsed() < PATIENCE {
            // Nothing was submitted. Freeing the memory may need a quiescent point, so the session must not seem at
            // work.
            self.say_whether_at_work(&shared.gpu);
            return Err(CallError::Full);
        }
        self.flow.short_since = None;
        Err(CUDA_ERROR_OUT_OF_MEMORY.into())
    }

    /// Most bytes that the session could have if everything else were freed.
    fn most(&self, shared: &Shared, memory: Memory) -> u64 {
        let installed = match memory {
            Memory::Device(device) => shared.gpu.devices[device].memory,
            Memory::Host => u64::MAX,
        };
        installed.min(self.account.most(memory).unwrap_or(u64::MAX))
    }

    /// Whether memory that the client has freed is still charged.
    fn gives_back(&self) -> bool {
        !self.objects.releasing.is_empty()
            || !self.objects.leaving.is_empty()
            || !self.objects.graphs.leaving.is_empty()
            || self.objects.pools.keep_any()
            || self.account.is_leaving()
    }

    /// Frees memory that the client gave back, if nothing is in flight that may touch it. Returns whether none is left.
    pub fn finish_releases(&mut self, shared: &Shared) -> bool {
        self.objects
            .leaving
            .append(&mut self.objects.graphs.leaving);
        if self.objects.releasing.is_empty() && self.objects.leaving.is_empty() {
            return true;
        }
        if self.has_work_in_flight(&shared.gpu) {
            return false;
        }
        self.objects.leaving.clear();
        for grant in std::mem::take(&mut self.objects.releasing) {
            if let Err(status) = shared.gpu.revoke(grant) {
                tracing::error!("device memory given back was not freed: {status}");
                shared.gpu.note_status(status);
            }
        }
        true
    }

    /// `cuMemGetInfo`, bytes.
    pub fn mem_info(&mut self, shared: &Shared, body: Attach) -> Reply {
        let device = shared.gpu.device(body.device)?;
        device.make_current(&shared.gpu.driver)?;
        if self.account.left(Memory::Device(device.ordinal)) != u64::MAX {
            // Memory that the client has freed is back at the driver shortly, unless another client's work keeps it
            // longer.
            if self.account.is_leaving() {
                let since = *self.flow.short_since.get_or_insert_with(Instant::now);
                if since.elapsed() < MOMENT {
                    return Err(CallError::Full);
                }
            }
            self.flow.short_since = None;
            // Memory that pools retain for reuse counts as free.
            self.settle_pools(shared);
            device.make_current(&shared.gpu.driver)?;
        }
        if let Some(keeper) = shared.gpu.keeping.keeper() {
            keeper.settle();
        }
        let (mut free, mut total) = (0, 0);
        shared.gpu.driver.mem_get_info(&mut free, &mut total)?;
        let mut info = MemInfo {
            free: free as u64,
            total: total as u64,
        };
        let memory = Memory::Device(device.ordinal);
        if let Some(limit) = self.account.most(memory) {
            info.total = info.total.min(limit);
        }
        info.free = info.free.min(self.account.left(memory)).min(info.total);
        Ok(info.as_bytes().to_vec())
    }

    /// Lowers the client's own limit of device memory, in bytes.
    pub fn limit_memory(&mut self, shared: &Shared, body: LimitMemory) -> Result<(), CallError> {
        let memory = Memory::Device(shared.gpu.device(body.device)?.ordinal);
        self.account.lower_limit(memory, body.bytes);
        Ok(())
    }

    /// Allocates pinned memory: a memory file, mapped at the same address in the server and in the client. The
    /// descriptor is sent over the socket, before the answer, under the message's token.
    pub fn host_alloc(&mut self, shared: &Shared, call: Call<'_, HostAlloc>) -> Reply {
        let Call { body, message } = call;
        let device = shared.gpu.device(body.device)?;
        let len = body
            .len
            .max(1)
            .checked_next_multiple_of(4096)
            .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        // Managed memory is charged to the device, as if all of it resided there.
        let charge = match body.flags & MANAGED {
            0 => None,
            _ => {
                let memory = Memory::Device(device.ordinal);
                let attempt = |session: &mut Session| session.account.take(memory, len);
                Some(self.with_room(shared, (memory, len), attempt)?)
            }
        };
        let mut block = match self
            .objects
            .host_spare
            .iter()
            .position(|block| block.len() == len)
        {
            Some(at) => self.objects.host_spare.swap_remove(at),
            None => shared.gpu.take_block(
                (&self.account, &self.shared.held_files, self.shared.info.uid),
                device,
                len,
            )?,
        };
        block.charge = charge;
        let note = DescriptorNote {
            token: message.token,
            len,
        };
        let sent = block
            .file
            .description()
            .and_then(|fd| shm::send_packet(self.shared.socket(), note.as_bytes(), &[fd.as_fd()]));
        let range = Range {
            start: block.start(),
            len,
        };
        if sent.is_err() {
            block.charge = None;
            self.objects.host_spare.push(block);
            return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
        }
        self.objects.host.insert(range.start, block);
        let place = Place {
            len,
            device: device.ordinal.into(),
            managed: body.flags & MANAGED != 0,
        };
        self.describe_host(&shared.images, range.start, place);
        Ok(range.as_bytes().to_vec())
    }

    /// Frees pinned memory. It stays registered, because unregistering would wait for other clients' work.
    pub fn host_free(&mut self, shared: &Shared, body: Range) -> Result<(), CallError> {
        let mut block = self
            .objects
            .host
            .remove(&body.start)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        self.describe_host_end(&shared.images, body.start);
        block.charge = None;
        self.objects.host_spare.push(block);
        Ok(())
    }

    /// Removes spare pinned memory beyond the limit for reuse, oldest first.
    pub fn take_surplus_host(&mut self) -> Vec<crate::engine::gpu::host::HostBlock> {
        let mut kept: u64 = self
            .objects
            .host_spare
            .iter()
            .map(|block| block.len())
            .sum();
        let mut surplus = Vec::new();
        while kept > bounds::HOST_SPARE && !self.objects.host_spare.is_empty() {
            let block = self.objects.host_spare.remove(0);
            kept -= block.len();
            surplus.push(block);
        }
        surplus
    }

    /// `cuPointerGetAttribute` for numeric attributes of pointers that the client does not know itself.
    pub fn pointer_attribute(&mut self, shared: &Shared, body: PointerQuery) -> Reply {
        let pointer = self.place_of(body.pointer);
        self.check_device(pointer, 1)?;
        shared
            .gpu
            .any_device()
            .ok_or(CUDA_ERROR_INVALID_VALUE)?
            .make_current(&shared.gpu.driver)?;
        // The longest attribute is two words (CU_POINTER_ATTRIBUTE_P2P_TOKENS).
        let mut value = [0u64; 2];
        match body.attribute {
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            | CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
            | CU_POINTER_ATTRIBUTE_RANGE_SIZE
            | CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {}
            _ => return Err(CUDA_ERROR_NOT_SUPPORTED.into()),
        }
        shared.gpu.driver.pointer_get_attribute(
            value.as_mut_ptr().cast(),
            body.attribute,
            pointer,
        )?;
        Ok(super::value(value[0]))
    }
}
