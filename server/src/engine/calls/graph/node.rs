//! Parameters of nodes: from the client's form to the driver's.

use crate::engine::base::bounds::GRAPH_DEPTH;
use crate::engine::base::call::{Call, Incoming};
use crate::engine::base::call_error::CallError;
use crate::engine::base::graph_templates::Size;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::capture::{nodes_behind, take};
use crate::engine::calls::copy::{Rows, memset_extent};
use crate::engine::calls::graph::described::{
    ACCESS_MOST, Described, OPERATIONS_MOST, into_words, layout, out_of_words,
};
use crate::engine::calls::graph::saved::note_exec_node;
use crate::engine::calls::graph::shown::{host_nodes, host_operations};
use crate::engine::calls::graph::{graph_ready, node_ready};
use crate::engine::calls::reply::Reply;
use crate::engine::calls::{function, reference};
use crate::engine::lasting::resources::part_of;
use crate::engine::objects::graphs::{Conditional, Owner};
use crate::engine::objects::times::session::note_recorded_by_graphs;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::PARAMS_MAX;
use mpsshim_proto::message::graph::{
    Access, BatchNode, GraphNode, GraphNodeAdded, HostNode, KernelNode, node_flags,
};
use zerocopy::{FromBytes, IntoBytes};

/// Maximum number of bodies of a conditional node.
const BODIES_MOST: u32 = 1024;

fn one<T: FromBytes>(bytes: &mut &[u8]) -> Result<T, CallError> {
    take(bytes, 1)?
        .pop()
        .ok_or_else(|| CallError::Violation("a node without its parameters".into()))
}
/// Whether a message makes the driver copy a graph into a node, which takes time in proportion to the graph's size.
pub fn puts_graph_into_graph(message: Incoming<'_>) -> bool {
    message.body::<GraphNode>().is_ok_and(|body| {
        matches!(
            body.kind,
            CU_GRAPH_NODE_TYPE_GRAPH | CU_GRAPH_NODE_TYPE_CONDITIONAL
        )
    })
}

/// `cuGraphAddNode`, `cuGraphNodeSetParams`, `cuGraphExecNodeSetParams`, and the corresponding functions for single
/// kinds of nodes.
pub fn graph_node(session: &mut Session, shared: &Shared, call: Call<'_, GraphNode>) -> Reply {
    let Call { body, message } = call;
    let edges = body.flags & node_flags::EDGES != 0;
    let behind = nodes_behind::<GraphNode>(message, body.nodes, edges)?;
    let change = body.flags & node_flags::CHANGE != 0;
    let device = shared.gpu.device(body.device)?;
    let context = device.context().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    let into = (!change).then_some(body.object);
    let mut described = describe_node(
        session,
        shared,
        (device.ordinal, context),
        (body.kind, into),
        &behind.rest,
    )?;
    let driver = &shared.gpu.driver.graph;
    session.objects.graphs.hosts |= body.kind == CU_GRAPH_NODE_TYPE_HOST;
    if change {
        let (node, _) = node_ready(session, shared, body.object)?;
        if body.kind == CU_GRAPH_NODE_TYPE_HOST && body.exec != 0 {
            let slots = &session.objects.graphs.execs.get(body.exec)?.slots;
            let found = slots.iter().find(|(of, _)| *of == node);
            let (_, slot) = found.ok_or(CUDA_ERROR_INVALID_VALUE)?;
            let host: HostNode = one(&mut &behind.rest[..])?;
            described.host(host_operations(session, *slot, host.token)?, context);
        }
        if body.kind == CU_GRAPH_NODE_TYPE_GRAPH && body.exec != 0 {
            let inner = CUgraph(described.params.words[0]);
            if !host_nodes(session, shared, inner, GRAPH_DEPTH)?.is_empty() {
                // Host nodes in the new child graph would have no slots.
                return Err(CUDA_ERROR_NOT_SUPPORTED.into());
            }
        }
        part_current(session, shared, body.kind, body.device)?;
        if body.exec == 0 {
            if session.objects.graphs.is_filled_inside(body.object) {
                return Err(CUDA_ERROR_INVALID_VALUE.into());
            }
            let grown = replace_size(session, body.object, described.inside)?;
            driver
                .node_set(node, &mut described.params)
                .inspect_err(|_| undo_size(session, body.object, grown))?;
            let changed = session.objects.graphs.nodes.get_mut(body.object)?;
            // The parameters of a changed conditional node are unknown, so the graph cannot be saved.
            changed.conditional = None;
            let graph = changed.graph;
            session.objects.graphs.touch(graph);
        } else {
            let exec = session.objects.graphs.execs.get(body.exec)?;
            driver.exec_node_set(exec.raw, node, &mut described.params)?;
            let what = (node, body.kind, body.device);
            note_exec_node(session, shared, body.exec, what, &behind.rest);
        }
        note_described(session, &described, body.exec);
        if body.kind == CU_GRAPH_NODE_TYPE_GRAPH && body.exec == 0 {
            session.objects.graphs.forget_inside(body.object);
        }
        return Ok(GraphNodeAdded::default().as_bytes().to_vec());
    }
    let nodes = session.objects.graphs.raw_nodes(&behind.nodes)?;
    let (graph, _) = graph_ready(session, shared, body.object)?;
    part_current(session, shared, body.kind, body.device)?;
    let size = Size {
        parts: (1 + nodes.len() as u64).saturating_add(described.inside.parts),
        height: described.inside.height,
    };
    session.objects.graphs.grow(body.object, size)?;
    let mut raw = CUgraphNode::NULL;
    driver
        .add_node(
            &mut raw,
            graph,
            nodes.as_ptr(),
            behind.edges(),
            nodes.len(),
            &mut described.params,
        )
        .inspect_err(|_| session.objects.graphs.shrink(body.object, size.parts))?;
    note_described(session, &described, 0);
    let mut added = GraphNodeAdded {
        node: session.objects.graphs.node_handle(raw, body.object)?,
        ..GraphNodeAdded::default()
    };
    session.objects.graphs.nodes.get_mut(added.node)?.parts = size.parts;
    let mut bodies = Vec::new();
    match body.kind {
        CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
            let given: CUDA_MEM_ALLOC_NODE_PARAMS = out_of_words(&described.params);
            added.address = given.address;
            let own = shared.gpu.device(body.device)?.ordinal;
            let found = shared
                .gpu
                .devices
                .iter()
                .find(|device| device.raw as u32 == given.location);
            let device = found.map_or(own, |device| device.ordinal);
            let block = (given.address, given.bytes);
            session.objects.graphs.given(block, body.object, device);
        }
        CU_GRAPH_NODE_TYPE_MEM_FREE => {
            session
                .objects
                .graphs
                .memory
                .freed_by(described.params.words[0], body.object);
        }
        CU_GRAPH_NODE_TYPE_CONDITIONAL => {
            bodies = bodies_of(&described);
            session
                .objects
                .graphs
                .nodes
                .get_mut(added.node)?
                .conditional = Some(Conditional {
                device: device.ordinal.into(),
                does: conditional_as_sent(&behind.rest)?,
            });
        }
        CU_GRAPH_NODE_TYPE_GRAPH => {
            let given: CUDA_CHILD_GRAPH_NODE_PARAMS = one(&mut &behind.rest[..])?;
            session
                .objects
                .graphs
                .memory
                .share(given.graph, body.object);
            if given.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE {
                session.objects.graphs.move_into(given.graph, added.node);
            }
        }
        _ => {}
    }
    added.graphs = bodies.len() as u32;
    let mut payload = added.as_bytes().to_vec();
    for graph in bodies {
        let owner = Owner::Node(added.node);
        let handle = session
            .objects
            .graphs
            .graph_handle(graph, device.ordinal, owner)?;
        payload.extend_from_slice(handle.as_bytes());
    }
    Ok(payload)
}

/// The bodies of a conditional node that the driver has just added.
pub fn bodies_of(described: &Described) -> Vec<CUgraph> {
    let given: CUDA_CONDITIONAL_NODE_PARAMS = out_of_words(&described.params);
    let count = if given.graphs == 0 { 0 } else { given.size };
    let body = |index| {
        // SAFETY: the driver's own array of as many graphs as were asked for, valid as long as the node.
        unsafe { *(given.graphs as *const CUgraph).add(index as usize) }
    };
    (0..count).map(body).collect()
}

/// The parameters of a conditional node as a client sends them, without addresses.
fn conditional_as_sent(bytes: &[u8]) -> Result<Vec<u8>, CallError> {
    let sent: CUDA_CONDITIONAL_NODE_PARAMS = one(&mut &bytes[..])?;
    let sent = CUDA_CONDITIONAL_NODE_PARAMS {
        graphs: 0,
        context: 0,
        ..sent
    };
    Ok(sent.as_bytes().to_vec())
}

/// Translates the parameters of a conditional node, if `is_known` holds for its handle.
pub fn describe_conditional(
    context: CUcontext,
    mut bytes: &[u8],
    is_known: impl FnOnce(u64) -> bool,
) -> Result<Described, CallError> {
    let mut body: CUDA_CONDITIONAL_NODE_PARAMS = one(&mut bytes)?;
    // The driver does not check the number of bodies.
    if body.size > BODIES_MOST || !is_known(body.handle) {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    body.context = context.0;
    body.graphs = 0;
    let mut described = Described::new(CU_GRAPH_NODE_TYPE_CONDITIONAL);
    described.inside = Size {
        parts: body.size.into(),
        height: 1,
    };
    into_words(&mut described.params, &body);
    Ok(described)
}

/// Counts a new graph inside a node in place of its present one. Returns the node's sizes before and after, to undo
/// the change with [`undo_size`].
fn replace_size(session: &mut Session, node: u64, inside: Size) -> Result<(u64, u64), CUresult> {
    let (graph, before) = {
        let node = session.objects.graphs.nodes.get(node)?;
        (node.graph, node.parts)
    };
    if inside == Size::default() {
        return Ok((before, before));
    }
    let after = inside.parts.saturating_add(1);
    let more = Size {
        parts: after.saturating_sub(before),
        height: inside.height,
    };
    session.objects.graphs.grow(graph, more)?;
    session.objects.graphs.nodes.get_mut(node)?.parts = after.max(before);
    Ok((before, after.max(before)))
}

fn undo_size(session: &mut Session, node: u64, (before, after): (u64, u64)) {
    if let Ok(node) = session.objects.graphs.nodes.get_mut(node) {
        node.parts = before;
        let graph = node.graph;
        session.objects.graphs.shrink(graph, after - before);
    }
}

/// Makes the context current in which a kernel node will run: a part of the device, if the session is limited to a
/// part.
pub fn part_current(
    session: &Session,
    shared: &Shared,
    kind: u32,
    device: u32,
) -> Result<(), CUresult> {
    if kind != CU_GRAPH_NODE_TYPE_KERNEL {
        return Ok(());
    }
    match part_of(session, shared, shared.gpu.device(device)?)? {
        Some(part) => shared.gpu.devices[part.device].make_part_current(&shared.gpu.driver, &part),
        None => Ok(()),
    }
}

pub fn note_described(session: &mut Session, described: &Described, exec: u64) {
    if described.prints {
        session.objects.graphs.prints = true;
        if let Ok(exec) = session.objects.graphs.execs.get_mut(exec) {
            exec.prints = true;
        }
    }
    if let Some(handle) = described.refers {
        session.objects.graphs.refer_to(handle);
        note_recorded_by_graphs(session, handle);
    }
}

/// Checks the parameters of a node of this kind, and translates them to the driver's form. `into` is the graph to
/// which the node is added; `None` if an existing node is changed.
pub fn describe_node(
    session: &mut Session,
    shared: &Shared,
    (device, context): (Ordinal, CUcontext),
    (kind, into): (u32, Option<u64>),
    bytes: &[u8],
) -> Result<Described, CallError> {
    let mut described = Described::new(kind);
    let mut bytes = bytes;
    let params = &mut described.params;
    match kind {
        CU_GRAPH_NODE_TYPE_KERNEL => {
            let body: KernelNode = one(&mut bytes)?;
            let function = function::function(session, shared, body.function)?;
            let len = body.param_len as usize;
            if len > PARAMS_MAX || len > bytes.len() {
                return Err(CallError::Violation(format!("{len} bytes of parameters")));
            }
            if body.param_len < function.param_bytes {
                return Err(CUDA_ERROR_INVALID_VALUE.into());
            }
            described.prints = function.prints;
            described.refers = Some(function.image);
            let function = function.raw;
            described._bytes = match session.note_params(bytes.as_ptr(), len) {
                true => session.translate(bytes.as_ptr(), len),
                false => bytes[..len].to_vec(),
            };
            let base = described._bytes.as_ptr() as u64;
            for (offset, size) in layout(shared, function) {
                if offset + size > len {
                    return Err(CUDA_ERROR_INVALID_VALUE.into());
                }
                described._pointers.push(base + offset as u64);
            }
            let kernel = CUDA_KERNEL_NODE_PARAMS {
                function: function.0,
                grid: body.grid,
                block: body.block,
                shared: body.shared,
                params: described._pointers.as_ptr() as u64,
                ..CUDA_KERNEL_NODE_PARAMS::default()
            };
            into_words(params, &kernel);
        }
        CU_GRAPH_NODE_TYPE_MEMCPY => {
            let body: CUDA_MEMCPY3D = one(&mut bytes)?;
            let copy = checked_copy(session, body)?;
            into_words(params, &0u64);
            params.words[1] = context.0;
            params.words.as_mut_bytes()[16..16 + size_of::<CUDA_MEMCPY3D>()]
                .copy_from_slice(copy.as_bytes());
        }
        CU_GRAPH_NODE_TYPE_MEMSET => {
            let mut body: CUDA_MEMSET_NODE_PARAMS = one(&mut bytes)?;
            body.to = session.lasting.place_of(body.to);
            let len = memset_extent(body.element, body.width, body.height, body.pitch)?;
            session.check_device(body.to, len)?;
            session.check_writable(body.to)?;
            into_words(params, &body);
            params.words[5] = context.0;
        }
        CU_GRAPH_NODE_TYPE_EMPTY => {}
        CU_GRAPH_NODE_TYPE_GRAPH => {
            let mut body: CUDA_CHILD_GRAPH_NODE_PARAMS = one(&mut bytes)?;
            let graph = session.objects.graphs.graphs.get(body.graph)?;
            let moves = body.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
            // A graph cannot be moved into itself.
            let can_move = graph.owner == Owner::Client
                && into.is_some_and(|into| !session.objects.graphs.is_inside(into, body.graph));
            if moves && !can_move || graph.filling {
                return Err(CUDA_ERROR_INVALID_VALUE.into());
            }
            body.graph = graph.raw.0;
            described.inside = graph.size;
            into_words(params, &body);
        }
        CU_GRAPH_NODE_TYPE_WAIT_EVENT | CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
            let handle: u64 = one(&mut bytes)?;
            params.words[0] = session.objects.events.get(handle)?.raw.0;
            described.refers = Some(handle);
        }
        CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
            let mut body: CUDA_MEM_ALLOC_NODE_PARAMS = one(&mut bytes)?;
            if body.access_count > ACCESS_MOST {
                return Err(CUDA_ERROR_INVALID_VALUE.into());
            }
            body.location = shared.gpu.device(body.location)?.raw as u32;
            for access in take::<Access>(&mut bytes, body.access_count as usize)? {
                described._access.push(CUmemAccessDesc {
                    location: CUmemLocation {
                        kind: access.kind,
                        id: shared.gpu.device(access.id as u32)?.raw,
                    },
                    flags: access.flags,
                });
            }
            body.security = 0;
            body.access = if described._access.is_empty() {
                0
            } else {
                described._access.as_ptr() as u64
            };
            into_words(params, &body);
        }
        CU_GRAPH_NODE_TYPE_MEM_FREE => {
            let address: u64 = one(&mut bytes)?;
            session.check_device(address, 1)?;
            params.words[0] = address;
        }
        CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
            let body: BatchNode = one(&mut bytes)?;
            if body.count > OPERATIONS_MOST {
                return Err(CUDA_ERROR_INVALID_VALUE.into());
            }
            described._operations = take(&mut bytes, body.count as usize)?;
            for operation in &mut described._operations {
                check_memory_operation(session, operation)?;
                let [kind, address, value, flags, ..] = *operation;
                let awaited = &mut session.objects.graphs.awaited;
                awaited.note(device, kind as u32, address, value, flags as u32)?;
            }
            let batch = CUDA_BATCH_MEM_OP_NODE_PARAMS {
                context: context.0,
                count: body.count,
                operations: described._operations.as_ptr() as u64,
                flags: body.flags,
                ..CUDA_BATCH_MEM_OP_NODE_PARAMS::default()
            };
            into_words(params, &batch);
        }
        CU_GRAPH_NODE_TYPE_HOST => {
            let body: HostNode = one(&mut bytes)?;
            // Each instance gets slots of its own.
            described.host(host_operations(session, 0, body.token)?, context);
        }
        CU_GRAPH_NODE_TYPE_CONDITIONAL => {
            let graphs = &session.objects.graphs;
            let is_known = |handle| graphs.has_condition(into, handle);
            described = describe_conditional(context, bytes, is_known)?;
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
    }
    Ok(described)
}

/// Translates a copy, after checking that both sides are the session's memory.
fn checked_copy(session: &mut Session, mut copy: CUDA_MEMCPY3D) -> Result<CUDA_MEMCPY3D, CUresult> {
    copy.src_device = session.lasting.place_of(copy.src_device);
    copy.dst_device = session.lasting.place_of(copy.dst_device);
    let from = Rows {
        at: [copy.src_x, copy.src_y, copy.src_z],
        pitch: copy.src_pitch,
        rows: copy.src_height,
    };
    let to = Rows {
        at: [copy.dst_x, copy.dst_y, copy.dst_z],
        pitch: copy.dst_pitch,
        rows: copy.dst_height,
    };
    let size = [copy.width, copy.height, copy.depth];
    let check = |kind: u32, host: u64, device: u64, rows: Rows| match kind {
        CU_MEMORYTYPE_HOST => session.check_reachable(host, rows.extent(size)?),
        CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => {
            session.check_device(device, rows.extent(size)?)
        }
        CU_MEMORYTYPE_ARRAY => Ok(()),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    };
    check(copy.src_type, copy.src_host, copy.src_device, from)?;
    check(copy.dst_type, copy.dst_host, copy.dst_device, to)?;
    match copy.dst_type {
        CU_MEMORYTYPE_HOST => session.check_writable(copy.dst_host)?,
        CU_MEMORYTYPE_ARRAY => {}
        _ => session.check_writable(copy.dst_device)?,
    }
    (copy.src_context, copy.dst_context) = (0, 0);
    for (kind, array) in [
        (copy.src_type, &mut copy.src_array),
        (copy.dst_type, &mut copy.dst_array),
    ] {
        *array = match kind {
            CU_MEMORYTYPE_ARRAY if *array != 0 => reference::bind(session, *array)?.0,
            _ => 0,
        };
    }
    Ok(copy)
}

/// Checks that a stream memory operation has a known kind, and that its address is the session's.
fn check_memory_operation(session: &Session, operation: &mut [u64; 6]) -> Result<(), CUresult> {
    const FLUSH: u32 = 3;
    const BARRIER: u32 = 6;
    operation[1] = session.lasting.place_of(operation[1]);
    let [kind, address, ..] = *operation;
    let bytes = match kind as u32 {
        1 | 2 => 4,
        4 | 5 => 8,
        FLUSH | BARRIER => return Ok(()),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    // Only the driver may set the alias.
    operation[4] = 0;
    session.check_device(address, bytes)?;
    match kind as u32 {
        2 | 5 => session.check_writable(address),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys, obeys_with_handle, others,
    };
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::Op;
    use mpsshim_proto::message::graph::{CaptureBegin, GraphCondition, GraphInstantiate};

    const UNIT: u64 = 2 << 20;
    const ADD: &str = "cuGraphAddNode_v2";
    const VALUE: CUresult = CUDA_ERROR_INVALID_VALUE;

    fn add(graph: u64, kind: u32) -> GraphNode {
        GraphNode {
            object: graph,
            kind,
            ..GraphNode::default()
        }
    }

    fn change(node: u64, exec: u64, kind: u32) -> GraphNode {
        GraphNode {
            exec,
            flags: node_flags::CHANGE,
            ..add(node, kind)
        }
    }

    fn parts(test: &Fixture, graph: u64) -> u64 {
        let graph = test.session.objects.graphs.graphs.get(graph);
        graph.expect("a graph").size.parts
    }

    /// A row of 8 bytes at an address, set or copied.
    fn set(to: u64) -> Vec<u8> {
        let body = CUDA_MEMSET_NODE_PARAMS {
            to,
            element: 1,
            width: 8,
            height: 1,
            ..CUDA_MEMSET_NODE_PARAMS::default()
        };
        body.as_bytes().to_vec()
    }

    /// `cuGraphAddNode` of a conditional node: has bodies 0x901, 0x902, …
    extern "C" fn with_bodies(
        to: *mut u64,
        _: u64,
        _: u64,
        _: u64,
        _: u64,
        params: &mut CUgraphNodeParams,
    ) -> CUresult {
        static BODIES: [u64; 3] = [0x901, 0x902, 0x903];
        params.words[2] = BODIES.as_ptr() as u64;
        crate::engine::testing::gives_handle(to)
    }

    #[test]
    fn parameters_of_a_conditional_node_are_known_until_they_are_changed() {
        let create = "cuGraphConditionalHandleCreate";
        let mut test = Fixture::new(&[
            (ADD, with_bodies as Function),
            (create, obeys_with_handle as Function),
            ("cuGraphNodeSetParams", obeys as Function),
        ]);
        test.orders(CUDA_SUCCESS);
        let [graph, other] = [test.graph(), test.graph()];
        let condition = GraphCondition {
            graph,
            ..GraphCondition::default()
        };
        let handle: u64 = test.reply(Op::GraphCondition, &condition, &[]).expect("it");
        let switch = CUDA_CONDITIONAL_NODE_PARAMS {
            handle,
            kind: CU_GRAPH_COND_TYPE_SWITCH,
            size: 3,
            graphs: 7,
            context: 8,
        };
        let kind = CU_GRAPH_NODE_TYPE_CONDITIONAL;
        // A handle of another graph may have the same number.
        let status = test.status(Op::GraphNode, &add(other, kind), switch.as_bytes());
        assert_eq!(status, VALUE);
        let added = test.reply(Op::GraphNode, &add(graph, kind), switch.as_bytes());
        let added: GraphNodeAdded = added.expect("a node");
        let node = |test: &Fixture| {
            let node = test.session.objects.graphs.nodes.get(added.node);
            let node = node.expect("a node");
            (node.conditional.clone(), node.graphs().to_vec())
        };
        let (known, bodies) = node(&test);
        let sent = CUDA_CONDITIONAL_NODE_PARAMS {
            graphs: 0,
            context: 0,
            ..switch
        };
        assert_eq!(known.expect("parameters").does, sent.as_bytes());
        assert_eq!((bodies.len(), added.graphs), (3, 3));
        assert!(test.session.objects.graphs.is_body(bodies[2]));
        assert_eq!(test.session.objects.graphs.may_not_be_saved(), None);
        for (status, is_known) in [(CUDA_ERROR_NOT_SUPPORTED, true), (CUDA_SUCCESS, false)] {
            test.orders(status);
            let body = change(added.node, 0, kind);
            let told = test.status(Op::GraphNode, &body, switch.as_bytes());
            assert_eq!(told, status);
            assert_eq!(node(&test).0.is_some(), is_known, "{status}");
        }
    }

    fn copy((to_kind, to): (u32, u64), (from_kind, from): (u32, u64)) -> Vec<u8> {
        let host = |kind, at| if kind == CU_MEMORYTYPE_HOST { at } else { 0 };
        let device = |kind, at| if kind == CU_MEMORYTYPE_DEVICE { at } else { 0 };
        let array = |kind, at| if kind == CU_MEMORYTYPE_ARRAY { at } else { 0 };
        let body = CUDA_MEMCPY3D {
            src_type: from_kind,
            src_host: host(from_kind, from),
            src_device: device(from_kind, from),
            src_array: array(from_kind, from),
            dst_type: to_kind,
            dst_host: host(to_kind, to),
            dst_device: device(to_kind, to),
            dst_array: array(to_kind, to),
            width: 8,
            height: 1,
            depth: 1,
            ..CUDA_MEMCPY3D::default()
        };
        body.as_bytes().to_vec()
    }

    fn kernel(function: u64, param_len: u32, rest: usize) -> Vec<u8> {
        let body = KernelNode {
            function,
            param_len,
            ..KernelNode::default()
        };
        [body.as_bytes(), &vec![0; rest]].concat()
    }

    fn child(graph: u64, ownership: u32) -> Vec<u8> {
        let body = CUDA_CHILD_GRAPH_NODE_PARAMS {
            graph,
            ownership,
            pad: 0,
        };
        body.as_bytes().to_vec()
    }

    fn batch(count: u32, operation: [u64; 6]) -> Vec<u8> {
        [
            BatchNode { count, flags: 0 }.as_bytes(),
            operation.as_bytes(),
        ]
        .concat()
    }

    fn allocation(location: u32, access_count: u64, access: &[Access]) -> Vec<u8> {
        let body = CUDA_MEM_ALLOC_NODE_PARAMS {
            location,
            access_count,
            bytes: 64,
            ..CUDA_MEM_ALLOC_NODE_PARAMS::default()
        };
        [body.as_bytes(), access.as_bytes()].concat()
    }

    #[test]
    fn what_a_node_names_is_the_sessions() {
        let mut test = Fixture::new(&[(ADD, counts as Function)]);
        let (device, host) = (test.memory(UNIT), test.pinned(4096));
        let (graph, function, event) = (test.graph(), test.function(), test.event());
        let of_device = |at| (CU_MEMORYTYPE_DEVICE, at);
        let of_host = |at| (CU_MEMORYTYPE_HOST, at);
        let good = of_device(device);
        let (handle, no_device) = (CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_DEVICE);
        let condition = CUDA_CONDITIONAL_NODE_PARAMS {
            handle: 1,
            size: 1,
            ..CUDA_CONDITIONAL_NODE_PARAMS::default()
        };
        let of_second = Access {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: 1,
            flags: 3,
        };
        let write = u64::from(CU_STREAM_MEM_OP_WRITE_VALUE_32);
        let mut wrong = vec![
            (CU_GRAPH_NODE_TYPE_KERNEL, kernel(function, 7, 8), VALUE),
            (CU_GRAPH_NODE_TYPE_MEMSET, set(device + UNIT - 7), VALUE),
            (CU_GRAPH_NODE_TYPE_MEMSET, set(0), VALUE),
            (
                CU_GRAPH_NODE_TYPE_MEMCPY,
                copy(of_device(device - 8), good),
                VALUE,
            ),
            (
                CU_GRAPH_NODE_TYPE_MEMCPY,
                copy(good, of_device(device + UNIT)),
                VALUE,
            ),
            (
                CU_GRAPH_NODE_TYPE_MEMCPY,
                copy(of_host(host + 4089), good),
                VALUE,
            ),
            (
                CU_GRAPH_NODE_TYPE_MEMCPY,
                copy(good, of_host(device)),
                VALUE,
            ),
            (CU_GRAPH_NODE_TYPE_MEMCPY, copy(good, (99, device)), VALUE),
            (
                CU_GRAPH_NODE_TYPE_MEMCPY,
                copy(good, (CU_MEMORYTYPE_ARRAY, 1)),
                handle,
            ),
            (
                CU_GRAPH_NODE_TYPE_MEM_FREE,
                0x10u64.to_le_bytes().to_vec(),
                VALUE,
            ),
            (
                CU_GRAPH_NODE_TYPE_MEM_ALLOC,
                allocation(1, 0, &[]),
                no_device,
            ),
            (
                CU_GRAPH_NODE_TYPE_MEM_ALLOC,
                allocation(0, 1, &[of_second]),
                no_device,
            ),
            (
                CU_GRAPH_NODE_TYPE_MEM_ALLOC,
                allocation(0, ACCESS_MOST + 1, &[]),
                VALUE,
            ),
            (
                CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
                batch(1, [write, 0, 0, 0, 0, 0]),
                VALUE,
            ),
            (
                CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
                batch(1, [99, device, 0, 0, 0, 0]),
                VALUE,
            ),
            (
                CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
                batch(OPERATIONS_MOST + 1, [0; 6]),
                VALUE,
            ),
            (
                CU_GRAPH_NODE_TYPE_CONDITIONAL,
                condition.as_bytes().to_vec(),
                VALUE,
            ),
            // A graph inside itself.
            (
                CU_GRAPH_NODE_TYPE_GRAPH,
                child(graph, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE),
                VALUE,
            ),
            (99, vec![0; 64], VALUE),
        ];
        for other in others(function) {
            wrong.push((CU_GRAPH_NODE_TYPE_KERNEL, kernel(other, 8, 8), handle));
        }
        for other in others(graph) {
            wrong.push((CU_GRAPH_NODE_TYPE_GRAPH, child(other, 0), VALUE));
        }
        for other in others(event).map(u64::to_le_bytes) {
            wrong.push((CU_GRAPH_NODE_TYPE_WAIT_EVENT, other.to_vec(), handle));
            wrong.push((CU_GRAPH_NODE_TYPE_EVENT_RECORD, other.to_vec(), handle));
        }
        for (at, (kind, rest, status)) in wrong.into_iter().enumerate() {
            let refused = test.status(Op::GraphNode, &add(graph, kind), &rest);
            assert_eq!(refused, status, "kind {kind}, entry {at}");
        }
        assert_eq!((test.calls(), parts(&test, graph)), (0, 0));
        assert!(test.has_no_graph_parts());
    }

    #[test]
    fn parameters_of_nodes_fit_the_message() {
        let mut test = Fixture::new(&[(ADD, counts as Function)]);
        let (graph, function) = (test.graph(), test.function());
        let most = PARAMS_MAX as u32;
        let device = test.memory(UNIT);
        let set = set(device);
        for (kind, rest) in [
            (CU_GRAPH_NODE_TYPE_KERNEL, kernel(function, 9, 8)),
            (
                CU_GRAPH_NODE_TYPE_KERNEL,
                kernel(function, most + 1, PARAMS_MAX + 1),
            ),
            (CU_GRAPH_NODE_TYPE_MEMSET, set[..set.len() - 1].to_vec()),
            (CU_GRAPH_NODE_TYPE_MEMCPY, vec![0; 8]),
            (CU_GRAPH_NODE_TYPE_GRAPH, vec![]),
            (CU_GRAPH_NODE_TYPE_WAIT_EVENT, vec![0; 7]),
            (CU_GRAPH_NODE_TYPE_MEM_ALLOC, allocation(0, 1, &[])),
            (CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, batch(2, [0; 6])),
            (CU_GRAPH_NODE_TYPE_HOST, vec![]),
            (CU_GRAPH_NODE_TYPE_CONDITIONAL, vec![0; 8]),
        ] {
            let violates = test.is_violation(Op::GraphNode, &add(graph, kind), &rest);
            assert!(violates, "{kind}");
        }
        let nodes = GraphNode {
            nodes: 2,
            ..add(graph, CU_GRAPH_NODE_TYPE_EMPTY)
        };
        assert!(test.is_violation(Op::GraphNode, &nodes, &[0; 8]));
        assert_eq!((test.calls(), parts(&test, graph)), (0, 0));
    }

    #[test]
    fn a_node_is_added_to_a_graph_of_the_session_behind_nodes_of_the_session() {
        let mut test = Fixture::new(&[]);
        let graph = test.graph();
        let node = test.node(graph);
        for graph in others(graph) {
            let body = add(graph, CU_GRAPH_NODE_TYPE_EMPTY);
            assert_eq!(test.status(Op::GraphNode, &body, &[]), VALUE, "{graph:#x}");
        }
        let behind = GraphNode {
            nodes: 1,
            ..add(graph, CU_GRAPH_NODE_TYPE_EMPTY)
        };
        for node in others(node) {
            let status = test.status(Op::GraphNode, &behind, &node.to_le_bytes());
            assert_eq!(status, VALUE, "{node:#x}");
        }
        let elsewhere = GraphNode {
            device: 1,
            ..behind
        };
        let status = test.status(Op::GraphNode, &elsewhere, &node.to_le_bytes());
        assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(parts(&test, graph), 1);
        let status = test.status(Op::GraphNode, &behind, &node.to_le_bytes());
        assert_eq!(
            (status, parts(&test, graph)),
            (CUDA_SUCCESS, 3),
            "an edge, too"
        );
    }

    #[test]
    fn a_node_that_the_driver_does_not_add_does_not_count() {
        let mut test = Fixture::new(&[(ADD, obeys_with_handle as Function)]);
        let (graph, inner, memory) = (test.graph(), test.graph(), test.memory(UNIT));
        test.node(inner);
        test.node(inner);
        let (function, event) = (test.function(), test.event());
        let mut counted = 0;
        for (kind, rest, more) in [
            (CU_GRAPH_NODE_TYPE_EMPTY, vec![], 1),
            (CU_GRAPH_NODE_TYPE_KERNEL, kernel(function, 8, 8), 1),
            (CU_GRAPH_NODE_TYPE_MEMSET, set(memory), 1),
            (
                CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                event.to_le_bytes().to_vec(),
                1,
            ),
            // With its contents.
            (CU_GRAPH_NODE_TYPE_GRAPH, child(inner, 0), 3),
        ] {
            let body = add(graph, kind);
            test.orders(CUDA_ERROR_NOT_SUPPORTED);
            let status = test.status(Op::GraphNode, &body, &rest);
            assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED, "{kind}");
            assert_eq!(parts(&test, graph), counted, "{kind}");
            test.orders(CUDA_SUCCESS);
            assert_eq!(test.status(Op::GraphNode, &body, &rest), CUDA_SUCCESS);
            counted += more;
            assert_eq!(parts(&test, graph), counted, "{kind}");
        }
        test.orders(FAULT);
        let body = add(graph, CU_GRAPH_NODE_TYPE_EMPTY);
        assert_eq!(test.told(Op::GraphNode, &body, &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn a_graph_that_is_filled_or_not_the_clients_is_not_put_into_another() {
        let mut test = Fixture::new(&[(ADD, obeys_with_handle as Function)]);
        let (graph, inner, filled) = (test.graph(), test.graph(), test.graph());
        let capture = CaptureBegin {
            stream: test.stream(),
            graph: filled,
            ..CaptureBegin::default()
        };
        assert_eq!(test.status(Op::CaptureBegin, &capture, &[]), CUDA_SUCCESS);
        let body = add(graph, CU_GRAPH_NODE_TYPE_GRAPH);
        let status = test.status(Op::GraphNode, &body, &child(filled, 0));
        assert_eq!((status, parts(&test, graph)), (VALUE, 0));
        let moved = child(inner, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE);
        for (ordered, status) in [
            (CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED),
            (CUDA_SUCCESS, CUDA_SUCCESS),
            // It is the node's now.
            (CUDA_SUCCESS, VALUE),
        ] {
            test.orders(ordered);
            assert_eq!(test.status(Op::GraphNode, &body, &moved), status);
        }
        let destroy = mpsshim_proto::message::Object { object: inner };
        assert_eq!(test.status(Op::GraphDestroy, &destroy, &[]), VALUE);
    }

    #[test]
    fn a_change_that_the_driver_refuses_changes_nothing() {
        for (in_exec, name) in [
            (false, "cuGraphNodeSetParams"),
            (true, "cuGraphExecNodeSetParams"),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let (graph, inner) = (test.graph(), test.graph());
            test.node(inner);
            test.node(inner);
            let node = test.node(graph);
            let body = GraphInstantiate {
                graph,
                ..GraphInstantiate::default()
            };
            let exec = test.reply::<u64>(Op::GraphInstantiate, &body, &[]);
            let exec = if in_exec {
                exec.expect("an instance")
            } else {
                0
            };
            let rest = child(inner, 0);
            let kind = CU_GRAPH_NODE_TYPE_GRAPH;
            for node in others(node) {
                let status = test.status(Op::GraphNode, &change(node, exec, kind), &rest);
                assert_eq!(status, VALUE, "{node:#x}");
            }
            if in_exec {
                for exec in &others(exec)[1..] {
                    let status = test.status(Op::GraphNode, &change(node, *exec, kind), &rest);
                    assert_eq!(status, VALUE, "{exec:#x}");
                }
            }
            let body = change(node, exec, kind);
            // In the graph, what is inside takes the place of the node's.
            let after = if in_exec { 1 } else { 3 };
            for (status, now) in [(CUDA_ERROR_NOT_SUPPORTED, 1), (CUDA_SUCCESS, after)] {
                test.orders(status);
                assert_eq!(test.told(Op::GraphNode, &body, &rest), status, "{name}");
                assert_eq!(parts(&test, graph), now, "{name} {status}");
            }
            test.orders(FAULT);
            assert_eq!(test.told(Op::GraphNode, &body, &rest), FAULT, "{name}");
            assert!(test.has_ended(), "{name}");
        }
    }

    #[test]
    fn a_host_node_in_an_instance_has_a_slot() {
        let mut test = Fixture::new(&[("cuGraphExecNodeSetParams", counts as Function)]);
        let graph = test.graph();
        let node = test.node(graph);
        let body = GraphInstantiate {
            graph,
            ..GraphInstantiate::default()
        };
        let exec = test.reply::<u64>(Op::GraphInstantiate, &body, &[]);
        let body = change(node, exec.expect("an instance"), CU_GRAPH_NODE_TYPE_HOST);
        let host = HostNode { token: 5, pad: 0 };
        let status = test.status(Op::GraphNode, &body, host.as_bytes());
        assert_eq!((status, test.calls()), (VALUE, 0), "it is no host node");
    }

    #[test]
    fn a_node_names_an_array_that_then_stays() {
        use mpsshim_proto::message::array::ArrayCreate;
        let mut test = Fixture::new(&[]);
        let (graph, memory) = (test.graph(), test.memory(UNIT));
        let body = ArrayCreate {
            array: test.new_handle(Kind::Array),
            size: [16, 0, 0],
            format: CU_AD_FORMAT_FLOAT,
            channels: 1,
            ..ArrayCreate::default()
        };
        assert_eq!(test.status(Op::ArrayCreate, &body, &[]), CUDA_SUCCESS);
        let (array, memory) = (
            (CU_MEMORYTYPE_ARRAY, body.array),
            (CU_MEMORYTYPE_DEVICE, memory),
        );
        let node = add(graph, CU_GRAPH_NODE_TYPE_MEMCPY);
        let status = test.status(Op::GraphNode, &node, &copy(memory, array));
        assert_eq!(status, CUDA_SUCCESS);
        let array = mpsshim_proto::message::Object { object: body.array };
        assert_eq!(test.status(Op::ArrayDestroy, &array, &[]), CUDA_SUCCESS);
        assert_eq!(test.session.objects.bound_arrays.len(), 1);
    }
}
