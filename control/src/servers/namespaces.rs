//! Namespaces of named servers: each has a socket and limits of its own, and shares the server's process and context.

use super::named::not_created;
use super::{Definition, NamedId, OwnLimits, Servers};
use crate::directory::Gate;
use crate::spawn::Owner;
use mpsshim_api::cuda::CUDA_ERROR_MPS_CONNECTION_FAILED;
use mpsshim_model::amount;
use mpsshim_model::limits::{Limits, Percentage};
use mpsshim_model::named::{
    DEFAULT_NAMESPACE, MOST_NAMESPACES, Named, NamespaceLimits, check_name,
};
use std::fmt;
use std::os::fd::BorrowedFd;

/// Number of a namespace. A namespace that is created later under the same name has another one.
type SpaceId = u32;

/// A socket of a named server, or of one of its namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entrance {
    pub(super) server: NamedId,
    /// `None`: the socket in the server's own folder.
    space: Option<SpaceId>,
}

/// A namespace with its socket. Its limits are in [`Named::namespaces`].
pub struct Space {
    id: SpaceId,
    /// Its name.
    pub name: String,
    pub(super) gate: Option<Gate>,
}

/// A namespace as an operator names it.
#[derive(Clone, Copy, Debug)]
pub struct Path<'a> {
    /// Name of its server.
    pub server: &'a str,
    /// Its own name.
    pub name: &'a str,
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.server, self.name)
    }
}

impl Path<'_> {
    /// The namespace's name in limits and clients; `None`: the default namespace.
    pub fn own_name(&self) -> Option<&str> {
        (self.name != DEFAULT_NAMESPACE).then_some(self.name)
    }
}

impl Definition {
    /// Its namespaces, the default one first.
    pub fn spaces(&self) -> impl Iterator<Item = &Space> {
        self.spaces.iter()
    }

    /// The namespace of the clients that come by this socket; `None`: the default one.
    ///
    /// # Errors
    /// It has been deleted, in words.
    pub(super) fn namespace_at(&self, gate: Entrance) -> Result<Option<String>, String> {
        let Some(id) = gate.space else {
            return Ok(None);
        };
        let space = self.spaces.iter().find(|space| space.id == id);
        let space = space.ok_or("its namespace has been deleted")?;
        Ok((space.name != DEFAULT_NAMESPACE).then(|| space.name.clone()))
    }

    /// Its sockets.
    fn gates(&self) -> impl Iterator<Item = (Entrance, &Gate)> {
        let own = self.gate.iter().map(|gate| (None, gate));
        let spaces = self.spaces.iter();
        let spaces = spaces.filter_map(|space| Some((Some(space.id), space.gate.as_ref()?)));
        let server = self.id;
        own.chain(spaces)
            .map(move |(space, gate)| (Entrance { server, space }, gate))
    }
}

impl Servers {
    /// The sockets of the named servers and their namespaces.
    pub fn gates(&self) -> impl Iterator<Item = (Entrance, BorrowedFd<'_>)> {
        let all = self.named.iter().flat_map(Definition::gates);
        all.map(|(entrance, gate)| (entrance, gate.listener()))
    }

    /// The socket of a named server or a namespace.
    pub fn gate(&self, entrance: Entrance) -> Option<BorrowedFd<'_>> {
        let mut gates = self.definition(entrance.server)?.gates();
        let (_, gate) = gates.find(|(one, _)| *one == entrance)?;
        Some(gate.listener())
    }

    /// The namespaces of a server, without sockets.
    pub(super) fn spaces_of(&mut self, named: &Named) -> Vec<Space> {
        let names = named.namespaces.keys().map(String::as_str);
        let names: Vec<&str> = std::iter::once(DEFAULT_NAMESPACE).chain(names).collect();
        names.into_iter().map(|name| self.new_space(name)).collect()
    }

    /// Adds the namespaces of a server of a dead daemon to the known ones.
    pub(super) fn adopt_namespaces(&mut self, id: NamedId, of_server: &Named) {
        for (name, limits) in &of_server.namespaces {
            let space = self.new_space(name);
            let Some(found) = self.named.iter_mut().find(|one| one.id == id) else {
                return;
            };
            let known = &mut found.named.namespaces;
            if !known.contains_key(name) && known.len() < MOST_NAMESPACES {
                known.insert(name.clone(), limits.clone());
                found.spaces.push(space);
            }
        }
    }

    /// Tells a server that was taken over the namespaces, which may have been changed before.
    pub(super) fn tell_namespaces_to(&mut self, owner: Owner) {
        let definition = owner.named.and_then(|id| self.definition(id));
        let Some((id, named)) = definition.map(|one| (one.id, one.named.clone())) else {
            return;
        };
        self.tell_namespaces(id, &named);
    }

    pub(super) fn new_space(&mut self, name: &str) -> Space {
        self.last_space += 1;
        Space {
            id: self.last_space,
            name: name.to_owned(),
            gate: None,
        }
    }

    /// The named server of this name.
    ///
    /// # Errors
    /// There is none, in words.
    pub fn created(&self, name: &str) -> Result<&Definition, String> {
        self.defined(name).ok_or_else(|| not_created(name))
    }

    /// The server of a namespace.
    ///
    /// # Errors
    /// There is no such server or namespace, in words.
    pub fn server_of(&self, path: Path<'_>) -> Result<&Definition, String> {
        let server = self.created(path.server)?;
        match server.spaces.iter().any(|space| space.name == path.name) {
            true => Ok(server),
            false => Err(format!(
                "Namespace \"{path}\" not found; namespace list lists the namespaces"
            )),
        }
    }

    /// The limits that new clients of a namespace get, by the server's ordinals.
    pub fn limits_of_namespace(&self, server: &Definition, path: Path<'_>) -> Limits {
        let mut limits = self.limits_of(server);
        // A process that is ending may have received earlier namespaces.
        limits.named = Some(Box::new(server.named.clone()));
        match limits.in_namespace(path.own_name()) {
            Ok(own) => own.into_owned(),
            Err(_) => limits,
        }
    }

    /// The clients of a namespace: processes of the server, sessions and process ids. Without a session: a client that has
    /// none yet.
    fn members<'a>(
        &'a self,
        id: NamedId,
        name: Option<&'a str>,
    ) -> impl Iterator<Item = (i32, Option<u64>, i32)> + 'a {
        let servers = self.all().filter(move |server| server.named == Some(id));
        servers.flat_map(move |server| {
            let is_in = move |namespace: &Option<String>| namespace.as_deref() == name;
            let here = server
                .sessions()
                .filter(move |(_, client)| is_in(&client.namespace));
            let here = here.map(|(session, client)| (server.pid, Some(session), client.pid));
            let coming = server.handed_over.iter();
            let coming = coming.filter(move |coming| is_in(&coming.namespace));
            here.chain(coming.map(|coming| (server.pid, None, coming.who.pid)))
        })
    }

    /// Numbers of the sessions in a namespace.
    pub fn sessions_in(&self, server: &Definition, path: Path<'_>) -> Vec<u64> {
        let clients = self.members(server.id, path.own_name());
        clients.filter_map(|(_, session, _)| session).collect()
    }

    /// Creates a namespace with these limits.
    ///
    /// # Errors
    /// Why that is impossible, in words; nothing is created then.
    pub fn create_namespace(&mut self, path: Path<'_>, limits: &OwnLimits) -> Result<(), String> {
        let Path { server, name } = path;
        let found = self.created(server)?;
        check_name(name)?;
        if found.spaces.iter().any(|space| space.name == name) {
            return Err(format!("there is a namespace {path} already"));
        }
        if found.named.namespaces.len() >= MOST_NAMESPACES {
            return Err(format!(
                "server {server} has {MOST_NAMESPACES} namespaces already"
            ));
        }
        if self.closing {
            return Err("the daemon is shutting down".into());
        }
        self.check_limits(found, limits)?;
        let id = found.id;
        let gate = found.gate.as_ref().map(|gate| gate.below(name));
        let gate =
            gate.ok_or_else(|| format!("server {server} has no folder; control.log says why"))??;
        let mut new = NamespaceLimits::default();
        change(&mut new, limits);
        self.change_namespaces(id, |named| {
            named.namespaces.insert(name.to_owned(), new);
        });
        let mut space = self.new_space(name);
        space.gate = Some(gate);
        if let Some(found) = self.named.iter_mut().find(|one| one.id == id) {
            found.spaces.push(space);
        }
        tracing::info!("Namespace {path} created");
        Ok(())
    }

    /// Changes the limits of a namespace for clients that connect from now on.
    ///
    /// # Errors
    /// Why that is impossible, in words; nothing is changed then.
    pub fn set_namespace(&mut self, path: Path<'_>, limits: &OwnLimits) -> Result<(), String> {
        let found = self.server_of(path)?;
        let Some(name) = path.own_name() else {
            let server = path.server;
            return Err(format!(
                "{path} has the limits of its server; change these with \"server set {server}\""
            ));
        };
        self.check_limits(found, limits)?;
        let id = found.id;
        self.change_namespaces(id, |named| {
            if let Some(own) = named.namespaces.get_mut(name) {
                change(own, limits);
            }
        });
        Ok(())
    }

    /// Deletes a namespace. With `force`, its clients are ended: returns their sessions, by the server's processes.
    ///
    /// # Errors
    /// It has clients, or does not exist, in words; nothing is deleted then.
    pub fn delete_namespace(
        &mut self,
        path: Path<'_>,
        force: bool,
    ) -> Result<Vec<(i32, Vec<u64>)>, String> {
        let found = self.server_of(path)?;
        let Some(name) = path.own_name() else {
            let server = path.server;
            return Err(format!(
                "{path} exists as long as its server; \"server delete {server}\" deletes both"
            ));
        };
        let id = found.id;
        let clients: Vec<_> = self.members(id, Some(name)).collect();
        if !clients.is_empty() && !force {
            let pids: Vec<String> = clients.iter().map(|(.., pid)| pid.to_string()).collect();
            return Err(format!(
                "namespace {path} has clients ({}); end them first, or give --force",
                pids.join(" ")
            ));
        }
        self.change_namespaces(id, |named| {
            named.namespaces.remove(name);
        });
        if let Some(found) = self.named.iter_mut().find(|one| one.id == id) {
            found.spaces.retain(|space| space.name != name);
        }
        self.refuse_clients(
            |waiting| {
                let namespace = waiting.client.namespace.as_deref();
                waiting.owner.named == Some(id) && namespace == Some(name)
            },
            CUDA_ERROR_MPS_CONNECTION_FAILED,
            &format!("namespace {path} has been deleted"),
        );
        let mut ended: Vec<(i32, Vec<u64>)> = Vec::new();
        for (server, session, _) in clients {
            let Some(session) = session else { continue };
            match ended.iter_mut().find(|(pid, _)| *pid == server) {
                Some((_, sessions)) => sessions.push(session),
                None => ended.push((server, vec![session])),
            }
        }
        for (server, _) in &ended {
            self.end_in_deleted_namespaces(*server);
        }
        tracing::info!("Namespace {path} deleted");
        Ok(ended)
    }

    /// Tells a server to end the clients whose namespace has been deleted.
    pub(super) fn end_in_deleted_namespaces(&mut self, pid: i32) {
        let named = &self.named;
        let Some(server) = self.running.iter_mut().find(|server| server.pid == pid) else {
            return;
        };
        let definition = named.iter().find(|one| Some(one.id) == server.named);
        let (Some(definition), Some(link)) = (definition, &server.link) else {
            return;
        };
        let is_deleted = |name: &str| !definition.named.namespaces.contains_key(name);
        let clients = server.sessions.iter();
        for (session, _) in
            clients.filter(|(_, client)| client.namespace.as_deref().is_some_and(is_deleted))
        {
            match link.order_termination(*session) {
                Ok(()) => {}
                Err(error) if error.would_block() => {
                    // Repeated when the link has room.
                    server.link_full = true;
                    return;
                }
                Err(error) => tracing::warn!("Server {pid}: {error}"),
            }
        }
    }

    /// Changes the namespaces of a server, in its definition and its processes.
    pub(super) fn change_namespaces(&mut self, id: NamedId, change: impl FnOnce(&mut Named)) {
        if let Some(found) = self.named.iter_mut().find(|one| one.id == id) {
            change(&mut found.named);
            let named = found.named.clone();
            self.tell_namespaces(id, &named);
        }
    }

    fn tell_namespaces(&mut self, id: NamedId, named: &Named) {
        let servers = self.running.iter_mut();
        for server in servers.filter(|server| server.named == Some(id)) {
            if server.limits.named.as_deref() != Some(named) {
                server.limits.named = Some(Box::new(named.clone()));
                server.limits_pending = true;
                server.send_limits();
            }
        }
    }

    /// Whether no limit is above the server's.
    fn check_limits(&self, server: &Definition, new: &OwnLimits) -> Result<(), String> {
        let limits = self.limits_of(server);
        check_threads(&limits, &server.named, new)?;
        check_memory(&limits, &server.named, new)
    }
}

/// Whether a namespace's percentage is not above the server's. 100 percent is no limit.
pub(super) fn check_threads(
    limits: &Limits,
    server: &Named,
    new: &OwnLimits,
) -> Result<(), String> {
    match new.threads.filter(|one| *one != Percentage::ALL) {
        Some(threads) if threads > limits.threads => Err(format!(
            "server {} has {} percent of the active threads, and a namespace has no more",
            server.name, limits.threads
        )),
        _ => Ok(()),
    }
}

/// Whether a namespace's amounts of memory are not above the server's.
pub(super) fn check_memory(limits: &Limits, server: &Named, new: &OwnLimits) -> Result<(), String> {
    for (own, bytes) in new.memory.iter().flatten() {
        if let Some(limit) = limits.memory.get(own).filter(|limit| *limit < bytes) {
            let device = server.ordinal(*own).unwrap_or(*own);
            return Err(format!(
                "server {} has a limit of {} on device {device}, and a namespace has no more",
                server.name,
                amount::print(*limit)
            ));
        }
    }
    Ok(())
}

/// Sets the limits that are given. With 100 percent, priority 0 or no amounts of memory, the server's limit applies.
pub(super) fn change(limits: &mut NamespaceLimits, new: &OwnLimits) {
    if let Some(threads) = new.threads {
        limits.threads = Some(threads).filter(|one| *one != Percentage::ALL);
    }
    if let Some(priority) = new.priority {
        limits.priority = Some(priority).filter(|one| *one != 0);
    }
    if let Some(memory) = &new.memory {
        limits.memory.clone_from(memory);
    }
}
