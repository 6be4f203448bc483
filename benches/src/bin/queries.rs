//! What a query costs that a framework makes hundreds of thousands of times: nanoseconds a call, and a load of an
//! image in milliseconds. One `name=value` per line, as `benches/cuda/microbench.cu` prints.
//!
//! `queries [--rounds N] [--image-mib N]`; run it alone, and under `LD_PRELOAD=libmpsshim.so` with a daemon.
//!
//! `queries --count launch|malloc --rounds N` makes N such calls only, for `benches/instructions.py`.

use mpsshim_api::cuda::*;
use std::ffi::{CString, c_void};
use std::hint::black_box;
use std::ptr::null_mut;
use std::time::Instant;

const PTX: &str = "\
.version 7.0
.target sm_75
.address_size 64
.visible .entry nothing(.param .u64 out) { ret; }
";

/// The address of an entry point.
fn symbol(name: &str) -> *mut c_void {
    let text = CString::new(name).expect("no NUL");
    // SAFETY: NUL-ended names; the library stays open.
    let address = unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!driver.is_null(), "no libcuda.so.1");
        libc::dlsym(driver, text.as_ptr())
    };
    assert!(!address.is_null(), "the driver has no {name}");
    address
}

macro_rules! entry {
    ($name:ident ( $($ty:ty),* )) => {{
        // SAFETY: the signature in cuda.h.
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> CUresult>(symbol(
                stringify!($name),
            ))
        }
    }};
}

/// Calls that must succeed.
macro_rules! must {
    ($function:expr $(, $arg:expr)*) => {{
        // SAFETY: arguments as cuda.h declares them, results have their places.
        let status = unsafe { $function($($arg),*) };
        assert!(status.is_ok(), "{}: {status}", stringify!($function));
    }};
}

macro_rules! query {
    ($name:literal, $rounds:expr, $call:block) => {
        // SAFETY: arguments as cuda.h declares them, results have their places.
        measure($name, $rounds, || unsafe { $call })
    };
}

fn word(name: &str) -> Option<String> {
    let mut words = std::env::args().skip_while(|word| word != name);
    words.nth(1)
}

fn argument(name: &str, otherwise: usize) -> usize {
    word(name).map_or(otherwise, |word| word.parse().expect("a number"))
}

/// Launches of an empty kernel, with a wait behind each 64, or allocations of 1 MiB that are
/// freed at once.
fn count(name: &str, rounds: usize, function: CUfunction) {
    let none: *mut *mut c_void = null_mut();
    type Values = *mut *mut c_void;
    let launch = entry!(cuLaunchKernel(
        CUfunction, u32, u32, u32, u32, u32, u32, u32, CUstream, Values, Values
    ));
    let synchronize = entry!(cuCtxSynchronize());
    let allocate = entry!(cuMemAlloc_v2(*mut CUdeviceptr, usize));
    let free = entry!(cuMemFree_v2(CUdeviceptr));
    let (mut out, mut memory) = (0u64, 0);
    let mut params = [(&raw mut out).cast::<c_void>()];
    for round in 0..rounds {
        match name {
            "launch" => {
                let params = params.as_mut_ptr();
                must!(
                    launch,
                    function,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    0,
                    CUstream::NULL,
                    params,
                    none
                );
                if round % 64 == 63 {
                    must!(synchronize);
                }
            }
            "malloc" => {
                must!(allocate, &mut memory, 1 << 20);
                must!(free, memory);
            }
            _ => panic!("--count takes launch or malloc"),
        }
    }
    must!(synchronize);
}

/// The best of five turns: what the call costs when nothing comes between.
fn measure(name: &str, rounds: usize, mut call: impl FnMut() -> CUresult) {
    let mut best = f64::MAX;
    for _ in 0..5 {
        let began = Instant::now();
        for _ in 0..rounds {
            let status = black_box(call());
            assert!(status.is_ok(), "{name}: {status}");
        }
        best = best.min(began.elapsed().as_nanos() as f64 / rounds as f64);
    }
    println!("{name}_ns={best:.1}");
}

fn main() {
    let rounds = argument("--rounds", 100_000);
    let init = entry!(cuInit(u32));
    let device_get = entry!(cuDeviceGet(*mut CUdevice, i32));
    let retain = entry!(cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice));
    let set_current = entry!(cuCtxSetCurrent(CUcontext));
    let (mut device, mut context) = (0, CUcontext::NULL);
    must!(init, 0);
    must!(device_get, &mut device, 0);
    must!(retain, &mut context, device);
    must!(set_current, context);

    type Names = *mut u32;
    type Values = *mut *mut c_void;
    let load = entry!(
        cuLibraryLoadData(*mut CUlibrary, *const u8, Names, Values, u32, Names, Values, u32)
    );
    let get_kernel = entry!(cuLibraryGetKernel(*mut CUkernel, CUlibrary, *const u8));
    let get_function = entry!(cuKernelGetFunction(*mut CUfunction, CUkernel));
    let image = CString::new(PTX).expect("no NUL");
    let no_names: Names = null_mut();
    let no_values: Values = null_mut();
    let (mut library, mut kernel, mut function) =
        (CUlibrary::NULL, CUkernel::NULL, CUfunction::NULL);
    must!(
        load,
        &mut library,
        image.as_ptr().cast(),
        no_names,
        no_values,
        0,
        no_names,
        no_values,
        0
    );
    must!(get_kernel, &mut kernel, library, c"nothing".as_ptr().cast());
    must!(get_function, &mut function, kernel);

    if let Some(name) = word("--count") {
        return count(&name, rounds, function);
    }
    let ctx_get_device = entry!(cuCtxGetDevice(*mut CUdevice));
    query!("cuCtxGetDevice", rounds, { ctx_get_device(&mut device) });
    let get_current = entry!(cuCtxGetCurrent(*mut CUcontext));
    query!("cuCtxGetCurrent", rounds, { get_current(&mut context) });
    let state = entry!(cuDevicePrimaryCtxGetState(CUdevice, *mut u32, *mut i32));
    let (mut flags, mut active) = (0, 0);
    query!("cuDevicePrimaryCtxGetState", rounds, {
        state(device, &mut flags, &mut active)
    });
    let get_limit = entry!(cuCtxGetLimit(*mut usize, CUlimit));
    let mut limit = 0;
    query!("cuCtxGetLimit", rounds, {
        get_limit(&mut limit, CU_LIMIT_STACK_SIZE)
    });
    let range = entry!(cuCtxGetStreamPriorityRange(*mut i32, *mut i32));
    let (mut least, mut greatest) = (0, 0);
    query!("cuCtxGetStreamPriorityRange", rounds, {
        range(&mut least, &mut greatest)
    });
    let mut value = 0;
    let func_attribute = entry!(cuFuncGetAttribute(*mut i32, u32, CUfunction));
    query!("cuFuncGetAttribute", rounds, {
        func_attribute(
            &mut value,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            function,
        )
    });
    let kernel_attribute = entry!(cuKernelGetAttribute(*mut i32, u32, CUkernel, CUdevice));
    query!("cuKernelGetAttribute", rounds, {
        kernel_attribute(
            &mut value,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            kernel,
            device,
        )
    });
    let set_attribute = entry!(cuKernelSetAttribute(u32, i32, CUkernel, CUdevice));
    query!("cuKernelSetAttribute_same", rounds, {
        set_attribute(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            16_384,
            kernel,
            device,
        )
    });
    let blocks = entry!(
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(*mut i32, CUfunction, i32, usize, u32)
    );
    query!("cuOccupancyMaxActiveBlocks", rounds, {
        blocks(&mut value, function, 128, 0, 0)
    });
    let clusters =
        entry!(cuOccupancyMaxActiveClusters(*mut i32, CUfunction, *const CUlaunchConfig));
    let mut attribute = CUlaunchAttribute {
        id: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: 0,
        value: [0; 64],
    };
    for axis in 0..3 {
        attribute.value[4 * axis] = 1;
    }
    let config = CUlaunchConfig {
        grid: [64, 1, 1],
        block: [128, 1, 1],
        shared_mem_bytes: 0,
        stream: CUstream::NULL,
        attrs: &attribute,
        num_attrs: 1,
    };
    query!("cuOccupancyMaxActiveClusters", rounds, {
        clusters(&mut value, function, &config)
    });
    let pointer_attribute = entry!(cuPointerGetAttribute(*mut u32, u32, CUdeviceptr));
    let alloc = entry!(cuMemAlloc_v2(*mut CUdeviceptr, usize));
    let (mut pointer, mut kind) = (0, 0);
    must!(alloc, &mut pointer, 4096);
    query!("cuPointerGetAttribute", rounds, {
        pointer_attribute(&mut kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
    });

    // An image of many bytes and little content, so that what is measured is its way to the driver.
    let mib = argument("--image-mib", 20);
    let filler = format!("//{}\n", " ".repeat(1021)).repeat(mib << 10);
    let image = CString::new(format!("{PTX}{filler}")).expect("no NUL");
    for turn in ["first", "again"] {
        let began = Instant::now();
        must!(
            load,
            &mut library,
            image.as_ptr().cast(),
            no_names,
            no_values,
            0,
            no_names,
            no_values,
            0
        );
        println!("load_{turn}_ms={:.2}", began.elapsed().as_secs_f64() * 1e3);
    }
}
