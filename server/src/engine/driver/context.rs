//! Green contexts, peers, device-wide settings.

use super::{DriverError, symbol, unsupported};
use mpsshim_proto::cuda::*;
use std::ffi::c_void;

functions! {
    /// Green contexts, peers, device-wide settings. A driver may lack any of them: it then answers `CUDA_ERROR_NOT_SUPPORTED`.
    ContextFunctions, |_| true;
    device_can_access_peer = "cuDeviceCanAccessPeer" (can: &mut i32, device: CUdevice, peer: CUdevice);
}
