//! How much of a stream's work the driver is given at a time.
//!
//! What the driver has, runs: nobody can take it back, and what must wait until nothing is in flight waits for all of it.
//! So a stream has no more in flight than takes some [`HORIZON`], as far as its operations so far can tell, and nothing
//! behind a kernel of which nothing is known, or that takes long. What comes behind waits in the server
//! ([`crate::engine::objects::held`]), where it keeps nobody from going on, the client's other streams included.

mod session;

use crate::engine::gpu::{Gpu, WINDOW};
use crate::engine::objects::streams::Stream;
use mpsshim_api::cuda::CUresult;
use std::time::{Duration, Instant};

/// Nothing is submitted behind a kernel that takes longer.
const LONG: Duration = Duration::from_millis(5);
/// What takes longer is held back for those who wait at the gate; they wait for less to end by itself.
pub const VERY_LONG: Duration = Duration::from_millis(100);
/// How much work, in time, a stream has in flight at most, unless it is a single operation.
const HORIZON: Duration = Duration::from_millis(20);

/// What is known of the time that a kernel or graph takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Length {
    /// It was not seen to run yet.
    #[default]
    Unknown,
    /// Less than [`LONG`] when it last ran by itself.
    Short,
    /// So much at least, whenever it ran by itself.
    Long(Duration),
}

impl Length {
    /// What is known after it has taken this time. On a device that others use too it may take longer than by itself.
    fn after(self, time: Duration) -> Length {
        match self {
            _ if time <= LONG => Length::Short,
            Length::Long(before) => Length::Long(before.min(time)),
            _ => Length::Long(time),
        }
    }

    /// Whether it would keep those who wait at the gate.
    fn is_very_long(self) -> bool {
        matches!(self, Length::Long(time) if time > VERY_LONG)
    }
}

/// What an operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// Nothing that has a [`Length`]: it is short.
    Nothing,
    /// The function of this handle.
    Function(u64),
    /// The graph's instance of this handle.
    Graph(u64),
}

/// How fast a stream gets on.
#[derive(Debug)]
pub struct Pace {
    /// Operations in flight at most.
    window: u64,
    /// Since when the oldest checkpoint that is not reached is the oldest.
    since: Instant,
    /// How long it had been when it was last looked at and not reached.
    waited: Duration,
    /// Behind this operation nothing is submitted before it is over; what it runs, and how long that took before.
    measuring: Option<(u64, Runs, Length)>,
    /// How long the last one took that was measured.
    measured: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            window: WINDOW,
            since: Instant::now(),
            waited: Duration::ZERO,
            measuring: None,
            measured: Duration::ZERO,
        }
    }
}

impl Pace {
    /// Operations that may be in flight.
    #[inline]
    pub fn window(&self) -> u64 {
        self.window
    }

    /// A checkpoint is the oldest from now on.
    pub fn begin(&mut self) {
        (self.since, self.waited) = (Instant::now(), Duration::ZERO);
    }

    /// The oldest checkpoint, over so many operations, is not reached.
    pub fn note_waiting(&mut self, operations: u64, now: Instant) {
        self.waited = now.saturating_duration_since(self.since);
        if self.waited > HORIZON {
            self.shrink(operations);
        }
    }

    /// The oldest checkpoint, over so many operations up to this one, is reached. Only what it was seen to last counts:
    /// nobody may have looked for a while.
    pub fn note_reached(&mut self, operations: u64, last: u64) {
        if self
            .measuring
            .is_some_and(|(measured, ..)| measured == last)
        {
            self.measured = self.waited;
        }
        if self.waited > HORIZON {
            self.shrink(operations);
        } else if self.waited < LONG {
            self.window = WINDOW.min(2 * self.window);
        }
    }

    fn shrink(&mut self, operations: u64) {
        let fits = operations as u128 * HORIZON.as_nanos() / self.waited.as_nanos().max(1);
        self.window = self.window.min(fits as u64).max(1);
    }

    /// How long the kernel in flight is likely to take from now on: as long as before, or for ever. `None` where there is
    /// none: what else takes long waits for some kernel.
    fn rest(&self) -> Option<Duration> {
        Some(match self.measuring? {
            (_, _, Length::Long(before)) if self.waited < 2 * before => {
                before.saturating_sub(self.waited)
            }
            _ => Duration::MAX,
        })
    }

    /// Whether the oldest checkpoint takes long.
    pub fn is_long(&self) -> bool {
        self.waited > LONG
    }
}

impl Stream {
    /// Has this operation, the last one submitted, run without another behind it, and takes its time.
    ///
    /// # Errors
    /// The driver's.
    fn measure(&mut self, gpu: &Gpu, what: Runs, before: Length) -> Result<(), CUresult> {
        self.checkpoint(gpu)?;
        self.pace.measuring = Some((self.ops(), what, before));
        Ok(())
    }

    /// What was measured, if it is over, and how long it took.
    fn measured(&mut self, gpu: &Gpu) -> Option<(Runs, Length)> {
        let (ops, what, before) = self.pace.measuring?;
        if !self.has_passed(gpu, ops) {
            return None;
        }
        self.pace.measuring = None;
        Some((what, before.after(self.pace.measured)))
    }

    fn has_passed(&mut self, gpu: &Gpu, ops: u64) -> bool {
        self.take_notice(gpu) >= ops
    }

    /// Whether so many operations of it are done, counted from its beginning; takes down how long that takes.
    pub fn is_past(&mut self, gpu: &Gpu, ops: u64) -> bool {
        self.look_at_pace(gpu, Instant::now());
        self.has_passed(gpu, ops)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waited(pace: &mut Pace, operations: u64, time: Duration) {
        pace.begin();
        pace.note_waiting(operations, pace.since + time);
    }

    #[test]
    fn a_stream_has_as_much_in_flight_as_takes_the_horizon() {
        let mut pace = Pace::default();
        waited(&mut pace, 64, 16 * HORIZON);
        assert_eq!(pace.window(), 4);
        waited(&mut pace, 1, 100 * HORIZON);
        assert_eq!(pace.window(), 1);
    }

    #[test]
    fn what_gets_fast_again_gets_its_window_back() {
        let mut pace = Pace::default();
        waited(&mut pace, 1, 100 * HORIZON);
        pace.note_reached(1, 1);
        assert_eq!(pace.window(), 1);
        for _ in 0..8 {
            waited(&mut pace, 1, LONG / 2);
            pace.note_reached(1, 1);
        }
        assert_eq!(pace.window(), WINDOW);
    }

    #[test]
    fn what_is_measured_is_one_operation() {
        let mut pace = Pace {
            measuring: Some((3, Runs::Function(1), Length::Unknown)),
            ..Pace::default()
        };
        waited(&mut pace, 2, LONG / 2);
        pace.note_reached(2, 2);
        waited(&mut pace, 1, 3 * LONG);
        pace.note_reached(1, 3);
        waited(&mut pace, 1, LONG / 2);
        pace.note_reached(1, 4);
        assert_eq!(pace.measured, 3 * LONG);
        let known = Length::Unknown.after(pace.measured);
        assert_eq!(known, Length::Long(3 * LONG));
        assert_eq!(known.after(2 * LONG), Length::Long(2 * LONG));
        assert_eq!(known.after(LONG), Length::Short);
    }

    #[test]
    fn what_nobody_looked_at_is_not_long() {
        let mut pace = Pace::default();
        pace.begin();
        std::thread::sleep(Duration::from_millis(1));
        pace.note_reached(1, 1);
        assert!(!pace.is_long() && pace.window() == WINDOW);
    }
}
