//! `MPSSHIM_REQUIRED`: a program that cannot be served as it was told to does not run.

use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::programs::{client, finish, succeed};
use mpsshim_tests::scene::{daemon, daemon_with};
use std::process::Command;

const STATUS: &str = "CUDA_ERROR_MPS_CONNECTION_FAILED (805)";
const REQUIRED: (&str, &str) = ("MPSSHIM_REQUIRED", "1");

/// The program fails at `cuInit`, with one line that ends so.
fn is_refused(command: &mut Command, why: &str) {
    let done = finish(command);
    assert_eq!(
        (done.code, done.out.trim()),
        (1, STATUS),
        "{why}: {}",
        done.err
    );
    let line = format!("mpsshim: cuInit fails with {STATUS}: ");
    assert!(done.err.starts_with(&line), "{}", done.err);
    assert!(done.err.trim_end().ends_with(why), "{}", done.err);
    assert_eq!(done.err.lines().count(), 1, "{}", done.err);
}

#[test]
fn without_a_daemon_nothing_runs() {
    let place = Place::new();
    for mode in ["proxy", "direct"] {
        let mut command = client(&place, &["work", "1"]);
        command.env("MPSSHIM_MODE", mode);
        // It would run on the driver itself.
        succeed(&mut command);
        let listens = format!(
            "listens in {}, and MPSSHIM_REQUIRED is set",
            place.pipe().display()
        );
        is_refused(command.envs([REQUIRED]), &listens);
        succeed(command.env("MPSSHIM_REQUIRED", "0"));
    }
}

#[test]
fn without_a_server_nothing_runs() {
    let place = daemon_with(&[("MPSSHIM_SERVER", "/bin/false")]);
    for mode in ["proxy", "direct"] {
        let mut command = client(&place, &["work", "1"]);
        command.env("MPSSHIM_MODE", mode).envs([REQUIRED]);
        is_refused(&mut command, "and MPSSHIM_REQUIRED is set");
    }
}

#[test]
fn with_a_server_everything_runs() {
    let place = daemon();
    for mode in ["proxy", "direct"] {
        let mut command = client(&place, &["work", "1"]);
        succeed(command.env("MPSSHIM_MODE", mode).envs([REQUIRED]));
    }
    let mut disabled = client(&place, &["work", "1"]);
    disabled.env("MPSSHIM_DISABLE", "1").envs([REQUIRED]);
    is_refused(&mut disabled, "MPSSHIM_DISABLE for none");
}

#[test]
fn without_its_limits_nothing_runs() {
    let threads = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
    // A driver that cannot part a device.
    let place = daemon_with(&[("SOFTGPU_GREEN", "0")]);
    let mut half = client(&place, &["work", "1"]);
    half.env(threads, "50");
    succeed(&mut half);
    is_refused(half.envs([REQUIRED]), "and MPSSHIM_REQUIRED is set");
    // The client may know before the line is there.
    wait_until("the log says why", || {
        let log = place.log("control.log");
        log.contains("with status 805: it needs its limits")
    });
    for (name, value) in [(threads, "150"), ("CUDA_MPS_CLIENT_PRIORITY", "urgent")] {
        let mut command = client(&place, &["work", "1"]);
        succeed(command.env(name, value));
        let why = format!("{name}={value} is no limit, and MPSSHIM_REQUIRED is set");
        is_refused(command.envs([REQUIRED]), &why);
    }
}

#[test]
fn the_file_has_mps_run_ask_for_it() {
    let place = daemon();
    let file = place.path().join("config.toml");
    std::fs::write(&file, "required = true\n").expect("file");
    let run = |program: &[&str]| {
        let mut command = place.command("mps-run");
        command
            .env("MPSSHIM_CONFIG", &file)
            .env_remove("MPSSHIM_REQUIRED");
        command
            .arg("--shim")
            .arg(artifact("libmpsshim.so"))
            .args(program);
        finish(&mut command)
    };
    let done = run(&["sh", "-c", "echo $MPSSHIM_REQUIRED"]);
    assert_eq!((done.code, done.out.trim()), (0, "1"), "{}", done.err);
    std::fs::write(&file, "required = 2\n").expect("file");
    let done = run(&["true"]);
    assert_eq!(done.code, 125);
    assert!(
        done.err.contains("required = 2 is not one of 0 and 1"),
        "{}",
        done.err
    );
}
