//! Programs whose state outlives their server (`tests/src/bin/survivor/`), and what they look at.

use crate::PATIENCE;
use crate::artifacts::artifact;
use crate::control_daemon::{Place, wait_until};
use crate::programs::{Running, preloaded, well};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

pub const RPC_FAILURE: &str = "CUDA_ERROR_MPS_RPC_FAILURE (806)";
pub const ASSERT: &str = "CUDA_ERROR_ASSERT (710)";
pub const ILLEGAL_ADDRESS: &str = "CUDA_ERROR_ILLEGAL_ADDRESS (700)";

/// `tests/src/bin/survivor/`.
pub struct Survivor {
    pub program: Running,
    pub rounds: u32,
}

impl Survivor {
    pub fn start(place: &Place) -> Survivor {
        Survivor::start_in(place.pipe(), &[])
    }

    /// One with this pipe directory and this in its environment.
    pub fn start_in(pipe: &Path, env: &[(&str, &str)]) -> Survivor {
        let mut command = preloaded(artifact("survivor"), pipe);
        command.envs(env.iter().copied());
        Survivor::start_by(command)
    }

    /// One whose kernels may run again.
    pub fn start_with_replay(place: &Place) -> Survivor {
        let mut command = preloaded(artifact("survivor"), place.pipe());
        command.env("MPSSHIM_REPLAY", "kernels");
        Survivor::start_by(command)
    }

    /// One with that user and group, for a test that is root.
    pub fn start_as(place: &Place, user: u32, group: u32) -> Survivor {
        let mut command = preloaded(artifact("survivor"), place.pipe());
        command.uid(user).gid(group);
        Survivor::start_by(command)
    }

    fn start_by(mut command: Command) -> Survivor {
        let program = Running::start_until(&mut command, "started");
        Survivor { program, rounds: 1 }
    }

    pub fn say(&mut self, command: &str) {
        self.program.say(command);
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.program.say(command);
        self.program.line()
    }

    /// The answer to `round`: all that it had is as it was.
    pub fn is_well(&mut self) {
        let answer = self.program.line();
        self.rounds += 1;
        let expected = format!("ok {} ", self.rounds);
        assert!(answer.starts_with(&expected), "{answer}");
    }

    pub fn round(&mut self) {
        self.say("round");
        self.is_well();
    }

    pub fn end(self) {
        assert_eq!(well(&self.program.finish(PATIENCE)), "");
    }
}

pub fn server(place: &Place) -> Option<i32> {
    let list = place.control(&["get_server_list"]).out;
    // One that is ending may still be there.
    list.lines().last()?.trim().parse().ok()
}

/// Kills the server as nobody expects it.
pub fn kill_server(place: &Place) -> i32 {
    let pid = server(place).expect("a server");
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("kill");
    pid
}

pub fn clients(place: &Place) -> Vec<(String, String)> {
    let mut clients: Vec<_> = place
        .ps()
        .iter()
        .map(|row| (row["pid"].clone(), row["id"].clone()))
        .collect();
    clients.sort();
    clients
}

/// The running processes with the pipe directory of this place in their environment, by process id, and their names.
pub fn processes(place: &Place) -> Vec<(i32, String)> {
    let folder = place.pipe().display().to_string();
    let of = |pid: &str| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        let mut parts = environment.split(|byte| *byte == 0);
        let is_mine = parts.any(|part| part.ends_with(folder.as_bytes()));
        let pid = pid.parse().ok()?;
        is_mine.then(|| (pid, name.trim_end().to_owned()))
    };
    let entries = std::fs::read_dir("/proc").expect("/proc");
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter_map(|name| of(&name)).collect()
}

pub fn keepers(place: &Place) -> usize {
    let processes = processes(place);
    let is_keeper = |(_, name): &&(i32, String)| name == "mps-keeper";
    processes.iter().filter(is_keeper).count()
}

/// Which clients are portable, by process.
pub fn portable(place: &Place) -> HashMap<i64, bool> {
    let list = place.control(&["--format=json", "ps"]).out;
    let list: serde_json::Value = serde_json::from_str(&list).unwrap_or_default();
    let clients = list.as_array().into_iter().flatten();
    let of = |client: &serde_json::Value| (client["pid"].as_i64(), client["portable"] == 1);
    clients
        .map(of)
        .filter_map(|(pid, portable)| Some((pid?, portable)))
        .collect()
}

/// Waits until there are so many clients and all are portable.
pub fn wait_until_portable(place: &Place, clients: usize) {
    wait_until("the clients are portable", || {
        let portable = portable(place);
        portable.len() == clients && portable.values().all(|portable| *portable)
    });
}
