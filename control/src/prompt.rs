//! Commands typed on a terminal: a prompt, editing, history and completion.

use super::commands::{FORMAT_OPTION, Format, Kind, TABLE, find};
use super::parse::ends_daemon;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Context, Editor, Helper};
use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

const PROMPT: &str = "mps> ";
/// Leaves the prompt; not a command of the daemon.
const EXIT: &str = "exit";
/// Asked before the daemon is ended.
const QUESTION: &str = "End the daemon? [y/N] ";
/// Lines kept of the history.
const HISTORY: usize = 1000;

/// Reads command lines from a terminal.
pub struct Prompt {
    editor: Editor<Commands, FileHistory>,
    history: Option<PathBuf>,
}

impl Prompt {
    /// Takes over the terminal while a line is read.
    ///
    /// # Errors
    /// When the terminal cannot be used.
    pub fn new() -> rustyline::Result<Prompt> {
        let config = Config::builder()
            .max_history_size(HISTORY)?
            .history_ignore_space(true)
            .build();
        let mut editor = Editor::with_config(config)?;
        editor.set_helper(Some(Commands));
        let history = history_file(|name| std::env::var_os(name));
        if let Some(path) = &history {
            // There is no history the first time, and the prompt works without one.
            let _ = editor.load_history(path);
        }
        Ok(Prompt { editor, history })
    }

    /// The next line; `None`: `exit` or the end of input. A line interrupted with Ctrl-C is empty, as is a `quit` that
    /// is not confirmed.
    ///
    /// # Errors
    /// Those of the terminal.
    pub fn line(&mut self) -> rustyline::Result<Option<String>> {
        let line = match self.editor.readline(PROMPT) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => return Ok(Some(String::new())),
            Err(ReadlineError::Eof) => return Ok(None),
            Err(error) => return Err(error),
        };
        self.remember(&line);
        if line.trim() == EXIT {
            return Ok(None);
        }
        if ends_daemon(&line) && !self.confirms()? {
            return Ok(Some(String::new()));
        }
        Ok(Some(line))
    }

    /// Asks once whether the daemon is to end; anything but yes is no.
    fn confirms(&mut self) -> rustyline::Result<bool> {
        match self.editor.readline(QUESTION) {
            Ok(answer) => Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str())),
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn remember(&mut self, line: &str) {
        let kept = !line.trim().is_empty() && self.editor.add_history_entry(line).unwrap_or(false);
        let Some(path) = self.history.as_ref().filter(|_| kept) else {
            return;
        };
        // A history that cannot be written is skipped.
        let _ = path
            .parent()
            .map(|folder| DirBuilder::new().recursive(true).mode(0o700).create(folder));
        let _ = self.editor.append_history(path);
    }
}

/// `mpsshim/history` where a user's programs keep their state.
fn history_file(lookup: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| {
        lookup(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let state = absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))?;
    Some(state.join("mpsshim/history"))
}

/// Completes names of commands, and formats for commands that print lists.
struct Commands;

/// Completions for the last word of `line`, and the offset where that word begins.
fn candidates(line: &str) -> (usize, Vec<String>) {
    let start = line.rfind(char::is_whitespace).map_or(0, |at| at + 1);
    let (before, word) = line.split_at(start);
    let formats = [Format::Table, Format::Csv, Format::Json].map(Format::name);
    let all: Vec<String> = match before.split_whitespace().next() {
        None => {
            let names = TABLE.iter().map(|row| row.name).chain([EXIT]);
            names.map(str::to_owned).collect()
        }
        Some(name) if find(name).is_some_and(|row| row.kind == Kind::Lists) => {
            let value = before.split_whitespace().next_back() == Some(FORMAT_OPTION);
            let start = if value { "" } else { "--format=" };
            formats.map(|format| format!("{start}{format}")).into()
        }
        Some(_) => Vec::new(),
    };
    let fits = |candidate: &String| candidate.starts_with(word);
    (start, all.into_iter().filter(fits).collect())
}

impl Completer for Commands {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(candidates(&line[..position]))
    }
}

impl Hinter for Commands {
    type Hint = String;
}
impl Highlighter for Commands {}
impl Validator for Commands {}
impl Helper for Commands {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_completed() {
        let words = |line| candidates(line).1;
        assert_eq!(words("terminate"), ["terminate_client"]);
        assert_eq!(
            words(""),
            TABLE
                .iter()
                .map(|row| row.name)
                .chain(["exit"])
                .collect::<Vec<_>>()
        );
        assert_eq!(words("ps --format "), ["table", "csv", "json"]);
        assert_eq!(
            candidates("ps --format=j"),
            (3, vec!["--format=json".into()])
        );
        assert_eq!(words("quit -"), [""; 0]);
        assert_eq!(words("frobnicate "), [""; 0]);
    }

    #[test]
    fn where_the_history_is() {
        let with = |set: &'static [(&str, &str)]| {
            history_file(|name| {
                let found = set.iter().find(|(given, _)| *given == name);
                found.map(|(_, value)| value.into())
            })
        };
        assert_eq!(with(&[]), None);
        assert_eq!(
            with(&[("HOME", "/home/u")]),
            Some("/home/u/.local/state/mpsshim/history".into())
        );
        let both = with(&[("HOME", "/home/u"), ("XDG_STATE_HOME", "/s")]);
        assert_eq!(both, Some("/s/mpsshim/history".into()));
        let relative = with(&[("HOME", "/home/u"), ("XDG_STATE_HOME", "s")]);
        assert_eq!(
            relative,
            Some("/home/u/.local/state/mpsshim/history".into())
        );
    }
}
