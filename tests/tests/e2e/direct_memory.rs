//! What clients in direct mode may have of a device's memory, as programs and the operator see it.

use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::direct_peer::DirectPeer;
use mpsshim_tests::programs::{Running, finish, preloaded, succeed};
use mpsshim_tests::scene::{control, daemon, daemon_with};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

const MEMORY: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
const PIECE: &str = "67108864";

/// The program, which softgpu gives 4 GiB.
fn limited(place: &Place, arguments: &[&str], environment: &[(&str, &str)]) -> Command {
    let mut command = preloaded(env!("CARGO_BIN_EXE_limited"), place.pipe());
    command.env_remove(MEMORY).env("MPSSHIM_MODE", "direct");
    command.args(arguments).envs(environment.iter().copied());
    command
}

fn shown(place: &Place, environment: &[(&str, &str)]) -> [u64; 3] {
    let shown = succeed(&mut limited(place, &["show"], environment));
    ["free ", "total ", "of the device "].map(|name| {
        let line = shown.lines().find_map(|line| line.strip_prefix(name));
        let number = line.unwrap_or_else(|| panic!("no {name} in {shown}"));
        number.parse().expect("a number")
    })
}

#[test]
fn operator_and_environment_limit_what_a_program_sees() {
    let place = daemon();
    assert_eq!(shown(&place, &[]), [4096; 3]);
    assert_eq!(shown(&place, &[(MEMORY, "0=1G")]), [1024; 3]);
    let set = place.control(&["set_default_device_pinned_mem_limit", "0", "3G"]);
    assert_eq!(set.code, 0, "{}", set.out);
    let server = place.control(&["get_server_list"]).out.trim().to_owned();
    let set = place.control(&["set_device_pinned_mem_limit", &server, "0", "2G"]);
    assert_eq!(set.code, 0, "{}", set.out);
    assert_eq!(shown(&place, &[]), [2048; 3]);
    // A client's own environment only lowers.
    assert_eq!(shown(&place, &[(MEMORY, "0=3G")]), [2048; 3]);
    assert_eq!(shown(&place, &[(MEMORY, "0=512M")]), [512; 3]);
    assert_eq!(shown(&place, &[(MEMORY, "0=99G")]), [2048; 3]);
    // A limit that cannot be held is not left out.
    for value in ["0=abc", "1=1G", "0", "=1G", "GPU-=1G", "1=1G,x,0=1G"] {
        let done = finish(&mut limited(&place, &["show"], &[(MEMORY, value)]));
        assert_eq!(done.code, 1, "{value}: {}", done.out);
        assert!(
            done.out.starts_with("CUDA_ERROR_INVALID_"),
            "{value}: {}",
            done.out
        );
        assert!(done.err.contains(MEMORY), "{value}: {}", done.err);
    }
}

#[test]
fn every_way_to_allocate_is_refused_at_the_limit() {
    let place = daemon();
    let environment = [(MEMORY, "0=1G")];
    let pieces = succeed(&mut limited(&place, &["allocate", PIECE], &environment));
    let ways: Vec<_> = pieces
        .lines()
        .filter_map(|line| line.split_once(": "))
        .collect();
    for (way, came) in &ways[..ways.len() - 1] {
        let expected = match *way {
            // softgpu has neither.
            "graph" | "cuMemAllocManaged" => "0 then CUDA_ERROR_NOT_SUPPORTED (801)",
            _ => "16 then CUDA_ERROR_OUT_OF_MEMORY (2)",
        };
        assert_eq!(*came, expected, "{way}");
    }
    assert_eq!(ways.len(), 8, "{pieces}");
    assert_eq!(ways[7], ("used in the end", "0 MiB of 1024"));
}

#[test]
fn what_ends_counts_no_more() {
    let place = daemon();
    let environment = [(MEMORY, "0=1G")];
    let said = succeed(&mut limited(&place, &["ends", PIECE], &environment));
    let expected = "\
a piece: 64
odd: CUDA_ERROR_INVALID_VALUE (1)
after an odd free: 64
much: CUDA_ERROR_OUT_OF_MEMORY (2)
in a context: 192
the context has ended: 64
mapped, without a handle: 128
a handle, not mapped: 128
neither: 64
after a reset: 0
";
    assert_eq!(said, expected);
    // As in proxy mode.
    let mut proxied = limited(&place, &["ends", PIECE], &environment);
    assert_eq!(succeed(proxied.env("MPSSHIM_MODE", "proxy")), expected);
}

/// The column of the clients that `ps` shows.
fn column(place: &Place, name: &str) -> Vec<String> {
    place.ps().iter().map(|row| row[name].clone()).collect()
}

#[test]
fn ps_shows_the_memory_held() {
    let place = daemon();
    let environment = [(MEMORY, "0=1G")];
    let mut one = Running::start_until(
        &mut limited(&place, &["hold", PIECE], &environment),
        "ready",
    );
    wait_until("it is seen", || column(&place, "memory") == [PIECE]);
    // What one holds is not the other's.
    assert_eq!(shown(&place, &environment), [1024; 3]);
    one.hang_up();
    wait_until("it has gone", || column(&place, "memory").is_empty());
}

/// A daemon whose servers ask an NVML that is told in this folder what processes hold.
fn daemon_with_nvml(folder: &Path) -> Place {
    let text = |path: std::path::PathBuf| path.into_os_string().into_string().expect("UTF-8");
    let nvml = text(artifact("libsoftnvml.so"));
    let (processes, asked) = (text(folder.join("processes")), text(folder.join("asked")));
    daemon_with(&[
        ("MPSSHIM_NVML_LIBRARY", &nvml),
        ("SOFTNVML_PROCESSES", &processes),
        ("SOFTNVML_ASKED", &asked),
    ])
}

/// Every process holds so much of the first device, says NVML.
fn all_hold(place: &Place, folder: &Path, bytes: u64) {
    let devices = place.control(&["device_query", "--format=csv"]).out;
    let device = devices.lines().nth(1).expect("a device");
    let uuid = device.split(',').nth(3).expect("a UUID");
    let line = format!("{uuid} * {bytes}\n");
    fs::write(folder.join("processes"), line).expect("processes");
}

#[test]
fn memory_of_a_context_counts() {
    let folder = tempfile::tempdir().expect("folder");
    let place = daemon_with_nvml(folder.path());
    all_hold(&place, folder.path(), 300 << 20);
    let environment = [(MEMORY, "0=1G")];
    let arguments = ["until", "724", PIECE];
    assert_eq!(
        succeed(&mut limited(&place, &arguments, &environment)),
        "free 724 of 1024\npieces: 11 then CUDA_ERROR_OUT_OF_MEMORY (2)\n"
    );
    // What a client counts is in it.
    let hold = &mut limited(&place, &["hold", PIECE], &environment);
    let mut one = Running::start_until(hold, "ready");
    let all = (300u64 << 20).to_string();
    wait_until("it is seen", || column(&place, "memory") == [all.as_str()]);
    // It is part of what the user has.
    let user = place.uid().to_string();
    let set = place.control(&["set_user_device_pinned_mem_limit", &user, "0", "512M"]);
    assert_eq!(set.code, 0, "{}", set.out);
    assert_eq!(shown(&place, &[("MPSSHIM_MODE", "proxy")])[0], 212);
    one.hang_up();
    wait_until("it has gone", || {
        shown(&place, &[("MPSSHIM_MODE", "proxy")])[0] == 512
    });
}

#[test]
fn nvml_is_asked_about_clients_that_change_only() {
    let folder = tempfile::tempdir().expect("folder");
    let place = daemon_with_nvml(folder.path());
    let asked = || {
        let lines = fs::read_to_string(folder.path().join("asked")).unwrap_or_default();
        lines.lines().count()
    };
    let quiet = || {
        let before = asked();
        std::thread::sleep(Duration::from_millis(2500));
        asked() == before
    };
    let one = DirectPeer::connect(&control(&place)).expect("a client");
    assert!(quiet() && asked() == 0, "it uses no device");
    one.take(1);
    wait_until("its context is asked about", || asked() == 2);
    assert!(quiet(), "nothing has changed");
    one.give(false);
    assert!(quiet());
    one.page().memory[0].held.store(5 << 20, Ordering::Relaxed);
    wait_until("what it allocates is asked about", || asked() == 4);
    assert!(quiet());
    let memory = &one.page().memory[0];
    // NVML knows nothing of it.
    assert_eq!(memory.overhead.load(Ordering::Relaxed), 0);
    all_hold(&place, folder.path(), 7 << 20);
    memory.held.store(6 << 20, Ordering::Relaxed);
    wait_until("it says more", || {
        memory.overhead.load(Ordering::Relaxed) == 1 << 20
    });
    // It may write what it likes.
    memory.overhead.store(u64::MAX, Ordering::Relaxed);
    memory.held.store(u64::MAX, Ordering::Relaxed);
    wait_until("it is asked about", || asked() >= 7);
    assert_eq!(column(&place, "memory"), [u64::MAX.to_string()]);
}

#[test]
fn without_nvml_contexts_do_not_count() {
    let place = daemon_with(&[("MPSSHIM_NVML_LIBRARY", "/nowhere/libnvidia-ml.so.1")]);
    let mut one = Running::start_until(&mut limited(&place, &["hold", PIECE], &[]), "ready");
    assert_eq!(shown(&place, &[(MEMORY, "0=1G")]), [1024; 3]);
    assert_eq!(column(&place, "memory"), [PIECE]);
    let said = || {
        place
            .log("server.log")
            .matches("NVML cannot be asked")
            .count()
    };
    wait_until("the log says so", || said() == 1);
    one.hang_up();
    assert_eq!(shown(&place, &[(MEMORY, "0=1G")]), [1024; 3]);
    assert_eq!(said(), 1);
}
