//! The daemon's files in the pipe directory: lock, sockets, log pipe, pid file.

use crate::seqpacket;
use crate::settings::{PIPE_DIRECTORY, Settings};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::Mode;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Why the daemon cannot have its directory.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Another daemon holds the lock.
    #[error("An instance of this daemon is already running")]
    AlreadyRunning,
    /// The directory does not exist and cannot be made.
    #[error(
        "cannot create the pipe directory {path}: {source}; create it, or set {PIPE_DIRECTORY} to another one"
    )]
    Create {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file in the directory cannot be made.
    #[error(
        "cannot write {file} in the pipe directory {path}: {source}; let user {uid} write there, or set \
         {PIPE_DIRECTORY} to another directory"
    )]
    Write {
        /// The directory.
        path: PathBuf,
        /// The file.
        file: &'static str,
        /// The daemon's user.
        uid: u32,
        /// Why.
        source: io::Error,
    },
    /// Something that the daemon did not make is in the way.
    #[error(
        "{path} is in the way and is not a {expected}; remove it, or set {PIPE_DIRECTORY} to another directory"
    )]
    InTheWay {
        /// What is there.
        path: PathBuf,
        /// What belongs there.
        expected: &'static str,
    },
}

/// The pipe directory, held by this daemon as long as the value lives.
pub struct PipeDirectory {
    path: PathBuf,
    /// Clients and status commands come here.
    pub control: OwnedFd,
    /// Commands of the owner and root come here.
    pub privileged: OwnedFd,
    /// The daemon before this one did not tidy up: it was killed, and its servers may go on.
    pub predecessor_died: bool,
    /// Reading end of the pipe that others may log through. Never at its end: it is open for writing too.
    pub log_pipe: File,
    _lock: Flock<File>,
}

/// Name of the pid file.
pub const PID_FILE: &str = "mps-control.pid";
const LOG_PIPE: &str = "log";

impl PipeDirectory {
    /// Takes the directory, removes what a dead daemon left, and listens.
    pub fn take(settings: &Settings) -> Result<PipeDirectory, DirectoryError> {
        let path = &settings.pipe_directory;
        let failed = |file| {
            move |source| DirectoryError::Write {
                path: path.clone(),
                file,
                uid: nix::unistd::geteuid().as_raw(),
                source,
            }
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(path)
            .map_err(|source| DirectoryError::Create {
                path: path.clone(),
                source,
            })?;

        let lock = open_lock(&path.join("control_lock")).map_err(failed("control_lock"))?;
        // From here on every file in the directory is this process's to remove.
        let lock =
            Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(
                |(_, errno)| match errno {
                    nix::errno::Errno::EWOULDBLOCK => DirectoryError::AlreadyRunning,
                    errno => failed("control_lock")(errno.into()),
                },
            )?;

        let log_pipe = path.join(LOG_PIPE);
        remove(&log_pipe, "pipe", FileTypeExt::is_fifo)?;
        let log_pipe = make_pipe(&log_pipe).map_err(failed(LOG_PIPE))?;
        let predecessor_died = path.join(PID_FILE).exists();
        write_pid(&path.join(PID_FILE)).map_err(failed(PID_FILE))?;

        let listen = |file: &'static str, socket: &Path, mode| {
            remove(socket, "socket", FileTypeExt::is_socket)?;
            let listener = seqpacket::listen(socket).map_err(failed(file))?;
            fs::set_permissions(socket, Permissions::from_mode(mode)).map_err(failed(file))?;
            Ok(listener)
        };
        // `control` comes last: who can connect there finds a daemon that is complete.
        let privileged = listen("control_privileged", &settings.privileged_socket(), 0o755)?;
        let control = listen("control", &settings.control_socket(), 0o666)?;
        Ok(PipeDirectory {
            path: path.clone(),
            control,
            privileged,
            predecessor_died,
            log_pipe,
            _lock: lock,
        })
    }
}

/// What an operator should know about who can interfere with the directory.
pub fn warning(directory: &Path, uid: u32) -> Option<String> {
    let found = fs::metadata(directory).ok()?;
    let others_may_write = found.mode() & 0o022 != 0 && found.mode() & 0o1000 == 0;
    if found.uid() != uid && found.uid() != 0 {
        let owner = found.uid();
        Some(format!(
            "The pipe directory belongs to user {owner}, who can put another daemon in this one's place"
        ))
    } else if others_may_write {
        Some(
            "Others may write in the pipe directory and can put another daemon in this one's place"
                .into(),
        )
    } else {
        None
    }
}

impl Drop for PipeDirectory {
    /// Pid file and log pipe go; the sockets and the lock stay, as NVIDIA's do.
    fn drop(&mut self) {
        for name in [PID_FILE, LOG_PIPE] {
            // Gone already, or a directory that has become read-only: the next daemon deals with it.
            let _ = fs::remove_file(self.path.join(name));
        }
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    let lock = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o666)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(path)?;
    // Past the umask; a lock of another user stays as that user made it.
    let _ = lock.set_permissions(Permissions::from_mode(0o666));
    Ok(lock)
}

fn remove(
    path: &Path,
    expected: &'static str,
    is: impl Fn(&fs::FileType) -> bool,
) -> Result<(), DirectoryError> {
    let in_the_way = || DirectoryError::InTheWay {
        path: path.to_owned(),
        expected,
    };
    match fs::symlink_metadata(path) {
        Ok(found) if is(&found.file_type()) => fs::remove_file(path).map_err(|_| in_the_way()),
        Ok(_) => Err(in_the_way()),
        // Not there, or not to be seen: then making it says why.
        Err(_) => Ok(()),
    }
}

fn make_pipe(path: &Path) -> io::Result<File> {
    nix::unistd::mkfifo(path, Mode::from_bits_retain(0o777))?;
    fs::set_permissions(path, Permissions::from_mode(0o777))?;
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOFOLLOW)
        .open(path)
}

fn write_pid(path: &Path) -> io::Result<()> {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o666)
        .open(path)?;
    file.set_permissions(Permissions::from_mode(0o666))?;
    writeln!(file, "{}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn settings(directory: &Path) -> Settings {
        let directory = OsString::from(directory);
        Settings::from_lookup(
            |name| (name == PIPE_DIRECTORY).then(|| directory.clone()),
            false,
        )
        .expect("settings")
    }

    #[test]
    fn one_daemon_a_directory() {
        let directory = tempfile::tempdir().expect("directory");
        let settings = settings(&directory.path().join("made/here"));
        let held = PipeDirectory::take(&settings).expect("take");
        assert!(!held.predecessor_died);
        assert!(matches!(
            PipeDirectory::take(&settings),
            Err(DirectoryError::AlreadyRunning)
        ));
        seqpacket::connect(&settings.control_socket()).expect("still listening");
        drop(held);
        let next = PipeDirectory::take(&settings).expect("stale sockets are no obstacle");
        assert!(!next.predecessor_died);
        drop(next);
        fs::write(settings.pipe_directory.join(PID_FILE), "1\n").expect("write");
        let next = PipeDirectory::take(&settings).expect("nor is a stale pid file");
        assert!(next.predecessor_died);
    }

    #[test]
    fn files_and_modes() {
        let directory = tempfile::tempdir().expect("directory");
        let held = PipeDirectory::take(&settings(directory.path())).expect("take");
        let mode = |name: &str| {
            fs::metadata(directory.path().join(name))
                .expect(name)
                .permissions()
                .mode()
        };
        assert_eq!(mode("control"), 0o140_666);
        assert_eq!(mode("control_privileged"), 0o140_755);
        assert_eq!(mode("control_lock"), 0o100_666);
        assert_eq!(mode("log"), 0o010_777);
        assert_eq!(mode(PID_FILE), 0o100_666);
        let pid = fs::read_to_string(directory.path().join(PID_FILE)).expect("pid file");
        assert_eq!(pid, format!("{}\n", std::process::id()));
        drop(held);
        let mut left: Vec<_> = fs::read_dir(directory.path())
            .expect("list")
            .map(|entry| entry.expect("entry").file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["control", "control_lock", "control_privileged"]);
    }

    #[test]
    fn a_stranger_s_file_is_not_removed() {
        let directory = tempfile::tempdir().expect("directory");
        let file = directory.path().join("control");
        fs::write(&file, "precious").expect("write");
        let error = PipeDirectory::take(&settings(directory.path()))
            .err()
            .expect("refused")
            .to_string();
        assert!(
            error.contains("not a socket") && error.contains("control"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&file).expect("read"), "precious");
    }

    #[test]
    fn a_directory_open_to_others_is_warned_of() {
        let directory = tempfile::tempdir().expect("directory");
        let uid = nix::unistd::geteuid().as_raw();
        let warned = |mode| {
            fs::set_permissions(directory.path(), Permissions::from_mode(mode)).expect("mode");
            warning(directory.path(), uid).is_some()
        };
        assert_eq!(
            [0o755, 0o1777, 0o777, 0o775].map(warned),
            [false, false, true, true]
        );
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let error = PipeDirectory::take(&settings(Path::new("/proc/none")))
            .err()
            .expect("refused")
            .to_string();
        assert!(
            error.contains("/proc/none") && error.contains(PIPE_DIRECTORY),
            "{error}"
        );
    }
}
