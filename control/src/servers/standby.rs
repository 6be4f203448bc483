//! Standbys, and the replacement of servers with running clients.
//!
//! A standby is a server that has created its context and waits. When its server ends unexpectedly, or hands over its
//! sessions, the standby continues them, so that clients need not wait for the creation of a context.

use super::server::{Server, State};
use super::{Servers, Start};
use crate::closers::Stranger;
use crate::link::HandOver;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long a standby may take to create its context.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// How long a server may take to answer, in addition to the time its clients may take to come to rest.
const ANSWER_PATIENCE: Duration = Duration::from_secs(15);
/// How long a command waits for the next server to restore the sessions. The server is not ended then: images may take
/// long to load.
const ADOPTION_PATIENCE: Duration = Duration::from_secs(30);

/// A server that is being replaced.
#[derive(Debug)]
pub struct Restart {
    /// Its process id.
    server: i32,
    patience: Duration,
    force: bool,
    /// Deadline of the current step.
    until: Instant,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// The standby creates its context.
    Prepares,
    /// The sessions are being brought to rest.
    Rests,
    /// The server with this process id is continuing them.
    Adopts(i32),
    /// Process id of the new server, or the reason of the failure, in words.
    Over(Result<i32, String>),
}

impl Servers {
    /// Begins to replace a server by a new server that continues its sessions. The clients may take `patience` to come
    /// to rest; with `force`, clients that cannot continue are ended.
    ///
    /// # Errors
    /// Why that is impossible, in words.
    pub fn restart(&mut self, pid: i32, patience: Duration, force: bool) -> Result<(), String> {
        // Drops results of earlier restarts that were never fetched.
        self.restarts
            .retain(|restart| restart.server != pid || !matches!(restart.step, Step::Over(_)));
        let server = self.by_pid(pid);
        let server = server.ok_or_else(|| format!("Server {pid} not found"))?;
        if server.state != State::Active || server.link.is_none() {
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
        if self.restarts.iter().any(|restart| restart.server == pid) {
            return Err(format!("Server {pid} is being restarted"));
        }
        let (owner, program) = (server.owner(), server.quarantined.clone());
        if self.standby_of(pid).is_none() {
            let standby = self.start(owner, program, Start::Standby(pid));
            standby.ok_or("the next server could not be started; control.log says why")?;
        }
        self.restarts.push(Restart {
            server: pid,
            patience,
            force,
            until: Instant::now() + START_PATIENCE,
            step: Step::Prepares,
        });
        self.advance_restarts();
        Ok(())
    }

    /// Whether the restart of this server is over.
    pub fn is_restarted(&self, pid: i32) -> bool {
        let of_server = |restart: &&Restart| restart.server == pid;
        let restart = self.restarts.iter().find(of_server);
        restart.is_none_or(|restart| matches!(restart.step, Step::Over(_)))
    }

    /// Process id of the server that has replaced a server, or the reason of the failure, in words. Returned only once.
    ///
    /// # Errors
    /// The reason of the failure.
    pub fn restarted(&mut self, pid: i32) -> Result<i32, String> {
        let at = self
            .restarts
            .iter()
            .position(|restart| restart.server == pid);
        match at.map(|at| self.restarts.remove(at).step) {
            Some(Step::Over(outcome)) => outcome,
            _ => Err(format!("Server {pid} is not being restarted")),
        }
    }

    fn standby_of(&self, pid: i32) -> Option<usize> {
        let is_its = |server: &Server| {
            server.standby_of == Some(pid)
                && server.state != State::Stopping
                && server.link.is_some()
        };
        self.running.iter().position(is_its)
    }

    /// Advances each restart as far as possible.
    pub(super) fn advance_restarts(&mut self) {
        for at in 0..self.restarts.len() {
            let Restart {
                server,
                patience,
                force,
                ..
            } = self.restarts[at];
            let next = match &self.restarts[at].step {
                Step::Prepares => self.ask_to_hand_over(server, patience, force),
                Step::Rests => self.look_whether_it_stays(server),
                Step::Adopts(next) => self.look_at_adoption(*next),
                Step::Over(_) => None,
            };
            if let Some(step) = next {
                if let Step::Over(Err(why)) = &step {
                    tracing::warn!("Server {server} is not restarted: {why}");
                }
                if matches!(step, Step::Rests) {
                    self.restarts[at].until = Instant::now() + patience + ANSWER_PATIENCE;
                }
                self.restarts[at].step = step;
            }
        }
        self.stop_unneeded_standbys();
    }

    /// When [`Servers::expire_restarts`] has something to do next.
    pub(super) fn restart_deadline(&self) -> Option<Instant> {
        let waits = |restart: &&Restart| !matches!(restart.step, Step::Over(_));
        let waiting = self.restarts.iter().filter(waits);
        waiting.map(|restart| restart.until).min()
    }

    /// Gives up on standbys that do not start, servers that do not answer, and servers that take long to restore the
    /// sessions.
    pub(super) fn expire_restarts(&mut self, now: Instant) {
        for at in 0..self.restarts.len() {
            let restart = &mut self.restarts[at];
            if restart.until > now {
                continue;
            }
            let server = restart.server;
            let why = match restart.step {
                Step::Prepares => "the next server does not start".to_owned(),
                Step::Rests => format!("Server {server} does not answer"),
                Step::Adopts(next) => format!(
                    "server {next} is still restoring the clients of server {server} after {} s; server.log says how far it is",
                    ADOPTION_PATIENCE.as_secs()
                ),
                Step::Over(_) => continue,
            };
            let hangs = matches!(restart.step, Step::Rests);
            tracing::warn!("Restart of server {server}: {why}");
            restart.step = Step::Over(Err(why));
            // The next server continues the sessions that are at rest.
            if hangs && let Some(server) = self.by_pid_mut(server) {
                server.kill();
            }
        }
        self.stop_unneeded_standbys();
    }

    fn ask_to_hand_over(&mut self, pid: i32, patience: Duration, force: bool) -> Option<Step> {
        let over = |why: String| Some(Step::Over(Err(why)));
        let Some(standby) = self.standby_of(pid) else {
            return over("the next server has ended; server.log says why".into());
        };
        let fingerprint = self.running[standby].stands_by?;
        let Some(server) = self
            .by_pid_mut(pid)
            .filter(|server| server.state == State::Active)
        else {
            return over(format!("Server {pid} has ended, or is ending"));
        };
        let request = HandOver {
            fingerprint,
            patience_ms: patience.as_millis() as u64,
            force,
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

    fn look_at_adoption(&self, next: i32) -> Option<Step> {
        match self.by_pid(next) {
            Some(server) if server.state == State::Active => Some(Step::Over(Ok(next))),
            Some(server) if server.state == State::Initializing => None,
            _ => Some(Step::Over(Err(format!(
                "the next server, {next}, has ended"
            )))),
        }
    }

    /// Orders the standby of a server to continue the sessions of its keeper. Returns the standby's process id, or the
    /// keeper if there is no standby.
    pub(super) fn use_standby(&mut self, pid: i32, keeper: Stranger) -> Result<i32, Stranger> {
        let standby = self.standby_of(pid).map(|at| &mut self.running[at]);
        let Some(standby) = standby.filter(|standby| standby.stands_by.is_some()) else {
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
        standby.keeper = Some(keeper);
        tracing::info!(
            "Server {} goes on with the clients of server {pid}",
            standby.pid
        );
        Ok(standby.pid)
    }

    /// Records that `next` replaces `server`, and passes on the limits set for `server`.
    pub(super) fn note_successor(&mut self, server: &Server, next: i32) {
        let limits = server.limits.clone();
        if let Some(next) = self.by_pid_mut(next)
            && let Err(why) = next.order_limits(limits)
        {
            tracing::warn!("{why}");
        }
        let of_server = |restart: &&mut Restart| match restart.step {
            Step::Over(_) => false,
            Step::Adopts(adopting) => adopting == server.pid,
            Step::Prepares | Step::Rests => restart.server == server.pid,
        };
        if let Some(restart) = self.restarts.iter_mut().find(of_server) {
            restart.step = Step::Adopts(next);
            restart.until = Instant::now() + ADOPTION_PATIENCE;
        }
        if (server.stops_later || self.closing)
            && let Some(next) = self.by_pid_mut(next)
        {
            next.stop(false);
        }
    }

    /// Starts standbys for servers with clients, if enabled.
    pub(super) fn start_standbys(&mut self) {
        if !self.launcher.keeps_standbys() || self.closing {
            return;
        }
        let needs = |server: &Server| {
            server.state == State::Active
                && server.keeper.is_some()
                && !server.sessions.is_empty()
                && !server.had_standby
        };
        while let Some(at) = self.running.iter().position(needs) {
            let server = &mut self.running[at];
            // Only one attempt: a failure most likely means lack of memory, and would repeat.
            server.had_standby = true;
            let (pid, owner, program) = (server.pid, server.owner(), server.quarantined.clone());
            if self.standby_of(pid).is_none() {
                self.start(owner, program, Start::Standby(pid));
            }
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
            let is_restarted = self
                .restarts
                .iter()
                .any(|restart| restart.server == of && !matches!(restart.step, Step::Over(_)));
            let is_there = self.by_pid(of).is_some_and(|server| !server.succeeded);
            if !is_there || !is_restarted && !self.launcher.keeps_standbys() {
                self.running[at].stop(true);
            }
        }
    }
}
