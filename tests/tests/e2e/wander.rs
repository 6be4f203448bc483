//! Programs of random valid calls (`tests/src/bin/wander/`), natively and through the proxy, while their server is killed,
//! faults or is replaced: they compare memory, addresses and attributes with a model of their own.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::programs::{DriverFolder, Running, finish, preloaded, succeed, well};
use mpsshim_tests::scene::daemon_with;
use mpsshim_tests::survivors::{RPC_FAILURE, kill_server, portable, server};
use std::process::Command;
use std::time::Duration;

/// A daemon at which programs stay in one server.
fn place() -> Place {
    daemon_with(&[("MPSSHIM_QUARANTINE", "off")])
}

/// A program that walks when it is told to.
struct Walker {
    program: Running,
    seed: u32,
    steps: u32,
}

impl Walker {
    fn start(place: &Place, seed: u32) -> Walker {
        let mut command = preloaded(artifact("wander"), place.pipe());
        command.args(["--seed", &seed.to_string()]);
        let program = Running::start_until(&mut command, "started");
        Walker {
            program,
            seed,
            steps: 0,
        }
    }

    fn begin(&mut self, steps: u32) {
        self.steps += steps;
        self.program.say(&format!("walk {steps}"));
    }

    /// Whether the walk has ended well; `false`: the session was lost with its server. Anything else is a failure.
    fn is_well(&mut self) -> bool {
        let answer = self.program.line();
        let is_well = answer.starts_with(&format!("ok {} ", self.steps));
        let has_ended = answer.starts_with("seed ") && answer.ends_with(RPC_FAILURE);
        assert!(is_well || has_ended, "{}: {answer}", self.seed);
        is_well
    }

    fn must_be_well(&mut self) {
        assert!(self.is_well(), "seed {} was lost", self.seed);
    }

    fn walk(&mut self, steps: u32) {
        self.begin(steps);
        self.must_be_well();
    }

    fn end(self) {
        assert_eq!(well(&self.program.finish(PATIENCE)), "");
    }
}

fn with_arguments(mut command: Command, seed: u32, more: &[&str]) -> Command {
    command.args(["--seed", &seed.to_string(), "--steps", "250"]);
    command.args(more);
    command
}

#[test]
fn random_programs_are_right_natively_and_through_the_proxy() {
    let (place, folder) = (place(), DriverFolder::new());
    for seed in 1..=5 {
        let native = with_arguments(folder.native(artifact("wander")), seed, &[]);
        let proxied = with_arguments(preloaded(artifact("wander"), place.pipe()), seed, &[]);
        let [native, proxied] = [native, proxied].map(|mut command| succeed(&mut command));
        assert!(native.starts_with("ok 250 "), "{native}");
        assert_eq!(native, proxied, "seed {seed}");
    }
    for seed in 1..=3 {
        let command = preloaded(artifact("wander"), place.pipe());
        let mut command = with_arguments(command, seed, &["--bound"]);
        let done = finish(&mut command);
        assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
    }
}

/// Which of the programs are portable once all are, or after some hundred looks: a graph may bind a program until it is destroyed.
fn portable_ones(place: &Place, walkers: &[Walker]) -> Vec<bool> {
    let mut found = Vec::new();
    for _ in 0..200 {
        let portable = portable(place);
        let is_portable = |walker: &Walker| portable.get(&i64::from(walker.program.pid()));
        found = walkers
            .iter()
            .map(|walker| is_portable(walker) == Some(&true))
            .collect();
        if found.iter().all(|portable| *portable) {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    found
}

#[test]
fn random_programs_at_rest_outlive_their_server() {
    let place = place();
    let mut seeds = 1..;
    let mut new = || Walker::start(&place, seeds.next().expect("no end"));
    let mut walkers: Vec<Walker> = (0..3).map(|_| new()).collect();
    let mut kept = 0;
    for _ in 0..12 {
        walkers.iter_mut().for_each(|walker| walker.begin(30));
        walkers.iter_mut().for_each(Walker::must_be_well);
        let portable = portable_ones(&place, &walkers);
        kill_server(&place);
        walkers.iter_mut().for_each(|walker| walker.begin(1));
        for (walker, portable) in walkers.iter_mut().zip(portable) {
            let is_well = walker.is_well();
            assert!(is_well || !portable, "seed {} was lost", walker.seed);
            kept += u32::from(portable);
            if !is_well {
                *walker = new();
            }
        }
    }
    assert!(kept > 12, "only {kept} of 36 were portable");
    walkers.iter_mut().for_each(|walker| walker.walk(30));
    walkers.into_iter().for_each(Walker::end);
}

#[test]
fn random_programs_work_on_while_their_server_is_replaced() {
    let place = place();
    let mut walkers: Vec<Walker> = (11..=13).map(|seed| Walker::start(&place, seed)).collect();
    for _ in 0..5 {
        walkers.iter_mut().for_each(|walker| walker.begin(120));
        let old = server(&place).expect("a server");
        // Clients that are bound all the time stay.
        let done = place.control(&["restart_server", &old.to_string(), "-t", "600"]);
        assert_eq!(done.code, 0, "{}{}", done.out, done.err);
        walkers.iter_mut().for_each(Walker::must_be_well);
    }
    walkers.into_iter().for_each(Walker::end);
}

#[test]
fn kills_at_any_instant_leave_random_programs_right_or_end_them() {
    let place = place();
    let mut seeds = 21..;
    let mut new = || Walker::start(&place, seeds.next().expect("no end"));
    let mut walkers: Vec<Walker> = (0..2).map(|_| new()).collect();
    let mut lost = 0;
    for round in 0..20u64 {
        walkers.iter_mut().for_each(|walker| walker.begin(30));
        std::thread::sleep(Duration::from_micros(round * 1_709 % 30_000));
        let killed = kill_server(&place);
        for walker in &mut walkers {
            if !walker.is_well() {
                lost += 1;
                *walker = new();
            }
        }
        // After three servers that have not come to serve, the daemon refuses clients.
        wait_until("the next server serves", || {
            let next = server(&place).filter(|pid| *pid != killed);
            next.is_some_and(|pid| {
                let status = place.control(&["get_server_status", &pid.to_string()]);
                status.out.trim() == "ACTIVE"
            })
        });
    }
    println!("{lost} of 40 walks were lost");
    for walker in &mut walkers {
        walker.begin(30);
        // It may have been lost after its last answer.
        walker.is_well();
    }
}
