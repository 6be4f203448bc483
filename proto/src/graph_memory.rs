//! Memory of allocation nodes of graphs: its addresses, and its lifetime.
//!
//! The address of such a node is fixed when the node is added. It is valid memory while an instance runs and
//! afterwards, unless a graph or the program frees it, even when graph and instance are gone (CUDA Programming Guide,
//! "Graph Memory Nodes"). Client and server each keep one of these.

use std::collections::BTreeMap;

#[derive(Clone, Debug)]
struct Block {
    len: u64,
    /// The graphs and instances that allocate it.
    holders: Vec<u64>,
    /// Its own graph frees it.
    freed_inside: bool,
    /// A launch has left it allocated.
    left: bool,
}

/// The blocks of one session, by address.
#[derive(Clone, Debug, Default)]
pub struct GraphMemory {
    blocks: BTreeMap<u64, Block>,
    /// Graph or instance, and an address that it frees.
    frees: Vec<(u64, u64)>,
}

impl GraphMemory {
    /// No blocks.
    pub const fn new() -> GraphMemory {
        GraphMemory {
            blocks: BTreeMap::new(),
            frees: Vec::new(),
        }
    }

    /// Whether no graph allocates or frees anything, and nothing is left.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.frees.is_empty()
    }

    /// A node of `graph` allocates `len` bytes at `start`.
    pub fn given(&mut self, start: u64, len: u64, graph: u64) {
        let block = Block {
            len,
            holders: vec![graph],
            freed_inside: false,
            left: false,
        };
        self.blocks.insert(start, block);
    }

    /// A node of `graph` frees the block at `start`.
    pub fn freed_by(&mut self, start: u64, graph: u64) {
        self.frees.push((graph, start));
        if let Some(block) = self.blocks.get_mut(&start) {
            block.freed_inside |= block.holders.contains(&graph);
        }
    }

    /// `to` allocates and frees the same blocks as `from`: an instance, a clone, or the graph around a child.
    pub fn share(&mut self, from: u64, to: u64) {
        for block in self.blocks.values_mut() {
            if block.holders.contains(&from) && !block.holders.contains(&to) {
                block.holders.push(to);
            }
        }
        let frees: Vec<(u64, u64)> = self
            .frees
            .iter()
            .filter(|(of, _)| *of == from)
            .copied()
            .collect();
        self.frees
            .extend(frees.into_iter().map(|(_, start)| (to, start)));
    }

    /// An instance is launched.
    pub fn launched(&mut self, exec: u64) {
        for (_, start) in self.frees.iter().filter(|(of, _)| *of == exec) {
            if let Some(block) = self.blocks.get_mut(start) {
                block.left = false;
            }
        }
        for block in self.blocks.values_mut() {
            block.left |= !block.freed_inside && block.holders.contains(&exec);
        }
        self.sweep();
    }

    /// The program frees the block at `start`.
    pub fn freed(&mut self, start: u64) {
        if let Some(block) = self.blocks.get_mut(&start) {
            block.left = false;
        }
        self.sweep();
    }

    /// A graph or an instance is destroyed.
    pub fn ended(&mut self, holder: u64) {
        self.frees.retain(|(of, _)| *of != holder);
        for block in self.blocks.values_mut() {
            block.holders.retain(|of| *of != holder);
        }
        self.sweep();
    }

    fn sweep(&mut self) {
        self.blocks
            .retain(|_, block| block.left || !block.holders.is_empty());
    }

    /// The blocks that a graph or an instance allocates: address and bytes.
    pub fn of(&self, holder: u64) -> impl Iterator<Item = (u64, u64)> {
        let blocks = self.blocks.iter();
        let held = blocks.filter(move |(_, block)| block.holders.contains(&holder));
        held.map(|(start, block)| (*start, block.len))
    }

    /// Addresses that a graph or an instance frees.
    pub fn frees_of(&self, holder: u64) -> Vec<u64> {
        let frees = self.frees.iter().filter(|(of, _)| *of == holder);
        frees.map(|(_, start)| *start).collect()
    }

    /// Whether a block begins at this address.
    pub fn begins(&self, start: u64) -> bool {
        self.blocks.contains_key(&start)
    }

    /// The bytes from an address to the end of its block.
    pub fn behind(&self, address: u64) -> Option<u64> {
        let (start, block) = self.blocks.range(..=address).next_back()?;
        (address - start < block.len).then(|| block.len - (address - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_lives_as_long_as_what_allocates_it() {
        let mut memory = GraphMemory::new();
        memory.given(0x1000, 64, 1);
        memory.freed_by(0x1000, 1);
        memory.share(1, 10);
        memory.ended(1);
        memory.launched(10);
        assert_eq!(memory.behind(0x1010), Some(48));
        assert_eq!(memory.behind(0x1040), None);
        memory.ended(10);
        assert!(memory.is_empty());
    }

    #[test]
    fn what_a_launch_leaves_lives_until_it_is_freed() {
        let mut memory = GraphMemory::new();
        memory.given(0x1000, 64, 1);
        memory.share(1, 10);
        memory.ended(1);
        memory.launched(10);
        memory.ended(10);
        assert!(memory.begins(0x1000));
        memory.freed(0x1000);
        assert!(memory.is_empty());
        // Never launched: nothing was left.
        memory.given(0x2000, 64, 2);
        memory.ended(2);
        assert!(memory.is_empty());
    }

    #[test]
    fn another_graph_may_free_it() {
        let mut memory = GraphMemory::new();
        memory.given(0x1000, 64, 1);
        memory.freed_by(0x1000, 2);
        memory.launched(1);
        memory.ended(1);
        assert!(memory.begins(0x1000));
        memory.launched(2);
        assert!(!memory.begins(0x1000));
        memory.ended(2);
        assert!(memory.is_empty());
    }

    #[test]
    fn what_a_graph_allocates_and_frees_is_shared_and_nothing_else() {
        let mut memory = GraphMemory::new();
        memory.given(0x1000, 64, 1);
        memory.given(0x2000, 32, 2);
        memory.given(0x3000, 16, 1);
        memory.freed_by(0x3000, 1);
        memory.freed_by(0x2000, 2);
        memory.share(1, 10);
        assert!(memory.of(10).eq([(0x1000, 64), (0x3000, 16)]));
        assert_eq!(memory.frees_of(10), [0x3000]);
        assert!(memory.of(2).eq([(0x2000, 32)]));
        memory.share(7, 70);
        assert!(memory.of(70).next().is_none());
        assert!(memory.frees_of(70).is_empty());
        // Both in one graph, which then has the blocks of both.
        memory.share(2, 10);
        let all = [(0x1000, 64), (0x2000, 32), (0x3000, 16)];
        assert!(memory.of(10).eq(all));
        assert_eq!(memory.frees_of(10), [0x3000, 0x2000]);
        memory.ended(10);
        assert!(memory.of(1).eq([(0x1000, 64), (0x3000, 16)]));
        assert_eq!(memory.frees_of(1), [0x3000]);
    }

    #[test]
    fn a_graph_that_only_frees_or_only_allocates_is_not_nothing() {
        let mut memory = GraphMemory::new();
        assert!(memory.is_empty());
        memory.freed_by(0x1000, 1);
        assert!(!memory.is_empty());
        memory.ended(2);
        assert!(!memory.is_empty());
        memory.ended(1);
        assert!(memory.is_empty());
        memory.given(0x1000, 64, 1);
        assert!(!memory.is_empty());
    }

    #[test]
    fn only_addresses_inside_a_block_have_bytes_behind_them() {
        let mut memory = GraphMemory::new();
        memory.given(0x1000, 64, 1);
        memory.given(0x1100, 32, 1);
        for (address, bytes) in [
            (0, None),
            (0xfff, None),
            (0x1000, Some(64)),
            (0x103f, Some(1)),
            (0x1040, None),
            (0x10ff, None),
            (0x1100, Some(32)),
            (0x111f, Some(1)),
            (0x1120, None),
            (u64::MAX, None),
        ] {
            assert_eq!(memory.behind(address), bytes, "{address:#x}");
            let begins = matches!(address, 0x1000 | 0x1100);
            assert_eq!(memory.begins(address), begins, "{address:#x}");
        }
    }

    #[test]
    fn a_launch_leaves_what_its_graph_does_not_free() {
        let mut memory = GraphMemory::new();
        memory.given(0x1000, 64, 1);
        memory.given(0x2000, 64, 1);
        memory.given(0x3000, 64, 2);
        memory.freed_by(0x2000, 1);
        memory.launched(1);
        memory.ended(1);
        memory.ended(2);
        let left = [0x1000, 0x2000, 0x3000].map(|start| memory.begins(start));
        assert_eq!(left, [true, false, false]);
        memory.freed(0x2000);
        assert!(memory.begins(0x1000));
    }
}
