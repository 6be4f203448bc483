//! What a session writes down about itself while it works, so that it can be made again in another context
//! ([`crate::engine::scheduling::adopt`]): docs/design/0017-portable-sessions.md.

use crate::engine::base::call::Incoming;
use crate::engine::base::description::{Record, STREAMS};
use crate::engine::base::keeping::Keeping;
use crate::engine::base::progress::Progress;
use crate::engine::images::ImageStore;
use crate::engine::session::bonds::Destination;
use crate::engine::session::{Session, SessionShared};
use crate::keeper::{self, Name};
use mpsshim_api::cuda::CUresult;
use mpsshim_proto::segment::reached;
use std::os::fd::AsFd;

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
    /// Appends a record to the description. If there is no room for it, the session is bound from then on.
    pub fn write_down(&mut self, record: Record) {
        // A record that is missing once stays missing.
        if !self.lasting.undescribed && !self.shared.description.append(&record) {
            self.lasting.undescribed = true;
        }
    }

    /// The message at the ring's tail is executed, and must not be once more.
    #[inline]
    pub fn note_executed(&self, message: Incoming<'_>) {
        let behind = self.inbox.consumer.place().after(message.len());
        self.shared.description.set_described(behind.position());
    }

    /// Whether kernels of an image may write variables that another server has to be told of. Where none comes, nobody looks.
    pub fn keeps_variables(&self, images: &ImageStore, handle: u64) -> bool {
        let image = self.image(handle);
        let looks = images.gpu.keeping.is_on();
        looks && image.is_ok_and(|image| images.leaves(image.content()).variables)
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
        let bonds = self.bonds(images, Destination::NextServer);
        if bonds != self.shared.description.bonds() {
            self.shared.description.set_bonds(bonds);
        }
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
