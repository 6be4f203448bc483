//! Stream attributes, events in full, what is refused at once, and services of the driver that need no device.

use super::*;

/// Ids of `CUlaunchAttribute` that streams have.
const ACCESS_POLICY_WINDOW: u32 = 1;
const SYNCHRONIZATION_POLICY: u32 = 3;
const PRIORITY: u32 = 8;
const MEM_SYNC_DOMAIN_MAP: u32 = 9;
const MEM_SYNC_DOMAIN: u32 = 10;

/// `CUlaunchAttributeValue`.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct AttributeValue([u8; 64]);

/// `CUaccessPolicyWindow`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Window {
    base: u64,
    bytes: usize,
    ratio: f32,
    hit: u32,
    miss: u32,
}

impl AttributeValue {
    fn of<T: Copy>(value: T) -> AttributeValue {
        let mut all = AttributeValue([0; 64]);
        assert!(size_of::<T>() <= 64);
        // SAFETY: 64 aligned bytes.
        unsafe { all.0.as_mut_ptr().cast::<T>().write(value) };
        all
    }
    fn first(&self) -> i32 {
        i32::from_ne_bytes([self.0[0], self.0[1], self.0[2], self.0[3]])
    }
}

fn get(stream: CUstream, id: u32) -> (CUresult, AttributeValue) {
    let mut value = AttributeValue([0xaa; 64]);
    let status = cu!(cuStreamGetAttribute, stream, id, &mut value);
    (status, value)
}

fn set<T: Copy>(stream: CUstream, id: u32, value: T) -> CUresult {
    let value = AttributeValue::of(value);
    cu!(cuStreamSetAttribute, stream, id, &value)
}

fn window(stream: CUstream) -> String {
    let (status, value) = get(stream, ACCESS_POLICY_WINDOW);
    // SAFETY: 64 aligned bytes that hold a window.
    let window = unsafe { value.0.as_ptr().cast::<Window>().read() };
    format!(
        "{status} {} {} {} {} {}",
        window.base != 0,
        window.bytes,
        window.ratio,
        window.hit,
        window.miss
    )
}

fn new_stream(flags: u32) -> CUstream {
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, flags);
    stream
}

pub fn stream_attributes(_setup: &Setup) {
    let (stream, other) = (new_stream(0), new_stream(CU_STREAM_NON_BLOCKING));
    let out = alloc(1 << 20);
    for id in 0..20u32 {
        let (status, value) = get(stream, id);
        let first = if status.is_ok() && id != ACCESS_POLICY_WINDOW && id != MEM_SYNC_DOMAIN_MAP {
            value.first()
        } else {
            0
        };
        say!("default of", "{id} {status} {first}");
    }
    say!("window at first", "{}", window(stream));
    for id in 0..20u32 {
        say!(
            "set",
            "{id} {}",
            cu!(cuStreamSetAttribute, other, id, &AttributeValue([0; 64]))
        );
    }
    for policy in 0..6u32 {
        let status = set(stream, SYNCHRONIZATION_POLICY, policy);
        say!(
            "synchronization policy",
            "{policy} {status} {}",
            get(stream, SYNCHRONIZATION_POLICY).1.first()
        );
    }
    for priority in [-9, -5, -1, 0, 3i32] {
        let status = set(stream, PRIORITY, priority);
        let mut now = 9 as c_int;
        must!(cuStreamGetPriority, stream, &mut now);
        say!(
            "priority",
            "{priority} {status} {} {now}",
            get(stream, PRIORITY).1.first()
        );
    }
    for domain in [0, 1, 2u32] {
        let status = set(stream, MEM_SYNC_DOMAIN, domain);
        say!(
            "domain",
            "{domain} {status} {}",
            get(stream, MEM_SYNC_DOMAIN).1.first()
        );
    }
    let (status, map) = get(stream, MEM_SYNC_DOMAIN_MAP);
    say!("domain map", "{status} {:?}", &map.0[..2]);
    for map in [[0u8, 0], [1, 0], [3, 3], [4, 0], [255, 0]] {
        let status = set(stream, MEM_SYNC_DOMAIN_MAP, map);
        say!(
            "set the map",
            "{map:?} {status} {:?}",
            &get(stream, MEM_SYNC_DOMAIN_MAP).1.0[..2]
        );
    }
    let some = Window {
        base: out,
        bytes: 1 << 16,
        ratio: 0.5,
        hit: 2,
        miss: 1,
    };
    say!(
        "set a window",
        "{}",
        set(stream, ACCESS_POLICY_WINDOW, some)
    );
    say!("window", "{}", window(stream));
    for (name, bad) in [
        ("ratio above one", Window { ratio: 1.5, ..some }),
        (
            "negative ratio",
            Window {
                ratio: -0.5,
                ..some
            },
        ),
        ("unknown property", Window { hit: 7, ..some }),
        ("missing is persisting", Window { miss: 2, ..some }),
        ("no bytes", Window { bytes: 0, ..some }),
        (
            "many bytes",
            Window {
                bytes: 1 << 40,
                ..some
            },
        ),
        ("no address", Window { base: 0, ..some }),
        (
            "odd address",
            Window {
                base: out + 3,
                ..some
            },
        ),
    ] {
        say!(
            name,
            "{} {}",
            set(stream, ACCESS_POLICY_WINDOW, bad),
            window(stream)
        );
    }
    must!(
        cuStreamSetAttribute,
        stream,
        ACCESS_POLICY_WINDOW,
        &AttributeValue::of(some)
    );
    must!(
        cuStreamSetAttribute,
        stream,
        SYNCHRONIZATION_POLICY,
        &AttributeValue::of(4u32)
    );
    must!(
        cuStreamSetAttribute,
        stream,
        PRIORITY,
        &AttributeValue::of(-2i32)
    );
    say!("copy", "{}", cu!(cuStreamCopyAttributes, other, stream));
    say!(
        "copied",
        "{} {} {}",
        window(other),
        get(other, SYNCHRONIZATION_POLICY).1.first(),
        get(other, PRIORITY).1.first()
    );
    say!(
        "copy to itself",
        "{}",
        cu!(cuStreamCopyAttributes, stream, stream)
    );
    say!(
        "copy from the default stream",
        "{}",
        cu!(cuStreamCopyAttributes, other, CUstream::NULL)
    );
    for (name, default) in [
        ("null", CUstream::NULL),
        ("legacy", CU_STREAM_LEGACY),
        ("per thread", CU_STREAM_PER_THREAD),
    ] {
        let (status, value) = get(default, SYNCHRONIZATION_POLICY);
        say!(
            name,
            "{status} {} {}",
            value.first(),
            set(default, SYNCHRONIZATION_POLICY, 1u32)
        );
        say!("set its priority", "{}", set(default, PRIORITY, -1i32));
    }
    let mut value = AttributeValue([0; 64]);
    say!(
        "get ptsz",
        "{}",
        cu!(
            cuStreamGetAttribute_ptsz,
            CUstream::NULL,
            PRIORITY,
            &mut value
        )
    );
    say!(
        "set ptsz",
        "{}",
        cu!(
            cuStreamSetAttribute_ptsz,
            CUstream::NULL,
            SYNCHRONIZATION_POLICY,
            &AttributeValue::of(1u32)
        )
    );
    say!(
        "copy ptsz",
        "{}",
        cu!(cuStreamCopyAttributes_ptsz, other, stream)
    );
    // Ids.
    let (mut a, mut b, mut c, mut d) = (0u64, 0u64, 0u64, 0u64);
    say!(
        "id of null",
        "{}",
        cu!(cuStreamGetId, CUstream::NULL, &mut a)
    );
    say!(
        "id of legacy",
        "{}",
        cu!(cuStreamGetId, CU_STREAM_LEGACY, &mut b)
    );
    say!(
        "id of per thread",
        "{}",
        cu!(cuStreamGetId, CU_STREAM_PER_THREAD, &mut c)
    );
    say!("id of a stream", "{}", cu!(cuStreamGetId, stream, &mut d));
    say!(
        "which are the same",
        "{:?}",
        (a == b, a == c, a == d, c == d)
    );
    must!(cuStreamGetId_ptsz, CUstream::NULL, &mut a);
    say!("null by ptsz", "{}", a == c);
    say!("no id", "{}", cu!(cuStreamGetId, stream, null_mut::<u64>()));
    let (mut context, mut current, mut green) = (CUcontext::NULL, CUcontext::NULL, 7u64);
    must!(cuCtxGetCurrent, &mut current);
    for stream in [
        stream,
        CUstream::NULL,
        CU_STREAM_LEGACY,
        CU_STREAM_PER_THREAD,
    ] {
        let status = cu!(cuStreamGetCtx, stream, &mut context);
        say!("its context", "{status} {}", context == current);
        let status = cu!(cuStreamGetCtx_v2, stream, &mut context, &mut green);
        say!(
            "and green context",
            "{status} {} {green}",
            context == current
        );
    }
    say!(
        "no context",
        "{}",
        cu!(cuStreamGetCtx, stream, null_mut::<CUcontext>())
    );
    must!(cuStreamDestroy_v2, stream);
    must!(cuStreamDestroy_v2, other);
    free(out);
}

fn new_event(flags: u32) -> CUevent {
    let mut event = CUevent::NULL;
    must!(cuEventCreate, &mut event, flags);
    event
}

pub fn event_calls(setup: &Setup) {
    let out = alloc(4096);
    let streams = [new_stream(0), new_stream(CU_STREAM_NON_BLOCKING)];
    for flags in 0..16u32 {
        let mut event = CUevent::NULL;
        let status = cu!(cuEventCreate, &mut event, flags);
        say!("create with flags", "{flags} {status}");
        if status.is_ok() {
            must!(cuEventDestroy_v2, event);
        }
    }
    say!(
        "no event",
        "{}",
        cu!(cuEventCreate, null_mut::<CUevent>(), 0u32)
    );
    let (start, end, quiet, blocks) = (
        new_event(0),
        new_event(0),
        new_event(CU_EVENT_DISABLE_TIMING),
        new_event(CU_EVENT_BLOCKING_SYNC),
    );
    // Elapsed time.
    let elapsed = |name: &str, from: CUevent, to: CUevent| {
        let mut ms = -1f32;
        let status = cu!(cuEventElapsedTime, &mut ms, from, to);
        let status2 = cu!(cuEventElapsedTime_v2, &mut ms, from, to);
        say!(
            name,
            "{status} {status2} {}",
            if ms == -1.0 {
                "unset"
            } else if ms < 0.0 {
                "negative"
            } else if ms == 0.0 {
                "zero"
            } else {
                "positive"
            }
        );
    };
    elapsed("neither recorded", start, end);
    must!(cuEventRecord, start, streams[0]);
    must!(cuEventSynchronize, start);
    elapsed("one recorded", start, end);
    elapsed("the other way round", end, start);
    setup.slow_store(out, 1, streams[1]);
    must!(cuEventRecord, end, streams[1]);
    must!(cuEventSynchronize, end);
    elapsed("on two streams", start, end);
    elapsed("backwards", end, start);
    elapsed("the same", end, end);
    elapsed("without timing", start, quiet);
    must!(cuEventRecord, quiet, streams[0]);
    must!(cuStreamSynchronize, streams[0]);
    elapsed("recorded without timing", start, quiet);
    must!(cuEventRecord, blocks, streams[0]);
    must!(cuEventSynchronize, blocks);
    elapsed("blocking", start, blocks);
    elapsed("null", CUevent::NULL, end);
    say!(
        "no place",
        "{}",
        cu!(cuEventElapsedTime, null_mut::<f32>(), start, end)
    );
    let mut ms = -1f32;
    let busy = setup.while_busy(out, 2, streams[0], || {
        must!(cuEventRecord, end, streams[0]);
        cu!(cuEventElapsedTime_v2, &mut ms, start, end)
    });
    say!("not yet", "{busy}");
    must!(cuEventSynchronize, end);
    // Null and destroyed events.
    say!("query null", "{}", cu!(cuEventQuery, CUevent::NULL));
    say!(
        "synchronize null",
        "{}",
        cu!(cuEventSynchronize, CUevent::NULL)
    );
    say!(
        "record null",
        "{}",
        cu!(cuEventRecord, CUevent::NULL, streams[0])
    );
    say!("destroy null", "{}", cu!(cuEventDestroy_v2, CUevent::NULL));
    say!(
        "wait for null",
        "{}",
        cu!(cuStreamWaitEvent, streams[0], CUevent::NULL, 0u32)
    );
    // Flags of records and waits.
    for flags in [0u32, 1, 2, 3] {
        say!(
            "record with flags",
            "{flags} {}",
            cu!(cuEventRecordWithFlags, end, streams[0], flags)
        );
        say!(
            "wait with flags",
            "{flags} {}",
            cu!(cuStreamWaitEvent, streams[1], end, flags)
        );
    }
    must!(cuCtxSynchronize);
    must!(cuEventRecordWithFlags_ptsz, end, CUstream::NULL, 0u32);
    must!(cuStreamWaitEvent_ptsz, CUstream::NULL, end, 0u32);
    must!(cuStreamSynchronize, CU_STREAM_PER_THREAD);
    // An event of another context.
    let mut context = CUcontext::NULL;
    must!(cuCtxCreate_v2, &mut context, 0u32, setup.device);
    say!(
        "record another context's event",
        "{}",
        cu!(cuEventRecord, end, CUstream::NULL)
    );
    say!("query it", "{}", cu!(cuEventQuery, end));
    say!(
        "wait for it",
        "{}",
        cu!(cuStreamWaitEvent, CUstream::NULL, end, 0u32)
    );
    let own = new_event(0);
    say!(
        "on another context's stream",
        "{}",
        cu!(cuEventRecord, own, streams[0])
    );
    must!(cuEventRecord, own, CUstream::NULL);
    say!(
        "elapsed between contexts",
        "{}",
        cu!(cuEventElapsedTime_v2, &mut ms, end, own)
    );
    say!(
        "a stream waits for it",
        "{}",
        cu!(cuStreamWaitEvent, streams[0], own, 0u32)
    );
    must!(cuCtxDestroy_v2, context);
    // Events of a context.
    let mut current = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut current);
    say!(
        "record a context",
        "{}",
        cu!(cuCtxRecordEvent, current, quiet)
    );
    say!("context waits", "{}", cu!(cuCtxWaitEvent, current, quiet));
    say!(
        "record the current context",
        "{}",
        cu!(cuCtxRecordEvent, CUcontext::NULL, quiet)
    );
    say!(
        "record null in a context",
        "{}",
        cu!(cuCtxRecordEvent, current, CUevent::NULL)
    );
    say!(
        "context waits for null",
        "{}",
        cu!(cuCtxWaitEvent, current, CUevent::NULL)
    );
    // Interprocess.
    let mut handle = [0u8; 64];
    say!(
        "handle of a plain event",
        "{}",
        cu!(cuIpcGetEventHandle, &mut handle, quiet)
    );
    let shared = new_event(CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    say!(
        "handle",
        "{} {}",
        cu!(cuIpcGetEventHandle, &mut handle, shared),
        handle != [0; 64]
    );
    say!(
        "no handle",
        "{}",
        cu!(cuIpcGetEventHandle, null_mut::<[u8; 64]>(), shared)
    );
    say!(
        "handle of null",
        "{}",
        cu!(cuIpcGetEventHandle, &mut handle, CUevent::NULL)
    );
    let mut opened = CUevent::NULL;
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Token([u64; 8]);
    let token = Token([0; 8]);
    say!(
        "open nothing",
        "{}",
        cu!(cuIpcOpenEventHandle, &mut opened, token)
    );
    setup.slow_store(out, 3, streams[0]);
    must!(cuEventRecord, shared, streams[0]);
    must!(cuEventSynchronize, shared);
    elapsed("elapsed of an interprocess event", shared, start);
    must!(cuEventDestroy_v2, shared);
    for event in [start, end, quiet, blocks] {
        must!(cuEventDestroy_v2, event);
    }
    for stream in streams {
        must!(cuStreamDestroy_v2, stream);
    }
    free(out);
}

/// Arguments that the driver refuses in the call itself.
pub fn refused_at_once(setup: &Setup) {
    let out = alloc(4096);
    let stream = new_stream(0);
    let host = [0u8; 64];
    let local = host.as_ptr() as u64;
    // Launches.
    let function = setup.functions["nothing"];
    let launch = |grid: [u32; 3], block: [u32; 3], shared: u32| {
        cu!(
            cuLaunchKernel,
            function,
            grid[0],
            grid[1],
            grid[2],
            block[0],
            block[1],
            block[2],
            shared,
            stream,
            null_mut::<*mut c_void>(),
            null_mut::<*mut c_void>()
        )
    };
    for (name, grid, block, shared) in [
        ("no blocks", [0, 1, 1], [1, 1, 1], 0),
        ("no threads", [1, 1, 1], [1, 0, 1], 0),
        ("too many threads", [1, 1, 1], [1024, 2, 1], 0),
        ("too deep", [1, 1, 1], [1, 1, 65], 0),
        ("too high a grid", [1, 65_536, 1], [1, 1, 1], 0),
        ("too wide a grid", [0x8000_0000, 1, 1], [1, 1, 1], 0),
        ("too much shared memory", [1, 1, 1], [1, 1, 1], 1 << 20),
        ("a little too much", [1, 1, 1], [1, 1, 1], 48 * 1024 + 1),
        ("just right", [1, 1, 1], [1, 1, 1], 48 * 1024),
    ] {
        say!(name, "{}", launch(grid, block, shared));
    }
    say!(
        "no function",
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
            stream,
            null_mut::<*mut c_void>(),
            null_mut::<*mut c_void>()
        )
    );
    say!(
        "no parameters",
        "{}",
        cu!(
            cuLaunchKernel,
            setup.functions["store_index"],
            1u32,
            1u32,
            1u32,
            1u32,
            1u32,
            1u32,
            0u32,
            stream,
            null_mut::<*mut c_void>(),
            null_mut::<*mut c_void>()
        )
    );
    // Memsets.
    say!(
        "memset null",
        "{}",
        cu!(cuMemsetD8Async, 0u64, 1u8, 4usize, stream)
    );
    say!(
        "memset nothing at null",
        "{}",
        cu!(cuMemsetD8Async, 0u64, 1u8, 0usize, stream)
    );
    say!(
        "memset nothing",
        "{}",
        cu!(cuMemsetD8Async, out, 1u8, 0usize, stream)
    );
    say!(
        "memset host memory",
        "{}",
        cu!(cuMemsetD8Async, local, 1u8, 4usize, stream)
    );
    say!(
        "memset of nobody's",
        "{}",
        cu!(cuMemsetD8Async, 0x10_0000u64, 1u8, 4usize, stream)
    );
    say!(
        "memset beyond the end",
        "{}",
        cu!(cuMemsetD8Async, out, 1u8, 1usize << 40, stream)
    );
    say!(
        "odd 16",
        "{}",
        cu!(cuMemsetD16Async, out + 1, 1u16, 4usize, stream)
    );
    say!(
        "odd 32",
        "{}",
        cu!(cuMemsetD32Async, out + 2, 1u32, 4usize, stream)
    );
    say!(
        "odd 32, synchronous",
        "{}",
        cu!(cuMemsetD32_v2, out + 2, 1u32, 4usize)
    );
    say!(
        "small pitch",
        "{}",
        cu!(cuMemsetD2D8Async, out, 8usize, 1u8, 16usize, 4usize, stream)
    );
    say!(
        "small pitch, one row",
        "{}",
        cu!(cuMemsetD2D8Async, out, 8usize, 1u8, 16usize, 1usize, stream)
    );
    say!(
        "no pitch",
        "{}",
        cu!(cuMemsetD2D8Async, out, 0usize, 1u8, 16usize, 1usize, stream)
    );
    say!(
        "odd pitch of 32",
        "{}",
        cu!(
            cuMemsetD2D32Async,
            out,
            30usize,
            1u32,
            4usize,
            4usize,
            stream
        )
    );
    say!(
        "odd address of 32",
        "{}",
        cu!(
            cuMemsetD2D32Async,
            out + 2,
            32usize,
            1u32,
            4usize,
            4usize,
            stream
        )
    );
    say!(
        "odd pitch of 16",
        "{}",
        cu!(
            cuMemsetD2D16Async,
            out,
            31usize,
            1u16,
            4usize,
            4usize,
            stream
        )
    );
    say!(
        "no width",
        "{}",
        cu!(cuMemsetD2D8Async, out, 16usize, 1u8, 0usize, 4usize, stream)
    );
    say!(
        "no height",
        "{}",
        cu!(cuMemsetD2D8Async, out, 16usize, 1u8, 4usize, 0usize, stream)
    );
    say!(
        "rows beyond the end",
        "{}",
        cu!(
            cuMemsetD2D8Async,
            out,
            1usize << 30,
            1u8,
            4usize,
            1000usize,
            stream
        )
    );
    // Copies.
    let mut target = [0u8; 64];
    let to = target.as_mut_ptr();
    say!(
        "copy from null",
        "{}",
        cu!(cuMemcpyDtoHAsync_v2, to, 0u64, 4usize, stream)
    );
    say!(
        "copy to null",
        "{}",
        cu!(cuMemcpyHtoDAsync_v2, 0u64, host.as_ptr(), 4usize, stream)
    );
    say!(
        "copy from null host",
        "{}",
        cu!(cuMemcpyHtoDAsync_v2, out, null::<u8>(), 4usize, stream)
    );
    say!(
        "copy to null host",
        "{}",
        cu!(cuMemcpyDtoHAsync_v2, null_mut::<u8>(), out, 4usize, stream)
    );
    say!(
        "copy nothing from null",
        "{}",
        cu!(cuMemcpyDtoHAsync_v2, to, 0u64, 0usize, stream)
    );
    say!(
        "copy nothing from null host",
        "{}",
        cu!(cuMemcpyHtoDAsync_v2, out, null::<u8>(), 0usize, stream)
    );
    say!(
        "copy beyond the end",
        "{}",
        cu!(cuMemcpyDtoDAsync_v2, out, out + 8, 1usize << 40, stream)
    );
    say!(
        "copy from nobody's",
        "{}",
        cu!(cuMemcpyDtoHAsync_v2, to, 0x10_0000u64, 4usize, stream)
    );
    say!(
        "copy on device from the host",
        "{}",
        cu!(cuMemcpyDtoDAsync_v2, out, local, 4usize, stream)
    );
    say!(
        "copy on device to the host",
        "{}",
        cu!(cuMemcpyDtoDAsync_v2, to as u64, out, 4usize, stream)
    );
    say!(
        "copy to the device, which is the host",
        "{}",
        cu!(
            cuMemcpyHtoDAsync_v2,
            to as u64,
            host.as_ptr(),
            4usize,
            stream
        )
    );
    say!(
        "copy from the host, which is the device",
        "{}",
        cu!(
            cuMemcpyHtoDAsync_v2,
            out,
            (out + 64) as *const u8,
            4usize,
            stream
        )
    );
    say!(
        "copy of any kind",
        "{}",
        cu!(cuMemcpyAsync, out, local, 4usize, stream)
    );
    say!(
        "copy of any kind from nobody's",
        "{}",
        cu!(cuMemcpyAsync, out, 0x10_0000u64, 0usize, stream)
    );
    // And nothing of this comes back later.
    say!("synchronize", "{}", cu!(cuStreamSynchronize, stream));
    say!("context", "{}", cu!(cuCtxSynchronize));
    must!(cuStreamDestroy_v2, stream);
    free(out);
}

unsafe extern "C" fn never(_info: *mut c_void, _data: *mut c_void, _handle: u64) {}
unsafe extern "C" fn log(_data: *mut c_void, _level: u32, _message: *mut c_char, _len: usize) {}

/// What needs the driver but no device.
pub fn services(setup: &Setup) {
    let device = setup.device;
    let nobody = null_mut::<c_void>();
    // The log.
    type Log = unsafe extern "C" fn(*mut c_void, u32, *mut c_char, usize);
    let mut callback = 0u64;
    say!(
        "log callback",
        "{} {}",
        cu!(cuLogsRegisterCallback, log as Log, nobody, &mut callback),
        callback != 0
    );
    say!("gone", "{}", cu!(cuLogsUnregisterCallback, callback));
    say!(
        "no callback",
        "{}",
        cu!(
            cuLogsRegisterCallback,
            null::<c_void>(),
            nobody,
            &mut callback
        )
    );
    let mut iterator = 0u32;
    say!("current", "{}", cu!(cuLogsCurrent, &mut iterator, 0u32));
    say!(
        "current with flags",
        "{}",
        cu!(cuLogsCurrent, &mut iterator, 1u32)
    );
    say!(
        "current of nothing",
        "{}",
        cu!(cuLogsCurrent, null_mut::<u32>(), 0u32)
    );
    let mut text = [0u8; 4096];
    let mut len = text.len();
    say!(
        "dump",
        "{} {}",
        cu!(
            cuLogsDumpToMemory,
            &mut iterator,
            text.as_mut_ptr(),
            &mut len,
            0u32
        ),
        len <= text.len()
    );
    say!(
        "dump to nothing",
        "{}",
        cu!(
            cuLogsDumpToMemory,
            &mut iterator,
            null_mut::<u8>(),
            &mut len,
            0u32
        )
    );
    say!(
        "dump to a file",
        "{}",
        cu!(cuLogsDumpToFile, &mut iterator, c"/dev/null".as_ptr(), 0u32)
    );
    say!(
        "dump to no file",
        "{}",
        cu!(cuLogsDumpToFile, &mut iterator, null::<c_char>(), 0u32)
    );
    // Core dumps.
    for id in 0..9u32 {
        let mut value = [0u8; 1024];
        let mut size = value.len();
        let status = cu!(
            cuCoredumpGetAttributeGlobal,
            id,
            value.as_mut_ptr(),
            &mut size
        );
        let shown = if size <= 4 {
            format!("{:?}", &value[..size])
        } else {
            "text".into()
        };
        say!(
            "core dump setting",
            "{id} {status} {} {shown}",
            if size <= 4 { size } else { 0 }
        );
        let mut size = value.len();
        let status = cu!(cuCoredumpGetAttribute, id, value.as_mut_ptr(), &mut size);
        let shown = if size <= 4 {
            format!("{:?}", &value[..size])
        } else {
            "text".into()
        };
        say!(
            "of the context",
            "{id} {status} {} {shown}",
            if size <= 4 { size } else { 0 }
        );
    }
    let mut on = 1u8;
    let mut size = 1usize;
    for id in [1u32, 2, 3, 4, 7] {
        let mut wide = 0u32;
        let (value, mut len) = if id == 7 {
            ((&raw mut wide).cast::<u8>(), 4usize)
        } else {
            (&raw mut on, 1usize)
        };
        say!(
            "set globally",
            "{id} {}",
            cu!(cuCoredumpSetAttributeGlobal, id, value, &mut len)
        );
        say!(
            "set for the context",
            "{id} {}",
            cu!(cuCoredumpSetAttribute, id, value, &mut len)
        );
    }
    on = 0;
    must!(cuCoredumpGetAttribute, 3u32, &mut on, &mut size);
    say!("lightweight now", "{on}");
    let mut name = *b"core.test\0";
    let mut len = name.len();
    say!(
        "file",
        "{}",
        cu!(
            cuCoredumpSetAttributeGlobal,
            5u32,
            name.as_mut_ptr(),
            &mut len
        )
    );
    let mut text = [0u8; 1024];
    let mut len = text.len();
    say!(
        "read it",
        "{} {} {}",
        cu!(
            cuCoredumpGetAttributeGlobal,
            5u32,
            text.as_mut_ptr(),
            &mut len
        ),
        text.starts_with(b"core.test\0"),
        len
    );
    let mut none = 0usize;
    say!(
        "size of it",
        "{}",
        cu!(
            cuCoredumpGetAttributeGlobal,
            5u32,
            null_mut::<u8>(),
            &mut none
        )
    );
    say!(
        "no size",
        "{}",
        cu!(
            cuCoredumpGetAttributeGlobal,
            1u32,
            &mut on,
            null_mut::<usize>()
        )
    );
    // Atomics.
    let operations: Vec<u32> = (0..16).collect();
    let mut capabilities = [77u32; 16];
    let status = cu!(
        cuDeviceGetHostAtomicCapabilities,
        capabilities.as_mut_ptr(),
        operations.as_ptr(),
        10u32,
        device
    );
    say!(
        "host atomics",
        "{status} {}",
        capabilities[..10].iter().all(|c| *c != 77)
    );
    say!(
        "none of them",
        "{}",
        cu!(
            cuDeviceGetHostAtomicCapabilities,
            capabilities.as_mut_ptr(),
            operations.as_ptr(),
            0u32,
            device
        )
    );
    say!(
        "no place for them",
        "{}",
        cu!(
            cuDeviceGetHostAtomicCapabilities,
            null_mut::<u32>(),
            operations.as_ptr(),
            1u32,
            device
        )
    );
    say!(
        "atomics with itself",
        "{}",
        cu!(
            cuDeviceGetP2PAtomicCapabilities,
            capabilities.as_mut_ptr(),
            operations.as_ptr(),
            1u32,
            device,
            device
        )
    );
    let mut list = [0u64; 16];
    say!(
        "NvSciSync",
        "{}",
        cu!(
            cuDeviceGetNvSciSyncAttributes,
            list.as_mut_ptr(),
            device,
            1 as c_int
        )
    );
    say!(
        "NvSciSync without a list",
        "{}",
        cu!(
            cuDeviceGetNvSciSyncAttributes,
            null_mut::<u64>(),
            device,
            1 as c_int
        )
    );
    let mut supported = 9 as c_int;
    let status = cu!(cuDeviceGetExecAffinitySupport, &mut supported, 0u32, device);
    say!("support", "{status} {supported}");
}

/// What a process sets for itself, and asks about contexts.
pub fn context_services(setup: &Setup) {
    let device = setup.device;
    let nobody = null_mut::<c_void>();
    // Notifications.
    let mut handle = 0u64;
    type Notify = unsafe extern "C" fn(*mut c_void, *mut c_void, u64);
    say!(
        "register",
        "{} {}",
        cu!(
            cuDeviceRegisterAsyncNotification,
            device,
            never as Notify,
            nobody,
            &mut handle
        ),
        handle != 0
    );
    say!(
        "unregister",
        "{}",
        cu!(cuDeviceUnregisterAsyncNotification, device, handle)
    );
    say!(
        "register nothing",
        "{}",
        cu!(
            cuDeviceRegisterAsyncNotification,
            device,
            null::<c_void>(),
            nobody,
            &mut handle
        )
    );
    say!(
        "on no device",
        "{}",
        cu!(
            cuDeviceRegisterAsyncNotification,
            99 as c_int,
            never as Notify,
            nobody,
            &mut handle
        )
    );
    say!(
        "unregister nothing",
        "{}",
        cu!(cuDeviceUnregisterAsyncNotification, device, 0u64)
    );
    // The profiler.
    say!(
        "profiler",
        "{} {}",
        cu!(cuProfilerStart),
        cu!(cuProfilerStop)
    );
    say!(
        "profiler's file",
        "{}",
        cu!(
            cuProfilerInitialize,
            c"/nonexistent".as_ptr(),
            c"/dev/null".as_ptr(),
            0u32
        )
    );
    // Remote writes.
    for (target, scope) in [(0u32, 100u32), (0, 200), (1, 100), (0, 0)] {
        say!(
            "flush remote writes",
            "{target} {scope} {}",
            cu!(cuFlushGPUDirectRDMAWrites, target, scope)
        );
    }
    // Contexts.
    let (mut current, mut attached) = (CUcontext::NULL, CUcontext::NULL);
    must!(cuCtxGetCurrent, &mut current);
    say!(
        "attach",
        "{} {}",
        cu!(cuCtxAttach, &mut attached, 0u32),
        attached == current
    );
    say!(
        "attach with flags",
        "{}",
        cu!(cuCtxAttach, &mut attached, 1u32)
    );
    say!(
        "attach to nothing",
        "{}",
        cu!(cuCtxAttach, null_mut::<CUcontext>(), 0u32)
    );
    say!("detach", "{}", cu!(cuCtxDetach, current));
    let mut made = CUcontext::NULL;
    must!(cuCtxCreate_v2, &mut made, 0u32, device);
    say!(
        "attach to one's own",
        "{}",
        cu!(cuCtxAttach, &mut attached, 0u32)
    );
    say!("detach it", "{}", cu!(cuCtxDetach, made));
    let mut top = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut top);
    say!("it is still there", "{}", top == made);
    say!("detach it again", "{}", cu!(cuCtxDetach, made));
    must!(cuCtxGetCurrent, &mut top);
    say!("now it is gone", "{}", top != made);
    say!("detach it once more", "{}", cu!(cuCtxDetach, made));
    must!(cuCtxSetCurrent, current);
    // Execution affinity.
    let mut affinity = [7u32; 2];
    let status = cu!(cuCtxGetExecAffinity, affinity.as_mut_ptr(), 0u32);
    let mut multiprocessors = 0 as c_int;
    must!(cuDeviceGetAttribute, &mut multiprocessors, 16u32, device);
    say!(
        "affinity",
        "{status} {} {}",
        affinity[0],
        affinity[1] == multiprocessors as u32
    );
    say!(
        "affinity of another kind",
        "{}",
        cu!(cuCtxGetExecAffinity, affinity.as_mut_ptr(), 1u32)
    );
    say!(
        "no affinity",
        "{}",
        cu!(cuCtxGetExecAffinity, null_mut::<u32>(), 0u32)
    );
    let mut wanted = [0u32, 8];
    let status = cu!(
        cuCtxCreate_v3,
        &mut made,
        wanted.as_mut_ptr(),
        1 as c_int,
        0u32,
        device
    );
    say!("a context with affinity", "{status}");
    if status.is_ok() {
        must!(cuCtxDestroy_v2, made);
    }
    let status = cu!(
        cuCtxCreate_v3,
        &mut made,
        null_mut::<u32>(),
        0 as c_int,
        0u32,
        device
    );
    say!("without", "{status}");
    if status.is_ok() {
        must!(cuCtxDestroy_v2, made);
    }
    let status = cu!(
        cuCtxCreate_v3,
        &mut made,
        null_mut::<u32>(),
        1 as c_int,
        0u32,
        device
    );
    say!("none of one", "{status}");
    wanted[0] = 5;
    let status = cu!(
        cuCtxCreate_v3,
        &mut made,
        wanted.as_mut_ptr(),
        1 as c_int,
        0u32,
        device
    );
    say!("of an unknown kind", "{status}");
}
