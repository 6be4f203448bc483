//! Stream capture. It always begins in relaxed mode: the shim enforces the other modes in its own process, whereas a
//! prohibition by the driver would affect every client of the server.

use super::reply::{Reply, number};
use crate::engine::base::call::{Call, Incoming};
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::graph::shown::host_operations;
use crate::engine::objects::graphs::{Capture, Owner};
use crate::engine::objects::streams::Role;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::Object;
use mpsshim_proto::message::graph::{
    CaptureBegin, CaptureHost, CaptureState, CaptureUpdate, NODES_MOST,
};
use std::ptr;
use zerocopy::{FromBytes, IntoBytes};

/// Nodes and edges that follow a struct in a message.
pub struct Behind {
    /// Handles of the nodes.
    pub nodes: Vec<u64>,
    /// One edge per node, or none at all.
    pub edges: Vec<CUgraphEdgeData>,
    /// The bytes that follow the nodes and edges.
    pub rest: Vec<u8>,
}

impl Behind {
    /// The edges in the driver's form; null if there are none.
    pub fn edges(&self) -> *const CUgraphEdgeData {
        if self.edges.is_empty() {
            ptr::null()
        } else {
            self.edges.as_ptr()
        }
    }
}

/// Takes `count` structs from the front.
pub fn take<T: FromBytes>(bytes: &mut &[u8], count: usize) -> Result<Vec<T>, CallError> {
    let len = count * size_of::<T>();
    if len > bytes.len() {
        return Err(CallError::Violation(format!(
            "{count} items do not fit a message"
        )));
    }
    let (front, rest) = bytes.split_at(len);
    *bytes = rest;
    let read = |chunk| T::read_from_bytes(chunk).ok();
    Ok(front
        .chunks_exact(size_of::<T>())
        .filter_map(read)
        .collect())
}

/// The nodes and edges behind a `T`.
pub fn nodes_behind<T>(
    message: Incoming<'_>,
    nodes: u32,
    edges: bool,
) -> Result<Behind, CallError> {
    if nodes as usize > NODES_MOST {
        return Err(CallError::Violation(format!("{nodes} nodes in a message")));
    }
    let bytes = message.behind::<T>()?;
    let mut bytes = &bytes[..];
    Ok(Behind {
        nodes: take(&mut bytes, nodes as usize)?,
        edges: take(&mut bytes, if edges { nodes as usize } else { 0 })?,
        rest: bytes.to_vec(),
    })
}

/// A stream for a call about its capture: its position and the driver's stream. Does not wait for operations in
/// flight. Makes the stream's context current.
fn stream_for_capture(
    session: &Session,
    shared: &Shared,
    handle: u64,
) -> Result<(usize, CUstream), CallError> {
    let index = session.objects.streams.index(handle)?;
    let stream = session.objects.streams.at(index)?;
    shared.gpu.devices[stream.device].make_current(&shared.gpu.driver)?;
    Ok((index, stream.raw))
}

/// `cuStreamBeginCapture`, `cuStreamBeginCaptureToGraph`.
pub fn capture_begin(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, CaptureBegin>,
) -> Reply {
    let Call { body, message } = call;
    let behind = nodes_behind::<CaptureBegin>(message, body.nodes, body.edges != 0)?;
    let (index, _) = stream_for_capture(session, shared, body.stream)?;
    let stream = session.objects.streams.at_mut(index)?;
    if stream.role == Role::Legacy {
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.into());
    }
    if stream.capturing {
        return Err(CUDA_ERROR_ILLEGAL_STATE.into());
    }
    stream.set_confined(&shared.gpu, None)?;
    stream.ready_for_capture(&shared.gpu)?;
    let raw = stream.raw;
    let driver = &shared.gpu.driver.graph;
    if body.graph == 0 {
        driver.begin_capture(raw, CU_STREAM_CAPTURE_MODE_RELAXED)?;
    } else {
        let graph = session.objects.graphs.graphs.get(body.graph)?;
        // If two captures filled one graph, the first to end would free the graph that the other is still filling.
        if graph.filling {
            return Err(CUDA_ERROR_ILLEGAL_STATE.into());
        }
        let graph = graph.raw;
        let nodes = session.objects.graphs.raw_nodes(&behind.nodes)?;
        driver.begin_capture_to(
            raw,
            graph,
            nodes.as_ptr(),
            behind.edges(),
            nodes.len(),
            CU_STREAM_CAPTURE_MODE_RELAXED,
        )?;
        session.objects.graphs.graphs.get_mut(body.graph)?.filling = true;
    }
    let stream = session.objects.streams.at_mut(index)?;
    stream.capturing = true;
    session.objects.graphs.note_capture(stream.part != 0);
    session.objects.graphs.captures.push(Capture {
        stream: body.stream,
        graph: body.graph,
    });
    Ok(Vec::new())
}

/// `cuStreamEndCapture`.
pub fn capture_end(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let (index, raw) = stream_for_capture(session, shared, body.object)?;
    let device = session.objects.streams.at(index)?.device;
    let graph = end_capture(session, shared, body.object, raw, device)?;
    Ok(number(graph))
}

/// Ends the capture of a stream. Returns the handle of the graph.
fn end_capture(
    session: &mut Session,
    shared: &Shared,
    stream: u64,
    raw: CUstream,
    device: Ordinal,
) -> Result<u64, CUresult> {
    let mut graph = CUgraph::NULL;
    let sinks = captured_sinks(shared, raw);
    let ended = shared.gpu.driver.graph.end_capture(raw, &mut graph);
    if ended.is_err() && shared.gpu.driver.is_capturing(raw) {
        // The capture began on another stream, and continues.
        return ended.map(|()| 0);
    }
    let at = session
        .objects
        .graphs
        .captures
        .iter()
        .position(|c| c.stream == stream);
    let capture = at.map(|at| session.objects.graphs.captures.swap_remove(at));
    look_who_captures(session, shared);
    let known = capture.map_or(0, |capture| capture.graph);
    if let Ok(graph) = session.objects.graphs.graphs.get_mut(known) {
        graph.filling = false;
    }
    if ended.is_err() || graph.is_null() {
        if session.objects.graphs.captures.is_empty() {
            session.objects.graphs.captured = 0;
        }
        // A graph that the capture created is gone. In a graph that the client passed, the captured nodes may be
        // gone.
        match session
            .objects
            .graphs
            .graphs
            .get(known)
            .map(|g| (g.owner, g.raw))
        {
            Ok((Owner::Capture, _)) => session.objects.graphs.forget_graph(known),
            Ok((_, raw)) => match all_nodes(shared, raw) {
                Ok(now) => session.objects.graphs.keep_nodes(known, &now),
                Err(_) => session.objects.graphs.forget_graph(known),
            },
            Err(_) => {}
        }
        return ended.map(|()| 0);
    }
    let handle = session
        .objects
        .graphs
        .graph_handle(graph, device, Owner::Client);
    match handle {
        Ok(handle) => {
            let graph = session.objects.graphs.graphs.get_mut(handle)?;
            if graph.owner == Owner::Capture {
                graph.owner = Owner::Client;
            }
            graph.sinks = sinks;
            session.objects.graphs.captured_into(handle);
            Ok(handle)
        }
        Err(status) => {
            let _ = shared.gpu.driver.graph.destroy(graph);
            Err(status)
        }
    }
}

/// Determines again which streams capture, after captures have ended or may have spread to other streams.
pub fn look_who_captures(session: &mut Session, shared: &Shared) {
    for stream in session
        .objects
        .streams
        .iter_mut()
        .chain(session.objects.retired.iter_mut())
    {
        if stream.capturing {
            stream.capturing = shared.gpu.driver.is_capturing(stream.raw);
        }
    }
}

/// Checks whether a stream has joined a capture by waiting for an event, and notes it.
pub fn look_whether_captures(session: &mut Session, shared: &Shared, index: usize) {
    if session.objects.graphs.captures.is_empty() {
        return;
    }
    if let Ok(stream) = session.objects.streams.at_mut(index) {
        stream.capturing = shared.gpu.driver.is_capturing(stream.raw);
        let in_part = stream.capturing && stream.part != 0;
        session.objects.graphs.note_capture(in_part);
    }
}

/// `cuStreamGetCaptureInfo`.
pub fn capture_state(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let (index, raw) = stream_for_capture(session, shared, body.object)?;
    let (device, driver) = (
        session.objects.streams.at(index)?.device,
        &shared.gpu.driver.graph,
    );
    let mut state = CaptureState::default();
    let (mut graph, mut nodes, mut edges, mut count) =
        (CUgraph::NULL, ptr::null(), ptr::null(), 0usize);
    let mut asked = driver.capture_info_with_edges(
        raw,
        &mut state.status,
        &mut state.id,
        &mut graph,
        &mut nodes,
        &mut edges,
        &mut count,
    );
    if asked == Err(CUDA_ERROR_NOT_SUPPORTED) {
        asked = driver.capture_info(
            raw,
            &mut state.status,
            &mut state.id,
            &mut graph,
            &mut nodes,
            &mut count,
        );
    }
    asked?;
    if state.status != CU_STREAM_CAPTURE_STATUS_ACTIVE || graph.is_null() {
        state.graph = 0;
        return Ok(state.as_bytes().to_vec());
    }
    // No stream with more dependencies than fit into an answer is known; the client would get the first ones.
    let count = if nodes.is_null() {
        0
    } else {
        count.min(NODES_MOST)
    };
    // SAFETY: the driver's own arrays of at least `count`, valid until the next call on the stream.
    let (nodes, edges) = unsafe {
        let edges = if edges.is_null() {
            Vec::new()
        } else {
            std::slice::from_raw_parts(edges, count).to_vec()
        };
        let nodes = if count == 0 {
            Vec::new()
        } else {
            std::slice::from_raw_parts(nodes, count).to_vec()
        };
        (nodes, edges)
    };
    let id = note_captured(session, shared, body.object, graph, device)?;
    state.graph = id;
    state.nodes = count as u32;
    state.edges = u32::from(!edges.is_empty());
    let mut payload = state.as_bytes().to_vec();
    for node in nodes {
        let handle = session.objects.graphs.node_handle(node, id)?;
        payload.extend_from_slice(handle.as_bytes());
    }
    payload.extend_from_slice(edges.as_bytes());
    Ok(payload)
}

/// The handle of the graph that the capture of a stream fills.
///
/// # Errors
/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED` if the capture has failed.
pub fn captured_graph(
    session: &mut Session,
    shared: &Shared,
    index: usize,
    handle: u64,
) -> Result<u64, CUresult> {
    let stream = session.objects.streams.at(index)?;
    let (raw, device) = (stream.raw, stream.device);
    let graph = capture_graph(shared, raw).ok_or(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)?;
    note_captured(session, shared, handle, graph, device)
}

fn note_captured(
    session: &mut Session,
    shared: &Shared,
    stream: u64,
    graph: CUgraph,
    device: Ordinal,
) -> Result<u64, CUresult> {
    let id = session
        .objects
        .graphs
        .graph_handle(graph, device, Owner::Capture)?;
    session.objects.graphs.graphs.get_mut(id)?.filling = true;
    // The capture of a forked stream is the capture that began on another stream, so the graph's handle is noted
    // there.
    if session
        .objects
        .graphs
        .captures
        .iter()
        .all(|c| c.graph != id)
    {
        let own = session
            .objects
            .graphs
            .captures
            .iter()
            .position(|c| c.stream == stream);
        let origin = own.or_else(|| {
            session.objects.graphs.captures.iter().position(|capture| {
                capture.graph == 0
                    && session
                        .objects
                        .streams
                        .get(capture.stream)
                        .is_ok_and(|stream| capture_graph(shared, stream.raw) == Some(graph))
            })
        });
        if let Some(origin) = origin {
            session.objects.graphs.captures[origin].graph = id;
        }
    }
    Ok(id)
}

/// `cuLaunchHostFunc` in a capture.
pub fn capture_host(
    session: &mut Session,
    shared: &Shared,
    body: CaptureHost,
) -> Result<(), CallError> {
    let (index, raw) = stream_for_capture(session, shared, body.stream)?;
    if !session.objects.streams.at(index)?.capturing {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    // Each instance of the graph gets slots of its own.
    let mut operations = host_operations(session, 0, body.token)?.map(|words| {
        let [operation, address, value, flags, ..] = words;
        CUstreamBatchMemOpParams {
            operation: operation as u32,
            address,
            value,
            value_flags: flags as u32,
            ..CUstreamBatchMemOpParams::default()
        }
    });
    let count = operations.len() as u32;
    session.objects.graphs.capture(1)?;
    let driver = &shared.gpu.driver.stream;
    driver.stream_batch_mem_op(raw, count, &mut operations[0], 0)?;
    session.objects.graphs.hosts = true;
    Ok(())
}

/// `cuStreamUpdateCaptureDependencies`.
pub fn capture_update(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, CaptureUpdate>,
) -> Reply {
    let Call { body, message } = call;
    let behind = nodes_behind::<CaptureUpdate>(message, body.nodes, body.edges != 0)?;
    let (_, raw) = stream_for_capture(session, shared, body.stream)?;
    let nodes = session.objects.graphs.raw_nodes(&behind.nodes)?;
    // Counted, because they become edges of the graph.
    session.objects.graphs.capture(nodes.len() as u64)?;
    shared.gpu.driver.graph.update_capture(
        raw,
        nodes.as_ptr(),
        behind.edges(),
        nodes.len(),
        body.flags,
    )?;
    Ok(Vec::new())
}

/// Whether operations on a stream are captured into a graph.
pub fn is_capturing(session: &Session, stream: u64) -> bool {
    session
        .objects
        .streams
        .get(stream)
        .is_ok_and(|stream| stream.capturing)
}

/// Does nothing. The client's wait for the answer returns the first failure of the asynchronous operations before it.
#[expect(clippy::unnecessary_wraps, reason = "as all handlers of requests")]
pub fn show_failure(_: &mut Session, _: &Shared, _: Object) -> Reply {
    Ok(Vec::new())
}

/// Invalidates a capture, as a forbidden call does natively: its end returns an error.
pub fn capture_break(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let (index, raw) = stream_for_capture(session, shared, body.object)?;
    if session.objects.streams.at(index)?.capturing {
        shared.gpu.driver.stream_query(raw)?;
    }
    Ok(Vec::new())
}

/// Ends the captures of a stream that the client destroys, or all captures at the end of the session: a stream that
/// captures must not be passed to another session.
pub fn abandon_captures(session: &mut Session, shared: &Shared, only: Option<u64>) {
    let over: Vec<u64> = session
        .objects
        .graphs
        .captures
        .iter()
        .map(|c| c.stream)
        .collect();
    for handle in over
        .into_iter()
        .filter(|s| only.is_none_or(|only| only == *s))
    {
        let Ok((index, raw)) = stream_for_capture(session, shared, handle) else {
            continue;
        };
        let Ok(device) = session
            .objects
            .streams
            .at(index)
            .map(|stream| stream.device)
        else {
            continue;
        };
        let into = session
            .objects
            .graphs
            .captures
            .iter()
            .find(|c| c.stream == handle);
        let given = into
            .and_then(|capture| session.objects.graphs.graphs.get(capture.graph).ok())
            .is_some_and(|graph| graph.owner != Owner::Capture);
        if let Ok(graph) = end_capture(session, shared, handle, raw, device)
            && let Ok(object) = session.objects.graphs.graphs.get(graph)
            && !given
        {
            // The client does not know this graph.
            let _ = shared.gpu.driver.graph.destroy(object.raw);
            session.objects.graphs.forget_graph(graph);
        }
    }
}

/// The nodes at which the capture of a stream ends, if there are several.
fn captured_sinks(shared: &Shared, stream: CUstream) -> Vec<CUgraphNode> {
    let (mut status, mut id, mut graph) = (0, 0, CUgraph::NULL);
    let (mut nodes, mut edges, mut count) = (ptr::null(), ptr::null(), 0);
    let info = (&mut status, &mut id, &mut graph, &mut nodes, &mut count);
    let driver = &shared.gpu.driver.graph;
    let mut asked = driver.capture_info(stream, info.0, info.1, info.2, info.3, info.4);
    if asked.is_err() {
        // Asks again with edges, because some have data.
        asked = driver.capture_info_with_edges(
            stream,
            &mut status,
            &mut id,
            &mut graph,
            &mut nodes,
            &mut edges,
            &mut count,
        );
    }
    if asked.is_err() || nodes.is_null() || count < 2 {
        return Vec::new();
    }
    // SAFETY: the driver's own array of as many, valid until the next call on the stream.
    unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec()
}

/// The graph that a stream's capture fills.
fn capture_graph(shared: &Shared, stream: CUstream) -> Option<CUgraph> {
    let (mut status, mut id, mut graph) = (0, 0, CUgraph::NULL);
    let (mut nodes, mut count) = (ptr::null(), 0);
    shared
        .gpu
        .driver
        .graph
        .capture_info(
            stream,
            &mut status,
            &mut id,
            &mut graph,
            &mut nodes,
            &mut count,
        )
        .ok()?;
    (status == CU_STREAM_CAPTURE_STATUS_ACTIVE).then_some(graph)
}

/// All nodes of a graph.
pub fn all_nodes(shared: &Shared, graph: CUgraph) -> Result<Vec<CUgraphNode>, CUresult> {
    let driver = &shared.gpu.driver.graph;
    let mut count = 0;
    driver.nodes(graph, ptr::null_mut(), &mut count)?;
    let mut nodes = vec![CUgraphNode::NULL; count];
    if count > 0 {
        driver.nodes(graph, nodes.as_mut_ptr(), &mut count)?;
    }
    nodes.truncate(count);
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{FAULT, Fixture, Function, counts, obeys, others, records};
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::{Op, StreamCreate};

    fn begin(stream: u64, graph: u64) -> CaptureBegin {
        CaptureBegin {
            stream,
            graph,
            ..CaptureBegin::default()
        }
    }

    fn captures(test: &Fixture) -> usize {
        test.session.objects.graphs.captures.len()
    }

    /// Says that a stream captures.
    extern "C" fn says_capturing(_: u64, status: &mut u32) -> CUresult {
        *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
        CUDA_SUCCESS
    }

    const BEGIN: [(&str, Function); 2] = [
        ("cuStreamBeginCapture_v2", counts as Function),
        ("cuStreamBeginCaptureToGraph", counts as Function),
    ];

    #[test]
    fn a_capture_begins_in_a_stream_of_the_session_that_does_not_capture() {
        let mut test = Fixture::new(&BEGIN);
        let (stream, capturing) = (test.stream(), test.stream());
        let legacy = test.new_handle(Kind::Stream);
        let body = StreamCreate {
            stream: legacy,
            legacy,
            ..StreamCreate::default()
        };
        assert_eq!(test.status(Op::StreamCreate, &body, &[]), CUDA_SUCCESS);
        test.captures(capturing);
        test.calls();
        let mut wrong = vec![
            (legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
            (capturing, CUDA_ERROR_ILLEGAL_STATE),
        ];
        wrong.extend(others(stream).map(|stream| (stream, CUDA_ERROR_INVALID_HANDLE)));
        let graph = test.graph();
        for (stream, status) in wrong {
            for graph in [0, graph] {
                let refused = test.status(Op::CaptureBegin, &begin(stream, graph), &[]);
                assert_eq!(refused, status, "{stream:#x}");
            }
        }
        assert_eq!((test.calls(), captures(&test)), (0, 1));
    }

    #[test]
    fn a_capture_goes_into_a_graph_of_the_session_that_no_other_fills() {
        let mut test = Fixture::new(&BEGIN);
        let (stream, first, graph) = (test.stream(), test.stream(), test.graph());
        for graph in &others(graph)[1..] {
            let status = test.status(Op::CaptureBegin, &begin(stream, *graph), &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{graph:#x}");
        }
        let body = CaptureBegin {
            nodes: 1,
            ..begin(stream, graph)
        };
        let node = test.node(graph);
        for node in others(node) {
            let status = test.status(Op::CaptureBegin, &body, &node.to_le_bytes());
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{node:#x}");
        }
        assert_eq!(
            test.status(Op::CaptureBegin, &begin(first, graph), &[]),
            CUDA_SUCCESS
        );
        test.calls();
        let status = test.status(Op::CaptureBegin, &body, &node.to_le_bytes());
        assert_eq!(status, CUDA_ERROR_ILLEGAL_STATE);
        assert_eq!((test.calls(), captures(&test)), (0, 1));
    }

    #[test]
    fn nodes_and_edges_fit_the_message() {
        let mut test = Fixture::new(&BEGIN);
        let (stream, most) = (test.stream(), NODES_MOST as u32);
        for (nodes, edges, rest) in [
            (1, 0, 7),
            (1, 1, 8 + size_of::<CUgraphEdgeData>() - 1),
            (most + 1, 0, 8 * (NODES_MOST + 1)),
            (u32::MAX, 0, 8),
        ] {
            let rest = vec![0; rest];
            let body = CaptureBegin {
                nodes,
                edges,
                ..begin(stream, 0)
            };
            assert!(test.is_violation(Op::CaptureBegin, &body, &rest), "{nodes}");
            let body = CaptureUpdate {
                stream,
                nodes,
                edges,
                ..CaptureUpdate::default()
            };
            assert!(
                test.is_violation(Op::CaptureUpdate, &body, &rest),
                "{nodes}"
            );
        }
        assert_eq!((test.calls(), captures(&test)), (0, 0));
    }

    #[test]
    fn a_capture_that_the_driver_does_not_begin_is_none() {
        for (into, (name, _)) in BEGIN.into_iter().enumerate() {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let (stream, graph) = (test.stream(), test.graph());
            let body = begin(stream, if into == 0 { 0 } else { graph });
            for (status, begun) in [(CUDA_ERROR_NOT_SUPPORTED, false), (CUDA_SUCCESS, true)] {
                test.orders(status);
                assert_eq!(test.told(Op::CaptureBegin, &body, &[]), status, "{name}");
                assert_eq!(captures(&test), usize::from(begun), "{name}");
                assert_eq!(is_capturing(&test.session, stream), begun, "{name}");
                let graph = test.session.objects.graphs.graphs.get(graph);
                let filling = graph.expect("a graph").filling;
                assert_eq!(filling, begun && into == 1, "{name}");
            }
            let other = begin(test.stream(), 0);
            if into == 0 {
                test.orders(FAULT);
                assert_eq!(test.told(Op::CaptureBegin, &other, &[]), FAULT);
                assert!(test.has_ended());
            }
        }
    }

    #[test]
    fn a_capture_ends_with_a_graph_of_the_clients() {
        let mut test = Fixture::new(&[]);
        let stream = test.stream();
        test.captures(stream);
        for object in others(stream) {
            let status = test.status(Op::CaptureEnd, &Object { object }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{object:#x}");
        }
        assert_eq!(captures(&test), 1);
        let body = Object { object: stream };
        let graph = test
            .reply::<u64>(Op::CaptureEnd, &body, &[])
            .expect("a graph");
        let found = test.session.objects.graphs.graphs.get(graph);
        assert_eq!(found.expect("a graph").owner, Owner::Client);
        assert_eq!(captures(&test), 0);
        assert!(!is_capturing(&test.session, stream));
    }

    #[test]
    fn a_capture_that_ends_with_an_error_is_over_unless_it_goes_on_elsewhere() {
        for (goes_on, name) in [(false, "none"), (true, "cuStreamIsCapturing")] {
            let mut test = Fixture::new(&[
                ("cuStreamEndCapture", obeys as Function),
                (name, says_capturing as Function),
            ]);
            let stream = test.stream();
            test.captures(stream);
            test.orders(CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
            let status = test.status(Op::CaptureEnd, &Object { object: stream }, &[]);
            assert_eq!(status, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
            assert_eq!(captures(&test), usize::from(goes_on));
            assert_eq!(is_capturing(&test.session, stream), goes_on);
        }
    }

    #[test]
    fn a_graph_whose_nodes_are_not_known_after_a_failed_capture_is_forgotten() {
        for (name, stays) in [("none", true), ("cuGraphGetNodes", false)] {
            let mut test = Fixture::new(&[
                ("cuStreamEndCapture", obeys as Function),
                (name, obeys as Function),
            ]);
            let (stream, graph) = (test.stream(), test.graph());
            let node = test.node(graph);
            let body = begin(stream, graph);
            assert_eq!(test.status(Op::CaptureBegin, &body, &[]), CUDA_SUCCESS);
            test.orders(FAULT);
            let status = test.told(Op::CaptureEnd, &Object { object: stream }, &[]);
            assert_eq!(status, FAULT);
            let graphs = &test.session.objects.graphs;
            let found = graphs.graphs.get(graph);
            assert_eq!(found.is_ok(), stays, "{name}");
            assert!(found.is_ok_and(|graph| !graph.filling) == stays, "{name}");
            assert!(
                graphs.nodes.get(node).is_err(),
                "the driver has no such node"
            );
            assert!(test.has_ended());
        }
    }

    #[test]
    fn a_graph_of_a_destroyed_streams_capture_is_destroyed() {
        let mut test = Fixture::new(&[("cuGraphDestroy", counts as Function)]);
        let stream = test.stream();
        test.captures(stream);
        let body = Object { object: stream };
        assert_eq!(test.status(Op::StreamDestroy, &body, &[]), CUDA_SUCCESS);
        assert_eq!((test.calls(), captures(&test)), (1, 0));
        assert!(test.session.objects.graphs.graphs.is_empty());
        assert!(test.has_no_graph_parts());
    }

    /// Says that a capture fills graph 0x77, unless ordered otherwise.
    extern "C" fn info(_: u64, status: &mut u32, _: &mut u64, graph: &mut CUgraph) -> CUresult {
        (*status, *graph) = (CU_STREAM_CAPTURE_STATUS_ACTIVE, CUgraph(0x77));
        obeys()
    }

    #[test]
    fn the_state_of_a_capture_is_what_the_driver_says() {
        let (three, two) = ("cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo_v2");
        let mut test = Fixture::new(&[(three, obeys as Function), (two, info as Function)]);
        let stream = test.stream();
        test.captures(stream);
        for object in others(stream) {
            let status = test.status(Op::CaptureState, &Object { object }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{object:#x}");
        }
        let body = Object { object: stream };
        for status in [CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_UNKNOWN, FAULT] {
            test.orders(status);
            assert_eq!(test.told(Op::CaptureState, &body, &[]), status);
        }
        assert!(test.has_ended());
        assert!(test.session.objects.graphs.graphs.is_empty());
        drop(test);
        let mut test = Fixture::new(&[(three, info as Function), (two, info as Function)]);
        let body = Object {
            object: test.stream(),
        };
        test.captures(body.object);
        let state: CaptureState = test.reply(Op::CaptureState, &body, &[]).expect("it");
        assert_eq!((state.nodes, state.edges), (0, 0));
        let graph = test.session.objects.graphs.graphs.get(state.graph);
        let graph = graph.expect("a graph");
        assert!(graph.filling && graph.owner == Owner::Capture);
    }

    #[test]
    fn a_host_function_is_captured_in_a_capture_only() {
        let mut test = Fixture::new(&[("cuStreamBatchMemOp_v2", obeys as Function)]);
        let stream = test.stream();
        let host = |stream| CaptureHost {
            stream,
            token: 5,
            pad: 0,
        };
        let status = test.status(Op::CaptureHost, &host(stream), &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
        for stream in others(stream) {
            let status = test.status(Op::CaptureHost, &host(stream), &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{stream:#x}");
        }
        test.captures(stream);
        for (status, hosts) in [(CUDA_ERROR_NOT_SUPPORTED, false), (CUDA_SUCCESS, true)] {
            test.orders(status);
            assert_eq!(test.told(Op::CaptureHost, &host(stream), &[]), status);
            assert_eq!(test.session.objects.graphs.hosts, hosts);
        }
        test.orders(FAULT);
        assert_eq!(test.told(Op::CaptureHost, &host(stream), &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn the_next_node_depends_on_nodes_of_the_session() {
        let name = "cuStreamUpdateCaptureDependencies_v2";
        let mut test = Fixture::new(&[(name, obeys as Function)]);
        let (stream, graph) = (test.stream(), test.graph());
        let node = test.node(graph);
        let update = |stream| CaptureUpdate {
            stream,
            nodes: 1,
            ..CaptureUpdate::default()
        };
        for node in others(node) {
            let status = test.status(Op::CaptureUpdate, &update(stream), &node.to_le_bytes());
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{node:#x}");
        }
        for stream in others(stream) {
            let status = test.status(Op::CaptureUpdate, &update(stream), &node.to_le_bytes());
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{stream:#x}");
        }
        for status in [CUDA_ERROR_ILLEGAL_STATE, CUDA_SUCCESS, FAULT] {
            test.orders(status);
            let told = test.told(Op::CaptureUpdate, &update(stream), &node.to_le_bytes());
            assert_eq!(told, status);
        }
        assert!(test.has_ended());
    }

    #[test]
    fn only_a_capture_is_broken() {
        let mut test = Fixture::new(&[("cuStreamQuery", records as Function)]);
        let (stream, capturing) = (test.stream(), test.stream());
        test.captures(capturing);
        test.recorded();
        for object in others(stream) {
            let status = test.status(Op::CaptureBreak, &Object { object }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{object:#x}");
        }
        let body = Object { object: stream };
        assert_eq!(test.status(Op::CaptureBreak, &body, &[]), CUDA_SUCCESS);
        assert_eq!(test.recorded().len(), 0);
        let body = Object { object: capturing };
        assert_eq!(test.status(Op::CaptureBreak, &body, &[]), CUDA_SUCCESS);
        let raw = test.session.objects.streams.get(capturing);
        assert_eq!(test.recorded()[0][0], raw.expect("a stream").raw.0);
    }
}
