//! New work is held back while other users' servers have their share of the devices
//! (docs/design/0024-shares.md).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest time for which one order holds work back: a daemon that is gone delays nothing for longer.
pub const LONGEST: Duration = Duration::from_millis(100);

/// Whether new work is held back.
#[derive(Debug)]
pub struct Hold {
    begin: Instant,
    /// Microseconds since `begin` until which work is held back; 0: it is not.
    until: AtomicU64,
    /// Devices, as a bit mask of ordinals, for which work was held back since the last [`Hold::take_wanted`].
    wanted: AtomicU64,
}

impl Default for Hold {
    fn default() -> Hold {
        Hold {
            begin: Instant::now(),
            until: AtomicU64::new(0),
            wanted: AtomicU64::new(0),
        }
    }
}

impl Hold {
    /// Holds new work back for this time from now on, at most [`LONGEST`]; zero: lets it through.
    pub fn set(&self, time: Duration) {
        let until = match time.is_zero() {
            true => 0,
            false => self.now() + time.min(LONGEST).as_micros() as u64,
        };
        self.until.store(until, Ordering::Relaxed);
    }

    /// Holds new work back until [`Hold::set`] is called.
    #[cfg(test)]
    pub fn set_for_good(&self) {
        self.until.store(u64::MAX, Ordering::Relaxed);
    }

    /// Whether new work on a device must wait.
    #[inline]
    pub fn applies(&self, device: usize) -> bool {
        match self.until.load(Ordering::Relaxed) {
            0 => false,
            until => self.look(until, device),
        }
    }

    /// The devices for which work was held back since the last call, as a bit mask of ordinals.
    pub fn take_wanted(&self) -> u64 {
        self.wanted.swap(0, Ordering::Relaxed)
    }

    #[cold]
    fn look(&self, until: u64, device: usize) -> bool {
        if self.now() >= until {
            // A new order may have come meanwhile.
            let _ = self
                .until
                .compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
            return false;
        }
        self.wanted.fetch_or(1 << (device % 64), Ordering::Relaxed);
        true
    }

    fn now(&self) -> u64 {
        self.begin.elapsed().as_micros() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_held_back_until_the_time_is_over_or_the_order_is_cancelled() {
        let hold = Hold::default();
        assert!(!hold.applies(0));
        hold.set(Duration::from_secs(3600));
        assert!(hold.until.load(Ordering::Relaxed) <= hold.now() + LONGEST.as_micros() as u64);
        hold.set_for_good();
        assert!(hold.applies(0) && hold.applies(3));
        assert_eq!((hold.take_wanted(), hold.take_wanted()), (0b1001, 0));
        hold.set(Duration::ZERO);
        assert!(!hold.applies(0));
        hold.set(Duration::from_micros(1));
        while hold.applies(0) {
            std::thread::yield_now();
        }
        assert_eq!(hold.until.load(Ordering::Relaxed), 0, "looked at once only");
    }
}
