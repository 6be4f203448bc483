//! The linker and what else concerns code.

use super::{DriverError, symbol, unsupported};
use mpsshim_proto::cuda::*;
use std::ffi::c_void;

functions! {
    /// The linker and what else concerns code. A driver may lack any of them: it then answers `CUDA_ERROR_NOT_SUPPORTED`.
    ImageFunctions, |_| true;
    link_destroy = "cuLinkDestroy" (link: CUlinkState);
}
