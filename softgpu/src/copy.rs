//! Copies and fills.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use mpsshim_api::cuda::*;

use crate::api::{R, api_streams};
use crate::context::Context;
use crate::driver::driver;
use crate::graph::{self, Does};
use crate::stream::{Stream, resolve};

/// Which sides of a copy must be device memory: (to, from).
type Sides = (bool, bool);
const ANY: Sides = (false, false);
const TO_DEVICE: Sides = (true, false);
const FROM_DEVICE: Sides = (false, true);
const BOTH: Sides = (true, true);

type Place = (Arc<Context>, Arc<Stream>);

/// Where a call without a stream does its work.
fn default(own: bool) -> R<Place> {
    resolve(CUstream::NULL, own)
}

fn is_device(address: u64, bytes: u64) -> R<bool> {
    Ok(driver()?.ranges.covers(address, bytes))
}

fn move_bytes(to: u64, from: u64, bytes: usize) {
    // SAFETY: device sides were checked against the ranges when the call was made; host sides are, by the
    // driver API's contract, the caller's memory for as long as the copy runs. `copy` allows overlap.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) }
}

/// By how much asynchronous copies of pageable memory to a device begin late: as `SOFTGPU_LATE_COPIES` says.
static LATE: LazyLock<Duration> = LazyLock::new(|| {
    let micros = std::env::var("SOFTGPU_LATE_COPIES").ok();
    Duration::from_micros(micros.and_then(|text| text.parse().ok()).unwrap_or(0))
});

fn copy(place: R<Place>, to: u64, from: u64, bytes: usize, sides: Sides, wait: bool) -> R<()> {
    let (context, stream) = place?;
    if bytes == 0 {
        return Ok(());
    }
    let device = |address| is_device(address, bytes as u64);
    let (to_device, from_device) = (device(to)?, device(from)?);
    let fits = (to_device || !sides.0) && (from_device || !sides.1);
    // A range that begins in device memory and leaves it is nobody's host memory.
    let crosses = !to_device && is_device(to, 1)? || !from_device && is_device(from, 1)?;
    let ranges = &driver()?.ranges;
    let one = to_device != from_device;
    let barred = one
        && ![to, from]
            .iter()
            .all(|side| ranges.is_for(*side, context.device));
    if !fits || to == 0 || from == 0 || crosses || barred {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if !wait {
        let node = || {
            // Where the call names the kinds of memory, the node has them.
            let kind = |is_device: bool| match (sides.0 || sides.1, is_device) {
                (false, _) => CU_MEMORYTYPE_UNIFIED,
                (true, true) => CU_MEMORYTYPE_DEVICE,
                (true, false) => CU_MEMORYTYPE_HOST,
            };
            let of_host = |is_device: bool, address: u64| match kind(is_device) {
                CU_MEMORYTYPE_HOST => (address, 0),
                _ => (0, address),
            };
            let (src_host, src_device) = of_host(sides.1, from);
            let (dst_host, dst_device) = of_host(sides.0, to);
            Does::Copy(CUDA_MEMCPY3D {
                src_type: kind(sides.1),
                src_host,
                src_device,
                dst_type: kind(sides.0),
                dst_host,
                dst_device,
                width: bytes as u64,
                height: 1,
                depth: 1,
                ..CUDA_MEMCPY3D::default()
            })
        };
        if graph::captured(&stream, node)? {
            return Ok(());
        }
    }
    // The caller may reuse pageable memory as soon as the call returns.
    let mut kept = vec![0u8; if from_device || wait { 0 } else { bytes }];
    if !kept.is_empty() {
        move_bytes(kept.as_mut_ptr() as u64, from, bytes);
    }
    stream.submit(&context, move |_| {
        let from = if kept.is_empty() {
            from
        } else {
            if !LATE.is_zero() {
                std::thread::sleep(*LATE);
            }
            kept.as_ptr() as u64
        };
        move_bytes(to, from, bytes);
        Ok(())
    });
    // A copy to pageable memory is complete when the call returns, as natively.
    if wait || !to_device {
        stream.synchronize(&context)
    } else {
        Ok(())
    }
}

/// `height` rows of `width` values, `pitch` bytes apart.
#[derive(Clone, Copy)]
struct Area {
    pitch: usize,
    width: usize,
    height: usize,
}

fn line(width: usize) -> Area {
    Area {
        pitch: usize::MAX,
        width,
        height: 1,
    }
}

fn fill<const N: usize>(place: R<Place>, to: u64, area: Area, value: [u8; N], wait: bool) -> R<()> {
    let (context, stream) = place?;
    let Area {
        pitch,
        width,
        height,
    } = area;
    if width == 0 || height == 0 {
        return Ok(());
    }
    // The product wraps, as the driver's does.
    let row = width.wrapping_mul(N);
    if row == 0 {
        return Ok(());
    }
    let pitch = if height == 1 { row } else { pitch };
    let bytes = pitch
        .checked_mul(height - 1)
        .and_then(|gaps| gaps.checked_add(row));
    let bytes = bytes.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let aligned = to.is_multiple_of(N as u64) && pitch.is_multiple_of(N);
    if !aligned || pitch < row {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut word = [0u8; 4];
    word[..N].copy_from_slice(&value);
    let node = || {
        Does::Set(CUDA_MEMSET_NODE_PARAMS {
            to,
            pitch: if height == 1 { 0 } else { pitch as u64 },
            value: u32::from_le_bytes(word),
            element: N as u32,
            width: width as u64,
            height: height as u64,
        })
    };
    // A captured one goes anywhere: `instantiate` looks.
    if !wait && graph::captured(&stream, node)? {
        return Ok(());
    }
    if !is_device(to, bytes as u64)? || !context.may_set(to)? {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    stream.submit(&context, move |_| {
        for n in 0..height {
            let start = (to as usize + n * pitch) as *mut u8;
            // SAFETY: the whole rectangle was checked against the ranges when the call was made.
            let row = unsafe { std::slice::from_raw_parts_mut(start, row) };
            row.chunks_exact_mut(N)
                .for_each(|c| c.copy_from_slice(&value));
        }
        Ok(())
    });
    if wait {
        stream.synchronize(&context)
    } else {
        Ok(())
    }
}

/// The functions of one kind of copy or fill: at once, and in a stream.
macro_rules! copies {
    ($($sync:ident / $sync_own:ident, $in_stream:ident / $in_stream_own:ident: $sides:ident;)*) => {
        api_streams! { COPIES; $(
            fn $sync / $sync_own [own] (to: u64, from: u64, bytes: usize) {
                copy(default(own), to, from, bytes, $sides, true)
            }
            fn $in_stream / $in_stream_own [own] (to: u64, from: u64, bytes: usize, stream: CUstream) {
                copy(resolve(stream, own), to, from, bytes, $sides, false)
            }
        )* }
    };
}
copies! {
    cuMemcpy / cuMemcpy_ptds, cuMemcpyAsync / cuMemcpyAsync_ptsz: ANY;
    cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds, cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz: TO_DEVICE;
    cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds, cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz: FROM_DEVICE;
    cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds, cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz: BOTH;
}

api_streams! { PEER_COPIES;
    fn cuMemcpyPeer / cuMemcpyPeer_ptds [own] (to: u64, _to_context: CUcontext, from: u64, _from_context: CUcontext, bytes: usize) {
        copy(default(own), to, from, bytes, BOTH, true)
    }
    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz [own] (to: u64, _to_context: CUcontext, from: u64, _from_context: CUcontext, bytes: usize, stream: CUstream) {
        copy(resolve(stream, own), to, from, bytes, BOTH, false)
    }
}

macro_rules! fills {
    ($($value:ty: $sync:ident / $sync_own:ident, $in_stream:ident / $in_stream_own:ident,
       $area:ident / $area_own:ident, $area_in_stream:ident / $area_in_stream_own:ident;)*) => {
        api_streams! { FILLS; $(
            fn $sync / $sync_own [own] (to: u64, value: $value, n: usize) {
                fill(default(own), to, line(n), value.to_le_bytes(), true)
            }
            fn $in_stream / $in_stream_own [own] (to: u64, value: $value, n: usize, stream: CUstream) {
                fill(resolve(stream, own), to, line(n), value.to_le_bytes(), false)
            }
            fn $area / $area_own [own] (to: u64, pitch: usize, value: $value, width: usize, height: usize) {
                fill(default(own), to, Area { pitch, width, height }, value.to_le_bytes(), true)
            }
            fn $area_in_stream / $area_in_stream_own [own] (to: u64, pitch: usize, value: $value, width: usize, height: usize, stream: CUstream) {
                fill(resolve(stream, own), to, Area { pitch, width, height }, value.to_le_bytes(), false)
            }
        )* }
    };
}
fills! {
    u8: cuMemsetD8_v2 / cuMemsetD8_v2_ptds, cuMemsetD8Async / cuMemsetD8Async_ptsz,
        cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds, cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz;
    u16: cuMemsetD16_v2 / cuMemsetD16_v2_ptds, cuMemsetD16Async / cuMemsetD16Async_ptsz,
        cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds, cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz;
    u32: cuMemsetD32_v2 / cuMemsetD32_v2_ptds, cuMemsetD32Async / cuMemsetD32Async_ptsz,
        cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds, cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz;
}
