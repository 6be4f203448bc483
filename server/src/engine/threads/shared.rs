//! What all threads of the engine share.

use crate::engine::gpu::Gpu;
use crate::engine::images::ImageStore;
use crate::engine::objects::trace::traces::Traces;
use crate::engine::threads::fate::Fate;
use crate::engine::threads::lanes::Lanes;
use crate::engine::threads::roster::Roster;
use mpsshim_model::policy::MarkKind;
use std::sync::Arc;
use std::time::Duration;

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Dispatch threads; 0: chosen from the number of CPUs.
    pub dispatch_threads: usize,
    /// How completion markers are written.
    pub marks: MarkKind,
    /// Kernels that are given to the driver at a time, at most; 1: each by itself.
    pub launch_run: usize,
    /// How long an idle dispatch thread polls for messages before it sleeps, at most.
    pub max_spin: Duration,
    /// How long a device keeps a further context that no client uses.
    pub further_context: Duration,
}

/// What all threads share.
pub struct Shared {
    /// The devices.
    pub gpu: Arc<Gpu>,
    /// The images.
    pub images: ImageStore,
    /// The clients.
    pub roster: Roster,
    /// The threads' queues.
    pub lanes: Lanes,
    /// Whether the server goes on.
    pub fate: Fate,
    /// The present trace.
    pub traces: Traces,
    /// Settings.
    pub config: EngineConfig,
}
