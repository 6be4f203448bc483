//! tests/gpu/kills.py on softgpu: clients that are killed at random moments leave nothing behind and disturb nobody.

use crate::alone;
use mpsshim_tests::artifacts::{artifact, driver};
use std::path::Path;
use std::process::Command;

#[test]
fn killed_clients_leave_nothing_behind_and_disturb_nobody() {
    let _alone = alone();
    let build = artifact("mps-server");
    let build = build.parent().expect("a folder");
    // The script looks for it beside the servers.
    let killed = Path::new(env!("CARGO_BIN_EXE_killed"));
    assert_eq!(killed.parent(), Some(build), "one target folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu/kills.py");
    // Kernels are interpreted here: far fewer rounds than on a GPU. How long a round takes says nothing.
    let done = Command::new("python3")
        .arg(script)
        .args([
            "--count",
            "60",
            "--jobs",
            "3",
            "--rounds",
            "300",
            "--longest",
            "60000",
        ])
        .arg("--build")
        .arg(build)
        .env("MPSSHIM_CUDA_LIBRARY", driver())
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
