//! Green contexts, peers, device-wide settings.

use crate::engine::base::driver::symbols::{DriverError, Find, unsupported};
use mpsshim_api::cuda::*;
use std::ffi::c_void;

functions! {
    /// Green contexts, peers, device-wide settings.
    /// A function that the driver lacks returns `CUDA_ERROR_NOT_SUPPORTED`.
    ContextFunctions, |_| true;
    device_get_dev_resource = "cuDeviceGetDevResource" (device: CUdevice, resource: &mut CUdevResource, kind: u32);
    green_get_dev_resource = "cuGreenCtxGetDevResource" (green: CUgreenCtx, resource: &mut CUdevResource, kind: u32);
    split_by_count = "cuDevSmResourceSplitByCount" (groups: *mut CUdevResource, count: &mut u32, from: &CUdevResource, remaining: *mut CUdevResource, flags: u32, least: u32);
    generate_desc = "cuDevResourceGenerateDesc" (description: &mut CUdevResourceDesc, resources: *mut CUdevResource, count: u32);
    green_create = "cuGreenCtxCreate" (green: &mut CUgreenCtx, description: CUdevResourceDesc, device: CUdevice, flags: u32);
    ctx_from_green = "cuCtxFromGreenCtx" (context: &mut CUcontext, green: CUgreenCtx);
    green_destroy = "cuGreenCtxDestroy" (green: CUgreenCtx);
    green_stream_create = "cuGreenCtxStreamCreate" (stream: &mut CUstream, green: CUgreenCtx, flags: u32, priority: i32);
    ctx_create = "cuCtxCreate_v2" (context: &mut CUcontext, flags: u32, device: CUdevice);
    ctx_destroy = "cuCtxDestroy_v2" (context: CUcontext);
    stream_destroy = "cuStreamDestroy_v2" (stream: CUstream);
}
