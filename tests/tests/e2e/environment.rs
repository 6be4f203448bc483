//! Mistakes in the environment are named, and the environment that mps-run prints for shells, images and scripts.

use mpsshim_tests::artifacts::{artifact, driver};
use mpsshim_tests::control_daemon::{Done, Place};
use mpsshim_tests::programs::{client, finish, shell, succeed};
use mpsshim_tests::scene::daemon;
use std::process::Command;

/// An unknown name, a value that is no number and a value that is out of range.
const MISTAKES: [(&str, &str); 3] = [
    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "abc"),
    ("MPSSHIM_COPY_THREADS", "250"),
    ("MPSSHIM_PIPE_DIR", "/tmp/x"),
];

const WARNINGS: [&str; 3] = [
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=abc is ignored: a percentage is a number above 0 and at most 100",
    "MPSSHIM_COPY_THREADS=250 is ignored: it is not a number from 0 to 15",
    "MPSSHIM_PIPE_DIR is not a setting; did you mean MPSSHIM_PIPE_DIRECTORY?",
];

/// The warnings as a program prints them.
fn warnings_of(program: &str) -> String {
    let line = |warning| format!("{program}: warning: {warning}\n");
    WARNINGS.map(line).concat()
}

fn run(command: &mut Command) -> Done {
    command.envs(MISTAKES).output().expect("run").into()
}

#[test]
fn mps_control_warns_when_it_starts_a_daemon_and_when_it_runs_a_command() {
    let place = Place::new();
    let warned = warnings_of("mps-control");
    for arguments in [&["-d"][..], &["get_server_list"], &["quit"]] {
        let done = run(place.command("mps-control").args(arguments));
        assert_eq!(
            (done.code, done.out, done.err),
            (0, String::new(), warned.clone())
        );
    }
}

#[test]
fn mps_run_warns_once_and_the_program_runs() {
    let place = Place::new();
    let mut command = mps_run(&place);
    let done = run(command.args(["echo", "hello"]));
    assert_eq!((done.code, done.out.as_str()), (0, "hello\n"));
    let warned = warnings_of("mps-run");
    let rest = done.err.strip_prefix(&warned).expect(&done.err);
    assert!(
        rest.starts_with("mps-run: started a control daemon in "),
        "{rest}"
    );
    let again = run(mps_run(&place).arg("true"));
    assert_eq!((again.code, again.err), (0, warned));
    let silent = run(mps_run(&place).args(["-q", "true"]));
    assert_eq!((silent.code, silent.err.as_str()), (0, ""));
}

#[test]
fn the_library_warns_in_its_log_only() {
    let place = daemon();
    let mut silent = client(&place, &["work", "1"]);
    succeed(silent.envs(MISTAKES));
    let mut logging = client(&place, &["work", "1"]);
    let done = finish(logging.envs(MISTAKES).env("MPSSHIM_LOG", "warn"));
    assert_eq!(done.code, 0, "{}", done.err);
    for warning in WARNINGS {
        assert_eq!(done.err.matches(warning).count(), 1, "{}", done.err);
    }
}

fn mps_run(place: &Place) -> Command {
    let mut command = place.command("mps-run");
    command.env("MPSSHIM_CUDA_LIBRARY", driver());
    command.arg("--shim").arg(artifact("libmpsshim.so"));
    command
}

/// mps-run's line about a daemon that it has started.
fn started(place: &Place) -> String {
    let pipe = place.pipe().display();
    format!(
        "mps-run: started a control daemon in {pipe}; to end it: MPSSHIM_PIPE_DIRECTORY={pipe} mps-control quit\n"
    )
}

#[test]
fn mps_run_says_once_that_it_has_started_a_daemon() {
    let place = Place::new();
    let first = mps_run(&place).arg("true").output().expect("run");
    assert_eq!(Done::from(first).err, started(&place));
    let second = mps_run(&place).arg("true").output().expect("run");
    assert_eq!(Done::from(second).err, "");
    // The line is a command.
    let line = started(&place);
    let quit = line
        .trim_end()
        .split_once("to end it: ")
        .expect("a command")
        .1;
    let done = Done::from(shell(&place, place.path(), quit).output().expect("run"));
    assert_eq!((done.code, done.err.as_str()), (0, ""));
}

#[test]
fn quiet_it_says_nothing_about_its_daemon() {
    let place = Place::new();
    let done = Done::from(mps_run(&place).args(["-q", "true"]).output().expect("run"));
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    assert_eq!(place.control(&["get_server_list"]).code, 0);
}

#[test]
fn nbody_shares_in_a_shell_that_has_the_printed_environment() {
    let place = Place::new();
    let library = artifact("libmpsshim.so");
    let line = format!(
        "eval \"$(mps-run -q --shim '{}' --print-env)\"\n\
         LD_PRELOAD=libmpsshim.so nbody -benchmark -numbodies=256 -i=2",
        library.display()
    );
    let mut command = shell(&place, place.path(), &line);
    command
        .env("MPSSHIM_CUDA_LIBRARY", driver())
        .env("MPSSHIM_SERVER", artifact("mps-server"))
        .env("MPSSHIM_LOG", "info");
    let done = finish(&mut command);
    assert_eq!(done.code, 0, "{}", done.err);
    assert!(
        done.out.contains("billion interactions per second"),
        "{}",
        done.out
    );
    assert!(!done.err.contains("cannot be preloaded"), "{}", done.err);
    let log = place.log("control.log");
    assert!(log.contains("NEW CLIENT"), "{log}");
}

#[test]
fn the_environment_is_printed_for_images_and_scripts() {
    let place = Place::new();
    let print = |form: &str| {
        let mut command = mps_run(&place);
        command.args(["--mode", "direct", "--print-env", form]);
        let done = Done::from(command.env("LD_PRELOAD", "").output().expect("run"));
        assert_eq!((done.code, done.err.as_str()), (0, ""));
        done.out
    };
    let shim = artifact("libmpsshim.so").canonicalize().expect("path");
    let directory = shim.parent().expect("a directory");
    let (shim, directory) = (shim.display(), directory.display());
    let pipe = place.pipe().display();
    let expected = format!(
        "ENV MPSSHIM_PIPE_DIRECTORY=\"{pipe}\"\nENV MPSSHIM_CUDA_LIBRARY=\"{}\"\nENV MPSSHIM_MODE=\"direct\"\n\
         ENV LD_LIBRARY_PATH=\"{directory}\"\nENV LD_PRELOAD=\"{shim}\"\n",
        driver().display()
    );
    assert_eq!(print("dockerfile"), expected);
    let object: serde_json::Value = serde_json::from_str(&print("json")).expect("JSON");
    assert_eq!(object["MPSSHIM_PIPE_DIRECTORY"], pipe.to_string());
    assert_eq!(object["LD_PRELOAD"], shim.to_string());
    // Neither needs a daemon here.
    assert!(!place.pipe().exists());
    let mut both = mps_run(&place);
    both.args(["--print-env", "sh", "true"]);
    let refused = Done::from(both.output().expect("run"));
    assert_eq!(refused.code, 125);
}
