//! State shared by all threads of the engine.

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
    /// Most kernels in a launch batch; 1: each kernel is launched individually.
    pub launch_run: usize,
    /// Longest time for which an idle dispatch thread polls for messages before it sleeps.
    pub max_spin: Duration,
    /// How long a device keeps a further context that no client uses.
    pub further_context: Duration,
}

/// State shared by all threads.
pub struct Shared {
    /// The devices.
    pub gpu: Arc<Gpu>,
    /// The images.
    pub images: ImageStore,
    /// The clients.
    pub roster: Roster,
    /// The threads' queues.
    pub lanes: Lanes,
    /// Whether the server is resting or stopping.
    pub fate: Fate,
    /// The current trace.
    pub traces: Traces,
    /// Settings.
    pub config: EngineConfig,
}
