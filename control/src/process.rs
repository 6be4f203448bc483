//! A server's process: a child of this daemon, or of a daemon that has died.

use mpsshim_model::client::Credentials;
use nix::sys::socket::{getsockopt, sockopt};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, ExitStatus};

/// A server's process.
pub enum Process {
    /// Started by this daemon.
    Child(Child),
    /// Started by a previous daemon. The descriptor refers to this process even if its process id is reused.
    Other(OwnedFd),
}

impl Process {
    /// The process at the other end of a connection.
    ///
    /// # Errors
    /// It has ended, or the kernel cannot identify it reliably.
    pub fn of_peer(connection: BorrowedFd<'_>, who: Credentials) -> io::Result<Process> {
        match getsockopt(&connection, sockopt::PeerPidfd) {
            Ok(pidfd) => Ok(Process::Other(pidfd)),
            // Before Linux 6.5.
            Err(nix::errno::Errno::ENOPROTOOPT) => by_number(who),
            Err(error) => Err(error.into()),
        }
    }

    /// Becomes readable when the process has ended; a child's end is a signal instead.
    pub fn end(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Process::Child(_) => None,
            Process::Other(pidfd) => Some(pidfd.as_fd()),
        }
    }

    /// Kills it, unless it has ended.
    ///
    /// # Errors
    /// This process lacks the permission.
    pub fn kill(&mut self) -> io::Result<()> {
        let sent = match self {
            Process::Child(child) => child.kill(),
            Process::Other(pidfd) => {
                // SAFETY: a plain system call on an open descriptor; no signal information is given.
                let sent = unsafe {
                    libc::syscall(
                        libc::SYS_pidfd_send_signal,
                        pidfd.as_raw_fd(),
                        libc::SIGKILL,
                        std::ptr::null::<libc::siginfo_t>(),
                        0,
                    )
                };
                if sent < 0 {
                    Err(io::Error::last_os_error())
                } else {
                    Ok(())
                }
            }
        };
        match sent {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            sent => sent,
        }
    }

    /// Whether none of its threads executes code of the process any more, although the kernel may not have released all
    /// its resources yet: its memory is gone. Only known for a child.
    pub fn is_exiting(&self) -> bool {
        let Process::Child(child) = self else {
            return false;
        };
        // The process id cannot be reused before this process waits for the child. The kernel counts these pages without
        // the lock of the memory map, which the process could keep (as it could for cmdline, environ and maps).
        let is_gone = |pages: io::Result<String>| {
            pages.is_ok_and(|pages| pages.split_whitespace().all(|pages| pages == "0"))
        };
        if !is_gone(fs::read_to_string(format!("/proc/{}/statm", child.id()))) {
            return false;
        }
        // Each thread gives the memory up by itself. The directory of an ended thread is gone.
        let Ok(threads) = fs::read_dir(format!("/proc/{}/task", child.id())) else {
            return false;
        };
        threads.flatten().all(|thread| {
            let pages = fs::read_to_string(thread.path().join("statm"));
            pages.is_err() || is_gone(pages)
        })
    }

    /// Whether it has ended, and its status, which is only known for a child.
    ///
    /// # Errors
    /// When the system cannot tell.
    pub fn ended(&mut self) -> io::Result<Option<Option<ExitStatus>>> {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        match self {
            Process::Child(child) => Ok(child.try_wait()?.map(Some)),
            Process::Other(pidfd) => {
                let mut ended = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
                let count = poll(&mut ended, PollTimeout::ZERO)?;
                Ok((count > 0).then_some(None))
            }
        }
    }
}

/// Identifies the process by its process id, which may have been reused: the user must match, so that nothing is done
/// to the process beyond that user's own rights.
fn by_number(who: Credentials) -> io::Result<Process> {
    // SAFETY: a plain system call.
    let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, who.pid, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner; descriptors have 31 bits.
    let mut process = Process::Other(unsafe { OwnedFd::from_raw_fd(raw as i32) });
    let owner = fs::metadata(format!("/proc/{}", who.pid))?.uid();
    // It still runs, so the owner just read is the owner of this process.
    if owner != who.uid || process.ended()?.is_some() {
        return Err(io::Error::from(io::ErrorKind::NotFound));
    }
    Ok(process)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn a_process_is_watched_and_killed_by_its_number() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let uid = nix::unistd::geteuid().as_raw();
        let who = |uid| Credentials {
            pid: child.id() as i32,
            uid,
            gid: 0,
        };
        assert!(by_number(who(uid + 1)).is_err(), "another user's");
        let mut process = by_number(who(uid)).expect("it runs");
        assert!(process.end().is_some());
        assert_eq!(process.ended().expect("poll"), None);
        process.kill().expect("killed");
        let until = Instant::now() + Duration::from_secs(5);
        while process.ended().expect("poll").is_none() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(1));
        }
        let gone = who(uid);
        child.wait().expect("reaped");
        assert!(by_number(gone).is_err());
        process.kill().expect("nothing happens");
    }

    #[test]
    fn the_peer_of_a_connection_is_this_process() {
        let (_left, right) = crate::seqpacket::pair().expect("pair");
        let who = crate::seqpacket::peer(right.as_fd()).expect("peer");
        let mut process = Process::of_peer(right.as_fd(), who).expect("this process");
        assert_eq!(process.ended().expect("poll"), None);
    }
}
