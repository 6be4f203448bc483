//! The duties of mps-server besides executing calls: it takes orders from the control daemon, reports events of its
//! clients, and writes server.log.
//!
//! It ends when ordered to, when its context is lost, and when the daemon has gone and no client is left: the death of
//! a daemon ends no running program, and the next daemon takes the server over.

use crate::engine;
use crate::engine::{Leaving, Parting, Rested};
use crate::keeper::Keeper;
use crate::life;
use crate::release;
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded, never, select, unbounded};
use mpsshim_api::cuda::CUresult;
use mpsshim_control::link::{
    self, Arrival, HandOver, Link, LinkError, MoveMemory, Order, Others, ToDaemon,
};
use mpsshim_control::logging::limit;
use mpsshim_control::program::{Program, readers};
use mpsshim_control::quarantine;
use mpsshim_control::takeover::{self, Introduction, Versions};
use mpsshim_control::trace::Totals;
use mpsshim_model::client::{ClientInfo, EngineEvent, Newcomer, Suspect};
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::limits::{Limits, Quantum, Usage};
use mpsshim_model::policy::{OversubscriptionPolicy, SchedulingPolicy};
use mpsshim_proto::handshake::ClientHello;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the programs of the suspects may take to be read, before the fault is reported without them.
const NAMING_PATIENCE: Duration = Duration::from_secs(1);
/// How long clients have to see the error of a lost context before the process ends.
const FAULT_PATIENCE: Duration = Duration::from_secs(1);

/// Maximum number of clients in one report: with limits for all devices each takes up to 2.5 KiB.
const USAGE_A_REPORT: usize = 20;
/// Why the clients stay after a hand-over that was called off.
const CALLED_OFF: &str = "it was called off";

/// Serves clients: [`crate::hosting::Hosting`], or a stand-in in a test.
pub trait Host {
    /// Takes over a client's connection. Never blocks; the outcome comes as an event.
    fn add_client(&self, socket: OwnedFd, hello: ClientHello, newcomer: Newcomer);
    /// The devices served, by ordinal.
    fn devices(&self) -> Vec<DeviceInfo>;
    /// Whether there are contexts here that clients share.
    fn has_contexts(&self) -> bool {
        true
    }
    /// Ends a session; an event reports its end. Unknown sessions are ignored.
    fn terminate(&self, session: u64);
    /// Sets the limits of future clients.
    fn set_limits(&self, limits: Limits);
    /// Sets a client's weight. Unknown sessions are ignored.
    fn set_weight(&self, session: u64, weight: u32);
    /// Starts or ends the reports of the devices on which clients have work in flight ([`EngineEvent::Work`]).
    fn report_work(&self, _on: bool) {}
    /// Holds new work of all clients back for this time from now on; zero: lets it through.
    fn hold(&self, _time: Duration) {}
    /// Whether the daemon gives sessions servers of their own that need one ([`EngineEvent::NeedsOwnServer`]).
    fn separate(&self, _on: bool) {}
    /// A session that has asked for a server of its own stays. Unknown sessions are ignored.
    fn share_server(&self, _session: u64) {}
    /// The clients' usage.
    fn usage(&self) -> Vec<Usage>;
    /// Number of moments that the gate has opened.
    fn gate_moments(&self) -> u64;
    /// Starts a trace into this file.
    ///
    /// # Errors
    /// The thread cannot be started.
    fn start_trace(&self, file: File) -> io::Result<()>;
    /// Ends the trace; `None`: no trace was running.
    fn stop_trace(&self) -> Option<Totals>;
    /// The connection to the keeper of the sessions, if there is one.
    fn keeper(&self) -> Option<OwnedFd> {
        None
    }
    /// Brings the sessions to rest, or only one, so that the next server can continue them.
    fn hand_over(&self, _request: HandOver) -> Receiver<Rested> {
        let (sender, outcome) = bounded(1);
        let _ = sender.send(Err("sessions end with this server".into()));
        outcome
    }
    /// The connection to a temporary keeper with the images of the sessions; `None`: there is none.
    fn images_in_use(&self) -> Option<OwnedFd> {
        None
    }
    /// Calls the hand-over off, if it is not too late: the sessions continue here.
    fn go_on(&self) {}
    /// Moves the device memory of a session. Never blocks; the outcome comes as an event.
    fn move_memory(&self, order: MoveMemory);
    /// Ends every session.
    fn shutdown(self);
}

/// How serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// On order, or because no client was left.
    Orderly,
    /// The context is lost; no state of this process that concerns the device is reliable any more.
    Fault,
    /// The next server continues the sessions; this process must not touch them any more.
    HandedOver,
    /// Work of ended clients still runs; only the end of the process stops it, and the driver's cleanup would wait for
    /// it.
    Unfinished,
}

/// Serves until the end, initially with these limits; `quarantined`: the program whose processes are the only clients.
/// `events` are the host's; another daemon may listen at `control` after the daemon behind `link` has gone.
pub fn serve<H: Host>(
    link: Link,
    host: H,
    events: &Receiver<EngineEvent>,
    (limits, quarantined): (Limits, Option<Program>),
    control: &Path,
) -> End {
    let link = Arc::new(link);
    host.set_limits(limits.clone());
    let orders = read_orders(Arc::clone(&link));
    let mut serving = Serving {
        link: Some(link),
        control: control.to_owned(),
        host,
        limits,
        quarantined,
        clients: BTreeMap::new(),
        stuck: BTreeMap::new(),
        expected: 0,
        stopping: false,
        hand_over: None,
        hands_over: false,
        called_off: false,
        rested: never(),
        departure: None,
    };
    serving.announce();
    let end = serving
        .report_ready(events)
        .and_then(|()| serving.run(orders, events));
    match end {
        Ok(Finish::HandedOver) => {
            std::mem::forget(serving.host);
            End::HandedOver
        }
        Ok(Finish::Over) => {
            serving.stop_trace();
            let unfinished = serving.stuck.len();
            if unfinished > 0 {
                tracing::warn!("Ending the work of {unfinished} clients that have ended");
            }
            serving.report(&ToDaemon::Stopping);
            let devices = match serving.host.has_contexts() {
                true => serving.host.devices(),
                false => Vec::new(),
            };
            serving.host.shutdown();
            for (ordinal, device) in devices.iter().enumerate() {
                tracing::info!(
                    "Destroy server context on device {ordinal} ({})",
                    device.name
                );
            }
            tracing::info!("Exiting");
            if unfinished > 0 {
                End::Unfinished
            } else {
                End::Orderly
            }
        }
        Err(lost) => {
            serving.fault(&lost, events);
            // Destroying a lost context can hang; the end of the process releases it.
            std::mem::forget(serving.host);
            End::Fault
        }
    }
}

/// Why a server ends.
enum Finish {
    /// It was ordered to end, or is not needed any more.
    Over,
    /// The next server has its sessions.
    HandedOver,
}

/// The context is lost.
struct Lost {
    status: u32,
    /// Sessions that continue in the next server.
    going_on: usize,
    /// Sessions with work in flight.
    suspects: Vec<Suspect>,
}

/// `None`: the daemon has gone.
fn read_orders(link: Arc<Link>) -> Receiver<Option<Order>> {
    let (sender, receiver) = unbounded();
    std::thread::spawn(move || {
        loop {
            let order = match link.next_order() {
                Ok(order) => order,
                Err(LinkError::Io(error)) => {
                    tracing::error!("The link to the control daemon failed: {error}");
                    None
                }
                Err(error) => {
                    tracing::error!("{error}");
                    continue;
                }
            };
            let last = order.is_none();
            if sender.send(order).is_err() || last {
                return;
            }
        }
    });
    receiver
}

struct Serving<H> {
    /// `None`: the daemon has gone. The server then ends with the last client.
    link: Option<Arc<Link>>,
    control: PathBuf,
    host: H,
    /// The limits of future clients.
    limits: Limits,
    /// The program that it serves, for the introduction to the next daemon.
    quarantined: Option<Program>,
    clients: BTreeMap<u64, ClientInfo>,
    /// Ended clients whose work still runs. Without other clients the server ends, and their work with it.
    stuck: BTreeMap<u64, ClientInfo>,
    /// Clients given to the host whose outcome is not known yet.
    expected: usize,
    /// Ends with the last client.
    stopping: bool,
    /// A hand-over that begins as soon as the expected clients are connected.
    hand_over: Option<HandOver>,
    /// The host is bringing its sessions to rest.
    hands_over: bool,
    /// It has been called off.
    called_off: bool,
    /// Receives the result of bringing the sessions to rest.
    rested: Receiver<Rested>,
    /// Sessions that leave for the next server, while others stay.
    departure: Option<Departure>,
}

/// Sessions that leave.
struct Departure {
    /// Numbers of the sessions whose objects are not free yet.
    remaining: BTreeSet<u64>,
    /// Number of all of them.
    count: usize,
    parting: Parting,
}

impl<H: Host> Serving<H> {
    fn announce(&self) {
        self.announce_limits();
        for (ordinal, device) in self.host.devices().iter().enumerate() {
            if device.is_exclusive() {
                tracing::info!("Device {ordinal} is in {} mode", device.compute_mode);
            }
        }
        tracing::info!("Server has started");
        self.hand_keeper();
    }

    /// Reports that the server is ready, after the sessions that it goes on with: the daemon may end a server without
    /// clients.
    fn report_ready(&mut self, events: &Receiver<EngineEvent>) -> Result<(), Lost> {
        events.try_iter().try_for_each(|event| self.note(event))?;
        self.report(&ToDaemon::Ready {
            devices: self.host.devices(),
        });
        Ok(())
    }

    /// Gives the daemon the connection to the keeper, for the next server, and a connection that tells early when this
    /// process ends.
    fn hand_keeper(&self) {
        let (Some(link), Some(keeper)) = (&self.link, self.host.keeper()) else {
            return;
        };
        let keeper = link.send(&ToDaemon::Keeper, Some(keeper.as_fd()));
        let life = life::watched().map_err(LinkError::from);
        let life = life.and_then(|other| link.send(&ToDaemon::Life, Some(other)));
        for error in [keeper.err(), life.err()].into_iter().flatten() {
            tracing::debug!("{error}");
        }
    }

    /// Gives the daemon the images of the sessions, for the next server.
    fn hand_images(&self) {
        let keeper = self.host.images_in_use();
        if let Some(link) = &self.link
            && let Err(error) = link.send(&ToDaemon::Images, keeper.as_ref().map(AsFd::as_fd))
        {
            tracing::debug!("{error}");
        }
    }

    fn announce_limits(&self) {
        let Limits {
            threads,
            memory,
            user_memory,
            guarantee,
            user_guarantee,
            priority,
            quantum,
            scheduling,
            oversubscription,
            user_weights: _,
            partitions,
            named,
        } = &self.limits;
        if let Some(named) = named {
            tracing::info!("Server has the name {}", named.name);
        }
        tracing::info!("Active Threads Percentage set to {threads}");
        for (device, bytes) in memory {
            tracing::info!(
                "Device pinned memory limit for device {device} set to {bytes:#x} bytes"
            );
        }
        for (uid, devices) in user_memory {
            for (device, bytes) in devices {
                tracing::info!(
                    "Device pinned memory limit of user {uid} for device {device} set to {bytes:#x} bytes"
                );
            }
        }
        for (device, bytes) in guarantee {
            tracing::info!("Device memory guarantee for device {device} set to {bytes:#x} bytes");
        }
        for (uid, devices) in user_guarantee {
            for (device, bytes) in devices {
                tracing::info!(
                    "Device memory guarantee of user {uid} for device {device} set to {bytes:#x} bytes"
                );
            }
        }
        tracing::info!("Server Priority set to {priority}");
        let partitions = partitions.iter().flat_map(|partitions| partitions.all());
        for (name, chunks) in partitions {
            tracing::info!("Partition {name} has {} chunks", chunks.len());
        }
        // NVIDIA's server has no such line: the default quantum is not logged.
        if *quantum != Quantum::DEFAULT {
            tracing::info!("Quantum of direct mode set to {quantum} ms");
        }
        // Only logged where it is not the default, as the quantum.
        if *scheduling != SchedulingPolicy::default() {
            tracing::info!("Scheduling set to {}", scheduling.default);
        }
        for (uid, scheduling) in &scheduling.users {
            tracing::info!("Scheduling of user {uid} set to {scheduling}");
        }
        if *oversubscription != OversubscriptionPolicy::default() {
            tracing::info!("Oversubscription set to {}", oversubscription.default);
        }
        for (uid, oversubscription) in &oversubscription.users {
            tracing::info!("Oversubscription of user {uid} set to {oversubscription}");
        }
    }

    /// Logs that the policies are the defaults again.
    fn announce_default_policies(&self, before: &Limits) {
        let default = SchedulingPolicy::default();
        if self.limits.scheduling == default && before.scheduling != default {
            tracing::info!("Scheduling set to {}", default.default);
        }
        let default = OversubscriptionPolicy::default();
        if self.limits.oversubscription == default && before.oversubscription != default {
            tracing::info!("Oversubscription set to {}", default.default);
        }
    }

    fn report_usage(&self, question: u64) {
        let clients = self.host.usage();
        let mut parts = clients.chunks(USAGE_A_REPORT).peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            let last = parts.peek().is_none();
            self.report(&ToDaemon::Usage {
                question,
                clients: part.to_vec(),
                gate_moments: Some(self.host.gate_moments()),
                last,
            });
            if last {
                return;
            }
        }
    }

    fn start_trace(&self, file: OwnedFd) {
        let began = self.host.start_trace(file.into());
        let error = began.err().map(|error| error.to_string());
        match &error {
            None => tracing::info!("Tracing"),
            Some(error) => tracing::error!("Cannot trace: {error}"),
        }
        self.report(&ToDaemon::TraceStarted { error });
    }

    fn stop_trace(&self) {
        if let Some(totals) = self.host.stop_trace() {
            let Totals { written, lost, .. } = totals;
            tracing::info!("The trace has ended: {written} slices, {lost} lost");
            self.report(&ToDaemon::TraceEnded(totals));
        }
    }

    fn report(&self, report: &ToDaemon) {
        let Some(link) = &self.link else { return };
        // The loss of the daemon is detected where orders are read.
        if let Err(error) = link.report(report) {
            tracing::debug!("{error}");
        }
    }

    fn run(
        &mut self,
        mut orders: Receiver<Option<Order>>,
        events: &Receiver<EngineEvent>,
    ) -> Result<Finish, Lost> {
        let mut next_daemon = never();
        while !self.is_over() {
            self.begin_hand_over();
            select! {
                recv(orders) -> order => match order.ok().flatten() {
                    Some(Order::NewClient(client)) => self.take(*client),
                    Some(Order::Shutdown { force }) => {
                        tracing::info!("Server has been notified to shutdown");
                        if force {
                            return Ok(Finish::Over);
                        }
                        self.call_off_hand_over();
                        self.stop_after_clients();
                    }
                    Some(Order::Terminate(session)) => {
                        if let Some(client) = self.clients.get(&session) {
                            tracing::info!("Terminating client {client}");
                        }
                        self.host.terminate(session);
                    }
                    Some(Order::Limits(limits)) => {
                        self.host.set_limits((*limits).clone());
                        let before = std::mem::replace(&mut self.limits, *limits);
                        self.announce_limits();
                        self.announce_default_policies(&before);
                    }
                    Some(Order::Weight(session, weight)) => self.host.set_weight(session, weight),
                    // The process's own output on standard error goes to server.log as well.
                    Some(Order::Log(log)) => match nix::unistd::dup2_stderr(log) {
                        Ok(()) => tracing::info!("Continuing in this file"),
                        Err(error) => tracing::error!("Cannot change to another log: {error}"),
                    },
                    Some(Order::DeviceQuery) => tracing::info!(
                        "Received device query command. There are {} devices",
                        self.host.devices().len()
                    ),
                    Some(Order::Usage(question)) => self.report_usage(question),
                    Some(Order::Trace(file)) => self.start_trace(file),
                    Some(Order::StopTrace) => self.stop_trace(),
                    Some(Order::HandOver(request)) => self.hand_over = Some(request),
                    Some(Order::MoveMemory(order)) => self.host.move_memory(order),
                    Some(Order::ReportWork(on)) => self.host.report_work(on),
                    Some(Order::Hold(time)) => self.host.hold(time),
                    Some(Order::Separate(on)) => self.host.separate(on),
                    Some(Order::ShareServer(session)) => self.host.share_server(session),
                    Some(Order::Images) => self.hand_images(),
                    // Only a standby receives these orders.
                    Some(Order::Adopt(_) | Order::LoadAhead(_) | Order::UnloadAhead) => {}
                    None => {
                        orders = never();
                        next_daemon = self.daemon_gone();
                    }
                },
                recv(next_daemon) -> link => {
                    next_daemon = never();
                    // If the daemon refuses, the channel closes without a link.
                    if let Ok(link) = link {
                        orders = self.taken_over(link);
                    }
                }
                recv(self.rested) -> rested => {
                    self.rested = never();
                    self.hands_over = false;
                    let called_off = std::mem::take(&mut self.called_off);
                    let rested = rested.unwrap_or_else(|_| Err("it is ending".into()));
                    if self.leave(rested, called_off) {
                        return Ok(Finish::HandedOver);
                    }
                }
                recv(events) -> event => match event {
                    Ok(event) => self.note(event)?,
                    // The engine has ended without an order, which only a lost context can explain.
                    Err(_) => {
                        let status = mpsshim_api::cuda::CUDA_ERROR_UNKNOWN.0;
                        return Err(Lost { status, going_on: 0, suspects: Vec::new() });
                    }
                },
            }
        }
        Ok(Finish::Over)
    }

    /// Brings the sessions to rest, once all expected clients are connected.
    fn begin_hand_over(&mut self) {
        if self.expected > 0 {
            return;
        }
        let Some(request) = self.hand_over.take() else {
            return;
        };
        tracing::info!("Server has been notified to hand over its clients");
        let is_readable = |format: &u64| request.formats.contains(format);
        if !engine::FORMATS.iter().any(is_readable) {
            let why = "the next server is of a release that cannot go on with its clients";
            return match Keeper::start() {
                Ok(keeper) if request.others == Others::Stay && request.only.is_none() => {
                    let stay = why.into();
                    self.part(&[], Parting { stay, keeper });
                }
                _ => self.stay(why.into()),
            };
        }
        self.rested = self.host.hand_over(request);
        self.hands_over = true;
    }

    /// The sessions continue here after all, if they have not left: no server is waiting for them any more.
    fn call_off_hand_over(&mut self) {
        if self.hand_over.take().is_some() {
            self.stay(CALLED_OFF.into());
        }
        if self.hands_over {
            self.called_off = true;
            self.host.go_on();
        }
    }

    fn stay(&self, why: String) {
        tracing::info!("The clients stay: {why}");
        self.report(&ToDaemon::Stays { why });
    }

    /// The sessions are at rest, or could not be; returns whether this server ends now.
    fn leave(&mut self, rested: Rested, called_off: bool) -> bool {
        match rested {
            Ok(Leaving {
                sessions,
                parting: Some(parting),
            }) => self.part(&sessions, parting),
            Ok(_) if called_off => self.stay(CALLED_OFF.into()),
            Ok(Leaving { sessions, .. }) => {
                let sessions = sessions.len();
                self.stop_trace();
                tracing::info!("Handing over {sessions} clients");
                self.report(&ToDaemon::HandsOver { sessions });
                return true;
            }
            Err(why) => self.stay(why),
        }
        false
    }

    /// Some sessions leave for the next server, which gets them when their objects here are free.
    fn part(&mut self, sessions: &[u64], parting: Parting) {
        let is_here =
            |session: &&u64| self.clients.contains_key(session) || self.stuck.contains_key(session);
        self.departure = Some(Departure {
            remaining: sessions.iter().filter(is_here).copied().collect(),
            count: sessions.len(),
            parting,
        });
        self.look_whether_parted();
    }

    fn look_whether_parted(&mut self) {
        let is_over = |departure: &mut Departure| departure.remaining.is_empty();
        let Some(departure) = self.departure.take_if(is_over) else {
            return;
        };
        let (sessions, parting) = (departure.count, departure.parting);
        let stay = parting.stay;
        tracing::info!("Handing over {sessions} clients; others stay: {stay}");
        let report = ToDaemon::Parts { sessions, stay };
        let keeper = parting.keeper.into_connection();
        if let Some(link) = &self.link
            && let Err(error) = link.send(&report, Some(keeper.as_fd()))
        {
            tracing::error!("The daemon does not learn of the clients that leave: {error}");
        }
    }

    fn has_clients(&self) -> bool {
        !self.clients.is_empty() || self.expected > 0
    }

    fn is_over(&self) -> bool {
        let may_end = self.stopping || self.link.is_none() || !self.stuck.is_empty();
        may_end && !self.has_clients()
    }

    fn stop_after_clients(&mut self) {
        self.stopping = true;
        if self.has_clients() {
            tracing::info!("Waiting for current clients to finish");
        }
    }

    /// Looks for the next daemon as long as there are clients.
    fn daemon_gone(&mut self) -> Receiver<Link> {
        tracing::info!("The control daemon has gone");
        self.call_off_hand_over();
        self.host.separate(false);
        // Without a daemon there is no way to end the trace.
        self.stop_trace();
        self.link = None;
        if !self.has_clients() {
            return never();
        }
        tracing::info!("Waiting for current clients to finish, or for another control daemon");
        let introduction = Introduction {
            versions: Versions::OWN,
            release: Some(release::spoken()),
            clients: self.clients.len() + self.expected,
            limits: self.limits.clone(),
            quarantined: self.quarantined.clone(),
        };
        takeover::seek(self.control.clone(), &introduction).unwrap_or_else(|error| {
            tracing::error!("Cannot look for another control daemon: {error}");
            never()
        })
    }

    /// Repeats the reports of the old daemon's time to the new daemon; the clients first, so that a server that is
    /// ready is known to have them.
    fn taken_over(&mut self, link: Link) -> Receiver<Option<Order>> {
        tracing::info!("Taken over by another control daemon");
        let link = Arc::new(link);
        self.link = Some(Arc::clone(&link));
        for client in self.clients.values().chain(self.stuck.values()) {
            self.report(&ToDaemon::from(client));
        }
        for session in self.stuck.keys() {
            self.report(&ToDaemon::Stuck { session: *session });
        }
        if self.stopping {
            self.report(&ToDaemon::Stopping);
        }
        self.hand_keeper();
        self.report(&ToDaemon::Ready {
            devices: self.host.devices(),
        });
        read_orders(link)
    }

    fn take(&mut self, client: Arrival) {
        let _guard = limit::caused_by_user(client.who.uid);
        tracing::info!(
            "Received new client request for {{PID: {}, Context ID: 0}}",
            client.who.pid
        );
        self.expected += 1;
        let newcomer = Newcomer {
            who: client.who,
            namespace: client.namespace,
        };
        (self.host).add_client(client.connection.into(), client.hello, newcomer);
    }

    fn note(&mut self, event: EngineEvent) -> Result<(), Lost> {
        limit::tell(Instant::now());
        match event {
            EngineEvent::Connected(client) => {
                let _guard = limit::caused_by_user(client.uid);
                let name = client.to_string();
                tracing::info!("Client {name} connected");
                for DeviceInfo { name, uuid, .. } in self.host.devices() {
                    tracing::info!("Device {name} (uuid {uuid}) is associated");
                }
                tracing::info!("Status of client {name} is ACTIVE");
                self.report(&ToDaemon::from(&client));
                self.expected = self.expected.saturating_sub(1);
                self.clients.insert(client.session, client);
            }
            EngineEvent::Refused(pid, status, reason) => {
                tracing::info!("Client process {pid} refused with status {status}: {reason}");
                self.report(&ToDaemon::Refused {
                    pid,
                    status,
                    reason,
                });
                self.expected = self.expected.saturating_sub(1);
            }
            EngineEvent::MemoryMoved(number, session, outcome) => {
                self.report(&ToDaemon::MemoryMoved {
                    number,
                    session,
                    outcome,
                });
            }
            EngineEvent::ImagesChanged => self.report(&ToDaemon::ImagesChanged),
            EngineEvent::MemoryShort => self.report(&ToDaemon::MemoryShort),
            EngineEvent::NeedsOwnServer(session) => {
                self.report(&ToDaemon::NeedsOwnServer { session });
            }
            EngineEvent::Work(busy, wanted) => self.report(&ToDaemon::Work { busy, wanted }),
            EngineEvent::Gone(client, reason) => {
                let _guard = limit::caused_by_user(client.uid);
                self.clients.remove(&client.session);
                self.stuck.remove(&client.session);
                if let Some(departure) = &mut self.departure {
                    departure.remaining.remove(&client.session);
                }
                let ended = |reason: &&String| *reason != engine::GOES_ON_ELSEWHERE;
                if let Some(reason) = reason.as_ref().filter(ended) {
                    tracing::warn!("Client {client} ended by the server: {reason}");
                }
                tracing::info!(
                    "Client {client} exiting. Number of active client contexts is {}.",
                    self.clients.len()
                );
                tracing::info!("Client process {} disconnected", client.pid);
                self.report(&ToDaemon::Gone {
                    session: client.session,
                    pid: client.pid,
                    reason,
                });
                self.look_whether_parted();
            }
            EngineEvent::Stuck(client) => {
                tracing::warn!(
                    "Client {client} has ended, but its work on the device goes on. It keeps its memory until the work,                      or this server, ends"
                );
                let session = client.session;
                self.clients.remove(&session);
                self.stuck.insert(session, client);
                self.report(&ToDaemon::Stuck { session });
            }
            EngineEvent::Fault {
                status,
                going_on,
                suspects,
            } => {
                return Err(Lost {
                    status,
                    going_on,
                    suspects,
                });
            }
        }
        Ok(())
    }

    /// Reports the fault to the daemon, then waits until the clients have seen the error and left, or the time limit
    /// has passed.
    fn fault(&mut self, lost: &Lost, events: &Receiver<EngineEvent>) {
        let Lost {
            status, going_on, ..
        } = *lost;
        let clients = self.clients.len();
        tracing::error!(
            "The context is lost: {:?}. Ending with {clients} clients, of which {going_on} go on in the next server",
            CUresult(status)
        );
        self.report(&ToDaemon::Fault {
            status,
            suspects: name_suspects(&lost.suspects),
        });
        // Sessions that continue are waiting, and all other clients have been told in their segments.
        if going_on > 0 {
            return;
        }
        let until = Instant::now() + FAULT_PATIENCE;
        while !self.clients.is_empty() {
            match events.recv_deadline(until) {
                Ok(EngineEvent::Fault { .. }) => {}
                // Errors other than a fault do not occur here.
                Ok(event) => self.note(event).unwrap_or_default(),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => {
                    std::thread::sleep(until.saturating_duration_since(Instant::now()));
                    break;
                }
            }
        }
        tracing::info!("Exiting");
    }
}

/// Logs the suspects of a fault, and returns the report about them for the daemon.
fn name_suspects(suspects: &[Suspect]) -> Vec<link::Suspect> {
    let process = |suspect: &Suspect| (suspect.client.pid, suspect.client.uid);
    let processes: Vec<(i32, u32)> = suspects.iter().map(process).collect();
    let programs = readers::read_within(NAMING_PATIENCE, &processes);
    for (Suspect { client, kernel }, program) in suspects.iter().zip(programs) {
        // The daemon knows the program of a client that has ended.
        let program = program.map_or_else(|| "it has ended".to_owned(), |program| program.name);
        let what = quarantine::accusation(suspects.len());
        let kernel = kernel.as_deref().unwrap_or("unknown");
        tracing::error!(
            "Client {client} of user {} {what}; program: {program}; kernel: {kernel}",
            client.uid
        );
    }
    let report = |suspect: &Suspect| link::Suspect {
        session: suspect.client.session,
        kernel: suspect.kernel.clone(),
    };
    let reported = suspects.iter().take(link::MOST_SUSPECTS);
    reported.map(report).collect()
}

#[cfg(test)]
mod tests;
