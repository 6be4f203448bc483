//! Drained streams kept for reuse by later sessions.

use mpsshim_api::cuda::CUstream;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Maximum number of streams kept per priority. A client may create thousands and exit a moment later.
const KEPT_STREAMS: usize = 256;

/// Drained streams kept for reuse, by priority.
#[derive(Debug, Default)]
pub struct KeptStreams(Mutex<HashMap<i32, Vec<CUstream>>>);

impl KeptStreams {
    /// Removes and returns a kept stream of this priority.
    pub fn take(&self, priority: i32) -> Option<CUstream> {
        self.0.lock().get_mut(&priority)?.pop()
    }

    /// Whether a stream of this priority is kept.
    pub fn has(&self, priority: i32) -> bool {
        let kept = self.0.lock();
        kept.get(&priority).is_some_and(|kept| !kept.is_empty())
    }

    /// Keeps a stream, or returns it if enough are kept.
    pub fn keep(&self, priority: i32, stream: CUstream) -> Option<CUstream> {
        let mut kept = self.0.lock();
        let kept = kept.entry(priority).or_default();
        if kept.len() >= KEPT_STREAMS {
            return Some(stream);
        }
        kept.push(stream);
        None
    }

    /// Number of kept streams.
    pub fn count(&self) -> usize {
        self.0.lock().values().map(Vec::len).sum()
    }
}
