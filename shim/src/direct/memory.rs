//! Memory accounting in direct mode: every allocation is counted in the page before the driver is called, and refused if
//! it exceeds the limit. If the driver fails, the count is taken back. Addresses and handles that were not counted are
//! passed to the driver unchanged.
//!
//! An entry is removed from its table before the driver is called to free it, since afterwards the driver may give the
//! same address or handle to another thread; it is put back if the driver fails.

mod account;
mod blocks;
mod driver;
mod graphs;
mod physical;

pub use account::leave;
#[cfg(test)]
pub use driver::signatures as driver_signatures;

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use mpsshim_api::cuda::*;
use mpsshim_proto::direct::Page;
use mpsshim_proto::handshake::MAX_DEVICES;
use mpsshim_proto::user_memory::UserMemory;
use parking_lot::Mutex;

use self::account::{Account, Charge, Counted, Share, Slot};
use self::blocks::{Block, Blocks, Freed, Owner};
use self::graphs::Graphs;
use self::physical::Physicals;
use super::drain;
use super::state::{direct, server_device};
use super::wrap::wrappers;

/// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` of this process, by the server's ordinal; the server's own limit is in the page.
static LOWERED: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(u64::MAX) }; MAX_DEVICES];

/// Accounts, by the server's ordinal.
static SLOTS: OnceLock<Vec<Slot>> = OnceLock::new();

static BLOCKS: Mutex<Blocks> = Mutex::new(Blocks::new());
static PHYSICALS: Mutex<Physicals> = Mutex::new(Physicals::new());
static GRAPHS: Mutex<Graphs> = Mutex::new(Graphs::new());
/// Devices of pools by handle; `None` for a pool that is in no device's memory.
static POOLS: Mutex<Vec<(u64, Option<CUdevice>)>> = Mutex::new(Vec::new());

/// Unit of the driver's suballocation of small allocations, bytes.
const GRAIN: u64 = 512;

/// Counts in this page and in this memory of the user's from now on, beginning with the memory that is held.
pub fn count_in(page: &'static Page, user: &'static UserMemory) {
    let counted = |device: usize| Counted {
        page: &page.memory[device],
        user: Share {
            memory: user,
            device,
            place: &page.place,
            state: &page.turn.state.0,
        },
    };
    let new = |device| Slot::new(counted(device));
    let slots = SLOTS.get_or_init(|| (0..MAX_DEVICES).map(new).collect());
    for (device, slot) in slots.iter().enumerate() {
        slot.move_to(counted(device));
    }
}

/// The account of a device of the program's; `None` if the server does not have it.
fn account(device: CUdevice) -> Option<Account> {
    let server = server_device(device)?;
    Some(Account {
        slot: SLOTS.get()?.get(server)?,
        lowered: LOWERED.get(server)?,
    })
}

/// Lowers this process's limit for a device of the program's; a device that the server does not have has no limit.
/// `None`: the program has no such device.
pub fn lower_limit(device: CUdevice, bytes: u64) -> Option<()> {
    direct()?.devices.get(usize::try_from(device).ok()?)?;
    if let Some(account) = account(device) {
        account.lower(bytes);
    }
    Some(())
}

/// A context was made that is not a device's primary one.
pub fn context_made(context: u64) {
    BLOCKS.lock().context_made(context);
}

/// A context was destroyed, with the memory allocated in it.
pub fn context_ended(context: u64) {
    BLOCKS.lock().context_ended(context);
    GRAPHS.lock().context_ended(Owner::Context(context));
}

/// The primary context of a device may have ended, by its last release (`reset`: it has, although it starts anew).
pub fn primary_ended(device: CUdevice, reset: bool) {
    let goes_on = || {
        let (mut flags, mut active) = (0, 0);
        !driver::primary_state(device, &mut flags, &mut active).is_ok() || active != 0
    };
    if !reset && goes_on() {
        return;
    }
    let Some(server) = server_device(device) else {
        return;
    };
    // Pools belong to a device, not to a context: the driver tells which of their memory is left.
    let gone = |address: u64| {
        const DEVICE_ORDINAL: u32 = CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        let mut ordinal = 0;
        driver::pointer_attribute(&mut ordinal, DEVICE_ORDINAL, address) == CUDA_ERROR_INVALID_VALUE
    };
    BLOCKS.lock().primary_ended(server, gone);
    GRAPHS.lock().context_ended(Owner::Primary(server));
}

/// Reads a result that the driver has just written for the program; `None` for a null pointer.
fn written<T: Copy>(out: *const T) -> Option<T> {
    // SAFETY: not null; the driver wrote there and reported success.
    (!out.is_null()).then(|| unsafe { out.read() })
}

/// Reads an argument of the program that the driver is about to read; `None` for a null pointer.
fn given<T: Copy>(from: *const T) -> Option<T> {
    // SAFETY: not null; by the driver API's contract it points to such a struct.
    (!from.is_null()).then(|| unsafe { from.read_unaligned() })
}

/// Counts memory that is about to be allocated on a device. `Ok(None)`: the device has no limit and is not counted.
fn take(device: Option<CUdevice>, bytes: u64) -> Result<Option<Charge>, CUresult> {
    device
        .and_then(account)
        .map(|account| account.take(bytes))
        .transpose()
}

/// The device of the current context.
fn current_device() -> Option<CUdevice> {
    let mut device = 0;
    driver::current_device(&mut device)
        .is_ok()
        .then_some(device)
}

/// The owner of memory in the current context: a context that the program made, or the device's primary one.
fn owner(blocks: &Blocks, device: CUdevice) -> Owner {
    let mut context = 0;
    let known = driver::current_context(&mut context).is_ok() && blocks.was_made(context);
    match known {
        true => Owner::Context(context),
        false => Owner::Primary(server_device(device).unwrap_or(MAX_DEVICES)),
    }
}

/// Allocates in the current context. `call` allocates; `made` then returns the address or handle, and the bytes.
fn in_context(
    bytes: u64,
    call: impl FnOnce() -> CUresult,
    made: impl FnOnce() -> Option<(u64, u64)>,
    keep: impl FnOnce(&mut Blocks, u64, Block),
) -> CUresult {
    // Without a context the driver refuses.
    let device = current_device();
    let charge = match take(device, bytes) {
        Ok(charge) => charge,
        Err(status) => return status,
    };
    let status = call();
    if let (Some(mut charge), Some(device)) = (charge, device)
        && status.is_ok()
        && let Some((made, bytes)) = made()
    {
        charge.settle(bytes);
        let mut blocks = BLOCKS.lock();
        let owner = owner(&blocks, device);
        keep(&mut blocks, made, Block::new(charge, owner));
    }
    status
}

/// Linear memory: `bytes` as the driver rounds them up.
fn linear<A: Copy + Into<u64>>(
    out: *const A,
    bytes: u64,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let bytes = rounded(bytes);
    let made = || written(out).map(|address| (address.into(), bytes));
    in_context(bytes, call, made, Blocks::add)
}

/// Rows of memory. The driver returns their pitch with the address.
fn pitched<A: Copy + Into<u64>, S: Copy + TryInto<u64>>(
    out: *const A,
    pitch: *const S,
    (width, rows): (u64, u64),
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(expected) = rounded(width).checked_mul(rows) else {
        // More bytes than can exist: the driver returns the error.
        return call();
    };
    let made = || {
        let pitch = written(pitch)?.try_into().ok()?;
        Some((written(out)?.into(), u64::saturating_mul(pitch, rows)))
    };
    in_context(expected, call, made, Blocks::add)
}

fn rounded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(GRAIN).unwrap_or(u64::MAX)
}

/// An array, or one with levels. Sparse arrays and arrays that are mapped later have no memory of their own.
fn array(
    out: *const u64,
    descriptor: Option<CUDA_ARRAY3D_DESCRIPTOR>,
    levels: u32,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    const WITHOUT: u32 = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;
    let bytes = match descriptor {
        Some(descriptor) if descriptor.flags & WITHOUT == 0 => descriptor.bytes(levels),
        _ => 0,
    };
    let made = || written(out).map(|handle| (handle, bytes));
    in_context(bytes, call, made, Blocks::add_array)
}

fn destroy_array(handle: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let array = BLOCKS.lock().take_array(handle);
    let status = call();
    if let Some(array) = array
        && !status.is_ok()
    {
        BLOCKS.lock().add_array(handle, array);
    }
    status
}

/// Frees an address: memory of a context or a pool, or memory that a graph has left allocated.
fn free(address: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let block = BLOCKS.lock().take(address);
    let left = block.is_none() && GRAPHS.lock().free(address);
    let status = call();
    match (block, status.is_ok()) {
        (Some(block), false) => BLOCKS.lock().put_back(Freed { address, block }),
        (None, false) if left => GRAPHS.lock().not_freed(address),
        (None, true) if left => GRAPHS.lock().forget_unused(address),
        // Not counted any more.
        _ => {}
    }
    status
}

/// Whether a stream captures, so that nothing is allocated or freed now but by the graph, see [`instantiate`].
fn is_capturing(stream: u64, per_thread: bool) -> bool {
    let mut state = 0;
    drain::any_capture()
        && match per_thread {
            false => driver::is_capturing(stream, &mut state),
            true => driver::is_capturing_per_thread(stream, &mut state),
        }
        .is_ok()
        && state != 0
}

/// Allocates from a pool, or from the current pool of the stream's device.
fn pooled(
    out: *const u64,
    bytes: usize,
    (pool, device): (Option<u64>, impl FnOnce() -> Option<CUdevice>),
    (stream, per_thread): (u64, bool),
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    if is_capturing(stream, per_thread) {
        return call();
    }
    let (device, bytes) = (device(), rounded(bytes as u64));
    let charge = match take(device, bytes) {
        Ok(charge) => charge,
        Err(status) => match kept(pool, device, bytes) {
            Some(charge) => Some(charge),
            None => return status,
        },
    };
    let status = call();
    if let (Some(charge), true) = (charge, status.is_ok())
        && let Some(address) = written(out)
    {
        BLOCKS.lock().add(address, Block::new(charge, Owner::Pool));
    }
    status
}

/// Memory that exceeds the limit, but that the pool has kept since it was freed: the process's overhead includes it.
fn kept(pool: Option<u64>, device: Option<CUdevice>, bytes: u64) -> Option<Charge> {
    let (device, account) = (device?, account(device?)?);
    if account.overhead() < bytes {
        return None;
    }
    let mut current = 0;
    let pool = match pool {
        Some(pool) => pool,
        None if driver::current_pool(&mut current, device).is_ok() => current,
        None => return None,
    };
    let (mut reserved, mut used) = (0, 0);
    let known = driver::pool_bytes(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &mut reserved)
        .is_ok()
        && driver::pool_bytes(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &mut used).is_ok();
    (known && reserved.saturating_sub(used) >= bytes).then(|| account.count(bytes))
}

/// The device of a stream; the current one if the driver cannot tell.
fn stream_device(stream: u64) -> Option<CUdevice> {
    let mut device = 0;
    let named = stream > CU_STREAM_PER_THREAD.0;
    match named && driver::stream_device(stream, &mut device).is_ok() {
        true => Some(device),
        false => current_device(),
    }
}

/// The device of a pool that the program made, or of a device's default pool.
fn pool_device(pool: u64) -> Option<CUdevice> {
    let mut pools = POOLS.lock();
    if let Some((_, device)) = pools.iter().find(|(known, _)| *known == pool) {
        return *device;
    }
    let devices = direct()?.devices.len() as CUdevice;
    let found = (0..devices).find(|device| {
        let mut default = 0;
        driver::default_pool(&mut default, *device).is_ok() && default == pool
    });
    pools.push((pool, found));
    found
}

fn device_at(location: CUmemLocation) -> Option<CUdevice> {
    (location.kind == CU_MEM_LOCATION_TYPE_DEVICE).then_some(location.id)
}

fn free_of_pool(address: u64, stream: (u64, bool), call: impl FnOnce() -> CUresult) -> CUresult {
    match is_capturing(stream.0, stream.1) {
        true => call(),
        false => free(address, call),
    }
}

/// Creates physical memory.
fn create(
    out: *const u64,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let device = given(properties).and_then(|properties| device_at(properties.location));
    let charge = match take(device, bytes as u64) {
        Ok(charge) => charge,
        Err(status) => return status,
    };
    let status = call();
    if let (Some(charge), true) = (charge, status.is_ok())
        && let Some(handle) = written(out)
    {
        PHYSICALS.lock().add(handle, charge);
    }
    status
}

/// Instantiates a graph. The memory of its nodes counts from now on, as long as an instance exists, or until memory
/// that a launch has left allocated is freed.
fn instantiate(out: *const u64, graph: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let nodes = graphs::memory_nodes(graph);
    if nodes.is_empty() {
        return call();
    }
    let mut taken = HashMap::new();
    for node in &nodes.allocating {
        if GRAPHS.lock().counts(node.address) {
            continue;
        }
        match take(device_at(node.location), rounded(node.bytes)) {
            Ok(Some(charge)) => {
                let owner = owner(&BLOCKS.lock(), node.location.id);
                taken.insert(node.address, Block::new(charge, owner));
            }
            Ok(None) => {}
            Err(status) => return status,
        }
    }
    let status = call();
    if let (true, Some(exec)) = (status.is_ok(), written(out)) {
        GRAPHS.lock().instantiated(exec, &nodes, taken);
    }
    status
}

/// Reduces a result of the driver to the limit.
fn less<S: Copy + TryInto<u64> + TryFrom<u64>>(out: *mut S, limit: u64) {
    let Some(said) = written(out) else { return };
    if said.try_into().is_ok_and(|said| said > limit)
        && let Ok(limit) = S::try_from(limit)
    {
        // SAFETY: not null, the driver wrote there.
        unsafe { out.write(limit) };
    }
}

fn get_info<S: Copy + TryInto<u64> + TryFrom<u64>>(
    free: *mut S,
    total: *mut S,
    status: CUresult,
) -> CUresult {
    if status.is_ok()
        && let Some(account) = current_device().and_then(account)
    {
        less(free, account.left());
        less(total, account.most());
    }
    status
}

fn total<S: Copy + TryInto<u64> + TryFrom<u64>>(
    out: *mut S,
    device: CUdevice,
    status: CUresult,
) -> CUresult {
    if status.is_ok()
        && let Some(account) = account(device)
    {
        less(out, account.limit());
    }
    status
}

/// Array descriptors of CUDA 2, with fields of 32 bits.
fn old_descriptor(words: *const [u32; 4]) -> Option<CUDA_ARRAY3D_DESCRIPTOR> {
    given(words).map(
        |[width, height, format, channels]| CUDA_ARRAY3D_DESCRIPTOR {
            width: width.into(),
            height: height.into(),
            format,
            channels,
            ..CUDA_ARRAY3D_DESCRIPTOR::default()
        },
    )
}

fn old_descriptor_3d(words: *const [u32; 6]) -> Option<CUDA_ARRAY3D_DESCRIPTOR> {
    given(words).map(
        |[width, height, depth, format, channels, flags]| CUDA_ARRAY3D_DESCRIPTOR {
            width: width.into(),
            height: height.into(),
            depth: depth.into(),
            format,
            channels,
            flags,
            pad: 0,
        },
    )
}

fn descriptor(from: *const CUDA_ARRAY_DESCRIPTOR) -> Option<CUDA_ARRAY3D_DESCRIPTOR> {
    given(from).map(|flat| CUDA_ARRAY3D_DESCRIPTOR {
        width: flat.width,
        height: flat.height,
        format: flat.format,
        channels: flat.channels,
        ..CUDA_ARRAY3D_DESCRIPTOR::default()
    })
}

wrappers! { WRAPPED;
    // The first versions have addresses and sizes of 32 bits.
    fn alloc_v1 => [cuMemAlloc] (out: *mut u32, bytes: u32) |genuine| {
        linear(out, bytes.into(), || genuine(out, bytes))
    }
    fn alloc => [cuMemAlloc_v2] (out: *mut u64, bytes: usize) |genuine| {
        linear(out, bytes as u64, || genuine(out, bytes))
    }
    fn alloc_pitch_v1 => [cuMemAllocPitch] (out: *mut u32, pitch: *mut u32, width: u32, rows: u32, element: u32) |genuine| {
        pitched(out, pitch, (width.into(), rows.into()), || genuine(out, pitch, width, rows, element))
    }
    fn alloc_pitch => [cuMemAllocPitch_v2] (out: *mut u64, pitch: *mut usize, width: usize, rows: usize, element: u32) |genuine| {
        pitched(out, pitch, (width as u64, rows as u64), || genuine(out, pitch, width, rows, element))
    }
    fn alloc_managed => [cuMemAllocManaged] (out: *mut u64, bytes: usize, flags: u32) |genuine| {
        linear(out, bytes as u64, || genuine(out, bytes, flags))
    }
    fn free_v1 => [cuMemFree] (address: u32) |genuine| {
        free(address.into(), || genuine(address))
    }
    fn free_v2 => [cuMemFree_v2] (address: u64) |genuine| {
        free(address, || genuine(address))
    }
    fn get_info_v1 => [cuMemGetInfo] (free: *mut u32, total: *mut u32) |genuine| {
        get_info(free, total, genuine(free, total))
    }
    fn get_info_v2 => [cuMemGetInfo_v2] (free: *mut usize, total: *mut usize) |genuine| {
        get_info(free, total, genuine(free, total))
    }
    fn total_v1 => [cuDeviceTotalMem] (out: *mut u32, device: CUdevice) |genuine| {
        total(out, device, genuine(out, device))
    }
    fn total_v2 => [cuDeviceTotalMem_v2] (out: *mut usize, device: CUdevice) |genuine| {
        total(out, device, genuine(out, device))
    }

    fn alloc_async => [cuMemAllocAsync] (out: *mut u64, bytes: usize, stream: u64) |genuine| {
        pooled(out, bytes, (None, || stream_device(stream)), (stream, false), || genuine(out, bytes, stream))
    }
    fn alloc_async_ptsz => [cuMemAllocAsync_ptsz] (out: *mut u64, bytes: usize, stream: u64) |genuine| {
        pooled(out, bytes, (None, || stream_device(stream)), (stream, true), || genuine(out, bytes, stream))
    }
    fn alloc_from_pool => [cuMemAllocFromPoolAsync] (out: *mut u64, bytes: usize, pool: u64, stream: u64) |genuine| {
        pooled(out, bytes, (Some(pool), || pool_device(pool)), (stream, false), || genuine(out, bytes, pool, stream))
    }
    fn alloc_from_pool_ptsz => [cuMemAllocFromPoolAsync_ptsz] (out: *mut u64, bytes: usize, pool: u64, stream: u64) |genuine| {
        pooled(out, bytes, (Some(pool), || pool_device(pool)), (stream, true), || genuine(out, bytes, pool, stream))
    }
    fn free_async => [cuMemFreeAsync] (address: u64, stream: u64) |genuine| {
        free_of_pool(address, (stream, false), || genuine(address, stream))
    }
    fn free_async_ptsz => [cuMemFreeAsync_ptsz] (address: u64, stream: u64) |genuine| {
        free_of_pool(address, (stream, true), || genuine(address, stream))
    }
    fn create_pool => [cuMemPoolCreate] (out: *mut u64, properties: *const CUmemPoolProps) |genuine| {
        let status = genuine(out, properties);
        if let (true, Some(pool), Some(properties)) = (status.is_ok(), written(out), given(properties)) {
            let mut pools = POOLS.lock();
            pools.retain(|(known, _)| *known != pool);
            pools.push((pool, device_at(properties.location)));
        }
        status
    }
    fn destroy_pool => [cuMemPoolDestroy] (pool: u64) |genuine| {
        // Looked up again if it still exists.
        let status = genuine(pool);
        if status.is_ok() {
            POOLS.lock().retain(|(known, _)| *known != pool);
        }
        status
    }

    fn create_physical => [cuMemCreate] (out: *mut u64, bytes: usize, properties: *const CUmemAllocationProp, flags: u64) |genuine| {
        create(out, bytes, properties, || genuine(out, bytes, properties, flags))
    }
    fn release => [cuMemRelease] (handle: u64) |genuine| {
        let released = PHYSICALS.lock().release(handle);
        let status = genuine(handle);
        if let (Some(released), false) = (released, status.is_ok()) {
            PHYSICALS.lock().hold(handle, released);
        }
        status
    }
    fn retain => [cuMemRetainAllocationHandle] (out: *mut u64, address: *mut c_void) |genuine| {
        let mapped = PHYSICALS.lock().at(address as u64);
        let status = genuine(out, address);
        if let (Some(mapped), true, Some(handle)) = (mapped, status.is_ok(), written(out)) {
            PHYSICALS.lock().hold(handle, mapped);
        }
        status
    }
    // Memory of another process, unless the handle returned is one of our own.
    fn import => [cuMemImportFromShareableHandle] (out: *mut u64, from: *mut c_void, kind: u32) |genuine| {
        let status = genuine(out, from, kind);
        if let (true, Some(handle)) = (status.is_ok(), written(out)) {
            let mut physicals = PHYSICALS.lock();
            if let Some(own) = physicals.of(handle) {
                physicals.hold(handle, own);
            }
        }
        status
    }
    fn map => [cuMemMap] (start: u64, bytes: usize, offset: usize, handle: u64, flags: u64) |genuine| {
        let physical = PHYSICALS.lock().of(handle);
        let status = genuine(start, bytes, offset, handle, flags);
        if let (Some(physical), true) = (physical, status.is_ok()) {
            PHYSICALS.lock().map(start, bytes as u64, physical);
        }
        status
    }
    fn unmap => [cuMemUnmap] (start: u64, bytes: usize) |genuine| {
        let unmapped = PHYSICALS.lock().unmap(start, bytes as u64);
        let status = genuine(start, bytes);
        if !status.is_ok() {
            PHYSICALS.lock().put_back(unmapped);
        }
        status
    }

    fn create_array_v1 => [cuArrayCreate] (out: *mut u64, from: *const [u32; 4]) |genuine| {
        array(out, old_descriptor(from), 1, || genuine(out, from))
    }
    fn create_array => [cuArrayCreate_v2] (out: *mut u64, from: *const CUDA_ARRAY_DESCRIPTOR) |genuine| {
        array(out, descriptor(from), 1, || genuine(out, from))
    }
    fn create_array_3d_v1 => [cuArray3DCreate] (out: *mut u64, from: *const [u32; 6]) |genuine| {
        array(out, old_descriptor_3d(from), 1, || genuine(out, from))
    }
    fn create_array_3d => [cuArray3DCreate_v2] (out: *mut u64, from: *const CUDA_ARRAY3D_DESCRIPTOR) |genuine| {
        array(out, given(from), 1, || genuine(out, from))
    }
    fn create_mipmapped => [cuMipmappedArrayCreate] (out: *mut u64, from: *const CUDA_ARRAY3D_DESCRIPTOR, levels: u32) |genuine| {
        array(out, given(from), levels, || genuine(out, from, levels))
    }
    fn destroy_any_array => [cuArrayDestroy, cuMipmappedArrayDestroy] (handle: u64) |genuine| {
        destroy_array(handle, || genuine(handle))
    }

    fn instantiate_v1 => [cuGraphInstantiate, cuGraphInstantiate_v2] (out: *mut u64, graph: u64, error: *mut u64, log: *mut c_char, len: usize) |genuine| {
        instantiate(out, graph, || genuine(out, graph, error, log, len))
    }
    fn instantiate_with_flags => [cuGraphInstantiateWithFlags] (out: *mut u64, graph: u64, flags: u64) |genuine| {
        instantiate(out, graph, || genuine(out, graph, flags))
    }
    fn instantiate_with_params => [cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz] (out: *mut u64, graph: u64, params: *mut c_void) |genuine| {
        instantiate(out, graph, || genuine(out, graph, params))
    }
    fn destroy_exec => [cuGraphExecDestroy] (exec: u64) |genuine| {
        let taken = graphs::any().then(|| GRAPHS.lock().take(exec)).flatten();
        let status = genuine(exec);
        if let Some(taken) = taken {
            match status.is_ok() {
                true => GRAPHS.lock().destroyed(&taken),
                false => GRAPHS.lock().put_back(exec, taken),
            }
        }
        status
    }
    fn launch_exec => [cuGraphLaunch, cuGraphLaunch_ptsz] (exec: u64, stream: u64) |genuine| {
        let status = genuine(exec, stream);
        if graphs::any() && status.is_ok() {
            GRAPHS.lock().launched(exec);
        }
        status
    }
}
