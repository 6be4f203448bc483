//! Counts faults, and the time that threads wait for them, for operators: the server shows the numbers.

use crate::proxy::submit::session;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A fault of the calling thread, which waits until this is dropped. Async-signal-safe.
pub struct Fault(Instant);

impl Fault {
    pub fn begin() -> Fault {
        Fault(Instant::now())
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        let Ok(session) = session() else {
            return;
        };
        let (counts, waited) = (&session.header().faults.0, self.0.elapsed());
        counts.faults.fetch_add(1, Ordering::Relaxed);
        counts
            .waited_ns
            .fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
    }
}
