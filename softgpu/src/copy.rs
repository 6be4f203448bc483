//! Copies and fills.

use std::sync::Arc;

use mpsshim_proto::cuda::*;

use crate::api::{In, R, api_streams};
use crate::context::Context;
use crate::driver::driver;
use crate::stream::{Stream, resolve};

/// Which sides of a copy must be device memory.
#[derive(Clone, Copy)]
enum Sides {
    Any,
    ToDevice,
    FromDevice,
    Both,
}

/// A rectangle of rows; a plain copy is one row.
#[derive(Clone, Copy)]
struct Shape {
    row: u64,
    rows: u64,
    to_pitch: u64,
    from_pitch: u64,
}

impl Shape {
    fn line(bytes: u64) -> Shape {
        Shape {
            row: bytes,
            rows: 1,
            to_pitch: bytes,
            from_pitch: bytes,
        }
    }
    /// Bytes from the first to behind the last, for rows `pitch` apart.
    fn extent(&self, pitch: u64) -> R<u64> {
        let gaps = pitch
            .checked_mul(self.rows.saturating_sub(1))
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        gaps.checked_add(self.row).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}

fn is_device(address: u64, bytes: u64) -> R<bool> {
    Ok(driver()?.ranges.covers(address, bytes))
}

fn move_rows(to: u64, from: u64, shape: Shape) {
    for n in 0..shape.rows {
        let (to, from) = (to + n * shape.to_pitch, from + n * shape.from_pitch);
        // SAFETY: device sides were checked against the ranges when the call was made; host sides are, by
        // the driver API's contract, the caller's memory for as long as the copy runs. `copy` allows overlap.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, shape.row as usize) }
    }
}

fn copy(
    place: (Arc<Context>, Arc<Stream>),
    to: u64,
    from: u64,
    shape: Shape,
    sides: Sides,
    wait: bool,
) -> R<()> {
    if shape.row == 0 || shape.rows == 0 {
        return Ok(());
    }
    let (context, stream) = place;
    let (to_bytes, from_bytes) = (
        shape.extent(shape.to_pitch)?,
        shape.extent(shape.from_pitch)?,
    );
    let to_device = is_device(to, to_bytes)?;
    let from_device = is_device(from, from_bytes)?;
    let fits = match sides {
        Sides::Any => true,
        Sides::ToDevice => to_device,
        Sides::FromDevice => from_device,
        Sides::Both => to_device && from_device,
    };
    // A range that begins in device memory and leaves it is nobody's host memory.
    let crosses = |device: bool, address: u64| -> R<bool> { Ok(!device && is_device(address, 1)?) };
    if !fits || to == 0 || from == 0 || crosses(to_device, to)? || crosses(from_device, from)? {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if from_device || wait {
        stream.submit(&context, move |_| {
            move_rows(to, from, shape);
            Ok(())
        });
    } else {
        // The caller may reuse pageable memory as soon as the call returns.
        let mut kept = vec![0u8; from_bytes as usize];
        move_rows(kept.as_mut_ptr() as u64, from, Shape::line(from_bytes));
        stream.submit(&context, move |_| {
            move_rows(to, kept.as_ptr() as u64, shape);
            Ok(())
        });
    }
    // A copy to pageable memory is complete when the call returns, as natively.
    if wait || !to_device {
        stream.synchronize(&context)
    } else {
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Fill {
    to: u64,
    pitch: u64,
    unit: u64,
    value: u32,
    width: u64,
    height: u64,
}

fn fill(place: (Arc<Context>, Arc<Stream>), f: Fill, wait: bool) -> R<()> {
    let row = f
        .width
        .checked_mul(f.unit)
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if row == 0 || f.height == 0 {
        return Ok(());
    }
    let pitch = if f.height == 1 { row } else { f.pitch };
    let bytes = Shape {
        row,
        rows: f.height,
        to_pitch: pitch,
        from_pitch: 0,
    }
    .extent(pitch)?;
    if !f.to.is_multiple_of(f.unit) || pitch < row || !is_device(f.to, bytes)? {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let (context, stream) = place;
    stream.submit(&context, move |_| {
        let value = f.value.to_le_bytes();
        for n in 0..f.height {
            // SAFETY: the whole rectangle was checked against the ranges when the call was made.
            let row = unsafe {
                std::slice::from_raw_parts_mut((f.to + n * pitch) as *mut u8, row as usize)
            };
            match f.unit {
                1 => row.fill(value[0]),
                unit => row
                    .chunks_exact_mut(unit as usize)
                    .for_each(|c| c.copy_from_slice(&value[..unit as usize])),
            }
        }
        Ok(())
    });
    if wait {
        stream.synchronize(&context)
    } else {
        Ok(())
    }
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy2D {
    from: Side2D,
    to: Side2D,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Side2D {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

impl Side2D {
    fn start(&self) -> R<u64> {
        let base = match self.kind {
            CU_MEMORYTYPE_HOST => self.host,
            CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => self.device,
            CU_MEMORYTYPE_ARRAY => return Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        let skipped = (self.y as u64)
            .checked_mul(self.pitch as u64)
            .and_then(|b| b.checked_add(self.x as u64));
        skipped
            .and_then(|skipped| base.checked_add(skipped))
            .ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}

fn copy_2d(place: (Arc<Context>, Arc<Stream>), c: In<Copy2D>, wait: bool) -> R<()> {
    let c = c.get(0)?;
    let pitch = |side: &Side2D| if side.pitch == 0 { c.width } else { side.pitch } as u64;
    let shape = Shape {
        row: c.width as u64,
        rows: c.height as u64,
        to_pitch: pitch(&c.to),
        from_pitch: pitch(&c.from),
    };
    if c.height > 1 && (shape.to_pitch < shape.row || shape.from_pitch < shape.row) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let sides = match (
        c.to.kind == CU_MEMORYTYPE_DEVICE,
        c.from.kind == CU_MEMORYTYPE_DEVICE,
    ) {
        (true, true) => Sides::Both,
        (true, false) => Sides::ToDevice,
        (false, true) => Sides::FromDevice,
        (false, false) => Sides::Any,
    };
    copy(place, c.to.start()?, c.from.start()?, shape, sides, wait)
}

fn default(own: bool) -> R<(Arc<Context>, Arc<Stream>)> {
    resolve(CUstream::NULL, own)
}

fn line(to: u64, unit: u64, value: u32, width: usize) -> Fill {
    Fill {
        to,
        pitch: 0,
        unit,
        value,
        width: width as u64,
        height: 1,
    }
}

fn area(to: u64, pitch: usize, unit: u64, value: u32, width: usize, height: usize) -> Fill {
    Fill {
        to,
        pitch: pitch as u64,
        unit,
        value,
        width: width as u64,
        height: height as u64,
    }
}

api_streams! { TABLE_STREAMS;
    fn cuMemcpy / cuMemcpy_ptds [own] (to: u64, from: u64, bytes: usize) {
        copy(default(own)?, to, from, Shape::line(bytes as u64), Sides::Any, true)
    }
    fn cuMemcpyAsync / cuMemcpyAsync_ptsz [own] (to: u64, from: u64, bytes: usize, stream: CUstream) {
        copy(resolve(stream, own)?, to, from, Shape::line(bytes as u64), Sides::Any, false)
    }
    fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds [own] (to: u64, from: u64, bytes: usize) {
        copy(default(own)?, to, from, Shape::line(bytes as u64), Sides::ToDevice, true)
    }
    fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz [own] (to: u64, from: u64, bytes: usize, stream: CUstream) {
        copy(resolve(stream, own)?, to, from, Shape::line(bytes as u64), Sides::ToDevice, false)
    }
    fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds [own] (to: u64, from: u64, bytes: usize) {
        copy(default(own)?, to, from, Shape::line(bytes as u64), Sides::FromDevice, true)
    }
    fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz [own] (to: u64, from: u64, bytes: usize, stream: CUstream) {
        copy(resolve(stream, own)?, to, from, Shape::line(bytes as u64), Sides::FromDevice, false)
    }
    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds [own] (to: u64, from: u64, bytes: usize) {
        copy(default(own)?, to, from, Shape::line(bytes as u64), Sides::Both, true)
    }
    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz [own] (to: u64, from: u64, bytes: usize, stream: CUstream) {
        copy(resolve(stream, own)?, to, from, Shape::line(bytes as u64), Sides::Both, false)
    }
    fn cuMemcpyPeer / cuMemcpyPeer_ptds [own] (to: u64, _to_context: CUcontext, from: u64, _from_context: CUcontext, bytes: usize) {
        copy(default(own)?, to, from, Shape::line(bytes as u64), Sides::Both, true)
    }
    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz [own] (to: u64, _to_context: CUcontext, from: u64, _from_context: CUcontext, bytes: usize, stream: CUstream) {
        copy(resolve(stream, own)?, to, from, Shape::line(bytes as u64), Sides::Both, false)
    }
    fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds [own] (c: In<Copy2D>) { copy_2d(default(own)?, c, true) }
    fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds [own] (c: In<Copy2D>) { copy_2d(default(own)?, c, true) }
    fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz [own] (c: In<Copy2D>, stream: CUstream) { copy_2d(resolve(stream, own)?, c, false) }
    fn cuMemsetD8_v2 / cuMemsetD8_v2_ptds [own] (to: u64, value: u8, n: usize) { fill(default(own)?, line(to, 1, value.into(), n), true) }
    fn cuMemsetD16_v2 / cuMemsetD16_v2_ptds [own] (to: u64, value: u16, n: usize) { fill(default(own)?, line(to, 2, value.into(), n), true) }
    fn cuMemsetD32_v2 / cuMemsetD32_v2_ptds [own] (to: u64, value: u32, n: usize) { fill(default(own)?, line(to, 4, value, n), true) }
    fn cuMemsetD8Async / cuMemsetD8Async_ptsz [own] (to: u64, value: u8, n: usize, stream: CUstream) { fill(resolve(stream, own)?, line(to, 1, value.into(), n), false) }
    fn cuMemsetD16Async / cuMemsetD16Async_ptsz [own] (to: u64, value: u16, n: usize, stream: CUstream) { fill(resolve(stream, own)?, line(to, 2, value.into(), n), false) }
    fn cuMemsetD32Async / cuMemsetD32Async_ptsz [own] (to: u64, value: u32, n: usize, stream: CUstream) { fill(resolve(stream, own)?, line(to, 4, value, n), false) }
    fn cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds [own] (to: u64, pitch: usize, value: u8, width: usize, height: usize) {
        fill(default(own)?, area(to, pitch, 1, value.into(), width, height), true)
    }
    fn cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds [own] (to: u64, pitch: usize, value: u16, width: usize, height: usize) {
        fill(default(own)?, area(to, pitch, 2, value.into(), width, height), true)
    }
    fn cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds [own] (to: u64, pitch: usize, value: u32, width: usize, height: usize) {
        fill(default(own)?, area(to, pitch, 4, value, width, height), true)
    }
    fn cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz [own] (to: u64, pitch: usize, value: u8, width: usize, height: usize, stream: CUstream) {
        fill(resolve(stream, own)?, area(to, pitch, 1, value.into(), width, height), false)
    }
    fn cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz [own] (to: u64, pitch: usize, value: u16, width: usize, height: usize, stream: CUstream) {
        fill(resolve(stream, own)?, area(to, pitch, 2, value.into(), width, height), false)
    }
    fn cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz [own] (to: u64, pitch: usize, value: u32, width: usize, height: usize, stream: CUstream) {
        fill(resolve(stream, own)?, area(to, pitch, 4, value, width, height), false)
    }
}
