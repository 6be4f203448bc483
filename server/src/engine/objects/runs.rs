//! Launch batches: consecutive launches of a stream, submitted to the driver as one graph.
//!
//! A launch costs the driver 1.3 to 3.8 µs, partly under the context's lock, and costs the GPU a pause before the next
//! one. Setting another kernel in a node of an instantiated graph takes 0.3 µs, and launching the graph takes 3 to 5 µs
//! whatever its length (docs/design/0014-runs-of-launches.md). A stream with many launches therefore keeps graphs that
//! are chains of kernels, in a few lengths. If a client has queued several launches, the nodes of such a chain are set
//! to those kernels. Kernels execute as if launched one by one: a node begins when the preceding one has ended.
//!
//! A client's completion marker after the launches can be the graph's last node. That makes the client's wait 2 µs
//! shorter, or more if many clients wait and a kernel writes the flag (marks.rs).

mod session;

use crate::engine::base::driver::{Driver, packed};
use crate::engine::gpu::copy_kernel::Moves;
use crate::engine::gpu::devices::volume;
use crate::engine::objects::fairness::GREATEST;
use crate::engine::objects::marks::Writer;
use crate::engine::objects::moves::Pieces;
use mpsshim_api::cuda::*;
use mpsshim_model::policy::LAUNCH_RUN;
use mpsshim_proto::message::{Launch, Mark};
use mpsshim_proto::ring::Place;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Most kernels in a batch.
const MOST: usize = LENGTHS[LENGTHS.len() - 1];
const _: () = assert!(MOST == LAUNCH_RUN);
const LENGTHS: [usize; 7] = [1, 2, 3, 4, 8, 16, 32];
/// How often a length must have been wanted before a graph is created for it, which takes the driver 5 µs per kernel.
const WANTED: u32 = 8;
/// Most kernels in a batch with a mark on an idle stream: the GPU starts them only when the whole graph is submitted.
const UNBEGUN: usize = 4;
/// How long to wait for the mark after a launch of a client that usually waits for each launch.
const FOR_MARK: Duration = Duration::from_micros(1);

/// A launch in a batch.
#[derive(Debug)]
pub struct Planned {
    body: Launch,
    raw: CUfunction,
    params: Params,
    /// Position behind its message.
    end: Place,
    /// Part of the device that it can fill.
    fill: f32,
}

/// The parameters of a launch.
#[derive(Debug)]
enum Params {
    /// Their address in the ring. The client may change them, which only affects its own launch.
    InRing(u64),
    /// Of the server's kernel that moves these pieces of managed memory.
    Moves(Box<(Moves, Pieces)>),
}

impl Planned {
    /// The launch.
    pub fn body(&self) -> &Launch {
        &self.body
    }

    /// The pieces of managed memory that it moves, if it is no launch of the client's.
    pub fn pieces(&self) -> Option<&Pieces> {
        match &self.params {
            Params::InRing(_) => None,
            Params::Moves(moves) => Some(&moves.1),
        }
    }

    /// Number of its threads.
    fn threads(&self) -> u64 {
        volume(self.body.grid).saturating_mul(volume(self.body.block))
    }

    /// Its kernel and launch configuration, without parameters, in the driver's format.
    fn shape(&self) -> CUDA_KERNEL_NODE_PARAMS {
        CUDA_KERNEL_NODE_PARAMS {
            function: self.raw.0,
            grid: self.body.grid,
            block: self.body.block,
            shared: self.body.shared,
            ..CUDA_KERNEL_NODE_PARAMS::default()
        }
    }

    /// Copies its parameters.
    fn read_params(&self, to: &mut Vec<u8>) {
        let len = self.body.param_len as usize;
        to.clear();
        to.reserve(len);
        let params = match &self.params {
            Params::InRing(address) => *address as *const u8,
            Params::Moves(moves) => return to.extend_from_slice(&moves.0.as_bytes()[..len]),
        };
        // SAFETY: `len` bytes are in the ring, or in a message that is kept; `to` has room for them.
        unsafe {
            std::ptr::copy_nonoverlapping(params, to.as_mut_ptr(), len);
            to.set_len(len);
        }
    }
}

/// A kernel node of a chain, and the launch to which it was last set.
#[derive(Debug)]
struct Link {
    node: CUgraphNode,
    shape: CUDA_KERNEL_NODE_PARAMS,
    params: Vec<u8>,
    /// Whether the driver accepted that launch.
    given: bool,
}

impl Link {
    /// Creates a link for `planned` that has no node yet.
    fn new(planned: &Planned) -> Link {
        let mut link = Link {
            node: CUgraphNode::NULL,
            shape: planned.shape(),
            params: Vec::new(),
            given: false,
        };
        planned.read_params(&mut link.params);
        link
    }

    /// Whether the node is already set to this launch, as is the case for a client that repeats itself.
    fn is(&self, shape: &CUDA_KERNEL_NODE_PARAMS, params: &[u8]) -> bool {
        self.given && self.params == params && self.shape.as_bytes() == shape.as_bytes()
    }

    /// Calls `give` with the node and the launch in the driver's format.
    fn with<R>(&mut self, give: impl FnOnce(CUgraphNode, &CUDA_KERNEL_NODE_PARAMS) -> R) -> R {
        let mut size = self.params.len();
        let extra = packed(self.params.as_mut_ptr(), &mut size);
        let kernel = CUDA_KERNEL_NODE_PARAMS {
            extra: extra.as_ptr() as u64,
            ..self.shape
        };
        give(self.node, &kernel)
    }
}

/// A completion marker at the end of a batch.
#[derive(Clone, Copy, Debug)]
struct Marking {
    body: Mark,
    by: Writer,
    context: CUcontext,
    /// Device address of the flag.
    address: CUdeviceptr,
    /// Position behind its message.
    end: Place,
}

impl Marking {
    /// Adds it to a chain's graph.
    fn add_to(&self, driver: &Driver, chain: &Chain) -> Result<CUgraphNode, CUresult> {
        match self.by {
            Writer::Operation => self.operation(|batch| {
                chain.add(driver, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, batch.as_bytes())
            }),
            Writer::Kernel(kernel) => kernel.with(self.address, self.body.value, |kernel| {
                chain.add(driver, CU_GRAPH_NODE_TYPE_KERNEL, kernel.as_bytes())
            }),
        }
    }

    /// Sets a node to this mark. Its previous mark had the same writer.
    fn set_in(
        &self,
        driver: &Driver,
        exec: CUgraphExec,
        node: CUgraphNode,
    ) -> Result<(), CUresult> {
        match self.by {
            Writer::Operation => {
                self.operation(|batch| driver.graph.exec_batch_set(exec, node, batch))
            }
            Writer::Kernel(kernel) => kernel.with(self.address, self.body.value, |kernel| {
                driver.graph.exec_kernel_set(exec, node, kernel)
            }),
        }
    }

    /// Calls `give` with the write operation in the driver's format.
    fn operation<R>(&self, give: impl FnOnce(&CUDA_BATCH_MEM_OP_NODE_PARAMS) -> R) -> R {
        let write = CUstreamBatchMemOpParams {
            operation: CU_STREAM_MEM_OP_WRITE_VALUE_32,
            address: self.address,
            value: self.body.value.into(),
            ..CUstreamBatchMemOpParams::default()
        };
        give(&CUDA_BATCH_MEM_OP_NODE_PARAMS {
            context: self.context.0,
            count: 1,
            operations: (&raw const write) as u64,
            ..CUDA_BATCH_MEM_OP_NODE_PARAMS::default()
        })
    }
}

/// A graph that is a chain of kernels, possibly with a mark at its end.
#[derive(Debug)]
struct Chain {
    graph: CUgraph,
    exec: CUgraphExec,
    kernels: Vec<Link>,
    mark: Option<CUgraphNode>,
    /// Buffer for reading parameters.
    spare: Vec<u8>,
    /// The priority of its kernels; `None` if they have that of the stream.
    priority: Option<i32>,
}

/// The part of a batch that the driver refused as a node.
enum Unfit {
    /// The function with this handle.
    Function(u64),
    Mark,
}

impl Chain {
    /// Creates a chain of `len` launches like `first`, and a mark, for a stream of this priority. The context must be
    /// current.
    fn new(
        driver: &Driver,
        len: usize,
        first: &Planned,
        mark: Option<&Marking>,
        priority: i32,
    ) -> Result<Chain, CUresult> {
        let mut chain = Chain {
            graph: CUgraph::NULL,
            exec: CUgraphExec::NULL,
            kernels: Vec::with_capacity(len),
            mark: None,
            spare: Vec::new(),
            priority: None,
        };
        driver.graph.create(&mut chain.graph, 0)?;
        match chain.fill(driver, len, first, mark, priority) {
            Ok(()) => Ok(chain),
            Err(status) => {
                chain.end(driver);
                Err(status)
            }
        }
    }

    fn fill(
        &mut self,
        driver: &Driver,
        len: usize,
        first: &Planned,
        mark: Option<&Marking>,
        priority: i32,
    ) -> Result<(), CUresult> {
        for _ in 0..len {
            let mut link = Link::new(first);
            link.node = link
                .with(|_, kernel| self.add(driver, CU_GRAPH_NODE_TYPE_KERNEL, kernel.as_bytes()))?;
            self.kernels.push(link);
        }
        if let Some(mark) = mark {
            self.mark = Some(mark.add_to(driver, self)?);
        }
        let by_kernel = mark.is_some_and(|mark| mark.by != Writer::Operation);
        let flags = match by_kernel.then(|| self.prefer_mark(driver, priority)) {
            Some(Ok(())) => {
                self.priority = Some(priority);
                CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
            }
            Some(Err(status)) => {
                tracing::debug!(%status, "a kernel that writes a mark has no priority of its own");
                0
            }
            None => 0,
        };
        driver
            .graph
            .instantiate(&mut self.exec, self.graph, flags.into())
    }

    /// Whether its kernels have another priority than this one.
    fn has_other_priority(&self, priority: i32) -> bool {
        self.priority.is_some_and(|own| own != priority)
    }

    /// Gives the kernel that writes the mark the highest priority, so that it runs first as soon as a full device has
    /// room; the others keep their stream's priority.
    fn prefer_mark(&self, driver: &Driver, priority: i32) -> Result<(), CUresult> {
        let kernels = self.kernels.iter().map(|link| (link.node, priority));
        for (node, priority) in kernels.chain(self.mark.map(|node| (node, GREATEST))) {
            driver.graph.set_priority(node, priority)?;
        }
        Ok(())
    }

    /// Adds a node after the last kernel.
    fn add(&self, driver: &Driver, kind: u32, body: &[u8]) -> Result<CUgraphNode, CUresult> {
        let mut params = CUgraphNodeParams {
            kind,
            ..CUgraphNodeParams::default()
        };
        params.words.as_mut_bytes()[..body.len()].copy_from_slice(body);
        let before = self.kernels.last().map(|link| &link.node);
        let mut node = CUgraphNode::NULL;
        driver.graph.add_node(
            &mut node,
            self.graph,
            before.map_or(std::ptr::null(), std::ptr::from_ref),
            std::ptr::null(),
            usize::from(before.is_some()),
            &mut params,
        )?;
        Ok(node)
    }

    /// Sets the nodes to these launches and this mark.
    fn set(
        &mut self,
        driver: &Driver,
        run: &[Planned],
        mark: Option<&Marking>,
    ) -> Result<(), Unfit> {
        for (planned, link) in run.iter().zip(&mut self.kernels) {
            let shape = planned.shape();
            planned.read_params(&mut self.spare);
            if link.is(&shape, &self.spare) {
                continue;
            }
            std::mem::swap(&mut link.params, &mut self.spare);
            link.shape = shape;
            link.given = link
                .with(|node, kernel| driver.graph.exec_kernel_set(self.exec, node, kernel))
                .is_ok();
            if !link.given {
                return Err(Unfit::Function(planned.body.function));
            }
        }
        if let (Some(mark), Some(node)) = (mark, self.mark) {
            mark.set_in(driver, self.exec, node)
                .map_err(|_| Unfit::Mark)?;
        }
        Ok(())
    }

    /// Destroys the graph. Launches of it that are in flight continue.
    fn end(&self, driver: &Driver) {
        if self.exec != CUgraphExec::NULL {
            let _ = driver.graph.exec_destroy(self.exec);
        }
        let _ = driver.graph.destroy(self.graph);
    }
}

/// The chains of a stream: without a mark, with a mark written by an operation, and with one written by a kernel, each
/// by length.
#[derive(Debug, Default)]
pub struct Chains {
    chains: [[Option<Chain>; LENGTHS.len()]; 3],
    wanted: [[u32; LENGTHS.len()]; 3],
    /// Whether the driver has refused to create or launch a chain.
    refused: bool,
}

impl Chains {
    /// Returns the longest chain for a batch of `len` launches, created if it was wanted often. With a mark, the chain
    /// must hold the whole batch.
    fn longest(
        &mut self,
        driver: &Driver,
        len: usize,
        first: &Planned,
        mark: Option<&Marking>,
        priority: i32,
    ) -> Option<&mut Chain> {
        let at = LENGTHS.iter().rposition(|length| *length <= len)?;
        let kind = match mark.map(|mark| mark.by) {
            None => 0,
            Some(Writer::Operation) => 1,
            Some(Writer::Kernel(_)) => 2,
        };
        let (chains, wanted) = (&mut self.chains[kind], &mut self.wanted[kind][at]);
        *wanted = wanted.saturating_add(1);
        // Its kernels have the priority that the stream had when it was created.
        if chains[at]
            .as_ref()
            .is_some_and(|chain| chain.has_other_priority(priority))
            && let Some(chain) = chains[at].take()
        {
            chain.end(driver);
        }
        if chains[at].is_none() && *wanted > WANTED && !self.refused {
            match Chain::new(driver, LENGTHS[at], first, mark, priority) {
                Ok(chain) => {
                    let (kernels, mark) = (LENGTHS[at], mark.map(|mark| mark.by.name()));
                    tracing::debug!(kernels, ?mark, "a graph for runs: made");
                    chains[at] = Some(chain);
                }
                Err(status) => {
                    tracing::debug!(%status, "no graph for runs of launches");
                    self.refused = true;
                }
            }
        }
        match mark {
            Some(_) => chains[at].as_mut(),
            None => chains[..=at].iter_mut().rev().find_map(Option::as_mut),
        }
    }

    /// Destroys the chains. The context must be current.
    pub fn end(&mut self, driver: &Driver) {
        for chain in self.chains.iter_mut().flatten() {
            if let Some(chain) = chain.take() {
                tracing::debug!(kernels = chain.kernels.len(), "a graph for runs: destroyed");
                chain.end(driver);
            }
        }
    }

    /// Destroys the chains and creates no more. The context must be current.
    fn refuse(&mut self, driver: &Driver) {
        self.refused = true;
        self.end(driver);
    }

    /// Whether there are any chains.
    pub fn any(&self) -> bool {
        self.chains.iter().flatten().any(Option::is_some)
    }
}
