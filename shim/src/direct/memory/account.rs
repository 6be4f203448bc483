//! Device memory held, by this client (in the page) and by all clients of its user, and the limits.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use mpsshim_api::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use mpsshim_proto::direct::{GONE, Memory, TERMINATED};
use mpsshim_proto::user_memory::{PLACES, UserMemory};
use parking_lot::{RwLock, RwLockReadGuard};

/// This process is a forked child: the session is its parent's.
static LEFT: AtomicBool = AtomicBool::new(false);

/// Called in a forked child.
pub fn leave() {
    LEFT.store(true, Ordering::Relaxed);
}

/// The account of a device's memory: in the page of a session, and as a part of the user's total.
#[derive(Debug, Clone, Copy)]
pub struct Counted {
    pub page: &'static Memory,
    pub user: Share,
}

/// This process's part of its user's total for a device.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    pub memory: &'static UserMemory,
    pub device: usize,
    /// The place of this process.
    pub place: &'static AtomicU32,
    /// State of the session's turn: once the session is over, the place may belong to another client.
    pub state: &'static AtomicU32,
}

impl Share {
    fn place(self) -> Option<usize> {
        let place = self.place.load(Ordering::Relaxed) as usize;
        let is_over = matches!(self.state.load(Ordering::SeqCst), TERMINATED | GONE);
        (place < PLACES && !is_over && !LEFT.load(Ordering::Relaxed)).then_some(place)
    }

    fn left(self) -> u64 {
        let left = |_| self.memory.left(self.device);
        self.place().map_or(u64::MAX, left)
    }

    fn limit(self) -> Option<u64> {
        self.place().and_then(|_| self.memory.limit(self.device))
    }

    fn take(self, bytes: u64) -> bool {
        let take = |place| self.memory.take(self.device, place, bytes);
        self.place().is_none_or(take)
    }

    fn add(self, bytes: u64) {
        if let Some(place) = self.place() {
            self.memory.add(self.device, place, bytes);
        }
    }

    fn sub(self, bytes: u64) {
        if let Some(place) = self.place() {
            self.memory.sub(self.device, place, bytes);
        }
    }
}

/// The account of the present session.
#[derive(Debug)]
pub struct Slot(RwLock<Counted>);

impl Slot {
    pub fn new(counted: Counted) -> Slot {
        Slot(RwLock::new(counted))
    }

    /// Continues to count in another account.
    pub fn move_to(&self, next: Counted) {
        let mut counted = self.0.write();
        let held = counted.page.held.load(Ordering::Relaxed);
        next.page.held.store(held, Ordering::Relaxed);
        next.user.add(held);
        *counted = next;
    }

    /// The present account, which does not change while the guard lives.
    fn counted(&self) -> RwLockReadGuard<'_, Counted> {
        self.0.read()
    }
}

/// A device's memory.
#[derive(Debug, Clone, Copy)]
pub struct Account {
    pub slot: &'static Slot,
    /// A limit that this process sets itself, `u64::MAX`: none.
    pub lowered: &'static AtomicU64,
}

impl Account {
    /// Bytes that this process may hold; `u64::MAX`: all there is.
    pub fn limit(self) -> u64 {
        let server = self.slot.counted().page.limit.load(Ordering::Relaxed);
        server.min(self.lowered.load(Ordering::Relaxed))
    }

    /// Bytes that can be held at most: the lesser of this process' limit and its user's; `u64::MAX`: all there is.
    pub fn most(self) -> u64 {
        let of_user = self.slot.counted().user.limit();
        of_user.map_or(self.limit(), |limit| limit.min(self.limit()))
    }

    /// Bytes that may still be allocated.
    pub fn left(self) -> u64 {
        let limit = self.limit();
        let counted = self.slot.counted();
        let own = match limit {
            u64::MAX => u64::MAX,
            limit => limit
                .saturating_sub(counted.page.held.load(Ordering::Relaxed))
                .saturating_sub(counted.page.overhead.load(Ordering::Relaxed)),
        };
        own.min(counted.user.left())
    }

    /// Bytes that this process holds in addition to those counted.
    pub fn overhead(self) -> u64 {
        self.slot.counted().page.overhead.load(Ordering::Relaxed)
    }

    /// Lowers the limit; a value over the present limit has no effect.
    pub fn lower(self, bytes: u64) {
        self.lowered.fetch_min(bytes, Ordering::Relaxed);
    }

    /// Counts memory that is about to be allocated.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` over the process's limit or its user's; then nothing is counted.
    pub fn take(self, bytes: u64) -> Result<Charge, CUresult> {
        let limit = match self.limit() {
            u64::MAX => u64::MAX,
            limit => limit.saturating_sub(self.overhead()),
        };
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= limit);
        let counted = self.slot.counted();
        let held = &counted.page.held;
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        if !counted.user.take(bytes) {
            held.fetch_sub(bytes, Ordering::Relaxed);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let slot = self.slot;
        Ok(Charge { slot, bytes })
    }

    /// Counts memory that exists already and only gets an owner, regardless of the limit.
    pub fn count(self, bytes: u64) -> Charge {
        let counted = self.slot.counted();
        counted.page.held.fetch_add(bytes, Ordering::Relaxed);
        counted.user.add(bytes);
        let slot = self.slot;
        Charge { slot, bytes }
    }
}

/// Memory that is counted as long as this lives.
#[derive(Debug)]
pub struct Charge {
    slot: &'static Slot,
    bytes: u64,
}

impl Charge {
    /// Corrects the count to the bytes that the driver has allocated, even over the limit: they exist.
    pub fn settle(&mut self, bytes: u64) {
        let counted = self.slot.counted();
        if bytes >= self.bytes {
            let more = bytes - self.bytes;
            counted.page.held.fetch_add(more, Ordering::Relaxed);
            counted.user.add(more);
        } else {
            let less = self.bytes - bytes;
            counted.user.sub(less);
            counted.page.held.fetch_sub(less, Ordering::Relaxed);
        }
        drop(counted);
        self.bytes = bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let counted = self.slot.counted();
        counted.user.sub(self.bytes);
        counted.page.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// An account of its own with a limit of the server's.
    pub fn account(limit: u64) -> Account {
        of_user(limit, user(u64::MAX), 0)
    }

    /// One of a client at this place.
    fn of_user(limit: u64, user: &'static UserMemory, place: u32) -> Account {
        let slot = Box::leak(Box::new(Slot::new(counted(limit, user, place))));
        let lowered = Box::leak(Box::new(AtomicU64::new(u64::MAX)));
        Account { slot, lowered }
    }

    fn counted(limit: u64, user: &'static UserMemory, place: u32) -> Counted {
        let page: &Memory = Box::leak(Box::default());
        page.limit.store(limit, Ordering::Relaxed);
        let user = Share {
            memory: user,
            device: 0,
            place: Box::leak(Box::new(AtomicU32::new(place))),
            state: Box::leak(Box::default()),
        };
        Counted { page, user }
    }

    /// A user's memory with this limit.
    fn user(limit: u64) -> &'static UserMemory {
        // SAFETY: all zero is a value of it, which is all atomics.
        let user: Box<UserMemory> = unsafe { Box::new_zeroed().assume_init() };
        user.used.store(4, Ordering::Relaxed);
        user.devices[0].limit.store(limit, Ordering::Relaxed);
        Box::leak(user)
    }

    pub fn held(account: Account) -> u64 {
        account.slot.counted().page.held.load(Ordering::Relaxed)
    }

    #[test]
    fn nothing_is_taken_over_the_limit() {
        let account = account(100);
        let first = account.take(60).unwrap();
        assert_eq!(account.take(41).unwrap_err(), CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(
            account.take(u64::MAX).unwrap_err(),
            CUDA_ERROR_OUT_OF_MEMORY
        );
        assert_eq!((held(account), account.left()), (60, 40));
        let second = account.take(40).unwrap();
        assert_eq!(account.left(), 0);
        drop(first);
        drop(second);
        assert_eq!(held(account), 0);
    }

    #[test]
    fn the_lower_limit_holds() {
        let account = account(100);
        account.lower(200);
        assert_eq!(account.limit(), 100);
        account.lower(50);
        account.lower(70);
        assert_eq!((account.limit(), account.left()), (50, 50));
        assert!(account.take(51).is_err());
    }

    #[test]
    fn clients_of_a_user_share_its_limit() {
        let user = user(100);
        let (one, two) = (of_user(u64::MAX, user, 0), of_user(u64::MAX, user, 1));
        let first = one.take(60).unwrap();
        assert_eq!(two.take(41).unwrap_err(), CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!((held(two), two.left(), one.left()), (0, 40, 40));
        two.lower(30);
        assert_eq!((two.left(), two.limit(), one.limit()), (30, 30, u64::MAX));
        let mut second = two.take(30).unwrap();
        second.settle(50);
        assert_eq!((one.left(), two.left()), (0, 0));
        second.settle(10);
        assert_eq!((one.left(), two.left()), (30, 20));
        drop((first, second));
        assert_eq!((one.left(), two.left()), (100, 30));
    }

    #[test]
    fn a_place_that_may_be_another_s_is_left_alone() {
        let user = user(100);
        let (one, two) = (of_user(u64::MAX, user, 0), of_user(u64::MAX, user, 0));
        let _others = one.take(60).unwrap();
        let state = two.slot.counted().user.state;
        for over in [TERMINATED, GONE] {
            state.store(over, Ordering::Relaxed);
            let charge = two.take(1000).unwrap();
            let left = (one.left(), two.left(), held(two));
            assert_eq!(left, (40, u64::MAX, 1000), "it goes on by itself");
            drop(charge);
        }
        state.store(0, Ordering::Relaxed);
        let place = two.slot.counted().user.place;
        place.store(u32::MAX, Ordering::Relaxed);
        drop(two.take(1000).unwrap());
        assert_eq!((one.left(), held(two)), (40, 0));
    }

    #[test]
    fn what_is_held_goes_over_to_the_next_server() {
        let (before, after) = (user(100), user(80));
        let one = of_user(u64::MAX, before, 0);
        let first = one.take(60).unwrap();
        one.slot.move_to(counted(u64::MAX, after, 2));
        assert_eq!((after.held(0), one.left()), (60, 20));
        assert!(one.take(21).is_err());
        drop(first);
        assert_eq!((after.held(0), before.held(0)), (0, 60));
    }

    #[test]
    fn what_is_held_besides_counts() {
        let account = account(100);
        let overhead = &account.slot.counted().page.overhead;
        overhead.store(30, Ordering::Relaxed);
        assert_eq!((account.left(), account.limit()), (70, 100));
        assert!(account.take(71).is_err());
        let charge = account.take(70).unwrap();
        overhead.store(200, Ordering::Relaxed);
        assert!(account.left() == 0 && account.take(1).is_err());
        drop((charge, account.count(50)));
        assert_eq!(held(account), 0);
    }

    #[test]
    fn no_limit_is_none() {
        let account = account(u64::MAX);
        let _held = account.take(1 << 50).unwrap();
        assert_eq!((account.limit(), account.left()), (u64::MAX, u64::MAX));
    }

    #[test]
    fn what_the_driver_took_counts() {
        let account = account(100);
        let mut charge = account.take(90).unwrap();
        charge.settle(110);
        assert_eq!((held(account), account.left()), (110, 0));
        charge.settle(80);
        assert_eq!((held(account), account.left()), (80, 20));
        drop(charge);
        assert_eq!(held(account), 0);
    }

    #[test]
    fn another_page_goes_on_with_what_is_held() {
        let account = account(100);
        let first = account.take(60).unwrap();
        let next = counted(50, user(u64::MAX), 0);
        account.slot.move_to(next);
        assert_eq!((held(account), account.left()), (60, 0));
        assert!(account.take(1).is_err());
        drop(first);
        assert_eq!((held(account), account.left()), (0, 50));
    }

    #[test]
    fn pages_change_while_threads_allocate() {
        let (account, user) = (account(u64::MAX), user(u64::MAX));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        let mut charge = account.take(10).unwrap();
                        charge.settle(7);
                    }
                });
            }
            for _ in 0..500 {
                account.slot.move_to(counted(u64::MAX, user, 0));
            }
        });
        assert_eq!(held(account), 0);
    }

    #[test]
    fn threads_together_stay_within_the_limit() {
        let account = account(1000);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let charges: Vec<_> = (0..5).map(|_| account.take(99)).collect();
                        assert!(held(account) <= 1000);
                        drop(charges);
                    }
                });
            }
        });
        assert_eq!(held(account), 0);
    }
}
