//! The host uses the same few bytes of blocks after each kernel, as MPI ranks exchange the edges of their domains.

use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes at the beginning of a block that only one host thread uses, and kernels do not.
const APART: usize = 64;
/// Bytes of an edge.
const EDGE: usize = 256;
/// Rounds with the same blocks.
const ROUNDS: usize = 400;

/// Two blocks, of which each kernel makes one from the other.
struct Pair {
    at: [u64; 2],
    /// All bytes but those apart.
    model: [Vec<u8>; 2],
}

impl Pair {
    fn new(random: &mut Random, len: usize) -> Outcome<Pair> {
        let mut pair = Pair {
            at: [allocate(len)?, allocate(len)?],
            model: [random.bytes(len), random.bytes(len)],
        };
        for side in 0..2 {
            pair.model[side][..APART].fill(0);
            host(pair.at[side], len).copy_from_slice(&pair.model[side]);
        }
        Ok(pair)
    }

    fn len(&self) -> usize {
        self.model[0].len()
    }

    /// `to` becomes the other one, and `value` is added to its words.
    fn step(&mut self, setup: &Setup, stream: CUstream, to: usize, value: u32) -> Outcome {
        let len = self.len();
        let work = Work {
            to: self.at[to] + APART as u64,
            from: self.at[1 - to] + APART as u64,
            count: (len - APART) / 4,
            value,
            ..Work::default()
        };
        let kernels = &setup.kernels;
        kernels.launch(kernels.copy_words, stream, &work)?;
        kernels.launch(kernels.add_words, stream, &work)?;
        let [first, second] = &mut self.model;
        let (to, from) = match to {
            0 => (first, second),
            _ => (second, first),
        };
        to[APART..].copy_from_slice(&from[APART..]);
        add_words(&mut to[APART..], value);
        Ok(())
    }

    fn compare(&self, what: &str, side: usize, range: std::ops::Range<usize>) -> Outcome {
        let at = self.at[side] + range.start as u64;
        super::compare(what, at, &self.model[side][range])
    }

    fn change(&mut self, side: usize, offset: usize, byte: u8) {
        store(self.at[side] + offset as u64, byte);
        self.model[side][offset] = byte;
    }

    /// The host reads and writes the edges of a block.
    fn exchange(&mut self, random: &mut Random, side: usize) -> Outcome {
        let len = self.len();
        for edge in [APART..APART + EDGE, len - EDGE..len] {
            self.compare("an edge", side, edge.clone())?;
            let bytes = random.number().to_le_bytes();
            self.change(side, edge.start, bytes[0]);
            self.change(side, edge.start + random.below(EDGE), bytes[1]);
        }
        Ok(())
    }

    fn free(self) -> Outcome {
        for side in 0..2 {
            self.compare("at the end", side, APART..self.len())?;
            free(self.at[side])?;
        }
        Ok(())
    }
}

/// Changes the bytes apart of both blocks until it is told to stop, and uses a stream and a block of its own.
fn beside(setup: &Setup, blocks: [u64; 2], seed: u64, stop: &AtomicBool) -> Outcome {
    setup.enter()?;
    let mut random = Random::new(seed);
    let (stream, own) = (stream()?, allocate(EDGE)?);
    host(own, EDGE).fill(0);
    let mut model = [[0u8; APART]; 2];
    while !stop.load(Ordering::Relaxed) {
        let (side, offset) = (random.below(2), random.below(APART));
        let at = blocks[side] + offset as u64;
        same("bytes apart", at, &[model[side][offset]], &[load(at)])?;
        model[side][offset] = random.number() as u8;
        store(at, model[side][offset]);
        if random.one_of(64) {
            let work = Work {
                to: own,
                count: EDGE / 4,
                value: 1,
                ..Work::default()
            };
            setup
                .kernels
                .launch(setup.kernels.add_words, stream, &work)?;
        }
        if random.one_of(16) {
            std::thread::yield_now();
        }
    }
    must!(cuStreamSynchronize, stream);
    for (block, bytes) in blocks.into_iter().zip(model) {
        super::compare("bytes apart", block, &bytes)?;
    }
    free(own)?;
    must!(cuStreamDestroy_v2, stream);
    Ok(())
}

/// One step of the host that is not as the others.
fn disturb(setup: &Setup, random: &mut Random, pair: &mut Pair, stream: CUstream) -> Outcome {
    let (side, len) = (random.below(2), pair.len());
    match random.below(5) {
        0 => {
            let offset = APART + random.below(len - APART);
            pair.compare("a byte", side, offset..offset + 1)?;
            pair.change(side, offset, random.number() as u8);
        }
        // No wait behind it.
        1 => pair.step(setup, stream, side, random.number() as u32)?,
        2 => pair.compare("a block", side, APART..len)?,
        3 => {
            // Its work goes on when the stream is destroyed, and the host may look before it has ended.
            let brief = self::stream()?;
            pair.step(setup, brief, side, random.number() as u32)?;
            must!(cuStreamDestroy_v2, brief);
            load(pair.at[side] + APART as u64);
            load(pair.at[side] + len as u64 - 1);
            must!(cuCtxSynchronize);
            pair.compare("after a destroyed stream", side, APART..len)?;
        }
        _ => {
            // A copy of the driver's between the edges.
            let (to, from) = (pair.at[side] + APART as u64, pair.at[side] + len as u64 / 2);
            must!(cuMemcpyDtoDAsync_v2, to, from, 32usize, stream);
            let (low, high) = pair.model[side].split_at_mut(len / 2);
            low[APART..APART + 32].copy_from_slice(&high[..32]);
        }
    }
    Ok(())
}

/// Steps with the same blocks; `disturbed`: not all are alike.
fn rounds(
    setup: &Setup,
    random: &mut Random,
    pair: &mut Pair,
    disturbed: bool,
    until: Instant,
) -> Outcome {
    let (used, other) = (stream()?, stream()?);
    for round in 0..ROUNDS {
        if Instant::now() >= until {
            break;
        }
        let to = round % 2;
        let stream = match disturbed && random.one_of(20) {
            true => other,
            false => used,
        };
        pair.step(setup, stream, to, random.number() as u32)?;
        match disturbed && random.one_of(10) {
            true => wait(random, stream)?,
            false => must!(cuStreamSynchronize, stream),
        }
        pair.exchange(random, to)?;
        if disturbed && random.one_of(10) {
            disturb(setup, random, pair, used)?;
            must!(cuStreamSynchronize, used);
        }
    }
    must!(cuStreamDestroy_v2, used);
    must!(cuStreamDestroy_v2, other);
    Ok(())
}

pub fn edges(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let disturbed = !setup.without.iter().any(|name| name == "disturbances");
    while Instant::now() < until {
        let len = (64 << 10) + random.below(setup.most.min(1 << 20)) / 4 * 4;
        let mut pair = Pair::new(random, len)?;
        let (stop, seed, blocks) = (AtomicBool::new(false), random.number(), pair.at);
        let mut threads: Vec<Box<dyn FnOnce() -> Outcome + Send + '_>> = Vec::new();
        if disturbed && random.one_of(2) {
            threads.push(Box::new(|| beside(setup, blocks, seed, &stop)));
        }
        threads.push(Box::new(|| {
            setup.enter()?;
            let done = rounds(setup, random, &mut pair, disturbed, until);
            stop.store(true, Ordering::Relaxed);
            done
        }));
        together(threads)?;
        pair.free()?;
    }
    Ok(())
}
