//! Prefetches to both sides and discarded memory, between kernels and accesses of the host.

use super::*;
use std::ops::Range;

/// Rounds with the same block.
const ROUNDS: usize = 40;

struct Block<'a> {
    setup: &'a Setup,
    stream: CUstream,
    at: u64,
    model: Vec<u8>,
}

impl Block<'_> {
    fn prefetch(&self, range: &Range<usize>, place: CUdevice) -> Outcome {
        let at = self.at + range.start as u64;
        must!(cuMemPrefetchAsync, at, range.len(), place, self.stream);
        Ok(())
    }

    /// A kernel adds to all words.
    fn add(&mut self, value: u32) -> Outcome {
        let work = Work {
            to: self.at,
            count: self.model.len() / 4,
            value,
            ..Work::default()
        };
        let kernels = &self.setup.kernels;
        kernels.launch(kernels.add_words, self.stream, &work)?;
        add_words(&mut self.model, value);
        Ok(())
    }

    /// The host reads all and changes some bytes.
    fn use_on_host(&mut self, random: &mut Random, changes: usize) -> Outcome {
        compare("by the host", self.at, &self.model)?;
        for _ in 0..changes {
            let range = random.range(self.model.len());
            let bytes = random.bytes(range.len());
            host(self.at + range.start as u64, range.len()).copy_from_slice(&bytes);
            self.model[range].copy_from_slice(&bytes);
        }
        Ok(())
    }

    /// The content of some bytes is given up, and new content written by the host or by a kernel.
    fn discard(&mut self, random: &mut Random) -> Outcome {
        let range = random.range(self.model.len());
        let (mut at, mut len) = (self.at + range.start as u64, range.len());
        match random.one_of(2) {
            true => must!(
                cuMemDiscardBatchAsync,
                &raw mut at,
                &raw mut len,
                1usize,
                0u64,
                self.stream
            ),
            false => {
                let kind = [CU_MEM_LOCATION_TYPE_HOST, CU_MEM_LOCATION_TYPE_DEVICE];
                let mut place = CUmemLocation {
                    kind: kind[random.below(2)],
                    id: self.setup.device,
                };
                if place.kind == CU_MEM_LOCATION_TYPE_HOST {
                    place.id = 0;
                }
                let mut first = 0usize;
                must!(
                    cuMemDiscardAndPrefetchBatchAsync,
                    &raw mut at,
                    &raw mut len,
                    1usize,
                    &raw mut place,
                    &raw mut first,
                    1usize,
                    0u64,
                    self.stream
                );
            }
        }
        let bytes = random.bytes(len);
        match random.one_of(2) {
            true => {
                must!(cuStreamSynchronize, self.stream);
                host(at, len).copy_from_slice(&bytes);
            }
            false => self.setup.device_writes(at, &bytes)?,
        }
        self.model[range].copy_from_slice(&bytes);
        Ok(())
    }
}

/// `--without writes`: the host reads only, after waits for the stream, and nothing is discarded.
pub fn prefetch(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let writes = !setup.without.iter().any(|case| case == "writes");
    while Instant::now() < until {
        let len = random.size(setup.most).next_multiple_of(4);
        let mut block = Block {
            setup,
            stream: stream()?,
            at: allocate(len)?,
            model: random.bytes(len),
        };
        host(block.at, len).copy_from_slice(&block.model);
        for _ in 0..ROUNDS {
            if !random.one_of(4) {
                let range = random.range(len);
                block.prefetch(&range, setup.device)?;
            }
            block.add(random.number() as u32)?;
            let range = match writes {
                true => random.range(len),
                false => 0..len,
            };
            block.prefetch(&range, CU_DEVICE_CPU)?;
            match writes {
                true => wait(random, block.stream)?,
                false => must!(cuStreamSynchronize, block.stream),
            }
            let changes = if writes { random.below(4) } else { 0 };
            block.use_on_host(random, changes)?;
            if writes && random.one_of(4) {
                block.discard(random)?;
            }
            if Instant::now() > until {
                break;
            }
        }
        must!(cuStreamSynchronize, block.stream);
        block.use_on_host(random, 0)?;
        free(block.at)?;
        must!(cuStreamDestroy_v2, block.stream);
    }
    Ok(())
}
