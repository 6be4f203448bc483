//! Memory files that a client maps and the driver pins, and whether the next client may reuse one.
//!
//! A client can remove pages from its file: `fallocate(FALLOC_FL_PUNCH_HOLE)`, `madvise(MADV_REMOVE)`. The driver keeps
//! the pages that it pinned, and the file gets new ones. If the next client got such a file, the GPU would write its
//! flags to pages that the client does not see, and would read data left by the last client. No seal prevents that:
//! seals that forbid holes also forbid writable mappings. Nor do the file's times reveal it, since the first store into
//! a page changes them too. But the kernel reports `fallocate`, on which `madvise` is based, to inotify, and does not
//! report stores. So each file is watched for as long as the server has it.

use mpsshim_proto::shm;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use parking_lot::Mutex;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::LazyLock;

/// A sealed memory file; operations of the client on it are distinguishable from the server's.
#[derive(Debug)]
pub struct MemoryFile {
    fd: OwnedFd,
    /// `None` if pages may have been removed, or their removal would not have been noticed; then no other client gets
    /// the file.
    watch: Option<Watch>,
}

impl MemoryFile {
    /// Creates a file of `len` bytes.
    ///
    /// # Errors
    /// If no memory or no descriptor is available.
    pub fn new(name: &CStr, len: u64) -> io::Result<MemoryFile> {
        let fd = new_file(name, len)?;
        let watch = Watch::new(fd.as_fd());
        Ok(MemoryFile { fd, watch })
    }

    /// Takes over a file of an earlier server. No other client gets it, because its client was not watched meanwhile.
    pub fn adopt(fd: OwnedFd) -> MemoryFile {
        MemoryFile { fd, watch: None }
    }

    /// An open file description for the client. Only such descriptions may leave the process: Linux 6.18 does not
    /// report operations through the one returned by `memfd_create`.
    ///
    /// # Errors
    /// Errors of [`shm::reopen`].
    pub fn description(&self) -> io::Result<OwnedFd> {
        shm::reopen(self.fd.as_fd())
    }

    /// Whether another client may reuse the file now: it is open or mapped in no other process, and all its pages are
    /// the original ones. `false` in case of doubt. If so, starts to watch the operations of that client.
    pub fn pass_on(&mut self) -> bool {
        // In this order: once it is open in no other process, its pages cannot change any more.
        if self.watch.is_none() || !shm::is_sole(self.fd.as_fd()) {
            return false;
        }
        let intact = self.watch.take().is_some_and(Watch::saw_nothing);
        if intact {
            self.watch = Watch::new(self.fd.as_fd());
        }
        intact
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn new_file(name: &CStr, len: u64) -> io::Result<OwnedFd> {
    shm::reopen(shm::sealed_memfd(name, len)?.as_fd())
}

/// The process's inotify instance; `None` if the kernel does not report holes.
static NOTICES: LazyLock<Option<Mutex<Notices>>> = LazyLock::new(|| {
    let made = Notices::new().and_then(|mut notices| {
        notices.check()?;
        Ok(Mutex::new(notices))
    });
    made.inspect_err(|error| {
        tracing::warn!("cannot reuse registered memory for other clients: inotify: {error}");
    })
    .ok()
});

#[derive(Debug)]
struct Notices {
    inotify: Inotify,
    /// How often notifications were lost.
    lost: u64,
}

impl Notices {
    fn new() -> io::Result<Notices> {
        let flags = InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC;
        let inotify = Inotify::init(flags)?;
        Ok(Notices { inotify, lost: 0 })
    }

    /// Checks that the kernel reports a hole in a memory file.
    fn check(&mut self) -> io::Result<()> {
        let file = new_file(c"mpsshim-check", 4096)?;
        let id = self.begin(file.as_fd())?;
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(shm::reopen(file.as_fd())?, punch, 0, 4096)?;
        if self.end(id) {
            return Err(io::Error::other("no notice of a hole in a memory file"));
        }
        Ok(())
    }

    /// Starts a watch. The first notification ends it, so that no client can fill the queue.
    fn begin(&mut self, file: BorrowedFd<'_>) -> Result<WatchDescriptor, Errno> {
        self.read();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mask = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ONESHOT;
        self.inotify.add_watch(path.as_str(), mask)
    }

    /// Ends a watch. Returns whether it was still in place, that is, nothing has happened to the file.
    fn end(&mut self, id: WatchDescriptor) -> bool {
        let was_there = self.inotify.rm_watch(id).is_ok();
        self.read();
        was_there
    }

    /// Empties the queue. Only an overflow matters: a notification for which the kernel had no memory leaves its watch
    /// in place.
    fn read(&mut self) {
        while let Ok(events) = self.inotify.read_events() {
            let missing = |mask: AddWatchFlags| mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
            if events.iter().any(|event| missing(event.mask)) {
                self.lost += 1;
            }
        }
    }
}

/// Detects whether pages are removed from a file.
#[derive(Debug)]
struct Watch {
    id: WatchDescriptor,
    /// [`Notices::lost`] at the start of the watch.
    lost: u64,
}

impl Watch {
    fn new(file: BorrowedFd<'_>) -> Option<Watch> {
        let mut notices = NOTICES.as_ref()?.lock();
        // The user may have no watch left (`fs.inotify.max_user_watches`).
        let id = notices.begin(file).ok()?;
        let lost = notices.lost;
        Some(Watch { id, lost })
    }

    fn saw_nothing(self) -> bool {
        let Some(notices) = NOTICES.as_ref() else {
            return false;
        };
        let mut notices = notices.lock();
        notices.end(self.id) && notices.lost == self.lost
    }
}

impl Drop for Watch {
    /// The inotify watch would outlive this object while a client holds the file. After [`Watch::saw_nothing`] it is
    /// already gone; ending it again is harmless, since the kernel does not reuse its number soon.
    fn drop(&mut self) {
        if let Some(notices) = NOTICES.as_ref() {
            notices.lock().end(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_proto::shm::Mapping;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    const LEN: usize = 16384;
    const PUNCH: FallocateFlags =
        FallocateFlags::FALLOC_FL_PUNCH_HOLE.union(FallocateFlags::FALLOC_FL_KEEP_SIZE);

    fn file() -> MemoryFile {
        MemoryFile::new(c"test", LEN as u64).expect("a memory file")
    }

    fn store(mapping: &Mapping, value: u8) {
        // SAFETY: inside the mapping, of which there is no reference.
        unsafe { std::ptr::write_bytes(mapping.base(), value, mapping.len()) };
    }

    #[test]
    fn a_file_is_passed_on_after_use() {
        let mut file = file();
        let ours = Mapping::new(file.as_fd(), LEN).expect("a mapping");
        for value in 1..4 {
            let fd = file.description().expect("a description");
            let theirs = Mapping::new(fd.as_fd(), LEN).expect("a mapping");
            store(&theirs, value);
            let second = File::from(shm::reopen(fd.as_fd()).expect("a description"));
            let mut read = [0];
            second.read_exact_at(&mut read, 77).expect("read");
            assert_eq!(read[0], value);
            drop((fd, second));
            assert!(!file.pass_on(), "it is mapped");
            drop(theirs);
            assert!(file.pass_on());
            store(&ours, 0);
        }
    }

    fn spoils(change: impl Fn(&OwnedFd, &Mapping)) -> bool {
        let mut file = file();
        let _ours = Mapping::new(file.as_fd(), LEN).expect("a mapping");
        let fd = file.description().expect("a description");
        let theirs = Mapping::new(fd.as_fd(), LEN).expect("a mapping");
        change(&fd, &theirs);
        store(&theirs, 1);
        drop((fd, theirs));
        let passed = file.pass_on();
        assert_eq!(file.pass_on(), passed, "it stays so");
        !passed
    }

    #[test]
    fn a_file_that_lost_pages_is_not_passed_on() {
        assert!(!spoils(|_, _| ()));
        assert!(spoils(|fd, _| {
            fallocate(fd, PUNCH, 4096, 4096).expect("a hole");
        }));
        assert!(spoils(|_, mapping| {
            // SAFETY: inside the mapping, of which there is no reference.
            let page = unsafe { mapping.base().add(8192) };
            // SAFETY: as above; the page stays mapped.
            let removed = unsafe { libc::madvise(page.cast(), 4096, libc::MADV_REMOVE) };
            assert_eq!(removed, 0);
        }));
        assert!(spoils(|fd, _| {
            let again = shm::reopen(fd.as_fd()).expect("a description");
            fallocate(again, PUNCH, 0, LEN as libc::off_t).expect("a hole");
        }));
    }

    #[test]
    fn a_lost_notice_counts_as_one() {
        let mut notices = Notices::new().expect("inotify");
        let quiet = file();
        let id = notices.begin(quiet.as_fd()).expect("a watch");
        let other = file();
        let fd = other.description().expect("a description");
        let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events");
        let limit: usize = limit.expect("a limit").trim().parse().expect("a number");
        let mask = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ONESHOT;
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        for _ in 0..=limit {
            let added = notices.inotify.add_watch(path.as_str(), mask);
            added.expect("a watch");
            fallocate(&fd, PUNCH, 0, 4096).expect("a hole");
        }
        assert!(notices.end(id), "nothing has happened to it");
        assert_eq!(notices.lost, 1);
    }
}
