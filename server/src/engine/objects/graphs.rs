//! Graphs, their nodes and their instances, as a session knows them.
//!
//! They live in the driver. A client holds handles that are made here when an object becomes known: a node of a captured
//! graph, say, when the client asks for the graph's nodes. What the driver frees along with a graph or a node (its
//! nodes, the graphs inside them) loses its handle here at the same moment, so no freed pointer is ever passed on.

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::graph_templates::{Size, Template};
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::images::instances::Image;
use crate::engine::objects::awaited::Awaited;
use crate::engine::objects::events::Event;
use crate::engine::objects::pace::Length;
use crate::engine::objects::pools;
use mpsshim_api::cuda::*;
use mpsshim_model::bonds::Bonds;
use mpsshim_proto::graph_memory::GraphMemory;
use mpsshim_proto::handle::{Handle, Kind};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

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

    /// Puts an object where it was in the server before.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` when the handle is of another kind, too large or taken.
    pub fn restore(&mut self, handle: u64, object: T) -> Result<(), CUresult> {
        let handle = Handle(handle);
        let index = handle.index() as usize;
        if handle.kind() != Some(self.kind) || index >= self.limit {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if self.places.len() <= index {
            self.places.resize_with(index + 1, || (0, None));
        }
        let place = &mut self.places[index];
        if place.1.is_some() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        *place = (handle.generation(), Some(object));
        Ok(())
    }

    /// All are back: what is free between them is used again.
    fn restored(&mut self) {
        let places = self.places.iter().enumerate();
        let free = places.filter(|(_, (_, object))| object.is_none());
        self.free = free.map(|(index, _)| index as u32).collect();
    }

    /// All handles.
    pub fn handles(&self) -> Vec<u64> {
        let places = self.places.iter().enumerate();
        let live = places.filter(|(_, (_, object))| object.is_some());
        live.map(|(index, (generation, _))| Handle::new(self.kind, *generation, index as u32).0)
            .collect()
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.places
            .iter_mut()
            .filter_map(|(_, object)| object.as_mut())
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
    pub device: Ordinal,
    /// Who ends it.
    pub owner: Owner,
    /// A capture fills it.
    pub filling: bool,
    /// How large it is.
    pub size: Size,
    /// What is in it, as it was found after its last change.
    pub read: Option<Arc<Read>>,
    /// The description of the session has it so.
    pub written: bool,
    /// The nodes that a capture ended with, if there are several.
    pub sinks: Vec<CUgraphNode>,
    nodes: HashSet<u64>,
}

impl Graph {
    /// Handles of nodes that the client knows.
    pub fn nodes(&self) -> impl Iterator<Item = u64> {
        self.nodes.iter().copied()
    }
}

/// What is in a graph of the driver's.
#[derive(Debug)]
pub struct Read {
    /// In a form that another server can read.
    pub template: Template,
    /// Where each of the driver's nodes is in that.
    pub places: HashMap<CUgraphNode, u32>,
}

/// What an instance does, as far as it is known.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The graph that it was made from or updated with, as that was.
    pub read: Arc<Read>,
    /// Handle of that graph; 0 when it is gone.
    pub graph: u64,
    /// Nodes that do something else in the instance.
    pub changed: BTreeMap<u32, Vec<u8>>,
    /// Nodes that are disabled.
    pub disabled: BTreeSet<u32>,
}

/// A node with a handle.
#[derive(Debug)]
pub struct Node {
    /// The driver's node.
    pub raw: CUgraphNode,
    /// The graph it is in.
    pub graph: u64,
    /// Its share of that graph's parts.
    pub parts: u64,
    /// Graphs in it with handles.
    graphs: Vec<u64>,
}

/// An instance.
#[derive(Debug)]
pub struct Exec {
    /// The driver's instance.
    pub raw: CUgraphExec,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Launching it may print.
    pub prints: bool,
    /// How long it takes.
    pub length: Length,
    /// Of the graph that it was made from.
    pub parts: u64,
    /// The slot of each host node.
    pub slots: Vec<(CUgraphNode, u32)>,
    /// `CUgraphInstantiate_flags` that it was made with.
    pub flags: u64,
    /// What it does; `None` when that cannot be written down.
    pub origin: Option<Origin>,
    /// The description of the session has it so.
    pub written: bool,
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
    /// The same of what is no memory any more once the session's work is done.
    pub leaving: Vec<Charge>,
    /// On which device each block is.
    devices: BTreeMap<u64, Ordinal>,
    /// Numbers of conditions that the session was given, and their graphs.
    pub conditions: HashMap<u64, u64>,
    /// There has been a host node.
    pub hosts: bool,
    /// Slots that instances were ever given: where the GPU may wait for the client.
    pub waits: HashSet<u32>,
    /// Parts of all graphs and instances.
    total: u64,
    /// What was captured, and counts as parts, while some capture goes on.
    pub captured: u64,
    /// What the GPU may wait for in them.
    pub awaited: Awaited,
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
    /// How the session's description is about them.
    saved: Saved,
    /// Variables that nodes name, by their addresses.
    named: HashSet<u64>,
    /// Bytes of the description that each has.
    bytes: HashMap<u64, usize>,
    /// And all together.
    bytes_in_all: usize,
    /// There has been one of which it is not known what is in it: it may name variables.
    unread: bool,
}

/// How the description of a session is about its graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Saved {
    /// It has them all.
    #[default]
    All,
    /// Some have changed since.
    Stale,
    /// They cannot be written down as they are.
    Refused,
}

impl Default for Graphs {
    fn default() -> Self {
        Graphs {
            graphs: Made::new(Kind::Graph, bounds::GRAPHS),
            nodes: Made::new(Kind::GraphNode, bounds::GRAPH_NODES),
            execs: Made::new(Kind::GraphExec, bounds::GRAPH_EXECS),
            captures: Vec::new(),
            memory: Default::default(),
            charges: BTreeMap::new(),
            leaving: Vec::new(),
            devices: BTreeMap::new(),
            conditions: HashMap::new(),
            hosts: false,
            waits: HashSet::new(),
            total: 0,
            captured: 0,
            awaited: Awaited::default(),
            prints: false,
            by_graph: HashMap::new(),
            by_node: HashMap::new(),
            referred: HashSet::new(),
            images: Vec::new(),
            events: Vec::new(),
            saved: Saved::All,
            named: HashSet::new(),
            bytes: HashMap::new(),
            bytes_in_all: 0,
            unread: false,
        }
    }
}

impl Graphs {
    /// Whether nothing is left of any graph.
    pub fn is_untouched(&self) -> bool {
        let none = self.graphs.is_empty() && self.execs.is_empty() && self.captures.is_empty();
        none && self.images.is_empty() && self.events.is_empty() && self.memory.is_empty()
    }

    /// What binds the session to its context.
    pub fn bonds(&self) -> Bonds {
        let is_bound = self.saved == Saved::Refused || self.may_not_be_saved().is_some();
        Bonds::default()
            .with(Bonds::GRAPHS, is_bound && !self.is_untouched())
            .with(Bonds::CHANGED_GRAPHS, self.saved == Saved::Stale)
    }

    /// Whether some have changed since they were written down, and may be now.
    #[inline]
    pub fn are_stale(&self) -> bool {
        self.saved == Saved::Stale && self.may_not_be_saved().is_none()
    }

    /// Why they cannot be written down, whatever is in them.
    pub fn may_not_be_saved(&self) -> Option<&'static str> {
        if !self.captures.is_empty() {
            Some("a stream captures")
        } else if self.hosts {
            Some("they call the client")
        } else if !self.memory.is_empty() {
            Some("they allocate memory")
        } else if !self.conditions.is_empty() {
            Some("they have conditions")
        } else if !self.images.is_empty() || !self.events.is_empty() {
            Some("they refer to what the client has destroyed")
        } else {
            None
        }
    }

    /// The description has them all, or cannot.
    pub fn note_saved(&mut self, saved: bool) {
        self.saved = match saved {
            true => Saved::All,
            false => Saved::Refused,
        };
    }

    /// A graph has changed, or is about to; so have those that it is in.
    pub fn touch(&mut self, graph: u64) {
        for of in self.around(graph) {
            if let Ok(graph) = self.graphs.get_mut(of) {
                (graph.read, graph.written) = (None, false);
            }
        }
        self.note_stale();
    }

    /// A graph or an instance is not as the description has it.
    pub fn note_stale(&mut self) {
        self.saved = Saved::Stale;
    }

    /// An instance does something else now: at this node, or nobody can tell what.
    pub fn touch_exec(&mut self, exec: u64, change: impl FnOnce(&mut Origin) -> Option<()>) {
        if let Ok(exec) = self.execs.get_mut(exec) {
            exec.written = false;
            if exec.origin.as_mut().and_then(change).is_none() {
                exec.origin = None;
            }
        }
        self.note_stale();
    }

    /// An instance was updated with a graph.
    pub fn update_origin(&mut self, exec: u64, now: Option<Origin>) {
        let source = self.execs.get(exec).ok();
        let source = source
            .and_then(|exec| exec.origin.as_ref())
            .map(|origin| origin.graph);
        // Its nodes are still known by the graph that it was made from, if there is that.
        let same = |now: &Origin| source == Some(0) || source == Some(now.graph);
        let now = now.filter(same).map(|now| Origin {
            graph: if source == Some(0) { 0 } else { now.graph },
            ..now
        });
        if let Ok(exec) = self.execs.get_mut(exec) {
            (exec.origin, exec.written) = (now, false);
        }
        self.note_stale();
    }

    /// There is a graph or an instance of which it is not known what is in it.
    pub fn note_unread(&mut self) {
        self.unread = true;
    }

    /// A node of one names the variable at this address.
    pub fn note_named(&mut self, variable: u64) {
        self.named.insert(variable);
    }

    /// Whether a launch of one may use the variable at this address.
    pub fn may_name(&self, variable: u64) -> bool {
        self.unread || self.named.contains(&variable)
    }

    /// Bytes of the description that graphs and instances have, but for this one.
    pub fn bytes_but(&self, key: u64) -> usize {
        self.bytes_in_all - self.bytes.get(&key).copied().unwrap_or_default()
    }

    /// The description has so many bytes of this graph or instance.
    pub fn note_bytes(&mut self, key: u64, bytes: usize) {
        self.forget_bytes(key);
        self.bytes.insert(key, bytes);
        self.bytes_in_all += bytes;
    }

    /// The description has nothing of it any more.
    pub fn forget_bytes(&mut self, key: u64) {
        self.bytes_in_all -= self.bytes.remove(&key).unwrap_or_default();
    }

    /// Puts a graph where it was in the server before, with these nodes: handle, the driver's node, parts.
    ///
    /// # Errors
    /// As [`Made::restore`]; `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn restore_graph(
        &mut self,
        (handle, raw): (u64, CUgraph),
        (device, size): (Ordinal, Size),
        read: Arc<Read>,
        sinks: Vec<CUgraphNode>,
        nodes: impl Iterator<Item = (u64, CUgraphNode, u64)>,
    ) -> Result<(), CUresult> {
        self.hold(size.parts)?;
        let graph = Graph {
            raw,
            device,
            owner: Owner::Client,
            filling: false,
            size,
            read: Some(read),
            written: true,
            sinks,
            nodes: HashSet::new(),
        };
        self.graphs.restore(handle, graph)?;
        self.by_graph.insert(raw, handle);
        for (node, raw, parts) in nodes {
            let own = Node {
                raw,
                graph: handle,
                parts,
                graphs: Vec::new(),
            };
            self.nodes.restore(node, own)?;
            self.by_node.insert(raw, node);
            self.graphs.get_mut(handle)?.nodes.insert(node);
        }
        Ok(())
    }

    /// All that the server before had are back.
    pub fn restored(&mut self) {
        self.graphs.restored();
        self.nodes.restored();
        self.execs.restored();
        self.saved = Saved::All;
    }

    /// Whether a graph of the driver's has a handle.
    pub fn has_graph(&self, raw: CUgraph) -> bool {
        self.by_graph.contains_key(&raw)
    }

    /// The handle of a graph of the driver's, made if there is none.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn graph_handle(
        &mut self,
        raw: CUgraph,
        device: Ordinal,
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
            size: Size {
                parts: 0,
                height: 1,
            },
            read: None,
            written: false,
            sinks: Vec::new(),
            nodes: HashSet::new(),
        })?;
        self.note_stale();
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
            parts: 1,
            graphs: Vec::new(),
        })?;
        self.by_node.insert(raw, handle);
        let graph = self.graphs.get_mut(graph)?;
        graph.nodes.insert(handle);
        graph.written = false;
        self.note_stale();
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

    /// The graph, and those that it is in, from the inside out.
    fn around(&self, graph: u64) -> Vec<u64> {
        let mut around = vec![graph];
        let mut at = graph;
        while let Ok(Owner::Node(node)) = self.graphs.get(at).map(|graph| graph.owner)
            && let Ok(node) = self.nodes.get(node)
            && around.len() <= bounds::GRAPH_DEPTH
        {
            at = node.graph;
            around.push(at);
        }
        around
    }

    /// A graph is about to get this much more in it.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when that is too much; nothing is counted then.
    pub fn grow(&mut self, graph: u64, by: Size) -> Result<(), CUresult> {
        let around = self.around(graph);
        let parts = |of: u64| self.graphs.get(of).map_or(0, |graph| graph.size.parts);
        let too_large = around
            .iter()
            .any(|of| parts(*of).saturating_add(by.parts) > bounds::GRAPH_PARTS);
        if too_large || around.len() + by.height > bounds::GRAPH_DEPTH {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.hold(by.parts)?;
        self.touch(graph);
        for (inside, of) in around.into_iter().enumerate() {
            if let Ok(graph) = self.graphs.get_mut(of) {
                graph.size.parts += by.parts;
                graph.size.height = graph.size.height.max(inside + 1 + by.height);
            }
        }
        Ok(())
    }

    /// A graph has less in it.
    pub fn shrink(&mut self, graph: u64, parts: u64) {
        self.touch(graph);
        for of in self.around(graph) {
            if let Ok(graph) = self.graphs.get_mut(of) {
                graph.size.parts = graph.size.parts.saturating_sub(parts);
            }
        }
        self.let_go(parts);
    }

    /// Counts parts of what is about to be made.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when there are too many.
    pub fn hold(&mut self, parts: u64) -> Result<(), CUresult> {
        let total = self.total.saturating_add(parts);
        if total.saturating_add(self.captured) > bounds::GRAPHS_PARTS {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.total = total;
        Ok(())
    }

    /// Parts are gone.
    pub fn let_go(&mut self, parts: u64) {
        self.total = self.total.saturating_sub(parts);
    }

    /// Counts what is about to get into a capture.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when that is too much.
    #[cold]
    pub fn capture(&mut self, parts: u64) -> Result<(), CUresult> {
        let captured = self.captured.saturating_add(parts);
        if captured > bounds::GRAPH_PARTS
            || self.total.saturating_add(captured) > bounds::GRAPHS_PARTS
        {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.captured = captured;
        Ok(())
    }

    /// A capture into a graph has ended: what was captured is there now, of all captures that go on, to be sure.
    pub fn captured_into(&mut self, graph: u64) {
        self.touch(graph);
        let captured = self.captured;
        if let Ok(graph) = self.graphs.get_mut(graph) {
            graph.size.parts = graph.size.parts.saturating_add(captured);
            // Instances that were captured are graphs inside.
            graph.size.height = graph.size.height.max(2);
            self.total = self.total.saturating_add(captured);
        }
        if self.captures.is_empty() {
            self.captured = 0;
        }
    }

    /// Whether a graph is another one, or belongs to a node inside it.
    pub fn is_inside(&self, graph: u64, outer: u64) -> bool {
        let mut at = graph;
        while at != outer {
            let owner = self.graphs.get(at).map(|graph| graph.owner);
            let Ok(Owner::Node(node)) = owner else {
                return false;
            };
            let Ok(node) = self.nodes.get(node) else {
                return false;
            };
            at = node.graph;
        }
        true
    }

    /// Whether a capture fills a graph or one inside it. The driver would go on to fill it after it was freed.
    pub fn is_filled(&self, graph: u64) -> bool {
        let filled = |capture: &Capture| self.is_inside(capture.graph, graph);
        self.captures.iter().any(filled) || self.graphs.get(graph).is_ok_and(|graph| graph.filling)
    }

    /// Whether a capture fills a graph inside a node.
    pub fn is_filled_inside(&self, node: u64) -> bool {
        let filled = |node: &Node| node.graphs.iter().any(|graph| self.is_filled(*graph));
        self.nodes.get(node).is_ok_and(filled)
    }

    /// The graph belongs to a node from now on.
    pub fn move_into(&mut self, graph: u64, node: u64) {
        self.touch(graph);
        if let Ok(moved) = self.graphs.get(graph) {
            // It counts as part of the other.
            self.total = self.total.saturating_sub(moved.size.parts);
        }
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
        for exec in self.execs.iter_mut() {
            if let Some(origin) = &mut exec.origin
                && origin.graph == handle
            {
                origin.graph = 0;
                exec.written = false;
                self.saved = Saved::Stale;
            }
        }
        self.by_graph.remove(&graph.raw);
        self.forget_bytes(handle);
        if !matches!(graph.owner, Owner::Node(_)) {
            self.let_go(graph.size.parts);
        }
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
        self.touch(graph);
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
    pub fn release(&mut self, gpu: &Gpu) -> (Vec<Image>, Vec<Event>) {
        let driver = &gpu.driver.graph;
        for exec in self.execs.drain() {
            let _ = gpu.devices[exec.device].make_current(&gpu.driver);
            let _ = driver.exec_destroy(exec.raw);
        }
        for graph in self.graphs.drain() {
            if graph.owner == Owner::Client {
                let _ = gpu.devices[graph.device].make_current(&gpu.driver);
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

    /// Frees what launches of allocating nodes have left. The session has ended.
    pub fn free_memory(&mut self, gpu: &Gpu) {
        let left = std::mem::take(&mut self.devices);
        let any = !left.is_empty();
        for (start, device) in left {
            pools::free(gpu, start, device);
        }
        if any {
            gpu.graph_turns.note_left();
        }
    }

    /// A node of a graph gives memory of a device.
    pub fn given(&mut self, (start, len): (u64, u64), graph: u64, device: Ordinal) {
        self.memory.given(start, len, graph);
        self.devices.insert(start, device);
    }

    /// Counts the memory that an instance allocates, each block on its device.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`; nothing more is counted then.
    pub fn charge(&mut self, account: &Account, exec: u64) -> Result<(), CUresult> {
        let mut taken = Vec::new();
        for (start, len) in self.memory.of(exec) {
            let device = self.devices.get(&start).copied();
            if let (false, Some(device)) = (self.charges.contains_key(&start), device) {
                taken.push((start, account.take(Memory::Device(device), len)?));
            }
        }
        self.charges.extend(taken);
        Ok(())
    }

    /// Counts no more what is no memory any more.
    pub fn discharge(&mut self) {
        let memory = &self.memory;
        self.devices.retain(|start, _| memory.begins(*start));
        let mut gone: Vec<u64> = self.charges.keys().copied().collect();
        gone.retain(|start| !memory.begins(*start));
        for start in gone {
            self.leaving.extend(self.charges.remove(&start));
        }
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
    fn what_is_inside_counts_as_often_as_it_is_there() {
        let mut graphs = Graphs::default();
        let mut make = |raw: u64| {
            graphs
                .graph_handle(CUgraph(raw), Ordinal::of_test(0), Owner::Client)
                .unwrap()
        };
        let (outer, middle, inner) = (make(1), make(2), make(3));
        let size = |parts, height| Size { parts, height };
        graphs.grow(inner, size(5, 0)).unwrap();
        // Bodies of conditional nodes are filled inside their graphs.
        let node = graphs.node_handle(CUgraphNode(10), outer).unwrap();
        graphs.grow(outer, size(1, 1)).unwrap();
        graphs.move_into(middle, node);
        let deep = graphs.node_handle(CUgraphNode(20), middle).unwrap();
        graphs.grow(middle, size(6, 1)).unwrap();
        graphs.move_into(inner, deep);
        let size_of = |graphs: &Graphs, graph| graphs.graphs.get(graph).unwrap().size;
        assert_eq!(size_of(&graphs, outer), size(7, 3));
        assert_eq!(size_of(&graphs, middle), size(6, 2));
        assert_eq!(graphs.total, 7, "once, in the outermost");
        let refused = Err(CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(
            graphs.grow(inner, size(bounds::GRAPH_PARTS - 6, 0)),
            refused
        );
        assert_eq!(
            graphs.grow(inner, size(1, bounds::GRAPH_DEPTH - 2)),
            refused
        );
        assert_eq!(graphs.grow(inner, size(u64::MAX, 0)), refused);
        graphs
            .grow(
                inner,
                size(bounds::GRAPH_PARTS - 7, bounds::GRAPH_DEPTH - 3),
            )
            .unwrap();
        graphs.shrink(inner, bounds::GRAPH_PARTS - 7);
        assert_eq!(size_of(&graphs, outer).parts, 7);
        graphs.forget_graph(outer);
        assert_eq!(graphs.total, 0);
    }

    #[test]
    fn a_session_has_so_many_parts_and_captures_count() {
        let mut graphs = Graphs::default();
        let refused = Err(CUDA_ERROR_OUT_OF_MEMORY);
        graphs.hold(bounds::GRAPHS_PARTS - 10).unwrap();
        assert_eq!(graphs.capture(11), refused);
        graphs.capture(10).unwrap();
        assert_eq!(graphs.hold(1), refused, "what is captured counts");
        graphs.let_go(bounds::GRAPHS_PARTS - 10);
        assert_eq!(graphs.capture(bounds::GRAPH_PARTS - 9), refused);
        let made = graphs
            .graph_handle(CUgraph(1), Ordinal::of_test(0), Owner::Client)
            .unwrap();
        graphs.captured_into(made);
        assert_eq!((graphs.total, graphs.captured), (10, 0));
        graphs.forget_graph(made);
        assert_eq!(graphs.total, 0);
    }

    #[test]
    fn memory_of_a_node_counts_on_its_own_device() {
        let (mut graphs, account) = (Graphs::default(), Account::default());
        let on = |device| Memory::Device(Ordinal::of_test(device));
        account.lower_limit(on(2), 100);
        graphs.given((0x1000, 64), 1, Ordinal::of_test(2));
        graphs.given((0x2000, 32), 1, Ordinal::of_test(0));
        graphs.memory.share(1, 10);
        graphs.charge(&account, 10).unwrap();
        let held = |account: &Account| [0, 1, 2].map(|device| account.held(on(device)));
        assert_eq!(held(&account), [32, 0, 64]);
        graphs.given((0x3000, 37), 2, Ordinal::of_test(2));
        graphs.memory.share(2, 20);
        assert_eq!(graphs.charge(&account, 20), Err(CUDA_ERROR_OUT_OF_MEMORY));
        graphs.memory.ended(1);
        graphs.memory.ended(10);
        graphs.discharge();
        assert_eq!(held(&account), [32, 0, 64], "a launch may still go on");
        graphs.leaving.clear();
        assert_eq!(held(&account), [0; 3]);
    }

    #[test]
    fn handles_are_put_back_and_others_do_not_take_their_places() {
        let mut before: Made<u32> = Made::new(Kind::Graph, 8);
        let handles: Vec<u64> = (0..4).map(|at| before.insert(at).unwrap()).collect();
        before.remove(handles[1]);
        before.remove(handles[2]);
        let again = before.insert(9).unwrap();
        let mut after: Made<u32> = Made::new(Kind::Graph, 8);
        for (handle, object) in [(handles[3], 3), (again, 9), (handles[0], 0)] {
            after.restore(handle, object).unwrap();
        }
        let refused = Err(CUDA_ERROR_INVALID_VALUE);
        assert_eq!(after.restore(again, 1), refused, "taken");
        let other = Handle::new(Kind::GraphExec, 0, 5).0;
        assert_eq!(after.restore(other, 1), refused);
        let far = Handle::new(Kind::Graph, 0, 8).0;
        assert_eq!(after.restore(far, 1), refused);
        after.restored();
        assert_eq!(after.handles(), before.handles());
        assert_eq!((after.get(again), after.get(handles[3])), (Ok(&9), Ok(&3)));
        let new: Vec<u64> = (0..5).map(|at| after.insert(at).unwrap()).collect();
        assert!(new.iter().all(|new| after.handles().contains(new)));
        assert_eq!(after.handles().len(), 8);
        assert_eq!(after.insert(0), Err(CUDA_ERROR_OUT_OF_MEMORY));
    }

    #[test]
    fn what_is_in_a_graph_dies_with_it() {
        let mut graphs = Graphs::default();
        let outer = graphs
            .graph_handle(CUgraph(1), Ordinal::of_test(0), Owner::Client)
            .unwrap();
        let node = graphs.node_handle(CUgraphNode(10), outer).unwrap();
        let inner = graphs
            .graph_handle(CUgraph(2), Ordinal::of_test(0), Owner::Node(node))
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
