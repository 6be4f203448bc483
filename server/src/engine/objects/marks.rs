//! Completion markers: how a client's flag is written when its stream reaches a point.
//!
//! The GPU writes the flag, without a thread of the server: by an operation of the stream (`cuStreamWriteValue32`), or
//! by a kernel of the server after the client's kernels in a graph. The operation needs no room on the device, but many
//! such operations delay each other, which kernels do not. So kernels write the flags of clients that wait often and
//! briefly, if several clients do (docs/design/0002-marks-and-waits.md).

pub mod session;

use crate::engine::gpu::flag_kernel::FlagKernel;
use std::time::Duration;

/// The method by which the flag of a mark in a graph is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// `CU_STREAM_MEM_OP_WRITE_VALUE_32`.
    Operation,
    /// The server's kernel.
    Kernel(FlagKernel),
}

/// With more synchronizing clients than this, write operations are not put into graphs: such a graph holds the
/// context's lock for longer than a launch and a separate operation.
const FEW: usize = 4;
/// With at most this many synchronizing clients, kernels are not used: they would gain nothing.
const FEWEST: usize = 2;
/// Kernels may write a session's marks if the marks are at most this far apart on average. For longer waits the kernel
/// gains little, and on a full device it waits for room.
const QUICK: Duration = Duration::from_micros(250);

/// Statistics of a session's marks.
#[derive(Debug, Default)]
pub struct Marks {
    /// Number of marks since the last count.
    lately: u32,
    /// Number of the only stream with work at the last count, if the marks were quick then.
    quick_in: Option<u32>,
}

impl Marks {
    /// Counts a mark.
    pub fn note(&mut self) {
        self.lately = self.lately.saturating_add(1);
    }
}

impl Writer {
    /// Its name in logs.
    pub fn name(self) -> &'static str {
        match self {
            Writer::Operation => "operation",
            Writer::Kernel(_) => "kernel",
        }
    }
}

/// Whether this many marks in the time `over` were quick enough.
fn are_quick(marks: u32, over: Duration) -> bool {
    QUICK * marks >= over
}

/// Returns the only item; `None` if there are none or several.
fn only<T>(mut all: impl Iterator<Item = T>) -> Option<T> {
    let first = all.next();
    if all.count() == 0 { first } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_quick_that_follow_each_other_soon() {
        let over = Duration::from_millis(10);
        assert!(are_quick(400, over));
        assert!(are_quick(40, over));
        assert!(!are_quick(39, over));
        assert!(!are_quick(0, over));
    }

    #[test]
    fn of_several_none_is_the_only_one() {
        assert_eq!(only([7].into_iter()), Some(7));
        assert_eq!(only([7, 8].into_iter()), None);
        assert_eq!(only(std::iter::empty::<u32>()), None);
    }
}
