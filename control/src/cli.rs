//! The command lines of the programs, each declared once: parser, help, manual page and completions derive from these
//! types and, for the daemon's commands and the environment, from their tables.

mod arguments;
pub mod documents;

use crate::commands::{self, Format};
use crate::doctor;
use crate::environment::Form;
use crate::modules::{self, PROTOCOL_VERSION};
use crate::program::Program;
use crate::settings;
use crate::wire::Interface;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use mpsshim_model::host_memory::HostMemory;
use mpsshim_model::limits::Limits;
use mpsshim_model::mode::Modes;
use mpsshim_model::policy::{LAUNCH_RUN, MarkKind, TurnPolicy, Users};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// Exit status when mps-run itself fails; 126 and 127 concern the program, as with a shell.
pub const RUN_FAILURE: u8 = 125;

/// Options that print a program's own documentation.
#[derive(Args, Debug)]
pub struct Documents {
    /// Print the manual page (troff)
    #[arg(long)]
    pub man: bool,
    /// Print the completion script for a shell
    #[arg(long, value_name = "SHELL", conflicts_with = "man")]
    pub completions: Option<Shell>,
}

/// Starts the mpsshim control daemon, or sends it commands.
///
/// Without options or arguments, reads commands from standard input, one per line; on a terminal, with a prompt. A
/// command can also be given as arguments; the exit status then says whether it succeeded.
#[derive(Debug, Parser)]
#[command(name = "mps-control", version, disable_version_flag = true, after_help = control_help())]
#[command(
    disable_help_subcommand = true,
    subcommand_help_heading = "Without a daemon",
    subcommand_value_name = "COMMAND"
)]
pub struct Control {
    /// The command to execute
    #[command(subcommand)]
    pub command: Option<Order>,
    /// Start the daemon in the background and return once it listens
    #[arg(short = 'd', long, conflicts_with = "foreground")]
    pub daemon: bool,
    /// Run the daemon in the foreground, and log to standard error as well
    #[arg(short = 'f', long)]
    pub foreground: bool,
    /// With -d or -f, as root: how the clients of several users are served (sets MPSSHIM_USERS) [default: serial]
    #[arg(long, value_enum)]
    pub users: Option<Users>,
    /// The same as --users together; also -m
    #[arg(
        short = 'M',
        short_alias = 'm',
        long = "multiuser-server",
        alias = "multiuser",
        conflicts_with = "users"
    )]
    pub multi_user: bool,
    /// With -d or -f: let sm_partition reserve multiprocessors for clients, which get proxy mode only (sets
    /// MPSSHIM_STATIC_PARTITIONING)
    #[arg(short = 'S', long)]
    pub static_partitioning: bool,
    /// Version of the interface: 2, or 3, which has commands of the form MODULE VERB beside the others
    /// (CUDA_MPS_PROTOCOL_VERSION) [default: 2]
    #[arg(short = 'p', long, value_name = "VERSION", value_parser = parse_interface)]
    pub protocol: Option<Interface>,
    /// Create and change servers, namespaces and their limits as this TOML file describes them: all, or none if it has a
    /// mistake. With -d or -f: before the daemon serves
    #[arg(short = 'a', long, value_name = "FILE", conflicts_with = "quit")]
    pub apply: Option<PathBuf>,
    /// End the daemon, as the command quit does; with -p 3 also -q
    #[arg(long, conflicts_with_all = ["daemon", "foreground"])]
    pub quit: bool,
    /// With -d or -f: look up the devices at startup rather than when a command first needs them
    #[arg(short = 'q', long)]
    pub ready_devices: bool,
    /// With -d or -f: mode of clients that do not request one, proxy or direct, for all devices or by device, such as
    /// proxy,1=direct; a client gets direct mode if any device that it sees has it [default: proxy]
    #[arg(long, value_name = "MODES")]
    pub mode: Option<Modes>,
    /// Configuration file (sets MPSSHIM_CONFIG)
    #[arg(long, value_name = "PATH", global = true)]
    pub config: Option<PathBuf>,
    /// With -d or -f: serve metrics for Prometheus at this address and port, such as 127.0.0.1:9400 (sets MPSSHIM_METRICS)
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<SocketAddr>,
    /// Output format of commands that print lists
    #[arg(
        long,
        value_enum,
        default_value_t,
        overrides_with = "format",
        conflicts_with_all = ["daemon", "foreground"]
    )]
    pub format: Format,
    #[command(flatten)]
    #[allow(missing_docs, reason = "documented at its type")]
    pub documents: Documents,
    /// Print the version
    #[arg(short = 'v', visible_short_alias = 'V', long = "version", action = clap::ArgAction::Version)]
    pub version: (),
    /// The daemon process that `-d` starts
    #[arg(long, hide = true, requires = "daemon")]
    pub detached: bool,
}

/// Commands given as arguments.
#[derive(Debug, Subcommand)]
pub enum Order {
    /// Write specifications for container engines (Container Device Interface)
    #[command(subcommand, disable_help_subcommand = true)]
    Cdi(Cdi),
    /// Check library, server, driver, directories, daemon and limits, and print a remedy for each problem
    Doctor(doctor::Options),
    /// A command of the daemon, or `top`, and its arguments
    #[command(external_subcommand)]
    Line(Vec<String>),
}

/// Commands for specifications.
#[derive(Debug, Subcommand)]
pub enum Cdi {
    /// Print the specification of the device mpsshim.io/gpu=all, which gives a container the library and the daemon's sockets
    Generate {
        /// Write it to this file instead
        #[arg(long, value_name = "PATH")]
        output: Option<PathBuf>,
    },
}

impl Control {
    /// Parses the program's arguments; its options may follow the command.
    ///
    /// # Errors
    /// Those of clap, which also stand for `--help` and `--version`.
    pub fn parse_arguments(
        arguments: impl Iterator<Item = OsString>,
    ) -> Result<Control, clap::Error> {
        let interface = |options: &Control| -> Result<Interface, clap::Error> {
            let set = std::env::var(PROTOCOL_VERSION).ok();
            let set = set.filter(|set| options.protocol.is_none() && !set.is_empty());
            match set.map(|set| parse_interface(&set)) {
                None => Ok(options.protocol.unwrap_or_default()),
                Some(Ok(interface)) => Ok(interface),
                Some(Err(why)) => Err(Control::command().error(
                    ErrorKind::InvalidValue,
                    format!("{PROTOCOL_VERSION}: {why}"),
                )),
            }
        };
        let mut options = Control::try_parse_from(arguments::options_first(arguments))?;
        options.protocol = Some(interface(&options)?);
        let starts = options.daemon || options.foreground;
        if options.interface() == Interface::Three && !starts && options.ready_devices {
            (options.quit, options.ready_devices) = (true, false);
        }
        if options.apply.is_some() && options.command.is_some() {
            return Err(Control::command().error(
                ErrorKind::ArgumentConflict,
                "the argument '--apply' cannot be used with a command",
            ));
        }
        if options.quit && options.command.is_some() {
            return Err(Control::command().error(
                ErrorKind::ArgumentConflict,
                "the argument '--quit' cannot be used with a command",
            ));
        }
        let start = [
            (options.daemon, "--daemon"),
            (options.foreground, "--foreground"),
        ];
        let start = start.into_iter().find(|(given, _)| *given);
        match start.filter(|_| options.command.is_some()) {
            None => Ok(options),
            Some((_, option)) => Err(Control::command().error(
                ErrorKind::ArgumentConflict,
                format!("the argument '{option}' cannot be used with a command"),
            )),
        }
    }

    /// The options that `-d` passes on to the daemon process.
    pub fn daemon_options(&self) -> Vec<String> {
        let given = [
            (self.multi_user, "-M"),
            (self.static_partitioning, "-S"),
            (self.ready_devices, "-q"),
        ];
        let given = given.into_iter().filter(|(given, _)| *given);
        let given = given.map(|(_, option)| option.to_owned());
        let users = self.users.iter();
        let users = users.flat_map(|users| ["--users".to_owned(), users.to_string()]);
        let mode = self.mode.iter();
        let mode = mode.flat_map(|modes| ["--mode".to_owned(), modes.to_string()]);
        let metrics = self.metrics.iter();
        let metrics = metrics.flat_map(|at| ["--metrics".to_owned(), at.to_string()]);
        let apply = self.apply.iter();
        // The daemon process has another current directory.
        let apply = apply.map(|file| std::path::absolute(file).unwrap_or_else(|_| file.clone()));
        let apply = apply.flat_map(|file| ["-a".to_owned(), file.display().to_string()]);
        let given = given.chain(users).chain(mode).chain(metrics);
        given.chain(apply).collect()
    }

    /// The version of the interface.
    pub fn interface(&self) -> Interface {
        self.protocol.unwrap_or_default()
    }

    /// How the clients of several users are served, if an option says so.
    pub fn users(&self) -> Option<Users> {
        match self.multi_user {
            true => Some(Users::Together),
            false => self.users,
        }
    }
}

fn parse_interface(text: &str) -> Result<Interface, String> {
    match text {
        "2" => Ok(Interface::Two),
        "3" => Ok(Interface::Three),
        _ => Err(format!("\"{text}\" is no version of the interface: 2 or 3")),
    }
}

fn control_help() -> String {
    format!(
        "{}\n\n{}\n\n{}",
        commands::help(),
        modules::help_of_all(),
        settings::help_text()
    )
}

/// Runs PROGRAM with the mpsshim library, so that it shares its GPU with other programs run this way.
///
/// Starts a control daemon if none listens in the pipe directory. mps-run then executes the program in its own process:
/// process id, exit status and signals are the program's.
#[derive(Debug, Parser)]
#[command(name = "mps-run", version, after_help = run_help())]
pub struct Run {
    /// Configuration file (sets MPSSHIM_CONFIG)
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// The daemon's pipe directory (sets MPSSHIM_PIPE_DIRECTORY)
    #[arg(long, value_name = "DIR")]
    pub pipe_dir: Option<PathBuf>,
    /// The genuine CUDA driver (sets MPSSHIM_CUDA_LIBRARY)
    #[arg(long, value_name = "PATH")]
    pub cuda_library: Option<PathBuf>,
    /// Log level or filter (sets MPSSHIM_LOG)
    #[arg(long, value_name = "FILTER")]
    pub log: Option<OsString>,
    /// Mode of the program (sets MPSSHIM_MODE for it alone); profilers and debuggers need direct
    #[arg(long, value_name = "MODE", value_parser = ["proxy", "direct"])]
    pub mode: Option<String>,
    /// Library to preload
    #[arg(long, value_name = "PATH")]
    pub shim: Option<PathBuf>,
    /// Print errors only: no warnings about the environment, not that a daemon was started, and do not set MPSSHIM_NOTICES
    #[arg(short = 'q', long)]
    pub quiet: bool,
    /// Print the variables that a program needs instead of running one: for a shell, whose programs then share the GPU
    /// (starts a daemon if none listens), for a Dockerfile or as JSON
    #[arg(
        long,
        value_name = "FORM",
        value_enum,
        num_args = 0..=1,
        default_missing_value = "sh",
        conflicts_with = "program"
    )]
    pub print_env: Option<Form>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "documented at its type")]
    pub documents: Documents,
    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        required_unless_present_any = ["man", "completions", "print_env"],
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
    /// Descriptor of a connection to the keeper of sessions to be taken over
    #[arg(long, value_name = "FD")]
    pub keeper_fd: Option<RawFd>,
    /// Create a context, then wait to take over the sessions of another server
    #[arg(long, conflicts_with = "keeper_fd")]
    pub standby: bool,
    /// As a standby, create the context only when told to take over: the device admits one process
    #[arg(long, requires = "standby")]
    pub without_context: bool,
    /// Run as a keeper, which holds descriptors for the server connected to standard input
    #[arg(long, conflicts_with = "link_fd")]
    pub keeper: bool,
    /// Number of threads that execute clients' calls; 0: derived from the number of CPUs
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub dispatch_threads: usize,
    /// Maximum number of clients at a time
    #[arg(long, value_name = "N", default_value_t = settings::DEFAULT_MAX_CLIENTS)]
    pub max_clients: usize,
    /// Mode of clients that do not request one, also by device
    #[arg(long, value_name = "MODES", default_value_t)]
    pub mode: Modes,
    /// When clients in direct mode take turns
    #[arg(long, value_enum, default_value_t)]
    pub turns: TurnPolicy,
    /// Pinned host memory that all clients of a user may have together, also by user
    #[arg(long, value_name = "AMOUNTS", default_value_t)]
    pub host_memory: HostMemory,
    /// Directory for device memory that moves and finds no room in pinned host memory
    #[arg(long, value_name = "PATH")]
    pub moved_memory_directory: Option<PathBuf>,
    /// How completion markers are signalled to waiting clients
    #[arg(long, value_name = "KIND", default_value_t, value_enum)]
    pub marks: MarkKind,
    /// Maximum number of consecutive kernel launches submitted to the driver as one batch; 1: no batches
    #[arg(long, value_name = "N", default_value_t = LAUNCH_RUN)]
    pub launch_run: usize,
    /// How long an idle thread polls for calls before it sleeps, at most, in microseconds
    #[arg(long, value_name = "N", default_value_t = settings::DEFAULT_MAX_SPIN_US)]
    pub max_spin_us: u64,
    /// How long a thread spins on a contended lock of the driver before it sleeps, in microseconds
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub lock_spin_us: u64,
    /// How long an unused further context of a device is kept, in milliseconds
    #[arg(long, value_name = "N", default_value_t = 15_000)]
    pub further_context_ms: u64,
    /// Limits of clients until the daemon sends others
    #[arg(long, value_name = "JSON", value_parser = parse_limits)]
    pub limits: Option<Limits>,
    /// The quarantined program whose processes are the only clients; told to a daemon that takes the server over
    #[arg(long, value_name = "JSON", value_parser = parse_program)]
    pub quarantined: Option<Program>,
    /// Print the devices as one line of JSON and exit
    #[arg(long, conflicts_with = "link_fd")]
    pub list_devices: bool,
    /// Print the driver and its devices as one line of JSON and exit
    #[arg(long, hide = true, conflicts_with_all = ["link_fd", "list_devices"])]
    pub describe_driver: bool,
    #[command(flatten)]
    #[allow(missing_docs, reason = "documented at its type")]
    pub documents: Documents,
}

fn parse_program(json: &str) -> Result<Program, serde_json::Error> {
    serde_json::from_str(json)
}

fn parse_limits(json: &str) -> Result<Limits, serde_json::Error> {
    serde_json::from_str(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(words: &[&str]) -> Result<Control, clap::Error> {
        let words = std::iter::once("mps-control").chain(words.iter().copied());
        Control::parse_arguments(words.map(OsString::from))
    }

    #[test]
    fn options_of_the_program_may_follow_the_command() {
        let options = control(&["ps", "-p", "7", "--format", "json", "--config=a"]);
        let options = options.expect("options");
        assert_eq!(options.format, Format::Json);
        assert_eq!(options.config, Some("a".into()));
        let Some(Order::Line(words)) = options.command else {
            panic!("{:?}", options.command);
        };
        assert_eq!(words, ["ps", "-p", "7"]);
        // The last counts.
        let options = control(&["--format", "json", "ps", "--format=csv"]);
        assert_eq!(options.expect("options").format, Format::Csv);
    }

    #[test]
    fn the_daemon_process_gets_the_same_way_to_serve_users() {
        for (words, users) in [
            (&["-d"][..], None),
            (&["-d", "-M"], Some(Users::Together)),
            (&["-d", "--users", "apart"], Some(Users::Apart)),
        ] {
            let options = control(words).expect("options");
            assert_eq!(options.users(), users);
            let given = options.daemon_options();
            let handed_on: Vec<&str> = given.iter().map(String::as_str).collect();
            let same = control(&[&["-f"], &handed_on[..]].concat());
            assert_eq!(same.expect("options").users(), users);
        }
    }

    #[test]
    fn invalid_command_lines_are_refused() {
        for (words, expected) in [
            (
                &["-d", "quit"][..],
                "'--daemon' cannot be used with a command",
            ),
            (
                &["-f", "cdi", "generate"],
                "'--foreground' cannot be used with a command",
            ),
            (
                &["quit", "--daemon"],
                "'--daemon' cannot be used with a command",
            ),
            (
                &["--fromat", "json", "ps"],
                "a similar argument exists: '--format'",
            ),
            (&["--foo"], "a similar argument exists: '--foreground'"),
            (&["-x"], "unexpected argument '-x' found"),
            (
                &["-d", "--users", "all"],
                "[possible values: serial, apart, together]",
            ),
            (
                &["-d", "-M", "--users", "serial"],
                "cannot be used with '--users <USERS>'",
            ),
            (
                &["ps", "--format"],
                "a value is required for '--format <FORMAT>'",
            ),
        ] {
            let error = control(words).expect_err("an error");
            assert!(error.to_string().contains(expected), "{words:?}: {error}");
            assert_eq!(error.exit_code(), 2, "{words:?}");
        }
    }

    #[test]
    fn of_an_option_given_twice_the_last_counts() {
        // As a script that starts mps-server with further options gives it.
        let words = ["mps-server", "--max-spin-us", "1", "--max-spin-us", "2"];
        let options = Server::try_parse_from(words).expect("options");
        assert_eq!(options.max_spin_us, 2);
    }
}
