//! Several users at the same time, each with a server of its own (`--users apart`).

use mpsshim_api::cuda::{CUDA_ERROR_DEVICE_UNAVAILABLE, CUDA_ERROR_OUT_OF_MEMORY};
use mpsshim_tests::artifacts::{artifact, driver, write_program};
use mpsshim_tests::control_daemon::{
    Client, Place, as_user, has_ended, other_user, two_users, wait_until,
};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::programs::{Running, preloaded};
use mpsshim_tests::scene::{control, daemon_with, daemon_with_options};
use mpsshim_tests::survivors::{ILLEGAL_ADDRESS, Survivor};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

const APART: &[&str] = &["-d", "--users", "apart"];

fn server_of(client: &Client) -> i32 {
    client.welcome().expect("welcome").server_pid as i32
}

fn list(place: &Place, command: &[&str]) -> Vec<Value> {
    let done = place.control(&[command, &["--format=json"]].concat());
    serde_json::from_str(&done.out).unwrap_or_else(|error| panic!("{error}: {}", done.out))
}

/// The server that lists a client of this user.
fn server_in_ps(place: &Place, user: u32) -> i32 {
    let rows = place.ps();
    let row = rows.iter().find(|row| row["uid"] == user.to_string());
    let row = row.unwrap_or_else(|| panic!("no client of user {user} in {rows:?}"));
    row["server"].parse().expect("a process id")
}

fn servers(place: &Place) -> Vec<i32> {
    let text = place.control(&["get_server_list"]).out;
    let pids = text.lines().map(|line| line.parse().expect("a process id"));
    pids.collect()
}

#[test]
fn each_user_has_a_server_at_once() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon_options(APART, &[]);
    let connect = |user| as_user(user, || Client::connect(&place));
    let users = [one, two, 0];
    let served = users.map(|user| {
        let client = connect(user);
        let pid = server_of(&client);
        (client, pid)
    });
    let pids = served.each_ref().map(|(_, pid)| *pid);
    assert_eq!(servers(&place), pids);
    for (user, pid) in users.iter().zip(pids) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
        let line = format!("Uid:\t{user}\t{user}\t{user}\t{user}\n");
        assert!(status.contains(&line), "{status}");
        assert_eq!(server_of(&connect(*user)), pid, "the user's own");
        let started = place.control(&["start_server", "-uid", &user.to_string()]);
        assert_eq!((started.code, started.out.as_str()), (0, ""));
    }
    assert_eq!(servers(&place), pids);
    let info = &list(&place, &["info"])[0];
    assert_eq!(
        (&info["users"], &info["multi_user"], &info["servers"]),
        (&"apart".into(), &false.into(), &3.into())
    );
    let rows = list(&place, &["get_server_list"]);
    let owners: Vec<u64> = rows
        .iter()
        .map(|row| row["uid"].as_u64().expect("uid"))
        .collect();
    assert_eq!(owners, users.map(u64::from));

    // A server without clients stays while it may be needed again, and other servers do not end for it.
    let [(first, _), ..] = served;
    drop(first);
    let clients_of = |pid: i32| {
        let rows = list(&place, &["get_server_list"]);
        let row = rows.into_iter().find(|row| row["pid"] == pid);
        row.map(|row| row["clients"].as_u64())
    };
    wait_until("it is idle", || clients_of(pids[0]) == Some(Some(0)));
    assert_eq!(server_of(&connect(one)), pids[0]);
    assert!(!place.log("control.log").contains("Shutting down idle"));

    // Each is ended by itself.
    let ended = place.control(&["shutdown_server", &pids[1].to_string(), "-f"]);
    assert_eq!(ended.code, 0, "{}", ended.out);
    assert_eq!(servers(&place), [pids[0], pids[2]]);
    let next = server_of(&connect(two));
    assert!(!pids.contains(&next));
    assert_eq!(servers(&place), [pids[0], pids[2], next]);
    assert_eq!(place.control(&["quit", "-t", "0"]).code, 0);
    assert!(
        [pids[0], pids[2], next]
            .iter()
            .all(|pid| has_ended(*pid as u32))
    );
}

#[test]
fn one_user_s_faults_and_ends_leave_the_other_alone() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon_with_options(APART, &[]);
    let start = |user| Survivor::start_as(&place, user, user);
    let (mut first, mut second) = (start(one), start(two));
    let (old, stays) = (server_in_ps(&place, one), server_in_ps(&place, two));
    assert_ne!(old, stays);
    first.round();
    second.round();

    // The server is killed, and its client goes on in the user's next one.
    kill(Pid::from_raw(old), Signal::SIGKILL).expect("kill");
    first.round();
    second.round();
    assert_ne!(server_in_ps(&place, one), old);
    assert_eq!(server_in_ps(&place, two), stays);

    // A kernel faults.
    let old = server_in_ps(&place, one);
    assert_eq!(first.ask("stray"), ILLEGAL_ADDRESS);
    wait_until("the server of the fault has ended", || {
        !servers(&place).contains(&old)
    });
    second.round();
    assert_eq!(server_in_ps(&place, two), stays);
    drop(first);

    // A restart replaces the server of one user.
    let mut first = start(one);
    let old = server_in_ps(&place, one);
    let done = place.control(&["restart_server", &old.to_string()]);
    assert_eq!(done.code, 0, "{}", done.out);
    first.round();
    second.round();
    assert_eq!(server_in_ps(&place, one).to_string(), done.out.trim());
    assert_eq!(server_in_ps(&place, two), stays);
    first.end();
    second.end();
}

#[test]
fn each_user_s_server_has_a_standby() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon_with_options(APART, &[("MPSSHIM_STANDBY", "1")]);
    let start = |user| Survivor::start_as(&place, user, user);
    let mut both = [one, two].map(start);
    wait_until("both standbys wait", || {
        place.log("control.log").matches(" stands by").count() == 2
    });
    assert_eq!(servers(&place).len(), 2, "standbys are not listed");
    both.iter_mut().for_each(Survivor::round);
    let old = [one, two].map(|user| server_in_ps(&place, user));
    for pid in old {
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("kill");
    }
    both.iter_mut().for_each(Survivor::round);
    let new = [one, two].map(|user| server_in_ps(&place, user));
    assert!(new.iter().all(|pid| !old.contains(pid)) && new[0] != new[1]);
    let log = place.log("control.log");
    for (new, old) in new.iter().zip(old) {
        let line = format!("Server {new} goes on with the clients of server {old}");
        assert!(log.contains(&line), "{line} in {log}");
    }
    both.into_iter().for_each(Survivor::end);
}

#[test]
fn limits_of_users_hold_at_their_own_servers() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon_with_options(APART, &[]);
    for (user, amount) in [(one, "64M"), (two, "128M")] {
        let words = [
            "set_user_device_pinned_mem_limit",
            &user.to_string(),
            "0",
            amount,
        ];
        assert_eq!(place.control(&words).code, 0);
    }
    let mib = 1 << 20;
    let mut peers = [one, two].map(|user| {
        let mut peer = as_user(user, || Peer::connect(&control(&place)).expect("peer"));
        peer.attach().expect("attach");
        peer
    });
    peers[0].memory(48 * mib).expect("within the limit");
    let beyond = peers[0].memory(32 * mib).err();
    assert_eq!(beyond, Some(CUDA_ERROR_OUT_OF_MEMORY));
    // The limit of the other user and its memory are its own.
    peers[1].memory(96 * mib).expect("within the limit");
    let beyond = peers[1].memory(48 * mib).err();
    assert_eq!(beyond, Some(CUDA_ERROR_OUT_OF_MEMORY));
    let rows = list(&place, &["users"]);
    let memory = |user: u32| {
        let row = rows.iter().find(|row| row["uid"] == user);
        row.and_then(|row| row["memory"].as_u64())
    };
    assert_eq!([one, two].map(memory), [Some(48 * mib), Some(96 * mib)]);
    let top = place.control(&["top", "--once", "--interval", "0.1"]).out;
    for user in [one, two] {
        let server = server_in_ps(&place, user).to_string();
        let named = place.control(&["get_client_list", &server]);
        assert_eq!(named.out.lines().count(), 1, "{}", named.out);
    }
    let pid = std::process::id().to_string();
    assert_eq!(top.matches(&pid).count(), 2, "{top}");
}

#[test]
fn a_quarantined_program_is_one_user_s() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon_with_options(APART, &[]);
    let program = env!("CARGO_BIN_EXE_survivor");
    let added = place.control(&["quarantine", "add", "-uid", &one.to_string(), program]);
    assert_eq!(added.code, 0, "{}", added.out);
    let start = |user| Survivor::start_as(&place, user, user);
    let both = [one, two].map(start);
    let rows = list(&place, &["ps"]);
    let quarantined = |user: u32| {
        let row = rows.iter().find(|row| row["uid"] == user);
        row.map(|row| row["quarantined"].clone())
    };
    assert_eq!(
        [one, two].map(quarantined),
        [Some(1.into()), Some(0.into())]
    );
    both.into_iter().for_each(Survivor::end);
}

#[test]
fn servers_of_several_users_are_taken_over() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = Place::with_daemon_options(APART, &[]);
    let connect = |user| as_user(user, || Client::connect(&place));
    let clients = [one, two].map(connect);
    let pids = clients.each_ref().map(server_of);
    let pid = place.daemon_pid();
    place.signal_daemon(Signal::SIGKILL);
    wait_until("the daemon has ended", || has_ended(pid));
    assert_eq!(place.control(APART).code, 0);
    wait_until("both are taken over", || {
        let mut found = servers(&place);
        found.sort_unstable();
        let mut expected = pids.to_vec();
        expected.sort_unstable();
        found == expected
    });
    for (user, pid) in [one, two].into_iter().zip(pids) {
        assert_eq!(server_of(&connect(user)), pid);
    }
    assert!(clients.iter().all(Client::is_connected));
}

#[test]
fn a_device_that_admits_one_process_is_refused() {
    if other_user().is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mode = format!("EXCLUSIVE_PROCESS={}/device", folder.path().display());
    // Its servers find softgpu.
    let with = daemon_with(&[("SOFTGPU_COMPUTE_MODE", mode.as_str())]);
    assert_eq!(with.control(&["quit"]).code, 0);
    for (options, code) in [(APART, 1), (&["-d", "--users", "together"][..], 0)] {
        let done = with.control(options);
        assert_eq!(done.code, code, "{}", done.err);
        if code == 1 {
            let said =
                "device 0 is in EXCLUSIVE_PROCESS mode, in which several servers cannot share it";
            assert!(done.err.contains(said), "{}", done.err);
        }
    }
}

#[test]
fn a_device_that_admits_one_process_later_is_refused_to_a_second_user() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).expect("permissions");
    let (script, exclusive, device) = (path("server"), path("exclusive"), path("device"));
    let server = artifact("mps-server");
    let text = format!(
        "#!/bin/sh\n[ -e {exclusive} ] && export SOFTGPU_COMPUTE_MODE=EXCLUSIVE_PROCESS={device}\nexec {} \"$@\"\n",
        server.display()
    );
    write_program(script.as_ref(), &text);
    let driver = driver().display().to_string();
    let env = [
        ("MPSSHIM_SERVER", &*script),
        ("MPSSHIM_CUDA_LIBRARY", &driver),
    ];
    let place = Place::with_daemon_options(APART, &env);
    fs::write(&exclusive, "").expect("write");
    fs::write(&device, "").expect("write");
    fs::set_permissions(&device, Permissions::from_mode(0o666)).expect("permissions");
    let mut works = Survivor::start_as(&place, one, one);
    let refused = as_user(two, || Client::connect(&place));
    let status = refused.welcome().expect("refusal").status;
    assert_eq!(status, CUDA_ERROR_DEVICE_UNAVAILABLE.0);
    let log = place.log("control.log");
    let server = server_in_ps(&place, one);
    let said = format!(
        "device 0 is in EXCLUSIVE_PROCESS mode, in which it admits one server, and server {server} of another user"
    );
    assert!(log.contains(&said), "{log}");
    works.round();
    // The server leaves, and the other user's client finds the device free.
    works.end();
    let ended = place.control(&["shutdown_server", &server.to_string()]);
    assert_eq!(ended.code, 0, "{}", ended.out);
    Survivor::start_as(&place, two, two).end();
}

#[test]
fn a_mistake_in_the_setting_is_explained() {
    let place = Place::new();
    let refused = |options: &[&str], users: Option<&str>| {
        let mut command = place.command("mps-control");
        command.args(options);
        if let Some(users) = users {
            command.env("MPSSHIM_USERS", users);
        }
        let output = command.output().expect("run");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let (code, said) = refused(&["-d"], Some("all"));
    assert_eq!(code, Some(1));
    let expected = "MPSSHIM_USERS=all is not one of serial, apart, together";
    assert!(said.contains(expected), "{said}");
    for (options, expected) in [
        (
            &["-d", "--users", "all"][..],
            "invalid value 'all' for '--users",
        ),
        (&["-d", "--users", "apart", "-M"], "cannot be used with"),
        (&["--users", "apart"], "--users is a daemon option"),
    ] {
        let (code, said) = refused(options, None);
        assert_eq!(code, Some(2), "{options:?}");
        assert!(said.contains(expected), "{said}");
    }
    let Some(user) = other_user() else { return };
    let (code, said) = refused(&["-d", "-S", "--users", "apart"], None);
    assert_eq!(code, Some(1));
    assert!(said.contains("static partitions"), "{said}");
    for users in ["apart", "together"] {
        let done = place.control_as(user, &["-d", "--users", users]);
        assert_eq!(done.code, 1);
        let expected = format!("--users {users} (MPSSHIM_USERS) needs root");
        assert!(done.err.contains(&expected), "{}", done.err);
    }
}

#[test]
fn programs_of_two_users_work_at_the_same_time() {
    let Some([one, two]) = two_users() else {
        return;
    };
    // The environment, and an option that goes before it.
    let place = daemon_with_options(&["-d"], &[("MPSSHIM_USERS", "apart")]);
    let start = |user| {
        let mut command = preloaded(env!("CARGO_BIN_EXE_survivor"), place.pipe());
        as_user(user, || Running::start_until(&mut command, "started"))
    };
    let mut both = [one, two].map(start);
    for round in 2..5 {
        for running in &mut both {
            running.say("round");
            assert!(running.line().starts_with(&format!("ok {round} ")));
        }
    }
    assert_eq!(servers(&place).len(), 2);
    drop(both);
    let place = Place::new();
    let mut command = place.command("mps-control");
    let started = command
        .args(["-d", "--users", "serial"])
        .env("MPSSHIM_USERS", "apart");
    assert!(started.status().expect("run").success());
    assert_eq!(list(&place, &["info"])[0]["users"], "serial");
}

#[test]
fn work_of_a_user_with_a_small_weight_is_held_back_while_another_has_work() {
    let Some([heavy, light]) = two_users() else {
        return;
    };
    let place = daemon_with_options(APART, &[]);
    let set = |user: u32, weight: &str| {
        let done = place.control(&["set_user_weight", &user.to_string(), weight]);
        assert_eq!((done.code, done.out.as_str()), (0, ""), "{}", done.err);
    };
    let rows = || list(&place, &["get_user_weight"]);
    let of = |user: u32, key: &str| {
        let row = rows().into_iter().find(|row| row["uid"] == user);
        row.and_then(|row| row[key].as_u64())
    };
    set(heavy, "800");
    set(light, "50");
    let text = place.control(&["get_user_weight"]).out;
    assert_eq!(
        text,
        format!("100\n{}\n", {
            let mut lines = [(heavy, 800), (light, 50)];
            lines.sort_unstable();
            lines
                .map(|(user, weight)| format!("{user} {weight}"))
                .join("\n")
        })
    );
    let one = place.control(&["get_user_weight", &light.to_string()]);
    assert_eq!(one.out, "50\n");

    // One user alone is not held back, however small its weight.
    let start = |user: u32| {
        let mut command = preloaded(artifact("nbody"), place.pipe());
        command.args(["-benchmark", "-numbodies=64", "-i=1000000"]);
        Running::start(command.uid(user).gid(user))
    };
    let has_launched = |user: u32| {
        let rows = list(&place, &["ps"]);
        let row = rows.into_iter().find(|row| row["uid"] == user);
        row.and_then(|row| row["launches"].as_u64()).unwrap_or(0)
    };
    let second = start(light);
    wait_until("the light user works", || has_launched(light) > 100);
    assert_eq!(of(light, "holds"), Some(0));
    let first = start(heavy);
    wait_until("the light user's work is held back", || {
        of(light, "holds").is_some_and(|holds| holds >= 3)
    });
    let before = [heavy, light].map(has_launched);
    wait_until("both get on all the same", || {
        let now = [heavy, light].map(has_launched);
        now[0] > before[0] + 100 && now[1] > before[1]
    });

    // A daemon that takes the servers over knows the weights.
    let pid = place.daemon_pid();
    place.signal_daemon(Signal::SIGKILL);
    wait_until("the daemon has ended", || has_ended(pid));
    assert_eq!(place.control(APART).code, 0);
    wait_until("both weights are there again", || {
        [heavy, light].map(|user| of(user, "weight")) == [Some(800), Some(50)]
    });
    wait_until("they apply again", || {
        of(light, "holds").is_some_and(|holds| holds >= 1)
    });

    // Without them nobody waits.
    for user in [heavy, light] {
        set(user, "none");
    }
    let before = has_launched(light);
    wait_until("the light user gets on", || {
        has_launched(light) > before + 100
    });
    assert_eq!(place.control(&["get_user_weight"]).out, "100\n");
    drop((first, second));
}

#[test]
fn weights_of_users_need_servers_at_the_same_time() {
    for users in ["serial", "together"] {
        if users == "together" && other_user().is_none() {
            continue;
        }
        let place = Place::with_daemon_options(&["-d", "--users", users], &[]);
        let done = place.control(&["set_user_weight", "1000", "300"]);
        assert_eq!(done.code, 1);
        let said = format!(
            "weights of users apply with --users apart, and this daemon has --users {users}"
        );
        assert!(
            done.err.contains(&said) || done.out.contains(&said),
            "{}{}",
            done.out,
            done.err
        );
        assert_eq!(place.control(&["get_user_weight"]).out, "100\n");
    }
}
