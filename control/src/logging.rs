//! The line format of control.log and server.log, as NVIDIA's tools write it:
//! `[2026-11-20 09:09:36.566 Control  1105] Accepting connection...`
//!
//! Daemon and server log through tracing; [`LineLayer`] makes lines of the events. An event of target
//! [`OTHER`] is marked `Other` instead of the process's own name, and a field `as_pid` replaces the pid.

pub mod limit;

use crate::files;
use mpsshim_proto::directory::{self, Purpose, Walk};
use nix::fcntl::{AtFlags, OFlag, renameat};
use nix::sys::stat::{Mode, fstat, fstatat};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// Target of events that are no part of the control or server protocol: start-up, foreign lines.
pub const OTHER: &str = "Other";

/// A log file cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot write the log {path}: {why}; set {} to a directory that user {uid} may write",
    crate::settings::LOG_DIRECTORY
)]
pub struct LogError {
    path: PathBuf,
    uid: u32,
    why: String,
}

/// Opens a log for appending; creates its directory. Refuses a file or directory that another user could have put
/// there.
pub fn open(directory: &Path, name: &str) -> Result<File, LogError> {
    let path = directory.join(name);
    let uid = nix::unistd::geteuid().as_raw();
    let failed = |why: String| LogError {
        path: path.clone(),
        uid,
        why,
    };
    let directory = open_directory(directory).map_err(|refused| failed(refused.to_string()))?;
    let flags = OFlag::O_WRONLY | OFlag::O_APPEND;
    let mode = Mode::from_bits_retain(0o644);
    files::open_or_make(directory.as_fd(), name, flags, mode)
        .map_err(|refused| failed(refused.to_string()))
}

fn open_directory(directory: &Path) -> Result<OwnedFd, directory::Refused> {
    let walk = Walk {
        purpose: Purpose::Logs,
        create: Some(0o755),
        named: true,
        any_owner: false,
    };
    directory::open(directory, walk)
}

/// Bytes of a log before it is set aside.
const LONGEST_LOG: u64 = 64 << 20;
/// Behind the name of a log that was set aside.
const ASIDE: &str = "old";

/// Renames a log that has grown too long, replacing the one renamed before. `true`: the log has to be opened again.
///
/// # Errors
/// It cannot be renamed.
pub fn set_aside(log: BorrowedFd<'_>, directory: &Path, name: &str) -> io::Result<bool> {
    let found = fstat(log)?;
    if u64::try_from(found.st_size).unwrap_or(0) <= LONGEST_LOG {
        return Ok(false);
    }
    let directory = open_directory(directory).map_err(io::Error::other)?;
    // Another process may have renamed it already, and the daemon has not reopened it yet.
    match fstatat(&directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(there) if (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino) => {
            let aside = format!("{name}.{ASIDE}");
            renameat(&directory, name, &directory, aside.as_str())?;
        }
        Ok(_) | Err(nix::errno::Errno::ENOENT) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(true)
}

/// Destination of lines.
#[derive(Clone, Debug)]
pub enum Sink {
    /// The current standard error.
    StandardError,
    /// A file that can be replaced while the process runs.
    File(Arc<RwLock<File>>),
}

impl Sink {
    /// Writes into this file.
    pub fn file(file: File) -> Sink {
        Sink::File(Arc::new(RwLock::new(file)))
    }

    /// Writes into this file from now on. A line that is being written goes where it began.
    pub fn replace(&self, file: File) {
        if let Sink::File(held) = self {
            *held.write().unwrap_or_else(PoisonError::into_inner) = file;
        }
    }

    /// The file, another descriptor of it; `None`: it is standard error.
    ///
    /// # Errors
    /// No descriptors.
    pub fn descriptor(&self) -> io::Result<Option<OwnedFd>> {
        let Sink::File(held) = self else {
            return Ok(None);
        };
        let held = held.read().unwrap_or_else(PoisonError::into_inner);
        held.as_fd().try_clone_to_owned().map(Some)
    }

    /// One write a line: daemon and server append to one file.
    fn write(&self, line: &str) -> io::Result<()> {
        match self {
            Sink::StandardError => io::stderr().write_all(line.as_bytes()),
            Sink::File(held) => {
                let held = held.read().unwrap_or_else(PoisonError::into_inner);
                (&*held).write_all(line.as_bytes())
            }
        }
    }
}

/// Sends every event of this process to `sinks` from now on.
///
/// `filter` is the value of `MPSSHIM_LOG`; the level is `info` without a filter and for targets that it does not
/// mention.
pub fn install(source: &'static str, sinks: Vec<Sink>, filter: Option<&str>) {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .parse_lossy(filter.unwrap_or_default());
    let subscriber = tracing_subscriber::registry()
        .with(filter)
        .with(LineLayer { source, sinks });
    // Fails only where a subscriber is installed already, which then stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Writes events as lines.
pub struct LineLayer {
    source: &'static str,
    sinks: Vec<Sink>,
}

impl<S: Subscriber> Layer<S> for LineLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        // The start of a process is always logged, whichever user caused it.
        if text.as_pid.is_none() && !limit::admits(*event.metadata().level()) {
            return;
        }
        let source = if event.metadata().target() == OTHER {
            OTHER
        } else {
            self.source
        };
        let pid = text.as_pid.unwrap_or_else(|| u64::from(std::process::id()));
        let text = limit::shortened(text.finish());
        let line = line(&chrono::Local::now(), source, pid, &text);
        for sink in &self.sinks {
            // There is nowhere to report a full disk.
            let _ = sink.write(&line);
        }
    }
}

fn line<Z: chrono::TimeZone>(
    time: &chrono::DateTime<Z>,
    source: &str,
    pid: u64,
    text: &str,
) -> String
where
    Z::Offset: std::fmt::Display,
{
    format!(
        "[{} {source:<6} {pid:>5}] {text}\n",
        time.format("%Y-%m-%d %H:%M:%S%.3f")
    )
}

/// Escapes text so that it stays on one line, whatever its source.
pub fn one_line(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            safe.extend(character.escape_default())
        } else {
            safe.push(character)
        }
    }
    safe
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
    as_pid: Option<u64>,
}

impl Text {
    fn finish(self) -> String {
        one_line(&(self.message + &self.fields))
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "as_pid" => self.as_pid = Some(value),
            _ => self.record_debug(field, &value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn lines_look_as_documented() {
        let time = chrono::DateTime::parse_from_rfc3339("2026-11-20T09:09:36.566Z").expect("time");
        assert_eq!(
            line(&time, "Control", 1105, "Accepting connection..."),
            "[2026-11-20 09:09:36.566 Control  1105] Accepting connection...\n"
        );
        assert_eq!(
            line(&time, "Control", 6, "NEW UI"),
            "[2026-11-20 09:09:36.566 Control     6] NEW UI\n"
        );
        assert_eq!(
            line(&time, "Server", 1110, "Exiting"),
            "[2026-11-20 09:09:36.566 Server  1110] Exiting\n"
        );
        assert_eq!(
            line(&time, "Other", 1110, "Startup"),
            "[2026-11-20 09:09:36.566 Other   1110] Startup\n"
        );
    }

    #[test]
    fn events_become_lines() {
        let directory = tempfile::tempdir().expect("directory");
        let sink = open(&directory.path().join("a/b"), "x.log").expect("open");
        let subscriber = tracing_subscriber::registry().with(LineLayer {
            source: "Control",
            sinks: vec![Sink::file(sink)],
        });
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(
                as_pid = 1110_u64,
                "Starting new server {} for user {}",
                1110,
                0
            );
            tracing::info!(target: OTHER, "evil\n[forged] line");
            tracing::warn!(status = 700, "fault");
        });
        let text = std::fs::read_to_string(directory.path().join("a/b/x.log")).expect("read");
        let lines: Vec<&str> = text.lines().map(|line| &line[25..]).collect();
        let pid = std::process::id();
        assert_eq!(
            lines,
            [
                "Control  1110] Starting new server 1110 for user 0".to_string(),
                format!("Other  {pid:>5}] evil\\n[forged] line"),
                format!("Control {pid:>5}] fault status=700"),
            ]
        );
    }

    #[test]
    fn a_sink_s_file_is_replaced() {
        let directory = tempfile::tempdir().expect("directory");
        let file = |name| open(directory.path(), name).expect("open");
        let sink = Sink::file(file("first"));
        let other = sink.clone();
        other.write("one\n").expect("write");
        sink.replace(file("second"));
        other.write("two\n").expect("write");
        let read = |name| std::fs::read_to_string(directory.path().join(name)).expect("read");
        assert_eq!(
            (read("first").as_str(), read("second").as_str()),
            ("one\n", "two\n")
        );
    }

    #[test]
    fn a_log_that_leads_elsewhere_is_refused() {
        let directory = tempfile::tempdir().expect("directory");
        let victim = directory.path().join("dot-file");
        let logs = directory.path().join("logs");
        std::fs::create_dir(&logs).expect("create");
        for hard in [false, true] {
            std::fs::write(&victim, "precious").expect("write");
            let log = logs.join("control.log");
            let linked = if hard {
                std::fs::hard_link(&victim, &log)
            } else {
                std::os::unix::fs::symlink(&victim, &log)
            };
            linked.expect("link");
            let error = open(&logs, "control.log").expect_err("a link").to_string();
            assert!(error.contains("link"), "{error}");
            std::fs::remove_file(&log).expect("it is still there");
        }
        // Nor is the target of a dangling link created.
        std::os::unix::fs::symlink(directory.path().join("new"), logs.join("server.log"))
            .expect("link");
        open(&logs, "server.log").expect_err("a link to nowhere");
        assert!(!directory.path().join("new").exists());
    }

    /// As Kubernetes makes them (emptyDir), and a tmpfs without options in a container.
    #[test]
    fn a_log_directory_open_to_all_is_closed_unless_it_is_sticky() {
        let directory = tempfile::tempdir().expect("directory");
        let logs = directory.path().join("logs");
        std::fs::create_dir(&logs).expect("create");
        for (before, after) in [(0o777, 0o755), (0o1777, 0o1777), (0o700, 0o700)] {
            let mode = Permissions::from_mode(before);
            std::fs::set_permissions(&logs, mode).expect("mode");
            open(&logs, "control.log").expect("open");
            let found = std::fs::metadata(&logs).expect("logs").permissions();
            assert_eq!(found.mode() & 0o7777, after, "{before:o}");
        }
    }

    #[test]
    fn an_unwritable_log_is_named() {
        let error = open(Path::new("/proc/nowhere"), "control.log")
            .expect_err("proc")
            .to_string();
        assert!(
            error.contains("/proc/nowhere/control.log") && error.contains("MPSSHIM_LOG_DIRECTORY")
        );
    }
}
