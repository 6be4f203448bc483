//! A program that says what it may have of the first device, as a driver-API program sees it:
//!
//! - `limited show`: multiprocessors, and memory in MiB;
//! - `limited where`: on how many multiprocessors a kernel runs, launched in a stream, from a captured graph and from a
//!   graph built by hand;
//! - `limited whereabouts`: for each line of input, on which multiprocessors a kernel runs;
//! - `limited green`: multiprocessors of the device's resource, and on how many a green context of it runs;
//! - `limited contexts PERCENT...`: the same for a context made under each percentage in the environment;
//! - `limited allocate BYTES`: for each way to allocate, how many pieces of so many bytes there are until one is refused,
//!   and with what; at most [`MOST`];
//! - `limited ends BYTES`: how much is used after pieces of so many bytes have ended in one way or the other;
//! - `limited handed`: what NVIDIA's variables are set to, and whether a kernel runs;
//! - `limited hold BYTES`: holds a piece until its input ends;
//! - `limited until MIB BYTES`: once so much is free, how many pieces of so many bytes there are.
//!
//! A call that fails ends it: the status is printed, and the exit status is 1.

use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use mpsshim_tests::peer::WHERE_PTX;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

type Status<T = ()> = Result<T, CUresult>;

/// Pieces of one kind that are allocated at most.
const MOST: usize = 200;
/// Managed memory beyond the limit is host memory.
const MOST_MANAGED: usize = 24;
/// How long anything is waited for.
const PATIENCE: Duration = Duration::from_secs(10);
const BLOCKS: u32 = 4096;

fn primary() -> Status<CUcontext> {
    let mut context = CUcontext::NULL;
    cu!(cuDevicePrimaryCtxRetain, &mut context, 0 as CUdevice).ok()?;
    cu!(cuCtxSetCurrent, context).ok()?;
    Ok(context)
}

fn multiprocessors() -> Status<c_int> {
    let mut count: c_int = 0;
    let attribute = CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    cu!(cuDeviceGetAttribute, &mut count, attribute, 0 as CUdevice).ok()?;
    Ok(count)
}

fn handed() -> Status {
    for name in [
        "ACTIVE_THREAD_PERCENTAGE",
        "PINNED_DEVICE_MEM_LIMIT",
        "CLIENT_PRIORITY",
    ] {
        let value = std::env::var(format!("CUDA_MPS_{name}"));
        println!("{name}: {}", value.unwrap_or_default());
    }
    places()
}

fn show() -> Status {
    println!("multiprocessors {}", multiprocessors()?);
    primary()?;
    println!("multiprocessors in a context {}", multiprocessors()?);
    let (mut free, mut total, mut of_device) = (0usize, 0usize, 0usize);
    cu!(cuMemGetInfo_v2, &mut free, &mut total).ok()?;
    cu!(cuDeviceTotalMem_v2, &mut of_device, 0 as CUdevice).ok()?;
    println!("free {}", free >> 20);
    println!("total {}", total >> 20);
    println!("of the device {}", of_device >> 20);
    Ok(())
}

/// A kernel that notes where it runs.
struct Probe {
    kernel: CUfunction,
    out: CUdeviceptr,
    stream: CUstream,
}

impl Probe {
    /// In the current context.
    fn new() -> Status<Probe> {
        let image = CString::new(WHERE_PTX).expect("no NUL");
        let mut module = CUmodule::NULL;
        cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
        let mut kernel = CUfunction::NULL;
        cu!(cuModuleGetFunction, &mut kernel, module, c"where".as_ptr()).ok()?;
        let mut out: CUdeviceptr = 0;
        cu!(cuMemAlloc_v2, &mut out, 4096usize).ok()?;
        let mut stream = CUstream::NULL;
        cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
        Ok(Probe {
            kernel,
            out,
            stream,
        })
    }

    fn launch(&mut self) -> Status {
        let mut params = [(&raw mut self.out).cast::<c_void>()];
        cu!(
            cuLaunchKernel,
            self.kernel,
            BLOCKS,
            1u32,
            1u32,
            32u32,
            1u32,
            1u32,
            0u32,
            self.stream,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        )
        .ok()
    }

    fn count(&mut self, run: impl FnOnce(&mut Probe) -> Status) -> Status<usize> {
        Ok(self.seen(run)?.len())
    }

    /// The multiprocessors on which kernels run.
    fn seen(&mut self, run: impl FnOnce(&mut Probe) -> Status) -> Status<Vec<usize>> {
        cu!(cuMemsetD8Async, self.out, 0u8, 4096usize, self.stream).ok()?;
        run(self)?;
        cu!(cuStreamSynchronize, self.stream).ok()?;
        let mut seen = [0u32; 1024];
        cu!(cuMemcpyDtoH_v2, seen.as_mut_ptr(), self.out, 4096usize).ok()?;
        Ok((0..1024).filter(|at| seen[*at] != 0).collect())
    }

    fn run_graph(&self, graph: CUgraph) -> Status {
        let mut exec = CUgraphExec::NULL;
        cu!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64).ok()?;
        cu!(cuGraphLaunch, exec, self.stream).ok()?;
        cu!(cuStreamSynchronize, self.stream).ok()?;
        cu!(cuGraphExecDestroy, exec).ok()?;
        cu!(cuGraphDestroy, graph).ok()
    }

    fn captured(&mut self) -> Status {
        let mut graph = CUgraph::NULL;
        cu!(cuStreamBeginCapture_v2, self.stream, 2 as c_uint).ok()?;
        self.launch()?;
        cu!(cuStreamEndCapture, self.stream, &mut graph).ok()?;
        self.run_graph(graph)
    }

    fn by_hand(&mut self) -> Status {
        let mut graph = CUgraph::NULL;
        cu!(cuGraphCreate, &mut graph, 0 as c_uint).ok()?;
        let mut pointers = [(&raw mut self.out) as u64];
        let params = CUDA_KERNEL_NODE_PARAMS {
            function: self.kernel.0,
            grid: [BLOCKS, 1, 1],
            block: [32, 1, 1],
            params: pointers.as_mut_ptr() as u64,
            ..Default::default()
        };
        let mut node = CUgraphNode::NULL;
        let none: *const CUgraphNode = null_mut();
        cu!(
            cuGraphAddKernelNode_v2,
            &mut node,
            graph,
            none,
            0usize,
            &params
        )
        .ok()?;
        self.run_graph(graph)
    }
}

fn places() -> Status {
    primary()?;
    let mut probe = Probe::new()?;
    println!("launched {}", probe.count(Probe::launch)?);
    println!("captured {}", probe.count(Probe::captured)?);
    println!("by hand {}", probe.count(Probe::by_hand)?);
    Ok(())
}

fn whereabouts() -> Status {
    primary()?;
    let mut probe = Probe::new()?;
    for _ in std::io::stdin().lines() {
        let seen = probe.seen(Probe::launch)?;
        let seen: Vec<String> = seen.iter().map(usize::to_string).collect();
        println!("on {}", seen.join(" "));
    }
    Ok(())
}

fn green() -> Status {
    primary()?;
    let mut probe = Probe::new()?;
    let mut whole = CUdevResource::INVALID;
    let kind = CU_DEV_RESOURCE_TYPE_SM;
    cu!(cuDeviceGetDevResource, 0 as CUdevice, &mut whole, kind).ok()?;
    println!("resource {}", whole.sm[0]);
    let mut description = CUdevResourceDesc::NULL;
    cu!(
        cuDevResourceGenerateDesc,
        &mut description,
        &mut whole,
        1u32
    )
    .ok()?;
    let mut green = CUgreenCtx::NULL;
    let flags = CU_GREEN_CTX_DEFAULT_STREAM;
    cu!(
        cuGreenCtxCreate,
        &mut green,
        description,
        0 as CUdevice,
        flags
    )
    .ok()?;
    let stream = &mut probe.stream;
    cu!(
        cuGreenCtxStreamCreate,
        stream,
        green,
        CU_STREAM_NON_BLOCKING,
        0 as c_int
    )
    .ok()?;
    println!("in a green context {}", probe.count(Probe::launch)?);
    Ok(())
}

fn contexts(percentages: &[String]) -> Status {
    for percentage in percentages {
        // SAFETY: the one thread of this program that touches the environment.
        unsafe { std::env::set_var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage) };
        let mut context = CUcontext::NULL;
        cu!(cuCtxCreate_v2, &mut context, 0 as c_uint, 0 as CUdevice).ok()?;
        let used = Probe::new()?.count(Probe::launch)?;
        println!("{percentage}: {} {used}", multiprocessors()?);
        // The next context is made while this one is there, the one after it is not.
        if percentages.first() != Some(percentage) {
            cu!(cuCtxDestroy_v2, context).ok()?;
        }
    }
    Ok(())
}

/// Allocates until it is refused.
fn fill<T>(way: &str, allocate: impl FnMut() -> Status<T>, free: impl Fn(T) -> CUresult) -> Status {
    fill_most(way, MOST, allocate, free)
}

/// As [`fill`], but no more than `most` pieces.
fn fill_most<T>(
    way: &str,
    most: usize,
    mut allocate: impl FnMut() -> Status<T>,
    free: impl Fn(T) -> CUresult,
) -> Status {
    let mut held = Vec::new();
    let refused = loop {
        if held.len() == most {
            break CUDA_SUCCESS;
        }
        match allocate() {
            Ok(piece) => held.push(piece),
            Err(status) => break status,
        }
    };
    println!("{way}: {} then {refused}", held.len());
    held.into_iter().try_for_each(|piece| free(piece).ok())
}

fn allocate(bytes: usize) -> Status {
    let context = primary()?;
    let mut stream = CUstream::NULL;
    cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
    let memory = |made: CUresult, address: CUdeviceptr| made.ok().map(|()| address);
    let mut at: CUdeviceptr = 0;
    fill(
        "cuMemAlloc",
        || memory(cu!(cuMemAlloc_v2, &mut at, bytes), at),
        |piece: u64| cu!(cuMemFree_v2, piece),
    )?;
    let mut at: CUdeviceptr = 0;
    let mut pitch = 0usize;
    fill(
        "cuMemAllocPitch",
        || {
            let (width, rows) = (64usize << 10, bytes >> 16);
            memory(
                cu!(
                    cuMemAllocPitch_v2,
                    &mut at,
                    &mut pitch,
                    width,
                    rows,
                    4 as c_uint
                ),
                at,
            )
        },
        |piece: u64| cu!(cuMemFree_v2, piece),
    )?;
    let mut at: CUdeviceptr = 0;
    fill(
        "cuMemAllocAsync",
        || memory(cu!(cuMemAllocAsync, &mut at, bytes, stream), at),
        |piece: u64| cu!(cuMemFreeAsync, piece, stream),
    )?;
    cu!(cuStreamSynchronize, stream).ok()?;
    let mut pool = 0u64;
    cu!(cuDeviceGetDefaultMemPool, &mut pool, 0 as CUdevice).ok()?;
    cu!(cuMemPoolTrimTo, pool, 0usize).ok()?;
    let mut at: CUdeviceptr = 0;
    fill_most(
        "cuMemAllocManaged",
        MOST_MANAGED,
        || memory(cu!(cuMemAllocManaged, &mut at, bytes, 1 as c_uint), at),
        |piece: u64| cu!(cuMemFree_v2, piece),
    )?;
    let properties = CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: 0,
        },
        ..CUmemAllocationProp::default()
    };
    let mut handle = 0u64;
    fill(
        "cuMemCreate",
        || {
            memory(
                cu!(cuMemCreate, &mut handle, bytes, &properties, 0u64),
                handle,
            )
        },
        |piece: u64| cu!(cuMemRelease, piece),
    )?;
    // Rows of 16 KiB.
    let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
        width: 4096,
        height: bytes as u64 >> 14,
        format: CU_AD_FORMAT_FLOAT,
        channels: 1,
        ..CUDA_ARRAY3D_DESCRIPTOR::default()
    };
    let mut array = 0u64;
    fill(
        "cuArray3DCreate",
        || memory(cu!(cuArray3DCreate_v2, &mut array, &descriptor), array),
        |piece: u64| cu!(cuArrayDestroy, piece),
    )?;
    fill(
        "graph",
        || {
            let mut graph = CUgraph::NULL;
            cu!(cuGraphCreate, &mut graph, 0 as c_uint).ok()?;
            let mut params = CUDA_MEM_ALLOC_NODE_PARAMS {
                kind: 1,
                location_kind: 1,
                bytes: bytes as u64,
                ..Default::default()
            };
            let mut node = CUgraphNode::NULL;
            let none: *const CUgraphNode = null_mut();
            cu!(
                cuGraphAddMemAllocNode,
                &mut node,
                graph,
                none,
                0usize,
                &mut params
            )
            .ok()?;
            let mut exec = CUgraphExec::NULL;
            let made = cu!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64);
            let made = made
                .ok()
                .and_then(|()| cu!(cuGraphLaunch, exec, stream).ok());
            made.and_then(|()| cu!(cuStreamSynchronize, stream).ok())?;
            Ok((graph, exec, params.address))
        },
        |(graph, exec, address): (CUgraph, CUgraphExec, u64)| {
            let freed = cu!(cuMemFree_v2, address);
            let ended = (cu!(cuGraphExecDestroy, exec), cu!(cuGraphDestroy, graph));
            match ended {
                (CUDA_SUCCESS, CUDA_SUCCESS) => freed,
                _ => ended.0,
            }
        },
    )?;
    // Nothing of it is left.
    let (mut free, mut total) = (0usize, 0usize);
    cu!(cuCtxSetCurrent, context).ok()?;
    settle(0)?;
    cu!(cuMemGetInfo_v2, &mut free, &mut total).ok()?;
    println!(
        "used in the end: {} MiB of {}",
        (total - free) >> 20,
        total >> 20
    );
    Ok(())
}

fn used() -> Status<usize> {
    let (mut free, mut total) = (0usize, 0usize);
    cu!(cuMemGetInfo_v2, &mut free, &mut total).ok()?;
    Ok((total - free) >> 20)
}

/// Waits until no more than so many MiB are used: in proxy mode memory that waits for a quiet moment counts up to then.
fn settle(expected: usize) -> Status {
    let until = Instant::now() + PATIENCE;
    while used()? > expected && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn piece(bytes: usize) -> Status<CUdeviceptr> {
    let mut at: CUdeviceptr = 0;
    cu!(cuMemAlloc_v2, &mut at, bytes).ok()?;
    Ok(at)
}

fn ends(bytes: usize) -> Status {
    let primary_context = primary()?;
    let say = |when: &str| used().map(|used| println!("{when}: {used}"));
    let first = piece(bytes)?;
    say("a piece")?;
    println!("odd: {}", cu!(cuMemFree_v2, first + 4096));
    say("after an odd free")?;
    println!("much: {}", piece(bytes << 10).unwrap_err());

    let mut context = CUcontext::NULL;
    cu!(cuCtxCreate_v2, &mut context, 0 as c_uint, 0 as CUdevice).ok()?;
    piece(bytes)?;
    let descriptor = CUDA_ARRAY_DESCRIPTOR {
        width: 4096,
        height: bytes as u64 >> 14,
        format: CU_AD_FORMAT_FLOAT,
        channels: 1,
    };
    let mut array = 0u64;
    cu!(cuArrayCreate_v2, &mut array, &descriptor).ok()?;
    say("in a context")?;
    cu!(cuCtxDestroy_v2, context).ok()?;
    cu!(cuCtxSetCurrent, primary_context).ok()?;
    settle(bytes >> 20)?;
    say("the context has ended")?;

    let properties = CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: 0,
        },
        ..CUmemAllocationProp::default()
    };
    let (mut handle, mut again, mut at) = (0u64, 0u64, 0u64);
    cu!(cuMemCreate, &mut handle, bytes, &properties, 0u64).ok()?;
    cu!(cuMemAddressReserve, &mut at, bytes, 0usize, 0u64, 0u64).ok()?;
    cu!(cuMemMap, at, bytes, 0usize, handle, 0u64).ok()?;
    cu!(cuMemRelease, handle).ok()?;
    say("mapped, without a handle")?;
    cu!(cuMemRetainAllocationHandle, &mut again, at).ok()?;
    cu!(cuMemUnmap, at, bytes).ok()?;
    say("a handle, not mapped")?;
    cu!(cuMemRelease, again).ok()?;
    cu!(cuMemAddressFree, at, bytes).ok()?;
    say("neither")?;

    cu!(cuDevicePrimaryCtxReset_v2, 0 as CUdevice).ok()?;
    primary()?;
    say("after a reset")
}

fn hold(bytes: usize) -> Status {
    primary()?;
    let held = piece(bytes)?;
    println!("ready");
    let _ = std::io::read_to_string(std::io::stdin());
    cu!(cuMemFree_v2, held).ok()
}

fn until(free: usize, bytes: usize) -> Status {
    primary()?;
    let began = Instant::now();
    loop {
        let (mut now, mut total) = (0usize, 0usize);
        cu!(cuMemGetInfo_v2, &mut now, &mut total).ok()?;
        if now >> 20 == free {
            println!("free {free} of {}", total >> 20);
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{} MiB are free", now >> 20);
        std::thread::sleep(Duration::from_millis(20));
    }
    fill("pieces", || piece(bytes), |at| cu!(cuMemFree_v2, at))
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = cu!(cuInit, 0 as c_uint).ok().and_then(|()| {
        match arguments.first().map(String::as_str) {
            Some("show") => show(),
            Some("where") => places(),
            Some("whereabouts") => whereabouts(),
            Some("green") => green(),
            Some("contexts") => contexts(&arguments[1..]),
            Some("allocate") => allocate(arguments[1].parse().expect("bytes")),
            Some("ends") => ends(arguments[1].parse().expect("bytes")),
            Some("handed") => handed(),
            Some("hold") => hold(arguments[1].parse().expect("bytes")),
            Some("until") => until(
                arguments[1].parse().expect("MiB"),
                arguments[2].parse().expect("bytes"),
            ),
            _ => panic!(
                "show, where, handed, contexts PERCENT..., allocate, ends or hold BYTES, until MIB BYTES"
            ),
        }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(status) => {
            println!("{status}");
            ExitCode::FAILURE
        }
    }
}
