//! Tables from handles to objects that a launch can read without a lock.
//!
//! A table only grows; its entries are never moved or freed but reused under a handle of the next generation. So a
//! reference to an entry stays valid for the life of the process, and the generation distinguishes a stale handle from
//! its successor. Objects keep all state in atomics and locks: a thread that uses a handle while another destroys it
//! gets a wrong answer, as natively, but nothing worse.

use std::collections::VecDeque;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use mpsshim_api::cuda::{
    CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE,
    CUresult,
};
use mpsshim_proto::handle::{Handle, Kind};
use parking_lot::Mutex;

use crate::ffi::Status;

const CHUNK: usize = 256;
const CHUNKS: usize = 4096;

/// An object and the handle it has now.
#[derive(Debug, Default)]
pub struct Entry<T> {
    /// 0 while it is free.
    handle: AtomicU64,
    generation: AtomicU32,
    index: AtomicU32,
    /// The last handle of an object here that ended with its context.
    ended: AtomicU64,
    object: T,
}

impl<T> Entry<T> {
    /// The handle; 0 when the object was destroyed.
    #[inline]
    pub fn handle(&self) -> u64 {
        self.handle.load(Ordering::Acquire)
    }
}

impl<T> Deref for Entry<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.object
    }
}

/// All objects of a kind.
#[derive(Debug)]
pub struct Table<T: 'static> {
    kind: Kind,
    chunks: [AtomicPtr<Entry<T>>; CHUNKS],
    /// Entries that have been in use.
    used: AtomicU32,
    places: Mutex<Places>,
}

#[derive(Debug)]
struct Places {
    free: VecDeque<u32>,
}

impl<T: Default + Sync> Table<T> {
    /// An empty table.
    pub const fn new(kind: Kind) -> Self {
        Table {
            kind,
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS],
            used: AtomicU32::new(0),
            places: Mutex::new(Places {
                free: VecDeque::new(),
            }),
        }
    }

    fn entry(&self, index: u32) -> Option<&'static Entry<T>> {
        let chunk = self
            .chunks
            .get(index as usize / CHUNK)?
            .load(Ordering::Acquire);
        if chunk.is_null() {
            return None;
        }
        // SAFETY: a chunk is CHUNK entries that are never freed or moved; shared access only.
        Some(unsafe { &*chunk.add(index as usize % CHUNK) })
    }

    /// A free object: the caller fills it, then calls [`Table::publish`]. `None`: a million are in use.
    pub fn claim(&self) -> Option<&'static Entry<T>> {
        let mut places = self.places.lock();
        if let Some(index) = places.free.pop_front() {
            return self.entry(index);
        }
        let index = self.used.load(Ordering::Relaxed);
        let chunk = self.chunks.get(index as usize / CHUNK)?;
        if chunk.load(Ordering::Relaxed).is_null() {
            let fresh: Vec<Entry<T>> = (0..CHUNK).map(|_| Entry::default()).collect();
            chunk.store(
                Box::leak(fresh.into_boxed_slice()).as_mut_ptr(),
                Ordering::Release,
            );
        }
        let entry = self.entry(index)?;
        entry.index.store(index, Ordering::Relaxed);
        self.used.store(index + 1, Ordering::Release);
        Some(entry)
    }

    /// The handle that [`Table::publish`] will give a claimed entry.
    pub fn handle_of(&self, entry: &Entry<T>) -> u64 {
        Handle::new(
            self.kind,
            entry.generation.load(Ordering::Relaxed) as u16,
            entry.index.load(Ordering::Relaxed),
        )
        .0
    }

    /// Makes a filled entry reachable by its handle.
    pub fn publish(&self, entry: &Entry<T>) -> u64 {
        let handle = self.handle_of(entry);
        entry.handle.store(handle, Ordering::Release);
        handle
    }

    /// The object of a live handle of this kind.
    #[inline]
    pub fn get(&self, raw: u64) -> Option<&'static Entry<T>> {
        let handle = Handle(raw);
        if handle.kind() != Some(self.kind) {
            return None;
        }
        self.entry(handle.index())
            .filter(|entry| entry.handle() == raw)
    }

    /// As [`Table::get`]; [`Table::absent`] when there is none.
    #[inline]
    pub fn find(&self, raw: u64) -> Status<&'static Entry<T>> {
        self.get(raw).ok_or_else(|| self.absent(raw))
    }

    /// The status of a call whose handle refers to no object: `CUDA_ERROR_INVALID_HANDLE`; if the object ended with its
    /// context, `CUDA_ERROR_CONTEXT_IS_DESTROYED`, or `CUDA_ERROR_INVALID_CONTEXT` for a stream, as natively.
    #[cold]
    pub fn absent(&self, raw: u64) -> CUresult {
        let entry = self.entry(Handle(raw).index());
        let ended = entry.is_some_and(|entry| entry.ended.load(Ordering::Relaxed) == raw);
        match self.kind {
            _ if raw == 0 || !ended => CUDA_ERROR_INVALID_HANDLE,
            Kind::Stream => CUDA_ERROR_INVALID_CONTEXT,
            _ => CUDA_ERROR_CONTEXT_IS_DESTROYED,
        }
    }

    /// Marks a live handle's object as ending with its context.
    pub fn ends_with_context(&self, raw: u64) {
        if let Some(entry) = self.get(raw) {
            entry.ended.store(raw, Ordering::Relaxed);
        }
    }

    /// The claimed entry that [`Table::handle_of`] gave this handle for, and that was never published.
    pub fn claimed(&self, raw: u64) -> Option<&'static Entry<T>> {
        let entry = self.entry(Handle(raw).index())?;
        (self.handle_of(entry) == raw && entry.handle() == 0).then_some(entry)
    }

    /// Removes a live handle's object; `None` when another thread was faster.
    pub fn retire(&self, raw: u64) -> Option<&'static Entry<T>> {
        let entry = self.get(raw)?;
        entry
            .handle
            .compare_exchange(raw, 0, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        Some(entry)
    }

    /// All live objects, without a lock.
    pub fn live(&self) -> impl Iterator<Item = &'static Entry<T>> {
        (0..self.used.load(Ordering::Acquire))
            .filter_map(|index| self.entry(index))
            .filter(|entry| entry.handle() != 0)
    }

    /// The handles of all live objects.
    pub fn handles(&self) -> Vec<u64> {
        let handles = self.live().map(Entry::handle);
        handles.filter(|handle| *handle != 0).collect()
    }

    /// Gives a retired or claimed entry back for the next handle.
    pub fn recycle(&self, entry: &Entry<T>) {
        let next = (entry.generation.load(Ordering::Relaxed) + 1) & 0xffff;
        entry.generation.store(next, Ordering::Relaxed);
        self.places
            .lock()
            .free
            .push_back(entry.index.load(Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static TABLE: Table<AtomicU32> = Table::new(Kind::Event);

    #[test]
    fn a_stale_handle_is_told_from_its_successor() {
        let first = TABLE.claim().unwrap();
        assert!(TABLE.get(TABLE.handle_of(first)).is_none());
        let old = TABLE.publish(first);
        first.store(7, Ordering::Relaxed);
        assert_eq!(TABLE.get(old).unwrap().load(Ordering::Relaxed), 7);
        assert!(TABLE.get(old ^ 1 << 48).is_none(), "another kind");
        let entry = TABLE.retire(old).unwrap();
        assert!(TABLE.retire(old).is_none() && TABLE.get(old).is_none());
        TABLE.recycle(entry);
        let second = TABLE.claim().unwrap();
        let new = TABLE.publish(second);
        assert!(std::ptr::eq(first, second) && new != old);
        assert!(TABLE.get(old).is_none() && TABLE.get(new).is_some());
    }

    #[test]
    fn what_ended_with_its_context_is_told_from_what_never_was() {
        static EVENTS: Table<AtomicU32> = Table::new(Kind::Event);
        static STREAMS: Table<AtomicU32> = Table::new(Kind::Stream);
        for (table, status) in [
            (&EVENTS, CUDA_ERROR_CONTEXT_IS_DESTROYED),
            (&STREAMS, CUDA_ERROR_INVALID_CONTEXT),
        ] {
            let (one, other) = (table.claim().unwrap(), table.claim().unwrap());
            let (ended, destroyed) = (table.publish(one), table.publish(other));
            table.ends_with_context(ended);
            for handle in [ended, destroyed] {
                table.recycle(table.retire(handle).unwrap());
            }
            assert_eq!(table.find(ended).err(), Some(status));
            for handle in [0, 0x1234, destroyed] {
                assert_eq!(table.find(handle).err(), Some(CUDA_ERROR_INVALID_HANDLE));
            }
        }
    }
}
