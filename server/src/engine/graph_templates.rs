//! Graphs and instances in a form that another server can read: what each node does as a client's message says it, with the
//! session's own handles, so that the same checks and the same code make it again.

use super::graphs::Size;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Attributes that a kernel node can have, beyond what it does.
pub type Attributes = BTreeMap<u32, Vec<u8>>;

/// What is in a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// In the order in which the driver lists them.
    pub nodes: Vec<Node>,
    /// Positions of a node and of one that depends on it, and the driver's `CUgraphEdgeData`.
    pub edges: Vec<(u32, u32, [u8; 8])>,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// `CU_GRAPH_NODE_TYPE_*`.
    pub kind: u32,
    /// Server's ordinal of the device.
    pub device: u32,
    /// What it does.
    pub does: Vec<u8>,
    /// Values of attributes, without the zeros at their ends; one that is missing is zero.
    pub attributes: Attributes,
    /// The graph in it.
    pub inside: Option<Box<Template>>,
}

/// A graph.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedGraph {
    /// Server's ordinal.
    pub device: u32,
    /// Nodes and edges, as they were counted.
    pub parts: u64,
    /// Graphs inside each other.
    pub height: usize,
    /// What is in it.
    pub template: Template,
    /// Handles that the client knows: position, handle, parts.
    pub handles: Vec<(u32, u64, u64)>,
}

impl SavedGraph {
    /// How large it is.
    pub fn size(&self) -> Size {
        Size {
            parts: self.parts,
            height: self.height,
        }
    }
}

/// An instance.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedExec {
    /// Server's ordinal.
    pub device: u32,
    /// `CUgraphInstantiate_flags`.
    pub flags: u64,
    /// Nodes and edges, as they were counted.
    pub parts: u64,
    /// Launching it may print.
    pub prints: bool,
    /// The graph that it was made from, or what was in that one when it is gone.
    pub from: Source,
    /// Nodes that do something else in the instance.
    pub changed: BTreeMap<u32, Vec<u8>>,
    /// Nodes that are disabled.
    pub disabled: BTreeSet<u32>,
}

/// What an instance is made from.
#[derive(Debug, Serialize, Deserialize)]
pub enum Source {
    /// A graph with this handle, which is described.
    Graph(u64),
    /// A graph that has ended.
    Template(Template),
}

/// A record's bytes.
pub fn encode(what: &impl Serialize) -> Option<Vec<u8>> {
    postcard::to_allocvec(what).ok()
}

/// What a record says.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    postcard::from_bytes(bytes).ok()
}
