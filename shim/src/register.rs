//! `cuMemHostRegister`: memory of the program that the server shall reach.
//!
//! The server cannot map another process's anonymous memory. So its content moves into a block of the host arena,
//! and the block's pages are mapped over the program's addresses as well: both addresses then show the same
//! memory. Only private anonymous memory is taken, which nobody but the program can have a view of.
//!
//! Between the copy and the new mapping a write of another thread to the range is lost. A program that registers
//! memory while another thread writes it has this race; none is known.

use std::fs;
use std::os::raw::c_void;

use mpsshim_proto::arena;
use mpsshim_proto::cuda::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_IOMEMORY, CU_MEMHOSTREGISTER_PORTABLE,
    CU_MEMHOSTREGISTER_READ_ONLY, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY,
};

use crate::context::Context;
use crate::ffi::Status;
use crate::memory::{self, Registered};
use crate::stream;
use crate::submit::Session;

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
    if flags & CU_MEMHOSTREGISTER_IOMEMORY != 0 || !is_private_anonymous(first, last) {
        tracing::warn!(
            address = format_args!("{address:#x}"),
            len,
            "memory was to be registered that is not private anonymous memory; not served"
        );
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let room = last - first;
    let block = memory::host_alloc_unowned(session, context, room.max(OWN_GRANT))?;
    // SAFETY: the range is the program's, which may be read as just checked; the block is ours.
    unsafe {
        std::ptr::copy_nonoverlapping(first as *const u8, block as *mut u8, room as usize);
    }
    // SAFETY: whole pages of private anonymous memory; the block has their content.
    if let Err(status) = unsafe { memory::map_again(block, first, room) } {
        let _ = memory::host_give_back(session, block);
        return Err(status);
    }
    memory::add_registered(
        address,
        Registered {
            len,
            arena: block + (address - first),
            block,
            context,
        },
    );
    Ok(())
}

/// Memory of the program that a graph refers to: registered if it is not, and for good. Where it lies in the host
/// arena.
pub fn adopt(session: &Session, context: &'static Context, address: u64, len: u64) -> Status<u64> {
    let end = address.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if memory::registered(address).is_none() {
        let first = address / PAGE * PAGE;
        let room = end.div_ceil(PAGE) * PAGE - first;
        if memory::registered_overlaps(first, room) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        register(session, context, first, room, 0)?;
    }
    match memory::registered(address) {
        Some((start, found)) if len <= found.len - (address - start) => {
            Ok(found.arena + (address - start))
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// Undoes the registration that begins at `address`, after the work that may use it.
pub fn unregister(session: &Session, address: u64) -> Status {
    match memory::registered(address) {
        Some((start, _)) if start == address => {}
        _ => return Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
    }
    stream::quiesce(session, None)?;
    let Some(registered) = memory::remove_registered(address) else {
        return Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    };
    let first = address / PAGE * PAGE;
    let room = (address + registered.len).div_ceil(PAGE) * PAGE - first;
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
        std::ptr::copy_nonoverlapping(registered.block as *const u8, fresh.cast(), room as usize);
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
    memory::host_give_back(session, registered.block)
}

/// Whether all pages of `[first, last)` are readable and writable private memory with no file behind them.
fn is_private_anonymous(first: u64, last: u64) -> bool {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else {
        return false;
    };
    covered(&maps, first, last)
}

/// As [`is_private_anonymous`], by the text of `/proc/self/maps`.
fn covered(maps: &str, first: u64, last: u64) -> bool {
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
        let anonymous = name.is_none_or(|name| name == "[heap]" || name.starts_with("[anon"));
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

#[cfg(test)]
mod tests {
    use super::covered;

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0
3000-4000 rw-p 00000000 00:00 0                  [heap]
4000-5000 r--p 00000000 00:00 0
5000-6000 rw-p 00000000 08:01 77                 /usr/lib/libx.so
8000-9000 rw-p 00000000 00:00 0                  [stack]
";

    #[test]
    fn only_private_anonymous_memory_is_taken() {
        assert!(covered(MAPS, 0x1000, 0x2000));
        assert!(covered(MAPS, 0x2000, 0x4000));
        assert!(!covered(MAPS, 0x2000, 0x5000), "read-only");
        assert!(!covered(MAPS, 0x5000, 0x6000), "a file");
        assert!(!covered(MAPS, 0x8000, 0x9000), "a stack");
        assert!(!covered(MAPS, 0x6000, 0x7000), "nothing");
        assert!(!covered(MAPS, 0x0, 0x2000), "begins before");
    }
}
