//! What calls are given, and what they give, lies in managed memory that the device had last.

use super::kernels::{OFFSETS, Params, THREADS, grid, ptx};
use super::*;
use std::mem::offset_of;

/// A block of managed memory in which the device puts things, one after another.
struct Desk<'a> {
    setup: &'a Setup,
    at: u64,
    used: usize,
}

const DESK: usize = 64 << 10;

impl Desk<'_> {
    /// Where the device has written these bytes.
    fn put(&mut self, bytes: &[u8]) -> Outcome<u64> {
        let start = self.used.next_multiple_of(16);
        if start + bytes.len() > DESK {
            self.used = 0;
            return self.put(bytes);
        }
        self.used = start + bytes.len();
        let at = self.at + start as u64;
        self.setup.device_writes(at, bytes)?;
        Ok(at)
    }

    fn words(&mut self, words: &[u64]) -> Outcome<u64> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.put(&bytes)
    }

    fn text(&mut self, text: &str) -> Outcome<u64> {
        self.put(format!("{text}\0").as_bytes())
    }
}

fn word(at: u64) -> u64 {
    u64::from_le_bytes(host(at, 8).try_into().expect("8 bytes"))
}

fn number(at: u64) -> i32 {
    i32::from_le_bytes(host(at, 4).try_into().expect("4 bytes"))
}

fn equal<T: PartialEq + std::fmt::Debug>(what: &str, expected: T, got: T) -> Outcome {
    match expected == got {
        true => Ok(()),
        false => Err(format!("{what}: {expected:?} expected, got {got:?}")),
    }
}

/// The bytes of a struct of a call.
fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: structs of the driver's calls without gaps.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }.to_vec()
}

/// A block that kernels add to, and its model.
struct Target {
    at: u64,
    model: Vec<u8>,
}

impl Target {
    fn params(&self, value: u32) -> Params {
        Params {
            to: self.at,
            from: 0,
            count: self.model.len() as u32,
            value,
            step: 0,
            width: 0,
        }
    }

    fn added(&mut self, what: &str, value: u32) -> Outcome {
        add_bytes(&mut self.model, value);
        must!(cuCtxSynchronize);
        compare(what, self.at, &self.model)
    }
}

fn launches(desk: &mut Desk<'_>, target: &mut Target, random: &mut Random) -> Outcome {
    let function = desk.setup.kernels.add_bytes;
    let none = nothing();
    let blocks = grid(target.model.len());

    // Pointers to parameters.
    let value = random.number() as u32;
    let params = desk.put(&target.params(value).bytes())?;
    let pointers = desk.words(&OFFSETS.map(|offset| params + offset as u64))?;
    must!(
        cuLaunchKernel,
        function,
        blocks,
        1u32,
        1u32,
        THREADS,
        1u32,
        1u32,
        0u32,
        CUstream::NULL,
        pointers as *mut *mut c_void,
        none
    );
    target.added("cuLaunchKernel with an array of parameters", value)?;

    // A buffer of parameters.
    let value = random.number() as u32;
    let buffer = desk.put(&target.params(value).bytes())?;
    let size = desk.words(&[32])?;
    let extra = desk.words(&[
        CU_LAUNCH_PARAM_BUFFER_POINTER as u64,
        buffer,
        CU_LAUNCH_PARAM_BUFFER_SIZE as u64,
        size,
        CU_LAUNCH_PARAM_END as u64,
    ])?;
    must!(
        cuLaunchKernel,
        function,
        blocks,
        1u32,
        1u32,
        THREADS,
        1u32,
        1u32,
        0u32,
        CUstream::NULL,
        none,
        extra as *mut *mut c_void
    );
    target.added("cuLaunchKernel with a buffer", value)?;

    // A configuration.
    let value = random.number() as u32;
    let config = CUlaunchConfig {
        grid: [blocks, 1, 1],
        block: [THREADS, 1, 1],
        shared_mem_bytes: 0,
        stream: CUstream::NULL,
        attrs: std::ptr::null(),
        num_attrs: 0,
    };
    // Field by field, since the struct ends with a gap.
    let mut bytes = vec![0u8; size_of::<CUlaunchConfig>()];
    let dimensions = [blocks, 1, 1, THREADS, 1, 1, config.shared_mem_bytes];
    for (at, dimension) in dimensions.into_iter().enumerate() {
        bytes[4 * at..4 * at + 4].copy_from_slice(&dimension.to_le_bytes());
    }
    let stream = offset_of!(CUlaunchConfig, stream);
    bytes[stream..stream + 8].copy_from_slice(&config.stream.0.to_le_bytes());
    let config = desk.put(&bytes)?;
    let params = desk.put(&target.params(value).bytes())?;
    let pointers = desk.words(&OFFSETS.map(|offset| params + offset as u64))?;
    must!(
        cuLaunchKernelEx,
        config as *const CUlaunchConfig,
        function,
        pointers as *mut *mut c_void,
        none
    );
    target.added("cuLaunchKernelEx", value)?;

    // A node of a graph.
    let value = random.number() as u32;
    let params = desk.put(&target.params(value).bytes())?;
    let pointers = desk.words(&OFFSETS.map(|offset| params + offset as u64))?;
    let node = desk.put(&bytes_of(&CUDA_KERNEL_NODE_PARAMS {
        function: function.0,
        grid: [blocks, 1, 1],
        block: [THREADS, 1, 1],
        params: pointers,
        ..CUDA_KERNEL_NODE_PARAMS::default()
    }))?;
    let out = desk.words(&[0; 3])?;
    must!(cuGraphCreate, out, 0 as c_uint);
    must!(
        cuGraphAddKernelNode_v2,
        out + 8,
        CUgraph(word(out)),
        std::ptr::null::<CUgraphNode>(),
        0usize,
        node
    );
    must!(
        cuGraphInstantiateWithFlags,
        out + 16,
        CUgraph(word(out)),
        0u64
    );
    for _ in 0..2 {
        must!(cuGraphLaunch, CUgraphExec(word(out + 16)), CUstream::NULL);
        target.added("cuGraphLaunch of a node", value)?;
    }
    must!(cuGraphExecDestroy, CUgraphExec(word(out + 16)));
    must!(cuGraphDestroy, CUgraph(word(out)));
    Ok(())
}

fn names(desk: &mut Desk<'_>, target: &mut Target, random: &mut Random) -> Outcome {
    let image = desk.text(&ptx())?;
    let module = desk.words(&[0])?;
    must!(cuModuleLoadData, module, image);
    let name = desk.text("add_bytes")?;
    let function = desk.words(&[0])?;
    must!(cuModuleGetFunction, function, CUmodule(word(module)), name);
    let value = random.number() as u32;
    let work = Work {
        to: target.at,
        count: target.model.len(),
        value,
        ..Work::default()
    };
    desk.setup
        .kernels
        .launch(CUfunction(word(function)), CUstream::NULL, &work)?;
    target.added("a function by its name", value)?;
    must!(cuModuleUnload, CUmodule(word(module)));
    Ok(())
}

fn descriptors(desk: &mut Desk<'_>, random: &mut Random) -> Outcome {
    const PITCH: usize = 100;
    const ROWS: usize = 20;
    let from = allocate(PITCH * ROWS)?;
    let bytes = random.bytes(PITCH * ROWS);
    desk.setup.device_writes(from, &bytes)?;
    let mut to = vec![0u8; PITCH * ROWS];
    let descriptor = desk.put(&bytes_of(&CUDA_MEMCPY2D {
        src_type: CU_MEMORYTYPE_DEVICE,
        src_device: from,
        src_pitch: PITCH as u64,
        dst_type: CU_MEMORYTYPE_HOST,
        dst_host: to.as_mut_ptr() as u64,
        dst_pitch: PITCH as u64,
        width: 61,
        height: ROWS as u64,
        ..CUDA_MEMCPY2D::default()
    }))?;
    must!(cuMemcpy2D_v2, descriptor);
    for (row, got) in to.chunks_exact(PITCH).enumerate() {
        let start = row * PITCH;
        same(
            "a row",
            from + start as u64,
            &bytes[start..start + 61],
            &got[..61],
        )?;
        same(
            "beside a row",
            from + start as u64,
            &[0; PITCH - 61],
            &got[61..],
        )?;
    }
    free(from)
}

/// Calls that write through pointers.
fn results(desk: &mut Desk<'_>) -> Outcome {
    let out = desk.words(&[!0; 4])?;
    must!(cuMemAlloc_v2, out, 1000usize);
    let device = word(out);
    must!(
        cuPointerGetAttribute,
        out + 8,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        device + 5
    );
    equal("the start of a range", device, word(out + 8))?;
    must!(cuMemFree_v2, device);
    let out = desk.words(&[!0; 4])?;
    must!(cuDeviceGetCount, out);
    equal("there is a device", true, number(out) >= 1)?;
    must!(cuDriverGetVersion, out + 8);
    let mut version: c_int = 0;
    must!(cuDriverGetVersion, &mut version);
    equal("the driver's version", version, number(out + 8))?;
    let out = desk.words(&[!0; 4])?;
    must!(cuMemGetInfo_v2, out, out + 8);
    equal(
        "free memory is part of all",
        true,
        word(out) <= word(out + 8),
    )?;
    let out = desk.words(&[!0; 4])?;
    must!(cuStreamCreate, out, CU_STREAM_NON_BLOCKING);
    must!(cuStreamSynchronize, CUstream(word(out)));
    must!(cuStreamDestroy_v2, CUstream(word(out)));
    let out = desk.words(&[!0; 4])?;
    must!(cuCtxGetCurrent, out);
    equal("the context", desk.setup.context.0, word(out))?;
    let out = desk.put(&[0xff; 100])?;
    must!(cuDeviceGetName, out, 100 as c_int, desk.setup.device);
    let mut name = [0u8; 100];
    must!(
        cuDeviceGetName,
        name.as_mut_ptr(),
        100 as c_int,
        desk.setup.device
    );
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(99);
    compare("the device's name", out, &name[..=end])?;
    // Two events and the time between them.
    let out = desk.words(&[!0; 4])?;
    for at in [out, out + 8] {
        must!(cuEventCreate, at, 0 as c_uint);
        must!(cuEventRecord, CUevent(word(at)), CUstream::NULL);
    }
    must!(cuCtxSynchronize);
    must!(
        cuEventElapsedTime,
        out + 16,
        CUevent(word(out)),
        CUevent(word(out + 8))
    );
    let took = f32::from_bits(number(out + 16) as u32);
    equal("a time", true, (0.0..1e6).contains(&took))?;
    for at in [out, out + 8] {
        must!(cuEventDestroy_v2, CUevent(word(at)));
    }
    Ok(())
}

unsafe extern "C" fn double(data: *mut c_void) {
    let at = data as u64;
    let doubled = word(at).wrapping_mul(2);
    host(at + 8, 8).copy_from_slice(&doubled.to_le_bytes());
}

/// A host function whose data lies there.
fn functions(desk: &mut Desk<'_>, random: &mut Random) -> Outcome {
    let value = random.number();
    let data = desk.words(&[value, 0])?;
    must!(
        cuLaunchHostFunc,
        CUstream::NULL,
        double as HostFunction,
        data as *mut c_void
    );
    must!(cuCtxSynchronize);
    equal("a host function", value.wrapping_mul(2), word(data + 8))
}

pub fn params(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let mut desk = Desk {
        setup,
        at: allocate(DESK)?,
        used: 0,
    };
    loop {
        let len = random.size(20_000);
        let mut target = Target {
            at: allocate(len)?,
            model: random.bytes(len),
        };
        host(target.at, len).copy_from_slice(&target.model);
        launches(&mut desk, &mut target, random)?;
        names(&mut desk, &mut target, random)?;
        descriptors(&mut desk, random)?;
        results(&mut desk)?;
        functions(&mut desk, random)?;
        free(target.at)?;
        if Instant::now() > until {
            return free(desk.at);
        }
    }
}
