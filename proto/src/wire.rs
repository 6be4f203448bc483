//! The facts that a client and its server must agree on before they communicate. The first packets carry their
//! [`fingerprint`].
//!
//! They are read from the declarations themselves, so that a change to one of them always changes the fingerprint:
//! every entry point, every operation, every struct that travels, every field of the memory that both sides map.
//!
//! A server also speaks the [wires](Wire) of earlier releases whose facts all still hold ([`SPOKEN`]).

use crate::direct::{self, Page, Turn};
use crate::handshake::{ClientHello, DescriptorNote, PROTOCOL_VERSION, Welcome, Wire};
use crate::ops::Op;
use crate::segment::{self, FaultCounts, Header, Progress, Sleeper};
use crate::user_memory::{self, UserMemory};
use crate::{arena, message, ring};
use mpsshim_api::cuda;
use mpsshim_api::table::TABLE;
use std::iter;
use std::mem::offset_of;
use std::sync::LazyLock;

/// The wire of this release's library. A test fails, and names the right number, if the fingerprint is another one.
pub const OWN: Wire = Wire {
    protocol: PROTOCOL_VERSION,
    fingerprint: 0xd6cc_cd25_5a2c_f763,
};

/// The wire of release 0.1.0.
pub const OF_0_1_0: Wire = Wire {
    protocol: 7,
    fingerprint: 0x3ac7_42ab_3a95_3b62,
};

/// The wires that this release's server speaks, its own first. `tests/releases` has the facts of the others: a test fails if
/// one of them does not hold any more. The wire is then to be removed from here, and programs with the library of that
/// release get a server of that release, if it is there.
pub const SPOKEN: &[Wire] = &[OWN, OF_0_1_0];

/// Whether this release's server speaks a wire.
pub fn is_spoken(wire: Wire) -> bool {
    SPOKEN.contains(&wire)
}

/// A number that differs between builds with different declarations.
pub fn fingerprint() -> u64 {
    static FINGERPRINT: LazyLock<u64> = LazyLock::new(|| {
        let facts: Vec<String> = facts().collect();
        fingerprint_of(facts.iter().map(String::as_str))
    });
    *FINGERPRINT
}

/// The facts, in words, in an order that does not change.
pub fn facts() -> impl Iterator<Item = String> {
    let entry_points = TABLE.iter().map(|row| format!("{row:?}"));
    let operations = Op::ALL.iter().map(|op| {
        let (number, kind) = (*op as u16, op.kind());
        let (structs, rest) = (op.structs(), op.has_rest());
        format!("{op:?} = {number}: {kind:?} {structs:?} {rest}")
    });
    let structs = structs().map(|(name, fields, len)| format!("{name} {fields} {len}"));
    entry_points
        .chain(operations)
        .chain(structs)
        .chain(shared_memory())
}

/// The fingerprint of the facts of another release.
pub fn fingerprint_of<'a>(facts: impl Iterator<Item = &'a str>) -> u64 {
    let mut hash = Fnv::new();
    facts.for_each(|fact| hash.text(fact));
    hash.0
}

/// Name, fields and bytes of each struct of plain words.
fn structs() -> impl Iterator<Item = (&'static str, &'static str, usize)> {
    let all = [
        message::STRUCTS,
        message::array::STRUCTS,
        message::context::STRUCTS,
        message::graph::STRUCTS,
        message::image::STRUCTS,
        message::memory::STRUCTS,
        message::stream::STRUCTS,
    ];
    all.into_iter().chain(cuda::STRUCTS).flatten().copied()
}

macro_rules! layout {
    ($name:ident: $($field:ident)*) => {
        format!(
            concat!(stringify!($name), " {}", $(" ", stringify!($field), " {}"),*),
            size_of::<$name>(),
            $(offset_of!($name, $field)),*
        )
    };
}

macro_rules! offsets {
    ($name:ident: $($field:ident)*) => {
        format!(
            concat!(stringify!($name), $(" ", stringify!($field), " {}"),*),
            $(offset_of!($name, $field)),*
        )
    };
}

macro_rules! constants {
    ($($name:path)*) => {
        [$(format!(concat!(stringify!($name), " {}"), $name)),*]
    };
}

/// The parts of the packets and of the shared memory that are not declared by those structs.
fn shared_memory() -> impl Iterator<Item = String> {
    let layouts = [
        layout!(Welcome: magic protocol status mode session segment_len host_arena host_arena_len device_arena
            device_arena_len server_pid device_count devices multiprocessors memory active_thread_centipercent priority),
        layout!(DescriptorNote: token len),
        layout!(Header: head tail express_head express_tail server_sleeps answers answer_status answer_len answer_sleeps state error posted_error
            crowded sleeping sleepers faults replay),
        layout!(Sleeper: slot value state),
        layout!(FaultCounts: faults waited_ns),
        layout!(Progress: rested seen),
        layout!(Page: turn place memory),
        layout!(Turn: state asked devices free turns held_ns waited_ns submissions),
        layout!(UserMemory: used devices),
    ];
    let constants = constants! {
        segment::ANSWER segment::RING segment::RING_LEN segment::EXPRESS segment::EXPRESS_LEN segment::REGISTERED segment::FLAG_STRIDE segment::FLAGS
        segment::STAGING segment::STAGING_LEN ring::WRAP direct::PAGE_LEN user_memory::PLACES
        arena::HOST_ARENA arena::HOST_ARENA_LEN arena::DEVICE_ARENA arena::DEVICE_ARENA_STRIDE arena::VIRTUAL_ARENA
        arena::VIRTUAL_ARENA_LEN arena::MANAGED_OFFSET
    };
    // A hello may grow at its end: a reader takes the fields that it knows.
    let hello = offsets!(ClientHello: magic protocol table_hash pid mode active_thread_centipercent priority nvidia_mps
        visible_listed visible_len required notices visible partition_len partition);
    iter::once(hello).chain(layouts).chain(constants)
}

/// FNV-1a, 64 bits.
struct Fnv(u64);

impl Fnv {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// A string and its end, so that "ab", "c" and "a", "bc" differ.
    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
        self.bytes(&[0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_fingerprint_depends_on_each_fact_and_their_order() {
        let of = |facts: &[&str]| {
            let mut hash = Fnv::new();
            facts.iter().for_each(|fact| hash.text(fact));
            hash.0
        };
        let all = [of(&["a", "b"]), of(&["ab"]), of(&["b", "a"]), of(&["a"])];
        assert_eq!(HashSet::from(all).len(), all.len());
        assert_eq!(fingerprint(), fingerprint());
    }

    #[test]
    fn the_declared_fingerprint_is_that_of_the_declarations() {
        assert_eq!(
            OWN.fingerprint,
            fingerprint(),
            "the declarations have changed: set the fingerprint in OWN to {:#018x}",
            fingerprint()
        );
        assert_eq!(SPOKEN.first(), Some(&OWN));
    }

    #[test]
    #[ignore = "prints the facts, to be kept for the tests of later releases"]
    fn print_facts() {
        facts().for_each(|fact| println!("{fact}"));
    }

    #[test]
    fn no_fact_is_there_twice() {
        let mut seen = HashSet::new();
        for fact in facts() {
            assert!(seen.insert(fact.clone()), "{fact}");
        }
    }

    /// A struct that is declared in another way could change without changing the fingerprint.
    #[test]
    fn the_structs_of_all_operations_are_covered() {
        let known: HashSet<&str> = structs().map(|(name, ..)| name).collect();
        for op in Op::ALL {
            let (body, answer) = op.structs();
            for name in [body, answer] {
                let name = name.rsplit("::").next().unwrap_or(name).trim();
                assert!(
                    matches!(name, "" | "()") || known.contains(name),
                    "{op:?}: {name}"
                );
            }
        }
    }

    /// A struct within a struct shows with its name only.
    #[test]
    fn structs_within_structs_are_covered() {
        const WORDS: &[&str] = &[
            "u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64", "f32", "f64",
        ];
        let known: HashSet<&str> = structs().map(|(name, ..)| name).collect();
        for (name, fields, _) in structs() {
            for field in fields
                .split(',')
                .map(str::trim)
                .filter(|field| !field.is_empty())
            {
                let (_, kind) = field.split_once(": ").expect("a field and its type");
                let kind = kind.trim_start_matches('[');
                let kind = kind.split([';', ']']).next().unwrap_or(kind).trim();
                let kind = kind.rsplit("::").next().unwrap_or(kind);
                assert!(
                    WORDS.contains(&kind) || known.contains(kind),
                    "{name}: {field}"
                );
            }
        }
    }

    /// Known values of the 64-bit hash (draft-eastlake-fnv, appendix C).
    #[test]
    fn the_hash_is_fnv_1a() {
        for (text, expected) in [
            ("", 0xcbf2_9ce4_8422_2325),
            ("a", 0xaf63_dc4c_8601_ec8c),
            ("foobar", 0x8594_4171_f739_67e8),
        ] {
            let mut hash = Fnv::new();
            hash.bytes(text.as_bytes());
            assert_eq!(hash.0, expected, "{text}");
        }
    }

    #[test]
    fn the_fingerprint_is_of_all_declarations() {
        let facts: Vec<String> = facts().collect();
        let mut hash = Fnv::new();
        facts.iter().for_each(|fact| hash.text(fact));
        assert_eq!(fingerprint(), hash.0);
        let shared: Vec<String> = shared_memory().collect();
        assert_eq!(
            facts.len(),
            TABLE.len() + Op::ALL.len() + structs().count() + shared.len()
        );
        let hello = "ClientHello magic 0 protocol 4 ";
        assert!(shared.iter().any(|fact| fact.starts_with(hello)));
        let ring = format!("segment::RING {}", segment::RING);
        assert!(shared.contains(&ring) && facts.contains(&ring));
        let launch = ("Launch", size_of::<message::Launch>());
        assert!(structs().any(|(name, _, len)| (name, len) == launch));
        let request = format!("{:?} = {}: Request", Op::ImageLoad, Op::ImageLoad as u16);
        assert!(facts.iter().any(|fact| fact.starts_with(&request)));
    }
}
