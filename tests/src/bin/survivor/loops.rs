//! Graphs with conditional nodes, which are launched, looked at and changed after their server has been replaced.

use crate::graphs::{create, instantiate};
use crate::{Status, launch_one, memory};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ffi::{CStr, c_void};
use std::ptr::null;
use zerocopy::IntoBytes;

const IMAGE: &str = concat!(include_str!("../../../fixtures/conditional.ptx"), "\0");
/// `CU_GRAPH_COND_TYPE_WHILE`.
const WHILE: u32 = 1;
/// Rounds of the inner loop in each round of the outer one.
const INNER: u32 = 3;
const BODIES: usize = 3;

/// Words in device memory.
#[derive(Clone, Copy)]
enum Word {
    /// Rounds that a loop has left.
    Left,
    /// Rounds that it has run.
    Passes,
    InnerLeft,
    /// Rounds of the inner loop; the next word is counted in instead by a changed instance.
    InnerPasses,
    /// Of the loop whose graph has been destroyed.
    OwnLeft = 8,
    OwnPasses,
    /// A word for each body of the switch.
    Chosen = 12,
    /// Written by a node that is added to the body of the outer loop.
    More = 16,
}

/// Graphs with loops, and their instances.
pub struct Loops {
    stream: CUstream,
    context: CUcontext,
    count_down: CUfunction,
    set_condition: CUfunction,
    words: CUdeviceptr,
    /// Of a graph that was destroyed after the first launch.
    own: CUgraphExec,
    /// Of a graph that was destroyed before.
    unlaunched: CUgraphExec,
    /// A loop in a loop, and a switch.
    graph: CUgraph,
    exec: CUgraphExec,
    conditions: [u64; 3],
    outer: CUgraph,
    inner: CUgraph,
    /// Nodes of the body of the outer loop.
    in_outer: Vec<CUgraphNode>,
    /// Counts the rounds of the inner loop.
    counter: CUgraphNode,
    /// Chooses the body of the switch.
    chooser: CUgraphNode,
    chosen: u32,
    /// The instance counts the rounds of the inner loop elsewhere.
    moved: u32,
    more: bool,
    round: u32,
}

/// A kernel of one thread with these parameters, each the address of a value.
fn kernel(function: CUfunction, params: &[*const c_void]) -> CUDA_KERNEL_NODE_PARAMS {
    CUDA_KERNEL_NODE_PARAMS {
        function: function.0,
        grid: [1; 3],
        block: [1; 3],
        params: params.as_ptr() as u64,
        ..CUDA_KERNEL_NODE_PARAMS::default()
    }
}

fn add_kernel(
    graph: CUgraph,
    behind: &[CUgraphNode],
    params: &CUDA_KERNEL_NODE_PARAMS,
) -> Status<CUgraphNode> {
    let mut node = CUgraphNode::NULL;
    cu!(
        cuGraphAddKernelNode_v2,
        &mut node,
        graph,
        behind.as_ptr(),
        behind.len(),
        std::ptr::from_ref(params)
    )
    .ok()?;
    Ok(node)
}

fn nodes_of(graph: CUgraph) -> Status<Vec<CUgraphNode>> {
    let (mut nodes, mut count) = ([CUgraphNode::NULL; 16], 16usize);
    cu!(cuGraphGetNodes, graph, nodes.as_mut_ptr(), &mut count).ok()?;
    Ok(nodes[..count].to_vec())
}

impl Loops {
    pub fn new(stream: CUstream) -> Status<Loops> {
        let mut module = CUmodule::NULL;
        cu!(cuModuleLoadData, &mut module, IMAGE.as_ptr()).ok()?;
        let function = |name: &CStr| -> Status<CUfunction> {
            let mut function = CUfunction::NULL;
            cu!(cuModuleGetFunction, &mut function, module, name.as_ptr()).ok()?;
            Ok(function)
        };
        let mut context = CUcontext::NULL;
        cu!(cuCtxGetCurrent, &mut context).ok()?;
        let mut loops = Loops {
            stream,
            context,
            count_down: function(c"count_down")?,
            set_condition: function(c"set_condition")?,
            words: memory(256)?,
            own: CUgraphExec::NULL,
            unlaunched: CUgraphExec::NULL,
            graph: create()?,
            exec: CUgraphExec::NULL,
            conditions: [0; 3],
            outer: CUgraph::NULL,
            inner: CUgraph::NULL,
            in_outer: Vec::new(),
            counter: CUgraphNode::NULL,
            chooser: CUgraphNode::NULL,
            chosen: 1,
            moved: 0,
            more: false,
            round: 0,
        };
        let graph = loops.simple()?;
        loops.own = instantiate(graph)?;
        loops.runs_own(loops.own, 2)?;
        cu!(cuGraphDestroy, graph).ok()?;
        let graph = loops.simple()?;
        loops.unlaunched = instantiate(graph)?;
        cu!(cuGraphDestroy, graph).ok()?;
        loops.fill()?;
        loops.exec = instantiate(loops.graph)?;
        Ok(loops)
    }

    fn at(&self, word: Word) -> CUdeviceptr {
        self.words + 4 * word as u64
    }

    fn condition(&self, graph: CUgraph, default: u32) -> Status<u64> {
        let mut handle = 0u64;
        cu!(
            cuGraphConditionalHandleCreate,
            &mut handle,
            graph,
            self.context,
            default,
            CU_GRAPH_COND_ASSIGN_DEFAULT
        )
        .ok()?;
        Ok(handle)
    }

    /// Adds a conditional node. Returns its bodies, too.
    fn conditional(
        &self,
        graph: CUgraph,
        behind: &[CUgraphNode],
        (handle, kind, size): (u64, u32, usize),
    ) -> Status<(CUgraphNode, Vec<CUgraph>)> {
        let given = CUDA_CONDITIONAL_NODE_PARAMS {
            handle,
            kind,
            size: size as u32,
            graphs: 0,
            context: self.context.0,
        };
        let mut params = CUgraphNodeParams {
            kind: CU_GRAPH_NODE_TYPE_CONDITIONAL,
            ..CUgraphNodeParams::default()
        };
        let bytes = given.as_bytes();
        params.words.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
        let mut node = CUgraphNode::NULL;
        cu!(
            cuGraphAddNode_v2,
            &mut node,
            graph,
            behind.as_ptr(),
            null::<CUgraphEdgeData>(),
            behind.len(),
            &mut params
        )
        .ok()?;
        let bodies = params.words[2] as *const CUgraph;
        // SAFETY: the driver's own array of as many graphs.
        let bodies = (0..size).map(|at| unsafe { *bodies.add(at) }).collect();
        Ok((node, bodies))
    }

    fn counting(
        &self,
        handle: &u64,
        left: &CUdeviceptr,
        passes: &CUdeviceptr,
    ) -> (CUfunction, [*const c_void; 3]) {
        let params = [
            std::ptr::from_ref(handle).cast(),
            std::ptr::from_ref(left).cast(),
            std::ptr::from_ref(passes).cast(),
        ];
        (self.count_down, params)
    }

    fn setting(&self, handle: &u64, value: &u32) -> (CUfunction, [*const c_void; 2]) {
        let params = [
            std::ptr::from_ref(handle).cast(),
            std::ptr::from_ref(value).cast(),
        ];
        (self.set_condition, params)
    }

    fn add_set(
        &self,
        graph: CUgraph,
        behind: &[CUgraphNode],
        (to, value): (CUdeviceptr, u32),
    ) -> Status<CUgraphNode> {
        let set = CUDA_MEMSET_NODE_PARAMS {
            to,
            value,
            element: 4,
            width: 1,
            height: 1,
            ..CUDA_MEMSET_NODE_PARAMS::default()
        };
        let mut node = CUgraphNode::NULL;
        cu!(
            cuGraphAddMemsetNode,
            &mut node,
            graph,
            behind.as_ptr(),
            behind.len(),
            &raw const set,
            self.context
        )
        .ok()?;
        Ok(node)
    }

    /// A loop. Its condition has the second handle: the first one belongs to a branch that is never taken.
    fn simple(&self) -> Status<CUgraph> {
        let graph = create()?;
        let (never, handle) = (self.condition(graph, 0)?, self.condition(graph, 1)?);
        let (_, bodies) = self.conditional(graph, &[], (handle, WHILE, 1))?;
        let (left, passes) = (self.at(Word::OwnLeft), self.at(Word::OwnPasses));
        let (function, params) = self.counting(&handle, &left, &passes);
        add_kernel(bodies[0], &[], &kernel(function, &params))?;
        let (_, bodies) = self.conditional(graph, &[], (never, 0, 1))?;
        self.add_set(bodies[0], &[], (passes, 77))?;
        Ok(graph)
    }

    fn fill(&mut self) -> Status {
        let graph = self.graph;
        let first = self.condition(graph, 1)?;
        let (outer_loop, bodies) = self.conditional(graph, &[], (first, WHILE, 1))?;
        self.outer = bodies[0];
        // As a program does that fills a body like any other graph.
        let second = self.condition(self.outer, 0)?;
        let third = self.condition(graph, 0)?;
        self.conditions = [first, second, third];
        let (function, params) = self.setting(&second, &1);
        let enabled = add_kernel(self.outer, &[], &kernel(function, &params))?;
        let reset = (self.at(Word::InnerLeft), INNER);
        let reset = self.add_set(self.outer, &[enabled], reset)?;
        let (inner_loop, bodies) = self.conditional(self.outer, &[reset], (second, WHILE, 1))?;
        self.inner = bodies[0];
        self.capture_inner()?;
        self.counter = nodes_of(self.inner)?[0];
        let (left, passes) = (self.at(Word::Left), self.at(Word::Passes));
        let (function, params) = self.counting(&first, &left, &passes);
        let last = add_kernel(self.outer, &[inner_loop], &kernel(function, &params))?;
        self.in_outer = vec![enabled, reset, inner_loop, last];
        let (function, params) = self.setting(&third, &self.chosen);
        self.chooser = add_kernel(graph, &[outer_loop], &kernel(function, &params))?;
        let switch = (third, CU_GRAPH_COND_TYPE_SWITCH, BODIES);
        let (_, bodies) = self.conditional(graph, &[self.chooser], switch)?;
        for (at, body) in bodies.into_iter().enumerate() {
            self.add_set(body, &[], (self.at(Word::Chosen) + 4 * at as u64, 5))?;
        }
        Ok(())
    }

    /// The body of the inner loop is captured.
    fn capture_inner(&self) -> Status {
        let stream = self.stream;
        cu!(
            cuStreamBeginCaptureToGraph,
            stream,
            self.inner,
            null::<CUgraphNode>(),
            null::<CUgraphEdgeData>(),
            0usize,
            CU_STREAM_CAPTURE_MODE_RELAXED
        )
        .ok()?;
        let (left, passes) = (self.at(Word::InnerLeft), self.at(Word::InnerPasses));
        let (function, mut params) = self.counting(&self.conditions[1], &left, &passes);
        launch_one(function, stream, params.as_mut_ptr().cast())?;
        let mut graph = CUgraph::NULL;
        cu!(cuStreamEndCapture, stream, &mut graph).ok()
    }

    fn set(&self, word: Word, value: u32) -> Status {
        cu!(cuMemsetD32Async, self.at(word), value, 1usize, self.stream).ok()
    }

    fn launch(&self, exec: CUgraphExec) -> Status<[u32; 20]> {
        cu!(cuGraphLaunch, exec, self.stream).ok()?;
        cu!(cuStreamSynchronize, self.stream).ok()?;
        let mut words = [0u32; 20];
        cu!(cuMemcpyDtoH_v2, words.as_mut_ptr(), self.words, 80usize).ok()?;
        Ok(words)
    }

    /// Whether a loop of a graph that has been destroyed runs this number of rounds.
    fn runs_own(&self, exec: CUgraphExec, rounds: u32) -> Status<bool> {
        self.set(Word::OwnPasses, 0)?;
        self.set(Word::OwnLeft, rounds)?;
        let words = self.launch(exec)?;
        let [left, passes] = [Word::OwnLeft, Word::OwnPasses].map(|word| words[word as usize]);
        Ok(left == 0 && passes == rounds)
    }

    fn runs(&self, rounds: u32) -> Status<bool> {
        cu!(cuMemsetD32Async, self.words, 0u32, 20usize, self.stream).ok()?;
        self.set(Word::Left, rounds)?;
        let words = self.launch(self.exec)?;
        let chosen = |at: u32| if at == self.chosen { 5 } else { 0 };
        let mut expected = [0u32; 20];
        expected[Word::Passes as usize] = rounds;
        expected[(Word::InnerPasses as u32 + self.moved) as usize] = rounds * INNER;
        for at in 0..BODIES as u32 {
            expected[(Word::Chosen as u32 + at) as usize] = chosen(at);
        }
        expected[Word::More as usize] = if self.more { 9 } else { 0 };
        if words != expected {
            eprintln!("{words:?}, not {expected:?}");
        }
        Ok(words == expected)
    }

    fn are_right(&self) -> Status<bool> {
        let rounds = self.round % 4 + 1;
        let own = self.runs_own(self.own, rounds)? && self.runs_own(self.unlaunched, rounds + 1)?;
        let in_outer = nodes_of(self.outer)?;
        let nodes = self.in_outer.iter().all(|node| in_outer.contains(node))
            && nodes_of(self.inner)? == [self.counter]
            && nodes_of(self.graph)?.contains(&self.chooser);
        Ok(own && nodes && self.runs(rounds)?)
    }

    /// Looks at everything, then changes it.
    pub fn round(&mut self) -> Status<Option<u32>> {
        if !self.are_right()? {
            return Ok(None);
        }
        self.round += 1;
        if self.round.is_multiple_of(3) {
            if !self.more {
                let more = (self.at(Word::More), 9);
                let node = self.add_set(self.outer, &[self.in_outer[3]], more)?;
                self.in_outer.push(node);
                self.more = true;
            }
            cu!(cuGraphExecDestroy, self.exec).ok()?;
            self.exec = instantiate(self.graph)?;
            (self.chosen, self.moved) = (1, 0);
        } else {
            self.chosen = self.round % 4;
            let (function, params) = self.setting(&self.conditions[2], &self.chosen);
            self.set_in_exec(self.chooser, &kernel(function, &params))?;
            self.moved = 1 - self.moved;
            let passes = self.at(Word::InnerPasses) + 4 * u64::from(self.moved);
            let left = self.at(Word::InnerLeft);
            let (function, params) = self.counting(&self.conditions[1], &left, &passes);
            self.set_in_exec(self.counter, &kernel(function, &params))?;
        }
        Ok(self.are_right()?.then_some(self.round))
    }

    fn set_in_exec(&self, node: CUgraphNode, params: &CUDA_KERNEL_NODE_PARAMS) -> Status {
        cu!(
            cuGraphExecKernelNodeSetParams_v2,
            self.exec,
            node,
            std::ptr::from_ref(params)
        )
        .ok()
    }
}
