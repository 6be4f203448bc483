//! Programs with the shim preloaded, the real daemon and the real server: they share, die, fork and lose each other.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Done, Place, wait_until};
use mpsshim_tests::programs::{Running, client, finish, preloaded, succeed, well};
use mpsshim_tests::scene::{Scene, daemon, daemon_with};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

const RPC_FAILURE: &str = "CUDA_ERROR_MPS_RPC_FAILURE (806)\n";
const NOT_READY: &str = "ready\nCUDA_ERROR_NOT_READY (600)\n";
const ILLEGAL_ADDRESS: &str = "CUDA_ERROR_ILLEGAL_ADDRESS (700)\n";

/// The process id of the one server.
fn server(place: &Place) -> u32 {
    let list = place.control(&["get_server_list"]).out;
    list.trim()
        .parse()
        .unwrap_or_else(|_| panic!("one server, not {list:?}"))
}

fn clients_of(place: &Place, server: u32) -> Vec<u32> {
    let list = place.control(&["get_client_list", &server.to_string()]).out;
    list.lines()
        .map(|line| line.parse().expect("a process id"))
        .collect()
}

fn exists(pid: u32) -> bool {
    // A process without memory is a zombie: it has ended.
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| !maps.is_empty())
}

fn assert_ended_with(done: &Done, status: &str) {
    assert_eq!(
        (done.code, done.out.as_str(), done.err.as_str()),
        (1, status, "")
    );
}

#[test]
fn two_nbody_share_a_server() {
    let place = Place::new();
    let mps_run = |arguments: &[&str]| -> Command {
        let mut command = place.command("mps-run");
        command
            .env("MPSSHIM_LIBRARY", artifact("libmpsshim.so"))
            .env("MPSSHIM_SERVER", artifact("mps-server"))
            .env("MPSSHIM_CUDA_LIBRARY", mpsshim_tests::artifacts::driver())
            .arg("--quiet")
            .arg(artifact("nbody"))
            .args(arguments);
        command
    };
    // They start the daemon.
    let both =
        [(); 2].map(|()| Running::start(&mut mps_run(&["-benchmark", "-numbodies=256", "-i=300"])));
    let mut expected: Vec<u32> = both.iter().map(Running::pid).collect();
    expected.sort_unstable();
    wait_until("both are listed", || {
        let list = place.control(&["get_server_list"]).out;
        list.trim().parse().is_ok_and(|server| {
            let mut clients = clients_of(&place, server);
            clients.sort_unstable();
            clients == expected
        })
    });
    let server = server(&place);
    for run in both {
        let out = well(&run.finish(PATIENCE));
        assert!(
            out.contains("256 bodies, total time for 300 iterations: "),
            "{out}"
        );
    }
    wait_until("none is listed", || clients_of(&place, server).is_empty());
    let compared: Vec<Running> = [None, Some("-fp64"), None, Some("-fp64")]
        .into_iter()
        .map(|precision| {
            let mut command = mps_run(&["-compare", "-numbodies=256", "-i=2"]);
            Running::start(command.args(precision))
        })
        .collect();
    for run in compared {
        let out = well(&run.finish(PATIENCE));
        assert!(out.contains("  OK (largest difference"), "{out}");
    }
    assert_eq!(self::server(&place), server, "one server for all");
    let log = place.log("server.log");
    assert!(
        log.contains("Creating server context on device 0 ("),
        "{log}"
    );
}

#[test]
fn clients_killed_at_any_moment_leave_nothing_and_disturb_nobody() {
    Scene::new().beside_a_worker(|scene| {
        let mut other = Running::start_until(&mut client(&scene.place, &["work"]), "busy");
        let mut random = u64::from(std::process::id()) | 1;
        for round in 0..16 {
            let what: &[&str] = if round % 4 == 3 {
                &["launch"]
            } else {
                &["work"]
            };
            let doomed = Running::start_until(&mut client(&scene.place, what), "busy");
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            std::thread::sleep(Duration::from_micros(random >> 49));
            doomed.kill();
        }
        assert!(!other.has_ended(), "{}", other.finish(Duration::ZERO).out);
        other.kill();
    });
}

#[test]
fn clients_killed_while_they_start_leave_nothing() {
    Scene::new().beside_a_worker(|scene| {
        for milliseconds in 0..12 {
            let doomed = Running::start(&mut client(&scene.place, &["work"]));
            std::thread::sleep(Duration::from_millis(2 * milliseconds));
            doomed.kill();
        }
    });
}

#[test]
fn many_clients_leave_nothing() {
    Scene::new().beside_a_worker(|scene| {
        for _ in 0..40 {
            assert_eq!(succeed(&mut client(&scene.place, &["work", "1"])), "busy\n");
        }
        let at_once: Vec<Running> = (0..12)
            .map(|_| Running::start(&mut client(&scene.place, &["work", "5"])))
            .collect();
        for run in at_once {
            assert_eq!(well(&run.finish(PATIENCE)), "busy\n");
        }
    });
}

#[test]
fn a_killed_server_is_noticed_by_all_and_replaced() {
    let place = daemon();
    let four: Vec<Running> = (0..4)
        .map(|i| {
            let what: &[&str] = if i == 0 { &["launch"] } else { &["work"] };
            Running::start_until(&mut client(&place, what), "busy")
        })
        .collect();
    let first = server(&place);
    kill(Pid::from_raw(first as i32), Signal::SIGKILL).expect("kill");
    // Not even the client that comes at this moment notices.
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    for run in four {
        assert_ended_with(&run.finish(PATIENCE), RPC_FAILURE);
    }
    assert_ne!(server(&place), first);
}

#[test]
fn an_illegal_address_of_one_reaches_all_and_new_clients_work() {
    let place = daemon();
    let busy = Running::start_until(&mut client(&place, &["launch"]), "busy");
    let [idle, late] =
        [(); 2].map(|()| Running::start_until(&mut client(&place, &["idle"]), "ready"));
    let first = server(&place);
    let guilty = finish(&mut client(&place, &["stray"]));
    let fault = Instant::now();
    assert_ended_with(&guilty, ILLEGAL_ADDRESS);
    assert_ended_with(&busy.finish(PATIENCE), ILLEGAL_ADDRESS);
    assert_ended_with(&idle.finish(PATIENCE), ILLEGAL_ADDRESS);
    assert!(fault.elapsed() < PATIENCE, "promptly");
    // New ones, while the old server may still be there.
    for _ in 0..5 {
        assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    }
    wait_until("the old server has ended", || !exists(first));
    assert_ended_with(&late.finish(PATIENCE), ILLEGAL_ADDRESS);
    assert_ne!(server(&place), first);
}

#[test]
fn a_client_handed_to_a_server_that_ends_gets_the_next_one() {
    for manner in ["refuse", "drop"] {
        let folder = tempfile::TempDir::new().expect("directory");
        let done = folder.path().join("done");
        let then = artifact("mps-server");
        let place = daemon_with(&[
            ("MPSSHIM_SERVER", env!("CARGO_BIN_EXE_fake-server")),
            ("FAKE_SERVER", manner),
            ("FAKE_SERVER_DONE", done.to_str().expect("UTF-8")),
            ("FAKE_SERVER_THEN", then.to_str().expect("UTF-8")),
        ]);
        assert_eq!(
            succeed(&mut client(&place, &["work", "1"])),
            "busy\n",
            "{manner}"
        );
        let log = place.log("control.log");
        assert_eq!(
            log.matches("Starting new server").count(),
            2,
            "{manner}: {log}"
        );
    }
}

#[test]
fn a_forked_child_is_refused_and_one_with_exec_connects_anew() {
    Scene::new().beside_a_worker(|scene| {
        assert_eq!(succeed(&mut client(&scene.place, &["fork"])), "child 7\n");
        let out = succeed(&mut client(&scene.place, &["exec"]));
        assert_eq!(out, "busy\nchild true\n");
    });
}

#[test]
fn a_host_function_that_never_returns_stops_its_stream_only() {
    Scene::new().beside_a_worker(|scene| {
        let start = || Running::start_until(&mut client(&scene.place, &["blocked"]), "beside");
        let (killed, leaves) = (start(), start());
        assert_eq!(succeed(&mut client(&scene.place, &["work", "2"])), "busy\n");
        killed.kill();
        // What it asks about is not done, and to leave it waits for nobody.
        assert_ended_with(&leaves.finish(PATIENCE), NOT_READY);
    });
}

#[test]
fn two_processes_share_an_event() {
    Scene::new().beside_a_worker(|scene| {
        assert_eq!(
            succeed(&mut client(&scene.place, &["share"])),
            "child true\n"
        );
    });
}

/// Runs processes in a ring, each ordered behind the one before it by an event: `event-ring PROCESSES ROUNDS WAY BEHIND`.
fn ring(processes: &str, rounds: &str, way: &str, behind: &str) {
    Scene::new().beside_a_worker(|scene| {
        let mut ring = preloaded(env!("CARGO_BIN_EXE_event-ring"), scene.place.pipe());
        ring.args([processes, rounds, way, behind]);
        // Thousands of rounds, beside whatever else runs.
        let done = Running::start(&mut ring).finish(3 * PATIENCE);
        assert_eq!(well(&done), "PASS\n", "{way} behind {behind}");
    });
}

/// However it waits, a process waits for what another one has recorded before it told it, wherever that one's record is: in
/// its ring, or deferred behind a kernel or a host function.
#[test]
fn a_wait_sees_records_of_other_processes_that_are_not_submitted() {
    for behind in ["kernel", "function"] {
        for way in ["wait", "query", "synchronize"] {
            ring("2", "24", way, behind);
        }
    }
}

#[test]
fn events_order_four_processes_whatever_delays_their_records() {
    ring("4", "2000", "any", "any");
}

#[test]
fn threads_have_contexts_and_default_streams_of_their_own() {
    Scene::new().beside_a_worker(|scene| {
        assert_eq!(succeed(&mut client(&scene.place, &["threads"])), "");
    });
}

/// A launch returns when its kernel has ended, and with the status of its fault. Other programs do not wait.
#[test]
fn with_launch_blocking_launches_wait_for_their_kernels() {
    let place = daemon();
    let lines = |value: &str, done: &str| {
        let mut command = client(&place, &["launches"]);
        command.env("CUDA_LAUNCH_BLOCKING", value);
        let ended = finish(&mut command);
        assert_eq!((ended.code, ended.err.as_str()), (1, ""), "{}", ended.out);
        let calls = ["cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchGridAsync"];
        let queries: String = calls.map(|call| format!("{call} {done}")).concat();
        (ended.out, queries)
    };
    let (out, queries) = lines("1", "CUDA_SUCCESS (0)\n");
    assert_eq!(out, format!("{queries}captured\n{ILLEGAL_ADDRESS}"));
    let (out, _) = lines("0", "");
    let after = out.split_once("captured\n").expect("a capture").1;
    assert_eq!(after, format!("launched\n{ILLEGAL_ADDRESS}"));
}

#[test]
fn pageable_memory_of_any_size_is_copied_by_any_number_of_threads() {
    let place = daemon();
    for threads in ["0", "1", "3"] {
        let mut command = client(&place, &["copies"]);
        command.env("MPSSHIM_COPY_THREADS", threads);
        assert_eq!(succeed(&mut command), "copied\n", "{threads} threads");
    }
    let mut command = client(&place, &["copies"]);
    command
        .env("MPSSHIM_COPY_THREADS", "many")
        .env("MPSSHIM_LOG", "warn");
    let done = finish(&mut command);
    assert_eq!(done.out, "copied\n");
    let said = "MPSSHIM_COPY_THREADS=many is ignored: it is not a number from 0 to 15";
    assert!(done.err.contains(said), "{}", done.err);
}

#[test]
fn small_copies_beside_large_ones_are_whole_and_in_order() {
    let place = daemon();
    let large = Running::start_until(&mut client(&place, &["bulk"]), "busy");
    assert_eq!(succeed(&mut client(&place, &["small"])), "copied\n");
    drop(large);
}

/// Python's multiprocessing: workers that are started anew are clients, those that are only forked cannot use CUDA.
#[test]
fn workers_of_a_pool_are_clients_of_their_own() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("no python3: not tested");
        return;
    }
    Scene::new().beside_a_worker(|scene| {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/pool.py");
        let out = succeed(preloaded("python3", scene.place.pipe()).arg(script));
        let forked = "status 3 status 3 status 3";
        assert_eq!(
            out,
            format!("parent 7\nspawn 1 2 3\nforkserver 1 2 3\nfork {forked}\n")
        );
    });
}

#[test]
fn functions_whose_time_has_not_come_at_exit_never_run() {
    Scene::new().beside_a_worker(|scene| {
        for _ in 0..3 {
            assert_eq!(succeed(&mut client(&scene.place, &["pending"])), "");
        }
    });
}

#[test]
fn a_library_may_be_loaded_before_there_is_a_context() {
    assert_eq!(succeed(&mut client(&daemon(), &["early"])), "");
}

#[test]
fn a_killed_daemon_disturbs_no_client() {
    let place = daemon();
    let mut clients =
        [(); 2].map(|()| Running::start_until(&mut client(&place, &["idle"]), "ready"));
    let working = Running::start_until(&mut client(&place, &["work", "100"]), "busy");
    let old = server(&place);
    place.signal_daemon(Signal::SIGKILL);
    wait_until("the daemon has ended", || !exists(place.daemon_pid()));
    well(&working.finish(PATIENCE));
    let [first, second] = &mut clients;
    first.hang_up();
    wait_until("it ends", || first.has_ended());
    // The stale socket is in the way of nobody.
    assert!(place.pipe().join("control").exists());
    let alone = succeed(&mut client(&place, &["work", "1"]));
    assert_eq!(alone, "busy\n", "with no daemon, on the driver itself");
    let result = place.control(&["-d"]);
    assert_eq!((result.code, result.err.as_str()), (0, ""));
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    assert_eq!(server(&place), old, "it was taken over");
    assert!(!second.has_ended());
    for run in clients {
        well(&run.finish(PATIENCE));
    }
}

#[test]
fn without_a_daemon_or_disabled_it_runs_on_the_driver() {
    let place = daemon();
    let disabled = succeed(client(&place, &["work", "2"]).env("MPSSHIM_DISABLE", "1"));
    assert_eq!(disabled, "busy\n");
    let mut elsewhere = preloaded(env!("CARGO_BIN_EXE_client"), &place.path().join("nothing"));
    assert_eq!(succeed(elsewhere.args(["work", "2"])), "busy\n");
    assert_eq!(place.control(&["get_server_list"]).out, "");
    assert!(!place.path().join("nothing").exists());
}

#[test]
fn a_log_goes_to_its_file_alone() {
    let place = daemon();
    let file = place.path().join("shim.log");
    let setting = format!("debug:{}", file.display());
    let out = succeed(client(&place, &["work", "1"]).env("MPSSHIM_LOG", setting));
    assert_eq!(out, "busy\n");
    let log = fs::read_to_string(file).expect("the log");
    assert!(log.contains("connected"), "{log}");
}

/// CPU time of a process so far, in ticks of 10 ms.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    let (_, rest) = stat.rsplit_once(')').expect("name");
    let numbers: Vec<&str> = rest.split_whitespace().collect();
    numbers[11..13]
        .iter()
        .map(|ticks| ticks.parse::<u64>().expect("ticks"))
        .sum()
}

#[test]
fn idle_they_use_no_cpu() {
    let place = daemon();
    let idle = Running::start_until(&mut client(&place, &["idle"]), "ready");
    succeed(&mut client(&place, &["work", "5"]));
    let processes = [place.daemon_pid(), server(&place), idle.pid()];
    // What is left of a client is buried when nothing has been in flight for a moment, later on a loaded machine.
    let become_idle = |processes: &[u32]| {
        wait_until("two seconds without a use of the processor", || {
            let before: Vec<_> = processes.iter().map(|pid| ticks(*pid)).collect();
            std::thread::sleep(Duration::from_secs(2));
            let mut used = processes.iter().zip(before);
            used.all(|(pid, before)| ticks(*pid) - before <= 1)
        });
    };
    become_idle(&processes);
    well(&idle.finish(PATIENCE));
    become_idle(&processes[..2]);
}
