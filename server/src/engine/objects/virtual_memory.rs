//! Virtual memory management for sessions: their reservations, the physical memory they hold, what is mapped where.
//!
//! A session's reservation is part of one great reservation that the server makes when it starts: later the driver may
//! have put something of its own where a hint points (it did, 2 MiB at the arena's beginning, after other clients had
//! used pools). The driver judges mappings and access; what is checked here is that a session names only its own.

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::slots::Slots;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::virtual_arena::UNIT;
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A reservation.
#[derive(Debug)]
struct Reservation {
    /// Bytes.
    len: u64,
    /// What the arena gave for it: more, where it had to be aligned.
    taken: (u64, u64),
}

/// Physical memory, held by handles and mappings, and counted as long as there is one.
///
/// A descriptor that was exported holds the memory, too, wherever it is, and nobody can tell when the last of them is
/// closed: exported memory is counted until its session ends. What is imported counts as far as it is mapped, whether
/// who allocated it pays or has ended; the driver does not tell its size before.
#[derive(Debug)]
pub struct Physical {
    /// The handle that it was made with.
    key: u64,
    memory: Memory,
    charge: Mutex<Charge>,
    /// The client may export it.
    exportable: bool,
    imported: bool,
    exported: AtomicBool,
}

/// A handle of physical memory.
#[derive(Debug)]
pub struct Allocation {
    /// The driver's.
    pub raw: CUmemGenericAllocationHandle,
    physical: Arc<Physical>,
}

impl Allocation {
    /// Whether the client may export it: it asked for that when it made it, or has it from another process.
    pub fn is_exportable(&self) -> bool {
        self.physical.exportable
    }

    /// A descriptor may hold the memory from now on.
    pub fn is_exported(&self) {
        self.physical.exported.store(true, Ordering::Relaxed);
    }
}

/// A mapping.
#[derive(Debug)]
struct Mapped {
    len: u64,
    /// Some device may use it.
    usable: bool,
    physical: Arc<Physical>,
}

/// What an unmapping has ended.
#[derive(Debug)]
pub struct Unmapped {
    /// Mappings, by first address.
    pub mappings: Vec<u64>,
    /// Physical memory of which nothing is left, by the handles that it was made with.
    pub physical: Vec<u64>,
}

/// What a session has of all this.
#[derive(Debug)]
pub struct VirtualMemory {
    reservations: BTreeMap<u64, Reservation>,
    reserved: u64,
    /// Handles.
    pub allocations: Slots<Allocation>,
    mappings: BTreeMap<u64, Mapped>,
    /// What counts of memory that descriptors may still hold.
    exported: Vec<(Memory, Charge)>,
}

impl Default for VirtualMemory {
    fn default() -> Self {
        VirtualMemory {
            reservations: BTreeMap::new(),
            reserved: 0,
            allocations: Slots::new(Kind::Allocation, bounds::ALLOCATIONS),
            mappings: BTreeMap::new(),
            exported: Vec::new(),
        }
    }
}

impl VirtualMemory {
    /// Reserves addresses.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, `CUDA_ERROR_INVALID_VALUE`.
    pub fn reserve(
        &mut self,
        gpu: &Gpu,
        len: u64,
        alignment: u64,
        flags: u64,
    ) -> Result<u64, CUresult> {
        let sound = len != 0
            && len.is_multiple_of(UNIT)
            && alignment & alignment.wrapping_sub(1) == 0
            && flags == 0;
        if !sound {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let extra = if alignment > UNIT { alignment } else { 0 };
        let wide = len.checked_add(extra).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        if self.reservations.len() >= bounds::RESERVATIONS
            || wide > bounds::RESERVED - self.reserved
        {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let begin = {
            let mut arena = gpu.virtual_arena.lock();
            arena.take(wide).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?
        };
        let start = begin.next_multiple_of(alignment.max(UNIT));
        self.reserved += wide;
        self.reservations.insert(
            start,
            Reservation {
                len,
                taken: (begin, wide),
            },
        );
        Ok(start)
    }

    /// A reservation that the session had with another server: what the arena gave for it.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where the addresses are taken.
    pub fn adopt_reservation(
        &mut self,
        gpu: &Gpu,
        (start, len): (u64, u64),
        taken: (u64, u64),
    ) -> Result<(), CUresult> {
        let mut arena = gpu.virtual_arena.lock();
        arena
            .take_at(taken.0, taken.1)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        self.reserved += taken.1;
        self.reservations.insert(start, Reservation { len, taken });
        Ok(())
    }

    /// What the arena gave for a reservation.
    pub fn taken_for(&self, start: u64) -> Option<(u64, u64)> {
        Some(self.reservations.get(&start)?.taken)
    }

    /// Gives a reservation back, which must have no mappings.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, or the driver's.
    pub fn free(&mut self, gpu: &Gpu, start: u64, len: u64) -> Result<(), CUresult> {
        match self.reservations.get(&start) {
            Some(found) if found.len == len => {}
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        if self.overlapping(start, len).next().is_some() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if let Some(Reservation {
            taken: (start, len),
            ..
        }) = self.reservations.remove(&start)
        {
            self.reserved -= len;
            gpu.virtual_arena.lock().give_back(start, len);
        }
        Ok(())
    }

    /// Whether `[start, start + len)` lies in one of the session's reservations.
    pub fn is_reserved(&self, start: u64, len: u64) -> bool {
        self.reservations
            .range(..=start)
            .next_back()
            .is_some_and(|(at, found)| start - at <= found.len && len <= found.len - (start - at))
    }

    fn overlapping(&self, start: u64, len: u64) -> impl Iterator<Item = u64> {
        // Mappings do not overlap, so of those that begin before only the last can reach in.
        let before = self
            .mappings
            .range(..start)
            .next_back()
            .filter(|(at, mapped)| **at + mapped.len > start)
            .map(|(at, _)| *at);
        let inside = self.mappings.range(start..start.saturating_add(len));
        before.into_iter().chain(inside.map(|(at, _)| *at))
    }

    /// The physical memory mapped at an address.
    pub fn mapped(&self, address: u64) -> Option<&Arc<Physical>> {
        let (start, found) = self.mappings.range(..=address).next_back()?;
        (address - start < found.len).then_some(&found.physical)
    }

    /// The device whose memory is mapped at an address.
    pub fn device_at(&self, address: u64) -> Option<Ordinal> {
        match self.mapped(address)?.memory {
            Memory::Device(device) => Some(device),
            Memory::Host => None,
        }
    }

    /// The end of the mapping that contains an address and may be used.
    pub fn usable_until(&self, address: u64) -> Option<u64> {
        let (start, found) = self.mappings.range(..=address).next_back()?;
        (found.usable && address - start < found.len).then_some(start + found.len)
    }

    /// Adds a handle of memory that was made, imported or mapped already.
    ///
    /// # Errors
    /// As [`Slots::insert`]; the driver's handle comes back.
    pub fn add(
        &mut self,
        handle: u64,
        raw: CUmemGenericAllocationHandle,
        physical: Arc<Physical>,
    ) -> Result<(), CUresult> {
        self.allocations
            .insert(handle, Allocation { raw, physical })
            .map(drop)
            .map_err(|(status, _)| status)
    }

    /// Physical memory that was allocated, and what it counts as.
    pub fn physical(key: u64, exportable: bool, memory: Memory, charge: Charge) -> Arc<Physical> {
        Arc::new(Physical {
            key,
            memory,
            exportable,
            charge: Mutex::new(charge),
            imported: false,
            exported: AtomicBool::new(false),
        })
    }

    /// Physical memory of another.
    ///
    /// # Errors
    /// As [`Account::take`].
    pub fn imported(account: &Account, memory: Memory) -> Result<Arc<Physical>, CUresult> {
        Ok(Arc::new(Physical {
            key: 0,
            exportable: true,
            memory,
            charge: Mutex::new(account.take(memory, 0)?),
            imported: true,
            exported: AtomicBool::new(false),
        }))
    }

    /// Gives up a hold of memory. What was exported stays counted. With the last hold, the handle that it was made with.
    fn let_go(&mut self, physical: Arc<Physical>) -> Option<u64> {
        let last = Arc::into_inner(physical)?;
        let key = Some(last.key);
        if !last.exported.into_inner() {
            return key;
        }
        let charge = last.charge.into_inner();
        match self.exported.iter_mut().find(|(of, _)| *of == last.memory) {
            Some((_, all)) => all.merge(charge),
            None => self.exported.push((last.memory, charge)),
        }
        key
    }

    /// Maps memory into a reservation.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` outside the session's own reservations, or the driver's.
    pub fn map(
        &mut self,
        gpu: &Gpu,
        (start, len): (u64, u64),
        handle: u64,
        offset: u64,
        flags: u64,
    ) -> Result<(), CUresult> {
        let Ok(allocation) = self.allocations.get(handle) else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        if !self.is_reserved(start, len) || self.mappings.len() >= bounds::MAPPINGS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let physical = allocation.physical.clone();
        let raw = allocation.raw;
        let mut before = None;
        if physical.imported {
            let mut charge = physical.charge.lock();
            let whole = offset.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            before = Some(charge.bytes());
            let now = whole.max(charge.bytes());
            charge.resize(now)?;
        }
        gpu.driver
            .mem_map(start, len as usize, offset as usize, raw, flags)
            .inspect_err(|_| {
                if let Some(bytes) = before {
                    let _ = physical.charge.lock().resize(bytes);
                }
            })?;
        self.mappings.insert(
            start,
            Mapped {
                len,
                usable: false,
                physical,
            },
        );
        Ok(())
    }

    /// Undoes mappings; no work may touch them any more.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` outside the session's own reservations, or the driver's.
    pub fn unmap(&mut self, gpu: &Gpu, start: u64, len: u64) -> Result<Unmapped, CUresult> {
        if !self.is_reserved(start, len) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        gpu.driver.mem_unmap(start, len as usize)?;
        let mut gone = Unmapped {
            mappings: self.overlapping(start, len).collect(),
            physical: Vec::new(),
        };
        for at in &gone.mappings {
            if let Some(mapped) = self.mappings.remove(at) {
                gone.physical.extend(self.let_go(mapped.physical));
            }
        }
        Ok(gone)
    }

    /// First addresses and lengths of the mappings in a range.
    pub fn mappings_in(&self, start: u64, len: u64) -> Vec<(u64, u64)> {
        let starts = self.overlapping(start, len);
        let whole = starts.filter_map(|at| Some((at, self.mappings.get(&at)?.len)));
        whole.collect()
    }

    /// The handle that the memory behind another handle was made with.
    pub fn key_of(&self, handle: u64) -> Option<u64> {
        let allocation = self.allocations.get(handle).ok()?;
        Some(allocation.physical.key)
    }

    /// Gives devices access to mappings, or takes it.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` outside the session's own reservations, or the driver's.
    pub fn set_access(
        &mut self,
        gpu: &Gpu,
        start: u64,
        len: u64,
        accesses: &[CUmemAccessDesc],
    ) -> Result<(), CUresult> {
        if !self.is_reserved(start, len) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        gpu.driver.memory.mem_set_accesses(
            start,
            len as usize,
            accesses.as_ptr(),
            accesses.len(),
        )?;
        let usable = accesses.iter().any(|access| access.flags != 0);
        let touched: Vec<u64> = self.overlapping(start, len).collect();
        for at in touched {
            if let Some(mapped) = self.mappings.get_mut(&at) {
                mapped.usable = usable;
            }
        }
        Ok(())
    }

    /// Gives a handle back. If it was the last hold of its memory: the handle that it was made with.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, or the driver's.
    pub fn release(&mut self, gpu: &Gpu, handle: u64) -> Result<Option<u64>, CUresult> {
        let allocation = self
            .allocations
            .remove(handle)
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let released = gpu.driver.mem_release(allocation.raw);
        let gone = self.let_go(allocation.physical);
        released.map(|()| gone)
    }

    /// All its physical memory, by the handles that it was made with.
    pub fn keys(&self) -> BTreeSet<u64> {
        let handles = self.allocations.iter().map(|one| one.physical.key);
        let mapped = self.mappings.values().map(|mapped| mapped.physical.key);
        handles.chain(mapped).collect()
    }

    /// Frees everything. Nothing may be in flight.
    pub fn clear(&mut self, gpu: &Gpu) {
        let note = |what: &str, result: Result<(), CUresult>| {
            if let Err(status) = result {
                tracing::error!("{what} of a session that ended: {status}");
                gpu.note_status(status);
            }
        };
        for (start, mapped) in std::mem::take(&mut self.mappings) {
            note(
                "cuMemUnmap",
                gpu.driver.mem_unmap(start, mapped.len as usize),
            );
        }
        for allocation in self.allocations.drain() {
            note("cuMemRelease", gpu.driver.mem_release(allocation.raw));
        }
        for Reservation { taken, .. } in std::mem::take(&mut self.reservations).into_values() {
            gpu.virtual_arena.lock().give_back(taken.0, taken.1);
        }
    }
}
