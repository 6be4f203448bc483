//! Devices, contexts, and each thread's stack of them.
//!
//! In the server, all contexts of a client on a device are one. The client distinguishes them, so that destroying one
//! releases the objects created in it ([`crate::proxy::teardown`]). A context is never freed, only marked dead: it may be current
//! in a thread.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use mpsshim_api::cuda::{
    CU_CTX_MAP_HOST, CU_DEVICE_ATTRIBUTE_MAX_PITCH, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    CU_LIMIT_MAX, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT,
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_NOT_PERMITTED,
    CUDA_ERROR_NOT_SUPPORTED, CUresult, CUuuid,
};
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::handshake::{MAX_DEVICES, Welcome};
use mpsshim_proto::message::context::Confine;
use mpsshim_proto::message::{Attach, Op, Value};
use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::ffi::Status;
use crate::loader::genuine;
use crate::proxy::pages;
use crate::proxy::replay;
use crate::proxy::submit::{Session, session};
use crate::proxy::wait::Policy;
use crate::{settings, thread};

/// A device in the program's numbering.
#[derive(Debug)]
pub struct Device {
    /// The server's ordinal, if the server has it.
    pub server: Option<u32>,
    /// `CU_DEVICE_ATTRIBUTE_MAX_*`.
    pub limits: Limits,
    /// Multiprocessors that the program may use; 0: all.
    multiprocessors: u32,
    /// Bytes of memory that it may have.
    memory: AtomicU64,
    primary: OnceLock<&'static Context>,
    attached: Mutex<bool>,
}

/// Limits that launches and copies are checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub block_threads: u32,
    pub block: [u32; 3],
    pub grid: [u32; 3],
    /// Bytes from row to row.
    pub pitch: u64,
}

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

/// Sets the map of devices: for each of the program's, in order, its ordinal in the server, with the limits that the
/// server has granted.
pub fn set_devices(servers: Vec<Option<u32>>, granted: &Welcome) {
    let of = |server: Option<u32>| server.map_or(0, |server| server as usize % MAX_DEVICES);
    let devices = servers
        .into_iter()
        .enumerate()
        .map(|(ordinal, server)| Device {
            server,
            limits: limits_of(ordinal as i32),
            multiprocessors: granted.multiprocessors[of(server)],
            memory: AtomicU64::new(match granted.memory[of(server)] {
                0 => u64::MAX,
                bytes => bytes,
            }),
            primary: OnceLock::new(),
            attached: Mutex::new(false),
        })
        .collect();
    let _ = DEVICES.set(devices);
}

fn limits_of(ordinal: i32) -> Limits {
    let attribute = |number: u32, otherwise: u32| {
        device_attribute(ordinal, number).map_or(otherwise, |value| value as u32)
    };
    Limits {
        block_threads: attribute(1, 1024),
        block: [attribute(2, 1024), attribute(3, 1024), attribute(4, 64)],
        grid: [
            attribute(5, 0x7fff_ffff),
            attribute(6, 65_535),
            attribute(7, 65_535),
        ],
        pitch: attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH, i32::MAX as u32).into(),
    }
}

/// `cuDeviceGetAttribute` of the genuine driver.
pub fn device_attribute(ordinal: i32, attribute: u32) -> Option<i32> {
    type Get = unsafe extern "C" fn(*mut i32, u32, i32) -> CUresult;
    let address = genuine::symbol("cuDeviceGetAttribute")?;
    // SAFETY: the driver's function of this name has this signature.
    let get = unsafe { std::mem::transmute::<*const (), Get>(address) };
    let mut value = 0;
    // SAFETY: writes one int.
    unsafe { get(&mut value, attribute, ordinal) }
        .is_ok()
        .then_some(value)
}

/// The number of multiprocessors of a device to which the program is limited, in a context of that device if one is
/// given; `None`: it may use all.
pub fn granted_multiprocessors(ordinal: i32, context: Option<&Context>) -> Option<i32> {
    let in_context = context
        .filter(|context| context.device == ordinal)
        .map(|context| context.part_count.load(Ordering::Relaxed));
    let granted = || Some(DEVICES.get()?.get(ordinal as usize)?.multiprocessors);
    let count = in_context.filter(|count| *count > 0).or_else(granted)?;
    (count > 0).then_some(count as i32)
}

/// The number of multiprocessors that the program may use in a context.
pub fn multiprocessors(context: &Context) -> Option<i32> {
    let ordinal = context.device;
    granted_multiprocessors(ordinal, Some(context))
        .or_else(|| device_attribute(ordinal, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT))
}

/// How many devices the program has.
pub fn count() -> usize {
    DEVICES.get().map_or(0, Vec::len)
}

/// A device of the program's.
pub fn device(ordinal: i32) -> Status<&'static Device> {
    permitted()?;
    let devices = DEVICES.get().ok_or(CUDA_ERROR_NOT_INITIALIZED)?;
    usize::try_from(ordinal)
        .ok()
        .and_then(|ordinal| devices.get(ordinal))
        .ok_or(CUDA_ERROR_INVALID_DEVICE)
}

/// The program's ordinal of a device of the server.
pub fn ordinal_of(server: u32) -> Option<i32> {
    let devices = DEVICES.get()?;
    let found = devices.iter().position(|d| d.server == Some(server))?;
    Some(found as i32)
}

/// Placeholder for a limit that was never queried.
const UNKNOWN: u64 = u64::MAX;

/// A destructor of context-local storage: context, key, value.
pub type Destructor = unsafe extern "C" fn(u64, *mut c_void, *mut c_void);

/// Context-local storage: key to value and destructor, as the export table of that name has them.
pub type Storage = BTreeMap<usize, (usize, Option<Destructor>)>;

/// Handles of the objects created in a context.
#[derive(Debug)]
pub struct Contents {
    pub events: BTreeSet<u64>,
    pub streams: BTreeSet<u64>,
    pub images: BTreeSet<u64>,
}

/// A primary context or one that the program created.
#[derive(Debug)]
pub struct Context {
    /// The program's handle.
    pub handle: u64,
    /// The program's ordinal.
    pub device: i32,
    /// The server's.
    pub server_device: u32,
    /// Whether it is its device's primary context.
    pub primary: bool,
    /// `cuCtxGetApiVersion`.
    pub version: u32,
    /// Handle of its green context; 0 for others.
    pub green: u64,
    /// Handle of its own part of the device; 0: it has the process's.
    part: AtomicU64,
    /// Multiprocessors of that part.
    part_count: AtomicU32,
    /// The primary context to which a green context belongs.
    home: Option<&'static Context>,
    /// `CU_CTX_*`.
    pub flags: AtomicU32,
    /// `cuCtxGetId`; a revived primary context gets another one.
    pub id: AtomicU64,
    /// Cleared when it is destroyed, set again when a primary context is revived.
    pub alive: AtomicBool,
    /// Retains of a primary context.
    pub retained: Mutex<u32>,
    /// Operations given to its blocking streams; written under the ring's lock.
    pub joined: AtomicU64,
    /// Context-local storage.
    pub storage: Mutex<Storage>,
    /// `cuCtxGetLimit` answers.
    known_limits: [AtomicU64; CU_LIMIT_MAX as usize],
    /// `cuCtxSetCacheConfig`: kept, without effect on current devices.
    pub cache_config: AtomicU32,
    /// `cuCtxAttach` without `cuCtxDetach`.
    pub attached: AtomicU32,
    legacy: AtomicPtr<()>,
    making_legacy: Mutex<()>,
    streams: Mutex<BTreeSet<u64>>,
    events: Mutex<BTreeSet<u64>>,
    images: Mutex<BTreeSet<u64>>,
}

static CONTEXTS: RwLock<BTreeMap<u64, &'static Context>> = RwLock::new(BTreeMap::new());

/// Every context that exists or may be revived.
pub fn all() -> Vec<&'static Context> {
    let contexts = CONTEXTS.read();
    let may_be_used = |context: &&Context| context.primary || context.usable().is_ok();
    contexts.values().copied().filter(may_be_used).collect()
}

/// The context of a handle, even if it was destroyed: the driver distinguishes destroyed contexts from invalid handles.
/// `CUDA_ERROR_INVALID_CONTEXT` for the latter.
///
/// A program may know a primary context before it asks for it here: cudart reads the handle from a table of the
/// genuine driver and looks into the context's storage first.
pub fn by_handle(handle: u64) -> Status<&'static Context> {
    let known = |handle| CONTEXTS.read().get(&handle).copied();
    known(handle)
        .or_else(|| {
            for (ordinal, device) in DEVICES.get()?.iter().enumerate() {
                let _ = device.primary(ordinal as i32);
            }
            known(handle)
        })
        .ok_or(CUDA_ERROR_INVALID_CONTEXT)
}

/// As [`by_handle`], where 0 stands for the current context.
pub fn given_or_current(handle: u64) -> Status<&'static Context> {
    if handle == 0 {
        current()
    } else {
        by_handle(handle)
    }
}

fn next_handle() -> u64 {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let index = MADE.fetch_add(1, Ordering::Relaxed);
    Handle::new(Kind::Context, 0, index).0
}

fn next_id() -> u64 {
    static IDS: AtomicU64 = AtomicU64::new(1);
    IDS.fetch_add(1, Ordering::Relaxed)
}

impl Context {
    fn make(
        handle: u64,
        device: i32,
        server_device: u32,
        primary: bool,
        version: u32,
        flags: u32,
    ) -> &'static Context {
        let devices = (device, server_device);
        Context::make_in(handle, devices, (0, None), primary, version, flags)
    }

    fn make_in(
        handle: u64,
        (device, server_device): (i32, u32),
        (green, home): (u64, Option<&'static Context>),
        primary: bool,
        version: u32,
        flags: u32,
    ) -> &'static Context {
        let context: &'static Context = Box::leak(Box::new(Context {
            handle,
            device,
            server_device,
            primary,
            version,
            green,
            part: AtomicU64::new(0),
            part_count: AtomicU32::new(0),
            home,
            flags: AtomicU32::new(flags),
            id: AtomicU64::new(next_id()),
            alive: AtomicBool::new(!primary),
            retained: Mutex::new(0),
            joined: AtomicU64::new(0),
            storage: Mutex::new(Storage::new()),
            known_limits: [const { AtomicU64::new(UNKNOWN) }; CU_LIMIT_MAX as usize],
            cache_config: AtomicU32::new(0),
            attached: AtomicU32::new(0),
            legacy: AtomicPtr::new(ptr::null_mut()),
            making_legacy: Mutex::new(()),
            streams: Mutex::new(BTreeSet::new()),
            events: Mutex::new(BTreeSet::new()),
            images: Mutex::new(BTreeSet::new()),
        }));
        CONTEXTS.write().insert(handle, context);
        context
    }

    /// A live context of no device.
    #[cfg(test)]
    pub fn for_test() -> &'static Context {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let handle = MADE.fetch_add(1, Ordering::Relaxed) as u64 + 1;
        Context::make(handle, 0, 0, false, 0, 0)
    }

    /// The context to which modules belong: for a green context its device's primary one.
    #[inline]
    pub fn home(&'static self) -> &'static Context {
        self.home.unwrap_or(self)
    }

    /// Handle of the green context, or of the part of the device, that its streams are created in; 0: neither.
    pub fn streams_in(&self) -> u64 {
        match self.green {
            0 => self.part.load(Ordering::Relaxed),
            green => green,
        }
    }

    /// Gives it a part of the device as its own, of the size that the environment now names, if each context is to have
    /// one.
    pub fn take_part(&self, session: &Session) -> Status {
        if !settings::percentage_per_context() {
            return Ok(());
        }
        let hundredths = settings::active_thread_centipercent();
        if !(1..10_000).contains(&hundredths) {
            return Ok(());
        }
        let body = Confine {
            green: next_green_handle(),
            device: self.server_device,
            hundredths,
        };
        let count: Value = match session.request(Op::Confine, &body, &[])?.read() {
            Ok(count) => count,
            // Such devices cannot be partitioned.
            Err(CUDA_ERROR_NOT_SUPPORTED) => return Ok(()),
            Err(status) => return Err(status),
        };
        self.part.store(body.green, Ordering::Relaxed);
        self.part_count.store(count.value as u32, Ordering::Relaxed);
        Ok(())
    }

    /// Whether green contexts are parts of it.
    pub fn has_green(&self) -> bool {
        let is_part = |other: &&Context| other.home.is_some_and(|home| ptr::eq(home, self));
        all().iter().any(|other| is_part(&&**other))
    }

    /// How threads wait in it.
    pub fn policy(&self) -> Policy {
        Policy::of(self.flags.load(Ordering::Relaxed))
    }

    /// `CUDA_ERROR_CONTEXT_IS_DESTROYED` when it is.
    pub fn usable(&self) -> Status<&Context> {
        if self.alive.load(Ordering::Relaxed) {
            Ok(self)
        } else {
            Err(CUDA_ERROR_CONTEXT_IS_DESTROYED)
        }
    }

    /// A limit that was queried or set.
    #[inline]
    pub fn known_limit(&self, limit: u32) -> Option<u64> {
        let known = self.known_limits.get(limit as usize)?;
        Some(known.load(Ordering::Relaxed)).filter(|value| *value != UNKNOWN)
    }
    /// Remembers a limit.
    pub fn know_limit(&self, limit: u32, value: u64) {
        if let Some(known) = self.known_limits.get(limit as usize) {
            known.store(value, Ordering::Relaxed);
        }
    }

    /// Its legacy default stream, as [`Context::set_legacy`] was given it; null before.
    #[inline]
    pub fn legacy(&self) -> *const () {
        self.legacy.load(Ordering::Acquire)
    }
    /// Held while its legacy default stream is made.
    pub fn making_legacy(&self) -> MutexGuard<'_, ()> {
        self.making_legacy.lock()
    }
    /// It has this legacy default stream now, an entry of the table of streams, which stays there for the life of the process.
    pub fn set_legacy(&self, stream: *const ()) {
        self.legacy.store(stream.cast_mut(), Ordering::Release);
    }

    /// Handles of its streams now.
    pub fn streams(&self) -> Vec<u64> {
        self.streams.lock().iter().copied().collect()
    }
    /// Adds a stream that ends with the context.
    pub fn own_stream(&self, handle: u64) {
        self.streams.lock().insert(handle);
    }
    /// Its stream of this handle is being destroyed.
    pub fn forget_stream(&self, handle: u64) {
        self.streams.lock().remove(&handle);
    }
    /// Adds an event that ends with the context.
    pub fn own_event(&self, handle: u64) {
        self.events.lock().insert(handle);
    }
    /// Its event of this handle is being destroyed.
    pub fn forget_event(&self, handle: u64) {
        self.events.lock().remove(&handle);
    }
    /// Adds a module that ends with the context.
    pub fn own_image(&self, handle: u64) {
        self.images.lock().insert(handle);
    }
    /// Its module of this handle is being unloaded.
    pub fn forget_image(&self, handle: u64) {
        self.images.lock().remove(&handle);
    }

    /// Takes the handles of the objects created in it, which are to be destroyed. It was marked dead before, its
    /// storage taken.
    pub fn take_contents(&self) -> Contents {
        self.legacy.store(ptr::null_mut(), Ordering::Release);
        Contents {
            events: std::mem::take(&mut *self.events.lock()),
            streams: std::mem::take(&mut *self.streams.lock()),
            images: std::mem::take(&mut *self.images.lock()),
        }
    }

    /// Forgets its limits. Returns the handle of its part of the device, to be given back, or 0.
    pub fn take_back_part(&self) -> u64 {
        for limit in &self.known_limits {
            limit.store(UNKNOWN, Ordering::Relaxed);
        }
        self.part_count.store(0, Ordering::Relaxed);
        self.part.swap(0, Ordering::Relaxed)
    }

    /// Revives a primary context.
    pub fn revive(&self) {
        self.id.store(next_id(), Ordering::Relaxed);
        self.alive.store(true, Ordering::Relaxed);
    }
}

impl Device {
    /// Bytes of its memory that the program may have; `u64::MAX`: all.
    pub fn memory(&self) -> u64 {
        self.memory.load(Ordering::Relaxed)
    }

    /// Lowers the program's own limit on its use of the device's memory, bytes.
    pub fn lower_memory(&self, bytes: u64) {
        self.memory.fetch_min(bytes, Ordering::Relaxed);
    }

    /// Makes sure that the server has a context on it; the server's ordinal.
    pub fn attach(&self, session: &Session) -> Status<u32> {
        let server = self.server.ok_or(CUDA_ERROR_INVALID_DEVICE)?;
        let mut attached = self.attached.lock();
        if !*attached {
            let body = Attach {
                device: server,
                flags: replay::wish(),
            };
            session.request(Op::Attach, &body, &[])?.status.ok()?;
            *attached = true;
            drop(attached);
            pages::use_device(session)?;
        }
        Ok(server)
    }

    /// Its primary context, retained or not.
    pub fn primary(&self, ordinal: i32) -> Status<&'static Context> {
        let server = self.server.ok_or(CUDA_ERROR_INVALID_DEVICE)?;
        Ok(self.primary.get_or_init(|| {
            let handle = genuine_primary(ordinal)
                .unwrap_or_else(|| Handle::new(Kind::Context, u16::MAX, ordinal as u32).0);
            Context::make(handle, ordinal, server, true, 3020, 0)
        }))
    }
}

/// `cuDevicePrimaryCtxRetain`.
pub fn retain(ordinal: i32) -> Status<&'static Context> {
    let device = device(ordinal)?;
    let context = device.primary(ordinal)?;
    let mut retained = context.retained.lock();
    device.attach(session()?)?;
    // A reset leaves it retained and inactive.
    if context.usable().is_err() {
        context.take_part(session()?)?;
        context.revive();
    }
    *retained += 1;
    Ok(context)
}

/// `cuCtxCreate`: makes a context and makes it current.
pub fn create(ordinal: i32, flags: u32, version: u32) -> Status<&'static Context> {
    let server = device(ordinal)?.attach(session()?)?;
    let handle = next_handle();
    let context = Context::make(handle, ordinal, server, false, version, flags);
    context.take_part(session()?)?;
    push(context);
    Ok(context)
}

/// A handle for a green context or a part of a device.
pub fn next_green_handle() -> u64 {
    static MADE: AtomicU32 = AtomicU32::new(0);
    Handle::new(Kind::GreenContext, 0, MADE.fetch_add(1, Ordering::Relaxed)).0
}

/// Creates the context of a new green context (`cuGreenCtxCreate`); its device's primary context is retained for it.
pub fn create_green(ordinal: i32, green: u64) -> Status<&'static Context> {
    let home = retain(ordinal)?;
    Ok(Context::make_in(
        next_handle(),
        (ordinal, home.server_device),
        (green, Some(home)),
        false,
        home.version,
        CU_CTX_MAP_HOST,
    ))
}

/// The genuine driver's handle for a device's primary context, which has a name before it exists: cudart learns it from
/// the same table, and both ways must agree.
fn genuine_primary(ordinal: i32) -> Option<u64> {
    type GetExportTable = unsafe extern "C" fn(*mut *const usize, *const CUuuid) -> CUresult;
    type PrimaryContext = unsafe extern "C" fn(*mut u64, i32) -> CUresult;
    const TABLE: CUuuid = CUuuid([
        0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d,
        0xf9,
    ]);
    const SLOT: usize = 2;
    let address = genuine::symbol("cuGetExportTable")?;
    // SAFETY: the driver's function of this name has this signature.
    let get = unsafe { std::mem::transmute::<*const (), GetExportTable>(address) };
    let mut table: *const usize = ptr::null();
    // SAFETY: writes one pointer.
    let status = unsafe { get(&mut table, &TABLE) };
    if !status.is_ok() || table.is_null() {
        return None;
    }
    // SAFETY: the first word of this table is its size in bytes; the slot is read only when it is inside.
    let function = unsafe {
        if *table < (SLOT + 1) * size_of::<usize>() {
            return None;
        }
        *table.add(SLOT)
    };
    if function == 0 {
        return None;
    }
    // SAFETY: the slot holds a function of this signature.
    let function = unsafe { std::mem::transmute::<usize, PrimaryContext>(function) };
    let mut handle = 0;
    // SAFETY: writes one handle.
    let status = unsafe { function(&mut handle, ordinal) };
    (status.is_ok() && handle != 0).then_some(handle)
}

thread_local! {
    // Neither has a destructor, so both work in exit handlers.
    static CURRENT: Cell<Option<&'static Context>> = const { Cell::new(None) };
    static BELOW: ManuallyDrop<RefCell<Vec<Option<&'static Context>>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// The calling thread's context, alive or not.
#[inline]
pub fn top() -> Option<&'static Context> {
    CURRENT.get()
}

/// Host functions have no context, and may not have one.
#[inline]
pub fn permitted() -> Status {
    if thread::runs_host_functions() {
        return Err(CUDA_ERROR_NOT_PERMITTED);
    }
    Ok(())
}

/// The calling thread's context.
#[inline]
pub fn current() -> Status<&'static Context> {
    permitted()?;
    top().ok_or(CUDA_ERROR_INVALID_CONTEXT)?.usable()
}

/// For calls that need no context: `CUDA_ERROR_CONTEXT_IS_DESTROYED` if the calling thread's was destroyed.
#[inline]
pub fn none_or_usable() -> Status {
    permitted()?;
    top().map_or(Ok(()), |top| top.usable().map(drop))
}

/// Whether it is the calling thread's.
pub fn is_current(context: &Context) -> bool {
    top().is_some_and(|top| ptr::eq(top, context))
}

/// `cuCtxPushCurrent`.
pub fn push(context: &'static Context) {
    BELOW.with(|below| below.borrow_mut().push(CURRENT.get()));
    CURRENT.set(Some(context));
}

/// `cuCtxPopCurrent`.
pub fn pop() -> Option<&'static Context> {
    let popped = CURRENT.get();
    let next = BELOW.with(|below| below.borrow_mut().pop()).flatten();
    CURRENT.set(next);
    popped
}

/// `cuCtxSetCurrent`: replaces the top of the stack.
pub fn set(context: Option<&'static Context>) {
    CURRENT.set(context);
    if context.is_none() {
        // NULL pops.
        CURRENT.set(BELOW.with(|below| below.borrow_mut().pop()).flatten());
    }
}
