//! A few seeds of the fuzzer of the engine (docs/fuzzing.md): so many messages each, however long that takes.

use crate::alone;
use mpsshim_tests::artifacts::driver;
use std::process::Command;

/// Messages of each seed: together about a minute on two CPUs.
const MESSAGES: u64 = 25_000;

fn fuzz(seed: u64) {
    let output = Command::new(env!("CARGO_BIN_EXE_fuzz_engine"))
        .args(["--seed", &seed.to_string()])
        .args(["--messages", &MESSAGES.to_string()])
        .arg("--driver")
        .arg(driver())
        .output()
        .expect("the fuzzer starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("passed"),
        "seed {seed}: {}\n{said}\n{complained}",
        output.status
    );
}

#[test]
fn nothing_breaks_with_flags_by_any_means() {
    let _alone = alone();
    fuzz(3);
}

#[test]
fn nothing_breaks_with_written_flags() {
    let _alone = alone();
    fuzz(1);
}
