//! Clients that have more device memory together than the device has.

use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::programs::{finish, preloaded};
use mpsshim_tests::scene::{control, daemon_with};
use mpsshim_tests::survivors::{Survivor, kill_server};

/// Room for one survivor and a half.
const MEMORY: (&str, &str) = ("SOFTGPU_MEMORY", "56M");
const ON: (&str, &str) = ("MPSSHIM_OVERSUBSCRIPTION", "on");
const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY (2)";

fn moved_out(place: &Place) -> u64 {
    let rows = place.ps();
    let moved = rows
        .iter()
        .map(|row| row["moved_out_memory"].parse::<u64>());
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
