//! A control daemon in a directory of its own. Both are gone when the value is.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::driver::Driver;
use crate::{Build, MEMORY, tail};

/// Seconds for clients and servers to end when the daemon is told to quit.
const QUIT_SECONDS: u32 = 3;

/// A running daemon.
#[derive(Debug)]
pub struct Daemon<'a> {
    build: &'a Build,
    driver: &'a Driver,
    directory: TempDir,
}

impl<'a> Daemon<'a> {
    /// Starts one. Its server starts with the first client.
    pub fn start(build: &'a Build, driver: &'a Driver) -> Result<Daemon<'a>> {
        let directory = TempDir::with_prefix("mpsshim-demo-").context("a temporary directory")?;
        let daemon = Daemon {
            build,
            driver,
            directory,
        };
        let status = daemon.command("mps-control")?.arg("-d").status()?;
        if !status.success() {
            bail!("mps-control -d: {status}");
        }
        Ok(daemon)
    }

    /// What was built.
    pub fn build(&self) -> &Build {
        self.build
    }

    /// One of the built programs, with this daemon's settings and nobody else's.
    pub fn command(&self, program: &str) -> Result<Command> {
        let mut command = Command::new(self.build.path(program)?);
        for name in [
            "LD_PRELOAD",
            "MPSSHIM_DISABLE",
            "MPSSHIM_SERVER",
            "MPSSHIM_LIBRARY",
        ] {
            command.env_remove(name);
        }
        command
            .env("MPSSHIM_PIPE_DIRECTORY", self.directory.path().join("pipe"))
            .env("MPSSHIM_LOG_DIRECTORY", self.directory.path().join("log"));
        if let Some(library) = &self.driver.library {
            command.env("MPSSHIM_CUDA_LIBRARY", library);
        }
        Ok(command)
    }

    /// The numbers that a command of mps-control prints; none when it fails.
    fn numbers(&self, arguments: &[&str]) -> Vec<i32> {
        let Ok(mut command) = self.command("mps-control") else {
            return Vec::new();
        };
        match command.args(arguments).stderr(Stdio::null()).output() {
            Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout)
                .lines()
                .filter_map(|line| line.trim().parse().ok())
                .collect(),
            _ => Vec::new(),
        }
    }

    /// The server's process id, once there is one.
    pub fn server(&self) -> Option<i32> {
        self.numbers(&["get_server_list"]).first().copied()
    }

    /// Process ids of a server's clients.
    pub fn clients(&self, server: i32) -> Vec<i32> {
        self.numbers(&["get_client_list", &server.to_string()])
    }

    /// Bytes of the device's memory in use, as the driver tells the server.
    pub fn memory_in_use(&self) -> Option<u64> {
        let own = std::env::current_exe().ok()?;
        let mut command = self.command("mps-run").ok()?;
        let output = command
            .arg(own)
            .arg(MEMORY)
            .stderr(Stdio::null())
            .output()
            .ok()?;
        String::from_utf8_lossy(&output.stdout).trim().parse().ok()
    }

    /// The ends of its logs.
    pub fn log_tail(&self) -> String {
        let log = self.directory.path().join("log");
        let part = |name: &str| format!("--- {name}\n{}", tail(&log.join(name), 12));
        part("control.log") + &part("server.log")
    }

    /// Ends the daemon and its server, and waits until they are gone.
    pub fn quit(self) -> Result<()> {
        self.end()
    }

    fn end(&self) -> Result<()> {
        let seconds = QUIT_SECONDS.to_string();
        let mut quit = self.command("mps-control")?;
        quit.args(["quit", "-t", &seconds]).stdout(Stdio::null());
        let status = quit.status()?;
        if !status.success() {
            bail!("mps-control quit: {status}");
        }
        // The daemon removes the file as the last thing it does.
        let file = self.directory.path().join("pipe/mps-control.pid");
        let began = Instant::now();
        while file.exists() {
            if began.elapsed() > Duration::from_secs(2 * u64::from(QUIT_SECONDS)) {
                bail!("the daemon has not ended");
            }
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let running = self.directory.path().join("pipe/mps-control.pid").exists();
        if running && let Err(error) = self.end() {
            eprintln!("demo: {error:#}");
        }
    }
}
