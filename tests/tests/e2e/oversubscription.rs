//! Clients that have more device memory together than the device has.

use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::programs::{finish, preloaded};
use mpsshim_tests::scene::{control, daemon_with};
use mpsshim_tests::survivors::{Survivor, kill_server, server};

/// Room for one survivor and a half.
const MEMORY: (&str, &str) = ("SOFTGPU_MEMORY", "56M");
const ON: (&str, &str) = ("MPSSHIM_OVERSUBSCRIPTION", "on");
const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY (2)";

fn moved_out(place: &Place) -> u64 {
    let rows = place.ps();
    let moved = rows.iter().map(|row| &row["moved_out_memory"]);
    // A client that has just ended may still be listed, without values.
    let moved = moved.filter(|moved| !moved.is_empty());
    let moved = moved.map(|moved| moved.parse::<u64>());
    moved.map(|moved| moved.expect("a number")).sum()
}

#[test]
fn without_it_an_allocation_fails_and_the_others_keep_their_memory() {
    let place = daemon_with(&[MEMORY]);
    let mut first = Survivor::start(&place);
    let second = finish(&mut preloaded(env!("CARGO_BIN_EXE_survivor"), place.pipe()));
    assert!(
        second.out.contains(OUT_OF_MEMORY),
        "{}{}",
        second.out,
        second.err
    );
    assert_eq!(moved_out(&place), 0);
    first.round();
    first.end();
}

#[test]
fn clients_that_work_alternately_find_their_memory_as_it_was() {
    let place = daemon_with(&[MEMORY, ON]);
    let mut survivors: Vec<Survivor> = (0..3).map(|_| Survivor::start(&place)).collect();
    assert!(moved_out(&place) > 0, "they do not fit together");
    for _ in 0..3 {
        survivors.iter_mut().for_each(Survivor::round);
    }
    kill_server(&place);
    survivors.iter_mut().for_each(Survivor::round);
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn clients_that_are_all_busy_take_turns() {
    let place = daemon_with(&[MEMORY, ON]);
    let mut survivors: Vec<Survivor> = (0..3).map(|_| Survivor::start(&place)).collect();
    std::thread::scope(|scope| {
        for survivor in &mut survivors {
            scope.spawn(|| (0..25).for_each(|_| survivor.round()));
        }
    });
    let log = place.log("server.log");
    assert!(
        log.contains("bytes of device memory are back, after"),
        "{log}"
    );
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn an_allocation_that_fits_nowhere_fails_and_moves_nothing() {
    let place = daemon_with(&[MEMORY, ON]);
    let mut survivor = Survivor::start(&place);
    let mut peer = Peer::connect(&control(&place)).expect("a client");
    peer.attach().expect("attached");
    assert!(peer.memory(58 << 20).is_err(), "more than the device has");
    assert_eq!(moved_out(&place), 0);
    // All of the device but for the memory of images.
    let free = peer.mem_info().expect("memory").free;
    peer.memory(free & !((2 << 20) - 1)).expect("room was made");
    wait_until("the survivor has made room", || moved_out(&place) > 0);
    // It comes back as soon as the other one has been idle.
    survivor.round();
    survivor.end();
}

#[test]
fn an_operator_chooses_for_all_users_and_for_some() {
    let place = daemon_with(&[MEMORY]);
    let own = nix::unistd::geteuid().to_string();
    let set = |words: &[&str]| {
        let done = place.control(&[&["set_oversubscription"], words].concat());
        assert_eq!((done.code, done.out.as_str()), (0, ""), "{}", done.err);
    };
    let get = |words: &[&str]| {
        place
            .control(&[&["get_oversubscription"], words].concat())
            .out
    };
    let mut first = Survivor::start(&place);
    assert_eq!(get(&[]).trim(), "off");
    set(&["on", &own]);
    assert_eq!(
        (get(&[]).trim(), get(&[&own]).trim()),
        (format!("off\n{own} on").as_str(), "on")
    );
    let mut second = Survivor::start(&place);
    first.round();
    second.round();
    set(&["on"]);
    set(&["none", &own]);
    assert_eq!(get(&[]).trim(), "on");
    first.round();
    second.round();
    let log = place.log("server.log");
    assert!(
        log.contains(&format!("Oversubscription of user {own} set to on")),
        "{log}"
    );
    assert!(log.contains("Oversubscription set to on"), "{log}");
    // Both go on with what they have.
    set(&["off"]);
    assert_eq!(get(&[]).trim(), "off");
    first.end();
    second.round();
    second.end();
}

const MIB: u64 = 1 << 20;

fn attached(place: &Place) -> Peer {
    let mut peer = Peer::connect(&control(place)).expect("a client");
    peer.attach().expect("attached");
    peer
}

/// A column of `ps` of all clients, in the order in which they came, in MiB. `None`: it has no value.
fn mib_of(place: &Place, column: &str) -> Vec<Option<u64>> {
    let mut rows = place.ps();
    rows.sort_by_key(|row| row["id"].parse::<u64>().expect("a number"));
    let bytes = rows.iter().map(|row| row[column].parse::<u64>().ok());
    bytes.map(|bytes| bytes.map(|bytes| bytes / MIB)).collect()
}

fn succeed(place: &Place, arguments: &[&str]) -> String {
    let done = place.control(arguments);
    assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
    done.out
}

#[test]
fn guaranteed_memory_is_moved_only_for_an_operator() {
    let place = daemon_with(&[MEMORY, ON, ("MPSSHIM_DEVICE_MEM_GUARANTEE", "0=20M")]);
    let mut first = attached(&place);
    for _ in 0..4 {
        first.memory(8 * MIB).expect("room");
    }
    let mut second = attached(&place);
    assert_eq!(mib_of(&place, "memory_guarantee"), [Some(20), Some(20)]);
    // One grant of 8 MiB is beyond 20 MiB; a second one would take the first client below.
    let before = second.mem_info().expect("memory").free;
    second
        .memory(before & !(2 * MIB - 1))
        .expect("room was made");
    assert_eq!(mib_of(&place, "moved_out_memory"), [Some(8), Some(0)]);
    assert!(second.mem_info().expect("memory").free < 2 * MIB);
    assert!(second.memory(8 * MIB).is_err());
    assert_eq!(mib_of(&place, "moved_out_memory"), [Some(8), Some(0)]);
    drop(second);
    wait_until("the second client has gone", || place.ps().len() == 1);
    let server = server(&place).expect("a server").to_string();
    let own = std::process::id().to_string();
    let told = succeed(&place, &["suspend_client", &server, &own]);
    let all = format!("{} bytes in host memory", 32 * MIB);
    assert!(told.starts_with(&all), "{told}");
    let list = place.control(&["--format", "csv", "get_client_list", &server]);
    let columns = "moved_out_memory,memory_guarantee,fixed_memory,moved_to_host_bytes,";
    assert!(list.out.contains(columns), "{}", list.out);
    let values = [32 * MIB, 20 * MIB, 0, 32 * MIB].map(|bytes| bytes.to_string());
    let values = format!(",{},0,0.0\n", values.join(","));
    assert!(list.out.ends_with(&values), "{}", list.out);
}

#[test]
fn clients_with_most_memory_beyond_their_guarantees_make_room_first() {
    let place = daemon_with(&[MEMORY, ON, ("MPSSHIM_DEVICE_MEM_GUARANTEE", "0=4M")]);
    let mut clients: Vec<Peer> = (0..3).map(|_| attached(&place)).collect();
    for (client, grants) in [(0, 4), (1, 12)] {
        for _ in 0..grants {
            clients[client].memory(2 * MIB).expect("room");
        }
    }
    // Both are idle then. The first one has been idle for longer.
    std::thread::sleep(std::time::Duration::from_millis(200));
    let movable = (8 - 4 + 24 - 4) * MIB;
    let free = clients[2].mem_info().expect("memory").free - movable;
    let len = (free & !(2 * MIB - 1)) + 2 * MIB;
    clients[2].memory(len).expect("room was made");
    let moved = [Some(0), Some(2), Some(0)];
    assert_eq!(mib_of(&place, "moved_out_memory"), moved);
}

#[test]
fn contradictory_guarantees_count_in_part_and_are_logged_once() {
    let place = daemon_with(&[
        MEMORY,
        ON,
        ("MPSSHIM_DEVICE_MEM_GUARANTEE", "0=1G"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=24M"),
    ]);
    let mut clients: Vec<Peer> = (0..3).map(|_| attached(&place)).collect();
    let guaranteed = || mib_of(&place, "memory_guarantee");
    assert_eq!(guaranteed(), [Some(24), Some(24), Some(8)]);
    let logged = |why: &str| {
        let log = place.log("server.log");
        log.lines().filter(|line| line.ends_with(why)).count()
    };
    let limit = "count: its limit is less";
    let device = "count: the guarantees of other clients leave no more of the device";
    assert_eq!((logged(limit), logged(device)), (3, 1));
    // A client that ends leaves its guarantee to the others.
    drop(clients.remove(0));
    wait_until("the others have theirs", || {
        guaranteed() == [Some(24), Some(24)]
    });
    assert_eq!((logged(limit), logged(device)), (3, 1));
    // The user's replaces that of the server, at once.
    let own = nix::unistd::geteuid().to_string();
    let command = ["set_user_device_mem_guarantee", &own, "0"];
    succeed(&place, &[&command[..], &["4M"]].concat());
    wait_until("the user's counts", || guaranteed() == [Some(4), Some(4)]);
    succeed(&place, &[&command[..], &["none"]].concat());
    wait_until("the server's counts", || {
        guaranteed() == [Some(24), Some(24)]
    });
}

#[test]
fn a_guarantee_stays_with_its_client_in_the_next_server() {
    let place = daemon_with(&[MEMORY, ON, ("MPSSHIM_DEVICE_MEM_GUARANTEE", "0=20M")]);
    let mut first = Survivor::start(&place);
    let old = server(&place).expect("a server").to_string();
    succeed(&place, &["set_device_mem_guarantee", &old, "0", "none"]);
    let mut second = Survivor::start(&place);
    let own = || mib_of(&place, "memory_guarantee");
    assert_eq!(own(), [Some(20), None]);
    kill_server(&place);
    first.round();
    second.round();
    assert_eq!(own(), [Some(20), None]);
    first.end();
    second.end();
}

#[test]
fn the_cost_of_moves_is_shown() {
    let place = daemon_with(&[MEMORY, ON]);
    let mut survivor = Survivor::start(&place);
    survivor.round();
    let pid = survivor.program.pid().to_string();
    let row = || {
        let mut rows = place.ps().into_iter();
        rows.find(|row| row["pid"] == pid).expect("a client")
    };
    let number = |column: &str| row()[column].parse::<f64>().expect("a number");
    assert_eq!(number("moved_to_host_bytes"), 0.0);
    assert_eq!(number("memory_wait_ms"), 0.0);
    let server = server(&place).expect("a server").to_string();
    let told = succeed(&place, &["suspend_client", &server, &pid]);
    let bytes = number("moved_to_host_bytes");
    let expected = format!(
        "{bytes} bytes in host memory, {} bytes on the devices",
        number("fixed_memory")
    );
    assert_eq!(told.trim(), expected);
    // Without work it waits for nothing.
    assert_eq!(number("memory_wait_ms"), 0.0);
    succeed(&place, &["set_oversubscription", "off"]);
    let mut other = attached(&place);
    while other.memory(2 * MIB).is_ok() {}
    survivor.program.say("round");
    wait_until("it waits for memory", || number("memory_wait_ms") > 100.0);
    assert_eq!(number("moved_to_device_bytes"), 0.0);
    drop(other);
    survivor.is_well();
    assert_eq!(number("moved_to_device_bytes"), bytes);
    let waited = number("memory_wait_ms");
    survivor.round();
    assert_eq!(number("memory_wait_ms"), waited);
    survivor.end();
}

#[test]
fn each_move_has_its_reason_in_the_log() {
    let place = daemon_with(&[MEMORY, ON]);
    let mut survivor = Survivor::start(&place);
    let mut peer = attached(&place);
    let free = peer.mem_info().expect("memory").free & !(2 * MIB - 1);
    peer.memory(free).expect("room was made");
    survivor.round();
    let server = server(&place).expect("a server").to_string();
    let pid = survivor.program.pid().to_string();
    for command in ["suspend_client", "resume_client"] {
        succeed(&place, &[command, &server, &pid]);
    }
    let log = place.log("server.log");
    let moves = log.lines().filter_map(|line| line.split_once(" ms, for "));
    let reasons: Vec<&str> = moves.map(|(_, reason)| reason).collect();
    let needs = format!("which needs {free} bytes");
    assert!(reasons[0].ends_with(&needs), "{reasons:?}");
    assert!(reasons.contains(&"its own call"), "{reasons:?}");
    assert_eq!(
        reasons[reasons.len() - 2..],
        ["suspend_client", "resume_client"]
    );
    survivor.end();
}
