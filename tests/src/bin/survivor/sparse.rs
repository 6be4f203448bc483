//! A large block of device memory that is zero but for a few words.

use super::{Status, memory};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;

/// The block. A word in its last third holds the number of rounds.
pub struct Sparse {
    block: CUdeviceptr,
    words: usize,
    rounds: u32,
}

impl Sparse {
    pub fn new(bytes: usize) -> Status<Sparse> {
        let (block, words) = (memory(bytes)?, bytes / 4);
        cu!(cuMemsetD32_v2, block, 0u32, words).ok()?;
        let rounds = 0;
        Ok(Sparse {
            block,
            words,
            rounds,
        })
    }

    /// Whether all words are as they were; then changes one.
    pub fn round(&mut self) -> Status<bool> {
        let mut found = vec![0u32; self.words];
        cu!(
            cuMemcpyDtoH_v2,
            found.as_mut_ptr(),
            self.block,
            self.words * 4
        )
        .ok()?;
        let at = self.words * 5 / 6;
        let is_right = std::mem::take(&mut found[at]) == self.rounds;
        self.rounds += 1;
        let word = self.block + 4 * at as u64;
        cu!(cuMemsetD32_v2, word, self.rounds, 1usize).ok()?;
        Ok(is_right && found.iter().all(|word| *word == 0))
    }
}
