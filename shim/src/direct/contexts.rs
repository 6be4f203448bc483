//! The program's contexts, whose work is drained when a turn is given up, and the streams that capture.

use std::ffi::c_void;

use mpsshim_api::cuda::{CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUdevice, CUresult};
use parking_lot::Mutex;

use super::{Genuine, memory, server_device, turn, wrappers};

/// Contexts by handle. Held while one is destroyed and while all are drained.
static CONTEXTS: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Streams in capture.
static CAPTURING: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Streams that the program made since a context last ended: which of them ended with it is not known, and the driver is
/// not to be asked about one that has. Held while one is destroyed and while all are drained.
static STREAMS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

fn add(status: CUresult, context: *mut u64, device: CUdevice) -> CUresult {
    if status.is_ok() && !context.is_null() {
        // SAFETY: the driver has just written it.
        let context = unsafe { *context };
        let mut contexts = CONTEXTS.lock();
        if !contexts.contains(&context) {
            contexts.push(context);
        }
        drop(contexts);
        use_device(device);
    }
    status
}

/// Adds a context that is not a device's primary one.
fn add_made(status: CUresult, context: *mut u64, device: CUdevice) -> CUresult {
    if status.is_ok() && !context.is_null() {
        // SAFETY: the driver has just written it.
        memory::context_made(unsafe { *context });
    }
    add(status, context, device)
}

/// The program uses a device from now on.
fn use_device(device: CUdevice) {
    if let Some(server) = server_device(device) {
        turn::use_device(server);
    }
}

fn capture(status: CUresult, stream: u64, begins: bool) -> CUresult {
    let mut capturing = CAPTURING.lock();
    capturing.retain(|known| *known != stream);
    if begins && status.is_ok() {
        capturing.push(stream);
    }
    status
}

/// Adds a stream that the program has made.
fn add_stream(status: CUresult, stream: *mut u64) -> CUresult {
    if status.is_ok() && !stream.is_null() {
        // SAFETY: the driver has just written it.
        let stream = unsafe { *stream };
        let mut streams = STREAMS.lock();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }
    status
}

wrappers! { WRAPPED;
    fn make_stream => [cuStreamCreate] (stream: *mut u64, flags: u32) |genuine| {
        add_stream(genuine(stream, flags), stream)
    }
    fn make_stream_with_priority => [cuStreamCreateWithPriority] (stream: *mut u64, flags: u32, priority: i32) |genuine| {
        add_stream(genuine(stream, flags, priority), stream)
    }
    fn make_stream_of_part => [cuGreenCtxStreamCreate] (stream: *mut u64, part: u64, flags: u32, priority: i32) |genuine| {
        add_stream(genuine(stream, part, flags, priority), stream)
    }
    fn destroy_stream => [cuStreamDestroy, cuStreamDestroy_v2] (stream: u64) |genuine| {
        let mut streams = STREAMS.lock();
        let status = genuine(stream);
        if status.is_ok() {
            streams.retain(|known| *known != stream);
        }
        status
    }
    fn retain => [cuDevicePrimaryCtxRetain] (context: *mut u64, device: CUdevice) |genuine| {
        add(genuine(context, device), context, device)
    }
    fn create => [cuCtxCreate, cuCtxCreate_v2] (context: *mut u64, flags: u32, device: CUdevice) |genuine| {
        add_made(genuine(context, flags, device), context, device)
    }
    fn create_with_affinity => [cuCtxCreate_v3] (context: *mut u64, params: *mut c_void, count: i32, flags: u32, device: CUdevice) |genuine| {
        add_made(genuine(context, params, count, flags, device), context, device)
    }
    fn create_with_params => [cuCtxCreate_v4] (context: *mut u64, params: *mut c_void, flags: u32, device: CUdevice) |genuine| {
        add_made(genuine(context, params, flags, device), context, device)
    }
    fn destroy => [cuCtxDestroy, cuCtxDestroy_v2] (context: u64) |genuine| {
        let (mut contexts, mut streams) = (CONTEXTS.lock(), STREAMS.lock());
        let status = genuine(context);
        if status.is_ok() {
            streams.clear();
            contexts.retain(|known| *known != context);
            memory::context_ended(context);
        }
        status
    }
    // What a primary context's handle stands for may end here; it stays the same handle.
    fn release => [cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2] (device: CUdevice) |genuine| {
        let (_contexts, mut streams) = (CONTEXTS.lock(), STREAMS.lock());
        let status = genuine(device);
        if status.is_ok() {
            streams.clear();
            memory::primary_ended(device, false);
        }
        status
    }
    fn reset => [cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2] (device: CUdevice) |genuine| {
        let (_contexts, mut streams) = (CONTEXTS.lock(), STREAMS.lock());
        let status = genuine(device);
        if status.is_ok() {
            streams.clear();
            memory::primary_ended(device, true);
        }
        status
    }
    fn begin_capture => [cuStreamBeginCapture, cuStreamBeginCapture_ptsz] (stream: u64) |genuine| {
        capture(genuine(stream), stream, true)
    }
    fn begin_capture_in_mode => [cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz] (stream: u64, mode: u32) |genuine| {
        capture(genuine(stream, mode), stream, true)
    }
    fn begin_capture_to => [cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz] (stream: u64, graph: u64, nodes: *const u64, edges: *const c_void, count: usize, mode: u32) |genuine| {
        capture(genuine(stream, graph, nodes, edges, count, mode), stream, true)
    }
    fn end_capture => [cuStreamEndCapture, cuStreamEndCapture_ptsz] (stream: u64, graph: *mut u64) |genuine| {
        capture(genuine(stream, graph), stream, false)
    }
}

/// Waits for the work of all contexts. While a stream captures, the driver would end the capture if a context were waited
/// for, or its default stream; then the streams that the program made are, except those that capture.
pub fn drain() {
    type Push = extern "C" fn(u64) -> CUresult;
    type Pop = extern "C" fn(*mut u64) -> CUresult;
    type Synchronize = extern "C" fn() -> CUresult;
    type Exchange = extern "C" fn(*mut u32) -> CUresult;
    static PUSH: Genuine = Genuine::new("cuCtxPushCurrent_v2");
    static POP: Genuine = Genuine::new("cuCtxPopCurrent_v2");
    static SYNCHRONIZE: Genuine = Genuine::new("cuCtxSynchronize");
    static EXCHANGE: Genuine = Genuine::new("cuThreadExchangeStreamCaptureMode");
    const RELAXED: u32 = 2;
    if let Some(exchange) = EXCHANGE.address() {
        // SAFETY: the driver's function of this name has this signature.
        let exchange = unsafe { std::mem::transmute::<*const (), Exchange>(exchange) };
        let mut mode = RELAXED;
        let _ = exchange(&raw mut mode);
    }
    if is_capturing() {
        drain_streams();
        return;
    }
    let (Some(push), Some(pop), Some(synchronize)) =
        (PUSH.address(), POP.address(), SYNCHRONIZE.address())
    else {
        return;
    };
    // SAFETY: the driver's functions of these names have these signatures.
    let (push, pop, synchronize) = unsafe {
        (
            std::mem::transmute::<*const (), Push>(push),
            std::mem::transmute::<*const (), Pop>(pop),
            std::mem::transmute::<*const (), Synchronize>(synchronize),
        )
    };
    let contexts = CONTEXTS.lock();
    for context in contexts.iter() {
        // A primary context that is not there any more is not made current.
        if !push(*context).is_ok() {
            continue;
        }
        let status = synchronize();
        if status != CUDA_SUCCESS {
            tracing::debug!(%status, "a context was not drained");
        }
        let _ = pop(std::ptr::null_mut());
    }
}

/// Waits for the streams that do not capture.
fn drain_streams() {
    type Synchronize = extern "C" fn(u64) -> CUresult;
    static SYNCHRONIZE: Genuine = Genuine::new("cuStreamSynchronize");
    let Some(address) = SYNCHRONIZE.address() else {
        return;
    };
    // SAFETY: the driver's function of this name has this signature.
    let synchronize = unsafe { std::mem::transmute::<*const (), Synchronize>(address) };
    STREAMS
        .lock()
        .retain(|stream| match is_in_capture(*stream) {
            Ok(true) => true,
            Ok(false) => {
                let _ = synchronize(*stream);
                true
            }
            Err(_) => false,
        });
}

/// Whether a stream may capture.
pub fn any_capture() -> bool {
    !CAPTURING.lock().is_empty()
}

/// Whether a stream captures. Streams that do not any more (destroyed, or ended by an error) are forgotten.
fn is_capturing() -> bool {
    let mut capturing = CAPTURING.lock();
    capturing.retain(|stream| is_in_capture(*stream) == Ok(true));
    !capturing.is_empty()
}

fn is_in_capture(stream: u64) -> Result<bool, CUresult> {
    type IsCapturing = extern "C" fn(u64, *mut u32) -> CUresult;
    static IS_CAPTURING: Genuine = Genuine::new("cuStreamIsCapturing");
    let address = IS_CAPTURING.address().ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
    // SAFETY: the driver's function of this name has this signature.
    let ask = unsafe { std::mem::transmute::<*const (), IsCapturing>(address) };
    let mut state = 0;
    ask(stream, &raw mut state).ok()?;
    Ok(state != 0)
}
