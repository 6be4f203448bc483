//! A cache of answers of the server that cannot change.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

use parking_lot::RwLock;

use crate::ffi::Status;

/// Answers by question. When there are `KEPT` of them, all are dropped.
#[derive(Debug)]
pub struct Known<K, V = u64, const KEPT: usize = 4096>(
    RwLock<HashMap<K, V, BuildHasherDefault<Fast>>>,
);

impl<K: Eq + Hash, V: Copy, const KEPT: usize> Known<K, V, KEPT> {
    /// Nothing known yet.
    pub const fn new() -> Self {
        Known(RwLock::new(HashMap::with_hasher(BuildHasherDefault::new())))
    }

    /// The answer, requested if it is not known.
    #[inline]
    pub fn get_or_request(&self, question: K, request: impl FnOnce() -> Status<V>) -> Status<V> {
        if let Some(known) = self.0.read().get(&question) {
            return Ok(*known);
        }
        let answer = request()?;
        let mut map = self.0.write();
        if map.len() >= KEPT {
            map.clear();
        }
        map.insert(question, answer);
        Ok(answer)
    }
}

/// A hash of a few words in a few instructions. The questions are the program's own, so that chosen collisions are no
/// threat.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fast(u64);

impl Fast {
    #[inline]
    fn word(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

impl Hasher for Fast {
    #[inline]
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<4>();
        for word in words {
            self.word(u32::from_le_bytes(*word).into());
        }
        for byte in rest {
            self.word((*byte).into());
        }
    }
    #[inline]
    fn write_u32(&mut self, value: u32) {
        self.word(value.into());
    }
    #[inline]
    fn write_u64(&mut self, value: u64) {
        self.word(value);
    }
    #[inline]
    fn write_i32(&mut self, value: i32) {
        self.word(value as u32 as u64);
    }
    #[inline]
    fn write_usize(&mut self, value: usize) {
        self.word(value as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_api::cuda::CUDA_ERROR_INVALID_VALUE;

    #[test]
    fn an_answer_is_asked_for_once_and_a_refusal_each_time() {
        const KEPT: usize = 4096;
        let known: Known<_, u64, KEPT> = Known::new();
        assert_eq!(known.get_or_request((1u64, 2u32), || Ok(7)), Ok(7));
        let again = || unreachable!("it is known");
        assert_eq!(known.get_or_request((1, 2), again), Ok(7));
        let refuse = || Err(CUDA_ERROR_INVALID_VALUE);
        assert_eq!(
            known.get_or_request((1, 3), refuse),
            Err(CUDA_ERROR_INVALID_VALUE)
        );
        assert_eq!(known.get_or_request((1, 3), || Ok(8)), Ok(8));
        for question in 0..2 * KEPT as u32 {
            let _ = known.get_or_request((2, question), || Ok(0));
        }
        assert!(known.0.read().len() <= KEPT);
    }
}
