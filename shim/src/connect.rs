//! The way to the daemon.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::{env, mem};

use mpsshim_proto::cuda::CUresult;

/// Whether a daemon listens in the pipe directory.
pub fn daemon_reachable() -> bool {
    let directory =
        env::var_os("MPSSHIM_PIPE_DIRECTORY").map_or("/tmp/mpsshim".into(), PathBuf::from);
    let path = directory
        .join("control")
        .into_os_string()
        .into_encoded_bytes();
    // SAFETY: all zeroes is a valid address of no family.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if path.len() >= address.sun_path.len() {
        return false;
    }
    for (to, from) in address.sun_path.iter_mut().zip(&path) {
        *to = *from as libc::c_char;
    }
    // SAFETY: plain system call.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return false;
    }
    // SAFETY: the descriptor is new and nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: address and length describe `address`.
    unsafe {
        libc::connect(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            mem::size_of::<libc::sockaddr_un>() as libc::socklen_t,
        ) == 0
    }
}

/// Opens a session. `Ok(false)`: there is no daemon after all, and the program runs on the genuine driver.
pub fn connect() -> Result<bool, CUresult> {
    Ok(false)
}
