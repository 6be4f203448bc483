//! Memory that the nodes of graphs allocate. A node's address is fixed when the node is created; its memory counts from
//! instantiation until no instance exists and no launch has left it allocated.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};

use mpsshim_api::cuda::{
    CU_GRAPH_NODE_TYPE_GRAPH, CU_GRAPH_NODE_TYPE_MEM_ALLOC, CU_GRAPH_NODE_TYPE_MEM_FREE,
    CUDA_MEM_ALLOC_NODE_PARAMS, CUmemLocation,
};

use super::blocks::{Block, Owner};
use super::driver;

/// Most programs' graphs have no memory nodes: their launches need not look further.
static ANY: AtomicBool = AtomicBool::new(false);

/// Whether any graph with memory nodes was instantiated.
pub fn any() -> bool {
    ANY.load(Ordering::Relaxed)
}

/// A node that allocates.
#[derive(Debug)]
pub struct Allocating {
    pub address: u64,
    pub bytes: u64,
    pub location: CUmemLocation,
}

/// Memory that the nodes of a graph allocate and free.
#[derive(Debug, Default)]
pub struct MemoryNodes {
    pub allocating: Vec<Allocating>,
    pub freed: Vec<u64>,
}

impl MemoryNodes {
    pub fn is_empty(&self) -> bool {
        self.allocating.is_empty() && self.freed.is_empty()
    }
}

/// The memory nodes of a graph and of its child graphs. The driver does not instantiate a graph whose nodes it does not
/// list.
pub fn memory_nodes(graph: u64) -> MemoryNodes {
    let mut found = MemoryNodes::default();
    collect(graph, &mut found, 0);
    found
}

/// Maximum nesting of graphs; a graph cannot contain itself.
const DEPTH: u32 = 64;

fn collect(graph: u64, found: &mut MemoryNodes, depth: u32) {
    let mut count = 0;
    let counted = driver::nodes(graph, std::ptr::null_mut(), &mut count);
    if !counted.is_ok() || count == 0 || depth == DEPTH {
        return;
    }
    let mut nodes = vec![0; count];
    if !driver::nodes(graph, nodes.as_mut_ptr(), &mut count).is_ok() {
        return;
    }
    nodes.truncate(count);
    for node in nodes {
        let mut kind = 0;
        if !driver::node_type(node, &mut kind).is_ok() {
            continue;
        }
        match kind {
            CU_GRAPH_NODE_TYPE_MEM_ALLOC => {
                let mut params = CUDA_MEM_ALLOC_NODE_PARAMS::default();
                if driver::alloc_node(node, &mut params).is_ok() {
                    found.allocating.push(Allocating {
                        address: params.address,
                        bytes: params.bytes,
                        location: CUmemLocation {
                            kind: params.location_kind,
                            id: params.location as i32,
                        },
                    });
                }
            }
            CU_GRAPH_NODE_TYPE_MEM_FREE => {
                let mut address = 0;
                if driver::free_node(node, &mut address).is_ok() {
                    found.freed.push(address);
                }
            }
            CU_GRAPH_NODE_TYPE_GRAPH => {
                let mut child = 0;
                if driver::child_graph(node, &mut child).is_ok() {
                    collect(child, found, depth + 1);
                }
            }
            _ => {}
        }
    }
}

/// An instance.
#[derive(Debug)]
pub struct Exec {
    allocates: Vec<u64>,
    /// Memory that a launch leaves allocated.
    leaves: Vec<u64>,
    /// Memory left by another launch that a launch frees.
    frees: Vec<u64>,
}

#[derive(Debug)]
struct Counted {
    block: Block,
    /// Instances that allocate it.
    execs: u32,
    /// A launch has left it allocated, and it has not been freed.
    left: bool,
}

/// Instances and the memory that they allocate.
#[derive(Debug)]
pub struct Graphs {
    execs: BTreeMap<u64, Exec>,
    memory: BTreeMap<u64, Counted>,
}

impl Graphs {
    pub const fn new() -> Graphs {
        Graphs {
            execs: BTreeMap::new(),
            memory: BTreeMap::new(),
        }
    }

    /// Whether a node's memory is counted already.
    pub fn counts(&self, address: u64) -> bool {
        self.memory.contains_key(&address)
    }

    /// Adds an instance of a graph with these nodes; `taken` holds the memory that was not counted before.
    pub fn instantiated(&mut self, exec: u64, nodes: &MemoryNodes, taken: HashMap<u64, Block>) {
        ANY.store(true, Ordering::Relaxed);
        for (address, block) in taken {
            self.memory.entry(address).or_insert(Counted {
                block,
                execs: 0,
                left: false,
            });
        }
        let allocates: Vec<u64> = nodes.allocating.iter().map(|node| node.address).collect();
        let leaves = allocates.iter().filter(|at| !nodes.freed.contains(at));
        let frees = nodes.freed.iter().filter(|at| !allocates.contains(at));
        let instance = Exec {
            leaves: leaves.copied().collect(),
            frees: frees.copied().collect(),
            allocates,
        };
        for address in &instance.allocates {
            if let Some(counted) = self.memory.get_mut(address) {
                counted.execs += 1;
            }
        }
        if let Some(ended_unseen) = self.execs.insert(exec, instance) {
            self.destroyed(&ended_unseen);
        }
    }

    pub fn launched(&mut self, exec: u64) {
        let Some(Exec { leaves, frees, .. }) = self.execs.get(&exec) else {
            return;
        };
        for address in leaves {
            if let Some(counted) = self.memory.get_mut(address) {
                counted.left = true;
            }
        }
        for address in frees.clone() {
            self.free(address);
            self.forget_unused(address);
        }
    }

    /// Removes an instance that is about to be destroyed.
    pub fn take(&mut self, exec: u64) -> Option<Exec> {
        self.execs.remove(&exec)
    }

    /// The driver has refused to destroy it.
    pub fn put_back(&mut self, exec: u64, instance: Exec) {
        self.execs.entry(exec).or_insert(instance);
    }

    pub fn destroyed(&mut self, instance: &Exec) {
        for address in &instance.allocates {
            if let Some(counted) = self.memory.get_mut(address) {
                counted.execs = counted.execs.saturating_sub(1);
            }
            self.forget_unused(*address);
        }
    }

    /// Memory that a launch has left is about to be freed. Returns whether there is such memory.
    pub fn free(&mut self, address: u64) -> bool {
        let counted = self.memory.get_mut(&address);
        counted.is_some_and(|counted| std::mem::take(&mut counted.left))
    }

    /// The driver has refused to free it.
    pub fn not_freed(&mut self, address: u64) {
        if let Some(counted) = self.memory.get_mut(&address) {
            counted.left = true;
        }
    }

    /// Stops counting memory that no instance allocates and no launch has left.
    pub fn forget_unused(&mut self, address: u64) {
        if let Some(counted) = self.memory.get(&address)
            && counted.execs == 0
            && !counted.left
        {
            self.memory.remove(&address);
        }
    }

    pub fn context_ended(&mut self, owner: Owner) {
        self.memory
            .retain(|_, counted| counted.block.owner != owner);
    }
}

#[cfg(test)]
mod tests {
    use super::super::account::Account;
    use super::super::account::tests::{account, held};
    use super::*;

    fn instantiate(
        graphs: &mut Graphs,
        account: Account,
        exec: u64,
        allocating: &[u64],
        freed: &[u64],
    ) {
        let allocating = allocating.iter().map(|address| Allocating {
            address: *address,
            bytes: 10,
            location: CUmemLocation::default(),
        });
        let nodes = MemoryNodes {
            allocating: allocating.collect(),
            freed: freed.to_vec(),
        };
        let taken = nodes
            .allocating
            .iter()
            .filter(|node| !graphs.counts(node.address))
            .map(|node| {
                let charge = account.take(node.bytes).unwrap();
                (node.address, Block::new(charge, Owner::Primary(0)))
            });
        let taken = taken.collect();
        graphs.instantiated(exec, &nodes, taken);
    }

    fn destroy(graphs: &mut Graphs, exec: u64) {
        let instance = graphs.take(exec).unwrap();
        graphs.destroyed(&instance);
    }

    #[test]
    fn an_instance_holds_what_its_nodes_allocate() {
        let account = account(u64::MAX);
        let mut graphs = Graphs::new();
        instantiate(&mut graphs, account, 1, &[100, 200], &[100, 200]);
        assert_eq!(held(account), 20);
        graphs.launched(1);
        assert!(!graphs.free(100), "the graph has freed it");
        let instance = graphs.take(1).unwrap();
        graphs.put_back(1, instance);
        assert_eq!(held(account), 20);
        destroy(&mut graphs, 1);
        assert_eq!(held(account), 0);
        assert!(graphs.take(1).is_none());
    }

    #[test]
    fn what_a_launch_has_left_outlives_the_instance() {
        let account = account(u64::MAX);
        let mut graphs = Graphs::new();
        instantiate(&mut graphs, account, 1, &[100, 200], &[]);
        graphs.launched(1);
        destroy(&mut graphs, 1);
        assert_eq!(held(account), 20);
        // Freed by the program; the first time the driver refuses.
        assert!(graphs.free(100));
        graphs.not_freed(100);
        assert!(graphs.free(100));
        graphs.forget_unused(100);
        assert_eq!(held(account), 10);
        // Freed by a node of another graph.
        instantiate(&mut graphs, account, 2, &[], &[200]);
        assert_eq!(held(account), 10);
        graphs.launched(2);
        assert_eq!(held(account), 0);
    }

    #[test]
    fn what_was_freed_counts_while_there_is_an_instance() {
        let account = account(u64::MAX);
        let mut graphs = Graphs::new();
        instantiate(&mut graphs, account, 1, &[100], &[]);
        for _ in 0..3 {
            graphs.launched(1);
            assert!(graphs.free(100));
            graphs.forget_unused(100);
            assert_eq!(held(account), 10);
        }
        destroy(&mut graphs, 1);
        assert_eq!(held(account), 0);
        instantiate(&mut graphs, account, 1, &[100], &[]);
        graphs.context_ended(Owner::Primary(0));
        assert_eq!(held(account), 0);
        graphs.launched(1);
        destroy(&mut graphs, 1);
    }
}
