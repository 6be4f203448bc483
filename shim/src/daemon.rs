//! Where the daemon is, and connections to it.

use std::ffi::CString;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mpsshim_proto::{directory, environment};

use crate::{nvidia_mps, settings};

/// How long a client waits for its server, which may only be starting.
const PATIENCE: Duration = Duration::from_secs(60);

/// The directories in which this process looks for a daemon: the configured one, or the user's own, then root's, then the
/// one below NVIDIA's that a daemon has which was started by NVIDIA's name.
pub fn directories() -> Vec<PathBuf> {
    match settings::pipe_directory() {
        Some(named) => vec![named],
        None => {
            // SAFETY: a plain system call that cannot fail.
            let uid = unsafe { libc::geteuid() };
            let mut all = directory::candidates(uid, settings::runtime_directory().as_deref());
            all.push(nvidia_mps::pipe_directory().join(environment::FOLDER_IN_NVIDIAS));
            all
        }
    }
}

/// The directory of the daemon, if there is one: only root or this process's user can have created it.
pub fn directory() -> Option<PathBuf> {
    find(false, PATIENCE)
}

/// The directory of the daemon whose clients are listed. Root may query any user's daemon that it names.
pub fn directory_to_query(patience: Duration) -> Option<PathBuf> {
    find(settings::pipe_directory().is_some(), patience)
}

fn find(any_owner: bool, patience: Duration) -> Option<PathBuf> {
    let named = settings::pipe_directory().is_some();
    let mut usable = directories();
    usable.retain(|path| {
        match std::path::absolute(path).map(|path| directory::of_client(&path, named, any_owner)) {
            Ok(Ok(_)) => true,
            Ok(Err(refused)) if refused.is_absent() => false,
            Ok(Err(refused)) => {
                tracing::warn!(directory = %path.display(), "not accepted as a daemon: {refused}");
                false
            }
            // The working directory has gone, with any directory relative to it.
            Err(_) => false,
        }
    });
    // Of several directories, the one in which a daemon listens.
    if usable.len() > 1 {
        let listens =
            |path: &PathBuf| matches!(open_within(&path.join("control"), patience), Ok(Some(_)));
        return usable.into_iter().find(listens);
    }
    usable.pop()
}

/// Whether a daemon listens in the pipe directory.
pub fn is_reachable() -> bool {
    directory().is_some_and(|path| matches!(open(&path.join("control")), Ok(Some(_))))
}

/// A connection; `None` if no daemon listens.
pub fn open(path: &Path) -> io::Result<Option<OwnedFd>> {
    open_within(path, PATIENCE)
}

/// As [`open`], for a client that waits no longer than this for each step.
pub fn open_within(path: &Path, patience: Duration) -> io::Result<Option<OwnedFd>> {
    // The folder of a namespace of a named server may have a longer path than a socket.
    let mut folder = None;
    let mut address = address_of(path);
    if address.is_none()
        && let (Some(parent), Some(name)) = (path.parent(), path.file_name())
    {
        folder = open_folder(parent);
        let through = folder.as_ref();
        let through = through.map(|folder| directory::path_of(folder.as_fd()).join(name));
        address = through.and_then(|path| address_of(&path));
    }
    let Some(address) = address else {
        tracing::warn!(path = %path.display(), "too long for a socket, and its folder cannot be opened: not accepted as a daemon");
        return Ok(None);
    };
    // SAFETY: a plain system call.
    let raw = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        set_timeout(&socket, option, patience)?;
    }
    loop {
        // SAFETY: address and length describe `address`.
        let connected = unsafe {
            libc::connect(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_un>() as libc::socklen_t,
            )
        };
        if connected == 0 {
            drop(folder);
            return Ok(Some(socket));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ENOENT | libc::ECONNREFUSED | libc::ENOTDIR | libc::EPROTOTYPE) => {
                return Ok(None);
            }
            Some(libc::EACCES) => {
                tracing::warn!(path = %path.display(), "not allowed to connect to the daemon");
                return Ok(None);
            }
            _ => return Err(error),
        }
    }
}

/// A descriptor of a folder, for paths through it.
fn open_folder(path: &Path) -> Option<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: the path is terminated.
    let raw = unsafe { libc::open(path.as_ptr(), flags) };
    // SAFETY: the descriptor is new and ours.
    (raw >= 0).then(|| unsafe { OwnedFd::from_raw_fd(raw) })
}

/// The address of a socket; `None`: the path is too long for one.
pub fn address_of(path: &Path) -> Option<libc::sockaddr_un> {
    // SAFETY: all zeroes is a valid address of no family.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return None;
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Some(address)
}

fn set_timeout(socket: &OwnedFd, option: libc::c_int, timeout: Duration) -> io::Result<()> {
    let time = libc::timeval {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_usec: 0,
    };
    // SAFETY: option value and length describe `time`.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const time).cast(),
            size_of::<libc::timeval>() as libc::socklen_t,
        )
    };
    if set < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
