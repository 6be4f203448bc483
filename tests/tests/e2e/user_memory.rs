//! What all clients of a user together may have of a device's memory, in either mode and in both at once.

use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::direct_peer::DirectPeer;
use mpsshim_tests::programs::{Running, finish, preloaded, succeed};
use mpsshim_tests::scene::{control, daemon};
use nix::sys::signal::Signal;
use std::process::Command;
use std::sync::atomic::Ordering;

const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY (2)\n";
const MEMORY: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";

/// The program, which softgpu gives 4 GiB.
fn limited(place: &Place, mode: &str, arguments: &[&str]) -> Command {
    let mut command = preloaded(env!("CARGO_BIN_EXE_limited"), place.pipe());
    command.env_remove(MEMORY).env("MPSSHIM_MODE", mode);
    command.args(arguments);
    command
}

fn mebibytes(count: u64) -> String {
    (count << 20).to_string()
}

/// One that holds so much.
fn holder(place: &Place, mode: &str, count: u64) -> Running {
    let bytes = mebibytes(count);
    Running::start_until(&mut limited(place, mode, &["hold", &bytes]), "ready")
}

fn is_refused(place: &Place, mode: &str, count: u64) {
    let done = finish(&mut limited(place, mode, &["hold", &mebibytes(count)]));
    assert_eq!((done.code, done.out.as_str()), (1, OUT_OF_MEMORY), "{mode}");
}

/// Free and total memory, MiB.
fn shown(command: &mut Command) -> [u64; 2] {
    let shown = succeed(command);
    ["free ", "total "].map(|name| {
        let line = shown.lines().find_map(|line| line.strip_prefix(name));
        let number = line.unwrap_or_else(|| panic!("no {name} in {shown}"));
        number.parse().expect("a number")
    })
}

fn is_free(place: &Place, mode: &str, count: u64) {
    let now = || shown(&mut limited(place, mode, &["show"]))[0];
    wait_until(&format!("{count} MiB are free"), || now() == count);
}

fn set(place: &Place, user: u32, amount: &str) {
    let name = "set_user_device_pinned_mem_limit";
    let done = place.control(&[name, &user.to_string(), "0", amount]);
    assert_eq!((done.code, done.out.as_str()), (0, ""), "{}", done.err);
}

/// Two clients, one in each of these modes.
fn share(one: &str, other: &str) {
    let place = daemon();
    // Before there is a server.
    set(&place, place.uid(), "1G");
    assert_eq!(
        shown(&mut limited(&place, other, &["show"])),
        [1024, 1024],
        "the limit is the user's"
    );
    let first = holder(&place, one, 640);
    is_free(&place, other, 384);
    is_refused(&place, other, 448);
    let mut second = holder(&place, other, 256);
    is_free(&place, one, 128);
    is_refused(&place, one, 192);
    // A client's own limit may leave less.
    let mut own = limited(&place, other, &["show"]);
    assert_eq!(shown(own.env(MEMORY, "0=64M")), [64, 64]);
    // However it ends.
    first.kill();
    is_free(&place, other, 768);
    second.hang_up();
    is_free(&place, one, 1024);
    drop(holder(&place, one, 1024));
    is_free(&place, other, 1024);
}

#[test]
fn in_direct_mode() {
    share("direct", "direct");
}

#[test]
fn in_proxy_mode() {
    share("proxy", "proxy");
}

#[test]
fn in_both_modes_at_once() {
    share("direct", "proxy");
    share("proxy", "direct");
}

#[test]
fn a_change_is_for_those_who_are_there_too() {
    let place = daemon();
    let mut one = holder(&place, "direct", 512);
    set(&place, place.uid(), "1G");
    is_free(&place, "proxy", 512);
    set(&place, place.uid(), "256M");
    for mode in ["direct", "proxy"] {
        is_free(&place, mode, 0);
        is_refused(&place, mode, 64);
    }
    // Another user's is nobody's here.
    set(&place, 4_000_000_000, "64M");
    set(&place, place.uid(), "none");
    // To each process softgpu is a device of its own.
    is_free(&place, "direct", 4096);
    one.hang_up();
}

#[test]
fn every_way_to_allocate_is_refused() {
    let place = daemon();
    set(&place, place.uid(), "1G");
    let _holds = holder(&place, "direct", 512);
    for mode in ["direct", "proxy"] {
        let arguments = ["allocate", &mebibytes(64)];
        let pieces = succeed(&mut limited(&place, mode, &arguments));
        let ways = pieces.lines().filter(|line| line.contains(": 8 then"));
        assert!(ways.clone().count() >= 5, "{mode}: {pieces}");
        for way in ways {
            assert!(way.ends_with(OUT_OF_MEMORY.trim_end()), "{mode}: {way}");
        }
        is_free(&place, mode, 512);
    }
}

#[test]
fn the_next_daemon_knows_the_limits() {
    let place = daemon();
    let user = place.uid();
    let get = |user: u32| {
        let done = place.control(&["get_user_device_pinned_mem_limit", &user.to_string(), "0"]);
        assert_eq!(done.code, 0, "{}", done.out);
        done.out
    };
    set(&place, user, "1G");
    let guarantee = |verb: &str, amount: &[&str]| {
        let (name, user) = (
            format!("{verb}_user_device_mem_guarantee"),
            user.to_string(),
        );
        let done = place.control(&[&[&*name, &user, "0"], amount].concat());
        assert_eq!(done.code, 0, "{}", done.out);
        done.out
    };
    guarantee("set", &["256M"]);
    let mut one = holder(&place, "direct", 512);
    place.signal_daemon(Signal::SIGKILL);
    wait_until("another daemon listens", || {
        place.control(&["-d"]).code == 0
    });
    wait_until("it has taken the server over", || get(user) == "1G\n");
    assert_eq!(guarantee("get", &[]), "256M\n");
    is_free(&place, "direct", 512);
    set(&place, user, "768M");
    is_free(&place, "direct", 256);
    one.hang_up();
}

#[test]
fn nonsense_in_the_table_harms_only_the_user_s_own_count() {
    let place = daemon();
    set(&place, place.uid(), "1G");
    let mut one = holder(&place, "proxy", 256);
    let bad = DirectPeer::connect(&control(&place)).expect("a client in direct mode");
    let user = bad.user();
    assert_eq!(user.held(0), 256 << 20);
    user.add(0, bad.place(), u64::MAX);
    is_refused(&place, "proxy", 64);
    user.used.store(u32::MAX, Ordering::Relaxed);
    is_refused(&place, "direct", 64);
    for number in 0..3 {
        user.sub(0, number, u64::MAX);
        user.add(0, number, u64::MAX / 2);
    }
    bad.page().place.store(u32::MAX, Ordering::Relaxed);
    is_refused(&place, "proxy", 64);
    one.hang_up();
    drop(bad);
    // With the last of them the table goes.
    wait_until("all have gone", || place.ps().is_empty());
    is_free(&place, "direct", 1024);
}
