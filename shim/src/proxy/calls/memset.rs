//! Memsets: one message for all of them.

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUresult};
use mpsshim_proto::message::{Memset, Op};

use super::{entries, peer};
use crate::ffi::{Status, guard};
use crate::proxy::default_stream;
use crate::proxy::memory::{self, Place};
use crate::proxy::pages;
use crate::proxy::stream;
use crate::proxy::submit::session;

entries! {
    cuMemsetD8_v2(_, _, _) => set_8::<false>,
    cuMemsetD8_v2_ptds(_, _, _) => set_8::<true>,
    cuMemsetD8Async(_, _, _, _) => set_8_async::<false>,
    cuMemsetD8Async_ptsz(_, _, _, _) => set_8_async::<true>,
    cuMemsetD2D8_v2(_, _, _, _, _) => set_rows_8::<false>,
    cuMemsetD2D8_v2_ptds(_, _, _, _, _) => set_rows_8::<true>,
    cuMemsetD2D8Async(_, _, _, _, _, _) => set_rows_8_async::<false>,
    cuMemsetD2D8Async_ptsz(_, _, _, _, _, _) => set_rows_8_async::<true>,
    cuMemsetD16_v2(_, _, _) => set_16::<false>,
    cuMemsetD16_v2_ptds(_, _, _) => set_16::<true>,
    cuMemsetD16Async(_, _, _, _) => set_16_async::<false>,
    cuMemsetD16Async_ptsz(_, _, _, _) => set_16_async::<true>,
    cuMemsetD2D16_v2(_, _, _, _, _) => set_rows_16::<false>,
    cuMemsetD2D16_v2_ptds(_, _, _, _, _) => set_rows_16::<true>,
    cuMemsetD2D16Async(_, _, _, _, _, _) => set_rows_16_async::<false>,
    cuMemsetD2D16Async_ptsz(_, _, _, _, _, _) => set_rows_16_async::<true>,
    cuMemsetD32_v2(_, _, _) => set_32::<false>,
    cuMemsetD32_v2_ptds(_, _, _) => set_32::<true>,
    cuMemsetD32Async(_, _, _, _) => set_32_async::<false>,
    cuMemsetD32Async_ptsz(_, _, _, _) => set_32_async::<true>,
    cuMemsetD2D32_v2(_, _, _, _, _) => set_rows_32::<false>,
    cuMemsetD2D32_v2_ptds(_, _, _, _, _) => set_rows_32::<true>,
    cuMemsetD2D32Async(_, _, _, _, _, _) => set_rows_32_async::<false>,
    cuMemsetD2D32Async_ptsz(_, _, _, _, _, _) => set_rows_32_async::<true>,
}

/// Sets `height` rows of `width` elements, `pitch` bytes apart.
fn fill(
    (stream, per_thread): (u64, bool),
    to: CUdeviceptr,
    value: u32,
    element: u32,
    (width, height, pitch): (usize, usize, usize),
) -> Status {
    let session = session()?;
    let stream = default_stream::resolve(stream, per_thread)?;
    if width == 0 || height == 0 {
        return session.check();
    }
    // The driver's own product wraps: nothing is set where 2^64 divides it.
    let row = (width as u64).wrapping_mul(element as u64);
    if row == 0 {
        return session.check();
    }
    let pitch = if height == 1 { row } else { pitch as u64 };
    let len = pitch
        .checked_mul(height as u64 - 1)
        .and_then(|rows| rows.checked_add(row))
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let aligned = to.is_multiple_of(element as u64) && pitch.is_multiple_of(element as u64);
    if pitch < row || !aligned {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let place = memory::device_place(to, len);
    let to = match place {
        Ok(Place::Device(address))
            if memory::device_of(address)
                .is_some_and(|device| !peer::reaches(stream.context(), device))
                && !stream.is_capturing() =>
        {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(Place::Device(address) | Place::Pinned(address) | Place::Pageable(address)) => address,
        // A graph with such a memset is not instantiated; libraries capture it to see which kernels they would use.
        Err(_) if stream.is_capturing() => to,
        Err(status) => return Err(status),
    };
    let body = Memset {
        to,
        stream: stream.handle(),
        width: width as u64,
        height: height as u64,
        pitch,
        value,
        element,
    };
    match pages::is_in(to) {
        true => stream::submit(session, stream, Op::Memset, &body, &[]),
        false => stream::submit_apart(session, stream, Op::Memset, &body, &[]),
    }
}

/// `cuMemsetD8`.
pub unsafe extern "C" fn set_8<const P: bool>(
    to: CUdeviceptr,
    value: u8,
    count: usize,
) -> CUresult {
    guard(|| fill((0, P), to, value as u32, 1, (count, 1, 0)))
}

/// `cuMemsetD8Async`.
pub unsafe extern "C" fn set_8_async<const P: bool>(
    to: CUdeviceptr,
    value: u8,
    count: usize,
    stream: u64,
) -> CUresult {
    guard(|| fill((stream, P), to, value as u32, 1, (count, 1, 0)))
}

/// `cuMemsetD2D8`.
pub unsafe extern "C" fn set_rows_8<const P: bool>(
    to: CUdeviceptr,
    pitch: usize,
    value: u8,
    width: usize,
    height: usize,
) -> CUresult {
    guard(|| fill((0, P), to, value as u32, 1, (width, height, pitch)))
}

/// `cuMemsetD2D8Async`.
pub unsafe extern "C" fn set_rows_8_async<const P: bool>(
    to: CUdeviceptr,
    pitch: usize,
    value: u8,
    width: usize,
    height: usize,
    stream: u64,
) -> CUresult {
    guard(|| fill((stream, P), to, value as u32, 1, (width, height, pitch)))
}

/// `cuMemsetD16`.
pub unsafe extern "C" fn set_16<const P: bool>(
    to: CUdeviceptr,
    value: u16,
    count: usize,
) -> CUresult {
    guard(|| fill((0, P), to, value as u32, 2, (count, 1, 0)))
}

/// `cuMemsetD16Async`.
pub unsafe extern "C" fn set_16_async<const P: bool>(
    to: CUdeviceptr,
    value: u16,
    count: usize,
    stream: u64,
) -> CUresult {
    guard(|| fill((stream, P), to, value as u32, 2, (count, 1, 0)))
}

/// `cuMemsetD2D16`.
pub unsafe extern "C" fn set_rows_16<const P: bool>(
    to: CUdeviceptr,
    pitch: usize,
    value: u16,
    width: usize,
    height: usize,
) -> CUresult {
    guard(|| fill((0, P), to, value as u32, 2, (width, height, pitch)))
}

/// `cuMemsetD2D16Async`.
pub unsafe extern "C" fn set_rows_16_async<const P: bool>(
    to: CUdeviceptr,
    pitch: usize,
    value: u16,
    width: usize,
    height: usize,
    stream: u64,
) -> CUresult {
    guard(|| fill((stream, P), to, value as u32, 2, (width, height, pitch)))
}

/// `cuMemsetD32`.
pub unsafe extern "C" fn set_32<const P: bool>(
    to: CUdeviceptr,
    value: u32,
    count: usize,
) -> CUresult {
    guard(|| fill((0, P), to, value, 4, (count, 1, 0)))
}

/// `cuMemsetD32Async`.
pub unsafe extern "C" fn set_32_async<const P: bool>(
    to: CUdeviceptr,
    value: u32,
    count: usize,
    stream: u64,
) -> CUresult {
    guard(|| fill((stream, P), to, value, 4, (count, 1, 0)))
}

/// `cuMemsetD2D32`.
pub unsafe extern "C" fn set_rows_32<const P: bool>(
    to: CUdeviceptr,
    pitch: usize,
    value: u32,
    width: usize,
    height: usize,
) -> CUresult {
    guard(|| fill((0, P), to, value, 4, (width, height, pitch)))
}

/// `cuMemsetD2D32Async`.
pub unsafe extern "C" fn set_rows_32_async<const P: bool>(
    to: CUdeviceptr,
    pitch: usize,
    value: u32,
    width: usize,
    height: usize,
    stream: u64,
) -> CUresult {
    guard(|| fill((stream, P), to, value, 4, (width, height, pitch)))
}
