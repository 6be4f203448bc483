//! The limits of servers: the defaults at their start, and changes while they run.

use super::{Server, Servers};
use crate::usage::Report;
use crate::user_memory;
use mpsshim_model::device::{self, DeviceInfo};
use mpsshim_model::limits::{Limits, MemoryBound};
use mpsshim_model::policy::{ByUser, Oversubscription, Scheduling};
use std::collections::BTreeMap;
use std::fmt;

impl Servers {
    /// Default limits of new servers.
    pub fn default_limits(&self) -> &Limits {
        &self.defaults.limits
    }

    /// Changes the default limits of new servers.
    pub fn change_defaults(&mut self, change: impl FnOnce(&mut Limits)) {
        change(&mut self.defaults.limits);
    }

    /// Changes a server's limits for future clients.
    ///
    /// # Errors
    /// Why that is impossible, in words; nothing is changed then.
    pub fn change_limits(
        &mut self,
        pid: i32,
        change: impl FnOnce(&mut Limits),
    ) -> Result<(), String> {
        let server = self.by_pid_mut(pid);
        let server = server.ok_or_else(|| format!("Server {pid} not found"))?;
        let mut limits = server.limits.clone();
        change(&mut limits);
        server.order_limits(limits)
    }

    /// Limits the device memory of all clients of a user together, or guarantees each of them some, at every server.
    /// `None`: neither.
    ///
    /// # Errors
    /// There are too many of these; nothing is changed then.
    pub fn set_user_memory(
        &mut self,
        bound: MemoryBound,
        uid: u32,
        device: usize,
        bytes: Option<u64>,
    ) -> Result<(), String> {
        user_memory::set_bound(&mut self.defaults.limits, bound, uid, device, bytes)?;
        self.tell_policies();
        Ok(())
    }

    /// Sets the scheduling of all users without one of their own, at every server.
    pub fn set_scheduling(&mut self, scheduling: Scheduling) {
        self.defaults.limits.scheduling.default = scheduling;
        self.defaults.scheduling_is_set = true;
        self.tell_policies();
    }

    /// Sets the scheduling of a user's clients, at every server. `None`: the user has none of its own any more.
    ///
    /// # Errors
    /// Too many users have one of their own; nothing is changed then.
    pub fn set_user_scheduling(
        &mut self,
        uid: u32,
        scheduling: Option<Scheduling>,
    ) -> Result<(), String> {
        let policy = &mut self.defaults.limits.scheduling;
        let set = policy.set_user(uid, scheduling);
        set.map_err(|error| error.to_string())?;
        self.tell_policies();
        Ok(())
    }

    /// Sets the oversubscription of all users without one of their own, at every server.
    pub fn set_oversubscription(&mut self, oversubscription: Oversubscription) {
        self.defaults.limits.oversubscription.default = oversubscription;
        self.defaults.oversubscription_is_set = true;
        self.tell_policies();
    }

    /// Sets the oversubscription of a user's clients, at every server. `None`: the user has none of its own any more.
    ///
    /// # Errors
    /// Too many users have one of their own; nothing is changed then.
    pub fn set_user_oversubscription(
        &mut self,
        uid: u32,
        oversubscription: Option<Oversubscription>,
    ) -> Result<(), String> {
        let policy = &mut self.defaults.limits.oversubscription;
        let set = policy.set_user(uid, oversubscription);
        set.map_err(|error| error.to_string())?;
        self.tell_policies();
        Ok(())
    }

    /// The limits that a new server of this user gets: for a trusted user those of all users, otherwise only its own
    /// user's.
    pub(super) fn limits_for(&self, uid: u32) -> Limits {
        if self.launcher.trusts(uid) {
            self.defaults.limits.clone()
        } else {
            self.defaults.limits.of_user(uid)
        }
    }

    /// Tells the servers the limits and guarantees of users, the scheduling and the static partitions.
    pub(super) fn tell_policies(&mut self) {
        for index in 0..self.running.len() {
            let Limits {
                user_memory,
                user_guarantee,
                scheduling,
                oversubscription,
                user_weights,
                partitions,
                ..
            } = self.limits_for_owner(self.running[index].owner());
            let server = &mut self.running[index];
            let limits = Limits {
                user_memory,
                user_guarantee,
                scheduling,
                oversubscription,
                user_weights,
                partitions,
                ..server.limits.clone()
            };
            if limits != server.limits
                && let Err(why) = server.order_limits(limits)
            {
                tracing::warn!(
                    "{why}: it keeps to the limits of users, the policies and the partitions that it had"
                );
            }
        }
    }

    /// Adopts the limits and guarantees of users and the scheduling set at the previous daemon, except where they have been set since.
    /// `limits` must come from an introduction of this user's server that has been checked.
    pub(super) fn adopt_policies(&mut self, limits: &Limits, uid: u32) {
        let at_daemon = limits
            .named
            .as_ref()
            .map(|named| named.limits_at_daemon(limits));
        let limits = at_daemon.as_ref().unwrap_or(limits);
        for bound in MemoryBound::ALL {
            self.adopt_user_memory(bound, limits.user_memory_of(bound));
        }
        let trusted = self.launcher.trusts(uid);
        let own = &mut self.defaults.limits.scheduling;
        let is_set = &mut self.defaults.scheduling_is_set;
        adopt_policy(
            "scheduling",
            (own, is_set),
            &limits.scheduling,
            (uid, trusted),
        );
        let own = &mut self.defaults.limits.oversubscription;
        let is_set = &mut self.defaults.oversubscription_is_set;
        adopt_policy(
            "oversubscription",
            (own, is_set),
            &limits.oversubscription,
            (uid, trusted),
        );
        let own = &mut self.defaults.limits.user_weights;
        // The default is the same for all daemons.
        let before = (&mut *own, &mut true);
        adopt_policy("weight", before, &limits.user_weights, (uid, trusted));
        self.tell_policies();
    }

    fn adopt_user_memory(
        &mut self,
        bound: MemoryBound,
        users: &BTreeMap<u32, BTreeMap<usize, u64>>,
    ) {
        let own = &mut self.defaults.limits;
        for (uid, devices) in users {
            for (device, bytes) in devices {
                let known = own.user_memory_of(bound).get(uid);
                if known.is_some_and(|known| known.contains_key(device)) {
                    continue;
                }
                if let Err(why) = user_memory::set_bound(own, bound, *uid, *device, Some(*bytes)) {
                    tracing::warn!("A {bound} of user {uid} is ignored: {why}");
                }
            }
        }
    }

    /// Gives all sessions of a client process a weight.
    ///
    /// # Errors
    /// Why that is impossible, in words.
    pub fn set_weight(&self, pid: i32, client: i32, weight: u32) -> Result<(), String> {
        let (link, sessions) = self.sessions_of(pid, client)?;
        for session in sessions {
            link.order_weight(session, weight)
                .map_err(|error| format!("Server {pid}: {error}"))?;
        }
        Ok(())
    }

    /// Queries the clients' usage of a server; `false`: the query could not be sent.
    pub fn ask_usage(&self, pid: i32, question: u64) -> bool {
        let link = self.by_pid(pid).and_then(|server| server.link.as_ref());
        link.is_some_and(|link| link.ask_usage(question).is_ok())
    }

    /// Takes the usage reports received since the last call.
    pub fn take_usage(&mut self) -> Vec<Report> {
        let running = self.running.iter_mut();
        let mut reports = running.flat_map(|server| server.usage.drain(..)).collect();
        self.hear_left(&mut reports);
        reports
    }

    /// A server has reported its devices. A trusted user's report applies to all servers, any other only to the server
    /// itself.
    pub(super) fn learn_devices_of(&mut self, pid: i32, devices: &[DeviceInfo]) {
        let Some(server) = self.running.iter_mut().find(|server| server.pid == pid) else {
            return;
        };
        if self.launcher.trusts(server.uid) && server.named.is_none() {
            return self.learn_devices(devices);
        }
        if std::mem::replace(&mut server.knows_uuids, true) {
            return;
        }
        let mut limits = server.limits.clone();
        for (bound, uuid, bytes) in &self.defaults.by_uuid {
            if let Ok(ordinal) = device::find(devices, uuid) {
                let memory = limits.memory_of_mut(*bound);
                memory.entry(ordinal).or_insert(*bytes);
            }
        }
        if limits != server.limits
            && let Err(why) = server.order_limits(limits)
        {
            tracing::warn!("{why}");
        }
    }

    /// The devices are known: limits of the environment that name one by its UUID come into force, before any client
    /// is handed over.
    pub fn learn_devices(&mut self, devices: &[DeviceInfo]) {
        for (bound, uuid, bytes) in self.defaults.by_uuid.split_off(0) {
            let ordinal = match device::find(devices, &uuid) {
                Ok(ordinal) => ordinal,
                Err(why) => {
                    // The lookup at the daemon's start did not report this mistake, since it found no devices at all.
                    tracing::error!("A device memory {bound} matches no device: {why}");
                    continue;
                }
            };
            let memory = self.defaults.limits.memory_of_mut(bound);
            memory.entry(ordinal).or_insert(bytes);
            for server in &mut self.running {
                let Some(own) = server.own_ordinal(ordinal) else {
                    continue;
                };
                let mut limits = server.limits.clone();
                let memory = limits.memory_of_mut(bound);
                memory.entry(own).or_insert(bytes);
                if let Err(why) = server.order_limits(limits) {
                    tracing::warn!("{why}");
                }
            }
        }
    }
}

impl Server {
    /// The server's ordinal of a device of the daemon, if the server has it.
    pub fn own_ordinal(&self, ordinal: usize) -> Option<usize> {
        match &self.limits.named {
            Some(named) => named.own_ordinal(ordinal),
            None => Some(ordinal),
        }
    }

    /// The daemon's ordinal of a device of the server.
    pub fn ordinal(&self, own: usize) -> usize {
        let named = self.limits.named.as_ref();
        let ordinal = named.and_then(|named| named.ordinal(own));
        ordinal.unwrap_or(own)
    }

    /// Makes the server log a query of the devices, as NVIDIA's does.
    pub fn log_device_query(&self) {
        // Errors are ignored: a server that is ending or has no room in its link has more important messages to handle.
        let _ = self.link.as_ref().map(|link| link.tell_device_query());
    }

    pub(super) fn order_limits(&mut self, limits: Limits) -> Result<(), String> {
        let pid = self.pid;
        let link = self.link.as_ref();
        let link = link.ok_or_else(|| format!("Server {pid} is ending"))?;
        link.order_limits(&limits)
            .map_err(|error| format!("Server {pid}: {error}"))?;
        self.limits = limits;
        self.limits_pending = false;
        Ok(())
    }
}

/// Adopts a policy of the previous daemon, except where it has been set since. It comes from a server of this user, which
/// may be trusted.
fn adopt_policy<T: Copy + PartialEq + fmt::Display>(
    name: &str,
    (own, is_set): (&mut ByUser<T>, &mut bool),
    before: &ByUser<T>,
    (uid, trusted): (u32, bool),
) {
    let mut users = before.users.clone();
    if !*is_set {
        if trusted {
            own.default = before.default;
            *is_set = true;
        } else if before.default != own.default {
            // Its report is believed for its own user only.
            users.entry(uid).or_insert(before.default);
        }
    }
    for (uid, choice) in &users {
        if !own.users.contains_key(uid)
            && let Err(why) = own.set_user(*uid, Some(*choice))
        {
            tracing::warn!("The {name} \"{choice}\" of user {uid} is ignored: {why}");
        }
    }
}
