//! Clients that make graphs without end; against the real daemon and server on softgpu, beside a client that computes.

use mpsshim_api::cuda::*;
use mpsshim_proto::message::graph::{CaptureBegin, GraphCreate, GraphNode, GraphNodeAdded};
use mpsshim_proto::message::{Object, Op, Value};
use mpsshim_tests::peer::{Peer, Status, memset};
use mpsshim_tests::scene::Scene;
use zerocopy::IntoBytes;

/// What one graph may have (`bounds::GRAPH_PARTS` of the server).
const MOST: u64 = 1 << 17;

fn graph(peer: &mut Peer) -> u64 {
    let made: Value = peer
        .ask(Op::GraphCreate, &GraphCreate::default(), &[])
        .expect("a graph");
    made.value
}

/// Puts a copy of a graph into another.
fn add_child(peer: &mut Peer, graph: u64, child: u64) -> Status<GraphNodeAdded> {
    let body = GraphNode {
        object: graph,
        kind: CU_GRAPH_NODE_TYPE_GRAPH,
        ..GraphNode::default()
    };
    let does = CUDA_CHILD_GRAPH_NODE_PARAMS {
        graph: child,
        ..CUDA_CHILD_GRAPH_NODE_PARAMS::default()
    };
    peer.ask(Op::GraphNode, &body, does.as_bytes())
}

fn add_empty(peer: &mut Peer, graph: u64) {
    let body = GraphNode {
        object: graph,
        kind: CU_GRAPH_NODE_TYPE_EMPTY,
        ..GraphNode::default()
    };
    let added: Status<GraphNodeAdded> = peer.ask(Op::GraphNode, &body, &[]);
    added.expect("a node");
}

#[test]
fn graphs_do_not_double_for_ever() {
    Scene::new().beside_a_worker(|scene| {
        let mut worker = scene.worker();
        let peer = &mut worker.peer;
        let mut last = graph(peer);
        add_empty(peer, last);
        let mut nodes = 1u64;
        let refused = loop {
            let next = graph(peer);
            let added = (0..2).try_for_each(|_| add_child(peer, next, last).map(drop));
            // The one before the last is in the last as a copy.
            let gone = Object { object: last };
            peer.ask_as(0, Op::GraphDestroy, &gone, &[]).expect("gone");
            last = next;
            if let Err(status) = added {
                break status;
            }
            nodes = 2 * nodes + 2;
            assert!(nodes < MOST, "{nodes} nodes in 1 graph");
        };
        assert_eq!(refused, CUDA_ERROR_OUT_OF_MEMORY);
        assert!(nodes > MOST / 8, "refused at {nodes} nodes");
        worker.round().expect("the session goes on");
    });
}

#[test]
fn graphs_do_not_nest_for_ever() {
    Scene::new().beside_a_worker(|scene| {
        let mut worker = scene.worker();
        let peer = &mut worker.peer;
        let mut last = graph(peer);
        let mut depth = 1;
        let refused = loop {
            let next = graph(peer);
            if let Err(status) = add_child(peer, next, last) {
                break status;
            }
            depth += 1;
            assert!(depth <= 64, "{depth} graphs inside each other");
            last = next;
        };
        assert_eq!((refused, depth), (CUDA_ERROR_OUT_OF_MEMORY, 64));
        worker.round().expect("the session goes on");
    });
}

#[test]
fn a_capture_does_not_grow_for_ever() {
    Scene::new().beside_a_worker(|scene| {
        let mut worker = scene.worker();
        let (stream, memory) = (worker.stream, worker.memory.start);
        let peer = &mut worker.peer;
        let begin = CaptureBegin {
            stream,
            ..CaptureBegin::default()
        };
        peer.ask_as(0, Op::CaptureBegin, &begin, &[])
            .expect("begin");
        let mut refused = Ok(());
        for at in 0..MOST {
            let body = memset(memory, 3, 1, stream);
            peer.post(Op::Memset, &body, &[]).expect("post");
            if at % 1024 == 0 {
                peer.mem_info().expect("an answer behind them");
                refused = peer.posted_error();
                if refused.is_err() {
                    break;
                }
            }
        }
        assert_eq!(refused, Err(CUDA_ERROR_OUT_OF_MEMORY));
        let object = Object { object: stream };
        let _: Value = peer.ask(Op::CaptureEnd, &object, &[]).expect("its end");
        worker.round().expect("the session goes on");
    });
}
