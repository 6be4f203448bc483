//! Recording times of a session's timed events, saved while the session is at rest.
//!
//! Event times exist only in the context in which they were recorded. A session is therefore bound from the record of a
//! timed event until it has been at rest for a moment: then a reference event is recorded, the times are read relative
//! to it and saved as times of the machine's clock (`CLOCK_MONOTONIC`). The next server records these events again and
//! keeps, for each, how much later its own record is.

pub mod session;

use crate::engine::base::driver::is_sticky;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::objects::events::Event;
use mpsshim_api::cuda::*;
use mpsshim_model::bonds::Bonds;
use nix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest wait for an event recorded on an idle stream, which another session's kernel may delay. The session's
/// messages wait meanwhile, so it is better to try again at the next rest.
const PATIENCE: Nanoseconds = 500_000;
/// Longest wait while a session is restored. Without the record the session would be lost, so this is as patient as a
/// program.
const PATIENCE_AGAIN: Nanoseconds = 30_000_000_000;
/// A record that took no longer than this is accurate enough: a pause noticeable to the program is a thousand times as
/// long.
const CLOSE: Nanoseconds = 100_000;
/// Most attempts to make a record within [`CLOSE`].
const TRIES: u32 = 4;
/// Up to this length, an interval reported by the driver is accurate to a microsecond: it has 24 significant bits.
const EXACT: Nanoseconds = 10_000_000_000;

/// A time of the machine's clock (`CLOCK_MONOTONIC`), or a difference of two, in nanoseconds.
pub type Nanoseconds = i64;

/// Saved state of the latest record of a timed event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Whether the event was recorded since its time was last saved.
    stale: bool,
    /// Whether launched graphs may record it.
    by_graphs: bool,
    /// When the driver's record was made, if the time is saved.
    pub record: Option<Nanoseconds>,
    /// When a previous server recorded the event, if the driver's record replaces that one.
    pub original: Option<Nanoseconds>,
}

impl Time {
    /// Whether the driver's record replaces one of a previous server.
    pub fn is_of_another_server(&self) -> bool {
        self.original.is_some()
    }

    /// Whether graphs may record it.
    pub fn is_by_graphs(&self) -> bool {
        self.by_graphs
    }

    /// How much later the driver's record is than the original one.
    fn late(&self) -> Nanoseconds {
        match (self.original, self.record) {
            (Some(original), Some(record)) => record - original,
            _ => 0,
        }
    }
}

/// Saved state of a session's event times.
#[derive(Debug, Default)]
pub struct Times {
    /// Number of events whose times are not saved.
    stale: usize,
    /// Whether saving has failed.
    refused: bool,
    /// While the session is restored, by device, the event that was recorded again last, and when.
    again: BTreeMap<Ordinal, (CUevent, Nanoseconds)>,
}

impl Times {
    /// Returns the bond by which unsaved times tie the session to its context.
    pub fn bonds(&self) -> Bonds {
        Bonds::default().with(Bonds::TIMES, self.stale > 0)
    }

    /// Whether there are times to save.
    #[inline]
    pub fn are_stale(&self) -> bool {
        self.stale > 0 && !self.refused
    }

    /// The session is restored.
    pub fn restored(&mut self) {
        self.again.clear();
    }

    /// Records that an event was destroyed.
    pub fn forget(&mut self, event: &Event) {
        self.stale -= usize::from(event.time.stale);
    }

    fn note(&mut self, event: &mut Event) -> bool {
        if event.flags & CU_EVENT_DISABLE_TIMING != 0 {
            return false;
        }
        (event.time.record, event.time.original) = (None, None);
        let begins = !std::mem::replace(&mut event.time.stale, true);
        self.stale += usize::from(begins);
        begins && self.stale == 1
    }
}

impl Gpu {
    /// Records an event on an idle stream (`cuEventRecord`).
    ///
    /// # Errors
    /// The driver's status.
    pub fn record_at_once(&self, device: Ordinal, event: CUevent) -> Result<(), CUresult> {
        let (device, driver) = (&self.devices[device], &self.driver);
        device.make_current(driver)?;
        let stream = device.take_stream(driver, 0)?;
        let recorded = driver.event_record(event, stream, 0);
        device.keep_stream(driver, 0, stream);
        recorded
    }

    /// Records an event in a capture and destroys the captured graph.
    ///
    /// # Errors
    /// The driver's status.
    pub fn record_in_capture(&self, device: Ordinal, event: CUevent) -> Result<(), CUresult> {
        let (device, driver) = (&self.devices[device], &self.driver);
        device.make_current(driver)?;
        let stream = device.take_stream(driver, 0)?;
        let mut graph = CUgraph::NULL;
        let captured = driver
            .graph
            .begin_capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED)
            .and_then(|()| {
                let recorded = driver.event_record(event, stream, 0);
                recorded.and(driver.graph.end_capture(stream, &mut graph))
            });
        if !graph.is_null() {
            let _ = driver.graph.destroy(graph);
        }
        device.keep_stream(driver, 0, stream);
        captured
    }

    /// Records an event on an idle stream and returns when that was. Because the calling thread may be descheduled in
    /// between, the event is recorded up to [`TRIES`] times until the time is accurate enough.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_READY` if the device is busy for longer than `patience` nanoseconds, or the driver's status.
    pub fn record_timed(
        &self,
        device: Ordinal,
        event: CUevent,
        patience: Nanoseconds,
    ) -> Result<Nanoseconds, CUresult> {
        let mut tries = TRIES;
        loop {
            let before = now();
            self.record_at_once(device, event)?;
            while self.driver.event_query(event) == Err(CUDA_ERROR_NOT_READY) {
                let waited = now() - before;
                if waited > patience {
                    break;
                }
                if waited > PATIENCE {
                    std::thread::sleep(Duration::from_micros(100));
                } else {
                    std::thread::yield_now();
                }
            }
            let took = now() - before;
            tries -= 1;
            if took <= CLOSE || tries == 0 {
                self.driver.event_query(event)?;
                return Ok(before + took / 2);
            }
        }
    }
}

fn now() -> Nanoseconds {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap_or_else(|_| Duration::ZERO.into());
    Duration::from(now).as_nanos() as Nanoseconds
}

/// Returns when these events of a device were recorded; `None` for events without a record, or with one in a capture.
///
/// # Errors
/// `CUDA_ERROR_NOT_READY` if the device is busy, or the driver's status.
fn times_of(
    gpu: &Gpu,
    device: Ordinal,
    events: &[(u64, CUevent)],
) -> Result<Vec<(u64, Option<Nanoseconds>)>, CUresult> {
    let driver = &gpu.driver;
    gpu.devices[device].make_current(driver)?;
    let mut reference = CUevent::NULL;
    driver.event_create(&mut reference, 0)?;
    let recorded = gpu.record_timed(device, reference, PATIENCE);
    let times = recorded.and_then(|at| times_since(gpu, (reference, at), events));
    let _ = driver.event_destroy(reference);
    times
}

/// Returns when these events were recorded, relative to a reference event with a known time. The device must be
/// current.
fn times_since(
    gpu: &Gpu,
    reference: (CUevent, Nanoseconds),
    events: &[(u64, CUevent)],
) -> Result<Vec<(u64, Option<Nanoseconds>)>, CUresult> {
    times_by(reference, events, |from, to| {
        let mut ms = 0.0f32;
        let elapsed = gpu.driver.event_elapsed_time(&mut ms, from, to);
        elapsed.map(|()| ms)
    })
}

/// Returns when these events were recorded. `elapsed` returns the time between two events in milliseconds with 24
/// significant bits. The intervals between neighbouring events are therefore added up: for events recorded long ago in
/// quick succession, the time since the reference would be too coarse.
fn times_by<E: Copy>(
    (reference, at): (E, Nanoseconds),
    events: &[(u64, E)],
    elapsed: impl Fn(E, E) -> Result<f32, CUresult>,
) -> Result<Vec<(u64, Option<Nanoseconds>)>, CUresult> {
    let mut times = Vec::with_capacity(events.len());
    let mut recorded = Vec::with_capacity(events.len());
    for &(handle, event) in events {
        match elapsed(event, reference) {
            Ok(ms) => recorded.push((ms, handle, event)),
            Err(status) if status == CUDA_ERROR_NOT_READY || is_sticky(status) => {
                return Err(status);
            }
            Err(_) => times.push((handle, None)),
        }
    }
    recorded.sort_by(|(one, ..), (other, ..)| one.total_cmp(other));
    let (mut later, mut ago) = (reference, 0.0);
    for (_, handle, event) in recorded {
        ago += f64::from(elapsed(event, later)?) * 1e6;
        times.push((handle, Some(at - ago as Nanoseconds)));
        later = event;
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: f64 = 3_600_000.0;

    /// Events are represented by their times in milliseconds.
    fn elapsed(from: f64, to: f64) -> Result<f32, CUresult> {
        match from.is_nan() {
            true => Err(CUDA_ERROR_INVALID_HANDLE),
            false => Ok((to - from) as f32),
        }
    }

    #[test]
    fn events_of_long_ago_are_told_apart() {
        let events = [(1, 1.000), (2, 1.010), (3, HOUR - 2.0), (4, 1.005)];
        let reference = (HOUR, (HOUR * 1e6) as Nanoseconds);
        let times = times_by(reference, &events, elapsed).unwrap();
        let at = |handle| {
            let mut times = times.iter();
            let (_, at) = times.find(|(of, _)| *of == handle).unwrap();
            at.unwrap()
        };
        assert!((at(2) - at(1) - 10_000).abs() < 2);
        assert!((at(4) - at(1) - 5_000).abs() < 2);
        assert!((at(3) - reference.1 + 2_000_000).abs() < 200);
    }

    #[test]
    fn an_event_that_was_not_recorded_has_no_time() {
        let events = [(1, f64::NAN), (2, 5.0)];
        let times = times_by((7.0, 7_000_000), &events, elapsed).unwrap();
        assert_eq!(times, [(1, None), (2, Some(5_000_000))]);
    }

    #[test]
    fn one_that_is_not_ready_makes_all_wait() {
        let not_ready = |_: f64, _: f64| Err(CUDA_ERROR_NOT_READY);
        let times = times_by((7.0, 7_000_000), &[(1, 1.0)], not_ready);
        assert_eq!(times, Err(CUDA_ERROR_NOT_READY));
    }
}
