//! How much of each memory a session holds, and its limits. Every path that allocates memory first takes a [`Charge`]
//! and keeps it in the allocated object. Limits are thus enforced in one place, a failing step returns its charge, and
//! memory stays counted until the object that represents it is dropped, after the driver has released the memory. The
//! total of the session's user is counted here too.

use crate::engine::base::ordinal::Ordinal as DeviceOrdinal;
use mpsshim_api::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use mpsshim_control::user_memory::Place;
use mpsshim_proto::handshake::MAX_DEVICES;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// A device's, by the server's ordinal.
    Device(DeviceOrdinal),
    /// Pinned host memory.
    Host,
}

/// Where managed memory lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// On a device.
    Device,
    /// In pinned host memory.
    Host,
}

#[derive(Debug)]
struct Holding {
    bytes: AtomicU64,
    /// `u64::MAX` if there is no limit.
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

/// Bytes held by a session. Clones refer to the same account.
#[derive(Debug, Clone, Default)]
pub struct Account {
    devices: Arc<[Holding; MAX_DEVICES]>,
    host: Arc<Holding>,
    /// Entry in the user's total; `None` if the user's total is not counted.
    user: Option<Arc<Place>>,
    /// Number of charges for memory that the client has freed and the driver does not have back yet.
    leaving: Arc<AtomicUsize>,
    /// Bytes of managed memory, by [`Home`].
    managed: Arc<[AtomicU64; 2]>,
}

/// Counts memory for as long as it lives. Keep it in the object that represents the memory.
#[derive(Debug)]
#[must_use = "memory is counted as long as this lives"]
pub struct Charge {
    account: Account,
    memory: Memory,
    bytes: u64,
    leaving: bool,
    /// Counted as managed memory: its home, and bytes.
    managed: Option<(Home, u64)>,
}

impl Charge {
    /// Counts the memory as managed memory with this home too, for monitoring, or as none any more.
    pub fn set_managed(&mut self, home: Option<Home>) {
        if let Some((home, bytes)) = self.managed.take() {
            self.account.uncount_managed(home, bytes);
        }
        if let Some(home) = home {
            self.account.add_managed(home, self.bytes);
            self.managed = Some((home, self.bytes));
        }
    }

    /// Marks the memory as freed by the client. It stays counted until the driver has released it; an allocation that
    /// finds no room may wait for that.
    pub fn leave(&mut self) {
        if !std::mem::replace(&mut self.leaving, true) {
            self.account.leaving.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Bytes counted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the charge to this many bytes.
    ///
    /// # Errors
    /// As [`Account::take`]; the charge is then unchanged.
    pub fn resize(&mut self, bytes: u64) -> Result<(), CUresult> {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.account.charge(self.memory, more)?,
            None => self.account.credit(self.memory, self.bytes - bytes),
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Raises the charge to this many bytes regardless of the limit, because the memory is already allocated.
    pub fn grow_to(&mut self, bytes: u64) {
        self.account
            .add(self.memory, bytes.saturating_sub(self.bytes));
        self.bytes = self.bytes.max(bytes);
    }

    /// Transfers the charge to another account regardless of its limit, because the memory is already allocated.
    pub fn move_to(&mut self, account: &Account) {
        debug_assert!(!self.leaving);
        account.add(self.memory, self.bytes);
        self.account.credit(self.memory, self.bytes);
        if let Some((home, bytes)) = self.managed {
            account.add_managed(home, bytes);
            self.account.uncount_managed(home, bytes);
        }
        self.account = account.clone();
    }

    /// Whether this account pays.
    pub fn is_of(&self, account: &Account) -> bool {
        self.account.is(account)
    }

    /// Splits off a part of at most `bytes` as a separate charge.
    pub fn split(&mut self, bytes: u64) -> Charge {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Charge {
            account: self.account.clone(),
            memory: self.memory,
            bytes,
            leaving: false,
            managed: None,
        }
    }

    /// Adds another charge of the same memory and account to this one.
    pub fn merge(&mut self, mut other: Charge) {
        debug_assert_eq!(self.memory, other.memory);
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.credit(self.memory, self.bytes);
        self.set_managed(None);
        if self.leaving {
            self.account.leaving.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Account {
    /// The account of a client with an entry in its user's total.
    pub fn of_user(place: Place) -> Account {
        Account {
            user: Some(Arc::new(place)),
            ..Account::default()
        }
    }

    fn of(&self, memory: Memory) -> &Holding {
        match memory {
            Memory::Device(ordinal) => &self.devices[ordinal.index()],
            Memory::Host => &self.host,
        }
    }

    /// Bytes held on each device; devices without any are omitted.
    pub fn held_of_devices(&self) -> BTreeMap<usize, u64> {
        let held = |holding: &Holding| holding.bytes.load(Ordering::Relaxed);
        let devices = self.devices.iter().map(held).enumerate();
        devices.filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Limits by device; devices without a limit are omitted.
    pub fn limits_of_devices(&self) -> BTreeMap<usize, u64> {
        let limit = |holding: &Holding| holding.limit.load(Ordering::Relaxed);
        let devices = self.devices.iter().map(limit).enumerate();
        devices.filter(|(_, limit)| *limit != u64::MAX).collect()
    }

    /// Bytes held.
    pub fn held(&self, memory: Memory) -> u64 {
        self.of(memory).bytes.load(Ordering::Relaxed)
    }

    /// Bytes of managed memory held.
    pub fn held_managed(&self, home: Home) -> u64 {
        self.managed[home as usize].load(Ordering::Relaxed)
    }

    fn add_managed(&self, home: Home, bytes: u64) {
        self.managed[home as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    fn uncount_managed(&self, home: Home, bytes: u64) {
        self.managed[home as usize].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes that may still be allocated: the minimum of the remainders of the client's limit and its user's;
    /// `u64::MAX` if there is no limit.
    pub fn left(&self, memory: Memory) -> u64 {
        let own = match self.limit(memory) {
            None => u64::MAX,
            Some(limit) => limit.saturating_sub(self.held(memory)),
        };
        match (memory, &self.user) {
            (Memory::Device(device), Some(user)) => own.min(user.left(device.index())),
            _ => own,
        }
    }

    /// Notes that the client has gone. Memory that the driver still holds counts for the user, but no longer for a
    /// client.
    pub fn retire(&self) {
        if let Some(user) = &self.user {
            user.retire();
        }
    }

    /// Whether both refer to the same account.
    pub fn is(&self, other: &Account) -> bool {
        Arc::ptr_eq(&self.devices, &other.devices)
    }

    /// Whether more is held than the limit allows, because charges were transferred to the account.
    pub fn is_over(&self, memory: Memory) -> bool {
        self.limit(memory)
            .is_some_and(|limit| self.held(memory) > limit)
    }

    fn add(&self, memory: Memory, bytes: u64) {
        self.of(memory).bytes.fetch_add(bytes, Ordering::Relaxed);
        if let (Memory::Device(device), Some(user)) = (memory, &self.user) {
            user.change(device.index(), 0, bytes);
        }
    }

    /// Whether memory that the client has given back is still counted.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed) > 0
    }

    /// The client's limit, if any.
    pub fn limit(&self, memory: Memory) -> Option<u64> {
        let limit = self.of(memory).limit.load(Ordering::Relaxed);
        (limit != u64::MAX).then_some(limit)
    }

    /// The lower of the client's limit and its user's, if any.
    pub fn most(&self, memory: Memory) -> Option<u64> {
        let of_user = match (memory, &self.user) {
            (Memory::Device(device), Some(user)) => user.limit(device.index()),
            _ => None,
        };
        self.limit(memory).into_iter().chain(of_user).min()
    }

    /// Lowers a limit; a value above the current limit has no effect.
    pub fn lower_limit(&self, memory: Memory, bytes: u64) {
        self.of(memory).limit.fetch_min(bytes, Ordering::Relaxed);
    }

    /// Charges memory that is about to be allocated, until the charge is dropped.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` beyond the limit of the client or its user; then nothing is charged.
    pub fn take(&self, memory: Memory, bytes: u64) -> Result<Charge, CUresult> {
        self.charge(memory, bytes)?;
        Ok(Charge {
            account: self.clone(),
            memory,
            bytes,
            leaving: false,
            managed: None,
        })
    }

    fn charge(&self, memory: Memory, bytes: u64) -> Result<(), CUresult> {
        let Holding { bytes: held, limit } = self.of(memory);
        let limit = limit.load(Ordering::Relaxed);
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= limit);
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        if let (Memory::Device(device), Some(user)) = (memory, &self.user)
            && !user.take(device.index(), bytes)
        {
            self.uncount(memory, bytes);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        Ok(())
    }

    fn credit(&self, memory: Memory, bytes: u64) {
        self.uncount(memory, bytes);
        if let (Memory::Device(device), Some(user)) = (memory, &self.user) {
            user.give_back(device.index(), bytes);
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
    use mpsshim_control::user_memory::{Users, set_bound};
    use mpsshim_model::limits::Limits;
    use mpsshim_model::limits::MemoryBound;

    fn device(ordinal: u8) -> Memory {
        Memory::Device(DeviceOrdinal::of_test(ordinal))
    }

    #[test]
    fn each_memory_is_counted_by_itself() {
        let account = Account::default();
        let first = account.take(device(1), 100).unwrap();
        let host = account.take(Memory::Host, 7).unwrap();
        let charge = account.take(device(1), 50).unwrap();
        drop(first);
        let held = |account: &Account| {
            [device(0), device(1), Memory::Host].map(|memory| account.held(memory))
        };
        assert_eq!(held(&account.clone()), [0, 50, 7]);
        drop(charge);
        assert_eq!(held(&account), [0, 0, 7]);
        drop(host);
    }

    #[test]
    fn managed_memory_is_counted_by_its_home_and_moves_with_the_charge() {
        let (account, other) = (Account::default(), Account::default());
        let held =
            |account: &Account| [Home::Device, Home::Host].map(|home| account.held_managed(home));
        let mut one = account.take(device(0), 100).unwrap();
        one.set_managed(Some(Home::Device));
        let mut two = account.take(Memory::Host, 7).unwrap();
        for home in [Home::Device, Home::Host] {
            two.set_managed(Some(home));
        }
        let plain = account.take(device(0), 5).unwrap();
        assert_eq!(held(&account), [100, 7]);
        one.move_to(&other);
        assert_eq!((held(&account), held(&other)), ([0, 7], [100, 0]));
        drop((one, two, plain));
        assert_eq!((held(&account), held(&other)), ([0, 0], [0, 0]));
    }

    #[test]
    fn a_charge_is_split_merged_and_resized() {
        let account = Account::default();
        let memory = device(0);
        account.lower_limit(memory, 100);
        let mut one = account.take(memory, 60).unwrap();
        let mut two = one.split(20);
        assert_eq!(
            (one.bytes(), two.bytes(), account.held(memory)),
            (40, 20, 60)
        );
        assert_eq!(two.resize(61), Err(CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!((two.bytes(), account.held(memory)), (20, 60));
        two.resize(60).unwrap();
        assert_eq!(account.held(memory), 100);
        two.resize(10).unwrap();
        one.merge(two);
        assert_eq!((one.bytes(), account.held(memory)), (50, 50));
        one.leave();
        one.leave();
        assert!(account.is_leaving());
        let all = one.split(70);
        assert_eq!((one.bytes(), all.bytes()), (0, 50));
        drop((one, all));
        assert_eq!((account.held(memory), account.is_leaving()), (0, false));
    }

    #[test]
    fn accounts_of_a_user_share_its_limit() {
        let users = Users::default();
        let mut limits = Limits::default();
        set_bound(&mut limits, MemoryBound::Limit, 7, 0, Some(100)).unwrap();
        users.set_limits(&limits);
        let account = || Account::of_user(users.place(7).unwrap());
        let (one, two, memory) = (account(), account(), device(0));
        two.lower_limit(memory, 50);
        let charge = one.take(memory, 60).unwrap();
        assert_eq!((one.left(memory), two.left(memory)), (40, 40));
        let refused =
            |taken: Result<Charge, CUresult>| taken.err() == Some(CUDA_ERROR_OUT_OF_MEMORY);
        assert!(refused(two.take(memory, 41)));
        assert_eq!(two.held(memory), 0, "a refusal counts nothing");
        let host = two.take(Memory::Host, 1000).unwrap();
        drop(charge);
        assert_eq!((one.left(memory), two.left(memory)), (100, 50));
        let last = one.take(memory, 70).unwrap();
        drop(one);
        assert_eq!(
            two.left(memory),
            30,
            "what is held is counted, whoever has gone"
        );
        drop((last, host));
        assert_eq!(two.left(memory), 50);
    }

    #[test]
    fn another_account_takes_a_charge_over() {
        let (one, two, memory) = (Account::default(), Account::default(), device(0));
        two.lower_limit(memory, 10);
        let mut charge = one.take(memory, 60).unwrap();
        assert!(charge.is_of(&one.clone()) && !charge.is_of(&two) && !two.is_over(memory));
        charge.move_to(&two);
        assert_eq!((one.held(memory), two.held(memory)), (0, 60));
        assert!(charge.is_of(&two) && two.is_over(memory));
        drop(charge);
        assert_eq!((one.held(memory), two.held(memory)), (0, 0));
    }

    #[test]
    fn a_limit_holds_and_only_goes_down() {
        let account = Account::default();
        let memory = device(0);
        assert_eq!(account.limit(memory), None);
        account.lower_limit(memory, 100);
        account.lower_limit(memory, 200);
        assert_eq!(account.limit(memory), Some(100));
        let refused = |bytes| account.take(memory, bytes).err() == Some(CUDA_ERROR_OUT_OF_MEMORY);
        let sixty = account.take(memory, 60).unwrap();
        assert!(refused(41) && refused(u64::MAX));
        assert_eq!(account.held(memory), 60, "a refusal counts nothing");
        let forty = account.take(memory, 40).unwrap();
        drop((sixty, forty));
        let _all = account.take(memory, 100).unwrap();
        let _other = account.take(device(1), 1000).unwrap();
    }
}
