//! Content of device memory that is in host memory, in pieces, and pinned memory kept for the next moves.
//!
//! A piece of zero bytes takes no host memory, so that memory which a program has allocated and never used costs nothing.
//! Where pinned memory is short, pieces go to an unnamed file in the directory that the operator has chosen.

use crate::engine::base::account::{Account, Memory};
use crate::engine::base::driver::Driver;
use crate::engine::base::rations::Holder;
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::host::{ArenaBlock, BegunBlock, HostArena, HostBlock};
use mpsshim_api::cuda::{CUresult, CUstream};
use parking_lot::Mutex;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of a piece; more if there would be over [`MOST_PIECES`]. The last piece may be shorter.
const PIECE: u64 = 64 << 20;
/// Most pieces of an allocation: each takes a descriptor of the server and of its keeper.
const MOST_PIECES: u64 = 256;
/// Bytes that are read from or written to a file at a time.
const CHUNK: u64 = 4 << 20;
/// Time without use after which memory is pinned; pinning delays launches of other sessions by milliseconds.
const RESTS: Duration = Duration::from_secs(1);
/// Time without use after which pinned memory is given back.
const KEEPS: Duration = Duration::from_secs(300);

/// Offsets and lengths of the pieces of device memory of `len` bytes.
pub fn ranges(len: u64) -> impl Iterator<Item = (u64, u64)> + Clone {
    let mut each = PIECE;
    while len.div_ceil(each) > MOST_PIECES {
        each *= 2;
    }
    (0..len.div_ceil(each)).map(move |number| {
        let at = number * each;
        (at, each.min(len - at))
    })
}

/// Place of a piece.
#[derive(Debug)]
pub enum Piece {
    /// All its bytes are zero.
    Zero,
    /// Pinned memory of the same length.
    Pinned(HostBlock),
    /// Host memory that is not pinned yet.
    Unpinned(BegunBlock),
    /// The file, at the piece's offset.
    Stored,
}

/// Content of device memory, in the pieces of [`ranges`].
#[derive(Debug)]
pub struct Content {
    /// Bytes of device memory.
    pub len: u64,
    /// The pieces.
    pub pieces: Vec<Piece>,
    /// The file of the pieces that are stored.
    pub file: Option<Store>,
}

impl Content {
    /// Addresses of the pieces in host memory.
    pub fn addresses(&self) -> impl Iterator<Item = u64> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Pinned(block) => Some(block.start()),
            Piece::Unpinned(block) => Some(block.start()),
            Piece::Zero | Piece::Stored => None,
        })
    }

    /// The host memory, whose content is not needed any more.
    pub fn into_pool(self, pool: &MovePool, uid: u32) {
        for piece in self.pieces {
            match piece {
                Piece::Pinned(block) => pool.pinned.put(uid, block),
                Piece::Unpinned(block) => pool.unpinned.put(uid, block),
                Piece::Zero | Piece::Stored => {}
            }
        }
    }

    /// The pinned memory of a session that has ended. Frees the rest.
    pub fn into_blocks(self, arena: &HostArena) -> impl Iterator<Item = HostBlock> {
        self.pieces.into_iter().filter_map(|piece| match piece {
            Piece::Pinned(block) => Some(block),
            Piece::Unpinned(block) => {
                arena.abandon(block);
                None
            }
            Piece::Zero | Piece::Stored => None,
        })
    }

    /// Pins the piece with this number, if it is in host memory and not pinned yet.
    ///
    /// # Errors
    /// Driver errors; the piece is then as it was.
    pub fn pin(
        &mut self,
        number: usize,
        (driver, device): (&Driver, &Device),
        arena: &HostArena,
    ) -> Result<(), CUresult> {
        let Some(piece) = self.pieces.get_mut(number) else {
            return Ok(());
        };
        let before = std::mem::replace(piece, Piece::Zero);
        *piece = match before {
            Piece::Unpinned(block) => match arena.pin(driver, device, block) {
                Ok(block) => Piece::Pinned(block),
                Err(refused) => {
                    let (block, status) = *refused;
                    *piece = Piece::Unpinned(block);
                    return Err(status);
                }
            },
            other => other,
        };
        Ok(())
    }

    /// Each piece as a number, from which [`Placed::of`] tells where it is.
    pub fn places(&self) -> Vec<u64> {
        let place = |piece: &Piece| match piece {
            Piece::Zero => Placed::ZERO,
            Piece::Stored => Placed::STORED,
            Piece::Pinned(block) => block.start(),
            Piece::Unpinned(block) => block.start(),
        };
        self.pieces.iter().map(place).collect()
    }
}

/// Where a piece is, as a description has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// Nowhere: all its bytes are zero.
    Zero,
    /// In the file.
    Stored,
    /// In pinned memory at this address.
    Pinned(u64),
}

impl Placed {
    const ZERO: u64 = 0;
    const STORED: u64 = 1;

    /// Reads a number of [`Content::places`].
    pub fn of(number: u64) -> Placed {
        match number {
            Placed::ZERO => Placed::Zero,
            Placed::STORED => Placed::Stored,
            address => Placed::Pinned(address),
        }
    }
}

/// Whether all bytes are zero; reads them up to the first other one.
pub fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: every bit pattern is a valid u64.
    let (before, words, after) = unsafe { bytes.align_to::<u64>() };
    let part = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    // Sums of many words are computed without a branch for each.
    let sums = words
        .chunks(512)
        .all(|some| some.iter().fold(0, |sum, word| sum | word) == 0);
    part(before) && part(after) && sums
}

/// An unnamed file that holds pieces of device memory. Its space is free again when it is closed in the server and the
/// keeper, however they end.
#[derive(Debug)]
pub struct Store(File);

impl Store {
    /// Creates a file for `len` bytes in a directory. It takes space for the parts that are written.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn new(directory: &Path, len: u64) -> io::Result<Store> {
        let file = tempfile::tempfile_in(directory)?;
        file.set_len(len)?;
        Ok(Store(file))
    }

    /// A file of an earlier server.
    pub fn adopt(fd: OwnedFd) -> Store {
        Store(File::from(fd))
    }

    /// Writes a piece of device memory. Zero bytes take no space.
    ///
    /// # Errors
    /// Driver errors, or an error of the file system.
    pub fn write(
        &self,
        (driver, stream): (&Driver, CUstream),
        start: u64,
        (at, len): (u64, u64),
    ) -> Result<(), Failure> {
        let mut chunk = vec![0; CHUNK.min(len) as usize];
        let end = at + len;
        for at in (at..end).step_by(CHUNK as usize) {
            let part = &mut chunk[..CHUNK.min(end - at) as usize];
            let host = part.as_mut_ptr() as u64;
            driver.memcpy_dtoh_async(host, start + at, part.len(), stream)?;
            driver.stream_synchronize(stream)?;
            if !is_zero(part) {
                self.0.write_all_at(part, at)?;
            }
        }
        Ok(())
    }

    /// Reads a piece back into device memory.
    ///
    /// # Errors
    /// Driver errors, or an error of the file system.
    pub fn read(
        &self,
        (driver, stream): (&Driver, CUstream),
        start: u64,
        (at, len): (u64, u64),
    ) -> Result<(), Failure> {
        let mut chunk = vec![0; CHUNK.min(len) as usize];
        let end = at + len;
        for at in (at..end).step_by(CHUNK as usize) {
            let part = &mut chunk[..CHUNK.min(end - at) as usize];
            self.0.read_exact_at(part, at)?;
            let host = part.as_ptr() as u64;
            driver.memcpy_htod_async(start + at, host, part.len(), stream)?;
            driver.stream_synchronize(stream)?;
        }
        Ok(())
    }
}

impl AsFd for Store {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Reason why a piece was not moved.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// An error of the driver.
    #[error("{0}")]
    Driver(CUresult),
    /// An error of the file system.
    #[error("{0}")]
    File(#[from] io::Error),
}

impl From<CUresult> for Failure {
    fn from(status: CUresult) -> Failure {
        Failure::Driver(status)
    }
}

/// Host memory without content that moves of the same user take before they allocate more.
#[derive(Debug)]
pub struct MovePool {
    /// Pinned memory.
    pub pinned: Shelf<HostBlock>,
    /// Memory that is not pinned yet.
    pub unpinned: Shelf<BegunBlock>,
}

/// Blocks of one kind, with their users.
#[derive(Debug)]
pub struct Shelf<T>(Mutex<Vec<Kept<T>>>);

#[derive(Debug)]
struct Kept<T> {
    uid: u32,
    block: T,
    since: Instant,
}

impl<T: ArenaBlock> Shelf<T> {
    fn new() -> Shelf<T> {
        Shelf(Mutex::new(Vec::new()))
    }

    /// Keeps a block, whose content is not needed any more.
    pub fn put(&self, uid: u32, mut block: T) {
        let (host, pin, _) = block.dues();
        *host = None;
        pin.set_idle(true);
        let since = Instant::now();
        self.0.lock().push(Kept { uid, block, since });
    }

    /// A block of exactly `len` bytes, with any content, for a session of this user. `None` also if the session may not have
    /// so much.
    pub fn take(&self, (account, holder, uid): (&Account, &Holder, u32), len: u64) -> Option<T> {
        let charge = account.take(Memory::Host, len).ok()?;
        let mut kept = self.0.lock();
        let fits = |kept: &Kept<T>| kept.uid == uid && kept.block.size() == len;
        let at = kept.iter().rposition(fits)?;
        let mut block = kept.remove(at).block;
        let (host, pin, place) = block.dues();
        *host = Some(charge);
        pin.set_idle(false);
        place.pass_to(holder);
        Some(block)
    }

    /// Removes the oldest block that has been kept for this time.
    fn take_rested(&self, time: Duration) -> Option<(u32, T)> {
        let mut kept = self.0.lock();
        let at = kept.iter().position(|kept| kept.since.elapsed() > time)?;
        let kept = kept.remove(at);
        Some((kept.uid, kept.block))
    }

    fn take_if(&self, mut is_meant: impl FnMut(&Kept<T>) -> bool) -> Vec<(u32, T)> {
        let mut kept = self.0.lock();
        let taken = kept.extract_if(.., |kept| is_meant(kept));
        taken.map(|kept| (kept.uid, kept.block)).collect()
    }

    /// Whether it has no block.
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}

impl MovePool {
    /// An empty pool.
    pub fn new() -> MovePool {
        MovePool {
            pinned: Shelf::new(),
            unpinned: Shelf::new(),
        }
    }

    /// Pins a block that no move has used lately, for the next one.
    pub fn pin_one(&self, (driver, device): (&Driver, &Device), arena: &HostArena) {
        let Some((uid, block)) = self.unpinned.take_rested(RESTS) else {
            return;
        };
        match arena.pin(driver, device, block) {
            Ok(block) => self.pinned.put(uid, block),
            Err(refused) => {
                let (block, status) = *refused;
                tracing::debug!(%status, "memory for moves is not pinned");
                arena.abandon(block);
            }
        }
    }

    /// Removes the pinned blocks that have been kept for long enough.
    pub fn take_old(&self) -> Vec<(u32, HostBlock)> {
        self.pinned.take_if(|kept| kept.since.elapsed() > KEEPS)
    }

    /// Removes blocks of a user until `most` bytes or fewer are left. Unpinned ones are freed.
    pub fn take_beyond(&self, uid: u32, most: u64, arena: &HostArena) -> Vec<(u32, HostBlock)> {
        let mut left = 0;
        let mut is_surplus = |of: u32, len: u64| {
            let is_surplus = of == uid && left + len > most;
            left += if of == uid && !is_surplus { len } else { 0 };
            is_surplus
        };
        let pinned = (self.pinned).take_if(|kept| is_surplus(kept.uid, kept.block.len()));
        let unpinned = (self.unpinned).take_if(|kept| is_surplus(kept.uid, kept.block.len()));
        free(unpinned, arena);
        pinned
    }

    /// Removes all blocks. Unpinned ones are freed.
    pub fn take_all(&self, arena: &HostArena) -> Vec<(u32, HostBlock)> {
        free(self.unpinned.take_if(|_| true), arena);
        self.pinned.take_if(|_| true)
    }

    /// Whether it has no block.
    pub fn is_empty(&self) -> bool {
        self.pinned.is_empty() && self.unpinned.is_empty()
    }
}

fn free(blocks: Vec<(u32, BegunBlock)>, arena: &HostArena) {
    let blocks = blocks.into_iter();
    blocks.for_each(|(_, block)| arena.abandon(block));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_memory_and_are_not_too_many() {
        for len in [
            2 << 20,
            PIECE,
            PIECE + (2 << 20),
            MOST_PIECES * PIECE,
            60 << 30,
            1 << 40,
        ] {
            let pieces: Vec<_> = ranges(len).collect();
            assert!(pieces.len() as u64 <= MOST_PIECES, "{len}");
            let mut end = 0;
            for (at, part) in pieces {
                assert!(at == end && part > 0);
                end = at + part;
            }
            assert_eq!(end, len);
        }
    }

    #[test]
    fn a_byte_that_is_not_zero_is_found_anywhere() {
        let mut bytes = vec![0u8; 10_000];
        for (from, to) in [(0, 10_000), (1, 9_999), (3, 20), (5, 5)] {
            assert!(is_zero(&bytes[from..to]));
        }
        for at in [0, 1, 7, 8, 4_095, 4_096, 9_992, 9_999] {
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "{at}");
            bytes[at] = 0;
        }
    }

    #[test]
    fn places_are_told_apart() {
        for placed in [Placed::ZERO, Placed::STORED, 1 << 40] {
            let expected = match placed {
                0 => Placed::Zero,
                1 => Placed::Stored,
                address => Placed::Pinned(address),
            };
            assert_eq!(Placed::of(placed), expected);
        }
    }
}
