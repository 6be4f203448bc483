//! Servers of several users at the same time.
//!
//! Each holds a context on every device, so a server without clients ends after a while if another user's server runs.

use super::{Server, Servers, State};
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::policy::Users;
use std::time::{Duration, Instant};

/// How long a server without clients stays beside another user's.
pub(super) const IDLE_LIMIT: Duration = Duration::from_secs(60);

/// A server, and whether it has clients.
#[derive(Clone, Copy, Debug)]
struct Rested {
    pid: i32,
    uid: u32,
    /// `None`: it has clients, or does not work.
    idle_since: Option<Instant>,
}

impl Rested {
    fn of(server: &Server) -> Rested {
        Rested {
            pid: server.pid,
            uid: server.uid,
            idle_since: server.idle_since,
        }
    }

    /// When it ends beside another user's server.
    fn ends_at(&self) -> Option<Instant> {
        self.idle_since.map(|since| since + IDLE_LIMIT)
    }
}

/// Whether another user has a server.
fn has_other(servers: &[Rested], uid: u32) -> bool {
    servers.iter().any(|other| other.uid != uid)
}

/// When the next server ends; `None`: none does.
fn next_end(servers: &[Rested]) -> Option<Instant> {
    let beside = servers.iter().filter(|one| has_other(servers, one.uid));
    beside.filter_map(Rested::ends_at).min()
}

/// Removes the servers that have been idle for too long and returns their process ids, the longest idle first. The last
/// user's server stays.
fn take_overdue(servers: &mut Vec<Rested>, now: Instant) -> Vec<i32> {
    let mut over = Vec::new();
    servers.sort_by_key(|server| server.idle_since);
    while let Some(at) = servers.iter().position(|server| {
        has_other(servers, server.uid) && server.ends_at().is_some_and(|at| at <= now)
    }) {
        over.push(servers.remove(at).pid);
    }
    over
}

impl Servers {
    /// Whether each user has a server of its own at the same time as the others.
    pub(super) fn users_are_apart(&self) -> bool {
        self.launcher.users() == Users::Apart
    }

    /// Why a server of this user that has failed to start cannot work beside the others, in words: a device is no longer in
    /// DEFAULT mode, as it was when the daemon started.
    pub(super) fn cannot_be_apart(&self, uid: u32) -> Option<String> {
        let mut others = self.iter().filter(|server| server.uid != uid);
        let server = others.find(|server| self.users_are_apart() && server.is_exclusive())?;
        let device = server.devices.iter().position(DeviceInfo::is_exclusive)?;
        Some(format!(
            "device {device} is in {} mode, in which it admits one server, and server {} of another user works there; set \
             DEFAULT mode (nvidia-smi -c DEFAULT), or start the daemon with --users serial or together",
            server.devices[device].compute_mode, server.pid
        ))
    }

    /// Notes which servers have no clients.
    pub(super) fn note_idle(&mut self, now: Instant) {
        if !self.users_are_apart() {
            return;
        }
        for server in &mut self.running {
            server.idle_since = match server.state == State::Active && server.is_idle() {
                true => server.idle_since.or(Some(now)),
                false => None,
            };
        }
    }

    /// The servers that count: neither standbys nor named or ending servers.
    fn rested(&self) -> Vec<Rested> {
        let counts = |server: &&Server| {
            server.named.is_none() && !matches!(server.state, State::Stopping | State::Fault)
        };
        self.iter().filter(counts).map(Rested::of).collect()
    }

    /// When [`Servers::end_idle`] has something to do next.
    pub(super) fn idle_deadline(&self) -> Option<Instant> {
        match self.users_are_apart() {
            true => next_end(&self.rested()),
            false => None,
        }
    }

    /// Ends servers that have been without clients for too long beside those of other users.
    pub(super) fn end_idle(&mut self, now: Instant) {
        if !self.users_are_apart() {
            return;
        }
        self.note_idle(now);
        for pid in take_overdue(&mut self.rested(), now) {
            let Some(server) = self.by_pid_mut(pid) else {
                continue;
            };
            tracing::info!(
                "Shutting down server {pid} of user {}, which has had no clients for {} s",
                server.uid,
                IDLE_LIMIT.as_secs()
            );
            server.stop(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_server_ends_beside_another_user_s_and_the_last_stays() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let server = |pid, uid, idle_since: Option<u64>| Rested {
            pid,
            uid,
            idle_since: idle_since.map(at),
        };
        // Alone, or beside a server of the same user.
        let mut own = vec![server(1, 7, Some(0)), server(2, 7, None)];
        assert_eq!(next_end(&own), None);
        assert_eq!(take_overdue(&mut own, at(1000)), [0; 0]);
        let busy = server(3, 8, None);
        let mut both = vec![server(1, 7, Some(5)), busy];
        assert_eq!(next_end(&both), Some(at(65)));
        assert_eq!(take_overdue(&mut both, at(64)), [0; 0]);
        assert_eq!(take_overdue(&mut both, at(65)), [1]);
        assert_eq!(next_end(&both), None);
        // All idle: the server that has been idle for the shortest time stays.
        let idle = |pid, uid, since| server(pid, uid, Some(since));
        let mut all = vec![idle(1, 7, 20), idle(2, 8, 0), idle(3, 9, 10)];
        assert_eq!(next_end(&all), Some(at(60)));
        assert_eq!(take_overdue(&mut all, at(60)), [2]);
        assert_eq!(take_overdue(&mut all, at(1000)), [3]);
        assert_eq!(next_end(&all), None);
    }
}
