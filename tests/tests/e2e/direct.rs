//! Programs in direct mode: on the driver themselves, submitting when it is their turn.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::programs::{DriverFolder, Running, finish, preloaded, succeed, well};
use mpsshim_tests::scene::{daemon, daemon_with, daemon_with_options};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// So that turns can be counted.
const ALWAYS: [(&str, &str); 1] = [("MPSSHIM_TURNS", "always")];

/// A program that asks for direct mode.
fn direct(place: &Place, program: impl AsRef<OsStr>, arguments: &[&str]) -> Command {
    let mut command = preloaded(program, place.pipe());
    command.args(arguments).env("MPSSHIM_MODE", "direct");
    command
}

fn client(place: &Place, arguments: &[&str]) -> Command {
    direct(place, env!("CARGO_BIN_EXE_client"), arguments)
}

/// What `ps` says of the clients, by process id.
fn clients(place: &Place) -> HashMap<u32, HashMap<String, String>> {
    let rows = place.ps().into_iter();
    rows.map(|row| (row["pid"].parse().expect("a process id"), row))
        .collect()
}

fn number(row: &HashMap<String, String>, name: &str) -> f64 {
    row[name]
        .parse()
        .unwrap_or_else(|_| panic!("{name} in {row:?}"))
}

#[test]
fn a_program_runs_as_natively() {
    let place = daemon_with_options(&["-d", "--mode", "direct"], &[]);
    let nbody = || {
        let mut command = preloaded(artifact("nbody"), place.pipe());
        command.args(["-compare", "-numbodies=256"]);
        command
    };
    // The daemon's mode is for programs that ask for none.
    succeed(&mut nbody());
    let log = place.log("server.log");
    assert!(!log.contains("Creating server context"), "{log}");
    // A program may ask for the other.
    succeed(nbody().env("MPSSHIM_MODE", "proxy"));
    assert!(place.log("server.log").contains("Creating server context"));
}

/// A profiler sees the work of a program on the driver itself only.
#[test]
fn a_program_under_a_tool_that_injects_itself_is_in_direct_mode() {
    let place = daemon();
    let run = |mode: Option<&str>| {
        let mut command = preloaded(env!("CARGO_BIN_EXE_client"), place.pipe());
        command
            .args(["work", "1"])
            .env("CUDA_INJECTION64_PATH", "/nowhere/libtool.so")
            .env("MPSSHIM_LOG", "info");
        if let Some(mode) = mode {
            command.env("MPSSHIM_MODE", mode);
        }
        let done = finish(&mut command);
        assert_eq!(done.code, 0, "{}", done.err);
        done.err
    };
    let log = run(None);
    assert!(log.contains("CUDA_INJECTION64_PATH is set"), "{log}");
    assert!(log.contains("connected, in direct mode"), "{log}");
    let log = run(Some("proxy"));
    assert!(!log.contains("CUDA_INJECTION64_PATH"), "{log}");
    assert!(!log.contains("in direct mode"), "{log}");
}

/// NVIDIA's control daemon, as far as a program can tell before it connects.
fn nvidia_listens(place: &Place) -> (UnixListener, PathBuf) {
    let directory = place.pipe().join("nvidia");
    std::fs::create_dir(&directory).expect("a folder");
    let listener = UnixListener::bind(directory.join("control")).expect("a socket");
    (listener, directory)
}

#[test]
fn under_nvidia_s_mps_limits_are_handed_on_and_no_turns_are_taken() {
    let environment = [
        ("MPSSHIM_TURNS", "always"),
        ("CUDA_MPS_CLIENT_PRIORITY", "1"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G"),
    ];
    let place = daemon_with_options(&["-d"], &environment);
    let (_listener, directory) = nvidia_listens(&place);
    let handed = |environment: &[(&str, &str)]| {
        let mut command = direct(&place, env!("CARGO_BIN_EXE_limited"), &["handed"]);
        command.env("CUDA_MPS_PIPE_DIRECTORY", &directory);
        succeed(command.envs(environment.iter().copied()))
    };
    let all = handed(&[("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "33.3")]);
    let lines: Vec<&str> = all.lines().collect();
    assert_eq!(lines[0], "ACTIVE_THREAD_PERCENTAGE: 33.30");
    let (limit, uuid) = (lines[1], "PINNED_DEVICE_MEM_LIMIT: GPU-");
    assert!(
        limit.starts_with(uuid) && limit.ends_with("=1024M"),
        "{all}"
    );
    assert_eq!(lines[2], "CLIENT_PRIORITY: 1");
    assert!(lines[3].starts_with("launched "), "{all}");
    // What a program says itself is left as it is.
    let own = handed(&[("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=512M")]);
    assert!(own.contains("PINNED_DEVICE_MEM_LIMIT: 0=512M\n"), "{own}");

    let mut command = client(&place, &["work"]);
    command.env("CUDA_MPS_PIPE_DIRECTORY", &directory);
    let served = Running::start_until(&mut command, "busy");
    let other = Running::start_until(&mut client(&place, &["work"]), "busy");
    let log = place.log("server.log");
    assert!(
        log.contains("is served by NVIDIA's MPS and takes no turns"),
        "{log}"
    );
    let rows = clients(&place);
    assert_eq!(number(&rows[&served.pid()], "turns"), 0.0, "{rows:?}");
    assert_eq!(number(&rows[&other.pid()], "turns"), 1.0, "{rows:?}");
    // Without it, nothing is written into a program's environment.
    let plain = succeed(&mut direct(
        &place,
        env!("CARGO_BIN_EXE_limited"),
        &["handed"],
    ));
    assert!(plain.starts_with("ACTIVE_THREAD_PERCENTAGE: \n"), "{plain}");
}

#[test]
fn programs_take_turns_and_both_go_on() {
    let place = daemon_with(&ALWAYS);
    let running: Vec<Running> = (0..2)
        .map(|_| Running::start_until(&mut client(&place, &["work"]), "busy"))
        .collect();
    let turns = |process: &Running| {
        let rows = clients(&place);
        rows.get(&process.pid())
            .map_or(0.0, |row| number(row, "turns"))
    };
    for process in &running {
        wait_until("each has had some turns", || turns(process) >= 5.0);
    }
    let rows = clients(&place);
    assert!(rows.values().all(|row| row["mode"] == "direct"), "{rows:?}");
    // Who dies loses its turn at once.
    let mut running = running.into_iter();
    let (first, second) = (running.next().expect("one"), running.next().expect("two"));
    first.kill();
    succeed(&mut client(&place, &["work", "5"]));
    wait_until("the one that is left is alone", || {
        clients(&place).len() == 1
    });
    let before = turns(&second);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(turns(&second), before, "who is alone keeps its turn");
}

#[test]
fn captures_go_on_while_turns_change() {
    let place = daemon();
    let busy = Running::start_until(&mut client(&place, &["work"]), "busy");
    for _ in 0..5 {
        let used = succeed(&mut direct(
            &place,
            env!("CARGO_BIN_EXE_limited"),
            &["where"],
        ));
        assert_eq!(used, "launched 4\ncaptured 4\nby hand 4\n");
    }
    drop(busy);
}

#[test]
fn a_fault_stays_in_its_process() {
    let place = daemon();
    let busy = Running::start_until(&mut client(&place, &["work", "400"]), "busy");
    let done = finish(&mut client(&place, &["stray"]));
    assert_eq!(done.code, 1, "{}", done.out);
    assert!(
        done.out.contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
        "{}",
        done.out
    );
    well(&busy.finish(PATIENCE));
}

#[test]
fn threads_and_children_of_a_program() {
    let place = daemon();
    let busy = Running::start_until(&mut client(&place, &["work"]), "busy");
    succeed(&mut client(&place, &["threads"]));
    // What a forked child may do is the driver's to say.
    let folder = DriverFolder::new();
    let natively = succeed(folder.native(env!("CARGO_BIN_EXE_client")).arg("fork"));
    assert_eq!(succeed(&mut client(&place, &["fork"])), natively);
    drop(busy);
}

/// The process id of the one server.
fn server(place: &Place) -> i32 {
    let server = place.control(&["get_server_list"]).out;
    server.trim().parse().expect("one server")
}

fn kill_process(pid: i32) {
    let pid = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("kill");
}

/// Kills the server, and waits until so many clients have come to the next one; what `ps` then says of them.
fn kill_server(place: &Place, count: usize) -> HashMap<u32, HashMap<String, String>> {
    let before = server(place).to_string();
    kill_process(server(place));
    // As long as it takes to start a server on a machine with much to do.
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let rows = clients(place);
        let of_next = |row: &HashMap<_, _>| row["server"] != before && row["mode"] == "direct";
        if rows.len() == count && rows.values().all(of_next) {
            return rows;
        }
        let logs = || format!("{}\n{}", place.log("control.log"), place.log("server.log"));
        assert!(Instant::now() < until, "{rows:?}\n{}", logs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Turns of each of these programs; 0 for one that is not there.
fn turns(place: &Place, running: &[Running]) -> Vec<f64> {
    let rows = clients(place);
    let of = |process: &Running| {
        let row = rows.get(&process.pid());
        row.map_or(0.0, |row| number(row, "turns"))
    };
    running.iter().map(of).collect()
}

#[test]
fn programs_outlive_their_servers() {
    let place = daemon_with(&ALWAYS);
    let mut holds = Running::start_until(
        &mut direct(&place, env!("CARGO_BIN_EXE_limited"), &["hold", "67108864"]),
        "ready",
    );
    let running: Vec<Running> = (0..2)
        .map(|_| Running::start_until(&mut client(&place, &["work"]), "busy"))
        .collect();
    for _ in 0..2 {
        wait_until("all have had turns", || {
            turns(&place, &running).iter().all(|turns| *turns >= 3.0)
        });
        kill_server(&place, 3);
        // What a server with much to do has not said yet counts as 0.
        wait_until("the next server knows what each holds", || {
            let rows = clients(&place);
            let memory = |process: &Running| number(&rows[&process.pid()], "memory");
            // The others hold at least so much through all rounds.
            memory(&holds) == 67_108_864.0
                && running.iter().all(|process| memory(process) >= 524_288.0)
        });
    }
    wait_until("all have turns of the third server", || {
        turns(&place, &running).iter().all(|turns| *turns >= 3.0)
    });
    // Rounds check their results.
    succeed(&mut client(&place, &["work", "5"]));
    for process in running {
        process.kill();
    }
    holds.hang_up();
    wait_until("nothing is left", || clients(&place).is_empty());
    succeed(&mut client(&place, &["work", "5"]));
}

#[test]
fn a_program_that_ends_without_its_server_ends_well() {
    let place = daemon();
    let running: Vec<Running> = (0..2)
        .map(|_| Running::start_until(&mut client(&place, &["work", "600"]), "busy"))
        .collect();
    kill_process(server(&place));
    for process in running {
        well(&process.finish(PATIENCE));
    }
    wait_until("nothing is left", || clients(&place).is_empty());
}

#[test]
fn without_a_daemon_a_program_goes_on() {
    let place = daemon();
    let running: Vec<Running> = (0..2)
        .map(|_| Running::start_until(&mut client(&place, &["work", "600"]), "busy"))
        .collect();
    let server = server(&place);
    kill_process(place.daemon_pid() as i32);
    kill_process(server);
    for process in running {
        well(&process.finish(PATIENCE));
    }
}

#[test]
fn programs_do_not_hold_up_the_end_of_the_daemon() {
    let place = daemon();
    let running: Vec<Running> = (0..2)
        .map(|_| Running::start_until(&mut client(&place, &["work", "600"]), "busy"))
        .collect();
    let began = Instant::now();
    let done = place.control(&["quit", "-t", "0"]);
    assert_eq!(done.code, 0, "{}", done.err);
    assert!(began.elapsed() < Duration::from_secs(10));
    for process in running {
        well(&process.finish(PATIENCE));
    }
    // Each asked once more at most: it was told that the daemon ends.
    let log = place.log("control.log");
    let came = log.matches("NEW CLIENT").count();
    let refused = log.matches("the daemon is shutting down").count();
    assert!(came == 2 && refused <= 2, "{log}");
}

#[test]
fn only_the_parent_comes_back() {
    let place = daemon();
    let mut parent = Running::start_until(&mut client(&place, &["beside"]), "busy");
    assert!(kill_server(&place, 1).contains_key(&parent.pid()));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(clients(&place).len(), 1);
    // Its end is seen though the child lives.
    kill_process(parent.pid() as i32);
    wait_until("nothing is left", || clients(&place).is_empty());
    parent.hang_up();
}

#[test]
fn a_mode_that_does_not_exist_is_an_error() {
    let place = daemon_with(&[]);
    for mode in ["sideways", "Direct", "proxy,0=direct"] {
        let done = finish(client(&place, &["work", "1"]).env("MPSSHIM_MODE", mode));
        let status = "CUDA_ERROR_INVALID_VALUE (1)";
        assert_eq!((done.code, done.out.trim()), (1, status), "{mode}");
        let why = format!("MPSSHIM_MODE={mode} is neither proxy nor direct\n");
        assert_eq!(
            done.err,
            format!("mpsshim: cuInit fails with {status}: {why}")
        );
    }
    assert_eq!(place.control(&["get_server_list"]).out, "");
}

#[test]
fn programs_get_the_mode_of_their_devices() {
    let devices = ("SOFTGPU_DEVICES", "2");
    let place = daemon_with_options(&["-d", "--mode", "1=direct"], &[devices]);
    for (visible, mode) in [
        (Some("0"), "proxy"),
        (Some("1"), "direct"),
        (None, "direct"),
    ] {
        let mut command = preloaded(env!("CARGO_BIN_EXE_client"), place.pipe());
        command.arg("work").env("SOFTGPU_DEVICES", "2");
        command.envs(visible.map(|list| ("CUDA_VISIBLE_DEVICES", list)));
        let running = Running::start_until(&mut command, "busy");
        assert_eq!(clients(&place)[&running.pid()]["mode"], mode, "{visible:?}");
        running.kill();
    }
}

#[test]
fn the_operator_ends_a_program() {
    let place = daemon();
    let running = Running::start_until(&mut client(&place, &["work"]), "busy");
    wait_until("the daemon knows it", || !clients(&place).is_empty());
    let server = place.control(&["get_server_list"]).out.trim().to_owned();
    let done = place.control(&["terminate_client", &server, &running.pid().to_string()]);
    assert_eq!((done.code, done.out.as_str()), (0, "0\n"), "{}", done.err);
    let done = running.finish(PATIENCE);
    assert_eq!(
        (done.code, done.out.as_str()),
        (1, "CUDA_ERROR_MPS_CLIENT_TERMINATED (810)\n"),
        "{}",
        done.err
    );
    // It did not come back.
    assert_eq!(place.log("control.log").matches("NEW CLIENT").count(), 1);
    succeed(&mut client(&place, &["work", "3"]));
}
