//! Variables of a session's images, saved while the session is at rest.
//!
//! Another server loads the images again, which gives variables the content that they had at first. So a session is bound
//! from the moment that something is submitted that may write one: a launch from an image whose kernels may write
//! variables, or anything that names a variable by its address. When the session has then been at rest for a moment, a
//! thread of its own reads those variables and writes down what differs from the first content, and the session is
//! portable again.
//!
//! An address of a variable means something else in the next server. One that the client names is translated
//! ([`Session::place_of`]); one that kernels have left in a variable cannot be, and the session stays bound.

use super::description::{Kind, Record};
use super::ordinal::Ordinal;
use super::session::{Function, Global, Session};
use super::variables::AsLoaded;
use super::{Shared, bounds};
use crossbeam_channel::{Receiver, Sender};
use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED, CUresult,
};
use mpsshim_control::panics;
use mpsshim_model::bonds::Bonds;
use mpsshim_proto::arena;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a session is at rest before its variables are saved: longer than the pauses between the launches and the copies
/// of one request, short beside the time until a program is asked for something again.
const REST: Duration = Duration::from_millis(2);
/// It is at rest for so many times as long as its last snapshot took, so that a program with many short requests is not held
/// up by them.
const REST_PER_SNAPSHOT: u32 = 8;
/// How soon to look again when another session's variables are being saved.
const BUSY: Duration = Duration::from_micros(200);
/// A word of a variable that is an address so close to a variable is taken for one into the image, of a literal say, bytes.
const NEAR: u64 = 32 << 20;

/// What binds a session only until it has been saved at rest.
pub const SAVED_AT_REST: Bonds =
    Bonds(Bonds::IMAGES.0 | Bonds::VARIABLES.0 | Bonds::CHANGED_GRAPHS.0 | Bonds::TIMES.0);

/// The variables of an image on a device.
type Place = (u64, Ordinal);

/// The thread that saves variables, one session's at a time: a message that comes meanwhile waits for that one at most.
pub struct Snapshots {
    sender: Sender<Box<Session>>,
    busy: AtomicBool,
}

impl Snapshots {
    /// With a thread behind `sender` that runs [`run`].
    pub fn new(sender: Sender<Box<Session>>) -> Snapshots {
        Snapshots {
            sender,
            busy: AtomicBool::new(false),
        }
    }

    /// Reserves the thread, if it has nothing to do.
    pub fn reserve(&self) -> bool {
        !self.busy.swap(true, Ordering::AcqRel)
    }

    /// Has a session's variables saved. The thread is reserved.
    pub fn send(&self, session: Box<Session>) {
        let _ = self.sender.send(session);
    }
}

/// The body of the thread.
pub fn run(shared: &Arc<Shared>, sessions: &Receiver<Box<Session>>) {
    for mut session in sessions {
        panics::works_for(Some(session.shared.info.session));
        session.enter();
        session.save(shared);
        shared.snapshots.busy.store(false, Ordering::Release);
        shared.send_home(session);
    }
}

/// How a session's description is about its variables.
#[derive(Debug, Default)]
pub struct Saved {
    /// Kernels that may write variables were launched since the last snapshot.
    launched: Cell<bool>,
    /// Variables were named by their addresses since.
    named: Cell<bool>,
    /// All that the client knows were.
    all_named: Cell<bool>,
    /// A graph was launched since: which kernels and addresses it has is not known.
    graphs: bool,
    /// They cannot be saved.
    refused: bool,
    /// Position in the ring, and since when it is there.
    rests: Option<(u64, Instant)>,
    /// How long the last snapshot took.
    took: Duration,
    /// What is described.
    contents: BTreeMap<Place, Vec<u8>>,
}

impl Saved {
    /// What binds the session.
    pub fn bonds(&self) -> Bonds {
        Bonds::default()
            .with(Bonds::IMAGES, self.launched.get() || self.graphs)
            .with(Bonds::VARIABLES, self.named.get())
    }

    /// Something may have been written since the last snapshot, and can be saved.
    #[inline]
    fn is_stale(&self) -> bool {
        let stale = self.launched.get() || self.named.get() || self.graphs;
        stale && !self.refused
    }

    /// Whether no address that is named would say anything new.
    #[inline]
    pub fn all_named(&self) -> bool {
        self.all_named.get()
    }

    /// There are other variables that the client knows.
    pub fn note_known(&self) {
        self.all_named.set(false);
    }

    /// An image is unloaded, and its variables with it.
    pub fn forget(&mut self, image: u64) {
        self.contents.retain(|(of, _), _| *of != image);
    }
}

impl Function {
    /// It is about to be launched; whether it may write variables.
    #[inline]
    pub fn note_launch(&self) -> bool {
        if self.keeps {
            self.launched.set(true);
        }
        self.keeps
    }
}

impl Session {
    /// A function that may write variables is about to be launched.
    #[inline]
    pub fn note_written(&self) {
        if !self.saved.launched.replace(true) {
            self.bind_to(Bonds::IMAGES);
        }
    }

    /// A variable is about to be used by its address.
    #[inline]
    pub fn note_variable(&self, global: &Global) {
        if !global.used.replace(true) {
            self.note_named();
        }
    }

    #[cold]
    fn note_named(&self) {
        if !self.saved.named.replace(true) {
            self.bind_to(Bonds::VARIABLES);
        }
        let all = self.globals.values().all(|global| global.used.get());
        self.saved.all_named.set(all);
    }

    /// Before anything is submitted: a server that ends in between leaves a true description.
    #[cold]
    pub fn bind_to(&self, to: Bonds) {
        let description = &self.shared.description;
        description.set_bonds(description.bonds().with(to, true));
    }

    /// A graph is about to be launched.
    #[inline]
    pub fn note_graph_launch(&mut self) {
        if !self.saved.graphs {
            self.saved.graphs = true;
            self.bind_to(Bonds::IMAGES);
        }
    }

    /// Whether something of it is not as its description has it, and can be written down.
    #[inline]
    fn is_stale(&self) -> bool {
        self.saved.is_stale() || self.graphs.are_stale() || self.times.are_stale()
    }

    /// Whether a snapshot would make it portable.
    pub fn wants_snapshot(&self) -> bool {
        let others = self.shared.description.bonds().0 & !SAVED_AT_REST.0;
        self.is_stale() && self.kept && others == 0 && !self.binding_images && !self.held.any()
    }

    /// When to look next whether it is at rest, if it waits for a snapshot.
    pub fn snapshot_pause(&self) -> Option<Duration> {
        if !self.is_stale() || !self.wants_snapshot() {
            return None;
        }
        let since = self.saved.rests.map(|(_, since)| since.elapsed());
        let left = self.rest().saturating_sub(since.unwrap_or_default());
        Some(left.max(BUSY))
    }

    fn rest(&self) -> Duration {
        REST.max(self.saved.took * REST_PER_SNAPSHOT)
    }

    /// Whether a snapshot would come at the right time: the session has sent nothing for a while and has nothing in flight.
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
        let position = self.consumer.place().position();
        let now = Instant::now();
        let since = match self.saved.rests {
            Some((at, since)) if at == position => since,
            _ => now,
        };
        self.saved.rests = Some((position, since));
        if now.duration_since(since) < self.rest() {
            return false;
        }
        let rests = !self.has_work_in_flight(&shared.gpu) && self.shared.is_at_rest();
        if !rests {
            self.saved.rests = Some((position, now));
        }
        rests
    }

    /// Reads its variables and writes them down. It is at rest, and the calling thread has it: nothing changes meanwhile.
    fn save(&mut self, shared: &Shared) {
        let began = Instant::now();
        // First, since that tells whether graphs name variables.
        if self.graphs.are_stale() {
            self.save_graphs(shared);
        }
        self.save_times(&shared.gpu, self.saved.graphs);
        if self.saved.is_stale() {
            self.save_variables(shared);
        }
        self.saved.took = began.elapsed();
        self.saved.rests = None;
        self.note_bonds(shared);
    }

    fn save_variables(&mut self, shared: &Shared) {
        match self.take_snapshot(shared) {
            Ok(bytes) => {
                let _ = self.saved.launched.take();
                let _ = self.saved.named.take();
                self.saved.all_named.set(self.globals.is_empty());
                self.saved.graphs = false;
                for function in self.functions.iter_mut() {
                    function.launched.set(false);
                }
                self.globals
                    .values()
                    .for_each(|global| global.used.set(false));
                tracing::debug!(bytes, "variables: saved");
            }
            Err(why) => {
                let session = self.shared.info.session;
                tracing::debug!(session, why, "variables: not saved");
                self.saved.refused = true;
            }
        }
    }

    /// Bytes of variables that were read, or why they cannot be saved.
    fn take_snapshot(&mut self, shared: &Shared) -> Result<usize, &'static str> {
        let mut found = Vec::new();
        let mut room = bounds::SAVED;
        for place in self.stale_places()? {
            let Ok(image) = self.image(place.0) else {
                continue;
            };
            let variables = image
                .variables(place.1)
                .ok_or("variables of an image are not known")?;
            let bytes = variables.places().map(|(_, len)| len).sum();
            room = room.checked_sub(bytes).ok_or("they are too long")?;
            let now = variables.read_again(&shared.gpu, place.1);
            let now = now.map_err(|status| {
                shared.gpu.note_status(status);
                "they cannot be read"
            })?;
            found.push((place, variables, now));
        }
        let ranges = self.ranges();
        let mut contents = found.iter().flat_map(|(_, _, now)| now);
        if contents.any(|bytes| has_address(bytes, &ranges)) {
            return Err("they hold addresses of variables");
        }
        for (place, variables, now) in &found {
            let content = encode(variables.changed(now));
            match self.saved.contents.get(place) {
                Some(described) if *described == content => continue,
                None if content.is_empty() => continue,
                _ => {}
            }
            let of_others = self.saved.contents.iter().filter(|(of, _)| *of != place);
            let of_others: usize = of_others.map(|(_, content)| content.len()).sum();
            let record = Record {
                kind: Kind::Variables,
                op: u32::from(place.1) as u16,
                key: place.0,
                bytes: content.clone(),
            };
            let fits = (of_others + content.len()) as u64 <= bounds::SAVED;
            if !fits || !self.shared.description.append(&record) {
                return Err("there is no room for them");
            }
            self.saved.contents.insert(*place, content);
        }
        Ok((bounds::SAVED - room) as usize)
    }

    /// Images whose variables may have been written since the last snapshot.
    fn stale_places(&self) -> Result<BTreeSet<Place>, &'static str> {
        let all = self.saved.graphs;
        let launched = self.functions.iter();
        let launched = launched.filter(|one| one.keeps && (all || one.launched.get()));
        let mut stale: BTreeSet<Place> = launched.map(|one| (one.image, one.device)).collect();
        let named = self.globals.iter();
        let is_named =
            |start: u64, global: &Global| all && self.graphs.may_name(start) || global.used.get();
        for (start, global) in named.filter(|(start, global)| is_named(**start, global)) {
            let variables = self.image(global.image).ok();
            let variables = variables.and_then(|image| image.variables(global.device));
            // A constant, say, that clients are not supposed to write.
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

    /// Where its variables are, and where its client knows them.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let images = self.images.iter().chain(self.libraries.iter());
        let known = self.globals.iter();
        let known = known.map(|(start, global)| (*start, global.len));
        let moved = self.moved.iter().map(|(start, (len, _))| (*start, *len));
        let places = images.flat_map(|image| image.places());
        places.chain(known).chain(moved).collect()
    }

    /// Has the variables of an image hold what they held in the server before, by their record.
    ///
    /// # Errors
    /// The driver's; others where the image does not have such variables.
    pub fn restore_variables(&mut self, shared: &Shared, record: Record) -> Result<(), CUresult> {
        let device = shared.gpu.device(record.op.into())?.ordinal;
        let contents = decode(&record.bytes).ok_or(CUDA_ERROR_INVALID_IMAGE)?;
        if self.image(record.key)?.is_with_others() {
            self.separate(shared, record.key)?;
        }
        let image = self.image(record.key)?;
        image.note_loaded(&shared.images, device);
        let variables: Arc<AsLoaded> = image.variables(device).ok_or(CUDA_ERROR_NOT_FOUND)?;
        variables.put(&shared.gpu, device, &contents)?;
        let place = (record.key, device);
        self.saved.contents.insert(place, record.bytes);
        Ok(())
    }

    /// An address that the client is told must not be one that it knows another variable by.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub fn check_new_address(&self, start: u64, len: u64) -> Result<(), CUresult> {
        let overlaps = |(known, (of, now)): (&u64, &(u64, u64))| {
            *now != start && *known < start + len && start < *known + *of
        };
        match self.moved.iter().any(overlaps) {
            true => Err(CUDA_ERROR_NOT_SUPPORTED),
            false => Ok(()),
        }
    }

    /// A kernel's parameters, so many bytes at `params`, with the addresses of variables that are elsewhere now.
    pub fn translate(&self, params: *const u8, len: usize) -> Vec<u8> {
        let mut own = vec![0; len];
        // SAFETY: the caller has seen to it that so many bytes can be read; the client may change them meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(params, own.as_mut_ptr(), len) };
        for word in own.as_chunks_mut::<8>().0 {
            *word = self.place_of(u64::from_le_bytes(*word)).to_le_bytes();
        }
        own
    }
}

/// Whether an address is of memory that is at the same place in the next server.
pub fn keeps_its_address(word: u64) -> bool {
    arena::is_device(word) || arena::is_host(word) || arena::is_virtual(word)
}

/// Whether content has a word that is an address of a variable, or so near one that it may be one of the same image.
pub fn has_address(bytes: &[u8], ranges: &[(u64, u64)]) -> bool {
    let is_near = |word: u64| {
        ranges.iter().any(|(start, len)| {
            let first = start.saturating_sub(NEAR);
            (first..start.saturating_add(*len).saturating_add(NEAR)).contains(&word)
        })
    };
    let words = bytes.as_chunks::<8>().0.iter();
    let mut words = words.map(|word| u64::from_le_bytes(*word));
    words.any(|word| !keeps_its_address(word) && is_near(word))
}

/// Names and contents as a record has them: both lengths, then both.
fn encode<'a>(contents: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in contents {
        bytes.extend((name.len() as u32).to_le_bytes());
        bytes.extend((content.len() as u32).to_le_bytes());
        bytes.extend(name);
        bytes.extend(content);
    }
    bytes
}

/// What [`encode`] has written.
fn decode(mut bytes: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut contents = Vec::new();
    while !bytes.is_empty() {
        let mut len = || {
            let (len, rest) = bytes.split_first_chunk::<4>()?;
            bytes = rest;
            Some(u32::from_le_bytes(*len) as usize)
        };
        let (name, content) = (len()?, len()?);
        let (name, rest) = bytes.split_at_checked(name)?;
        let (content, rest) = rest.split_at_checked(content)?;
        contents.push((name, content));
        bytes = rest;
    }
    Some(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VARIABLE: u64 = 0x7f12_3400_0000;
    const RANGES: [(u64, u64); 1] = [(VARIABLE, 256)];

    fn has(words: &[u64]) -> bool {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        has_address(&bytes, &RANGES)
    }

    #[test]
    fn an_address_of_a_variable_in_a_variable_is_found() {
        assert!(has(&[VARIABLE]));
        assert!(has(&[5, VARIABLE + 255]));
        // Of a literal beside it, or of a function.
        assert!(has(&[VARIABLE + 4096]) && has(&[VARIABLE - 4096]));
        assert!(!has(&[VARIABLE + (1 << 30), u64::MAX]));
    }

    #[test]
    fn memory_that_keeps_its_address_may_be_named() {
        assert!(!has(&[
            arena::DEVICE_ARENA,
            arena::HOST_ARENA + 8,
            arena::VIRTUAL_ARENA + 4096
        ]));
    }

    #[test]
    fn words_that_are_not_aligned_are_no_addresses() {
        let bytes = [&[0; 4][..], &VARIABLE.to_le_bytes(), &[0; 4]].concat();
        assert!(!has_address(&bytes, &RANGES));
        assert!(!has_address(&VARIABLE.to_le_bytes()[..7], &RANGES));
    }

    #[test]
    fn contents_are_read_as_they_were_written() {
        let contents: [(&[u8], &[u8]); 3] =
            [(b"a\0", &[1, 2, 3, 4]), (b"b\0", &[]), (b"\0", &[7; 300])];
        let bytes = encode(contents.into_iter());
        assert_eq!(decode(&bytes).as_deref(), Some(&contents[..]));
        assert_eq!(decode(&[]), Some(vec![]));
        for len in 1..bytes.len() {
            let whole = decode(&bytes[..len]).is_none_or(|some| some.len() < 3);
            assert!(whole, "{len}");
        }
        assert_eq!(decode(&[255; 64]), None);
    }
}
