//! Stream capture.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::graph::*;
use mpsshim_proto::message::stream::HostFunction;
use mpsshim_proto::message::{EventOnStream, Mark, MarkEvent, Object, Op, Side, StreamCreate};
use mpsshim_proto::segment::FLAGS;
use mpsshim_tests::peer::{copy, memset};
use mpsshim_tests::refusals::{Draft, Scene, Table, node};

fn begin(stream: u64, graph: u64, nodes: u32) -> Draft {
    Draft::of(&CaptureBegin {
        stream,
        graph,
        nodes,
        edges: 0,
    })
}

fn update(stream: u64, nodes: u32) -> Draft {
    Draft::of(&CaptureUpdate {
        stream,
        flags: 1,
        nodes,
        edges: 0,
        pad: 0,
    })
}

fn object(object: u64) -> Draft {
    Draft::of(&Object { object })
}

/// A stream that captures.
fn capturing(s: &mut Scene) -> u64 {
    let stream = s.make(Kind::Stream);
    capture(s, stream, 0);
    stream
}

fn capture(s: &mut Scene, stream: u64, graph: u64) {
    let body = CaptureBegin {
        stream,
        graph,
        nodes: 0,
        edges: 0,
    };
    let begun = s.peer.ask_as(0, Op::CaptureBegin, &body, &[]);
    begun.expect("a capture");
}

fn host(stream: u64) -> Draft {
    Draft::of(&CaptureHost {
        stream,
        token: 1,
        pad: 0,
    })
}

pub fn table() -> Table {
    let mut t = Table::default();
    t.op(Op::CaptureBegin)
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |_, stream| {
            begin(stream, 0, 0)
        })
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |s, graph| {
            begin(s.make(Kind::Stream), graph, 0)
        })
        .fine("a node of the graph", |s| {
            let (stream, graph) = (s.make(Kind::Stream), s.make(Kind::Graph));
            begin(stream, graph, 1).with(&node(&mut s.peer, graph))
        })
        .refused("another session's node", CUDA_ERROR_INVALID_VALUE, |s| {
            let (stream, graph) = (s.make(Kind::Stream), s.make(Kind::Graph));
            begin(stream, graph, 1).with(&s.of_other(Kind::GraphNode))
        })
        .refused("a stream that captures", CUDA_ERROR_ILLEGAL_STATE, |s| {
            begin(capturing(s), 0, 0)
        })
        .refused(
            "a graph that a capture fills",
            CUDA_ERROR_ILLEGAL_STATE,
            |s| {
                let (first, second) = (s.make(Kind::Stream), s.make(Kind::Stream));
                let graph = s.make(Kind::Graph);
                capture(s, first, graph);
                begin(second, graph, 0)
            },
        )
        .refused(
            "a legacy default stream",
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            |s| {
                let stream = s.unused(Kind::Stream);
                let body = StreamCreate {
                    stream,
                    legacy: stream,
                    ..StreamCreate::default()
                };
                s.peer.post(Op::StreamCreate, &body, &[]).expect("posted");
                begin(stream, 0, 0)
            },
        )
        .ends("nodes that are not in the message", |s| {
            begin(s.make(Kind::Stream), 0, 64)
        })
        .ends("edges that are not in the message", |s| {
            let body = CaptureBegin {
                stream: s.make(Kind::Stream),
                graph: 0,
                nodes: 64,
                edges: 1,
            };
            Draft::of(&body).with(&[0u64; 64])
        })
        .ends("more nodes than there may be", |s| {
            let nodes = vec![0u64; NODES_MOST + 1];
            begin(s.make(Kind::Stream), 0, nodes.len() as u32).with(&nodes[..])
        });
    t.op(Op::CaptureEnd)
        .fine("a stream that captures", |s| object(capturing(s)))
        .handle_where(
            Kind::Stream,
            (CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_HANDLE),
            |_, stream| object(stream),
        );
    t.op(Op::CaptureState)
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |_, stream| {
            object(stream)
        });
    t.op(Op::CaptureBreak)
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |_, stream| {
            object(stream)
        })
        .refused(
            "a stream that captures",
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            |s| object(capturing(s)),
        );
    t.op(Op::CaptureUpdate)
        .fine("a stream that captures", |s| update(capturing(s), 0))
        .handle_where(
            Kind::Stream,
            (CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_HANDLE),
            |_, stream| update(stream, 0),
        )
        .refused("another session's node", CUDA_ERROR_INVALID_VALUE, |s| {
            update(capturing(s), 1).with(&s.of_other(Kind::GraphNode))
        })
        .ends("nodes that are not in the message", |s| {
            update(capturing(s), 64)
        });
    t.op(Op::CaptureHost)
        .fine("a stream that captures", |s| host(capturing(s)))
        .handle_where(
            Kind::Stream,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_HANDLE),
            |_, stream| host(stream),
        );
    // A graph copies between any memories.
    t.op(Op::Copy).fine("host memory on both sides", |s| {
        let (to, from, stream) = (s.host.start, s.host.start + 64, capturing(s));
        Draft::of(&copy(Side::Host, to, Side::Host, from, 64, stream))
    });
    // It is refused when the graph is instantiated, as natively.
    t.op(Op::Memset).fine("memory of another session", |s| {
        let (to, stream) = (s.others_memory.start, capturing(s));
        Draft::of(&memset(to, 0, 16, stream))
    });
    // What waits for a flag that the GPU writes now cannot be part of a graph.
    t.op(Op::Mark).refused(
        "a stream that captures",
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        |s| {
            Draft::of(&Mark {
                stream: capturing(s),
                slot: FLAGS as u32 - 1,
                value: 1,
            })
        },
    );
    t.op(Op::MarkEvent)
        .refused(
            "a stream that captures",
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            |s| {
                Draft::of(&MarkEvent {
                    event: s.make(Kind::Event),
                    stream: capturing(s),
                    slot: FLAGS as u32 - 1,
                    value: 1,
                })
            },
        )
        .refused(
            "an event that a capture recorded",
            CUDA_ERROR_CAPTURED_EVENT,
            |s| {
                let (event, stream) = (s.make(Kind::Event), capturing(s));
                let record = EventOnStream {
                    event,
                    stream,
                    flags: 0,
                    pad: 0,
                };
                s.peer.post(Op::EventRecord, &record, &[]).expect("posted");
                Draft::of(&MarkEvent {
                    event,
                    stream: s.stream,
                    slot: FLAGS as u32 - 1,
                    value: 1,
                })
            },
        );
    t.op(Op::HostFunction)
        .refused("a stream that captures", CUDA_ERROR_NOT_SUPPORTED, |s| {
            Draft::of(&HostFunction {
                stream: capturing(s),
                slot: FLAGS as u32 - 1,
                value: 1,
            })
        });
    t
}
