//! The devices: one primary context each, their memory, and streams kept for reuse.

use crate::engine::base::account::{Account, Charge, Home, Memory};
use crate::engine::base::driver::Driver;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::ranges::RangeAllocator;
use crate::engine::base::side::{self, SIDES, Side};
use crate::engine::gpu::copy_kernel::{self, CopyKernel, LargeCopies, MoveKernel};
use crate::engine::gpu::flag_kernel::FlagKernel;
use crate::engine::gpu::green::Green;
use crate::engine::gpu::kept_streams::KeptStreams;
use crate::engine::gpu::managed_arena::ManagedArena;
use crate::engine::gpu::partition::Partition;
use crate::engine::gpu::reserve::Reserve;
use mpsshim_api::cuda::*;
use mpsshim_model::device::ComputeMode;
use mpsshim_proto::arena::{DEVICE_ARENA, DEVICE_ARENA_STRIDE, MANAGED_OFFSET, is_managed};
use mpsshim_proto::handshake::MAX_DEVICES;
use parking_lot::{Mutex, RwLock};
use std::cell::Cell;
use std::ops::{Deref, Index};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Streams created ahead of use: creating one while another client's kernels run can block until they complete.
const STREAMS_AHEAD: usize = 32;

/// Streams created ahead in a context that belongs to one session: each takes milliseconds, and no other client is blocked.
const STREAMS_OF_ONE: usize = 2;

/// Heap of device code (`malloc` in a kernel), bytes, for all clients. The driver takes it from the device when the
/// first module that allocates is loaded.
const DEVICE_HEAP: u64 = 512 << 20;

/// Poll interval while other threads still use a context that is to be closed.
const GRACE: Duration = Duration::from_micros(100);

/// Local memory reserved for kernels that may never be launched is limited to this fraction (1/`LOCAL_AHEAD`) of a
/// device's memory.
const LOCAL_AHEAD: u64 = 100;

/// A mapping of device memory at an address of the device arena.
#[derive(Debug)]
pub struct Grant {
    /// First address.
    pub start: CUdeviceptr,
    /// Bytes.
    pub len: u64,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Its physical memory; null while its content is elsewhere.
    handle: AtomicU64,
    /// Another session or process may use it at any time.
    stays: AtomicBool,
    paid: Mutex<Paid>,
}

/// Exports physical memory as a descriptor (`cuMemExportToShareableHandle`), which holds the memory while
/// it is open in any process.
///
/// # Errors
/// Driver errors.
pub fn export(driver: &Driver, handle: CUmemGenericAllocationHandle) -> Result<OwnedFd, CUresult> {
    export_with(driver, handle, 0)
}

/// As [`export`], with flags, of which drivers know none so far.
///
/// # Errors
/// As [`export`].
pub fn export_with(
    driver: &Driver,
    handle: CUmemGenericAllocationHandle,
    flags: u64,
) -> Result<OwnedFd, CUresult> {
    let mut raw = -1;
    let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    driver.memory.mem_export(&mut raw, handle, kind, flags)?;
    if raw < 0 {
        return Err(CUDA_ERROR_OPERATING_SYSTEM);
    }
    // SAFETY: the driver opened it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// The account that pays for a grant, and its possible successors.
#[derive(Debug)]
struct Paid {
    /// Charge for its length, held until the driver has released the memory.
    charge: Charge,
    /// Sessions that have opened parts of it, one entry per part.
    openers: Vec<Account>,
}

impl Grant {
    /// Exports the memory as a descriptor, which holds it while it is open in any process.
    ///
    /// # Errors
    /// Driver errors.
    pub fn export(&self, driver: &Driver) -> Result<OwnedFd, CUresult> {
        export(driver, self.handle())
    }

    fn handle(&self) -> CUmemGenericAllocationHandle {
        CUmemGenericAllocationHandle(self.handle.load(Ordering::Acquire))
    }

    /// Whether it has physical memory on its device.
    pub fn is_on_device(&self) -> bool {
        !self.handle().is_null()
    }

    /// Notes that another session or process may use it at any time. Returns whether that is new.
    pub fn note_stays(&self) -> bool {
        !self.stays.swap(true, Ordering::AcqRel)
    }

    /// Whether its content cannot be moved to host memory: it has been shared, or it is managed memory, which the host may
    /// use at any time.
    pub fn stays(&self) -> bool {
        self.stays.load(Ordering::Acquire) || is_managed(self.start)
    }

    /// Notes that a session has opened a part of it.
    pub fn opened_by(&self, account: &Account) {
        self.paid.lock().openers.push(account.clone());
    }

    /// Removes one use by a session that owns the grant or has opened a part of it. If that session paid for the grant,
    /// the charge moves to a session that still uses it.
    pub fn left_by(&self, account: &Account) {
        let mut paid = self.paid.lock();
        let Paid { charge, openers } = &mut *paid;
        if let Some(at) = openers.iter().position(|opener| opener.is(account)) {
            openers.swap_remove(at);
        }
        if charge.is_of(account)
            && let Some(next) = openers.first()
        {
            charge.move_to(next);
        }
    }
}

/// Number of blocks of a grid, or of threads of a block.
pub fn volume(size: [u32; 3]) -> u64 {
    size.iter()
        .fold(1, |all, one| all.saturating_mul((*one).into()))
}

/// A device and its context.
#[derive(Debug)]
pub struct Device {
    /// The driver's device.
    pub raw: CUdevice,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Its UUID.
    pub uuid: CUuuid,
    /// PCI address, such as `0000:00:06.0`.
    pub pci: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Which processes may have contexts on it.
    pub compute_mode: ComputeMode,
    /// Its compute capability, `10 * major + minor`.
    pub capability: u32,
    /// Maximum number of resident threads.
    pub threads: u64,
    multiprocessors: u32,
    /// Server's ordinal.
    pub ordinal: Ordinal,
    starting: Mutex<()>,
    addresses: Mutex<RangeAllocator>,
    managed: ManagedArena,
    partition: OnceLock<Result<Arc<Partition>, CUresult>>,
    main: Context,
    /// Annex contexts, created when needed and closed when no session uses them.
    annexes: [RwLock<Arc<Context>>; SIDES - 1],
    /// Heaps of the annexes that belong to a session.
    heaps: [Mutex<Option<OwnHeap>>; SIDES - 1],
    /// The driver ran out of memory for an allocation.
    short: AtomicBool,
    /// Large copies between the device and host memory.
    large_copies: LargeCopies,
    /// Multiprocessors kept free for short kernels.
    pub reserve: Reserve,
    began: Instant,
}

/// A context of a device, with its streams, limits and kernels of the server's.
#[derive(Debug)]
struct Context {
    /// Unique among all contexts of the server.
    id: u32,
    raw: OnceLock<CUcontext>,
    streams: KeptStreams,
    probe: OnceLock<CUstream>,
    first_limits: OnceLock<[Option<u64>; CU_LIMIT_MAX as usize]>,
    flag_kernel: OnceLock<FlagKernel>,
    copy_kernels: OnceLock<(CopyKernel, MoveKernel)>,
    /// Bytes of local memory per thread that the driver has reserved.
    local: AtomicU32,
    /// Bytes of local memory per thread to reserve at the next quiescent point.
    wanted_local: AtomicU32,
}

impl Default for Context {
    fn default() -> Context {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Context {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            raw: OnceLock::new(),
            streams: KeptStreams::default(),
            probe: OnceLock::new(),
            first_limits: OnceLock::new(),
            flag_kernel: OnceLock::new(),
            copy_kernels: OnceLock::new(),
            local: AtomicU32::new(0),
            wanted_local: AtomicU32::new(0),
        }
    }
}

impl Context {
    /// Makes it current if it has been created. Returns whether it has.
    #[inline]
    fn make_current(&self, driver: &Driver) -> Result<bool, CUresult> {
        if CURRENT.get() == self.id {
            return Ok(true);
        }
        let Some(raw) = self.raw.get() else {
            return Ok(false);
        };
        driver.ctx_set_current(*raw)?;
        CURRENT.set(self.id);
        Ok(true)
    }

    /// Creates the initial streams, limits and kernels of the server's in the current context, with `heap` bytes for `malloc` in
    /// kernels or as many as the driver provides, and this many streams.
    fn furnish(&self, driver: &Driver, heap: Option<u64>, streams: usize) -> Result<(), CUresult> {
        let mut ahead = Vec::new();
        for _ in 0..=streams {
            let mut stream = CUstream::NULL;
            driver.stream_create(&mut stream, CU_STREAM_NON_BLOCKING, 0)?;
            ahead.push(stream);
        }
        let _ = self.probe.set(ahead.pop().expect("one more than ahead"));
        for stream in ahead {
            self.streams.keep(0, stream);
        }
        let first = std::array::from_fn(|limit| {
            let mut value = 0;
            let status = driver.ctx_get_limit(&mut value, limit as CUlimit);
            status.is_ok().then_some(value as u64)
        });
        if let Some(stack) = first[CU_LIMIT_STACK_SIZE as usize] {
            self.local.fetch_max(local_of(stack), Ordering::Relaxed);
        }
        let _ = self.first_limits.set(first);
        // The driver accepts no larger heap once any client's module that allocates on the device is loaded.
        if let Some(heap) = heap
            && let Err(status) = driver.ctx_set_limit(CU_LIMIT_MALLOC_HEAP_SIZE, heap as usize)
        {
            tracing::debug!(%status, "the heap of device code stays as it is");
        }
        match FlagKernel::load(driver) {
            Ok(kernel) => drop(self.flag_kernel.set(kernel)),
            Err(status) => {
                tracing::warn!(%status, "no kernel writes completion markers: the driver refuses the kernel")
            }
        }
        match copy_kernel::load(driver) {
            Ok(kernels) => drop(self.copy_kernels.set(kernels)),
            Err(status) => {
                tracing::warn!(%status, "small copies wait behind large ones: the driver refuses the kernel")
            }
        }
        Ok(())
    }
}

/// Bytes for `malloc` in kernels in a context that belongs to one session; `None`: as many as the driver provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnHeap(pub Option<u64>);

/// Converts a limit of the driver, bytes of local memory.
fn local_of(bytes: u64) -> u32 {
    bytes.try_into().unwrap_or(u32::MAX)
}

/// Reference to a side's context; it keeps an annex from being closed.
enum Lent<'a> {
    Main(&'a Context),
    Annex(Arc<Context>),
}

impl Deref for Lent<'_> {
    type Target = Context;

    #[inline]
    fn deref(&self) -> &Context {
        match self {
            Lent::Main(context) => context,
            Lent::Annex(context) => context,
        }
    }
}

/// The devices of a server, at most [`MAX_DEVICES`].
#[derive(Debug)]
pub struct Devices(Vec<Device>);

impl Devices {
    /// Reads the properties of the driver's devices; creates no context.
    ///
    /// # Errors
    /// Driver errors.
    pub fn read(driver: &Driver, count: usize) -> Result<Devices, CUresult> {
        (0..count.min(MAX_DEVICES) as u8)
            .map(|ordinal| Device::new(driver, Ordinal::of_device(ordinal)))
            .collect::<Result<Vec<_>, _>>()
            .map(Devices)
    }

    /// The device of an ordinal that a client named.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` if there is no such device.
    pub fn get(&self, ordinal: u32) -> Result<&Device, CUresult> {
        let device = usize::try_from(ordinal).ok().and_then(|at| self.0.get(at));
        device.ok_or(CUDA_ERROR_INVALID_DEVICE)
    }

    /// The device to whose part of the device arena an address belongs.
    pub fn of_address(&self, address: u64) -> Option<Ordinal> {
        let part = address.checked_sub(DEVICE_ARENA)? / DEVICE_ARENA_STRIDE;
        let device = self.get(part.try_into().ok()?).ok()?;
        Some(device.ordinal)
    }

    /// All devices, by ordinal.
    pub fn iter(&self) -> std::slice::Iter<'_, Device> {
        self.0.iter()
    }

    /// The first device.
    pub fn first(&self) -> Option<&Device> {
        self.0.first()
    }

    /// Number of devices.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl Index<Ordinal> for Devices {
    type Output = Device;

    #[inline]
    fn index(&self, ordinal: Ordinal) -> &Device {
        &self.0[ordinal.index()]
    }
}

thread_local! {
    static CURRENT: Cell<u32> = const { Cell::new(NONE) };
}

/// Marks that no context with a [`Context::id`] is known to be current.
const NONE: u32 = 0;

impl Device {
    /// Reads a device's properties; creates no context.
    ///
    /// # Errors
    /// Driver errors.
    fn new(driver: &Driver, ordinal: Ordinal) -> Result<Device, CUresult> {
        let mut raw = 0;
        driver.device_get(&mut raw, ordinal.index() as i32)?;
        let mut name = [0u8; 256];
        driver.device_get_name(name.as_mut_ptr().cast(), name.len() as i32, raw)?;
        let len = name.iter().position(|b| *b == 0).unwrap_or(name.len());
        let mut uuid = CUuuid::default();
        driver.device_get_uuid(&mut uuid, raw)?;
        let number = |attribute| {
            let mut value = 0;
            driver.device_get_attribute(&mut value, attribute, raw)?;
            Ok::<i32, CUresult>(value)
        };
        let mut memory = 0;
        driver.device_total_mem(&mut memory, raw)?;
        let pci = format!(
            "{:04x}:{:02x}:{:02x}.0",
            number(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            number(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            number(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
        );
        let major = number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let each = number(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
        let start = DEVICE_ARENA + ordinal.index() as u64 * DEVICE_ARENA_STRIDE;
        Ok(Device {
            raw,
            name: String::from_utf8_lossy(&name[..len]).into_owned(),
            uuid,
            pci,
            memory: memory as u64,
            compute_mode: ComputeMode::from_attribute(number(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)?),
            capability: (10 * major + minor) as u32,
            threads: multiprocessors as u64 * each as u64,
            multiprocessors: multiprocessors as u32,
            ordinal,
            starting: Mutex::new(()),
            addresses: Mutex::new(RangeAllocator::new(start, MANAGED_OFFSET, 2 << 20)),
            managed: ManagedArena::new(start),
            partition: OnceLock::new(),
            main: Context::default(),
            annexes: Default::default(),
            heaps: Default::default(),
            short: AtomicBool::new(false),
            reserve: Reserve::default(),
            large_copies: LargeCopies::default(),
            began: Instant::now(),
        })
    }

    /// The context of the side that the calling thread has entered, once it is created.
    pub fn context(&self) -> Option<CUcontext> {
        self.side().raw.get().copied()
    }

    /// The device's context of the side that the calling thread has entered.
    #[inline]
    fn side(&self) -> Lent<'_> {
        match side::entered().annex() {
            None => Lent::Main(&self.main),
            Some(annex) => Lent::Annex(self.annexes[annex].read().clone()),
        }
    }

    /// Creates the context of the side that the calling thread has entered, unless it exists, with its initial streams
    /// and the main context. Takes a few hundred milliseconds.
    ///
    /// # Errors
    /// Driver errors.
    pub fn attach(&self, driver: &Driver) -> Result<(), CUresult> {
        let _starting = self.starting.lock();
        self.make_main(driver)?;
        match side::entered().annex() {
            None => Ok(()),
            Some(annex) => self.make_annex(driver, annex),
        }
    }

    fn make_annex(&self, driver: &Driver, annex: usize) -> Result<(), CUresult> {
        let own = self.annexes[annex].read().clone();
        if own.raw.get().is_some() {
            return Ok(());
        }
        tracing::info!(
            "Creating context {} on device {} ({})",
            side::entered().number(),
            self.ordinal,
            self.name
        );
        let mut context = CUcontext::NULL;
        // The driver makes a new context current.
        CURRENT.set(NONE);
        driver
            .context
            .ctx_create(&mut context, CU_CTX_SCHED_SPIN, self.raw)?;
        driver.ctx_set_current(context)?;
        let (heap, streams) = match *self.heaps[annex].lock() {
            Some(OwnHeap(heap)) => (heap, STREAMS_OF_ONE),
            None => (Some(DEVICE_HEAP), STREAMS_AHEAD),
        };
        if let Err(status) = own.furnish(driver, heap, streams) {
            CURRENT.set(NONE);
            let _ = driver.context.ctx_destroy(context);
            return Err(status);
        }
        let _ = own.raw.set(context);
        Ok(())
    }

    fn make_main(&self, driver: &Driver) -> Result<(), CUresult> {
        let own = &self.main;
        if own.raw.get().is_some() {
            return Ok(());
        }
        tracing::info!(
            "Creating server context on device {} ({})",
            self.ordinal,
            self.name
        );
        driver.primary_ctx_set_flags(self.raw, CU_CTX_SCHED_SPIN)?;
        let mut context = CUcontext::NULL;
        // The driver makes a new context current.
        CURRENT.set(NONE);
        driver.primary_ctx_retain(&mut context, self.raw)?;
        driver.ctx_set_current(context)?;
        let start = DEVICE_ARENA + self.ordinal.index() as u64 * DEVICE_ARENA_STRIDE;
        let mut reserved = 0;
        driver.mem_address_reserve(&mut reserved, MANAGED_OFFSET as usize, 0, start, 0)?;
        if reserved != start {
            tracing::error!(
                "the driver reserved {reserved:#x} instead of {start:#x} for device memory"
            );
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let mut granularity = 0;
        driver.mem_get_granularity(&mut granularity, &self.properties(), 0)?;
        if granularity as u64 != 2 << 20 {
            *self.addresses.lock() = RangeAllocator::new(start, MANAGED_OFFSET, granularity as u64);
        }
        own.furnish(driver, Some(DEVICE_HEAP), STREAMS_AHEAD)?;
        let _ = own.raw.set(context);
        Ok(())
    }

    /// Determines the heap of the next context that is created on an annex: that of a session to which the annex
    /// belongs, or the shared heap.
    pub fn set_heap(&self, side: Side, heap: Option<OwnHeap>) {
        if let Some(annex) = side.annex() {
            *self.heaps[annex].lock() = heap;
        }
    }

    /// Whether the device has a context on this side.
    pub fn has(&self, side: Side) -> bool {
        match side.annex() {
            None => self.is_attached(),
            Some(annex) => self.annexes[annex].read().raw.get().is_some(),
        }
    }

    /// Whether an allocation failed for lack of device memory since the last call.
    pub fn was_short(&self) -> bool {
        self.short.swap(false, Ordering::Relaxed)
    }

    /// Destroys the context of an annex, which no session may be using. The next session on that side creates a new
    /// one.
    pub fn close_annex(&self, driver: &Driver, side: Side) {
        let Some(annex) = side.annex().map(|annex| &self.annexes[annex]) else {
            return;
        };
        let _starting = self.starting.lock();
        let old = std::mem::take(&mut *annex.write());
        // Threads that query its state hold it only briefly.
        while Arc::strong_count(&old) > 1 {
            std::thread::sleep(GRACE);
        }
        let Some(context) = old.raw.get().copied() else {
            return;
        };
        tracing::info!(
            "Destroying context {} on device {} ({})",
            side.number(),
            self.ordinal,
            self.name
        );
        if let Err(status) = driver.context.ctx_destroy(context) {
            tracing::warn!(%status, "the context stays");
        }
        // The driver has changed the calling thread's context.
        CURRENT.set(NONE);
    }

    /// The kernel that writes completion markers, if the driver could load it.
    pub fn flag_kernel(&self) -> Option<FlagKernel> {
        self.side().flag_kernel.get().copied()
    }

    /// The kernel for small copies, if the driver could load it.
    pub fn copy_kernel(&self) -> Option<CopyKernel> {
        self.side().copy_kernels.get().map(|kernels| kernels.0)
    }

    /// The kernel for pieces of managed memory, if the driver could load it.
    pub fn move_kernel(&self) -> Option<MoveKernel> {
        self.side().copy_kernels.get().map(|kernels| kernels.1)
    }

    /// Notes that a session submits a large copy between the device and host memory.
    pub fn note_large_copy(&self, session: u64, bytes: u64) {
        self.large_copies.note(self.began.elapsed(), session, bytes);
    }

    /// Whether large copies of other sessions occupy the copy engines.
    #[inline]
    pub fn copies_beside(&self, session: u64) -> bool {
        let now = || self.began.elapsed();
        self.large_copies.are_in_flight_beside(session, now)
    }

    /// Makes this device's context current for the calling thread (`cuCtxSetCurrent`).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` if no client has attached to the device.
    #[inline]
    pub fn make_current(&self, driver: &Driver) -> Result<(), CUresult> {
        if self.side().make_current(driver)? {
            return Ok(());
        }
        // A session that has moved to an annex may use a device attached to before the move.
        if !self.is_attached() {
            return Err(CUDA_ERROR_INVALID_DEVICE);
        }
        self.attach(driver)?;
        match self.side().make_current(driver)? {
            true => Ok(()),
            false => Err(CUDA_ERROR_INVALID_DEVICE),
        }
    }

    /// Whether the driver must take more memory from the device to launch a kernel that needs `local` bytes of local
    /// memory per thread; the launch then waits until nothing is in flight. The stack limit's bytes are reserved in
    /// advance.
    #[inline]
    pub fn grows(&self, local: u32) -> bool {
        local > self.side().local.load(Ordering::Relaxed)
    }

    /// Notes that each thread now has `local` bytes of local memory, because such a kernel was launched or the limit
    /// raised.
    pub fn has_grown(&self, local: u64) {
        let local = local_of(local);
        self.side().local.fetch_max(local, Ordering::Relaxed);
    }

    /// Requests `local` bytes of local memory per thread, because a kernel that needs them is about to be launched.
    pub fn want_local(&self, local: u32) {
        self.side().wanted_local.fetch_max(local, Ordering::Relaxed);
    }

    /// Requests `local` bytes of local memory per thread for a kernel that may be launched later, unless that takes too
    /// much memory.
    pub fn want_local_ahead(&self, local: u32) {
        let first = self.first_limit(CU_LIMIT_STACK_SIZE).unwrap_or(0);
        let more = u64::from(local).saturating_sub(first);
        if more * self.threads <= self.memory / LOCAL_AHEAD {
            self.want_local(local);
        }
    }

    /// Reserves the requested local memory by raising the stack limit, so that launches that need no more do not stall.
    /// To be called while nothing is in flight. If the driver refuses, the launch itself reserves the memory.
    pub fn meet_local(&self, driver: &Driver) {
        let wanted = self.side().wanted_local.swap(0, Ordering::Relaxed);
        if !self.grows(wanted) || self.make_current(driver).is_err() {
            return;
        }
        let set = driver.ctx_set_limit(CU_LIMIT_STACK_SIZE, wanted as usize);
        let mut stack = 0;
        match set.and_then(|()| driver.ctx_get_limit(&mut stack, CU_LIMIT_STACK_SIZE)) {
            Ok(()) => self.has_grown(stack as u64),
            Err(status) => tracing::debug!(wanted, %status, "no local memory ahead"),
        }
    }

    /// The device's partition into groups of multiprocessors.
    ///
    /// # Errors
    /// Driver errors, the same one on each call.
    pub fn partition(&self, driver: &Driver) -> Result<&Arc<Partition>, CUresult> {
        let made = || Partition::new(driver, self.raw).map(Arc::new);
        self.partition
            .get_or_init(made)
            .as_ref()
            .map_err(|status| *status)
    }

    /// Makes a green context of this device current for the calling thread, until another context is made current.
    ///
    /// # Errors
    /// Driver errors.
    pub fn make_part_current(&self, driver: &Driver, green: &Green) -> Result<(), CUresult> {
        match green.context() {
            None => self.make_current(driver),
            Some(context) => {
                CURRENT.set(NONE);
                driver.ctx_set_current(context)
            }
        }
    }

    /// Initial value of a limit, before any client set it.
    pub fn first_limit(&self, limit: CUlimit) -> Option<u64> {
        *self.side().first_limits.get()?.get(limit as usize)?
    }

    /// Whether it has a main context. Contexts of other sides are created when needed.
    pub fn is_attached(&self) -> bool {
        self.main.raw.get().is_some()
    }

    /// Part of the device that each block of a function takes, by the number of blocks that can be resident at once
    /// (`cuOccupancyMaxActiveBlocksPerMultiprocessor`). `shared`: bytes of dynamic shared memory of a block. The function's
    /// context must be current.
    pub fn part_of_block(
        &self,
        driver: &Driver,
        function: CUfunction,
        block: [u32; 3],
        shared: u32,
    ) -> f32 {
        let (mut blocks, threads) = (0, volume(block));
        let size = threads.try_into().unwrap_or(i32::MAX);
        let asked =
            driver.occupancy_max_active_blocks(&mut blocks, function, size, shared as usize, 0);
        match asked {
            Ok(()) if blocks > 0 => 1.0 / (self.multiprocessors.max(1) as f32 * blocks as f32),
            _ => threads as f32 / self.threads.max(1) as f32,
        }
    }

    fn properties(&self) -> CUmemAllocationProp {
        CUmemAllocationProp {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: CUmemLocation {
                kind: CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.raw,
            },
            ..CUmemAllocationProp::default()
        }
    }

    /// Allocates at least `len` bytes of device memory, mapped and accessible; the rounded-up size is charged. Does not
    /// wait for other clients' work.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` or driver errors; then nothing is charged or held.
    pub fn grant(
        &self,
        driver: &Driver,
        account: &Account,
        (len, managed): (u64, bool),
    ) -> Result<Grant, CUresult> {
        self.make_current(driver)?;
        let len = self
            .addresses
            .lock()
            .round_up(len)
            .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let charge = account.take(Memory::Device(self.ordinal), len)?;
        let start = match managed {
            true => self.managed.take(driver, len)?,
            false => {
                let start = self.addresses.lock().take(len);
                start.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?
            }
        };
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let made = driver.mem_create(&mut handle, len as usize, &self.properties(), 0);
        let made = made.and_then(|()| self.map(driver, handle, (start, len)));
        match made {
            Ok(()) => Ok(self.granted(handle, (start, len), charge)),
            Err(status) => {
                self.give_back(driver, start, len)?;
                self.note_short();
                Err(status)
            }
        }
    }

    /// Maps memory granted by an earlier server at its old address.
    ///
    /// # Errors
    /// As [`Device::grant`]; `CUDA_ERROR_INVALID_VALUE` if the addresses cannot be a grant's or are already in use.
    pub fn adopt(
        &self,
        driver: &Driver,
        account: &Account,
        (start, len): (u64, u64),
        memory: OwnedFd,
    ) -> Result<Grant, CUresult> {
        self.make_current(driver)?;
        let charge = account.take(Memory::Device(self.ordinal), len)?;
        if self.managed.contains(start) {
            self.managed.take_at(driver, start, len)?;
        } else {
            let taken = self.addresses.lock().take_at(start, len);
            taken.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        }
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let descriptor = memory.as_raw_fd() as usize;
        let made = driver.memory.mem_import(&mut handle, descriptor, kind);
        match made.and_then(|()| self.map(driver, handle, (start, len))) {
            Ok(()) => Ok(self.granted(handle, (start, len), charge)),
            Err(status) => {
                self.give_back(driver, start, len)?;
                Err(status)
            }
        }
    }

    /// Maps physical memory with access for this device; releases the handle on failure.
    fn map(
        &self,
        driver: &Driver,
        handle: CUmemGenericAllocationHandle,
        (start, len): (u64, u64),
    ) -> Result<(), CUresult> {
        let access = CUmemAccessDesc {
            location: CUmemLocation {
                kind: CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.raw,
            },
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        driver
            .mem_map(start, len as usize, 0, handle, 0)
            .and_then(|()| {
                driver
                    .mem_set_access(start, len as usize, &access, 1)
                    .inspect_err(|_| {
                        let _ = driver.mem_unmap(start, len as usize);
                    })
            })
            .inspect_err(|_| {
                let _ = driver.mem_release(handle);
            })
    }

    fn granted(
        &self,
        handle: CUmemGenericAllocationHandle,
        (start, len): (u64, u64),
        mut charge: Charge,
    ) -> Grant {
        if self.managed.contains(start) {
            charge.set_managed(Some(Home::Device));
        }
        Grant {
            start,
            len,
            device: self.ordinal,
            handle: AtomicU64::new(handle.0),
            stays: AtomicBool::new(false),
            paid: Mutex::new(Paid {
                charge,
                openers: Vec::new(),
            }),
        }
    }

    /// Gives this device access to memory of another device (`cuMemSetAccess`).
    ///
    /// # Errors
    /// Driver errors.
    pub fn may_use(&self, driver: &Driver, grant: &Grant) -> Result<(), CUresult> {
        let access = CUmemAccessDesc {
            location: CUmemLocation {
                kind: CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.raw,
            },
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        driver.mem_set_access(grant.start, grant.len as usize, &access, 1)
    }

    /// Returns memory to the driver. No work may access it any more.
    ///
    /// # Errors
    /// Driver errors; the addresses then remain taken.
    pub fn revoke(&self, driver: &Driver, grant: Grant) -> Result<(), CUresult> {
        self.evict(driver, &grant)?;
        self.give_back(driver, grant.start, grant.len)
    }

    /// Returns the physical memory of a grant to the driver; the addresses remain taken. No work may access them. No effect
    /// if it has none.
    ///
    /// # Errors
    /// Driver errors.
    pub fn evict(&self, driver: &Driver, grant: &Grant) -> Result<(), CUresult> {
        if !grant.is_on_device() {
            return Ok(());
        }
        self.make_current(driver)?;
        driver.mem_unmap(grant.start, grant.len as usize)?;
        let handle = CUmemGenericAllocationHandle(grant.handle.swap(0, Ordering::AcqRel));
        driver.mem_release(handle)
    }

    /// Gives a grant physical memory again, with undefined content.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` or driver errors.
    pub fn refill(&self, driver: &Driver, grant: &Grant) -> Result<(), CUresult> {
        let handle = self.fill(driver, (grant.start, grant.len))?;
        grant.handle.store(handle.0, Ordering::Release);
        Ok(())
    }

    /// Maps new physical memory, which can be exported, at reserved addresses, with access for this device.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` or driver errors.
    pub fn fill(
        &self,
        driver: &Driver,
        (start, len): (u64, u64),
    ) -> Result<CUmemGenericAllocationHandle, CUresult> {
        self.make_current(driver)?;
        let mut handle = CUmemGenericAllocationHandle::NULL;
        driver.mem_create(&mut handle, len as usize, &self.properties(), 0)?;
        self.map(driver, handle, (start, len))?;
        Ok(handle)
    }

    /// As [`Device::fill`], with exported physical memory.
    ///
    /// # Errors
    /// Driver errors.
    pub fn fill_with(
        &self,
        driver: &Driver,
        range: (u64, u64),
        memory: OwnedFd,
    ) -> Result<CUmemGenericAllocationHandle, CUresult> {
        self.make_current(driver)?;
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let descriptor = memory.as_raw_fd() as usize;
        driver.memory.mem_import(&mut handle, descriptor, kind)?;
        self.map(driver, handle, range)?;
        Ok(handle)
    }

    /// New physical memory as a descriptor, which holds it while it is open in any process.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` or driver errors.
    pub fn physical(&self, driver: &Driver, len: u64) -> Result<OwnedFd, CUresult> {
        self.make_current(driver)?;
        let mut handle = CUmemGenericAllocationHandle::NULL;
        driver.mem_create(&mut handle, len as usize, &self.properties(), 0)?;
        let exported = export(driver, handle);
        driver.mem_release(handle)?;
        exported
    }

    /// Notes that the driver ran out of memory for an allocation.
    pub fn note_short(&self) {
        self.short.store(true, Ordering::Relaxed);
    }

    /// A grant of an earlier server whose content is in host memory: its addresses are taken.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` beyond the limit; `CUDA_ERROR_INVALID_VALUE` if the addresses cannot be a grant's or are
    /// already in use.
    pub fn adopt_evicted(
        &self,
        account: &Account,
        (start, len): (u64, u64),
    ) -> Result<Grant, CUresult> {
        let charge = account.take(Memory::Device(self.ordinal), len)?;
        let taken = self.addresses.lock().take_at(start, len);
        taken.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        Ok(self.granted(CUmemGenericAllocationHandle::NULL, (start, len), charge))
    }

    /// Frees managed memory whose addresses are to become those of host memory. No work may access it any more.
    ///
    /// # Errors
    /// Driver errors; the addresses then remain taken.
    pub fn vacate(&self, driver: &Driver, grant: Grant) -> Result<(), CUresult> {
        self.make_current(driver)?;
        driver.mem_unmap(grant.start, grant.len as usize)?;
        driver.mem_release(grant.handle())?;
        self.managed.vacate(driver, grant.start, grant.len)
    }

    /// Takes back addresses after [`Device::vacate`], where nothing is mapped any more.
    pub fn give_back_vacated(&self, start: u64, len: u64) {
        self.managed.give_back_vacated(start, len);
    }

    /// Takes back addresses where nothing is mapped any more.
    fn give_back(&self, driver: &Driver, start: u64, len: u64) -> Result<(), CUresult> {
        if self.managed.contains(start) {
            return self.managed.give_back(driver, start, len);
        }
        self.addresses.lock().give_back(start, len);
        Ok(())
    }

    /// Whether a kept stream of this priority is available.
    pub fn has_stream(&self, priority: i32) -> bool {
        self.side().streams.has(priority)
    }

    /// Returns a non-blocking stream: a kept one if available, else a new one.
    ///
    /// # Errors
    /// Driver errors.
    pub fn take_stream(&self, driver: &Driver, priority: i32) -> Result<CUstream, CUresult> {
        if let Some(stream) = self.side().streams.take(priority) {
            return Ok(stream);
        }
        self.make_current(driver)?;
        let mut stream = CUstream::NULL;
        driver.stream_create(&mut stream, CU_STREAM_NON_BLOCKING, priority)?;
        Ok(stream)
    }

    /// Keeps a drained stream for the next session.
    pub fn keep_stream(&self, driver: &Driver, priority: i32, stream: CUstream) {
        debug_assert!(!driver.is_capturing(stream), "a stream that captures");
        if let Some(surplus) = self.side().streams.keep(priority, stream) {
            let _ = driver.context.stream_destroy(surplus);
        }
    }

    /// Number of kept streams, including those in green contexts, and number of green contexts.
    pub fn kept(&self) -> (usize, usize) {
        let parted = self.partition.get().and_then(|parted| parted.as_ref().ok());
        let (streams, parts) = parted.map_or((0, 0), |partition| partition.kept());
        let of_annexes = self
            .annexes
            .iter()
            .map(|annex| annex.read().streams.count());
        let own = self.main.streams.count() + of_annexes.sum::<usize>();
        (own + streams, parts)
    }

    /// Makes the GPU copy a word of `len` bytes from device memory to registered memory, then write a flag.
    ///
    /// # Errors
    /// Driver errors.
    pub fn read_word(
        &self,
        driver: &Driver,
        word: CUdeviceptr,
        len: usize,
        to: u64,
        (flag, value): (CUdeviceptr, u32),
    ) -> Result<(), CUresult> {
        let stream = *self.side().probe.get().ok_or(CUDA_ERROR_INVALID_DEVICE)?;
        self.make_current(driver)?;
        driver.memcpy_dtoh_async(to, word, len, stream)?;
        driver.stream_write_value32(stream, flag, value, 0)
    }

    /// Launches the flag kernel and waits for it. After function look-ups, the driver makes the next launch of any
    /// session wait until nothing is in flight; here nothing else is in flight.
    ///
    /// # Errors
    /// Driver errors.
    pub fn launch_something(&self, driver: &Driver, scratch: CUdeviceptr) -> Result<(), CUresult> {
        // Use only the existing context: an annex that was closed meanwhile has a new, empty one.
        let side = self.side();
        let (Some(kernel), Some(probe)) = (side.flag_kernel.get(), side.probe.get()) else {
            return Ok(());
        };
        if !side.make_current(driver)? {
            return Ok(());
        }
        kernel.launch(driver, *probe, scratch, 0)?;
        driver.stream_synchronize(*probe)
    }

    /// Free memory of the device, bytes (`cuMemGetInfo`); 0 if it cannot be had.
    pub fn free_memory(&self, driver: &Driver) -> u64 {
        let (mut free, mut total) = (0, 0);
        let known = self
            .make_current(driver)
            .and_then(|()| driver.mem_get_info(&mut free, &mut total));
        known.map_or(0, |()| free as u64)
    }

    /// Asks the driver whether the context is still sound (`cuStreamQuery` of an idle stream, 0.7 µs).
    ///
    /// # Errors
    /// The sticky status.
    pub fn probe(&self, driver: &Driver) -> Result<(), CUresult> {
        let side = self.side();
        let Some(probe) = side.probe.get() else {
            return Ok(());
        };
        if !side.make_current(driver)? {
            return Ok(());
        }
        match driver.stream_query(*probe) {
            Err(CUDA_ERROR_NOT_READY) => Ok(()),
            other => other,
        }
    }
}
