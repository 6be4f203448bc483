//! Nodes of graphs: adding them, and setting and querying their parameters, in a graph or in an instance.

use mpsshim_api::cuda::*;
use mpsshim_proto::message::graph::{
    Access, BatchNode, GraphAttribute, GraphCondition, GraphNode, GraphPair, HostNode, KernelNode,
    node_flags,
};
use mpsshim_proto::message::{Op, Value};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::capture::{elements, elements_if_any};
use super::entries;
use super::launch;
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::capture::{behind, read_all};
use crate::proxy::context::{self, Context};
use crate::proxy::graph::{self, Added, get_node_of, with_kept};
use crate::proxy::hostfn::Function;
use crate::proxy::memory::{self, Place};
use crate::proxy::shadow::{self, Shadow};
use crate::proxy::submit::session;
use crate::proxy::user_object::{self, Holder};
use crate::proxy::{graph_host, module, pages};

entries! {
    cuGraphAddNode(_, _, _, _, _) => add_any_v1,
    cuGraphAddNode_v2(_, _, _, _, _, _) => add_any,
    cuGraphNodeSetParams(_, _) => set_any,
    cuGraphExecNodeSetParams(_, _, _) => exec_set_any,
    cuGraphAddKernelNode(_, _, _, _, _) => add_kernel_v1,
    cuGraphAddKernelNode_v2(_, _, _, _, _) => add_kernel,
    cuGraphKernelNodeGetParams(_, _) => get_kernel_v1,
    cuGraphKernelNodeGetParams_v2(_, _) => get_kernel,
    cuGraphKernelNodeSetParams(_, _) => set_kernel_v1,
    cuGraphKernelNodeSetParams_v2(_, _) => set_kernel,
    cuGraphExecKernelNodeSetParams(_, _, _) => exec_set_kernel_v1,
    cuGraphExecKernelNodeSetParams_v2(_, _, _) => exec_set_kernel,
    cuGraphKernelNodeGetAttribute(_, _, _) => get_attribute,
    cuGraphKernelNodeSetAttribute(_, _, _) => set_attribute,
    cuGraphKernelNodeCopyAttributes(_, _) => copy_attributes,
    cuGraphAddMemcpyNode(_, _, _, _, _, _) => add_memcpy,
    cuGraphMemcpyNodeGetParams(_, _) => get_memcpy,
    cuGraphMemcpyNodeSetParams(_, _) => set_memcpy,
    cuGraphExecMemcpyNodeSetParams(_, _, _, _) => exec_set_memcpy,
    cuGraphAddMemsetNode(_, _, _, _, _, _) => add_memset,
    cuGraphMemsetNodeGetParams(_, _) => get_memset,
    cuGraphMemsetNodeSetParams(_, _) => set_memset,
    cuGraphExecMemsetNodeSetParams(_, _, _, _) => exec_set_memset,
    cuGraphAddEmptyNode(_, _, _, _) => add_empty,
    cuGraphAddChildGraphNode(_, _, _, _, _) => add_child,
    cuGraphChildGraphNodeGetGraph(_, _) => get_child,
    cuGraphExecChildGraphNodeSetParams(_, _, _) => exec_set_child,
    cuGraphAddEventRecordNode(_, _, _, _, _) => add_record,
    cuGraphEventRecordNodeGetEvent(_, _) => get_record,
    cuGraphEventRecordNodeSetEvent(_, _) => set_record,
    cuGraphExecEventRecordNodeSetEvent(_, _, _) => exec_set_record,
    cuGraphAddEventWaitNode(_, _, _, _, _) => add_wait,
    cuGraphEventWaitNodeGetEvent(_, _) => get_wait,
    cuGraphEventWaitNodeSetEvent(_, _) => set_wait,
    cuGraphExecEventWaitNodeSetEvent(_, _, _) => exec_set_wait,
    cuGraphAddMemAllocNode(_, _, _, _, _) => add_alloc,
    cuGraphMemAllocNodeGetParams(_, _) => get_alloc,
    cuGraphAddMemFreeNode(_, _, _, _, _) => add_free,
    cuGraphMemFreeNodeGetParams(_, _) => get_free,
    cuGraphAddBatchMemOpNode(_, _, _, _, _) => add_batch,
    cuGraphBatchMemOpNodeGetParams(_, _) => get_batch,
    cuGraphBatchMemOpNodeSetParams(_, _) => set_batch,
    cuGraphExecBatchMemOpNodeSetParams(_, _, _) => exec_set_batch,
    cuGraphConditionalHandleCreate(_, _, _, _, _) => create_condition,
    cuGraphAddHostNode(_, _, _, _, _) => add_host,
    cuGraphHostNodeGetParams(_, _) => get_host,
    cuGraphHostNodeSetParams(_, _) => set_host,
    cuGraphExecHostNodeSetParams(_, _, _) => exec_set_host,
}

/// Words of `CUDA_KERNEL_NODE_PARAMS` as of CUDA 10.0.
const KERNEL_V1: usize = 7;
/// Maximum number of access descriptors or operations of one node: more than the driver accepts.
const MANY: usize = 1024;

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HostParams {
    function: Option<Function>,
    data: usize,
}

/// A node's parameters in the form in which they are sent.
struct Does {
    kind: u32,
    /// Server's ordinal.
    device: u32,
    bytes: Vec<u8>,
    /// Kernel node: the program passed packed parameters.
    by_extra: bool,
    /// Child node: its graph.
    child: u64,
    moves: bool,
    /// Bounce buffers for memory that cannot be registered.
    shadows: Vec<Shadow>,
}

impl Does {
    fn new(kind: u32, device: u32, bytes: Vec<u8>) -> Does {
        Does {
            kind,
            device,
            bytes,
            by_extra: false,
            child: 0,
            moves: false,
            shadows: Vec::new(),
        }
    }
}

/// The node to add or change.
#[derive(Clone, Copy)]
enum Where {
    /// A new node of a graph.
    Graph(u64),
    /// A node of a graph.
    Node(u64),
    /// A node of an instance.
    Exec(u64, u64),
}

fn current_device() -> Status<u32> {
    graph::device(session()?)
}

fn context_given(handle: u64) -> Status<&'static Context> {
    if handle == 0 {
        return context::current();
    }
    context::by_handle(handle)?.usable()
}

/// Checked before the other arguments: `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
fn not_destroyed(handle: u64) -> Status {
    match context::by_handle(handle) {
        Ok(context) => context.usable().map(drop),
        Err(_) => Ok(()),
    }
}

/// Adds a node or changes a node's parameters.
fn put(place: Where, nodes: &[u64], edges: &[CUgraphEdgeData], does: &Does) -> Status<Added> {
    let (object, exec, change) = match place {
        Where::Graph(graph) => (graph, 0, 0),
        Where::Node(node) => (node, 0, node_flags::CHANGE),
        Where::Exec(exec, node) => (node, exec, node_flags::CHANGE),
    };
    if object == 0 || (matches!(place, Where::Exec(0, _))) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let with_edges = if edges.is_empty() {
        0
    } else {
        node_flags::EDGES
    };
    // Dependencies that do not fit the message are added after the node.
    let at_once = nodes.len().min(mpsshim_proto::message::graph::NODES_MOST);
    let body = GraphNode {
        object,
        exec,
        kind: does.kind,
        device: does.device,
        nodes: at_once as u32,
        flags: change | with_edges,
    };
    let edges_at_once = edges.get(..at_once).unwrap_or(&[]);
    let bytes = [&behind(&nodes[..at_once], edges_at_once)?[..], &does.bytes].concat();
    let session = session()?;
    let added = graph::node(session, &body, &bytes)?;
    let node = match place {
        Where::Graph(graph) => {
            if at_once < nodes.len() {
                super::graph::add_late(graph, &nodes[at_once..], added.node, edges)?;
            }
            if !does.shadows.is_empty() {
                shadow::attach(graph, added.node, &does.shadows);
            }
            if does.child != 0 {
                graph::inherit(does.child, graph);
                let holder = Holder::Node {
                    node: added.node,
                    graph,
                };
                user_object::copy(does.child, holder);
                if does.moves {
                    user_object::end(Holder::Graph(does.child));
                }
            }
            if added.address != 0 {
                let len = CUDA_MEM_ALLOC_NODE_PARAMS::read_from_prefix(&does.bytes)
                    .map_or(0, |(params, _)| params.bytes);
                memory::change_graph_memory(|memory| memory.given(added.address, len, graph));
            }
            if does.kind == CU_GRAPH_NODE_TYPE_MEM_FREE
                && let Ok((address, _)) = u64::read_from_prefix(&does.bytes)
            {
                memory::follow_graph_memory(|memory| memory.freed_by(address, graph));
            }
            with_kept(added.node, |kept| kept.graph = graph);
            added.node
        }
        Where::Node(node) => {
            let graph = with_kept(node, |kept| kept.graph);
            shadow::attach(graph, node, &does.shadows);
            node
        }
        Where::Exec(exec, node) => {
            shadow::attach(exec, node, &does.shadows);
            return Ok(added);
        }
    };
    with_kept(node, |kept| kept.by_extra = does.by_extra);
    Ok(added)
}

/// Adds a node of one kind.
fn add(out: Out<u64>, graph: u64, nodes: In<u64>, count: usize, does: Does) -> Status {
    let nodes = elements(nodes, count)?;
    if !graph::all_differ(&nodes) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    out.set(put(Where::Graph(graph), &nodes, &[], &does)?.node)
}

fn change(place: Where, does: &Does) -> Status {
    put(place, &[], &[], does).map(drop)
}

/// Parameters of a kernel node.
fn kernel(params: &CUDA_KERNEL_NODE_PARAMS) -> Status<Does> {
    let handle = match (params.function, params.kernel) {
        (0, 0) => return Err(CUDA_ERROR_INVALID_HANDLE),
        (0, kernel) => kernel,
        (function, _) => module::live_function(function)
            .ok_or(CUDA_ERROR_INVALID_HANDLE)?
            .handle(),
    };
    let function = module::function_in(handle, context_given(params.context)?)?;
    if function.layout().system_scope() {
        pages::share(session()?, true)?;
    }
    // SAFETY: the program's pointers, as CUDA documents these fields.
    let (pointers, extra) = unsafe { (In::inside(params.params), In::inside(params.extra)) };
    let packed = launch::packed(function, pointers, extra)?;
    let node = KernelNode {
        function: function.handle(),
        grid: params.grid,
        block: params.block,
        shared: params.shared,
        param_len: packed.len() as u32,
    };
    let bytes = [node.as_bytes(), &packed].concat();
    let device = function.context().server_device;
    let mut does = Does::new(CU_GRAPH_NODE_TYPE_KERNEL, device, bytes);
    does.by_extra = params.params == 0 && params.extra != 0;
    Ok(does)
}

/// The parameters of a kernel node in the form of CUDA 10.0.
fn widened(params: In<[u64; KERNEL_V1]>) -> Status<CUDA_KERNEL_NODE_PARAMS> {
    let mut wide = CUDA_KERNEL_NODE_PARAMS::new_zeroed();
    wide.as_mut_bytes()[..KERNEL_V1 * 8].copy_from_slice(params.get()?.as_bytes());
    Ok(wide)
}

/// `cuGraphAddKernelNode` as of CUDA 10.0.
pub unsafe extern "C" fn add_kernel_v1(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    params: In<[u64; KERNEL_V1]>,
) -> CUresult {
    guard(|| {
        out.required()?;
        add(out, graph, nodes, count, kernel(&widened(params)?)?)
    })
}

/// `cuGraphAddKernelNode` as of CUDA 12.0.
pub unsafe extern "C" fn add_kernel(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    params: In<CUDA_KERNEL_NODE_PARAMS>,
) -> CUresult {
    guard(|| {
        out.required()?;
        add(out, graph, nodes, count, kernel(&params.get()?)?)
    })
}

/// `cuGraphKernelNodeSetParams` as of CUDA 10.0.
pub unsafe extern "C" fn set_kernel_v1(node: u64, params: In<[u64; KERNEL_V1]>) -> CUresult {
    guard(|| change(Where::Node(node), &kernel(&widened(params)?)?))
}

/// `cuGraphKernelNodeSetParams` as of CUDA 12.0.
pub unsafe extern "C" fn set_kernel(node: u64, params: In<CUDA_KERNEL_NODE_PARAMS>) -> CUresult {
    guard(|| change(Where::Node(node), &kernel(&params.get()?)?))
}

/// `cuGraphExecKernelNodeSetParams` as of CUDA 10.1.
pub unsafe extern "C" fn exec_set_kernel_v1(
    exec: u64,
    node: u64,
    params: In<[u64; KERNEL_V1]>,
) -> CUresult {
    guard(|| change(Where::Exec(exec, node), &kernel(&widened(params)?)?))
}

/// `cuGraphExecKernelNodeSetParams` as of CUDA 12.0.
pub unsafe extern "C" fn exec_set_kernel(
    exec: u64,
    node: u64,
    params: In<CUDA_KERNEL_NODE_PARAMS>,
) -> CUresult {
    guard(|| change(Where::Exec(exec, node), &kernel(&params.get()?)?))
}

/// Gets a kernel node's parameters, with pointers into memory that is kept for the node.
fn kernel_of(node: u64) -> Status<CUDA_KERNEL_NODE_PARAMS> {
    let (is, packed): (KernelNode, _) = get_node_of(session()?, node, CU_GRAPH_NODE_TYPE_KERNEL)?;
    let function = module::live_function(is.function);
    let mut params = CUDA_KERNEL_NODE_PARAMS {
        function: is.function,
        grid: is.grid,
        block: is.block,
        shared: is.shared,
        context: function.map_or(0, |function| function.context().handle),
        // The runtime looks up its own kernel by this handle, however the node was created.
        kernel: function.map_or(0, module::kernel_of),
        ..CUDA_KERNEL_NODE_PARAMS::default()
    };
    with_kept(node, |kept| {
        if kept.bytes != packed {
            kept.bytes = packed;
        }
        let base = kept.bytes.as_ptr() as u64;
        let layout = function.map(|function| function.layout());
        let pointers: Vec<u64> = if kept.by_extra {
            // The list is followed by the length that it points to.
            let mut list = vec![
                CU_LAUNCH_PARAM_BUFFER_POINTER as u64,
                base,
                CU_LAUNCH_PARAM_BUFFER_SIZE as u64,
                0,
                CU_LAUNCH_PARAM_END as u64,
                kept.bytes.len() as u64,
            ];
            if kept.words.len() != list.len() {
                kept.words = list.clone();
            }
            list[3] = kept.words.as_ptr() as u64 + 5 * 8;
            list
        } else {
            let layout = layout.map_or(&[][..], |layout| &layout.params);
            layout.iter().map(|p| base + p.offset as u64).collect()
        };
        if kept.words.len() == pointers.len() {
            // Updated in place, so that pointers given to the program stay valid.
            kept.words.copy_from_slice(&pointers);
        } else {
            kept.words = pointers;
        }
        if kept.by_extra {
            params.extra = kept.words.as_ptr() as u64;
        } else if !kept.words.is_empty() {
            params.params = kept.words.as_ptr() as u64;
        }
    });
    Ok(params)
}

/// `cuGraphKernelNodeGetParams` as of CUDA 10.0.
pub unsafe extern "C" fn get_kernel_v1(node: u64, out: Out<[u64; KERNEL_V1]>) -> CUresult {
    guard(|| {
        out.required()?;
        let params = kernel_of(node)?;
        let words = <[u64; KERNEL_V1]>::read_from_prefix(params.as_bytes());
        out.set(words.map_err(|_| CUDA_ERROR_UNKNOWN)?.0)
    })
}

/// `cuGraphKernelNodeGetParams` as of CUDA 12.0.
pub unsafe extern "C" fn get_kernel(node: u64, out: Out<CUDA_KERNEL_NODE_PARAMS>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(kernel_of(node)?)
    })
}

fn attribute(node: u64, id: u32, value: Option<[u64; 8]>) -> Status<[u64; 8]> {
    let body = GraphAttribute {
        node,
        id,
        set: u32::from(value.is_some()),
        value: value.unwrap_or_default(),
    };
    let is: GraphAttribute = session()?.request(Op::GraphAttribute, &body, &[])?.read()?;
    Ok(is.value)
}

/// `cuGraphKernelNodeGetAttribute`.
pub unsafe extern "C" fn get_attribute(node: u64, id: u32, out: Out<[u64; 8]>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(attribute(node, id, None)?)
    })
}

/// `cuGraphKernelNodeSetAttribute`.
pub unsafe extern "C" fn set_attribute(node: u64, id: u32, value: In<[u64; 8]>) -> CUresult {
    guard(|| attribute(node, id, Some(value.get()?)).map(drop))
}

/// `cuGraphKernelNodeCopyAttributes`.
pub unsafe extern "C" fn copy_attributes(to: u64, from: u64) -> CUresult {
    guard(|| {
        let body = GraphPair {
            first: to,
            second: from,
        };
        session()?
            .request(Op::GraphCopyAttributes, &body, &[])?
            .status
            .ok()
    })
}

/// Extent of one side of a copy from its address, bytes.
fn reach(copy: &CUDA_MEMCPY3D, [x, y, z]: [u64; 3], pitch: u64, rows: u64) -> Option<u64> {
    let pitch = if pitch == 0 { copy.width } else { pitch };
    let rows = if rows == 0 { copy.height } else { rows };
    let last = |count: u64, first: u64| count.max(1).checked_add(first)?.checked_sub(1);
    pitch
        .checked_mul(rows)?
        .checked_mul(last(copy.depth, z)?)?
        .checked_add(pitch.checked_mul(last(copy.height, y)?)?)?
        .checked_add(copy.width)?
        .checked_add(x)
}

/// One side of a copy as the server accesses it: kind, host address, device address.
fn side(
    context: &'static Context,
    kind: u32,
    (host, device): (u64, u64),
    len: Option<u64>,
    shadows: &mut Vec<Shadow>,
    written: bool,
) -> Status<(u32, u64, u64)> {
    let len = len.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let address = match kind {
        CU_MEMORYTYPE_HOST => host,
        CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => device,
        _ => return Ok((kind, host, device)),
    };
    if address == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match memory::place(address, len)? {
        Place::Device(_) if kind == CU_MEMORYTYPE_HOST => Err(CUDA_ERROR_INVALID_VALUE),
        Place::Device(address) => Ok((kind, 0, address)),
        Place::Pinned(address) if kind == CU_MEMORYTYPE_HOST => Ok((kind, address, 0)),
        Place::Pinned(address) => Ok((kind, 0, address)),
        Place::Pageable(_) if kind == CU_MEMORYTYPE_DEVICE => Err(CUDA_ERROR_INVALID_VALUE),
        Place::Pageable(address) => {
            let arena = shadow::reach(session()?, context, (address, len), written, shadows)?;
            Ok((CU_MEMORYTYPE_HOST, arena, 0))
        }
    }
}

/// Parameters of a copy node.
fn memcpy(copy: CUDA_MEMCPY3D, context: u64) -> Status<Does> {
    let context = context_given(context)?;
    let mut copy = copy;
    let from = reach(
        &copy,
        [copy.src_x, copy.src_y, copy.src_z],
        copy.src_pitch,
        copy.src_height,
    );
    let to = reach(
        &copy,
        [copy.dst_x, copy.dst_y, copy.dst_z],
        copy.dst_pitch,
        copy.dst_height,
    );
    let mut shadows = Vec::new();
    let source = (copy.src_host, copy.src_device);
    (copy.src_type, copy.src_host, copy.src_device) =
        side(context, copy.src_type, source, from, &mut shadows, false)?;
    let target = (copy.dst_host, copy.dst_device);
    (copy.dst_type, copy.dst_host, copy.dst_device) =
        side(context, copy.dst_type, target, to, &mut shadows, true)?;
    let bytes = copy.as_bytes().to_vec();
    let mut does = Does::new(CU_GRAPH_NODE_TYPE_MEMCPY, context.server_device, bytes);
    does.shadows = shadows;
    Ok(does)
}

/// `cuGraphAddMemcpyNode`.
pub unsafe extern "C" fn add_memcpy(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    params: In<CUDA_MEMCPY3D>,
    context: u64,
) -> CUresult {
    guard(|| {
        not_destroyed(context)?;
        out.required()?;
        add(out, graph, nodes, count, memcpy(params.get()?, context)?)
    })
}

/// `cuGraphMemcpyNodeSetParams`.
pub unsafe extern "C" fn set_memcpy(node: u64, params: In<CUDA_MEMCPY3D>) -> CUresult {
    guard(|| change(Where::Node(node), &memcpy(params.get()?, 0)?))
}

/// `cuGraphExecMemcpyNodeSetParams`.
pub unsafe extern "C" fn exec_set_memcpy(
    exec: u64,
    node: u64,
    params: In<CUDA_MEMCPY3D>,
    context: u64,
) -> CUresult {
    guard(|| {
        not_destroyed(context)?;
        change(Where::Exec(exec, node), &memcpy(params.get()?, context)?)
    })
}

/// `cuGraphMemcpyNodeGetParams`.
pub unsafe extern "C" fn get_memcpy(node: u64, out: Out<CUDA_MEMCPY3D>) -> CUresult {
    guard(|| {
        out.required()?;
        let (mut copy, _): (CUDA_MEMCPY3D, _) =
            get_node_of(session()?, node, CU_GRAPH_NODE_TYPE_MEMCPY)?;
        for address in [
            &mut copy.src_host,
            &mut copy.src_device,
            &mut copy.dst_host,
            &mut copy.dst_device,
        ] {
            *address = shadow::program_address(memory::program_address(*address));
        }
        out.set(copy)
    })
}

/// Parameters of a memset node.
fn memset(params: CUDA_MEMSET_NODE_PARAMS, context: u64) -> Status<Does> {
    let context = context_given(context)?;
    let mut params = params;
    if let Some((start, registered)) = memory::registered(params.to) {
        params.to = registered.arena + (params.to - start);
    }
    Ok(Does::new(
        CU_GRAPH_NODE_TYPE_MEMSET,
        context.server_device,
        params.as_bytes().to_vec(),
    ))
}

/// `cuGraphAddMemsetNode`.
pub unsafe extern "C" fn add_memset(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    params: In<CUDA_MEMSET_NODE_PARAMS>,
    context: u64,
) -> CUresult {
    guard(|| {
        not_destroyed(context)?;
        out.required()?;
        add(out, graph, nodes, count, memset(params.get()?, context)?)
    })
}

/// `cuGraphMemsetNodeSetParams`.
pub unsafe extern "C" fn set_memset(node: u64, params: In<CUDA_MEMSET_NODE_PARAMS>) -> CUresult {
    guard(|| change(Where::Node(node), &memset(params.get()?, 0)?))
}

/// `cuGraphExecMemsetNodeSetParams`.
pub unsafe extern "C" fn exec_set_memset(
    exec: u64,
    node: u64,
    params: In<CUDA_MEMSET_NODE_PARAMS>,
    context: u64,
) -> CUresult {
    guard(|| {
        not_destroyed(context)?;
        change(Where::Exec(exec, node), &memset(params.get()?, context)?)
    })
}

/// `cuGraphMemsetNodeGetParams`.
pub unsafe extern "C" fn get_memset(node: u64, out: Out<CUDA_MEMSET_NODE_PARAMS>) -> CUresult {
    guard(|| {
        out.required()?;
        let (mut params, _): (CUDA_MEMSET_NODE_PARAMS, _) =
            get_node_of(session()?, node, CU_GRAPH_NODE_TYPE_MEMSET)?;
        params.to = memory::program_address(params.to);
        out.set(params)
    })
}

/// `cuGraphAddEmptyNode`.
pub unsafe extern "C" fn add_empty(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
) -> CUresult {
    guard(|| {
        out.required()?;
        let does = Does::new(CU_GRAPH_NODE_TYPE_EMPTY, current_device()?, Vec::new());
        add(out, graph, nodes, count, does)
    })
}

/// Parameters of a child node.
fn child(params: CUDA_CHILD_GRAPH_NODE_PARAMS) -> Status<Does> {
    let bytes = params.as_bytes().to_vec();
    let mut does = Does::new(CU_GRAPH_NODE_TYPE_GRAPH, current_device()?, bytes);
    does.child = params.graph;
    does.moves = params.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    Ok(does)
}

fn copied_child(graph: u64) -> Status<Does> {
    child(CUDA_CHILD_GRAPH_NODE_PARAMS {
        graph,
        ownership: 0,
        pad: 0,
    })
}

/// `cuGraphAddChildGraphNode`.
pub unsafe extern "C" fn add_child(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    inner: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        add(out, graph, nodes, count, copied_child(inner)?)
    })
}

/// `cuGraphExecChildGraphNodeSetParams`.
pub unsafe extern "C" fn exec_set_child(exec: u64, node: u64, inner: u64) -> CUresult {
    guard(|| change(Where::Exec(exec, node), &copied_child(inner)?))
}

/// `cuGraphChildGraphNodeGetGraph`.
pub unsafe extern "C" fn get_child(node: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(get_node_of(session()?, node, CU_GRAPH_NODE_TYPE_GRAPH)?.0)
    })
}

/// Parameters of an event record or event wait node.
fn of_event(kind: u32, event: u64) -> Status<Does> {
    graph::refer_to_event(event)?;
    Ok(Does::new(
        kind,
        current_device()?,
        event.as_bytes().to_vec(),
    ))
}

/// `cuGraphAddEventRecordNode`.
pub unsafe extern "C" fn add_record(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    event: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        let does = of_event(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event)?;
        add(out, graph, nodes, count, does)
    })
}

/// `cuGraphAddEventWaitNode`.
pub unsafe extern "C" fn add_wait(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    event: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        let does = of_event(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event)?;
        add(out, graph, nodes, count, does)
    })
}

/// `cuGraphEventRecordNodeGetEvent`.
pub unsafe extern "C" fn get_record(node: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(get_node_of(session()?, node, CU_GRAPH_NODE_TYPE_EVENT_RECORD)?.0)
    })
}

/// `cuGraphEventWaitNodeGetEvent`.
pub unsafe extern "C" fn get_wait(node: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(get_node_of(session()?, node, CU_GRAPH_NODE_TYPE_WAIT_EVENT)?.0)
    })
}

/// `cuGraphEventRecordNodeSetEvent`.
pub unsafe extern "C" fn set_record(node: u64, event: u64) -> CUresult {
    guard(|| {
        change(
            Where::Node(node),
            &of_event(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event)?,
        )
    })
}

/// `cuGraphEventWaitNodeSetEvent`.
pub unsafe extern "C" fn set_wait(node: u64, event: u64) -> CUresult {
    guard(|| {
        change(
            Where::Node(node),
            &of_event(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event)?,
        )
    })
}

/// `cuGraphExecEventRecordNodeSetEvent`.
pub unsafe extern "C" fn exec_set_record(exec: u64, node: u64, event: u64) -> CUresult {
    guard(|| {
        let does = of_event(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event)?;
        change(Where::Exec(exec, node), &does)
    })
}

/// `cuGraphExecEventWaitNodeSetEvent`.
pub unsafe extern "C" fn exec_set_wait(exec: u64, node: u64, event: u64) -> CUresult {
    guard(|| {
        let does = of_event(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event)?;
        change(Where::Exec(exec, node), &does)
    })
}

/// Parameters of an allocation node.
fn alloc(params: CUDA_MEM_ALLOC_NODE_PARAMS) -> Status<Does> {
    let session = session()?;
    let attached = |ordinal: i32| {
        context::device(ordinal)
            .and_then(|device| device.attach(session))
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)
    };
    if params.access_count as usize > MANY {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the program's array, as CUDA documents this field.
    let given: In<Access> = unsafe { In::inside(params.access) };
    let mut access = elements(given, params.access_count as usize)?;
    for access in &mut access {
        access.id = attached(access.id)? as i32;
    }
    let mut sent = params;
    sent.location = attached(params.location as i32)?;
    (sent.access, sent.security) = (0, 0);
    let device = sent.location;
    let bytes = [sent.as_bytes(), access.as_bytes()].concat();
    Ok(Does::new(CU_GRAPH_NODE_TYPE_MEM_ALLOC, device, bytes))
}

/// `cuGraphAddMemAllocNode`.
pub unsafe extern "C" fn add_alloc(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    params: Out<CUDA_MEM_ALLOC_NODE_PARAMS>,
) -> CUresult {
    guard(|| {
        out.required()?;
        let mut given = params.get()?;
        let nodes = elements(nodes, count)?;
        let added = put(Where::Graph(graph), &nodes, &[], &alloc(given)?)?;
        given.address = added.address;
        params.set(given)?;
        out.set(added.node)
    })
}

/// `cuGraphMemAllocNodeGetParams`.
pub unsafe extern "C" fn get_alloc(node: u64, out: Out<CUDA_MEM_ALLOC_NODE_PARAMS>) -> CUresult {
    guard(|| {
        out.required()?;
        let (mut params, rest): (CUDA_MEM_ALLOC_NODE_PARAMS, _) =
            get_node_of(session()?, node, CU_GRAPH_NODE_TYPE_MEM_ALLOC)?;
        let ordinal = |server: u32| context::ordinal_of(server).unwrap_or(0);
        params.location = ordinal(params.location) as u32;
        let mut access: Vec<Access> = read_all(&rest);
        for access in &mut access {
            access.id = ordinal(access.id as u32);
        }
        with_kept(node, |kept| {
            if kept.bytes != access.as_bytes() {
                kept.bytes = access.as_bytes().to_vec();
            }
            params.access_count = access.len() as u64;
            params.access = if access.is_empty() {
                0
            } else {
                kept.bytes.as_ptr() as u64
            };
        });
        out.set(params)
    })
}

/// Parameters of a free node.
fn free(address: u64) -> Status<Does> {
    let bytes = address.as_bytes().to_vec();
    Ok(Does::new(
        CU_GRAPH_NODE_TYPE_MEM_FREE,
        current_device()?,
        bytes,
    ))
}

/// `cuGraphAddMemFreeNode`.
pub unsafe extern "C" fn add_free(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    address: u64,
) -> CUresult {
    guard(|| {
        out.required()?;
        add(out, graph, nodes, count, free(address)?)
    })
}

/// `cuGraphMemFreeNodeGetParams`.
pub unsafe extern "C" fn get_free(node: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(get_node_of(session()?, node, CU_GRAPH_NODE_TYPE_MEM_FREE)?.0)
    })
}

/// Parameters of a node of stream memory operations.
fn batch(params: CUDA_BATCH_MEM_OP_NODE_PARAMS) -> Status<Does> {
    let context = context_given(params.context)?;
    if params.count as usize > MANY {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the program's array, as CUDA documents this field.
    let given: In<[u64; 6]> = unsafe { In::inside(params.operations) };
    let mut operations = elements(given, params.count as usize)?;
    for operation in &mut operations {
        if let Some((start, registered)) = memory::registered(operation[1]) {
            operation[1] = registered.arena + (operation[1] - start);
        }
    }
    let node = BatchNode {
        count: params.count,
        flags: params.flags,
    };
    let bytes = [node.as_bytes(), operations.as_bytes()].concat();
    Ok(Does::new(
        CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
        context.server_device,
        bytes,
    ))
}

/// `cuGraphAddBatchMemOpNode`.
pub unsafe extern "C" fn add_batch(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    params: In<CUDA_BATCH_MEM_OP_NODE_PARAMS>,
) -> CUresult {
    guard(|| {
        out.required()?;
        add(out, graph, nodes, count, batch(params.get()?)?)
    })
}

/// `cuGraphBatchMemOpNodeSetParams`.
pub unsafe extern "C" fn set_batch(
    node: u64,
    params: In<CUDA_BATCH_MEM_OP_NODE_PARAMS>,
) -> CUresult {
    guard(|| change(Where::Node(node), &batch(params.get()?)?))
}

/// `cuGraphExecBatchMemOpNodeSetParams`.
pub unsafe extern "C" fn exec_set_batch(
    exec: u64,
    node: u64,
    params: In<CUDA_BATCH_MEM_OP_NODE_PARAMS>,
) -> CUresult {
    guard(|| change(Where::Exec(exec, node), &batch(params.get()?)?))
}

/// `cuGraphBatchMemOpNodeGetParams`.
pub unsafe extern "C" fn get_batch(node: u64, out: Out<CUDA_BATCH_MEM_OP_NODE_PARAMS>) -> CUresult {
    guard(|| {
        out.required()?;
        let session = session()?;
        let (is, bytes) = graph::get_node(session, node)?;
        if is.kind != CU_GRAPH_NODE_TYPE_BATCH_MEM_OP {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (batch, rest) =
            BatchNode::read_from_prefix(&bytes).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let mut operations: Vec<[u64; 6]> = read_all(rest);
        for operation in &mut operations {
            operation[1] = memory::program_address(operation[1]);
        }
        let context = context::ordinal_of(is.device)
            .and_then(|ordinal| context::device(ordinal).ok()?.primary(ordinal).ok());
        let context = context::top()
            .filter(|top| top.server_device == is.device)
            .or(context);
        let mut params = CUDA_BATCH_MEM_OP_NODE_PARAMS {
            context: context.map_or(0, |context| context.handle),
            count: batch.count,
            flags: batch.flags,
            ..CUDA_BATCH_MEM_OP_NODE_PARAMS::default()
        };
        with_kept(node, |kept| {
            if kept.bytes != operations.as_bytes() {
                kept.bytes = operations.as_bytes().to_vec();
            }
            params.operations = kept.bytes.as_ptr() as u64;
        });
        out.set(params)
    })
}

/// Parameters of a host node.
fn host(params: HostParams) -> Status<Does> {
    let function = params.function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let node = HostNode {
        token: graph_host::token(function, params.data),
        pad: 0,
    };
    let bytes = node.as_bytes().to_vec();
    let device = graph::device(session()?)?;
    Ok(Does::new(CU_GRAPH_NODE_TYPE_HOST, device, bytes))
}

/// `cuGraphAddHostNode`.
pub unsafe extern "C" fn add_host(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    params: In<HostParams>,
) -> CUresult {
    guard(|| {
        out.required()?;
        add(out, graph, nodes, count, host(params.get()?)?)
    })
}

/// `cuGraphHostNodeSetParams`.
pub unsafe extern "C" fn set_host(node: u64, params: In<HostParams>) -> CUresult {
    guard(|| change(Where::Node(node), &host(params.get()?)?))
}

/// `cuGraphExecHostNodeSetParams`.
pub unsafe extern "C" fn exec_set_host(exec: u64, node: u64, params: In<HostParams>) -> CUresult {
    guard(|| change(Where::Exec(exec, node), &host(params.get()?)?))
}

/// `cuGraphHostNodeGetParams`.
pub unsafe extern "C" fn get_host(node: u64, out: Out<HostParams>) -> CUresult {
    guard(|| {
        out.required()?;
        let (is, _): (HostNode, _) = get_node_of(session()?, node, CU_GRAPH_NODE_TYPE_HOST)?;
        let (function, data) = graph_host::function(is.token)?;
        out.set(HostParams {
            function: Some(function),
            data,
        })
    })
}

/// `cuGraphConditionalHandleCreate`.
pub unsafe extern "C" fn create_condition(
    out: Out<u64>,
    graph: u64,
    context: u64,
    default: u32,
    flags: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        if graph == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // 0 does not stand for the current one.
        let context = context::by_handle(context)?.usable()?;
        let body = GraphCondition {
            graph,
            device: context.server_device,
            default,
            flags,
            pad: 0,
        };
        let made: Value = session()?.request(Op::GraphCondition, &body, &[])?.read()?;
        out.set(made.value)
    })
}

/// The struct of a kind in the union of `CUgraphNodeParams`.
fn of_kind<T: FromBytes + IntoBytes + Immutable>(params: &CUgraphNodeParams) -> T {
    let mut read = T::new_zeroed();
    let len = size_of::<T>();
    read.as_mut_bytes()
        .copy_from_slice(&params.words.as_bytes()[..len]);
    read
}

/// Parameters of a node of any kind.
fn any(params: &CUgraphNodeParams) -> Status<Does> {
    if params.reserved0 != [0; 3] || params.reserved2 != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match params.kind {
        CU_GRAPH_NODE_TYPE_KERNEL => kernel(&of_kind(params)),
        CU_GRAPH_NODE_TYPE_MEMCPY => {
            let mut copy = CUDA_MEMCPY3D::new_zeroed();
            let len = size_of::<CUDA_MEMCPY3D>();
            copy.as_mut_bytes()
                .copy_from_slice(&params.words.as_bytes()[16..16 + len]);
            memcpy(copy, params.words[1])
        }
        CU_GRAPH_NODE_TYPE_MEMSET => memset(of_kind(params), params.words[5]),
        CU_GRAPH_NODE_TYPE_EMPTY => Ok(Does::new(params.kind, current_device()?, Vec::new())),
        CU_GRAPH_NODE_TYPE_GRAPH => child(of_kind(params)),
        CU_GRAPH_NODE_TYPE_WAIT_EVENT | CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
            of_event(params.kind, params.words[0])
        }
        CU_GRAPH_NODE_TYPE_MEM_ALLOC => alloc(of_kind(params)),
        CU_GRAPH_NODE_TYPE_MEM_FREE => free(params.words[0]),
        CU_GRAPH_NODE_TYPE_HOST => {
            // SAFETY: null or the program's function, as CUDA documents the struct of this kind.
            let given: In<HostParams> = unsafe { In::inside(params.words.as_ptr() as u64) };
            host(given.get()?)
        }
        CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => batch(of_kind(params)),
        CU_GRAPH_NODE_TYPE_CONDITIONAL => {
            let given: CUDA_CONDITIONAL_NODE_PARAMS = of_kind(params);
            let device = context_given(given.context)?.server_device;
            let sent = CUDA_CONDITIONAL_NODE_PARAMS {
                graphs: 0,
                context: 0,
                ..given
            };
            let bytes = sent.as_bytes().to_vec();
            Ok(Does::new(params.kind, device, bytes))
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn add_of_any_kind(
    out: Out<u64>,
    graph: u64,
    (nodes, count): (In<u64>, usize),
    edges: In<CUgraphEdgeData>,
    params: Out<CUgraphNodeParams>,
) -> Status {
    out.required()?;
    let mut given = params.get()?;
    let does = any(&given)?;
    let (nodes, edges) = (elements(nodes, count)?, elements_if_any(edges, count)?);
    let added = put(Where::Graph(graph), &nodes, &edges, &does)?;
    match given.kind {
        CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
            let mut alloc: CUDA_MEM_ALLOC_NODE_PARAMS = of_kind(&given);
            alloc.address = added.address;
            let len = size_of::<CUDA_MEM_ALLOC_NODE_PARAMS>();
            given.words.as_mut_bytes()[..len].copy_from_slice(alloc.as_bytes());
            params.set(given)?;
        }
        CU_GRAPH_NODE_TYPE_CONDITIONAL => {
            let mut conditional: CUDA_CONDITIONAL_NODE_PARAMS = of_kind(&given);
            conditional.graphs = with_kept(added.node, |kept| {
                kept.words = added.graphs;
                kept.words.as_ptr() as u64
            });
            let len = size_of::<CUDA_CONDITIONAL_NODE_PARAMS>();
            given.words.as_mut_bytes()[..len].copy_from_slice(conditional.as_bytes());
            params.set(given)?;
        }
        _ => {}
    }
    out.set(added.node)
}

/// `cuGraphAddNode` as of CUDA 12.2.
pub unsafe extern "C" fn add_any_v1(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    count: usize,
    params: Out<CUgraphNodeParams>,
) -> CUresult {
    guard(|| add_of_any_kind(out, graph, (nodes, count), In::none(), params))
}

/// `cuGraphAddNode` as of CUDA 12.3: with edge data.
pub unsafe extern "C" fn add_any(
    out: Out<u64>,
    graph: u64,
    nodes: In<u64>,
    edges: In<CUgraphEdgeData>,
    count: usize,
    params: Out<CUgraphNodeParams>,
) -> CUresult {
    guard(|| add_of_any_kind(out, graph, (nodes, count), edges, params))
}

/// `cuGraphNodeSetParams`.
pub unsafe extern "C" fn set_any(node: u64, params: In<CUgraphNodeParams>) -> CUresult {
    guard(|| change(Where::Node(node), &any(&params.get()?)?))
}

/// `cuGraphExecNodeSetParams`.
pub unsafe extern "C" fn exec_set_any(
    exec: u64,
    node: u64,
    params: In<CUgraphNodeParams>,
) -> CUresult {
    guard(|| change(Where::Exec(exec, node), &any(&params.get()?)?))
}
