//! Virtual memory management of sessions: address reservations, physical memory and mappings.
//!
//! A session's reservation is part of one large reservation that the server makes when it starts. A separate
//! reservation with an address hint could fail later, because the driver may have placed an allocation of its own there
//! (observed: 2 MiB at the arena's beginning, after other clients had used pools). The driver validates mappings and
//! access; this module only checks that a session names its own.

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::slots::Slots;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::devices::export;
use mpsshim_api::cuda::*;
use mpsshim_proto::arena::VIRTUAL_UNIT as UNIT;
use mpsshim_proto::handle::Kind;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A reservation.
#[derive(Debug)]
struct Reservation {
    /// Bytes.
    len: u64,
    /// The range taken from the arena: larger than the reservation if it had to be aligned.
    taken: (u64, u64),
}

/// Physical memory, charged while any handle or mapping holds it.
///
/// An exported descriptor holds the memory too, in whichever process it is, and the server cannot tell when the last
/// one is closed; exported memory therefore stays charged until its session ends. Imported memory is charged to the
/// importer as far as it is mapped, regardless of whether its allocator is still charged: the driver does not report
/// its size earlier.
#[derive(Debug)]
pub struct Physical {
    /// The handle with which it was created or imported.
    key: u64,
    memory: Memory,
    charge: Mutex<Charge>,
    /// Whether the client may export it.
    exportable: bool,
    imported: bool,
    exported: AtomicBool,
    /// Its descriptor, if an earlier server had created or imported it. This server has imported it, and drivers do not export
    /// imported memory.
    descriptor: Option<OwnedFd>,
}

impl Physical {
    /// Keeps the descriptor by which it is imported from an earlier server. It must not be shared yet.
    pub fn keep_descriptor(self: &mut Arc<Self>, descriptor: OwnedFd) {
        if let Some(physical) = Arc::get_mut(self) {
            physical.descriptor = Some(descriptor);
        }
    }

    fn note_exported(&self) -> bool {
        !self.exported.swap(true, Ordering::Relaxed)
    }

    /// The handle with which it was created or imported.
    pub fn key(&self) -> u64 {
        self.key
    }
}

/// A handle to physical memory.
#[derive(Debug)]
pub struct Allocation {
    /// The driver's handle.
    pub raw: CUmemGenericAllocationHandle,
    physical: Arc<Physical>,
    /// Whether it was retained from a mapping (`cuMemRetainAllocationHandle`).
    pub retained: bool,
}

impl Allocation {
    /// Whether the client may export it: it was created as exportable, or imported from another process.
    pub fn is_exportable(&self) -> bool {
        self.physical.exportable
    }

    /// A descriptor of memory of the client's own that an earlier server had created.
    pub fn kept_descriptor(&self) -> Option<BorrowedFd<'_>> {
        let own = Some(&self.physical).filter(|physical| !physical.imported)?;
        own.descriptor.as_ref().map(OwnedFd::as_fd)
    }

    /// Records that it was exported, so that a descriptor may hold the memory from now on. Returns whether it is the first
    /// time.
    pub fn note_exported(&self) -> bool {
        self.physical.note_exported()
    }
}

/// A mapping.
#[derive(Debug)]
struct Mapped {
    len: u64,
    /// Whether any device has access.
    usable: bool,
    physical: Arc<Physical>,
}

/// A holder of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    /// A mapping, by its first address.
    Mapping(u64),
    /// A handle.
    Handle(u64),
}

/// The effects of an unmapping.
#[derive(Debug)]
pub struct Unmapped {
    /// Removed mappings, by start address.
    pub mappings: Vec<u64>,
    /// Physical memory that nothing holds any more, by the handles with which it was created.
    pub physical: Vec<u64>,
}

/// The virtual memory of a session.
#[derive(Debug)]
pub struct VirtualMemory {
    reservations: BTreeMap<u64, Reservation>,
    reserved: u64,
    /// Physical memory by handle.
    pub allocations: Slots<Allocation>,
    mappings: BTreeMap<u64, Mapped>,
    /// All mappings and handles, by the key of their memory.
    holders: BTreeSet<(u64, Holder)>,
    /// Charges for released memory that exported descriptors may still hold.
    exported: Vec<(Memory, Charge)>,
}

impl Default for VirtualMemory {
    fn default() -> Self {
        VirtualMemory {
            reservations: BTreeMap::new(),
            reserved: 0,
            allocations: Slots::new(Kind::Allocation, bounds::ALLOCATIONS),
            mappings: BTreeMap::new(),
            holders: BTreeSet::new(),
            exported: Vec::new(),
        }
    }
}

impl VirtualMemory {
    /// Reserves an address range of `len` bytes (`cuMemAddressReserve`) and returns its start.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for invalid arguments, `CUDA_ERROR_OUT_OF_MEMORY` if a limit is reached or the arena
    /// is full.
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

    /// Restores a reservation from the previous server at the same address. `taken` is the range that the arena gave
    /// for it.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the addresses are in use.
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

    /// Returns the range, start and bytes, that the arena gave for a reservation.
    pub fn taken_for(&self, start: u64) -> Option<(u64, u64)> {
        Some(self.reservations.get(&start)?.taken)
    }

    /// Frees a reservation, which must have no mappings (`cuMemAddressFree`).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if there is no such reservation or it has mappings.
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
        // Mappings do not overlap, so only the last mapping that begins before the range can extend into it.
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

    /// The end of the mapping that contains an address, if a device may access it.
    pub fn usable_until(&self, address: u64) -> Option<u64> {
        let (start, found) = self.mappings.range(..=address).next_back()?;
        (found.usable && address - start < found.len).then_some(start + found.len)
    }

    /// Adds a handle for memory that was created, imported or retained from a mapping.
    ///
    /// # Errors
    /// As [`Slots::insert`]; the driver's handle is not released then.
    pub fn add(
        &mut self,
        handle: u64,
        raw: CUmemGenericAllocationHandle,
        physical: Arc<Physical>,
    ) -> Result<(), CUresult> {
        let key = physical.key;
        let allocation = Allocation {
            raw,
            retained: handle != key,
            physical,
        };
        let inserted = self.allocations.insert(handle, allocation);
        inserted.map_err(|(status, _)| status)?;
        self.holders.insert((key, Holder::Handle(handle)));
        Ok(())
    }

    /// Another driver's handle of the memory that was created or imported with this one, also if that is released.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` if nothing holds such memory, or the driver's status.
    fn handle_again(
        &self,
        gpu: &Gpu,
        key: u64,
    ) -> Result<(CUmemGenericAllocationHandle, Arc<Physical>), CUresult> {
        let (holder, physical) = self.held(key).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let mut raw = CUmemGenericAllocationHandle::NULL;
        match holder {
            Holder::Mapping(start) => gpu.driver.memory.mem_retain(&mut raw, start)?,
            Holder::Handle(handle) => {
                let exported;
                let descriptor = match &physical.descriptor {
                    Some(kept) => kept,
                    None => {
                        exported = export(&gpu.driver, self.allocations.get(handle)?.raw)?;
                        &exported
                    }
                };
                let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
                let number = descriptor.as_raw_fd() as usize;
                gpu.driver.memory.mem_import(&mut raw, number, kind)?;
            }
        }
        Ok((raw, physical.clone()))
    }

    /// The memory with this key, and one of its holders: a mapping, if there is one.
    fn held(&self, key: u64) -> Option<(Holder, &Arc<Physical>)> {
        let mut holders = self.holders.range((key, Holder::Mapping(0))..);
        let (_, holder) = *holders.next().filter(|(of, _)| *of == key)?;
        let physical = match holder {
            Holder::Mapping(start) => &self.mappings.get(&start)?.physical,
            Holder::Handle(handle) => &self.allocations.get(handle).ok()?.physical,
        };
        Some((holder, physical))
    }

    /// Restores a handle that an earlier server had retained from a mapping of the memory with this key.
    ///
    /// # Errors
    /// As [`VirtualMemory::add`]; driver errors.
    pub fn retain_again(&mut self, gpu: &Gpu, handle: u64, key: u64) -> Result<(), CUresult> {
        let (raw, physical) = self.handle_again(gpu, key)?;
        let added = self.add(handle, raw, physical);
        added.inspect_err(|_| {
            let _ = gpu.driver.mem_release(raw);
        })
    }

    /// Restores a mapping of the memory with this key, of which the client may have no handle any more.
    ///
    /// # Errors
    /// As [`VirtualMemory::map`].
    pub fn map_again(
        &mut self,
        gpu: &Gpu,
        range: (u64, u64),
        key: u64,
        offset: u64,
        flags: u64,
    ) -> Result<(), CUresult> {
        if let Ok(allocation) = self.allocations.get(key) {
            let (raw, physical) = (allocation.raw, allocation.physical.clone());
            return self.map_physical(gpu, range, (raw, physical), offset, flags);
        }
        let (raw, physical) = self.handle_again(gpu, key)?;
        let mapped = self.map_physical(gpu, range, (raw, physical), offset, flags);
        gpu.driver.mem_release(raw).and(mapped)
    }

    /// Notes that the memory with this key was exported.
    pub fn note_exported(&self, key: u64) {
        if let Some((_, physical)) = self.held(key) {
            physical.note_exported();
        }
    }

    /// Wraps newly allocated physical memory and its charge.
    pub fn physical(key: u64, exportable: bool, memory: Memory, charge: Charge) -> Arc<Physical> {
        Arc::new(Physical {
            key,
            memory,
            exportable,
            charge: Mutex::new(charge),
            imported: false,
            exported: AtomicBool::new(false),
            descriptor: None,
        })
    }

    /// Wraps physical memory that another process allocated. `key`: the handle with which it is imported.
    ///
    /// # Errors
    /// As [`Account::take`].
    pub fn imported(
        key: u64,
        account: &Account,
        memory: Memory,
    ) -> Result<Arc<Physical>, CUresult> {
        Ok(Arc::new(Physical {
            key,
            exportable: true,
            memory,
            charge: Mutex::new(account.take(memory, 0)?),
            imported: true,
            exported: AtomicBool::new(false),
            descriptor: None,
        }))
    }

    /// Drops one hold on physical memory. Exported memory stays charged. Returns the handle with which the memory was
    /// created if this was the last hold.
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

    /// Maps physical memory into a reservation (`cuMemMap`).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a range outside the session's own reservations, or the driver's status.
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
        let of = (allocation.raw, allocation.physical.clone());
        self.map_physical(gpu, (start, len), of, offset, flags)
    }

    fn map_physical(
        &mut self,
        gpu: &Gpu,
        (start, len): (u64, u64),
        (raw, physical): (CUmemGenericAllocationHandle, Arc<Physical>),
        offset: u64,
        flags: u64,
    ) -> Result<(), CUresult> {
        if !self.is_reserved(start, len) || self.mappings.len() >= bounds::MAPPINGS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
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
        self.holders.insert((physical.key, Holder::Mapping(start)));
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

    /// Removes the mappings in a range (`cuMemUnmap`); no work in flight may use them.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a range outside the session's own reservations, or the driver's status.
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
                self.holders
                    .remove(&(mapped.physical.key, Holder::Mapping(*at)));
                gone.physical.extend(self.let_go(mapped.physical));
            }
        }
        Ok(gone)
    }

    /// Returns start address and length in bytes of each mapping in a range.
    pub fn mappings_in(&self, start: u64, len: u64) -> Vec<(u64, u64)> {
        let starts = self.overlapping(start, len);
        let whole = starts.filter_map(|at| Some((at, self.mappings.get(&at)?.len)));
        whole.collect()
    }

    /// Returns the handle with which the memory behind another handle was created.
    pub fn key_of(&self, handle: u64) -> Option<u64> {
        let allocation = self.allocations.get(handle).ok()?;
        Some(allocation.physical.key)
    }

    /// Grants devices access to the mappings in a range, or revokes it (`cuMemSetAccess`).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a range outside the session's own reservations, or the driver's status.
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

    /// Releases a handle (`cuMemRelease`). Returns the handle with which the memory was created if this was the last
    /// hold.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an unknown handle, or the driver's status.
    pub fn release(&mut self, gpu: &Gpu, handle: u64) -> Result<Option<u64>, CUresult> {
        let allocation = self
            .allocations
            .remove(handle)
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let held = (allocation.physical.key, Holder::Handle(handle));
        self.holders.remove(&held);
        let released = gpu.driver.mem_release(allocation.raw);
        let gone = self.let_go(allocation.physical);
        released.map(|()| gone)
    }

    /// Returns all physical memory of the session, by the handles with which it was created.
    pub fn keys(&self) -> BTreeSet<u64> {
        self.holders.iter().map(|(key, _)| *key).collect()
    }

    /// Unmaps and releases everything; no work may be in flight.
    pub fn clear(&mut self, gpu: &Gpu) {
        let note = |what: &str, result: Result<(), CUresult>| {
            if let Err(status) = result {
                tracing::error!("{what} of a session that ended: {status}");
                gpu.note_status(status);
            }
        };
        self.holders.clear();
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
