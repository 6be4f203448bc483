//! Arrays, textures, surfaces, two- and three-dimensional copies.

use super::{DriverError, symbol, unsupported};
use mpsshim_proto::cuda::*;
use std::ffi::c_void;

functions! {
    /// Arrays, textures, surfaces, two- and three-dimensional copies. A driver may lack any of them: it then answers `CUDA_ERROR_NOT_SUPPORTED`.
    ArrayFunctions, |_| true;
    array_create = "cuArrayCreate_v2" (array: &mut CUarray, descriptor: *const c_void);
}
