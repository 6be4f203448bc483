//! Arrays, texture and surface objects, two- and three-dimensional copies.

use super::reply::Reply;
use crate::engine::base::account::{Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::call_error::CallError;
use crate::engine::base::description::Record;
use crate::engine::base::driver::is_sticky;
use crate::engine::base::kinds as record;
use crate::engine::base::side::Side;
use crate::engine::calls::copy::Rows;
use crate::engine::calls::memory::with_room;
use crate::engine::calls::reference;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::array_memory::Place;
use crate::engine::gpu::copy_kernel::LARGE;
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::textures::Object;
use crate::engine::lasting::arrays::{
    describe_array, describe_array_end, descriptor_of, insert_array, is_mipmapped, levels_of,
    make_part, put_array,
};
use crate::engine::lasting::{Lasting, Lost, Making, describe, describe_gone, failed};
use crate::engine::objects::arrays::{Array, RawArray};
use crate::engine::objects::pace::Runs;
use crate::engine::objects::pace::session::prepare_work;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::array::{
    ARRAY_SIDE, ArrayCreate, ArrayInfo, ArrayPart, ArrayQuery, BoxSide, CopyBox, TEXTURE_HAS_VIEW,
    TEXTURE_IS_SURFACE, TextureCreate, TextureDestroy, TextureInfo,
};
use mpsshim_proto::message::{self, Side as CopySide};
use zerocopy::{FromBytes, IntoBytes};

/// One side of a copy in the driver's form.
#[derive(Default)]
struct DriverSide {
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    at: [u64; 3],
}

/// `cuMemcpy2DAsync`, `cuMemcpy3DAsync`. Every byte of memory that the copy may touch is checked: from the first
/// byte of its first row to the last of its last.
pub fn copy_box(session: &mut Session, shared: &Shared, body: CopyBox) -> Result<(), CallError> {
    let (to, from) = (
        box_side(session, &body.to, &body)?,
        box_side(session, &body.from, &body)?,
    );
    session.check_writable(to.device.max(to.host))?;
    let index = session.objects.streams.index(body.stream)?;
    if session.objects.streams.at(index)?.capturing {
        // An array that a graph names is kept, because the graph may be launched later.
        for side in [&body.to, &body.from] {
            if side.side == ARRAY_SIDE {
                reference::bind(session, side.address)?;
            }
        }
    } else if to.kind == CU_MEMORYTYPE_HOST && from.kind == CU_MEMORYTYPE_HOST {
        return Err(CallError::Violation(
            "a copy from host to host needs no server".into(),
        ));
    }
    let copy = CUDA_MEMCPY3D {
        src_x: from.at[0],
        src_y: from.at[1],
        src_z: from.at[2],
        src_type: from.kind,
        src_host: from.host,
        src_device: from.device,
        src_array: from.array,
        src_pitch: body.from.pitch,
        src_height: body.from.rows,
        dst_x: to.at[0],
        dst_y: to.at[1],
        dst_z: to.at[2],
        dst_type: to.kind,
        dst_host: to.host,
        dst_device: to.device,
        dst_array: to.array,
        dst_pitch: body.to.pitch,
        dst_height: body.to.rows,
        width: body.width,
        height: body.height,
        depth: body.depth,
        ..CUDA_MEMCPY3D::default()
    };
    let (index, stream) = prepare_work(session, &shared.gpu, body.stream, Runs::Nothing)?;
    let rows = copy.height.saturating_mul(copy.depth);
    let bytes = copy.width.saturating_mul(rows);
    let with_host = [to.kind, from.kind].contains(&CU_MEMORYTYPE_HOST);
    let stream_of = session.objects.streams.at(index)?;
    if bytes >= LARGE && with_host && !stream_of.capturing {
        let device = &shared.gpu.devices[stream_of.device];
        device.note_large_copy(session.shared.info.session, bytes);
    }
    shared.gpu.driver.array.memcpy3d_async(&copy, stream)?;
    session.flow.counts.copies += 1;
    session.submitted(&shared.gpu, index, 1)
}

fn box_side(session: &Session, side: &BoxSide, body: &CopyBox) -> Result<DriverSide, CallError> {
    if side.side == ARRAY_SIDE {
        let RawArray::Plain(array) = session.objects.arrays.get(side.address)?.raw else {
            return Err(CUDA_ERROR_INVALID_HANDLE.into());
        };
        return Ok(DriverSide {
            kind: CU_MEMORYTYPE_ARRAY,
            array: array.0,
            at: side.at,
            ..DriverSide::default()
        });
    }
    let rows = Rows {
        at: [0; 3],
        pitch: side.pitch,
        rows: side.rows,
    };
    let len = rows.extent([body.width, body.height, body.depth])?;
    let kind = u8::try_from(side.side).ok().and_then(CopySide::from_u8);
    match kind {
        Some(CopySide::Device) => {
            let place = session.lasting.place_of(side.address);
            session.check_device(place, len)?;
            Ok(DriverSide {
                kind: CU_MEMORYTYPE_DEVICE,
                device: place,
                ..DriverSide::default()
            })
        }
        Some(reached) => {
            let host = match reached {
                CopySide::Staging => session.shared.segment.staging_address(side.address, len)?,
                _ => {
                    session.check_reachable(side.address, len)?;
                    side.address
                }
            };
            Ok(DriverSide {
                kind: CU_MEMORYTYPE_HOST,
                host,
                ..DriverSide::default()
            })
        }
        None => Err(CallError::Violation(format!("copy side {}", side.side))),
    }
}

/// `cuArray3DCreate`, `cuMipmappedArrayCreate`. The memory of usual arrays is for the next server too.
pub fn array_create(session: &mut Session, shared: &Shared, body: ArrayCreate) -> Reply {
    let device = shared.gpu.device(body.device)?;
    device.make_current(&shared.gpu.driver)?;
    let mut descriptor = descriptor_of(&body);
    let levels = levels_of(&body);
    let memory = Memory::Device(device.ordinal);
    let bytes = descriptor.bytes(levels);
    let kept_bytes = kept_bytes(session, shared, device, (&descriptor, levels));
    let room = with_room(session, shared, (memory, bytes), |session| {
        if let Some(bytes) = kept_bytes
            && let Some(place) = take_place(session, shared, device, bytes)
        {
            return Ok(Room::Kept(place));
        }
        session.account.take(memory, bytes).map(Room::Plain)
    })?;
    let charge = match room {
        Room::Kept(place) => match put_array(session, shared, &body, place) {
            Ok(made) => {
                descriptor = made;
                None
            }
            Err(status) if is_sticky(status) => return Err(status.into()),
            Err(status) => {
                tracing::debug!(%status, "an array is not in memory that the next server maps");
                Some(session.account.take(memory, bytes)?)
            }
        },
        Room::Plain(charge) => Some(charge),
    };
    if let Some(charge) = charge {
        make_array(session, shared, &body, &mut descriptor, charge)?;
    }
    describe_array(session, shared, body.array);
    Ok(info(&descriptor))
}

/// Room for an array.
enum Room {
    /// In memory that the next server maps again.
    Kept(Place),
    /// Counted memory that the driver allocates.
    Plain(Charge),
}

/// Bytes of an array in memory that the next server maps again; `None` if the array cannot be there.
fn kept_bytes(
    session: &Session,
    shared: &Shared,
    device: &Device,
    (descriptor, levels): (&CUDA_ARRAY3D_DESCRIPTOR, u32),
) -> Option<u64> {
    const USUAL: u32 = CUDA_ARRAY3D_LAYERED
        | CUDA_ARRAY3D_SURFACE_LDST
        | CUDA_ARRAY3D_CUBEMAP
        | CUDA_ARRAY3D_TEXTURE_GATHER;
    if !session.lasting.kept || session.side != Side::MAIN || descriptor.flags & !USUAL != 0 {
        return None;
    }
    let sizes = &shared.gpu.array_sizes;
    if let Some(bytes) = sizes.get(device.ordinal, descriptor, levels) {
        return Some(bytes);
    }
    let bytes = bytes_required(shared, device, (descriptor, levels))?;
    sizes.note(device.ordinal, (descriptor, levels), bytes);
    Some(bytes)
}

/// Bytes that an array requires, according to the driver: those of an array without memory.
fn bytes_required(
    shared: &Shared,
    device: &Device,
    (descriptor, levels): (&CUDA_ARRAY3D_DESCRIPTOR, u32),
) -> Option<u64> {
    let driver = &shared.gpu.driver.array;
    let mut required = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
    let deferred = CUDA_ARRAY3D_DESCRIPTOR {
        flags: descriptor.flags | CUDA_ARRAY3D_DEFERRED_MAPPING,
        ..*descriptor
    };
    let (raw, known) = if levels > 1 {
        let mut array = CUmipmappedArray::NULL;
        let made = driver.mipmapped_array_create(&mut array, &deferred, levels);
        made.ok()?;
        let known =
            driver.mipmapped_array_get_memory_requirements(&mut required, array, device.raw);
        (RawArray::Mipmapped(array), known)
    } else {
        let mut array = CUarray::NULL;
        driver.array3d_create(&mut array, &deferred).ok()?;
        let known = driver.array_get_memory_requirements(&mut required, array, device.raw);
        (RawArray::Plain(array), known)
    };
    // Its destruction waits for the work of all clients.
    shared.lanes.bury(Buried::Array(Array {
        raw,
        device: device.ordinal,
        parent: 0,
        charge: None,
        kept: None,
        bound: false,
    }));
    (known.is_ok() && required.size > 0).then_some(required.size)
}

/// Takes room for an array in memory that the next server maps again; `None` if there is none.
fn take_place(
    session: &mut Session,
    shared: &Shared,
    device: &Device,
    bytes: u64,
) -> Option<Place> {
    let payers = (&session.account, &session.shared.kept);
    let memory = &mut session.objects.array_memory;
    let taken = memory.take(&shared.gpu, device, payers, bytes);
    taken.unwrap_or_else(|status| {
        tracing::debug!(%status, bytes, "no memory for an array that the next server maps again");
        None
    })
}

fn make_array(
    session: &mut Session,
    shared: &Shared,
    body: &ArrayCreate,
    descriptor: &mut CUDA_ARRAY3D_DESCRIPTOR,
    charge: Charge,
) -> Result<(), CallError> {
    let driver = &shared.gpu.driver.array;
    let device = shared.gpu.device(body.device)?.ordinal;
    let mipmapped = is_mipmapped(body.array);
    let raw = if mipmapped {
        let mut array = CUmipmappedArray::NULL;
        driver.mipmapped_array_create(&mut array, descriptor, body.levels)?;
        RawArray::Mipmapped(array)
    } else {
        let mut array = CUarray::NULL;
        driver.array3d_create(&mut array, descriptor)?;
        let _ = driver.array3d_get_descriptor(descriptor, array);
        RawArray::Plain(array)
    };
    let array = Array {
        raw,
        device,
        parent: 0,
        charge: Some(charge),
        kept: None,
        bound: false,
    };
    Ok(insert_array(session, shared, body.array, array)?)
}

/// `cuMipmappedArrayGetLevel`, `cuArrayGetPlane`. The driver returns the same array each time.
pub fn array_part(session: &mut Session, shared: &Shared, body: ArrayPart) -> Reply {
    let from = (body.parent, body.index);
    let descriptor = make_part(session, shared, from, body.part)?;
    describe_array(session, shared, body.parent);
    Ok(info(&descriptor))
}

/// `cuArrayDestroy`, `cuMipmappedArrayDestroy`: the handles become invalid immediately.
pub fn array_destroy(
    session: &mut Session,
    shared: &Shared,
    body: message::Object,
) -> Result<(), CallError> {
    let handle = body.object;
    let mut array = match is_mipmapped(handle) {
        true => session.objects.mipmaps.remove(handle)?,
        false => session.objects.arrays.remove(handle)?,
    };
    session.objects.graphs.note_array_gone(handle);
    // Its levels and planes end with it.
    let arrays = &mut session.objects.arrays;
    while let Some(part) = arrays.handle_where(|part| part.parent == handle) {
        arrays.remove(part)?;
        session.objects.graphs.note_array_gone(part);
    }
    // Before the description says that it is gone: the server may end in between.
    session.note_bonds(&shared.images);
    if array.parent != 0 {
        let parent = array.parent;
        if let Ok(Array {
            kept: Some(kept), ..
        }) = session.objects.array_mut(parent)
        {
            kept.parts.retain(|(_, part)| *part != handle);
        }
        describe_array(session, shared, parent);
        return Ok(());
    }
    describe_array_end(session, shared, handle);
    if array.bound {
        session.objects.bound_arrays.push(array);
    } else {
        array.leave();
        shared.lanes.bury(Buried::Array(array));
    }
    Ok(())
}

/// `cuArrayGetMemoryRequirements`, `cuArrayGetSparseProperties`, and the same calls for mipmapped arrays.
pub fn array_query(session: &mut Session, shared: &Shared, body: ArrayQuery) -> Reply {
    let array = session.objects.array(body.array)?;
    let device = shared.gpu.device(body.device)?;
    shared.gpu.devices[array.device].make_current(&shared.gpu.driver)?;
    let driver = &shared.gpu.driver.array;
    if body.kind == 0 {
        let mut found = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
        match array.raw {
            RawArray::Plain(array) => {
                driver.array_get_memory_requirements(&mut found, array, device.raw)?;
            }
            RawArray::Mipmapped(array) => {
                driver.mipmapped_array_get_memory_requirements(&mut found, array, device.raw)?;
            }
        }
        return Ok(found.as_bytes().to_vec());
    }
    let mut found = CUDA_ARRAY_SPARSE_PROPERTIES::default();
    match array.raw {
        RawArray::Plain(array) => driver.array_get_sparse_properties(&mut found, array)?,
        RawArray::Mipmapped(array) => {
            driver.mipmapped_array_get_sparse_properties(&mut found, array)?;
        }
    }
    Ok(found.as_bytes().to_vec())
}

/// `cuTexObjectCreate`, `cuSurfObjectCreate`. The session remembers the driver's object, since it may destroy only
/// its own.
pub fn texture_create(session: &mut Session, shared: &Shared, body: TextureCreate) -> Reply {
    let device = shared.gpu.device(body.device)?;
    device.make_current(&shared.gpu.driver)?;
    if session.objects.textures.len() >= bounds::TEXTURES {
        return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
    }
    let resource = resource(session, body.resource)?;
    let driver = &shared.gpu.driver.array;
    let object = make_object(&shared.gpu, &resource, &body)?;
    let mut info = TextureInfo {
        object: object.value(),
        resource: body.resource,
        ..TextureInfo::default()
    };
    if let Object::Texture(object) = object {
        info.resource = CUDA_RESOURCE_DESC::default();
        let object = CUtexObject(object);
        let described = driver
            .tex_object_get_resource_desc(&mut info.resource, object)
            .and_then(|()| driver.tex_object_get_texture_desc(&mut info.texture, object))
            .and_then(|()| driver.tex_object_get_resource_view_desc(&mut info.view, object));
        if let Err(status) = described {
            // The client does not learn its handle.
            let _ = driver.tex_object_destroy(object);
            return Err(status.into());
        }
    }
    session.objects.textures.insert(object, device.ordinal);
    describe_texture(session, shared, object, &body);
    if matches!(
        resource.kind,
        CU_RESOURCE_TYPE_ARRAY | CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
    ) {
        info.resource.words[0] = 0;
    }
    Ok(info.as_bytes().to_vec())
}

fn make_object(
    gpu: &Gpu,
    resource: &CUDA_RESOURCE_DESC,
    body: &TextureCreate,
) -> Result<Object, CUresult> {
    let driver = &gpu.driver.array;
    if body.flags & TEXTURE_IS_SURFACE != 0 {
        let mut object = CUsurfObject::NULL;
        driver.surf_object_create(&mut object, resource)?;
        return Ok(Object::Surface(object.0));
    }
    let mut object = CUtexObject::NULL;
    let view = if body.flags & TEXTURE_HAS_VIEW != 0 {
        &raw const body.view
    } else {
        std::ptr::null()
    };
    driver.tex_object_create(&mut object, resource, &body.texture, view)?;
    Ok(Object::Texture(object.0))
}

/// A texture or surface object. It is restored with the same value, which kernels use.
pub struct Texture;

impl Lasting for Texture {
    const KIND: record::Kind = record::Kind::Texture;
    /// The words of the message that made it.
    type State = Vec<u32>;

    fn make(
        record: &Record,
        words: Vec<u32>,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let gpu = &making.shared.gpu;
        let body = TextureCreate::read_from_bytes(words.as_bytes());
        let body = body.map_err(|_| "its description cannot be read")?;
        let number = record.key & !record::SURFACE;
        let object = match record.key & record::SURFACE != 0 {
            true => Object::Surface(number),
            false => Object::Texture(number),
        };
        let mut make = || -> Result<(), CUresult> {
            let device = gpu.device(body.device)?;
            device.make_current(&gpu.driver)?;
            // The client may have freed the memory or the array before the object.
            let found = resource(session, body.resource).ok();
            let again = |resource: CUDA_RESOURCE_DESC| {
                gpu.texture_numbers
                    .make_with(number, (device.ordinal, gpu), || {
                        make_object(gpu, &resource, &body)
                    })
            };
            let made = found.is_some_and(|resource| again(resource).is_ok());
            if !made {
                gpu.texture_numbers.occupy(object, (device.ordinal, gpu))?;
            }
            session.objects.textures.insert(object, device.ordinal);
            Ok(())
        };
        make().map_err(failed("a texture", record))
    }
}

fn key_of(object: Object) -> u64 {
    match object {
        Object::Texture(value) => value,
        Object::Surface(value) => value | record::SURFACE,
    }
}

/// Describes a new texture or surface object. Binds the session if the next server cannot make it.
fn describe_texture(session: &mut Session, shared: &Shared, object: Object, body: &TextureCreate) {
    if !session.lasting.kept {
        return;
    }
    // The numbers of another context may be taken in the next server.
    if session.side == Side::MAIN {
        let words = body.as_bytes().as_chunks::<4>().0.iter();
        let words: Vec<u32> = words.map(|word| u32::from_ne_bytes(*word)).collect();
        describe::<Texture>(session, key_of(object), &words);
    } else {
        session.lasting.unkept_textures.insert(object);
    }
    session.note_bonds(&shared.images);
}

/// Translates the handles in a resource descriptor to the driver's arrays, and checks that its memory is the
/// session's.
fn resource(
    session: &Session,
    mut resource: CUDA_RESOURCE_DESC,
) -> Result<CUDA_RESOURCE_DESC, CallError> {
    let words = &mut resource.words;
    match resource.kind {
        CU_RESOURCE_TYPE_ARRAY | CU_RESOURCE_TYPE_MIPMAPPED_ARRAY if words[0] == 0 => {}
        CU_RESOURCE_TYPE_ARRAY => {
            if let RawArray::Plain(array) = session.objects.arrays.get(words[0])?.raw {
                words[0] = array.0;
            }
        }
        CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
            if let RawArray::Mipmapped(array) = session.objects.mipmaps.get(words[0])?.raw {
                words[0] = array.0;
            }
        }
        // The range must begin in the block, but may extend beyond it, as natively; a kernel could read that far
        // anyway.
        CU_RESOURCE_TYPE_LINEAR => session.check_device(words[0], 1)?,
        CU_RESOURCE_TYPE_PITCH2D => {
            let len = words[4].checked_mul(words[3]);
            session.check_device(words[0], len.ok_or(CUDA_ERROR_INVALID_VALUE)?)?;
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
    }
    Ok(resource)
}

/// `cuTexObjectDestroy`, `cuSurfObjectDestroy`.
pub fn texture_destroy(
    session: &mut Session,
    shared: &Shared,
    body: TextureDestroy,
) -> Result<(), CallError> {
    let object = if body.flags & TEXTURE_IS_SURFACE != 0 {
        Object::Surface(body.object)
    } else {
        Object::Texture(body.object)
    };
    let device = session.objects.textures.remove(&object);
    let device = device.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if session.lasting.kept {
        if !session.lasting.unkept_textures.remove(&object) {
            describe_gone::<Texture>(session, key_of(object));
        }
        session.note_bonds(&shared.images);
    }
    Ok(object.end(device, &shared.gpu)?)
}

fn info(descriptor: &CUDA_ARRAY3D_DESCRIPTOR) -> Vec<u8> {
    let info = ArrayInfo {
        size: [descriptor.width, descriptor.height, descriptor.depth],
        format: descriptor.format,
        channels: descriptor.channels,
        flags: descriptor.flags,
        pad: 0,
    };
    info.as_bytes().to_vec()
}

/// Takes the objects to be destroyed at the end of the session, in the order of destruction. Its modules have been
/// unloaded before.
pub fn take_arrays(session: &mut Session, gpu: &Gpu) -> Vec<Buried> {
    for reference in session.objects.texture_references.drain() {
        reference.end(gpu);
    }
    let objects = std::mem::take(&mut session.objects.textures).into_iter();
    let objects = objects.map(|(object, device)| Buried::Object(object, device));
    let arrays = session
        .objects
        .arrays
        .drain()
        .chain(session.objects.mipmaps.drain());
    let arrays = arrays.chain(session.objects.bound_arrays.drain(..));
    objects.chain(arrays.map(Buried::Array)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, fails, obeys, obeys_with_handle, others, records,
    };
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::Op;
    use mpsshim_proto::segment::STAGING_LEN;
    use mpsshim_proto::shm::sealed_memfd;
    use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

    const UNIT: u64 = 2 << 20;

    /// Of 16 by 4 elements of 4 bytes, mipmapped or not.
    fn create(test: &mut Fixture, kind: Kind) -> ArrayCreate {
        ArrayCreate {
            array: test.new_handle(kind),
            size: [16, 4, 0],
            format: CU_AD_FORMAT_FLOAT,
            channels: 1,
            levels: 1,
            ..ArrayCreate::default()
        }
    }

    fn array(test: &mut Fixture, kind: Kind) -> u64 {
        let body = create(test, kind);
        assert_eq!(test.status(Op::ArrayCreate, &body, &[]), CUDA_SUCCESS);
        body.array
    }

    const KINDS: [(Kind, &str); 2] = [
        (Kind::Array, "cuArray3DCreate_v2"),
        (Kind::MipmappedArray, "cuMipmappedArrayCreate"),
    ];

    fn arrays(test: &Fixture) -> usize {
        test.session.objects.arrays.len() + test.session.objects.mipmaps.len()
    }

    #[test]
    fn an_array_that_is_not_created_does_not_count() {
        for (kind, name) in KINDS {
            let mut test = Fixture::new(&[(name, obeys_with_handle as Function)]);
            let good = create(&mut test, kind);
            let elsewhere = ArrayCreate { device: 1, ..good };
            let status = test.status(Op::ArrayCreate, &elsewhere, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_DEVICE, "{kind:?}");
            test.limit(1000);
            let large = ArrayCreate {
                size: [u64::MAX, 4, 0],
                ..good
            };
            let status = test.status(Op::ArrayCreate, &large, &[]);
            assert_eq!(status, CUDA_ERROR_OUT_OF_MEMORY, "{kind:?}");
            test.orders(CUDA_ERROR_NOT_SUPPORTED);
            let status = test.status(Op::ArrayCreate, &good, &[]);
            assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED, "{kind:?}");
            assert_eq!((test.held(), arrays(&test)), (0, 0), "{kind:?}");
            test.orders(CUDA_SUCCESS);
            assert_eq!(test.status(Op::ArrayCreate, &good, &[]), CUDA_SUCCESS);
            let held = test.held();
            assert!(held >= 256 && arrays(&test) == 1, "{kind:?}");
            // The handle is taken: the driver's array goes when all is quiet.
            let status = test.status(Op::ArrayCreate, &good, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{kind:?}");
            assert_eq!(test.held(), 2 * held);
            assert_eq!((test.buried(), test.held()), (1, held), "{kind:?}");
            test.orders(FAULT);
            let more = create(&mut test, kind);
            assert_eq!(test.told(Op::ArrayCreate, &more, &[]), FAULT);
            assert!(test.has_ended(), "{kind:?}");
        }
    }

    /// `cuArrayGetMemoryRequirements`.
    extern "C" fn requires(to: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS) -> CUresult {
        // SAFETY: as the driver's function.
        unsafe { (*to).size = 3 << 16 };
        CUDA_SUCCESS
    }

    /// `cuMemExportToShareableHandle`.
    extern "C" fn exports(to: *mut i32) -> CUresult {
        let file = sealed_memfd(c"memory", 2 << 20).expect("a file");
        // SAFETY: as the driver's function.
        unsafe { to.write(file.into_raw_fd()) };
        CUDA_SUCCESS
    }

    /// `cuImportExternalMemory`.
    extern "C" fn imports(to: *mut u64, what: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC) -> CUresult {
        match obeys_with_handle(to) {
            CUDA_SUCCESS => {
                // SAFETY: as the driver's function, which owns the descriptor from now on.
                drop(unsafe { OwnedFd::from_raw_fd((*what).handle[0] as i32) });
                CUDA_SUCCESS
            }
            status => status,
        }
    }

    const WITH_KEPT: [(&str, Function); 4] = [
        ("cuArrayGetMemoryRequirements", requires as Function),
        ("cuMemExportToShareableHandle", exports as Function),
        ("cuImportExternalMemory", imports as Function),
        (
            "cuExternalMemoryGetMappedMipmappedArray",
            obeys_with_handle as Function,
        ),
    ];

    /// Number of records of this kind.
    fn described(test: &Fixture, kind: record::Kind) -> usize {
        let records = test.session.shared.description.records();
        records.iter().filter(|record| record.kind == kind).count()
    }

    fn is_bound(test: &Fixture) -> bool {
        let bonds = test.session.shared.description.bonds();
        !bonds.is_empty()
    }

    #[test]
    fn arrays_share_memory_that_the_next_server_maps() {
        let mut test = Fixture::with_keeper(&WITH_KEPT);
        let (plain, mipmap) = (
            array(&mut test, Kind::Array),
            array(&mut test, Kind::MipmappedArray),
        );
        assert_eq!((test.held(), is_bound(&test)), (UNIT, false));
        assert_eq!(described(&test, record::Kind::Array), 2);
        let body = ArrayPart {
            parent: mipmap,
            part: test.new_handle(Kind::Array),
            ..ArrayPart::default()
        };
        assert_eq!(test.status(Op::ArrayPart, &body, &[]), CUDA_SUCCESS);
        // Ten have room, at 192 KiB each.
        let others: Vec<u64> = (0..8).map(|_| array(&mut test, Kind::Array)).collect();
        assert_eq!(test.held(), UNIT);
        let last = array(&mut test, Kind::Array);
        assert_eq!(test.held(), 2 * UNIT);
        for object in others.into_iter().chain([plain, mipmap, last]) {
            let body = message::Object { object };
            assert_eq!(test.status(Op::ArrayDestroy, &body, &[]), CUDA_SUCCESS);
        }
        assert_eq!(described(&test, record::Kind::Array), 0);
        assert_eq!((arrays(&test), is_bound(&test)), (0, false));
        // One without memory told the size.
        assert_eq!((test.buried(), test.held()), (12, 0));
        // Memory that has been left takes no others.
        array(&mut test, Kind::Array);
        assert_eq!(test.held(), UNIT);
    }

    #[test]
    fn an_array_that_cannot_be_in_memory_of_its_own_binds_until_it_is_destroyed() {
        let mut test = Fixture::with_keeper(&WITH_KEPT);
        let special = ArrayCreate {
            flags: CUDA_ARRAY3D_SPARSE,
            ..create(&mut test, Kind::Array)
        };
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let not_imported = create(&mut test, Kind::Array);
        for (orders, body) in [
            (CUDA_SUCCESS, special),
            (CUDA_ERROR_NOT_SUPPORTED, not_imported),
        ] {
            test.orders(orders);
            assert_eq!(test.status(Op::ArrayCreate, &body, &[]), CUDA_SUCCESS);
            assert!(is_bound(&test) && test.held() < UNIT);
            assert_eq!(described(&test, record::Kind::Array), 0);
            let body = message::Object { object: body.array };
            assert_eq!(test.status(Op::ArrayDestroy, &body, &[]), CUDA_SUCCESS);
            assert!(!is_bound(&test));
        }
    }

    #[test]
    fn a_texture_is_described_until_it_is_destroyed() {
        let mut test = Fixture::with_keeper(&WITH_KEPT);
        let plain = array(&mut test, Kind::Array);
        for flags in [0, TEXTURE_IS_SURFACE] {
            let body = TextureCreate {
                flags,
                ..texture(CU_RESOURCE_TYPE_ARRAY, [plain, 0, 0, 0, 0])
            };
            let object: u64 = test.reply(Op::TextureCreate, &body, &[]).expect("it");
            assert_eq!(described(&test, record::Kind::Texture), 1);
            assert!(!is_bound(&test));
            let body = TextureDestroy {
                object,
                flags,
                pad: 0,
            };
            assert_eq!(test.status(Op::TextureDestroy, &body, &[]), CUDA_SUCCESS);
            assert_eq!(described(&test, record::Kind::Texture), 0);
        }
    }

    #[test]
    fn a_part_is_of_an_array_of_the_session_and_ends_with_it() {
        for (kind, name) in [
            (Kind::Array, "cuArrayGetPlane"),
            (Kind::MipmappedArray, "cuMipmappedArrayGetLevel"),
        ] {
            let mut test = Fixture::new(&[(name, obeys_with_handle as Function)]);
            let parent = array(&mut test, kind);
            let body = ArrayPart {
                parent,
                part: test.new_handle(Kind::Array),
                ..ArrayPart::default()
            };
            for parent in others(parent) {
                let body = ArrayPart { parent, ..body };
                let status = test.status(Op::ArrayPart, &body, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{parent:#x}");
            }
            for (ordered, status, count) in [
                (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED, 1),
                (CUDA_SUCCESS, CUDA_SUCCESS, 2),
                (CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE, 2),
            ] {
                test.orders(ordered);
                assert_eq!(test.status(Op::ArrayPart, &body, &[]), status);
                assert_eq!(arrays(&test), count, "{kind:?} {status}");
            }
            let whole = message::Object { object: parent };
            assert_eq!(test.status(Op::ArrayDestroy, &whole, &[]), CUDA_SUCCESS);
            assert_eq!(arrays(&test), 0, "{kind:?}");
            let again = test.status(Op::ArrayDestroy, &whole, &[]);
            assert_eq!(again, CUDA_ERROR_INVALID_HANDLE, "{kind:?}");
            assert_eq!((test.buried(), test.held()), (1, 0), "{kind:?}");
        }
    }

    #[test]
    fn graphs_are_read_again_when_an_array_is_gone_of_which_they_name_a_level() {
        for is_kept in [false, true] {
            let mut test = match is_kept {
                true => Fixture::with_keeper(&WITH_KEPT),
                false => Fixture::new(&[]),
            };
            let parent = array(&mut test, Kind::MipmappedArray);
            let body = ArrayPart {
                parent,
                part: test.new_handle(Kind::Array),
                ..ArrayPart::default()
            };
            assert_eq!(test.status(Op::ArrayPart, &body, &[]), CUDA_SUCCESS);
            test.graph();
            test.session.objects.graphs.note_saved(true);
            test.session.objects.graphs.refer_to(body.part);
            assert!(!test.session.objects.graphs.are_stale());
            let whole = message::Object { object: parent };
            assert_eq!(test.status(Op::ArrayDestroy, &whole, &[]), CUDA_SUCCESS);
            assert!(test.session.objects.graphs.are_stale());
        }
    }

    #[test]
    fn a_part_that_the_driver_does_not_describe_gets_no_handle() {
        let refuses = fails::<{ CUDA_ERROR_NOT_SUPPORTED.0 }>;
        let mut test = Fixture::new(&[("cuArray3DGetDescriptor_v2", refuses as Function)]);
        let body = ArrayPart {
            parent: array(&mut test, Kind::Array),
            part: test.new_handle(Kind::Array),
            ..ArrayPart::default()
        };
        let status = test.status(Op::ArrayPart, &body, &[]);
        assert_eq!((status, arrays(&test)), (CUDA_ERROR_NOT_SUPPORTED, 1));
    }

    #[test]
    fn the_driver_is_asked_of_arrays_of_the_session_only() {
        for (kind, what, name) in [
            (Kind::Array, 0, "cuArrayGetMemoryRequirements"),
            (Kind::Array, 1, "cuArrayGetSparseProperties"),
            (
                Kind::MipmappedArray,
                0,
                "cuMipmappedArrayGetMemoryRequirements",
            ),
            (
                Kind::MipmappedArray,
                1,
                "cuMipmappedArrayGetSparseProperties",
            ),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let good = ArrayQuery {
                array: array(&mut test, kind),
                kind: what,
                device: 0,
            };
            for array in others(good.array) {
                let status = test.status(Op::ArrayQuery, &ArrayQuery { array, ..good }, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{array:#x}");
            }
            let status = test.status(Op::ArrayQuery, &ArrayQuery { device: 1, ..good }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_DEVICE, "{name}");
            for (status, ends) in [
                (CUDA_ERROR_NOT_SUPPORTED, false),
                (CUDA_SUCCESS, false),
                (FAULT, true),
            ] {
                test.orders(status);
                assert_eq!(test.told(Op::ArrayQuery, &good, &[]), status, "{name}");
                assert_eq!(test.has_ended(), ends, "{name} {status}");
            }
        }
    }

    fn device_side(address: u64) -> BoxSide {
        BoxSide {
            address,
            pitch: 64,
            rows: 2,
            side: CopySide::Device as u32,
            ..BoxSide::default()
        }
    }

    fn other_side(side: u32, address: u64) -> BoxSide {
        BoxSide {
            side,
            ..device_side(address)
        }
    }

    /// Two slices of two rows of 8 bytes: 200 bytes of memory.
    fn copy(to: BoxSide, from: BoxSide, stream: u64) -> CopyBox {
        CopyBox {
            to,
            from,
            width: 8,
            height: 2,
            depth: 2,
            stream,
        }
    }

    #[test]
    fn both_sides_of_a_box_are_the_sessions() {
        let mut test = Fixture::new(&[("cuMemcpy3DAsync_v2", counts as Function)]);
        let (device, host) = (test.memory(UNIT), test.pinned(4096));
        let (plain, stream) = (array(&mut test, Kind::Array), test.stream());
        let mipmap = array(&mut test, Kind::MipmappedArray);
        let good = device_side(device + UNIT - 200);
        let value = CUDA_ERROR_INVALID_VALUE;
        let pinned = CopySide::Host as u32;
        let overlapping = BoxSide { pitch: 7, ..good };
        let mut wrong = vec![
            (device_side(device + UNIT - 199), value),
            (device_side(device - 8), value),
            (other_side(pinned, host + 4096 - 199), value),
            (other_side(pinned, device), value),
            (overlapping, value),
            (other_side(ARRAY_SIDE, mipmap), CUDA_ERROR_INVALID_HANDLE),
        ];
        let no_arrays = others(plain).map(|array| other_side(ARRAY_SIDE, array));
        wrong.extend(no_arrays.map(|side| (side, CUDA_ERROR_INVALID_HANDLE)));
        for (side, status) in wrong {
            for body in [copy(side, good, stream), copy(good, side, stream)] {
                let refused = test.status(Op::CopyBox, &body, &[]);
                assert_eq!(refused, status, "{:#x}", side.address);
            }
        }
        for stream in others(stream) {
            let status = test.status(Op::CopyBox, &copy(good, good, stream), &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{stream:#x}");
        }
        assert_eq!((test.calls(), test.session.flow.counts.copies), (0, 0));
        let of_array = other_side(ARRAY_SIDE, plain);
        for body in [copy(good, of_array, stream), copy(of_array, good, stream)] {
            assert_eq!(test.status(Op::CopyBox, &body, &[]), CUDA_SUCCESS);
        }
        assert_eq!((test.calls(), test.session.flow.counts.copies), (2, 2));
    }

    #[test]
    fn a_box_of_sides_that_do_not_exist_breaks_the_protocol() {
        let mut test = Fixture::new(&[("cuMemcpy3DAsync_v2", counts as Function)]);
        let (device, host) = (test.memory(UNIT), test.pinned(4096));
        let (good, stream) = (device_side(device), test.stream());
        let staging = CopySide::Staging as u32;
        for side in [
            other_side(3, device),
            other_side(u32::MAX, device),
            // Only the low byte would be a side.
            other_side(256, device),
            other_side(staging, STAGING_LEN as u64 - 199),
        ] {
            for body in [copy(side, good, stream), copy(good, side, stream)] {
                assert!(test.is_violation(Op::CopyBox, &body, &[]), "{}", side.side);
            }
        }
        let on_host = other_side(CopySide::Host as u32, host);
        let needless = copy(on_host, on_host, stream);
        assert!(test.is_violation(Op::CopyBox, &needless, &[]));
        assert_eq!(test.calls(), 0);
        // A graph may do it.
        test.captures(stream);
        assert_eq!(test.status(Op::CopyBox, &needless, &[]), CUDA_SUCCESS);
    }

    #[test]
    fn a_box_that_the_driver_refuses_is_not_counted_and_a_fault_ends_the_session() {
        let mut test = Fixture::new(&[("cuMemcpy3DAsync_v2", obeys as Function)]);
        let side = device_side(test.memory(UNIT));
        let body = copy(side, side, test.stream());
        for (status, copies) in [(CUDA_ERROR_INVALID_VALUE, 0), (CUDA_SUCCESS, 1), (FAULT, 1)] {
            test.orders(status);
            assert_eq!(test.told(Op::CopyBox, &body, &[]), status);
            assert_eq!(test.session.flow.counts.copies, copies, "{status}");
        }
        assert!(test.has_ended());
    }

    #[test]
    fn an_array_in_a_captured_copy_stays_when_it_is_destroyed() {
        let mut test = Fixture::new(&[]);
        let (device, stream) = (test.memory(UNIT), test.stream());
        let object = array(&mut test, Kind::Array);
        test.captures(stream);
        let body = copy(other_side(ARRAY_SIDE, object), device_side(device), stream);
        assert_eq!(test.status(Op::CopyBox, &body, &[]), CUDA_SUCCESS);
        let body = message::Object { object };
        assert_eq!(test.status(Op::ArrayDestroy, &body, &[]), CUDA_SUCCESS);
        assert_eq!((test.buried(), arrays(&test)), (0, 0));
        assert_eq!(test.session.objects.bound_arrays.len(), 1);
    }

    fn texture(kind: u32, words: [u64; 5]) -> TextureCreate {
        let mut body = TextureCreate::default();
        body.resource.kind = kind;
        body.resource.words[..5].copy_from_slice(&words);
        body
    }

    #[test]
    fn a_texture_is_of_arrays_and_memory_of_the_session() {
        let mut test = Fixture::new(&[
            ("cuTexObjectCreate", counts as Function),
            ("cuSurfObjectCreate", counts as Function),
        ]);
        let memory = test.memory(UNIT);
        let (plain, mipmap) = (
            array(&mut test, Kind::Array),
            array(&mut test, Kind::MipmappedArray),
        );
        let (handle, value) = (CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE);
        let of_array = |array| texture(CU_RESOURCE_TYPE_ARRAY, [array, 0, 0, 0, 0]);
        let of_mipmap = |array| texture(CU_RESOURCE_TYPE_MIPMAPPED_ARRAY, [array, 0, 0, 0, 0]);
        let linear = |at| texture(CU_RESOURCE_TYPE_LINEAR, [at, 0, 0, 0, 0]);
        // Rows of 64 bytes.
        let pitched = |at, rows| texture(CU_RESOURCE_TYPE_PITCH2D, [at, 0, 0, rows, 64]);
        let elsewhere = TextureCreate {
            device: 1,
            ..linear(memory)
        };
        for (body, status) in [
            (elsewhere, CUDA_ERROR_INVALID_DEVICE),
            (of_array(mipmap), handle),
            (of_array(plain + (1 << 32)), handle),
            (of_mipmap(plain), handle),
            (linear(memory - 8), value),
            (linear(memory + UNIT), value),
            (linear(0), value),
            (pitched(memory, UNIT / 64 + 1), value),
            (pitched(memory, u64::MAX), value),
            (texture(99, [memory, 0, 0, 0, 0]), value),
        ] {
            for flags in [0, TEXTURE_HAS_VIEW, TEXTURE_IS_SURFACE] {
                let body = TextureCreate { flags, ..body };
                let refused = test.status(Op::TextureCreate, &body, &[]);
                assert_eq!(refused, status, "{} {flags}", body.resource.kind);
            }
        }
        assert_eq!((test.calls(), test.session.objects.textures.len()), (0, 0));
        for body in [
            of_array(plain),
            of_mipmap(mipmap),
            linear(memory),
            pitched(memory, 4),
        ] {
            assert_eq!(test.status(Op::TextureCreate, &body, &[]), CUDA_SUCCESS);
        }
        assert_eq!(test.calls(), 4);
    }

    #[test]
    fn a_texture_that_the_driver_does_not_create_is_not_the_sessions() {
        for (flags, name) in [
            (0, "cuTexObjectCreate"),
            (TEXTURE_IS_SURFACE, "cuSurfObjectCreate"),
        ] {
            let mut test = Fixture::new(&[(name, obeys_with_handle as Function)]);
            let body = TextureCreate {
                flags,
                ..texture(
                    CU_RESOURCE_TYPE_ARRAY,
                    [array(&mut test, Kind::Array), 0, 0, 0, 0],
                )
            };
            for (status, count) in [(CUDA_ERROR_NOT_SUPPORTED, 0), (CUDA_SUCCESS, 1), (FAULT, 1)] {
                test.orders(status);
                assert_eq!(test.told(Op::TextureCreate, &body, &[]), status, "{name}");
                assert_eq!(test.session.objects.textures.len(), count, "{name}");
            }
            assert!(test.has_ended(), "{name}");
        }
    }

    #[test]
    fn a_client_is_not_told_the_drivers_array() {
        let mut test = Fixture::new(&[]);
        let array = array(&mut test, Kind::Array);
        let body = TextureCreate {
            flags: TEXTURE_IS_SURFACE,
            ..texture(CU_RESOURCE_TYPE_ARRAY, [array, 0, 0, 0, 0])
        };
        let info: TextureInfo = test.reply(Op::TextureCreate, &body, &[]).expect("it");
        assert_eq!(info.resource.words[0], 0);
    }

    #[test]
    fn a_texture_is_destroyed_once_and_as_the_object_that_it_is() {
        for (flags, wrong, name) in [
            (0, TEXTURE_IS_SURFACE, "cuTexObjectDestroy"),
            (TEXTURE_IS_SURFACE, 0, "cuSurfObjectDestroy"),
        ] {
            let mut test = Fixture::new(&[(name, records as Function)]);
            let body = TextureCreate {
                flags,
                ..texture(
                    CU_RESOURCE_TYPE_ARRAY,
                    [array(&mut test, Kind::Array), 0, 0, 0, 0],
                )
            };
            let object: u64 = test.reply(Op::TextureCreate, &body, &[]).expect("it");
            let end = |object, flags| TextureDestroy {
                object,
                flags,
                pad: 0,
            };
            for body in [end(object, wrong), end(object + 1, flags), end(0, flags)] {
                let status = test.status(Op::TextureDestroy, &body, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{name}");
            }
            assert_eq!(test.calls(), 0, "{name}");
            let status = test.status(Op::TextureDestroy, &end(object, flags), &[]);
            assert_eq!(status, CUDA_SUCCESS, "{name}");
            assert_eq!(test.recorded()[0][0], object, "{name}");
            let again = test.status(Op::TextureDestroy, &end(object, flags), &[]);
            assert_eq!(again, CUDA_ERROR_INVALID_VALUE, "{name}");
        }
    }
}
