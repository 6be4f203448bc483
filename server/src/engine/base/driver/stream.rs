//! Stream memory operations, stream attributes, host functions.

use crate::engine::base::driver::symbols::{DriverError, Find, unsupported};
use mpsshim_api::cuda::*;
use std::ffi::c_void;

functions! {
    /// Stream memory operations, stream attributes, host functions.
    /// A function that the driver lacks returns `CUDA_ERROR_NOT_SUPPORTED`.
    StreamFunctions, |_| true;
    stream_write_value64 = "cuStreamWriteValue64_v2" (stream: CUstream, address: CUdeviceptr, value: u64, flags: u32);
    stream_set_attribute = "cuStreamSetAttribute" (stream: CUstream, id: u32, value: *const [u8; 64]);
    stream_batch_mem_op = "cuStreamBatchMemOp_v2" (stream: CUstream, count: u32, operations: &mut CUstreamBatchMemOpParams, flags: u32);
}
