//! The server's side of the page that it shares with a client in direct mode.

use mpsshim_proto::direct::{self, PAGE_LEN, Page};
use mpsshim_proto::handshake::MAX_DEVICES;
use mpsshim_proto::shm::{self, Mapping, sealed_memfd};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use super::turns::{Account, Asked, DeviceSet};

/// A client's devices and memory, by its own count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Devices that it uses, one bit each.
    pub devices: DeviceSet,
    /// Bytes of memory that it holds, by ordinal.
    pub held: [u64; MAX_DEVICES],
}

/// A page that is mapped here.
#[derive(Debug)]
pub struct SharedPage {
    mapping: Mapping,
}

impl SharedPage {
    /// A new zeroed page, and the descriptor with which the client maps it.
    ///
    /// # Errors
    /// No memory, no descriptors.
    pub fn new() -> io::Result<(SharedPage, OwnedFd)> {
        let fd = sealed_memfd(c"mpsshim-direct", PAGE_LEN as u64)?;
        let mapping = Mapping::new(fd.as_fd(), PAGE_LEN)?;
        Ok((SharedPage { mapping }, fd))
    }

    fn page(&self) -> &Page {
        // SAFETY: the mapping has PAGE_LEN bytes, at least a Page's, starts at a page, and lives as long as self; Page
        // consists of atomics only, so that any concurrent write by the client leaves valid values.
        unsafe { &*self.mapping.base().cast::<Page>() }
    }

    /// The state that the client reports; pairs with its release.
    pub fn state(&self) -> u32 {
        self.page().turn.state.0.load(Ordering::Acquire)
    }

    /// Submissions that the client reports to have made by the end of its last turn.
    pub fn submissions(&self) -> u64 {
        self.page().turn.submissions.load(Ordering::Relaxed)
    }

    /// Makes a client that is not asked for its turn report its submissions, for the next query.
    pub fn want_count(&self) {
        shm::futex_wake(&self.page().turn.asked.0);
    }

    /// The devices that it reports to use, of `count` existing ones; all if it names none.
    pub fn devices(&self, count: usize) -> DeviceSet {
        let all = (1u32 << count) - 1;
        match self.page().turn.devices.load(Ordering::Relaxed) & all {
            0 => all,
            devices => devices,
        }
    }

    /// Bytes of a device that the client reports to hold.
    pub fn held(&self, device: usize) -> u64 {
        self.page().memory[device].held.load(Ordering::Relaxed)
    }

    /// The client's reported use of `count` devices and of their memory.
    pub fn counts(&self, count: usize) -> Counts {
        let devices = self.page().turn.devices.load(Ordering::SeqCst);
        let held = |device: usize| match device < count {
            true => self.page().memory[device].held.load(Ordering::SeqCst),
            false => 0,
        };
        Counts {
            devices: devices & ((1 << count) - 1),
            held: std::array::from_fn(held),
        }
    }

    /// Bytes of a device that it holds in addition to its own count.
    pub fn overhead(&self, device: usize) -> u64 {
        self.page().memory[device].overhead.load(Ordering::Relaxed)
    }

    /// Tells the client how many bytes it holds in addition to its own count.
    pub fn set_overhead(&self, device: usize, bytes: u64) {
        let memory = &self.page().memory[device];
        memory.overhead.store(bytes, Ordering::Relaxed);
    }

    /// Sets its limit of device memory, bytes.
    pub fn set_limit(&self, device: usize, bytes: u64) {
        let memory = &self.page().memory[device];
        memory.limit.store(bytes, Ordering::Relaxed);
    }

    /// Exempts the client from turns.
    pub fn set_free(&self) {
        self.page().turn.free.store(1, Ordering::Relaxed);
    }

    /// Tells the client its place in its user's table.
    pub fn set_place(&self, place: u32) {
        self.page().place.store(place, Ordering::Relaxed);
    }

    /// Grants the turn; `false`: the client does not wait for one any more.
    pub fn grant(&self, asked: Asked) -> bool {
        self.ask(asked);
        let state = &self.page().turn.state.0;
        // Releases the writes above to the client's acquire of HELD.
        let granted = state.compare_exchange(
            direct::WANTS,
            direct::HELD,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        shm::futex_wake(state);
        granted.is_ok()
    }

    /// Asks the client for its turn, or withdraws the request.
    pub fn ask(&self, asked: Asked) {
        let value = match asked {
            Asked::Not => direct::NOT_ASKED,
            Asked::WhenIdle => direct::WHEN_IDLE,
            Asked::Now => direct::NOW,
            Asked::Report => direct::REPORT,
        };
        let word = &self.page().turn.asked.0;
        if word.swap(value, Ordering::AcqRel) != value {
            shm::futex_wake(word);
        }
    }

    /// Ends the session: later submissions of the client are refused.
    pub fn terminate(&self) {
        let state = &self.page().turn.state.0;
        state.store(direct::TERMINATED, Ordering::SeqCst);
        shm::futex_wake(state);
        // The client's thread that gives up turns reads the state when it is asked for its turn.
        self.ask(Asked::Now);
    }

    /// Writes the client's account of turns.
    pub fn write(&self, account: &Account) {
        let turn = &self.page().turn;
        turn.turns.store(account.turns, Ordering::Relaxed);
        turn.held_ns.store(account.held, Ordering::Relaxed);
        turn.waited_ns.store(account.waited, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_waits_is_granted_a_turn() {
        let (page, _fd) = SharedPage::new().expect("page");
        assert!(!page.grant(Asked::Not));
        page.page()
            .turn
            .state
            .0
            .store(direct::WANTS, Ordering::Release);
        assert!(page.grant(Asked::WhenIdle));
        assert_eq!(page.state(), direct::HELD);
        assert_eq!(
            page.page().turn.asked.0.load(Ordering::Relaxed),
            direct::WHEN_IDLE
        );
    }

    #[test]
    fn devices_that_are_not_there_are_not_used() {
        let (page, _fd) = SharedPage::new().expect("page");
        for (said, meant) in [(0, 0b11), (0b10, 0b10), (!0, 0b11), (0b100, 0b11)] {
            page.page().turn.devices.store(said, Ordering::Relaxed);
            assert_eq!(page.devices(2), meant);
        }
    }
}
