//! Pages of the program's private memory that devices use (`cuMemHostRegister`).
//!
//! The server cannot map another process's private memory. Registered pages are therefore moved to a memory file of
//! this process, which the server maps too. Their content is copied while stores to them are held
//! ([`crate::store_hold`]), and is copied back when no registration covers them any more. Registrations that share a
//! page share one page of the file.
//!
//! **The file.** Each run of pages gets a place of its own in the file, with room behind it, so that a mapping that
//! grows never reaches other pages of the program. The mappings of a run are read from the kernel (`/proc/self/maps`)
//! each time: the program may have unmapped, moved or replaced them.
//!
//! **fork.** A child gets a copy of its own of all such pages. They are not inherited (MADV_DONTFORK): the child copies
//! them out of the file, in its fork handler or at the first access if that comes earlier, while the parent waits in
//! its own handler and stores of the parent's other threads are held. A raw `clone` is not noticed: the child faults at
//! such pages.

use mpsshim_proto::shm::PAGE;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use mpsshim_api::cuda::{CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY};
use mpsshim_proto::message::memory::FilePart;
use parking_lot::Mutex;

use crate::ffi::Status;
use crate::proxy::maps::{self, Mapping};
use crate::proxy::own_stack;
use crate::store_hold::{self, Hold};
use crate::thread;

/// Bytes of the file; a file in memory takes none until they are written.
const FILE_LEN: u64 = 1 << 62;
/// Minimum number of bytes left free behind a run; a longer run leaves as many bytes as it has itself.
const GAP: u64 = 1 << 30;
/// Places in the file have the same offset within a huge page as the addresses.
const HUGE: u64 = 2 << 20;
/// Maximum bytes of unused places that keep their pages for new runs: writing to these takes half the time.
const SPARE: u64 = 64 << 20;
/// Bytes copied during one hold.
const AT_ONCE: u64 = 64 << 20;
/// Minimum number of bytes that several threads copy.
const SHARED_WORK: u64 = 8 << 20;
/// Bytes that a thread copies at a time.
const PIECE: u64 = 2 << 20;
/// Maximum number of copying threads.
const MOST_THREADS: usize = 8;

/// Runs of pages in the file. The lock is held across `fork`.
static PAGES: Mutex<Option<Pages>> = Mutex::new(None);
/// Number of runs.
static COUNT: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Pages {
    file: OwnedFd,
    /// Device and inode of the file, as [`maps`] has them.
    identity: ((u32, u32), u64),
    /// Offset in the file at which the next run may begin.
    next: u64,
    /// By offset in the file.
    runs: BTreeMap<u64, Run>,
    /// Freed places (offset, bytes) that still have their pages, for new runs of the same length. Oldest first.
    spare: Vec<(u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    /// Bytes.
    len: u64,
    /// Address at registration, and most probably still.
    address: u64,
    /// Registrations that cover it.
    users: u32,
}

/// Pages of the file that are mapped somewhere.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    address: u64,
    len: u64,
    offset: u64,
    /// `PROT_*`.
    protection: i32,
}

/// Whether the file has any pages.
#[inline]
pub fn any() -> bool {
    COUNT.load(Ordering::Acquire) != 0
}

/// Whether pages of `range` (address, bytes) are in the file, or were when they were registered.
pub fn overlaps((start, len): (u64, u64)) -> bool {
    let pages = PAGES.lock();
    pages.as_ref().is_some_and(|pages| {
        let mapped = pages.mapped();
        mapped
            .iter()
            .any(|one| one.address < start.saturating_add(len) && start < one.address + one.len)
    })
}

/// Whether [`take`] can take pages of all these mappings.
pub fn may_take(mappings: &[Mapping], on_own_stack: bool) -> bool {
    let pages = PAGES.lock();
    let ours = |one: &Mapping| pages.as_ref().is_some_and(|pages| pages.is_ours(one));
    mappings
        .iter()
        .all(|one| one.is_private(on_own_stack) || ours(one))
}

/// Moves all pages of `[first, last)`, which these mappings cover, to the file, unless they are in it. Returns their
/// places in the file, in order. Each call is undone by a [`give_back`] of the same parts.
///
/// # Errors
/// `CUDA_ERROR_NOT_SUPPORTED` for memory that is neither private nor in the file, `CUDA_ERROR_OUT_OF_MEMORY`, and the errors
/// of [`own_stack::aside`].
pub fn take(
    mappings: &[Mapping],
    (first, last): (u64, u64),
    on_own_stack: bool,
) -> Status<Vec<FilePart>> {
    watch_forks();
    let mut pages = PAGES.lock();
    if pages.is_none() {
        *pages = Some(Pages::new()?);
    }
    let pages = pages.as_mut().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    pages.check()?;
    let taken = pages.take(mappings, (first, last), on_own_stack);
    COUNT.store(pages.runs.len(), Ordering::Release);
    taken
}

/// Ends a registration of these parts. Pages that no other one covers become private memory again, wherever they are
/// mapped.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`, and the errors of [`own_stack::aside`]: the pages stay in the file.
pub fn give_back(parts: &[FilePart]) -> Status {
    let mut pages = PAGES.lock();
    let Some(pages) = pages.as_mut() else {
        return Ok(());
    };
    pages.check()?;
    let done = pages.give_back(parts);
    COUNT.store(pages.runs.len(), Ordering::Release);
    done
}

/// Calls a function with the file.
pub fn with_file<T>(what: impl FnOnce(BorrowedFd<'_>) -> Status<T>) -> Status<T> {
    let raw = {
        let pages = PAGES.lock();
        let pages = pages.as_ref().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        pages.check()?;
        pages.file.as_raw_fd()
    };
    // SAFETY: the file is never closed.
    what(unsafe { BorrowedFd::borrow_raw(raw) })
}

/// `MADV_DONTNEED`, `MADV_FREE`: the pages read as zeros from then on.
pub fn discard((start, len): (u64, u64)) {
    let pages = PAGES.lock();
    let Some(pages) = pages.as_ref() else { return };
    let end = start.saturating_add(len.next_multiple_of(PAGE));
    for one in pages.mapped() {
        let (from, to) = (one.address.max(start), (one.address + one.len).min(end));
        if from < to && start.is_multiple_of(PAGE) {
            // SAFETY: pages of the program's, whose content it gives up.
            unsafe { anonymous(from, to - from, one.protection, libc::MAP_FIXED) };
        }
    }
}

/// `mremap` to more bytes: the pages move, and private memory follows them. Returns the new address, or `MAP_FAILED` with
/// `errno`.
pub fn grow((start, len): (u64, u64), new_len: u64, flags: i32, to: u64) -> u64 {
    let len = len.next_multiple_of(PAGE);
    let new_len = new_len.next_multiple_of(PAGE);
    let _pages = PAGES.lock();
    let failed = |error: i32| {
        // SAFETY: the thread's own errno.
        unsafe { *libc::__errno_location() = error };
        libc::MAP_FAILED as u64
    };
    if !start.is_multiple_of(PAGE) {
        return failed(libc::EINVAL);
    }
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    let fixed = flags & libc::MREMAP_FIXED != 0;
    if !fixed {
        // SAFETY: takes free addresses only.
        let tail = unsafe { anonymous(start + len, new_len - len, rw, libc::MAP_FIXED_NOREPLACE) };
        match tail {
            Some(tail) if tail == start + len => return start,
            // SAFETY: just made.
            Some(tail) => unsafe {
                libc::munmap(tail as *mut c_void, (new_len - len) as usize);
            },
            None => {}
        }
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return failed(libc::ENOMEM);
    }
    let wish = if fixed { (to, libc::MAP_FIXED) } else { (0, 0) };
    // SAFETY: the address that the program requested, or a free one.
    let Some(new) = (unsafe { anonymous(wish.0, new_len, rw, wish.1) }) else {
        return failed(libc::ENOMEM);
    };
    // Mapping by mapping: not every kernel moves several at once.
    for one in maps::of(start, start + len) {
        let (from, end) = (one.start.max(start), one.end.min(start + len));
        let bytes = (end - from) as usize;
        let target = new + (from - start);
        // SAFETY: moves the program's pages to the address that it requested, over memory reserved above.
        let moved = unsafe { remap(from, bytes, target) };
        if !moved {
            return failed(libc::ENOMEM);
        }
    }
    new
}

/// Moves pages to an address, replacing the mappings there.
///
/// # Safety
/// The caller owns both ranges.
unsafe fn remap(from: u64, len: usize, to: u64) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's promise. The kernel's call: the C library's is interposed.
    let moved = unsafe { libc::syscall(libc::SYS_mremap, from, len, len, flags, to) };
    moved as u64 == to
}

/// New private memory.
///
/// # Safety
/// With `MAP_FIXED`, the caller owns the memory that is replaced.
unsafe fn anonymous(at: u64, len: u64, protection: i32, flags: i32) -> Option<u64> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the caller's promise.
    let got = unsafe { libc::mmap(at as *mut c_void, len as usize, protection, flags, -1, 0) };
    (got != libc::MAP_FAILED).then_some(got as u64)
}

impl Pages {
    fn new() -> Status<Pages> {
        let room = {
            let mut limit = libc::rlimit {
                rlim_cur: 0,
                rlim_max: 0,
            };
            // SAFETY: the struct is ours.
            let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } == 0;
            // A longer file would end the program by SIGXFSZ.
            if known {
                limit.rlim_cur.min(FILE_LEN)
            } else {
                FILE_LEN
            }
        };
        // SAFETY: plain system calls; the descriptor is new and ours.
        let file = unsafe {
            let raw = libc::memfd_create(c"cuda-registered".as_ptr(), libc::MFD_CLOEXEC);
            if raw < 0 || libc::ftruncate(raw, (room / PAGE * PAGE) as libc::off_t) < 0 {
                return Err(CUDA_ERROR_OUT_OF_MEMORY);
            }
            OwnedFd::from_raw_fd(raw)
        };
        let found = status_of(file.as_raw_fd()).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(Pages {
            file,
            identity: identity(&found),
            next: 0,
            runs: BTreeMap::new(),
            spare: Vec::new(),
        })
    }

    /// Checks that the descriptor still refers to the file: a program may close descriptors that it does not know.
    fn check(&self) -> Status {
        let found = status_of(self.file.as_raw_fd());
        let same = found.is_some_and(|found| identity(&found) == self.identity);
        if !same {
            tracing::error!("the program has closed the descriptor of its registered memory");
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        Ok(())
    }

    fn is_ours(&self, mapping: &Mapping) -> bool {
        mapping.is_of(self.identity)
    }

    /// All mappings of the file.
    fn mapped(&self) -> Vec<Mapped> {
        self.mapped_among(&maps::all())
    }

    fn mapped_among(&self, mappings: &[Mapping]) -> Vec<Mapped> {
        let ours = mappings.iter().filter(|one| self.is_ours(one));
        let of = |one: &Mapping| Mapped {
            address: one.start,
            len: one.end - one.start,
            offset: one.offset,
            protection: one.protection,
        };
        ours.map(of).collect()
    }

    /// The mappings of a run, possibly among those of other runs. If it is not completely mapped at its original
    /// address, the program has moved or unmapped parts, which may be anywhere.
    fn where_is(&self, offset: u64, run: &Run) -> Vec<Mapped> {
        let (mut at, end) = (run.address, run.address + run.len);
        let here = self.mapped_among(&maps::of(at, end));
        for one in &here {
            if one.address <= at && one.offset + (at - one.address) == offset + (at - run.address) {
                at = one.address + one.len;
            }
        }
        if at >= end { here } else { self.mapped() }
    }

    /// Splits a run, so that one begins at this place.
    fn split(&mut self, offset: u64) {
        let Some((&start, run)) = self.runs.range_mut(..offset).next_back() else {
            return;
        };
        let head = offset - start;
        if head >= run.len {
            return;
        }
        let tail = Run {
            len: run.len - head,
            address: run.address + head,
            users: run.users,
        };
        run.len = head;
        self.runs.insert(offset, tail);
    }

    /// Counts one more registration of pages that are in the file already and mapped at an address.
    fn share(&mut self, part: FilePart, address: u64) {
        let end = part.offset + part.len;
        self.split(part.offset);
        self.split(end);
        let mut at = part.offset;
        while at < end {
            let next = self.runs.range(at..end).next().map(|(offset, _)| *offset);
            match next {
                Some(offset) if offset == at => {
                    if let Some(run) = self.runs.get_mut(&offset) {
                        run.users += 1;
                        at += run.len;
                    }
                }
                // A mapping that has grown into the room behind its run.
                other => {
                    let len = other.unwrap_or(end) - at;
                    let run = Run {
                        len,
                        address: address + (at - part.offset),
                        users: 1,
                    };
                    self.runs.insert(at, run);
                    at += len;
                }
            }
        }
    }

    fn take(
        &mut self,
        mappings: &[Mapping],
        (first, last): (u64, u64),
        on_own_stack: bool,
    ) -> Status<Vec<FilePart>> {
        let mut parts = Vec::new();
        let mut taken = Ok(());
        // Mappings that follow one another are one run.
        let identity = self.identity;
        let ours = |one: &Mapping| one.is_of(identity);
        for group in mappings.chunk_by(|a, b| !ours(a) && !ours(b)) {
            let (Some(head), Some(tail)) = (group.first(), group.last()) else {
                continue;
            };
            let (start, end) = (head.start.max(first), tail.end.min(last));
            if self.is_ours(head) {
                let part = FilePart {
                    offset: head.offset + (start - head.start),
                    len: end - start,
                };
                self.share(part, start);
                parts.push(part);
                continue;
            }
            match self.take_run(group, (start, end), on_own_stack) {
                Ok(part) => parts.push(part),
                Err(status) => {
                    taken = Err(status);
                    break;
                }
            }
        }
        match taken {
            Ok(()) => Ok(parts),
            Err(status) => {
                let _ = self.give_back(&parts);
                Err(status)
            }
        }
    }

    /// Moves pages to the file, none of which is in it.
    fn take_run(
        &mut self,
        mappings: &[Mapping],
        (address, last): (u64, u64),
        on_own_stack: bool,
    ) -> Status<FilePart> {
        if !mappings.iter().all(|one| one.is_private(on_own_stack)) {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let len = last - address;
        let segment = |one: &Mapping| (one.start.max(address), one.end.min(last), one.protection);
        let segments: Vec<_> = mappings.iter().map(segment).collect();
        let begin = self.place(address, len)?;
        let file = self.file.as_raw_fd();
        let work = move || {
            for (start, end, protection) in &segments {
                let mut at = *start;
                while at < *end {
                    let bytes = (*end - at).min(AT_ONCE);
                    swap_in(file, at, bytes, begin + (at - address), *protection)?;
                    at += bytes;
                }
            }
            Ok(())
        };
        let done = if on_own_stack {
            own_stack::aside(work)
        } else {
            work()
        };
        let run = Run {
            len,
            address,
            users: 1,
        };
        self.runs.insert(begin, run);
        let part = FilePart { offset: begin, len };
        if let Err(status) = done {
            let _ = self.give_back(&[part]);
            return Err(status);
        }
        Ok(part)
    }

    /// Finds a place in the file for a run.
    fn place(&mut self, address: u64, len: u64) -> Status<u64> {
        let fits = |(offset, bytes): &(u64, u64)| *bytes == len && offset % HUGE == address % HUGE;
        if let Some(at) = self.spare.iter().rposition(fits) {
            return Ok(self.spare.remove(at).0);
        }
        let begin = self.next.next_multiple_of(HUGE) + address % HUGE;
        let end = status_of(self.file.as_raw_fd()).map_or(0, |found| found.st_size as u64);
        let next = begin.checked_add(len.max(GAP.min(end / 64)) + len);
        let next = next.filter(|next| *next <= end);
        self.next = next.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(begin)
    }

    /// Keeps a freed place as a spare, and releases the pages of the oldest spares over [`SPARE`] bytes.
    fn leave_place(&mut self, offset: u64, len: u64) {
        self.spare.push((offset, len));
        let mut kept: u64 = self.spare.iter().map(|(_, len)| len).sum();
        while kept > SPARE {
            let (offset, len) = self.spare.remove(0);
            kept -= len;
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (offset, len) = (offset as libc::off_t, len as libc::off_t);
            // SAFETY: a plain system call on a file of ours.
            unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, len) };
        }
    }

    fn give_back(&mut self, parts: &[FilePart]) -> Status {
        let mut over = Vec::new();
        for part in parts {
            // A later registration may have split the run.
            let end = part.offset + part.len;
            for (&offset, run) in self.runs.range_mut(part.offset..end) {
                run.users -= 1;
                if run.users == 0 {
                    over.push((offset, *run));
                }
            }
        }
        let mut outcome = Ok(());
        for (offset, run) in over {
            let mapped = self.where_is(offset, &run);
            match swap_out(self.file.as_raw_fd(), &mapped, offset, run.len) {
                Ok(()) => {
                    self.runs.remove(&offset);
                    self.leave_place(offset, run.len);
                }
                // The pages stay in the file, where they remain usable.
                Err(status) => outcome = Err(status),
            }
        }
        outcome
    }
}

/// Copies private pages to the file and maps the file in their place. Allocates nothing during the hold.
fn swap_in(file: i32, address: u64, len: u64, offset: u64, protection: i32) -> Status {
    Copying::new(libc::SYS_pwrite64, file, address, len, offset).with_threads(|copying| {
        let hold = Hold::begin(address, address + len);
        let writable = protection & libc::PROT_WRITE != 0;
        if writable && !store_hold::set_protection(address, len, protection & !libc::PROT_WRITE) {
            drop(hold);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let done = copying.finish() && {
            // SAFETY: whole pages of the program's; the file has their content.
            let got = unsafe {
                libc::mmap(
                    address as *mut c_void,
                    len as usize,
                    protection,
                    libc::MAP_SHARED | libc::MAP_FIXED,
                    file,
                    offset as libc::off_t,
                )
            };
            got != libc::MAP_FAILED
        };
        if done {
            // SAFETY: the mapping just made. The kernel's call: the C library's is interposed.
            unsafe { libc::syscall(libc::SYS_madvise, address, len, libc::MADV_DONTFORK) };
            return Ok(());
        }
        if writable {
            store_hold::set_protection(address, len, protection);
        }
        drop(hold);
        tracing::error!(
            address = format_args!("{address:#x}"),
            len,
            "memory cannot be moved to a file"
        );
        Err(CUDA_ERROR_OUT_OF_MEMORY)
    })
}

/// Replaces all mappings of `[offset, offset + len)` of the file with private memory of the same content.
fn swap_out(file: i32, mapped: &[Mapped], offset: u64, len: u64) -> Status {
    for one in mapped {
        let (from, to) = (
            one.offset.max(offset),
            (one.offset + one.len).min(offset + len),
        );
        let mut at = from;
        while at < to {
            let bytes = (to - at).min(AT_ONCE);
            let address = one.address + (at - one.offset);
            let protection = one.protection;
            let work = move || swap_out_at(file, address, bytes, at, protection);
            if own_stack::overlaps(address, address + bytes) {
                own_stack::aside(work)?;
            } else {
                work()?;
            }
            at += bytes;
        }
    }
    Ok(())
}

fn swap_out_at(file: i32, address: u64, len: u64, offset: u64, protection: i32) -> Status {
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: new memory.
    let fresh = unsafe { anonymous(0, len, rw, 0) }.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let done = Copying::new(libc::SYS_pread64, file, fresh, len, offset).with_threads(|copying| {
        let hold = Hold::begin(address, address + len);
        let writable = protection & libc::PROT_WRITE != 0;
        let held =
            !writable || store_hold::set_protection(address, len, protection & !libc::PROT_WRITE);
        let done = held
            && copying.finish()
            && (protection == rw || store_hold::set_protection(fresh, len, protection))
            // SAFETY: the program's pages get private memory with the same content in their place.
            && unsafe { remap(fresh, len as usize, address) };
        if !done && writable && held {
            store_hold::set_protection(address, len, protection);
        }
        drop(hold);
        done
    });
    if done {
        return Ok(());
    }
    // SAFETY: made above.
    unsafe { libc::munmap(fresh as *mut c_void, len as usize) };
    Err(CUDA_ERROR_OUT_OF_MEMORY)
}

/// A copy between memory and the file, by several threads if it is long. They are started before the hold begins,
/// because nothing may be allocated during it.
#[derive(Debug)]
struct Copying {
    /// `SYS_pread64` or `SYS_pwrite64`.
    call: libc::c_long,
    file: i32,
    address: u64,
    /// Bytes.
    len: u64,
    offset: u64,
    /// Offset of the next piece.
    next: AtomicU64,
    /// Bytes of finished pieces.
    done: AtomicU64,
    failed: AtomicBool,
    /// [`Copying::WAITS`], [`Copying::GOES`] or [`Copying::ENDS`].
    state: AtomicU32,
}

impl Copying {
    const WAITS: u32 = 0;
    const GOES: u32 = 1;
    const ENDS: u32 = 2;

    fn new(call: libc::c_long, file: i32, address: u64, len: u64, offset: u64) -> Copying {
        Copying {
            call,
            file,
            address,
            len,
            offset,
            next: AtomicU64::new(0),
            done: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            state: AtomicU32::new(Copying::WAITS),
        }
    }

    /// Calls `body` while threads wait to take part in [`Copying::finish`].
    fn with_threads<T>(&self, body: impl FnOnce(&Copying) -> T) -> T {
        let threads = if self.len < SHARED_WORK {
            0
        } else {
            let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
            (cpus / 2).clamp(1, MOST_THREADS) - 1
        };
        if threads == 0 {
            return body(self);
        }
        std::thread::scope(|scope| {
            thread::without_signals(|| {
                for _ in 0..threads {
                    // With fewer threads the copy only takes longer.
                    let _ = std::thread::Builder::new().spawn_scoped(scope, || self.take_part());
                }
            });
            let outcome = body(self);
            // Threads that have not begun end without copying.
            self.state.store(Copying::ENDS, Ordering::Release);
            outcome
        })
    }

    fn take_part(&self) {
        while self.state.load(Ordering::Acquire) == Copying::WAITS {
            std::thread::yield_now();
        }
        if self.state.load(Ordering::Acquire) == Copying::GOES {
            self.copy();
        }
    }

    fn copy(&self) {
        loop {
            let at = self.next.fetch_add(PIECE, Ordering::Relaxed);
            if at >= self.len {
                return;
            }
            let len = (self.len - at).min(PIECE);
            if self.call == libc::SYS_pread64 {
                // New memory: page faults during the copy would double its duration. Older kernels do not know this
                // advice.
                let (start, advice) = (self.address + at, libc::MADV_POPULATE_WRITE);
                // SAFETY: memory that the copy writes. The kernel's call: the C library's is interposed.
                unsafe { libc::syscall(libc::SYS_madvise, start, len, advice) };
            }
            if !transfer(
                self.call,
                self.file,
                self.address + at,
                len,
                self.offset + at,
            ) {
                self.failed.store(true, Ordering::Relaxed);
            }
            self.done.fetch_add(len, Ordering::Release);
        }
    }

    /// Copies everything. Returns whether all of it succeeded.
    fn finish(&self) -> bool {
        self.state.store(Copying::GOES, Ordering::Release);
        self.copy();
        while self.done.load(Ordering::Acquire) < self.len {
            std::thread::yield_now();
        }
        !self.failed.load(Ordering::Relaxed)
    }
}

/// Whether all bytes were copied between memory and the file. Async-signal-safe, as all below.
fn transfer(call: libc::c_long, file: i32, address: u64, len: u64, offset: u64) -> bool {
    let mut done = 0;
    while done < len {
        // SAFETY: memory of this process; inaccessible memory gives an error. The kernel's call, because the C
        // library's is interposed.
        let got = unsafe { libc::syscall(call, file, address + done, len - done, offset + done) };
        match got {
            1.. => done += got as u64,
            // SAFETY: the thread's own errno.
            -1 if unsafe { *libc::__errno_location() } == libc::EINTR => {}
            _ => return false,
        }
    }
    true
}

fn identity(found: &libc::stat) -> ((u32, u32), u64) {
    let (major, minor) = (libc::major(found.st_dev), libc::minor(found.st_dev));
    ((major, minor), found.st_ino)
}

fn status_of(file: i32) -> Option<libc::stat> {
    // SAFETY: all zero is a value of the struct; the call writes into it.
    unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        (libc::fstat(file, &mut found) == 0).then_some(found)
    }
}

// fork. Data for the child lies in memory of its own, since the heap's pages may be among those that are missing.

/// Maximum number of mappings that a child can be given.
const MOST_MAPPED: usize = 64 << 10;

/// A fork is in progress: in the parent until its handler is done, in the child permanently.
static FORKING: AtomicBool = AtomicBool::new(false);
/// The process that forks.
static PARENT: AtomicI32 = AtomicI32::new(0);
/// Stores are held for a fork, and the pages protected.
static PROTECTED: AtomicBool = AtomicBool::new(false);
/// Threads in [`impatient`].
static LIFTING: AtomicU32 = AtomicU32::new(0);
/// The mappings to copy: an array of [`Mapped`] and its length.
static LIST: AtomicU64 = AtomicU64::new(0);
static LISTED: AtomicUsize = AtomicUsize::new(0);
static FILE: AtomicI32 = AtomicI32::new(-1);
/// Sockets between parent and child; -1: none.
static PARENTS_END: AtomicI32 = AtomicI32::new(-1);
static CHILDS_END: AtomicI32 = AtomicI32::new(-1);
/// The child: 0 before it copies, 1 meanwhile, 2 after it.
static COPIED: AtomicU32 = AtomicU32::new(0);

fn list() -> &'static [Mapped] {
    let at = LIST.load(Ordering::Acquire);
    if at == 0 {
        return &[];
    }
    // SAFETY: memory that `before_fork` mapped and filled with as many.
    unsafe { std::slice::from_raw_parts(at as *const Mapped, LISTED.load(Ordering::Acquire)) }
}

fn watch_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        store_hold::hook(store_hold::Hooks {
            absent: copy_in_child,
            impatient,
        });
        // SAFETY: the handlers are functions of this module.
        let status =
            unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
        if status != 0 {
            tracing::warn!(
                status,
                "no fork handlers: a child faults at registered memory"
            );
        }
    });
}

/// Protects the listed pages against stores, or lets them be stored to again.
fn protect_list(protected: bool) {
    for one in list() {
        if one.protection & libc::PROT_WRITE != 0 {
            let without = one.protection & !libc::PROT_WRITE;
            let protection = if protected { without } else { one.protection };
            store_hold::set_protection(one.address, one.len, protection);
        }
    }
}

/// The addresses that the list spans.
fn span() -> (u64, u64) {
    let start = list().iter().map(|one| one.address).min().unwrap_or(0);
    let end = list().iter().map(|one| one.address + one.len).max();
    (start, end.unwrap_or(0))
}

/// A thread whose store is held for a fork may have a lock that `fork` itself needs, such as the allocator's. Stores
/// are then released, and held again after the fork, before the child copies.
fn impatient() {
    LIFTING.fetch_add(1, Ordering::SeqCst);
    if FORKING.load(Ordering::SeqCst)
        && PARENT.load(Ordering::Relaxed) == process()
        && PROTECTED.swap(false, Ordering::AcqRel)
    {
        protect_list(false);
        store_hold::lift();
    }
    LIFTING.fetch_sub(1, Ordering::SeqCst);
}

fn process() -> i32 {
    // SAFETY: no arguments. The kernel's call, since a C library may remember the parent's number.
    unsafe { libc::syscall(libc::SYS_getpid) as i32 }
}

unsafe extern "C" fn before_fork() {
    let guard = PAGES.lock();
    if let Some(pages) = guard.as_ref()
        && !pages.runs.is_empty()
        && pages.check().is_ok()
    {
        prepare(pages);
    }
    // The handlers in parent and child unlock it.
    std::mem::forget(guard);
}

fn prepare(pages: &Pages) {
    let mapped = pages.mapped();
    if LIST.load(Ordering::Relaxed) == 0 {
        let room = (MOST_MAPPED * size_of::<Mapped>()) as u64;
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: new memory; only pages that are written take any.
        let Some(at) = (unsafe { anonymous(0, room, rw, libc::MAP_NORESERVE) }) else {
            return;
        };
        LIST.store(at, Ordering::Release);
    }
    let count = mapped.len().min(MOST_MAPPED);
    // SAFETY: room for as many; the list is not read before its count is set.
    unsafe {
        let to = LIST.load(Ordering::Relaxed) as *mut Mapped;
        ptr::copy_nonoverlapping(mapped.as_ptr(), to, count);
    }
    LISTED.store(count, Ordering::Release);
    if count == 0 {
        return;
    }
    let mut ends = [-1; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: room for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
        ends = [-1; 2];
    }
    PARENTS_END.store(ends[0], Ordering::Relaxed);
    CHILDS_END.store(ends[1], Ordering::Relaxed);
    FILE.store(pages.file.as_raw_fd(), Ordering::Relaxed);
    PARENT.store(process(), Ordering::Relaxed);
    COPIED.store(0, Ordering::Relaxed);
    let (start, end) = span();
    std::mem::forget(Hold::begin(start, end));
    protect_list(true);
    PROTECTED.store(true, Ordering::Release);
    FORKING.store(true, Ordering::Release);
}

unsafe extern "C" fn in_parent() {
    if FORKING.load(Ordering::Acquire) {
        // From here on this thread needs no lock that another thread may have: stores stay held to the end.
        FORKING.store(false, Ordering::SeqCst);
        while LIFTING.load(Ordering::SeqCst) != 0 {
            std::hint::spin_loop();
        }
        if !PROTECTED.swap(true, Ordering::AcqRel) {
            let (start, end) = span();
            store_hold::resume(start, end);
            protect_list(true);
        }
        let (mine, theirs) = (
            PARENTS_END.swap(-1, Ordering::Relaxed),
            CHILDS_END.swap(-1, Ordering::Relaxed),
        );
        if mine >= 0 {
            // SAFETY: descriptors of ours. If there is no child, the other end is closed now, and no answer comes.
            unsafe { libc::close(theirs) };
            tell(mine);
            hear(mine);
            // SAFETY: as above.
            unsafe { libc::close(mine) };
        }
        protect_list(false);
        PROTECTED.store(false, Ordering::Release);
        // SAFETY: forgotten in `prepare`, by this thread.
        drop(unsafe { Hold::of_this_thread() });
    }
    // SAFETY: locked in `before_fork`, by this thread.
    unsafe { PAGES.force_unlock() };
}

unsafe extern "C" fn in_child() {
    copy_in_child(0);
    FORKING.store(false, Ordering::Release);
    // SAFETY: this thread is the only one; its twin in the parent holds these locks.
    unsafe {
        store_hold::forget();
        PAGES.force_unlock();
    }
    // Nothing is registered in the child, whose memory is all private. The parent's state is leaked: freeing it would
    // close descriptors that the program may have closed itself.
    std::mem::forget(PAGES.lock().take());
    COUNT.store(0, Ordering::Release);
}

/// In a child: copies all pages out of the file, once. Returns whether this is such a child and the pages are present
/// now.
fn copy_in_child(address: u64) -> bool {
    if !FORKING.load(Ordering::Acquire) || PARENT.load(Ordering::Relaxed) == process() {
        return false;
    }
    let listed = |one: &Mapped| address >= one.address && address < one.address + one.len;
    if address != 0 && !list().iter().any(listed) {
        return false;
    }
    if COPIED
        .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire)
        .is_err()
    {
        return false;
    }
    let (theirs, mine) = (
        PARENTS_END.swap(-1, Ordering::Relaxed),
        CHILDS_END.swap(-1, Ordering::Relaxed),
    );
    if mine >= 0 {
        // SAFETY: a descriptor of ours.
        unsafe { libc::close(theirs) };
        hear(mine);
    }
    let file = FILE.load(Ordering::Relaxed);
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    for one in list() {
        // SAFETY: nothing is mapped there in this process.
        let made = unsafe { anonymous(one.address, one.len, rw, libc::MAP_FIXED) };
        if made.is_some() && transfer(libc::SYS_pread64, file, one.address, one.len, one.offset) {
            if one.protection != rw {
                store_hold::set_protection(one.address, one.len, one.protection);
            }
        } else {
            // Natively the fork would have failed: no child is better than one with wrong data.
            // SAFETY: ends this process.
            unsafe { libc::_exit(127) };
        }
    }
    if mine >= 0 {
        tell(mine);
        // SAFETY: as above.
        unsafe { libc::close(mine) };
    }
    COPIED.store(2, Ordering::Release);
    true
}

/// Sends a byte.
fn tell(socket: i32) {
    // SAFETY: one byte of a constant; a closed socket is not an error.
    unsafe { libc::send(socket, [0u8].as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
}

/// Waits for a byte, or for the other end to close.
fn hear(socket: i32) {
    let mut byte = 0u8;
    loop {
        // SAFETY: room for one byte. The kernel's call: the C library's is interposed.
        let got = unsafe {
            libc::syscall(
                libc::SYS_recvfrom,
                socket,
                &raw mut byte,
                1,
                0,
                ptr::null::<u8>(),
                ptr::null::<u8>(),
            )
        };
        // SAFETY: the thread's own errno.
        if !(got < 0 && unsafe { *libc::__errno_location() } == libc::EINTR) {
            return;
        }
    }
}
