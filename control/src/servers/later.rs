//! Clients that a restart left with their server, because they could not move. The daemon asks such a server from time to time
//! for the bonds of its clients, and replaces it as soon as all of them can move.

use super::Servers;
use crate::usage::Report;
use mpsshim_model::bonds::Bonds;
use std::time::{Duration, Instant};

/// Number of these queries. Those of commands count from 1.
const QUESTION: u64 = u64::MAX;
/// How long the clients may take to come to rest. No command waits for them.
const REST: Duration = Duration::from_secs(2);
/// Longest pause between two attempts. It doubles with each that fails.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// When a server is asked next.
#[derive(Debug, Default)]
pub(super) struct Later {
    /// `None`: never.
    at: Option<Instant>,
    pause: Duration,
    answer: Answer,
}

/// The answer to a query so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Answer {
    /// None is expected. A server may report without a query.
    #[default]
    Unasked,
    /// No client yet.
    Empty,
    /// Whether all clients so far can move.
    Clients(bool),
}

impl Later {
    /// Begins to ask.
    fn begin(&mut self, pause: Duration) {
        self.pause = pause;
        self.at = Instant::now().checked_add(pause);
    }

    /// Takes the moment that has passed, and chooses the next one.
    fn is_due(&mut self, now: Instant) -> bool {
        if self.at.is_none_or(|at| at > now) {
            return false;
        }
        self.at = now.checked_add(self.pause);
        self.answer = Answer::Empty;
        true
    }

    /// Adds a part of an answer: the bonds of some clients. Returns whether all clients can move, once it is complete.
    fn hear(&mut self, clients: &[Option<Bonds>], last: bool) -> bool {
        let can = clients.iter().all(|bonds| bonds.is_some_and(can_move));
        self.answer = match self.answer {
            Answer::Empty if !clients.is_empty() => Answer::Clients(can),
            Answer::Clients(before) => Answer::Clients(before && can),
            before => before,
        };
        last && std::mem::take(&mut self.answer) == Answer::Clients(true)
    }

    fn note_attempt(&mut self, now: Instant) {
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        self.at = now.checked_add(self.pause);
    }
}

/// Whether these bonds go as soon as the client is at rest.
fn can_move(bonds: Bonds) -> bool {
    let passing = Bonds::UNTIL_SAVED.with(Bonds::PRINTS, true);
    bonds.0 & !passing.0 == 0
}

impl Servers {
    /// Begins to ask a server that was left with clients, unless the settings say never.
    pub(super) fn move_later(&mut self, pid: i32) {
        let pause = self.launcher.move_later();
        if let Some(server) = self.by_pid_mut(pid).filter(|_| !pause.is_zero()) {
            server.later.begin(pause);
        }
    }

    /// When [`Servers::ask_left`] has something to do next.
    pub(super) fn later_deadline(&self) -> Option<Instant> {
        self.running.iter().filter_map(|one| one.later.at).min()
    }

    /// Asks the servers whose time has come.
    pub(super) fn ask_left(&mut self, now: Instant) {
        for server in &mut self.running {
            let asks = server.later.is_due(now) && server.may_hand_over();
            if let Some(link) = server.link.as_ref().filter(|_| asks) {
                // It is asked again later.
                let _ = link.ask_usage(QUESTION);
            }
        }
    }

    /// Takes the answers to these queries out of the reports, and replaces the servers all of whose clients can move.
    pub(super) fn hear_left(&mut self, reports: &mut Vec<Report>) {
        let own: Vec<Report> = reports
            .extract_if(.., |report| report.question == QUESTION)
            .collect();
        let now = Instant::now();
        for report in own {
            let pid = report.server;
            let server = self.by_pid_mut(pid);
            let Some(server) = server.filter(|server| server.left_behind) else {
                continue;
            };
            let bonds: Vec<_> = report.clients.iter().map(|client| client.bonds).collect();
            if !server.later.hear(&bonds, report.last) || self.closing {
                continue;
            }
            if let Some(server) = self.by_pid_mut(pid) {
                server.later.note_attempt(now);
            }
            tracing::info!("Server {pid}: the clients that an earlier restart left can move now");
            if let Err(why) = self.restart_later(pid, REST) {
                tracing::info!("Server {pid} keeps its clients: {why}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> Later {
        let mut later = Later::default();
        later.begin(Duration::ZERO);
        assert!(later.is_due(Instant::now()));
        later
    }

    #[test]
    fn a_server_is_replaced_once_all_its_clients_can_move() {
        let free = Some(Bonds::default());
        let saved_later = Some(Bonds::UNTIL_SAVED);
        let bound = Some(Bonds::GRAPHS);
        for (parts, can) in [
            (&[&[free, saved_later][..]][..], true),
            (&[&[free], &[bound]], false),
            (&[&[bound], &[free]], false),
            (&[&[free], &[]], true),
            (&[&[None]], false),
            (&[&[]], false),
        ] {
            let mut later = asked();
            let (last, first) = parts.split_last().expect("parts");
            assert!(first.iter().all(|part| !later.hear(part, false)));
            assert_eq!(later.hear(last, true), can, "{parts:?}");
            assert!(!later.hear(&[free], true));
        }
        assert!(!Later::default().hear(&[free], true));
    }

    #[test]
    fn the_pause_doubles_with_each_attempt() {
        let (mut later, pause) = (Later::default(), Duration::from_secs(60));
        let now = Instant::now();
        assert!(!later.is_due(now + LONGEST_PAUSE));
        later.begin(pause);
        assert!(!later.is_due(now));
        let now = now + 2 * pause;
        assert!(later.is_due(now) && !later.is_due(now));
        assert_eq!(later.at, Some(now + pause));
        later.note_attempt(now);
        assert_eq!(later.at, Some(now + 2 * pause));
        (0..20).for_each(|_| later.note_attempt(now));
        assert_eq!(later.at, Some(now + LONGEST_PAUSE));
    }
}
