//! What the fuzzer of the engine has found (docs/fuzzing.md), each by itself: an engine in this process, on softgpu.

use crate::{end, engine, session};
use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::array::ArrayCreate;
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::message::graph::{
    CaptureBegin, CaptureState, GraphCreate, GraphInstantiate, GraphNode, GraphNodeAdded,
    KernelNode, node_flags,
};
use mpsshim_proto::message::memory::FileRegister;
use mpsshim_proto::message::stream::{EventExport, EventImport, EventToken, MemOp};
use mpsshim_proto::message::{
    Attach, EventCreate, EventOnStream, MemGrant, Memset, Object, Op, Range, Side, StreamCreate,
    Value,
};
use mpsshim_tests::in_process::InProcess;
use mpsshim_tests::peer::{
    PTX, Peer, Status, copy, fill_params, launch, memory_file, memset, spinning_ptx,
};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

#[test]
fn an_instance_for_a_stream_that_is_none_is_not_lost() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let create = GraphCreate {
        flags: 0,
        device: 0,
    };
    let graph: Value = peer.ask(Op::GraphCreate, &create, &[]).expect("a graph");
    for with_params in [0, 1] {
        let body = GraphInstantiate {
            graph: graph.value,
            flags: 0,
            stream: Handle::new(Kind::Stream, 9, 999).0,
            with_params,
            slots: 0,
        };
        let refused = peer.ask_as(0, Op::GraphInstantiate, &body, &[]);
        assert_eq!(refused, Err(CUDA_ERROR_INVALID_HANDLE));
    }
    end(&engine, peer, &before);
}

#[test]
fn a_file_registered_for_reading_is_not_written() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let stream = peer.stream().expect("a stream");
    let memory = peer.memory(4096).expect("memory").start;
    let file = memory_file(&[7; 4096]).expect("a file");
    let register = FileRegister {
        offset: 0,
        len: 4096,
        address: 0,
        flags: CU_MEMHOSTREGISTER_READ_ONLY,
        device: 0,
    };
    peer.send_descriptor(1, file.as_fd()).expect("sent");
    let made = peer.ask_as(1, Op::FileRegister, &register, &[]);
    let made = made.expect("registered");
    let start = <Range as zerocopy::FromBytes>::read_from_bytes(&made[..])
        .expect("a range")
        .start;
    peer.post(
        Op::Copy,
        &copy(Side::Device, memory, Side::Host, start, 64, stream),
        &[],
    )
    .expect("posted");
    assert_eq!(peer.finish(stream), Ok(()), "it can be read");
    for side in [Side::Host, Side::Device] {
        let body = copy(side, start, Side::Device, memory, 64, stream);
        peer.post(Op::Copy, &body, &[]).expect("posted");
        assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE));
    }
    peer.post(Op::Memset, &memset(start, 0, 16, stream), &[])
        .expect("posted");
    assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE));
    peer.write(stream, start, b"text").expect("posted");
    assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE));
    let write = MemOp {
        stream,
        address: start,
        value: 1,
        operation: CU_STREAM_MEM_OP_WRITE_VALUE_32,
        flags: 0,
    };
    peer.post(Op::MemOp, &write, &[]).expect("posted");
    assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE));
    end(&engine, peer, &before);
}

#[test]
fn of_many_streams_some_are_kept() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    for _ in 0..1000 {
        peer.stream().expect("a stream");
    }
    let last = peer.stream().expect("a stream");
    peer.finish(last).expect("made");
    end(&engine, peer, &before);
    let kept = engine.kept().streams;
    assert!(kept < 400, "{kept} streams are kept");
}

/// Begins a capture in a stream.
fn capture(peer: &mut Peer, stream: u64) {
    let begin = CaptureBegin {
        stream,
        ..CaptureBegin::default()
    };
    peer.ask_as(0, Op::CaptureBegin, &begin, &[])
        .expect("a capture");
}

fn event(peer: &mut Peer) -> u64 {
    let event = peer.handle(Kind::Event);
    let create = EventCreate {
        event,
        ..EventCreate::default()
    };
    peer.post(Op::EventCreate, &create, &[]).expect("posted");
    event
}

/// Records an event in a stream, or has the stream wait for it.
fn on_stream(peer: &mut Peer, op: Op, event: u64, stream: u64) {
    let body = EventOnStream {
        event,
        stream,
        ..EventOnStream::default()
    };
    peer.post(op, &body, &[]).expect("posted");
}

fn captures(peer: &mut Peer, stream: u64) -> bool {
    let object = Object { object: stream };
    let state: CaptureState = peer.ask(Op::CaptureState, &object, &[]).expect("a state");
    state.status != CU_STREAM_CAPTURE_STATUS_NONE
}

#[test]
fn a_capture_does_not_spread_to_another_session() {
    let (engine, before) = engine();
    let (mut one, mut other) = (
        engine.connect().expect("a session"),
        engine.connect().expect("another"),
    );
    one.attach().expect("attach");
    other.attach().expect("attach");
    let (stream, plain) = (one.stream().unwrap(), one.stream().unwrap());
    let (shared, own) = (event(&mut one), event(&mut one));
    let export = |peer: &mut Peer, event| -> Status<EventToken> {
        peer.ask(Op::EventExport, &EventExport { event }, &[])
    };
    let token = export(&mut one, shared).expect("a token");
    capture(&mut one, stream);
    // What others have is not recorded in a capture, and what was recorded in one does not get to others.
    on_stream(&mut one, Op::EventRecord, shared, stream);
    assert_eq!(
        one.finish(plain),
        Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    );
    on_stream(&mut one, Op::EventRecord, own, stream);
    one.finish(plain).expect("recorded");
    let refused = export(&mut one, own).map(|_| ());
    assert_eq!(refused, Err(CUDA_ERROR_CAPTURED_EVENT));
    let theirs = other.handle(Kind::Event);
    let import = EventImport {
        event: theirs,
        device: 0,
        pad: 0,
        token: token.token,
    };
    other
        .ask_as(0, Op::EventImport, &import, &[])
        .expect("the event");
    let waiting = other.stream().unwrap();
    on_stream(&mut other, Op::StreamWaitEvent, theirs, waiting);
    other.finish(waiting).expect("goes on");
    assert!(captures(&mut one, stream) && !captures(&mut other, waiting));
    drop(other);
    end(&engine, one, &before);
}

#[test]
fn the_legacy_stream_does_not_join_a_capture() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let legacy = peer.handle(Kind::Stream);
    let body = StreamCreate {
        stream: legacy,
        legacy,
        ..StreamCreate::default()
    };
    peer.post(Op::StreamCreate, &body, &[]).expect("posted");
    let (stream, plain) = (peer.stream().unwrap(), peer.stream().unwrap());
    let event = event(&mut peer);
    capture(&mut peer, stream);
    on_stream(&mut peer, Op::EventRecord, event, stream);
    on_stream(&mut peer, Op::StreamWaitEvent, event, legacy);
    let implicit = Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    assert_eq!(peer.finish(plain), implicit);
    assert!(!captures(&mut peer, legacy));
    peer.finish(legacy).expect("goes on");
    end(&engine, peer, &before);
}

/// A capture in which an event was recorded, and another stream, which has worked before.
struct Capture {
    memory: Range,
    origin: u64,
    joins: u64,
    event: u64,
}

impl Capture {
    fn begin(peer: &mut Peer) -> Capture {
        let memory = peer.memory(4096).expect("memory");
        let (origin, joins) = (peer.stream().unwrap(), peer.stream().unwrap());
        let event = event(peer);
        peer.post(Op::Memset, &memset(memory.start, 7, 16, joins), &[])
            .expect("posted");
        capture(peer, origin);
        on_stream(peer, Op::EventRecord, event, origin);
        Capture {
            memory,
            origin,
            joins,
            event,
        }
    }

    /// The other stream waits for the event, and so joins the capture; what it did before is known to be done.
    fn is_joined(&self, peer: &mut Peer) {
        on_stream(peer, Op::StreamWaitEvent, self.event, self.joins);
        assert!(captures(peer, self.joins));
        // This waits until nothing is in flight.
        let range = Range {
            start: self.memory.start,
            len: 4096,
        };
        let answer = peer.ask_as(0, Op::UnmapMemory, &range, &[]);
        assert_eq!(answer, Err(CUDA_ERROR_INVALID_VALUE));
    }
}

#[test]
fn what_a_stream_did_before_it_joined_a_capture_comes_to_its_end() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let capture = Capture::begin(&mut peer);
    capture.is_joined(&mut peer);
    end(&engine, peer, &before);
}

#[test]
fn an_external_record_leaves_an_event_in_its_capture() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let capture = Capture::begin(&mut peer);
    let external = EventOnStream {
        event: capture.event,
        stream: capture.origin,
        flags: CU_EVENT_RECORD_EXTERNAL,
        ..EventOnStream::default()
    };
    peer.post(Op::EventRecord, &external, &[]).expect("posted");
    capture.is_joined(&mut peer);
    end(&engine, peer, &before);
}

#[test]
fn an_external_wait_does_not_join_a_capture() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let capture = Capture::begin(&mut peer);
    let external = EventOnStream {
        event: capture.event,
        stream: capture.joins,
        flags: CU_EVENT_WAIT_EXTERNAL,
        ..EventOnStream::default()
    };
    peer.post(Op::StreamWaitEvent, &external, &[])
        .expect("posted");
    assert!(!captures(&mut peer, capture.joins));
    assert_eq!(peer.posted_error(), Err(CUDA_ERROR_ILLEGAL_STATE));
    capture.is_joined(&mut peer);
    end(&engine, peer, &before);
}

#[test]
fn a_capture_keeps_no_stream_of_another_device() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let second = Attach {
        device: 1,
        flags: 0,
    };
    peer.ask_as(0, Op::Attach, &second, &[]).expect("attached");
    let grant = MemGrant {
        len: 4096,
        device: 1,
        flags: 0,
    };
    let memory: Range = peer.ask(Op::MemGrant, &grant, &[]).expect("memory");
    let stream = peer.stream().expect("a stream");
    capture(&mut peer, stream);
    peer.write(stream, memory.start, b"captured")
        .expect("posted");
    let captured = peer.ask::<_, Value>(Op::CaptureEnd, &Object { object: stream }, &[]);
    assert!(captured.is_ok(), "{captured:?}");
    peer.write(stream, memory.start, b"written!")
        .expect("posted");
    let read = peer.read(stream, memory.start, 8);
    assert_eq!(read.as_deref(), Ok(&b"written!"[..]));
    end(&engine, peer, &before);
}

#[test]
fn a_graph_is_never_inside_itself() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let mut graph = || -> u64 {
        let made: Value = peer
            .ask(Op::GraphCreate, &GraphCreate::default(), &[])
            .expect("a graph");
        made.value
    };
    let (outer, inner) = (graph(), graph());
    let mut put = |flags, object, graph, ownership| -> Status<GraphNodeAdded> {
        let body = GraphNode {
            object,
            flags,
            kind: CU_GRAPH_NODE_TYPE_GRAPH,
            ..GraphNode::default()
        };
        let does = CUDA_CHILD_GRAPH_NODE_PARAMS {
            graph,
            ownership,
            ..CUDA_CHILD_GRAPH_NODE_PARAMS::default()
        };
        peer.ask(Op::GraphNode, &body, does.as_bytes())
    };
    let moves = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    let refused = Err(CUDA_ERROR_INVALID_VALUE);
    assert_eq!(put(0, outer, outer, moves).map(drop), refused);
    let node = put(0, outer, inner, moves).expect("moved").node;
    assert_eq!(put(0, inner, outer, moves).map(drop), refused);
    // A node that is changed gets a copy.
    let change = node_flags::CHANGE;
    assert_eq!(put(change, node, outer, moves).map(drop), refused);
    end(&engine, peer, &before);
}

#[test]
fn launch_attributes_that_are_not_known_are_refused() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let stream = peer.stream().expect("a stream");
    let module = peer.module(PTX.as_bytes()).expect("a module");
    let function = peer.function(module, "fill").expect("a function");
    let memory = peer.memory(4096).expect("memory");
    let params = fill_params(memory.start, 1, 1);
    let mut launched = |id: u32| {
        let mut body = launch(function, stream, 1, params.len());
        body.attributes = 1;
        let mut behind = params.clone();
        behind.resize(params.len().next_multiple_of(8), 0);
        behind.extend(id.to_ne_bytes());
        behind.resize(behind.len() + 4 + 64, 0);
        peer.post(Op::Launch, &body, &behind).expect("posted");
        peer.finish(stream)
    };
    assert_eq!(launched(CU_LAUNCH_ATTRIBUTE_IGNORE), Ok(()));
    for unknown in [15, CU_LAUNCH_ATTRIBUTE_MAX, 99, u32::MAX] {
        assert_eq!(launched(unknown), Err(CUDA_ERROR_INVALID_VALUE));
    }
    end(&engine, peer, &before);
}

/// As long waits one allocation, in whole, for memory that its session gave back (`PATIENCE` in calls/memory.rs); the
/// undertaker takes a second less to ask for a moment.
const MEMORY_WAIT: Duration = Duration::from_secs(6);
/// Allocations of a test that must not wait so long: together they would take several times [`MEMORY_WAIT`].
const ALLOCATIONS: u32 = 4;
/// Bytes of device memory that a session of such a test may have.
const LIMIT: u64 = 32 << 20;

fn limited(engine: &InProcess) -> Peer {
    let mut peer = session(engine);
    let limit = LimitMemory {
        bytes: LIMIT,
        ..LimitMemory::default()
    };
    peer.post(Op::LimitMemory, &limit, &[]).expect("posted");
    peer
}

/// An array of 16 MiB.
fn array(peer: &mut Peer) -> u64 {
    let array = peer.handle(Kind::Array);
    let create = ArrayCreate {
        array,
        size: [1024, 1024, 0],
        format: 0x20,
        channels: 4,
        ..ArrayCreate::default()
    };
    peer.ask_as(0, Op::ArrayCreate, &create, &[])
        .expect("an array");
    array
}

#[test]
fn who_waits_for_memory_does_not_keep_it_from_coming_back() {
    let (engine, before) = engine();
    let mut peer = limited(&engine);
    let began = Instant::now();
    for _ in 0..ALLOCATIONS {
        let object = array(&mut peer);
        peer.post(Op::ArrayDestroy, &Object { object }, &[])
            .expect("posted");
        // The driver's array goes in a moment in which nobody is at work.
        let memory = peer.memory(LIMIT - (8 << 20)).expect("memory");
        peer.post(Op::MemRelease, &memory, &[]).expect("posted");
    }
    assert!(began.elapsed() < MEMORY_WAIT, "{:?}", began.elapsed());
    end(&engine, peer, &before);
}

#[test]
fn an_image_that_a_graph_keeps_is_not_waited_for() {
    let (engine, before) = engine();
    let mut peer = limited(&engine);
    let module = peer.module(PTX.as_bytes()).expect("a module");
    let function = peer.function(module, "fill").expect("a function");
    let graph: Value = peer
        .ask(Op::GraphCreate, &GraphCreate::default(), &[])
        .expect("a graph");
    let params = fill_params(0, 0, 0);
    let body = GraphNode {
        object: graph.value,
        kind: CU_GRAPH_NODE_TYPE_KERNEL,
        ..GraphNode::default()
    };
    let kernel = KernelNode {
        function,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        param_len: params.len() as u32,
    };
    let does = [kernel.as_bytes(), &params].concat();
    let added: Status<GraphNodeAdded> = peer.ask(Op::GraphNode, &body, &does);
    added.expect("a node");
    peer.post(Op::ImageUnload, &Object { object: module }, &[])
        .expect("posted");
    peer.memory(LIMIT / 2).expect("the first half");
    let began = Instant::now();
    for _ in 0..ALLOCATIONS {
        let refused = peer.memory(LIMIT).map(drop);
        assert_eq!(refused, Err(CUDA_ERROR_OUT_OF_MEMORY));
    }
    assert!(began.elapsed() < MEMORY_WAIT, "{:?}", began.elapsed());
    end(&engine, peer, &before);
}

#[test]
fn what_can_never_be_had_is_not_waited_for() {
    let (engine, before) = engine();
    // Somebody is at work all the time.
    let mut busy = engine.connect().expect("a session");
    busy.attach().expect("attach");
    let module = busy.module(spinning_ptx().as_bytes()).expect("a module");
    let spin = busy.function(module, "spin").expect("a function");
    let words = busy.memory(4096).expect("memory").start;
    let (stream, other) = (busy.stream().unwrap(), busy.stream().unwrap());
    busy.post(Op::Memset, &memset(words, 0, 2, stream), &[])
        .expect("posted");
    let params = [&words.to_le_bytes()[..], &1u32.to_le_bytes()].concat();
    busy.post(Op::Launch, &launch(spin, stream, 1, params.len()), &params)
        .expect("posted");
    while busy.read(other, words + 4, 4) != Ok(vec![1, 0, 0, 0]) {}

    let mut peer = limited(&engine);
    let object = array(&mut peer);
    peer.post(Op::ArrayDestroy, &Object { object }, &[])
        .expect("posted");
    let began = Instant::now();
    for len in [1 << 40, u64::MAX, LIMIT + 1, 1 << 63] {
        let refused = peer.memory(len).map(drop);
        assert_eq!(refused, Err(CUDA_ERROR_OUT_OF_MEMORY));
    }
    assert!(began.elapsed() < MEMORY_WAIT, "{:?}", began.elapsed());
    busy.write(other, words, &1u32.to_le_bytes())
        .expect("posted");
    assert_eq!(busy.finish(stream), Ok(()));
    drop(busy);
    end(&engine, peer, &before);
}

/// Begins a capture into a graph.
fn capture_to(peer: &mut Peer, stream: u64, graph: u64) -> Status<()> {
    let begin = CaptureBegin {
        stream,
        graph,
        ..CaptureBegin::default()
    };
    peer.ask_as(0, Op::CaptureBegin, &begin, &[]).map(drop)
}

/// `cuGraphDestroy`.
fn destroy(peer: &mut Peer, graph: u64) -> Status<()> {
    let object = Object { object: graph };
    peer.ask_as(0, Op::GraphDestroy, &object, &[]).map(drop)
}

#[test]
fn a_graph_is_destroyed_after_its_capture() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let stream = peer.stream().unwrap();
    let made: Value = peer
        .ask(Op::GraphCreate, &GraphCreate::default(), &[])
        .expect("a graph");
    capture_to(&mut peer, stream, made.value).expect("a capture");
    let refused = destroy(&mut peer, made.value);
    assert_eq!(refused, Err(CUDA_ERROR_ILLEGAL_STATE));
    let object = Object { object: stream };
    let _: Value = peer.ask(Op::CaptureEnd, &object, &[]).expect("its end");
    assert_eq!(destroy(&mut peer, made.value), Ok(()));
    end(&engine, peer, &before);
}

#[test]
fn one_capture_at_a_time_fills_a_graph() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let memory = peer.memory(4096).expect("memory").start;
    let (origin, other) = (peer.stream().unwrap(), peer.stream().unwrap());
    capture(&mut peer, origin);
    let object = Object { object: origin };
    let state: CaptureState = peer.ask(Op::CaptureState, &object, &[]).expect("a state");
    let second = capture_to(&mut peer, other, state.graph);
    assert_eq!(second, Err(CUDA_ERROR_ILLEGAL_STATE));
    assert_eq!(
        destroy(&mut peer, state.graph),
        Err(CUDA_ERROR_ILLEGAL_STATE)
    );
    // Its end would free what the first capture goes on to fill.
    let object = Object { object: other };
    peer.post(Op::StreamDestroy, &object, &[]).expect("posted");
    for value in 0..5 {
        let set = memset(memory, value, 16, origin);
        peer.post(Op::Memset, &set, &[]).expect("posted");
    }
    end(&engine, peer, &before);
}

#[test]
fn a_graph_inside_that_a_capture_fills_is_not_freed() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let memory = peer.memory(4096).expect("memory").start;
    let stream = peer.stream().unwrap();
    let [outer, inner] = [0; 2].map(|_| {
        let made: Value = peer
            .ask(Op::GraphCreate, &GraphCreate::default(), &[])
            .expect("a graph");
        made.value
    });
    let body = GraphNode {
        object: outer,
        kind: CU_GRAPH_NODE_TYPE_GRAPH,
        ..GraphNode::default()
    };
    let does = CUDA_CHILD_GRAPH_NODE_PARAMS {
        graph: inner,
        ownership: CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE,
        ..CUDA_CHILD_GRAPH_NODE_PARAMS::default()
    };
    let added: GraphNodeAdded = peer
        .ask(Op::GraphNode, &body, does.as_bytes())
        .expect("moved");
    capture_to(&mut peer, stream, inner).expect("a capture");
    // The genuine driver would crash at the next command of the stream.
    for (op, object) in [
        (Op::GraphNodeDestroy, added.node),
        (Op::GraphDestroy, outer),
    ] {
        let refused = peer.ask_as(0, op, &Object { object }, &[]);
        assert_eq!(refused.map(drop), Err(CUDA_ERROR_INVALID_VALUE));
    }
    let set = memset(memory, 7, 16, stream);
    peer.post(Op::Memset, &set, &[]).expect("posted");
    let object = Object { object: stream };
    let _: Value = peer.ask(Op::CaptureEnd, &object, &[]).expect("its end");
    let object = Object { object: outer };
    peer.ask_as(0, Op::GraphDestroy, &object, &[])
        .expect("destroyed");
    end(&engine, peer, &before);
}

/// Adds a node to a graph, or changes one.
fn put_node(peer: &mut Peer, flags: u32, object: u64, kind: u32, does: &[u8]) -> Status<u64> {
    let body = GraphNode {
        object,
        flags,
        kind,
        ..GraphNode::default()
    };
    let added: GraphNodeAdded = peer.ask(Op::GraphNode, &body, does)?;
    Ok(added.node)
}

#[test]
fn rows_do_not_overlap() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let memory = peer.memory(4096).expect("memory").start;
    let stream = peer.stream().expect("a stream");
    let graph: Value = peer
        .ask(Op::GraphCreate, &GraphCreate::default(), &[])
        .expect("a graph");
    let graph = graph.value;
    // Each would write the same bytes for hours.
    const ROWS: u64 = 1 << 40;
    let plain = CUDA_MEMSET_NODE_PARAMS {
        to: memory,
        pitch: 64,
        element: 4,
        width: 16,
        height: 2,
        ..CUDA_MEMSET_NODE_PARAMS::default()
    };
    let kind = CU_GRAPH_NODE_TYPE_MEMSET;
    let set = put_node(&mut peer, 0, graph, kind, plain.as_bytes()).expect("a node");
    for (pitch, height) in [(0, ROWS), (0, 2), (63, 2), (1, ROWS)] {
        let does = CUDA_MEMSET_NODE_PARAMS {
            pitch,
            height,
            ..plain
        };
        let body = Memset {
            pitch,
            height,
            ..memset(memory, 7, 16, stream)
        };
        peer.post(Op::Memset, &body, &[]).expect("posted");
        let called = peer.finish(stream).map(|()| 0);
        let added = put_node(&mut peer, 0, graph, kind, does.as_bytes());
        let changed = put_node(&mut peer, node_flags::CHANGE, set, kind, does.as_bytes());
        let refused = [Err(CUDA_ERROR_INVALID_VALUE); 3];
        assert_eq!([called, added, changed], refused, "{pitch} {height}");
    }
    let plain = CUDA_MEMCPY3D {
        src_type: CU_MEMORYTYPE_DEVICE,
        src_device: memory,
        src_pitch: 64,
        src_height: 2,
        dst_type: CU_MEMORYTYPE_DEVICE,
        dst_device: memory + 2048,
        dst_pitch: 64,
        dst_height: 2,
        width: 64,
        height: 2,
        depth: 2,
        ..CUDA_MEMCPY3D::default()
    };
    let kind = CU_GRAPH_NODE_TYPE_MEMCPY;
    put_node(&mut peer, 0, graph, kind, plain.as_bytes()).expect("a node");
    let changes: [fn(&mut CUDA_MEMCPY3D); 5] = [
        |copy| copy.src_pitch = 63,
        |copy| copy.dst_pitch = 1,
        |copy| copy.src_height = 1,
        |copy| copy.dst_height = 1,
        |copy| copy.src_x = 1,
    ];
    for (index, change) in changes.iter().enumerate() {
        let mut does = plain;
        change(&mut does);
        let added = put_node(&mut peer, 0, graph, kind, does.as_bytes());
        assert_eq!(added, Err(CUDA_ERROR_INVALID_VALUE), "change {index}");
    }
    end(&engine, peer, &before);
}
