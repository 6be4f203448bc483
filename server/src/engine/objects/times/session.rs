//! Saving and restoring the times of a session's events.

use super::{EXACT, Nanoseconds, PATIENCE_AGAIN, now, times_of, times_since};
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::objects::shared_events::session::describe_first_record;
use crate::engine::session::Session;
use mpsshim_api::cuda::*;
use mpsshim_model::bonds::Bonds;
use std::collections::BTreeMap;

/// Records that an event was recorded.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE` for an unknown event.
#[inline]
pub fn note_recorded(session: &mut Session, handle: u64, captured: bool) -> Result<(), CUresult> {
    let event = session.objects.events.get_mut(handle)?;
    let is_other = event.captured != captured;
    event.note_recorded(captured);
    if session.lasting.times.note(event) {
        session.bind_to(Bonds::TIMES);
    }
    if is_other && session.lasting.kept {
        session.write_down(Record::of(Kind::Captured, 0, handle, &captured));
    }
    Ok(())
}

/// Records that a graph has a node that records this event.
pub fn note_recorded_by_graphs(session: &mut Session, handle: u64) {
    describe_first_record(session, handle);
    if let Ok(event) = session.objects.events.get_mut(handle) {
        event.recorded = true;
        event.time.by_graphs = true;
        if let Some(shared) = &event.shared {
            shared.note_by_graphs();
        }
    }
}

/// `cuEventElapsedTime`, in milliseconds, corrected for records that a previous server made.
///
/// # Errors
/// The driver's status.
pub fn elapsed(session: &Session, gpu: &Gpu, start: u64, end: u64) -> Result<f32, CUresult> {
    let (start, end) = (
        session.objects.events.get(start)?,
        session.objects.events.get(end)?,
    );
    gpu.devices[start.device].make_current(&gpu.driver)?;
    let mut ms = 0.0;
    gpu.driver.event_elapsed_time(&mut ms, start.raw, end.raw)?;
    let milliseconds = |ns: Nanoseconds| ns as f64 / 1e6;
    Ok(match (start.time.original, end.time.original) {
        (None, None) => ms,
        (Some(start), Some(end)) => milliseconds(end - start) as f32,
        _ => (f64::from(ms) + milliseconds(start.time.late() - end.time.late())) as f32,
    })
}

/// Saves the times of events recorded since the last save. The session must be at rest.
pub fn save_times(session: &mut Session, gpu: &Gpu, graphs_were_launched: bool) {
    if graphs_were_launched {
        let by_graphs = session
            .objects
            .events
            .iter_mut()
            .filter(|one| one.time.by_graphs);
        by_graphs.for_each(|event| {
            session.lasting.times.note(event);
        });
    }
    if !session.lasting.times.are_stale() {
        return;
    }
    match try_save_times(session, gpu) {
        Ok(()) | Err(CUDA_ERROR_NOT_READY) => {}
        Err(status) => {
            let number = session.shared.info.session;
            tracing::debug!(session = number, %status, "times of events: not saved");
            session.lasting.times.refused = true;
            gpu.note_status(status);
        }
    }
}

/// # Errors
/// `CUDA_ERROR_NOT_READY` when the device is busy; `CUDA_ERROR_OUT_OF_MEMORY` when the description has no room; the
/// driver's.
fn try_save_times(session: &mut Session, gpu: &Gpu) -> Result<(), CUresult> {
    let mut stale: BTreeMap<Ordinal, Vec<(u64, CUevent)>> = BTreeMap::new();
    for (handle, event) in session.objects.events.iter_with_handles() {
        if event.time.stale {
            let of_device = stale.entry(event.device).or_default();
            of_device.push((handle, event.raw));
        }
    }
    for (device, events) in stale {
        let times = match reference(session, device) {
            Some(reference) => {
                gpu.devices[device].make_current(&gpu.driver)?;
                times_since(gpu, reference, &events)?
            }
            None => times_of(gpu, device, &events)?,
        };
        for (handle, at) in times {
            let record = Record::of(Kind::Time, 0, handle, &at);
            if !session.shared.description.append(&record) {
                return Err(CUDA_ERROR_OUT_OF_MEMORY);
            }
            let event = session.objects.events.get_mut(handle)?;
            event.time.stale = false;
            event.time.record = at;
            session.lasting.times.stale -= 1;
        }
    }
    Ok(())
}

/// Records an event again that an earlier server had recorded at this time. The driver measures the intervals between the new
/// records. With a time of the clock for each, the interval between such an event and one of this server would change in the
/// next server.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE` for an unknown event; those of [`Gpu::record_timed`].
pub fn record_again(
    session: &mut Session,
    gpu: &Gpu,
    handle: u64,
    original: Nanoseconds,
) -> Result<(), CUresult> {
    let event = session.objects.events.get(handle)?;
    let (device, raw) = (event.device, event.raw);
    let by_clock = gpu.record_timed(device, raw, PATIENCE_AGAIN)?;
    let references = &mut session.lasting.times.again;
    let recent = references.get(&device).filter(|(_, at)| now() - at < EXACT);
    let by_driver = match recent {
        Some(reference) => times_since(gpu, *reference, &[(handle, raw)])?,
        None => Vec::new(),
    };
    let by_driver = by_driver.first().and_then(|(_, at)| *at);
    let at = by_driver.unwrap_or(by_clock);
    references.insert(device, (raw, at));
    let event = session.objects.events.get_mut(handle)?;
    event.recorded = true;
    event.time.record = Some(at);
    event.time.original = Some(original);
    Ok(())
}

/// Records an event in a capture again, so that the driver refuses to query it.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE` for an unknown event; the driver's status.
pub fn capture_again(session: &mut Session, gpu: &Gpu, handle: u64) -> Result<(), CUresult> {
    let event = session.objects.events.get_mut(handle)?;
    gpu.record_in_capture(event.device, event.raw)?;
    event.note_recorded(true);
    Ok(())
}

/// The most recently saved event of the device, if it is recent enough; intervals between saved events then match
/// the driver's.
fn reference(session: &Session, device: Ordinal) -> Option<(CUevent, Nanoseconds)> {
    let known = session
        .objects
        .events
        .iter()
        .filter(|event| event.device == device);
    let known = known.filter_map(|event| Some((event.raw, event.time.record?)));
    let last = known.max_by_key(|(_, at)| *at);
    last.filter(|(_, at)| now() - at < EXACT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{Fixture, Function};

    /// Events were recorded in the order of their creation, 5 ms apart.
    extern "C" fn by_creation(ms: &mut f32, start: u64, end: u64) -> CUresult {
        *ms = 5.0 * ((end as i64 - start as i64) / 0x10) as f32;
        CUDA_SUCCESS
    }

    /// By the clock, less than the driver's time would have passed.
    #[test]
    fn records_made_again_are_as_far_apart_as_the_driver_says() {
        let mut test = Fixture::new(&[("cuEventElapsedTime", by_creation as Function)]);
        let events = [test.event(), test.event()];
        let gpu = &test.shared.gpu;
        for (event, original) in events.into_iter().zip([1_000, 2_000]) {
            assert_eq!(
                record_again(&mut test.session, gpu, event, original),
                Ok(())
            );
        }
        let times = events.map(|event| test.session.objects.events.get(event).expect("it").time);
        let [first, second] = times.map(|time| time.record.expect("a record"));
        assert_eq!(second - first, 5_000_000);
        assert_eq!(times.map(|time| time.original), [Some(1_000), Some(2_000)]);
    }
}
