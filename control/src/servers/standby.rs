//! Standbys, and the replacement of servers with running clients.
//!
//! A standby is a server that has created its context and waits. When its server ends unexpectedly, or hands over its
//! sessions, the standby continues them, so that clients need not wait for the creation of a context. It loads the images of
//! the sessions ahead.

use super::server::{Clients, Server, State};
use super::{Servers, Start};
use crate::closers::Stranger;
use crate::link::{HandOver, Others};
use crate::program::Program;
use crate::releases::Spoken;
use crate::spawn::Owner;
use mpsshim_model::limits::Limits;
use std::fmt;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long a standby may take to create its context.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// The same if the command waits for no client.
const SHORT_START_PATIENCE: Duration = Duration::from_secs(10);
/// How long the clients may take to come to rest, if the command does not say.
pub(super) const REST_PATIENCE: Duration = Duration::from_secs(10);
/// How long a standby may take to confirm the order to continue sessions. It does nothing else meanwhile.
const ORDER_PATIENCE: Duration = Duration::from_secs(5);
/// Pause before a standby that has ended is replaced; doubles from one to the next.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest such pause. A standby of a greater age worked, so the pauses begin anew.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// How long a server may take to answer, in addition to the time its clients may take to come to rest.
const ANSWER_PATIENCE: Duration = Duration::from_secs(15);
/// How long a command waits for the next server to restore the sessions. The server is not ended then: images may take
/// long to load.
const ADOPTION_PATIENCE: Duration = Duration::from_secs(30);

/// A server that is being replaced.
#[derive(Debug)]
pub struct Restart {
    /// Its process id.
    pub(super) server: i32,
    pub(super) rest: Rest,
    /// The fate of clients that cannot move.
    others: Others,
    /// Only this client moves, to a server of its own.
    pub(super) only: Option<Single>,
    /// Deadline for the start of the next server.
    pub(super) starts_by: Instant,
    /// Images are loaded ahead, if there are any.
    pub(super) ahead: bool,
    /// Deadline of the current step.
    pub(super) until: Instant,
    pub(super) step: Step,
    /// The clients that stay with the old server, with reasons.
    stay: Option<String>,
}

impl Restart {
    fn is_over(&self) -> bool {
        matches!(self.step, Step::Over(_))
    }

    /// The outcome once this server goes on with the clients.
    fn succeeded(&self, next: i32) -> Step {
        let stay = self.stay.clone();
        Step::Over(Ok(Restarted {
            server: next,
            stay: stay.map(|stay| (self.server, stay)),
        }))
    }
}

/// A client that gets a server of its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Single {
    /// Number of its session.
    pub(super) session: u64,
    /// User id.
    pub(super) uid: u32,
}

/// When the clients must be at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// This time after the start of the next server.
    Within(Duration),
    /// At this time.
    By(Instant),
}

impl Rest {
    /// How long they may take from now on.
    pub(super) fn left(self, now: Instant) -> Duration {
        match self {
            Rest::Within(patience) => patience,
            Rest::By(at) => at.saturating_duration_since(now),
        }
    }
}

/// How long the next server may take to start, and when the clients must be at rest, for a command that has come now with
/// this bound.
fn bounds(bound: Option<Duration>, now: Instant) -> (Duration, Rest) {
    match bound {
        None => (START_PATIENCE, Rest::Within(REST_PATIENCE)),
        // The clients must be at rest, but a server that starts at once does not exist.
        Some(Duration::ZERO) => (SHORT_START_PATIENCE, Rest::Within(Duration::ZERO)),
        Some(bound) => (bound.min(START_PATIENCE), Rest::By(now + bound)),
    }
}

/// When a server gets its next standby: the first at once, later ones after a pause. A failure most likely means lack of
/// memory, and would repeat.
#[derive(Debug)]
pub(super) struct NextStandby {
    /// `None`: now.
    at: Option<Instant>,
    started: Option<Instant>,
    pause: Duration,
}

impl Default for NextStandby {
    fn default() -> NextStandby {
        NextStandby {
            at: None,
            started: None,
            pause: FIRST_PAUSE,
        }
    }
}

impl NextStandby {
    fn is_due(&self, now: Instant) -> bool {
        self.at.is_none_or(|at| at <= now)
    }

    fn note_start(&mut self, now: Instant) {
        self.started = Some(now);
    }

    /// The standby has ended, or could not be started.
    fn note_end(&mut self, now: Instant) {
        let started = self.started.take();
        if started.is_some_and(|started| now.duration_since(started) > LONGEST_PAUSE) {
            self.pause = FIRST_PAUSE;
        }
        self.at = Some(now + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

#[derive(Debug)]
pub(super) enum Step {
    /// A client of the server is on its way to a server of its own.
    Queued,
    /// The standby creates its context.
    Prepares,
    /// The standby loads images ahead.
    LoadsAhead,
    /// The sessions are being brought to rest.
    Rests,
    /// The server with this process id is continuing them.
    Adopts(i32),
    /// The new server, or the reason of the failure, in words.
    Over(Result<Restarted, String>),
}

/// A server that has replaced another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restarted {
    /// Its process id.
    pub server: i32,
    /// The clients that stay with the old server, with this process id, until they end; with reasons.
    pub stay: Option<(i32, String)>,
}

impl fmt::Display for Restarted {
    /// The answer to the command: the process id, and in a second line which clients stay and why.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.server)?;
        match &self.stay {
            Some((old, stay)) => write!(
                f,
                "\nServer {old} keeps these clients until they end: {stay}"
            ),
            None => Ok(()),
        }
    }
}

/// A server whose sessions another one continues.
pub(super) struct Predecessor {
    pid: i32,
    owner: Owner,
    quarantined: Option<Program>,
    release: Spoken,
    limits: Limits,
    /// It was told to end once its clients have gone.
    ends_later: bool,
    /// It was to end with the clients that could not move to the next server.
    left_behind: bool,
    /// It served a single client, of this user.
    single: Option<u32>,
    /// Its clients whose programs are known.
    clients: Clients,
    /// Process ids of all its clients, those not restored yet included.
    all: Vec<i32>,
    /// It has ended while it loaded images ahead.
    loaded: bool,
}

impl Predecessor {
    pub(super) fn of(server: &Server) -> Predecessor {
        Predecessor {
            pid: server.pid,
            owner: server.owner(),
            quarantined: server.quarantined.clone(),
            release: server.release.clone(),
            limits: server.limits.clone(),
            ends_later: server.ends_later,
            left_behind: server.left_behind,
            single: server.single,
            clients: server.known_clients(),
            all: server
                .clients()
                .chain(server.to_restore().iter().copied())
                .collect(),
            loaded: server.state == State::Initializing && server.loads.is_pending(),
        }
    }
}

impl Servers {
    /// Begins to replace a server by a new server that continues its sessions. `bound`: how long the new server may take
    /// to start and the clients to come to rest; with `force`, clients that cannot continue are ended.
    ///
    /// # Errors
    /// Why that is impossible, in words.
    pub fn restart(
        &mut self,
        pid: i32,
        bound: Option<Duration>,
        force: bool,
    ) -> Result<(), String> {
        let (start, rest) = bounds(bound, Instant::now());
        let others = match force {
            true => Others::End,
            false => Others::Stay,
        };
        self.begin_restart(pid, (start, rest), (others, None))
    }

    /// As [`Servers::restart`], for a server that an earlier restart left with clients. Either all move, or none does.
    ///
    /// # Errors
    /// As for [`Servers::restart`].
    pub(super) fn restart_later(&mut self, pid: i32, patience: Duration) -> Result<(), String> {
        let bounds = (START_PATIENCE, Rest::Within(patience));
        self.begin_restart(pid, bounds, (Others::Refuse, None))
    }

    /// Begins to move one client to a server of its own.
    ///
    /// # Errors
    /// As for [`Servers::restart`].
    pub(super) fn separate(&mut self, pid: i32, client: Single) -> Result<(), String> {
        let bounds = (SHORT_START_PATIENCE, Rest::Within(REST_PATIENCE));
        self.begin_restart(pid, bounds, (Others::Stay, Some(client)))
    }

    fn begin_restart(
        &mut self,
        pid: i32,
        (start, rest): (Duration, Rest),
        (others, only): (Others, Option<Single>),
    ) -> Result<(), String> {
        // Drops results of earlier restarts that were never fetched.
        self.restarts
            .retain(|restart| restart.server != pid || !restart.is_over());
        let before = self.restarts.iter().filter(|restart| restart.server == pid);
        let are_separations: Vec<bool> = before.map(|restart| restart.only.is_some()).collect();
        let step = match are_separations[..] {
            [] => {
                self.prepare_restart(pid, only.is_some())?;
                Step::Prepares
            }
            // That takes a moment.
            [true] if only.is_none() => Step::Queued,
            _ => return Err(format!("Server {pid} is being restarted")),
        };
        let now = Instant::now();
        self.restarts.push(Restart {
            server: pid,
            rest,
            others,
            only,
            starts_by: now + start,
            // The images of all sessions would take more time than those of one.
            ahead: only.is_none(),
            until: now + start,
            step,
            stay: None,
        });
        self.advance_restarts();
        Ok(())
    }

    /// Starts the standby that is to replace a server, or to go on with a single client of it, if it has none.
    ///
    /// # Errors
    /// Why the server cannot be replaced, in words.
    fn prepare_restart(&mut self, pid: i32, single: bool) -> Result<(), String> {
        let server = self.by_pid(pid);
        let server = server.ok_or_else(|| format!("Server {pid} not found"))?;
        if !server.may_hand_over() || server.link.is_none() {
            return Err(match server.state {
                State::Initializing => format!("Server {pid} is starting"),
                _ => format!("Server {pid} is ending, or is being restarted"),
            });
        }
        if server.keeper.is_none() {
            return Err(format!(
                "Server {pid} has no keeper: its clients end with it"
            ));
        }
        let single = single || server.single.is_some();
        self.releases.installed().fits()?;
        self.end_unfit_standby(pid, single);
        if self.standby_of(pid).is_none() {
            self.start_next(pid, single)?;
        }
        Ok(())
    }

    /// Begins a restart that waited for a client to get a server of its own.
    fn begin_queued(&mut self, at: usize) -> Option<Step> {
        let pid = self.restarts[at].server;
        if self.restart_of(pid) != Some(at) {
            return None;
        }
        Some(match self.prepare_restart(pid, false) {
            Ok(()) => Step::Prepares,
            Err(why) => Step::Over(Err(why)),
        })
    }

    /// Ends the standby of a server if another executable has been installed since it was started, or if it was started for a
    /// single client and is now for all.
    fn end_unfit_standby(&mut self, pid: i32, single: bool) {
        let Some(at) = self.standby_of(pid) else {
            return;
        };
        let executable = self.running[at].executable.as_ref();
        let is_outdated = !executable.is_some_and(|one| self.releases.is_installed(one));
        if is_outdated || self.running[at].for_single && !single {
            self.running[at].stop(true);
        }
    }

    /// Starts the standby that is to replace a server.
    ///
    /// # Errors
    /// Why that is impossible, in words.
    pub(super) fn start_next(&mut self, pid: i32, single: bool) -> Result<(), String> {
        let server = self.by_pid(pid);
        let server = server.ok_or_else(|| format!("Server {pid} has ended"))?;
        let (owner, program) = (server.owner(), server.quarantined.clone());
        let start = Start::Standby {
            of: pid,
            without_context: server.is_exclusive(),
            single,
        };
        let installed = self.releases.installed();
        let standby = self.start((owner, program), start, &installed);
        standby.ok_or("the next server could not be started; control.log says why")?;
        Ok(())
    }

    /// The first restart of this server that is not over.
    fn restart_of(&self, pid: i32) -> Option<usize> {
        let is_its = |restart: &Restart| restart.server == pid && !restart.is_over();
        self.restarts.iter().position(is_its)
    }

    /// Whether the restart of this server is over.
    pub fn is_restarted(&self, pid: i32) -> bool {
        self.restart_of(pid).is_none()
    }

    /// The server that has replaced a server, or the reason of the failure, in words. Returned only once.
    ///
    /// # Errors
    /// The reason of the failure.
    pub fn restarted(&mut self, pid: i32) -> Result<Restarted, String> {
        let at = self
            .restarts
            .iter()
            .position(|restart| restart.server == pid);
        match at.map(|at| self.restarts.remove(at).step) {
            Some(Step::Over(outcome)) => outcome,
            _ => Err(format!("Server {pid} is not being restarted")),
        }
    }

    pub(super) fn standby_of(&self, pid: i32) -> Option<usize> {
        let is_its = |server: &Server| {
            server.standby_of == Some(pid)
                && server.state != State::Stopping
                && server.link.is_some()
        };
        self.running.iter().position(is_its)
    }

    /// Advances each restart as far as possible.
    pub(super) fn advance_restarts(&mut self) {
        self.advance_each_restart();
        while self.end_separations() {
            // Commands may have waited for that.
            self.advance_each_restart();
        }
        self.stop_unneeded_standbys();
    }

    fn advance_each_restart(&mut self) {
        for at in 0..self.restarts.len() {
            let Restart { server, .. } = self.restarts[at];
            let next = match &self.restarts[at].step {
                Step::Queued => self.begin_queued(at),
                Step::Prepares if self.restarts[at].ahead => self.load_ahead(at),
                Step::Prepares => self.ask_to_hand_over(at),
                Step::LoadsAhead => self.look_whether_loaded(at),
                Step::Rests => self.look_whether_it_stays(server),
                Step::Adopts(next) => self.look_at_adoption(at, *next),
                Step::Over(_) => None,
            };
            self.take_step(at, next);
        }
    }

    /// Notes the next step of a restart, if there is one.
    fn take_step(&mut self, at: usize, next: Option<Step>) {
        let Some(step) = next else {
            return;
        };
        let restart = &mut self.restarts[at];
        if let Step::Over(Err(why)) = &step {
            tracing::warn!("Server {} is not restarted: {why}", restart.server);
        }
        if matches!(step, Step::Rests) {
            let now = Instant::now();
            restart.until = now + restart.rest.left(now) + ANSWER_PATIENCE;
        }
        restart.step = step;
    }

    /// Orders the hand-over.
    pub(super) fn end_loading(&mut self, at: usize) -> Option<Step> {
        self.ask_to_hand_over(at)
    }

    /// When [`Servers::expire_restarts`] has something to do next.
    pub(super) fn restart_deadline(&self) -> Option<Instant> {
        let waiting = self.restarts.iter().filter(|restart| !restart.is_over());
        waiting.map(|restart| restart.until).min()
    }

    /// Gives up on standbys that do not start, servers that do not answer, and servers that take long to restore the
    /// sessions.
    pub(super) fn expire_restarts(&mut self, now: Instant) {
        let mut late = Vec::new();
        for at in 0..self.restarts.len() {
            let restart = &mut self.restarts[at];
            if restart.until > now {
                continue;
            }
            let server = restart.server;
            let why = match restart.step {
                Step::Prepares | Step::Queued => "the next server does not start".to_owned(),
                Step::LoadsAhead => {
                    late.push(at);
                    continue;
                }
                Step::Rests => format!("Server {server} does not answer"),
                Step::Adopts(next) => format!(
                    "server {next} is still restoring the clients of server {server} after {} s; server.log says how far it is",
                    ADOPTION_PATIENCE.as_secs()
                ),
                Step::Over(_) => continue,
            };
            let hangs = matches!(restart.step, Step::Rests);
            let does_not_start = matches!(restart.step, Step::Prepares);
            tracing::warn!("Restart of server {server}: {why}");
            restart.step = Step::Over(Err(why));
            if does_not_start && let Some(standby) = self.standby_of(server) {
                self.running[standby].stop(true);
            }
            // The next server continues the sessions that are at rest.
            if hangs && let Some(server) = self.by_pid_mut(server) {
                server.kill();
            }
        }
        for at in late {
            let step = self.end_loading(at);
            self.take_step(at, step);
        }
        self.advance_restarts();
    }

    fn ask_to_hand_over(&mut self, at: usize) -> Option<Step> {
        let Restart {
            server: pid,
            rest,
            others,
            only,
            ..
        } = self.restarts[at];
        let patience = rest.left(Instant::now());
        let over = |why: String| Some(Step::Over(Err(why)));
        let Some(standby) = self.standby_of(pid) else {
            return over("the next server has ended; server.log says why".into());
        };
        let formats = self.running[standby].stands_by.clone()?;
        let Some(server) = self.by_pid_mut(pid).filter(|server| server.may_hand_over()) else {
            return over(format!("Server {pid} has ended, or is ending"));
        };
        let request = HandOver {
            formats,
            patience_ms: patience.as_millis() as u64,
            others: match others {
                Others::Stay if server.is_exclusive() => Others::Refuse,
                others => others,
            },
            only: only.map(|client| client.session),
        };
        match server
            .link
            .as_ref()
            .map(|link| link.order_hand_over(request))
        {
            Some(Ok(())) => {
                server.state = State::HandingOver;
                Some(Step::Rests)
            }
            Some(Err(error)) => over(format!("Server {pid}: {error}")),
            None => over(format!("Server {pid} is ending")),
        }
    }

    fn look_whether_it_stays(&mut self, pid: i32) -> Option<Step> {
        match self.by_pid_mut(pid) {
            Some(server) => {
                let why = server.stays.take()?;
                Some(Step::Over(Err(format!(
                    "the clients of server {pid} stay: {why}"
                ))))
            }
            None => Some(Step::Over(Err(format!("Server {pid} has ended")))),
        }
    }

    /// A server that has ended was ready before: it had gone on with the clients, and may have ended with the last of them.
    pub(super) fn note_adopted(&mut self, pid: i32) {
        let adopted =
            |restart: &&mut Restart| matches!(restart.step, Step::Adopts(next) if next == pid);
        for restart in self.restarts.iter_mut().filter(adopted) {
            restart.step = restart.succeeded(pid);
        }
    }

    fn look_at_adoption(&self, at: usize, next: i32) -> Option<Step> {
        match self.by_pid(next) {
            Some(server) if server.is_serving() => Some(self.restarts[at].succeeded(next)),
            Some(server) if server.is_starting() => None,
            _ => Some(Step::Over(Err(format!(
                "the next server, {next}, has ended"
            )))),
        }
    }

    /// Orders the standby of a server to continue the sessions of its keeper. Returns the standby's process id, or the
    /// keeper if there is no standby.
    fn use_standby(&mut self, pid: i32, keeper: Stranger) -> Result<i32, Stranger> {
        let standby = self.standby_of(pid).map(|at| &mut self.running[at]);
        let serves = |standby: &&mut Server| standby.stands_by.is_some() && !standby.ends_now;
        let Some(standby) = standby.filter(serves) else {
            return Err(keeper);
        };
        let ordered = standby
            .link
            .as_ref()
            .map(|link| link.order_adoption(keeper.as_fd()));
        if !matches!(ordered, Some(Ok(()))) {
            return Err(keeper);
        }
        standby.standby_of = None;
        standby.started = Instant::now();
        standby.adopts_by = Some(Instant::now() + ORDER_PATIENCE);
        standby.keeper = Some(keeper);
        tracing::info!(
            "Server {} goes on with the clients of server {pid}",
            standby.pid
        );
        Ok(standby.pid)
    }

    /// Continues the sessions that have left a server, if some have, in another one. The old server ends with its other
    /// clients.
    pub(super) fn part(&mut self, pid: i32) {
        let Some(server) = self.by_pid_mut(pid) else {
            return;
        };
        let Some((keeper, stay)) = server.parted.take() else {
            return;
        };
        let before = Predecessor::of(server);
        let next = self.replace(&before, keeper);
        let of_server = |restart: &&mut Restart| {
            restart.server == pid && matches!(restart.step, Step::Rests | Step::Adopts(_))
        };
        let restart = self.restarts.iter_mut().find(of_server);
        let only = restart.as_ref().and_then(|one| one.only);
        if let Some(restart) = restart {
            restart.stay = Some(stay);
            if next.is_none() {
                let why = "no server could go on with the clients that left";
                restart.step = Step::Over(Err(why.into()));
            }
        }
        if let Some(client) = only {
            return self.note_separated(next, client);
        }
        if let Some(server) = self.by_pid_mut(pid) {
            server.left_behind = true;
            server.stop(false);
        }
        self.move_later(pid);
    }

    /// Continues the sessions of a keeper in the standby of their server, or in a new server, which replaces it and gets
    /// the limits set for it. Returns the process id of that one, if one could be started.
    pub(super) fn replace(&mut self, before: &Predecessor, keeper: Stranger) -> Option<i32> {
        let next = match self.use_standby(before.pid, keeper) {
            Ok(next) => next,
            Err(keeper) => {
                let program = before.quarantined.clone();
                let next = self.releases.restoring(&before.release);
                let single = before.single.is_some();
                let start = Start::With { keeper, single };
                self.start((before.owner, program), start, &next)?
            }
        };
        if let Some(next) = self.by_pid_mut(next) {
            next.left_behind = before.left_behind;
            next.single = before.single;
            next.inherited = before.clients.clone();
            next.of_predecessor.clone_from(&before.all);
            if before.loaded {
                next.images.note_failure();
            }
            if let Err(why) = next.order_limits(before.limits.clone()) {
                tracing::warn!("{why}");
            }
        }
        let of_server = |restart: &&mut Restart| match restart.step {
            Step::Over(_) | Step::Queued => false,
            Step::Adopts(adopting) => adopting == before.pid,
            Step::Prepares | Step::LoadsAhead | Step::Rests => restart.server == before.pid,
        };
        if let Some(restart) = self.restarts.iter_mut().find(of_server) {
            restart.step = Step::Adopts(next);
            restart.until = Instant::now() + ADOPTION_PATIENCE;
        }
        if (before.ends_later || self.closing)
            && let Some(next) = self.by_pid_mut(next)
        {
            next.stop(false);
        }
        Some(next)
    }

    /// Kills standbys that have not confirmed in time that they continue sessions: another server does it.
    pub(super) fn expire_adoptions(&mut self, now: Instant) {
        for server in &mut self.running {
            if server.adopts_by.take_if(|at| *at <= now).is_some() {
                tracing::error!(
                    "Server {} does not go on with the clients: it has not answered for {} s, killing it",
                    server.pid,
                    ORDER_PATIENCE.as_secs()
                );
                server.kill();
            }
        }
    }

    /// The servers that lack a standby.
    fn without_standby(&self) -> impl Iterator<Item = &Server> {
        let keeps = self.launcher.keeps_standbys() && !self.closing;
        let has_one = |pid| {
            let mut running = self.running.iter();
            running.any(|server| server.standby_of == Some(pid))
        };
        // A server for a single client has been told to end with it.
        let serves = |server: &Server| match server.state {
            State::Active => true,
            State::Stopping => server.single.is_some() && !server.ends_now,
            _ => false,
        };
        self.running.iter().filter(move |server| {
            keeps
                && serves(server)
                && server.keeper.is_some()
                && !server.sessions.is_empty()
                && !server.is_exclusive()
                && !has_one(server.pid)
        })
    }

    /// When [`Servers::start_standbys`] or [`Servers::expire_adoptions`] has something to do next.
    pub(super) fn standby_deadline(&self) -> Option<Instant> {
        let starts = self
            .without_standby()
            .filter_map(|server| server.next_standby.at);
        let adoptions = self.running.iter().filter_map(|server| server.adopts_by);
        starts.chain(adoptions).min()
    }

    /// Starts standbys for servers with clients, if enabled.
    pub(super) fn start_standbys(&mut self) {
        let now = Instant::now();
        let lacking: Vec<i32> = self
            .without_standby()
            .filter(|server| server.next_standby.is_due(now))
            .map(|server| server.pid)
            .collect();
        for pid in lacking {
            let Some(server) = self.by_pid_mut(pid) else {
                continue;
            };
            server.next_standby.note_start(now);
            let (owner, program) = (server.owner(), server.quarantined.clone());
            let start = Start::Standby {
                of: pid,
                without_context: false,
                single: server.single.is_some(),
            };
            let release = server.release.clone();
            let next = self.releases.restoring(&release);
            if self.start((owner, program), start, &next).is_none() {
                self.note_end_of_standby(pid, false);
            }
        }
    }

    /// The standby of the server with this process id has ended; `loaded`: while it loaded images ahead.
    pub(super) fn note_end_of_standby(&mut self, pid: i32, loaded: bool) {
        if let Some(server) = self.by_pid_mut(pid) {
            if loaded {
                server.images.note_failure();
            }
            server.next_standby.note_end(Instant::now());
        }
    }

    /// Ends standbys whose server has gone, and those of restarts that have failed.
    pub(super) fn stop_unneeded_standbys(&mut self) {
        for at in 0..self.running.len() {
            let server = &self.running[at];
            let Some(of) = server
                .standby_of
                .filter(|_| server.state != State::Stopping)
            else {
                continue;
            };
            let is_restarted = self.is_restarted(of);
            let is_there = self.by_pid(of).is_some_and(|server| !server.succeeded);
            if !is_there || is_restarted && !self.launcher.keeps_standbys() {
                self.running[at].stop(true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standby_that_ends_again_and_again_is_replaced_ever_more_seldom() {
        let mut next = NextStandby::default();
        let mut now = Instant::now();
        assert!(next.is_due(now), "the first one is started at once");
        let mut pauses = Vec::new();
        for _ in 0..12 {
            next.note_start(now);
            next.note_end(now);
            assert!(!next.is_due(now));
            let at = next.at.expect("a time");
            pauses.push(at.duration_since(now).as_secs());
            now = at;
            assert!(next.is_due(now));
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]);
        // After a long life.
        next.note_start(now);
        now += LONGEST_PAUSE + Duration::from_secs(1);
        next.note_end(now);
        assert!(next.is_due(now + FIRST_PAUSE));
    }

    #[test]
    fn the_bound_of_a_restart_is_for_all_of_it() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let (start, rest) = bounds(Some(Duration::from_secs(3)), now);
        assert_eq!(start, Duration::from_secs(3));
        assert_eq!(rest.left(after(1)), Duration::from_secs(2));
        assert_eq!(rest.left(after(4)), Duration::ZERO);
        let (start, rest) = bounds(Some(Duration::from_secs(3600)), now);
        assert_eq!(start, START_PATIENCE);
        assert_eq!(rest.left(after(20)), Duration::from_secs(3580));
        let (start, rest) = bounds(Some(Duration::ZERO), now);
        assert!(!start.is_zero() && rest.left(now).is_zero());
        let (start, rest) = bounds(None, now);
        assert_eq!(
            (start, rest.left(after(20))),
            (START_PATIENCE, REST_PATIENCE)
        );
    }
}
