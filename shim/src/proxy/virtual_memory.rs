//! Virtual memory management: the program's reservations, allocations and mappings.
//!
//! Reservations and mappings exist in the server; the client's records answer queries and detect errors without a message.
//! A handle's references are counted here, and the server's object ends with the last.

use mpsshim_proto::arena::VIRTUAL_UNIT as UNIT;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mpsshim_api::cuda::*;
use mpsshim_proto::arena;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::memory::{
    ACCESSES_MAX, Access, AddressReserve, GetAccess, Granularity, Location, MapMemory,
    PhysicalCreate, PhysicalExport, PhysicalRetain, Properties, SetAccess,
};
use mpsshim_proto::message::{Object, Op, Range, Value};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use crate::ffi::Status;
use crate::proxy::context;
use crate::proxy::extents::{self, Extent, Source};
use crate::proxy::memory;
use crate::proxy::objects::{Entry, Table};
use crate::proxy::stream;
use crate::proxy::submit::Session;

/// Places one call may give access to.
pub const ACCESSES: usize = ACCESSES_MAX;

/// Allocations that the program holds a handle of.
static ALLOCATIONS: Table<Allocation> = Table::new(Kind::Allocation);
static RESERVATIONS: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

/// Client-side state of an allocation.
#[derive(Debug, Default)]
pub struct Allocation {
    references: AtomicU32,
    /// Bytes; `u64::MAX` of an imported one, which only the driver knows.
    len: AtomicU64,
    /// The same for all handles of the memory.
    id: AtomicU64,
    /// Server's ordinal.
    device: AtomicU32,
    properties: Mutex<CUmemAllocationProp>,
}

fn allocation(handle: u64) -> Status<&'static Entry<Allocation>> {
    ALLOCATIONS.get(handle).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// A location as the server numbers devices. Makes sure that the server has a context there.
pub fn to_server(session: &Session, location: &CUmemLocation) -> Status<Location> {
    let id = match location.kind {
        CU_MEM_LOCATION_TYPE_DEVICE => context::device(location.id)?.attach(session)? as i32,
        CU_MEM_LOCATION_TYPE_HOST
        | CU_MEM_LOCATION_TYPE_HOST_NUMA
        | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => location.id,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    Ok(Location {
        kind: location.kind,
        id,
    })
}

/// `cuMemGetAllocationGranularity`; requested once for each kind of memory.
pub fn granularity(
    session: &Session,
    properties: &CUmemAllocationProp,
    option: u32,
) -> Status<usize> {
    type Key = (u32, u32, i32, u32);
    static KNOWN: Mutex<Option<HashMap<Key, usize>>> = Mutex::new(None);
    session.check()?;
    let location = properties.location;
    let key = (properties.kind, location.kind, location.id, option);
    let plain = properties.compression_type == 0 && properties.usage == 0;
    if let Some(known) = KNOWN.lock().as_ref().and_then(|known| known.get(&key))
        && plain
    {
        return Ok(*known);
    }
    let anywhere = Location {
        // Where no kind is given, natively as for a device.
        kind: match location.kind {
            0 => CU_MEM_LOCATION_TYPE_DEVICE,
            kind => kind,
        },
        id: 0,
    };
    let body = Granularity {
        // The driver ignores the device for this query.
        properties: Properties::of(
            properties,
            to_server(session, &location).unwrap_or(anywhere),
        ),
        option,
        pad: 0,
    };
    let answer: Value = session.request(Op::Granularity, &body, &[])?.read()?;
    if plain {
        KNOWN
            .lock()
            .get_or_insert_default()
            .insert(key, answer.value as usize);
    }
    Ok(answer.value as usize)
}

/// `cuMemAddressReserve`.
pub fn reserve(session: &Session, len: u64, alignment: u64, hint: u64, flags: u64) -> Status<u64> {
    if len == 0 || !len.is_multiple_of(UNIT) || alignment & alignment.wrapping_sub(1) != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let body = AddressReserve {
        len,
        alignment,
        hint,
        flags,
    };
    let range: Range = session.request(Op::AddressReserve, &body, &[])?.read()?;
    let inside = arena::is_virtual(range.start)
        && range.len == len
        && len <= arena::VIRTUAL_ARENA_LEN - (range.start - arena::VIRTUAL_ARENA);
    if !inside {
        tracing::error!(?range, "the server reserved an invalid range of addresses");
        return Err(CUDA_ERROR_MPS_RPC_FAILURE);
    }
    RESERVATIONS.lock().insert(range.start, len);
    Ok(range.start)
}

/// `cuMemAddressFree`.
pub fn free(session: &Session, start: u64, len: u64) -> Status {
    session.check()?;
    let mut reservations = RESERVATIONS.lock();
    let mut in_use = false;
    extents::retain_in(start, len, |_, _| {
        in_use = true;
        true
    });
    if reservations.get(&start) != Some(&len) || in_use {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    session.submit(Op::AddressFree, &Range { start, len })?;
    reservations.remove(&start);
    Ok(())
}

/// The reservation that contains an address.
pub fn reservation(address: u64) -> Option<(u64, u64)> {
    let reservations = RESERVATIONS.lock();
    let (start, len) = reservations.range(..=address).next_back()?;
    (address - start < *len).then_some((*start, *len))
}

fn is_reserved(start: u64, len: u64) -> bool {
    reservation(start).is_some_and(|(at, room)| len <= room - (start - at))
}

/// Fills and publishes an entry.
fn publish(
    entry: &Entry<Allocation>,
    len: u64,
    id: u64,
    device: u32,
    properties: CUmemAllocationProp,
) -> u64 {
    entry.references.store(1, Ordering::Relaxed);
    entry.len.store(len, Ordering::Relaxed);
    entry.id.store(id, Ordering::Relaxed);
    entry.device.store(device, Ordering::Relaxed);
    *entry.properties.lock() = properties;
    ALLOCATIONS.publish(entry)
}

/// Creates a handle; `request` makes the server create the allocation.
fn with_entry<T>(
    request: impl FnOnce(u64) -> Status<T>,
) -> Status<(&'static Entry<Allocation>, T)> {
    let entry = ALLOCATIONS.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    match request(ALLOCATIONS.handle_of(entry)) {
        Ok(answer) => Ok((entry, answer)),
        Err(status) => {
            ALLOCATIONS.recycle(entry);
            Err(status)
        }
    }
}

/// `cuMemCreate`.
pub fn create(
    session: &Session,
    len: u64,
    properties: &CUmemAllocationProp,
    flags: u64,
) -> Status<u64> {
    let location = to_server(session, &properties.location)?;
    let (entry, ()) = with_entry(|handle| {
        let body = PhysicalCreate {
            handle,
            len,
            flags,
            properties: Properties::of(properties, location),
        };
        memory::request_with_room(session, Op::PhysicalCreate, &body, &[])?
            .status
            .ok()
    })?;
    let id = extents::next_id();
    Ok(publish(entry, len, id, location.id as u32, *properties))
}

/// `cuMemRelease`.
pub fn release(session: &Session, handle: u64) -> Status {
    session.check()?;
    let entry = allocation(handle)?;
    let left = entry
        .references
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            count.checked_sub(1)
        });
    match left {
        Ok(1) => {
            let Some(entry) = ALLOCATIONS.retire(handle) else {
                return Err(CUDA_ERROR_INVALID_VALUE);
            };
            session.submit(Op::PhysicalRelease, &Object { object: handle })?;
            ALLOCATIONS.recycle(entry);
            Ok(())
        }
        Ok(_) => Ok(()),
        Err(_) => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// `cuMemGetAllocationPropertiesFromHandle`.
pub fn properties(handle: u64) -> Status<CUmemAllocationProp> {
    Ok(*allocation(handle)?.properties.lock())
}

/// `cuMemMap`.
pub fn map(
    session: &Session,
    start: u64,
    len: u64,
    offset: u64,
    handle: u64,
    flags: u64,
) -> Status {
    let entry = allocation(handle)?;
    if !is_reserved(start, len) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let body = MapMemory {
        handle,
        address: start,
        len,
        offset,
        flags,
    };
    session.request(Op::MapMemory, &body, &[])?.status.ok()?;
    extents::insert(
        start,
        Extent {
            len,
            device: entry.device.load(Ordering::Relaxed),
            context: None,
            id: entry.id.load(Ordering::Relaxed),
            usable: false,
            source: Source::Mapped {
                allocation: handle,
                handle_types: entry.properties.lock().requested_handle_types,
            },
        },
    );
    Ok(())
}

/// `cuMemUnmap`, after the work that may use the memory.
pub fn unmap(session: &Session, start: u64, len: u64) -> Status {
    if len == 0 || !is_reserved(start, len) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    stream::quiesce(session, None)?;
    let body = Range { start, len };
    session.request(Op::UnmapMemory, &body, &[])?.status.ok()?;
    extents::retain_in(start, len, |_, _| false);
    Ok(())
}

/// Accesses as they travel.
pub fn access_list(session: &Session, accesses: &[CUmemAccessDesc]) -> Status<Vec<Access>> {
    let to_travel = |access: &CUmemAccessDesc| {
        Ok(Access {
            location: to_server(session, &access.location)?,
            flags: access.flags,
            pad: 0,
        })
    };
    accesses.iter().map(to_travel).collect()
}

/// `cuMemSetAccess`.
pub fn set_access(session: &Session, start: u64, len: u64, accesses: &[CUmemAccessDesc]) -> Status {
    if accesses.is_empty() || accesses.len() > ACCESSES_MAX || !is_reserved(start, len) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let list = access_list(session, accesses)?;
    let body = SetAccess {
        address: start,
        len,
        count: list.len() as u32,
        pad: 0,
    };
    session
        .request(Op::SetAccess, &body, list.as_bytes())?
        .status
        .ok()?;
    let usable = accesses.iter().any(|access| access.flags != 0);
    extents::retain_in(start, len, |_, extent| {
        extent.usable = usable;
        true
    });
    Ok(())
}

/// `cuMemGetAccess`.
pub fn access(session: &Session, location: &CUmemLocation, address: u64) -> Status<u64> {
    let body = GetAccess {
        address,
        location: to_server(session, location)?,
    };
    let answer: Value = session.request(Op::GetAccess, &body, &[])?.read()?;
    Ok(answer.value)
}

/// `cuMemExportToShareableHandle`, to a descriptor.
pub fn export(session: &Session, handle: u64, kind: u32, flags: u64) -> Status<OwnedFd> {
    allocation(handle)?;
    let body = PhysicalExport {
        handle,
        flags,
        kind,
        pad: 0,
    };
    let (_, descriptor) = session.request_receiving(Op::PhysicalExport, &body)?;
    Ok(descriptor)
}

/// `cuMemImportFromShareableHandle`, from a descriptor.
pub fn import(session: &Session, descriptor: BorrowedFd<'_>) -> Status<u64> {
    let (entry, found) = with_entry(|handle| {
        let body = Object { object: handle };
        session
            .request_sending(Op::PhysicalImport, &body, &[], descriptor, 0)?
            .read::<Properties>()
    })?;
    let (device, properties) = described(&found);
    let id = extents::next_id();
    Ok(publish(entry, u64::MAX, id, device, properties))
}

/// The server's ordinal of the device, and the properties as the program sees them.
fn described(found: &Properties) -> (u32, CUmemAllocationProp) {
    let device = found.location.id as u32;
    let location = CUmemLocation {
        kind: found.location.kind,
        id: context::ordinal_of(device).unwrap_or(found.location.id),
    };
    (device, found.at(location))
}

/// `cuMemRetainAllocationHandle`: the handle that the program still has, or another of the same memory.
pub fn retain(session: &Session, address: u64) -> Status<u64> {
    let (start, extent) = extents::find(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let Source::Mapped {
        allocation,
        handle_types,
    } = extent.source
    else {
        return Err(CUDA_ERROR_INVALID_VALUE);
    };
    if let Some(entry) = ALLOCATIONS.get(allocation) {
        let held = entry
            .references
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
                (count > 0).then_some(count + 1)
            });
        if held.is_ok() {
            return Ok(allocation);
        }
    }
    let (entry, found) = with_entry(|handle| {
        let body = PhysicalRetain { handle, address };
        session
            .request(Op::PhysicalRetain, &body, &[])?
            .read::<Properties>()
    })?;
    let (device, properties) = described(&found);
    let handle = publish(entry, extent.len, extent.id, device, properties);
    extents::retain_in(start, 1, |_, extent| {
        extent.source = Source::Mapped {
            allocation: handle,
            handle_types,
        };
        true
    });
    Ok(handle)
}
