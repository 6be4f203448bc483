//! Packs: memory files that hold many small contents each, so that a session with many images takes few descriptors of
//! the keeper's, and few mappings.
//!
//! A pack belongs to the session that sent its contents, and is kept until none of them is in use. A table at its
//! start says where they are, for the next server. A place is used once; the memory of a content that is not in use
//! any more is released.

use crate::engine::base::keeping::Keeping;
use crate::engine::base::rations::Holder;
use crate::keeper::{self, Name};
use mpsshim_proto::shm::{Mapping, sealed_memfd};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::ffi::CStr;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Bytes of the longest content in a pack, including its NUL.
pub const LONGEST: usize = 64 << 10;
/// Bytes of a pack, of which only written pages take memory.
const LEN: usize = 16 << 20;
/// Bytes of the table.
const TABLE: usize = 160 << 10;
/// Contents of a pack.
const MOST: usize = 4_000;
const PAGE: usize = 4_096;
/// Name of the files.
const NAME: &CStr = c"mpsshim-images";

/// A row of the table.
#[repr(C)]
struct Entry {
    hash: [u8; 32],
    /// Offset of the content; 0: this and later rows are unused.
    start: u32,
    /// Bytes of the content, including its NUL; 0: it is not complete yet, or not in use any more.
    len: AtomicU32,
}

const _: () = assert!(MOST * size_of::<Entry>() <= TABLE && TABLE.is_multiple_of(PAGE));

/// A pack that the keeper holds.
#[derive(Debug)]
pub struct Pack {
    mapping: Mapping,
    name: Name,
    keeping: Keeping,
    /// Number of rows in use, and the end of the last content.
    used: Mutex<(usize, usize)>,
}

/// The place of one content in a pack.
#[derive(Debug)]
pub struct Slot {
    pack: Arc<Pack>,
    row: usize,
    start: usize,
    len: usize,
}

impl Pack {
    /// An empty pack of a session; `None` if the keeper has no room for it, or there is no memory.
    pub fn new(keeping: &Keeping, holder: &Holder) -> Option<Arc<Pack>> {
        let file = sealed_memfd(NAME, LEN as u64).ok()?;
        let mapping = Mapping::sparse(file.as_fd(), LEN).ok()?;
        let name = keeping.keep_new(keeper::Kind::Pack, file.as_fd(), holder)?;
        Some(Arc::new(Pack {
            mapping,
            name,
            keeping: keeping.clone(),
            used: Mutex::new((0, TABLE)),
        }))
    }

    /// A pack that an earlier server left with the keeper: its contents, with their hashes. Nothing is added to it.
    ///
    /// # Errors
    /// Errors of `mmap(2)`; `InvalidData` if no server can have left it.
    pub fn adopt(
        keeping: &Keeping,
        name: Name,
        file: BorrowedFd<'_>,
    ) -> io::Result<Vec<(Slot, [u8; 32])>> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let status = nix::sys::stat::fstat(file)?;
        if status.st_size != LEN as i64 {
            return Err(invalid());
        }
        let pack = Arc::new(Pack {
            mapping: Mapping::sparse(file, LEN)?,
            name,
            keeping: keeping.clone(),
            used: Mutex::new((MOST, LEN)),
        });
        let mut found = Vec::new();
        for row in 0..MOST {
            let entry = pack.entry(row);
            // SAFETY: inside the mapping; the server that wrote it has ended.
            let (start, hash) = unsafe { ((*entry).start as usize, (*entry).hash) };
            if start == 0 {
                break;
            }
            let len = pack.len_of(row).load(Ordering::Acquire) as usize;
            if len == 0 {
                continue;
            }
            if start < TABLE || len > LEN.saturating_sub(start) {
                return Err(invalid());
            }
            let slot = Slot {
                pack: pack.clone(),
                row,
                start,
                len,
            };
            if slot.bytes().last() != Some(&0) {
                return Err(invalid());
            }
            found.push((slot, hash));
        }
        Ok(found)
    }

    fn entry(&self, row: usize) -> *mut Entry {
        assert!(row < MOST);
        // SAFETY: inside the table, which the mapping has.
        unsafe { self.mapping.base().cast::<Entry>().add(row) }
    }

    fn len_of(&self, row: usize) -> &AtomicU32 {
        // SAFETY: inside the mapping, which lives as long as self; it is only used as an atomic.
        unsafe { &(*self.entry(row)).len }
    }

    /// A place for `len` bytes; `None` if the pack is full.
    pub fn place(self: &Arc<Pack>, len: usize) -> Option<Slot> {
        let mut used = self.used.lock();
        let (row, start) = *used;
        let end = start + len.next_multiple_of(PAGE);
        if row == MOST || end > LEN {
            return None;
        }
        *used = (row + 1, end);
        // SAFETY: inside the mapping; the row is this slot's alone.
        unsafe { (&raw mut (*self.entry(row)).start).write(start as u32) };
        Some(Slot {
            pack: self.clone(),
            row,
            start,
            len,
        })
    }
}

/// SHA-256 and bytes of a content, with its NUL.
type Copied = ([u8; 32], Box<[u8]>);

/// Copies of the contents of a pack that another server has in use, with their hashes, which are checked: it may drop a
/// content meanwhile.
///
/// # Errors
/// Errors of `mmap(2)`; `InvalidData` if no server can have left it.
pub fn copies(file: BorrowedFd<'_>) -> io::Result<Vec<Copied>> {
    if nix::sys::stat::fstat(file)?.st_size != LEN as i64 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mapping = Mapping::sparse(file, LEN)?;
    let copy = |start: usize, len: usize| {
        let mut bytes = vec![0; len];
        // SAFETY: the callers stay inside the mapping. Bytes that change meanwhile have no invalid values.
        unsafe {
            std::ptr::copy_nonoverlapping(mapping.base().add(start), bytes.as_mut_ptr(), len);
        }
        bytes
    };
    let mut found = Vec::new();
    for row in copy(0, MOST * size_of::<Entry>()).chunks_exact(size_of::<Entry>()) {
        let number = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&row[at..at + 4]);
            u32::from_ne_bytes(bytes) as usize
        };
        let (start, len) = (
            number(offset_of!(Entry, start)),
            number(offset_of!(Entry, len)),
        );
        if start == 0 {
            break;
        }
        if len == 0 || start < TABLE || len > LEN.saturating_sub(start) {
            continue;
        }
        let bytes = copy(start, len);
        let hash: [u8; 32] = Sha256::digest(&bytes[..len - 1]).into();
        if row[..hash.len()] == hash && bytes.last() == Some(&0) {
            found.push((hash, bytes.into()));
        }
    }
    Ok(found)
}

/// Another pack with the contents of a pack in use, for a server that restores some of the sessions while the others stay:
/// each of the two servers releases contents that it does not use any more.
///
/// # Errors
/// There is no memory or no descriptor; `InvalidData` if no server can have written it.
pub fn copy(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    if nix::sys::stat::fstat(file)?.st_size != LEN as i64 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let copy = sealed_memfd(NAME, LEN as u64)?;
    let (from, to) = (
        Mapping::sparse(file, LEN)?,
        Mapping::sparse(copy.as_fd(), LEN)?,
    );
    for row in 0..MOST {
        // SAFETY: rows of the tables, which both mappings have. The server that has the first one in use may fill rows
        // meanwhile, whose bytes have no invalid values; the copy is of this thread alone.
        let (old, new) = unsafe {
            let old = from.base().cast::<Entry>().add(row);
            (
                (old.read_volatile(), &(*old).len),
                &mut *to.base().cast::<Entry>().add(row),
            )
        };
        let (Entry { hash, start, .. }, len_of) = old;
        let (start, len) = (start as usize, len_of.load(Ordering::Acquire) as usize);
        if start == 0 {
            break;
        }
        if start < TABLE || len > LEN.saturating_sub(start) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: inside both mappings, just checked, and behind their tables. Bytes that change meanwhile have no
        // invalid values.
        unsafe {
            std::ptr::copy_nonoverlapping(from.base().add(start), to.base().add(start), len);
        }
        fence(Ordering::SeqCst);
        // Zero if its memory has been released meanwhile, or if it was not complete.
        let len = len_of.load(Ordering::SeqCst).min(len as u32);
        *new = Entry {
            hash,
            start: start as u32,
            len: AtomicU32::new(len),
        };
    }
    Ok(copy)
}

impl Drop for Pack {
    fn drop(&mut self) {
        self.keeping.forget(self.name);
    }
}

impl Slot {
    /// The content's bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: inside the mapping, and not written once the content is known.
        unsafe { std::slice::from_raw_parts(self.base(), self.len) }
    }

    /// The same, to write them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the slot is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.len) }
    }

    fn base(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.pack.mapping.base().add(self.start) }
    }

    /// Enters the content, which is complete, into the table.
    pub fn enter(&self, hash: &[u8; 32]) {
        // SAFETY: inside the mapping; the row is this slot's alone.
        unsafe { (&raw mut (*self.pack.entry(self.row)).hash).write(*hash) };
        let len = self.pack.len_of(self.row);
        len.store(self.len as u32, Ordering::Release);
    }

    /// The keeper's name of its pack.
    pub fn name(&self) -> Name {
        self.pack.name
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.pack.len_of(self.row).store(0, Ordering::Release);
        let len = self.len.next_multiple_of(PAGE);
        // SAFETY: the pages are inside the mapping and this slot's alone. Without success their memory stays as long
        // as the pack.
        unsafe { libc::madvise(self.base().cast(), len, libc::MADV_REMOVE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::Keeper;

    fn keeping() -> (Keeping, OwnedFd) {
        let (own, others) = mpsshim_control::seqpacket::pair().expect("a pair");
        // Nothing reads the other end: its queue takes some packets.
        let keeper = Arc::new(Keeper::on(own).expect("a keeper"));
        (Keeping::new(Some(keeper)), others)
    }

    fn put(pack: &Arc<Pack>, byte: u8, len: usize) -> Option<Slot> {
        let mut slot = pack.place(len)?;
        slot.bytes_mut()[..len - 1].fill(byte);
        slot.enter(&[byte; 32]);
        Some(slot)
    }

    #[test]
    fn a_copy_and_its_pack_release_contents_by_themselves() {
        let (keeping, _keeper) = keeping();
        let file = sealed_memfd(NAME, LEN as u64).expect("a file");
        let pack = Arc::new(Pack {
            mapping: Mapping::sparse(file.as_fd(), LEN).expect("a mapping"),
            name: Name::numbered(keeper::Kind::Pack, 77),
            keeping: keeping.clone(),
            used: Mutex::new((0, TABLE)),
        });
        let slots = [1, 2, 3].map(|byte| put(&pack, byte, PAGE).expect("room"));
        let _unfinished = pack.place(10).expect("room");
        let [dropped, dropped_in_copy, kept] = slots;
        let copy = copy(file.as_fd()).expect("a copy");
        drop(dropped);
        let found = Pack::adopt(&keeping, pack.name, copy.as_fd()).expect("a pack");
        let first = |slot: &Slot| slot.bytes()[0];
        let firsts: Vec<u8> = found.iter().map(|(slot, _)| first(slot)).collect();
        assert_eq!(firsts, [1, 2, 3]);
        assert!(found.iter().all(|(slot, hash)| *hash == [first(slot); 32]));
        drop(found);
        assert_eq!([&dropped_in_copy, &kept].map(first), [2, 3]);
    }

    fn copy_of(pack: &Pack) -> OwnedFd {
        let file = sealed_memfd(c"copy", LEN as u64).expect("a file");
        let copy = Mapping::sparse(file.as_fd(), LEN).expect("a mapping");
        let (from, to) = (pack.mapping.base(), copy.base());
        // SAFETY: two mappings of LEN bytes, which nothing else writes.
        unsafe { std::ptr::copy_nonoverlapping(from, to, LEN) };
        file
    }

    /// As the next server sees it.
    fn adopted(keeping: &Keeping, pack: &Pack) -> Vec<(Slot, [u8; 32])> {
        let file = copy_of(pack);
        let name = Name::numbered(keeper::Kind::Pack, 77);
        Pack::adopt(keeping, name, file.as_fd()).expect("a pack")
    }

    #[test]
    fn contents_are_found_again_until_they_are_dropped() {
        let (keeping, _keeper) = keeping();
        let pack = Pack::new(&keeping, &Holder::new(1)).expect("a pack");
        let slots: Vec<Slot> = [(1, 2), (2, PAGE), (3, PAGE + 1), (4, LONGEST)]
            .into_iter()
            .map(|(byte, len)| put(&pack, byte, len).expect("room"))
            .collect();
        let _unfinished = pack.place(10).expect("room");
        for slot in &slots {
            let (last, others) = slot.bytes().split_last().expect("bytes");
            assert!(*last == 0 && others.iter().all(|byte| *byte == others[0]));
        }
        let known = |found: &[(Slot, [u8; 32])]| -> Vec<(u8, usize)> {
            let each = found.iter();
            each.map(|(slot, hash)| (hash[0], slot.bytes().len()))
                .collect()
        };
        let all = adopted(&keeping, &pack);
        assert_eq!(
            known(&all),
            [(1, 2), (2, PAGE), (3, PAGE + 1), (4, LONGEST)]
        );
        drop(slots);
        assert!(adopted(&keeping, &pack).is_empty());
        let next = put(&pack, 5, 8).expect("room");
        assert_eq!(known(&adopted(&keeping, &pack)), [(5, 8)]);
        assert_eq!(next.bytes()[..7], [5; 7]);
    }

    #[test]
    fn only_whole_contents_are_copied_from_a_pack_in_use() {
        let (keeping, _keeper) = keeping();
        let pack = Pack::new(&keeping, &Holder::new(1)).expect("a pack");
        let text = [7; 10];
        let hash: [u8; 32] = Sha256::digest(text).into();
        let mut whole = pack.place(text.len() + 1).expect("room");
        whole.bytes_mut()[..text.len()].copy_from_slice(&text);
        whole.enter(&hash);
        // Another text than that of the hash, as when the owner drops a content meanwhile.
        let changed = put(&pack, 3, 8).expect("room");
        let _unfinished = pack.place(10).expect("room");
        let found = copies(copy_of(&pack).as_fd()).expect("a pack");
        let expected = [&text[..], &[0]].concat().into_boxed_slice();
        assert_eq!(found, [(hash, expected)]);
        drop((whole, changed));
        assert!(copies(copy_of(&pack).as_fd()).expect("a pack").is_empty());
        let short = sealed_memfd(c"images", PAGE as u64).expect("a file");
        assert!(copies(short.as_fd()).is_err());
    }

    #[test]
    fn a_pack_takes_thousands_and_then_no_more() {
        let (keeping, _keeper) = keeping();
        let pack = Pack::new(&keeping, &Holder::new(1)).expect("a pack");
        let small: Vec<Slot> = std::iter::from_fn(|| pack.place(8)).collect();
        assert_eq!(small.len(), MOST);
        let pack = Pack::new(&keeping, &Holder::new(1)).expect("a pack");
        let large: Vec<Slot> = std::iter::from_fn(|| pack.place(LONGEST)).collect();
        assert_eq!(large.len(), (LEN - TABLE) / LONGEST);
    }

    #[test]
    fn a_table_that_points_elsewhere_is_refused() {
        let (keeping, _keeper) = keeping();
        let name = Name::numbered(keeper::Kind::Pack, 1);
        for (start, len) in [(PAGE, 8), (LEN - PAGE, PAGE + 1), (LEN + PAGE, 8)] {
            let file = sealed_memfd(c"images", LEN as u64).expect("a file");
            let mapping = Mapping::sparse(file.as_fd(), LEN).expect("a mapping");
            let entry = Entry {
                hash: [1; 32],
                start: start as u32,
                len: AtomicU32::new(len as u32),
            };
            // SAFETY: the first row, inside the mapping.
            unsafe { mapping.base().cast::<Entry>().write(entry) };
            assert!(Pack::adopt(&keeping, name, file.as_fd()).is_err());
        }
        let short = sealed_memfd(c"images", PAGE as u64).expect("a file");
        assert!(Pack::adopt(&keeping, name, short.as_fd()).is_err());
    }
}
