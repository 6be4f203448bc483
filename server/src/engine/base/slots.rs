//! Tables of a session's objects at positions chosen by the client. Only occupied parts of a table take memory, so an
//! object at a high position takes no more than at a low one.

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use mpsshim_proto::handle::{Handle, Kind};

/// Number of positions allocated together.
const CHUNK: usize = 32;

type Chunk<T> = Box<[Option<(u16, T)>; CHUNK]>;

/// Objects of one kind by handle.
#[derive(Debug)]
pub struct Slots<T> {
    kind: Kind,
    limit: usize,
    chunks: Vec<Option<Chunk<T>>>,
    count: usize,
}

impl<T> Slots<T> {
    /// An empty table for handles of `kind` with indices below `limit`.
    pub fn new(kind: Kind, limit: usize) -> Self {
        Slots {
            kind,
            limit,
            chunks: Vec::new(),
            count: 0,
        }
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.count
    }

    #[inline]
    fn slot(&self, index: usize) -> Option<&(u16, T)> {
        self.chunks.get(index / CHUNK)?.as_ref()?[index % CHUNK].as_ref()
    }

    #[inline]
    fn slot_mut(&mut self, index: usize) -> Option<&mut Option<(u16, T)>> {
        Some(&mut self.chunks.get_mut(index / CHUNK)?.as_mut()?[index % CHUNK])
    }

    fn slots(&self) -> impl Iterator<Item = (usize, &(u16, T))> {
        let chunks = self.chunks.iter().enumerate();
        let chunks = chunks.filter_map(|(at, chunk)| Some((at, chunk.as_ref()?)));
        chunks.flat_map(|(at, chunk)| {
            let slots = chunk.iter().enumerate();
            slots.filter_map(move |(index, slot)| Some((at * CHUNK + index, slot.as_ref()?)))
        })
    }

    /// Inserts an object at the position of a handle chosen by the client.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for another kind of handle or a position in use, `CUDA_ERROR_OUT_OF_MEMORY` beyond
    /// the limit. The object is returned with the status.
    pub fn insert(&mut self, handle: u64, object: T) -> Result<&mut T, (CUresult, T)> {
        let handle = Handle(handle);
        let index = handle.index() as usize;
        if handle.kind() != Some(self.kind) {
            return Err((CUDA_ERROR_INVALID_HANDLE, object));
        }
        if index >= self.limit {
            return Err((CUDA_ERROR_OUT_OF_MEMORY, object));
        }
        let at = index / CHUNK;
        if at >= self.chunks.len() {
            self.chunks.resize_with(at + 1, || None);
        }
        let chunk = self.chunks[at].get_or_insert_with(|| Box::new([const { None }; CHUNK]));
        let slot = &mut chunk[index % CHUNK];
        if slot.is_some() {
            return Err((CUDA_ERROR_INVALID_HANDLE, object));
        }
        self.count += 1;
        Ok(&mut slot.insert((handle.generation(), object)).1)
    }

    /// The position of a live handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for a stale handle or another kind of handle.
    #[inline]
    pub fn index(&self, handle: u64) -> Result<usize, CUresult> {
        let handle = Handle(handle);
        let index = handle.index() as usize;
        match self.slot(index) {
            Some((generation, _))
                if *generation == handle.generation() && handle.kind() == Some(self.kind) =>
            {
                Ok(index)
            }
            _ => Err(CUDA_ERROR_INVALID_HANDLE),
        }
    }

    /// The object of a live handle.
    ///
    /// # Errors
    /// As [`Slots::index`].
    #[inline]
    pub fn get(&self, handle: u64) -> Result<&T, CUresult> {
        let index = self.index(handle)?;
        self.at(index)
    }

    /// The object of a live handle, mutably.
    ///
    /// # Errors
    /// As [`Slots::index`].
    #[inline]
    pub fn get_mut(&mut self, handle: u64) -> Result<&mut T, CUresult> {
        let index = self.index(handle)?;
        self.at_mut(index)
    }

    /// The object at a position.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` if there is none.
    #[inline]
    pub fn at(&self, index: usize) -> Result<&T, CUresult> {
        match self.slot(index) {
            Some((_, object)) => Ok(object),
            _ => Err(CUDA_ERROR_INVALID_HANDLE),
        }
    }

    /// The object at a position, mutably.
    ///
    /// # Errors
    /// As [`Slots::at`].
    #[inline]
    pub fn at_mut(&mut self, index: usize) -> Result<&mut T, CUresult> {
        match self.slot_mut(index) {
            Some(Some((_, object))) => Ok(object),
            _ => Err(CUDA_ERROR_INVALID_HANDLE),
        }
    }

    /// Removes and returns the object of a live handle.
    ///
    /// # Errors
    /// As [`Slots::index`].
    pub fn remove(&mut self, handle: u64) -> Result<T, CUresult> {
        let index = self.index(handle)?;
        let taken = self.slot_mut(index).and_then(Option::take);
        let (_, object) = taken.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        self.count -= 1;
        Ok(object)
    }

    /// The handle of the first object for which `is` is true.
    pub fn handle_where(&self, is: impl Fn(&T) -> bool) -> Option<u64> {
        let found = self.slots().find_map(|(index, (generation, object))| {
            is(object).then(|| Handle::new(self.kind, *generation, index as u32))
        });
        found.map(|handle| handle.0)
    }

    /// Drops the objects for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        for slot in self
            .chunks
            .iter_mut()
            .flatten()
            .flat_map(|chunk| chunk.iter_mut())
        {
            if slot.as_ref().is_some_and(|(_, object)| !keep(object)) {
                *slot = None;
                self.count -= 1;
            }
        }
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots().map(|(_, (_, object))| object)
    }

    /// All objects with their handles.
    pub fn iter_with_handles(&self) -> impl Iterator<Item = (u64, &T)> {
        self.slots().map(|(index, (generation, object))| {
            (Handle::new(self.kind, *generation, index as u32).0, object)
        })
    }

    /// All objects, mutably.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let chunks = self.chunks.iter_mut().flatten();
        let slots = chunks.flat_map(|chunk| chunk.iter_mut().flatten());
        slots.map(|(_, object)| object)
    }

    /// Removes and returns all objects.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        self.count = 0;
        let chunks = self.chunks.drain(..).flatten();
        chunks.flat_map(|chunk| chunk.into_iter().flatten().map(|(_, object)| object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_far_position_takes_no_more_room_than_a_near_one() {
        const LIMIT: usize = 1 << 20;
        let mut slots = Slots::new(Kind::Event, LIMIT);
        let positions = [0, 5, 31, 32, 1 << 10, LIMIT as u32 - 1];
        for index in positions {
            let handle = Handle::new(Kind::Event, 3, index).0;
            assert!(slots.insert(handle, [index; 64]).is_ok());
        }
        let room = slots.chunks.iter().flatten().count() * CHUNK;
        assert_eq!(room, 4 * CHUNK, "of {LIMIT} positions");
        assert!(slots.chunks.len() <= LIMIT / CHUNK);
        assert_eq!(slots.len(), positions.len());
        let found: Vec<u32> = slots.iter().map(|object| object[0]).collect();
        assert_eq!(found, positions);
        let far = slots.handle_where(|object| object[0] == positions[5]);
        assert_eq!(far, Some(Handle::new(Kind::Event, 3, positions[5]).0));
        slots.retain(|object| object[0] < 32);
        assert_eq!(slots.len(), 3);
        assert_eq!(slots.at(1 << 10), Err(CUDA_ERROR_INVALID_HANDLE));
        for object in slots.iter_mut() {
            object[1] = 7;
        }
        assert_eq!(slots.drain().filter(|object| object[1] == 7).count(), 3);
        assert_eq!(slots.len(), 0);
    }

    #[test]
    fn stale_foreign_and_far_handles_are_refused() {
        let mut slots = Slots::new(Kind::Event, 100);
        let first = Handle::new(Kind::Event, 1, 7).0;
        assert!(slots.insert(first, "a").is_ok());
        assert_eq!(
            slots.insert(first, "b").unwrap_err().0,
            CUDA_ERROR_INVALID_HANDLE
        );
        assert_eq!(
            slots.get(Handle::new(Kind::Event, 2, 7).0),
            Err(CUDA_ERROR_INVALID_HANDLE)
        );
        assert_eq!(
            slots.get(Handle::new(Kind::Stream, 1, 7).0),
            Err(CUDA_ERROR_INVALID_HANDLE)
        );
        assert_eq!(
            slots.get(Handle::new(Kind::Event, 1, 8).0),
            Err(CUDA_ERROR_INVALID_HANDLE)
        );
        assert_eq!(
            slots
                .insert(Handle::new(Kind::Event, 0, 100).0, "c")
                .unwrap_err()
                .0,
            CUDA_ERROR_OUT_OF_MEMORY
        );
        assert_eq!(slots.remove(first), Ok("a"));
        assert_eq!(slots.remove(first), Err(CUDA_ERROR_INVALID_HANDLE));
        assert!(slots.insert(Handle::new(Kind::Event, 2, 7).0, "d").is_ok());
    }
}
