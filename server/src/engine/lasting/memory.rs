//! Device memory and pinned memory.

use super::{Lasting, Lost, Making, failed};
use crate::engine::base::description::Record;
use crate::engine::base::keeping::Keeping;
use crate::engine::base::kinds::Kind;
use crate::engine::gpu::devices::Grant;
use crate::engine::gpu::host::{HostBlock, Paid};
use crate::engine::gpu::moved::{self, Content, Piece, Placed, Store};
use crate::engine::images::ImageStore;
use crate::engine::lasting::{describe, describe_gone};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::keeper::{self, Name};
use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUresult};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// State of a record of device memory; the key is the address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Bytes.
    pub len: u64,
    /// The server's ordinal of the device.
    pub device: u32,
    /// Places of the pieces of its content ([`Content::places`]), if it has no physical memory on the device.
    pub evicted_to: Option<Vec<u64>>,
}

/// State of a record of pinned memory; the key is the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Bytes.
    pub len: u64,
    /// The server's ordinal of the device.
    pub device: u32,
    /// Whether it is managed memory.
    pub managed: bool,
}

/// Device memory.
pub struct Memory;

impl Lasting for Memory {
    const KIND: Kind = Kind::Memory;
    type State = DeviceMemory;

    fn make(
        record: &Record,
        place: DeviceMemory,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        if let Some(places) = &place.evicted_to {
            return adopt_evicted(record, (&place, places), session, making);
        }
        let memory = making.take_of(keeper::Kind::Memory, record)?;
        let gpu = &making.shared.gpu;
        let adopt = || -> Result<Grant, CUresult> {
            let range = (record.key, place.len);
            let device = gpu.device(place.device)?;
            device.adopt(&gpu.driver, &session.account, range, memory)
        };
        let grant = adopt().map_err(failed("its memory", record))?;
        if !grant.stays() {
            let suspension = &session.shared.suspension;
            suspension.add_movable(grant.device, grant.len);
        }
        let grants = &mut session.objects.grants;
        grants.insert(record.key, Arc::new(grant));
        Ok(())
    }
}

/// Pinned memory.
pub struct Host;

impl Lasting for Host {
    const KIND: Kind = Kind::Host;
    type State = Place;

    fn make(
        record: &Record,
        place: Place,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let file = making.take_of(keeper::Kind::Host, record)?;
        let adopted = adopt_host(making.shared, session, record.key, place, file);
        let block = adopted.map_err(failed("its pinned memory", record))?;
        session.objects.host.insert(record.key, block);
        Ok(())
    }
}

/// Makes device memory again whose content is in host memory.
fn adopt_evicted(
    record: &Record,
    (memory, places): (&DeviceMemory, &[u64]),
    session: &mut Session,
    making: &mut Making<'_>,
) -> Result<(), Lost> {
    let DeviceMemory { len, device, .. } = *memory;
    let failed = failed("its device memory in host memory", record);
    if !moved::ranges(len).map(drop).eq(places.iter().map(drop)) {
        return Err(failed(CUDA_ERROR_INVALID_VALUE));
    }
    let mut content = Content {
        len,
        pieces: Vec::with_capacity(places.len()),
        file: None,
    };
    for ((_, len), place) in moved::ranges(len).zip(places) {
        let piece = match Placed::of(*place) {
            Placed::Zero => Piece::Zero,
            Placed::Stored => Piece::Stored,
            Placed::Pinned(start) => {
                let file = making.take(Name::numbered(keeper::Kind::Host, start))?;
                let place = Place {
                    len,
                    device,
                    managed: false,
                };
                let block = adopt_host(making.shared, session, start, place, file);
                Piece::Pinned(block.map_err(&failed)?)
            }
        };
        content.pieces.push(piece);
    }
    if places
        .iter()
        .any(|place| Placed::of(*place) == Placed::Stored)
    {
        let file = making.take(name_of_file(record.key))?;
        content.file = Some(Store::adopt(file));
    }
    let adopt = || -> Result<(), CUresult> {
        let device = making.shared.gpu.device(device)?;
        let grant = device.adopt_evicted(&session.account, (record.key, len))?;
        session.objects.grants.insert(record.key, Arc::new(grant));
        session.objects.evicted.insert(record.key, content);
        note_evicted(session);
        Ok(())
    };
    adopt().map_err(failed)
}

/// Passes new device memory to the keeper and describes it. Binds the session if the keeper does not hold it.
pub fn describe_memory(session: &mut Session, images: &ImageStore, grant: &Grant) {
    if !session.lasting.kept {
        return;
    }
    if !images.gpu.keep_grant(grant, &session.shared.kept) {
        session.lasting.unkept_memory = true;
        return session.note_bonds(images);
    }
    describe::<Memory>(session, grant.start, &described(grant, None));
}

/// Passes a piece of the content of device memory to the keeper. Returns whether the next server could find it.
pub fn keep_piece(session: &Session, images: &ImageStore, piece: &Piece) -> bool {
    let (keeping, holder) = (&images.gpu.keeping, &session.shared.kept);
    let (start, file) = match piece {
        Piece::Pinned(block) => (block.start(), block.file.as_fd()),
        Piece::Unpinned(block) => (block.start(), block.file()),
        Piece::Zero | Piece::Stored => return true,
    };
    !session.lasting.kept || keeping.keep(name_of_piece(start), file, holder)
}

/// Describes where the content of device memory is, so that the device memory is not needed any more. The keeper has the
/// pieces ([`keep_piece`]), and gets the file. Returns whether the next server could continue with it.
pub fn describe_evicted(
    session: &mut Session,
    images: &ImageStore,
    grant: &Grant,
    content: &Content,
) -> bool {
    if !session.lasting.kept {
        return true;
    }
    let (keeping, holder) = (&images.gpu.keeping, &session.shared.kept);
    if let Some(file) = &content.file
        && !keeping.keep(name_of_file(grant.start), file.as_fd(), holder)
    {
        return false;
    }
    let state = described(grant, Some(content.places()));
    describe::<Memory>(session, grant.start, &state);
    keeping.forget(Name::numbered(keeper::Kind::Memory, grant.start));
    true
}

/// Passes device memory that has its content again to the keeper and describes it, so that the host memory is not
/// needed any more.
pub fn describe_refilled(
    session: &mut Session,
    images: &ImageStore,
    grant: &Grant,
    content: &Content,
) {
    describe_memory(session, images, grant);
    forget_content(&images.gpu.keeping, grant.start, content);
}

/// Makes the keeper close the content of device memory at this address.
pub fn forget_content(keeping: &Keeping, start: u64, content: &Content) {
    let pieces = content.addresses().map(name_of_piece);
    pieces.for_each(|name| keeping.forget(name));
    if content.file.is_some() {
        keeping.forget(name_of_file(start));
    }
}

fn name_of_piece(start: u64) -> Name {
    Name::numbered(keeper::Kind::Host, start)
}

/// The name of the file with content of device memory at this address.
fn name_of_file(start: u64) -> Name {
    Name::numbered(keeper::Kind::Stored, start)
}

/// Publishes how much of its device memory is in host memory.
pub fn note_evicted(session: &Session) {
    let mut moved = BTreeMap::new();
    for (start, content) in &session.objects.evicted {
        if let Some(grant) = session.objects.grants.get(start) {
            *moved.entry(grant.device).or_default() += content.len;
        }
    }
    session.shared.suspension.note_moved(moved);
}

/// Passes new pinned memory to the keeper and describes it. Binds the session if the keeper does not hold it.
pub fn describe_host(session: &mut Session, images: &ImageStore, start: u64, place: Place) {
    if !session.lasting.kept {
        return;
    }
    let name = Name::numbered(keeper::Kind::Host, start);
    let block = session.objects.host.get(&start);
    let (keeping, holder) = (&images.gpu.keeping, &session.shared.kept);
    if !block.is_some_and(|block| keeping.keep(name, block.file.as_fd(), holder)) {
        session.lasting.unkept_memory = true;
        return session.note_bonds(images);
    }
    describe::<Host>(session, start, &place);
}

/// Invalidates the record of freed pinned memory, and makes the keeper drop it.
pub fn describe_host_end(session: &mut Session, images: &ImageStore, start: u64) {
    describe_gone::<Host>(session, start);
    images
        .gpu
        .keeping
        .forget(Name::numbered(keeper::Kind::Host, start));
}

/// The state of a record of this device memory.
fn described(grant: &Grant, evicted_to: Option<Vec<u64>>) -> DeviceMemory {
    DeviceMemory {
        len: grant.len,
        device: grant.device.into(),
        evicted_to,
    }
}

fn adopt_host(
    shared: &Shared,
    session: &mut Session,
    start: u64,
    place: Place,
    file: OwnedFd,
) -> Result<HostBlock, CUresult> {
    let device = shared.gpu.device(place.device)?;
    let paid = Paid {
        account: &session.account,
        pin: shared.gpu.pinned.add(session.shared.info.uid, place.len),
        place: shared.gpu.place_to_register(&session.shared.held_files)?,
    };
    let (driver, range) = (&shared.gpu.driver, (start, place.len));
    let mut block = shared.gpu.arena.adopt(driver, device, paid, range, file)?;
    block.set_managed(place.managed);
    Ok(block)
}
