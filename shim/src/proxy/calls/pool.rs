//! Memory pools and stream-ordered allocation.

use std::ffi::{c_int, c_void};

use mpsshim_api::cuda::*;

use super::entries;
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::context;
use crate::proxy::pools;
use crate::proxy::submit::session;
use crate::proxy::{default_stream, memory};

entries! {
    cuMemAllocAsync(_, _, _) => alloc_async::<false>,
    cuMemAllocAsync_ptsz(_, _, _) => alloc_async::<true>,
    cuMemAllocFromPoolAsync(_, _, _, _) => alloc_from_pool_async::<false>,
    cuMemAllocFromPoolAsync_ptsz(_, _, _, _) => alloc_from_pool_async::<true>,
    cuMemFreeAsync(_, _) => free_async::<false>,
    cuMemFreeAsync_ptsz(_, _) => free_async::<true>,
    cuDeviceGetDefaultMemPool(_, _) => get_default,
    cuDeviceGetMemPool(_, _) => get_current,
    cuDeviceSetMemPool(_, _) => set_current,
    cuMemGetDefaultMemPool(_, _, _) => get_default_at,
    cuMemGetMemPool(_, _, _) => get_current_at,
    cuMemSetMemPool(_, _, _) => set_current_at,
    cuMemPoolCreate(_, _) => create,
    cuMemPoolDestroy(_) => destroy,
    cuMemPoolGetAttribute(_, _, _) => get_attribute,
    cuMemPoolSetAttribute(_, _, _) => set_attribute,
    cuMemPoolSetAccess(_, _, _) => set_access,
    cuMemPoolGetAccess(_, _, _) => get_access,
    cuMemPoolTrimTo(_, _) => trim_to,
}

/// `cuMemAllocAsync`: from the current pool of the stream's device.
pub unsafe extern "C" fn alloc_async<const P: bool>(
    out: Out<CUdeviceptr>,
    len: usize,
    stream: u64,
) -> CUresult {
    guard(|| {
        let session = session()?;
        let stream = default_stream::resolve(stream, P)?;
        context::current()?;
        out.required()?;
        let pool = pools::current(session, stream.context().device)?;
        out.set(pools::alloc(session, len as u64, pool, stream)?)
    })
}

/// `cuMemAllocFromPoolAsync`.
pub unsafe extern "C" fn alloc_from_pool_async<const P: bool>(
    out: Out<CUdeviceptr>,
    len: usize,
    pool: u64,
    stream: u64,
) -> CUresult {
    guard(|| {
        let stream = default_stream::resolve(stream, P)?;
        context::current()?;
        out.required()?;
        out.set(pools::alloc(session()?, len as u64, pool, stream)?)
    })
}

/// `cuMemFreeAsync`: a block that is not from a pool is reused once the stream gets here.
pub unsafe extern "C" fn free_async<const P: bool>(address: CUdeviceptr, stream: u64) -> CUresult {
    guard(|| {
        let session = session()?;
        let stream = default_stream::resolve(stream, P)?;
        if address == 0 {
            return Ok(());
        }
        if pools::free(session, address, stream)? {
            return Ok(());
        }
        memory::free_behind(session, address, stream)
    })
}

/// `cuDeviceGetDefaultMemPool`.
pub unsafe extern "C" fn get_default(out: Out<u64>, device: CUdevice) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(pools::default_pool(session()?, device)?)
    })
}

/// `cuDeviceGetMemPool`.
pub unsafe extern "C" fn get_current(out: Out<u64>, device: CUdevice) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(pools::current(session()?, device)?)
    })
}

/// `cuDeviceSetMemPool`.
pub unsafe extern "C" fn set_current(device: CUdevice, pool: u64) -> CUresult {
    guard(|| pools::set_current(session()?, device, pool))
}

/// The device of a location. Devices have pools of their own memory, the host none.
fn device_at(location: In<CUmemLocation>, kind: u32) -> Status<CUdevice> {
    let location = location.get()?;
    if location.kind != CU_MEM_LOCATION_TYPE_DEVICE {
        return Err(match location.kind {
            CU_MEM_LOCATION_TYPE_HOST
            | CU_MEM_LOCATION_TYPE_HOST_NUMA
            | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => CUDA_ERROR_NOT_SUPPORTED,
            _ => CUDA_ERROR_INVALID_VALUE,
        });
    }
    match kind {
        CU_MEM_ALLOCATION_TYPE_PINNED => Ok(location.id),
        CU_MEM_ALLOCATION_TYPE_MANAGED => Err(CUDA_ERROR_NOT_SUPPORTED),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// `cuMemGetDefaultMemPool`.
pub unsafe extern "C" fn get_default_at(
    out: Out<u64>,
    location: In<CUmemLocation>,
    kind: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(pools::default_pool(session()?, device_at(location, kind)?)?)
    })
}

/// `cuMemGetMemPool`.
pub unsafe extern "C" fn get_current_at(
    out: Out<u64>,
    location: In<CUmemLocation>,
    kind: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(pools::current(session()?, device_at(location, kind)?)?)
    })
}

/// `cuMemSetMemPool`.
pub unsafe extern "C" fn set_current_at(
    location: In<CUmemLocation>,
    kind: u32,
    pool: u64,
) -> CUresult {
    guard(|| pools::set_current(session()?, device_at(location, kind)?, pool))
}

/// `cuMemPoolCreate`.
pub unsafe extern "C" fn create(out: Out<u64>, properties: In<CUmemPoolProps>) -> CUresult {
    guard(|| {
        out.required()?;
        let properties = properties.get()?;
        let created = pools::create(session()?, &properties);
        out.set(created.map_err(|status| match status {
            CUDA_ERROR_INVALID_DEVICE => CUDA_ERROR_INVALID_VALUE,
            other => other,
        })?)
    })
}

/// `cuMemPoolDestroy`.
pub unsafe extern "C" fn destroy(pool: u64) -> CUresult {
    guard(|| pools::destroy(session()?, pool))
}

/// Whether an attribute is an `int`; the others are 64 bits wide.
fn is_int(attribute: u32) -> bool {
    matches!(
        attribute,
        CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
            | CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
            | CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
    )
}

/// `cuMemPoolGetAttribute`.
pub unsafe extern "C" fn get_attribute(pool: u64, attribute: u32, out: *mut c_void) -> CUresult {
    guard(|| {
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let value = pools::attribute(session()?, pool, attribute)?;
        // SAFETY: the program gave room for the attribute's value, whose type the attribute says.
        unsafe {
            if is_int(attribute) {
                out.cast::<c_int>().write(value as c_int);
            } else {
                out.cast::<u64>().write(value);
            }
        }
        Ok(())
    })
}

/// `cuMemPoolSetAttribute`.
pub unsafe extern "C" fn set_attribute(pool: u64, attribute: u32, value: *mut c_void) -> CUresult {
    guard(|| {
        if value.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the program's value, whose type the attribute says.
        let value = unsafe {
            if is_int(attribute) {
                value.cast::<c_int>().read() as u32 as u64
            } else {
                value.cast::<u64>().read()
            }
        };
        pools::set_attribute(session()?, pool, attribute, value)
    })
}

/// `cuMemPoolSetAccess`.
pub unsafe extern "C" fn set_access(
    pool: u64,
    accesses: In<CUmemAccessDesc>,
    count: usize,
) -> CUresult {
    guard(|| {
        let accesses = (0..count.min(crate::proxy::virtual_memory::ACCESSES + 1))
            .map(|index| accesses.at(index))
            .collect::<Status<Vec<_>>>()?;
        pools::set_access(session()?, pool, &accesses)
    })
}

/// `cuMemPoolGetAccess`.
pub unsafe extern "C" fn get_access(
    flags: Out<u32>,
    pool: u64,
    location: In<CUmemLocation>,
) -> CUresult {
    guard(|| {
        flags.required()?;
        flags.set(pools::access(session()?, pool, &location.get()?)?)
    })
}

/// `cuMemPoolTrimTo`.
pub unsafe extern "C" fn trim_to(pool: u64, keep: usize) -> CUresult {
    guard(|| pools::trim(session()?, pool, keep as u64))
}
