//! A daemon of a case, and what it says of its servers and clients.

use anyhow::{Context, ensure};
use mpsshim_tests::control_daemon::{Done, Place};
use mpsshim_tests::scene::{control, daemon_with};
use mpsshim_tests::survivors::processes;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long something may take that has to come. The machine may be busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// How long a line of a log may take.
const MOMENT: Duration = Duration::from_millis(500);
/// Lines of a log that a failure is printed with.
const LINES: usize = 60;

/// A row of `ps`.
#[derive(Clone, Debug)]
pub struct Row {
    pub session: u64,
    pub server: i32,
    pub bound_by: String,
}

/// A daemon with two devices of softgpu.
pub struct Daemon {
    place: Place,
    /// Servers killed.
    kills: usize,
}

impl Daemon {
    pub fn start(standby: bool) -> Daemon {
        let mut env = vec![("SOFTGPU_DEVICES", "2"), ("SOFTGPU_MEMORY", "512M")];
        if standby {
            env.push(("MPSSHIM_STANDBY", "1"));
        }
        Daemon {
            place: daemon_with(&env),
            kills: 0,
        }
    }

    /// The socket for new clients.
    pub fn socket(&self) -> PathBuf {
        control(&self.place)
    }

    /// The clients that have a server.
    pub fn rows(&self) -> anyhow::Result<Vec<Row>> {
        let list = self.settled_list()?;
        let list: serde_json::Value = serde_json::from_str(&list).context(list)?;
        let row = |client: &serde_json::Value| {
            let number = |name: &str| client[name].as_i64();
            Some(Row {
                session: number("id")? as u64,
                server: number("server")? as i32,
                bound_by: client["bound_by"].as_str().unwrap_or_default().to_owned(),
            })
        };
        let of_clients = list.as_array().into_iter().flatten();
        let mut rows: Vec<Row> = of_clients
            .filter(|client| client["state"] != "waiting")
            .filter_map(row)
            .collect();
        rows.dedup_by_key(|row| (row.server, row.session));
        Ok(rows)
    }

    /// A server that has much to do leaves fields empty, and `ps` says so.
    fn settled_list(&self) -> anyhow::Result<String> {
        let began = Instant::now();
        loop {
            let done = self.place.control(&["--format=json", "ps"]);
            if done.err.is_empty() && done.code == 0 {
                return Ok(match done.out.trim() {
                    "" => "[]".to_owned(),
                    list => list.to_owned(),
                });
            }
            ensure!(began.elapsed() < PATIENCE, "ps: {}{}", done.out, done.err);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Kills a server; whether it was still there.
    pub fn kill(&mut self, server: i32) -> bool {
        let killed = kill(Pid::from_raw(server), Signal::SIGKILL).is_ok();
        self.kills += usize::from(killed);
        killed
    }

    /// Starts `restart_server`. The error is the command's refusal.
    pub fn restart(&self, server: i32) -> JoinHandle<Result<(), String>> {
        let mut command = self.place.command("mps-control");
        command.args(["restart_server", &server.to_string()]);
        std::thread::spawn(move || {
            let done = Done::from(command.output().map_err(|error| error.to_string())?);
            match done.code {
                0 => Ok(()),
                _ => Err(format!("{}{}", done.out, done.err).trim().to_owned()),
            }
        })
    }

    fn log(&self, name: &str) -> String {
        let path = self.place.pipe().join("logs").join(name);
        let bytes = fs::read(path).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Contexts that were lost by faults.
    pub fn contexts_lost(&self) -> usize {
        self.log("server.log")
            .matches("The context is lost")
            .count()
    }

    /// Bytes of server.log.
    pub fn log_len(&self) -> usize {
        self.log("server.log").len()
    }

    /// Why a session has ended, if a line of server.log behind these bytes says so within a moment: its client may know first.
    pub fn why_ended(&self, session: u64, since: usize) -> Option<String> {
        let began = Instant::now();
        loop {
            let why = self.logged_end(session, since);
            if why.is_some() || began.elapsed() > MOMENT {
                return why;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn logged_end(&self, session: u64, since: usize) -> Option<String> {
        let log = self.log("server.log");
        let log = log.get(since..).unwrap_or_default();
        let adopted = format!("Session {session} of the server before has ended");
        let ended = format!(" Context ID: {session}}} ended by the server");
        let mut lines = log.lines().rev();
        let line = lines.find(|line| line.contains(&adopted) || line.contains(&ended))?;
        let why = line.split_once("ended: ").or(line.split_once("server: "))?;
        Some(why.1.to_owned())
    }

    /// The last lines of the logs.
    pub fn last_lines(&self) -> String {
        const LINES: usize = 40;
        let last = |name: &str| {
            let log = self.log(name);
            let lines: Vec<&str> = log.lines().collect();
            lines[lines.len().saturating_sub(LINES)..].join("\n")
        };
        format!("{}\n{}", last("control.log"), last("server.log"))
    }

    /// Whether a thread panicked, or a server ended that was not killed.
    pub fn is_sound(&self) -> anyhow::Result<()> {
        for name in ["server.log", "control.log"] {
            let log = self.log(name);
            let panic = log.lines().find(|line| line.contains("panicked"));
            ensure!(panic.is_none(), "{name}: {}", panic.unwrap_or_default());
        }
        let ended = self
            .log("control.log")
            .matches("ended unexpectedly")
            .count();
        let expected = self.kills + self.contexts_lost();
        ensure!(
            ended <= expected,
            "{ended} servers ended unexpectedly, {} of them killed",
            self.kills
        );
        Ok(())
    }

    /// The ends of both logs, without what `ps` leaves there.
    pub fn story(&self) -> String {
        let mut text = String::new();
        for name in ["control.log", "server.log"] {
            let log = self.log(name);
            let of_ps = ["Accepting connection", "NEW UI", "Cmd:ps", "UI closed"];
            let lines = log.lines();
            let lines = lines.filter(|line| !of_ps.iter().any(|part| line.contains(part)));
            let lines: Vec<&str> = lines.collect();
            text += &format!("\n{name}:\n");
            text += &lines[lines.len().saturating_sub(LINES)..].join("\n");
        }
        text
    }

    /// What the threads of its processes do, by a debugger if there is one.
    pub fn threads(&self) -> String {
        let mut text = String::new();
        for (pid, name) in processes(&self.place) {
            let folder = format!("/proc/{pid}/task");
            let tasks = fs::read_dir(folder).into_iter().flatten();
            let of = |name: &str, task: &fs::DirEntry| {
                let read = fs::read_to_string(task.path().join(name));
                read.unwrap_or_default().trim_end().to_owned()
            };
            text += &format!("{name} {pid}\n");
            for task in tasks.flatten() {
                let (id, name) = (task.file_name(), of("comm", &task));
                let (waits, call) = (of("wchan", &task), of("syscall", &task));
                text += &format!("  {} {name}: {waits} {call}\n", id.display());
            }
            let mut command = Command::new("gdb");
            command.args(["-p", &pid.to_string(), "-batch", "-nx"]);
            let traced = command.args(["-ex", "thread apply all bt 14"]).output();
            let traced = traced.map(|done| String::from_utf8_lossy(&done.stdout).into_owned());
            let is_told = |line: &&str| line.starts_with(['#', 'T']);
            for line in traced.unwrap_or_default().lines().filter(is_told) {
                text += &format!("  {line}\n");
            }
        }
        text
    }

    /// Waits until no client is left, and what the keeper holds for clients is gone.
    pub fn is_left(&self) -> anyhow::Result<()> {
        await_that("clients have gone", || Ok(self.rows()?.is_empty()))?;
        let mut left = Vec::new();
        let is_empty = await_that("the keepers hold nothing of a client", || {
            left = self.kept();
            Ok(left.is_empty())
        });
        is_empty.context(left.join(", "))
    }

    /// What the keepers hold that belongs to a session. Images stay for the next client that loads them.
    fn kept(&self) -> Vec<String> {
        let keepers = processes(&self.place);
        let keepers = keepers.iter().filter(|(_, name)| name == "mps-keeper");
        let of = |pid: &i32| {
            let links = fs::read_dir(format!("/proc/{pid}/fd"))
                .into_iter()
                .flatten();
            let links = links.filter_map(|link| fs::read_link(link.ok()?.path()).ok());
            let targets = links.map(|target| target.display().to_string());
            let mut held: Vec<String> = targets.filter(|target| is_held(target)).collect();
            // Its connection.
            if let Some(own) = held.iter().position(|target| target.starts_with("socket:")) {
                held.remove(own);
            }
            held
        };
        keepers.flat_map(|(pid, _)| of(pid)).collect()
    }

    /// Ends the daemon; no process of it may be left.
    pub fn quit(self) -> anyhow::Result<()> {
        self.place.control(&["quit", "-t", "0"]);
        let mut left = Vec::new();
        let gone = await_that("all processes of the daemon have ended", || {
            left = processes(&self.place);
            Ok(left.is_empty())
        });
        gone.with_context(|| format!("{left:?}"))
    }
}

/// Whether a keeper's descriptor is one that a server has sent for a session.
fn is_held(target: &str) -> bool {
    let own = target == "/dev/null" || target.ends_with(".log");
    !own && !target.starts_with("/memfd:mpsshim-image")
}

/// Polls until it is so.
pub fn await_that(
    what: &str,
    mut is_so: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let began = Instant::now();
    while !is_so()? {
        ensure!(began.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
