//! The file of a trace. mps-control opens it, as the user who runs the command: neither daemon nor server, which may run as
//! root, opens a path that a user has named.

use super::ui::Ui;
use super::wire::Answer;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// An open file to be written by a trace.
pub struct Target {
    path: PathBuf,
    file: File,
    /// Whether this process created it.
    new: bool,
}

impl Target {
    /// The path in `trace start PATH`.
    pub fn of(line: &str) -> Option<&Path> {
        let rest = line.trim().strip_prefix("trace")?;
        let rest = rest.strip_prefix(char::is_whitespace)?.trim_start();
        let path = rest.strip_prefix("start")?;
        let path = path.strip_prefix(char::is_whitespace)?.trim_start();
        (!path.is_empty()).then_some(Path::new(path))
    }

    /// Opens it; existing content is kept until the trace begins.
    ///
    /// # Errors
    /// The reason why it cannot be written, in words.
    pub fn open(path: &Path) -> Result<Target, String> {
        let failed = |error: io::Error| format!("cannot write {}: {error}", path.display());
        let path = std::path::absolute(path).map_err(failed)?;
        // Opening a pipe would wait for a reader.
        if fs::metadata(&path).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(format!("{} is not a regular file", path.display()));
        }
        let append = || OpenOptions::new().append(true).clone();
        let (file, new) = match append().create_new(true).open(&path) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                (append().open(&path).map_err(failed)?, false)
            }
            Err(error) => return Err(failed(error)),
        };
        Ok(Target { path, file, new })
    }

    /// Orders the daemon to trace into it. On failure, a new file is removed.
    ///
    /// # Errors
    /// No answer.
    pub fn begin(self, ui: &mut Ui) -> anyhow::Result<Answer> {
        let line = format!("trace start {}", self.path.display());
        let answer = ui.command_with(&line, Some(self.file.as_fd()));
        if self.new && !answer.as_ref().is_ok_and(|answer| answer.ok) {
            // It may have been removed already.
            let _ = fs::remove_file(&self.path);
        }
        Ok(answer?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_names_a_file() {
        assert_eq!(
            Target::of(" trace  start  a b.json "),
            Some(Path::new("a b.json"))
        );
        for line in [
            "trace stop",
            "trace start",
            "trace start ",
            "tracestart x",
            "trace started x",
            "ps",
        ] {
            assert_eq!(Target::of(line), None, "{line}");
        }
    }
}
