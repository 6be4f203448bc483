//! What the engine refuses of each operation, and with which status: a table for each subject. The harness is
//! `tests/src/refusals.rs`.

mod arrays;
mod captures;
mod graphs;
mod green;
mod images;
mod memory;
mod pools;
mod stream_operations;
mod streams;
mod virtual_memory;

use crate::engine;
use mpsshim_api::cuda::{CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_MPS_RPC_FAILURE};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::Op;
use mpsshim_proto::message::memory::PhysicalExport;
use mpsshim_proto::ring::ALIGN;
use mpsshim_tests::refusals::{Scene, Table};
use std::collections::HashSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

const FD: u32 = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A descriptor without memory behind it.
fn pipe() -> OwnedFd {
    std::io::pipe().expect("a pipe").0.into()
}

/// An allocation that another session exports.
fn exported(s: &mut Scene) -> OwnedFd {
    let handle = s.of_other(Kind::Allocation);
    s.descriptor_of_other(
        Op::PhysicalExport,
        &PhysicalExport {
            handle,
            flags: 0,
            kind: FD,
            pad: 0,
        },
    )
}

/// A test of each table, and all of them.
macro_rules! tables {
    ($($subject:ident)*) => {
        $(
            #[test]
            fn $subject() {
                let (engine, before) = engine();
                $subject::table().run(&engine, &before);
            }
        )*

        fn all() -> Vec<Table> {
            vec![$($subject::table()),*]
        }
    };
}

tables!(arrays captures graphs green images memory pools stream_operations streams virtual_memory);

/// Operations that nothing can be refused of, with the reason.
const NEVER_REFUSED: &[(Op, &str)] = &[
    (Op::Printed, "it has no body"),
    (Op::Settle, "it does nothing: the stream only places it"),
    (Op::Taken, "it has no body: the answer is all"),
    (
        Op::IpcForget,
        "an allocation that is not shared is forgotten already",
    ),
];

/// The unit tests beside the handlers.
fn unit_tests(folder: &Path, found: &mut String) {
    for entry in fs::read_dir(folder).expect("the handlers") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            unit_tests(&path, found);
        } else {
            let text = fs::read_to_string(&path).expect("a source");
            let tests = text.split_once("#[cfg(test)]");
            found.push_str(tests.map_or("", |(_, tests)| tests));
        }
    }
}

#[test]
fn every_operation_is_refused_somewhere() {
    let refused: HashSet<Op> = all().iter().flat_map(Table::refused).collect();
    let mut beside = String::new();
    let handlers = "../server/src/engine/calls";
    unit_tests(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join(handlers),
        &mut beside,
    );
    for op in Op::ALL {
        let never = NEVER_REFUSED.iter().any(|(never, _)| never == op);
        let has_rows = refused.contains(op);
        assert!(!(has_rows && never), "{op:?}: has rows, is never refused");
        let is_tested = beside.contains(&format!("Op::{op:?},"));
        assert!(
            has_rows || never || is_tested,
            "{op:?}: neither rows here nor unit tests beside its handler"
        );
    }
}

#[test]
fn a_body_that_is_too_short_ends_the_session() {
    let (engine, _) = engine();
    for op in Op::ALL.iter().filter(|op| op.lengths().0 > 0) {
        let mut peer = engine.connect().expect("a session");
        // Messages are as long as a multiple of this.
        let len = op.lengths().0.next_multiple_of(ALIGN as usize) - ALIGN as usize;
        let body = vec![0; len];
        peer.put(*op as u16, 0, &[&body]).expect("sent");
        assert_eq!(peer.await_end(), Ok(CUDA_ERROR_MPS_RPC_FAILURE), "{op:?}");
    }
}

#[test]
fn an_unknown_opcode_ends_the_session() {
    let (engine, _) = engine();
    let unknown = (1..u16::MAX).filter(|number| Op::from_u16(*number).is_none());
    // Neighbours of those that are known, and the last.
    let beside = unknown.filter(|number| {
        Op::from_u16(number - 1).is_some()
            || Op::from_u16(number + 1).is_some()
            || *number == u16::MAX - 1
    });
    for number in beside {
        let mut peer = engine.connect().expect("a session");
        peer.put(number, 0, &[&[0; 64]]).expect("sent");
        assert_eq!(peer.await_end(), Ok(CUDA_ERROR_MPS_RPC_FAILURE), "{number}");
    }
}
