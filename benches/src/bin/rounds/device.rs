//! The device, its kernels, and the memory of the streams.

use anyhow::{Context, Result};
use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUcontext, CUdeviceptr, CUfunction, CUstream,
};
use std::ffi::c_void;
use std::sync::atomic::AtomicU32;

const PTX: &std::ffi::CStr = c".version 7.0
.target sm_50
.address_size 64

// Keeps its blocks busy for so many clock cycles; then its first thread writes a flag, if there is one.
.visible .entry busy(.param .u64 cycles, .param .u64 flag, .param .u32 value)
{
    .reg .pred %p;
    .reg .b32 %r<5>;
    .reg .b64 %begin, %now, %cycles, %flag;
    ld.param.u64 %cycles, [cycles];
    ld.param.u64 %flag, [flag];
    ld.param.u32 %r1, [value];
    mov.u64 %begin, %clock64;
again:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %p, %now, %cycles;
    @%p bra again;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    or.b32 %r4, %r2, %r3;
    setp.ne.u32 %p, %r4, 0;
    @%p bra end;
    setp.eq.u64 %p, %flag, 0;
    @%p bra end;
    membar.sys;
    st.volatile.global.u32 [%flag], %r1;
end:
    ret;
}

.visible .entry flag(.param .u64 flag, .param .u32 value)
{
    .reg .b32 %value;
    .reg .b64 %flag;
    ld.param.u64 %flag, [flag];
    ld.param.u32 %value, [value];
    membar.sys;
    st.volatile.global.u32 [%flag], %value;
    ret;
}

// Copies two pieces of so many words each.
.visible .entry copy(.param .u64 to0, .param .u64 from0, .param .u64 to1, .param .u64 from1, .param .u32 words)
{
    .reg .pred %p;
    .reg .b32 %r<7>;
    .reg .b64 %d<9>;
    ld.param.u32 %r1, [words];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mad.lo.u32 %r5, %r3, %r4, %r2;
    setp.ge.u32 %p, %r5, %r1;
    @%p bra end;
    mul.wide.u32 %d1, %r5, 4;
    ld.param.u64 %d2, [from0];
    add.u64 %d2, %d2, %d1;
    ld.global.u32 %r6, [%d2];
    ld.param.u64 %d3, [to0];
    add.u64 %d3, %d3, %d1;
    st.global.u32 [%d3], %r6;
    ld.param.u64 %d4, [from1];
    add.u64 %d4, %d4, %d1;
    ld.global.u32 %r6, [%d4];
    ld.param.u64 %d5, [to1];
    add.u64 %d5, %d5, %d1;
    st.global.u32 [%d5], %r6;
end:
    ret;
}
";

/// Threads of a block of a stream's kernels.
pub const BLOCK: u32 = 128;

/// Makes the first device's context; the program keeps it.
pub fn open() -> Result<Opened> {
    // The more streams share a channel the more they wait for each other.
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    let mut context = std::ptr::null_mut();
    // SAFETY: results have their places.
    unsafe {
        sys::cuInit(0).result()?;
        let mut device = 0;
        sys::cuDeviceGet(&mut device, 0).result()?;
        sys::cuDevicePrimaryCtxRetain(&mut context, device).result()?;
        sys::cuCtxSetCurrent(context).result()?;
    }
    Ok(Opened(context))
}

/// The context, for all threads.
#[derive(Clone, Copy, Debug)]
pub struct Opened(CUcontext);

// SAFETY: a context may be current to any number of threads (CUDA driver API, context management).
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Opened {
    pub fn raw(self) -> CUcontext {
        self.0
    }
}

/// Makes it the calling thread's.
pub fn use_context(context: Opened) -> Result<()> {
    // SAFETY: a live context.
    Ok(unsafe { sys::cuCtxSetCurrent(context.0) }.result()?)
}

/// A stream of its own.
pub fn stream() -> Result<CUstream> {
    let mut stream = std::ptr::null_mut();
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the result has its place.
    unsafe { sys::cuStreamCreate(&mut stream, flags) }.result()?;
    Ok(stream)
}

/// Waits for all of a stream's work.
pub fn synchronize(stream: CUstream) -> Result<()> {
    // SAFETY: a live stream.
    Ok(unsafe { sys::cuStreamSynchronize(stream) }.result()?)
}

/// Blocks of so many threads that the device has room for at a time.
pub fn full_grid(threads: u32) -> Result<u32> {
    use sys::CUdevice_attribute::*;
    let number = |attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: the result has its place; there is a first device.
        unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, 0) }.result()?;
        Ok(value as u32)
    };
    let each = number(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
    Ok(number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? * (each / threads).max(1))
}

/// The kernels.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// `busy(cycles: u64, flag: u64, value: u32)`; no flag: 0.
    busy: CUfunction,
    /// `flag(flag: u64, value: u32)`.
    flag: CUfunction,
    /// `copy(to: u64, from: u64, to: u64, from: u64, words: u32)`.
    copy: CUfunction,
}

// SAFETY: functions belong to a context, not to a thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads them into the current context.
    pub fn load() -> Result<Kernels> {
        let mut module = std::ptr::null_mut();
        // SAFETY: a text that ends with NUL.
        unsafe { sys::cuModuleLoadData(&mut module, PTX.as_ptr().cast()) }
            .result()
            .context("the kernels")?;
        let function = |name: &std::ffi::CStr| -> Result<CUfunction> {
            let mut function = std::ptr::null_mut();
            // SAFETY: a live module and a name that ends with NUL.
            unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) }.result()?;
            Ok(function)
        };
        Ok(Kernels {
            busy: function(c"busy")?,
            flag: function(c"flag")?,
            copy: function(c"copy")?,
        })
    }

    /// A launch of `busy`.
    pub fn busy(&self, blocks: u32, threads: u32, cycles: u64, flag: u64) -> Launch {
        Launch::new(self.busy, blocks, threads, vec![cycles, flag, 0])
    }

    /// A launch of `flag`.
    pub fn flag(&self, flag: u64) -> Launch {
        Launch::new(self.flag, 1, 1, vec![flag, 0])
    }

    /// A launch of `copy` that copies pieces of so many bytes from the second of each to the first.
    pub fn copy(&self, [one, other]: [(u64, u64); 2], bytes: usize) -> Launch {
        let words = (bytes / 4) as u32;
        let values = vec![one.0, one.1, other.0, other.1, words.into()];
        Launch::new(self.copy, words.div_ceil(BLOCK), BLOCK, values)
    }
}

/// A launch in one dimension that can be made again.
#[derive(Debug)]
pub struct Launch {
    function: CUfunction,
    blocks: u32,
    threads: u32,
    /// The parameters; those of 32 bits are the lower half, which comes first.
    values: Vec<u64>,
}

impl Launch {
    fn new(function: CUfunction, blocks: u32, threads: u32, values: Vec<u64>) -> Launch {
        Launch {
            function,
            blocks,
            threads,
            values,
        }
    }

    /// Makes the last parameter another one.
    pub fn set_last(&mut self, value: u32) {
        *self.values.last_mut().expect("every kernel has some") = value.into();
    }

    fn params(&mut self) -> Vec<*mut c_void> {
        let pointer = |value: &mut u64| std::ptr::from_mut(value).cast();
        self.values.iter_mut().map(pointer).collect()
    }

    /// Launches it.
    pub fn launch(&mut self, stream: CUstream) -> Result<()> {
        let (function, blocks, threads) = (self.function, self.blocks, self.threads);
        let (mut params, extra) = (self.params(), std::ptr::null_mut());
        let params = params.as_mut_ptr();
        // SAFETY: as many pointers as the kernel has parameters, to values that are long enough.
        unsafe {
            sys::cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, 0, stream, params, extra,
            )
        }
        .result()?;
        Ok(())
    }

    /// Has `give` take it as a node's parameters.
    pub fn as_node<R>(&mut self, give: impl FnOnce(&CUDA_KERNEL_NODE_PARAMS) -> R) -> R {
        let (func, blocks, threads) = (self.function, self.blocks, self.threads);
        let mut params = self.params();
        give(&CUDA_KERNEL_NODE_PARAMS {
            func,
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: params.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        })
    }
}

/// Bytes between two flags: none shares a cache line with another.
const FLAG: usize = 256;

/// Flags and data of all streams. The program keeps them.
#[derive(Debug)]
pub struct Buffers {
    flags: *mut u8,
    host: *mut u8,
    device: CUdeviceptr,
    piece: usize,
}

// SAFETY: streams use parts of their own; flags are atomics.
unsafe impl Sync for Buffers {}

impl Buffers {
    /// For so many streams; each has two pieces of `piece` bytes, on the host and on the device.
    pub fn new(streams: usize, piece: usize) -> Result<Buffers> {
        let pinned = |bytes: usize| -> Result<*mut u8> {
            let mut memory = std::ptr::null_mut();
            // SAFETY: the result has its place.
            unsafe { sys::cuMemHostAlloc(&mut memory, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }
                .result()?;
            // SAFETY: as long as just allocated.
            unsafe { std::ptr::write_bytes(memory.cast::<u8>(), 0, bytes) };
            Ok(memory.cast())
        };
        let bytes = (streams * 2 * piece).max(1);
        let mut device = 0;
        // SAFETY: the result has its place.
        unsafe { sys::cuMemAlloc_v2(&mut device, bytes) }.result()?;
        Ok(Buffers {
            flags: pinned(streams * FLAG)?,
            host: pinned(bytes)?,
            device,
            piece,
        })
    }

    /// A stream's flag.
    pub fn flag(&self, stream: usize) -> &AtomicU32 {
        // SAFETY: inside the allocation, aligned, only ever used as an atomic; the program keeps it.
        unsafe { &*self.flags.add(stream * FLAG).cast::<AtomicU32>() }
    }

    /// The two pieces of a stream: on the host, and on the device.
    pub fn pieces(&self, stream: usize) -> [(u64, CUdeviceptr); 2] {
        [0, 1].map(|half| {
            let at = (2 * stream + half) * self.piece;
            (self.host as u64 + at as u64, self.device + at as u64)
        })
    }

    /// Bytes of a piece.
    pub fn piece(&self) -> usize {
        self.piece
    }
}
