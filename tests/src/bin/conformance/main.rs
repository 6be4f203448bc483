//! Walks through the driver API and prints one line per finding, each the same on every driver that behaves.
//!
//! The expected lines, `tests/fixtures/conformance.expected`, were recorded on the genuine driver without the
//! shim; through the shim, and on softgpu, they must come out the same. Nothing printed depends on the device.
//! `conformance [SECTION…]` runs only these sections. The further sections ([`FURTHER`]) run when they are named;
//! each has a file of its own in `tests/fixtures/conformance/`. `conformance --list` names them.

use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

const PTX: &str = concat!(include_str!("../../../fixtures/conformance.ptx"), "\0");

macro_rules! say { ($what:expr, $($value:tt)*) => { println!("{}: {}", $what, format_args!($($value)*)) }; }

/// A call that must succeed for the rest to make sense.
macro_rules! must {
    ($name:ident $(, $arg:expr)* $(,)?) => {{
        let result = cu!($name $(, $arg)*);
        assert!(result.is_ok(), "{} failed: {result}", stringify!($name));
    }};
}

mod arrays;
mod capture;
mod codes;
mod contexts;
mod graphs;
mod green;
mod hostfn;
mod images;
mod kernels;
mod launching;
mod libraries;
mod managed;
mod memory;
mod nulls;
mod params;
mod peers;
mod pools;
mod rectangles;
mod registered;
mod sharing;
mod streamcalls;
mod streams;
mod textures;
mod virtual_memory;

use contexts::{before_init, contexts, names, threads};
use kernels::{absent_fault, launches, modules, occupancy, short_parameters};
use memory::{copies, host_memory, memory};
use streams::{events, streams};

/// How long a slow kernel lasts, in ticks of the device's clock.
const SLOW_CYCLES: i64 = 20_000_000;
/// What it lasts at the least: no device has more than 2.5 ticks a nanosecond.
const SLOW: Duration = Duration::from_nanos(SLOW_CYCLES as u64 * 2 / 5);

/// Launches a kernel in one dimension: blocks, threads of each, bytes of dynamic shared memory of each.
fn launch_function(
    function: CUfunction,
    (grid, block, shared): (u32, u32, u32),
    stream: CUstream,
    params: &mut [*mut c_void],
) -> CUresult {
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
        launch_function(self.functions[name], (grid, block, shared), stream, params)
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

/// Sections that run when they are named.
const FURTHER: &[Section] = &[
    ("short_parameters", short_parameters),
    ("large_parameters", params::large_parameters),
    ("array_copies", rectangles::array_copies),
    ("array_graphs", rectangles::array_graphs),
    ("array_kinds", arrays::array_kinds),
    ("arrays", arrays::arrays),
    ("copies_2d", rectangles::copies_2d),
    ("copies_2d_refused", rectangles::copies_2d_refused),
    ("copies_3d", rectangles::copies_3d),
    ("copies_3d_batch", rectangles::copies_3d_batch),
    ("copies_3d_refused", rectangles::copies_3d_refused),
    ("corner_cases", launching::corner_cases),
    ("launch_attributes", launching::launch_attributes),
    ("context_details", green::context_details),
    ("green_contexts", green::green_contexts),
    ("load_options", images::options),
    ("linker", images::linker),
    ("libraries", libraries::libraries),
    ("library_contexts", libraries::contexts),
    ("mipmaps", arrays::mipmaps),
    ("multi_device_launches", launching::multi_device_launches),
    ("nested_launches", launching::nested_launches),
    ("old_launches", launching::old_launches),
    ("null_codes", nulls::null_codes),
    ("pools", pools::pools),
    ("pools_destroyed", pools::pools_destroyed),
    ("stale_arrays", arrays::stale_arrays),
    ("tensor_maps", launching::tensor_maps),
    ("texture_objects", arrays::texture_objects),
    ("texture_references", textures::texture_references),
    ("textures", textures::textures),
    ("virtual_memory", virtual_memory::virtual_memory),
    ("host_functions", hostfn::host_functions),
    ("host_function_calls", hostfn::host_function_calls),
    ("memory_operations", hostfn::memory_operations),
    ("memory_operations_v1", hostfn::memory_operations_v1),
    ("capture", capture::capture),
    ("capture_unsafe", capture::capture_unsafe),
    ("capture_further", capture::capture_further),
    ("captured_addresses", capture::captured_addresses),
    ("captured_kinds", capture::captured_kinds),
    ("null_arguments", codes::null_arguments),
    ("primary_flags", codes::primary_flags),
    ("primary_reset", codes::primary_reset),
    ("graph_build", graphs::graph_build),
    ("graph_edges", graphs::graph_edges),
    ("graph_params", graphs::graph_params),
    ("graph_exec", graphs::graph_exec),
    ("graph_host", graphs::graph_host),
    ("graph_memory", graphs::graph_memory),
    ("graph_neighbours", graphs::graph_neighbours),
    ("graph_conditional", graphs::graph_conditional),
    ("user_objects", graphs::user_objects),
    ("pool_sharing", sharing::pool_sharing),
    ("managed", managed::managed),
    ("ipc_memory", sharing::ipc_memory),
    ("ipc_events", sharing::ipc_events),
    ("registered", sharing::registered),
    ("registered_elsewhere", registered::registered_elsewhere),
    ("registered_fork", registered::registered_fork),
    ("registered_pages", registered::registered_pages),
    ("registered_remapped", registered::registered_remapped),
    ("registered_stack", sharing::registered_stack),
    ("registered_writers", registered::registered_writers),
    ("batches", sharing::batches),
    ("two_devices", peers::two_devices),
    ("stream_attributes", streamcalls::stream_attributes),
    ("event_calls", streamcalls::event_calls),
    ("refused_at_once", streamcalls::refused_at_once),
    ("services", streamcalls::services),
    ("context_services", streamcalls::context_services),
    ("assertion", kernels::assertion),
];

/// Its name and what it does.
type Section = (&'static str, fn(&Setup));

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    if wanted.iter().any(|word| word == "--list") {
        FURTHER.iter().for_each(|(name, _)| println!("{name}"));
        return;
    }
    if let [word, handle] = wanted.as_slice()
        && word == "--open"
    {
        return sharing::open(handle);
    }
    if wanted == ["--hold"] {
        return registered::hold();
    }
    if let [word, handle] = wanted.as_slice()
        && word == "--open-event"
    {
        return sharing::open_event(handle);
    }
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
    for (name, section) in FURTHER {
        if wanted.iter().any(|word| word == name) {
            println!("[{name}]");
            section(&setup);
        }
    }
    if want("fault") {
        println!("[fault]");
        absent_fault(&setup);
    }
}
