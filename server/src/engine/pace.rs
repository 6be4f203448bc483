//! How much of a stream's work the driver is given at a time.
//!
//! What the driver has, runs: nobody can take it back, and what must wait until nothing is in flight waits for all of it.
//! So a stream has no more in flight than takes some [`HORIZON`], as far as its operations so far can tell, and nothing
//! behind a kernel of which nothing is known, or that takes long. What comes behind waits in the server
//! ([`super::held`]), where it keeps nobody from going on, the client's other streams included.

use super::call_error::CallError;
use super::gpu::{Gpu, WINDOW};
use super::held::Awaited;
use super::session::{Session, SessionShared};
use super::streams::Stream;
use mpsshim_api::cuda::{CUresult, CUstream};
use std::sync::atomic::{AtomicU32, Ordering};
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

impl Session {
    /// [`Session::prepare`] for an operation that may take any time: it waits behind what takes long, and for the gate.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn prepare_work(
        &mut self,
        gpu: &Gpu,
        handle: u64,
        runs: Runs,
    ) -> Result<(usize, CUstream), CallError> {
        let index = self.streams.index(handle)?;
        let device = self.streams.at(index)?.device;
        gpu.devices[device].make_current(&gpu.driver)?;
        if let Some(awaited) = self.must_await(gpu, index, runs)? {
            if !self.held.holds(index) {
                let session = self.shared.info.session;
                tracing::trace!(session, index, ?awaited, "holds a stream");
                self.hold(index, awaited);
            }
            return Err(CallError::Full);
        }
        self.prepare(gpu, handle)
    }

    /// [`Session::submitted`] for such an operation, which runs this.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn submitted_work(&mut self, gpu: &Gpu, index: usize, runs: Runs) -> Result<(), CallError> {
        self.submitted(gpu, index, 1)?;
        let length = self.length(runs);
        let stream = self.streams.at_mut(index)?;
        if length != Length::Short && !stream.capturing {
            stream.measure(gpu, runs, length)?;
        }
        Ok(())
    }

    fn length(&self, runs: Runs) -> Length {
        let known = match runs {
            Runs::Nothing => None,
            Runs::Function(handle) => self.functions.get(handle).ok().map(|one| one.length),
            Runs::Graph(handle) => self.graphs.execs.get(handle).ok().map(|one| one.length),
        };
        known.unwrap_or(Length::Short)
    }

    /// What an operation on a stream has to wait for.
    #[inline]
    fn must_await(
        &mut self,
        gpu: &Gpu,
        index: usize,
        runs: Runs,
    ) -> Result<Option<Awaited>, CallError> {
        let urgent = gpu.calm(self.side).is_urgent();
        let stream = self.streams.at_mut(index)?;
        if stream.capturing {
            return Ok(None);
        }
        if stream.pace.measuring.is_some() {
            self.settle(gpu, index)?;
        }
        let stream = self.streams.at_mut(index)?;
        if let Some((ops, ..)) = stream.pace.measuring {
            return Ok(Some(Awaited::passed(ops)));
        }
        let window = stream.pace.window;
        if window < WINDOW && stream.is_beyond(gpu, window)? {
            // The last checkpoint may be far behind.
            stream.checkpoint(gpu)?;
            return Ok(Some(Awaited::passed(stream.ops() + 1 - window)));
        }
        let late = stream.pace.measured > VERY_LONG;
        if urgent && (late || self.length(runs).is_very_long()) {
            return Ok(gpu.calm(self.side).hold().map(Awaited::Gate));
        }
        Ok(None)
    }

    /// Takes down how long what was measured in a stream took, if it is over.
    fn settle(&mut self, gpu: &Gpu, index: usize) -> Result<(), CallError> {
        let Some((what, length)) = self.streams.at_mut(index)?.measured(gpu) else {
            return Ok(());
        };
        let session = self.shared.info.session;
        tracing::trace!(session, ?what, ?length, "measured");
        // It may be gone by now.
        match what {
            Runs::Nothing => {}
            Runs::Function(handle) => {
                if let Ok(function) = self.functions.get_mut(handle) {
                    function.length = length;
                }
            }
            Runs::Graph(handle) => {
                if let Ok(exec) = self.graphs.execs.get_mut(handle) {
                    exec.length = length;
                }
            }
        }
        Ok(())
    }

    /// Looks how long what is in flight has been there, for others to know.
    pub fn publish_pace(&mut self, gpu: &Gpu, now: Instant) {
        let (mut waited, mut rest) = (Duration::ZERO, None);
        for stream in self.streams.iter_mut().chain(&mut self.retired) {
            if stream.look_at_pace(gpu, now) {
                waited = waited.max(stream.pace.waited);
                rest = rest.max(stream.pace.rest());
            }
        }
        match rest {
            Some(_) => self.had_kernel = Some(now),
            // What waits for a kernel is done a moment after it.
            None => {
                let since = self.had_kernel.map(|then| now.duration_since(then));
                waited = waited.min(since.unwrap_or(Duration::MAX));
            }
        }
        let rest = rest.unwrap_or(Duration::MAX);
        let store = |to: &AtomicU32, time: Duration| {
            let milliseconds = time.as_millis().try_into().unwrap_or(u32::MAX);
            to.store(milliseconds, Ordering::Relaxed);
        };
        store(&self.shared.works_for.0, waited);
        store(&self.shared.works_for.1, rest);
    }
}

impl SessionShared {
    /// How long something in flight has taken already, and how long it is likely to take from now on if that is known, as
    /// was last seen; `None` where nothing takes very long.
    pub fn long_work(&self, gpu: &Gpu) -> Option<(Duration, Option<Duration>)> {
        let load = |from: &AtomicU32| from.load(Ordering::Relaxed);
        let (waited, rest) = (load(&self.works_for.0), load(&self.works_for.1));
        let time = |milliseconds: u32| Duration::from_millis(milliseconds.into());
        let rest = (rest != u32::MAX).then(|| time(rest));
        let long = time(waited) >= VERY_LONG || rest.is_some_and(|rest| rest >= VERY_LONG);
        (long && self.is_at_work(gpu)).then(|| (time(waited), rest))
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
