//! Graphs and instances in a form that another server can read: what each node does as a client's message says it, with the
//! session's own handles, so that the same checks and the same code make it again.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How large a graph is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Nodes and edges, those of the graphs inside it included as often as they are in there.
    pub parts: u64,
    /// Graphs inside each other: 1 for a graph that has none inside.
    pub height: usize,
}

/// Attributes that a kernel node can have, beyond what it does.
pub type Attributes = BTreeMap<u32, Vec<u8>>;

/// What is in a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// In the order in which the driver lists them.
    pub nodes: Vec<Node>,
    /// Nodes at the ends of a captured graph, in the order in which `cuGraphExecUpdate` compares them, if there are several.
    pub sinks: Vec<u32>,
}

impl Template {
    /// The order in which to make the nodes, each behind those that it depends on; the driver takes this order for a part of what
    /// the graph is when it updates an instance.
    pub fn order(&self) -> Vec<usize> {
        let count = self.nodes.len();
        let mut dependents = vec![Vec::new(); count];
        let mut missing = vec![0usize; count];
        for (at, node) in self.nodes.iter().enumerate() {
            for (on, _) in &node.dependencies {
                if let Some(dependents) = dependents.get_mut(*on as usize) {
                    dependents.push(at);
                    missing[at] += 1;
                }
            }
        }
        // Others may have come behind them since.
        let mut sinks: Vec<usize> = self.sinks.iter().map(|sink| *sink as usize).collect();
        sinks.retain(|sink| dependents.get(*sink).is_some_and(Vec::is_empty));
        let free = (0..count).filter(|at| missing[*at] == 0);
        let mut ready: BTreeSet<usize> = free.collect();
        let mut order = Vec::with_capacity(count);
        while let Some(at) = ready.pop_first() {
            order.push(at);
            for dependent in &dependents[at] {
                missing[*dependent] -= 1;
                if missing[*dependent] == 0 {
                    ready.insert(*dependent);
                }
            }
        }
        let last: BTreeSet<usize> = sinks.iter().copied().collect();
        order.retain(|at| !last.contains(at));
        order.extend(sinks);
        order
    }
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
    /// Positions of the nodes that it depends on, and the driver's `CUgraphEdgeData`.
    pub dependencies: Vec<(u32, [u8; 8])>,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes that depend on others, by their positions.
    fn template(dependencies: &[&[u32]], sinks: &[u32]) -> Template {
        let node = |on: &&[u32]| Node {
            kind: 0,
            device: 0,
            does: vec![1, 2, 3],
            attributes: [(8, vec![5])].into(),
            dependencies: on.iter().map(|on| (*on, [0; 8])).collect(),
            inside: None,
        };
        Template {
            nodes: dependencies.iter().map(node).collect(),
            sinks: sinks.to_vec(),
        }
    }

    #[test]
    fn nodes_come_behind_what_they_depend_on_and_otherwise_in_their_order() {
        let order = |dependencies: &[&[u32]]| template(dependencies, &[]).order();
        assert_eq!(order(&[&[], &[0], &[0], &[1, 2]]), [0, 1, 2, 3]);
        assert_eq!(order(&[&[2], &[0], &[]]), [2, 0, 1]);
        assert_eq!(order(&[&[], &[], &[]]), [0, 1, 2]);
        assert_eq!(order(&[]), [0; 0]);
        // A circle, which no driver has: those in it are missing.
        assert_eq!(order(&[&[1], &[0], &[]]), [2]);
        assert_eq!(order(&[&[7]]), [0]);
    }

    #[test]
    fn sinks_come_last_in_the_order_of_their_capture() {
        let forked: &[&[u32]] = &[&[], &[0], &[0]];
        assert_eq!(template(forked, &[2, 1]).order(), [0, 2, 1]);
        // Nodes were added behind one of them, and one is gone.
        let grown: &[&[u32]] = &[&[], &[0], &[0], &[2]];
        assert_eq!(template(grown, &[2, 1, 9]).order(), [0, 2, 3, 1]);
    }

    #[test]
    fn what_is_written_down_is_read_again() {
        let mut outer = template(&[&[], &[0]], &[1]);
        outer.nodes[1].inside = Some(Box::new(template(&[&[]], &[])));
        let bytes = encode(&outer).expect("bytes");
        assert_eq!(decode::<Template>(&bytes), Some(outer));
        assert_eq!(decode::<Template>(&bytes[..bytes.len() - 1]), None);
    }
}
