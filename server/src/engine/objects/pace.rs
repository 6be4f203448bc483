//! Limit on the work that the driver is given of one stream at a time.
//!
//! Work that the driver has will run: it cannot be taken back, and calls that need a quiescent point wait for all of
//! it. So a stream has no more in flight than takes about [`HORIZON`], estimated from its earlier operations, and
//! nothing behind a kernel that is long or of unknown length. Further messages are deferred in the server
//! ([`crate::engine::objects::held`]), where they delay neither other clients nor the client's other streams.

pub mod session;

use crate::engine::gpu::{Gpu, WINDOW};
use crate::engine::objects::streams::Stream;
use mpsshim_api::cuda::CUresult;
use std::time::{Duration, Instant};

/// Nothing is submitted behind a kernel that takes longer than this.
const LONG: Duration = Duration::from_millis(5);
/// Kernels that take longer are held back for sessions at the gate, which simply wait for shorter ones to end.
pub const VERY_LONG: Duration = Duration::from_millis(100);
/// Most work that a stream has in flight, in time, unless it is a single operation.
const HORIZON: Duration = Duration::from_millis(20);

/// Known execution time of a kernel or graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Length {
    /// It has not been measured yet.
    #[default]
    Unknown,
    /// Less than [`LONG`] when it last ran without other work behind it.
    Short,
    /// The shortest time that it took in consecutive measurements, all of them longer than [`LONG`].
    Long(Duration),
}

impl Length {
    /// Updates the estimate with a measurement. On a device shared with other clients, a kernel may take longer than
    /// alone, so the shortest measurement counts.
    fn after(self, time: Duration) -> Length {
        match self {
            _ if time <= LONG => Length::Short,
            Length::Long(before) => Length::Long(before.min(time)),
            _ => Length::Long(time),
        }
    }

    /// Whether it would delay sessions at the gate.
    fn is_very_long(self) -> bool {
        matches!(self, Length::Long(time) if time > VERY_LONG)
    }
}

/// The function or graph that an operation executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// None that has a [`Length`]: the operation is short.
    Nothing,
    /// The function with this handle.
    Function(u64),
    /// The graph instance with this handle.
    Graph(u64),
}

/// Measured progress of a stream, and its limit of operations in flight.
#[derive(Debug)]
pub struct Pace {
    /// Most operations in flight.
    window: u64,
    /// When the oldest pending checkpoint became the oldest.
    since: Instant,
    /// How long that checkpoint was pending when it was last polled.
    waited: Duration,
    /// The operation being measured, by number, the function or graph it runs, and the previously known length. Nothing
    /// is submitted behind it before it has ended.
    measuring: Option<Measuring>,
    /// The operation behind it, if that is being measured too.
    next: Option<Measuring>,
    /// Duration of the last measured operation, and its number.
    measured: (Duration, u64),
}

/// An operation being measured: its number, its function or graph, and the previously known length.
type Measuring = (u64, Runs, Length);

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            window: WINDOW,
            since: Instant::now(),
            waited: Duration::ZERO,
            measuring: None,
            next: None,
            measured: (Duration::ZERO, 0),
        }
    }
}

impl Pace {
    /// Most operations that may be in flight.
    #[inline]
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Starts timing the checkpoint that has become the oldest.
    pub fn begin(&mut self) {
        (self.since, self.waited) = (Instant::now(), Duration::ZERO);
    }

    /// Records that the oldest checkpoint, which covers this many operations, is still pending.
    pub fn note_waiting(&mut self, operations: u64, now: Instant) {
        self.waited = now.saturating_duration_since(self.since);
        if self.waited > HORIZON {
            self.shrink(operations);
        }
    }

    /// Records that the oldest checkpoint, which covers this many operations up to number `last`, was reached. Only the
    /// time for which it was seen pending counts, since it may not have been polled for a while.
    pub fn note_reached(&mut self, operations: u64, last: u64) {
        if self
            .measuring
            .is_some_and(|(measured, ..)| measured == last)
        {
            self.measured = (self.waited, last);
        }
        if self.waited > HORIZON {
            self.shrink(operations);
        } else if self.waited < LONG {
            self.window = WINDOW.min(2 * self.window);
        } else {
            // It may have waited for kernels of others, and those behind it take much less.
            let fits = operations as u128 * HORIZON.as_nanos();
            let fits = fits.div_ceil(self.waited.as_nanos()) as u64;
            self.window = WINDOW.min(fits).max(self.window);
        }
    }

    fn shrink(&mut self, operations: u64) {
        let fits = operations as u128 * HORIZON.as_nanos() / self.waited.as_nanos().max(1);
        self.window = self.window.min(fits as u64).max(1);
    }

    /// Estimates how much longer the kernel being measured will run: as long as last time, or unlimited. `None` if no
    /// kernel is being measured: other long operations wait for some kernel.
    fn rest(&self) -> Option<Duration> {
        Some(match self.measuring? {
            (_, _, Length::Long(before)) if self.waited < 2 * before => {
                before.saturating_sub(self.waited)
            }
            _ => Duration::MAX,
        })
    }

    /// Whether another operation may be submitted behind the measured one: a second one, if the first takes less
    /// than the [`HORIZON`]. It may only have waited for kernels of others; then the time of the second one, which
    /// begins when the first one ends, shows how long it takes itself.
    fn takes_another(&self) -> bool {
        self.next.is_none()
            && self.measuring.is_some_and(
                |(_, _, before)| matches!(before, Length::Long(time) if time < HORIZON),
            )
    }

    /// The time of the kernel in flight, if it is known to be long.
    pub fn runs_long(&self) -> Option<Duration> {
        match self.measuring {
            Some((_, _, Length::Long(time))) => Some(time),
            _ => None,
        }
    }

    /// Whether the oldest checkpoint has been pending for long.
    pub fn is_long(&self) -> bool {
        self.waited > LONG
    }
}

impl Stream {
    /// Measures the stream's last submitted operation; nothing is submitted behind it meanwhile.
    ///
    /// # Errors
    /// The driver's status.
    fn measure(&mut self, gpu: &Gpu, what: Runs, before: Length) -> Result<(), CUresult> {
        self.checkpoint(gpu)?;
        let measured = Some((self.ops(), what, before));
        match self.pace.measuring {
            None => self.pace.measuring = measured,
            Some(_) => self.pace.next = measured,
        }
        Ok(())
    }

    /// Returns the measured function or graph with its length, if the measurement is over.
    fn measured(&mut self, gpu: &Gpu) -> Option<(Runs, Length)> {
        let (ops, what, before) = self.pace.measuring?;
        if !self.has_passed(gpu, ops) {
            return None;
        }
        self.pace.measuring = self.pace.next.take();
        let (time, measured) = self.pace.measured;
        // Of two that ended between two polls, only the second one was timed.
        Some((
            what,
            if measured == ops {
                before.after(time)
            } else {
                before
            },
        ))
    }

    fn has_passed(&mut self, gpu: &Gpu, ops: u64) -> bool {
        self.take_notice(gpu) >= ops
    }

    /// Whether this many operations, counted from the stream's first, are done. Updates the measurements.
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
    fn what_waited_for_a_block_of_others_is_followed_by_more() {
        let mut pace = Pace::default();
        waited(&mut pace, 1, 100 * HORIZON);
        waited(&mut pace, 1, HORIZON * 9 / 10);
        pace.note_reached(1, 1);
        assert_eq!(pace.window(), 2);
        waited(&mut pace, 1, HORIZON * 9 / 10);
        pace.note_reached(1, 2);
        assert_eq!(pace.window(), 2);
    }

    #[test]
    fn behind_a_kernel_that_may_have_waited_another_one_is_measured() {
        let measuring = |length| Pace {
            measuring: Some((1, Runs::Function(1), length)),
            ..Pace::default()
        };
        assert!(measuring(Length::Long(HORIZON / 2)).takes_another());
        assert!(!measuring(Length::Long(HORIZON)).takes_another());
        assert!(!measuring(Length::Unknown).takes_another());
        let mut pace = measuring(Length::Long(HORIZON / 2));
        pace.next = Some((2, Runs::Function(2), Length::Unknown));
        assert!(!pace.takes_another());
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
        assert_eq!(pace.measured, (3 * LONG, 3));
        let known = Length::Unknown.after(pace.measured.0);
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
