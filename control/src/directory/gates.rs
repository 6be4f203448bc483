//! The sockets of named servers and of their namespaces: each server has a folder in the pipe directory, and each namespace
//! one in its server's, with a socket `control` for the clients.

use super::{CONTROL, listen};
use crate::files::{self, FileError};
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, SFlag, fchmod, fstat, mkdirat};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A folder with a socket. Both are removed with the value.
pub struct Gate {
    /// Where the folder is.
    parent: Arc<OwnedFd>,
    name: String,
    folder: Arc<OwnedFd>,
    listener: OwnedFd,
}

impl Gate {
    /// Makes the folder `name` in a directory of the daemon's, and listens there. A folder and a socket of an earlier daemon
    /// are used again.
    ///
    /// # Errors
    /// Why that is impossible, in words.
    pub fn open(parent: BorrowedFd<'_>, name: &str) -> Result<Gate, String> {
        let parent = parent.try_clone_to_owned();
        let failed = |error: io::Error| cannot_make(name, FileError::Io(error));
        Gate::within(Arc::new(parent.map_err(failed)?), name)
    }

    /// As [`Gate::open`], in this gate's folder. The new gate must be dropped first.
    ///
    /// # Errors
    /// As [`Gate::open`].
    pub fn below(&self, name: &str) -> Result<Gate, String> {
        Gate::within(Arc::clone(&self.folder), name)
    }

    fn within(parent: Arc<OwnedFd>, name: &str) -> Result<Gate, String> {
        let failed = |error: FileError| cannot_make(name, error);
        let io = |errno: Errno| failed(FileError::from(errno));
        let mode = Mode::from_bits_retain(0o755);
        match mkdirat(&parent, name, mode) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(io(errno)),
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let folder = openat(&parent, name, flags, Mode::empty()).map_err(io)?;
        let found = fstat(&folder).map_err(io)?;
        if found.st_uid != geteuid().as_raw() {
            let uid = found.st_uid;
            return Err(format!("its folder {name} belongs to user {uid}"));
        }
        fchmod(&folder, mode).map_err(io)?;
        let listener = listen(folder.as_fd(), CONTROL, 0o666).map_err(failed)?;
        Ok(Gate {
            parent,
            name: name.to_owned(),
            folder: Arc::new(folder),
            listener,
        })
    }

    /// Where clients connect.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

fn cannot_make(name: &str, error: FileError) -> String {
    format!("cannot make its folder {name}: {error}")
}

impl Drop for Gate {
    /// A folder with other files in it stays.
    fn drop(&mut self) {
        // The directory may have become read-only; the next daemon uses the files again.
        let _ = files::remove(self.folder.as_fd(), CONTROL, SFlag::S_IFSOCK);
        let _ = unlinkat(&*self.parent, self.name.as_str(), UnlinkatFlags::RemoveDir);
    }
}
