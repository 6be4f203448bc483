//! The servers of a daemon and the clients that wait for one.
//!
//! The servers of one user serve at a time, or those of all users (`apart.rs`). [`Servers::advance`] is the policy: it is
//! called after every event and takes every waiting client as far as possible.

mod ahead;
mod apart;
mod apply;
mod later;
mod limits;
mod moves;
mod named;
mod names;
mod namespaces;
mod orphans;
mod own;
mod partitions;
mod quarantine;
mod server;
mod shares;
mod standby;
mod traces;
mod versions;
mod waits;

use super::defaults::Defaults;
use super::greeting;
use super::process::Process;
use super::program::readers::{READ_PATIENCE, Readers, Reading};
use super::program::{Identity, Program};
use super::quarantine::Quarantine;
use super::releases::{Executable, Releases};
use super::spawn::{Launcher, Owner, Start};
use crate::link::{Arrival, Link};
use crate::logging::limit;
use crate::seqpacket;
pub use apply::{Target, Wrong};
use moves::Moves;
use mpsshim_api::cuda::{
    CUDA_ERROR_DEVICE_UNAVAILABLE, CUDA_ERROR_MPS_CONNECTION_FAILED,
    CUDA_ERROR_MPS_SERVER_NOT_READY, CUresult,
};
use mpsshim_model::device::DeviceInfo;
use mpsshim_proto::handshake::{MAGIC_REFUSAL, WAIT_NOTICE, Wire};
pub use named::{Definition, NamedId, OwnLimits, Wanted, not_found, without_device};
pub use namespaces::{Entrance, Path as NamespacePath};
use quarantine::{Coming, Lacking, MOST_APART};
pub use server::{Client, Server, State};
use standby::{Predecessor, Restart};
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use traces::Trace;
pub use waits::Wait;
use zerocopy::IntoBytes;

/// Number of failed starts within [`FAILURE_WINDOW`], not counting the time that they took, after which clients of the user
/// are refused.
const FAILURE_LIMIT: usize = 3;
const FAILURE_WINDOW: Duration = Duration::from_secs(10);
/// Most reports that are read of a server whose threads have ended: more than a link holds.
const LAST_REPORTS: usize = 1 << 16;
/// Reports read from one server before the other servers are served.
const REPORTS_A_TURN: usize = 64;

/// Recent failed starts, by user or named server, and until when each counts.
#[derive(Default)]
struct Failures(Vec<(Whose, Instant)>);

/// A user, or a named server.
type Whose = (u32, Option<NamedId>);

impl Failures {
    /// `took`: how long the start took until it failed. A server waits for some seconds for a device that another process
    /// uses, so earlier failures count for that much longer.
    fn add(&mut self, owner: Owner, now: Instant, took: Duration) {
        let whose = (owner.uid, owner.named);
        for (_, until) in self.0.iter_mut().filter(|(of, _)| *of == whose) {
            *until += took;
        }
        self.0.push((whose, now + FAILURE_WINDOW));
    }

    fn too_many(&mut self, owner: Owner, now: Instant) -> bool {
        let whose = (owner.uid, owner.named);
        self.0.retain(|(_, until)| now < *until);
        self.0.iter().filter(|(of, _)| *of == whose).count() >= FAILURE_LIMIT
    }
}

struct Waiting {
    number: u64,
    /// When the client is told the reason; `None`: it has been, or wants none.
    notice_at: Option<Instant>,
    client: Arrival,
    /// The user or users that its server must serve.
    owner: Owner,
    identity: Sought,
}

/// The command line and program of a client that waits.
enum Sought {
    /// They are being read, until this deadline at most.
    Reading(Reading, Instant),
    /// The result.
    Found(Identity),
}

impl Waiting {
    /// Whether it is decided which server it needs.
    fn is_identified(&self) -> bool {
        matches!(self.identity, Sought::Found(_))
    }

    /// The wire of its library.
    fn wire(&self) -> Wire {
        self.client.hello.wire()
    }

    /// Its program, if known.
    fn program(&self) -> Option<&Program> {
        match &self.identity {
            Sought::Reading(..) => None,
            Sought::Found(identity) => identity.program.as_ref(),
        }
    }

    /// Whether it is being read under this number.
    fn is_read_as(&self, number: u64) -> bool {
        matches!(&self.identity, Sought::Reading(reading, _) if reading.number() == number)
    }

    /// When it must have been read.
    fn read_until(&self) -> Option<Instant> {
        match &self.identity {
            Sought::Reading(_, until) => Some(*until),
            Sought::Found(_) => None,
        }
    }
}

/// All servers and all clients that wait.
pub struct Servers {
    launcher: Launcher,
    releases: Releases,
    defaults: Defaults,
    named: Vec<Definition>,
    last_named: NamedId,
    last_space: u32,
    running: Vec<Server>,
    waiting: Vec<Waiting>,
    readers: Readers,
    /// Owners of servers requested by `start_server`.
    wanted: Vec<Owner>,
    failures: Failures,
    next_number: u64,
    /// Deadline for servers of a dead daemon to connect.
    orphans_until: Option<Instant>,
    closing: bool,
    trace: Option<Trace>,
    restarts: Vec<Restart>,
    moves: Moves,
    quarantine: Quarantine,
    /// The time that users have had of the devices.
    ledger: shares::Ledger,
    /// The devices of the last server that was ready admit one process.
    exclusive: bool,
    /// Number of server faults so far.
    faults: Arc<AtomicU64>,
}

impl Servers {
    /// No servers yet.
    ///
    /// # Errors
    /// As [`Readers::new`].
    pub fn new(launcher: Launcher, defaults: Defaults) -> io::Result<Servers> {
        let quarantine = Quarantine::new(launcher.quarantine());
        Ok(Servers {
            releases: Releases::new(&launcher.executable()),
            launcher,
            defaults,
            named: Vec::new(),
            last_named: 0,
            last_space: 0,
            running: Vec::new(),
            waiting: Vec::new(),
            readers: Readers::new()?,
            wanted: Vec::new(),
            failures: Failures::default(),
            next_number: 1,
            orphans_until: None,
            closing: false,
            trace: None,
            restarts: Vec::new(),
            moves: Moves::default(),
            quarantine,
            ledger: shares::Ledger::default(),
            exclusive: false,
            faults: Arc::default(),
        })
    }

    /// How servers are started.
    pub fn launcher(&self) -> &Launcher {
        &self.launcher
    }

    /// The servers, oldest first, without standbys.
    pub fn iter(&self) -> impl Iterator<Item = &Server> + Clone {
        let serves = |server: &&Server| server.standby_of.is_none();
        self.running.iter().filter(serves)
    }

    /// The servers, standbys included.
    pub fn all(&self) -> impl Iterator<Item = &Server> + Clone {
        self.running.iter()
    }

    /// Connections of the clients that wait, by number.
    pub fn waiting(&self) -> impl Iterator<Item = (u64, BorrowedFd<'_>)> {
        self.waiting
            .iter()
            .map(|waiting| (waiting.number, waiting.client.connection.as_fd()))
    }

    /// A client has said hello, at the socket of a named server or at that of all users' servers.
    pub fn arrive(&mut self, mut client: Arrival, gate: Option<Entrance>) {
        let (pid, uid) = (client.who.pid, client.who.uid);
        if self.closing {
            return refuse(
                &client,
                CUDA_ERROR_MPS_CONNECTION_FAILED,
                "the daemon is shutting down",
            );
        }
        if !self.launcher.serves(uid) {
            let reason = "this daemon does not run as root and serves its own user only";
            return refuse(&client, CUDA_ERROR_MPS_SERVER_NOT_READY, reason);
        }
        let wire = client.hello.wire();
        if self.orphans_until.is_none()
            && !self.running.iter().any(|server| server.speaks(wire))
            && let Err(why) = self.executable_for(Some(wire))
        {
            return refuse(&client, CUDA_ERROR_MPS_CONNECTION_FAILED, &why);
        }
        let owner = match gate.map(|gate| self.owner_at_gate(gate, uid)) {
            None => self.launcher.owner(uid, Some(client.who.gid)),
            Some(Ok((owner, namespace))) => {
                client.namespace = namespace;
                owner
            }
            Some(Err(why)) => return refuse(&client, CUDA_ERROR_MPS_SERVER_NOT_READY, &why),
        };
        let number = self.next_number;
        self.next_number += 1;
        let reading = self.readers.read(number, pid, uid);
        if reading.is_none() {
            tracing::warn!(
                "The program of client {pid} is unknown: too many processes are being read"
            );
        }
        let is_identified = reading.is_none();
        let wants_notice = client.hello.notices == 1;
        self.waiting.push(Waiting {
            number,
            notice_at: wants_notice.then(|| Instant::now() + WAIT_NOTICE),
            client,
            owner,
            identity: match reading {
                Some(reading) => Sought::Reading(reading, Instant::now() + READ_PATIENCE),
                None => Sought::Found(Identity::default()),
            },
        });
        if is_identified {
            self.go_on(number, Identity::default());
        }
    }

    /// Readable when programs of clients have been read ([`Servers::programs_read`]).
    pub fn readers(&self) -> BorrowedFd<'_> {
        self.readers.wake()
    }

    /// Programs of clients have been read. Clients that have gone, or that have gone on without, are ignored.
    pub fn programs_read(&mut self) {
        for (number, identity) in self.readers.take() {
            let mut waiting = self.waiting.iter();
            if waiting.any(|one| one.is_read_as(number)) {
                self.go_on(number, identity);
                continue;
            }
            let servers = self.running.iter_mut();
            let mut clients = servers.flat_map(|server| server.sessions.values_mut());
            let is_read = |client: &&mut Client| {
                let reading = client.reading.as_ref();
                reading.is_some_and(|reading| reading.number() == number)
            };
            if let Some(client) = clients.find(is_read) {
                client.command = identity.command;
                client.program = identity.program;
                client.reading = None;
            }
        }
    }

    /// Begins to read the command lines and programs of clients that this daemon did not hand over to their server.
    fn read_programs_of(&mut self, pid: i32) {
        let mut running = self.running.iter_mut();
        let Some(server) = running.find(|server| server.pid == pid) else {
            return;
        };
        for session in mem::take(&mut server.unread) {
            if let Some(client) = server.sessions.get_mut(&session) {
                client.reading = self.readers.read(self.next_number, client.pid, client.uid);
                self.next_number += 1;
            }
        }
    }

    /// A waiting client's command line and program are known, or remain unknown.
    fn go_on(&mut self, number: u64, mut identity: Identity) {
        let mut waiting = self.waiting.iter_mut();
        let Some(waiting) = waiting.find(|waiting| waiting.number == number) else {
            return;
        };
        let (owner, who) = (waiting.owner, waiting.client.who);
        let _guard = limit::caused_by_user(who.uid);
        if !(self.quarantine.is_on() && quarantine::is_program_needed(&waiting.client)) {
            identity.program = None;
        }
        let program = identity.program.as_ref();
        let needs = quarantine::needed(&self.quarantine, &self.running, (owner, program));
        let wire = waiting.wire();
        let ready = self
            .running
            .iter()
            .any(|server| server.serves(owner, needs, Some(wire)) && server.state == State::Active);
        let what = if ready {
            "Server already exists"
        } else {
            "Server is not ready, push client to pending list"
        };
        tracing::info!("NEW CLIENT {} from user {}: {what}", who.pid, who.uid);
        waiting.identity = Sought::Found(identity);
        self.advance();
    }

    /// Clients whose programs could not be read in time go on without.
    fn expire_readings(&mut self, now: Instant) {
        let is_late = |waiting: &&Waiting| waiting.read_until().is_some_and(|at| at <= now);
        let late = self.waiting.iter().filter(is_late);
        let late: Vec<_> = late.map(|one| (one.number, one.client.who)).collect();
        for (number, who) in late {
            let guard = limit::caused_by_user(who.uid);
            tracing::warn!(
                "The program of client {} of user {} is unknown: its /proc files could not be read within {} s",
                who.pid,
                who.uid,
                READ_PATIENCE.as_secs()
            );
            drop(guard);
            self.go_on(number, Identity::default());
        }
    }

    /// A client that waited has closed its connection.
    pub fn leave(&mut self, number: u64) {
        if let Some(index) = self
            .waiting
            .iter()
            .position(|waiting| waiting.number == number)
        {
            let gone = self.waiting.remove(index);
            let _guard = limit::caused_by_user(gone.client.who.uid);
            tracing::info!(
                "Client {} has gone while it waited for a server",
                gone.client.who.pid
            );
        }
    }

    /// Users of the clients that wait.
    pub fn waiting_users(&self) -> impl Iterator<Item = u32> {
        self.waiting.iter().map(|waiting| waiting.client.who.uid)
    }

    /// Refuses this user's most recent waiting client; `false`: none waits.
    pub fn turn_away(&mut self, uid: u32) -> bool {
        let of_user = |waiting: &Waiting| waiting.client.who.uid == uid;
        let Some(index) = self.waiting.iter().rposition(of_user) else {
            return false;
        };
        let waiting = self.waiting.remove(index);
        let reason = "the daemon has too many connections";
        refuse(&waiting.client, CUDA_ERROR_MPS_CONNECTION_FAILED, reason);
        true
    }

    /// Requests a server for this user; the error says why that is impossible.
    pub fn want(&mut self, uid: u32) -> Result<(), String> {
        if !self.launcher.serves(uid) {
            return Err(format!(
                "this daemon does not run as root and cannot start a server for user {uid}"
            ));
        }
        if self.closing {
            return Err("the daemon is shutting down".into());
        }
        self.wanted.push(self.launcher.owner(uid, None));
        self.advance();
        Ok(())
    }

    /// The link of a server has something to read, or room to write.
    pub fn link_ready(&mut self, pid: i32) {
        if let Some(server) = self.running.iter_mut().find(|server| server.pid == pid) {
            server.link_full = false;
            // The server runs as its user, and that user can make it report anything.
            let reported = limit::caused_by_user(server.uid);
            server.read_reports(REPORTS_A_TURN);
            drop(reported);
            server.send_limits();
            if server.log_pending {
                server.hand_log(self.launcher.log());
            }
            let found = server.take_findings();
            let (uid, devices) = (server.uid, server.devices.clone());
            let is_named = server.named.is_some();
            self.weigh(found);
            self.read_programs_of(pid);
            if !devices.is_empty() {
                // Where users are apart, an untrusted user's report must not keep other users' servers from starting.
                if !is_named && (!self.users_are_apart() || self.launcher.trusts(uid)) {
                    self.exclusive = devices.iter().any(DeviceInfo::is_exclusive);
                }
                self.learn_devices_of(pid, &devices);
            }
            self.end_in_deleted_namespaces(pid);
            self.collect_moves();
            self.allow_separation(pid);
            self.part(pid);
            self.succeed_early(pid);
            self.share_out(Instant::now());
        }
        self.order_traces();
        self.advance();
        self.advance_restarts();
        self.begin_separations();
        self.keep_images();
        self.review_shares();
    }

    /// server.log is this file from now on.
    pub fn change_log(&mut self, log: File) {
        self.launcher.set_log(log);
        for server in &mut self.running {
            server.hand_log(self.launcher.log());
        }
    }

    /// Some child has ended.
    pub fn reap(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            match self.running[index].process.ended() {
                Ok(Some(status)) => {
                    let server = self.running.remove(index);
                    self.ended(server, status);
                }
                Ok(None) => index += 1,
                Err(error) => {
                    tracing::error!(
                        "Server {}: cannot wait for it: {error}",
                        self.running[index].pid
                    );
                    index += 1;
                }
            }
        }
        self.advance();
        self.advance_restarts();
        self.begin_separations();
        self.review_shares();
    }

    /// Without a status: another daemon's child.
    fn ended(&mut self, mut server: Server, status: Option<ExitStatus>) {
        // Its last reports may still be in the link.
        let reported = limit::caused_by_user(server.uid);
        server.read_reports(LAST_REPORTS);
        drop(reported);
        self.end_trace_of(&mut server);
        self.weigh(server.take_findings());
        let pid = server.pid;
        match status {
            Some(status) => {
                // As in a shell: 128 plus the signal's number.
                let signal = || 128 + status.signal().unwrap_or(0);
                let code = status.code().unwrap_or_else(signal);
                tracing::info!("Server {pid} exited with status {code}");
            }
            None => tracing::info!("Server {pid} exited"),
        }
        let clients = server.sessions.len() + server.handed_over.len();
        if server.succeeded || self.succeed(&mut server) {
            return;
        }
        // It has reported them when it was ready.
        if !server.devices.is_empty() {
            self.note_adopted(pid);
        }
        if let Some(of) = server.standby_of {
            if server.state != State::Stopping {
                tracing::error!("Standby {pid} has ended; server.log says why");
            }
            return self.note_end_of_standby(of, server.loads.is_pending());
        }
        // While it is restarted once more, the last client that it was left with may end, and the server with it.
        let ended_with_last = server.left_behind && clients == 0;
        match server.state {
            State::Stopping => {}
            State::HandingOver if ended_with_last && status.is_none_or(|one| one.success()) => {}
            State::HandedOver => {
                tracing::error!(
                    "Server {pid} has handed over {clients} clients, and no server could go on with them"
                );
            }
            State::Initializing if status.is_none() => {
                // Most likely it ended with its last client.
                tracing::info!(
                    "Server {pid} ended as it was taken over; the next client gets a new server"
                );
            }
            State::Initializing => {
                (self.failures).add(server.owner(), Instant::now(), server.started.elapsed());
                tracing::error!("Server {pid} ended before it was ready; server.log says why");
                if let Some(why) = self.cannot_be_apart(server.uid)
                    && server.named.is_none()
                {
                    self.refuse_all(server.owner(), CUDA_ERROR_DEVICE_UNAVAILABLE, &why);
                }
            }
            State::Fault => {
                tracing::error!(
                    "Server {pid} ended after a fault, with {clients} clients; the next client gets a new server"
                );
            }
            State::Active | State::HandingOver => {
                tracing::error!(
                    "Server {pid} ended unexpectedly, with {clients} clients; the next client gets a new server"
                );
            }
        }
    }

    /// As [`Servers::succeed`], already while the server's process exits: the driver may take long to destroy its
    /// context. Not if the devices admit one process.
    fn succeed_early(&mut self, pid: i32) {
        let ending = |server: &Server| {
            server.pid == pid
                && server.is_dying()
                && server.process.is_exiting()
                && !server.is_exclusive()
        };
        let Some(at) = self.running.iter().position(ending) else {
            return;
        };
        let mut server = self.running.remove(at);
        // It sends no more of them; another process that has its link might.
        server.read_reports(LAST_REPORTS);
        if !server.succeeded && self.succeed(&mut server) {
            server.succeeded = true;
            if server.state != State::HandedOver {
                server.state = State::Fault;
            }
            server.sessions.clear();
        }
        self.running.insert(at, server);
    }

    /// The threads of a server end, as its connection for that tells.
    pub fn note_dying(&mut self, pid: i32) {
        if let Some(server) = self.running.iter_mut().find(|server| server.pid == pid) {
            server.note_dying();
        }
        self.look_at_dying(Instant::now());
    }

    /// Continues the sessions of servers whose threads have ended by now.
    fn look_at_dying(&mut self, now: Instant) {
        let dying = self.running.iter().filter(|one| one.look_at().is_some());
        let dying: Vec<(i32, u32)> = dying.map(|server| (server.pid, server.uid)).collect();
        for (pid, uid) in dying {
            let reported = limit::caused_by_user(uid);
            self.succeed_early(pid);
            drop(reported);
            if let Some(server) = self.running.iter_mut().find(|server| server.pid == pid) {
                server.note_look(now);
            }
        }
    }

    /// If a server has ended unexpectedly, starts another server that continues its sessions; returns whether it did.
    fn succeed(&mut self, server: &mut Server) -> bool {
        let is_starting = server.state == State::Initializing || !server.to_restore().is_empty();
        let hands_over = server.state == State::HandedOver;
        let ended_well = server.ends_now || self.closing && !hands_over;
        let is_idle = !server.has_live_clients() && !is_starting && !hands_over;
        if ended_well || is_idle || server.standby_of.is_some() {
            return false;
        }
        let Some(keeper) = server.keeper.take() else {
            return false;
        };
        let (pid, clients) = (server.pid, server.sessions.len());
        if is_starting {
            (self.failures).add(server.owner(), Instant::now(), server.started.elapsed());
            if self.failures.too_many(server.owner(), Instant::now()) {
                tracing::error!("The sessions that server {pid} was to go on with have ended");
                return false;
            }
        }
        if !hands_over {
            tracing::error!(
                "Server {pid} ended unexpectedly, with {clients} clients; the next server goes on with those that it can"
            );
        }
        self.replace(&Predecessor::of(server), keeper);
        true
    }

    /// When [`Servers::expire`] has something to do next.
    pub fn deadline(&self) -> Option<Instant> {
        self.running
            .iter()
            .filter_map(|server| server.kill_at)
            .chain(self.restart_deadline())
            .chain(self.standby_deadline())
            .chain(self.later_deadline())
            .chain(self.images_deadline())
            .chain(self.idle_deadline())
            .chain(self.orphans_until)
            .chain(self.running.iter().filter_map(Server::look_at))
            .chain(self.waiting.iter().filter_map(Waiting::read_until))
            .chain(self.waiting.iter().filter_map(|waiting| waiting.notice_at))
            .min()
    }

    /// Kills servers that have exceeded their time limit.
    pub fn expire(&mut self, now: Instant) {
        for server in self
            .running
            .iter_mut()
            .filter(|server| server.kill_at.is_some_and(|at| at <= now))
        {
            server.overdue();
        }
        self.look_at_dying(now);
        self.expire_readings(now);
        self.tell_reasons(now);
        self.expire_restarts(now);
        self.begin_separations();
        self.expire_adoptions(now);
        self.end_idle(now);
        self.ask_left(now);
        self.start_standbys();
        self.keep_images();
        if self.orphans_until.take_if(|at| *at <= now).is_some() {
            self.advance();
        }
    }

    /// Refuses clients from now on and tells every server to end; `force`: without waiting for its clients.
    pub fn close(&mut self, force: bool) {
        self.closing = true;
        self.wanted.clear();
        for waiting in self.waiting.drain(..) {
            refuse(
                &waiting.client,
                CUDA_ERROR_MPS_CONNECTION_FAILED,
                "the daemon is shutting down",
            );
        }
        for server in &mut self.running {
            if !force {
                tracing::info!(
                    "Try shutting down server {}, backoff is disabled",
                    server.pid
                );
            }
            server.stop(force || server.standby_of.is_some());
        }
    }

    /// Tells a server to end when its clients have gone, with `force` at once. Its user's next client gets another one.
    pub fn shut_down(&mut self, pid: i32, force: bool) {
        if let Some(server) = self.by_pid_mut(pid) {
            tracing::info!("Try shutting down server {pid}, backoff is disabled");
            server.stop(force);
        }
    }

    /// Tells a server to end the clients of a process; returns their sessions.
    ///
    /// # Errors
    /// Why that is impossible, in words.
    pub fn terminate(&self, pid: i32, client: i32) -> Result<Vec<u64>, String> {
        let (link, sessions) = self.sessions_of(pid, client)?;
        for session in &sessions {
            link.order_termination(*session)
                .map_err(|error| format!("Server {pid}: {error}"))?;
        }
        Ok(sessions)
    }

    /// The link to a server and the sessions there of a client process.
    fn sessions_of(&self, pid: i32, client: i32) -> Result<(&Link, Vec<u64>), String> {
        let server = self.by_pid(pid);
        let server = server.ok_or_else(|| format!("Server {pid} not found"))?;
        let sessions = server.sessions_of(client)?;
        let link = server.link.as_ref();
        Ok((
            link.ok_or_else(|| format!("Server {pid} is ending"))?,
            sessions,
        ))
    }

    /// The server with this process id.
    pub fn by_pid(&self, pid: i32) -> Option<&Server> {
        self.running.iter().find(|server| server.pid == pid)
    }

    /// Whether a server has a connection to this daemon.
    pub fn is_linked(&self, pid: i32) -> bool {
        self.by_pid(pid)
            .is_some_and(|server| server.link().is_some())
    }

    fn by_pid_mut(&mut self, pid: i32) -> Option<&mut Server> {
        self.running.iter_mut().find(|server| server.pid == pid)
    }

    /// Whether all servers have ended that can be ended.
    pub fn all_ended(&self) -> bool {
        self.running.iter().all(|server| server.remains.is_some())
    }

    /// Advances every waiting client as far as possible.
    fn advance(&mut self) {
        self.start_standbys();
        loop {
            self.hand_over();
            self.end_unneeded();
            self.note_idle(Instant::now());
            let Some(Lacking {
                owner,
                program,
                wire,
            }) = self.without_server()
            else {
                return;
            };
            if self.orphans_until.is_some() {
                return;
            }
            if self.failures.too_many(owner, Instant::now()) {
                self.give_up(owner);
            } else if self.may_start(owner, program.as_ref(), wire) {
                match self.executable_for(wire) {
                    Ok(executable) => {
                        self.start((owner, program), Start::Anew, &executable);
                    }
                    Err(why) => self.refuse_unspoken(wire, &why),
                }
            } else {
                // Another user's servers, or one of the same user that is ending. Those that work go on: the ranks of
                // a parallel program must all be served.
                let idle = self.servers_in_the_way(owner, program.as_ref(), wire);
                let running = self.running.iter_mut();
                for server in running.filter(|server| idle.contains(&server.pid)) {
                    tracing::info!(
                        "Shutting down idle server {} of user {} for user {}",
                        server.pid,
                        server.uid,
                        owner.uid
                    );
                    server.stop(false);
                }
                return;
            }
        }
    }

    /// Hands clients to servers that accept them.
    fn hand_over(&mut self) {
        let (running, list) = (&mut self.running, &self.quarantine);
        self.waiting.retain_mut(|waiting| {
            let Sought::Found(identity) = &waiting.identity else {
                return true;
            };
            let seeks = (waiting.owner, waiting.program());
            let needs = quarantine::needed(list, running, seeks);
            let takes = |server: &&mut Server| {
                server.serves(waiting.owner, needs, Some(waiting.wire()))
                    && server.state == State::Active
                    && !server.link_full
                    && server.has_room()
            };
            let Some(server) = running.iter_mut().find(takes) else {
                return true;
            };
            let Some(link) = &server.link else {
                return true;
            };
            match link.hand_over(&waiting.client) {
                Ok(()) => {
                    if server.quarantined.is_none()
                        && let Some(program) = waiting.program().filter(|one| list.holds(one))
                    {
                        let pid = waiting.client.who.pid;
                        let _guard = limit::caused_by_user(waiting.client.who.uid);
                        tracing::warn!(
                            "Client {pid} of the quarantined program {program} gets the usual server: there are servers for {MOST_APART} other programs"
                        );
                    }
                    server.handed_over.push(Coming {
                        who: waiting.client.who,
                        namespace: waiting.client.namespace.clone(),
                        identity: identity.clone(),
                    });
                    false
                }
                Err(error) if error.would_block() => {
                    server.link_full = true;
                    true
                }
                Err(error) => {
                    // The server is dying; the client waits for the next one.
                    tracing::warn!("Server {}: {error}", server.pid);
                    server.close_link();
                    true
                }
            }
        });
        self.wanted.retain(|owner| {
            !running
                .iter()
                .any(|server| server.serves(*owner, None, None) && server.state != State::Stopping)
        });
    }

    /// Returns the new server's process id. `program`: the quarantined program that the server is for.
    fn start(
        &mut self,
        (owner, program): (Owner, Option<Program>),
        start: Start,
        executable: &Arc<Executable>,
    ) -> Option<i32> {
        let limits = self.limits_for_owner(owner);
        let whose = (owner, program.as_ref());
        let started = (self.launcher).start(executable, whose, &limits, &start);
        match started {
            Ok((child, link, owner)) => {
                let pid = child.id();
                let served = match &program {
                    Some(program) => format!("the quarantined program {program}"),
                    None => self.served(owner),
                };
                let what = match &start {
                    Start::Standby { of, .. } => format!("standby {pid} of server {of}"),
                    Start::Anew | Start::With { .. } => format!("new server {pid}"),
                };
                tracing::info!(as_pid = u64::from(pid), "Starting {what} for {served}");
                // Linux process ids have 22 bits.
                let process = Process::Child(child);
                let trusted = self.launcher.trusts(owner.uid);
                let identity = (pid as i32, owner);
                let mut server = Server::new(identity, trusted, process, link, limits);
                server.for_single = start.is_single();
                server.release = executable.spoken().clone();
                server.executable = Some(Arc::clone(executable));
                if !self.releases.is_installed(executable) {
                    tracing::info!(
                        "Server {pid} is of release {}, not of the installed one",
                        server.release.version
                    );
                }
                match start {
                    Start::Anew => {}
                    Start::With { keeper, .. } => server.keeper = Some(keeper),
                    Start::Standby { of, .. } => server.standby_of = Some(of),
                }
                server.quarantined = program;
                self.running.push(server);
                Some(pid as i32)
            }
            Err(error) => {
                tracing::error!("{error}");
                if !matches!(start, Start::Standby { .. }) {
                    (self.failures).add(owner, Instant::now(), Duration::ZERO);
                }
                None
            }
        }
    }

    fn give_up(&mut self, owner: Owner) {
        tracing::error!(
            "{FAILURE_LIMIT} servers for {} failed to start within {} s, the clients are refused",
            self.served(owner),
            FAILURE_WINDOW.as_secs()
        );
        let reason = "no server can be started; server.log says why";
        self.refuse_all(owner, CUDA_ERROR_MPS_CONNECTION_FAILED, reason);
    }

    /// Refuses the clients that wait for a server of this owner, and requests for one.
    fn refuse_all(&mut self, owner: Owner, status: CUresult, reason: &str) {
        self.wanted.retain(|wanted| !wanted.is(owner));
        self.refuse_clients(|waiting| waiting.owner.is(owner), status, reason);
    }

    /// Refuses some of the clients that wait.
    fn refuse_clients(
        &mut self,
        is_meant: impl Fn(&Waiting) -> bool,
        status: CUresult,
        reason: &str,
    ) {
        self.waiting.retain(|waiting| {
            let refused = is_meant(waiting);
            if refused {
                refuse(&waiting.client, status, reason);
            }
            !refused
        });
    }
}

fn refuse(client: &Arrival, status: CUresult, reason: &str) {
    let _guard = limit::caused_by_user(client.who.uid);
    tracing::info!(
        "Client {} from user {} refused with status {}: {reason}",
        client.who.pid,
        client.who.uid,
        status.0
    );
    if client.hello.notices == 1 {
        waits::tell(client, MAGIC_REFUSAL, reason);
    }
    // The client may have disconnected.
    let _ = seqpacket::send(
        client.connection.as_fd(),
        greeting::refusal(status).as_bytes(),
        None,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_failures_in_ten_seconds_are_too_many() {
        let user = |uid| Owner {
            uid,
            gid: None,
            named: None,
        };
        let named = Owner {
            named: Some(1),
            ..user(1)
        };
        let mut failures = Failures::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let at_once = Duration::ZERO;
        failures.add(user(1), at(0), at_once);
        failures.add(user(1), at(1), at_once);
        failures.add(user(2), at(1), at_once);
        assert!(!failures.too_many(user(1), at(2)));
        failures.add(user(1), at(2), at_once);
        assert!(failures.too_many(user(1), at(2)));
        assert!(!failures.too_many(user(2), at(2)));
        assert!(!failures.too_many(named, at(2)));
        assert!(failures.too_many(user(1), at(9)));
        assert!(
            !failures.too_many(user(1), at(10)),
            "the first one is forgotten"
        );

        let took = Duration::from_secs(6);
        let mut slow = Failures::default();
        for seconds in [6, 12] {
            slow.add(user(1), at(seconds), took);
            assert!(!slow.too_many(user(1), at(seconds)));
        }
        slow.add(user(1), at(18), took);
        assert!(slow.too_many(user(1), at(18)));
        assert!(
            !slow.too_many(user(1), at(28)),
            "the first one is forgotten"
        );
    }
}
