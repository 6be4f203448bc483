//! Arrays as plain memory, copies of two and three dimensions, texture and surface objects.

use std::collections::BTreeMap;
use std::sync::Arc;

use mpsshim_api::cuda::*;
use parking_lot::RwLock;

use crate::api::{In, Out, R, api, api_streams};
use crate::context::{self, Context, current, live};
use crate::driver::{device, driver, new_handle};
use crate::driver_locks::Wait;
use crate::external::Mapping;
use crate::graph::{self, Does};
use crate::memory::{Kind, allocate, free_module};
use crate::stream::resolve;

const MAX_PITCH: u64 = i32::MAX as u64;
/// The largest sides of an array: one dimension, two, three, layers.
const MAX_1D: u64 = 131_072;
const MAX_2D: (u64, u64) = (131_072, 65_536);
const MAX_3D: u64 = 16_384;
const MAX_LAYERS: u64 = 2048;

/// A level begins at a multiple of this in the memory of all levels; an array that is mapped later needs a multiple of that.
const LEVEL_ALIGNMENT: u64 = 512;
const DEFERRED_ALIGNMENT: u64 = 65536;

pub struct Array {
    pub descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    /// The id of its context.
    pub context: u64,
    content: Content,
    /// A level of a mipmapped array.
    is_level: bool,
}

pub struct Mipmap {
    /// Of level 0.
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    /// The id of its context.
    pub context: u64,
    /// Handles of the levels.
    pub levels: Vec<u64>,
}

/// Where the elements of an array are.
enum Content {
    /// In memory of its own.
    Own(u64),
    /// In imported memory, which all levels share.
    Imported(
        u64,
        #[expect(dead_code, reason = "keeps the memory mapped")] Arc<Mapping>,
    ),
    /// Nowhere: it is mapped later.
    Deferred,
}

/// A texture or surface object.
pub struct Object {
    pub is_surface: bool,
    pub resource: CUDA_RESOURCE_DESC,
    pub texture: CUDA_TEXTURE_DESC,
    pub view: CUDA_RESOURCE_VIEW_DESC,
}

impl Drop for Content {
    fn drop(&mut self) {
        if let Content::Own(start) = self {
            free_module(*start);
        }
    }
}

/// Bytes of an element.
pub fn element(format: u32, channels: u32) -> R<u64> {
    let bytes = match format {
        CU_AD_FORMAT_UNSIGNED_INT8 | CU_AD_FORMAT_SIGNED_INT8 => 1,
        CU_AD_FORMAT_UNSIGNED_INT16 | CU_AD_FORMAT_SIGNED_INT16 | CU_AD_FORMAT_HALF => 2,
        CU_AD_FORMAT_UNSIGNED_INT32 | CU_AD_FORMAT_SIGNED_INT32 | CU_AD_FORMAT_FLOAT => 4,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    match channels {
        1 | 2 | 4 => Ok(bytes * channels as u64),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

impl Array {
    fn element(&self) -> u64 {
        element(self.descriptor.format, self.descriptor.channels).unwrap_or(1)
    }
    pub fn pitch(&self) -> u64 {
        self.descriptor.width * self.element()
    }
    pub fn rows(&self) -> u64 {
        self.descriptor.height.max(1)
    }
    fn slices(&self) -> u64 {
        self.descriptor.depth.max(1)
    }
    /// The address of the first element.
    pub fn start(&self) -> R<u64> {
        match self.content {
            Content::Own(start) | Content::Imported(start, _) => Ok(start),
            Content::Deferred => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// Bytes of the elements of an array that [`check`] accepts.
fn bytes(d: &CUDA_ARRAY3D_DESCRIPTOR) -> R<u64> {
    Ok(d.width * element(d.format, d.channels)? * d.height.max(1) * d.depth.max(1))
}

/// Bytes of all levels, one behind the other.
fn all_bytes(levels: &[CUDA_ARRAY3D_DESCRIPTOR]) -> R<u64> {
    let level = |d| Ok(bytes(d)?.next_multiple_of(LEVEL_ALIGNMENT));
    levels.iter().map(level).sum()
}

fn is_layered(d: &CUDA_ARRAY3D_DESCRIPTOR) -> bool {
    d.flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) != 0
}

fn is_deferred(d: &CUDA_ARRAY3D_DESCRIPTOR) -> bool {
    d.flags & CUDA_ARRAY3D_DEFERRED_MAPPING != 0
}

/// Checks format, channels, sizes and flags of an array.
fn check(d: &CUDA_ARRAY3D_DESCRIPTOR) -> R<()> {
    element(d.format, d.channels)?;
    let known = CUDA_ARRAY3D_LAYERED
        | CUDA_ARRAY3D_SURFACE_LDST
        | CUDA_ARRAY3D_CUBEMAP
        | CUDA_ARRAY3D_TEXTURE_GATHER
        | CUDA_ARRAY3D_DEFERRED_MAPPING;
    let fits = if is_layered(d) {
        d.width <= MAX_1D && d.height <= MAX_2D.1 && (1..=MAX_LAYERS).contains(&d.depth)
    } else if d.depth != 0 {
        d.height != 0 && d.width.max(d.height).max(d.depth) <= MAX_3D
    } else {
        d.width <= MAX_1D && d.height <= MAX_2D.1
    };
    let cube = d.flags & CUDA_ARRAY3D_CUBEMAP == 0
        || d.width == d.height
            && d.depth.is_multiple_of(6)
            && (d.depth == 6 || d.flags & CUDA_ARRAY3D_LAYERED != 0);
    let gather = d.flags & CUDA_ARRAY3D_TEXTURE_GATHER == 0 || d.height != 0 && d.depth == 0;
    if d.width == 0 || d.flags & !known != 0 || !fits || !cube || !gather {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

impl Content {
    /// Of a new array.
    fn new(context: &Context, d: &CUDA_ARRAY3D_DESCRIPTOR) -> R<Content> {
        if is_deferred(d) {
            return Ok(Content::Deferred);
        }
        let start = allocate(context.id, context.device, bytes(d)?, Kind::Module)?;
        Ok(Content::Own(start))
    }
}

fn make(descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> R<u64> {
    let context = live()?;
    check(&descriptor)?;
    let content = Content::new(&context, &descriptor)?;
    insert(&context, descriptor, content, false)
}

fn insert(
    context: &Context,
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    content: Content,
    is_level: bool,
) -> R<u64> {
    let handle = new_handle();
    let array = Array {
        descriptor,
        context: context.id,
        content,
        is_level,
    };
    driver()?.arrays.insert(handle, Arc::new(array));
    Ok(handle)
}

/// The descriptors of the levels of a mipmapped array, of `count` or of as many as there can be.
fn levels(d: &CUDA_ARRAY3D_DESCRIPTOR, count: u32) -> Vec<CUDA_ARRAY3D_DESCRIPTOR> {
    let layered = is_layered(d);
    let depth = if layered { 1 } else { d.depth };
    let most = 64 - d.width.max(d.height).max(depth).max(1).leading_zeros();
    let half = |size: u64, level: u32| if size == 0 { 0 } else { (size >> level).max(1) };
    let level = |level| CUDA_ARRAY3D_DESCRIPTOR {
        width: half(d.width, level),
        height: half(d.height, level),
        depth: if layered {
            d.depth
        } else {
            half(d.depth, level)
        },
        ..*d
    };
    (0..count.clamp(1, most)).map(level).collect()
}

fn mipmap(descriptor: CUDA_ARRAY3D_DESCRIPTOR, count: u32) -> R<u64> {
    let context = live()?;
    check(&descriptor)?;
    let levels = levels(&descriptor, count);
    let contents = levels.iter().map(|level| Content::new(&context, level));
    let contents = contents.collect::<R<Vec<_>>>()?;
    insert_levels(&context, levels, contents)
}

/// A mipmapped array in memory; `map` maps this many bytes of it.
pub fn imported(
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    count: u32,
    map: impl FnOnce(&Context, u64) -> R<Mapping>,
) -> R<u64> {
    let context = live()?;
    check(&descriptor)?;
    if is_deferred(&descriptor) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let levels = levels(&descriptor, count);
    let mapping = Arc::new(map(&context, all_bytes(&levels)?)?);
    let place = |n| {
        let start = mapping.start() + all_bytes(&levels[..n])?;
        Ok(Content::Imported(start, mapping.clone()))
    };
    let contents = (0..levels.len()).map(place).collect::<R<Vec<_>>>()?;
    insert_levels(&context, levels, contents)
}

fn insert_levels(
    context: &Context,
    levels: Vec<CUDA_ARRAY3D_DESCRIPTOR>,
    contents: Vec<Content>,
) -> R<u64> {
    let descriptor = levels[0];
    let all = levels.into_iter().zip(contents);
    let levels = all.map(|(level, content)| insert(context, level, content, true));
    let mipmap = Mipmap {
        descriptor,
        context: context.id,
        levels: levels.collect::<R<_>>()?,
    };
    let handle = new_handle();
    driver()?.mipmaps.insert(handle, Arc::new(mipmap));
    Ok(handle)
}

/// The memory that an array with these levels needs, which has none yet.
fn requirements(levels: &[CUDA_ARRAY3D_DESCRIPTOR]) -> R<CUDA_ARRAY_MEMORY_REQUIREMENTS> {
    if !levels.iter().all(is_deferred) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(CUDA_ARRAY_MEMORY_REQUIREMENTS {
        size: all_bytes(levels)?.next_multiple_of(DEFERRED_ALIGNMENT),
        alignment: DEFERRED_ALIGNMENT,
        ..Default::default()
    })
}

/// Waits until nothing uses the arrays of a context any more.
fn wait_for_users(context: u64) {
    if let Some(context) = context::by_id(context) {
        drop(context.waits_for_all(Wait::Only));
    }
}

/// One side of a copy.
#[derive(Clone, Copy)]
struct Side {
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    level: u64,
    at: [u64; 3],
    pitch: u64,
    rows: u64,
}

/// Where the first byte of a side is, and the bytes from row to row and from slice to slice.
pub type Rows = (u64, u64, u64);

fn place(side: Side, [width, height, depth]: [u64; 3], in_flight: bool) -> R<Rows> {
    let invalid = CUDA_ERROR_INVALID_VALUE;
    let [x, y, z] = side.at;
    let end = x.checked_add(width).ok_or(invalid)?;
    if side.kind == CU_MEMORYTYPE_ARRAY {
        let array = driver()?.arrays.get(side.array).map_err(|_| invalid)?;
        let inside = end <= array.pitch()
            && y.checked_add(height).ok_or(invalid)? <= array.rows()
            && z.checked_add(depth).ok_or(invalid)? <= array.slices()
            && side.level == 0;
        if !inside {
            return Err(invalid);
        }
        let slice = array.pitch() * array.rows();
        let first = array.start()? + z * slice + y * array.pitch() + x;
        return Ok((first, array.pitch(), slice));
    }
    let base = match side.kind {
        CU_MEMORYTYPE_HOST => side.host,
        CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => side.device,
        _ => return Err(invalid),
    };
    let high = y.checked_add(height).ok_or(invalid)?;
    let pitch = if side.pitch == 0 { end } else { side.pitch };
    let rows = if side.rows == 0 { high } else { side.rows };
    if base == 0 || pitch < end || rows < high {
        return Err(invalid);
    }
    let offset = |x: u64, y: u64, z: u64| {
        let row = z.checked_mul(rows)?.checked_add(y)?;
        row.checked_mul(pitch)?.checked_add(x)
    };
    let first = offset(x, y, z)
        .and_then(|at| base.checked_add(at))
        .ok_or(invalid)?;
    let len = offset(width, height - 1, depth - 1).ok_or(invalid)?;
    first.checked_add(len).ok_or(invalid)?;
    let ranges = &driver()?.ranges;
    let covered = match in_flight {
        true => ranges.covers_in_flight(first, len),
        false => ranges.covers(first, len),
    };
    let steep = pitch > MAX_PITCH && (height > 1 || depth > 1);
    if covered && steep && side.kind != CU_MEMORYTYPE_HOST
        || side.kind == CU_MEMORYTYPE_DEVICE && !covered
        || !covered && ranges.find(first).is_some()
    {
        return Err(invalid);
    }
    // Of one slice nobody asks where the next one is.
    Ok((first, pitch, pitch.wrapping_mul(rows)))
}

/// First byte, bytes from row to row and from slice to slice of both sides: from, to.
pub fn sides(copy: &CUDA_MEMCPY3D) -> R<(Rows, Rows)> {
    both_sides(copy, false)
}

/// The same of a copy that was submitted before: memory of a pool may have been freed meanwhile.
pub fn sides_in_flight(copy: &CUDA_MEMCPY3D) -> R<(Rows, Rows)> {
    both_sides(copy, true)
}

fn both_sides(copy: &CUDA_MEMCPY3D, in_flight: bool) -> R<(Rows, Rows)> {
    let size = [copy.width, copy.height, copy.depth];
    let from = Side {
        kind: copy.src_type,
        host: copy.src_host,
        device: copy.src_device,
        array: copy.src_array,
        level: copy.src_lod,
        at: [copy.src_x, copy.src_y, copy.src_z],
        pitch: copy.src_pitch,
        rows: copy.src_height,
    };
    let to = Side {
        kind: copy.dst_type,
        host: copy.dst_host,
        device: copy.dst_device,
        array: copy.dst_array,
        level: copy.dst_lod,
        at: [copy.dst_x, copy.dst_y, copy.dst_z],
        pitch: copy.dst_pitch,
        rows: copy.dst_height,
    };
    Ok((place(from, size, in_flight)?, place(to, size, in_flight)?))
}

fn copy(own: bool, stream: CUstream, copy: CUDA_MEMCPY3D, wait: bool) -> R<()> {
    let (context, stream) = resolve(stream, own)?;
    let size = [copy.width, copy.height, copy.depth];
    if size.contains(&0) {
        return Ok(());
    }
    let (from, to) = sides(&copy)?;
    if !wait && graph::captured(&stream, || Does::Copy(copy))? {
        return Ok(());
    }
    let is_device = |address: u64| driver().is_ok_and(|driver| driver.ranges.covers(address, 1));
    let on_device = is_device(from.0) && is_device(to.0);
    stream.submit(&context, move |_| {
        for z in 0..size[2] {
            for y in 0..size[1] {
                let from = from.0 + z * from.2 + y * from.1;
                let to = to.0 + z * to.2 + y * to.1;
                // SAFETY: device sides were checked when the call was made; host sides are the caller's.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size[0] as usize) };
            }
        }
        Ok(())
    });
    // Pageable memory may be used again when the call returns.
    if wait || !on_device {
        stream.synchronize(&context)
    } else {
        Ok(())
    }
}

/// One copy of a batch: sizes are in elements of the array, or in bytes where there is none.
fn unpack(op: &CUDA_MEMCPY3D_BATCH_OP) -> R<CUDA_MEMCPY3D> {
    let invalid = CUDA_ERROR_INVALID_VALUE;
    let (mut bytes, is_array) = (1, |o: &CUmemcpy3DOperand| {
        o.kind == CU_MEMCPY_OPERAND_TYPE_ARRAY
    });
    for operand in [&op.dst, &op.src].into_iter().filter(|o| is_array(o)) {
        let array = driver()?.arrays.get(operand.words[0]);
        bytes = array.map_err(|_| invalid)?.element();
    }
    let side = |o: &CUmemcpy3DOperand| {
        let [first, second, third, fourth] = o.words;
        if is_array(o) {
            return Ok((
                CU_MEMORYTYPE_ARRAY,
                first,
                [second * bytes, third, fourth],
                0,
                0,
            ));
        }
        let row = if second == 0 { op.width } else { second };
        let rows = if third == 0 { op.height } else { third };
        if o.kind != CU_MEMCPY_OPERAND_TYPE_POINTER || row < op.width || rows < op.height {
            return Err(invalid);
        }
        Ok((CU_MEMORYTYPE_UNIFIED, first, [0; 3], row * bytes, rows))
    };
    let orders = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM..=CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
    let nothing = op.width == 0 || op.height == 0 || op.depth == 0;
    if nothing || !orders.contains(&op.src_access_order) || op.flags > 1 {
        return Err(invalid);
    }
    let (from, to) = (side(&op.src)?, side(&op.dst)?);
    Ok(CUDA_MEMCPY3D {
        src_type: from.0,
        src_device: from.1,
        src_array: from.1,
        src_x: from.2[0],
        src_y: from.2[1],
        src_z: from.2[2],
        src_pitch: from.3,
        src_height: from.4,
        dst_type: to.0,
        dst_device: to.1,
        dst_array: to.1,
        dst_x: to.2[0],
        dst_y: to.2[1],
        dst_z: to.2[2],
        dst_pitch: to.3,
        dst_height: to.4,
        width: op.width * bytes,
        height: op.height,
        depth: op.depth,
        ..CUDA_MEMCPY3D::default()
    })
}

fn batch(
    own: bool,
    count: usize,
    ops: In<CUDA_MEMCPY3D_BATCH_OP>,
    flags: u64,
    stream: CUstream,
) -> Result<(), (CUresult, usize)> {
    let is_legacy = stream == CU_STREAM_LEGACY || stream.is_null() && !own;
    if count == 0 || ops.is_null() || flags != 0 || is_legacy {
        return Err((CUDA_ERROR_INVALID_VALUE, usize::MAX));
    }
    let mut copies = Vec::new();
    for at in 0..count {
        let one = ops.get(at).and_then(|op| unpack(&op));
        copies.push(one.map_err(|status| (status, at))?);
    }
    for (at, one) in copies.into_iter().enumerate() {
        copy(own, stream, one, false).map_err(|status| (status, at))?;
    }
    Ok(())
}

/// One row of an array and of memory.
fn line(own: bool, stream: CUstream, to: Side, from: Side, bytes: usize, wait: bool) -> R<()> {
    let line = CUDA_MEMCPY3D {
        src_type: from.kind,
        src_host: from.host,
        src_device: from.device,
        src_array: from.array,
        src_x: from.at[0],
        dst_type: to.kind,
        dst_host: to.host,
        dst_device: to.device,
        dst_array: to.array,
        dst_x: to.at[0],
        width: bytes as u64,
        height: 1,
        depth: 1,
        ..CUDA_MEMCPY3D::default()
    };
    copy(own, stream, line, wait)
}

fn side(kind: u32, address: u64, at: usize) -> Side {
    Side {
        kind,
        host: address,
        device: address,
        array: address,
        level: 0,
        at: [at as u64, 0, 0],
        pitch: 0,
        rows: 0,
    }
}

const ARRAY: u32 = CU_MEMORYTYPE_ARRAY;
const DEVICE: u32 = CU_MEMORYTYPE_DEVICE;
const HOST: u32 = CU_MEMORYTYPE_HOST;
const NULL: CUstream = CUstream::NULL;

api_streams! { TABLE_STREAMS;
    fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds [own] (c: In<CUDA_MEMCPY2D>) { copy(own, NULL, c.get(0)?.into(), true) }
    fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds [own] (c: In<CUDA_MEMCPY2D>) { copy(own, NULL, c.get(0)?.into(), true) }
    fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz [own] (c: In<CUDA_MEMCPY2D>, stream: CUstream) { copy(own, stream, c.get(0)?.into(), false) }
    fn cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds [own] (c: In<CUDA_MEMCPY3D>) { copy(own, NULL, c.get(0)?, true) }
    fn cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz [own] (c: In<CUDA_MEMCPY3D>, stream: CUstream) { copy(own, stream, c.get(0)?, false) }
    fn cuMemcpy3DPeer / cuMemcpy3DPeer_ptds [own] (c: In<CUDA_MEMCPY3D>) { copy(own, NULL, c.get(0)?, true) }
    fn cuMemcpy3DPeerAsync / cuMemcpy3DPeerAsync_ptsz [own] (c: In<CUDA_MEMCPY3D>, stream: CUstream) { copy(own, stream, c.get(0)?, false) }
    fn cuMemcpy3DBatchAsync / cuMemcpy3DBatchAsync_ptsz [own] (count: usize, ops: In<CUDA_MEMCPY3D_BATCH_OP>, failed: Out<usize>, flags: u64, stream: CUstream) {
        let done = batch(own, count, ops, flags, stream);
        failed.put(done.map_or_else(|(_, at)| at, |()| usize::MAX));
        done.map_err(|(status, _)| status)
    }
    fn cuMemcpy3DBatchAsync_v2 / cuMemcpy3DBatchAsync_v2_ptsz [own] (count: usize, ops: In<CUDA_MEMCPY3D_BATCH_OP>, flags: u64, stream: CUstream) {
        batch(own, count, ops, flags, stream).map_err(|(status, _)| status)
    }
    fn cuMemcpyAtoA_v2 / cuMemcpyAtoA_v2_ptds [own] (to: u64, to_at: usize, from: u64, from_at: usize, bytes: usize) {
        line(own, NULL, side(ARRAY, to, to_at), side(ARRAY, from, from_at), bytes, true)
    }
    fn cuMemcpyAtoD_v2 / cuMemcpyAtoD_v2_ptds [own] (to: u64, from: u64, at: usize, bytes: usize) {
        line(own, NULL, side(DEVICE, to, 0), side(ARRAY, from, at), bytes, true)
    }
    fn cuMemcpyDtoA_v2 / cuMemcpyDtoA_v2_ptds [own] (to: u64, at: usize, from: u64, bytes: usize) {
        line(own, NULL, side(ARRAY, to, at), side(DEVICE, from, 0), bytes, true)
    }
    fn cuMemcpyAtoH_v2 / cuMemcpyAtoH_v2_ptds [own] (to: u64, from: u64, at: usize, bytes: usize) {
        line(own, NULL, side(HOST, to, 0), side(ARRAY, from, at), bytes, true)
    }
    fn cuMemcpyHtoA_v2 / cuMemcpyHtoA_v2_ptds [own] (to: u64, at: usize, from: u64, bytes: usize) {
        line(own, NULL, side(ARRAY, to, at), side(HOST, from, 0), bytes, true)
    }
    fn cuMemcpyAtoHAsync_v2 / cuMemcpyAtoHAsync_v2_ptsz [own] (to: u64, from: u64, at: usize, bytes: usize, stream: CUstream) {
        line(own, stream, side(HOST, to, 0), side(ARRAY, from, at), bytes, false)
    }
    fn cuMemcpyHtoAAsync_v2 / cuMemcpyHtoAAsync_v2_ptsz [own] (to: u64, at: usize, from: u64, bytes: usize, stream: CUstream) {
        line(own, stream, side(ARRAY, to, at), side(HOST, from, 0), bytes, false)
    }
}

/// Texture and surface objects of a context, by number.
#[derive(Default)]
pub struct Objects(RwLock<BTreeMap<u64, Arc<Object>>>);

impl Objects {
    /// The new object gets the smallest number that is free.
    fn add(&self, object: Object) -> u64 {
        let mut objects = self.0.write();
        let taken = (1..).zip(objects.keys());
        let number = 1 + taken.take_while(|(n, taken)| n == *taken).count() as u64;
        objects.insert(number, Arc::new(object));
        number
    }
    pub fn get(&self, number: u64) -> Option<Arc<Object>> {
        self.0.read().get(&number).cloned()
    }
    pub fn len(&self) -> usize {
        self.0.read().len()
    }
}

fn object(is_surface: bool, number: u64) -> R<Arc<Object>> {
    let found = current()?.objects.get(number);
    found
        .filter(|o| o.is_surface == is_surface)
        .ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// What is no object is gone already, as on a GPU.
fn forget(is_surface: bool, number: u64) -> R<()> {
    if object(is_surface, number).is_ok() {
        current()?.objects.0.write().remove(&number);
    }
    Ok(())
}

fn check_resource(resource: &CUDA_RESOURCE_DESC, is_surface: bool) -> R<()> {
    let (driver, words) = (driver()?, &resource.words);
    let linear = |kind: u64| element(kind as u32, (kind >> 32) as u32);
    let fits = match resource.kind {
        CU_RESOURCE_TYPE_ARRAY => driver.arrays.get(words[0]).is_ok(),
        _ if is_surface => false,
        CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => driver.mipmaps.get(words[0]).is_ok(),
        CU_RESOURCE_TYPE_LINEAR => {
            linear(words[1])?;
            words[0].is_multiple_of(512) && driver.ranges.covers(words[0], words[2].max(1))
        }
        CU_RESOURCE_TYPE_PITCH2D => {
            linear(words[1])?;
            let len = words[4].saturating_mul(words[3]);
            words[4].is_multiple_of(32)
                && words[3] <= MAX_2D.1
                && driver.ranges.covers(words[0], len)
        }
        _ => false,
    };
    if fits && resource.flags == 0 {
        Ok(())
    } else {
        Err(CUDA_ERROR_INVALID_VALUE)
    }
}

fn check_texture(
    resource: &CUDA_RESOURCE_DESC,
    texture: &CUDA_TEXTURE_DESC,
    view: Option<CUDA_RESOURCE_VIEW_DESC>,
) -> R<()> {
    let modes = texture
        .address_mode
        .iter()
        .all(|mode| *mode <= CU_TR_ADDRESS_MODE_BORDER);
    let filters = texture.filter_mode.max(texture.mipmap_filter_mode) <= CU_TR_FILTER_MODE_LINEAR;
    let fits = match (view, resource.kind) {
        (Some(view), CU_RESOURCE_TYPE_ARRAY) => {
            let width = driver()?.arrays.get(resource.words[0])?.descriptor.width;
            view.format <= 0x22 && view.width == width
        }
        _ => true,
    };
    if modes && filters && fits && texture.flags & !0x77 == 0 {
        Ok(())
    } else {
        Err(CUDA_ERROR_INVALID_VALUE)
    }
}

fn new_object(out: Out<u64>, object: Object) -> R<()> {
    let context = live()?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    out.set(context.objects.add(object))
}

api! { TABLE;
    fn cuArrayCreate_v2(out: Out<u64>, descriptor: In<CUDA_ARRAY_DESCRIPTOR>) {
        let d = descriptor.get(0)?;
        out.set(make(CUDA_ARRAY3D_DESCRIPTOR { width: d.width, height: d.height, format: d.format, channels: d.channels, ..Default::default() })?)
    }
    fn cuArray3DCreate_v2(out: Out<u64>, descriptor: In<CUDA_ARRAY3D_DESCRIPTOR>) {
        if out.is_null() { return Err(CUDA_ERROR_INVALID_VALUE); }
        out.set(make(descriptor.get(0)?)?)
    }
    fn cuArrayGetDescriptor_v2(out: Out<CUDA_ARRAY_DESCRIPTOR>, array: u64) {
        let d = driver()?.arrays.get(array)?.descriptor;
        out.set(CUDA_ARRAY_DESCRIPTOR { width: d.width, height: d.height, format: d.format, channels: d.channels })
    }
    fn cuArray3DGetDescriptor_v2(out: Out<CUDA_ARRAY3D_DESCRIPTOR>, array: u64) { out.set(driver()?.arrays.get(array)?.descriptor) }
    fn cuArrayDestroy(array: u64) {
        let found = driver()?.arrays.get(array)?;
        if found.is_level { return Ok(()); }
        wait_for_users(found.context);
        driver()?.arrays.remove(array).map(drop)
    }
    fn cuMipmappedArrayCreate(out: Out<u64>, descriptor: In<CUDA_ARRAY3D_DESCRIPTOR>, levels: u32) {
        if out.is_null() { return Err(CUDA_ERROR_INVALID_VALUE); }
        out.set(mipmap(descriptor.get(0)?, levels)?)
    }
    fn cuMipmappedArrayGetLevel(out: Out<u64>, array: u64, level: u32) {
        out.set(*driver()?.mipmaps.get(array)?.levels.get(level as usize).ok_or(CUDA_ERROR_INVALID_VALUE)?)
    }
    fn cuMipmappedArrayDestroy(array: u64) {
        wait_for_users(driver()?.mipmaps.get(array)?.context);
        for level in &driver()?.mipmaps.remove(array)?.levels { driver()?.arrays.remove(*level)?; }
        Ok(())
    }
    fn cuArrayGetMemoryRequirements(out: Out<CUDA_ARRAY_MEMORY_REQUIREMENTS>, array: u64, ordinal: CUdevice) {
        let array = driver()?.arrays.get(array).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let requirements = requirements(&[array.descriptor])?;
        device(ordinal)?;
        out.set(requirements)
    }
    fn cuArrayGetSparseProperties(_out: u64, _array: u64) { Err(CUDA_ERROR_INVALID_VALUE) }
    fn cuArrayGetPlane(_out: u64, _array: u64, _plane: u32) { Err(CUDA_ERROR_INVALID_VALUE) }
    fn cuMipmappedArrayGetMemoryRequirements(out: Out<CUDA_ARRAY_MEMORY_REQUIREMENTS>, array: u64, ordinal: CUdevice) {
        let array = driver()?.mipmaps.get(array).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let requirements = requirements(&levels(&array.descriptor, array.levels.len() as u32))?;
        device(ordinal)?;
        out.set(requirements)
    }
    fn cuMipmappedArrayGetSparseProperties(_out: u64, _array: u64) { Err(CUDA_ERROR_INVALID_VALUE) }
    fn cuTexObjectCreate(out: Out<u64>, resource: In<CUDA_RESOURCE_DESC>, texture: In<CUDA_TEXTURE_DESC>, view: In<CUDA_RESOURCE_VIEW_DESC>) {
        let (resource, texture) = (resource.get(0)?, texture.get(0)?);
        check_resource(&resource, false)?;
        check_texture(&resource, &texture, (!view.is_null()).then(|| view.get(0)).transpose()?)?;
        let view = if view.is_null() { CUDA_RESOURCE_VIEW_DESC::default() } else { view.get(0)? };
        new_object(out, Object { is_surface: false, resource, texture, view })
    }
    fn cuTexObjectDestroy(texture: u64) { forget(false, texture) }
    fn cuTexObjectGetResourceDesc(out: Out<CUDA_RESOURCE_DESC>, texture: u64) { out.set(object(false, texture)?.resource) }
    fn cuTexObjectGetTextureDesc(out: Out<CUDA_TEXTURE_DESC>, texture: u64) { out.set(object(false, texture)?.texture) }
    fn cuTexObjectGetResourceViewDesc(out: Out<CUDA_RESOURCE_VIEW_DESC>, texture: u64) { out.set(object(false, texture)?.view) }
    fn cuSurfObjectCreate(out: Out<u64>, resource: In<CUDA_RESOURCE_DESC>) {
        let resource = resource.get(0)?;
        check_resource(&resource, true)?;
        new_object(out, Object { is_surface: true, resource, texture: CUDA_TEXTURE_DESC::default(), view: CUDA_RESOURCE_VIEW_DESC::default() })
    }
    fn cuSurfObjectDestroy(surface: u64) { forget(true, surface) }
    fn cuSurfObjectGetResourceDesc(out: Out<CUDA_RESOURCE_DESC>, surface: u64) { out.set(object(true, surface)?.resource) }
}
