//! A few seeds of the fuzzers (docs/fuzzing.md): so many messages or cases each, however long that takes.

use crate::alone;
use mpsshim_tests::artifacts::{artifact, driver};
use std::process::Command;

/// Messages of each seed: together about a minute on two CPUs.
const MESSAGES: u64 = 25_000;

fn fuzz(seed: u64) {
    let mut fuzzer = Command::new(env!("CARGO_BIN_EXE_fuzz_engine"));
    fuzzer
        .args(["--seed", &seed.to_string()])
        .args(["--messages", &MESSAGES.to_string()])
        .arg("--driver")
        .arg(driver());
    passes(&mut fuzzer);
}

fn passes(fuzzer: &mut Command) {
    let output = fuzzer.output().expect("the fuzzer starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("passed"),
        "{fuzzer:?}: {}\n{said}\n{complained}",
        output.status
    );
}

/// Cases of random sessions whose servers are killed and replaced: about half a minute on two busy CPUs.
const CASES: u64 = 8;

#[test]
fn sessions_at_rest_outlive_their_servers() {
    let _alone = alone();
    let mut fuzzer = Command::new(artifact("fuzz_outlive"));
    fuzzer
        .args(["--seed", "1", "--sessions", "1000000"])
        .args(["--cases", &CASES.to_string()])
        // Everything is built.
        .env("MPSSHIM_BUILT", "1");
    passes(&mut fuzzer);
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
