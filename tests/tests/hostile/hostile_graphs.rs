//! Clients that break the rules of captures and graphs, or die in the middle of one; against the real daemon and
//! server on softgpu, beside a well-behaved client that goes on computing.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::graph::{
    BatchNode, CaptureBegin, CaptureHost, CaptureState, GraphCreate, GraphDependencies,
    GraphInstantiate, GraphInstantiated, GraphLaunch, GraphList, GraphListed, GraphNode,
    GraphNodeAdded, HostNode, KernelNode, list, node_flags,
};
use mpsshim_proto::message::{Object, Op, Value};
use mpsshim_proto::segment::{ARRIVED, FLAGS, RETURNED};
use mpsshim_tests::peer::{Peer, Status, memset};
use mpsshim_tests::scene::Scene;
use std::sync::atomic::Ordering;
use zerocopy::{Immutable, IntoBytes};

fn graph(peer: &mut Peer) -> Status<u64> {
    let made: Value = peer.ask(Op::GraphCreate, &GraphCreate::default(), &[])?;
    Ok(made.value)
}

fn node_body(object: u64, kind: u32) -> GraphNode {
    GraphNode {
        object,
        kind,
        ..GraphNode::default()
    }
}

/// Adds a node of a kind to a graph.
fn add<T: IntoBytes + Immutable>(
    peer: &mut Peer,
    graph: u64,
    kind: u32,
    does: &T,
) -> Status<GraphNodeAdded> {
    peer.ask(Op::GraphNode, &node_body(graph, kind), does.as_bytes())
}

fn set(to: u64, width: u64) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        to,
        value: 7,
        element: 4,
        width,
        height: 1,
        pitch: 0,
    }
}

fn instantiate(peer: &mut Peer, graph: u64, slots: &[u32]) -> Status<GraphInstantiated> {
    let body = GraphInstantiate {
        graph,
        slots: slots.len() as u32,
        ..GraphInstantiate::default()
    };
    peer.ask(Op::GraphInstantiate, &body, slots.as_bytes())
}

#[test]
fn counts_beyond_all_reason_end_the_session() {
    type Breach = fn(&mut Peer) -> Status;
    let breaches: [Breach; 6] = [
        |peer| {
            let body = CaptureBegin {
                stream: peer.stream()?,
                nodes: u32::MAX,
                ..CaptureBegin::default()
            };
            peer.ask_as(0, Op::CaptureBegin, &body, &[]).map(drop)
        },
        |peer| {
            let body = CaptureBegin {
                stream: peer.stream()?,
                nodes: 100,
                edges: 1,
                ..CaptureBegin::default()
            };
            peer.ask_as(0, Op::CaptureBegin, &body, &[0; 800]).map(drop)
        },
        |peer| {
            let graph = graph(peer)?;
            let body = GraphDependencies {
                graph,
                count: u32::MAX,
                remove: 0,
            };
            peer.ask_as(0, Op::GraphDependencies, &body, &[]).map(drop)
        },
        |peer| {
            let graph = graph(peer)?;
            let body = GraphNode {
                nodes: 4000,
                flags: node_flags::EDGES,
                ..node_body(graph, CU_GRAPH_NODE_TYPE_EMPTY)
            };
            peer.ask_as(0, Op::GraphNode, &body, &[0; 64]).map(drop)
        },
        |peer| {
            // Without its parameters.
            let graph = graph(peer)?;
            add(peer, graph, CU_GRAPH_NODE_TYPE_MEMSET, &0u64).map(drop)
        },
        |peer| {
            let graph = graph(peer)?;
            let host = HostNode { token: 9, pad: 0 };
            add(peer, graph, CU_GRAPH_NODE_TYPE_HOST, &host)?;
            // A flag that is not there.
            instantiate(peer, graph, &[FLAGS as u32]).map(drop)
        },
    ];
    Scene::new().beside_a_worker(|scene| {
        for (number, breach) in breaches.into_iter().enumerate() {
            let mut peer = scene.peer();
            let _ = breach(&mut peer);
            assert_eq!(
                peer.await_end(),
                Ok(CUDA_ERROR_MPS_RPC_FAILURE),
                "breach {number}"
            );
        }
    });
}

#[test]
fn graphs_of_nobody_and_memory_of_others_are_refused() {
    Scene::new().beside_a_worker(|scene| {
        let victim = scene.worker();
        let target = victim.memory.start;
        let mut worker = scene.worker();
        let (stream, own) = (worker.stream, worker.memory.start);
        let peer = &mut worker.peer;
        let refused = Err(CUDA_ERROR_INVALID_VALUE);
        let made = graph(peer).expect("a graph");
        let stale = graph(peer).expect("another");
        let empty = |peer: &mut Peer, graph| add(peer, graph, CU_GRAPH_NODE_TYPE_EMPTY, &[0u8; 0]);
        let of_stale = empty(peer, stale).expect("a node").node;
        let gone = Object { object: stale };
        peer.ask_as(0, Op::GraphDestroy, &gone, &[]).expect("gone");
        for handle in [
            0,
            1,
            stale,
            of_stale,
            made ^ 1 << 40,
            Handle::new(Kind::Graph, 0, 1 << 20).0,
            u64::MAX,
        ] {
            let object = Object { object: handle };
            for op in [
                Op::GraphDestroy,
                Op::GraphClone,
                Op::GraphNodeGet,
                Op::GraphNodeKind,
                Op::GraphNodeDestroy,
                Op::GraphExecDestroy,
                Op::GraphExecFlags,
            ] {
                let status = peer.ask_as(0, op, &object, &[]).map(drop);
                assert_eq!(status, refused, "{op:?} of {handle:#x}");
            }
            assert_eq!(empty(peer, handle).map(drop), refused, "{handle:#x}");
            let launch = GraphLaunch {
                exec: handle,
                stream,
            };
            for op in [Op::GraphLaunch, Op::GraphUpload] {
                peer.post(op, &launch, &[]).expect("post");
                assert_eq!(peer.finish(stream), refused, "{op:?} of {handle:#x}");
            }
            let listed: Status<GraphListed> = peer.ask(
                Op::GraphList,
                &GraphList {
                    object: handle,
                    what: list::DEPENDENTS,
                    most: u32::MAX,
                    ..GraphList::default()
                },
                &[],
            );
            assert_eq!(listed.map(drop), refused);
            let body = GraphNode {
                nodes: 1,
                ..node_body(made, CU_GRAPH_NODE_TYPE_EMPTY)
            };
            let depends: Status<GraphNodeAdded> = peer.ask(Op::GraphNode, &body, handle.as_bytes());
            assert_eq!(depends.map(drop), refused);
        }
        // Memory of another session, and beyond one's own.
        for (to, width) in [
            (target, 4),
            (own + worker.memory.len - 4, 2),
            (own, u64::MAX / 2),
            (0x7fff_0000_0000, 4),
        ] {
            let kind = CU_GRAPH_NODE_TYPE_MEMSET;
            let added = add(peer, made, kind, &set(to, width)).map(drop);
            assert_eq!(added, refused, "{to:#x} {width}");
        }
        for (from, to) in [(target, own), (own, target), (own, 0x7fff_0000_0000)] {
            let copy = CUDA_MEMCPY3D {
                src_type: CU_MEMORYTYPE_DEVICE,
                src_device: from,
                dst_type: CU_MEMORYTYPE_UNIFIED,
                dst_device: to,
                width: 64,
                height: 1,
                depth: 1,
                ..CUDA_MEMCPY3D::default()
            };
            let added = add(peer, made, CU_GRAPH_NODE_TYPE_MEMCPY, &copy).map(drop);
            assert_eq!(added, refused, "{from:#x} to {to:#x}");
        }
        for (operation, address) in [(2u64, target), (1, 0x7fff_0000_0000), (9, own)] {
            let batch = BatchNode { count: 1, flags: 0 };
            let words = [operation, address, 1, 0, 0, 0u64];
            let bytes = [batch.as_bytes(), words.as_bytes()].concat();
            let body = node_body(made, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
            let added: Status<GraphNodeAdded> = peer.ask(Op::GraphNode, &body, &bytes);
            assert_eq!(added.map(drop), refused, "{operation} at {address:#x}");
        }
        let free = add(peer, made, CU_GRAPH_NODE_TYPE_MEM_FREE, &target).map(drop);
        assert_eq!(free, refused);
        let condition = CUDA_CONDITIONAL_NODE_PARAMS {
            handle: own,
            size: 1,
            ..CUDA_CONDITIONAL_NODE_PARAMS::default()
        };
        let added = add(peer, made, CU_GRAPH_NODE_TYPE_CONDITIONAL, &condition).map(drop);
        assert_eq!(added, refused, "a condition that nobody was given");
        let kernel = KernelNode::default();
        let added = add(peer, made, CU_GRAPH_NODE_TYPE_KERNEL, &kernel).map(drop);
        assert_eq!(added, Err(CUDA_ERROR_INVALID_HANDLE));
        for kind in [8, 9, 14, 77, u32::MAX] {
            let added = add(peer, made, kind, &[0u64; 32]).map(drop);
            assert_eq!(added, refused, "kind {kind}");
        }
        worker.round().expect("the session goes on");
    });
}

#[test]
fn a_capture_dies_with_its_client() {
    Scene::new().beside_a_worker(|scene| {
        for ends in [true, false] {
            let mut worker = scene.worker();
            let (stream, own) = (worker.stream, worker.memory.start);
            let peer = &mut worker.peer;
            let begin = CaptureBegin {
                stream,
                ..CaptureBegin::default()
            };
            let object = Object { object: stream };
            peer.ask_as(0, Op::CaptureBegin, &begin, &[])
                .expect("begin");
            let again = peer.ask_as(0, Op::CaptureBegin, &begin, &[]).map(drop);
            assert_eq!(again, Err(CUDA_ERROR_ILLEGAL_STATE));
            for word in 0..10 {
                let body = memset(own + 4 * word, 3, 1, stream);
                peer.post(Op::Memset, &body, &[]).expect("post");
            }
            let state: CaptureState = peer.ask(Op::CaptureState, &object, &[]).expect("state");
            assert_eq!((state.status, state.nodes), (1, 1));
            // The graph belongs to the capture until that is over.
            let filled = Object {
                object: state.graph,
            };
            let destroyed = peer.ask_as(0, Op::GraphDestroy, &filled, &[]).map(drop);
            assert_eq!(destroyed, Err(CUDA_ERROR_ILLEGAL_STATE));
            // A mark does not get into a capture, and does not leave its waiter waiting.
            assert_eq!(
                peer.finish(stream),
                Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            );
            if ends {
                let graph: Value = peer.ask(Op::CaptureEnd, &object, &[]).expect("end");
                let made = instantiate(peer, graph.value, &[]).expect("instantiate");
                let launch = GraphLaunch {
                    exec: made.exec,
                    stream,
                };
                peer.post(Op::GraphLaunch, &launch, &[]).expect("post");
                peer.finish(stream).expect("it runs");
                let gone = Object { object: made.exec };
                peer.ask_as(0, Op::GraphExecDestroy, &gone, &[])
                    .expect("gone");
                worker.round().expect("the session goes on");
            } else {
                peer.post(Op::StreamDestroy, &object, &[]).expect("post");
                let other = peer.stream().expect("a stream");
                // Perhaps the same stream of the driver's: it does not capture any more.
                peer.post(Op::Memset, &memset(own, 3, 1, other), &[])
                    .expect("post");
                peer.finish(other).expect("it runs");
                peer.ask_as(
                    0,
                    Op::CaptureBegin,
                    &CaptureBegin {
                        stream: other,
                        ..begin
                    },
                    &[],
                )
                .expect("begin");
            }
        }
    });
}

#[test]
fn a_graph_that_waits_for_its_client_goes_with_it() {
    Scene::new().beside_a_worker(|scene| {
        for captured in [true, false] {
            let mut worker = scene.worker();
            let stream = worker.stream;
            let peer = &mut worker.peer;
            let made = if captured {
                let begin = CaptureBegin {
                    stream,
                    ..CaptureBegin::default()
                };
                peer.ask_as(0, Op::CaptureBegin, &begin, &[])
                    .expect("begin");
                let host = CaptureHost {
                    stream,
                    token: 77,
                    pad: 0,
                };
                peer.post(Op::CaptureHost, &host, &[]).expect("post");
                let object = Object { object: stream };
                let graph: Value = peer.ask(Op::CaptureEnd, &object, &[]).expect("end");
                graph.value
            } else {
                let made = graph(peer).expect("a graph");
                let host = HostNode { token: 77, pad: 0 };
                add(peer, made, CU_GRAPH_NODE_TYPE_HOST, &host).expect("a node");
                made
            };
            let without = instantiate(peer, made, &[]).expect("asked");
            assert_eq!((without.hosts, without.exec), (1, 0));
            let slot = 40;
            let exec = instantiate(peer, made, &[slot]).expect("made").exec;
            let launch = GraphLaunch { exec, stream };
            for returns in [true, false] {
                peer.post(Op::GraphLaunch, &launch, &[]).expect("post");
                let token = peer
                    .wait(|peer| {
                        let token = peer.flag(slot + ARRIVED).swap(0, Ordering::AcqRel);
                        (token != 0).then_some(token)
                    })
                    .expect("it gets there");
                assert_eq!(token, 77);
                if returns {
                    peer.flag(slot + RETURNED).store(1, Ordering::Release);
                    peer.finish(stream).expect("it goes on");
                }
            }
        }
    });
}
