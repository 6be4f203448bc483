//! Starting a daemon in the background.
//!
//! The daemon is a new process, not the fork of a running program. It is started with a pipe as its standard output,
//! through which it reports that it listens, or why it cannot; then it closes the pipe.

use super::spawn::{beside_this_executable, without_terminal};
use crate::seqpacket;
use crate::settings::{self, Settings};
use mpsshim_proto::directory::{self, Refused};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Option by which a daemon learns that its standard output is the pipe described above.
pub const DETACHED_OPTION: &str = "--detached";
/// The line that the daemon prints when it listens.
const READY: &str = "ready";
/// How long a daemon started by another process may take to listen.
const START_PATIENCE: Duration = Duration::from_secs(10);

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// mps-control cannot be run.
    #[error("cannot run {path}: {source}")]
    Execute {
        /// The executable.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The daemon said why it cannot start.
    #[error("{0}")]
    Refused(String),
    /// The daemon ended without a word.
    #[error("the control daemon ended while it started; see control.log in {0}")]
    Ended(PathBuf),
    /// Another user could have placed a daemon there.
    #[error(
        "the pipe directory {path} is not used: {why}; set {} to another one",
        settings::PIPE_DIRECTORY
    )]
    Untrusted {
        /// The directory.
        path: PathBuf,
        /// Why the directory is not trusted.
        why: Refused,
    },
    /// A daemon holds the directory but does not listen.
    #[error(
        "a control daemon holds {0} but does not answer there; end it (its process id is in mps-control.pid)"
    )]
    Silent(PathBuf),
}

/// Starts `executable` (mps-control) as a daemon with these options and returns when it listens.
pub fn start_detached(
    executable: &Path,
    settings: &Settings,
    options: &[String],
) -> Result<(), LaunchError> {
    let failed = |source| LaunchError::Execute {
        path: executable.to_owned(),
        source,
    };
    let mut command = Command::new(executable);
    without_terminal(&mut command)
        .stdout(Stdio::piped())
        .args(["-d", DETACHED_OPTION])
        .args(options);
    let mut child = settings
        .hand_on(&mut command)
        .current_dir("/")
        .spawn()
        .map_err(failed)?;
    let mut said = String::new();
    if let Some(stdout) = child.stdout.take() {
        let mut stdout = BufReader::new(stdout);
        stdout.read_line(&mut said).map_err(failed)?;
        if said.trim_end() == READY {
            return Ok(());
        }
        stdout.read_to_string(&mut said).map_err(failed)?;
    }
    // It has closed its output without being ready, so it is ending.
    child.wait().map_err(failed)?;
    match said.trim_end() {
        "" => Err(LaunchError::Ended(settings.log_directory.clone())),
        why => Err(LaunchError::Refused(why.to_owned())),
    }
}

/// In the daemon, at its start, before it opens any file: leaves the session of the starting process and closes
/// inherited descriptors, such as MPICH's pipes, by whose end mpirun detects that a rank has ended.
pub fn leave_session() {
    // Fails for a process that already leads a group, which needs no change.
    let _ = nix::unistd::setsid();
    // Without /proc they stay open.
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let inherited: Vec<RawFd> = names.filter_map(|name| name.parse().ok()).collect();
    for fd in inherited.into_iter().filter(|fd| *fd > 2) {
        // One of them belonged to the directory listing and is already closed.
        let _ = nix::unistd::close(fd);
    }
}

/// In the daemon, once it listens: notifies the starting process and closes the pipe.
pub fn tell_ready() -> io::Result<()> {
    writeln!(io::stdout(), "{READY}")?;
    io::stdout().flush()?;
    nix::unistd::dup2_stdout(File::options().write(true).open("/dev/null")?)?;
    Ok(())
}

/// Starts a daemon unless one listens; returns whether this call has started it. Any number of processes may call this
/// at once; only one daemon starts.
pub fn ensure_daemon(settings: &Settings) -> Result<bool, LaunchError> {
    let path = &settings.pipe_directory;
    match directory::of_client(path, settings.pipe_directory_is_named, false) {
        Ok(_) => {}
        // The daemon creates it.
        Err(refused) if refused.is_absent() => {}
        Err(why) => {
            let path = path.clone();
            return Err(LaunchError::Untrusted { path, why });
        }
    }
    let listens = || seqpacket::connect(&settings.control_socket()).is_ok();
    if listens() {
        return Ok(false);
    }
    // By way of `mps-control -d`, so that the daemon is no child of the program that this process becomes.
    let executable = beside_this_executable("mps-control");
    let mut command = Command::new(&executable);
    let bound = leave_processors();
    let result = settings
        .hand_on(&mut command)
        .arg("-d")
        // The mode requested for this program must not become every other program's default.
        .env_remove(settings::MODE)
        .stdin(Stdio::null())
        .output();
    if let Some(bound) = bound {
        // This affinity was in force before, so it is valid.
        let _ = sched_setaffinity(Pid::from_raw(0), &bound);
    }
    let result = result.map_err(|source| LaunchError::Execute {
        path: executable,
        source,
    })?;
    let until = Instant::now() + START_PATIENCE;
    let said = without_warnings(&String::from_utf8_lossy(&result.stderr));
    let other_is_starting = said == super::directory::DirectoryError::AlreadyRunning.to_string();
    while !listens() {
        if !result.status.success() && !other_is_starting {
            return Err(LaunchError::Refused(said));
        }
        if Instant::now() > until {
            return Err(LaunchError::Silent(settings.pipe_directory.clone()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(result.status.success())
}

/// The standard error of mps-control without its warnings about the environment, which the calling program has given.
fn without_warnings(said: &str) -> String {
    let is_warning = |line: &&str| {
        let text = line.split_once(": ").map(|(_, text)| text);
        text.is_some_and(|text| text.starts_with(settings::WARNING))
    };
    let lines: Vec<&str> = said
        .trim_end()
        .lines()
        .filter(|line| !is_warning(line))
        .collect();
    lines.join("\n")
}

/// The command line that ends the daemon of these settings.
pub fn quit_command(settings: &Settings) -> String {
    let quit = "mps-control quit";
    match settings.pipe_directory_is_named {
        // Commands would look in other directories.
        true => format!(
            "{}={} {quit}",
            settings::PIPE_DIRECTORY,
            settings.pipe_directory.display()
        ),
        false => quit.to_owned(),
    }
}

/// Lets this thread and its child processes run on every processor that the system allows: mpirun binds a program to
/// one processor, and without this the daemon and every client's server would inherit that. Returns the previous
/// affinity.
fn leave_processors() -> Option<CpuSet> {
    let this = Pid::from_raw(0);
    let bound = sched_getaffinity(this).ok()?;
    let mut all = CpuSet::new();
    for processor in 0..CpuSet::count() {
        all.set(processor).ok()?;
    }
    // The kernel ignores processors that do not exist or are not in the cpuset.
    sched_setaffinity(this, &all).ok().map(|()| bound)
}
