//! Arrays and texture objects of a session, and their end.
//!
//! The driver's array is destroyed when all is quiet, as modules are unloaded: a kernel of the client that died may
//! still look at it, and destroying waits for work in flight, everyone's.

use crate::engine::base::account::Charge;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use mpsshim_api::cuda::*;
use std::collections::HashMap;

/// An array of a session, or a level or plane of one.
#[derive(Debug)]
pub struct Array {
    /// The driver's array.
    pub raw: RawArray,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Handle of the array it is a part of, and dies with; 0: it stands for itself.
    pub parent: u64,
    /// About the memory it takes, until the driver has it back; `None` for a part.
    pub charge: Option<Charge>,
    /// A texture or surface reference names it, or did: it stays until the session's end.
    pub bound: bool,
}

/// A texture or surface reference.
#[derive(Debug)]
pub struct Reference {
    /// The driver's reference.
    pub raw: RawReference,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Handle of the module it is in, and dies with; 0: the session's own.
    pub image: u64,
    /// Handle of the array it was given last.
    pub array: u64,
}

/// Which kind of reference.
#[derive(Debug, Clone, Copy)]
pub enum RawReference {
    /// `cuTexRefCreate`, `cuModuleGetTexRef`.
    Texture(CUtexref),
    /// `cuModuleGetSurfRef`.
    Surface(CUsurfref),
}

impl Reference {
    /// Destroys the driver's reference, unless it is a module's.
    pub fn end(self, gpu: &Gpu) {
        let RawReference::Texture(reference) = self.raw else {
            return;
        };
        if self.image == 0 {
            let _ = gpu.devices[self.device].make_current(&gpu.driver);
            let _ = gpu.driver.array.tex_ref_destroy(reference);
        }
    }
}

/// Which kind of array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RawArray {
    /// `cuArrayCreate`, a level or a plane.
    Plain(CUarray),
    /// `cuMipmappedArrayCreate`.
    Mipmapped(CUmipmappedArray),
}

/// A texture or surface object, by its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Object {
    /// `cuTexObjectCreate`.
    Texture(u64),
    /// `cuSurfObjectCreate`.
    Surface(u64),
}

/// Texture and surface objects of a session and the devices they are on.
pub type TextureObjects = HashMap<Object, Ordinal>;

impl Array {
    /// Destroys the driver's array; a part goes with what it is a part of.
    pub fn end(self, gpu: &Gpu) {
        if self.parent != 0 {
            return;
        }
        let _ = gpu.devices[self.device].make_current(&gpu.driver);
        let ended = match self.raw {
            RawArray::Plain(array) => gpu.driver.array.array_destroy(array),
            RawArray::Mipmapped(array) => gpu.driver.array.mipmapped_array_destroy(array),
        };
        if let Err(status) = ended {
            gpu.note_status(status);
        }
    }
}

impl Object {
    /// Destroys the driver's object.
    pub fn end(self, device: Ordinal, gpu: &Gpu) -> Result<(), CUresult> {
        gpu.devices[device].make_current(&gpu.driver)?;
        let driver = &gpu.driver.array;
        match self {
            Object::Texture(object) => driver.tex_object_destroy(CUtexObject(object)),
            Object::Surface(object) => driver.surf_object_destroy(CUsurfObject(object)),
        }
    }
}
