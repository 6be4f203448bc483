//! Static partitions: multiprocessors that are reserved for the clients that name them.

use mpsshim_tests::control_daemon::{Done, Place, has_ended, other_user, wait_until};
use mpsshim_tests::programs::{Running, client, finish, preloaded, succeed};
use mpsshim_tests::scene::{daemon, daemon_with_options};
use mpsshim_tests::survivors::{kill_server, server};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

pub const PARTITION: &str = "CUDA_MPS_SM_PARTITION";
const THREADS: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
pub const OFF: &str = "Static partitioning is off: start the daemon with -S\n";

/// A daemon with static partitions, for a device of four chunks of one multiprocessor.
pub fn daemon_with_partitions() -> Place {
    daemon_with_options(&["-d", "-S"], &[("SOFTGPU_DEVICES", "1")])
}

pub fn uuid(place: &Place) -> String {
    let devices = place.control(&["device_query", "--format=json"]).out;
    let devices: Value = serde_json::from_str(&devices).expect("JSON");
    devices[0]["uuid"].as_str().expect("a UUID").to_owned()
}

/// Text and exit status of a command, with the device's UUID for `{}`.
pub fn ask(place: &Place, uuid: &str, line: &str) -> (i32, String) {
    let words = line.replace("{}", uuid);
    let words: Vec<&str> = words.split(' ').collect();
    let Done { code, out, .. } = place.control(&words);
    (code, out.replace(uuid, "{}"))
}

/// Makes partitions of so many chunks, and returns their names.
fn add(place: &Place, chunks: &[u32]) -> Vec<String> {
    let uuid = uuid(place);
    let add = |(at, count): (usize, &u32)| {
        let name = format!("{uuid}/{}", at + 1);
        let done = place.control(&["sm_partition", "add", &uuid, &count.to_string()]);
        assert_eq!(
            (done.code, done.out),
            (0, format!("Partition {name} created\n"))
        );
        name
    };
    chunks.iter().enumerate().map(add).collect()
}

fn list(place: &Place) -> Vec<Value> {
    let done = place.control(&["lspart", "--format=json"]);
    let rows: Value = serde_json::from_str(&done.out).expect("JSON");
    rows.as_array().expect("rows").clone()
}

/// Partitions that are in use; null stands for the rest of the device.
fn in_use(place: &Place) -> Vec<Value> {
    let rows = list(place).into_iter();
    let rows = rows.filter(|row| row["in_use"] == true);
    rows.map(|row| row["partition"].clone()).collect()
}

fn limited(place: &Place, mode: &str, partition: Option<&str>) -> Command {
    limited_in(place.pipe(), mode, partition)
}

pub fn limited_in(pipe: &Path, mode: &str, partition: Option<&str>) -> Command {
    let mut command = preloaded(env!("CARGO_BIN_EXE_limited"), pipe);
    command.env_remove(THREADS).env_remove(PARTITION).arg(mode);
    if let Some(name) = partition {
        command.env(PARTITION, name);
    }
    command
}

/// A program that tells where its kernels run.
pub struct Located(pub Running);

impl Located {
    pub fn start(mut command: Command) -> Located {
        Located(Running::start(&mut command))
    }

    pub fn place(&mut self) -> String {
        self.0.say("");
        self.0.line()
    }

    pub fn end(mut self) {
        self.0.hang_up();
        self.0.finish(std::time::Duration::from_secs(60));
    }
}

pub fn number(shown: &str, name: &str) -> u64 {
    let line = shown.lines().find_map(|line| line.strip_prefix(name));
    let number = line.unwrap_or_else(|| panic!("no {name} in {shown}"));
    number.trim().parse().expect("a number")
}

#[test]
fn partitions_are_made_listed_and_removed() {
    let place = daemon_with_partitions();
    let uuid = uuid(&place);
    for (line, code, text) in [
        (
            "sm_partition add {} 5",
            1,
            "Device {} has 4 free chunks of 4, fewer than 5\n",
        ),
        ("sm_partition add {} 3", 0, "Partition {}/1 created\n"),
        ("sm_partition add 0 1", 0, "Partition {}/2 created\n"),
        (
            "sm_partition add {} 1",
            1,
            "Device {} has 0 free chunks of 4, fewer than 1\n",
        ),
        ("sm_partition rm {} 1", 0, ""),
        ("sm_partition add {} 2", 0, "Partition {}/1 created\n"),
        (
            "sm_partition add {} 0",
            1,
            "sm_partition: a number of chunks, at least 1, expected; usage: sm_partition add UUID CHUNKS|rm UUID PARTITION\n",
        ),
        (
            "sm_partition add GPU-nn 1",
            1,
            "Device GPU-nn not found; device_query lists the devices\n",
        ),
        (
            "sm_partition rm GPU-nn 1",
            1,
            "Device GPU-nn not found; device_query lists the devices\n",
        ),
        (
            "sm_partition rm {} 3",
            1,
            "Partition 3 of device {} not found; lspart lists the partitions\n",
        ),
        (
            "lspart --format=csv",
            0,
            "uuid,partition,free_chunks,used_chunks,free_multiprocessors,used_multiprocessors,in_use\n\
             {},,1,3,1,3,false\n{},1,,2,,2,false\n{},2,,1,,1,false\n",
        ),
        ("sm_partition rm {} {}/2", 0, ""),
        (
            "sm_partition rm {} {}/2",
            1,
            "Partition {}/2 of device {} not found; lspart lists the partitions\n",
        ),
    ] {
        assert_eq!(ask(&place, &uuid, line), (code, text.to_owned()), "{line}");
    }
    let table = place.control(&["lspart"]).out;
    let words = |line: &str| {
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let lines: Vec<Vec<String>> = table.lines().map(words).collect();
    assert_eq!(lines[0][..3], ["GPU", "PARTITION", "FREE"]);
    assert_eq!(lines[1][1..], ["-", "2", "2", "2", "2", "No"]);
    assert_eq!(lines[2][1..], ["1", "-", "2", "-", "2", "No"]);
    assert_eq!((lines.len(), &lines[2][0]), (3, &uuid));
}

#[test]
fn partitions_have_names_in_interface_3() {
    let place = daemon_with_partitions();
    let uuid = uuid(&place);
    let usage = "usage: sm-partition create NAME --device=DEVICE --chunks=CHUNKS [--server=NAME] [--include-remainder]";
    let header = "name,device,state,chunks,sm-count,visible-uuid,server\n";
    for (line, code, text) in [
        ("list --format=csv", 0, header.to_owned()),
        ("create train --device=0 --chunks=2", 0, String::new()),
        // Each chunk of this device is one multiprocessor, and none is left over.
        ("create eval --device={} --chunks=1 --include-remainder", 0, String::new()),
        (
            "create train --device=0 --chunks=1",
            1,
            "sm-partition create: there is a partition train already\n".to_owned(),
        ),
        (
            "create Train --device=0 --chunks=1",
            1,
            "sm-partition create: \"Train\" is no name: a name has 1 to 64 of the characters a-z, 0-9 and _\n".to_owned(),
        ),
        (
            "create more --device=0 --chunks=2",
            1,
            "sm-partition create: Device {} has 1 free chunks of 4, fewer than 2\n".to_owned(),
        ),
        (
            "create more --device=7 --chunks=1",
            1,
            "sm-partition create: Device 7 not found; device list lists the devices\n".to_owned(),
        ),
        (
            "create more --device=0 --chunks=0",
            1,
            format!("sm-partition create: \"0\" is not a number of chunks; {usage}\n"),
        ),
        (
            "create more --chunks=1",
            1,
            format!("sm-partition create: --device expected; {usage}\n"),
        ),
        (
            "create more --device=0 --chunks=1 --server=a",
            1,
            "sm-partition create: Server \"a\" not found; server list lists the servers\n".to_owned(),
        ),
        (
            "list --format=csv",
            0,
            format!("{header}train,{{}},configured,2,2,{{}}/1,\neval,{{}},configured,1,1,{{}}/2,\n"),
        ),
        (
            "list --all --format=csv,noheader",
            0,
            "train,{},configured,2,2,{}/1,\neval,{},configured,1,1,{}/2,\n,{},unallocated,1,1,,\n".to_owned(),
        ),
        ("delete train", 0, String::new()),
        (
            "delete train",
            1,
            "sm-partition delete: Partition \"train\" not found; sm-partition list lists the partitions\n".to_owned(),
        ),
        ("delete {}/2", 0, String::new()),
        ("list --format=csv,noheader", 0, String::new()),
    ] {
        let line = format!("-p 3 sm-partition {line}");
        assert_eq!(ask(&place, &uuid, &line), (code, text), "{line}");
    }

    // Partitions of interface 2 have no names. Both kinds exist at the servers that start later.
    let unnamed = add(&place, &[1]);
    assert_eq!(
        ask(
            &place,
            &uuid,
            "-p 3 sm-partition create train --device=0 --chunks=2"
        ),
        (0, String::new())
    );
    let mut inside = Located::start(limited(&place, "where", Some(&format!("{uuid}/2"))));
    inside.place();
    assert_eq!(
        ask(
            &place,
            &uuid,
            "-p 3 sm-partition list --format=csv,noheader"
        ),
        (
            0,
            ",{},created,1,1,{}/1,\ntrain,{},created,2,2,{}/2,\n".to_owned()
        )
    );
    let (code, text) = ask(&place, &uuid, "-p 3 sm-partition delete train");
    let why = "sm-partition delete: Partition {}/2 is in use by clients ";
    assert!(code == 1 && text.starts_with(why), "{text}");
    inside.end();
    wait_until("the client has gone", || {
        ask(&place, &uuid, "-p 3 sm-partition delete train").0 == 0
    });
    assert_eq!(list(&place).len(), 1 + unnamed.len());
}

#[test]
fn without_the_option_there_are_no_partitions() {
    let place = daemon();
    let uuid = uuid(&place);
    for line in ["sm_partition add {} 1", "sm_partition rm {} 1", "lspart"] {
        assert_eq!(ask(&place, &uuid, line), (1, OFF.to_owned()), "{line}");
    }
    for (line, verb) in [
        ("create a --device=0 --chunks=1", "sm-partition create: "),
        ("delete a", "sm-partition delete: "),
        ("list", ""),
    ] {
        let line = format!("-p 3 sm-partition {line}");
        assert_eq!(
            ask(&place, &uuid, &line),
            (1, format!("{verb}{OFF}")),
            "{line}"
        );
    }
    let refused = finish(&mut limited(&place, "where", Some(&format!("{uuid}/1"))));
    let why = format!("{PARTITION}={uuid}/1, and the daemon was started without -S");
    assert!(
        refused.code == 1 && refused.err.contains(&why),
        "{refused:?}"
    );
}

#[test]
fn the_setting_has_the_effect_of_the_option() {
    let place = daemon_with_options(&["-d"], &[("MPSSHIM_STATIC_PARTITIONING", "1")]);
    assert_eq!(list(&place)[0]["free_chunks"], 4);
}

#[test]
fn only_root_and_the_daemon_s_user_change_partitions() {
    let Some(user) = other_user() else { return };
    let place = daemon_with_partitions();
    let done = place.control_as(user, &["sm_partition", "add", &uuid(&place), "1"]);
    assert_eq!(done.code, 1);
    assert!(
        done.out.contains("sm_partition is reserved for root"),
        "{done:?}"
    );
    assert_eq!(place.control_as(user, &["lspart"]).code, 0);
}

#[test]
fn clients_run_in_their_partitions_and_the_others_beside_them() {
    let place = daemon_with_partitions();
    let names = add(&place, &[1, 2]);
    let clients = [Some(&names[0]), Some(&names[1]), None];
    let mut clients = clients.map(|name| {
        let name = name.map(String::as_str);
        Located::start(limited(&place, "whereabouts", name))
    });
    let places = clients.each_mut().map(Located::place);
    assert_eq!(places, ["on 0", "on 1 2", "on 3"]);
    assert_eq!(in_use(&place), [Value::Null, json!(1), json!(2)]);
    clients.into_iter().for_each(Located::end);

    for (name, count) in [(Some(&names[1]), 2), (None, 1)] {
        let name = name.map(String::as_str);
        assert_eq!(
            number(
                &succeed(&mut limited(&place, "show", name)),
                "multiprocessors "
            ),
            count
        );
        let used = succeed(&mut limited(&place, "where", name));
        // softgpu runs graphs that are built by hand on the whole device, whatever context is current.
        for way in ["launched ", "captured "] {
            assert_eq!(number(&used, way), count, "{name:?}: {used}");
        }
        // Neither does a green context of all that the client sees lead out of it.
        let green = succeed(&mut limited(&place, "green", name));
        assert_eq!(number(&green, "resource "), count);
        assert_eq!(number(&green, "in a green context "), count);
    }
}

#[test]
fn a_percentage_is_of_the_partition() {
    let place = daemon_with_partitions();
    let names = add(&place, &[1, 2]);
    for (percentage, count) in [("100", 2), ("50", 1), ("1", 1)] {
        let mut command = limited(&place, "where", Some(&names[1]));
        let used = succeed(command.env(THREADS, percentage));
        assert_eq!(number(&used, "launched "), count, "{percentage}");
    }
    let mut command = limited(&place, "contexts", Some(&names[1]));
    command.args(["50", "100"]).env(
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
        "1",
    );
    assert_eq!(succeed(&mut command), "50: 1 1\n100: 2 2\n");
}

#[test]
fn an_unknown_partition_is_an_error() {
    let place = daemon_with_partitions();
    let names = add(&place, &[1]);
    let wrong = [format!("{}0", names[0]), "1".to_owned(), "x".repeat(99)];
    for name in wrong {
        let refused = finish(&mut limited(&place, "where", Some(&name)));
        assert_eq!(refused.code, 1, "{refused:?}");
        assert!(
            refused.out.contains("CUDA_ERROR_INVALID_VALUE (1)"),
            "{refused:?}"
        );
        let why = "there is no such partition; lspart lists the partitions";
        assert!(refused.err.contains(why), "{refused:?}");
    }
    let log = place.log("control.log");
    assert!(log.contains("there is no such partition"), "{log}");
    // Upper and lower case are the same, as in UUIDs.
    let same = names[0].to_uppercase();
    let used = succeed(&mut limited(&place, "where", Some(&same)));
    assert_eq!(number(&used, "launched "), 1);
}

#[test]
fn a_partition_without_a_daemon_is_an_error() {
    let place = daemon_with_partitions();
    let name = add(&place, &[1]).remove(0);
    assert_eq!(place.control(&["quit"]).code, 0);
    let refused = finish(&mut limited(&place, "where", Some(&name)));
    assert_eq!(refused.code, 1);
    let why = format!("and {PARTITION} is set");
    assert!(refused.err.contains(&why), "{refused:?}");
}

#[test]
fn a_device_that_is_all_in_partitions_is_for_their_clients_only() {
    let place = daemon_with_partitions();
    let names = add(&place, &[4]);
    let mut without = limited(&place, "where", None);
    let refused = finish(without.env("MPSSHIM_NOTICES", "stderr"));
    assert_eq!(refused.code, 1);
    assert!(
        refused
            .err
            .contains("all multiprocessors are in static partitions"),
        "{refused:?}"
    );
    let used = succeed(&mut limited(&place, "where", Some(&names[0])));
    assert_eq!(number(&used, "launched "), 4);
}

#[test]
fn partitions_stay_while_the_device_has_clients() {
    let place = daemon_with_partitions();
    let names = add(&place, &[1, 1]);
    let uuid = uuid(&place);
    let mut inside = Located::start(limited(&place, "whereabouts", Some(&names[0])));
    assert_eq!(inside.place(), "on 0");
    let pid = inside.0.pid();
    let changed = "its partitions can be changed once they have ended";
    for (line, why) in [
        (
            "sm_partition add {} 1",
            format!("Device {{}} has clients ({pid}): {changed}\n"),
        ),
        (
            "sm_partition rm {} 1",
            format!("Partition {{}}/1 is in use by clients {pid}\n"),
        ),
        (
            "sm_partition rm {} 2",
            format!("Device {{}} has clients ({pid}): {changed}\n"),
        ),
    ] {
        assert_eq!(ask(&place, &uuid, line), (1, why), "{line}");
    }
    assert_eq!(list(&place).len(), 3);
    inside.end();
    wait_until("the client has gone", || in_use(&place).is_empty());
    assert_eq!(ask(&place, &uuid, "sm_partition rm {} 1").0, 0);
    // The server that runs already learns of it.
    let refused = finish(&mut limited(&place, "where", Some(&names[0])));
    assert_eq!(refused.code, 1);
    let mut second = Located::start(limited(&place, "whereabouts", Some(&names[1])));
    assert_eq!(second.place(), "on 1");
    let mut rest = Located::start(limited(&place, "whereabouts", None));
    assert_eq!(rest.place(), "on 0 2 3");
    second.end();
    rest.end();
}

#[test]
fn clients_in_direct_mode_are_refused() {
    let place = daemon_with_partitions();
    let mut direct = client(&place, &["work", "1"]);
    direct
        .env("MPSSHIM_MODE", "direct")
        .env("MPSSHIM_NOTICES", "stderr");
    let refused = finish(&mut direct);
    assert_eq!(refused.code, 1);
    assert!(
        refused.err.contains("clients get proxy mode only"),
        "{refused:?}"
    );
}

#[test]
fn clients_keep_their_partitions_in_the_next_server() {
    let place = daemon_with_partitions();
    let names = add(&place, &[1, 2]);
    let programs = [Some(&names[0]), Some(&names[1]), None];
    let mut programs = programs.map(|name| {
        let name = name.map(String::as_str);
        Located::start(limited(&place, "whereabouts", name))
    });
    let expected = ["on 0", "on 1 2", "on 3"];
    assert_eq!(programs.each_mut().map(Located::place), expected);
    let old = server(&place).expect("a server").to_string();
    let restarted = place.control(&["restart_server", &old]);
    assert_eq!(restarted.code, 0, "{restarted:?}");
    assert_eq!(programs.each_mut().map(Located::place), expected);
    kill_server(&place);
    assert_eq!(programs.each_mut().map(Located::place), expected);
    wait_until("the clients are in the next server", || {
        in_use(&place) == [Value::Null, json!(1), json!(2)]
    });
    programs.into_iter().for_each(Located::end);
}

#[test]
fn partitions_outlive_their_daemon_beside_a_server() {
    let place = daemon_with_partitions();
    add(&place, &[1]);
    let uuid = uuid(&place);
    let create = "-p 3 sm-partition create train --device=0 --chunks=2";
    assert_eq!(ask(&place, &uuid, create), (0, String::new()));
    let mut inside = Located::start(limited(&place, "whereabouts", Some(&format!("{uuid}/2"))));
    assert_eq!(inside.place(), "on 1 2");
    let named = |place: &Place| ask(place, &uuid, "-p 3 sm-partition list --format=csv,noheader");
    let rows = ",{},created,1,1,{}/1,\ntrain,{},created,2,2,{}/2,\n";
    let before = list(&place);
    // The next daemon has them whether it is started with the option or not.
    for options in [&["-d", "-S"][..], &["-d"]] {
        let pid = place.daemon_pid();
        place.signal_daemon(Signal::SIGKILL);
        wait_until("the daemon has ended", || has_ended(pid));
        assert_eq!(place.control(options).code, 0);
        wait_until("the server is taken over", || {
            let listed = place.control(&["lspart", "--format=json"]);
            listed.code == 0 && in_use(&place) == [json!(2)]
        });
        assert_eq!(list(&place), before);
        assert_eq!(named(&place), (0, rows.to_owned()));
        let mut rest = Located::start(limited(&place, "whereabouts", None));
        assert_eq!(rest.place(), "on 3");
        rest.end();
        assert_eq!(inside.place(), "on 1 2");
    }
    inside.end();
}

/// The next server has no clients until it has restored their sessions.
#[test]
fn partitions_stay_while_the_next_server_restores_the_sessions() {
    let place = daemon_with_partitions();
    let names = add(&place, &[1, 2]);
    let uuid = uuid(&place);
    let mut inside = Located::start(limited(&place, "whereabouts", Some(&names[1])));
    assert_eq!(inside.place(), "on 1 2");
    wait_until("the client is listed", || in_use(&place) == [json!(2)]);
    for _ in 0..3 {
        let old = kill_server(&place);
        wait_until("the next server has the client", || {
            let (code, text) = ask(&place, &uuid, "sm_partition rm {} 2");
            let is_kept = text.contains("clients") && code == 1;
            assert!(is_kept, "{text}\n{}", place.log("control.log"));
            server(&place).is_some_and(|next| next != old) && in_use(&place) == [json!(2)]
        });
        assert_eq!(inside.place(), "on 1 2");
    }
    inside.end();
}
