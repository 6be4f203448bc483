//! Servers and namespaces that are created or changed together, as a file describes them: all or none.

use super::namespaces::{change, check_memory, check_threads};
use super::{Definition, OwnLimits, Servers};
use crate::directory::Gate;
use mpsshim_model::limits::Limits;
use mpsshim_model::named::{
    DEFAULT_NAMESPACE, MOST_NAMESPACES, MOST_SERVERS, Named, NamespaceLimits, check_name,
};
use mpsshim_model::partitions::Partitions;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

/// A server to be created or changed.
pub struct Target {
    /// Name and devices; those of the server if it exists.
    pub named: Named,
    /// Its user; `None`: as it is.
    pub uid: Option<u32>,
    /// Limits to be set.
    pub own: OwnLimits,
    /// Its namespaces, beside `default`, with the limits to be set.
    pub namespaces: Vec<(String, OwnLimits)>,
    /// Its static partitions if it is new.
    pub partitions: Partitions,
}

/// The open sockets of a target: those of namespaces are in the folder of the server's, and so are dropped before it.
struct Sockets {
    spaces: Vec<(String, Gate)>,
    server: Option<Gate>,
}

impl Servers {
    /// Whether a server of this name can be created. `beside`: how many others are to be created with it.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn check_new_server(&self, name: &str, beside: usize) -> Result<(), String> {
        self.check_new_name(name)?;
        if self.named.len() + beside >= MOST_SERVERS {
            return Err(format!("there can be {MOST_SERVERS} named servers"));
        }
        self.check_may_create()
    }

    /// The limits that clients of a server get after a change.
    pub fn limits_after(&self, target: &Target) -> Limits {
        let mut limits = match self.defined(&target.named.name) {
            Some(found) => self.limits_of(found),
            None => target.named.limits(&self.defaults.limits),
        };
        target.own.apply(&mut limits);
        limits
    }

    /// Whether these namespaces can be created or changed. Errors are by name and the limit in question.
    pub fn check_namespaces(&self, target: &Target) -> Vec<(String, Wrong, String)> {
        let limits = self.limits_after(target);
        let found = self.defined(&target.named.name);
        let mut wrong = Vec::new();
        let mut count = found.map_or(0, |found| found.named.namespaces.len());
        for (name, own) in &target.namespaces {
            let mut note = |of, checked: Result<(), String>| {
                if let Err(why) = checked {
                    wrong.push((name.clone(), of, why));
                }
            };
            note(Wrong::Name, check_name(name));
            note(Wrong::Threads, check_threads(&limits, &target.named, own));
            note(Wrong::Memory, check_memory(&limits, &target.named, own));
            if found.is_some_and(|found| found.named.namespaces.contains_key(name)) {
                continue;
            }
            count += 1;
            if count > MOST_NAMESPACES {
                let why = format!("a server can have {MOST_NAMESPACES} namespaces");
                note(Wrong::Name, Err(why));
            }
        }
        wrong
    }

    /// Creates and changes servers that have been checked. `directory`: the pipe directory.
    ///
    /// # Errors
    /// The name of a server, and why its sockets cannot be opened; nothing is changed then.
    pub fn apply(
        &mut self,
        targets: Vec<Target>,
        directory: BorrowedFd<'_>,
    ) -> Result<(), (String, String)> {
        let mut all = Vec::new();
        for target in targets {
            match self.sockets(&target, directory) {
                Ok(sockets) => all.push((target, sockets)),
                Err(why) => return Err((target.named.name, why)),
            }
        }
        for (target, sockets) in all {
            match self.defined(&target.named.name).is_some() {
                true => self.change(target, sockets),
                false => self.create_from(target, sockets),
            }
        }
        self.advance();
        Ok(())
    }

    /// Opens the sockets that a target lacks.
    fn sockets(&self, target: &Target, directory: BorrowedFd<'_>) -> Result<Sockets, String> {
        let name = &target.named.name;
        let found = self.defined(name);
        let new = match found {
            None => Some(Gate::open(directory, name)?),
            Some(_) => None,
        };
        let mut sockets = Sockets {
            spaces: Vec::new(),
            server: new,
        };
        let known = |space: &str| {
            found.is_some_and(|found| found.spaces().any(|known| known.name == space))
        };
        let names = target.namespaces.iter().map(|(name, _)| name.as_str());
        for space in std::iter::once(DEFAULT_NAMESPACE).chain(names) {
            if known(space) {
                continue;
            }
            let folder = sockets.server.as_ref();
            let folder = folder.or_else(|| found.and_then(|found| found.gate.as_ref()));
            let folder = folder
                .ok_or_else(|| format!("server {name} has no folder; control.log says why"))?;
            let gate = folder.below(space)?;
            sockets.spaces.push((space.to_owned(), gate));
        }
        Ok(sockets)
    }

    fn create_from(&mut self, target: Target, sockets: Sockets) {
        let uid = target
            .uid
            .unwrap_or_else(|| nix::unistd::geteuid().as_raw());
        let mut named = target.named;
        named.namespaces = with_limits(BTreeMap::new(), &target.namespaces);
        let name = named.name.clone();
        let id = self.define(named, uid, target.own);
        if let Some(one) = self.named.last_mut() {
            one.partitions = target.partitions;
            one.give_sockets(sockets);
        }
        tracing::info!("Server {name} of user {uid} created");
        self.wanted.push(self.owner_of(id, uid));
    }

    fn change(&mut self, target: Target, sockets: Sockets) {
        let name = target.named.name.as_str();
        for (space, _) in &sockets.spaces {
            let new = self.new_space(space);
            if let Some(found) = self.named.iter_mut().find(|one| one.named.name == name) {
                found.spaces.push(new);
                tracing::info!("Namespace {name}/{space} created");
            }
        }
        self.set_limits_soon(name, &target.own);
        let Some(found) = self.named.iter_mut().find(|one| one.named.name == name) else {
            return;
        };
        found.give_sockets(sockets);
        let id = found.id;
        self.change_namespaces(id, |named| {
            let before = std::mem::take(&mut named.namespaces);
            named.namespaces = with_limits(before, &target.namespaces);
        });
        if let Some(uid) = target.uid {
            self.change_user(name, uid);
        }
    }

    /// Changes the limits of a named server; its process gets them as soon as its link has room.
    fn set_limits_soon(&mut self, name: &str, new: &OwnLimits) {
        let running = self.by_name(name).map(|server| server.pid);
        if let Some(found) = self.named.iter_mut().find(|one| one.named.name == name) {
            found.merge(new);
        }
        if let Some(server) = running.and_then(|pid| self.by_pid_mut(pid)) {
            new.apply(&mut server.limits);
            server.limits_pending = true;
            server.send_limits();
        }
    }
}

/// The part of a namespace that a mistake is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Its name, or the number of namespaces.
    Name,
    /// Its active-thread percentage.
    Threads,
    /// Its limit of memory.
    Memory,
}

impl Definition {
    fn give_sockets(&mut self, sockets: Sockets) {
        if let Some(gate) = sockets.server {
            self.gate = Some(gate);
        }
        for (name, gate) in sockets.spaces {
            if let Some(space) = self.spaces.iter_mut().find(|space| space.name == name) {
                space.gate = Some(gate);
            }
        }
    }
}

/// Namespaces with these limits set.
fn with_limits(
    mut namespaces: BTreeMap<String, NamespaceLimits>,
    new: &[(String, OwnLimits)],
) -> BTreeMap<String, NamespaceLimits> {
    for (name, own) in new {
        change(namespaces.entry(name.clone()).or_default(), own);
    }
    namespaces
}
