//! Arrays, texture and surface objects, two- and three-dimensional copies.

use super::Reply;
use crate::engine::base::account::{Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::copy::Rows;
use crate::engine::gpu::Gpu;
use crate::engine::objects::arrays::{Array, Object, RawArray};
use crate::engine::objects::pace::Runs;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::array::{
    ARRAY_SIDE, ArrayCreate, ArrayInfo, ArrayPart, ArrayQuery, BoxSide, CopyBox, TEXTURE_HAS_VIEW,
    TEXTURE_IS_SURFACE, TextureCreate, TextureDestroy, TextureInfo,
};
use mpsshim_proto::message::{self, Side};
use zerocopy::IntoBytes;

/// One side of a copy in the driver's form.
#[derive(Default)]
struct DriverSide {
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    at: [u64; 3],
}

impl Session {
    /// `cuMemcpy2DAsync`, `cuMemcpy3DAsync`. Every byte of memory that the copy may touch is checked: from the first
    /// byte of its first row to the last of its last.
    pub fn copy_box(&mut self, shared: &Shared, body: CopyBox) -> Result<(), CallError> {
        let (to, from) = (
            self.box_side(&body.to, &body)?,
            self.box_side(&body.from, &body)?,
        );
        self.check_writable(to.device.max(to.host))?;
        let index = self.objects.streams.index(body.stream)?;
        if self.objects.streams.at(index)?.capturing {
            // An array that a graph names is kept, because the graph may be launched later.
            for side in [&body.to, &body.from] {
                if side.side == ARRAY_SIDE {
                    self.bind(side.address)?;
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
        let (index, stream) = self.prepare_work(&shared.gpu, body.stream, Runs::Nothing)?;
        shared.gpu.driver.array.memcpy3d_async(&copy, stream)?;
        self.flow.counts.copies += 1;
        self.submitted(&shared.gpu, index, 1)
    }

    fn box_side(&self, side: &BoxSide, body: &CopyBox) -> Result<DriverSide, CallError> {
        if side.side == ARRAY_SIDE {
            let RawArray::Plain(array) = self.objects.arrays.get(side.address)?.raw else {
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
        let kind = u8::try_from(side.side).ok().and_then(Side::from_u8);
        match kind {
            Some(Side::Device) => {
                let place = self.place_of(side.address);
                self.check_device(place, len)?;
                Ok(DriverSide {
                    kind: CU_MEMORYTYPE_DEVICE,
                    device: place,
                    ..DriverSide::default()
                })
            }
            Some(reached) => {
                let host = match reached {
                    Side::Staging => self.shared.segment.staging_address(side.address, len)?,
                    _ => {
                        self.check_reachable(side.address, len)?;
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

    /// `cuArray3DCreate`, `cuMipmappedArrayCreate`.
    pub fn array_create(&mut self, shared: &Shared, body: ArrayCreate) -> Reply {
        let device = shared.gpu.device(body.device)?;
        device.make_current(&shared.gpu.driver)?;
        let mut descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            width: body.size[0],
            height: body.size[1],
            depth: body.size[2],
            format: body.format,
            channels: body.channels,
            flags: body.flags,
            pad: 0,
        };
        let mipmapped = Handle(body.array).kind() == Some(Kind::MipmappedArray);
        let levels = if mipmapped { body.levels } else { 1 };
        let memory = Memory::Device(device.ordinal);
        let bytes = descriptor.bytes(levels);
        let charge = self.with_room(shared, (memory, bytes), |session| {
            session.account.take(memory, bytes)
        })?;
        self.make_array(shared, device.ordinal, &body, &mut descriptor, charge)?;
        Ok(info(&descriptor))
    }

    fn make_array(
        &mut self,
        shared: &Shared,
        device: Ordinal,
        body: &ArrayCreate,
        descriptor: &mut CUDA_ARRAY3D_DESCRIPTOR,
        charge: Charge,
    ) -> Result<(), CallError> {
        let driver = &shared.gpu.driver.array;
        let mipmapped = Handle(body.array).kind() == Some(Kind::MipmappedArray);
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
            bound: false,
        };
        let table = if mipmapped {
            &mut self.objects.mipmaps
        } else {
            &mut self.objects.arrays
        };
        if let Err((status, array)) = table.insert(body.array, array) {
            shared.lanes.bury(Buried::Array(array));
            return Err(status.into());
        }
        Ok(())
    }

    /// `cuMipmappedArrayGetLevel`, `cuArrayGetPlane`. The driver returns the same array each time.
    pub fn array_part(&mut self, shared: &Shared, body: ArrayPart) -> Reply {
        let parent = match Handle(body.parent).kind() {
            Some(Kind::MipmappedArray) => self.objects.mipmaps.get(body.parent)?,
            _ => self.objects.arrays.get(body.parent)?,
        };
        let device = parent.device;
        shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
        let driver = &shared.gpu.driver.array;
        let mut part = CUarray::NULL;
        match parent.raw {
            RawArray::Mipmapped(array) => {
                driver.mipmapped_array_get_level(&mut part, array, body.index)?;
            }
            RawArray::Plain(array) => driver.array_get_plane(&mut part, array, body.index)?,
        }
        let mut descriptor = CUDA_ARRAY3D_DESCRIPTOR::default();
        driver.array3d_get_descriptor(&mut descriptor, part)?;
        let array = Array {
            raw: RawArray::Plain(part),
            device,
            parent: body.parent,
            charge: None,
            bound: false,
        };
        self.objects
            .arrays
            .insert(body.part, array)
            .map_err(|(status, _)| status)?;
        Ok(info(&descriptor))
    }

    /// `cuArrayDestroy`, `cuMipmappedArrayDestroy`: the handles become invalid immediately.
    pub fn array_destroy(
        &mut self,
        shared: &Shared,
        body: message::Object,
    ) -> Result<(), CallError> {
        let mut array = match Handle(body.object).kind() {
            Some(Kind::MipmappedArray) => self.objects.mipmaps.remove(body.object)?,
            _ => self.objects.arrays.remove(body.object)?,
        };
        self.objects
            .arrays
            .retain(|part| part.parent != body.object);
        if array.bound {
            self.objects.bound_arrays.push(array);
        } else {
            if let Some(charge) = &mut array.charge {
                charge.leave();
            }
            shared.lanes.bury(Buried::Array(array));
        }
        Ok(())
    }

    /// `cuArrayGetMemoryRequirements`, `cuArrayGetSparseProperties`, and the same calls for mipmapped arrays.
    pub fn array_query(&mut self, shared: &Shared, body: ArrayQuery) -> Reply {
        let array = match Handle(body.array).kind() {
            Some(Kind::MipmappedArray) => self.objects.mipmaps.get(body.array)?,
            _ => self.objects.arrays.get(body.array)?,
        };
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
                    driver
                        .mipmapped_array_get_memory_requirements(&mut found, array, device.raw)?;
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
    pub fn texture_create(&mut self, shared: &Shared, body: TextureCreate) -> Reply {
        let device = shared.gpu.device(body.device)?;
        device.make_current(&shared.gpu.driver)?;
        if self.objects.textures.len() >= bounds::TEXTURES {
            return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
        }
        let resource = self.resource(body.resource)?;
        let driver = &shared.gpu.driver.array;
        let object = if body.flags & TEXTURE_IS_SURFACE != 0 {
            let mut object = CUsurfObject::NULL;
            driver.surf_object_create(&mut object, &resource)?;
            Object::Surface(object.0)
        } else {
            let mut object = CUtexObject::NULL;
            let view = if body.flags & TEXTURE_HAS_VIEW != 0 {
                &raw const body.view
            } else {
                std::ptr::null()
            };
            driver.tex_object_create(&mut object, &resource, &body.texture, view)?;
            Object::Texture(object.0)
        };
        self.objects.textures.insert(object, device.ordinal);
        let (Object::Texture(value) | Object::Surface(value)) = object;
        let mut info = TextureInfo {
            object: value,
            resource: body.resource,
            ..TextureInfo::default()
        };
        if let Object::Texture(object) = object {
            info.resource = CUDA_RESOURCE_DESC::default();
            let object = CUtexObject(object);
            driver.tex_object_get_resource_desc(&mut info.resource, object)?;
            driver.tex_object_get_texture_desc(&mut info.texture, object)?;
            driver.tex_object_get_resource_view_desc(&mut info.view, object)?;
        }
        if matches!(
            resource.kind,
            CU_RESOURCE_TYPE_ARRAY | CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
        ) {
            info.resource.words[0] = 0;
        }
        Ok(info.as_bytes().to_vec())
    }

    /// Translates the handles in a resource descriptor to the driver's arrays, and checks that its memory is the
    /// session's.
    fn resource(&self, mut resource: CUDA_RESOURCE_DESC) -> Result<CUDA_RESOURCE_DESC, CallError> {
        let words = &mut resource.words;
        match resource.kind {
            CU_RESOURCE_TYPE_ARRAY | CU_RESOURCE_TYPE_MIPMAPPED_ARRAY if words[0] == 0 => {}
            CU_RESOURCE_TYPE_ARRAY => {
                if let RawArray::Plain(array) = self.objects.arrays.get(words[0])?.raw {
                    words[0] = array.0;
                }
            }
            CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
                if let RawArray::Mipmapped(array) = self.objects.mipmaps.get(words[0])?.raw {
                    words[0] = array.0;
                }
            }
            // The range must begin in the block, but may extend beyond it, as natively; a kernel could read that far
            // anyway.
            CU_RESOURCE_TYPE_LINEAR => self.check_device(words[0], 1)?,
            CU_RESOURCE_TYPE_PITCH2D => {
                let len = words[4].checked_mul(words[3]);
                self.check_device(words[0], len.ok_or(CUDA_ERROR_INVALID_VALUE)?)?;
            }
            _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
        }
        Ok(resource)
    }

    /// `cuTexObjectDestroy`, `cuSurfObjectDestroy`.
    pub fn texture_destroy(
        &mut self,
        shared: &Shared,
        body: TextureDestroy,
    ) -> Result<(), CallError> {
        let object = if body.flags & TEXTURE_IS_SURFACE != 0 {
            Object::Surface(body.object)
        } else {
            Object::Texture(body.object)
        };
        let device = self.objects.textures.remove(&object);
        Ok(object.end(device.ok_or(CUDA_ERROR_INVALID_VALUE)?, &shared.gpu)?)
    }
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

impl Session {
    /// Takes the objects to be destroyed at the end of the session, in the order of destruction. Its modules have been
    /// unloaded before.
    pub fn take_arrays(&mut self, gpu: &Gpu) -> Vec<Buried> {
        for reference in self.objects.texture_references.drain() {
            reference.end(gpu);
        }
        let objects = std::mem::take(&mut self.objects.textures).into_iter();
        let objects = objects.map(|(object, device)| Buried::Object(object, device));
        let arrays = self
            .objects
            .arrays
            .drain()
            .chain(self.objects.mipmaps.drain());
        let arrays = arrays.chain(self.objects.bound_arrays.drain(..));
        objects.chain(arrays.map(Buried::Array)).collect()
    }
}
