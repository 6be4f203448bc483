//! Memory that both the client's CPU and the device access: the host arena, and registrations with the driver.

use crate::engine::base::account::{Account, Charge, Home, Memory};
use crate::engine::base::driver::Driver;
use crate::engine::base::memory_file::MemoryFile;
use crate::engine::base::pinned::{Pin, Unpopulated};
use crate::engine::base::ranges::RangeAllocator;
use crate::engine::base::rations::{Holder, Part, Ration, Rations};
use crate::engine::gpu::devices::Device;
use mpsshim_api::cuda::*;
use mpsshim_proto::arena::{HOST_ARENA, HOST_ARENA_LEN};
use mpsshim_proto::segment::FLAG_STRIDE;
use mpsshim_proto::shm::{Mapping, Reservation, sealed_memfd};
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A registered shared mapping. `cuMemHostUnregister` waits for other clients' work while it holds the driver's lock,
/// so it is deferred to quiescent points ([`crate::engine::threads::undertaker`]): see [`Registration::unregister`].
#[derive(Debug)]
pub struct Registration {
    mapping: Mapping,
    offset: usize,
    device: CUdeviceptr,
    registered: bool,
}

impl Registration {
    /// Registers a mapping from `offset` on, for all contexts.
    ///
    /// # Errors
    /// Driver errors.
    pub fn new(driver: &Driver, mapping: Mapping, offset: usize) -> Result<Registration, CUresult> {
        Registration::try_new(driver, mapping, offset).map_err(|(_, status)| status)
    }

    /// As [`Registration::new`]; an error comes with the mapping.
    fn try_new(
        driver: &Driver,
        mapping: Mapping,
        offset: usize,
    ) -> Result<Registration, (Mapping, CUresult)> {
        let address = mapping.base() as u64 + offset as u64;
        let registered = driver.mem_host_register(
            address,
            mapping.len() - offset,
            CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE,
        );
        if let Err(status) = registered {
            return Err((mapping, status));
        }
        let mut this = Registration {
            mapping,
            offset,
            device: 0,
            registered: true,
        };
        if let Err(status) = driver.mem_host_get_device_pointer(&mut this.device, address, 0) {
            let _ = driver.mem_host_unregister(address);
            return Err((this.mapping, status));
        }
        Ok(this)
    }
    /// The whole mapping.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }
    /// Device address of the first registered byte.
    pub fn device_address(&self) -> CUdeviceptr {
        self.device
    }
    /// Zeroes the whole mapping. No other process may have it mapped.
    pub fn clear(&self) {
        // SAFETY: the mapping has that many bytes, and its former user has released it.
        unsafe { std::ptr::write_bytes(self.mapping.base(), 0, self.mapping.len()) };
    }
    /// Unregisters the mapping (`cuMemHostUnregister`). May wait for all work queued by any client.
    pub fn unregister(mut self, driver: &Driver) -> Mapping {
        let address = self.mapping.base() as u64 + self.offset as u64;
        if self.registered
            && let Err(status) = driver.mem_host_unregister(address)
        {
            tracing::debug!("cuMemHostUnregister({address:#x}): {status}");
        }
        self.registered = false;
        self.mapping
    }
}

/// A block of the host arena: pinned memory of one client.
#[derive(Debug)]
pub struct HostBlock {
    /// The registered mapping, at an address of the arena.
    pub registration: Registration,
    /// The memory file.
    pub file: MemoryFile,
    /// Host memory charged for its length; `None` while no session uses it.
    pub host: Option<Charge>,
    /// Counts it for its user until it is unregistered.
    pub pin: Pin,
    /// The ration of its descriptor and mapping.
    pub place: Ration,
}

/// A block of the host arena whose pages are being populated. To be completed or abandoned: see [`HostArena`].
#[derive(Debug)]
pub struct BegunBlock {
    mapping: Mapping,
    file: MemoryFile,
    /// Host memory charged for its length; `None` while no session uses it.
    host: Option<Charge>,
    pin: Pin,
    place: Ration,
    unpopulated: Unpopulated,
    /// Bytes populated.
    populated: usize,
    /// Bytes of the arena.
    room: u64,
}

impl BegunBlock {
    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// First address, which the block keeps when it is completed.
    pub fn start(&self) -> u64 {
        self.mapping.base() as u64
    }

    /// The memory file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Writes the content, by the file: that neither maps pages nor clears them first, so that several threads can do it at a
    /// time without holding up calls of the driver.
    ///
    /// # Errors
    /// If there is no memory for the pages.
    pub fn write(&mut self, content: &[u8]) -> io::Result<()> {
        let mut at = 0;
        while at < content.len() {
            let part = &content[at..content.len().min(at + WRITTEN)];
            let written = nix::sys::uio::pwrite(&self.file, part, at as i64)?;
            self.unpopulated.populated(written as u64);
            at += written;
        }
        Ok(())
    }

    /// Populates pages until all are, or until `stop` says after some pages that it is enough for now. Returns whether
    /// all are populated.
    pub fn populate(&mut self, stop: impl Fn() -> bool) -> bool {
        while self.populated < self.mapping.len() {
            let next = self.mapping.populate_some(self.populated);
            self.unpopulated.populated((next - self.populated) as u64);
            self.populated = next;
            if stop() {
                break;
            }
        }
        self.populated == self.mapping.len()
    }
}

/// Bytes written to a block's file at a time.
const WRITTEN: usize = 4 << 20;

/// Host memory of the arena, pinned or not yet, that sessions use one after the other.
pub trait ArenaBlock {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// The charge of the session that uses it, the count of its user, and the ration.
    fn dues(&mut self) -> (&mut Option<Charge>, &mut Pin, &mut Ration);
}

impl ArenaBlock for HostBlock {
    fn size(&self) -> u64 {
        self.len()
    }
    fn dues(&mut self) -> (&mut Option<Charge>, &mut Pin, &mut Ration) {
        (&mut self.host, &mut self.pin, &mut self.place)
    }
}

impl ArenaBlock for BegunBlock {
    fn size(&self) -> u64 {
        self.len()
    }
    fn dues(&mut self) -> (&mut Option<Charge>, &mut Pin, &mut Ration) {
        (&mut self.host, &mut self.pin, &mut self.place)
    }
}

/// The parties that pay for pinned memory.
pub struct Paid<'a> {
    /// The session's account.
    pub account: &'a Account,
    /// The user's count.
    pub pin: Pin,
    /// The ration of its descriptor and mapping.
    pub place: Ration,
}

impl HostBlock {
    /// Counts it as managed memory of its session, or as none any more.
    pub fn set_managed(&mut self, managed: bool) {
        if let Some(charge) = &mut self.host {
            charge.set_managed(managed.then_some(Home::Host));
        }
    }
    /// First address, identical in the client.
    pub fn start(&self) -> u64 {
        self.registration.mapping().base() as u64
    }
    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.registration.mapping().len() as u64
    }
    /// The content. No other process may have it mapped, and the device must not write it meanwhile.
    pub fn bytes(&self) -> &[u8] {
        let mapping = self.registration.mapping();
        // SAFETY: the mapping has that many bytes, and nothing writes them.
        unsafe { std::slice::from_raw_parts(mapping.base(), mapping.len()) }
    }
    /// The content, to be changed. As [`HostBlock::bytes`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let mapping = self.registration.mapping();
        // SAFETY: the mapping has that many bytes, and nothing else uses them.
        unsafe { std::slice::from_raw_parts_mut(mapping.base(), mapping.len()) }
    }
}

/// The arena's address range in this process.
#[derive(Debug)]
pub struct HostArena {
    _reservation: Reservation,
    addresses: Mutex<RangeAllocator>,
}

impl HostArena {
    /// Reserves the arena.
    ///
    /// # Errors
    /// If the addresses are in use.
    pub fn new() -> std::io::Result<HostArena> {
        let reservation = Reservation::at(HOST_ARENA, HOST_ARENA_LEN)?;
        let addresses = Mutex::new(RangeAllocator::new(HOST_ARENA, HOST_ARENA_LEN, 2 << 20));
        Ok(HostArena {
            _reservation: reservation,
            addresses,
        })
    }

    /// Begins to allocate pinned memory of `bytes`, which are whole pages. None of them is populated yet.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn begin(
        &self,
        Paid {
            account,
            pin,
            place,
        }: Paid<'_>,
        unpopulated: Unpopulated,
        bytes: u64,
    ) -> Result<BegunBlock, CUresult> {
        let host = account.take(Memory::Host, bytes)?;
        let (start, room) = self.take(bytes)?;
        let made = MemoryFile::new(c"mpsshim-pinned", bytes).and_then(|file| {
            // SAFETY: the range was taken from the reserved arena and is exclusively ours until it is given back.
            let mapping = unsafe { Mapping::sparse_at(start, file.as_fd(), bytes as usize) }?;
            Ok((file, mapping))
        });
        match made {
            Ok((file, mapping)) => Ok(BegunBlock {
                mapping,
                file,
                host: Some(host),
                pin,
                place,
                unpopulated,
                populated: 0,
                room,
            }),
            Err(error) => {
                tracing::warn!("pinned memory of {bytes} bytes: {error}");
                self.retire(start, room);
                Err(CUDA_ERROR_OUT_OF_MEMORY)
            }
        }
    }

    /// Registers a block whose pages are populated.
    ///
    /// # Errors
    /// Driver errors; the block is then abandoned.
    pub fn complete(
        &self,
        driver: &Driver,
        device: &Device,
        begun: BegunBlock,
    ) -> Result<HostBlock, CUresult> {
        self.pin(driver, device, begun).map_err(|refused| {
            let (begun, status) = *refused;
            self.abandon(begun);
            status
        })
    }

    /// Populates pages that are missing or not mapped, and registers a block.
    ///
    /// # Errors
    /// Driver errors, with the block as it was.
    pub fn pin(
        &self,
        driver: &Driver,
        device: &Device,
        mut begun: BegunBlock,
    ) -> Result<HostBlock, Box<(BegunBlock, CUresult)>> {
        if let Err(status) = device.make_current(driver) {
            return Err(Box::new((begun, status)));
        }
        begun.populate(|| false);
        match Registration::try_new(driver, begun.mapping, 0) {
            Ok(registration) => Ok(HostBlock {
                registration,
                file: begun.file,
                host: begun.host,
                pin: begun.pin,
                place: begun.place,
            }),
            Err((mapping, status)) => Err(Box::new((BegunBlock { mapping, ..begun }, status))),
        }
    }

    /// Frees a block that is not registered.
    pub fn abandon(&self, begun: BegunBlock) {
        let (start, room) = (begun.mapping.base() as u64, begun.room);
        begun.mapping.retire();
        self.retire(start, room);
    }

    /// Takes over pinned memory that an earlier server allocated, at its old address.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` or driver errors; `CUDA_ERROR_INVALID_VALUE` if the addresses cannot be a block's or
    /// are already in use.
    pub fn adopt(
        &self,
        driver: &Driver,
        device: &Device,
        paid: Paid<'_>,
        (start, len): (u64, u64),
        file: OwnedFd,
    ) -> Result<HostBlock, CUresult> {
        device.make_current(driver)?;
        let host = paid.account.take(Memory::Host, len)?;
        let room = self.take_at(start, len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let file = MemoryFile::adopt(file);
        // SAFETY: the range was taken from the reserved arena and is exclusively ours until it is given back.
        let mapping = unsafe { Mapping::at(start, file.as_fd(), len as usize) };
        let mapping = mapping.map_err(|_| CUDA_ERROR_OUT_OF_MEMORY);
        match mapping.and_then(|mapping| Registration::new(driver, mapping, 0)) {
            Ok(registration) => Ok(HostBlock {
                registration,
                file,
                host: Some(host),
                pin: paid.pin,
                place: paid.place,
            }),
            Err(status) => {
                self.retire(start, room);
                Err(status)
            }
        }
    }

    /// Unregisters and frees a block. May wait for all work queued by any client.
    pub fn free(&self, driver: &Driver, block: HostBlock) {
        let start = block.start();
        let room = self
            .addresses
            .lock()
            .round_up(block.len())
            .unwrap_or(block.len());
        block.registration.unregister(driver).retire();
        self.retire(start, room);
    }

    /// Takes addresses for `len` bytes. Returns the first address and the number of bytes taken.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn take(&self, len: u64) -> Result<(u64, u64), CUresult> {
        let mut addresses = self.addresses.lock();
        let room = addresses.round_up(len).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let start = addresses.take(room).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok((start, room))
    }

    /// Takes these addresses for `len` bytes, and returns the number of bytes taken. `None` if they are in use or are not
    /// the arena's.
    pub fn take_at(&self, start: u64, len: u64) -> Option<u64> {
        let mut addresses = self.addresses.lock();
        let room = addresses.round_up(len)?;
        addresses.take_at(start, room).map(|()| room)
    }

    /// Returns addresses to the arena and reserves them again.
    pub fn retire(&self, start: u64, room: u64) {
        // The mapping was replaced by a reservation (or never made, or unmapped by its drop): reserve it again in
        // any case, so that nothing else of this process lands in the arena.
        let _ = Reservation::at(start, room).map(std::mem::forget);
        self.addresses.lock().give_back(start, room);
    }
}

/// Reads a word of 4 or 8 bytes in mapped memory, which the client or the GPU may write at any time.
pub fn read_word(address: u64, wide: bool) -> u64 {
    // SAFETY: the callers have checked that a mapping of the server's holds the aligned word.
    unsafe {
        if wide {
            (*(address as *const AtomicU64)).load(Ordering::Acquire)
        } else {
            (*(address as *const AtomicU32))
                .load(Ordering::Acquire)
                .into()
        }
    }
}

/// Writes a word of 4 or 8 bytes in mapped memory.
pub fn write_word(address: u64, wide: bool, value: u64) {
    // SAFETY: the callers have checked that a mapping of the server's holds the aligned word.
    unsafe {
        if wide {
            (*(address as *const AtomicU64)).store(value, Ordering::Release);
        } else {
            (*(address as *const AtomicU32)).store(value as u32, Ordering::Release);
        }
    }
}

/// Completion flags written only by the server and the GPU. They limit the work in flight of each stream.
#[derive(Debug)]
pub struct ServerFlags {
    registration: Registration,
    free: Mutex<Vec<u32>>,
    rations: Arc<Rations>,
    /// Whether a failed copy may still write the memory for [`ServerFlags::collect`].
    staging: Mutex<bool>,
}

/// Number of server flags.
const SERVER_FLAGS: usize = 16 << 10;
/// Limits of flags for streams: at most a third of all per user and a fifth per session. A stream without a flag is
/// polled through the driver instead, so the rest is reserved for uses without such a fallback.
const FOR_STREAMS: Part = Part {
    user: 2,
    session: 4,
    nested: false,
};

/// A server flag in use.
#[derive(Debug)]
pub struct Flag {
    /// Its number.
    pub slot: u32,
    _ration: Ration,
}

/// A flag whose value is ignored.
pub const SCRATCH: u32 = 0;
/// Bytes of all flags.
const FLAGS_LEN: usize = SERVER_FLAGS * FLAG_STRIDE;
/// Bytes behind the flags that [`ServerFlags::collect`] uses.
const STAGING: usize = 64 << 10;

impl ServerFlags {
    /// Allocates and registers the flags' memory.
    ///
    /// # Errors
    /// Driver errors.
    pub fn new(driver: &Driver) -> Result<ServerFlags, CUresult> {
        let len = FLAGS_LEN + STAGING;
        let mapping = sealed_memfd(c"mpsshim-flags", len as u64)
            .and_then(|fd| Mapping::new(fd.as_fd(), len))
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        let registration = Registration::new(driver, mapping, 0)?;
        Ok(ServerFlags {
            registration,
            free: Mutex::new((SCRATCH + 1..SERVER_FLAGS as u32).rev().collect()),
            rations: Rations::new(SERVER_FLAGS),
            staging: Mutex::default(),
        })
    }

    /// Has the GPU write up to [`STAGING`] bytes to pinned memory, and returns the first `len` of them. The function gets the
    /// host address, and returns when nothing is written there any more. `None` if another thread uses the memory.
    ///
    /// # Errors
    /// Those of the function. Whether something is still written is unknown then, so the memory is not used again.
    pub fn collect(
        &self,
        len: usize,
        write: impl FnOnce(u64) -> Result<(), CUresult>,
    ) -> Option<Result<Vec<u8>, CUresult>> {
        let mut is_lost = self.staging.try_lock()?;
        if *is_lost || len > STAGING {
            return None;
        }
        // SAFETY: the mapping has STAGING bytes at this offset.
        let staging = unsafe { self.registration.mapping().base().add(FLAGS_LEN) };
        *is_lost = true;
        if let Err(status) = write(staging as u64) {
            return Some(Err(status));
        }
        *is_lost = false;
        let mut bytes = vec![0; len];
        // SAFETY: `len` bytes fit the memory, which lives as long as self; nothing writes there now.
        unsafe { std::ptr::copy_nonoverlapping(staging, bytes.as_mut_ptr(), len) };
        Some(Ok(bytes))
    }

    /// A flag for a stream with its current value; `None` if the session already has many.
    pub fn for_stream(&self, holder: &Holder) -> Option<(Flag, u32)> {
        self.take(holder, FOR_STREAMS).ok()
    }
    /// A flag for a word that a session waits for, with its current value.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn for_word(&self, holder: &Holder) -> Result<(Flag, u32), CUresult> {
        self.take(holder, Part::USUAL)
    }
    fn take(&self, holder: &Holder, part: Part) -> Result<(Flag, u32), CUresult> {
        let ration = self.rations.take(holder, part)?;
        let slot = self.free.lock().pop().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let flag = Flag {
            slot,
            _ration: ration,
        };
        Ok((flag, self.value(slot)))
    }
    /// Returns a flag. No work may write it any more. A flag that is dropped instead is never reused.
    pub fn give_back(&self, flag: Flag) {
        self.free.lock().push(flag.slot);
    }
    /// The value last written by the GPU.
    pub fn value(&self, slot: u32) -> u32 {
        // SAFETY: slots are below SERVER_FLAGS and the mapping lives as long as self; the GPU writes whole words.
        let word = unsafe {
            &*self
                .registration
                .mapping()
                .base()
                .add(slot as usize * FLAG_STRIDE)
                .cast::<AtomicU32>()
        };
        word.load(Ordering::Acquire)
    }
    /// Host address of a flag; the rest of its stride is free for the flag's holder.
    pub fn host_address(&self, slot: u32) -> u64 {
        self.registration.mapping().base() as u64 + slot as u64 * FLAG_STRIDE as u64
    }
    /// Whether kernels reach registered host memory at its host address
    /// (`CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`).
    pub fn host_is_device(&self) -> bool {
        self.registration.device_address() == self.registration.mapping().base() as u64
    }
    /// Device address of a flag.
    pub fn device_address(&self, slot: u32) -> CUdeviceptr {
        self.registration.device_address() + slot as u64 * FLAG_STRIDE as u64
    }
}
