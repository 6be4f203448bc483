//! Pools, virtual memory, managed, shared and registered memory.

use super::{DriverError, symbol, unsupported};
use mpsshim_proto::cuda::*;
use std::ffi::c_void;

functions! {
    /// Pools, virtual memory, managed, shared and registered memory. A driver may lack any of them: it then answers `CUDA_ERROR_NOT_SUPPORTED`.
    MemoryFunctions, |_| true;
    mem_address_free = "cuMemAddressFree" (address: CUdeviceptr, len: usize);
}
