//! Whose kernel may have faulted: the driver does not tell, but only a session with something in flight can have caused it.

use super::Shared;
use super::session::SessionShared;
use mpsshim_model::client::Suspect;
use mpsshim_proto::handle::Handle;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names of kernels that are known of one session. A framework loads some thousand.
const MOST_NAMES: usize = 1 << 14;
/// Bytes of a name that are kept.
const NAME_LEN: usize = 200;
/// Stands for the handle of a function. Handles have kinds, and none is all ones.
const GRAPH: u64 = u64::MAX;

/// What a session launched last, for other threads.
#[derive(Debug, Default)]
pub struct Launched {
    /// Handle of the function; 0: nothing yet.
    last: AtomicU64,
    /// Functions and their names, by position: whatever has the place of one that is gone takes that of its name.
    names: Mutex<HashMap<u32, (u64, Box<str>)>>,
}

impl Launched {
    /// A kernel was launched.
    #[inline]
    pub fn note(&self, function: u64) {
        self.last.store(function, Ordering::Relaxed);
    }

    /// A graph was.
    pub fn note_graph(&self) {
        self.note(GRAPH);
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
            function => {
                let names = self.names.lock();
                let (named, name) = names.get(&Handle(function).index())?;
                (*named == function).then(|| name.to_string())
            }
        }
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
    pub fn suspects_among_leaving(&self) -> Vec<Suspect> {
        let mut suspects = Vec::new();
        for session in self.leaving.lock().values() {
            if !session.is_at_rest() {
                session.add_to(&mut suspects);
            }
        }
        suspects
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
        launched.note(8);
        assert_eq!(launched.kernel().as_deref(), Some("stray"));
        // Another function has its position now.
        launched.name(8 | 1 << 32, b"fill");
        assert_eq!(launched.kernel(), None);
        launched.note(7);
        assert_eq!(launched.kernel().as_deref(), Some("fill"));
        launched.note_graph();
        assert_eq!(launched.kernel().as_deref(), Some("a graph"));
    }

    #[test]
    fn names_are_bounded() {
        let launched = Launched::default();
        launched.name(1, &[b'x'; 1000]);
        launched.note(1);
        assert_eq!(launched.kernel().map(|name| name.len()), Some(NAME_LEN));
        for function in 0..=MOST_NAMES as u64 {
            launched.name(function, b"kernel");
        }
        assert_eq!(launched.names.lock().len(), MOST_NAMES);
    }
}
