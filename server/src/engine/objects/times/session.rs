//! Saving and restoring the times of a session's events.

use super::{EXACT, Nanoseconds, now, times_of, times_since};
use crate::engine::base::description::Record;
use crate::engine::base::kinds::Kind;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::session::Session;
use mpsshim_api::cuda::*;
use mpsshim_model::bonds::Bonds;
use std::collections::BTreeMap;

/// Records that an event was recorded.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE` for an unknown event.
#[inline]
pub fn note_recorded(session: &mut Session, event: u64, captured: bool) -> Result<(), CUresult> {
    let event = session.objects.events.get_mut(event)?;
    event.note_recorded(captured);
    if session.lasting.times.note(event) {
        session.bind_to(Bonds::TIMES);
    }
    Ok(())
}

/// Records that a graph has a node that records this event.
pub fn note_recorded_by_graphs(session: &mut Session, event: u64) {
    if let Ok(event) = session.objects.events.get_mut(event) {
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
