//! Tables of a session's objects at positions that the client chose.

use mpsshim_proto::cuda::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use mpsshim_proto::handle::{Handle, Kind};

/// Objects of one kind by handle.
#[derive(Debug)]
pub struct Slots<T> {
    kind: Kind,
    limit: usize,
    slots: Vec<Option<(u16, T)>>,
}

impl<T> Slots<T> {
    /// An empty table for handles of `kind` with indices below `limit`.
    pub fn new(kind: Kind, limit: usize) -> Self {
        Slots {
            kind,
            limit,
            slots: Vec::new(),
        }
    }

    /// Puts an object where the client wants it.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for another kind of handle or a position in use, `CUDA_ERROR_OUT_OF_MEMORY`
    /// beyond the limit. The object comes back with the status.
    pub fn insert(&mut self, handle: u64, object: T) -> Result<&mut T, (CUresult, T)> {
        let handle = Handle(handle);
        let index = handle.index() as usize;
        if handle.kind() != Some(self.kind) {
            return Err((CUDA_ERROR_INVALID_HANDLE, object));
        }
        if index >= self.limit {
            return Err((CUDA_ERROR_OUT_OF_MEMORY, object));
        }
        if index >= self.slots.len() {
            self.slots.resize_with(index + 1, || None);
        }
        let slot = &mut self.slots[index];
        if slot.is_some() {
            return Err((CUDA_ERROR_INVALID_HANDLE, object));
        }
        Ok(&mut slot.insert((handle.generation(), object)).1)
    }

    /// The position of a live handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for a stale one or one of another kind.
    #[inline]
    pub fn index(&self, handle: u64) -> Result<usize, CUresult> {
        let handle = Handle(handle);
        let index = handle.index() as usize;
        match self.slots.get(index) {
            Some(Some((generation, _)))
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

    /// As [`Slots::get`], to change it.
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
    /// `CUDA_ERROR_INVALID_HANDLE` when there is none.
    #[inline]
    pub fn at(&self, index: usize) -> Result<&T, CUresult> {
        match self.slots.get(index) {
            Some(Some((_, object))) => Ok(object),
            _ => Err(CUDA_ERROR_INVALID_HANDLE),
        }
    }

    /// As [`Slots::at`], to change it.
    ///
    /// # Errors
    /// As [`Slots::at`].
    #[inline]
    pub fn at_mut(&mut self, index: usize) -> Result<&mut T, CUresult> {
        match self.slots.get_mut(index) {
            Some(Some((_, object))) => Ok(object),
            _ => Err(CUDA_ERROR_INVALID_HANDLE),
        }
    }

    /// Takes the object of a live handle out.
    ///
    /// # Errors
    /// As [`Slots::index`].
    pub fn remove(&mut self, handle: u64) -> Result<T, CUresult> {
        let index = self.index(handle)?;
        match self.slots[index].take() {
            Some((_, object)) => Ok(object),
            None => Err(CUDA_ERROR_INVALID_HANDLE),
        }
    }

    /// The handle of the first object for which `is` is true.
    pub fn handle_where(&self, is: impl Fn(&T) -> bool) -> Option<u64> {
        let found = self.slots.iter().enumerate().find_map(|(index, slot)| {
            let (generation, object) = slot.as_ref()?;
            is(object).then(|| Handle::new(self.kind, *generation, index as u32))
        });
        found.map(|handle| handle.0)
    }

    /// Drops the objects for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        for slot in &mut self.slots {
            if slot.as_ref().is_some_and(|(_, object)| !keep(object)) {
                *slot = None;
            }
        }
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten().map(|(_, object)| object)
    }

    /// All objects, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().flatten().map(|(_, object)| object)
    }

    /// Takes all objects out.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        self.slots.drain(..).flatten().map(|(_, object)| object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
