//! Host and device change the same blocks in turns.

use super::*;
use std::ops::Range;

/// Blocks alive at once.
const BLOCKS: usize = 48;

/// A block and what must be in it.
pub struct Block {
    pub at: u64,
    pub model: Vec<u8>,
    /// A kernel that uses it may not have ended.
    busy: bool,
}

impl Block {
    /// Its first bytes are those of the model from the beginning.
    pub fn new(random: &mut Random, len: usize) -> Outcome<Block> {
        let at = allocate(len)?;
        let model = random.bytes(len);
        host(at, len).copy_from_slice(&model);
        Ok(Block {
            at,
            model,
            busy: false,
        })
    }

    pub fn check(&self, what: &str) -> Outcome {
        compare(what, self.at, &self.model)
    }

    pub fn free(self, what: &str) -> Outcome {
        self.check(what)?;
        free(self.at)
    }
}

/// Streams and blocks that one thread uses.
pub struct World<'a> {
    setup: &'a Setup,
    /// The stream that is used now; the other one's work is before its work.
    stream: CUstream,
    other: CUstream,
    pub random: Random,
    pub blocks: Vec<Block>,
    /// Bytes of the largest block.
    most: usize,
    /// Bytes of all blocks at most.
    all: usize,
}

/// The part of a range that is whole words of the block.
fn words(range: &Range<usize>) -> Range<usize> {
    let end = range.end & !3;
    range.start.next_multiple_of(4).min(end)..end
}

impl<'a> World<'a> {
    pub fn new(setup: &'a Setup, seed: u64, most: usize) -> Outcome<World<'a>> {
        let mut random = Random::new(seed);
        let other = match random.below(4) {
            0 => CUstream::NULL,
            1 => CU_STREAM_PER_THREAD,
            _ => stream()?,
        };
        Ok(World {
            setup,
            stream: stream()?,
            other,
            random,
            blocks: Vec::new(),
            most,
            all: 4 * most,
        })
    }

    fn chosen(&mut self) -> usize {
        self.random.below(self.blocks.len())
    }

    /// Waits until no kernel uses any block.
    pub fn settle(&mut self) -> Outcome {
        wait(&mut self.random, self.stream)?;
        self.blocks.iter_mut().for_each(|block| block.busy = false);
        Ok(())
    }

    /// Goes on in the other stream, after the work of this one.
    fn switch(&mut self) -> Outcome {
        let mut event = CUevent::NULL;
        must!(cuEventCreate, &mut event, 2 as c_uint);
        must!(cuEventRecord, event, self.stream);
        must!(cuStreamWaitEvent, self.other, event, 0 as c_uint);
        must!(cuEventDestroy_v2, event);
        std::mem::swap(&mut self.stream, &mut self.other);
        Ok(())
    }

    /// A block that the host may use.
    fn for_the_host(&mut self) -> Outcome<usize> {
        let chosen = self.chosen();
        if self.blocks[chosen].busy {
            self.settle()?;
        }
        Ok(chosen)
    }

    fn allocate(&mut self) -> Outcome {
        let used: usize = self.blocks.iter().map(|block| block.model.len()).sum();
        let len = self.random.size(self.most);
        if self.blocks.len() < BLOCKS && used + len <= self.all {
            let block = Block::new(&mut self.random, len)?;
            self.blocks.push(block);
        } else {
            let chosen = self.for_the_host()?;
            self.blocks.swap_remove(chosen).free("before it is freed")?;
        }
        Ok(())
    }

    fn host_writes(&mut self) -> Outcome {
        let chosen = self.for_the_host()?;
        let block = &mut self.blocks[chosen];
        let range = self.random.range(block.model.len());
        let at = block.at + range.start as u64;
        match self.random.below(4) {
            0 => {
                let byte = self.random.number() as u8;
                host(at, range.len()).fill(byte);
                block.model[range].fill(byte);
            }
            1 => {
                let words = words(&range);
                let value = self.random.number() as u32;
                add_words(host(block.at + words.start as u64, words.len()), value);
                add_words(&mut block.model[words], value);
            }
            2 => {
                // Some bytes that lie apart.
                for _ in 0..32 {
                    let offset = self.random.below(block.model.len());
                    let byte = self.random.number() as u8;
                    store(block.at + offset as u64, byte);
                    block.model[offset] = byte;
                }
            }
            _ => {
                let bytes = self.random.bytes(range.len());
                host(at, range.len()).copy_from_slice(&bytes);
                block.model[range].copy_from_slice(&bytes);
            }
        }
        Ok(())
    }

    fn host_reads(&mut self) -> Outcome {
        let chosen = self.for_the_host()?;
        let block = &self.blocks[chosen];
        if self.random.one_of(2) {
            for _ in 0..32 {
                let offset = self.random.below(block.model.len());
                let at = block.at + offset as u64;
                same("a byte", at, &[block.model[offset]], &[load(at)])?;
            }
            return Ok(());
        }
        let range = self.random.range(block.model.len());
        compare("host", block.at + range.start as u64, &block.model[range])
    }

    fn device_adds(&mut self) -> Outcome {
        let chosen = self.chosen();
        let value = self.random.number() as u32;
        let kernels = &self.setup.kernels;
        let block = &mut self.blocks[chosen];
        block.busy = true;
        let range = self.random.range(block.model.len());
        let words = words(&range);
        let (function, count, range) = if words.is_empty() || self.random.one_of(3) {
            add_bytes(&mut block.model[range.clone()], value);
            (kernels.add_bytes, range.len(), range)
        } else {
            add_words(&mut block.model[words.clone()], value);
            (kernels.add_words, words.len() / 4, words)
        };
        let work = Work {
            to: block.at + range.start as u64,
            count,
            value,
            ..Work::default()
        };
        kernels.launch(function, self.stream, &work)
    }

    fn device_fills(&mut self) -> Outcome {
        let chosen = self.chosen();
        let value = self.random.number() as u32;
        let kernels = &self.setup.kernels;
        let block = &mut self.blocks[chosen];
        block.busy = true;
        let range = self.random.range(block.model.len());
        let words = words(&range);
        let (function, count, range) = if words.is_empty() || self.random.one_of(3) {
            block.model[range.clone()].fill(value as u8);
            (kernels.fill_bytes, range.len(), range)
        } else {
            for word in block.model[words.clone()].chunks_exact_mut(4) {
                word.copy_from_slice(&value.to_le_bytes());
            }
            (kernels.fill_words, words.len() / 4, words)
        };
        let work = Work {
            to: block.at + range.start as u64,
            count,
            value,
            ..Work::default()
        };
        kernels.launch(function, self.stream, &work)
    }

    /// From one block to another.
    fn device_copies(&mut self) -> Outcome {
        let (from, to) = (self.chosen(), self.chosen());
        if from == to {
            return Ok(());
        }
        let kernels = &self.setup.kernels;
        let len = self.blocks[from].model.len();
        let range = self.random.range(len.min(self.blocks[to].model.len()));
        let in_words = self.random.one_of(2) && range.len() >= 4;
        let (len, unit) = match in_words {
            true => (range.len() & !3, 4),
            false => (range.len(), 1),
        };
        let first = |random: &mut Random, all: usize| random.below((all - len) / unit + 1) * unit;
        let source = first(&mut self.random, self.blocks[from].model.len());
        let target = first(&mut self.random, self.blocks[to].model.len());
        let bytes = self.blocks[from].model[source..source + len].to_vec();
        self.blocks[to].model[target..target + len].copy_from_slice(&bytes);
        for block in [from, to] {
            self.blocks[block].busy = true;
        }
        let work = Work {
            to: self.blocks[to].at + target as u64,
            from: self.blocks[from].at + source as u64,
            count: len / unit,
            ..Work::default()
        };
        let function = match in_words {
            true => kernels.copy_words,
            false => kernels.copy_bytes,
        };
        kernels.launch(function, self.stream, &work)
    }

    pub fn turn(&mut self) -> Outcome {
        if self.blocks.is_empty() {
            return self.allocate();
        }
        match self.random.below(17) {
            16 => self.switch(),
            0..=1 => self.allocate(),
            2..=4 => self.host_writes(),
            5..=8 => self.host_reads(),
            9..=11 => self.device_adds(),
            12 => self.device_fills(),
            13..=14 => self.device_copies(),
            _ => self.settle(),
        }
    }

    /// Checks and frees all.
    pub fn end(mut self) -> Outcome {
        self.settle()?;
        for block in self.blocks.drain(..) {
            block.free("at the end")?;
        }
        for stream in [self.stream, self.other] {
            if ![CUstream::NULL, CU_STREAM_PER_THREAD].contains(&stream) {
                must!(cuStreamDestroy_v2, stream);
            }
        }
        Ok(())
    }
}

pub fn turns(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let mut world = World::new(setup, random.number(), setup.most)?;
    loop {
        world.turn()?;
        if Instant::now() > until {
            return world.end();
        }
    }
}

/// Several threads with their blocks and streams; others read blocks that the device has left.
pub fn threads(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let most = (setup.most / 4).max(16);
    let mut left = Vec::new();
    for len in [1, 64, 5000, 70_000] {
        let block = Block::new(random, len)?;
        let mut model = block.model.clone();
        add_bytes(&mut model, 9);
        let work = Work {
            to: block.at,
            count: len,
            value: 9,
            ..Work::default()
        };
        let kernels = &setup.kernels;
        kernels.launch(kernels.add_bytes, CUstream::NULL, &work)?;
        left.push((block.at, model));
    }
    must!(cuCtxSynchronize);
    let mut all: Vec<Box<dyn FnOnce() -> Outcome + Send + '_>> = Vec::new();
    for _ in 0..4 {
        let seed = random.number();
        all.push(Box::new(move || {
            setup.enter()?;
            let mut world = World::new(setup, seed, most)?;
            while Instant::now() < until {
                world.turn()?;
            }
            world.end()
        }));
    }
    for _ in 0..2 {
        let left = left.clone();
        // It never calls the driver.
        all.push(Box::new(move || {
            while Instant::now() < until {
                for (at, model) in &left {
                    compare("read by another thread", *at, model)?;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }));
    }
    together(all)?;
    for (at, model) in left {
        compare("after the threads", at, &model)?;
        free(at)?;
    }
    Ok(())
}
