//! The limits of servers: those they start with, and changes of running ones.

use super::{Server, Servers};
use crate::usage::Report;
use crate::user_memory;
use mpsshim_model::device::{self, DeviceInfo};
use mpsshim_model::limits::Limits;

impl Servers {
    /// What servers start with from now on.
    pub fn default_limits(&self) -> &Limits {
        &self.defaults.limits
    }

    /// Changes what servers start with from now on.
    pub fn change_defaults(&mut self, change: impl FnOnce(&mut Limits)) {
        change(&mut self.defaults.limits);
    }

    /// Changes what a server's clients may have that come from now on.
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

    /// Sets what all clients of a user together may have of a device, `None`: no limit, at every server.
    ///
    /// # Errors
    /// There are too many such limits; nothing is changed then.
    pub fn set_user_limit(
        &mut self,
        uid: u32,
        device: usize,
        bytes: Option<u64>,
    ) -> Result<(), String> {
        user_memory::set_limit(&mut self.defaults.limits, uid, device, bytes)?;
        self.tell_user_limits();
        Ok(())
    }

    /// What a server of this user starts with: a trusted user's is told everyone's limits, another one its own user's.
    pub(super) fn limits_for(&self, uid: u32) -> Limits {
        if self.launcher.trusts(uid) {
            self.defaults.limits.clone()
        } else {
            self.defaults.limits.of_user(uid)
        }
    }

    fn tell_user_limits(&mut self) {
        for index in 0..self.running.len() {
            let user_memory = self.limits_for(self.running[index].uid).user_memory;
            let server = &mut self.running[index];
            let limits = Limits {
                user_memory,
                ..server.limits.clone()
            };
            if limits != server.limits
                && let Err(why) = server.order_limits(limits)
            {
                tracing::warn!("{why}: it keeps to the limits of users that it had");
            }
        }
    }

    /// Takes over what the daemon before this one had set for users, where nothing was set since. The limits are those of
    /// an introduction that was checked.
    pub(super) fn adopt_user_limits(&mut self, limits: &Limits) {
        for (uid, devices) in &limits.user_memory {
            for (device, bytes) in devices {
                let known = &self.defaults.limits.user_memory;
                if known
                    .get(uid)
                    .is_some_and(|known| known.contains_key(device))
                {
                    continue;
                }
                let own = &mut self.defaults.limits;
                if let Err(why) = user_memory::set_limit(own, *uid, *device, Some(*bytes)) {
                    tracing::warn!("A limit of user {uid} is ignored: {why}");
                }
            }
        }
        self.tell_user_limits();
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

    /// Asks a server what its clients have; `false`: it will not say.
    pub fn ask_usage(&self, pid: i32, question: u64) -> bool {
        let link = self.by_pid(pid).and_then(|server| server.link.as_ref());
        link.is_some_and(|link| link.ask_usage(question).is_ok())
    }

    /// What servers have said to such questions since this was called last.
    pub fn take_usage(&mut self) -> Vec<Report> {
        self.running
            .iter_mut()
            .flat_map(|server| server.usage.drain(..))
            .collect()
    }

    /// A server has said what its devices are. A trusted user's is believed; any other only for its own clients.
    pub(super) fn learn_devices_of(&mut self, pid: i32, devices: &[DeviceInfo]) {
        let Some(server) = self.running.iter_mut().find(|server| server.pid == pid) else {
            return;
        };
        if self.launcher.trusts(server.uid) {
            return self.learn_devices(devices);
        }
        if std::mem::replace(&mut server.knows_uuids, true) {
            return;
        }
        let mut limits = server.limits.clone();
        for (uuid, bytes) in &self.defaults.by_uuid {
            if let Ok(ordinal) = device::find(devices, uuid) {
                limits.memory.entry(ordinal).or_insert(*bytes);
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
        for (uuid, bytes) in self.defaults.by_uuid.split_off(0) {
            let ordinal = match device::find(devices, &uuid) {
                Ok(ordinal) => ordinal,
                Err(why) => {
                    // It was looked for when the daemon started, and not found because nothing was.
                    tracing::error!("A device memory limit matches no device: {why}");
                    continue;
                }
            };
            self.defaults.limits.memory.entry(ordinal).or_insert(bytes);
            for server in &mut self.running {
                let mut limits = server.limits.clone();
                limits.memory.entry(ordinal).or_insert(bytes);
                if let Err(why) = server.order_limits(limits) {
                    tracing::warn!("{why}");
                }
            }
        }
    }
}

impl Server {
    /// Makes the server log a query of the devices, as NVIDIA's does.
    pub fn log_device_query(&self) {
        // A server that is ending, or has no room for this, has more important things to note.
        let _ = self.link.as_ref().map(|link| link.tell_device_query());
    }

    pub(super) fn order_limits(&mut self, limits: Limits) -> Result<(), String> {
        let pid = self.pid;
        let link = self.link.as_ref();
        let link = link.ok_or_else(|| format!("Server {pid} is ending"))?;
        link.order_limits(&limits)
            .map_err(|error| format!("Server {pid}: {error}"))?;
        self.limits = limits;
        Ok(())
    }
}
