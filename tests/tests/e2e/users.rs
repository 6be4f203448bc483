//! Several users, one after the other and all at once; who may do what, and how refusals are logged.

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_MPS_MAX_CLIENTS_REACHED};
use mpsshim_control::seqpacket;
use mpsshim_proto::message::memory::{IpcOpen, IpcOpened, Opaque};
use mpsshim_proto::message::{HostAlloc, Op};
use mpsshim_tests::PATIENCE;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{
    Client, Place, SERVER_NOT_READY, as_user, other_user, refused_status, two_users, wait_until,
};
use mpsshim_tests::peer::{Peer, memset};
use mpsshim_tests::programs::{Running, preloaded, well};
use mpsshim_tests::scene::{control, daemon_with, daemon_with_options};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

fn server_of(client: &Client) -> u32 {
    client.welcome().expect("welcome").server_pid
}

#[test]
fn one_server_for_all_users_at_once() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon_options(&["-d", "-M"], &[]);
    let users = [one, two, 0];
    let clients = users.map(|user| as_user(user, || Client::connect(&place)));
    let server = server_of(&clients[0]);
    for client in &clients[1..] {
        assert_eq!(server_of(client), server);
    }
    assert_eq!(
        place.control(&["get_server_list"]).out,
        format!("{server}\n")
    );
    let status = fs::read_to_string(format!("/proc/{server}/status")).expect("status");
    assert!(status.contains("Uid:\t0\t0\t0\t0\n"), "{status}");
    let listed = place.control(&["get_client_list", &server.to_string()]).out;
    assert_eq!(listed.lines().count(), 3, "{listed}");
    let log = place.log("control.log");
    assert!(log.contains(&format!("Starting new server {server} for all users\n")));
    let me = std::process::id();
    for user in users {
        assert!(
            log.contains(&format!("NEW CLIENT {me} from user {user}: ")),
            "{log}"
        );
    }
    // Its server is there already.
    let started = place.control(&["start_server", "-uid", &two.to_string()]);
    assert_eq!((started.code, started.out.as_str()), (0, ""));
    assert_eq!(place.control(&["get_server_list"]).out.lines().count(), 1);
}

/// `users` as rows: uid, clients, those that wait, device memory, pinned memory.
fn accounts(place: &Place) -> Vec<[u64; 5]> {
    let done = place.control(&["users", "--format=json"]);
    let rows: serde_json::Value = serde_json::from_str(&done.out).expect(&done.out);
    let names = ["uid", "clients", "waiting", "memory", "pinned_host_memory"];
    let row = |row: &serde_json::Value| names.map(|name| row[name].as_u64().unwrap_or(u64::MAX));
    rows.as_array().expect("rows").iter().map(row).collect()
}

#[test]
fn what_users_have_is_added_up() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon_with_options(&["-d", "-M"], &[]);
    assert_eq!(place.control(&["users"]).out, "");
    let peer = |user, memory: u64, pinned: u64| {
        let mut peer = as_user(user, || Peer::connect(&control(&place)).expect("peer"));
        peer.attach().expect("attach");
        peer.memory(memory).expect("device memory");
        let body = HostAlloc {
            len: pinned,
            ..HostAlloc::default()
        };
        peer.ask_as(1, Op::HostAlloc, &body, &[]).expect("pinned");
        peer
    };
    let mib = 1 << 20;
    let mut peers = vec![
        peer(one, 64 * mib, 4 * mib),
        peer(two, 32 * mib, 8 * mib),
        peer(one, 16 * mib, 2 * mib),
    ];
    let mut users = [
        [one.into(), 2, 0, 80 * mib, 6 * mib],
        [two.into(), 1, 0, 32 * mib, 8 * mib],
    ];
    users.sort_unstable();
    assert_eq!(accounts(&place), users);
    let table = place.control(&["users"]).out;
    assert!(table.contains("80.0M") && table.contains("GPU-"), "{table}");
    // Anyone may look.
    assert_eq!(place.control_as(two, &["users"]).out, table);
    peers.remove(1);
    wait_until("one has gone", || accounts(&place).len() == 1);
    drop(peers);
    wait_until("all have gone", || accounts(&place).is_empty());
}

#[test]
fn clients_that_wait_are_their_user_s_too() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon();
    let first = as_user(one, || Client::connect(&place));
    server_of(&first);
    let _waiting = [(); 2].map(|()| as_user(two, || Client::connect(&place)));
    let mut users = [[one.into(), 1, 0, 0, 0], [two.into(), 0, 2, 0, 0]];
    users.sort_unstable();
    wait_until("both are listed", || accounts(&place) == users);
}

#[test]
fn servers_for_all_users_that_cannot_start_are_given_up_for_all() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon_options(&["-d", "-M"], &[("FAKE_SERVER", "crash")]);
    let clients = [one, two].map(|user| as_user(user, || Client::connect(&place)));
    for client in clients {
        assert_eq!(client.welcome().expect("refusal").status, 805);
    }
    let log = place.log("control.log");
    assert_eq!(log.matches("Starting new server").count(), 3, "{log}");
    assert!(log.contains("3 servers for all users failed"), "{log}");
}

#[test]
fn the_option_has_nvidia_s_spelling_too() {
    let Some(user) = other_user() else { return };
    let log = {
        let place = Place::with_daemon_options(&["-d", "-multiuser-server"], &[]);
        as_user(user, || server_of(&Client::connect(&place)));
        place.log("control.log")
    };
    assert!(log.contains("for all users"), "{log}");
    let place = Place::new();
    let mut command = place.command("mps-control");
    let daemon = Running::start(command.args(["-f", "-multiuser-server"]));
    wait_until("it listens", || place.pipe().join("control").exists());
    assert_eq!(place.control(&["start_server", "-uid", "1"]).code, 0);
    wait_until("its server starts", || {
        place.log("control.log").contains("for all users")
    });
    assert_eq!(place.control(&["quit"]).code, 0);
    assert_eq!(daemon.finish(PATIENCE).code, 0);
    // It is an option of the daemon, and of root's.
    let place = Place::new();
    assert_eq!(place.control(&["-M"]).code, 2);
    let refused = place.control_as(user, &["-d", "-M"]);
    assert_eq!(refused.code, 1);
    assert!(refused.err.contains("as root"), "{}", refused.err);
    // After a command it is the command's.
    let answer = place.control(&["get_server_list", "-multiuser-server"]);
    assert_eq!(answer.err, "Cannot find MPS control daemon process\n");
}

#[test]
fn another_user_waits_until_the_server_is_idle() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon();
    let connect = |user| as_user(user, || Client::connect(&place));
    let first = connect(one);
    let server = server_of(&first);
    let (waiting, late) = (connect(two), connect(two));
    assert!(waiting.is_kept_waiting());
    // Who has a server is served on: the ranks of a parallel program belong together.
    let second = connect(one);
    assert_eq!(server_of(&second), server);
    drop(first);
    assert!(waiting.is_kept_waiting());
    // The state of a server that is to end is ACTIVE as long as clients are there.
    let status = place.control(&["get_server_status", &server.to_string()]);
    assert_eq!(status.out, "ACTIVE\n");
    drop(second);
    let next = server_of(&waiting);
    assert_ne!(next, server);
    assert_eq!(server_of(&late), next);
    let log = place.log("control.log");
    for line in [
        format!("Shutting down idle server {server} of user {one} for user {two}"),
        format!("Server {server} exited with status 0"),
        format!("Starting new server {next} for user {two}"),
    ] {
        assert_eq!(log.matches(&line).count(), 1, "{line} in {log}");
    }
}

/// Two n-body processes of different users, and whether both had contexts at the same time.
fn two_nbody_overlap(place: &Place, users: [u32; 2]) -> bool {
    let start = |user| {
        let mut command = preloaded(artifact("nbody"), place.pipe());
        command.args(["-benchmark", "-numbodies=256", "-i=200"]);
        Running::start(command.uid(user).gid(user))
    };
    let both = users.map(start);
    let pids = both.each_ref().map(Running::pid);
    for run in both {
        let out = well(&run.finish(PATIENCE));
        assert!(out.contains("256 bodies, total time for 200 it"), "{out}");
    }
    let gone = pids.map(|pid| format!("Client process {pid} disconnected"));
    wait_until("both have gone", || {
        let log = place.log("server.log");
        gone.iter().all(|line| log.contains(line))
    });
    let log = place.log("server.log");
    let at = |what: &str| log.find(what).unwrap_or_else(|| panic!("{what} in {log}"));
    let came = pids.map(|pid| at(&format!("Client {{PID: {pid}, Context ID: ")));
    let gone = gone.each_ref().map(|line| at(line));
    came[0].max(came[1]) < gone[0].min(gone[1])
}

#[test]
fn programs_of_two_users_run_one_after_the_other() {
    let Some(users) = two_users() else { return };
    let place = daemon_with(&[]);
    assert!(!two_nbody_overlap(&place, users));
    let log = place.log("control.log");
    for user in users {
        let started = log
            .lines()
            .filter(|line| line.contains("Starting new server"))
            .filter(|line| line.ends_with(&format!(" for user {user}")));
        assert_eq!(started.count(), 1, "{log}");
    }
}

#[test]
fn programs_of_two_users_run_at_the_same_time_on_a_server_for_all() {
    let Some(users) = two_users() else { return };
    let place = daemon_with_options(&["-d", "-M"], &[]);
    assert!(two_nbody_overlap(&place, users));
    let log = place.log("control.log");
    assert_eq!(log.matches("Starting new server").count(), 1, "{log}");
}

#[test]
fn every_refusal_names_user_and_process() {
    let place = daemon_with(&[("MPSSHIM_MAX_CLIENTS", "1")]);
    let (me, uid) = (std::process::id(), place.uid());
    assert_eq!(refused_status(&place, b"nonsense"), Some(805));
    let only = Peer::connect(&control(&place)).expect("the first");
    let error = Peer::connect(&control(&place)).err().expect("one too many");
    assert_eq!(
        error.to_string(),
        CUDA_ERROR_MPS_MAX_CLIENTS_REACHED.to_string()
    );
    let mut expected = vec![
        format!("Connection of process {me} of user {uid} refused with status 805: 8 bytes"),
        format!(
            "Server {} refused client {me} of user {uid} with status 808: ",
            only.welcome.server_pid
        ),
    ];
    if let Some(user) = other_user() {
        let commands: [&[&str]; 4] = [
            &["quit"],
            &["start_server", "-uid", "0"],
            &["shutdown_server", "1", "-f"],
            &["terminate_client", "1", "1"],
        ];
        for command in commands {
            let name = command[0];
            assert_eq!(place.control_as(user, command).code, 1);
            expected.push(format!(
                " of user {user} refused: {name} is reserved for root and "
            ));
        }
    }
    wait_until("all are logged", || {
        let log = place.log("control.log");
        expected.iter().all(|line| log.contains(line))
    });
}

/// The socket's permissions keep others out; were they to be opened, by whoever may, who is at the other end still counts.
#[test]
fn the_privileged_socket_asks_who_comes() {
    let Some(user) = other_user() else { return };
    let place = Place::with_daemon();
    let client = Client::connect(&place);
    let server = server_of(&client);
    let socket = place.pipe().join("control_privileged");
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o777)).expect("chmod");
    // The one that the command takes where it can.
    as_user(user, || seqpacket::connect(&socket)).expect("anyone can connect there now");
    for command in [
        &["shutdown_server", &server.to_string(), "-f"],
        &["quit"][..],
    ] {
        let refused = place.control_as(user, command);
        assert_eq!(refused.code, 1, "{command:?}");
        assert!(
            refused.out.contains("is reserved for root and "),
            "{command:?}: {} {}",
            refused.out,
            refused.err
        );
    }
    assert!(client.is_connected());
    // Looking is for all, and root is who it was.
    assert_eq!(place.control_as(user, &["get_server_list"]).code, 0);
    assert_eq!(place.control(&["quit", "-t", "0"]).code, 0);
}

#[test]
fn memory_is_opened_by_clients_of_its_user_alone() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon_with_options(&["-d", "-M"], &[]);
    let peer = |user| {
        let mut peer = as_user(user, || Peer::connect(&control(&place)).expect("peer"));
        peer.attach().expect("attach");
        peer
    };
    let mut owner = peer(one);
    let range = owner.memory(2 << 20).expect("memory");
    let handle: Opaque = owner.ask(Op::IpcShare, &range, &[]).expect("a handle");
    let open = |user| {
        let body = IpcOpen {
            handle,
            ..IpcOpen::default()
        };
        let mut peer = peer(user);
        let opened = peer.ask::<_, IpcOpened>(Op::IpcOpen, &body, &[]);
        let stream = peer.stream().expect("a stream");
        let body = memset(range.start, 7, 4, stream);
        peer.post(Op::Memset, &body, &[]).expect("a session");
        let touched = peer.finish(stream);
        (opened.map(|opened| (opened.start, opened.len)), touched)
    };
    let no = CUDA_ERROR_INVALID_VALUE;
    assert_eq!(open(two), (Err(no), Err(no)));
    // Root's client is one of another user, too.
    assert_eq!(open(0), (Err(no), Err(no)));
    assert_eq!(open(one), (Ok((range.start, range.len)), Ok(())));
}

#[test]
fn a_user_s_daemon_logs_whom_it_refuses() {
    let Some(user) = other_user() else { return };
    let mut place = Place::new();
    place.become_user(user);
    assert_eq!(place.control(&["-d"]).code, 0);
    let refused = Client::connect(&place).welcome().expect("refusal");
    assert_eq!(refused.status, SERVER_NOT_READY);
    let me = std::process::id();
    let line = format!("Client {me} from user 0 refused with status 807: this daemon does not");
    assert!(place.log("control.log").contains(&line));
    // Root may do there what the owner may.
    let root = place.command_of_root("mps-control", &["quit", "-t", "0"]);
    assert_eq!((root.code, root.err.as_str()), (0, ""));
}

#[test]
fn a_client_too_many_is_told_so_and_one_that_leaves_makes_room() {
    let place = daemon_with(&[("MPSSHIM_MAX_CLIENTS", "3")]);
    let mut peers: Vec<Peer> = (0..3)
        .map(|_| Peer::connect(&control(&place)).expect("room"))
        .collect();
    for _ in 0..2 {
        let error = Peer::connect(&control(&place)).err().expect("too many");
        assert!(error.to_string().contains("(808)"), "{error}");
    }
    peers.pop();
    wait_until("there is room again", || {
        Peer::connect(&control(&place)).is_ok()
    });
    let zero = Place::new();
    let mut command = zero.command("mps-control");
    let refused = command.arg("-d").env("MPSSHIM_MAX_CLIENTS", "0").output();
    let refused = refused.expect("run");
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(said, "MPSSHIM_MAX_CLIENTS=0 must be a positive integer\n");
}
