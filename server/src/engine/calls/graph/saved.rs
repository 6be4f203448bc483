//! Saves the graphs and instances of a session in its description while it is at rest, and restores them in another
//! server.
//!
//! The contents of a graph are read from the driver, so they do not depend on how the graph was built. The driver does
//! not reveal the contents of an instance: they are derived from the graph at the time of its instantiation, and from
//! later changes of the instance.

use crate::engine::base::bounds;
use crate::engine::base::call_error::CallError;
use crate::engine::base::description::Record;
use crate::engine::base::graph_templates::{
    Attributes, Node, SavedExec, SavedGraph, Source, Template,
};
use crate::engine::base::kinds::Kind;
use crate::engine::calls::capture::all_nodes;
use crate::engine::calls::graph::described::Described;
use crate::engine::calls::graph::exec::flags_in_level;
use crate::engine::calls::graph::node::{describe_node, note_described, part_current};
use crate::engine::calls::graph::shown::node_as_seen;
use crate::engine::lasting::{Lasting, Lost, Making};
use crate::engine::objects::graphs::{Exec, Origin, Owner, Read};
use crate::engine::objects::pace::Length;
use crate::engine::objects::snapshot::{has_address, keeps_its_address};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::graph::KernelNode;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ptr;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Attributes that a kernel node can have.
const ATTRIBUTES: [u32; 10] = [
    CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
    CU_LAUNCH_ATTRIBUTE_PRIORITY,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
    CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
    CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING,
];

/// Only affects when the upload happens, and only `cuGraphInstantiateWithParams` accepts it.
const CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD: u64 = 2;

/// Why a graph cannot be saved.
type Unsaved = &'static str;

/// Lookup tables for reading graphs.
struct Reader {
    functions: HashMap<CUfunction, u64>,
    /// Ranges of the session's variables, which have other addresses in another server.
    variables: Vec<(u64, u64)>,
}

fn refused(shared: &Shared) -> impl Fn(CUresult) -> Unsaved + '_ {
    |status| {
        shared.gpu.note_status(status);
        "the driver does not say what is in it"
    }
}

/// Whether a node's parameters may contain an address of memory that moves between servers. If not, the ranges of
/// variables are not needed.
fn may_have_address(does: &[u8]) -> bool {
    let words = does.as_chunks::<8>().0.iter();
    let mut words = words.map(|word| u64::from_le_bytes(*word));
    // No device has memory in the first 4 GiB.
    words.any(|word| word >> 32 != 0 && !keeps_its_address(word))
}

/// The dependencies of a node, in the driver's order.
fn dependencies_of(
    shared: &Shared,
    node: CUgraphNode,
) -> Result<Vec<(CUgraphNode, [u8; 8])>, CUresult> {
    let (driver, mut count) = (&shared.gpu.driver.graph, 0);
    driver.dependencies(node, ptr::null_mut(), ptr::null_mut(), &mut count)?;
    let mut nodes = vec![CUgraphNode::NULL; count];
    let mut edges = vec![CUgraphEdgeData::default(); count];
    if count > 0 {
        driver.dependencies(node, nodes.as_mut_ptr(), edges.as_mut_ptr(), &mut count)?;
    }
    let both = nodes.into_iter().zip(edges).take(count);
    let with_bytes = both.map(|(node, edge)| {
        let mut data = [0; 8];
        data.copy_from_slice(edge.as_bytes());
        (node, data)
    });
    Ok(with_bytes.collect())
}

/// The values of a kernel node's attributes.
fn attributes_of(shared: &Shared, node: CUgraphNode) -> Attributes {
    let driver = &shared.gpu.driver.graph;
    let value_of = |id: u32| {
        let mut value = [0; 8];
        // An attribute that this driver does not know is left out.
        driver.kernel_attribute_get(node, id, &mut value).ok()?;
        let bytes = value.as_bytes();
        let len = bytes.iter().rposition(|byte| *byte != 0)? + 1;
        Some((id, bytes[..len].to_vec()))
    };
    ATTRIBUTES.into_iter().filter_map(value_of).collect()
}

/// Sets the attributes of a kernel node.
fn set_attributes(
    shared: &Shared,
    node: CUgraphNode,
    attributes: &Attributes,
) -> Result<(), CUresult> {
    let now = attributes_of(shared, node);
    for id in ATTRIBUTES {
        let wanted = attributes.get(&id);
        if wanted != now.get(&id) {
            let mut value = [0; 8];
            let bytes = wanted.map_or(&[][..], Vec::as_slice);
            let room = value.as_mut_bytes().get_mut(..bytes.len());
            room.ok_or(CUDA_ERROR_INVALID_VALUE)?.copy_from_slice(bytes);
            shared
                .gpu
                .driver
                .graph
                .kernel_attribute_set(node, id, &value)?;
        }
    }
    Ok(())
}

fn reader_of(session: &Session) -> Reader {
    let functions = session.objects.functions.iter_with_handles();
    Reader {
        functions: functions.map(|(handle, one)| (one.raw, handle)).collect(),
        variables: session.ranges(),
    }
}

/// The contents of a client's graph, which are read once after each change.
fn read_graph(
    session: &mut Session,
    shared: &Shared,
    handle: u64,
    reader: &mut Option<Reader>,
) -> Result<Arc<Read>, Unsaved> {
    const GONE: Unsaved = "it is gone";
    let graph = session
        .objects
        .graphs
        .graphs
        .get(handle)
        .map_err(|_| GONE)?;
    if let Some(read) = &graph.read {
        return Ok(Arc::clone(read));
    }
    let (raw, device) = (graph.raw, graph.device);
    let current = shared.gpu.devices[device].make_current(&shared.gpu.driver);
    current.map_err(refused(shared))?;
    let sinks = graph.sinks.clone();
    let reader = reader.get_or_insert_with(|| reader_of(session));
    let (mut template, nodes) = read_contents(session, shared, raw, device.into(), reader, 0)?;
    let places: HashMap<CUgraphNode, u32> = nodes.into_iter().zip(0..).collect();
    let sinks = sinks.iter().filter_map(|node| places.get(node).copied());
    template.sinks = sinks.collect();
    let read = Arc::new(Read { template, places });
    let graph = session
        .objects
        .graphs
        .graphs
        .get_mut(handle)
        .map_err(|_| GONE)?;
    graph.read = Some(Arc::clone(&read));
    Ok(read)
}

/// Reads the contents of a driver's graph. Also returns its nodes.
fn read_contents(
    session: &mut Session,
    shared: &Shared,
    graph: CUgraph,
    device: u32,
    reader: &Reader,
    depth: usize,
) -> Result<(Template, Vec<CUgraphNode>), Unsaved> {
    if depth > bounds::GRAPH_DEPTH {
        return Err("it is too deep");
    }
    let nodes = all_nodes(shared, graph).map_err(refused(shared))?;
    let places: HashMap<CUgraphNode, u32> = nodes.iter().copied().zip(0..).collect();
    let mut template = Template::default();
    // A larger graph could not be saved.
    let mut room = bounds::SAVED_GRAPHS;
    for node in &nodes {
        let mut read = read_node(session, shared, *node, device, reader, depth)?;
        let dependencies = dependencies_of(shared, *node).map_err(refused(shared))?;
        for (on, data) in dependencies {
            let on = places.get(&on).ok_or("an edge leads out of it")?;
            read.dependencies.push((*on, data));
        }
        let bytes = 1 + read.does.len() + read.dependencies.len() * size_of::<CUgraphEdgeData>();
        room = room.checked_sub(bytes).ok_or("it is too large")?;
        template.nodes.push(read);
    }
    Ok((template, nodes))
}

fn read_node(
    session: &mut Session,
    shared: &Shared,
    node: CUgraphNode,
    device: u32,
    reader: &Reader,
    depth: usize,
) -> Result<Node, Unsaved> {
    let driver = &shared.gpu.driver.graph;
    let mut kind = 0;
    driver.node_kind(node, &mut kind).map_err(refused(shared))?;
    let mut read = Node {
        kind,
        device,
        does: Vec::new(),
        attributes: Attributes::default(),
        dependencies: Vec::new(),
        inside: None,
    };
    match kind {
        CU_GRAPH_NODE_TYPE_GRAPH => {
            let mut inner = CUgraph::NULL;
            driver
                .child_get(node, &mut inner)
                .map_err(refused(shared))?;
            if session.objects.graphs.has_graph(inner) {
                return Err("the client knows a graph in a node of it");
            }
            let (inside, _) = read_contents(session, shared, inner, device, reader, depth + 1)?;
            read.inside = Some(Box::new(inside));
        }
        CU_GRAPH_NODE_TYPE_KERNEL
        | CU_GRAPH_NODE_TYPE_MEMCPY
        | CU_GRAPH_NODE_TYPE_MEMSET
        | CU_GRAPH_NODE_TYPE_EMPTY
        | CU_GRAPH_NODE_TYPE_WAIT_EVENT
        | CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
            let known = |raw: CUfunction| reader.functions.get(&raw).copied();
            let does = node_as_seen(session, shared, node, kind, &known);
            read.does = does.map_err(refused(shared))?;
            note_variables(session, &mut read.does, &reader.variables, true)?;
            can_be_made_again(session, shared, &read)?;
            if kind == CU_GRAPH_NODE_TYPE_KERNEL {
                read.attributes = attributes_of(shared, node);
            }
        }
        _ => return Err("it has a node that cannot be made again"),
    }
    Ok(read)
}

/// Checks that another server would accept a node and give it the same effect.
fn can_be_made_again(session: &mut Session, shared: &Shared, node: &Node) -> Result<(), Unsaved> {
    if node.kind == CU_GRAPH_NODE_TYPE_KERNEL {
        let kernel = KernelNode::read_from_prefix(&node.does);
        if !kernel.is_ok_and(|(kernel, _)| kernel.function != 0) {
            return Err("it has a kernel that the client knows no more");
        }
    }
    let described = describe_template_node(session, shared, node);
    described.map(drop).map_err(|_| "it refers to what is gone")
}

/// Notes the variables whose addresses a node contains, because a launch may write them, and replaces the addresses
/// by the addresses known to the client. `is_raw`: the node contains the driver's addresses.
///
/// # Errors
/// If the node contains an address near a variable that the client does not know: it has another address in another
/// server.
fn note_variables(
    session: &mut Session,
    does: &mut [u8],
    variables: &[(u64, u64)],
    is_raw: bool,
) -> Result<(), Unsaved> {
    for bytes in does.as_chunks_mut::<8>().0 {
        let word = u64::from_le_bytes(*bytes);
        let place = match is_raw {
            true => word,
            false => session.lasting.place_of(word),
        };
        let below = session.objects.globals.range(..=place).next_back();
        match below.filter(|(start, global)| place - **start < global.len) {
            Some((start, _)) => {
                session.objects.graphs.note_named(*start);
                *bytes = session.lasting.known_as(place).to_le_bytes();
            }
            None if may_have_address(bytes) && has_address(bytes, variables) => {
                return Err("it has an address near a variable");
            }
            None => {}
        }
    }
    Ok(())
}

/// Translates a saved node to the driver's form, and notes the variables whose addresses it contains.
fn realise_node(
    session: &mut Session,
    shared: &Shared,
    node: &Node,
) -> Result<Described, CallError> {
    // Cannot fail: the addresses were checked when the graph was saved.
    let _ = note_variables(session, &mut node.does.clone(), &[], false);
    describe_template_node(session, shared, node)
}

fn describe_template_node(
    session: &mut Session,
    shared: &Shared,
    node: &Node,
) -> Result<Described, CallError> {
    let device = shared.gpu.device(node.device)?;
    let context = device.context().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    let on = (device.ordinal, context);
    describe_node(session, shared, on, (node.kind, None), &node.does)
}

/// Contents of a new instance of a graph: those of the graph at present. `None` if they cannot be saved.
pub fn origin(session: &mut Session, shared: &Shared, graph: u64) -> Option<Origin> {
    // The contents would not be used.
    if !session.lasting.kept || session.objects.graphs.may_not_be_saved().is_some() {
        session.objects.graphs.note_unread();
        return None;
    }
    match read_graph(session, shared, graph, &mut None) {
        Ok(read) => Some(Origin {
            read,
            graph,
            changed: BTreeMap::new(),
            disabled: BTreeSet::new(),
        }),
        Err(why) => {
            tracing::debug!(why, "a graph cannot be made again elsewhere");
            session.objects.graphs.note_unread();
            None
        }
    }
}

/// Notes that a node of an instance has been changed.
pub fn note_exec_node(
    session: &mut Session,
    shared: &Shared,
    exec: u64,
    (node, kind, device): (CUgraphNode, u32, u32),
    does: &[u8],
) {
    let found = match kind {
        CU_GRAPH_NODE_TYPE_KERNEL
        | CU_GRAPH_NODE_TYPE_MEMCPY
        | CU_GRAPH_NODE_TYPE_MEMSET
        | CU_GRAPH_NODE_TYPE_WAIT_EVENT
        | CU_GRAPH_NODE_TYPE_EVENT_RECORD => {
            let mut node = Node {
                kind,
                device,
                does: does.to_vec(),
                attributes: Attributes::default(),
                dependencies: Vec::new(),
                inside: None,
            };
            let variables = match may_have_address(&node.does) {
                true => session.ranges(),
                false => Vec::new(),
            };
            let can = note_variables(session, &mut node.does, &variables, false)
                .and_then(|()| can_be_made_again(session, shared, &node));
            can.ok().map(|()| node.does)
        }
        _ => None,
    };
    if found.is_none() {
        session.objects.graphs.note_unread();
    }
    session.objects.graphs.touch_exec(exec, |origin| {
        let place = *origin.read.places.get(&node)?;
        origin.changed.insert(place, found?);
        Some(())
    });
}

/// Saves the graphs and instances that have changed. The session must be at rest.
pub fn save_graphs(session: &mut Session, shared: &Shared) {
    let outcome = write_graphs(session, shared);
    session.objects.graphs.note_saved(outcome.is_ok());
    let number = session.shared.info.session;
    match outcome {
        Ok(bytes) => tracing::debug!(session = number, bytes, "graphs: saved"),
        Err(why) => {
            tracing::debug!(session = number, why, "graphs: not saved");
            session.objects.graphs.note_unread();
        }
    }
}

/// Returns the number of bytes written, or why not all graphs could be saved.
fn write_graphs(session: &mut Session, shared: &Shared) -> Result<usize, Unsaved> {
    if let Some(why) = session.objects.graphs.may_not_be_saved() {
        return Err(why);
    }
    let mut reader = None;
    let mut written = 0;
    for handle in session.objects.graphs.graphs.handles() {
        let Ok(graph) = session.objects.graphs.graphs.get(handle) else {
            continue;
        };
        if graph.owner != Owner::Client {
            return Err("the client knows a graph in a node of another");
        }
        if graph.written {
            continue;
        }
        let read = read_graph(session, shared, handle, &mut reader)?;
        let Ok(graph) = session.objects.graphs.graphs.get(handle) else {
            continue;
        };
        let known = graph.nodes().filter_map(|node| {
            let own = session.objects.graphs.nodes.get(node).ok()?;
            Some((*read.places.get(&own.raw)?, node, own.parts))
        });
        let saved = SavedGraph {
            device: graph.device.into(),
            parts: graph.size.parts,
            height: graph.size.height,
            template: read.template.clone(),
            handles: known.collect(),
        };
        written += append_saved::<Graph>(session, handle, &saved)?;
        if let Ok(graph) = session.objects.graphs.graphs.get_mut(handle) {
            graph.written = true;
        }
    }
    for handle in session.objects.graphs.execs.handles() {
        let Ok(exec) = session.objects.graphs.execs.get(handle) else {
            continue;
        };
        let origin = exec.origin.as_ref();
        let origin = origin.ok_or("what an instance does is not known")?;
        let from = match session.objects.graphs.graphs.get(origin.graph) {
            Ok(graph) => {
                let same = graph.read.as_ref();
                let same = same.is_some_and(|read| read.template == origin.read.template);
                if !same {
                    return Err("a graph has changed since an instance was made of it");
                }
                Source::Graph(origin.graph)
            }
            Err(_) => Source::Template(origin.read.template.clone()),
        };
        if exec.written {
            continue;
        }
        let saved = SavedExec {
            device: exec.device.into(),
            flags: exec.flags,
            parts: exec.parts,
            prints: exec.prints,
            from,
            changed: origin.changed.clone(),
            disabled: origin.disabled.clone(),
        };
        written += append_saved::<GraphExec>(session, handle, &saved)?;
        if let Ok(exec) = session.objects.graphs.execs.get_mut(handle) {
            exec.written = true;
        }
    }
    Ok(written)
}

fn append_saved<K: Lasting>(
    session: &mut Session,
    key: u64,
    state: &K::State,
) -> Result<usize, Unsaved> {
    let record = Record::of(K::KIND, 0, key, state);
    let len = record.bytes.len();
    let others = session.objects.graphs.bytes_but(key);
    if others + len > bounds::SAVED_GRAPHS {
        return Err("they are too large");
    }
    if !session.shared.description.append(&record) {
        return Err("there is no room for them");
    }
    session.objects.graphs.note_bytes(key, len);
    Ok(len)
}

/// Restores a graph of the previous server from its record.
///
/// # Errors
/// Driver errors; `CUDA_ERROR_INVALID_VALUE` for an incomplete record.
fn restore_graph(
    session: &mut Session,
    shared: &Shared,
    record: &Record,
    saved: SavedGraph,
) -> Result<(), CallError> {
    let device = shared.gpu.device(saved.device)?.ordinal;
    let (raw, nodes) = build(session, shared, &saved.template, saved.device)?;
    let size = saved.size();
    let places = nodes.iter().copied().zip(0..).collect();
    let read = Arc::new(Read {
        template: saved.template,
        places,
    });
    let known = saved.handles.iter().filter_map(|(place, handle, parts)| {
        let raw = nodes.get(*place as usize)?;
        Some((*handle, *raw, *parts))
    });
    let sinks = read.template.sinks.iter();
    let sinks = sinks.filter_map(|sink| nodes.get(*sink as usize).copied());
    let sinks = sinks.collect();
    let graphs = &mut session.objects.graphs;
    let restored = graphs.restore_graph((record.key, raw), (device, size), read, sinks, known);
    graphs.note_bytes(record.key, record.bytes.len());
    Ok(restored?)
}

/// Restores an instance of a graph from its record.
///
/// # Errors
/// Driver errors; `CUDA_ERROR_INVALID_VALUE` for an incomplete record.
fn restore_exec(
    session: &mut Session,
    shared: &Shared,
    record: &Record,
    saved: SavedExec,
) -> Result<(), CallError> {
    let driver = &shared.gpu.driver.graph;
    let device = shared.gpu.device(saved.device)?.ordinal;
    // A graph that has been destroyed is built only for the instantiation.
    let (graph, raw, read) = match saved.from {
        Source::Graph(handle) => {
            let graph = session.objects.graphs.graphs.get(handle)?;
            let read = graph.read.clone().ok_or(CUDA_ERROR_INVALID_VALUE)?;
            (handle, graph.raw, read)
        }
        Source::Template(template) => {
            let (raw, nodes) = build(session, shared, &template, saved.device)?;
            let places = nodes.into_iter().zip(0..).collect();
            (0, raw, Arc::new(Read { template, places }))
        }
    };
    shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
    let origin = Origin {
        read,
        graph,
        changed: saved.changed,
        disabled: saved.disabled,
    };
    let mut made = CUgraphExec::NULL;
    let flags = flags_in_level(session, saved.flags, device) & !CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    let instantiated = driver
        .instantiate(&mut made, raw, flags)
        .map_err(CallError::from)
        .and_then(|()| change_exec(session, shared, made, &origin));
    let fill = super::exec::fill_of(shared, raw, device);
    if graph == 0 {
        let _ = driver.destroy(raw);
    }
    instantiated?;
    session.objects.graphs.hold(saved.parts)?;
    let exec = Exec {
        raw: made,
        device,
        prints: saved.prints,
        length: Length::Unknown,
        fill,
        parts: saved.parts,
        slots: Vec::new(),
        flags: saved.flags,
        origin: Some(origin),
        written: true,
    };
    session.objects.graphs.execs.restore(record.key, exec)?;
    session
        .objects
        .graphs
        .note_bytes(record.key, record.bytes.len());
    Ok(())
}

/// Applies the recorded changes of an instance to its replacement.
fn change_exec(
    session: &mut Session,
    shared: &Shared,
    exec: CUgraphExec,
    origin: &Origin,
) -> Result<(), CallError> {
    let places = origin.read.places.iter();
    let nodes: HashMap<u32, CUgraphNode> = places.map(|(raw, place)| (*place, *raw)).collect();
    let node_at = |place: &u32| nodes.get(place).copied().ok_or(CUDA_ERROR_INVALID_VALUE);
    for (place, does) in &origin.changed {
        let raw = node_at(place)?;
        let before = origin.read.template.nodes.get(*place as usize);
        let node = Node {
            does: does.clone(),
            ..before.cloned().ok_or(CUDA_ERROR_INVALID_VALUE)?
        };
        let mut described = realise_node(session, shared, &node)?;
        part_current(session, shared, node.kind, node.device)?;
        let driver = &shared.gpu.driver.graph;
        driver.exec_node_set(exec, raw, &mut described.params)?;
        note_described(session, &described, 0);
    }
    for place in &origin.disabled {
        let raw = node_at(place)?;
        shared.gpu.driver.graph.set_enabled(exec, raw, 0)?;
    }
    Ok(())
}

/// Builds a driver's graph from a template. Also returns its nodes.
fn build(
    session: &mut Session,
    shared: &Shared,
    template: &Template,
    device: u32,
) -> Result<(CUgraph, Vec<CUgraphNode>), CallError> {
    let driver = &shared.gpu.driver.graph;
    shared
        .gpu
        .device(device)?
        .make_current(&shared.gpu.driver)?;
    let mut graph = CUgraph::NULL;
    driver.create(&mut graph, 0)?;
    match fill(session, shared, graph, template) {
        Ok(nodes) => Ok((graph, nodes)),
        Err(error) => {
            let _ = driver.destroy(graph);
            Err(error)
        }
    }
}

fn fill(
    session: &mut Session,
    shared: &Shared,
    graph: CUgraph,
    template: &Template,
) -> Result<Vec<CUgraphNode>, CallError> {
    let driver = &shared.gpu.driver.graph;
    let mut nodes = vec![CUgraphNode::NULL; template.nodes.len()];
    let order = template.order();
    if order.len() != nodes.len() {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    for at in order {
        let node = template.nodes.get(at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let (mut behind, mut edges) = (Vec::new(), Vec::new());
        for (on, data) in &node.dependencies {
            let on = nodes.get(*on as usize).copied();
            behind.push(on.ok_or(CUDA_ERROR_INVALID_VALUE)?);
            let edge = CUgraphEdgeData::read_from_bytes(data);
            edges.push(edge.map_err(|_| CUDA_ERROR_INVALID_VALUE)?);
        }
        let mut inner = CUgraph::NULL;
        let mut described = match &node.inside {
            None => realise_node(session, shared, node)?,
            Some(inside) => {
                (inner, _) = build(session, shared, inside, node.device)?;
                Described::child(inner)
            }
        };
        let part = part_current(session, shared, node.kind, node.device);
        let mut raw = CUgraphNode::NULL;
        let params = &mut described.params;
        let lists = (behind.as_ptr(), edges.as_ptr());
        let added = part.and_then(|()| {
            driver.add_node(&mut raw, graph, lists.0, lists.1, behind.len(), params)
        });
        if !inner.is_null() {
            // The node contains a copy.
            let _ = driver.destroy(inner);
        }
        added?;
        if node.kind == CU_GRAPH_NODE_TYPE_KERNEL {
            set_attributes(shared, raw, &node.attributes)?;
        }
        note_described(session, &described, 0);
        nodes[at] = raw;
    }
    Ok(nodes)
}

/// State of a graph.
pub struct Graph;

impl Lasting for Graph {
    const KIND: Kind = Kind::Graph;
    type State = SavedGraph;

    fn make(
        record: &Record,
        saved: SavedGraph,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let restored = restore_graph(session, making.shared, record, saved);
        restored.map_err(|error| format!("a graph at {:#x}: {error}", record.key))
    }
}

/// State of an instance of a graph.
pub struct GraphExec;

impl Lasting for GraphExec {
    const KIND: Kind = Kind::GraphExec;
    type State = SavedExec;

    fn make(
        record: &Record,
        saved: SavedExec,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let restored = restore_exec(session, making.shared, record, saved);
        restored.map_err(|error| format!("an instance of a graph at {:#x}: {error}", record.key))
    }
}
