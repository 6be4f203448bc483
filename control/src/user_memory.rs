//! Device memory of each user: the total that its clients of both modes hold, and the limit.

use mpsshim_model::limits::{Limits, MemoryBound};
use mpsshim_proto::shm::{Mapping, sealed_memfd};
use mpsshim_proto::user_memory::{PLACES, USER_MEMORY_LEN, UserMemory};
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, VecDeque, btree_map::Entry};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// The users of one server that have clients.
#[derive(Debug, Default)]
pub struct Users(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    users: BTreeMap<u32, User>,
    /// Bytes by user and device.
    limits: BTreeMap<u32, BTreeMap<usize, u64>>,
}

#[derive(Debug)]
struct User {
    table: Arc<Table>,
    /// Number of places ever given out, including returned ones.
    used: usize,
    /// Returned places, oldest first: a former holder that still runs may not know of it yet.
    free: VecDeque<usize>,
    /// Place of the memory that the driver has not released yet after its clients have ended.
    rest: Weak<Place>,
}

impl User {
    fn set_limits(&self, limits: Option<&BTreeMap<usize, u64>>) {
        for (ordinal, device) in self.table.memory().devices.iter().enumerate() {
            let limit = limits.and_then(|limits| limits.get(&ordinal));
            let limit = limit.copied().unwrap_or(u64::MAX);
            device.limit.store(limit, Ordering::Relaxed);
        }
    }
}

/// A user's table, mapped here.
#[derive(Debug)]
struct Table {
    mapping: Mapping,
    file: OwnedFd,
}

impl Table {
    fn new() -> io::Result<Table> {
        let file = sealed_memfd(c"mpsshim-user", USER_MEMORY_LEN as u64)?;
        let mapping = Mapping::new(file.as_fd(), USER_MEMORY_LEN)?;
        Ok(Table { mapping, file })
    }

    fn memory(&self) -> &UserMemory {
        // SAFETY: the mapping has USER_MEMORY_LEN bytes, at least a UserMemory's, starts at a page, and lives as long as
        // self; UserMemory is all atomics, so that whatever a client does to it at whatever time is a value.
        unsafe { &*self.mapping.base().cast::<UserMemory>() }
    }
}

impl Users {
    /// Replaces the limits of all users; applies at once to users with clients.
    pub fn set_limits(&self, limits: &Limits) {
        let mut state = self.0.lock();
        state.limits.clone_from(&limits.user_memory);
        for (uid, user) in &state.users {
            user.set_limits(state.limits.get(uid));
        }
    }

    /// A place for a new client of this user, given back on drop.
    ///
    /// # Errors
    /// No memory, no descriptors, no place.
    pub fn place(&self, uid: u32) -> io::Result<Place> {
        place(&self.0, &mut self.0.lock(), uid)
    }
}

fn place(all: &Arc<Mutex<State>>, state: &mut State, uid: u32) -> io::Result<Place> {
    let State { users, limits } = state;
    let user = match users.entry(uid) {
        Entry::Occupied(user) => user.into_mut(),
        Entry::Vacant(new) => {
            let user = User {
                table: Arc::new(Table::new()?),
                used: 0,
                free: VecDeque::new(),
                rest: Weak::new(),
            };
            user.set_limits(limits.get(&uid));
            new.insert(user)
        }
    };
    let place = match user.free.pop_front() {
        Some(place) => place,
        None if user.used < PLACES => {
            user.used += 1;
            let used = &user.table.memory().used;
            used.store(user.used as u32, Ordering::SeqCst);
            user.used - 1
        }
        None => return Err(io::Error::other("the user has too many clients")),
    };
    Ok(Place {
        users: Arc::clone(all),
        uid,
        table: Arc::clone(&user.table),
        place,
        rest: RwLock::default(),
    })
}

/// A client's place in its user's table. Its charges end with it.
#[derive(Debug)]
pub struct Place {
    users: Arc<Mutex<State>>,
    uid: u32,
    table: Arc<Table>,
    place: usize,
    /// After the client has ended: the place that its remaining memory is charged to.
    rest: RwLock<Option<Arc<Place>>>,
}

impl Place {
    /// The client has ended. Moves the charges for its memory that the driver has not released yet to one place shared
    /// by all such clients of the user, so that another client can reuse this one's place.
    pub fn retire(&self) {
        let mut to = self.rest.write();
        if to.is_some() {
            return;
        }
        let mut state = self.users.lock();
        let known = state
            .users
            .get(&self.uid)
            .and_then(|user| user.rest.upgrade());
        let rest = match known {
            Some(rest) => rest,
            None => {
                // If no shared place is available, this place stays in use.
                let Ok(made) = place(&self.users, &mut state, self.uid) else {
                    return;
                };
                let made = Arc::new(made);
                if let Some(user) = state.users.get_mut(&self.uid) {
                    user.rest = Arc::downgrade(&made);
                }
                made
            }
        };
        self.table.memory().transfer(self.place, rest.place);
        if let Some(user) = state.users.get_mut(&self.uid) {
            user.free.push_back(self.place);
        }
        *to = Some(rest);
    }

    /// Does something with the place that the memory is charged to.
    fn with_place<T>(&self, work: impl FnOnce(usize) -> T) -> T {
        let rest = self.rest.read();
        work(rest.as_ref().map_or(self.place, |rest| rest.place))
    }

    /// The table's file, for the client to map.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.table.file.as_fd()
    }

    /// Its number in the table.
    pub fn number(&self) -> u32 {
        self.place as u32
    }

    /// Charges memory that is about to be allocated; `false`: that would exceed the user's limit, and nothing is
    /// charged.
    pub fn take(&self, device: usize, bytes: u64) -> bool {
        self.with_place(|place| self.table.memory().take(device, place, bytes))
    }

    /// Removes the charge for freed memory.
    pub fn give_back(&self, device: usize, bytes: u64) {
        self.with_place(|place| self.table.memory().sub(device, place, bytes));
    }

    /// Replaces a charge of `before` bytes by `now` bytes. Ignores the limit, since the memory is already allocated.
    pub fn change(&self, device: usize, before: u64, now: u64) {
        let memory = self.table.memory();
        self.with_place(|place| match now.checked_sub(before) {
            Some(more) => memory.add(device, place, more),
            None => memory.sub(device, place, before - now),
        });
    }

    /// Bytes of a device that the user's clients may hold together, if there is a limit.
    pub fn limit(&self, device: usize) -> Option<u64> {
        self.table.memory().limit(device)
    }

    /// Bytes of a device that the user may still allocate; `u64::MAX`: no limit.
    pub fn left(&self, device: usize) -> u64 {
        self.table.memory().left(device)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.rest.get_mut().is_some() {
            // Another client may already use the place.
            return;
        }
        let mut state = self.users.lock();
        self.table.memory().clear(self.place);
        if let Some(user) = state.users.get_mut(&self.uid) {
            user.free.push_back(self.place);
            if user.free.len() == user.used {
                state.users.remove(&self.uid);
            }
        }
    }
}

/// Maximum number of limits and guarantees by user and device: messages between daemon and server must fit in a packet.
pub const MOST_LIMITS: usize = 1000;

/// Sets or removes a user's limit, or the guarantee of its clients.
///
/// # Errors
/// The maximum number is reached; nothing is changed.
pub fn set_bound(
    limits: &mut Limits,
    bound: MemoryBound,
    uid: u32,
    device: usize,
    bytes: Option<u64>,
) -> Result<(), String> {
    let count = count_bounds(limits);
    let all = limits.user_memory_of_mut(bound);
    let Some(bytes) = bytes else {
        if let Some(devices) = all.get_mut(&uid) {
            devices.remove(&device);
        }
        all.retain(|_, devices| !devices.is_empty());
        return Ok(());
    };
    let is_new = all
        .get(&uid)
        .is_none_or(|devices| !devices.contains_key(&device));
    if is_new && count >= MOST_LIMITS {
        return Err(format!(
            "there are {MOST_LIMITS} limits and guarantees of users already"
        ));
    }
    all.entry(uid).or_default().insert(device, bytes);
    Ok(())
}

/// Number of limits and guarantees by user and device.
pub fn count_bounds(limits: &Limits) -> usize {
    let all = MemoryBound::ALL.into_iter();
    let users = all.flat_map(|bound| limits.user_memory_of(bound).values());
    users.map(BTreeMap::len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_model::policy::{MOST_USERS, Scheduling};

    const LIMIT: MemoryBound = MemoryBound::Limit;

    fn limits(all: &[(u32, usize, u64)]) -> Limits {
        let mut limits = Limits::default();
        for (uid, device, bytes) in all {
            let set = set_bound(&mut limits, LIMIT, *uid, *device, Some(*bytes));
            set.expect("a limit");
        }
        limits
    }

    #[test]
    fn clients_of_a_user_share_and_give_back() {
        let users = Users::default();
        users.set_limits(&limits(&[(7, 1, 100)]));
        let (one, two) = (users.place(7).expect("one"), users.place(7).expect("two"));
        let stranger = users.place(8).expect("another user's");
        assert!(one.take(1, 70) && !two.take(1, 31) && two.take(1, 30));
        assert!(two.take(0, 1 << 40) && stranger.take(1, 1 << 40));
        assert_eq!((one.left(1), one.left(0)), (0, u64::MAX));
        // However it ends.
        drop(one);
        assert_eq!(two.left(1), 70);
        two.change(1, 0, 60);
        two.change(1, 60, 20);
        assert_eq!(two.left(1), 50);
        two.change(1, 20, 0);
        two.give_back(1, 10);
        // Existing clients get the new limit, too.
        users.set_limits(&limits(&[(7, 1, 50)]));
        assert_eq!(two.left(1), 30);
        users.set_limits(&Limits::default());
        assert_eq!(two.left(1), u64::MAX);
    }

    #[test]
    fn places_are_given_again_and_users_forgotten() {
        let users = Users::default();
        let mut places: Vec<Place> = (0..PLACES)
            .map(|_| users.place(7).expect("a place"))
            .collect();
        assert!(users.place(7).is_err() && users.place(8).is_ok());
        assert!(places[0].take(0, 5));
        let file = |place: &Place| place.table.memory() as *const UserMemory;
        assert_eq!(file(&places[0]), file(&places[9]));
        drop(places.drain(..2));
        let (first, second) = (users.place(7).expect("one"), users.place(7).expect("two"));
        assert_eq!((first.number(), second.number()), (0, 1));
        assert_eq!(first.table.memory().held(0), 0);
        drop((first, second));
        places.clear();
        assert!(users.0.lock().users.is_empty());
    }

    #[test]
    fn what_the_driver_has_of_clients_that_are_gone_takes_one_place() {
        let users = Users::default();
        users.set_limits(&limits(&[(7, 0, 100)]));
        let gone: Vec<Place> = (0..3 * PLACES)
            .map(|at| {
                let place = users.place(7).expect("there is room");
                assert!(at >= 50 || place.take(0, 1));
                place.retire();
                place.retire();
                place
            })
            .collect();
        let there = users.place(7).expect("a place");
        assert_eq!(there.left(0), 50);
        assert!(there.take(0, 40) && !there.take(0, 11));
        gone[0].give_back(0, 1);
        gone[1].change(0, 1, 0);
        assert_eq!(there.left(0), 12);
        drop(gone);
        // With the last of them, the shared place ends.
        assert_eq!(there.left(0), 60);
        drop(there);
        assert!(users.0.lock().users.is_empty());
    }

    #[test]
    fn nonsense_from_a_client_harms_nobody_else() {
        let users = Users::default();
        users.set_limits(&limits(&[(7, 0, 100)]));
        let (one, two) = (users.place(7).expect("one"), users.place(7).expect("two"));
        let memory = one.table.memory();
        memory.used.store(u32::MAX, Ordering::Relaxed);
        memory.add(0, two.place, u64::MAX);
        assert!(!one.take(0, 1));
        one.give_back(0, u64::MAX);
        drop(two);
        assert!(one.take(0, 100));
        memory.used.store(0, Ordering::Relaxed);
        let three = users.place(7).expect("three");
        assert_eq!(three.number(), 1);
    }

    #[test]
    fn there_are_only_so_many_limits() {
        let most = (0..MOST_LIMITS as u32).map(|uid| (4_000_000_000 + uid, 15, u64::MAX));
        let mut all = limits(&most.collect::<Vec<_>>());
        let users = (0..MOST_USERS as u32).map(|uid| 4_000_000_000 + uid);
        all.scheduling.users = users.map(|uid| (uid, Scheduling::Auto)).collect();
        let json = serde_json::to_string(&all).expect("JSON");
        assert!(json.len() < 60_000, "it fits a packet: {}", json.len());
        for bound in MemoryBound::ALL {
            assert!(set_bound(&mut all, bound, 1, 0, Some(1)).is_err());
        }
        assert!(set_bound(&mut all, LIMIT, 4_000_000_000, 15, Some(1)).is_ok());
        set_bound(&mut all, LIMIT, 4_000_000_000, 15, None).expect("removed");
        set_bound(&mut all, LIMIT, 4_000_000_000, 15, None).expect("nothing");
        assert_eq!(all.user_memory.len(), MOST_LIMITS - 1);
        let set = set_bound(&mut all, MemoryBound::Guarantee, 1, 0, Some(1));
        assert_eq!((set, all.user_guarantee.len()), (Ok(()), 1));
        assert!(set_bound(&mut all, LIMIT, 1, 0, Some(1)).is_err());
    }
}
