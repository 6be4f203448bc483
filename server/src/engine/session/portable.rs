//! What a session writes down about itself while it works, so that it can be made again in another context
//! ([`crate::engine::scheduling::adopt`]): docs/design/0017-portable-sessions.md.

use crate::engine::base::bounds;
use crate::engine::base::call::Incoming;
use crate::engine::base::description::{Kind, Record, STREAMS};
use crate::engine::base::keeping::Keeping;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::progress::Progress;
use crate::engine::gpu::devices::{self, Grant};
use crate::engine::images::ImageStore;
use crate::engine::session::{Session, SessionShared};
use crate::keeper::{self, Name};
use mpsshim_api::cuda::{CUmemAccessDesc, CUmemGenericAllocationHandle, CUresult};
use mpsshim_model::bonds::Bonds;
use mpsshim_model::client::ClientInfo;
use mpsshim_model::limits::Terms;
use mpsshim_proto::message::memory::MapMemory;
use mpsshim_proto::message::{GetFunction, Op};
use mpsshim_proto::ops::Change;
use mpsshim_proto::segment::reached;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::AsFd;

/// Bytes of an image from which on it takes longer to look into it than to write down what was found.
const LONG: usize = 32 << 10;

/// The first record of a description.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Client {
    /// Who it is.
    pub info: ClientInfo,
    /// The terms that it came with.
    pub terms: Terms,
    /// Its share of dispatch in relation to others.
    pub weight: u32,
    /// Bytes of device memory that the daemon lets it have, by ordinal.
    pub memory: BTreeMap<usize, u64>,
}

/// The record of device or pinned memory, behind its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Bytes.
    pub len: u64,
    /// Server's ordinal of the device.
    pub device: u32,
    /// It counts as device memory: managed memory.
    pub managed: bool,
}

impl SessionShared {
    /// Has the keeper hold what every session has; whether it does.
    pub fn keep(&self, keeping: &Keeping) -> bool {
        let id = self.info.session;
        let parts = [
            (keeper::Kind::Description, self.description.file()),
            (keeper::Kind::Segment, self.segment.file.as_fd()),
            (keeper::Kind::Bell, self.bell.fd()),
            (keeper::Kind::Socket, self.socket()),
        ];
        let mut parts = parts.into_iter();
        parts.all(|(kind, fd)| keeping.keep(Name::numbered(kind, id), fd))
    }

    /// Whether nothing of it is in flight, by what it has noted: the driver need not be asked, which has lost the context.
    pub fn is_at_rest(&self) -> bool {
        self.description
            .is_at_rest(|slot, value| reached(self.flag(slot), value))
    }
}

impl Session {
    /// Has the keeper hold what the session has, and writes down whose session it is.
    pub fn begin_description(&mut self, images: &ImageStore) {
        let client = Client {
            info: self.shared.info.clone(),
            terms: self.shared.terms,
            weight: self.shared.standing.weight(),
            memory: self.account.limits_of_devices(),
        };
        self.lasting.kept = self.shared.keep(&images.gpu.keeping);
        let bytes = serde_json::to_vec(&client).unwrap_or_default();
        self.write_down(Kind::Client, 0, 0, bytes);
        self.note_bonds(images);
    }

    /// Writes a record; what has no room binds the session.
    fn write_down(&mut self, kind: Kind, op: u16, key: u64, bytes: Vec<u8>) {
        // What is missing does not come back.
        if self.lasting.undescribed {
            return;
        }
        let record = Record {
            kind,
            op,
            key,
            bytes,
        };
        if !self.shared.description.append(&record) {
            self.lasting.undescribed = true;
        }
    }

    /// The message at the ring's tail is executed, and must not be once more.
    #[inline]
    pub fn note_executed(&self, message: Incoming<'_>) {
        let behind = self.inbox.consumer.place().after(message.len());
        self.shared.description.set_described(behind.position());
    }

    /// A message was executed that changes what the session is.
    pub fn note_change(&mut self, images: &ImageStore, message: Incoming<'_>) {
        let op = message.op;
        if !self.lasting.kept {
            return;
        }
        if !self.inbox.held.is_replaying() {
            self.note_executed(message);
        }
        let (kind, at) = match op.change() {
            Change::Makes(at) => (Kind::Makes, at),
            Change::Sets(at) => (Kind::Sets, at),
            Change::Ends(at) => (Kind::Ends, at),
            Change::Own => return,
            Change::Nothing | Change::Binds => return self.note_bonds(images),
        };
        let key = message.word(at);
        if key == 0 && op == Op::GetFunction {
            return;
        }
        let bytes = match kind {
            Kind::Ends => Vec::new(),
            _ => message.whole(),
        };
        if bytes.len() > bounds::DESCRIBED {
            self.lasting.undescribed = true;
        } else {
            self.write_down(kind, op as u16, key, bytes);
        }
        if op == Op::GetFunction
            && let Ok(body) = message.body::<GetFunction>()
        {
            self.appraise_image(images, body.parent);
        }
        self.note_bonds(images);
    }

    /// Looks whether an image of which a function is used binds the session.
    fn appraise_image(&mut self, images: &ImageStore, handle: u64) {
        let Ok(image) = self.image(handle) else {
            return;
        };
        let content = image.content();
        let (leaves, is_kept) = (images.leaves(content), content.is_kept());
        let (hash, is_long) = (*content.hash(), content.len() > LONG);
        self.lasting.binding_images |= leaves.addresses;
        self.lasting.unkept_memory |= !is_kept;
        if is_long && self.lasting.appraised.insert(handle) {
            self.describe_with(Kind::Leaves, handle, &(hash, leaves));
        }
    }

    /// Whether kernels of an image may write variables that another server has to be told of. Where none comes, nobody looks.
    pub fn keeps_variables(&self, images: &ImageStore, handle: u64) -> bool {
        let image = self.image(handle);
        let looks = images.gpu.keeping.is_on();
        looks && image.is_ok_and(|image| images.leaves(image.content()).variables)
    }

    /// Memory was given to it.
    pub fn describe_memory(&mut self, images: &ImageStore, grant: &Grant) {
        if !self.lasting.kept {
            return;
        }
        if !images.gpu.keep_grant(grant) {
            self.lasting.unkept_memory = true;
            return self.note_bonds(images);
        }
        let place = Place {
            len: grant.len,
            device: grant.device.into(),
            managed: false,
        };
        self.describe_with(Kind::Memory, grant.start, &place);
    }

    /// Pinned memory was given to it.
    pub fn describe_host(&mut self, images: &ImageStore, start: u64, place: Place) {
        if !self.lasting.kept {
            return;
        }
        let name = Name::numbered(keeper::Kind::Host, start);
        let block = self.objects.host.get(&start);
        if !block.is_some_and(|block| images.gpu.keeping.keep(name, block.file.as_fd())) {
            self.lasting.unkept_memory = true;
            return self.note_bonds(images);
        }
        self.describe_with(Kind::Host, start, &place);
    }

    /// Pinned memory was taken from it.
    pub fn describe_host_end(&mut self, images: &ImageStore, start: u64) {
        self.describe_end(Kind::HostEnds, start);
        images
            .gpu
            .keeping
            .forget(Name::numbered(keeper::Kind::Host, start));
    }

    /// What stood for this key is gone, or not a handle any more.
    pub fn describe_end(&mut self, kind: Kind, key: u64) {
        if self.lasting.kept {
            self.write_down(kind, 0, key, Vec::new());
        }
    }

    pub fn describe_with(&mut self, kind: Kind, key: u64, what: &impl Serialize) {
        if self.lasting.kept {
            let bytes = serde_json::to_vec(what).unwrap_or_default();
            self.write_down(kind, 0, key, bytes);
        }
    }

    /// Addresses were reserved.
    pub fn describe_reservation(&mut self, (start, len): (u64, u64), taken: (u64, u64)) {
        self.describe_with(Kind::Reservation, start, &(len, taken));
    }

    /// Physical memory was made.
    pub fn describe_physical(
        &mut self,
        images: &ImageStore,
        key: u64,
        raw: CUmemGenericAllocationHandle,
        (len, device, exportable): (u64, Ordinal, bool),
    ) {
        if !self.lasting.kept {
            return;
        }
        let exported = devices::export(&images.gpu.driver, raw);
        let name = self.name_of_physical(key);
        if !exported.is_ok_and(|fd| images.gpu.keeping.keep(name, fd.as_fd())) {
            self.lasting.unkept_memory = true;
            return self.note_bonds(images);
        }
        let device = u32::from(device);
        self.describe_with(Kind::Physical, key, &(len, device, exportable));
    }

    /// Nothing is left of it.
    pub fn describe_physical_end(&mut self, images: &ImageStore, key: u64) {
        self.describe_end(Kind::PhysicalEnds, key);
        images.gpu.keeping.forget(self.name_of_physical(key));
    }

    /// What the keeper calls physical memory of the session's.
    pub fn name_of_physical(&self, key: u64) -> Name {
        let mut name = Name::numbered(keeper::Kind::Physical, key);
        let session = self.shared.info.session.to_le_bytes();
        name.id[8..16].copy_from_slice(&session);
        name
    }

    /// Memory was mapped.
    pub fn describe_mapping(&mut self, body: &MapMemory) {
        if let Some(key) = self.objects.virtual_memory.key_of(body.handle) {
            let what = (body.len, body.offset, body.flags, key);
            self.describe_with(Kind::Mapping, body.address, &what);
        }
    }

    /// Devices may use mappings, or may not.
    pub fn describe_access(&mut self, start: u64, len: u64, accesses: &[CUmemAccessDesc]) {
        let each = accesses
            .iter()
            .map(|access| (access.location.kind, access.location.id, access.flags));
        let each: Vec<(u32, i32, u32)> = each.collect();
        self.describe_with(Kind::Access, start, &(len, each));
    }

    /// The client was told the address of a variable, by this message.
    pub fn describe_variable(&mut self, start: u64, message: Incoming<'_>) {
        if self.lasting.kept {
            let bytes = message.whole();
            self.write_down(Kind::Variable, 0, start, bytes);
        }
    }

    /// Looks whether a kernel's parameters, so many bytes at `params`, name variables; whether they name one that is elsewhere
    /// than the client knows, so that they have to be translated.
    #[inline]
    pub fn note_params(&self, params: *const u8, len: usize) -> bool {
        let (first, end) = self.lasting.variables_span;
        if end == 0 || self.lasting.saved.all_named() && self.lasting.moved.is_empty() {
            return false;
        }
        let mut moved = false;
        for at in (0..len & !7).step_by(8) {
            // SAFETY: the caller has seen to it that so many bytes can be read; the client may change them meanwhile.
            let word = unsafe { params.add(at).cast::<u64>().read_unaligned() };
            if word >= first && word < end {
                let place = self.place_of(word);
                moved |= place != word;
                let below = self.objects.globals.range(..=place).next_back();
                if let Some((start, global)) = below
                    && place - start < global.len
                {
                    self.note_variable(global);
                }
            }
        }
        moved
    }

    /// The client knows these variables.
    pub fn note_span(&mut self) {
        self.lasting.saved.note_known();
        let now = self.objects.globals.iter();
        let now = now.map(|(start, global)| (*start, start + global.len));
        let before = self.lasting.moved.iter();
        let before = before.map(|(start, (len, _))| (*start, start + len));
        self.lasting.variables_span =
            now.chain(before)
                .fold((0, 0), |span, (start, end)| match span {
                    (_, 0) => (start, end),
                    (first, last) => (first.min(start), last.max(end)),
                });
    }

    /// Where memory is that the client names by an address: a variable is elsewhere than in the server before.
    #[inline]
    pub fn place_of(&self, address: u64) -> u64 {
        if self.lasting.moved.is_empty() {
            return address;
        }
        let below = self.lasting.moved.range(..=address).next_back();
        match below {
            Some((start, (len, now))) if address - start < *len => now + (address - start),
            _ => address,
        }
    }

    /// What the client calls the memory at this place: the other way round.
    pub fn known_as(&self, place: u64) -> u64 {
        let mut moved = self.lasting.moved.iter();
        let here = moved.find(|(_, (len, now))| place.wrapping_sub(*now) < *len);
        here.map_or(place, |(known, (_, now))| known + (place - now))
    }

    /// The driver has refused what was about to be submitted, for the context is lost: streams that were given nothing since
    /// their last mark have nothing in flight.
    pub fn take_back_begun(&mut self) {
        for stream in self.objects.streams.iter_mut() {
            stream.take_back_begun();
        }
    }

    /// Notes what binds the session to its context now.
    pub fn note_bonds(&mut self, images: &ImageStore) {
        let bonds = self.bonds(images);
        if bonds != self.shared.description.bonds() {
            self.shared.description.set_bonds(bonds);
        }
    }

    /// What cannot be made again.
    fn bonds(&self, images: &ImageStore) -> Bonds {
        let keeper = images.gpu.keeping.keeper();
        let keeps = keeper.is_some_and(|keeper| keeper.is_there());
        let arrays = self.objects.arrays.len()
            + self.objects.mipmaps.len()
            + self.objects.bound_arrays.len();
        let references =
            self.objects.texture_references.len() + self.objects.surface_references.len();
        let partitions = self.objects.greens.len() > 0
            || !self.objects.resources.is_empty()
            || !self.objects.places_of_contexts.is_empty();
        Bonds::default()
            .with(
                Bonds::UNKEPT,
                !keeps || !self.lasting.kept || self.lasting.unkept_memory,
            )
            .with(self.objects.graphs.bonds(), true)
            .with(self.lasting.saved.bonds(), true)
            .with(Bonds::IMAGES, self.lasting.binding_images)
            .with(Bonds::ARRAYS, arrays > 0)
            .with(
                Bonds::TEXTURES,
                references > 0 || !self.objects.textures.is_empty(),
            )
            .with(Bonds::POOLS, !self.objects.pools.is_untouched())
            .with(
                Bonds::SHARED,
                self.lasting.shares || !self.objects.sharing.is_untouched(),
            )
            .with(Bonds::PARTITIONS, partitions)
            .with(Bonds::PEERS, !self.objects.peers.is_empty())
            .with(Bonds::REGISTERED, !self.objects.files.is_empty())
            .with(self.lasting.times.bonds(), true)
            .with(Bonds::LINKERS, self.objects.links.len() > 0)
            .with(Bonds::PRINTS, self.prints())
            .with(
                Bonds::MANY,
                self.lasting.undescribed || self.lasting.far_streams,
            )
    }

    /// A stream was made at this position: it notes there how far it is.
    pub fn begin_progress(&mut self, images: &ImageStore, index: usize) -> Result<(), CUresult> {
        let description = self.shared.description.clone();
        self.objects.streams.at_mut(index)?.progress = Some(Progress::new(&description, index));
        if index >= STREAMS && !self.lasting.far_streams {
            self.lasting.far_streams = true;
            self.note_bonds(images);
        }
        Ok(())
    }
}
