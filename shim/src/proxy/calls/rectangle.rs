//! Two- and three-dimensional copies: one message for all of them. As with one-dimensional ones, the kinds of the
//! addresses decide how a copy is done; pageable memory goes through staging, with its rows packed tightly.

use crate::proxy::default_stream::LEGACY;
use mpsshim_api::cuda::{
    CU_MEMCPY_OPERAND_TYPE_ARRAY, CU_MEMCPY_OPERAND_TYPE_POINTER, CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    CU_MEMORYTYPE_ARRAY, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_UNIFIED,
    CUDA_ERROR_INVALID_VALUE, CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUDA_MEMCPY3D_BATCH_OP,
    CUmemcpy3DOperand, CUresult,
};
use mpsshim_proto::message::array::{ARRAY_SIDE, BoxSide, CopyBox};
use mpsshim_proto::message::{Op, Side};

use super::entries;
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::array::{self, ArrayRef};
use crate::proxy::memory::{self, Place};
use crate::proxy::pages;
use crate::proxy::shadow::{self, Shadow};
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::{Session, session};
use crate::proxy::{capture, context, default_stream, staging};

entries! {
    cuMemcpy2D_v2(_) => copy_2d::<false>,
    cuMemcpy2D_v2_ptds(_) => copy_2d::<true>,
    cuMemcpy2DUnaligned_v2(_) => copy_2d::<false>,
    cuMemcpy2DUnaligned_v2_ptds(_) => copy_2d::<true>,
    cuMemcpy2DAsync_v2(_, _) => copy_2d_async::<false>,
    cuMemcpy2DAsync_v2_ptsz(_, _) => copy_2d_async::<true>,
    cuMemcpy3D_v2(_) => copy_3d::<false>,
    cuMemcpy3D_v2_ptds(_) => copy_3d::<true>,
    cuMemcpy3DAsync_v2(_, _) => copy_3d_async::<false>,
    cuMemcpy3DAsync_v2_ptsz(_, _) => copy_3d_async::<true>,
    cuMemcpy3DPeer(_) => peer_3d::<false>,
    cuMemcpy3DPeer_ptds(_) => peer_3d::<true>,
    cuMemcpy3DPeerAsync(_, _) => peer_3d_async::<false>,
    cuMemcpy3DPeerAsync_ptsz(_, _) => peer_3d_async::<true>,
    cuMemcpy3DBatchAsync(_, _, _, _, _) => batch_3d_1::<false>,
    cuMemcpy3DBatchAsync_ptsz(_, _, _, _, _) => batch_3d_1::<true>,
    cuMemcpy3DBatchAsync_v2(_, _, _, _) => batch_3d::<false>,
    cuMemcpy3DBatchAsync_v2_ptsz(_, _, _, _) => batch_3d::<true>,
}

/// Bytes, rows, slices.
pub type Extent = [u64; 3];

/// One side of a copy.
#[derive(Clone, Copy)]
pub enum Memory {
    /// Of an array, with where the box begins in it.
    Array(ArrayRef, Extent),
    /// Rows of memory from this place on, `pitch` bytes apart; slices `rows` rows apart.
    Rows { place: Place, pitch: u64, rows: u64 },
}

/// One side of a copy as a descriptor gives it.
#[derive(Clone, Copy)]
struct Given {
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    level: u64,
    at: Extent,
    pitch: u64,
    rows: u64,
}

/// A copy whose arguments have all been checked.
#[derive(Clone, Copy)]
pub struct Boxed {
    pub to: Memory,
    pub from: Memory,
    pub size: Extent,
}

#[derive(Clone, Copy, PartialEq)]
pub enum When {
    Sync,
    Async,
}

impl Memory {
    fn place(&self) -> Option<Place> {
        match self {
            Memory::Array(..) => None,
            Memory::Rows { place, .. } => Some(*place),
        }
    }

    /// Whether it is host memory, and where in this process.
    fn host(&self) -> Option<u64> {
        match self.place()? {
            Place::Device(_) => None,
            Place::Pinned(address) => Some(memory::program_address(address)),
            Place::Pageable(address) => Some(address),
        }
    }

    fn is_pageable(&self) -> bool {
        matches!(self.place(), Some(Place::Pageable(_)))
    }

    /// Bytes from the first byte to byte `x` of row `row` in slice `slice`: `at` is `[x, row, slice]`.
    fn offset(&self, at: Extent) -> u64 {
        match *self {
            Memory::Array(..) => 0,
            Memory::Rows { pitch, rows, .. } => (at[2] * rows + at[1]) * pitch + at[0],
        }
    }

    /// The side of a message, for the part of the box that begins at `at`.
    fn side(&self, at: Extent) -> BoxSide {
        match *self {
            Memory::Array(array, start) => BoxSide {
                address: array.handle(),
                at: [start[0] + at[0], start[1] + at[1], start[2] + at[2]],
                side: ARRAY_SIDE,
                ..BoxSide::default()
            },
            Memory::Rows { place, pitch, rows } => {
                let (Place::Device(address) | Place::Pinned(address) | Place::Pageable(address)) =
                    place;
                BoxSide {
                    address: address + self.offset(at),
                    pitch,
                    rows,
                    side: match place {
                        Place::Device(_) => Side::Device as u32,
                        _ => Side::Host as u32,
                    },
                    ..BoxSide::default()
                }
            }
        }
    }
}

/// Rows packed tightly into staging.
fn packed((address, side): (u64, Side), size: Extent) -> BoxSide {
    BoxSide {
        address,
        pitch: size[0],
        rows: size[1],
        side: side as u32,
        ..BoxSide::default()
    }
}

/// Cuts a box into boxes: whole slices if they fit, else whole rows, else parts of rows.
struct Cut {
    size: Extent,
    at: Extent,
}

/// Where a part of a box begins, and its size.
type Part = (Extent, Extent);

impl Cut {
    fn next(&mut self, most: u64) -> Option<Part> {
        let ([width, height, depth], at) = (self.size, self.at);
        if at[2] == depth {
            return None;
        }
        let slice = width.saturating_mul(height);
        let part = if slice <= most && at[0] == 0 && at[1] == 0 {
            [width, height, (most / slice).min(depth - at[2])]
        } else if width <= most && at[0] == 0 {
            [width, (most / width).min(height - at[1]), 1]
        } else {
            [most.min(width - at[0]), 1, 1]
        };
        self.at = if at[0] + part[0] < width {
            [at[0] + part[0], at[1], at[2]]
        } else if at[1] + part[1] < height {
            [0, at[1] + part[1], at[2]]
        } else {
            [0, 0, at[2] + part[2]]
        };
        Some((at, part))
    }
}

/// Copies the rows of a box between two places in this process.
///
/// # Safety
/// All rows are readable and writable.
unsafe fn move_rows(
    (to, to_pitch, to_rows): (*mut u8, u64, u64),
    (from, from_pitch, from_rows): (*const u8, u64, u64),
    [width, height, depth]: Extent,
) {
    for z in 0..depth {
        for y in 0..height {
            let (to_at, from_at) = (
                (z * to_rows + y) * to_pitch,
                (z * from_rows + y) * from_pitch,
            );
            // SAFETY: the caller's promise; `copy` allows overlap.
            unsafe {
                let (to, from) = (to.add(to_at as usize), from.add(from_at as usize));
                std::ptr::copy(from, to, width as usize);
            }
        }
    }
}

/// The server's address of host memory that a graph will refer to.
fn reached(
    session: &Session,
    stream: StreamRef,
    side: Memory,
    size: Extent,
    written: bool,
    shadows: &mut Vec<Shadow>,
) -> Status<Memory> {
    let Memory::Rows {
        place: Place::Pageable(address),
        pitch,
        rows,
    } = side
    else {
        return Ok(side);
    };
    let len = side.offset([size[0], size[1] - 1, size[2] - 1]);
    let arena = shadow::reach(session, stream.context(), (address, len), written, shadows)?;
    let place = Place::Pinned(arena);
    Ok(Memory::Rows { place, pitch, rows })
}

/// Copies a box in the order of a stream.
fn transfer(session: &Session, stream: StreamRef, copy: Boxed, when: When) -> Status {
    copy_box(session, stream, copy, when)?;
    if when == When::Sync {
        // The program may have waited for earlier work of the stream.
        pages::observe(session);
    }
    Ok(())
}

fn copy_box(session: &Session, stream: StreamRef, copy: Boxed, when: When) -> Status {
    let Boxed { to, from, size } = copy;
    let message = |to: BoxSide, from: BoxSide, size: Extent| CopyBox {
        to,
        from,
        width: size[0],
        height: size[1],
        depth: size[2],
        stream: stream.handle(),
    };
    let len = size[0] * size[1] * size[2];
    let _work = pages::before_work(session)?;
    if stream.is_capturing() {
        if when == When::Sync {
            return capture::forbid_wait(session, stream);
        }
        let mut shadows = Vec::new();
        let to = reached(session, stream, to, size, true, &mut shadows)?;
        let from = reached(session, stream, from, size, false, &mut shadows)?;
        if !shadows.is_empty() {
            shadow::attach(capture::shadows_of(stream.capture()), 0, &shadows);
        }
        let body = message(to.side([0; 3]), from.side([0; 3]), size);
        return stream::submit(session, stream, Op::CopyBox, &body, &[]);
    }
    let mut cut = Cut { size, at: [0; 3] };
    match (to, from) {
        (
            Memory::Rows { pitch, rows, .. },
            Memory::Rows {
                pitch: from_pitch,
                rows: from_rows,
                ..
            },
        ) if to.host().is_some() && from.host().is_some() => {
            stream::synchronize(session, stream)?;
            let (to, from) = (to.host().unwrap_or(0), from.host().unwrap_or(0));
            // SAFETY: the program vouches for the rows on both sides.
            unsafe {
                move_rows(
                    (to as *mut u8, pitch, rows),
                    (from as *const u8, from_pitch, from_rows),
                    size,
                );
            }
            Ok(())
        }
        (_, Memory::Rows { pitch, rows, .. }) if from.is_pageable() => {
            let base = from.host().unwrap_or(0);
            staging::send(
                session,
                stream,
                len,
                |most| cut.next(most),
                |(at, part), chunk| {
                    let first = (base + from.offset(at)) as *const u8;
                    // SAFETY: the program vouches for the source's rows; a chunk has room for a part.
                    unsafe { move_rows((chunk, part[0], part[1]), (first, pitch, rows), part) };
                },
                |ring, (at, part), chunk| {
                    let body = message(to.side(at), packed(chunk, part), part);
                    ring.put(Op::CopyBox, 0, &body, &[])
                },
            )
        }
        (Memory::Rows { pitch, rows, .. }, _) if to.is_pageable() => {
            let base = to.host().unwrap_or(0);
            staging::fetch(
                session,
                stream,
                len,
                |most| cut.next(most),
                |(at, part), chunk| {
                    let first = (base + to.offset(at)) as *mut u8;
                    // SAFETY: the program vouches for the target's rows; a chunk has a part's bytes.
                    unsafe { move_rows((first, pitch, rows), (chunk, part[0], part[1]), part) };
                },
                |ring, (at, part), chunk| {
                    let body = message(packed(chunk, part), from.side(at), part);
                    ring.put(Op::CopyBox, 0, &body, &[])
                },
            )
        }
        _ => {
            let body = message(to.side([0; 3]), from.side([0; 3]), size);
            stream::submit(session, stream, Op::CopyBox, &body, &[])?;
            let touches_host = to.host().is_some() || from.host().is_some();
            if when == When::Sync && touches_host {
                stream::synchronize(session, stream)?;
            }
            Ok(())
        }
    }
}

/// The two sides that a descriptor gives.
fn sides(copy: &CUDA_MEMCPY3D) -> (Given, Given) {
    let to = Given {
        kind: copy.dst_type,
        host: copy.dst_host,
        device: copy.dst_device,
        array: copy.dst_array,
        level: copy.dst_lod,
        at: [copy.dst_x, copy.dst_y, copy.dst_z],
        pitch: copy.dst_pitch,
        rows: copy.dst_height,
    };
    let from = Given {
        kind: copy.src_type,
        host: copy.src_host,
        device: copy.src_device,
        array: copy.src_array,
        level: copy.src_lod,
        at: [copy.src_x, copy.src_y, copy.src_z],
        pitch: copy.src_pitch,
        rows: copy.src_height,
    };
    (to, from)
}

/// The memory of one side, which contains the whole box. `most`: maximum pitch of device memory.
fn resolve(given: &Given, [width, height, depth]: Extent, most: u64) -> Status<Memory> {
    let invalid = CUDA_ERROR_INVALID_VALUE;
    let base = match given.kind {
        CU_MEMORYTYPE_ARRAY if given.array == 0 || given.level != 0 => return Err(invalid),
        CU_MEMORYTYPE_ARRAY => {
            let array = array::array(given.array)?;
            let ends = [0, 1, 2].map(|i| given.at[i].saturating_add([width, height, depth][i]));
            if let Some(size) = array.descriptor().rows()
                && ends.iter().zip(size).any(|(end, size)| *end > size)
            {
                return Err(invalid);
            }
            return Ok(Memory::Array(array, given.at));
        }
        CU_MEMORYTYPE_HOST => given.host,
        CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => given.device,
        _ => return Err(invalid),
    };
    let [x, y, z] = given.at;
    let end = x.checked_add(width).ok_or(invalid)?;
    // 0 stands for the box's own size.
    let or_needed = |given: u64, needed: u64| match given {
        0 => Ok(needed),
        given if given >= needed => Ok(given),
        _ => Err(invalid),
    };
    let pitch = or_needed(given.pitch, end)?;
    let rows = or_needed(given.rows, y.checked_add(height).ok_or(invalid)?)?;
    let at = |x: u64, y: u64, z: u64| -> Option<u64> {
        let row = z.checked_mul(rows)?.checked_add(y)?;
        row.checked_mul(pitch)?.checked_add(x)
    };
    let first = at(x, y, z)
        .and_then(|offset| base.checked_add(offset))
        .ok_or(invalid)?;
    let len = at(width, height - 1, depth - 1).ok_or(invalid)?;
    if base == 0 || first.checked_add(len).is_none() {
        return Err(invalid);
    }
    let place = match given.kind {
        CU_MEMORYTYPE_DEVICE => memory::device_place(first, len)?,
        _ => memory::place(first, len)?,
    };
    let is_one_row = height == 1 && depth == 1;
    if matches!(place, Place::Device(_)) && pitch > most && !is_one_row {
        return Err(invalid);
    }
    // The driver accepts no wider pitch from the server, and the pitch of a single row has no meaning.
    let pitch = if is_one_row { width } else { pitch };
    Ok(Memory::Rows { place, pitch, rows })
}

/// Checks the conditions that do not depend on memory, then resolves both sides. `None`: there is nothing to copy.
pub fn check(copy: &CUDA_MEMCPY3D) -> Status<Option<Boxed>> {
    let size = [copy.width, copy.height, copy.depth];
    let (to, from) = sides(copy);
    if size.contains(&0) {
        return Ok(None);
    }
    let most = context::device(context::current()?.device)?.limits.pitch;
    Ok(Some(Boxed {
        to: resolve(&to, size, most)?,
        from: resolve(&from, size, most)?,
        size,
    }))
}

pub fn submit((stream, per_thread): (u64, bool), copy: &CUDA_MEMCPY3D, when: When) -> Status {
    let session = session()?;
    let stream = default_stream::resolve_for_copy(stream, per_thread)?;
    match check(copy)? {
        Some(copy) => transfer(session, stream, copy, when),
        None => session.check(),
    }
}

/// `cuMemcpy2D`, `cuMemcpy2DUnaligned`.
pub unsafe extern "C" fn copy_2d<const P: bool>(copy: In<CUDA_MEMCPY2D>) -> CUresult {
    guard(|| {
        context::current()?;
        submit((0, P), &copy.get()?.into(), When::Sync)
    })
}

/// `cuMemcpy2DAsync`.
pub unsafe extern "C" fn copy_2d_async<const P: bool>(
    copy: In<CUDA_MEMCPY2D>,
    stream: u64,
) -> CUresult {
    guard(|| {
        context::current()?;
        submit((stream, P), &copy.get()?.into(), When::Async)
    })
}

/// `cuMemcpy3D`.
pub unsafe extern "C" fn copy_3d<const P: bool>(copy: In<CUDA_MEMCPY3D>) -> CUresult {
    guard(|| {
        context::current()?;
        submit((0, P), &copy.get()?, When::Sync)
    })
}

/// `cuMemcpy3DAsync`.
pub unsafe extern "C" fn copy_3d_async<const P: bool>(
    copy: In<CUDA_MEMCPY3D>,
    stream: u64,
) -> CUresult {
    guard(|| {
        context::current()?;
        submit((stream, P), &copy.get()?, When::Async)
    })
}

/// `cuMemcpy3DPeer`: the addresses determine the devices; the driver does not look at the contexts either.
pub unsafe extern "C" fn peer_3d<const P: bool>(copy: In<CUDA_MEMCPY3D>) -> CUresult {
    guard(|| submit((0, P), &copy.get()?, When::Sync))
}

/// `cuMemcpy3DPeerAsync`.
pub unsafe extern "C" fn peer_3d_async<const P: bool>(
    copy: In<CUDA_MEMCPY3D>,
    stream: u64,
) -> CUresult {
    guard(|| submit((stream, P), &copy.get()?, When::Async))
}

/// Converts one copy of a batch to a separate copy. Sizes of a batch are in elements of the array, or in bytes if there
/// is no array.
fn unpack(op: &CUDA_MEMCPY3D_BATCH_OP) -> Status<CUDA_MEMCPY3D> {
    let invalid = CUDA_ERROR_INVALID_VALUE;
    let element = |operand: &CUmemcpy3DOperand| match operand.kind {
        CU_MEMCPY_OPERAND_TYPE_POINTER => Ok(None),
        CU_MEMCPY_OPERAND_TYPE_ARRAY => {
            let array = array::array(operand.words[0])?;
            Ok(Some(array.descriptor().element_bytes()))
        }
        _ => Err(invalid),
    };
    if op.width == 0
        || op.height == 0
        || op.depth == 0
        || !(1..=CU_MEMCPY_SRC_ACCESS_ORDER_ANY).contains(&op.src_access_order)
        || op.flags > 1
    {
        return Err(invalid);
    }
    let bytes = element(&op.src)?.or(element(&op.dst)?).unwrap_or(1);
    let mut copy = CUDA_MEMCPY3D {
        width: op.width.checked_mul(bytes).ok_or(invalid)?,
        height: op.height,
        depth: op.depth,
        ..CUDA_MEMCPY3D::default()
    };
    // Kind, address, array, position, pitch, rows.
    let given = |operand: &CUmemcpy3DOperand| -> Status<(u32, u64, u64, Extent, u64, u64)> {
        let [first, second, third, fourth] = operand.words;
        if operand.kind == CU_MEMCPY_OPERAND_TYPE_ARRAY {
            let x = second.checked_mul(bytes).ok_or(invalid)?;
            return Ok((CU_MEMORYTYPE_ARRAY, 0, first, [x, third, fourth], 0, 0));
        }
        let row = if second == 0 { op.width } else { second };
        let rows = if third == 0 { op.height } else { third };
        if row < op.width || rows < op.height {
            return Err(invalid);
        }
        let pitch = row.checked_mul(bytes).ok_or(invalid)?;
        Ok((CU_MEMORYTYPE_UNIFIED, first, 0, [0; 3], pitch, rows))
    };
    let (kind, address, array, at, pitch, rows) = given(&op.src)?;
    (copy.src_type, copy.src_device, copy.src_array) = (kind, address, array);
    [copy.src_x, copy.src_y, copy.src_z] = at;
    (copy.src_pitch, copy.src_height) = (pitch, rows);
    let (kind, address, array, at, pitch, rows) = given(&op.dst)?;
    (copy.dst_type, copy.dst_device, copy.dst_array) = (kind, address, array);
    [copy.dst_x, copy.dst_y, copy.dst_z] = at;
    (copy.dst_pitch, copy.dst_height) = (pitch, rows);
    Ok(copy)
}

/// Checks the form of all copies of a batch, then copies. An error names the copy that was refused, if one was.
fn batch(
    (stream, per_thread): (u64, bool),
    count: usize,
    ops: In<CUDA_MEMCPY3D_BATCH_OP>,
    flags: u64,
) -> Result<(), (CUresult, usize)> {
    let all = |status| (status, usize::MAX);
    let session = session().map_err(all)?;
    // Not in the legacy default stream, whatever it is called by.
    if stream == LEGACY || stream == 0 && !per_thread {
        return Err(all(CUDA_ERROR_INVALID_VALUE));
    }
    let stream = default_stream::resolve_for_copy(stream, per_thread).map_err(all)?;
    if count == 0 || ops.is_null() || flags != 0 {
        return Err(all(CUDA_ERROR_INVALID_VALUE));
    }
    let mut copies = Vec::new();
    for index in 0..count {
        let copy = ops.at(index).and_then(|op| unpack(&op));
        copies.push(copy.map_err(|status| (status, index))?);
    }
    for (index, copy) in copies.iter().enumerate() {
        let done = check(copy).and_then(|copy| match copy {
            Some(copy) => transfer(session, stream, copy, When::Async),
            None => Ok(()),
        });
        done.map_err(|status| (status, index))?;
    }
    Ok(())
}

/// `cuMemcpy3DBatchAsync` of CUDA 12.8, which says which copy failed.
pub unsafe extern "C" fn batch_3d_1<const P: bool>(
    count: usize,
    ops: In<CUDA_MEMCPY3D_BATCH_OP>,
    failed: Out<usize>,
    flags: u64,
    stream: u64,
) -> CUresult {
    guard(|| {
        let done = batch((stream, P), count, ops, flags);
        failed.set_if_wanted(done.map_or_else(|(_, index)| index, |()| usize::MAX));
        done.map_err(|(status, _)| status)
    })
}

/// `cuMemcpy3DBatchAsync`.
pub unsafe extern "C" fn batch_3d<const P: bool>(
    count: usize,
    ops: In<CUDA_MEMCPY3D_BATCH_OP>,
    flags: u64,
    stream: u64,
) -> CUresult {
    guard(|| batch((stream, P), count, ops, flags).map_err(|(status, _)| status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_box_are_the_box() {
        for (size, most) in [
            ([10, 4, 3], 1000),
            ([10, 4, 3], 80),
            ([10, 4, 3], 40),
            ([10, 4, 3], 25),
            ([10, 4, 3], 10),
            ([10, 4, 3], 4),
            ([1, 1, 1], 1),
        ] {
            let mut cut = Cut { size, at: [0; 3] };
            let mut seen = vec![0; (size[0] * size[1] * size[2]) as usize];
            while let Some((at, part)) = cut.next(most) {
                assert!(part[0] * part[1] * part[2] <= most);
                for z in at[2]..at[2] + part[2] {
                    for y in at[1]..at[1] + part[1] {
                        for x in at[0]..at[0] + part[0] {
                            seen[((z * size[1] + y) * size[0] + x) as usize] += 1;
                        }
                    }
                }
            }
            assert!(seen.iter().all(|count| *count == 1), "{size:?} by {most}");
        }
    }
}
