//! The directory in which daemon and clients meet, and the conditions under which a directory is trusted.
//!
//! A user who can write to a directory, or to one above it, can replace the files that a process expects there.
//! [`open`] therefore walks a path from the root, one component at a time and each relative to the one before, and only
//! passes directories owned by root or by the process's user.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The directory of root's daemon, which serves all users.
pub const SYSTEM: &str = "/run/mpsshim";

/// The default directories of a user's own daemons. A daemon started now uses the first; the others may be left from a
/// login session without a runtime directory.
///
/// `runtime` is `XDG_RUNTIME_DIR`, which is ignored unless that user owns it.
pub fn own(uid: u32, runtime: Option<&OsStr>) -> Vec<PathBuf> {
    if uid == 0 {
        return vec![SYSTEM.into()];
    }
    let is_own = |path: &Path| {
        path.is_absolute() && fs::metadata(path).is_ok_and(|found| found.uid() == uid)
    };
    let runtime = runtime.map(Path::new).filter(|path| is_own(path));
    let runtime = runtime.map(|path| path.join("mpsshim"));
    let temporary = PathBuf::from(format!("/tmp/mpsshim-{uid}"));
    runtime.into_iter().chain([temporary]).collect()
}

/// Where a user's program looks for a daemon if no directory is set, in this order: the user's own, then root's.
pub fn candidates(uid: u32, runtime: Option<&OsStr>) -> Vec<PathBuf> {
    let mut directories = own(uid, runtime);
    if uid != 0 {
        directories.push(SYSTEM.into());
    }
    directories
}

/// Opens a client's directory of sockets, which must exist.
pub fn of_client(path: &Path, named: bool, any_owner: bool) -> Result<OwnedFd, Refused> {
    let walk = Walk {
        purpose: Purpose::Sockets,
        create: None,
        named,
        any_owner,
    };
    open(path, walk)
}

/// Symbolic links that one path may lead through, as in the kernel.
const MOST_LINKS: usize = 40;

/// Why a directory is not used.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The directory, or one above it, belongs to another user.
    #[error("{} belongs to user {owner}; it must belong to root or to user {uid}", .path.display())]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        uid: u32,
    },
    /// It, or one above it, is writable by others.
    #[error("others can write in {} (mode {mode:04o})", .path.display())]
    Writable {
        /// The directory.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A symbolic link that another user may have put there.
    #[error("{} is a symbolic link that is not followed", .path.display())]
    Link {
        /// The link.
        path: PathBuf,
    },
    /// It cannot be opened or created.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The directory, or the one above it at which the walk failed.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

impl Refused {
    /// Whether the directory does not exist.
    pub fn is_absent(&self) -> bool {
        matches!(self, Refused::Io { source, .. }
            if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory))
    }
}

/// The purpose of a directory, which decides who may write in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It holds the daemon's sockets: only its owner may write there.
    Sockets,
    /// It holds logs, each of which is checked when it is opened. As in /var/log, a group chosen by root may write
    /// there, and all users may if the sticky bit protects their files from one another.
    Logs,
}

/// How to walk to a directory.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    /// Purpose of the directory.
    pub purpose: Purpose,
    /// Permissions of the directory if it has to be created; `None`: it must exist.
    pub create: Option<u32>,
    /// The path was given explicitly, so that it may lead through directories of users unknown to this user namespace:
    /// they are mounted from outside.
    pub named: bool,
    /// Root may explicitly name the directory of any user's daemon.
    pub any_owner: bool,
}

/// Opens a directory after checking it and all directories above it.
///
/// They must belong to root or to the effective user, and must not be writable by others, unless the sticky bit
/// prevents those from replacing files of other users. Symbolic links are followed only if root or that user must have
/// created them.
///
/// # Errors
/// The first directory that fails a check, and the reason.
pub fn open(path: &Path, walk: Walk) -> Result<OwnedFd, Refused> {
    // SAFETY: a plain system call that cannot fail.
    let uid = unsafe { libc::geteuid() };
    let mut left: VecDeque<OsString> = components(path);
    let mut at = PathBuf::from("/");
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| Refused::Io { path, source }
    };
    let mut here = open_at(None, c"/", libc::O_DIRECTORY).map_err(failed(&at))?;
    let mut links = 0;
    let mut sticky = false;
    loop {
        let found = stat(&here).map_err(failed(&at))?;
        let owner = Owner {
            uid,
            walk,
            in_sticky: sticky,
            unmapped: unmapped(),
        };
        if left.is_empty() {
            let checked = check_last(&at, &found, &owner);
            if checked.is_err() && walk.create.is_some() && closes(&here, &found, &owner) {
                continue;
            }
            return checked.map(|()| here);
        }
        check_parent(&at, &found, &owner)?;
        sticky = found.st_mode & libc::S_ISVTX != 0 && found.st_mode & 0o022 != 0;
        let Some(name) = left.pop_front() else {
            return Ok(here);
        };
        let next_path = at.join(&name);
        let failed_here = failed(&next_path);
        let c_name = CString::new(name.as_bytes()).map_err(|_| Refused::Io {
            path: next_path.clone(),
            source: io::Error::from_raw_os_error(libc::EINVAL),
        })?;
        let next = match open_at(Some(&here), &c_name, 0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && walk.create.is_some() => {
                let mode = walk.create.filter(|_| left.is_empty()).unwrap_or(0o755);
                make(&here, &c_name, mode)
            }
            opened => opened,
        }
        .map_err(failed_here)?;
        let kind = stat(&next).map_err(failed(&next_path))?;
        match kind.st_mode & libc::S_IFMT {
            libc::S_IFDIR => {
                at = next_path;
                here = next;
            }
            libc::S_IFLNK => {
                links += 1;
                let trusted = !sticky && owner.is_trusted(kind.st_uid);
                if !trusted || links > MOST_LINKS {
                    return Err(Refused::Link { path: next_path });
                }
                let target = read_link(&next).map_err(failed(&next_path))?;
                let mut ahead = components(&target);
                ahead.append(&mut left);
                left = ahead;
                if target.is_absolute() {
                    at = PathBuf::from("/");
                    here = open_at(None, c"/", libc::O_DIRECTORY).map_err(failed(&at))?;
                    sticky = false;
                }
            }
            _ => {
                return Err(Refused::Io {
                    path: next_path,
                    source: io::Error::from_raw_os_error(libc::ENOTDIR),
                });
            }
        }
    }
}

/// The components of a path, without empty ones and `.`. `..` stays, because only the kernel knows a directory's
/// parent.
fn components(path: &Path) -> VecDeque<OsString> {
    let names = path.as_os_str().as_bytes().split(|byte| *byte == b'/');
    let names = names.filter(|name| !name.is_empty() && *name != b".");
    names
        .map(|name| OsStr::from_bytes(name).to_owned())
        .collect()
}

/// The accepted owners of a directory.
struct Owner {
    uid: u32,
    walk: Walk,
    /// The parent directory is open to all, so that any user may have created this one.
    in_sticky: bool,
    /// See [`unmapped`].
    unmapped: Option<u32>,
}

impl Owner {
    fn is_trusted(&self, owner: u32) -> bool {
        owner == 0
            || owner == self.uid
            || ((self.walk.named || !self.in_sticky) && self.unmapped == Some(owner))
    }

    fn check(&self, path: &Path, owner: u32) -> Result<(), Refused> {
        if self.is_trusted(owner) {
            return Ok(());
        }
        Err(Refused::Owner {
            path: path.to_owned(),
            owner,
            uid: self.uid,
        })
    }
}

fn check_parent(path: &Path, found: &libc::stat, owner: &Owner) -> Result<(), Refused> {
    if !(owner.walk.any_owner && owner.uid == 0) {
        owner.check(path, found.st_uid)?;
    }
    let sticky = found.st_mode & libc::S_ISVTX != 0;
    if others_may_write(found, true) && !sticky {
        return Err(Refused::writable(path, found));
    }
    Ok(())
}

fn check_last(path: &Path, found: &libc::stat, owner: &Owner) -> Result<(), Refused> {
    if !(owner.walk.any_owner && owner.uid == 0) {
        owner.check(path, found.st_uid)?;
    }
    let refused = match owner.walk.purpose {
        Purpose::Sockets => others_may_write(found, false),
        Purpose::Logs => others_may_write(found, true) && found.st_mode & libc::S_ISVTX == 0,
    };
    if refused {
        return Err(Refused::writable(path, found));
    }
    Ok(())
}

/// Closes this user's log directory to others if it is open to all, as Kubernetes creates it (emptyDir). Files that
/// others have put there by then are detected when the logs are opened.
fn closes(directory: &OwnedFd, found: &libc::stat, owner: &Owner) -> bool {
    let closed = found.st_mode & 0o7755;
    owner.walk.purpose == Purpose::Logs
        && found.st_uid == owner.uid
        && found.st_mode & 0o7777 != closed
        && fs::set_permissions(
            path_of(directory.as_fd()),
            fs::Permissions::from_mode(closed),
        )
        .is_ok()
}

impl Refused {
    fn writable(path: &Path, found: &libc::stat) -> Refused {
        Refused::Writable {
            path: path.to_owned(),
            mode: found.st_mode & 0o7777,
        }
    }
}

/// Whether users other than the owner may write. A group with the owner's number is the owner's own.
fn others_may_write(found: &libc::stat, groups_of_root_may: bool) -> bool {
    let group_is_trusted =
        found.st_gid == found.st_uid || (groups_of_root_may && found.st_uid == 0);
    found.st_mode & 0o002 != 0 || (found.st_mode & 0o020 != 0 && !group_is_trusted)
}

/// The user id under which this user namespace shows users that it does not know, such as the host's root in a user's
/// container. `None`: it knows all users.
fn unmapped() -> Option<u32> {
    static UNMAPPED: OnceLock<Option<u32>> = OnceLock::new();
    *UNMAPPED.get_or_init(|| {
        let map = fs::read_to_string("/proc/self/uid_map").ok()?;
        let number = fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?;
        unmapped_by(&map, &number)
    })
}

/// [`unmapped`], by the content of `/proc/self/uid_map` and `/proc/sys/kernel/overflowuid`.
fn unmapped_by(map: &str, number: &str) -> Option<u32> {
    let knows_all = map.split_whitespace().eq(["0", "0", "4294967295"]);
    let number = number.trim().parse().ok();
    number.filter(|_| !knows_all)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Opens an entry of a directory with `O_PATH`, to inspect it or to continue from it; a link is not followed.
fn open_at(directory: Option<&OwnedFd>, name: &CStr, flags: libc::c_int) -> io::Result<OwnedFd> {
    let directory = directory.map_or(libc::AT_FDCWD, AsRawFd::as_raw_fd);
    let flags = flags | libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: a plain system call with a NUL-ended name.
    let raw = check(unsafe { libc::openat(directory, name.as_ptr(), flags) })?;
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Opens a directory so that its permissions can be changed; fails if it has been replaced by a link or another file.
fn open_to_change(above: &OwnedFd, name: &CStr) -> io::Result<OwnedFd> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: a plain system call with a NUL-ended name.
    let raw = check(unsafe { libc::openat(above.as_raw_fd(), name.as_ptr(), flags) })?;
    // SAFETY: the descriptor is new and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Creates a directory with these permissions, whatever the umask; if it has been created meanwhile, opens it.
fn make(above: &OwnedFd, name: &CStr, mode: u32) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call with a NUL-ended name.
    let made = check(unsafe { libc::mkdirat(above.as_raw_fd(), name.as_ptr(), 0o700) });
    if let Err(error) = &made
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return made.and_then(|_| open_at(Some(above), name, 0));
    }
    if made.is_ok() && mode != 0o700 {
        let directory = open_to_change(above, name)?;
        // SAFETY: plain system calls, on that descriptor.
        if stat(&directory)?.st_uid == unsafe { libc::geteuid() } {
            // SAFETY: as above.
            check(unsafe { libc::fchmod(directory.as_raw_fd(), mode) })?;
        }
    }
    open_at(Some(above), name, 0)
}

fn stat(file: &OwnedFd) -> io::Result<libc::stat> {
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `found` is large enough; it is read only when the call succeeded.
    unsafe {
        check(libc::fstat(file.as_raw_fd(), found.as_mut_ptr()))?;
        Ok(found.assume_init())
    }
}

fn read_link(link: &OwnedFd) -> io::Result<PathBuf> {
    let mut target = vec![0_u8; libc::PATH_MAX as usize];
    // SAFETY: writes at most as many bytes as there are; the empty name stands for the link itself.
    let len = unsafe {
        libc::readlinkat(
            link.as_raw_fd(),
            c"".as_ptr(),
            target.as_mut_ptr().cast(),
            target.len(),
        )
    };
    target.truncate(usize::try_from(len).map_err(|_| io::Error::last_os_error())?);
    Ok(PathBuf::from(OsString::from_vec(target)))
}

/// A path to an open file itself, for system calls that take no descriptor.
pub fn path_of(file: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A path to a file in an open directory, for system calls that take no descriptor of one.
pub fn path_in(directory: BorrowedFd<'_>, name: &str) -> PathBuf {
    path_of(directory).join(name)
}

#[cfg(test)]
mod tests;
