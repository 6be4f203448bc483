//! Static partitions of named servers (`-S`, `-p 3`, `sm-partition create --server`), with clients on softgpu.

use super::named_servers::{TWO, ask, does, fails, succeeds};
use super::partitions::{
    self, Located, PARTITION, daemon_with_partitions, limited_in, number, uuid,
};
use mpsshim_tests::control_daemon::{Done, Place, has_ended, wait_until};
use mpsshim_tests::programs::{finish, succeed};
use mpsshim_tests::scene::daemon_with_options;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The rows of the list without the header, with `{}` for this UUID.
fn list(place: &Place, uuid: &str) -> String {
    let rows = succeeds(place, "sm-partition list --format=csv,noheader");
    rows.replace(uuid, "{}")
}

fn located(place: &Place, server: &str, partition: Option<&str>) -> Located {
    let pipe = place.pipe().join(server);
    Located::start(limited_in(&pipe, "whereabouts", partition))
}

fn field(place: &Place, server: &str, name: &str) -> String {
    let text = succeeds(place, &format!("server get {server} {name}"));
    text.trim_end().to_owned()
}

#[test]
fn each_server_has_a_table_of_its_own() {
    let place = daemon_with_options(&["-d", "-S"], &[TWO]);
    let devices = succeeds(&place, "device list --format=csv,noheader");
    let uuids: Vec<&str> = devices
        .lines()
        .map(|row| row.split(',').nth(3).expect("a UUID"))
        .collect();
    let [first, second] = uuids[..] else {
        panic!("two devices: {devices}");
    };
    does(&place, "server create a --allowed-devices=1");
    does(&place, "server create b");
    let user = place.uid();
    let create = |line: &str| format!("sm-partition create {line}");
    // The chunks of a table are cut regardless of those of the others.
    for line in [
        "p --server=a --device=1 --chunks=3",
        "q --device=1 --chunks=3",
        &format!("r --server=uid_{user} --device=1 --chunks=1 --include-remainder"),
        &format!("s --server=b --device={second} --chunks=4"),
        "t --server=b --device=0 --chunks=1",
    ] {
        does(&place, &create(line));
    }
    let fewer = format!("Device {second} has 1 free chunks of 4, fewer than 2");
    for (line, expected) in [
        (
            "x --server=a --device=0 --chunks=1",
            format!("the server a has no device {first}"),
        ),
        ("x --server=a --device=1 --chunks=2", fewer),
        (
            "p --device=0 --chunks=1",
            "there is a partition p already".to_owned(),
        ),
        (
            "q --server=a --device=1 --chunks=1",
            "there is a partition q already".to_owned(),
        ),
        (
            "x --server=nn --device=1 --chunks=1",
            "Server \"nn\" not found; server list lists the servers".to_owned(),
        ),
        (
            "x --server=uid_x --device=1 --chunks=1",
            "Server \"uid_x\" not found; server list lists the servers".to_owned(),
        ),
        (
            "x --server=a --device=7 --chunks=1",
            "Device 7 not found; device list lists the devices".to_owned(),
        ),
    ] {
        fails(
            &place,
            &create(line),
            &format!("sm-partition create: {expected}"),
        );
    }
    wait_until("both servers are active", || {
        ["a", "b"]
            .iter()
            .all(|name| field(&place, name, "status") == "ACTIVE")
    });
    let expected = format!(
        "name,device,state,chunks,sm-count,visible-uuid,server\n\
         q,{second},configured,3,3,{second}/2,\nr,{second},configured,1,1,{second}/3,\n\
         p,{second},created,3,3,{second}/1,a\n\
         t,{first},created,1,1,{first}/1,b\ns,{second},created,4,4,{second}/4,b\n"
    );
    assert_eq!(succeeds(&place, "sm-partition list --format=csv"), expected);
    let all = format!(
        ",{first},unallocated,4,4,,\n\
         q,{second},configured,3,3,{second}/2,\nr,{second},configured,1,1,{second}/3,\n\
         ,{second},unallocated,0,0,,\n\
         p,{second},created,3,3,{second}/1,a\n,{second},unallocated,1,1,,a\n\
         t,{first},created,1,1,{first}/1,b\n,{first},unallocated,3,3,,b\n\
         s,{second},created,4,4,{second}/4,b\n,{second},unallocated,0,0,,b\n"
    );
    let listed = succeeds(&place, "sm-partition list --all --format=csv,noheader");
    assert_eq!(listed, all);
    let json = succeeds(&place, "sm-partition list --format=json");
    let rows: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(rows[0]["server"], serde_json::Value::Null);
    assert_eq!(rows[2]["server"], "a");

    // Interface 2 has the table of users' servers only.
    let old = |line: &str| partitions::ask(&place, second, line);
    let table = "{},,0,4,0,4,false\n{},2,,3,,3,false\n{},3,,1,,1,false\n";
    let (code, text) = old("lspart --format=csv");
    assert!(code == 0 && text.ends_with(table), "{text}");
    let unknown = "Partition 1 of device {} not found; lspart lists the partitions\n";
    assert_eq!(old("sm_partition rm {} 1"), (1, unknown.to_owned()));
    assert_eq!(old("sm_partition rm {} 2"), (0, String::new()));
    let made = "Partition {}/2 created\n".to_owned();
    assert_eq!(old("sm_partition add {} 1"), (0, made));

    // Partitions of all servers are deleted by name or visible UUID, and end with their server.
    does(&place, "sm-partition delete p");
    does(&place, &format!("sm-partition delete {first}/1"));
    does(&place, "server delete b");
    let left = ",{},configured,1,1,{}/2,\nr,{},configured,1,1,{}/3,\n";
    assert_eq!(list(&place, second), left);
    does(&place, "server create b --allowed-devices=1");
    assert_eq!(list(&place, second), left, "the next b has none");
    does(&place, &create("s --server=b --device=1 --chunks=2"));
    let row = format!("{left}s,{{}},created,2,2,{{}}/1,b\n");
    wait_until("b has its partition", || list(&place, second) == row);
    // A server without a process has its partitions.
    assert_eq!(
        place
            .control(&["shutdown_server", &field(&place, "b", "pid")])
            .code,
        0
    );
    assert_eq!(
        list(&place, second),
        row.replace("s,{},created", "s,{},configured")
    );
}

/// Two named servers, a partition of one and two chunks for the first, and one of three for users' servers.
fn daemon_with_servers() -> (Place, String) {
    let place = daemon_with_partitions();
    let uuid = uuid(&place);
    for line in [
        "server create a",
        "server create b",
        "sm-partition create one --server=a --device=0 --chunks=1",
        "sm-partition create two --server=a --device=0 --chunks=2",
        "sm-partition create usual --device=0 --chunks=3",
    ] {
        does(&place, line);
    }
    (place, uuid)
}

#[test]
fn clients_get_partitions_of_their_own_server_only() {
    let (place, uuid) = daemon_with_servers();
    let name = |id: u32| format!("{uuid}/{id}");
    for (server, id, count) in [
        ("a", Some(1), 1),
        ("a", Some(2), 2),
        ("a", None, 1),
        ("", Some(3), 3),
        ("", None, 1),
        ("b", None, 4),
    ] {
        let pipe = place.pipe().join(server);
        let name = id.map(name);
        let shown = succeed(&mut limited_in(&pipe, "show", name.as_deref()));
        let seen = number(&shown, "multiprocessors ");
        assert_eq!(seen, count, "{server} {id:?}");
        let used = succeed(&mut limited_in(&pipe, "where", name.as_deref()));
        assert_eq!(number(&used, "launched "), count, "{server} {id:?}");
    }
    for (server, id) in [("", 1), ("", 2), ("b", 1), ("b", 3), ("a", 3)] {
        let pipe = place.pipe().join(server);
        let Done { code, out, err } = finish(&mut limited_in(&pipe, "where", Some(&name(id))));
        let why = format!(
            "{PARTITION}={}: there is no such partition; lspart lists the partitions, and sm-partition list (-p 3) also those \
             of named servers",
            name(id)
        );
        assert!(
            code == 1 && out.contains("CUDA_ERROR_INVALID_VALUE (1)") && err.contains(&why),
            "{server} {id}: {out}{err}"
        );
    }

    // Only clients of the same server keep its table from being changed.
    let mut inside = located(&place, "a", Some(&name(1)));
    assert_eq!(inside.place(), "on 0");
    let pid = inside.0.pid();
    let changed = "its partitions can be changed once they have ended";
    let create = "sm-partition create more --device=0 --chunks=1";
    fails(
        &place,
        &format!("{create} --server=a"),
        &format!("sm-partition create: Device {uuid} has clients ({pid}): {changed}"),
    );
    fails(
        &place,
        "sm-partition delete one",
        &format!("sm-partition delete: Partition {uuid}/1 is in use by clients {pid}"),
    );
    fails(
        &place,
        "sm-partition delete two",
        &format!("sm-partition delete: Device {uuid} has clients ({pid}): {changed}"),
    );
    for server in ["b", &format!("uid_{}", place.uid())] {
        does(&place, &format!("{create} --server={server}"));
        does(&place, "sm-partition delete more");
    }
    // It counts for the device of users' servers neither as a user of the rest.
    let rows = place.control(&["lspart", "--format=csv"]).out;
    assert!(
        rows.lines().skip(1).all(|row| row.ends_with(",false")),
        "{rows}"
    );
    inside.end();
    wait_until("the client has gone", || {
        ask(&place, "sm-partition delete one").0 == 0
    });
}

#[test]
fn clients_keep_their_partitions_in_the_next_server_and_daemon() {
    let (place, uuid) = daemon_with_servers();
    let name = |id: u32| format!("{uuid}/{id}");
    let ids = [("a", Some(1)), ("a", Some(2)), ("a", None), ("", Some(3))];
    let mut programs = ids.map(|(server, id)| located(&place, server, id.map(name).as_deref()));
    let expected = ["on 0", "on 1 2", "on 3", "on 0 1 2"];
    assert_eq!(programs.each_mut().map(Located::place), expected);
    let rows = "usual,{},created,3,3,{}/3,\none,{},created,1,1,{}/1,a\ntwo,{},created,2,2,{}/2,a\n";
    assert_eq!(list(&place, &uuid), rows);
    let check = |programs: &mut [Located; 4], way: &str| {
        assert_eq!(programs.each_mut().map(Located::place), expected, "{way}");
        wait_until("the clients are in the next server", || {
            list(&place, &uuid) == rows && field(&place, "a", "context-ids").split(' ').count() == 3
        });
        // Clients that come later are as limited.
        let pipe = place.pipe().join("a");
        for (id, count) in [(Some(2), 2), (None, 1)] {
            let name = id.map(name);
            let used = succeed(&mut limited_in(&pipe, "where", name.as_deref()));
            assert_eq!(number(&used, "launched "), count, "{way}");
        }
        let refused = finish(&mut limited_in(place.pipe(), "where", Some(&name(1))));
        assert!(refused.err.contains("there is no such partition"), "{way}");
    };
    let old = field(&place, "a", "pid");
    let restarted = place.control(&["restart_server", &old]);
    assert_eq!(restarted.code, 0, "{restarted:?}");
    check(&mut programs, "restarted");
    let old = field(&place, "a", "pid").parse().expect("a process id");
    kill(Pid::from_raw(old), Signal::SIGKILL).expect("kill");
    check(&mut programs, "killed");
    // The next daemon has them whether it is started with the option or not.
    for options in [&["-d", "-S"][..], &["-d"]] {
        let pid = place.daemon_pid();
        place.signal_daemon(Signal::SIGKILL);
        wait_until("the daemon has ended", || has_ended(pid));
        assert_eq!(place.control(options).code, 0);
        wait_until("both servers are taken over", || {
            ask(&place, "server get a status").1 == "ACTIVE\n"
                && ask(&place, "sm-partition list --format=csv,noheader").1
                    == rows.replace("{}", &uuid)
        });
        check(&mut programs, "with the next daemon");
    }
    programs.into_iter().for_each(Located::end);
}
