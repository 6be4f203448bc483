//! Graphs and instances in a form that another server can read: each node's operation is stored as a client's message
//! with the session's own handles, so that the same checks and the same code create it again.

use mpsshim_api::cuda::{
    CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, CU_GRAPH_NODE_TYPE_HOST, CU_GRAPH_NODE_TYPE_MEMCPY,
    CU_GRAPH_NODE_TYPE_MEMSET, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::FromBytes;

/// Size of a graph.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Nodes and edges, with those of child graphs counted once per occurrence.
    pub parts: u64,
    /// Nesting depth; 1 for a graph without child graphs.
    pub height: usize,
}

/// Attributes that a kernel node can have besides its operation.
pub type Attributes = BTreeMap<u32, Vec<u8>>;

/// Contents of a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// Nodes in the driver's order.
    pub nodes: Vec<Node>,
    /// Leaf nodes of a captured graph, if there are several, in the order in which `cuGraphExecUpdate` compares them.
    pub sinks: Vec<u32>,
    /// Conditional handles, in the order of their creation; none in the body of a conditional node.
    pub conditions: Vec<Condition>,
}

/// A conditional handle. Kernels hold its number, so the next server has to give it the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    /// The driver's number.
    pub handle: u64,
    /// Server's ordinal of the device.
    pub device: u32,
    /// Initial value.
    pub default: u32,
    /// `CU_GRAPH_COND_*`.
    pub flags: u32,
}

/// The template of a graph, or of the body of a conditional node in it.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// Its contents.
    pub template: &'a Template,
    /// Position of its first node among the nodes of all layers.
    pub first: u32,
    /// Position of the conditional node among the nodes of all layers; 0 for the graph itself.
    pub node: u32,
}

impl Template {
    /// The template, and the bodies of all conditional nodes in it, each behind the layer that has its node. The nodes of
    /// all layers are counted in this order.
    pub fn layers(&self) -> Vec<Layer<'_>> {
        let mut layers = vec![Layer {
            template: self,
            first: 0,
            node: 0,
        }];
        let (mut at, mut count) = (0, self.nodes.len() as u32);
        while let Some(layer) = layers.get(at).copied() {
            for (node, place) in layer.template.nodes.iter().zip(layer.first..) {
                for body in &node.bodies {
                    layers.push(Layer {
                        template: body,
                        first: count,
                        node: place,
                    });
                    count += body.nodes.len() as u32;
                }
            }
            at += 1;
        }
        layers
    }

    /// The nodes of all layers, by position.
    pub fn all_nodes(&self) -> Vec<&Node> {
        let layers = self.layers();
        layers
            .iter()
            .flat_map(|layer| &layer.template.nodes)
            .collect()
    }

    /// Appends the ranges of addresses in the parameters of all nodes that the driver checks.
    pub fn append_ranges(&self, to: &mut Vec<(u64, u64)>) {
        for node in &self.nodes {
            node.append_ranges(&node.does, to);
            let inside = node.inside.as_deref().into_iter();
            inside
                .chain(&node.bodies)
                .for_each(|inside| inside.append_ranges(to));
        }
    }

    /// Whether the graph, or one inside it, calls the client or operates on words in memory.
    pub fn calls_or_waits(&self) -> bool {
        self.nodes.iter().any(|node| {
            let mut inside = node.inside.as_deref().into_iter().chain(&node.bodies);
            matches!(
                node.kind,
                CU_GRAPH_NODE_TYPE_HOST | CU_GRAPH_NODE_TYPE_BATCH_MEM_OP
            ) || inside.any(Template::calls_or_waits)
        })
    }

    /// Whether the graph has conditional handles or nodes.
    pub fn is_conditional(&self) -> bool {
        let has_bodies = |node: &Node| !node.bodies.is_empty();
        !self.conditions.is_empty() || self.nodes.iter().any(has_bodies)
    }

    /// Whether the other template has the same contents, where its node at position `at` of all layers is the node at
    /// position `places[at]` of this one. Child graphs have no such positions: they are the same if their nodes are, in
    /// the order of their creation.
    pub fn is_same(&self, other: &Template, places: &[u32]) -> bool {
        let (layers, others) = (self.layers(), other.layers());
        let is_same_layer = |(one, other): (&Layer<'_>, &Layer<'_>)| {
            let end = one.first + one.template.nodes.len() as u32;
            let place = |at: u32| {
                let place = *places.get((other.first + at) as usize)?;
                (one.first..end).contains(&place).then(|| place - one.first)
            };
            one.template.has_same_nodes(other.template, place)
        };
        layers.len() == others.len()
            && self.conditions == other.conditions
            && layers.iter().zip(&others).all(is_same_layer)
    }

    /// Whether the other template has nodes of the same kinds with the same dependencies at the same positions.
    pub fn has_shape_of(&self, other: &Template) -> bool {
        let (nodes, others) = (self.all_nodes(), other.all_nodes());
        let is_like = |(one, other): (&&Node, &&Node)| {
            let (on, of_other) = (one.dependencies.iter(), other.dependencies.iter());
            one.kind == other.kind && on.map(|(on, _)| on).eq(of_other.map(|(on, _)| on))
        };
        nodes.len() == others.len() && nodes.iter().zip(&others).all(is_like)
    }

    /// Whether another template has the same nodes, at other positions.
    fn has_same_nodes(&self, other: &Template, place: impl Fn(u32) -> Option<u32>) -> bool {
        let is_same_node = |(at, node): (u32, &Node)| {
            let own = place(at).and_then(|at| self.nodes.get(at as usize));
            own.is_some_and(|own| own.is_same(node, &place))
        };
        let sinks = other.sinks.iter().map(|sink| place(*sink));
        self.nodes.len() == other.nodes.len()
            && sinks.eq(self.sinks.iter().map(|sink| Some(*sink)))
            && (0..).zip(&other.nodes).all(is_same_node)
    }

    /// The template with its nodes in the order in which they are created.
    fn in_order(&self) -> Template {
        let order = self.order();
        let mut places = vec![0; self.nodes.len()];
        for (to, from) in (0..).zip(&order) {
            places[*from] = to;
        }
        let moved = |at: &u32| places.get(*at as usize).copied().unwrap_or(*at);
        let mut nodes: Vec<Node> = order.iter().map(|at| self.nodes[*at].clone()).collect();
        for node in &mut nodes {
            node.dependencies
                .iter_mut()
                .for_each(|(on, _)| *on = moved(on));
            node.dependencies.sort_unstable();
            let inside = node.inside.as_deref_mut().into_iter();
            inside
                .chain(&mut node.bodies)
                .for_each(|inside| *inside = inside.in_order());
        }
        Template {
            nodes,
            sinks: self.sinks.iter().map(moved).collect(),
            conditions: self.conditions.clone(),
        }
    }

    /// The order in which to create the nodes: that of the list, but with the leaves of a capture last, in the order of
    /// their capture. The driver treats this order as significant when it updates an instance. A node may come before its
    /// dependencies, if `cuGraphAddDependencies` added them later.
    pub fn order(&self) -> Vec<usize> {
        let count = self.nodes.len();
        let dependencies = self.nodes.iter().flat_map(|node| &node.dependencies);
        let leads_on: BTreeSet<u32> = dependencies.map(|(on, _)| *on).collect();
        // A program may have named a node twice.
        let mut named = BTreeSet::new();
        let mut sinks = self.sinks.clone();
        // A captured leaf may have got dependents since.
        sinks.retain(|sink| {
            (*sink as usize) < count && !leads_on.contains(sink) && named.insert(*sink as usize)
        });
        let mut order: Vec<usize> = (0..count).filter(|at| !named.contains(at)).collect();
        order.extend(sinks.into_iter().map(|sink| sink as usize));
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
    /// The operation, as a client's message.
    pub does: Vec<u8>,
    /// Attribute values without trailing zeros; a missing attribute is zero.
    pub attributes: Attributes,
    /// Positions of the nodes that it depends on, with the driver's `CUgraphEdgeData`.
    pub dependencies: Vec<(u32, [u8; 8])>,
    /// The child graph in it.
    pub inside: Option<Box<Template>>,
    /// The bodies of a conditional node.
    pub bodies: Vec<Template>,
}

impl Node {
    /// Whether the other node is this one, where the nodes of its graph have these positions in the graph of this one. The
    /// bodies of conditional nodes are compared as layers of the graph.
    fn is_same(&self, other: &Node, place: impl Fn(u32) -> Option<u32>) -> bool {
        let mut on: Vec<_> = self
            .dependencies
            .iter()
            .map(|(on, data)| (Some(*on), data))
            .collect();
        let others = other.dependencies.iter();
        let mut others: Vec<_> = others.map(|(on, data)| (place(*on), data)).collect();
        on.sort_unstable();
        others.sort_unstable();
        let inside = (&self.inside, &other.inside);
        let is_same_inside = inside.0 == inside.1
            || matches!(inside, (Some(one), Some(other)) if one.in_order() == other.in_order());
        on == others
            && is_same_inside
            && (self.kind, self.device) == (other.kind, other.device)
            && (&self.does, &self.attributes) == (&other.does, &other.attributes)
    }

    /// Appends the ranges of addresses, start and end, in these parameters, if the driver checks them; each word that may be an
    /// address counts as one.
    pub fn append_ranges(&self, does: &[u8], to: &mut Vec<(u64, u64)>) {
        match self.kind {
            CU_GRAPH_NODE_TYPE_MEMCPY => {
                if let Ok((copy, _)) = CUDA_MEMCPY3D::read_from_prefix(does) {
                    let rows = |z: u64, height: u64, y: u64| {
                        let slices = z.saturating_add(copy.depth.saturating_sub(1));
                        let above = slices.saturating_mul(height);
                        above.saturating_add(y).saturating_add(copy.height)
                    };
                    let source = rows(copy.src_z, copy.src_height, copy.src_y);
                    let target = rows(copy.dst_z, copy.dst_height, copy.dst_y);
                    let width = |x: u64| x.saturating_add(copy.width);
                    for (start, rows, pitch, x) in [
                        (copy.src_device, source, copy.src_pitch, copy.src_x),
                        (copy.src_host, source, copy.src_pitch, copy.src_x),
                        (copy.dst_device, target, copy.dst_pitch, copy.dst_x),
                        (copy.dst_host, target, copy.dst_pitch, copy.dst_x),
                    ] {
                        to.push(range_of(start, (rows, pitch), width(x)));
                    }
                }
            }
            CU_GRAPH_NODE_TYPE_MEMSET => {
                if let Ok((set, _)) = CUDA_MEMSET_NODE_PARAMS::read_from_prefix(does) {
                    let width = set.width.saturating_mul(set.element.into());
                    to.push(range_of(set.to, (set.height, set.pitch), width));
                }
            }
            CU_GRAPH_NODE_TYPE_BATCH_MEM_OP => {}
            _ => return,
        }
        let words = does
            .as_chunks()
            .0
            .iter()
            .map(|word| u64::from_le_bytes(*word));
        to.extend(words.map(|word| (word, word.saturating_add(1))));
    }
}

/// The addresses of rows with a pitch, of which each has this width.
fn range_of(start: u64, (rows, pitch): (u64, u64), width: u64) -> (u64, u64) {
    let before = rows.saturating_sub(1).saturating_mul(pitch);
    (
        start,
        start.saturating_add(before).saturating_add(width.max(1)),
    )
}

/// A graph.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedGraph {
    /// Server's ordinal.
    pub device: u32,
    /// Number of nodes and edges.
    pub parts: u64,
    /// Nesting depth.
    pub height: usize,
    /// Its contents.
    pub template: Template,
    /// Handles known to the client: position among the nodes of all layers, handle, parts.
    pub handles: Vec<(u32, u64, u64)>,
    /// The bodies of conditional nodes, in the order of the template's layers.
    pub bodies: Vec<SavedBody>,
}

/// The body of a conditional node.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SavedBody {
    /// The client's handle.
    pub handle: u64,
    /// Number of nodes and edges.
    pub parts: u64,
    /// Nesting depth.
    pub height: usize,
}

impl SavedBody {
    /// Size of the body.
    pub fn size(&self) -> Size {
        Size {
            parts: self.parts,
            height: self.height,
        }
    }
}

impl SavedGraph {
    /// Size of the graph.
    pub fn size(&self) -> Size {
        Size {
            parts: self.parts,
            height: self.height,
        }
    }
}

/// An instance of a graph.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedExec {
    /// Server's ordinal.
    pub device: u32,
    /// `CUgraphInstantiate_flags`.
    pub flags: u64,
    /// Number of nodes and edges.
    pub parts: u64,
    /// Its launch may print.
    pub prints: bool,
    /// The graph that it was instantiated from, or that graph's contents if it has been destroyed.
    pub from: Source,
    /// Nodes whose operation differs in the instance.
    pub changed: BTreeMap<u32, Vec<u8>>,
    /// Disabled nodes.
    pub disabled: BTreeSet<u32>,
    /// Contents of another graph that it was updated from, before these changes.
    pub updated: Option<Template>,
    /// Flag slots of the nodes that call the client, by position.
    pub slots: Vec<(u32, u32)>,
}

/// The origin of an instance.
#[derive(Debug, Serialize, Deserialize)]
pub enum Source {
    /// An existing graph with this handle, which has a record of its own.
    Graph(u64),
    /// Contents of a graph that has been destroyed.
    Template(Template),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes with these dependencies, by position.
    fn template(dependencies: &[&[u32]], sinks: &[u32]) -> Template {
        let node = |on: &&[u32]| Node {
            kind: 0,
            device: 0,
            does: vec![1, 2, 3],
            attributes: [(8, vec![5])].into(),
            dependencies: on.iter().map(|on| (*on, [0; 8])).collect(),
            inside: None,
            bodies: Vec::new(),
        };
        Template {
            nodes: dependencies.iter().map(node).collect(),
            sinks: sinks.to_vec(),
            conditions: Vec::new(),
        }
    }

    #[test]
    fn nodes_keep_their_order_also_before_their_dependencies() {
        let order = |dependencies: &[&[u32]]| template(dependencies, &[]).order();
        assert_eq!(order(&[&[], &[0], &[0], &[1, 2]]), [0, 1, 2, 3]);
        assert_eq!(order(&[&[2], &[0], &[]]), [0, 1, 2]);
        assert_eq!(order(&[]), [0usize; 0]);
        assert_eq!(order(&[&[7]]), [0]);
        // Cycles.
        assert_eq!(order(&[&[1], &[0], &[1], &[]]), [0, 1, 2, 3]);
        assert_eq!(order(&[&[0], &[]]), [0, 1]);
    }

    #[test]
    fn sinks_come_last_in_the_order_of_their_capture() {
        let forked: &[&[u32]] = &[&[], &[0], &[0]];
        let order = |of, sinks: &[u32]| template(of, sinks).order();
        assert_eq!(order(forked, &[2, 1]), [0, 2, 1]);
        assert_eq!(order(forked, &[2, 2, 1, 2]), [0, 2, 1]);
        // One leaf got a dependent, and another was removed.
        let grown: &[&[u32]] = &[&[], &[0], &[0], &[2]];
        assert_eq!(order(grown, &[2, 1, 9]), [0, 2, 3, 1]);
        // Beside nodes that depend on each other in a circle.
        assert_eq!(order(&[&[], &[2], &[1]], &[0]), [1, 2, 0]);
    }

    #[test]
    fn bodies_are_counted_behind_the_graphs_that_they_are_in() {
        let mut outer = template(&[&[], &[0], &[]], &[]);
        let mut loops = template(&[&[], &[]], &[]);
        loops.nodes[1].bodies = vec![template(&[&[], &[0]], &[])];
        let empty = template(&[], &[]);
        outer.nodes[0].bodies = vec![loops, empty];
        outer.nodes[2].bodies = vec![template(&[&[]], &[])];
        for (at, node) in outer.nodes.iter_mut().enumerate() {
            node.kind = 10 + at as u32;
        }
        let layers: Vec<_> = outer.layers();
        let layers = layers.iter().map(|layer| (layer.first, layer.node));
        assert_eq!(
            layers.collect::<Vec<_>>(),
            [(0, 0), (3, 0), (5, 0), (5, 2), (6, 4)]
        );
        let (all, loops) = (outer.all_nodes(), &outer.nodes[0].bodies[0]);
        assert_eq!(all.len(), 8);
        for (place, node) in [
            (2, &outer.nodes[2]),
            (4, &loops.nodes[1]),
            (7, &loops.nodes[1].bodies[0].nodes[1]),
        ] {
            assert!(std::ptr::eq(all[place], node), "{place}");
        }
        assert!(outer.is_conditional() && !template(&[&[]], &[]).is_conditional());
    }

    #[test]
    fn the_same_nodes_are_found_at_other_positions() {
        let numbered = |dependencies: &[&[u32]], sinks: &[u32], numbers: &[u8]| {
            let mut template = template(dependencies, sinks);
            for (node, number) in template.nodes.iter_mut().zip(numbers) {
                node.does = vec![*number];
            }
            template
        };
        let forked = numbered(&[&[], &[0], &[0]], &[2, 1], &[7, 8, 9]);
        let again = numbered(&[&[], &[0], &[0]], &[1, 2], &[7, 9, 8]);
        assert!(forked.is_same(&again, &[0, 2, 1]) && forked.is_same(&forked, &[0, 1, 2]));
        assert!(!forked.is_same(&again, &[0, 1, 2]) && !forked.is_same(&again, &[0, 2]));
        for changed in [
            numbered(&[&[], &[0], &[0]], &[1, 2], &[7, 9, 6]),
            numbered(&[&[], &[0], &[1]], &[1, 2], &[7, 9, 8]),
            numbered(&[&[], &[0], &[0]], &[2, 1], &[7, 9, 8]),
            numbered(&[&[], &[0], &[0], &[]], &[1, 2], &[7, 9, 8, 1]),
        ] {
            assert!(!forked.is_same(&changed, &[0, 2, 1, 3]), "{changed:?}");
        }
        let holds = |inside: &Template, body: &Template| {
            let mut outer = template(&[&[], &[0]], &[]);
            outer.nodes[0].inside = Some(Box::new(inside.clone()));
            outer.nodes[1].bodies = vec![body.clone()];
            outer
        };
        // The nodes of a child graph are compared in the order in which they are created, the nodes of a body at their positions.
        let child = numbered(&[&[], &[]], &[0], &[2, 1]);
        let created = numbered(&[&[], &[]], &[1], &[1, 2]);
        let outer = holds(&child, &forked);
        assert!(outer.is_same(&holds(&created, &again), &[0, 1, 2, 4, 3]));
        assert!(!outer.is_same(&holds(&created, &again), &[0, 1, 2, 3, 4]));
        assert!(!outer.is_same(&holds(&again, &again), &[0, 1, 2, 4, 3]));
        assert!(!outer.is_same(&holds(&created, &again), &[0, 3, 2, 4, 1]));
    }

    #[test]
    fn what_is_written_down_is_read_again() {
        let mut outer = template(&[&[], &[0]], &[1]);
        outer.nodes[1].inside = Some(Box::new(template(&[&[]], &[])));
        outer.nodes[0].bodies = vec![template(&[&[]], &[0]), template(&[], &[])];
        outer.conditions.push(Condition {
            handle: 1,
            device: 2,
            default: 3,
            flags: 1,
        });
        let bytes = postcard::to_allocvec(&outer).expect("bytes");
        assert_eq!(postcard::from_bytes(&bytes), Ok(outer));
        assert!(postcard::from_bytes::<Template>(&bytes[..bytes.len() - 1]).is_err());
    }
}
