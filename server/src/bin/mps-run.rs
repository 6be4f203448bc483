//! Runs a CUDA program on a shared GPU.

use anyhow::{Context, bail};
use clap::Parser;
use mpsshim_control::cli::{RUN_FAILURE, Run, documents};
use mpsshim_control::elf;
use mpsshim_control::environment::{Environment, Form, LIBRARY_PATH, PRELOAD};
use mpsshim_control::launch::{self, LaunchError, ensure_daemon};
use mpsshim_control::library;
use mpsshim_control::settings::{self, Settings, SettingsError};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let options = match Run::try_parse() {
        Ok(options) => options,
        Err(told) => {
            // Help and version are not failures. If standard error is closed, the message is lost.
            let _ = told.print();
            return ExitCode::from(if told.use_stderr() { RUN_FAILURE } else { 0 });
        }
    };
    match documents::print::<Run>(&options.documents) {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => {}
        Err(error) => {
            eprintln!("mps-run: {error}");
            return ExitCode::from(RUN_FAILURE);
        }
    }
    let done = match options.print_env {
        Some(form) => print_environment(&options, form).map(|()| ExitCode::SUCCESS),
        None => prepare(&options).map(run),
    };
    done.unwrap_or_else(|error| {
        eprintln!("mps-run: {error:#}");
        ExitCode::from(RUN_FAILURE)
    })
}

/// Replaces this process by the program; returns only on failure.
fn run(mut command: Command) -> ExitCode {
    let error = command.exec();
    eprintln!(
        "mps-run: cannot run {}: {error}",
        Path::new(command.get_program()).display()
    );
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound {
        127
    } else {
        126
    })
}

/// The program's command.
fn prepare(options: &Run) -> anyhow::Result<Command> {
    let [program, arguments @ ..] = options.program.as_slice() else {
        bail!("no program given")
    };
    let (settings, shim) = prerequisites(options)?;
    start_daemon(&settings, options.quiet)?;
    if let Some(why) = elf::not_preloading(program) {
        let program = Path::new(program).display();
        if settings.required {
            bail!(
                "{program} would not share the GPU, and {} is set: {why}",
                settings::REQUIRED
            );
        }
        eprintln!("mps-run: {program} will not share the GPU: {why}");
    }
    let mut environment = environment(options, &settings);
    let present = std::env::var_os(PRELOAD);
    environment.set_first(PRELOAD, &shim, present.as_deref());
    if !options.quiet && std::env::var_os(settings::NOTICES).is_none() {
        environment.set(settings::NOTICES, "stderr");
    }
    let mut command = Command::new(program);
    command.args(arguments).envs(environment.iter());
    Ok(command)
}

/// Prints the variables under which programs share the GPU. `LD_LIBRARY_PATH` lets `LD_PRELOAD` name the library
/// without its directory.
fn print_environment(options: &Run, form: Form) -> anyhow::Result<()> {
    let (settings, shim) = prerequisites(options)?;
    if form == Form::Sh {
        start_daemon(&settings, options.quiet)?;
    }
    let mut environment = environment(options, &settings);
    let present = |name| match form {
        // They would name files outside the image.
        Form::Dockerfile => None,
        Form::Sh | Form::Json => std::env::var_os(name),
    };
    if let Some(directory) = shim.parent() {
        environment.set_first(LIBRARY_PATH, directory, present(LIBRARY_PATH).as_deref());
    }
    environment.set_first(PRELOAD, &shim, present(PRELOAD).as_deref());
    io::stdout()
        .write_all(&environment.print(form))
        .context("cannot print the environment")
}

/// The settings, and the library to preload.
fn prerequisites(options: &Run) -> anyhow::Result<(Settings, PathBuf)> {
    if !options.quiet {
        settings::warn_of_environment("mps-run");
    }
    let settings = load(options)?;
    if let Some(driver) = &settings.cuda_library
        && !driver.is_file()
    {
        bail!("there is no CUDA driver at {}", driver.display());
    }
    let shim = library::find(options.shim.as_deref().or(settings.library.as_deref()))?;
    Ok((settings, shim))
}

/// The settings of options, environment and configuration file.
fn load(options: &Run) -> Result<Settings, SettingsError> {
    let path = |path: &Option<PathBuf>| path.as_deref().map(|path| path.as_os_str().to_owned());
    let given = [
        (settings::CONFIG, path(&options.config)),
        (settings::PIPE_DIRECTORY, path(&options.pipe_dir)),
        (settings::CUDA_LIBRARY, path(&options.cuda_library)),
        (settings::LOG, options.log.clone()),
    ];
    let lookup = |name: &str| {
        let option = given.iter().find(|(given, _)| *given == name);
        let option = option.and_then(|(_, value)| value.clone());
        option.or_else(|| std::env::var_os(name))
    };
    Ok(Settings::load(lookup)?.at_daemon())
}

/// Starts a daemon if none listens, and says so once.
fn start_daemon(settings: &Settings, quiet: bool) -> Result<(), LaunchError> {
    if settings.disable {
        return Ok(());
    }
    let has_started = ensure_daemon(settings)?;
    if has_started && !quiet {
        eprintln!(
            "mps-run: started a control daemon in {}; to end it: {}",
            settings.pipe_directory.display(),
            launch::quit_command(settings)
        );
    }
    Ok(())
}

/// The settings of the program, with absolute paths, which are independent of its working directory. Other settings of
/// the file do not apply to programs.
fn environment(options: &Run, settings: &Settings) -> Environment {
    let mut environment = Environment::default();
    environment.set(settings::PIPE_DIRECTORY, &settings.pipe_directory);
    for (name, value) in [
        (settings::CONFIG, settings.config.as_deref()),
        (settings::CUDA_LIBRARY, settings.cuda_library.as_deref()),
        (settings::LOG, options.log.as_deref().map(Path::new)),
        (settings::MODE, options.mode.as_deref().map(Path::new)),
    ] {
        if let Some(value) = value {
            environment.set(name, value);
        }
    }
    if settings.required {
        environment.set(settings::REQUIRED, "1");
    }
    environment
}
