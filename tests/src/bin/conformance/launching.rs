//! Launches beyond the plain one: the calls of CUDA 3, attributes, large parameters, tensor maps, kernels that
//! launch kernels; and the corner cases of memsets and one-dimensional copies.

use super::*;

const ATTRIBUTES: &str = concat!(include_str!("../../../fixtures/attributes.ptx"), "\0");

fn module(text: &str) -> CUmodule {
    let mut module = CUmodule::NULL;
    must!(cuModuleLoadData, &mut module, text.as_ptr());
    module
}

fn function(module: CUmodule, name: &str) -> CUfunction {
    let mut function = CUfunction::NULL;
    let text = CString::new(name).expect("no NUL");
    must!(cuModuleGetFunction, &mut function, module, text.as_ptr());
    function
}

/// The launch calls that `cuLaunchKernel` replaced.
pub fn old_launches(setup: &Setup) {
    let function = setup.functions["store_index"];
    let out = alloc(4096);
    let shown = |count: usize| {
        must!(cuCtxSynchronize);
        format!("{:?}", read_i32(out, count))
    };
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    say!("launch without a shape", "{}", cu!(cuLaunch, function));
    must!(cuCtxSynchronize);
    say!(
        "block shape",
        "{}",
        cu!(
            cuFuncSetBlockShape,
            function,
            8 as c_int,
            1 as c_int,
            1 as c_int
        )
    );
    for (x, y, z) in [(0, 1, 1), (-1, 1, 1), (2048, 1, 1), (32, 32, 2), (1, 1, 65)] {
        say!(
            format!("block shape {x} {y} {z}"),
            "{}",
            cu!(
                cuFuncSetBlockShape,
                function,
                x as c_int,
                y as c_int,
                z as c_int
            )
        );
    }
    must!(
        cuFuncSetBlockShape,
        function,
        8 as c_int,
        1 as c_int,
        1 as c_int
    );
    say!(
        "shared size",
        "{}",
        cu!(cuFuncSetSharedSize, function, 128u32)
    );
    say!(
        "shared size 2^30",
        "{}",
        cu!(cuFuncSetSharedSize, function, 1u32 << 30)
    );
    must!(cuFuncSetSharedSize, function, 0u32);
    say!("parameter size", "{}", cu!(cuParamSetSize, function, 16u32));
    say!(
        "parameter size 0",
        "{}",
        cu!(cuParamSetSize, function, 0u32)
    );
    say!(
        "parameter size 5000",
        "{}",
        cu!(cuParamSetSize, function, 5000u32)
    );
    say!(
        "parameter size 2^20",
        "{}",
        cu!(cuParamSetSize, function, 1u32 << 20)
    );
    must!(cuParamSetSize, function, 16u32);
    let mut address = out;
    say!(
        "a pointer",
        "{}",
        cu!(
            cuParamSetv,
            function,
            0 as c_int,
            (&raw mut address).cast::<c_void>(),
            8u32
        )
    );
    say!(
        "a count",
        "{}",
        cu!(cuParamSeti, function, 8 as c_int, 20u32)
    );
    say!(
        "a factor",
        "{}",
        cu!(cuParamSeti, function, 12 as c_int, 3u32)
    );
    say!(
        "beyond the size",
        "{}",
        cu!(cuParamSeti, function, 16 as c_int, 3u32)
    );
    say!("at 3", "{}", cu!(cuParamSeti, function, 3 as c_int, 3u32));
    say!(
        "at 4000",
        "{}",
        cu!(cuParamSeti, function, 4000 as c_int, 3u32)
    );
    say!(
        "no bytes",
        "{}",
        cu!(
            cuParamSetv,
            function,
            0 as c_int,
            (&raw mut address).cast::<c_void>(),
            0u32
        )
    );
    for size in [4096u32, 4097, 32_764, 32_765, 65_536] {
        say!(
            format!("parameter size {size}"),
            "{}",
            cu!(cuParamSetSize, function, size)
        );
    }
    must!(cuParamSetSize, function, 16u32);
    must!(
        cuParamSetv,
        function,
        0 as c_int,
        (&raw mut address).cast::<c_void>(),
        8u32
    );
    say!("launch", "{} {}", cu!(cuLaunch, function), shown(24));
    say!(
        "grid",
        "{} {}",
        cu!(cuLaunchGrid, function, 3 as c_int, 1 as c_int),
        shown(24)
    );
    must!(cuParamSeti, function, 12 as c_int, 5u32);
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    say!(
        "grid in a stream",
        "{} {}",
        cu!(cuLaunchGridAsync, function, 2 as c_int, 1 as c_int, stream),
        shown(24)
    );
    must!(cuStreamDestroy_v2, stream);
    for (x, y) in [(0, 1), (1, 0), (-1, 1), (1, 70_000)] {
        say!(
            format!("grid {x} {y}"),
            "{}",
            cu!(cuLaunchGrid, function, x as c_int, y as c_int)
        );
    }
    must!(cuCtxSynchronize);
    let axpy = setup.functions["axpy"];
    must!(cuMemsetD32_v2, out, 1.0f32.to_bits(), 64usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let mut second = out + 128;
    must!(
        cuFuncSetBlockShape,
        axpy,
        4 as c_int,
        1 as c_int,
        1 as c_int
    );
    must!(cuParamSetSize, axpy, 24u32);
    must!(
        cuParamSetv,
        axpy,
        0 as c_int,
        (&raw mut address).cast::<c_void>(),
        8u32
    );
    must!(
        cuParamSetv,
        axpy,
        8 as c_int,
        (&raw mut second).cast::<c_void>(),
        8u32
    );
    say!("a float", "{}", cu!(cuParamSetf, axpy, 16 as c_int, 2.5f32));
    must!(cuParamSeti, axpy, 20 as c_int, 4u32);
    let result = cu!(cuLaunch, axpy);
    must!(cuCtxSynchronize);
    let values: Vec<f32> = read_i32(out, 5)
        .into_iter()
        .map(|v| f32::from_bits(v as u32))
        .collect();
    say!("a launch with a float", "{result} {values:?}");
    say!(
        "shape of NULL",
        "{}",
        cu!(
            cuFuncSetBlockShape,
            CUfunction::NULL,
            1 as c_int,
            1 as c_int,
            1 as c_int
        )
    );
    say!("launch of NULL", "{}", cu!(cuLaunch, CUfunction::NULL));
    free(out);
}

fn attribute(id: u32, words: &[u32]) -> CUlaunchAttribute {
    let mut attribute = CUlaunchAttribute {
        id,
        pad: 0,
        value: [0; 64],
    };
    for (at, word) in words.iter().enumerate() {
        attribute.value[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
    }
    attribute
}

fn launch_with(
    function: CUfunction,
    grid: u32,
    attributes: &[CUlaunchAttribute],
    stream: CUstream,
    params: &mut [*mut c_void],
) -> CUresult {
    let config = CUlaunchConfig {
        grid: [grid, 1, 1],
        block: [32, 1, 1],
        shared_mem_bytes: 0,
        stream,
        attrs: attributes.as_ptr(),
        num_attrs: attributes.len() as u32,
    };
    cu!(
        cuLaunchKernelEx,
        &config,
        function,
        params.as_mut_ptr(),
        null_mut::<*mut c_void>()
    )
}

pub fn launch_attributes(_: &Setup) {
    let module = module(ATTRIBUTES);
    let out = alloc(4096);
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    let mut event = CUevent::NULL;
    must!(cuEventCreate, &mut event, CU_EVENT_DISABLE_TIMING);
    let mut timing = CUevent::NULL;
    must!(cuEventCreate, &mut timing, CU_EVENT_DEFAULT);
    let run = |what: &str, name: &str, grid: u32, attributes: &[CUlaunchAttribute]| {
        must!(cuMemsetD8_v2, out, 0u8, 4096usize);
        must!(cuCtxSynchronize);
        let mut out_ = out;
        let mut params: [*mut c_void; 1] = [(&raw mut out_).cast()];
        let result = launch_with(
            function(module, name),
            grid,
            attributes,
            stream,
            &mut params,
        );
        let waited = cu!(cuStreamSynchronize, stream);
        say!(what, "{result} {waited} {:?}", read_i32(out, 6));
    };
    use mpsshim_api::cuda as cu;
    let cluster = |x: u32, y: u32| attribute(cu::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &[x, y, 1]);
    run("no attributes", "clusters", 4, &[]);
    run("ignored", "clusters", 4, &[attribute(0, &[])]);
    run("clusters of 2", "clusters", 4, &[cluster(2, 1)]);
    run("clusters of 4", "clusters", 4, &[cluster(4, 1)]);
    run("clusters of 3", "clusters", 4, &[cluster(3, 1)]);
    run("clusters of 0", "clusters", 4, &[cluster(0, 1)]);
    run("clusters of 16", "clusters", 32, &[cluster(16, 1)]);
    run("clusters of 64", "clusters", 64, &[cluster(64, 1)]);
    run("clusters that a kernel fixes", "fixed_clusters", 4, &[]);
    run(
        "clusters that a kernel fixes, 3 blocks",
        "fixed_clusters",
        3,
        &[],
    );
    run(
        "other clusters than a kernel fixes",
        "fixed_clusters",
        4,
        &[cluster(4, 1)],
    );
    let id = |id: u32, words: &[u32]| [attribute(id, words)];
    run(
        "preferred clusters",
        "clusters",
        4,
        &[
            cluster(2, 1),
            attribute(
                cu::CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION,
                &[4, 1, 1],
            ),
        ],
    );
    for policy in 0..4u32 {
        run(
            &format!("cluster scheduling policy {policy}"),
            "clusters",
            4,
            &id(
                cu::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
                &[policy],
            ),
        );
    }
    run(
        "cooperative",
        "cooperative",
        6,
        &id(cu::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &[1]),
    );
    run(
        "cooperative, too many blocks",
        "cooperative",
        1 << 20,
        &id(cu::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &[1]),
    );
    for priority in [0i32, -1, -5, 9, -9] {
        run(
            &format!("priority {priority}"),
            "clusters",
            1,
            &id(cu::CU_LAUNCH_ATTRIBUTE_PRIORITY, &[priority as u32]),
        );
    }
    for domain in 0..3u32 {
        run(
            &format!("memory synchronisation domain {domain}"),
            "clusters",
            1,
            &id(cu::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, &[domain]),
        );
    }
    run(
        "domain map",
        "clusters",
        1,
        &id(cu::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, &[0x0100]),
    );
    run(
        "domain map out of range",
        "clusters",
        1,
        &id(cu::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, &[0xfffe]),
    );
    for carveout in [0u32, 50, 100, u32::MAX, 101] {
        run(
            &format!("carveout {}", carveout as i32),
            "clusters",
            1,
            &id(
                cu::CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                &[carveout],
            ),
        );
    }
    let window = |base: u64, len: u64, ratio: f32, hit: u32, miss: u32| {
        [attribute(
            cu::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
            &[
                base as u32,
                (base >> 32) as u32,
                len as u32,
                (len >> 32) as u32,
                ratio.to_bits(),
                hit,
                miss,
            ],
        )]
    };
    run(
        "access policy window",
        "clusters",
        1,
        &window(out, 4096, 0.5, 2, 1),
    );
    run(
        "access policy window of nothing",
        "clusters",
        1,
        &window(0, 0, 0.0, 0, 0),
    );
    run(
        "access policy window, ratio 2",
        "clusters",
        1,
        &window(out, 4096, 2.0, 2, 1),
    );
    run(
        "access policy window, property 7",
        "clusters",
        1,
        &window(out, 4096, 0.5, 7, 1),
    );
    run(
        "access policy window at 16",
        "clusters",
        1,
        &window(16, 4096, 0.5, 2, 1),
    );
    run(
        "access policy window, 2^40 bytes",
        "clusters",
        1,
        &window(out, 1 << 40, 0.5, 2, 1),
    );
    run(
        "synchronisation policy",
        "clusters",
        1,
        &id(cu::CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &[1]),
    );
    run(
        "nvlink scheduling",
        "clusters",
        1,
        &id(cu::CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING, &[1]),
    );
    run("attribute 15", "clusters", 1, &id(15, &[0]));
    run("attribute 17", "clusters", 1, &id(17, &[0]));
    run("attribute 1000", "clusters", 1, &id(1000, &[0]));
    run(
        "device-updatable node",
        "clusters",
        1,
        &id(cu::CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &[1]),
    );
    run(
        "device-updatable node, off",
        "clusters",
        1,
        &id(cu::CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &[0]),
    );
    // Programmatic dependent launch.
    let mut out_ = out;
    let mut params: [*mut c_void; 1] = [(&raw mut out_).cast()];
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuCtxSynchronize);
    let first = launch_with(function(module, "primary"), 6, &[], stream, &mut params);
    let second = launch_with(
        function(module, "secondary"),
        6,
        &id(
            cu::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            &[1],
        ),
        stream,
        &mut params,
    );
    must!(cuStreamSynchronize, stream);
    say!(
        "dependent launch",
        "{first} {second} {:?}",
        read_i32(out, 6)
    );
    let with_event = |what: &str, id: u32, event: u64, flags: u32, trigger: u32| {
        let attribute = attribute(id, &[event as u32, (event >> 32) as u32, flags, trigger]);
        must!(cuMemsetD8_v2, out, 0u8, 4096usize);
        must!(cuCtxSynchronize);
        let mut out_ = out;
        let mut params: [*mut c_void; 1] = [(&raw mut out_).cast()];
        let result = launch_with(
            function(module, "primary"),
            6,
            &[attribute],
            stream,
            &mut params,
        );
        let waited = cu!(cuStreamSynchronize, stream);
        let queried = if event == 0 {
            CUDA_SUCCESS
        } else {
            cu!(cuEventQuery, CUevent(event))
        };
        say!(what, "{result} {waited} {queried} {:?}", read_i32(out, 6));
    };
    let (programmatic, completion) = (
        cu::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT,
        cu::CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT,
    );
    with_event("programmatic event", programmatic, event.0, 0, 0);
    with_event(
        "programmatic event at block start",
        programmatic,
        event.0,
        0,
        1,
    );
    with_event("programmatic event, timing", programmatic, timing.0, 0, 0);
    with_event("programmatic event, flags 1", programmatic, event.0, 1, 0);
    with_event("programmatic event NULL", programmatic, 0, 0, 0);
    with_event("completion event", completion, event.0, 0, 0);
    with_event("completion event, timing", completion, timing.0, 0, 0);
    with_event("completion event NULL", completion, 0, 0, 0);
    // A second stream that waits for the event.
    let mut other = CUstream::NULL;
    must!(cuStreamCreate, &mut other, CU_STREAM_NON_BLOCKING);
    let mark = attribute(
        programmatic,
        &[event.0 as u32, (event.0 >> 32) as u32, 0, 0],
    );
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuCtxSynchronize);
    let first = launch_with(function(module, "primary"), 6, &[mark], stream, &mut params);
    let waits = cu!(cuStreamWaitEvent, other, event, 0u32);
    let second = launch_with(function(module, "secondary"), 6, &[], other, &mut params);
    must!(cuCtxSynchronize);
    say!("a stream behind the event", "{first} {waits} {second}");
    let many = vec![attribute(0, &[]); 18];
    run("18 attributes", "clusters", 1, &many);
    let twice = [cluster(2, 1), cluster(1, 1)];
    run("one kind twice", "clusters", 4, &twice);
    let config = CUlaunchConfig {
        grid: [1, 1, 1],
        block: [32, 1, 1],
        shared_mem_bytes: 0,
        stream,
        attrs: null(),
        num_attrs: 1,
    };
    let plain = function(module, "clusters");
    say!(
        "attributes that are not there",
        "{}",
        cu!(
            cuLaunchKernelEx,
            &config,
            plain,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        )
    );
    say!(
        "no configuration",
        "{}",
        cu!(
            cuLaunchKernelEx,
            null::<CUlaunchConfig>(),
            plain,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        )
    );
    let result = cu!(
        cuLaunchCooperativeKernel,
        function(module, "cooperative"),
        4u32,
        1u32,
        1u32,
        32u32,
        1u32,
        1u32,
        0u32,
        stream,
        params.as_mut_ptr()
    );
    must!(cuStreamSynchronize, stream);
    say!(
        "cuLaunchCooperativeKernel",
        "{result} {:?}",
        read_i32(out, 4)
    );
    // Parameters of 16,000 bytes.
    let mut words = vec![0u32; 4000];
    words
        .iter_mut()
        .enumerate()
        .for_each(|(i, word)| *word = i as u32);
    let mut params: [*mut c_void; 2] = [(&raw mut out_).cast(), words.as_mut_ptr().cast()];
    let result = launch_with(function(module, "large"), 1, &[], stream, &mut params);
    must!(cuStreamSynchronize, stream);
    say!(
        "16,000 bytes of parameters",
        "{result} {}",
        read_i32(out, 1)[0]
    );
    must!(cuEventDestroy_v2, event);
    must!(cuEventDestroy_v2, timing);
    must!(cuStreamDestroy_v2, stream);
    must!(cuStreamDestroy_v2, other);
    must!(cuModuleUnload, module);
    free(out);
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
struct LaunchParams {
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: CUstream,
    params: *mut *mut c_void,
}

pub fn multi_device_launches(_: &Setup) {
    let module = module(ATTRIBUTES);
    let out = alloc(4096);
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    let mut out_ = out;
    let mut params: [*mut c_void; 1] = [(&raw mut out_).cast()];
    let mut launch = |what: &str, count: u32, flags: u32, stream: CUstream, list: bool| {
        must!(cuMemsetD8_v2, out, 0u8, 4096usize);
        must!(cuCtxSynchronize);
        let mut launches = LaunchParams {
            function: function(module, "cooperative"),
            grid: [4, 1, 1],
            block: [32, 1, 1],
            shared: 0,
            stream,
            params: params.as_mut_ptr(),
        };
        let list = if list { &raw mut launches } else { null_mut() };
        let result = cu!(cuLaunchCooperativeKernelMultiDevice, list, count, flags);
        must!(cuCtxSynchronize);
        say!(what, "{result} {:?}", read_i32(out, 4));
    };
    launch("one device", 1, 0, stream, true);
    launch("no device", 0, 0, stream, true);
    launch("two devices for one launch", 9999, 0, stream, true);
    launch("flags 3", 1, 3, stream, true);
    launch("flags 4", 1, 4, stream, true);
    launch("the default stream", 1, 0, CUstream::NULL, true);
    launch("no list", 1, 0, stream, false);
    must!(cuStreamDestroy_v2, stream);
    must!(cuModuleUnload, module);
    free(out);
}

#[repr(C, align(128))]
#[derive(Clone, Copy, PartialEq)]
struct TensorMap([u64; 16]);

fn hash(map: &TensorMap) -> u64 {
    let bytes: Vec<u8> = map.0.iter().flat_map(|word| word.to_le_bytes()).collect();
    checksum(&bytes)
}

pub fn tensor_maps(_: &Setup) {
    const AT: u64 = 0x7f00_0000_0000;
    let mut map = TensorMap([0; 16]);
    let mut tiled = |what: &str, kind: u32, rank: u32, at: u64, box_: u32, more: [u32; 4]| {
        map = TensorMap([0; 16]);
        let result = cu!(
            cuTensorMapEncodeTiled,
            &mut map,
            kind,
            rank,
            at,
            [64u64, 32, 16, 8, 4].as_ptr(),
            [256u64, 256 * 32, 256 * 32 * 16, 256 * 32 * 16 * 8].as_ptr(),
            [box_, 8, 2, 1, 1].as_ptr(),
            [1u32, 1, 1, 1, 1].as_ptr(),
            more[0],
            more[1],
            more[2],
            more[3]
        );
        // What the driver has written when it refuses is not looked at.
        say!(
            what,
            "{result} {:016x}",
            if result.is_ok() { hash(&map) } else { 0 }
        );
    };
    tiled("2D", 7, 2, AT, 16, [0; 4]);
    tiled("5D", 7, 5, AT, 16, [0; 4]);
    tiled("swizzled", 7, 3, AT, 32, [0, 3, 2, 0]);
    tiled("bfloat16, filled with NaN", 9, 3, AT, 32, [0, 2, 1, 1]);
    tiled("interleaved", 7, 3, AT, 8, [2, 1, 0, 0]);
    tiled("kind 99", 99, 2, AT, 16, [0; 4]);
    tiled("rank 0", 7, 0, AT, 16, [0; 4]);
    tiled("rank 6", 7, 6, AT, 16, [0; 4]);
    tiled("address 4", 7, 2, AT + 4, 16, [0; 4]);
    tiled("address 0", 7, 2, 0, 16, [0; 4]);
    tiled("box 257", 7, 2, AT, 257, [0; 4]);
    tiled("box 0", 7, 2, AT, 0, [0; 4]);
    let mut map = TensorMap([0; 16]);
    let result = cu!(
        cuTensorMapEncodeIm2col,
        &mut map,
        6u32,
        4u32,
        AT,
        [64u64, 32, 16, 8].as_ptr(),
        [128u64, 128 * 32, 128 * 32 * 16].as_ptr(),
        [0 as c_int, 0].as_ptr(),
        [-1 as c_int, -1].as_ptr(),
        32u32,
        16u32,
        [1u32, 1, 1, 1].as_ptr(),
        0u32,
        2u32,
        0u32,
        0u32
    );
    say!("im2col", "{result} {:016x}", hash(&map));
    let mut wide = TensorMap([0; 16]);
    let result = cu!(
        cuTensorMapEncodeIm2colWide,
        &mut wide,
        6u32,
        4u32,
        AT,
        [64u64, 32, 16, 8].as_ptr(),
        [128u64, 128 * 32, 128 * 32 * 16].as_ptr(),
        0 as c_int,
        0 as c_int,
        32u32,
        16u32,
        [1u32, 1, 1, 1].as_ptr(),
        0u32,
        0u32,
        3u32,
        0u32,
        0u32
    );
    say!("im2col, wide", "{result} {:016x}", hash(&wide));
    let before = map;
    say!(
        "another address",
        "{} {:016x} {}",
        cu!(cuTensorMapReplaceAddress, &mut map, AT + 4096),
        hash(&map),
        map == before
    );
    say!(
        "an odd address",
        "{}",
        cu!(cuTensorMapReplaceAddress, &mut map, AT + 1)
    );
}

/// Memsets and plain copies at their edges.
pub fn corner_cases(setup: &Setup) {
    let a = alloc(1 << 16);
    let mut pinned: *mut u8 = null_mut();
    must!(
        cuMemHostAlloc,
        &mut pinned,
        1usize << 16,
        CU_MEMHOSTALLOC_DEVICEMAP
    );
    let mut local = [0u8; 256];
    let pageable = local.as_mut_ptr() as u64;
    let stream = CUstream::NULL;
    for (what, at, pitch, width, height) in [
        ("plain", a, 64usize, 8usize, 4usize),
        ("no width", a, 64, 0, 4),
        ("no height", a, 64, 8, 0),
        ("no width at NULL", 0, 64, 0, 4),
        ("no height at 16", 16, 64, 8, 0),
        ("nothing, pageable", pageable, 64, 0, 0),
        ("pitch below width", a, 2, 8, 4),
        ("pitch 0", a, 0, 8, 4),
        ("pitch 0, one row", a, 0, 8, 1),
        ("pitch below width, one row", a, 2, 8, 1),
        ("pitch of odd bytes", a, 65, 8, 4),
        ("pitch of odd bytes, one row", a, 65, 8, 1),
        ("address odd", a + 1, 64, 8, 4),
        ("address at 2", a + 2, 64, 8, 4),
        ("address odd, one row", a + 1, 64, 8, 1),
        ("address odd, no rows", a + 1, 64, 8, 0),
        ("pitch 2^31", a, 1 << 31, 8, 1),
        ("pitch 2^40", a, 1 << 40, 8, 2),
        ("width 2^62", a, 1 << 62, 1 << 62, 1),
        ("height 2^50", a, 64, 8, 1 << 50),
        ("NULL", 0, 64, 8, 4),
        ("16", 16, 64, 8, 4),
        ("pageable", pageable, 64, 8, 1),
        ("pinned", pinned as u64, 64, 8, 4),
    ] {
        let d8 = cu!(cuMemsetD2D8_v2, at, pitch, 1u8, width, height);
        let d16 = cu!(cuMemsetD2D16_v2, at, pitch, 1u16, width, height);
        let d32 = cu!(cuMemsetD2D32_v2, at, pitch, 1u32, width, height);
        let later = cu!(cuMemsetD2D32Async, at, pitch, 1u32, width, height, stream);
        must!(cuCtxSynchronize);
        say!(format!("rows, {what}"), "{d8} {d16} {d32} {later}");
    }
    for (what, at, count) in [
        ("plain", a, 8usize),
        ("nothing", a, 0),
        ("nothing at NULL", 0, 0),
        ("nothing at 16", 16, 0),
        ("nothing at an odd address", a + 1, 0),
        ("odd", a + 1, 8),
        ("at 2", a + 2, 8),
        ("NULL", 0, 8),
        ("16", 16, 8),
        ("2^62", a, 1 << 62),
        ("2^40", a, 1 << 40),
        ("pageable", pageable, 8),
        ("pinned", pinned as u64, 8),
        ("odd and pinned", pinned as u64 + 1, 8),
    ] {
        let d8 = cu!(cuMemsetD8_v2, at, 1u8, count);
        let d16 = cu!(cuMemsetD16_v2, at, 1u16, count);
        let d32 = cu!(cuMemsetD32_v2, at, 1u32, count);
        let later = cu!(cuMemsetD16Async, at, 1u16, count, stream);
        must!(cuCtxSynchronize);
        say!(what, "{d8} {d16} {d32} {later}");
    }
    for (what, to, from, count) in [
        ("nothing", a, pageable, 0usize),
        ("nothing to NULL", 0, pageable, 0),
        ("nothing from NULL", a, 0, 0),
        ("nothing to 16", 16, pageable, 0),
        ("overlapping", a, a + 64, 256),
        ("to itself", a, a, 256),
        ("2^40 bytes", a, a + 64, 1 << 40),
        ("from NULL", a, 0, 16),
        ("to NULL", 0, a, 16),
        ("pinned", a, pinned as u64, 100),
    ] {
        let unified = cu!(cuMemcpy, to, from, count);
        let inside = cu!(cuMemcpyDtoD_v2, to, from, count);
        let later = cu!(cuMemcpyDtoDAsync_v2, to, from, count, stream);
        must!(cuCtxSynchronize);
        say!(format!("copy, {what}"), "{unified} {inside} {later}");
    }
    let mut pointer: CUdeviceptr = 0;
    let mut pitch = 0usize;
    for (what, width, height, element) in [
        ("plain", 100usize, 10usize, 4u32),
        ("of 8", 100, 10, 8),
        ("of 16", 100, 10, 16),
        ("of 1", 100, 10, 1),
        ("of 2", 100, 10, 2),
        ("of 0", 100, 10, 0),
        ("of 32", 100, 10, 32),
        ("no width", 0, 10, 4),
        ("no height", 10, 0, 4),
        ("too much", 1 << 40, 1 << 20, 4),
        ("overflow", usize::MAX - 3, 2, 4),
        ("width 2^31", 1 << 31, 1, 4),
    ] {
        pointer = 0;
        let result = cu!(
            cuMemAllocPitch_v2,
            &mut pointer,
            &mut pitch,
            width,
            height,
            element
        );
        say!(
            format!("pitch, {what}"),
            "{result} {}",
            if pointer == 0 { 0 } else { pitch }
        );
        if pointer != 0 {
            free(pointer);
        }
    }
    for width in [1usize, 511, 512, 513, 1000, 5000] {
        must!(
            cuMemAllocPitch_v2,
            &mut pointer,
            &mut pitch,
            width,
            3usize,
            4u32
        );
        say!(format!("pitch of {width}"), "{pitch}");
        free(pointer);
    }
    say!(
        "pitch without a place",
        "{}",
        cu!(
            cuMemAllocPitch_v2,
            &mut pointer,
            null_mut::<usize>(),
            4usize,
            4usize,
            4u32
        )
    );
    must!(cuMemFreeHost, pinned);
    free(a);
    for (what, format, channels) in [
        ("float", CU_AD_FORMAT_FLOAT, 1u32),
        ("four floats", CU_AD_FORMAT_FLOAT, 4),
        ("bytes", CU_AD_FORMAT_UNSIGNED_INT8, 1),
        ("three channels", CU_AD_FORMAT_FLOAT, 3),
        ("no channels", CU_AD_FORMAT_FLOAT, 0),
        ("format 0", 0, 1),
    ] {
        let mut most = 7usize;
        let result = cu!(
            cuDeviceGetTexture1DLinearMaxWidth,
            &mut most,
            format,
            channels,
            setup.device
        );
        say!(
            format!("linear texture, {what}"),
            "{result} {}",
            most >= 1 << 20
        );
    }
    let mut most = 0usize;
    say!(
        "linear texture, no device",
        "{}",
        cu!(
            cuDeviceGetTexture1DLinearMaxWidth,
            &mut most,
            CU_AD_FORMAT_FLOAT,
            1u32,
            99 as c_int
        )
    );
}

/// Kernels that launch kernels.
pub fn nested_launches(_: &Setup) {
    const NESTED: &[u8] = include_bytes!("../../../fixtures/nested.fatbin");
    let mut value = 0usize;
    for (what, limit) in [("launches pending", 4u32), ("depth", 3)] {
        let got = cu!(cuCtxGetLimit, &mut value, limit);
        say!(what, "{got} {}", value > 0);
    }
    say!("4096 pending", "{}", cu!(cuCtxSetLimit, 4u32, 4096usize));
    must!(cuCtxGetLimit, &mut value, 4u32);
    say!("that is", "{value}");
    say!("depth 2", "{}", cu!(cuCtxSetLimit, 3u32, 2usize));
    let mut module = CUmodule::NULL;
    let result = cu!(cuModuleLoadData, &mut module, NESTED.as_ptr());
    say!("load", "{result}");
    if !result.is_ok() {
        return;
    }
    let out = alloc(4096);
    for round in 0..3 {
        must!(cuMemsetD8_v2, out, 0u8, 4096usize);
        must!(cuStreamSynchronize, CUstream::NULL);
        let mut out_ = out;
        let mut params: [*mut c_void; 1] = [(&raw mut out_).cast()];
        let result = cu!(
            cuLaunchKernel,
            function(module, "parent"),
            1u32,
            1u32,
            1u32,
            1u32,
            1u32,
            1u32,
            0u32,
            CUstream::NULL,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        );
        let waited = cu!(cuCtxSynchronize);
        say!(
            format!("round {round}"),
            "{result} {waited} {:?}",
            read_i32(out, 12)
        );
    }
    must!(cuModuleUnload, module);
    free(out);
}
