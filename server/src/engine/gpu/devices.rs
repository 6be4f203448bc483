//! The devices: one primary context each, their memory, and streams kept for reuse.

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::driver::Driver;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::ranges::RangeAllocator;
use crate::engine::base::side::{self, SIDES, Side};
use crate::engine::gpu::flag_kernel::FlagKernel;
use crate::engine::gpu::green::Green;
use crate::engine::gpu::kept_streams::KeptStreams;
use crate::engine::gpu::partition::Partition;
use mpsshim_api::cuda::*;
use mpsshim_proto::arena::{DEVICE_ARENA, DEVICE_ARENA_STRIDE};
use mpsshim_proto::handshake::MAX_DEVICES;
use parking_lot::{Mutex, RwLock};
use std::cell::Cell;
use std::ops::{Deref, Index};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Streams made ahead: creating one while another client's kernels run can block until they are done.
const STREAMS_AHEAD: usize = 32;

/// Heap of device code (`malloc` in a kernel), bytes, for all clients. The driver takes it from the device when the
/// first module that allocates is loaded.
const DEVICE_HEAP: usize = 512 << 20;

/// Pause between two looks whether others are done with a context.
const GRACE: Duration = Duration::from_micros(100);

/// Local memory for kernels that are not known to be launched may take this part of a device.
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
    handle: CUmemGenericAllocationHandle,
    paid: Mutex<Paid>,
}

/// A descriptor of physical memory, which holds it as long as somebody has it open.
///
/// # Errors
/// The driver's.
pub fn export(driver: &Driver, handle: CUmemGenericAllocationHandle) -> Result<OwnedFd, CUresult> {
    let mut raw = -1;
    let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    driver.memory.mem_export(&mut raw, handle, kind, 0)?;
    if raw < 0 {
        return Err(CUDA_ERROR_OPERATING_SYSTEM);
    }
    // SAFETY: the driver opened it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Who pays for a grant.
#[derive(Debug)]
struct Paid {
    /// Its length, counted until the driver has the memory back.
    charge: Charge,
    /// Sessions that have opened a part of it, once for each part.
    openers: Vec<Account>,
}

impl Grant {
    /// A descriptor of the memory, which holds it as long as somebody has it open.
    ///
    /// # Errors
    /// The driver's.
    pub fn export(&self, driver: &Driver) -> Result<OwnedFd, CUresult> {
        export(driver, self.handle)
    }

    /// A session has opened a part of it.
    pub fn opened_by(&self, account: &Account) {
        self.paid.lock().openers.push(account.clone());
    }

    /// A session that has it, or has opened a part of it, gives that up. If it has paid so far, one that goes on having it
    /// pays from now on.
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

/// A device and its context.
#[derive(Debug)]
pub struct Device {
    /// The driver's device.
    pub raw: CUdevice,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// Its UUID.
    pub uuid: CUuuid,
    /// Where it is on the bus, such as `0000:00:06.0`.
    pub pci: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Its compute capability, `10 * major + minor`.
    pub capability: u32,
    /// Threads that it has room for at a time.
    pub threads: u64,
    /// The server's number of it.
    pub ordinal: Ordinal,
    starting: Mutex<()>,
    addresses: Mutex<RangeAllocator>,
    partition: OnceLock<Result<Arc<Partition>, CUresult>>,
    main: Context,
    /// Further contexts, made when they are needed and closed when nobody has anything there.
    annexes: [RwLock<Arc<Context>>; SIDES - 1],
    /// The driver has had no memory for somebody.
    short: AtomicBool,
}

/// A context of a device, and what belongs to it.
#[derive(Debug)]
struct Context {
    /// No other context of the server's has it.
    id: u32,
    raw: OnceLock<CUcontext>,
    streams: KeptStreams,
    probe: OnceLock<CUstream>,
    first_limits: OnceLock<[Option<u64>; CU_LIMIT_MAX as usize]>,
    flag_kernel: OnceLock<FlagKernel>,
    /// Bytes of local memory that each thread has.
    local: AtomicU32,
    /// Bytes that it should have when next nothing is in flight.
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
            local: AtomicU32::new(0),
            wanted_local: AtomicU32::new(0),
        }
    }
}

impl Context {
    /// Makes it current, once it is made; whether it is.
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

    /// Makes what a context begins with, which is current.
    fn furnish(&self, driver: &Driver) -> Result<(), CUresult> {
        let mut ahead = Vec::new();
        for _ in 0..=STREAMS_AHEAD {
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
        // The driver takes no larger heap once a module that allocates on the device is loaded, be it another client's.
        if let Err(status) = driver.ctx_set_limit(CU_LIMIT_MALLOC_HEAP_SIZE, DEVICE_HEAP) {
            tracing::debug!(%status, "the heap of device code stays as it is");
        }
        match FlagKernel::load(driver) {
            Ok(kernel) => drop(self.flag_kernel.set(kernel)),
            Err(status) => {
                tracing::warn!(%status, "no kernel writes marks: the driver does not take it")
            }
        }
        Ok(())
    }
}

/// Bytes of local memory, by a limit of the driver's.
fn local_of(bytes: u64) -> u32 {
    bytes.try_into().unwrap_or(u32::MAX)
}

/// The context of a side, for a while: an annex is not closed before.
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

/// The devices that a server serves, at most [`MAX_DEVICES`].
#[derive(Debug)]
pub struct Devices(Vec<Device>);

impl Devices {
    /// Reads what the driver's devices are; makes no context.
    ///
    /// # Errors
    /// The driver's.
    pub fn read(driver: &Driver, count: usize) -> Result<Devices, CUresult> {
        (0..count.min(MAX_DEVICES) as u8)
            .map(|ordinal| Device::new(driver, Ordinal::of_device(ordinal)))
            .collect::<Result<Vec<_>, _>>()
            .map(Devices)
    }

    /// The device of an ordinal that a client named.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` when there is none.
    pub fn get(&self, ordinal: u32) -> Result<&Device, CUresult> {
        let device = usize::try_from(ordinal).ok().and_then(|at| self.0.get(at));
        device.ok_or(CUDA_ERROR_INVALID_DEVICE)
    }

    /// The device whose part of the device arena an address is in.
    pub fn of_address(&self, address: u64) -> Option<Ordinal> {
        let part = address.checked_sub(DEVICE_ARENA)? / DEVICE_ARENA_STRIDE;
        let device = self.get(part.try_into().ok()?).ok()?;
        Some(device.ordinal)
    }

    /// All of them, by ordinal.
    pub fn iter(&self) -> std::slice::Iter<'_, Device> {
        self.0.iter()
    }

    /// The first.
    pub fn first(&self) -> Option<&Device> {
        self.0.first()
    }

    /// How many there are.
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

/// No context of [`Context::id`] is known to be current.
const NONE: u32 = 0;

impl Device {
    /// Reads what a device is; makes no context.
    ///
    /// # Errors
    /// The driver's.
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
            capability: (10 * major + minor) as u32,
            threads: multiprocessors as u64 * each as u64,
            ordinal,
            starting: Mutex::new(()),
            addresses: Mutex::new(RangeAllocator::new(start, DEVICE_ARENA_STRIDE, 2 << 20)),
            partition: OnceLock::new(),
            main: Context::default(),
            annexes: Default::default(),
            short: AtomicBool::new(false),
        })
    }

    /// The context, once it is made.
    pub fn context(&self) -> Option<CUcontext> {
        self.side().raw.get().copied()
    }

    /// What the side that the calling thread works on has of it.
    #[inline]
    fn side(&self) -> Lent<'_> {
        match side::entered().annex() {
            None => Lent::Main(&self.main),
            Some(annex) => Lent::Annex(self.annexes[annex].read().clone()),
        }
    }

    /// Makes the context of the side that the calling thread works on, and what goes with it, once. Takes a few hundred
    /// milliseconds.
    ///
    /// # Errors
    /// The driver's.
    pub fn attach(&self, driver: &Driver) -> Result<(), CUresult> {
        let _starting = self.starting.lock();
        self.make_main(driver)?;
        match side::entered().annex() {
            None => Ok(()),
            Some(annex) => self.make_annex(driver, &self.annexes[annex]),
        }
    }

    fn make_annex(&self, driver: &Driver, annex: &RwLock<Arc<Context>>) -> Result<(), CUresult> {
        let own = annex.read().clone();
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
        // What the driver makes is current afterwards.
        CURRENT.set(NONE);
        driver
            .context
            .ctx_create(&mut context, CU_CTX_SCHED_SPIN, self.raw)?;
        driver.ctx_set_current(context)?;
        if let Err(status) = own.furnish(driver) {
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
        // What the driver makes is current afterwards.
        CURRENT.set(NONE);
        driver.primary_ctx_retain(&mut context, self.raw)?;
        driver.ctx_set_current(context)?;
        let start = DEVICE_ARENA + self.ordinal.index() as u64 * DEVICE_ARENA_STRIDE;
        let mut reserved = 0;
        driver.mem_address_reserve(&mut reserved, DEVICE_ARENA_STRIDE as usize, 0, start, 0)?;
        if reserved != start {
            tracing::error!(
                "the driver reserved {reserved:#x} instead of {start:#x} for device memory"
            );
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let mut granularity = 0;
        driver.mem_get_granularity(&mut granularity, &self.properties(), 0)?;
        if granularity as u64 != 2 << 20 {
            *self.addresses.lock() =
                RangeAllocator::new(start, DEVICE_ARENA_STRIDE, granularity as u64);
        }
        own.furnish(driver)?;
        let _ = own.raw.set(context);
        Ok(())
    }

    /// Whether it has a context of this side.
    pub fn has(&self, side: Side) -> bool {
        match side.annex() {
            None => self.is_attached(),
            Some(annex) => self.annexes[annex].read().raw.get().is_some(),
        }
    }

    /// Whether the driver has had no memory for somebody since this was last asked.
    pub fn was_short(&self) -> bool {
        self.short.swap(false, Ordering::Relaxed)
    }

    /// Ends the context of an annex, in which nobody has anything; who needs one next makes another.
    pub fn close_annex(&self, driver: &Driver, side: Side) {
        let Some(annex) = side.annex().map(|annex| &self.annexes[annex]) else {
            return;
        };
        let _starting = self.starting.lock();
        let old = std::mem::take(&mut *annex.write());
        // Who asks how it is does so for a moment.
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
        // Of those that the driver has for the calling thread.
        CURRENT.set(NONE);
    }

    /// The kernel that writes marks, if the driver took it.
    pub fn flag_kernel(&self) -> Option<FlagKernel> {
        self.side().flag_kernel.get().copied()
    }

    /// Makes this device's context the calling thread's.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` when no client has attached to the device.
    #[inline]
    pub fn make_current(&self, driver: &Driver) -> Result<(), CUresult> {
        if self.side().make_current(driver)? {
            return Ok(());
        }
        // A session that has come to an annex may use a device that was attached to before.
        if !self.is_attached() {
            return Err(CUDA_ERROR_INVALID_DEVICE);
        }
        self.attach(driver)?;
        match self.side().make_current(driver)? {
            true => Ok(()),
            false => Err(CUDA_ERROR_INVALID_DEVICE),
        }
    }

    /// Whether the driver takes more memory from the device when a kernel is launched whose threads have so many bytes of
    /// local memory: it then waits until nothing is in flight. As many as the limit of the stack says are there already.
    #[inline]
    pub fn grows(&self, local: u32) -> bool {
        local > self.side().local.load(Ordering::Relaxed)
    }

    /// Each thread has so many bytes of local memory from now on: such a kernel was launched, or the limit was raised.
    pub fn has_grown(&self, local: u64) {
        let local = local_of(local);
        self.side().local.fetch_max(local, Ordering::Relaxed);
    }

    /// A kernel that needs so many bytes of local memory for each thread is about to be launched.
    pub fn want_local(&self, local: u32) {
        self.side().wanted_local.fetch_max(local, Ordering::Relaxed);
    }

    /// A kernel that needs so many may be launched some time: they are not worth much memory.
    pub fn want_local_ahead(&self, local: u32) {
        let first = self.first_limit(CU_LIMIT_STACK_SIZE).unwrap_or(0);
        let more = u64::from(local).saturating_sub(first);
        if more * self.threads <= self.memory / LOCAL_AHEAD {
            self.want_local(local);
        }
    }

    /// Takes the local memory that is wanted from the device, by the limit of the stack: a launch that needs no more waits
    /// for nobody. To be called while nothing is in flight; what cannot be had is left to the launch.
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

    /// How it can be parted.
    ///
    /// # Errors
    /// The driver's, each time the same.
    pub fn partition(&self, driver: &Driver) -> Result<&Arc<Partition>, CUresult> {
        let made = || Partition::new(driver, self.raw).map(Arc::new);
        self.partition
            .get_or_init(made)
            .as_ref()
            .map_err(|status| *status)
    }

    /// Makes a part of this device the calling thread's, until a context is made current the next time.
    ///
    /// # Errors
    /// The driver's.
    pub fn make_part_current(&self, driver: &Driver, green: &Green) -> Result<(), CUresult> {
        match green.context() {
            None => self.make_current(driver),
            Some(context) => {
                CURRENT.set(NONE);
                driver.ctx_set_current(context)
            }
        }
    }

    /// What a limit was before any client set it.
    pub fn first_limit(&self, limit: CUlimit) -> Option<u64> {
        *self.side().first_limits.get()?.get(limit as usize)?
    }

    /// Whether it has a context. One of another side is made when it is needed.
    pub fn is_attached(&self) -> bool {
        self.main.raw.get().is_some()
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

    /// Device memory of at least `len` bytes, mapped and accessible, and counted with all that it is rounded up to.
    /// Blocks on no other client's work.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, or the driver's; nothing is counted or held then.
    pub fn grant(&self, driver: &Driver, account: &Account, len: u64) -> Result<Grant, CUresult> {
        self.make_current(driver)?;
        let len = self
            .addresses
            .lock()
            .round_up(len)
            .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let charge = account.take(Memory::Device(self.ordinal), len)?;
        let start = self
            .addresses
            .lock()
            .take(len)
            .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let made = driver.mem_create(&mut handle, len as usize, &self.properties(), 0);
        let made = made.and_then(|()| self.map(driver, handle, (start, len)));
        match made {
            Ok(()) => Ok(self.granted(handle, (start, len), charge)),
            Err(status) => {
                self.addresses.lock().give_back(start, len);
                self.short.store(true, Ordering::Relaxed);
                Err(status)
            }
        }
    }

    /// Memory that another server has granted, at its address.
    ///
    /// # Errors
    /// As [`Device::grant`]; `CUDA_ERROR_INVALID_VALUE` where no server grants any, or did so already.
    pub fn adopt(
        &self,
        driver: &Driver,
        account: &Account,
        (start, len): (u64, u64),
        memory: OwnedFd,
    ) -> Result<Grant, CUresult> {
        self.make_current(driver)?;
        let charge = account.take(Memory::Device(self.ordinal), len)?;
        let taken = self.addresses.lock().take_at(start, len);
        taken.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let descriptor = memory.as_raw_fd() as usize;
        let made = driver.memory.mem_import(&mut handle, descriptor, kind);
        match made.and_then(|()| self.map(driver, handle, (start, len))) {
            Ok(()) => Ok(self.granted(handle, (start, len), charge)),
            Err(status) => {
                self.addresses.lock().give_back(start, len);
                Err(status)
            }
        }
    }

    /// Maps memory for this device; the handle is released where that fails.
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
        charge: Charge,
    ) -> Grant {
        Grant {
            start,
            len,
            device: self.ordinal,
            handle,
            paid: Mutex::new(Paid {
                charge,
                openers: Vec::new(),
            }),
        }
    }

    /// Gives this device access to memory of another.
    ///
    /// # Errors
    /// The driver's.
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

    /// Gives memory back to the driver. No work may touch it any more.
    ///
    /// # Errors
    /// The driver's; the addresses then stay taken.
    pub fn revoke(&self, driver: &Driver, grant: Grant) -> Result<(), CUresult> {
        self.make_current(driver)?;
        driver.mem_unmap(grant.start, grant.len as usize)?;
        driver.mem_release(grant.handle)?;
        self.addresses.lock().give_back(grant.start, grant.len);
        Ok(())
    }

    /// Whether a stream of this priority was kept.
    pub fn has_stream(&self, priority: i32) -> bool {
        self.side().streams.has(priority)
    }

    /// A non-blocking stream, a kept one if there is one.
    ///
    /// # Errors
    /// The driver's.
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

    /// Streams that are kept, those in parts of the device included, and parts.
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

    /// Has the GPU copy a word of device memory to registered memory, and then write a flag.
    ///
    /// # Errors
    /// The driver's.
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

    /// Launches a kernel and waits for it: after the driver was asked for functions, the next launch, whosever it is, waits
    /// until nothing is in flight. Nothing else is.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch_something(&self, driver: &Driver, scratch: CUdeviceptr) -> Result<(), CUresult> {
        // Not what comes after an annex that was closed meanwhile.
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
