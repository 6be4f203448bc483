//! What is held of a device's memory, in the page, and how much may be.

use std::sync::atomic::{AtomicU64, Ordering};

use mpsshim_proto::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use mpsshim_proto::direct::Memory;
use parking_lot::{RwLock, RwLockReadGuard};

/// Where a device's memory is counted: in the page of the present session.
#[derive(Debug)]
pub struct Slot(RwLock<&'static Memory>);

impl Slot {
    pub fn new(page: &'static Memory) -> Slot {
        Slot(RwLock::new(page))
    }

    /// Goes on counting in another page.
    pub fn move_to(&self, page: &'static Memory) {
        let mut memory = self.0.write();
        let held = memory.held.load(Ordering::Relaxed);
        page.held.store(held, Ordering::Relaxed);
        *memory = page;
    }

    /// While this lives, the page stays the same one.
    fn page(&self) -> RwLockReadGuard<'_, &'static Memory> {
        self.0.read()
    }
}

/// A device's memory.
#[derive(Debug, Clone, Copy)]
pub struct Account {
    pub slot: &'static Slot,
    /// A limit of this process' own, `u64::MAX`: none.
    pub lowered: &'static AtomicU64,
}

impl Account {
    /// Bytes that may be held; `u64::MAX`: all there is.
    pub fn limit(self) -> u64 {
        let server = self.slot.page().limit.load(Ordering::Relaxed);
        server.min(self.lowered.load(Ordering::Relaxed))
    }

    /// Bytes that may still be allocated.
    pub fn left(self) -> u64 {
        match self.limit() {
            u64::MAX => u64::MAX,
            limit => limit.saturating_sub(self.slot.page().held.load(Ordering::Relaxed)),
        }
    }

    /// Lowers the limit; a higher one than the present changes nothing.
    pub fn lower(self, bytes: u64) {
        self.lowered.fetch_min(bytes, Ordering::Relaxed);
    }

    /// Counts memory that is about to be allocated.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` over the limit; then nothing is counted.
    pub fn take(self, bytes: u64) -> Result<Charge, CUresult> {
        let limit = self.limit();
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= limit);
        let page = self.slot.page();
        page.held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        let slot = self.slot;
        Ok(Charge { slot, bytes })
    }
}

/// Memory that is counted as long as this lives.
#[derive(Debug)]
pub struct Charge {
    slot: &'static Slot,
    bytes: u64,
}

impl Charge {
    /// Counts what the driver has taken in fact, even over the limit: it is there.
    pub fn settle(&mut self, bytes: u64) {
        let page = self.slot.page();
        if bytes >= self.bytes {
            let more = bytes - self.bytes;
            page.held.fetch_add(more, Ordering::Relaxed);
        } else {
            let less = self.bytes - bytes;
            page.held.fetch_sub(less, Ordering::Relaxed);
        }
        drop(page);
        self.bytes = bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let page = self.slot.page();
        page.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// An account of its own with a limit of the server's.
    pub fn account(limit: u64) -> Account {
        let slot = Box::leak(Box::new(Slot::new(page(limit))));
        let lowered = Box::leak(Box::new(AtomicU64::new(u64::MAX)));
        Account { slot, lowered }
    }

    fn page(limit: u64) -> &'static Memory {
        let page: &Memory = Box::leak(Box::default());
        page.limit.store(limit, Ordering::Relaxed);
        page
    }

    pub fn held(account: Account) -> u64 {
        account.slot.page().held.load(Ordering::Relaxed)
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
        account.slot.move_to(page(50));
        assert_eq!((held(account), account.left()), (60, 0));
        assert!(account.take(1).is_err());
        drop(first);
        assert_eq!((held(account), account.left()), (0, 50));
    }

    #[test]
    fn pages_change_while_threads_allocate() {
        let account = account(u64::MAX);
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
                account.slot.move_to(page(u64::MAX));
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
