//! Streams whose clients would have others wait, or the server read what is not theirs; against the real daemon and server on
//! softgpu.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::stream::MemOp;
use mpsshim_proto::message::{EventCreate, EventOnStream, Mark, Object, Op};
use mpsshim_proto::shm::Mapping;
use mpsshim_tests::peer::{Loaded, PTX, Peer, endless_ptx, fill_params, launch, memset};
use mpsshim_tests::scene::{Bystander, Scene, control};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A client whose stream is busy for ever.
fn busy(scene: &Scene) -> Loaded {
    let mut client = Loaded::connect(&control(&scene.place), &endless_ptx());
    let function = client.peer.function(client.module, "endless").expect("it");
    let body = launch(function, client.stream, 1, 0);
    client.peer.post(Op::Launch, &body, &[]).expect("launch");
    client
}

#[test]
fn a_forged_flag_gives_nobody_a_busy_stream() {
    let scene = Scene::new();
    let mut client = busy(&scene);
    let (slot, value) = (5, 77);
    let mark = Mark {
        stream: client.stream,
        slot,
        value,
    };
    client.peer.post(Op::Mark, &mark, &[]).expect("post");
    client.peer.flag(slot).store(value, Ordering::Release);
    let object = Object {
        object: client.stream,
    };
    client
        .peer
        .post(Op::StreamDestroy, &object, &[])
        .expect("post");
    client.peer.mem_info().expect("an answer behind it");
    // Whichever streams these get, none is behind that kernel.
    for _ in 0..4 {
        scene.worker().round().expect("a round");
    }
    let mut workers: Vec<_> = (0..4).map(|_| scene.worker()).collect();
    for worker in &mut workers {
        worker.round().expect("a round");
    }
}

#[test]
fn a_stream_has_so_much_in_flight_and_no_more() {
    let scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let mut client = busy(&scene);
    let stream = client.stream;
    // Behind a kernel that takes long, work waits in the server; marks do not.
    for value in 0..600 {
        let body = Mark {
            stream,
            slot: 9,
            value,
        };
        client.peer.post(Op::Mark, &body, &[]).expect("post");
    }
    // The ring stands still: what is behind it there is not answered, however long one waits.
    let before = client.peer.header().answers.0.load(Ordering::Acquire);
    client
        .peer
        .post(Op::MemInfo, &[0u64; 1], &[])
        .expect("post");
    std::thread::sleep(Duration::from_secs(2));
    let after = client.peer.header().answers.0.load(Ordering::Acquire);
    assert_eq!(before, after, "600 operations were given to the driver");
    bystander.stop();
}

#[test]
fn a_full_stream_beside_one_that_is_held_keeps_nobody_else() {
    let scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let mut client = busy(&scene);
    let (first, memory) = (client.stream, client.memory.start);
    let peer = &mut client.peer;
    let second = peer.stream().expect("a second stream");
    let event = peer.handle(Kind::Event);
    let create = EventCreate {
        event,
        ..EventCreate::default()
    };
    peer.post(Op::EventCreate, &create, &[]).expect("post");
    let on = |stream| EventOnStream {
        event,
        stream,
        ..EventOnStream::default()
    };
    peer.post(Op::EventRecord, &on(first), &[]).expect("post");
    // It waits behind the kernel, in the server.
    let clear = memset(memory, 1, 1, first);
    peer.post(Op::Memset, &clear, &[]).expect("post");
    peer.post(Op::StreamWaitEvent, &on(second), &[])
        .expect("post");
    for value in 0..600 {
        let mark = Mark {
            stream: second,
            slot: 9,
            value,
        };
        peer.post(Op::Mark, &mark, &[]).expect("post");
    }
    std::thread::sleep(Duration::from_millis(500));
    bystander.stop();
    scene.worker().round().expect("a newcomer");
}

#[test]
fn a_stream_that_waits_for_a_word_is_not_forgotten_in_a_crowd() {
    let scene = Scene::new();
    let mut worker = scene.worker();
    let stream = worker.stream;
    let peer = &mut worker.peer;
    let (range, file) = peer.pinned(4096).expect("pinned memory");
    let memory = Mapping::new(file.as_fd(), range.len as usize).expect("mapping");
    let wait = MemOp {
        stream,
        operation: CU_STREAM_MEM_OP_WAIT_VALUE_32,
        address: range.start,
        value: 1,
        flags: CU_STREAM_WAIT_VALUE_EQ,
    };
    peer.post(Op::MemOp, &wait, &[]).expect("post");
    // With so many on a thread, those that are quiet are parked.
    let crowd: Vec<Peer> = (0..40).map(|_| scene.peer()).collect();
    std::thread::sleep(Duration::from_secs(1));
    // Nobody rings a bell for it.
    // SAFETY: inside the mapping and aligned; the server reads it as an atomic.
    let word = unsafe { &*memory.base().cast::<AtomicU32>() };
    let waiting = Mark {
        stream,
        slot: 9,
        value: 3,
    };
    worker.peer.post(Op::Mark, &waiting, &[]).expect("post");
    std::thread::sleep(Duration::from_secs(1));
    word.store(1, Ordering::Release);
    let there = |peer: &Peer| (peer.flag(9).load(Ordering::Acquire) == 3).then_some(());
    worker.peer.wait(there).expect("the stream goes on");
    drop(crowd);
}

#[test]
fn a_launch_with_too_few_parameters_is_refused_among_others() {
    Scene::new().beside_a_worker(|scene| {
        let mut client = Loaded::connect(&control(&scene.place), PTX);
        let (stream, memory) = (client.stream, client.memory.start);
        let params = fill_params(memory, 1, 1);
        let good = launch(client.function, stream, 1, params.len());
        let short = launch(client.function, stream, 1, 8);
        let peer = &mut client.peer;
        for turn in 0..50 {
            // The device has something to do, so that the launches go in runs.
            let long = fill_params(memory, 1, 20_000);
            peer.post(Op::Launch, &good, &long).expect("post");
            for at in 0..32 {
                let (body, params) = match at {
                    17 => (&short, &params[..8]),
                    _ => (&good, &params[..]),
                };
                peer.post(Op::Launch, body, params).expect("post");
            }
            let refused = peer.finish(stream);
            assert_eq!(refused, Err(CUDA_ERROR_INVALID_VALUE), "turn {turn}");
        }
    });
}
