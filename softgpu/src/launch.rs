//! Launches and occupancy.

use std::sync::Arc;

use mpsshim_api::cuda::*;

use crate::api::{In, Out, R, api, api_streams, log};
use crate::condition::{self, Values};
use crate::context::{Context, live};
use crate::device::{ALL_SMS, BLOCKS_PER_SM, SHARED_PER_SM, SM_COUNT, THREADS_PER_SM};
use crate::driver::start;
use crate::graph::{self, Does};
use crate::interp::{self, Memory};
use crate::module::{Kernel, kernel, kernel_in};
use crate::ptx::code::Ty;
use crate::stream::{Stream, resolve};
use crate::texture::{self, Place};

/// Device memory as a kernel of one context sees it.
struct View<'a>(&'a Context, Option<Arc<Values>>);

impl Memory for View<'_> {
    fn span(&self, address: u64) -> Option<(u64, u64)> {
        start().ranges.span(address)
    }
    fn version(&self) -> u64 {
        start().ranges.version()
    }
    fn lost(&self) -> bool {
        self.0.status() != 0
    }
    fn malloc(&self, bytes: u64) -> u64 {
        self.0.malloc(bytes)
    }
    fn free(&self, start: u64) -> bool {
        self.0.heap.free(start)
    }
    fn set_condition(&self, handle: u64, value: u32) -> bool {
        self.1
            .as_ref()
            .is_some_and(|values| values.set(handle, value))
    }
    fn fetch(&self, texture: u64, ty: Ty, at: [i64; 2]) -> Result<[u32; 4], u32> {
        texture::fetch(self.0, texture, ty, at).map_err(|status| status.0)
    }
    fn load(&self, surface: u64, place: &Place) -> Result<u128, u32> {
        texture::load(self.0, surface, place).map_err(|status| status.0)
    }
    fn store(&self, surface: u64, place: &Place, value: u128) -> Result<(), u32> {
        texture::store(self.0, surface, place, value).map_err(|status| status.0)
    }
}

/// Where a launch's parameters come from.
#[derive(Clone, Copy)]
pub struct Params {
    pub pointers: In<u64>,
    pub extra: In<u64>,
}

impl Params {
    fn pack(self, kernel: &Kernel) -> R<Vec<u8>> {
        let function = kernel.function();
        let mut packed = vec![0u8; function.param_bytes as usize];
        if !self.pointers.is_null() {
            for (n, param) in function.params.iter().enumerate() {
                let bytes = In(self.pointers.get(n)? as *const u8).list(param.bytes as usize)?;
                packed[param.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
        } else if !self.extra.is_null() {
            let (mut at, mut bytes) = (0u64, 0usize);
            for n in (0..16).step_by(2) {
                match self.extra.get(n)? as usize {
                    CU_LAUNCH_PARAM_END => break,
                    CU_LAUNCH_PARAM_BUFFER_POINTER => at = self.extra.get(n + 1)?,
                    CU_LAUNCH_PARAM_BUFFER_SIZE => {
                        bytes = In(self.extra.get(n + 1)? as *const usize).get(0)?
                    }
                    _ => return Err(CUDA_ERROR_INVALID_VALUE),
                }
            }
            // As the genuine driver does: what a shorter buffer leaves out stays zero.
            let bytes = bytes.min(packed.len());
            let given = In(at as *const u8).list(bytes)?;
            packed[..bytes].copy_from_slice(&given);
        } else if !packed.is_empty() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(packed)
    }
}

#[derive(Clone, Copy)]
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
}

/// Blocks of a kernel that an SM holds at once.
fn blocks_per_sm(kernel: &Kernel, threads: u32, dynamic: usize) -> u32 {
    let shared = u64::from(kernel.function().shared_bytes) + dynamic as u64 + 1024;
    if threads == 0
        || threads > kernel.function().max_threads
        || dynamic as u64 > u64::from(kernel.max_dynamic_shared())
    {
        return 0;
    }
    let by_shared = (u64::from(SHARED_PER_SM) / shared) as u32;
    by_shared
        .min(THREADS_PER_SM / threads.next_multiple_of(32))
        .min(BLOCKS_PER_SM)
}

/// A kernel, how it is launched, and its parameters.
pub struct Launch {
    kernel: Arc<Kernel>,
    shape: Shape,
    params: Vec<u8>,
    /// The multiprocessors it may use, a bit each.
    sms: u64,
}

impl Launch {
    /// A launch that the device can do.
    pub fn new(function: u64, context: &Context, shape: Shape, params: Params) -> R<Launch> {
        let kernel = kernel_in(function, context)?;
        if kernel.module.context != context.id {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        check_shape(&kernel, shape)?;
        Ok(Launch {
            params: params.pack(&kernel)?,
            kernel,
            shape,
            sms: ALL_SMS,
        })
    }

    /// The same on the multiprocessors of a stream.
    fn on(self, stream: &Stream) -> Launch {
        Launch {
            sms: stream.sms,
            ..self
        }
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The id of its kernel's context.
    pub fn context(&self) -> u64 {
        self.kernel.module.context
    }

    /// Local memory of a thread.
    pub fn local_bytes(&self) -> u32 {
        self.kernel.function().frame_bytes
    }

    /// The packed parameters.
    pub fn packed(&self) -> &[u8] {
        &self.params
    }

    /// Where each parameter begins.
    pub fn offsets(&self) -> impl Iterator<Item = u32> + '_ {
        self.kernel
            .function()
            .params
            .iter()
            .map(|param| param.offset)
    }

    pub fn run(&self, context: &Context) -> R<()> {
        let launch = interp::Launch {
            program: &self.kernel.module.program,
            kernel: self.kernel.index,
            data: self.kernel.module.data,
            params: &self.params,
            grid: self.shape.grid,
            block: self.shape.block,
            dynamic_shared: self.shape.shared,
            memory: &View(context, condition::running()),
            sms: self.sms,
        };
        interp::run(&launch).map_err(|fault| {
            let (name, status) = (&self.kernel.function().name, CUresult(fault.status));
            log(|| {
                format!(
                    "kernel {name}, PTX line {}: {status} at {:#x}",
                    fault.line, fault.address
                )
            });
            status
        })
    }
}

fn check_shape(kernel: &Kernel, shape: Shape) -> R<()> {
    let f = kernel.function();
    let threads = shape
        .block
        .iter()
        .try_fold(1u32, |n, &d| n.checked_mul(d))
        .unwrap_or(u32::MAX);
    let [_, grid_y, grid_z] = shape.grid;
    let wrong_grid = shape.grid.contains(&0)
        || shape.grid[0] > i32::MAX as u32
        || grid_y > 65535
        || grid_z > 65535;
    if wrong_grid || threads == 0 || threads > f.max_threads || shape.block[2] > 64 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if shape.shared > kernel.max_dynamic_shared()
        || f.required_threads.is_some_and(|t| t != shape.block)
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

fn launch(function: u64, shape: Shape, stream: CUstream, own: bool, params: Params) -> R<()> {
    let (context, stream) = resolve(stream, own)?;
    let launch = Launch::new(function, &context, shape, params)?.on(&stream);
    let launch = Arc::new(launch);
    if graph::captured(&stream, || Does::Kernel(function, launch.clone()))? {
        return Ok(());
    }
    context.before_launch(launch.local_bytes());
    stream.submit(&context, move |context| launch.run(context));
    Ok(())
}

/// Refuses the attributes of `cuLaunchKernelEx` that would have to do something.
fn check_attributes(config: &CUlaunchConfig) -> R<()> {
    for attribute in In(config.attrs).list(config.num_attrs.min(64) as usize)? {
        let word =
            |n: usize| u32::from_le_bytes(std::array::from_fn(|b| attribute.value[4 * n + b]));
        let fits = match attribute.id {
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE => word(0) == 0,
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => (0..3).all(|n| word(n) <= 1),
            // What only tunes, or relaxes an order that is kept here.
            id => matches!(
                id,
                CU_LAUNCH_ATTRIBUTE_IGNORE
                    | CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                    | CU_LAUNCH_ATTRIBUTE_PRIORITY
                    | CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            ),
        };
        if !fits {
            log(|| format!("launch attribute {} is not supported", attribute.id));
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
    }
    Ok(())
}

type SharedOfBlock = extern "C" fn(i32) -> usize;

fn potential(
    grid: Out<i32>,
    block: Out<i32>,
    function: u64,
    shared_of: Option<SharedOfBlock>,
    fixed: usize,
    limit: i32,
) -> R<()> {
    live()?;
    let kernel = kernel(function)?;
    let max = kernel.function().max_threads as i32;
    let max = if limit > 0 { limit.min(max) } else { max };
    let blocks = |threads: i32| {
        let shared = shared_of.map_or(fixed, |f| f(threads));
        blocks_per_sm(&kernel, threads as u32, shared)
    };
    // The largest block among those that keep the most threads at work.
    let sizes = (1..=max).rev().filter(|&n| n % 32 == 0 || n == max);
    let best = sizes
        .max_by_key(|&n| (blocks(n) * n as u32, n))
        .unwrap_or(max);
    block.set(best)?;
    grid.set((blocks(best) * SM_COUNT) as i32)
}

fn active_blocks(out: Out<i32>, function: u64, threads: i32, dynamic: usize) -> R<()> {
    live()?;
    let kernel: Arc<Kernel> = kernel(function)?;
    let threads = u32::try_from(threads)
        .ok()
        .filter(|&n| n > 0)
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    out.set(blocks_per_sm(&kernel, threads, dynamic) as i32)
}

api! { TABLE;
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(out: Out<i32>, function: u64, threads: i32, dynamic: usize) {
        active_blocks(out, function, threads, dynamic)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out: Out<i32>, function: u64, threads: i32, dynamic: usize, _flags: u32) {
        active_blocks(out, function, threads, dynamic)
    }
    fn cuOccupancyAvailableDynamicSMemPerBlock(out: Out<usize>, function: u64, blocks: i32, threads: i32) {
        live()?;
        let kernel = kernel(function)?;
        if blocks <= 0 || threads <= 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let each = SHARED_PER_SM / blocks as u32;
        let free = each.saturating_sub(1024 + kernel.function().shared_bytes);
        out.set(free.min(kernel.max_dynamic_shared()) as usize)
    }
    fn cuOccupancyMaxPotentialBlockSize(grid: Out<i32>, block: Out<i32>, function: u64, shared_of: Option<SharedOfBlock>, fixed: usize, limit: i32) {
        potential(grid, block, function, shared_of, fixed, limit)
    }
    fn cuOccupancyMaxActiveClusters(out: Out<i32>, function: u64, config: In<CUlaunchConfig>) {
        live()?;
        let config = config.get(0)?;
        check_attributes(&config)?;
        let threads = config.block.iter().product();
        out.set((blocks_per_sm(&*kernel(function)?, threads, config.shared_mem_bytes as usize) * SM_COUNT) as i32)
    }
    fn cuOccupancyMaxPotentialClusterSize(out: Out<i32>, function: u64, config: In<CUlaunchConfig>) {
        live()?;
        check_attributes(&config.get(0)?)?;
        kernel(function)?;
        out.set(1)
    }
}

api_streams! { TABLE_STREAMS;
    fn cuLaunchKernel / cuLaunchKernel_ptsz [own] (function: u64, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32,
            shared: u32, stream: CUstream, pointers: In<u64>, extra: In<u64>) {
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared };
        launch(function, shape, stream, own, Params { pointers, extra })
    }
    fn cuLaunchKernelEx / cuLaunchKernelEx_ptsz [own] (config: In<CUlaunchConfig>, function: u64, pointers: In<u64>, extra: In<u64>) {
        let c = config.get(0)?;
        check_attributes(&c)?;
        let shape = Shape { grid: c.grid, block: c.block, shared: c.shared_mem_bytes };
        launch(function, shape, c.stream, own, Params { pointers, extra })
    }
}
