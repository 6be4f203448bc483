//! Managed memory and variables: one address for the program and its kernels.

use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Place, other_user, wait_until};
use mpsshim_tests::programs::{DriverFolder, Running, client, finish, preloaded, succeed, well};
use mpsshim_tests::scene::{daemon, daemon_with};
use mpsshim_tests::survivors::{clients, kill_server, server};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// As on the genuine driver (580.159.04).
const NATIVELY: &str = "bytes 4 4000 24 4
first 5 0 0
launched 8 15 -1
written 103 110 -2
same true managed 1
copied 7 7
counter CUDA_SUCCESS (0)
plain CUDA_ERROR_NOT_FOUND (500)
CUDA_SUCCESS (0) 5
kept 5
";

#[test]
fn managed_variables_are_at_one_address_for_the_program_and_its_kernels() {
    let place = daemon();
    let done = finish(&mut client(&place, &["managed"]));
    assert_eq!((well(&done).as_str(), done.err.as_str()), (NATIVELY, ""));
    // The image of another program has its own.
    let again = finish(&mut client(&place, &["managed"]));
    assert_eq!(well(&again), NATIVELY);
}

/// A mode of `tests/src/bin/managed`, for a short time and with blocks that softgpu's kernels get through; with each way
/// to learn of the host's accesses.
fn mode(name: &str) {
    let place = daemon();
    let line = format!("{name}: ok\n");
    let prepare = |program: &mut Command| {
        program.arg(name).args(["--seconds", "0.4"]);
        program.args(["--most", "60000", "--blocks", "300"]);
    };
    // softgpu has no managed memory.
    if std::env::var_os("MPSSHIM_TEST_DRIVER").is_some() {
        let folder = DriverFolder::new();
        let mut native = folder.native(artifact("managed"));
        prepare(&mut native);
        assert_eq!(succeed(&mut native), line);
    }
    for way in ["signal", "userfaultfd"] {
        let mut program = preloaded(artifact("managed"), place.pipe());
        prepare(&mut program);
        program
            .env("MPSSHIM_MANAGED_FAULTS", way)
            .env("MPSSHIM_LOG", "mpsshim::proxy::pages=info");
        let done = finish(&mut program);
        assert_eq!((done.code, &done.out), (0, &line), "{way}: {}", done.err);
        let expected = match way {
            "signal" => "faults of managed memory come by signals",
            _ => "faults of managed memory come by userfaultfd",
        };
        if way == "userfaultfd" && done.err.contains("no userfaultfd") {
            eprintln!("no userfaultfd here: not tested");
        } else {
            // Also said once for each region that becomes host memory.
            let ways = |line: &&str| !line.contains("a kernel has accesses of system scope");
            assert_eq!(done.err.lines().filter(ways).count(), 1, "{}", done.err);
            assert!(done.err.contains(expected), "{}", done.err);
        }
    }
}

#[test]
fn a_user_without_privileges_has_managed_memory() {
    let Some(user) = other_user() else {
        return eprintln!("not root: another user is not tested");
    };
    let place = daemon();
    for mode in ["turns", "edges", "calls", "signals", "fork"] {
        let mut program = preloaded(artifact("managed"), place.pipe());
        program.args([mode, "--seconds", "0.3", "--most", "60000"]);
        program.env("MPSSHIM_LOG", "mpsshim::proxy::pages=info");
        let done = Running::start(program.uid(user).gid(user)).finish(WITHIN);
        let line = format!("{mode}: ok\n");
        assert_eq!((done.code, &done.out), (0, &line), "{}", done.err);
        let said = "faults of managed memory come by ";
        assert!(done.err.contains(said), "{mode}: {}", done.err);
    }
}

#[test]
fn an_unknown_way_to_learn_of_accesses_is_said_and_not_used() {
    let place = daemon();
    let mut program = preloaded(artifact("managed"), place.pipe());
    program
        .args(["turns", "--seconds", "0.1", "--most", "60000"])
        .env("MPSSHIM_MANAGED_FAULTS", "telepathy")
        .env("MPSSHIM_LOG", "warn");
    let done = finish(&mut program);
    assert_eq!((done.code, done.out.as_str()), (0, "turns: ok\n"));
    let said = "MPSSHIM_MANAGED_FAULTS=telepathy is ignored: it is not auto";
    assert!(done.err.contains(said), "{}", done.err);
}

#[test]
fn faults_and_copies_are_counted() {
    const COUNTS: [&str; 6] = [
        "managed_to_host_bytes",
        "managed_to_host_copies",
        "managed_to_device_bytes",
        "managed_to_device_copies",
        "managed_faults",
        "managed_wait_ms",
    ];
    let place = daemon();
    let mut program = preloaded(artifact("managed"), place.pipe());
    program.args(["turns", "--seconds", "60", "--most", "60000"]);
    let run = Running::start(program.args(["--blocks", "300"]));
    let pid = run.pid().to_string();
    let mut first: Option<Vec<f64>> = None;
    wait_until("all numbers of managed memory rise", || {
        let rows = place.ps();
        let Some(row) = rows.iter().find(|row| row["pid"] == pid) else {
            return false;
        };
        let number = |name: &str| row[name].parse::<f64>().expect(name);
        if number("managed_device_memory") == 0.0 {
            return false;
        }
        assert_eq!(number("managed_host_memory"), 0.0);
        let now: Vec<f64> = COUNTS.into_iter().map(number).collect();
        let before = first.get_or_insert_with(|| now.clone());
        let mut pairs = before.iter().zip(&now);
        assert!(pairs.clone().all(|(before, now)| before <= now), "{row:?}");
        pairs.all(|(before, now)| before < now)
    });
    let top = place.control(&["top", "--once", "--interval", "1", "--json"]);
    let look: serde_json::Value = serde_json::from_str(&top.out).expect("JSON");
    let rate = look["clients"][0]["managed_bytes_per_second"].as_f64();
    assert!(rate > Some(0.0), "{look}");
    run.kill();
}

/// `turns` for some seconds, with one way to learn of the host's accesses.
fn turns(place: &Place, way: &str, seconds: &str) -> Running {
    let mut program = preloaded(artifact("managed"), place.pipe());
    program.args(["turns", "--seconds", seconds, "--most", "60000"]);
    program.env("MPSSHIM_MANAGED_FAULTS", way);
    Running::start(&mut program)
}

const WITHIN: Duration = Duration::from_secs(60);

#[test]
fn blocks_that_move_go_on_in_the_next_server() {
    let place = daemon();
    for way in ["signal", "userfaultfd"] {
        let run = turns(&place, way, "3");
        wait_until("the program has connected", || !clients(&place).is_empty());
        for _ in 0..3 {
            let before = server(&place).expect("a server").to_string();
            let done = place.control(&["restart_server", &before]);
            assert_eq!(done.code, 0, "{way}: {}", done.out);
        }
        let done = run.finish(WITHIN);
        assert_eq!((done.code, done.out.as_str()), (0, "turns: ok\n"), "{way}");
    }
}

#[test]
fn a_program_with_blocks_that_move_ends_with_an_error_or_goes_on_when_its_server_is_killed() {
    for way in ["signal", "userfaultfd", "signal", "userfaultfd"] {
        let place = daemon();
        // Not `turns`, which waits for host functions: they do not run in the end.
        let mut program = preloaded(artifact("managed"), place.pipe());
        program.args(["many", "--seconds", "3", "--blocks", "300"]);
        let run = Running::start(program.env("MPSSHIM_MANAGED_FAULTS", way));
        wait_until("the program has connected", || !clients(&place).is_empty());
        kill_server(&place);
        let done = run.finish(WITHIN);
        // With work in flight it is lost, at rest it goes on. No signal ends it.
        let went_on = (done.code, done.out.as_str()) == (0, "many: ok\n");
        assert!(went_on || done.code == 1, "{way}: {}{}", done.out, done.err);
    }
}

#[test]
fn a_program_killed_while_blocks_move_harms_no_other() {
    let place = daemon();
    for way in ["signal", "userfaultfd"] {
        let other = turns(&place, way, "2");
        for _ in 0..4 {
            let run = turns(&place, way, "60");
            wait_until("both have connected", || clients(&place).len() == 2);
            run.kill();
            wait_until("one is left", || clients(&place).len() < 2);
        }
        let done = other.finish(WITHIN);
        assert_eq!((done.code, done.out.as_str()), (0, "turns: ok\n"), "{way}");
    }
}

#[test]
fn host_and_device_change_blocks_in_turns() {
    mode("turns");
}

#[test]
fn the_host_uses_the_edges_of_blocks_after_each_kernel() {
    mode("edges");
}

#[test]
fn prefetched_and_discarded_blocks() {
    mode("prefetch");
}

/// Copies of managed memory to the host, and faults, of a process. The values of a client that has come since the server
/// was asked are empty.
fn copies_and_faults(place: &Place, pid: &str) -> Option<(f64, f64)> {
    let rows = place.ps();
    let row = rows.iter().find(|row| row["pid"] == pid)?;
    let number = |name: &str| row[name].parse::<f64>().ok();
    Some((number("managed_to_host_copies")?, number("managed_faults")?))
}

#[test]
fn memory_prefetched_to_the_host_is_there_when_the_program_has_waited() {
    let place = daemon();
    for way in ["signal", "userfaultfd"] {
        let mut program = preloaded(artifact("managed"), place.pipe());
        program.args(["prefetch", "--seconds", "60", "--most", "60000"]);
        program.args(["--without", "writes"]);
        let run = Running::start(program.env("MPSSHIM_MANAGED_FAULTS", way));
        let pid = run.pid().to_string();
        let mut last = (0.0, 0.0);
        wait_until("many copies", || {
            last = copies_and_faults(&place, &pid).unwrap_or_default();
            last.0 > 600.0
        });
        // A new block every 40 rounds has a fault when the host fills it; without prefetches each round has one more.
        let (copies, faults) = last;
        assert!(
            faults * 4.0 < copies,
            "{way}: {faults} faults, {copies} copies"
        );
        run.kill();
    }
}

#[test]
fn edges_are_fetched_with_waits() {
    let place = daemon();
    for way in ["signal", "userfaultfd"] {
        let mut program = preloaded(artifact("managed"), place.pipe());
        program.args(["edges", "--seconds", "60", "--most", "4"]);
        program.args(["--without", "disturbances"]);
        let run = Running::start(program.env("MPSSHIM_MANAGED_FAULTS", way));
        let pid = run.pid().to_string();
        let mut first = (0.0, 0.0);
        wait_until("some copies", || {
            first = copies_and_faults(&place, &pid).unwrap_or_default();
            first.0 > 50.0
        });
        let mut last = first;
        wait_until("more copies", || {
            last = copies_and_faults(&place, &pid).expect("the program is listed");
            last.0 > first.0 + 400.0
        });
        // Without that each copy to the host is for a fault, and there are faults of writes besides.
        let (copies, faults) = (last.0 - first.0, last.1 - first.1);
        assert!(
            faults * 4.0 < copies,
            "{way}: {faults} faults, {copies} copies"
        );
        run.kill();
    }
}

#[test]
fn host_and_device_use_sides_of_a_block_at_once() {
    mode("sides");
}

#[test]
fn threads_have_managed_blocks_of_their_own() {
    mode("threads");
}

#[test]
fn managed_memory_is_a_buffer_of_system_calls() {
    mode("calls");
}

#[test]
fn signal_handlers_use_managed_memory() {
    mode("signals");
}

#[test]
fn children_come_and_go_beside_managed_memory() {
    mode("fork");
}

#[test]
fn another_process_copies_managed_memory() {
    mode("remote");
}

#[test]
fn managed_memory_is_copied_and_captured() {
    mode("copies");
}

/// `cuMemcpyHtoD` may return when the bytes are staged: the program must not rely on more.
#[test]
fn copies_of_pageable_memory_may_arrive_late() {
    let place = daemon_with(&[("SOFTGPU_LATE_COPIES", "2000")]);
    let mut program = preloaded(artifact("managed"), place.pipe());
    // Blocks that the shim copies in messages, which is pageable memory for the driver.
    program.args(["copies", "--seconds", "1", "--most", "3000"]);
    let done = finish(&mut program);
    assert_eq!((done.code, done.out.as_str()), (0, "copies: ok\n"));
}

#[test]
fn parameters_lie_in_managed_memory() {
    mode("params");
}

#[test]
fn host_and_a_running_kernel_exchange_values() {
    mode("exchange");
}

#[test]
fn many_blocks_are_one_list() {
    mode("many");
}
