//! The control daemon of mpsshim, and the way to give it commands.

use anyhow::Context;
use clap::Parser;
use mpsshim_server::control::daemon::Daemon;
use mpsshim_server::control::ui::{Ui, UiError};
use mpsshim_server::control::wire::Answer;
use mpsshim_server::control::{commands, launch};
use mpsshim_server::logging;
use mpsshim_server::settings::{self, Settings};
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;

/// Starts the mpsshim control daemon, or gives it commands.
///
/// Without an option, commands are read from standard input, one a line; a command given as arguments is done
/// alone, and the exit status then says whether it succeeded.
#[derive(Parser)]
#[command(name = "mps-control", version, disable_version_flag = true, after_help = after_help())]
struct Options {
    /// Start the daemon in the background; return when it listens
    #[arg(short = 'd', conflicts_with_all = ["foreground", "command"])]
    daemon: bool,
    /// Run the daemon in the foreground and log to standard error too
    #[arg(short = 'f', conflicts_with = "command")]
    foreground: bool,
    /// Print the version
    #[arg(short = 'v', long = "version", action = clap::ArgAction::Version)]
    version: (),
    /// The daemon itself, as `-d` starts it
    #[arg(long, hide = true, requires = "daemon")]
    detached: bool,
    /// A command and its arguments
    #[arg(
        value_name = "COMMAND",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<String>,
}

fn after_help() -> String {
    format!("{}\n\n{}", commands::help(), settings::help_text())
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if options.detached => {
            // Standard output is the pipe to whoever started this daemon.
            println!("{error:#}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<bool> {
    let settings = Settings::from_env()?;
    if options.detached {
        launch::leave_session();
        let daemon = Daemon::open(&settings, None)?;
        // The last words of a bug.
        nix::unistd::dup2_stderr(logging::open(&settings.log_directory, "control.log")?)?;
        launch::tell_ready()?;
        daemon.run()?;
    } else if options.daemon {
        let executable =
            std::env::current_exe().context("cannot find the executable of this process")?;
        launch::start_detached(&executable, &settings)?;
    } else if options.foreground {
        let echo = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        Daemon::open(&settings, Some(echo))?.run()?;
    } else if options.command.is_empty() {
        commands_of_standard_input(&settings)?;
    } else {
        let answer = Ui::connect(&settings)?.command(&options.command.join(" "))?;
        print(&answer)?;
        return Ok(answer.ok);
    }
    Ok(true)
}

/// As NVIDIA's: a command that fails says so and does not end the session, and the exit status is 0.
fn commands_of_standard_input(settings: &Settings) -> anyhow::Result<()> {
    let mut ui = Ui::connect(settings)?;
    for line in io::stdin().lock().lines() {
        let line = line.context("cannot read standard input")?;
        let name = line.split_whitespace().next();
        if name.is_none() {
            continue;
        }
        match ui.command(&line) {
            Ok(answer) => {
                print(&answer)?;
                if answer.ok && name == Some("quit") {
                    break;
                }
            }
            Err(error @ UiError::TooLong) => println!("{error}"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn print(answer: &Answer) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if !answer.text.is_empty() {
        writeln!(out, "{}", answer.text)?;
    }
    out.flush()
}
