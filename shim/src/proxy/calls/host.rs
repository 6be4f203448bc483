//! Pinned host memory, and host memory that is registered.

use mpsshim_api::cuda::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_WRITECOMBINED,
    CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUresult,
};

use super::entries;
use crate::ffi::{Out, Status, guard};
use crate::proxy::managed::MANAGED;
use crate::proxy::submit::session;
use crate::proxy::{capture, context, memory, register};

entries! {
    cuMemHostAlloc(_, _, _) => host_alloc,
    cuMemAllocHost_v2(_, _) => alloc_host,
    cuMemFreeHost(_) => free_host,
    cuMemHostGetDevicePointer_v2(_, _, _) => get_device_pointer,
    cuMemHostGetFlags(_, _) => get_flags,
    cuMemHostRegister(_, _, _) => register_v2,
    cuMemHostRegister_v2(_, _, _) => register_v2,
    cuMemHostUnregister(_) => unregister,
}

fn alloc(out: Out<u64>, len: usize, flags: u32) -> Status {
    out.required()?;
    let known =
        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if flags & !known != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    capture::forbid(session()?)?;
    if len == 0 {
        // No memory, and no error.
        context::current()?;
        return out.set(0);
    }
    // Pinned memory is always mapped for the device, at the same address.
    let flags = flags | CU_MEMHOSTALLOC_DEVICEMAP;
    let context = context::current()?;
    out.set(memory::host_alloc(session()?, context, len as u64, flags)?)
}

/// `cuMemHostAlloc`.
pub unsafe extern "C" fn host_alloc(out: Out<u64>, len: usize, flags: u32) -> CUresult {
    guard(|| {
        context::current()?;
        alloc(out, len, flags)
    })
}

/// `cuMemAllocHost`.
pub unsafe extern "C" fn alloc_host(out: Out<u64>, len: usize) -> CUresult {
    guard(|| {
        context::current()?;
        alloc(out, len, 0)
    })
}

/// `cuMemFreeHost`.
pub unsafe extern "C" fn free_host(address: u64) -> CUresult {
    guard(|| {
        // Also where no context is current.
        context::none_or_usable()?;
        if address == 0 {
            return Ok(());
        }
        context::current()?;
        capture::forbid(session()?)?;
        memory::host_free(session()?, address)
    })
}

/// `cuMemHostGetDevicePointer`.
pub unsafe extern "C" fn get_device_pointer(
    out: Out<CUdeviceptr>,
    address: u64,
    flags: u32,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        context::current()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let address = memory::program_address(address);
        if let Some((start, registered)) = memory::registered(address) {
            return out.set(registered.arena + (address - start));
        }
        match memory::host_block(address) {
            Some((_, block)) if block.flags & MANAGED == 0 => out.set(address),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    })
}

/// `cuMemHostGetFlags`.
pub unsafe extern "C" fn get_flags(out: Out<u32>, address: u64) -> CUresult {
    guard(|| {
        out.required()?;
        context::current()?;
        let address = memory::program_address(address);
        if let Some((_, registered)) = memory::registered(address) {
            return out.set(registered.flags);
        }
        match memory::host_block(address) {
            Some((_, block)) if block.flags & MANAGED == 0 => out.set(block.flags),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    })
}

/// `cuMemHostRegister`.
pub unsafe extern "C" fn register_v2(address: u64, len: usize, flags: u32) -> CUresult {
    guard(|| {
        let (session, context) = (session()?, context::current()?);
        capture::forbid(session)?;
        register::register(session, context, address, len as u64, flags)
    })
}

/// `cuMemHostUnregister`.
pub unsafe extern "C" fn unregister(address: u64) -> CUresult {
    guard(|| {
        context::none_or_usable()?;
        if address == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        capture::forbid(session()?)?;
        register::unregister(session()?, address)
    })
}
