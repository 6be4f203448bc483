//! The server's own kernels for small copies between a device and host memory: for sessions whose copies would wait behind
//! large ones of others, since the copy engines serve the copies of a context in the order of submission; and for pieces of
//! managed memory, since a kernel that follows a kernel, in a graph too, does not wait for another engine.

use crate::engine::base::driver::{Driver, packed};
use crate::engine::gpu::flag_kernel;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::PIECES_MAX;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use zerocopy::{Immutable, IntoBytes};

/// Copies by words of 16 or 4 bytes where addresses and length allow, otherwise by bytes.
const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("copy_kernel.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the text contains a NUL"),
    };
/// Threads of a block.
const THREADS: u32 = 256;
/// Most bytes that a thread of the grid copies at a time.
const EACH: u64 = 16;
/// Most blocks of a copy: they take room from kernels of others.
const MOST_BLOCKS: u64 = 4;

/// The kernel, loaded on a device; its module is destroyed with the device's context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyKernel(CUfunction);

/// The kernel that copies pieces of managed memory, loaded on a device like [`CopyKernel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveKernel(CUfunction);

/// Parameters of [`MoveKernel`].
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub struct Moves {
    /// Address to, address from, bytes; multiples of [`Moves::UNIT`]. Unused ones have no bytes.
    pub pieces: [[u64; 3]; PIECES_MAX],
    /// Address of the word to be written behind the copies, or 0.
    pub flag: u64,
    /// The word.
    pub value: u32,
    /// Not a parameter.
    pub pad: u32,
}

impl Moves {
    /// Bytes of the units that the kernel copies, and of which all addresses are multiples.
    pub const UNIT: u64 = 16;
    /// Size of the parameters in bytes, without the structure's padding at the end.
    pub const PARAMS: usize = size_of::<Moves>() - size_of::<u32>();
    /// Most bytes for which the block is as fast as the copy engines: 64 threads copy a piece, and reads of host memory take
    /// a microsecond and more each.
    pub const MOST: u64 = 128 << 10;
}

impl MoveKernel {
    /// Threads of its only block.
    pub const THREADS: u32 = 512;

    /// The kernel.
    pub fn function(self) -> CUfunction {
        self.0
    }

    /// Launches it.
    ///
    /// # Errors
    /// Driver errors.
    pub fn launch(
        self,
        driver: &Driver,
        stream: CUstream,
        mut moves: Moves,
    ) -> Result<(), CUresult> {
        let mut size = Moves::PARAMS;
        let mut extra = packed((&raw mut moves).cast(), &mut size);
        let (none, extra) = (std::ptr::null_mut(), extra.as_mut_ptr());
        driver.launch_kernel(self.0, 1, 1, 1, Self::THREADS, 1, 1, 0, stream, none, extra)
    }
}

#[repr(C)]
struct Params {
    to: u64,
    from: u64,
    len: u64,
}

/// Loads both kernels into the current context, so that no later use has to load them.
///
/// # Errors
/// Driver errors, such as when they cannot compile.
pub fn load(driver: &Driver) -> Result<(CopyKernel, MoveKernel), CUresult> {
    let [copy, moves] = flag_kernel::load(driver, PTX, [c"mpsshim_copy", c"mpsshim_move"])?;
    Ok((CopyKernel(copy), MoveKernel(moves)))
}

impl CopyKernel {
    /// Most bytes for which it is as fast as the copy engines: few threads copy, and reads of host memory take a
    /// microsecond and more each.
    pub fn most(to: u64, from: u64, len: u64) -> u64 {
        match (to | from | len).trailing_zeros() {
            4.. => 64 << 10,
            2..4 => 16 << 10,
            _ => 4 << 10,
        }
    }

    /// Copies `len` bytes between addresses of the device, one of which may be of host memory.
    ///
    /// # Errors
    /// Driver errors.
    pub fn launch(
        self,
        driver: &Driver,
        stream: CUstream,
        (to, from, len): (u64, u64, u64),
    ) -> Result<(), CUresult> {
        let mut params = Params { to, from, len };
        let mut size = size_of::<Params>();
        let mut extra = packed((&raw mut params).cast(), &mut size);
        let (none, extra) = (std::ptr::null_mut(), extra.as_mut_ptr());
        let blocks = len.div_ceil(EACH * u64::from(THREADS));
        let blocks = blocks.clamp(1, MOST_BLOCKS) as u32;
        driver.launch_kernel(self.0, blocks, 1, 1, THREADS, 1, 1, 0, stream, none, extra)
    }
}

/// Copies of at least this many bytes between a device and host memory occupy a copy engine for long.
pub const LARGE: u64 = 1 << 20;
/// Bytes per microsecond of a copy engine (PCIe 4 x16: 25 GB/s).
const RATE: u64 = 25_000;
/// Most time for which the engines count as occupied, in nanoseconds. Copies in both directions at once, or over a faster
/// bus, take less than estimated; the error would add up while they go on.
const MOST_AHEAD: u64 = 1_000_000_000;

/// Estimate of how long the copy engines of a device are occupied by large copies.
#[derive(Debug, Default)]
pub struct LargeCopies {
    /// When they will have done the copies submitted so far, in nanoseconds; 0: no copy since that was last found to be
    /// over.
    until: AtomicU64,
    /// The session whose copies these are, or [`SEVERAL`].
    of: AtomicU64,
}

const SEVERAL: u64 = u64::MAX;

impl LargeCopies {
    /// Notes that a session submits a large copy. `now`: since any fixed time.
    pub fn note(&self, now: Duration, session: u64, bytes: u64) {
        let now = now.as_nanos() as u64;
        let until = self.until.load(Ordering::Relaxed);
        let of = match until > now && self.of.load(Ordering::Relaxed) != session {
            true => SEVERAL,
            false => session,
        };
        self.of.store(of, Ordering::Relaxed);
        let takes = bytes.saturating_mul(1_000) / RATE;
        let until = until.max(now).saturating_add(takes);
        let until = until.min(now.saturating_add(MOST_AHEAD));
        self.until.store(until, Ordering::Relaxed);
    }

    /// Whether large copies of other sessions occupy the engines. Reads the clock only if there has been a large copy.
    #[inline]
    pub fn are_in_flight_beside(&self, session: u64, now: impl FnOnce() -> Duration) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        if until == 0 || self.of.load(Ordering::Relaxed) == session {
            return false;
        }
        if until > now().as_nanos() as u64 {
            return true;
        }
        let relaxed = Ordering::Relaxed;
        let _ = self.until.compare_exchange(until, 0, relaxed, relaxed);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_estimate_is_bounded() {
        let copies = LargeCopies::default();
        for _ in 0..1_000 {
            copies.note(MS, 1, 1 << 30);
        }
        assert!(copies.are_in_flight_beside(2, || 1_000 * MS));
        assert!(!copies.are_in_flight_beside(2, || 1_001 * MS));
        copies.note(MS, 1, u64::MAX);
        assert!(!copies.are_in_flight_beside(2, || 1_001 * MS));
    }

    #[test]
    fn large_copies_of_others_occupy_the_engines_until_they_are_done() {
        let copies = LargeCopies::default();
        let clock = || panic!("the clock is not read");
        assert!(!copies.are_in_flight_beside(1, clock));
        // 2 ms each.
        copies.note(10 * MS, 1, 50_000_000);
        assert!(!copies.are_in_flight_beside(1, clock), "its own");
        assert!(copies.are_in_flight_beside(2, || 11 * MS));
        copies.note(11 * MS, 1, 50_000_000);
        assert!(copies.are_in_flight_beside(2, || 13 * MS));
        copies.note(13 * MS, 2, 50_000_000);
        assert!(copies.are_in_flight_beside(1, || 15 * MS));
        assert!(copies.are_in_flight_beside(2, || 15 * MS));
        assert!(!copies.are_in_flight_beside(2, || 16 * MS));
        assert!(!copies.are_in_flight_beside(1, clock), "all are done");
        copies.note(20 * MS, 2, 50_000_000);
        assert!(!copies.are_in_flight_beside(2, clock), "its own again");
    }
}
