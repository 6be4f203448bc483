//! Sessions whose kernel may have caused a fault. The driver does not report which one it was, but only a session with
//! work in flight can have caused it. If the driver prints an assertion message, the session that matches it best
//! receives it.

mod session;

use crate::engine::images::contents::{Content, WeakContent};
use mpsshim_proto::handle::Handle;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// Most kernel names kept per session. A framework loads several thousand.
const MOST_NAMES: usize = 1 << 14;
/// Length in bytes to which a name is truncated.
const NAME_LEN: usize = 200;
/// Stands for a graph in place of a function's handle. Handles have kinds, and none is all ones.
const GRAPH: u64 = u64::MAX;
/// Added to the slot of a client flag, stands for a mark in place of a function's handle.
const MARK: u64 = u64::MAX - (1 << 32);

/// Most launches and marks kept per session.
const RECENT: usize = 128;
/// A session's list of images is purged of unloaded images when it reaches this length, and at each doubling.
const FEW_IMAGES: usize = 64;

/// Recent launches of a session, readable by other threads.
#[derive(Debug, Default)]
pub struct Launched {
    /// Handle of the last function launched, or [`GRAPH`]; 0 if there was none.
    last: AtomicU64,
    /// Number of launches and marks recorded.
    count: AtomicU64,
    /// The latest launches and marks; entry `n % RECENT` holds number `n`.
    recent: Recent,
    images: Mutex<Vec<WeakContent>>,
    /// Handles and names of functions by handle index: a new function replaces the name of a destroyed one with the
    /// same index.
    names: Mutex<HashMap<u32, (u64, Box<str>)>>,
}

#[derive(Debug)]
struct Recent(Box<[Entry; RECENT]>);

impl Default for Recent {
    fn default() -> Recent {
        Recent(Box::new(std::array::from_fn(|_| Entry::default())))
    }
}

/// A launch or a mark. Only the thread that serves the session writes it.
#[derive(Debug, Default)]
struct Entry {
    /// Handle of the function, or [`MARK`] plus a slot; 0 if there was none.
    what: AtomicU64,
    /// Index of the stream in the high half, and the value of a mark in the low half.
    place: AtomicU64,
}

impl Launched {
    /// Records a kernel launch on the stream at this index.
    #[inline]
    pub fn note(&self, function: u64, stream: usize) {
        self.last.store(function, Ordering::Relaxed);
        self.remember(function, stream, 0);
    }

    /// Records a graph launch on the stream at this index.
    pub fn note_graph(&self, stream: usize) {
        self.note(GRAPH, stream);
    }

    /// Records a mark: all launches on the stream so far are complete when the client flag in this slot has this value.
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

    /// Records that the session has an image with this content.
    pub fn note_image(&self, content: &Content) {
        let mut images = self.images.lock();
        if images.len() >= FEW_IMAGES && images.len().is_power_of_two() {
            images.retain(|image| image.get().is_some());
        }
        if !images.iter().any(|image| image.is(content)) {
            images.push(content.weak());
        }
    }

    /// Returns the recorded functions, and [`GRAPH`], whose launches may be incomplete because no later mark of their
    /// stream was reached. `has` tells whether a client flag has reached a value.
    fn in_flight(&self, has: impl Fn(u32, u32) -> bool) -> Vec<u64> {
        let count = self.count.load(Ordering::Acquire);
        let latest_first = (count.saturating_sub(RECENT as u64)..count).rev();
        // Streams with a reached mark later than the current entry.
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

    /// Records the name of the function with this handle.
    pub fn name(&self, function: u64, name: &[u8]) {
        let mut names = self.names.lock();
        let position = Handle(function).index();
        if names.len() < MOST_NAMES || names.contains_key(&position) {
            names.insert(position, (function, printable(name).into()));
        }
    }

    /// Returns the name of the kernel launched last, if it is known.
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

/// Makes a name safe for logs and terminals: no terminator, no control characters, bounded length.
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
        // Another function now has the same index.
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
