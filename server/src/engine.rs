//! The part of the server that executes clients' calls: sessions, dispatch, driver.
//!
//! `mps-server` (the binary) owns the link to the control daemon and drives an [`Engine`]. Continue with
//! `scheduling/dispatch.rs`, then `calls/`.

mod base;
mod calls;
mod gpu;
mod images;
mod lasting;
mod objects;
#[cfg(test)]
mod order;
mod scheduling;
mod session;
#[cfg(test)]
mod testing;
mod threads;

// Public for the fuzz target and tests.
pub use base::bounds;
pub use images::ahead::Ahead;
pub use images::bonds::{ImageBonds, image_bonds, images_of};
pub use images::contents::is_whole;
pub use objects::fairness::LOW_TURN;
pub use objects::runs;

use crate::admission::Admission;
use crate::keeper::Keeper;
use base::bounds::STACK;
pub use base::description::FORMATS;
use base::keeping::Keeping;
use base::printing::Printing;
use base::side::Side;
use crossbeam_channel::Sender;
use gpu::Gpu;
pub use gpu::open::{OpenDriver, describe_driver, list_devices};
use mpsshim_control::closers::Stranger;
use mpsshim_control::link::HandOver;
use mpsshim_control::trace::Run;
use mpsshim_model::client::{ClientInfo, EngineEvent, Newcomer};
use mpsshim_model::limits::{Limits, Usage};
use mpsshim_model::suspension::{Placement, Unmoved};
use mpsshim_proto::handshake::ClientHello;
pub use scheduling::dispatch::GOES_ON_ELSEWHERE;
pub use scheduling::resting::{Leaving, Parting, Rested};
pub use session::suspension::Order as MemoryOrder;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use threads::gate::Gate;
pub use threads::shared::EngineConfig;
use threads::shared::Shared;
use threads::slow::SlowTask;

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
    /// Blocks until ready, some hundred milliseconds on a GPU. Later events are sent to `events`. `ahead`: images loaded for
    /// these sessions.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn start(
        (opened, ahead): (OpenDriver, Ahead),
        config: EngineConfig,
        keeper: Option<Arc<Keeper>>,
        admission: Arc<Admission>,
        events: Sender<EngineEvent>,
    ) -> anyhow::Result<Engine> {
        use anyhow::Context;
        opened.attach().context("the first device's context")?;
        let OpenDriver {
            arena,
            driver,
            devices,
        } = opened;
        let printing = Printing::capture().context("standard output")?;
        let keeping = Keeping::new(keeper);
        let settings = (config.marks, config.launch_run);
        let host_memory = config.host_memory.clone();
        let partitions = config.partitions.clone();
        let opened = (driver, devices, arena);
        let mut gpu = Gpu::new(opened, printing, keeping, settings, host_memory)
            .context("the server's flags")?;
        gpu.directory = config.moved_memory_directory.clone();
        // SAFETY: no handler is installed. A client causes this signal if it opens a file on which `shm::is_sole` holds
        // a lease.
        unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
        base::assertions::capture().context("standard error")?;
        let (shared, outlets) =
            Shared::new(gpu, config, admission, events).context("the queues of the threads")?;
        shared.images.take_over(ahead);
        shared.decide_on_loss();
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
        for (me, inbox) in outlets.inboxes.into_iter().enumerate() {
            spawn(
                format!("dispatch-{me}"),
                Box::new(move |shared| scheduling::dispatch::run(shared, me, &inbox)),
            )?;
        }
        spawn("watcher".into(), Box::new(scheduling::watcher::run))?;
        spawn("slow-watch".into(), Box::new(threads::slow::run::watch))?;
        spawn(
            "reaper".into(),
            Box::new(move |shared| scheduling::reaper::run(shared, &outlets.ended)),
        )?;
        spawn(
            "snapshots".into(),
            Box::new(move |shared| objects::snapshot::session::run(shared, &outlets.resting)),
        )?;
        spawn(
            "undertaker".into(),
            Box::new(move |shared| threads::undertaker::run::run(shared, &outlets.buried)),
        )?;
        spawn(
            "residents".into(),
            Box::new(move |shared| images::residents::run(&shared.images, &outlets.left)),
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
            .set(threads[shared.lanes.dispatchers.len()].thread().clone());
        shared.roster.limits.lock().partitions = partitions;
        scheduling::adopt::run(&shared).context("sessions of the server before")?;
        Ok(Engine { shared, threads })
    }

    /// Takes over a client's connection. Never blocks; the outcome comes as an event.
    pub fn add_client(&self, socket: OwnedFd, hello: ClientHello, newcomer: Newcomer) {
        let socket = Stranger::new(socket, newcomer.who.uid);
        let setup = SlowTask::Setup(socket, Box::new(hello), newcomer);
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

    /// Sets the limits of clients that connect from now on, and the scheduling and the users' guarantees of all clients.
    pub fn set_limits(&self, limits: Limits) {
        let before = std::mem::replace(&mut *self.shared.roster.limits.lock(), limits);
        self.shared.change_scheduling(&before.scheduling);
        self.shared.share_guarantees();
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

    /// Starts or ends the reports of the devices on which clients have work in flight ([`EngineEvent::Work`]).
    pub fn report_work(&self, on: bool) {
        threads::work_reports::set(&self.shared, on);
    }

    /// Holds new work of all clients back for this time from now on, at most 100 ms; zero: lets it through.
    pub fn hold(&self, time: Duration) {
        self.shared.gpu.hold.set(time);
    }

    /// Whether the daemon gives sessions servers of their own that need one ([`EngineEvent::NeedsOwnServer`]).
    pub fn separate(&self, on: bool) {
        self.shared.fate.separates.store(on, Ordering::Relaxed);
    }

    /// A session that has asked for a server of its own stays here. Unknown sessions are ignored.
    pub fn share_server(&self, session: u64) {
        if let Some(session) = self.shared.roster.session(session) {
            session.own_server.stays();
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

    /// Moves the device memory of a session to host memory within `patience`, or back, and sends where it is then.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn move_memory(
        &self,
        session: u64,
        order: MemoryOrder,
        patience: Duration,
        outcome: impl FnOnce(Result<Placement, Unmoved>) + Send + 'static,
    ) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let started = std::thread::Builder::new()
            .name("move-memory".into())
            .spawn(move || outcome(shared.move_memory(session, order, patience)));
        started.map(drop)
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

    /// Unloads images without clients, and gives back pinned memory kept for moves, at the next quiescent point.
    pub fn give_back_unused(&self) {
        self.shared.images.give_up_residents();
        self.shared.release_all_move_pools();
    }

    /// Starts or stops tracing; returns when everything recorded has been delivered.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn trace(&self, run: Option<Arc<Run>>) -> std::io::Result<()> {
        self.shared.trace(run)
    }

    /// Brings the sessions to rest for the next server, as requested, and sends their numbers. If some stay, the objects of
    /// the rest are freed, with [`EngineEvent::Gone`] for each, and a connection to their new keeper is sent
    /// ([`Leaving::parting`]). If all are at rest, nothing is executed any more, and the process has to end.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn hand_over(&self, request: HandOver, outcome: Sender<Rested>) -> std::io::Result<()> {
        let shared = Arc::clone(&self.shared);
        // It may be called off before the thread runs.
        shared.fate.begin_hand_over();
        let started = std::thread::Builder::new()
            .name("hand-over".into())
            .spawn(move || {
                // Sending fails only if the requester has gone.
                let _ = outcome.send(shared.hand_over(&request));
            });
        started.map(drop)
    }

    /// A temporary keeper with the images of all sessions and the sessions' descriptions, for a standby that loads the images
    /// ahead.
    ///
    /// # Errors
    /// There is no keeper, in words.
    pub fn images_in_use(&self) -> Result<Keeper, String> {
        self.shared.images_in_use()
    }

    /// Cancels the hand-over, if it is not too late: all sessions continue.
    pub fn go_on(&self) {
        if self.shared.fate.call_off() {
            self.shared.lanes.wake_dispatchers();
        }
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
