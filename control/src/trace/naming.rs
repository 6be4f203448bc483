//! Names of the clients in a trace.

use super::Process;
use crate::program::Identity;
use crate::program::readers::{Readers, Reading};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long the end of a trace may wait for names, which take some microseconds for cooperative processes.
const PATIENCE: Duration = Duration::from_secs(1);

/// Clients whose command lines are being read.
pub struct Naming {
    /// `None`: there is no descriptor for the readers' event, and clients are named by their process ids alone.
    readers: Option<Readers>,
    /// By number of the reading; the readers bound them.
    pending: BTreeMap<u64, (Process, Reading)>,
    /// Clients without a reader, since the last call of [`Naming::found`].
    unread: Vec<Process>,
    next: u64,
}

impl Naming {
    /// No clients yet.
    pub fn new() -> Naming {
        Naming {
            readers: Readers::new().ok(),
            pending: BTreeMap::new(),
            unread: Vec::new(),
            next: 0,
        }
    }

    /// Begins to read the command line of a client of this user.
    pub fn begin(&mut self, process: Process, uid: u32) {
        let readers = self.readers.as_ref();
        let reading = readers.and_then(|readers| readers.read(self.next, process.pid, uid));
        match reading {
            Some(reading) => drop(self.pending.insert(self.next, (process, reading))),
            None => self.unread.push(process),
        }
        self.next += 1;
    }

    /// The clients whose names were found since the last call, or will not be found.
    pub fn found(&mut self) -> Vec<(Process, String)> {
        let mut names: Vec<_> = self.unread.drain(..).map(unknown).collect();
        if let Some(readers) = self.readers.as_ref().filter(|_| !self.pending.is_empty()) {
            let found = readers.take();
            names.extend(self.named(found));
        }
        names
    }

    /// The names of the remaining clients, as far as they are found in time.
    pub fn finish(mut self) -> Vec<(Process, String)> {
        let until = Instant::now() + PATIENCE;
        let mut names = self.found();
        while !self.pending.is_empty() && Instant::now() < until {
            let found = self.readers.as_ref().map(|readers| readers.take_by(until));
            names.extend(self.named(found.unwrap_or_default()));
        }
        let late = self.pending.into_values();
        names.extend(late.map(|(process, _)| unknown(process)));
        names
    }

    fn named(&mut self, found: Vec<(u64, Identity)>) -> Vec<(Process, String)> {
        let name = |(number, found): (u64, Identity)| {
            let (process, _) = self.pending.remove(&number)?;
            Some((process, name(process, found.command)))
        };
        found.into_iter().filter_map(name).collect()
    }
}

fn unknown(process: Process) -> (Process, String) {
    (process, name(process, None))
}

fn name(process: Process, command: Option<String>) -> String {
    let command = command.as_deref().unwrap_or("unknown");
    let program = command.rsplit('/').next().unwrap_or_default();
    format!("{program} ({})", process.pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_named_by_their_programs() {
        let pid = std::process::id() as i32;
        let mut naming = Naming::new();
        let process = |pid| Process { session: 2, pid };
        naming.begin(process(pid), nix::unistd::geteuid().as_raw());
        // No process has this id.
        naming.begin(process(i32::MAX), 7);
        let mut names = naming.finish();
        names.sort_by_key(|(process, _)| process.pid);
        let own = std::env::args().next().expect("a command line");
        let own = own.rsplit('/').next().expect("a name");
        assert_eq!(
            names,
            [
                (process(pid), format!("{own} ({pid})")),
                (process(i32::MAX), format!("unknown ({})", i32::MAX)),
            ]
        );
    }
}
