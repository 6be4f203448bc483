//! Addresses for managed memory that has its home on a device.
//!
//! The driver reserves the addresses of device memory once and as a whole. These it reserves block by block: while a block
//! is device memory the driver has its addresses, and at other times this process holds them, so that the memory of the
//! block can become host memory at the same addresses (`cuMemHostRegister`).

use crate::engine::base::driver::Driver;
use crate::engine::base::ranges::RangeAllocator;
use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use mpsshim_proto::arena::{DEVICE_ARENA_STRIDE, MANAGED_OFFSET};
use parking_lot::Mutex;

/// Addresses are reserved in multiples of this many bytes: shorter reservations get addresses of the driver's choice,
/// whatever is asked for (580.159.04).
const UNIT: u64 = 32 << 20;

/// The addresses of one device.
#[derive(Debug)]
pub struct ManagedArena {
    addresses: Mutex<RangeAllocator>,
    start: u64,
    /// The addresses are held in this process.
    held: Mutex<bool>,
}

impl ManagedArena {
    /// The arena of the device whose part of the device arena begins at `start`.
    pub fn new(start: u64) -> ManagedArena {
        let (first, len) = (start + MANAGED_OFFSET, DEVICE_ARENA_STRIDE - MANAGED_OFFSET);
        ManagedArena {
            addresses: Mutex::new(RangeAllocator::new(first, len, UNIT)),
            start: first,
            held: Mutex::new(false),
        }
    }

    /// Whether an address is one of these.
    pub fn contains(&self, address: u64) -> bool {
        address >= self.start && address < self.start + (DEVICE_ARENA_STRIDE - MANAGED_OFFSET)
    }

    /// Holds all addresses, before the first is used.
    fn hold_all(&self) -> Result<(), CUresult> {
        let mut held = self.held.lock();
        if !*held {
            hold(self.start, DEVICE_ARENA_STRIDE - MANAGED_OFFSET)?;
            *held = true;
        }
        Ok(())
    }

    /// Takes at least `len` bytes of addresses, and reserves them with the driver.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`; errors of the driver.
    pub fn take(&self, driver: &Driver, len: u64) -> Result<u64, CUresult> {
        self.hold_all()?;
        let len = room(len)?;
        let start = self.addresses.lock().take(len);
        let start = start.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        self.reserve(driver, start, len)
            .inspect_err(|_| self.addresses.lock().give_back(start, len))?;
        Ok(start)
    }

    /// Takes the addresses that [`ManagedArena::take`] gave for this length.
    ///
    /// # Errors
    /// As [`ManagedArena::take`]; `CUDA_ERROR_INVALID_VALUE` if they are in use.
    pub fn take_at(&self, driver: &Driver, start: u64, len: u64) -> Result<(), CUresult> {
        self.hold_all()?;
        let len = room(len)?;
        let taken = self.addresses.lock().take_at(start, len);
        taken.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        self.reserve(driver, start, len)
            .inspect_err(|_| self.addresses.lock().give_back(start, len))
    }

    /// Takes addresses back, where the driver has mapped nothing any more.
    ///
    /// # Errors
    /// Errors of the driver; the addresses remain taken.
    pub fn give_back(&self, driver: &Driver, start: u64, len: u64) -> Result<(), CUresult> {
        let len = room(len)?;
        self.unreserve(driver, start, len)?;
        self.addresses.lock().give_back(start, len);
        Ok(())
    }

    /// Takes addresses back from the driver, where it has mapped nothing any more; they remain taken.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn vacate(&self, driver: &Driver, start: u64, len: u64) -> Result<(), CUresult> {
        self.unreserve(driver, start, room(len)?)
    }

    /// Takes back addresses that were vacated and where this process has nothing mapped any more.
    pub fn give_back_vacated(&self, start: u64, len: u64) {
        let Ok(all) = room(len) else {
            return;
        };
        // The rest is still held.
        if hold(start, len).is_ok() {
            self.addresses.lock().give_back(start, all);
        }
    }

    /// Passes addresses that this process holds to the driver.
    fn reserve(&self, driver: &Driver, start: u64, len: u64) -> Result<(), CUresult> {
        // SAFETY: an address range that this process holds, with no memory in it.
        unsafe { libc::munmap(start as *mut _, len as usize) };
        let mut reserved = 0;
        let status = driver.mem_address_reserve(&mut reserved, len as usize, 0, start, 0);
        match status {
            Ok(()) if reserved == start => return Ok(()),
            Ok(()) => {
                tracing::error!("the driver reserved {reserved:#x} instead of {start:#x}");
                let _ = driver.memory.mem_address_free(reserved, len as usize);
            }
            Err(_) => {}
        }
        hold(start, len)?;
        Err(status.err().unwrap_or(CUDA_ERROR_OUT_OF_MEMORY))
    }

    /// Takes addresses back from the driver.
    fn unreserve(&self, driver: &Driver, start: u64, len: u64) -> Result<(), CUresult> {
        driver.memory.mem_address_free(start, len as usize)?;
        hold(start, len)
    }
}

/// The addresses that are taken for `len` bytes.
fn room(len: u64) -> Result<u64, CUresult> {
    let room = len.max(1).checked_next_multiple_of(UNIT);
    room.ok_or(CUDA_ERROR_OUT_OF_MEMORY)
}

/// Maps nothing at these addresses, so that nothing else is mapped there.
fn hold(start: u64, len: u64) -> Result<(), CUresult> {
    match mpsshim_proto::shm::Reservation::at(start, len) {
        // For the life of the process.
        Ok(reservation) => std::mem::forget(reservation),
        Err(error) => {
            tracing::error!(%error, "addresses for managed memory at {start:#x} are in use");
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{Fixture, Function, obeys, records};
    use mpsshim_api::cuda::CUDA_ERROR_NOT_SUPPORTED;
    use mpsshim_proto::arena::DEVICE_ARENA;
    use mpsshim_proto::shm::Reservation;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// The arena of a device that no fixture has. The addresses stay held in this process: each test has its own.
    fn arena(device: u64) -> ManagedArena {
        ManagedArena::new(DEVICE_ARENA + device * DEVICE_ARENA_STRIDE)
    }

    /// Whether nothing else can be mapped at these addresses.
    fn is_held(start: u64, len: u64) -> bool {
        Reservation::at(start, len).is_err()
    }

    #[test]
    fn addresses_are_taken_given_back_and_taken_again() {
        let test = Fixture::new(&[("cuMemAddressFree", records as Function)]);
        let (driver, arena) = (&test.shared.gpu.driver, arena(15));
        let first = arena.take(driver, 1).expect("addresses");
        assert_eq!(first, arena.start);
        assert!(!is_held(first, UNIT), "they are the driver's");
        let second = arena.take(driver, UNIT + 1).expect("addresses");
        assert_eq!(second, first + UNIT);
        assert!(is_held(second + 2 * UNIT, UNIT), "the others are held");
        assert!(arena.contains(first) && arena.contains(second));
        assert!(!arena.contains(first - 1));
        assert!(!arena.contains(first + (DEVICE_ARENA_STRIDE - MANAGED_OFFSET)));
        // As the next server does, which has the addresses of the client's blocks.
        let used = arena.take_at(driver, second, UNIT + 1);
        assert_eq!(used, Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(arena.give_back(driver, second, UNIT + 1), Ok(()));
        assert_eq!(test.recorded()[0][..2], [second, 2 * UNIT]);
        assert!(is_held(second, 2 * UNIT));
        assert_eq!(arena.take_at(driver, second, UNIT + 1), Ok(()));
        assert!(!is_held(second, 2 * UNIT));
        assert_eq!(arena.give_back(driver, first, 1), Ok(()));
        assert_eq!(arena.take(driver, UNIT), Ok(first));
    }

    #[test]
    fn there_are_no_more_addresses_than_those_of_the_arena() {
        let test = Fixture::new(&[]);
        let (driver, arena) = (&test.shared.gpu.driver, arena(14));
        let whole = DEVICE_ARENA_STRIDE - MANAGED_OFFSET;
        for len in [u64::MAX, whole + 1] {
            assert_eq!(arena.take(driver, len), Err(CUDA_ERROR_OUT_OF_MEMORY));
        }
        let last = arena.start + whole - UNIT;
        assert_eq!(arena.take_at(driver, last, UNIT), Ok(()));
        for (start, len) in [(last, 2 * UNIT), (last + UNIT, UNIT), (last - 1, UNIT)] {
            let taken = arena.take_at(driver, start, len);
            assert_eq!(taken, Err(CUDA_ERROR_INVALID_VALUE));
        }
        assert_eq!(arena.take(driver, whole), Err(CUDA_ERROR_OUT_OF_MEMORY));
    }

    /// Distance of the reserved addresses from the hint, in bytes.
    static ASIDE: AtomicU64 = AtomicU64::new(0);

    extern "C" fn reserves_aside(to: *mut u64, _: usize, _: usize, hint: u64, _: u64) -> CUresult {
        // SAFETY: the driver's function writes an address there.
        unsafe { to.write(hint + ASIDE.load(Ordering::Relaxed)) };
        CUresult(0)
    }

    #[test]
    fn a_driver_that_reserves_elsewhere_leaves_the_addresses_held() {
        let test = Fixture::new(&[
            ("cuMemAddressReserve", reserves_aside as Function),
            ("cuMemAddressFree", records as Function),
        ]);
        let (driver, arena) = (&test.shared.gpu.driver, arena(13));
        ASIDE.store(UNIT, Ordering::Relaxed);
        let start = arena.start;
        assert_eq!(arena.take(driver, 1), Err(CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(test.recorded()[0][..2], [start + UNIT, UNIT]);
        assert!(is_held(start, UNIT));
        let taken = arena.take_at(driver, start, 1);
        assert_eq!(taken, Err(CUDA_ERROR_OUT_OF_MEMORY));
        assert!(is_held(start, UNIT));
        ASIDE.store(0, Ordering::Relaxed);
        assert_eq!(arena.take(driver, 1), Ok(start), "they are free");
    }

    extern "C" fn reserves_if_told(
        to: *mut u64,
        _: usize,
        _: usize,
        hint: u64,
        _: u64,
    ) -> CUresult {
        // SAFETY: the driver's function writes an address there.
        unsafe { to.write(hint) };
        obeys()
    }

    #[test]
    fn errors_of_the_driver_leave_the_addresses_as_they_were() {
        let test = Fixture::new(&[("cuMemAddressFree", obeys as Function)]);
        let (driver, arena) = (&test.shared.gpu.driver, arena(12));
        let start = arena.take(driver, 1).expect("addresses");
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let given = arena.give_back(driver, start, 1);
        assert_eq!(given, Err(CUDA_ERROR_NOT_SUPPORTED));
        assert_eq!(arena.take(driver, 1), Ok(start + UNIT), "they remain taken");
        drop(test);
        let test = Fixture::new(&[("cuMemAddressReserve", reserves_if_told as Function)]);
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let driver = &test.shared.gpu.driver;
        let taken = arena.take(driver, 1);
        assert_eq!(taken, Err(CUDA_ERROR_NOT_SUPPORTED));
        assert!(is_held(start + 2 * UNIT, UNIT));
    }
}
