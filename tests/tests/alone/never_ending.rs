//! Clients that leave work behind which waits for ever, or never ends; against the real daemon and server on softgpu.

use crate::alone;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::graph::{
    BatchNode, CaptureBegin, GraphCreate, GraphInstantiate, GraphInstantiated, GraphLaunch,
    GraphNode, GraphNodeAdded,
};
use mpsshim_proto::message::stream::MemOp;
use mpsshim_proto::message::{Object, Op, Value};
use mpsshim_proto::segment;
use mpsshim_proto::shm::Mapping;
use mpsshim_tests::control_daemon::wait_until;
use mpsshim_tests::peer::{Loaded, PTX, Peer, Worker, endless_ptx, fill_params, launch};
use mpsshim_tests::scene::{Bystander, Scene, control, daemon_with};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::stat::fstat;
use std::os::fd::{AsFd, OwnedFd};
use zerocopy::IntoBytes;

/// Leaves a kernel running that never ends; the number of the session.
fn leave_endless(scene: &Scene) -> u64 {
    let mut left = Loaded::connect(&control(&scene.place), &endless_ptx());
    let function = left.peer.function(left.module, "endless").expect("it");
    let body = launch(function, left.stream, 1, 0);
    left.peer.post(Op::Launch, &body, &[]).expect("launch");
    left.peer.mem_info().expect("the launch is there");
    left.peer.welcome.session
}

fn is_gone(scene: &Scene, session: u64) -> bool {
    let name = format!("Context ID: {session}}} exiting");
    scene.place.log("server.log").contains(&name)
}

/// One wait: operation, word, value and how they are compared.
type Wait = (u32, u64, u64, u32);

fn batch(wait: Wait) -> Vec<u8> {
    let (operation, address, value, flags) = wait;
    let words = [operation.into(), address, value, flags.into(), 0, 0];
    let count = BatchNode { count: 1, flags: 0 };
    [count.as_bytes(), words.as_bytes()].concat()
}

/// A graph of these waits, one behind the other.
fn waiting_graph(peer: &mut Peer, waits: &[Wait]) -> u64 {
    let made: Value = peer
        .ask(Op::GraphCreate, &GraphCreate::default(), &[])
        .expect("a graph");
    let mut before: Option<u64> = None;
    for wait in waits {
        let body = GraphNode {
            object: made.value,
            kind: CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
            nodes: before.iter().count() as u32,
            ..GraphNode::default()
        };
        let behind = before.map_or(Vec::new(), |node| node.as_bytes().to_vec());
        let does = [behind, batch(*wait)].concat();
        let added: GraphNodeAdded = peer.ask(Op::GraphNode, &body, &does).expect("a node");
        before = Some(added.node);
    }
    made.value
}

fn captured(peer: &mut Peer, stream: u64, waits: &[Wait]) -> u64 {
    let begin = CaptureBegin {
        stream,
        ..CaptureBegin::default()
    };
    peer.ask_as(0, Op::CaptureBegin, &begin, &[])
        .expect("begin");
    for (operation, address, value, flags) in waits.iter().copied() {
        let body = MemOp {
            stream,
            operation,
            address,
            value,
            flags,
        };
        peer.post(Op::MemOp, &body, &[]).expect("post");
    }
    let object = Object { object: stream };
    let graph: Value = peer.ask(Op::CaptureEnd, &object, &[]).expect("end");
    graph.value
}

fn start(peer: &mut Peer, graph: u64, stream: u64) {
    let body = GraphInstantiate {
        graph,
        ..GraphInstantiate::default()
    };
    let made: GraphInstantiated = peer
        .ask(Op::GraphInstantiate, &body, &[])
        .expect("an instance");
    let exec = made.exec;
    peer.post(Op::GraphLaunch, &GraphLaunch { exec, stream }, &[])
        .expect("post");
    peer.mem_info().expect("the launch is there");
}

const NARROW: u32 = CU_STREAM_MEM_OP_WAIT_VALUE_32;
const WIDE: u32 = CU_STREAM_MEM_OP_WAIT_VALUE_64;

#[test]
fn a_graph_that_waits_for_a_word_goes_with_its_client() {
    let _alone = alone();
    Scene::new().beside_a_worker(|scene| {
        for by_capture in [false, true] {
            for on_host in [false, true] {
                let mut worker = scene.worker();
                let stream = worker.stream;
                let (word, _file) = match on_host {
                    true => {
                        let (range, file) = worker.peer.pinned(4096).expect("pinned memory");
                        (range.start, Some(file))
                    }
                    false => (worker.memory.start, None),
                };
                let peer = &mut worker.peer;
                let waits = [
                    (NARROW, word, 0x1234_5678, CU_STREAM_WAIT_VALUE_EQ),
                    (NARROW, word, 0x8765_4321, CU_STREAM_WAIT_VALUE_EQ),
                    (WIDE, word + 8, 3 << 40, CU_STREAM_WAIT_VALUE_GEQ),
                    (WIDE, word + 16, 1 << 63, CU_STREAM_WAIT_VALUE_AND),
                    (NARROW, word, 1, CU_STREAM_WAIT_VALUE_EQ),
                ];
                let graph = match by_capture {
                    true => captured(peer, stream, &waits),
                    false => waiting_graph(peer, &waits),
                };
                start(peer, graph, stream);
                let session = peer.welcome.session;
                drop(worker);
                let what = format!("captured: {by_capture}, pinned: {on_host}");
                wait_until(&what, || is_gone(scene, session));
            }
        }
    });
}

#[test]
fn a_wait_that_nothing_ends_gets_into_no_graph() {
    let _alone = alone();
    Scene::new().beside_a_worker(|scene| {
        let mut worker = scene.worker();
        let word = worker.memory.start;
        let peer = &mut worker.peer;
        let made: Value = peer
            .ask(Op::GraphCreate, &GraphCreate::default(), &[])
            .expect("a graph");
        let body = GraphNode {
            object: made.value,
            kind: CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
            ..GraphNode::default()
        };
        for wait in [
            (NARROW, word, 1 << 32, CU_STREAM_WAIT_VALUE_AND),
            (NARROW, word, u32::MAX.into(), CU_STREAM_WAIT_VALUE_NOR),
            (WIDE, word, u64::MAX, CU_STREAM_WAIT_VALUE_NOR),
        ] {
            let added = peer.ask_as(0, Op::GraphNode, &body, &batch(wait));
            assert_eq!(added.map(drop), Err(CUDA_ERROR_INVALID_VALUE), "{wait:?}");
        }
        worker.round().expect("the session goes on");
    });
}

#[test]
fn memory_is_freed_behind_the_work_that_uses_it() {
    let _alone = alone();
    let mut scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let mut left = Loaded::connect(&control(&scene.place), PTX);
    // It writes to its memory when it is about to end.
    let params = fill_params(left.memory.start, 3, 4_000_000);
    let body = launch(left.function, left.stream, 1, params.len());
    left.peer.post(Op::Launch, &body, &params).expect("launch");
    left.peer.mem_info().expect("the launch is there");
    let session = left.peer.welcome.session;
    drop(left);
    // Written to after it was freed, it would have cost everyone the context.
    wait_until("its session is over", || is_gone(&scene, session));
    bystander.stop();
    scene.is_as_before();
}

/// Registered memory of the server's.
fn mappings(scene: &Scene) -> usize {
    let maps = format!("/proc/{}/maps", scene.server());
    let maps = std::fs::read_to_string(maps).expect("maps");
    maps.lines()
        .filter(|line| line.contains("memfd:mpsshim"))
        .count()
}

#[test]
fn beside_a_kernel_that_never_ends_others_come_and_go() {
    let _alone = alone();
    let mut scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let stuck = leave_endless(&scene);
    wait_until("the log says that it goes on", || {
        let log = scene.place.log("server.log");
        log.contains(&format!("Context ID: {stuck}}} has ended, but its work"))
    });
    wait_until("ps says so", || {
        let listed = scene.place.control(&["ps"]).out;
        listed.contains("(ended; its work goes on)")
    });
    let free = scene.observer.mem_info().expect("memory").free;
    // A client may come before the server has let go of the memory of the last one, which takes as long as the machine is busy
    // with other things; then it gets new memory, and there is more to find for the next ones.
    const REUSED: usize = 12;
    const MOST: usize = 200;
    let (mut reused, mut turns) = (0, 0);
    while reused < REUSED {
        assert!(turns < MOST, "{reused} of {turns} clients got memory again");
        turns += 1;
        let before = mappings(&scene);
        let mut worker = scene.worker();
        let session = worker.peer.welcome.session;
        worker.round().expect("a round");
        let (range, file) = worker.peer.pinned(64 << 10).expect("pinned memory");
        let memory = Mapping::new(file.as_fd(), range.len as usize).expect("mapping");
        // SAFETY: the mapping has as many bytes, and nobody else writes them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.base(), memory.len()) };
        assert!(bytes.iter().all(|byte| *byte == 0), "another client's data");
        bytes.fill(0xa5);
        drop((worker, memory, file));
        wait_until("its session is over", || is_gone(&scene, session));
        reused += usize::from(mappings(&scene) <= before);
    }
    assert!(!is_gone(&scene, stuck), "its work has not ended");
    bystander.stop();
    wait_until("the others' memory is free", || {
        scene.observer.mem_info().expect("memory").free > free
    });
    // Nobody is left but the one whose work goes on.
    let server = scene.server();
    let Scene {
        place, observer, ..
    } = scene;
    drop(observer);
    wait_until("the server ends it", || {
        !std::path::Path::new(&format!("/proc/{server}")).exists()
    });
    Worker::connect(&control(&place))
        .expect("the next server")
        .round()
        .expect("a round there");
}

#[test]
fn a_client_that_keeps_its_descriptors_shares_nothing_with_the_next() {
    let _alone = alone();
    let scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let stuck = leave_endless(&scene);
    wait_until("it is over", || {
        let log = scene.place.log("server.log");
        log.contains(&format!("Context ID: {stuck}}} has ended, but its work"))
    });
    let mut first = scene.worker();
    let session = first.peer.welcome.session;
    let (range, file) = first.peer.pinned(64 << 10).expect("pinned memory");
    let segment = first.peer.segment.try_clone().expect("descriptor");
    let kept = [
        Mapping::new(file.as_fd(), range.len as usize).expect("mapping"),
        Mapping::new(segment.as_fd(), 4096).expect("mapping"),
    ];
    drop((first, file, segment));
    wait_until("its session is over", || is_gone(&scene, session));
    let mut second = scene.worker();
    let (range, file) = second.peer.pinned(64 << 10).expect("pinned memory");
    let theirs = Mapping::new(file.as_fd(), range.len as usize).expect("mapping");
    for mapping in &kept {
        // SAFETY: inside the mappings; these pages are nobody's but the first client's.
        unsafe { std::ptr::write_bytes(mapping.base(), 0x5a, 4096) };
    }
    // SAFETY: the mapping has as many bytes.
    let bytes = unsafe { std::slice::from_raw_parts(theirs.base(), theirs.len()) };
    assert!(
        bytes.iter().all(|byte| *byte == 0),
        "the first client writes there"
    );
    second.round().expect("its segment is its own");
    bystander.stop();
}

/// The segment and the pinned memory of a client, by the numbers of their files.
fn numbers(worker: &Worker, file: &OwnedFd) -> [u64; 2] {
    [&worker.peer.segment, file].map(|fd| fstat(fd).expect("a file").st_ino)
}

#[test]
fn memory_that_lost_pages_is_not_given_to_the_next() {
    let _alone = alone();
    const LEN: u64 = 64 << 10;
    let scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    // Nothing is unregistered beside it.
    let stuck = leave_endless(&scene);
    wait_until("it is over", || {
        let log = scene.place.log("server.log");
        log.contains(&format!("Context ID: {stuck}}} has ended, but its work"))
    });
    let client = || {
        let mut worker = scene.worker();
        let (range, file) = worker.peer.pinned(LEN).expect("pinned memory");
        worker.round().expect("a round");
        (worker, range, file)
    };
    let leave = |worker: Worker| {
        let session = worker.peer.welcome.session;
        drop(worker);
        wait_until("its session is over", || is_gone(&scene, session));
    };
    let mut spoiled = Vec::new();
    for refilled in [false, true] {
        let (worker, range, file) = client();
        spoiled.extend(numbers(&worker, &file));
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let flags = segment::REGISTERED as i64;
        fallocate(&worker.peer.segment, punch, flags, 4096).expect("a hole");
        let memory = Mapping::new(file.as_fd(), range.len as usize).expect("mapping");
        // SAFETY: the mapping's first page, which nobody else uses.
        unsafe {
            let removed = libc::madvise(memory.base().cast(), 4096, libc::MADV_REMOVE);
            assert_eq!(removed, 0);
            if refilled {
                worker.peer.scribble(segment::REGISTERED, &[0; 4096]);
                std::ptr::write_bytes(memory.base(), 1, 4096);
            }
        }
        drop((memory, file));
        leave(worker);
    }
    // What a client leaves as it was is used again, by one of the next; what came before it has been seen by then.
    let (worker, _, file) = client();
    let proper = numbers(&worker, &file);
    assert!(proper.iter().all(|number| !spoiled.contains(number)));
    drop(file);
    leave(worker);
    let mut again = [false; 2];
    wait_until("what is whole is used again", || {
        let (worker, _, file) = client();
        let got = numbers(&worker, &file);
        assert!(got.iter().all(|number| !spoiled.contains(number)));
        for (again, (got, proper)) in again.iter_mut().zip(got.iter().zip(&proper)) {
            *again |= got == proper;
        }
        drop(file);
        leave(worker);
        again == [true; 2]
    });
    bystander.stop();
}

#[test]
fn a_client_whose_work_never_ends_counts_no_more() {
    let _alone = alone();
    // The observer, a worker, and one more.
    let place = daemon_with(&[("MPSSHIM_MAX_CLIENTS", "2")]);
    let mut observer = Peer::connect(&control(&place)).expect("observer");
    observer.attach().expect("attach");
    let mut left = Loaded::connect(&control(&place), &endless_ptx());
    let function = left.peer.function(left.module, "endless").expect("it");
    let body = launch(function, left.stream, 1, 0);
    left.peer.post(Op::Launch, &body, &[]).expect("launch");
    left.peer.mem_info().expect("the launch is there");
    assert!(Peer::connect(&control(&place)).is_err(), "there are two");
    drop(left);
    let mut next = None;
    wait_until("there is room for another", || {
        next = Worker::connect(&control(&place)).ok();
        next.is_some()
    });
    next.expect("just seen").round().expect("a round");
}
