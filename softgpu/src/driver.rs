//! The state of the driver: its devices and the tables of all objects that callers have handles to.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use mpsshim_api::cuda::*;
use parking_lot::RwLock;

use crate::api::R;
use crate::array::{Array, Mipmap};
use crate::context::Context;
use crate::device::Device;
use crate::event::Event;
use crate::external::External;
use crate::green::{Description, Green};
use crate::library::{Library, LibraryKernel};
use crate::link::Link;
use crate::memory::{Physical, Ranges};
use crate::module::{Kernel, Module};
use crate::pool::Pool;
use crate::stream::Stream;

/// A handle that was never given out before, so that a stale one is never mistaken for another object's.
pub fn new_handle() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x50F7_0000_0000);
    NEXT.fetch_add(0x40, Ordering::Relaxed)
}

/// Objects by handle.
pub struct Table<T>(RwLock<HashMap<u64, Arc<T>>>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Table(RwLock::new(HashMap::new()))
    }
}

impl<T> Table<T> {
    pub fn insert(&self, handle: u64, object: Arc<T>) {
        self.0.write().insert(handle, object);
    }
    pub fn get(&self, handle: u64) -> R<Arc<T>> {
        self.0
            .read()
            .get(&handle)
            .cloned()
            .ok_or(CUDA_ERROR_INVALID_HANDLE)
    }
    pub fn remove(&self, handle: u64) -> R<Arc<T>> {
        self.0
            .write()
            .remove(&handle)
            .ok_or(CUDA_ERROR_INVALID_HANDLE)
    }
    pub fn retain(&self, mut keep: impl FnMut(&T) -> bool) {
        // Dropped after the lock is released: what a drop does may look into a table.
        let mut gone = Vec::new();
        self.0.write().retain(|_, object| {
            let stays = keep(object);
            if !stays {
                gone.push(object.clone());
            }
            stays
        });
    }
    pub fn len(&self) -> usize {
        self.0.read().len()
    }
    pub fn all(&self) -> Vec<Arc<T>> {
        self.0.read().values().cloned().collect()
    }
}

pub struct Driver {
    pub devices: Vec<Device>,
    pub contexts: Table<Context>,
    pub streams: Table<Stream>,
    pub events: Table<Event>,
    pub modules: Table<Module>,
    pub kernels: Table<Kernel>,
    pub libraries: Table<Library>,
    pub library_kernels: Table<LibraryKernel>,
    pub links: Table<Link>,
    pub physical: Table<Physical>,
    pub pools: Table<Pool>,
    pub arrays: Table<Array>,
    pub mipmaps: Table<Mipmap>,
    pub imports: Table<External>,
    pub greens: Table<Green>,
    pub descriptions: Table<Description>,
    pub ranges: Ranges,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// Starts the driver: `cuInit`.
pub fn start() -> &'static Driver {
    DRIVER.get_or_init(|| {
        crate::driver_locks::read_environment();
        Driver {
            devices: crate::device::visible(),
            contexts: Table::default(),
            streams: Table::default(),
            events: Table::default(),
            modules: Table::default(),
            kernels: Table::default(),
            libraries: Table::default(),
            library_kernels: Table::default(),
            links: Table::default(),
            physical: Table::default(),
            pools: Table::default(),
            arrays: Table::default(),
            mipmaps: Table::default(),
            imports: Table::default(),
            greens: Table::default(),
            descriptions: Table::default(),
            ranges: Ranges::default(),
        }
    })
}

pub fn driver() -> R<&'static Driver> {
    DRIVER.get().ok_or(CUDA_ERROR_NOT_INITIALIZED)
}

/// The device with the caller's ordinal.
pub fn device(ordinal: CUdevice) -> R<&'static Device> {
    usize::try_from(ordinal)
        .ok()
        .and_then(|n| DRIVER.get()?.devices.get(n))
        .ok_or(if DRIVER.get().is_some() {
            CUDA_ERROR_INVALID_DEVICE
        } else {
            CUDA_ERROR_NOT_INITIALIZED
        })
}
