//! Queries to servers for the resources of their clients. An answer may take a while, or never come.

use mpsshim_model::limits::Usage;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a server is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

/// What clients have, by process id of the server and session.
pub type UsageBySession = BTreeMap<(i32, u64), Usage>;

/// What servers have answered.
#[derive(Debug, Default)]
pub struct Answers {
    /// What their clients have.
    pub clients: UsageBySession,
    /// Moments that the gate has opened, by process id of the server.
    pub gate_moments: BTreeMap<i32, u64>,
}

/// Part of the answer to a question.
pub struct Report {
    /// Process id of the server.
    pub server: i32,
    /// Number of the question.
    pub question: u64,
    /// What some of its clients have.
    pub clients: Vec<Usage>,
    /// Moments that its gate has opened; an older server does not say.
    pub gate_moments: Option<u64>,
    /// Nothing follows from this server.
    pub last: bool,
}

/// A question that was asked.
pub struct Question {
    number: u64,
    /// Servers that have not answered.
    missing: Vec<i32>,
    /// What is known.
    pub found: Answers,
    /// When it is not waited any longer.
    pub until: Instant,
}

impl Question {
    /// A question of this number, which was sent to these servers.
    pub fn new(number: u64, servers: Vec<i32>) -> Question {
        Question {
            number,
            missing: servers,
            found: Answers::default(),
            until: Instant::now() + PATIENCE,
        }
    }

    /// Takes a report if it answers this question.
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

    /// Servers that can answer and have not.
    fn unanswered(&self, can_answer: impl Fn(i32) -> bool) -> impl Iterator<Item = i32> {
        let missing = self.missing.iter().copied();
        missing.filter(move |pid| can_answer(*pid))
    }

    /// What to say of them besides the answer; empty where there are none.
    pub fn note(&self, can_answer: impl Fn(i32) -> bool) -> String {
        let lines = self.unanswered(can_answer).map(|pid| {
            let seconds = PATIENCE.as_secs();
            format!(
                "Server {pid} has not answered in {seconds} s: what its clients have is left out\n"
            )
        });
        lines.collect()
    }

    /// Whether nothing will come any more, or nothing is waited for.
    pub fn is_over(&self, can_answer: impl Fn(i32) -> bool, now: Instant) -> bool {
        now >= self.until || self.unanswered(can_answer).next().is_none()
    }
}
