//! Multiprocessors that long work leaves free while clients with short kernels gain by it.
//!
//! A kernel of the first level still waits for the end of a block, and a request of many kernels waits as often. While the
//! reserve is active, kernels of other clients are launched in a green context without the last group of
//! multiprocessors, or an eighth of them, so that short kernels always find room
//! ([`crate::engine::objects::levels::reserve`] decides when).

use crate::engine::base::driver::Driver;
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::green::GreenRef;
use mpsshim_api::cuda::*;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// Streams created in a green context when it is made. Other client streams are not confined.
const STREAMS: usize = 24;

/// How much longer a kernel may take for being confined, for a small reserve.
const MOST_LONGER: f32 = 1.15;

/// How much of a device is kept free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Extent {
    /// One group of multiprocessors, and only from kernels that take hardly longer without it.
    Small,
    /// An eighth of the device, from all kernels.
    Large,
}

impl Extent {
    /// All extents.
    pub const ALL: [Extent; 2] = [Extent::Small, Extent::Large];

    /// Its position in [`Extent::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    /// Number of multiprocessors, on a device with `total` of them in groups of `size`.
    fn multiprocessors(self, total: u32, size: u32) -> u32 {
        match self {
            Extent::Small => size,
            Extent::Large => (total / 8).max(size) / size * size,
        }
    }
}

/// The reserve of a device.
#[derive(Debug, Default)]
pub struct Reserve {
    /// The green contexts without the reserved multiprocessors, by [`Extent`]; `None`: the device has none.
    made: OnceLock<Option<[Confines; Extent::ALL.len()]>>,
    /// Whether they are being made.
    asked: AtomicBool,
    /// 0: not active; otherwise the extent's position plus 1.
    active: AtomicU8,
}

#[derive(Debug)]
struct Confines {
    green: GreenRef,
    /// Multiprocessors that it lacks, and those of the device.
    free: u32,
    total: u32,
}

impl Confines {
    /// Part of the device's multiprocessors that it has.
    fn part(&self) -> f32 {
        1.0 - self.free as f32 / self.total as f32
    }
}

impl Reserve {
    /// Whether it can be active. The first call calls `make`, which is to call [`Device::make_reserve`] in a thread that may
    /// wait for the driver.
    pub fn is_ready(&self, make: impl FnOnce()) -> bool {
        match self.made.get() {
            Some(made) => made.is_some(),
            None => {
                if !self.asked.swap(true, Ordering::Relaxed) {
                    make();
                }
                false
            }
        }
    }

    /// How much of the device kernels of clients beyond the first level are to leave free.
    #[inline]
    pub fn active(&self) -> Option<Extent> {
        match self.active.load(Ordering::Relaxed) {
            0 => None,
            number => Extent::ALL.get(usize::from(number) - 1).copied(),
        }
    }

    /// Begins or ends confinement. Returns whether that is a change.
    pub fn set_active(&self, extent: Option<Extent>) -> bool {
        let number = extent.map_or(0, |extent| extent as u8 + 1);
        self.active.swap(number, Ordering::Relaxed) != number
    }

    /// Number of multiprocessors of an extent, and of the device; `None` if the reserve cannot be active.
    pub fn multiprocessors(&self, extent: Extent) -> Option<(u32, u32)> {
        let confines = self.of(extent)?;
        Some((confines.free, confines.total))
    }

    fn of(&self, extent: Extent) -> Option<&Confines> {
        Some(&self.made.get()?.as_ref()?[extent.index()])
    }

    /// A stream for confined kernels, with its green context; `None` if no more are kept.
    pub fn take_stream(&self, extent: Extent) -> Option<(GreenRef, CUstream)> {
        let green = &self.of(extent)?.green;
        Some((green.clone(), green.take_kept(0)?))
    }

    /// How much of the device a kernel with this number of waves of blocks leaves free.
    #[inline]
    pub fn confines(&self, waves: f32) -> Option<Extent> {
        let extent = self.active()?;
        let suits = match extent {
            Extent::Small => is_hardly_longer(waves, self.of(extent)?.part()),
            Extent::Large => true,
        };
        suits.then_some(extent)
    }
}

/// Whether a kernel with this number of waves takes hardly longer on a part of the device.
fn is_hardly_longer(waves: f32, part: f32) -> bool {
    let number = |waves: f32| (waves - 1e-3).ceil().max(1.0);
    number(waves / part) <= MOST_LONGER * number(waves)
}

impl Device {
    /// Makes the green contexts of its reserve. Takes some milliseconds and some 12 MiB of device memory.
    pub fn make_reserve(&self, driver: &Driver) {
        let made = self.partition(driver).and_then(|partition| {
            let chunks = partition.chunks();
            if chunks.count < 4 {
                return Ok(None);
            }
            let confine = |extent: Extent| {
                let free = extent.multiprocessors(chunks.multiprocessors, chunks.size);
                let place = partition.place(chunks.multiprocessors - free);
                let green = place.green(driver, self)?;
                green.keep_streams(driver, STREAMS)?;
                let total = chunks.multiprocessors;
                let free = total - place.count;
                Ok::<Confines, CUresult>(Confines { green, free, total })
            };
            Ok(Some([confine(Extent::Small)?, confine(Extent::Large)?]))
        });
        if let Err(status) = &made {
            tracing::info!(
                device = self.ordinal.index(),
                %status,
                "no multiprocessors can be kept free for short kernels"
            );
        }
        let _ = self.reserve.made.set(made.ok().flatten());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_would_need_another_wave_are_not_confined() {
        let part = 124.0 / 132.0;
        for waves in [0.0, 0.01, 0.5, 0.93, 1.5, 7.0, 7.5, 40.0, 400.0] {
            assert!(is_hardly_longer(waves, part), "{waves}");
        }
        for waves in [0.95, 1.0, 2.0, 3.0, 6.0] {
            assert!(!is_hardly_longer(waves, part), "{waves}");
        }
    }

    #[test]
    fn the_first_question_asks_for_the_green_context() {
        let reserve = Reserve::default();
        let mut asked = 0;
        for _ in 0..3 {
            assert!(!reserve.is_ready(|| asked += 1));
        }
        assert_eq!(asked, 1);
        for extent in Extent::ALL {
            assert!(reserve.set_active(Some(extent)) && !reserve.set_active(Some(extent)));
            assert_eq!(reserve.active(), Some(extent));
            assert!(reserve.take_stream(extent).is_none());
        }
        assert!(reserve.set_active(None) && reserve.active().is_none());
    }

    #[test]
    fn a_large_reserve_is_an_eighth_in_whole_groups() {
        let large = |total, size| Extent::Large.multiprocessors(total, size);
        assert_eq!((large(132, 8), large(108, 2), large(46, 8)), (16, 12, 8));
        assert_eq!(Extent::Small.multiprocessors(132, 8), 8);
    }
}
