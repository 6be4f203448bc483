//! Servers of quarantined programs: one for each program, beside its user's usual server and as long as it has clients.

use super::{Server, Servers, State, Waiting};
use crate::link::{Arrival, LONGEST_KERNEL, MOST_SUSPECTS, Suspect};
use crate::logging::limit;
use crate::program::{Identity, Program};
use crate::quarantine::{CLEAN_RUNS, Entry, Quarantine, accusation};
use crate::spawn::Owner;
use mpsshim_model::client::Credentials;
use mpsshim_model::mode::Mode;
use mpsshim_model::policy::Users;
use mpsshim_proto::handshake::Wire;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Servers of quarantined programs at a time: each has a context of its own on the device. Further programs share the
/// usual server.
pub const MOST_APART: usize = 8;

/// A server that clients wait for.
#[derive(Debug)]
pub struct Lacking {
    /// The user or users that it must serve.
    pub owner: Owner,
    /// The quarantined program that it must be for.
    pub program: Option<Program>,
    /// The wire that it must speak; `None`: any.
    pub wire: Option<Wire>,
}

/// A client on its way to its server.
#[derive(Debug)]
pub struct Coming {
    /// Its credentials.
    pub who: Credentials,
    /// Its namespace.
    pub namespace: Option<String>,
    /// Its command line and its program, if known.
    pub identity: Identity,
}

/// Findings about programs in a server's reports.
#[derive(Debug, Default)]
pub struct Findings {
    /// Quarantined programs with a process that ended without a fault.
    worked: Vec<Program>,
    /// Programs with a process that ended without a fault at a usual server.
    worked_beside_others: Vec<Program>,
    /// The loss of the context.
    fault: Option<Fault>,
}

#[derive(Debug)]
struct Fault {
    server: (i32, u32),
    /// The program whose processes were the only clients.
    quarantined: Option<Program>,
    /// Clients with work in flight.
    suspects: Vec<Accused>,
}

#[derive(Debug)]
struct Accused {
    pid: i32,
    uid: u32,
    program: Option<Program>,
    kernel: Option<String>,
}

/// Whether a client's program is of interest. Not in direct mode, where each client has a context of its own and is not
/// quarantined.
pub fn is_program_needed(client: &Arrival) -> bool {
    !matches!(Mode::asked(client.hello.mode), Ok(Some(Mode::Direct)))
}

/// The quarantined program that a client with this program needs a server for; `None`: the user's usual server serves it,
/// also if the program is quarantined but has no server, and there is no room for one.
pub fn needed<'a>(
    list: &Quarantine,
    running: &[Server],
    (owner, program): (Owner, Option<&'a Program>),
) -> Option<&'a Program> {
    let program = program.filter(|program| list.holds(program))?;
    let has_server = apart(running).any(|server| server.serves(owner, Some(program), None));
    (has_server || has_room(running, program)).then_some(program)
}

/// The servers of quarantined programs.
fn apart(running: &[Server]) -> impl Iterator<Item = &Server> {
    let is_apart = |server: &&Server| server.quarantined.is_some() && server.standby_of.is_none();
    running.iter().filter(is_apart)
}

/// Whether one more server of a quarantined program may run. Each user gets one, regardless of the number of other users'
/// servers.
fn has_room(running: &[Server], program: &Program) -> bool {
    let is_users = |server: &Server| {
        let theirs = server.quarantined.as_ref();
        theirs.is_some_and(|other| other.uid == program.uid)
    };
    apart(running).count() < MOST_APART || !apart(running).any(is_users)
}

/// Whether this is a plausible report. Kernel names are shown on operators' terminals.
fn check(suspects: &[Suspect]) -> Result<(), String> {
    if suspects.len() > MOST_SUSPECTS {
        return Err(format!("it reports {} suspects", suspects.len()));
    }
    let is_name = |text: &String| text.len() <= LONGEST_KERNEL && !text.contains(char::is_control);
    if !suspects.iter().flat_map(|one| &one.kernel).all(is_name) {
        return Err("it reports a kernel with an invalid name".to_owned());
    }
    Ok(())
}

impl Server {
    /// Whether it is a server for these clients of a user, which speak a wire, if that is known.
    pub(super) fn serves(
        &self,
        owner: Owner,
        program: Option<&Program>,
        wire: Option<Wire>,
    ) -> bool {
        self.owner().is(owner) && self.is_for(program, wire) && self.standby_of.is_none()
    }

    /// Whether it is for the clients of this quarantined program, or of all others, that speak a wire.
    fn is_for(&self, program: Option<&Program>, wire: Option<Wire>) -> bool {
        self.quarantined.as_ref() == program && wire.is_none_or(|wire| self.speaks(wire))
    }

    /// The context is lost.
    ///
    /// # Errors
    /// A report that no real server makes, in words.
    pub(super) fn note_suspects(&mut self, suspects: Vec<Suspect>) -> Result<(), String> {
        check(&suspects)?;
        let accuse = |suspect: Suspect| {
            let client = self.sessions.get(&suspect.session)?;
            Some(Accused {
                pid: client.pid,
                uid: client.uid,
                program: client.program.clone(),
                kernel: suspect.kernel,
            })
        };
        let fault = Fault {
            server: (self.pid, self.uid),
            quarantined: self.quarantined.clone(),
            suspects: suspects.into_iter().filter_map(accuse).collect(),
        };
        // Only the first report counts: a server has one fault at most.
        self.findings.fault.get_or_insert(fault);
        Ok(())
    }

    /// A session is over; `ended`: by the server.
    pub(super) fn note_end(&mut self, session: u64, ended: bool) {
        let Some(client) = self.sessions.remove(&session) else {
            return;
        };
        let worked = !ended
            && self.kill_at.is_none()
            && matches!(self.state, State::Active | State::Stopping)
            && self.sessions.values().all(|other| other.pid != client.pid);
        let found = &mut self.findings;
        match &self.quarantined {
            _ if !worked => {}
            None => found.worked_beside_others.extend(client.program),
            Some(of) => found.worked.extend(client.program.filter(|one| one == of)),
        }
    }

    pub(super) fn take_findings(&mut self) -> Findings {
        mem::take(&mut self.findings)
    }
}

impl Servers {
    /// The list.
    pub fn quarantine(&self) -> &Quarantine {
        &self.quarantine
    }

    /// Quarantined programs, each with the process id of its server, if it has one.
    pub fn quarantined(&self) -> impl Iterator<Item = (&Entry, Option<i32>)> {
        let server = |entry: &Entry| {
            let mut running = self.running.iter();
            let of_it = |server: &&Server| {
                server.quarantined.as_ref() == Some(&entry.program) && server.standby_of.is_none()
            };
            running.find(of_it).map(|server| server.pid)
        };
        self.quarantine
            .iter()
            .map(move |entry| (entry, server(entry)))
    }

    /// How many faults of servers there were.
    pub fn faults(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.faults)
    }

    /// Quarantines a program from its next start on; no change if it is quarantined already.
    ///
    /// # Errors
    /// The reason of a failure, in words.
    pub fn quarantine_program(&mut self, program: Program) -> Result<(), String> {
        if !self.quarantine.is_on() {
            return Err("the quarantine is off (MPSSHIM_QUARANTINE)".into());
        }
        if self.quarantine.add(program.clone()) {
            tracing::info!("Program {program} is quarantined");
            self.advance();
        }
        Ok(())
    }

    /// Releases programs: they get the usual server from their next start on. Returns the number of released programs.
    pub fn release_programs(&mut self, is_meant: impl Fn(&Program) -> bool) -> usize {
        let released = self.quarantine.release(is_meant);
        for program in &released {
            tracing::info!("Program {program} is released from quarantine");
        }
        self.advance();
        released.len()
    }

    /// Whether no server has clients of several users. Then each user may release its own programs: the next fault affects
    /// only that user.
    pub fn has_server_per_user(&self) -> bool {
        self.launcher.users() != Users::Together
    }

    /// Updates the list.
    pub(super) fn weigh(&mut self, found: Findings) {
        for program in found.worked {
            if self.quarantine.note_clean_run(&program) {
                tracing::info!(
                    "Program {program} is released from quarantine: {CLEAN_RUNS} processes in a row ended without a fault"
                );
            }
        }
        for program in found.worked_beside_others {
            self.quarantine.note_clean_run_of_suspect(&program);
        }
        let Some(fault) = found.fault else { return };
        self.faults.fetch_add(1, Ordering::Relaxed);
        let (pid, uid) = fault.server;
        let _guard = limit::caused_by_user(uid);
        let what = accusation(fault.suspects.len());
        for one in &fault.suspects {
            let program = one
                .program
                .as_ref()
                .map_or("unknown", |program| &program.name);
            let kernel = one.kernel.as_deref().unwrap_or("unknown");
            tracing::error!(
                "Server {pid}: client {} of user {} {what}; program: {program}; kernel: {kernel}",
                one.pid,
                one.uid
            );
        }
        let is_apart = fault.quarantined.is_some();
        let is_unknown = fault.suspects.iter().any(|one| one.program.is_none());
        // The fault of a quarantined program's server is that program's, whichever session had work in flight.
        let suspects = fault.suspects.into_iter().filter_map(|one| one.program);
        let mut programs: Vec<Program> = suspects.chain(fault.quarantined).collect();
        programs.sort();
        programs.dedup();
        // Between users, one fault that another program may have caused is not enough.
        let is_certain = is_apart || !is_unknown && programs.len() == 1;
        let is_enough = is_certain || self.has_server_per_user();
        for program in programs {
            let accused = if is_enough {
                Some(self.quarantine.accuse(&program))
            } else {
                self.quarantine.suspect(&program)
            };
            match accused {
                Some(true) => tracing::warn!(
                    "Program {program} is quarantined: it has a server of its own from its next start on"
                ),
                Some(false) => {}
                None => tracing::warn!(
                    "Program {program} is quarantined if it may have caused another fault before {CLEAN_RUNS} of its processes in a row have ended without one"
                ),
            }
        }
    }

    /// The first waiting client, or user of `start_server`, without a server that accepts clients. Prefers a client whose
    /// server can be started.
    pub(super) fn without_server(&self) -> Option<Lacking> {
        let clients = self
            .waiting
            .iter()
            .filter(|waiting| waiting.is_identified());
        let clients =
            clients.map(|waiting| (waiting.owner, self.needed_by(waiting), Some(waiting.wire())));
        let wanted = self.wanted.iter().map(|owner| (*owner, None, None));
        let has_server = |owner: Owner, program: Option<&Program>, wire: Option<Wire>| {
            let accepts = |server: &Server| {
                server.serves(owner, program, wire)
                    && matches!(
                        server.state,
                        State::Initializing
                            | State::Active
                            | State::HandingOver
                            | State::HandedOver
                    )
            };
            self.running.iter().any(accepts)
        };
        let lacking = clients
            .chain(wanted)
            .filter(|(owner, program, wire)| !has_server(*owner, *program, *wire));
        let first = lacking
            .clone()
            .find(|(owner, program, wire)| self.may_start(*owner, *program, *wire));
        let (owner, program, wire) = first.or_else(|| lacking.clone().next())?;
        Some(Lacking {
            owner,
            program: program.cloned(),
            wire,
        })
    }

    pub(super) fn needed_by<'a>(&self, waiting: &'a Waiting) -> Option<&'a Program> {
        let seeks = (waiting.owner, waiting.program());
        needed(&self.quarantine, &self.running, seeks)
    }

    /// Whether a server may run now beside the others: named servers, servers of other users if users are apart, and servers of the same user
    /// for other programs, for clients of another release or for clients that could not move to the next server, if the devices
    /// admit several processes.
    pub(super) fn may_start(
        &self,
        owner: Owner,
        program: Option<&Program>,
        wire: Option<Wire>,
    ) -> bool {
        let beside = |server: &Server| {
            if server.named != owner.named {
                return !self.shares_exclusive(server, owner);
            }
            if server.uid != owner.uid {
                return self.users_are_apart();
            }
            let for_others = !server.is_for(program, wire) || server.left_behind;
            let is_exclusive = self.exclusive && owner.named.is_none();
            for_others && !is_exclusive && !server.is_exclusive()
        };
        let has_room = |program: &Program| has_room(&self.running, program);
        self.running.iter().all(beside) && program.is_none_or(has_room)
    }

    /// Process ids of the working servers that make room for a server for these clients: those of other users whose servers
    /// are all idle, unless users are apart, and on devices that admit one process also idle servers of the same user.
    pub(super) fn servers_in_the_way(
        &self,
        owner: Owner,
        program: Option<&Program>,
        wire: Option<Wire>,
    ) -> Vec<i32> {
        let is_idle = |uid: u32| {
            let of_user = |server: &&Server| {
                server.uid == uid && server.named.is_none() && server.standby_of.is_none()
            };
            let mut servers = self.running.iter().filter(of_user);
            servers.all(|server| server.state != State::Initializing && server.is_idle())
        };
        let makes_room = |server: &&Server| {
            let is_apart = server.is_exclusive() && !server.is_for(program, wire);
            server.state == State::Active
                && server.named == owner.named
                && server.standby_of.is_none()
                && if server.uid == owner.uid {
                    is_apart && server.is_idle()
                } else {
                    !self.users_are_apart() && is_idle(server.uid)
                }
        };
        let servers = self.running.iter().filter(makes_room);
        servers.map(|server| server.pid).collect()
    }

    /// Ends servers without clients if they are for a quarantined program, or of another release beside the usual server.
    pub(super) fn end_unneeded(&mut self) {
        let is_needed = |server: &Server| {
            let mut waiting = self.waiting.iter();
            waiting.any(|one| server.serves(one.owner, self.needed_by(one), Some(one.wire())))
        };
        let is_over = |server: &&Server| {
            let is_apart = server.quarantined.is_some() || self.is_beside_newer(server);
            is_apart && server.state == State::Active && server.is_idle() && !is_needed(server)
        };
        let over: Vec<i32> = self
            .running
            .iter()
            .filter(is_over)
            .map(|server| server.pid)
            .collect();
        for server in self
            .running
            .iter_mut()
            .filter(|server| over.contains(&server.pid))
        {
            let what = match server.quarantined {
                Some(_) => "of a quarantined program".to_owned(),
                None => format!("of release {}", server.release.version),
            };
            tracing::info!("Shutting down server {} {what}", server.pid);
            server.stop(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suspect(kernel: &str) -> Suspect {
        Suspect {
            session: 1,
            kernel: Some(kernel.into()),
        }
    }

    #[test]
    fn suspects_that_no_server_reports_are_refused() {
        assert_eq!(check(&vec![suspect("_Z4fillPi"); MOST_SUSPECTS]), Ok(()));
        for suspects in [
            vec![suspect("fill"); MOST_SUSPECTS + 1],
            vec![suspect("\x1b[2J")],
            vec![suspect(&"x".repeat(LONGEST_KERNEL + 1))],
        ] {
            assert!(check(&suspects).is_err());
        }
    }
}
