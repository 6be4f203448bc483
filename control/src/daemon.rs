//! The control daemon: one thread that waits on its sockets and never blocks anywhere else.

mod answering;
pub mod apply;
mod modules;
mod room;

use super::commands::Request;
use super::defaults::{Defaults, setting_of};
use super::devices::Devices;
use super::directory::{DirectoryError, PipeDirectory};
use super::greeting::{self, Greeting};
use super::servers::{Entrance, Server, Servers};
use super::spawn::Launcher;
use super::usage::Question;
use super::wire::{self, Answer};
use crate::closers::{self, Stranger};
use crate::link::{Arrival, PACKET_LIMIT};
use crate::logging::limit::{self, Author};
use crate::logging::{self, LogError, Sink};
use crate::metrics::{Endpoint, MetricsError};
use crate::seqpacket;
use crate::server_file::Mistakes;
use crate::settings::{self, Settings};
use mpsshim_api::cuda::CUDA_ERROR_MPS_CONNECTION_FAILED;
use mpsshim_model::client::Credentials;
use mpsshim_model::device::{self, ComputeMode, DeviceInfo};
use mpsshim_model::limits::MemoryBound;
use mpsshim_model::mode::Modes;
use mpsshim_model::mode::by_device::DeviceModes;
use mpsshim_model::policy::Users;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long a new connection may take to send its first packet.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// How long no connection is accepted after descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Interval between checks of the logs' length. The checks alone do not wake the daemon.
const LOOK_AT_LOGS: Duration = Duration::from_secs(1);
/// Pause before the next attempt after a log could not be set aside.
const LOG_PAUSE: Duration = Duration::from_secs(60);
/// Interval at which peers that are not heard are checked again.
const LISTEN_AGAIN: Duration = Duration::from_millis(100);
/// Connections accepted in a row before other events are handled.
const ACCEPTS_A_TURN: usize = 64;

/// Why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The pipe directory.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A log file.
    #[error(transparent)]
    Log(#[from] LogError),
    /// Only root's daemon serves several users.
    #[error(
        "--users {0} ({name}) needs root: a user's daemon serves that user only; start mps-control as root",
        name = settings::USERS
    )]
    NotRoot(Users),
    /// A static partition reserves multiprocessors within one server.
    #[error(
        "--users apart ({users}) and static partitions (-S, {partitions}) exclude each other: a partition reserves \
         multiprocessors from the clients of its own server only, and the devices take turns between servers",
        users = settings::USERS,
        partitions = settings::STATIC_PARTITIONING
    )]
    PartitionsApart,
    /// A device admits one process, or none.
    #[error(
        "--users apart ({name}): device {device} is in {mode} mode, in which several servers cannot share it; set \
         DEFAULT mode (nvidia-smi -c DEFAULT) or choose --users serial or together",
        name = settings::USERS
    )]
    ExclusiveApart {
        /// Its ordinal.
        device: usize,
        /// Its compute mode.
        mode: ComputeMode,
    },
    /// A mode for a missing device, or two modes for one device.
    #[error("{}={modes}: {why}", settings::MODE)]
    Modes {
        /// The modes that were asked for.
        modes: Modes,
        /// Description of the error.
        why: String,
    },
    /// A limit or a guarantee for a missing device.
    #[error("{setting}: {why}")]
    Memory {
        /// The setting that names the device.
        setting: &'static str,
        /// Description of the error.
        why: String,
    },
    /// The file of servers.
    #[error(transparent)]
    Servers(#[from] Mistakes),
    /// The devices, which the file of servers needs.
    #[error("-a: {0}")]
    Devices(String),
    /// The endpoint of metrics.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// Signals or descriptors.
    #[error("cannot start the control daemon: {0}")]
    Io(#[from] io::Error),
}

/// A connection that is not a client's, or not yet.
struct Peer {
    connection: Stranger,
    who: Credentials,
    /// Came by `control_privileged`, from the owner or root.
    privileged: bool,
    /// `Some`: its first packet is due by then. `None`: a user interface.
    silent_until: Option<Instant>,
    /// Its first commands that change nothing, used to recognize repetitions.
    asked: Vec<String>,
    /// Its current command is a repetition: neither the command nor the answer is logged.
    repeats: bool,
    /// Came by this socket of a named server.
    gate: Option<Entrance>,
}

impl Peer {
    /// Whether packets are read from it now: not while too many of its user's descriptors wait to be closed.
    fn is_heard(&self) -> bool {
        closers::has_room(self.who.uid)
    }

    fn tell(&self, answer: &Answer) -> io::Result<()> {
        wire::answer_packets(answer)
            .iter()
            .try_for_each(|packet| seqpacket::send(self.connection.as_fd(), packet, None))
    }
}

/// A command whose answer must wait.
struct Awaiting {
    /// The user interface that sent it. No further command is read from it before the answer.
    by: u64,
    until: Until,
}

/// The event that an answer waits for.
enum Until {
    /// The end of these sessions of the server with this process id, or of the server itself if the list is empty.
    Gone(i32, Vec<u64>, Answer),
    /// The end of all these sessions of servers, by the servers' process ids.
    AllGone(Vec<(i32, Vec<u64>)>),
    /// The replacement of the server with this process id, or its failure.
    Restarted(i32),
    /// The outcome of the order with this number to move memory.
    Moved(u64),
    /// The list of the devices.
    Devices(Request),
    /// The clients' usage.
    Usage(Question, Request),
    /// Every server traces, or this deadline.
    TraceStart(Instant),
    /// No server traces, or this deadline.
    TraceStop(Instant),
}

/// A request to quit that is in progress.
struct Quit {
    /// User interfaces that wait for it.
    asked_by: Vec<u64>,
    /// When the servers are ended without waiting for clients.
    force_at: Option<Instant>,
}

/// A socket on which connections come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Door {
    Control,
    Privileged,
    /// Of a named server or a namespace.
    Gate(Entrance),
}

#[derive(Clone, Copy)]
enum Source {
    Door(Door),
    LogPipe,
    EndSignal,
    ChildSignal,
    LogSignal,
    Devices,
    Peer(u64),
    Waiting(u64),
    Readers,
    Server(i32),
    ServerDying(i32),
    ServerEnd,
}

/// How a daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// In the background; standard error is control.log, where the messages of a crash go.
    Detached,
    /// Under a supervisor or on a terminal: the log goes to standard error too, and the supervisor that set
    /// `NOTIFY_SOCKET` is notified (sd_notify).
    Foreground,
}

/// The control daemon.
pub struct Daemon {
    settings: Settings,
    manner: Manner,
    log: Sink,
    /// When the length of the logs is checked next.
    look_at_logs: Instant,
    directory: PipeDirectory,
    end_signal: UnixStream,
    child_signal: UnixStream,
    log_signal: UnixStream,
    servers: Servers,
    devices: Devices,
    peers: BTreeMap<u64, Peer>,
    /// Maximum number of peers and waiting clients together.
    most_connections: usize,
    next_peer: u64,
    accept_from: Option<Instant>,
    awaiting: Vec<Awaiting>,
    last_question: u64,
    quit: Option<Quit>,
}

impl Daemon {
    /// Takes the pipe directory and listens; from here on connections succeed.
    pub fn open(settings: &Settings, manner: Manner) -> Result<Daemon, DaemonError> {
        let users = settings.users;
        if users != Users::Serial && !nix::unistd::geteuid().is_root() {
            return Err(DaemonError::NotRoot(users));
        }
        if users == Users::Apart && settings.defaults.limits.partitions.is_some() {
            return Err(DaemonError::PartitionsApart);
        }
        let held = PipeDirectory::take(settings)?;
        let metrics = settings.metrics.map(Endpoint::bind).transpose()?;
        let control_log = logging::open(&settings.log_directory, "control.log")?;
        let server_log = logging::open(&settings.log_directory, "server.log")?;
        let log = Sink::file(control_log.try_clone()?);
        let echo = match manner {
            Manner::Foreground => Some(Sink::StandardError),
            Manner::Detached => {
                nix::unistd::dup2_stderr(control_log).map_err(io::Error::from)?;
                None
            }
        };
        let sinks = std::iter::once(log.clone()).chain(echo).collect();
        logging::install("Control", sinks, settings.log.as_deref());
        let most_connections = room::most_connections();

        let end_signal = signal_pipe(&[SIGTERM, SIGINT])?;
        let child_signal = signal_pipe(&[SIGCHLD])?;
        let log_signal = signal_pipe(&[SIGHUP])?;
        tracing::info!(
            "Starting control daemon using socket {}",
            settings.control_socket().display()
        );
        tracing::info!(
            "To connect CUDA applications to this daemon, set env {}={}",
            settings::PIPE_DIRECTORY,
            settings.pipe_directory.display()
        );
        for warning in &settings.ignored {
            tracing::warn!("{warning}");
        }
        let launcher = Launcher::new(settings.clone(), server_log);
        let devices = devices_of_settings(&launcher, &settings.defaults)?;
        let mut servers = Servers::new(launcher, settings.defaults.clone())?;
        if let Some(endpoint) = metrics {
            tracing::info!("Metrics are at http://{}/metrics", endpoint.address());
            endpoint.serve(settings, servers.faults())?;
        }
        if held.predecessor_died {
            servers.expect_orphans();
        }
        Ok(Daemon {
            settings: settings.clone(),
            manner,
            log,
            look_at_logs: Instant::now(),
            directory: held,
            end_signal,
            child_signal,
            log_signal,
            servers,
            devices,
            peers: BTreeMap::new(),
            most_connections,
            next_peer: 1,
            accept_from: None,
            awaiting: Vec::new(),
            last_question: 0,
            quit: None,
        })
    }

    /// Begins to look for the devices, so that they are known when a command asks.
    pub fn search_devices(&mut self) {
        if let Err(error) = self.devices.search(self.servers.launcher()) {
            tracing::error!("{error}");
        }
    }

    /// Serves until told to quit; `false`: servers that cannot be ended remain.
    pub fn run(mut self) -> io::Result<bool> {
        self.tell_supervisor(NotifyState::Ready);
        loop {
            self.expire(Instant::now());
            self.settle();
            if self.quit.is_some() && self.servers.all_ended() {
                break;
            }
            for source in self.wait()? {
                self.handle(source);
            }
        }
        self.servers.finish_trace();
        // While this daemon still has the lock.
        self.servers.close_gates();
        let left: Vec<&str> = self.servers.all().filter_map(Server::remains).collect();
        let answer = if left.is_empty() {
            Answer::done("")
        } else {
            Answer::failed(left.join("\n"))
        };
        tracing::info!("Exit with status {}", u8::from(!answer.ok));
        let Daemon {
            directory,
            peers,
            quit,
            ..
        } = self;
        // Released before the answers, so that a peer that gets its answer finds the trace complete and can start
        // another daemon in the same directory.
        drop(directory);
        let asked_by = quit.map(|quit| quit.asked_by).unwrap_or_default();
        for peer in asked_by.iter().filter_map(|number| peers.get(number)) {
            // The peer may have disconnected.
            let _ = peer.tell(&answer);
        }
        Ok(answer.ok)
    }

    /// Sleeps until something has happened.
    fn wait(&self) -> io::Result<Vec<Source>> {
        let mut sources = Vec::new();
        let mut descriptors = Vec::new();
        let mut watch = |source, descriptor, events| {
            sources.push(source);
            descriptors.push(PollFd::new(descriptor, events));
        };
        let input = PollFlags::POLLIN;
        if self.accept_from.is_none() {
            let (control, privileged) = (&self.directory.control, &self.directory.privileged);
            watch(Source::Door(Door::Control), control.as_fd(), input);
            watch(Source::Door(Door::Privileged), privileged.as_fd(), input);
            for (id, gate) in self.servers.gates() {
                watch(Source::Door(Door::Gate(id)), gate, input);
            }
        }
        watch(Source::LogPipe, self.directory.log_pipe.as_fd(), input);
        watch(Source::EndSignal, self.end_signal.as_fd(), input);
        watch(Source::ChildSignal, self.child_signal.as_fd(), input);
        watch(Source::LogSignal, self.log_signal.as_fd(), input);
        if let Some(output) = self.devices.output() {
            watch(Source::Devices, output, input);
        }
        for (number, peer) in self.peers.iter().filter(|(_, peer)| peer.is_heard()) {
            let waits = self.awaiting.iter().any(|awaiting| awaiting.by == *number);
            let events = if waits { PollFlags::empty() } else { input };
            watch(Source::Peer(*number), peer.connection.as_fd(), events);
        }
        for (number, connection) in self.servers.waiting() {
            // Only the end of the connection is watched; the server reads its packets.
            watch(Source::Waiting(number), connection, PollFlags::empty());
        }
        watch(Source::Readers, self.servers.readers(), input);
        for server in self.servers.all() {
            if let Some(link) = server.link() {
                let room = if server.link_full() {
                    PollFlags::POLLOUT
                } else {
                    PollFlags::empty()
                };
                watch(Source::Server(server.pid), link, input | room);
            }
            if let Some(life) = server.life() {
                watch(Source::ServerDying(server.pid), life, PollFlags::empty());
            }
            if let Some(end) = server.end() {
                watch(Source::ServerEnd, end, input);
            }
        }
        match poll(&mut descriptors, self.timeout()) {
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
        let happened = |descriptor: &PollFd<'_>| descriptor.any().unwrap_or(true);
        Ok(sources
            .into_iter()
            .zip(&descriptors)
            .filter(|(_, d)| happened(d))
            .map(|(source, _)| source)
            .collect())
    }

    fn timeout(&self) -> PollTimeout {
        let silent = self.peers.values().filter_map(|peer| peer.silent_until);
        let force = self.quit.as_ref().and_then(|quit| quit.force_at);
        let answers = self
            .awaiting
            .iter()
            .filter_map(|awaiting| match &awaiting.until {
                Until::Usage(question, _) => Some(question.until),
                Until::TraceStart(until) | Until::TraceStop(until) => Some(*until),
                Until::Moved(number) => self.servers.move_deadline(*number),
                Until::Gone(..) | Until::AllGone(_) | Until::Restarted(_) | Until::Devices(_) => {
                    None
                }
            });
        let unheard = self.peers.values().any(|peer| !peer.is_heard());
        let next = silent
            .chain(unheard.then(|| Instant::now() + LISTEN_AGAIN))
            .chain(force)
            .chain(answers)
            .chain(self.devices.deadline())
            .chain(self.accept_from)
            .chain(self.servers.deadline())
            .chain(limit::deadline())
            .min();
        match next {
            None => PollTimeout::NONE,
            Some(at) => {
                // Rounded up by a millisecond, so that the deadline has passed when poll returns.
                let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        }
    }

    fn expire(&mut self, now: Instant) {
        limit::tell(now);
        if now >= self.look_at_logs {
            self.set_long_logs_aside(now);
        }
        self.servers.expire(now);
        self.devices.expire(now);
        self.accept_from.take_if(|at| *at <= now);
        self.peers.retain(|_, peer| {
            let expired = peer.silent_until.is_some_and(|at| at <= now);
            // Packets of this peer were not read, so its silence proves nothing, and closing it would need a closer.
            if expired && !peer.is_heard() {
                peer.silent_until = Some(now + SILENCE_LIMIT);
                return true;
            }
            if expired {
                let (pid, uid) = (peer.who.pid, peer.who.uid);
                let _guard = limit::caused_by_user(uid);
                tracing::info!(
                    "Connection of process {pid} of user {uid} closed: it sent nothing for {} s",
                    SILENCE_LIMIT.as_secs()
                );
            }
            !expired
        });
        if let Some(quit) = &mut self.quit
            && quit.force_at.take_if(|at| *at <= now).is_some()
        {
            self.servers.close(true);
        }
    }

    fn handle(&mut self, source: Source) {
        match source {
            Source::Door(door) => self.accept(door),
            Source::LogPipe => self.read_log_pipe(),
            Source::EndSignal => {
                drain(&self.end_signal);
                // A second signal ends the servers without waiting for clients.
                let patience = self.quit.is_some().then_some(Duration::ZERO);
                tracing::info!("Received a signal to end");
                self.begin_quit(None, patience);
            }
            Source::ChildSignal => {
                drain(&self.child_signal);
                self.servers.reap();
                self.devices.reap();
                self.reap_orphans();
            }
            Source::LogSignal => {
                drain(&self.log_signal);
                match self.reopen_logs() {
                    Ok(()) => tracing::info!("Received a signal to reopen the logs"),
                    Err(error) => tracing::error!("The logs stay as they are: {error}"),
                }
            }
            Source::Devices => self.devices.hear(),
            Source::Peer(number) => self.hear(number),
            Source::Waiting(number) => self.servers.leave(number),
            Source::Readers => self.servers.programs_read(),
            Source::Server(pid) => self.servers.link_ready(pid),
            Source::ServerDying(pid) => self.servers.note_dying(pid),
            Source::ServerEnd => {
                self.servers.reap();
                self.reap_orphans();
            }
        }
    }

    /// The logs have been renamed: continues in new files. Nothing changes unless both can be opened.
    fn reopen_logs(&mut self) -> Result<(), DaemonError> {
        let directory = &self.settings.log_directory;
        let control_log = logging::open(directory, "control.log")?;
        let server_log = logging::open(directory, "server.log")?;
        if self.manner == Manner::Detached {
            nix::unistd::dup2_stderr(&control_log).map_err(io::Error::from)?;
        }
        self.log.replace(control_log);
        self.servers.change_log(server_log);
        Ok(())
    }

    /// Renames logs that have grown too long and continues in new files. One old file of each is kept.
    fn set_long_logs_aside(&mut self, now: Instant) {
        self.look_at_logs = now + LOOK_AT_LOGS;
        match self.are_logs_set_aside() {
            Ok(false) => {}
            Ok(true) => match self.reopen_logs() {
                Ok(()) => {
                    tracing::info!(
                        "The logs had grown too long; earlier lines are in the .old files"
                    )
                }
                Err(error) => tracing::error!("The logs stay as they are: {error}"),
            },
            Err(error) => {
                tracing::error!("A log that has grown too long cannot be renamed: {error}");
                self.look_at_logs = now + LOG_PAUSE;
            }
        }
    }

    fn are_logs_set_aside(&self) -> io::Result<bool> {
        let directory = &self.settings.log_directory;
        let control = match self.log.descriptor()? {
            Some(log) => logging::set_aside(log.as_fd(), directory, "control.log")?,
            None => false,
        };
        let log = self.servers.launcher().log();
        Ok(logging::set_aside(log, directory, "server.log")? || control)
    }

    /// The first process of a container inherits orphaned processes and must reap them. The daemon's own children are
    /// reaped by the code that started them.
    fn reap_orphans(&self) {
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        while let Ok(ended) = waitid(Id::All, look)
            && ended != WaitStatus::StillAlive
            && let Some(pid) = ended.pid()
        {
            let raw = pid.as_raw();
            let own = self.servers.by_pid(raw).is_some() || self.devices.is_child(raw);
            // An own child that has just ended: its signal is pending, and the next round reaps the processes after it.
            if own || waitpid(pid, Some(WaitPidFlag::WNOHANG)).is_err() {
                return;
            }
        }
    }

    fn tell_supervisor(&self, state: NotifyState<'_>) {
        if self.manner == Manner::Foreground
            && let Err(error) = sd_notify::notify(&[state])
        {
            tracing::warn!("Cannot notify the supervisor: {error}");
        }
    }

    fn accept(&mut self, door: Door) {
        for _ in 0..ACCEPTS_A_TURN {
            let listener = match door {
                Door::Control => Some(self.directory.control.as_fd()),
                Door::Privileged => Some(self.directory.privileged.as_fd()),
                Door::Gate(id) => self.servers.gate(id),
            };
            let Some(listener) = listener else {
                return;
            };
            match accept_from(listener) {
                Ok((connection, who)) => {
                    let _guard = limit::caused_by_user(who.uid);
                    tracing::info!("Accepting connection...");
                    let owner = nix::unistd::geteuid().as_raw();
                    let is_owner = who.uid == 0 || who.uid == owner;
                    let privileged = door == Door::Privileged && is_owner;
                    let gate = match door {
                        Door::Gate(id) => Some(id),
                        Door::Control | Door::Privileged => None,
                    };
                    let silent_until = Some(Instant::now() + SILENCE_LIMIT);
                    self.peers.insert(
                        self.next_peer,
                        Peer {
                            connection,
                            who,
                            privileged,
                            silent_until,
                            asked: Vec::new(),
                            repeats: false,
                            gate,
                        },
                    );
                    self.next_peer += 1;
                    self.keep_room();
                }
                Err(error) => match error.raw_os_error() {
                    Some(nix::libc::EAGAIN) => return,
                    Some(nix::libc::ECONNABORTED) => {}
                    _ => {
                        tracing::error!("Cannot accept a connection: {error}");
                        self.accept_from = Some(Instant::now() + ACCEPT_PAUSE);
                        self.make_room();
                        return;
                    }
                },
            }
        }
    }

    /// A peer has sent something, or has closed.
    fn hear(&mut self, number: u64) {
        let Some(peer) = self.peers.get(&number) else {
            return;
        };
        let _guard = limit::caused_by_user(peer.who.uid);
        // As long as a server's introduction may be; a longer packet is detected as too long.
        let mut buffer = vec![0; PACKET_LIMIT];
        let connection = peer.connection.as_fd();
        let received = seqpacket::receive_with_descriptor(connection, &mut buffer, peer.who.uid);
        let (len, descriptor) = match received {
            Ok(packet) => (packet.len, packet.descriptor),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) => (0, None),
        };
        if len == 0 {
            return self.forget(number);
        }
        match greeting::read(&buffer[..len]) {
            Greeting::Command(interface, line) => {
                let line = String::from_utf8_lossy(line).into_owned();
                self.command(number, (interface, &line), descriptor);
            }
            Greeting::Client(hello) => match self.peers.remove(&number) {
                Some(Peer {
                    connection,
                    who,
                    gate,
                    silent_until: Some(_),
                    ..
                }) => {
                    // From here on the server reads it and may expect a blocking socket.
                    if let Err(error) = seqpacket::set_nonblocking(&connection, false) {
                        return tracing::error!("Client {}: {error}", who.pid);
                    }
                    tracing::debug!(
                        "hello of {}: entry-point table {:#018x}",
                        who.pid,
                        hello.table_hash
                    );
                    let arrival = Arrival {
                        connection,
                        hello: *hello,
                        packet: buffer[..len].to_vec(),
                        who,
                        namespace: None,
                    };
                    self.servers.arrive(arrival, gate);
                }
                _ => tracing::warn!("A user interface that sent a client's hello was closed"),
            },
            Greeting::Server(said) => match self.peers.remove(&number) {
                Some(Peer {
                    connection,
                    who,
                    silent_until: Some(_),
                    ..
                }) => {
                    let devices = self.devices.known().map(<[_]>::len);
                    self.servers.meet(connection, who, said, devices);
                    self.servers.open_gates(self.directory.folder());
                }
                _ => {
                    tracing::warn!("A user interface that introduced itself as a server was closed")
                }
            },
            Greeting::Unfit(why) => {
                let (pid, uid) = (peer.who.pid, peer.who.uid);
                let status = CUDA_ERROR_MPS_CONNECTION_FAILED;
                tracing::warn!(
                    "Connection of process {pid} of user {uid} refused with status {}: {why}",
                    status.0
                );
                let refusal = greeting::refusal(status);
                // The peer may have disconnected.
                let _ = seqpacket::send(peer.connection.as_fd(), refusal.as_bytes(), None);
                self.forget(number);
            }
        }
    }

    fn forget(&mut self, number: u64) {
        if let Some(peer) = self.peers.remove(&number)
            && peer.silent_until.is_none()
        {
            let _guard = limit::caused_by_user(peer.who.uid);
            tracing::info!("UI closed");
        }
        self.awaiting.retain(|awaiting| awaiting.by != number);
        if let Some(quit) = &mut self.quit {
            quit.asked_by.retain(|asked| *asked != number);
        }
    }

    fn begin_quit(&mut self, asked_by: Option<u64>, patience: Option<Duration>) {
        let begun = self.quit.is_some();
        let quit = self.quit.get_or_insert_with(|| Quit {
            asked_by: Vec::new(),
            force_at: None,
        });
        quit.asked_by.extend(asked_by);
        if let Some(at) = patience.map(|patience| Instant::now() + patience) {
            quit.force_at = Some(quit.force_at.map_or(at, |earlier| earlier.min(at)));
        }
        if !begun {
            self.tell_supervisor(NotifyState::Stopping);
            self.servers.close(false);
        }
    }

    /// Users who may not write to control.log can write lines to the pipe `log`.
    fn read_log_pipe(&mut self) {
        let mut buffer = [0; 4096];
        match self.directory.log_pipe.read(&mut buffer) {
            Ok(len) => {
                let _guard = limit::caused_by(Author::LogPipe);
                for line in String::from_utf8_lossy(&buffer[..len]).lines() {
                    tracing::info!(target: logging::OTHER, "{line}");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => tracing::warn!("Cannot read the log pipe: {error}"),
        }
    }
}

/// If devices are named in modes or limits, or must be shared by the servers of several users, they are looked up at
/// startup, so that the user who starts the daemon learns of mistakes.
fn devices_of_settings(launcher: &Launcher, defaults: &Defaults) -> Result<Devices, DaemonError> {
    let mut devices = Devices::default();
    let modes = launcher.modes();
    let ordinals = MemoryBound::ALL.into_iter().flat_map(|bound| {
        let ordinals = defaults.limits.memory_of(bound).keys();
        ordinals.map(move |ordinal| (bound, ordinal.to_string()))
    });
    let uuids = defaults.by_uuid.iter();
    let uuids = uuids.map(|(bound, uuid, _)| (*bound, uuid.clone()));
    let named: Vec<(MemoryBound, String)> = ordinals.chain(uuids).collect();
    let is_apart = launcher.users() == Users::Apart;
    if modes.devices.is_empty() && named.is_empty() && !is_apart {
        return Ok(devices);
    }
    match devices.find_now(launcher) {
        Ok(Some(found)) => {
            if is_apart && let Some(device) = found.iter().position(DeviceInfo::is_exclusive) {
                let mode = found[device].compute_mode;
                return Err(DaemonError::ExclusiveApart { device, mode });
            }
            let (_, wrong) = DeviceModes::new(&modes, found, None);
            if let Some(why) = wrong.into_iter().next() {
                return Err(DaemonError::Modes { modes, why });
            }
            for (bound, device) in named {
                let setting = setting_of(bound);
                let find = device::find(found, &device);
                find.map_err(|why| DaemonError::Memory { setting, why })?;
            }
        }
        // A server may still find them; if not, its log explains the error.
        Ok(None) => {}
        Err(error) => tracing::error!("{error}"),
    }
    Ok(devices)
}

fn accept_from(listener: BorrowedFd<'_>) -> io::Result<(Stranger, Credentials)> {
    let connection = seqpacket::accept(listener)?;
    let who = seqpacket::peer(connection.as_fd())?;
    Ok((Stranger::new(connection, who.uid), who))
}

/// A stream that becomes readable when one of the signals comes.
fn signal_pipe(signals: &[i32]) -> io::Result<UnixStream> {
    let (reader, writer) = UnixStream::pair()?;
    reader.set_nonblocking(true)?;
    for signal in signals {
        signal_hook::low_level::pipe::register(*signal, writer.try_clone()?)?;
    }
    Ok(reader)
}

fn drain(mut stream: &UnixStream) {
    let mut buffer = [0; 64];
    while matches!(stream.read(&mut buffer), Ok(len) if len > 0) {}
}
