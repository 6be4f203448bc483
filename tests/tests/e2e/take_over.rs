//! What dies and what goes on: a daemon killed beside its servers and taken over by the next one, a server killed
//! beside its clients.

use mpsshim_control::seqpacket;
use mpsshim_tests::PATIENCE;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{
    Client, Done, Place, as_user, has_ended, two_users, wait_until,
};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::programs::{Running, client, succeed, well};
use mpsshim_tests::scene::{control, daemon, reconnect};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

const RPC_FAILURE: &str = "CUDA_ERROR_MPS_RPC_FAILURE (806)\n";
const TERMINATED: &str = "CUDA_ERROR_MPS_CLIENT_TERMINATED (810)\n";

fn server(place: &Place) -> String {
    place.control(&["get_server_list"]).out.trim().to_owned()
}

fn outcome(done: &Done) -> (i32, &str, &str) {
    (done.code, &done.out, &done.err)
}

fn kill_daemon(place: &Place) {
    let pid = place.daemon_pid();
    place.signal_daemon(Signal::SIGKILL);
    wait_until("the daemon has ended", || has_ended(pid));
}

/// Kills the daemon and starts another one in its place.
pub fn next_daemon(place: &Place, options: &[&str]) {
    kill_daemon(place);
    let done = place.control(options);
    assert_eq!(outcome(&done), (0, "", ""));
}

fn await_active(place: &Place, pid: &str) {
    wait_until("it is taken over", || {
        place.control(&["get_server_status", pid]).out == "ACTIVE\n"
    });
}

fn busy(place: &Place, what: &str) -> Running {
    Running::start_until(&mut client(place, &[what]), "busy")
}

#[test]
fn a_server_and_its_clients_are_the_next_daemon_s() {
    let place = daemon();
    let (mut first, second) = (busy(&place, "launch"), busy(&place, "work"));
    let pid = server(&place);
    let limited = place.control(&["set_active_thread_percentage", &pid, "40"]);
    assert_eq!(outcome(&limited), (0, "40.0\n", ""));
    for round in 1..=3 {
        next_daemon(&place, &["-d"]);
        // At once: the client does not find a daemon that knows of no server.
        assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
        assert_eq!(server(&place), pid);
        await_active(&place, &pid);
        let taken = format!("Server {pid} of user {} taken over with 2 ", place.uid());
        wait_until("the client that came has gone", || {
            let clients = place.control(&["get_client_list", &pid]).out;
            clients == format!("{}\n{}\n", first.pid(), second.pid())
        });
        assert_eq!(place.log("control.log").matches(&taken).count(), round);
    }
    let log = place.log("control.log");
    assert_eq!(log.matches("Starting new server").count(), 1, "{log}");
    let limited = place.control(&["get_active_thread_percentage", &pid]);
    assert_eq!(limited.out, "40.0\n");
    // The new daemon's orders are its orders, and its reports are heard.
    let list = place.control(&["get_device_client_list", &pid]).out;
    assert!(list.contains(&format!("{}.", first.pid())), "{list}");
    let done = place.control(&["terminate_client", &pid, &second.pid().to_string()]);
    assert_eq!(outcome(&done), (0, "0\n", ""));
    assert_eq!(outcome(&second.finish(PATIENCE)), (1, TERMINATED, ""));
    assert!(!first.has_ended());
    let done = place.control(&["shutdown_server", &pid, "-f"]);
    assert_eq!(outcome(&done), (0, "", ""));
    assert_eq!(outcome(&first.finish(PATIENCE)), (1, RPC_FAILURE, ""));
    assert_eq!(server(&place), "");
    assert!(
        place
            .log("control.log")
            .contains(&format!("Server {pid} exited\n"))
    );
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
}

#[test]
fn quit_waits_for_the_clients_of_a_server_that_was_taken_over() {
    let place = daemon();
    let mut idle = Running::start_until(&mut client(&place, &["idle"]), "ready");
    let pid = server(&place);
    next_daemon(&place, &["-d"]);
    await_active(&place, &pid);
    std::thread::scope(|scope| {
        let quit = scope.spawn(|| place.control(&["quit"]));
        wait_until("the server waits", || {
            place.log("server.log").contains("notified to shutdown")
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(!quit.is_finished() && !idle.has_ended());
        idle.hang_up();
        assert_eq!(outcome(&quit.join().expect("quit")), (0, "", ""));
    });
    assert_eq!(well(&idle.finish(PATIENCE)), "");
    wait_until("the server has ended", || {
        has_ended(pid.parse().expect("a process id"))
    });
}

#[test]
fn a_server_that_was_taken_over_and_dies_is_replaced() {
    let place = daemon();
    let run = busy(&place, "work");
    let pid = server(&place);
    next_daemon(&place, &["-d"]);
    await_active(&place, &pid);
    let raw = Pid::from_raw(pid.parse().expect("a process id"));
    kill(raw, Signal::SIGKILL).expect("kill");
    assert_eq!(outcome(&run.finish(PATIENCE)), (1, RPC_FAILURE, ""));
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    assert_ne!(server(&place), pid);
    let log = place.log("control.log");
    let line =
        format!("Server {pid} ended unexpectedly, with 1 clients; the next server goes on with");
    assert!(log.contains(&line), "{log}");
}

#[test]
fn a_stopped_server_that_was_taken_over_is_killed_when_it_must_end() {
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    let pid = client.welcome().expect("welcome").server_pid;
    next_daemon(&place, &["-d"]);
    await_active(&place, &pid.to_string());
    let raw = Pid::from_raw(pid as i32);
    kill(raw, Signal::SIGSTOP).expect("stop");
    let done = place.control(&["shutdown_server", &pid.to_string(), "-f"]);
    assert_eq!(outcome(&done), (0, "", ""));
    assert!(has_ended(pid));
    let log = place.log("control.log");
    assert!(log.contains(&format!("Server {pid} has not ended in time, killing it")));
}

#[test]
fn a_server_that_was_told_to_end_is_still_ending_for_the_next_daemon() {
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    let pid = client.welcome().expect("welcome").server_pid.to_string();
    std::thread::scope(|scope| {
        // Its daemon dies before it can answer.
        let shutdown = scope.spawn(|| place.control(&["shutdown_server", &pid]));
        wait_until("the server waits", || {
            place.log("server.log").contains("notified to shutdown")
        });
        next_daemon(&place, &["-d"]);
        assert_eq!(shutdown.join().expect("command").code, 1);
    });
    await_active(&place, &pid);
    let late = Client::connect(&place);
    assert!(late.is_kept_waiting(), "it takes no more clients");
    drop(client);
    let next = late.welcome().expect("welcome").server_pid.to_string();
    assert_ne!(next, pid);
}

#[test]
fn other_users_wait_for_a_server_that_was_taken_over() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon();
    let first = as_user(one, || Client::connect(&place));
    let pid = first.welcome().expect("welcome").server_pid;
    next_daemon(&place, &["-d"]);
    let other = as_user(two, || Client::connect(&place));
    let second = as_user(one, || Client::connect(&place));
    assert_eq!(second.welcome().expect("welcome").server_pid, pid);
    assert!(other.is_kept_waiting());
    drop((first, second));
    assert_ne!(other.welcome().expect("welcome").server_pid, pid);
}

#[test]
fn a_server_for_all_users_is_taken_over_by_a_daemon_of_its_kind() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon_options(&["-d", "-M"], &[]);
    let connect = |user| as_user(user, || Client::connect(&place));
    let clients = [one, two].map(connect);
    let [pid, _] = clients
        .each_ref()
        .map(|client| client.welcome().expect("welcome").server_pid);
    next_daemon(&place, &["-d", "-M"]);
    for user in [one, two, 0] {
        assert_eq!(connect(user).welcome().expect("welcome").server_pid, pid);
    }
    assert!(clients.iter().all(Client::is_connected));
}

/// A process that says that it is a server, and the daemon's answer to it.
fn introduced(place: &Place, user: u32) -> (Running, String) {
    let program = env!("CARGO_BIN_EXE_fake-server");
    let mut command = place.command_like(&place.command("mps-control"), program);
    command.arg("introduce").uid(user).gid(user);
    let mut running = Running::start(&mut command);
    let answer = running.line();
    (running, answer)
}

#[test]
fn a_process_that_says_it_is_a_server_gets_its_own_user_s_clients_only() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon();
    let (impostor, answer) = introduced(&place, one);
    assert_eq!(answer, "\"TakenOver\"");
    let pid = impostor.pid();
    assert_eq!(server(&place), pid.to_string());
    // It never gets ready, and so nobody else is served; as if a client of that user never left.
    let client = as_user(two, || Client::connect(&place));
    assert!(client.is_kept_waiting());
    // There is one server for a user.
    let (second, answer) = introduced(&place, one);
    let refused = "{\"Refused\":{\"reason\":\"another server serves that user\"}}";
    assert_eq!(answer, refused);
    let line = format!(
        "Server {} of user {one} not taken over: another",
        second.pid()
    );
    assert!(place.log("control.log").contains(&line));
    let done = place.control(&["shutdown_server", &pid.to_string(), "-f"]);
    assert_eq!(outcome(&done), (0, "", ""));
    assert!(has_ended(pid));
    assert_ne!(client.welcome().expect("welcome").server_pid, pid);
}

#[test]
fn a_daemon_takes_over_no_server_that_it_would_not_have_started() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let refused = "{\"Refused\":{\"reason\":\"this daemon has no servers of that user\"}}";
    // Under one that serves all users with one server, a user's own would have them wait.
    let place = Place::with_daemon_options(&["-d", "-M"], &[]);
    assert_eq!(introduced(&place, one).1, refused);
    let mut place = Place::new();
    place.become_user(one);
    assert_eq!(place.control(&["-d"]).code, 0);
    for user in [two, 0] {
        assert_eq!(introduced(&place, user).1, refused, "user {user}");
    }
    assert_eq!(server(&place), "");
}

#[test]
fn a_server_that_is_not_taken_over_ends_with_its_clients() {
    let Some([one, _]) = two_users() else {
        return;
    };
    let place = Place::with_daemon();
    let client = as_user(one, || Client::connect(&place));
    let pid = client.welcome().expect("welcome").server_pid;
    next_daemon(&place, &["-d", "-M"]);
    let reason = "this daemon has no servers of that user";
    wait_until("it is refused", || {
        let line = format!("Server {pid} of user {one} not taken over: {reason}");
        place.log("control.log").contains(&line)
    });
    wait_until("it gives up", || {
        let line = format!("does not take this server over: {reason}. It ends with its clients");
        place.log("server.log").contains(&line)
    });
    assert_eq!(server(&place), "");
    let other = as_user(one, || Client::connect(&place));
    assert_ne!(other.welcome().expect("welcome").server_pid, pid);
    assert!(client.is_connected() && !has_ended(pid));
    drop(client);
    wait_until("it has ended", || has_ended(pid));
    // It asked once.
    let log = place.log("control.log");
    assert_eq!(log.matches("not taken over").count(), 1, "{log}");
}

#[test]
fn a_server_of_another_release_is_refused() {
    let place = Place::with_daemon();
    let me = std::process::id();
    for (said, why) in [
        (
            &br#"MPSV{"versions":{"protocol":1,"link":9},"anything":[]}"#[..],
            "the server speaks protocol version 1.9, this daemon ",
        ),
        (b"MPSV", "not a server's introduction: "),
        (b"MPSV{\"versions\":", "not a server's introduction: "),
    ] {
        let connection = seqpacket::connect(&place.pipe().join("control")).expect("connect");
        seqpacket::send(connection.as_fd(), said, None).expect("send");
        let mut buffer = [0; 4096];
        let len = seqpacket::receive(connection.as_fd(), &mut buffer).expect("receive");
        let answer = String::from_utf8_lossy(&buffer[..len]);
        assert!(answer.starts_with("{\"Refused\""), "{answer}");
        assert!(answer.contains(why), "{answer}");
        let line = format!("Server {me} of user {} not taken over: {why}", place.uid());
        wait_until("it is logged", || place.log("control.log").contains(&line));
    }
    assert_eq!(server(&place), "");
}

#[test]
fn clients_of_a_killed_server_know_within_a_tenth_of_a_second() {
    let place = daemon();
    // Of the clients one launches, one copies, and one sleeps for what never comes.
    let round = || {
        let mut clients = ["launch", "work", "wait"].map(|what| busy(&place, what));
        let pid = server(&place).parse().expect("a process id");
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("kill");
        let killed = Instant::now();
        std::thread::scope(|scope| {
            let told = clients.each_mut().map(|client| {
                scope.spawn(move || {
                    let line = client.line();
                    (line, killed.elapsed())
                })
            });
            let told = told.map(|client| client.join().expect("no panic"));
            for (line, _) in &told {
                assert_eq!(line, RPC_FAILURE.trim_end());
            }
            told.into_iter().map(|(_, after)| after).max()
        })
    };
    // A machine that is busy with other things may come late, but not each time.
    let in_time = |_| round().expect("three clients") < Duration::from_millis(100);
    assert!((0..20).any(in_time));
}

#[test]
fn the_client_after_a_killed_server_has_another_within_a_second() {
    let place = daemon();
    let _clients = [(); 4].map(|()| busy(&place, "work"));
    let round = || {
        let _peer = Peer::connect(&control(&place)).expect("a server");
        let pid = server(&place).parse().expect("a process id");
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("kill");
        let killed = Instant::now();
        reconnect(&place);
        (killed.elapsed(), pid, server(&place))
    };
    // As above: not late each time.
    let mut rounds = vec![round()];
    while rounds
        .last()
        .is_some_and(|last| last.0 >= Duration::from_secs(1))
    {
        assert!(rounds.len() < 20, "{rounds:?}");
        rounds.push(round());
    }
    let log = place.log("control.log");
    for (_, old, new) in rounds {
        for line in [
            format!("Server {old} exited with status 137"),
            format!("Server {old} ended unexpectedly, with "),
            format!("NEW SERVER {new}: Ready"),
        ] {
            assert!(log.contains(&line), "{line} in {log}");
        }
    }
}

#[test]
fn programs_finish_without_their_daemon() {
    // On a busy machine short ones end before the next daemon is there, and their server with them.
    let mut iterations = ["300", "1200", "4800", "19200"].iter();
    while !finish_without_their_daemon(iterations.next().expect("they outlast a daemon's start")) {}
}

/// Returns whether the programs still ran when the next daemon had taken over.
fn finish_without_their_daemon(iterations: &str) -> bool {
    let place = daemon();
    let mps_run = |arguments: &[&str]| {
        let mut command = place.command("mps-run");
        command.env("MPSSHIM_LIBRARY", artifact("libmpsshim.so"));
        command
            .arg("--quiet")
            .arg(artifact("nbody"))
            .args(arguments);
        command
    };
    let option = format!("-i={iterations}");
    let long = ["-benchmark", "-numbodies=256", option.as_str()];
    let mut both = [(); 2].map(|()| Running::start(&mut mps_run(&long)));
    wait_until("both run", || {
        let clients = place.control(&["get_client_list", &server(&place)]);
        clients.out.lines().count() == 2
    });
    let pid = server(&place);
    kill_daemon(&place);
    assert!(both.iter_mut().all(|run| !run.has_ended()));
    // mps-run starts the daemon that takes over.
    let out = succeed(&mut mps_run(&["-compare", "-numbodies=256", "-i=1"]));
    assert!(out.contains("  OK (largest difference"), "{out}");
    let now = server(&place);
    let still_run = both.iter_mut().any(|run| !run.has_ended());
    assert!(now == pid || !still_run, "server {now} beside server {pid}");
    for run in both {
        let out = well(&run.finish(PATIENCE));
        let expected = format!("total time for {iterations} iterations");
        assert!(out.contains(&expected), "{out}");
    }
    still_run
}
