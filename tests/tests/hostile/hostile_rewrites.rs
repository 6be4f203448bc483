//! A client that changes its messages while the server reads them, against the real daemon and server on softgpu.

use mpsshim_proto::message::stream::MemOp;
use mpsshim_proto::message::{Mark, Object, Op, Side};
use mpsshim_tests::PATIENCE;
use mpsshim_tests::peer::{Peer, PublishedRing, Status, copy, memset};
use mpsshim_tests::scene::{Bystander, Scene};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// For how long messages are changed.
const TIME: Duration = Duration::from_secs(1);
/// How far before the published end the server may be reading, bytes: some messages.
const NEAR: u64 = 256;
/// Bytes that the client puts into the ring ahead of the server.
const AHEAD: u64 = 4096;
/// Messages that [`send`] puts there.
const MESSAGES: u64 = 9;
/// Device memory of the client, bytes.
const LEN: u64 = 16 << 10;

/// What has come of it.
#[derive(Debug, Default)]
struct Outcome {
    flips: u64,
    messages: u64,
    refused: u64,
    ended: u64,
}

/// Flips bits where the server reads until it is told to stop; how many. Most are flipped back at once: what was checked
/// with the one value is used with the other.
fn flip(ring: &PublishedRing, stop: &AtomicBool, seed: u64) -> u64 {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut flips = 0;
    while !stop.load(Ordering::Relaxed) {
        let pending = ring.pending();
        let near = pending.end.saturating_sub(pending.start).min(NEAR);
        if near == 0 {
            std::thread::yield_now();
            continue;
        }
        let position = pending.start + rng.random_range(0..near);
        let bits = 1 << rng.random_range(0..32);
        let times = if rng.random_ratio(1, 64) { 33 } else { 64 };
        for _ in 0..times {
            ring.flip(position, bits);
        }
        flips += times;
    }
    flips
}

/// Messages with lengths, addresses, offsets, slots and handles, none of which starts a kernel: a kernel may write where it
/// likes.
fn send(peer: &mut Peer, stream: u64, memory: u64) -> Status {
    let (half, device, staging) = (LEN / 2, Side::Device, Side::Staging);
    peer.post(Op::Memset, &memset(memory, 7, half / 4, stream), &[])?;
    peer.write(stream, memory + half, &[5; 200])?;
    let inside = copy(device, memory, device, memory + half, 4096, stream);
    peer.post(Op::Copy, &inside, &[])?;
    let out = copy(staging, 64, device, memory, 4096, stream);
    peer.post(Op::Copy, &out, &[])?;
    let into = copy(device, memory + half, staging, 64, 4096, stream);
    peer.post(Op::Copy, &into, &[])?;
    let write = MemOp {
        stream,
        address: memory,
        value: 1,
        ..MemOp::default()
    };
    peer.post(Op::MemOp, &write, &[])?;
    let mark = Mark {
        stream,
        slot: 0,
        value: 1,
    };
    peer.post(Op::Mark, &mark, &[])?;
    let other = peer.stream()?;
    peer.post(Op::StreamDestroy, &Object { object: other }, &[])
}

/// One session, until the server ends it or the time is over.
fn session(scene: &Scene, until: Instant, seed: u64, outcome: &mut Outcome) {
    let mut peer = scene.peer();
    let stop = AtomicBool::new(false);
    let mut work = |peer: &mut Peer| -> Status {
        peer.attach()?;
        let (stream, memory) = (peer.stream()?, peer.memory(LEN)?.start);
        let ring = PublishedRing::of(peer).expect("a mapping");
        std::thread::scope(|scope| {
            let flips = scope.spawn(|| flip(&ring, &stop, seed));
            let mut sent = || -> Status {
                while Instant::now() < until {
                    send(peer, stream, memory)?;
                    peer.wait(|peer| (peer.pending() < AHEAD).then_some(()))?;
                    outcome.messages += MESSAGES;
                    outcome.refused += u64::from(peer.posted_error().is_err());
                }
                Ok(())
            };
            let sent = sent();
            stop.store(true, Ordering::Relaxed);
            outcome.flips += flips.join().expect("no panic");
            sent
        })
    };
    outcome.ended += u64::from(work(&mut peer).is_err());
}

#[test]
fn messages_that_change_while_they_are_read_hurt_nobody_else() {
    let mut scene = Scene::new();
    let server = scene.server();
    let bystander = Bystander::start(scene.worker());
    let (began, mut outcome) = (Instant::now(), Outcome::default());
    let until = began + TIME;
    let mut seed = 0;
    while Instant::now() < until || outcome.ended == 0 || outcome.refused == 0 {
        assert!(began.elapsed() < PATIENCE, "nothing changed: {outcome:?}");
        let session_until = until.max(Instant::now() + TIME / 10);
        session(&scene, session_until, seed, &mut outcome);
        seed += 1;
    }
    println!("{outcome:?}");
    bystander.stop();
    let mut worker = scene.worker();
    worker.round().expect("a new client");
    assert_eq!(worker.peer.welcome.server_pid, server);
    drop(worker);
    scene.is_as_before();
}
