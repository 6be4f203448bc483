//! Servers that an operator creates under a name (`-p 3`, `server create`), with clients on softgpu.

use mpsshim_tests::artifacts::{artifact, driver};
use mpsshim_tests::control_daemon::{Client, Place, as_user, has_ended, other_user, wait_until};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::programs::{preloaded, succeed};
use mpsshim_tests::scene::{control, daemon_with, daemon_with_options};
use mpsshim_tests::survivors::Survivor;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};

/// Devices that a program sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// Two devices of 4 GiB.
pub const TWO: (&str, &str) = ("SOFTGPU_DEVICES", "2");

/// Exit status and text of a command of interface 3.
pub fn ask(place: &Place, line: &str) -> (i32, String) {
    let words: Vec<&str> = ["-p", "3"].into_iter().chain(line.split(' ')).collect();
    let done = place.control(&words);
    assert_eq!(done.err, "", "{line}");
    (done.code, done.out)
}

pub fn succeeds(place: &Place, line: &str) -> String {
    let (code, text) = ask(place, line);
    assert_eq!(code, 0, "{line}: {text}");
    text
}

/// A command that prints nothing.
pub fn does(place: &Place, line: &str) {
    assert_eq!(ask(place, line), (0, String::new()), "{line}");
}

pub fn fails(place: &Place, line: &str, expected: &str) {
    assert_eq!(ask(place, line), (1, format!("{expected}\n")), "{line}");
}

fn field(place: &Place, server: &str, name: &str) -> String {
    let text = succeeds(place, &format!("server get {server} {name}"));
    text.trim_end().to_owned()
}

fn gate(place: &Place, server: &str) -> PathBuf {
    place.pipe().join(server).join("control")
}

/// A client that has a context. The server reports a client after it has answered it.
fn attached(place: &Place, server: &str) -> Peer {
    let socket = match server.starts_with("uid_") {
        true => control(place),
        false => gate(place, server),
    };
    let mut peer = Peer::connect(&socket).expect("a client");
    peer.attach().expect("attach");
    wait_until("the client is listed", || {
        !clients(place, server).is_empty()
    });
    peer
}

/// The rows of a server's clients.
fn clients(place: &Place, server: &str) -> String {
    succeeds(
        place,
        &format!("client list --server={server} --format=csv,noheader"),
    )
}

fn uuid(place: &Place, ordinal: usize) -> String {
    let list = succeeds(place, "device list --format=csv,noheader");
    let row = list.lines().nth(ordinal).expect("a device");
    row.split(',').nth(3).expect("a UUID").to_owned()
}

/// The output of `limited show` in this pipe directory.
fn shown(pipe: &Path, variables: &[(&str, &str)]) -> String {
    let mut command = preloaded(artifact("limited"), pipe);
    command.arg("show");
    command.env_remove("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    command.envs(variables.iter().copied());
    succeed(&mut command)
}

fn number(shown: &str, name: &str) -> u64 {
    let line = shown.lines().find_map(|line| line.strip_prefix(name));
    let number = line.unwrap_or_else(|| panic!("no {name} in {shown}"));
    number.trim().parse().expect("a number")
}

#[test]
fn several_servers_have_clients_devices_and_limits_of_their_own() {
    let place = daemon_with(&[TWO]);
    let (first, second) = (uuid(&place, 0), uuid(&place, 1));
    does(&place, "server create train --allowed-devices=1");
    does(&place, "server create both --allowed-devices=1,0");
    let usual = format!("uid_{}", place.uid());
    let names = [usual.as_str(), "train", "both"];
    let connected = names.map(|name| attached(&place, name));
    let pids = names.map(|name| field(&place, name, "pid"));
    let pipe = place.pipe().display();
    let uid = place.uid();
    let expected = [
        format!("train,{uid},{},ACTIVE,{pipe}/train,{second},1", pids[1]),
        format!(
            "both,{uid},{},ACTIVE,{pipe}/both,\"{second},{first}\",1",
            pids[2]
        ),
        format!("{usual},{uid},{},ACTIVE,{pipe},all,1", pids[0]),
    ];
    let listed = succeeds(&place, "server list --format=csv,noheader");
    assert_eq!(listed.lines().collect::<Vec<_>>(), expected);
    let own = std::process::id();
    for (name, devices) in
        names
            .iter()
            .zip([vec![&first, &second], vec![&second], vec![&second, &first]])
    {
        let rows = clients(&place, name);
        let found: Vec<&str> = rows
            .lines()
            .map(|row| row.split(',').nth(2).expect("a device"))
            .collect();
        assert_eq!(found, devices);
        assert!(
            rows.lines()
                .all(|row| row.starts_with(&format!("{own},{name},"))),
            "{rows}"
        );
    }

    // The commands of interface 2 list all of them, with the daemon's ordinals.
    let mut listed: Vec<String> = place
        .control(&["get_server_list"])
        .out
        .lines()
        .map(str::to_owned)
        .collect();
    listed.sort();
    let mut sorted = pids.to_vec();
    sorted.sort();
    assert_eq!(listed, sorted);
    let rows = place.ps();
    let of_train: Vec<_> = rows.iter().filter(|row| row["server"] == pids[1]).collect();
    assert_eq!(of_train.len(), 1);
    assert_eq!(
        (of_train[0]["device"].as_str(), &of_train[0]["uuid"]),
        ("1", &second)
    );
    let top = place.control(&["top", "--once", "--json"]);
    assert_eq!((top.code, top.err.as_str()), (0, ""));
    assert!(
        pids.iter().all(|pid| top.out.contains(pid.as_str())),
        "{}",
        top.out
    );
    let doctor = place.control(&["doctor"]).out;
    assert!(!doctor.contains("error"), "{doctor}");

    // Limits count for the server's own devices and clients.
    does(
        &place,
        "server set train --pinned-memory-limit=1=256M --active-thread-percentage=50 --client-priority=1",
    );
    does(&place, "server set both --pinned-memory-limit=512M");
    for (server, limit) in [
        ("train", "1=256M"),
        ("both", "0=512M,1=512M"),
        (usual.as_str(), ""),
    ] {
        assert_eq!(field(&place, server, "pinned-memory-limit"), limit);
    }
    assert_eq!(field(&place, "train", "active-thread-percentage"), "50.0");
    assert_eq!(field(&place, "train", "client-priority"), "1");
    let get = place
        .control(&["get_device_pinned_mem_limit", &pids[1], "1"])
        .out;
    assert_eq!(get, "256M\n");
    let refused = place.control(&["get_device_pinned_mem_limit", &pids[1], "0"]);
    let expected = format!("Server {} does not have device 0\n", pids[1]);
    assert_eq!((refused.code, refused.out), (1, expected));
    let sees = [TWO, (VISIBLE, second.as_str())];
    for (server, total) in [("train", 256), ("both", 512), ("", 4096)] {
        let shown = shown(&place.pipe().join(server), &sees);
        for name in ["total", "of the device"] {
            assert_eq!(number(&shown, name), total, "{server}: {shown}");
        }
        assert!(number(&shown, "free") <= total);
    }
    let half = number(
        &shown(&place.pipe().join("train"), &sees),
        "multiprocessors ",
    );
    let all = number(
        &shown(&place.pipe().join("both"), &sees),
        "multiprocessors ",
    );
    assert_eq!(half * 2, all);
    // A program can only lower them.
    let lower = shown(
        &place.pipe().join("both"),
        &[
            sees[0],
            sees[1],
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G"),
        ],
    );
    assert_eq!(number(&lower, "total"), 512);
    does(&place, "server set both --pinned-memory-limit=none");
    assert_eq!(
        number(&shown(&place.pipe().join("both"), &sees), "total"),
        4096
    );

    // A server ends by itself, and starts again with its next client and its limits.
    drop(connected);
    assert_eq!(place.control(&["shutdown_server", &pids[1]]).code, 0);
    let stopped = format!("train,{uid},,STOPPED,{pipe}/train,{second},\n");
    assert_eq!(
        succeeds(&place, "server list train --format=csv,noheader"),
        stopped
    );
    assert_eq!(
        number(&shown(&place.pipe().join("train"), &sees), "total"),
        256
    );
    assert_ne!(field(&place, "train", "pid"), pids[1]);

    // All end with the daemon, and no folder is left.
    assert_eq!(place.control(&["quit", "-t", "5"]).code, 0);
    assert_eq!(
        place.list(),
        ["control", "control_lock", "control_privileged", "logs"]
    );
}

#[test]
fn a_server_with_clients_is_deleted_by_force_only() {
    let place = daemon_with(&[]);
    does(&place, "server create a");
    let mut client = attached(&place, "a");
    let server = field(&place, "a", "pid");
    let own = std::process::id();
    fails(
        &place,
        "server delete a",
        &format!("server delete: server a has clients ({own}); end them first, or give --force"),
    );
    assert!(client.mem_info().is_ok());
    does(&place, "server delete a --force");
    assert!(has_ended(server.parse().expect("a process id")));
    assert!(!place.pipe().join("a").exists());
    fails(
        &place,
        "server get a pid",
        "Server \"a\" not found; server list lists the servers",
    );
    // The name is free again, and a server without clients goes without force.
    does(&place, "server create a");
    let program = Survivor::start_in(&place.pipe().join("a"), &[]);
    wait_until("the client is listed", || !clients(&place, "a").is_empty());
    let rows = clients(&place, "a");
    let pid = rows.split(',').next().expect("a process id").to_owned();
    does(&place, &format!("client terminate {pid}"));
    assert_eq!(succeeds(&place, "client list --format=csv,noheader"), "");
    drop(program);
    does(&place, "server delete a");
    assert_eq!(succeeds(&place, "server list --format=csv,noheader"), "");
}

#[test]
fn mistakes_create_nothing() {
    let place = daemon_with(&[TWO]);
    does(&place, "server create a");
    let name = "is no name: a name has 1 to 64 of the characters a-z, 0-9 and _";
    let long = "x".repeat(65);
    for (line, expected) in [
        ("server create A", format!("server create: \"A\" {name}")),
        ("server create ../a", format!("server create: \"../a\" {name}")),
        (&format!("server create {long}"), format!("server create: \"{long}\" {name}")),
        (
            "server create control",
            "server create: the name control is reserved: the daemon has files or servers of such names".to_owned(),
        ),
        (
            "server create uid_7",
            "server create: the name uid_7 is reserved: the daemon has files or servers of such names".to_owned(),
        ),
        ("server create a", "server create: there is a server a already".to_owned()),
        (
            "server create b --allowed-devices=0,7",
            "server create: Device 7 not found; device list lists the devices".to_owned(),
        ),
        (
            "server create b --allowed-devices=1,1",
            "server create: device 1 is given twice".to_owned(),
        ),
        (
            "server create b --uid=4000000000",
            match other_user() {
                Some(_) => "server create: there is no user with id 4000000000".to_owned(),
                None => {
                    "server create: this daemon does not run as root and cannot start a server for user 4000000000"
                        .to_owned()
                }
            },
        ),
        (
            "server set nn --client-priority=1",
            "server set: Server \"nn\" not found; server list lists the servers".to_owned(),
        ),
        (
            "server set a",
            "server set: at least one option expected; usage: server set NAME \
             [--uid=UID] [--pinned-memory-limit=AMOUNT|DEVICE=AMOUNT,...|none] \
             [--active-thread-percentage=PERCENTAGE] [--client-priority=PRIORITY]"
                .to_owned(),
        ),
        (
            "server create b --locality-domains",
            "server create: devices are not divided into locality domains here; leave out --locality-domains; usage: \
             server create NAME [--uid=UID] [--allowed-devices=DEVICE,...] [--locality-domains]"
                .to_owned(),
        ),
        (
            "server set a --uid=4000000000",
            match other_user() {
                Some(_) => "server set: there is no user with id 4000000000".to_owned(),
                None => {
                    "server set: this daemon does not run as root and cannot start a server for user 4000000000"
                        .to_owned()
                }
            },
        ),
        (
            "server set nn --uid=0",
            "server set: Server \"nn\" not found; server list lists the servers".to_owned(),
        ),
        (
            "server set a --pinned-memory-limit=9=1G",
            "server set: Device 9 not found; device list lists the devices".to_owned(),
        ),
        (
            "server delete nn",
            "server delete: Server \"nn\" not found among those that were created; server list lists the servers"
                .to_owned(),
        ),
    ] {
        fails(&place, line, &expected);
    }
    for (line, part) in [
        (
            "server set a --active-thread-percentage=0",
            "\"0\": a percentage is a number above 0 and at most 100; usage: ",
        ),
        (
            "server set a --client-priority=2",
            "\"2\": a priority is 0 or 1; usage: ",
        ),
        (
            "server set a --pinned-memory-limit=1=x",
            "\"1=x\" is not DEVICE=AMOUNT; usage: ",
        ),
    ] {
        let (code, text) = ask(&place, line);
        assert!(
            code == 1 && text.starts_with(&format!("server set: {part}")),
            "{text}"
        );
    }
    let folders: Vec<String> = place
        .list()
        .into_iter()
        .filter(|name| name.len() == 1)
        .collect();
    assert_eq!(folders, ["a"]);
    assert_eq!(field(&place, "a", "pinned-memory-limit"), "");
    // A device of another server's.
    does(&place, "server create one --allowed-devices=1");
    fails(
        &place,
        "server set one --pinned-memory-limit=0=1G",
        "server set: the server has no device 0",
    );
    if let Some(user) = other_user() {
        let refused = place.control_as(user, &["-p", "3", "server", "create", "mine"]);
        let expected = "server create is reserved for root and the user who runs the daemon\n";
        assert_eq!((refused.code, refused.out.as_str()), (1, expected));
    }
}

#[test]
fn a_server_serves_one_user() {
    let Some(user) = other_user() else {
        return eprintln!("not root: two users are not tested");
    };
    let place = Place::with_daemon();
    does(&place, &format!("server create theirs --uid={user}"));
    does(&place, "server create own");
    let connect = |gate: &str| {
        let path = place.pipe().join(gate).join("control");
        Client::at(&path).welcome().expect("welcome")
    };
    let theirs = as_user(user, || connect("theirs"));
    assert_eq!(
        field(&place, "theirs", "pid"),
        theirs.server_pid.to_string()
    );
    let status = fs::read_to_string(format!("/proc/{}/status", theirs.server_pid)).expect("status");
    assert!(status.contains(&format!("Uid:\t{user}\t")), "{status}");
    // Both work at the same time, though the daemon serves one user after the other.
    assert_eq!(connect("own").status, 0);
    assert_eq!(connect("theirs").status, 807);
    assert_eq!(as_user(user, || connect("own")).status, 807);
    let log = place.log("control.log");
    let reason =
        format!("from user 0 refused with status 807: server theirs serves user {user} only");
    assert!(log.contains(&reason), "{log}");
}

#[test]
fn the_user_of_a_server_is_changed_while_it_has_no_clients() {
    let Some(user) = other_user() else {
        return eprintln!("not root: two users are not tested");
    };
    let place = daemon_with(&[]);
    does(&place, "server create a");
    does(&place, "server set a --client-priority=1");
    let client = attached(&place, "a");
    let own = std::process::id();
    fails(
        &place,
        &format!("server set a --uid={user} --client-priority=0"),
        &format!(
            "server set: server a has clients ({own}), and its user can be changed once they have ended"
        ),
    );
    let state = |place: &Place| ["uid", "client-priority"].map(|name| field(place, "a", name));
    assert_eq!(state(&place), ["0", "1"], "nothing is set");
    let before = field(&place, "a", "pid");
    // The same user ends nothing, clients or not.
    does(&place, "server set a --uid=0");
    assert_eq!(field(&place, "a", "pid"), before);
    drop(client);
    wait_until("the client has gone", || clients(&place, "a").is_empty());
    does(&place, &format!("server set a --uid={user}"));
    // The command returns when the process of the former user has ended.
    assert!(has_ended(before.parse().expect("a number")));
    assert_eq!(state(&place), [user.to_string(), "1".to_owned()]);
    let socket = gate(&place, "a");
    assert_eq!(Client::at(&socket).welcome().expect("welcome").status, 807);
    as_user(user, || {
        let mut client = Peer::connect(&socket).expect("a client");
        client.attach().expect("attach");
    });
    let status = format!("/proc/{}/status", field(&place, "a", "pid"));
    let status = fs::read_to_string(status).expect("status");
    assert!(status.contains(&format!("Uid:\t{user}\t")), "{status}");
    let usual = attached(&place, "uid_0");
    fails(
        &place,
        "server set uid_0 --uid=0",
        "server set: Server \"uid_0\" not found among those that were created; server list lists the servers",
    );
    drop(usual);
}

#[test]
fn servers_that_cannot_share_are_refused() {
    let place = daemon_with_options(&["-d", "--mode", "proxy,1=direct"], &[TWO]);
    fails(
        &place,
        "server create a --allowed-devices=0",
        "server create: the daemon's --mode names devices, which excludes --allowed-devices; choose one mode for all devices",
    );
    does(&place, "server create a");
    let lock = format!("EXCLUSIVE_PROCESS={}/device", place.path().display());
    let exclusive = daemon_with(&[("SOFTGPU_COMPUTE_MODE", lock.as_str())]);
    let (code, text) = ask(&exclusive, "server create a");
    let expected = "server create: device 0 is in EXCLUSIVE_PROCESS mode, in which several servers cannot share it; ";
    assert!(code == 1 && text.starts_with(expected), "{text}");
}

#[test]
fn clients_go_on_in_the_next_server_of_the_name() {
    let place = daemon_with(&[TWO]);
    does(&place, "server create a --allowed-devices=1");
    does(&place, "server set a --pinned-memory-limit=1G");
    let pipe = place.pipe().join("a");
    let second = uuid(&place, 1);
    let sees = [TWO, (VISIBLE, second.as_str())];
    let mut program = Survivor::start_in(&pipe, &sees);
    let mut usual = Survivor::start(&place);
    let (mut pid, stays) = (
        field(&place, "a", "pid"),
        field(&place, &format!("uid_{}", place.uid()), "pid"),
    );
    for way in ["killed", "restarted"] {
        match way {
            "killed" => kill(
                Pid::from_raw(pid.parse().expect("a number")),
                Signal::SIGKILL,
            )
            .expect("kill"),
            _ => assert_eq!(place.control(&["restart_server", &pid]).code, 0),
        }
        program.round();
        usual.round();
        let next = field(&place, "a", "pid");
        assert_ne!(next, pid, "{way}");
        pid = next;
        assert_eq!(field(&place, "a", "pinned-memory-limit"), "1=1G");
        assert_eq!(number(&shown(&pipe, &sees), "total"), 1024, "{way}");
        assert_eq!(field(&place, &format!("uid_{}", place.uid()), "pid"), stays);
    }
}

#[test]
fn the_next_daemon_knows_the_servers_that_run() {
    let place = daemon_with(&[TWO]);
    does(&place, "server create a --allowed-devices=1");
    does(&place, "server create empty");
    does(
        &place,
        "server set a --pinned-memory-limit=1G --active-thread-percentage=50",
    );
    let user = place.uid().to_string();
    let limit = place.control(&["set_user_device_pinned_mem_limit", &user, "1", "2G"]);
    assert_eq!(limit.code, 0, "{}", limit.out);
    let pipe = place.pipe().join("a");
    let second = uuid(&place, 1);
    let sees = [TWO, (VISIBLE, second.as_str())];
    let mut program = Survivor::start_in(&pipe, &sees);
    let pid = field(&place, "a", "pid");
    let before = place.daemon_pid();
    place.signal_daemon(Signal::SIGKILL);
    wait_until("the daemon has ended", || has_ended(before));
    let done = place.control(&["-d"]);
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    wait_until("the server is taken over", || {
        ask(&place, "server get a status").1 == "ACTIVE\n"
    });
    program.round();
    assert_eq!(field(&place, "a", "pid"), pid);
    assert_eq!(field(&place, "a", "allowed-devices"), uuid(&place, 1));
    assert_eq!(field(&place, "a", "pinned-memory-limit"), "1=1G");
    assert_eq!(field(&place, "a", "active-thread-percentage"), "50.0");
    assert_eq!(number(&shown(&pipe, &sees), "total"), 1024);
    // Limits of users are known by the daemon's ordinals.
    let limit = |device| {
        place
            .control(&["get_user_device_pinned_mem_limit", &user, device])
            .out
    };
    assert_eq!((limit("0"), limit("1")), (String::new(), "2G\n".to_owned()));
    // A server without clients has ended with its daemon.
    let (code, _) = ask(&place, "server get empty pid");
    assert_eq!(code, 1);
    program.end();
    does(&place, "server delete a");
}

#[test]
fn long_paths_lead_to_a_server() {
    let text = |path: PathBuf| path.into_os_string().into_string().expect("UTF-8");
    let mut place = Place::new();
    place.set_env("MPSSHIM_SERVER", &text(artifact("mps-server")));
    place.set_env("MPSSHIM_CUDA_LIBRARY", &text(driver()));
    let pipe = place.path().join("p".repeat(50));
    place.set_pipe(&pipe);
    assert_eq!(place.control(&["-d"]).code, 0);
    let name = "n".repeat(64);
    does(&place, &format!("server create {name}"));
    does(
        &place,
        &format!("server set {name} --pinned-memory-limit=256M"),
    );
    let folder = pipe.join(&name);
    assert!(folder.join("control").as_os_str().len() > 107);
    assert_eq!(number(&shown(&folder, &[]), "total"), 256);
    // The programs of the product say so.
    let mut command = place.command("mps-control");
    let done = command
        .env("MPSSHIM_PIPE_DIRECTORY", &folder)
        .arg("ps")
        .output()
        .expect("run");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(
        !done.status.success() && said.contains("a Unix socket"),
        "{said}"
    );
}

#[test]
fn commands_that_only_look_come_by_a_server_s_socket_too() {
    let place = Place::with_daemon();
    does(&place, "server create a");
    let by_gate = |words: &[&str]| {
        let mut command = place.command("mps-control");
        let command = command.env("MPSSHIM_PIPE_DIRECTORY", place.pipe().join("a"));
        let done = command.args(words).output().expect("run");
        (
            done.status.code(),
            String::from_utf8_lossy(&done.stdout).into_owned(),
        )
    };
    assert_eq!(
        by_gate(&["get_default_client_priority"]),
        (Some(0), "0\n".to_owned())
    );
    let (code, text) = by_gate(&["quit"]);
    assert_eq!(code, Some(1));
    assert!(text.starts_with("quit is reserved for root"), "{text}");
}
