//! The ways of a round: copies, a kernel, and a mark.

use crate::device::{self, BLOCK, Buffers, Kernels, Launch, Opened};
use crate::{CYCLES_PER_US, Options};
use anyhow::Result;
use clap::ValueEnum;
use cudarc::driver::sys::{
    self, CUDA_BATCH_MEM_OP_NODE_PARAMS, CUevent, CUgraph, CUgraphExec, CUgraphNode, CUresult,
    CUstream, CUstreamBatchMemOpParams, CUstreamBatchMemOpType,
};
use std::sync::atomic::{AtomicU32, Ordering};

/// How the end of a round is learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mark {
    /// The stream writes a word (cuStreamWriteValue32)
    Operation,
    /// A graph of the kernel and such an operation
    OperationNode,
    /// A kernel behind it writes the word
    Kernel,
    /// A graph of the kernel and one that writes the word
    KernelNode,
    /// The same, with the highest priority for the one that writes
    KernelNodeFirst,
    /// The kernel itself writes the word when its first block ends, which no program's does
    Itself,
    /// A memset of the word, behind which other memory may be late
    Memset,
    /// An event is asked about
    Event,
}

impl Mark {
    /// Whether kernel and mark are one graph.
    pub fn is_in_graph(self) -> bool {
        matches!(
            self,
            Mark::OperationNode | Mark::KernelNode | Mark::KernelNodeFirst
        )
    }
}

/// A stream, and what it does again and again.
pub struct Round<'a> {
    stream: CUstream,
    mark: Mark,
    flag: &'a AtomicU32,
    /// What the flag will be when the round has ended.
    value: u32,
    event: CUevent,
    kernel: Launch,
    writer: Launch,
    /// Host and device address of what a copy engine copies, and bytes.
    pieces: [(u64, u64); 2],
    bytes: usize,
    graph: Option<Graph>,
}

impl<'a> Round<'a> {
    /// The round of the stream `at`.
    pub fn new(
        options: &Options,
        kernels: &Kernels,
        buffers: &'a Buffers,
        context: Opened,
        at: usize,
    ) -> Result<Round<'a>> {
        let (mark, flag) = (options.mark, buffers.flag(at));
        let own_flag = if mark == Mark::Itself {
            address(flag)
        } else {
            0
        };
        let cycles = options.us * CYCLES_PER_US;
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the result has its place.
        unsafe { sys::cuEventCreate(&mut event, flags) }.result()?;
        let pieces = buffers.pieces(at);
        let mut round = Round {
            stream: device::stream()?,
            mark,
            flag,
            value: 0,
            event,
            kernel: kernels.busy(options.blocks, BLOCK, cycles, own_flag),
            writer: kernels.flag(address(flag)),
            pieces,
            bytes: buffers.piece(),
            graph: None,
        };
        if mark.is_in_graph() {
            let copies = (round.bytes > 0).then(|| {
                let to_device = pieces.map(|(host, device)| (device, host));
                [to_device, pieces].map(|pieces| kernels.copy(pieces, round.bytes))
            });
            round.graph = Some(Graph::new(&mut round, copies, context)?);
        }
        Ok(round)
    }

    /// Submits it once more.
    pub fn begin(&mut self) -> Result<()> {
        self.value = self.value.wrapping_add(1);
        self.kernel.set_last(self.value);
        self.writer.set_last(self.value);
        if let Some(mut graph) = self.graph.take() {
            let launched = graph.launch(self);
            self.graph = Some(graph);
            return launched;
        }
        self.copy(|to, from, len, stream| {
            // SAFETY: pinned memory and device memory of that length, of this stream alone.
            unsafe { sys::cuMemcpyHtoDAsync_v2(from, to as *const _, len, stream) }
        })?;
        self.kernel.launch(self.stream)?;
        self.copy(|to, from, len, stream| {
            // SAFETY: as above.
            unsafe { sys::cuMemcpyDtoHAsync_v2(to as *mut _, from, len, stream) }
        })?;
        let (flag, stream) = (address(self.flag), self.stream);
        // SAFETY: a live stream and event, and a word of pinned memory.
        let marked = unsafe {
            match self.mark {
                Mark::Kernel => return self.writer.launch(stream),
                Mark::Event => sys::cuEventRecord(self.event, stream),
                Mark::Memset => sys::cuMemsetD32Async(flag, self.value, 1, stream),
                Mark::Operation => sys::cuStreamWriteValue32_v2(stream, flag, self.value, 0),
                Mark::Itself | Mark::OperationNode | Mark::KernelNode | Mark::KernelNodeFirst => {
                    return Ok(());
                }
            }
        };
        Ok(marked.result()?)
    }

    /// Copies both pieces, given host and device address.
    fn copy(&self, copy: impl Fn(u64, u64, usize, CUstream) -> CUresult) -> Result<()> {
        if self.bytes > 0 {
            for (host, device) in self.pieces {
                copy(host, device, self.bytes, self.stream).result()?;
            }
        }
        Ok(())
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> Result<bool> {
        if self.mark != Mark::Event {
            return Ok(self.flag.load(Ordering::Acquire) == self.value);
        }
        // SAFETY: a live event.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => Ok(status.result().map(|()| true)?),
        }
    }

    /// Waits for what was submitted last.
    pub fn finish(&self) -> Result<()> {
        device::synchronize(self.stream)
    }
}

fn address(flag: &AtomicU32) -> u64 {
    std::ptr::from_ref(flag) as u64
}

/// A round as a graph: a chain of a copy, the kernel, a copy, and the mark.
struct Graph {
    exec: CUgraphExec,
    copies: Option<[Launch; 2]>,
    /// The nodes in front of the mark.
    kernels: Vec<CUgraphNode>,
    mark: CUgraphNode,
    context: Opened,
}

impl Graph {
    fn new(
        round: &mut Round<'_>,
        mut copies: Option<[Launch; 2]>,
        context: Opened,
    ) -> Result<Graph> {
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: the result has its place.
        unsafe { sys::cuGraphCreate(&mut graph, 0) }.result()?;
        let mut kernels: Vec<CUgraphNode> = Vec::new();
        for launch in in_order(copies.as_mut(), &mut round.kernel) {
            let node = add_kernel(graph, kernels.last(), launch)?;
            kernels.push(node);
        }
        let mark = if round.mark == Mark::OperationNode {
            let mut node = std::ptr::null_mut();
            let last = kernels.last().expect("the kernel");
            // SAFETY: the result has its place; `last` is a node of this graph.
            let add = |batch: &_| unsafe {
                sys::cuGraphAddBatchMemOpNode(&mut node, graph, last, 1, batch).result()
            };
            operation(round, context, add)?;
            node
        } else {
            add_kernel(graph, kernels.last(), &mut round.writer)?
        };
        let flags = if round.mark == Mark::KernelNodeFirst {
            prefer(mark)?;
            sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0
        } else {
            0
        };
        let mut exec = std::ptr::null_mut();
        // SAFETY: the result has its place.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, flags.into()) }.result()?;
        Ok(Graph {
            exec,
            copies,
            kernels,
            mark,
            context,
        })
    }

    /// Makes all its nodes what they are to be, as a server must that does not know what comes next, and launches it.
    fn launch(&mut self, round: &mut Round<'_>) -> Result<()> {
        let exec = self.exec;
        let set = |node: CUgraphNode, launch: &mut Launch| {
            // SAFETY: a node of the graph that `exec` was made of.
            launch.as_node(|params| unsafe {
                sys::cuGraphExecKernelNodeSetParams_v2(exec, node, params).result()
            })
        };
        let launches = in_order(self.copies.as_mut(), &mut round.kernel);
        for (node, launch) in self.kernels.iter().zip(launches) {
            set(*node, launch)?;
        }
        if round.mark == Mark::OperationNode {
            let mark = self.mark;
            // SAFETY: as above.
            operation(round, self.context, |batch| unsafe {
                sys::cuGraphExecBatchMemOpNodeSetParams(exec, mark, batch).result()
            })?;
        } else {
            set(self.mark, &mut round.writer)?;
        }
        // SAFETY: a live graph and stream.
        Ok(unsafe { sys::cuGraphLaunch(exec, round.stream) }.result()?)
    }
}

/// The launches of a round in the order of their nodes.
fn in_order<'a>(
    copies: Option<&'a mut [Launch; 2]>,
    kernel: &'a mut Launch,
) -> impl Iterator<Item = &'a mut Launch> {
    let (to, from) = copies.map(|[to, from]| (to, from)).unzip();
    to.into_iter().chain([kernel]).chain(from)
}

/// Adds a kernel behind another node.
fn add_kernel(
    graph: CUgraph,
    behind: Option<&CUgraphNode>,
    launch: &mut Launch,
) -> Result<CUgraphNode> {
    let mut node = std::ptr::null_mut();
    let count = usize::from(behind.is_some());
    let behind = behind.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the result has its place; `behind` is a node of this graph, or there is none.
    launch.as_node(|params| unsafe {
        sys::cuGraphAddKernelNode_v2(&mut node, graph, behind, count, params).result()
    })?;
    Ok(node)
}

/// Gives a kernel's node the highest priority.
fn prefer(node: CUgraphNode) -> Result<()> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: results have their places; any bytes are a value of the union, of which the driver reads the priority.
    unsafe {
        sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest).result()?;
        let mut value: sys::CUkernelNodeAttrValue = std::mem::zeroed();
        value.priority = greatest;
        let attribute = sys::CUkernelNodeAttrID::CU_LAUNCH_ATTRIBUTE_PRIORITY;
        sys::cuGraphKernelNodeSetAttribute(node, attribute, &value).result()?;
    }
    Ok(())
}

/// Has `give` take the operation that writes the flag.
fn operation<R>(
    round: &Round<'_>,
    context: Opened,
    give: impl FnOnce(&CUDA_BATCH_MEM_OP_NODE_PARAMS) -> R,
) -> R {
    // SAFETY: all of its members are numbers.
    let mut write: CUstreamBatchMemOpParams = unsafe { std::mem::zeroed() };
    write.writeValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32;
    write.writeValue.address = address(round.flag);
    write.writeValue.__bindgen_anon_1.value = round.value;
    give(&CUDA_BATCH_MEM_OP_NODE_PARAMS {
        ctx: context.raw(),
        count: 1,
        paramArray: &mut write,
        flags: 0,
    })
}
