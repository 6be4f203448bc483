//! Clients that take all they may have of one kind, beside one that computes; against the real daemon and server on softgpu.
//! The graphs' bounds are in hostile_graph_sizes.rs.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::image::LinkCreate;
use mpsshim_proto::message::memory::AddressReserve;
use mpsshim_proto::message::stream::MemOp;
use mpsshim_proto::message::{EventCreate, Limit, Op, Value};
use mpsshim_server::engine::bounds;
use mpsshim_tests::control_daemon::wait_until;
use mpsshim_tests::peer::{Peer, Status};
use mpsshim_tests::scene::{Bystander, Scene};

/// Messages that are posted before their errors are looked at.
const LOT: usize = 1024;

/// Ends a session, and waits until what it had is being given back.
fn leave(scene: &mut Scene, peer: Peer) {
    let descriptors = scene.held().descriptors;
    drop(peer);
    wait_until("its descriptors are closed", || {
        scene.held().descriptors < descriptors
    });
}

/// Has a client take things until it is refused, looks how many that were, and that others go on; then everything is back.
fn fill(what: &str, most: usize, lot: usize, take: impl FnMut(&mut Peer) -> Status) {
    let mut take = take;
    let mut scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let mut peer = scene.peer();
    peer.attach().expect("attach");
    let mut taken = 0;
    let refused = loop {
        let took = (0..lot).try_for_each(|_| take(&mut peer));
        // What was posted has an answer once this has.
        let done = took.and_then(|()| peer.mem_info().map(drop));
        match done.and_then(|()| peer.posted_error()) {
            Ok(()) => taken += lot,
            Err(status) => break status,
        }
        assert!(taken <= most, "{taken} {what} of at most {most}");
    };
    assert_eq!(refused, CUDA_ERROR_OUT_OF_MEMORY, "{what}");
    assert!(taken + lot >= most, "{taken} {what} of {most}");
    peer.mem_info().expect("the session goes on");
    // Who comes now is served as ever.
    scene.worker().round().expect("a new client");
    bystander.goes_on();
    leave(&mut scene, peer);
    let longest = bystander.stop();
    println!("{taken} {what}: another client's longest round {longest:?}");
    scene.is_as_before();
}

#[test]
fn streams() {
    fill("streams", bounds::STREAMS, LOT, |peer| {
        peer.stream().map(drop)
    });
}

#[test]
fn events() {
    fill("events", bounds::EVENTS, LOT, |peer| {
        let event = EventCreate {
            event: peer.handle(Kind::Event),
            ..EventCreate::default()
        };
        peer.post(Op::EventCreate, &event, &[])
    });
}

#[test]
fn limits_of_a_context() {
    let mut scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let mut peer = scene.peer();
    peer.attach().expect("attach");
    let memory = peer.mem_info().expect("memory").total;
    let mut set = |limit, value| -> Status<u64> {
        let body = Limit {
            limit,
            device: 0,
            value,
        };
        let set: Value = peer.ask(Op::SetLimit, &body, &[])?;
        Ok(set.value)
    };
    for (limit, most) in [
        (CU_LIMIT_PRINTF_FIFO_SIZE, bounds::PRINT_BUFFER),
        (CU_LIMIT_MALLOC_HEAP_SIZE, memory / bounds::HEAP_PART),
        (CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, bounds::SYNC_DEPTH),
        (
            CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT,
            bounds::PENDING_LAUNCHES,
        ),
    ] {
        for most in [most / 2, most] {
            assert_eq!(set(limit, most), Ok(most), "{limit}");
        }
        for more in [most + 1, 1 << 40, u64::MAX] {
            let refused = set(limit, more);
            assert_eq!(refused, Err(CUDA_ERROR_OUT_OF_MEMORY), "{limit}: {more}");
        }
    }
    // Each of thousands of threads has so much.
    assert_eq!(set(CU_LIMIT_STACK_SIZE, 4096), Ok(4096));
    for more in [memory / 1024, 1 << 40, u64::MAX] {
        let refused = set(CU_LIMIT_STACK_SIZE, more);
        assert_eq!(refused, Err(CUDA_ERROR_OUT_OF_MEMORY), "{more}");
    }
    bystander.goes_on();
    leave(&mut scene, peer);
    bystander.stop();
    scene.is_as_before();
}

#[test]
fn pools() {
    fill("pools", bounds::POOLS, 1, |peer| peer.pool().map(drop));
}

#[test]
fn reservations() {
    fill("reservations", bounds::RESERVATIONS, 1, |peer| {
        let body = AddressReserve {
            len: 2 << 20,
            ..AddressReserve::default()
        };
        peer.ask_as(0, Op::AddressReserve, &body, &[]).map(drop)
    });
}

#[test]
fn linkers() {
    fill("linkers", bounds::LINKS, 1, |peer| {
        let body = LinkCreate {
            link: peer.handle(Kind::Link),
            info_log: u32::MAX,
            error_log: u32::MAX,
            ..LinkCreate::default()
        };
        peer.ask_as(0, Op::LinkCreate, &body, &[]).map(drop)
    });
}

/// Each is a descriptor and a mapping of the server's, which has so many for all.
#[test]
fn pinned_blocks() {
    let mut scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let (mut greedy, mut modest) = (scene.peer(), scene.peer());
    for peer in [&mut greedy, &mut modest] {
        peer.attach().expect("attach");
    }
    let fill = |peer: &mut Peer| {
        let mut taken = 0;
        let refused = loop {
            match peer.pinned(4096) {
                Ok(_) => taken += 1,
                Err(status) => break status,
            }
        };
        assert_eq!(refused, CUDA_ERROR_OUT_OF_MEMORY, "after {taken}");
        taken
    };
    let all = fill(&mut greedy);
    // Another session of the same user gets some still, and so does who comes later.
    let some = fill(&mut modest);
    assert!(some >= 8 && all > some, "{all} blocks, then {some}");
    let mut late = scene.worker();
    late.round().expect("a new client");
    greedy.mem_info().expect("the session goes on");
    println!("{all} blocks, then {some}");
    drop((modest, late));
    bystander.goes_on();
    leave(&mut scene, greedy);
    bystander.stop();
    scene.is_as_before();
}

/// Streams have flags of the server's where there are some, and waits for words need one.
#[test]
fn flags_for_others() {
    let scene = Scene::new();
    let mut greedy: Vec<Peer> = (0..4).map(|_| scene.peer()).collect();
    for peer in &mut greedy {
        peer.attach().expect("attach");
        for _ in 0..bounds::STREAMS / 2 {
            peer.stream().expect("posted");
        }
        peer.mem_info().expect("done");
        peer.posted_error().expect("streams");
    }
    let mut peer = scene.peer();
    peer.attach().expect("attach");
    let stream = peer.stream().expect("posted");
    let memory = peer.memory(4096).expect("memory");
    let word = |operation, value| MemOp {
        stream,
        operation,
        address: memory.start,
        value,
        flags: 0,
    };
    let write = word(CU_STREAM_MEM_OP_WRITE_VALUE_32, 5);
    let wait = word(CU_STREAM_MEM_OP_WAIT_VALUE_32, 5);
    peer.post(Op::MemOp, &write, &[]).expect("posted");
    peer.post(Op::MemOp, &wait, &[]).expect("posted");
    peer.finish(stream).expect("the wait is over");
}
