//! Devices: the genuine driver answers queries, which create no context. Primary contexts are handled here.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use mpsshim_api::cuda::*;

use super::context::valid_flags;
use super::entries;
use crate::ffi::{Out, guard};
use crate::{context, genuine};

entries! {
    cuDeviceGetAttribute => get_attribute,
    cuDeviceTotalMem => total_memory,
    cuDeviceTotalMem_v2 => total_memory,
    cuDevicePrimaryCtxRetain => primary_retain,
    cuDevicePrimaryCtxRelease => primary_release,
    cuDevicePrimaryCtxRelease_v2 => primary_release,
    cuDevicePrimaryCtxReset => primary_reset,
    cuDevicePrimaryCtxReset_v2 => primary_reset,
    cuDevicePrimaryCtxGetState => primary_get_state,
    cuDevicePrimaryCtxSetFlags => primary_set_flags,
    cuDevicePrimaryCtxSetFlags_v2 => primary_set_flags,
}

/// What devices can do and a client cannot have: its memory lies in another process, the server's.
const WITHHELD: &[CUdevice_attribute] = &[
    // Pointers of the program's own are not the server's.
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    // Host memory that the driver allocates is mapped for the server's processor, not the client's.
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED,
    // Not served.
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
];

/// `cuDeviceGetAttribute`: the genuine driver's answer, but for [`WITHHELD`].
pub unsafe extern "C" fn get_attribute(
    out: Out<i32>,
    attribute: CUdevice_attribute,
    device: CUdevice,
) -> CUresult {
    type Genuine = unsafe extern "C" fn(Out<i32>, CUdevice_attribute, CUdevice) -> CUresult;
    static GENUINE: OnceLock<Option<Genuine>> = OnceLock::new();
    guard(|| {
        let genuine = GENUINE.get_or_init(|| {
            let address = genuine::symbol("cuDeviceGetAttribute")?;
            // SAFETY: the driver's function of this name has this signature.
            Some(unsafe { std::mem::transmute::<*const (), Genuine>(address) })
        });
        let genuine = genuine.ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
        // SAFETY: the program's arguments, unchanged.
        unsafe { genuine(out, attribute, device) }.ok()?;
        if WITHHELD.contains(&attribute) {
            out.set(0)?;
        }
        if attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            && let Some(count) = context::granted_multiprocessors(device, context::top())
        {
            out.set(count)?;
        }
        Ok(())
    })
}

/// `cuDeviceTotalMem`: what the genuine driver says, or the limit of the client's memory if that is less.
pub unsafe extern "C" fn total_memory(out: Out<usize>, device: CUdevice) -> CUresult {
    type Genuine = unsafe extern "C" fn(Out<usize>, CUdevice) -> CUresult;
    guard(|| {
        let address = genuine::symbol("cuDeviceTotalMem_v2").ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
        // SAFETY: the driver's function of this name has this signature.
        let genuine = unsafe { std::mem::transmute::<*const (), Genuine>(address) };
        // SAFETY: the program's arguments, unchanged.
        unsafe { genuine(out, device) }.ok()?;
        let limit = context::device(device)?.memory();
        if (out.get()? as u64) > limit {
            out.set(limit as usize)?;
        }
        Ok(())
    })
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
        let flags = valid_flags(flags)?;
        if flags & CU_CTX_MAP_HOST != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        context.flags.store(flags, Ordering::Relaxed);
        Ok(())
    })
}
