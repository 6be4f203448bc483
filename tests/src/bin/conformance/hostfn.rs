//! Host functions and stream callbacks, waits and writes of words in stream order.

use super::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What the functions below were called with, in order.
static CALLED: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Opened by the main thread to let [`blocks`] return.
static GATE: AtomicU32 = AtomicU32::new(0);

fn called() -> Vec<u64> {
    std::mem::take(&mut *CALLED.lock().expect("no panic in a function"))
}

unsafe extern "C" fn note(data: *mut c_void) {
    CALLED.lock().expect("one of few").push(data as u64);
}

unsafe extern "C" fn blocks(data: *mut c_void) {
    CALLED.lock().expect("one of few").push(data as u64);
    while GATE.load(Ordering::Acquire) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Doubles a word that both sides reach.
unsafe extern "C" fn doubles(data: *mut c_void) {
    // SAFETY: pinned memory of the caller's below.
    let word = unsafe { &*data.cast::<AtomicU32>() };
    word.store(word.load(Ordering::Acquire) * 2, Ordering::Release);
}

unsafe extern "C" fn told(stream: CUstream, status: CUresult, data: *mut c_void) {
    let mut called = CALLED.lock().expect("one of few");
    called.extend([stream.0, status.0.into(), data as u64]);
}

struct Handles {
    context: CUcontext,
    stream: CUstream,
    event: CUevent,
    memory: CUdeviceptr,
    pinned: *mut c_void,
}

/// Calls that a host function must not make, and what it is told.
unsafe extern "C" fn calls(data: *mut c_void) {
    // SAFETY: the caller's below, which waits.
    let with = unsafe { &*data.cast::<Handles>() };
    let (mut number, mut size, mut total) = (0 as c_int, 0usize, 0usize);
    let (mut context, mut pointer, mut event, mut stream) =
        (CUcontext::NULL, 0u64, CUevent::NULL, CUstream::NULL);
    let mut flags = 0u32;
    let mut text: *const c_char = null();
    say!("cuInit", "{}", cu!(cuInit, 0u32));
    say!(
        "cuDriverGetVersion",
        "{}",
        cu!(cuDriverGetVersion, &mut number)
    );
    say!(
        "cuGetErrorName",
        "{}",
        cu!(cuGetErrorName, CUresult(1), &mut text)
    );
    say!("cuCtxGetCurrent", "{}", cu!(cuCtxGetCurrent, &mut context));
    say!("a context is current", "{}", !context.is_null());
    say!("cuCtxGetDevice", "{}", cu!(cuCtxGetDevice, &mut number));
    say!("cuCtxGetFlags", "{}", cu!(cuCtxGetFlags, &mut flags));
    say!("cuCtxSetCurrent", "{}", cu!(cuCtxSetCurrent, with.context));
    say!(
        "cuCtxPushCurrent",
        "{}",
        cu!(cuCtxPushCurrent_v2, with.context)
    );
    say!(
        "cuCtxPopCurrent",
        "{}",
        cu!(cuCtxPopCurrent_v2, &mut context)
    );
    say!(
        "cuDevicePrimaryCtxGetState",
        "{}",
        cu!(
            cuDevicePrimaryCtxGetState,
            0 as c_int,
            &mut flags,
            &mut number
        )
    );
    say!(
        "cuMemAlloc",
        "{}",
        cu!(cuMemAlloc_v2, &mut pointer, 256usize)
    );
    say!(
        "cuMemGetInfo",
        "{}",
        cu!(cuMemGetInfo_v2, &mut size, &mut total)
    );
    say!(
        "cuMemcpyDtoH",
        "{}",
        cu!(cuMemcpyDtoH_v2, &mut number, with.memory, 4usize)
    );
    say!(
        "cuMemsetD8Async",
        "{}",
        cu!(cuMemsetD8Async, with.memory, 0u8, 4usize, with.stream)
    );
    say!(
        "cuMemHostGetFlags",
        "{}",
        cu!(cuMemHostGetFlags, &mut flags, with.pinned)
    );
    say!(
        "cuPointerGetAttribute",
        "{}",
        cu!(
            cuPointerGetAttribute,
            &mut number,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            with.memory
        )
    );
    say!(
        "cuStreamCreate",
        "{}",
        cu!(cuStreamCreate, &mut stream, 0u32)
    );
    let query = cu!(cuStreamQuery, with.stream);
    let allowed = query.is_ok() || query == CUDA_ERROR_NOT_READY;
    say!("cuStreamQuery", "{}", allowed);
    say!(
        "cuStreamGetFlags",
        "{}",
        cu!(cuStreamGetFlags, with.stream, &mut flags)
    );
    say!("cuEventCreate", "{}", cu!(cuEventCreate, &mut event, 0u32));
    let query = cu!(cuEventQuery, with.event);
    let allowed = query.is_ok() || query == CUDA_ERROR_NOT_READY;
    say!("cuEventQuery", "{}", allowed);
    say!(
        "cuEventRecord",
        "{}",
        cu!(cuEventRecord, with.event, with.stream)
    );
    say!(
        "cuLaunchHostFunc",
        "{}",
        cu!(
            cuLaunchHostFunc,
            with.stream,
            note as unsafe extern "C" fn(*mut c_void),
            null_mut::<c_void>()
        )
    );
}

unsafe extern "C" fn calls_in_callback(_stream: CUstream, _status: CUresult, data: *mut c_void) {
    // SAFETY: as above.
    unsafe { calls(data) };
}

type Function = unsafe extern "C" fn(*mut c_void);
type Callback = unsafe extern "C" fn(CUstream, CUresult, *mut c_void);

fn launch(stream: CUstream, function: Function, data: u64) -> CUresult {
    cu!(cuLaunchHostFunc, stream, function, data as *mut c_void)
}

fn new_stream(flags: u32) -> CUstream {
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, flags);
    stream
}

/// Pinned memory: its address, which is the device's too.
fn pinned(len: usize) -> u64 {
    let mut address = null_mut::<c_void>();
    must!(cuMemHostAlloc, &mut address, len, 0u32);
    // SAFETY: just allocated.
    unsafe { address.cast::<u8>().write_bytes(0, len) };
    address as u64
}

fn word(address: u64) -> &'static AtomicU32 {
    // SAFETY: pinned memory that the sections free at their end.
    unsafe { &*(address as *const AtomicU32) }
}

/// Loads the kernels: a load waits for all work, so it must not come while something waits for the host.
fn warm(setup: &Setup, out: CUdeviceptr) {
    setup.slow_store(out, 0, CUstream::NULL);
    assert!(setup.store_index(out, 8, 3, CUstream::NULL).is_ok());
    must!(cuCtxSynchronize);
}

pub fn host_functions(setup: &Setup) {
    let (blocking, free_running) = (new_stream(0), new_stream(CU_STREAM_NON_BLOCKING));
    let out = alloc(4096);
    let shared = pinned(4096);
    warm(setup, out);
    say!(
        "no function",
        "{}",
        cu!(
            cuLaunchHostFunc,
            blocking,
            null::<c_void>(),
            null_mut::<c_void>()
        )
    );
    say!(
        "no callback",
        "{}",
        cu!(
            cuStreamAddCallback,
            blocking,
            null::<c_void>(),
            null_mut::<c_void>(),
            0u32
        )
    );
    say!(
        "flags of a callback",
        "{}",
        cu!(
            cuStreamAddCallback,
            blocking,
            told as Callback,
            null_mut::<c_void>(),
            1u32
        )
    );
    let gone = new_stream(0);
    must!(cuStreamDestroy_v2, gone);
    // Order: a kernel, a function that reads what it wrote, a copy of what the function wrote.
    setup.slow_store(out, 21, blocking);
    must!(cuMemcpyDtoHAsync_v2, shared, out, 4usize, blocking);
    say!("launch", "{}", launch(blocking, doubles, shared));
    must!(cuMemcpyHtoDAsync_v2, out + 4, shared, 4usize, blocking);
    must!(cuStreamSynchronize, blocking);
    say!("what the function made of it", "{:?}", read_i32(out, 2));
    for n in 0..1000u64 {
        assert!(launch(if n % 2 == 0 { blocking } else { free_running }, note, n).is_ok());
    }
    must!(cuStreamSynchronize, blocking);
    must!(cuStreamSynchronize, free_running);
    let (even, odd): (Vec<_>, Vec<_>) = called().into_iter().partition(|n| n % 2 == 0);
    let in_order = |list: &[u64]| list.len() == 500 && list.is_sorted();
    say!(
        "a thousand in order",
        "{:?}",
        (in_order(&even), in_order(&odd))
    );
    // A function that blocks stops its stream, and what waits for that, only.
    let mut event = CUevent::NULL;
    must!(cuEventCreate, &mut event, 0u32);
    say!("one that blocks", "{}", launch(free_running, blocks, 1));
    must!(cuMemsetD32Async, out, 5u32, 1usize, free_running);
    must!(cuEventRecord, event, free_running);
    let mut other = CUstream::NULL;
    must!(
        cuStreamCreateWithPriority,
        &mut other,
        CU_STREAM_NON_BLOCKING,
        -1 as c_int
    );
    assert!(setup.store_index(out + 16, 8, 3, other).is_ok());
    say!("another stream", "{}", cu!(cuStreamSynchronize, other));
    must!(cuStreamWaitEvent, other, event, 0u32);
    must!(cuMemcpyDtoDAsync_v2, out + 8, out, 4usize, other);
    assert!(setup.store_index(out + 64, 8, 4, blocking).is_ok());
    say!("a third", "{}", cu!(cuStreamSynchronize, blocking));
    say!("query it", "{}", cu!(cuStreamQuery, free_running));
    say!("query what waits for it", "{}", cu!(cuStreamQuery, other));
    say!("query the event", "{}", cu!(cuEventQuery, event));
    // An event that the stream which stands still waits for is complete all the same.
    let mut early = CUevent::NULL;
    must!(cuEventCreate, &mut early, 0u32);
    setup.slow_store(out + 32, 1, blocking);
    must!(cuEventRecord, early, blocking);
    must!(cuMemsetD32Async, out + 36, 1u32, 1usize, blocking);
    must!(cuStreamWaitEvent, free_running, early, 0u32);
    let began = Instant::now();
    let mut status = CUDA_ERROR_NOT_READY;
    while status == CUDA_ERROR_NOT_READY && began.elapsed() < Duration::from_secs(5) {
        status = cu!(cuEventQuery, early);
    }
    say!("query an event that it waits for", "{status}");
    must!(cuEventDestroy_v2, early);
    say!("destroy it", "{}", cu!(cuStreamDestroy_v2, free_running));
    for _ in 0..600 {
        assert!(setup.store_index(out + 64, 8, 4, blocking).is_ok());
    }
    say!(
        "many launches beside it",
        "{}",
        cu!(cuStreamSynchronize, blocking)
    );
    GATE.store(1, Ordering::Release);
    say!("the event", "{}", cu!(cuEventSynchronize, event));
    must!(cuStreamSynchronize, other);
    say!(
        "what came after it",
        "{:?} {:?}",
        called(),
        (read_i32(out, 1)[0], read_i32(out + 8, 1)[0])
    );
    // Default streams.
    GATE.store(0, Ordering::Release);
    assert!(launch(CUstream::NULL, blocks, 2).is_ok());
    must!(cuMemsetD32Async, out, 6u32, 1usize, blocking);
    must!(cuMemsetD32Async, out + 4, 7u32, 1usize, other);
    must!(cuStreamSynchronize, other);
    say!(
        "a blocking stream behind the default one",
        "{}",
        cu!(cuStreamQuery, blocking)
    );
    GATE.store(1, Ordering::Release);
    must!(cuStreamSynchronize, blocking);
    say!("both", "{:?} {:?}", called(), read_i32(out, 2));
    assert!(launch(CU_STREAM_PER_THREAD, note, 3).is_ok());
    assert!(launch(CU_STREAM_LEGACY, note, 4).is_ok());
    must!(
        cuLaunchHostFunc_ptsz,
        CUstream::NULL,
        note as Function,
        5 as *mut c_void
    );
    must!(cuCtxSynchronize);
    say!("default streams", "{:?}", called());
    // Callbacks get the stream, the status and the data.
    must!(
        cuStreamAddCallback,
        other,
        told as Callback,
        8 as *mut c_void,
        0u32
    );
    must!(cuStreamSynchronize, other);
    let what = called();
    say!(
        "callback",
        "{:?}",
        (what[0] == other.0, what[1], what[2], what.len())
    );
    for default in [CUstream::NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD] {
        must!(
            cuStreamAddCallback,
            default,
            told as Callback,
            null_mut::<c_void>(),
            0u32
        );
        must!(cuStreamSynchronize, default);
        let what = called();
        say!(
            "callback of a default stream",
            "{:?}",
            (what[0] == default.0, what[0] < 3, what[1])
        );
    }
    must!(
        cuStreamAddCallback_ptsz,
        CUstream::NULL,
        told as Callback,
        null_mut::<c_void>(),
        0u32
    );
    must!(cuStreamSynchronize, CU_STREAM_PER_THREAD);
    let what = called();
    say!("callback of ptsz", "{:?}", (what[0] < 3, what[1]));
    // A stream destroyed while functions wait: they still run.
    setup.slow_store(out, 9, other);
    for n in 0..3 {
        assert!(launch(other, note, n).is_ok());
    }
    must!(cuStreamDestroy_v2, other);
    must!(cuCtxSynchronize);
    say!("functions of a destroyed stream", "{:?}", called());
    must!(cuEventDestroy_v2, event);
    must!(cuStreamDestroy_v2, blocking);
    must!(cuMemFreeHost, shared);
    free(out);
}

/// What host functions are told when they make calls.
pub fn host_function_calls(_setup: &Setup) {
    let mut with = Handles {
        context: CUcontext::NULL,
        stream: new_stream(0),
        event: CUevent::NULL,
        memory: alloc(256),
        pinned: pinned(256) as *mut c_void,
    };
    must!(cuCtxGetCurrent, &mut with.context);
    must!(cuEventCreate, &mut with.event, 0u32);
    let stream = new_stream(CU_STREAM_NON_BLOCKING);
    println!("in a function");
    assert!(launch(stream, calls, &raw const with as u64).is_ok());
    must!(cuStreamSynchronize, stream);
    let data = (&raw const with).cast_mut().cast::<c_void>();
    println!("in a callback");
    must!(
        cuStreamAddCallback,
        stream,
        calls_in_callback as Callback,
        data,
        0u32
    );
    must!(cuStreamSynchronize, stream);
    let mut flags = 9u32;
    say!(
        "afterwards",
        "{} {flags}",
        cu!(cuStreamGetFlags, stream, &mut flags)
    );
    must!(cuStreamDestroy_v2, stream);
    must!(cuStreamDestroy_v2, with.stream);
    must!(cuEventDestroy_v2, with.event);
    must!(cuMemFreeHost, with.pinned);
    free(with.memory);
}

/// Waits and writes of words.
pub fn memory_operations(setup: &Setup) {
    let (first, second) = (
        new_stream(CU_STREAM_NON_BLOCKING),
        new_stream(CU_STREAM_NON_BLOCKING),
    );
    let out = alloc(4096);
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let shared = pinned(4096);
    warm(setup, out);
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuCtxSynchronize);
    say!(
        "write",
        "{}",
        cu!(cuStreamWriteValue32_v2, first, out, 7u32, 0u32)
    );
    say!(
        "write 64",
        "{}",
        cu!(
            cuStreamWriteValue64_v2,
            first,
            out + 8,
            0x1_0000_0002u64,
            0u32
        )
    );
    say!(
        "write to the host",
        "{}",
        cu!(cuStreamWriteValue32_v2, first, shared, 8u32, 0u32)
    );
    must!(cuStreamSynchronize, first);
    say!(
        "written",
        "{:?} {}",
        read_i32(out, 4),
        word(shared).load(Ordering::Acquire)
    );
    // The host writes.
    word(shared).store(0, Ordering::Release);
    say!(
        "wait",
        "{}",
        cu!(
            cuStreamWaitValue32_v2,
            first,
            shared,
            5u32,
            CU_STREAM_WAIT_VALUE_GEQ
        )
    );
    must!(cuMemsetD32Async, out, 11u32, 1usize, first);
    assert!(setup.store_index(out + 64, 8, 4, second).is_ok());
    say!("another stream", "{}", cu!(cuStreamSynchronize, second));
    say!("the waiting one", "{}", cu!(cuStreamQuery, first));
    word(shared).store(4, Ordering::Release);
    std::thread::sleep(Duration::from_millis(20));
    say!("not enough", "{}", cu!(cuStreamQuery, first));
    word(shared).store(6, Ordering::Release);
    say!("enough", "{}", cu!(cuStreamSynchronize, first));
    say!("behind it", "{}", read_i32(out, 1)[0]);
    // Another stream writes, in device memory.
    must!(
        cuStreamWaitValue32_v2,
        first,
        out + 128,
        1u32,
        CU_STREAM_WAIT_VALUE_EQ
    );
    must!(cuMemsetD32Async, out, 12u32, 1usize, first);
    setup.slow_store(out + 4, 13, second);
    say!(
        "a stream that waits for another",
        "{}",
        cu!(cuStreamQuery, first)
    );
    must!(cuStreamWriteValue32_v2, second, out + 128, 1u32, 0u32);
    must!(cuStreamSynchronize, first);
    say!("both", "{:?}", read_i32(out, 2));
    // Earlier work of the same stream counts: the word is 1 now, 0 when the stream gets to its wait.
    setup.slow_store(out + 128, 0, first);
    must!(
        cuStreamWaitValue32_v2,
        first,
        out + 128,
        1u32,
        CU_STREAM_WAIT_VALUE_EQ
    );
    must!(cuMemsetD32Async, out, 14u32, 1usize, first);
    std::thread::sleep(Duration::from_millis(100));
    say!(
        "what it had before does not count",
        "{}",
        cu!(cuStreamQuery, first)
    );
    must!(cuStreamWriteValue32_v2, second, out + 128, 1u32, 0u32);
    must!(cuStreamSynchronize, first);
    // Kinds of comparison, 64 bits.
    let wide = |value: u64| {
        // SAFETY: pinned memory of ours.
        unsafe { (*((shared + 64) as *const AtomicU64)).store(value, Ordering::Release) }
    };
    for (name, flags, awaited, before, after) in [
        (
            "greater",
            CU_STREAM_WAIT_VALUE_GEQ,
            1u64 << 40,
            (1 << 40) - 1,
            (1 << 40) + 1,
        ),
        ("equal", CU_STREAM_WAIT_VALUE_EQ, 7, 7 + (1 << 32), 7),
        ("and", CU_STREAM_WAIT_VALUE_AND, 1 << 40, 1 << 8, 1 << 40),
        ("nor", CU_STREAM_WAIT_VALUE_NOR, 1, u64::MAX, u64::MAX - 2),
        ("negative", CU_STREAM_WAIT_VALUE_GEQ, 0, u64::MAX, 1),
    ] {
        wide(before);
        let status = cu!(cuStreamWaitValue64_v2, first, shared + 64, awaited, flags);
        std::thread::sleep(Duration::from_millis(5));
        let waits = cu!(cuStreamQuery, first);
        wide(after);
        say!(name, "{status} {waits} {}", cu!(cuStreamSynchronize, first));
    }
    word(shared).store(u32::MAX, Ordering::Release);
    must!(
        cuStreamWaitValue32_v2,
        first,
        shared,
        0u32,
        CU_STREAM_WAIT_VALUE_GEQ
    );
    std::thread::sleep(Duration::from_millis(5));
    say!("32 bits are signed", "{}", cu!(cuStreamQuery, first));
    word(shared).store(0, Ordering::Release);
    must!(cuStreamSynchronize, first);
    // Batches.
    let wait =
        |operation: u32, address: u64, value: u64, value_flags: u32| CUstreamBatchMemOpParams {
            operation,
            address,
            value,
            value_flags,
            ..Default::default()
        };
    let mut batch = vec![
        wait(CU_STREAM_MEM_OP_WRITE_VALUE_32, out + 256, 1, 0),
        wait(
            CU_STREAM_MEM_OP_WAIT_VALUE_32,
            shared + 128,
            1,
            CU_STREAM_WAIT_VALUE_EQ,
        ),
        wait(CU_STREAM_MEM_OP_WRITE_VALUE_64, out + 264, 2, 0),
        wait(
            CU_STREAM_MEM_OP_WAIT_VALUE_64,
            shared + 136,
            1,
            CU_STREAM_WAIT_VALUE_EQ,
        ),
        wait(CU_STREAM_MEM_OP_BARRIER, 0, 0, 0),
        wait(CU_STREAM_MEM_OP_WRITE_VALUE_32, out + 272, 3, 0),
    ];
    let status = cu!(
        cuStreamBatchMemOp_v2,
        first,
        batch.len() as u32,
        batch.as_mut_ptr(),
        0u32
    );
    std::thread::sleep(Duration::from_millis(5));
    say!("batch", "{status} {}", cu!(cuStreamQuery, first));
    word(shared + 128).store(1, Ordering::Release);
    word(shared + 136).store(1, Ordering::Release);
    say!(
        "batch done",
        "{} {:?}",
        cu!(cuStreamSynchronize, first),
        read_i32(out + 256, 5)
    );
    let mut many = vec![wait(CU_STREAM_MEM_OP_WRITE_VALUE_32, out + 512, 1, 0); 300];
    for count in [0u32, 1, 255, 256, 257, 300] {
        let status = cu!(cuStreamBatchMemOp_v2, first, count, many.as_mut_ptr(), 0u32);
        say!("a batch of so many", "{count} {status}");
    }
    say!(
        "batch with flags",
        "{}",
        cu!(cuStreamBatchMemOp_v2, first, 1u32, many.as_mut_ptr(), 1u32)
    );
    for operation in [0u32, 7, 99] {
        many[0].operation = operation;
        say!(
            "unknown operation",
            "{operation} {}",
            cu!(cuStreamBatchMemOp_v2, first, 1u32, many.as_mut_ptr(), 0u32)
        );
    }
    many[0] = CUstreamBatchMemOpParams {
        operation: CU_STREAM_MEM_OP_BARRIER,
        flags: 1,
        ..Default::default()
    };
    say!(
        "barrier of the GPU",
        "{}",
        cu!(cuStreamBatchMemOp_v2, first, 1u32, many.as_mut_ptr(), 0u32)
    );
    many[0].flags = 2;
    say!(
        "barrier of another kind",
        "{}",
        cu!(cuStreamBatchMemOp_v2, first, 1u32, many.as_mut_ptr(), 0u32)
    );
    many[0] = CUstreamBatchMemOpParams {
        operation: CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES,
        ..Default::default()
    };
    let mut can_flush = 0 as c_int;
    must!(cuDeviceGetAttribute, &mut can_flush, 98u32, setup.device);
    let flush = cu!(cuStreamBatchMemOp_v2, first, 1u32, many.as_mut_ptr(), 0u32);
    say!(
        "flush",
        "{}",
        if can_flush == 0 {
            format!("{flush}")
        } else {
            "can".into()
        }
    );
    // What is refused.
    say!(
        "odd address",
        "{}",
        cu!(cuStreamWriteValue32_v2, first, out + 2, 1u32, 0u32)
    );
    say!(
        "odd wait",
        "{}",
        cu!(cuStreamWaitValue32_v2, first, out + 1, 1u32, 0u32)
    );
    say!(
        "odd address of 64",
        "{}",
        cu!(cuStreamWriteValue64_v2, first, out + 4, 1u64, 0u32)
    );
    say!(
        "odd wait of 64",
        "{}",
        cu!(cuStreamWaitValue64_v2, first, out + 4, 1u64, 0u32)
    );
    say!(
        "null",
        "{}",
        cu!(cuStreamWriteValue32_v2, first, 0u64, 1u32, 0u32)
    );
    say!(
        "wait at null",
        "{}",
        cu!(cuStreamWaitValue32_v2, first, 0u64, 1u32, 0u32)
    );
    let local = 0u32;
    say!(
        "pageable",
        "{}",
        cu!(
            cuStreamWriteValue32_v2,
            first,
            &raw const local as u64,
            1u32,
            0u32
        )
    );
    say!(
        "no barrier",
        "{}",
        cu!(
            cuStreamWriteValue32_v2,
            first,
            out,
            1u32,
            CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
        )
    );
    say!(
        "bad flags of a write",
        "{}",
        cu!(cuStreamWriteValue32_v2, first, out, 1u32, 2u32)
    );
    say!(
        "bad flags of a wait",
        "{}",
        cu!(cuStreamWaitValue32_v2, first, out, 1u32, 4u32)
    );
    let flush = cu!(
        cuStreamWaitValue32_v2,
        first,
        out,
        0u32,
        CU_STREAM_WAIT_VALUE_FLUSH
    );
    say!(
        "wait and flush",
        "{}",
        if can_flush == 0 {
            format!("{flush}")
        } else {
            "can".into()
        }
    );
    must!(cuStreamSynchronize, first);
    // Default streams, the first versions of the calls.
    word(shared).store(0, Ordering::Release);
    say!(
        "default stream waits",
        "{}",
        cu!(cuStreamWaitValue32_v2, CUstream::NULL, shared, 1u32, 0u32)
    );
    let blocking = new_stream(0);
    must!(cuMemsetD32Async, out, 15u32, 1usize, blocking);
    std::thread::sleep(Duration::from_millis(5));
    say!("a blocking stream too", "{}", cu!(cuStreamQuery, blocking));
    word(shared).store(1, Ordering::Release);
    must!(cuStreamSynchronize, blocking);
    must!(
        cuStreamWriteValue32_v2_ptsz,
        CUstream::NULL,
        out,
        16u32,
        0u32
    );
    must!(
        cuStreamWaitValue32_v2_ptsz,
        CUstream::NULL,
        out,
        16u32,
        CU_STREAM_WAIT_VALUE_EQ
    );
    must!(
        cuStreamWriteValue64_v2_ptsz,
        CUstream::NULL,
        out,
        17u64,
        0u32
    );
    must!(
        cuStreamWaitValue64_v2_ptsz,
        CUstream::NULL,
        out,
        17u64,
        CU_STREAM_WAIT_VALUE_EQ
    );
    many[0] = wait(CU_STREAM_MEM_OP_WRITE_VALUE_32, out, 18, 0);
    must!(
        cuStreamBatchMemOp_v2_ptsz,
        CUstream::NULL,
        1u32,
        many.as_mut_ptr(),
        0u32
    );
    must!(cuStreamSynchronize, CU_STREAM_PER_THREAD);
    say!("ptsz", "{:?}", read_i32(out, 2));
    must!(cuStreamDestroy_v2, blocking);
    must!(cuStreamDestroy_v2, first);
    must!(cuStreamDestroy_v2, second);
    must!(cuMemFreeHost, shared);
    free(out);
}

/// The first versions, which a driver may switch off.
pub fn memory_operations_v1(_setup: &Setup) {
    let stream = new_stream(0);
    let out = alloc(256);
    must!(cuMemsetD8_v2, out, 0u8, 256usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    say!(
        "write",
        "{}",
        cu!(cuStreamWriteValue32, stream, out, 1u32, 0u32)
    );
    say!(
        "write 64",
        "{}",
        cu!(cuStreamWriteValue64, stream, out + 8, 2u64, 0u32)
    );
    say!(
        "wait",
        "{}",
        cu!(cuStreamWaitValue32, stream, out, 1u32, 0u32)
    );
    say!(
        "wait 64",
        "{}",
        cu!(cuStreamWaitValue64, stream, out + 8, 2u64, 0u32)
    );
    let mut batch = CUstreamBatchMemOpParams {
        operation: CU_STREAM_MEM_OP_WRITE_VALUE_32,
        address: out + 16,
        value: 3,
        ..Default::default()
    };
    say!(
        "batch",
        "{}",
        cu!(cuStreamBatchMemOp, stream, 1u32, &mut batch, 0u32)
    );
    say!(
        "write ptsz",
        "{}",
        cu!(cuStreamWriteValue32_ptsz, stream, out, 1u32, 0u32)
    );
    say!(
        "write 64 ptsz",
        "{}",
        cu!(cuStreamWriteValue64_ptsz, stream, out + 8, 2u64, 0u32)
    );
    say!(
        "wait ptsz",
        "{}",
        cu!(cuStreamWaitValue32_ptsz, stream, out, 1u32, 0u32)
    );
    say!(
        "wait 64 ptsz",
        "{}",
        cu!(cuStreamWaitValue64_ptsz, stream, out + 8, 2u64, 0u32)
    );
    say!(
        "batch ptsz",
        "{}",
        cu!(cuStreamBatchMemOp_ptsz, stream, 1u32, &mut batch, 0u32)
    );
    batch.operation = CU_STREAM_MEM_OP_BARRIER;
    say!(
        "barrier",
        "{}",
        cu!(cuStreamBatchMemOp, stream, 1u32, &mut batch, 0u32)
    );
    must!(cuStreamSynchronize, stream);
    say!("words", "{:?}", read_i32(out, 5));
    must!(cuStreamDestroy_v2, stream);
    free(out);
}
