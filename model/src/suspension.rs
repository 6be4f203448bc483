//! Moves of a client's device memory to host memory and back.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Where the device memory of a client is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Bytes that are in host memory.
    pub moved_out: u64,
    /// Bytes that are on the devices.
    pub resident: u64,
}

/// Why the device memory of a client is not where it was to be moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unmoved {
    /// The client had work in flight until the time was over.
    Busy,
    /// It has made a call meanwhile.
    Resumed,
    /// Its kernels are being captured into a graph.
    Captures,
    /// Its session has ended.
    Ended,
    /// Another such order is being carried out.
    Ordered,
    /// There is not enough free device memory yet.
    NoRoom,
    /// It is in direct mode: its memory is its own process's.
    Direct,
    /// Host memory is lacking, or the driver has failed.
    Failed(String),
}

impl fmt::Display for Unmoved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unmoved::Busy => "it has not been idle within the time",
            Unmoved::Resumed => "it has made a call meanwhile",
            Unmoved::Captures => "a stream of it captures",
            Unmoved::Ended => "it has ended",
            Unmoved::Ordered => "it is being suspended or resumed already",
            Unmoved::NoRoom => "the device has not enough free memory; it comes back when it has",
            Unmoved::Direct => "it is in direct mode, and its memory belongs to its own process",
            Unmoved::Failed(why) => why,
        })
    }
}
