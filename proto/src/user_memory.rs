//! Device memory of all clients of one user, in a file that the server shares with those in direct mode.
//!
//! Each client has a place in a table and adds only to its own number there; the user's total is the sum. So when a
//! client ends, clearing its place removes all that it held, and no bookkeeping of owners is needed. The server adds
//! for the clients in proxy mode.
//!
//! A client may write arbitrary values into the table, just as it may allocate without counting: that affects only
//! clients of the same user. The server does not rely on the content.

use crate::handshake::MAX_DEVICES;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Clients that one user can have at a time.
pub const PLACES: usize = 1024;
/// Bytes of the file.
pub const USER_MEMORY_LEN: usize = size_of::<UserMemory>().next_multiple_of(4096);
/// Number of attempts for an allocation that fits but fails because of concurrent attempts.
const TRIES: usize = 1000;

/// One device.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    /// Limit of all clients together, bytes; `u64::MAX`: none. The server writes it, at any time.
    pub limit: AtomicU64,
    held: [AtomicU64; PLACES],
}

/// The whole file. All zero it has limits of 0.
#[repr(C)]
#[derive(Debug)]
pub struct UserMemory {
    /// Number of leading places that have ever been used. The server writes it.
    pub used: AtomicU32,
    /// By the server's ordinal.
    pub devices: [Device; MAX_DEVICES],
}

impl UserMemory {
    /// The numbers of a device that may differ from 0.
    fn numbers(&self, device: usize) -> &[AtomicU64] {
        let used = self.used.load(Ordering::SeqCst) as usize;
        &self.devices[device].held[..used.min(PLACES)]
    }

    /// Bytes that all clients hold of a device.
    pub fn held(&self, device: usize) -> u64 {
        let numbers = self.numbers(device).iter();
        numbers.fold(0, |sum, number| {
            sum.saturating_add(number.load(Ordering::SeqCst))
        })
    }

    /// Bytes that all clients may hold of a device, if there is a limit.
    pub fn limit(&self, device: usize) -> Option<u64> {
        let limit = self.devices[device].limit.load(Ordering::Relaxed);
        (limit != u64::MAX).then_some(limit)
    }

    /// Bytes that may still be allocated of a device; `u64::MAX`: all there is.
    pub fn left(&self, device: usize) -> u64 {
        match self.devices[device].limit.load(Ordering::Relaxed) {
            u64::MAX => u64::MAX,
            limit => limit.saturating_sub(self.held(device)),
        }
    }

    /// Counts bytes that are already allocated, regardless of the limit.
    pub fn add(&self, device: usize, place: usize, bytes: u64) {
        self.devices[device].held[place].fetch_add(bytes, Ordering::SeqCst);
    }

    /// Subtracts bytes that have been freed.
    pub fn sub(&self, device: usize, place: usize, bytes: u64) {
        let number = &self.devices[device].held[place];
        // It never fails.
        let _ = number.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |held| {
            Some(held.saturating_sub(bytes))
        });
    }

    /// Counts bytes that are about to be allocated; `false`: they would exceed the limit, and nothing is counted.
    ///
    /// Each client adds first and then reads the sum, so that two at once do not both pass. If both exceed the limit,
    /// each subtracts its bytes and reads again; the last to subtract then sees only bytes actually held, and retries.
    pub fn take(&self, device: usize, place: usize, bytes: u64) -> bool {
        for _ in 0..TRIES {
            let limit = self.devices[device].limit.load(Ordering::Relaxed);
            if bytes > limit {
                return false;
            }
            self.add(device, place, bytes);
            if limit == u64::MAX || self.held(device) <= limit {
                return true;
            }
            self.sub(device, place, bytes);
            if self.held(device).saturating_add(bytes) > limit {
                return false;
            }
            std::thread::yield_now();
        }
        false
    }

    /// Moves the counts of one place to another.
    pub fn transfer(&self, from: usize, to: usize) {
        for (ordinal, device) in self.devices.iter().enumerate() {
            // Adds before it subtracts, so that the sum is never below the bytes actually held.
            let bytes = device.held[from].load(Ordering::SeqCst);
            self.add(ordinal, to, bytes);
            self.sub(ordinal, from, bytes);
        }
    }

    /// Frees a place.
    pub fn clear(&self, place: usize) {
        for device in &self.devices {
            device.held[place].store(0, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(limit: u64) -> Box<UserMemory> {
        Box::new(UserMemory {
            used: AtomicU32::new(4),
            devices: std::array::from_fn(|_| Device {
                limit: AtomicU64::new(limit),
                held: [const { AtomicU64::new(0) }; PLACES],
            }),
        })
    }

    #[test]
    fn the_clients_share_the_limit() {
        let table = table(100);
        assert!(table.take(1, 0, 60));
        assert!(!table.take(1, 3, 41) && !table.take(1, 3, u64::MAX));
        assert!(table.take(1, 3, 40) && table.take(0, 3, 100));
        assert_eq!((table.held(1), table.left(1), table.left(2)), (100, 0, 100));
        table.sub(1, 0, 60);
        table.add(1, 1, 70);
        assert_eq!((table.held(1), table.left(1)), (110, 0), "it is there");
        table.clear(1);
        assert_eq!((table.left(1), table.left(0)), (60, 0));
        table.sub(1, 3, 1000);
        assert_eq!(table.held(1), 0);
    }

    #[test]
    fn a_limit_may_change_at_any_time() {
        let table = table(u64::MAX);
        assert!(table.take(0, 0, 500));
        assert_eq!(table.left(0), u64::MAX);
        table.devices[0].limit.store(400, Ordering::Relaxed);
        assert!(!table.take(0, 1, 1) && table.left(0) == 0);
        table.devices[0].limit.store(501, Ordering::Relaxed);
        assert!(table.take(0, 1, 1));
    }

    #[test]
    fn nonsense_in_the_table_only_refuses() {
        let table = table(100);
        table.devices[0].held[2].store(u64::MAX, Ordering::Relaxed);
        table.devices[0].held[3].store(u64::MAX, Ordering::Relaxed);
        table.used.store(u32::MAX, Ordering::Relaxed);
        assert!(!table.take(0, 0, 1));
        assert_eq!((table.held(0), table.left(0)), (u64::MAX, 0));
        table.sub(0, 0, u64::MAX);
        table.clear(2);
        table.clear(3);
        assert!(table.take(0, 0, 1));
    }

    #[test]
    fn at_once_they_stay_within_the_limit_and_one_of_them_passes() {
        let table = table(1000);
        let passed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for place in 0..4 {
                let (table, passed) = (&table, &passed);
                scope.spawn(move || {
                    for _ in 0..5000 {
                        // Only one fits at a time.
                        if table.take(0, place, 600) {
                            assert_eq!(passed.fetch_add(1, Ordering::SeqCst), 0);
                            passed.fetch_sub(1, Ordering::SeqCst);
                            table.sub(0, place, 600);
                        }
                    }
                });
            }
        });
        assert_eq!(table.held(0), 0);
        assert!(table.take(0, 0, 600));
    }

    #[test]
    fn there_is_no_limit_where_all_may_be_held() {
        let table = table(100);
        table.devices[1].limit.store(u64::MAX, Ordering::Relaxed);
        table.devices[2].limit.store(0, Ordering::Relaxed);
        let limits = [0, 1, 2].map(|device| table.limit(device));
        assert_eq!(limits, [Some(100), None, Some(0)]);
        assert!(!table.take(2, 0, 1) && table.take(2, 0, 0));
    }

    #[test]
    fn what_one_place_has_is_transferred_on_all_devices() {
        let table = table(100);
        for (device, place, bytes) in [(0, 1, 10), (0, 2, 20), (3, 1, 30), (4, 3, 40)] {
            table.add(device, place, bytes);
        }
        table.transfer(1, 2);
        let held = [0, 3, 4].map(|device| table.held(device));
        assert_eq!(held, [30, 30, 40]);
        table.clear(1);
        assert_eq!(table.held(0), 30);
        table.clear(2);
        let held = [0, 3, 4].map(|device| table.held(device));
        assert_eq!(held, [0, 0, 40]);
    }

    #[test]
    fn only_places_that_were_used_count() {
        let table = table(100);
        table.add(0, 4, 70);
        assert_eq!((table.held(0), table.left(0)), (0, 100));
        table.used.store(5, Ordering::Relaxed);
        assert_eq!((table.held(0), table.left(0)), (70, 30));
    }
}
