//! Contexts, threads, names of statuses, and what is said before `cuInit`.

use super::*;

pub fn before_init() {
    let (mut count, mut version) = (-1 as c_int, 0 as c_int);
    say!(
        "cuDeviceGetCount before cuInit",
        "{}",
        cu!(cuDeviceGetCount, &mut count)
    );
    say!(
        "cuDriverGetVersion before cuInit",
        "{}",
        cu!(cuDriverGetVersion, &mut version)
    );
    let mut context = CUcontext(7);
    say!(
        "cuCtxGetCurrent before cuInit",
        "{}",
        cu!(cuCtxGetCurrent, &mut context)
    );
    say!("cuInit with flags 1", "{}", cu!(cuInit, 1u32));
}

pub fn contexts(setup: &Setup) {
    let mut primary = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut primary);
    let (mut flags, mut active) = (9u32, 9 as c_int);
    say!(
        "primary state",
        "{} flags {flags} active {active}",
        cu!(
            cuDevicePrimaryCtxGetState,
            setup.device,
            &mut flags,
            &mut active
        )
    );
    let mut device: CUdevice = -1;
    say!(
        "cuCtxGetDevice",
        "{} {device}",
        cu!(cuCtxGetDevice, &mut device)
    );
    let mut own = CUcontext::NULL;
    must!(cuCtxCreate_v2, &mut own, 0u32, setup.device);
    let mut current = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut current);
    say!(
        "a created context is current",
        "{}",
        current == own && own != primary
    );
    let mut popped = CUcontext::NULL;
    say!(
        "pop",
        "{} own {}",
        cu!(cuCtxPopCurrent_v2, &mut popped),
        popped == own
    );
    must!(cuCtxGetCurrent, &mut current);
    say!("below it", "primary {}", current == primary);
    say!("push", "{}", cu!(cuCtxPushCurrent_v2, own));
    let pointer = alloc(4096);
    must!(cuCtxGetCurrent, &mut current);
    let mut of = CUcontext::NULL;
    say!(
        "context of a pointer",
        "{} own {}",
        cu!(
            cuPointerGetAttribute,
            &mut of,
            CU_POINTER_ATTRIBUTE_CONTEXT,
            pointer
        ),
        of == own
    );
    let mut id = (0u64, 0u64);
    must!(cuCtxGetId, own, &mut id.0);
    must!(cuCtxGetId, primary, &mut id.1);
    say!("ids differ", "{}", id.0 != id.1);
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, 0u32);
    say!(
        "cuStreamGetCtx",
        "{} own {}",
        cu!(cuStreamGetCtx, stream, &mut of),
        of == own
    );
    say!("cuCtxSynchronize", "{}", cu!(cuCtxSynchronize));
    say!("cuCtxDestroy", "{}", cu!(cuCtxDestroy_v2, own));
    must!(cuCtxGetCurrent, &mut current);
    say!(
        "after destroying the current one",
        "primary {}",
        current == primary
    );
    must!(cuCtxSetCurrent, CUcontext::NULL);
    say!(
        "alloc without a context",
        "{}",
        cu!(cuMemAlloc_v2, &mut { 0u64 }, 16usize)
    );
    say!(
        "cuCtxGetDevice without a context",
        "{}",
        cu!(cuCtxGetDevice, &mut device)
    );
    say!(
        "cuCtxSynchronize without a context",
        "{}",
        cu!(cuCtxSynchronize)
    );
    must!(cuCtxSetCurrent, primary);
    let mut value = 0usize;
    say!(
        "stack limit",
        "{} at least 1 {}",
        cu!(cuCtxGetLimit, &mut value, CU_LIMIT_STACK_SIZE),
        value >= 1
    );
    say!("limit 999", "{}", cu!(cuCtxGetLimit, &mut value, 999u32));
    say!(
        "cuCtxSetLimit",
        "{}",
        cu!(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 4096usize)
    );
    must!(cuCtxGetLimit, &mut value, CU_LIMIT_STACK_SIZE);
    say!("stack limit set", "{}", value >= 4096);
    let mut flags = 0u32;
    say!(
        "cuCtxGetFlags",
        "{} sched {}",
        cu!(cuCtxGetFlags, &mut flags),
        flags & CU_CTX_SCHED_MASK
    );
    say!(
        "NULL out pointer",
        "{}",
        cu!(cuCtxGetCurrent, null_mut::<CUcontext>())
    );
    let handle = std::thread::spawn(|| {
        let mut current = CUcontext(1);
        must!(cuCtxGetCurrent, &mut current);
        current.is_null()
    });
    say!(
        "a new thread has no context",
        "{}",
        handle.join().expect("joined")
    );
}

pub fn threads(setup: &Setup) {
    let out = alloc(64 * 4);
    let mut context = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut context);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            scope.spawn(move || {
                must!(cuCtxSetCurrent, context);
                let mut stream = CUstream::NULL;
                must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
                let own = alloc(8192);
                for round in 0..50i32 {
                    assert!(
                        setup
                            .store_index(own, 2000, round + thread as i32, stream)
                            .is_ok()
                    );
                    must!(cuStreamSynchronize, stream);
                    let mut last = 0i32;
                    must!(
                        cuMemcpyDtoHAsync_v2,
                        &raw mut last,
                        own + 1999 * 4,
                        4usize,
                        stream
                    );
                    must!(cuStreamSynchronize, stream);
                    assert_eq!(last, 1999 * (round + thread as i32));
                }
                must!(
                    cuMemsetD32Async,
                    out + thread * 4,
                    thread as u32 + 1,
                    1usize,
                    CU_STREAM_PER_THREAD
                );
                must!(cuStreamSynchronize, CU_STREAM_PER_THREAD);
                must!(cuStreamDestroy_v2, stream);
                free(own);
            });
        }
    });
    say!("8 threads", "{:?}", read_i32(out, 8));
    free(out);
}

pub fn names() {
    let mut text: *const c_char = null();
    for status in [
        0u32, 1, 2, 3, 100, 201, 400, 500, 600, 700, 719, 801, 805, 810, 999,
    ] {
        must!(cuGetErrorName, CUresult(status), &mut text);
        // SAFETY: the driver's strings are NUL-ended and live forever.
        let name = unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy();
        say!("name", "{status} {name}");
    }
    say!(
        "name of 12345",
        "{}",
        cu!(cuGetErrorName, CUresult(12_345), &mut text)
    );
}
