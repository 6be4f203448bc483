//! Handle tables of a session's graphs, graph nodes and graph instances.
//!
//! The objects themselves live in the driver. A client's handle is created here when the object becomes known, for
//! example when the client asks for the nodes of a captured graph. If the driver frees an object together with its
//! graph or node (the nodes of a graph, the child graphs of a node), its handle is invalidated here at the same time,
//! so that a freed pointer is never passed to the driver.

use crate::engine::base::account::{Account, Charge, Memory};
use crate::engine::base::bounds;
use crate::engine::base::graph_templates::{Condition, Size, Template};
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

/// Table of objects whose handles the server assigns.
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

    /// Adds an object and returns its handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the table has reached its limit.
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

    /// Returns the object of a valid handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the handle is not valid, as the driver returns for an unknown graph.
    pub fn get(&self, handle: u64) -> Result<&T, CUresult> {
        self.index(handle)
            .and_then(|index| self.places[index].1.as_ref())
            .ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Returns the object of a valid handle mutably.
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

    /// Removes the object of a valid handle and returns it.
    pub fn remove(&mut self, handle: u64) -> Option<T> {
        let index = self.index(handle)?;
        let place = &mut self.places[index];
        // A slot whose generations are used up is retired, so that a stale handle can never become valid again.
        if place.0 < u16::MAX {
            place.0 += 1;
            self.free.push(index as u32);
        }
        place.1.take()
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.places.iter().filter_map(|(_, object)| object.as_ref())
    }

    /// Whether the table has no objects.
    pub fn is_empty(&self) -> bool {
        self.free.len() >= self.places.len() || self.places.iter().all(|(_, o)| o.is_none())
    }

    /// Restores an object under the handle that it had in the previous server.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the handle is of another kind, beyond the limit, or in use.
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

    /// Rebuilds the free list after all objects were restored, so that the unused slots between them are assigned
    /// again.
    fn restored(&mut self) {
        let places = self.places.iter().enumerate();
        let free = places.filter(|(_, (_, object))| object.is_none());
        self.free = free.map(|(index, _)| index as u32).collect();
    }

    /// Returns the handles of all objects.
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

/// Determines who destroys a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The client destroys it.
    Client,
    /// It is destroyed with the node that contains it.
    Node(u64),
    /// A capture fills it; it becomes the client's when the capture ends.
    Capture,
}

/// A graph.
#[derive(Debug)]
pub struct Graph {
    /// The driver's graph.
    pub raw: CUgraph,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Determines who destroys it.
    pub owner: Owner,
    /// Whether a capture is adding nodes to it.
    pub filling: bool,
    /// Its node count and nesting depth.
    pub size: Size,
    /// Its content as of the last change, if it has been read from the driver since then.
    pub read: Option<Arc<Read>>,
    /// Its content as it was read last, if it may have changed since.
    before: Option<Arc<Read>>,
    /// Whether the session's description contains it in its current state.
    pub written: bool,
    /// The leaf nodes with which a capture ended, if there are several.
    pub sinks: Vec<CUgraphNode>,
    /// Conditional handles of it and of the bodies inside it, in the order of their creation. The driver numbers them
    /// for each graph, and does not reveal them.
    pub conditions: Vec<Condition>,
    nodes: HashSet<u64>,
}

impl Graph {
    /// Returns the handles of its nodes that the client knows.
    pub fn nodes(&self) -> impl Iterator<Item = u64> {
        self.nodes.iter().copied()
    }

    /// Marks its content as not read: it has changed, or may have.
    fn touch(&mut self) {
        let read = self.read.take();
        self.before = read.or(self.before.take());
        self.written = false;
    }

    /// Takes its content as it was read from the driver. Returns it, or the content that was read before if the graph has not
    /// changed since: instances are known to have been made of that one.
    pub fn note_read(&mut self, read: Read) -> Arc<Read> {
        let before = self.before.take().filter(|before| before.is_same(&read));
        let read = before.unwrap_or_else(|| Arc::new(read));
        self.read.insert(read).clone()
    }
}

/// Content of a driver graph.
#[derive(Debug)]
pub struct Read {
    /// The content in a form that another server can read.
    pub template: Template,
    /// Position of each of the driver's nodes among the nodes of the template's layers.
    pub places: HashMap<CUgraphNode, u32>,
    /// Handles of the bodies of conditional nodes, in the order of the template's layers.
    pub bodies: Vec<u64>,
}

impl Read {
    /// The driver's nodes by position.
    pub fn nodes(&self) -> HashMap<u32, CUgraphNode> {
        self.places
            .iter()
            .map(|(node, place)| (*place, *node))
            .collect()
    }

    /// Whether another reading shows the same nodes with the same content. The order of the driver's nodes may differ: in a
    /// graph of an earlier server they have the order of [`Template::order`].
    fn is_same(&self, other: &Read) -> bool {
        let mut places = vec![u32::MAX; other.places.len()];
        for (node, at) in &other.places {
            let (Some(place), Some(own)) = (places.get_mut(*at as usize), self.places.get(node))
            else {
                return false;
            };
            *place = *own;
        }
        self.bodies == other.bodies && self.template.is_same(&other.template, &places)
    }
}

/// The known content of a graph instance.
#[derive(Clone, Debug)]
pub struct Origin {
    /// Content of the source graph at the time of instantiation or of the last update from it.
    pub read: Arc<Read>,
    /// Handle of the source graph; 0 if it was destroyed.
    pub graph: u64,
    /// Nodes whose parameters in the instance differ from the source graph, by position as in [`Read::places`], with the
    /// message that set them.
    pub changed: BTreeMap<u32, Vec<u8>>,
    /// Nodes that are disabled in the instance.
    pub disabled: BTreeSet<u32>,
    /// Content of another graph that the instance was updated from, before these changes. Handles of nodes are still those of
    /// the source graph.
    pub updated: Option<Template>,
}

impl Origin {
    /// Whether a launch may call the client or operate on words in memory.
    pub fn calls_or_waits(&self) -> bool {
        let mut templates = std::iter::once(&self.read.template).chain(&self.updated);
        templates.any(Template::calls_or_waits)
    }

    /// The content after an update from the graph of `now`; `None` if that is not known. Nodes that are disabled stay so, as
    /// natively.
    fn updated_from(self, now: Origin) -> Option<Origin> {
        if self.graph == 0 || self.graph == now.graph {
            return Some(Origin {
                graph: self.graph,
                disabled: self.disabled_in(&now.read)?,
                ..now
            });
        }
        let is_conditional = self.read.template.is_conditional();
        (!is_conditional).then(|| Origin {
            read: self.read,
            graph: self.graph,
            disabled: self.disabled,
            updated: Some(now.read.template.clone()),
            ..now
        })
    }

    /// The disabled nodes by their positions in another reading: of the same graph, or of one with nodes of the same kinds and
    /// dependencies in the same order. `None` if that cannot be told.
    fn disabled_in(&self, now: &Read) -> Option<BTreeSet<u32>> {
        if self.disabled.is_empty() {
            return Some(BTreeSet::new());
        }
        if self.graph == 0 {
            let same = self.read.template.has_shape_of(&now.template);
            return same.then(|| self.disabled.clone());
        }
        let nodes = self.read.nodes();
        let place_of = |place: &u32| now.places.get(nodes.get(place)?).copied();
        self.disabled.iter().map(place_of).collect()
    }
}

/// A graph node with a handle.
#[derive(Debug)]
pub struct Node {
    /// The driver's node.
    pub raw: CUgraphNode,
    /// Handle of the graph that contains it.
    pub graph: u64,
    /// Number of the graph's nodes and edges that this node accounts for.
    pub parts: u64,
    /// Parameters of a conditional node, which the driver does not reveal.
    pub conditional: Option<Conditional>,
    /// Handles of the child graphs inside it.
    graphs: Vec<u64>,
}

impl Node {
    /// Returns the handles of the graphs inside it, in the driver's order.
    pub fn graphs(&self) -> &[u64] {
        &self.graphs
    }
}

/// Parameters of a conditional node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conditional {
    /// Server's ordinal of the device.
    pub device: u32,
    /// The client's message, without addresses.
    pub does: Vec<u8>,
}

/// A graph of the previous server, or the body of a conditional node in it.
#[derive(Debug)]
pub struct Restored {
    /// The client's handle.
    pub handle: u64,
    /// The driver's graph.
    pub raw: CUgraph,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Its size.
    pub size: Size,
    /// The conditional node that contains it; null for the graph itself.
    pub inside: CUgraphNode,
    /// As [`Graph::sinks`].
    pub sinks: Vec<CUgraphNode>,
    /// The nodes with handles.
    pub nodes: Vec<RestoredNode>,
}

/// A node of a [`Restored`] graph.
#[derive(Debug)]
pub struct RestoredNode {
    /// The client's handle.
    pub handle: u64,
    /// The driver's node.
    pub raw: CUgraphNode,
    /// As [`Node::parts`].
    pub parts: u64,
    /// As [`Node::conditional`].
    pub conditional: Option<Conditional>,
}

/// A graph instance (`CUgraphExec`).
#[derive(Debug)]
pub struct Exec {
    /// The driver's instance.
    pub raw: CUgraphExec,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Whether a kernel that it launches may call `printf`.
    pub prints: bool,
    /// How long a launch takes, as last measured.
    pub length: Length,
    /// Part of the device that its kernels can fill, on average; `None` if there are none.
    pub fill: Option<f32>,
    /// Number of nodes and edges of the source graph.
    pub parts: u64,
    /// The flag slot of each host node.
    pub slots: Vec<(CUgraphNode, u32)>,
    /// `CUgraphInstantiate_flags` with which it was instantiated.
    pub flags: u64,
    /// Its content; `None` if that cannot be serialized.
    pub origin: Option<Origin>,
    /// Whether its launch may call the client or operate on words in memory, which must not happen twice.
    pub calls_or_waits: bool,
    /// Whether it has conditional nodes.
    pub is_conditional: bool,
    /// Whether the session's description contains it in its current state.
    pub written: bool,
}

/// A capture in progress.
#[derive(Debug)]
pub struct Capture {
    /// The stream on which it was begun.
    pub stream: u64,
    /// The graph that it fills, if the client has a handle of that graph.
    pub graph: u64,
}

/// The graphs of a session, and the objects and resources that they use.
#[derive(Debug)]
pub struct Graphs {
    /// Graphs by handle.
    pub graphs: Made<Graph>,
    /// Nodes by handle.
    pub nodes: Made<Node>,
    /// Instances by handle.
    pub execs: Made<Exec>,
    /// Captures in progress.
    pub captures: Vec<Capture>,
    /// Memory of allocation nodes.
    pub memory: GraphMemory,
    /// Memory charges by address: blocks that an instance allocates or that a launch has left allocated.
    pub charges: BTreeMap<u64, Charge>,
    /// Charges for blocks that no longer exist, kept until the session's work in flight is done.
    pub leaving: Vec<Charge>,
    /// Device of each block, by address.
    devices: BTreeMap<u64, Ordinal>,
    /// Whether any graph has ever had a host node.
    pub hosts: bool,
    /// Every flag slot ever assigned to an instance: the GPU may be waiting for the client at any of them.
    pub waits: HashSet<u32>,
    /// Number of nodes and edges in all graphs and instances.
    total: u64,
    /// Number of conditional handles of all graphs.
    conditions: usize,
    /// Number of nodes and edges recorded by the captures in progress.
    pub captured: u64,
    /// Memory words for which wait nodes may be waiting on the GPU.
    pub awaited: Awaited,
    /// Whether a kernel that may call `printf` was added to any graph.
    pub prints: bool,
    /// One of them may have been captured in a part of a device.
    parted: bool,
    /// Whether any graph has ever referred to an event.
    has_events: bool,
    by_graph: HashMap<CUgraph, u64>,
    by_node: HashMap<CUgraphNode, u64>,
    /// Handles of images and events that graphs may reference.
    referred: HashSet<u64>,
    /// Modules and libraries that were unloaded while a graph might still reference them.
    images: Vec<Image>,
    /// Events that were destroyed while a graph might still reference them.
    events: Vec<Event>,
    /// Whether the session's description covers its graphs.
    saved: Saved,
    /// Addresses of the variables that nodes reference.
    named: HashSet<u64>,
    /// Size of each graph or instance in the session's description, in bytes.
    bytes: HashMap<u64, usize>,
    /// Sum of `bytes`.
    bytes_in_all: usize,
    /// Graphs in the session's description that no longer exist.
    gone: Vec<u64>,
    /// Whether the content of any graph or instance has ever been unknown. It may then reference any variable.
    unread: bool,
    /// The ranges of addresses of copies and memsets in the session's description, see [`Graphs::written_ranges`]; `None`: not
    /// collected.
    ranges: Option<Vec<(u64, u64)>>,
    /// Whether memory of such a copy or memset was freed since the last save.
    lacks_memory: bool,
}

/// Whether the session's description covers its graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Saved {
    /// It contains all of them in their current state.
    #[default]
    All,
    /// Some have changed since they were saved.
    Stale,
    /// They cannot be serialized in their current state.
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
            hosts: false,
            waits: HashSet::new(),
            total: 0,
            conditions: 0,
            captured: 0,
            awaited: Awaited::default(),
            prints: false,
            parted: false,
            has_events: false,
            by_graph: HashMap::new(),
            by_node: HashMap::new(),
            referred: HashSet::new(),
            images: Vec::new(),
            events: Vec::new(),
            saved: Saved::All,
            named: HashSet::new(),
            bytes: HashMap::new(),
            bytes_in_all: 0,
            gone: Vec::new(),
            unread: false,
            ranges: None,
            lacks_memory: false,
        }
    }
}

impl Graphs {
    /// Whether the session has no graph, instance or capture, and no image, event or memory kept for one.
    pub fn is_untouched(&self) -> bool {
        let none = self.graphs.is_empty() && self.execs.is_empty() && self.captures.is_empty();
        none && self.images.is_empty() && self.events.is_empty() && self.memory.is_empty()
    }

    /// Notes that a stream captures. If it is in a part of a device, kernels of the graph run in that part, which the description
    /// of a graph does not name.
    pub fn note_capture(&mut self, in_part: bool) {
        self.parted = in_part || self.parted && !self.is_untouched();
    }

    /// Returns the bonds by which graphs tie the session to its context.
    pub fn bonds(&self) -> Bonds {
        let is_bound = self.saved == Saved::Refused || self.may_not_be_saved().is_some();
        Bonds::default()
            .with(Bonds::GRAPHS, is_bound && !self.is_untouched())
            .with(Bonds::PARTITIONS, self.parted && !self.is_untouched())
            .with(Bonds::CHANGED_GRAPHS, self.saved == Saved::Stale)
    }

    /// Whether graphs have changed since they were last saved and can be saved now.
    #[inline]
    pub fn are_stale(&self) -> bool {
        self.saved == Saved::Stale && self.may_not_be_saved().is_none()
    }

    /// Returns why graphs cannot be saved regardless of their content, if that is so.
    pub fn may_not_be_saved(&self) -> Option<&'static str> {
        if !self.captures.is_empty() {
            Some("a stream captures")
        } else if !self.memory.is_empty() {
            Some("they allocate memory")
        } else {
            None
        }
    }

    /// Records the outcome of saving: the description contains all graphs, or cannot.
    pub fn note_saved(&mut self, saved: bool) {
        self.saved = match saved {
            true => Saved::All,
            false => Saved::Refused,
        };
        self.lacks_memory &= !saved;
    }

    /// Records that the memory at these addresses is being freed. Graphs that copy or set it are to be saved again; returns
    /// whether there are any.
    pub fn note_freed(&mut self, start: u64, len: u64) -> bool {
        if !self.any() {
            return false;
        }
        // Content that is not saved yet is checked when it is.
        self.lacks_memory |= self.saved == Saved::Stale;
        let ranges = self.ranges.take().unwrap_or_else(|| self.written_ranges());
        let before = ranges.partition_point(|(from, _)| *from < start.saturating_add(len));
        let refers = before > 0 && ranges[before - 1].1 > start;
        self.ranges = Some(ranges);
        if refers {
            self.lacks_memory = true;
            self.read_again();
        }
        refers
    }

    /// Makes a saved graph name this address.
    #[cfg(test)]
    pub fn name_memory(&mut self, address: u64) {
        self.note_saved(true);
        self.ranges = Some(vec![(address, address + 1)]);
    }

    /// The ranges of addresses in saved content, by their starts; each with the largest end up to there.
    fn written_ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        let graphs = self.graphs.iter().filter(|graph| graph.written);
        for read in graphs.filter_map(|graph| graph.read.as_ref()) {
            read.template.append_ranges(&mut ranges);
        }
        let execs = self.execs.iter().filter(|exec| exec.written);
        for origin in execs.filter_map(|exec| exec.origin.as_ref()) {
            let templates = std::iter::once(&origin.read.template).chain(&origin.updated);
            templates.for_each(|template| template.append_ranges(&mut ranges));
            if origin.changed.is_empty() {
                continue;
            }
            let nodes = origin.read.template.all_nodes();
            for (place, does) in &origin.changed {
                if let Some(node) = nodes.get(*place as usize) {
                    node.append_ranges(does, &mut ranges);
                }
            }
        }
        ranges.sort_unstable();
        ranges.dedup();
        let mut largest = 0;
        for (_, end) in &mut ranges {
            largest = largest.max(*end);
            *end = largest;
        }
        ranges
    }

    /// Marks a graph that has changed or is about to, and all graphs that contain it, as unsaved.
    pub fn touch(&mut self, graph: u64) {
        for of in self.around(graph) {
            if let Ok(graph) = self.graphs.get_mut(of) {
                graph.touch();
            }
        }
        self.note_stale();
    }

    /// Records that a graph or an instance differs from its state in the session's description.
    pub fn note_stale(&mut self) {
        self.saved = Saved::Stale;
    }

    /// Records a change to an instance. `change` returns `None` if the resulting content is unknown.
    pub fn touch_exec(&mut self, exec: u64, change: impl FnOnce(&mut Origin) -> Option<()>) {
        if let Ok(exec) = self.execs.get_mut(exec) {
            exec.written = false;
            if exec.origin.as_mut().and_then(change).is_none() {
                exec.origin = None;
            }
        }
        self.note_stale();
    }

    /// Records that an instance was updated from a graph whose content is `now`; `None` if that content is unknown.
    pub fn update_origin(&mut self, exec: u64, now: Option<Origin>) {
        if let Ok(exec) = self.execs.get_mut(exec) {
            let both = exec.origin.take().zip(now);
            exec.origin = both.and_then(|(before, now)| before.updated_from(now));
            exec.calls_or_waits = exec.origin.as_ref().is_none_or(Origin::calls_or_waits);
            exec.written = false;
        }
        self.note_stale();
    }

    /// Records that the content of some graph or instance is unknown.
    pub fn note_unread(&mut self) {
        self.unread = true;
    }

    /// Records that a node references the variable at this address.
    pub fn note_named(&mut self, variable: u64) {
        self.named.insert(variable);
    }

    /// Whether launching any instance may access the variable at this address.
    pub fn may_name(&self, variable: u64) -> bool {
        self.unread || self.named.contains(&variable)
    }

    /// Whether some graph may name a variable that the client knows. Those of a graph that has changed are not known yet.
    pub fn may_name_any(&self) -> bool {
        self.unread || !self.named.is_empty() || self.saved != Saved::All
    }

    /// Size of all graphs and instances except this one in the session's description, in bytes.
    pub fn bytes_but(&self, key: u64) -> usize {
        self.bytes_in_all - self.bytes.get(&key).copied().unwrap_or_default()
    }

    /// Records the size of this graph or instance in the session's description, in bytes.
    pub fn note_bytes(&mut self, key: u64, bytes: usize) {
        self.forget_bytes(key);
        self.ranges = None;
        self.bytes.insert(key, bytes);
        self.bytes_in_all += bytes;
    }

    /// The record of a graph, if there is one, is to be ended.
    fn end_record(&mut self, graph: u64) {
        if self.bytes.contains_key(&graph) {
            self.forget_bytes(graph);
            self.gone.push(graph);
        }
    }

    /// Returns the graphs of which records are to be ended.
    pub fn take_gone(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.gone)
    }

    /// Records that the session's description no longer contains this graph or instance.
    pub fn forget_bytes(&mut self, key: u64) {
        self.bytes_in_all -= self.bytes.remove(&key).unwrap_or_default();
    }

    /// Restores a graph and the bodies in it, in the order of the template's layers, under the handles that they had in
    /// the previous server.
    ///
    /// # Errors
    /// As [`Made::restore`]; `CUDA_ERROR_INVALID_VALUE` for a body whose node has no handle; `CUDA_ERROR_OUT_OF_MEMORY`
    /// if the session has too many nodes and edges.
    pub fn restore_graph(
        &mut self,
        layers: Vec<Restored>,
        read: &Arc<Read>,
    ) -> Result<(), CUresult> {
        for layer in layers {
            let handle = layer.handle;
            let is_body = !layer.inside.is_null();
            let owner = match is_body {
                // Its parts are counted with the containing graph.
                true => Owner::Node(self.put_inside(handle, layer.inside)?),
                false => {
                    self.hold(layer.size.parts)?;
                    Owner::Client
                }
            };
            let graph = Graph {
                raw: layer.raw,
                device: layer.device,
                owner,
                filling: false,
                size: layer.size,
                read: (!is_body).then(|| Arc::clone(read)),
                before: None,
                written: !is_body,
                sinks: layer.sinks,
                conditions: match is_body {
                    true => Vec::new(),
                    false => read.template.conditions.clone(),
                },
                nodes: layer.nodes.iter().map(|node| node.handle).collect(),
            };
            let conditions = graph.conditions.len();
            self.graphs.restore(handle, graph)?;
            self.conditions += conditions;
            self.by_graph.insert(layer.raw, handle);
            for node in layer.nodes {
                let own = Node {
                    raw: node.raw,
                    graph: handle,
                    parts: node.parts,
                    conditional: node.conditional,
                    graphs: Vec::new(),
                };
                self.nodes.restore(node.handle, own)?;
                self.by_node.insert(node.raw, node.handle);
            }
        }
        Ok(())
    }

    /// Notes a graph inside a node. Returns the node's handle.
    fn put_inside(&mut self, graph: u64, node: CUgraphNode) -> Result<u64, CUresult> {
        let node = self.node_of(node).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        self.nodes.get_mut(node)?.graphs.push(graph);
        Ok(node)
    }

    /// Ends restoration: all graphs, nodes and instances of the previous server are back.
    pub fn restored(&mut self) {
        self.graphs.restored();
        self.nodes.restored();
        self.execs.restored();
        self.saved = Saved::All;
    }

    /// Returns the handle of a driver node if it has one.
    pub fn node_of(&self, raw: CUgraphNode) -> Option<u64> {
        self.by_node.get(&raw).copied()
    }

    /// Whether a graph is the body of a conditional node.
    pub fn is_body(&self, graph: u64) -> bool {
        let Ok(Owner::Node(node)) = self.graphs.get(graph).map(|graph| graph.owner) else {
            return false;
        };
        self.nodes
            .get(node)
            .is_ok_and(|node| node.conditional.is_some())
    }

    /// Records a conditional handle that was created for a graph, with the outermost graph around it.
    pub fn note_condition(&mut self, graph: u64, condition: Condition) {
        self.touch(graph);
        let outermost = self.around(graph).last().copied().unwrap_or(graph);
        if let Ok(graph) = self.graphs.get_mut(outermost) {
            graph.conditions.push(condition);
            self.conditions += 1;
        }
    }

    /// Whether another conditional handle may be created.
    pub fn may_have_condition(&self) -> bool {
        self.conditions < bounds::GRAPH_CONDITIONS
    }

    /// Whether a conditional handle was created for this graph or a graph around it; without a graph, for any graph.
    pub fn has_condition(&self, graph: Option<u64>, handle: u64) -> bool {
        let mut candidates = match graph {
            Some(graph) => self.around(graph),
            None => self.graphs.handles(),
        }
        .into_iter()
        .filter_map(|of| self.graphs.get(of).ok());
        candidates.any(|graph| graph.conditions.iter().any(|one| one.handle == handle))
    }

    /// Whether a driver graph has a handle.
    pub fn has_graph(&self, raw: CUgraph) -> bool {
        self.by_graph.contains_key(&raw)
    }

    /// Returns the handle of a driver graph and creates one if necessary.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the session has too many graphs.
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
            before: None,
            written: false,
            sinks: Vec::new(),
            conditions: Vec::new(),
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

    /// Returns the handle of a driver node and creates one if necessary.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the session has too many node handles.
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
            conditional: None,
            graphs: Vec::new(),
        })?;
        self.by_node.insert(raw, handle);
        self.graphs.get_mut(graph)?.nodes.insert(handle);
        for of in self.around(graph) {
            if let Ok(graph) = self.graphs.get_mut(of) {
                graph.written = false;
            }
        }
        self.note_stale();
        Ok(handle)
    }

    /// Translates handles to the driver's nodes.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if any handle is not valid.
    pub fn raw_nodes(&self, handles: &[u64]) -> Result<Vec<CUgraphNode>, CUresult> {
        handles
            .iter()
            .map(|handle| Ok(self.nodes.get(*handle)?.raw))
            .collect()
    }

    /// Returns the graph and all graphs that contain it, innermost first.
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

    /// Reserves room for nodes and edges that are about to be added to a graph.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if a limit would be exceeded; nothing is counted then.
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

    /// Counts nodes and edges removed from a graph.
    pub fn shrink(&mut self, graph: u64, parts: u64) {
        self.touch(graph);
        for of in self.around(graph) {
            if let Ok(graph) = self.graphs.get_mut(of) {
                graph.size.parts = graph.size.parts.saturating_sub(parts);
            }
        }
        self.let_go(parts);
    }

    /// Counts the nodes and edges of an object about to be created.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the session would have too many.
    pub fn hold(&mut self, parts: u64) -> Result<(), CUresult> {
        let total = self.total.saturating_add(parts);
        if total.saturating_add(self.captured) > bounds::GRAPHS_PARTS {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.total = total;
        Ok(())
    }

    /// Uncounts nodes and edges that no longer exist.
    pub fn let_go(&mut self, parts: u64) {
        self.total = self.total.saturating_sub(parts);
    }

    /// Counts nodes and edges about to be captured.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if a graph or the session would have too many.
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

    /// Charges the captured nodes and edges to the graph whose capture has ended. Captures are not counted separately,
    /// so the graph is charged for all captures in progress, which is an upper bound.
    pub fn captured_into(&mut self, graph: u64) {
        self.touch(graph);
        let captured = self.captured;
        if let Ok(graph) = self.graphs.get_mut(graph) {
            graph.size.parts = graph.size.parts.saturating_add(captured);
            // Captured graph launches become child graphs.
            graph.size.height = graph.size.height.max(2);
            self.total = self.total.saturating_add(captured);
        }
        if self.captures.is_empty() {
            self.captured = 0;
        }
    }

    /// Whether `graph` is `outer` or is contained in it at any depth.
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

    /// Whether a capture is filling this graph or one inside it. If the graph were destroyed, the driver would continue
    /// to write to freed memory.
    pub fn is_filled(&self, graph: u64) -> bool {
        let filled = |capture: &Capture| self.is_inside(capture.graph, graph);
        self.captures.iter().any(filled) || self.graphs.get(graph).is_ok_and(|graph| graph.filling)
    }

    /// Whether a capture is filling a graph inside this node.
    pub fn is_filled_inside(&self, node: u64) -> bool {
        let filled = |node: &Node| node.graphs.iter().any(|graph| self.is_filled(*graph));
        self.nodes.get(node).is_ok_and(filled)
    }

    /// Makes a graph a child graph of a node.
    pub fn move_into(&mut self, graph: u64, node: u64) {
        self.touch(graph);
        self.end_record(graph);
        if let Ok(moved) = self.graphs.get(graph) {
            // Its parts are counted with the containing graph.
            self.total = self.total.saturating_sub(moved.size.parts);
        }
        if let (Ok(object), Ok(parent)) = (self.graphs.get_mut(graph), self.nodes.get_mut(node)) {
            object.owner = Owner::Node(node);
            parent.graphs.push(graph);
        }
    }

    /// Invalidates the handles of a graph that the driver has freed and of everything in it.
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
        self.conditions -= graph.conditions.len();
        self.by_graph.remove(&graph.raw);
        self.end_record(handle);
        if !matches!(graph.owner, Owner::Node(_)) {
            self.let_go(graph.size.parts);
        }
        self.memory.ended(handle);
        self.discharge();
        for node in graph.nodes {
            self.forget_node(node);
        }
    }

    /// Invalidates the handles of a node that the driver has freed and of its child graphs.
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

    /// Invalidates the handles of a node's child graphs, which the driver may have replaced.
    pub fn forget_inside(&mut self, node: u64) {
        if let Ok(node) = self.nodes.get_mut(node) {
            for graph in std::mem::take(&mut node.graphs) {
                self.forget_graph(graph);
            }
        }
    }

    /// Invalidates the handles of a graph's nodes that are not in `now`, the list of its current nodes.
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

    /// Whether any graph, instance or capture exists, which may reference other objects of the session.
    pub fn any(&self) -> bool {
        !self.captures.is_empty() || !self.execs.is_empty() || !self.graphs.is_empty()
    }

    /// Keeps an unloaded image while a graph may still reference it. Returns the image if no graph can.
    pub fn keep_image(&mut self, handle: u64, image: Image) -> Option<Image> {
        if self.referred.remove(&handle) && self.any() {
            self.images.push(image);
            self.read_again();
            return None;
        }
        Some(image)
    }

    /// Keeps a destroyed event while a graph may still reference it, as [`Graphs::keep_image`] does for images.
    ///
    /// # Errors
    /// Returns the event if no graph can reference it.
    pub fn keep_event(&mut self, handle: u64, event: Event) -> Result<(), Event> {
        if self.referred.remove(&handle) && self.any() {
            self.events.push(event);
            self.read_again();
            return Ok(());
        }
        Err(event)
    }

    /// Records that the client has destroyed an array, which a graph may reference.
    pub fn note_array_gone(&mut self, handle: u64) {
        if self.referred.remove(&handle) && self.any() {
            self.read_again();
        }
    }

    /// Events that graphs may reference.
    pub fn events_in_use(&self) -> impl Iterator<Item = u64> {
        let any = self.has_events.then_some(&self.referred);
        let handles = any.into_iter().flatten().copied();
        handles.filter(|handle| Handle(*handle).kind() == Some(Kind::Event))
    }

    /// Records that a graph references this image, event or array.
    pub fn refer_to(&mut self, handle: u64) {
        self.has_events |= Handle(handle).kind() == Some(Kind::Event);
        self.referred.insert(handle);
    }

    /// Marks all graphs and instances as unsaved: they may refer to an object that the client has just destroyed.
    fn read_again(&mut self) {
        self.graphs.iter_mut().for_each(Graph::touch);
        for exec in self.execs.iter_mut() {
            exec.written = false;
        }
        self.note_stale();
    }

    /// Whether graphs and instances may refer to images, events or memory that the client has destroyed.
    pub fn may_lack(&self) -> bool {
        !self.images.is_empty() || !self.events.is_empty() || self.lacks_memory
    }

    /// Returns the images and events that were kept for graphs if no graph can refer to them: there is none, or all have been
    /// saved, which fails for those with a destroyed object.
    pub fn take_kept(&mut self) -> (Vec<Image>, Vec<Event>) {
        let is_saved = self.saved == Saved::All && self.captures.is_empty();
        match is_saved || !self.any() {
            true => (
                std::mem::take(&mut self.images),
                std::mem::take(&mut self.events),
            ),
            false => (Vec::new(), Vec::new()),
        }
    }

    /// Records that a graph or an instance has been destroyed. The others may be savable without it.
    pub fn note_destroyed(&mut self) {
        if self.saved == Saved::Refused {
            self.saved = Saved::Stale;
        }
    }

    /// Destroys all graphs and instances; the session's streams must be idle. Returns the images and events kept for
    /// them.
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

    /// Frees the memory that launches with allocation nodes have left allocated, after the session has ended.
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

    /// Records the memory, `(start, len)` in bytes, that an allocation node of a graph allocates on a device.
    pub fn given(&mut self, (start, len): (u64, u64), graph: u64, device: Ordinal) {
        self.memory.given(start, len, graph);
        self.devices.insert(start, device);
    }

    /// Charges the memory that an instance allocates, each block to its device.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if it exceeds the limit; nothing is charged then.
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

    /// Schedules the charges of blocks that no longer exist for release with the session's work in flight.
    pub fn discharge(&mut self) {
        let memory = &self.memory;
        self.devices.retain(|start, _| memory.begins(*start));
        let mut gone: Vec<u64> = self.charges.keys().copied().collect();
        gone.retain(|start| !memory.begins(*start));
        for start in gone {
            self.leaving.extend(self.charges.remove(&start));
        }
    }

    /// Whether `[address, address + len)` lies in memory of an allocation node of the session.
    pub fn owns(&self, address: u64, len: u64) -> bool {
        self.memory.behind(address).is_some_and(|left| len <= left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::base::graph_templates::Node as TemplateNode;
    use zerocopy::IntoBytes;

    #[test]
    fn a_graph_that_has_not_changed_keeps_its_content() {
        let mut graphs = Graphs::default();
        let own = graphs.graph_handle(CUgraph(1), Ordinal::of_test(0), Owner::Client);
        let own = own.unwrap();
        let node = |does: u8, on: &[u32]| TemplateNode {
            kind: 0,
            device: 0,
            does: vec![does],
            attributes: BTreeMap::new(),
            dependencies: on.iter().map(|on| (*on, [0; 8])).collect(),
            inside: None,
            bodies: Vec::new(),
        };
        let read = |nodes: Vec<TemplateNode>, raw: &[u64]| Read {
            template: Template {
                nodes,
                ..Template::default()
            },
            places: raw.iter().map(|raw| CUgraphNode(*raw)).zip(0..).collect(),
            bodies: Vec::new(),
        };
        let mut note = |read: Read| {
            graphs.touch(own);
            graphs.graphs.get_mut(own).unwrap().note_read(read)
        };
        let first = note(read(vec![node(1, &[]), node(2, &[0])], &[10, 20]));
        // The driver lists the same nodes in another order.
        let second = note(read(vec![node(2, &[1]), node(1, &[])], &[20, 10]));
        assert!(Arc::ptr_eq(&first, &second));
        // Another node has the same content.
        let third = note(read(vec![node(2, &[1]), node(1, &[])], &[20, 30]));
        assert!(!Arc::ptr_eq(&first, &third));
        let fourth = note(read(vec![node(3, &[1]), node(1, &[])], &[20, 30]));
        assert_ne!(third.template, fourth.template);
        assert!(Arc::ptr_eq(
            &fourth,
            &note(read(fourth.template.nodes.clone(), &[20, 30]))
        ));
    }

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
        // Bodies of conditional nodes are filled in place, inside their graphs.
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

    fn saved(graphs: &mut Graphs, graph: u64, nodes: Vec<TemplateNode>) {
        let template = Template {
            nodes,
            ..Template::default()
        };
        let read = Read {
            template,
            places: HashMap::new(),
            bodies: Vec::new(),
        };
        let own = graphs.graphs.get_mut(graph).expect("it");
        (own.read, own.written) = (Some(Arc::new(read)), true);
        graphs.note_bytes(graph, 100);
        graphs.note_saved(true);
    }

    #[test]
    fn graphs_are_saved_again_when_memory_is_freed_that_they_copy_or_set() {
        let node = |kind: u32, address: u64| TemplateNode {
            kind,
            device: 0,
            does: [address, 64].map(u64::to_le_bytes).concat(),
            attributes: Default::default(),
            dependencies: Vec::new(),
            inside: None,
            bodies: Vec::new(),
        };
        let inside = Template {
            nodes: vec![node(CU_GRAPH_NODE_TYPE_MEMCPY, 0x5000)],
            ..Template::default()
        };
        let child = TemplateNode {
            inside: Some(Box::new(inside)),
            ..node(CU_GRAPH_NODE_TYPE_GRAPH, 0)
        };
        let nodes = vec![
            node(CU_GRAPH_NODE_TYPE_KERNEL, 0x3000),
            node(CU_GRAPH_NODE_TYPE_MEMSET, 0x4000),
            child,
        ];
        let mut graphs = Graphs::default();
        let graph = graphs
            .graph_handle(CUgraph(1), Ordinal::of_test(0), Owner::Client)
            .unwrap();
        for (start, len, is_named) in [
            (0x3000, 0x100, false),
            (0x4001, 0xfff, false),
            (0x3f00, 0x101, true),
            (0x5000, 1, true),
        ] {
            saved(&mut graphs, graph, nodes.clone());
            assert_eq!(graphs.note_freed(start, len), is_named, "{start:#x}");
            assert_eq!(graphs.are_stale(), is_named, "{start:#x}");
            assert_eq!(graphs.may_lack(), is_named, "{start:#x}");
        }
    }

    /// Its rows may reach into the allocation behind the one in which it begins.
    #[test]
    fn a_memset_and_a_copy_name_all_that_they_reach() {
        let node = |kind: u32, does: &[u8]| TemplateNode {
            kind,
            device: 0,
            does: does.to_vec(),
            attributes: Default::default(),
            dependencies: Vec::new(),
            inside: None,
            bodies: Vec::new(),
        };
        let set = CUDA_MEMSET_NODE_PARAMS {
            to: 0x1f_fff8,
            pitch: 0x400,
            element: 2,
            width: 0x40,
            height: 0x10,
            ..CUDA_MEMSET_NODE_PARAMS::default()
        };
        let copy = CUDA_MEMCPY3D {
            src_device: 0x50_0000,
            src_pitch: 0x1000,
            src_height: 16,
            src_z: 1,
            dst_device: 0x70_0000,
            width: 64,
            height: 16,
            depth: 2,
            ..CUDA_MEMCPY3D::default()
        };
        let nodes = vec![
            node(CU_GRAPH_NODE_TYPE_MEMSET, set.as_bytes()),
            node(CU_GRAPH_NODE_TYPE_MEMCPY, copy.as_bytes()),
        ];
        let mut graphs = Graphs::default();
        let graph = graphs
            .graph_handle(CUgraph(1), Ordinal::of_test(0), Owner::Client)
            .unwrap();
        for (start, is_named) in [
            (0x20_0000, true),
            (0x20_3c77, true),
            (0x20_3c78, false),
            (0x52_f03f, true),
            (0x52_f040, false),
            (0x70_003f, true),
            (0x70_0040, false),
        ] {
            saved(&mut graphs, graph, nodes.clone());
            assert_eq!(graphs.note_freed(start, 1), is_named, "{start:#x}");
        }
        // Content that is not saved yet is checked when it is.
        saved(&mut graphs, graph, nodes);
        assert!(!graphs.note_freed(0x10_0000, 1) && !graphs.may_lack());
        graphs.touch(graph);
        assert!(!graphs.note_freed(0x10_0000, 1) && graphs.may_lack());
    }

    #[test]
    fn the_record_of_a_graph_ends_however_the_graph_does() {
        let mut graphs = Graphs::default();
        let mut make = |raw: u64| {
            graphs
                .graph_handle(CUgraph(raw), Ordinal::of_test(0), Owner::Client)
                .unwrap()
        };
        let (outer, moved, lost, unsaved) = (make(1), make(2), make(3), make(4));
        for graph in [outer, moved, lost] {
            saved(&mut graphs, graph, Vec::new());
        }
        let node = graphs.node_handle(CUgraphNode(10), outer).unwrap();
        graphs.move_into(moved, node);
        graphs.forget_graph(lost);
        graphs.forget_graph(unsaved);
        assert_eq!(graphs.take_gone(), [moved, lost]);
        assert_eq!(graphs.take_gone(), [0; 0]);
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
    fn conditional_handles_are_of_a_graph_and_the_bodies_in_it() {
        let mut graphs = Graphs::default();
        let device = Ordinal::of_test(0);
        let mut make = |raw: u64, owner| graphs.graph_handle(CUgraph(raw), device, owner).unwrap();
        let (outer, other) = (make(1, Owner::Client), make(2, Owner::Client));
        let node = graphs.node_handle(CUgraphNode(10), outer).unwrap();
        let body = graphs.graph_handle(CUgraph(3), device, Owner::Node(node));
        let body = body.unwrap();
        let condition = |handle| Condition {
            handle,
            device: 0,
            default: 0,
            flags: 0,
        };
        for (graph, handle) in [(outer, 1), (body, 2), (other, 1), (outer, 3)] {
            graphs.note_condition(graph, condition(handle));
        }
        let of = |graph| {
            let conditions = &graphs.graphs.get(graph).unwrap().conditions;
            conditions.iter().map(|one| one.handle).collect::<Vec<_>>()
        };
        assert_eq!(
            [of(outer), of(body), of(other)],
            [vec![1, 2, 3], vec![], vec![1]]
        );
        let has = |graph, handle| graphs.has_condition(graph, handle);
        assert!(has(Some(body), 1) && has(Some(body), 3) && has(Some(outer), 2) && has(None, 3));
        assert!(!has(Some(other), 2) && !has(None, 4));
        assert!(!graphs.is_body(body), "its node is of an unknown kind");
        assert_eq!(graphs.conditions, 4);
        graphs.forget_graph(outer);
        assert!(graphs.has_condition(Some(other), 1), "the same number");
        assert!(!graphs.has_condition(None, 2));
        assert_eq!(graphs.conditions, 1);
        graphs.conditions = bounds::GRAPH_CONDITIONS - 1;
        assert!(graphs.may_have_condition());
        graphs.note_condition(other, condition(2));
        assert!(!graphs.may_have_condition());
    }

    #[test]
    fn bodies_are_restored_inside_their_nodes() {
        let mut graphs = Graphs::default();
        let device = Ordinal::of_test(0);
        let graph = Handle::new(Kind::Graph, 0, 3).0;
        let body = Handle::new(Kind::Graph, 2, 0).0;
        let node = Handle::new(Kind::GraphNode, 0, 5).0;
        let inner = Handle::new(Kind::GraphNode, 1, 1).0;
        let conditional = Conditional {
            device: 0,
            does: vec![1],
        };
        let layer = |handle, raw, inside, node| Restored {
            handle,
            raw: CUgraph(raw),
            device,
            size: Size {
                parts: raw,
                height: 1,
            },
            inside: CUgraphNode(inside),
            sinks: Vec::new(),
            nodes: vec![node],
        };
        let known = |handle, raw, conditional| RestoredNode {
            handle,
            raw: CUgraphNode(raw),
            parts: 1,
            conditional,
        };
        let read = Arc::new(Read {
            template: Template::default(),
            places: HashMap::new(),
            bodies: vec![body],
        });
        let layers = || {
            vec![
                layer(graph, 7, 0, known(node, 70, Some(conditional.clone()))),
                layer(body, 2, 70, known(inner, 20, None)),
            ]
        };
        graphs.restore_graph(layers(), &read).unwrap();
        graphs.restored();
        assert_eq!(
            graphs.total, 7,
            "parts of the body are in those of the graph"
        );
        assert!(graphs.is_body(body) && !graphs.is_body(graph));
        assert_eq!(graphs.nodes.get(node).unwrap().graphs(), [body]);
        assert_eq!(graphs.bonds(), Bonds::default());
        graphs.touch(body);
        let written = graphs.graphs.get(graph).unwrap().written;
        assert!(!written, "a change of the body is one of the graph");
        assert_eq!(graphs.bonds(), Bonds::CHANGED_GRAPHS);
        let [_, stray] = layers().try_into().unwrap();
        let stray = Restored {
            inside: CUgraphNode(71),
            ..stray
        };
        let refused = graphs.restore_graph(vec![stray], &read);
        assert_eq!(refused, Err(CUDA_ERROR_INVALID_VALUE));
        graphs.forget_graph(graph);
        assert!(graphs.graphs.is_empty() && graphs.nodes.is_empty());
        assert_eq!(graphs.total, 0);
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
