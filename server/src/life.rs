//! A connection that closes as soon as the threads of this process end.
//!
//! When a process with a CUDA context is killed, its connections close only after the kernel has released its memory, which
//! takes more than 100 ms. A thread with descriptors of its own gives these up as it ends, at once.

use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::thread;

/// The other end of the process's connection, for the daemon; one for all daemons that take the server over.
///
/// # Errors
/// If there is no descriptor, or the thread cannot be started or cannot have descriptors of its own.
pub fn watched() -> io::Result<BorrowedFd<'static>> {
    static OTHER: OnceLock<OwnedFd> = OnceLock::new();
    if OTHER.get().is_none() {
        let _ = OTHER.set(connection()?);
    }
    OTHER
        .get()
        .map(AsFd::as_fd)
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// A new connection: starts the thread that has one end, and returns the other.
fn connection() -> io::Result<OwnedFd> {
    let (own, other) = socketpair(
        AddressFamily::Unix,
        SockType::Stream,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?;
    let (sender, receiver) = channel();
    let number = own.as_raw_fd();
    thread::Builder::new()
        .name("life".into())
        .stack_size(64 << 10)
        .spawn(move || {
            let has_own = keep_only(number);
            let ends = has_own.is_err();
            let _ = sender.send(has_own);
            if ends {
                return;
            }
            loop {
                thread::park();
            }
        })?;
    let has_own = receiver.recv().map_err(io::Error::other)?;
    // The thread has a copy.
    drop(own);
    has_own.map(|()| other)
}

/// Gives the calling thread descriptors of its own, and closes all of them but one.
fn keep_only(kept: i32) -> io::Result<()> {
    // Container runtimes forbid unshare(2).
    const OWN: libc::c_uint = libc::CLOSE_RANGE_UNSHARE;
    let kept = kept as libc::c_uint;
    let close = |first: libc::c_uint, last: libc::c_uint| {
        if first > last {
            return Ok(());
        }
        // SAFETY: descriptors of this thread alone, which uses none of them.
        match unsafe { libc::syscall(libc::SYS_close_range, first, last, OWN) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    close(kept + 1, libc::c_uint::MAX)?;
    match kept.checked_sub(1) {
        Some(last) => close(0, last),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    #[test]
    fn the_connection_stays_open_while_the_thread_lives() {
        let other = watched().expect("a connection");
        let mut ended = [PollFd::new(other, PollFlags::empty())];
        assert_eq!(poll(&mut ended, PollTimeout::from(50u8)), Ok(0));
        let again = watched().expect("the same");
        assert_eq!(again.as_raw_fd(), other.as_raw_fd());
    }
}
