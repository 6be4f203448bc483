//! Saving a session's variables while it is at rest.

use super::{
    BUSY, Contents, Described, Neighbourhood, Place, UNAWAITED_REST, VariablesState, bytes_of,
};
use crate::engine::base::bounds;
use crate::engine::base::description::Record;
use crate::engine::base::journal::Refusal;
use crate::engine::base::kinds::Kind;
use crate::engine::calls::graph::saved::save_graphs;
use crate::engine::calls::module::separate;
use crate::engine::images::variables::AsLoaded;
use crate::engine::lasting::contents::{forget, load, name_in, store};
use crate::engine::lasting::{Lasting, Lost, Making, failed};
use crate::engine::objects::events::Event;
use crate::engine::objects::functions::{Function, Global};
use crate::engine::objects::times::session::save_times;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crossbeam_channel::Receiver;
use mpsshim_api::cuda::{
    CU_EVENT_DISABLE_TIMING, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED, CUresult,
};
use mpsshim_control::panics;
use mpsshim_model::bonds::Bonds;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Session {
    /// Records that a function which may write variables is about to be launched.
    #[inline]
    pub fn note_written(&self) {
        if !self.lasting.saved.launched.replace(true) {
            self.bind_to(Bonds::IMAGES);
        }
    }

    /// Records that a variable is about to be used by its address.
    #[inline]
    pub fn note_variable(&self, global: &Global) {
        if !global.used.replace(true) {
            self.note_named();
        }
    }

    #[cold]
    fn note_named(&self) {
        if !self.lasting.saved.named.replace(true) {
            self.bind_to(Bonds::VARIABLES);
        }
        let all = self
            .objects
            .globals
            .values()
            .all(|global| global.used.get());
        self.lasting.saved.all_named.set(all);
    }

    /// Adds bonds to the session's description. Called before the work is submitted, so that the description is correct
    /// if the server ends in between.
    #[cold]
    pub fn bind_to(&self, to: Bonds) {
        let description = &self.shared.description;
        description.set_bonds(description.bonds().with(to, true), self.executed_from());
    }

    /// Records that a graph is about to be launched.
    #[inline]
    pub fn note_graph_launch(&mut self) {
        let changes = || !self.flow.repeats || !self.graphs_change_nothing();
        if !self.lasting.saved.graphs && changes() {
            self.lasting.saved.graphs = true;
            self.bind_to(Bonds::IMAGES);
        }
    }

    /// Whether graphs of the session can neither write variables nor record events with times, so that nothing is to be
    /// saved after their launches.
    fn graphs_change_nothing(&self) -> bool {
        let has_time = |event: &Event| event.flags & CU_EVENT_DISABLE_TIMING == 0;
        let names_variables =
            !self.objects.globals.is_empty() && self.objects.graphs.may_name_any();
        !names_variables
            && !self.objects.functions.iter().any(|one| one.keeps)
            && !self.objects.events.iter().any(has_time)
    }

    /// Whether the session has changes that its description lacks and that can be saved.
    #[inline]
    fn is_stale(&self) -> bool {
        self.lasting.saved.is_stale()
            || self.objects.graphs.are_stale()
            || self.lasting.times.are_stale()
    }

    /// Whether a snapshot would make it portable.
    pub fn wants_snapshot(&self) -> bool {
        let others = self.shared.description.bonds().0 & !Bonds::UNTIL_SAVED.0;
        self.is_stale()
            && self.lasting.kept
            && others == 0
            && !self.lasting.binding_images
            && !self.inbox.held.any()
    }

    /// How long to wait before the next check whether the session is at rest, if a snapshot is due.
    pub fn snapshot_pause(&self) -> Option<Duration> {
        if !self.is_stale() || !self.wants_snapshot() {
            return None;
        }
        let (saved, now) = (&self.lasting.saved, Instant::now());
        let since = saved.rests.map(|(_, since)| now.duration_since(since));
        let left = saved.rest(now).saturating_sub(since.unwrap_or_default());
        Some(left.max(BUSY))
    }

    /// Whether it is time for a snapshot: the session has sent nothing for a while and has nothing in flight.
    #[inline]
    pub fn is_due_for_snapshot(&mut self, shared: &Shared) -> bool {
        self.is_stale() && self.rests_for_snapshot(shared)
    }

    #[cold]
    fn rests_for_snapshot(&mut self, shared: &Shared) -> bool {
        if !self.wants_snapshot() || shared.gpu.is_lost() || shared.gpu.calm(self.side).is_hushed()
        {
            return false;
        }
        let position = self.inbox.consumer.place().position();
        let now = Instant::now();
        let since = match self.lasting.saved.rests {
            Some((at, since)) if at == position => since,
            _ => now,
        };
        self.lasting.saved.rests = Some((position, since));
        if now.duration_since(since) < self.lasting.saved.rest(now) {
            return false;
        }
        let rests = !self.has_work_in_flight(&shared.gpu) && self.shared.is_at_rest();
        if !rests {
            self.lasting.saved.rests = Some((position, now));
            return false;
        }
        // Commands that may have to be executed again begin from the state at the point where the client last waited.
        self.note_rest_here();
        !self.has_unawaited() || now.duration_since(since) > UNAWAITED_REST
    }

    /// Saves the session at once, for the thread that owns it, if its client has waited for its work. Returns whether nothing
    /// is left to be saved.
    pub fn save_if_awaited(&mut self, shared: &Shared) -> bool {
        if !self.wants_snapshot() {
            return true;
        }
        if self.has_work_in_flight(&shared.gpu) || !self.shared.is_at_rest() {
            return false;
        }
        self.note_rest_here();
        let may = !self.has_unawaited() && shared.lanes.snapshots.reserve();
        if may {
            self.save(shared);
            shared.lanes.snapshots.release();
        }
        may
    }

    /// Saves the session's graphs, event times and variables. The session is at rest and owned by the calling thread,
    /// so nothing changes meanwhile.
    fn save(&mut self, shared: &Shared) {
        let began = Instant::now();
        // Graphs come first, because saving them determines which variables they reference.
        if self.objects.graphs.are_stale() {
            save_graphs(self, shared);
        }
        let graphs_were_launched = self.lasting.saved.graphs;
        save_times(self, &shared.gpu, graphs_were_launched);
        if self.lasting.saved.is_stale() {
            self.save_variables(shared);
        }
        let now = Instant::now();
        let took = now.duration_since(began);
        self.lasting.saved.note_time(took, now);
        self.lasting.saved.rests = None;
        // Executed again, commands would begin from another state than at first.
        self.note_amid_work(Refusal::Saved);
        self.note_bonds(&shared.images);
    }

    fn save_variables(&mut self, shared: &Shared) {
        match self.take_snapshot(shared) {
            Ok(bytes) => {
                let _ = self.lasting.saved.launched.take();
                let _ = self.lasting.saved.named.take();
                self.lasting
                    .saved
                    .all_named
                    .set(self.objects.globals.is_empty());
                self.lasting.saved.graphs = false;
                for function in self.objects.functions.iter_mut() {
                    function.launched.set(false);
                }
                self.objects
                    .globals
                    .values()
                    .for_each(|global| global.used.set(false));
                tracing::debug!(
                    session = self.shared.info.session,
                    bytes,
                    "variables: saved"
                );
            }
            Err(why) => {
                let session = self.shared.info.session;
                tracing::debug!(session, why, "variables: not saved");
                self.lasting.saved.refused = true;
            }
        }
    }

    /// Returns how many bytes of variables were read, or why they cannot be saved.
    fn take_snapshot(&mut self, shared: &Shared) -> Result<usize, &'static str> {
        let mut found = Vec::new();
        let mut room = bounds::LOOKED_AT;
        for place in self.stale_places()? {
            let Ok(image) = self.objects.image(place.0) else {
                continue;
            };
            let variables = image
                .variables(place.1)
                .ok_or("variables of an image are not known")?;
            let bytes = variables.places().map(|(_, len)| len).sum();
            room = room.checked_sub(bytes).ok_or("they are too long")?;
            let began = Instant::now();
            let mut globals = self.objects.globals.values();
            let is_of_it = |global: &Global| (global.image, global.device) == place;
            let by_code = !globals.any(is_of_it);
            let now = variables.read_again(&shared.gpu, place.1, by_code);
            tracing::debug!(
                session = self.shared.info.session,
                image = image.content().len(),
                variables = variables.places().count(),
                bytes,
                time = ?began.elapsed(),
                "variables: read"
            );
            let now = now.map_err(|status| {
                shared.gpu.note_status(status);
                "they cannot be read"
            })?;
            found.push((place, variables, now));
        }
        let near = Neighbourhood::of(self.ranges());
        let mut contents = found.iter().flat_map(|(_, _, now)| now);
        if contents.any(|bytes| near.has_address(bytes)) {
            return Err("they hold addresses of variables");
        }
        for (place, variables, now) in &found {
            let content: Contents = variables
                .changed(now)
                .map(|(name, content)| (name.to_vec(), content.to_vec()))
                .collect();
            let described = self.lasting.saved.contents.get(place);
            match described {
                Some(described) if described.is(&content) => continue,
                None if content.is_empty() => continue,
                _ => {}
            }
            let before = described.and_then(Described::generation);
            self.describe_contents(shared, *place, content, before)?;
        }
        Ok((bounds::LOOKED_AT - room) as usize)
    }

    /// Describes the contents of an image's variables. `before`: generation of the file with the contents that they replace.
    fn describe_contents(
        &mut self,
        shared: &Shared,
        place: Place,
        contents: Contents,
        before: Option<u32>,
    ) -> Result<(), &'static str> {
        const NO_ROOM: &str = "there is no room for them";
        let images = &shared.images;
        let (here, files) = self.lasting.saved.others(place);
        let bytes = bytes_of(&contents);
        let number = (place.0, u32::from(place.1));
        let (state, generation) = if (here + bytes) as u64 <= bounds::SAVED {
            (VariablesState::Here(&contents), None)
        } else if (files + bytes) as u64 <= bounds::SAVED_IN_FILES {
            let generation = before.map_or(0, |before| before.wrapping_add(1));
            let stored = store(self, images, number, generation, &contents);
            (stored.ok_or(NO_ROOM)?, Some(generation))
        } else {
            return Err(NO_ROOM);
        };
        let record = Record::of(Kind::Variables, number.1 as u16, place.0, &state);
        let is_described = self.shared.description.append(&record);
        let unused = match is_described {
            true => before,
            false => generation,
        };
        if let Some(unused) = unused {
            forget(self, images, number, unused);
        }
        if !is_described {
            return Err(NO_ROOM);
        }
        let described = Described::of(contents, generation);
        self.lasting.saved.contents.insert(place, described);
        Ok(())
    }

    /// Returns the images whose variables may have been written since the last snapshot.
    fn stale_places(&self) -> Result<BTreeSet<Place>, &'static str> {
        let all = self.lasting.saved.graphs;
        let launched = self.objects.functions.iter();
        let launched = launched.filter(|one| one.keeps && (all || one.launched.get()));
        let mut stale: BTreeSet<Place> = launched.map(|one| (one.image, one.device)).collect();
        let named = self.objects.globals.iter();
        let is_named = |start: u64, global: &Global| {
            all && self.objects.graphs.may_name(start) || global.used.get()
        };
        for (start, global) in named.filter(|(start, global)| is_named(**start, global)) {
            let variables = self.objects.image(global.image).ok();
            let variables = variables.and_then(|image| image.variables(global.device));
            // A constant, for example, which clients are not supposed to write.
            let is_known = variables.is_some_and(|variables| {
                let mut places = variables.places();
                places.any(|place| place == (*start, global.len))
            });
            if !is_known {
                return Err("a variable that was named is not known of its image");
            }
            stale.insert((global.image, global.device));
        }
        Ok(stale)
    }

    /// Returns the address ranges, start and bytes, of all its variables, including the addresses under which its
    /// client knows them.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let images = self
            .objects
            .images
            .iter()
            .chain(self.objects.libraries.iter());
        let known = self.objects.globals.iter();
        let known = known.map(|(start, global)| (*start, global.len));
        let moved = self
            .lasting
            .moved
            .iter()
            .map(|(start, (len, _))| (*start, *len));
        let places = images.flat_map(|image| image.places());
        places.chain(known).chain(moved).collect()
    }

    /// Restores an image's variables to the content that they had in the previous server.
    ///
    /// # Errors
    /// The driver's status, or another one if the image does not have such variables.
    pub fn restore_variables(
        &mut self,
        shared: &Shared,
        (image, device): (u64, u32),
        contents: Contents,
        generation: Option<u32>,
    ) -> Result<(), CUresult> {
        let device = shared.gpu.device(device)?.ordinal;
        if self.objects.image(image)?.is_with_others() {
            separate(self, shared, image)?;
        }
        let loaded = self.objects.image(image)?;
        loaded.note_loaded(&shared.images, device);
        let variables: Arc<AsLoaded> = loaded.variables(device).ok_or(CUDA_ERROR_NOT_FOUND)?;
        let named = contents
            .iter()
            .map(|(name, content)| (&name[..], &content[..]));
        let named: Vec<(&[u8], &[u8])> = named.collect();
        variables.put(&shared.gpu, device, &named)?;
        self.lasting
            .saved
            .contents
            .insert((image, device), Described::of(contents, generation));
        Ok(())
    }

    /// Checks that a variable's address, which is about to be returned to the client, is not one under which the client
    /// knows another variable.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` if it is.
    pub fn check_new_address(&self, start: u64, len: u64) -> Result<(), CUresult> {
        let overlaps = |(known, (of, now)): (&u64, &(u64, u64))| {
            *now != start && *known < start + len && start < *known + *of
        };
        match self.lasting.moved.iter().any(overlaps) {
            true => Err(CUDA_ERROR_NOT_SUPPORTED),
            false => Ok(()),
        }
    }

    /// Copies a kernel's parameters, `len` bytes at `params`, and replaces addresses of variables that have moved.
    pub fn translate(&self, params: *const u8, len: usize) -> Vec<u8> {
        let mut own = vec![0; len];
        // SAFETY: the caller has ensured that `len` bytes can be read; the client may change them meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(params, own.as_mut_ptr(), len) };
        for word in own.as_chunks_mut::<8>().0 {
            *word = self
                .lasting
                .place_of(u64::from_le_bytes(*word))
                .to_le_bytes();
        }
        own
    }
}

impl Function {
    /// Records that the function is about to be launched. Returns whether it may write variables.
    #[inline]
    pub fn note_launch(&self) -> bool {
        if self.keeps {
            self.launched.set(true);
        }
        self.keeps
    }
}

/// The body of the snapshot thread.
pub fn run(shared: &Arc<Shared>, sessions: &Receiver<Box<Session>>) {
    for mut session in sessions {
        panics::works_for(Some(session.shared.info.session));
        session.enter();
        session.save(shared);
        shared.lanes.snapshots.release();
        shared.lanes.send_home(session);
    }
}

/// Contents of an image's variables on a device.
pub struct Variables;

impl Lasting for Variables {
    const KIND: Kind = Kind::Variables;
    type State = VariablesState;

    fn make(
        record: &Record,
        state: VariablesState,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let number = session.shared.info.session;
        let (contents, generation) = match state {
            VariablesState::Here(contents) => (contents, None),
            VariablesState::File { generation, len } => {
                let name = name_in(number, record).ok_or("its file has no name")?;
                (load(making.take(name)?, len)?, Some(generation))
            }
        };
        let place = (record.key, record.op.into());
        let restored = session.restore_variables(making.shared, place, contents, generation);
        restored.map_err(failed("variables of an image", record))
    }
}
