//! Memory pools. They exist in the server, where each session has its own in place of a device's default pool; the client
//! records which pool is current, and the allocations by address.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::handshake::MAX_DEVICES;
use mpsshim_proto::message::memory::{
    Access, Opaque, PoolAccess, PoolAlloc, PoolAttribute, PoolCreate, PoolFree, PoolImport,
    PoolImportPointer, Properties,
};
use mpsshim_proto::message::{Object, Op, Range, Value};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use crate::ffi::Status;
use crate::proxy::context;
use crate::proxy::extents::{self, Extent, Source};
use crate::proxy::memory;
use crate::proxy::objects::{Entry, Table};
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::Session;
use crate::proxy::virtual_memory::{ACCESSES, access_list, to_server};

static POOLS: Table<Pool> = Table::new(Kind::MemPool);
/// Handles of the default pool and of the current pool of each device, by the server's ordinal; 0 before the first use.
static DEFAULT: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];
static CURRENT: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];

/// Client-side state of a pool.
#[derive(Debug, Default)]
pub struct Pool {
    /// Server's ordinal.
    device: AtomicU32,
    is_default: AtomicBool,
    handle_types: AtomicU32,
}

fn pool(handle: u64) -> Status<&'static Entry<Pool>> {
    POOLS.get(handle).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// `CUmemAllocationHandleType`s in which allocations from a pool can be exported.
pub fn handle_types(handle: u64) -> u32 {
    POOLS
        .get(handle)
        .map_or(0, |pool| pool.handle_types.load(Ordering::Relaxed))
}

/// `cuMemPoolCreate`.
pub fn create(session: &Session, properties: &CUmemPoolProps) -> Status<u64> {
    make(session, properties, false)
}

fn make(session: &Session, properties: &CUmemPoolProps, is_default: bool) -> Status<u64> {
    let location = to_server(session, &properties.location)?;
    let entry = POOLS.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let body = PoolCreate {
        handle: POOLS.handle_of(entry),
        max_size: properties.max_size as u64,
        properties: Properties {
            kind: properties.kind,
            handle_types: properties.handle_types,
            location,
            usage: properties.usage,
            ..Properties::default()
        },
    };
    let made = session.request(Op::PoolCreate, &body, &[]);
    if let Err(status) = made.and_then(|answer| answer.status.ok()) {
        POOLS.recycle(entry);
        return Err(status);
    }
    entry.device.store(location.id as u32, Ordering::Relaxed);
    entry.is_default.store(is_default, Ordering::Relaxed);
    entry
        .handle_types
        .store(properties.handle_types, Ordering::Relaxed);
    Ok(POOLS.publish(entry))
}

/// The default pool of a device, by the program's ordinal.
pub fn default_pool(session: &Session, ordinal: CUdevice) -> Status<u64> {
    static MAKING: Mutex<()> = Mutex::new(());
    session.check()?;
    let device = context::device(ordinal)?;
    let server = device.attach(session)?;
    let place = DEFAULT
        .get(server as usize)
        .ok_or(CUDA_ERROR_INVALID_DEVICE)?;
    let _making = MAKING.lock();
    let known = place.load(Ordering::Acquire);
    if known != 0 {
        return Ok(known);
    }
    let properties = CUmemPoolProps {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: ordinal,
        },
        ..CUmemPoolProps::default()
    };
    let made = make(session, &properties, true)?;
    place.store(made, Ordering::Release);
    Ok(made)
}

/// The current pool of a device, by the program's ordinal.
pub fn current(session: &Session, ordinal: CUdevice) -> Status<u64> {
    if let Some(server) = context::device(ordinal)?.server
        && let Some(place) = CURRENT.get(server as usize)
    {
        let known = place.load(Ordering::Acquire);
        if known != 0 {
            return Ok(known);
        }
    }
    default_pool(session, ordinal)
}

/// Makes a pool the current one of a device.
pub fn set_current(session: &Session, ordinal: CUdevice, handle: u64) -> Status {
    session.check()?;
    let device = context::device(ordinal)?.attach(session)?;
    let entry = pool(handle)?;
    if entry.device.load(Ordering::Relaxed) != device {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let place = CURRENT
        .get(device as usize)
        .ok_or(CUDA_ERROR_INVALID_DEVICE)?;
    place.store(handle, Ordering::Release);
    Ok(())
}

/// `cuMemPoolDestroy`. A device whose current pool it was has its default pool again.
pub fn destroy(session: &Session, handle: u64) -> Status {
    session.check()?;
    let entry = pool(handle)?;
    if entry.is_default.load(Ordering::Relaxed) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let entry = POOLS.retire(handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    for place in &CURRENT {
        let _ = place.compare_exchange(handle, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
    session.submit(Op::PoolDestroy, &Object { object: handle })?;
    POOLS.recycle(entry);
    Ok(())
}

/// `cuMemAllocFromPoolAsync`.
pub fn alloc(session: &Session, len: u64, handle: u64, stream: StreamRef) -> Status<u64> {
    let entry = pool(handle)?;
    if len == 0 {
        return Ok(0);
    }
    let body = PoolAlloc {
        pool: handle,
        len,
        stream: stream.handle(),
    };
    let range: Range = memory::request_with_room(session, Op::PoolAlloc, &body, &[])?.read()?;
    let start = range.start;
    note(Range { start, len }, handle, entry);
    Ok(start)
}

/// Frees memory from a pool in the order of a stream. `Ok(false)`: no allocation from a pool begins there.
pub fn free(session: &Session, address: u64, stream: StreamRef) -> Status<bool> {
    session.check()?;
    let pooled = |extent: &Extent| matches!(extent.source, Source::Pooled { .. });
    if extents::remove(address, pooled).is_none() && !memory::is_graph_memory(address) {
        return Ok(false);
    }
    let body = PoolFree {
        address,
        stream: stream.handle(),
    };
    stream::submit(session, stream, Op::PoolFree, &body, &[])?;
    memory::follow_graph_memory(|memory| memory.freed(address));
    Ok(true)
}

/// Whether this is a pool.
pub fn check(handle: u64) -> Status {
    pool(handle).map(drop)
}

/// `cuMemPoolImportFromShareableHandle`, from a descriptor.
pub fn import(
    session: &Session,
    descriptor: BorrowedFd<'_>,
    ordinal: CUdevice,
    flags: u64,
) -> Status<u64> {
    let device = context::device(ordinal)?.attach(session)?;
    let entry = POOLS.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let body = PoolImport {
        handle: POOLS.handle_of(entry),
        kind: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        device,
        flags,
    };
    let made = session.request_sending(Op::PoolImport, &body, &[], descriptor, 0);
    if let Err(status) = made.and_then(|answer| answer.status.ok()) {
        POOLS.recycle(entry);
        return Err(status);
    }
    entry.device.store(device, Ordering::Relaxed);
    entry.is_default.store(false, Ordering::Relaxed);
    entry
        .handle_types
        .store(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, Ordering::Relaxed);
    Ok(POOLS.publish(entry))
}

/// `cuMemPoolImportPointer`.
pub fn import_pointer(session: &Session, handle: u64, data: Opaque) -> Status<u64> {
    let entry = pool(handle)?;
    let body = PoolImportPointer { pool: handle, data };
    let range: Range = session.request(Op::PoolImportPointer, &body, &[])?.read()?;
    note(range, handle, entry);
    Ok(range.start)
}

/// Remembers an allocation from a pool.
fn note(range: Range, handle: u64, entry: &Pool) {
    extents::insert(
        range.start,
        Extent {
            len: range.len,
            device: entry.device.load(Ordering::Relaxed),
            context: None,
            id: extents::next_id(),
            usable: true,
            source: Source::Pooled { pool: handle },
        },
    );
}

/// `cuMemPoolGetAttribute`.
pub fn attribute(session: &Session, handle: u64, attribute: u32) -> Status<u64> {
    pool(handle)?;
    let body = PoolAttribute {
        pool: handle,
        value: 0,
        attribute,
        pad: 0,
    };
    let answer: Value = session.request(Op::PoolGetAttribute, &body, &[])?.read()?;
    Ok(answer.value)
}

/// `cuMemPoolSetAttribute`.
pub fn set_attribute(session: &Session, handle: u64, attribute: u32, value: u64) -> Status {
    pool(handle)?;
    let body = PoolAttribute {
        pool: handle,
        value,
        attribute,
        pad: 0,
    };
    session
        .request(Op::PoolSetAttribute, &body, &[])?
        .status
        .ok()
}

/// `cuMemPoolTrimTo`.
pub fn trim(session: &Session, handle: u64, keep: u64) -> Status {
    pool(handle)?;
    let body = PoolAttribute {
        pool: handle,
        value: keep,
        attribute: 0,
        pad: 0,
    };
    session.request(Op::PoolTrim, &body, &[])?.status.ok()
}

/// `cuMemPoolSetAccess`.
pub fn set_access(session: &Session, handle: u64, accesses: &[CUmemAccessDesc]) -> Status {
    pool(handle)?;
    if accesses.len() > ACCESSES {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let list = access_list(session, accesses)?;
    let body = PoolAccess {
        pool: handle,
        count: list.len() as u32,
        pad: 0,
    };
    session
        .request(Op::PoolSetAccess, &body, list.as_bytes())?
        .status
        .ok()
}

/// `cuMemPoolGetAccess`.
pub fn access(session: &Session, handle: u64, location: &CUmemLocation) -> Status<u32> {
    pool(handle)?;
    let body = PoolAccess {
        pool: handle,
        count: 1,
        pad: 0,
    };
    let access = Access {
        location: to_server(session, location)?,
        flags: 0,
        pad: 0,
    };
    let answer: Value = session
        .request(Op::PoolGetAccess, &body, access.as_bytes())?
        .read()?;
    Ok(answer.value as u32)
}
