//! Whose kernel may have faulted: the driver does not tell, but only a session with something in flight can have caused it.
//! Where the driver writes a text about it, that goes to whoever it fits best.

use super::Shared;
use super::assertions::{self, Assertion};
use super::cubin;
use super::images::{Content, WeakContent};
use super::session::SessionShared;
use mpsshim_api::cuda::CUresult;
use mpsshim_model::client::Suspect;
use mpsshim_proto::handle::Handle;
use mpsshim_proto::segment::reached;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names of kernels that are known of one session. A framework loads some thousand.
const MOST_NAMES: usize = 1 << 14;
/// Bytes of a name that are kept.
const NAME_LEN: usize = 200;
/// Stands for the handle of a function. Handles have kinds, and none is all ones.
const GRAPH: u64 = u64::MAX;
/// With a slot of the client's flags: a mark.
const MARK: u64 = u64::MAX - (1 << 32);

/// Launches and marks that are remembered of one session.
const RECENT: usize = 128;
/// Images of one session that are remembered before it is looked which are gone.
const FEW_IMAGES: usize = 64;

/// What a session launched last, for other threads.
#[derive(Debug, Default)]
pub struct Launched {
    /// Handle of the last function, or [`GRAPH`]; 0: nothing yet.
    last: AtomicU64,
    /// Launches and marks that were noted.
    count: AtomicU64,
    /// The last of them, by their number.
    recent: Recent,
    images: Mutex<Vec<WeakContent>>,
    /// Functions and their names, by position: whatever has the place of one that is gone takes that of its name.
    names: Mutex<HashMap<u32, (u64, Box<str>)>>,
}

#[derive(Debug)]
struct Recent(Box<[Entry; RECENT]>);

impl Default for Recent {
    fn default() -> Recent {
        Recent(Box::new(std::array::from_fn(|_| Entry::default())))
    }
}

/// A launch or a mark. Only the session's own thread writes.
#[derive(Debug, Default)]
struct Entry {
    /// Handle of the function, or [`MARK`] and a slot; 0: nothing yet.
    what: AtomicU64,
    /// The stream's position, and in the low half the value of a mark.
    place: AtomicU64,
}

impl Launched {
    /// A kernel was launched into the stream at this position.
    #[inline]
    pub fn note(&self, function: u64, stream: usize) {
        self.last.store(function, Ordering::Relaxed);
        self.remember(function, stream, 0);
    }

    /// A graph was.
    pub fn note_graph(&self, stream: usize) {
        self.note(GRAPH, stream);
    }

    /// All that was launched into the stream is complete when this flag of the client's has the value.
    #[inline]
    pub fn note_mark(&self, slot: u32, value: u32, stream: usize) {
        self.remember(MARK + u64::from(slot), stream, value);
    }

    #[inline]
    fn remember(&self, what: u64, stream: usize, value: u32) {
        let count = self.count.load(Ordering::Relaxed);
        let entry = &self.recent.0[count as usize % RECENT];
        entry.what.store(what, Ordering::Relaxed);
        let place = (stream as u64) << 32 | u64::from(value);
        entry.place.store(place, Ordering::Relaxed);
        self.count.store(count + 1, Ordering::Release);
    }

    /// The session has an image with this content.
    pub fn note_image(&self, content: &Content) {
        let mut images = self.images.lock();
        if images.len() >= FEW_IMAGES && images.len().is_power_of_two() {
            images.retain(|image| image.get().is_some());
        }
        if !images.iter().any(|image| image.is(content)) {
            images.push(content.weak());
        }
    }

    /// Functions whose launches are remembered and may not be complete, and [`GRAPH`]: no mark behind them was reached,
    /// as `has` tells of the client's flags that they have a value.
    fn in_flight(&self, has: impl Fn(u32, u32) -> bool) -> Vec<u64> {
        let count = self.count.load(Ordering::Acquire);
        let latest_first = (count.saturating_sub(RECENT as u64)..count).rev();
        // Streams that were marked behind what is looked at, and reached the mark.
        let mut over = HashSet::new();
        let mut functions = Vec::new();
        for number in latest_first {
            let entry = &self.recent.0[number as usize % RECENT];
            let (what, place) = (&entry.what, &entry.place);
            let (what, place) = (what.load(Ordering::Relaxed), place.load(Ordering::Relaxed));
            let (stream, value) = (place >> 32, place as u32);
            if (MARK..GRAPH).contains(&what) {
                if has((what - MARK) as u32, value) {
                    over.insert(stream);
                }
            } else if !over.contains(&stream) {
                functions.push(what);
            }
        }
        functions.sort_unstable();
        functions.dedup();
        functions
    }

    /// The name of the function that has this handle from now on.
    pub fn name(&self, function: u64, name: &[u8]) {
        let mut names = self.names.lock();
        let position = Handle(function).index();
        if names.len() < MOST_NAMES || names.contains_key(&position) {
            names.insert(position, (function, printable(name).into()));
        }
    }

    /// The kernel that was launched last, if its name is known.
    pub fn kernel(&self) -> Option<String> {
        match self.last.load(Ordering::Relaxed) {
            GRAPH => Some("a graph".into()),
            function => self.name_of(function),
        }
    }

    fn name_of(&self, function: u64) -> Option<String> {
        let names = self.names.lock();
        let (named, name) = names.get(&Handle(function).index())?;
        (*named == function).then(|| name.to_string())
    }
}

/// For logs and terminals: a name without its terminator and without control characters, of a bounded length.
fn printable(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    let mut text: String = text.chars().filter(|c| !c.is_control()).collect();
    while text.len() > NAME_LEN {
        text.pop();
    }
    text
}

impl SessionShared {
    /// Adds it to the clients that had something in flight.
    pub fn add_to(&self, suspects: &mut Vec<Suspect>) {
        // One that is leaving may be in both lists.
        let is_known = |one: &Suspect| one.client.session == self.info.session;
        if !suspects.iter().any(is_known) {
            suspects.push(Suspect {
                client: self.info.clone(),
                kernel: self.launched.kernel(),
            });
        }
    }
}

impl Shared {
    /// The client is about to leave the list of sessions; its work may go on.
    pub fn note_leaving(&self, session: &Arc<SessionShared>) {
        let mut leaving = self.leaving.lock();
        leaving.insert(session.info.session, session.clone());
    }

    /// Nothing of it is in flight any more.
    pub fn note_drained(&self, session: &SessionShared) {
        self.leaving.lock().remove(&session.info.session);
    }

    /// Clients that have left, with something in flight.
    pub fn leaving_at_work(&self) -> Vec<Arc<SessionShared>> {
        let leaving = self.leaving.lock();
        let at_work = leaving.values().filter(|session| !session.is_at_rest());
        at_work.cloned().collect()
    }

    /// The context is lost: gives clients what their kernels have printed and why they ended, as far as the driver tells.
    /// Nobody is to see the status before.
    pub fn hand_out_text(&self, status: CUresult, at_work: &[Arc<SessionShared>]) {
        let printed = self.gpu.printing.take_last();
        let asserted = assertions::take();
        let owners = self.owners(&asserted, at_work);
        if owners.is_empty() && !asserted.is_empty() {
            let text = String::from_utf8_lossy(&asserted);
            let first = text.lines().next().unwrap_or_default();
            let count = text.lines().count();
            tracing::warn!(
                "Whose kernel failed is not known; the first of {count} lines that the driver wrote: {first}"
            );
        }
        for session in at_work {
            let id = session.info.session;
            let printed = match &printed {
                Some((holder, text)) if *holder == id => &text[..],
                _ => &[],
            };
            let is_owner = owners.iter().any(|owner| Arc::ptr_eq(owner, session));
            let asserted = if is_owner { &asserted[..] } else { &[] };
            if printed.is_empty() && asserted.is_empty() {
                continue;
            }
            if let Err(error) = assertions::send(session.socket(), printed, asserted) {
                tracing::warn!(
                    "Client {} does not get what its kernels wrote before {status}: {error}",
                    session.info
                );
            }
        }
    }

    /// To whom the text of failed assertions goes: those of the sessions with something in flight that it fits best. Several
    /// are left only where each runs the same code.
    fn owners(&self, text: &[u8], at_work: &[Arc<SessionShared>]) -> Vec<Arc<SessionShared>> {
        if text.is_empty() || at_work.len() < 2 {
            return at_work.to_vec();
        }
        let Some(said) = Assertion::read(text) else {
            return Vec::new();
        };
        let archs: Vec<u32> = self.gpu.devices.iter().map(|one| one.capability).collect();
        let fits = at_work.iter().map(|session| session.fits(&said, &archs));
        let fits: Vec<Fit> = fits.collect();
        let Some(best) = fits.iter().max().filter(|best| **best > Fit::OtherCode) else {
            return Vec::new();
        };
        let owners = at_work.iter().zip(&fits).filter(|(_, fit)| *fit == best);
        owners.map(|(session, _)| session.clone()).collect()
    }
}

/// How well a text fits a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    /// No image of it has such an assertion.
    OtherCode,
    /// An image has, but only other kernels are in flight, by their names.
    OtherKernels,
    /// Kernels whose names are not known are in flight.
    UnknownKernels,
    /// The kernel that the text names is in flight.
    Kernel,
}

impl SessionShared {
    fn fits(&self, said: &Assertion<'_>, archs: &[u32]) -> Fit {
        let words = [said.file, said.function, said.expression];
        let images = self.launched.images.lock();
        let mut images = images.iter().filter_map(WeakContent::get);
        if !images.any(|image| cubin::holds(&image[..image.len() - 1], archs, &words)) {
            return Fit::OtherCode;
        }
        let has = |slot, value| reached(self.flag(slot), value);
        let mut fit = Fit::OtherKernels;
        for function in self.launched.in_flight(has) {
            let name = match function {
                GRAPH => None,
                function => self.launched.name_of(function),
            };
            fit = fit.max(match (name, said.name()) {
                (Some(kernel), Some(name)) if assertions::names(&kernel, name) => Fit::Kernel,
                (Some(_), Some(_)) => Fit::OtherKernels,
                _ => Fit::UnknownKernels,
            });
        }
        fit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_kernel_is_named_if_its_name_is_known() {
        let launched = Launched::default();
        assert_eq!(launched.kernel(), None);
        launched.name(7, b"fill\0");
        launched.name(8, b"str\x1bay");
        assert_eq!(launched.kernel(), None, "not launched");
        launched.note(8, 0);
        assert_eq!(launched.kernel().as_deref(), Some("stray"));
        // Another function has its position now.
        launched.name(8 | 1 << 32, b"fill");
        assert_eq!(launched.kernel(), None);
        launched.note(7, 0);
        assert_eq!(launched.kernel().as_deref(), Some("fill"));
        launched.note_graph(0);
        assert_eq!(launched.kernel().as_deref(), Some("a graph"));
    }

    #[test]
    fn launches_in_flight_are_remembered() {
        let launched = Launched::default();
        let none = |_, _| false;
        assert!(launched.in_flight(none).is_empty());
        for function in 1..=5 {
            launched.note(function, function as usize % 2);
        }
        assert_eq!(launched.in_flight(none), [1, 2, 3, 4, 5]);
        launched.note_mark(9, 70, 0);
        launched.note(6, 0);
        launched.note_graph(1);
        assert_eq!(launched.in_flight(none), [1, 2, 3, 4, 5, 6, GRAPH]);
        let has = |slot, value| (slot, value) == (9, 70);
        assert_eq!(launched.in_flight(has), [1, 3, 5, 6, GRAPH]);
        launched.note_mark(9, 70, 1);
        assert_eq!(launched.in_flight(has), [6]);
        for _ in 0..RECENT {
            launched.note(9, 0);
        }
        assert_eq!(launched.in_flight(none), [9]);
    }

    #[test]
    fn names_are_bounded() {
        let launched = Launched::default();
        launched.name(1, &[b'x'; 1000]);
        launched.note(1, 0);
        assert_eq!(launched.kernel().map(|name| name.len()), Some(NAME_LEN));
        for function in 0..=MOST_NAMES as u64 {
            launched.name(function, b"kernel");
        }
        assert_eq!(launched.names.lock().len(), MOST_NAMES);
    }
}
