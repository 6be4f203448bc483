//! `cuMemHostRegister`: makes memory of the program accessible to the server.
//!
//! The server cannot map another process's anonymous memory. So the content of **private** memory moves into a block
//! of the host arena, and the block's pages are mapped over the program's addresses as well: both addresses then show
//! the same memory. Between the copy and the new mapping a write of another thread to the range is lost. Only a
//! program that registers memory while another thread writes to it has this race; no such program is known. Of the calling
//! thread's own stack another thread moves the pages ([`own_stack`]); what is forked while they are registered has them
//! together with this process, as all registered memory.
//!
//! Of a **shared** mapping the file behind it goes to the server, which maps the same part and registers that, at the
//! same address if it can. The device pointer (`cuMemHostGetDevicePointer`) is valid in kernels in both cases, the
//! program's own pointer in copies.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::raw::c_void;
use std::os::unix::fs::MetadataExt;

use mpsshim_api::cuda::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_IOMEMORY, CU_MEMHOSTREGISTER_PORTABLE,
    CU_MEMHOSTREGISTER_READ_ONLY, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY,
};
use mpsshim_proto::arena;
use mpsshim_proto::message::memory::{FileRegister, HostAlias};
use mpsshim_proto::message::{Object, Op, Range};

use crate::ffi::Status;
use crate::proxy::context::Context;
use crate::proxy::memory::{self, Registered};
use crate::proxy::submit::Session;
use crate::proxy::{extents, own_stack, stream};

const PAGE: u64 = 4096;
/// Bytes from which a block has a grant of its own: it begins at a page, whatever else is allocated.
const OWN_GRANT: u64 = (1 << 20) + 1;

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
    let first = address / PAGE * PAGE;
    let last = end.div_ceil(PAGE) * PAGE;
    if arena::is_host(address) || memory::registered_overlaps(first, last - first) {
        return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    if flags & CU_MEMHOSTREGISTER_IOMEMORY != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let own_stack = own_stack::overlaps(first, last);
    if !covered(&maps, first, last, own_stack) {
        return register_shared(
            session,
            context,
            &maps,
            (address, len),
            (first, last),
            flags,
        );
    }
    let room = last - first;
    let block = memory::host_alloc_unowned(session, context, room.max(OWN_GRANT))?;
    let take_over = move || {
        // SAFETY: the range is the program's, which may be read as just checked; the block is ours.
        unsafe {
            std::ptr::copy_nonoverlapping(first as *const u8, block as *mut u8, room as usize);
        }
        // SAFETY: whole pages of private anonymous memory; the block has their content.
        unsafe { memory::map_again(block, first, room) }
    };
    let taken = if own_stack {
        own_stack::aside(take_over)
    } else {
        take_over()
    };
    if let Err(status) = taken {
        let _ = memory::host_give_back(session, block);
        return Err(status);
    }
    // Where the server can have the pages at this address too, kernels may use the program's own pointer.
    let alias = HostAlias {
        block,
        len: room,
        address: first,
        device: context.server_device,
        pad: 0,
    };
    let aliased = session
        .request(Op::HostAlias, &alias, &[])
        .is_ok_and(|answer| answer.status.is_ok());
    memory::add_registered(
        address,
        Registered {
            len,
            arena: if aliased {
                address
            } else {
                block + (address - first)
            },
            block: Some(block),
            aliased,
            id: extents::next_id(),
            flags: flags | CU_MEMHOSTREGISTER_DEVICEMAP,
            context,
        },
    );
    Ok(())
}

/// Registers part of a shared mapping: the server maps the file too.
fn register_shared(
    session: &Session,
    context: &'static Context,
    maps: &str,
    (address, len): (u64, u64),
    (first, last): (u64, u64),
    flags: u32,
) -> Status {
    let read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY != 0;
    let refused = |why: &str| {
        tracing::warn!(
            address = format_args!("{address:#x}"),
            len,
            "memory was to be registered that cannot be: {why}"
        );
        Err(CUDA_ERROR_NOT_SUPPORTED)
    };
    let Some(shared) = shared(maps, first, last) else {
        if !is_mapped(maps, first, last) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        return refused("it is neither private anonymous memory nor part of one shared mapping");
    };
    if !shared.writable && !read_only {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let Some(file) = shared.file(!read_only) else {
        return refused("the file behind it cannot be opened");
    };
    let body = FileRegister {
        offset: shared.offset,
        len: last - first,
        address: first,
        flags,
        device: context.server_device,
    };
    let range: Range = session
        .request_sending(Op::FileRegister, &body, &[], file.as_fd(), body.len)?
        .read()?;
    memory::add_registered(
        address,
        Registered {
            len,
            arena: range.start + (address - first),
            block: None,
            aliased: false,
            id: extents::next_id(),
            flags: flags | CU_MEMHOSTREGISTER_DEVICEMAP,
            context,
        },
    );
    Ok(())
}

/// Memory of the program that a graph refers to: registered if it is not, and for good. Where it lies in the host
/// arena.
///
/// # Errors
/// `CUDA_ERROR_NOT_SUPPORTED` for memory that cannot be registered, or is in part.
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
        None => return Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
    }
    stream::quiesce(session, None)?;
    let Some(registered) = memory::remove_registered(address) else {
        return Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    };
    let first = address / PAGE * PAGE;
    let Some(block) = registered.block else {
        let object = registered.arena - (address - first);
        return session.submit(Op::FileUnregister, &Object { object });
    };
    if registered.aliased {
        session.submit(Op::FileUnregister, &Object { object: first })?;
    }
    let room = (address + registered.len).div_ceil(PAGE) * PAGE - first;
    let give_back = move || replace(block, first, room);
    if own_stack::overlaps(first, first + room) {
        own_stack::aside(give_back)?;
    } else {
        give_back()?;
    }
    memory::host_give_back(session, block)
}

/// Puts private memory with the content of a block in the place of the block's pages at `first`.
fn replace(block: u64, first: u64, room: u64) -> Status {
    // SAFETY: the block's pages are mapped at `first`; they are read through the arena, and replaced by anonymous
    // memory that gets their content before anything else can see it.
    unsafe {
        let fresh = libc::mmap(
            std::ptr::null_mut(),
            room as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if fresh == libc::MAP_FAILED {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        std::ptr::copy_nonoverlapping(block as *const u8, fresh.cast(), room as usize);
        let moved = libc::mremap(
            fresh,
            room as usize,
            room as usize,
            libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
            first as *mut c_void,
        );
        if moved == libc::MAP_FAILED {
            libc::munmap(fresh, room as usize);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
    }
    Ok(())
}

/// Whether all pages of `[first, last)` are readable and writable private memory with no file behind them, by the
/// text of `/proc/self/maps`. The main thread's stack is, for itself alone.
fn covered(maps: &str, first: u64, last: u64, own_stack: bool) -> bool {
    let mut at = first;
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some((start, end)) = words.next().and_then(|range| range.split_once('-')) else {
            return false;
        };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
        else {
            return false;
        };
        if end <= at || start > at {
            continue;
        }
        let access = words.next();
        let inode = words.nth(2);
        let name = words.next();
        let anonymous = name.is_none_or(|name| {
            name == "[heap]" || name.starts_with("[anon") || own_stack && name == "[stack]"
        });
        if access != Some("rw-p") || inode != Some("0") || !anonymous {
            return false;
        }
        at = end;
        if at >= last {
            return true;
        }
    }
    false
}

/// One line of `/proc/self/maps`.
struct Line<'a> {
    start: u64,
    end: u64,
    access: &'a str,
    offset: u64,
    /// `major:minor`.
    device: &'a str,
    inode: u64,
    path: &'a str,
}

fn lines(maps: &str) -> impl Iterator<Item = Line<'_>> {
    maps.lines().filter_map(|line| {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        Some(Line {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            access: words.next()?,
            offset: u64::from_str_radix(words.next()?, 16).ok()?,
            device: words.next()?,
            inode: words.next()?.parse().ok()?,
            path: words.next().unwrap_or("").trim_start(),
        })
    })
}

/// Whether something is mapped at all pages of `[first, last)`.
fn is_mapped(maps: &str, first: u64, last: u64) -> bool {
    let mut at = first;
    for line in lines(maps).filter(|line| line.end > first) {
        if line.start > at {
            return false;
        }
        at = line.end;
        if at >= last {
            return true;
        }
    }
    false
}

/// A part of a file that is mapped for others to see too.
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

/// What `[first, last)` is, when it is one part of one file in shared mappings.
fn shared(maps: &str, first: u64, last: u64) -> Option<Shared> {
    let mut found: Option<Shared> = None;
    let mut at = first;
    for line in lines(maps).filter(|line| line.end > first) {
        let (major, minor) = line.device.split_once(':')?;
        let device = (
            u32::from_str_radix(major, 16).ok()?,
            u32::from_str_radix(minor, 16).ok()?,
        );
        if line.start > at || !line.access.starts_with('r') || !line.access.ends_with('s') {
            return None;
        }
        let offset = line.offset + (at - line.start);
        let writable = line.access.as_bytes().get(1) == Some(&b'w');
        match &mut found {
            None => {
                found = Some(Shared {
                    offset,
                    writable,
                    device,
                    inode: line.inode,
                    path: line.path.to_owned(),
                    mapping: (line.start, line.end),
                });
            }
            Some(part) => {
                let same = (part.device, part.inode) == (device, line.inode);
                if !same || part.offset + (at - first) != offset {
                    return None;
                }
                part.writable &= writable;
            }
        }
        at = line.end;
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

    /// The file, open for writing if that is asked for: a descriptor of the program's, its path, or the kernel's own
    /// link, which only some may follow.
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
    use super::{covered, is_mapped, shared};

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0
3000-4000 rw-p 00000000 00:00 0                  [heap]
4000-5000 r--p 00000000 00:00 0
5000-6000 rw-p 00000000 08:01 77                 /usr/lib/libx.so
8000-9000 rw-p 00000000 00:00 0                  [stack]
";

    #[test]
    fn only_private_anonymous_memory_is_taken() {
        assert!(covered(MAPS, 0x1000, 0x2000, false));
        assert!(covered(MAPS, 0x2000, 0x4000, false));
        assert!(!covered(MAPS, 0x2000, 0x5000, false), "read-only");
        assert!(!covered(MAPS, 0x5000, 0x6000, false), "a file");
        assert!(!covered(MAPS, 0x8000, 0x9000, false), "a stack");
        assert!(!covered(MAPS, 0x6000, 0x7000, false), "nothing");
        assert!(!covered(MAPS, 0x0, 0x2000, false), "begins before");
    }

    const SHARED: &str = "\
1000-3000 rw-s 00004000 00:19 77                         /dev/shm/a b
3000-4000 rw-s 00006000 00:19 77                         /dev/shm/a b
4000-5000 rw-s 00009000 00:19 77                         /dev/shm/a b
5000-6000 r--s 00000000 00:01 78                         /dev/zero (deleted)
6000-7000 rw-p 00000000 08:01 79                         /usr/lib/libx.so
";

    #[test]
    fn a_shared_range_is_one_part_of_one_file() {
        let part = shared(SHARED, 0x2000, 0x4000).unwrap();
        assert_eq!((part.offset, part.inode), (0x5000, 77));
        assert_eq!(part.path, "/dev/shm/a b");
        assert!(part.writable && part.device == (0, 0x19));
        assert!(
            shared(SHARED, 0x2000, 0x5000).is_none(),
            "a gap in the file"
        );
        assert!(!shared(SHARED, 0x5000, 0x6000).unwrap().writable);
        assert!(shared(SHARED, 0x4000, 0x6000).is_none(), "two files");
        assert!(shared(SHARED, 0x6000, 0x7000).is_none(), "private");
        assert!(is_mapped(SHARED, 0x1000, 0x7000));
        assert!(!is_mapped(SHARED, 0x6000, 0x8000));
        assert!(!is_mapped(SHARED, 0x0, 0x2000));
    }
}
