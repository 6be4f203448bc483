//! Choices of an operator.

use serde::{Deserialize, Serialize};

/// How completion markers are signalled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum MarkKind {
    /// By a kernel if several clients wait often and briefly and the device has room; otherwise as `written`.
    #[default]
    Auto,
    /// By an operation of the stream that writes the client's flag.
    Written,
    /// By a kernel wherever it can be put into one graph with the launches before it; otherwise as `written`.
    Kernel,
}

/// When clients in direct mode take turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum TurnPolicy {
    /// Where throughput is higher with turns than with the driver's time slices, and where clients' shares differ
    #[default]
    Auto,
    /// Always
    Always,
    /// Never: only the clients' memory is counted
    Never,
}

/// Maximum number of kernels in a launch batch: longer batches gain little, and the GPU waits for the first kernel of
/// each.
pub const LAUNCH_RUN: usize = 32;
