//! The control daemon of mpsshim, and the program that sends it commands.

use anyhow::Context;
use clap::Parser;
use mpsshim_control::cdi::Spec;
use mpsshim_control::cli::{Cdi, Control, Order, documents};
use mpsshim_control::commands::{Format, in_format};
use mpsshim_control::daemon::apply::as_sealed_memory;
use mpsshim_control::daemon::{Daemon, Manner};
use mpsshim_control::doctor;
use mpsshim_control::launch;
use mpsshim_control::modules;
use mpsshim_control::nvidia_names;
use mpsshim_control::program::with_real_paths;
use mpsshim_control::prompt::Prompt;
use mpsshim_control::server_file::{FILE_LIMIT, ServerFile};
use mpsshim_control::settings::{self, Settings, SettingsError};
use mpsshim_control::target::Target;
use mpsshim_control::top;
use mpsshim_control::ui::{Ui, UiError};
use mpsshim_control::wire::{Answer, Interface};
use mpsshim_model::partitions::Partitions;
use std::fs::{self, File};
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

/// The command executed by this program itself.
const TOP: &str = "top";
/// The command that ends the daemon.
const QUIT: &str = "quit";

fn main() -> ExitCode {
    let options =
        Control::parse_arguments(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let starts = options.daemon || options.foreground;
    for (given, name) in [
        (options.multi_user, "-M"),
        (options.users.is_some(), "--users"),
        (options.static_partitioning, "-S"),
        (options.ready_devices, "-q"),
        (options.mode.is_some(), "--mode"),
        (options.metrics.is_some(), "--metrics"),
    ] {
        if given && !starts {
            eprintln!("{name} is a daemon option; use it with -d or -f");
            return ExitCode::from(2);
        }
    }
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if options.detached => {
            // Standard output is the pipe to the process that started this daemon.
            println!("{error:#}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Control) -> anyhow::Result<bool> {
    if documents::print::<Control>(&options.documents)? {
        return Ok(true);
    }
    if let Some(Order::Doctor(asked)) = &options.command {
        let report = doctor::examine(load(options), asked);
        io::stdout().write_all(report.print(options.format).as_bytes())?;
        return Ok(!report.has_error());
    }
    // The daemon process inherits the environment of the process that has started it, which has warned.
    if !options.detached {
        settings::warn_of_environment("mps-control");
    }
    let mut settings = load(options)?;
    if !(options.daemon || options.foreground) {
        settings = settings.at_daemon();
    }
    if let Some(Order::Cdi(Cdi::Generate { output })) = &options.command {
        generate(&settings, output.as_deref())?;
        return Ok(true);
    }
    settings.users = options.users().unwrap_or(settings.users);
    settings.mode = options.mode.clone().or(settings.mode);
    if options.static_partitioning {
        let limits = &mut settings.defaults.limits;
        limits.partitions = Some(Partitions::default());
    }
    settings.metrics = options.metrics.or(settings.metrics);
    let applied = options.apply.as_deref().map(read_servers).transpose()?;
    // So that scrapes do not wait for the devices.
    let ready_devices = options.ready_devices || settings.metrics.is_some();
    if options.detached {
        launch::leave_session();
        let mut daemon = Daemon::open(&settings, Manner::Detached)?;
        if let Some(Applied { file, .. }) = &applied {
            daemon.apply_at_start(file)?;
        }
        launch::tell_ready()?;
        if ready_devices {
            daemon.search_devices();
        }
        return Ok(daemon.run()?);
    } else if options.daemon {
        let executable =
            std::env::current_exe().context("cannot find the executable of this process")?;
        launch::start_detached(&executable, &settings, &options.daemon_options())?;
    } else if options.foreground {
        let mut daemon = Daemon::open(&settings, Manner::Foreground)?;
        if let Some(Applied { file, .. }) = &applied {
            daemon.apply_at_start(file)?;
        }
        if ready_devices {
            daemon.search_devices();
        }
        return Ok(daemon.run()?);
    } else if let Some(applied) = &applied {
        return apply(applied, &settings);
    } else if options.quit {
        return execute(&[QUIT.to_owned()], &settings, options);
    } else if let Some(Order::Line(words)) = &options.command {
        return execute(words, &settings, options);
    } else {
        commands_of_standard_input(&settings, options)?;
    }
    Ok(true)
}

/// The file of `-a`.
struct Applied {
    text: String,
    file: ServerFile,
}

/// Reads and parses the file of `-a`.
fn read_servers(path: &Path) -> anyhow::Result<Applied> {
    let shown = path.display();
    let mut text = String::new();
    let read = File::open(path).and_then(|file| {
        let limit = FILE_LIMIT as u64 + 1;
        file.take(limit).read_to_string(&mut text)
    });
    read.with_context(|| format!("cannot read {shown}"))?;
    anyhow::ensure!(
        text.len() <= FILE_LIMIT,
        "{shown}: a file of servers may have {FILE_LIMIT} bytes"
    );
    let file = ServerFile::parse(&text, &shown.to_string())?;
    Ok(Applied { text, file })
}

/// Has the daemon apply a file; `false`: it has mistakes, and nothing is changed.
fn apply(applied: &Applied, settings: &Settings) -> anyhow::Result<bool> {
    let mut ui = Ui::connect(settings)?.with_interface(Interface::Three);
    let line = format!("{} {}", modules::APPLY, applied.file.path);
    let memory = as_sealed_memory(&applied.text).context("cannot send the file to the daemon")?;
    let answer = ui.command_with(&line, Some(memory.as_fd()))?;
    if !answer.ok {
        eprint!("{}", answer.text);
    }
    Ok(answer.ok)
}

/// The settings; under the name of NVIDIA's tool its directories are the defaults.
fn load(options: &Control) -> Result<Settings, SettingsError> {
    let config = options.config.as_deref().map(Path::as_os_str);
    let environment = |name: &str| std::env::var_os(name);
    let lookup = |name: &str| match config {
        Some(path) if name == settings::CONFIG => Some(path.to_owned()),
        _ => environment(name),
    };
    if !nvidia_names::is_called(std::env::args_os().next().as_deref()) {
        return Settings::load(lookup);
    }
    let is_root = nix::unistd::geteuid().is_root();
    Settings::load_or(lookup, |name| {
        nvidia_names::default_of(name, environment, is_root)
    })
}

/// Executes a command given as arguments; `false`: it failed.
fn execute(words: &[String], settings: &Settings, options: &Control) -> anyhow::Result<bool> {
    let format = options.format;
    if words.first().is_some_and(|name| name == TOP) {
        let mut asked = top::Options::parse_from(words);
        asked.json |= format == Format::Json;
        top::run(settings, &asked)?;
        return Ok(true);
    }
    let line = formatted(&words.join(" "), options);
    if options.interface() == Interface::Three
        && let Some(help) = modules::help_asked(&line)
    {
        print(&Answer::done(help))?;
        return Ok(true);
    }
    let answer = give(&mut connect(settings, options)?, &line)?;
    print(&answer)?;
    Ok(answer.ok)
}

/// A line with the format that the program's options ask for.
fn formatted(line: &str, options: &Control) -> String {
    match options.interface() {
        Interface::Three => modules::in_format(&in_format(line, options.format), options.format),
        Interface::Two => in_format(line, options.format),
    }
}

fn connect(settings: &Settings, options: &Control) -> Result<Ui, UiError> {
    Ok(Ui::connect(settings)?.with_interface(options.interface()))
}

/// The specification for container engines.
fn generate(settings: &Settings, output: Option<&Path>) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(&Spec::new(settings)?)? + "\n";
    match output {
        Some(path) => fs::write(path, text)
            .with_context(|| format!("cannot write the specification {}", path.display())),
        None => Ok(io::stdout().write_all(text.as_bytes())?),
    }
}

/// As with NVIDIA's: a failed command prints an error and does not end the session, and the exit status is 0.
fn commands_of_standard_input(settings: &Settings, options: &Control) -> anyhow::Result<()> {
    let mut ui = connect(settings, options)?;
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        let mut prompt = Prompt::new()?;
        while let Some(line) = prompt.line()? {
            if !obey(&mut ui, &line, settings, options)? {
                break;
            }
        }
        return Ok(());
    }
    let mut input = io::stdin().lock();
    let mut line = Vec::new();
    while input
        .read_until(b'\n', &mut line)
        .context("cannot read standard input")?
        > 0
    {
        if !obey(&mut ui, &String::from_utf8_lossy(&line), settings, options)? {
            break;
        }
        line.clear();
    }
    Ok(())
}

/// Executes a line and prints the answer; `false`: the daemon has gone.
fn obey(ui: &mut Ui, line: &str, settings: &Settings, options: &Control) -> anyhow::Result<bool> {
    let line = line.trim_end_matches(['\n', '\r']);
    let Some(name) = line.split_whitespace().next() else {
        return Ok(true);
    };
    if name == TOP {
        show(line, settings)?;
        return Ok(true);
    }
    match give(ui, &formatted(line, options)) {
        Ok(answer) => {
            print(&answer)?;
            Ok(!(answer.ok && name == QUIT))
        }
        Err(error) => match error.downcast_ref() {
            Some(UiError::TooLong) => {
                println!("{error}");
                Ok(true)
            }
            _ => Err(error),
        },
    }
}

/// Runs `top` among other commands: its error is printed as the answer.
fn show(line: &str, settings: &Settings) -> io::Result<()> {
    let outcome = match top::Options::try_parse_from(line.split_whitespace()) {
        Ok(options) => top::run(settings, &options).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match outcome {
        Ok(()) => Ok(()),
        Err(text) => writeln!(io::stdout(), "{}", text.trim_end()),
    }
}

/// Sends a command.
fn give(ui: &mut Ui, line: &str) -> anyhow::Result<Answer> {
    match Target::of(line) {
        None => Ok(ui.command(&with_real_paths(line))?),
        Some(path) => match Target::open(path) {
            Ok(target) => target.begin(ui),
            Err(why) => Ok(Answer::failed(why)),
        },
    }
}

fn print(answer: &Answer) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(answer.text.as_bytes())?;
    out.flush()?;
    io::stderr().write_all(answer.note.as_bytes())
}
