//! What a session holds of each memory, and how much it may. Every path that allocates goes through
//! [`Account::charge`] or [`Account::take`]: a limit has one place to stand. What the session's user holds in all is
//! counted there, too.

use crate::user_memory::Place;
use mpsshim_proto::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use mpsshim_proto::handshake::MAX_DEVICES;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whose memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// A device's, by the server's ordinal.
    Device(usize),
    /// Pinned memory of the host.
    Host,
}

#[derive(Debug)]
struct Holding {
    bytes: AtomicU64,
    /// `u64::MAX`: none.
    limit: AtomicU64,
}

impl Default for Holding {
    fn default() -> Holding {
        Holding {
            bytes: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
        }
    }
}

/// Bytes held. Clones are of the same account.
#[derive(Debug, Clone, Default)]
pub struct Account {
    devices: Arc<[Holding; MAX_DEVICES]>,
    host: Arc<Holding>,
    /// Among the user's other clients; `None`: they are not looked at.
    user: Option<Arc<Place>>,
}

/// Memory that is counted as long as this lives.
#[derive(Debug)]
pub struct Charge {
    account: Account,
    memory: Memory,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.credit(self.memory, self.bytes);
    }
}

impl Account {
    /// Of a client that has this place among its user's.
    pub fn of_user(place: Place) -> Account {
        Account {
            user: Some(Arc::new(place)),
            ..Account::default()
        }
    }

    fn of(&self, memory: Memory) -> &Holding {
        match memory {
            Memory::Device(ordinal) => &self.devices[ordinal],
            Memory::Host => &self.host,
        }
    }

    /// Bytes held.
    pub fn held(&self, memory: Memory) -> u64 {
        self.of(memory).bytes.load(Ordering::Relaxed)
    }

    /// Bytes that may still be allocated, `u64::MAX`: all there is. The least of what the client's own limit and its
    /// user's leave.
    pub fn left(&self, memory: Memory) -> u64 {
        let own = match self.limit(memory) {
            None => u64::MAX,
            Some(limit) => limit.saturating_sub(self.held(memory)),
        };
        match (memory, &self.user) {
            (Memory::Device(device), Some(user)) => own.min(user.left(device)),
            _ => own,
        }
    }

    /// Bytes that may be held, if there is a limit.
    pub fn limit(&self, memory: Memory) -> Option<u64> {
        let limit = self.of(memory).limit.load(Ordering::Relaxed);
        (limit != u64::MAX).then_some(limit)
    }

    /// Lowers a limit; a higher one than the present changes nothing.
    pub fn lower_limit(&self, memory: Memory, bytes: u64) {
        self.of(memory).limit.fetch_min(bytes, Ordering::Relaxed);
    }

    /// Counts memory that is about to be allocated; what comes of it then is given back with [`Account::credit`]
    /// if the allocation fails, or when it is freed.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` over the limit, or over the user's; then nothing is counted.
    pub fn charge(&self, memory: Memory, bytes: u64) -> Result<(), CUresult> {
        let Holding { bytes: held, limit } = self.of(memory);
        let limit = limit.load(Ordering::Relaxed);
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= limit);
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        if let (Memory::Device(device), Some(user)) = (memory, &self.user)
            && !user.take(device, bytes)
        {
            self.uncount(memory, bytes);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        Ok(())
    }

    /// The same for memory that gives itself back.
    ///
    /// # Errors
    /// As [`Account::charge`].
    pub fn take(&self, memory: Memory, bytes: u64) -> Result<Charge, CUresult> {
        self.charge(memory, bytes)?;
        Ok(Charge {
            account: self.clone(),
            memory,
            bytes,
        })
    }

    /// Counts memory that was freed.
    pub fn credit(&self, memory: Memory, bytes: u64) {
        self.uncount(memory, bytes);
        if let (Memory::Device(device), Some(user)) = (memory, &self.user) {
            user.give_back(device, bytes);
        }
    }

    fn uncount(&self, memory: Memory, bytes: u64) {
        let less = |held: u64| {
            debug_assert!(held >= bytes, "more was freed than allocated");
            Some(held.saturating_sub(bytes))
        };
        let _ = self
            .of(memory)
            .bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use crate::user_memory::{Users, set_limit};

    #[test]
    fn each_memory_is_counted_by_itself() {
        let account = Account::default();
        account.charge(Memory::Device(1), 100).unwrap();
        account.charge(Memory::Host, 7).unwrap();
        let charge = account.take(Memory::Device(1), 50).unwrap();
        account.credit(Memory::Device(1), 100);
        let held = |account: &Account| {
            [Memory::Device(0), Memory::Device(1), Memory::Host].map(|memory| account.held(memory))
        };
        assert_eq!(held(&account.clone()), [0, 50, 7]);
        drop(charge);
        assert_eq!(held(&account), [0, 0, 7]);
    }

    #[test]
    fn accounts_of_a_user_share_its_limit() {
        let users = Users::default();
        let mut limits = Limits::default();
        set_limit(&mut limits, 7, 0, Some(100)).unwrap();
        users.set_limits(&limits);
        let account = || Account::of_user(users.place(7).unwrap());
        let (one, two, memory) = (account(), account(), Memory::Device(0));
        two.lower_limit(memory, 50);
        let charge = one.take(memory, 60).unwrap();
        assert_eq!((one.left(memory), two.left(memory)), (40, 40));
        assert_eq!(two.charge(memory, 41), Err(CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(two.held(memory), 0, "a refusal counts nothing");
        two.charge(Memory::Host, 1000).unwrap();
        drop(charge);
        assert_eq!((one.left(memory), two.left(memory)), (100, 50));
        one.charge(memory, 70).unwrap();
        drop(one);
        assert_eq!(two.left(memory), 50, "whatever it held");
    }

    #[test]
    fn a_limit_holds_and_only_goes_down() {
        let account = Account::default();
        let memory = Memory::Device(0);
        assert_eq!(account.limit(memory), None);
        account.lower_limit(memory, 100);
        account.lower_limit(memory, 200);
        assert_eq!(account.limit(memory), Some(100));
        account.charge(memory, 60).unwrap();
        assert_eq!(account.charge(memory, 41), Err(CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(
            account.charge(memory, u64::MAX),
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        );
        assert_eq!(account.held(memory), 60, "a refusal counts nothing");
        account.charge(memory, 40).unwrap();
        account.credit(memory, 100);
        account.charge(memory, 100).unwrap();
        account.charge(Memory::Device(1), 1000).unwrap();
    }
}
