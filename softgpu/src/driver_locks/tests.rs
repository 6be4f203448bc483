//! A kernel is in flight that ends when the test says so: which calls wait for it, whom they keep out, what does not wait.
//!
//! Nothing here goes by time. A call waits when it is counted as waiting; one that does not wait comes back while the
//! kernel still runs, and only a failing test runs into [`PATIENCE`].

use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use mpsshim_api::cuda::*;

use super::{KEPT_OUT, ON, WAITING};
use crate::lookup::exported;

const PATIENCE: Duration = Duration::from_secs(60);

const PTX: &CStr = c"
.version 8.0
.target sm_90
.address_size 64
.global .align 4 .u32 variable;
.visible .entry until(.param .u64 word)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [word];
again:
    ld.volatile.global.u32 %r1, [%rd1];
    setp.eq.s32 %p1, %r1, 0;
    @%p1 bra again;
    ret;
}
.visible .entry store(.param .u64 to)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [to];
    mov.u32 %r1, 7;
    st.global.u32 [%rd1], %r1;
    ret;
}
.visible .entry nothing() { ret; }
.visible .entry other() { ret; }
.visible .entry flat() { .local .align 8 .b8 frame[1024]; ret; }
.visible .entry shallow() { .local .align 8 .b8 frame[2048]; ret; }
.visible .entry deep() { .local .align 8 .b8 frame[4096]; ret; }
";

/// Calls an entry point with integers and pointers, each in a slot of 64 bits.
fn call(name: &str, args: &[u64]) -> CUresult {
    let mut a = [0u64; 11];
    a[..args.len()].copy_from_slice(args);
    type Entry = extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> CUresult;
    // SAFETY: all arguments of entry points are integers or pointers, which the calling conventions of interest pass in
    // whole registers and stack slots; surplus ones are ignored.
    let entry: Entry = unsafe { std::mem::transmute(exported()[name].0) };
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
    let mut all = vec![&raw mut out as u64];
    all.extend(args);
    ok(name, &all);
    out
}

fn launch(function: u64, stream: u64, params: &[u64]) {
    let params: Vec<u64> = params.iter().map(|p| &raw const *p as u64).collect();
    let params = params.as_ptr() as u64;
    ok(
        "cuLaunchKernel",
        &[function, 1, 1, 1, 1, 1, 1, 0, stream, params, 0],
    );
}

fn function(module: u64, name: &CStr) -> u64 {
    get("cuModuleGetFunction", &[module, name.as_ptr() as u64])
}

fn library() -> u64 {
    get(
        "cuLibraryLoadData",
        &[PTX.as_ptr() as u64, 0, 0, 0, 0, 0, 0],
    )
}

fn kernel(library: u64, name: &CStr) -> u64 {
    get("cuLibraryGetKernel", &[library, name.as_ptr() as u64])
}

fn array() -> u64 {
    let descriptor = CUDA_ARRAY_DESCRIPTOR {
        width: 16,
        height: 16,
        format: CU_AD_FORMAT_FLOAT,
        channels: 1,
    };
    get("cuArrayCreate_v2", &[&raw const descriptor as u64])
}

fn mipmap() -> u64 {
    let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
        width: 16,
        height: 16,
        format: CU_AD_FORMAT_FLOAT,
        channels: 1,
        ..CUDA_ARRAY3D_DESCRIPTOR::default()
    };
    get("cuMipmappedArrayCreate", &[&raw const descriptor as u64, 2])
}

/// A graph with one node: of a kernel without parameters, or an empty one.
fn graph(function: Option<u64>) -> u64 {
    let graph = get("cuGraphCreate", &[0]);
    match function {
        Some(function) => {
            let params = CUDA_KERNEL_NODE_PARAMS {
                function,
                grid: [1; 3],
                block: [1; 3],
                ..CUDA_KERNEL_NODE_PARAMS::default()
            };
            let params = &raw const params as u64;
            get("cuGraphAddKernelNode_v2", &[graph, 0, 0, params]);
        }
        None => drop(get("cuGraphAddEmptyNode", &[graph, 0, 0])),
    }
    graph
}

fn instance(graph: u64) -> u64 {
    get("cuGraphInstantiateWithFlags", &[graph, 0])
}

/// A context with a module and two streams.
struct Scene {
    context: u64,
    module: u64,
    /// The stream of the kernel in flight, and another one.
    streams: [u64; 2],
    /// What the kernel in flight waits for: pinned memory.
    word: u64,
    _turn: MutexGuard<'static, ()>,
}

impl Scene {
    /// In a context of its own; one test at a time, as the counts and the switch are the process's.
    fn new(locks: bool) -> Scene {
        let turn = Scene::turn(locks);
        let context = get("cuCtxCreate_v4", &[0, 0, 0]);
        Scene::within(context, turn)
    }

    fn turn(locks: bool) -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        ok("cuInit", &[0]);
        ON.store(locks, Ordering::Relaxed);
        turn
    }

    fn within(context: u64, turn: MutexGuard<'static, ()>) -> Scene {
        ok("cuCtxSetCurrent", &[context]);
        Scene {
            context,
            module: get("cuModuleLoadData", &[PTX.as_ptr() as u64]),
            streams: [0; 2].map(|_| get("cuStreamCreate", &[CU_STREAM_NON_BLOCKING.into()])),
            word: get("cuMemAllocHost_v2", &[64]),
            _turn: turn,
        }
    }

    fn function(&self, name: &CStr) -> u64 {
        function(self.module, name)
    }

    /// Puts a kernel in flight; it ends when what comes back is dropped.
    fn busy(&self) -> Busy {
        self.busy_in(self.streams[0])
    }

    fn busy_in(&self, stream: u64) -> Busy {
        // The last one has seen its word.
        ok("cuCtxSynchronize", &[]);
        let ended = Busy(self.word);
        ended.word().store(0, Ordering::Release);
        launch(self.function(c"until"), stream, &[self.word]);
        ended
    }

    fn is_busy(&self) -> bool {
        call("cuStreamQuery", &[self.streams[0]]) == CUDA_ERROR_NOT_READY
    }

    /// Starts a call in a thread, of which this context is the current one.
    fn start<'s, T: Send + 's>(
        &self,
        scope: &'s Scope<'s, '_>,
        run: impl FnOnce() -> T + Send + 's,
    ) -> Call<'s, T> {
        let context = self.context;
        Call(scope.spawn(move || {
            ok("cuCtxSetCurrent", &[context]);
            run()
        }))
    }

    /// A call that does not wait for the kernel in flight.
    #[track_caller]
    fn at_once<T: Send>(&self, what: &str, run: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let busy = self.busy();
            let call = self.start(scope, run);
            await_that(&format!("{what} comes back"), || call.is_done());
            assert!(self.is_busy(), "{what}: the kernel has ended");
            drop(busy);
            call.end()
        })
    }

    /// A call that waits for the kernel in flight. Launches of others are kept out meanwhile, or they are not.
    #[track_caller]
    fn waits<T: Send>(&self, what: &str, keeps_out: bool, run: impl FnOnce() -> T + Send) -> T {
        let (nothing, stream) = (self.function(c"nothing"), self.streams[1]);
        std::thread::scope(|scope| {
            let busy = self.busy();
            let call = self.start(scope, run);
            await_that(&format!("{what} waits"), || {
                assert!(!call.is_done(), "{what} does not wait");
                WAITING.load(Ordering::Acquire) == 1
            });
            let launch = self.start(scope, move || launch(nothing, stream, &[]));
            if keeps_out {
                await_that(&format!("a launch beside {what} is kept out"), || {
                    assert!(!launch.is_done(), "a launch beside {what} comes back");
                    KEPT_OUT.load(Ordering::Acquire) == 1
                });
            } else {
                await_that(&format!("a launch beside {what}"), || launch.is_done());
            }
            // Questions are free in any case.
            assert!(self.is_busy() && !call.is_done(), "{what} did not wait");
            drop(busy);
            launch.end();
            call.end()
        })
    }

    /// The same with what keeps others out.
    #[track_caller]
    fn holds<T: Send>(&self, what: &str, run: impl FnOnce() -> T + Send) -> T {
        self.waits(what, true, run)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        ON.store(false, Ordering::Relaxed);
        // The primary context is its device's.
        let _ = call("cuCtxDestroy_v2", &[self.context]);
    }
}

/// A kernel in flight.
struct Busy(u64);

impl Busy {
    fn word(&self) -> &AtomicU32 {
        // SAFETY: pinned memory, aligned, which lives as long as its scene.
        unsafe { AtomicU32::from_ptr(self.0 as *mut u32) }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.word().store(1, Ordering::Release);
    }
}

struct Call<'s, T>(ScopedJoinHandle<'s, T>);

impl<T> Call<'_, T> {
    fn is_done(&self) -> bool {
        self.0.is_finished()
    }
    fn end(self) -> T {
        self.0.join().expect("a call that succeeds")
    }
}

#[track_caller]
fn await_that(what: &str, mut comes: impl FnMut() -> bool) {
    let start = Instant::now();
    while !comes() {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn a_module_load_keeps_everybody_out() {
    let scene = Scene::new(true);
    let load = |name: &str| get(name, &[PTX.as_ptr() as u64, 0, 0, 0]);
    for name in [
        "cuModuleLoadData",
        "cuModuleLoadDataEx",
        "cuModuleLoadFatBinary",
    ] {
        let module = scene.holds(name, || load(name));
        // What is in it costs nothing any more.
        let function = scene.at_once("cuModuleGetFunction", || function(module, c"nothing"));
        let stream = scene.streams[1];
        scene.at_once("its first launch", || launch(function, stream, &[]));
    }
}

#[test]
fn with_the_variable_off_nothing_is_kept_out() {
    let scene = Scene::new(false);
    let stream = scene.streams[1];
    scene.at_once("cuModuleLoadData", || {
        get("cuModuleLoadData", &[PTX.as_ptr() as u64])
    });
    let (library, deep) = (library(), scene.function(c"deep"));
    let (first, second) = (kernel(library, c"nothing"), kernel(library, c"other"));
    for kernel in [first, second] {
        scene.at_once("a launch by CUkernel", || launch(kernel, stream, &[]));
    }
    scene.at_once("more local memory", || launch(deep, stream, &[]));
    scene.at_once("cuGraphInstantiate", || instance(graph(Some(deep))));
    scene.at_once("cuArrayDestroy", || ok("cuArrayDestroy", &[array()]));
    // Freeing waits as ever, beside what others launch.
    let memory = get("cuMemAlloc_v2", &[64]);
    let nothing = scene.function(c"nothing");
    std::thread::scope(|scope| {
        let busy = scene.busy();
        let free = scene.start(scope, move || ok("cuMemFree_v2", &[memory]));
        let beside = scene.start(scope, move || launch(nothing, stream, &[]));
        await_that("a launch beside cuMemFree", || beside.is_done());
        assert!(!free.is_done() && scene.is_busy());
        drop(busy);
        free.end();
    });
}

#[test]
fn every_kind_of_submission_is_kept_out() {
    let scene = Scene::new(true);
    let memory = get("cuMemAlloc_v2", &[64]);
    let (event, pool) = (
        get("cuEventCreate", &[0]),
        get("cuDeviceGetDefaultMemPool", &[0]),
    );
    let never = get("cuEventCreate", &[0]);
    let exec = instance(graph(Some(scene.function(c"nothing"))));
    let mut page = vec![0u64; 512];
    let (stream, page) = (scene.streams[1], page.as_mut_ptr() as u64);
    extern "C" fn host(_: u64) {}
    type Calls = Vec<(&'static str, Vec<u64>)>;
    let mut made = [0u64; 4];
    let [pooled, new_stream, new_event, from_pool] =
        std::array::from_fn(|n| &raw mut made[n] as u64);
    let calls: Calls = vec![
        ("cuMemcpyHtoDAsync_v2", vec![memory, page, 8, stream]),
        ("cuMemcpyDtoHAsync_v2", vec![page, memory, 8, stream]),
        ("cuMemcpyDtoDAsync_v2", vec![memory, memory + 8, 8, stream]),
        ("cuMemcpyHtoD_v2", vec![memory, page, 8]),
        ("cuMemsetD32Async", vec![memory, 0, 1, stream]),
        ("cuMemsetD32_v2", vec![memory, 0, 1]),
        ("cuStreamWriteValue32_v2", vec![stream, memory, 1, 0]),
        ("cuStreamWaitValue32_v2", vec![stream, memory, 0, 0]),
        (
            "cuLaunchHostFunc",
            vec![stream, host as *const () as u64, 0],
        ),
        ("cuEventRecord", vec![event, stream]),
        ("cuStreamWaitEvent", vec![stream, event, 0]),
        ("cuStreamWaitEvent", vec![stream, never, 0]),
        ("cuGraphLaunch", vec![exec, stream]),
        ("cuMemAllocAsync", vec![pooled, 64, stream]),
        ("cuMemAllocFromPoolAsync", vec![from_pool, 64, pool, stream]),
        ("cuStreamCreate", vec![new_stream, 1]),
        ("cuEventCreate", vec![new_event, 0]),
        ("cuMemHostRegister_v2", vec![page, 64, 0]),
    ];
    std::thread::scope(|scope| {
        let busy = scene.busy();
        let load = scene.start(scope, || get("cuModuleLoadData", &[PTX.as_ptr() as u64]));
        await_that("the load waits", || WAITING.load(Ordering::Acquire) == 1);
        let all: Vec<_> = calls
            .iter()
            .map(|(name, args)| {
                let call = scene.start(scope, move || ok(name, args));
                (name, call)
            })
            .collect();
        await_that("all stand still", || {
            for (name, call) in &all {
                assert!(!call.is_done(), "{name} is not kept out");
            }
            KEPT_OUT.load(Ordering::Acquire) == all.len()
        });
        // What is free, in this thread.
        assert_eq!(
            call("cuStreamQuery", &[scene.streams[0]]),
            CUDA_ERROR_NOT_READY
        );
        ok("cuStreamQuery", &[stream]);
        ok("cuEventQuery", &[event]);
        ok("cuStreamSynchronize", &[stream]);
        assert!(!load.is_done() && scene.is_busy());
        drop(busy);
        load.end();
        all.into_iter().for_each(|(_, call)| call.end());
    });
}

#[test]
fn a_library_becomes_a_module_at_its_first_use() {
    let scene = Scene::new(true);
    let (mut at, mut bytes) = (0u64, 0u64);
    let outs = [&raw mut at as u64, &raw mut bytes as u64];
    let name = c"variable".as_ptr() as u64;
    let library = scene.at_once("cuLibraryLoadData", library);
    scene.holds("cuLibraryGetModule", || {
        get("cuLibraryGetModule", &[library])
    });
    scene.at_once("cuLibraryGetGlobal of a loaded library", || {
        ok("cuLibraryGetGlobal", &[outs[0], outs[1], library, name])
    });
    let library = self::library();
    scene.holds("cuLibraryGetGlobal", || {
        ok("cuLibraryGetGlobal", &[outs[0], outs[1], library, name])
    });
    let library = self::library();
    scene.holds("cuLibraryGetManaged", || {
        let status = call("cuLibraryGetManaged", &[outs[0], outs[1], library, name]);
        assert_eq!(status, CUDA_ERROR_NOT_FOUND);
    });
    let store = kernel(self::library(), c"store");
    scene.holds("cuKernelGetParamInfo", || {
        ok("cuKernelGetParamInfo", &[store, 0, outs[0], outs[1]])
    });
    let launched = kernel(self::library(), c"nothing");
    let stream = scene.streams[1];
    scene.holds("the first launch by CUkernel", || {
        launch(launched, stream, &[])
    });
    scene.at_once("the second launch", || launch(launched, stream, &[]));
}

#[test]
fn the_launch_after_another_function_of_a_library_waits() {
    let scene = Scene::new(true);
    let (stream, nothing) = (scene.streams[1], scene.function(c"nothing"));
    let library = library();
    let first = scene.at_once("cuLibraryGetKernel", || kernel(library, c"nothing"));
    let second = kernel(library, c"other");
    scene.holds("the first cuKernelGetFunction", || {
        get("cuKernelGetFunction", &[first])
    });
    scene.at_once("the launch after it", || launch(nothing, stream, &[]));
    // Another one comes back at once.
    scene.at_once("another cuKernelGetFunction", || {
        get("cuKernelGetFunction", &[second])
    });
    // Nothing was in flight when the next kernel was launched: it found nothing to wait for, and the others have no need.
    scene.at_once("a launch", || launch(nothing, stream, &[]));
    // Whoever launches next waits, whatever it is, and whoever asked.
    let (context, third) = (scene.context, kernel(library, c"store"));
    scene.holds("the next launch", || {
        let asks = std::thread::spawn(move || {
            ok("cuCtxSetCurrent", &[context]);
            get("cuKernelGetFunction", &[third])
        });
        asks.join().expect("a function");
        launch(nothing, stream, &[]);
    });
    scene.at_once("the same function again, and a launch", || {
        get("cuKernelGetFunction", &[third]);
        launch(nothing, stream, &[]);
    });
}

#[test]
fn a_launch_with_more_local_memory_waits() {
    let scene = Scene::new(true);
    let stream = scene.streams[1];
    let [flat, shallow, deep] = [c"flat", c"shallow", c"deep"].map(|name| scene.function(name));
    scene.at_once("no more than the stack's limit", || {
        launch(flat, stream, &[])
    });
    scene.holds("2048 bytes", || launch(shallow, stream, &[]));
    scene.at_once("2048 bytes again", || launch(shallow, stream, &[]));
    scene.holds("4096 bytes", || launch(deep, stream, &[]));
    scene.at_once("no more than ever", || {
        launch(shallow, stream, &[]);
        launch(deep, stream, &[]);
    });
    let limit = u64::from(CU_LIMIT_STACK_SIZE);
    scene.holds("a limit", || ok("cuCtxSetLimit", &[limit, 2048]));
    scene.at_once("no more than the limit", || launch(shallow, stream, &[]));
    scene.holds("more than it", || launch(deep, stream, &[]));
}

#[test]
fn freeing_and_unregistering_keep_everybody_out() {
    let scene = Scene::new(true);
    let memory = scene.at_once("cuMemAlloc", || get("cuMemAlloc_v2", &[64]));
    scene.holds("cuMemFree", || ok("cuMemFree_v2", &[memory]));
    let pooled = scene.at_once("cuMemAllocAsync", || {
        get("cuMemAllocAsync", &[64, scene.streams[1]])
    });
    scene.at_once("cuMemFreeAsync", || {
        ok("cuMemFreeAsync", &[pooled, scene.streams[1]])
    });
    let pinned = scene.at_once("cuMemAllocHost", || get("cuMemAllocHost_v2", &[64]));
    scene.holds("cuMemFreeHost", || ok("cuMemFreeHost", &[pinned]));
    let mut page = vec![0u64; 512];
    let page = page.as_mut_ptr() as u64;
    scene.at_once("cuMemHostRegister", || {
        ok("cuMemHostRegister_v2", &[page, 4096, 0])
    });
    scene.holds("cuMemHostUnregister", || ok("cuMemHostUnregister", &[page]));
}

#[test]
fn unloading_and_arrays_wait_beside_others() {
    let scene = Scene::new(true);
    let module = get("cuModuleLoadData", &[PTX.as_ptr() as u64]);
    scene.waits("cuModuleUnload", false, || ok("cuModuleUnload", &[module]));
    let (loaded, untouched) = (library(), library());
    get("cuLibraryGetModule", &[loaded]);
    scene.waits("cuLibraryUnload", false, || {
        ok("cuLibraryUnload", &[loaded])
    });
    scene.at_once("cuLibraryUnload of what was never a module", || {
        ok("cuLibraryUnload", &[untouched])
    });
    let array = scene.at_once("cuArrayCreate", array);
    scene.waits("cuArrayDestroy", false, || ok("cuArrayDestroy", &[array]));
    let levels = scene.at_once("cuMipmappedArrayCreate", mipmap);
    scene.waits("cuMipmappedArrayDestroy", false, || {
        ok("cuMipmappedArrayDestroy", &[levels])
    });
}

#[test]
fn instances_of_graphs_with_kernels_keep_everybody_out() {
    let scene = Scene::new(true);
    let (stream, deep) = (scene.streams[1], scene.function(c"deep"));
    let with_kernel = graph(Some(deep));
    let without = graph(None);
    let outer = graph(None);
    get("cuGraphAddChildGraphNode", &[outer, 0, 0, with_kernel]);
    let exec = scene.holds("cuGraphInstantiate", || instance(with_kernel));
    scene.holds("cuGraphInstantiate with a child", || instance(outer));
    scene.at_once("cuGraphInstantiate without kernels", || instance(without));
    scene.at_once("cuGraphLaunch and cuGraphExecDestroy", || {
        ok("cuGraphLaunch", &[exec, stream]);
        ok("cuGraphExecDestroy", &[exec]);
    });
    // Its local memory is there since.
    scene.at_once("a launch of the same kernel", || launch(deep, stream, &[]));
}

#[test]
fn parts_of_a_device_are_their_primary_context() {
    let turn = Scene::turn(true);
    let scene = Scene::within(get("cuDevicePrimaryCtxRetain", &[0]), turn);
    let green = scene.holds("cuGreenCtxCreate", || {
        get(
            "cuGreenCtxCreate",
            &[0, 0, CU_GREEN_CTX_DEFAULT_STREAM.into()],
        )
    });
    let flags = u64::from(CU_STREAM_NON_BLOCKING);
    let stream = scene.holds("cuGreenCtxStreamCreate", || {
        get("cuGreenCtxStreamCreate", &[green, flags, 0])
    });
    // What is in flight in the part's stream counts for the context, and the other way round.
    let nothing = scene.function(c"nothing");
    std::thread::scope(|scope| {
        let busy = scene.busy_in(stream);
        let load = scene.start(scope, || get("cuModuleLoadData", &[PTX.as_ptr() as u64]));
        await_that("the load waits", || {
            assert!(!load.is_done());
            WAITING.load(Ordering::Acquire) == 1
        });
        let beside = scene.start(scope, move || launch(nothing, stream, &[]));
        await_that("a launch in the part is kept out", || {
            assert!(!beside.is_done());
            KEPT_OUT.load(Ordering::Acquire) == 1
        });
        drop(busy);
        load.end();
        beside.end();
    });
    ok("cuGreenCtxDestroy", &[green]);
    drop(scene);
    ok("cuDevicePrimaryCtxRelease_v2", &[0]);
}

#[test]
fn streams_events_and_mappings_do_not_wait() {
    let scene = Scene::new(true);
    let flags = u64::from(CU_STREAM_NON_BLOCKING);
    scene.at_once("streams and events", || {
        let stream = get("cuStreamCreate", &[flags]);
        let event = get("cuEventCreate", &[0]);
        ok("cuEventRecord", &[event, stream]);
        ok("cuStreamSynchronize", &[stream]);
        ok("cuEventDestroy_v2", &[event]);
        ok("cuStreamDestroy_v2", &[stream]);
    });
    let location = CUmemLocation {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: 0,
    };
    let properties = CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        location,
        ..CUmemAllocationProp::default()
    };
    scene.at_once("cuMemCreate, mapped, unmapped, released", || {
        let bytes = crate::memory::GRANULARITY;
        let properties = &raw const properties as u64;
        let physical = get("cuMemCreate", &[bytes, properties, 0]);
        let at = get("cuMemAddressReserve", &[bytes, 0, 0, 0]);
        ok("cuMemMap", &[at, bytes, 0, physical, 0]);
        ok("cuMemUnmap", &[at, bytes]);
        ok("cuMemRelease", &[physical]);
        ok("cuMemAddressFree", &[at, bytes]);
    });
    scene.at_once("cuMemPoolCreate and cuMemPoolDestroy", || {
        let pool = CUmemPoolProps {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            location,
            ..CUmemPoolProps::default()
        };
        let pool = get("cuMemPoolCreate", &[&raw const pool as u64]);
        ok("cuMemPoolDestroy", &[pool]);
    });
}

#[test]
fn contexts_of_a_process_do_not_wait_for_each_other() {
    let scene = Scene::new(true);
    let other = get("cuCtxCreate_v2", &[0, 0]);
    ok("cuCtxSetCurrent", &[scene.context]);
    let library = library();
    let (memory, kernel) = (get("cuMemAlloc_v2", &[64]), kernel(library, c"store"));
    scene.at_once("work in another context", || {
        ok("cuCtxSetCurrent", &[other]);
        let module = get("cuModuleLoadData", &[PTX.as_ptr() as u64]);
        let stream = get("cuStreamCreate", &[CU_STREAM_NON_BLOCKING.into()]);
        launch(function(module, c"deep"), stream, &[]);
        get("cuKernelGetFunction", &[kernel]);
        launch(kernel, stream, &[memory]);
        ok("cuStreamSynchronize", &[stream]);
        // A function is its context's.
        assert_eq!(
            call(
                "cuLaunchKernel",
                &[scene.function(c"nothing"), 1, 1, 1, 1, 1, 1, 0, stream]
            ),
            CUDA_ERROR_INVALID_HANDLE
        );
        ok("cuModuleUnload", &[module]);
    });
    // Memory is the same in all contexts.
    let mut out = 0u32;
    ok("cuMemcpyDtoH_v2", &[&raw mut out as u64, memory, 4]);
    assert_eq!(out, 7);
    // A library is a module of each context by itself.
    scene.holds("the library in the first context", || {
        get("cuLibraryGetModule", &[library])
    });
    // What is freed belongs to the context that made it, whichever is current.
    scene.holds("memory of the busy context, from the other one", || {
        ok("cuCtxSetCurrent", &[other]);
        ok("cuMemFree_v2", &[memory])
    });
    ok("cuCtxSetCurrent", &[other]);
    let others = get("cuMemAlloc_v2", &[64]);
    ok("cuCtxSetCurrent", &[scene.context]);
    scene.at_once("memory of the other context, from the busy one", || {
        ok("cuMemFree_v2", &[others])
    });
    ok("cuCtxDestroy_v2", &[other]);
    scene.at_once("a kernel beside a context that is gone", || {});
}

#[test]
fn the_variable_is_off_unless_it_says_otherwise() {
    for (value, on) in [("1", true), ("0", false), ("", false)] {
        assert_eq!(super::says_on(Some(value.into())), on, "{value:?}");
    }
    assert!(!super::says_on(None));
}
