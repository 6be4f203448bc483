//! softgpu through the driver API, as a program would use it.

use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use mpsshim_api::cuda::*;
use mpsshim_tests::artifacts::artifact;

const PTX: &str = include_str!("../fixtures/softgpu.ptx");
const ARITH: &str = include_str!("../fixtures/arith.ptx");
/// The server's kernel for small copies.
const COPY: &str = include_str!("../../server/src/engine/gpu/copy_kernel.ptx");

/// The library's handle; it stays loaded.
fn library() -> usize {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let path = CString::new(
            artifact("libsoftgpu.so")
                .into_os_string()
                .into_encoded_bytes(),
        )
        .expect("a path");
        // SAFETY: softgpu does nothing when it is loaded; the variables are set before anything reads them.
        unsafe {
            std::env::set_var("SOFTGPU_DEVICES", "2");
            std::env::set_var("SOFTGPU_MEMORY", "256M");
            std::env::remove_var("CUDA_VISIBLE_DEVICES");
            libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) as usize
        }
    })
}

fn symbol(name: &str) -> usize {
    let name = CString::new(name).expect("a name");
    // SAFETY: the library is loaded, the name is a C string.
    let found = unsafe { libc::dlsym(library() as *mut libc::c_void, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?} is not exported");
    found as usize
}

/// Calls an entry point with integer and pointer arguments, each in a slot of 64 bits.
fn call(name: &str, args: &[u64]) -> CUresult {
    call_at(symbol(name), args)
}

fn call_at(entry: usize, args: &[u64]) -> CUresult {
    assert!(args.len() <= 11);
    let mut a = [0u64; 11];
    a[..args.len()].copy_from_slice(args);
    type Entry = extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> CUresult;
    // SAFETY: all arguments of driver entry points are integers or pointers, which both calling conventions
    // of interest pass in whole registers and stack slots; surplus ones are ignored.
    let entry: Entry = unsafe { std::mem::transmute(entry) };
    entry(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10],
    )
}

#[track_caller]
fn ok(name: &str, args: &[u64]) {
    let status = call(name, args);
    assert!(status.is_ok(), "{name}: {status}");
}

/// Calls an entry point whose first argument is where its result goes.
#[track_caller]
fn get(name: &str, args: &[u64]) -> u64 {
    let mut out = 0u64;
    let mut all = vec![&mut out as *mut u64 as u64];
    all.extend(args);
    ok(name, &all);
    out
}

/// One test at a time: they measure times and free memory. Each has a context of its own.
fn context() -> (MutexGuard<'static, ()>, u64) {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    ok("cuInit", &[0]);
    (turn, get("cuCtxCreate_v2", &[0, 0]))
}

fn load(text: &str) -> u64 {
    let text = CString::new(text).expect("text");
    get("cuModuleLoadData", &[text.as_ptr() as u64])
}

fn function(module: u64, name: &CStr) -> u64 {
    get("cuModuleGetFunction", &[module, name.as_ptr() as u64])
}

fn launch(
    function: u64,
    blocks: u32,
    threads: u32,
    shared: u32,
    stream: u64,
    params: &[u64],
) -> CUresult {
    let pointers: Vec<u64> = params.iter().map(|p| p as *const u64 as u64).collect();
    let (blocks, threads) = (u64::from(blocks), u64::from(threads));
    call(
        "cuLaunchKernel",
        &[
            function,
            blocks,
            1,
            1,
            threads,
            1,
            1,
            shared.into(),
            stream,
            pointers.as_ptr() as u64,
            0,
        ],
    )
}

fn upload<T: Copy>(values: &[T]) -> u64 {
    let bytes = size_of_val(values) as u64;
    let at = get("cuMemAlloc_v2", &[bytes]);
    ok("cuMemcpyHtoD_v2", &[at, values.as_ptr() as u64, bytes]);
    at
}

fn download<T: Copy + Default>(at: u64, count: usize) -> Vec<T> {
    let mut out = vec![T::default(); count];
    ok(
        "cuMemcpyDtoH_v2",
        &[out.as_mut_ptr() as u64, at, size_of_val(&out[..]) as u64],
    );
    out
}

#[test]
fn vector_add() {
    let (_turn, context) = context();
    let n = 1000u32;
    let a: Vec<f32> = (0..n).map(|i| i as f32 * 0.1).collect();
    let b: Vec<f32> = (0..n).map(|i| 1.0 / (i + 1) as f32).collect();
    let (da, db) = (upload(&a), upload(&b));
    let dc = get("cuMemAlloc_v2", &[4 * u64::from(n)]);
    let add = function(load(PTX), c"vector_add");
    assert_eq!(
        launch(add, 8, 128, 0, 0, &[da, db, dc, n.into()]),
        CUDA_SUCCESS
    );
    let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(download::<f32>(dc, n as usize), expected);
    // The same through `extra`.
    ok("cuMemsetD32_v2", &[dc, 0, n.into()]);
    let buffer = [da, db, dc, u64::from(n)];
    let size = 28u64;
    let extra = [
        1,
        buffer.as_ptr() as u64,
        2,
        &size as *const u64 as u64,
        0u64,
    ];
    ok(
        "cuLaunchKernel",
        &[add, 8, 1, 1, 128, 1, 1, 0, 0, 0, extra.as_ptr() as u64],
    );
    assert_eq!(download::<f32>(dc, n as usize), expected);
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn the_kernel_for_small_copies_copies_any_range() {
    const BYTES: usize = 9_000;
    let (_turn, context) = context();
    let source: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    let (from, to) = (upload(&source), upload(&vec![0xeeu8; BYTES]));
    let copy = function(load(COPY), c"mpsshim_copy");
    let lens = (0..20).chain([63, 64, 65, 256, 1024, 4097, 8192]);
    let ranges = lens.flat_map(|len| {
        let offsets = [(0, 0), (16, 32), (4, 8), (1, 0), (3, 5)];
        offsets.map(|(to, from)| (to, from, len))
    });
    for (to_at, from_at, len) in ranges {
        let params = [to + to_at as u64, from + from_at as u64, len as u64];
        assert_eq!(launch(copy, 3, 64, 0, 0, &params), CUDA_SUCCESS);
        let got = download::<u8>(to, BYTES);
        let mut expected = vec![0xee; BYTES];
        expected[to_at..to_at + len].copy_from_slice(&source[from_at..from_at + len]);
        assert!(got == expected, "{len} bytes, {from_at} to {to_at}");
        ok("cuMemsetD8_v2", &[to, 0xee, BYTES as u64]);
    }
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn barriers_shared_memory_and_atomics() {
    let (_turn, context) = context();
    let values: Vec<f32> = (0..5000).map(|i| (i % 17) as f32).collect();
    let (input, out) = (upload(&values), upload(&[0f32]));
    let sum = function(load(PTX), c"sum");
    assert_eq!(launch(sum, 5, 256, 0, 0, &[input, out, 5000]), CUDA_SUCCESS);
    assert_eq!(download::<f32>(out, 1)[0], values.iter().sum::<f32>());
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn warp_operations() {
    let (_turn, context) = context();
    let out = upload(&[0i32; 320]);
    let warps = function(load(PTX), c"warps");
    assert_eq!(launch(warps, 1, 64, 0, 0, &[out]), CUDA_SUCCESS);
    let got = download::<i32>(out, 320);
    for lane in 0..64usize {
        let first = lane & !31;
        // Shuffling down: a lane beyond the end gives its own value.
        let mut values: Vec<i32> = (0..32).map(|l| (first + l) as i32).collect();
        for by in [16, 8, 4, 2, 1] {
            values = (0..32)
                .map(|l| {
                    values[l]
                        + if l + by < 32 {
                            values[l + by]
                        } else {
                            values[l]
                        }
                })
                .collect();
        }
        assert_eq!(got[lane], values[lane - first], "shuffle down, lane {lane}");
        assert_eq!(
            got[64 + lane],
            (first..first + 32).filter(|l| l % 3 == 0).count() as i32
        );
        assert_eq!(got[128 + lane], (lane ^ 5) as i32);
        assert_eq!(got[192 + lane], 60);
        assert_eq!(
            got[256 + lane],
            if lane % 8 >= 3 { lane - 3 } else { lane } as i32
        );
    }
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn library_mathematics() {
    let (_turn, context) = context();
    #[repr(C)]
    struct Pair(f32, f64, [i32; 5]);
    let pair = Pair(1.25, 0.75, [10, 20, 30, 40, 50]);
    let out = get("cuMemAlloc_v2", &[8 * 8 * 4]);
    let f = function(load(PTX), c"mathematics");
    let params = [&pair as *const Pair as u64, &out as *const u64 as u64];
    ok(
        "cuLaunchKernel",
        &[f, 1, 1, 1, 4, 1, 1, 0, 0, params.as_ptr() as u64, 0],
    );
    let got = download::<f64>(out, 32);
    for t in 0..4 {
        let n = t as f64;
        let expected = [
            1.25 + 0.75 + [10.0, 20.0, 30.0, 40.0][t] + 2.5 + [1.0, 2.0, 3.0, 4.0][t],
            (0.75 * n).exp(),
            f64::from((1250.0 * n as f32).sin()),
            f64::from((1.25 - n as f32).exp()),
            0.75f64.powf(2.3 * n),
            f64::from(1.25f32.ln() / 1.25),
            (0.75e8 * n).cos(),
            [
                0.7111556336535151,
                0.4041169094348223,
                0.2763263901682369,
                0.20911767705937584,
            ][t],
        ];
        for (k, (got, expected)) in got[8 * t..].iter().zip(expected).enumerate() {
            let single = matches!(k, 2 | 3 | 5);
            let tolerance = expected.abs().max(1e-3)
                * if single {
                    3e-7
                } else if k == 7 {
                    1e-12
                } else {
                    1e-14
                };
            assert!(
                (got - expected).abs() <= tolerance,
                "{k} of thread {t}: {got} for {expected}"
            );
        }
    }
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn functions_globals_and_constants() {
    let (_turn, context) = context();
    let module = load(PTX);
    let out = upload(&[0i32; 2]);
    let calls = function(module, c"calls");
    assert_eq!(launch(calls, 1, 1, 0, 0, &[out, 10]), CUDA_SUCCESS);
    assert_eq!(download::<i32>(out, 2), [3628800, 107]);
    let (mut at, mut bytes) = (0u64, 0u64);
    let outs = [&mut at as *mut u64 as u64, &mut bytes as *mut u64 as u64];
    ok(
        "cuModuleGetGlobal_v2",
        &[outs[0], outs[1], module, c"counter".as_ptr() as u64],
    );
    assert_eq!((bytes, download::<i32>(at, 1)[0]), (4, 107));
    // A second load of the module has variables of its own.
    ok(
        "cuModuleGetGlobal_v2",
        &[outs[0], outs[1], load(PTX), c"counter".as_ptr() as u64],
    );
    assert_eq!(download::<i32>(at, 1)[0], 0);
    ok("cuModuleUnload", &[module]);
    assert_eq!(
        launch(calls, 1, 1, 0, 0, &[out, 10]),
        CUDA_ERROR_INVALID_HANDLE
    );
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn switches_local_memory_and_wide_integers() {
    let (_turn, context) = context();
    let input: Vec<i32> = (0..32).map(|i| (i * 7 + 3) % 9).collect();
    let (din, out) = (upload(&input), upload(&[0i32; 96]));
    let f = function(load(PTX), c"switches");
    assert_eq!(launch(f, 1, 32, 128, 0, &[out, din]), CUDA_SUCCESS);
    let dynamic: Vec<i32> = (0..32i32)
        .map(|t| match input[t as usize] {
            0 => input[3],
            1 => input[7] * 2,
            2 => t * input[9],
            3 => 5,
            4 => t << (input[2] & 7),
            5 => input[8] / 3,
            6 => input[1] % 5 - t,
            _ => 9,
        })
        .collect();
    let got = download::<i32>(out, 96);
    for t in 0..32usize {
        let mut local = [None; 16];
        for i in 0..16 {
            local[(i * input[1] as usize + t) & 15] = Some(i as i32 + dynamic[t ^ 1]);
        }
        if let Some(value) = local[input[5] as usize & 15] {
            assert_eq!(got[t], value + dynamic[t ^ 1], "thread {t}");
        }
        let q = (input[t] as u32 as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        assert_eq!(
            got[32 + t],
            ((u128::from(q) * u128::from(q)) >> 90) as i32,
            "thread {t}"
        );
        assert_eq!(got[64 + t], (q / (t as u64 + 3)) as i32, "thread {t}");
    }
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn streams_run_at_once_and_in_order() {
    let (_turn, context) = context();
    let spin = function(load(PTX), c"spin");
    let flags = upload(&[0u32; 4]);
    let (a, b) = (get("cuStreamCreate", &[1]), get("cuStreamCreate", &[1]));
    let (start, end) = (get("cuEventCreate", &[0]), get("cuEventCreate", &[0]));
    ok("cuEventRecord", &[start, a]);
    ok("cuEventSynchronize", &[start]);
    // Stream a is held by a kernel that waits for what stream b writes.
    assert_eq!(launch(spin, 1, 1, 0, a, &[flags, flags + 4]), CUDA_SUCCESS);
    ok("cuStreamWriteValue32_v2", &[a, flags + 8, 5, 0]);
    ok("cuEventRecord", &[end, a]);
    assert_eq!(call("cuStreamQuery", &[a]), CUDA_ERROR_NOT_READY);
    assert_eq!(call("cuEventQuery", &[end]), CUDA_ERROR_NOT_READY);
    let slept = Duration::from_millis(20);
    std::thread::sleep(slept);
    assert_eq!(call("cuStreamQuery", &[a]), CUDA_ERROR_NOT_READY);
    ok("cuMemsetD32Async", &[flags, 1, 1, b]);
    // b goes on only when the event behind a's work is reached.
    ok("cuStreamWaitEvent", &[b, end, 0]);
    let mut out = [0u32; 4];
    ok(
        "cuMemcpyDtoHAsync_v2",
        &[out.as_mut_ptr() as u64, flags, 16, b],
    );
    ok("cuStreamSynchronize", &[b]);
    assert_eq!(out, [1, 1, 5, 0]);
    let mut ms = 0f32;
    ok(
        "cuEventElapsedTime_v2",
        &[&mut ms as *mut f32 as u64, start, end],
    );
    assert!(ms >= slept.as_millis() as f32 && ms < 10_000.0, "{ms} ms");
    ok("cuStreamDestroy_v2", &[a]);
    assert_eq!(call("cuStreamSynchronize", &[a]), CUDA_ERROR_INVALID_HANDLE);
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_only() {
    let (_turn, context) = context();
    let flag = upload(&[0u32; 2]);
    let (blocking, free) = (get("cuStreamCreate", &[0]), get("cuStreamCreate", &[1]));
    ok("cuStreamWaitValue32_v2", &[blocking, flag, 1, 1]);
    ok("cuMemsetD32Async", &[flag + 4, 7, 1, 0]);
    // Work of the blocking stream behind the legacy stream's, and of a stream that is not concerned.
    ok("cuMemsetD32Async", &[flag + 4, 9, 1, blocking]);
    ok("cuStreamSynchronize", &[free]);
    assert_eq!(call("cuStreamQuery", &[0]), CUDA_ERROR_NOT_READY);
    let mut now = 0u32;
    ok(
        "cuMemcpyDtoHAsync_v2",
        &[&mut now as *mut u32 as u64, flag + 4, 4, free],
    );
    assert_eq!(now, 0);
    ok("cuStreamWriteValue32_v2", &[free, flag, 1, 0]);
    ok("cuCtxSynchronize", &[]);
    assert_eq!(download::<u32>(flag + 4, 1)[0], 9);
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn host_functions_and_values_in_shared_memory() {
    let (_turn, context) = context();
    extern "C" fn set(flag: *const AtomicU32) {
        // SAFETY: the test passes a flag that outlives the call.
        unsafe { (*flag).fetch_add(1, Ordering::SeqCst) };
    }
    // SAFETY: a fresh anonymous mapping; checked below.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    let (at, stream) = (page as u64, get("cuStreamCreate", &[1]));
    assert_eq!(
        call("cuStreamWriteValue32_v2", &[stream, at, 1, 0]),
        CUDA_ERROR_INVALID_VALUE
    );
    ok("cuMemHostRegister_v2", &[at, 4096, 2]);
    assert_eq!(get("cuMemHostGetDevicePointer_v2", &[at, 0]), at);
    // SAFETY: the page stays mapped to the end of the test.
    let word = |n: usize| unsafe { &*(page as *const AtomicU32).add(n) };
    ok("cuStreamWaitValue32_v2", &[stream, at, 3, 0]);
    ok(
        "cuLaunchHostFunc",
        &[stream, set as *const () as u64, at + 4],
    );
    ok("cuStreamWriteValue32_v2", &[stream, at + 8, 77, 0]);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(
        (
            word(1).load(Ordering::SeqCst),
            word(2).load(Ordering::SeqCst)
        ),
        (0, 0)
    );
    word(0).store(4, Ordering::SeqCst);
    ok("cuStreamSynchronize", &[stream]);
    assert_eq!(
        (
            word(1).load(Ordering::SeqCst),
            word(2).load(Ordering::SeqCst)
        ),
        (1, 77)
    );
    ok("cuMemHostUnregister", &[at]);
    assert_eq!(
        call("cuMemHostUnregister", &[at]),
        CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    );
    ok("cuCtxDestroy_v2", &[context]);
    // SAFETY: mapped above, no longer used.
    unsafe { libc::munmap(page, 4096) };
}

#[test]
fn virtual_memory_is_mapped_shared_and_counted() {
    const MIB: u64 = 1 << 20;
    let (_turn, context) = context();
    let free = || {
        let (mut free, mut total) = (0u64, 0u64);
        ok(
            "cuMemGetInfo_v2",
            &[&mut free as *mut u64 as u64, &mut total as *mut u64 as u64],
        );
        assert_eq!(total, 256 * MIB);
        free
    };
    let before = free();
    let prop = CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: CUmemLocation {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: 0,
        },
        ..Default::default()
    };
    let prop = &prop as *const CUmemAllocationProp as u64;
    assert_eq!(
        call(
            "cuMemCreate",
            &[&mut 0u64 as *mut u64 as u64, 1024 * MIB, prop, 0]
        ),
        CUDA_ERROR_OUT_OF_MEMORY
    );
    let whole = get("cuMemCreate", &[4 * MIB, prop, 0]);
    assert_eq!(free(), before - 4 * MIB);
    let hint = 0x6000_0000_0000u64;
    let at = get("cuMemAddressReserve", &[8 * MIB, 0, hint, 0]);
    assert_eq!(at, hint);
    assert_ne!(get("cuMemAddressReserve", &[8 * MIB, 0, hint, 0]), hint);
    // As the genuine driver: memory is mapped whole or not at all.
    for (len, offset) in [(2 * MIB, 0), (2 * MIB, 2 * MIB)] {
        assert_eq!(
            call("cuMemMap", &[at, len, offset, whole, 0]),
            CUDA_ERROR_NOT_SUPPORTED
        );
    }
    ok("cuMemRelease", &[whole]);
    let [lower, handle] = [(); 2].map(|()| get("cuMemCreate", &[2 * MIB, prop, 0]));
    assert_eq!(free(), before - 4 * MIB);
    ok("cuMemMap", &[at, 2 * MIB, 0, lower, 0]);
    ok("cuMemMap", &[at + 2 * MIB, 2 * MIB, 0, handle, 0]);
    assert_eq!(
        call("cuMemMap", &[at, 2 * MIB, 0, handle, 0]),
        CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(
        call("cuMemsetD8_v2", &[at, 1, 16]),
        CUDA_ERROR_INVALID_VALUE
    );
    let access = CUmemAccessDesc {
        location: CUmemLocation { kind: 1, id: 0 },
        flags: 3,
    };
    ok(
        "cuMemSetAccess",
        &[at, 4 * MIB, &access as *const _ as u64, 1],
    );
    // One fill across both mappings.
    ok("cuMemsetD32_v2", &[at + 2 * MIB - 8, 0xABCD, 4]);
    // The same page at another address shows the same words.
    ok("cuMemMap", &[at + 4 * MIB, 2 * MIB, 0, handle, 0]);
    ok(
        "cuMemSetAccess",
        &[at + 4 * MIB, 2 * MIB, &access as *const _ as u64, 1],
    );
    assert_eq!(download::<u32>(at + 4 * MIB, 2), [0xABCD; 2]);
    // Memory lives for as long as something is mapped.
    ok("cuMemRelease", &[lower]);
    ok("cuMemRelease", &[handle]);
    assert_eq!(call("cuMemRelease", &[handle]), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(free(), before - 4 * MIB);
    assert_eq!(
        call("cuMemAddressFree", &[at, 8 * MIB]),
        CUDA_ERROR_INVALID_VALUE
    );
    ok("cuMemUnmap", &[at, 6 * MIB]);
    assert_eq!(free(), before);
    assert_eq!(
        call("cuMemcpyDtoH_v2", &[&mut 0u64 as *mut u64 as u64, at, 8]),
        CUDA_ERROR_INVALID_VALUE
    );
    ok("cuMemAddressFree", &[at, 8 * MIB]);
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn a_fault_stays() {
    let (_turn, context) = context();
    let module = load(PTX);
    let (wild, trapped) = (function(module, c"wild"), function(module, c"trapped"));
    let flag = get("cuMemHostAlloc", &[4096, 0]);
    let stream = get("cuStreamCreate", &[1]);
    // The gate keeps the fault from coming before everything is queued.
    ok("cuStreamWaitValue32_v2", &[stream, flag + 4, 1, 1]);
    assert_eq!(launch(wild, 1, 1, 0, stream, &[0x10]), CUDA_SUCCESS);
    ok("cuStreamWriteValue32_v2", &[stream, flag, 1, 0]);
    // SAFETY: pinned memory of the driver's, freed only with the context.
    unsafe { (*((flag + 4) as *const AtomicU32)).store(1, Ordering::SeqCst) };
    assert_eq!(
        call("cuStreamSynchronize", &[stream]),
        CUDA_ERROR_ILLEGAL_ADDRESS
    );
    // SAFETY: pinned memory of the driver's, freed only with the context.
    let behind = unsafe { (flag as *const u32).read_volatile() };
    assert_eq!(behind, 0, "work behind the fault was done");
    for (name, args) in [
        ("cuMemAlloc_v2", [&mut 0u64 as *mut u64 as u64, 64]),
        ("cuMemsetD8_v2", [flag, 0]),
        ("cuCtxSynchronize", [0; 2]),
        ("cuStreamQuery", [stream, 0]),
        ("cuMemFree_v2", [flag, 0]),
    ] {
        assert_eq!(call(name, &args), CUDA_ERROR_ILLEGAL_ADDRESS, "{name}");
    }
    ok("cuCtxDestroy_v2", &[context]);
    for (n, (function, params, status)) in [
        (c"trapped", vec![], CUDA_ERROR_LAUNCH_FAILED),
        (c"wild", vec![0u64], CUDA_ERROR_MISALIGNED_ADDRESS),
    ]
    .into_iter()
    .enumerate()
    {
        let context = get("cuCtxCreate_v2", &[0, 0]);
        let memory = get("cuMemAlloc_v2", &[64]);
        let params: Vec<u64> = params.iter().map(|_| memory + 1).collect();
        assert_eq!(
            launch(self::function(load(PTX), function), 1, 1, 0, 0, &params),
            CUDA_SUCCESS
        );
        assert_eq!(call("cuCtxSynchronize", &[]), status, "fault {n}");
        ok("cuCtxDestroy_v2", &[context]);
    }
    let _ = trapped;
}

#[test]
fn a_lost_primary_context_is_not_healed_by_a_reset() {
    let (_turn, context) = context();
    let primary = get("cuDevicePrimaryCtxRetain", &[1]);
    ok("cuCtxSetCurrent", &[primary]);
    assert_eq!(
        launch(function(load(PTX), c"wild"), 1, 1, 0, 0, &[0x10]),
        CUDA_SUCCESS
    );
    assert_eq!(call("cuCtxSynchronize", &[]), CUDA_ERROR_ILLEGAL_ADDRESS);
    ok("cuDevicePrimaryCtxReset_v2", &[1]);
    let mut out = 0u64;
    assert_eq!(
        call(
            "cuDevicePrimaryCtxRetain",
            &[&mut out as *mut u64 as u64, 1]
        ),
        CUDA_ERROR_ILLEGAL_ADDRESS
    );
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn what_cannot_run_is_refused_by_name_and_line() {
    let (_turn, context) = context();
    let text = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\n  frobnicate.u32 1;\n  ret;\n}\n";
    let text = CString::new(text).expect("text");
    let (mut module, mut log) = (0u64, [0u8; 256]);
    let keys = [5u32, 6];
    let mut values = [log.as_mut_ptr() as u64, 256];
    let out = &mut module as *mut u64 as u64;
    let status = call(
        "cuModuleLoadDataEx",
        &[
            out,
            text.as_ptr() as u64,
            2,
            keys.as_ptr() as u64,
            values.as_mut_ptr() as u64,
        ],
    );
    assert_eq!(status, CUDA_ERROR_INVALID_PTX);
    let log = CStr::from_bytes_until_nul(&log)
        .expect("a text")
        .to_str()
        .expect("text");
    assert!(
        log.contains("line 6") && log.contains("frobnicate.u32"),
        "{log}"
    );
    // The NUL is not counted, as by the genuine driver.
    assert_eq!(values[1], log.len() as u64);
    for (image, status) in [
        (
            &b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0"[..],
            CUDA_ERROR_NO_BINARY_FOR_GPU,
        ),
        (b"no image at all\0", CUDA_ERROR_INVALID_IMAGE),
        // A fatbin of a gigabyte, of which there are sixteen bytes.
        (
            b"\x50\xed\x55\xba\x01\0\x10\0\0\0\0\x30\0\0\0\0",
            CUDA_ERROR_INVALID_IMAGE,
        ),
    ] {
        assert_eq!(
            call("cuModuleLoadData", &[out, image.as_ptr() as u64]),
            status,
            "{image:?}"
        );
    }
    assert_eq!(
        call("cuModuleLoadData", &[out, 16]),
        CUDA_ERROR_INVALID_IMAGE
    );
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn ptx_is_found_in_a_fatbin() {
    let (_turn, context) = context();
    let text = format!("{PTX}\0");
    let padded = text.len().next_multiple_of(8);
    let mut image = Vec::new();
    image.extend(0xBA55_ED50u32.to_le_bytes());
    image.extend([1, 0, 16, 0]);
    image.extend((64 + padded as u64).to_le_bytes());
    // One entry: PTX, header of 64 bytes, for compute capability 7.5.
    let mut header = [0u8; 64];
    header[0] = 1;
    header[4] = 64;
    header[8..16].copy_from_slice(&(padded as u64).to_le_bytes());
    header[28] = 75;
    image.extend(header);
    image.extend(text.as_bytes());
    image.resize(16 + 64 + padded, 0);
    let wrapper = [0x1_4662_43B1u64, image.as_ptr() as u64, 0];
    let library_of = |image: u64| get("cuLibraryLoadData", &[image, 0, 0, 0, 0, 0, 0]);
    let library = library_of(wrapper.as_ptr() as u64);
    let kernel = get("cuLibraryGetKernel", &[library, c"calls".as_ptr() as u64]);
    let (mut offset, mut size) = (0u64, 0u64);
    ok(
        "cuKernelGetParamInfo",
        &[
            kernel,
            1,
            &mut offset as *mut u64 as u64,
            &mut size as *mut u64 as u64,
        ],
    );
    assert_eq!((offset, size), (8, 4));
    let out = upload(&[0i32; 2]);
    assert_eq!(launch(kernel, 1, 1, 0, 0, &[out, 5]), CUDA_SUCCESS);
    assert_eq!(download::<i32>(out, 2)[0], 120);
    // Compressed, it is refused.
    image[16 + 41] = 0x80;
    let mut module = 0u64;
    let status = call(
        "cuModuleLoadFatBinary",
        &[&mut module as *mut u64 as u64, image.as_ptr() as u64],
    );
    assert_eq!(status, CUDA_ERROR_NO_BINARY_FOR_GPU);
    ok("cuLibraryUnload", &[library]);
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn launches_out_of_bounds_are_refused() {
    let (_turn, context) = context();
    let f = function(load(PTX), c"warps");
    let out = upload(&[0i32; 320]);
    let launch = |blocks: u64, threads: u64, shared: u64| {
        let params = [&out as *const u64 as u64];
        call(
            "cuLaunchKernel",
            &[
                f,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared,
                0,
                params.as_ptr() as u64,
                0,
            ],
        )
    };
    assert_eq!(launch(1, 1025, 0), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(0, 1, 0), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(1, 1, 60 << 10), CUDA_ERROR_INVALID_VALUE);
    ok("cuFuncSetAttribute", &[f, 8, 64 << 10]);
    assert_eq!(launch(1, 64, 60 << 10), CUDA_SUCCESS);
    assert_eq!(
        call("cuLaunchKernel", &[f + 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]),
        CUDA_ERROR_INVALID_HANDLE
    );
    assert_eq!(
        get("cuOccupancyMaxActiveBlocksPerMultiprocessor", &[f, 1024, 0]),
        2
    );
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn entry_points_are_found_by_name_and_version() {
    let (_turn, context) = context();
    let mut status = 9u32;
    let find = |name: &CStr, version: u64, flags: u64, status: &mut u32| {
        let mut entry = 0u64;
        let out = &mut entry as *mut u64 as u64;
        let result = call(
            "cuGetProcAddress_v2",
            &[
                name.as_ptr() as u64,
                out,
                version,
                flags,
                status as *mut u32 as u64,
            ],
        );
        (result, entry as usize, *status)
    };
    assert_eq!(
        find(c"cuMemAlloc", 12000, 0, &mut status),
        (CUDA_SUCCESS, symbol("cuMemAlloc_v2"), 0)
    );
    assert_eq!(
        find(c"cuMemsetD8", 12000, 2, &mut status).1,
        symbol("cuMemsetD8_v2_ptds")
    );
    assert_eq!(
        find(c"cuLaunchKernel", 6000, 2, &mut status),
        (CUDA_ERROR_NOT_FOUND, 0, 2)
    );
    assert_eq!(
        find(c"cuNoSuchThing", 13000, 0, &mut status),
        (CUDA_ERROR_NOT_FOUND, 0, 1)
    );
    let name = get_name(CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(name, "CUDA_ERROR_ILLEGAL_ADDRESS");
    ok("cuCtxDestroy_v2", &[context]);
}

fn get_name(status: CUresult) -> String {
    let mut text = std::ptr::null::<std::ffi::c_char>();
    ok(
        "cuGetErrorName",
        &[status.0.into(), &mut text as *mut _ as u64],
    );
    // SAFETY: the driver gives a C string that lasts.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

#[test]
fn an_idle_driver_uses_no_cpu() {
    let (_turn, context) = context();
    let flag = upload(&[0u32]);
    for _ in 0..4 {
        let stream = get("cuStreamCreate", &[1]);
        ok("cuMemsetD32Async", &[flag, 1, 1, stream]);
    }
    ok("cuCtxSynchronize", &[]);
    let used = || {
        // SAFETY: all zeros is a valid rusage, and the call fills it.
        unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_SELF, &mut usage);
            usage.ru_utime.tv_sec * 1_000_000 + usage.ru_utime.tv_usec
        }
    };
    let (before, start) = (used(), Instant::now());
    std::thread::sleep(Duration::from_millis(300));
    let spent = used() - before;
    assert!(spent < 30_000, "{spent} µs of CPU in {:?}", start.elapsed());
    ok("cuCtxDestroy_v2", &[context]);
}

/// Distance in units of the last place; equal NaNs have none.
fn ulps(a: u64, b: u64, double: bool) -> u64 {
    let order = |v: u64| -> i64 {
        if double {
            if (v as i64) < 0 {
                i64::MIN.wrapping_sub(v as i64)
            } else {
                v as i64
            }
        } else {
            let v = v as u32 as i32;
            i64::from(if v < 0 { i32::MIN.wrapping_sub(v) } else { v })
        }
    };
    order(a).abs_diff(order(b))
}

fn is_nan(v: u64, double: bool) -> bool {
    if double {
        f64::from_bits(v).is_nan()
    } else {
        f32::from_bits(v as u32).is_nan()
    }
}

/// The inputs and results of scripts/gpu/arith.py, as a GPU gave them.
#[test]
fn arithmetic_is_the_gpus() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/arith.expected");
    let recorded = std::fs::read_to_string(path)
        .expect("arith.expected, recorded on a GPU with scripts/gpu/arith.py");
    let (_turn, context) = context();
    let module = load(ARITH);
    let mut inputs = std::collections::HashMap::<&str, Vec<u64>>::new();
    let (mut compared, mut wrong) = (0, Vec::new());
    for line in recorded.lines() {
        let mut fields = line.split(' ');
        match (fields.next(), fields.next()) {
            (Some("in"), Some(kind)) => {
                inputs
                    .entry(kind)
                    .or_default()
                    .extend(fields.map(|w| u64::from_str_radix(w, 16).expect("a word")));
            }
            (Some("out"), Some(name)) => {
                let words = &inputs[name.split('_').next().expect("a type")];
                let count = words.len() / 3;
                let (input, out) = (upload(words), upload(&vec![0u64; count]));
                let entry = CString::new(name).expect("a name");
                assert_eq!(
                    launch(
                        function(module, &entry),
                        1,
                        count as u32,
                        0,
                        0,
                        &[input, out]
                    ),
                    CUDA_SUCCESS
                );
                let got = download::<u64>(out, count);
                let kernel = &ARITH[ARITH.find(&format!(" {name}(")).expect("a kernel")..];
                let stored = kernel.split("st.global.").nth(1).expect("a result");
                let float = stored.starts_with('f').then(|| stored.starts_with("f64"));
                let tolerance = if name.ends_with("approx") || name.contains("approx_") {
                    2
                } else {
                    0
                };
                for (n, expected) in fields
                    .map(|w| u64::from_str_radix(w, 16).expect("a word"))
                    .enumerate()
                {
                    compared += 1;
                    let close = float.is_some_and(|double| {
                        is_nan(got[n], double) && is_nan(expected, double)
                            || ulps(got[n], expected, double) <= tolerance
                    });
                    if got[n] != expected && !close {
                        let [a, b, c] = [0, 1, 2].map(|k| words[3 * n + k]);
                        wrong.push(format!(
                            "{name}({a:x}, {b:x}, {c:x}) = {:x}, on the GPU {expected:x}",
                            got[n]
                        ));
                    }
                }
                ok("cuMemFree_v2", &[input]);
                ok("cuMemFree_v2", &[out]);
            }
            _ => {}
        }
    }
    assert!(compared > 20_000, "only {compared} results recorded");
    assert!(
        wrong.is_empty(),
        "{} of {compared} differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(60)].join("\n")
    );
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn a_copy_of_a_graph_from_memory_that_was_unmapped_is_an_error() {
    let (_turn, context) = context();
    let stream = get("cuStreamCreate", &[1]);
    let device = get("cuMemAlloc_v2", &[64]);
    let host = get("cuMemAllocHost_v2", &[1 << 20]);
    let graph = get("cuGraphCreate", &[0]);
    let copy = CUDA_MEMCPY3D {
        src_type: CU_MEMORYTYPE_HOST,
        src_host: host,
        dst_type: CU_MEMORYTYPE_DEVICE,
        dst_device: device,
        width: 64,
        height: 1,
        depth: 1,
        ..CUDA_MEMCPY3D::default()
    };
    let copy = &copy as *const CUDA_MEMCPY3D as u64;
    get("cuGraphAddMemcpyNode", &[graph, 0, 0, copy, context]);
    let exec = get("cuGraphInstantiateWithFlags", &[graph, 0]);
    ok("cuGraphLaunch", &[exec, stream]);
    ok("cuStreamSynchronize", &[stream]);
    ok("cuMemFreeHost", &[host]);
    ok("cuGraphLaunch", &[exec, stream]);
    let status = call("cuStreamSynchronize", &[stream]);
    assert_eq!(status, CUDA_ERROR_ILLEGAL_ADDRESS);
    ok("cuGraphExecDestroy", &[exec]);
    ok("cuGraphDestroy", &[graph]);
    let _ = call("cuCtxDestroy_v2", &[context]);
}

/// Measured on an H200 with driver 580: the event nodes of a graph act as if the calls were made with the launch.
#[test]
fn event_nodes_of_a_graph_refer_to_the_time_of_its_launch() {
    let (_turn, context) = context();
    let flags = upload(&[0u32; 3]);
    let [stream, other, third] = [1; 3].map(|kind| get("cuStreamCreate", &[kind]));
    let event = get("cuEventCreate", &[CU_EVENT_DISABLE_TIMING.into()]);
    let exec_of = |kinds: &[&str]| {
        let graph = get("cuGraphCreate", &[0]);
        let mut last = 0u64;
        for kind in kinds {
            let behind = &last as *const u64 as u64;
            let count = u64::from(last != 0);
            last = get(kind, &[graph, behind, count, event]);
        }
        get("cuGraphInstantiateWithFlags", &[graph, 0])
    };
    const WAIT: &str = "cuGraphAddEventWaitNode";
    const RECORD: &str = "cuGraphAddEventRecordNode";
    let (waits, records) = (exec_of(&[WAIT]), exec_of(&[RECORD]));
    let both = exec_of(&[RECORD, WAIT]);
    // A flag for each stretch of a stream's work.
    let stops = |stream: u64, at: u64| {
        ok("cuStreamWaitValue32_v2", &[stream, flags + 4 * at, 1, 0]);
    };
    let free = |at: u64| ok("cuStreamWriteValue32_v2", &[third, flags + 4 * at, 1, 0]);
    // No record is waited for, and none that is behind the launch.
    stops(stream, 0);
    ok("cuGraphLaunch", &[waits, stream]);
    ok("cuEventRecord", &[event, stream]);
    free(0);
    ok("cuStreamSynchronize", &[stream]);
    // The launch is a record.
    ok("cuMemsetD32_v2", &[flags, 0, 3]);
    stops(stream, 0);
    ok("cuGraphLaunch", &[records, stream]);
    assert_eq!(call("cuEventQuery", &[event]), CUDA_ERROR_NOT_READY);
    ok("cuStreamWaitEvent", &[other, event, 0]);
    assert_eq!(call("cuStreamQuery", &[other]), CUDA_ERROR_NOT_READY);
    // Another graph waits for it.
    ok("cuGraphLaunch", &[waits, other]);
    free(0);
    ok("cuStreamSynchronize", &[other]);
    ok("cuEventQuery", &[event]);
    // One that records and waits does not wait for the record of another stream.
    stops(other, 1);
    ok("cuEventRecord", &[event, other]);
    ok("cuGraphLaunch", &[both, stream]);
    ok("cuStreamSynchronize", &[stream]);
    ok("cuEventQuery", &[event]);
    // A later record is not waited for, and counts after the graph.
    stops(stream, 2);
    ok("cuGraphLaunch", &[waits, stream]);
    ok("cuEventRecord", &[event, other]);
    free(2);
    ok("cuStreamSynchronize", &[stream]);
    assert_eq!(call("cuEventQuery", &[event]), CUDA_ERROR_NOT_READY);
    free(1);
    ok("cuCtxSynchronize", &[]);
    ok("cuCtxDestroy_v2", &[context]);
}

fn plane(width: u64, height: u64, flags: u32) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        width,
        height,
        format: CU_AD_FORMAT_FLOAT,
        channels: 1,
        flags,
        ..Default::default()
    }
}

fn resource(kind: u32, words: &[u64]) -> CUDA_RESOURCE_DESC {
    CUDA_RESOURCE_DESC {
        kind,
        words: std::array::from_fn(|n| words.get(n).copied().unwrap_or(0)),
        ..Default::default()
    }
}

fn texture_of(resource: CUDA_RESOURCE_DESC, flags: u32) -> u64 {
    let texture = CUDA_TEXTURE_DESC {
        flags,
        ..Default::default()
    };
    get(
        "cuTexObjectCreate",
        &[&raw const resource as u64, &raw const texture as u64, 0],
    )
}

fn surface_of(array: u64) -> u64 {
    let resource = resource(CU_RESOURCE_TYPE_ARRAY, &[array]);
    get("cuSurfObjectCreate", &[&raw const resource as u64])
}

/// Measured on an H200 with driver 580.
#[test]
fn texture_and_surface_objects_are_numbered_together() {
    let (_turn, first) = context();
    let texture_of = |array| texture_of(resource(CU_RESOURCE_TYPE_ARRAY, &[array]), 0);
    let descriptor = plane(16, 16, CUDA_ARRAY3D_SURFACE_LDST);
    let new = || get("cuArray3DCreate_v2", &[&raw const descriptor as u64]);
    let array = new();
    assert_eq!(texture_of(array), 1);
    assert_eq!(surface_of(array), 2);
    assert_eq!(texture_of(array), 3);
    // Of the other kind it is no object.
    ok("cuSurfObjectDestroy", &[1]);
    ok("cuTexObjectDestroy", &[1]);
    ok("cuSurfObjectDestroy", &[2]);
    assert_eq!([surface_of(array), surface_of(array)], [1, 2]);
    assert_eq!(texture_of(array), 4);
    // Each context has its own.
    let second = get("cuCtxCreate_v2", &[0, 0]);
    assert_eq!(texture_of(new()), 1);
    ok("cuCtxDestroy_v2", &[second]);
    ok("cuCtxSetCurrent", &[first]);
    ok("cuTexObjectDestroy", &[3]);
    assert_eq!(texture_of(array), 3);
    ok("cuCtxDestroy_v2", &[first]);
}

/// Copies words into the first row of an array, or out of it.
fn row(array: u64, host: u64, words: u64, to_array: bool) -> CUresult {
    match to_array {
        true => call("cuMemcpyHtoA_v2", &[array, 0, host, 4 * words]),
        false => call("cuMemcpyAtoH_v2", &[host, array, 0, 4 * words]),
    }
}

#[track_caller]
fn fill(array: u64, words: &[u32]) {
    let status = row(array, words.as_ptr() as u64, words.len() as u64, true);
    assert!(status.is_ok(), "{status}");
}

#[track_caller]
fn content(array: u64, count: usize) -> Vec<u32> {
    let mut words = vec![0u32; count];
    let status = row(array, words.as_mut_ptr() as u64, count as u64, false);
    assert!(status.is_ok(), "{status}");
    words
}

fn free_memory() -> u64 {
    let (mut free, mut total) = (0u64, 0u64);
    ok(
        "cuMemGetInfo_v2",
        &[&raw mut free as u64, &raw mut total as u64],
    );
    free
}

fn level(mipmap: u64, level: u64) -> u64 {
    get("cuMipmappedArrayGetLevel", &[mipmap, level])
}

/// Measured on an H200 with driver 580.
#[test]
fn arrays_that_are_mapped_later_take_no_memory_and_say_what_they_need() {
    let (_turn, context) = context();
    let attribute = u64::from(CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED);
    assert_eq!(get("cuDeviceGetAttribute", &[attribute, 0]), 1);
    let before = free_memory();
    let needs = |call_name: &str, array: u64, device: u64| {
        let mut needs = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
        let status = call(call_name, &[&raw mut needs as u64, array, device]);
        assert_eq!(needs.alignment, if status.is_ok() { 65536 } else { 0 });
        (status, needs.size)
    };
    let (of_array, of_levels) = (
        "cuArrayGetMemoryRequirements",
        "cuMipmappedArrayGetMemoryRequirements",
    );
    let descriptor = plane(1000, 300, CUDA_ARRAY3D_DEFERRED_MAPPING);
    let array = get("cuArray3DCreate_v2", &[&raw const descriptor as u64]);
    assert_eq!(needs(of_array, array, 0), (CUDA_SUCCESS, 19 * 65536));
    assert_eq!(needs(of_array, array, 9).0, CUDA_ERROR_INVALID_DEVICE);
    for to_array in [true, false] {
        let status = row(array, [0u32; 4].as_mut_ptr() as u64, 4, to_array);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
    }
    let mut back = CUDA_ARRAY3D_DESCRIPTOR::default();
    ok("cuArray3DGetDescriptor_v2", &[&raw mut back as u64, array]);
    assert_eq!(back, descriptor);
    let mipmap = get("cuMipmappedArrayCreate", &[&raw const descriptor as u64, 3]);
    let (status, size) = needs(of_levels, mipmap, 0);
    assert_eq!((status, size), (CUDA_SUCCESS, 25 * 65536));
    let status = row(level(mipmap, 1), [0u32; 4].as_mut_ptr() as u64, 4, true);
    assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
    assert_eq!(free_memory(), before);
    ok("cuArrayDestroy", &[array]);
    ok("cuMipmappedArrayDestroy", &[mipmap]);
    // Others have their memory.
    let descriptor = plane(1000, 300, 0);
    let array = get("cuArray3DCreate_v2", &[&raw const descriptor as u64]);
    assert_eq!(needs(of_array, array, 0).0, CUDA_ERROR_INVALID_VALUE);
    let mipmap = get("cuMipmappedArrayCreate", &[&raw const descriptor as u64, 3]);
    assert_eq!(needs(of_levels, mipmap, 0).0, CUDA_ERROR_INVALID_VALUE);
    assert!(free_memory() < before);
    ok("cuArrayDestroy", &[array]);
    ok("cuMipmappedArrayDestroy", &[mipmap]);
    assert_eq!(free_memory(), before);
    // A context takes its arrays along.
    let array = get("cuArray3DCreate_v2", &[&raw const descriptor as u64]);
    ok("cuCtxDestroy_v2", &[context]);
    assert_eq!(call("cuArrayDestroy", &[array]), CUDA_ERROR_INVALID_HANDLE);
}

/// Measured on an H200 with driver 580.
#[test]
fn arrays_in_imported_memory_show_its_content() {
    const BYTES: u64 = 2 << 20;
    let (_turn, context) = context();
    let location = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: 0,
    };
    let prop = CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location,
        ..Default::default()
    };
    let memory = get("cuMemCreate", &[BYTES, &raw const prop as u64, 0]);
    let export = || {
        let kind = u64::from(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        get("cuMemExportToShareableHandle", &[memory, kind, 0])
    };
    // SAFETY: a descriptor is only asked about.
    let is_open = |fd: u64| unsafe { libc::fcntl(fd as i32, libc::F_GETFD) } >= 0;
    let import = |kind: u32, fd: u64, size: u64| {
        let (mut out, d) = (
            0u64,
            CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
                kind,
                handle: [fd, 0],
                size,
                ..Default::default()
            },
        );
        let status = call(
            "cuImportExternalMemory",
            &[&raw mut out as u64, &raw const d as u64],
        );
        (status, out)
    };
    let array_in = |memory: u64, offset: u64, array: CUDA_ARRAY3D_DESCRIPTOR, levels: u32| {
        let (mut out, d) = (
            0u64,
            CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC {
                offset,
                array,
                levels,
                ..Default::default()
            },
        );
        let status = call(
            "cuExternalMemoryGetMappedMipmappedArray",
            &[&raw mut out as u64, memory, &raw const d as u64],
        );
        (status, out)
    };
    let fd = export();
    let (opaque, invalid) = (
        CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
        CUDA_ERROR_INVALID_VALUE,
    );
    for (kind, fd, size) in [
        (opaque + 1, fd, BYTES),
        (opaque, fd, BYTES + 1),
        (opaque, fd, 0),
        (opaque, 0xFFFF, BYTES),
    ] {
        assert_eq!(import(kind, fd, size).0, invalid);
    }
    assert!(is_open(fd), "it stays the caller's");
    let (status, first) = import(opaque, fd, BYTES);
    assert!(status.is_ok(), "{status}");
    let other = export();
    let (status, second) = import(opaque, other, BYTES);
    assert!(status.is_ok(), "{status}");

    let descriptor = plane(64, 32, CUDA_ARRAY3D_SURFACE_LDST);
    for (offset, descriptor, levels) in [
        (256, descriptor, 1),
        (0, descriptor, 0),
        (0, plane(0, 32, 0), 1),
        (0, plane(64, 32, 0x8000), 1),
        (0, plane(1024, 1024, 0), 1),
        (BYTES - 512 * 16 + 512, descriptor, 1),
        (BYTES - 512 * 16, descriptor, 2),
        (u64::MAX - 511, descriptor, 1),
    ] {
        let (status, _) = array_in(first, offset, descriptor, levels);
        assert_eq!(status, invalid, "{offset} {descriptor:?} {levels}");
    }
    assert!(array_in(0, 0, descriptor, 1).0 == CUDA_ERROR_INVALID_HANDLE);

    // Each array shows the words that were written through the other one, on all levels.
    let [(_, one), (_, same)] = [first, second].map(|memory| array_in(memory, 1024, descriptor, 4));
    let mut back = CUDA_ARRAY3D_DESCRIPTOR::default();
    ok(
        "cuArray3DGetDescriptor_v2",
        &[&raw mut back as u64, level(one, 0)],
    );
    assert_eq!(back, descriptor);
    for n in 0..4 {
        fill(level(one, n), &[n as u32 + 1; 8]);
    }
    for n in 0..4 {
        assert_eq!(content(level(same, n), 8), [n as u32 + 1; 8]);
    }
    // So does a mapping of the memory.
    let at = get("cuMemAddressReserve", &[BYTES, 0, 0, 0]);
    ok("cuMemMap", &[at, BYTES, 0, memory, 0]);
    let access = CUmemAccessDesc { location, flags: 3 };
    ok("cuMemSetAccess", &[at, BYTES, &raw const access as u64, 1]);
    assert_eq!(download::<u32>(at + 1024, 8), [1; 8]);
    ok("cuMemsetD32_v2", &[at + 1024, 9, 8]);
    assert_eq!(content(level(same, 0), 8), [9; 8]);

    // The last bytes hold an array, too. Imported memory goes, its arrays stay.
    let (status, last) = array_in(first, BYTES - 512 * 16, descriptor, 1);
    assert!(status.is_ok(), "{status}");
    ok("cuDestroyExternalMemory", &[first]);
    ok("cuDestroyExternalMemory", &[second]);
    assert!(!is_open(fd) && !is_open(other), "they were the driver's");
    assert_eq!(
        call("cuDestroyExternalMemory", &[first]),
        CUDA_ERROR_INVALID_HANDLE
    );
    fill(level(last, 0), &[5; 64]);
    assert_eq!(content(level(last, 0), 64), [5; 64]);
    for array in [one, same, last] {
        let level = level(array, 0);
        ok("cuMipmappedArrayDestroy", &[array]);
        assert_eq!(call("cuArrayDestroy", &[level]), CUDA_ERROR_INVALID_HANDLE);
    }
    assert_eq!(download::<u32>(at + BYTES - 512 * 16, 8), [5; 8]);
    ok("cuMemUnmap", &[at, BYTES]);
    ok("cuMemAddressFree", &[at, BYTES]);
    ok("cuMemRelease", &[memory]);
    ok("cuCtxDestroy_v2", &[context]);
}

/// A kernel `k(to, object, x, y)` that does something with the registers %r1 to %r4, of which x and y are %r5 and %r6, and
/// stores them. As floating-point numbers the coordinates are %f1 and %f2.
fn image_kernel(instruction: &str) -> u64 {
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n\
         .visible .entry k(.param .u64 to, .param .u64 object, .param .f32 x, .param .f32 y) {{\n\
         .reg .b32 %r<9>; .reg .f32 %f<3>; .reg .b64 %rd<9>;\n\
         ld.param.u64 %rd1, [to]; ld.param.u64 %rd2, [object]; ld.param.f32 %f1, [x]; ld.param.f32 %f2, [y];\n\
         cvt.rzi.s32.f32 %r5, %f1; cvt.rzi.s32.f32 %r6, %f2;\n\
         mov.u32 %r1, 11; mov.u32 %r2, 22; mov.u32 %r3, 33; mov.u32 %r4, 44;\n\
         {instruction}\n\
         st.global.v4.u32 [%rd1], {{%r1, %r2, %r3, %r4}}; ret; }}\n"
    );
    function(load(&text), c"k")
}

struct Images {
    out: u64,
}

impl Images {
    fn launch(&self, kernel: u64, object: u64, [x, y]: [f32; 2]) -> CUresult {
        let params = [self.out, object, x.to_bits().into(), y.to_bits().into()];
        let status = launch(kernel, 1, 1, 0, 0, &params);
        assert!(status.is_ok(), "{status}");
        call("cuCtxSynchronize", &[])
    }

    #[track_caller]
    fn run(&self, kernel: u64, object: u64, at: [f32; 2]) -> Vec<u32> {
        let status = self.launch(kernel, object, at);
        assert!(status.is_ok(), "{status}");
        download(self.out, 4)
    }
}

#[test]
fn kernels_read_textures_and_access_surfaces() {
    let (_turn, context) = context();
    let images = Images {
        out: upload(&[0u32; 4]),
    };
    let fetch = |ty: &str| {
        image_kernel(&format!(
            "tex.1d.v4.{ty}.s32 {{%r1, %r2, %r3, %r4}}, [%rd2, {{%r5}}];"
        ))
    };
    let sample = |ty: &str| {
        image_kernel(&format!(
            "tex.2d.v4.{ty}.f32 {{%r1, %r2, %r3, %r4}}, [%rd2, {{%f1, %f2}}];"
        ))
    };
    let one = 1f32.to_bits();
    // Linear memory: two textures of the same kind are told apart.
    let format = |format: u32, channels: u64| u64::from(format) | channels << 32;
    let linear = |words: &[u32]| {
        let words = upload(words);
        let kind = format(CU_AD_FORMAT_FLOAT, 1);
        texture_of(resource(CU_RESOURCE_TYPE_LINEAR, &[words, kind, 16]), 0)
    };
    let (first, second) = (linear(&[1, 2, 3, 4]), linear(&[5, 6, 7, 8]));
    let fetch_float = fetch("f32");
    assert_eq!(images.run(fetch_float, first, [2.0, 0.0]), [3, 0, 0, one]);
    assert_eq!(images.run(fetch_float, second, [2.0, 0.0]), [7, 0, 0, one]);
    assert_eq!(images.run(fetch_float, second, [4.0, 0.0]), [0; 4]);
    let bytes = upload(&[0x80FF_7F01u32, 0xFF00_0102]);
    for (kind, ty, seen) in [
        (CU_AD_FORMAT_UNSIGNED_INT8, "u32", [0xFF, 0x80, 0, 1]),
        (CU_AD_FORMAT_SIGNED_INT8, "s32", [!0, !0x7F, 0, 1]),
        (CU_AD_FORMAT_UNSIGNED_INT16, "u32", [0x102, 0xFF00, 0, 1]),
        (CU_AD_FORMAT_SIGNED_INT16, "s32", [0x102, !0xFF, 0, 1]),
    ] {
        let resource = resource(CU_RESOURCE_TYPE_LINEAR, &[bytes, format(kind, 2), 8]);
        let texture = texture_of(resource, CU_TRSF_READ_AS_INTEGER);
        assert_eq!(images.run(fetch(ty), texture, [1.0, 0.0]), seen, "{ty}");
    }
    // Arrays: outside is the nearest element.
    let line = CUDA_ARRAY3D_DESCRIPTOR {
        format: CU_AD_FORMAT_UNSIGNED_INT32,
        channels: 4,
        ..plane(2, 0, 0)
    };
    let line = get("cuArray3DCreate_v2", &[&raw const line as u64]);
    fill(line, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let texture = texture_of(resource(CU_RESOURCE_TYPE_ARRAY, &[line]), 0);
    assert_eq!(images.run(fetch("u32"), texture, [1.0, 0.0]), [5, 6, 7, 8]);
    let flat = plane(4, 4, CUDA_ARRAY3D_SURFACE_LDST);
    let flat = get("cuArray3DCreate_v2", &[&raw const flat as u64]);
    let texture = texture_of(resource(CU_RESOURCE_TYPE_ARRAY, &[flat]), 0);
    let surface = surface_of(flat);
    let store = |outside: &str| {
        image_kernel(&format!(
            "sust.b.2d.b32.{outside} [%rd2, {{%r5, %r6}}], {{%r2}};"
        ))
    };
    let read = |outside: &str| {
        image_kernel(&format!(
            "suld.b.2d.b32.{outside} {{%r1}}, [%rd2, {{%r5, %r6}}];"
        ))
    };
    images.run(store("trap"), surface, [8.0, 3.0]);
    images.run(store("zero"), surface, [16.0, 3.0]);
    images.run(store("clamp"), surface, [-8.0, 9.0]);
    let float = sample("f32");
    for (at, seen) in [
        ([2.75, 3.5], 22),
        ([1.75, 3.5], 0),
        ([0.5, 3.0], 22),
        ([-7.5, 3e9], 22),
        ([f32::NAN, 3.0], 22),
        ([0.5, 2.0], 0),
    ] {
        let found = images.run(float, texture, at);
        assert_eq!(found, [seen, 0, 0, one], "{at:?}");
    }
    let [clamp, zero] = ["clamp", "zero"].map(read);
    assert_eq!(images.run(read("trap"), surface, [8.0, 3.0])[0], 22);
    assert_eq!(images.run(clamp, surface, [-4.0, 3.0])[0], 22);
    assert_eq!(images.run(zero, surface, [-4.0, 3.0])[0], 0);
    // One dimension, and parts of a vector.
    let line = CUDA_ARRAY3D_DESCRIPTOR {
        channels: 2,
        ..plane(4, 0, CUDA_ARRAY3D_SURFACE_LDST)
    };
    let line = get("cuArray3DCreate_v2", &[&raw const line as u64]);
    let surface_of_line = surface_of(line);
    let store = image_kernel("sust.b.1d.v2.b32.trap [%rd2, {%r5}], {%r3, %r4};");
    images.run(store, surface_of_line, [16.0, 0.0]);
    assert_eq!(content(line, 8), [0, 0, 0, 0, 33, 44, 0, 0]);
    let read = image_kernel("suld.b.1d.b32.trap %r1, [%rd2, {%r5}];");
    assert_eq!(images.run(read, surface_of_line, [20.0, 0.0])[0], 44);
    ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn kernels_fault_at_objects_that_do_not_exist() {
    let fetch = "tex.1d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [%rd2, {%r5}];";
    let read = "suld.b.2d.b32.trap {%r1}, [%rd2, {%r5, %r6}];";
    let words = "tex.1d.v4.u32.s32 {%r1, %r2, %r3, %r4}, [%rd2, {%r5}];";
    // Number 1 is a surface, 2 a texture of it.
    for (instruction, object, at, fault) in [
        (fetch, 0, 0.0, CUDA_ERROR_ILLEGAL_ADDRESS),
        (fetch, 1, 0.0, CUDA_ERROR_ILLEGAL_ADDRESS),
        (fetch, 3, 0.0, CUDA_ERROR_ILLEGAL_ADDRESS),
        (fetch, 2 | 1 << 32, 0.0, CUDA_ERROR_ILLEGAL_ADDRESS),
        (words, 2, 0.0, CUDA_ERROR_NOT_SUPPORTED),
        (read, 2, 0.0, CUDA_ERROR_ILLEGAL_ADDRESS),
        (read, 1, 2.0, CUDA_ERROR_MISALIGNED_ADDRESS),
        (read, 1, 16.0, CUDA_ERROR_LAUNCH_FAILED),
        (read, 1, 12.0, CUDA_SUCCESS),
        (fetch, 2, 0.0, CUDA_SUCCESS),
    ] {
        let (_turn, context) = context();
        let images = Images {
            out: upload(&[0u32; 4]),
        };
        let flat = plane(4, 4, CUDA_ARRAY3D_SURFACE_LDST);
        let flat = get("cuArray3DCreate_v2", &[&raw const flat as u64]);
        assert_eq!(surface_of(flat), 1);
        assert_eq!(texture_of(resource(CU_RESOURCE_TYPE_ARRAY, &[flat]), 0), 2);
        let kernel = image_kernel(instruction);
        let status = images.launch(kernel, object, [at, 0.0]);
        assert_eq!(status, fault, "{instruction} {object:#x} {at}");
        let _ = call("cuCtxDestroy_v2", &[context]);
    }
}
