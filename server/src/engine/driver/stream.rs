//! Stream memory operations, stream attributes, host functions.

use super::{DriverError, symbol, unsupported};
use mpsshim_proto::cuda::*;
use std::ffi::c_void;

functions! {
    /// Stream memory operations, stream attributes, host functions. A driver may lack any of them: it then answers `CUDA_ERROR_NOT_SUPPORTED`.
    StreamFunctions, |_| true;
    stream_wait_value32 = "cuStreamWaitValue32_v2" (stream: CUstream, address: CUdeviceptr, value: u32, flags: u32);
}
