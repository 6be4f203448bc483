//! When a session's timed events were recorded, saved while the session is at rest.
//!
//! The times of events are in the context that they were recorded in. So a session is bound from the record of a timed event
//! until the session has been at rest for a moment: its times are then read by means of an event that is recorded for that,
//! and written down as times of the machine's clock (`CLOCK_MONOTONIC`). The next server records such events once more, and
//! knows of each by how much its record is too late.

mod session;

use crate::engine::base::driver::is_sticky;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::objects::events::Event;
use mpsshim_api::cuda::*;
use mpsshim_model::bonds::Bonds;
use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// How long an event may take that is recorded behind nothing. Another session's kernel may hold it up, and messages of the
/// session wait meanwhile: the next rest will do as well.
const PATIENCE: Nanoseconds = 500_000;
/// The same while a session is made again, which would be lost without the record: it is waited for as a program would.
const PATIENCE_AGAIN: Nanoseconds = 30_000_000_000;
/// A record that took no longer is known closely enough: a pause that the program may notice is a thousand times as long.
const CLOSE: Nanoseconds = 100_000;
/// How often an event is recorded for that.
const TRIES: u32 = 4;
/// Of a time that is no longer the driver tells the microseconds: it has 24 significant bits.
const EXACT: Nanoseconds = 10_000_000_000;

/// A time of the machine's clock (`CLOCK_MONOTONIC`), or between two of them, ns.
type Nanoseconds = i64;

/// What is known of the last record of a timed event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// The event was recorded since its time was written down.
    stale: bool,
    /// Graphs record it when they are launched.
    by_graphs: bool,
    /// When the driver's record was made, if the time is written down.
    record: Option<Nanoseconds>,
    /// Another server has recorded the event at this time; the driver's record was made in its place.
    original: Option<Nanoseconds>,
}

impl Time {
    /// Whether the driver's record is in place of one that another server made.
    pub fn is_of_another_server(&self) -> bool {
        self.original.is_some()
    }

    /// Whether graphs record it.
    pub fn is_by_graphs(&self) -> bool {
        self.by_graphs
    }

    /// By how much the driver's record is too late.
    fn late(&self) -> Nanoseconds {
        match (self.original, self.record) {
            (Some(original), Some(record)) => record - original,
            _ => 0,
        }
    }
}

/// Of the times of a session.
#[derive(Debug, Default)]
pub struct Times {
    /// Events whose times are not written down.
    stale: usize,
    /// They cannot be written down.
    refused: bool,
}

impl Times {
    /// What binds the session.
    pub fn bonds(&self) -> Bonds {
        Bonds::default().with(Bonds::TIMES, self.stale > 0)
    }

    /// There are some to be written down.
    #[inline]
    pub fn are_stale(&self) -> bool {
        self.stale > 0 && !self.refused
    }

    /// An event is gone.
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
    /// Records an event behind nothing.
    ///
    /// # Errors
    /// The driver's.
    pub fn record_at_once(&self, device: Ordinal, event: CUevent) -> Result<(), CUresult> {
        let (device, driver) = (&self.devices[device], &self.driver);
        device.make_current(driver)?;
        let stream = device.take_stream(driver, 0)?;
        let recorded = driver.event_record(event, stream, 0);
        device.keep_stream(driver, 0, stream);
        recorded
    }

    /// The same; when that was. Calling threads lose their processor now and then: the event is recorded until it is known
    /// closely enough, a few times at most.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_READY` when the device is busy for longer than `patience`, or the driver's.
    fn record_timed(
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

/// When these events of a device were recorded; `None`: not at all, or in a capture.
///
/// # Errors
/// `CUDA_ERROR_NOT_READY` when the device is busy, or the driver's.
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

/// The same, by one that was recorded at a known time. The device is current.
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

/// The same, by what the driver says has elapsed between two events, in milliseconds of 24 significant bits. So what lies
/// between two neighbours in time is asked for: the time since the reference would say little of events that follow each
/// other closely, and were recorded long ago.
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

    /// Events are named by their times here, in ms.
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
