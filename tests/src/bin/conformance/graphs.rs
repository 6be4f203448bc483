//! Graphs built by hand: nodes of each kind, their parameters, topology, clones, instances and their updates.

use super::capture::{event, instantiate, kinds, stream};
use super::*;
use std::sync::atomic::{AtomicU32, Ordering};
use zerocopy::{FromBytes, IntoBytes};

const CONDITIONAL: &str = concat!(include_str!("../../../fixtures/conditional.ptx"), "\0");

const NO_NODES: *const CUgraphNode = null();
const NO_DATA: *const CUgraphEdgeData = null();

fn graph() -> CUgraph {
    let mut graph = CUgraph::NULL;
    must!(cuGraphCreate, &mut graph, 0u32);
    graph
}

fn empty(graph: CUgraph, after: &[CUgraphNode]) -> CUgraphNode {
    let mut node = CUgraphNode::NULL;
    must!(
        cuGraphAddEmptyNode,
        &mut node,
        graph,
        after.as_ptr(),
        after.len()
    );
    node
}

/// A list of nodes that a call gives, asked for in the two steps.
fn list(call: impl Fn(*mut CUgraphNode, &mut usize) -> CUresult) -> Vec<CUgraphNode> {
    let mut count = 0usize;
    assert!(call(null_mut(), &mut count).is_ok());
    let mut nodes = vec![CUgraphNode::NULL; count];
    if count > 0 {
        assert!(call(nodes.as_mut_ptr(), &mut count).is_ok());
    }
    nodes.truncate(count);
    nodes
}

fn nodes_of(graph: CUgraph) -> Vec<CUgraphNode> {
    list(|nodes, count| cu!(cuGraphGetNodes, graph, nodes, count))
}

fn before(node: CUgraphNode) -> Vec<CUgraphNode> {
    list(|nodes, count| cu!(cuGraphNodeGetDependencies, node, nodes, count))
}

fn behind(node: CUgraphNode) -> Vec<CUgraphNode> {
    list(|nodes, count| cu!(cuGraphNodeGetDependentNodes, node, nodes, count))
}

fn kind(node: CUgraphNode) -> u32 {
    let mut kind = 99u32;
    must!(cuGraphNodeGetType, node, &mut kind);
    kind
}

/// Parameters of `store_index`, kept as long as a call needs them.
struct StoreIndex {
    out: u64,
    count: i32,
    factor: i32,
    pointers: [u64; 3],
}

impl StoreIndex {
    fn new(out: u64, count: i32, factor: i32) -> Box<StoreIndex> {
        let mut made = Box::new(StoreIndex {
            out,
            count,
            factor,
            pointers: [0; 3],
        });
        made.pointers = [
            &raw const made.out as u64,
            &raw const made.count as u64,
            &raw const made.factor as u64,
        ];
        made
    }
    fn node(&self, setup: &Setup) -> CUDA_KERNEL_NODE_PARAMS {
        CUDA_KERNEL_NODE_PARAMS {
            function: setup.functions["store_index"].0,
            grid: [1, 1, 1],
            block: [64, 1, 1],
            params: self.pointers.as_ptr() as u64,
            ..Default::default()
        }
    }
}

fn add_kernel(
    graph: CUgraph,
    after: &[CUgraphNode],
    params: &CUDA_KERNEL_NODE_PARAMS,
) -> (CUresult, CUgraphNode) {
    let mut node = CUgraphNode::NULL;
    let result = cu!(
        cuGraphAddKernelNode_v2,
        &mut node,
        graph,
        after.as_ptr(),
        after.len(),
        params as *const CUDA_KERNEL_NODE_PARAMS
    );
    (result, node)
}

fn memset_params(to: u64, value: u32, width: u64) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        to,
        pitch: 0,
        value,
        element: 4,
        width,
        height: 1,
    }
}

fn context() -> CUcontext {
    let mut context = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut context);
    context
}

fn add_memset(
    graph: CUgraph,
    after: &[CUgraphNode],
    params: &CUDA_MEMSET_NODE_PARAMS,
) -> (CUresult, CUgraphNode) {
    let mut node = CUgraphNode::NULL;
    let result = cu!(
        cuGraphAddMemsetNode,
        &mut node,
        graph,
        after.as_ptr(),
        after.len(),
        params as *const CUDA_MEMSET_NODE_PARAMS,
        context()
    );
    (result, node)
}

/// A one-dimensional copy. Kinds: 1 host, 2 device, 4 any.
fn copy_params(
    (from, from_kind): (u64, u32),
    (to, to_kind): (u64, u32),
    len: u64,
) -> CUDA_MEMCPY3D {
    let mut copy = CUDA_MEMCPY3D {
        src_type: from_kind,
        dst_type: to_kind,
        width: len,
        height: 1,
        depth: 1,
        ..Default::default()
    };
    if from_kind == 1 {
        copy.src_host = from
    } else {
        copy.src_device = from
    }
    if to_kind == 1 {
        copy.dst_host = to
    } else {
        copy.dst_device = to
    }
    copy
}

fn add_copy(
    graph: CUgraph,
    after: &[CUgraphNode],
    params: &CUDA_MEMCPY3D,
) -> (CUresult, CUgraphNode) {
    let mut node = CUgraphNode::NULL;
    let result = cu!(
        cuGraphAddMemcpyNode,
        &mut node,
        graph,
        after.as_ptr(),
        after.len(),
        params as *const CUDA_MEMCPY3D,
        context()
    );
    (result, node)
}

fn run(exec: CUgraphExec) {
    must!(cuGraphLaunch, exec, CUstream::NULL);
    must!(cuCtxSynchronize);
}

/// Puts a struct into the union of `CUgraphNodeParams`.
fn any_node(kind: u32, of_kind: &impl IntoBytesToo) -> CUgraphNodeParams {
    let mut params = CUgraphNodeParams {
        kind,
        ..Default::default()
    };
    let bytes = of_kind.bytes();
    params.words.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
    params
}

trait IntoBytesToo {
    fn bytes(&self) -> &[u8];
}
impl<T: IntoBytes + zerocopy::Immutable> IntoBytesToo for T {
    fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }
}

fn read_back<T: FromBytes>(params: &CUgraphNodeParams) -> T {
    T::read_from_prefix(params.words.as_bytes())
        .expect("long enough")
        .0
}

pub fn graph_build(setup: &Setup) {
    let out = alloc(4096);
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    say!(
        "create with flags",
        "{}",
        cu!(cuGraphCreate, &mut { CUgraph::NULL }, 1u32)
    );
    say!(
        "create into null",
        "{}",
        cu!(cuGraphCreate, null_mut::<CUgraph>(), 0u32)
    );
    let g = graph();
    let mut count = 9usize;
    say!(
        "nodes of an empty graph",
        "{} {count}",
        cu!(cuGraphGetNodes, g, null_mut::<CUgraphNode>(), &mut count)
    );
    say!("count", "{count}");
    say!(
        "null count",
        "{}",
        cu!(
            cuGraphGetNodes,
            g,
            null_mut::<CUgraphNode>(),
            null_mut::<usize>()
        )
    );
    let params = StoreIndex::new(out, 64, 5);
    let (result, kernel) = add_kernel(g, &[], &params.node(setup));
    say!("kernel", "{result} {}", kind(kernel));
    let (result, memset) = add_memset(g, &[], &memset_params(out + 512, 8, 4));
    say!("memset", "{result} {}", kind(memset));
    let (result, copy) = add_copy(
        g,
        &[kernel, memset],
        &copy_params((out, 2), (out + 1024, 2), 64),
    );
    say!("copy", "{result} {}", kind(copy));
    let join = empty(g, &[copy]);
    say!("empty", "{}", kind(join));
    say!("kinds", "{:?}", kinds(g));
    say!(
        "roots",
        "{}",
        list(|nodes, count| cu!(cuGraphGetRootNodes, g, nodes, count)).len()
    );
    say!("before the copy", "{:?}", before(copy) == [kernel, memset]);
    say!("behind the kernel", "{:?}", behind(kernel) == [copy]);
    let mut edges = 0usize;
    let nowhere = null_mut::<CUgraphNode>();
    must!(cuGraphGetEdges, g, nowhere, nowhere, &mut edges);
    say!("edges", "{edges}");
    let (mut from, mut to) = ([CUgraphNode(1); 8], [CUgraphNode(1); 8]);
    edges = 8;
    say!(
        "edges in too much room",
        "{} {edges}",
        cu!(
            cuGraphGetEdges,
            g,
            from.as_mut_ptr(),
            to.as_mut_ptr(),
            &mut edges
        )
    );
    say!("edges, the rest", "{edges} {:?}", (from[3], to[3]));
    edges = 2;
    say!(
        "edges in too little room",
        "{}",
        cu!(
            cuGraphGetEdges,
            g,
            from.as_mut_ptr(),
            to.as_mut_ptr(),
            &mut edges
        )
    );
    say!("count", "{edges}");
    let mut data = [CUgraphEdgeData {
        from_port: 9,
        ..Default::default()
    }; 8];
    edges = 8;
    say!(
        "edges with data",
        "{}",
        cu!(
            cuGraphGetEdges_v2,
            g,
            from.as_mut_ptr(),
            to.as_mut_ptr(),
            data.as_mut_ptr(),
            &mut edges
        )
    );
    say!("data", "{edges} {:?}", data[0]);
    edges = 8;
    say!(
        "edges with only one side",
        "{}",
        cu!(cuGraphGetEdges, g, from.as_mut_ptr(), nowhere, &mut edges)
    );
    let mut room = [CUgraphNode(1); 2];
    let mut len = 2usize;
    say!(
        "nodes in too little room",
        "{} {len}",
        cu!(cuGraphGetNodes, g, room.as_mut_ptr(), &mut len)
    );
    let mut room = [CUgraphNode(1); 6];
    len = 6;
    must!(cuGraphGetNodes, g, room.as_mut_ptr(), &mut len);
    say!("nodes in too much room", "{len} {:?}", &room[4..]);
    // Dependencies.
    let late = empty(g, &[]);
    say!(
        "add a dependency",
        "{}",
        cu!(cuGraphAddDependencies, g, &join, &late, 1usize)
    );
    say!(
        "twice",
        "{}",
        cu!(cuGraphAddDependencies, g, &join, &late, 1usize)
    );
    say!(
        "a circle",
        "{}",
        cu!(cuGraphAddDependencies, g, &late, &kernel, 1usize)
    );
    say!(
        "instantiate a circle",
        "{}",
        cu!(
            cuGraphInstantiateWithFlags,
            &mut { CUgraphExec::NULL },
            g,
            0u64
        )
    );
    say!(
        "remove it",
        "{}",
        cu!(cuGraphRemoveDependencies, g, &late, &kernel, 1usize)
    );
    say!(
        "remove what is not there",
        "{}",
        cu!(cuGraphRemoveDependencies, g, &late, &kernel, 1usize)
    );
    say!(
        "of itself",
        "{}",
        cu!(cuGraphAddDependencies, g, &late, &late, 1usize)
    );
    say!(
        "no dependencies",
        "{}",
        cu!(cuGraphAddDependencies, g, NO_NODES, NO_NODES, 0usize)
    );
    say!(
        "null dependencies",
        "{}",
        cu!(cuGraphAddDependencies, g, NO_NODES, NO_NODES, 1usize)
    );
    let plain = CUgraphEdgeData::default();
    say!(
        "with data",
        "{}",
        cu!(cuGraphAddDependencies_v2, g, &kernel, &late, &plain, 1usize)
    );
    say!(
        "removed with data",
        "{}",
        cu!(
            cuGraphRemoveDependencies_v2,
            g,
            &kernel,
            &late,
            &plain,
            1usize
        )
    );
    let odd = CUgraphEdgeData {
        from_port: 77,
        ..Default::default()
    };
    say!(
        "odd data",
        "{}",
        cu!(cuGraphAddDependencies_v2, g, &kernel, &late, &odd, 1usize)
    );
    let mut data = [plain; 4];
    let mut found = [CUgraphNode::NULL; 4];
    len = 4;
    say!(
        "dependencies with data",
        "{} {len}",
        cu!(
            cuGraphNodeGetDependencies_v2,
            copy,
            found.as_mut_ptr(),
            data.as_mut_ptr(),
            &mut len
        )
    );
    say!("they are", "{len} {}", found[..2] == [kernel, memset]);
    len = 4;
    say!(
        "dependents with data",
        "{}",
        cu!(
            cuGraphNodeGetDependentNodes_v2,
            kernel,
            found.as_mut_ptr(),
            data.as_mut_ptr(),
            &mut len
        )
    );
    say!("they are", "{len}");
    // Clones.
    let mut clone = CUgraph::NULL;
    say!("clone", "{}", cu!(cuGraphClone, &mut clone, g));
    say!("kinds", "{:?}", kinds(clone));
    let mut twin = CUgraphNode::NULL;
    say!(
        "find in the clone",
        "{}",
        cu!(cuGraphNodeFindInClone, &mut twin, copy, clone)
    );
    say!("found", "{} {}", kind(twin), twin != copy);
    say!(
        "find in the original",
        "{}",
        cu!(cuGraphNodeFindInClone, &mut { CUgraphNode::NULL }, copy, g)
    );
    say!(
        "find a twin in the clone",
        "{}",
        cu!(
            cuGraphNodeFindInClone,
            &mut { CUgraphNode::NULL },
            twin,
            clone
        )
    );
    let newer = empty(g, &[]);
    say!(
        "find a newer node",
        "{}",
        cu!(
            cuGraphNodeFindInClone,
            &mut { CUgraphNode::NULL },
            newer,
            clone
        )
    );
    // A child graph.
    let inner = graph();
    let (_, inner_memset) = add_memset(inner, &[], &memset_params(out + 2048, 4, 2));
    let mut child = CUgraphNode::NULL;
    say!(
        "child",
        "{}",
        cu!(
            cuGraphAddChildGraphNode,
            &mut child,
            g,
            &late,
            1usize,
            inner
        )
    );
    say!("kind", "{}", kind(child));
    let mut embedded = CUgraph::NULL;
    say!(
        "its graph",
        "{}",
        cu!(cuGraphChildGraphNodeGetGraph, child, &mut embedded)
    );
    let mut again = CUgraph::NULL;
    must!(cuGraphChildGraphNodeGetGraph, child, &mut again);
    say!(
        "is a copy",
        "{} {} {:?}",
        embedded != inner,
        embedded == again,
        kinds(embedded)
    );
    say!(
        "its node is in it",
        "{}",
        cu!(cuGraphNodeFindInClone, &mut twin, inner_memset, embedded)
    );
    say!(
        "graph of another node",
        "{}",
        cu!(cuGraphChildGraphNodeGetGraph, copy, &mut again)
    );
    say!("the original goes", "{}", cu!(cuGraphDestroy, inner));
    say!(
        "child of null",
        "{}",
        cu!(
            cuGraphAddChildGraphNode,
            &mut child,
            g,
            NO_NODES,
            0usize,
            CUgraph::NULL
        )
    );
    let exec = instantiate(g);
    run(exec);
    say!(
        "ran",
        "{:?}",
        (
            read_i32(out, 4),
            read_i32(out + 512, 2),
            read_i32(out + 1024, 4),
            read_i32(out + 2048, 3)
        )
    );
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let of_clone = instantiate(clone);
    run(of_clone);
    say!(
        "the clone ran",
        "{:?}",
        (
            read_i32(out, 4),
            read_i32(out + 512, 2),
            read_i32(out + 1024, 4),
            read_i32(out + 2048, 3)
        )
    );
    // Events.
    let [first, second] = [event(), event()];
    let mut wait = CUgraphNode::NULL;
    let mut record = CUgraphNode::NULL;
    let h = graph();
    say!(
        "event wait",
        "{}",
        cu!(
            cuGraphAddEventWaitNode,
            &mut wait,
            h,
            NO_NODES,
            0usize,
            first
        )
    );
    say!(
        "event record",
        "{}",
        cu!(
            cuGraphAddEventRecordNode,
            &mut record,
            h,
            &wait,
            1usize,
            second
        )
    );
    say!("kinds", "{} {}", kind(wait), kind(record));
    let mut found = CUevent::NULL;
    say!(
        "event of the wait",
        "{} {}",
        cu!(cuGraphEventWaitNodeGetEvent, wait, &mut found),
        found == first
    );
    say!(
        "event of the record",
        "{}",
        cu!(cuGraphEventRecordNodeGetEvent, record, &mut found)
    );
    say!("it is", "{}", found == second);
    say!(
        "of the wrong kind",
        "{}",
        cu!(cuGraphEventRecordNodeGetEvent, wait, &mut found)
    );
    say!(
        "set the wait's",
        "{}",
        cu!(cuGraphEventWaitNodeSetEvent, wait, second)
    );
    say!(
        "set the record's",
        "{}",
        cu!(cuGraphEventRecordNodeSetEvent, record, first)
    );
    must!(cuGraphEventWaitNodeGetEvent, wait, &mut found);
    say!("it is", "{}", found == second);
    let with_events = instantiate(h);
    run(with_events);
    say!("recorded by a graph", "{}", cu!(cuEventQuery, first));
    say!("waits for it", "{}", cu!(cuEventSynchronize, first));
    say!(
        "set the instance's wait",
        "{}",
        cu!(cuGraphExecEventWaitNodeSetEvent, with_events, wait, first)
    );
    say!(
        "set the instance's record",
        "{}",
        cu!(
            cuGraphExecEventRecordNodeSetEvent,
            with_events,
            record,
            second
        )
    );
    run(with_events);
    for exec in [exec, of_clone, with_events] {
        must!(cuGraphExecDestroy, exec);
    }
    for graph in [g, clone, h] {
        must!(cuGraphDestroy, graph);
    }
    // Nodes by `cuGraphAddNode`.
    let g = graph();
    let kernel_params = params.node(setup);
    let mut any = any_node(CU_GRAPH_NODE_TYPE_KERNEL, &kernel_params);
    let mut node = CUgraphNode::NULL;
    say!(
        "any: kernel",
        "{}",
        cu!(cuGraphAddNode, &mut node, g, NO_NODES, 0usize, &mut any)
    );
    let mut any = any_node(
        CU_GRAPH_NODE_TYPE_MEMSET,
        &[
            memset_params(out + 512, 3, 4).as_bytes(),
            context().0.as_bytes(),
        ]
        .concat()
        .as_slice()
        .try_into()
        .map(|b: [u8; 48]| b)
        .expect("48 bytes"),
    );
    let mut second = CUgraphNode::NULL;
    say!(
        "any: memset",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut second,
            g,
            &node,
            NO_DATA,
            1usize,
            &mut any
        )
    );
    let copy = copy_params((out, 2), (out + 1024, 2), 16);
    let mut words = [0u64; 27];
    words[1] = context().0;
    words[2..].copy_from_slice(
        <[u64; 25]>::read_from_bytes(copy.as_bytes())
            .expect("25 words")
            .as_slice(),
    );
    let mut any = any_node(CU_GRAPH_NODE_TYPE_MEMCPY, &words);
    let mut third = CUgraphNode::NULL;
    say!(
        "any: copy",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut third,
            g,
            &second,
            NO_DATA,
            1usize,
            &mut any
        )
    );
    let mut any = any_node(CU_GRAPH_NODE_TYPE_EMPTY, &0u64);
    let mut fourth = CUgraphNode::NULL;
    say!(
        "any: empty",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut fourth,
            g,
            &third,
            &plain,
            1usize,
            &mut any
        )
    );
    let mut any = any_node(CU_GRAPH_NODE_TYPE_EVENT_RECORD, &first.0);
    say!(
        "any: record",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut fourth,
            g,
            &third,
            &plain,
            1usize,
            &mut any
        )
    );
    let mut any = any_node(CU_GRAPH_NODE_TYPE_WAIT_EVENT, &first.0);
    say!(
        "any: wait",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut fourth,
            g,
            &third,
            &plain,
            1usize,
            &mut any
        )
    );
    let mut any = any_node(77, &0u64);
    say!(
        "any: kind 77",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut fourth,
            g,
            NO_NODES,
            NO_DATA,
            0usize,
            &mut any
        )
    );
    let mut any = any_node(CU_GRAPH_NODE_TYPE_EMPTY, &0u64);
    any.reserved0[1] = 1;
    say!(
        "any: reserved words",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut fourth,
            g,
            NO_NODES,
            NO_DATA,
            0usize,
            &mut any
        )
    );
    let small = graph();
    let moved = empty(small, &[]);
    let mut any = any_node(
        CU_GRAPH_NODE_TYPE_GRAPH,
        &CUDA_CHILD_GRAPH_NODE_PARAMS {
            graph: small.0,
            ownership: 1,
            pad: 0,
        },
    );
    let mut parent = CUgraphNode::NULL;
    say!(
        "any: child that moves",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut parent,
            g,
            NO_NODES,
            NO_DATA,
            0usize,
            &mut any
        )
    );
    let mut embedded = CUgraph::NULL;
    must!(cuGraphChildGraphNodeGetGraph, parent, &mut embedded);
    say!(
        "it is the same graph",
        "{} {}",
        embedded == small,
        nodes_of(embedded) == [moved]
    );
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let exec = instantiate(g);
    run(exec);
    say!(
        "ran",
        "{:?}",
        (
            read_i32(out, 4),
            read_i32(out + 512, 2),
            read_i32(out + 1024, 4)
        )
    );
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, g);
    // Many nodes.
    let g = graph();
    let mut last = empty(g, &[]);
    let first = last;
    for i in 0..3000usize {
        let after = [last, first];
        last = empty(g, &after[..1 + i % 2]);
    }
    let all = nodes_of(g);
    let mut edges = 0usize;
    must!(cuGraphGetEdges, g, nowhere, nowhere, &mut edges);
    say!("many", "{} {edges} {}", all.len(), behind(first).len());
    let (mut from, mut to) = (
        vec![CUgraphNode::NULL; edges],
        vec![CUgraphNode::NULL; edges],
    );
    must!(
        cuGraphGetEdges,
        g,
        from.as_mut_ptr(),
        to.as_mut_ptr(),
        &mut edges
    );
    say!(
        "all edges",
        "{}",
        from.iter().chain(&to).all(|node| all.contains(node))
    );
    let join = empty(g, &all);
    say!("one behind all", "{}", before(join).len());
    must!(cuGraphDestroy, g);
    free(out);
}

/// Edges that say something.
pub fn graph_edges(setup: &Setup) {
    let out = alloc(4096);
    let g = graph();
    let params = StoreIndex::new(out, 64, 5);
    let (_, kernel) = add_kernel(g, &[], &params.node(setup));
    let nowhere = null_mut::<CUgraphNode>();
    let (mut found, mut data) = ([CUgraphNode::NULL; 4], [CUgraphEdgeData::default(); 4]);
    let mut len;
    // A kernel's programmatic edge.
    let (_, second) = add_kernel(g, &[], &params.node(setup));
    let programmatic = CUgraphEdgeData {
        from_port: 1,
        kind: 1,
        ..Default::default()
    };
    say!(
        "a programmatic edge",
        "{}",
        cu!(
            cuGraphAddDependencies_v2,
            g,
            &kernel,
            &second,
            &programmatic,
            1usize
        )
    );
    len = 0;
    say!(
        "asked for without data",
        "{}",
        cu!(cuGraphNodeGetDependencies, second, nowhere, &mut len)
    );
    len = 4;
    say!(
        "and its nodes",
        "{}",
        cu!(
            cuGraphNodeGetDependencies,
            second,
            found.as_mut_ptr(),
            &mut len
        )
    );
    len = 4;
    say!(
        "with data",
        "{} {:?}",
        cu!(
            cuGraphNodeGetDependencies_v2,
            second,
            found.as_mut_ptr(),
            data.as_mut_ptr(),
            &mut len
        ),
        data[0]
    );
    say!("destroy a node", "{}", cu!(cuGraphDestroyNode, second));
    must!(cuGraphDestroy, g);
    free(out);
}

pub fn graph_params(setup: &Setup) {
    let out = alloc(4096);
    let g = graph();
    let params = StoreIndex::new(out, 64, 5);
    let (_, kernel) = add_kernel(g, &[], &params.node(setup));
    let mut found = CUDA_KERNEL_NODE_PARAMS::default();
    say!(
        "kernel parameters",
        "{}",
        cu!(cuGraphKernelNodeGetParams_v2, kernel, &mut found)
    );
    let describe = |found: &CUDA_KERNEL_NODE_PARAMS| {
        let values = if found.params != 0 {
            // SAFETY: the driver's own arrays.
            unsafe {
                let pointers = found.params as *const u64;
                let (out_, count, factor) = (
                    *pointers as *const u64,
                    *pointers.add(1) as *const i32,
                    *pointers.add(2) as *const i32,
                );
                format!("{} {} {}", *out_ == out, *count, *factor)
            }
        } else {
            "no pointers".into()
        };
        format!(
            "{} {} {:?} {:?} {} {values} {} {}",
            found.function == setup.functions["store_index"].0,
            found.kernel != 0,
            found.grid,
            found.block,
            found.shared,
            found.extra != 0,
            found.context == context().0
        )
    };
    say!("they are", "{}", describe(&found));
    let mut old = CUDA_KERNEL_NODE_PARAMS {
        kernel: 77,
        context: 78,
        ..Default::default()
    };
    say!(
        "in the old form",
        "{}",
        cu!(cuGraphKernelNodeGetParams, kernel, &mut old)
    );
    say!(
        "they are",
        "{} {:?} {}",
        old.function == setup.functions["store_index"].0,
        old.block,
        (old.kernel, old.context) == (77, 78)
    );
    // Through `extra`.
    #[repr(C)]
    struct Packed {
        out: u64,
        count: i32,
        factor: i32,
    }
    let packed = Packed {
        out,
        count: 32,
        factor: 9,
    };
    let size = size_of::<Packed>();
    let extra = [1u64, &raw const packed as u64, 2, &raw const size as u64, 0];
    let mut by_extra = params.node(setup);
    by_extra.params = 0;
    by_extra.extra = extra.as_ptr() as u64;
    let (result, node) = add_kernel(g, &[kernel], &by_extra);
    say!("through extra", "{result}");
    must!(cuGraphKernelNodeGetParams_v2, node, &mut found);
    say!("they are", "{}", describe(&found));
    by_extra.params = params.pointers.as_ptr() as u64;
    say!("both ways", "{}", add_kernel(g, &[], &by_extra).0);
    let mut wrong = params.node(setup);
    wrong.params = 0;
    say!("no parameters", "{}", add_kernel(g, &[], &wrong).0);
    let mut wrong = params.node(setup);
    wrong.block = [2000, 1, 1];
    say!("too large a block", "{}", add_kernel(g, &[], &wrong).0);
    wrong.block = [0, 1, 1];
    say!("no block", "{}", add_kernel(g, &[], &wrong).0);
    wrong.block = [1, 1, 1];
    wrong.shared = 1 << 30;
    say!("too much shared memory", "{}", add_kernel(g, &[], &wrong).0);
    wrong.shared = 0;
    wrong.function = 0;
    say!("no function", "{}", add_kernel(g, &[], &wrong).0);
    say!(
        "null parameters",
        "{}",
        cu!(
            cuGraphAddKernelNode_v2,
            &mut { CUgraphNode::NULL },
            g,
            NO_NODES,
            0usize,
            null::<CUDA_KERNEL_NODE_PARAMS>()
        )
    );
    say!(
        "null node",
        "{}",
        cu!(
            cuGraphAddEmptyNode,
            null_mut::<CUgraphNode>(),
            g,
            NO_NODES,
            0usize
        )
    );
    say!(
        "null graph",
        "{}",
        cu!(
            cuGraphAddEmptyNode,
            &mut { CUgraphNode::NULL },
            CUgraph::NULL,
            NO_NODES,
            0usize
        )
    );
    say!(
        "null dependencies",
        "{}",
        cu!(
            cuGraphAddEmptyNode,
            &mut { CUgraphNode::NULL },
            g,
            NO_NODES,
            1usize
        )
    );
    say!(
        "a null dependency",
        "{}",
        cu!(
            cuGraphAddEmptyNode,
            &mut { CUgraphNode::NULL },
            g,
            &CUgraphNode::NULL,
            1usize
        )
    );
    say!(
        "a dependency twice",
        "{}",
        cu!(
            cuGraphAddEmptyNode,
            &mut { CUgraphNode::NULL },
            g,
            [kernel, kernel].as_ptr(),
            2usize
        )
    );
    let other = graph();
    let foreign = empty(other, &[]);
    say!(
        "a dependency of another graph",
        "{}",
        cu!(
            cuGraphAddEmptyNode,
            &mut { CUgraphNode::NULL },
            g,
            &foreign,
            1usize
        )
    );
    let changed = StoreIndex::new(out + 256, 10, 2);
    let mut node_params = changed.node(setup);
    node_params.grid = [2, 1, 1];
    say!(
        "set",
        "{}",
        cu!(
            cuGraphKernelNodeSetParams_v2,
            kernel,
            &node_params as *const CUDA_KERNEL_NODE_PARAMS
        )
    );
    must!(cuGraphKernelNodeGetParams_v2, kernel, &mut found);
    say!("grid", "{:?}", found.grid);
    say!(
        "set in the old form",
        "{}",
        cu!(
            cuGraphKernelNodeSetParams,
            kernel,
            &node_params as *const CUDA_KERNEL_NODE_PARAMS
        )
    );
    let mut library = CUlibrary::NULL;
    let none = null_mut::<c_void>();
    must!(
        cuLibraryLoadData,
        &mut library,
        PTX.as_ptr(),
        none,
        none,
        0u32,
        none,
        none,
        0u32
    );
    let mut of_library = CUkernel::NULL;
    must!(
        cuLibraryGetKernel,
        &mut of_library,
        library,
        c"store_index".as_ptr()
    );
    let mut by_kernel = params.node(setup);
    by_kernel.function = 0;
    by_kernel.kernel = of_library.0;
    let (result, node) = add_kernel(g, &[], &by_kernel);
    say!("a kernel of a library", "{result}");
    must!(cuGraphKernelNodeGetParams_v2, node, &mut found);
    say!(
        "it is",
        "{} {} {}",
        found.function == 0,
        found.kernel == of_library.0,
        found.context == 0
    );
    say!(
        "in the old form",
        "{}",
        cu!(cuGraphKernelNodeGetParams, node, &mut old)
    );
    let mut function = CUfunction::NULL;
    must!(cuKernelGetFunction, &mut function, of_library);
    say!("it is", "{}", old.function == function.0);
    must!(cuGraphKernelNodeGetParams_v2, node, &mut found);
    say!(
        "it is",
        "{} {} {}",
        found.function == function.0,
        found.kernel == of_library.0,
        found.context == context().0
    );
    by_kernel.function = function.0;
    say!(
        "both a function and a kernel",
        "{}",
        add_kernel(g, &[], &by_kernel).0
    );
    by_kernel.function = of_library.0;
    by_kernel.kernel = 0;
    say!(
        "a kernel as a function",
        "{}",
        add_kernel(g, &[], &by_kernel).0
    );

    // Attributes.
    let mut value = CUlaunchAttribute {
        id: 0,
        pad: 0,
        value: [0; 64],
    };
    let mut get = |node: CUgraphNode, id: u32| {
        value.value = [0; 64];
        let result = cu!(
            cuGraphKernelNodeGetAttribute,
            node,
            id,
            value.value.as_mut_ptr()
        );
        format!("{result} {:?}", &value.value[..4])
    };
    say!(
        "cooperative",
        "{}",
        get(kernel, CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
    );
    say!("priority", "{}", get(kernel, CU_LAUNCH_ATTRIBUTE_PRIORITY));
    let mut word = [0u32; 16];
    word[0] = 1;
    say!(
        "set cooperative",
        "{}",
        cu!(
            cuGraphKernelNodeSetAttribute,
            kernel,
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            word.as_ptr()
        )
    );
    say!(
        "cooperative",
        "{}",
        get(kernel, CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
    );
    say!(
        "copy attributes",
        "{}",
        cu!(cuGraphKernelNodeCopyAttributes, node, kernel)
    );
    say!(
        "cooperative",
        "{}",
        get(node, CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
    );
    say!("attribute 99", "{}", get(node, 99));
    word[0] = 3;
    say!(
        "set attribute 99",
        "{}",
        cu!(cuGraphKernelNodeSetAttribute, kernel, 99u32, word.as_ptr())
    );
    let join = empty(g, &[]);
    say!(
        "of an empty node",
        "{}",
        get(join, CU_LAUNCH_ATTRIBUTE_PRIORITY)
    );
    say!(
        "parameters of an empty node",
        "{}",
        cu!(cuGraphKernelNodeGetParams_v2, join, &mut found)
    );

    // Memsets.
    let (_, memset) = add_memset(
        g,
        &[],
        &CUDA_MEMSET_NODE_PARAMS {
            to: out,
            pitch: 64,
            value: 7,
            element: 2,
            width: 4,
            height: 3,
        },
    );
    let mut memset_found = CUDA_MEMSET_NODE_PARAMS::default();
    say!(
        "memset",
        "{}",
        cu!(cuGraphMemsetNodeGetParams, memset, &mut memset_found)
    );
    let shown = |found: &CUDA_MEMSET_NODE_PARAMS| {
        format!(
            "{} {} {} {} {} {}",
            found.to.wrapping_sub(out),
            found.pitch,
            found.value,
            found.element,
            found.width,
            found.height
        )
    };
    say!("it is", "{}", shown(&memset_found));
    let flat = memset_params(out + 64, 3, 9);
    say!(
        "set",
        "{}",
        cu!(
            cuGraphMemsetNodeSetParams,
            memset,
            &flat as *const CUDA_MEMSET_NODE_PARAMS
        )
    );
    must!(cuGraphMemsetNodeGetParams, memset, &mut memset_found);
    say!("it is", "{}", shown(&memset_found));
    for (what, wrong) in [
        ("no memory", CUDA_MEMSET_NODE_PARAMS { to: 0, ..flat }),
        (
            "memory of nobody",
            CUDA_MEMSET_NODE_PARAMS {
                to: 0x10_0000,
                ..flat
            },
        ),
        (
            "beyond the end",
            CUDA_MEMSET_NODE_PARAMS {
                width: 1 << 40,
                ..flat
            },
        ),
        ("no rows", CUDA_MEMSET_NODE_PARAMS { height: 0, ..flat }),
        ("no width", CUDA_MEMSET_NODE_PARAMS { width: 0, ..flat }),
        (
            "elements of 3 bytes",
            CUDA_MEMSET_NODE_PARAMS { element: 3, ..flat },
        ),
        (
            "misaligned",
            CUDA_MEMSET_NODE_PARAMS {
                to: out + 1,
                ..flat
            },
        ),
        (
            "a small pitch",
            CUDA_MEMSET_NODE_PARAMS {
                height: 2,
                pitch: 4,
                ..flat
            },
        ),
    ] {
        say!(
            format!("memset: {what}"),
            "{}",
            add_memset(g, &[], &wrong).0
        );
    }
    // Copies.
    let mut pinned = 0u64;
    must!(cuMemHostAlloc, &mut pinned, 4096usize, 0u32);
    let to_device = copy_params((pinned, 1), (out, 2), 64);
    let (result, copy) = add_copy(g, &[], &to_device);
    say!("copy", "{result}");
    let mut copy_found = CUDA_MEMCPY3D::default();
    say!(
        "parameters",
        "{}",
        cu!(cuGraphMemcpyNodeGetParams, copy, &mut copy_found)
    );
    let shown = |found: &CUDA_MEMCPY3D| {
        let side = |kind: u32, host: u64, device: u64| match kind {
            1 if host == pinned => "pinned",
            2 if device == out => "device",
            2 if device == pinned => "pinned as device",
            4 if device == out => "any: device",
            4 if device == pinned => "any: pinned",
            _ => "another",
        };
        format!(
            "{} {} to {} {}; {}x{}x{} pitch {} {}",
            found.src_type,
            side(found.src_type, found.src_host, found.src_device),
            found.dst_type,
            side(found.dst_type, found.dst_host, found.dst_device),
            found.width,
            found.height,
            found.depth,
            found.src_pitch,
            found.dst_pitch
        )
    };
    say!("they are", "{}", shown(&copy_found));
    let any = copy_params((out, 4), (pinned, 4), 32);
    say!(
        "set",
        "{}",
        cu!(
            cuGraphMemcpyNodeSetParams,
            copy,
            &any as *const CUDA_MEMCPY3D
        )
    );
    must!(cuGraphMemcpyNodeGetParams, copy, &mut copy_found);
    say!("they are", "{}", shown(&copy_found));
    let plane = CUDA_MEMCPY3D {
        height: 3,
        src_pitch: 128,
        dst_pitch: 64,
        ..copy_params((out, 2), (pinned, 1), 16)
    };
    let (result, node) = add_copy(g, &[], &plane);
    say!("rows", "{result}");
    must!(cuGraphMemcpyNodeGetParams, node, &mut copy_found);
    say!("they are", "{}", shown(&copy_found));
    for (what, wrong) in [
        ("from nowhere", copy_params((0, 2), (out, 2), 64)),
        ("from nobody's", copy_params((0x10_0000, 2), (out, 2), 64)),
        (
            "beyond the end",
            copy_params((out, 2), (pinned, 1), 1 << 40),
        ),
        ("nothing", copy_params((out, 2), (pinned, 1), 0)),
        ("kind 9", copy_params((out, 9), (pinned, 1), 16)),
        ("no rows", CUDA_MEMCPY3D { height: 0, ..plane }),
        (
            "a small pitch",
            CUDA_MEMCPY3D {
                src_pitch: 8,
                ..plane
            },
        ),
        (
            "host to host",
            copy_params((pinned, 1), (pinned + 64, 1), 16),
        ),
    ] {
        say!(format!("copy: {what}"), "{}", add_copy(g, &[], &wrong).0);
    }
    let mut fine = CUgraphNode::NULL;
    say!(
        "no context",
        "{}",
        cu!(
            cuGraphAddMemcpyNode,
            &mut fine,
            g,
            NO_NODES,
            0usize,
            &to_device as *const CUDA_MEMCPY3D,
            CUcontext::NULL
        )
    );
    say!(
        "parameters by cuGraphNodeSetParams",
        "{}",
        cu!(
            cuGraphNodeSetParams,
            memset,
            &mut any_node(
                CU_GRAPH_NODE_TYPE_MEMSET,
                &[flat.as_bytes(), context().0.as_bytes()]
                    .concat()
                    .as_slice()
                    .try_into()
                    .map(|b: [u8; 48]| b)
                    .expect("48 bytes")
            )
        )
    );
    say!(
        "kernel by cuGraphNodeSetParams",
        "{}",
        cu!(
            cuGraphNodeSetParams,
            kernel,
            &mut any_node(CU_GRAPH_NODE_TYPE_KERNEL, &params.node(setup))
        )
    );
    say!(
        "of another kind",
        "{}",
        cu!(
            cuGraphNodeSetParams,
            memset,
            &mut any_node(CU_GRAPH_NODE_TYPE_KERNEL, &params.node(setup))
        )
    );
    // Stream memory operations.
    let operation =
        |kind: u64, address: u64, value: u64, flags: u64| [kind, address, value, flags, 0, 0];
    // 2: a write of 32 bits.
    let mut both = [operation(2, pinned, 3, 0), operation(2, pinned + 8, 5, 0)];
    let with = |both: &[[u64; 6]; 2]| CUDA_BATCH_MEM_OP_NODE_PARAMS {
        context: context().0,
        count: 2,
        operations: both.as_ptr() as u64,
        ..Default::default()
    };
    let batch = with(&both);
    let mut memory_node = CUgraphNode::NULL;
    say!(
        "memory operations",
        "{}",
        cu!(
            cuGraphAddBatchMemOpNode,
            &mut memory_node,
            g,
            NO_NODES,
            0usize,
            &batch as *const CUDA_BATCH_MEM_OP_NODE_PARAMS
        )
    );
    say!("kind", "{}", kind(memory_node));
    let mut batch_found = CUDA_BATCH_MEM_OP_NODE_PARAMS::default();
    say!(
        "parameters",
        "{}",
        cu!(
            cuGraphBatchMemOpNodeGetParams,
            memory_node,
            &mut batch_found
        )
    );
    // SAFETY: the driver's own array.
    let first = unsafe { *(batch_found.operations as *const [u64; 6]) };
    say!(
        "they are",
        "{} {} {} {:?}",
        batch_found.count,
        batch_found.flags,
        batch_found.context == context().0,
        (first[0] as u32, first[1] == pinned, first[2] as u32)
    );
    both[0][2] = 4;
    let batch = with(&both);
    say!(
        "set",
        "{}",
        cu!(
            cuGraphBatchMemOpNodeSetParams,
            memory_node,
            &batch as *const CUDA_BATCH_MEM_OP_NODE_PARAMS
        )
    );
    let none = CUDA_BATCH_MEM_OP_NODE_PARAMS { count: 0, ..batch };
    say!(
        "no operations",
        "{}",
        cu!(
            cuGraphAddBatchMemOpNode,
            &mut { CUgraphNode::NULL },
            g,
            NO_NODES,
            0usize,
            &none as *const CUDA_BATCH_MEM_OP_NODE_PARAMS
        )
    );
    let g2 = graph();
    let mut node = CUgraphNode::NULL;
    must!(
        cuGraphAddBatchMemOpNode,
        &mut node,
        g2,
        NO_NODES,
        0usize,
        &batch as *const CUDA_BATCH_MEM_OP_NODE_PARAMS
    );
    let exec = instantiate(g2);
    both[0][2] = 6;
    let batch = with(&both);
    say!(
        "set the instance's",
        "{}",
        cu!(
            cuGraphExecBatchMemOpNodeSetParams,
            exec,
            node,
            &batch as *const CUDA_BATCH_MEM_OP_NODE_PARAMS
        )
    );
    run(exec);
    // SAFETY: pinned memory of this program.
    say!("written", "{:?}", unsafe {
        (*(pinned as *const u32), *((pinned + 8) as *const u32))
    });
    must!(cuGraphExecDestroy, exec);
    // A dot file.
    let path = std::env::temp_dir().join(format!("mpsshim-dot-{}", std::process::id()));
    let text = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
    say!(
        "dot",
        "{}",
        cu!(cuGraphDebugDotPrint, g2, text.as_ptr(), 1u32)
    );
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    say!(
        "it is",
        "{} {}",
        written.contains("digraph"),
        written.trim_end().ends_with('}')
    );
    let _ = std::fs::remove_file(&path);
    say!(
        "dot into null",
        "{}",
        cu!(cuGraphDebugDotPrint, g2, null::<c_char>(), 0u32)
    );
    say!(
        "dot to nowhere",
        "{}",
        cu!(
            cuGraphDebugDotPrint,
            g2,
            c"/nonexistent/folder/file".as_ptr(),
            0u32
        )
    );
    for graph in [g, g2, other] {
        must!(cuGraphDestroy, graph);
    }
    must!(cuMemFreeHost, pinned);
    must!(cuLibraryUnload, library);
    free(out);
}

pub fn graph_exec(setup: &Setup) {
    let out = alloc(4096);
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let g = graph();
    let params = StoreIndex::new(out, 64, 5);
    let (_, kernel) = add_kernel(g, &[], &params.node(setup));
    let (_, memset) = add_memset(g, &[kernel], &memset_params(out + 512, 8, 4));
    let (_, copy) = add_copy(g, &[memset], &copy_params((out, 2), (out + 1024, 2), 64));
    let inner = graph();
    let (_, _) = add_memset(inner, &[], &memset_params(out + 2048, 4, 2));
    let mut child = CUgraphNode::NULL;
    must!(
        cuGraphAddChildGraphNode,
        &mut child,
        g,
        &copy,
        1usize,
        inner
    );
    let mut exec = CUgraphExec::NULL;
    say!(
        "instantiate",
        "{}",
        cu!(cuGraphInstantiateWithFlags, &mut exec, g, 0u64)
    );
    let mut error_node = CUgraphNode(7);
    let mut log = [7 as c_char; 64];
    let mut second = CUgraphExec::NULL;
    say!(
        "as of CUDA 11.0",
        "{} {:?} {}",
        cu!(
            cuGraphInstantiate_v2,
            &mut second,
            g,
            &mut error_node,
            log.as_mut_ptr(),
            64usize
        ),
        error_node,
        log[0]
    );
    say!("error node", "{:?} {}", error_node, log[0]);
    must!(cuGraphExecDestroy, second);
    say!(
        "as of CUDA 10.0",
        "{}",
        cu!(
            cuGraphInstantiate,
            &mut second,
            g,
            null_mut::<CUgraphNode>(),
            null_mut::<c_char>(),
            0usize
        )
    );
    must!(cuGraphExecDestroy, second);
    let s = stream(CU_STREAM_NON_BLOCKING);
    let mut with = CUDA_GRAPH_INSTANTIATE_PARAMS {
        flags: 2,
        upload_stream: s.0,
        error_node: 7,
        result: 7,
        pad: 0,
    };
    say!(
        "with parameters",
        "{}",
        cu!(cuGraphInstantiateWithParams, &mut second, g, &mut with)
    );
    say!("they are", "{} {}", with.error_node, with.result);
    let mut flags = 9u64;
    say!(
        "flags",
        "{} {flags}",
        cu!(cuGraphExecGetFlags, second, &mut flags)
    );
    say!("they are", "{flags}");
    must!(cuGraphExecDestroy, second);
    say!(
        "unknown flags",
        "{}",
        cu!(cuGraphInstantiateWithFlags, &mut second, g, 0x100u64)
    );
    say!(
        "into null",
        "{}",
        cu!(
            cuGraphInstantiateWithFlags,
            null_mut::<CUgraphExec>(),
            g,
            0u64
        )
    );
    say!(
        "of null",
        "{}",
        cu!(
            cuGraphInstantiateWithFlags,
            &mut second,
            CUgraph::NULL,
            0u64
        )
    );
    must!(cuGraphInstantiateWithFlags, &mut second, g, 9u64);
    say!(
        "free on launch and priorities",
        "{} {flags}",
        cu!(cuGraphExecGetFlags, second, &mut flags)
    );
    say!("they are", "{flags}");
    must!(cuGraphExecDestroy, second);
    // Changed instances.
    let changed = StoreIndex::new(out, 64, 2);
    say!(
        "set the kernel",
        "{}",
        cu!(
            cuGraphExecKernelNodeSetParams_v2,
            exec,
            kernel,
            &changed.node(setup) as *const CUDA_KERNEL_NODE_PARAMS
        )
    );
    say!(
        "in the old form",
        "{}",
        cu!(
            cuGraphExecKernelNodeSetParams,
            exec,
            kernel,
            &changed.node(setup) as *const CUDA_KERNEL_NODE_PARAMS
        )
    );
    say!(
        "set the memset",
        "{}",
        cu!(
            cuGraphExecMemsetNodeSetParams,
            exec,
            memset,
            &memset_params(out + 512, 3, 4) as *const CUDA_MEMSET_NODE_PARAMS,
            context()
        )
    );
    say!(
        "set the copy",
        "{}",
        cu!(
            cuGraphExecMemcpyNodeSetParams,
            exec,
            copy,
            &copy_params((out + 4, 2), (out + 1024, 2), 32) as *const CUDA_MEMCPY3D,
            context()
        )
    );
    let inner_too = graph();
    let (_, _) = add_memset(inner_too, &[], &memset_params(out + 2048, 9, 2));
    say!(
        "set the child",
        "{}",
        cu!(cuGraphExecChildGraphNodeSetParams, exec, child, inner_too)
    );
    run(exec);
    say!(
        "ran",
        "{:?}",
        (
            read_i32(out, 4),
            read_i32(out + 512, 2),
            read_i32(out + 1024, 4),
            read_i32(out + 2048, 3)
        )
    );
    let two = graph();
    empty(two, &[]);
    empty(two, &[]);
    say!(
        "set the child to another shape",
        "{}",
        cu!(cuGraphExecChildGraphNodeSetParams, exec, child, two)
    );
    let mut other_function = changed.node(setup);
    other_function.function = setup.functions["nothing"].0;
    say!(
        "set another function",
        "{}",
        cu!(
            cuGraphExecKernelNodeSetParams_v2,
            exec,
            kernel,
            &other_function as *const CUDA_KERNEL_NODE_PARAMS
        )
    );
    say!(
        "set the wrong node",
        "{}",
        cu!(
            cuGraphExecKernelNodeSetParams_v2,
            exec,
            memset,
            &changed.node(setup) as *const CUDA_KERNEL_NODE_PARAMS
        )
    );
    let foreign = empty(two, &[]);
    say!(
        "set a foreign node",
        "{}",
        cu!(
            cuGraphExecKernelNodeSetParams_v2,
            exec,
            foreign,
            &changed.node(setup) as *const CUDA_KERNEL_NODE_PARAMS
        )
    );
    say!(
        "any: set the kernel",
        "{}",
        cu!(
            cuGraphExecNodeSetParams,
            exec,
            kernel,
            &mut any_node(CU_GRAPH_NODE_TYPE_KERNEL, &params.node(setup))
        )
    );
    // Disabled nodes.
    let mut enabled = 9u32;
    say!(
        "enabled",
        "{} {enabled}",
        cu!(cuGraphNodeGetEnabled, exec, kernel, &mut enabled)
    );
    say!("it is", "{enabled}");
    say!(
        "disable",
        "{}",
        cu!(cuGraphNodeSetEnabled, exec, kernel, 0u32)
    );
    must!(cuGraphNodeGetEnabled, exec, kernel, &mut enabled);
    say!("it is", "{enabled}");
    say!(
        "disable a child",
        "{}",
        cu!(cuGraphNodeSetEnabled, exec, child, 0u32)
    );
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    run(exec);
    say!(
        "ran without",
        "{:?}",
        (read_i32(out, 4), read_i32(out + 512, 2))
    );
    say!(
        "enable",
        "{}",
        cu!(cuGraphNodeSetEnabled, exec, kernel, 1u32)
    );
    say!(
        "of a foreign node",
        "{}",
        cu!(cuGraphNodeGetEnabled, exec, foreign, &mut enabled)
    );
    // Updates.
    let mut updated = CUgraph::NULL;
    must!(cuGraphClone, &mut updated, g);
    let mut twin = CUgraphNode::NULL;
    must!(cuGraphNodeFindInClone, &mut twin, kernel, updated);
    let third = StoreIndex::new(out, 64, 11);
    must!(
        cuGraphKernelNodeSetParams_v2,
        twin,
        &third.node(setup) as *const CUDA_KERNEL_NODE_PARAMS
    );
    let mut info = CUgraphExecUpdateResultInfo {
        result: 9,
        ..Default::default()
    };
    say!(
        "update",
        "{}",
        cu!(cuGraphExecUpdate_v2, exec, updated, &mut info)
    );
    say!(
        "result",
        "{} {} {}",
        info.result,
        info.error_node,
        info.error_from
    );
    run(exec);
    say!("ran", "{:?}", read_i32(out, 4));
    let extra = empty(updated, &[]);
    say!(
        "update to another shape",
        "{}",
        cu!(cuGraphExecUpdate_v2, exec, updated, &mut info)
    );
    say!(
        "result",
        "{} {} {}",
        info.result,
        info.error_node == extra.0,
        info.error_from != 0
    );
    let mut result = 9u32;
    let mut error_node = CUgraphNode::NULL;
    say!(
        "in the old form",
        "{}",
        cu!(
            cuGraphExecUpdate,
            exec,
            updated,
            &mut error_node,
            &mut result
        )
    );
    say!("result", "{result} {}", error_node == extra);
    must!(cuGraphDestroyNode, extra);
    must!(
        cuGraphKernelNodeSetParams_v2,
        twin,
        &other_function as *const CUDA_KERNEL_NODE_PARAMS
    );
    say!(
        "update to another function",
        "{}",
        cu!(cuGraphExecUpdate_v2, exec, updated, &mut info)
    );
    say!("result", "{} {}", info.result, info.error_node == twin.0);
    let kinds = graph();
    let first = add_memset(kinds, &[], &memset_params(out, 1, 1)).1;
    let first = add_memset(kinds, &[first], &memset_params(out, 1, 1)).1;
    let first = add_memset(kinds, &[first], &memset_params(out, 1, 1)).1;
    let _ = add_memset(kinds, &[first], &memset_params(out, 1, 1));
    say!(
        "update to other kinds",
        "{}",
        cu!(cuGraphExecUpdate_v2, exec, kinds, &mut info)
    );
    say!("result", "{} {}", info.result, info.error_node != 0);
    say!(
        "update into null",
        "{}",
        cu!(
            cuGraphExecUpdate_v2,
            exec,
            updated,
            null_mut::<CUgraphExecUpdateResultInfo>()
        )
    );
    say!(
        "launch null",
        "{}",
        cu!(cuGraphLaunch, CUgraphExec::NULL, s)
    );
    say!("upload", "{}", cu!(cuGraphUpload, exec, s));
    say!("destroy null", "{}", cu!(cuGraphDestroy, CUgraph::NULL));
    say!(
        "destroy no instance",
        "{}",
        cu!(cuGraphExecDestroy, CUgraphExec::NULL)
    );
    say!(
        "destroy no node",
        "{}",
        cu!(cuGraphDestroyNode, CUgraphNode::NULL)
    );
    say!(
        "kind of no node",
        "{}",
        cu!(cuGraphNodeGetType, CUgraphNode::NULL, &mut { 0u32 })
    );
    // Many launches, in several streams, between other work.
    let counter = alloc(64);
    must!(cuMemsetD8_v2, counter, 0u8, 64usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let loops = graph();
    let one = StoreIndex::new(counter, 4, 1);
    let mut last: Vec<CUgraphNode> = Vec::new();
    for _ in 0..20 {
        last = vec![add_kernel(loops, &last, &one.node(setup)).1];
    }
    let looping = instantiate(loops);
    for round in 0..200 {
        must!(
            cuGraphLaunch,
            looping,
            if round % 2 == 0 { s } else { CUstream::NULL }
        );
        must!(cuMemsetD32Async, counter + 16, round, 1usize, s);
    }
    must!(cuCtxSynchronize);
    say!("many launches", "{:?}", read_i32(counter, 5));
    must!(cuGraphExecDestroy, looping);
    must!(cuGraphExecDestroy, exec);
    for graph in [g, inner, inner_too, two, updated, kinds, loops] {
        must!(cuGraphDestroy, graph);
    }
    must!(cuStreamDestroy_v2, s);
    free(counter);
    free(out);
}

pub fn graph_memory(setup: &Setup) {
    let out = alloc(4096);
    let g = graph();
    let mut device = 0;
    must!(cuCtxGetDevice, &mut device);
    let _: CUdevice = device;
    let mut params = CUDA_MEM_ALLOC_NODE_PARAMS {
        kind: 1,
        location_kind: 1,
        location: device as u32,
        bytes: 1 << 20,
        ..Default::default()
    };
    let mut allocate = CUgraphNode::NULL;
    say!(
        "allocate",
        "{}",
        cu!(
            cuGraphAddMemAllocNode,
            &mut allocate,
            g,
            NO_NODES,
            0usize,
            &mut params
        )
    );
    say!("it is", "{} {}", params.address != 0, kind(allocate));
    let mut found = CUDA_MEM_ALLOC_NODE_PARAMS::default();
    say!(
        "parameters",
        "{}",
        cu!(cuGraphMemAllocNodeGetParams, allocate, &mut found)
    );
    say!(
        "they are",
        "{} {} {} {}",
        found.address == params.address,
        found.bytes,
        found.kind,
        found.access_count
    );
    let (result, memset) = add_memset(g, &[allocate], &memset_params(params.address, 6, 16));
    say!("memset of it", "{result}");
    let (result, copy) = add_copy(
        g,
        &[memset],
        &copy_params((params.address, 2), (out, 2), 64),
    );
    say!("copy of it", "{result}");
    let mut free_node = CUgraphNode::NULL;
    say!(
        "free",
        "{}",
        cu!(
            cuGraphAddMemFreeNode,
            &mut free_node,
            g,
            &copy,
            1usize,
            params.address
        )
    );
    let mut address = 0u64;
    say!(
        "address of it",
        "{} {}",
        cu!(cuGraphMemFreeNodeGetParams, free_node, &mut address),
        address == params.address
    );
    say!(
        "free again",
        "{}",
        cu!(
            cuGraphAddMemFreeNode,
            &mut { CUgraphNode::NULL },
            g,
            &free_node,
            1usize,
            params.address
        )
    );
    say!(
        "free nobody's",
        "{}",
        cu!(
            cuGraphAddMemFreeNode,
            &mut { CUgraphNode::NULL },
            g,
            NO_NODES,
            0usize,
            0x10_0000u64
        )
    );
    say!("clone", "{}", cu!(cuGraphClone, &mut { CUgraph::NULL }, g));
    say!("destroy the node", "{}", cu!(cuGraphDestroyNode, allocate));
    say!(
        "a dependency",
        "{}",
        cu!(cuGraphAddDependencies, g, &allocate, &copy, 1usize)
    );
    let exec = instantiate(g);
    say!(
        "a second instance",
        "{}",
        cu!(
            cuGraphInstantiateWithFlags,
            &mut { CUgraphExec::NULL },
            g,
            0u64
        )
    );
    let attribute = |which: u32| {
        let mut value = 77u64;
        let result = cu!(cuDeviceGetGraphMemAttribute, device, which, &mut value);
        (result, value)
    };
    run(exec);
    say!("ran", "{:?}", read_i32(out, 2));
    for which in 0..5u32 {
        let (result, value) = attribute(which);
        say!(
            format!("attribute {which}"),
            "{result} {}",
            match which {
                0 | 4 => String::new(),
                _ => (value >= 1 << 20).to_string(),
            }
        );
    }
    say!("trim", "{}", cu!(cuDeviceGraphMemTrim, device));
    say!(
        "set the high mark",
        "{}",
        cu!(cuDeviceSetGraphMemAttribute, device, 1u32, &mut { 0u64 })
    );
    say!(
        "set the high mark to one",
        "{}",
        cu!(cuDeviceSetGraphMemAttribute, device, 1u32, &mut { 1u64 })
    );
    say!(
        "set the current",
        "{}",
        cu!(cuDeviceSetGraphMemAttribute, device, 0u32, &mut { 0u64 })
    );
    say!(
        "of no device",
        "{}",
        cu!(cuDeviceGetGraphMemAttribute, 99 as c_int, 0u32, &mut {
            0u64
        })
    );
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, g);
    // Memory that outlives its graph's launch.
    let g = graph();
    must!(
        cuGraphAddMemAllocNode,
        &mut allocate,
        g,
        NO_NODES,
        0usize,
        &mut params
    );
    let (_, memset) = add_memset(g, &[allocate], &memset_params(params.address, 21, 16));
    let _ = memset;
    let exec = instantiate(g);
    let s = stream(CU_STREAM_NON_BLOCKING);
    must!(cuGraphLaunch, exec, s);
    must!(cuMemcpyDtoDAsync_v2, out, params.address, 64usize, s);
    must!(cuStreamSynchronize, s);
    say!("outlives the launch", "{:?}", read_i32(out, 2));
    say!("launch again", "{}", cu!(cuGraphLaunch, exec, s));
    say!(
        "free in a stream",
        "{}",
        cu!(cuMemFreeAsync, params.address, s)
    );
    must!(cuStreamSynchronize, s);
    say!("launch again", "{}", cu!(cuGraphLaunch, exec, s));
    must!(cuStreamSynchronize, s);
    say!("free at once", "{}", cu!(cuMemFree_v2, params.address));
    must!(cuGraphExecDestroy, exec);
    say!(
        "freed on launch",
        "{}",
        cu!(
            cuGraphInstantiateWithFlags,
            &mut { CUgraphExec::NULL },
            g,
            1u64
        )
    );
    must!(cuGraphDestroy, g);
    // Memory that outlives its graph, and its instance.
    for (what, launch) in [("launched", true), ("never launched", false)] {
        let g = graph();
        must!(
            cuGraphAddMemAllocNode,
            &mut allocate,
            g,
            NO_NODES,
            0usize,
            &mut params
        );
        let (_, memset) = add_memset(g, &[allocate], &memset_params(params.address, 23, 16));
        let _ = memset;
        let exec = instantiate(g);
        must!(cuGraphDestroy, g);
        if launch {
            must!(cuGraphLaunch, exec, s);
            must!(cuStreamSynchronize, s);
            let status = cu!(cuMemcpyDtoDAsync_v2, out, params.address, 64usize, s);
            must!(cuStreamSynchronize, s);
            say!("without its graph", "{status} {:?}", read_i32(out, 2));
        }
        must!(cuGraphExecDestroy, exec);
        if launch {
            must!(cuMemsetD32_v2, out, 0u32, 16usize);
            must!(cuStreamSynchronize, CUstream::NULL);
            let status = cu!(cuMemcpyDtoDAsync_v2, out, params.address, 64usize, s);
            must!(cuStreamSynchronize, s);
            say!("without its instance", "{status} {:?}", read_i32(out, 2));
        }
        say!(
            format!("free {what}"),
            "{}",
            cu!(cuMemFree_v2, params.address)
        );
    }
    // Captured stream-ordered allocation.
    must!(cuStreamBeginCapture_v2, s, 0u32);
    let mut pointer = 0u64;
    say!(
        "captured allocation",
        "{} {}",
        cu!(cuMemAllocAsync, &mut pointer, 1usize << 16, s),
        pointer != 0
    );
    must!(cuMemsetD32Async, pointer, 5u32, 64usize, s);
    must!(cuMemcpyDtoDAsync_v2, out, pointer, 64usize, s);
    say!("store in it", "{}", setup.store_index(pointer, 16, 3, s));
    must!(cuMemcpyDtoDAsync_v2, out + 64, pointer, 64usize, s);
    say!("captured free", "{}", cu!(cuMemFreeAsync, pointer, s));
    let mut graph = CUgraph::NULL;
    must!(cuStreamEndCapture, s, &mut graph);
    say!("kinds", "{:?}", kinds(graph));
    let exec = instantiate(graph);
    for _ in 0..3 {
        must!(cuGraphLaunch, exec, s);
    }
    must!(cuStreamSynchronize, s);
    say!("ran", "{:?} {:?}", read_i32(out, 2), read_i32(out + 64, 4));
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, graph);
    must!(cuStreamDestroy_v2, s);
    free(out);
}

pub fn graph_conditional(setup: &Setup) {
    let out = alloc(4096);
    must!(cuMemsetD8_v2, out, 0u8, 4096usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let mut module = CUmodule::NULL;
    say!(
        "module",
        "{}",
        cu!(cuModuleLoadData, &mut module, CONDITIONAL.as_ptr())
    );
    let function = |name: &std::ffi::CStr| {
        let mut function = CUfunction::NULL;
        must!(cuModuleGetFunction, &mut function, module, name.as_ptr());
        function
    };
    let (count_down, set_condition) = (function(c"count_down"), function(c"set_condition"));
    let g = graph();
    let mut handle = 0u64;
    say!(
        "handle",
        "{} {}",
        cu!(
            cuGraphConditionalHandleCreate,
            &mut handle,
            g,
            context(),
            1u32,
            CU_GRAPH_COND_ASSIGN_DEFAULT
        ),
        handle != 0
    );
    say!(
        "wrong flags",
        "{}",
        cu!(
            cuGraphConditionalHandleCreate,
            &mut { 0u64 },
            g,
            context(),
            1u32,
            77u32
        )
    );
    let mut body = [CUgraph::NULL; 3];
    let mut params = any_node(
        CU_GRAPH_NODE_TYPE_CONDITIONAL,
        &CUDA_CONDITIONAL_NODE_PARAMS {
            handle,
            kind: 1,
            size: 1,
            graphs: 0,
            context: context().0,
        },
    );
    let mut node = CUgraphNode::NULL;
    say!(
        "while",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut node,
            g,
            NO_NODES,
            NO_DATA,
            0usize,
            &mut params
        )
    );
    say!("kind", "{}", kind(node));
    let given: CUDA_CONDITIONAL_NODE_PARAMS = read_back(&params);
    say!("a body", "{}", given.graphs != 0);
    // SAFETY: the driver's own array of `size` graphs.
    body[0] = unsafe { *(given.graphs as *const CUgraph) };
    say!("it is empty", "{:?}", kinds(body[0]));
    let (left, passes) = (out, out + 64);
    must!(cuMemsetD32_v2, left, 5u32, 1usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    let pointers = [
        &raw const handle as u64,
        &raw const left as u64,
        &raw const passes as u64,
    ];
    let kernel = CUDA_KERNEL_NODE_PARAMS {
        function: count_down.0,
        grid: [1; 3],
        block: [1; 3],
        params: pointers.as_ptr() as u64,
        ..Default::default()
    };
    say!(
        "kernel in the body",
        "{}",
        add_kernel(body[0], &[], &kernel).0
    );
    say!("destroy a body", "{}", cu!(cuGraphDestroy, body[0]));
    say!(
        "the handle again",
        "{}",
        cu!(
            cuGraphAddNode_v2,
            &mut { CUgraphNode::NULL },
            g,
            NO_NODES,
            NO_DATA,
            0usize,
            &mut params
        )
    );
    let exec = instantiate(g);
    run(exec);
    say!(
        "passes",
        "{:?} {:?}",
        read_i32(passes, 1),
        read_i32(left, 1)
    );
    must!(cuMemsetD32_v2, left, 3u32, 1usize);
    must!(cuStreamSynchronize, CUstream::NULL);
    run(exec);
    say!(
        "passes",
        "{:?} {:?}",
        read_i32(passes, 1),
        read_i32(left, 1)
    );
    must!(cuGraphExecDestroy, exec);
    say!("clone", "{}", {
        let mut clone = CUgraph::NULL;
        let result = cu!(cuGraphClone, &mut clone, g);
        if result.is_ok() {
            must!(cuGraphDestroy, clone)
        }
        result
    });
    must!(cuGraphDestroy, g);
    // if, else; the condition is set by a kernel before it. switch.
    for (what, kind, size) in [
        ("if", 0u32, 1u32),
        ("if else", 0, 2),
        ("switch", 2, 3),
        ("while of two", 1, 2),
        ("switch of none", 2, 0),
        ("kind 5", 5, 1),
    ] {
        let g = graph();
        let mut handle = 0u64;
        must!(
            cuGraphConditionalHandleCreate,
            &mut handle,
            g,
            context(),
            0u32,
            0u32
        );
        let value = std::cell::Cell::new(0u32);
        let pointers = [&raw const handle as u64, value.as_ptr() as u64];
        let kernel = CUDA_KERNEL_NODE_PARAMS {
            function: set_condition.0,
            grid: [1; 3],
            block: [1; 3],
            params: pointers.as_ptr() as u64,
            ..Default::default()
        };
        let (_, before) = add_kernel(g, &[], &kernel);
        let mut params = any_node(
            CU_GRAPH_NODE_TYPE_CONDITIONAL,
            &CUDA_CONDITIONAL_NODE_PARAMS {
                handle,
                kind,
                size,
                graphs: 0,
                context: context().0,
            },
        );
        let mut node = CUgraphNode::NULL;
        let result = cu!(
            cuGraphAddNode_v2,
            &mut node,
            g,
            &before,
            NO_DATA,
            1usize,
            &mut params
        );
        say!(what, "{result}");
        if !result.is_ok() {
            must!(cuGraphDestroy, g);
            continue;
        }
        let given: CUDA_CONDITIONAL_NODE_PARAMS = read_back(&params);
        for i in 0..size as usize {
            // SAFETY: the driver's own array of `size` graphs.
            let body = unsafe { *(given.graphs as *const CUgraph).add(i) };
            must!(cuGraphGetNodes, body, null_mut::<CUgraphNode>(), &mut {
                0usize
            });
            let (result, _) = add_memset(body, &[], &memset_params(out + 128 + 4 * i as u64, 1, 1));
            assert!(result.is_ok());
        }
        let exec = instantiate(g);
        for chosen in 0..4u32 {
            value.set(chosen);
            must!(
                cuGraphExecKernelNodeSetParams_v2,
                exec,
                before,
                &kernel as *const CUDA_KERNEL_NODE_PARAMS
            );
            must!(cuMemsetD8_v2, out + 128, 0u8, 16usize);
            must!(cuStreamSynchronize, CUstream::NULL);
            run(exec);
            say!(format!("{what}, {chosen}"), "{:?}", read_i32(out + 128, 3));
        }
        must!(cuGraphExecDestroy, exec);
        must!(cuGraphDestroy, g);
    }
    let _ = setup;
    must!(cuModuleUnload, module);
    free(out);
}

static ENDED: [AtomicU32; 4] = [const { AtomicU32::new(0) }; 4];

extern "C" fn ended(data: *mut c_void) {
    ENDED[data as usize].fetch_add(1, Ordering::SeqCst);
}

pub fn user_objects(_setup: &Setup) {
    let end: extern "C" fn(*mut c_void) = ended;
    // The destructor may run a little later, in another thread.
    let count = |which: usize| {
        for _ in 0..200 {
            if ENDED[which].load(Ordering::SeqCst) > 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        ENDED[which].load(Ordering::SeqCst)
    };
    let object = |which: usize, references: u32| {
        let mut object = CUuserObject::NULL;
        must!(
            cuUserObjectCreate,
            &mut object,
            which as *mut c_void,
            end,
            references,
            CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        );
        object
    };
    let null = null_mut::<c_void>();
    say!(
        "create without the flag",
        "{}",
        cu!(
            cuUserObjectCreate,
            &mut { CUuserObject::NULL },
            null,
            end,
            1u32,
            0u32
        )
    );
    say!(
        "create with no reference",
        "{}",
        cu!(
            cuUserObjectCreate,
            &mut { CUuserObject::NULL },
            null,
            end,
            0u32,
            1u32
        )
    );
    say!(
        "create into null",
        "{}",
        cu!(
            cuUserObjectCreate,
            null_mut::<CUuserObject>(),
            null,
            end,
            1u32,
            1u32
        )
    );
    say!(
        "create without destructor",
        "{}",
        cu!(
            cuUserObjectCreate,
            &mut { CUuserObject::NULL },
            null,
            null,
            1u32,
            1u32
        )
    );
    let a = object(0, 1);
    say!("retain", "{}", cu!(cuUserObjectRetain, a, 2u32));
    say!("retain none", "{}", cu!(cuUserObjectRetain, a, 0u32));
    say!("release two", "{}", cu!(cuUserObjectRelease, a, 2u32));
    say!("ended", "{}", ENDED[0].load(Ordering::SeqCst));
    say!("release the last", "{}", cu!(cuUserObjectRelease, a, 1u32));
    say!("ended", "{}", count(0));
    let b = object(1, 2);
    let g = graph();
    empty(g, &[]);
    say!(
        "a graph retains",
        "{}",
        cu!(cuGraphRetainUserObject, g, b, 1u32, 0u32)
    );
    say!(
        "a graph takes over",
        "{}",
        cu!(
            cuGraphRetainUserObject,
            g,
            b,
            2u32,
            CU_GRAPH_USER_OBJECT_MOVE
        )
    );
    say!(
        "wrong flags",
        "{}",
        cu!(cuGraphRetainUserObject, g, b, 1u32, 8u32)
    );
    say!(
        "of no object",
        "{}",
        cu!(cuGraphRetainUserObject, g, CUuserObject::NULL, 1u32, 0u32)
    );
    say!(
        "a graph releases",
        "{}",
        cu!(cuGraphReleaseUserObject, g, b, 1u32)
    );
    let mut clone = CUgraph::NULL;
    must!(cuGraphClone, &mut clone, g);
    let exec = instantiate(g);
    must!(cuGraphDestroy, g);
    say!(
        "the clone and the instance keep it",
        "{}",
        ENDED[1].load(Ordering::SeqCst)
    );
    must!(cuGraphDestroy, clone);
    say!(
        "the instance keeps it",
        "{}",
        ENDED[1].load(Ordering::SeqCst)
    );
    run(exec);
    must!(cuGraphExecDestroy, exec);
    say!("ended", "{}", count(1));
    let c = object(2, 1);
    let g = graph();
    let inner = graph();
    must!(
        cuGraphRetainUserObject,
        inner,
        c,
        1u32,
        CU_GRAPH_USER_OBJECT_MOVE
    );
    let mut child = CUgraphNode::NULL;
    must!(
        cuGraphAddChildGraphNode,
        &mut child,
        g,
        NO_NODES,
        0usize,
        inner
    );
    must!(cuGraphDestroy, inner);
    say!("a child keeps it", "{}", ENDED[2].load(Ordering::SeqCst));
    must!(cuGraphDestroyNode, child);
    say!("ended", "{}", count(2));
    must!(cuGraphDestroy, g);
}

/// What host functions saw: the value at an address, each time.
static SEEN: std::sync::Mutex<Vec<i32>> = std::sync::Mutex::new(Vec::new());

extern "C" fn see(data: *mut c_void) {
    // SAFETY: the section gives the address of pinned memory of its own.
    let value = unsafe { *(data as *const i32) };
    SEEN.lock().expect("no panic").push(value);
}

extern "C" fn add_hundred(data: *mut c_void) {
    // SAFETY: as above.
    unsafe { *(data as *mut i32) += 100 };
}

type HostFunction = extern "C" fn(*mut c_void);

#[repr(C)]
#[derive(Clone, Copy)]
struct HostNode {
    function: Option<HostFunction>,
    data: u64,
}

/// Host functions in captures and graphs.
pub fn graph_host(_setup: &Setup) {
    let out = alloc(4096);
    let mut pinned = 0u64;
    must!(cuMemHostAlloc, &mut pinned, 4096usize, 0u32);
    let s = stream(CU_STREAM_NON_BLOCKING);
    let take = || std::mem::take(&mut *SEEN.lock().expect("no panic"));
    let (seen, added): (HostFunction, HostFunction) = (see, add_hundred);
    // Captured: the device writes, the host changes it, the device reads it again.
    must!(cuStreamBeginCapture_v2, s, 2u32);
    must!(cuMemsetD32Async, pinned, 7u32, 1usize, s);
    say!(
        "captured",
        "{}",
        cu!(cuLaunchHostFunc, s, seen, pinned as *mut c_void)
    );
    must!(cuLaunchHostFunc, s, added, pinned as *mut c_void);
    must!(cuMemcpyHtoDAsync_v2, out, pinned, 4usize, s);
    let mut g = CUgraph::NULL;
    must!(cuStreamEndCapture, s, &mut g);
    say!("kinds", "{:?}", kinds(g));
    let exec = instantiate(g);
    for _ in 0..3 {
        must!(cuGraphLaunch, exec, s);
    }
    must!(cuStreamSynchronize, s);
    say!("ran", "{:?} {:?}", take(), read_i32(out, 1));
    let other = instantiate(g);
    let second = stream(CU_STREAM_NON_BLOCKING);
    must!(cuGraphLaunch, exec, s);
    must!(cuStreamSynchronize, s);
    must!(cuGraphLaunch, other, second);
    must!(cuStreamSynchronize, second);
    say!("two instances", "{:?}", take());
    must!(cuGraphExecDestroy, other);
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, g);
    // A callback cannot be captured.
    must!(cuStreamBeginCapture_v2, s, 2u32);
    say!(
        "callback",
        "{}",
        cu!(cuStreamAddCallback, s, seen, pinned as *mut c_void, 0u32)
    );
    say!("status", "{}", super::capture::status(s));
    say!("end", "{}", super::capture::end_and_count(s));
    // By hand.
    let g = graph();
    let (_, memset) = add_memset(g, &[], &memset_params(pinned + 64, 3, 1));
    let params = HostNode {
        function: Some(seen),
        data: pinned + 64,
    };
    let mut host = CUgraphNode::NULL;
    say!(
        "host node",
        "{}",
        cu!(
            cuGraphAddHostNode,
            &mut host,
            g,
            &memset,
            1usize,
            &params as *const HostNode
        )
    );
    say!("kind", "{}", kind(host));
    let mut found = HostNode {
        function: None,
        data: 0,
    };
    say!(
        "parameters",
        "{}",
        cu!(cuGraphHostNodeGetParams, host, &mut found)
    );
    say!(
        "they are",
        "{} {}",
        found.function.is_some_and(|f| f as usize == seen as usize),
        found.data == pinned + 64
    );
    say!(
        "of another node",
        "{}",
        cu!(cuGraphHostNodeGetParams, memset, &mut found)
    );
    let none = HostNode {
        function: None,
        data: 0,
    };
    say!(
        "no function",
        "{}",
        cu!(
            cuGraphAddHostNode,
            &mut { CUgraphNode::NULL },
            g,
            NO_NODES,
            0usize,
            &none as *const HostNode
        )
    );
    let exec = instantiate(g);
    run(exec);
    say!("ran", "{:?}", take());
    let changed = HostNode {
        function: Some(added),
        data: pinned + 64,
    };
    say!(
        "set the instance's",
        "{}",
        cu!(
            cuGraphExecHostNodeSetParams,
            exec,
            host,
            &changed as *const HostNode
        )
    );
    run(exec);
    // SAFETY: pinned memory of this program.
    say!("ran", "{:?} {}", take(), unsafe {
        *((pinned + 64) as *const i32)
    });
    say!(
        "set the node's",
        "{}",
        cu!(cuGraphHostNodeSetParams, host, &changed as *const HostNode)
    );
    let mut clone = CUgraph::NULL;
    must!(cuGraphClone, &mut clone, g);
    say!("kinds of a clone", "{:?}", kinds(clone));
    must!(cuGraphHostNodeSetParams, host, &params as *const HostNode);
    let mut info = CUgraphExecUpdateResultInfo::default();
    say!(
        "update",
        "{}",
        cu!(cuGraphExecUpdate_v2, exec, g, &mut info)
    );
    run(exec);
    say!("ran", "{:?}", take());
    // Inside a child graph.
    let outer = graph();
    let mut child = CUgraphNode::NULL;
    must!(
        cuGraphAddChildGraphNode,
        &mut child,
        outer,
        NO_NODES,
        0usize,
        g
    );
    let nested = instantiate(outer);
    run(nested);
    run(nested);
    say!("in a child graph", "{:?}", take());
    // Side by side.
    let wide = graph();
    for i in 0..8u64 {
        let (_, memset) = add_memset(wide, &[], &memset_params(pinned + 128 + 8 * i, i as u32, 1));
        let params = HostNode {
            function: Some(seen),
            data: pinned + 128 + 8 * i,
        };
        must!(
            cuGraphAddHostNode,
            &mut host,
            wide,
            &memset,
            1usize,
            &params as *const HostNode
        );
    }
    let many = instantiate(wide);
    for _ in 0..10 {
        must!(cuGraphLaunch, many, s);
    }
    must!(cuStreamSynchronize, s);
    let mut all = take();
    all.sort();
    say!("side by side", "{} {:?}", all.len(), (all[0], all[79]));
    for exec in [exec, nested, many] {
        must!(cuGraphExecDestroy, exec);
    }
    for graph in [g, clone, outer, wide] {
        must!(cuGraphDestroy, graph);
    }
    for stream in [s, second] {
        must!(cuStreamDestroy_v2, stream);
    }
    must!(cuMemFreeHost, pinned);
    free(out);
}

/// What adding a memset at an address gives.
pub fn memset_at(graph: CUgraph, to: u64) -> CUresult {
    add_memset(graph, &[], &memset_params(to, 1, 16)).0
}

/// What adding a copy between two addresses, of whatever memory, gives.
pub fn copy_at(graph: CUgraph, to: u64, from: u64) -> CUresult {
    add_copy(graph, &[], &copy_params((from, 4), (to, 4), 64)).0
}

/// Copies of the program's memory whose ranges share pages, as neighbours of one heap do.
pub fn graph_neighbours(_: &Setup) {
    let device = alloc(1 << 16);
    let mut heap = vec![0u8; 5 << 12];
    for (at, byte) in heap.iter_mut().enumerate() {
        *byte = (at % 251) as u8;
    }
    let base = heap.as_mut_ptr() as u64;
    let pieces = [(0u64, 5000u64), (5000, 6000), (11000, 900), (3000, 4000)];
    let to_device = graph();
    for (index, (at, len)) in pieces.into_iter().enumerate() {
        let target = device + at;
        let copy = copy_params((base + at, 1), (target, 2), len);
        say!(
            format!("copy {index} there"),
            "{}",
            add_copy(to_device, &[], &copy).0
        );
    }
    let exec = instantiate(to_device);
    run(exec);
    let mut found = vec![0u8; 11900];
    must!(cuMemcpyDtoH_v2, found.as_mut_ptr(), device, found.len());
    say!("arrived", "{}", found == heap[..found.len()]);
    let s = stream(CU_STREAM_NON_BLOCKING);
    must!(cuMemsetD8_v2, device, 77u8, 1usize << 16);
    must!(cuCtxSynchronize);
    must!(cuStreamBeginCapture_v2, s, 2u32);
    for (index, (at, len)) in pieces.into_iter().enumerate() {
        say!(
            format!("captured copy {index} back"),
            "{}",
            cu!(
                cuMemcpyDtoHAsync_v2,
                base + at,
                device + at,
                len as usize,
                s
            )
        );
    }
    let mut captured = CUgraph::NULL;
    must!(cuStreamEndCapture, s, &mut captured);
    let back = instantiate(captured);
    must!(cuGraphLaunch, back, s);
    must!(cuStreamSynchronize, s);
    say!(
        "came back",
        "{} {}",
        heap[..11900].iter().all(|byte| *byte == 77),
        heap[11900] as usize == 11900 % 251
    );
    heap[..11900].fill(5);
    run(exec);
    must!(cuMemcpyDtoH_v2, found.as_mut_ptr(), device, found.len());
    say!("changed since", "{}", found.iter().all(|byte| *byte == 5));
    // So large that the heap maps it by itself.
    let large = vec![9u8; 4 << 20];
    let far = alloc(4 << 20);
    let one = graph();
    let copy = copy_params((large.as_ptr() as u64, 1), (far, 2), 4 << 20);
    say!("a large one", "{}", add_copy(one, &[], &copy).0);
    let large_exec = instantiate(one);
    run(large_exec);
    must!(cuMemcpyDtoH_v2, found.as_mut_ptr(), far + 1000, found.len());
    say!("it arrived", "{}", found.iter().all(|byte| *byte == 9));
    free(far);
    for exec in [exec, back, large_exec] {
        must!(cuGraphExecDestroy, exec);
    }
    for graph in [to_device, captured, one] {
        must!(cuGraphDestroy, graph);
    }
    must!(cuStreamDestroy_v2, s);
    free(device);
}
