//! Memory of another process that was imported, and mipmapped arrays in it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use mpsshim_api::cuda::*;

use crate::api::{In, Out, R, api};
use crate::array;
use crate::context::{Context, live};
use crate::driver::{driver, new_handle};
use crate::memory::{map_imported, take_file, unmap_imported};

/// Where arrays can begin.
const ALIGNMENT: u64 = 512;

/// Imported memory. Arrays that are mapped stay valid without it.
pub struct External {
    file: OwnedFd,
    bytes: u64,
    /// The id of the context that it was imported in.
    pub context: u64,
}

/// The part of imported memory that an array is in.
pub struct Mapping(u64);

impl Mapping {
    pub fn start(&self) -> u64 {
        self.0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap_imported(self.0);
    }
}

impl External {
    fn map(&self, context: &Context, offset: u64, bytes: u64) -> R<Mapping> {
        let fits = offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.bytes);
        if !fits || !offset.is_multiple_of(ALIGNMENT) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        map_imported(context, &self.file, offset, bytes).map(Mapping)
    }
}

api! { TABLE;
    fn cuImportExternalMemory(out: Out<u64>, descriptor: In<CUDA_EXTERNAL_MEMORY_HANDLE_DESC>) {
        let context = live()?;
        let d = descriptor.get(0)?;
        if out.is_null() || d.kind != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD || d.flags & !CUDA_EXTERNAL_MEMORY_DEDICATED != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let file = take_file(d.handle[0] as i32, d.size)?;
        let handle = new_handle();
        let external = External { file, bytes: d.size, context: context.id };
        driver()?.imports.insert(handle, Arc::new(external));
        out.set(handle)
    }
    fn cuExternalMemoryGetMappedMipmappedArray(out: Out<u64>, memory: u64, descriptor: In<CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC>) {
        let memory = driver()?.imports.get(memory)?;
        let d = descriptor.get(0)?;
        if out.is_null() || d.levels == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.set(array::imported(d.array, d.levels, |context, bytes| memory.map(context, d.offset, bytes))?)
    }
    fn cuDestroyExternalMemory(memory: u64) { driver()?.imports.remove(memory).map(drop) }
}
