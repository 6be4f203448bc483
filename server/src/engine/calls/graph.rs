//! Graphs: made, filled, instantiated, launched.
//!
//! What a node does comes as the client sees it; the driver's handles are put in here, and addresses are checked as
//! those of the calls that nodes stand for. Nodes are always made and changed by the functions that take any kind.

use super::super::Shared;
use super::super::arrays::RawArray;
use super::super::graphs::{Exec, Owner};
use super::super::session::{CallError, Session};
use super::Reply;
use super::capture::{all_nodes, take};
use super::stream::{first_word, set_first_word};
use mpsshim_proto::cuda::*;
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::graph::{
    Access, BatchNode, GraphAttribute, GraphCondition, GraphCreate, GraphDependencies, GraphDot,
    GraphEnabled, GraphInstantiate, GraphInstantiated, GraphLaunch, GraphList, GraphListed,
    GraphMemory, GraphNode, GraphNodeAdded, GraphNodeIs, GraphPair, GraphUpdated, HostNode,
    KernelNode, LIST_MOST, NODES_MOST, graph_memory, list, node_flags,
};
use mpsshim_proto::message::{Object, PARAMS_MAX, Value};
use mpsshim_proto::ring::Message;
use mpsshim_proto::segment::{ARRIVED, FLAG_STRIDE, FLAGS, RETURNED};
use mpsshim_proto::shm;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Stream memory operations in one node, at most: the driver's own limit.
const OPERATIONS_MOST: u32 = 256;
/// What a host node is made of: the client is told, waited for, and its word cleared.
const HOST_OPERATIONS: usize = 3;
/// Graphs inside graphs, at most.
const DEPTH: usize = 64;
/// Bodies of a conditional node, at most.
const BODIES_MOST: u32 = 1024;
/// Access descriptors of an allocation, at most.
const ACCESS_MOST: u64 = 64;
/// Bytes of the text of a graph, at most.
const DOT_MOST: usize = 256 << 20;

/// What a node does in the driver's form, and what that refers to. The addresses in `params` lead into the boxes,
/// which stay where they are.
struct Described {
    params: CUgraphNodeParams,
    _bytes: Vec<u8>,
    _pointers: Vec<u64>,
    _operations: Vec<[u64; 6]>,
    _access: Vec<CUmemAccessDesc>,
    /// A kernel of it may print.
    prints: bool,
    /// Image or event that the graph refers to.
    refers: Option<u64>,
}

/// Offset and size of each parameter of a function. Packed parameters would do as well, but not with every attribute
/// that a node may get later.
fn layout(shared: &Shared, function: CUfunction) -> Vec<(usize, usize)> {
    let mut layout = Vec::new();
    let (mut offset, mut size) = (0, 0);
    while shared
        .driver
        .func_get_param_info(function, layout.len(), &mut offset, &mut size)
        .is_ok()
        && offset + size <= PARAMS_MAX
    {
        layout.push((offset, size));
    }
    layout
}

impl Described {
    /// A host node is one of stream memory operations for the driver.
    fn host(&mut self, operations: [[u64; 6]; HOST_OPERATIONS], context: CUcontext) {
        self._operations = operations.to_vec();
        self.params.kind = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
        let batch = CUDA_BATCH_MEM_OP_NODE_PARAMS {
            context: context.0,
            count: HOST_OPERATIONS as u32,
            operations: self._operations.as_ptr() as u64,
            ..CUDA_BATCH_MEM_OP_NODE_PARAMS::default()
        };
        into_words(&mut self.params, &batch);
    }

    fn new(kind: u32) -> Described {
        Described {
            params: CUgraphNodeParams {
                kind,
                ..CUgraphNodeParams::default()
            },
            _bytes: Vec::new(),
            _pointers: Vec::new(),
            _operations: Vec::new(),
            _access: Vec::new(),
            prints: false,
            refers: None,
        }
    }
}

fn into_words<T: IntoBytes + Immutable>(params: &mut CUgraphNodeParams, body: &T) {
    let bytes = body.as_bytes();
    params.words.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
}

fn out_of_words<T: FromBytes + IntoBytes>(params: &CUgraphNodeParams) -> T {
    let mut body = T::new_zeroed();
    let len = size_of::<T>();
    body.as_mut_bytes()
        .copy_from_slice(&params.words.as_bytes()[..len]);
    body
}

fn one<T: FromBytes>(bytes: &mut &[u8]) -> Result<T, CallError> {
    take(bytes, 1)?
        .pop()
        .ok_or_else(|| CallError::Violation("a node without its parameters".into()))
}

impl Session {
    /// `cuGraphCreate`.
    pub fn graph_create(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphCreate = self.body(message)?;
        shared.device(body.device)?.make_current(&shared.driver)?;
        let mut raw = CUgraph::NULL;
        shared.driver.graph.create(&mut raw, body.flags)?;
        self.new_graph(shared, raw, body.device as usize)
    }

    fn new_graph(&mut self, shared: &Shared, raw: CUgraph, device: usize) -> Reply {
        match self.graphs.graph_handle(raw, device, Owner::Client) {
            Ok(handle) => Ok(super::value(handle)),
            Err(status) => {
                let _ = shared.driver.graph.destroy(raw);
                Err(status.into())
            }
        }
    }

    /// The driver's graph of a handle, its context made current.
    fn graph_ready(&self, shared: &Shared, handle: u64) -> Result<(CUgraph, usize), CUresult> {
        let graph = self.graphs.graphs.get(handle)?;
        shared.devices[graph.device].make_current(&shared.driver)?;
        Ok((graph.raw, graph.device))
    }

    /// The driver's node of a handle, its context made current; the graph it is in.
    fn node_ready(&self, shared: &Shared, handle: u64) -> Result<(CUgraphNode, u64), CUresult> {
        let node = self.graphs.nodes.get(handle)?;
        self.graph_ready(shared, node.graph)?;
        Ok((node.raw, node.graph))
    }

    /// `cuGraphDestroy`.
    pub fn graph_destroy(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Object = self.body(message)?;
        let (raw, _) = self.graph_ready(shared, body.object)?;
        let graph = self.graphs.graphs.get(body.object)?;
        if graph.owner != Owner::Client || graph.filling {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        shared.driver.graph.destroy(raw)?;
        self.graphs.forget_graph(body.object);
        self.drop_kept(shared);
        Ok(Vec::new())
    }

    /// Lets go of what was kept for graphs, if there are none any more.
    fn drop_kept(&mut self, shared: &Shared) {
        let (images, events) = self.graphs.take_kept();
        for image in images {
            shared.discard_image(image);
        }
        for event in events {
            let _ = shared.driver.event_destroy(event.raw);
        }
    }

    /// `cuGraphClone`.
    pub fn graph_clone(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Object = self.body(message)?;
        let (raw, device) = self.graph_ready(shared, body.object)?;
        let mut clone = CUgraph::NULL;
        shared.driver.graph.duplicate(&mut clone, raw)?;
        let made = self.new_graph(shared, clone, device)?;
        if let Ok(handle) = Value::read_from_bytes(&made[..]) {
            self.graphs.memory.share(body.object, handle.value);
        }
        Ok(made)
    }

    /// `cuGraphNodeFindInClone`.
    pub fn graph_find_in_clone(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphPair = self.body(message)?;
        let (node, _) = self.node_ready(shared, body.first)?;
        let (clone, _) = self.graph_ready(shared, body.second)?;
        let mut found = CUgraphNode::NULL;
        shared.driver.graph.find_in_clone(&mut found, node, clone)?;
        Ok(super::value(self.graphs.node_handle(found, body.second)?))
    }

    /// `cuGraphGetNodes`, `cuGraphGetRootNodes`, `cuGraphGetEdges`, `cuGraphNodeGetDependencies`,
    /// `cuGraphNodeGetDependentNodes`: a part of the list.
    pub fn graph_list(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphList = self.body(message)?;
        let driver = &shared.driver.graph;
        let none: *mut CUgraphNode = ptr::null_mut();
        let (graph, node) = match body.what {
            list::DEPENDENCIES | list::DEPENDENTS => {
                let (node, graph) = self.node_ready(shared, body.object)?;
                (graph, node)
            }
            _ => (body.object, CUgraphNode::NULL),
        };
        let (raw, _) = self.graph_ready(shared, graph)?;
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
                let handle = self.graphs.node_handle(*node, graph)?;
                payload.extend_from_slice(handle.as_bytes());
            }
        }
        let edges = edges.get(first..first + part).unwrap_or_default();
        payload.extend_from_slice(edges.as_bytes());
        Ok(payload)
    }

    /// `cuGraphAddDependencies`, `cuGraphRemoveDependencies`.
    pub fn graph_dependencies(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphDependencies = self.body(message)?;
        let count = body.count as usize;
        if count > NODES_MOST {
            return Err(CallError::Violation(format!("{count} dependencies")));
        }
        let bytes = self.trailing::<GraphDependencies>(message)?;
        let mut bytes = &bytes[..];
        let from = self.graphs.raw_nodes(&take::<u64>(&mut bytes, count)?)?;
        let to = self.graphs.raw_nodes(&take::<u64>(&mut bytes, count)?)?;
        let given = if bytes.is_empty() { 0 } else { count };
        let edges: Vec<CUgraphEdgeData> = take(&mut bytes, given)?;
        let edges = if edges.is_empty() {
            ptr::null()
        } else {
            edges.as_ptr()
        };
        let (graph, _) = self.graph_ready(shared, body.graph)?;
        let driver = &shared.driver.graph;
        if body.remove == 0 {
            driver.add_dependencies(graph, from.as_ptr(), to.as_ptr(), edges, count)?;
        } else {
            driver.remove_dependencies(graph, from.as_ptr(), to.as_ptr(), edges, count)?;
        }
        Ok(Vec::new())
    }

    /// `cuGraphAddNode`, `cuGraphNodeSetParams`, `cuGraphExecNodeSetParams` and all those for one kind.
    pub fn graph_node(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphNode = self.body(message)?;
        let edges = body.flags & node_flags::EDGES != 0;
        let behind = self.nodes_behind::<GraphNode>(message, body.nodes, edges)?;
        let change = body.flags & node_flags::CHANGE != 0;
        let device = shared.device(body.device)?;
        let context = device.context().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        let mut described = self.describe(shared, context, body.kind, &behind.rest)?;
        let driver = &shared.driver.graph;
        self.graphs.hosts |= body.kind == CU_GRAPH_NODE_TYPE_HOST;
        if change {
            let (node, _) = self.node_ready(shared, body.object)?;
            if body.kind == CU_GRAPH_NODE_TYPE_HOST && body.exec != 0 {
                let slots = &self.graphs.execs.get(body.exec)?.slots;
                let found = slots.iter().find(|(of, _)| *of == node);
                let (_, slot) = found.ok_or(CUDA_ERROR_INVALID_VALUE)?;
                let host: HostNode = one(&mut &behind.rest[..])?;
                described.host(self.host_operations(*slot, host.token)?, context);
            }
            if body.kind == CU_GRAPH_NODE_TYPE_GRAPH && body.exec != 0 {
                let inner = CUgraph(described.params.words[0]);
                if !self.host_nodes(shared, inner, DEPTH)?.is_empty() {
                    // They would have no slots.
                    return Err(CUDA_ERROR_NOT_SUPPORTED.into());
                }
            }
            self.part_current(shared, body.kind, body.device)?;
            if body.exec == 0 {
                driver.node_set(node, &mut described.params)?;
            } else {
                let exec = self.graphs.execs.get(body.exec)?;
                driver.exec_node_set(exec.raw, node, &mut described.params)?;
            }
            self.note_described(&described, body.exec);
            if body.kind == CU_GRAPH_NODE_TYPE_GRAPH && body.exec == 0 {
                self.graphs.forget_inside(body.object);
            }
            return Ok(GraphNodeAdded::default().as_bytes().to_vec());
        }
        let nodes = self.graphs.raw_nodes(&behind.nodes)?;
        let (graph, _) = self.graph_ready(shared, body.object)?;
        self.part_current(shared, body.kind, body.device)?;
        let mut raw = CUgraphNode::NULL;
        driver.add_node(
            &mut raw,
            graph,
            nodes.as_ptr(),
            behind.edges(),
            nodes.len(),
            &mut described.params,
        )?;
        if body.kind == CU_GRAPH_NODE_TYPE_KERNEL && self.classed {
            let mut value = [0; 8];
            set_first_word(value.as_mut_bytes(), self.raw_priority(0));
            // It decides who goes first, not what comes of it.
            if let Err(status) =
                driver.kernel_attribute_set(raw, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value)
            {
                tracing::debug!(%status, "the priority of a kernel node was not set");
                shared.note_status(status);
            }
        }
        self.note_described(&described, 0);
        let mut added = GraphNodeAdded {
            node: self.graphs.node_handle(raw, body.object)?,
            ..GraphNodeAdded::default()
        };
        let mut bodies = Vec::new();
        match body.kind {
            CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                let given: CUDA_MEM_ALLOC_NODE_PARAMS = out_of_words(&described.params);
                added.address = given.address;
                self.graphs
                    .memory
                    .given(given.address, given.bytes, body.object);
            }
            CU_GRAPH_NODE_TYPE_MEM_FREE => {
                self.graphs
                    .memory
                    .freed_by(described.params.words[0], body.object);
            }
            CU_GRAPH_NODE_TYPE_CONDITIONAL => {
                let given: CUDA_CONDITIONAL_NODE_PARAMS = out_of_words(&described.params);
                let count = if given.graphs == 0 {
                    0
                } else {
                    given.size as usize
                };
                for index in 0..count {
                    // SAFETY: the driver's own array of as many graphs as were asked for, valid as long as the node.
                    let graph = unsafe { *(given.graphs as *const CUgraph).add(index) };
                    bodies.push(graph);
                }
            }
            CU_GRAPH_NODE_TYPE_GRAPH => {
                let given: CUDA_CHILD_GRAPH_NODE_PARAMS = one(&mut &behind.rest[..])?;
                self.graphs.memory.share(given.graph, body.object);
                if given.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE {
                    self.graphs.move_into(given.graph, added.node);
                }
            }
            _ => {}
        }
        added.graphs = bodies.len() as u32;
        let mut payload = added.as_bytes().to_vec();
        for graph in bodies {
            let owner = Owner::Node(added.node);
            let handle = self
                .graphs
                .graph_handle(graph, body.device as usize, owner)?;
            payload.extend_from_slice(handle.as_bytes());
        }
        Ok(payload)
    }

    /// Kernel nodes run where the current context's work runs: here a part of the device, if the session has but that.
    fn part_current(&self, shared: &Shared, kind: u32, device: u32) -> Result<(), CUresult> {
        if kind != CU_GRAPH_NODE_TYPE_KERNEL {
            return Ok(());
        }
        match self.part_of(shared, device as usize)? {
            Some(part) => shared.devices[part.device].make_part_current(&shared.driver, &part),
            None => Ok(()),
        }
    }

    fn note_described(&mut self, described: &Described, exec: u64) {
        if described.prints {
            self.graphs.prints = true;
            if let Ok(exec) = self.graphs.execs.get_mut(exec) {
                exec.prints = true;
            }
        }
        if let Some(handle) = described.refers {
            self.graphs.refer_to(handle);
            // A node records it behind the session's back.
            if let Ok(event) = self.events.get_mut(handle) {
                event.recorded = true;
            }
        }
    }

    /// Puts what a node does into the driver's form, after checking it.
    fn describe(
        &mut self,
        shared: &Shared,
        context: CUcontext,
        kind: u32,
        bytes: &[u8],
    ) -> Result<Described, CallError> {
        let mut described = Described::new(kind);
        let mut bytes = bytes;
        let params = &mut described.params;
        match kind {
            CU_GRAPH_NODE_TYPE_KERNEL => {
                let body: KernelNode = one(&mut bytes)?;
                let function = self.function(shared, body.function)?;
                let len = body.param_len as usize;
                if len > PARAMS_MAX || len > bytes.len() {
                    return Err(CallError::Violation(format!("{len} bytes of parameters")));
                }
                if body.param_len < function.param_bytes {
                    return Err(CUDA_ERROR_INVALID_VALUE.into());
                }
                described.prints = function.prints;
                described.refers = Some(function.image);
                described._bytes = bytes[..len].to_vec();
                let base = described._bytes.as_ptr() as u64;
                for (offset, size) in layout(shared, function.raw) {
                    if offset + size > len {
                        return Err(CUDA_ERROR_INVALID_VALUE.into());
                    }
                    described._pointers.push(base + offset as u64);
                }
                let kernel = CUDA_KERNEL_NODE_PARAMS {
                    function: function.raw.0,
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
                let copy = self.checked_copy(body)?;
                into_words(params, &0u64);
                params.words[1] = context.0;
                params.words.as_mut_bytes()[16..16 + size_of::<CUDA_MEMCPY3D>()]
                    .copy_from_slice(copy.as_bytes());
            }
            CU_GRAPH_NODE_TYPE_MEMSET => {
                let body: CUDA_MEMSET_NODE_PARAMS = one(&mut bytes)?;
                self.check_rows(body.to, body.width, body.height, body.pitch, body.element)?;
                into_words(params, &body);
                params.words[5] = context.0;
            }
            CU_GRAPH_NODE_TYPE_EMPTY => {}
            CU_GRAPH_NODE_TYPE_GRAPH => {
                let mut body: CUDA_CHILD_GRAPH_NODE_PARAMS = one(&mut bytes)?;
                let graph = self.graphs.graphs.get(body.graph)?;
                if graph.owner != Owner::Client
                    && body.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
                    || graph.filling
                {
                    return Err(CUDA_ERROR_INVALID_VALUE.into());
                }
                body.graph = graph.raw.0;
                into_words(params, &body);
            }
            CU_GRAPH_NODE_TYPE_WAIT_EVENT | CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
                let handle: u64 = one(&mut bytes)?;
                params.words[0] = self.events.get(handle)?.raw.0;
                described.refers = Some(handle);
            }
            CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                let mut body: CUDA_MEM_ALLOC_NODE_PARAMS = one(&mut bytes)?;
                if body.access_count > ACCESS_MOST {
                    return Err(CUDA_ERROR_INVALID_VALUE.into());
                }
                body.location = shared.device(body.location)?.raw as u32;
                for access in take::<Access>(&mut bytes, body.access_count as usize)? {
                    described._access.push(CUmemAccessDesc {
                        location: CUmemLocation {
                            kind: access.kind,
                            id: shared.device(access.id as u32)?.raw,
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
                self.check_device(address, 1)?;
                params.words[0] = address;
            }
            CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
                let body: BatchNode = one(&mut bytes)?;
                if body.count > OPERATIONS_MOST {
                    return Err(CUDA_ERROR_INVALID_VALUE.into());
                }
                described._operations = take(&mut bytes, body.count as usize)?;
                for operation in &mut described._operations {
                    self.check_memory_operation(operation)?;
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
                described.host(self.host_operations(0, body.token)?, context);
            }
            CU_GRAPH_NODE_TYPE_CONDITIONAL => {
                let mut body: CUDA_CONDITIONAL_NODE_PARAMS = one(&mut bytes)?;
                // The driver takes the number for what it says.
                if body.size > BODIES_MOST || !self.graphs.conditions.contains_key(&body.handle) {
                    return Err(CUDA_ERROR_INVALID_VALUE.into());
                }
                body.context = context.0;
                body.graphs = 0;
                into_words(params, &body);
            }
            _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
        }
        Ok(described)
    }

    /// Whether a rectangle of device memory is the session's.
    fn check_rows(
        &self,
        to: u64,
        width: u64,
        height: u64,
        pitch: u64,
        element: u32,
    ) -> Result<(), CUresult> {
        let row = width
            .checked_mul(element as u64)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let len = pitch
            .checked_mul(height.saturating_sub(1))
            .and_then(|rows| rows.checked_add(row))
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        self.check_device(to, len)
    }

    /// A copy whose sides are the session's.
    fn checked_copy(&mut self, mut copy: CUDA_MEMCPY3D) -> Result<CUDA_MEMCPY3D, CUresult> {
        let reach = |x: u64, y: u64, z: u64, pitch: u64, height: u64| {
            let pitch = if pitch == 0 { copy.width } else { pitch };
            let plane = pitch.checked_mul(if height == 0 { copy.height } else { height })?;
            let end = |n: u64, at: u64| n.max(1).checked_add(at)?.checked_sub(1);
            plane
                .checked_mul(end(copy.depth, z)?)?
                .checked_add(pitch.checked_mul(end(copy.height, y)?)?)?
                .checked_add(copy.width)?
                .checked_add(x)
        };
        let from = reach(
            copy.src_x,
            copy.src_y,
            copy.src_z,
            copy.src_pitch,
            copy.src_height,
        );
        let to = reach(
            copy.dst_x,
            copy.dst_y,
            copy.dst_z,
            copy.dst_pitch,
            copy.dst_height,
        );
        let check = |kind: u32, host: u64, device: u64, len: Option<u64>| {
            let len = len.ok_or(CUDA_ERROR_INVALID_VALUE)?;
            match kind {
                CU_MEMORYTYPE_HOST => self.check_reachable(host, len),
                CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => self.check_device(device, len),
                CU_MEMORYTYPE_ARRAY => Ok(()),
                _ => Err(CUDA_ERROR_INVALID_VALUE),
            }
        };
        check(copy.src_type, copy.src_host, copy.src_device, from)?;
        check(copy.dst_type, copy.dst_host, copy.dst_device, to)?;
        (copy.src_context, copy.dst_context) = (0, 0);
        for (kind, array) in [
            (copy.src_type, &mut copy.src_array),
            (copy.dst_type, &mut copy.dst_array),
        ] {
            *array = match kind {
                CU_MEMORYTYPE_ARRAY if *array != 0 => self.bind(*array)?.0,
                _ => 0,
            };
        }
        Ok(copy)
    }

    /// A stream memory operation of a known kind on the session's memory.
    fn check_memory_operation(&self, operation: &mut [u64; 6]) -> Result<(), CUresult> {
        const FLUSH: u32 = 3;
        const BARRIER: u32 = 6;
        let [kind, address, ..] = *operation;
        let bytes = match kind as u32 {
            1 | 2 => 4,
            4 | 5 => 8,
            FLUSH | BARRIER => return Ok(()),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        // The alias is for the driver alone.
        operation[4] = 0;
        self.check_device(address, bytes)
    }

    /// What a node does, as the client sees it.
    pub fn graph_node_get(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Object = self.body(message)?;
        let (node, graph) = self.node_ready(shared, body.object)?;
        let device = self.graphs.graphs.get(graph)?.device;
        let driver = &shared.driver.graph;
        let mut kind = 0;
        driver.node_kind(node, &mut kind)?;
        let is = GraphNodeIs {
            kind,
            device: device as u32,
        };
        let mut payload = is.as_bytes().to_vec();
        match kind {
            CU_GRAPH_NODE_TYPE_KERNEL => {
                let mut params = CUDA_KERNEL_NODE_PARAMS::default();
                driver.kernel_get(node, &mut params)?;
                payload.extend_from_slice(&self.kernel_as_seen(shared, &params)?);
            }
            CU_GRAPH_NODE_TYPE_MEMCPY => {
                let mut params = CUDA_MEMCPY3D::default();
                driver.memcpy_get(node, &mut params)?;
                for array in [&mut params.src_array, &mut params.dst_array] {
                    let raw = RawArray::Plain(CUarray(*array));
                    let handle = self.arrays.handle_where(|other| other.raw == raw);
                    *array = handle.unwrap_or(0);
                }
                payload.extend_from_slice(params.as_bytes());
            }
            CU_GRAPH_NODE_TYPE_MEMSET => {
                let mut params = CUDA_MEMSET_NODE_PARAMS::default();
                driver.memset_get(node, &mut params)?;
                payload.extend_from_slice(params.as_bytes());
            }
            CU_GRAPH_NODE_TYPE_GRAPH => {
                let mut inner = CUgraph::NULL;
                driver.child_get(node, &mut inner)?;
                let owner = Owner::Node(body.object);
                let handle = self.graphs.graph_handle(inner, device, owner)?;
                payload.extend_from_slice(handle.as_bytes());
            }
            CU_GRAPH_NODE_TYPE_WAIT_EVENT | CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
                let mut event = CUevent::NULL;
                if kind == CU_GRAPH_NODE_TYPE_WAIT_EVENT {
                    driver.event_wait_get(node, &mut event)?;
                } else {
                    driver.event_record_get(node, &mut event)?;
                }
                let handle = self.events.handle_where(|other| other.raw == event);
                payload.extend_from_slice(handle.unwrap_or(0).as_bytes());
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
            CU_GRAPH_NODE_TYPE_BATCH_MEM_OP if self.host_token(shared, node).is_some() => {
                let is = GraphNodeIs {
                    kind: CU_GRAPH_NODE_TYPE_HOST,
                    ..is
                };
                let token = self.host_token(shared, node).unwrap_or(0);
                payload = [is.as_bytes(), HostNode { token, pad: 0 }.as_bytes()].concat();
            }
            CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
                let mut params = CUDA_BATCH_MEM_OP_NODE_PARAMS::default();
                driver.batch_get(node, &mut params)?;
                let count = params.count.min(OPERATIONS_MOST);
                let flags = params.flags;
                payload.extend_from_slice(BatchNode { count, flags }.as_bytes());
                for index in 0..count as usize {
                    // SAFETY: the driver's own array of as many operations, valid as long as the node.
                    let operation: [u64; 6] =
                        unsafe { *(params.operations as *const [u64; 6]).add(index) };
                    payload.extend_from_slice(operation.as_bytes());
                }
            }
            _ => {}
        }
        Ok(payload)
    }

    /// A kernel node's parameters, packed, with the client's handle of the function.
    fn kernel_as_seen(
        &self,
        shared: &Shared,
        params: &CUDA_KERNEL_NODE_PARAMS,
    ) -> Result<Vec<u8>, CUresult> {
        let mut raw = CUfunction(params.function);
        if raw.is_null() {
            let kernel = CUkernel(params.kernel);
            shared.driver.kernel_get_function(&mut raw, kernel)?;
        }
        let known = self.functions.handle_where(|function| function.raw == raw);
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

    /// What the driver does for a host node of an instance with this slot.
    pub fn host_operations(
        &self,
        slot: u32,
        token: u32,
    ) -> Result<[[u64; 6]; HOST_OPERATIONS], CallError> {
        self.shared.check_slot(slot)?;
        let arrived = self.shared.flag_address(slot + ARRIVED)?;
        let returned = self.shared.flag_address(slot + RETURNED)?;
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

    /// What the client knows the function of a host node by; `None` for any other node.
    fn host_token(&self, shared: &Shared, node: CUgraphNode) -> Option<u32> {
        if !self.graphs.hosts {
            return None;
        }
        let mut params = CUDA_BATCH_MEM_OP_NODE_PARAMS::default();
        shared.driver.graph.batch_get(node, &mut params).ok()?;
        if params.count as usize != HOST_OPERATIONS {
            return None;
        }
        // SAFETY: the driver's own array of as many operations, valid as long as the node.
        let first = unsafe { *(params.operations as *const [u64; 6]) };
        // A client cannot name its flags in nodes of its own.
        let flags = self.shared.flag_address(0).ok()?;
        let len = (FLAGS * FLAG_STRIDE) as u64;
        (first[1].wrapping_sub(flags) < len).then_some(first[2] as u32)
    }

    /// The host nodes of a graph and of those in it, always in the same order.
    fn host_nodes(
        &self,
        shared: &Shared,
        graph: CUgraph,
        depth: usize,
    ) -> Result<Vec<(CUgraphNode, u32)>, CUresult> {
        let mut found = Vec::new();
        if !self.graphs.hosts || depth == 0 {
            return Ok(found);
        }
        let driver = &shared.driver.graph;
        for node in all_nodes(shared, graph)? {
            let mut kind = 0;
            driver.node_kind(node, &mut kind)?;
            match kind {
                CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
                    let token = self.host_token(shared, node);
                    found.extend(token.map(|token| (node, token)));
                }
                CU_GRAPH_NODE_TYPE_GRAPH => {
                    let mut inner = CUgraph::NULL;
                    driver.child_get(node, &mut inner)?;
                    found.extend(self.host_nodes(shared, inner, depth - 1)?);
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Gives the host nodes of a graph the slots of the instance that is made or updated from it next.
    fn give_slots(
        &self,
        shared: &Shared,
        hosts: &[(CUgraphNode, u32)],
        slots: &[u32],
        device: usize,
    ) -> Result<(), CallError> {
        let context = shared.devices[device]
            .context()
            .ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        for ((node, token), slot) in hosts.iter().zip(slots) {
            let mut described = Described::new(CU_GRAPH_NODE_TYPE_HOST);
            described.host(self.host_operations(*slot, *token)?, context);
            shared.driver.graph.node_set(*node, &mut described.params)?;
        }
        Ok(())
    }

    /// `cuGraphNodeGetType`.
    pub fn graph_node_kind(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Object = self.body(message)?;
        let (node, _) = self.node_ready(shared, body.object)?;
        let mut kind = 0;
        shared.driver.graph.node_kind(node, &mut kind)?;
        if kind == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP && self.host_token(shared, node).is_some() {
            kind = CU_GRAPH_NODE_TYPE_HOST;
        }
        Ok(super::value(kind as u64))
    }

    /// `cuGraphDestroyNode`.
    pub fn graph_node_destroy(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Object = self.body(message)?;
        let (node, graph) = self.node_ready(shared, body.object)?;
        if self.graphs.graphs.get(graph)?.filling {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        shared.driver.graph.node_destroy(node)?;
        self.graphs.forget_node(body.object);
        Ok(Vec::new())
    }

    /// `cuGraphKernelNodeGetAttribute`, `cuGraphKernelNodeSetAttribute`.
    pub fn graph_attribute(&mut self, shared: &Shared, message: &Message) -> Reply {
        let mut body: GraphAttribute = self.body(message)?;
        let (node, _) = self.node_ready(shared, body.node)?;
        let driver = &shared.driver.graph;
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
            if body.id == CU_LAUNCH_ATTRIBUTE_PRIORITY {
                let value = body.value.as_mut_bytes();
                set_first_word(value, self.own_priority(first_word(value)));
            }
        } else {
            if body.id == CU_LAUNCH_ATTRIBUTE_PRIORITY {
                let value = body.value.as_mut_bytes();
                set_first_word(value, self.raw_priority(first_word(value)));
            }
            driver.kernel_attribute_set(node, body.id, &body.value)?;
        }
        Ok(body.as_bytes().to_vec())
    }

    /// `cuGraphKernelNodeCopyAttributes`.
    pub fn graph_copy_attributes(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphPair = self.body(message)?;
        let (to, _) = self.node_ready(shared, body.first)?;
        let (from, _) = self.node_ready(shared, body.second)?;
        shared.driver.graph.kernel_attributes_copy(to, from)?;
        Ok(Vec::new())
    }

    /// `cuGraphInstantiate` in all its forms.
    pub fn graph_instantiate(&mut self, shared: &Shared, message: &Message) -> Reply {
        const DEVICE_LAUNCH: u64 = 4;
        let body: GraphInstantiate = self.body(message)?;
        let (graph, device) = self.graph_ready(shared, body.graph)?;
        if body.flags & DEVICE_LAUNCH != 0 {
            // A kernel could launch it at any time, in the place of the whole server.
            return Err(CUDA_ERROR_NOT_SUPPORTED.into());
        }
        let slots: Vec<u32> = {
            let bytes = self.trailing::<GraphInstantiate>(message)?;
            take(&mut &bytes[..], (body.slots as usize).min(FLAGS))?
        };
        let mut raw = CUgraphExec::NULL;
        let mut made = GraphInstantiated::default();
        let hosts = self.host_nodes(shared, graph, DEPTH)?;
        made.hosts = hosts.len() as u32;
        if slots.len() < hosts.len() {
            return Ok(made.as_bytes().to_vec());
        }
        self.give_slots(shared, &hosts, &slots, device)?;
        let status = if body.with_params == 0 {
            shared.driver.graph.instantiate(&mut raw, graph, body.flags)
        } else {
            let stream = match body.stream {
                0 => CUstream::NULL,
                handle => self.prepare(shared, handle)?.1,
            };
            let mut params = CUDA_GRAPH_INSTANTIATE_PARAMS {
                flags: body.flags,
                upload_stream: stream.0,
                ..CUDA_GRAPH_INSTANTIATE_PARAMS::default()
            };
            let driver = &shared.driver.graph;
            let status = driver.instantiate_with(&mut raw, graph, &mut params);
            made.result = params.result;
            let node = CUgraphNode(params.error_node);
            made.error_node = self.graphs.node_handle(node, body.graph)?;
            status
        };
        if let Err(status) = status {
            shared.note_status(status);
            made.status = status.0;
            return Ok(made.as_bytes().to_vec());
        }
        if body.stream != 0 {
            let index = self.streams.index(body.stream)?;
            self.submitted(shared, index, 1)?;
        }
        made.prints = u32::from(self.graphs.prints);
        let exec = Exec {
            raw,
            device,
            prints: self.graphs.prints,
            slots: hosts.iter().map(|(node, _)| *node).zip(slots).collect(),
        };
        self.graphs
            .waits
            .extend(exec.slots.iter().map(|(_, slot)| *slot));
        match self.graphs.execs.insert(exec) {
            Ok(handle) => {
                made.exec = handle;
                self.graphs.memory.share(body.graph, handle);
                if let Err(status) = self.graphs.charge(&self.account, handle, device) {
                    let _ = shared.driver.graph.exec_destroy(raw);
                    self.graphs.execs.remove(handle);
                    self.graphs.memory.ended(handle);
                    return Err(status.into());
                }
            }
            Err(status) => {
                let _ = shared.driver.graph.exec_destroy(raw);
                return Err(status.into());
            }
        }
        Ok(made.as_bytes().to_vec())
    }

    /// `cuGraphLaunch`.
    pub fn graph_launch(&mut self, shared: &Shared, message: &Message) -> Result<(), CallError> {
        let body: GraphLaunch = self.body(message)?;
        let exec = self.graphs.execs.get(body.exec)?;
        let (raw, prints) = (exec.raw, exec.prints);
        if prints && !self.may_print(shared) {
            return Err(CallError::Full);
        }
        let (index, stream) = self.prepare(shared, body.stream)?;
        shared.driver.graph.launch(raw, stream)?;
        if !self.graphs.memory.is_empty() {
            self.graphs.memory.launched(body.exec);
            self.graphs.discharge();
        }
        self.counts.launches += 1;
        self.submitted(shared, index, 1)
    }

    /// `cuGraphUpload`.
    pub fn graph_upload(&mut self, shared: &Shared, message: &Message) -> Result<(), CallError> {
        let body: GraphLaunch = self.body(message)?;
        let raw = self.graphs.execs.get(body.exec)?.raw;
        let (index, stream) = self.prepare(shared, body.stream)?;
        shared.driver.graph.upload(raw, stream)?;
        self.submitted(shared, index, 1)
    }

    fn exec_ready(&self, shared: &Shared, handle: u64) -> Result<CUgraphExec, CUresult> {
        let exec = self.graphs.execs.get(handle)?;
        shared.devices[exec.device].make_current(&shared.driver)?;
        Ok(exec.raw)
    }

    /// `cuGraphExecDestroy`: the driver lets what runs finish.
    pub fn graph_exec_destroy(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Object = self.body(message)?;
        let raw = self.exec_ready(shared, body.object)?;
        shared.driver.graph.exec_destroy(raw)?;
        self.graphs.execs.remove(body.object);
        self.graphs.memory.ended(body.object);
        self.graphs.discharge();
        self.drop_kept(shared);
        Ok(Vec::new())
    }

    /// `cuGraphExecGetFlags`.
    pub fn graph_exec_flags(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: Object = self.body(message)?;
        let raw = self.exec_ready(shared, body.object)?;
        let mut flags = 0;
        shared.driver.graph.exec_flags(raw, &mut flags)?;
        Ok(super::value(flags))
    }

    /// `cuGraphExecUpdate`.
    pub fn graph_exec_update(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphPair = self.body(message)?;
        let (graph, _) = self.graph_ready(shared, body.second)?;
        let exec = self.exec_ready(shared, body.first)?;
        if self.graphs.hosts {
            let exec = self.graphs.execs.get(body.first)?;
            let slots: Vec<u32> = exec.slots.iter().map(|(_, slot)| *slot).collect();
            let hosts = self.host_nodes(shared, graph, DEPTH)?;
            // With another number of them the driver refuses the update.
            self.give_slots(shared, &hosts, &slots, exec.device)?;
        }
        let mut info = CUgraphExecUpdateResultInfo::default();
        let status = shared.driver.graph.exec_update(exec, graph, &mut info);
        let mut updated = GraphUpdated {
            result: info.result,
            prints: u32::from(self.graphs.prints),
            ..GraphUpdated::default()
        };
        if self.graphs.prints {
            self.graphs.execs.get_mut(body.first)?.prints = true;
        }
        if status.is_ok() {
            self.graphs.memory.share(body.second, body.first);
        }
        if let Err(status) = status {
            shared.note_status(status);
            updated.status = status.0;
            // Nodes inside child graphs have no handle of this graph.
            let now = all_nodes(shared, graph).unwrap_or_default();
            for (raw, handle) in [
                (info.error_node, &mut updated.error_node),
                (info.error_from, &mut updated.error_from),
            ] {
                let node = CUgraphNode(raw);
                if now.contains(&node) {
                    *handle = self.graphs.node_handle(node, body.second)?;
                }
            }
        }
        Ok(updated.as_bytes().to_vec())
    }

    /// `cuGraphNodeGetEnabled`, `cuGraphNodeSetEnabled`.
    pub fn graph_enabled(&mut self, shared: &Shared, message: &Message) -> Reply {
        let mut body: GraphEnabled = self.body(message)?;
        let exec = self.exec_ready(shared, body.exec)?;
        let node = self.graphs.nodes.get(body.node)?.raw;
        let driver = &shared.driver.graph;
        if body.set == 0 {
            driver.enabled(exec, node, &mut body.enabled)?;
        } else {
            driver.set_enabled(exec, node, body.enabled)?;
        }
        Ok(body.as_bytes().to_vec())
    }

    /// `cuGraphDebugDotPrint`: the driver writes into a memory file, which goes to the client.
    pub fn graph_dot(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphDot = self.body(message)?;
        let (graph, _) = self.graph_ready(shared, body.graph)?;
        // SAFETY: a NUL-ended name; the result is checked.
        let fd = unsafe { libc::memfd_create(c"mpsshim-dot".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(CUDA_ERROR_OPERATING_SYSTEM.into());
        }
        // SAFETY: a descriptor just made, nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let path = CString::new(path).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
        shared.driver.graph.dot(graph, path.as_ptr(), body.flags)?;
        // SAFETY: a plain system call on our own descriptor.
        let len = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) };
        let len = u64::try_from(len).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
        if len > DOT_MOST as u64 {
            return Err(CUDA_ERROR_OUT_OF_MEMORY.into());
        }
        let note = DescriptorNote {
            token: message.token,
            len,
        };
        shm::send_packet(self.shared.socket(), note.as_bytes(), &[file.as_fd()])
            .map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
        Ok(super::value(len))
    }

    /// `cuDeviceGraphMemTrim`, `cuDeviceGetGraphMemAttribute`, `cuDeviceSetGraphMemAttribute`. The numbers are the
    /// device's, for all clients together.
    pub fn graph_memory(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphMemory = self.body(message)?;
        let device = shared.device(body.device)?;
        device.make_current(&shared.driver)?;
        let driver = &shared.driver.graph;
        let mut value = body.value;
        match body.what {
            graph_memory::GET => driver.memory_get(device.raw, body.attribute, &mut value)?,
            graph_memory::SET => driver.memory_set(device.raw, body.attribute, &mut value)?,
            graph_memory::TRIM => driver.memory_trim(device.raw)?,
            _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
        }
        Ok(super::value(value))
    }

    /// `cuGraphConditionalHandleCreate`. Kernels are given the driver's number, so it is the client's too.
    pub fn graph_condition(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GraphCondition = self.body(message)?;
        let (graph, _) = self.graph_ready(shared, body.graph)?;
        let context = shared
            .device(body.device)?
            .context()
            .ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        let mut handle = 0;
        shared.driver.graph.condition_create(
            &mut handle,
            graph,
            context,
            body.default,
            body.flags,
        )?;
        self.graphs.conditions.insert(handle, body.graph);
        Ok(super::value(handle))
    }
}
