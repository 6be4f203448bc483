//! Allocations by address, and arrays by handle.

use std::collections::BTreeMap;

use super::account::Charge;

/// The object whose end frees an allocation, if it is not freed before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// A context that the program made.
    Context(u64),
    /// The primary context of a device, by the server's ordinal; also for allocations in a green context.
    Primary(usize),
    /// A pool's device.
    Pool,
}

/// One allocation.
#[derive(Debug)]
pub struct Block {
    pub owner: Owner,
    _charge: Charge,
}

impl Block {
    pub fn new(charge: Charge, owner: Owner) -> Block {
        Block {
            owner,
            _charge: charge,
        }
    }
}

/// An allocation that the driver was asked to free.
#[derive(Debug)]
pub struct Freed {
    pub address: u64,
    pub block: Block,
}

/// All of them.
#[derive(Debug)]
pub struct Blocks {
    linear: BTreeMap<u64, Block>,
    arrays: BTreeMap<u64, Block>,
    /// Contexts that the program made.
    contexts: Vec<u64>,
}

impl Blocks {
    pub const fn new() -> Blocks {
        Blocks {
            linear: BTreeMap::new(),
            arrays: BTreeMap::new(),
            contexts: Vec::new(),
        }
    }

    /// Adds an allocation. A known one at the same address has ended unnoticed: the driver would not have reused the
    /// address.
    pub fn add(&mut self, address: u64, block: Block) {
        // Allocations never have address 0.
        if address != 0 {
            self.linear.insert(address, block);
        }
    }

    /// Removes an allocation that is about to be freed.
    pub fn take(&mut self, address: u64) -> Option<Block> {
        self.linear.remove(&address)
    }

    /// The driver has refused to free it.
    pub fn put_back(&mut self, freed: Freed) {
        self.linear.entry(freed.address).or_insert(freed.block);
    }

    pub fn add_array(&mut self, handle: u64, block: Block) {
        self.arrays.insert(handle, block);
    }

    pub fn take_array(&mut self, handle: u64) -> Option<Block> {
        self.arrays.remove(&handle)
    }

    pub fn context_made(&mut self, context: u64) {
        if !self.was_made(context) {
            self.contexts.push(context);
        }
    }

    pub fn was_made(&self, context: u64) -> bool {
        self.contexts.contains(&context)
    }

    pub fn context_ended(&mut self, context: u64) {
        self.contexts.retain(|known| *known != context);
        self.forget(Owner::Context(context));
    }

    /// The primary context of a device ended; `gone` tells whether memory of a pool has ended too.
    pub fn primary_ended(&mut self, server: usize, gone: impl Fn(u64) -> bool) {
        self.forget(Owner::Primary(server));
        self.linear
            .retain(|address, block| block.owner != Owner::Pool || !gone(*address));
    }

    fn forget(&mut self, owner: Owner) {
        self.linear.retain(|_, block| block.owner != owner);
        self.arrays.retain(|_, block| block.owner != owner);
    }
}

#[cfg(test)]
mod tests {
    use super::super::account::tests::{account, held};
    use super::*;

    #[test]
    fn an_address_counts_until_it_is_freed() {
        let account = account(100);
        let mut blocks = Blocks::new();
        let block = |bytes| Block::new(account.take(bytes).unwrap(), Owner::Primary(0));
        blocks.add(0x1000, block(10));
        blocks.add(0x2000, block(20));
        assert!(blocks.take(0x1800).is_none(), "in the midst of nothing");
        let taken = blocks.take(0x1000).unwrap();
        assert!(blocks.take(0x1000).is_none(), "a second free");
        assert_eq!(held(account), 30, "the driver has not freed it yet");
        // Refused.
        blocks.put_back(Freed {
            address: 0x1000,
            block: taken,
        });
        drop(blocks.take(0x1000));
        assert_eq!(held(account), 20);
        // The driver reuses an address whose end was not noticed.
        blocks.add(0x2000, block(5));
        assert_eq!(held(account), 5);
        blocks.add(0, block(7));
        assert_eq!(held(account), 5);
    }

    #[test]
    fn what_a_context_holds_ends_with_it() {
        let account = account(u64::MAX);
        let mut blocks = Blocks::new();
        let block = |owner| Block::new(account.take(1).unwrap(), owner);
        blocks.context_made(7);
        blocks.context_made(8);
        for (at, owner) in [
            Owner::Context(7),
            Owner::Context(8),
            Owner::Primary(0),
            Owner::Primary(1),
            Owner::Pool,
            Owner::Pool,
        ]
        .into_iter()
        .enumerate()
        {
            blocks.add(1 + at as u64, block(owner));
            if owner != Owner::Pool {
                blocks.add_array(1 + at as u64, block(owner));
            }
        }
        assert_eq!(held(account), 10);
        assert!(blocks.was_made(7) && !blocks.was_made(9));
        blocks.context_ended(7);
        assert!(!blocks.was_made(7));
        assert_eq!(held(account), 8);
        blocks.primary_ended(0, |address| address == 6);
        assert_eq!(held(account), 5);
        assert!(blocks.take(3).is_none() && blocks.take_array(3).is_none());
        assert!(blocks.take(5).is_some() && blocks.take_array(4).is_some());
    }
}
