//! Steps that change the program's state where another server cannot see it before the program rests: kernels count in
//! variables, and an instance of a graph gets other parameters.

use super::{Status, WORDS, launch, memory, run_one};
use crate::graphs::{Params, create, instantiate};
use crate::hosts::await_function;
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use mpsshim_tests::peer::variables_ptx;
use std::ffi::{CString, c_uint, c_void};
use std::ptr::{from_ref, null, null_mut};

const BYTES: usize = WORDS * 4;

/// What a step uses.
pub struct Steps {
    fill: CUfunction,
    count: CUfunction,
    take: CUfunction,
    stream: CUstream,
    /// Never waited for.
    other: CUstream,
    events: [CUevent; 2],
    /// Address of a variable.
    taken: CUdeviceptr,
    /// Three words for the kernels that count, and room for the two that fill.
    words: CUdeviceptr,
    filled: [CUdeviceptr; 2],
    pinned: *mut u32,
    node: CUgraphNode,
    exec: CUgraphExec,
    steps: u32,
}

impl Steps {
    pub fn new(fill: CUfunction, stream: CUstream) -> Status<Steps> {
        let image = CString::new(variables_ptx(4)).expect("no NUL");
        let mut module = CUmodule::NULL;
        cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
        let (mut count, mut take) = (CUfunction::NULL, CUfunction::NULL);
        cu!(cuModuleGetFunction, &mut count, module, c"count".as_ptr()).ok()?;
        cu!(cuModuleGetFunction, &mut take, module, c"take".as_ptr()).ok()?;
        let (mut taken, mut len): (CUdeviceptr, usize) = (0, 0);
        let (at, len_at) = (&mut taken, &mut len);
        cu!(cuModuleGetGlobal_v2, at, len_at, module, c"taken".as_ptr()).ok()?;
        let mut other = CUstream::NULL;
        cu!(cuStreamCreate, &mut other, CU_STREAM_NON_BLOCKING).ok()?;
        let mut events = [CUevent::NULL; 2];
        for event in &mut events {
            cu!(cuEventCreate, event, CU_EVENT_DISABLE_TIMING).ok()?;
        }
        let mut pinned = null_mut::<c_void>();
        cu!(cuMemHostAlloc, &mut pinned, 3 * BYTES, 0 as c_uint).ok()?;
        let mut steps = Steps {
            fill,
            count,
            take,
            stream,
            other,
            events,
            taken,
            words: memory(BYTES)?,
            filled: [memory(BYTES)?, memory(BYTES)?],
            pinned: pinned.cast(),
            node: CUgraphNode::NULL,
            exec: CUgraphExec::NULL,
            steps: 0,
        };
        let graph = create()?;
        let mut node = CUgraphNode::NULL;
        steps.params(1).with(fill, |params| {
            let none = null::<CUgraphNode>();
            cu!(
                cuGraphAddKernelNode_v2,
                &mut node,
                graph,
                none,
                0usize,
                from_ref(params)
            )
            .ok()
        })?;
        (steps.node, steps.exec) = (node, instantiate(graph)?);
        Ok(steps)
    }

    /// The parameters of the graph's kernel.
    fn params(&self, rounds: u32) -> Params {
        Params {
            out: self.filled[0],
            seed: self.seed(),
            rounds,
        }
    }

    fn seed(&self) -> u32 {
        self.steps * 31 + 5
    }

    /// How many steps there were; `None`: a result is wrong. Kernels take so many rounds of their loops. `by_function`: waits by a
    /// host function only.
    pub fn step(&mut self, rounds: u32, by_function: bool) -> Status<Option<u32>> {
        self.steps += 1;
        let (stream, words) = (self.stream, self.words);
        run_one(self.count, stream, &mut [words])?;
        let ([fork, join], other) = (self.events, self.other);
        cu!(cuEventRecord, fork, stream).ok()?;
        cu!(cuStreamWaitEvent, other, fork, 0 as c_uint).ok()?;
        run_one(self.take, other, &mut [words + 4, self.taken])?;
        cu!(cuEventRecord, join, other).ok()?;
        cu!(cuStreamWaitEvent, stream, join, 0 as c_uint).ok()?;
        self.params(rounds).with(self.fill, |params| {
            cu!(
                cuGraphExecKernelNodeSetParams_v2,
                self.exec,
                self.node,
                from_ref(params)
            )
            .ok()
        })?;
        cu!(cuGraphLaunch, self.exec, stream).ok()?;
        launch(self.fill, stream, (self.filled[1], self.seed() + 1, rounds))?;
        run_one(self.count, stream, &mut [words + 8])?;
        for (at, from) in [words, self.filled[0], self.filled[1]].iter().enumerate() {
            let to = self.pinned.wrapping_add(at * WORDS);
            cu!(cuMemcpyDtoHAsync_v2, to, *from, BYTES, stream).ok()?;
        }
        match by_function {
            true => await_function(stream)?,
            false => cu!(cuStreamSynchronize, stream).ok()?,
        }
        // SAFETY: the block has room for as many, and nothing is in flight.
        let all = unsafe { std::slice::from_raw_parts(self.pinned, 3 * WORDS) };
        let counts = [2 * self.steps - 1, 6 + self.steps, 2 * self.steps];
        let mut right = all[..3] == counts;
        for (words, seed) in all[WORDS..].chunks(WORDS).zip(self.seed()..) {
            let word = |at: usize| rounds.wrapping_mul(at as u32).wrapping_mul(seed);
            right &= words
                .iter()
                .enumerate()
                .all(|(at, found)| *found == word(at));
        }
        if !right {
            eprintln!("{:?}, not {counts:?}, or what was filled", &all[..3]);
        }
        Ok(right.then_some(self.steps))
    }
}
