//! Parameters of nodes in the client's form; nodes that call the client.

use crate::engine::base::bounds::GRAPH_DEPTH;
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::capture::all_nodes;
use crate::engine::calls::graph;
use crate::engine::calls::graph::described::{
    ACCESS_MOST, Described, HOST_OPERATIONS, OPERATIONS_MOST, layout,
};
use crate::engine::calls::graph::node_ready;
use crate::engine::calls::reply::Reply;
use crate::engine::objects::arrays::RawArray;
use crate::engine::objects::graphs::Owner;
use crate::engine::session::Session;
use crate::engine::session::portable::translated;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::Object;
use mpsshim_proto::message::graph::{Access, BatchNode, GraphNodeIs, HostNode, KernelNode};
use mpsshim_proto::segment::{ARRIVED, FLAG_STRIDE, FLAGS, RETURNED};
use std::ptr;
use zerocopy::IntoBytes;

/// Returns the parameters of a node in the client's form.
pub fn graph_node_get(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let (node, graph) = node_ready(session, shared, body.object)?;
    let device = session.objects.graphs.graphs.get(graph)?.device;
    let driver = &shared.gpu.driver.graph;
    let mut kind = 0;
    driver.node_kind(node, &mut kind)?;
    let is = GraphNodeIs {
        kind,
        device: device.into(),
    };
    let mut payload = is.as_bytes().to_vec();
    match kind {
        CU_GRAPH_NODE_TYPE_GRAPH => {
            let mut inner = CUgraph::NULL;
            driver.child_get(node, &mut inner)?;
            let owner = Owner::Node(body.object);
            let known = session.objects.graphs.has_graph(inner);
            let handle = session.objects.graphs.graph_handle(inner, device, owner)?;
            if !known {
                let size = graph::measure(shared, inner, GRAPH_DEPTH)?;
                session.objects.graphs.graphs.get_mut(handle)?.size = size;
            }
            payload.extend_from_slice(handle.as_bytes());
        }
        CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
            let mut params = CUDA_MEM_ALLOC_NODE_PARAMS::default();
            driver.mem_alloc_get(node, &mut params)?;
            let count = params.access_count.min(ACCESS_MOST);
            let access = params.access as *const Access;
            params.access_count = if access.is_null() { 0 } else { count };
            params.access = 0;
            payload.extend_from_slice(params.as_bytes());
            for index in 0..params.access_count as usize {
                // SAFETY: the driver's own array of as many descriptors, valid as long as the node.
                let access = unsafe { access.add(index).read() };
                payload.extend_from_slice(access.as_bytes());
            }
        }
        CU_GRAPH_NODE_TYPE_MEM_FREE => {
            let mut address = 0;
            driver.mem_free_get(node, &mut address)?;
            payload.extend_from_slice(address.as_bytes());
        }
        CU_GRAPH_NODE_TYPE_BATCH_MEM_OP if host_token(session, shared, node).is_some() => {
            let is = GraphNodeIs {
                kind: CU_GRAPH_NODE_TYPE_HOST,
                ..is
            };
            let token = host_token(session, shared, node).unwrap_or(0);
            payload = [is.as_bytes(), HostNode { token, pad: 0 }.as_bytes()].concat();
        }
        CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
            let mut does = operations_as_seen(shared, node)?;
            show_known_addresses(session, &mut does);
            payload.extend(does);
        }
        _ => {
            let known = |raw: CUfunction| {
                session
                    .objects
                    .functions
                    .handle_where(|function| function.raw == raw)
            };
            let mut does = node_as_seen(session, shared, node, kind, &known)?;
            show_known_addresses(session, &mut does);
            payload.extend(does);
        }
    }
    Ok(payload)
}

/// Replaces addresses of variables that have moved since an earlier server by those that the client knows.
fn show_known_addresses(session: &Session, does: &mut [u8]) {
    if session.lasting.moved.is_empty() {
        return;
    }
    let known = session.lasting.known_by_place();
    for word in does.as_chunks_mut::<8>().0 {
        *word = translated(&known, u64::from_le_bytes(*word)).to_le_bytes();
    }
}

/// Parameters of a node without a graph inside, with the client's handles. `known` returns the handles of
/// functions.
pub fn node_as_seen(
    session: &Session,
    shared: &Shared,
    node: CUgraphNode,
    kind: u32,
    known: &dyn Fn(CUfunction) -> Option<u64>,
) -> Result<Vec<u8>, CUresult> {
    let driver = &shared.gpu.driver.graph;
    match kind {
        CU_GRAPH_NODE_TYPE_KERNEL => {
            let mut params = CUDA_KERNEL_NODE_PARAMS::default();
            driver.kernel_get(node, &mut params)?;
            kernel_as_seen(shared, &params, known)
        }
        CU_GRAPH_NODE_TYPE_MEMCPY => {
            let mut params = CUDA_MEMCPY3D::default();
            driver.memcpy_get(node, &mut params)?;
            for array in [&mut params.src_array, &mut params.dst_array] {
                let raw = RawArray::Plain(CUarray(*array));
                let handle = session
                    .objects
                    .arrays
                    .handle_where(|other| other.raw == raw);
                *array = handle.unwrap_or(0);
            }
            Ok(params.as_bytes().to_vec())
        }
        CU_GRAPH_NODE_TYPE_MEMSET => {
            let mut params = CUDA_MEMSET_NODE_PARAMS::default();
            driver.memset_get(node, &mut params)?;
            Ok(params.as_bytes().to_vec())
        }
        CU_GRAPH_NODE_TYPE_WAIT_EVENT | CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
            let mut event = CUevent::NULL;
            if kind == CU_GRAPH_NODE_TYPE_WAIT_EVENT {
                driver.event_wait_get(node, &mut event)?;
            } else {
                driver.event_record_get(node, &mut event)?;
            }
            let handle = session
                .objects
                .events
                .handle_where(|other| other.raw == event);
            Ok(handle.unwrap_or(0).as_bytes().to_vec())
        }
        _ => Ok(Vec::new()),
    }
}

/// The parameters of a node of stream memory operations, as in a client's message.
pub fn operations_as_seen(shared: &Shared, node: CUgraphNode) -> Result<Vec<u8>, CUresult> {
    let mut params = CUDA_BATCH_MEM_OP_NODE_PARAMS::default();
    shared.gpu.driver.graph.batch_get(node, &mut params)?;
    let count = params.count.min(OPERATIONS_MOST);
    let flags = params.flags;
    let mut does = BatchNode { count, flags }.as_bytes().to_vec();
    for index in 0..count as usize {
        // SAFETY: the driver's own array of as many operations, valid as long as the node.
        let operation: [u64; 6] = unsafe { *(params.operations as *const [u64; 6]).add(index) };
        does.extend_from_slice(operation.as_bytes());
    }
    Ok(does)
}

/// The stream memory operations of a host node in an instance that has this slot.
pub fn host_operations(
    session: &Session,
    slot: u32,
    token: u32,
) -> Result<[[u64; 6]; HOST_OPERATIONS], CallError> {
    session.shared.segment.check_slot(slot)?;
    let arrived = session.shared.segment.flag_address(slot + ARRIVED)?;
    let returned = session.shared.segment.flag_address(slot + RETURNED)?;
    let (write, wait) = (
        CU_STREAM_MEM_OP_WRITE_VALUE_32 as u64,
        CU_STREAM_MEM_OP_WAIT_VALUE_32 as u64,
    );
    Ok([
        [write, arrived, token.into(), 0, 0, 0],
        [wait, returned, 1, CU_STREAM_WAIT_VALUE_EQ.into(), 0, 0],
        [write, returned, 0, 0, 0, 0],
    ])
}

/// The client's token for the function of a host node; `None` for any other node.
pub fn host_token(session: &Session, shared: &Shared, node: CUgraphNode) -> Option<u32> {
    if !session.objects.graphs.hosts {
        return None;
    }
    let mut params = CUDA_BATCH_MEM_OP_NODE_PARAMS::default();
    shared.gpu.driver.graph.batch_get(node, &mut params).ok()?;
    if params.count as usize != HOST_OPERATIONS {
        return None;
    }
    // SAFETY: the driver's own array of as many operations, valid as long as the node.
    let first = unsafe { *(params.operations as *const [u64; 6]) };
    // Only host nodes contain addresses of flags: a client cannot name its flags in other nodes.
    let flags = session.shared.segment.flag_address(0).ok()?;
    let len = (FLAGS * FLAG_STRIDE) as u64;
    (first[1].wrapping_sub(flags) < len).then_some(first[2] as u32)
}

/// The host nodes of a graph and of the graphs inside it, with their tokens, always in the same order.
pub fn host_nodes(
    session: &Session,
    shared: &Shared,
    graph: CUgraph,
    depth: usize,
) -> Result<Vec<(CUgraphNode, u32)>, CUresult> {
    let mut found = Vec::new();
    if !session.objects.graphs.hosts || depth == 0 {
        return Ok(found);
    }
    let driver = &shared.gpu.driver.graph;
    for node in all_nodes(shared, graph)? {
        let mut kind = 0;
        driver.node_kind(node, &mut kind)?;
        match kind {
            CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
                let token = host_token(session, shared, node);
                found.extend(token.map(|token| (node, token)));
            }
            CU_GRAPH_NODE_TYPE_GRAPH => {
                let mut inner = CUgraph::NULL;
                driver.child_get(node, &mut inner)?;
                found.extend(host_nodes(session, shared, inner, depth - 1)?);
            }
            _ => {}
        }
    }
    Ok(found)
}

/// Writes the slots of the next instance to be created or updated into the host nodes of its graph.
pub fn give_slots(
    session: &Session,
    shared: &Shared,
    hosts: &[(CUgraphNode, u32)],
    slots: &[u32],
    device: Ordinal,
) -> Result<(), CallError> {
    let context = shared.gpu.devices[device]
        .context()
        .ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    for ((node, token), slot) in hosts.iter().zip(slots) {
        let mut described = Described::new(CU_GRAPH_NODE_TYPE_HOST);
        described.host(host_operations(session, *slot, *token)?, context);
        shared
            .gpu
            .driver
            .graph
            .node_set(*node, &mut described.params)?;
    }
    Ok(())
}

/// A kernel node's parameters, packed, with the client's handle of the function.
fn kernel_as_seen(
    shared: &Shared,
    params: &CUDA_KERNEL_NODE_PARAMS,
    known: &dyn Fn(CUfunction) -> Option<u64>,
) -> Result<Vec<u8>, CUresult> {
    let mut raw = CUfunction(params.function);
    if raw.is_null() {
        let kernel = CUkernel(params.kernel);
        shared.gpu.driver.kernel_get_function(&mut raw, kernel)?;
    }
    let known = known(raw);
    let mut packed = Vec::new();
    for (index, (offset, size)) in layout(shared, raw).into_iter().enumerate() {
        packed.resize(packed.len().max(offset + size), 0u8);
        if params.params != 0 {
            // SAFETY: the driver's own array of pointers to its copies of the kernel's parameters, of the sizes
            // that it has just told.
            unsafe {
                let from = *(params.params as *const *const u8).add(index);
                ptr::copy_nonoverlapping(from, packed.as_mut_ptr().add(offset), size);
            }
        }
    }
    if params.params == 0 && params.extra != 0 {
        // SAFETY: the driver's own list of names and values, of the form of every such list.
        unsafe {
            let list = params.extra as *const usize;
            let (mut at, mut buffer, mut len) = (0, ptr::null::<u8>(), 0usize);
            while at < 8 {
                match *list.add(at) {
                    CU_LAUNCH_PARAM_BUFFER_POINTER => buffer = *list.add(at + 1) as *const u8,
                    CU_LAUNCH_PARAM_BUFFER_SIZE => len = *(*list.add(at + 1) as *const usize),
                    _ => break,
                }
                at += 2;
            }
            if !buffer.is_null() {
                let len = len.min(packed.len());
                ptr::copy_nonoverlapping(buffer, packed.as_mut_ptr(), len);
            }
        }
    }
    let node = KernelNode {
        function: known.unwrap_or(0),
        grid: params.grid,
        block: params.block,
        shared: params.shared,
        param_len: packed.len() as u32,
    };
    Ok([node.as_bytes(), &packed].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{Fixture, Function};
    use mpsshim_proto::message::Op;

    /// Where a variable is that the client knows at another address, and its length.
    const PLACE: u64 = 0x7000_0000_0000;
    const KNOWN: u64 = 0x5000_0000_0000;
    const LEN: u64 = 64;

    extern "C" fn is_memset(_: u64, kind: &mut u32) -> CUresult {
        *kind = CU_GRAPH_NODE_TYPE_MEMSET;
        CUDA_SUCCESS
    }

    extern "C" fn into_variable(_: u64, params: &mut CUDA_MEMSET_NODE_PARAMS) -> CUresult {
        (params.to, params.width) = (PLACE + 8, 4);
        CUDA_SUCCESS
    }

    extern "C" fn is_batch(_: u64, kind: &mut u32) -> CUresult {
        *kind = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
        CUDA_SUCCESS
    }

    extern "C" fn of_variable(_: u64, params: &mut CUDA_BATCH_MEM_OP_NODE_PARAMS) -> CUresult {
        static OPERATIONS: [[u64; 6]; 2] =
            [[2, PLACE + 8, 6, 0, 0, 0], [2, PLACE + LEN, 6, 0, 0, 0]];
        (params.count, params.operations) = (2, OPERATIONS.as_ptr() as u64);
        CUDA_SUCCESS
    }

    fn shown(names: &[(&'static str, Function)]) -> Vec<u64> {
        let mut test = Fixture::new(names);
        let graph = test.graph();
        let node = test.node(graph);
        test.session.lasting.moved.insert(KNOWN, (LEN, PLACE));
        let told = test.told(Op::GraphNodeGet, &Object { object: node }, &[]);
        assert_eq!(told, CUDA_SUCCESS);
        let words = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes);
        let answer = test.answer();
        answer.as_chunks::<8>().0.iter().map(words).collect()
    }

    #[test]
    fn nodes_have_the_addresses_of_variables_that_the_client_knows() {
        let memset = shown(&[
            ("cuGraphNodeGetType", is_memset as Function),
            ("cuGraphMemsetNodeGetParams", into_variable as Function),
        ]);
        assert_eq!(memset[1], KNOWN + 8);
        let batch = shown(&[
            ("cuGraphNodeGetType", is_batch as Function),
            ("cuGraphBatchMemOpNodeGetParams", of_variable as Function),
        ]);
        // Behind the kind, the number of operations, and the kind of the first.
        assert_eq!((batch[3], batch[9]), (KNOWN + 8, PLACE + LEN));
    }
}
