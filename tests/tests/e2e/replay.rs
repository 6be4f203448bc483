//! Sessions with work in flight whose kernels run again in the next server: `MPSSHIM_REPLAY=kernels`.

use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::scene::{daemon, daemon_with};
use mpsshim_tests::survivors::{
    ILLEGAL_ADDRESS, RPC_FAILURE, Survivor, kill_server, portable, server, wait_until_portable,
};
use std::time::Duration;

/// Kills the server, and waits for the next one.
fn end_server(place: &Place) {
    let killed = kill_server(place);
    wait_until("another server runs", || {
        server(place).is_some_and(|pid| pid != killed)
    });
}

fn requests(answer: &str) -> u32 {
    let requests = answer.strip_prefix("inferred ");
    let requests = requests.and_then(|requests| requests.parse().ok());
    requests.unwrap_or_else(|| panic!("{answer}"))
}

/// How many commands ran again, by the log.
fn repeated(place: &Place) -> usize {
    place.log("server.log").matches("ran again").count()
}

/// How many servers have gone on with sessions, by the log.
fn adoptions(place: &Place) -> usize {
    let log = place.log("server.log");
    log.matches("Sessions of the server before").count()
}

#[test]
fn work_in_flight_runs_again_after_kills_at_any_instant() {
    repeats_after_kills("infer");
}

#[test]
fn work_in_flight_with_registered_memory_runs_again() {
    repeats_after_kills("infer-registered");
}

/// Kills the server until work of a client that serves such requests has run again ten times.
fn repeats_after_kills(request: &str) {
    let place = daemon();
    let mut survivor = Survivor::start_with_replay(&place);
    assert!(requests(&survivor.ask(&format!("{request} 50"))) > 0);
    // Whether a kill finds work in flight depends on the machine.
    let mut round = 0u64;
    while repeated(&place) < 10 {
        assert!(round < 200, "{}", place.log("server.log"));
        round += 1;
        survivor.say(&format!("{request} 300"));
        std::thread::sleep(Duration::from_micros(20_000 + round * 7_919 % 100_000));
        end_server(&place);
        let answer = survivor.program.line();
        assert!(
            answer.starts_with("inferred "),
            "{answer} {}",
            place.log("server.log")
        );
    }
    survivor.round();
    survivor.end();
}

/// A program that changes variables and a graph in each step, and waits as `request` says, with the number of its steps.
fn stepper(place: &Place, request: &str) -> (Survivor, u32) {
    let mut survivor = Survivor::start_with_replay(place);
    assert_eq!(survivor.ask(&format!("{request} 10")), "stepped 1");
    (survivor, 1)
}

/// Variables and graphs are those of the last wait when the commands since run again.
#[test]
fn variables_and_graphs_that_have_changed_since_are_changed_again() {
    changed_again("step", (6, 200), false);
}

/// Kills the server until the work of such a program has run again so often, by so many kills at most. `may_be_lost`: also at a
/// kill amid a step.
fn changed_again(request: &str, (times, most): (usize, u64), may_be_lost: bool) {
    let place = daemon();
    let ((mut survivor, mut steps), mut kills) = (stepper(&place, request), 0);
    // Whether a kill finds work in flight depends on the machine.
    while repeated(&place) < times {
        assert!(kills < most, "{}", place.log("server.log"));
        if !is_portable_soon(&place, &mut survivor) {
            (survivor, steps) = stepper(&place, request);
            wait_until_portable(&place, 1);
        }
        (kills, steps) = (kills + 1, steps + 1);
        survivor.say(&format!("{request} 4000"));
        std::thread::sleep(Duration::from_micros(kills * 7_919 % 60_000));
        end_server(&place);
        let (answer, log) = (survivor.program.line(), place.log("server.log"));
        if may_be_lost && answer.starts_with(RPC_FAILURE) {
            (survivor, steps) = stepper(&place, request);
            continue;
        }
        assert_eq!(answer, format!("stepped {steps}"), "{log}");
    }
    if is_portable_soon(&place, &mut survivor) {
        survivor.end();
    }
}

/// Waits until a client is portable. `false`: it is lost, because its server was killed after a step had ended and before the
/// variables were saved.
fn is_portable_soon(place: &Place, survivor: &mut Survivor) -> bool {
    let mut is_lost = false;
    wait_until("the client is portable or lost", || {
        let pid = i64::from(survivor.program.pid());
        if let Some(portable) = portable(place).get(&pid) {
            return *portable;
        }
        let answer = survivor.ask("round");
        is_lost = [RPC_FAILURE, ILLEGAL_ADDRESS].contains(&&*answer);
        assert!(is_lost || answer.starts_with("ok "), "{answer}");
        is_lost
    });
    !is_lost
}

#[test]
fn without_the_setting_work_in_flight_is_lost() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    // Requests would leave a moment without work in flight on a busy machine.
    assert_eq!(survivor.ask("launch 1000000"), "launched");
    end_server(&place);
    assert_eq!(survivor.ask("round"), RPC_FAILURE);
    assert_eq!(repeated(&place), 0);
}

#[test]
fn a_fault_of_another_client_repeats_work_in_flight() {
    let place = daemon_with(&[("MPSSHIM_QUARANTINE", "off")]);
    let mut survivors: Vec<Survivor> = (0..2)
        .map(|_| Survivor::start_with_replay(&place))
        .collect();
    let mut round = 0;
    while repeated(&place) < 5 {
        assert!(round < 50, "{}", place.log("server.log"));
        round += 1;
        let mut faulty = Survivor::start(&place);
        for survivor in &mut survivors {
            survivor.say("infer 1000");
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(faulty.ask("stray"), ILLEGAL_ADDRESS);
        for survivor in &mut survivors {
            let answer = survivor.program.line();
            assert!(
                answer.starts_with("inferred "),
                "{answer} {}",
                place.log("server.log")
            );
        }
    }
    survivors.into_iter().for_each(Survivor::end);
}

/// Also one that changes variables and graphs: it is complete when the kernel that faults runs alone, and goes on once more. It is
/// lost if its work was complete at the first fault, or if it takes long to see that it is at the second one.
#[test]
fn a_client_whose_work_has_run_again_survives_the_second_fault() {
    for request in ["step", "step-call"] {
        let place = daemon_with(&[("MPSSHIM_QUARANTINE", "off")]);
        let again = |survivor: &Survivor| {
            let said = format!(
                "commands of client {{PID: {}, Context ID: ",
                survivor.program.pid()
            );
            let log = place.log("server.log");
            let lines = log.lines().filter(|line| line.contains(&said));
            lines.filter(|line| line.contains("ran again")).count()
        };
        let (mut survivor, mut steps) = stepper(&place, request);
        let (mut rounds, mut survived) = (0, 0);
        while survived < 3 {
            assert!(rounds < 40, "{}", place.log("server.log"));
            rounds += 1;
            let mut faulty = Survivor::start_with_replay(&place);
            faulty.round();
            let before = again(&survivor);
            let mut is_lost = !is_portable_soon(&place, &mut survivor);
            if !is_lost {
                steps += 1;
                survivor.say(&format!("{request} 4000"));
                std::thread::sleep(Duration::from_millis(20));
                assert_eq!(faulty.ask("stray 8"), ILLEGAL_ADDRESS);
                let answer = survivor.program.line();
                is_lost = answer == ILLEGAL_ADDRESS;
                assert!(is_lost || answer == format!("stepped {steps}"), "{answer}");
                is_lost = is_lost || !is_portable_soon(&place, &mut survivor);
            }
            if is_lost {
                (survivor, steps) = stepper(&place, request);
            } else if again(&survivor) > before {
                survived += 1;
            }
        }
    }
}

/// A kernel that faults is not run again and again: beside others it runs once more, alone.
#[test]
fn the_client_whose_kernel_faults_does_not_go_on() {
    let place = daemon_with(&[("MPSSHIM_QUARANTINE", "off")]);
    let mut survivor = Survivor::start_with_replay(&place);
    // Few such kernels may be in flight, so that the next ones wait behind the fault.
    const AMONG_OTHERS: &str = "stray 8";
    for beside in [false, true, true] {
        let mut faulty = Survivor::start_with_replay(&place);
        faulty.round();
        if beside {
            survivor.say("infer 2000");
            std::thread::sleep(Duration::from_millis(50));
        }
        let servers = adoptions(&place);
        let answer = faulty.ask(AMONG_OTHERS);
        assert_eq!(answer, ILLEGAL_ADDRESS, "{}", place.log("server.log"));
        if beside {
            let answer = survivor.program.line();
            let log = place.log("server.log");
            assert!(answer.starts_with("inferred "), "{answer}: {log}");
        }
        survivor.round();
        let more = adoptions(&place) - servers;
        assert!(more <= 2, "{more} servers: {}", place.log("server.log"));
    }
    survivor.end();
}

#[test]
fn a_host_function_that_has_not_run_runs_behind_the_work_that_runs_again() {
    let place = daemon();
    // A program is lost if its function has run at the kill.
    let mut rounds = 0;
    while repeated(&place) < 3 {
        assert!(rounds < 100, "{}", place.log("server.log"));
        let mut survivor = Survivor::start_with_replay(&place);
        loop {
            rounds += 1;
            survivor.say("later 20000");
            std::thread::sleep(Duration::from_micros(rounds * 7_919 % 50_000));
            end_server(&place);
            match &*survivor.program.line() {
                "CUDA_SUCCESS (0), called 1" => {}
                // It has run, but not returned for the server; or it never runs, as without a server.
                lost => break assert!(lost.starts_with(RPC_FAILURE), "{lost}"),
            }
            if repeated(&place) >= 3 {
                break survivor.end();
            }
        }
    }
}

/// A function that has run with nothing else in flight is a wait: what comes behind it can run again.
#[test]
fn programs_that_learn_from_host_functions_alone_go_on() {
    let place = daemon();
    let begin = || {
        let mut survivor = Survivor::start_with_replay(&place);
        assert!(requests(&survivor.ask("infer-call 50")) > 0);
        survivor
    };
    let mut survivor = begin();
    // A program is lost if its function has run at the kill, and the server has not seen that nothing else is in flight.
    let mut rounds = 0u64;
    while repeated(&place) < 10 {
        assert!(rounds < 100, "{}", place.log("server.log"));
        rounds += 1;
        survivor.say("infer-call 300");
        std::thread::sleep(Duration::from_micros(20_000 + rounds * 7_919 % 100_000));
        end_server(&place);
        let answer = survivor.program.line();
        if !answer.starts_with("inferred ") {
            assert!(answer.starts_with(RPC_FAILURE), "{answer}");
            survivor = begin();
        }
    }
    survivor.round();
    survivor.end();
}

/// Also with variables and graphs, which are not saved while there is work that may have to run again.
#[test]
fn variables_are_saved_behind_host_functions() {
    changed_again("step-call", (6, 100), true);
}

#[test]
fn a_host_function_is_never_called_twice() {
    let place = daemon();
    let mut survivor = Survivor::start_with_replay(&place);
    survivor.say("call 1000000");
    assert_eq!(survivor.program.line(), "called");
    std::thread::sleep(Duration::from_millis(50));
    end_server(&place);
    assert_eq!(survivor.program.line(), RPC_FAILURE);
    assert_eq!(repeated(&place), 0);
}
