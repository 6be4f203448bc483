//! Streams that are kept for the next session that wants one.

use mpsshim_api::cuda::CUstream;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Streams of one priority that are kept at a time. A client may have thousands, and be gone a moment later.
const KEPT_STREAMS: usize = 256;

/// Drained streams that are kept for who needs one next, by priority.
#[derive(Debug, Default)]
pub struct KeptStreams(Mutex<HashMap<i32, Vec<CUstream>>>);

impl KeptStreams {
    /// One that was kept.
    pub fn take(&self, priority: i32) -> Option<CUstream> {
        self.0.lock().get_mut(&priority)?.pop()
    }

    /// Whether one was kept.
    pub fn has(&self, priority: i32) -> bool {
        let kept = self.0.lock();
        kept.get(&priority).is_some_and(|kept| !kept.is_empty())
    }

    /// Keeps one, or gives it back where there are enough.
    pub fn keep(&self, priority: i32, stream: CUstream) -> Option<CUstream> {
        let mut kept = self.0.lock();
        let kept = kept.entry(priority).or_default();
        if kept.len() >= KEPT_STREAMS {
            return Some(stream);
        }
        kept.push(stream);
        None
    }

    /// How many are kept.
    pub fn count(&self) -> usize {
        self.0.lock().values().map(Vec::len).sum()
    }
}
