//! The daemon, its servers and the quarantined programs, by the daemon's own answers.

use super::Finding;
use super::installed::sentence;
use crate::settings::Settings;
use crate::ui::{Ui, UiError};
use nix::unistd::geteuid;
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

const CHECK: &str = "daemon";
/// How long each answer may take: a daemon that first looks up the devices needs up to 30 s.
const PATIENCE: Duration = Duration::from_secs(35);
/// Bytes at the end of control.log that are searched.
const LOG_END: i64 = 64 * 1024;

/// A daemon that answers.
pub struct Found {
    /// Its user.
    pub uid: u32,
    /// Its log directory.
    pub logs: PathBuf,
}

/// The daemon and everything that it tells; the daemon, if it answers.
pub fn check(settings: &Settings) -> (Vec<Finding>, Option<Found>) {
    let mut ui = match Ui::connect(settings) {
        Ok(ui) => ui,
        Err(error) => return (vec![absent(settings, &error)], None),
    };
    // Without a limit it may wait for longer.
    let _ = ui.set_patience(PATIENCE);
    let Some(info) = rows(&mut ui, "info").and_then(|rows| rows.into_iter().next()) else {
        let text = format!(
            "A daemon listens in {}, but does not answer.",
            settings.pipe_directory.display()
        );
        let remedy = "Read the last lines of control.log; end the daemon (its process id is in mps-control.pid) and start it again.";
        return (vec![Finding::error(CHECK, text, remedy)], None);
    };
    let found = Found {
        uid: number(&info, "uid") as u32,
        logs: PathBuf::from(text(&info, "log_directory")),
    };
    let mut findings = vec![itself(settings, &info, found.uid)];
    findings.extend(other_namespace(&ui, &info));
    findings.extend(servers(&mut ui));
    findings.extend(last_end(&found.logs.join("control.log")));
    findings.extend(quarantine(&mut ui));
    (findings, Some(found))
}

/// The rows of a list; `None`: no answer, or the command failed.
fn rows(ui: &mut Ui, command: &str) -> Option<Vec<Value>> {
    let answer = ui.command(&format!("{command} --format=json")).ok()?;
    serde_json::from_str(&answer.text)
        .ok()
        .filter(|_| answer.ok)
}

fn text<'a>(row: &'a Value, column: &str) -> &'a str {
    row[column].as_str().unwrap_or("unknown")
}

fn number(row: &Value, column: &str) -> i64 {
    row[column].as_i64().unwrap_or_default()
}

fn absent(settings: &Settings, error: &UiError) -> Finding {
    let directory = settings.pipe_directory.display();
    match error {
        UiError::NoDaemon if settings.required => Finding::error(
            CHECK,
            format!(
                "No daemon listens in {directory}, and MPSSHIM_REQUIRED is set: programs fail with 805."
            ),
            "Start it with mps-control -d, or start programs with mps-run.",
        ),
        UiError::NoDaemon => Finding::warning(
            CHECK,
            format!(
                "No daemon listens in {directory}: programs run on the genuine driver and share nothing."
            ),
            "Start it with mps-control -d, or start programs with mps-run, which starts one.",
        ),
        UiError::Untrusted { .. } => Finding::error(
            CHECK,
            format!("A daemon there would not be trusted: {error}."),
            "Change the permissions, or set MPSSHIM_PIPE_DIRECTORY to another directory.",
        ),
        _ => Finding::error(
            CHECK,
            sentence(&error.to_string()),
            "Check the permissions of the pipe directory; a user's daemon serves that user only.",
        ),
    }
}

/// Its version, and whether it serves this user.
fn itself(settings: &Settings, info: &Value, uid: u32) -> Finding {
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    let (pid, version) = (number(info, "pid"), text(info, "version"));
    let told = format!(
        "The daemon {pid} of user {uid} ({}) listens in {}",
        text(info, "user"),
        settings.pipe_directory.display()
    );
    let own = geteuid().as_raw();
    if version != VERSION {
        let text = format!("{told} and is of release {version}, this program of {VERSION}.");
        let remedy =
            "Restart the daemon with the installed release: mps-control quit, then mps-control -d.";
        return Finding::error(CHECK, text, remedy);
    }
    if uid != 0 && uid != own {
        return Finding::error(
            CHECK,
            format!(
                "{told} and serves that user only: programs of user {own} are refused with 807."
            ),
            "Start a daemon of your own in another pipe directory, or one as root.",
        );
    }
    let users = match (uid, text(info, "users")) {
        (0, "together") => "all users at the same time, with one server",
        (0, "apart") => "all users at the same time, with a server for each",
        (0, _) => "all users, one at a time",
        _ => "this user",
    };
    Finding::ok(CHECK, format!("{told} and serves {users}."))
}

/// A daemon in another PID namespace has another process id here, or none.
fn other_namespace(ui: &Ui, info: &Value) -> Option<Finding> {
    let seen = ui.daemon().ok()?.pid;
    (i64::from(seen) != number(info, "pid")).then(|| {
        let here = match seen {
            0 => "has no process id here".to_owned(),
            seen => format!("is process {seen} here"),
        };
        Finding::ok(
            CHECK,
            format!("It runs in another PID namespace, such as a container's, and {here}; process ids in its lists are its own."),
        )
    })
}

fn servers(ui: &mut Ui) -> Vec<Finding> {
    let check = "server";
    let Some(servers) = rows(ui, "get_server_list") else {
        let text = "The daemon does not list its servers.";
        return vec![Finding::error(
            check,
            text,
            "Read the last lines of control.log.",
        )];
    };
    if servers.is_empty() {
        let text = "No server runs; the first client starts one.";
        return vec![Finding::ok(check, text)];
    }
    let tell = |server: &Value| {
        let (pid, state) = (number(server, "pid"), text(server, "state"));
        let devices = rows(ui, &format!("device_query {pid}")).unwrap_or_default();
        let devices = devices
            .iter()
            .filter(|device| number(device, "server") == pid);
        let devices: Vec<&str> = devices.map(|device| text(device, "name")).collect();
        let told = format!(
            "The server {pid} of user {} is {state}, with {} clients on {}",
            number(server, "uid"),
            number(server, "clients"),
            if devices.is_empty() {
                "no device yet".to_owned()
            } else {
                devices.join(", ")
            }
        );
        let told = match server["quarantined"].as_str() {
            Some(program) => format!("{told}, for the quarantined program {program}."),
            None => format!("{told}."),
        };
        match state {
            "FAULT" => Finding::warning(
                check,
                told,
                "It ends within a second; server.log says which kernel faulted (docs/faults.md).",
            ),
            _ => Finding::ok(check, told),
        }
    };
    servers.iter().map(tell).collect()
}

/// The last line of control.log about the end of a server, if it was not an orderly one.
fn last_end(log: &Path) -> Option<Finding> {
    let line = last_end_in(&end_of(log)?)?;
    Some(Finding::warning(
        "server",
        format!("The last server did not end as ordered: {line}."),
        "Read the lines before it in control.log, and server.log; docs/faults.md says what follows from a fault.",
    ))
}

/// The end of a file; `None`: this user cannot read it.
fn end_of(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    // Fails for a shorter file, which is read from its beginning.
    let _ = file.seek(SeekFrom::End(-LOG_END));
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn last_end_in(log: &str) -> Option<String> {
    let messages = log
        .lines()
        .filter_map(|line| Some(line.split_once("] ")?.1));
    let ends: Vec<(&str, &str)> = messages.filter_map(end_of_server).collect();
    let (last, _) = ends.last()?;
    // Its status may come before or after the explanation.
    let explains = |(pid, rest): &&(&str, &str)| pid == last && is_disorderly(rest);
    let (pid, rest) = ends.iter().rev().find(explains)?;
    Some(format!("Server {pid} {rest}"))
}

/// Process id and predicate of a message about the end of a server.
fn end_of_server(message: &str) -> Option<(&str, &str)> {
    let (pid, rest) = message.strip_prefix("Server ")?.split_once(' ')?;
    let ends = rest.starts_with("exited with status ") || is_disorderly(rest);
    ends.then_some((pid, rest))
}

fn is_disorderly(rest: &str) -> bool {
    let kinds = ["unexpectedly", "after a fault", "before it was ready"];
    let kind = rest.strip_prefix("ended ");
    kind.is_some_and(|kind| kinds.iter().any(|known| kind.starts_with(known)))
}

fn quarantine(ui: &mut Ui) -> Option<Finding> {
    let programs = rows(ui, "quarantine list")?;
    if programs.is_empty() {
        return None;
    }
    let names: Vec<&str> = programs.iter().map(|row| text(row, "program")).collect();
    Some(Finding::warning(
        "quarantine",
        format!(
            "Programs that may have caused a fault get servers of their own: {}.",
            names.join(", ")
        ),
        "They share again after three runs without a fault, or after mps-control quarantine release PROGRAM.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_end_of_a_server_counts() {
        let line = |text: &str| format!("[2026-11-20 09:09:36.566 Control  1105] {text}\n");
        let bad =
            line("Server 7 ended unexpectedly, with 2 clients; the next client gets a new server");
        let good = line("Server 9 exited with status 0");
        let other = line("Server 9 of user 0 taken over with 3 clients");
        assert_eq!(last_end_in(&format!("{bad}{good}")), None);
        let told = last_end_in(&format!("{good}{bad}{other}")).expect("an end");
        assert!(told.starts_with("Server 7 ended unexpectedly"), "{told}");
        let status = line("Server 7 exited with status 137");
        for log in [format!("{bad}{status}"), format!("{status}{bad}")] {
            let told = last_end_in(&log).expect("an end");
            assert!(told.starts_with("Server 7 ended unexpectedly"), "{told}");
        }
        // An order to end at once may kill a server.
        assert_eq!(last_end_in(&status), None);
        assert_eq!(last_end_in(""), None);
    }
}
