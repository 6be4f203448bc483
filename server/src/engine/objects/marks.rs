//! Marks: how a client's flag comes to be written when its stream gets to a point.
//!
//! The GPU writes it, which needs no thread of the server: an operation of the stream (`cuStreamWriteValue32`), or a kernel
//! of the server's own behind the client's in a graph. The operation needs no room on the device; many of them get into each
//! other's way, and the kernels do not. So kernels write the flags of clients that often wait for little, as long as a few of
//! them do (docs/design/0002-marks-and-waits.md).

mod session;

use crate::engine::gpu::flag_kernel::FlagKernel;
use std::time::Duration;

/// What writes the flag of a mark that is in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// `CU_STREAM_MEM_OP_WRITE_VALUE_32`.
    Operation,
    /// The server's kernel.
    Kernel(FlagKernel),
}

/// With more clients than that that synchronize, operations that write flags are not put into graphs: these hold the
/// context's lock for longer than a launch and an operation by themselves.
const FEW: usize = 4;
/// With no more clients than that that synchronize, no kernel writes a flag: it would gain nothing.
const FEWEST: usize = 2;
/// Marks of a session that follow each other within that time on average may be written by kernels. Where a wait takes
/// longer the kernel gains little, and where the device is full it waits for room.
const QUICK: Duration = Duration::from_micros(250);

/// A session's marks.
#[derive(Debug, Default)]
pub struct Marks {
    /// How many there were since the last count.
    lately: u32,
    /// The stream, by number, that alone had work then, if they followed each other quickly.
    quick_in: Option<u32>,
}

impl Marks {
    /// Notes that there was a mark.
    pub fn note(&mut self) {
        self.lately = self.lately.saturating_add(1);
    }
}

impl Writer {
    /// As logs name it.
    pub fn name(self) -> &'static str {
        match self {
            Writer::Operation => "operation",
            Writer::Kernel(_) => "kernel",
        }
    }
}

/// Whether so many marks `over` a time followed each other quickly.
fn are_quick(marks: u32, over: Duration) -> bool {
    QUICK * marks >= over
}

/// The only one there is.
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
