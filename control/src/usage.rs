//! Queries to servers for the resources of their clients. An answer may take a while, or never come.

use mpsshim_model::limits::Usage;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time limit for the answers of the servers.
const PATIENCE: Duration = Duration::from_secs(2);

/// Usage of clients, by process id of the server and session.
pub type UsageBySession = BTreeMap<(i32, u64), Usage>;

/// Answers of the servers.
#[derive(Debug, Default)]
pub struct Answers {
    /// Usage of their clients.
    pub clients: UsageBySession,
    /// Moments that the gate has opened, by process id of the server.
    pub gate_moments: BTreeMap<i32, u64>,
}

/// A part of a server's answer.
pub struct Report {
    /// Process id of the server.
    pub server: i32,
    /// Number of the query.
    pub question: u64,
    /// Usage of some of its clients.
    pub clients: Vec<Usage>,
    /// Moments that its gate has opened; `None` from an older server.
    pub gate_moments: Option<u64>,
    /// Whether this is the last part from this server.
    pub last: bool,
}

/// A query in progress.
pub struct Question {
    number: u64,
    /// Servers that have not answered yet.
    missing: Vec<i32>,
    /// Answers received so far.
    pub found: Answers,
    /// Deadline of the answers.
    pub until: Instant,
}

impl Question {
    /// A query of this number, sent to these servers.
    pub fn new(number: u64, servers: Vec<i32>) -> Question {
        Question {
            number,
            missing: servers,
            found: Answers::default(),
            until: Instant::now() + PATIENCE,
        }
    }

    /// Adds a report, if it answers this query.
    pub fn hear(&mut self, report: &Report) {
        if report.question != self.number {
            return;
        }
        for usage in &report.clients {
            let key = (report.server, usage.session);
            self.found.clients.insert(key, usage.clone());
        }
        if let Some(moments) = report.gate_moments {
            self.found.gate_moments.insert(report.server, moments);
        }
        if report.last {
            self.missing.retain(|pid| *pid != report.server);
        }
    }

    /// Servers that can still answer but have not.
    fn unanswered(&self, can_answer: impl Fn(i32) -> bool) -> impl Iterator<Item = i32> {
        let missing = self.missing.iter().copied();
        missing.filter(move |pid| can_answer(*pid))
    }

    /// A note that names the servers without an answer; empty if there are none.
    pub fn note(&self, can_answer: impl Fn(i32) -> bool) -> String {
        let lines = self.unanswered(can_answer).map(|pid| {
            let seconds = PATIENCE.as_secs();
            format!(
                "Server {pid} has not answered in {seconds} s: what its clients have is left out\n"
            )
        });
        lines.collect()
    }

    /// Whether no further answer can come, or the deadline has passed.
    pub fn is_over(&self, can_answer: impl Fn(i32) -> bool, now: Instant) -> bool {
        now >= self.until || self.unanswered(can_answer).next().is_none()
    }
}
