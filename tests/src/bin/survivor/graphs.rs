//! Graphs and instances that are launched, looked at and changed after their server has been replaced.

use crate::{BLOCK, BLOCKS, Status, WORDS, launch, memory};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ffi::{c_uint, c_void};
use std::ptr::{null, null_mut};

/// A kernel's parameters, kept where the driver's form of them points.
pub struct Params {
    pub out: CUdeviceptr,
    pub seed: u32,
    pub rounds: u32,
}

impl Params {
    pub fn with<T>(
        &mut self,
        function: CUfunction,
        use_it: impl FnOnce(&CUDA_KERNEL_NODE_PARAMS) -> T,
    ) -> T {
        let mut params: [*mut c_void; 3] = [
            (&raw mut self.out).cast(),
            (&raw mut self.seed).cast(),
            (&raw mut self.rounds).cast(),
        ];
        use_it(&CUDA_KERNEL_NODE_PARAMS {
            function: function.0,
            grid: [BLOCKS, 1, 1],
            block: [BLOCK, 1, 1],
            params: params.as_mut_ptr() as u64,
            ..CUDA_KERNEL_NODE_PARAMS::default()
        })
    }
}

pub fn create() -> Status<CUgraph> {
    let mut graph = CUgraph::NULL;
    cu!(cuGraphCreate, &mut graph, 0 as c_uint).ok()?;
    Ok(graph)
}

pub fn instantiate(graph: CUgraph) -> Status<CUgraphExec> {
    let mut exec = CUgraphExec::NULL;
    cu!(cuGraphInstantiateWithFlags, &mut exec, graph, 0u64).ok()?;
    Ok(exec)
}

/// A capture that goes on, which another server cannot make again.
pub fn bound() -> Status {
    let mut stream = CUstream::NULL;
    cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
    cu!(
        cuStreamBeginCapture_v2,
        stream,
        CU_STREAM_CAPTURE_MODE_RELAXED
    )
    .ok()
}

/// A graph with a kernel of an image that is unloaded, beside a graph without one.
pub struct Unloaded {
    graph: CUgraph,
    other: CUgraph,
}

impl Unloaded {
    /// `load` loads an image: a module, and a kernel of it.
    pub fn new(load: impl FnOnce() -> Status<(CUmodule, CUfunction)>) -> Status<Unloaded> {
        let (module, function) = load()?;
        let (graph, other, none) = (create()?, create()?, null::<CUgraphNode>());
        let mut node = CUgraphNode::NULL;
        let mut params = Params {
            out: memory(WORDS * 4)?,
            seed: 1,
            rounds: 1,
        };
        params.with(function, |params| {
            let params = std::ptr::from_ref(params);
            cu!(
                cuGraphAddKernelNode_v2,
                &mut node,
                graph,
                none,
                0usize,
                params
            )
            .ok()
        })?;
        cu!(cuGraphAddEmptyNode, &mut node, other, none, 0usize).ok()?;
        cu!(cuGraphExecDestroy, instantiate(graph)?).ok()?;
        cu!(cuModuleUnload, module).ok()?;
        Ok(Unloaded { graph, other })
    }

    /// Destroys the graph with the kernel. The other one stays.
    pub fn destroy(&self) -> Status<usize> {
        cu!(cuGraphDestroy, self.graph).ok()?;
        let mut count = 0;
        cu!(
            cuGraphGetNodes,
            self.other,
            null_mut::<CUgraphNode>(),
            &mut count
        )
        .ok()?;
        Ok(count)
    }
}

/// What it has, and what that does.
pub struct Graphs {
    fill: CUfunction,
    streams: [CUstream; 2],
    context: CUcontext,
    fork: CUevent,
    join: CUevent,
    outs: [CUdeviceptr; 5],
    /// Of a captured graph that has ended.
    captured: CUgraphExec,
    captured_seed: u32,
    /// A kernel, a memset, and a graph with a kernel, in this order.
    graph: CUgraph,
    nodes: [CUgraphNode; 3],
    exec: CUgraphExec,
    seed: u32,
    /// Of the instance, in the graph inside.
    inner_seed: u32,
    fills: bool,
    /// A graph whose two nodes depend on each other, so that it has no instance.
    cycle: CUgraph,
    /// A graph whose first node depends on its second.
    turned: (CUgraph, [CUgraphNode; 2]),
    round: u32,
}

fn empty(graph: CUgraph) -> Status<CUgraphNode> {
    let (mut node, none) = (CUgraphNode::NULL, null::<CUgraphNode>());
    cu!(cuGraphAddEmptyNode, &mut node, graph, none, 0usize).ok()?;
    Ok(node)
}

fn add_dependency(graph: CUgraph, of: CUgraphNode, on: CUgraphNode) -> Status<()> {
    let (from, to, edge) = (&raw const on, &raw const of, null::<CUgraphEdgeData>());
    cu!(cuGraphAddDependencies_v2, graph, from, to, edge, 1usize).ok()
}

fn cycle() -> Status<CUgraph> {
    let graph = create()?;
    let (first, second) = (empty(graph)?, empty(graph)?);
    add_dependency(graph, second, first)?;
    add_dependency(graph, first, second)?;
    Ok(graph)
}

fn turned() -> Status<(CUgraph, [CUgraphNode; 2])> {
    let graph = create()?;
    let nodes = [empty(graph)?, empty(graph)?];
    add_dependency(graph, nodes[0], nodes[1])?;
    Ok((graph, nodes))
}

/// What a kernel writes.
fn filled(at: usize, rounds: u32, seed: u32) -> u32 {
    rounds.wrapping_mul(at as u32).wrapping_mul(seed)
}

const FILL: u32 = 0x1234_5678;
const INNER_SEED: u32 = 9;

impl Graphs {
    pub fn new(fill: CUfunction) -> Status<Graphs> {
        let mut streams = [CUstream::NULL; 2];
        for stream in &mut streams {
            cu!(cuStreamCreate, stream, CU_STREAM_NON_BLOCKING).ok()?;
        }
        let (mut fork, mut join) = (CUevent::NULL, CUevent::NULL);
        cu!(cuEventCreate, &mut fork, CU_EVENT_DISABLE_TIMING).ok()?;
        cu!(cuEventCreate, &mut join, CU_EVENT_DISABLE_TIMING).ok()?;
        let mut outs = [0; 5];
        for out in &mut outs {
            *out = memory(WORDS * 4)?;
        }
        let mut context = CUcontext::NULL;
        cu!(cuCtxGetCurrent, &mut context).ok()?;
        let mut graphs = Graphs {
            fill,
            streams,
            context,
            fork,
            join,
            outs,
            captured: CUgraphExec::NULL,
            captured_seed: 3,
            graph: create()?,
            nodes: [CUgraphNode::NULL; 3],
            exec: CUgraphExec::NULL,
            seed: 5,
            inner_seed: INNER_SEED,
            fills: true,
            cycle: cycle()?,
            turned: turned()?,
            round: 0,
        };
        let captured = graphs.capture()?;
        graphs.captured = instantiate(captured)?;
        cu!(cuGraphDestroy, captured).ok()?;
        graphs.nodes = graphs.add_nodes(graphs.graph)?;
        graphs.exec = instantiate(graphs.graph)?;
        Ok(graphs)
    }

    /// A kernel; then a memset on one stream and a copy on another.
    fn capture(&self) -> Status<CUgraph> {
        let [first, second] = self.streams;
        let [computed, set, copied, ..] = self.outs;
        cu!(
            cuStreamBeginCapture_v2,
            first,
            CU_STREAM_CAPTURE_MODE_RELAXED
        )
        .ok()?;
        launch(self.fill, first, (computed, self.captured_seed, 3))?;
        cu!(cuEventRecord, self.fork, first).ok()?;
        cu!(cuStreamWaitEvent, second, self.fork, 0 as c_uint).ok()?;
        cu!(cuMemsetD32Async, set, FILL, WORDS, second).ok()?;
        cu!(cuMemcpyDtoDAsync_v2, copied, computed, WORDS * 4, first).ok()?;
        cu!(cuEventRecord, self.join, second).ok()?;
        cu!(cuStreamWaitEvent, first, self.join, 0 as c_uint).ok()?;
        let mut graph = CUgraph::NULL;
        cu!(cuStreamEndCapture, first, &mut graph).ok()?;
        Ok(graph)
    }

    /// Adds a kernel, a memset behind it, and a graph with a kernel to a graph.
    fn add_nodes(&self, graph: CUgraph) -> Status<[CUgraphNode; 3]> {
        let (function, context) = (self.fill, self.context);
        let none = null::<CUgraphNode>();
        let kernel = |graph: CUgraph, mut params: Params| -> Status<CUgraphNode> {
            let mut node = CUgraphNode::NULL;
            params.with(function, |params| {
                cu!(
                    cuGraphAddKernelNode_v2,
                    &mut node,
                    graph,
                    none,
                    0usize,
                    std::ptr::from_ref(params)
                )
                .ok()
            })?;
            Ok(node)
        };
        let first = kernel(
            graph,
            Params {
                out: self.outs[3],
                seed: self.seed,
                rounds: 5,
            },
        )?;
        // Behind the kernel, in the second half of what it has written.
        let set = CUDA_MEMSET_NODE_PARAMS {
            to: self.outs[3] + WORDS as u64 * 2,
            value: FILL,
            element: 4,
            width: WORDS as u64 / 2,
            height: 1,
            ..CUDA_MEMSET_NODE_PARAMS::default()
        };
        let mut second = CUgraphNode::NULL;
        cu!(
            cuGraphAddMemsetNode,
            &mut second,
            graph,
            &raw const first,
            1usize,
            &raw const set,
            context
        )
        .ok()?;
        let inner = create()?;
        kernel(
            inner,
            Params {
                out: self.outs[4],
                seed: self.inner_seed,
                rounds: 7,
            },
        )?;
        let mut third = CUgraphNode::NULL;
        cu!(
            cuGraphAddChildGraphNode,
            &mut third,
            graph,
            &raw const second,
            1usize,
            inner
        )
        .ok()?;
        cu!(cuGraphDestroy, inner).ok()?;
        Ok([first, second, third])
    }

    /// Updates the instance by another graph than its own. A node that is disabled stays so.
    fn update(&mut self) -> Status {
        self.inner_seed = self.round + 20;
        let other = create()?;
        self.add_nodes(other)?;
        let mut info = CUgraphExecUpdateResultInfo::default();
        cu!(cuGraphExecUpdate_v2, self.exec, other, &mut info).ok()?;
        cu!(cuGraphDestroy, other).ok()
    }

    /// Clears what the graphs write, launches an instance and waits.
    fn launch(&self, exec: CUgraphExec) -> Status {
        for out in self.outs {
            cu!(cuMemsetD32Async, out, 0u32, WORDS, self.streams[0]).ok()?;
        }
        cu!(cuGraphLaunch, exec, self.streams[0]).ok()?;
        cu!(cuStreamSynchronize, self.streams[0]).ok()
    }

    fn holds(&self, out: usize, expected: impl Fn(usize) -> u32) -> Status<bool> {
        let mut found = vec![0u32; WORDS];
        cu!(
            cuMemcpyDtoH_v2,
            found.as_mut_ptr(),
            self.outs[out],
            WORDS * 4
        )
        .ok()?;
        let same = found.iter().enumerate();
        Ok({ same }.all(|(at, word)| *word == expected(at)))
    }

    /// Whether the instances do what they should.
    fn are_right(&self) -> Status<bool> {
        self.launch(self.captured)?;
        let seed = self.captured_seed;
        let captured = self.holds(0, |at| filled(at, 3, seed))?
            && self.holds(1, |_| FILL)?
            && self.holds(2, |at| filled(at, 3, seed))?;
        self.launch(self.exec)?;
        let (seed, fills) = (self.seed, self.fills);
        let built = self.holds(3, |at| match at >= WORDS / 2 && fills {
            true => FILL,
            false => filled(at, 5, seed),
        })?;
        let inner_seed = self.inner_seed;
        Ok(captured && built && self.holds(4, |at| filled(at, 7, inner_seed))?)
    }

    /// Whether the graph has the nodes that it was given, and they do what they should.
    fn has_its_nodes(&self) -> Status<bool> {
        let (mut found, mut count) = ([CUgraphNode::NULL; 8], 8usize);
        cu!(cuGraphGetNodes, self.graph, found.as_mut_ptr(), &mut count).ok()?;
        let (mut behind, mut edges) = ([CUgraphNode::NULL; 8], 8usize);
        let none = null_mut::<CUgraphEdgeData>();
        cu!(
            cuGraphNodeGetDependencies_v2,
            self.nodes[2],
            behind.as_mut_ptr(),
            none,
            &mut edges
        )
        .ok()?;
        let mut circle = 0usize;
        let (nodes, data) = (null_mut::<CUgraphNode>(), null_mut::<CUgraphEdgeData>());
        let of = self.cycle;
        cu!(cuGraphGetEdges_v2, of, nodes, nodes, data, &mut circle).ok()?;
        let (of, turned) = self.turned;
        let (mut listed, mut two) = ([CUgraphNode::NULL; 2], 2usize);
        cu!(cuGraphGetNodes, of, listed.as_mut_ptr(), &mut two).ok()?;
        let mut params = CUDA_KERNEL_NODE_PARAMS::default();
        cu!(cuGraphKernelNodeGetParams_v2, self.nodes[0], &mut params).ok()?;
        let all = self.nodes.iter().all(|node| found[..count].contains(node));
        let function = params.function == self.fill.0;
        let behind = edges == 1 && behind[0] == self.nodes[1];
        let in_order = two == 2 && listed == turned;
        Ok(count == 3 && all && behind && circle == 2 && in_order && function)
    }

    /// Looks at everything, then changes it.
    pub fn round(&mut self) -> Status<Option<u32>> {
        if !self.are_right()? || !self.has_its_nodes()? {
            return Ok(None);
        }
        self.round += 1;
        let (exec, node) = (self.exec, self.nodes[0]);
        self.seed = self.round;
        let mut params = Params {
            out: self.outs[3],
            seed: self.seed,
            rounds: 5,
        };
        if self.round.is_multiple_of(6) {
            let graph_too = |params: &CUDA_KERNEL_NODE_PARAMS| {
                cu!(
                    cuGraphKernelNodeSetParams_v2,
                    node,
                    std::ptr::from_ref(params)
                )
                .ok()
            };
            params.with(self.fill, graph_too)?;
            cu!(cuGraphExecDestroy, exec).ok()?;
            self.exec = instantiate(self.graph)?;
            (self.inner_seed, self.fills) = (INNER_SEED, true);
        } else if self.round % 5 == 4 {
            self.update()?;
        } else {
            if self.round % 5 == 2 {
                self.update()?;
            }
            let of_exec = |params: &CUDA_KERNEL_NODE_PARAMS| {
                cu!(
                    cuGraphExecKernelNodeSetParams_v2,
                    exec,
                    node,
                    std::ptr::from_ref(params)
                )
                .ok()
            };
            params.with(self.fill, of_exec)?;
            self.fills = self.round.is_multiple_of(2);
            cu!(
                cuGraphNodeSetEnabled,
                exec,
                self.nodes[1],
                c_uint::from(self.fills)
            )
            .ok()?;
        }
        if self.round.is_multiple_of(4) {
            self.captured_seed = self.round;
            let graph = self.capture()?;
            let mut info = CUgraphExecUpdateResultInfo::default();
            cu!(cuGraphExecUpdate_v2, self.captured, graph, &mut info).ok()?;
            cu!(cuGraphDestroy, graph).ok()?;
        }
        Ok(self.are_right()?.then_some(self.round))
    }
}
