//! NVIDIA's own MPS, if the genuine driver of this process will be its client. In direct mode no turns are taken then, since
//! NVIDIA's server runs clients' kernels side by side. The limits that mpsshim's server grants are passed on through the
//! environment, which the genuine `cuInit` reads.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use mpsshim_proto::environment;
use mpsshim_proto::handshake::Welcome;

use crate::{daemon, settings};

/// The pipe directory of NVIDIA's daemon, by its variable or its default.
pub fn pipe_directory() -> PathBuf {
    let directory = settings::nvidia_pipe_directory();
    directory.map_or_else(|| environment::NVIDIA_PIPE_DIRECTORY.into(), PathBuf::from)
}

/// Whether a control daemon listens where the genuine driver looks for one.
pub fn listens() -> bool {
    is_bound(pipe_directory().join("control"))
}

/// Whether a process has an open socket with this path. That process does not notice the check: the kernel first
/// refuses a connection of another type.
fn is_bound(path: PathBuf) -> bool {
    let Some(address) = daemon::address_of(&path) else {
        return false;
    };
    // SAFETY: a plain system call.
    let raw = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if raw < 0 {
        return false;
    }
    // SAFETY: the descriptor is new and ours.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };
    // SAFETY: address and length describe `address`.
    let connected = unsafe {
        libc::connect(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_un>() as libc::socklen_t,
        )
    };
    connected != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EPROTOTYPE)
}

/// Writes the limits granted by the server to the environment, unless the program has requested lower ones itself.
pub fn hand_over(welcome: &Welcome) {
    for (name, value) in variables(welcome) {
        tracing::info!(name, value = %value.display(), "for NVIDIA's MPS");
        // SAFETY: cuInit has not been called yet, so the driver has no threads. A program that reads its environment in
        // another thread at this moment relies on nothing else in this process writing it, as with any library; glibc
        // keeps the strings that were there.
        unsafe { std::env::set_var(name, value) };
    }
}

fn variables(welcome: &Welcome) -> Vec<(&'static str, OsString)> {
    let mut variables = Vec::new();
    let hundredths = welcome.active_thread_centipercent;
    // With partitions by context the program sets it for each.
    if (1..10_000).contains(&hundredths) && !settings::percentage_per_context() {
        let percentage = format!("{}.{:02}", hundredths / 100, hundredths % 100);
        variables.push((settings::ACTIVE_THREAD_PERCENTAGE, percentage.into()));
    }
    // The program's own limits use its device numbers, not NVIDIA's; both limits hold, ours by our own accounting.
    if settings::memory_limits().is_none() {
        let limits = welcome.devices.iter().zip(&welcome.memory);
        let limits = limits.filter(|(_, bytes)| **bytes > 0);
        let limits =
            limits.map(|(uuid, bytes)| format!("{}={}M", uuid_text(uuid), (bytes >> 20).max(1)));
        let limits: Vec<String> = limits.collect();
        if !limits.is_empty() {
            variables.push((settings::PINNED_DEVICE_MEM_LIMIT, limits.join(",").into()));
        }
    }
    if welcome.priority > 0 {
        let priority = welcome.priority.to_string();
        variables.push((settings::CLIENT_PRIORITY, priority.into()));
    }
    variables
}

/// `GPU-` and five groups of hexadecimal digits, as `nvidia-smi -L` shows it.
fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = [&hex[..4], &hex[4..6], &hex[6..8], &hex[8..10], &hex[10..]];
    format!("GPU-{}", groups.map(|group| group.concat()).join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::time::{Duration, Instant};
    use zerocopy::FromZeros;

    #[test]
    fn only_who_listens_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        assert!(!is_bound(path.clone()));
        let listener = UnixListener::bind(&path).unwrap();
        assert!(is_bound(path.clone()));
        // It was not disturbed.
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err());
        drop(listener);
        // Children that tests beside this one have forked meanwhile have it open until they end.
        let until = Instant::now() + Duration::from_secs(60);
        while is_bound(path.clone()) {
            assert!(Instant::now() < until, "what is left of it");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(!is_bound(path));
        assert!(!is_bound(PathBuf::from("x".repeat(200))));
    }

    #[test]
    fn what_is_granted_is_handed_on() {
        let mut welcome = Welcome::new_zeroed();
        welcome.active_thread_centipercent = 10_000;
        assert_eq!(variables(&welcome), []);
        welcome.active_thread_centipercent = 3_305;
        welcome.priority = 1;
        welcome.devices[1] = std::array::from_fn(|at| at as u8);
        welcome.memory[1] = 3 << 30;
        let expected = [
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "33.05"),
            (
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
                "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f=3072M",
            ),
            ("CUDA_MPS_CLIENT_PRIORITY", "1"),
        ];
        assert_eq!(
            variables(&welcome),
            expected.map(|(name, value)| (name, value.into()))
        );
    }
}
