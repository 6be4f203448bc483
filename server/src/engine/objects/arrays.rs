//! Arrays and texture objects of a session, and their destruction.
//!
//! The driver's array is destroyed at a quiescent point, as modules are unloaded: a kernel of the ended client may
//! still access it, and its destruction waits for the work in flight of all clients.

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
    /// Handle of the array that it is a part of and is destroyed with; 0 if it is a whole array.
    pub parent: u64,
    /// Charge for its memory until the driver has freed it; `None` for a part.
    pub charge: Option<Charge>,
    /// Whether a texture or surface reference has ever been bound to it: it then lives until the session's end.
    pub bound: bool,
}

/// A texture or surface reference.
#[derive(Debug)]
pub struct Reference {
    /// The driver's reference.
    pub raw: RawReference,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Handle of the module that contains it and with which it is destroyed; 0 if the session created it.
    pub image: u64,
    /// Handle of the array last bound to it.
    pub array: u64,
}

/// The driver's reference, by kind.
#[derive(Debug, Clone, Copy)]
pub enum RawReference {
    /// `cuTexRefCreate`, `cuModuleGetTexRef`.
    Texture(CUtexref),
    /// `cuModuleGetSurfRef`.
    Surface(CUsurfref),
}

impl Reference {
    /// Destroys the driver's reference, unless it belongs to a module.
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

/// The driver's array, by kind.
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
    /// Destroys the driver's array. A part is destroyed with the whole.
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
