//! tests/gpu/kinds.py on softgpu: each kind of object is what it was after its server was killed or replaced.

use crate::alone;
use mpsshim_tests::artifacts::{artifact, driver};
use std::path::Path;
use std::process::Command;

#[test]
fn each_kind_of_object_goes_on_beside_all_others() {
    let _alone = alone();
    let build = artifact("mps-server");
    let build = build.parent().expect("a folder");
    // The script looks for it beside the servers.
    let survivor = Path::new(env!("CARGO_BIN_EXE_survivor"));
    assert_eq!(survivor.parent(), Some(build), "one target folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu/kinds.py");
    let done = Command::new("python3")
        .arg(script)
        // However long that takes.
        .args(["--ends", "8", "--seconds", "600", "--build"])
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
