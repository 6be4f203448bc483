//! Arrays of one to three dimensions, and textures of them.

use crate::call;
use crate::calls::{Status, same_bytes};
use crate::random::Random;
use mpsshim_api::cuda::*;
use std::ptr::null;

const AS_WORDS: u32 = 3;

pub struct Array {
    array: CUarray,
    row: usize,
    rows: usize,
    slices: usize,
    content: Vec<u8>,
    pub textures: Vec<CUtexObject>,
}

impl Array {
    /// # Errors
    /// A call's status.
    pub fn new(random: &mut Random) -> Status<Array> {
        let width = random.between(1, 64);
        let dimensions = random.between(1, 3);
        let mut side = |least| match dimensions >= least {
            true => random.between(1, 16),
            false => 0,
        };
        let (height, depth) = (side(2), side(3));
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            width: width as u64,
            height: height as u64,
            depth: depth as u64,
            format: AS_WORDS,
            channels: 1,
            ..CUDA_ARRAY3D_DESCRIPTOR::default()
        };
        let mut array = CUarray::NULL;
        call!(cuArray3DCreate_v2, &mut array, &raw const descriptor)?;
        let mut array = Array {
            array,
            row: 4 * width,
            rows: height.max(1),
            slices: depth.max(1),
            content: Vec::new(),
            textures: Vec::new(),
        };
        array.write(random)?;
        Ok(array)
    }

    fn copy(&self) -> CUDA_MEMCPY3D {
        CUDA_MEMCPY3D {
            src_array: self.array.0,
            dst_array: self.array.0,
            src_pitch: self.row as u64,
            dst_pitch: self.row as u64,
            src_height: self.rows as u64,
            dst_height: self.rows as u64,
            width: self.row as u64,
            height: self.rows as u64,
            depth: self.slices as u64,
            ..CUDA_MEMCPY3D::default()
        }
    }

    /// Writes the array, and makes a texture of it or destroys one.
    ///
    /// # Errors
    /// A call's status.
    pub fn write(&mut self, random: &mut Random) -> Status {
        self.content = random.bytes(self.row * self.rows * self.slices);
        let copy = CUDA_MEMCPY3D {
            src_type: CU_MEMORYTYPE_HOST,
            src_host: self.content.as_ptr() as u64,
            dst_type: CU_MEMORYTYPE_ARRAY,
            ..self.copy()
        };
        call!(cuMemcpy3D_v2, &raw const copy)?;
        let at = random.below(4);
        if at < self.textures.len() {
            return call!(cuTexObjectDestroy, self.textures.swap_remove(at));
        }
        self.textures.push(self.texture()?);
        Ok(())
    }

    fn texture(&self) -> Status<CUtexObject> {
        let mut resource = CUDA_RESOURCE_DESC {
            kind: CU_RESOURCE_TYPE_ARRAY,
            ..CUDA_RESOURCE_DESC::default()
        };
        resource.words[0] = self.array.0;
        let (texture, mut object) = (CUDA_TEXTURE_DESC::default(), CUtexObject::NULL);
        let view = null::<CUDA_RESOURCE_VIEW_DESC>();
        call!(
            cuTexObjectCreate,
            &mut object,
            &raw const resource,
            &raw const texture,
            view
        )?;
        Ok(object)
    }

    /// # Errors
    /// A call's status, or the difference.
    pub fn check(&self) -> Status {
        let mut found = vec![0u8; self.content.len()];
        let copy = CUDA_MEMCPY3D {
            src_type: CU_MEMORYTYPE_ARRAY,
            dst_type: CU_MEMORYTYPE_HOST,
            dst_host: found.as_mut_ptr() as u64,
            ..self.copy()
        };
        call!(cuMemcpy3D_v2, &raw const copy)?;
        same_bytes(|| "an array".into(), &found, &self.content)
    }

    /// # Errors
    /// A call's status.
    pub fn destroy(self) -> Status {
        for texture in self.textures {
            call!(cuTexObjectDestroy, texture)?;
        }
        call!(cuArrayDestroy, self.array)
    }
}
