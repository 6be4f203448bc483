//! Describes a session while it works, so that it can be restored in another context
//! ([`crate::engine::scheduling::adopt`]): docs/design/0017-portable-sessions.md.

use crate::engine::base::call::Incoming;
use crate::engine::base::description::{Record, STREAMS};
use crate::engine::base::keeping::Keeping;
use crate::engine::base::progress::Progress;
use crate::engine::images::ImageStore;
use crate::engine::session::bonds::Destination;
use crate::engine::session::lasting::Lasting;
use crate::engine::session::{Session, SessionShared};
use crate::keeper::{self, Name};
use mpsshim_api::cuda::CUresult;
use mpsshim_proto::ring::ALIGN;
use mpsshim_proto::segment::reached;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

impl SessionShared {
    /// Passes the descriptors that every session has to the keeper: description, segment, doorbell and connection.
    /// Returns whether the keeper holds them all.
    pub fn keep(&self, keeping: &Keeping) -> bool {
        let id = self.info.session;
        let parts = [
            (keeper::Kind::Description, self.description.file()),
            (keeper::Kind::Segment, self.segment.file.as_fd()),
            (keeper::Kind::Bell, self.bell.fd()),
            (keeper::Kind::Socket, self.socket()),
        ];
        let mut parts = parts.into_iter();
        parts.all(|(kind, fd)| keeping.keep_part(Name::numbered(kind, id), fd))
    }

    /// Whether nothing of the session is in flight, according to its description and flags. Does not ask the driver,
    /// which has lost the context.
    pub fn is_at_rest(&self) -> bool {
        self.description
            .is_at_rest(|slot, value| reached(self.flag(slot), value))
    }

    /// Whether the driver has no work of the session in flight, as far as description and flags tell.
    pub fn is_drained(&self) -> bool {
        self.description
            .is_drained(|slot, value| reached(self.flag(slot), value))
    }
}

impl Session {
    /// Appends a record to the description. If there is no room for it, the session is bound from then on.
    pub fn write_down(&mut self, record: Record) {
        // The session is already bound by the first missing record, which is never added later.
        if !self.lasting.undescribed && !self.shared.description.append(&record) {
            self.lasting.undescribed = true;
        }
    }

    /// Notes that the message at the ring's tail begins to change the session: if the server ends meanwhile, the next one
    /// undoes the change and executes the message again.
    #[inline]
    pub fn begin_change(&self, message: Incoming<'_>) {
        if self.lasting.kept && !self.inbox.held.is_replaying() {
            let behind = self.inbox.consumer.place().after(message.len());
            self.shared.description.begin_change(behind.position());
        }
    }

    /// Notes that the message at the ring's tail has been executed, so that another server does not execute it again.
    #[inline]
    pub fn note_executed(&self, message: Incoming<'_>) {
        let behind = self.inbox.consumer.place().after(message.len());
        self.shared.description.set_described(behind.position());
    }

    /// Notes that the request at the ring's tail is about to be answered, so that another server does not answer it again.
    #[inline]
    pub fn note_answering(&self, message: Incoming<'_>) {
        self.note_answers(message, 1);
    }

    /// Notes that the command at the ring's tail has been executed, so that another server does not execute it again.
    #[inline]
    pub fn note_done(&self, message: Incoming<'_>) {
        if !self.inbox.held.is_replaying() {
            self.note_answers(message, 0);
        }
    }

    fn note_answers(&self, message: Incoming<'_>, more: u32) {
        let behind = self.inbox.consumer.place().after(message.len());
        let answers = self.shared.header().answers.0.load(Ordering::Relaxed);
        let description = &self.shared.description;
        description.set_answering(behind.position(), answers.wrapping_add(more));
    }

    /// Whether kernels of an image may write variables, which another server has to restore. Always `false` without a
    /// keeper, because no other server can continue the session then.
    pub fn keeps_variables(&self, images: &ImageStore, handle: u64) -> bool {
        let image = self.objects.image(handle);
        let looks = images.gpu.keeping.is_on();
        looks && image.is_ok_and(|image| images.leaves(image.content()).variables)
    }

    /// Looks for addresses of variables in the `len` bytes of kernel parameters at `params`, and notes the variables.
    /// Returns whether one of them has moved since the client learned its address, so that the parameters must be
    /// translated.
    #[inline]
    pub fn note_params(&self, params: *const u8, len: usize) -> bool {
        let (first, end) = self.lasting.variables_span;
        if end == 0 || self.lasting.saved.all_named() && self.lasting.moved.is_empty() {
            return false;
        }
        let mut moved = false;
        for at in (0..len & !7).step_by(8) {
            // SAFETY: the caller has checked that `len` bytes can be read; the client may change them meanwhile.
            let word = unsafe { params.add(at).cast::<u64>().read_unaligned() };
            if word >= first && word < end {
                let place = self.lasting.place_of(word);
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

    /// Updates the address range of known variables after the client has learned or lost some.
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

    /// Called when the driver has refused a submission because the context is lost: streams to which nothing was
    /// submitted since their last completion marker have nothing in flight.
    pub fn take_back_begun(&mut self) {
        for stream in self.objects.streams.iter_mut() {
            stream.take_back_begun();
        }
    }

    /// A position in the ring before the message that is being executed, and behind all that its client has waited for.
    pub fn executed_from(&self) -> u64 {
        let tail = self.inbox.consumer.place().position();
        match self.inbox.held.is_replaying() {
            // A deferred message lies before the tail; its client cannot have waited for it.
            true => tail.wrapping_sub(u64::from(ALIGN)),
            false => tail,
        }
    }

    /// Publishes the session's present bonds in its description.
    pub fn note_bonds(&mut self, images: &ImageStore) {
        let bonds = self.bonds(images, Destination::NextServer);
        if bonds != self.shared.description.bonds() {
            let position = self.executed_from();
            self.shared.description.set_bonds(bonds, position);
        }
    }

    /// Notes that memory is being freed: graphs that copy or set it bind the session until they are saved again. Called before
    /// the description says that the memory is gone, since the server may end in between.
    pub fn note_freed(&mut self, images: &ImageStore, start: u64, len: u64) {
        if self.objects.graphs.note_freed(start, len) {
            self.note_bonds(images);
        }
    }

    /// Makes a new stream at this position note its progress in the description. The session is bound once it has a
    /// stream beyond [`STREAMS`].
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

/// Ranges of addresses, and where they lie elsewhere: length and other start, by the start.
pub type Ranges = BTreeMap<u64, (u64, u64)>;

/// The address elsewhere, if it lies in one of these ranges, or the same one.
pub fn translated(ranges: &Ranges, address: u64) -> u64 {
    match ranges.range(..=address).next_back() {
        Some((start, (len, other))) if address - start < *len => other + (address - start),
        _ => address,
    }
}

impl Lasting {
    /// Translates an address that the client uses to the present one: a variable may have moved since the previous
    /// server.
    #[inline]
    pub fn place_of(&self, address: u64) -> u64 {
        match self.moved.is_empty() {
            true => address,
            false => translated(&self.moved, address),
        }
    }

    /// The addresses by which the client knows the variables that have moved, by their present ones, for [`translated`]. For a
    /// single address, [`Lasting::known_as`] does it.
    pub fn known_by_place(&self) -> Ranges {
        // Of several, the lowest, as for a single address.
        let moved = self.moved.iter().rev();
        let known = moved.map(|(known, (len, now))| (*now, (*len, *known)));
        known.collect()
    }

    /// Translates a present address back to the address that the client knows: the inverse of [`Lasting::place_of`].
    pub fn known_as(&self, place: u64) -> u64 {
        let mut moved = self.moved.iter();
        let here = moved.find(|(_, (len, now))| place.wrapping_sub(*now) < *len);
        here.map_or(place, |(known, (_, now))| known + (place - now))
    }
}
