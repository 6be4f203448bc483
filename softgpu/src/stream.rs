//! Streams: queues of work, each with a thread of its own while it has something to do.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mpsshim_api::cuda::*;
use parking_lot::{Condvar, Mutex};

use crate::api::{In, Out, R, api, api_streams};
use crate::context::{Context, live};
use crate::device::ALL_SMS;
use crate::driver::{driver, new_handle, start};
use crate::driver_locks;
use crate::graph::{self, Does};

pub const GREATEST_PRIORITY: i32 = -5;
/// How long a stream's thread outlives its last work.
const LINGER: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Legacy,
    PerThread,
    Created,
}

type Run = Box<dyn FnOnce(&Context) -> R<()> + Send>;

struct Work {
    run: Run,
    /// Done even when the context is lost: it only keeps order, or tells of the loss.
    always: bool,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    submitted: u64,
    completed: u64,
    has_thread: bool,
    retired: bool,
}

pub struct Stream {
    pub handle: u64,
    pub context_handle: u64,
    context: Weak<Context>,
    kind: Kind,
    flags: u32,
    priority: i32,
    /// The multiprocessors that its kernels run on, a bit each.
    pub sms: u64,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// What it has of a capture.
    pub part: Mutex<Option<graph::Part>>,
}

/// Destroyed streams that still have work.
static ORPHANS: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());

/// The destroyed streams of a context that still have work.
pub fn orphans(context_handle: u64) -> Vec<Arc<Stream>> {
    let mut all = ORPHANS.lock();
    all.retain(|s| s.pending().is_some());
    all.iter()
        .filter(|s| s.context_handle == context_handle)
        .cloned()
        .collect()
}

/// How many destroyed streams still have work.
pub fn orphan_count() -> usize {
    let mut all = ORPHANS.lock();
    all.retain(|s| s.pending().is_some());
    all.len()
}

impl Stream {
    pub fn new(
        context: Weak<Context>,
        context_handle: u64,
        kind: Kind,
        flags: u32,
        priority: i32,
    ) -> Arc<Stream> {
        Arc::new(Stream {
            handle: new_handle(),
            context_handle,
            context,
            kind,
            flags,
            priority,
            sms: ALL_SMS,
            queue: Mutex::default(),
            changed: Condvar::new(),
            part: Mutex::new(None),
        })
    }

    pub fn is_legacy(&self) -> bool {
        self.kind == Kind::Legacy
    }

    /// Whether its work and the legacy stream's wait for each other.
    fn is_blocking(&self) -> bool {
        self.kind != Kind::Legacy && self.flags & CU_STREAM_NON_BLOCKING == 0
    }

    /// The number of the last work submitted, if it is not done yet.
    fn pending(&self) -> Option<u64> {
        let queue = self.queue.lock();
        (queue.completed < queue.submitted).then_some(queue.submitted)
    }

    fn wait(&self, number: u64) {
        let mut queue = self.queue.lock();
        while queue.completed < number {
            self.changed.wait(&mut queue);
        }
    }

    pub fn wait_idle(&self) {
        if let Some(number) = self.pending() {
            self.wait(number);
        }
    }

    /// No more work will come; what is queued is still done.
    pub fn retire(&self) {
        self.queue.lock().retired = true;
        self.changed.notify_all();
    }

    /// Queues work that is dropped if the context is lost before its turn.
    pub fn submit(
        self: &Arc<Self>,
        context: &Arc<Context>,
        run: impl FnOnce(&Context) -> R<()> + Send + 'static,
    ) {
        self.put(
            context,
            Work {
                run: Box::new(run),
                always: false,
            },
        );
    }

    /// Queues work that is done in any case.
    pub fn submit_always(
        self: &Arc<Self>,
        context: &Arc<Context>,
        run: impl FnOnce(&Context) + Send + 'static,
    ) {
        let run = move |context: &Context| {
            run(context);
            Ok(())
        };
        self.put(
            context,
            Work {
                run: Box::new(run),
                always: true,
            },
        );
    }

    fn put(self: &Arc<Self>, context: &Arc<Context>, work: Work) {
        let _order = context.submits();
        let earlier: Vec<_> = match self.kind {
            Kind::Legacy => context
                .streams()
                .into_iter()
                .filter(|s| s.is_blocking())
                .filter_map(|s| s.pending().map(|n| (s, n)))
                .collect(),
            _ if self.is_blocking() => context
                .legacy
                .pending()
                .map(|n| (context.legacy.clone(), n))
                .into_iter()
                .collect(),
            _ => Vec::new(),
        };
        if !earlier.is_empty() {
            let run: Run = Box::new(move |_| {
                earlier
                    .iter()
                    .for_each(|(stream, number)| stream.wait(*number));
                Ok(())
            });
            self.push(Work { run, always: true });
        }
        self.push(work);
    }

    fn push(self: &Arc<Self>, work: Work) {
        let mut queue = self.queue.lock();
        queue.work.push_back(work);
        queue.submitted += 1;
        if queue.has_thread {
            self.changed.notify_all();
            return;
        }
        queue.has_thread = true;
        drop(queue);
        let stream = self.clone();
        let thread = std::thread::Builder::new().name("softgpu-stream".into());
        if thread.spawn(move || stream.serve()).is_err() {
            // Without threads the caller itself does the work.
            self.serve();
        }
    }

    fn serve(&self) {
        let mut queue = self.queue.lock();
        loop {
            let Some(work) = queue.work.pop_front() else {
                if queue.retired
                    || self.changed.wait_for(&mut queue, LINGER).timed_out()
                        && queue.work.is_empty()
                {
                    queue.has_thread = false;
                    return;
                }
                continue;
            };
            drop(queue);
            if let Some(context) = self.context.upgrade()
                && (work.always || context.status() == 0)
            {
                match catch_unwind(AssertUnwindSafe(|| (work.run)(&context))) {
                    Ok(Ok(())) => {}
                    Ok(Err(status)) => context.lose(status.0),
                    Err(_) => context.lose(CUDA_ERROR_UNKNOWN.0),
                }
            }
            queue = self.queue.lock();
            queue.completed += 1;
            self.changed.notify_all();
        }
    }

    /// Whether everything submitted is done, the work that it implicitly waits for included.
    fn is_idle(&self, context: &Context) -> bool {
        let others_idle = || {
            context
                .streams()
                .iter()
                .all(|s| !s.is_blocking() || s.pending().is_none())
        };
        self.pending().is_none() && (self.kind != Kind::Legacy || others_idle())
    }

    pub fn synchronize(self: &Arc<Self>, context: &Arc<Context>) -> R<()> {
        graph::refuse(self)?;
        if !self.is_idle(context) {
            if self.kind == Kind::Legacy {
                self.submit_always(context, |_| {});
            }
            self.wait_idle();
        }
        context.sound()
    }
}

/// The stream that a handle names in a call, with its sound context. `own` chooses between the two
/// meanings of NULL.
pub fn resolve(stream: CUstream, own: bool) -> R<(Arc<Context>, Arc<Stream>)> {
    driver()?;
    let named = match stream {
        CUstream::NULL if own => CU_STREAM_PER_THREAD,
        CUstream::NULL => CU_STREAM_LEGACY,
        other => other,
    };
    let (context, stream) = match named {
        CU_STREAM_LEGACY => {
            let context = live()?;
            let stream = context.legacy.clone();
            (context, stream)
        }
        CU_STREAM_PER_THREAD => {
            let context = live()?;
            let stream = context.thread_stream();
            (context, stream)
        }
        CUstream(handle) => {
            let stream = driver()?.streams.get(handle)?;
            (
                stream
                    .context
                    .upgrade()
                    .ok_or(CUDA_ERROR_CONTEXT_IS_DESTROYED)?,
                stream,
            )
        }
    };
    context.sound()?;
    Ok((context, stream))
}

/// Makes a stream whose kernels run on these multiprocessors.
pub fn create(
    out: Out<CUstream>,
    context: &Arc<Context>,
    flags: u32,
    priority: i32,
    sms: u64,
) -> R<()> {
    if out.is_null() || flags & !CU_STREAM_NON_BLOCKING != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    context.waits_its_turn();
    let priority = priority.clamp(GREATEST_PRIORITY, 0);
    let mut stream = Stream::new(
        Arc::downgrade(context),
        context.handle,
        Kind::Created,
        flags,
        priority,
    );
    if let Some(stream) = Arc::get_mut(&mut stream) {
        stream.sms = sms;
    }
    out.set(CUstream(stream.handle))?;
    start().streams.insert(stream.handle, stream);
    Ok(())
}

fn destroy(stream: CUstream) -> R<()> {
    if driver_locks::on()
        && let Some(context) = driver()?.streams.get(stream.0)?.context.upgrade()
    {
        context.waits_its_turn();
    }
    let stream = driver()?.streams.remove(stream.0)?;
    if stream.pending().is_some() {
        ORPHANS.lock().push(stream.clone());
    }
    stream.retire();
    Ok(())
}

/// What a wait or write of `len` bytes refers to.
fn word(address: u64, wide: bool) -> R<u64> {
    let len = if wide { 8 } else { 4 };
    if !address.is_multiple_of(len) || !driver()?.ranges.covers(address, len) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(address)
}

fn read(address: u64, wide: bool) -> u64 {
    // SAFETY: `word` has checked it: aligned and in device-visible memory; a range that goes away first waits for
    // queued work, or leaves its pages mapped. The acquire pairs with the release of whoever writes.
    unsafe {
        if wide {
            AtomicU64::from_ptr(address as *mut u64).load(Ordering::Acquire)
        } else {
            AtomicU32::from_ptr(address as *mut u32)
                .load(Ordering::Acquire)
                .into()
        }
    }
}

type Holds = fn(u64, u64, u64) -> bool;

/// A stream memory operation that was found fit.
#[derive(Clone, Copy)]
pub struct MemOp {
    address: u64,
    value: u64,
    wide: bool,
    /// Of a wait.
    holds: Option<Holds>,
}

impl MemOp {
    /// `None`: there is nothing to do.
    pub fn new(operation: &CUstreamBatchMemOpParams) -> R<Option<MemOp>> {
        let wide = matches!(
            operation.operation,
            CU_STREAM_MEM_OP_WRITE_VALUE_64 | CU_STREAM_MEM_OP_WAIT_VALUE_64
        );
        let holds: Option<Holds> = match operation.operation {
            CU_STREAM_MEM_OP_WRITE_VALUE_32 | CU_STREAM_MEM_OP_WRITE_VALUE_64 => {
                if operation.value_flags != 0 {
                    return Err(CUDA_ERROR_INVALID_VALUE);
                }
                None
            }
            CU_STREAM_MEM_OP_WAIT_VALUE_32 | CU_STREAM_MEM_OP_WAIT_VALUE_64 => {
                Some(match operation.value_flags {
                    CU_STREAM_WAIT_VALUE_GEQ if wide => {
                        |now, value, _| now.wrapping_sub(value) as i64 >= 0
                    }
                    CU_STREAM_WAIT_VALUE_GEQ => {
                        |now, value, _| (now as u32).wrapping_sub(value as u32) as i32 >= 0
                    }
                    CU_STREAM_WAIT_VALUE_EQ => |now, value, ones| now == value & ones,
                    CU_STREAM_WAIT_VALUE_AND => |now, value, ones| now & value & ones != 0,
                    CU_STREAM_WAIT_VALUE_NOR => |now, value, ones| !(now | value) & ones != 0,
                    CU_STREAM_WAIT_VALUE_FLUSH.. => return Err(CUDA_ERROR_NOT_SUPPORTED),
                    _ => return Err(CUDA_ERROR_INVALID_VALUE),
                })
            }
            CU_STREAM_MEM_OP_BARRIER if operation.flags <= 1 => return Ok(None),
            CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES => return Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        Ok(Some(MemOp {
            address: word(operation.address, wide)?,
            value: operation.value,
            wide,
            holds,
        }))
    }

    pub fn run(&self, context: &Context) {
        let ones = if self.wide { u64::MAX } else { u32::MAX.into() };
        match self.holds {
            Some(holds) => poll(context, || {
                holds(read(self.address, self.wide), self.value, ones)
            }),
            // SAFETY: as in `read`. The release pairs with the acquire of whoever waits, in any process.
            None => unsafe {
                if self.wide {
                    AtomicU64::from_ptr(self.address as *mut u64)
                        .store(self.value, Ordering::Release);
                } else {
                    AtomicU32::from_ptr(self.address as *mut u32)
                        .store(self.value as u32, Ordering::Release);
                }
            },
        }
    }
}

fn batch(stream: CUstream, own: bool, operations: &[CUstreamBatchMemOpParams]) -> R<()> {
    let (context, stream) = resolve(stream, own)?;
    let mut work = Vec::new();
    for operation in operations {
        work.extend(MemOp::new(operation)?);
    }
    let node = || Does::Batch(operations.to_vec());
    if graph::captured(&stream, node)? {
        return Ok(());
    }
    for operation in work {
        stream.submit(&context, move |context| {
            operation.run(context);
            Ok(())
        });
    }
    Ok(())
}

fn one(stream: CUstream, own: bool, operation: u32, address: u64, value: u64, flags: u32) -> R<()> {
    let operation = CUstreamBatchMemOpParams {
        operation,
        address,
        value,
        value_flags: flags,
        ..CUstreamBatchMemOpParams::default()
    };
    batch(stream, own, &[operation])
}

/// Polls until `done`, at growing intervals: this is the only wait that cannot be signalled.
fn poll(context: &Context, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() && context.status() == 0 {
        match start.elapsed() {
            t if t < Duration::from_micros(50) => std::hint::spin_loop(),
            t if t < Duration::from_millis(2) => std::thread::sleep(Duration::from_micros(20)),
            t => std::thread::sleep((t / 64).min(Duration::from_millis(1))),
        }
    }
}

pub type HostFn = extern "C" fn(*mut c_void);
type CallbackFn = extern "C" fn(CUstream, CUresult, *mut c_void);

api! { TABLE;
    fn cuStreamCreate(out: Out<CUstream>, flags: u32) { create(out, &live()?, flags, 0, ALL_SMS) }
    fn cuStreamCreateWithPriority(out: Out<CUstream>, flags: u32, priority: i32) { create(out, &live()?, flags, priority, ALL_SMS) }
    fn cuStreamDestroy_v2(stream: CUstream) { destroy(stream) }
}

api_streams! { TABLE_STREAMS;
    fn cuStreamSynchronize / cuStreamSynchronize_ptsz [own] (stream: CUstream) {
        let (context, stream) = resolve(stream, own)?;
        stream.synchronize(&context)
    }
    fn cuStreamQuery / cuStreamQuery_ptsz [own] (stream: CUstream) {
        let (context, stream) = resolve(stream, own)?;
        graph::refuse(&stream)?;
        if stream.is_idle(&context) { context.sound() } else { Err(CUDA_ERROR_NOT_READY) }
    }
    fn cuStreamGetPriority / cuStreamGetPriority_ptsz [own] (stream: CUstream, out: Out<i32>) {
        out.set(resolve(stream, own)?.1.priority)
    }
    fn cuStreamGetFlags / cuStreamGetFlags_ptsz [own] (stream: CUstream, out: Out<u32>) {
        out.set(resolve(stream, own)?.1.flags)
    }
    fn cuStreamGetCtx / cuStreamGetCtx_ptsz [own] (stream: CUstream, out: Out<CUcontext>) {
        out.set(CUcontext(resolve(stream, own)?.0.handle))
    }
    fn cuLaunchHostFunc / cuLaunchHostFunc_ptsz [own] (stream: CUstream, function: Option<HostFn>, data: u64) {
        let (context, stream) = resolve(stream, own)?;
        let function = function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if graph::captured(&stream, || Does::Host(function, data))? {
            return Ok(());
        }
        stream.submit(&context, move |_| {
            function(data as *mut c_void);
            Ok(())
        });
        Ok(())
    }
    fn cuStreamAddCallback / cuStreamAddCallback_ptsz [own] (name: CUstream, callback: Option<CallbackFn>, data: u64, flags: u32) {
        let (context, stream) = resolve(name, own)?;
        let callback = callback.filter(|_| flags == 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        graph::refuse(&stream)?;
        stream.submit_always(&context, move |context| {
            callback(name, CUresult(context.status()), data as *mut c_void);
        });
        Ok(())
    }
    fn cuStreamWriteValue64_v2 / cuStreamWriteValue64_v2_ptsz [own] (stream: CUstream, address: u64, value: u64, flags: u32) {
        one(stream, own, CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value, flags)
    }
    fn cuStreamWaitValue64_v2 / cuStreamWaitValue64_v2_ptsz [own] (stream: CUstream, address: u64, value: u64, flags: u32) {
        one(stream, own, CU_STREAM_MEM_OP_WAIT_VALUE_64, address, value, flags)
    }
    fn cuStreamBatchMemOp_v2 / cuStreamBatchMemOp_v2_ptsz [own] (stream: CUstream, count: u32, operations: In<CUstreamBatchMemOpParams>, flags: u32) {
        if flags != 0 || count > 255 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        batch(stream, own, &operations.list(count as usize)?)
    }
    fn cuStreamWriteValue32_v2 / cuStreamWriteValue32_v2_ptsz [own] (stream: CUstream, address: u64, value: u32, flags: u32) {
        one(stream, own, CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value.into(), flags)
    }
    fn cuStreamWaitValue32_v2 / cuStreamWaitValue32_v2_ptsz [own] (stream: CUstream, address: u64, value: u32, flags: u32) {
        one(stream, own, CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value.into(), flags)
    }
}
