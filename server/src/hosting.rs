//! Assignment of clients: the engine serves those in proxy mode, the arbiter those in direct mode. Both number their sessions from
//! one count and report to one channel.

use crate::admission::{self, Admission};
use crate::arbiter::Arbiter;
use crate::engine::{Ahead, Engine, EngineConfig, Kept, Leaving, MemoryOrder, OpenDriver, Rested};
use crate::keeper::Keeper;
use crate::serve::Host;
use crossbeam_channel::{Receiver, Sender, bounded};
use mpsshim_api::cuda::{
    CUDA_ERROR_DEVICE_UNAVAILABLE, CUDA_ERROR_MPS_CONNECTION_FAILED, CUDA_ERROR_NOT_SUPPORTED,
    CUresult,
};
use mpsshim_control::closers::Stranger;
use mpsshim_control::link::{HandOver, MoveMemory};
use mpsshim_control::trace::{self, Run, Totals};
use mpsshim_model::client::{EngineEvent, Newcomer};
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::host_memory::HostMemory;
use mpsshim_model::limits::{Limits, Usage};
use mpsshim_model::mode::by_device::DeviceModes;
use mpsshim_model::mode::{Mode, Modes};
use mpsshim_model::partitions::Partitions;
use mpsshim_model::policy::MarkKind;
use mpsshim_model::policy::TurnPolicy;
use mpsshim_model::suspension::Unmoved;
use mpsshim_proto::handshake::ClientHello;
use parking_lot::Mutex;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How clients are served here.
#[derive(Clone, Debug)]
pub struct HostingConfig {
    /// The genuine driver, when not the one the loader finds.
    pub cuda_library: Option<PathBuf>,
    /// NVIDIA's management library, when not the one the loader finds.
    pub nvml_library: Option<PathBuf>,
    /// Maximum number of clients; further ones are refused with `CUDA_ERROR_MPS_MAX_CLIENTS_REACHED`.
    pub max_clients: usize,
    /// Modes of clients that do not request one.
    pub modes: Modes,
    /// The `CUDA_VISIBLE_DEVICES` of this process.
    pub visible_devices: Option<String>,
    /// When clients in direct mode take turns.
    pub turns: TurnPolicy,
    /// Number of dispatch threads of the engine; 0: derived from the number of CPUs.
    pub dispatch_threads: usize,
    /// How streams signal completion markers to the engine and its clients.
    pub marks: MarkKind,
    /// Maximum number of kernels in a launch batch.
    pub launch_run: usize,
    /// Static partitions of the clients of a previous server.
    pub partitions: Option<Partitions>,
    /// Pinned host memory that the clients of each user may have.
    pub host_memory: HostMemory,
    /// Directory for device memory that moves and finds no room in pinned memory.
    pub moved_memory_directory: Option<PathBuf>,
    /// How long an idle dispatch thread of the engine polls for calls before it sleeps, at most.
    pub max_spin: Duration,
    /// How long an unused further context of a device is kept.
    pub further_context: Duration,
}

impl HostingConfig {
    fn engine(&self) -> EngineConfig {
        EngineConfig {
            dispatch_threads: self.dispatch_threads,
            marks: self.marks,
            launch_run: self.launch_run,
            partitions: self.partitions.clone(),
            host_memory: self.host_memory.clone(),
            moved_memory_directory: self.moved_memory_directory.clone(),
            max_spin: self.max_spin,
            further_context: self.further_context,
        }
    }
}

/// A client that waits for the engine.
type Arrival = (OwnedFd, ClientHello, Newcomer);

/// State of the engine.
enum Proxy {
    /// No client has needed it yet.
    Absent(Box<OpenDriver>),
    /// A thread is creating its contexts; these clients wait.
    Starting(Vec<Arrival>),
    Running(Engine),
    /// Why it cannot start.
    Failed(String),
}

/// Engine and arbiter, each started for its first client.
struct Parts {
    proxy: Proxy,
    arbiter: Option<Arbiter>,
    limits: Limits,
    /// The daemon wants to know where clients have work in flight.
    reports_work: bool,
    /// The daemon gives sessions servers of their own.
    separates: bool,
    trace: Option<(Arc<Run>, trace::Writer)>,
}

/// Serves clients of both modes.
pub struct Hosting {
    config: HostingConfig,
    devices: Vec<DeviceInfo>,
    modes: DeviceModes,
    uuids: Vec<[u8; 16]>,
    admission: Arc<Admission>,
    events: Sender<EngineEvent>,
    keeper: Option<Arc<Keeper>>,
    parts: Arc<Mutex<Parts>>,
}

impl Hosting {
    /// If proxy mode is the mode of the first device, the engine is started too: it creates that device's context,
    /// which takes some hundred milliseconds on a GPU. Otherwise no context is created until a client gets proxy mode.
    /// Sessions of a previous server that the keeper holds are continued, with the images loaded `ahead`; without a keeper,
    /// sessions end with this server.
    ///
    /// # Errors
    /// The driver fails.
    pub fn start(
        (opened, ahead): (OpenDriver, Ahead),
        config: HostingConfig,
        keeper: Option<Keeper>,
        events: Sender<EngineEvent>,
    ) -> anyhow::Result<Hosting> {
        let (devices, uuids) = (opened.devices(), opened.uuids());
        let admission = Arc::new(Admission::new(config.max_clients));
        let visible = config.visible_devices.as_deref();
        let (modes, wrong) = DeviceModes::new(&config.modes, &devices, visible);
        for why in wrong {
            tracing::error!("--mode {}: {why}", config.modes);
        }
        let goes_on = keeper.as_ref().is_some_and(Keeper::has_sessions);
        let keeper = keeper.map(Arc::new);
        let proxy = match modes.of_first() {
            Mode::Direct if !goes_on => Proxy::Absent(Box::new(opened)),
            _ => {
                let (admission, events) = (Arc::clone(&admission), events.clone());
                let (config, keeper) = (config.engine(), keeper.clone());
                let opened = (opened, ahead);
                let engine = Engine::start(opened, config, keeper, admission, events)?;
                Proxy::Running(engine)
            }
        };
        let parts = Parts {
            proxy,
            arbiter: None,
            limits: Limits::default(),
            reports_work: false,
            separates: false,
            trace: None,
        };
        Ok(Hosting {
            config,
            devices,
            modes,
            uuids,
            admission,
            events,
            keeper,
            parts: Arc::new(Mutex::new(parts)),
        })
    }

    /// Objects that the engine keeps for future sessions.
    pub fn kept(&self) -> Kept {
        match &self.parts.lock().proxy {
            Proxy::Running(engine) => engine.kept(),
            _ => Kept::default(),
        }
    }

    /// Unloads images that no client uses any more, and gives back pinned memory kept for moves.
    pub fn give_back_unused(&self) {
        if let Proxy::Running(engine) = &self.parts.lock().proxy {
            engine.give_back_unused();
        }
    }

    /// Why a client of this mode cannot be served now, in words: a device that is not in the default compute mode admits
    /// either this process or one client in direct mode.
    fn why_unavailable(&self, mode: Mode) -> Option<String> {
        let mut exclusive = self.devices.iter().enumerate();
        let (ordinal, device) = exclusive.find(|(_, device)| device.is_exclusive())?;
        let parts = self.parts.lock();
        let direct = parts.arbiter.as_ref();
        let direct = direct.map_or(0, |arbiter| arbiter.usage().len());
        let shared = !matches!(parts.proxy, Proxy::Absent(_));
        let compute_mode = device.compute_mode;
        match mode {
            Mode::Proxy if direct == 0 => None,
            Mode::Proxy => Some(format!(
                "device {ordinal} is in {compute_mode} mode, and a client in direct mode has it"
            )),
            Mode::Direct if direct == 0 && !shared => None,
            Mode::Direct => Some(format!(
                "device {ordinal} is in {compute_mode} mode, in which a client in direct mode cannot share it; use proxy \
                 mode, or have an administrator set the mode with nvidia-smi -c DEFAULT"
            )),
        }
    }

    fn refuse(&self, (socket, _, newcomer): Arrival, status: CUresult, why: String) {
        let who = newcomer.who;
        let socket = Stranger::new(socket, who.uid);
        admission::refuse(&self.events, &socket, who, status, why);
    }

    fn add_direct(&self, arrival: Arrival) {
        let mut parts = self.parts.lock();
        if parts.arbiter.is_none() {
            let (admission, events) = (Arc::clone(&self.admission), self.events.clone());
            match Arbiter::start(&self.uuids, self.config.turns, admission, events) {
                Ok(arbiter) => {
                    arbiter.count_overheads(&self.uuids, self.config.nvml_library.clone());
                    arbiter.set_limits(parts.limits.clone());
                    if let Some((run, _)) = &parts.trace {
                        arbiter.trace(Some(Arc::clone(run)));
                    }
                    parts.arbiter = Some(arbiter);
                }
                Err(error) => {
                    let why = format!("the arbiter of direct mode cannot start: {error}");
                    return self.refuse(arrival, CUDA_ERROR_MPS_CONNECTION_FAILED, why);
                }
            }
        }
        if let Some(arbiter) = &parts.arbiter {
            let (socket, hello, newcomer) = arrival;
            arbiter.add_client(socket, hello, newcomer);
        }
    }

    fn add_proxied(&self, arrival: Arrival) {
        let mut parts = self.parts.lock();
        match &mut parts.proxy {
            Proxy::Running(engine) => {
                let (socket, hello, newcomer) = arrival;
                engine.add_client(socket, hello, newcomer);
            }
            Proxy::Starting(waiting) => waiting.push(arrival),
            Proxy::Failed(why) => {
                let why = why.clone();
                self.refuse(arrival, CUDA_ERROR_MPS_CONNECTION_FAILED, why);
            }
            Proxy::Absent(_) => {
                let starting = Proxy::Starting(vec![arrival]);
                let Proxy::Absent(opened) = std::mem::replace(&mut parts.proxy, starting) else {
                    return;
                };
                drop(parts);
                self.start_engine(*opened);
            }
        }
    }

    /// Runs on a separate thread: clients in direct mode and the daemon do not wait for it.
    fn start_engine(&self, opened: OpenDriver) {
        let (config, parts) = (self.config.engine(), Arc::clone(&self.parts));
        let (admission, events) = (Arc::clone(&self.admission), self.events.clone());
        let keeper = self.keeper.clone();
        let started = std::thread::Builder::new()
            .name("engine-start".into())
            .spawn(move || {
                let opened = (opened, Ahead::default());
                let started = Engine::start(opened, config, keeper, admission, events.clone());
                settle(&mut parts.lock(), started, &events);
            });
        if let Err(error) = started {
            settle(&mut self.parts.lock(), Err(error.into()), &self.events);
        }
    }
}

/// Ends the start of the engine, successful or not, for the clients that waited for it.
fn settle(parts: &mut Parts, started: anyhow::Result<Engine>, events: &Sender<EngineEvent>) {
    let (proxy, why) = match started {
        Ok(engine) => (Proxy::Running(engine), String::new()),
        Err(error) => {
            let why = format!("the engine of proxy mode cannot start: {error:#}");
            tracing::error!("{why}");
            (Proxy::Failed(why.clone()), why)
        }
    };
    let before = std::mem::replace(&mut parts.proxy, proxy);
    let Proxy::Starting(waiting) = before else {
        return;
    };
    if let Proxy::Running(engine) = &parts.proxy {
        engine.set_limits(parts.limits.clone());
        engine.report_work(parts.reports_work);
        engine.separate(parts.separates);
        if let Some((run, _)) = &parts.trace
            && let Err(error) = engine.trace(Some(Arc::clone(run)))
        {
            tracing::error!("Clients in proxy mode are not traced: {error}");
        }
    }
    for (socket, hello, newcomer) in waiting {
        match &parts.proxy {
            Proxy::Running(engine) => engine.add_client(socket, hello, newcomer),
            _ => {
                let status = CUDA_ERROR_MPS_CONNECTION_FAILED;
                let who = newcomer.who;
                let socket = Stranger::new(socket, who.uid);
                admission::refuse(events, &socket, who, status, why.clone());
            }
        }
    }
}

impl Host for Hosting {
    fn add_client(&self, socket: OwnedFd, hello: ClientHello, newcomer: Newcomer) {
        let who = newcomer.who;
        let arrival = (socket, hello, newcomer);
        let usual = || self.modes.of_client(hello.visible());
        match Mode::asked(hello.mode).map(|asked| asked.unwrap_or_else(usual)) {
            Ok(mode) => match self.why_unavailable(mode) {
                Some(why) => self.refuse(arrival, CUDA_ERROR_DEVICE_UNAVAILABLE, why),
                None if mode == Mode::Proxy => self.add_proxied(arrival),
                None if self.parts.lock().limits.partitions.is_some() => {
                    let why =
                        "static partitioning is on (-S), with which clients get proxy mode only";
                    let socket = Stranger::new(arrival.0, who.uid);
                    admission::tell_reason(&socket, &hello, why);
                    let (status, why) = (CUDA_ERROR_NOT_SUPPORTED, why.to_owned());
                    admission::refuse(&self.events, &socket, who, status, why);
                }
                None => self.add_direct(arrival),
            },
            Err(error) => {
                let status = CUDA_ERROR_MPS_CONNECTION_FAILED;
                self.refuse(arrival, status, error.to_string());
            }
        }
    }

    fn devices(&self) -> Vec<DeviceInfo> {
        self.devices.clone()
    }

    fn keeper(&self) -> Option<OwnedFd> {
        let keeper = self.keeper.as_ref()?;
        keeper.connection().try_clone_to_owned().ok()
    }

    fn has_contexts(&self) -> bool {
        matches!(self.parts.lock().proxy, Proxy::Running(_))
    }

    fn hand_over(&self, request: HandOver) -> Receiver<Rested> {
        let (sender, outcome) = bounded(1);
        let parts = self.parts.lock();
        let direct = parts
            .arbiter
            .as_ref()
            .map_or(0, |arbiter| arbiter.usage().len());
        let settled: Rested = match &parts.proxy {
            _ if direct > 0 && request.only.is_none() => {
                Err(format!("{direct} clients are in direct mode"))
            }
            Proxy::Absent(_) | Proxy::Failed(_) => Ok(Leaving::default()),
            Proxy::Starting(_) => Err("it is starting".into()),
            Proxy::Running(engine) => match engine.hand_over(request, sender.clone()) {
                Ok(()) => return outcome,
                Err(error) => Err(error.to_string()),
            },
        };
        let _ = sender.send(settled);
        outcome
    }

    fn images_in_use(&self) -> Option<OwnedFd> {
        let Proxy::Running(engine) = &self.parts.lock().proxy else {
            return None;
        };
        match engine.images_in_use() {
            Ok(keeper) => Some(keeper.into_connection()),
            Err(why) => {
                tracing::warn!("The next server loads no images ahead: {why}");
                None
            }
        }
    }

    fn go_on(&self) {
        if let Proxy::Running(engine) = &self.parts.lock().proxy {
            engine.go_on();
        }
    }

    fn terminate(&self, session: u64) {
        let parts = self.parts.lock();
        if let Proxy::Running(engine) = &parts.proxy {
            engine.terminate(session);
        }
        if let Some(arbiter) = &parts.arbiter {
            arbiter.terminate(session);
        }
    }

    fn set_limits(&self, limits: Limits) {
        self.admission.users().set_limits(&limits);
        let mut parts = self.parts.lock();
        if let Proxy::Running(engine) = &parts.proxy {
            engine.set_limits(limits.clone());
        }
        if let Some(arbiter) = &parts.arbiter {
            arbiter.set_limits(limits.clone());
        }
        parts.limits = limits;
    }

    fn set_weight(&self, session: u64, weight: u32) {
        let parts = self.parts.lock();
        if let Proxy::Running(engine) = &parts.proxy {
            engine.set_weight(session, weight);
        }
        if let Some(arbiter) = &parts.arbiter {
            arbiter.set_weight(session, weight);
        }
    }

    fn report_work(&self, on: bool) {
        let mut parts = self.parts.lock();
        parts.reports_work = on;
        if let Proxy::Running(engine) = &parts.proxy {
            engine.report_work(on);
        }
    }

    fn hold(&self, time: Duration) {
        if let Proxy::Running(engine) = &self.parts.lock().proxy {
            engine.hold(time);
        }
    }

    fn separate(&self, on: bool) {
        let mut parts = self.parts.lock();
        parts.separates = on;
        if let Proxy::Running(engine) = &parts.proxy {
            engine.separate(on);
        }
    }

    fn share_server(&self, session: u64) {
        if let Proxy::Running(engine) = &self.parts.lock().proxy {
            engine.share_server(session);
        }
    }

    fn usage(&self) -> Vec<Usage> {
        let parts = self.parts.lock();
        let mut usage = match &parts.proxy {
            Proxy::Running(engine) => engine.usage(),
            _ => Vec::new(),
        };
        if let Some(arbiter) = &parts.arbiter {
            usage.extend(arbiter.usage());
        }
        usage.sort_by_key(|client| client.session);
        usage
    }

    fn gate_moments(&self) -> u64 {
        match &self.parts.lock().proxy {
            Proxy::Running(engine) => engine.gate_moments(),
            _ => 0,
        }
    }

    fn start_trace(&self, file: File) -> io::Result<()> {
        let (run, writer) = trace::start(file)?;
        let mut parts = self.parts.lock();
        if let Proxy::Running(engine) = &parts.proxy {
            engine.trace(Some(Arc::clone(&run)))?;
        }
        if let Some(arbiter) = &parts.arbiter {
            arbiter.trace(Some(Arc::clone(&run)));
        }
        parts.trace = Some((run, writer));
        Ok(())
    }

    fn stop_trace(&self) -> Option<Totals> {
        let (run, writer) = {
            let mut parts = self.parts.lock();
            let trace = parts.trace.take()?;
            if let Proxy::Running(engine) = &parts.proxy {
                // Only the start of a trace can fail.
                let _ = engine.trace(None);
            }
            if let Some(arbiter) = &parts.arbiter {
                arbiter.trace(None);
            }
            trace
        };
        Some(writer.finish(run))
    }

    fn move_memory(&self, order: MoveMemory) {
        let MoveMemory {
            number,
            session,
            out,
            patience_ms,
        } = order;
        let events = self.events.clone();
        let report = move |outcome| {
            // Sending fails only when the server is ending.
            let _ = events.send(EngineEvent::MemoryMoved(number, session, outcome));
        };
        let parts = self.parts.lock();
        let is_direct = parts.arbiter.as_ref().is_some_and(|arbiter| {
            let usage = arbiter.usage();
            usage.iter().any(|client| client.session == session)
        });
        let engine = match &parts.proxy {
            Proxy::Running(engine) if !is_direct => engine,
            _ if is_direct => return report(Err(Unmoved::Direct)),
            _ => return report(Err(Unmoved::Ended)),
        };
        let to = match out {
            true => MemoryOrder::Out,
            false => MemoryOrder::In,
        };
        let patience = Duration::from_millis(patience_ms);
        if let Err(error) = engine.move_memory(session, to, patience, report.clone()) {
            report(Err(Unmoved::Failed(error.to_string())));
        }
    }

    /// Ends the arbiter first: its clients only need a notification.
    fn shutdown(self) {
        let mut parts = self.parts.lock();
        if let Some(arbiter) = parts.arbiter.take() {
            arbiter.shutdown();
        }
        let ended = Proxy::Failed("the server is ending".into());
        if let Proxy::Running(engine) = std::mem::replace(&mut parts.proxy, ended) {
            engine.shutdown();
        }
    }
}
