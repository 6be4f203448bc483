//! The command lines of the programs, each declared once: parser, help, manual page and completions come from here
//! and, for the daemon's commands and the environment, from their tables.

pub mod documents;

use crate::commands::{self, Format};
use crate::settings;
use crate::spawn::Users;
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use mpsshim_model::limits::Limits;
use mpsshim_model::mode::Modes;
use mpsshim_model::policy::{LAUNCH_RUN, MarkKind, TurnPolicy};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// Exit status when mps-run itself fails; 126 and 127 are about the program, as with a shell.
pub const RUN_FAILURE: u8 = 125;

/// What a program prints of itself instead of doing its work.
#[derive(Args, Debug)]
pub struct Documents {
    /// Print the manual page (troff)
    #[arg(long)]
    pub man: bool,
    /// Print completions for a shell
    #[arg(long, value_name = "SHELL", conflicts_with = "man")]
    pub completions: Option<Shell>,
}

/// Starts the mpsshim control daemon, or gives it commands.
///
/// Without an option, commands are read from standard input, one a line, on a terminal with a prompt; a command given
/// as arguments is done alone, and the exit status then says whether it succeeded.
#[derive(Debug, Parser)]
#[command(name = "mps-control", version, disable_version_flag = true, after_help = control_help())]
#[command(
    disable_help_subcommand = true,
    subcommand_help_heading = "Without a daemon"
)]
pub struct Control {
    /// What needs no daemon
    #[command(subcommand)]
    pub own: Option<Own>,
    /// Start the daemon in the background; return when it listens
    #[arg(short = 'd', long, conflicts_with_all = ["foreground", "command"])]
    pub daemon: bool,
    /// Run the daemon in the foreground and log to standard error too
    #[arg(short = 'f', long, alias = "forground", conflicts_with = "command")]
    pub foreground: bool,
    /// With -d or -f: one server for the clients of all users at the same time, run as root
    #[arg(short = 'M', long = "multiuser-server")]
    pub multi_user: bool,
    /// With -d or -f: find out at once what devices there are, not when a command first asks
    #[arg(short = 'q', long)]
    pub ready_devices: bool,
    /// With -d or -f: mode of clients that ask for none, proxy or direct, for all devices or single ones, such as
    /// proxy,1=direct; one device in direct mode that a client sees decides [default: proxy]
    #[arg(long, value_name = "MODES")]
    pub mode: Option<Modes>,
    /// The file with settings (sets MPSSHIM_CONFIG)
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// With -d or -f: answer Prometheus at this address and port, such as 127.0.0.1:9400 (sets MPSSHIM_METRICS)
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<SocketAddr>,
    /// How commands list what they list
    #[arg(
        long,
        value_enum,
        default_value_t,
        conflicts_with_all = ["daemon", "foreground"]
    )]
    pub format: Format,
    #[command(flatten)]
    #[allow(missing_docs, reason = "documented at its type")]
    pub documents: Documents,
    /// Print the version
    #[arg(short = 'v', long = "version", action = clap::ArgAction::Version)]
    pub version: (),
    /// The daemon itself, as `-d` starts it
    #[arg(long, hide = true, requires = "daemon")]
    pub detached: bool,
    /// A command and its arguments
    #[arg(
        value_name = "COMMAND",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub command: Vec<String>,
}

/// What mps-control does without a daemon.
#[derive(Debug, Subcommand)]
pub enum Own {
    /// Specifications for container engines (Container Device Interface)
    #[command(subcommand, disable_help_subcommand = true)]
    Cdi(Cdi),
}

/// What there is to do with specifications.
#[derive(Debug, Subcommand)]
pub enum Cdi {
    /// Print the specification of mpsshim.io/gpu=all, which gives a container the library and the daemon's sockets
    Generate {
        /// Write it into this file instead
        #[arg(long, value_name = "PATH")]
        output: Option<PathBuf>,
    },
}

impl Control {
    /// What `-d` hands on to the daemon itself.
    pub fn daemon_options(&self) -> Vec<String> {
        let given = [(self.multi_user, "-M"), (self.ready_devices, "-q")];
        let given = given.into_iter().filter(|(given, _)| *given);
        let given = given.map(|(_, option)| option.to_owned());
        let mode = self.mode.iter();
        let mode = mode.flat_map(|modes| ["--mode".to_owned(), modes.to_string()]);
        let metrics = self.metrics.iter();
        let metrics = metrics.flat_map(|at| ["--metrics".to_owned(), at.to_string()]);
        given.chain(mode).chain(metrics).collect()
    }

    /// Whose clients a server takes.
    pub fn users(&self) -> Users {
        if self.multi_user {
            Users::Together
        } else {
            Users::OneByOne
        }
    }
}

/// NVIDIA's long option has one dash. What follows a command is the command's.
pub fn as_long_options(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut command = false;
    let one = |(index, argument): (usize, OsString)| {
        command |= index > 0 && !argument.to_string_lossy().starts_with('-');
        if !command && argument == "-multiuser-server" {
            "--multiuser-server".into()
        } else {
            argument
        }
    };
    arguments.enumerate().map(one).collect()
}

fn control_help() -> String {
    format!("{}\n\n{}", commands::help(), settings::help_text())
}

/// Runs PROGRAM with the mpsshim library, so that it shares its GPU with other programs run this way.
///
/// Starts a control daemon when none listens in the pipe directory. mps-run becomes the program: process id,
/// exit status and signals are the program's.
#[derive(Debug, Parser)]
#[command(name = "mps-run", version, after_help = run_help())]
pub struct Run {
    /// The file with settings (sets MPSSHIM_CONFIG)
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// Pipe directory of the daemon (sets MPSSHIM_PIPE_DIRECTORY)
    #[arg(long, value_name = "DIR")]
    pub pipe_dir: Option<PathBuf>,
    /// The genuine CUDA driver (sets MPSSHIM_CUDA_LIBRARY)
    #[arg(long, value_name = "PATH")]
    pub cuda_library: Option<PathBuf>,
    /// What is logged (sets MPSSHIM_LOG)
    #[arg(long, value_name = "FILTER")]
    pub log: Option<OsString>,
    /// The library to preload
    #[arg(long, value_name = "PATH")]
    pub shim: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "documented at its type")]
    pub documents: Documents,
    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        required_unless_present_any = ["man", "completions"],
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub program: Vec<OsString>,
}

fn run_help() -> String {
    format!(
        "Exit status: the program's; 127 if there is no such program, 126 if it cannot be run, {RUN_FAILURE} if \
         mps-run itself fails.\n\nExample: mps-run ./nbody -benchmark\n\n{}",
        settings::help_text()
    )
}

/// Executes the CUDA calls of mpsshim's clients. Started by mps-control, not by hand.
#[derive(Debug, Parser)]
#[command(name = "mps-server", version, after_help = settings::help_text(), args_override_self = true)]
pub struct Server {
    /// Descriptor of the link to the control daemon
    #[arg(long, value_name = "FD")]
    pub link_fd: Option<RawFd>,
    /// Threads that execute clients' calls; 0: chosen from the number of CPUs
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub dispatch_threads: usize,
    /// Clients at a time
    #[arg(long, value_name = "N", default_value_t = settings::DEFAULT_MAX_CLIENTS)]
    pub max_clients: usize,
    /// Modes of clients that ask for none
    #[arg(long, value_name = "MODES", default_value_t)]
    pub mode: Modes,
    /// When clients in direct mode take turns
    #[arg(long, value_enum, default_value_t)]
    pub turns: TurnPolicy,
    /// How a stream tells that it got to a point
    #[arg(long, value_name = "KIND", default_value_t, value_enum)]
    pub marks: MarkKind,
    /// Kernels that a client launches one after the other that are given to the driver at a time, at most; 1: each by itself
    #[arg(long, value_name = "N", default_value_t = LAUNCH_RUN)]
    pub launch_run: usize,
    /// How long a thread that executes calls looks for the next one before it sleeps, at most, in microseconds
    #[arg(long, value_name = "N", default_value_t = settings::DEFAULT_MAX_SPIN_US)]
    pub max_spin_us: u64,
    /// How long a thread looks at a lock of the driver's that is taken before it sleeps, in microseconds
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub lock_spin_us: u64,
    /// How long a device keeps a further context that no client uses, in milliseconds
    #[arg(long, value_name = "N", default_value_t = 15_000)]
    pub further_context_ms: u64,
    /// What clients may have until the daemon says otherwise
    #[arg(long, value_name = "JSON", value_parser = parse_limits)]
    pub limits: Option<Limits>,
    /// Print the devices as one line of JSON and end
    #[arg(long, conflicts_with = "link_fd")]
    pub list_devices: bool,
    #[command(flatten)]
    #[allow(missing_docs, reason = "documented at its type")]
    pub documents: Documents,
}

fn parse_limits(json: &str) -> Result<Limits, serde_json::Error> {
    serde_json::from_str(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_an_option_given_twice_the_last_counts() {
        // As a script that starts mps-server with further options gives it.
        let words = ["mps-server", "--max-spin-us", "1", "--max-spin-us", "2"];
        let options = Server::try_parse_from(words).expect("options");
        assert_eq!(options.max_spin_us, 2);
    }
}
