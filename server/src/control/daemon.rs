//! The control daemon: one thread that waits on its sockets and never blocks anywhere else.

use super::commands::{self, Command};
use super::directory::{self, DirectoryError, PipeDirectory};
use super::greeting::{self, Greeting};
use super::listing;
use super::servers::{Server, Servers};
use super::spawn::Launcher;
use super::wire::{self, Answer};
use crate::engine::Credentials;
use crate::link::Arrival;
use crate::logging::{self, LogError};
use crate::seqpacket;
use crate::settings::{self, Settings};
use mpsshim_proto::cuda::CUDA_ERROR_MPS_CONNECTION_FAILED;
use mpsshim_proto::handshake::MAGIC_UI;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long a connection may take to say what it is.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// How long no connection is accepted when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Connections accepted before the others have their turn.
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
    /// Signals or descriptors.
    #[error("cannot start the control daemon: {0}")]
    Io(#[from] io::Error),
}

/// A connection that is not a client's (yet).
struct Peer {
    connection: OwnedFd,
    who: Credentials,
    /// Came by `control_privileged`, from the owner or root.
    privileged: bool,
    /// `Some`: has not said what it is, and must by then. `None`: a user interface.
    silent_until: Option<Instant>,
}

/// A command whose answer must wait.
struct Awaiting {
    /// The user interface that gave it.
    by: u64,
    /// Process id of the server.
    server: i32,
    /// What has to be gone: these sessions, or, without any, the server.
    sessions: Vec<u64>,
    answer: Answer,
}

/// A daemon that was told to end.
struct Quit {
    /// User interfaces that wait for it.
    asked_by: Vec<u64>,
    /// When clients are no longer waited for.
    force_at: Option<Instant>,
}

#[derive(Clone, Copy)]
enum Source {
    Control,
    Privileged,
    LogPipe,
    EndSignal,
    ChildSignal,
    Peer(u64),
    Waiting(u64),
    Server(i32),
}

/// The control daemon.
pub struct Daemon {
    directory: PipeDirectory,
    end_signal: UnixStream,
    child_signal: UnixStream,
    servers: Servers,
    peers: BTreeMap<u64, Peer>,
    next_peer: u64,
    accept_from: Option<Instant>,
    awaiting: Vec<Awaiting>,
    quit: Option<Quit>,
}

impl Daemon {
    /// Takes the pipe directory and listens; from here on nobody's connection fails. `echo` gets the log too.
    pub fn open(settings: &Settings, echo: Option<File>) -> Result<Daemon, DaemonError> {
        let held = PipeDirectory::take(settings)?;
        let control_log = logging::open(&settings.log_directory, "control.log")?;
        let server_log = logging::open(&settings.log_directory, "server.log")?;
        let sinks = std::iter::once(control_log).chain(echo).collect();
        logging::install("Control", sinks, settings.log.as_deref());
        allow_many_descriptors();

        let end_signal = signal_pipe(&[SIGTERM, SIGINT])?;
        let child_signal = signal_pipe(&[SIGCHLD])?;
        tracing::info!(
            "Starting control daemon using socket {}",
            settings.control_socket().display()
        );
        tracing::info!(
            "To connect CUDA applications to this daemon, set env {}={}",
            settings::PIPE_DIRECTORY,
            settings.pipe_directory.display()
        );
        let uid = nix::unistd::geteuid().as_raw();
        if let Some(warning) = directory::warning(&settings.pipe_directory, uid) {
            tracing::warn!("{warning}");
        }
        Ok(Daemon {
            directory: held,
            end_signal,
            child_signal,
            servers: Servers::new(Launcher::new(settings.clone(), server_log)),
            peers: BTreeMap::new(),
            next_peer: 1,
            accept_from: None,
            awaiting: Vec::new(),
            quit: None,
        })
    }

    /// Serves until told to quit.
    pub fn run(mut self) -> io::Result<()> {
        loop {
            self.expire(Instant::now());
            if self.quit.is_some() && self.servers.all_ended() {
                break;
            }
            for source in self.wait()? {
                self.handle(source);
            }
            self.settle();
        }
        for peer in self
            .quit
            .take()
            .map(|quit| quit.asked_by)
            .unwrap_or_default()
        {
            self.answer(peer, &Answer::done(""));
        }
        tracing::info!("Exit with status 0");
        Ok(())
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
            watch(Source::Control, self.directory.control.as_fd(), input);
            watch(Source::Privileged, self.directory.privileged.as_fd(), input);
        }
        watch(Source::LogPipe, self.directory.log_pipe.as_fd(), input);
        watch(Source::EndSignal, self.end_signal.as_fd(), input);
        watch(Source::ChildSignal, self.child_signal.as_fd(), input);
        for (number, peer) in &self.peers {
            watch(Source::Peer(*number), peer.connection.as_fd(), input);
        }
        for (number, connection) in self.servers.waiting() {
            // Only its end matters; the server reads what it says.
            watch(Source::Waiting(number), connection, PollFlags::empty());
        }
        for server in self.servers.iter() {
            if let Some(link) = server.link() {
                let room = if server.link_full() {
                    PollFlags::POLLOUT
                } else {
                    PollFlags::empty()
                };
                watch(Source::Server(server.pid), link, input | room);
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
        let next = silent
            .chain(force)
            .chain(self.accept_from)
            .chain(self.servers.deadline())
            .min();
        match next {
            None => PollTimeout::NONE,
            Some(at) => {
                // A millisecond more, so that the time has come when poll returns.
                let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        }
    }

    fn expire(&mut self, now: Instant) {
        self.servers.expire(now);
        self.accept_from.take_if(|at| *at <= now);
        self.peers.retain(|_, peer| {
            let expired = peer.silent_until.is_some_and(|at| at <= now);
            if expired {
                let (pid, uid) = (peer.who.pid, peer.who.uid);
                tracing::info!(
                    "Connection of process {pid} of user {uid} closed: it said nothing for {} s",
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
            Source::Control => self.accept(false),
            Source::Privileged => self.accept(true),
            Source::LogPipe => self.read_log_pipe(),
            Source::EndSignal => {
                drain(&self.end_signal);
                // The second one means it.
                let patience = self.quit.is_some().then_some(Duration::ZERO);
                tracing::info!("Received a signal to end");
                self.begin_quit(None, patience);
            }
            Source::ChildSignal => {
                drain(&self.child_signal);
                self.servers.reap();
            }
            Source::Peer(number) => self.hear(number),
            Source::Waiting(number) => self.servers.leave(number),
            Source::Server(pid) => self.servers.link_ready(pid),
        }
    }

    fn accept(&mut self, privileged_socket: bool) {
        let listener = if privileged_socket {
            &self.directory.privileged
        } else {
            &self.directory.control
        };
        for _ in 0..ACCEPTS_A_TURN {
            match accept_from(listener.as_fd()) {
                Ok((connection, who)) => {
                    tracing::info!("Accepting connection...");
                    let owner = nix::unistd::geteuid().as_raw();
                    let privileged = privileged_socket && (who.uid == 0 || who.uid == owner);
                    let silent_until = Some(Instant::now() + SILENCE_LIMIT);
                    self.peers.insert(
                        self.next_peer,
                        Peer {
                            connection,
                            who,
                            privileged,
                            silent_until,
                        },
                    );
                    self.next_peer += 1;
                }
                Err(error) => match error.raw_os_error() {
                    Some(nix::libc::EAGAIN) => return,
                    Some(nix::libc::ECONNABORTED) => {}
                    _ => {
                        tracing::error!("Cannot accept a connection: {error}");
                        self.accept_from = Some(Instant::now() + ACCEPT_PAUSE);
                        return self.drop_oldest_silent();
                    }
                },
            }
        }
    }

    /// Makes room when descriptors have run out.
    fn drop_oldest_silent(&mut self) {
        let oldest = self
            .peers
            .iter()
            .find(|(_, peer)| peer.silent_until.is_some())
            .map(|(number, _)| *number);
        if let Some(peer) = oldest.and_then(|number| self.peers.remove(&number)) {
            tracing::info!(
                "Connection of silent process {} of user {} closed to make room",
                peer.who.pid,
                peer.who.uid
            );
        }
    }

    /// A peer has sent something, or has closed.
    fn hear(&mut self, number: u64) {
        let Some(peer) = self.peers.get(&number) else {
            return;
        };
        // One byte more than fits, so that a longer packet is seen to be too long.
        let mut buffer = vec![0; MAGIC_UI.len() + wire::COMMAND_LIMIT + 1];
        let len = match seqpacket::receive(peer.connection.as_fd(), &mut buffer) {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(_) => 0,
        };
        if len == 0 {
            return self.forget(number);
        }
        match greeting::read(&buffer[..len]) {
            Greeting::Command(line) => {
                let line = String::from_utf8_lossy(line).into_owned();
                self.command(number, &line);
            }
            Greeting::Client(hello) => match self.peers.remove(&number) {
                Some(Peer {
                    connection,
                    who,
                    silent_until: Some(_),
                    ..
                }) => {
                    // The server reads it from here on, in whatever way it likes.
                    if let Err(error) = seqpacket::set_nonblocking(&connection, false) {
                        return tracing::error!("Client {}: {error}", who.pid);
                    }
                    tracing::debug!(
                        "hello of {}: entry-point table {:#018x}",
                        who.pid,
                        hello.table_hash
                    );
                    self.servers.arrive(Arrival {
                        connection,
                        hello,
                        who,
                    });
                }
                _ => tracing::warn!("A user interface that says hello as a client was closed"),
            },
            Greeting::Unfit(why) => {
                let (pid, uid) = (peer.who.pid, peer.who.uid);
                tracing::warn!("Connection of process {pid} of user {uid} refused: {why}");
                let refusal = greeting::refusal(CUDA_ERROR_MPS_CONNECTION_FAILED);
                // A peer that has gone needs no answer.
                let _ = seqpacket::send(peer.connection.as_fd(), refusal.as_bytes(), None);
                self.forget(number);
            }
        }
    }

    fn forget(&mut self, number: u64) {
        if let Some(peer) = self.peers.remove(&number)
            && peer.silent_until.is_none()
        {
            tracing::info!("UI closed");
        }
        self.awaiting.retain(|awaiting| awaiting.by != number);
        if let Some(quit) = &mut self.quit {
            quit.asked_by.retain(|asked| *asked != number);
        }
    }

    fn command(&mut self, number: u64, line: &str) {
        let Some(peer) = self.peers.get_mut(&number) else {
            return;
        };
        if peer.silent_until.take().is_some() {
            tracing::info!("NEW UI");
        }
        if line.len() > wire::COMMAND_LIMIT {
            let limit = wire::COMMAND_LIMIT;
            return self.answer(
                number,
                &Answer::failed(format!("a command line may have {limit} bytes")),
            );
        }
        tracing::info!("Cmd:{}", line.trim());
        let answer = match commands::parse(line, peer.privileged) {
            Ok(None) => Answer::done(""),
            Ok(Some(Command::Quit { patience })) => return self.begin_quit(Some(number), patience),
            Ok(Some(Command::ShutdownServer { server, force })) => match self.find(&server) {
                Ok(&Server { pid, .. }) => {
                    self.servers.shut_down(pid, force);
                    return self.await_end(number, pid, Vec::new(), Answer::done(""));
                }
                Err(answer) => answer,
            },
            Ok(Some(Command::TerminateClient { server, client })) => {
                let sessions = self.find(&server).and_then(|&Server { pid, .. }| {
                    let sessions = self.servers.terminate(pid, client);
                    Ok((pid, sessions.map_err(Answer::failed)?))
                });
                match sessions {
                    Ok((pid, sessions)) => {
                        return self.await_end(number, pid, sessions, Answer::done("0"));
                    }
                    Err(answer) => answer,
                }
            }
            Ok(Some(command)) => self.execute(&command),
            Err(error) => Answer::failed(error.to_string()),
        };
        self.answer(number, &answer);
    }

    /// The server that is meant.
    fn find(&self, wanted: &commands::Server) -> Result<&Server, Answer> {
        let found = self.servers.iter().find(|server| wanted.is(server.pid));
        found.ok_or_else(|| Answer::failed(format!("Server {wanted} not found")))
    }

    fn await_end(&mut self, by: u64, server: i32, sessions: Vec<u64>, answer: Answer) {
        self.awaiting.push(Awaiting {
            by,
            server,
            sessions,
            answer,
        });
    }

    /// Answers commands whose time has come.
    fn settle(&mut self) {
        let servers = &self.servers;
        let over = |awaiting: &mut Awaiting| match servers.by_pid(awaiting.server) {
            None => true,
            Some(server) => {
                !awaiting.sessions.is_empty()
                    && !awaiting.sessions.iter().any(|id| server.has_session(*id))
            }
        };
        let done: Vec<Awaiting> = self.awaiting.extract_if(.., over).collect();
        for awaiting in done {
            self.answer(awaiting.by, &awaiting.answer);
        }
    }

    fn execute(&mut self, command: &Command) -> Answer {
        match command {
            Command::ServerList => {
                Answer::done(lines(self.servers.iter().map(|server| server.pid)))
            }
            Command::ServerStatus(wanted) => match self.find(wanted) {
                Ok(server) => Answer::done(server.state.to_string()),
                Err(answer) => answer,
            },
            Command::ClientList(wanted) => match self.find(wanted) {
                Ok(server) => Answer::done(lines(server.clients())),
                Err(answer) => answer,
            },
            Command::StartServer { uid } => match self.servers.want(*uid) {
                Ok(()) => Answer::done(""),
                Err(why) => Answer::failed(format!("start_server: {why}")),
            },
            Command::DeviceClientList(wanted) => {
                let servers = match wanted.as_ref().map(|wanted| self.find(wanted)) {
                    Some(Err(answer)) => return answer,
                    Some(Ok(server)) => vec![server],
                    None => self.servers.iter().collect(),
                };
                Answer::done(listing::device_clients(&servers))
            }
            Command::Processes { pid } => {
                Answer::done(listing::processes(self.servers.iter(), *pid))
            }
            Command::Help => Answer::done(commands::help()),
            // These wait for what they cause.
            Command::Quit { .. }
            | Command::ShutdownServer { .. }
            | Command::TerminateClient { .. } => Answer::done(""),
        }
    }

    fn answer(&mut self, number: u64, answer: &Answer) {
        let Some(peer) = self.peers.get(&number) else {
            return;
        };
        for packet in wire::answer_packets(answer) {
            if seqpacket::send(peer.connection.as_fd(), &packet, None).is_err() {
                // It does not read its answers, or has gone.
                return self.forget(number);
            }
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
            self.servers.close(false);
        }
    }

    /// Whoever may not write control.log may still say something: a line into the pipe `log`.
    fn read_log_pipe(&mut self) {
        let mut buffer = [0; 4096];
        match self.directory.log_pipe.read(&mut buffer) {
            Ok(len) => {
                for line in String::from_utf8_lossy(&buffer[..len]).lines() {
                    tracing::info!(target: logging::OTHER, "{line}");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => tracing::warn!("Cannot read the log pipe: {error}"),
        }
    }
}

fn accept_from(listener: BorrowedFd<'_>) -> io::Result<(OwnedFd, Credentials)> {
    let connection = seqpacket::accept(listener)?;
    let who = seqpacket::peer(connection.as_fd())?;
    Ok((connection, who))
}

fn lines(numbers: impl Iterator<Item = i32>) -> String {
    numbers
        .map(|number| number.to_string())
        .collect::<Vec<_>>()
        .join("\n")
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

/// A thousand clients may wait at once, one descriptor each.
fn allow_many_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!("Cannot raise the limit of open files: {error}");
    }
}
