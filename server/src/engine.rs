//! The part of the server that executes clients' calls: sessions, dispatch, driver.
//!
//! `mps-server` (the binary) owns the link to the control daemon and drives an [`Engine`]. Continue with
//! `scheduling/dispatch.rs`, then `calls/`.

mod base;
mod calls;
mod gpu;
mod images;
mod objects;
#[cfg(test)]
mod order;
mod scheduling;
mod session;
mod threads;

// Public for the fuzz target and tests.
pub use base::bounds;
pub use images::contents::is_whole;
pub use objects::fairness::LOW_TURN;
pub use objects::runs;

use crate::admission::Admission;
use crate::keeper::Keeper;
use base::bounds::STACK;
use base::graph_turns::GraphTurns;
use base::health::Health;
use base::keeping::Keeping;
use base::printing::Printing;
use base::rations::Rations;
use base::side::Side;
use crossbeam_channel::{Sender, bounded, unbounded};
use gpu::Gpu;
use gpu::host::ServerFlags;
pub use gpu::open::{OpenDriver, list_devices};
use gpu::spare::Spare;
use gpu::virtual_arena::VirtualArena;
use images::ImageStore;
use mpsshim_api::cuda::*;
use mpsshim_control::closers::Stranger;
use mpsshim_control::trace::Run;
use mpsshim_model::client::{ClientInfo, Credentials, EngineEvent};
use mpsshim_model::limits::{Limits, Usage};
use mpsshim_proto::handshake::ClientHello;
use mpsshim_proto::shm::Doorbell;
use objects::fairness::Fairness;
use objects::shared_events::SharedEvents;
use objects::shares::Shares;
use objects::trace::traces::Traces;
use parking_lot::{Mutex, RwLock};
pub use scheduling::resting::Rested;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use threads::fate::Fate;
use threads::gate::Gate;
use threads::lanes::Dispatcher;
use threads::lanes::Lanes;
use threads::lanes::Snapshots;
use threads::roster::Roster;
pub use threads::shared::EngineConfig;
use threads::shared::Shared;
use threads::slow::{SlowLane, SlowTask};
use threads::undertaker::{Buried, Graves};

/// Driver objects without a session, kept for reuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Drained streams.
    pub streams: usize,
    /// Green contexts for clients with a percentage.
    pub green_contexts: usize,
}

/// A running engine.
pub struct Engine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Engine {
    /// Creates the context of the first device, starts the threads, and restores the sessions known to the keeper.
    /// Blocks until ready, some hundred milliseconds on a GPU. Later events are sent to `events`.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn start(
        opened: OpenDriver,
        config: EngineConfig,
        keeper: Option<Arc<Keeper>>,
        admission: Arc<Admission>,
        events: Sender<EngineEvent>,
    ) -> anyhow::Result<Engine> {
        use anyhow::Context;
        let OpenDriver {
            arena,
            driver,
            devices,
        } = opened;
        devices
            .first()
            .context("the driver has no device")?
            .attach(&driver)
            .context("the first device's context")?;
        let gpu = Arc::new(Gpu {
            virtual_arena: VirtualArena::new(&driver),
            flags: ServerFlags::new(&driver).context("the server's flags")?,
            driver,
            devices,
            arena,
            held_files: Rations::of_files(),
            spare: Spare::default(),
            health: Health::default(),
            keeping: Keeping::new(keeper.clone()),
            calm: Default::default(),
            printing: Printing::capture().context("standard output")?,
            graph_turns: GraphTurns::default(),
            marks: config.marks,
            launch_run: config.launch_run,
            synchronizing: AtomicUsize::new(0),
            tracing: AtomicBool::new(false),
            streams: AtomicU32::new(0),
        });
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        let dispatch_threads = match config.dispatch_threads {
            0 => (cpus / 4).clamp(1, 4),
            n => n,
        };
        let (reaper, ended) = unbounded();
        let (undertaker, buried) = unbounded();
        let (snapshots, resting) = unbounded();
        let (assessor, left) = bounded(images::residents::MOST_ASSESSED);
        let mut inboxes = Vec::new();
        let mut dispatchers = Vec::new();
        for _ in 0..dispatch_threads {
            let (inbox, receiver) = unbounded();
            inboxes.push(receiver);
            let bell = Doorbell::new().context("a dispatch thread's doorbell")?;
            dispatchers.push(Dispatcher {
                inbox,
                bell,
                load: AtomicUsize::new(0),
                active: AtomicUsize::new(0),
            });
        }
        // SAFETY: no handler is installed. A client causes this signal if it opens a file on which `shm::is_sole` holds
        // a lease.
        unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
        // SAFETY: a plain system call; the descriptor is new and ours.
        let epoll = unsafe {
            let raw = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            anyhow::ensure!(
                raw >= 0,
                "epoll_create1: {}",
                std::io::Error::last_os_error()
            );
            OwnedFd::from_raw_fd(raw)
        };
        base::assertions::capture().context("standard error")?;
        let to_bury = undertaker.clone();
        let images = ImageStore::new(gpu.clone(), keeper, assessor, move |unloading| {
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
            lanes: Lanes {
                dispatchers,
                slow: SlowLane::new(),
                snapshots: Snapshots::new(snapshots),
                reaper,
                undertaker,
                gates: Default::default(),
                graves: Side::ALL.map(Graves::new),
                moving: RwLock::default(),
                watcher: OnceLock::new(),
                watcher_idle: AtomicBool::new(false),
            },
            fate: Fate::default(),
            traces: Traces::default(),
            config,
        });
        let deciding = Arc::downgrade(&shared);
        shared.gpu.health.on_loss(move |status| {
            if let Some(shared) = deciding.upgrade() {
                shared.decide(status);
            }
        });
        let mut threads = Vec::new();
        type Body = Box<dyn FnOnce(&Arc<Shared>) + Send>;
        let mut spawn = |name: String, body: Body| -> anyhow::Result<()> {
            let shared = shared.clone();
            threads.push(
                std::thread::Builder::new()
                    .name(name)
                    .stack_size(STACK)
                    .spawn(move || body(&shared))?,
            );
            Ok(())
        };
        for (me, inbox) in inboxes.into_iter().enumerate() {
            spawn(
                format!("dispatch-{me}"),
                Box::new(move |shared| scheduling::dispatch::run(shared, me, &inbox)),
            )?;
        }
        spawn("watcher".into(), Box::new(scheduling::watcher::run))?;
        spawn("slow-watch".into(), Box::new(threads::slow::run::watch))?;
        spawn(
            "reaper".into(),
            Box::new(move |shared| scheduling::reaper::run(shared, &ended)),
        )?;
        spawn(
            "snapshots".into(),
            Box::new(move |shared| objects::snapshot::session::run(shared, &resting)),
        )?;
        spawn(
            "undertaker".into(),
            Box::new(move |shared| threads::undertaker::run::run(shared, &buried)),
        )?;
        spawn(
            "residents".into(),
            Box::new(move |shared| images::residents::run(&shared.images, &left)),
        )?;
        for side in Side::ALL {
            let name = format!("gate-{}", side.index());
            spawn(
                name,
                Box::new(move |shared| threads::gate::run::run(shared, side)),
            )?;
        }
        spawn("sockets".into(), Box::new(scheduling::watcher::run_sockets))?;
        for _ in 0..threads::slow::run::THREADS {
            threads::slow::run::start_thread(&shared)?;
        }
        let _ = shared
            .lanes
            .watcher
            .set(threads[dispatch_threads].thread().clone());
        scheduling::adopt::run(&shared).context("sessions of the server before")?;
        Ok(Engine { shared, threads })
    }

    /// Takes over a client's connection. Never blocks; the outcome comes as an event.
    pub fn add_client(&self, socket: OwnedFd, hello: ClientHello, who: Credentials) {
        let socket = Stranger::new(socket, who.uid);
        let setup = SlowTask::Setup(socket, Box::new(hello), who);
        self.shared.lanes.send_slow(setup);
    }

    /// Clients with a live session.
    pub fn clients(&self) -> Vec<ClientInfo> {
        let mut clients: Vec<ClientInfo> = self
            .shared
            .roster
            .session_list()
            .iter()
            .map(|session| session.info.clone())
            .collect();
        clients.sort_by_key(|client| client.session);
        clients
    }

    /// Ends a session: its client's calls return `CUDA_ERROR_MPS_CLIENT_TERMINATED` from now on, and its objects are
    /// freed when its work on the device is done. [`EngineEvent::Gone`] follows. Unknown sessions are ignored.
    pub fn terminate(&self, session: u64) {
        if let Some(session) = self.shared.roster.session(session) {
            session.terminated.store(true, Ordering::SeqCst);
            session.hung_up.store(true, Ordering::SeqCst);
            session.bell.ring();
        }
    }

    /// Sets the limits of clients that connect from now on.
    pub fn set_limits(&self, limits: Limits) {
        *self.shared.roster.limits.lock() = limits;
    }

    /// Sets a client's weight. Unknown sessions are ignored.
    pub fn set_weight(&self, session: u64, weight: u32) {
        if let Some(session) = self.shared.roster.session(session) {
            self.shared
                .roster
                .fairness
                .set_weight(&session.standing, weight);
            session.description.set_weight(weight);
        }
    }

    /// Usage of all clients, in the order of their arrival.
    pub fn usage(&self) -> Vec<Usage> {
        let mut usage: Vec<Usage> = self
            .shared
            .roster
            .session_list()
            .iter()
            .map(|session| session.usage())
            .collect();
        usage.sort_by_key(|client| client.session);
        usage
    }

    /// Number of quiescent points that the gate has opened for clients' calls.
    pub fn gate_moments(&self) -> u64 {
        self.shared.lanes.gates.iter().map(Gate::opened).sum()
    }

    /// Number of driver objects kept for later sessions, by kind.
    pub fn kept(&self) -> Kept {
        let mut all = Kept::default();
        for device in self.shared.gpu.devices.iter() {
            let (streams, greens) = device.kept();
            all.streams += streams;
            all.green_contexts += greens;
        }
        all
    }

    /// Unloads images without clients at the next quiescent point.
    pub fn unload_images(&self) {
        self.shared.images.give_up_residents();
    }

    /// Starts or stops tracing; returns when everything recorded has been delivered.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn trace(&self, run: Option<Arc<Run>>) -> std::io::Result<()> {
        self.shared.trace(run)
    }

    /// Brings all sessions to rest within `patience` and sends their number. From then on nothing is executed, and the
    /// process has to end. With `force`, sessions that cannot continue elsewhere are ended. Without it, if there are
    /// such sessions, descriptions of their clients with the reasons are sent instead, and all sessions continue.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn hand_over(
        &self,
        patience: Duration,
        force: bool,
        outcome: Sender<Rested>,
    ) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let started = std::thread::Builder::new()
            .name("hand-over".into())
            .spawn(move || {
                // Sending fails only if the requester has gone.
                let _ = outcome.send(shared.come_to_rest(patience, force));
            });
        started.map(drop)
    }

    /// Cancels the hand-over: all sessions continue.
    pub fn go_on(&self) {
        self.shared.fate.resting.store(0, Ordering::SeqCst);
        self.shared.lanes.wake_dispatchers();
    }

    /// Ends every session (clients get `CUDA_ERROR_MPS_RPC_FAILURE`), waits up to two seconds for their work, and stops
    /// the dispatch threads. The contexts are destroyed with the process.
    pub fn shutdown(mut self) {
        let shared = &self.shared;
        shared.fate.stopping.store(true, Ordering::SeqCst);
        for dispatcher in &shared.lanes.dispatchers {
            dispatcher.bell.ring();
        }
        for thread in self.threads.drain(..shared.lanes.dispatchers.len()) {
            let _ = thread.join();
        }
        shared.lanes.wake_watcher();
        let patience = Instant::now() + Duration::from_secs(2);
        while shared.roster.admission.alive() > 0 && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Shared {
    /// Handles the loss of a context: chooses the sessions that continue in the next server, and ends the others.
    fn decide(&self, status: CUresult) {
        let mut going_on = 0;
        let mut ending = Vec::new();
        let mut at_work = self.roster.leaving_at_work();
        for session in self.roster.session_list() {
            let is_at_rest = session.is_at_rest();
            if is_at_rest && session.description.bonds().is_empty() {
                session.description.set_outlives();
                going_on += 1;
                continue;
            }
            if !is_at_rest {
                at_work.push(session.clone());
            }
            ending.push(session);
        }
        // This must happen before any client can see the status.
        self.hand_out_text(status, &at_work);
        let mut suspects = Vec::new();
        for session in &at_work {
            session.add_to(&mut suspects);
        }
        for session in ending {
            session.end(status);
            self.gpu.keeping.forget_session(session.info.session);
        }
        self.gpu.health.set_decided();
        self.roster.tell(EngineEvent::Fault {
            status: status.0,
            going_on,
            suspects,
        });
    }
}
