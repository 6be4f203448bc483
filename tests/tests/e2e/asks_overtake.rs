//! Calls that are answered while a host function of another stream runs: whoever calls may hold a lock that the function is
//! about to take, and would wait for ever.

use mpsshim_api::cuda::CUDA_ERROR_TIMEOUT;
use mpsshim_proto::message::Op;
use mpsshim_proto::message::stream::HostFunction;
use mpsshim_proto::segment::{ARRIVED, RETURNED};
use mpsshim_tests::peer::memset;
use mpsshim_tests::scene::Scene;
use std::sync::atomic::Ordering;

/// Bytes of a body, enough for any message.
const BODY: usize = 1024;

#[test]
fn no_ask_waits_for_a_host_function() {
    let scene = Scene::new();
    let slot = 40;
    let mut waited = Vec::new();
    for &op in Op::ALL.iter().filter(|op| op.is_request()) {
        let mut worker = scene.worker();
        let (stream, memory) = (worker.stream, worker.memory.start);
        let peer = &mut worker.peer;
        let function = HostFunction {
            stream,
            slot,
            value: 1,
        };
        peer.post(Op::HostFunction, &function, &[]).expect("post");
        // Something that is held back behind it.
        let behind = memset(memory, 1, 1, stream);
        peer.post(Op::Memset, &behind, &[]).expect("post");
        peer.wait(|peer| (peer.flag(slot + ARRIVED).load(Ordering::Acquire) == 1).then_some(()))
            .expect("it runs");
        let before = peer.header().answers.0.load(Ordering::Acquire);
        // Of nothing that there is; what matters is that somebody says so.
        let put = peer.put(op as u16, 0, &[&[0; BODY]]);
        let answered = put.and_then(|()| {
            peer.wait(|peer| {
                (peer.header().answers.0.load(Ordering::Acquire) != before).then_some(())
            })
        });
        // An ask that breaks the protocol ends the session, which is an answer too.
        if answered == Err(CUDA_ERROR_TIMEOUT) {
            waited.push(op);
        }
        peer.flag(slot + RETURNED).store(1, Ordering::Release);
    }
    assert!(waited.is_empty(), "these wait: {waited:?}");
}
