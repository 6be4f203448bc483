//! Sealed memory files, mappings, futexes, doorbells and descriptors over sockets.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Bytes of a page of memory.
pub const PAGE: u64 = 4096;

/// A memory file of `len` bytes that can neither shrink nor grow (`memfd_create(2)`, `F_ADD_SEALS`).
///
/// # Errors
/// Those of the system calls: no memory, no descriptors.
pub fn sealed_memfd(name: &std::ffi::CStr, len: u64) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call with a NUL-ended name.
    let raw = check(unsafe {
        libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    })?;
    // SAFETY: the descriptor is new and ours.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    let len = i64::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: plain system calls on our descriptor.
    unsafe {
        check(libc::ftruncate(raw, len))?;
        check(libc::fcntl(
            raw,
            libc::F_ADD_SEALS,
            libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
        ))?;
    }
    Ok(fd)
}

/// Whether a memory file is sealed against shrinking and has at least `len` bytes, so that they can be read at any
/// time. A mapping of a file that another process made may still raise SIGBUS, if that process removes pages and no
/// memory is left for new ones: see [`read_sealed`].
pub fn is_sealed(fd: BorrowedFd<'_>, len: u64) -> bool {
    // SAFETY: plain system calls on a borrowed descriptor.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    // Checked before the size: only memory files have seals, while the owner of a file in a FUSE file system, for
    // example, could block `fstat` for any length of time.
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return false;
    }
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `stat` is large enough; it is read only when the call succeeded.
    let size = unsafe {
        if libc::fstat(fd.as_raw_fd(), stat.as_mut_ptr()) < 0 {
            return false;
        }
        stat.assume_init().st_size
    };
    size >= 0 && size as u64 >= len
}

/// Fills `bytes` from the beginning of a memory file that another process made. Holes read as zeros and stay holes. A
/// mapping would add pages, could fail for lack of them (`MFD_HUGETLB`), and would have to be unmapped in units of
/// them.
///
/// # Errors
/// `InvalidInput` unless [`is_sealed`], since other files may keep the reader waiting; those of `pread(2)`.
pub fn read_sealed(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<()> {
    if !is_sealed(fd, bytes.len() as u64) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut at = 0;
    while at < bytes.len() {
        let rest = &mut bytes[at..];
        // SAFETY: writes at most as many bytes as `rest` has.
        let read = unsafe {
            libc::pread(
                fd.as_raw_fd(),
                rest.as_mut_ptr().cast(),
                rest.len(),
                at as libc::off_t,
            )
        };
        match read {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            1.. => at += read as usize,
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Opens a memory file again: the new description shares nothing with `fd` but the file.
///
/// # Errors
/// Those of `open(2)`; needs /proc.
pub fn reopen(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = std::ffi::CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    // SAFETY: a plain system call with a NUL-ended path.
    let raw = check(unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) })?;
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Whether `fd`, opened by [`reopen`], is the only description of its file: other processes neither map the file nor
/// have it open. Checked by taking a lease, which the kernel grants only then. If another process opens the file while
/// the lease is held, the kernel sends SIGIO, which this process must ignore. `false` in case of doubt.
pub fn is_sole(fd: BorrowedFd<'_>) -> bool {
    let lease = |kind: i32| {
        // SAFETY: a plain system call on a borrowed descriptor.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, kind) }
    };
    lease(libc::F_WRLCK) == 0 && lease(libc::F_UNLCK) == 0
}

/// Bytes populated at a time.
const POPULATED: usize = 4 << 20;
/// Bytes released at a time.
const LET_GO: usize = 32 << 20;

/// A shared mapping of a memory file; unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: a mapping is memory of the process, not of a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; it hands out only a raw pointer.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` for reading and writing, populated.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    pub fn new(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        Mapping::map(std::ptr::null_mut(), fd, len, libc::MAP_SHARED)
    }

    /// As [`Mapping::new`], but not populated: memory is taken only for pages that are touched.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    pub fn sparse(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        Mapping::map_sparse(std::ptr::null_mut(), fd, len, libc::MAP_SHARED)
    }

    /// Maps at exactly `address`, which the caller has reserved (see [`Reservation`]).
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    ///
    /// # Safety
    /// `[address, address + len)` must be reserved by the caller and used by nothing else.
    pub unsafe fn at(address: u64, fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        Mapping::map(address as *mut u8, fd, len, flags)
    }

    /// As [`Mapping::at`], but not populated.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    ///
    /// # Safety
    /// As [`Mapping::at`].
    pub unsafe fn sparse_at(address: u64, fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        Mapping::map_sparse(address as *mut u8, fd, len, flags)
    }

    fn map(
        address: *mut u8,
        fd: BorrowedFd<'_>,
        len: usize,
        flags: libc::c_int,
    ) -> io::Result<Mapping> {
        let mapping = Mapping::map_sparse(address, fd, len, flags)?;
        mapping.populate();
        Ok(mapping)
    }

    fn map_sparse(
        address: *mut u8,
        fd: BorrowedFd<'_>,
        len: usize,
        flags: libc::c_int,
    ) -> io::Result<Mapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: with a null address the kernel chooses a free place; with a fixed one the caller of `at` vouches.
        let base = unsafe { libc::mmap(address.cast(), len, protection, flags, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping {
            base: base.cast(),
            len,
        })
    }

    /// Populates the pages now rather than at the first touch, a few at a time: while the kernel allocates them, the
    /// process can neither map nor unmap memory, so that `MAP_POPULATE` of some GiB would block all threads for
    /// seconds. Pages that cannot be allocated now (or by a kernel before 5.14) are allocated when they are touched.
    fn populate(&self) {
        self.advise(libc::MADV_POPULATE_WRITE, POPULATED);
    }

    /// Populates the next few pages from `offset` on, as [`Mapping::new`] does with all. Returns the offset of the next
    /// ones: the mapping's length if all are populated, or cannot be.
    pub fn populate_some(&self, offset: usize) -> usize {
        let len = POPULATED.min(self.len.saturating_sub(offset));
        if len == 0 || !self.advise_part(libc::MADV_POPULATE_WRITE, offset, len) {
            return self.len;
        }
        offset + len
    }

    /// Removes the pages in pieces before the mapping is unmapped, for the same reason; the file keeps them.
    fn let_go(&self) {
        if self.len > LET_GO {
            self.advise(libc::MADV_DONTNEED, LET_GO);
        }
    }

    fn advise(&self, advice: libc::c_int, step: usize) {
        let mut at = 0;
        while at < self.len {
            let len = step.min(self.len - at);
            if !self.advise_part(advice, at, len) {
                return;
            }
            at += len;
        }
    }

    fn advise_part(&self, advice: libc::c_int, offset: usize, len: usize) -> bool {
        // SAFETY: a part of our own mapping, whose content is the file's and does not change.
        unsafe { libc::madvise(self.base.add(offset).cast(), len, advice) >= 0 }
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Replaces the mapping with inaccessible memory, so that the addresses stay reserved.
    pub fn retire(self) {
        let this = std::mem::ManuallyDrop::new(self);
        this.let_go();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: replaces our own mapping, to which no reference exists any more.
        unsafe { libc::mmap(this.base.cast(), this.len, libc::PROT_NONE, flags, -1, 0) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.let_go();
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// Addresses that nothing else in this process will be mapped at.
#[derive(Debug)]
pub struct Reservation {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

impl Reservation {
    /// Reserves exactly these addresses.
    ///
    /// # Errors
    /// When some of them are in use, or an address-space limit forbids it.
    pub fn at(start: u64, len: u64) -> io::Result<Reservation> {
        let flags = libc::MAP_PRIVATE
            | libc::MAP_ANONYMOUS
            | libc::MAP_NORESERVE
            | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: NOREPLACE never touches existing mappings.
        let base =
            unsafe { libc::mmap(start as *mut _, len as usize, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        if base as u64 != start {
            // A kernel that does not know the flag takes the address for a hint.
            // SAFETY: just mapped by us.
            unsafe { libc::munmap(base, len as usize) };
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        Ok(Reservation { start, len })
    }
    /// Whether `[address, address + len)` lies inside.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        address >= self.start && len <= self.len && address - self.start <= self.len - len
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: our own reservation and whatever was put into it.
        unsafe { libc::munmap(self.start as *mut _, self.len as usize) };
    }
}

/// Sleeps while `*word == expected`, at most `timeout`; may return early for no reason (`futex(2)`, shared).
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let time = libc::timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: the word outlives the call; the kernel reads it atomically.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &time,
            0,
            0,
        )
    };
}

/// Wakes all sleepers on `word`, in any process.
pub fn futex_wake(word: &AtomicU32) {
    // SAFETY: only the address is used.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE,
            i32::MAX,
            0,
            0,
            0,
        )
    };
}

/// A counter that wakes the thread that polls it (`eventfd(2)`), non-blocking.
#[derive(Debug)]
pub struct Doorbell(OwnedFd);

impl Doorbell {
    /// A silent doorbell.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn new() -> io::Result<Doorbell> {
        // SAFETY: a plain system call.
        let raw = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: the descriptor is new and ours.
        Ok(Doorbell(unsafe { OwnedFd::from_raw_fd(raw) }))
    }
    /// A doorbell that came over a socket.
    pub fn from_fd(fd: OwnedFd) -> Doorbell {
        Doorbell(fd)
    }
    /// Rings. A full counter means that it rings already.
    pub fn ring(&self) {
        let one = 1u64;
        // SAFETY: writes eight bytes from a local.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }
    /// Stops ringing.
    pub fn silence(&self) {
        let mut count = 0u64;
        // SAFETY: reads eight bytes into a local.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
    /// The descriptor, for `epoll` and for passing on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.0.as_fd()
    }
}

const MAX_DESCRIPTORS: usize = 4;

/// Sends one packet with up to four descriptors (`SCM_RIGHTS`).
///
/// # Errors
/// Those of `sendmsg(2)`; the peer being gone is `BrokenPipe`, never a signal.
pub fn send_packet(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send(socket, bytes, descriptors, 0)
}

/// As [`send_packet`], but never waits for a peer that does not receive.
///
/// # Errors
/// Those of `sendmsg(2)`; `WouldBlock` when the peer has as much waiting as it may.
pub fn send_packet_now(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send(socket, bytes, descriptors, libc::MSG_DONTWAIT)
}

fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: libc::c_int,
) -> io::Result<()> {
    assert!(descriptors.len() <= MAX_DESCRIPTORS);
    let mut iov = libc::iovec {
        iov_base: bytes.as_ptr() as *mut _,
        iov_len: bytes.len(),
    };
    let mut control = [0u64; 8];
    // SAFETY: a zeroed msghdr is valid; its pointers are to locals that outlive the call; the control buffer is
    // aligned for a cmsghdr and large enough for MAX_DESCRIPTORS descriptors (16 + 4 * 4 < 64 bytes).
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &mut iov;
        header.msg_iovlen = 1;
        if !descriptors.is_empty() {
            let len = (size_of::<RawFd>() * descriptors.len()) as u32;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = libc::CMSG_SPACE(len) as usize;
            let cmsg = libc::CMSG_FIRSTHDR(&header);
            (*cmsg).cmsg_level = libc::SOL_SOCKET;
            (*cmsg).cmsg_type = libc::SCM_RIGHTS;
            (*cmsg).cmsg_len = libc::CMSG_LEN(len) as usize;
            for (i, fd) in descriptors.iter().enumerate() {
                libc::CMSG_DATA(cmsg)
                    .cast::<RawFd>()
                    .add(i)
                    .write_unaligned(fd.as_raw_fd());
            }
        }
        loop {
            if libc::sendmsg(socket.as_raw_fd(), &header, libc::MSG_NOSIGNAL | flags) >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

/// Words of a control message with as many descriptors as a packet can have (`SCM_MAX_FD` of Linux), its header included.
const CONTROL: usize = (16 + 253 * size_of::<RawFd>()).div_ceil(8) + 4;

/// The process at the other end of a Unix socket (`SO_PEERCRED`). The pid is 0 for a process that this PID namespace does
/// not have.
///
/// # Errors
/// Those of `getsockopt(2)`.
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut found = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: value and length describe `found`.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    })?;
    Ok(found)
}

/// Receives one packet into `bytes` with its descriptors (close-on-exec). `Ok((0, _))`: the peer is gone.
///
/// # Errors
/// Those of `recvmsg(2)`: `WouldBlock` when there is none and `wait` is false; `InvalidData` for a packet longer
/// than `bytes`, or whose descriptors this process has no room for.
pub fn recv_packet(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    wait: bool,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut descriptors = Vec::new();
    let len = recv_packet_with(socket, bytes, wait, &mut descriptors)?;
    Ok((len, descriptors))
}

/// As [`recv_packet`], but appends the descriptors to `descriptors`, even if the packet is refused. No descriptor is
/// dropped by the kernel: there is room for as many as a packet can have.
///
/// # Errors
/// As [`recv_packet`].
pub fn recv_packet_with(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    wait: bool,
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut iov = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut control = [0u64; CONTROL];
    let flags = libc::MSG_CMSG_CLOEXEC | if wait { 0 } else { libc::MSG_DONTWAIT };
    // SAFETY: as in `send_packet`; the descriptors found are new and ours, each is taken once.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &mut iov;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&control);
        let len = loop {
            let len = libc::recvmsg(socket.as_raw_fd(), &mut header, flags);
            if len >= 0 {
                break len as usize;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        };
        let mut cmsg = libc::CMSG_FIRSTHDR(&header);
        while !cmsg.is_null() {
            if (*cmsg).cmsg_level == libc::SOL_SOCKET && (*cmsg).cmsg_type == libc::SCM_RIGHTS {
                let count = ((*cmsg).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                for i in 0..count {
                    let raw = libc::CMSG_DATA(cmsg)
                        .cast::<RawFd>()
                        .add(i)
                        .read_unaligned();
                    descriptors.push(OwnedFd::from_raw_fd(raw));
                }
            }
            cmsg = libc::CMSG_NXTHDR(&header, cmsg);
        }
        let refused = match header.msg_flags {
            flags if flags & libc::MSG_TRUNC != 0 => "packet too long",
            // This process has no room for more, or they came by another way than `SCM_RIGHTS`.
            flags if flags & libc::MSG_CTRUNC != 0 => "descriptors were lost",
            _ => return Ok(len),
        };
        Err(io::Error::new(io::ErrorKind::InvalidData, refused))
    }
}

/// Whether the peer of a socket has closed it. Takes no packet.
pub fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd {
        fd: socket.as_raw_fd(),
        events: libc::POLLRDHUP,
        revents: 0,
    };
    // SAFETY: one pollfd, no waiting.
    let ready = unsafe { libc::poll(&mut poll, 1, 0) };
    ready > 0 && poll.revents & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR) != 0
}

#[cfg(test)]
mod tests;
