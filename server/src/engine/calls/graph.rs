//! Graphs: creation, contents, instances, launches.
//!
//! Node parameters arrive in the client's form. Handles are translated to the driver's, and addresses are checked like
//! those of the calls that the nodes stand for. Nodes are always added and changed with the generic functions for any
//! kind.

mod described;
pub(super) mod exec;
pub mod loops;
pub(super) mod node;
pub mod saved;
pub(super) mod shown;

use super::reply::{Reply, number};
use crate::engine::base::bounds;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::graph_templates::{Condition, Size};
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::capture::{all_nodes, take};
use crate::engine::calls::graph::shown::host_token;
use crate::engine::objects::graphs::Owner;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::graph::{
    GraphAttribute, GraphCondition, GraphCreate, GraphDependencies, GraphDot, GraphList,
    GraphListed, GraphMemory, GraphPair, LIST_MOST, NODES_MOST, graph_memory, list,
};
use mpsshim_proto::message::{Object, Value};
use mpsshim_proto::shm;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use zerocopy::{FromBytes, IntoBytes};

/// `cuGraphCreate`.
pub fn graph_create(session: &mut Session, shared: &Shared, body: GraphCreate) -> Reply {
    let device = shared.gpu.device(body.device)?;
    device.make_current(&shared.gpu.driver)?;
    let mut raw = CUgraph::NULL;
    shared.gpu.driver.graph.create(&mut raw, body.flags)?;
    new_graph(session, shared, raw, device.ordinal)
}

fn new_graph(session: &mut Session, shared: &Shared, raw: CUgraph, device: Ordinal) -> Reply {
    match session
        .objects
        .graphs
        .graph_handle(raw, device, Owner::Client)
    {
        Ok(handle) => Ok(number(handle)),
        Err(status) => {
            let _ = shared.gpu.driver.graph.destroy(raw);
            Err(status.into())
        }
    }
}

/// Size of a driver's graph to be placed inside another one.
pub fn measure(shared: &Shared, graph: CUgraph, depth: usize) -> Result<Size, CUresult> {
    let driver = &shared.gpu.driver.graph;
    let (none, mut edges) = (ptr::null_mut(), 0);
    driver.edges(graph, none, none, ptr::null_mut(), &mut edges)?;
    let nodes = all_nodes(shared, graph)?;
    let mut size = Size {
        parts: (nodes.len() + edges) as u64,
        height: 1,
    };
    for node in nodes {
        let mut kind = 0;
        driver.node_kind(node, &mut kind)?;
        if kind == CU_GRAPH_NODE_TYPE_GRAPH && depth > 0 {
            let mut inner = CUgraph::NULL;
            driver.child_get(node, &mut inner)?;
            let inner = measure(shared, inner, depth - 1)?;
            size.parts = size.parts.saturating_add(inner.parts);
            size.height = size.height.max(1 + inner.height);
        }
    }
    Ok(size)
}

/// The driver's graph behind a handle, and its device; its context is made current.
fn graph_ready(
    session: &Session,
    shared: &Shared,
    handle: u64,
) -> Result<(CUgraph, Ordinal), CUresult> {
    let graph = session.objects.graphs.graphs.get(handle)?;
    shared.gpu.devices[graph.device].make_current(&shared.gpu.driver)?;
    Ok((graph.raw, graph.device))
}

/// The driver's node behind a handle, and the handle of its graph; its context is made current.
fn node_ready(
    session: &Session,
    shared: &Shared,
    handle: u64,
) -> Result<(CUgraphNode, u64), CUresult> {
    let node = session.objects.graphs.nodes.get(handle)?;
    graph_ready(session, shared, node.graph)?;
    Ok((node.raw, node.graph))
}

/// `cuGraphDestroy`.
pub fn graph_destroy(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let (raw, _) = graph_ready(session, shared, body.object)?;
    let graph = session.objects.graphs.graphs.get(body.object)?;
    if graph.filling {
        // The driver's status, too, while a capture fills the graph.
        return Err(CUDA_ERROR_ILLEGAL_STATE.into());
    }
    if graph.owner != Owner::Client || session.objects.graphs.is_filled(body.object) {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    shared.gpu.driver.graph.destroy(raw)?;
    session.objects.graphs.forget_graph(body.object);
    session.objects.graphs.note_destroyed();
    drop_kept(session, shared);
    Ok(Vec::new())
}

/// Releases the images and events that were kept for graphs, once no graph can refer to them.
fn drop_kept(session: &mut Session, shared: &Shared) {
    let (images, events) = session.objects.graphs.take_kept();
    for image in images {
        shared.images.discard(image);
    }
    for event in events {
        let _ = shared.gpu.driver.event_destroy(event.raw);
    }
}

/// `cuGraphClone`.
pub fn graph_clone(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let (raw, device) = graph_ready(session, shared, body.object)?;
    let size = session.objects.graphs.graphs.get(body.object)?.size;
    session.objects.graphs.hold(size.parts)?;
    let mut clone = CUgraph::NULL;
    let made = shared
        .gpu
        .driver
        .graph
        .duplicate(&mut clone, raw)
        .map_err(CallError::from)
        .and_then(|()| new_graph(session, shared, clone, device))
        .inspect_err(|_| session.objects.graphs.let_go(size.parts))?;
    if let Ok(handle) = Value::read_from_bytes(&made[..]) {
        session.objects.graphs.graphs.get_mut(handle.value)?.size = size;
        session
            .objects
            .graphs
            .memory
            .share(body.object, handle.value);
    }
    Ok(made)
}

/// `cuGraphNodeFindInClone`.
pub fn graph_find_in_clone(session: &mut Session, shared: &Shared, body: GraphPair) -> Reply {
    let (node, _) = node_ready(session, shared, body.first)?;
    let (clone, _) = graph_ready(session, shared, body.second)?;
    let mut found = CUgraphNode::NULL;
    shared
        .gpu
        .driver
        .graph
        .find_in_clone(&mut found, node, clone)?;
    Ok(number(
        session.objects.graphs.node_handle(found, body.second)?,
    ))
}

/// `cuGraphGetNodes`, `cuGraphGetRootNodes`, `cuGraphGetEdges`, `cuGraphNodeGetDependencies`,
/// `cuGraphNodeGetDependentNodes`: returns a part of the list.
pub fn graph_list(session: &mut Session, shared: &Shared, body: GraphList) -> Reply {
    let driver = &shared.gpu.driver.graph;
    let none: *mut CUgraphNode = ptr::null_mut();
    let (graph, node) = match body.what {
        list::DEPENDENCIES | list::DEPENDENTS => {
            let (node, graph) = node_ready(session, shared, body.object)?;
            (graph, node)
        }
        _ => (body.object, CUgraphNode::NULL),
    };
    let (raw, _) = graph_ready(session, shared, graph)?;
    let (mut from, mut to, mut edges) = (Vec::new(), Vec::new(), Vec::new());
    let ask = |from: &mut Vec<CUgraphNode>,
               to: &mut Vec<CUgraphNode>,
               edges: &mut Vec<CUgraphEdgeData>,
               count: &mut usize| {
        let room = *count;
        from.resize(room, CUgraphNode::NULL);
        let first = if room == 0 { none } else { from.as_mut_ptr() };
        let paired = |edges: &mut Vec<CUgraphEdgeData>| {
            edges.resize(room, CUgraphEdgeData::default());
            if room == 0 {
                ptr::null_mut()
            } else {
                edges.as_mut_ptr()
            }
        };
        match body.what {
            list::NODES => driver.nodes(raw, first, count),
            list::ROOTS => driver.roots(raw, first, count),
            list::EDGES => {
                to.resize(room, CUgraphNode::NULL);
                let second = if room == 0 { none } else { to.as_mut_ptr() };
                driver.edges(raw, first, second, paired(edges), count)
            }
            list::DEPENDENCIES => driver.dependencies(node, first, paired(edges), count),
            list::DEPENDENTS => driver.dependents(node, first, paired(edges), count),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    };
    let mut total = 0;
    ask(&mut from, &mut to, &mut edges, &mut total)?;
    let first = (body.first as usize).min(total);
    let part = (total - first).min(body.most.min(LIST_MOST) as usize);
    if part > 0 {
        let mut count = total;
        ask(&mut from, &mut to, &mut edges, &mut count)?;
    }
    let listed = GraphListed {
        total: total as u32,
        part: part as u32,
    };
    let mut payload = listed.as_bytes().to_vec();
    for nodes in [&from, &to] {
        for node in nodes.iter().skip(first).take(part) {
            let handle = session.objects.graphs.node_handle(*node, graph)?;
            payload.extend_from_slice(handle.as_bytes());
        }
    }
    let edges = edges.get(first..first + part).unwrap_or_default();
    payload.extend_from_slice(edges.as_bytes());
    Ok(payload)
}

/// `cuGraphAddDependencies`, `cuGraphRemoveDependencies`.
pub fn graph_dependencies(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, GraphDependencies>,
) -> Reply {
    let Call { body, message } = call;
    let count = body.count as usize;
    if count > NODES_MOST {
        return Err(CallError::Violation(format!("{count} dependencies")));
    }
    let bytes = message.behind::<GraphDependencies>()?;
    let mut bytes = &bytes[..];
    let from = session
        .objects
        .graphs
        .raw_nodes(&take::<u64>(&mut bytes, count)?)?;
    let to = session
        .objects
        .graphs
        .raw_nodes(&take::<u64>(&mut bytes, count)?)?;
    let given = if bytes.is_empty() { 0 } else { count };
    let edges: Vec<CUgraphEdgeData> = take(&mut bytes, given)?;
    let edges = if edges.is_empty() {
        ptr::null()
    } else {
        edges.as_ptr()
    };
    let (graph, _) = graph_ready(session, shared, body.graph)?;
    let driver = &shared.gpu.driver.graph;
    let parts = count as u64;
    if body.remove == 0 {
        session
            .objects
            .graphs
            .grow(body.graph, Size { parts, height: 0 })?;
        driver
            .add_dependencies(graph, from.as_ptr(), to.as_ptr(), edges, count)
            .inspect_err(|_| session.objects.graphs.shrink(body.graph, parts))?;
    } else {
        driver.remove_dependencies(graph, from.as_ptr(), to.as_ptr(), edges, count)?;
        session.objects.graphs.shrink(body.graph, parts);
    }
    Ok(Vec::new())
}

/// `cuGraphNodeGetType`.
pub fn graph_node_kind(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let (node, _) = node_ready(session, shared, body.object)?;
    let mut kind = 0;
    shared.gpu.driver.graph.node_kind(node, &mut kind)?;
    if kind == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP && host_token(session, shared, node).is_some() {
        kind = CU_GRAPH_NODE_TYPE_HOST;
    }
    Ok(number(kind as u64))
}

/// `cuGraphDestroyNode`.
pub fn graph_node_destroy(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let (node, graph) = node_ready(session, shared, body.object)?;
    let filling = session.objects.graphs.graphs.get(graph)?.filling;
    if filling || session.objects.graphs.is_filled_inside(body.object) {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    shared.gpu.driver.graph.node_destroy(node)?;
    let parts = session.objects.graphs.nodes.get(body.object)?.parts;
    session.objects.graphs.forget_node(body.object);
    session.objects.graphs.shrink(graph, parts);
    Ok(Vec::new())
}

/// `cuGraphKernelNodeGetAttribute`, `cuGraphKernelNodeSetAttribute`.
pub fn graph_attribute(session: &mut Session, shared: &Shared, mut body: GraphAttribute) -> Reply {
    let (node, graph) = node_ready(session, shared, body.node)?;
    let driver = &shared.gpu.driver.graph;
    match body.id {
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT
        | CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT
        | CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE => {
            return Err(CUDA_ERROR_NOT_SUPPORTED.into());
        }
        _ => {}
    }
    if body.set == 0 {
        body.value = [0; 8];
        driver.kernel_attribute_get(node, body.id, &mut body.value)?;
    } else {
        driver.kernel_attribute_set(node, body.id, &body.value)?;
        session.objects.graphs.touch(graph);
    }
    Ok(body.as_bytes().to_vec())
}

/// `cuGraphKernelNodeCopyAttributes`.
pub fn graph_copy_attributes(session: &mut Session, shared: &Shared, body: GraphPair) -> Reply {
    let (to, graph) = node_ready(session, shared, body.first)?;
    let (from, _) = node_ready(session, shared, body.second)?;
    shared.gpu.driver.graph.kernel_attributes_copy(to, from)?;
    session.objects.graphs.touch(graph);
    Ok(Vec::new())
}

/// `cuGraphDebugDotPrint`: the driver writes into a memory file, which is sent to the client.
pub fn graph_dot(session: &mut Session, shared: &Shared, call: Call<'_, GraphDot>) -> Reply {
    let Call { body, message } = call;
    let (graph, _) = graph_ready(session, shared, body.graph)?;
    // SAFETY: a NUL-ended name; the result is checked.
    let fd = unsafe { libc::memfd_create(c"mpsshim-dot".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(CUDA_ERROR_OPERATING_SYSTEM.into());
    }
    // SAFETY: the descriptor is new and ours.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = CString::new(path).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    shared
        .gpu
        .driver
        .graph
        .dot(graph, path.as_ptr(), body.flags)?;
    // SAFETY: a plain system call on our own descriptor.
    let len = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) };
    let len = u64::try_from(len).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    if len > bounds::GRAPH_TEXT as u64 {
        return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
    }
    let note = DescriptorNote {
        token: message.token,
        len,
    };
    shm::send_packet(session.shared.socket(), note.as_bytes(), &[file.as_fd()])
        .map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    Ok(number(len))
}

/// `cuDeviceGraphMemTrim`, `cuDeviceGetGraphMemAttribute`, `cuDeviceSetGraphMemAttribute`. The numbers are the
/// device's, for all clients together.
pub fn graph_memory(_: &mut Session, shared: &Shared, body: GraphMemory) -> Reply {
    let device = shared.gpu.device(body.device)?;
    device.make_current(&shared.gpu.driver)?;
    let driver = &shared.gpu.driver.graph;
    let mut value = body.value;
    match body.what {
        graph_memory::GET => driver.memory_get(device.raw, body.attribute, &mut value)?,
        graph_memory::SET => driver.memory_set(device.raw, body.attribute, &mut value)?,
        graph_memory::TRIM => driver.memory_trim(device.raw)?,
        _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
    }
    Ok(number(value))
}

/// `cuGraphConditionalHandleCreate`. The client gets the driver's handle, because its kernels use it.
pub fn graph_condition(session: &mut Session, shared: &Shared, body: GraphCondition) -> Reply {
    let (graph, _) = graph_ready(session, shared, body.graph)?;
    let device = shared.gpu.device(body.device)?;
    let context = device.context().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    if !session.objects.graphs.may_have_condition() {
        return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
    }
    let mut handle = 0;
    shared.gpu.driver.graph.condition_create(
        &mut handle,
        graph,
        context,
        body.default,
        body.flags,
    )?;
    let condition = Condition {
        handle,
        device: device.ordinal.into(),
        default: body.default,
        flags: body.flags,
    };
    session.objects.graphs.note_condition(body.graph, condition);
    Ok(number(handle))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys, obeys_with_handle, others,
    };
    use mpsshim_proto::message::Op;
    use mpsshim_proto::message::graph::CaptureBegin;

    fn pair(first: u64, second: u64) -> GraphPair {
        GraphPair { first, second }
    }

    fn parts(test: &Fixture, graph: u64) -> u64 {
        let graph = test.session.objects.graphs.graphs.get(graph);
        graph.expect("a graph").size.parts
    }

    fn list_of(object: u64, what: u32) -> GraphList {
        GraphList {
            object,
            what,
            most: 8,
            ..GraphList::default()
        }
    }

    /// Each request that names a graph.
    fn of_graph(test: &mut Fixture, graph: u64, node: u64) -> Vec<CUresult> {
        let object = Object { object: graph };
        let dependencies = GraphDependencies {
            graph,
            ..GraphDependencies::default()
        };
        let dot = GraphDot {
            graph,
            ..GraphDot::default()
        };
        let condition = GraphCondition {
            graph,
            ..GraphCondition::default()
        };
        vec![
            test.status(Op::GraphDestroy, &object, &[]),
            test.status(Op::GraphClone, &object, &[]),
            test.status(Op::GraphFindInClone, &pair(node, graph), &[]),
            test.status(Op::GraphList, &list_of(graph, list::NODES), &[]),
            test.status(Op::GraphDependencies, &dependencies, &[]),
            test.status(Op::GraphDot, &dot, &[]),
            test.status(Op::GraphCondition, &condition, &[]),
        ]
    }

    /// Each request that names a node.
    fn of_node(test: &mut Fixture, node: u64, other: u64) -> Vec<CUresult> {
        let object = Object { object: node };
        let attribute = GraphAttribute {
            node,
            ..GraphAttribute::default()
        };
        let graph = test.session.objects.graphs.nodes.get(other);
        let graph = graph.expect("a node").graph;
        vec![
            test.status(Op::GraphFindInClone, &pair(node, graph), &[]),
            test.status(Op::GraphList, &list_of(node, list::DEPENDENCIES), &[]),
            test.status(Op::GraphList, &list_of(node, list::DEPENDENTS), &[]),
            test.status(Op::GraphNodeGet, &object, &[]),
            test.status(Op::GraphNodeKind, &object, &[]),
            test.status(Op::GraphNodeDestroy, &object, &[]),
            test.status(Op::GraphAttribute, &attribute, &[]),
            test.status(Op::GraphCopyAttributes, &pair(node, other), &[]),
            test.status(Op::GraphCopyAttributes, &pair(other, node), &[]),
        ]
    }

    #[test]
    fn requests_are_of_graphs_and_nodes_of_the_session() {
        let names = [
            "cuGraphDestroy",
            "cuGraphClone",
            "cuGraphNodeFindInClone",
            "cuGraphGetNodes",
            "cuGraphAddDependencies_v2",
            "cuGraphDebugDotPrint",
            "cuGraphConditionalHandleCreate",
            "cuGraphNodeGetDependencies_v2",
            "cuGraphNodeGetDependentNodes_v2",
            "cuGraphNodeGetType",
            "cuGraphDestroyNode",
            "cuGraphKernelNodeGetAttribute",
            "cuGraphKernelNodeCopyAttributes",
        ];
        let mut test = Fixture::new(&names.map(|name| (name, counts as Function)));
        let graph = test.graph();
        let node = test.node(graph);
        for wrong in others(graph) {
            let all = of_graph(&mut test, wrong, node);
            assert_eq!(all, [CUDA_ERROR_INVALID_VALUE; 7], "{wrong:#x}");
        }
        for wrong in others(node) {
            let all = of_node(&mut test, wrong, node);
            assert_eq!(all, [CUDA_ERROR_INVALID_VALUE; 9], "{wrong:#x}");
        }
        assert_eq!((test.calls(), parts(&test, graph)), (0, 1));
    }

    #[test]
    fn a_graph_that_is_not_created_is_none() {
        let mut test = Fixture::new(&[("cuGraphCreate", obeys_with_handle as Function)]);
        let body = GraphCreate::default();
        let elsewhere = GraphCreate { device: 1, ..body };
        for (body, ordered, status, none) in [
            (elsewhere, CUDA_SUCCESS, CUDA_ERROR_INVALID_DEVICE, true),
            (
                body,
                CUDA_ERROR_NOT_SUPPORTED,
                CUDA_ERROR_NOT_SUPPORTED,
                true,
            ),
            (body, CUDA_SUCCESS, CUDA_SUCCESS, false),
            (body, FAULT, FAULT, false),
        ] {
            test.orders(ordered);
            assert_eq!(test.told(Op::GraphCreate, &body, &[]), status);
            assert_eq!(test.session.objects.graphs.graphs.is_empty(), none);
        }
        assert!(test.has_ended());
    }

    #[test]
    fn a_graph_that_a_capture_fills_is_not_destroyed() {
        let mut test = Fixture::new(&[
            ("cuGraphDestroy", counts as Function),
            ("cuGraphDestroyNode", counts as Function),
        ]);
        let graph = test.graph();
        let node = test.node(graph);
        let capture = CaptureBegin {
            stream: test.stream(),
            graph,
            ..CaptureBegin::default()
        };
        assert_eq!(test.status(Op::CaptureBegin, &capture, &[]), CUDA_SUCCESS);
        let status = test.status(Op::GraphDestroy, &Object { object: graph }, &[]);
        assert_eq!(status, CUDA_ERROR_ILLEGAL_STATE);
        let status = test.status(Op::GraphNodeDestroy, &Object { object: node }, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
        assert_eq!((test.calls(), parts(&test, graph)), (0, 1));
    }

    #[test]
    fn a_graph_is_destroyed_with_its_nodes_once_the_driver_has_destroyed_it() {
        let mut test = Fixture::new(&[("cuGraphDestroy", obeys as Function)]);
        let graph = test.graph();
        let node = test.node(graph);
        let body = Object { object: graph };
        for (status, gone) in [(CUDA_ERROR_NOT_SUPPORTED, false), (CUDA_SUCCESS, true)] {
            test.orders(status);
            assert_eq!(test.status(Op::GraphDestroy, &body, &[]), status);
            let nodes = &test.session.objects.graphs.nodes;
            assert_eq!(nodes.get(node).is_err(), gone, "{status}");
            assert_eq!(test.has_no_graph_parts(), gone, "{status}");
        }
    }

    #[test]
    fn a_clone_counts_as_much_as_its_graph_and_none_as_nothing() {
        let mut test = Fixture::new(&[("cuGraphClone", obeys_with_handle as Function)]);
        let graph = test.graph();
        let node = test.node(graph);
        let body = Object { object: graph };
        for status in [CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY] {
            test.orders(status);
            assert_eq!(test.status(Op::GraphClone, &body, &[]), status);
        }
        let node = Object { object: node };
        test.orders(CUDA_SUCCESS);
        let clone: u64 = test.reply(Op::GraphClone, &body, &[]).expect("a clone");
        assert_eq!(parts(&test, clone), 1);
        assert_eq!(test.status(Op::GraphNodeDestroy, &node, &[]), CUDA_SUCCESS);
        assert!(!test.has_no_graph_parts(), "the clone's");
        let object = Object { object: clone };
        assert_eq!(test.status(Op::GraphDestroy, &object, &[]), CUDA_SUCCESS);
        assert!(test.has_no_graph_parts());
    }

    #[test]
    fn dependencies_are_between_nodes_of_the_session_and_fit_the_message() {
        let mut test = Fixture::new(&[
            ("cuGraphAddDependencies_v2", counts as Function),
            ("cuGraphRemoveDependencies_v2", counts as Function),
        ]);
        let graph = test.graph();
        let node = test.node(graph);
        for remove in [0, 1] {
            let body = |count| GraphDependencies {
                graph,
                count,
                remove,
            };
            for count in [3, NODES_MOST as u32 + 1, u32::MAX] {
                let rest = vec![0; 16];
                assert!(test.is_violation(Op::GraphDependencies, &body(count), &rest));
            }
            let one = node.to_le_bytes();
            assert!(test.is_violation(Op::GraphDependencies, &body(1), &one));
            // Edges that are cut off.
            let both = [node.to_le_bytes(), node.to_le_bytes()].concat();
            let more = [&both[..], &[0]].concat();
            assert!(test.is_violation(Op::GraphDependencies, &body(1), &more));
            for wrong in others(node) {
                for (from, to) in [(node, wrong), (wrong, node)] {
                    let rest = [from.to_le_bytes(), to.to_le_bytes()].concat();
                    let status = test.status(Op::GraphDependencies, &body(1), &rest);
                    assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{wrong:#x}");
                }
            }
        }
        assert_eq!((test.calls(), parts(&test, graph)), (0, 1));
    }

    #[test]
    fn dependencies_count_once_the_driver_has_them() {
        for (remove, name, before, after) in [
            (0, "cuGraphAddDependencies_v2", 2, 3),
            (1, "cuGraphRemoveDependencies_v2", 2, 1),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let graph = test.graph();
            let nodes = [test.node(graph), test.node(graph)];
            let rest = nodes.map(u64::to_le_bytes).concat();
            let body = GraphDependencies {
                graph,
                count: 1,
                remove,
            };
            for (status, now) in [(CUDA_ERROR_INVALID_VALUE, before), (CUDA_SUCCESS, after)] {
                test.orders(status);
                assert_eq!(test.told(Op::GraphDependencies, &body, &rest), status);
                assert_eq!(parts(&test, graph), now, "{name} {status}");
            }
            test.orders(FAULT);
            assert_eq!(test.told(Op::GraphDependencies, &body, &rest), FAULT);
            assert!(test.has_ended(), "{name}");
        }
    }

    #[test]
    fn each_question_about_a_graph_returns_the_error_of_the_driver() {
        for (what, name) in [
            (list::NODES, "cuGraphGetNodes"),
            (list::ROOTS, "cuGraphGetRootNodes"),
            (list::EDGES, "cuGraphGetEdges_v2"),
            (list::DEPENDENCIES, "cuGraphNodeGetDependencies_v2"),
            (list::DEPENDENTS, "cuGraphNodeGetDependentNodes_v2"),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let graph = test.graph();
            let object = match what {
                list::DEPENDENCIES | list::DEPENDENTS => test.node(graph),
                _ => graph,
            };
            let body = list_of(object, what);
            for status in [CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, FAULT] {
                test.orders(status);
                assert_eq!(test.told(Op::GraphList, &body, &[]), status, "{name}");
            }
            assert!(test.has_ended(), "{name}");
        }
        let mut test = Fixture::new(&[]);
        let body = list_of(test.graph(), list::DEPENDENTS + 1);
        let status = test.status(Op::GraphList, &body, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
    }

    /// Three nodes.
    extern "C" fn nodes(_: u64, nodes: *mut u64, count: &mut usize) -> CUresult {
        for at in 0..(*count).min(3) {
            // SAFETY: as many as the caller has room for.
            unsafe { nodes.add(at).write(0x500 + at as u64) };
        }
        *count = 3;
        CUDA_SUCCESS
    }

    #[test]
    fn a_list_is_told_in_parts() {
        let mut test = Fixture::new(&[("cuGraphGetNodes", nodes as Function)]);
        let graph = test.graph();
        for (first, most, part) in [(0, 2, 2), (2, 2, 1), (3, 2, 0), (u32::MAX, u32::MAX, 0)] {
            let body = GraphList {
                first,
                most,
                ..list_of(graph, list::NODES)
            };
            let listed: GraphListed = test.reply(Op::GraphList, &body, &[]).expect("it");
            assert_eq!((listed.total, listed.part), (3, part), "{first}");
            let behind = test.answer().len() - size_of::<GraphListed>();
            assert_eq!(behind, 8 * part as usize, "{first}");
        }
    }

    #[test]
    fn each_call_on_a_node_returns_the_error_of_the_driver() {
        let names = [
            "cuGraphNodeFindInClone",
            "cuGraphNodeGetType",
            "cuGraphKernelNodeGetAttribute",
            "cuGraphKernelNodeSetAttribute",
            "cuGraphKernelNodeCopyAttributes",
        ];
        for name in names {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let graph = test.graph();
            let node = test.node(graph);
            let set = u32::from(name == "cuGraphKernelNodeSetAttribute");
            let attribute = GraphAttribute {
                node,
                id: CU_LAUNCH_ATTRIBUTE_PRIORITY,
                set,
                value: [0; 8],
            };
            for status in [CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, FAULT] {
                test.orders(status);
                let told = match name {
                    "cuGraphNodeFindInClone" => {
                        test.told(Op::GraphFindInClone, &pair(node, graph), &[])
                    }
                    "cuGraphNodeGetType" => {
                        test.told(Op::GraphNodeKind, &Object { object: node }, &[])
                    }
                    "cuGraphKernelNodeCopyAttributes" => {
                        test.told(Op::GraphCopyAttributes, &pair(node, node), &[])
                    }
                    _ => test.told(Op::GraphAttribute, &attribute, &[]),
                };
                assert_eq!(told, status, "{name}");
            }
            assert!(test.has_ended(), "{name}");
        }
    }

    #[test]
    fn attributes_that_name_other_objects_are_not_supported() {
        let mut test = Fixture::new(&[
            ("cuGraphKernelNodeGetAttribute", counts as Function),
            ("cuGraphKernelNodeSetAttribute", counts as Function),
        ]);
        let graph = test.graph();
        let node = test.node(graph);
        for id in [
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT,
            CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT,
            CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE,
        ] {
            for set in [0, 1] {
                let value = [0; 8];
                let body = GraphAttribute {
                    node,
                    id,
                    set,
                    value,
                };
                let status = test.status(Op::GraphAttribute, &body, &[]);
                assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED, "{id} {set}");
            }
        }
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn a_node_that_the_driver_does_not_destroy_stays() {
        let mut test = Fixture::new(&[("cuGraphDestroyNode", obeys as Function)]);
        let graph = test.graph();
        let body = Object {
            object: test.node(graph),
        };
        for (ordered, status, now) in [
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED, 1),
            (CUDA_SUCCESS, CUDA_SUCCESS, 0),
            (CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, 0),
        ] {
            test.orders(ordered);
            assert_eq!(test.status(Op::GraphNodeDestroy, &body, &[]), status);
            assert_eq!(parts(&test, graph), now, "{status}");
        }
    }

    #[test]
    fn a_description_goes_to_a_client_that_takes_it() {
        let mut test = Fixture::new(&[("cuGraphDebugDotPrint", obeys as Function)]);
        let body = GraphDot {
            graph: test.graph(),
            ..GraphDot::default()
        };
        for status in [CUDA_ERROR_OPERATING_SYSTEM, CUDA_SUCCESS] {
            test.orders(status);
            assert_eq!(test.status(Op::GraphDot, &body, &[]), status);
        }
        test.hangs_up();
        let status = test.status(Op::GraphDot, &body, &[]);
        assert_eq!(status, CUDA_ERROR_OPERATING_SYSTEM);
    }

    #[test]
    fn memory_of_graphs_is_of_a_device() {
        for (what, name) in [
            (graph_memory::GET, "cuDeviceGetGraphMemAttribute"),
            (graph_memory::SET, "cuDeviceSetGraphMemAttribute"),
            (graph_memory::TRIM, "cuDeviceGraphMemTrim"),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let good = GraphMemory {
                what,
                ..GraphMemory::default()
            };
            let elsewhere = GraphMemory { device: 1, ..good };
            let status = test.status(Op::GraphMemory, &elsewhere, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_DEVICE, "{name}");
            for status in [CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS, FAULT] {
                test.orders(status);
                assert_eq!(test.told(Op::GraphMemory, &good, &[]), status, "{name}");
            }
            assert!(test.has_ended(), "{name}");
        }
        let mut test = Fixture::new(&[]);
        let other = GraphMemory {
            what: graph_memory::TRIM + 1,
            ..GraphMemory::default()
        };
        let status = test.status(Op::GraphMemory, &other, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE);
    }

    #[test]
    fn a_condition_that_is_not_created_is_none() {
        let name = "cuGraphConditionalHandleCreate";
        let mut test = Fixture::new(&[(name, obeys_with_handle as Function)]);
        let good = GraphCondition {
            graph: test.graph(),
            ..GraphCondition::default()
        };
        let elsewhere = GraphCondition { device: 1, ..good };
        for (body, ordered, status, conditions) in [
            (elsewhere, CUDA_SUCCESS, CUDA_ERROR_INVALID_DEVICE, 0),
            (good, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED, 0),
            (good, CUDA_SUCCESS, CUDA_SUCCESS, 1),
            (good, FAULT, FAULT, 1),
        ] {
            test.orders(ordered);
            assert_eq!(test.told(Op::GraphCondition, &body, &[]), status);
            let graph = test.session.objects.graphs.graphs.get(good.graph);
            let known = graph.expect("a graph").conditions.len();
            assert_eq!(known, conditions, "{status}");
        }
        assert!(test.has_ended());
    }
}
