//! Stream capture and graphs: nodes are kept as what they do and run one after the other, in an order that their
//! dependencies allow. Kernels, copies, sets, events, child, conditional and empty nodes; memory only by
//! capture.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::ThreadId;

use mpsshim_api::cuda::*;
use parking_lot::Mutex;
use zerocopy::{FromBytes, IntoBytes};

use crate::api::{In, Out, R, Text, api, api_streams};
use crate::array;
use crate::condition::{self, Conditions, Values};
use crate::context::{self, Context, live};
use crate::driver::{Table, driver, new_handle};
use crate::driver_locks;
use crate::event;
use crate::graph_attribute::Attributes;
use crate::launch::{Launch, Params, Shape};
use crate::node_memory::NodeMemory;
use crate::pool;
use crate::stream::{self, HostFn, MemOp, Stream, resolve};

/// What a node does.
#[derive(Clone)]
pub enum Does {
    Kernel(u64, Arc<Launch>),
    Copy(CUDA_MEMCPY3D),
    Set(CUDA_MEMSET_NODE_PARAMS),
    Empty,
    Child(Arc<Graph>),
    Wait(u64),
    Record(u64),
    Host(HostFn, u64),
    Batch(Vec<CUstreamBatchMemOpParams>),
    Allocate(Arc<NodeMemory>),
    /// Memory from a pool, or of a node.
    Free(u64),
    Conditional(Arc<Conditional>),
}

/// A conditional node.
pub struct Conditional {
    handle: u64,
    /// `CU_GRAPH_COND_TYPE_*`.
    kind: u32,
    bodies: Vec<Arc<Graph>>,
}

/// The nodes of an instance in their order, and whether each is enabled.
type Work = Vec<(u64, Does, bool)>;
/// The bodies of an instance's conditional nodes, by their graphs.
type Bodies = HashMap<u64, Work>;

impl Does {
    fn kind(&self) -> u32 {
        match self {
            Does::Kernel(..) => CU_GRAPH_NODE_TYPE_KERNEL,
            Does::Copy(_) => CU_GRAPH_NODE_TYPE_MEMCPY,
            Does::Set(_) => CU_GRAPH_NODE_TYPE_MEMSET,
            Does::Empty => CU_GRAPH_NODE_TYPE_EMPTY,
            Does::Child(_) => CU_GRAPH_NODE_TYPE_GRAPH,
            Does::Wait(_) => CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            Does::Record(_) => CU_GRAPH_NODE_TYPE_EVENT_RECORD,
            Does::Host(..) => CU_GRAPH_NODE_TYPE_HOST,
            Does::Batch(_) => CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
            Does::Allocate(_) => CU_GRAPH_NODE_TYPE_MEM_ALLOC,
            Does::Free(_) => CU_GRAPH_NODE_TYPE_MEM_FREE,
            Does::Conditional(_) => CU_GRAPH_NODE_TYPE_CONDITIONAL,
        }
    }

    /// What a launch does at once, before any of it runs: memory comes and goes in the order of submission.
    fn claim(&self, stream: u64) -> R<()> {
        match self {
            Does::Allocate(memory) => memory.allocate(),
            Does::Free(address) => pool::free(*address, stream),
            Does::Child(graph) => {
                let nodes = graph.in_order()?;
                nodes.iter().try_for_each(|(_, does)| does.claim(stream))
            }
            _ => Ok(()),
        }
    }

    fn run(&self, context: &Context) -> R<()> {
        match self {
            Does::Kernel(_, launch) => launch.run(context)?,
            Does::Copy(copy) => run_copy(copy)?,
            Does::Set(set) => run_set(set)?,
            Does::Empty | Does::Allocate(_) | Does::Free(_) => {}
            Does::Child(graph) => {
                for (_, does) in graph.in_order()? {
                    does.run(context)?;
                }
            }
            Does::Wait(event) => event::latest(*event)
                .iter()
                .for_each(|record| record.wait()),
            Does::Record(event) => event::begun(*event)
                .iter()
                .for_each(|record| record.reach()),
            Does::Host(function, data) => function(*data as *mut c_void),
            // Only an instance has the contents of the bodies.
            Does::Conditional(_) => return Err(CUDA_ERROR_NOT_SUPPORTED),
            Does::Batch(operations) => {
                for operation in operations {
                    // Its word has gone since the graph was made.
                    let operation =
                        MemOp::new(operation).map_err(|_| CUDA_ERROR_ILLEGAL_ADDRESS)?;
                    if let Some(operation) = operation {
                        operation.run(context);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Copies from or to host or unified memory, which may have been unmapped since the node was made: the kernel copies,
/// and reports a fault instead of raising a signal.
fn copy_checked(from: u64, to: u64, bytes: usize) -> R<()> {
    let mut done = 0;
    while done < bytes {
        let part = |base: u64| libc::iovec {
            iov_base: (base as usize + done) as *mut libc::c_void,
            iov_len: bytes - done,
        };
        let (source, target) = (part(from), part(to));
        // SAFETY: this process's own memory, in ranges that the caller named; the kernel checks that both are mapped.
        let copied = unsafe { libc::process_vm_readv(libc::getpid(), &target, 1, &source, 1, 0) };
        match usize::try_from(copied) {
            Ok(0) => return Err(CUDA_ERROR_ILLEGAL_ADDRESS),
            // A call moves at most 2 GiB, and ends early at a page that is not mapped.
            Ok(copied) => done += copied,
            Err(_) => match std::io::Error::last_os_error().raw_os_error() {
                // Some containers forbid the call.
                Some(libc::EPERM | libc::ENOSYS) => {
                    // SAFETY: by the driver API's contract, the caller's memory for as long as the graph runs.
                    unsafe {
                        std::ptr::copy(source.iov_base, target.iov_base, source.iov_len);
                    }
                    return Ok(());
                }
                _ => return Err(CUDA_ERROR_ILLEGAL_ADDRESS),
            },
        }
    }
    Ok(())
}

fn run_copy(copy: &CUDA_MEMCPY3D) -> R<()> {
    let on_device = copy.src_type == CU_MEMORYTYPE_DEVICE && copy.dst_type == CU_MEMORYTYPE_DEVICE;
    let (from, to) = array::sides_in_flight(copy).map_err(|_| CUDA_ERROR_ILLEGAL_ADDRESS)?;
    for z in 0..copy.depth {
        for y in 0..copy.height {
            let row = |(first, pitch, slice): array::Rows| first + z * slice + y * pitch;
            let (from, to) = (row(from), row(to));
            if on_device {
                // SAFETY: both sides were checked just now.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, copy.width as usize) }
            } else {
                copy_checked(from, to, copy.width as usize)?;
            }
        }
    }
    Ok(())
}

fn run_set(set: &CUDA_MEMSET_NODE_PARAMS) -> R<()> {
    // Its memory may have gone since the node was made.
    let ranges = &driver()?.ranges;
    if !extent(set).is_some_and(|bytes| ranges.covers_in_flight(set.to, bytes)) {
        return Err(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    let value = set.value.to_le_bytes();
    for row in 0..set.height {
        for at in 0..set.width {
            let to = set.to + row * set.pitch + at * u64::from(set.element);
            // SAFETY: the rectangle was checked just now.
            unsafe {
                std::ptr::copy_nonoverlapping(value.as_ptr(), to as *mut u8, set.element as usize)
            }
        }
    }
    Ok(())
}

#[derive(Clone)]
struct Node {
    does: Does,
    graph: u64,
    before: Vec<u64>,
    /// The node that this one was cloned from.
    original: u64,
    /// Those of a kernel that were set.
    attributes: Attributes,
}

pub struct Graph {
    handle: u64,
    /// Of its nodes, in the order of their making.
    nodes: Mutex<Vec<u64>>,
    /// It is a node's.
    owned: AtomicBool,
    /// A capture fills it.
    filling: AtomicBool,
    /// The nodes that a capture ended with.
    sinks: Mutex<Vec<u64>>,
    /// Bodies of conditional nodes have those of the graph that they are in.
    conditions: Arc<Conditions>,
}

struct Exec {
    work: Mutex<Work>,
    bodies: Mutex<Bodies>,
    values: Arc<Values>,
    flags: u64,
    /// Copies of the graphs in its child nodes: no graph has them.
    own: Mutex<Vec<Arc<Graph>>>,
}

impl Drop for Exec {
    fn drop(&mut self) {
        for child in self.own.get_mut().drain(..) {
            child.destroy();
        }
    }
}

static GRAPHS: LazyLock<Table<Graph>> = LazyLock::new(Table::default);
static NODES: LazyLock<Table<Mutex<Node>>> = LazyLock::new(Table::default);
static EXECS: LazyLock<Table<Exec>> = LazyLock::new(Table::default);
/// What pointers in parameters of a node lead to: bytes, and words that may point into them.
type Kept = Box<(Vec<u8>, Vec<u64>)>;
/// The last [`KEPT_MOST`] answers: callers copy at once what they were given pointers to.
static KEPT: Mutex<VecDeque<Kept>> = Mutex::new(VecDeque::new());
const KEPT_MOST: usize = 1024;

fn keep(kept: Kept) {
    let mut all = KEPT.lock();
    if all.len() == KEPT_MOST {
        all.pop_front();
    }
    all.push_back(kept);
}

/// How many graphs, nodes and instances there are.
pub fn counts() -> [(&'static str, usize); 3] {
    [
        ("graphs", GRAPHS.len()),
        ("graph-nodes", NODES.len()),
        ("graph-instances", EXECS.len()),
    ]
}

fn graph(handle: u64) -> R<Arc<Graph>> {
    GRAPHS.get(handle).map_err(|_| CUDA_ERROR_INVALID_VALUE)
}
fn node(handle: u64) -> R<Arc<Mutex<Node>>> {
    NODES.get(handle).map_err(|_| CUDA_ERROR_INVALID_VALUE)
}
fn exec(handle: u64) -> R<Arc<Exec>> {
    EXECS.get(handle).map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

impl Graph {
    fn new() -> Arc<Graph> {
        Graph::with(Arc::default(), false)
    }

    fn with(conditions: Arc<Conditions>, owned: bool) -> Arc<Graph> {
        let graph = Arc::new(Graph {
            handle: new_handle(),
            nodes: Mutex::default(),
            owned: AtomicBool::new(owned),
            filling: AtomicBool::new(false),
            sinks: Mutex::default(),
            conditions,
        });
        GRAPHS.insert(graph.handle, graph.clone());
        graph
    }

    fn add(&self, does: Does, before: &[u64], original: u64) -> R<u64> {
        let unique: HashSet<_> = before.iter().collect();
        for &other in before {
            if node(other)?.lock().graph != self.handle {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
        }
        if unique.len() != before.len() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let handle = new_handle();
        let made = Node {
            does,
            graph: self.handle,
            before: before.to_vec(),
            original,
            attributes: Attributes::new(),
        };
        let mut nodes = self.nodes.lock();
        // Under the lock: `destroy` takes what is there once the graph has gone.
        graph(self.handle)?;
        NODES.insert(handle, Arc::new(Mutex::new(made)));
        nodes.push(handle);
        Ok(handle)
    }

    fn edges(&self) -> R<Vec<(u64, u64)>> {
        let mut edges = Vec::new();
        for &to in self.nodes.lock().iter() {
            edges.extend(node(to)?.lock().before.iter().map(|from| (*from, to)));
        }
        Ok(edges)
    }

    /// Its nodes, each behind those it depends on.
    fn in_order(&self) -> R<Vec<(u64, Does)>> {
        let mut left: Vec<u64> = self.nodes.lock().clone();
        let (mut done, mut order) = (HashSet::new(), Vec::new());
        while !left.is_empty() {
            let count = left.len();
            let mut waiting = Vec::new();
            for handle in left {
                let node = node(handle)?;
                let node = node.lock();
                if node.before.iter().all(|other| done.contains(other)) {
                    done.insert(handle);
                    order.push((handle, node.does.clone()));
                } else {
                    waiting.push(handle);
                }
            }
            if waiting.len() == count {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            left = waiting;
        }
        Ok(order)
    }

    /// In the order in which an update takes its nodes for those of another graph: nodes that nothing depends on come last, as
    /// their capture ended with them, otherwise as they were made.
    fn in_pairing_order(&self) -> R<Vec<(u64, Does)>> {
        let order = self.in_order()?;
        let edges = self.edges()?;
        let leads_on: HashSet<u64> = edges.iter().map(|(from, ..)| *from).collect();
        let captured = self.sinks.lock().clone();
        let (mut order, mut sinks): (Vec<_>, Vec<_>) = order
            .into_iter()
            .partition(|(node, _)| leads_on.contains(node));
        sinks.sort_by_key(|(node, _)| captured.iter().position(|sink| sink == node));
        order.extend(sinks);
        Ok(order)
    }

    fn duplicate(&self) -> R<Arc<Graph>> {
        let clone = Graph::new();
        match self.copy_into(&clone) {
            Ok(()) => Ok(clone),
            Err(status) => {
                clone.destroy();
                Err(status)
            }
        }
    }

    fn copy_into(&self, clone: &Graph) -> R<()> {
        let mut twins = HashMap::new();
        for (handle, does) in self.in_order()? {
            let before: Vec<u64> = node(handle)?
                .lock()
                .before
                .iter()
                .map(|b| twins[b])
                .collect();
            let does = match does {
                Does::Child(graph) => Does::Child(graph.duplicate()?),
                // As the genuine driver.
                Does::Conditional(_) => return Err(CUDA_ERROR_NOT_SUPPORTED),
                other => other,
            };
            let twin = clone.add(does.clone(), &before, handle).inspect_err(|_| {
                if let Does::Child(child) = &does {
                    child.destroy();
                }
            })?;
            let attributes = node(handle)?.lock().attributes.clone();
            node(twin)?.lock().attributes = attributes;
            twins.insert(handle, twin);
        }
        Ok(())
    }

    fn destroy(&self) {
        let _ = GRAPHS.remove(self.handle);
        for handle in std::mem::take(&mut *self.nodes.lock()) {
            destroy_node(handle);
        }
    }
}

fn destroy_node(handle: u64) {
    if let Ok(node) = NODES.remove(handle) {
        match &node.lock().does {
            Does::Child(graph) => graph.destroy(),
            Does::Conditional(node) => node.bodies.iter().for_each(|body| body.destroy()),
            _ => {}
        }
    }
}

/// A capture, and what streams and events have of it: the nodes that come next depend on these.
pub struct Capture {
    id: u64,
    graph: Arc<Graph>,
    /// The stream that it began on.
    origin: u64,
    /// The thread that must end it.
    thread: Option<ThreadId>,
    invalid: AtomicBool,
}

/// A stream's or an event's part of a capture.
#[derive(Clone)]
pub struct Part {
    pub capture: Arc<Capture>,
    pub last: Vec<u64>,
}

impl Part {
    fn goes_on(&self) -> bool {
        GRAPHS
            .get(self.capture.graph.handle)
            .is_ok_and(|graph| graph.filling.load(Ordering::Relaxed))
    }

    /// What a question about an event of the capture is answered with.
    pub fn refuse(&self) -> CUresult {
        if !self.goes_on() {
            return CUDA_ERROR_INVALID_VALUE;
        }
        self.capture.invalidate();
        CUDA_ERROR_CAPTURED_EVENT
    }
}

impl Capture {
    fn invalidate(&self) {
        self.invalid.store(true, Ordering::Release);
    }
    fn sound(&self) -> R<()> {
        // Its graph may have gone with the node that had it.
        let gone = GRAPHS.get(self.graph.handle).is_err();
        if gone || self.invalid.load(Ordering::Acquire) {
            return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        Ok(())
    }
}

/// Adds a node for what a capturing stream is given; false for a stream that does not capture.
pub fn captured(stream: &Stream, does: impl FnOnce() -> Does) -> R<bool> {
    let mut part = stream.part.lock();
    let Some(part) = part.as_mut() else {
        return Ok(false);
    };
    part.capture.sound()?;
    part.last = vec![part.capture.graph.add(does(), &part.last, 0)?];
    Ok(true)
}

/// Whether a stream captures, well or not.
pub fn captures(stream: &Stream) -> bool {
    stream.part.lock().is_some()
}

/// Refuses what cannot be done with a capturing stream; that ends the capture's soundness.
pub fn refuse(stream: &Stream) -> R<()> {
    if let Some(part) = stream.part.lock().as_ref() {
        part.capture.invalidate();
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

/// An event is recorded in a stream: what it has of the stream's capture.
pub fn part_of(stream: &Stream) -> R<Option<Part>> {
    let part = stream.part.lock();
    if let Some(part) = part.as_ref() {
        part.capture.sound()?;
    }
    Ok(part.clone())
}

/// A stream waits for an event with a part of a capture.
pub fn join(stream: &Stream, event: &Part) -> R<()> {
    let mut part = stream.part.lock();
    let goes_on = event.goes_on();
    match part.as_mut() {
        None if !goes_on => Err(CUDA_ERROR_INVALID_VALUE),
        None => {
            *part = Some(event.clone());
            Ok(())
        }
        Some(own) if own.capture.id == event.capture.id => {
            own.capture.sound()?;
            for node in &event.last {
                if !own.last.contains(node) {
                    own.last.push(*node);
                }
            }
            Ok(())
        }
        Some(own) => {
            own.capture.invalidate();
            if goes_on {
                event.capture.invalidate();
                return Err(CUDA_ERROR_STREAM_CAPTURE_MERGE);
            }
            Err(CUDA_ERROR_INVALID_VALUE)
        }
    }
}

/// A stream waits for an event from outside its capture.
pub fn isolated(stream: &Stream) -> R<bool> {
    let part = stream.part.lock();
    let Some(part) = part.as_ref() else {
        return Ok(false);
    };
    part.capture.sound()?;
    part.capture.invalidate();
    Err(CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
}

fn begin(stream: CUstream, own: bool, mode: u32, into: Option<(Arc<Graph>, Vec<u64>)>) -> R<()> {
    let (_, stream) = resolve(stream, own)?;
    if mode > 2 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if stream.is_legacy() {
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut part = stream.part.lock();
    if part.is_some() {
        return Err(CUDA_ERROR_ILLEGAL_STATE);
    }
    let (graph, last) = into.unwrap_or_else(|| (Graph::new(), Vec::new()));
    // As the genuine driver: one capture at a time fills a graph.
    if graph.filling.swap(true, Ordering::Relaxed) {
        return Err(CUDA_ERROR_ILLEGAL_STATE);
    }
    let capture = Capture {
        id: new_handle(),
        graph,
        origin: stream.handle,
        thread: (mode < 2).then(|| std::thread::current().id()),
        invalid: AtomicBool::new(false),
    };
    *part = Some(Part {
        capture: Arc::new(capture),
        last,
    });
    Ok(())
}

fn end(stream: CUstream, own: bool) -> R<u64> {
    let (_, stream) = resolve(stream, own)?;
    let part = stream.part.lock().clone().ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
    let capture = &part.capture;
    if capture
        .thread
        .is_some_and(|thread| thread != std::thread::current().id())
    {
        capture.graph.destroy();
        *stream.part.lock() = None;
        return Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    if capture.origin != stream.handle {
        capture.invalidate();
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    let mut unjoined = false;
    // Streams of other devices may have joined the capture too.
    for other in context::all().iter().flat_map(|context| context.streams()) {
        let mut theirs = other.part.lock();
        if theirs.as_ref().is_none_or(|p| p.capture.id != capture.id) {
            continue;
        }
        if let Some(other) = theirs.take()
            && !other.last.iter().all(|node| reaches(*node, &part.last))
        {
            unjoined = true;
        }
    }
    capture.graph.filling.store(false, Ordering::Relaxed);
    (*capture.graph.sinks.lock()).clone_from(&part.last);
    let sound = capture.sound();
    if unjoined || sound.is_err() {
        capture.graph.destroy();
        return Err(sound.err().unwrap_or(CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
    }
    Ok(capture.graph.handle)
}

/// Whether a node is one of these or comes before one.
fn reaches(from: u64, ends: &[u64]) -> bool {
    let (mut left, mut seen) = (ends.to_vec(), HashSet::new());
    while let Some(at) = left.pop() {
        if at == from {
            return true;
        }
        if seen.insert(at)
            && let Ok(node) = node(at)
        {
            left.extend(node.lock().before.iter());
        }
    }
    false
}

struct Info {
    status: u32,
    id: u64,
    graph: u64,
    nodes: u64,
    edges: u64,
    count: usize,
}

fn info(stream: CUstream, own: bool) -> R<Info> {
    let (_, stream) = resolve(stream, own)?;
    let part = stream.part.lock();
    let Some(part) = part.as_ref() else {
        return Ok(Info {
            status: 0,
            id: 0,
            graph: 0,
            nodes: 0,
            edges: 0,
            count: 0,
        });
    };
    let invalid = part.capture.sound().is_err();
    let kept = Box::new((vec![0u8; part.last.len() * 8], part.last.clone()));
    let info = Info {
        status: 1 + u32::from(invalid),
        id: part.capture.id,
        graph: part.capture.graph.handle,
        nodes: kept.1.as_ptr() as u64,
        edges: kept.0.as_ptr() as u64,
        count: part.last.len(),
    };
    keep(kept);
    Ok(info)
}

fn update_capture(stream: CUstream, own: bool, nodes: &[u64], flags: u32) -> R<()> {
    let (_, stream) = resolve(stream, own)?;
    let mut part = stream.part.lock();
    let part = part.as_mut().ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
    if flags > 1 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for &other in nodes {
        node(other)?;
    }
    if flags == 1 {
        part.last.clear();
    }
    part.last.extend(nodes);
    Ok(())
}

fn inside<T: FromBytes + IntoBytes>(params: &CUgraphNodeParams, at: usize) -> T {
    let mut read = T::new_zeroed();
    let len = size_of::<T>();
    read.as_mut_bytes()
        .copy_from_slice(&params.words.as_bytes()[at..at + len]);
    read
}

fn around<T: IntoBytes + zerocopy::Immutable>(
    kind: u32,
    at: usize,
    of_kind: &T,
) -> CUgraphNodeParams {
    let mut params = CUgraphNodeParams {
        kind,
        ..CUgraphNodeParams::default()
    };
    let bytes = of_kind.as_bytes();
    params.words.as_mut_bytes()[at..at + bytes.len()].copy_from_slice(bytes);
    params
}

/// Bytes from the first to the last that a memset writes; `None`: its rows overlap, or there are none.
fn extent(set: &CUDA_MEMSET_NODE_PARAMS) -> Option<u64> {
    let row = set.width.saturating_mul(set.element.into());
    let gaps = set.pitch.saturating_mul(set.height.saturating_sub(1));
    let apart = row > 0 && (set.height == 1 || set.height > 1 && row <= set.pitch);
    apart.then_some(gaps.saturating_add(row))
}

/// Whether all that a memset writes is device memory, in rows that do not overlap.
fn is_set(set: &CUDA_MEMSET_NODE_PARAMS) -> R<bool> {
    let ranges = &driver()?.ranges;
    Ok(extent(set).is_some_and(|bytes| ranges.covers(set.to, bytes)))
}

/// What a node with these parameters does.
fn describe(params: &CUgraphNodeParams) -> R<Does> {
    if params.reserved0 != [0; 3] || params.reserved2 != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match params.kind {
        CU_GRAPH_NODE_TYPE_KERNEL => {
            let kernel: CUDA_KERNEL_NODE_PARAMS = inside(params, 0);
            let shape = Shape {
                grid: kernel.grid,
                block: kernel.block,
                shared: kernel.shared,
            };
            let given = Params {
                pointers: In(kernel.params as *const u64),
                extra: In(kernel.extra as *const u64),
            };
            let function = if kernel.function != 0 {
                kernel.function
            } else {
                kernel.kernel
            };
            Ok(Does::Kernel(
                function,
                Arc::new(Launch::new(function, &*live()?, shape, given)?),
            ))
        }
        CU_GRAPH_NODE_TYPE_MEMCPY => {
            let copy: CUDA_MEMCPY3D = inside(params, 16);
            let size = [copy.width, copy.height, copy.depth];
            if size.contains(&0) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            array::sides(&copy)?;
            Ok(Does::Copy(copy))
        }
        CU_GRAPH_NODE_TYPE_MEMSET => {
            let set: CUDA_MEMSET_NODE_PARAMS = inside(params, 0);
            let known =
                matches!(set.element, 1 | 2 | 4) && set.to.is_multiple_of(set.element.into());
            if !known || !is_set(&set)? {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            Ok(Does::Set(set))
        }
        CU_GRAPH_NODE_TYPE_EMPTY => Ok(Does::Empty),
        CU_GRAPH_NODE_TYPE_GRAPH => {
            let child = graph(params.words[0])?;
            if moves(params) {
                return Ok(Does::Child(child));
            }
            Ok(Does::Child(child.duplicate()?))
        }
        CU_GRAPH_NODE_TYPE_HOST => {
            let given: HostParams = In(params.words.as_ptr().cast()).get(0)?;
            Ok(Does::Host(
                given.function.ok_or(CUDA_ERROR_INVALID_VALUE)?,
                given.data,
            ))
        }
        CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
            let batch: CUDA_BATCH_MEM_OP_NODE_PARAMS = inside(params, 0);
            let operations: Vec<CUstreamBatchMemOpParams> =
                In(batch.operations as *const CUstreamBatchMemOpParams)
                    .list(batch.count as usize)?;
            for operation in &operations {
                MemOp::new(operation)?;
            }
            Ok(Does::Batch(operations))
        }
        CU_GRAPH_NODE_TYPE_WAIT_EVENT => {
            driver()?.events.get(params.words[0])?;
            Ok(Does::Wait(params.words[0]))
        }
        CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
            driver()?.events.get(params.words[0])?;
            Ok(Does::Record(params.words[0]))
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn add(out: Out<u64>, to: u64, before: In<u64>, count: usize, params: &CUgraphNodeParams) -> R<()> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let graph = graph(to)?;
    let before = before.list(count)?;
    let does = match params.kind {
        CU_GRAPH_NODE_TYPE_CONDITIONAL => conditional(&graph, params)?,
        _ => describe(params)?,
    };
    if let Does::Child(child) = &does
        && moves(params)
    {
        if contains(child, graph.handle) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if has_conditions(child) {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
    }
    let node = graph.add(does.clone(), &before, 0).inspect_err(|_| {
        if let Does::Conditional(node) = &does {
            node.bodies.iter().for_each(|body| body.destroy());
            graph.conditions.give_back(node.handle);
        }
        discard(params, &does);
    })?;
    if let Does::Child(child) = &does {
        child.owned.store(true, Ordering::Relaxed);
    }
    out.set(node)
}

/// A conditional node with empty bodies.
fn conditional(graph: &Graph, params: &CUgraphNodeParams) -> R<Does> {
    let given: CUDA_CONDITIONAL_NODE_PARAMS = inside(params, 0);
    let fits = match given.kind {
        condition::IF => matches!(given.size, 1 | 2),
        condition::WHILE => given.size == 1,
        condition::SWITCH => given.size > 0,
        _ => false,
    };
    if !fits {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    graph.conditions.take(given.handle)?;
    let body = |_| Graph::with(Arc::clone(&graph.conditions), true);
    Ok(Does::Conditional(Arc::new(Conditional {
        handle: given.handle,
        kind: given.kind,
        bodies: (0..given.size).map(body).collect(),
    })))
}

/// `cuGraphAddNode`, which tells the bodies of a conditional node.
fn add_any(
    out: Out<u64>,
    to: u64,
    before: In<u64>,
    count: usize,
    params: Out<CUgraphNodeParams>,
) -> R<()> {
    let mut given = params.get()?;
    add(out, to, before, count, &given)?;
    let does = node(out.get()?)?.lock().does.clone();
    if let Does::Conditional(node) = does {
        let bodies: Vec<u64> = node.bodies.iter().map(|body| body.handle).collect();
        let kept = Box::new((Vec::new(), bodies));
        given.words[2] = kept.1.as_ptr() as u64;
        keep(kept);
        params.put(given);
    }
    Ok(())
}

/// Whether a graph has conditional nodes.
fn has_conditions(graph: &Graph) -> bool {
    let nodes = graph.nodes.lock().clone();
    nodes.iter().any(|at| {
        node(*at).is_ok_and(|node| match &node.lock().does {
            Does::Conditional(_) => true,
            Does::Child(child) => has_conditions(child),
            _ => false,
        })
    })
}

/// Whether a child becomes the node's own instead of a copy of it.
fn moves(params: &CUgraphNodeParams) -> bool {
    params.words[1] as u32 == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
}

/// Whether a graph is another one, or has it inside.
fn contains(outer: &Graph, inner: u64) -> bool {
    let nodes = outer.nodes.lock().clone();
    outer.handle == inner
        || nodes.iter().any(|at| match node(*at) {
            Ok(node) => {
                let does = node.lock().does.clone();
                match does {
                    Does::Child(child) => contains(&child, inner),
                    Does::Conditional(node) => node.bodies.iter().any(|body| contains(body, inner)),
                    _ => false,
                }
            }
            Err(_) => false,
        })
}

/// Ends the copy that was made of a child, if nothing came of the node.
fn discard(params: &CUgraphNodeParams, does: &Does) {
    if let Does::Child(child) = does
        && !moves(params)
    {
        child.destroy();
    }
}

/// As cuda.h has it, with an array of contexts' worth of words in front of the copy.
fn around_copy(copy: CUDA_MEMCPY3D) -> CUgraphNodeParams {
    around(CU_GRAPH_NODE_TYPE_MEMCPY, 16, &copy)
}

fn change(at: u64, params: &CUgraphNodeParams) -> R<()> {
    let node = node(at)?;
    let moved = params.kind == CU_GRAPH_NODE_TYPE_GRAPH && moves(params);
    if node.lock().does.kind() != params.kind || moved {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let does = describe(params)?;
    if let Does::Child(child) = &does {
        child.owned.store(true, Ordering::Relaxed);
    }
    let before = std::mem::replace(&mut node.lock().does, does);
    if let Does::Child(child) = before {
        child.destroy();
    }
    Ok(())
}

fn same_shape(one: &Graph, other: &Graph) -> R<Result<(), (u32, u64)>> {
    let (ours, theirs) = (one.nodes.lock().clone(), other.nodes.lock().clone());
    if ours.len() != theirs.len() || one.edges()?.len() != other.edges()?.len() {
        return Ok(Err((2, 0)));
    }
    for (a, b) in ours.iter().zip(&theirs) {
        if node(*a)?.lock().does.kind() != node(*b)?.lock().does.kind() {
            return Ok(Err((3, *b)));
        }
    }
    Ok(Ok(()))
}

fn exec_change(exec_: u64, at: u64, params: &CUgraphNodeParams) -> R<()> {
    let (exec, _) = (exec(exec_)?, node(at)?);
    let does = describe(params)?;
    let put = || -> R<()> {
        let (mut work, mut bodies) = (exec.work.lock(), exec.bodies.lock());
        let (_, now, _) = find(&mut work, &mut bodies, at)?;
        if now.kind() != does.kind() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if let (Does::Child(one), Does::Child(other)) = (&*now, &does)
            && same_shape(one, other)?.is_err()
        {
            return Err(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
        }
        *now = does.clone();
        Ok(())
    };
    put().inspect_err(|_| discard(params, &does))?;
    if let Does::Child(child) = does
        && !moves(params)
    {
        exec.own.lock().push(child);
    }
    Ok(())
}

/// A node of an instance, or of a body in it.
fn find<'a>(work: &'a mut Work, bodies: &'a mut Bodies, at: u64) -> R<&'a mut (u64, Does, bool)> {
    let mut all = work
        .iter_mut()
        .chain(bodies.values_mut().flat_map(|body| body.iter_mut()));
    all.find(|(node, ..)| *node == at)
        .ok_or(CUDA_ERROR_INVALID_VALUE)
}

fn exec_update(exec_: u64, with: u64) -> R<Result<(), (u32, u64)>> {
    let (exec, graph) = (exec(exec_)?, graph(with)?);
    let mut work = exec.work.lock();
    let order = graph.in_pairing_order()?;
    if order.len() != work.len() {
        return Ok(Err((2, 0)));
    }
    for ((_, now, _), (node, does)) in work.iter().zip(&order) {
        if matches!(now, Does::Conditional(_)) {
            return Ok(Err((6, *node)));
        }
        if now.kind() != does.kind() {
            return Ok(Err((3, *node)));
        }
    }
    let mut own = Vec::new();
    let order = with_own_children(order, &mut own)?;
    for ((_, now, _), (_, does)) in work.iter_mut().zip(order) {
        *now = does;
    }
    // What is in flight has its own list of the nodes.
    let before = std::mem::replace(&mut *exec.own.lock(), own);
    before.iter().for_each(|child| child.destroy());
    Ok(Ok(()))
}

/// The nodes with copies of the graphs in child nodes: an instance does not change with the graph that it was made from, and
/// goes on without it. Adds the copies to `own`.
fn with_own_children(nodes: Vec<(u64, Does)>, own: &mut Vec<Arc<Graph>>) -> R<Vec<(u64, Does)>> {
    let mut copied = Vec::new();
    for (node, does) in nodes {
        let does = match does {
            Does::Child(graph) => match graph.duplicate() {
                Ok(copy) => {
                    own.push(Arc::clone(&copy));
                    Does::Child(copy)
                }
                // Conditional nodes cannot be copied.
                Err(CUDA_ERROR_NOT_SUPPORTED) => Does::Child(graph),
                Err(status) => {
                    own.drain(..).for_each(|copy| copy.destroy());
                    return Err(status);
                }
            },
            does => does,
        };
        copied.push((node, does));
    }
    Ok(copied)
}

/// What a launch does, with the nodes of child graphs in the place of these: the instance may be changed or destroyed before
/// they have run.
fn flattened(work: &Work) -> R<Work> {
    let mut flat = Vec::new();
    for (node, does, on) in work {
        match does {
            Does::Child(graph) if *on => {
                let inner = graph.in_order()?.into_iter();
                let inner: Work = inner.map(|(node, does)| (node, does, true)).collect();
                flat.extend(flattened(&inner)?);
            }
            does => flat.push((*node, does.clone(), *on)),
        }
    }
    Ok(flat)
}

/// The local memory that kernels among these nodes need, the most of each context by its id.
fn local_memory(nodes: &[(u64, Does)], most: &mut BTreeMap<u64, u32>) -> R<()> {
    for (_, does) in nodes {
        match does {
            Does::Kernel(_, launch) => {
                let most = most.entry(launch.context()).or_default();
                *most = launch.local_bytes().max(*most);
            }
            Does::Child(graph) => local_memory(&graph.in_order()?, most)?,
            Does::Conditional(node) => {
                for body in &node.bodies {
                    local_memory(&body.in_order()?, most)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Waits as the genuine driver does before kernels become part of an instance.
fn prepare_kernels(nodes: &[(u64, Does)]) -> R<()> {
    if !driver_locks::on() {
        return Ok(());
    }
    let mut most = BTreeMap::new();
    local_memory(nodes, &mut most)?;
    for (id, local_bytes) in most {
        if let Some(context) = context::by_id(id) {
            context.before_instantiation(local_bytes);
        }
    }
    Ok(())
}

fn instantiate(out: Out<u64>, from: u64, flags: u64) -> R<()> {
    if out.is_null() || flags & !15 != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let from = graph(from)?;
    let order = from.in_pairing_order()?;
    for (_, does) in &order {
        if let Does::Set(set) = does
            && !is_set(set)?
        {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    prepare_kernels(&order)?;
    let mut own = Vec::new();
    let order = with_own_children(order, &mut own)?;
    let handle = new_handle();
    let mut bodies = Bodies::new();
    let work = all_enabled(order, &mut bodies)
        .inspect_err(|_| own.iter().for_each(|child| child.destroy()))?;
    // Upload and priorities leave no trace.
    let exec = Exec {
        work: Mutex::new(work),
        bodies: Mutex::new(bodies),
        values: Arc::new(from.conditions.values()),
        flags: flags & 1,
        own: Mutex::new(own),
    };
    EXECS.insert(handle, Arc::new(exec));
    out.set(handle)
}

/// Nodes as a new instance has them. Adds the bodies of conditional nodes.
fn all_enabled(order: Vec<(u64, Does)>, bodies: &mut Bodies) -> R<Work> {
    for (_, does) in &order {
        if let Does::Conditional(node) = does {
            for body in &node.bodies {
                let inner = all_enabled(body.in_pairing_order()?, bodies)?;
                bodies.insert(body.handle, inner);
            }
        }
    }
    let enabled = |(node, does)| (node, does, true);
    Ok(order.into_iter().map(enabled).collect())
}

fn give(all: &[u64], nodes: Out<u64>, count: Out<usize>) -> R<()> {
    if nodes.is_null() {
        return count.set(all.len());
    }
    let room = count.get()?;
    for at in 0..room {
        nodes.at(at).put(all.get(at).copied().unwrap_or(0));
    }
    count.set(room.min(all.len()))
}

fn give_edges(of: u64, from: Out<u64>, to: Out<u64>, count: Out<usize>) -> R<()> {
    let edges = graph(of)?.edges()?;
    if from.is_null() != to.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let (sources, targets): (Vec<u64>, Vec<u64>) = edges.into_iter().unzip();
    if !from.is_null() {
        let room = count.get()?;
        give(&sources, from, count)?;
        count.set(room)?;
    }
    give(&targets, to, count)
}

fn dependents(of: u64) -> R<Vec<u64>> {
    let graph = graph(node(of)?.lock().graph)?;
    let edges = graph.edges()?;
    Ok(edges
        .iter()
        .filter(|(from, _)| *from == of)
        .map(|(_, to)| *to)
        .collect())
}

fn depend(of: u64, from: In<u64>, to: In<u64>, count: usize, remove: bool) -> R<()> {
    let graph = graph(of)?;
    for (from, to) in from.list(count)?.into_iter().zip(to.list(count)?) {
        let (source, target) = (node(from)?, node(to)?);
        let inside = [&source, &target].map(|node| node.lock().graph == graph.handle);
        if from == to || inside != [true; 2] {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut target = target.lock();
        let known = target.before.contains(&from);
        if known != remove {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if remove {
            target.before.retain(|other| *other != from);
        } else {
            target.before.push(from);
        }
    }
    Ok(())
}

fn kernel_params(of: u64) -> R<CUDA_KERNEL_NODE_PARAMS> {
    let node = node(of)?;
    let node = node.lock();
    let Does::Kernel(function, launch) = &node.does else {
        return Err(CUDA_ERROR_INVALID_VALUE);
    };
    let kept = Box::new((launch.packed().to_vec(), Vec::new()));
    let base = kept.0.as_ptr() as u64;
    let pointers = launch.offsets().map(|at| base + u64::from(at)).collect();
    let mut kept = kept;
    kept.1 = pointers;
    let shape = launch.shape();
    let params = CUDA_KERNEL_NODE_PARAMS {
        function: *function,
        grid: shape.grid,
        block: shape.block,
        shared: shape.shared,
        params: kept.1.as_ptr() as u64,
        ..CUDA_KERNEL_NODE_PARAMS::default()
    };
    keep(kept);
    Ok(params)
}

/// Looks at the attributes of a kernel's node.
pub fn with_attributes<T>(of: u64, look: impl FnOnce(&mut Attributes) -> T) -> R<T> {
    let node = node(of)?;
    let mut node = node.lock();
    match node.does {
        Does::Kernel(..) => Ok(look(&mut node.attributes)),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn of_kind<T>(of: u64, pick: impl FnOnce(&Does) -> Option<T>) -> R<T> {
    pick(&node(of)?.lock().does).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HostParams {
    function: Option<HostFn>,
    data: u64,
}

fn host_params(params: In<[u64; 2]>) -> R<CUgraphNodeParams> {
    Ok(around(CU_GRAPH_NODE_TYPE_HOST, 0, &params.get(0)?))
}

fn batch_params(params: In<CUDA_BATCH_MEM_OP_NODE_PARAMS>) -> R<CUgraphNodeParams> {
    Ok(around(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, 0, &params.get(0)?))
}

fn event_params(kind: u32, event: u64) -> CUgraphNodeParams {
    around(kind, 0, &event)
}

fn child_params(graph: u64) -> CUgraphNodeParams {
    around(CU_GRAPH_NODE_TYPE_GRAPH, 0, &graph)
}

fn kernel_v1(params: In<[u64; 7]>) -> R<CUgraphNodeParams> {
    Ok(around(CU_GRAPH_NODE_TYPE_KERNEL, 0, &params.get(0)?))
}

fn kernel_v2(params: In<CUDA_KERNEL_NODE_PARAMS>) -> R<CUgraphNodeParams> {
    Ok(around(CU_GRAPH_NODE_TYPE_KERNEL, 0, &params.get(0)?))
}

fn memset_params(params: In<CUDA_MEMSET_NODE_PARAMS>) -> R<CUgraphNodeParams> {
    Ok(around(CU_GRAPH_NODE_TYPE_MEMSET, 0, &params.get(0)?))
}

fn enabled(exec_: u64, of: u64, change: impl FnOnce(&mut bool)) -> R<()> {
    let exec = exec(exec_)?;
    let (mut work, mut bodies) = (exec.work.lock(), exec.bodies.lock());
    let (_, does, on) = find(&mut work, &mut bodies, of)?;
    if !matches!(does, Does::Kernel(..) | Does::Copy(_) | Does::Set(_)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    change(on);
    Ok(())
}

fn launch(exec_: u64, stream: CUstream, own: bool) -> R<()> {
    let exec = exec(exec_)?;
    let (context, stream) = resolve(stream, own)?;
    refuse(&stream)?;
    let work = flattened(&exec.work.lock())?;
    for (at, (_, does, on)) in work.iter().enumerate() {
        let claimed = if *on {
            does.claim(stream.handle)
        } else {
            Ok(())
        };
        if claimed.is_err() {
            // Nothing was launched.
            for (_, before, _) in &work[..at] {
                if let Does::Allocate(memory) = before {
                    let _ = memory.free();
                }
            }
            return claimed;
        }
    }
    let bodies = exec.bodies.lock().clone();
    let values = Arc::clone(&exec.values);
    let records = Records::of(&work);
    let has_loops = { work.iter() }.any(|(_, does, _)| matches!(does, Does::Conditional(_)));
    stream.submit(&context, move |context| {
        let _running = has_loops
            .then(|| condition::count(&context.loops))
            .transpose()?;
        values.reset();
        condition::run_with(&values, || {
            for (node, record) in work.iter().zip(&records.0) {
                match record {
                    Some((record, true)) => record.reach(),
                    Some((record, false)) => record.wait(),
                    None => run_nodes(std::slice::from_ref(node), &bodies, &values, context)?,
                }
            }
            Ok(())
        })
    });
    Ok(())
}

/// The record of each event node of a launch, and whether the node makes it. All are made in the end, also if the launch is
/// dropped.
struct Records(Vec<Option<(Arc<event::Record>, bool)>>);

impl Records {
    fn of(work: &Work) -> Records {
        let record = |does: &Does| match does {
            // An event that was never recorded is not waited for.
            Does::Wait(event) => Some((event::latest(*event).unwrap_or_else(event::made), false)),
            Does::Record(event) => Some((event::begun(*event)?, true)),
            _ => None,
        };
        Records(work.iter().map(|(_, does, _)| record(does)).collect())
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        let made = self.0.iter().flatten().filter(|(_, makes)| *makes);
        made.for_each(|(record, _)| record.reach());
    }
}

fn run_nodes(
    work: &[(u64, Does, bool)],
    bodies: &Bodies,
    values: &Values,
    context: &Context,
) -> R<()> {
    for (_, does, on) in work {
        match does {
            Does::Conditional(node) => run_bodies(node, bodies, values, context)?,
            does if *on => does.run(context)?,
            _ => {}
        }
    }
    Ok(())
}

fn run_bodies(node: &Conditional, bodies: &Bodies, values: &Values, context: &Context) -> R<()> {
    let run = |at: usize| -> R<()> {
        match node
            .bodies
            .get(at)
            .and_then(|body| bodies.get(&body.handle))
        {
            Some(body) => run_nodes(body, bodies, values, context),
            None => Ok(()),
        }
    };
    let value = values.get(node.handle);
    match node.kind {
        condition::WHILE => {
            // A lost context ends a loop that does not end.
            while values.get(node.handle) != 0 && context.status() == 0 {
                run(0)?;
            }
            Ok(())
        }
        condition::SWITCH => run(value as usize),
        _ => run(usize::from(value == 0)),
    }
}

api! { TABLE;
    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        thread_local! { static MODE: std::cell::Cell<u32> = const { std::cell::Cell::new(0) }; }
        mode.set(MODE.replace(mode.get()?))
    }
    fn cuGraphCreate(out: Out<u64>, flags: u32) {
        if flags != 0 || out.is_null() { return Err(CUDA_ERROR_INVALID_VALUE); }
        out.set(Graph::new().handle)
    }
    fn cuGraphDestroy(of: u64) {
        let graph = graph(of)?;
        if graph.filling.load(Ordering::Relaxed) { return Err(CUDA_ERROR_ILLEGAL_STATE); }
        if graph.owned.load(Ordering::Relaxed) { return Err(CUDA_ERROR_INVALID_VALUE); }
        graph.destroy();
        Ok(())
    }
    fn cuGraphClone(out: Out<u64>, of: u64) { out.set(graph(of)?.duplicate()?.handle) }
    fn cuGraphNodeFindInClone(out: Out<u64>, of: u64, clone: u64) {
        let nodes = graph(clone)?.nodes.lock().clone();
        let found = nodes.into_iter().find(|twin| node(*twin).is_ok_and(|n| n.lock().original == of));
        out.set(found.ok_or(CUDA_ERROR_INVALID_VALUE)?)
    }
    fn cuGraphGetNodes(of: u64, nodes: Out<u64>, count: Out<usize>) {
        let all = graph(of)?.nodes.lock().clone();
        give(&all, nodes, count)
    }
    fn cuGraphGetRootNodes(of: u64, nodes: Out<u64>, count: Out<usize>) {
        let mut all = graph(of)?.nodes.lock().clone();
        all.retain(|n| node(*n).is_ok_and(|n| n.lock().before.is_empty()));
        give(&all, nodes, count)
    }
    fn cuGraphGetEdges(of: u64, from: Out<u64>, to: Out<u64>, count: Out<usize>) { give_edges(of, from, to, count) }
    fn cuGraphGetEdges_v2(of: u64, from: Out<u64>, to: Out<u64>, data: Out<u64>, count: Out<usize>) {
        if !data.is_null() && !from.is_null() {
            (0..count.get()?).for_each(|at| data.at(at).put(0));
        }
        give_edges(of, from, to, count)
    }
    fn cuGraphNodeGetDependencies(of: u64, nodes: Out<u64>, count: Out<usize>) {
        let before = node(of)?.lock().before.clone();
        give(&before, nodes, count)
    }
    fn cuGraphNodeGetDependencies_v2(of: u64, nodes: Out<u64>, data: Out<u64>, count: Out<usize>) {
        if !data.is_null() && !nodes.is_null() {
            (0..count.get()?).for_each(|at| data.at(at).put(0));
        }
        let before = node(of)?.lock().before.clone();
        give(&before, nodes, count)
    }
    fn cuGraphNodeGetDependentNodes(of: u64, nodes: Out<u64>, count: Out<usize>) { give(&dependents(of)?, nodes, count) }
    fn cuGraphNodeGetDependentNodes_v2(of: u64, nodes: Out<u64>, data: Out<u64>, count: Out<usize>) {
        if !data.is_null() && !nodes.is_null() {
            (0..count.get()?).for_each(|at| data.at(at).put(0));
        }
        give(&dependents(of)?, nodes, count)
    }
    fn cuGraphAddDependencies(of: u64, from: In<u64>, to: In<u64>, count: usize) { depend(of, from, to, count, false) }
    fn cuGraphRemoveDependencies(of: u64, from: In<u64>, to: In<u64>, count: usize) { depend(of, from, to, count, true) }
    fn cuGraphAddDependencies_v2(of: u64, from: In<u64>, to: In<u64>, data: In<u64>, count: usize) {
        if !data.is_null() && data.list(count)?.iter().any(|edge| *edge != 0) { return Err(CUDA_ERROR_INVALID_VALUE); }
        depend(of, from, to, count, false)
    }
    fn cuGraphRemoveDependencies_v2(of: u64, from: In<u64>, to: In<u64>, _data: In<u64>, count: usize) {
        depend(of, from, to, count, true)
    }
    fn cuGraphNodeGetType(of: u64, out: Out<u32>) { out.set(node(of)?.lock().does.kind()) }
    fn cuGraphDestroyNode(of: u64) {
        let graph = graph(node(of)?.lock().graph)?;
        graph.nodes.lock().retain(|other| *other != of);
        for other in dependents(of)? {
            node(other)?.lock().before.retain(|before| *before != of);
        }
        destroy_node(of);
        Ok(())
    }
    fn cuGraphConditionalHandleCreate(out: Out<u64>, of: u64, context: u64, default: u32, flags: u32) {
        let graph = graph(of)?;
        if out.is_null() || context == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.set(graph.conditions.create(default, flags)?)
    }
    fn cuGraphAddNode(out: Out<u64>, to: u64, before: In<u64>, count: usize, params: Out<CUgraphNodeParams>) {
        add_any(out, to, before, count, params)
    }
    fn cuGraphAddNode_v2(out: Out<u64>, to: u64, before: In<u64>, _data: In<u64>, count: usize, params: Out<CUgraphNodeParams>) {
        add_any(out, to, before, count, params)
    }
    fn cuGraphNodeSetParams(of: u64, params: In<CUgraphNodeParams>) { change(of, &params.get(0)?) }
    fn cuGraphExecNodeSetParams(exec: u64, of: u64, params: In<CUgraphNodeParams>) { exec_change(exec, of, &params.get(0)?) }
    fn cuGraphAddKernelNode(out: Out<u64>, to: u64, before: In<u64>, count: usize, params: In<[u64; 7]>) {
        add(out, to, before, count, &kernel_v1(params)?)
    }
    fn cuGraphAddKernelNode_v2(out: Out<u64>, to: u64, before: In<u64>, count: usize, params: In<CUDA_KERNEL_NODE_PARAMS>) {
        add(out, to, before, count, &kernel_v2(params)?)
    }
    fn cuGraphKernelNodeGetParams_v2(of: u64, out: Out<CUDA_KERNEL_NODE_PARAMS>) { out.set(kernel_params(of)?) }
    fn cuGraphKernelNodeSetParams(of: u64, params: In<[u64; 7]>) { change(of, &kernel_v1(params)?) }
    fn cuGraphKernelNodeSetParams_v2(of: u64, params: In<CUDA_KERNEL_NODE_PARAMS>) { change(of, &kernel_v2(params)?) }
    fn cuGraphExecKernelNodeSetParams(exec: u64, of: u64, params: In<[u64; 7]>) { exec_change(exec, of, &kernel_v1(params)?) }
    fn cuGraphExecKernelNodeSetParams_v2(exec: u64, of: u64, params: In<CUDA_KERNEL_NODE_PARAMS>) { exec_change(exec, of, &kernel_v2(params)?) }
    fn cuGraphAddMemcpyNode(out: Out<u64>, to: u64, before: In<u64>, count: usize, params: In<CUDA_MEMCPY3D>, _context: u64) {
        add(out, to, before, count, &around_copy(params.get(0)?))
    }
    fn cuGraphMemcpyNodeGetParams(of: u64, out: Out<CUDA_MEMCPY3D>) {
        out.set(of_kind(of, |does| match does { Does::Copy(copy) => Some(*copy), _ => None })?)
    }
    fn cuGraphMemcpyNodeSetParams(of: u64, params: In<CUDA_MEMCPY3D>) { change(of, &around_copy(params.get(0)?)) }
    fn cuGraphExecMemcpyNodeSetParams(exec: u64, of: u64, params: In<CUDA_MEMCPY3D>, _context: u64) {
        exec_change(exec, of, &around_copy(params.get(0)?))
    }
    fn cuGraphAddMemsetNode(out: Out<u64>, to: u64, before: In<u64>, count: usize, params: In<CUDA_MEMSET_NODE_PARAMS>, _context: u64) {
        add(out, to, before, count, &memset_params(params)?)
    }
    fn cuGraphMemsetNodeGetParams(of: u64, out: Out<CUDA_MEMSET_NODE_PARAMS>) {
        out.set(of_kind(of, |does| match does { Does::Set(set) => Some(*set), _ => None })?)
    }
    fn cuGraphMemsetNodeSetParams(of: u64, params: In<CUDA_MEMSET_NODE_PARAMS>) { change(of, &memset_params(params)?) }
    fn cuGraphExecMemsetNodeSetParams(exec: u64, of: u64, params: In<CUDA_MEMSET_NODE_PARAMS>, _context: u64) {
        exec_change(exec, of, &memset_params(params)?)
    }
    fn cuGraphAddEmptyNode(out: Out<u64>, to: u64, before: In<u64>, count: usize) {
        let params = CUgraphNodeParams { kind: CU_GRAPH_NODE_TYPE_EMPTY, ..CUgraphNodeParams::default() };
        add(out, to, before, count, &params)
    }
    fn cuGraphAddHostNode(out: Out<u64>, to: u64, before: In<u64>, count: usize, params: In<[u64; 2]>) {
        add(out, to, before, count, &host_params(params)?)
    }
    fn cuGraphHostNodeGetParams(of: u64, out: Out<HostParams>) {
        out.set(of_kind(of, |does| match does {
            Does::Host(function, data) => Some(HostParams { function: Some(*function), data: *data }),
            _ => None,
        })?)
    }
    fn cuGraphHostNodeSetParams(of: u64, params: In<[u64; 2]>) { change(of, &host_params(params)?) }
    fn cuGraphExecHostNodeSetParams(exec: u64, of: u64, params: In<[u64; 2]>) { exec_change(exec, of, &host_params(params)?) }
    fn cuGraphAddBatchMemOpNode(out: Out<u64>, to: u64, before: In<u64>, count: usize, params: In<CUDA_BATCH_MEM_OP_NODE_PARAMS>) {
        add(out, to, before, count, &batch_params(params)?)
    }
    fn cuGraphBatchMemOpNodeSetParams(of: u64, params: In<CUDA_BATCH_MEM_OP_NODE_PARAMS>) { change(of, &batch_params(params)?) }
    fn cuGraphExecBatchMemOpNodeSetParams(exec: u64, of: u64, params: In<CUDA_BATCH_MEM_OP_NODE_PARAMS>) {
        exec_change(exec, of, &batch_params(params)?)
    }
    fn cuGraphBatchMemOpNodeGetParams(of: u64, out: Out<CUDA_BATCH_MEM_OP_NODE_PARAMS>) {
        let operations = of_kind(of, |does| match does { Does::Batch(operations) => Some(operations.clone()), _ => None })?;
        let words = operations.iter().flat_map(|o| {
            let flags = u64::from(o.value_flags);
            [u64::from(o.operation) | u64::from(o.flags) << 32, o.address, o.value, flags, o.alias, 0]
        });
        let kept = Box::new((Vec::new(), words.collect::<Vec<u64>>()));
        let params = CUDA_BATCH_MEM_OP_NODE_PARAMS {
            count: operations.len() as u32,
            operations: kept.1.as_ptr() as u64,
            ..CUDA_BATCH_MEM_OP_NODE_PARAMS::default()
        };
        keep(kept);
        out.set(params)
    }
    fn cuGraphAddChildGraphNode(out: Out<u64>, to: u64, before: In<u64>, count: usize, child: u64) {
        add(out, to, before, count, &child_params(child))
    }
    fn cuGraphChildGraphNodeGetGraph(of: u64, out: Out<u64>) {
        out.set(of_kind(of, |does| match does { Does::Child(graph) => Some(graph.handle), _ => None })?)
    }
    fn cuGraphExecChildGraphNodeSetParams(exec: u64, of: u64, child: u64) { exec_change(exec, of, &child_params(child)) }
    fn cuGraphAddEventRecordNode(out: Out<u64>, to: u64, before: In<u64>, count: usize, event: u64) {
        add(out, to, before, count, &event_params(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event))
    }
    fn cuGraphAddEventWaitNode(out: Out<u64>, to: u64, before: In<u64>, count: usize, event: u64) {
        add(out, to, before, count, &event_params(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event))
    }
    fn cuGraphEventRecordNodeGetEvent(of: u64, out: Out<u64>) {
        out.set(of_kind(of, |does| match does { Does::Record(event) => Some(*event), _ => None })?)
    }
    fn cuGraphEventWaitNodeGetEvent(of: u64, out: Out<u64>) {
        out.set(of_kind(of, |does| match does { Does::Wait(event) => Some(*event), _ => None })?)
    }
    fn cuGraphEventRecordNodeSetEvent(of: u64, event: u64) { change(of, &event_params(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event)) }
    fn cuGraphEventWaitNodeSetEvent(of: u64, event: u64) { change(of, &event_params(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event)) }
    fn cuGraphExecEventRecordNodeSetEvent(exec: u64, of: u64, event: u64) {
        exec_change(exec, of, &event_params(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event))
    }
    fn cuGraphExecEventWaitNodeSetEvent(exec: u64, of: u64, event: u64) {
        exec_change(exec, of, &event_params(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event))
    }
    fn cuGraphInstantiate(out: Out<u64>, of: u64, error: Out<u64>, log: Out<u8>, len: usize) {
        error.put(0);
        if len > 0 { log.put(0); }
        instantiate(out, of, 0)
    }
    fn cuGraphInstantiate_v2(out: Out<u64>, of: u64, error: Out<u64>, log: Out<u8>, len: usize) {
        error.put(0);
        if len > 0 { log.put(0); }
        instantiate(out, of, 0)
    }
    fn cuGraphInstantiateWithFlags(out: Out<u64>, of: u64, flags: u64) { instantiate(out, of, flags) }
    fn cuGraphInstantiateWithParams(out: Out<u64>, of: u64, params: Out<CUDA_GRAPH_INSTANTIATE_PARAMS>) {
        let given = params.get()?;
        let made = instantiate(out, of, given.flags);
        params.put(CUDA_GRAPH_INSTANTIATE_PARAMS { error_node: 0, result: u32::from(made.is_err()), ..given });
        made
    }
    fn cuGraphExecDestroy(of: u64) { EXECS.remove(of).map(drop).map_err(|_| CUDA_ERROR_INVALID_VALUE) }
    fn cuGraphExecGetFlags(of: u64, out: Out<u64>) { out.set(exec(of)?.flags) }
    fn cuGraphExecUpdate_v2(of: u64, with: u64, out: Out<CUgraphExecUpdateResultInfo>) {
        let updated = exec_update(of, with)?;
        let (result, error_node) = updated.err().unwrap_or_default();
        out.put(CUgraphExecUpdateResultInfo { result, error_node, ..CUgraphExecUpdateResultInfo::default() });
        updated.map_err(|_| CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
    }
    fn cuGraphExecUpdate(of: u64, with: u64, error: Out<u64>, result: Out<u32>) {
        let updated = exec_update(of, with)?;
        let (why, node) = updated.err().unwrap_or_default();
        error.put(node);
        // What the genuine driver says here of another shape.
        result.put(if why == 2 { 6 } else { why });
        updated.map_err(|_| CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
    }
    fn cuGraphNodeGetEnabled(exec: u64, of: u64, out: Out<u32>) { enabled(exec, of, |on| out.put(u32::from(*on))) }
    fn cuGraphNodeSetEnabled(exec: u64, of: u64, on: u32) { enabled(exec, of, |now| *now = on != 0) }
    fn cuGraphDebugDotPrint(of: u64, path: Text, _flags: u32) {
        let graph = graph(of)?;
        let mut text = String::from("digraph dot {\n");
        for (from, to) in graph.edges()? {
            text.push_str(&format!("\"{from:#x}\" -> \"{to:#x}\"\n"));
        }
        text.push_str("}\n");
        std::fs::write(path.get()?, text).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)
    }
}

api_streams! { TABLE_STREAMS;
    fn cuStreamBeginCapture / cuStreamBeginCapture_ptsz [own] (stream: CUstream) { begin(stream, own, 0, None) }
    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz [own] (stream: CUstream, mode: u32) { begin(stream, own, mode, None) }
    fn cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz [own]
            (stream: CUstream, to: u64, nodes: In<u64>, _data: In<u64>, count: usize, mode: u32) {
        begin(stream, own, mode, Some((graph(to)?, nodes.list(count)?)))
    }
    fn cuStreamEndCapture / cuStreamEndCapture_ptsz [own] (stream: CUstream, out: Out<u64>) {
        let ended = end(stream, own);
        out.put(*ended.as_ref().unwrap_or(&0));
        ended.map(drop)
    }
    fn cuStreamIsCapturing / cuStreamIsCapturing_ptsz [own] (stream: CUstream, out: Out<u32>) { out.set(info(stream, own)?.status) }
    fn cuStreamGetCaptureInfo / cuStreamGetCaptureInfo_ptsz [own] (stream: CUstream, status: Out<u32>, id: Out<u64>) {
        let info = info(stream, own)?;
        id.put(info.id);
        status.set(info.status)
    }
    fn cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz [own]
            (stream: CUstream, status: Out<u32>, id: Out<u64>, graph: Out<u64>, nodes: Out<u64>, count: Out<usize>) {
        let info = info(stream, own)?;
        id.put(info.id);
        graph.put(info.graph);
        nodes.put(info.nodes);
        count.put(info.count);
        status.set(info.status)
    }
    fn cuStreamGetCaptureInfo_v3 / cuStreamGetCaptureInfo_v3_ptsz [own]
            (stream: CUstream, status: Out<u32>, id: Out<u64>, graph: Out<u64>, nodes: Out<u64>, edges: Out<u64>, count: Out<usize>) {
        let info = info(stream, own)?;
        id.put(info.id);
        graph.put(info.graph);
        nodes.put(info.nodes);
        edges.put(info.edges);
        count.put(info.count);
        status.set(info.status)
    }
    fn cuStreamUpdateCaptureDependencies / cuStreamUpdateCaptureDependencies_ptsz [own]
            (stream: CUstream, nodes: In<u64>, count: usize, flags: u32) {
        update_capture(stream, own, &nodes.list(count)?, flags)
    }
    fn cuStreamUpdateCaptureDependencies_v2 / cuStreamUpdateCaptureDependencies_v2_ptsz [own]
            (stream: CUstream, nodes: In<u64>, _data: In<u64>, count: usize, flags: u32) {
        update_capture(stream, own, &nodes.list(count)?, flags)
    }
    fn cuGraphLaunch / cuGraphLaunch_ptsz [own] (exec: u64, stream: CUstream) { launch(exec, stream, own) }
    fn cuGraphUpload / cuGraphUpload_ptsz [own] (of: u64, stream: CUstream) {
        exec(of)?;
        let (context, stream) = stream::resolve(stream, own)?;
        refuse(&stream)?;
        context.waits_its_turn();
        Ok(())
    }
}
