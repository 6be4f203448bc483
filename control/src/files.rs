//! Files in a directory that is held open: opened, created and removed relative to its descriptor.
//!
//! None of the calls follows a symbolic link. A file that another user could have put there is neither used nor removed.

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Why a file is refused.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A symbolic link, a directory, or another unexpected kind of file.
    #[error("it is {found}, not {expected}")]
    Kind {
        /// Kind of the existing file.
        found: &'static str,
        /// Expected kind.
        expected: &'static str,
    },
    /// Owned neither by root nor by this process's user.
    #[error("it belongs to user {0}")]
    Owner(u32),
    /// The file has further names: it may be another user's file.
    #[error("it is one of {0} hard links to a file")]
    Links(u64),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for FileError {
    fn from(errno: Errno) -> FileError {
        FileError::Io(errno.into())
    }
}

fn kind(mode: SFlag) -> SFlag {
    mode & SFlag::S_IFMT
}

fn with_article(kind: SFlag) -> &'static str {
    match kind {
        SFlag::S_IFREG => "a file",
        SFlag::S_IFIFO => "a pipe",
        SFlag::S_IFSOCK => "a socket",
        SFlag::S_IFDIR => "a folder",
        SFlag::S_IFLNK => "a symbolic link",
        _ => "a device",
    }
}

/// Whether only root or this process's user can have put this file there.
fn check(found: &FileStat, expected: SFlag) -> Result<(), FileError> {
    let is = kind(SFlag::from_bits_truncate(found.st_mode));
    if is != expected {
        return Err(FileError::Kind {
            found: with_article(is),
            expected: with_article(expected),
        });
    }
    if found.st_uid != 0 && found.st_uid != geteuid().as_raw() {
        return Err(FileError::Owner(found.st_uid));
    }
    // A narrower type on some architectures.
    #[allow(clippy::useless_conversion, reason = "not on all architectures")]
    let links = u64::from(found.st_nlink);
    if links > 1 {
        return Err(FileError::Links(links));
    }
    Ok(())
}

/// Adds the flags of every open: symbolic links are not followed, and opening a pipe does not block.
fn safely(flags: OFlag) -> OFlag {
    flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK
}

/// Opens an existing file, if it is of the expected kind.
pub fn open(
    directory: BorrowedFd<'_>,
    name: &str,
    flags: OFlag,
    expected: SFlag,
) -> Result<File, FileError> {
    // The kind is checked before opening, since opening a device can have side effects.
    find(directory, name, expected)?;
    let file = openat(directory, name, safely(flags), Mode::empty())?;
    check(&fstat(&file)?, expected)?;
    Ok(file.into())
}

/// An `O_PATH` descriptor of an existing file of the expected kind, to examine it or change its permissions.
pub fn find(directory: BorrowedFd<'_>, name: &str, expected: SFlag) -> Result<OwnedFd, FileError> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let file = openat(directory, name, flags, Mode::empty())?;
    check(&fstat(&file)?, expected)?;
    Ok(file)
}

/// Creates a file that must not exist.
pub fn make(
    directory: BorrowedFd<'_>,
    name: &str,
    flags: OFlag,
    mode: Mode,
) -> Result<File, FileError> {
    let flags = safely(flags | OFlag::O_CREAT | OFlag::O_EXCL);
    Ok(openat(directory, name, flags, mode)?.into())
}

/// Opens a regular file, and creates it if it does not exist.
pub fn open_or_make(
    directory: BorrowedFd<'_>,
    name: &str,
    flags: OFlag,
    mode: Mode,
) -> Result<File, FileError> {
    loop {
        match open(directory, name, flags, SFlag::S_IFREG) {
            Err(FileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
            opened => return opened,
        }
        match make(directory, name, flags, mode) {
            // Another process created it first.
            Err(FileError::Io(error)) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made,
        }
    }
}

/// Removes a file left by a previous process; `false`: there was none.
pub fn remove(directory: BorrowedFd<'_>, name: &str, expected: SFlag) -> Result<bool, FileError> {
    match fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(found) => check(&found, expected)?,
        Err(Errno::ENOENT) => return Ok(false),
        Err(errno) => return Err(errno.into()),
    }
    unlinkat(directory, name, UnlinkatFlags::NoRemoveDir)?;
    Ok(true)
}
