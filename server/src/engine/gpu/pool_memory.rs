//! Device memory of pools that the server divides itself: mapped in the virtual arena, and held by the keeper.

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::rations::Holder;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::devices;
use crate::keeper::{self, Name};
use mpsshim_api::cuda::*;
use std::os::fd::{AsFd, OwnedFd};

/// A mapping of device memory.
#[derive(Debug)]
pub struct Chunk {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Server's ordinal.
    pub device: Ordinal,
    handle: CUmemGenericAllocationHandle,
    /// Held until the driver has released the memory.
    _charge: Charge,
}

impl Chunk {
    fn name(&self) -> Name {
        Name::numbered(keeper::Kind::Memory, self.start)
    }
}

impl Gpu {
    /// Allocates device memory of `len` bytes, a multiple of [`mpsshim_proto::arena::VIRTUAL_UNIT`], for a pool.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` or driver errors; then nothing is charged or held.
    pub fn make_chunk(
        &self,
        account: &Account,
        device: Ordinal,
        len: u64,
    ) -> Result<Chunk, CUresult> {
        let charge = account.take(Memory::Device(device), len)?;
        let start = self.virtual_arena.lock().take(len);
        let start = start.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let filled = self.devices[device].fill(&self.driver, (start, len));
        let handle = filled.inspect_err(|_| {
            self.virtual_arena.lock().give_back(start, len);
            self.devices[device].note_short();
        })?;
        Ok(Chunk {
            start,
            len,
            device,
            handle,
            _charge: charge,
        })
    }

    /// Maps memory of an earlier server's at its old address.
    ///
    /// # Errors
    /// As [`Gpu::make_chunk`]; `CUDA_ERROR_INVALID_VALUE` if the addresses are in use.
    pub fn adopt_chunk(
        &self,
        account: &Account,
        device: u32,
        (start, len): (u64, u64),
        memory: OwnedFd,
    ) -> Result<Chunk, CUresult> {
        let device = self.device(device)?;
        let charge = account.take(Memory::Device(device.ordinal), len)?;
        let taken = self.virtual_arena.lock().take_at(start, len);
        taken.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let filled = device.fill_with(&self.driver, (start, len), memory);
        let handle = filled.inspect_err(|_| self.virtual_arena.lock().give_back(start, len))?;
        Ok(Chunk {
            start,
            len,
            device: device.ordinal,
            handle,
            _charge: charge,
        })
    }

    /// Passes a chunk to the keeper for the next server. Returns whether the keeper holds it.
    pub fn keep_chunk(&self, chunk: &Chunk, holder: &Holder) -> bool {
        let exported = devices::export(&self.driver, chunk.handle);
        exported.is_ok_and(|fd| self.keeping.keep(chunk.name(), fd.as_fd(), holder))
    }

    /// Sets which devices may access a chunk.
    ///
    /// # Errors
    /// Driver errors.
    pub fn set_chunk_access(
        &self,
        chunk: &Chunk,
        accesses: &[CUmemAccessDesc],
    ) -> Result<(), CUresult> {
        if accesses.is_empty() {
            return Ok(());
        }
        self.devices[chunk.device].make_current(&self.driver)?;
        let (len, count) = (chunk.len as usize, accesses.len());
        let driver = &self.driver.memory;
        driver.mem_set_accesses(chunk.start, len, accesses.as_ptr(), count)
    }

    /// Returns a chunk to the driver. No work may access it any more.
    pub fn free_chunk(&self, chunk: Chunk) {
        self.keeping.forget(chunk.name());
        let freed = self.devices[chunk.device]
            .make_current(&self.driver)
            .and_then(|()| self.driver.mem_unmap(chunk.start, chunk.len as usize))
            .and_then(|()| self.driver.mem_release(chunk.handle));
        match freed {
            Ok(()) => (self.virtual_arena.lock()).give_back(chunk.start, chunk.len),
            // The addresses remain taken.
            Err(status) => {
                tracing::error!("device memory of a pool was not freed: {status}");
                self.note_status(status);
            }
        }
    }
}
