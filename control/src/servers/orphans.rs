//! Servers of a daemon that has died.

use super::quarantine::MOST_APART;
use super::{Server, Servers};
use crate::closers::Stranger;
use crate::link::Link;
use crate::process::Process;
use crate::program::Program;
use crate::releases::Spoken;
use crate::spawn::Owner;
use crate::takeover::{Introduction, Unknown, Verdict};
use crate::user_memory::{MOST_LIMITS, count_bounds};
use mpsshim_model::client::Credentials;
use mpsshim_model::limits::{Limits, MemoryBound};
use mpsshim_model::policy::{ByUser, MOST_USERS};
use mpsshim_proto::handshake::MAX_DEVICES;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// How long no server is started after a daemon has died: its servers look for the next daemon ten times a second.
const GRACE: Duration = Duration::from_millis(500);

impl Servers {
    /// The previous daemon has died: the servers that clients need may already run.
    pub fn expect_orphans(&mut self) {
        self.orphans_until = Some(Instant::now() + GRACE);
    }

    /// A server of a dead daemon has introduced itself. `devices`: the number of devices, if known.
    pub fn meet(
        &mut self,
        connection: Stranger,
        who: Credentials,
        said: Result<Box<Introduction>, Unknown>,
        devices: Option<usize>,
    ) {
        let Credentials { pid, uid, gid } = who;
        let process = said.map_err(|error| error.to_string()).and_then(|said| {
            let of = (!self.launcher.trusts(uid)).then_some(uid);
            check(&said.limits, of, devices)?;
            let program = said.quarantined.as_ref();
            check_program(program, of)?;
            self.check_named(&said.limits, uid, devices)?;
            self.check_partitions(&said.limits, uid)?;
            let name = said.limits.named.as_ref().map(|named| named.name.as_str());
            // An untrusted user's may lie on a file system that never answers.
            let executable = match of {
                None => self.releases.keep_of(pid),
                Some(_) => None,
            };
            let release = match &executable {
                Some(executable) => executable.spoken().clone(),
                None => said.release.clone().unwrap_or_default(),
            };
            if !release.is_plausible() {
                return Err("it names an impossible release".to_owned());
            }
            let seeks = (name, program, &release);
            let process = self.may_take_over(connection.as_fd(), who, seeks)?;
            Ok((process, *said, release, executable))
        });
        let link = Link::to_user(connection, uid);
        let (
            process,
            Introduction {
                clients,
                limits,
                quarantined,
                ..
            },
            release,
            executable,
        ) = match process {
            Ok(found) => found,
            Err(reason) => {
                tracing::warn!("Server {pid} of user {uid} not taken over: {reason}");
                // The server may have disconnected.
                let _ = link.send(&Verdict::Refused { reason }, None);
                return;
            }
        };
        if let Err(error) = link.send(&Verdict::TakenOver, None) {
            return tracing::warn!("Server {pid} of user {uid} not taken over: {error}");
        }
        tracing::info!("Server {pid} of user {uid} taken over with {clients} clients");
        // It reports its clients, then that it is ready. Its log may have been renamed while no daemon ran.
        let trusted = self.launcher.trusts(uid);
        let owner = Owner {
            uid,
            gid: Some(gid),
            named: self.adopt_named(&limits, uid),
        };
        let mut server = Server::new((pid, owner), trusted, process, link, limits.clone());
        server.hand_log(self.launcher.log());
        if let Some(program) = &quarantined {
            // The previous daemon had it in its list.
            self.quarantine.add(program.clone());
        }
        server.quarantined = quarantined;
        server.release = release;
        server.executable = executable;
        self.running.push(server);
        self.tell_namespaces_to(owner);
        self.adopt_partitions(&limits, (pid, owner.named));
        self.adopt_policies(&limits, uid);
    }

    /// Whether this process may serve its user's clients.
    fn may_take_over(
        &self,
        connection: BorrowedFd<'_>,
        who: Credentials,
        (name, quarantined, release): (Option<&str>, Option<&Program>, &Spoken),
    ) -> Result<Process, String> {
        // A server serves the user it runs as, so that no server gets another user's clients.
        if !self.launcher.serves(who.uid) || self.launcher.owner(who.uid, None).uid != who.uid {
            return Err("this daemon has no servers of that user".into());
        }
        if self.closing {
            return Err("the daemon is shutting down".into());
        }
        let known = name.and_then(|name| self.defined(name));
        if known.is_some_and(|known| known.uid != who.uid) {
            return Err("another user has a server of its name".into());
        }
        let named = known.map(|known| known.id);
        let is_new = name.is_some() && named.is_none();
        let is_same = |server: &&Server| !is_new && server.uid == who.uid && server.named == named;
        let of_user = || self.running.iter().filter(is_same);
        let is_equal = |server: &Server| {
            server.quarantined.as_ref() == quarantined && server.release == *release
        };
        if of_user().any(is_equal) {
            return Err(match name {
                Some(name) => format!("another server has the name {name}"),
                None => "another server serves that user".into(),
            });
        }
        if of_user().count() > MOST_APART {
            return Err(
                "that user has too many servers of quarantined programs and of other releases"
                    .into(),
            );
        }
        Process::of_peer(connection, who).map_err(|error| format!("its process: {error}"))
    }
}

/// Whether a server can have had these limits from a daemon. Only its user is certain, so a server of an untrusted user
/// (`of`) can have been told that user's limits and no others.
fn check(limits: &Limits, of: Option<u32>, devices: Option<usize>) -> Result<(), String> {
    let count = devices.unwrap_or(MAX_DEVICES);
    let stranger = |uid: &&u32| of.is_some_and(|of| of != **uid);
    for bound in MemoryBound::ALL {
        let users = limits.user_memory_of(bound);
        let of_users = users.values().flat_map(|user| user.keys());
        let mut ordinals = of_users.chain(limits.memory_of(bound).keys());
        if let Some(ordinal) = ordinals.find(|ordinal| **ordinal >= count) {
            return Err(format!(
                "it reports a {bound} for device {ordinal}, of {count}"
            ));
        }
        if let Some(uid) = users.keys().find(stranger) {
            return Err(format!("it reports a {bound} of user {uid}"));
        }
    }
    if count_bounds(limits) > MOST_LIMITS {
        return Err(format!(
            "it reports over {MOST_LIMITS} limits and guarantees of users"
        ));
    }
    check_policy("scheduling", &limits.scheduling, of)?;
    check_policy("oversubscription", &limits.oversubscription, of)?;
    check_policy("weight", &limits.user_weights, of)?;
    if limits.priority > 1 {
        return Err(format!("it reports priority {}", limits.priority));
    }
    Ok(())
}

/// Whether a server can have this policy, `of` as above.
fn check_policy<T>(what: &str, policy: &ByUser<T>, of: Option<u32>) -> Result<(), String> {
    let stranger = |uid: &&u32| of.is_some_and(|of| of != **uid);
    if let Some(uid) = policy.users.keys().find(stranger) {
        return Err(format!("it reports the {what} of user {uid}"));
    }
    if policy.users.len() > MOST_USERS {
        return Err(format!("it reports the {what} of over {MOST_USERS} users"));
    }
    Ok(())
}

/// Whether a server can be there for this quarantined program, `of` as above.
fn check_program(program: Option<&Program>, of: Option<u32>) -> Result<(), String> {
    let Some(program) = program else {
        return Ok(());
    };
    if !program.is_sound() || of.is_some_and(|of| of != program.uid) {
        return Err(format!(
            "it reports a quarantined program of user {}",
            program.uid
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_model::policy::Scheduling;

    #[test]
    fn a_server_is_there_for_a_program_of_its_user() {
        let own = Program::named(7, "/opt/nbody");
        assert_eq!(check_program(None, Some(7)), Ok(()));
        assert_eq!(check_program(Some(&own), Some(7)), Ok(()));
        assert_eq!(check_program(Some(&own), None), Ok(()));
        assert!(check_program(Some(&own), Some(8)).is_err());
        let name = "\x1b[2J".into();
        assert!(check_program(Some(&Program { uid: 7, name }), Some(7)).is_err());
    }

    fn limits(all: impl IntoIterator<Item = (u32, usize)>) -> Limits {
        let mut limits = Limits::default();
        for (uid, device) in all {
            let user = limits.user_memory.entry(uid).or_default();
            user.insert(device, 1 << 30);
        }
        limits
    }

    #[test]
    fn a_server_reports_what_it_can_have_been_told() {
        let own = limits([(7, 0), (7, 1)]);
        assert_eq!(check(&own, Some(7), Some(2)), Ok(()));
        assert_eq!(check(&own, Some(7), None), Ok(()));
        let all = limits([(7, 0), (8, 1)]);
        assert_eq!(check(&all, None, Some(2)), Ok(()));
        let refused = |limits: &Limits, of, devices, why: &str| {
            let said = check(limits, of, devices).expect_err(why);
            assert!(said.contains(why), "{said}");
        };
        refused(&all, Some(7), Some(2), "a limit of user 8");
        refused(&all, None, Some(1), "a limit for device 1, of 1");
        refused(&limits([(7, 16)]), Some(7), None, "a limit for device 16");
        let of_clients = Limits {
            memory: [(3, 1)].into(),
            ..Limits::default()
        };
        refused(&of_clients, Some(7), Some(2), "a limit for device 3");
        let mut guarantees = Limits {
            user_guarantee: all.user_memory.clone(),
            ..Limits::default()
        };
        refused(&guarantees, Some(7), Some(2), "a guarantee of user 8");
        let why = "a guarantee for device 1, of 1";
        refused(&guarantees, None, Some(1), why);
        guarantees.guarantee = [(3, 1)].into();
        let why = "a guarantee for device 3";
        refused(&guarantees, None, Some(2), why);
        let many = limits((0..=MOST_LIMITS as u32).map(|uid| (uid, 0)));
        refused(&many, None, None, "over 1000 limits");
        let mut scheduled = Limits::default();
        scheduled.scheduling.users.insert(8, Scheduling::Fifo);
        assert_eq!(check(&scheduled, Some(8), None), Ok(()));
        assert_eq!(check(&scheduled, None, None), Ok(()));
        refused(&scheduled, Some(7), None, "the scheduling of user 8");
        let many = (0..=MOST_USERS as u32).map(|uid| (uid, Scheduling::Fifo));
        scheduled.scheduling.users = many.collect();
        refused(&scheduled, None, None, "the scheduling of over 500 users");
        let low = Limits {
            priority: 2,
            ..Limits::default()
        };
        refused(&low, None, None, "priority 2");
    }
}
