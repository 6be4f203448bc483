//! Many small blocks, linked to a list by one side and walked by the other.

use super::*;

/// The address of the next node and a value, at the start of each block.
const NODE: usize = 16;

struct List {
    nodes: Vec<u64>,
    lens: Vec<usize>,
}

fn address(at: u64) -> u64 {
    u64::from_le_bytes(host(at, 8).try_into().expect("8 bytes"))
}

fn word(at: u64) -> u32 {
    u32::from_le_bytes(host(at, 4).try_into().expect("4 bytes"))
}

/// What is behind the node, for block `index`.
fn rest(index: usize, len: usize) -> Vec<u8> {
    (NODE..len)
        .map(|offset| (offset * 7 + index * 13) as u8)
        .collect()
}

impl List {
    fn new(random: &mut Random, count: usize) -> Outcome<List> {
        let mut list = List {
            nodes: Vec::new(),
            lens: Vec::new(),
        };
        for index in 0..count {
            let len = NODE + random.below(4096 - NODE + 1);
            let at = allocate(len)?;
            host(at + NODE as u64, len - NODE).copy_from_slice(&rest(index, len));
            list.nodes.push(at);
            list.lens.push(len);
        }
        Ok(list)
    }

    /// An order of all nodes.
    fn order(&self, random: &mut Random) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        for end in (1..order.len()).rev() {
            order.swap(end, random.below(end + 1));
        }
        order
    }

    fn check_the_rest(&self) -> Outcome {
        for (index, (at, len)) in self.nodes.iter().zip(&self.lens).enumerate() {
            let expected = rest(index, *len);
            compare("behind a node", at + NODE as u64, &expected)?;
        }
        Ok(())
    }

    /// The host links, the device walks and adds, the host looks.
    fn device_walks(&self, setup: &Setup, random: &mut Random, out: u64) -> Outcome {
        let order = self.order(random);
        let (seed, added) = (random.number() as u32, random.number() as u32);
        let mut sum = 0u32;
        for (place, index) in order.iter().enumerate() {
            let at = self.nodes[*index];
            let next = order.get(place + 1).map_or(0, |next| self.nodes[*next]);
            let value = (*index as u32).wrapping_mul(seed);
            host(at, 8).copy_from_slice(&next.to_le_bytes());
            host(at + 8, 4).copy_from_slice(&value.to_le_bytes());
            sum = sum.wrapping_add(value);
        }
        let work = Work {
            to: out,
            from: self.nodes[order[0]],
            count: 1,
            value: added,
            ..Work::default()
        };
        setup
            .kernels
            .launch(setup.kernels.walk, CUstream::NULL, &work)?;
        must!(cuCtxSynchronize);
        let mut expected = sum.to_le_bytes().to_vec();
        expected.extend((order.len() as u32).to_le_bytes());
        compare("sum and number of the nodes", out, &expected)?;
        for (index, at) in self.nodes.iter().enumerate() {
            let expected = (index as u32).wrapping_mul(seed).wrapping_add(added);
            compare("a node's value", at + 8, &expected.to_le_bytes())?;
        }
        Ok(())
    }

    /// The device links, the host walks.
    fn host_walks(&self, setup: &Setup, random: &mut Random) -> Outcome {
        let order = self.order(random);
        let seed = random.number() as u32;
        let table = allocate(8 * (order.len() + 1))?;
        let mut addresses: Vec<u64> = order.iter().map(|index| self.nodes[*index]).collect();
        addresses.push(0);
        for (entry, at) in host(table, 8 * addresses.len())
            .chunks_exact_mut(8)
            .zip(&addresses)
        {
            entry.copy_from_slice(&at.to_le_bytes());
        }
        let work = Work {
            from: table,
            count: order.len(),
            value: seed,
            ..Work::default()
        };
        setup
            .kernels
            .launch(setup.kernels.link, CUstream::NULL, &work)?;
        must!(cuCtxSynchronize);
        let mut at = addresses[0];
        for (place, expected) in addresses.iter().enumerate() {
            if at != *expected {
                return Err(format!(
                    "node {place}: address {expected:#x} expected, got {at:#x}"
                ));
            }
            if at != 0 {
                let value = (place as u32).wrapping_mul(seed);
                if word(at + 8) != value {
                    let got = word(at + 8);
                    return Err(format!(
                        "node {place} at {at:#x}: {value} expected, got {got}"
                    ));
                }
                at = address(at);
            }
        }
        free(table)
    }
}

pub fn many(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let list = List::new(random, setup.blocks)?;
    let out = allocate(8)?;
    loop {
        list.device_walks(setup, random, out)?;
        list.host_walks(setup, random)?;
        if random.one_of(2) {
            list.check_the_rest()?;
        }
        if Instant::now() > until {
            break;
        }
    }
    list.check_the_rest()?;
    free(out)?;
    list.nodes.into_iter().try_for_each(free)
}
