//! Devices: the genuine driver knows them, and asking it makes no context. Primary contexts are ours.

use std::sync::atomic::Ordering;

use mpsshim_proto::cuda::{CU_CTX_FLAGS_MASK, CUDA_ERROR_INVALID_VALUE, CUdevice, CUresult};

use super::entries;
use crate::context;
use crate::ffi::{Out, guard};

/// Symbols whose handler is the genuine driver's function itself.
pub static GENUINE: &[&str] = &[
    "cuDeviceCanAccessPeer",
    "cuDeviceComputeCapability",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetByPCIBusId",
    "cuDeviceGetCount",
    "cuDeviceGetExecAffinitySupport",
    "cuDeviceGetLuid",
    "cuDeviceGetName",
    "cuDeviceGetP2PAttribute",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetProperties",
    "cuDeviceGetTexture1DLinearMaxWidth",
    "cuDeviceGetUuid",
    "cuDeviceGetUuid_v2",
    "cuDeviceTotalMem",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuModuleGetLoadingMode",
];

entries! {
    cuDevicePrimaryCtxRetain => primary_retain,
    cuDevicePrimaryCtxRelease => primary_release,
    cuDevicePrimaryCtxRelease_v2 => primary_release,
    cuDevicePrimaryCtxReset => primary_reset,
    cuDevicePrimaryCtxReset_v2 => primary_reset,
    cuDevicePrimaryCtxGetState => primary_get_state,
    cuDevicePrimaryCtxSetFlags => primary_set_flags,
    cuDevicePrimaryCtxSetFlags_v2 => primary_set_flags,
}

/// `cuDevicePrimaryCtxRetain`.
pub unsafe extern "C" fn primary_retain(out: Out<u64>, device: CUdevice) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(context::retain(device)?.handle)
    })
}

/// `cuDevicePrimaryCtxRelease`.
pub unsafe extern "C" fn primary_release(device: CUdevice) -> CUresult {
    guard(|| context::device(device)?.primary(device)?.release())
}

/// `cuDevicePrimaryCtxReset`.
pub unsafe extern "C" fn primary_reset(device: CUdevice) -> CUresult {
    guard(|| context::device(device)?.primary(device)?.reset())
}

/// `cuDevicePrimaryCtxGetState`.
pub unsafe extern "C" fn primary_get_state(
    device: CUdevice,
    flags: Out<u32>,
    active: Out<i32>,
) -> CUresult {
    guard(|| {
        let context = context::device(device)?.primary(device)?;
        flags.required()?;
        active.set(context.alive.load(Ordering::Relaxed) as i32)?;
        flags.set(context.flags.load(Ordering::Relaxed))
    })
}

/// `cuDevicePrimaryCtxSetFlags`.
pub unsafe extern "C" fn primary_set_flags(device: CUdevice, flags: u32) -> CUresult {
    guard(|| {
        let context = context::device(device)?.primary(device)?;
        let valid =
            flags & !CU_CTX_FLAGS_MASK == 0 && (flags & 7).is_power_of_two() | (flags & 7 == 0);
        if !valid {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        context.flags.store(flags, Ordering::Relaxed);
        Ok(())
    })
}
