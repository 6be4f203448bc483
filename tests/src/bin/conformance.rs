//! Walks through the driver API and prints one line per finding, each the same on every driver that behaves.
//!
//! The expected lines, `tests/fixtures/conformance.expected`, were recorded on the genuine driver without the
//! shim; through the shim, and on softgpu, they must come out the same. Nothing printed depends on the device.
//! `conformance [SECTION…]` runs only these sections.

use mpsshim_proto::cuda::*;
use mpsshim_tests::cu;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

const PTX: &str = concat!(include_str!("../../fixtures/conformance.ptx"), "\0");

macro_rules! say { ($what:expr, $($value:tt)*) => { println!("{}: {}", $what, format_args!($($value)*)) }; }

/// A call that must succeed for the rest to make sense.
macro_rules! must {
    ($name:ident $(, $arg:expr)* $(,)?) => {{
        let result = cu!($name $(, $arg)*);
        assert!(result.is_ok(), "{} failed: {result}", stringify!($name));
    }};
}

/// How long a slow kernel lasts, in ticks of the device's clock.
const SLOW_CYCLES: i64 = 20_000_000;
/// What it lasts at the least: no device has more than 2.5 ticks a nanosecond.
const SLOW: Duration = Duration::from_nanos(SLOW_CYCLES as u64 * 2 / 5);

struct Setup {
    device: CUdevice,
    module: CUmodule,
    functions: BTreeMap<&'static str, CUfunction>,
}

impl Setup {
    fn new() -> Setup {
        must!(cuInit, 0u32);
        let mut device: CUdevice = 0;
        must!(cuDeviceGet, &mut device, 0 as c_int);
        let mut context = CUcontext::NULL;
        must!(cuDevicePrimaryCtxRetain, &mut context, device);
        must!(cuCtxSetCurrent, context);
        let mut module = CUmodule::NULL;
        must!(cuModuleLoadData, &mut module, PTX.as_ptr());
        let mut functions = BTreeMap::new();
        for name in [
            "store_index",
            "axpy",
            "count_threads",
            "mixed",
            "reverse",
            "slow_store",
            "write_to",
            "nothing",
        ] {
            let mut function = CUfunction::NULL;
            let text = CString::new(name).expect("no NUL");
            must!(cuModuleGetFunction, &mut function, module, text.as_ptr());
            functions.insert(name, function);
        }
        Setup {
            device,
            module,
            functions,
        }
    }

    fn launch(
        &self,
        name: &str,
        grid: u32,
        block: u32,
        shared: u32,
        stream: CUstream,
        params: &mut [*mut c_void],
    ) -> CUresult {
        let function = self.functions[name];
        cu!(
            cuLaunchKernel,
            function,
            grid,
            1u32,
            1u32,
            block,
            1u32,
            1u32,
            shared,
            stream,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        )
    }

    fn store_index(&self, out: CUdeviceptr, count: i32, factor: i32, stream: CUstream) -> CUresult {
        let (mut out, mut count_, mut factor) = (out, count, factor);
        let params = &mut [
            (&raw mut out).cast(),
            (&raw mut count_).cast(),
            (&raw mut factor).cast(),
        ];
        self.launch(
            "store_index",
            (count as u32).div_ceil(64),
            64,
            0,
            stream,
            params,
        )
    }

    /// Keeps a stream busy for some milliseconds, then stores a value.
    fn slow_store(&self, out: CUdeviceptr, value: i32, stream: CUstream) {
        let (mut out, mut value, mut cycles) = (out, value, SLOW_CYCLES);
        let params = &mut [
            (&raw mut out).cast(),
            (&raw mut value).cast(),
            (&raw mut cycles).cast(),
        ];
        assert!(self.launch("slow_store", 1, 1, 0, stream, params).is_ok());
    }
}

impl Setup {
    /// What a call returns while a stream is busy. Where the CPU is taken away for so long that the kernel may have
    /// ended before the call, it is tried again.
    fn while_busy(
        &self,
        out: CUdeviceptr,
        value: i32,
        stream: CUstream,
        mut call: impl FnMut() -> CUresult,
    ) -> CUresult {
        for _ in 0..100 {
            let began = Instant::now();
            self.slow_store(out, value, stream);
            let status = call();
            if !status.is_ok() || began.elapsed() < SLOW {
                return status;
            }
            must!(cuCtxSynchronize);
        }
        panic!("no call came in time");
    }
}

fn alloc(len: usize) -> CUdeviceptr {
    let mut pointer: CUdeviceptr = 0;
    must!(cuMemAlloc_v2, &mut pointer, len);
    pointer
}

fn free(pointer: CUdeviceptr) {
    must!(cuMemFree_v2, pointer);
}

fn read_i32(from: CUdeviceptr, count: usize) -> Vec<i32> {
    let mut values = vec![0i32; count];
    must!(cuMemcpyDtoH_v2, values.as_mut_ptr(), from, count * 4);
    values
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ *byte as u64).wrapping_mul(0x100_0000_01b3)
    })
}

fn before_init() {
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

fn contexts(setup: &Setup) {
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

fn memory() {
    let mut pointer: CUdeviceptr = 0;
    say!("alloc 0", "{}", cu!(cuMemAlloc_v2, &mut pointer, 0usize));
    say!(
        "alloc too much",
        "{}",
        cu!(cuMemAlloc_v2, &mut pointer, 1usize << 46)
    );
    let blocks: Vec<CUdeviceptr> = [1usize, 100, 4096, 1 << 20, (1 << 20) + 1, 5 << 20]
        .into_iter()
        .map(alloc)
        .collect();
    say!(
        "alignment",
        "{}",
        blocks.iter().all(|block| block % 256 == 0)
    );
    let (mut start, mut len) = (0u64, 0usize);
    say!(
        "address range",
        "{} {}",
        cu!(
            cuMemGetAddressRange_v2,
            &mut start,
            &mut len,
            blocks[2] + 100
        ),
        start == blocks[2] && len >= 4096
    );
    let mut kind = 0u32;
    say!(
        "memory type",
        "{} {kind}",
        cu!(
            cuPointerGetAttribute,
            &mut kind,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            blocks[3]
        )
    );
    let mut ordinal = -1 as c_int;
    say!(
        "ordinal",
        "{} {ordinal}",
        cu!(
            cuPointerGetAttribute,
            &mut ordinal,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            blocks[3]
        )
    );
    let mut local = 5u64;
    let address = &raw mut local as u64;
    say!(
        "attribute of a stack pointer",
        "{}",
        cu!(
            cuPointerGetAttribute,
            &mut kind,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            address
        )
    );
    let mut attributes = [
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    ];
    let (mut kind, mut device_pointer) = (77u32, 77u64);
    let mut into: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut device_pointer).cast()];
    let result = cu!(
        cuPointerGetAttributes,
        2u32,
        attributes.as_mut_ptr(),
        into.as_mut_ptr(),
        address
    );
    say!(
        "attributes of a stack pointer",
        "{result} {kind} {device_pointer}"
    );
    let result = cu!(
        cuPointerGetAttributes,
        2u32,
        attributes.as_mut_ptr(),
        into.as_mut_ptr(),
        blocks[1] + 8
    );
    say!(
        "attributes of device memory",
        "{result} {kind} {}",
        device_pointer == blocks[1] + 8
    );
    for block in blocks {
        free(block);
    }
    say!("free of NULL", "{}", cu!(cuMemFree_v2, 0u64));
    say!("free of a stack pointer", "{}", cu!(cuMemFree_v2, address));
    let block = alloc(1000);
    free(block);
    say!("double free", "{}", cu!(cuMemFree_v2, block));
    let mut pitch = 0usize;
    must!(
        cuMemAllocPitch_v2,
        &mut pointer,
        &mut pitch,
        100usize,
        10usize,
        4u32
    );
    say!("pitch", "{}", pitch >= 100 && pitch.is_multiple_of(32));
    free(pointer);
    say!(
        "pitch of 3-byte elements",
        "{}",
        cu!(
            cuMemAllocPitch_v2,
            &mut pointer,
            &mut pitch,
            100usize,
            10usize,
            3u32
        )
    );
    let (mut free_bytes, mut total) = (0usize, 0usize);
    say!(
        "info",
        "{} {}",
        cu!(cuMemGetInfo_v2, &mut free_bytes, &mut total),
        free_bytes > 0 && free_bytes <= total
    );
    let many: Vec<CUdeviceptr> = (0..500).map(|i| alloc(64 + i * 40)).collect();
    let mut sorted = many.clone();
    sorted.sort_unstable();
    sorted.dedup();
    say!("500 blocks differ", "{}", sorted.len());
    many.into_iter().for_each(free);
}

fn copies() {
    const LEN: usize = 9 << 20;
    let source: Vec<u8> = (0..LEN).map(|i| (i * 7 + i / 251) as u8).collect();
    let (a, b) = (alloc(LEN), alloc(LEN));
    for len in [
        1usize,
        3,
        4,
        1000,
        4096,
        4097,
        65_536,
        65_537,
        1 << 20,
        (4 << 20) + 5,
        LEN,
    ] {
        let mut back = vec![0u8; len];
        must!(cuMemsetD8_v2, a, 0u8, LEN);
        must!(cuMemcpyHtoD_v2, a, source.as_ptr(), len);
        must!(cuMemcpyDtoD_v2, b, a, len);
        must!(cuMemcpyDtoH_v2, back.as_mut_ptr(), b, len);
        say!(
            format!("round trip of {len} bytes"),
            "{}",
            back == source[..len]
        );
    }
    let mut back = vec![0u8; 1000];
    must!(cuMemcpyHtoD_v2, a, source.as_ptr(), LEN);
    must!(cuMemcpyDtoH_v2, back.as_mut_ptr(), a + 12_345, 1000usize);
    say!("from the middle", "{}", back == source[12_345..13_345]);
    must!(cuMemcpyHtoD_v2, a + 7, source.as_ptr(), 100usize);
    must!(cuMemcpyDtoH_v2, back.as_mut_ptr(), a, 200usize);
    say!(
        "into the middle",
        "{}",
        back[7..107] == source[..100] && back[..7] == source[..7]
    );
    let (host, device) = (back.as_mut_ptr() as u64, a);
    must!(cuMemcpy, host, device, 1000usize);
    must!(cuMemcpy, b, host, 1000usize);
    let mut again = vec![0u8; 1000];
    must!(cuMemcpy, again.as_mut_ptr() as u64, b, 1000usize);
    say!("cuMemcpy", "{}", again == back);
    say!(
        "copy of 0 bytes",
        "{}",
        cu!(cuMemcpyHtoD_v2, a, source.as_ptr(), 0usize)
    );
    say!(
        "copy beyond the block",
        "{}",
        cu!(cuMemcpyHtoD_v2, 16u64, source.as_ptr(), 16usize)
    );
    say!(
        "copy to NULL",
        "{}",
        cu!(cuMemcpyHtoD_v2, 0u64, source.as_ptr(), 16usize)
    );
    let memset = |what: &str, result: CUresult| {
        let mut bytes = vec![0u8; 256];
        must!(cuMemcpyDtoH_v2, bytes.as_mut_ptr(), a, 256usize);
        say!(what, "{result} {:016x}", checksum(&bytes));
    };
    memset("memset D8", cu!(cuMemsetD8_v2, a, 0x5au8, 256usize));
    memset("memset D16", cu!(cuMemsetD16_v2, a, 0x1234u16, 100usize));
    memset(
        "memset D32",
        cu!(cuMemsetD32_v2, a, 0xdead_beefu32, 50usize),
    );
    memset(
        "memset D2D8",
        cu!(cuMemsetD2D8_v2, a, 32usize, 7u8, 10usize, 8usize),
    );
    memset(
        "memset D2D32",
        cu!(cuMemsetD2D32_v2, a, 64usize, 9u32, 5usize, 4usize),
    );
    say!(
        "memset D32 unaligned",
        "{}",
        cu!(cuMemsetD32_v2, a + 2, 1u32, 4usize)
    );
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    let mut small = vec![1u8; 3000];
    must!(cuMemcpyHtoDAsync_v2, a, small.as_ptr(), 3000usize, stream);
    // Pageable memory up to 64 KiB is taken before the call returns.
    small.fill(2);
    must!(cuMemsetD8Async, a + 3000, 3u8, 1000usize, stream);
    must!(cuMemcpyDtoDAsync_v2, b, a, 4000usize, stream);
    let mut back = vec![0u8; 4000];
    must!(
        cuMemcpyDtoHAsync_v2,
        back.as_mut_ptr(),
        b,
        4000usize,
        stream
    );
    must!(cuStreamSynchronize, stream);
    say!(
        "async chain",
        "{}",
        back[..3000].iter().all(|b| *b == 1) && back[3000..].iter().all(|b| *b == 3)
    );
    must!(cuStreamDestroy_v2, stream);
    free(a);
    free(b);
}

fn host_memory(setup: &Setup) {
    let mut pinned: *mut i32 = null_mut();
    must!(
        cuMemHostAlloc,
        &mut pinned,
        1usize << 20,
        CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE
    );
    let mut device: CUdeviceptr = 0;
    say!(
        "device pointer",
        "{} same {}",
        cu!(cuMemHostGetDevicePointer_v2, &mut device, pinned, 0u32),
        device == pinned as u64
    );
    let mut kind = 0u32;
    say!(
        "type of pinned memory",
        "{} {kind}",
        cu!(
            cuPointerGetAttribute,
            &mut kind,
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            pinned as u64
        )
    );
    let mut flags = 0u32;
    say!(
        "flags",
        "{} {flags}",
        cu!(cuMemHostGetFlags, &mut flags, pinned)
    );
    must!(cuStreamSynchronize, CUstream::NULL);
    assert!(setup.store_index(device, 1000, 3, CUstream::NULL).is_ok());
    must!(cuCtxSynchronize);
    // SAFETY: 1 MiB was allocated, the kernel is done.
    let values = unsafe { std::slice::from_raw_parts_mut(pinned, 1000) };
    say!(
        "kernel wrote to pinned memory",
        "{}",
        values.iter().enumerate().all(|(i, v)| *v == i as i32 * 3)
    );
    let block = alloc(1 << 20);
    must!(
        cuMemcpyHtoDAsync_v2,
        block,
        pinned,
        1usize << 20,
        CUstream::NULL
    );
    must!(cuStreamSynchronize, CUstream::NULL);
    values.fill(0);
    must!(cuMemcpyDtoH_v2, pinned, block, 4000usize);
    say!(
        "pinned round trip",
        "{}",
        values.iter().enumerate().all(|(i, v)| *v == i as i32 * 3)
    );
    say!("free", "{}", cu!(cuMemFreeHost, pinned));
    let mut local = 0u64;
    say!(
        "free of a stack pointer",
        "{}",
        cu!(cuMemFreeHost, &raw mut local)
    );
    let small: Vec<*mut u8> = (0..20)
        .map(|i| {
            let mut pointer: *mut u8 = null_mut();
            must!(cuMemAllocHost_v2, &mut pointer, 100usize + i * 999);
            pointer
        })
        .collect();
    for (i, pointer) in small.iter().enumerate() {
        // SAFETY: at least 100 bytes were allocated.
        unsafe { pointer.write_bytes(i as u8, 100) };
    }
    let intact = small.iter().enumerate().all(|(i, pointer)| {
        // SAFETY: as above.
        let last = unsafe { pointer.add(99).read() };
        last == i as u8
    });
    say!("20 small blocks", "{intact}");
    for pointer in small {
        must!(cuMemFreeHost, pointer);
    }
    // Registration of the program's own pages.
    let len = 1usize << 20;
    // SAFETY: an anonymous mapping at a place the kernel chooses.
    let pages = unsafe {
        libc::mmap(
            null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    let values = pages.cast::<i32>();
    // SAFETY: the mapping has `len` bytes.
    unsafe { values.write(41) };
    say!(
        "register",
        "{}",
        cu!(
            cuMemHostRegister_v2,
            pages,
            len,
            CU_MEMHOSTREGISTER_DEVICEMAP
        )
    );
    say!(
        "register again",
        "{}",
        cu!(
            cuMemHostRegister_v2,
            pages,
            len,
            CU_MEMHOSTREGISTER_DEVICEMAP
        )
    );
    must!(cuMemHostGetDevicePointer_v2, &mut device, pages, 0u32);
    // SAFETY: as above.
    say!("content survived", "{}", unsafe { values.read() });
    assert!(setup.store_index(device, 100, 5, CUstream::NULL).is_ok());
    must!(cuCtxSynchronize);
    // SAFETY: as above; the kernel is done.
    say!("kernel wrote to registered memory", "{}", unsafe {
        values.add(99).read()
    });
    say!("unregister", "{}", cu!(cuMemHostUnregister, pages));
    say!("unregister again", "{}", cu!(cuMemHostUnregister, pages));
    // SAFETY: as above.
    say!("content after", "{}", unsafe { values.add(99).read() });
    free(block);
}

fn launches(setup: &Setup) {
    let out = alloc(1 << 16);
    assert!(setup.store_index(out, 10_000, 2, CUstream::NULL).is_ok());
    say!(
        "store_index",
        "{}",
        read_i32(out, 10_000)
            .iter()
            .enumerate()
            .all(|(i, v)| *v == 2 * i as i32)
    );
    // The same through `extra`.
    #[repr(C)]
    struct Packed {
        out: u64,
        count: i32,
        factor: i32,
    }
    let packed = Packed {
        out,
        count: 100,
        factor: 11,
    };
    let mut size = size_of::<Packed>();
    let mut extra: [*mut c_void; 5] = [
        CU_LAUNCH_PARAM_BUFFER_POINTER as *mut c_void,
        (&raw const packed).cast_mut().cast(),
        CU_LAUNCH_PARAM_BUFFER_SIZE as *mut c_void,
        (&raw mut size).cast(),
        CU_LAUNCH_PARAM_END as *mut c_void,
    ];
    let none = null_mut::<*mut c_void>();
    let function = setup.functions["store_index"];
    let result = cu!(
        cuLaunchKernel,
        function,
        2u32,
        1u32,
        1u32,
        64u32,
        1u32,
        1u32,
        0u32,
        CUstream::NULL,
        none,
        extra.as_mut_ptr()
    );
    say!("launch with extra", "{result} {}", read_i32(out, 100)[99]);
    // A struct parameter with padding.
    #[repr(C)]
    struct Mixed {
        tag: u8,
        scale: f64,
        offset: i16,
    }
    let mut mixed = Mixed {
        tag: 3,
        scale: 1.5,
        offset: -2,
    };
    let (mut target, mut unused) = (out, 0u64);
    let params = &mut [
        (&raw mut target).cast(),
        (&raw mut mixed).cast(),
        (&raw mut unused).cast(),
    ];
    assert!(
        setup
            .launch("mixed", 1, 8, 0, CUstream::NULL, params)
            .is_ok()
    );
    let mut doubles = [0f64; 8];
    must!(cuMemcpyDtoH_v2, doubles.as_mut_ptr(), out, 64usize);
    say!("struct parameter and constant memory", "{doubles:?}");
    assert!(setup.store_index(out, 256, 1, CUstream::NULL).is_ok());
    assert!(
        setup
            .launch(
                "reverse",
                2,
                128,
                512,
                CUstream::NULL,
                &mut [(&raw mut target).cast()]
            )
            .is_ok()
    );
    let reversed = read_i32(out, 256);
    say!(
        "dynamic shared memory",
        "{} {} {}",
        reversed[0],
        reversed[127],
        reversed[128]
    );
    let nothing = |grid: [u32; 3], block: [u32; 3], shared: u32| {
        cu!(
            cuLaunchKernel,
            setup.functions["nothing"],
            grid[0],
            grid[1],
            grid[2],
            block[0],
            block[1],
            block[2],
            shared,
            CUstream::NULL,
            none,
            none
        )
    };
    say!("launch of nothing", "{}", nothing([1, 1, 1], [1, 1, 1], 0));
    say!("grid of 0", "{}", nothing([0, 1, 1], [1, 1, 1], 0));
    say!("block of 0", "{}", nothing([1, 1, 1], [1, 0, 1], 0));
    say!("block of 2048", "{}", nothing([1, 1, 1], [2048, 1, 1], 0));
    say!("block of 32x64", "{}", nothing([1, 1, 1], [32, 64, 1], 0));
    say!(
        "grid y of 65536",
        "{}",
        nothing([1, 65_536, 1], [1, 1, 1], 0)
    );
    say!(
        "too much shared memory",
        "{}",
        nothing([1, 1, 1], [32, 1, 1], 1 << 20)
    );
    say!(
        "a bad function",
        "{}",
        cu!(
            cuLaunchKernel,
            CUfunction::NULL,
            1u32,
            1u32,
            1u32,
            1u32,
            1u32,
            1u32,
            0u32,
            CUstream::NULL,
            none,
            none
        )
    );
    let attribute = CUlaunchAttribute {
        id: CU_LAUNCH_ATTRIBUTE_IGNORE,
        pad: 0,
        value: [0; 64],
    };
    let config = CUlaunchConfig {
        grid: [4, 1, 1],
        block: [32, 1, 1],
        shared_mem_bytes: 0,
        stream: CUstream::NULL,
        attrs: &attribute,
        num_attrs: 1,
    };
    let (mut count, mut factor) = (128i32, 9i32);
    let mut params: [*mut c_void; 3] = [
        (&raw mut target).cast(),
        (&raw mut count).cast(),
        (&raw mut factor).cast(),
    ];
    let result = cu!(
        cuLaunchKernelEx,
        &config,
        function,
        params.as_mut_ptr(),
        none
    );
    say!("cuLaunchKernelEx", "{result} {}", read_i32(out, 128)[127]);
    say!("the context is fine", "{}", cu!(cuCtxSynchronize));
    free(out);
}

fn modules(setup: &Setup) {
    let (mut address, mut len) = (0u64, 0usize);
    say!(
        "global",
        "{} {len}",
        cu!(
            cuModuleGetGlobal_v2,
            &mut address,
            &mut len,
            setup.module,
            c"counter".as_ptr()
        )
    );
    say!("its size", "{len}");
    say!("its initial value", "{}", read_i32(address, 1)[0]);
    let mut times = 3i32;
    assert!(
        setup
            .launch(
                "count_threads",
                2,
                64,
                0,
                CUstream::NULL,
                &mut [(&raw mut times).cast()]
            )
            .is_ok()
    );
    say!("after the kernel", "{}", read_i32(address, 1)[0]);
    let new = 100i32;
    must!(cuMemcpyHtoD_v2, address, &raw const new, 4usize);
    say!("after a copy", "{}", read_i32(address, 1)[0]);
    say!(
        "no such global",
        "{}",
        cu!(
            cuModuleGetGlobal_v2,
            &mut address,
            &mut len,
            setup.module,
            c"missing".as_ptr()
        )
    );
    let mut function = CUfunction::NULL;
    say!(
        "no such function",
        "{}",
        cu!(
            cuModuleGetFunction,
            &mut function,
            setup.module,
            c"missing".as_ptr()
        )
    );
    let mut second = CUmodule::NULL;
    must!(cuModuleLoadData, &mut second, PTX.as_ptr());
    must!(
        cuModuleGetGlobal_v2,
        &mut address,
        &mut len,
        second,
        c"counter".as_ptr()
    );
    say!(
        "a second load has its own globals",
        "{}",
        read_i32(address, 1)[0]
    );
    say!("unload", "{}", cu!(cuModuleUnload, second));
    let mut module = CUmodule::NULL;
    say!(
        "nonsense image",
        "{}",
        cu!(cuModuleLoadData, &mut module, c"this is no image".as_ptr())
    );
    say!(
        "missing file",
        "{}",
        cu!(
            cuModuleLoad,
            &mut module,
            c"/nonexistent/file.cubin".as_ptr()
        )
    );
    let mut value = 0 as c_int;
    let function = setup.functions["reverse"];
    say!(
        "max threads",
        "{} {value}",
        cu!(
            cuFuncGetAttribute,
            &mut value,
            CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
            function
        )
    );
    say!(
        "static shared",
        "{} {value}",
        cu!(
            cuFuncGetAttribute,
            &mut value,
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            function
        )
    );
    say!(
        "set dynamic shared",
        "{}",
        cu!(
            cuFuncSetAttribute,
            function,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            8192 as c_int
        )
    );
    must!(
        cuFuncGetAttribute,
        &mut value,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        function
    );
    say!("dynamic shared", "{value}");
    say!(
        "attribute 999",
        "{}",
        cu!(cuFuncGetAttribute, &mut value, 999u32, function)
    );
    let (mut offset, mut size) = (0usize, 0usize);
    let mixed = setup.functions["mixed"];
    for index in 0..4usize {
        let result = cu!(cuFuncGetParamInfo, mixed, index, &mut offset, &mut size);
        if result.is_ok() {
            say!(format!("parameter {index}"), "{offset} {size}")
        } else {
            say!(format!("parameter {index}"), "{result}")
        }
    }
    let mut library = CUlibrary::NULL;
    let none = null_mut::<c_void>();
    let result = cu!(
        cuLibraryLoadData,
        &mut library,
        PTX.as_ptr(),
        none,
        none,
        0u32,
        none,
        none,
        0u32
    );
    say!("library", "{result}");
    let mut kernel = CUkernel::NULL;
    say!(
        "kernel",
        "{}",
        cu!(
            cuLibraryGetKernel,
            &mut kernel,
            library,
            c"store_index".as_ptr()
        )
    );
    let mut again = CUkernel::NULL;
    must!(
        cuLibraryGetKernel,
        &mut again,
        library,
        c"store_index".as_ptr()
    );
    say!("same kernel", "{}", kernel == again);
    say!(
        "no such kernel",
        "{}",
        cu!(cuLibraryGetKernel, &mut again, library, c"missing".as_ptr())
    );
    let mut of_kernel = CUfunction::NULL;
    say!(
        "function of it",
        "{}",
        cu!(cuKernelGetFunction, &mut of_kernel, kernel)
    );
    let out = alloc(4096);
    for (what, function) in [
        ("launch of a kernel", CUfunction(kernel.0)),
        ("launch of its function", of_kernel),
    ] {
        let (mut target, mut count, mut factor) = (out, 10i32, 4i32);
        let mut params: [*mut c_void; 3] = [
            (&raw mut target).cast(),
            (&raw mut count).cast(),
            (&raw mut factor).cast(),
        ];
        let result = cu!(
            cuLaunchKernel,
            function,
            1u32,
            1u32,
            1u32,
            32u32,
            1u32,
            1u32,
            0u32,
            CUstream::NULL,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        );
        say!(what, "{result} {}", read_i32(out, 10)[9]);
    }
    let mut count = 0u32;
    say!(
        "kernels in it",
        "{} {count}",
        cu!(cuLibraryGetKernelCount, &mut count, library)
    );
    say!("count", "{count}");
    must!(
        cuLibraryGetGlobal,
        &mut address,
        &mut len,
        library,
        c"counter".as_ptr()
    );
    say!(
        "a library has its own globals",
        "{}",
        read_i32(address, 1)[0]
    );
    say!("library unload", "{}", cu!(cuLibraryUnload, library));
    free(out);
}

fn streams(setup: &Setup) {
    let out = alloc(4096);
    let mut streams = [CUstream::NULL; 2];
    must!(cuStreamCreate, &mut streams[0], 0u32);
    must!(
        cuStreamCreateWithPriority,
        &mut streams[1],
        CU_STREAM_NON_BLOCKING,
        -1 as c_int
    );
    let [blocking, free_running] = streams;
    let mut flags = 7u32;
    say!(
        "flags",
        "{} {flags}",
        cu!(cuStreamGetFlags, blocking, &mut flags)
    );
    must!(cuStreamGetFlags, free_running, &mut flags);
    say!("flags of the other", "{flags}");
    let mut priority = 9 as c_int;
    say!(
        "priority",
        "{} {priority}",
        cu!(cuStreamGetPriority, free_running, &mut priority)
    );
    say!("its priority", "{priority}");
    say!("query idle", "{}", cu!(cuStreamQuery, blocking));
    let busy = setup.while_busy(out, 1, blocking, || cu!(cuStreamQuery, blocking));
    say!("query busy", "{busy}");
    say!("query the other", "{}", cu!(cuStreamQuery, free_running));
    say!("synchronize", "{}", cu!(cuStreamSynchronize, blocking));
    say!("query done", "{}", cu!(cuStreamQuery, blocking));
    say!("stored", "{}", read_i32(out, 1)[0]);
    // The legacy default stream waits for blocking streams, and they for it.
    setup.slow_store(out, 2, blocking);
    must!(cuMemcpyDtoDAsync_v2, out + 4, out, 4usize, CUstream::NULL);
    must!(cuMemcpyDtoDAsync_v2, out + 8, out + 4, 4usize, blocking);
    must!(cuStreamSynchronize, blocking);
    say!("legacy order", "{:?}", read_i32(out, 3));
    setup.slow_store(out, 3, CUstream::NULL);
    must!(cuMemcpyDtoDAsync_v2, out + 12, out, 4usize, blocking);
    must!(cuStreamSynchronize, blocking);
    say!(
        "a blocking stream waits for the default one",
        "{}",
        read_i32(out + 12, 1)[0]
    );
    let busy = setup.while_busy(out, 4, CUstream::NULL, || {
        must!(cuMemsetD32Async, out + 16, 6u32, 1usize, free_running);
        must!(cuStreamSynchronize, free_running);
        cu!(cuStreamQuery, CU_STREAM_LEGACY)
    });
    say!("a non-blocking stream does not", "{busy}");
    must!(cuStreamSynchronize, CU_STREAM_LEGACY);
    say!(
        "after it",
        "{:?}",
        (read_i32(out, 1)[0], read_i32(out + 16, 1)[0])
    );
    // Per-thread default streams.
    let busy = setup.while_busy(out, 5, CU_STREAM_PER_THREAD, || {
        cu!(cuStreamQuery, CU_STREAM_PER_THREAD)
    });
    say!("per-thread stream busy", "{busy}");
    must!(cuMemcpyDtoDAsync_v2, out + 20, out, 4usize, CUstream::NULL);
    must!(cuStreamSynchronize, CUstream::NULL);
    say!(
        "legacy waits for the per-thread stream",
        "{}",
        read_i32(out + 20, 1)[0]
    );
    setup.slow_store(out, 6, CU_STREAM_PER_THREAD);
    must!(
        cuMemcpyDtoDAsync_v2_ptsz,
        out + 24,
        out,
        4usize,
        CUstream::NULL
    );
    must!(cuStreamSynchronize_ptsz, CUstream::NULL);
    say!("ptsz means per-thread", "{}", read_i32(out + 24, 1)[0]);
    // Waiting for an event of another stream.
    let mut event = CUevent::NULL;
    must!(cuEventCreate, &mut event, CU_EVENT_DISABLE_TIMING);
    setup.slow_store(out, 7, free_running);
    must!(cuEventRecord, event, free_running);
    must!(cuStreamWaitEvent, blocking, event, 0u32);
    must!(cuMemcpyDtoDAsync_v2, out + 28, out, 4usize, blocking);
    must!(cuStreamSynchronize, blocking);
    say!("stream wait event", "{}", read_i32(out + 28, 1)[0]);
    must!(cuEventDestroy_v2, event);
    setup.slow_store(out, 8, free_running);
    say!(
        "destroy a busy stream",
        "{}",
        cu!(cuStreamDestroy_v2, free_running)
    );
    must!(cuCtxSynchronize);
    say!("its work was done", "{}", read_i32(out, 1)[0]);
    must!(cuStreamDestroy_v2, blocking);
    let many: Vec<CUstream> = (0..100)
        .map(|_| {
            let mut stream = CUstream::NULL;
            must!(cuStreamCreate, &mut stream, 0u32);
            stream
        })
        .collect();
    for (i, stream) in many.iter().enumerate() {
        must!(
            cuMemsetD32Async,
            out + 4 * i as u64,
            i as u32,
            1usize,
            *stream
        );
    }
    must!(cuCtxSynchronize);
    say!(
        "100 streams",
        "{}",
        read_i32(out, 100)
            .iter()
            .enumerate()
            .all(|(i, v)| *v == i as i32)
    );
    for stream in many {
        must!(cuStreamDestroy_v2, stream);
    }
    say!(
        "bad flags",
        "{}",
        cu!(cuStreamCreate, &mut streams[0], 99u32)
    );
    free(out);
}

fn events(setup: &Setup) {
    let out = alloc(4096);
    let [mut start, mut end, mut quiet] = [CUevent::NULL; 3];
    must!(cuEventCreate, &mut start, 0u32);
    must!(cuEventCreate, &mut end, 0u32);
    must!(cuEventCreate, &mut quiet, CU_EVENT_DISABLE_TIMING);
    say!("query unrecorded", "{}", cu!(cuEventQuery, start));
    say!(
        "synchronize unrecorded",
        "{}",
        cu!(cuEventSynchronize, start)
    );
    let mut ms = -1f32;
    say!(
        "elapsed unrecorded",
        "{}",
        cu!(cuEventElapsedTime, &mut ms, start, end)
    );
    must!(cuEventRecord, start, CUstream::NULL);
    let busy = setup.while_busy(out, 1, CUstream::NULL, || {
        must!(cuEventRecord, end, CUstream::NULL);
        cu!(cuEventQuery, end)
    });
    say!("query busy", "{busy}");
    let busy = setup.while_busy(out, 1, CUstream::NULL, || {
        must!(cuEventRecord, end, CUstream::NULL);
        cu!(cuEventElapsedTime, &mut ms, start, end)
    });
    say!("elapsed busy", "{busy}");
    say!("synchronize", "{}", cu!(cuEventSynchronize, end));
    say!("query done", "{}", cu!(cuEventQuery, end));
    say!(
        "elapsed",
        "{} {}",
        cu!(cuEventElapsedTime, &mut ms, start, end),
        ms > 0.0 && ms < 60_000.0
    );
    must!(cuEventRecord, quiet, CUstream::NULL);
    must!(cuEventSynchronize, quiet);
    say!(
        "elapsed without timing",
        "{}",
        cu!(cuEventElapsedTime, &mut ms, start, quiet)
    );
    // An event is about what was before it, not about what comes later.
    must!(cuEventRecord, start, CUstream::NULL);
    let busy = setup.while_busy(out, 2, CUstream::NULL, || {
        must!(cuEventSynchronize, start);
        cu!(cuStreamQuery, CUstream::NULL)
    });
    say!("later work still runs", "{busy}");
    must!(cuCtxSynchronize);
    say!(
        "recorded again",
        "{}",
        cu!(cuEventRecord, start, CUstream::NULL)
    );
    must!(cuEventSynchronize, start);
    say!("destroy", "{}", cu!(cuEventDestroy_v2, start));
    must!(cuEventDestroy_v2, end);
    must!(cuEventDestroy_v2, quiet);
    say!("bad flags", "{}", cu!(cuEventCreate, &mut start, 0x1000u32));
    free(out);
}

fn occupancy(setup: &Setup) {
    let function = setup.functions["store_index"];
    let mut blocks = 0 as c_int;
    let result = cu!(
        cuOccupancyMaxActiveBlocksPerMultiprocessor,
        &mut blocks,
        function,
        128 as c_int,
        0usize
    );
    say!("active blocks", "{result} {}", (1..=64).contains(&blocks));
    let result = cu!(
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
        &mut blocks,
        function,
        1024 as c_int,
        0usize,
        0u32
    );
    say!(
        "active blocks of 1024",
        "{result} {}",
        (1..=2).contains(&blocks)
    );
    let (mut grid, mut block) = (0 as c_int, 0 as c_int);
    let result = cu!(
        cuOccupancyMaxPotentialBlockSize,
        &mut grid,
        &mut block,
        function,
        null::<c_void>(),
        0usize,
        0 as c_int
    );
    say!(
        "potential block size",
        "{result} {}",
        grid >= 1 && (32..=1024).contains(&block)
    );
    let mut bytes = 0usize;
    let result = cu!(
        cuOccupancyAvailableDynamicSMemPerBlock,
        &mut bytes,
        function,
        1 as c_int,
        128 as c_int
    );
    say!("available shared memory", "{result} {}", bytes >= 1024);
}

fn threads(setup: &Setup) {
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

fn names() {
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

fn absent_fault(setup: &Setup) {
    let mut bad = 0x10u64;
    assert!(
        setup
            .launch(
                "write_to",
                1,
                1,
                0,
                CUstream::NULL,
                &mut [(&raw mut bad).cast()]
            )
            .is_ok()
    );
    say!(
        "synchronize after an illegal address",
        "{}",
        cu!(cuCtxSynchronize)
    );
    say!(
        "the next call",
        "{}",
        cu!(cuMemAlloc_v2, &mut { 0u64 }, 16usize)
    );
    say!(
        "a launch",
        "{}",
        setup.launch("nothing", 1, 1, 0, CUstream::NULL, &mut [])
    );
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let want =
        |name: &str| wanted.is_empty() && name != "fault" || wanted.iter().any(|w| w == name);
    if want("before_init") {
        println!("[before_init]");
        before_init();
    }
    let setup = Setup::new();
    let sections: [(&str, &dyn Fn()); 11] = [
        ("contexts", &|| contexts(&setup)),
        ("memory", &memory),
        ("copies", &copies),
        ("host_memory", &|| host_memory(&setup)),
        ("launches", &|| launches(&setup)),
        ("modules", &|| modules(&setup)),
        ("streams", &|| streams(&setup)),
        ("events", &|| events(&setup)),
        ("occupancy", &|| occupancy(&setup)),
        ("threads", &|| threads(&setup)),
        ("names", &names),
    ];
    for (name, section) in sections {
        if want(name) {
            println!("[{name}]");
            section();
        }
    }
    if want("fault") {
        println!("[fault]");
        absent_fault(&setup);
    }
}
