//! Runs a CUDA program on a shared GPU.

use anyhow::bail;
use clap::Parser;
use mpsshim_control::cli::{RUN_FAILURE, Run, documents};
use mpsshim_control::elf;
use mpsshim_control::launch::ensure_daemon;
use mpsshim_control::library;
use mpsshim_control::settings::{self, Settings};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
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
    let command = match prepare(&options) {
        Ok(command) => command,
        Err(error) => {
            eprintln!("mps-run: {error:#}");
            return ExitCode::from(RUN_FAILURE);
        }
    };
    run(command)
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

fn prepare(options: &Run) -> anyhow::Result<Command> {
    let [program, arguments @ ..] = options.program.as_slice() else {
        bail!("no program given")
    };
    let given = [
        (
            settings::CONFIG,
            options.config.as_deref().map(Path::as_os_str),
        ),
        (
            settings::PIPE_DIRECTORY,
            options.pipe_dir.as_deref().map(Path::as_os_str),
        ),
        (
            settings::CUDA_LIBRARY,
            options.cuda_library.as_deref().map(Path::as_os_str),
        ),
        (settings::LOG, options.log.as_deref()),
    ];
    let lookup = |name: &str| {
        let option = given
            .iter()
            .find(|(given, _)| *given == name)
            .and_then(|(_, value)| *value);
        option
            .map(OsStr::to_owned)
            .or_else(|| std::env::var_os(name))
    };
    let settings = Settings::load(lookup)?.at_daemon();
    if let Some(driver) = &settings.cuda_library
        && !driver.is_file()
    {
        bail!("there is no CUDA driver at {}", driver.display());
    }
    let shim = library::find(options.shim.as_deref().or(settings.library.as_deref()))?;
    if !settings.disable {
        ensure_daemon(&settings)?;
    }
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
    let mut command = Command::new(program);
    command.args(arguments);
    // Absolute paths, independent of the program's working directory. Other settings of the file do not apply to
    // programs.
    command.env(settings::PIPE_DIRECTORY, &settings.pipe_directory);
    for (name, value) in [
        (settings::CONFIG, settings.config.as_deref()),
        (settings::CUDA_LIBRARY, settings.cuda_library.as_deref()),
        (settings::LOG, options.log.as_deref().map(Path::new)),
    ] {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    if let Some(mode) = &options.mode {
        command.env(settings::MODE, mode);
    }
    if settings.required {
        command.env(settings::REQUIRED, "1");
    }
    command.env(
        "LD_PRELOAD",
        preload(&shim, std::env::var_os("LD_PRELOAD").as_deref()),
    );
    Ok(command)
}

/// Puts the shim first: its symbols must take precedence.
fn preload(shim: &Path, present: Option<&OsStr>) -> OsString {
    let mut value = shim.as_os_str().to_owned();
    if let Some(present) = present.filter(|present| !present.is_empty()) {
        value.push(":");
        value.push(present);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_preloaded_stays() {
        let shim = Path::new("/opt/libmpsshim.so");
        assert_eq!(preload(shim, None), "/opt/libmpsshim.so");
        assert_eq!(preload(shim, Some(OsStr::new(""))), "/opt/libmpsshim.so");
        assert_eq!(
            preload(shim, Some(OsStr::new("/a.so /b.so"))),
            "/opt/libmpsshim.so:/a.so /b.so"
        );
    }
}
