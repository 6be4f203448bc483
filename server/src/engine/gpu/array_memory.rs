//! Physical memory of arrays that the next server maps again.
//!
//! The driver makes no array of exported memory, but imports such memory as external memory and makes arrays of that.
//! Their layout depends on descriptor and levels alone, so that they have their content in another process
//! (docs/design/0007-arrays.md).

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::ranges::RangeAllocator;
use crate::engine::base::rations::Holder;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::devices::Device;
use crate::keeper::{self, Name};
use mpsshim_api::cuda::*;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Granularity of arrays in their memory, in bytes: the alignment that the driver asks for.
const ALIGNMENT: u64 = 64 << 10;
/// Bytes of memory that several arrays share; larger arrays have memory of their own.
const SHARED: u64 = 2 << 20;
/// Most shapes of arrays whose sizes are remembered.
const MOST_SHAPES: usize = 4096;

/// Size, format, channels, flags and levels of an array.
type Shape = ([u64; 3], [u32; 4]);

/// Bytes that arrays need, by shape and device.
#[derive(Debug, Default)]
pub struct ArraySizes(Mutex<HashMap<(Shape, Ordinal), u64>>);

/// Size, format, channels, flags and levels of an array with this descriptor.
fn shape_of(array: &CUDA_ARRAY3D_DESCRIPTOR, levels: u32) -> Shape {
    let size = [array.width, array.height, array.depth];
    (size, [array.format, array.channels, array.flags, levels])
}

impl ArraySizes {
    /// Bytes of an array, if known.
    pub fn get(
        &self,
        device: Ordinal,
        array: &CUDA_ARRAY3D_DESCRIPTOR,
        levels: u32,
    ) -> Option<u64> {
        let key = (shape_of(array, levels), device);
        self.0.lock().get(&key).copied()
    }

    /// Remembers the bytes of an array.
    pub fn note(
        &self,
        device: Ordinal,
        (array, levels): (&CUDA_ARRAY3D_DESCRIPTOR, u32),
        bytes: u64,
    ) {
        let mut sizes = self.0.lock();
        if sizes.len() >= MOST_SHAPES {
            sizes.clear();
        }
        sizes.insert((shape_of(array, levels), device), bytes);
    }
}

/// Physical memory of one or more arrays of a session, of which the keeper has a descriptor.
#[derive(Debug)]
pub struct ArrayMemory {
    raw: CUexternalMemory,
    device: Ordinal,
    len: u64,
    /// Its name in the keeper.
    name: Name,
    room: Mutex<Room>,
}

#[derive(Debug)]
struct Room {
    free: RangeAllocator,
    /// Number of arrays in it that their client has not destroyed. At zero it takes no others.
    live: usize,
    charge: Charge,
}

impl ArrayMemory {
    /// New memory for arrays of `bytes` bytes together, or more. `None` if the keeper has no room.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` or driver errors.
    pub fn new(
        gpu: &Gpu,
        device: &Device,
        (account, holder): (&Account, &Holder),
        bytes: u64,
    ) -> Result<Option<Arc<ArrayMemory>>, CUresult> {
        let len = bytes.checked_next_multiple_of(SHARED);
        let len = len.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let charge = account.take(Memory::Device(device.ordinal), len)?;
        let memory = device.physical(&gpu.driver, len)?;
        let kept = gpu
            .keeping
            .keep_new(keeper::Kind::Arrays, memory.as_fd(), holder);
        let Some(name) = kept else {
            return Ok(None);
        };
        let made = ArrayMemory::import(gpu, device, (memory, len), name, charge);
        made.map(Some).inspect_err(|_| gpu.keeping.forget(name))
    }

    /// Memory of an earlier server.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` or driver errors.
    pub fn adopt(
        gpu: &Gpu,
        device: &Device,
        account: &Account,
        (memory, len): (OwnedFd, u64),
        number: u64,
    ) -> Result<Arc<ArrayMemory>, CUresult> {
        device.make_current(&gpu.driver)?;
        let charge = account.take(Memory::Device(device.ordinal), len)?;
        let name = Name::numbered(keeper::Kind::Arrays, number);
        ArrayMemory::import(gpu, device, (memory, len), name, charge)
    }

    fn import(
        gpu: &Gpu,
        device: &Device,
        (memory, len): (OwnedFd, u64),
        name: Name,
        charge: Charge,
    ) -> Result<Arc<ArrayMemory>, CUresult> {
        let descriptor = CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
            kind: CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
            handle: [memory.as_raw_fd() as u64, 0],
            size: len,
            ..CUDA_EXTERNAL_MEMORY_HANDLE_DESC::default()
        };
        let mut raw = CUexternalMemory::NULL;
        gpu.driver
            .array
            .import_external_memory(&mut raw, &descriptor)?;
        // It is the driver's now.
        let _ = memory.into_raw_fd();
        let room = Room {
            free: RangeAllocator::new(0, len, ALIGNMENT),
            live: 0,
            charge,
        };
        Ok(Arc::new(ArrayMemory {
            raw,
            device: device.ordinal,
            len,
            name,
            room: Mutex::new(room),
        }))
    }

    /// Number in its name in the keeper.
    pub fn number(&self) -> u64 {
        self.name.number()
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether an array is in it that its client has not destroyed.
    fn is_open(&self) -> bool {
        self.room.lock().live > 0
    }

    /// Takes room for an array of this many bytes; `None` if there is none.
    pub fn take(self: &Arc<ArrayMemory>, bytes: u64) -> Option<Place> {
        let mut room = self.room.lock();
        let bytes = room.free.round_up(bytes)?;
        let offset = room.free.take(bytes)?;
        room.live += 1;
        Some(self.place(offset, bytes))
    }

    /// Takes the room that an array had in an earlier server; `None` if it is not free.
    pub fn take_at(self: &Arc<ArrayMemory>, offset: u64, bytes: u64) -> Option<Place> {
        let mut room = self.room.lock();
        room.free.take_at(offset, bytes)?;
        room.live += 1;
        Some(self.place(offset, bytes))
    }

    fn place(self: &Arc<ArrayMemory>, offset: u64, bytes: u64) -> Place {
        Place {
            memory: Arc::clone(self),
            offset,
            bytes,
            has_left: false,
        }
    }

    /// Returns it to the driver, if this was the last reference to it.
    pub fn end(memory: Arc<ArrayMemory>, gpu: &Gpu) {
        if let Some(memory) = Arc::into_inner(memory) {
            gpu.keeping.forget(memory.name);
            let _ = gpu.devices[memory.device].make_current(&gpu.driver);
            if let Err(status) = gpu.driver.array.destroy_external_memory(memory.raw) {
                gpu.note_status(status);
            }
        }
    }
}

/// Memory of a session's arrays that has room for others.
#[derive(Debug, Default)]
pub struct Roomy(Vec<Weak<ArrayMemory>>);

impl Roomy {
    /// Takes room for an array, in new memory if there is none. `None` if the keeper has no room.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` or driver errors.
    pub fn take(
        &mut self,
        gpu: &Gpu,
        device: &Device,
        payers: (&Account, &Holder),
        bytes: u64,
    ) -> Result<Option<Place>, CUresult> {
        let shares = bytes <= SHARED / 2;
        self.0.retain(|memory| memory.strong_count() > 0);
        // The newest memory most likely has room.
        for memory in self.0.iter().rev().filter(|_| shares) {
            let Some(memory) = memory.upgrade() else {
                continue;
            };
            let place = match memory.device == device.ordinal && memory.is_open() {
                true => memory.take(bytes),
                false => None,
            };
            ArrayMemory::end(memory, gpu);
            if place.is_some() {
                return Ok(place);
            }
        }
        let Some(memory) = ArrayMemory::new(gpu, device, payers, bytes)? else {
            return Ok(None);
        };
        if shares {
            self.0.push(Arc::downgrade(&memory));
        }
        let place = memory.take(bytes);
        ArrayMemory::end(memory, gpu);
        Ok(place)
    }

    /// The memory with this number.
    pub fn find(&self, number: u64) -> Option<Arc<ArrayMemory>> {
        let mut all = self.0.iter().filter_map(Weak::upgrade);
        all.find(|memory| memory.number() == number)
    }

    /// Adds memory of an earlier server.
    pub fn add(&mut self, memory: &Arc<ArrayMemory>) {
        self.0.push(Arc::downgrade(memory));
    }
}

/// Room of one array.
#[derive(Debug)]
pub struct Place {
    memory: Arc<ArrayMemory>,
    offset: u64,
    bytes: u64,
    has_left: bool,
}

impl Place {
    /// The memory.
    pub fn memory(&self) -> &ArrayMemory {
        &self.memory
    }

    /// Offset in the memory, and bytes.
    pub fn range(&self) -> (u64, u64) {
        (self.offset, self.bytes)
    }

    /// Makes an array there, as a mipmapped array of one level or more.
    ///
    /// # Errors
    /// Driver errors.
    pub fn make(
        &self,
        gpu: &Gpu,
        array: &CUDA_ARRAY3D_DESCRIPTOR,
        levels: u32,
    ) -> Result<CUmipmappedArray, CUresult> {
        let descriptor = CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC {
            offset: self.offset,
            array: *array,
            levels,
            ..CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC::default()
        };
        let mut made = CUmipmappedArray::NULL;
        let driver = &gpu.driver.array;
        driver.external_mipmapped_array(&mut made, self.memory.raw, &descriptor)?;
        Ok(made)
    }

    /// Notes that the client has destroyed its array.
    pub fn leave(&mut self) {
        if std::mem::replace(&mut self.has_left, true) {
            return;
        }
        let mut room = self.memory.room.lock();
        room.live -= 1;
        if room.live == 0 {
            room.charge.leave();
        }
    }

    /// Gives the room back. The driver has no array there any more.
    pub fn end(mut self, gpu: &Gpu) {
        self.leave();
        let Place {
            memory,
            offset,
            bytes,
            ..
        } = self;
        memory.room.lock().free.give_back(offset, bytes);
        ArrayMemory::end(memory, gpu);
    }
}
