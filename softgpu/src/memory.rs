//! Device memory: which addresses are valid, and the calls that allocate and free them.
//!
//! A device address is an address of this process. Pages of ranges that can go away while kernels run are
//! replaced, not unmapped, so that a kernel that still looks at them reads zeros instead of ending the process.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use mpsshim_api::cuda::*;
use parking_lot::{Mutex, RwLock};

use crate::api::{In, Out, R, api};
use crate::context::{self, Context, live};
use crate::driver::{device, driver, new_handle};
use crate::driver_locks::Wait;
use crate::node_memory::NodeMemory;
use crate::pool::Pool;

pub const GRANULARITY: u64 = 2 << 20;
const PAGE: u64 = 4096;

#[derive(Clone)]
pub enum Kind {
    Allocated,
    /// Host memory made here, with its flags.
    Host(u32),
    /// Host memory of the caller's.
    Registered,
    /// From a pool.
    Pooled(Arc<Pool>),
    /// What a node of a graph gives; memory while that says so.
    Node(Weak<NodeMemory>),
    /// From a pool and freed: no longer valid in calls, but still accessible to kernels queued before.
    Freed,
    /// A variable, or all variables, of a module.
    Module,
    /// A part of memory that was imported for arrays.
    Imported,
    Mapped {
        /// Kept alive by this.
        physical: Arc<Physical>,
        /// Devices that may use it.
        access: Vec<CUdevice>,
    },
}

#[derive(Clone)]
pub struct Range {
    pub start: u64,
    /// Bytes that the caller asked for.
    pub bytes: u64,
    pub kind: Kind,
    pub device: CUdevice,
    /// Id of the context that it goes away with; 0 for none.
    pub context: u64,
    pub id: u64,
}

impl Range {
    fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Host(_) | Kind::Registered)
    }
    fn is_usable(&self) -> bool {
        match &self.kind {
            Kind::Mapped { access, .. } => !access.is_empty(),
            kind => !matches!(kind, Kind::Freed),
        }
    }
    fn end(&self) -> u64 {
        self.start + self.bytes
    }
    /// What it is a part of: start and bytes.
    fn whole(&self) -> (u64, u64) {
        let found = driver().ok().and_then(|driver| {
            let reserved = driver.ranges.reserved.lock();
            let (start, bytes) = reserved.range(..=self.start).next_back()?;
            (self.start - start < *bytes).then_some((*start, *bytes))
        });
        found.unwrap_or((self.start, self.bytes))
    }
    fn handle_types(&self) -> u64 {
        match &self.kind {
            Kind::Mapped { physical, .. } => physical.properties.requested_handle_types.into(),
            _ => 0,
        }
    }
    /// The pool it is from.
    fn pool(&self) -> u64 {
        match &self.kind {
            Kind::Pooled(pool) => pool.handle(),
            _ => 0,
        }
    }
}

/// Memory made by `cuMemCreate`: lives until neither a handle nor a mapping needs it.
pub struct Physical {
    fd: OwnedFd,
    bytes: u64,
    properties: CUmemAllocationProp,
    /// Its handle, and how often that must be released.
    handle: u64,
    references: AtomicU64,
    /// It was imported: another pays for it.
    imported: bool,
}

impl Physical {
    fn device(&self) -> CUdevice {
        self.properties.location.id
    }
    /// Makes the handle valid, once more.
    fn hold(self: &Arc<Physical>) -> R<CUmemGenericAllocationHandle> {
        if self.references.fetch_add(1, Ordering::AcqRel) == 0 {
            driver()?.physical.insert(self.handle, self.clone());
        }
        Ok(CUmemGenericAllocationHandle(self.handle))
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        if !self.imported
            && let Ok(device) = device(self.device())
        {
            device.give(self.bytes);
        }
    }
}

fn physical(handle: CUmemGenericAllocationHandle) -> R<Arc<Physical>> {
    let found = driver()?.physical.get(handle.0);
    found.map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

/// What is mapped at an address, and whether it may be used.
fn mapped(address: u64) -> R<(Arc<Physical>, bool)> {
    match driver()?.ranges.find(address).map(|range| range.kind) {
        Some(Kind::Mapped { physical, access }) => Ok((physical, !access.is_empty())),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

#[derive(Default)]
pub struct Ranges {
    map: RwLock<BTreeMap<u64, Range>>,
    reserved: Mutex<BTreeMap<u64, u64>>,
    version: AtomicU64,
}

impl Ranges {
    /// The range with `address` in it.
    pub fn find(&self, address: u64) -> Option<Range> {
        let map = self.map.read();
        map.range(..=address)
            .next_back()
            .map(|(_, r)| r)
            .filter(|r| address - r.start < r.bytes.max(1) && !matches!(r.kind, Kind::Freed))
            .cloned()
    }
    /// Whether `bytes` from `address` on are all usable by the device.
    /// Whether a device may copy from and to host memory here: mapped memory is only for those it was given to.
    pub fn is_for(&self, address: u64, device: CUdevice) -> bool {
        match self.find(address).map(|range| range.kind) {
            Some(Kind::Mapped { access, .. }) => access.contains(&device),
            _ => true,
        }
    }
    pub fn covers(&self, address: u64, bytes: u64) -> bool {
        self.all_in(address, bytes, Range::is_usable)
    }
    /// Whether work that was submitted before may access these bytes: memory of a pool that was freed meanwhile counts.
    pub fn covers_in_flight(&self, address: u64, bytes: u64) -> bool {
        let usable = |r: &Range| r.is_usable() || matches!(r.kind, Kind::Freed);
        self.all_in(address, bytes, usable)
    }
    fn all_in(&self, address: u64, bytes: u64, usable: impl Fn(&Range) -> bool) -> bool {
        let map = self.map.read();
        let Some(end) = address.checked_add(bytes) else {
            return false;
        };
        let mut at = address;
        while at < end {
            match map.range(..=at).next_back() {
                Some((_, r)) if at < r.end() && usable(r) => at = r.end(),
                _ => return false,
            }
        }
        true
    }
    /// What a kernel may touch around `address`; an allocation counts up to the next multiple of 256.
    pub fn span(&self, address: u64) -> Option<(u64, u64)> {
        let map = self.map.read();
        let (_, r) = map.range(..=address).next_back()?;
        let end = if matches!(
            r.kind,
            Kind::Allocated | Kind::Module | Kind::Pooled(_) | Kind::Node(_) | Kind::Freed
        ) {
            r.end().next_multiple_of(256)
        } else {
            r.end()
        };
        let usable = r.is_usable() || matches!(r.kind, Kind::Freed);
        (address < end && usable).then_some((r.start, end))
    }
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }
    /// How many there are of each kind. What a pool keeps for later is not among them.
    pub fn counts(&self) -> Vec<(&'static str, usize)> {
        let map = self.map.read();
        let count = |is: fn(&Kind) -> bool| map.values().filter(|r| is(&r.kind)).count();
        vec![
            ("allocations", count(|kind| matches!(kind, Kind::Allocated))),
            ("host-memory", count(|kind| matches!(kind, Kind::Host(_)))),
            ("registered", count(|kind| matches!(kind, Kind::Registered))),
            ("pooled", count(|kind| matches!(kind, Kind::Pooled(_)))),
            (
                "memory-of-nodes",
                count(|kind| matches!(kind, Kind::Node(_))),
            ),
            ("module-memory", count(|kind| matches!(kind, Kind::Module))),
            ("mapped", count(|kind| matches!(kind, Kind::Mapped { .. }))),
            ("imported", count(|kind| matches!(kind, Kind::Imported))),
            ("reserved", self.reserved.lock().len()),
        ]
    }
    fn insert(&self, range: Range) -> R<()> {
        let mut map = self.map.write();
        let before = map.range(..range.end().max(range.start + 1)).next_back();
        if before.is_some_and(|(_, r)| r.end() > range.start) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        map.insert(range.start, range);
        Ok(())
    }
    fn remove(&self, start: u64, fits: impl Fn(&Range) -> bool) -> R<Range> {
        let mut map = self.map.write();
        if !map.get(&start).is_some_and(fits) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let range = map.remove(&start).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        drop(map);
        self.version.fetch_add(1, Ordering::AcqRel);
        Ok(range)
    }
    /// Frees what belongs to a context that ends.
    pub fn drop_context(&self, context: u64) {
        let starts: Vec<u64> = self
            .map
            .read()
            .values()
            .filter(|r| r.context == context)
            .map(|r| r.start)
            .collect();
        for start in starts {
            if let Ok(range) = self.remove(start, |r| r.context == context) {
                release(&range);
            }
        }
    }
}

/// Gives the pages of a removed range back.
fn release(range: &Range) {
    match range.kind {
        Kind::Allocated | Kind::Module => {
            unmap(range.start, range.bytes.next_multiple_of(PAGE));
            if let Ok(device) = device(range.device) {
                device.give(range.bytes.next_multiple_of(PAGE));
            }
        }
        Kind::Host(_) | Kind::Imported => unmap(range.start, range.bytes.next_multiple_of(PAGE)),
        Kind::Registered | Kind::Mapped { .. } | Kind::Pooled(_) | Kind::Node(_) | Kind::Freed => {}
    }
}

/// Maps `bytes` somewhere, or at `at` with `flags` that say how much that is meant.
fn map(at: u64, bytes: u64, flags: i32, fd: i32, offset: u64) -> R<u64> {
    let anonymous = if fd < 0 {
        libc::MAP_ANONYMOUS | libc::MAP_PRIVATE
    } else {
        libc::MAP_SHARED
    };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: without MAP_FIXED a mapping touches nothing that exists; with it callers name only addresses
    // that they have reserved themselves.
    let got = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            bytes as usize,
            protection,
            flags | anonymous,
            fd,
            offset as libc::off_t,
        )
    };
    if got == libc::MAP_FAILED {
        Err(CUDA_ERROR_OUT_OF_MEMORY)
    } else {
        Ok(got as u64)
    }
}

fn unmap(start: u64, bytes: u64) {
    // SAFETY: only ranges that this module mapped, and that were just taken out of the map, come here.
    unsafe {
        libc::munmap(start as *mut libc::c_void, bytes as usize);
    }
}

/// Allocates device memory for a context.
pub fn allocate(context: u64, ordinal: CUdevice, bytes: u64, kind: Kind) -> R<u64> {
    let room = bytes
        .checked_next_multiple_of(PAGE)
        .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let device = device(ordinal)?;
    device.take(room)?;
    let start = map(0, room, libc::MAP_NORESERVE, -1, 0).inspect_err(|_| device.give(room))?;
    driver()?.ranges.insert(Range {
        start,
        bytes,
        kind,
        device: ordinal,
        context,
        id: new_handle(),
    })?;
    Ok(start)
}

/// Marks an allocation from a pool as freed; what it was comes back.
pub fn retire(address: u64) -> R<Range> {
    let mut map = driver()?.ranges.map.write();
    match map.get_mut(&address) {
        Some(range) if matches!(range.kind, Kind::Pooled(_)) => {
            let before = range.clone();
            range.kind = Kind::Freed;
            Ok(before)
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// Puts freed pages into the map again.
pub fn take_again(device: CUdevice, start: u64, bytes: u64, kind: Kind) -> R<u64> {
    let ranges = &driver()?.ranges;
    ranges.remove(start, |r| matches!(r.kind, Kind::Freed))?;
    name(device, start, bytes, kind)?;
    Ok(start)
}

/// Addresses for memory that a node will give.
pub fn reserve_pages(room: u64) -> R<u64> {
    map(0, room, libc::MAP_NORESERVE, -1, 0)
}

/// Puts reserved addresses into the map.
pub fn name(device: CUdevice, start: u64, bytes: u64, kind: Kind) -> R<()> {
    driver()?.ranges.insert(Range {
        start,
        bytes,
        kind,
        device,
        context: 0,
        id: new_handle(),
    })
}

/// What a node gave is something else from now on.
pub fn turn(start: u64, kind: Kind) {
    if let Ok(driver) = driver()
        && let Some(range) = driver.ranges.map.write().get_mut(&start)
        && matches!(range.kind, Kind::Node(_))
    {
        range.kind = kind;
    }
}

/// Gives the addresses of a node back.
pub fn forget(start: u64, room: u64) {
    if let Ok(driver) = driver()
        && driver
            .ranges
            .remove(start, |r| matches!(r.kind, Kind::Node(_)))
            .is_ok()
    {
        unmap(start, room);
    }
}

/// Unmaps a freed allocation.
pub fn unmap_freed(start: u64, room: u64) {
    if let Ok(driver) = driver() {
        let _ = driver
            .ranges
            .remove(start, |r| matches!(r.kind, Kind::Freed));
    }
    unmap(start, room);
}

/// Gives the pages of a freed allocation back.
pub fn give_back(ordinal: CUdevice, start: u64, room: u64) {
    unmap_freed(start, room);
    if let Ok(device) = device(ordinal) {
        device.give(room);
    }
}

/// Whether an allocation of `cuMemAlloc` begins here.
pub fn is_allocated(address: u64) -> bool {
    driver().is_ok_and(|driver| {
        let found = driver.ranges.find(address);
        found.is_some_and(|r| r.start == address && matches!(r.kind, Kind::Allocated))
    })
}

/// Frees such an allocation.
pub fn free(address: u64) -> R<()> {
    let ranges = &driver()?.ranges;
    release(&ranges.remove(address, |r| matches!(r.kind, Kind::Allocated))?);
    Ok(())
}

/// Frees module data.
pub fn free_module(start: u64) {
    if let Ok(range) = crate::driver::start()
        .ranges
        .remove(start, |r| matches!(r.kind, Kind::Module))
    {
        release(&range);
    }
}

/// Maps bytes of a file for arrays of a context. Returns where they begin.
pub fn map_imported(context: &Context, file: &OwnedFd, offset: u64, bytes: u64) -> R<u64> {
    let into = offset % PAGE;
    let bytes = into + bytes;
    let start = map(0, bytes, 0, file.as_raw_fd(), offset - into)?;
    driver()?.ranges.insert(Range {
        start,
        bytes,
        kind: Kind::Imported,
        device: device_of(file),
        context: context.id,
        id: new_handle(),
    })?;
    Ok(start + into)
}

/// Unmaps bytes that [`map_imported`] has mapped.
pub fn unmap_imported(start: u64) {
    let ranges = &crate::driver::start().ranges;
    if let Ok(range) = ranges.remove(start - start % PAGE, |r| matches!(r.kind, Kind::Imported)) {
        release(&range);
    }
}

fn host_alloc(bytes: usize, flags: u32) -> R<u64> {
    let context = live()?;
    if bytes == 0 || flags > 7 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let room = (bytes as u64)
        .checked_next_multiple_of(PAGE)
        .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let start = map(0, room, libc::MAP_NORESERVE, -1, 0)?;
    let range = Range {
        start,
        bytes: bytes as u64,
        kind: Kind::Host(flags),
        device: context.device,
        context: context.id,
        id: new_handle(),
    };
    driver()?.ranges.insert(range)?;
    Ok(start)
}

fn register(address: u64, bytes: usize, flags: u32) -> R<()> {
    let context = live()?;
    if address == 0 || bytes == 0 || flags > 15 || address.checked_add(bytes as u64).is_none() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    context.waits_its_turn();
    let range = Range {
        start: address,
        bytes: bytes as u64,
        kind: Kind::Registered,
        device: context.device,
        context: context.id,
        id: new_handle(),
    };
    driver()?
        .ranges
        .insert(range)
        .map_err(|_| CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
}

fn host_range(address: u64) -> R<Range> {
    driver()?
        .ranges
        .find(address)
        .filter(Range::is_host)
        .ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Name of the files of device memory, which ends with the device's number.
const MEMORY_NAME: &str = "softgpu-";

/// The device whose memory a file is.
fn device_of(file: &OwnedFd) -> CUdevice {
    let number = number_of(file.as_raw_fd());
    number.filter(|number| device(*number).is_ok()).unwrap_or(0)
}

/// The device's number in the name of a file of device memory.
fn number_of(fd: i32) -> Option<CUdevice> {
    let target = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?;
    let name = target.to_str()?.strip_prefix("/memfd:")?;
    let number = name.strip_prefix(MEMORY_NAME)?;
    number.split(' ').next()?.parse().ok()
}

/// Takes over the descriptor of a file of device memory of this many bytes.
pub fn take_file(fd: i32, bytes: u64) -> R<OwnedFd> {
    number_of(fd).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    // SAFETY: only a descriptor goes in.
    let end = unsafe { libc::lseek(fd, 0, libc::SEEK_END) };
    if bytes == 0 || bytes > end.max(0) as u64 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: it is open, and by the driver API's contract the driver's from here on.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn memfd(bytes: u64, device: CUdevice) -> R<OwnedFd> {
    let name = CString::new(format!("{MEMORY_NAME}{device}")).map_err(|_| CUDA_ERROR_UNKNOWN)?;
    // SAFETY: the name is a C string; a descriptor that comes back is ours alone.
    let fd = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        OwnedFd::from_raw_fd(fd)
    };
    // SAFETY: only a descriptor goes in.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) } != 0 {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    Ok(fd)
}

fn reserve(bytes: u64, alignment: u64, hint: u64) -> R<u64> {
    let flags = libc::MAP_NORESERVE;
    if hint != 0 && hint.is_multiple_of(alignment) {
        // An older kernel takes the flag for a mere hint: then the answer lies elsewhere.
        match map(hint, bytes, flags | libc::MAP_FIXED_NOREPLACE, -1, 0) {
            Ok(at) if at == hint => return Ok(at),
            Ok(at) => unmap(at, bytes),
            Err(_) => {}
        }
    }
    let wide = bytes
        .checked_add(alignment)
        .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let got = map(0, wide, flags, -1, 0)?;
    let at = got.next_multiple_of(alignment);
    if at > got {
        unmap(got, at - got);
    }
    if got + wide > at + bytes {
        unmap(at + bytes, got + wide - at - bytes);
    }
    Ok(at)
}

/// Whether `bytes` from `start` on lie in one reservation.
fn is_reserved(ranges: &Ranges, start: u64, bytes: u64) -> bool {
    let reserved = ranges.reserved.lock();
    let found = reserved.range(..=start).next_back();
    found.is_some_and(|(at, size)| start - at < *size && size - (start - at) >= bytes)
}

/// The starts of the mappings that make up exactly `bytes` from `start` on.
fn mappings(ranges: &Ranges, start: u64, bytes: u64) -> R<Vec<u64>> {
    let map = ranges.map.read();
    let (mut at, mut out) = (start, Vec::new());
    let end = start.checked_add(bytes).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    while at < end {
        match map.get(&at) {
            Some(r) if matches!(r.kind, Kind::Mapped { .. }) && r.end() <= end => {
                out.push(at);
                at = r.end();
            }
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    Ok(out)
}

/// Stores one pointer attribute; `Ok(false)`, and zeros, if the pointer has none such.
fn attribute(which: CUpointer_attribute, address: u64, out: u64) -> R<bool> {
    let range = driver()?.ranges.find(address);
    let (value, bytes): (fn(&Range, u64) -> u64, usize) = match which {
        CU_POINTER_ATTRIBUTE_CONTEXT => (|r, _| context_of(r), 8),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => (|r, _| if r.is_host() { 1 } else { 2 }, 4),
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER => (|_, address| address, 8),
        CU_POINTER_ATTRIBUTE_HOST_POINTER => (|r, a| if r.is_host() { a } else { 0 }, 8),
        CU_POINTER_ATTRIBUTE_BUFFER_ID => (|r, _| r.id, 8),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => (|r, _| r.device as u64, 4),
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => (|r, _| r.whole().0, 8),
        CU_POINTER_ATTRIBUTE_RANGE_SIZE => (|r, _| r.whole().1, 8),
        CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => (|r, _| r.start, 8),
        CU_POINTER_ATTRIBUTE_MAPPING_SIZE => (|r, _| r.bytes, 8),
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
            (|r, _| u64::from(matches!(r.kind, Kind::Allocated)), 4)
        }
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => (|r, _| r.handle_types(), 8),
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => (|r, _| if r.is_usable() { 3 } else { 0 }, 4),
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => (|r, _| r.pool(), 8),
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => (|_, _| 0, 4),
        CU_POINTER_ATTRIBUTE_IS_MANAGED => (|_, _| 0, 1),
        CU_POINTER_ATTRIBUTE_MAPPED => (|r, _| u64::from(r.is_usable()), 1),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    if out == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // A pointer that the driver does not know is of no device: -2.
    let none = if which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL {
        -2i64 as u64
    } else {
        0
    };
    let value = range
        .as_ref()
        .map_or(none, |r| value(r, address))
        .to_le_bytes();
    // SAFETY: by the driver API's contract the pointer has room for the attribute.
    unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), out as *mut u8, bytes) }
    let lacks =
        which == CU_POINTER_ATTRIBUTE_HOST_POINTER && !range.as_ref().is_some_and(Range::is_host);
    Ok(range.is_some() && !lacks)
}

fn context_of(range: &Range) -> u64 {
    context::by_id(range.context).map_or(0, |context| context.handle)
}

/// The context of the memory at an address, whichever is current: its work comes to its end before the memory goes away.
/// Memory of no context, as that of pools, goes with the current one.
fn owner(address: u64) -> R<Arc<Context>> {
    let current = live()?;
    let range = driver()?.ranges.find(address);
    Ok(range
        .and_then(|range| context::by_id(range.context))
        .unwrap_or(current))
}

api! { TABLE;
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let device = device(live()?.device)?;
        free.set((device.total - device.used.load(Ordering::Acquire)) as usize)?;
        total.set(device.total as usize)
    }
    fn cuMemAlloc_v2(out: Out<u64>, bytes: usize) {
        let context = live()?;
        if bytes == 0 || out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.set(allocate(context.id, context.device, bytes as u64, Kind::Allocated)?)
    }
    fn cuMemAllocPitch_v2(out: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        let context = live()?;
        if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) || out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(512).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let bytes = row.checked_mul(height).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        pitch.set(row)?;
        out.set(allocate(context.id, context.device, bytes as u64, Kind::Allocated)?)
    }
    fn cuMemFree_v2(address: u64) {
        let context = owner(address)?;
        if address == 0 {
            return Ok(());
        }
        if driver()?.ranges.find(address).is_some_and(|r| r.start == address && matches!(r.kind, Kind::Pooled(_) | Kind::Node(_))) {
            let _held = context.drains(Wait::Holds);
            return crate::pool::free(address, 0);
        }
        if !is_allocated(address) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // As natively: kernels that use the memory come to their end first.
        let _held = context.drains(Wait::Holds);
        context.sound()?;
        free(address)
    }
    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) {
        live()?;
        let range = driver()?.ranges.find(address).ok_or(CUDA_ERROR_NOT_FOUND)?;
        base.put(range.start);
        bytes.put(range.bytes as usize);
        Ok(())
    }
    fn cuMemHostAlloc(out: Out<u64>, bytes: usize, flags: u32) {
        if out.is_null() { Err(CUDA_ERROR_INVALID_VALUE) } else { out.set(host_alloc(bytes, flags)?) }
    }
    fn cuMemAllocHost_v2(out: Out<u64>, bytes: usize) {
        if out.is_null() { Err(CUDA_ERROR_INVALID_VALUE) } else { out.set(host_alloc(bytes, 0)?) }
    }
    fn cuMemFreeHost(address: u64) {
        let context = owner(address)?;
        let ranges = &driver()?.ranges;
        if !ranges.find(address).is_some_and(|r| r.start == address && matches!(r.kind, Kind::Host(_))) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let _held = context.drains(Wait::Holds);
        release(&ranges.remove(address, |r| matches!(r.kind, Kind::Host(_)))?);
        Ok(())
    }
    fn cuMemHostGetDevicePointer_v2(out: Out<u64>, address: u64, flags: u32) {
        live()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        host_range(address)?;
        out.set(address)
    }
    fn cuMemHostGetFlags(out: Out<u32>, address: u64) {
        live()?;
        match host_range(address)?.kind {
            Kind::Host(flags) => out.set(flags | CU_MEMHOSTALLOC_DEVICEMAP),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    fn cuMemHostRegister_v2(address: u64, bytes: usize, flags: u32) { register(address, bytes, flags) }
    fn cuMemHostUnregister(address: u64) {
        let context = owner(address)?;
        let ranges = &driver()?.ranges;
        if !ranges.find(address).is_some_and(|r| r.start == address && matches!(r.kind, Kind::Registered)) {
            return Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        }
        let _held = context.drains(Wait::Holds);
        ranges.remove(address, |r| matches!(r.kind, Kind::Registered))?;
        Ok(())
    }
    fn cuMemGetAllocationGranularity(out: Out<usize>, prop: In<CUmemAllocationProp>, option: u32) {
        prop.get(0)?;
        if option > 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.set(GRANULARITY as usize)
    }
    fn cuMemAddressReserve(out: Out<u64>, bytes: usize, alignment: usize, hint: u64, flags: u64) {
        let bytes = bytes as u64;
        let odd = alignment & alignment.wrapping_sub(1) != 0;
        let alignment = (alignment as u64).max(GRANULARITY);
        if bytes == 0 || odd || !bytes.is_multiple_of(GRANULARITY) || !alignment.is_power_of_two() || flags != 0 || out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let at = reserve(bytes, alignment, hint)?;
        driver()?.ranges.reserved.lock().insert(at, bytes);
        out.set(at)
    }
    fn cuMemAddressFree(address: u64, bytes: usize) {
        let ranges = &driver()?.ranges;
        let mut reserved = ranges.reserved.lock();
        let in_use = ranges.map.read().range(address..address.saturating_add(bytes as u64)).next().is_some();
        if reserved.get(&address) != Some(&(bytes as u64)) || in_use {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        reserved.remove(&address);
        unmap(address, bytes as u64);
        Ok(())
    }
    fn cuMemCreate(out: Out<CUmemGenericAllocationHandle>, bytes: usize, prop: In<CUmemAllocationProp>, flags: u64) {
        let (prop, bytes) = (prop.get(0)?, bytes as u64);
        let supported = prop.kind == CU_MEM_ALLOCATION_TYPE_PINNED && prop.location.kind == CU_MEM_LOCATION_TYPE_DEVICE;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || flags != 0 || !supported || out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let device = device(prop.location.id)?;
        device.take(bytes)?;
        let fd = memfd(bytes, prop.location.id).inspect_err(|_| device.give(bytes))?;
        let (handle, references) = (new_handle(), AtomicU64::new(0));
        out.set(Arc::new(Physical { fd, bytes, properties: prop, handle, references, imported: false }).hold()?)
    }
    fn cuMemRelease(handle: CUmemGenericAllocationHandle) {
        if physical(handle)?.references.fetch_sub(1, Ordering::AcqRel) == 1 {
            driver()?.physical.remove(handle.0)?;
        }
        Ok(())
    }
    fn cuMemRetainAllocationHandle(out: Out<CUmemGenericAllocationHandle>, address: u64) {
        out.set(mapped(address)?.0.hold()?)
    }
    fn cuMemGetAllocationPropertiesFromHandle(out: Out<CUmemAllocationProp>, handle: CUmemGenericAllocationHandle) {
        out.set(physical(handle)?.properties)
    }
    fn cuMemExportToShareableHandle(out: Out<i32>, handle: CUmemGenericAllocationHandle, kind: u32, flags: u64) {
        let physical = physical(handle)?;
        if kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || physical.properties.requested_handle_types & kind == 0 || flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let fd = physical.fd.try_clone().map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        out.set(fd.into_raw_fd())
    }
    fn cuMemImportFromShareableHandle(out: Out<CUmemGenericAllocationHandle>, fd: usize, kind: u32) {
        let fd = i32::try_from(fd).map_err(|_| CUDA_ERROR_UNKNOWN)?;
        // SAFETY: the calls fail for a number that is no open descriptor; what they open is ours alone.
        let (fd, bytes) = unsafe {
            let fd = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3);
            if fd < 0 || kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
                return Err(CUDA_ERROR_UNKNOWN);
            }
            (OwnedFd::from_raw_fd(fd), libc::lseek(fd, 0, libc::SEEK_END))
        };
        let bytes = bytes.max(0) as u64;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(CUDA_ERROR_UNKNOWN);
        }
        let properties = CUmemAllocationProp {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: CU_MEM_HANDLE_TYPE_NONE,
            location: CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device_of(&fd) },
            ..CUmemAllocationProp::default()
        };
        let (handle, references) = (new_handle(), AtomicU64::new(0));
        out.set(Arc::new(Physical { fd, bytes, properties, handle, references, imported: true }).hold()?)
    }
    fn cuMemGetAccess(out: Out<u64>, location: In<CUmemLocation>, address: u64) {
        device(location.get(0)?.id)?;
        out.set(0)?;
        out.set(if mapped(address)?.1 { 3 } else { 0 })
    }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64) {
        let (bytes, offset) = (bytes as u64, offset as u64);
        let physical = physical(handle)?;
        let ranges = &driver()?.ranges;
        if bytes == 0 || !(address | bytes | offset).is_multiple_of(GRANULARITY) || flags != 0 || !is_reserved(ranges, address, bytes) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // Memory is mapped whole.
        if offset != 0 || bytes != physical.bytes {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let fd = physical.fd.as_raw_fd();
        let device = physical.device();
        let kind = Kind::Mapped { physical, access: Vec::new() };
        ranges.insert(Range { start: address, bytes, kind, device, context: 0, id: new_handle() })?;
        map(address, bytes, libc::MAP_FIXED, fd, offset).map(drop).inspect_err(|_| drop(ranges.remove(address, |_| true)))
    }
    fn cuMemSetAccess(address: u64, bytes: usize, access: In<CUmemAccessDesc>, count: usize) {
        let ranges = &driver()?.ranges;
        if bytes == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let access = access.list(count.min(64))?;
        access.iter().try_for_each(|a| device(a.location.id).map(drop))?;
        if access.is_empty() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let starts = mappings(ranges, address, bytes as u64)?;
        let mut map = ranges.map.write();
        for start in starts {
            if let Some(Range { kind: Kind::Mapped { access: devices, .. }, .. }) = map.get_mut(&start) {
                for change in &access {
                    devices.retain(|device| *device != change.location.id);
                    if change.flags != 0 {
                        devices.push(change.location.id);
                    }
                }
            }
        }
        drop(map);
        ranges.version.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
    fn cuMemUnmap(address: u64, bytes: usize) {
        let ranges = &driver()?.ranges;
        // Where nothing is mapped there is nothing to undo; a mapping goes whole.
        let bytes = bytes as u64;
        if bytes == 0 || !is_reserved(ranges, address, bytes) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let inside: Vec<(u64, u64)> = {
            let map = ranges.map.read();
            let before = map.range(..address).next_back().filter(|(_, r)| r.end() > address);
            let inside = map.range(address..address + bytes);
            before.into_iter().chain(inside).map(|(start, r)| (*start, r.end())).collect()
        };
        if inside.iter().any(|(start, end)| *start < address || *end > address + bytes) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        for (start, _) in inside {
            let range = ranges.remove(start, |r| matches!(r.kind, Kind::Mapped { .. }))?;
            map(start, range.bytes, libc::MAP_FIXED | libc::MAP_NORESERVE, -1, 0)?;
        }
        Ok(())
    }
    fn cuPointerGetAttribute(out: u64, which: CUpointer_attribute, address: u64) {
        if attribute(which, address, out)? { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }
    fn cuPointerGetAttributes(count: u32, which: In<CUpointer_attribute>, outs: In<u64>, address: u64) {
        // A pointer that the driver does not know is not an error here: its attributes are zero.
        (0..count.min(64) as usize).try_for_each(|n| attribute(which.get(n)?, address, outs.get(n)?).map(drop))
    }
}
