//! Memory words for which graphs wait on the GPU, and the release of these waits after the session has ended.
//!
//! A stream's own waits never reach the GPU ([`crate::engine::objects::held`]), but those in graphs do. When a client
//! ends, the process that was to write the words may be gone too, and the graph, with everything that it blocks, would
//! wait forever. The value that ends each such wait is therefore recorded when its node is created, and the server
//! writes it after the session has ended.

pub mod release;

use crate::engine::base::bounds::GRAPH_WAITS;
use crate::engine::base::ordinal::Ordinal;
use mpsshim_api::cuda::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long an ended session's work may continue before the server writes words for it.
const BEFORE: Duration = Duration::from_millis(100);
/// Interval between rounds of writing: several values of one word are written in turn, and the GPU has to see each of
/// them.
const PAUSE: Duration = Duration::from_millis(10);
/// Most streams for writing: a single one might share its hardware queue with a stream that waits.
const STREAMS: usize = 4;
/// Highest priority, so that few other streams share their hardware queue.
const PRIORITY: i32 = -16;

/// A memory word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    address: u64,
    wide: bool,
    /// Server's ordinal.
    device: Ordinal,
}

/// The words for which graphs of a session may wait.
#[derive(Debug, Default)]
pub struct Awaited {
    /// For each word, the values that end a wait.
    words: BTreeMap<Place, BTreeSet<u64>>,
    count: usize,
}

/// Returns a value that ends the wait; `None` if no value does.
fn ends(wide: bool, flags: u32, value: u64) -> Option<u64> {
    let ones = if wide { u64::MAX } else { u32::MAX.into() };
    let value = value & ones;
    match flags & 3 {
        CU_STREAM_WAIT_VALUE_AND => (value != 0).then_some(value),
        CU_STREAM_WAIT_VALUE_GEQ | CU_STREAM_WAIT_VALUE_EQ => Some(value),
        _ => (value != ones).then_some(0),
    }
}

impl Awaited {
    /// Records an operation that becomes part of a graph, if it is a wait.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a wait that no value ends, `CUDA_ERROR_OUT_OF_MEMORY` if the session has too many
    /// waits.
    pub fn note(
        &mut self,
        device: Ordinal,
        operation: u32,
        address: u64,
        value: u64,
        flags: u32,
    ) -> Result<(), CUresult> {
        let wide = match operation {
            CU_STREAM_MEM_OP_WAIT_VALUE_32 => false,
            CU_STREAM_MEM_OP_WAIT_VALUE_64 => true,
            _ => return Ok(()),
        };
        let value = ends(wide, flags, value).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let place = Place {
            address,
            wide,
            device,
        };
        let known = |values: &BTreeSet<u64>| values.contains(&value);
        if self.words.get(&place).is_some_and(known) {
            return Ok(());
        }
        if self.count >= GRAPH_WAITS {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.count += 1;
        self.words.entry(place).or_default().insert(value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_a_wait_is_known_or_the_wait_refused() {
        let geq = CU_STREAM_WAIT_VALUE_GEQ;
        assert_eq!(ends(false, geq, 7 | 1 << 40), Some(7));
        assert_eq!(ends(true, CU_STREAM_WAIT_VALUE_EQ, 7 << 40), Some(7 << 40));
        assert_eq!(ends(true, CU_STREAM_WAIT_VALUE_AND, 6), Some(6));
        assert_eq!(ends(false, CU_STREAM_WAIT_VALUE_AND, 1 << 32), None);
        let nor = CU_STREAM_WAIT_VALUE_NOR;
        assert_eq!(ends(false, nor, 5), Some(0));
        assert_eq!(ends(false, nor, u32::MAX.into()), None);
        assert_eq!(ends(true, nor, u32::MAX.into()), Some(0));
    }

    #[test]
    fn waits_are_counted_once_and_bounded() {
        let mut awaited = Awaited::default();
        let wait = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        for _ in 0..2 {
            for value in 0..GRAPH_WAITS as u64 {
                let noted = awaited.note(Ordinal::of_test(0), wait, 64, value, 0);
                assert_eq!(noted, Ok(()));
            }
        }
        let write = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        assert_eq!(awaited.note(Ordinal::of_test(0), write, 128, 1, 0), Ok(()));
        let more = awaited.note(Ordinal::of_test(0), wait, 128, 1, 0);
        assert_eq!(more, Err(CUDA_ERROR_OUT_OF_MEMORY));
    }
}
