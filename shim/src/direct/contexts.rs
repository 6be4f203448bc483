//! Wrappers that keep count of the program's contexts, its streams, and those that capture ([`super::drain`]).

use std::ffi::c_void;

use mpsshim_api::cuda::{CUdevice, CUresult};

use super::drain::{CAPTURING, CONTEXTS, STREAMS};
use super::state::server_device;
use super::wrap::wrappers;
use super::{memory, turn};

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
    // A primary context may end here, while its handle stays the same.
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
