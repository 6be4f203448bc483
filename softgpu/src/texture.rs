//! How kernels read textures, and read and write surfaces, by the numbers of their objects.
//!
//! Textures are sampled at points, without normalized coordinates: outside is the nearest element.

use std::sync::Arc;

use mpsshim_api::cuda::*;

use crate::api::R;
use crate::array::{Array, Object, element};
use crate::context::Context;
use crate::driver::start;
use crate::ptx::code::{Outside, Ty};

/// Rows of elements in memory.
struct Plane {
    start: u64,
    /// Bytes from row to row.
    pitch: u64,
    width: u64,
    height: u64,
    format: u32,
    channels: u32,
    /// Keeps the memory.
    array: Option<Arc<Array>>,
}

/// Bytes of a row of a surface.
pub struct Place {
    /// The first byte, and the row.
    pub at: [i64; 2],
    pub bytes: u64,
    pub outside: Outside,
}

fn object(context: &Context, number: u64, is_surface: bool) -> R<Arc<Object>> {
    let found = context.objects.get(number);
    found
        .filter(|object| object.is_surface == is_surface)
        .ok_or(CUDA_ERROR_ILLEGAL_ADDRESS)
}

impl Plane {
    fn of_array(array: u64) -> R<Plane> {
        let array = start().arrays.get(array)?;
        Ok(Plane {
            start: array.start()?,
            pitch: array.pitch(),
            width: array.descriptor.width,
            height: array.rows(),
            format: array.descriptor.format,
            channels: array.descriptor.channels,
            array: Some(array),
        })
    }

    fn of_memory(start: u64, kind: u64, [width, height, pitch]: [u64; 3]) -> R<Plane> {
        Ok(Plane {
            start,
            pitch,
            width,
            height,
            format: kind as u32,
            channels: (kind >> 32) as u32,
            array: None,
        })
    }

    fn of(resource: &CUDA_RESOURCE_DESC) -> R<Plane> {
        let words = &resource.words;
        match resource.kind {
            CU_RESOURCE_TYPE_ARRAY => Plane::of_array(words[0]),
            CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
                Plane::of_array(start().mipmaps.get(words[0])?.levels[0])
            }
            CU_RESOURCE_TYPE_LINEAR => {
                let width = words[2] / element(words[1] as u32, (words[1] >> 32) as u32)?;
                Plane::of_memory(words[0], words[1], [width, 1, words[2]])
            }
            _ => Plane::of_memory(words[0], words[1], [words[2], words[3], words[4]]),
        }
    }
}

/// The element of a texture at a point: its channels as `ty`, and 0, 0, 0, 1 for those that it lacks.
pub fn fetch(context: &Context, number: u64, ty: Ty, [x, y]: [i64; 2]) -> R<[u32; 4]> {
    let object = object(context, number, false)?;
    let texture = &object.texture;
    let plane = Plane::of(&object.resource).map_err(|_| CUDA_ERROR_ILLEGAL_ADDRESS)?;
    let (bytes, is_signed) = match plane.format {
        CU_AD_FORMAT_UNSIGNED_INT8 => (1, false),
        CU_AD_FORMAT_SIGNED_INT8 => (1, true),
        CU_AD_FORMAT_UNSIGNED_INT16 => (2, false),
        CU_AD_FORMAT_SIGNED_INT16 => (2, true),
        CU_AD_FORMAT_HALF => return Err(CUDA_ERROR_NOT_SUPPORTED),
        _ => (4, false),
    };
    let is_float = plane.format == CU_AD_FORMAT_FLOAT;
    // Only words are read as integers unasked.
    let as_integer = bytes == 4 || texture.flags & CU_TRSF_READ_AS_INTEGER != 0;
    let (across, down) = (plane.width as i64, plane.height as i64);
    let inside = (0..across).contains(&x) && (0..down).contains(&y);
    let at_border = !inside && texture.address_mode.contains(&CU_TR_ADDRESS_MODE_BORDER);
    if is_float != ty.is_float()
        || !as_integer
        || at_border
        || texture.filter_mode != CU_TR_FILTER_MODE_POINT
        || texture.flags & CU_TRSF_NORMALIZED_COORDINATES != 0
        || object.view.format != 0
    {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    if !inside && object.resource.kind == CU_RESOURCE_TYPE_LINEAR {
        return Ok([0; 4]);
    }
    let x = x.min(across - 1).max(0) as u64;
    let y = y.min(down - 1).max(0) as u64;
    let whole = bytes * u64::from(plane.channels);
    let address = plane.start + y * plane.pitch + x * whole;
    if plane.array.is_none() && !start().ranges.covers_in_flight(address, whole) {
        return Err(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    let mut texel = [0, 0, 0, if is_float { 1f32.to_bits() } else { 1 }];
    for (n, channel) in (0..plane.channels.into()).zip(&mut texel) {
        let value = read(address + n * bytes, bytes) as u32;
        let above = 32 - 8 * bytes as u32;
        *channel = match is_signed {
            true => ((value << above) as i32 >> above) as u32,
            false => value,
        };
    }
    Ok(texel)
}

/// Where bytes of a surface are, and the array that keeps them; `None` if an access to them does nothing.
fn locate(context: &Context, number: u64, place: &Place) -> R<Option<(u64, Arc<Array>)>> {
    let resource = object(context, number, true)?.resource;
    let plane = Plane::of_array(resource.words[0]).map_err(|_| CUDA_ERROR_ILLEGAL_ADDRESS)?;
    let array = plane.array.ok_or(CUDA_ERROR_ILLEGAL_ADDRESS)?;
    let ([x, y], bytes) = (place.at, place.bytes as i64);
    let last = [plane.pitch as i64 - bytes, plane.height as i64 - 1];
    if array.descriptor.flags & CUDA_ARRAY3D_SURFACE_LDST == 0 || last[0] < 0 {
        return Err(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    if x % bytes != 0 {
        return Err(CUDA_ERROR_MISALIGNED_ADDRESS);
    }
    let inside = (0..=last[0]).contains(&x) && (0..=last[1]).contains(&y);
    match place.outside {
        Outside::Trap if !inside => return Err(CUDA_ERROR_LAUNCH_FAILED),
        Outside::Zero if !inside => return Ok(None),
        _ => {}
    }
    let (x, y) = (x.clamp(0, last[0]) as u64, y.clamp(0, last[1]) as u64);
    Ok(Some((plane.start + y * plane.pitch + x, array)))
}

/// Bytes of a surface, the first one lowest.
pub fn load(context: &Context, number: u64, place: &Place) -> R<u128> {
    let found = locate(context, number, place)?;
    Ok(found.map_or(0, |(address, _array)| read(address, place.bytes)))
}

pub fn store(context: &Context, number: u64, place: &Place, value: u128) -> R<()> {
    if let Some((address, _array)) = locate(context, number, place)? {
        write(address, place.bytes, value);
    }
    Ok(())
}

fn read(address: u64, bytes: u64) -> u128 {
    // SAFETY: callers have found the bytes in an array that they keep, or in memory of the device, which work in flight
    // keeps mapped. Others may write there at the same time, hence volatile.
    let byte = |n| unsafe { ((address + n) as *const u8).read_volatile() };
    (0..bytes).fold(0, |value, n| value | u128::from(byte(n)) << (8 * n))
}

fn write(address: u64, bytes: u64, value: u128) {
    for n in 0..bytes {
        // SAFETY: as for `read`.
        unsafe { ((address + n) as *mut u8).write_volatile((value >> (8 * n)) as u8) };
    }
}
