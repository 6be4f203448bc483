//! One server: its process, its link, and its reports.

use super::NamedId;
use super::ahead::{InUse, Loads};
use super::later::Later;
use super::quarantine::{Coming, Findings};
use super::shares;
use super::standby::NextStandby;
use super::traces::Part;
use crate::closers::Stranger;
use crate::link::{Link, LinkError, ToDaemon};
use crate::logging::one_line;
use crate::process::Process;
use crate::program::readers::Reading;
use crate::program::{Identity, Program};
use crate::releases::{Executable, Spoken};
use crate::spawn::Owner;
use crate::trace::Totals;
use crate::usage::Report;
use mpsshim_api::cuda::CUresult;
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::limits::Limits;
use mpsshim_model::named::check_name;
use mpsshim_model::suspension::{Placement, Unmoved};
use mpsshim_proto::handshake::{MAX_DEVICES, Wire};
use nix::sys::socket::{getsockopt, sockopt};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a server may take to end after it has lost its context or closed its link.
const END_PATIENCE: Duration = Duration::from_secs(5);
/// How long a server whose threads end is looked at.
const DYING: Duration = Duration::from_secs(1);
/// Pause between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// How long a server may take to end after a forced shutdown.
const FORCED_END_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of clients of a server, and of clients on their way to it, above the number of any real server.
/// Without a limit, a process posing as a server could make the daemon store clients without end.
const MOST_CLIENTS: usize = 65_536;
/// Longest text in a description of a device, bytes.
const LONGEST_NAME: usize = 256;

/// State of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It creates its contexts.
    Initializing,
    /// It accepts clients.
    Active,
    /// It brings its sessions to rest for the next server.
    HandingOver,
    /// Its sessions are at rest, and it is ending.
    HandedOver,
    /// Its context is lost.
    Fault,
    /// It was told to end.
    Stopping,
}

impl fmt::Display for State {
    /// As `get_server_status` prints it. NVIDIA's daemon has no word for a server that is ending.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Initializing => "INITIALIZING",
            State::Active | State::HandingOver | State::HandedOver | State::Stopping => "ACTIVE",
            State::Fault => "FAULT",
        })
    }
}

/// A client that a server serves.
pub struct Client {
    /// Process id.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// It has ended, but its work on the device goes on.
    pub stuck: bool,
    /// Name of the static partition that it has.
    pub partition: Option<String>,
    /// Its namespace at a named server; `None`: the default one, or none.
    pub namespace: Option<String>,
    /// The first word of its command line, if known.
    pub command: Option<String>,
    /// Its program, if known.
    pub program: Option<Program>,
    /// Its command line and program are being read.
    pub(super) reading: Option<Reading>,
}

impl Client {
    /// Whether its static partition is on the device with this UUID.
    pub(super) fn is_on(&self, uuid: &str) -> bool {
        let partition = self.partition.as_deref();
        let device = partition.and_then(|name| name.rsplit_once('/'));
        device.is_some_and(|(device, _)| device == uuid)
    }
}

/// Identities of clients, by process id and user id.
pub(super) type Clients = BTreeMap<(i32, u32), Identity>;

/// One server process.
pub struct Server {
    /// Process id.
    pub pid: i32,
    /// Whose clients it serves.
    pub uid: u32,
    /// The named server that it is; `None`: its user's own server.
    pub named: Option<NamedId>,
    /// The group that it runs with; `None`: the daemon's own. The servers that continue its sessions get the same.
    gid: Option<u32>,
    /// When it was started or taken over, or, for a standby, when it was told to continue sessions.
    pub(super) started: Instant,
    /// Its state.
    pub state: State,
    pub(super) process: Process,
    /// `None`: closed by the server.
    pub(super) link: Option<Link>,
    /// The link had no room; the daemon waits until it has.
    pub(super) link_full: bool,
    pub(super) sessions: BTreeMap<u64, Client>,
    /// server.log has been replaced, and the new file is not handed over yet.
    pub(super) log_pending: bool,
    /// Its devices, by ordinal; empty until it is ready.
    pub devices: Vec<DeviceInfo>,
    /// Limits of future clients.
    pub limits: Limits,
    /// They have changed, and the link had no room for them.
    pub(super) limits_pending: bool,
    /// Limits that name devices by UUID have been resolved to ordinals of [`Server::devices`].
    pub(super) knows_uuids: bool,
    /// Whether the daemon trusts its user, so that the server may get clients of any user.
    trusted: bool,
    /// Its usage reports that the daemon has not processed yet.
    pub(super) usage: Vec<Report>,
    /// Sessions whose clients' command lines and programs must be read.
    pub(super) unread: Vec<u64>,
    /// The clients of the server that it replaces: a client may end before it could be read again.
    pub(super) inherited: Clients,
    /// Process ids of the clients of the server that it replaces.
    pub(super) of_predecessor: Vec<i32>,
    /// Clients handed over whose fate is not reported yet.
    pub(super) handed_over: Vec<Coming>,
    pub(super) kill_at: Option<Instant>,
    /// Result of the kill, until the daemon gives up on ending the server.
    killed: Option<io::Result<()>>,
    /// Why it cannot be ended, and the remedy, in words.
    pub(super) remains: Option<String>,
    /// Its part in the operator's trace.
    pub(super) part: Part,
    /// Another server already continues its sessions.
    pub(super) succeeded: bool,
    /// It is the standby of the server with this process id.
    pub(super) standby_of: Option<i32>,
    /// The formats of the sessions that it can restore, once it has created its context as a standby.
    pub(super) stands_by: Option<Vec<u64>>,
    /// When it gets a standby.
    pub(super) next_standby: NextStandby,
    /// Until when it must say that it has received the order to go on with sessions.
    pub(super) adopts_by: Option<Instant>,
    /// The images of its sessions, for its standby.
    pub(super) images: InUse,
    /// As a standby, the images that it loads ahead.
    pub(super) loads: Loads,
    /// The reason that it gave for not handing over its sessions.
    pub(super) stays: Option<String>,
    /// Sessions have left it for the next server, which gets this keeper: the connection, and the clients that stay, with
    /// reasons.
    pub(super) parted: Option<(Stranger, String)>,
    /// It ends with the clients that could not move to the next server.
    pub(super) left_behind: bool,
    /// It serves one client of this user, which needs a server of its own, and ends with it.
    pub(super) single: Option<u32>,
    /// It was started for a single client, with few hardware queues.
    pub(super) for_single: bool,
    /// It does not know yet whether clients may get servers of their own.
    pub(super) asks_separation: bool,
    /// Sessions that have asked for a server of their own.
    pub(super) need_own: VecDeque<u64>,
    /// When it is asked whether its clients can move by now.
    pub(super) later: Later,
    /// It was told to end once its clients have gone.
    pub(super) ends_later: bool,
    /// It was told to end at once, with its clients.
    pub(super) ends_now: bool,
    /// A connection that is closed as soon as its threads end.
    life: Option<Stranger>,
    /// Its threads are ending: until then, it is looked at often.
    dying_until: Option<Instant>,
    /// The connection to the keeper of its sessions, with which the next server continues them.
    pub(super) keeper: Option<Stranger>,
    /// Since when it has had no clients; kept if users are apart.
    pub(super) idle_since: Option<Instant>,
    /// It serves the processes of this quarantined program only.
    pub quarantined: Option<Program>,
    /// The protocols that it speaks.
    pub release: Spoken,
    /// Its executable, if this daemon can start it again.
    pub(super) executable: Option<Arc<Executable>>,
    /// Findings about programs in its reports that the daemon has not processed yet.
    pub(super) findings: Findings,
    /// Its reports on traces that have not been handled yet.
    pub(super) traced: Vec<Totals>,
    /// Its part in the users' shares of the devices.
    pub(super) share: shares::Part,
    /// Its reports on moves of memory that have not been handled yet: order, session, outcome.
    pub(super) moves: Vec<(u64, u64, Result<Placement, Unmoved>)>,
}

impl Server {
    /// Clients of the server that it replaces, whose sessions it may restore until it is ready.
    pub(super) fn to_restore(&self) -> &[i32] {
        match self.is_starting() {
            true => &self.of_predecessor,
            false => &[],
        }
    }

    /// Its clients whose programs are known.
    pub(super) fn known_clients(&self) -> Clients {
        let known = self
            .sessions
            .values()
            .filter(|client| client.program.is_some());
        let identity = |client: &Client| Identity {
            command: client.command.clone(),
            program: client.program.clone(),
        };
        known
            .map(|client| ((client.pid, client.uid), identity(client)))
            .collect()
    }

    /// `trusted`: its user is allowed to command the daemon.
    pub(super) fn new(
        (pid, Owner { uid, gid, named }): (i32, Owner),
        trusted: bool,
        process: Process,
        link: Link,
        limits: Limits,
    ) -> Server {
        Server {
            pid,
            uid,
            gid,
            named,
            trusted,
            knows_uuids: false,
            started: Instant::now(),
            state: State::Initializing,
            process,
            link: Some(link),
            link_full: false,
            log_pending: false,
            sessions: BTreeMap::new(),
            devices: Vec::new(),
            limits,
            limits_pending: false,
            usage: Vec::new(),
            unread: Vec::new(),
            inherited: Clients::new(),
            of_predecessor: Vec::new(),
            handed_over: Vec::new(),
            kill_at: None,
            killed: None,
            remains: None,
            part: Part::None,
            succeeded: false,
            standby_of: None,
            stands_by: None,
            next_standby: NextStandby::default(),
            adopts_by: None,
            images: InUse::default(),
            loads: Loads::default(),
            stays: None,
            parted: None,
            left_behind: false,
            single: None,
            for_single: false,
            asks_separation: false,
            need_own: VecDeque::new(),
            later: Later::default(),
            ends_later: false,
            ends_now: false,
            keeper: None,
            life: None,
            dying_until: None,
            share: shares::Part::default(),
            idle_since: None,
            quarantined: None,
            release: Spoken::default(),
            executable: None,
            findings: Findings::default(),
            traced: Vec::new(),
            moves: Vec::new(),
        }
    }

    /// User and group of the servers that continue its sessions.
    pub(super) fn owner(&self) -> Owner {
        Owner {
            uid: self.uid,
            gid: self.gid,
            named: self.named,
        }
    }

    /// Process ids of the clients, in order of their coming.
    pub fn clients(&self) -> impl Iterator<Item = i32> + '_ {
        self.sessions.values().map(|client| client.pid)
    }

    /// Sessions and their clients, in order of their coming.
    pub fn sessions(&self) -> impl Iterator<Item = (u64, &Client)> + '_ {
        self.sessions
            .iter()
            .map(|(session, client)| (*session, client))
    }

    /// The sessions of a process.
    ///
    /// # Errors
    /// It has none, in words.
    pub fn sessions_of(&self, client: i32) -> Result<Vec<u64>, String> {
        let sessions: Vec<u64> = self
            .sessions()
            .filter(|(_, of)| of.pid == client)
            .map(|(session, _)| session)
            .collect();
        if sessions.is_empty() {
            return Err(format!("Client {client} of server {} not found", self.pid));
        }
        Ok(sessions)
    }

    /// Whether another server continues its sessions, while its process ends.
    pub fn succeeded(&self) -> bool {
        self.succeeded
    }

    /// Whether a session is alive.
    pub fn has_session(&self, session: u64) -> bool {
        self.sessions.contains_key(&session)
    }

    /// Whether the link should be watched for room.
    pub fn link_full(&self) -> bool {
        self.link_full
    }

    /// The link, while it is open.
    pub fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(Link::as_fd)
    }

    /// A connection of which the end tells that its threads end.
    pub fn life(&self) -> Option<BorrowedFd<'_>> {
        self.life.as_ref().map(AsFd::as_fd)
    }

    /// Notes that its threads end.
    pub(super) fn note_dying(&mut self) {
        if self.life.take().is_some() {
            self.dying_until = Some(Instant::now() + DYING);
        }
    }

    /// Whether its threads are ending or have ended, as it seems.
    pub(super) fn is_dying(&self) -> bool {
        self.link.is_none() || self.dying_until.is_some()
    }

    /// Notes that it was looked at.
    pub(super) fn note_look(&mut self, now: Instant) {
        self.dying_until
            .take_if(|until| *until <= now || self.succeeded);
    }

    /// When to look next whether its threads have ended.
    pub(super) fn look_at(&self) -> Option<Instant> {
        let until = self.dying_until.filter(|_| !self.succeeded)?;
        Some(until.min(Instant::now() + LOOK_AGAIN))
    }

    /// Becomes readable when the process of a server that was taken over has ended.
    pub fn end(&self) -> Option<BorrowedFd<'_>> {
        self.process.end()
    }

    /// Whether it may be given one more client.
    pub(super) fn has_room(&self) -> bool {
        self.handed_over.len() < MOST_CLIENTS
    }

    /// Whether no other process can have a context on one of its devices.
    pub(super) fn is_exclusive(&self) -> bool {
        self.devices.iter().any(DeviceInfo::is_exclusive)
    }

    /// Whether it can serve a client with this wire.
    pub(super) fn speaks(&self, wire: Wire) -> bool {
        self.release.speaks(wire)
    }

    /// Whether it is not ready yet, unless it was told to end at once: it still restores the sessions of its predecessor.
    pub(super) fn is_starting(&self) -> bool {
        let is_ready = !self.devices.is_empty();
        self.state == State::Initializing
            || self.state == State::Stopping && !self.ends_now && !is_ready
    }

    /// Whether it serves clients, new ones unless it was told to end.
    pub(super) fn is_serving(&self) -> bool {
        let goes_on = self.state == State::Stopping && !self.ends_now;
        self.state == State::Active || goes_on && !self.is_starting()
    }

    /// Whether another server may continue its sessions: it serves, or has been left behind with clients that could not move.
    pub(super) fn may_hand_over(&self) -> bool {
        let was_left = self.left_behind && self.state == State::Stopping && !self.ends_now;
        self.state == State::Active || was_left
    }

    /// Whether clients are connected that have not ended.
    pub(super) fn has_live_clients(&self) -> bool {
        self.sessions.values().any(|client| !client.stuck)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.sessions.is_empty() && self.handed_over.is_empty()
    }

    pub(super) fn stop(&mut self, force: bool) {
        match force {
            true => self.ends_now = true,
            false => self.ends_later = true,
        }
        // If a hand-over is in progress, either it is called off or the next server gets the order.
        let hands_over = matches!(self.state, State::HandingOver | State::HandedOver);
        if force || !hands_over {
            self.state = State::Stopping;
        }
        if let Some(Err(error)) = self.link.as_ref().map(|link| link.order_shutdown(force)) {
            tracing::warn!("Server {}: {error}", self.pid);
        }
        if force {
            self.end_within(FORCED_END_PATIENCE);
        }
    }

    fn end_within(&mut self, patience: Duration) {
        let at = Instant::now() + patience;
        self.kill_at = Some(self.kill_at.map_or(at, |earlier| earlier.min(at)));
        self.remains = None;
    }

    /// Why it cannot be ended, and the remedy, in words; `None` for any other server.
    pub fn remains(&self) -> Option<&str> {
        self.remains.as_deref()
    }

    pub(super) fn hand_log(&mut self, log: BorrowedFd<'_>) {
        match self.link.as_ref().map(|link| link.hand_log(log)) {
            // Retried when the link has room.
            Some(Err(error)) if error.would_block() => {
                self.log_pending = true;
                self.link_full = true;
            }
            Some(Err(error)) => tracing::warn!("Server {}: {error}", self.pid),
            Some(Ok(())) | None => self.log_pending = false,
        }
    }

    /// Sends the limits to the server if it does not have them, as soon as the link has room. No client is handed over before.
    pub(super) fn send_limits(&mut self) {
        if !self.limits_pending {
            return;
        }
        match self
            .link
            .as_ref()
            .map(|link| link.order_limits(&self.limits))
        {
            Some(Err(error)) if error.would_block() => self.link_full = true,
            Some(Err(error)) => {
                tracing::warn!("Server {}: {error}", self.pid);
                self.limits_pending = false;
            }
            Some(Ok(())) | None => self.limits_pending = false,
        }
    }

    pub(super) fn close_link(&mut self) {
        self.link = None;
        self.link_full = false;
        self.end_within(END_PATIENCE);
    }

    pub(super) fn kill(&mut self) {
        self.killed = Some(self.process.kill());
        self.kill_at = Some(Instant::now() + END_PATIENCE);
    }

    /// It has not ended in time.
    pub(super) fn overdue(&mut self) {
        let (pid, uid) = (self.pid, self.uid);
        let Some(outcome) = self.killed.take() else {
            tracing::warn!("Server {pid} has not ended in time, killing it");
            return self.kill();
        };
        self.kill_at = None;
        let why = match outcome {
            Ok(()) => String::from(
                "it was killed and still has not ended: it waits within the kernel, most likely in the GPU's driver, \
                 whose messages dmesg shows; if it does not end, restart the machine",
            ),
            Err(error) => format!(
                "this daemon may not kill it ({error}), since it lacks the capability CAP_KILL; end it as root or \
                 as that user with \"kill -9 {pid}\", and give the daemon that capability (in a container: KILL)"
            ),
        };
        let text = format!("Server {pid} of user {uid} does not end: {why}");
        tracing::error!("{text}");
        self.remains = Some(text);
    }

    /// Without a keeper, or unasked, nothing has left. New clients get another server than one that was left with clients, so
    /// if none of these leaves either, no further server is needed.
    fn note_parting(&mut self, sessions: usize, stay: String, keeper: Option<Stranger>) {
        if self.state != State::HandingOver {
            return;
        }
        tracing::info!(
            "Server {} hands over {sessions} clients; others stay",
            self.pid
        );
        self.state = match self.ends_later {
            true => State::Stopping,
            false => State::Active,
        };
        // It is shown on operators' terminals, like the other reasons that a server gives.
        let stay = one_line(&stay);
        match keeper {
            Some(keeper) if sessions > 0 || !self.left_behind => {
                self.parted = Some((keeper, stay));
            }
            _ => self.stays = Some(stay),
        }
    }

    /// # Errors
    /// A report that no real server makes, in words.
    fn note(&mut self, report: ToDaemon) -> Result<(), String> {
        let pid = self.pid;
        match report {
            ToDaemon::Ready { devices } => {
                check_devices(&devices)?;
                if self.standby_of.is_some() {
                    return Err("a standby says that it is ready".into());
                }
                self.devices = devices;
                if self.state == State::Initializing {
                    self.state = State::Active;
                }
                self.asks_separation = true;
                tracing::info!("NEW SERVER {pid}: Ready");
                for (ordinal, device) in self.devices.iter().enumerate() {
                    if device.is_exclusive() {
                        tracing::info!(
                            "Device {ordinal} is in {} mode: server {pid} has no standby, and no other server works beside it",
                            device.compute_mode
                        );
                    }
                }
            }
            ToDaemon::Connected {
                session,
                pid: client,
                uid,
                partition,
                namespace,
            } => {
                if uid != self.uid && !self.trusted {
                    return Err(format!("it reports a client of user {uid}"));
                }
                if self.sessions.len() >= MOST_CLIENTS {
                    return Err(format!("it reports over {MOST_CLIENTS} clients"));
                }
                let coming = self.settle(client).map(|coming| coming.identity);
                // A client of a previous server was not handed over by this daemon to this one.
                let known = coming.or_else(|| self.inherited.remove(&(client, uid)));
                if known.is_none() {
                    self.unread.push(session);
                }
                let known = known.unwrap_or_default();
                let client = Client {
                    pid: client,
                    uid,
                    stuck: false,
                    partition: partition.filter(|name| is_name(name)),
                    namespace: namespace.filter(|name| check_name(name).is_ok()),
                    command: known.command,
                    program: known.program,
                    reading: None,
                };
                self.sessions.insert(session, client);
                self.images.note_change(Instant::now());
            }
            ToDaemon::Stuck { session } => {
                if let Some(client) = self.sessions.get_mut(&session) {
                    client.stuck = true;
                }
            }
            ToDaemon::Refused {
                pid: client,
                status,
                reason,
            } => {
                let user = self.settle(client).map_or_else(
                    || "unknown user".to_owned(),
                    |coming| format!("user {}", coming.who.uid),
                );
                tracing::info!(
                    "Server {pid} refused client {client} of {user} with status {status}: {reason}"
                );
            }
            ToDaemon::Gone {
                session,
                pid: client,
                reason,
            } => {
                self.note_end(session, reason.is_some());
                self.images.note_change(Instant::now());
                if let Some(reason) = reason {
                    tracing::info!("Server {pid} ended client {client}: {reason}");
                }
            }
            // Reported already.
            ToDaemon::Fault { .. } if self.state == State::Fault => {}
            ToDaemon::Fault { status, suspects } => {
                self.note_suspects(suspects)?;
                self.state = State::Fault;
                self.end_within(END_PATIENCE);
                tracing::error!("Server {pid} has lost its context: {:?}", CUresult(status));
            }
            ToDaemon::Standby { formats } => {
                if self.standby_of.is_none() {
                    return Err("it says that it is a standby".into());
                }
                self.stands_by = Some(formats);
                tracing::info!("Server {pid} stands by");
            }
            ToDaemon::Adopts => self.adopts_by = None,
            ToDaemon::LoadedAhead => self.loads.note_end(),
            ToDaemon::ImagesChanged => self.images.note_change(Instant::now()),
            ToDaemon::MemoryShort => self.images.short = true,
            ToDaemon::Work { busy, wanted } => self.note_work(busy, wanted),
            ToDaemon::NeedsOwnServer { session } => self.note_need(session),
            ToDaemon::Stays { why } if self.state == State::HandingOver => {
                self.state = match self.ends_later {
                    true => State::Stopping,
                    false => State::Active,
                };
                self.stays = Some(one_line(&why));
            }
            ToDaemon::Stays { .. } => {}
            ToDaemon::HandsOver { sessions } => {
                if self.state == State::HandingOver {
                    self.state = State::HandedOver;
                    self.end_within(END_PATIENCE);
                    tracing::info!("Server {pid} hands over {sessions} clients");
                }
            }
            ToDaemon::TraceStarted { error } => self.note_trace_start(error),
            ToDaemon::TraceEnded(totals) => self.note_trace_end(totals),
            ToDaemon::MemoryMoved {
                number,
                session,
                outcome,
            } => {
                let outcome = outcome.map_err(|why| match why {
                    Unmoved::Failed(why) => Unmoved::Failed(one_line(&why)),
                    why => why,
                });
                self.moves.push((number, session, outcome));
            }
            ToDaemon::Stopping => (self.state, self.ends_later) = (State::Stopping, true),
            // Handled where the descriptor is.
            ToDaemon::Keeper | ToDaemon::Life | ToDaemon::Images | ToDaemon::Parts { .. } => {}
            ToDaemon::Usage {
                question,
                clients,
                gate_moments,
                last,
            } => self.usage.push(Report {
                server: pid,
                question,
                clients,
                gate_moments,
                last,
            }),
        }
        Ok(())
    }

    /// The outcome of handing over a client is known.
    fn settle(&mut self, client: i32) -> Option<Coming> {
        let is_it = |coming: &Coming| coming.who.pid == client;
        let index = self.handed_over.iter().position(is_it)?;
        Some(self.handed_over.remove(index))
    }

    pub(super) fn read_reports(&mut self, limit: usize) {
        for _ in 0..limit {
            let Some(link) = &self.link else { return };
            match link.next_report_with_descriptor() {
                Ok(Some((report, descriptor))) => {
                    if report == ToDaemon::Keeper {
                        self.keeper = descriptor;
                    } else if report == ToDaemon::Life {
                        // To look at another kind of file might take any time.
                        self.life = descriptor.filter(is_socket);
                    } else if report == ToDaemon::Images {
                        self.images.note_answer(descriptor);
                    } else if let ToDaemon::Parts { sessions, stay } = report {
                        self.note_parting(sessions, stay, descriptor);
                    } else if let Err(why) = self.note(report) {
                        tracing::error!("Server {}: {why}", self.pid);
                        self.close_link();
                        return self.kill();
                    }
                }
                Ok(None) => return self.close_link(),
                Err(error) if error.would_block() => return,
                Err(error @ LinkError::Unknown(_)) => {
                    tracing::info!("Server {}: {error}", self.pid)
                }
                Err(error) => {
                    tracing::error!("Server {}: {error}", self.pid);
                    self.close_link();
                    return self.kill();
                }
            }
        }
    }
}

fn is_socket(descriptor: &Stranger) -> bool {
    getsockopt(descriptor, sockopt::SockType).is_ok()
}

/// Whether a name that a server reports can be shown on operators' terminals.
fn is_name(text: &str) -> bool {
    text.len() <= LONGEST_NAME && !text.contains(char::is_control)
}

/// Whether this is a plausible list of devices. Their names are shown on operators' terminals.
fn check_devices(devices: &[DeviceInfo]) -> Result<(), String> {
    if devices.len() > MAX_DEVICES {
        return Err(format!("it reports {} devices", devices.len()));
    }
    let is_device = |device: &DeviceInfo| {
        [&device.name, &device.uuid, &device.pci].map(|text| is_name(text)) == [true; 3]
    };
    if !devices.iter().all(|device| device.chunks.is_plausible()) {
        return Err("it reports a device with impossible chunks".to_owned());
    }
    if !devices.iter().all(is_device) {
        return Err("it reports a device with an invalid name".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_no_machine_has_are_refused() {
        let device = |name: &str| DeviceInfo {
            name: name.into(),
            uuid: "GPU-0".into(),
            pci: "0000:00:06.0".into(),
            memory: 1 << 30,
            compute_mode: Default::default(),
            chunks: Default::default(),
        };
        assert_eq!(
            check_devices(&vec![device("NVIDIA H200"); MAX_DEVICES]),
            Ok(())
        );
        for devices in [
            vec![device("NVIDIA H200"); MAX_DEVICES + 1],
            vec![device("\x1b[2J")],
            vec![device(&"x".repeat(LONGEST_NAME + 1))],
        ] {
            assert!(check_devices(&devices).is_err());
        }
    }

    #[test]
    fn states_are_printed_as_nvidia_prints_them() {
        let printed: Vec<String> = [State::Initializing, State::Active, State::Fault]
            .iter()
            .map(State::to_string)
            .collect();
        assert_eq!(printed, ["INITIALIZING", "ACTIVE", "FAULT"]);
    }
}
