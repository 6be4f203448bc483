//! Graphs: client-side state. Graphs exist in the server, which assigns their handles; the client keeps the facts about
//! instances that launches need, and the memory that pointers in a node's parameters refer to.

use std::collections::{HashMap, HashSet};

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUgraphEdgeData, CUresult};
use mpsshim_proto::message::graph::{
    GraphInstantiate, GraphInstantiated, GraphLaunch, GraphList, GraphListed, GraphNode,
    GraphNodeAdded, GraphNodeIs, GraphPair, GraphUpdated, LIST_MOST,
};
use mpsshim_proto::message::{Object, Op, Value};
use parking_lot::{Mutex, RwLock};
use zerocopy::{FromBytes, IntoBytes};

use crate::ffi::Status;
use crate::proxy::capture::{self, read_all};
use crate::proxy::context;
use crate::proxy::event;
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::Session;
use crate::proxy::user_object::{self, Holder};
use crate::proxy::{graph_host, memory, pages, printing, shadow};

static EXECS: RwLock<Option<HashMap<u64, Exec>>> = RwLock::new(None);
static KEPT: Mutex<Option<HashMap<u64, Kept>>> = Mutex::new(None);

/// An instance.
#[derive(Clone, Copy, Debug)]
struct Exec {
    prints: bool,
    /// It has host nodes.
    calls: bool,
}

/// Memory that pointers in a node's parameters refer to, as long as the node exists unchanged.
#[derive(Debug, Default)]
pub struct Kept {
    /// The graph that the node is in, where it is known.
    pub graph: u64,
    /// A kernel's packed parameters, or other bytes.
    pub bytes: Vec<u8>,
    /// Pointers into `bytes`, or words of another kind.
    pub words: Vec<u64>,
    /// The program passed a kernel's parameters packed.
    pub by_extra: bool,
}

/// Calls `work` with the memory that is kept for a node.
pub fn with_kept<R>(node: u64, work: impl FnOnce(&mut Kept) -> R) -> R {
    let mut kept = KEPT.lock();
    work(kept.get_or_insert_default().entry(node).or_default())
}

fn drop_kept(node: u64) {
    if let Some(kept) = KEPT.lock().as_mut() {
        kept.remove(&node);
    }
}

/// Requests a number about one object.
pub fn request_value(session: &Session, op: Op, object: u64) -> Status<u64> {
    let value: Value = session.request(op, &Object { object }, &[])?.read()?;
    Ok(value.value)
}

/// Requests an action on one object.
pub fn request_nothing(session: &Session, op: Op, object: u64) -> Status {
    session.request(op, &Object { object }, &[])?.status.ok()
}

/// `to`, a graph or an instance, copies, allocates and frees the same memory as `from`.
pub fn inherit(from: u64, to: u64) {
    shadow::share(from, to);
    memory::follow_graph_memory(|memory| memory.share(from, to));
}

/// `cuGraphDestroy`.
pub fn destroy(session: &Session, graph: u64) -> Status {
    request_nothing(session, Op::GraphDestroy, graph)?;
    if let Some(kept) = KEPT.lock().as_mut() {
        kept.retain(|_, kept| kept.graph != graph);
    }
    memory::follow_graph_memory(|memory| memory.ended(graph));
    shadow::forget(graph);
    user_object::graph_ends(graph);
    Ok(())
}

/// `cuGraphDestroyNode`.
pub fn destroy_node(session: &Session, node: u64) -> Status {
    request_nothing(session, Op::GraphNodeDestroy, node)?;
    drop_kept(node);
    user_object::end(Holder::Node { node, graph: 0 });
    Ok(())
}

/// A complete list of nodes or edges from the server.
#[derive(Debug, Default)]
pub struct Listed {
    pub nodes: Vec<u64>,
    /// For edges, their targets.
    pub to: Vec<u64>,
    /// For edges and dependencies.
    pub edges: Vec<CUgraphEdgeData>,
}

/// Fetches a list; with `count_only` just its length.
pub fn list(
    session: &Session,
    object: u64,
    what: u32,
    count_only: bool,
) -> Status<(usize, Listed)> {
    use mpsshim_proto::message::graph::list;
    let mut all = Listed::default();
    loop {
        let body = GraphList {
            object,
            what,
            first: all.nodes.len() as u32,
            most: if count_only { 0 } else { LIST_MOST },
            pad: 0,
        };
        let answer = session.request(Op::GraphList, &body, &[])?;
        let listed: GraphListed = answer.read()?;
        let (total, part) = (listed.total as usize, listed.part as usize);
        if count_only {
            return Ok((total, all));
        }
        let rest = answer
            .payload
            .get(size_of::<GraphListed>()..)
            .unwrap_or(&[]);
        let mut at = 0;
        let mut next = || {
            let bytes = rest.get(at * 8..(at + part) * 8).unwrap_or(&[]);
            at += part;
            bytes
        };
        all.nodes.extend(read_all::<u64>(next()));
        if what == list::EDGES {
            all.to.extend(read_all::<u64>(next()));
        }
        if what != list::NODES && what != list::ROOTS {
            all.edges.extend(read_all::<CUgraphEdgeData>(next()));
        }
        if part == 0 || all.nodes.len() >= total {
            return Ok((total, all));
        }
    }
}

/// Result of adding a node.
#[derive(Debug, Default)]
pub struct Added {
    pub node: u64,
    /// Address, for an allocation node.
    pub address: u64,
    /// Bodies of a conditional node.
    pub graphs: Vec<u64>,
}

/// Adds or changes a node.
pub fn node(session: &Session, body: &GraphNode, behind: &[u8]) -> Status<Added> {
    let answer = session.request(Op::GraphNode, body, behind)?;
    let added: GraphNodeAdded = answer.read()?;
    let rest = answer
        .payload
        .get(size_of::<GraphNodeAdded>()..)
        .unwrap_or(&[]);
    Ok(Added {
        node: added.node,
        address: added.address,
        graphs: read_all(rest),
    })
}

/// Gets a node's kind, device and parameters from the server.
pub fn get_node(session: &Session, node: u64) -> Status<(GraphNodeIs, Vec<u8>)> {
    let answer = session.request(Op::GraphNodeGet, &Object { object: node }, &[])?;
    let is: GraphNodeIs = answer.read()?;
    let rest = answer.payload.get(size_of::<GraphNodeIs>()..);
    Ok((is, rest.unwrap_or(&[]).to_vec()))
}

/// As [`get_node`], for a node of a kind whose parameters are this struct; also returns the bytes that follow it.
pub fn get_node_of<T: FromBytes>(session: &Session, node: u64, kind: u32) -> Status<(T, Vec<u8>)> {
    let (is, bytes) = get_node(session, node)?;
    if is.kind != kind {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let (read, rest) = T::read_from_prefix(&bytes).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    Ok((read, rest.to_vec()))
}

/// `cuGraphInstantiate` in all its forms.
pub fn instantiate(session: &Session, body: &GraphInstantiate) -> Status<GraphInstantiated> {
    capture::forbid(session)?;
    let mut slots: Vec<u32> = Vec::new();
    let made = loop {
        let body = GraphInstantiate {
            slots: slots.len() as u32,
            ..*body
        };
        let answer =
            memory::request_with_room(session, Op::GraphInstantiate, &body, slots.as_bytes());
        let made: Status<GraphInstantiated> = answer.and_then(|answer| answer.read());
        match made {
            // It has host nodes, which need a slot each.
            Ok(made) if made.hosts as usize > slots.len() => {
                let more = made.hosts as usize - slots.len();
                let more = graph_host::take_slots(session, more).inspect_err(|_| {
                    graph_host::give_back(session, std::mem::take(&mut slots));
                })?;
                slots.extend(more);
            }
            made => break made,
        }
    };
    let done = made.as_ref().is_ok_and(|made| made.status == 0);
    if !done {
        graph_host::give_back(session, slots);
        return made;
    }
    let made = made?;
    let exec = Exec {
        prints: made.prints != 0,
        calls: !slots.is_empty(),
    };
    if exec.calls {
        graph_host::instantiated(made.exec, slots);
    }
    EXECS
        .write()
        .get_or_insert_default()
        .insert(made.exec, exec);
    user_object::copy(body.graph, Holder::Exec(made.exec));
    inherit(body.graph, made.exec);
    Ok(made)
}

/// `cuGraphLaunch` (or `cuGraphUpload`): one message, no answer.
pub fn launch(session: &'static Session, op: Op, exec: u64, stream: StreamRef) -> Status {
    let known = EXECS
        .read()
        .as_ref()
        .and_then(|execs| execs.get(&exec).copied());
    let known = known.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if known.calls && op == Op::GraphLaunch && !stream.is_capturing() {
        graph_host::launched(session, exec)?;
    }
    let body = GraphLaunch {
        exec,
        stream: stream.handle(),
    };
    let runs = op == Op::GraphLaunch && !stream.is_capturing();
    if runs {
        shadow::fill(exec);
    }
    pages::share_for_graph(session)?;
    stream::submit(session, stream, op, &body, &[])?;
    if runs {
        shadow::launched(exec, stream);
    }
    if known.prints {
        printing::expect();
    }
    if runs && memory::any_graph_memory() {
        // This call must return the error if the instance's memory has not been freed yet.
        session.settle(stream.handle())?;
        memory::change_graph_memory(|memory| memory.launched(exec));
    }
    Ok(())
}

/// `cuGraphExecDestroy`.
pub fn destroy_exec(session: &Session, exec: u64) -> Status {
    request_nothing(session, Op::GraphExecDestroy, exec)?;
    if let Some(execs) = EXECS.write().as_mut() {
        execs.remove(&exec);
    }
    graph_host::destroyed(session, exec);
    shadow::forget(exec);
    memory::follow_graph_memory(|memory| memory.ended(exec));
    user_object::end(Holder::Exec(exec));
    Ok(())
}

/// `cuGraphExecUpdate`.
pub fn update(session: &Session, exec: u64, graph: u64) -> Status<GraphUpdated> {
    let body = GraphPair {
        first: exec,
        second: graph,
    };
    let updated: GraphUpdated = session.request(Op::GraphExecUpdate, &body, &[])?.read()?;
    if updated.status == 0 {
        shadow::forget(exec);
        inherit(graph, exec);
    }
    if updated.prints != 0
        && let Some(execs) = EXECS.write().as_mut()
        && let Some(exec) = execs.get_mut(&exec)
    {
        exec.prints = true;
    }
    Ok(updated)
}

/// `cuGraphClone`.
pub fn clone(session: &Session, graph: u64) -> Status<u64> {
    let clone = request_value(session, Op::GraphClone, graph)?;
    user_object::copy(graph, Holder::Graph(clone));
    inherit(graph, clone);
    Ok(clone)
}

/// A graph refers to an event from now on.
pub fn refer_to_event(handle: u64) -> Status {
    event::resolve(handle)
        .map(|event| event.is_in_graph())
        .map_err(|_: CUresult| CUDA_ERROR_INVALID_VALUE)
}

/// The server's ordinal of the device for an object that needs no context: the current context's.
pub fn device(session: &Session) -> Status<u32> {
    match context::top() {
        // Also if it was destroyed.
        Some(context) => Ok(context.server_device),
        None => context::device(0)?.attach(session),
    }
}

/// Whether all of some handles differ.
pub fn all_differ(nodes: &[u64]) -> bool {
    let mut seen = HashSet::new();
    nodes.iter().all(|node| seen.insert(node.as_bytes()))
}
