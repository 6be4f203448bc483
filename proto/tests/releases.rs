//! The wires of earlier releases that the server speaks: each of their facts still holds.

use mpsshim_proto::handshake::Wire;
use mpsshim_proto::wire::{self, OF_0_1_0, SPOKEN};
use std::collections::HashSet;

/// The wires of earlier releases with their facts, one in a line, in order.
const RELEASES: &[(Wire, &str)] = &[(OF_0_1_0, include_str!("releases/0.1.0.facts"))];

/// Whether a fact of an earlier release holds, given today's.
fn holds(fact: &str, today: &HashSet<String>) -> bool {
    // Release 0.1.0 also declares the length of the hello, which may grow at its end, and fewer of its fields.
    if let Some(fields) = fact.strip_prefix("ClientHello 784 ") {
        let begins = format!("ClientHello {fields} ");
        return today.iter().any(|now| now.starts_with(&begins));
    }
    today.contains(fact)
}

#[test]
fn the_facts_of_spoken_wires_hold() {
    let today: HashSet<String> = wire::facts().collect();
    for (wire, facts) in RELEASES {
        assert_eq!(wire::fingerprint_of(facts.lines()), wire.fingerprint);
        if SPOKEN.contains(wire) {
            let broken: Vec<_> = facts.lines().filter(|fact| !holds(fact, &today)).collect();
            assert!(
                broken.is_empty(),
                "the server does not speak {wire} any more; remove it from SPOKEN: {broken:#?}"
            );
        }
    }
}

#[test]
fn each_spoken_wire_has_its_facts_here() {
    let known = |wire: &&Wire| RELEASES.iter().any(|(of, _)| of == *wire);
    assert_eq!(SPOKEN[1..].iter().filter(known).count(), SPOKEN.len() - 1);
}

#[test]
fn a_fact_that_has_changed_does_not_hold() {
    let today: HashSet<String> = wire::facts().collect();
    assert!(holds("ClientHello 784 magic 0 protocol 4", &today));
    assert!(!holds("ClientHello 784 magic 0 protocol 8", &today));
    assert!(!holds("segment::RING 1", &today));
}
