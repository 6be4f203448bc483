//! The list of quarantined programs, which may have caused a fault. From their next start on they have servers of
//! their own, so that their next fault affects no other program.

use crate::program::Program;
use serde::{Deserialize, Serialize};
use std::time::SystemTime;

/// Maximum number of programs in a list; the oldest is removed for a new one.
const MOST: usize = 1024;
/// Maximum number of programs of one user.
const MOST_OF_USER: usize = 128;
/// A program is released after this number of its processes in a row have ended without a fault.
pub const CLEAN_RUNS: u32 = 3;

/// Whether programs are quarantined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum QuarantinePolicy {
    /// Programs with work in flight at a fault, and programs that an operator names
    #[default]
    Auto,
    /// None
    Off,
}

/// Log text for each suspect of a fault, given the number of suspects.
pub fn accusation(suspects: usize) -> &'static str {
    match suspects {
        1 => "alone had work in flight and has caused the fault",
        _ => "had work in flight and may have caused the fault",
    }
}

/// A quarantined program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The program.
    pub program: Program,
    /// When it was added to the list.
    pub since: SystemTime,
    /// Number of faults that it may have caused.
    pub faults: u32,
    /// Number of processes that have ended without a fault since the last fault.
    pub clean: u32,
}

/// The lists, oldest first.
#[derive(Debug)]
pub struct Quarantine {
    policy: QuarantinePolicy,
    entries: Vec<Entry>,
    /// Programs that are not quarantined yet: each was one of several that may have caused a fault.
    suspects: Vec<Entry>,
}

impl Quarantine {
    /// An empty list.
    pub fn new(policy: QuarantinePolicy) -> Quarantine {
        Quarantine {
            policy,
            entries: Vec::new(),
            suspects: Vec::new(),
        }
    }

    /// Whether the quarantine is enabled.
    pub fn is_on(&self) -> bool {
        self.policy == QuarantinePolicy::Auto
    }

    /// The list, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }

    /// Whether a program is in the list.
    pub fn holds(&self, program: &Program) -> bool {
        self.entries.iter().any(|entry| entry.program == *program)
    }

    fn entry(&mut self, program: &Program) -> Option<&mut Entry> {
        let mut entries = self.entries.iter_mut();
        entries.find(|entry| entry.program == *program)
    }

    /// Adds a program; `false`: it is in the list already, or the quarantine is disabled.
    pub fn add(&mut self, program: Program) -> bool {
        if !self.is_on() || self.holds(&program) {
            return false;
        }
        insert(&mut self.entries, program, 0);
        true
    }

    /// A program may have caused a fault; `true`: it was added to the list.
    pub fn accuse(&mut self, program: &Program) -> bool {
        let mut suspects = self.suspects.iter();
        let noted = suspects.position(|one| one.program == *program);
        let earlier = noted.map_or(0, |at| self.suspects.remove(at).faults);
        let is_new = self.add(program.clone());
        if let Some(entry) = self.entry(program) {
            entry.faults = entry.faults.saturating_add(earlier + 1);
            entry.clean = 0;
        }
        is_new
    }

    /// A program is one of several, also of other users, that may have caused a fault. Only the second such fault is held
    /// against it, as [`Quarantine::accuse`] does; `None`: this is the first one.
    pub fn suspect(&mut self, program: &Program) -> Option<bool> {
        let is_known = self.suspects.iter().any(|one| one.program == *program);
        if !self.is_on() || is_known || self.holds(program) {
            return Some(self.accuse(program));
        }
        insert(&mut self.suspects, program.clone(), 1);
        None
    }

    /// A process of a program has ended at a usual server without a fault: a suspect is one no more after as many in a row
    /// as release a program.
    pub fn note_clean_run_of_suspect(&mut self, program: &Program) {
        let mut suspects = self.suspects.iter_mut();
        if let Some(one) = suspects.find(|one| one.program == *program) {
            one.clean += 1;
        }
        self.suspects.retain(|one| one.clean < CLEAN_RUNS);
    }

    /// A process of a quarantined program has ended without a fault; `true`: the program is released.
    pub fn note_clean_run(&mut self, program: &Program) -> bool {
        let Some(entry) = self.entry(program) else {
            return false;
        };
        entry.clean += 1;
        let is_good = entry.clean >= CLEAN_RUNS;
        if is_good {
            self.entries.retain(|entry| entry.program != *program);
        }
        is_good
    }

    /// Removes the matching programs from the list and returns them. Matching suspects are forgotten.
    pub fn release(&mut self, is_meant: impl Fn(&Program) -> bool) -> Vec<Program> {
        self.suspects.retain(|one| !is_meant(&one.program));
        let released = self
            .entries
            .extract_if(.., |entry| is_meant(&entry.program));
        released.map(|entry| entry.program).collect()
    }
}

/// Adds a program to a list. Its user's oldest program makes room, or the oldest of all.
fn insert(list: &mut Vec<Entry>, program: Program, faults: u32) {
    let of_user = |entry: &Entry| entry.program.uid == program.uid;
    if list.iter().filter(|entry| of_user(entry)).count() >= MOST_OF_USER {
        let oldest = list.iter().position(of_user);
        oldest.map(|oldest| list.remove(oldest));
    } else if list.len() >= MOST {
        list.remove(0);
    }
    list.push(Entry {
        program,
        since: SystemTime::now(),
        faults,
        clean: 0,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(uid: u32, name: &str) -> Program {
        Program::named(uid, name)
    }

    fn list() -> Quarantine {
        Quarantine::new(QuarantinePolicy::Auto)
    }

    #[test]
    fn a_program_is_one_users() {
        let mut list = list();
        assert!(list.accuse(&program(7, "/a")));
        assert!(list.holds(&program(7, "/a")));
        assert!(!list.holds(&program(8, "/a")) && !list.holds(&program(7, "/b")));
    }

    #[test]
    fn three_clean_runs_in_a_row_release() {
        let mut list = list();
        let faulty = program(7, "/a");
        assert!(list.accuse(&faulty));
        assert!(!list.note_clean_run(&faulty) && !list.note_clean_run(&faulty));
        assert!(!list.accuse(&faulty), "it was there");
        let faults: Vec<(u32, u32)> = list
            .iter()
            .map(|entry| (entry.faults, entry.clean))
            .collect();
        assert_eq!(faults, [(2, 0)]);
        assert!(!list.note_clean_run(&faulty) && !list.note_clean_run(&faulty));
        assert!(list.note_clean_run(&faulty));
        assert!(!list.holds(&faulty));
        assert!(!list.note_clean_run(&faulty), "not in the list");
    }

    #[test]
    fn one_of_several_suspects_is_quarantined_by_its_second_fault() {
        let mut list = list();
        let [one, other] = [program(7, "/a"), program(8, "/a")];
        assert_eq!(list.suspect(&one), None);
        assert!(!list.holds(&one));
        assert_eq!(list.suspect(&other), None);
        assert_eq!(list.suspect(&one), Some(true));
        assert!(list.holds(&one) && !list.holds(&other));
        assert_eq!(list.iter().next().map(|entry| entry.faults), Some(2));
        assert_eq!(list.suspect(&one), Some(false), "it was there");
        // A fault that it has caused alone.
        assert!(list.accuse(&other));
        assert!(list.suspects.is_empty());
        let mut off = Quarantine::new(QuarantinePolicy::Off);
        assert_eq!([off.suspect(&one), off.suspect(&one)], [Some(false); 2]);
    }

    #[test]
    fn suspects_are_forgotten_after_clean_runs_and_when_released() {
        let mut list = list();
        let one = program(7, "/a");
        for _ in 0..CLEAN_RUNS {
            assert_eq!(list.suspect(&one), None);
            for _ in 0..CLEAN_RUNS {
                list.note_clean_run_of_suspect(&one);
            }
        }
        assert_eq!(list.suspect(&one), None);
        assert_eq!(list.release(|_| true), []);
        assert_eq!(list.suspect(&one), None);
        for _ in 1..CLEAN_RUNS {
            list.note_clean_run_of_suspect(&one);
        }
        assert_eq!(list.suspect(&one), Some(true));
        // Of a quarantined program, only processes with a server of its own count.
        list.note_clean_run_of_suspect(&one);
        assert_eq!(list.iter().next().map(|entry| entry.clean), Some(0));
    }

    #[test]
    fn suspects_are_bounded() {
        let mut list = list();
        for number in 0..=MOST_OF_USER {
            assert_eq!(list.suspect(&program(7, &format!("/{number}"))), None);
        }
        assert_eq!(list.suspects.len(), MOST_OF_USER);
        assert_eq!(list.suspect(&program(7, "/0")), None, "it was forgotten");
        assert_eq!(list.suspect(&program(7, "/7")), Some(true));
    }

    #[test]
    fn an_operator_adds_and_releases() {
        let mut list = list();
        assert!(list.add(program(7, "/a")) && list.add(program(8, "/a")));
        assert!(!list.add(program(7, "/a")));
        let mine = |program: &Program| program.uid == 7;
        assert_eq!(list.release(mine), [program(7, "/a")]);
        assert_eq!(list.release(mine), []);
        assert!(list.holds(&program(8, "/a")));
    }

    #[test]
    fn the_oldest_makes_room() {
        let mut list = list();
        for uid in 0..2 * MOST as u32 {
            list.accuse(&program(uid, "/a"));
        }
        assert_eq!(list.iter().count(), MOST);
        assert!(!list.holds(&program(0, "/a")) && list.holds(&program(MOST as u32, "/a")));
        // A user's own oldest, before another's.
        for number in 0..=MOST_OF_USER {
            list.accuse(&program(1 << 20, &format!("/{number}")));
        }
        let of_user = list.iter().filter(|entry| entry.program.uid == 1 << 20);
        assert_eq!(of_user.count(), MOST_OF_USER);
        assert!(!list.holds(&program(1 << 20, "/0")) && list.holds(&program(1 << 20, "/1")));
    }

    #[test]
    fn nothing_is_listed_where_it_is_off() {
        let mut list = Quarantine::new(QuarantinePolicy::Off);
        assert!(!list.accuse(&program(7, "/a")) && !list.add(program(7, "/a")));
        assert_eq!(list.iter().count(), 0);
    }
}
