//! Contents of modules and libraries: received, checked and stored once per content.

use crate::engine::base::bounds;
use crate::engine::base::keeping::Keeping;
use crate::engine::base::pinned::is_affordable;
use crate::engine::base::rations::Holder;
use crate::engine::gpu::cubin::{FATBIN, entries_at};
use crate::engine::images::packs::{self, Pack, Slot};
use crate::keeper::{self, Name};
use mpsshim_api::cuda::*;
use mpsshim_proto::shm::{Mapping, is_sealed, read_sealed, sealed_memfd};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Content of an image, followed by a NUL.
#[derive(Debug, Clone)]
pub struct Content(Arc<Counted>);

/// Bytes charged to the session that sent them, for as long as any session uses them.
#[derive(Debug)]
struct Counted {
    bytes: Stored,
    hash: [u8; 32],
    /// Holds the content's own memory file until this is dropped.
    keeping: Option<Keeping>,
    sent: Sent,
}

/// Where the bytes of a content are.
#[derive(Debug)]
enum Stored {
    /// In a memory file of their own.
    Alone(Mapping),
    /// In a pack that the keeper holds.
    Packed(Slot),
}

/// A session's images that are still in use.
#[derive(Debug, Clone)]
pub struct Sent(Arc<Sending>);

#[derive(Debug)]
struct Sending {
    /// Their bytes.
    bytes: AtomicU64,
    /// The session, as the keeper's room is counted.
    holder: Holder,
    /// The pack that has room.
    pack: Mutex<Weak<Pack>>,
}

impl Sent {
    /// A session without images; `holder` counts its descriptors in the keeper.
    pub fn of(holder: &Holder) -> Sent {
        Sent(Arc::new(Sending {
            bytes: AtomicU64::new(0),
            holder: holder.clone(),
            pack: Mutex::default(),
        }))
    }

    /// A place for a small content in a pack; `None` if it is not small, or the keeper has no room.
    fn place(&self, keeping: &Keeping, len: usize) -> Option<Slot> {
        if len > packs::LONGEST {
            return None;
        }
        let mut open = self.0.pack.lock();
        let slot = open.upgrade().and_then(|pack| pack.place(len));
        slot.or_else(|| {
            let pack = Pack::new(keeping, &self.0.holder)?;
            *open = Arc::downgrade(&pack);
            pack.place(len)
        })
    }

    /// Adds `len` bytes.
    fn add(&self, len: u64) -> Result<(), CUresult> {
        let sum = |sent: u64| {
            let sum = sent.checked_add(len)?;
            (sum <= bounds::IMAGES_BYTES).then_some(sum)
        };
        let (bytes, relaxed) = (&self.0.bytes, Ordering::Relaxed);
        let counted = bytes.fetch_update(relaxed, relaxed, sum);
        counted.map(drop).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
    }

    fn remove(&self, len: u64) {
        self.0.bytes.fetch_sub(len, Ordering::Relaxed);
    }
}

impl Deref for Content {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes.bytes()
    }
}

impl Counted {
    fn new(bytes: Stored, hash: &[u8; 32], sent: &Sent) -> Result<Counted, CUresult> {
        sent.add(bytes.bytes().len() as u64)?;
        Ok(Counted {
            bytes,
            hash: *hash,
            keeping: None,
            sent: sent.clone(),
        })
    }

    fn is_kept(&self) -> bool {
        self.keeping.is_some() || matches!(self.bytes, Stored::Packed(_))
    }

    /// The name of the descriptor by which the keeper holds it.
    fn name(&self) -> Name {
        match &self.bytes {
            Stored::Alone(_) => Name {
                kind: keeper::Kind::Content,
                id: self.hash,
            },
            Stored::Packed(slot) => slot.name(),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.sent.remove(self.bytes.bytes().len() as u64);
        if let Some(keeping) = &self.keeping {
            keeping.forget(self.name());
        }
    }
}

impl Stored {
    /// Maps a memory file with `len` bytes.
    fn alone(file: BorrowedFd<'_>, len: usize) -> io::Result<Stored> {
        Ok(Stored::Alone(Mapping::sparse(file, len)?))
    }

    /// Includes the NUL.
    fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: the mapping lives as long as self, and it is not written once the image is known.
            Stored::Alone(file) => unsafe { std::slice::from_raw_parts(file.base(), file.len()) },
            Stored::Packed(slot) => slot.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Stored::Alone(file) => {
                // SAFETY: as in `bytes`; there is no other reference yet.
                unsafe { std::slice::from_raw_parts_mut(file.base(), file.len()) }
            }
            Stored::Packed(slot) => slot.bytes_mut(),
        }
    }
}

/// Weak reference to a content.
#[derive(Debug)]
pub struct WeakContent(Weak<Counted>);

impl WeakContent {
    /// The content, if it is still in use.
    pub fn get(&self) -> Option<Content> {
        self.0.upgrade().map(Content)
    }

    /// Whether it refers to this content.
    pub fn is(&self, content: &Content) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&content.0))
    }
}

impl Content {
    /// A weak reference to it.
    pub fn weak(&self) -> WeakContent {
        WeakContent(Arc::downgrade(&self.0))
    }

    /// Its SHA-256.
    pub fn hash(&self) -> &[u8; 32] {
        &self.0.hash
    }

    /// Whether the keeper holds it.
    pub fn is_kept(&self) -> bool {
        self.0.is_kept()
    }
}

/// The driver's object of an image.
#[derive(Debug, Clone, Copy)]
pub enum Raw {
    /// `cuModuleLoadData`.
    Module(CUmodule),
    /// `cuLibraryLoadData`.
    Library(CUlibrary),
}

/// Results of analyzing images, by SHA-256.
#[derive(Debug)]
pub struct Findings<T> {
    known: Mutex<HashMap<[u8; 32], T>>,
    most: usize,
}

impl<T: Clone> Findings<T> {
    /// Keeps the results of at most `most` images; at the limit, all are discarded.
    pub fn new(most: usize) -> Findings<T> {
        Findings {
            known: Mutex::default(),
            most,
        }
    }

    /// Returns the known result for an image.
    pub fn known(&self, hash: &[u8; 32]) -> Option<T> {
        self.known.lock().get(hash).cloned()
    }

    /// Returns the known result for an image, or computes it with `find`, which takes time.
    pub fn look_up(&self, hash: &[u8; 32], find: impl FnOnce() -> T) -> T {
        if let Some(known) = self.known(hash) {
            return known;
        }
        let found = find();
        let mut known = self.known.lock();
        if known.len() >= self.most {
            known.clear();
        }
        known.insert(*hash, found.clone());
        found
    }
}

/// Contents in use, by SHA-256.
#[derive(Debug)]
pub struct ImageCache {
    known: Mutex<HashMap<[u8; 32], Weak<Counted>>>,
    keeping: Keeping,
}

impl ImageCache {
    /// An empty cache. Its contents are held by the keeper, if there is one.
    pub fn new(keeping: Keeping) -> ImageCache {
        ImageCache {
            known: Mutex::default(),
            keeping,
        }
    }

    /// The content with this hash, for a session, if some session still uses it. If the keeper had no room for the
    /// session that sent it and has some for this one, this one has to send it again.
    pub fn get(&self, hash: &[u8; 32], sent: &Sent) -> Option<Content> {
        let content = self.known.lock().get(hash)?.upgrade()?;
        let holder = &sent.0.holder;
        if content.is_kept() {
            self.keeping.claim(content.name(), holder);
        } else if self.keeping.has_room(holder) {
            return None;
        }
        Some(Content(content))
    }

    /// Receives a content of `len` bytes from a client's descriptor. The hash is computed here, so a client cannot
    /// substitute the content of another client's image.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_IMAGE` if the content is truncated or differs from the message's length or hash;
    /// `CUDA_ERROR_OUT_OF_MEMORY` beyond [`bounds::IMAGES_BYTES`], or if the machine has too little memory for it.
    pub fn receive(
        &self,
        fd: BorrowedFd<'_>,
        len: u64,
        hash: &[u8; 32],
        sent: &Sent,
    ) -> Result<Content, CUresult> {
        if len == 0 || len > bounds::IMAGE || !is_sealed(fd, len) {
            return Err(CUDA_ERROR_INVALID_IMAGE);
        }
        if let Some(content) = self.get(hash, sent) {
            return Ok(content);
        }
        if !is_affordable(len) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let (stored, file) = match sent.place(&self.keeping, len as usize + 1) {
            Some(slot) => (Stored::Packed(slot), None),
            None => {
                let full = |_| CUDA_ERROR_OUT_OF_MEMORY;
                let file = sealed_memfd(c"mpsshim-image", len + 1).map_err(full)?;
                let stored = Stored::alone(file.as_fd(), len as usize + 1).map_err(full)?;
                (stored, Some(file))
            }
        };
        let mut content = Counted::new(stored, hash, sent)?;
        // The client may change its file meanwhile, so only the copy is hashed, checked and used.
        let bytes = &mut content.bytes.bytes_mut()[..len as usize];
        read_sealed(fd, bytes).map_err(|_| CUDA_ERROR_INVALID_IMAGE)?;
        let actual: [u8; 32] = Sha256::digest(&*bytes).into();
        if actual != *hash || !is_whole(bytes) {
            return Err(CUDA_ERROR_INVALID_IMAGE);
        }
        // Do not store the same content twice: dropping the first would release the keeper's name of both.
        if let Some(content) = self.get(hash, sent) {
            return Ok(content);
        }
        if let Stored::Packed(slot) = &content.bytes {
            slot.enter(hash);
        }
        if let Some(file) = file {
            let holder = &sent.0.holder;
            let kept = self.keeping.keep(content.name(), file.as_fd(), holder);
            content.keeping = kept.then(|| self.keeping.clone());
        }
        Ok(self.remember(content))
    }

    fn remember(&self, content: Counted) -> Content {
        let content = Arc::new(content);
        let mut cache = self.known.lock();
        cache.retain(|_, content| content.strong_count() > 0);
        cache.insert(content.hash, Arc::downgrade(&content));
        Content(content)
    }

    fn remember_all(&self, contents: Vec<Counted>) -> Vec<Content> {
        let contents: Vec<Content> = contents
            .into_iter()
            .map(|content| Content(Arc::new(content)))
            .collect();
        let each = contents.iter();
        let each = each.map(|content| (content.0.hash, Arc::downgrade(&content.0)));
        self.known.lock().extend(each);
        contents
    }

    /// Takes over a content that an earlier server left with the keeper, which continues to hold it.
    ///
    /// # Errors
    /// Errors of the system calls; `InvalidData` if no server can have left it.
    pub fn adopt(&self, file: OwnedFd, hash: &[u8; 32]) -> io::Result<Content> {
        let file = std::fs::File::from(file);
        let len = file.metadata()?.len() as usize;
        let len = len.checked_sub(1).ok_or(io::ErrorKind::InvalidData)?;
        let stored = Stored::alone(file.as_fd(), len + 1)?;
        let mut content = adopted(stored, hash)?;
        content.keeping = Some(self.keeping.clone());
        Ok(self.remember(content))
    }

    /// Takes over the contents of a pack that an earlier server left with the keeper, which continues to hold it.
    ///
    /// # Errors
    /// As [`ImageCache::adopt`].
    pub fn adopt_pack(&self, file: BorrowedFd<'_>, name: Name) -> io::Result<Vec<Content>> {
        let found = Pack::adopt(&self.keeping, name, file)?.into_iter();
        let contents = found.map(|(slot, hash)| adopted(Stored::Packed(slot), &hash));
        let contents: io::Result<Vec<Counted>> = contents.collect();
        Ok(self.remember_all(contents?))
    }
}

/// A content of an earlier server's, which counts for no session.
fn adopted(stored: Stored, hash: &[u8; 32]) -> io::Result<Counted> {
    let sent = Sent::of(&Holder::new(u32::MAX));
    let counted = Counted::new(stored, hash, &sent);
    counted.map_err(|_| io::ErrorKind::OutOfMemory.into())
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?) as u64)
}
fn u32_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as u64)
}
fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Whether the lengths in an image's headers stay inside it. The driver reads as far as they say.
pub fn is_whole(bytes: &[u8]) -> bool {
    let whole = || -> Option<bool> {
        let len = bytes.len() as u64;
        if bytes.starts_with(&FATBIN) {
            return Some(entries_at(bytes).is_some());
        }
        if bytes.starts_with(b"\x7fELF") {
            let (sections, segments) = (u64_at(bytes, 0x28)?, u64_at(bytes, 0x20)?);
            let (segment_size, segment_count) = (u16_at(bytes, 0x36)?, u16_at(bytes, 0x38)?);
            let (section_size, section_count) = (u16_at(bytes, 0x3a)?, u16_at(bytes, 0x3c)?);
            if section_size != 64 || (segment_count != 0 && segment_size != 56) {
                return Some(false);
            }
            if sections.checked_add(section_size * section_count)? > len
                || segments.checked_add(segment_size * segment_count)? > len
            {
                return Some(false);
            }
            for i in 0..section_count {
                let at = (sections + i * section_size) as usize;
                const NO_BITS: u64 = 8;
                let (offset, size) = (u64_at(bytes, at + 24)?, u64_at(bytes, at + 32)?);
                if u32_at(bytes, at + 4)? != NO_BITS && offset.checked_add(size)? > len {
                    return Some(false);
                }
            }
            for i in 0..segment_count {
                let at = (segments + i * segment_size) as usize;
                if u64_at(bytes, at + 8)?.checked_add(u64_at(bytes, at + 32)?)? > len {
                    return Some(false);
                }
            }
            return Some(true);
        }
        // PTX text, with or without its NUL. Anything else may be a container that the driver knows and we do not:
        // the wrapper that programs hand in (0x466243B1), for one, leads it to any address of this process.
        let text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
        Some(bytes.first().is_some_and(text))
    };
    whole().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_proto::shm::sealed_memfd;
    use proptest::prelude::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    fn fatbin(payload: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        bytes[..4].copy_from_slice(&0xBA55_ED50u32.to_le_bytes());
        bytes[6..8].copy_from_slice(&16u16.to_le_bytes());
        bytes[8..16].copy_from_slice(&payload.to_le_bytes());
        bytes
    }

    #[test]
    fn what_a_session_has_sent_is_bounded() {
        let cache = ImageCache::new(Keeping::new(None));
        let text = |n: u32| format!("// {n:08}").into_bytes();
        let send = |n: u32, sent: &Sent| {
            let bytes = text(n);
            let file = sealed_memfd(c"image", bytes.len() as u64).expect("a memory file");
            (&std::fs::File::from(file.try_clone().expect("its descriptor")))
                .write_all(&bytes)
                .expect("written");
            let hash = Sha256::digest(&bytes).into();
            cache.receive(file.as_fd(), bytes.len() as u64, &hash, sent)
        };
        let [sent, other] = [1, 2].map(|uid| Sent::of(&Holder::new(uid)));
        let first = send(1, &sent).expect("the first");
        assert_eq!(&first[..11], text(1));
        // Leaves room for one more content including its NUL.
        sent.add(bounds::IMAGES_BYTES - 2 * 12).expect("room");
        let second = send(2, &sent).expect("the second");
        assert_eq!(send(3, &sent).err(), Some(CUDA_ERROR_OUT_OF_MEMORY));
        // Content already in use is not counted again; each session has its own limit.
        let again = send(1, &sent).expect("the first again");
        let third = send(3, &other).expect("another session's");
        drop((second, first));
        send(4, &sent).expect("room again");
        drop((again, third));
        assert_eq!(
            sent.0.bytes.load(Ordering::Relaxed),
            bounds::IMAGES_BYTES - 2 * 12
        );
        assert_eq!(other.0.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn truncated_fatbins_are_refused() {
        assert!(is_whole(&fatbin(100, 116)));
        assert!(!is_whole(&fatbin(101, 116)));
        assert!(!is_whole(&fatbin(u64::MAX, 116)));
        assert!(!is_whole(&fatbin(100, 116)[..12]));
    }

    #[test]
    fn a_truncated_elf_is_refused() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(is_whole(&own));
        assert!(!is_whole(&own[..own.len() - 4096]));
        assert!(!is_whole(&own[..40]));
    }

    proptest! {
        #[test]
        fn nothing_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..400), magic in 0..3) {
            let start: &[u8] = match magic { 0 => b"\x7fELF", 1 => &[0x50, 0xed, 0x55, 0xba], _ => b"" };
            let n = start.len().min(bytes.len());
            bytes[..n].copy_from_slice(&start[..n]);
            is_whole(&bytes);
        }
    }
}
