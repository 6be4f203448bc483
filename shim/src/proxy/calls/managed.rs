//! Managed memory.

use std::ffi::c_void;

use mpsshim_api::cuda::*;

use super::entries;
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::stream::StreamRef;
use crate::proxy::submit::session;
use crate::proxy::{capture, context, default_stream, managed};

entries! {
    cuMemAllocManaged(_, _, _) => alloc,
    cuMemAdvise(_, _, _, _) => advise_v1,
    cuMemAdvise_v2(_, _, _, _) => advise,
    cuMemPrefetchAsync(_, _, _, _) => prefetch_v1::<false>,
    cuMemPrefetchAsync_ptsz(_, _, _, _) => prefetch_v1::<true>,
    cuMemPrefetchAsync_v2(_, _, _, _, _) => prefetch::<false>,
    cuMemPrefetchAsync_v2_ptsz(_, _, _, _, _) => prefetch::<true>,
    cuMemPrefetchBatchAsync(_, _, _, _, _, _, _, _) => prefetch_batch::<false, false>,
    cuMemPrefetchBatchAsync_ptsz(_, _, _, _, _, _, _, _) => prefetch_batch::<true, false>,
    cuMemDiscardBatchAsync(_, _, _, _, _) => discard_batch::<false>,
    cuMemDiscardBatchAsync_ptsz(_, _, _, _, _) => discard_batch::<true>,
    cuMemDiscardAndPrefetchBatchAsync(_, _, _, _, _, _, _, _) => prefetch_batch::<false, true>,
    cuMemDiscardAndPrefetchBatchAsync_ptsz(_, _, _, _, _, _, _, _) => prefetch_batch::<true, true>,
    cuMemRangeGetAttribute(_, _, _, _, _) => get_attribute,
    cuMemRangeGetAttributes(_, _, _, _, _, _) => get_attributes,
    cuStreamAttachMemAsync(_, _, _, _) => attach::<false>,
    cuStreamAttachMemAsync_ptsz(_, _, _, _) => attach::<true>,
}

/// `cuMemAllocManaged`.
pub unsafe extern "C" fn alloc(out: Out<CUdeviceptr>, len: usize, flags: u32) -> CUresult {
    guard(|| {
        out.required()?;
        managed::check_flags(flags)?;
        let (session, context) = (session()?, context::current()?);
        capture::forbid(session)?;
        out.set(managed::alloc(session, context, len as u64, flags)?)
    })
}

/// `cuMemAdvise` before CUDA 12.2: a device, or -1 for the processor.
pub unsafe extern "C" fn advise_v1(
    address: CUdeviceptr,
    len: usize,
    advice: u32,
    device: CUdevice,
) -> CUresult {
    guard(|| {
        session()?.check()?;
        managed::advise(address, len as u64, advice, managed::location_of(device))
    })
}

/// `cuMemAdvise`.
pub unsafe extern "C" fn advise(
    address: CUdeviceptr,
    len: usize,
    advice: u32,
    location: CUmemLocation,
) -> CUresult {
    guard(|| {
        session()?.check()?;
        managed::advise(address, len as u64, advice, location)
    })
}

/// `cuMemPrefetchAsync` before CUDA 12.2.
pub unsafe extern "C" fn prefetch_v1<const P: bool>(
    address: CUdeviceptr,
    len: usize,
    device: CUdevice,
    stream: u64,
) -> CUresult {
    guard(|| {
        managed::check(address, len as u64)?;
        let stream = default_stream::resolve(stream, P)?;
        let location = managed::location_of(device);
        managed::prefetch(session()?, stream, address, len as u64, location)
    })
}

/// `cuMemPrefetchAsync`.
pub unsafe extern "C" fn prefetch<const P: bool>(
    address: CUdeviceptr,
    len: usize,
    location: CUmemLocation,
    flags: u32,
    stream: u64,
) -> CUresult {
    guard(|| {
        managed::check(address, len as u64)?;
        let stream = default_stream::resolve(stream, P)?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        managed::prefetch(session()?, stream, address, len as u64, location)
    })
}

/// Checks the stream of a batch. `CUDA_ERROR_INVALID_VALUE` for the legacy default stream.
fn resolve_named<const P: bool>(stream: u64) -> Status<StreamRef> {
    if stream == 0 && !P || stream == CU_STREAM_LEGACY.0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    default_stream::resolve(stream, P)
}

/// `cuMemPrefetchBatchAsync`; with `DISCARD` `cuMemDiscardAndPrefetchBatchAsync`.
pub unsafe extern "C" fn prefetch_batch<const P: bool, const DISCARD: bool>(
    addresses: In<CUdeviceptr>,
    lens: In<usize>,
    count: usize,
    locations: In<CUmemLocation>,
    first: In<usize>,
    kinds: usize,
    flags: u64,
    stream: u64,
) -> CUresult {
    guard(|| {
        let (session, stream) = (session()?, resolve_named::<P>(stream)?);
        if count == 0 || kinds == 0 || kinds > count || flags != 0 || first.at(0)? != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut kind = 0;
        for at in 0..count {
            if kind + 1 < kinds && first.at(kind + 1)? == at {
                kind += 1;
            }
            let (address, len) = (addresses.at(at)?, lens.at(at)? as u64);
            if DISCARD {
                managed::discard(session, stream, address, len)?;
            }
            managed::prefetch(session, stream, address, len, locations.at(kind)?)?;
        }
        // Each location holds from its own first range on.
        if kind + 1 < kinds {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    })
}

/// `cuMemDiscardBatchAsync`.
pub unsafe extern "C" fn discard_batch<const P: bool>(
    addresses: In<CUdeviceptr>,
    lens: In<usize>,
    count: usize,
    flags: u64,
    stream: u64,
) -> CUresult {
    guard(|| {
        let (session, stream) = (session()?, resolve_named::<P>(stream)?);
        if count == 0 || flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        (0..count).try_for_each(|at| managed::check(addresses.at(at)?, lens.at(at)? as u64))?;
        (0..count).try_for_each(|at| {
            managed::discard(session, stream, addresses.at(at)?, lens.at(at)? as u64)
        })
    })
}

/// Stores an attribute of a range in the program's place of `bytes` bytes.
fn store(out: *mut c_void, bytes: usize, which: u32, address: u64, len: usize) -> Status {
    if out.is_null() || !bytes.is_multiple_of(4) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let words = managed::attribute(which, bytes / 4, address, len as u64)?;
    // SAFETY: the program gave room for this many bytes.
    unsafe { std::ptr::copy_nonoverlapping(words.as_ptr().cast::<u8>(), out.cast(), bytes) };
    Ok(())
}

/// `cuMemRangeGetAttribute`.
pub unsafe extern "C" fn get_attribute(
    out: *mut c_void,
    bytes: usize,
    which: u32,
    address: CUdeviceptr,
    len: usize,
) -> CUresult {
    guard(|| {
        context::current()?;
        session()?.check()?;
        store(out, bytes, which, address, len)
    })
}

/// `cuMemRangeGetAttributes`.
pub unsafe extern "C" fn get_attributes(
    out: In<*mut c_void>,
    bytes: In<usize>,
    which: In<u32>,
    count: usize,
    address: CUdeviceptr,
    len: usize,
) -> CUresult {
    guard(|| {
        context::current()?;
        session()?.check()?;
        if count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        (0..count).try_for_each(|at| store(out.at(at)?, bytes.at(at)?, which.at(at)?, address, len))
    })
}

/// `cuStreamAttachMemAsync`: every stream and the processor may use the memory at any time, so nothing is attached.
pub unsafe extern "C" fn attach<const P: bool>(
    stream: u64,
    address: CUdeviceptr,
    len: usize,
    flags: u32,
) -> CUresult {
    guard(|| {
        default_stream::resolve(stream, P)?;
        let (start, room) = managed::block(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let whole = start == address && (len == 0 || len as u64 == room);
        let known = matches!(
            flags,
            CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST | CU_MEM_ATTACH_SINGLE
        );
        if !whole || !known {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    })
}
