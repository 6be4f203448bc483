//! Arrays and texture objects of a session, and their destruction.
//!
//! The driver's array is destroyed at a quiescent point, as modules are unloaded: a kernel of the ended client may
//! still access it, and its destruction waits for the work in flight of all clients.

use crate::engine::base::account::Charge;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::array_memory::Place;
use crate::engine::gpu::textures::Object;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::array::ArrayCreate;
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
    /// Charge for its memory until the driver has freed it; `None` for a part, and in memory that the next server maps.
    pub charge: Option<Charge>,
    /// Its memory, if the next server maps it again.
    pub kept: Option<Box<Kept>>,
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

/// Texture and surface objects of a session and the devices they are on.
pub type TextureObjects = HashMap<Object, Ordinal>;

/// An array in memory that the next server maps again ([`Place`]).
#[derive(Debug)]
pub struct Kept {
    /// The message that made it.
    pub create: ArrayCreate,
    /// Its memory.
    pub place: Place,
    /// The driver's array to destroy: the one of which a plain array is the only level.
    pub whole: CUmipmappedArray,
    /// Index and handle of each level or plane that the client has.
    pub parts: Vec<(u32, u64)>,
}

impl Array {
    /// Notes that the client has destroyed it.
    pub fn leave(&mut self) {
        if let Some(charge) = &mut self.charge {
            charge.leave();
        }
        if let Some(kept) = &mut self.kept {
            kept.place.leave();
        }
    }

    /// Destroys the driver's array. A part is destroyed with the whole.
    pub fn end(self, gpu: &Gpu) {
        if self.parent != 0 {
            return;
        }
        let _ = gpu.devices[self.device].make_current(&gpu.driver);
        let raw = match &self.kept {
            Some(kept) => RawArray::Mipmapped(kept.whole),
            None => self.raw,
        };
        let ended = match raw {
            RawArray::Plain(array) => gpu.driver.array.array_destroy(array),
            RawArray::Mipmapped(array) => gpu.driver.array.mipmapped_array_destroy(array),
        };
        if let Err(status) = ended {
            gpu.note_status(status);
        }
        if let Some(kept) = self.kept {
            kept.place.end(gpu);
        }
    }
}
