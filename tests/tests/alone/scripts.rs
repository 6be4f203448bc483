//! Scripts of tests/gpu on softgpu.

use crate::alone;
use mpsshim_tests::artifacts::{artifact, driver};
use std::path::Path;
use std::process::Command;

/// Runs a script with these arguments, which needs a program of this package beside the servers.
fn passes(script: &str, program: &str, arguments: &[&str]) {
    let _alone = alone();
    let build = artifact("mps-server");
    let build = build.parent().expect("a folder");
    // The script looks for it beside the servers.
    assert_eq!(
        Path::new(program).parent(),
        Some(build),
        "one target folder"
    );
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let done = Command::new("python3")
        .arg(script)
        .args(arguments)
        .arg("--build")
        .arg(build)
        .env("MPSSHIM_CUDA_LIBRARY", driver())
        .env("MPSSHIM_MOVE_LATER", "0")
        .output()
        .expect("python3");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        done.status.success(),
        "{}\n{}",
        text(&done.stdout),
        text(&done.stderr)
    );
}

#[test]
fn killed_clients_leave_nothing_behind_and_disturb_nobody() {
    // Kernels are interpreted here: far fewer rounds than on a GPU. How long a round takes says nothing.
    let arguments = [
        "--count",
        "60",
        "--jobs",
        "3",
        "--rounds",
        "300",
        "--longest",
        "60000",
    ];
    passes("gpu/kills.py", env!("CARGO_BIN_EXE_killed"), &arguments);
}

#[test]
fn each_kind_of_object_goes_on_beside_all_others() {
    // However long that takes.
    let arguments = ["--ends", "8", "--seconds", "600"];
    passes("gpu/kinds.py", env!("CARGO_BIN_EXE_survivor"), &arguments);
}
