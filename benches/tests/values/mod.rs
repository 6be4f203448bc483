//! What a benchmark prints.

use std::collections::HashMap;
use std::process::Command;

/// Runs a benchmark to its good end: all that it prints, and the `name=value` lines of it.
#[track_caller]
pub fn values(benchmark: &mut Command) -> (String, HashMap<String, f64>) {
    let output = benchmark.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{benchmark:?}: {text}{said}");
    let values = text
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect();
    (text, values)
}
