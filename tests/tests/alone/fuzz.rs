//! A few seeds of the fuzzers (docs/fuzzing.md): so many messages or cases each, however long that takes.

use crate::alone;
use mpsshim_tests::artifacts::{artifact, driver};
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

/// Cases of random sessions whose servers are killed and replaced: about half a minute on two busy CPUs.
const CASES: u64 = 8;

#[test]
fn sessions_at_rest_outlive_their_servers() {
    let _alone = alone();
    let fuzzer = artifact("fuzz_outlive");
    let output = Command::new(fuzzer)
        .args(["--seed", "1", "--sessions", "1000000"])
        .args(["--cases", &CASES.to_string()])
        // Everything is built.
        .env("MPSSHIM_BUILT", "1")
        .output()
        .expect("the fuzzer starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("passed"),
        "{}\n{said}\n{complained}",
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
