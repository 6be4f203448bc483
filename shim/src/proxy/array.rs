//! Arrays, mipmapped arrays, texture and surface objects, as the client knows them: descriptors are kept here, so
//! that queries need no message.

use std::collections::HashMap;

use mpsshim_api::cuda::{
    CU_RESOURCE_TYPE_ARRAY, CU_RESOURCE_TYPE_MIPMAPPED_ARRAY, CUDA_ARRAY3D_DESCRIPTOR,
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC, CUDA_TEXTURE_DESC,
};
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::array::{
    ArrayCreate, ArrayInfo, ArrayPart, TEXTURE_HAS_VIEW, TEXTURE_IS_SURFACE, TextureCreate,
    TextureDestroy, TextureInfo,
};
use mpsshim_proto::message::{Object, Op};
use parking_lot::Mutex;

use crate::ffi::Status;
use crate::proxy::context::Context;
use crate::proxy::memory;
use crate::proxy::objects::{Entry, Table};
use crate::proxy::stream;
use crate::proxy::submit::Session;

static ARRAYS: Table<Array> = Table::new(Kind::Array);
static MIPMAPS: Table<Array> = Table::new(Kind::MipmappedArray);
/// Texture and surface objects by kind and value.
static OBJECTS: Mutex<Option<HashMap<(bool, u64), Texture>>> = Mutex::new(None);

/// An array or mipmapped array and its handle.
pub type ArrayRef = &'static Entry<Array>;

/// Client-side state of an array.
#[derive(Debug, Default)]
pub struct Array(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    /// Handle of its context.
    context: u64,
    device: u32,
    /// Handle of the array it is a level or plane of; 0: of none.
    parent: u64,
    /// Its levels or planes that were requested: index and handle.
    parts: Vec<(u32, u64)>,
}

impl Array {
    /// Result of `cuArray3DGetDescriptor`.
    pub fn descriptor(&self) -> CUDA_ARRAY3D_DESCRIPTOR {
        self.0.lock().descriptor
    }
    /// Server's ordinal of its device.
    pub fn device(&self) -> u32 {
        self.0.lock().device
    }
    /// Whether it is a level or plane of another.
    pub fn is_part(&self) -> bool {
        self.0.lock().parent != 0
    }
}

/// A texture or surface object.
#[derive(Clone, Copy, Debug)]
pub struct Texture {
    context: u64,
    pub resource: CUDA_RESOURCE_DESC,
    pub texture: CUDA_TEXTURE_DESC,
    pub view: CUDA_RESOURCE_VIEW_DESC,
}

fn table(kind: Kind) -> &'static Table<Array> {
    if kind == Kind::MipmappedArray {
        &MIPMAPS
    } else {
        &ARRAYS
    }
}

/// The array of a `CUarray`.
pub fn array(handle: u64) -> Status<ArrayRef> {
    ARRAYS.find(handle)
}

/// The mipmapped array of a `CUmipmappedArray`.
pub fn mipmap(handle: u64) -> Status<ArrayRef> {
    MIPMAPS.find(handle)
}

/// Makes an array, or a mipmapped one with `levels`.
pub fn create(
    session: &Session,
    context: &Context,
    kind: Kind,
    descriptor: &CUDA_ARRAY3D_DESCRIPTOR,
    levels: u32,
) -> Status<u64> {
    let table = table(kind);
    let entry = table.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let body = ArrayCreate {
        array: table.handle_of(entry),
        size: [descriptor.width, descriptor.height, descriptor.depth],
        format: descriptor.format,
        channels: descriptor.channels,
        flags: descriptor.flags,
        levels,
        device: context.server_device,
        pad: 0,
    };
    let state = State {
        context: context.handle,
        device: context.server_device,
        ..State::default()
    };
    let answer = memory::request_with_room(session, Op::ArrayCreate, &body, &[]);
    publish(table, entry, state, answer.and_then(|answer| answer.read()))
}

/// Publishes an entry whose array the server has created.
fn publish(
    table: &Table<Array>,
    entry: &Entry<Array>,
    mut state: State,
    made: Status<ArrayInfo>,
) -> Status<u64> {
    match made {
        Ok(info) => {
            state.descriptor = CUDA_ARRAY3D_DESCRIPTOR {
                width: info.size[0],
                height: info.size[1],
                depth: info.size[2],
                format: info.format,
                channels: info.channels,
                flags: info.flags,
                pad: 0,
            };
            *entry.0.lock() = state;
            Ok(table.publish(entry))
        }
        Err(status) => {
            table.recycle(entry);
            Err(status)
        }
    }
}

/// A level of a mipmapped array, or a plane of an array: the same handle each time.
pub fn part(session: &Session, parent: ArrayRef, index: u32) -> Status<u64> {
    let mut whole = parent.0.lock();
    if let Some((_, part)) = whole.parts.iter().find(|(at, _)| *at == index) {
        return Ok(*part);
    }
    let entry = ARRAYS.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let body = ArrayPart {
        parent: parent.handle(),
        part: ARRAYS.handle_of(entry),
        index,
        pad: 0,
    };
    let state = State {
        context: whole.context,
        device: whole.device,
        parent: body.parent,
        ..State::default()
    };
    let answer = session.request(Op::ArrayPart, &body, &[]);
    let part = publish(
        &ARRAYS,
        entry,
        state,
        answer.and_then(|answer| answer.read()),
    )?;
    whole.parts.push((index, part));
    Ok(part)
}

/// Destroys an array or mipmapped array and its parts, after the work that may use it.
pub fn destroy(session: &Session, handle: u64) -> Status {
    stream::quiesce(session, None)?;
    forget(handle)?;
    session.submit(Op::ArrayDestroy, &Object { object: handle })
}

/// Takes an array and its parts out of the tables.
fn forget(handle: u64) -> Status {
    let kind = Handle(handle).kind().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let entry = table(kind)
        .retire(handle)
        .ok_or_else(|| table(kind).absent(handle))?;
    let parts = std::mem::take(&mut *entry.0.lock()).parts;
    for (_, part) in parts {
        if let Some(part) = ARRAYS.retire(part) {
            *part.0.lock() = State::default();
            ARRAYS.recycle(part);
        }
    }
    table(kind).recycle(entry);
    Ok(())
}

/// Makes a texture object, or a surface object, which has a resource only. The value is the driver's own: kernels
/// use it.
pub fn create_object(
    session: &Session,
    context: &Context,
    resource: CUDA_RESOURCE_DESC,
    texture: Option<CUDA_TEXTURE_DESC>,
    view: Option<CUDA_RESOURCE_VIEW_DESC>,
) -> Status<u64> {
    let is_surface = texture.is_none();
    let texture = texture.unwrap_or_default();
    let flag = |on: bool, flag: u32| if on { flag } else { 0 };
    let body = TextureCreate {
        resource,
        texture,
        view: view.unwrap_or_default(),
        flags: flag(view.is_some(), TEXTURE_HAS_VIEW) | flag(is_surface, TEXTURE_IS_SURFACE),
        device: context.server_device,
    };
    let mut made: TextureInfo = session.request(Op::TextureCreate, &body, &[])?.read()?;
    if matches!(
        resource.kind,
        CU_RESOURCE_TYPE_ARRAY | CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
    ) {
        made.resource.words[0] = resource.words[0];
    }
    let kept = Texture {
        context: context.handle,
        resource: made.resource,
        texture: made.texture,
        view: made.view,
    };
    let mut objects = OBJECTS.lock();
    objects
        .get_or_insert_default()
        .insert((is_surface, made.object), kept);
    Ok(made.object)
}

/// The description that a texture or surface object was created from.
pub fn object(is_surface: bool, value: u64) -> Status<Texture> {
    let objects = OBJECTS.lock();
    let found = objects
        .as_ref()
        .and_then(|objects| objects.get(&(is_surface, value)));
    found.copied().ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Destroys a texture or surface object, after the work that may use it. Unknown ones are ignored, as natively.
pub fn destroy_object(session: &Session, is_surface: bool, value: u64) -> Status {
    if object(is_surface, value).is_err() {
        return session.check();
    }
    stream::quiesce(session, None)?;
    if let Some(objects) = OBJECTS.lock().as_mut() {
        objects.remove(&(is_surface, value));
    }
    submit_destroy(session, is_surface, value)
}

fn submit_destroy(session: &Session, is_surface: bool, object: u64) -> Status {
    let body = TextureDestroy {
        object,
        flags: if is_surface { TEXTURE_IS_SURFACE } else { 0 },
        pad: 0,
    };
    session.submit(Op::TextureDestroy, &body)
}

/// Releases the objects created in a context.
pub fn release_of_context(session: &Session, context: &Context) {
    let mut objects = Vec::new();
    if let Some(all) = OBJECTS.lock().as_mut() {
        all.retain(|key, object| {
            let goes = object.context == context.handle;
            if goes {
                objects.push(*key);
            }
            !goes
        });
    }
    // An error means that the server is gone, and they with it.
    for (is_surface, value) in objects {
        let _ = submit_destroy(session, is_surface, value);
    }
    for table in [&MIPMAPS, &ARRAYS] {
        for handle in table.handles() {
            let goes = table.get(handle).is_some_and(|entry| {
                let state = entry.0.lock();
                state.context == context.handle && state.parent == 0
            });
            if goes {
                table.ends_with_context(handle);
            }
            if goes && forget(handle).is_ok() {
                let _ = session.submit(Op::ArrayDestroy, &Object { object: handle });
            }
        }
    }
}
