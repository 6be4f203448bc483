//! A grant of managed memory: where each piece of it is valid, without system calls.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a piece of a small region. With fewer, a fault fetches less than the bus transfers in the time that the fault
/// takes.
pub const PIECE: u64 = 64 << 10;
/// Most pieces of a region. Pieces with different protection are different mappings for the kernel, of which a process may
/// have 65,530.
const MOST_PIECES: u64 = 2048;
/// Bytes of host memory that are allocated at a time, behind a part of the region; more if a piece has more.
const CHUNK: u64 = 32 << 20;

/// Where a piece is valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Home {
    /// Nothing was written to it.
    Nowhere,
    /// On the device.
    Device,
    /// On the device and in the host's pages, which are protected against writing.
    Both,
    /// In the host's pages.
    Host,
    /// On the device, which may be changing it. The host's pages are an older copy; they are protected against
    /// writing.
    Copy,
    /// As `Copy`, and the host writes to its pages. [`Region::twins`] has their content before.
    Written,
    /// On the device, and some of it in the host's pages too ([`Region::open`]).
    Pages,
}

impl Home {
    /// Whether the host may access its pages without a fault.
    pub fn permits(self, write: bool) -> bool {
        match self {
            Home::Nowhere | Home::Device | Home::Pages => false,
            Home::Both | Home::Copy => !write,
            Home::Host | Home::Written => true,
        }
    }

    /// Whether the device may be changing it while the host has a copy.
    pub fn is_provisional(self) -> bool {
        matches!(self, Home::Copy | Home::Written)
    }
}

/// Pages of a piece that the host can access without a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Open {
    /// Address of the first.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// The host's content is the later one.
    pub written: bool,
}

/// A grant of managed memory.
#[derive(Debug)]
pub struct Region {
    /// First address, for the host and the device.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Bytes of a piece.
    pub piece: u64,
    /// Bytes of a chunk.
    chunk: u64,
    /// One for each piece.
    homes: Vec<Home>,
    /// How many are [`Home::Device`].
    on_device: usize,
    /// Content of the host's pages before the host wrote to them, by piece.
    pub twins: BTreeMap<usize, Box<[u8]>>,
    /// The accessible pages of each piece that is [`Home::Pages`].
    pub open: BTreeMap<usize, Open>,
    /// Address in the host arena of the pages behind each chunk, once there are some.
    pub chunks: Vec<Option<u64>>,
    /// Launches of the process when the region, or all of its content, was new.
    pub born: u64,
    /// It is among the regions that launches look at.
    pub attended: bool,
    /// It is host memory for the host and the device.
    pub shared: bool,
    /// The piece behind the last ones that were fetched, and how many pieces to fetch if that is the next to be used.
    ahead: (usize, usize),
}

impl Region {
    /// A region without content.
    pub fn new(start: u64, len: u64, born: u64) -> Region {
        let piece = (len / MOST_PIECES).next_power_of_two().max(PIECE);
        let (pieces, chunk) = (len.div_ceil(piece) as usize, CHUNK.max(piece));
        Region {
            start,
            len,
            piece,
            chunk,
            homes: vec![Home::Nowhere; pieces],
            on_device: 0,
            twins: BTreeMap::new(),
            open: BTreeMap::new(),
            chunks: vec![None; len.div_ceil(chunk) as usize],
            born,
            attended: false,
            shared: false,
            ahead: (usize::MAX, 1),
        }
    }

    /// Whether an address lies in it.
    pub fn contains(&self, address: u64) -> bool {
        address >= self.start && address - self.start < self.len
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> usize {
        self.homes.len()
    }

    /// The piece of an address.
    pub fn piece_of(&self, address: u64) -> usize {
        ((address - self.start) / self.piece) as usize
    }

    /// The chunk of a piece.
    pub fn chunk_of(&self, piece: usize) -> usize {
        (piece as u64 * self.piece / self.chunk) as usize
    }

    /// Address and bytes of pieces.
    pub fn addresses(&self, pieces: &Range<usize>) -> (u64, u64) {
        let first = pieces.start as u64 * self.piece;
        let end = (pieces.end as u64 * self.piece).min(self.len);
        (self.start + first, end - first)
    }

    /// Address and bytes of a chunk.
    pub fn chunk(&self, chunk: usize) -> (u64, u64) {
        let first = chunk as u64 * self.chunk;
        (self.start + first, self.chunk.min(self.len - first))
    }

    /// The address in the host arena of the same bytes. All of them lie in one chunk, which has host memory.
    pub fn host(&self, address: u64) -> Option<u64> {
        let at = address - self.start;
        let chunk = self.chunks[(at / self.chunk) as usize]?;
        Some(chunk + at % self.chunk)
    }

    /// Address and bytes of the host's pages of all chunks that have some.
    pub fn furnished(&self) -> Vec<(u64, u64)> {
        let of = |(chunk, host): (usize, &Option<u64>)| Some(((*host)?, self.chunk(chunk).1));
        self.chunks.iter().enumerate().filter_map(of).collect()
    }

    /// Where a piece is valid.
    pub fn home(&self, piece: usize) -> Home {
        self.homes[piece]
    }

    /// End of the bytes from `address` on, in one piece, that the host can access without a fault; `None` if `address` itself
    /// is a fault.
    pub fn accessible(&self, address: u64, write: bool) -> Option<u64> {
        let piece = self.piece_of(address);
        if let Some(open) = self.open.get(&piece) {
            let inside = (open.start..open.start + open.len).contains(&address);
            return (inside && (open.written || !write)).then_some(open.start + open.len);
        }
        let (first, len) = self.addresses(&(piece..piece + 1));
        self.homes[piece].permits(write).then_some(first + len)
    }

    /// Whether the device has all that is valid.
    pub fn is_on_device(&self) -> bool {
        self.on_device == self.homes.len()
    }

    /// Whether pieces are provisional.
    pub fn provisional(&self) -> usize {
        self.homes
            .iter()
            .filter(|home| home.is_provisional())
            .count()
    }

    /// Says where pieces are valid.
    pub fn set(&mut self, pieces: Range<usize>, home: Home) {
        for piece in pieces {
            if home != Home::Pages {
                self.open.remove(&piece);
            }
            self.on_device -= usize::from(self.homes[piece] == Home::Device);
            self.homes[piece] = home;
            self.on_device += usize::from(home == Home::Device);
        }
    }

    /// It is host memory from now on. It was all on the device.
    pub fn share(&mut self) {
        self.shared = true;
        self.set(0..self.homes.len(), Home::Host);
    }

    /// Runs of pieces with the same home in one chunk.
    pub fn runs(&self) -> Vec<(Range<usize>, Home)> {
        let mut runs: Vec<(Range<usize>, Home)> = Vec::new();
        for (piece, home) in self.homes.iter().copied().enumerate() {
            match runs.last_mut() {
                Some((run, of))
                    if *of == home && self.chunk_of(run.start) == self.chunk_of(piece) =>
                {
                    run.end = piece + 1;
                }
                _ => runs.push((piece..piece + 1, home)),
            }
        }
        runs
    }

    /// As [`Region::runs`], of these pieces only.
    pub fn runs_in(&self, pieces: &Range<usize>) -> Vec<(Range<usize>, Home)> {
        let clip = |(run, home): (Range<usize>, Home)| {
            let run = run.start.max(pieces.start)..run.end.min(pieces.end);
            (!run.is_empty()).then_some((run, home))
        };
        self.runs().into_iter().filter_map(clip).collect()
    }

    /// The pieces before `piece`, which were used in order, if that is the third to fault.
    pub fn scanned(&self, piece: usize) -> Option<Range<usize>> {
        let (next, count) = self.ahead;
        (piece == next && count >= 2).then(|| piece.saturating_sub(3)..piece)
    }

    /// The pieces to fetch for a fault in `piece`: more, the longer pieces were used in order.
    pub fn wanted(&mut self, piece: usize) -> Range<usize> {
        let (next, count) = self.ahead;
        let count = match piece == next {
            true => count * 2,
            false => 1,
        };
        let (home, chunk) = (self.homes[piece], self.chunk_of(piece));
        let mut end = piece + 1;
        while end < self.homes.len()
            && end - piece < count
            && self.homes[end] == home
            && self.chunk_of(end) == chunk
        {
            end += 1;
        }
        self.ahead = (end, count.min((self.chunk / self.piece) as usize));
        piece..end
    }

    /// The next faults are expected at `piece` and those behind it, all of `pieces`.
    pub fn expect(&mut self, pieces: Range<usize>) {
        self.ahead = (pieces.start, (pieces.len() / 2).max(1));
    }
}

/// Ranges of bytes that differ.
pub fn differences(before: &[u8], now: &[u8]) -> Vec<Range<usize>> {
    const WORD: usize = 64;
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for at in (0..now.len()).step_by(WORD) {
        let end = (at + WORD).min(now.len());
        if before[at..end] == now[at..end] {
            continue;
        }
        for byte in at..end {
            if before[byte] == now[byte] {
                continue;
            }
            match ranges.last_mut() {
                Some(range) if range.end == byte => range.end += 1,
                _ => ranges.push(byte..byte + 1),
            }
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 0x2cc0_0000_0000;

    #[test]
    fn pieces_cover_a_region_of_any_size() {
        for (len, piece, pieces) in [
            (2 << 20, 64 << 10, 32),
            (1 << 30, 512 << 10, 2048),
            ((1 << 30) + (2 << 20), 1 << 20, 1026),
            (12 << 30, 8 << 20, 1536),
            (128 << 30, 64 << 20, 2048),
        ] {
            let region = Region::new(START, len, 0);
            assert_eq!((region.piece, region.homes.len()), (piece, pieces), "{len}");
            let (first, bytes) = region.addresses(&(0..pieces));
            assert_eq!((first, bytes), (START, len));
            let last = region.piece_of(START + len - 1);
            assert_eq!(last, pieces - 1);
            assert!(region.contains(START + len - 1) && !region.contains(START + len));
            let (chunk, bytes) = region.chunk(region.chunks.len() - 1);
            assert_eq!(chunk + bytes, START + len);
        }
    }

    #[test]
    fn runs_end_where_the_home_changes_and_at_chunks() {
        let mut region = Region::new(START, 64 << 20, 0);
        region.set(0..1024, Home::Device);
        region.set(3..5, Home::Host);
        assert_eq!(
            region.runs(),
            [
                (0..3, Home::Device),
                (3..5, Home::Host),
                (5..512, Home::Device),
                (512..1024, Home::Device),
            ]
        );
        assert_eq!(
            region.runs_in(&(4..600)),
            [
                (4..5, Home::Host),
                (5..512, Home::Device),
                (512..600, Home::Device),
            ]
        );
        assert!(!region.is_on_device());
        region.set(3..5, Home::Device);
        assert!(region.is_on_device());
    }

    #[test]
    fn pieces_used_in_order_are_fetched_ahead() {
        let mut region = Region::new(START, 64 << 20, 0);
        region.set(0..1024, Home::Device);
        let mut fetched = Vec::new();
        let mut piece = 0;
        while piece < 1024 {
            let run = region.wanted(piece);
            assert_eq!(run.start, piece);
            fetched.push(run.len());
            piece = run.end;
        }
        assert_eq!(fetched[..9], [1, 2, 4, 8, 16, 32, 64, 128, 256]);
        assert_eq!(fetched.iter().sum::<usize>(), 1024);
        assert_eq!(region.wanted(100).len(), 1, "not in order");
        assert_eq!(region.scanned(101), None);
        assert_eq!(region.wanted(101).len(), 2);
        assert_eq!(region.scanned(103), Some(100..103));
        region.expect(200..300);
        assert_eq!(region.wanted(200).len(), 100);
    }

    #[test]
    fn pieces_of_another_home_are_not_fetched() {
        let mut region = Region::new(START, 2 << 20, 0);
        region.set(0..32, Home::Device);
        region.set(3..4, Home::Host);
        region.expect(1..32);
        assert_eq!(region.wanted(1), 1..3);
    }

    #[test]
    fn open_pages_are_accessible_until_the_piece_has_another_home() {
        let mut region = Region::new(START, 2 << 20, 0);
        region.set(0..32, Home::Device);
        let first = START + 3 * PIECE;
        let open = Open {
            start: first + 8192,
            len: 4096,
            written: false,
        };
        region.open.insert(3, open);
        region.set(3..4, Home::Pages);
        assert!(!region.is_on_device());
        assert_eq!(region.accessible(first, false), None);
        assert_eq!(region.accessible(first + 8200, false), Some(first + 12288));
        assert_eq!(region.accessible(first + 8200, true), None);
        assert_eq!(region.accessible(first + 12288, false), None);
        region.set(3..4, Home::Both);
        assert_eq!(region.accessible(first, false), Some(first + PIECE));
        assert_eq!(region.accessible(first, true), None);
        assert!(region.open.is_empty());
    }

    #[test]
    fn differences_are_exact() {
        let before: Vec<u8> = (0..=255).cycle().take(1000).collect();
        let mut now = before.clone();
        assert!(differences(&before, &now).is_empty());
        for at in [0, 63, 64, 65, 500, 999] {
            now[at] ^= 1;
        }
        assert_eq!(
            differences(&before, &now),
            [0..1, 63..66, 500..501, 999..1000]
        );
    }
}
