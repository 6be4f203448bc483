//! What the end-to-end tests share.

#![allow(
    clippy::new_without_default,
    reason = "what starts a daemon is nobody's default"
)]

use std::time::Duration;

/// How long a test waits for what must come. A machine may be slow and busy with other things: only what would never
/// come fails by it.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub mod artifacts;
pub mod control_daemon;
pub mod direct_peer;
pub mod driver;
pub mod fuzzing;
pub mod in_process;
pub mod lingering;
pub mod peer;
pub mod programs;
pub mod refusals;
pub mod scene;
pub mod survivors;
pub mod symbols;
