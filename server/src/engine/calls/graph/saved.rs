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
    Attributes, Condition, Node, SavedBody, SavedExec, SavedGraph, Size, Source, Template,
};
use crate::engine::base::kinds::Kind;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::capture::all_nodes;
use crate::engine::calls::graph::described::{Described, out_of_words};
use crate::engine::calls::graph::drop_kept;
use crate::engine::calls::graph::exec::flags_in_level;
use crate::engine::calls::graph::node::{
    bodies_of, describe_conditional, describe_node, note_described, part_current,
};
use crate::engine::calls::graph::shown::{
    give_slots, host_operations, host_token, node_as_seen, operations_as_seen,
};
use crate::engine::calls::sharing::device_at;
use crate::engine::lasting::{Lasting, Lost, Making};
use crate::engine::objects::graphs::{
    Conditional, Exec, Origin, Owner, Read, Restored, RestoredNode,
};
use crate::engine::objects::pace::Length;
use crate::engine::objects::snapshot::{Neighbourhood, keeps_its_address};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::graph::{HostNode, KernelNode};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_int;
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
    /// The session's variables, which have other addresses in another server.
    variables: Neighbourhood,
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
        variables: Neighbourhood::of(session.ranges()),
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
    if session.objects.graphs.is_body(handle) {
        return Err("it is the body of a conditional node");
    }
    let (raw, device) = (graph.raw, graph.device);
    let current = shared.gpu.devices[device].make_current(&shared.gpu.driver);
    current.map_err(refused(shared))?;
    let (sinks, conditions) = (graph.sinks.clone(), graph.conditions.clone());
    if !conditions.is_sorted_by(|one, next| one.handle < next.handle) {
        return Err("its conditional handles are not in the order of their creation");
    }
    let known: Vec<u64> = conditions.iter().map(|one| one.handle).collect();
    let reader = reader.get_or_insert_with(|| reader_of(session));
    let (mut template, contents) =
        read_contents(session, shared, raw, device.into(), (reader, &known), 0)?;
    template.sinks = places_of(&contents.nodes, &sinks);
    template.conditions = conditions;
    let layers = contents.layers();
    let nodes = layers.iter().flat_map(|layer| layer.nodes.iter().copied());
    let places: HashMap<CUgraphNode, u32> = nodes.zip(0..).collect();
    // The first layer is the graph itself.
    let bodies = layers.iter().skip(1).map(|layer| layer.handle).collect();
    let read = Read {
        template,
        places,
        bodies,
    };
    let graph = session.objects.graphs.graphs.get_mut(handle);
    Ok(graph.map_err(|_| GONE)?.note_read(read))
}

/// The driver's objects of a graph and of the bodies of its conditional nodes.
#[derive(Default)]
struct Contents {
    /// Client's handle of a body.
    handle: u64,
    raw: CUgraph,
    nodes: Vec<CUgraphNode>,
    /// In the order of the nodes.
    bodies: Vec<Contents>,
}

impl Contents {
    /// In the order of [`Template::layers`].
    fn layers(&self) -> Vec<&Contents> {
        let mut layers = vec![self];
        let mut at = 0;
        while let Some(layer) = layers.get(at).copied() {
            layers.extend(&layer.bodies);
            at += 1;
        }
        layers
    }
}

/// Positions of these nodes in a graph.
fn places_of(nodes: &[CUgraphNode], of: &[CUgraphNode]) -> Vec<u32> {
    let places: HashMap<CUgraphNode, u32> = nodes.iter().copied().zip(0..).collect();
    of.iter()
        .filter_map(|node| places.get(node).copied())
        .collect()
}

/// Reads the contents of a driver's graph with these conditional handles, in ascending order. Also returns its nodes.
fn read_contents(
    session: &mut Session,
    shared: &Shared,
    graph: CUgraph,
    device: u32,
    (reader, conditions): (&Reader, &[u64]),
    depth: usize,
) -> Result<(Template, Contents), Unsaved> {
    if depth > bounds::GRAPH_DEPTH {
        return Err("it is too deep");
    }
    let nodes = all_nodes(shared, graph).map_err(refused(shared))?;
    let places: HashMap<CUgraphNode, u32> = nodes.iter().copied().zip(0..).collect();
    let (mut template, mut contents) = (Template::default(), Contents::default());
    // A larger graph could not be saved.
    let mut room = bounds::SAVED_GRAPHS;
    for node in &nodes {
        let from = (reader, conditions);
        let (mut read, bodies) = read_node(session, shared, *node, device, from, depth)?;
        contents.bodies.extend(bodies);
        let dependencies = dependencies_of(shared, *node).map_err(refused(shared))?;
        for (on, data) in dependencies {
            let on = places.get(&on).ok_or("an edge leads out of it")?;
            read.dependencies.push((*on, data));
        }
        let bytes = 1 + read.does.len() + read.dependencies.len() * size_of::<CUgraphEdgeData>();
        room = room.checked_sub(bytes).ok_or("it is too large")?;
        template.nodes.push(read);
    }
    (contents.raw, contents.nodes) = (graph, nodes);
    Ok((template, contents))
}

fn read_node(
    session: &mut Session,
    shared: &Shared,
    node: CUgraphNode,
    device: u32,
    (reader, conditions): (&Reader, &[u64]),
    depth: usize,
) -> Result<(Node, Vec<Contents>), Unsaved> {
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
        bodies: Vec::new(),
    };
    let mut inside = Vec::new();
    match kind {
        CU_GRAPH_NODE_TYPE_CONDITIONAL => {
            inside = read_bodies(
                session,
                shared,
                node,
                &mut read,
                (reader, conditions),
                depth,
            )?;
        }
        CU_GRAPH_NODE_TYPE_GRAPH => {
            let mut inner = CUgraph::NULL;
            driver
                .child_get(node, &mut inner)
                .map_err(refused(shared))?;
            if session.objects.graphs.has_graph(inner) {
                return Err("the client knows a graph in a node of it");
            }
            // The driver copies no graph with conditional nodes.
            let from = (reader, &[][..]);
            let (inside, _) = read_contents(session, shared, inner, device, from, depth + 1)?;
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
            read.device = device_of(session, shared, kind, &read.does).unwrap_or(device);
            can_be_made_again(session, shared, &read)?;
            if kind == CU_GRAPH_NODE_TYPE_KERNEL {
                read.attributes = attributes_of(shared, node);
            }
        }
        CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
            match host_token(session, shared, node) {
                Some(token) => {
                    read.kind = CU_GRAPH_NODE_TYPE_HOST;
                    read.does = HostNode { token, pad: 0 }.as_bytes().to_vec();
                }
                None => {
                    let does = operations_as_seen(shared, node);
                    read.does = does.map_err(refused(shared))?;
                    note_variables(session, &mut read.does, &reader.variables, true)?;
                }
            }
            can_be_made_again(session, shared, &read)?;
        }
        _ => return Err("it has a node that cannot be made again"),
    }
    Ok((read, inside))
}

/// Reads the bodies of a conditional node. Its parameters are known from the message that added it.
fn read_bodies(
    session: &mut Session,
    shared: &Shared,
    node: CUgraphNode,
    read: &mut Node,
    (reader, conditions): (&Reader, &[u64]),
    depth: usize,
) -> Result<Vec<Contents>, Unsaved> {
    const UNKNOWN: Unsaved = "the parameters of a conditional node are not known";
    let graphs = &session.objects.graphs;
    let handle = graphs.node_of(node).ok_or(UNKNOWN)?;
    let known = graphs.nodes.get(handle).map_err(|_| UNKNOWN)?;
    let conditional = known.conditional.clone().ok_or(UNKNOWN)?;
    let handles = known.graphs().to_vec();
    let params = CUDA_CONDITIONAL_NODE_PARAMS::read_from_bytes(&conditional.does[..]);
    let params = params.map_err(|_| UNKNOWN)?;
    if params.size as usize != handles.len() || conditions.binary_search(&params.handle).is_err() {
        return Err(UNKNOWN);
    }
    (read.device, read.does) = (conditional.device, conditional.does);
    let mut inside = Vec::new();
    for handle in handles {
        let graph = session.objects.graphs.graphs.get(handle);
        let graph = graph.map_err(|_| "a body of a conditional node is gone")?;
        let (raw, device, sinks) = (graph.raw, graph.device.into(), graph.sinks.clone());
        let from = (reader, conditions);
        let (mut body, contents) = read_contents(session, shared, raw, device, from, depth + 1)?;
        body.sinks = places_of(&contents.nodes, &sinks);
        read.bodies.push(body);
        inside.push(Contents { handle, ..contents });
    }
    Ok(inside)
}

/// The device of a node's function or memory, which may differ from its graph's device. `None` if it has none.
fn device_of(session: &Session, shared: &Shared, kind: u32, does: &[u8]) -> Option<u32> {
    let at = |address| device_at(session, shared, address);
    let device = match kind {
        CU_GRAPH_NODE_TYPE_KERNEL => {
            let (kernel, _) = KernelNode::read_from_prefix(does).ok()?;
            let function = session.objects.functions.get(kernel.function);
            Some(function.ok()?.device)
        }
        CU_GRAPH_NODE_TYPE_MEMCPY => {
            let (copy, _) = CUDA_MEMCPY3D::read_from_prefix(does).ok()?;
            let of_array = |kind, array| {
                let array = session.objects.arrays.get(array).ok();
                array
                    .filter(|_| kind == CU_MEMORYTYPE_ARRAY)
                    .map(|array| array.device)
            };
            at(copy.dst_device)
                .or_else(|| at(copy.src_device))
                .or_else(|| of_array(copy.dst_type, copy.dst_array))
                .or_else(|| of_array(copy.src_type, copy.src_array))
        }
        CU_GRAPH_NODE_TYPE_MEMSET => {
            let (set, _) = CUDA_MEMSET_NODE_PARAMS::read_from_prefix(does).ok()?;
            at(set.to)
        }
        _ => None,
    };
    device.map(u32::from)
}

/// Checks that another server would accept a node and give it the same effect.
fn can_be_made_again(session: &mut Session, shared: &Shared, node: &Node) -> Result<(), Unsaved> {
    if node.kind == CU_GRAPH_NODE_TYPE_KERNEL {
        let kernel = KernelNode::read_from_prefix(&node.does);
        if !kernel.is_ok_and(|(kernel, _)| kernel.function != 0) {
            return Err("it has a kernel that the client knows no more");
        }
    }
    const GONE: Unsaved = "it refers to what is gone";
    if node.kind == CU_GRAPH_NODE_TYPE_MEMCPY {
        let (copy, _) = CUDA_MEMCPY3D::read_from_prefix(&node.does).map_err(|_| GONE)?;
        let sides = [
            (copy.src_type, copy.src_array),
            (copy.dst_type, copy.dst_array),
        ];
        if sides.contains(&(CU_MEMORYTYPE_ARRAY, 0)) {
            return Err(GONE);
        }
    }
    let described = describe_template_node(session, shared, node);
    let described = described.map_err(|_| GONE)?;
    // An image with the same content may have taken the place of the one with which the node was added.
    if let Some(handle) = described.refers {
        session.objects.graphs.refer_to(handle);
    }
    Ok(())
}

/// Checks that another server would accept all nodes of an instance, after objects have been destroyed.
fn can_all_be_made_again(
    session: &mut Session,
    shared: &Shared,
    origin: &Origin,
) -> Result<(), Unsaved> {
    for template in std::iter::once(&origin.read.template).chain(&origin.updated) {
        check_template(session, shared, template)?;
    }
    let nodes = origin.read.template.all_nodes();
    for (place, does) in &origin.changed {
        let before = nodes.get(*place as usize).copied().cloned();
        let does = does.clone();
        let node = before.map(|before| Node { does, ..before });
        can_be_made_again(session, shared, &node.ok_or("it has no such node")?)?;
    }
    Ok(())
}

fn check_template(
    session: &mut Session,
    shared: &Shared,
    template: &Template,
) -> Result<(), Unsaved> {
    for node in &template.nodes {
        match node.kind {
            CU_GRAPH_NODE_TYPE_GRAPH | CU_GRAPH_NODE_TYPE_CONDITIONAL => {
                for inside in node.inside.as_deref().into_iter().chain(&node.bodies) {
                    check_template(session, shared, inside)?;
                }
            }
            _ => can_be_made_again(session, shared, node)?,
        }
    }
    Ok(())
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
    variables: &Neighbourhood,
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
            None if may_have_address(bytes) && variables.has_address(bytes) => {
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
    let _ = note_variables(
        session,
        &mut node.does.clone(),
        &Neighbourhood::default(),
        false,
    );
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
            updated: None,
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
        | CU_GRAPH_NODE_TYPE_EVENT_RECORD
        | CU_GRAPH_NODE_TYPE_HOST
        | CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {
            let mut node = Node {
                kind,
                device,
                does: does.to_vec(),
                attributes: Attributes::default(),
                dependencies: Vec::new(),
                inside: None,
                bodies: Vec::new(),
            };
            let variables = match may_have_address(&node.does) {
                true => Neighbourhood::of(session.ranges()),
                false => Neighbourhood::default(),
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
    drop_kept(session, shared);
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
    for graph in session.objects.graphs.take_gone() {
        session.write_down(Record::ending(Kind::Ends, 0, graph));
    }
    let mut reader = None;
    let mut written = 0;
    for handle in session.objects.graphs.graphs.handles() {
        let Ok(graph) = session.objects.graphs.graphs.get(handle) else {
            continue;
        };
        if session.objects.graphs.is_body(handle) {
            // It is written with the graph that it is in.
            continue;
        }
        if graph.owner != Owner::Client {
            return Err("the client knows a graph in a node of another");
        }
        if graph.written {
            continue;
        }
        let read = read_graph(session, shared, handle, &mut reader)?;
        if session.objects.graphs.may_lack() {
            check_template(session, shared, &read.template)?;
        }
        let Ok(graph) = session.objects.graphs.graphs.get(handle) else {
            continue;
        };
        let mut saved = SavedGraph {
            device: graph.device.into(),
            parts: graph.size.parts,
            height: graph.size.height,
            template: read.template.clone(),
            handles: Vec::new(),
            bodies: Vec::new(),
        };
        let graphs = &session.objects.graphs;
        for layer in std::iter::once(&handle).chain(&read.bodies) {
            let graph = graphs.graphs.get(*layer);
            let graph = graph.map_err(|_| "a body of a conditional node is gone")?;
            for node in graph.nodes() {
                let own = graphs.nodes.get(node).map_err(|_| "a node is gone")?;
                // A capture may still name a node that was destroyed meanwhile.
                let place = read.places.get(&own.raw);
                let place = *place.ok_or("the client knows a node that is not in its graph")?;
                saved.handles.push((place, node, own.parts));
            }
            if *layer != handle {
                saved.bodies.push(SavedBody {
                    handle: *layer,
                    parts: graph.size.parts,
                    height: graph.size.height,
                });
            }
        }
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
        let slots = slots_of(exec, origin)?;
        let origin = origin.clone();
        let (device, flags, parts, prints) =
            (exec.device.into(), exec.flags, exec.parts, exec.prints);
        if session.objects.graphs.may_lack() {
            can_all_be_made_again(session, shared, &origin)?;
        }
        let saved = SavedExec {
            device,
            flags,
            parts,
            prints,
            from,
            changed: origin.changed,
            disabled: origin.disabled,
            updated: origin.updated,
            slots,
        };
        written += append_saved::<GraphExec>(session, handle, &saved)?;
        if let Ok(exec) = session.objects.graphs.execs.get_mut(handle) {
            exec.written = true;
        }
    }
    Ok(written)
}

/// The flag slots of the nodes of an instance that call the client, by the nodes' positions.
fn slots_of(exec: &Exec, origin: &Origin) -> Result<Vec<(u32, u32)>, Unsaved> {
    if !exec.slots.is_empty() && origin.updated.is_some() {
        return Err("an instance that calls the client was updated by another graph");
    }
    let place = |(node, slot): &(CUgraphNode, u32)| {
        let place = origin.read.places.get(node);
        let place = place.ok_or("a graph in a node of another calls the client")?;
        Ok((*place, *slot))
    };
    exec.slots.iter().map(place).collect()
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
    let contents = build(session, shared, &saved.template, saved.device)?;
    let restored = layers_of(shared, record.key, &saved, device, &contents).inspect_err(|_| {
        let _ = shared.gpu.driver.graph.destroy(contents.raw);
    });
    let layers = contents.layers();
    let nodes = layers.iter().flat_map(|layer| layer.nodes.iter().copied());
    let read = Arc::new(Read {
        places: nodes.zip(0..).collect(),
        bodies: saved.bodies.iter().map(|body| body.handle).collect(),
        template: saved.template,
    });
    let graphs = &mut session.objects.graphs;
    let restored = restored.and_then(|layers| graphs.restore_graph(layers, &read));
    graphs.note_bytes(record.key, record.bytes.len());
    Ok(restored?)
}

/// The graph that was built from a record, and the bodies in it, with their handles.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for an incomplete record.
fn layers_of(
    shared: &Shared,
    handle: u64,
    saved: &SavedGraph,
    device: Ordinal,
    contents: &Contents,
) -> Result<Vec<Restored>, CUresult> {
    let built = contents.layers();
    let all: Vec<CUgraphNode> = built
        .iter()
        .flat_map(|layer| layer.nodes.iter().copied())
        .collect();
    let template: Vec<&Node> = saved.template.all_nodes();
    let handles = saved.handles.iter();
    let handles: BTreeMap<u32, (u64, u64)> = handles
        .map(|(place, handle, parts)| (*place, (*handle, *parts)))
        .collect();
    let itself = (handle, saved.size());
    let bodies = saved.bodies.iter().map(|body| (body.handle, body.size()));
    let known: Vec<(u64, Size)> = std::iter::once(itself).chain(bodies).collect();
    let layers = saved.template.layers();
    if known.len() != layers.len() || built.len() != layers.len() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut restored = Vec::new();
    for ((layer, built), (handle, size)) in layers.iter().zip(built).zip(known) {
        let is_body = !restored.is_empty();
        let node = template.get(layer.node as usize).filter(|_| is_body);
        let places = layer.first..;
        let of_layer = places.zip(&built.nodes).zip(&layer.template.nodes);
        let nodes = of_layer.filter_map(|((place, raw), node)| {
            let (handle, parts) = handles.get(&place)?;
            let is_conditional = node.kind == CU_GRAPH_NODE_TYPE_CONDITIONAL;
            Some(RestoredNode {
                handle: *handle,
                raw: *raw,
                parts: *parts,
                conditional: is_conditional.then(|| Conditional {
                    device: node.device,
                    does: node.does.clone(),
                }),
            })
        });
        let sinks = layer.template.sinks.iter();
        let sinks = sinks.filter_map(|sink| built.nodes.get(*sink as usize).copied());
        let inside = all.get(layer.node as usize).filter(|_| is_body);
        restored.push(Restored {
            handle,
            raw: built.raw,
            device: match node {
                Some(node) => shared.gpu.device(node.device)?.ordinal,
                None => device,
            },
            size,
            inside: inside.copied().unwrap_or(CUgraphNode::NULL),
            sinks: sinks.collect(),
            nodes: nodes.collect(),
        });
    }
    Ok(restored)
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
            let contents = build(session, shared, &template, saved.device)?;
            let layers = contents.layers();
            let nodes = layers.iter().flat_map(|layer| layer.nodes.iter().copied());
            let read = Read {
                places: nodes.zip(0..).collect(),
                bodies: Vec::new(),
                template,
            };
            (0, contents.raw, Arc::new(read))
        }
    };
    shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
    let origin = Origin {
        read,
        graph,
        changed: saved.changed,
        disabled: saved.disabled,
        updated: saved.updated,
    };
    let hosts = hosts_of(&origin, &saved.slots)?;
    let slots: Vec<u32> = saved.slots.iter().map(|(_, slot)| *slot).collect();
    give_slots(session, shared, &hosts, &slots, device)?;
    let mut made = CUgraphExec::NULL;
    let flags = flags_in_level(session, saved.flags, device) & !CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    let instantiated = driver
        .instantiate(&mut made, raw, flags)
        .map_err(CallError::from)
        .and_then(|()| update_exec(session, shared, (made, saved.device), &origin))
        .and_then(|()| change_exec(session, shared, made, (&origin, &saved.slots)));
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
        slots: hosts.iter().map(|(node, _)| *node).zip(slots).collect(),
        flags: saved.flags,
        calls_or_waits: origin.calls_or_waits(),
        is_conditional: origin.read.template.is_conditional(),
        origin: Some(origin),
        written: true,
    };
    let waits = exec.slots.iter().map(|(_, slot)| *slot);
    session.objects.graphs.waits.extend(waits);
    session.objects.graphs.execs.restore(record.key, exec)?;
    session
        .objects
        .graphs
        .note_bytes(record.key, record.bytes.len());
    Ok(())
}

/// The nodes at the positions that have these slots, with the client's tokens of their functions in the source graph.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for an incomplete record.
fn hosts_of(origin: &Origin, slots: &[(u32, u32)]) -> Result<Vec<(CUgraphNode, u32)>, CUresult> {
    let nodes = origin.read.nodes();
    let template = origin.read.template.all_nodes();
    let with_token = |(place, _): &(u32, u32)| {
        let does = &template.get(*place as usize)?.does;
        let (host, _) = HostNode::read_from_prefix(does).ok()?;
        Some((*nodes.get(place)?, host.token))
    };
    let found: Option<Vec<_>> = slots.iter().map(with_token).collect();
    found.ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Repeats an instance's update from another graph, if there was one.
fn update_exec(
    session: &mut Session,
    shared: &Shared,
    (exec, device): (CUgraphExec, u32),
    origin: &Origin,
) -> Result<(), CallError> {
    let Some(template) = &origin.updated else {
        return Ok(());
    };
    let driver = &shared.gpu.driver.graph;
    let graph = build(session, shared, template, device)?.raw;
    let mut info = CUgraphExecUpdateResultInfo::default();
    let updated = driver.exec_update(exec, graph, &mut info);
    let _ = driver.destroy(graph);
    Ok(updated?)
}

/// Applies the recorded changes of an instance to its replacement.
fn change_exec(
    session: &mut Session,
    shared: &Shared,
    exec: CUgraphExec,
    (origin, slots): (&Origin, &[(u32, u32)]),
) -> Result<(), CallError> {
    let nodes = origin.read.nodes();
    let template = origin.read.template.all_nodes();
    let node_at = |place: &u32| nodes.get(place).copied().ok_or(CUDA_ERROR_INVALID_VALUE);
    for (place, does) in &origin.changed {
        let raw = node_at(place)?;
        let before = template.get(*place as usize).copied();
        let node = Node {
            does: does.clone(),
            ..before.cloned().ok_or(CUDA_ERROR_INVALID_VALUE)?
        };
        let mut described = realise_node(session, shared, &node)?;
        if node.kind == CU_GRAPH_NODE_TYPE_HOST
            && let Some((_, slot)) = slots.iter().find(|(at, _)| at == place)
        {
            let device = shared.gpu.device(node.device)?;
            let context = device.context().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
            let host = HostNode::read_from_prefix(does);
            let (host, _) = host.map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
            described.host(host_operations(session, *slot, host.token)?, context);
        }
        part_current(session, shared, node.kind, node.device)?;
        let driver = &shared.gpu.driver.graph;
        with_shared_memory(shared, node.kind, &mut described.params, |params| {
            driver.exec_node_set(exec, raw, params)
        })?;
        note_described(session, &described, 0);
    }
    for place in &origin.disabled {
        let raw = node_at(place)?;
        shared.gpu.driver.graph.set_enabled(exec, raw, 0)?;
    }
    Ok(())
}

/// Builds a driver's graph from a template.
fn build(
    session: &mut Session,
    shared: &Shared,
    template: &Template,
    device: u32,
) -> Result<Contents, CallError> {
    let driver = &shared.gpu.driver.graph;
    shared
        .gpu
        .device(device)?
        .make_current(&shared.gpu.driver)?;
    let mut graph = CUgraph::NULL;
    driver.create(&mut graph, 0)?;
    let conditions = &template.conditions;
    create_conditions(shared, graph, conditions)
        .and_then(|()| fill(session, shared, graph, template, conditions))
        .inspect_err(|_| {
            let _ = driver.destroy(graph);
        })
}

/// Creates conditional handles of a graph. Kernels hold their numbers, so they have to be the same.
fn create_conditions(
    shared: &Shared,
    graph: CUgraph,
    conditions: &[Condition],
) -> Result<(), CallError> {
    for condition in conditions {
        let device = shared.gpu.device(condition.device)?;
        let context = device.context().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        let (mut handle, default, flags) = (0, condition.default, condition.flags);
        let driver = &shared.gpu.driver.graph;
        driver.condition_create(&mut handle, graph, context, default, flags)?;
        if handle != condition.handle {
            let was = condition.handle;
            tracing::warn!(was, handle, "a conditional handle has another number");
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
    }
    Ok(())
}

/// Makes a node of these parameters. A kernel's dynamic shared memory was within the limit of its function when the client
/// made the node; the limit may have been lowered since.
fn with_shared_memory(
    shared: &Shared,
    kind: u32,
    params: &mut CUgraphNodeParams,
    make: impl FnOnce(&mut CUgraphNodeParams) -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    const LIMIT: CUfunction_attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    if kind != CU_GRAPH_NODE_TYPE_KERNEL {
        return make(params);
    }
    let driver = &shared.gpu.driver;
    let kernel: CUDA_KERNEL_NODE_PARAMS = out_of_words(params);
    let (function, mut limit) = (CUfunction(kernel.function), 0);
    let known = driver.func_get_attribute(&mut limit, LIMIT, function);
    if known.is_err() || i64::from(kernel.shared) <= i64::from(limit) {
        return make(params);
    }
    driver.func_set_attribute(function, LIMIT, kernel.shared as c_int)?;
    let made = make(params);
    driver.func_set_attribute(function, LIMIT, limit).and(made)
}

fn fill(
    session: &mut Session,
    shared: &Shared,
    graph: CUgraph,
    template: &Template,
    conditions: &[Condition],
) -> Result<Contents, CallError> {
    let driver = &shared.gpu.driver.graph;
    let mut bodies: Vec<Vec<Contents>> = Vec::new();
    bodies.resize_with(template.nodes.len(), Vec::new);
    let mut nodes = vec![CUgraphNode::NULL; template.nodes.len()];
    let mut later = Vec::new();
    for at in template.order() {
        let node = template.nodes.get(at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let refused = |error: &CallError| {
            tracing::warn!(at, node.kind, %error, "a node of a graph cannot be made again");
        };
        let (mut behind, mut edges, mut places) = (Vec::new(), Vec::new(), Vec::new());
        for (on, data) in &node.dependencies {
            let made = nodes.get(*on as usize).copied();
            let edge = CUgraphEdgeData::read_from_bytes(data);
            edges.push(edge.map_err(|_| CUDA_ERROR_INVALID_VALUE)?);
            behind.push(made.ok_or(CUDA_ERROR_INVALID_VALUE)?);
            places.push(*on as usize);
        }
        // All of them later, so that they keep their order.
        if behind.iter().any(|node| node.is_null()) {
            behind.clear();
            later.extend(
                places
                    .into_iter()
                    .zip(edges.drain(..))
                    .map(|(on, edge)| (on, at, edge)),
            );
        }
        let mut inner = CUgraph::NULL;
        let mut described = match &node.inside {
            None if node.kind == CU_GRAPH_NODE_TYPE_CONDITIONAL => {
                let device = shared.gpu.device(node.device)?;
                let context = device.context().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
                let is_known = |handle| conditions.iter().any(|one| one.handle == handle);
                describe_conditional(context, &node.does, is_known)?
            }
            None => {
                session.objects.graphs.hosts |= node.kind == CU_GRAPH_NODE_TYPE_HOST;
                realise_node(session, shared, node).inspect_err(refused)?
            }
            Some(inside) => {
                inner = build(session, shared, inside, node.device)?.raw;
                Described::child(inner)
            }
        };
        let current = shared.gpu.device(node.device).and_then(|device| {
            device.make_current(&shared.gpu.driver)?;
            part_current(session, shared, node.kind, node.device)
        });
        let mut raw = CUgraphNode::NULL;
        let params = &mut described.params;
        let lists = (behind.as_ptr(), edges.as_ptr());
        let added = current.and_then(|()| {
            with_shared_memory(shared, node.kind, params, |params| {
                driver.add_node(&mut raw, graph, lists.0, lists.1, behind.len(), params)
            })
        });
        if !inner.is_null() {
            // The node contains a copy.
            let _ = driver.destroy(inner);
        }
        added.map_err(CallError::from).inspect_err(refused)?;
        if node.kind == CU_GRAPH_NODE_TYPE_KERNEL {
            set_attributes(shared, raw, &node.attributes)?;
        }
        note_described(session, &described, 0);
        nodes[at] = raw;
        if node.kind == CU_GRAPH_NODE_TYPE_CONDITIONAL {
            let made = bodies_of(&described);
            if made.len() != node.bodies.len() {
                return Err(CUDA_ERROR_INVALID_VALUE.into());
            }
            for (graph, body) in made.into_iter().zip(&node.bodies) {
                bodies[at].push(fill(session, shared, graph, body, conditions)?);
            }
        }
    }
    for (on, at, edge) in later {
        driver.add_dependencies(graph, &nodes[on], &nodes[at], &edge, 1)?;
    }
    Ok(Contents {
        handle: 0,
        raw: graph,
        nodes,
        bodies: bodies.into_iter().flatten().collect(),
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{Fixture, Function, counts, gives_handle};
    use mpsshim_proto::message::graph::GraphCreate;
    use mpsshim_proto::message::{Op, Value};

    /// `cuGraphConditionalHandleCreate`: the handle is the number of the graph.
    extern "C" fn numbered(to: *mut u64, graph: u64) -> CUresult {
        // SAFETY: the caller's variable.
        unsafe { to.write(graph) };
        CUDA_SUCCESS
    }

    fn condition(handle: u64) -> Condition {
        Condition {
            handle,
            device: 0,
            default: 1,
            flags: CU_GRAPH_COND_ASSIGN_DEFAULT,
        }
    }

    fn origin_of(nodes: &[(u32, &[u8])]) -> Origin {
        let node = |(kind, does): &(u32, &[u8])| Node {
            kind: *kind,
            device: 0,
            does: does.to_vec(),
            attributes: Attributes::default(),
            dependencies: Vec::new(),
            inside: None,
            bodies: Vec::new(),
        };
        let template = Template {
            nodes: nodes.iter().map(node).collect(),
            ..Template::default()
        };
        let places = (0..nodes.len() as u32).map(|at| (CUgraphNode(u64::from(at) + 10), at));
        Origin {
            read: Arc::new(Read {
                template,
                places: places.collect(),
                bodies: Vec::new(),
            }),
            graph: 0,
            changed: BTreeMap::new(),
            disabled: BTreeSet::new(),
            updated: None,
        }
    }

    #[test]
    fn nodes_that_call_the_client_keep_their_slots() {
        let host = HostNode { token: 7, pad: 0 };
        let nodes = [
            (CU_GRAPH_NODE_TYPE_EMPTY, &[][..]),
            (CU_GRAPH_NODE_TYPE_HOST, host.as_bytes()),
        ];
        let mut origin = origin_of(&nodes);
        assert!(origin.calls_or_waits() && !origin_of(&nodes[..1]).calls_or_waits());
        let mut exec = Exec {
            raw: CUgraphExec::NULL,
            device: Ordinal::of_test(0),
            prints: false,
            length: Length::Unknown,
            fill: None,
            parts: 0,
            slots: vec![(CUgraphNode(11), 5)],
            flags: 0,
            calls_or_waits: true,
            is_conditional: false,
            origin: None,
            written: false,
        };
        let slots = slots_of(&exec, &origin);
        assert_eq!(slots, Ok(vec![(1, 5)]));
        let again = hosts_of(&origin, &[(1, 5)]);
        assert_eq!(again, Ok(vec![(CUgraphNode(11), 7)]));
        for wrong in [(0, 5), (2, 5)] {
            assert!(hosts_of(&origin, &[wrong]).is_err(), "{wrong:?}");
        }
        // In a child graph.
        exec.slots.push((CUgraphNode(12), 6));
        assert!(slots_of(&exec, &origin).is_err());
        exec.slots.pop();
        origin.updated = Some(Template::default());
        assert!(slots_of(&exec, &origin).is_err());
        exec.slots.clear();
        assert_eq!(slots_of(&exec, &origin), Ok(Vec::new()));
    }

    #[test]
    fn a_node_is_of_the_device_of_its_function_or_memory() {
        let mut test = Fixture::with_devices(2, &[]);
        let of =
            |test: &Fixture, kind, does: &[u8]| device_of(&test.session, &test.shared, kind, does);
        let there = test.memory_of(1, 4096);
        let set = |to| CUDA_MEMSET_NODE_PARAMS {
            to,
            ..CUDA_MEMSET_NODE_PARAMS::default()
        };
        let copy = |dst_device, src_device| CUDA_MEMCPY3D {
            dst_device,
            src_device,
            ..CUDA_MEMCPY3D::default()
        };
        let kind = CU_GRAPH_NODE_TYPE_MEMSET;
        assert_eq!(of(&test, kind, set(there).as_bytes()), Some(1));
        assert_eq!(of(&test, kind, set(16).as_bytes()), None);
        let kind = CU_GRAPH_NODE_TYPE_MEMCPY;
        assert_eq!(of(&test, kind, copy(16, there).as_bytes()), Some(1));
        let here = test.memory(4096);
        assert_eq!(of(&test, kind, copy(here, there).as_bytes()), Some(0));
        let function = test.function();
        let kernel = KernelNode {
            function,
            ..KernelNode::default()
        };
        let kind = CU_GRAPH_NODE_TYPE_KERNEL;
        assert_eq!(of(&test, kind, kernel.as_bytes()), Some(0));
        let functions = &mut test.session.objects.functions;
        functions.get_mut(function).expect("a function").device = Ordinal::of_test(1);
        assert_eq!(of(&test, kind, kernel.as_bytes()), Some(1));
        assert_eq!(of(&test, CU_GRAPH_NODE_TYPE_EMPTY, &[]), None);
    }

    #[test]
    fn a_graph_whose_node_was_destroyed_behind_the_client_is_not_saved() {
        let mut test = Fixture::new(&[
            ("cuGraphCreate", gives_handle as Function),
            ("cuGraphGetNodes", counts as Function),
            ("cuGraphGetEdges_v2", counts as Function),
        ]);
        let create = GraphCreate::default();
        let made: Value = test.reply(Op::GraphCreate, &create, &[]).expect("a graph");
        let graph = made.value;
        let shared = test.shared.clone();
        assert!(write_graphs(&mut test.session, &shared).is_ok());
        let graphs = &mut test.session.objects.graphs;
        graphs.node_handle(CUgraphNode(77), graph).unwrap();
        let outcome = write_graphs(&mut test.session, &shared);
        assert_eq!(
            outcome,
            Err("the client knows a node that is not in its graph")
        );
    }

    #[test]
    fn a_conditional_handle_with_another_number_is_refused() {
        let mut test = Fixture::new(&[
            ("cuGraphCreate", gives_handle as Function),
            ("cuGraphDestroy", counts as Function),
            ("cuGraphConditionalHandleCreate", numbered as Function),
        ]);
        let shared = test.shared.clone();
        let create = |handle| create_conditions(&shared, CUgraph(7), &[condition(handle)]);
        assert!(create(7).is_ok());
        let refused = Some(CUDA_ERROR_INVALID_VALUE);
        let status = |error: CallError| match error {
            CallError::Status(status) => Some(status),
            _ => None,
        };
        assert_eq!(create(8).err().and_then(status), refused);
        let elsewhere = Condition {
            device: 5,
            ..condition(7)
        };
        assert!(create_conditions(&shared, CUgraph(7), &[elsewhere]).is_err());
        // The graph that was begun is destroyed.
        let template = Template {
            conditions: vec![condition(1)],
            ..Template::default()
        };
        let built = build(&mut test.session, &shared, &template, 0);
        assert_eq!(built.err().and_then(status), refused);
        assert_eq!(test.calls(), 1);
    }
}
