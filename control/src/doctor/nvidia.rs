//! NVIDIA's own MPS beside the product.

use super::Finding;
use crate::nvidia_names::{NVIDIA_PIPE_DIRECTORY, nvidia_pipe_directory};
use crate::settings::Settings;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use std::os::fd::AsRawFd;
use std::path::Path;

const CHECK: &str = "NVIDIA's MPS";

/// Whether a daemon listens where the genuine driver looks for NVIDIA's.
pub fn check(settings: &Settings) -> Finding {
    let directory = nvidia_pipe_directory(|name| std::env::var_os(name));
    let shown = directory.display();
    if !is_bound(&directory.join("control")) {
        return Finding::ok(CHECK, format!("No daemon of NVIDIA's listens in {shown}."));
    }
    if directory == settings.pipe_directory {
        return Finding::error(
            CHECK,
            format!(
                "{NVIDIA_PIPE_DIRECTORY} names this product's directory {shown}, so the genuine driver takes the \
                 daemon there for NVIDIA's and fails."
            ),
            format!("Unset {NVIDIA_PIPE_DIRECTORY}, or set it to another directory."),
        );
    }
    Finding::warning(
        CHECK,
        format!(
            "A daemon listens in {shown}, where the genuine driver looks for NVIDIA's: the server becomes a client of \
             NVIDIA's MPS, and its programs share the limits of one client."
        ),
        format!(
            "End it (echo quit | nvidia-cuda-mps-control), or start mps-control with {NVIDIA_PIPE_DIRECTORY} set to an \
             empty directory."
        ),
    )
}

/// Whether a process has an open socket with this path. That process does not notice the check: the kernel first refuses
/// a connection of another type.
fn is_bound(path: &Path) -> bool {
    let flags = SockFlag::SOCK_CLOEXEC;
    let datagrams = socket(AddressFamily::Unix, SockType::Datagram, flags, None);
    let (Ok(socket), Ok(address)) = (datagrams, UnixAddr::new(path)) else {
        return false;
    };
    connect(socket.as_raw_fd(), &address) == Err(Errno::EPROTOTYPE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_with_a_listener_is_bound() {
        let folder = tempfile::tempdir().expect("directory");
        let path = folder.path().join("control");
        assert!(!is_bound(&path));
        let listener = UnixListener::bind(&path).expect("bind");
        assert!(is_bound(&path));
        drop(listener);
        assert!(!is_bound(&path), "stale");
    }
}
