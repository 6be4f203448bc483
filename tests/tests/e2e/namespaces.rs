//! Namespaces of named servers (`-p 3`, `namespace create`), with clients on softgpu.

use crate::named_servers::{TWO, ask, does, fails, succeeds};
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Place, has_ended, other_user, wait_until};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::programs::{preloaded, succeed};
use mpsshim_tests::scene::daemon_with;
use mpsshim_tests::survivors::Survivor;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};

/// The names of the columns of `namespace list`.
const COLUMNS: &str = "name,server,pipe-directory,pinned-memory-limit,active-thread-percentage,client-priority,context-ids";

/// Memory limit, percentage and priority of a namespace.
fn limits(place: &Place, name: &str) -> [String; 3] {
    [
        "pinned-memory-limit",
        "active-thread-percentage",
        "client-priority",
    ]
    .map(|field| {
        let text = succeeds(place, &format!("namespace get {name} {field}"));
        text.trim_end().to_owned()
    })
}

fn folder(place: &Place, name: &str) -> PathBuf {
    place.pipe().join(name)
}

/// Waits for a client of a server's own namespace or of `SERVER/NAME`: the server reports a client after it has answered it.
fn await_listed(place: &Place, name: &str) {
    let name = match name.contains('/') {
        true => name.to_owned(),
        false => format!("{name}/default"),
    };
    wait_until("the client is listed", || {
        let ids = succeeds(place, &format!("namespace get {name} context-ids"));
        !ids.trim().is_empty()
    });
}

/// A client that has a context.
fn attached(place: &Place, name: &str) -> Peer {
    let mut peer = Peer::connect(&folder(place, name).join("control")).expect("a client");
    peer.attach().expect("attach");
    await_listed(place, name);
    peer
}

/// Total memory in MiB and number of multiprocessors that a program sees in this pipe directory.
fn seen(pipe: &Path, variables: &[(&str, &str)]) -> (u64, u64) {
    let mut command = preloaded(artifact("limited"), pipe);
    command.arg("show").env(TWO.0, TWO.1);
    command.env_remove("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    command.envs(variables.iter().copied());
    let shown = succeed(&mut command);
    let number = |name: &str| -> u64 {
        let line = shown.lines().find_map(|line| line.strip_prefix(name));
        let number = line.unwrap_or_else(|| panic!("no {name} in {shown}"));
        number.trim().parse().expect("a number")
    };
    let total = number("total");
    assert_eq!(number("of the device"), total, "{shown}");
    assert!(number("free") <= total, "{shown}");
    (total, number("multiprocessors "))
}

/// Server and namespace of each client, in the order of `client list`.
fn namespaces(place: &Place) -> Vec<(String, String)> {
    let rows = succeeds(place, "client list --format=csv,noheader");
    let mut found: Vec<(String, String)> = Vec::new();
    for row in rows.lines() {
        let cells: Vec<&str> = row.split(',').collect();
        let next = (cells[1].to_owned(), cells[5].to_owned());
        // There is a row for each device.
        if !found.contains(&next) {
            found.push(next);
        }
    }
    found
}

#[test]
fn namespaces_of_a_server_have_limits_of_their_own() {
    let place = daemon_with(&[TWO]);
    does(&place, "server create a");
    does(
        &place,
        "namespace create a/train --pinned-memory-limit=1G --active-thread-percentage=50",
    );
    does(&place, "namespace create a/eval");
    does(
        &place,
        "namespace set a/eval --pinned-memory-limit=0=256M,1=512M --active-thread-percentage=25 --client-priority=1",
    );
    let full = seen(&folder(&place, "a"), &[]);
    assert_eq!(full.0, 4096);
    assert_eq!(seen(&folder(&place, "a/default"), &[]), full);
    assert_eq!(seen(&folder(&place, "a/train"), &[]), (1024, full.1 / 2));
    assert_eq!(seen(&folder(&place, "a/eval"), &[]), (256, full.1 / 4));
    // A program can only lower its namespace's limits.
    let asks = |memory, threads| {
        [
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", threads),
        ]
    };
    let more = seen(&folder(&place, "a/eval"), &asks("0=2G", "100"));
    assert_eq!(more, (256, full.1 / 4));
    let less = seen(&folder(&place, "a/train"), &asks("0=128M", "25"));
    assert_eq!(less.1, full.1 / 4);
    let direct = seen(&folder(&place, "a/train"), &[("MPSSHIM_MODE", "direct")]);
    assert_eq!(direct.0, 1024);

    let clients = ["a", "a/train", "a/eval"].map(|name| attached(&place, name));
    let ids: Vec<String> = ["a/default", "a/train", "a/eval"]
        .map(|name| succeeds(&place, &format!("namespace get {name} context-ids")))
        .map(|text| text.trim().to_owned())
        .into();
    let pipe = place.pipe().display();
    assert_eq!(
        succeeds(&place, "namespace list --format=csv"),
        format!(
            "{COLUMNS}\n\
             default,a,{pipe}/a/default,,100.0,0,{}\n\
             train,a,{pipe}/a/train,\"0=1G,1=1G\",50.0,0,{}\n\
             eval,a,{pipe}/a/eval,\"0=256M,1=512M\",25.0,1,{}\n",
            ids[0], ids[1], ids[2]
        )
    );
    let names = ["default", "train", "eval"];
    let expected: Vec<_> = names.map(|name| ("a".to_owned(), name.to_owned())).into();
    assert_eq!(namespaces(&place), expected);
    let own = std::process::id();
    assert_eq!(
        succeeds(&place, &format!("client get {own} maws-ns")),
        "default\ntrain\neval\n"
    );
    for row in place.ps() {
        let expected = match row["id"].as_str() {
            id if id == ids[1] => ("50.0", "0"),
            id if id == ids[2] => ("25.0", "1"),
            _ => ("100.0", "0"),
        };
        let has = (
            row["active_thread_percentage"].as_str(),
            row["priority"].as_str(),
        );
        assert_eq!(has, expected, "{row:?}");
    }

    // The server's limits bound those of its namespaces, also where they are lowered later.
    does(
        &place,
        "server set a --pinned-memory-limit=0=512M --active-thread-percentage=40 --client-priority=1",
    );
    assert_eq!(limits(&place, "a/train"), ["0=512M,1=1G", "40.0", "1"]);
    assert_eq!(limits(&place, "a/eval"), ["0=256M,1=512M", "25.0", "1"]);
    assert_eq!(limits(&place, "a/default"), ["0=512M", "40.0", "1"]);
    assert_eq!(seen(&folder(&place, "a/train"), &[]).0, 512);
    for (line, expected) in [
        (
            "namespace set a/train --active-thread-percentage=50",
            "namespace set: server a has 40.0 percent of the active threads, and a namespace has no more",
        ),
        (
            "namespace create a/more --pinned-memory-limit=1G",
            "namespace create: server a has a limit of 512M on device 0, and a namespace has no more",
        ),
    ] {
        fails(&place, line, expected);
    }
    // Without limits of its own, a namespace has the server's.
    does(
        &place,
        "namespace set a/eval --pinned-memory-limit=none --active-thread-percentage=100 --client-priority=0",
    );
    does(&place, "server set a --client-priority=0");
    assert_eq!(limits(&place, "a/eval"), ["0=512M", "40.0", "0"]);

    drop(clients);
    assert_eq!(place.control(&["quit", "-t", "5"]).code, 0);
    assert_eq!(
        place.list(),
        ["control", "control_lock", "control_privileged", "logs"]
    );
}

#[test]
fn devices_of_a_server_keep_the_daemon_s_numbers() {
    let place = daemon_with(&[TWO]);
    does(&place, "server create one --allowed-devices=1");
    does(
        &place,
        "namespace create one/a --pinned-memory-limit=1=256M",
    );
    assert_eq!(limits(&place, "one/a"), ["1=256M", "100.0", "0"]);
    let uuid = succeeds(&place, "server get one allowed-devices");
    let sees = [("CUDA_VISIBLE_DEVICES", uuid.trim())];
    assert_eq!(seen(&folder(&place, "one/a"), &sees).0, 256);
    fails(
        &place,
        "namespace set one/a --pinned-memory-limit=0=1G",
        "namespace set: the server has no device 0",
    );
    // The limits are the same while the server has no process.
    let pid = succeeds(&place, "server get one pid");
    assert_eq!(place.control(&["shutdown_server", pid.trim()]).code, 0);
    wait_until("the server has ended", || {
        has_ended(pid.trim().parse().expect("a process id"))
    });
    does(&place, "namespace create one/b --pinned-memory-limit=128M");
    assert_eq!(limits(&place, "one/b"), ["1=128M", "100.0", "0"]);
    assert_eq!(seen(&folder(&place, "one/b"), &sees).0, 128);
    assert_eq!(seen(&folder(&place, "one/a"), &sees).0, 256);
}

#[test]
fn a_namespace_with_clients_is_deleted_by_force_only() {
    let place = daemon_with(&[]);
    does(&place, "server create a");
    does(&place, "namespace create a/b");
    let mut stays = Survivor::start_in(&folder(&place, "a"), &[]);
    await_listed(&place, "a");
    let mut client = attached(&place, "a/b");
    let own = std::process::id();
    fails(
        &place,
        "namespace delete a/b",
        &format!(
            "namespace delete: namespace a/b has clients ({own}); end them first, or give --force"
        ),
    );
    assert!(client.mem_info().is_ok());
    does(&place, "namespace delete a/b --force");
    assert_eq!(
        namespaces(&place),
        [("a".to_owned(), "default".to_owned())],
        "the namespace's client has ended"
    );
    stays.round();
    assert!(!folder(&place, "a/b").exists());
    assert!(Peer::connect(&folder(&place, "a/b").join("control")).is_err());
    fails(
        &place,
        "namespace get a/b name",
        "Namespace \"a/b\" not found; namespace list lists the namespaces",
    );
    // The name is free again, and a namespace without clients goes without force.
    does(&place, "namespace create a/b");
    let client = attached(&place, "a/b");
    assert_eq!(succeeds(&place, "namespace get a/b server"), "a\n");
    drop(client);
    wait_until("the client has gone", || {
        succeeds(&place, "namespace get a/b context-ids")
            .trim()
            .is_empty()
    });
    does(&place, "namespace delete a/b");
    // Namespaces go with their server.
    does(&place, "namespace create a/c");
    stays.end();
    does(&place, "server delete a --force");
    assert_eq!(succeeds(&place, "namespace list --format=csv,noheader"), "");
    assert!(!folder(&place, "a").exists());
}

#[test]
fn mistakes_change_nothing() {
    let place = daemon_with(&[]);
    does(&place, "server create a");
    does(&place, "namespace create a/b");
    let name = "is no name: a name has 1 to 64 of the characters a-z, 0-9 and _";
    let long = "x".repeat(65);
    let options = "[--pinned-memory-limit=AMOUNT|DEVICE=AMOUNT,...|none] [--active-thread-percentage=PERCENTAGE] \
                   [--client-priority=PRIORITY]";
    let user = format!("uid_{}", place.uid());
    for (line, expected) in [
        ("namespace create a/B", format!("namespace create: \"B\" {name}")),
        ("namespace create a/b/c", format!("namespace create: \"b/c\" {name}")),
        ("namespace create a/", format!("namespace create: \"\" {name}")),
        (&format!("namespace create a/{long}"), format!("namespace create: \"{long}\" {name}")),
        (
            "namespace create b",
            format!(
                "namespace create: \"b\" is not SERVER/NAME, such as train/eval; usage: namespace create SERVER/NAME {options}"
            ),
        ),
        ("namespace create", format!("namespace create: SERVER/NAME expected; usage: namespace create SERVER/NAME {options}")),
        ("namespace create a/b", "namespace create: there is a namespace a/b already".to_owned()),
        ("namespace create a/default", "namespace create: there is a namespace a/default already".to_owned()),
        (
            "namespace create nn/b",
            "namespace create: Server \"nn\" not found among those that were created; server list lists the servers"
                .to_owned(),
        ),
        (
            &format!("namespace create {user}/b"),
            format!(
                "namespace create: Server \"{user}\" not found among those that were created; server list lists the servers"
            ),
        ),
        (
            "namespace create a/c --pinned-memory-limit=9=1G",
            "namespace create: Device 9 not found; device list lists the devices".to_owned(),
        ),
        (
            "namespace set a/b",
            format!("namespace set: at least one option expected; usage: namespace set SERVER/NAME {options}"),
        ),
        (
            "namespace set a/c --client-priority=1",
            "namespace set: Namespace \"a/c\" not found; namespace list lists the namespaces".to_owned(),
        ),
        (
            "namespace set a/b --client-priority=2",
            format!("namespace set: \"2\": a priority is 0 or 1; usage: namespace set SERVER/NAME {options}"),
        ),
        (
            "namespace set a/default --client-priority=1",
            "namespace set: a/default has the limits of its server; change these with \"server set a\"".to_owned(),
        ),
        (
            "namespace delete a/c",
            "namespace delete: Namespace \"a/c\" not found; namespace list lists the namespaces".to_owned(),
        ),
        (
            "namespace delete a/default",
            "namespace delete: a/default exists as long as its server; \"server delete a\" deletes both".to_owned(),
        ),
        (
            "namespace list nn",
            "Server \"nn\" not found among those that were created; server list lists the servers".to_owned(),
        ),
        (
            "namespace get a/b cmd",
            "namespace get: unknown field \"cmd\"; fields: name, server, pipe-directory, pinned-memory-limit, \
             active-thread-percentage, client-priority, context-ids; usage: namespace get SERVER/NAME FIELD"
                .to_owned(),
        ),
        (
            "namespace lst",
            "namespace: unknown verb \"lst\"; did you mean list?; verbs: create, delete, set, list, get; \
             \"namespace --help\" describes each"
                .to_owned(),
        ),
    ] {
        fails(&place, line, &expected);
    }
    let pipe = place.pipe().display();
    assert_eq!(
        succeeds(&place, "namespace list a --format=csv,noheader"),
        format!("default,a,{pipe}/a/default,,100.0,0,\nb,a,{pipe}/a/b,,100.0,0,\n")
    );
    let wide = 14 + place.pipe().as_os_str().len().saturating_sub(4);
    let table = succeeds(&place, "namespace list");
    let header = format!(
        "NAME     SERVER  {:wide$}  PINNED-MEMORY-LIMIT  ACTIVE-THREAD-PERCENTAGE  CLIENT-PRIORITY  CONTEXT-IDS",
        "PIPE-DIRECTORY"
    );
    assert_eq!(table.lines().next(), Some(header.as_str()));
    if let Some(user) = other_user() {
        for line in ["create a/mine", "delete a/b", "set a/b --client-priority=1"] {
            let words: Vec<&str> = ["-p", "3", "namespace"]
                .into_iter()
                .chain(line.split(' '))
                .collect();
            let refused = place.control_as(user, &words);
            let verb = words[3];
            let expected =
                format!("namespace {verb} is reserved for root and the user who runs the daemon\n");
            assert_eq!((refused.code, refused.out), (1, expected));
        }
    }
}

#[test]
fn a_server_has_at_most_64_namespaces() {
    let mut place = daemon_with(&[TWO]);
    does(&place, "server create a");
    let long = "n".repeat(60);
    let lines = (0..64).map(|number| {
        format!("namespace create a/{long}_{number} --pinned-memory-limit=1177M --active-thread-percentage=33.33\n")
    });
    place.set_env("CUDA_MPS_PROTOCOL_VERSION", "3");
    let done = place.control_stdin(&lines.collect::<String>());
    assert_eq!((done.code, done.out.as_str()), (0, ""));
    fails(
        &place,
        "namespace create a/more",
        "namespace create: server a has 64 namespaces already",
    );
    let list = succeeds(&place, "namespace list --format=csv,noheader");
    assert_eq!(list.lines().count(), 65);
    let last = folder(&place, &format!("a/{long}_63"));
    assert_eq!(seen(&last, &[]).0, 1177);
    does(&place, &format!("namespace delete a/{long}_0"));
    does(&place, "namespace create a/more");
}

#[test]
fn namespaces_are_kept_over_servers_and_daemons() {
    let place = daemon_with(&[]);
    does(&place, "server create a");
    does(
        &place,
        "namespace create a/b --pinned-memory-limit=1G --active-thread-percentage=50 --client-priority=1",
    );
    let pipe = folder(&place, "a/b");
    let mut program = Survivor::start_in(&pipe, &[]);
    let before = seen(&pipe, &[]);
    assert_eq!(before.0, 1024);
    let in_b = [("a".to_owned(), "b".to_owned())];
    assert_eq!(namespaces(&place), in_b);
    let mut pid = succeeds(&place, "server get a pid");
    for way in ["killed", "restarted", "the daemon killed"] {
        match way {
            "killed" => {
                let server = Pid::from_raw(pid.trim().parse().expect("a number"));
                kill(server, Signal::SIGKILL).expect("kill");
            }
            "restarted" => {
                assert_eq!(place.control(&["restart_server", pid.trim()]).code, 0);
            }
            _ => {
                let daemon = place.daemon_pid();
                place.signal_daemon(Signal::SIGKILL);
                wait_until("the daemon has ended", || has_ended(daemon));
                let done = place.control(&["-d"]);
                assert_eq!((done.code, done.err.as_str()), (0, ""));
                wait_until("the server is taken over", || {
                    ask(&place, "server get a status").1 == "ACTIVE\n"
                });
            }
        }
        program.round();
        wait_until("the client is listed", || !namespaces(&place).is_empty());
        assert_eq!(namespaces(&place), in_b, "{way}");
        assert_eq!(limits(&place, "a/b"), ["0=1G", "50.0", "1"], "{way}");
        assert_eq!(seen(&pipe, &[]), before, "{way}");
        pid = succeeds(&place, "server get a pid");
    }
    fails(
        &place,
        "namespace delete a/b",
        &format!(
            "namespace delete: namespace a/b has clients ({}); end them first, or give --force",
            succeeds(&place, "client list --format=csv,noheader")
                .split(',')
                .next()
                .expect("a process id")
        ),
    );
    program.end();
    does(&place, "server delete a --force");
    assert!(!folder(&place, "a").exists());
}
