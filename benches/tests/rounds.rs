//! The benchmark of rounds runs on softgpu in each of its ways, and prints what it says it prints.

use mpsshim_tests::artifacts::artifact;
use std::collections::HashMap;
use std::os::unix::fs::symlink;
use std::process::Command;

fn rounds() -> Command {
    Command::new(env!("CARGO_BIN_EXE_rounds"))
}

/// Runs it on softgpu.
fn measured(arguments: &[&str]) -> HashMap<String, f64> {
    let folder = tempfile::tempdir().expect("a folder");
    // It asks the loader for the driver, as a program does.
    symlink(artifact("libsoftgpu.so"), folder.path().join("libcuda.so")).expect("a link");
    // A busy machine may end no round in a short time, which the program then says.
    for seconds in ["0.1", "2", "60"] {
        let mut command = rounds();
        command
            .args(["--streams", "3", "--threads", "2", "--us", "1"])
            .args(["--blocks", "1", "--seconds", seconds])
            .args(arguments)
            .env("LD_LIBRARY_PATH", folder.path());
        let output = command.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            let text = String::from_utf8_lossy(&output.stdout);
            let values = text.lines().filter_map(|line| line.split_once('='));
            return values
                .map(|(name, value)| (name.to_owned(), value.parse().expect("a number")))
                .collect();
        }
        assert!(said.contains("no round ended in that time"), "{said}");
    }
    panic!("no round in a minute");
}

#[test]
fn every_way_is_measured() {
    for mark in [
        "operation",
        "operation-node",
        "kernel",
        "kernel-node",
        "kernel-node-first",
        "itself",
        "memset",
        "event",
    ] {
        let values = measured(&["--mark", mark]);
        for name in ["rounds_per_s", "p50_us", "p99_us", "calls_us"] {
            assert!(values[name] > 0.0, "{mark}: {values:?}");
        }
    }
}

#[test]
fn with_copies_and_beside_a_flood() {
    for more in [
        ["--mark", "operation", "--copy", "4096"].as_slice(),
        &["--mark", "kernel-node", "--copy", "4096", "--copy-kernel"],
    ] {
        assert!(measured(more)["rounds_per_s"] > 0.0, "{more:?}");
    }
    let beside = measured(&["--flood", "64", "--flood-us", "1"]);
    assert!(beside["rounds_per_s"] > 0.0, "{beside:?}");
    assert!(beside.contains_key("flood_per_s"));
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    for (arguments, word) in [
        (
            ["--mark", "kernel-node", "--copy", "4096"].as_slice(),
            "--copy-kernel",
        ),
        (&["--mark", "itself", "--copy", "4096"], "itself"),
        (&["--copy", "3"], "multiple of 4"),
        (&["--streams", "2", "--threads", "3"], "--threads"),
        (&["--seconds", "0"], "--seconds"),
    ] {
        let output = rounds().args(arguments).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(said.contains(word), "{arguments:?}: {said}");
    }
}
