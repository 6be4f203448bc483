//! Devices: the genuine driver answers queries, which create no context. Primary contexts are handled here.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use mpsshim_api::cuda::*;

use super::context::valid_flags;
use super::entries;
use crate::ffi::{Out, Status, guard};
use crate::loader::genuine;
use crate::proxy::{context, teardown};

entries! {
    cuDeviceGetAttribute(_, _, _) => get_attribute,
    cuDeviceTotalMem(_, _) => total_memory_v1,
    cuDeviceTotalMem_v2(_, _) => total_memory,
    cuDevicePrimaryCtxRetain(_, _) => primary_retain,
    cuDevicePrimaryCtxRelease(_) => primary_release,
    cuDevicePrimaryCtxRelease_v2(_) => primary_release,
    cuDevicePrimaryCtxReset(_) => primary_reset,
    cuDevicePrimaryCtxReset_v2(_) => primary_reset,
    cuDevicePrimaryCtxGetState(_, _, _) => primary_get_state,
    cuDevicePrimaryCtxSetFlags(_, _) => primary_set_flags,
    cuDevicePrimaryCtxSetFlags_v2(_, _) => primary_set_flags,
}

/// Attributes of devices that a client does not have, because its memory lies in another process, the server.
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

/// `cuDeviceGetAttribute`: the genuine driver's answer, except for [`WITHHELD`].
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

/// The bytes of a device's memory from the genuine driver's `symbol`, or the client's memory limit if that is less.
///
/// # Safety
/// The driver's function of this name has a pointer to an `S`, and a device.
unsafe fn total<S: Copy + TryFrom<u64>>(symbol: &str, out: Out<S>, device: CUdevice) -> Status
where
    u64: TryFrom<S>,
{
    let address = genuine::symbol(symbol).ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
    // SAFETY: the caller's promise.
    let genuine = unsafe {
        std::mem::transmute::<*const (), unsafe extern "C" fn(Out<S>, CUdevice) -> CUresult>(
            address,
        )
    };
    // SAFETY: the program's arguments, unchanged.
    unsafe { genuine(out, device) }.ok()?;
    let limit = context::device(device)?.memory();
    let is_more = u64::try_from(out.get()?).is_ok_and(|total| total > limit);
    match S::try_from(limit) {
        Ok(limit) if is_more => out.set(limit),
        _ => Ok(()),
    }
}

/// `cuDeviceTotalMem` before CUDA 3.2, in 32 bits.
pub unsafe extern "C" fn total_memory_v1(out: Out<u32>, device: CUdevice) -> CUresult {
    // SAFETY: of this signature.
    guard(|| unsafe { total("cuDeviceTotalMem", out, device) })
}

/// `cuDeviceTotalMem`.
pub unsafe extern "C" fn total_memory(out: Out<usize>, device: CUdevice) -> CUresult {
    // SAFETY: of this signature.
    guard(|| unsafe { total("cuDeviceTotalMem_v2", out, device) })
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
    guard(|| teardown::release(context::device(device)?.primary(device)?))
}

/// `cuDevicePrimaryCtxReset`.
pub unsafe extern "C" fn primary_reset(device: CUdevice) -> CUresult {
    guard(|| teardown::reset(context::device(device)?.primary(device)?))
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
