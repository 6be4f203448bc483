//! A server's engine in this process, on two devices of softgpu: what it accepts, what it refuses, and what the fuzzer has
//! found. One engine a process, so the tests take turns with it.

mod engine;
mod handlers;
mod refusals;

use mpsshim_model::policy::MarkKind;
use mpsshim_proto::message::{Attach, Op};
use mpsshim_tests::artifacts::driver;
use mpsshim_tests::in_process::{Counts, InProcess};
use mpsshim_tests::peer::Peer;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long the server may take to give back what a test's sessions had.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long counts stay the same that are final.
const STILL: Duration = Duration::from_millis(200);
/// How long the engine may take to give back what sessions of earlier tests had. What a failed test has left stays.
const CLEARANCE: Duration = Duration::from_secs(10);

/// The process's engine, and what it has given out while no session is there.
fn engine() -> (MutexGuard<'static, InProcess>, Counts) {
    static ENGINE: LazyLock<(Mutex<InProcess>, Counts)> = LazyLock::new(|| {
        // SAFETY: tests of this program wait for the engine before they read or start anything.
        unsafe { std::env::set_var("SOFTGPU_DEVICES", "2") };
        let engine = InProcess::start(&driver(), MarkKind::Auto).expect("an engine");
        let mut peer = engine.connect().expect("a session");
        for device in [0, 1] {
            let attach = Attach { device, flags: 0 };
            peer.ask_as(0, Op::Attach, &attach, &[]).expect("attach");
        }
        drop(peer);
        let mut counts = engine.counts();
        loop {
            std::thread::sleep(STILL);
            let now = engine.counts();
            if std::mem::replace(&mut counts, now.clone()) == now {
                return (Mutex::new(engine), counts);
            }
        }
    });
    let (engine, idle) = &*ENGINE;
    let engine = engine.lock().unwrap_or_else(PoisonError::into_inner);
    let counts = match engine.await_counts(idle, 0, CLEARANCE) {
        Ok(()) => idle.clone(),
        Err(_) => engine.counts(),
    };
    (engine, counts)
}

/// A session that is attached to the first device.
fn session(engine: &InProcess) -> Peer {
    let mut peer = engine.connect().expect("a session");
    peer.attach().expect("attach");
    peer
}

/// Ends a session and waits until everything has come back.
fn end(engine: &InProcess, peer: Peer, before: &Counts) {
    drop(peer);
    let back = engine.await_counts(before, 0, PATIENCE);
    assert_eq!(back, Ok(()), "kind, before, now");
}
