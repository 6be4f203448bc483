//! Whether the server goes on: attempts to bring all sessions to rest for the next server, and the stop.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The server's fate.
#[derive(Debug, Default)]
pub struct Fate {
    /// Number of the present attempt to bring all sessions to rest; 0: there is none.
    pub resting: AtomicU64,
    /// Number of attempts so far.
    pub rests: AtomicU64,
    /// The server stops.
    pub stopping: AtomicBool,
}

impl Fate {
    /// Whether sessions are being brought to rest, or are at rest.
    #[inline]
    pub fn is_resting(&self) -> bool {
        self.resting.load(Ordering::Relaxed) != 0
    }
}
