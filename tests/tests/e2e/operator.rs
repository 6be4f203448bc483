//! What an operator does to running clients and servers.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Done, Place, other_user, wait_until};
use mpsshim_tests::programs::{Running, client, succeed};
use mpsshim_tests::scene::{Scene, daemon};
use std::time::Instant;

const TERMINATED: &str = "CUDA_ERROR_MPS_CLIENT_TERMINATED (810)\n";

fn server(place: &Place) -> String {
    place.control(&["get_server_list"]).out.trim().to_owned()
}

fn busy(place: &Place, what: &str) -> Running {
    Running::start_until(&mut client(place, &[what]), "busy")
}

fn outcome(done: &Done) -> (i32, &str, &str) {
    (done.code, &done.out, &done.err)
}

#[test]
fn a_terminated_client_is_told_and_the_others_go_on() {
    let place = daemon();
    let (unwanted, mut other) = (busy(&place, "launch"), busy(&place, "work"));
    let server = server(&place);
    let pid = unwanted.pid().to_string();
    let done = place.control(&["terminate_client", &server, &pid]);
    assert_eq!(outcome(&done), (0, "0\n", ""));
    // It was gone when the answer came.
    let list = place.control(&["get_client_list", &server]).out;
    assert_eq!(list, format!("{}\n", other.pid()));
    let ended = unwanted.finish(PATIENCE);
    assert_eq!(outcome(&ended), (1, TERMINATED, ""));
    assert!(!other.has_ended());
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    let log = place.log("server.log");
    assert!(log.contains(&format!("Terminating client {{PID: {pid}, Context ID: 1}}")));
    assert!(log.contains("ended by the server: terminated by the operator"));
    let again = place.control(&["terminate_client", &server, &pid]);
    let missing = format!("Client {pid} of server {server} not found\n1\n");
    assert_eq!((again.code, again.out), (1, missing));
    other.kill();
}

#[test]
fn what_a_terminated_client_had_is_freed() {
    let mut scene = Scene::new();
    let mut peer = scene.peer();
    peer.attach().expect("attach");
    peer.memory(64 << 20).expect("memory");
    // All of this process's sessions have its process id: the observer's ends too.
    let (server, me) = (scene.server().to_string(), std::process::id().to_string());
    let done = scene.place.control(&["terminate_client", &server, &me]);
    assert_eq!(outcome(&done), (0, "0\n", ""));
    assert_eq!(
        peer.await_end(),
        Ok(mpsshim_api::cuda::CUDA_ERROR_MPS_CLIENT_TERMINATED)
    );
    let free = scene.before.free;
    scene.observer = scene.peer();
    scene.observer.attach().expect("attach");
    wait_until("it is free again", || scene.held().free == free);
}

#[test]
fn a_server_ends_after_its_clients_or_at_once() {
    let place = daemon();
    let run = busy(&place, "work");
    let first = server(&place);
    // It waits for the client, and so does the command.
    let waits = {
        let mut command = place.command("mps-control");
        command.args(["shutdown_server", &first]);
        command.stdout(std::process::Stdio::piped());
        command.spawn().expect("mps-control")
    };
    wait_until("the server waits", || {
        let log = place.log("server.log");
        log.contains("Waiting for current clients to finish")
    });
    run.kill();
    let done: Done = waits.wait_with_output().expect("an answer").into();
    assert_eq!((done.code, done.out.as_str()), (0, ""));
    assert_eq!(server(&place), "");
    // The daemon is there; the next client has a new server, which is ended at once.
    let run = busy(&place, "work");
    let second = server(&place);
    assert_ne!(first, second);
    let begun = Instant::now();
    let done = place.control(&["shutdown_server", &second, "-f"]);
    assert_eq!(outcome(&done), (0, "", ""));
    assert!(begun.elapsed() < PATIENCE);
    assert_eq!(run.finish(PATIENCE).code, 1);
    assert_eq!(server(&place), "");
}

#[test]
fn clients_are_listed_by_device_and_by_process() {
    let place = daemon();
    assert_eq!(outcome(&place.control(&["ps"])), (0, "", ""));
    let run = busy(&place, "work");
    let (server, pid) = (server(&place), run.pid());
    let list = place.control(&["get_device_client_list", &server]);
    let mut lines = list.out.lines();
    let device = lines.next().expect("a device");
    assert!(
        device.starts_with("[0] ") && device.contains(".0, "),
        "{device}"
    );
    assert_eq!(lines.next(), Some(format!("{pid}.1").as_str()));
    assert_eq!(place.control(&["get_device_client_list"]).out, list.out);

    let table = place.control(&["ps"]).out;
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(
        rows[0],
        "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND"
    );
    let words: Vec<&str> = rows[1].split_whitespace().collect();
    let namespace = std::fs::read_link("/proc/self/ns/pid").expect("a namespace");
    assert_eq!(words[..3], [&pid.to_string(), "1", &server]);
    assert!(words[3].starts_with("GPU-") && words[3].len() == 22);
    assert_eq!(format!("pid:[{}]", words[4]), namespace.to_string_lossy());
    assert!(words[5].ends_with("client"), "{}", words[5]);
    for of in [&pid.to_string(), &server] {
        assert_eq!(place.control(&["ps", "-p", of]).out, table);
    }
    let nobody = place.control(&["ps", "-p", "99999"]);
    assert_eq!(outcome(&nobody), (1, "Server 99999 not found\n", ""));
    run.kill();
    wait_until("nobody is listed", || place.control(&["ps"]).out.is_empty());
}

#[test]
fn what_cannot_be_done_is_said() {
    let place = daemon();
    for (command, error) in [
        (
            &["terminate_client", "99999", "1"][..],
            "Server 99999 not found",
        ),
        (&["shutdown_server", "99999"], "Server 99999 not found"),
        (
            &["get_device_client_list", "99999"],
            "Server 99999 not found",
        ),
        (
            &["terminate_client", "1", "-7"],
            "\"-7\" is not a process id",
        ),
        (
            &["terminate_client", "1"],
            "the server's process id and the client's expected",
        ),
        (&["shutdown_server"], "Server 0 not found"),
        (&["shutdown_server", "1", "2"], "one process id expected"),
        (&["get_server_status"], "A server PID is required"),
        (&["ps", "-p"], "-p and a process id expected"),
        (&["ps", "-p", "abc"], "Server abc not found"),
    ] {
        let done = place.control(command);
        assert_eq!(done.code, 1, "{command:?}");
        assert!(done.out.contains(error), "{command:?}: {}", done.out);
    }
    // Everyone may look; only the owner may end something.
    if let Some(user) = other_user() {
        for command in [
            &["terminate_client", "1", "1"][..],
            &["shutdown_server", "1"],
        ] {
            let done = place.control_as(user, command);
            assert_eq!(done.code, 1);
            assert!(
                done.out
                    .contains("reserved for root and the user who runs the daemon")
            );
        }
        assert_eq!(place.control_as(user, &["ps"]).code, 0);
    }
}
