//! Programs that use CUDA, started as a user would.

use crate::artifacts::{artifact, driver};
use crate::control_daemon::{Done, Place};
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A program without any setting of the product.
fn plain(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for name in [
        "LD_PRELOAD",
        "MPSSHIM_LOG",
        "MPSSHIM_DISABLE",
        "MPSSHIM_PIPE_DIRECTORY",
        "CUDA_VISIBLE_DEVICES",
    ] {
        command.env_remove(name);
    }
    command
}

/// A program with the shim preloaded, which finds a daemon if there is one at that pipe directory.
pub fn preloaded(program: impl AsRef<OsStr>, pipe: &Path) -> Command {
    let mut command = plain(program);
    command
        .env("LD_PRELOAD", artifact("libmpsshim.so"))
        .env("MPSSHIM_CUDA_LIBRARY", driver())
        .env("MPSSHIM_PIPE_DIRECTORY", pipe);
    command
}

/// `tests/src/bin/client.rs` with the shim preloaded.
pub fn client(place: &Place, arguments: &[&str]) -> Command {
    let mut command = preloaded(artifact("client"), place.pipe());
    command.args(arguments);
    command
}

/// `tests/src/bin/survivor/` under a name of its own, so that it is a program of its own.
pub fn survivor(place: &Place, name: &str) -> PathBuf {
    let path = place.path().join(name);
    let original = artifact("survivor");
    // A copy could not be started while another test's process has it open for writing, since the time of a fork.
    if fs::hard_link(&original, &path).is_err() {
        fs::copy(&original, &path).expect("a copy");
    }
    path.canonicalize().expect("a path")
}

/// A line for the shell in `folder`, as a user types it who finds the product's programs and those of the folder.
pub fn shell(place: &Place, folder: &Path, line: &str) -> Command {
    let programs = artifact("mps-run");
    let programs = programs.parent().expect("a folder").to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = [folder.to_owned(), programs]
        .into_iter()
        .chain(std::env::split_paths(&path));
    let mut command = place.command_like(&place.command("mps-control"), "sh");
    command
        .args(["-c", line])
        .current_dir(folder)
        .env("PATH", std::env::join_paths(path).expect("no colon"));
    command
}

/// A folder in which [`driver`] has the name that programs look for.
pub struct DriverFolder(TempDir);

impl DriverFolder {
    pub fn new() -> DriverFolder {
        let folder = TempDir::with_prefix("driver-").expect("directory");
        symlink(driver(), folder.path().join("libcuda.so.1")).expect("link");
        DriverFolder(folder)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A program on the driver itself, without the shim.
    pub fn native(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = plain(program);
        // A genuine driver finds its other libraries beside it.
        let beside = driver().parent().map(PathBuf::from).unwrap_or_default();
        let path = std::env::join_paths([self.0.path(), &beside]).expect("no colon");
        command.env("LD_LIBRARY_PATH", path);
        command
    }
}

/// A program that runs. It is killed with the value.
pub struct Running {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Running {
    pub fn start(command: &mut Command) -> Running {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("run");
        let out = BufReader::new(child.stdout.take().expect("piped"));
        Running { child, out }
    }

    /// Starts it and waits for its first line.
    pub fn start_until(command: &mut Command, line: &str) -> Running {
        let mut running = Running::start(command);
        let found = running.line();
        assert_eq!(found, line, "{:?}", running.rest());
        running
    }

    /// The next line that it prints, without its end.
    pub fn line(&mut self) -> String {
        let mut found = String::new();
        self.out.read_line(&mut found).expect("read");
        found.trim_end().to_owned()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_some()
    }

    /// Gives it a line to read.
    pub fn say(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("piped");
        writeln!(stdin, "{line}").expect("write");
    }

    /// Ends what it reads.
    pub fn hang_up(&mut self) {
        drop(self.child.stdin.take());
    }

    pub fn kill(mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }

    /// Its end, which must come within this time. `out` is what it has printed since the first line that was waited
    /// for.
    pub fn finish(mut self, within: Duration) -> Done {
        self.hang_up();
        let began = Instant::now();
        // What these programs print fits the pipes.
        while !self.has_ended() {
            if began.elapsed() > within {
                self.child.kill().expect("kill");
                panic!("not ended within {within:?}: {:?}", self.rest());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.rest()
    }

    fn rest(&mut self) -> Done {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        self.out.read_to_end(&mut out).expect("read");
        let stderr = self.child.stderr.as_mut().expect("piped");
        stderr.read_to_end(&mut err).expect("read");
        std::process::Output {
            status: self.child.wait().expect("wait"),
            stdout: out,
            stderr: err,
        }
        .into()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a program to its end, which must come within a minute.
pub fn finish(command: &mut Command) -> Done {
    Running::start(command).finish(Duration::from_secs(60))
}

/// Runs a program that must succeed and print nothing on standard error; returns what it has printed.
pub fn succeed(command: &mut Command) -> String {
    well(&finish(command))
}

/// What a program has printed that must have succeeded.
pub fn well(done: &Done) -> String {
    assert_eq!(
        (done.code, done.err.as_str()),
        (0, ""),
        "it printed {:?}",
        done.out
    );
    done.out.clone()
}
