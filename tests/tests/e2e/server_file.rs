//! `mps-control -a FILE`: servers, namespaces and limits that a file describes.

use super::named_servers::{TWO, ask, does, succeeds};
use super::partitions::{self, Located, limited_in};
use crate::pages::file;
use mpsshim_tests::artifacts::{artifact, driver};
use mpsshim_tests::control_daemon::{Done, Place, has_ended, other_user, wait_until};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::scene::{daemon_with, daemon_with_options};
use nix::sys::signal::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The file in docs/interface-v3.md.
fn documented() -> String {
    let page = file("docs/interface-v3.md");
    let mut lines = page
        .lines()
        .map(|line| line.strip_prefix("    ").unwrap_or(line));
    let head = "schema_version = \"1.0\"";
    let begin = lines.find(|line| *line == head).expect("the file");
    let rest = lines.take_while(|line| !line.starts_with('|'));
    let all: Vec<&str> = std::iter::once(begin).chain(rest).collect();
    all.join("\n")
}

/// A file of servers in the place's folder.
fn write(place: &Place, text: &str) -> PathBuf {
    let path = place.path().join("servers.toml");
    fs::write(&path, text).expect("write");
    path
}

fn apply(place: &Place, text: &str) -> Done {
    let path = write(place, text);
    place.control(&["-a", path.to_str().expect("UTF-8")])
}

fn applies(place: &Place, text: &str) {
    let done = apply(place, text);
    assert_eq!((done.code, done.out.as_str()), (0, ""), "{}", done.err);
    assert_eq!(done.err, "");
}

/// The file is refused with these mistakes, each after the path.
fn refused(place: &Place, text: &str, expected: &[&str]) {
    let done = apply(place, text);
    let path = place.path().join("servers.toml").display().to_string();
    let lines = expected.iter().map(|line| format!("{path}:{line}\n"));
    let lines: String = lines.collect();
    assert_eq!((done.code, done.err, done.out), (1, lines, String::new()));
}

/// Servers without their sessions, and namespaces.
fn state(place: &Place) -> (String, String) {
    let servers = succeeds(place, "server list --format=csv,noheader");
    (
        servers,
        succeeds(place, "namespace list --format=csv,noheader"),
    )
}

fn field(place: &Place, server: &str, name: &str) -> String {
    let text = succeeds(place, &format!("server get {server} {name}"));
    text.trim_end().to_owned()
}

fn await_active(place: &Place, server: &str) {
    wait_until("the server is active", || {
        field(place, server, "status") == "ACTIVE"
    });
}

#[test]
fn a_file_is_applied_to_a_running_daemon() {
    let place = daemon_with(&[TWO]);
    does(&place, "server create other --allowed-devices=0");
    does(&place, "server set other --client-priority=1");
    applies(&place, &documented());
    for server in ["train", "plain", "other"] {
        await_active(&place, server);
    }
    let fields = |server| {
        [
            "pinned-memory-limit",
            "active-thread-percentage",
            "client-priority",
        ]
        .map(|name| field(&place, server, name))
    };
    assert_eq!(fields("train"), ["1=3G", "50.0", "0"]);
    assert_eq!(fields("plain"), ["", "100.0", "0"]);
    assert_eq!(fields("other"), ["", "100.0", "1"]);
    assert_eq!(field(&place, "plain", "allowed-devices"), "all");
    assert_eq!(
        field(&place, "train", "allowed-devices").split(',').count(),
        2
    );
    let pipe = place.pipe().display();
    let spaces = format!(
        "default,other,{pipe}/other/default,,100.0,1,\n\
         default,plain,{pipe}/plain/default,,100.0,0,\n\
         default,train,{pipe}/train/default,1=3G,50.0,0,\n\
         eval,train,{pipe}/train/eval,1=1G,50.0,1,\n"
    );
    let before = state(&place);
    assert_eq!(before.1, spaces);
    // The sockets lead to the namespace.
    let mut client = Peer::connect(&place.pipe().join("train/eval/control")).expect("a client");
    client.attach().expect("attach");
    wait_until("the client is listed", || {
        succeeds(&place, "namespace get train/eval context-ids") == "1\n"
    });
    drop(client);
    wait_until("the client has gone", || {
        succeeds(&place, "namespace get train/eval context-ids").is_empty()
    });

    // The same file changes nothing: processes stay.
    applies(&place, &documented());
    assert_eq!(state(&place), before);

    // Absent keys, namespaces and servers stay as they are.
    applies(
        &place,
        "schema_version = \"1.0\"\n[servers.train]\npinned_memory_limit = \"none\"\n\
         [servers.train.namespaces.eval]\nactive_thread_percentage = \"25%\"\n[servers.train.namespaces.next]\n",
    );
    assert_eq!(fields("train"), ["", "50.0", "0"]);
    let spaces = succeeds(&place, "namespace list train --format=csv,noheader");
    let limits = |row: &str| row.split(',').skip(3).take(3).collect::<Vec<_>>().join(" ");
    let limits: Vec<String> = spaces.lines().map(limits).collect();
    assert_eq!(limits, [" 50.0 0", "1=1G 25.0 1", " 50.0 0"]);
    assert_eq!(state(&place).0, before.0, "the processes");
    let log = place.log("control.log");
    assert!(log.contains("servers.toml: 2 servers applied"), "{log}");
}

#[test]
fn a_daemon_starts_with_a_file() {
    let folder = TempDir::with_prefix("mps-").expect("a folder");
    let file = folder.path().join("servers.toml");
    fs::write(&file, documented()).expect("write");
    let place = daemon_with_options(&["-d", "-a", file.to_str().expect("UTF-8")], &[TWO]);
    // The sockets are there when the command returns.
    for socket in ["train/control", "train/eval/control", "plain/control"] {
        let mut client = Peer::connect(&place.pipe().join(socket)).expect("a client");
        client.attach().expect("attach");
    }
    assert_eq!(field(&place, "train", "pinned-memory-limit"), "1=3G");
}

#[test]
fn a_daemon_that_starts_with_a_file_takes_over_the_servers_that_fit_it() {
    let place = daemon_with(&[TWO]);
    let text =
        |device| format!("schema_version = \"1.0\"\n[servers.a]\nallowed_devices = [{device}]\n");
    applies(&place, &text(0));
    let mut client = Peer::connect(&place.pipe().join("a/control")).expect("a client");
    client.attach().expect("attach");
    wait_until("the client is listed", || {
        field(&place, "a", "context-ids") == "1"
    });
    let server = field(&place, "a", "pid");
    let start = |text: &str| {
        let pid = place.daemon_pid();
        place.signal_daemon(Signal::SIGKILL);
        wait_until("the daemon has ended", || has_ended(pid));
        let path = write(&place, text);
        let done = place.control(&["-d", "-a", path.to_str().expect("UTF-8")]);
        assert_eq!((done.code, done.err.as_str()), (0, ""));
    };
    start(&text(0));
    wait_until("the server is taken over", || {
        field(&place, "a", "context-ids") == "1"
    });
    assert_eq!(field(&place, "a", "pid"), server);
    start(&text(1));
    let why = "the server a has another user or other devices now";
    wait_until("the server is refused", || {
        place.log("control.log").contains(why)
    });
    assert_eq!(field(&place, "a", "context-ids"), "");
}

#[test]
fn a_daemon_does_not_start_with_mistakes() {
    let mut place = Place::new();
    place.set_env(
        "MPSSHIM_SERVER",
        artifact("mps-server").to_str().expect("UTF-8"),
    );
    place.set_env("MPSSHIM_CUDA_LIBRARY", driver().to_str().expect("UTF-8"));
    let path = write(
        &place,
        "schema_version = \"1.0\"\n[servers.a]\n[servers.b]\nallowed_devices = [0, 7]\n",
    );
    let path = path.to_str().expect("UTF-8");
    let done = place.control(&["-d", "--apply", path]);
    let expected = format!(
        "{path}:4: servers.b.allowed_devices: Device 7 not found; device list lists the devices\n"
    );
    assert_eq!((done.code, done.err), (1, expected));
    let gone = place.control(&["get_server_list"]);
    let absent = "Cannot find MPS control daemon process\n";
    assert_eq!((gone.code, gone.err.as_str()), (1, absent));
    assert!(!place.pipe().join("a").exists(), "no server was created");
    // Mistakes that need no daemon are found before one is sought.
    refused(
        &place,
        "schema_version = \"1.0\"\n[servers.a]\nclient_priority = 3\n",
        &["3: servers.a.client_priority: \"3\": a priority is 0 or 1"],
    );
    let done = apply(&place, &documented());
    assert_eq!((done.code, done.err.as_str()), (1, absent));
    let done = place.control(&["-a", "/none.toml"]);
    assert_eq!(done.code, 1);
    assert!(
        done.err.starts_with("cannot read /none.toml: No such file"),
        "{}",
        done.err
    );
    for words in [&["-a", path, "ps"][..], &["-a", path, "--quit"], &["-a"]] {
        assert_eq!(place.control(words).code, 2, "{words:?}");
    }
}

#[test]
fn with_a_mistake_nothing_is_applied() {
    let place = daemon_with(&[TWO]);
    does(&place, "server create held --allowed-devices=0");
    does(
        &place,
        "server set held --pinned-memory-limit=0=2G --active-thread-percentage=50",
    );
    let mut client = Peer::connect(&place.pipe().join("held/control")).expect("a client");
    client.attach().expect("attach");
    wait_until("the client is listed", || {
        field(&place, "held", "context-ids") == "1"
    });
    let before = state(&place);
    let good = "schema_version = \"1.0\"\n[servers.aa]\n[servers.held]\nclient_priority = 1\n";
    for (rest, expected) in [
        (
            "allowed_devices = [1]\n",
            &[
                "5: servers.held.allowed_devices: the server held has other devices; delete it first (server delete held)",
            ][..],
        ),
        (
            "pinned_memory_limit = \"1=1G\"\n",
            &["5: servers.held.pinned_memory_limit: the server has no device 1"],
        ),
        (
            "[servers.held.namespaces.a]\nactive_thread_percentage = 60\npinned_memory_limit = \"3G\"\n",
            &[
                "6: servers.held.namespaces.a.active_thread_percentage: server held has 50.0 percent of the active \
                 threads, and a namespace has no more",
                "7: servers.held.namespaces.a.pinned_memory_limit: server held has a limit of 2G on device 0, and a \
                 namespace has no more",
            ],
        ),
        (
            "[servers.held.namespaces.default]\n[servers.held.namespaces.A]\n",
            &[
                "5: servers.held.namespaces.default: the namespace default has the limits of its server, and none of \
                 its own",
                "6: servers.held.namespaces.A: \"A\" is no name: a name has 1 to 64 of the characters a-z, 0-9 and _",
            ],
        ),
        (
            "[[servers.held.devices]]\nuuid = \"GPU-nn\"\n",
            &[
                "6: servers.held.devices.uuid: Device GPU-nn not found; device list lists the devices",
            ],
        ),
        (
            "[servers.uid_7]\n",
            &[
                "5: servers.uid_7: the name uid_7 is reserved: the daemon has files or servers of such names",
            ],
        ),
    ] {
        refused(&place, &format!("{good}{rest}"), expected);
        assert_eq!(state(&place), before, "{rest}");
    }
    // A namespace's limits are compared with those that the file gives its server.
    refused(
        &place,
        "schema_version = \"1.0\"\n[servers.aa]\nactive_thread_percentage = 30\n[servers.aa.namespaces.b]\n\
         active_thread_percentage = 31\n",
        &[
            "5: servers.aa.namespaces.b.active_thread_percentage: server aa has 30.0 percent of the active threads, and \
           a namespace has no more",
        ],
    );
    if let Some(user) = other_user() {
        let own = std::process::id();
        let why = format!(
            "5: servers.held.uid: server held has clients ({own}), and its user can be changed once they have ended"
        );
        refused(&place, &format!("{good}uid = {user}\n"), &[&why]);
    }
    // Not even the sockets of the servers before it stay.
    fs::write(place.pipe().join("zz"), "").expect("a file");
    refused(
        &place,
        &format!("{good}[servers.zz]\n"),
        &["5: servers.zz: cannot make its folder zz: Not a directory (os error 20)"],
    );
    assert_eq!(state(&place), before);
    assert!(!place.pipe().join("aa").exists());
    assert_eq!(field(&place, "held", "client-priority"), "0");
    // Without the mistake.
    applies(&place, good);
    assert_eq!(field(&place, "held", "client-priority"), "1");
    assert_eq!(field(&place, "aa", "name"), "aa");
}

#[test]
fn a_file_changes_the_user_of_a_server_and_is_reserved() {
    let Some(user) = other_user() else {
        return eprintln!("not root: two users are not tested");
    };
    let place = daemon_with(&[]);
    let text = |uid| format!("schema_version = \"1.0\"\n[servers.a]\nuid = {uid}\n");
    applies(&place, &text(0));
    await_active(&place, "a");
    let before = field(&place, "a", "pid");
    applies(&place, &text(user));
    wait_until("a server of the other user is active", || {
        field(&place, "a", "status") == "ACTIVE" && field(&place, "a", "pid") != before
    });
    assert_eq!(field(&place, "a", "uid"), user.to_string());
    let path = write(&place, &text(0));
    let done = place.control_as(user, &["-a", path.to_str().expect("UTF-8")]);
    let reserved = "-a is reserved for root and the user who runs the daemon\n";
    assert_eq!((done.code, done.err.as_str()), (1, reserved));
    assert_eq!(field(&place, "a", "uid"), user.to_string());
    let (code, text) = ask(&place, "apply /a/file");
    let expected = "-a: mps-control must send the file with the command, and sent none\n";
    assert_eq!((code, text.as_str()), (1, expected));
}

/// The partitions without their device: name, number of chunks, id and server.
fn partition_list(place: &Place) -> Vec<String> {
    let rows = succeeds(place, "sm-partition list --format=csv,noheader");
    let row = |row: &str| {
        let cells: Vec<&str> = row.split(',').collect();
        let (_, id) = cells[5].rsplit_once('/').expect("an id");
        [cells[0], cells[3], id, cells[6]].join(" ")
    };
    rows.lines().map(row).collect()
}

#[test]
fn a_file_gives_servers_partitions() {
    let place = daemon_with_options(&["-d", "-S"], &[TWO]);
    let list = succeeds(&place, "device list --format=csv,noheader");
    let uuid = |row: &str| row.split(',').nth(3).expect("a UUID").to_owned();
    let [first, second] = &list.lines().map(uuid).collect::<Vec<_>>()[..] else {
        panic!("two devices: {list}");
    };
    does(&place, "sm-partition create usual --device=0 --chunks=3");
    let text = |devices: &str, servers: &str| {
        format!("schema_version = \"1.0\"\n[servers.a]\n{devices}{servers}")
    };
    let table = |server: &str, uuid: &str, list: &str| {
        format!("[[servers.{server}.devices]]\nuuid = \"{uuid}\"\nsm_partitions = {list}\n")
    };
    let list = "[1, { name = \"p\", chunks = 2 }]";
    let good = text(
        &table("a", first, list),
        &format!(
            "{}[servers.b]\nallowed_devices = [1, 0]\n{}{}",
            table("a", second, "[{ chunks = 4 }]"),
            table("b", second, "[]"),
            table("b", first, "[3]")
        ),
    );
    // All or nothing.
    let used = format!("Device {first} has 1 free chunks of 4, fewer than 2");
    for (devices, mistakes) in [
        (
            table("a", first, "[3, 2]"),
            vec![format!("5: servers.a.devices.sm_partitions: {used}")],
        ),
        (
            table("a", first, "[{ name = \"usual\", chunks = 1 }]"),
            vec![
                "5: servers.a.devices.sm_partitions: there is a partition usual already".to_owned(),
            ],
        ),
        (
            format!("allowed_devices = [1]\n{}", table("a", first, "[1]")),
            vec![format!(
                "5: servers.a.devices.uuid: the server a has no device {first}"
            )],
        ),
        (
            format!("{}{}", table("a", first, "[1]"), table("a", "0", "[5]")),
            vec!["7: servers.a.devices.uuid: device 0 is given twice".to_owned()],
        ),
    ] {
        let mistakes: Vec<&str> = mistakes.iter().map(String::as_str).collect();
        refused(&place, &text(&devices, "[servers.c]\n"), &mistakes);
        assert_eq!(state(&place).0, "", "{devices}");
    }
    applies(&place, &good);
    await_active(&place, "a");
    await_active(&place, "b");
    let expected = ["usual 3 1 ", " 1 2 a", "p 2 3 a", " 4 1 a", " 3 4 b"];
    assert_eq!(partition_list(&place), expected);
    // Again, and in another order: nothing changes.
    let before = state(&place);
    applies(&place, &good);
    applies(
        &place,
        &text(&table("a", first, "[{ name = \"p\", chunks = 2 }, 1]"), ""),
    );
    applies(&place, &text("", ""));
    assert_eq!(partition_list(&place), expected);
    assert_eq!(state(&place), before);
    for list in ["[]", "[1]", "[1, 2]", "[1, { name = \"q\", chunks = 2 }]"] {
        refused(
            &place,
            &text(&table("a", first, list), ""),
            &[
                "5: servers.a.devices.sm_partitions: the server a has other partitions of this device; change them with \
               sm-partition create and delete, or delete the server first (server delete a)",
            ],
        );
    }
    does(&place, "server delete a");
    assert_eq!(partition_list(&place), ["usual 3 1 ", " 3 4 b"]);
    // The option of the daemon is missing.
    let without = daemon_with(&[TWO]);
    let off = partitions::OFF.trim_end();
    let mistake = format!("5: servers.a.devices.sm_partitions: {off}");
    refused(&without, &text(&table("a", first, "[1]"), ""), &[&mistake]);
    applies(&without, &text(&table("a", first, "[]"), ""));
}

#[test]
fn servers_that_are_taken_over_keep_the_ids_that_they_have_of_a_file() {
    let place = partitions::daemon_with_partitions();
    let device = partitions::uuid(&place);
    does(&place, "sm-partition create usual --device=0 --chunks=2");
    let text = format!(
        "schema_version = \"1.0\"\n[[servers.a.devices]]\nuuid = \"{device}\"\n\
         sm_partitions = [1, {{ name = \"p\", chunks = 2 }}]\n\
         [[servers.b.devices]]\nuuid = \"{device}\"\nsm_partitions = [1]\n"
    );
    applies(&place, &text);
    let expected = ["usual 2 1 ", " 1 2 a", "p 2 3 a", " 1 4 b"];
    assert_eq!(partition_list(&place), expected);
    let start = |pipe: &Path, id: u32| {
        let name = format!("{device}/{id}");
        Located::start(limited_in(pipe, "whereabouts", Some(&name)))
    };
    let mut programs = [start(&place.pipe().join("a"), 3), start(place.pipe(), 1)];
    assert_eq!(
        programs.each_mut().map(Located::place),
        ["on 1 2", "on 0 1"]
    );
    let pid = place.daemon_pid();
    place.signal_daemon(Signal::SIGKILL);
    wait_until("the daemon has ended", || has_ended(pid));
    // Without servers of another daemon, the file would give the ids 1 to 3, and the table of users' servers has 1.
    let path = place.path().join("servers.toml");
    let done = place.control(&["-d", "-S", "-a", path.to_str().expect("UTF-8")]);
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    wait_until("the servers are taken over", || {
        partition_list(&place).len() == 4 && field(&place, "a", "context-ids") == "1"
    });
    assert_eq!(partition_list(&place), expected);
    assert_eq!(
        programs.each_mut().map(Located::place),
        ["on 1 2", "on 0 1"]
    );
    programs.into_iter().for_each(Located::end);
}
