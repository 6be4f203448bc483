//! Choices of an operator.

use serde::{Deserialize, Serialize};

/// How a mark is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum MarkKind {
    /// A kernel writes the flags of clients that often wait for little, with others that do; else as `written`.
    #[default]
    Auto,
    /// An operation of the stream writes the client's flag.
    Written,
    /// A kernel writes the flag wherever it can be one graph with the launches before it; else as `written`.
    Kernel,
}

/// When clients in direct mode take turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum TurnPolicy {
    /// Where more gets done so than with the driver's time slices, and where shares differ
    #[default]
    Auto,
    /// Always
    Always,
    /// Never: only their memory is counted
    Never,
}

/// Kernels of a run of launches at most: longer ones gain little, and the GPU waits for the first of them.
pub const LAUNCH_RUN: usize = 32;
