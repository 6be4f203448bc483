//! The servers' executables of several releases.
//!
//! A client needs a server that speaks its library's [wire](mpsshim_proto::wire): containers and programs that run keep the
//! library that they began with, while the installed server is replaced. The daemon therefore keeps executables open, so that
//! it can start them after an upgrade has replaced them, and looks for the servers that packages leave in [`EARLIER`].

use crate::elf;
use crate::link::{LINK_VERSION, OLDEST_LINK};
use crate::takeover::Versions;
use mpsshim_proto::handshake::Wire;
use mpsshim_proto::release::{Release, ServerRelease};
use mpsshim_proto::wire;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Where packages leave the servers of earlier releases, in a folder for each, relative to the folder of `mps-server`.
const EARLIER: &str = "../lib/mpsshim/earlier";
/// Executables that are kept open beside the installed one.
const MOST_KEPT: usize = 8;
/// Wires, and formats, that a server may name.
const MOST_PROTOCOLS: usize = 64;

/// The protocols of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spoken {
    /// Such as `0.1.0`.
    pub version: String,
    /// The wires of clients that it speaks: version of the protocol, and fingerprint.
    pub wires: Vec<(u32, u64)>,
    /// The formats of sessions that it restores, its own first.
    pub formats: Vec<u64>,
}

impl Spoken {
    /// Those of a server of this release that restores these formats.
    pub fn of_this_release(formats: &[u64]) -> Spoken {
        Spoken::new(env!("CARGO_PKG_VERSION"), wire::SPOKEN, formats)
    }

    fn new(version: &str, wires: &[Wire], formats: &[u64]) -> Spoken {
        let wires = wires.iter().map(|wire| (wire.protocol, wire.fingerprint));
        Spoken {
            version: version.to_owned(),
            wires: wires.collect(),
            formats: formats.to_vec(),
        }
    }

    /// Whether it speaks a client's wire.
    pub fn speaks(&self, wire: Wire) -> bool {
        self.wires.contains(&(wire.protocol, wire.fingerprint))
    }

    /// Whether it restores the sessions of a server of that release.
    pub fn restores(&self, of: &Spoken) -> bool {
        match of.formats.first() {
            Some(format) if !self.formats.is_empty() => self.formats.contains(format),
            // An executable without a note, such as a script that starts the server.
            _ => true,
        }
    }

    /// Whether a server can say this.
    pub fn is_plausible(&self) -> bool {
        self.version.len() <= 64
            && !self.version.contains(char::is_control)
            && self.wires.len() <= MOST_PROTOCOLS
            && self.formats.len() <= MOST_PROTOCOLS
    }
}

impl Default for Spoken {
    /// Those of this release, for an executable that names none.
    fn default() -> Spoken {
        Spoken::of_this_release(&[])
    }
}

impl From<&ServerRelease> for Spoken {
    fn from(release: &ServerRelease) -> Spoken {
        Spoken::new(&release.version, &release.wires, &release.formats)
    }
}

/// Identifies the content of a file: device, inode, time of the last change in seconds and nanoseconds.
type Identity = (u64, u64, i64, i64);

fn identity(metadata: &fs::Metadata) -> Identity {
    let changed = (metadata.ctime(), metadata.ctime_nsec());
    (metadata.dev(), metadata.ino(), changed.0, changed.1)
}

/// An executable of servers.
#[derive(Debug)]
pub struct Executable {
    path: PathBuf,
    /// `None`: it cannot be opened.
    file: Option<(File, Identity)>,
    spoken: Spoken,
    /// Its versions of the link; `None`: those of this release.
    link: Option<Versions>,
}

impl Executable {
    fn open(path: &Path) -> Executable {
        let file = File::open(path).and_then(|file| {
            let identity = identity(&file.metadata()?);
            Ok((file, identity))
        });
        Executable::of(path, file.ok())
    }

    fn of(path: &Path, file: Option<(File, Identity)>) -> Executable {
        let release = file
            .as_ref()
            .and_then(|(file, _)| elf::server_release(file));
        Executable {
            path: path.to_owned(),
            spoken: release.as_ref().map(Spoken::from).unwrap_or_default(),
            link: release.as_ref().map(|release| Versions {
                protocol: release.wires.first().map_or(0, |wire| wire.protocol),
                link: release.link,
                oldest_link: release.oldest_link,
            }),
            file,
        }
    }

    /// The protocols of its servers.
    pub fn spoken(&self) -> &Spoken {
        &self.spoken
    }

    /// Where it is, or was before an upgrade replaced it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether its servers can work with this daemon.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn fits(&self) -> Result<(), String> {
        match self.link {
            Some(link) if !link.fit(Versions::OWN) => Err(format!(
                "the server {} of release {} does not fit this daemon: it speaks versions {} to {} of the link between \
                 them, the daemon versions {OLDEST_LINK} to {LINK_VERSION}; restart the daemon",
                self.path.display(),
                self.spoken.version,
                link.oldest_link,
                link.link
            )),
            _ => Ok(()),
        }
    }

    /// A command that executes it, also after its file has been replaced.
    pub fn command(&self) -> Command {
        let is_there = |kept: &Identity| {
            fs::metadata(&self.path).is_ok_and(|metadata| identity(&metadata) == *kept)
        };
        match &self.file {
            Some((file, kept)) if !is_there(kept) => {
                let mut command = Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
                command.arg0(&self.path);
                command
            }
            _ => Command::new(&self.path),
        }
    }

    fn identity(&self) -> Option<Identity> {
        self.file.as_ref().map(|(_, identity)| *identity)
    }
}

/// The executables that this daemon can start.
#[derive(Debug)]
pub struct Releases {
    installed: Arc<Executable>,
    /// Others, the oldest first.
    kept: Vec<Arc<Executable>>,
}

impl Releases {
    /// Those of the executable at this path.
    pub fn new(path: &Path) -> Releases {
        Releases {
            installed: Arc::new(Executable::open(path)),
            kept: Vec::new(),
        }
    }

    /// The executable that is installed now.
    pub fn installed(&mut self) -> Arc<Executable> {
        let path = self.installed.path.clone();
        let now = fs::metadata(&path).ok().map(|now| identity(&now));
        // While a package is being replaced, the file may be missing: the known one is used then.
        if now.is_some() && now != self.installed.identity() {
            let before = Arc::clone(&self.installed);
            self.installed = Arc::new(Executable::open(&path));
            tracing::info!(
                "The server {} has been replaced; release {}, before {}",
                path.display(),
                self.installed.spoken.version,
                before.spoken.version
            );
            if before.file.is_some() {
                self.keep(before);
            }
        }
        Arc::clone(&self.installed)
    }

    /// Whether this one is installed, as far as is known.
    pub fn is_installed(&self, one: &Executable) -> bool {
        self.installed.identity() == one.identity()
    }

    fn keep(&mut self, one: Arc<Executable>) {
        self.kept.retain(|kept| kept.identity() != one.identity());
        if self.kept.len() == MOST_KEPT {
            self.kept.remove(0);
        }
        self.kept.push(one);
    }

    /// Keeps the executable of a running server, whose path may have another one by now. `None`: it names no release, or
    /// others than root and this daemon's user can have made it, so that it must not be started for any user.
    pub fn keep_of(&mut self, pid: i32) -> Option<Arc<Executable>> {
        let file = File::open(format!("/proc/{pid}/exe")).ok()?;
        let metadata = file.metadata().ok()?;
        if !is_trusted(&metadata) {
            return None;
        }
        let of = identity(&metadata);
        let is_it = |one: &&Arc<Executable>| one.identity() == Some(of);
        let installed = Some(&self.installed).filter(is_it);
        if let Some(known) = installed.or_else(|| self.kept.iter().find(is_it)) {
            return Some(Arc::clone(known));
        }
        let path = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        let path = PathBuf::from(path.to_string_lossy().trim_end_matches(" (deleted)"));
        let one = Arc::new(Executable::of(&path, Some((file, of))));
        one.link?;
        self.keep(Arc::clone(&one));
        Some(one)
    }

    /// An executable that fits this daemon, the installed one if possible, otherwise that of the latest release.
    fn find(&mut self, fits: impl Fn(&Spoken) -> bool) -> Option<Arc<Executable>> {
        let is_good = |one: &Arc<Executable>| fits(&one.spoken) && one.fits().is_ok();
        let installed = self.installed();
        if is_good(&installed) {
            return Some(installed);
        }
        if !self.kept.iter().any(is_good) {
            self.look_for_earlier();
        }
        self.kept.iter().rev().find(|one| is_good(one)).cloned()
    }

    /// An executable whose servers speak a client's wire.
    pub fn speaking(&mut self, wire: Wire) -> Option<Arc<Executable>> {
        self.find(|spoken| spoken.speaks(wire))
    }

    /// An executable whose servers speak the protocol of this library, of which only version and protocol are known: one of
    /// its release, or of a later one that speaks that protocol as an earlier release's.
    pub fn serving(&mut self, library: &Release) -> Option<Arc<Executable>> {
        self.find(|spoken| {
            let mut wires = spoken.wires.iter().skip(1);
            spoken.version == library.version
                || wires.any(|(protocol, _)| *protocol == library.protocol)
        })
    }

    /// An executable whose servers restore the sessions of a server of that release; the installed one if there is none.
    pub fn restoring(&mut self, of: &Spoken) -> Arc<Executable> {
        let found = self.find(|spoken| spoken.restores(of));
        found.unwrap_or_else(|| self.installed())
    }

    /// Takes up the executables that packages have left.
    fn look_for_earlier(&mut self) {
        let folder = self.installed.path.parent().map(|at| at.join(EARLIER));
        let Some(Ok(entries)) = folder.map(fs::read_dir) else {
            return;
        };
        let mut paths: Vec<PathBuf> = entries
            .filter_map(io::Result::ok)
            .map(|entry| entry.path().join("mps-server"))
            .collect();
        paths.sort();
        for path in paths {
            let one = Executable::open(&path);
            let is_trusted = one
                .file
                .as_ref()
                .is_some_and(|(file, _)| file.metadata().is_ok_and(|found| is_trusted(&found)));
            let is_known = self
                .kept
                .iter()
                .any(|kept| kept.identity() == one.identity());
            if is_trusted && one.link.is_some() && !is_known {
                self.keep(Arc::new(one));
            }
        }
    }
}

/// Whether only root and the daemon's user can have written a file.
fn is_trusted(file: &fs::Metadata) -> bool {
    const OTHERS: u32 = 0o022;
    let owner = file.uid();
    (owner == 0 || owner == geteuid().as_raw()) && file.mode() & OTHERS == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(path: &Path, text: &str) {
        use std::os::unix::fs::PermissionsExt;
        // As a package manager does it: the old file keeps its content.
        let new = path.with_extension("new");
        fs::write(&new, format!("#!/bin/sh\necho {text}\n")).expect("write");
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).expect("mode");
        fs::rename(&new, path).expect("rename");
    }

    fn said(one: &Executable) -> String {
        // A script is opened by its interpreter once more, by which time the descriptor is closed.
        let path = one.command().get_program().to_owned();
        fs::read_to_string(path).expect("its content")
    }

    #[test]
    fn an_executable_that_was_replaced_is_still_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("mps-server");
        script(&path, "one");
        let mut releases = Releases::new(&path);
        let first = releases.installed();
        assert_eq!(first.command().get_program(), path.as_os_str());
        assert!(releases.is_installed(&first));
        script(&path, "two");
        let second = releases.installed();
        assert!(said(&first).contains("one") && said(&second).contains("two"));
        assert!(!releases.is_installed(&first) && releases.is_installed(&second));
        fs::remove_file(&path).expect("remove");
        assert!(Arc::ptr_eq(&releases.installed(), &second));
        assert!(said(&second).contains("two"));
    }

    #[test]
    fn an_executable_without_a_note_is_of_this_release() {
        let mut releases = Releases::new(Path::new("/nowhere/mps-server"));
        assert!(releases.speaking(wire::OWN).is_some());
        let other = Wire {
            protocol: wire::OWN.protocol + 1,
            ..wire::OWN
        };
        assert!(releases.speaking(other).is_none());
        assert!(releases.installed().fits().is_ok());
    }

    #[test]
    fn sessions_are_restored_by_a_release_that_knows_their_format() {
        let spoken = |formats: &[u64]| Spoken {
            formats: formats.to_vec(),
            ..Spoken::default()
        };
        assert!(spoken(&[2, 1]).restores(&spoken(&[1])));
        assert!(!spoken(&[2]).restores(&spoken(&[1, 2])));
        assert!(spoken(&[]).restores(&spoken(&[1])) && spoken(&[1]).restores(&spoken(&[])));
    }

    #[test]
    fn files_that_others_may_write_are_not_trusted() {
        use std::os::unix::fs::PermissionsExt;
        let file = tempfile::NamedTempFile::new().expect("a file");
        for (mode, expected) in [(0o755, true), (0o775, false), (0o757, false)] {
            fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).expect("mode");
            let metadata = file.as_file().metadata().expect("metadata");
            assert_eq!(is_trusted(&metadata), expected, "{mode:o}");
        }
    }
}
