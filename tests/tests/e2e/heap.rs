//! Memory that kernels allocate with `malloc`: each program has a heap of its own, of the size that it has set.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::programs::{DriverFolder, Running, client, preloaded, well};
use mpsshim_tests::scene::daemon;
use std::process::Command;

/// As many blocks of a MiB as fit a heap of this size on the driver itself.
fn natively(arguments: &[&str]) -> String {
    let driver = DriverFolder::new();
    let program = artifact("client");
    let mut alone = Running::start(driver.native(program).arg("heap").args(arguments));
    let line = alone.line();
    alone.say("");
    well(&alone.finish(PATIENCE));
    line
}

fn start(place: &Place, arguments: &[&str]) -> Running {
    Running::start(client(place, &["heap"]).args(arguments))
}

fn end(mut program: Running) {
    program.say("");
    well(&program.finish(PATIENCE));
}

/// Contexts of the clients, in order; 1 is the one that clients share.
fn contexts(place: &Place) -> Vec<String> {
    let rows = place.ps();
    let mut contexts: Vec<String> = rows
        .iter()
        .map(|row| row["device_context"].clone())
        .collect();
    contexts.sort();
    contexts
}

#[test]
fn each_program_has_a_heap_of_the_size_that_it_sets() {
    let place = daemon();
    let (usual, larger, smaller) = (natively(&[]), natively(&["32"]), natively(&["4"]));
    let mut programs = Vec::new();
    for (arguments, expected) in [
        (&[][..], &usual),
        (&["32"], &larger),
        (&["4"], &smaller),
        (&[], &usual),
    ] {
        let mut program = start(&place, arguments);
        assert_eq!(program.line(), *expected, "{arguments:?}");
        programs.push(program);
    }
    let own = contexts(&place);
    let mut different = own.clone();
    different.dedup();
    assert_eq!((own.len(), &different), (4, &own), "one for each");
    assert!(!own.contains(&"1".into()), "{own:?}");
    programs.into_iter().for_each(end);
}

#[test]
fn memory_that_a_program_leaks_is_there_for_the_next() {
    let place = daemon();
    let usual = natively(&[]);
    for _ in 0..8 {
        let mut program = start(&place, &[]);
        assert_eq!(program.line(), usual);
        end(program);
    }
    wait_until("all contexts of their own are destroyed", || {
        let log = place.log("server.log");
        let count = |what: &str| log.matches(what).count();
        count("to itself") == 8 && count("Destroying context") == 8
    });
}

/// Where all contexts are taken, a program shares the heap of the usual context, and cannot have a larger one.
#[test]
fn more_programs_than_contexts() {
    const MOST: usize = 13;
    let place = daemon();
    let usual = natively(&[]);
    let mut programs: Vec<Running> = (0..MOST).map(|_| start(&place, &[])).collect();
    for program in &mut programs {
        assert_eq!(program.line(), usual);
    }
    let mut refused = start(&place, &["32"]);
    assert_eq!(refused.line(), "CUDA_ERROR_OUT_OF_MEMORY (2)");
    let mut sharing = start(&place, &[]);
    let line = sharing.line();
    assert!(
        line.ends_with(" blocks of 8 MiB") && line != usual,
        "{line}"
    );
    assert_eq!(contexts(&place)[0], "1");
    let log = place.log("server.log");
    assert_eq!(
        log.matches("because other clients have them all").count(),
        2
    );
    end(sharing);
    end(programs.remove(0));
    let mut next = start(&place, &["32"]);
    assert_eq!(next.line(), natively(&["32"]));
    programs.push(next);
    programs.into_iter().for_each(end);
}

#[test]
fn a_program_without_a_daemon_has_its_own_context_anyway() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command: Command = preloaded(artifact("client"), folder.path());
    let mut program = Running::start(command.args(["heap", "32"]));
    assert_eq!(program.line(), natively(&["32"]));
    end(program);
}
