//! `mps-control doctor`: checks an installation and says for each problem how to solve it. It needs no daemon and starts
//! none.

mod daemon;
mod directories;
mod driver;
mod installed;
mod limits;
mod nvidia;
mod process;

use crate::commands::Format;
use crate::listing::Listing;
use crate::settings::{Settings, SettingsError};
use clap::Args;
use serde_json::{Value, json};
use std::io::{Read, Seek};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// Options of the command.
#[derive(Args, Debug)]
pub struct Options {
    /// Also check why the program of this process does not share its GPU
    #[arg(short = 'p', long = "pid", value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ok,
    Warning,
    Error,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Warning => "warning",
            State::Error => "error",
        }
    }
}

/// One check and its result.
#[derive(Debug)]
struct Finding {
    check: &'static str,
    state: State,
    /// The result as a sentence.
    text: String,
    /// How to solve the problem, as a sentence; empty if there is none.
    remedy: String,
}

impl Finding {
    fn ok(check: &'static str, text: impl Into<String>) -> Finding {
        Finding {
            check,
            state: State::Ok,
            text: text.into(),
            remedy: String::new(),
        }
    }

    fn warning(check: &'static str, text: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding {
            check,
            state: State::Warning,
            text: text.into(),
            remedy: remedy.into(),
        }
    }

    fn error(check: &'static str, text: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding {
            state: State::Error,
            ..Finding::warning(check, text, remedy)
        }
    }

    fn line(&self) -> String {
        let line = format!("{:<9}{}: {}", self.state.name(), self.check, self.text);
        if self.remedy.is_empty() {
            line
        } else {
            format!("{line} {}", self.remedy)
        }
    }

    fn row(&self) -> Vec<Value> {
        vec![
            json!(self.check),
            json!(self.state.name()),
            json!(self.text),
            json!(self.remedy),
        ]
    }
}

/// The results of all checks.
#[derive(Debug)]
pub struct Report {
    findings: Vec<Finding>,
}

impl Report {
    /// Whether a check has found an error; warnings are none.
    pub fn has_error(&self) -> bool {
        self.findings
            .iter()
            .any(|finding| finding.state == State::Error)
    }

    /// A line for each check in the table, a row for each in the other formats.
    pub fn print(&self, format: Format) -> String {
        let lines = self.findings.iter().map(Finding::line);
        let rows = self.findings.iter().map(Finding::row).collect();
        let columns = &["check", "state", "finding", "remedy"];
        let text = Listing::of_lines(columns, rows, lines).print(format);
        format!("{}\n", text.trim_end())
    }
}

/// Makes all checks. Without valid settings the others would say nothing about the installation.
pub fn examine(settings: Result<Settings, SettingsError>, options: &Options) -> Report {
    let settings = match settings {
        Ok(settings) => settings.at_daemon(),
        Err(error) => {
            let remedy = "Correct this setting; docs/settings.md lists all of them.";
            let text = format!("A setting is invalid: {error}.");
            let findings = vec![Finding::error("settings", text, remedy)];
            return Report { findings };
        }
    };
    let mut findings = settings_in_force(&settings);
    findings.extend(installed::library(&settings));
    let server = installed::server(&settings);
    let server_runs = server.state != State::Error;
    findings.push(server);
    findings.extend(driver::check(&settings, server_runs));
    findings.push(nvidia::check(&settings));
    let (daemon, found) = daemon::check(&settings);
    findings.extend(directories::check(&settings, found.as_ref()));
    findings.extend(daemon);
    findings.extend(limits::check());
    if let Some(pid) = options.pid {
        findings.extend(process::check(&settings, pid));
    }
    Report { findings }
}

/// Values that are ignored, and the setting that turns the product off.
fn settings_in_force(settings: &Settings) -> Vec<Finding> {
    let ignored = settings.ignored.iter();
    let mut findings: Vec<_> = ignored
        .map(|warning| Finding::warning("settings", format!("{warning}."), "Correct or unset it."))
        .collect();
    if settings.disable {
        findings.push(Finding::warning(
            "settings",
            "MPSSHIM_DISABLE is set, so programs run as if the library were not there.",
            "Unset it.",
        ));
    }
    findings
}

/// Interval at which a process is polled.
const LOOK: Duration = Duration::from_millis(5);

/// A process's status and its standard output.
///
/// # Errors
/// It did not end in time and was killed, in words.
fn finish(mut child: Child, limit: Duration) -> Result<(ExitStatus, String), String> {
    let until = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                let mut text = String::new();
                if let Some(mut output) = child.stdout.take() {
                    // A part of it is worth more than nothing.
                    let _ = output.read_to_string(&mut text);
                }
                return Ok((status, text));
            }
            Ok(None) if Instant::now() < until => std::thread::sleep(LOOK),
            Ok(None) => {
                // Not waited for: it may hang in the driver.
                let _ = child.kill();
                return Err(format!("it did not end within {} s", limit.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// The content of a file from its beginning, as text.
fn content(mut file: impl Read + Seek) -> String {
    let mut text = Vec::new();
    // A part of it is worth more than nothing.
    let _ = file.rewind().and_then(|()| file.read_to_end(&mut text));
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn an_error_fails_and_a_warning_does_not() {
        let mut report = Report {
            findings: vec![
                Finding::ok("one", "It is there."),
                Finding::warning("two", "It is old.", "Renew it."),
            ],
        };
        assert!(!report.has_error());
        report
            .findings
            .push(Finding::error("three", "It is gone.", "Find it."));
        assert!(report.has_error());
        assert_eq!(
            report.print(Format::Table),
            "ok       one: It is there.\nwarning  two: It is old. Renew it.\nerror    three: It is gone. Find it.\n"
        );
        let rows: Value = serde_json::from_str(&report.print(Format::Json)).expect("JSON");
        assert_eq!(rows[1]["state"], "warning");
        assert_eq!(rows[2]["remedy"], "Find it.");
        let csv = report.print(Format::Csv);
        assert!(csv.starts_with("check,state,finding,remedy\n"), "{csv}");
    }

    #[test]
    fn a_process_has_a_time_limit() {
        let run = |script: &str, limit| {
            let mut shell = Command::new("sh");
            let shell = shell.args(["-c", script]).stdout(Stdio::piped());
            finish(shell.spawn().expect("sh"), limit)
        };
        let minute = Duration::from_secs(60);
        let (status, text) = run("echo here; exit 3", minute).expect("an end");
        assert_eq!((status.code(), text.as_str()), (Some(3), "here\n"));
        let late = run("exec sleep 60", Duration::from_millis(20));
        assert_eq!(late.map(|_| ()), Err("it did not end within 0 s".into()));
    }
}
