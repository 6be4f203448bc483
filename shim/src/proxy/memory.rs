//! The program's memory: device memory, pinned host memory, globals of its modules, registered memory; and the kind of an
//! address.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use mpsshim_api::cuda::{
    CU_MEM_ATTACH_GLOBAL, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_MPS_RPC_FAILURE,
    CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUresult,
};
use mpsshim_proto::arena::{self, DEVICE_ARENA, DEVICE_ARENA_STRIDE};
use mpsshim_proto::graph_memory::GraphMemory;
use mpsshim_proto::handshake::MAX_DEVICES;
use mpsshim_proto::message::{HostAlloc, MANAGED, MemGrant, Object, Op, Range};
use mpsshim_proto::shm::Mapping;
use parking_lot::{Mutex, RwLock};

use crate::ffi::Status;
use crate::proxy::context::{self, Context};
use crate::proxy::extents;
use crate::proxy::pages;
use crate::proxy::pool::{self, Block, Pool, Source};
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::{Answer, Session};
use crate::thread::{Requesting, locked};
use zerocopy::{Immutable, IntoBytes};

/// Bytes that large device blocks are rounded up to: the driver's granularity.
const DEVICE_ROUND: u64 = 2 << 20;
/// Bytes that large pinned blocks are rounded up to.
const HOST_ROUND: u64 = 64 << 10;

static DEVICE: [Mutex<Pool>; MAX_DEVICES] =
    [const { Mutex::new(Pool::new(DEVICE_ROUND, 1)) }; MAX_DEVICES];
static HOST: std::sync::Mutex<Pool> = std::sync::Mutex::new(Pool::new(HOST_ROUND, 1));
/// Managed memory that has its home on a device. The blocks' numbers differ from those of [`HOST`].
static MANAGED_BLOCKS: [Mutex<Pool>; MAX_DEVICES] =
    [const { Mutex::new(Pool::new(DEVICE_ROUND, 1 << 40)) }; MAX_DEVICES];
static HOST_MAPPINGS: Mutex<BTreeMap<u64, Mapping>> = Mutex::new(BTreeMap::new());
/// Whether the host arena's addresses are reserved in this process.
static HOST_ARENA_RESERVED: AtomicBool = AtomicBool::new(false);
/// Likewise those of the device arena.
static DEVICE_ARENA_RESERVED: AtomicBool = AtomicBool::new(false);
static GLOBALS: RwLock<BTreeMap<u64, Global>> = RwLock::new(BTreeMap::new());
static REGISTERED: RwLock<RegisteredTable> = RwLock::new(RegisteredTable {
    by_address: BTreeMap::new(),
    by_device_pointer: BTreeMap::new(),
});
/// Memory that nodes of graphs allocate.
static GRAPH_MEMORY: RwLock<GraphMemory> = RwLock::new(GraphMemory::new());
static ANY_GRAPH_MEMORY: AtomicBool = AtomicBool::new(false);
static REGISTERED_COUNT: AtomicUsize = AtomicUsize::new(0);

/// A global variable of a loaded module.
#[derive(Clone, Copy, Debug)]
pub struct Global {
    pub len: u64,
    /// Handle of the module or library.
    pub image: u64,
    pub context: &'static Context,
}

/// A range of the program's own memory that was registered.
#[derive(Clone, Copy, Debug)]
pub struct Registered {
    pub len: u64,
    /// Address of the same pages in the server and on the devices.
    pub arena: u64,
    /// Unique in the life of the process.
    pub id: u64,
    /// As returned by `cuMemHostGetFlags`.
    pub flags: u32,
    pub context: &'static Context,
}

/// All registered memory.
struct RegisteredTable {
    by_address: BTreeMap<u64, Registered>,
    /// The addresses of memory that the server has elsewhere than the program, by those in the server.
    by_device_pointer: BTreeMap<u64, u64>,
}

/// The kind of memory at an address, and the address that a copy uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Device memory at this address.
    Device(u64),
    /// Host memory that the server reaches, at this address of the host arena.
    Pinned(u64),
    /// Any other memory of the program.
    Pageable(u64),
}

struct DeviceSource<'a> {
    session: &'a Session,
    device: u32,
}

impl Source for DeviceSource<'_> {
    fn grant(&mut self, len: u64) -> Result<(u64, u64), CUresult> {
        let body = MemGrant {
            len,
            device: self.device,
            flags: 0,
        };
        let range: Range = self.session.request(Op::MemGrant, &body, &[])?.read()?;
        if range.len < len || device_of(range.start) != Some(self.device) {
            tracing::error!(
                ?range,
                "the server granted an invalid range of device memory"
            );
            return Err(CUDA_ERROR_MPS_RPC_FAILURE);
        }
        tracing::debug!(
            len = range.len,
            start = range.start,
            "device memory from the server"
        );
        Ok((range.start, range.len))
    }

    fn release(&mut self, start: u64, len: u64) {
        // An error means that the server is gone, and the memory with it.
        let _ = self.session.submit(Op::MemRelease, &Range { start, len });
    }
}

struct ManagedSource<'a> {
    session: &'a Session,
    device: u32,
}

impl Source for ManagedSource<'_> {
    fn grant(&mut self, len: u64) -> Result<(u64, u64), CUresult> {
        let body = MemGrant {
            len,
            device: self.device,
            flags: MANAGED,
        };
        let range: Range = self.session.request(Op::MemGrant, &body, &[])?.read()?;
        if range.len < len || server_device_of(range.start) != Some(self.device) {
            tracing::error!(
                ?range,
                "the server granted an invalid range of managed memory"
            );
            return Err(CUDA_ERROR_MPS_RPC_FAILURE);
        }
        pages::add(range.start, range.len);
        Ok((range.start, range.len))
    }

    fn release(&mut self, start: u64, len: u64) {
        let _ = match pages::remove(self.session, start) {
            true => (self.session).submit(Op::FileUnregister, &Object { object: start }),
            false => (self.session).submit(Op::MemRelease, &Range { start, len }),
        };
    }
}

struct HostSource<'a> {
    session: &'a Session,
    device: u32,
    flags: u32,
}

impl Source for HostSource<'_> {
    fn grant(&mut self, len: u64) -> Result<(u64, u64), CUresult> {
        if !HOST_ARENA_RESERVED.load(Ordering::Relaxed) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let body = HostAlloc {
            len,
            flags: self.flags,
            device: self.device,
        };
        let (answer, descriptor) = self.session.request_receiving(Op::HostAlloc, &body)?;
        let range: Range = answer.read()?;
        let inside = arena::is_host(range.start)
            && range.len >= len
            && range.len <= arena::HOST_ARENA_LEN - (range.start - arena::HOST_ARENA);
        let apart = {
            let mappings = HOST_MAPPINGS.lock();
            mappings
                .range(..range.start.saturating_add(range.len))
                .next_back()
                .is_none_or(|(start, mapping)| start + mapping.len() as u64 <= range.start)
        };
        if !inside || !apart {
            tracing::error!(?range, "the server granted an invalid range of host memory");
            return Err(CUDA_ERROR_MPS_RPC_FAILURE);
        }
        // SAFETY: the range lies in the arena, which this process reserved, and overlaps no mapping there.
        let mapping = unsafe { Mapping::at(range.start, descriptor.as_fd(), range.len as usize) }
            .map_err(|error| {
                tracing::error!(%error, ?range, "pinned memory cannot be mapped");
                CUDA_ERROR_OUT_OF_MEMORY
            });
        match mapping {
            Ok(mapping) => {
                HOST_MAPPINGS.lock().insert(range.start, mapping);
                Ok((range.start, range.len))
            }
            Err(status) => {
                let _ = self.session.submit(Op::HostFree, &range);
                Err(status)
            }
        }
    }

    fn release(&mut self, start: u64, len: u64) {
        if let Some(mapping) = HOST_MAPPINGS.lock().remove(&start) {
            mapping.retire();
        }
        let _ = self.session.submit(Op::HostFree, &Range { start, len });
    }
}

/// The host arena's addresses are kept free in this process.
pub fn host_arena_reserved() {
    HOST_ARENA_RESERVED.store(true, Ordering::Relaxed);
}

/// The device arena's addresses are kept free in this process.
pub fn device_arena_reserved() {
    DEVICE_ARENA_RESERVED.store(true, Ordering::Relaxed);
}

/// The server's ordinal of the device that an address belongs to, of device memory that is not managed.
pub fn device_of(address: u64) -> Option<u32> {
    server_device_of(address).filter(|_| !arena::is_managed(address))
}

/// As [`device_of`], also for managed memory that has its home on the device.
pub fn server_device_of(address: u64) -> Option<u32> {
    arena::is_device(address).then(|| ((address - DEVICE_ARENA) / DEVICE_ARENA_STRIDE) as u32)
}

/// The blocks of managed memory among which an address would be.
fn managed_pool(address: u64) -> Option<&'static Mutex<Pool>> {
    let device = server_device_of(address).filter(|_| arena::is_managed(address))?;
    MANAGED_BLOCKS.get(device as usize)
}

/// Allocates managed memory that has its home on the device of a context.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`; `CUDA_ERROR_NOT_SUPPORTED` without addresses for it.
pub fn managed_alloc(
    session: &Session,
    context: &'static Context,
    len: u64,
    flags: u32,
) -> Status<u64> {
    session.check()?;
    if !DEVICE_ARENA_RESERVED.load(Ordering::Relaxed) || !pages::may_be_on_device() {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    pages::prepare(session, context)?;
    let device = context.server_device;
    let mut source = ManagedSource { session, device };
    let pool = MANAGED_BLOCKS.get(device as usize);
    let mut pool = pool.ok_or(CUDA_ERROR_INVALID_VALUE)?.lock();
    let start = pool.alloc(len, context.handle, MANAGED | flags, &mut source)?;
    if pool.has_own_grant(start) {
        pages::renew(start);
    }
    Ok(start)
}

/// The blocks of host memory, for this thread alone until it is dropped. Handlers of faults see that it has them.
struct HostPool {
    pool: std::sync::MutexGuard<'static, Pool>,
    _requesting: Requesting,
}

impl std::ops::Deref for HostPool {
    type Target = Pool;
    fn deref(&self) -> &Pool {
        &self.pool
    }
}

impl std::ops::DerefMut for HostPool {
    fn deref_mut(&mut self) -> &mut Pool {
        &mut self.pool
    }
}

fn host_pool() -> HostPool {
    let requesting = Requesting::new();
    HostPool {
        pool: locked(&HOST),
        _requesting: requesting,
    }
}

/// Allocates the host's pages of managed memory, which belong to no context.
pub fn host_alloc_of_pages(session: &Session, device: u32, len: u64) -> Status<u64> {
    let mut source = HostSource {
        session,
        device,
        flags: 0,
    };
    host_pool().alloc(len, 0, 0, &mut source)
}

fn device_pool(device: u32) -> Status<&'static Mutex<Pool>> {
    DEVICE.get(device as usize).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Allocates device memory in a context.
pub fn alloc(session: &Session, context: &Context, len: u64) -> Status<u64> {
    session.check()?;
    let device = context.server_device;
    let mut source = DeviceSource { session, device };
    let given = device_pool(device)?
        .lock()
        .alloc(len, context.handle, 0, &mut source);
    tracing::debug!(len, ?given, "device memory");
    given
}

/// Flag of a block that holds a variable of a module. The program cannot free it, and sees a variable.
const VARIABLE: u32 = 1;

/// Allocates device memory in a context for a variable of a module.
pub fn alloc_of_variable(session: &Session, context: &Context, len: u64) -> Status<u64> {
    let device = context.server_device;
    let mut source = DeviceSource { session, device };
    device_pool(device)?
        .lock()
        .alloc(len, context.handle, VARIABLE, &mut source)
}

/// Frees the memory of variables, after the work that may use it.
pub fn free_of_variables(session: &Session, starts: &[u64]) {
    if starts.is_empty() {
        return;
    }
    // Without the session, the memory goes with the process, and otherwise with the context.
    if let Err(status) = stream::quiesce(session, None) {
        tracing::debug!(%status, "memory of variables was not freed");
        return;
    }
    for start in starts {
        give_back_of_variable(session, *start);
    }
}

/// Frees the memory of a variable, which no work uses.
pub fn give_back_of_variable(session: &Session, start: u64) {
    if let Some(device) = device_of(start)
        && let Ok(pool) = device_pool(device)
    {
        let _ = pool
            .lock()
            .free(start, &mut DeviceSource { session, device });
    }
}

/// Frees device memory, after the work that may use it.
pub fn free(session: &Session, address: u64) -> Status {
    let device = match device_block(address) {
        Some((start, _, device)) if start == address => device,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    let pool = device_pool(device)?;
    stream::quiesce(session, None)?;
    forget_shared(session, address)?;
    let mut source = DeviceSource { session, device };
    pool.lock().free(address, &mut source).map(drop)
}

/// Blocks that other processes may open by a handle.
static SHARED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// The block that begins at `start` has an IPC handle now.
pub fn note_shared(start: u64) {
    SHARED.lock().insert(start);
}

/// The block that begins at `start` ends, and its handle is revoked.
fn forget_shared(session: &Session, start: u64) -> Status {
    if SHARED.lock().remove(&start) {
        session.submit(Op::IpcForget, &Object { object: start })?;
    }
    Ok(())
}

/// Frees device memory once the stream has completed its work so far. Until then the block is not reused.
pub fn free_behind(session: &Session, address: u64, stream: StreamRef) -> Status {
    static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());
    let id = match device_block(address) {
        Some((start, block, _)) if start == address => block.id,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    let mut waiting = WAITING.lock();
    if waiting.iter().any(|other| other.id == id) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    waiting.push(Waiting {
        address,
        id,
        stream,
        handle: stream.handle(),
        at: stream.position(),
    });
    // One mark for several blocks: it is submitted when some have gathered; a later call finds that it was reached.
    if waiting.len().is_multiple_of(16) {
        stream::mark(&mut session.ring()?, stream)?;
    }
    if waiting.iter().any(|b| b.stream.handle() != b.handle) {
        // A stream was destroyed: its work is waited for with all other work.
        stream::quiesce(session, None)?;
    }
    waiting.retain(|block| {
        let done = block.stream.handle() != block.handle
            || stream::has_reached(session, block.stream, block.at);
        if done {
            block.free(session);
        }
        !done
    });
    Ok(())
}

/// A block that a stream may still use.
#[derive(Debug)]
struct Waiting {
    address: u64,
    id: u64,
    stream: StreamRef,
    handle: u64,
    at: u64,
}

impl Waiting {
    fn free(&self, session: &Session) {
        let Some(device) = device_of(self.address) else {
            return;
        };
        let mut source = DeviceSource { session, device };
        let Ok(pool) = device_pool(device) else {
            return;
        };
        let mut pool = pool.lock();
        // The context may have ended first, and the address may belong to another block.
        if pool
            .find(self.address)
            .is_some_and(|(_, b)| b.id == self.id)
        {
            let _ = forget_shared(session, self.address);
            let _ = pool.free(self.address, &mut source);
        }
    }
}

/// Bytes of a device that were granted and are not used.
pub fn unused(device: u32) -> u64 {
    device_pool(device).map_or(0, |pool| pool.lock().unused())
}

/// Gives back granted memory that is unused but counts against a limit (host memory too, which may have been managed
/// memory). Returns whether there was any.
pub fn give_back_unused(session: &Session) -> bool {
    let mut source = HostSource {
        session,
        device: 0,
        flags: 0,
    };
    let mut any = false;
    for (device, pool) in MANAGED_BLOCKS.iter().enumerate() {
        let device = device as u32;
        let mut source = ManagedSource { session, device };
        any |= pool.lock().give_back_all(&mut source);
    }
    any |= host_pool().give_back_all(&mut source);
    for (device, pool) in DEVICE.iter().enumerate() {
        let device = device as u32;
        let mut source = DeviceSource { session, device };
        any |= pool.lock().give_back_all(&mut source);
    }
    any
}

/// Sends a request that takes device memory, again if memory was short and some could be given back.
pub fn request_with_room(
    session: &Session,
    op: Op,
    body: &(impl IntoBytes + Immutable),
    trailing: &[u8],
) -> Status<Answer> {
    let answer = session.request(op, body, trailing)?;
    if answer.status == CUDA_ERROR_OUT_OF_MEMORY && give_back_unused(session) {
        return session.request(op, body, trailing);
    }
    Ok(answer)
}

/// Allocates pinned host memory in a context.
pub fn host_alloc(session: &Session, context: &Context, len: u64, flags: u32) -> Status<u64> {
    session.check()?;
    match host_alloc_once(session, context, len, flags) {
        // Managed memory counts as its device's.
        Err(CUDA_ERROR_OUT_OF_MEMORY) if give_back_unused(session) => {
            host_alloc_once(session, context, len, flags)
        }
        given => given,
    }
}

fn host_alloc_once(session: &Session, context: &Context, len: u64, flags: u32) -> Status<u64> {
    let mut source = HostSource {
        session,
        device: context.server_device,
        flags,
    };
    host_pool().alloc(len, context.handle, flags, &mut source)
}

/// Allocates pinned host memory that belongs to no context.
pub fn host_alloc_unowned(session: &Session, context: &Context, len: u64) -> Status<u64> {
    let start = host_alloc(session, context, len, 0)?;
    host_pool().set_owner(start, 0);
    Ok(start)
}

/// Allocates memory for the managed variables of an image, which belongs to no context: managed memory that has its home
/// on the device, where the server stores the initial values; or host memory, all zeros.
pub fn alloc_of_image(session: &Session, device: u32, len: u64) -> Status<u64> {
    // In a grant of its own, so that nothing that the host changes is in the same pieces.
    let room = len.max(pool::OWN_GRANT);
    if let Ok(context) = context::current()
        && device == context.server_device
        && let Ok(start) = managed_alloc(session, context, room, CU_MEM_ATTACH_GLOBAL)
    {
        if let Some(pool) = managed_pool(start) {
            pool.lock().set_owner(start, 0);
        }
        pages::settle(start);
        return Ok(start);
    }
    host_alloc_of_image(session, device, len)
}

fn host_alloc_of_image(session: &Session, device: u32, len: u64) -> Status<u64> {
    let mut source = HostSource {
        session,
        device,
        flags: MANAGED | CU_MEM_ATTACH_GLOBAL,
    };
    let flags = source.flags;
    let start = host_pool().alloc(len, 0, flags, &mut source)?;
    // SAFETY: a new block of this length, which nothing else uses.
    unsafe { std::ptr::write_bytes(start as *mut u8, 0, len as usize) };
    Ok(start)
}

/// Frees pinned host memory, after the work that may use it.
pub fn host_free(session: &Session, address: u64) -> Status {
    match host_pool().find(address) {
        Some((start, block)) if start == address && block.flags & MANAGED == 0 => {}
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    stream::quiesce(session, None)?;
    host_give_back(session, address)
}

/// Frees pinned or managed memory that no work uses.
pub fn host_give_back(session: &Session, address: u64) -> Status {
    if let Some(pool) = managed_pool(address) {
        let device = server_device_of(address).unwrap_or(0);
        let mut source = ManagedSource { session, device };
        return pool.lock().free(address, &mut source).map(drop);
    }
    let mut source = HostSource {
        session,
        device: 0,
        flags: 0,
    };
    host_pool().free(address, &mut source).map(drop)
}

/// Releases memory that was allocated in a context.
pub fn release_of_context(session: &Session, context: &Context) {
    let device = context.server_device;
    if let Ok(pool) = device_pool(device) {
        let mut source = DeviceSource { session, device };
        pool.lock().free_owned(context.handle, &mut source);
    }
    if let Some(pool) = MANAGED_BLOCKS.get(device as usize) {
        let mut source = ManagedSource { session, device };
        pool.lock().free_owned(context.handle, &mut source);
    }
    let mut source = HostSource {
        session,
        device,
        flags: 0,
    };
    host_pool().free_owned(context.handle, &mut source);
}

/// Adds a global of a module.
pub fn add_global(start: u64, global: Global) {
    GLOBALS.write().insert(start, global);
}

/// Removes the globals of an image.
pub fn remove_globals(image: u64) {
    GLOBALS.write().retain(|_, global| global.image != image);
}

/// Adds registered memory.
pub fn add_registered(start: u64, registered: Registered) {
    let mut table = REGISTERED.write();
    if registered.arena != start {
        table.by_device_pointer.insert(registered.arena, start);
    }
    table.by_address.insert(start, registered);
    REGISTERED_COUNT.store(table.by_address.len(), Ordering::Release);
}

/// Removes the registered memory that begins at `start`.
pub fn remove_registered(start: u64) -> Option<Registered> {
    let mut table = REGISTERED.write();
    let removed = table.by_address.remove(&start);
    if let Some(removed) = &removed {
        table.by_device_pointer.remove(&removed.arena);
    }
    REGISTERED_COUNT.store(table.by_address.len(), Ordering::Release);
    removed
}

/// The registered memory that contains an address: its start and its record.
pub fn registered(address: u64) -> Option<(u64, Registered)> {
    if REGISTERED_COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let table = &REGISTERED.read().by_address;
    let (start, found) = table.range(..=address).next_back()?;
    (address - start < found.len).then_some((*start, *found))
}

/// As [`registered`], by a device pointer (`cuMemHostGetDevicePointer`) that differs from the program's own address.
fn registered_by_device_pointer(pointer: u64) -> Option<(u64, Registered)> {
    if REGISTERED_COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let table = &REGISTERED.read();
    let (arena, start) = table.by_device_pointer.range(..=pointer).next_back()?;
    let found = table.by_address.get(start)?;
    (pointer - arena < found.len).then_some((*start, *found))
}

/// Whether some registered memory overlaps `[start, start + len)`.
pub fn registered_overlaps(start: u64, len: u64) -> bool {
    let table = &REGISTERED.read().by_address;
    table
        .range(..start.saturating_add(len))
        .next_back()
        .is_some_and(|(other, found)| other + found.len > start)
}

/// Changes the record of graph memory.
pub fn change_graph_memory(change: impl FnOnce(&mut GraphMemory)) {
    let mut table = GRAPH_MEMORY.write();
    change(&mut table);
    ANY_GRAPH_MEMORY.store(!table.is_empty(), Ordering::Release);
}

/// As [`change_graph_memory`], for changes that have no effect without graph memory.
pub fn follow_graph_memory(change: impl FnOnce(&mut GraphMemory)) {
    if any_graph_memory() {
        change_graph_memory(change);
    }
}

/// Whether any node of a graph allocates memory.
pub fn any_graph_memory() -> bool {
    ANY_GRAPH_MEMORY.load(Ordering::Acquire)
}

/// Whether memory of a graph's node begins here.
pub fn is_graph_memory(address: u64) -> bool {
    any_graph_memory() && GRAPH_MEMORY.read().begins(address)
}

/// Bytes from an address to the end of the graph memory that it lies in.
fn graph_memory(address: u64) -> Option<u64> {
    if !any_graph_memory() {
        return None;
    }
    GRAPH_MEMORY.read().behind(address)
}

/// The program's own address of registered or pinned memory, by its address in the server.
pub fn program_address(arena: u64) -> u64 {
    match registered_by_device_pointer(arena) {
        Some((start, found)) => start + (arena - found.arena),
        None => arena,
    }
}

/// The device block that contains an address, unless it holds a variable, which is a [`global`].
pub fn device_block(address: u64) -> Option<(u64, Block, u32)> {
    let device = device_of(address)?;
    let (start, block) = device_pool(device).ok()?.lock().find(address)?;
    (block.flags & VARIABLE == 0).then_some((start, block, device))
}

/// The pinned or managed block that contains an address.
pub fn host_block(address: u64) -> Option<(u64, Block)> {
    if let Some(pool) = managed_pool(address) {
        return pool.lock().find(address);
    }
    if !arena::is_host(address) {
        return None;
    }
    host_pool().find(address)
}

/// The global that contains an address.
pub fn global(address: u64) -> Option<(u64, Global)> {
    let table = GLOBALS.read();
    let (start, found) = table.range(..=address).next_back()?;
    (address - start < found.len).then_some((*start, *found))
}

/// Where `[address, address + len)` lies.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for addresses of an arena that are not all inside one block.
#[inline]
pub fn place(address: u64, len: u64) -> Status<Place> {
    let inside = |contained: bool, place| {
        if contained {
            Ok(place)
        } else {
            Err(CUDA_ERROR_INVALID_VALUE)
        }
    };
    if let Some(pool) = managed_pool(address) {
        return inside(pool.lock().contains(address, len), Place::Device(address));
    }
    if let Some(device) = device_of(address) {
        let contained = device_pool(device)?.lock().contains(address, len)
            || extents::covers(address, len) == Some(true);
        return inside(contained, Place::Device(address));
    }
    if arena::is_host(address) {
        let contained = host_pool().contains(address, len)
            || registered_by_device_pointer(address)
                .is_some_and(|(_, found)| len <= found.len - (address - found.arena));
        return inside(contained, Place::Pinned(address));
    }
    if let Some(contained) = extents::covers(address, len) {
        return inside(contained, Place::Device(address));
    }
    if arena::is_virtual(address) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if let Some((start, found)) = registered(address) {
        let at = address - start;
        // Memory that is registered in part is read as any other memory of the program.
        return Ok(if len <= found.len - at {
            Place::Pinned(found.arena + at)
        } else {
            Place::Pageable(address)
        });
    }
    if let Some(left) = graph_memory(address) {
        return inside(len <= left, Place::Device(address));
    }
    if let Some((start, found)) = global(address) {
        return inside(len <= found.len - (address - start), Place::Device(address));
    }
    Ok(Place::Pageable(address))
}

/// As [`place`] for an argument that must be reachable by the device.
#[inline]
pub fn device_place(address: u64, len: u64) -> Status<Place> {
    match place(address, len)? {
        Place::Pageable(_) => Err(CUDA_ERROR_INVALID_VALUE),
        place => Ok(place),
    }
}

/// The context a block was allocated in.
pub fn owner_of(block: &Block) -> Option<&'static Context> {
    context::by_handle(block.owner).ok()
}
