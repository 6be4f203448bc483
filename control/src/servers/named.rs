//! Servers that an operator has created under a name: each has its own clients, devices and limits, beside the servers of
//! users.

use super::namespaces::Space;
use super::{Entrance, Server, Servers, State};
use crate::directory::Gate;
use crate::spawn::Owner;
use mpsshim_api::cuda::{CUDA_ERROR_MPS_CONNECTION_FAILED, CUDA_ERROR_MPS_SERVER_NOT_READY};
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::limits::{Limits, Percentage};
use mpsshim_model::named::{DEFAULT_NAMESPACE, MOST_SERVERS, Named, NamedDevice, check_name};
use mpsshim_model::partitions::Partitions;
use nix::unistd::{Uid, User, geteuid};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

/// Number of a named server. A server that is created later under the same name has another one.
pub type NamedId = u32;

/// Names of the daemon's own files in the pipe directory.
const RESERVED: [&str; 5] = [
    "control",
    "control_lock",
    "control_privileged",
    "log",
    "logs",
];
/// Beginning of the names of users' servers.
pub(super) const OF_USERS: &str = "uid_";
/// Words of the refusal of a name.
const TAKEN: &str = "is reserved: the daemon has files or servers of such names";

/// Limits that an operator has set for a named server, instead of the daemon's defaults.
#[derive(Clone, Debug, Default)]
pub struct OwnLimits {
    /// Active-thread percentage.
    pub threads: Option<Percentage>,
    /// Client priority: 0 normal, 1 below normal.
    pub priority: Option<u32>,
    /// Maximum bytes of device memory of a client, by the server's ordinal; `None`: the daemon's defaults.
    pub memory: Option<BTreeMap<usize, u64>>,
}

impl OwnLimits {
    /// Sets the given ones in `limits`.
    pub(super) fn apply(&self, limits: &mut Limits) {
        limits.threads = self.threads.unwrap_or(limits.threads);
        limits.priority = self.priority.unwrap_or(limits.priority);
        if let Some(memory) = &self.memory {
            limits.memory.clone_from(memory);
        }
    }
}

/// A named server, whether it has a process or not.
pub struct Definition {
    pub(super) id: NamedId,
    /// Name and devices.
    pub named: Named,
    /// The user whose clients it serves.
    pub uid: u32,
    own: OwnLimits,
    /// Its static partitions; in force if the daemon has any.
    pub(super) partitions: Partitions,
    /// Its namespaces, the default one first. Their sockets are in the folder of `gate`, and so are dropped before it.
    pub(super) spaces: Vec<Space>,
    pub(super) gate: Option<Gate>,
    /// Its socket could not be opened, which is logged once.
    is_gate_missed: bool,
}

impl Definition {
    /// Limits of a server that is started now. `defaults`: those of the daemon.
    fn limits(&self, defaults: &Limits) -> Limits {
        let mut limits = self.named.limits(defaults);
        self.own.apply(&mut limits);
        let partitions = defaults.partitions.as_ref();
        limits.partitions = partitions.map(|_| self.partitions.clone());
        limits
    }

    /// Changes the limits that are given.
    pub(super) fn merge(&mut self, new: &OwnLimits) {
        let own = &mut self.own;
        own.threads = new.threads.or(own.threads);
        own.priority = new.priority.or(own.priority);
        own.memory = new.memory.clone().or(own.memory.take());
    }

    /// Opens the sockets that are not open.
    fn open_gates(&mut self, directory: BorrowedFd<'_>) -> Result<(), String> {
        let gate = match self.gate.take() {
            Some(gate) => gate,
            None => Gate::open(directory, &self.named.name)?,
        };
        let gate = self.gate.insert(gate);
        for space in self.spaces.iter_mut().filter(|space| space.gate.is_none()) {
            space.gate = Some(gate.below(&space.name)?);
        }
        Ok(())
    }
}

/// A server to be created.
pub struct Wanted<'a> {
    /// Its name.
    pub name: &'a str,
    /// Whose clients it serves.
    pub uid: u32,
    /// Its devices, as the operator named them; `None`: all.
    pub devices: Option<Vec<(usize, &'a DeviceInfo)>>,
}

impl Servers {
    /// The named servers, oldest first.
    pub fn definitions(&self) -> impl Iterator<Item = &Definition> + Clone {
        self.named.iter()
    }

    /// The named server with this number.
    pub(super) fn definition(&self, id: NamedId) -> Option<&Definition> {
        self.named.iter().find(|one| one.id == id)
    }

    /// The named server of this name.
    pub fn defined(&self, name: &str) -> Option<&Definition> {
        self.named.iter().find(|one| one.named.name == name)
    }

    /// Creates a named server and starts it. `directory`: the pipe directory.
    ///
    /// # Errors
    /// Why that is impossible, in words; nothing is created then.
    pub fn create(&mut self, wanted: Wanted<'_>, directory: BorrowedFd<'_>) -> Result<(), String> {
        let Wanted { name, uid, devices } = wanted;
        self.check_new_server(name, 0)?;
        self.check_user(uid)?;
        self.check_new_devices(devices.is_some())?;
        let named = Named {
            name: name.to_owned(),
            devices: devices.map(|devices| {
                let devices = devices.into_iter();
                let device = devices.map(|(ordinal, device)| NamedDevice {
                    ordinal,
                    uuid: device.uuid.clone(),
                });
                device.collect()
            }),
            namespaces: BTreeMap::new(),
        };
        let gate = Gate::open(directory, name)?;
        let default = gate.below(DEFAULT_NAMESPACE)?;
        let id = self.define(named, uid, OwnLimits::default());
        if let Some(one) = self.named.last_mut() {
            one.spaces[0].gate = Some(default);
            one.gate = Some(gate);
        }
        tracing::info!("Server {name} of user {uid} created");
        self.wanted.push(self.owner_of(id, uid));
        self.advance();
        Ok(())
    }

    /// Whether a server can have this name, and no server has.
    pub(super) fn check_new_name(&self, name: &str) -> Result<(), String> {
        check_name(name)?;
        if RESERVED.contains(&name) || name.starts_with(OF_USERS) {
            return Err(format!("the name {name} {TAKEN}"));
        }
        match self.defined(name) {
            Some(_) => Err(format!("there is a server {name} already")),
            None => Ok(()),
        }
    }

    /// Whether this daemon can have named servers.
    pub(super) fn check_may_create(&self) -> Result<(), String> {
        match self.closing {
            true => Err("the daemon is shutting down".into()),
            false => Ok(()),
        }
    }

    /// Whether a new server may have devices of its own.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn check_new_devices(&self, has_own: bool) -> Result<(), String> {
        match has_own && !self.launcher.modes().devices.is_empty() {
            true => Err(
                "the daemon's --mode names devices, which excludes --allowed-devices; choose one mode for all devices"
                    .into(),
            ),
            false => Ok(()),
        }
    }

    /// Whether a named server may be for this user.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn check_user(&self, uid: u32) -> Result<(), String> {
        let own = geteuid().as_raw();
        if !self.launcher.serves(uid) {
            return Err(format!(
                "this daemon does not run as root and cannot start a server for user {uid}"
            ));
        }
        if self.launcher.owner(uid, None).uid != uid {
            return Err(format!(
                "with --users together each server serves all users and runs as user {own}; leave out --uid"
            ));
        }
        let is_user = uid == own || matches!(User::from_uid(Uid::from_raw(uid)), Ok(Some(_)));
        match is_user {
            true => Ok(()),
            false => Err(format!("there is no user with id {uid}")),
        }
    }

    /// Without sockets.
    pub(super) fn define(&mut self, named: Named, uid: u32, own: OwnLimits) -> NamedId {
        self.last_named += 1;
        let spaces = self.spaces_of(&named);
        self.named.push(Definition {
            id: self.last_named,
            named,
            uid,
            own,
            partitions: Partitions::default(),
            spaces,
            gate: None,
            is_gate_missed: false,
        });
        self.last_named
    }

    /// The owner of the processes of a named server.
    pub(super) fn owner_of(&self, id: NamedId, uid: u32) -> Owner {
        Owner {
            named: Some(id),
            ..self.launcher.owner(uid, None)
        }
    }

    /// The owner of the server for a client of this user at the socket of a named server, and the namespace.
    ///
    /// # Errors
    /// The server or the namespace has been deleted, or the server is another user's, in words.
    pub(super) fn owner_at_gate(
        &self,
        gate: Entrance,
        uid: u32,
    ) -> Result<(Owner, Option<String>), String> {
        let found = self.definition(gate.server);
        let found = found.ok_or("its server has been deleted")?;
        let namespace = found.namespace_at(gate)?;
        if self.launcher.owner(uid, None).uid != found.uid {
            let name = &found.named.name;
            return Err(format!("server {name} serves user {} only", found.uid));
        }
        Ok((self.owner_of(gate.server, found.uid), namespace))
    }

    /// The users served by that owner's server, in words.
    pub(super) fn served(&self, owner: Owner) -> String {
        let served = self.launcher.served(owner);
        match owner.named.and_then(|id| self.definition(id)) {
            Some(one) => format!("{served} as {}", one.named.name),
            None => served,
        }
    }

    /// Process ids of a named server: its own, those of its quarantined programs, and of its standbys.
    fn processes_of(&self, id: NamedId) -> Vec<i32> {
        let all = self.all().filter(|server| server.named == Some(id));
        all.map(|server| server.pid).collect()
    }

    /// Deletes a named server and ends its processes; returns their ids. With `force`, its clients are ended.
    ///
    /// # Errors
    /// It has clients, or does not exist, in words; nothing is deleted then.
    pub fn delete(&mut self, name: &str, force: bool) -> Result<Vec<i32>, String> {
        let id = self.created(name)?.id;
        let clients = self.clients_of(id);
        if !clients.is_empty() && !force {
            return Err(format!(
                "server {name} has clients ({clients}); end them first, or give --force"
            ));
        }
        self.named.retain(|one| one.id != id);
        let owner = |owner: &Owner| owner.named == Some(id);
        self.wanted.retain(|wanted| !owner(wanted));
        self.refuse_clients(
            |waiting| owner(&waiting.owner),
            CUDA_ERROR_MPS_CONNECTION_FAILED,
            &format!("server {name} has been deleted"),
        );
        let processes = self.processes_of(id);
        for server in self.running.iter_mut().filter(|one| one.named == Some(id)) {
            server.stop(true);
        }
        tracing::info!("Server {name} deleted");
        Ok(processes)
    }

    /// Process ids of a named server's clients, in words.
    fn clients_of(&self, id: NamedId) -> String {
        let servers = self.all().filter(|server| server.named == Some(id));
        let clients = servers.flat_map(|server| {
            let coming = server.handed_over.iter().map(|coming| coming.who.pid);
            server.clients().chain(coming)
        });
        let clients: Vec<String> = clients.map(|pid| pid.to_string()).collect();
        clients.join(" ")
    }

    /// Whether a named server may be for this user from now on.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn check_new_user(&self, name: &str, uid: u32) -> Result<(), String> {
        let found = self.created(name)?;
        if found.uid == uid {
            return Ok(());
        }
        self.check_user(uid)?;
        match self.clients_of(found.id) {
            clients if clients.is_empty() => Ok(()),
            clients => Err(format!(
                "server {name} has clients ({clients}), and its user can be changed once they have ended"
            )),
        }
    }

    /// Changes the user of a named server, which [`Servers::check_new_user`] has checked. Its processes end and it starts as
    /// that user; returns their ids.
    pub fn change_user(&mut self, name: &str, uid: u32) -> Vec<i32> {
        let mut named = self.named.iter_mut();
        let found = named.find(|one| one.named.name == name && one.uid != uid);
        let Some(found) = found else {
            return Vec::new();
        };
        let (id, before) = (found.id, std::mem::replace(&mut found.uid, uid));
        self.wanted.retain(|owner| owner.named != Some(id));
        self.refuse_clients(
            |waiting| waiting.owner.named == Some(id),
            CUDA_ERROR_MPS_SERVER_NOT_READY,
            &format!("server {name} serves user {uid} only"),
        );
        let processes = self.processes_of(id);
        for server in self.running.iter_mut().filter(|one| one.named == Some(id)) {
            server.stop(true);
        }
        tracing::info!("Server {name} of user {before} is user {uid}'s from now on");
        self.wanted.push(self.owner_of(id, uid));
        self.advance();
        processes
    }

    /// Changes the limits of a server for clients that connect from now on: of a named server for its later processes too,
    /// of a user's server for this process.
    ///
    /// # Errors
    /// Why that is impossible, in words.
    pub fn set_limits_of(&mut self, name: &str, new: &OwnLimits) -> Result<(), String> {
        let running = self.by_name(name).map(|server| server.pid);
        let defined = self.named.iter_mut().find(|one| one.named.name == name);
        if running.is_none() && defined.is_none() {
            return Err(not_found(name));
        }
        if let Some(defined) = defined {
            defined.merge(new);
        }
        match running {
            Some(pid) => self.change_limits(pid, |limits| new.apply(limits)),
            None => Ok(()),
        }
    }

    /// Whether a server uses a device, which admits one process, that the server of this owner would use too.
    pub(super) fn shares_exclusive(&self, server: &Server, owner: Owner) -> bool {
        let definition = owner.named.and_then(|id| self.definition(id));
        let uses = |device: &DeviceInfo| definition.is_none_or(|one| one.named.has(device));
        let mut devices = server.devices.iter();
        devices.any(|device| device.is_exclusive() && uses(device))
    }

    /// The limits that clients of a named server get now, or get from its next process.
    pub fn limits_of(&self, definition: &Definition) -> Limits {
        let mut running = self.iter().filter(|one| one.named == Some(definition.id));
        let usual = running.find(|one| one.quarantined.is_none() && one.state != State::Stopping);
        match usual {
            Some(server) => server.limits.clone(),
            None => definition.limits(&self.defaults.limits),
        }
    }

    /// The limits that a new server of this owner gets.
    pub(super) fn limits_for_owner(&self, owner: Owner) -> Limits {
        let limits = self.limits_for(owner.uid);
        let Some(id) = owner.named else {
            return limits;
        };
        match self.definition(id) {
            Some(definition) => definition.limits(&limits),
            // It has been deleted, and its processes are ending.
            None => Limits {
                partitions: limits.partitions.map(|_| Partitions::default()),
                ..limits
            },
        }
    }

    /// Whether a server of a dead daemon may have this description. Names concern all users, so a server of an untrusted
    /// user must have none.
    pub(super) fn check_named(
        &self,
        limits: &Limits,
        uid: u32,
        devices: Option<usize>,
    ) -> Result<(), String> {
        let Some(named) = &limits.named else {
            return Ok(());
        };
        if !self.launcher.trusts(uid) {
            return Err("it reports a name, and its user may not give any".to_owned());
        }
        let is_ours = !RESERVED.contains(&named.name.as_str()) && !named.name.starts_with(OF_USERS);
        if !named.is_plausible(devices) || !is_ours {
            return Err("it reports a name or devices that no server has".to_owned());
        }
        if let Some(known) = self.defined(&named.name)
            && (known.uid != uid || known.named.devices != named.devices)
        {
            let name = &named.name;
            return Err(format!(
                "the server {name} has another user or other devices now"
            ));
        }
        match self.defined(&named.name).is_none() && self.named.len() >= MOST_SERVERS {
            true => Err(format!("there are {MOST_SERVERS} named servers already")),
            false => Ok(()),
        }
    }

    /// The named server that a server of a dead daemon belongs to, which is created if there is none of that name.
    pub(super) fn adopt_named(&mut self, limits: &Limits, uid: u32) -> Option<NamedId> {
        let named = limits.named.as_deref()?.clone();
        if let Some(known) = self.defined(&named.name) {
            let id = known.id;
            self.adopt_namespaces(id, &named);
            return Some(id);
        }
        let own = OwnLimits {
            threads: Some(limits.threads),
            priority: Some(limits.priority),
            memory: Some(limits.memory.clone()),
        };
        tracing::info!("Server {} of user {uid} is known again", named.name);
        Some(self.define(named, uid, own))
    }

    /// Removes the sockets and folders of all named servers and namespaces.
    pub fn close_gates(&mut self) {
        for one in &mut self.named {
            one.spaces.iter_mut().for_each(|space| space.gate = None);
            one.gate = None;
        }
    }

    /// Opens the sockets of named servers that were taken over, and of their namespaces.
    pub fn open_gates(&mut self, directory: BorrowedFd<'_>) {
        for one in &mut self.named {
            match one.open_gates(directory) {
                Ok(()) => {}
                Err(why) if !one.is_gate_missed => {
                    tracing::error!("Server {}: {why}", one.named.name);
                    one.is_gate_missed = true;
                }
                Err(_) => {}
            }
        }
    }
}

/// The answer to a command about a server that does not exist.
pub fn not_found(name: &str) -> String {
    format!("Server \"{name}\" not found; server list lists the servers")
}

/// The refusal of a device that a server does not have.
pub fn without_device(server: &str, device: &str) -> String {
    format!("the server {server} has no device {device}")
}

pub(super) fn not_created(name: &str) -> String {
    format!(
        "Server \"{name}\" not found among those that were created; server list lists the servers"
    )
}
