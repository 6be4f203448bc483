//! The pipe directory and the log directory.

use super::Finding;
use super::daemon::Found;
use super::installed::sentence;
use crate::settings::Settings;
use mpsshim_proto::directory;
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access, geteuid};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

const PIPES: &str = "pipe directory";
const LOGS: &str = "log directory";
/// Free space below which logs soon fill a file system, bytes.
const LITTLE: u64 = 16 << 20;

/// Both directories, as the daemon uses them, or would.
pub fn check(settings: &Settings, daemon: Option<&Found>) -> Vec<Finding> {
    let pipes = &settings.pipe_directory;
    let mut findings = vec![pipe_directory(settings, daemon.is_some())];
    findings.extend(full(PIPES, pipes));
    let own = geteuid().as_raw();
    let logs = daemon.map_or(&settings.log_directory, |daemon| &daemon.logs);
    // A daemon of another user writes there by its own rights.
    if daemon.is_none_or(|daemon| daemon.uid == own) {
        findings.push(writable(
            LOGS,
            logs,
            "set MPSSHIM_LOG_DIRECTORY to another directory",
        ));
    }
    findings.extend(full(LOGS, logs));
    findings
}

/// `is_used`: a daemon listens there.
fn pipe_directory(settings: &Settings, is_used: bool) -> Finding {
    let (path, named) = (&settings.pipe_directory, settings.pipe_directory_is_named);
    let other = "set MPSSHIM_PIPE_DIRECTORY to another directory";
    match directory::of_client(path, named, named) {
        Ok(_) => {}
        Err(refused) if refused.is_absent() => {
            return writable(PIPES, path, other);
        }
        Err(refused) => {
            let text = sentence(&format!("{} is not used: {refused}", path.display()));
            let remedy = format!("Change owner or permissions, or {other}.");
            return Finding::error(PIPES, text, remedy);
        }
    }
    let shown = path.display();
    let may_write = access(path, AccessFlags::W_OK).is_ok();
    if !is_used
        && may_write
        && let Err(error) = holds_sockets(path)
    {
        return Finding::error(
            PIPES,
            format!("{shown} cannot hold sockets: {error}."),
            format!("Use a local file system such as tmpfs: {other}."),
        );
    }
    match path.metadata() {
        Ok(found) => Finding::ok(
            PIPES,
            format!(
                "{shown} belongs to user {} and has mode {:04o}.",
                found.uid(),
                found.permissions().mode() & 0o7777
            ),
        ),
        Err(error) => Finding::error(
            PIPES,
            format!("{shown}: {error}."),
            "Check its permissions.",
        ),
    }
}

/// Binds a socket there and removes it.
fn holds_sockets(directory: &Path) -> io::Result<()> {
    let path = directory.join(format!(".doctor-{}", std::process::id()));
    let bound = UnixDatagram::bind(&path);
    if bound.is_ok() {
        fs::remove_file(&path)?;
    }
    bound.map(drop)
}

/// Whether this user may write in a directory, or create it.
fn writable(check: &'static str, path: &Path, other: &str) -> Finding {
    let shown = path.display();
    let there = path.ancestors().find(|above| above.exists());
    let there = there.unwrap_or(Path::new("/"));
    let refused = |why: String| {
        let remedy = format!("Let user {} write there, or {other}.", geteuid());
        Finding::error(check, why, remedy)
    };
    let may_write = access(there, AccessFlags::W_OK | AccessFlags::X_OK);
    match may_write {
        _ if !there.is_dir() => refused(format!("{} is not a directory.", there.display())),
        Ok(()) if there == path => Finding::ok(check, format!("{shown} can be written.")),
        Ok(()) => Finding::ok(
            check,
            format!("{shown} does not exist yet; the daemon creates it."),
        ),
        Err(error) if there == path => {
            refused(format!("{shown} cannot be written: {}.", error.desc()))
        }
        Err(error) => refused(format!(
            "{shown} does not exist and cannot be created in {}: {}.",
            there.display(),
            error.desc()
        )),
    }
}

/// A full, or nearly full, file system.
fn full(check: &'static str, path: &Path) -> Option<Finding> {
    let there = path.ancestors().find(|above| above.exists())?;
    let found = statvfs(there).ok()?;
    let free = found
        .blocks_available()
        .saturating_mul(found.fragment_size());
    // Some file systems do not count their files.
    let has_files = found.files() == 0 || found.files_available() > 0;
    let remedy = "Free space there, or use another directory.";
    let shown = path.display();
    if free == 0 || !has_files {
        let text = format!("The file system of {shown} is full.");
        return Some(Finding::error(check, text, remedy));
    }
    (free < LITTLE).then(|| {
        let text = format!(
            "The file system of {shown} has only {} KiB left.",
            free >> 10
        );
        Finding::warning(check, text, remedy)
    })
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn a_directory_that_can_be_created_is_no_error() {
        let folder = tempfile::tempdir().expect("directory");
        let state = |path: &Path| writable(LOGS, path, "use another").state;
        assert_eq!(state(folder.path()), State::Ok);
        assert_eq!(state(&folder.path().join("a/b")), State::Ok);
        let file = folder.path().join("file");
        fs::write(&file, "").expect("file");
        assert_eq!(state(&file.join("below")), State::Error);
        if !geteuid().is_root() {
            assert_eq!(state(Path::new("/proc/none")), State::Error);
        }
    }

    #[test]
    fn sockets_leave_nothing() {
        let folder = tempfile::tempdir().expect("directory");
        holds_sockets(folder.path()).expect("sockets");
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 0);
        assert!(holds_sockets(&folder.path().join("none")).is_err());
    }
}
