//! State shared by all threads of the engine.

use crate::admission::Admission;
use crate::engine::base::owners::Owners;
use crate::engine::base::side::Side;
use crate::engine::gpu::Gpu;
use crate::engine::images::ImageStore;
use crate::engine::images::changes::Changes;
use crate::engine::images::instances::Instance;
use crate::engine::images::residents;
use crate::engine::objects::fairness::Fairness;
use crate::engine::objects::shared_events::SharedEvents;
use crate::engine::objects::shares::Shares;
use crate::engine::objects::trace::traces::Traces;
use crate::engine::session::Session;
use crate::engine::threads::fate::Fate;
use crate::engine::threads::lanes::Lanes;
use crate::engine::threads::lanes::{Dispatcher, Snapshots};
use crate::engine::threads::room::Room;
use crate::engine::threads::roster::Roster;
use crate::engine::threads::slow::SlowLane;
use crate::engine::threads::undertaker::{Buried, Graves};
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use mpsshim_model::client::EngineEvent;
use mpsshim_model::host_memory::HostMemory;
use mpsshim_model::partitions::Partitions;
use mpsshim_model::policy::MarkKind;
use mpsshim_proto::shm::Doorbell;
use parking_lot::{Mutex, RwLock};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize};
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
    /// Static partitions of the clients of a previous server.
    pub partitions: Option<Partitions>,
    /// Pinned host memory that the clients of each user may have.
    pub host_memory: HostMemory,
    /// Directory for device memory that moves and finds no room in pinned memory.
    pub moved_memory_directory: Option<PathBuf>,
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
    /// The sessions that wait for device memory.
    pub room: Room,
    /// The threads' queues.
    pub lanes: Lanes,
    /// Whether the server is resting or stopping.
    pub fate: Fate,
    /// The current trace.
    pub traces: Traces,
    /// Settings.
    pub config: EngineConfig,
}

/// The ends of the queues that the threads read.
pub struct Outlets {
    /// Sessions, for each dispatch thread.
    pub inboxes: Vec<Receiver<Box<Session>>>,
    /// Sessions that are over.
    pub ended: Receiver<Box<Session>>,
    /// Objects that are to be destroyed at a quiescent point.
    pub buried: Receiver<(Side, Buried)>,
    /// Sessions whose variables are to be saved.
    pub resting: Receiver<Box<Session>>,
    /// Instances without sessions that wait for the decision whether they stay loaded.
    pub left: Receiver<Arc<Instance>>,
}

impl Shared {
    /// The shared state of an engine without clients and threads, and the queue ends for its threads. `events` receives
    /// the events for the engine's owner.
    ///
    /// # Errors
    /// If no descriptor is available.
    pub fn new(
        gpu: Gpu,
        config: EngineConfig,
        admission: Arc<Admission>,
        events: Sender<EngineEvent>,
    ) -> io::Result<(Arc<Shared>, Outlets)> {
        let gpu = Arc::new(gpu);
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        let dispatch_threads = match config.dispatch_threads {
            0 => (cpus / 4).clamp(1, 4),
            n => n,
        };
        let (reaper, ended) = unbounded();
        let (undertaker, buried) = unbounded();
        let (snapshots, resting) = unbounded();
        let (assessor, left) = bounded(residents::MOST_ASSESSED);
        let mut inboxes = Vec::new();
        let mut dispatchers = Vec::new();
        for _ in 0..dispatch_threads {
            let (inbox, receiver) = unbounded();
            inboxes.push(receiver);
            dispatchers.push(Dispatcher {
                inbox,
                bell: Doorbell::new()?,
                load: AtomicUsize::new(0),
                active: AtomicUsize::new(0),
            });
        }
        // SAFETY: a plain system call; the descriptor is new and ours.
        let epoll = unsafe {
            let raw = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            if raw < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(raw)
        };
        let to_bury = undertaker.clone();
        let changes = Changes::new(events.clone());
        let images = ImageStore::new(gpu.clone(), assessor, changes, move |unloading| {
            let buried = Buried::from(unloading);
            let _ = to_bury.send((buried.side(), buried));
        });
        let shared = Arc::new(Shared {
            gpu,
            images,
            roster: Roster {
                sessions: Mutex::default(),
                leaving: Mutex::default(),
                limits: Mutex::default(),
                fairness: Fairness::default(),
                admission,
                shares: Shares::default(),
                shared_events: SharedEvents::default(),
                events,
                epoll,
                threads: dispatch_threads,
                cpus,
                crowded: AtomicBool::new(false),
            },
            room: Room::default(),
            lanes: Lanes {
                dispatchers,
                slow: SlowLane::new(),
                snapshots: Snapshots::new(snapshots),
                reaper,
                undertaker,
                gates: Default::default(),
                graves: Side::ALL.map(Graves::new),
                owners: Owners::default(),
                moving: RwLock::default(),
                watcher: OnceLock::new(),
                watcher_idle: AtomicBool::new(false),
            },
            fate: Fate::default(),
            traces: Traces::default(),
            config,
        });
        let outlets = Outlets {
            inboxes,
            ended,
            buried,
            resting,
            left,
        };
        Ok((shared, outlets))
    }
}
