//! The allocator that divides granted memory into the program's blocks.
//!
//! Small blocks come from slabs, so that allocating and freeing them needs no message; each larger one has a grant of
//! its own. A bounded amount of freed memory is kept for later requests. The same code divides device memory and pinned
//! host memory.

use std::collections::{BTreeMap, BTreeSet};

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUresult};

use crate::ffi::Status;

/// Where grants come from and go back to.
pub trait Source {
    /// At least `len` bytes: address and length.
    fn grant(&mut self, len: u64) -> Result<(u64, u64), CUresult>;
    /// A grant is not used any more.
    fn release(&mut self, start: u64, len: u64);
}

/// Blocks start at and are rounded up to multiples of this many bytes.
const GRAIN: u64 = 512;
/// Bytes of the largest block that comes from a slab.
const SMALL: u64 = 1 << 20;
/// Bytes of the smallest block that has a grant of its own.
pub const OWN_GRANT: u64 = SMALL + 1;
/// Bytes of the first slabs, and of those after [`FIRST_SLABS`].
const SLAB: u64 = 2 << 20;
const LATER_SLAB: u64 = 16 << 20;
const FIRST_SLABS: usize = 8;
/// Bytes of large grants kept after they were freed.
const KEPT: u64 = 64 << 20;

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Bytes asked for.
    pub len: u64,
    /// Bytes taken.
    room: u64,
    /// Start of the slab it is in; itself when it has a grant of its own.
    grant: u64,
    /// Handle of the context it was allocated in.
    pub owner: u64,
    /// Unique in the life of the process.
    pub id: u64,
    /// The caller's flags.
    pub flags: u32,
}

#[derive(Debug)]
struct Slab {
    len: u64,
    used: u64,
}

/// Part of a slab that is no block.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: u64,
    len: u64,
    slab: u64,
}

/// Blocks and free memory of one source.
#[derive(Debug)]
pub struct Pool {
    /// Large grants are rounded up to a multiple of this.
    round: u64,
    slabs: BTreeMap<u64, Slab>,
    /// Free pieces of slabs: start to length and slab.
    free: BTreeMap<u64, (u64, u64)>,
    by_len: BTreeSet<(u64, u64)>,
    /// The piece freed last. It is not among the free ones, and its slab counts it as used. Reused for the next request of
    /// the same size, since programs often free and allocate in turns.
    last: Option<Piece>,
    kept: BTreeSet<(u64, u64)>,
    kept_bytes: u64,
    live: BTreeMap<u64, Block>,
    next_id: u64,
}

fn round_up(len: u64, to: u64) -> Option<u64> {
    Some(len.checked_add(to - 1)? / to * to)
}

impl Pool {
    /// An empty pool, whose blocks are numbered from `first_id` on.
    pub const fn new(round: u64, first_id: u64) -> Pool {
        Pool {
            round,
            slabs: BTreeMap::new(),
            free: BTreeMap::new(),
            by_len: BTreeSet::new(),
            last: None,
            kept: BTreeSet::new(),
            kept_bytes: 0,
            live: BTreeMap::new(),
            next_id: first_id,
        }
    }

    /// Allocates `len` bytes.
    pub fn alloc(
        &mut self,
        len: u64,
        owner: u64,
        flags: u32,
        source: &mut dyn Source,
    ) -> Status<u64> {
        if len == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (start, room, grant) = if len <= SMALL {
            self.carve(len.div_ceil(GRAIN) * GRAIN, source)?
        } else {
            let room = round_up(len, self.round).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            let (start, room) = self
                .take_kept(room)
                .map_or_else(|| self.grant(room, source), Ok)?;
            (start, room, start)
        };
        let id = self.next_id;
        self.next_id += 1;
        self.live.insert(
            start,
            Block {
                len,
                room,
                grant,
                owner,
                id,
                flags,
            },
        );
        Ok(start)
    }

    fn carve(&mut self, room: u64, source: &mut dyn Source) -> Status<(u64, u64, u64)> {
        if let Some(Piece { start, slab, .. }) = self.last.take_if(|last| last.len == room) {
            return Ok((start, room, slab));
        }
        let fitting = |pool: &Pool| pool.by_len.range((room, 0)..).next().copied();
        let found = fitting(self).or_else(|| {
            // With its neighbours it may be large enough.
            self.put_back_last(source);
            fitting(self)
        });
        let (len, start) = match found {
            Some(piece) => piece,
            None => {
                let wanted = if self.slabs.len() < FIRST_SLABS {
                    SLAB
                } else {
                    LATER_SLAB
                };
                let (start, len) = match self.grant(wanted, source) {
                    Err(CUDA_ERROR_OUT_OF_MEMORY) if wanted > SLAB => self.grant(SLAB, source)?,
                    other => other?,
                };
                self.slabs.insert(start, Slab { len, used: 0 });
                self.put_free(start, len, start);
                (len, start)
            }
        };
        let slab = self.take_free(start, len);
        if len > room {
            self.put_free(start + room, len - room, slab);
        }
        if let Some(slab) = self.slabs.get_mut(&slab) {
            slab.used += room;
        }
        Ok((start, room, slab))
    }

    fn put_free(&mut self, start: u64, len: u64, slab: u64) {
        self.free.insert(start, (len, slab));
        self.by_len.insert((len, start));
    }

    fn take_free(&mut self, start: u64, len: u64) -> u64 {
        self.by_len.remove(&(len, start));
        self.free.remove(&start).map_or(start, |(_, slab)| slab)
    }

    /// A kept grant that fits without much waste.
    fn take_kept(&mut self, room: u64) -> Option<(u64, u64)> {
        let (len, start) = self.kept.range((room, 0)..).next().copied()?;
        if len - room > room / 8 {
            return None;
        }
        self.kept.remove(&(len, start));
        self.kept_bytes -= len;
        Some((start, len))
    }

    fn grant(&mut self, len: u64, source: &mut dyn Source) -> Status<(u64, u64)> {
        match source.grant(len) {
            Err(CUDA_ERROR_OUT_OF_MEMORY) if self.give_back_all(source) => source.grant(len),
            other => other,
        }
    }

    /// Returns all unused memory to the source. Returns whether there was any.
    pub fn give_back_all(&mut self, source: &mut dyn Source) -> bool {
        self.put_back_last(source);
        let mut any = false;
        for (len, start) in std::mem::take(&mut self.kept) {
            source.release(start, len);
            any = true;
        }
        self.kept_bytes = 0;
        let empty: Vec<u64> = self.empty_slabs().collect();
        for start in empty {
            self.release_slab(start, source);
            any = true;
        }
        any
    }

    fn empty_slabs(&self) -> impl Iterator<Item = u64> {
        self.slabs
            .iter()
            .filter(|(_, slab)| slab.used == 0)
            .map(|(start, _)| *start)
    }

    fn release_slab(&mut self, start: u64, source: &mut dyn Source) {
        if let Some(slab) = self.slabs.remove(&start) {
            self.take_free(start, slab.len);
            source.release(start, slab.len);
        }
    }

    /// Frees the block that begins at `start`.
    pub fn free(&mut self, start: u64, source: &mut dyn Source) -> Status<Block> {
        let block = self.live.remove(&start).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if block.grant == start && !self.slabs.contains_key(&start) {
            if self.kept_bytes + block.room <= KEPT {
                self.kept.insert((block.room, start));
                self.kept_bytes += block.room;
            } else {
                source.release(start, block.room);
            }
            return Ok(block);
        }
        self.put_back_last(source);
        let piece = Piece {
            start,
            len: block.room,
            slab: block.grant,
        };
        let slab = self.slabs.get(&piece.slab);
        let alone = slab.is_some_and(|slab| slab.used == piece.len);
        if alone && self.empty_slabs().next().is_some() {
            self.put_back(piece, source);
        } else {
            self.last = Some(piece);
        }
        Ok(block)
    }

    /// The piece that was freed last becomes one of the free ones.
    fn put_back_last(&mut self, source: &mut dyn Source) {
        if let Some(last) = self.last.take() {
            self.put_back(last, source);
        }
    }

    /// Makes a piece one of the free ones, together with its neighbours.
    fn put_back(&mut self, piece: Piece, source: &mut dyn Source) {
        let (mut from, mut len) = (piece.start, piece.len);
        let before = self.free.range(..from).next_back();
        if let Some((&at, &(before, slab))) = before
            && at + before == from
            && slab == piece.slab
        {
            self.take_free(at, before);
            (from, len) = (at, len + before);
        }
        if let Some(&(after, slab)) = self.free.get(&(from + len))
            && slab == piece.slab
        {
            self.take_free(from + len, after);
            len += after;
        }
        self.put_free(from, len, piece.slab);
        if let Some(slab) = self.slabs.get_mut(&piece.slab) {
            slab.used -= piece.len;
            // One empty slab stays for the next request.
            if slab.used == 0 && self.empty_slabs().count() > 1 {
                self.release_slab(piece.slab, source);
            }
        }
    }

    /// Frees all blocks of a context.
    pub fn free_owned(&mut self, owner: u64, source: &mut dyn Source) {
        let owned: Vec<u64> = self
            .live
            .iter()
            .filter(|(_, block)| block.owner == owner)
            .map(|(start, _)| *start)
            .collect();
        for start in owned {
            let _ = self.free(start, source);
        }
    }

    /// Hands the block that begins at `start` to another owner.
    pub fn set_owner(&mut self, start: u64, owner: u64) {
        if let Some(block) = self.live.get_mut(&start) {
            block.owner = owner;
        }
    }

    /// The block that contains an address.
    #[inline]
    pub fn find(&self, address: u64) -> Option<(u64, Block)> {
        let (start, block) = self.live.range(..=address).next_back()?;
        (address - start < block.len).then_some((*start, *block))
    }

    /// Whether the block that begins at an address has a grant of its own.
    pub fn has_own_grant(&self, start: u64) -> bool {
        self.live
            .get(&start)
            .is_some_and(|block| block.grant == start)
            && !self.slabs.contains_key(&start)
    }

    /// Whether `[address, address + len)` lies inside one block.
    #[inline]
    pub fn contains(&self, address: u64, len: u64) -> bool {
        self.find(address)
            .is_some_and(|(start, block)| len <= block.len - (address - start))
    }

    /// Bytes granted that are unused.
    pub fn unused(&self) -> u64 {
        let last = self.last.map_or(0, |last| last.len);
        self.kept_bytes + last + self.free.values().map(|(len, _)| len).sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[derive(Default)]
    struct Fake {
        next: u64,
        granted: BTreeMap<u64, u64>,
        grants: usize,
        limit: Option<u64>,
    }

    impl Source for Fake {
        fn grant(&mut self, len: u64) -> Result<(u64, u64), CUresult> {
            let len = round_up(len, 2 << 20).unwrap();
            let total: u64 = self.granted.values().sum();
            if self.limit.is_some_and(|limit| total + len > limit) {
                return Err(CUDA_ERROR_OUT_OF_MEMORY);
            }
            self.grants += 1;
            // Grants touch, so that a merge across two of them would show.
            let start = (1 << 40) + self.next;
            self.next += len;
            self.granted.insert(start, len);
            Ok((start, len))
        }
        fn release(&mut self, start: u64, len: u64) {
            assert_eq!(self.granted.remove(&start), Some(len));
        }
    }

    proptest! {
        /// Live blocks never overlap, lie inside a grant, and everything can be given back in the end.
        #[test]
        fn blocks_are_disjoint(sizes in prop::collection::vec((1u64..5 << 20, any::<u8>()), 1..120)) {
            let (mut pool, mut source) = (Pool::new(2 << 20, 1), Fake::default());
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (size, choice) in sizes {
                let size = if choice % 3 == 0 { size } else { size % 70_000 + 1 };
                let start = pool.alloc(size, 1, 0, &mut source).unwrap();
                prop_assert!(start.is_multiple_of(GRAIN));
                prop_assert!(live.iter().all(|(s, l)| start + size <= *s || s + l <= start));
                let (grant, len) = source.granted.range(..=start).next_back().unwrap();
                prop_assert!(start + size <= grant + len);
                prop_assert!(pool.contains(start, size) && !pool.contains(start, size + 1));
                live.push((start, size));
                if choice % 2 == 0 {
                    let (start, _) = live.swap_remove(choice as usize % live.len());
                    pool.free(start, &mut source).unwrap();
                    prop_assert!(pool.find(start).is_none_or(|(other, _)| other != start));
                }
            }
            for (start, _) in live {
                pool.free(start, &mut source).unwrap();
            }
            pool.give_back_all(&mut source);
            prop_assert!(source.granted.is_empty());
            prop_assert_eq!(pool.unused(), 0);
        }
    }

    #[test]
    fn a_megabyte_in_a_loop_needs_one_grant() {
        let (mut pool, mut source) = (Pool::new(2 << 20, 1), Fake::default());
        for _ in 0..100 {
            let start = pool.alloc(1 << 20, 1, 0, &mut source).unwrap();
            pool.free(start, &mut source).unwrap();
        }
        for _ in 0..100 {
            let start = pool.alloc(9 << 20, 1, 0, &mut source).unwrap();
            pool.free(start, &mut source).unwrap();
        }
        assert_eq!(source.grants, 2);
    }

    #[test]
    fn what_was_freed_last_is_given_to_who_wants_as_much() {
        let (mut pool, mut source) = (Pool::new(2 << 20, 1), Fake::default());
        let blocks = [5000, 70_000, 5000].map(|len| pool.alloc(len, 1, 0, &mut source).unwrap());
        pool.free(blocks[0], &mut source).unwrap();
        pool.free(blocks[1], &mut source).unwrap();
        assert_eq!(pool.alloc(69_990, 2, 0, &mut source), Ok(blocks[1]));
        let (_, block) = pool.find(blocks[1]).unwrap();
        assert_eq!((block.len, block.owner), (69_990, 2));
        assert_eq!(pool.alloc(5000, 1, 0, &mut source), Ok(blocks[0]));
    }

    #[test]
    fn what_was_freed_last_is_put_together_with_its_neighbours() {
        let (mut pool, mut source) = (Pool::new(2 << 20, 1), Fake::default());
        let halves = [1 << 20; 2].map(|len| pool.alloc(len, 1, 0, &mut source).unwrap());
        for half in halves {
            pool.free(half, &mut source).unwrap();
        }
        assert_eq!(pool.unused(), 2 << 20);
        for len in [600 << 10; 3] {
            pool.alloc(len, 1, 0, &mut source).unwrap();
        }
        assert_eq!(source.grants, 1);
    }

    #[test]
    fn one_empty_slab_stays_at_most() {
        let (mut pool, mut source) = (Pool::new(2 << 20, 1), Fake::default());
        let blocks: Vec<u64> = (0..40)
            .map(|_| pool.alloc(1 << 20, 1, 0, &mut source).unwrap())
            .collect();
        for block in blocks {
            pool.free(block, &mut source).unwrap();
        }
        assert_eq!(source.granted.len(), 1, "{pool:?}");
    }

    #[test]
    fn what_is_kept_goes_back_before_memory_is_out() {
        let mut source = Fake {
            limit: Some(64 << 20),
            ..Fake::default()
        };
        let mut pool = Pool::new(2 << 20, 1);
        let first = pool.alloc(48 << 20, 1, 0, &mut source).unwrap();
        pool.free(first, &mut source).unwrap();
        let second = pool.alloc(60 << 20, 1, 0, &mut source).unwrap();
        assert_eq!(
            pool.alloc(60 << 20, 1, 0, &mut source),
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        );
        pool.free(second, &mut source).unwrap();
    }

    #[test]
    fn wrong_requests_are_refused() {
        let (mut pool, mut source) = (Pool::new(2 << 20, 1), Fake::default());
        assert_eq!(
            pool.alloc(0, 1, 0, &mut source),
            Err(CUDA_ERROR_INVALID_VALUE)
        );
        assert_eq!(
            pool.alloc(u64::MAX, 1, 0, &mut source),
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        );
        let start = pool.alloc(1000, 1, 0, &mut source).unwrap();
        assert_eq!(
            pool.free(start + 1, &mut source),
            Err(CUDA_ERROR_INVALID_VALUE)
        );
        pool.free(start, &mut source).unwrap();
        assert_eq!(pool.free(start, &mut source), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn a_context_takes_its_blocks_along() {
        let (mut pool, mut source) = (Pool::new(2 << 20, 1), Fake::default());
        let ids: HashSet<u64> = (0..10)
            .map(|i| {
                let start = pool.alloc(100, i % 2, 0, &mut source).unwrap();
                pool.find(start).unwrap().1.id
            })
            .collect();
        assert_eq!(ids.len(), 10);
        pool.free_owned(1, &mut source);
        assert_eq!(pool.live.len(), 5);
    }
}
