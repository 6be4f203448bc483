//! Static partitions of the devices: made and removed by an operator while a device has no clients.

use super::{Server, Servers, State};
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::limits::Limits;
use mpsshim_model::partitions::{self, Partitions};

/// Answer to commands of a daemon without static partitions.
const OFF: &str = "Static partitioning is off: start the daemon with -S";

impl Servers {
    /// The static partitions.
    ///
    /// # Errors
    /// The daemon was started without them.
    pub fn partitions(&self) -> Result<&Partitions, String> {
        let partitions = self.defaults.limits.partitions.as_ref();
        partitions.ok_or_else(|| OFF.to_owned())
    }

    /// Makes a partition of a device, which the operator may name, and returns the name that clients give.
    ///
    /// # Errors
    /// Why that is impossible, in words; nothing is changed then.
    pub fn add_partition(
        &mut self,
        device: &DeviceInfo,
        chunks: u32,
        named: Option<&str>,
    ) -> Result<String, String> {
        let mut partitions = self.partitions()?.clone();
        self.check_cut(device)?;
        let id = partitions.add(device, chunks)?;
        if let Some(text) = named {
            partitions.set_name(text, &device.uuid, id)?;
        }
        self.set_partitions(partitions)?;
        Ok(partitions::name(&device.uuid, id))
    }

    /// Removes a partition of a device, given by its id or its name.
    ///
    /// # Errors
    /// Why that is impossible, in words; nothing is changed then.
    pub fn remove_partition(&mut self, device: &DeviceInfo, wanted: &str) -> Result<(), String> {
        let mut partitions = self.partitions()?.clone();
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
        self.check_cut(device)?;
        partitions.remove(uuid, id);
        self.set_partitions(partitions)
    }

    /// Whether a server that works has the partitions of a device.
    pub fn has_partitions_of(&self, device: &DeviceInfo) -> bool {
        let has = |server: &Server| {
            server.state == State::Active
                && server.devices.iter().any(|one| one.uuid == device.uuid)
        };
        self.iter().any(has)
    }

    /// Whether a partition of this name has clients; `None`: whether a device has clients without a partition on it.
    pub fn is_in_use(&self, device: &DeviceInfo, partition: Option<&str>) -> bool {
        let sees = |server: &Server| server.devices.iter().any(|one| one.uuid == device.uuid);
        match partition {
            Some(_) => self.clients_in(partition).next().is_some(),
            None => self.all().filter(|server| sees(server)).any(|server| {
                let mut clients = server.sessions();
                clients.any(|(_, client)| !client.is_on(&device.uuid))
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
    fn check_cut(&self, device: &DeviceInfo) -> Result<(), String> {
        let uuid = &device.uuid;
        if self.orphans_until.is_some() {
            return Err(
                "The daemon has just started and waits for servers of the previous one; try again in some seconds"
                    .to_owned(),
            );
        }
        let sees = |server: &&Server| {
            server.devices.is_empty() || server.devices.iter().any(|one| one.uuid == *uuid)
        };
        let clients = self.all().filter(sees).flat_map(|server| {
            let coming = server.handed_over.iter().map(|coming| coming.who.pid);
            server.clients().chain(coming)
        });
        let clients = pids(clients);
        if clients.is_empty() {
            return Ok(());
        }
        Err(format!(
            "Device {uuid} has clients ({clients}): its partitions can be changed once they have ended"
        ))
    }

    /// Tells all servers; none must have clients on the devices concerned.
    fn set_partitions(&mut self, partitions: Partitions) -> Result<(), String> {
        let before = self.defaults.limits.partitions.replace(partitions);
        let told = self.tell_partitions();
        if told.is_err() {
            self.defaults.limits.partitions = before;
            if let Err(why) = self.tell_partitions() {
                tracing::warn!("{why}: it has other partitions than the daemon");
            }
        }
        told
    }

    fn tell_partitions(&mut self) -> Result<(), String> {
        let partitions = &self.defaults.limits.partitions;
        // A server that is ending gets no clients any more.
        let linked = self.running.iter_mut().filter(|one| one.link.is_some());
        linked
            .filter(|server| server.limits.partitions != *partitions)
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
        let own = self.defaults.limits.partitions.as_ref();
        match (own.filter(|own| !own.is_empty()), theirs) {
            (_, Some(theirs)) if !theirs.is_plausible() => {
                Err("it reports partitions that overlap".to_owned())
            }
            (None, Some(_)) if !self.launcher.trusts(uid) => {
                Err("it reports partitions, and its user may not make any".to_owned())
            }
            (Some(own), Some(theirs)) if own != theirs => {
                Err("it reports other partitions than this daemon has".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Adopts the partitions of a server of the previous daemon that is taken over.
    pub(super) fn adopt_partitions(&mut self, limits: &Limits, pid: i32) {
        let theirs = limits.partitions.as_ref().filter(|own| !own.is_empty());
        let (Some(theirs), own) = (theirs, &mut self.defaults.limits.partitions) else {
            return;
        };
        if own.is_none() {
            tracing::info!("Static partitioning is on: server {pid} has partitions");
        }
        *own = Some(theirs.clone());
    }
}

fn pids(clients: impl Iterator<Item = i32>) -> String {
    clients
        .map(|pid| pid.to_string())
        .collect::<Vec<_>>()
        .join(" ")
}
