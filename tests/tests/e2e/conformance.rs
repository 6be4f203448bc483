//! The conformance program (`src/bin/conformance`) says through the proxy, and with the shim but no daemon, what
//! it said on a GPU without the shim (`fixtures/conformance.expected`), line by line and nothing besides.
//!
//! Runs on softgpu, or on a GPU: `MPSSHIM_TEST_DRIVER=/path/to/libcuda.so.1 cargo test -p mpsshim-tests --test e2e conformance::`.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Done, Place};
use mpsshim_tests::programs::{DriverFolder, Running, finish, preloaded};
use mpsshim_tests::scene::{daemon, daemon_with};
use std::fs;
use std::path::Path;
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_conformance");
const EXPECTED: &str = include_str!("../../fixtures/conformance.expected");
const EXPECTED_FAULT: &str = include_str!("../../fixtures/conformance-fault.expected");
/// The sections of [`EXPECTED_FAULT`].
const FAULT: [&str; 2] = ["before_init", "fault"];
/// Sections that softgpu cannot run; they are compared on a GPU (tests/gpu/conformance.py).
const NEED_A_GPU: &[&str] = &[
    "array_graphs",
    "array_kinds",
    "context_details",
    "graph_edges",
    "graph_memory",
    "graph_params",
    "green_contexts",
    "launch_attributes",
    "multi_device_launches",
    "nested_launches",
    "old_launches",
    "pool_sharing",
    "services",
    "tensor_maps",
    "texture_references",
    "textures",
];
/// Sections that softgpu passes as a server's driver only: what they look at is done in the client.
const NOT_SOFTGPU_ITSELF: &[&str] = &[
    "captured_addresses",
    "batches",
    "capture_unsafe",
    "host_function_calls",
    "ipc_events",
    "ipc_memory",
    "large_parameters",
    "null_arguments",
    "primary_flags",
    "managed",
    "memory_operations_v1",
    "null_codes",
    "registered",
    "registered_elsewhere",
    "registered_fork",
    "registered_pages",
    "registered_remapped",
    "registered_stack",
    "registered_writers",
    "user_objects",
    "context_services",
    "event_calls",
    "host_function_calls",
    "memory_operations_v1",
    "stream_attributes",
];

/// Sections that lose their context, and have a server of their own here.
const FATAL: &[&str] = &["assertion"];

/// Sections for two devices.
const NEED_TWO: &[&str] = &["two_devices"];

/// The further sections and what they must say.
fn further() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/conformance");
    let mut found: Vec<_> = fs::read_dir(folder)
        .expect("fixtures")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "expected"))
        .map(|path| {
            let name = path.file_stem().expect("a name").to_string_lossy();
            (name.into_owned(), fs::read_to_string(&path).expect("text"))
        })
        .filter(|(name, _)| {
            let gpu = std::env::var_os("MPSSHIM_TEST_DRIVER").is_some();
            let apart = NEED_TWO.iter().chain(FATAL).any(|one| one == name);
            (gpu || !NEED_A_GPU.contains(&&**name)) && !apart
        })
        .collect();
    found.sort();
    found
}

#[test]
fn further_sections_on_the_driver_itself() {
    let driver = DriverFolder::new();
    let genuine = std::env::var_os("MPSSHIM_TEST_DRIVER").is_some();
    for (name, expected) in further() {
        if !genuine && NOT_SOFTGPU_ITSELF.contains(&&*name) {
            continue;
        }
        agrees(&finish(driver.native(PROGRAM).arg(name)), &expected);
    }
}

#[test]
fn further_sections_through_the_proxy() {
    let place = daemon();
    for (name, expected) in further() {
        agrees(&finish(proxied(&place).arg(name)), &expected);
    }
}

#[test]
fn sections_that_lose_their_context() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/conformance");
    for name in FATAL {
        let expected = fs::read_to_string(folder.join(format!("{name}.expected"))).expect("lines");
        let driver = DriverFolder::new();
        agrees(&finish(driver.native(PROGRAM).arg(name)), &expected);
        let place = daemon();
        agrees(&finish(proxied(&place).arg(name)), &expected);
    }
}

/// A library's kernels run on every device. On a GPU machine that is however many there are.
#[test]
fn a_library_on_three_devices() {
    let three = ("SOFTGPU_DEVICES", "3");
    let place = daemon_with(&[three]);
    let (_, expected) = further()
        .into_iter()
        .find(|(name, _)| name == "library_contexts")
        .expect("its lines");
    let done = finish(
        proxied(&place)
            .arg("library_contexts")
            .env(three.0, three.1),
    );
    agrees(&done, &expected);
}

/// On a GPU machine that is however many devices there are.
#[test]
fn two_devices() {
    let two = ("SOFTGPU_DEVICES", "2");
    let place = daemon_with(&[two]);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/conformance");
    for name in NEED_TWO {
        let expected = fs::read_to_string(folder.join(format!("{name}.expected"))).expect("lines");
        let natively = DriverFolder::new();
        agrees(
            &finish(natively.native(PROGRAM).arg(name).env(two.0, two.1)),
            &expected,
        );
        agrees(
            &finish(proxied(&place).arg(name).env(two.0, two.1)),
            &expected,
        );
    }
}

/// Each further section has its expected lines, and the other way round.
#[test]
fn each_further_section_has_a_fixture() {
    let listed = finish(std::process::Command::new(PROGRAM).arg("--list")).out;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/conformance");
    let names: Vec<_> = listed.lines().collect();
    for name in &names {
        let file = folder.join(format!("{name}.expected"));
        assert!(file.exists(), "{} is missing", file.display());
    }
    let expected = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|e| e == "expected");
    let files = fs::read_dir(folder)
        .expect("fixtures")
        .flatten()
        .filter(expected)
        .count();
    assert_eq!(files, names.len());
}

fn agrees(done: &Done, expected: &str) {
    let (found, expected): (Vec<_>, Vec<_>) =
        (done.out.lines().collect(), expected.lines().collect());
    let mut section = "";
    for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
        if expected.starts_with('[') {
            section = expected;
        }
        assert_eq!(found, expected, "line {} in {section}", number + 1);
    }
    assert_eq!(found.len(), expected.len(), "{}", done.err);
    assert_eq!((done.code, done.err.as_str()), (0, ""));
}

fn proxied(place: &Place) -> Command {
    preloaded(PROGRAM, place.pipe())
}

fn with_no_daemon() -> Command {
    preloaded(PROGRAM, Path::new("/nonexistent/pipe"))
}

#[test]
fn on_the_driver_itself() {
    let driver = DriverFolder::new();
    agrees(&finish(&mut driver.native(PROGRAM)), EXPECTED);
    agrees(&finish(driver.native(PROGRAM).args(FAULT)), EXPECTED_FAULT);
}

#[test]
fn with_the_shim_and_no_daemon() {
    agrees(&finish(&mut with_no_daemon()), EXPECTED);
    agrees(&finish(with_no_daemon().args(FAULT)), EXPECTED_FAULT);
}

#[test]
fn through_the_proxy() {
    let place = daemon();
    agrees(&finish(&mut proxied(&place)), EXPECTED);
    agrees(&finish(proxied(&place).args(FAULT)), EXPECTED_FAULT);
    agrees(&finish(&mut proxied(&place)), EXPECTED);
}

#[test]
fn four_at_once_through_the_proxy() {
    four_at_once(&daemon());
}

/// Which kind of mark a server uses depends on how many clients there are; here each kind serves all.
#[test]
fn four_at_once_with_each_kind_of_mark() {
    for kind in ["written", "kernel"] {
        four_at_once(&daemon_with(&[("MPSSHIM_MARKS", kind)]));
    }
}

fn four_at_once(place: &Place) {
    let copies: Vec<Running> = (0..4)
        .map(|_| Running::start(&mut proxied(place)))
        .collect();
    for copy in copies {
        agrees(&copy.finish(PATIENCE), EXPECTED);
    }
    let servers = place.control(&["get_server_list"]).out;
    assert_eq!(servers.lines().count(), 1, "one server for all");
}
