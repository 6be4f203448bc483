//! The installed files: library and server.

use super::{Finding, finish};
use crate::elf;
use crate::library::{self, LibraryError};
use crate::releases::Releases;
use crate::settings::{self, Settings};
use crate::spawn::server_executable;
use mpsshim_proto::handshake::PROTOCOL_VERSION;
use mpsshim_proto::release::Release;
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{AccessFlags, access, geteuid};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long `mps-server --version` may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");
const SAME_RELEASE: &str =
    "Install library, server and mps-control of one release, and restart the daemon.";

/// The library that mps-run would preload.
pub fn library(settings: &Settings) -> Vec<Finding> {
    const CHECK: &str = "library";
    let path = match library::find(settings.library.as_deref()) {
        Ok(path) => path,
        Err(error) => {
            let remedy = match error {
                LibraryError::Missing(_) => "Install it, or set MPSSHIM_LIBRARY to its path.",
                LibraryError::Separator(_) => "Move it to a path without spaces and colons.",
                _ => "Set MPSSHIM_LIBRARY to the path of the libmpsshim.so of this release.",
            };
            return vec![Finding::error(CHECK, sentence(&error.to_string()), remedy)];
        }
    };
    let shown = path.display();
    let mut findings = vec![match elf::release(&path) {
        Some(release) if release.version == VERSION && release.protocol == PROTOCOL_VERSION => {
            Finding::ok(CHECK, format!("{shown} is of this release, {VERSION}."))
        }
        Some(release) => of_another_release(settings, &path, &release),
        None => Finding::error(
            CHECK,
            format!("{shown} is not a libmpsshim.so of this or a later release."),
            SAME_RELEASE,
        ),
    }];
    if statvfs(&path).is_ok_and(|found| found.flags().contains(FsFlags::ST_NOEXEC)) {
        findings.push(Finding::error(
            CHECK,
            format!(
                "{shown} is on a file system that is mounted noexec, so the loader cannot load it."
            ),
            "Move it to another file system.",
        ));
    }
    findings.extend(closed(CHECK, &path, 0o004));
    findings
}

/// A library of another release is no mistake if a server speaks its protocol.
fn of_another_release(settings: &Settings, library: &Path, release: &Release) -> Finding {
    const CHECK: &str = "library";
    let told = format!(
        "{} is of release {} (protocol {}), and this program of {VERSION} (protocol {PROTOCOL_VERSION})",
        library.display(),
        release.version,
        release.protocol
    );
    match Releases::new(&server_executable(settings)).serving(release) {
        Some(server) => Finding::ok(
            CHECK,
            format!(
                "{told}; {} of release {} serves its programs.",
                server.path().display(),
                server.spoken().version
            ),
        ),
        None => Finding::error(
            CHECK,
            format!(
                "{told}: no server here speaks its protocol, and the daemon refuses its programs with 805."
            ),
            "Install the library of this release, or the server of the library's release (docs/upgrade.md).",
        ),
    }
}

/// The server that the daemon would start.
pub fn server(settings: &Settings) -> Finding {
    const CHECK: &str = "server";
    let path = server_executable(settings);
    let shown = path.display();
    let install = format!(
        "Put mps-server next to mps-control, or set {} to its path.",
        settings::SERVER
    );
    if !path.is_file() {
        return Finding::error(CHECK, format!("There is no file {shown}."), install);
    }
    if let Err(error) = access(&path, AccessFlags::X_OK) {
        let text = format!("{shown} cannot be executed: {}.", error.desc());
        return Finding::error(
            CHECK,
            text,
            format!("Correct its permissions (chmod 755 {shown})."),
        );
    }
    match version_of(&path) {
        Ok(version) if version == VERSION => closed(CHECK, &path, 0o005).unwrap_or_else(|| {
            Finding::ok(CHECK, format!("{shown} is of this release, {VERSION}."))
        }),
        Ok(version) => Finding::error(
            CHECK,
            format!("{shown} is of release {version}, and this program of {VERSION}."),
            SAME_RELEASE,
        ),
        Err(why) => Finding::error(
            CHECK,
            format!("{shown} does not tell its version: {why}."),
            install,
        ),
    }
}

fn version_of(server: &Path) -> Result<String, String> {
    let child = Command::new(server)
        .arg("--version")
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let (status, text) = finish(child, PATIENCE)?;
    let version = text.trim().strip_prefix("mps-server ");
    version
        .filter(|_| status.success())
        .map(str::to_owned)
        .ok_or_else(|| format!("it printed no version, and ended with {status}"))
}

/// A warning if root has installed a file that other users or containers cannot use: `bits` are the permissions that
/// they need.
fn closed(check: &'static str, path: &Path, bits: u32) -> Option<Finding> {
    if !geteuid().is_root() {
        return None;
    }
    let closed = closed_to_others(path, bits)?;
    Some(Finding::warning(
        check,
        format!("Users other than root cannot use {}.", path.display()),
        format!("Open {} to others (chmod o+rX).", closed.display()),
    ))
}

/// The file, or the directory above it, whose permissions exclude others.
fn closed_to_others(path: &Path, bits: u32) -> Option<PathBuf> {
    let lacks = |path: &Path, bits: u32| {
        path.metadata()
            .is_ok_and(|found| found.permissions().mode() & bits != bits)
    };
    let above = path.ancestors().skip(1).find(|above| lacks(above, 0o001));
    let closed = above.or_else(|| Some(path).filter(|path| lacks(path, bits)));
    closed.map(Path::to_owned)
}

/// A message as a sentence.
pub fn sentence(message: &str) -> String {
    let mut letters = message.chars();
    let first = letters.next().map(char::to_uppercase);
    // A path stays as it is.
    first.map_or_else(String::new, |first| {
        first.chain(letters).chain(['.']).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn permissions_of_the_file_and_of_directories_count() {
        let folder = tempfile::tempdir().expect("directory");
        let set = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode");
        };
        let file = folder.path().join("file");
        fs::write(&file, "").expect("file");
        set(folder.path(), 0o755);
        set(&file, 0o644);
        assert_eq!(closed_to_others(&file, 0o004), None);
        assert_eq!(closed_to_others(&file, 0o005), Some(file.clone()));
        set(folder.path(), 0o700);
        assert_eq!(closed_to_others(&file, 0o004), Some(folder.path().into()));
    }

    #[test]
    fn a_message_becomes_a_sentence() {
        assert_eq!(sentence("cannot find it"), "Cannot find it.");
        assert_eq!(sentence("/x is old"), "/x is old.");
        assert_eq!(sentence(""), "");
    }
}
