//! The line format of control.log and server.log, as NVIDIA's tools write it:
//! `[2026-11-20 09:09:36.566 Control  1105] Accepting connection...`
//!
//! Daemon and server log through tracing; [`LineLayer`] makes lines of the events. An event of target
//! [`OTHER`] is marked `Other` instead of the process's own name, and a field `as_pid` replaces the pid.

use std::fmt::Write as _;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// Target of events that are no part of the control or server protocol: start-up, foreign lines.
pub const OTHER: &str = "Other";

/// A log file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot write the log {path}: {source}; set {} to a directory that user {uid} may write",
    crate::settings::LOG_DIRECTORY
)]
pub struct LogError {
    path: PathBuf,
    uid: u32,
    source: io::Error,
}

/// Opens a log to append to; makes its directory.
pub fn open(directory: &Path, name: &str) -> Result<File, LogError> {
    let path = directory.join(name);
    let uid = nix::unistd::geteuid().as_raw();
    let open = || {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(directory)?;
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o644)
            .open(&path)
    };
    open().map_err(|source| LogError {
        path: path.clone(),
        uid,
        source,
    })
}

/// Where lines go.
#[derive(Clone, Debug)]
pub enum Sink {
    /// Whatever standard error is when the line is written.
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
/// `filter` is the value of `MPSSHIM_LOG`; without one, and for what it does not mention, `info` holds.
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
        let source = if event.metadata().target() == OTHER {
            OTHER
        } else {
            self.source
        };
        let pid = text.as_pid.unwrap_or_else(|| u64::from(std::process::id()));
        let line = line(&chrono::Local::now(), source, pid, &text.finish());
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

/// Text that cannot break out of its line, whoever it came from.
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
    fn an_unwritable_log_is_named() {
        let error = open(Path::new("/proc/nowhere"), "control.log")
            .expect_err("proc")
            .to_string();
        assert!(
            error.contains("/proc/nowhere/control.log") && error.contains("MPSSHIM_LOG_DIRECTORY")
        );
    }
}
