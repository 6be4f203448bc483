//! Occupancy.

use std::hash::Hasher;

use mpsshim_api::cuda::{
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    CU_LAUNCH_ATTRIBUTE_IGNORE, CU_LAUNCH_ATTRIBUTE_PRIORITY,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, CUDA_ERROR_INVALID_VALUE,
    CUlaunchAttribute, CUlaunchConfig, CUresult,
};
use mpsshim_proto::message::{Launch, Occupancy, Op, Value};

use super::entries;
use super::launch::{attributes, shape_of};
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::known::{Fast, Known};
use crate::proxy::module::{self, FunctionRef};
use crate::proxy::submit::session;
use crate::proxy::{context, default_stream};

entries! {
    cuOccupancyMaxActiveBlocksPerMultiprocessor(_, _, _, _) => max_active_blocks,
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(_, _, _, _, _) => max_active_blocks_with_flags,
    cuOccupancyMaxPotentialBlockSize(_, _, _, _, _, _) => max_potential_block_size,
    cuOccupancyMaxPotentialBlockSizeWithFlags(_, _, _, _, _, _, _) => max_potential_block_size_with_flags,
    cuOccupancyAvailableDynamicSMemPerBlock(_, _, _, _) => available_dynamic_smem,
    cuOccupancyMaxActiveClusters(_, _, _) => max_active_clusters,
    cuOccupancyMaxPotentialClusterSize(_, _, _) => max_potential_cluster_size,
}

/// Kind of [`request`]: `cuOccupancyMaxActiveBlocksPerMultiprocessor`.
pub const MAX_BLOCKS: u32 = 0;
const AVAILABLE_SHARED: u32 = 1;
const WARP_SIZE: u32 = 10;

/// Asks the server unless the answer is cached. The cache distinguishes the revisions of the function's attributes.
pub fn request(
    function: FunctionRef,
    kind: u32,
    block: i32,
    shared: u64,
    flags: u32,
) -> Status<u64> {
    type Question = (u64, u32, u32, i32, u64, u32);
    static KNOWN: Known<Question> = Known::new();
    let session = session()?;
    session.check()?;
    let question = (
        function.handle(),
        function.revision(),
        kind,
        block,
        shared,
        flags,
    );
    KNOWN.get_or_request(question, || {
        let body = Occupancy {
            function: function.handle(),
            shared,
            block,
            flags,
            kind,
            pad: 0,
        };
        let value: Value = session.request(Op::Occupancy, &body, &[])?.read()?;
        Ok(value.value)
    })
}

/// `cuOccupancyMaxActiveBlocksPerMultiprocessor`.
pub unsafe extern "C" fn max_active_blocks(
    out: Out<i32>,
    function: u64,
    block: i32,
    shared: usize,
) -> CUresult {
    guard(|| {
        context::current()?;
        blocks(out, function, block, shared, 0)
    })
}

/// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`.
pub unsafe extern "C" fn max_active_blocks_with_flags(
    out: Out<i32>,
    function: u64,
    block: i32,
    shared: usize,
    flags: u32,
) -> CUresult {
    guard(|| {
        context::current()?;
        blocks(out, function, block, shared, flags)
    })
}

fn blocks(out: Out<i32>, function: u64, block: i32, shared: usize, flags: u32) -> Status {
    out.required()?;
    if block <= 0 || flags > 1 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let function = module::function(function)?;
    out.set(request(function, MAX_BLOCKS, block, shared as u64, flags)? as i32)
}

/// `cuOccupancyAvailableDynamicSMemPerBlock`.
pub unsafe extern "C" fn available_dynamic_smem(
    out: Out<usize>,
    function: u64,
    blocks: i32,
    block: i32,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        if block <= 0 || blocks <= 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let function = module::function(function)?;
        out.set(request(function, AVAILABLE_SHARED, block, blocks as u64, 0)? as usize)
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
    guard(|| {
        context::current()?;
        potential(grid, block, function, shared_for_block, shared, limit, 0)
    })
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
        context::current()?;
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
        let blocks = request(function, MAX_BLOCKS, block, bytes as u64, flags)? as i32;
        if blocks * block > best_threads {
            (best_block, best_blocks, best_threads) = (block, blocks, blocks * block);
        }
        rounded -= warp;
    }
    let count = context::multiprocessors(function.context());
    grid_out.set(best_blocks * count.unwrap_or(1))?;
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
    type Question = (u64, u32, u32, [[u32; 3]; 2], u32, [u64; 2]);
    static KNOWN: Known<Question> = Known::new();
    out.required()?;
    let config = config.get()?;
    if function == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    context::current()?;
    let function = module::function(function)?;
    let shape = shape_of(&config);
    // SAFETY: the program's configuration, as CUDA documents it.
    let attributes = unsafe { attributes(&config)? };
    let stream = default_stream::resolve(config.stream.0, false)?;
    let session = session()?;
    session.check()?;
    let question = (
        function.handle(),
        function.revision(),
        kind,
        [shape.grid, shape.block],
        shape.shared,
        digest(attributes),
    );
    let answer = KNOWN.get_or_request(question, || {
        let body = Launch {
            function: function.handle(),
            stream: stream.handle(),
            grid: shape.grid,
            block: shape.block,
            shared: shape.shared,
            param_len: 0,
            attributes: (attributes.len() / size_of::<CUlaunchAttribute>()) as u32,
            flags: kind,
        };
        let value: Value = session.request(Op::Clusters, &body, attributes)?.read()?;
        Ok(value.value)
    })?;
    out.set(answer as i32)
}

/// A digest of attributes, 128 bits. The unused part of an attribute's 64 bytes may have any content and is left out.
fn digest(attributes: &[u8]) -> [u64; 2] {
    let (mut first, mut second) = (Fast::default(), Fast::default());
    for attribute in attributes.chunks_exact(size_of::<CUlaunchAttribute>()) {
        let (id, value) = (&attribute[..4], &attribute[8..]);
        let len = match u32::from_ne_bytes([id[0], id[1], id[2], id[3]]) {
            CU_LAUNCH_ATTRIBUTE_IGNORE => continue,
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => 12,
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            | CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
            | CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            | CU_LAUNCH_ATTRIBUTE_PRIORITY => 4,
            _ => value.len(),
        };
        first.write(id);
        first.write(&value[..len]);
        second.write(&value[..len]);
        second.write(id);
    }
    [first.finish(), second.finish()]
}
