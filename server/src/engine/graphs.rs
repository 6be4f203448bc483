//! Graphs, their nodes and their instances, as a session knows them.
//!
//! They live in the driver. A client holds handles that are made here when an object becomes known: a node of a captured
//! graph, say, when the client asks for the graph's nodes. What the driver frees along with a graph or a node (its
//! nodes, the graphs inside them) loses its handle here at the same moment, so no freed pointer is ever passed on.

use super::Shared;
use super::account::{Account, Charge, Memory};
use super::instances::Image;
use super::session::Event;
use mpsshim_proto::cuda::*;
use mpsshim_proto::graph_memory::GraphMemory;
use mpsshim_proto::handle::{Handle, Kind};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Graphs a session may have at a time, those inside nodes included.
const MAX_GRAPHS: usize = 1 << 18;
/// Nodes a session may have handles of at a time.
const MAX_NODES: usize = 1 << 22;
/// Instances a session may have at a time.
const MAX_EXECS: usize = 1 << 16;

/// Objects whose handles are made here.
#[derive(Debug)]
pub struct Made<T> {
    kind: Kind,
    limit: usize,
    places: Vec<(u16, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Made<T> {
    fn new(kind: Kind, limit: usize) -> Made<T> {
        Made {
            kind,
            limit,
            places: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Adds an object; its handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` beyond the limit.
    pub fn insert(&mut self, object: T) -> Result<u64, CUresult> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.places.len() >= self.limit => return Err(CUDA_ERROR_OUT_OF_MEMORY),
            None => {
                self.places.push((0, None));
                self.places.len() as u32 - 1
            }
        };
        let place = &mut self.places[index as usize];
        place.1 = Some(object);
        Ok(Handle::new(self.kind, place.0, index).0)
    }

    fn index(&self, handle: u64) -> Option<usize> {
        let handle = Handle(handle);
        let index = handle.index() as usize;
        let place = self.places.get(index)?;
        let fits = handle.kind() == Some(self.kind) && place.0 == handle.generation();
        (fits && place.1.is_some()).then_some(index)
    }

    /// The object of a live handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, as the driver says of graphs it does not know.
    pub fn get(&self, handle: u64) -> Result<&T, CUresult> {
        self.index(handle)
            .and_then(|index| self.places[index].1.as_ref())
            .ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// As [`Made::get`], to change it.
    ///
    /// # Errors
    /// As [`Made::get`].
    pub fn get_mut(&mut self, handle: u64) -> Result<&mut T, CUresult> {
        let index = self.index(handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        self.places[index]
            .1
            .as_mut()
            .ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Takes the object of a live handle out.
    pub fn remove(&mut self, handle: u64) -> Option<T> {
        let index = self.index(handle)?;
        let place = &mut self.places[index];
        // A place whose generations are used up is not used again: a stale handle must never fit.
        if place.0 < u16::MAX {
            place.0 += 1;
            self.free.push(index as u32);
        }
        place.1.take()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.free.len() >= self.places.len() || self.places.iter().all(|(_, o)| o.is_none())
    }

    fn drain(&mut self) -> impl Iterator<Item = T> {
        self.free.clear();
        std::mem::take(&mut self.places)
            .into_iter()
            .filter_map(|(_, object)| object)
    }
}

/// Who ends a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The client.
    Client,
    /// The node that it is in.
    Node(u64),
    /// The capture that fills it; the client's, once that has ended.
    Capture,
}

/// A graph.
#[derive(Debug)]
pub struct Graph {
    /// The driver's graph.
    pub raw: CUgraph,
    /// Server's ordinal.
    pub device: usize,
    /// Who ends it.
    pub owner: Owner,
    /// A capture fills it.
    pub filling: bool,
    nodes: HashSet<u64>,
}

/// A node with a handle.
#[derive(Debug)]
pub struct Node {
    /// The driver's node.
    pub raw: CUgraphNode,
    /// The graph it is in.
    pub graph: u64,
    /// Graphs in it with handles.
    graphs: Vec<u64>,
}

/// An instance.
#[derive(Debug)]
pub struct Exec {
    /// The driver's instance.
    pub raw: CUgraphExec,
    /// Server's ordinal.
    pub device: usize,
    /// Launching it may print.
    pub prints: bool,
    /// The slot of each host node.
    pub slots: Vec<(CUgraphNode, u32)>,
}

/// A capture that goes on.
#[derive(Debug)]
pub struct Capture {
    /// The stream that it began on.
    pub stream: u64,
    /// The graph that it fills, where the client has a handle of it.
    pub graph: u64,
}

/// What a session has of graphs.
#[derive(Debug)]
pub struct Graphs {
    /// Graphs by handle.
    pub graphs: Made<Graph>,
    /// Nodes by handle.
    pub nodes: Made<Node>,
    /// Instances by handle.
    pub execs: Made<Exec>,
    /// Captures that go on.
    pub captures: Vec<Capture>,
    /// Memory that allocating nodes have given.
    pub memory: GraphMemory,
    /// What counts of that memory: blocks that an instance allocates or a launch has left.
    pub charges: BTreeMap<u64, Charge>,
    /// Numbers of conditions that the session was given, and their graphs.
    pub conditions: HashMap<u64, u64>,
    /// There has been a host node.
    pub hosts: bool,
    /// Slots that instances were ever given: where the GPU may wait for the client.
    pub waits: HashSet<u32>,
    /// A kernel that may print was put into some graph.
    pub prints: bool,
    by_graph: HashMap<CUgraph, u64>,
    by_node: HashMap<CUgraphNode, u64>,
    /// Handles of images and events that graphs may refer to.
    referred: HashSet<u64>,
    /// Modules and libraries that were unloaded while a graph may refer to them.
    images: Vec<Image>,
    /// Events that were destroyed while a graph may refer to them.
    events: Vec<Event>,
}

impl Default for Graphs {
    fn default() -> Self {
        Graphs {
            graphs: Made::new(Kind::Graph, MAX_GRAPHS),
            nodes: Made::new(Kind::GraphNode, MAX_NODES),
            execs: Made::new(Kind::GraphExec, MAX_EXECS),
            captures: Vec::new(),
            memory: Default::default(),
            charges: BTreeMap::new(),
            conditions: HashMap::new(),
            hosts: false,
            waits: HashSet::new(),
            prints: false,
            by_graph: HashMap::new(),
            by_node: HashMap::new(),
            referred: HashSet::new(),
            images: Vec::new(),
            events: Vec::new(),
        }
    }
}

impl Graphs {
    /// The handle of a graph of the driver's, made if there is none.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn graph_handle(
        &mut self,
        raw: CUgraph,
        device: usize,
        owner: Owner,
    ) -> Result<u64, CUresult> {
        if let Some(handle) = self.by_graph.get(&raw) {
            return Ok(*handle);
        }
        let handle = self.graphs.insert(Graph {
            raw,
            device,
            owner,
            filling: false,
            nodes: HashSet::new(),
        })?;
        self.by_graph.insert(raw, handle);
        if let Owner::Node(node) = owner
            && let Ok(node) = self.nodes.get_mut(node)
        {
            node.graphs.push(handle);
        }
        Ok(handle)
    }

    /// The handle of a node of the driver's, made if there is none.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn node_handle(&mut self, raw: CUgraphNode, graph: u64) -> Result<u64, CUresult> {
        if raw.is_null() {
            return Ok(0);
        }
        if let Some(handle) = self.by_node.get(&raw) {
            return Ok(*handle);
        }
        let handle = self.nodes.insert(Node {
            raw,
            graph,
            graphs: Vec::new(),
        })?;
        self.by_node.insert(raw, handle);
        self.graphs.get_mut(graph)?.nodes.insert(handle);
        Ok(handle)
    }

    /// The driver's nodes of some handles.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` when one is not live.
    pub fn raw_nodes(&self, handles: &[u64]) -> Result<Vec<CUgraphNode>, CUresult> {
        handles
            .iter()
            .map(|handle| Ok(self.nodes.get(*handle)?.raw))
            .collect()
    }

    /// The graph belongs to a node from now on.
    pub fn move_into(&mut self, graph: u64, node: u64) {
        if let (Ok(object), Ok(parent)) = (self.graphs.get_mut(graph), self.nodes.get_mut(node)) {
            object.owner = Owner::Node(node);
            parent.graphs.push(graph);
        }
    }

    /// The driver has freed a graph: its handle dies, and those of all that was in it.
    pub fn forget_graph(&mut self, handle: u64) {
        let Some(graph) = self.graphs.remove(handle) else {
            return;
        };
        self.by_graph.remove(&graph.raw);
        self.memory.ended(handle);
        self.discharge();
        self.conditions.retain(|_, of| *of != handle);
        for node in graph.nodes {
            self.forget_node(node);
        }
    }

    /// The driver has freed a node: its handle dies, and those of the graphs in it.
    pub fn forget_node(&mut self, handle: u64) {
        let Some(node) = self.nodes.remove(handle) else {
            return;
        };
        self.by_node.remove(&node.raw);
        if let Ok(graph) = self.graphs.get_mut(node.graph) {
            graph.nodes.remove(&handle);
        }
        for graph in node.graphs {
            self.forget_graph(graph);
        }
    }

    /// What is in a node may be another graph now.
    pub fn forget_inside(&mut self, node: u64) {
        if let Ok(node) = self.nodes.get_mut(node) {
            for graph in std::mem::take(&mut node.graphs) {
                self.forget_graph(graph);
            }
        }
    }

    /// A graph may have lost nodes: the handles of those that are not in it any more die.
    pub fn keep_nodes(&mut self, graph: u64, now: &[CUgraphNode]) {
        let Ok(object) = self.graphs.get(graph) else {
            return;
        };
        let now: HashSet<_> = now.iter().collect();
        let gone: Vec<u64> = object
            .nodes
            .iter()
            .filter(|node| self.nodes.get(**node).is_ok_and(|n| !now.contains(&n.raw)))
            .copied()
            .collect();
        for node in gone {
            self.forget_node(node);
        }
    }

    /// Whether a graph or an instance may refer to other objects of the session.
    pub fn any(&self) -> bool {
        !self.captures.is_empty() || !self.execs.is_empty() || !self.graphs.is_empty()
    }

    /// Whether an unloaded image has to stay for now; if so it is kept here.
    /// Gives the image back when no graph can refer to it.
    pub fn keep_image(&mut self, handle: u64, image: Image) -> Option<Image> {
        if self.referred.remove(&handle) && self.any() {
            self.images.push(image);
            return None;
        }
        Some(image)
    }

    /// As [`Graphs::keep_image`] for a destroyed event.
    ///
    /// # Errors
    /// The event, when no graph can refer to it.
    pub fn keep_event(&mut self, handle: u64, event: Event) -> Result<(), Event> {
        if self.referred.remove(&handle) && self.any() {
            self.events.push(event);
            return Ok(());
        }
        Err(event)
    }

    /// A graph refers to this image or event from now on.
    pub fn refer_to(&mut self, handle: u64) {
        self.referred.insert(handle);
    }

    /// What was kept for graphs, once there are none.
    pub fn take_kept(&mut self) -> (Vec<Image>, Vec<Event>) {
        if (self.images.is_empty() && self.events.is_empty()) || self.any() {
            return (Vec::new(), Vec::new());
        }
        (
            std::mem::take(&mut self.images),
            std::mem::take(&mut self.events),
        )
    }

    /// Ends all that the session has; its streams are idle.
    pub fn release(&mut self, shared: &Shared) -> (Vec<Image>, Vec<Event>) {
        let driver = &shared.driver.graph;
        for exec in self.execs.drain() {
            let _ = shared.devices[exec.device].make_current(&shared.driver);
            let _ = driver.exec_destroy(exec.raw);
        }
        for graph in self.graphs.drain() {
            if graph.owner == Owner::Client {
                let _ = shared.devices[graph.device].make_current(&shared.driver);
                let _ = driver.destroy(graph.raw);
            }
        }
        *self = Graphs {
            images: std::mem::take(&mut self.images),
            events: std::mem::take(&mut self.events),
            ..Graphs::default()
        };
        self.take_kept()
    }

    /// Counts the memory that an instance allocates.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`; nothing more is counted then.
    pub fn charge(&mut self, account: &Account, exec: u64, device: usize) -> Result<(), CUresult> {
        let mut taken = Vec::new();
        for (start, len) in self.memory.of(exec) {
            if !self.charges.contains_key(&start) {
                taken.push((start, account.take(Memory::Device(device), len)?));
            }
        }
        self.charges.extend(taken);
        Ok(())
    }

    /// Counts no more what is no memory any more.
    pub fn discharge(&mut self) {
        let memory = &self.memory;
        self.charges.retain(|start, _| memory.begins(*start));
    }

    /// Whether `[address, address + len)` is memory that a node of the session has given.
    pub fn owns(&self, address: u64, len: u64) -> bool {
        self.memory.behind(address).is_some_and(|left| len <= left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_a_graph_dies_with_it() {
        let mut graphs = Graphs::default();
        let outer = graphs.graph_handle(CUgraph(1), 0, Owner::Client).unwrap();
        let node = graphs.node_handle(CUgraphNode(10), outer).unwrap();
        let inner = graphs
            .graph_handle(CUgraph(2), 0, Owner::Node(node))
            .unwrap();
        let deep = graphs.node_handle(CUgraphNode(20), inner).unwrap();
        assert_eq!(graphs.node_handle(CUgraphNode(20), inner), Ok(deep));
        graphs.forget_node(node);
        assert!(graphs.graphs.get(inner).is_err() && graphs.nodes.get(deep).is_err());
        let again = graphs.node_handle(CUgraphNode(10), outer).unwrap();
        assert_ne!(again, node, "a stale handle is told from its successor");
        let other = graphs.node_handle(CUgraphNode(11), outer).unwrap();
        graphs.keep_nodes(outer, &[CUgraphNode(11)]);
        assert!(graphs.nodes.get(again).is_err() && graphs.nodes.get(other).is_ok());
        graphs.forget_graph(outer);
        assert!(graphs.nodes.get(other).is_err() && !graphs.any());
    }
}
