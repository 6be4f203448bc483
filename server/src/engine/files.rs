//! Memory files of clients that are registered with the driver (`cuMemHostRegister` of a shared mapping).
//!
//! The file is the client's: it can be cut short at any time, and then this process would die of touching the mapping.
//! So nothing here ever touches it. The driver pins the pages when it registers them and from then on the device
//! uses those, whatever becomes of the file.

use super::driver::Driver;
use super::host::{HostArena, is_affordable};
use mpsshim_proto::cuda::*;
use std::os::fd::{AsRawFd, OwnedFd};

const PAGE: u64 = 4096;
/// Where a client's mappings usually lie, and nothing of ours grows: a file is mapped at the client's own address if
/// that is free here, so that kernels may use the pointer that the program has.
const CLIENT_MAPPINGS: std::ops::Range<u64> = 0x7000_0000_0000..0x7fe0_0000_0000;

/// Where a file is to be mapped.
#[derive(Debug, Clone, Copy)]
pub enum Wish {
    /// At this address if it is free, else somewhere.
    Rather(u64),
    /// Nowhere else.
    Only(u64),
}

/// A registered mapping of a client's file.
#[derive(Debug)]
pub struct FileRegistration {
    start: u64,
    len: u64,
    /// Bytes taken from the host arena, if it lies there.
    room: Option<u64>,
    /// Bytes charged to the session.
    counted: u64,
}

impl FileRegistration {
    /// First address, which is the device's too.
    pub fn start(&self) -> u64 {
        self.start
    }
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }
    /// Bytes charged to the session.
    pub fn counted(&self) -> u64 {
        self.counted
    }
    /// The pages are charged already.
    pub fn uncounted(self) -> FileRegistration {
        FileRegistration { counted: 0, ..self }
    }
}

/// Whether a descriptor is a file in memory that has these bytes. Pages of any other file system could keep the
/// thread that pins them for ever.
fn is_in_memory(fd: &OwnedFd, end: u64) -> bool {
    // SAFETY: all zeroes is a valid value of these plain structs; the calls write into them.
    unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        let mut system: libc::statfs = std::mem::zeroed();
        libc::fstat(fd.as_raw_fd(), &mut found) == 0
            && found.st_mode & libc::S_IFMT == libc::S_IFREG
            && u64::try_from(found.st_size).is_ok_and(|size| end <= size)
            && libc::fstatfs(fd.as_raw_fd(), &mut system) == 0
            && matches!(system.f_type, libc::TMPFS_MAGIC | libc::HUGETLBFS_MAGIC)
    }
}

fn map(at: u64, len: u64, flags: i32, writable: bool, fd: &OwnedFd, offset: u64) -> Option<u64> {
    let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
    // SAFETY: callers name addresses that are theirs, or ask for what is free only.
    let got = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            len as usize,
            protection,
            flags | libc::MAP_SHARED,
            fd.as_raw_fd(),
            offset as libc::off_t,
        )
    };
    (got != libc::MAP_FAILED).then_some(got as u64)
}

fn unmap(start: u64, len: u64) {
    // SAFETY: a mapping that this module made, which nobody can name any more.
    unsafe { libc::munmap(start as *mut libc::c_void, len as usize) };
}

impl HostArena {
    /// Maps and registers `[offset, offset + len)` of a client's file, at `wish` if those addresses are free.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a file that is none in memory or too short, `CUDA_ERROR_OUT_OF_MEMORY`, or the
    /// driver's.
    pub fn register_file(
        &self,
        driver: &Driver,
        fd: &OwnedFd,
        (offset, len): (u64, u64),
        wish: Wish,
        writable: bool,
    ) -> Result<FileRegistration, CUresult> {
        let (wish, only) = match wish {
            Wish::Rather(address) => (address, false),
            Wish::Only(address) => (address, true),
        };
        let end = offset.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let whole = (offset | len | wish).is_multiple_of(PAGE) && len > 0;
        if !whole || !is_in_memory(fd, end) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if !is_affordable(len) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let fits = CLIENT_MAPPINGS.contains(&wish) && len <= CLIENT_MAPPINGS.end - wish;
        let at_wish = fits
            .then(|| map(wish, len, libc::MAP_FIXED_NOREPLACE, writable, fd, offset))
            .flatten();
        let file = match at_wish {
            Some(start) if start == wish => FileRegistration {
                start,
                len,
                room: None,
                counted: len,
            },
            elsewhere => {
                if let Some(start) = elsewhere {
                    unmap(start, len);
                }
                if only {
                    return Err(CUDA_ERROR_NOT_SUPPORTED);
                }
                let (start, room) = self.take(len)?;
                if map(start, len, libc::MAP_FIXED, writable, fd, offset).is_none() {
                    self.retire(start, room);
                    return Err(CUDA_ERROR_OUT_OF_MEMORY);
                }
                FileRegistration {
                    start,
                    len,
                    room: Some(room),
                    counted: len,
                }
            }
        };
        let read_only = if writable {
            0
        } else {
            CU_MEMHOSTREGISTER_READ_ONLY
        };
        let flags = CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE | read_only;
        if let Err(status) = driver.mem_host_register(file.start, len as usize, flags) {
            self.unmap_file(&file);
            return Err(status);
        }
        let mut device = 0;
        match driver.mem_host_get_device_pointer(&mut device, file.start, 0) {
            Ok(()) if device == file.start => Ok(file),
            // Copies and kernels would need two addresses; no driver on these processors does this.
            other => {
                self.unregister_file(driver, file);
                Err(other.err().unwrap_or(CUDA_ERROR_NOT_SUPPORTED))
            }
        }
    }

    /// Undoes a registration; may wait for all work that is queued anywhere.
    pub fn unregister_file(&self, driver: &Driver, file: FileRegistration) {
        if let Err(status) = driver.mem_host_unregister(file.start) {
            tracing::debug!("cuMemHostUnregister({:#x}): {status}", file.start);
        }
        self.unmap_file(&file);
    }

    fn unmap_file(&self, file: &FileRegistration) {
        unmap(file.start, file.len);
        if let Some(room) = file.room {
            self.retire(file.start, room);
        }
    }
}
