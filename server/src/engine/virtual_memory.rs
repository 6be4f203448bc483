//! Virtual memory management for sessions: their reservations, the physical memory they hold, what is mapped where.
//!
//! A session's reservation is part of one great reservation that the server makes when it starts: later the driver may
//! have put something of its own where a hint points (it did, 2 MiB at the arena's beginning, after other clients had
//! used pools). The driver judges mappings and access; what is checked here is that a session names only its own.

use super::Shared;
use super::account::{Account, Memory};
use super::driver::Driver;
use super::ranges::RangeAllocator;
use super::slots::Slots;
use mpsshim_proto::arena::{VIRTUAL_ARENA, VIRTUAL_ARENA_LEN};
use mpsshim_proto::cuda::*;
use mpsshim_proto::handle::Kind;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Allocations a session may have handles of at a time.
const MAX_ALLOCATIONS: usize = 1 << 20;
/// Reservations a session may have at a time.
const MAX_RESERVATIONS: usize = 1 << 16;
/// Mappings a session may have at a time.
const MAX_MAPPINGS: usize = 1 << 20;
/// Bytes that one session may reserve, so that the arena is there for others too.
const MAX_RESERVED: u64 = 8 << 40;
/// An arena of less is not worth having.
const LEAST_ARENA: u64 = 64 << 30;
/// Reservations are multiples of this many bytes, whatever the driver's unit.
const UNIT: u64 = 2 << 20;

/// The addresses that programs' reservations lie in.
#[derive(Debug)]
pub struct VirtualArena(Mutex<RangeAllocator>);

impl VirtualArena {
    /// Reserves the addresses with the driver, fewer where it refuses; all of them free.
    pub fn new(driver: &Driver) -> VirtualArena {
        let mut len = VIRTUAL_ARENA_LEN;
        loop {
            let mut reserved = 0;
            let status =
                driver.mem_address_reserve(&mut reserved, len as usize, 0, VIRTUAL_ARENA, 0);
            match status {
                Ok(()) if reserved == VIRTUAL_ARENA => break,
                Ok(()) => {
                    let _ = driver.memory.mem_address_free(reserved, len as usize);
                }
                Err(_) => {}
            }
            len /= 2;
            if len < LEAST_ARENA {
                tracing::warn!(
                    "no addresses at {VIRTUAL_ARENA:#x} for programs' reservations; cuMemAddressReserve will fail"
                );
                len = 0;
                break;
            }
        }
        VirtualArena(Mutex::new(RangeAllocator::new(VIRTUAL_ARENA, len, UNIT)))
    }
}

/// A reservation.
#[derive(Debug)]
struct Reservation {
    /// Bytes.
    len: u64,
    /// What the arena gave for it: more, where it had to be aligned.
    taken: (u64, u64),
}

/// Physical memory, held by handles and mappings.
#[derive(Debug)]
pub struct Physical {
    /// Bytes charged to the session; 0 for what another has allocated.
    charged: u64,
    memory: Memory,
}

/// A handle of physical memory.
#[derive(Debug)]
pub struct Allocation {
    /// The driver's.
    pub raw: CUmemGenericAllocationHandle,
    physical: Arc<Physical>,
}

/// A mapping.
#[derive(Debug)]
struct Mapped {
    len: u64,
    /// Some device may use it.
    usable: bool,
    physical: Arc<Physical>,
}

/// What a session has of all this.
#[derive(Debug)]
pub struct VirtualMemory {
    reservations: BTreeMap<u64, Reservation>,
    reserved: u64,
    /// Handles.
    pub allocations: Slots<Allocation>,
    mappings: BTreeMap<u64, Mapped>,
}

impl Default for VirtualMemory {
    fn default() -> Self {
        VirtualMemory {
            reservations: BTreeMap::new(),
            reserved: 0,
            allocations: Slots::new(Kind::Allocation, MAX_ALLOCATIONS),
            mappings: BTreeMap::new(),
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
        shared: &Shared,
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
        if self.reservations.len() >= MAX_RESERVATIONS || wide > MAX_RESERVED - self.reserved {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let begin = {
            let mut arena = shared.virtual_arena.0.lock();
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

    /// Gives a reservation back, which must have no mappings.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, or the driver's.
    pub fn free(&mut self, shared: &Shared, start: u64, len: u64) -> Result<(), CUresult> {
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
            shared.virtual_arena.0.lock().give_back(start, len);
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
    pub fn device_at(&self, address: u64) -> Option<usize> {
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

    /// Adds a handle of memory that was made, imported (`charged` 0) or mapped already.
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

    /// Physical memory that `charged` bytes were charged for.
    pub fn physical(memory: Memory, charged: u64) -> Arc<Physical> {
        Arc::new(Physical { charged, memory })
    }

    /// Maps memory into a reservation.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` outside the session's own reservations, or the driver's.
    pub fn map(
        &mut self,
        shared: &Shared,
        (start, len): (u64, u64),
        handle: u64,
        offset: u64,
        flags: u64,
    ) -> Result<(), CUresult> {
        let Ok(allocation) = self.allocations.get(handle) else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        if !self.is_reserved(start, len) || self.mappings.len() >= MAX_MAPPINGS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let physical = allocation.physical.clone();
        let raw = allocation.raw;
        shared
            .driver
            .mem_map(start, len as usize, offset as usize, raw, flags)?;
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
    pub fn unmap(
        &mut self,
        shared: &Shared,
        account: &Account,
        start: u64,
        len: u64,
    ) -> Result<(), CUresult> {
        if !self.is_reserved(start, len) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        shared.driver.mem_unmap(start, len as usize)?;
        let gone: Vec<u64> = self.overlapping(start, len).collect();
        for at in gone {
            if let Some(mapped) = self.mappings.remove(&at) {
                settle(account, mapped.physical);
            }
        }
        Ok(())
    }

    /// Gives devices access to mappings, or takes it.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` outside the session's own reservations, or the driver's.
    pub fn set_access(
        &mut self,
        shared: &Shared,
        start: u64,
        len: u64,
        accesses: &[CUmemAccessDesc],
    ) -> Result<(), CUresult> {
        if !self.is_reserved(start, len) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        shared.driver.memory.mem_set_accesses(
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

    /// Gives a handle back.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, or the driver's.
    pub fn release(
        &mut self,
        shared: &Shared,
        account: &Account,
        handle: u64,
    ) -> Result<(), CUresult> {
        let allocation = self
            .allocations
            .remove(handle)
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let released = shared.driver.mem_release(allocation.raw);
        settle(account, allocation.physical);
        released
    }

    /// Frees everything. Nothing may be in flight.
    pub fn clear(&mut self, shared: &Shared, account: &Account) {
        let note = |what: &str, result: Result<(), CUresult>| {
            if let Err(status) = result {
                tracing::error!("{what} of a session that ended: {status}");
                shared.note_status(status);
            }
        };
        for (start, mapped) in std::mem::take(&mut self.mappings) {
            note(
                "cuMemUnmap",
                shared.driver.mem_unmap(start, mapped.len as usize),
            );
            settle(account, mapped.physical);
        }
        for allocation in self.allocations.drain() {
            note("cuMemRelease", shared.driver.mem_release(allocation.raw));
            settle(account, allocation.physical);
        }
        for Reservation { taken, .. } in std::mem::take(&mut self.reservations).into_values() {
            shared.virtual_arena.0.lock().give_back(taken.0, taken.1);
        }
    }
}

/// Counts memory as freed when nothing holds it any more.
fn settle(account: &Account, physical: Arc<Physical>) {
    if let Some(last) = Arc::into_inner(physical) {
        account.credit(last.memory, last.charged);
    }
}
