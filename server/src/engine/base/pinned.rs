//! Pinned host memory of each user at this server, and its bound. The server's process holds all of it: without a bound
//! the kernel would end the server, with all its clients, where natively it would end one program.
//!
//! Each object that holds pinned memory keeps a [`Pin`] until the driver has unregistered the memory, so that memory
//! without a session counts too.

use crate::engine::base::machine;
use mpsshim_model::amount;
use mpsshim_model::host_memory::HostMemory;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Part of a user's bound that one session may keep after freeing it, to use it again.
const PART_KEPT: u64 = 16;

/// The users' pinned host memory.
#[derive(Debug)]
pub struct Pinned {
    bounds: HostMemory,
    /// Bytes of which the bounds are percentages.
    memory: u64,
    users: Mutex<HashMap<u32, Arc<User>>>,
    /// Bytes counted whose pages do not exist yet.
    unpopulated: Arc<AtomicU64>,
}

#[derive(Debug)]
struct User {
    uid: u32,
    most: u64,
    bytes: AtomicU64,
    /// Bytes of these that no session uses, and that are reused or unregistered.
    idle: AtomicU64,
}

/// Counts pinned memory of a user for as long as it lives. Keep it in the object that represents the memory.
#[derive(Debug)]
#[must_use = "memory is counted as long as this lives"]
pub struct Pin {
    user: Arc<User>,
    bytes: u64,
    idle: bool,
}

/// A user would have more than its bound.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the clients of user {uid} have {} of pinned host memory and ask for {} more; they may have {} (MPSSHIM_HOST_MEMORY)",
    amount::print(*.held), amount::print(*.wanted), amount::print(*.most)
)]
pub struct Beyond {
    uid: u32,
    held: u64,
    wanted: u64,
    most: u64,
    /// Whether there is room once memory without a session is unregistered.
    pub is_temporary: bool,
}

impl Pinned {
    /// Nothing is pinned yet. The bounds hold for the memory that the machine has now.
    pub fn new(bounds: HostMemory) -> Pinned {
        let memory = machine::Memory::read().total.unwrap_or(u64::MAX);
        Pinned::of(bounds, memory)
    }

    fn of(bounds: HostMemory, memory: u64) -> Pinned {
        Pinned {
            bounds,
            memory,
            users: Mutex::default(),
            unpopulated: Arc::default(),
        }
    }

    fn user(&self, uid: u32) -> Arc<User> {
        let mut users = self.users.lock();
        if let Some(user) = users.get(&uid) {
            return user.clone();
        }
        users.retain(|_, user| Arc::strong_count(user) > 1);
        let user = Arc::new(User {
            uid,
            most: self.bounds.of(uid).of(self.memory),
            bytes: AtomicU64::new(0),
            idle: AtomicU64::new(0),
        });
        users.insert(uid, user.clone());
        user
    }

    /// Counts memory that is about to be pinned.
    ///
    /// # Errors
    /// [`Beyond`] the user's bound; then nothing is counted.
    pub fn take(&self, uid: u32, bytes: u64) -> Result<Pin, Beyond> {
        let mut pin = self.add(uid, 0);
        pin.resize(bytes)?;
        Ok(pin)
    }

    /// Counts memory regardless of the bound: it is pinned already, or small and bounded otherwise.
    pub fn add(&self, uid: u32, bytes: u64) -> Pin {
        let user = self.user(uid);
        user.bytes.fetch_add(bytes, Ordering::Relaxed);
        Pin {
            user,
            bytes,
            idle: false,
        }
    }

    /// Bytes that the user's clients have.
    #[cfg(test)]
    pub fn held(&self, uid: u32) -> u64 {
        self.user(uid).bytes.load(Ordering::Relaxed)
    }

    /// Most bytes that a session of the user may keep after freeing them.
    pub fn most_kept(&self, uid: u32) -> u64 {
        self.user(uid).most / PART_KEPT
    }

    /// Reserves memory of the machine for pages that are to be populated: `None` if the machine cannot spare it beside
    /// the pages that are being populated already.
    pub fn reserve(&self, bytes: u64) -> Option<Unpopulated> {
        let reserved = Unpopulated {
            all: self.unpopulated.clone(),
            bytes,
        };
        let before = self.unpopulated.fetch_add(bytes, Ordering::Relaxed);
        is_affordable(before.saturating_add(bytes)).then_some(reserved)
    }
}

/// Whether the machine can spare this much memory. A mapping's pages are allocated at once, and a client that asks for
/// too much must not get the server killed by the kernel. Returns `true` if unknown.
pub fn is_affordable(bytes: u64) -> bool {
    let available = machine::Memory::read().available;
    available.is_none_or(|available| bytes < available)
}

impl Pin {
    /// Changes the count to this many bytes.
    ///
    /// # Errors
    /// [`Beyond`] the user's bound; then the count is unchanged.
    pub fn resize(&mut self, bytes: u64) -> Result<(), Beyond> {
        let user = &self.user;
        if bytes <= self.bytes {
            user.bytes.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
            self.bytes = bytes;
            return Ok(());
        }
        let wanted = bytes - self.bytes;
        let fits = |held: u64| held.checked_add(wanted).filter(|sum| *sum <= user.most);
        let counted = user
            .bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        counted.map_err(|held| {
            let used = held.saturating_sub(user.idle.load(Ordering::Relaxed));
            Beyond {
                uid: user.uid,
                held,
                wanted,
                most: user.most,
                is_temporary: used.checked_add(wanted).is_some_and(|sum| sum <= user.most),
            }
        })?;
        self.bytes = bytes;
        Ok(())
    }

    /// Notes whether no session uses the memory. It stays counted.
    pub fn set_idle(&mut self, idle: bool) {
        if std::mem::replace(&mut self.idle, idle) == idle {
            return;
        }
        match idle {
            true => self.user.idle.fetch_add(self.bytes, Ordering::Relaxed),
            false => self.user.idle.fetch_sub(self.bytes, Ordering::Relaxed),
        };
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.set_idle(false);
        self.user.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Memory of the machine reserved for pages that do not exist yet.
#[derive(Debug)]
pub struct Unpopulated {
    all: Arc<AtomicU64>,
    bytes: u64,
}

impl Unpopulated {
    /// Returns this part of the reservation, because these pages exist now.
    pub fn populated(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.all.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Unpopulated {
    fn drop(&mut self) {
        self.populated(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pinned(bounds: &str) -> Pinned {
        Pinned::of(bounds.parse().expect(bounds), 1000)
    }

    #[test]
    fn each_user_has_a_bound_and_what_is_refused_does_not_count() {
        let pinned = pinned("50%,7=10%");
        let (first, second) = (pinned.take(1, 300).unwrap(), pinned.take(1, 200).unwrap());
        let refused = pinned.take(1, 1).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the clients of user 1 have 500B of pinned host memory and ask for 1B more; they may have 500B \
             (MPSSHIM_HOST_MEMORY)"
        );
        assert!(!refused.is_temporary);
        assert!(pinned.take(1, u64::MAX).is_err());
        let other = pinned.take(7, 100).unwrap();
        assert!(pinned.take(7, 1).is_err());
        drop(first);
        assert_eq!(
            [1, 7, 8].map(|uid| pinned.held(uid)),
            [200, 100, 0],
            "users are apart"
        );
        let third = pinned.take(1, 300).unwrap();
        drop((second, third, other));
        assert_eq!([1, 7].map(|uid| pinned.held(uid)), [0, 0]);
    }

    #[test]
    fn what_exists_already_counts_beyond_the_bound() {
        let pinned = pinned("100B");
        let adopted = pinned.add(1, 150);
        assert_eq!(pinned.held(1), 150);
        assert!(pinned.take(1, 1).is_err());
        drop(adopted);
        let _all = pinned.take(1, 100).unwrap();
    }

    #[test]
    fn a_pin_changes_its_size_within_the_bound() {
        let pinned = pinned("100B");
        let mut pin = pinned.take(1, 40).unwrap();
        assert!(pin.resize(101).is_err());
        assert_eq!(pinned.held(1), 40);
        pin.resize(100).unwrap();
        assert_eq!(pinned.held(1), 100);
        pin.resize(10).unwrap();
        assert_eq!(pinned.held(1), 10);
        drop(pin);
        assert_eq!(pinned.held(1), 0);
    }

    #[test]
    fn a_refusal_is_temporary_if_unused_memory_would_suffice() {
        let pinned = pinned("100B");
        let (mut idle, _used) = (pinned.take(1, 60).unwrap(), pinned.take(1, 30).unwrap());
        for _ in 0..2 {
            idle.set_idle(true);
        }
        assert_eq!(pinned.held(1), 90, "it still counts");
        let is_temporary = |bytes| pinned.take(1, bytes).unwrap_err().is_temporary;
        assert!(is_temporary(70) && !is_temporary(71));
        idle.set_idle(false);
        assert!(!is_temporary(70), "it is used again");
        idle.set_idle(true);
        drop(idle);
        let _more = pinned.take(1, 70).unwrap();
        assert!(!is_temporary(1), "what is gone is not idle any more");
    }

    #[test]
    fn pages_that_others_populate_are_not_affordable() {
        let pinned = pinned("100%");
        let all = machine::Memory::read().available.expect("a number");
        assert!(pinned.reserve(2 * all).is_none());
        let first = pinned.reserve(all / 2).expect("half of it");
        assert!(pinned.reserve(2 * (all / 3)).is_none());
        drop(first);
        let mut part = pinned
            .reserve(all / 2)
            .expect("nothing is left of refusals");
        part.populated(all / 2);
        assert_eq!(pinned.unpopulated.load(Ordering::Relaxed), 0);
        drop(part);
        assert_eq!(pinned.unpopulated.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn users_without_memory_are_forgotten() {
        let pinned = pinned("100%");
        let kept = pinned.add(1, 1);
        for uid in 2..100 {
            drop(pinned.add(uid, 1));
        }
        assert_eq!(pinned.users.lock().len(), 2);
        drop(kept);
    }
}
