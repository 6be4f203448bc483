//! The transport benchmark runs and prints what it says it prints.

mod values;

use std::collections::HashMap;
use std::process::Command;
use values::values;

fn run(arguments: &[&str]) -> (String, HashMap<String, f64>) {
    values(Command::new(env!("CARGO_BIN_EXE_transport")).args(arguments))
}

#[test]
fn everything_is_measured() {
    let (text, values) = run(&["--quick"]);
    for place in ["thread", "process"] {
        for name in [
            "0_bytes_messages_per_s",
            "48_bytes_messages_per_s",
            "65536_bytes_mb_per_s",
            "round_trip_p50_ns",
            "round_trip_p99_ns",
            "doorbell_send_p50_ns",
            "doorbell_wake_p50_ns",
            "futex_wake_p99_ns",
        ] {
            let name = format!("{place}_{name}");
            assert!(
                values.get(&name).is_some_and(|&value| value > 0.0),
                "{name}\n{text}"
            );
        }
    }
    let counted = ["produce_instructions", "consume_instructions"]
        .iter()
        .all(|name| values.contains_key(*name));
    assert!(
        counted || text.contains("no instruction counts here: "),
        "{text}"
    );
}

#[test]
fn a_part_alone() {
    let (text, values) = run(&["--quick", "--only", "round-trip"]);
    assert_eq!(values.len(), 4, "{text}");
}
