//! Whose kernel may have faulted: the driver does not tell, but only a session with something in flight can have caused it.
//! Where the driver writes a text about it, that goes to whoever it fits best.

mod session;

use crate::engine::images::contents::{Content, WeakContent};
use mpsshim_proto::handle::Handle;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
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
