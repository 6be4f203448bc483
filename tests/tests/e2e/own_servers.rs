//! Programs with conditional nodes in graphs, which may end a context that other programs use: each moves to a server of its own.

use crate::restart::servers;
use mpsshim_tests::control_daemon::{Place, two_users, wait_until};
use mpsshim_tests::programs::{client, succeed};
use mpsshim_tests::scene::{daemon_with, daemon_with_options};
use mpsshim_tests::survivors::{Survivor, server, wait_until_portable};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::sync::atomic::{AtomicBool, Ordering};

fn place(more: &[(&str, &str)]) -> Place {
    // Loops of several clients, or beside work of others, end their context.
    daemon_with(&[&[("SOFTGPU_LOOPS", "fault")], more].concat())
}

/// The server of a program.
fn server_of(place: &Place, survivor: &Survivor) -> i32 {
    let pid = survivor.program.pid().to_string();
    let rows = place.ps();
    let row = rows.iter().find(|row| row["pid"] == pid);
    row.expect("a client")["server"]
        .parse()
        .expect("a process id")
}

/// Whether a server has more hardware queues than the driver's default.
fn has_many_queues(pid: i32) -> bool {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).expect("a server");
    let mut parts = environment.split(|byte| *byte == 0);
    parts.any(|part| part.starts_with(b"CUDA_DEVICE_MAX_CONNECTIONS="))
}

/// Does these rounds with loops, which are right.
fn loops(survivor: &mut Survivor, rounds: std::ops::RangeInclusive<u32>) {
    for round in rounds {
        assert_eq!(survivor.ask("loop"), format!("looped {round}"));
    }
}

/// As [`loops`], with several programs at the same time.
fn loops_of_all<const N: usize>(
    survivors: [Survivor; N],
    rounds: u32,
    meanwhile: impl FnOnce(),
) -> [Survivor; N] {
    std::thread::scope(|scope| {
        let run = |mut survivor: Survivor| {
            scope.spawn(move || {
                loops(&mut survivor, 1..=rounds);
                survivor
            })
        };
        let all = survivors.map(run);
        meanwhile();
        all.map(|one| one.join().expect("its rounds"))
    })
}

#[test]
fn each_program_with_loops_gets_a_server_of_its_own() {
    let place = place(&[]);
    let [mut idle, mut first, mut second] = [(); 3].map(|()| Survivor::start(&place));
    let usual = server(&place).expect("a server");
    loops(&mut first, 1..=3);
    loops(&mut second, 1..=3);
    let [at, of_first, of_second] = [&idle, &first, &second].map(|one| server_of(&place, one));
    assert_eq!(at, usual);
    assert!(of_first != of_second && of_first != usual && of_second != usual);
    let many = [usual, of_first, of_second].map(has_many_queues);
    assert_eq!(many, [true, false, false]);
    for one in [&mut idle, &mut first, &mut second] {
        one.round();
    }
    loops(&mut first, 4..=6);
    // New programs get the usual server.
    let mut new = Survivor::start(&place);
    assert_eq!(server_of(&place, &new), usual);
    new.round();
    new.end();
    first.end();
    second.end();
    wait_until("the servers of single programs have ended", || {
        servers(&place) == 1
    });
    assert_eq!(server(&place), Some(usual));
    idle.round();
    idle.end();
}

#[test]
fn programs_with_loops_at_the_same_time_get_servers_one_after_the_other() {
    let place = place(&[]);
    let mut idle = Survivor::start(&place);
    let survivors = [(); 4].map(|()| Survivor::start(&place));
    let survivors = loops_of_all(survivors, 10, || idle.round());
    let mut all: Vec<i32> = survivors.iter().map(|one| server_of(&place, one)).collect();
    all.push(server_of(&place, &idle));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 5);
    survivors.into_iter().for_each(Survivor::end);
    idle.end();
}

/// The standby of a server, by the log, once it is ready.
fn standby_of(place: &Place, server: i32) -> i32 {
    let mut standby = 0;
    wait_until("its standby is ready", || {
        let log = place.log("control.log");
        let of_server = format!(" of server {server} for user");
        let started = log.lines().rev().find_map(|line| {
            let (_, said) = line.split_once("Starting standby ")?;
            said.split_once(&of_server)?.0.parse().ok()
        });
        standby = started.unwrap_or_default();
        log.contains(&format!("Server {standby} stands by"))
    });
    standby
}

#[test]
fn a_server_for_a_single_program_has_a_standby() {
    let place = place(&[("MPSSHIM_STANDBY", "1")]);
    let (mut idle, mut first) = (Survivor::start(&place), Survivor::start(&place));
    let usual = server_of(&place, &idle);
    loops(&mut first, 1..=2);
    for rounds in [3..=4, 5..=6] {
        let own = server_of(&place, &first);
        assert_ne!(own, usual);
        let standby = standby_of(&place, own);
        assert!(!has_many_queues(standby));
        wait_until_portable(&place, 2);
        kill(Pid::from_raw(own), Signal::SIGKILL).expect("a server");
        loops(&mut first, rounds);
        assert_eq!(server_of(&place, &first), standby);
    }
    idle.round();
    // It ends with its server, whose program has ended.
    let last = standby_of(&place, server_of(&place, &first));
    first.end();
    wait_until("the standby has ended", || {
        kill(Pid::from_raw(last), None).is_err()
    });
    assert_eq!(server_of(&place, &idle), usual);
    idle.end();
}

#[test]
fn a_program_that_is_alone_stays() {
    let place = place(&[]);
    let mut alone = Survivor::start(&place);
    loops(&mut alone, 1..=3);
    assert_eq!(servers(&place), 1);
    // It moves once it is not.
    let mut other = Survivor::start(&place);
    let usual = server_of(&place, &other);
    loops(&mut alone, 4..=5);
    assert_ne!(server_of(&place, &alone), usual);
    other.round();
    other.end();
    alone.end();
}

#[test]
fn the_number_of_such_servers_is_bounded() {
    let place = place(&[("MPSSHIM_OWN_SERVERS", "1")]);
    let mut idle = Survivor::start(&place);
    let survivors = [(); 3].map(|()| Survivor::start(&place));
    let survivors = loops_of_all(survivors, 2, || {});
    let usual = server_of(&place, &idle);
    let stay = survivors
        .iter()
        .filter(|one| server_of(&place, one) == usual);
    assert_eq!((stay.count(), servers(&place)), (2, 2));
    let log = place.log("control.log");
    let told = "there are as many servers for single clients as there may be";
    assert_eq!(log.matches(told).count(), 2, "{log}");
    idle.round();
    survivors.into_iter().for_each(Survivor::end);
    idle.end();
}

#[test]
fn each_user_may_have_such_a_server() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let settings = [("SOFTGPU_LOOPS", "fault"), ("MPSSHIM_OWN_SERVERS", "1")];
    let place = daemon_with_options(&["-d", "-M"], &settings);
    let mut idle = Survivor::start(&place);
    let start = |user| Survivor::start_as(&place, user, user);
    let [mut first, mut second, mut other] = [one, one, two].map(start);
    for survivor in [&mut first, &mut second, &mut other] {
        loops(survivor, 1..=2);
    }
    let usual = server_of(&place, &idle);
    let stay = [&first, &second, &other].map(|one| server_of(&place, one) == usual);
    assert_eq!(stay, [false, true, false]);
    idle.round();
    for one in [idle, first, second, other] {
        one.end();
    }
}

#[test]
fn without_such_servers_programs_take_turns() {
    let place = place(&[("MPSSHIM_OWN_SERVERS", "0")]);
    let [mut first, mut second] = [(); 2].map(|()| Survivor::start(&place));
    loops(&mut first, 1..=2);
    loops(&mut second, 1..=2);
    assert_eq!(server_of(&place, &first), server_of(&place, &second));
    first.end();
    second.end();
}

#[test]
fn a_program_that_cannot_move_takes_turns_at_once() {
    let place = place(&[]);
    let [mut bound, mut other] = [(); 2].map(|()| Survivor::start(&place));
    // A capture that goes on.
    assert_eq!(bound.ask("graph"), "graph");
    loops(&mut bound, 1..=2);
    assert_eq!(server_of(&place, &bound), server_of(&place, &other));
    other.round();
    bound.end();
    other.end();
}

#[test]
fn a_single_program_outlives_its_server_and_the_others() {
    let place = place(&[]);
    let [mut idle, mut single] = [(); 2].map(|()| Survivor::start(&place));
    loops(&mut single, 1..=2);
    let own = server_of(&place, &single);
    wait_until_portable(&place, 2);
    kill(Pid::from_raw(own), Signal::SIGKILL).expect("killed");
    loops(&mut single, 3..=4);
    let own = server_of(&place, &single);
    let usual = server_of(&place, &idle);
    assert_ne!(own, usual);
    wait_until_portable(&place, 2);
    kill(Pid::from_raw(usual), Signal::SIGKILL).expect("killed");
    idle.round();
    loops(&mut single, 5..=6);
    assert_eq!(server_of(&place, &single), own);
    // Programs get the successor of the usual server.
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    assert_eq!(servers(&place), 2);
    single.end();
    wait_until("its server has ended", || servers(&place) == 1);
    idle.round();
    idle.end();
}

#[test]
fn a_restart_meanwhile_succeeds() {
    let place = place(&[]);
    let over = AtomicBool::new(false);
    let survivors = [(); 3].map(|()| Survivor::start(&place));
    let mut idle = Survivor::start(&place);
    std::thread::scope(|scope| {
        for mut survivor in survivors {
            let over = &over;
            scope.spawn(move || {
                let mut round = 0;
                while !over.load(Ordering::Relaxed) {
                    round += 1;
                    assert_eq!(survivor.ask("loop"), format!("looped {round}"));
                }
                survivor.end();
            });
        }
        let usual = || server_of(&place, &idle).to_string();
        let outcomes: Vec<_> = (0..4)
            .map(|_| place.control(&["restart_server", &usual(), "-t", "60"]))
            .collect();
        over.store(true, Ordering::Relaxed);
        for done in outcomes {
            assert_eq!(done.code, 0, "{}{}", done.out, done.err);
        }
    });
    idle.round();
    idle.end();
}
