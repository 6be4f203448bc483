//! Contexts and each thread's stack of current ones.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::ThreadId;

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::api::{In, Out, R, api, log};
use crate::array::Objects;
use crate::driver::{device, driver, new_handle, start};
use crate::driver_locks::DriverLocks;
use crate::heap::Heap;
use crate::memory;
use crate::stream::{Kind, Stream, orphans};

/// The limit of a thread's stack that a context begins with, bytes.
const STACK_LIMIT: usize = 1024;

pub struct Context {
    pub handle: u64,
    pub id: u64,
    pub device: CUdevice,
    pub flags: u32,
    pub is_primary: bool,
    /// The status that the context was lost with; zero while it is sound.
    lost: AtomicU32,
    ended: AtomicBool,
    pub legacy: Arc<Stream>,
    per_thread: Mutex<HashMap<ThreadId, Arc<Stream>>>,
    pub locks: DriverLocks,
    limits: Mutex<[usize; CU_LIMIT_MAX as usize]>,
    pub heap: Heap,
    /// Graphs with conditional nodes that run.
    pub loops: AtomicUsize,
    pub objects: Objects,
    /// Contexts whose memory it may use, by handle.
    peers: Mutex<HashSet<u64>>,
}

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread's context, whether sound or lost.
pub fn current() -> R<Arc<Context>> {
    driver()?;
    let context = STACK
        .with_borrow(|stack| stack.last().cloned())
        .ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    if context.ended.load(Ordering::Acquire) {
        // The primary context that took this one's place after a reset and a retain is current in its stead.
        let successor = driver()?.contexts.get(context.handle);
        return successor
            .and_then(Context::lasting)
            .map_err(|_| CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    Ok(context)
}

/// The calling thread's context; the status it was lost with if it was.
pub fn live() -> R<Arc<Context>> {
    let context = current()?;
    context.sound()?;
    Ok(context)
}

/// All contexts.
pub fn all() -> Vec<Arc<Context>> {
    start().contexts.all()
}

/// The context with an id, while it lasts.
pub fn by_id(id: u64) -> Option<Arc<Context>> {
    let contexts = all();
    let found = contexts.into_iter().find(|context| context.id == id)?;
    found.lasting().ok()
}

impl Context {
    /// # Errors
    /// `CUDA_ERROR_DEVICE_UNAVAILABLE` if the device's compute mode does not permit it.
    pub fn new(ordinal: CUdevice, flags: u32, primary: Option<u64>) -> R<Arc<Context>> {
        let of = device(ordinal)?;
        of.contexts.enter(of.number)?;
        let handle = primary.unwrap_or_else(new_handle);
        let context = Arc::new_cyclic(|weak| Context {
            handle,
            id: new_handle(),
            device: ordinal,
            flags,
            is_primary: primary.is_some(),
            lost: AtomicU32::new(0),
            ended: AtomicBool::new(false),
            legacy: Stream::new(weak.clone(), handle, Kind::Legacy, 0, 0),
            per_thread: Mutex::default(),
            locks: DriverLocks::new(STACK_LIMIT as u32),
            peers: Mutex::default(),
            heap: Heap::default(),
            loops: AtomicUsize::new(0),
            objects: Objects::default(),
            limits: Mutex::new([STACK_LIMIT, 1 << 20, 8 << 20, 2, 2048, 128, 0, 0, 0, 0]),
        });
        start().contexts.insert(handle, context.clone());
        Ok(context)
    }

    /// `malloc` in a kernel: an address, or 0.
    pub fn malloc(&self, bytes: u64) -> u64 {
        let size = self.limits.lock()[CU_LIMIT_MALLOC_HEAP_SIZE as usize];
        self.heap
            .allocate((self.id, self.device), size as u64, bytes)
    }

    pub fn status(&self) -> u32 {
        self.lost.load(Ordering::Acquire)
    }

    /// The context unless it has ended; a primary one that was reset keeps its handle meanwhile.
    fn lasting(self: Arc<Self>) -> R<Arc<Context>> {
        if self.ended.load(Ordering::Acquire) {
            return Err(CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
        Ok(self)
    }

    pub fn sound(&self) -> R<()> {
        CUresult(self.status()).ok()
    }

    /// The context is lost from now on: queued work is dropped, every call returns `status`.
    pub fn lose(&self, status: u32) {
        if self
            .lost
            .compare_exchange(0, status, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
        {
            log(|| format!("context {:#x} is lost: {}", self.handle, CUresult(status)));
        }
    }

    pub fn thread_stream(self: &Arc<Self>) -> Arc<Stream> {
        let mut streams = self.per_thread.lock();
        let make = || Stream::new(Arc::downgrade(self), self.handle, Kind::PerThread, 0, 0);
        streams
            .entry(std::thread::current().id())
            .or_insert_with(make)
            .clone()
    }

    /// All streams of this context, those destroyed while at work included.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        let mut all = start().streams.all();
        all.retain(|s| s.context_handle == self.handle);
        all.extend(self.per_thread.lock().values().cloned());
        all.push(self.legacy.clone());
        all.extend(orphans(self.handle));
        all
    }

    /// Waits until all work submitted so far is done.
    pub fn wait_idle(&self) {
        self.streams().iter().for_each(|stream| stream.wait_idle());
    }

    /// Ends the context and everything in it; its handle stays valid if another one took it over.
    pub fn end(&self) {
        self.wait_idle();
        let ended_before = self.ended.swap(true, Ordering::AcqRel);
        let driver = start();
        driver.streams.retain(|s| {
            let stays = s.context_handle != self.handle;
            if !stays {
                s.retire();
            }
            stays
        });
        self.per_thread.lock().values().for_each(|s| s.retire());
        self.legacy.retire();
        driver.events.retain(|e| e.context != self.id);
        driver.kernels.retain(|k| k.module.context != self.id);
        driver.libraries.all().iter().for_each(|l| l.leave(self.id));
        driver.modules.retain(|m| m.context != self.id);
        driver.mipmaps.retain(|m| m.context != self.id);
        driver.arrays.retain(|a| a.context != self.id);
        driver.imports.retain(|i| i.context != self.id);
        driver.ranges.drop_context(self.id);
        if let Ok(device) = device(self.device)
            && !ended_before
        {
            device.contexts.leave(device.number);
        }
    }

    pub fn destroy(&self) {
        let _ = start().contexts.remove(self.handle);
        self.end();
    }
}

fn create(out: Out<CUcontext>, flags: u32, ordinal: CUdevice) -> R<()> {
    device(ordinal)?;
    if out.is_null() || flags & !CU_CTX_FLAGS_MASK != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let context = Context::new(ordinal, flags, None)?;
    let handle = CUcontext(context.handle);
    STACK.with_borrow_mut(|stack| stack.push(context));
    out.set(handle)
}

/// `CUctxCreateParams`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CreateParams {
    affinity: u64,
    affinity_count: i32,
    graphics: u64,
}

fn destroy(context: CUcontext) -> R<()> {
    let found = driver()?
        .contexts
        .get(context.0)
        .map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
    if found.is_primary {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    STACK.with_borrow_mut(|stack| {
        if stack.last().is_some_and(|top| top.handle == context.0) {
            stack.pop();
        }
    });
    found.destroy();
    Ok(())
}

fn push(context: CUcontext) -> R<()> {
    let found = driver()?
        .contexts
        .get(context.0)
        .map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
    STACK.with_borrow_mut(|stack| stack.push(found));
    Ok(())
}

fn pop(out: Out<CUcontext>) -> R<()> {
    driver()?;
    let top = STACK
        .with_borrow_mut(Vec::pop)
        .ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    out.put(CUcontext(top.handle));
    Ok(())
}

impl Context {
    /// Whether a memset may write here: memory of another device only where access was given.
    pub fn may_set(&self, address: u64) -> R<bool> {
        let driver = driver()?;
        let Some(range) = driver.ranges.find(address) else {
            return Ok(true);
        };
        if !matches!(
            range.kind,
            memory::Kind::Allocated | memory::Kind::Pooled(_)
        ) || range.device == self.device
        {
            return Ok(driver.ranges.is_for(address, self.device));
        }
        let peers = self.peers.lock();
        let mut peers = peers
            .iter()
            .filter_map(|peer| driver.contexts.get(*peer).ok());
        Ok(peers.any(|peer| peer.device == range.device))
    }
}

/// The context given by handle, or the current one for NULL.
fn given(context: CUcontext) -> R<Arc<Context>> {
    if context.is_null() {
        return current();
    }
    driver()?
        .contexts
        .get(context.0)
        .map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?
        .lasting()
}

fn synchronize(context: &Context) -> R<()> {
    context.sound()?;
    context.wait_idle();
    context.sound()
}

api! { TABLE;
    fn cuCtxCreate_v2(out: Out<CUcontext>, flags: u32, ordinal: CUdevice) { create(out, flags, ordinal) }
    fn cuCtxCreate_v3(out: Out<CUcontext>, affinity: In<u64>, count: i32, flags: u32, ordinal: CUdevice) {
        if count != 0 || !affinity.is_null() {
            return Err(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
        }
        create(out, flags, ordinal)
    }
    fn cuCtxCreate_v4(out: Out<CUcontext>, params: In<CreateParams>, flags: u32, ordinal: CUdevice) {
        if !params.is_null() {
            let params = params.get(0)?;
            if params.affinity_count != 0 || params.graphics != 0 {
                return Err(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
            }
        }
        create(out, flags, ordinal)
    }
    fn cuCtxDestroy_v2(context: CUcontext) { destroy(context) }
    fn cuCtxPushCurrent_v2(context: CUcontext) { push(context) }
    fn cuCtxPopCurrent_v2(out: Out<CUcontext>) { pop(out) }
    fn cuCtxSetCurrent(context: CUcontext) {
        if context.is_null() {
            driver()?;
            STACK.with_borrow_mut(Vec::pop);
            return Ok(());
        }
        let found = driver()?.contexts.get(context.0).map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.push(found);
        });
        Ok(())
    }
    fn cuCtxGetCurrent(out: Out<CUcontext>) {
        driver()?;
        out.set(STACK.with_borrow(|stack| stack.last().map_or(CUcontext::NULL, |c| CUcontext(c.handle))))
    }
    fn cuCtxGetDevice(out: Out<CUdevice>) {
        driver()?;
        let top = STACK.with_borrow(|stack| stack.last().map(|context| context.device));
        out.set(top.ok_or(CUDA_ERROR_INVALID_CONTEXT)?)
    }
    fn cuCtxGetFlags(out: Out<u32>) { out.set(current()?.flags) }
    fn cuCtxGetId(context: CUcontext, out: Out<u64>) { out.set(given(context)?.id) }
    fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32) {
        let (own, peer) = (live()?, given(peer)?);
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if own.device == peer.device {
            return Err(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        // All memory here is this process's: every device reaches it.
        if own.peers.lock().insert(peer.handle) { Ok(()) } else { Err(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) }
    }
    fn cuCtxDisablePeerAccess(peer: CUcontext) {
        if live()?.peers.lock().remove(&given(peer)?.handle) { Ok(()) } else { Err(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED) }
    }
    fn cuCtxSynchronize() { synchronize(&*current()?) }
    fn cuCtxGetLimit(out: Out<usize>, limit: CUlimit) {
        let limits = *live()?.limits.lock();
        out.set(*limits.get(limit as usize).ok_or(CUDA_ERROR_INVALID_VALUE)?)
    }
    fn cuCtxSetLimit(limit: CUlimit, value: usize) {
        let context = live()?;
        if limit == CU_LIMIT_MALLOC_HEAP_SIZE && context.heap.is_used() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        *context.limits.lock().get_mut(limit as usize).ok_or(CUDA_ERROR_INVALID_VALUE)? = value;
        if limit == CU_LIMIT_STACK_SIZE {
            context.set_local_memory(value);
        }
        Ok(())
    }
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        current()?;
        least.put(0);
        greatest.put(crate::stream::GREATEST_PRIORITY);
        Ok(())
    }
}
