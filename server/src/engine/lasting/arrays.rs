//! Arrays whose memory the next server maps again.

use super::{Lasting, Lost, Making, failed};
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::array_memory::{ArrayMemory, Place};
use crate::engine::lasting::{describe, describe_gone};
use crate::engine::objects::arrays::{Array as ArrayObject, Kept, RawArray};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use crate::keeper::{self, Name};
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind as HandleKind};
use mpsshim_proto::message::array::ArrayCreate;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// State of a record of an array; the key is its handle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayState {
    /// In elements.
    size: [u64; 3],
    format: u32,
    channels: u32,
    flags: u32,
    levels: u32,
    /// The server's ordinal of the device.
    device: u32,
    /// Number of its memory in the keeper, and bytes of that memory.
    memory: (u64, u64),
    /// Offset in the memory, and bytes.
    range: (u64, u64),
    /// Index and handle of each level or plane.
    parts: Vec<(u32, u64)>,
}

/// An array in memory of which the keeper has a descriptor.
pub struct Array;

impl Lasting for Array {
    const KIND: Kind = Kind::Array;
    type State = ArrayState;

    fn make(
        record: &Record,
        state: ArrayState,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let (number, len) = state.memory;
        let memory = match session.objects.array_memory.find(number) {
            Some(memory) => memory,
            None => {
                let file = making.take(Name::numbered(keeper::Kind::Arrays, number))?;
                let gpu = &making.shared.gpu;
                let adopt = || -> Result<Arc<ArrayMemory>, CUresult> {
                    let device = gpu.device(state.device)?;
                    ArrayMemory::adopt(gpu, device, &session.account, (file, len), number)
                };
                let memory = adopt().map_err(failed("the memory of an array", record))?;
                session.objects.array_memory.add(&memory);
                memory
            }
        };
        let shared = making.shared;
        let place = memory.take_at(state.range.0, state.range.1);
        ArrayMemory::end(memory, &shared.gpu);
        let place = place.ok_or("the memory of an array is taken")?;
        let create = ArrayCreate {
            array: record.key,
            size: state.size,
            format: state.format,
            channels: state.channels,
            flags: state.flags,
            levels: state.levels,
            device: state.device,
            pad: 0,
        };
        let of_array = failed("an array", record);
        put_array(session, shared, &create, place).map_err(&of_array)?;
        for (index, part) in state.parts {
            let made = make_part(session, shared, (record.key, index), part);
            made.map_err(&of_array)?;
        }
        Ok(())
    }
}

/// The descriptor of an array that a client creates.
pub fn descriptor_of(create: &ArrayCreate) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        width: create.size[0],
        height: create.size[1],
        depth: create.size[2],
        format: create.format,
        channels: create.channels,
        flags: create.flags,
        pad: 0,
    }
}

/// Whether a handle is that of a mipmapped array.
pub fn is_mipmapped(array: u64) -> bool {
    Handle(array).kind() == Some(HandleKind::MipmappedArray)
}

/// Levels of an array that a client creates: the driver makes at least one, and at most as many as its size has.
pub fn levels_of(create: &ArrayCreate) -> u32 {
    if !is_mipmapped(create.array) {
        return 1;
    }
    let [width, height, depth] = create.size;
    let is_layered = create.flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) != 0;
    let largest = match is_layered {
        true => width.max(height),
        false => width.max(height).max(depth),
    };
    create.levels.clamp(1, largest.max(1).ilog2() + 1)
}

/// Makes an array in its memory. Returns its descriptor.
///
/// # Errors
/// Driver errors; `CUDA_ERROR_INVALID_HANDLE` if the handle is taken.
pub fn put_array(
    session: &mut Session,
    shared: &Shared,
    create: &ArrayCreate,
    place: Place,
) -> Result<CUDA_ARRAY3D_DESCRIPTOR, CUresult> {
    let gpu = &shared.gpu;
    let device = gpu.device(create.device)?.ordinal;
    gpu.devices[device].make_current(&gpu.driver)?;
    let mut descriptor = descriptor_of(create);
    let mipmapped = is_mipmapped(create.array);
    let whole = match place.make(gpu, &descriptor, levels_of(create)) {
        Ok(whole) => whole,
        Err(status) => {
            place.end(gpu);
            return Err(status);
        }
    };
    let mut array = ArrayObject {
        raw: RawArray::Mipmapped(whole),
        device,
        parent: 0,
        charge: None,
        kept: Some(Box::new(Kept {
            create: *create,
            place,
            whole,
            parts: Vec::new(),
        })),
        bound: false,
    };
    if !mipmapped {
        match only_level(gpu, whole, &mut descriptor) {
            Ok(level) => array.raw = RawArray::Plain(level),
            Err(status) => {
                shared.lanes.bury(Buried::Array(array));
                return Err(status);
            }
        }
    }
    insert_array(session, shared, create.array, array)?;
    Ok(descriptor)
}

/// Adds a new array to the session's. If the handle is taken, the driver's array is destroyed when all is quiet.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE` if the handle is taken.
pub fn insert_array(
    session: &mut Session,
    shared: &Shared,
    handle: u64,
    array: ArrayObject,
) -> Result<(), CUresult> {
    let table = match is_mipmapped(handle) {
        true => &mut session.objects.mipmaps,
        false => &mut session.objects.arrays,
    };
    let inserted = table.insert(handle, array).map(drop);
    inserted.map_err(|(status, array)| {
        shared.lanes.bury(Buried::Array(array));
        status
    })
}

fn only_level(
    gpu: &Gpu,
    whole: CUmipmappedArray,
    descriptor: &mut CUDA_ARRAY3D_DESCRIPTOR,
) -> Result<CUarray, CUresult> {
    let driver = &gpu.driver.array;
    let mut level = CUarray::NULL;
    driver.mipmapped_array_get_level(&mut level, whole, 0)?;
    driver.array3d_get_descriptor(descriptor, level)?;
    Ok(level)
}

/// Gives a level or plane of an array a handle (`cuMipmappedArrayGetLevel`, `cuArrayGetPlane`). Returns its descriptor.
///
/// # Errors
/// Driver errors; `CUDA_ERROR_INVALID_HANDLE` if the handle is taken, or the array is not the session's.
pub fn make_part(
    session: &mut Session,
    shared: &Shared,
    (parent, index): (u64, u32),
    part: u64,
) -> Result<CUDA_ARRAY3D_DESCRIPTOR, CUresult> {
    let whole = session.objects.array(parent)?;
    let (device, raw): (Ordinal, RawArray) = (whole.device, whole.raw);
    shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
    let driver = &shared.gpu.driver.array;
    let mut found = CUarray::NULL;
    match raw {
        RawArray::Mipmapped(array) => driver.mipmapped_array_get_level(&mut found, array, index)?,
        RawArray::Plain(array) => driver.array_get_plane(&mut found, array, index)?,
    }
    let mut descriptor = CUDA_ARRAY3D_DESCRIPTOR::default();
    driver.array3d_get_descriptor(&mut descriptor, found)?;
    let array = ArrayObject {
        raw: RawArray::Plain(found),
        device,
        parent,
        charge: None,
        kept: None,
        bound: false,
    };
    let inserted = session.objects.arrays.insert(part, array);
    inserted.map_err(|(status, _)| status)?;
    if let Some(kept) = &mut session.objects.array_mut(parent)?.kept {
        kept.parts.push((index, part));
    }
    Ok(descriptor)
}

/// Describes a new array, or one with a new level or plane. Binds the session if the next server cannot make it.
pub fn describe_array(session: &mut Session, shared: &Shared, handle: u64) {
    if !session.lasting.kept {
        return;
    }
    let Ok(array) = session.objects.array(handle) else {
        return;
    };
    match &array.kept {
        Some(kept) => {
            let (create, memory) = (&kept.create, kept.place.memory());
            let state = ArrayState {
                size: create.size,
                format: create.format,
                channels: create.channels,
                flags: create.flags,
                levels: create.levels,
                device: create.device,
                memory: (memory.number(), memory.len()),
                range: kept.place.range(),
                parts: kept.parts.clone(),
            };
            describe::<Array>(session, handle, &state);
        }
        None => _ = session.lasting.unkept_arrays.insert(handle),
    }
    session.note_bonds(&shared.images);
}

/// Invalidates the record of a destroyed array.
pub fn describe_array_end(session: &mut Session, shared: &Shared, handle: u64) {
    if !session.lasting.kept {
        return;
    }
    if !session.lasting.unkept_arrays.remove(&handle) {
        describe_gone::<Array>(session, handle);
    }
    session.note_bonds(&shared.images);
}
