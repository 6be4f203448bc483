//! Room for connections: when descriptors run out, a connection of the user with the most connections is closed.

use super::Daemon;
use crate::logging::limit;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::collections::BTreeMap;

/// Descriptors reserved for other purposes: sockets, logs, servers that run or start.
const KEPT: u64 = 48;

/// Maximum number of connections. A thousand clients may wait at once, one descriptor each.
pub(super) fn most_connections() -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        Ok(hard)
    });
    match limit {
        Ok(limit) => usize::try_from(limit.saturating_sub(KEPT)).unwrap_or(usize::MAX),
        Err(error) => {
            tracing::warn!("Cannot raise the limit of open files: {error}");
            usize::MAX
        }
    }
}

impl Daemon {
    /// Closes connections beyond the maximum number.
    pub(super) fn keep_room(&mut self) {
        while self.peers.len() + self.servers.waiting().count() > self.most_connections
            && self.make_room()
        {}
    }

    /// Closes one connection of the user with the most: the oldest that has sent nothing, or else the oldest that waits
    /// for no answer, or else the most recent waiting client. `false`: there is none.
    pub(super) fn make_room(&mut self) -> bool {
        let mut count = BTreeMap::new();
        let peers = self.peers.values().map(|peer| peer.who.uid);
        for user in peers.chain(self.servers.waiting_users()) {
            *count.entry(user).or_insert(0) += 1;
        }
        let Some((&user, _)) = count.iter().max_by_key(|(_, count)| **count) else {
            return false;
        };
        let asked_by = self.quit.iter().flat_map(|quit| &quit.asked_by);
        let awaiting = self.awaiting.iter().map(|awaiting| &awaiting.by);
        let busy: Vec<u64> = asked_by.chain(awaiting).copied().collect();
        let oldest = self
            .peers
            .iter()
            .filter(|(number, peer)| peer.who.uid == user && !busy.contains(number))
            .min_by_key(|(number, peer)| (peer.silent_until.is_none(), **number))
            .map(|(number, peer)| (*number, peer.who.pid));
        match oldest {
            Some((number, pid)) => {
                let _guard = limit::caused_by_user(user);
                tracing::warn!("Connection of process {pid} of user {user} closed to make room");
                self.forget(number);
                true
            }
            None => self.servers.turn_away(user),
        }
    }
}
