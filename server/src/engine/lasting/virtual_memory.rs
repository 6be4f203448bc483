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
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

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

/// Physical memory; the keeper holds its descriptor.
pub struct Physical;

impl Lasting for Physical {
    const KIND: Kind = Kind::Physical;
    /// Bytes, the server's ordinal of the device, and whether it may be exported.
    type State = (u64, u32, bool);

    fn make(
        record: &Record,
        what: Self::State,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let memory = making.take(name_of_physical(session, record.key))?;
        let made = adopt_physical(making.shared, session, record.key, what, &memory);
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
        released.map(drop).map_err(failed("a handle", record))
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
        let made = memory.map(gpu, (record.key, len), handle, offset, flags);
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
    if !session.lasting.kept {
        return;
    }
    let exported = devices::export(&images.gpu.driver, raw);
    let name = name_of_physical(session, key);
    let (keeping, holder) = (&images.gpu.keeping, &session.shared.kept);
    if !exported.is_ok_and(|fd| keeping.keep(name, fd.as_fd(), holder)) {
        session.lasting.unkept_memory = true;
        return session.note_bonds(images);
    }
    let device = u32::from(device);
    describe::<Physical>(session, key, &(len, device, exportable));
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
    (len, device, exportable): (u64, u32, bool),
    memory: &OwnedFd,
) -> Result<(), CUresult> {
    let device = shared.gpu.device(device)?;
    device.make_current(&shared.gpu.driver)?;
    let of_device = Memory::Device(device.ordinal);
    let charge = session.account.take(of_device, len)?;
    let mut raw = CUmemGenericAllocationHandle::NULL;
    let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let descriptor = memory.as_raw_fd() as usize;
    shared
        .gpu
        .driver
        .memory
        .mem_import(&mut raw, descriptor, kind)?;
    let physical = VirtualMemory::physical(handle, exportable, of_device, charge);
    let added = session.objects.virtual_memory.add(handle, raw, physical);
    added.inspect_err(|_| {
        let _ = shared.gpu.driver.mem_release(raw);
    })
}
