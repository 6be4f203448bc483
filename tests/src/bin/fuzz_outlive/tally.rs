//! Counts of a run.

use std::collections::BTreeMap;
use std::fmt;

/// Counts of a run.
#[derive(Debug, Default)]
pub struct Tally {
    pub sessions: u64,
    pub messages: u64,
    pub kills: u64,
    pub restarts: u64,
    /// Sessions at rest and portable that went on in another server, as they were.
    pub made_again: u64,
    /// Answers and contents that were compared.
    pub compared: u64,
    /// Sessions that stayed with their server as it was: they were bound, or another server ended.
    pub stayed: u64,
    /// Contexts lost by faults.
    pub contexts_lost: u64,
    /// Sessions at rest that were bound, by reasons.
    pub bound: BTreeMap<String, u64>,
    /// Sessions that ended before they left, by when and why.
    pub ended: BTreeMap<String, u64>,
    /// Refusals of `restart_server`.
    pub refused: BTreeMap<String, u64>,
}

impl Tally {
    /// Counts a reason, whatever numbers are in it.
    pub fn count(list: &mut BTreeMap<String, u64>, why: &str) {
        let mut text = String::new();
        for part in why.chars() {
            match part.is_ascii_digit() {
                true if text.ends_with('N') => {}
                true => text.push('N'),
                false => text.push(part),
            }
        }
        *list.entry(text).or_default() += 1;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} sessions, {} messages, {} kills, {} restarts, {} contexts lost",
            self.sessions, self.messages, self.kills, self.restarts, self.contexts_lost
        )?;
        writeln!(
            f,
            "at rest and portable, made again as they were: {}; stayed as they were: {}; {} answers and contents compared",
            self.made_again, self.stayed, self.compared
        )?;
        for (title, list) in [
            ("at rest and bound", &self.bound),
            ("ended", &self.ended),
            ("restarts refused", &self.refused),
        ] {
            writeln!(f, "{title}: {}", list.values().sum::<u64>())?;
            let mut sorted: Vec<_> = list.iter().collect();
            sorted.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            for (why, count) in sorted {
                writeln!(f, "  {count:6} {why}")?;
            }
        }
        Ok(())
    }
}
