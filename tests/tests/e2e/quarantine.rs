//! Programs that may have caused a fault, and their servers of their own.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Done, Place, as_user, has_ended, two_users, wait_until};
use mpsshim_tests::programs::{Running, preloaded, survivor, well};
use mpsshim_tests::scene::{daemon, daemon_with, daemon_with_options};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const ILLEGAL_ADDRESS: &str = "CUDA_ERROR_ILLEGAL_ADDRESS (700)";
/// Milliseconds: longer than any patience.
const ENDLESS: &str = "launch 1000000";

fn start(place: &Place, program: &Path) -> Running {
    Running::start_until(&mut preloaded(program, place.pipe()), "started")
}

fn ask(running: &mut Running, command: &str) -> String {
    running.say(command);
    running.line()
}

/// Starts the program, has it fault and waits for its end.
fn fault(place: &Place, program: &Path) {
    let mut faulty = start(place, program);
    assert_eq!(ask(&mut faulty, "stray"), ILLEGAL_ADDRESS);
    faulty.kill();
}

/// Starts the program, has it work and waits for its end.
fn work(place: &Place, program: &Path) {
    let mut good = start(place, program);
    assert!(ask(&mut good, "round").starts_with("ok 2 "));
    assert_eq!(well(&good.finish(PATIENCE)), "");
}

fn list(place: &Place, command: &[&str]) -> Vec<Value> {
    let done = place.control(&[&["--format", "json"], command].concat());
    assert_eq!(done.code, 0, "{}{}", done.out, done.err);
    serde_json::from_str(&done.out).expect("an array")
}

/// Names of the quarantined programs, oldest first.
fn quarantined(place: &Place) -> Vec<PathBuf> {
    let rows = list(place, &["quarantine", "list"]);
    let name = |row: &Value| row["program"].as_str().expect("a name").into();
    rows.iter().map(name).collect()
}

/// What `ps` says of a process.
fn client(place: &Place, running: &Running) -> Value {
    let rows = list(place, &["ps"]);
    let of_it = |row: &Value| row["pid"] == running.pid();
    rows.into_iter().find(of_it).expect("a client")
}

fn succeed(done: &Done) {
    assert_eq!((done.code, &*done.out, &*done.err), (0, "", ""));
}

/// So that something of it is in flight at every instant.
fn become_busy(place: &Place, running: &mut Running) {
    assert_eq!(ask(running, ENDLESS), "launched");
    wait_until("its kernel is in flight", || {
        client(place, running)["queued"].as_u64() > Some(0)
    });
}

#[test]
fn a_program_that_faults_at_every_start_costs_its_neighbour_one_fault() {
    let place = daemon();
    let (faulty, busy) = (survivor(&place, "faulty"), survivor(&place, "busy"));
    let mut neighbour = start(&place, &busy);
    become_busy(&place, &mut neighbour);

    fault(&place, &faulty);
    // An asynchronous call fails once the server has told the client.
    let mut answer = ask(&mut neighbour, "launch 1");
    while answer == "launched" {
        answer = ask(&mut neighbour, "launch 1");
    }
    assert_eq!(answer, ILLEGAL_ADDRESS);
    wait_until("both are listed", || {
        let listed = quarantined(&place);
        listed.contains(&faulty) && listed.contains(&busy)
    });
    let log = place.log("control.log");
    let (first, second) = (faulty.display(), busy.display());
    let said = format!("may have caused the fault; program: {first}; kernel: stray");
    assert!(log.contains(&said), "{log}");
    let said = format!("may have caused the fault; program: {second}; kernel: fill");
    assert!(log.contains(&said), "{log}");

    let mut neighbour = start(&place, &busy);
    become_busy(&place, &mut neighbour);
    let before = client(&place, &neighbour);
    assert_eq!(before["quarantined"], 1);
    for faults in 2..=10 {
        fault(&place, &faulty);
        assert_eq!(ask(&mut neighbour, "launch 1"), "launched");
        let row = client(&place, &neighbour);
        assert_eq!(
            (&row["server"], &row["id"]),
            (&before["server"], &before["id"])
        );
        wait_until("the fault is counted", || {
            let rows = list(&place, &["quarantine", "list"]);
            let of_it = |row: &&Value| row["program"] == json!(faulty);
            rows.iter()
                .find(of_it)
                .is_some_and(|row| row["faults"] == faults)
        });
    }
    let log = place.log("control.log");
    let alone = format!("alone had work in flight and has caused the fault; program: {first}");
    assert_eq!(log.matches(&alone).count(), 9, "{log}");
    let log = place.log("server.log");
    assert_eq!(log.matches("alone had work in flight").count(), 9, "{log}");
    neighbour.kill();
}

#[test]
fn a_client_that_has_left_with_work_in_flight_is_a_suspect() {
    let place = daemon();
    let (faulty, gone) = (survivor(&place, "faulty"), survivor(&place, "gone"));
    // It is there before the other one leaves: a server without clients ends, and one whose kernel goes on has new ones elsewhere.
    let mut guilty = start(&place, &faulty);
    let mut leaving = start(&place, &gone);
    become_busy(&place, &mut leaving);
    leaving.kill();
    assert_eq!(ask(&mut guilty, "stray"), ILLEGAL_ADDRESS);
    guilty.kill();
    wait_until("both are listed", || {
        let listed = quarantined(&place);
        listed.contains(&faulty) && listed.contains(&gone)
    });
    let log = place.log("server.log");
    assert!(log.contains("program: it has ended; kernel: fill"), "{log}");
}

#[test]
fn a_program_is_released_after_three_clean_runs_in_a_row() {
    let place = daemon();
    let (faulty, busy) = (survivor(&place, "faulty"), survivor(&place, "busy"));
    let mut neighbour = start(&place, &busy);
    become_busy(&place, &mut neighbour);
    fault(&place, &faulty);
    drop(neighbour.finish(PATIENCE));
    let is_listed = |program: &Path| quarantined(&place).iter().any(|listed| listed == program);
    let clean = |program: &Path, runs: u64| {
        wait_until("the run is counted", || {
            let rows = list(&place, &["quarantine", "list"]);
            let of_it = |row: &&Value| row["program"] == json!(program);
            rows.iter()
                .find(of_it)
                .is_some_and(|row| row["clean_runs"] == runs)
        });
    };
    for program in [&faulty, &busy] {
        for runs in 1..=2 {
            work(&place, program);
            clean(program, runs);
        }
    }
    // A fault makes them begin again.
    fault(&place, &faulty);
    clean(&faulty, 0);
    work(&place, &busy);
    wait_until("the neighbour is released", || !is_listed(&busy));
    for runs in 1..=2 {
        work(&place, &faulty);
        clean(&faulty, runs);
    }
    work(&place, &faulty);
    wait_until("it is released", || !is_listed(&faulty));
    assert_eq!(place.control(&["quarantine", "list"]).out, "");
    let log = place.log("control.log");
    assert_eq!(
        log.matches("released from quarantine: 3 processes").count(),
        2,
        "{log}"
    );
    let next = start(&place, &faulty);
    assert_eq!(client(&place, &next)["quarantined"], 0);
}

#[test]
fn an_operator_adds_and_releases_programs() {
    let place = daemon();
    let (good, other) = (survivor(&place, "good"), survivor(&place, "other"));
    let name = good.display().to_string();
    let mut usual = start(&place, &other);
    succeed(&place.control(&["quarantine", "add", &name]));
    assert_eq!(quarantined(&place), [good.as_path()]);
    succeed(&place.control(&["quarantine", "add", &name]));
    assert_eq!(quarantined(&place), [good.as_path()]);
    let table = place.control(&["quarantine", "list"]).out;
    assert!(
        table.starts_with("UID ") && table.contains(&name),
        "{table}"
    );

    // Two processes of it have one server, which is not the usual one.
    let apart = [start(&place, &good), start(&place, &good)];
    let servers = || list(&place, &["get_server_list"]);
    assert_eq!(servers().len(), 2);
    let server = client(&place, &apart[0])["server"].clone();
    assert_eq!(client(&place, &apart[1])["server"], server);
    assert_ne!(client(&place, &usual)["server"], server);
    assert_eq!(client(&place, &usual)["quarantined"], 0);
    let rows = list(&place, &["quarantine", "list"]);
    assert_eq!(rows[0]["server"], server);
    let row = servers().into_iter().find(|row| row["pid"] == server);
    assert_eq!(row.expect("it")["quarantined"], json!(name));

    succeed(&place.control(&["quarantine", "release", &name]));
    assert_eq!(quarantined(&place), [] as [PathBuf; 0]);
    let missing = place.control(&["quarantine", "release", &name]);
    assert_eq!(missing.err, format!("{name} is not quarantined\n"));
    // Those that are there stay where they are, the next has the usual one.
    assert_eq!(client(&place, &apart[0])["quarantined"], 1);
    let next = start(&place, &good);
    assert_eq!(client(&place, &next)["quarantined"], 0);
    apart.into_iter().for_each(|one| drop(one.finish(PATIENCE)));
    wait_until("its server has ended", || servers().len() == 1);
    assert!(ask(&mut usual, "round").starts_with("ok 2 "));
    succeed(&place.control(&["quarantine", "add", "-uid", "7", &name]));
    succeed(&place.control(&["quarantine", "release", "all"]));
    assert_eq!(quarantined(&place), [] as [PathBuf; 0]);
}

#[test]
fn without_quarantine_nothing_is_kept_apart() {
    let place = daemon_with(&[("MPSSHIM_QUARANTINE", "off")]);
    let faulty = survivor(&place, "faulty");
    for _ in 0..2 {
        fault(&place, &faulty);
    }
    let next = start(&place, &faulty);
    assert_eq!(client(&place, &next)["quarantined"], 0);
    assert_eq!(quarantined(&place), [] as [PathBuf; 0]);
    let name = faulty.display().to_string();
    let added = place.control(&["quarantine", "add", &name]);
    assert_eq!(added.code, 1);
    assert!(added.out.contains("the quarantine is off"), "{}", added.out);
    // Who it was is said nevertheless.
    wait_until("both faults are in the log", || {
        place
            .log("control.log")
            .matches("has caused the fault")
            .count()
            == 2
    });
}

#[test]
fn the_successor_of_a_quarantined_program_s_server_is_one_too() {
    let place = daemon();
    let good = survivor(&place, "good");
    succeed(&place.control(&["quarantine", "add", &good.display().to_string()]));
    let mut running = start(&place, &good);
    // Nothing of it is in flight behind a round.
    assert!(ask(&mut running, "round").starts_with("ok 2 "));
    let before = client(&place, &running)["server"].clone();
    let pid = before.as_i64().expect("a server") as i32;
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("kill");
    assert!(ask(&mut running, "round").starts_with("ok 3 "));
    let row = client(&place, &running);
    assert_ne!(row["server"], before);
    assert_eq!(row["quarantined"], 1);
    // The process counts once: it has ended without a fault, whatever became of its first server.
    drop(running.finish(PATIENCE));
    wait_until("the run is counted", || {
        list(&place, &["quarantine", "list"])[0]["clean_runs"] == 1
    });
}

#[test]
fn the_next_daemon_knows_the_servers_of_quarantined_programs() {
    let place = daemon();
    let (good, other) = (survivor(&place, "good"), survivor(&place, "other"));
    succeed(&place.control(&["quarantine", "add", &good.display().to_string()]));
    let (mut apart, mut usual) = (start(&place, &good), start(&place, &other));
    let daemon = place.daemon_pid();
    place.signal_daemon(Signal::SIGKILL);
    wait_until("the daemon has ended", || has_ended(daemon));
    succeed(&place.control(&["-d"]));
    wait_until("both servers are taken over", || {
        list(&place, &["ps"]).len() == 2
    });
    assert_eq!(client(&place, &apart)["quarantined"], 1);
    assert_eq!(client(&place, &usual)["quarantined"], 0);
    assert_eq!(quarantined(&place), [good.as_path()]);
    let second = start(&place, &good);
    assert_eq!(
        client(&place, &second)["server"],
        client(&place, &apart)["server"]
    );
    for running in [&mut apart, &mut usual] {
        assert!(ask(running, "round").starts_with("ok 2 "));
    }
}

#[test]
fn another_user_waits_for_all_servers_and_changes_his_own_programs_only() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon();
    let (good, other) = (survivor(&place, "good"), survivor(&place, "other"));
    let name = good.display().to_string();
    succeed(&place.control(&["quarantine", "add", "-uid", &one.to_string(), &name]));
    for command in [&["add", "-uid"][..], &["release", "-uid"]] {
        let uid = one.to_string();
        let words = [&["quarantine"], command, &[&uid, &name]].concat();
        let refused = place.control_as(two, &words);
        assert!(
            refused.out.contains("is reserved for root"),
            "{}",
            refused.out
        );
    }
    // Only his own are meant.
    succeed(&place.control_as(two, &["quarantine", "release", "all"]));
    assert_eq!(quarantined(&place), [good.as_path()]);

    let (apart, usual) = as_user(one, || (start(&place, &good), start(&place, &other)));
    let servers = || list(&place, &["get_server_list"]).len();
    assert_eq!(servers(), 2);
    let mut command = preloaded(&other, place.pipe());
    let mut waiting = as_user(two, || Running::start(&mut command));
    wait_until("another user's client waits", || {
        let waits = |row: &Value| row["uid"] == two && row["waiting"] == 1;
        list(&place, &["users"]).iter().any(waits)
    });
    drop(usual.finish(PATIENCE));
    let is_connected = |row: &&Value| row["state"] == "connected";
    wait_until("one server is idle", || {
        let rows = list(&place, &["ps"]);
        rows.iter().filter(is_connected).count() == 1
    });
    assert_eq!(servers(), 2, "it is not ended before the other one is idle");
    drop(apart.finish(PATIENCE));
    assert_eq!(waiting.line(), "started");
    assert_eq!(servers(), 1);

    // The same program of another user is another program.
    succeed(&place.control_as(one, &["quarantine", "release", &name]));
    assert_eq!(quarantined(&place), [] as [PathBuf; 0]);
}

#[test]
fn between_users_a_program_is_quarantined_after_its_second_fault_with_others() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon_with_options(&["-d", "-M"], &[]);
    let (first, second) = (survivor(&place, "first"), survivor(&place, "second"));
    let busy = survivor(&place, "busy");
    let count = |text: &str| place.log("control.log").matches(text).count();
    // Faults while the neighbour has work in flight.
    let fault_beside = |program: &Path, neighbour: &mut Running| {
        become_busy(&place, neighbour);
        as_user(one, || fault(&place, program));
    };
    let start_busy = || as_user(two, || start(&place, &busy));

    let mut neighbour = start_busy();
    fault_beside(&first, &mut neighbour);
    wait_until("both are suspects", || {
        count("is quarantined if it may have caused another fault") == 2
    });
    assert_eq!(quarantined(&place), [] as [PathBuf; 0]);
    neighbour.kill();

    let mut neighbour = start_busy();
    assert_eq!(client(&place, &neighbour)["quarantined"], 0);
    fault_beside(&second, &mut neighbour);
    wait_until("the neighbour is listed", || {
        quarantined(&place) == [busy.as_path()]
    });
    assert_eq!(list(&place, &["quarantine", "list"])[0]["faults"], 2);
    neighbour.kill();

    // A fault that it has caused alone is enough.
    let neighbour = start_busy();
    assert_eq!(client(&place, &neighbour)["quarantined"], 1);
    as_user(one, || fault(&place, &second));
    wait_until("it is listed", || {
        quarantined(&place) == [busy.as_path(), second.as_path()]
    });
}

#[test]
fn between_users_a_suspect_is_forgotten_after_clean_runs_or_when_released() {
    let Some([one, two]) = two_users() else {
        return;
    };
    let place = daemon_with_options(&["-d", "-M"], &[]);
    let busy = survivor(&place, "busy");
    let text = "is quarantined if it may have caused another fault";
    let noted = |program: &Path| {
        let log = place.log("control.log");
        let name = program.display().to_string();
        let of_it = |line: &&str| line.contains(text) && line.contains(&name);
        log.lines().filter(of_it).count()
    };
    for round in 1..=3 {
        // Each time another program faults beside it.
        let faulty = survivor(&place, &format!("faulty{round}"));
        let mut neighbour = as_user(two, || start(&place, &busy));
        become_busy(&place, &mut neighbour);
        as_user(one, || fault(&place, &faulty));
        wait_until("it is a suspect", || noted(&busy) == round);
        neighbour.kill();
        if round == 1 {
            for _ in 0..3 {
                as_user(two, || work(&place, &busy));
            }
            wait_until("they have gone", || list(&place, &["ps"]).is_empty());
        } else {
            succeed(&place.control(&["quarantine", "release", "all"]));
        }
    }
    assert_eq!(quarantined(&place), [] as [PathBuf; 0]);
}

#[test]
fn programs_beyond_the_bound_get_the_usual_server() {
    let place = daemon();
    let programs: Vec<PathBuf> = (0..9)
        .map(|number| survivor(&place, &format!("good{number}")))
        .collect();
    for program in &programs {
        succeed(&place.control(&["quarantine", "add", &program.display().to_string()]));
    }
    let mut apart: Vec<Running> = Vec::new();
    for program in &programs[..8] {
        apart.push(start(&place, program));
        let last = apart.last().expect("one");
        assert_eq!(client(&place, last)["quarantined"], 1);
    }
    let mut beyond = start(&place, &programs[8]);
    assert_eq!(client(&place, &beyond)["quarantined"], 0);
    assert!(ask(&mut beyond, "round").starts_with("ok 2 "));
    let log = place.log("control.log");
    let name = programs[8].display();
    let said = format!("{name} of user {} gets the usual server", place.uid());
    assert!(log.contains(&said), "{log}");
    // A further process of a program that has a server gets that one.
    let second = start(&place, &programs[0]);
    let server = |running: &Running| client(&place, running)["server"].clone();
    assert_eq!(server(&second), server(&apart[0]));

    drop(apart.pop().expect("one").finish(PATIENCE));
    wait_until("its server has ended", || {
        list(&place, &["get_server_list"]).len() == 8
    });
    let next = start(&place, &programs[8]);
    assert_eq!(client(&place, &next)["quarantined"], 1);
    assert_eq!(client(&place, &beyond)["quarantined"], 0);
}
