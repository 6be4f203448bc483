//! Virtual memory that a program manages itself: reservations, physical memory, mappings, access.

use super::{Lasting, Lost, Making, failed};
use crate::engine::base::account::Memory;
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::devices;
use crate::engine::images::ImageStore;
use crate::engine::lasting::{describe, describe_gone};
use crate::engine::objects::virtual_memory::VirtualMemory;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::keeper::{self, Name};
use mpsshim_api::cuda::*;
use mpsshim_proto::message::memory::MapMemory;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A reservation of addresses.
pub struct Reservation;

impl Lasting for Reservation {
    const KIND: Kind = Kind::Reservation;
    /// Bytes, and the range that was taken for it.
    type State = (u64, (u64, u64));

    fn make(
        record: &Record,
        (len, taken): Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let range = (record.key, len);
        let memory = &mut session.objects.virtual_memory;
        let made = memory.adopt_reservation(&making.shared.gpu, range, taken);
        made.map_err(failed("addresses", record))
    }
}

/// State of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhysicalState {
    /// Bytes; 0 if it was imported: the driver does not tell.
    pub len: u64,
    /// The server's ordinal of the device.
    pub device: u32,
    /// Whether it may be exported.
    pub exportable: bool,
    /// Whether another process allocated it.
    pub imported: bool,
}

/// Physical memory; the keeper holds its descriptor.
pub struct Physical;

impl Lasting for Physical {
    const KIND: Kind = Kind::Physical;
    type State = PhysicalState;

    fn make(
        record: &Record,
        what: PhysicalState,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let memory = making.take(name_of_physical(session, record.key))?;
        let made = adopt_physical(making.shared, session, record.key, what, memory);
        made.map_err(failed("memory", record))
    }
}

/// A handle of physical memory that was released while the memory was mapped.
pub struct Released;

impl Lasting for Released {
    const KIND: Kind = Kind::Released;
    /// Nothing.
    type State = ();

    fn make(
        record: &Record,
        (): Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let memory = &mut session.objects.virtual_memory;
        let released = memory.release(&making.shared.gpu, record.key);
        released
            .map(drop)
            .map_err(failed("a released handle", record))
    }
}

/// A handle of physical memory that was retained from a mapping.
pub struct Retained;

impl Lasting for Retained {
    const KIND: Kind = Kind::Retained;
    /// The handle with which the memory was created or imported.
    type State = u64;

    fn make(
        record: &Record,
        key: u64,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let gpu = &making.shared.gpu;
        gpu.use_any_device();
        let memory = &mut session.objects.virtual_memory;
        match memory.retain_again(gpu, record.key, key) {
            // The server before ended while it released the last handle.
            Err(CUDA_ERROR_INVALID_HANDLE) => Ok(()),
            made => made.map_err(failed("a retained handle", record)),
        }
    }
}

/// Physical memory was exported: descriptors may hold it.
pub struct Exported;

impl Lasting for Exported {
    const KIND: Kind = Kind::Exported;
    /// Nothing.
    type State = ();

    fn make(
        record: &Record,
        (): Self::State,
        session: &mut Session,
        _: &mut Making<'_>,
    ) -> Result<(), Lost> {
        session.objects.virtual_memory.note_exported(record.key);
        Ok(())
    }
}

/// A mapping.
pub struct Mapping;

impl Lasting for Mapping {
    const KIND: Kind = Kind::Mapping;
    /// Bytes, offset, flags, and the handle under which the memory was created.
    type State = (u64, u64, u64, u64);

    fn make(
        record: &Record,
        (len, offset, flags, handle): Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let gpu = &making.shared.gpu;
        gpu.use_any_device();
        let memory = &mut session.objects.virtual_memory;
        let made = memory.map_again(gpu, (record.key, len), handle, offset, flags);
        made.map_err(failed("a mapping", record))
    }
}

/// Access of devices to mappings.
pub struct Access;

impl Lasting for Access {
    const KIND: Kind = Kind::Access;
    /// Bytes; for each location its kind, its id, and the flags.
    type State = (u64, Vec<(u32, i32, u32)>);

    fn make(
        record: &Record,
        (len, accesses): Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let access = |(kind, id, flags): (u32, i32, u32)| CUmemAccessDesc {
            location: CUmemLocation { kind, id },
            flags,
        };
        let accesses: Vec<CUmemAccessDesc> = accesses.into_iter().map(access).collect();
        let gpu = &making.shared.gpu;
        gpu.use_any_device();
        let memory = &mut session.objects.virtual_memory;
        memory
            .mappings_in(record.key, len)
            .into_iter()
            .try_for_each(|(start, len)| memory.set_access(gpu, start, len, &accesses))
            .map_err(failed("access", record))
    }
}

/// Describes a new reservation of addresses.
pub fn describe_reservation(session: &mut Session, (start, len): (u64, u64), taken: (u64, u64)) {
    describe::<Reservation>(session, start, &(len, taken));
}

/// Passes new physical memory to the keeper and describes it. Binds the session if the keeper does not hold it.
pub fn describe_physical(
    session: &mut Session,
    images: &ImageStore,
    key: u64,
    raw: CUmemGenericAllocationHandle,
    (len, device, exportable): (u64, Ordinal, bool),
) {
    let what = PhysicalState {
        len,
        device: device.into(),
        exportable,
        imported: false,
    };
    let exported = || devices::export(&images.gpu.driver, raw);
    describe_held(session, images, key, exported, what);
}

/// As [`describe_physical`], for memory that was imported from this descriptor.
pub fn describe_imported(
    session: &mut Session,
    images: &ImageStore,
    key: u64,
    memory: BorrowedFd<'_>,
    device: u32,
) {
    let what = PhysicalState {
        len: 0,
        device,
        exportable: true,
        imported: true,
    };
    describe_held(session, images, key, || Ok::<_, CUresult>(memory), what);
}

fn describe_held<F: AsFd>(
    session: &mut Session,
    images: &ImageStore,
    key: u64,
    descriptor: impl FnOnce() -> Result<F, CUresult>,
    what: PhysicalState,
) {
    if !session.lasting.kept {
        return;
    }
    let descriptor = descriptor();
    let name = name_of_physical(session, key);
    let (keeping, holder) = (&images.gpu.keeping, &session.shared.kept);
    if !descriptor.is_ok_and(|fd| keeping.keep(name, fd.as_fd(), holder)) {
        session.lasting.unkept_memory = true;
        return session.note_bonds(images);
    }
    describe::<Physical>(session, key, &what);
}

/// Invalidates the record of freed physical memory, and makes the keeper drop it.
pub fn describe_physical_end(session: &mut Session, images: &ImageStore, key: u64) {
    describe_gone::<Physical>(session, key);
    images.gpu.keeping.forget(name_of_physical(session, key));
}

/// Name of the session's physical memory in the keeper.
pub fn name_of_physical(session: &Session, key: u64) -> Name {
    let mut name = Name::numbered(keeper::Kind::Physical, key);
    let number = session.shared.info.session.to_le_bytes();
    name.id[8..16].copy_from_slice(&number);
    name
}

/// Describes a new mapping.
pub fn describe_mapping(session: &mut Session, body: &MapMemory) {
    if let Some(key) = session.objects.virtual_memory.key_of(body.handle) {
        let what = (body.len, body.offset, body.flags, key);
        describe::<Mapping>(session, body.address, &what);
    }
}

/// Describes which devices may access mappings from now on.
pub fn describe_access(session: &mut Session, start: u64, len: u64, accesses: &[CUmemAccessDesc]) {
    let each = accesses
        .iter()
        .map(|access| (access.location.kind, access.location.id, access.flags));
    let each: Vec<(u32, i32, u32)> = each.collect();
    describe::<Access>(session, start, &(len, each));
}

fn adopt_physical(
    shared: &Shared,
    session: &mut Session,
    handle: u64,
    what: PhysicalState,
    memory: OwnedFd,
) -> Result<(), CUresult> {
    let device = shared.gpu.device(what.device)?;
    device.make_current(&shared.gpu.driver)?;
    let of_device = Memory::Device(device.ordinal);
    let mut physical = match what.imported {
        true => VirtualMemory::imported(handle, &session.account, of_device)?,
        false => {
            let charge = session.account.take(of_device, what.len)?;
            VirtualMemory::physical(handle, what.exportable, of_device, charge)
        }
    };
    let kept = memory
        .try_clone()
        .map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    physical.keep_descriptor(kept);
    let mut raw = CUmemGenericAllocationHandle::NULL;
    let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let descriptor = memory.as_raw_fd() as usize;
    shared
        .gpu
        .driver
        .memory
        .mem_import(&mut raw, descriptor, kind)?;
    physical.keep_descriptor(memory);
    let added = session.objects.virtual_memory.add(handle, raw, physical);
    added.inspect_err(|_| {
        let _ = shared.gpu.driver.mem_release(raw);
    })
}
