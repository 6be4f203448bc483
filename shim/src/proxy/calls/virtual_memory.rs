//! Virtual memory management.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};

use mpsshim_api::cuda::*;

use super::entries;
use crate::ffi::{In, Out, guard};
use crate::proxy::submit::session;
use crate::proxy::virtual_memory;

entries! {
    cuMemGetAllocationGranularity(_, _, _) => get_granularity,
    cuMemAddressReserve(_, _, _, _, _) => reserve,
    cuMemAddressFree(_, _) => free,
    cuMemCreate(_, _, _, _) => create,
    cuMemRelease(_) => release,
    cuMemMap(_, _, _, _, _) => map,
    cuMemUnmap(_, _) => unmap,
    cuMemSetAccess(_, _, _, _) => set_access,
    cuMemGetAccess(_, _, _) => get_access,
    cuMemRetainAllocationHandle(_, _) => retain,
    cuMemGetAllocationPropertiesFromHandle(_, _) => get_properties,
    cuMemExportToShareableHandle(_, _, _, _) => export,
    cuMemImportFromShareableHandle(_, _, _) => import,
}

/// `cuMemGetAllocationGranularity`.
pub unsafe extern "C" fn get_granularity(
    out: Out<usize>,
    properties: In<CUmemAllocationProp>,
    option: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(virtual_memory::granularity(
            session()?,
            &properties.get()?,
            option,
        )?)
    })
}

/// `cuMemAddressReserve`. The server chooses the address; the program's own choice is only a hint natively too.
pub unsafe extern "C" fn reserve(
    out: Out<CUdeviceptr>,
    len: usize,
    alignment: usize,
    hint: CUdeviceptr,
    flags: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(virtual_memory::reserve(
            session()?,
            len as u64,
            alignment as u64,
            hint,
            flags,
        )?)
    })
}

/// `cuMemAddressFree`.
pub unsafe extern "C" fn free(start: CUdeviceptr, len: usize) -> CUresult {
    guard(|| virtual_memory::free(session()?, start, len as u64))
}

/// `cuMemCreate`.
pub unsafe extern "C" fn create(
    out: Out<u64>,
    len: usize,
    properties: In<CUmemAllocationProp>,
    flags: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        let properties = properties.get()?;
        out.set(virtual_memory::create(
            session()?,
            len as u64,
            &properties,
            flags,
        )?)
    })
}

/// `cuMemRelease`.
pub unsafe extern "C" fn release(handle: u64) -> CUresult {
    guard(|| virtual_memory::release(session()?, handle))
}

/// `cuMemMap`.
pub unsafe extern "C" fn map(
    start: CUdeviceptr,
    len: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> CUresult {
    guard(|| virtual_memory::map(session()?, start, len as u64, offset as u64, handle, flags))
}

/// `cuMemUnmap`.
pub unsafe extern "C" fn unmap(start: CUdeviceptr, len: usize) -> CUresult {
    guard(|| virtual_memory::unmap(session()?, start, len as u64))
}

/// `cuMemSetAccess`.
pub unsafe extern "C" fn set_access(
    start: CUdeviceptr,
    len: usize,
    accesses: In<CUmemAccessDesc>,
    count: usize,
) -> CUresult {
    guard(|| {
        let accesses = (0..count.min(virtual_memory::ACCESSES))
            .map(|index| accesses.at(index))
            .collect::<Result<Vec<_>, _>>()?;
        virtual_memory::set_access(session()?, start, len as u64, &accesses)
    })
}

/// `cuMemGetAccess`.
pub unsafe extern "C" fn get_access(
    flags: Out<u64>,
    location: In<CUmemLocation>,
    address: CUdeviceptr,
) -> CUresult {
    guard(|| {
        flags.set(0)?;
        flags.set(virtual_memory::access(
            session()?,
            &location.get()?,
            address,
        )?)
    })
}

/// `cuMemRetainAllocationHandle`.
pub unsafe extern "C" fn retain(out: Out<u64>, address: CUdeviceptr) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(virtual_memory::retain(session()?, address)?)
    })
}

/// `cuMemGetAllocationPropertiesFromHandle`.
pub unsafe extern "C" fn get_properties(out: Out<CUmemAllocationProp>, handle: u64) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(virtual_memory::properties(handle)?)
    })
}

/// `cuMemExportToShareableHandle`: a descriptor that is the program's to close.
pub unsafe extern "C" fn export(out: Out<c_int>, handle: u64, kind: u32, flags: u64) -> CUresult {
    guard(|| {
        out.required()?;
        if kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let descriptor = virtual_memory::export(session()?, handle, kind, flags)?;
        out.set(descriptor.into_raw_fd())
    })
}

/// `cuMemImportFromShareableHandle`: the descriptor itself is given in place of a pointer.
pub unsafe extern "C" fn import(out: Out<u64>, descriptor: *mut c_void, kind: u32) -> CUresult {
    guard(|| {
        out.required()?;
        if kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let raw = descriptor as usize as c_int;
        // SAFETY: a plain system call: whether the program has a descriptor of this number.
        if raw < 0 || unsafe { libc::fcntl(raw, libc::F_GETFD) } < 0 {
            return Err(CUDA_ERROR_UNKNOWN);
        }
        // SAFETY: the program's open descriptor, which it keeps open for the call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(raw) };
        out.set(virtual_memory::import(session()?, descriptor)?)
    })
}
