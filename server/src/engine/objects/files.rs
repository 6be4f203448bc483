//! Clients' memory files registered with the driver (`cuMemHostRegister` of a shared mapping).
//!
//! The file belongs to the client, which may truncate it at any time; touching the mapping would then kill this
//! process. So the server never touches it. The driver pins the pages when it registers them, and the device uses these
//! pages from then on, regardless of later changes to the file.

use crate::engine::base::account::Charge;
use crate::engine::base::client_addresses::{self, unmap};
use crate::engine::base::driver::Driver;
use crate::engine::base::pinned::{Pin, is_affordable};
use crate::engine::base::rations::Ration;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::host::HostArena;
use mpsshim_api::cuda::*;
use mpsshim_proto::arena;
use mpsshim_proto::shm::PAGE;
use nix::sys::statfs::{HUGETLBFS_MAGIC, fstatfs};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes of a file populated at a time.
const POPULATED: u64 = 4 << 20;

/// Whose addresses a file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Addresses {
    /// The client's own, which are free in this process.
    Clients,
    /// The host arena's, and the number of bytes taken from it.
    Host(u64),
    /// Those of managed memory that was device memory.
    Managed,
}

/// State from which the next server registers a file again at the same address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Offset and bytes of each part of the file, in the order of their addresses.
    pub parts: Vec<(u64, u64)>,
    /// The server's ordinal of the device.
    pub device: u32,
    /// Whether the addresses are the client's own; otherwise they are the host arena's.
    pub at_clients: bool,
    /// Whether devices may write to it.
    pub writable: bool,
}

/// Why a file of an earlier server cannot be registered again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAdopted {
    /// The client has truncated it, or the state is not valid.
    #[error("its file has become shorter")]
    Shorter,
    /// The process has other memory at its addresses.
    #[error("its addresses are in use in this server")]
    InUse,
    /// Memory or limits do not suffice, or the driver refuses it.
    #[error("{0}")]
    Status(CUresult),
}

impl From<CUresult> for NotAdopted {
    fn from(status: CUresult) -> NotAdopted {
        NotAdopted::Status(status)
    }
}

/// A registered mapping of a client's file.
#[derive(Debug)]
pub struct FileRegistration {
    start: u64,
    len: u64,
    /// Bytes mapped: whole pages of the file, which may be huge pages.
    mapped: u64,
    /// Whose addresses it has.
    addresses: Addresses,
    /// Whether devices may write to it.
    writable: bool,
    /// Charge for its pages.
    _charge: Charge,
    /// Counts its pages for their user until they are unregistered.
    pin: Pin,
    /// Quota for its mapping.
    _place: Ration,
}

impl FileRegistration {
    /// Start address, which is also its device address.
    pub fn start(&self) -> u64 {
        self.start
    }
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }
    /// Whether devices may write to it.
    pub fn is_writable(&self) -> bool {
        self.writable
    }
    /// State for the next server; `None` at addresses of managed memory, which the next server cannot have there.
    pub fn state(&self, parts: &[(u64, u64)], device: u32) -> Option<FileState> {
        let at_clients = match self.addresses {
            Addresses::Clients => true,
            Addresses::Host(_) => false,
            Addresses::Managed => return None,
        };
        Some(FileState {
            parts: parts.to_vec(),
            device,
            at_clients,
            writable: self.writable,
        })
    }
    /// Populates the pages, so that the driver, which cannot be interrupted, finds them. Returns `false` if `stop` said
    /// so. A client that truncates its file, or a kernel before 5.14, leaves that to the driver.
    fn populate(&self, stop: &dyn Fn() -> bool) -> bool {
        let advice = match self.writable {
            true => libc::MADV_POPULATE_WRITE,
            false => libc::MADV_POPULATE_READ,
        };
        let mut at = 0;
        while at < self.mapped {
            if stop() {
                return false;
            }
            let len = POPULATED.min(self.mapped - at);
            // SAFETY: a part of our own mapping. The kernel reports pages that do not exist as an error here.
            let done = unsafe {
                libc::madvise((self.start + at) as *mut libc::c_void, len as usize, advice)
            };
            if done < 0 {
                break;
            }
            at += len;
        }
        true
    }
    /// Notes that the client has unregistered it.
    pub fn leave(mut self) -> FileRegistration {
        self.pin.set_idle(true);
        self
    }
}

/// The parties that pay for a registered file.
pub struct Payment {
    /// The session's account.
    pub charge: Charge,
    /// The user's count.
    pub pin: Pin,
    /// The ration of its mapping.
    pub place: Ration,
}

/// Properties of a client's descriptor, as far as the kernel itself knows them. `fstat` and `fstatfs` are not used on
/// arbitrary files, because they ask the file system, which may be the client's own (FUSE) and never answer.
#[derive(Debug)]
pub struct Looked {
    /// File type: `S_IFREG` or another.
    pub kind: u32,
    /// Major number of a device file.
    pub device_major: u32,
    /// Whether it is in memory: tmpfs, hugetlbfs or a memfd.
    pub in_memory: bool,
    len: u64,
    /// Granularity of its mappings, in bytes.
    page: u64,
}

impl Looked {
    /// Queries a descriptor.
    pub fn at(fd: &OwnedFd) -> Option<Looked> {
        // SAFETY: all zeroes is a valid value of this plain struct; the call writes into it.
        let found = unsafe {
            let mut found: libc::statx = std::mem::zeroed();
            let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
            let wanted = libc::STATX_TYPE | libc::STATX_SIZE;
            let path = c"".as_ptr();
            if libc::statx(fd.as_raw_fd(), path, flags, wanted, &mut found) != 0 {
                return None;
            }
            found
        };
        // Only files in memory have seals; for other files the kernel answers without asking the file system.
        // SAFETY: a plain system call on a descriptor that lives through it.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        let in_memory = seals >= 0;
        Some(Looked {
            kind: u32::from(found.stx_mode) & libc::S_IFMT,
            device_major: found.stx_rdev_major,
            in_memory,
            len: found.stx_size,
            page: if in_memory { page_of(fd)? } else { PAGE },
        })
    }
}

/// Granularity of a memory file's mappings, in bytes. `mmap` rounds lengths up to it; `munmap` requires multiples.
fn page_of(fd: &OwnedFd) -> Option<u64> {
    let found = fstatfs(fd).ok()?;
    match found.filesystem_type() {
        HUGETLBFS_MAGIC => u64::try_from(found.block_size()).ok(),
        _ => Some(PAGE),
    }
}

/// Returns the bytes to map for `len` bytes from `offset` on, if the descriptor is a memory file that contains them.
/// Pages of another file system could block the pinning thread forever.
fn mapped_len(fd: &OwnedFd, offset: u64, len: u64) -> Option<u64> {
    let found = Looked::at(fd).filter(|found| found.kind == libc::S_IFREG && found.in_memory)?;
    let mapped = len.checked_next_multiple_of(found.page)?;
    let fits = offset
        .checked_add(mapped)
        .is_some_and(|end| end <= found.len);
    (fits && offset.is_multiple_of(found.page)).then_some(mapped)
}

fn map(at: u64, len: u64, flags: i32, writable: bool, fd: &OwnedFd, offset: u64) -> Option<u64> {
    let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
    // SAFETY: callers pass addresses that they own, or request free addresses only.
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

/// Returns the bytes to map for parts of a file that are contiguous in memory. Several parts require ordinary pages.
fn mapped_lens(fd: &OwnedFd, parts: &[(u64, u64)]) -> Option<u64> {
    if let [(offset, len)] = parts {
        return mapped_len(fd, *offset, *len);
    }
    let mut all = 0u64;
    for (offset, len) in parts {
        let mapped = mapped_len(fd, *offset, *len)?;
        if mapped != *len || *len == 0 {
            return None;
        }
        all = all.checked_add(mapped)?;
    }
    Some(all)
}

/// Bytes of these parts (offset, bytes) of a client's file together, and bytes that are mapped for them at `wish`.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if the file is not in memory or is too short, or the parts are not whole pages.
pub fn bytes_mapped(fd: &OwnedFd, parts: &[(u64, u64)], wish: u64) -> Result<(u64, u64), CUresult> {
    let whole_pages = |(offset, len): &(u64, u64)| (offset | len).is_multiple_of(PAGE);
    let len = parts
        .iter()
        .try_fold(0u64, |sum, (_, len)| sum.checked_add(*len));
    let len = len.filter(|len| *len > 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if !wish.is_multiple_of(PAGE) || !parts.iter().all(whole_pages) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mapped = mapped_lens(fd, parts).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    Ok((len, mapped))
}

/// Maps parts of a file contiguously from `at` on and replaces the mappings there.
fn map_parts(
    at: u64,
    parts: &[(u64, u64)],
    mapped: u64,
    writable: bool,
    fd: &OwnedFd,
) -> Option<()> {
    let mut start = at;
    for (offset, len) in parts {
        let len = if parts.len() == 1 { mapped } else { *len };
        map(start, len, libc::MAP_FIXED, writable, fd, *offset)?;
        start += len;
    }
    Some(())
}

impl HostArena {
    /// Maps parts (offset, bytes) of a client's file contiguously and registers all of them as one range, at `wish` if
    /// those addresses are free. `stop` is asked, while the pages are populated, whether the session has ended.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the file is not in memory or is too short, `CUDA_ERROR_OUT_OF_MEMORY`, or the
    /// driver's status.
    pub fn register_file(
        &self,
        driver: &Driver,
        fd: &OwnedFd,
        parts: &[(u64, u64)],
        (wish, writable): (u64, bool),
        Payment {
            charge,
            mut pin,
            place,
        }: Payment,
        stop: &dyn Fn() -> bool,
    ) -> Result<FileRegistration, CUresult> {
        let (len, mapped) = bytes_mapped(fd, parts, wish)?;
        let beyond = pin.resize(mapped).err();
        if let Some(beyond) = &beyond {
            tracing::warn!("A file of huge pages is not registered: {beyond}");
        }
        if beyond.is_some() || !is_affordable(len) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let managed = arena::is_managed(wish);
        let map_at = |start| map_parts(start, parts, mapped, writable, fd);
        let at_wish = client_addresses::take(wish, mapped) && {
            let done = map_at(wish).is_some();
            if !done {
                client_addresses::give_back(wish, mapped);
            }
            done
        };
        let (start, addresses) = if at_wish {
            (wish, Addresses::Clients)
        } else if managed {
            // The caller has taken these addresses from the client's managed memory, and holds them.
            map_at(wish).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            (wish, Addresses::Managed)
        } else {
            let (start, room) = self.take(mapped)?;
            if map_at(start).is_none() {
                unmap(start, mapped);
                self.retire(start, room);
                return Err(CUDA_ERROR_OUT_OF_MEMORY);
            }
            (start, Addresses::Host(room))
        };
        let file = FileRegistration {
            start,
            len,
            mapped,
            addresses,
            writable,
            _charge: charge,
            pin,
            _place: place,
        };
        self.register_mapped(driver, file, stop)
    }

    /// Maps a file that an earlier server had registered at `start`, and registers it there again.
    ///
    /// # Errors
    /// [`NotAdopted`].
    pub fn adopt_file(
        &self,
        driver: &Driver,
        fd: &OwnedFd,
        (start, state): (u64, &FileState),
        Payment { charge, pin, place }: Payment,
    ) -> Result<FileRegistration, NotAdopted> {
        let FileState {
            ref parts,
            writable,
            ..
        } = *state;
        let sizes = bytes_mapped(fd, parts, start);
        let (len, mapped) = sizes.map_err(|_| NotAdopted::Shorter)?;
        let addresses = if state.at_clients {
            client_addresses::take(start, mapped).then_some(Addresses::Clients)
        } else {
            self.take_at(start, mapped).map(Addresses::Host)
        };
        let file = FileRegistration {
            start,
            len,
            mapped,
            addresses: addresses.ok_or(NotAdopted::InUse)?,
            writable,
            _charge: charge,
            pin,
            _place: place,
        };
        if map_parts(start, parts, mapped, writable, fd).is_none() {
            self.unmap_file(&file);
            return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
        }
        // The pages exist, unless the client has removed them.
        Ok(self.register_mapped(driver, file, &|| false)?)
    }

    /// Populates and registers a file that is mapped. On failure it is not mapped any more.
    fn register_mapped(
        &self,
        driver: &Driver,
        file: FileRegistration,
        stop: &dyn Fn() -> bool,
    ) -> Result<FileRegistration, CUresult> {
        let read_only = if file.writable {
            0
        } else {
            CU_MEMHOSTREGISTER_READ_ONLY
        };
        let flags = CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_PORTABLE | read_only;
        if !file.populate(stop) {
            self.unmap_file(&file);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        if let Err(status) = driver.mem_host_register(file.start, file.len as usize, flags) {
            self.unmap_file(&file);
            return Err(status);
        }
        let mut device = 0;
        match driver.mem_host_get_device_pointer(&mut device, file.start, 0) {
            Ok(()) if device == file.start => Ok(file),
            // Copies and kernels would need different addresses; no driver for these CPUs returns another address.
            other => {
                self.unregister_file(driver, file);
                Err(other.err().unwrap_or(CUDA_ERROR_NOT_SUPPORTED))
            }
        }
    }

    /// Unregisters and unmaps a file (`cuMemHostUnregister`); may wait for all queued work of all clients.
    pub fn unregister_file(&self, driver: &Driver, file: FileRegistration) {
        if let Err(status) = driver.mem_host_unregister(file.start) {
            tracing::debug!("cuMemHostUnregister({:#x}): {status}", file.start);
        }
        self.unmap_file(&file);
    }

    fn unmap_file(&self, file: &FileRegistration) {
        match file.addresses {
            Addresses::Clients => client_addresses::give_back(file.start, file.mapped),
            Addresses::Host(room) => {
                unmap(file.start, file.mapped);
                self.retire(file.start, room);
            }
            Addresses::Managed => unmap(file.start, file.mapped),
        }
    }
}

impl Gpu {
    /// As [`HostArena::unregister_file`]; addresses of managed memory go back to their device.
    pub fn unregister_file(&self, file: FileRegistration) {
        let (start, len, managed) = (file.start, file.len, file.addresses == Addresses::Managed);
        self.arena.unregister_file(&self.driver, file);
        if let (true, Some(device)) = (managed, self.devices.of_address(start)) {
            self.devices[device].give_back_vacated(start, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_proto::shm::sealed_memfd;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::unistd::ftruncate;
    use std::fs::File;

    #[test]
    fn only_files_in_memory_are_taken_for_such() {
        let memory = sealed_memfd(c"test", 8192).expect("a memory file");
        assert_eq!(mapped_len(&memory, 4096, 4096), Some(4096));
        assert_eq!(mapped_len(&memory, 0, 12288), None);
        assert_eq!(mapped_len(&memory, u64::MAX - 4095, 4096), None);
        let others = ["/dev/null", "/proc/self/maps", "/proc/self/exe", "/"];
        for path in others {
            let other = File::open(path).expect(path).into();
            assert_eq!(mapped_len(&other, 0, 0), None, "{path}");
            let found = Looked::at(&other).expect(path);
            let device = path == "/dev/null";
            assert_eq!(found.kind == libc::S_IFCHR, device, "{path}");
            assert_eq!(found.device_major, u32::from(device), "{path}");
        }
        let (pipe, _) = std::io::pipe().expect("a pipe");
        let found = Looked::at(&pipe.into()).expect("a pipe");
        assert_eq!((found.kind, found.in_memory), (libc::S_IFIFO, false));
    }

    #[test]
    fn files_of_huge_pages_are_mapped_in_whole_pages() {
        const HUGE: u64 = 2 << 20;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
        let made = memfd_create(c"test", flags);
        let made = made.and_then(|fd| ftruncate(&fd, 2 * HUGE as i64).map(|()| fd));
        let file = match made {
            Ok(file) => file,
            Err(error) => return println!("not tested: huge pages ({error})"),
        };
        assert_eq!(mapped_len(&file, 0, 4096), Some(HUGE));
        assert_eq!(mapped_len(&file, HUGE, HUGE), Some(HUGE));
        assert_eq!(mapped_len(&file, 0, HUGE + 4096), Some(2 * HUGE));
        assert_eq!(mapped_len(&file, HUGE, HUGE + 4096), None);
        assert_eq!(mapped_len(&file, 4096, 4096), None);
    }
}
