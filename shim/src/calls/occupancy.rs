//! Occupancy.

use std::collections::HashMap;
use std::sync::LazyLock;

use mpsshim_proto::cuda::{
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, CUDA_ERROR_INVALID_VALUE, CUlaunchAttribute,
    CUlaunchConfig, CUresult,
};
use mpsshim_proto::message::{Launch, Occupancy, Op, Value};
use parking_lot::Mutex;

use super::entries;
use super::launch::{attributes, shape_of};
use crate::ffi::{In, Out, Status, guard};
use crate::module::{self, FunctionRef};
use crate::submit::session;
use crate::{context, stream};

entries! {
    cuOccupancyMaxActiveBlocksPerMultiprocessor => max_active_blocks,
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags => max_active_blocks_with_flags,
    cuOccupancyMaxPotentialBlockSize => max_potential_block_size,
    cuOccupancyMaxPotentialBlockSizeWithFlags => max_potential_block_size_with_flags,
    cuOccupancyAvailableDynamicSMemPerBlock => available_dynamic_smem,
    cuOccupancyMaxActiveClusters => max_active_clusters,
    cuOccupancyMaxPotentialClusterSize => max_potential_cluster_size,
}

const MAX_BLOCKS: u32 = 0;
const AVAILABLE_SHARED: u32 = 1;
const MULTIPROCESSOR_COUNT: u32 = 16;
const WARP_SIZE: u32 = 10;
/// Answers kept; then all are forgotten.
const KNOWN: usize = 1024;

/// Asks the server unless the answer is known. A change of the function's attributes changes its key.
fn ask(function: FunctionRef, kind: u32, block: i32, shared: u64, flags: u32) -> Status<u64> {
    type Key = (u64, u32, i32, u64, u32, Option<i32>);
    static CACHE: LazyLock<Mutex<HashMap<Key, u64>>> = LazyLock::new(Mutex::default);
    let session = session()?;
    session.check()?;
    let key = (
        function.handle(),
        kind,
        block,
        shared,
        flags,
        function.known(8),
    );
    if let Some(known) = CACHE.lock().get(&key) {
        return Ok(*known);
    }
    let body = Occupancy {
        function: function.handle(),
        shared,
        block,
        flags,
        kind,
        pad: 0,
    };
    let value: Value = session.ask(Op::Occupancy, &body, &[])?.read()?;
    let mut cache = CACHE.lock();
    if cache.len() >= KNOWN {
        cache.clear();
    }
    cache.insert(key, value.value);
    Ok(value.value)
}

/// `cuOccupancyMaxActiveBlocksPerMultiprocessor`.
pub unsafe extern "C" fn max_active_blocks(
    out: Out<i32>,
    function: u64,
    block: i32,
    shared: usize,
) -> CUresult {
    guard(|| blocks(out, function, block, shared, 0))
}

/// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`.
pub unsafe extern "C" fn max_active_blocks_with_flags(
    out: Out<i32>,
    function: u64,
    block: i32,
    shared: usize,
    flags: u32,
) -> CUresult {
    guard(|| blocks(out, function, block, shared, flags))
}

fn blocks(out: Out<i32>, function: u64, block: i32, shared: usize, flags: u32) -> Status {
    out.required()?;
    if block <= 0 || flags > 1 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let function = module::function(function)?;
    out.set(ask(function, MAX_BLOCKS, block, shared as u64, flags)? as i32)
}

/// `cuOccupancyAvailableDynamicSMemPerBlock`.
pub unsafe extern "C" fn available_dynamic_smem(
    out: Out<usize>,
    function: u64,
    blocks: i32,
    block: i32,
) -> CUresult {
    guard(|| {
        out.required()?;
        if block <= 0 || blocks <= 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let function = module::function(function)?;
        out.set(ask(function, AVAILABLE_SHARED, block, blocks as u64, 0)? as usize)
    })
}

/// `CUoccupancyB2DSize`: bytes of shared memory for a block of some size.
pub type SharedForBlock = Option<unsafe extern "C" fn(i32) -> usize>;

/// `cuOccupancyMaxPotentialBlockSize`.
pub unsafe extern "C" fn max_potential_block_size(
    grid: Out<i32>,
    block: Out<i32>,
    function: u64,
    shared_for_block: SharedForBlock,
    shared: usize,
    limit: i32,
) -> CUresult {
    guard(|| potential(grid, block, function, shared_for_block, shared, limit, 0))
}

/// `cuOccupancyMaxPotentialBlockSizeWithFlags`.
pub unsafe extern "C" fn max_potential_block_size_with_flags(
    grid: Out<i32>,
    block: Out<i32>,
    function: u64,
    shared_for_block: SharedForBlock,
    shared: usize,
    limit: i32,
    flags: u32,
) -> CUresult {
    guard(|| {
        potential(
            grid,
            block,
            function,
            shared_for_block,
            shared,
            limit,
            flags,
        )
    })
}

/// The block size, a multiple of a warp, that keeps most threads active; among equals the largest.
fn potential(
    grid_out: Out<i32>,
    block_out: Out<i32>,
    function: u64,
    shared_for_block: SharedForBlock,
    shared: usize,
    limit: i32,
    flags: u32,
) -> Status {
    grid_out.required()?;
    block_out.required()?;
    let function = module::function(function)?;
    let ordinal = function.context().device;
    let attribute =
        |number, otherwise| context::device_attribute(ordinal, number).unwrap_or(otherwise);
    let warp = attribute(WARP_SIZE, 32).max(1);
    let of_device = context::device(ordinal)?.limits.block_threads as i32;
    let of_function = function
        .known(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        .unwrap_or(of_device);
    let limit = if limit <= 0 { of_device } else { limit };
    let most = limit.min(of_device).min(of_function);
    let (mut best_block, mut best_blocks, mut best_threads) = (0, 0, 0);
    let mut rounded = (most + warp - 1) / warp * warp;
    while rounded > 0 {
        let block = rounded.min(most);
        let bytes = match shared_for_block {
            // SAFETY: the program's own function, called as CUDA does.
            Some(bytes) => unsafe { bytes(block) },
            None => shared,
        };
        let blocks = ask(function, MAX_BLOCKS, block, bytes as u64, flags)? as i32;
        if blocks * block > best_threads {
            (best_block, best_blocks, best_threads) = (block, blocks, blocks * block);
        }
        rounded -= warp;
    }
    grid_out.set(best_blocks * attribute(MULTIPROCESSOR_COUNT, 1))?;
    block_out.set(best_block)
}

/// `cuOccupancyMaxActiveClusters`.
pub unsafe extern "C" fn max_active_clusters(
    out: Out<i32>,
    function: u64,
    config: In<CUlaunchConfig>,
) -> CUresult {
    guard(|| clusters(out, function, config, 0))
}

/// `cuOccupancyMaxPotentialClusterSize`.
pub unsafe extern "C" fn max_potential_cluster_size(
    out: Out<i32>,
    function: u64,
    config: In<CUlaunchConfig>,
) -> CUresult {
    guard(|| clusters(out, function, config, 1))
}

fn clusters(out: Out<i32>, function: u64, config: In<CUlaunchConfig>, kind: u32) -> Status {
    out.required()?;
    let config = config.get()?;
    let function = module::function(function)?;
    let shape = shape_of(&config);
    // SAFETY: the program's configuration, as CUDA documents it.
    let attributes = unsafe { attributes(&config)? };
    let body = Launch {
        function: function.handle(),
        stream: stream::resolve(config.stream.0, false)?.handle(),
        grid: shape.grid,
        block: shape.block,
        shared: shape.shared,
        param_len: 0,
        attributes: (attributes.len() / size_of::<CUlaunchAttribute>()) as u32,
        flags: kind,
    };
    let value: Value = session()?.ask(Op::Clusters, &body, attributes)?.read()?;
    out.set(value.value as i32)
}
