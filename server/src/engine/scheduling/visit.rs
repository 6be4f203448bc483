//! Outcomes of a dispatch thread's visits to sessions.

use crate::engine::base::side::Side;

/// Outcome of a visit to a session.
pub enum Visit {
    /// There was no message, or the next one waits for the client.
    Idle,
    /// Messages were executed.
    Worked,
    /// The next message waits for work in flight.
    Full,
    /// The next message belongs on the slow lane.
    Slow,
    /// Its variables are to be saved, by the snapshot thread that was reserved.
    Snapshot,
    /// It moves to this side.
    Move(Side),
    /// Its device memory is to be moved to host memory.
    Evict,
    /// Its device memory is to be moved back.
    Refill,
    /// The session is over. With the reason, unless the client disconnected.
    Ended(Option<String>),
}
