//! `cuMemHostRegister`: makes memory of the program accessible to the server.
//!
//! The server cannot map another process's private memory. So the pages of **private** memory become pages of a file
//! that both map ([`private_pages`]), and private memory again when the registration ends. Pages of the calling
//! thread's own stack are moved by another thread ([`own_stack`]).
//!
//! The file of a **shared** mapping is sent to the server, which maps the same part and registers that, at the same
//! address if it can. The device pointer (`cuMemHostGetDevicePointer`) is valid in kernels in both cases, the program's
//! own pointer in copies.

use mpsshim_proto::shm::PAGE;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use mpsshim_api::cuda::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_IOMEMORY, CU_MEMHOSTREGISTER_PORTABLE,
    CU_MEMHOSTREGISTER_READ_ONLY, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
};
use mpsshim_proto::message::memory::{FilePart, FileRegister};
use mpsshim_proto::message::{Object, Op, Range};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use crate::ffi::Status;
use crate::proxy::context::Context;
use crate::proxy::maps::{self, Mapping};
use crate::proxy::memory::{self, Place, Registered};
use crate::proxy::submit::Session;
use crate::proxy::{extents, own_stack, private_pages, stream};

/// Private pages that a registration has in the file of [`private_pages`], by the registration's id.
static PRIVATE: Mutex<BTreeMap<u64, Vec<FilePart>>> = Mutex::new(BTreeMap::new());
/// Serializes registrations and their ends: checked conditions hold until the change is recorded.
static CHANGING: Mutex<()> = Mutex::new(());

/// Registers `[address, address + len)`.
pub fn register(
    session: &Session,
    context: &'static Context,
    address: u64,
    len: u64,
    flags: u32,
) -> Status {
    let known = CU_MEMHOSTREGISTER_PORTABLE
        | CU_MEMHOSTREGISTER_DEVICEMAP
        | CU_MEMHOSTREGISTER_IOMEMORY
        | CU_MEMHOSTREGISTER_READ_ONLY;
    let end = address.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if address == 0 || len == 0 || flags & !known != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let last = end.checked_next_multiple_of(PAGE);
    let pages = (address / PAGE * PAGE, last.ok_or(CUDA_ERROR_INVALID_VALUE)?);
    let _changing = CHANGING.lock();
    if memory::registered_overlaps(address, len) {
        return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    // Memory allocated by the driver cannot be registered.
    if memory::place(address, len) != Ok(Place::Pageable(address))
        || flags & CU_MEMHOSTREGISTER_IOMEMORY != 0
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let registration = Registration {
        session,
        context,
        address,
        len,
        pages,
        flags,
    };
    let mappings = maps::of(pages.0, pages.1);
    if !maps::cover(&mappings, pages.0, pages.1) || !mappings.iter().all(Mapping::is_readable) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let own_stack = own_stack::overlaps(pages.0, pages.1);
    if private_pages::may_take(&mappings, own_stack) {
        let writable = |one: &Mapping| one.protection & libc::PROT_WRITE != 0;
        if flags & CU_MEMHOSTREGISTER_READ_ONLY == 0 && !mappings.iter().all(writable) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        registration.of_private_memory(&mappings, own_stack)
    } else {
        registration.of_a_shared_mapping(&mappings)
    }
}

/// A range to be registered.
struct Registration<'a> {
    session: &'a Session,
    context: &'static Context,
    address: u64,
    /// Bytes.
    len: u64,
    /// Address and end of the pages.
    pages: (u64, u64),
    /// `CU_MEMHOSTREGISTER_*`.
    flags: u32,
}

impl Registration<'_> {
    /// Private memory: its pages are moved to a file, which the server maps.
    fn of_private_memory(&self, mappings: &[Mapping], own_stack: bool) -> Status {
        let parts = private_pages::take(mappings, self.pages, own_stack)?;
        let further: Vec<u8> = parts[1..]
            .iter()
            .flat_map(|part| part.as_bytes().to_vec())
            .collect();
        let registered =
            private_pages::with_file(|file| self.send(file, parts[0].offset, &further));
        match registered {
            Ok(id) => {
                PRIVATE.lock().insert(id, parts);
                Ok(())
            }
            Err(status) => {
                let _ = private_pages::give_back(&parts);
                Err(status)
            }
        }
    }

    /// Part of a shared mapping: the server maps its file too.
    fn of_a_shared_mapping(&self, mappings: &[Mapping]) -> Status {
        let read_only = self.flags & CU_MEMHOSTREGISTER_READ_ONLY != 0;
        let refused = |why: &str| {
            tracing::warn!(
                address = format_args!("{:#x}", self.address),
                len = self.len,
                "memory was to be registered that cannot be: {why}"
            );
            Err(CUDA_ERROR_NOT_SUPPORTED)
        };
        let Some(shared) = shared(mappings, self.pages.0, self.pages.1) else {
            return refused("it is neither private memory nor part of one shared mapping");
        };
        if !shared.writable && !read_only {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let Some(file) = shared.file(!read_only) else {
            return refused("the file behind it cannot be opened");
        };
        self.send(file.as_fd(), shared.offset, &[]).map(drop)
    }

    /// Makes the server register the pages, which are parts of a file; returns the registration's id.
    fn send(&self, file: BorrowedFd<'_>, offset: u64, further: &[u8]) -> Status<u64> {
        let body = FileRegister {
            offset,
            len: self.pages.1 - self.pages.0,
            address: self.pages.0,
            flags: self.flags,
            device: self.context.server_device,
        };
        let range: Range = self
            .session
            .request_sending(Op::FileRegister, &body, further, file, body.len)?
            .read()?;
        let id = extents::next_id();
        memory::add_registered(
            self.address,
            Registered {
                len: self.len,
                arena: range.start + (self.address - self.pages.0),
                id,
                flags: self.flags | CU_MEMHOSTREGISTER_DEVICEMAP,
                context: self.context,
            },
        );
        Ok(id)
    }
}

/// Registers memory of the program that a graph refers to, for good, unless it is registered. Returns its address in
/// the host arena.
///
/// # Errors
/// `CUDA_ERROR_NOT_SUPPORTED` for memory that cannot be registered, or is registered in part.
pub fn adopt(session: &Session, context: &'static Context, address: u64, len: u64) -> Status<u64> {
    let end = address.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if memory::registered(address).is_none() {
        let first = address / PAGE * PAGE;
        let room = end.div_ceil(PAGE) * PAGE - first;
        if memory::registered_overlaps(first, room) {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        register(session, context, first, room, 0)?;
    }
    match memory::registered(address) {
        Some((start, found)) if len <= found.len - (address - start) => {
            Ok(found.arena + (address - start))
        }
        _ => Err(CUDA_ERROR_NOT_SUPPORTED),
    }
}

/// Undoes the registration that begins at `address`, after the work that may use it.
pub fn unregister(session: &Session, address: u64) -> Status {
    match memory::registered(address) {
        Some((start, _)) if start == address => {}
        Some(_) => return Err(CUDA_ERROR_INVALID_VALUE),
        None if memory::place(address, 1) == Ok(Place::Pageable(address)) => {
            return Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        }
        None => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    stream::quiesce(session, None)?;
    let _changing = CHANGING.lock();
    let Some(registered) = memory::remove_registered(address) else {
        return Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    };
    let object = registered.arena - address % PAGE;
    let sent = session.submit(Op::FileUnregister, &Object { object });
    let parts = PRIVATE.lock().remove(&registered.id);
    if let Some(parts) = parts
        && let Err(status) = private_pages::give_back(&parts)
    {
        // The program keeps its pages anyway.
        tracing::warn!(%status, "memory stays in a file after its registration");
    }
    sent
}

/// A part of a file in shared mappings.
#[derive(Debug, PartialEq)]
struct Shared {
    offset: u64,
    writable: bool,
    device: (u32, u32),
    inode: u64,
    path: String,
    /// Addresses of the mapping it begins in.
    mapping: (u64, u64),
}

/// The part of a file that `[first, last)` maps, if shared mappings of one part of one file cover it.
fn shared(mappings: &[Mapping], first: u64, last: u64) -> Option<Shared> {
    let mut found: Option<Shared> = None;
    let mut at = first;
    for one in mappings.iter().filter(|one| one.end > first) {
        if one.start > at || !one.is_readable() || !one.shared {
            return None;
        }
        let offset = one.offset + (at - one.start);
        let writable = one.protection & libc::PROT_WRITE != 0;
        match &mut found {
            None => {
                found = Some(Shared {
                    offset,
                    writable,
                    device: one.device,
                    inode: one.inode,
                    path: one.path.clone(),
                    mapping: (one.start, one.end),
                });
            }
            Some(part) => {
                let same = (part.device, part.inode) == (one.device, one.inode);
                if !same || part.offset + (at - first) != offset {
                    return None;
                }
                part.writable &= writable;
            }
        }
        at = one.end;
        if at >= last {
            return found;
        }
    }
    None
}

impl Shared {
    fn is(&self, file: &File) -> bool {
        file.metadata().is_ok_and(|found| {
            let device = (libc::major(found.dev()), libc::minor(found.dev()));
            (device, found.ino()) == (self.device, self.inode)
        })
    }

    /// Opens the file, for writing if that is requested: by a descriptor of the program's, its path, or the kernel's
    /// own link, which only privileged processes may follow.
    fn file(&self, write: bool) -> Option<OwnedFd> {
        let open = |path: &str| {
            let file = OpenOptions::new().read(true).write(write).open(path);
            file.ok().filter(|file| self.is(file)).map(OwnedFd::from)
        };
        own_descriptor(|file| self.is(file), write)
            .or_else(|| open(&self.path))
            .or_else(|| {
                let (start, end) = self.mapping;
                open(&format!("/proc/self/map_files/{start:x}-{end:x}"))
            })
    }
}

/// A copy of a descriptor that this process has of a file.
fn own_descriptor(is_wanted: impl Fn(&File) -> bool, write: bool) -> Option<OwnedFd> {
    for entry in fs::read_dir("/proc/self/fd").ok()?.flatten() {
        let Some(raw) = entry
            .file_name()
            .to_str()
            .and_then(|n| n.parse::<i32>().ok())
        else {
            continue;
        };
        // SAFETY: plain system calls; a number that is no descriptor any more is refused. The copy is ours alone.
        let copy = unsafe {
            let mode = libc::fcntl(raw, libc::F_GETFL);
            let usable = match mode & libc::O_ACCMODE {
                libc::O_RDWR => true,
                libc::O_RDONLY => !write,
                _ => false,
            };
            if mode < 0 || !usable || mode & libc::O_PATH != 0 {
                continue;
            }
            let copy = libc::fcntl(raw, libc::F_DUPFD_CLOEXEC, 3);
            if copy < 0 {
                continue;
            }
            <File as std::os::fd::FromRawFd>::from_raw_fd(copy)
        };
        if is_wanted(&copy) {
            debug_assert!(copy.as_raw_fd() >= 0);
            return Some(copy.into());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use crate::proxy::maps::parse;

    const SHARED: &str = "\
1000-3000 rw-s 00004000 00:19 77                         /dev/shm/a b
3000-4000 rw-s 00006000 00:19 77                         /dev/shm/a b
4000-5000 rw-s 00009000 00:19 77                         /dev/shm/a b
5000-6000 r--s 00000000 00:01 78                         /dev/zero (deleted)
6000-7000 rw-p 00000000 08:01 79                         /usr/lib/libx.so
";

    #[test]
    fn a_shared_range_is_one_part_of_one_file() {
        let mappings: Vec<_> = parse(SHARED).collect();
        let shared = |first, last| super::shared(&mappings, first, last);
        let part = shared(0x2000, 0x4000).unwrap();
        assert_eq!((part.offset, part.inode), (0x5000, 77));
        assert_eq!(part.path, "/dev/shm/a b");
        assert!(part.writable && part.device == (0, 0x19));
        assert!(shared(0x2000, 0x5000).is_none(), "a gap in the file");
        assert!(!shared(0x5000, 0x6000).unwrap().writable);
        assert!(shared(0x4000, 0x6000).is_none(), "two files");
        assert!(shared(0x6000, 0x7000).is_none(), "private");
    }
}
