//! The daemon's files in the pipe directory: lock, sockets, log pipe, pid file.
//!
//! The directory is checked and opened once; every file is then created, opened and removed relative to its descriptor.

mod gates;

use super::files::{self, FileError};
use crate::seqpacket;
use crate::settings::{PIPE_DIRECTORY, Settings, own_pipe_directory};
use mpsshim_proto::directory::{self, Purpose, Refused, Walk};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::stat::{Mode, SFlag, fchmod, fstat};
use nix::unistd::{UnlinkatFlags, geteuid, mkfifoat, unlinkat};
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

pub use gates::Gate;

/// Why the daemon cannot use its pipe directory.
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
    /// Another user could replace the daemon's files.
    #[error(
        "the pipe directory {path} is not used: {why}; set {PIPE_DIRECTORY} to another directory"
    )]
    Untrusted {
        /// The directory.
        path: PathBuf,
        /// Why the directory is not trusted.
        why: Refused,
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
    /// A file in the way that the daemon did not create.
    #[error("{path} is in the way: {why}; remove it, or set {PIPE_DIRECTORY} to another directory")]
    InTheWay {
        /// Path of the file.
        path: PathBuf,
        /// Why the daemon does not use or remove it.
        why: FileError,
    },
}

/// The pipe directory, held by this daemon as long as the value lives.
pub struct PipeDirectory {
    directory: OwnedFd,
    /// Clients and status commands come here.
    pub control: OwnedFd,
    /// Commands of the owner and root come here.
    pub privileged: OwnedFd,
    /// The previous daemon was killed before it could clean up; its servers may still run.
    pub predecessor_died: bool,
    /// Reading end of the pipe for log lines of other processes. Never at its end, since it is open for writing too.
    pub log_pipe: File,
    _lock: Flock<File>,
}

impl PipeDirectory {
    /// The directory itself, for folders of named servers.
    pub fn folder(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

/// Name of the pid file.
pub const PID_FILE: &str = "mps-control.pid";
const LOG_PIPE: &str = "log";
const LOCK: &str = "control_lock";
const CONTROL: &str = "control";

impl PipeDirectory {
    /// Takes the directory, removes the files of a dead daemon, and listens.
    pub fn take(settings: &Settings) -> Result<PipeDirectory, DirectoryError> {
        let path = &settings.pipe_directory;
        // A user's daemon serves only that user, so its default directory is private; a directory named in the settings
        // is readable by others.
        let is_root = geteuid().is_root();
        let is_named = *path != own_pipe_directory(is_root);
        let is_private = !is_root && !is_named;
        let walk = Walk {
            purpose: Purpose::Sockets,
            create: Some(if is_private { 0o700 } else { 0o755 }),
            named: is_named,
            any_owner: false,
        };
        let directory = directory::open(path, walk).map_err(|refused| match refused {
            Refused::Io { source, .. } => DirectoryError::Create {
                path: path.clone(),
                source,
            },
            why => DirectoryError::Untrusted {
                path: path.clone(),
                why,
            },
        })?;
        let failed = |file: &'static str| {
            move |error: FileError| match error {
                FileError::Io(source) => DirectoryError::Write {
                    path: path.clone(),
                    file,
                    uid: geteuid().as_raw(),
                    source,
                },
                why => DirectoryError::InTheWay {
                    path: path.join(file),
                    why,
                },
            }
        };
        let here = directory.as_fd();

        let lock = take_lock(here).map_err(failed(LOCK))?;
        // With the lock, this process may remove every file of a daemon in the directory.
        let lock = lock.ok_or(DirectoryError::AlreadyRunning)?;

        let log_pipe = make_pipe(here).map_err(failed(LOG_PIPE))?;
        let predecessor_died =
            files::remove(here, PID_FILE, SFlag::S_IFREG).map_err(failed(PID_FILE))?;
        write_pid(here).map_err(failed(PID_FILE))?;

        let listen = |file, mode| listen(here, file, mode).map_err(failed(file));
        // `control` comes last: when a client can connect there, the daemon is complete.
        let privileged = listen("control_privileged", 0o755)?;
        let control = listen(CONTROL, 0o666)?;
        Ok(PipeDirectory {
            directory,
            control,
            privileged,
            predecessor_died,
            log_pipe,
            _lock: lock,
        })
    }
}

impl Drop for PipeDirectory {
    /// Removes pid file and log pipe; the sockets and the lock stay, as with NVIDIA's daemon.
    fn drop(&mut self) {
        for name in [PID_FILE, LOG_PIPE] {
            // Already removed, or the directory has become read-only: the next daemon cleans up.
            let _ = unlinkat(&self.directory, name, UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// `None`: another daemon holds it.
fn take_lock(directory: BorrowedFd<'_>) -> Result<Option<Flock<File>>, FileError> {
    let own = Mode::S_IRUSR | Mode::S_IWUSR;
    let lock = files::open_or_make(directory, LOCK, OFlag::O_RDWR, own)?;
    let was_open_to_others = fstat(&lock)?.st_mode & 0o077 != 0;
    if was_open_to_others {
        fchmod(&lock, own)?;
    }
    let lock = match Flock::lock(lock, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => return Ok(Some(lock)),
        Err((lock, Errno::EWOULDBLOCK)) => lock,
        Err((_, errno)) => return Err(errno.into()),
    };
    // An earlier release let all users open the lock file, and any process holding it open can lock it. A real daemon
    // also accepts connections.
    let answers = || seqpacket::connect(&directory::path_in(directory, CONTROL)).is_ok();
    if !was_open_to_others || answers() {
        return Ok(None);
    }
    drop(lock);
    files::remove(directory, LOCK, SFlag::S_IFREG)?;
    let lock = match files::make(directory, LOCK, OFlag::O_RDWR, own) {
        Err(FileError::Io(error)) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Ok(None);
        }
        made => made?,
    };
    Ok(Flock::lock(lock, FlockArg::LockExclusiveNonblock).ok())
}

fn make_pipe(directory: BorrowedFd<'_>) -> Result<File, FileError> {
    files::remove(directory, LOG_PIPE, SFlag::S_IFIFO)?;
    mkfifoat(directory, LOG_PIPE, Mode::S_IRUSR | Mode::S_IWUSR)?;
    let flags = OFlag::O_RDWR | OFlag::O_NONBLOCK;
    let pipe = files::open(directory, LOG_PIPE, flags, SFlag::S_IFIFO)?;
    // Programs of all users served by root's daemon may write there; only this daemon reads it.
    let mode = if geteuid().is_root() { 0o622 } else { 0o600 };
    fchmod(&pipe, Mode::from_bits_retain(mode))?;
    Ok(pipe)
}

fn write_pid(directory: BorrowedFd<'_>) -> Result<(), FileError> {
    let mode = Mode::from_bits_retain(0o644);
    let mut file = files::make(directory, PID_FILE, OFlag::O_WRONLY, mode)?;
    fchmod(&file, mode)?;
    Ok(writeln!(file, "{}", std::process::id())?)
}

fn listen(directory: BorrowedFd<'_>, name: &str, mode: u32) -> Result<OwnedFd, FileError> {
    files::remove(directory, name, SFlag::S_IFSOCK)?;
    let listener = seqpacket::listen(&directory::path_in(directory, name))?;
    let socket = files::find(directory, name, SFlag::S_IFSOCK)?;
    // Through its descriptor, so that a file placed at that name meanwhile is not changed.
    let path = directory::path_of(socket.as_fd());
    fs::set_permissions(path, Permissions::from_mode(mode))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;
    use std::path::Path;

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
        assert_eq!(mode("control_lock"), 0o100_600);
        let log = if geteuid().is_root() { 0o622 } else { 0o600 };
        assert_eq!(mode("log"), 0o010_000 | log);
        assert_eq!(mode(PID_FILE), 0o100_644);
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

    /// A daemon of an earlier release has left a lock that every user may open, and another process holds it.
    #[test]
    fn a_lock_that_others_hold_keeps_no_daemon_from_starting() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join(LOCK);
        let open = File::create(&path).expect("create");
        open.set_permissions(Permissions::from_mode(0o666))
            .expect("mode");
        let strangers = Flock::lock(open, FlockArg::LockShared).expect("lock");
        let settings = settings(directory.path());
        let held = PipeDirectory::take(&settings).expect("take");
        // From now on no other user can open it.
        let mode = fs::metadata(&path).expect("lock").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(strangers);
        assert!(matches!(
            PipeDirectory::take(&settings),
            Err(DirectoryError::AlreadyRunning)
        ));
        drop(held);
        PipeDirectory::take(&settings).expect("again");
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
    fn a_directory_open_to_others_is_refused() {
        let directory = tempfile::tempdir().expect("directory");
        let pipe = directory.path().join("pipe");
        fs::create_dir(&pipe).expect("create");
        let refused = |above: u32, mode: u32| {
            fs::set_permissions(directory.path(), Permissions::from_mode(above)).expect("mode");
            fs::set_permissions(&pipe, Permissions::from_mode(mode)).expect("mode");
            let error = PipeDirectory::take(&settings(&pipe)).err()?.to_string();
            assert!(error.contains("others can write in "), "{error}");
            Some(error)
        };
        assert_eq!(refused(0o755, 0o755), None);
        assert_eq!(refused(0o1777, 0o700), None, "as in /tmp");
        for (above, mode) in [(0o755, 0o777), (0o755, 0o1777), (0o757, 0o755)] {
            assert!(refused(above, mode).is_some(), "{above:o} {mode:o}");
        }
    }

    #[test]
    fn a_directory_of_another_user_is_refused() {
        if !nix::unistd::geteuid().is_root() {
            return eprintln!("not root: another user's directory is not tested");
        }
        let directory = tempfile::tempdir().expect("directory");
        let theirs = directory.path().join("theirs");
        fs::create_dir(&theirs).expect("create");
        std::os::unix::fs::chown(&theirs, Some(65534), Some(65534)).expect("chown");
        for pipe in [theirs.clone(), theirs.join("below")] {
            let error = PipeDirectory::take(&settings(&pipe)).err();
            let error = error.expect("refused").to_string();
            assert!(error.contains("belongs to user 65534"), "{error}");
        }
        assert_eq!(fs::read_dir(&theirs).expect("list").count(), 0);
        // In a world-writable directory the creator of a link is unknown, regardless of the link's owner.
        fs::set_permissions(directory.path(), Permissions::from_mode(0o1777)).expect("mode");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/", &link).expect("link");
        let error = PipeDirectory::take(&settings(&link)).err();
        let error = error.expect("refused").to_string();
        assert!(error.contains("symbolic link"), "{error}");
    }

    /// Files that another user could have put there: their targets are not changed.
    #[test]
    fn links_are_refused() {
        for name in [LOCK, LOG_PIPE, PID_FILE, "control", "control_privileged"] {
            for hard in [false, true] {
                let directory = tempfile::tempdir().expect("directory");
                let victim = directory.path().join("victim");
                fs::write(&victim, "precious").expect("write");
                fs::set_permissions(&victim, Permissions::from_mode(0o600)).expect("mode");
                let pipe = directory.path().join("pipe");
                fs::create_dir(&pipe).expect("create");
                let place = pipe.join(name);
                if hard {
                    fs::hard_link(&victim, &place).expect("link");
                } else {
                    std::os::unix::fs::symlink(&victim, &place).expect("link");
                }
                let error = PipeDirectory::take(&settings(&pipe)).err();
                let error = error.expect(name).to_string();
                assert!(
                    error.contains(&format!("pipe/{name} is in the way")),
                    "{error}"
                );
                assert!(fs::symlink_metadata(&place).is_ok(), "{name} was removed");
                let mode = fs::metadata(&victim).expect("victim").permissions().mode();
                assert_eq!(mode & 0o777, 0o600, "{name}");
                assert_eq!(fs::read_to_string(&victim).expect("read"), "precious");
            }
        }
    }

    /// Number of daemon starts while another process swaps one path.
    const STARTS: usize = 1000;

    /// Creates a file of the right kind at `place`, or leaves the daemon's there, and replaces it by a symbolic link to
    /// `victim`. (Creating a hard link requires write access to its target.)
    fn swap_file(place: &Path, victim: &Path) {
        let link = place.with_extension("link");
        // Some calls fail if the daemon was faster.
        let _ = File::create_new(place);
        let _ = std::os::unix::fs::symlink(victim, &link);
        let _ = fs::rename(&link, place);
        let _ = fs::remove_file(&link);
        let _ = fs::remove_file(place);
    }

    /// Puts a link to `outside` in the place of a directory.
    fn swap_directory(directory: &Path, outside: &Path) {
        let aside = directory.with_extension("aside");
        fs::rename(directory, &aside).expect("away");
        let _ = std::os::unix::fs::symlink(outside, directory);
        let _ = fs::remove_file(directory);
        while fs::rename(&aside, directory).is_err() {
            // Something was made there meanwhile.
            let _ = fs::remove_dir_all(directory);
        }
    }

    /// Another process keeps swapping files and directories for links; the targets of the links do not change.
    #[test]
    fn links_that_come_between_check_and_use_lead_nowhere() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let above = tempfile::tempdir().expect("directory");
        // As in /tmp: no link in it is followed, regardless of its owner.
        fs::set_permissions(above.path(), Permissions::from_mode(0o1777)).expect("mode");
        let [pipe, logs, outside] = ["pipe", "logs", "outside"].map(|name| {
            let path = above.path().join(name);
            fs::create_dir(&path).expect("create");
            path
        });
        let victim = above.path().join("victim");
        fs::write(&victim, "precious").expect("write");
        fs::set_permissions(&victim, Permissions::from_mode(0o640)).expect("mode");
        fs::set_permissions(&outside, Permissions::from_mode(0o777)).expect("mode");
        let settings = settings(&pipe);
        let start = || {
            if let Ok(mut log) = crate::logging::open(&logs, "control.log") {
                writeln!(log, "a line").expect("written");
            }
            PipeDirectory::take(&settings)
        };
        let unchanged = || {
            let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode();
            assert_eq!(fs::read_to_string(&victim).expect("read"), "precious");
            assert_eq!(mode(&victim) & 0o7777, 0o640);
            assert_eq!(mode(&outside) & 0o7777, 0o777);
            assert_eq!(fs::read_dir(&outside).expect("list").count(), 0);
        };
        let mut files: Vec<PathBuf> = [LOCK, LOG_PIPE, PID_FILE, CONTROL, "control_privileged"]
            .map(|name| pipe.join(name))
            .into();
        files.push(logs.join("control.log"));
        for place in files.iter().chain([&pipe, &logs]) {
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        match files.contains(place) {
                            true => swap_file(place, &victim),
                            false => swap_directory(place, &outside),
                        }
                    }
                });
                for _ in 0..STARTS {
                    drop(start());
                }
                stop.store(true, Ordering::Relaxed);
            });
            unchanged();
        }
        assert!(start().is_ok(), "nobody swaps any more");
        unchanged();
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
