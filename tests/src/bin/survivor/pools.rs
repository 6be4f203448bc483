//! Memory pools, their settings, and memory allocated from them.

use super::Status;
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ptr::from_mut;

/// Bytes of the blocks that each pool has: less than a unit of the server's, and more than it reserves at first.
const LENS: [usize; 4] = [1000, 4096, 3 << 20, 40 << 20];

/// A block, and the number in its first and its last word.
struct Block {
    pool: CUmemoryPool,
    address: CUdeviceptr,
    len: usize,
    number: u32,
}

impl Block {
    fn new(pool: CUmemoryPool, len: usize, number: u32, stream: CUstream) -> Status<Block> {
        let mut address: CUdeviceptr = 0;
        cu!(cuMemAllocFromPoolAsync, &mut address, len, pool, stream).ok()?;
        let mut block = Block {
            pool,
            address,
            len,
            number: 0,
        };
        block.write(number, stream)?;
        Ok(block)
    }

    fn words(&self) -> [CUdeviceptr; 2] {
        [self.address, self.address + self.len as u64 - 4]
    }

    fn write(&mut self, number: u32, stream: CUstream) -> Status {
        self.number = number;
        for word in self.words() {
            cu!(cuMemsetD32Async, word, number, 1usize, stream).ok()?;
        }
        Ok(())
    }

    fn is_right(&self) -> Status<bool> {
        let mut found = [0u32; 2];
        for (found, word) in found.iter_mut().zip(self.words()) {
            cu!(cuMemcpyDtoH_v2, from_mut(found), word, 4usize).ok()?;
        }
        Ok(found == [self.number; 2])
    }

    fn free(self, stream: CUstream) -> Status {
        cu!(cuMemFreeAsync, self.address, stream).ok()
    }
}

/// Numeric attributes of a pool.
const ATTRIBUTES: [u32; 8] = [
    CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_USED_MEM_HIGH,
];

fn attributes(pool: CUmemoryPool) -> Status<[u64; ATTRIBUTES.len()]> {
    let mut values = [0; ATTRIBUTES.len()];
    for (value, attribute) in values.iter_mut().zip(ATTRIBUTES) {
        cu!(cuMemPoolGetAttribute, pool, attribute, from_mut(value)).ok()?;
    }
    Ok(values)
}

/// Two pools, the default one and one of its own, which is the device's current pool; and blocks, also of a third pool, which
/// was destroyed.
pub struct Pools {
    stream: CUstream,
    pools: [CUmemoryPool; 2],
    blocks: Vec<Block>,
    expected: [[u64; ATTRIBUTES.len()]; 2],
    rounds: u32,
}

fn own() -> Status<CUmemoryPool> {
    let properties = CUmemPoolProps {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: 0,
        },
        max_size: 1 << 30,
        ..CUmemPoolProps::default()
    };
    let mut pool = CUmemoryPool::NULL;
    cu!(cuMemPoolCreate, &mut pool, &raw const properties).ok()?;
    Ok(pool)
}

impl Pools {
    pub fn new(stream: CUstream) -> Status<Pools> {
        let mut default = CUmemoryPool::NULL;
        cu!(cuDeviceGetDefaultMemPool, &mut default, 0 as CUdevice).ok()?;
        let (pool, destroyed) = (own()?, own()?);
        for (pool, bytes) in [(default, 300), (pool, 400)] {
            // More than there is at any time, so that the server trims nothing meanwhile.
            let mut threshold = (bytes as u64) << 20;
            let which = CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            cu!(cuMemPoolSetAttribute, pool, which, from_mut(&mut threshold)).ok()?;
        }
        let mut off = 0i32;
        let which = CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC;
        cu!(cuMemPoolSetAttribute, pool, which, from_mut(&mut off)).ok()?;
        cu!(cuDeviceSetMemPool, 0 as CUdevice, pool).ok()?;
        let mut blocks = Vec::new();
        for (number, len) in (1..).zip(LENS) {
            for pool in [default, pool, destroyed] {
                blocks.push(Block::new(pool, len, number, stream)?);
            }
        }
        cu!(cuMemPoolDestroy, destroyed).ok()?;
        for block in &mut blocks {
            if block.pool == destroyed {
                // Its successor comes from a pool that is there.
                block.pool = pool;
            }
        }
        let mut pools = Pools {
            stream,
            pools: [default, pool],
            blocks,
            expected: [[0; ATTRIBUTES.len()]; 2],
            rounds: 0,
        };
        pools.settle()?;
        Ok(pools)
    }

    /// Waits, and notes what the pools say then.
    fn settle(&mut self) -> Status {
        cu!(cuStreamSynchronize, self.stream).ok()?;
        for (expected, pool) in self.expected.iter_mut().zip(self.pools) {
            *expected = attributes(pool)?;
        }
        Ok(())
    }

    fn is_right(&self) -> Status<bool> {
        let mut current = CUmemoryPool::NULL;
        cu!(cuDeviceGetMemPool, &mut current, 0 as CUdevice).ok()?;
        let mut right = current == self.pools[1];
        for (expected, pool) in self.expected.iter().zip(self.pools) {
            let found = attributes(pool)?;
            if found != *expected {
                eprintln!("{found:?}, not {expected:?}");
                right = false;
            }
        }
        for block in &self.blocks {
            right &= block.is_right()?;
        }
        Ok(right)
    }

    /// Looks whether everything is as it was after the last round, and changes it. Returns the number of rounds; `None`:
    /// something is not as it was.
    pub fn round(&mut self) -> Status<Option<u32>> {
        if !self.is_right()? {
            return Ok(None);
        }
        self.rounds += 1;
        // The oldest goes, and a new one comes that must not lie in another.
        let oldest = self.blocks.remove(0);
        let (pool, len) = (oldest.pool, oldest.len);
        oldest.free(self.stream)?;
        let passing = Block::new(pool, len / 2, 77, self.stream)?;
        let number = 100 + self.rounds;
        self.blocks
            .push(Block::new(pool, len, number, self.stream)?);
        passing.free(self.stream)?;
        for block in self.blocks.iter_mut().step_by(3) {
            block.write(number, self.stream)?;
        }
        self.settle()?;
        Ok(self.is_right()?.then_some(self.rounds))
    }
}
