//! Hooks that run whenever a thread has waited for work, or has seen that it is complete. A module adds its hook when
//! it first has something to do then, so that programs without hooks pay for one load only.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use crate::proxy::submit::Session;

/// The work that is known to be complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seen {
    /// A stream, as a query has shown.
    Query,
    /// Streams that were waited for.
    Wait,
    /// All work that the process had given to streams.
    All,
}

/// Called with the work that is known to be complete.
pub type Hook = fn(&Session, Seen);

static ANY: AtomicBool = AtomicBool::new(false);
static HOOKS: RwLock<Vec<Hook>> = RwLock::new(Vec::new());

/// Calls `hook` after every wait from now on. To be called once for each.
pub fn add(hook: Hook) {
    HOOKS.write().push(hook);
    ANY.store(true, Ordering::Release);
}

/// A thread has seen that work is complete.
#[inline]
pub fn done(session: &Session, seen: Seen) {
    if ANY.load(Ordering::Acquire) {
        run(session, seen);
    }
}

#[cold]
fn run(session: &Session, seen: Seen) {
    // No lock is held meanwhile: a hook may wait itself.
    let hooks = HOOKS.read().clone();
    for hook in hooks {
        hook(session, seen);
    }
}
