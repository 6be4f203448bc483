//! Static partitions of the devices: made and removed by an operator while a device has no clients.
//!
//! The servers of users share a table of partitions, and each named server has its own. Ids and names are distinct over all
//! tables, so that no client gets a partition of another server.

use super::named::{OF_USERS, not_found, without_device};
use super::{Definition, NamedId, Server, Servers, State};
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::limits::Limits;
use mpsshim_model::partitions::{self, Partitions, name_is_taken};
use std::collections::BTreeSet;

/// Answer to commands of a daemon without static partitions.
const OFF: &str = "Static partitioning is off: start the daemon with -S";

/// Why a server is not taken over.
const OTHERS: &str = "it reports other partitions than this daemon has";

/// Which table of partitions: `None` that of users' servers, otherwise that of a named server.
pub type Table = Option<NamedId>;

impl Servers {
    /// The static partitions of users' servers.
    ///
    /// # Errors
    /// The daemon was started without them.
    pub fn partitions(&self) -> Result<&Partitions, String> {
        let partitions = self.defaults.limits.partitions.as_ref();
        partitions.ok_or_else(|| OFF.to_owned())
    }

    /// All tables: that of users' servers, then those of the named servers.
    ///
    /// # Errors
    /// The daemon was started without static partitions.
    pub fn tables(
        &self,
    ) -> Result<impl Iterator<Item = (Option<&Definition>, &Partitions)>, String> {
        let own = (None, self.partitions()?);
        let named = self.named.iter().map(|one| (Some(one), &one.partitions));
        Ok(std::iter::once(own).chain(named))
    }

    fn table(&self, of: Table) -> Result<&Partitions, String> {
        let own = self.partitions()?;
        let definition = of.and_then(|id| self.definition(id));
        Ok(definition.map_or(own, |one| &one.partitions))
    }

    /// The table of a server of this name. Servers of users need not run.
    ///
    /// # Errors
    /// There is no such server, in words.
    pub fn table_of(&self, server: &str) -> Result<Table, String> {
        if let Some(found) = self.defined(server) {
            return Ok(Some(found.id));
        }
        let uid = server
            .strip_prefix(OF_USERS)
            .and_then(|uid| uid.parse().ok());
        let has_server =
            |uid: u32| self.launcher.serves(uid) && self.launcher.owner(uid, None).uid == uid;
        match uid.is_some_and(has_server) || self.by_name(server).is_some() {
            true => Ok(None),
            false => Err(not_found(server)),
        }
    }

    /// The partition with this name of the operator's or this visible UUID: table, device and id.
    pub fn find_partition(&self, wanted: &str) -> Option<(Table, &str, u32)> {
        self.tables().ok()?.find_map(|(server, partitions)| {
            let (uuid, id) = partitions.find_named(wanted)?;
            Some((server.map(|one| one.id), uuid, id))
        })
    }

    /// Name of the operator's and number of chunks of each partition that a named server has on a device, sorted.
    pub fn partition_sizes(&self, server: &str, uuid: &str) -> Vec<(Option<&str>, u32)> {
        let found = self.defined(server);
        found.map_or_else(Vec::new, |one| one.partitions.sizes(uuid))
    }

    /// Whether a partition of any table has this id on a device.
    pub fn is_partition(&self, uuid: &str, id: u32) -> bool {
        let mut tables = self.tables().into_iter().flatten();
        tables.any(|(_, partitions)| partitions.has(uuid, id))
    }

    /// Whether a new partition can have this name.
    ///
    /// # Errors
    /// Another partition has this name, in words.
    pub fn check_new_partition(&self, name: &str) -> Result<(), String> {
        let mut tables = self.tables()?;
        match tables.any(|(_, partitions)| partitions.has_name(name)) {
            true => Err(name_is_taken(name)),
            false => Ok(()),
        }
    }

    /// Makes a partition of a device, which the operator may name, and returns the name that clients give.
    ///
    /// # Errors
    /// Why that is impossible, in words; nothing is changed then.
    pub fn add_partition(
        &mut self,
        of: Table,
        (device, chunks): (&DeviceInfo, u32),
        named: Option<&str>,
    ) -> Result<String, String> {
        let mut partitions = self.table(of)?.clone();
        let uuid = &device.uuid;
        let server = of.and_then(|id| self.definition(id));
        if let Some(server) = server.filter(|server| !server.named.has(device)) {
            return Err(without_device(&server.named.name, uuid));
        }
        self.check_cut(of, device)?;
        let id = partitions.add(device, chunks, |id| self.is_partition(uuid, id))?;
        if let Some(text) = named {
            partitions.set_name(text, uuid, id)?;
            self.check_new_partition(text)?;
        }
        self.set_partitions(of, partitions)?;
        Ok(partitions::name(uuid, id))
    }

    /// Removes a partition of a device, given by its id or its name.
    ///
    /// # Errors
    /// Why that is impossible, in words; nothing is changed then.
    pub fn remove_partition(
        &mut self,
        of: Table,
        device: &DeviceInfo,
        wanted: &str,
    ) -> Result<(), String> {
        let mut partitions = self.table(of)?.clone();
        let uuid = &device.uuid;
        let is_it = |id: u32| {
            let name = partitions::name(uuid, id);
            id.to_string() == wanted || name.eq_ignore_ascii_case(wanted)
        };
        let found = partitions.of(uuid).find(|(id, _)| is_it(*id));
        let Some((id, _)) = found else {
            return Err(format!(
                "Partition {wanted} of device {uuid} not found; lspart lists the partitions"
            ));
        };
        let name = partitions::name(uuid, id);
        let users = pids(self.clients_in(Some(&name)).map(|(_, pid)| pid));
        if !users.is_empty() {
            return Err(format!("Partition {name} is in use by clients {users}"));
        }
        self.check_cut(of, device)?;
        partitions.remove(uuid, id);
        self.set_partitions(of, partitions)
    }

    /// Whether a server that works has the partitions of a device.
    pub fn has_partitions_of(&self, server: Option<&Definition>, device: &DeviceInfo) -> bool {
        let of = server.map(|one| one.id);
        let has = |server: &Server| {
            server.named == of && server.state == State::Active && server.has_device(&device.uuid)
        };
        self.iter().any(has)
    }

    /// Whether a partition of this name has clients; `None`: whether a device has clients of users' servers without a
    /// partition on it.
    pub fn is_in_use(&self, device: &DeviceInfo, partition: Option<&str>) -> bool {
        let uuid = &device.uuid;
        let sees = |server: &&Server| server.named.is_none() && server.has_device(uuid);
        match partition {
            Some(_) => self.clients_in(partition).next().is_some(),
            None => self.all().filter(sees).any(|server| {
                let mut clients = server.sessions();
                clients.any(|(_, client)| !client.is_on(uuid))
            }),
        }
    }

    /// Clients in the partition of this name, with their sessions.
    fn clients_in(&self, partition: Option<&str>) -> impl Iterator<Item = (u64, i32)> {
        let sessions = self.all().flat_map(Server::sessions);
        let sessions = sessions.filter(move |(_, client)| client.partition.as_deref() == partition);
        sessions.map(|(session, client)| (session, client.pid))
    }

    /// Clients may use each device of their server until they end.
    fn check_cut(&self, of: Table, device: &DeviceInfo) -> Result<(), String> {
        let uuid = &device.uuid;
        if self.orphans_until.is_some() {
            return Err(
                "The daemon has just started and waits for servers of the previous one; try again in some seconds"
                    .to_owned(),
            );
        }
        let sees = |server: &&Server| {
            server.named == of && (server.devices.is_empty() || server.has_device(uuid))
        };
        let clients = self.all().filter(sees).flat_map(|server| {
            let coming = server.handed_over.iter().map(|coming| coming.who.pid);
            let restored = server.to_restore().iter().copied();
            server.clients().chain(coming).chain(restored)
        });
        let clients = pids(clients);
        if clients.is_empty() {
            return Ok(());
        }
        Err(format!(
            "Device {uuid} has clients ({clients}): its partitions can be changed once they have ended"
        ))
    }

    /// Replaces a table; returns the previous one.
    fn replace_table(&mut self, of: Table, partitions: Partitions) -> Partitions {
        let table = match of {
            None => self.defaults.limits.partitions.as_mut(),
            Some(id) => {
                let mut named = self.named.iter_mut();
                named
                    .find(|one| one.id == id)
                    .map(|one| &mut one.partitions)
            }
        };
        table.map_or_else(Partitions::default, |table| {
            std::mem::replace(table, partitions)
        })
    }

    /// Tells all servers concerned; none must have clients on the devices concerned.
    fn set_partitions(&mut self, of: Table, partitions: Partitions) -> Result<(), String> {
        let before = self.replace_table(of, partitions);
        let told = self.tell_partitions(of);
        if told.is_err() {
            self.replace_table(of, before);
            if let Err(why) = self.tell_partitions(of) {
                tracing::warn!("{why}: it has other partitions than the daemon");
            }
        }
        told
    }

    fn tell_partitions(&mut self, of: Table) -> Result<(), String> {
        let partitions = Some(self.table(of)?.clone());
        // A server that is ending gets no clients any more.
        let linked = self.running.iter_mut().filter(|one| one.link.is_some());
        linked
            .filter(|server| server.named == of && server.limits.partitions != partitions)
            .try_for_each(|server| {
                let limits = Limits {
                    partitions: partitions.clone(),
                    ..server.limits.clone()
                };
                server.order_limits(limits)
            })
    }

    /// Whether a server of the previous daemon with these limits can be taken over. Partitions concern all users, so those
    /// that the server of an untrusted user reports must be known already.
    pub(super) fn check_partitions(&self, limits: &Limits, uid: u32) -> Result<(), String> {
        let theirs = limits.partitions.as_ref().filter(|own| !own.is_empty());
        if theirs.is_some_and(|theirs| !theirs.is_plausible()) {
            return Err("it reports partitions that overlap".to_owned());
        }
        let known = limits
            .named
            .as_ref()
            .and_then(|named| self.defined(&named.name));
        match &limits.named {
            None => self.check_table_of_users(theirs, uid)?,
            Some(_) => self.check_table_of_named(theirs, known)?,
        }
        theirs.map_or(Ok(()), |theirs| {
            self.check_others(theirs, limits.named.is_some(), known)
        })
    }

    fn check_table_of_users(&self, theirs: Option<&Partitions>, uid: u32) -> Result<(), String> {
        let own = self.defaults.limits.partitions.as_ref();
        match (own.filter(|own| !own.is_empty()), theirs) {
            (None, Some(_)) if !self.launcher.trusts(uid) => {
                Err("it reports partitions, and its user may not make any".to_owned())
            }
            (Some(own), Some(theirs)) if own != theirs => Err(OTHERS.to_owned()),
            _ => Ok(()),
        }
    }

    fn check_table_of_named(
        &self,
        theirs: Option<&Partitions>,
        known: Option<&Definition>,
    ) -> Result<(), String> {
        let none = Partitions::default();
        let theirs = theirs.unwrap_or(&none);
        let may_have = |one: &Definition| {
            let own = &one.partitions;
            let is_free = own.is_empty() && !self.has_process(one);
            own == theirs || is_free || self.is_provisional(one) && own.is_alike(theirs)
        };
        match known.is_none_or(may_have) {
            true => Ok(()),
            false => Err(OTHERS.to_owned()),
        }
    }

    /// Whether no other table has one of these partitions. `known`: the named server whose table this is, if it exists.
    fn check_others(
        &self,
        theirs: &Partitions,
        is_named: bool,
        known: Option<&Definition>,
    ) -> Result<(), String> {
        let is_shared = |other: &Definition| {
            let is_other = known.is_none_or(|known| known.id != other.id);
            let shares_ids = !self.is_provisional(other) && theirs.shares_ids(&other.partitions);
            is_other && (shares_ids || theirs.shares_names(&other.partitions))
        };
        let of_users = self.defaults.limits.partitions.as_ref();
        let of_users = of_users
            .filter(|_| is_named)
            .is_some_and(|own| theirs.shares_ids(own) || theirs.shares_names(own));
        match of_users || self.named.iter().any(is_shared) {
            true => Err("it reports partitions that another server has".to_owned()),
            false => Ok(()),
        }
    }

    /// Whether the ids of a named server's partitions may still change: a file has created it while servers of the previous
    /// daemon are awaited, and no process has been told them.
    fn is_provisional(&self, server: &Definition) -> bool {
        self.orphans_until.is_some() && !self.has_process(server)
    }

    fn has_process(&self, server: &Definition) -> bool {
        self.all().any(|one| one.named == Some(server.id))
    }

    /// Adopts the partitions of a server of the previous daemon that is taken over, which
    /// [`Servers::check_partitions`] has checked. `of`: the table.
    pub(super) fn adopt_partitions(&mut self, limits: &Limits, (pid, of): (i32, Table)) {
        let theirs = limits.partitions.as_ref().filter(|own| !own.is_empty());
        let Some(theirs) = theirs else {
            return;
        };
        if self.defaults.limits.partitions.is_none() {
            tracing::info!("Static partitioning is on: server {pid} has partitions");
            self.defaults.limits.partitions = Some(Partitions::default());
        }
        self.replace_table(of, theirs.clone());
        self.renumber_others(theirs, of);
    }

    /// Gives other ids to the partitions of named servers without processes that have the ids of these.
    fn renumber_others(&mut self, theirs: &Partitions, of: Table) {
        for at in 0..self.named.len() {
            let one = &self.named[at];
            if Some(one.id) == of || !theirs.shares_ids(&one.partitions) {
                continue;
            }
            let (id, mut own) = (one.id, one.partitions.clone());
            let others = self.tables().into_iter().flatten();
            let others = others.filter(|(one, _)| one.is_none_or(|one| one.id != id));
            let others: Vec<&Partitions> = others.map(|(_, partitions)| partitions).collect();
            own.renumber(|uuid, id| others.iter().any(|other| other.has(uuid, id)));
            self.named[at].partitions = own;
        }
    }
}

impl Server {
    fn has_device(&self, uuid: &str) -> bool {
        self.devices.iter().any(|one| one.uuid == uuid)
    }
}

/// Process ids in words, each once.
fn pids(clients: impl Iterator<Item = i32>) -> String {
    let mut known = BTreeSet::new();
    clients
        .filter(|pid| known.insert(*pid))
        .map(|pid| pid.to_string())
        .collect::<Vec<_>>()
        .join(" ")
}
