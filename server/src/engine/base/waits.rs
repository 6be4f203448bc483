//! Waits at the gate, for operators: how long each session has waited, with which call, and for which clients.
//!
//! `ps`, `top`, metrics and traces show them. A wait lasts from the session's arrival until its call begins, including
//! the time that a move to another side takes.

use crate::engine::base::side::Side;
use mpsshim_model::client::ClientInfo;
use mpsshim_model::limits::{GateUsage, MOST_BLOCKERS};
use mpsshim_proto::message::Op;
use parking_lot::Mutex;
use std::fmt;
use std::time::{Duration, Instant};

/// Represents clients that have left, whose names are not kept.
pub const LEFT: &str = "clients that have left";

/// Clients whose long work delays other clients' calls, at most [`MOST_BLOCKERS`].
#[derive(Clone, Debug, Default)]
pub struct Blockers {
    /// Their identities.
    pub clients: Vec<ClientInfo>,
    /// Work of clients that have left delays calls too.
    pub left: bool,
}

impl Blockers {
    fn is_nobody(&self) -> bool {
        self.clients.is_empty() && !self.left
    }

    fn add(&mut self, others: &Blockers) {
        for client in &others.clients {
            let known = |one: &ClientInfo| one.session == client.session;
            if self.clients.len() < MOST_BLOCKERS && !self.clients.iter().any(known) {
                self.clients.push(client.clone());
            }
        }
        self.left |= others.left;
    }
}

impl fmt::Display for Blockers {
    /// Formats the names as in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let clients = self.clients.iter().map(ClientInfo::to_string);
        let left = self.left.then(|| LEFT.to_owned());
        let all: Vec<String> = clients.chain(left).collect();
        f.write_str(&all.join(", "))
    }
}

/// A session's waits at the gate.
#[derive(Debug, Default)]
pub struct Waits(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Sum of the completed waits.
    total: Duration,
    present: Option<Wait>,
}

/// One wait.
#[derive(Clone, Debug)]
pub struct Wait {
    since: Instant,
    /// The call that has to wait.
    pub op: Op,
    /// The blockers at the gate's last check.
    now: Blockers,
    /// All blockers during this wait.
    pub ever: Blockers,
    /// Number of the trace that was running when the wait began, and the time in it.
    pub traced: Option<(u32, u64)>,
}

impl Waits {
    /// Begins a wait, or continues the current one.
    pub fn begin(&self, op: Op, traced: Option<(u32, u64)>) {
        // A session that has moved, or missed its quiescent point, is still in the same wait.
        self.0.lock().present.get_or_insert_with(|| Wait {
            since: Instant::now(),
            op,
            now: Blockers::default(),
            ever: Blockers::default(),
            traced,
        });
    }

    /// Ends the wait, if there is one.
    pub fn end(&self) -> Option<Wait> {
        let mut state = self.0.lock();
        let wait = state.present.take()?;
        state.total += wait.since.elapsed();
        Some(wait)
    }

    /// Records the current blockers.
    pub fn note(&self, blockers: &Blockers) {
        if let Some(wait) = &mut self.0.lock().present {
            wait.now.clone_from(blockers);
            wait.ever.add(blockers);
        }
    }

    /// The current wait.
    pub fn present(&self) -> Option<Wait> {
        self.0.lock().present.clone()
    }

    /// All blockers during the current wait, as named in logs; `None` if no client had long work.
    pub fn whom(&self) -> Option<String> {
        let state = self.0.lock();
        let ever = state.present.as_ref().map(|wait| &wait.ever);
        ever.filter(|ever| !ever.is_nobody())
            .map(Blockers::to_string)
    }
}

impl Waits {
    /// Time spent at the gate and current blockers, for operators.
    pub fn usage(&self, side: Side) -> GateUsage {
        let state = self.0.lock();
        let present = state.present.as_ref();
        let so_far = present.map_or(Duration::ZERO, |wait| wait.since.elapsed());
        let blockers = present.map(|wait| wait.now.clone()).unwrap_or_default();
        GateUsage {
            waited_ns: (state.total + so_far).as_nanos() as u64,
            blockers: blockers.clients.iter().map(|client| client.pid).collect(),
            blockers_left: blockers.left,
            device_context: side.number(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blockers(sessions: &[u64], left: bool) -> Blockers {
        let client = |session: &u64| ClientInfo {
            session: *session,
            pid: 100 + *session as i32,
            uid: 0,
            partition: None,
            namespace: None,
        };
        Blockers {
            clients: sessions.iter().map(client).collect(),
            left,
        }
    }

    #[test]
    fn a_wait_names_whom_it_was_for() {
        let waits = Waits::default();
        waits.note(&blockers(&[1], true));
        assert!(waits.end().is_none(), "nobody waits");
        waits.begin(Op::ImageLoad, None);
        assert_eq!(waits.whom(), None);
        waits.note(&blockers(&[1, 2], false));
        waits.note(&blockers(&[2, 3], true));
        waits.begin(Op::Launch, Some((1, 1)));
        let all = "{PID: 101, Context ID: 1}, {PID: 102, Context ID: 2}, {PID: 103, Context ID: 3}, clients that have left";
        assert_eq!(waits.whom().as_deref(), Some(all));
        let wait = waits.end().expect("a wait");
        assert_eq!((wait.op, wait.traced), (Op::ImageLoad, None));
        assert_eq!(wait.now.to_string(), blockers(&[2, 3], true).to_string());
        assert!(waits.present().is_none() && waits.0.lock().total > Duration::ZERO);
    }

    #[test]
    fn few_are_named() {
        let mut all = Blockers::default();
        (1..100).for_each(|session| all.add(&blockers(&[session], false)));
        assert_eq!(all.clients.len(), MOST_BLOCKERS);
    }
}
