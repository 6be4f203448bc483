//! Clients that try to have more device memory than their limit lets them.

use mpsshim_api::cuda::*;
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::message::graph::{CaptureBegin, GraphInstantiate, GraphInstantiated};
use mpsshim_proto::message::memory::{PoolAlloc, PoolAttribute, PoolFree};
use mpsshim_proto::message::{Limit, Object, Op, Range, Value};
use mpsshim_tests::peer::{Loaded, PTX, Peer, Status, fill_params, launch};
use mpsshim_tests::scene::{Scene, control};

const MIB: u64 = 1 << 20;

fn limit(peer: &mut Peer, bytes: u64) {
    let body = LimitMemory {
        device: 0,
        pad: 0,
        bytes,
    };
    peer.post(Op::LimitMemory, &body, &[]).expect("a limit");
}

/// What its limit leaves it.
fn left(peer: &mut Peer) -> u64 {
    peer.mem_info().expect("memory").free
}

fn pool(peer: &mut Peer, threshold: u64) -> u64 {
    let handle = peer.pool().expect("a pool");
    let body = PoolAttribute {
        pool: handle,
        attribute: CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
        value: threshold,
        pad: 0,
    };
    peer.ask_as(0, Op::PoolSetAttribute, &body, &[])
        .expect("a threshold");
    handle
}

fn alloc(peer: &mut Peer, pool: u64, len: u64, stream: u64) -> Status<u64> {
    let body = PoolAlloc { pool, len, stream };
    Ok(peer.ask::<_, Range>(Op::PoolAlloc, &body, &[])?.start)
}

fn free(peer: &mut Peer, address: u64, stream: u64) {
    let body = PoolFree { address, stream };
    peer.post(Op::PoolFree, &body, &[]).expect("post");
}

fn begin_capture(peer: &mut Peer, stream: u64) {
    let body = CaptureBegin {
        stream,
        ..CaptureBegin::default()
    };
    peer.ask_as(0, Op::CaptureBegin, &body, &[]).expect("begin");
}

fn end_capture(peer: &mut Peer, stream: u64) -> u64 {
    let body = Object { object: stream };
    let graph: Value = peer.ask(Op::CaptureEnd, &body, &[]).expect("a graph");
    graph.value
}

#[test]
fn memory_given_back_counts_until_it_is_free() {
    Scene::new().beside_a_worker(|scene| {
        let mut client = Loaded::connect(&control(&scene.place), PTX);
        let (memory, stream) = (client.memory, client.stream);
        let peer = &mut client.peer;
        // And something for the module.
        limit(peer, 9 * MIB);
        let large = peer.memory(6 * MIB).expect("all of it");
        assert!(left(peer) < MIB);
        // A kernel that goes on for a while.
        let params = fill_params(memory.start, 1, 300_000);
        let body = launch(client.function, stream, 1, params.len());
        peer.post(Op::Launch, &body, &params).expect("post");
        peer.post(Op::MemRelease, &large, &[]).expect("post");
        assert!(left(peer) < MIB, "it may still be used");
        let again = peer.memory(6 * MIB).expect("as soon as it is free");
        assert!(left(peer) < MIB);
        peer.finish(stream).expect("the kernel");
        peer.post(Op::MemRelease, &again, &[]).expect("post");
    });
}

#[test]
fn what_a_context_takes_for_its_limits_counts() {
    let mut scene = Scene::new();
    let mut peer = scene.peer();
    peer.attach().expect("attach");
    limit(&mut peer, 256 * MIB);
    let set = |peer: &mut Peer, limit, value| -> Status<u64> {
        let body = Limit {
            limit,
            device: 0,
            value,
        };
        let set: Value = peer.ask(Op::SetLimit, &body, &[])?;
        Ok(set.value)
    };
    // A context begins with 8 MiB.
    let heap = set(&mut peer, CU_LIMIT_MALLOC_HEAP_SIZE, 200 * MIB);
    assert_eq!((heap, left(&mut peer)), (Ok(200 * MIB), 64 * MIB));
    for (limit, value) in [
        (CU_LIMIT_MALLOC_HEAP_SIZE, 265 * MIB),
        (CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 1 << 16),
        (CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 3),
        (CU_LIMIT_STACK_SIZE, 64 << 10),
    ] {
        let refused = set(&mut peer, limit, value);
        assert_eq!(refused, Err(CUDA_ERROR_OUT_OF_MEMORY), "{limit}");
        assert_eq!(left(&mut peer), 64 * MIB, "{limit}");
    }
    // The context does not shrink.
    let lower = set(&mut peer, CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MIB);
    assert_eq!((lower, left(&mut peer)), (Ok(8 * MIB), 64 * MIB));
    let refused = peer.memory(65 * MIB);
    assert_eq!(refused, Err(CUDA_ERROR_OUT_OF_MEMORY));
    peer.memory(60 * MIB).expect("within the limit");
    // Nobody else pays for it, whoever wants as much does.
    let mut other = scene.peer();
    other.attach().expect("attach");
    limit(&mut other, 256 * MIB);
    assert_eq!(left(&mut other), 256 * MIB);
    let heap = set(&mut other, CU_LIMIT_MALLOC_HEAP_SIZE, 200 * MIB);
    assert_eq!((heap, left(&mut other)), (Ok(200 * MIB), 64 * MIB));
    drop((peer, other));
    scene.is_as_before();
}

#[test]
fn what_pools_keep_counts_until_another_needs_it() {
    let mut scene = Scene::new();
    let mut peer = scene.peer();
    let stream = peer.stream().expect("a stream");
    limit(&mut peer, 64 * MIB);
    for _ in 0..4 {
        let pool = pool(&mut peer, u64::MAX);
        let address = alloc(&mut peer, pool, 48 * MIB, stream).expect("within the limit");
        free(&mut peer, address, stream);
        peer.finish(stream).expect("freed");
        assert_eq!(left(&mut peer), 16 * MIB, "the pool keeps it");
        // The same pool gives it again.
        let address = alloc(&mut peer, pool, 48 * MIB, stream).expect("kept");
        assert_eq!(
            alloc(&mut peer, pool, 17 * MIB, stream),
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        );
        free(&mut peer, address, stream);
        let taken = scene.before.free - scene.held().free;
        assert!(taken <= 64 * MIB, "{taken} bytes of the device");
    }
    peer.memory(60 * MIB)
        .expect("pools give back what they keep");
    drop(peer);
    scene.is_as_before();
}

#[test]
fn what_a_capture_frees_counts_until_it_is_freed() {
    let scene = Scene::new();
    let mut peer = scene.peer();
    let stream = peer.stream().expect("a stream");
    limit(&mut peer, 8 * MIB);
    let pool = pool(&mut peer, 0);
    let address = alloc(&mut peer, pool, 6 * MIB, stream).expect("memory");
    begin_capture(&mut peer, stream);
    free(&mut peer, address, stream);
    let graph = end_capture(&mut peer, stream);
    assert_eq!(left(&mut peer), 2 * MIB, "nothing has been launched");
    let body = Object { object: graph };
    peer.ask_as(0, Op::GraphDestroy, &body, &[]).expect("gone");
    assert_eq!(left(&mut peer), 2 * MIB, "nor will it ever be");
}

#[test]
fn what_a_capture_allocates_counts_with_its_instances() {
    let scene = Scene::new();
    let mut peer = scene.peer();
    let stream = peer.stream().expect("a stream");
    limit(&mut peer, 8 * MIB);
    let pool = pool(&mut peer, 0);
    begin_capture(&mut peer, stream);
    let address = alloc(&mut peer, pool, 6 * MIB, stream).expect("a node");
    free(&mut peer, address, stream);
    let graph = end_capture(&mut peer, stream);
    assert_eq!(left(&mut peer), 8 * MIB, "a graph alone takes none");
    let body = GraphInstantiate {
        graph,
        ..GraphInstantiate::default()
    };
    let made: GraphInstantiated = peer.ask(Op::GraphInstantiate, &body, &[]).expect("made");
    assert_eq!(left(&mut peer), 2 * MIB);
    assert_eq!(peer.memory(4 * MIB), Err(CUDA_ERROR_OUT_OF_MEMORY));
    let body = Object { object: made.exec };
    peer.ask_as(0, Op::GraphExecDestroy, &body, &[])
        .expect("gone");
    let body = Object { object: graph };
    peer.ask_as(0, Op::GraphDestroy, &body, &[]).expect("gone");
    peer.memory(8 * MIB).expect("all of it");
}

#[test]
fn variables_of_images_count_with_all_their_bytes() {
    let mut scene = Scene::new();
    // The image stays for the next client, with its variables.
    scene.before.free -= 8 * MIB;
    scene.beside_a_worker(|scene| {
        let mut peer = scene.peer();
        limit(&mut peer, 16 * MIB);
        let image = |bytes: u64| format!(".global .align 4 .b8 big[{bytes}];\n");
        let with = |bytes| {
            PTX.replace(
                ".visible .entry fill",
                &format!("{}.visible .entry fill", image(bytes)),
            )
        };
        let refused = peer.module(with(64 * MIB).as_bytes());
        assert_eq!(refused, Err(CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(left(&mut peer), 16 * MIB, "nothing is counted");
        let module = peer.module(with(8 * MIB).as_bytes()).expect("a module");
        assert!(left(&mut peer) <= 8 * MIB);
        let body = Object { object: module };
        peer.post(Op::ImageUnload, &body, &[]).expect("post");
    });
}
