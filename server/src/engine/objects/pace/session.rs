//! Applies the limit on a stream's work in flight to a session's messages ([`super`]).

use super::{Length, Runs, VERY_LONG};
use crate::engine::base::call_error::CallError;
use crate::engine::gpu::{Gpu, WINDOW};
use crate::engine::objects::held::Awaited;
use crate::engine::session::{Session, SessionShared};
use mpsshim_api::cuda::CUstream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// As [`Session::prepare`], for an operation of any duration: defers the stream while long work is in flight or
/// sessions wait at the gate.
///
/// # Errors
/// As [`Session::prepare`].
#[inline]
pub fn prepare_work(
    session: &mut Session,
    gpu: &Gpu,
    handle: u64,
    runs: Runs,
) -> Result<(usize, CUstream), CallError> {
    let index = session.objects.streams.index(handle)?;
    let stream = session.objects.streams.at(index)?;
    let device = stream.device;
    if gpu.hold.applies(device.index()) && !stream.capturing {
        // The daemon hears when the work in flight has ended, which no mark of the client's may tell.
        session.has_work_in_flight(gpu);
        return Err(CallError::Full);
    }
    gpu.devices[device].make_current(&gpu.driver)?;
    if let Some(awaited) = must_await(session, gpu, index, runs)? {
        if !session.inbox.held.holds(index) {
            let number = session.shared.info.session;
            tracing::trace!(session = number, index, ?awaited, "holds a stream");
            session.hold(index, awaited);
        }
        return Err(CallError::Full);
    }
    session.prepare(gpu, handle)
}

/// As [`Session::submitted`], for an operation of any duration that runs this function or graph.
///
/// # Errors
/// As [`Session::submitted`].
#[inline]
pub fn submitted_work(
    session: &mut Session,
    gpu: &Gpu,
    index: usize,
    runs: Runs,
) -> Result<(), CallError> {
    session.submitted(gpu, index, 1)?;
    let length = length(session, runs);
    let stream = session.objects.streams.at_mut(index)?;
    if length != Length::Short && !stream.capturing {
        stream.measure(gpu, runs, length)?;
    }
    Ok(())
}

fn length(session: &Session, runs: Runs) -> Length {
    let known = match runs {
        Runs::Nothing => None,
        Runs::Function(handle) => session
            .objects
            .functions
            .get(handle)
            .ok()
            .map(|one| one.length),
        Runs::Graph(handle) => session
            .objects
            .graphs
            .execs
            .get(handle)
            .ok()
            .map(|one| one.length),
    };
    known.unwrap_or(Length::Short)
}

/// Returns the condition that an operation on a stream has to wait for, if any.
#[inline]
fn must_await(
    session: &mut Session,
    gpu: &Gpu,
    index: usize,
    runs: Runs,
) -> Result<Option<Awaited>, CallError> {
    let urgent = gpu.calm(session.side).is_urgent();
    let stream = session.objects.streams.at_mut(index)?;
    if stream.capturing {
        return Ok(None);
    }
    if stream.pace.measuring.is_some() {
        settle(session, gpu, index)?;
    }
    let stream = session.objects.streams.at_mut(index)?;
    if let Some((ops, ..)) = stream.pace.measuring
        && !stream.pace.takes_another()
    {
        return Ok(Some(Awaited::passed(ops)));
    }
    let window = stream.pace.window;
    if window < WINDOW && stream.is_beyond(gpu, window)? {
        // The last checkpoint may cover far fewer operations than are in flight.
        stream.checkpoint(gpu)?;
        return Ok(Some(Awaited::passed(stream.ops() + 1 - window)));
    }
    let late = stream.pace.measured.0 > VERY_LONG;
    if urgent && (late || length(session, runs).is_very_long()) {
        return Ok(gpu.calm(session.side).hold().map(Awaited::Gate));
    }
    Ok(None)
}

/// Stores the result of a stream's measurement, if it is over.
fn settle(session: &mut Session, gpu: &Gpu, index: usize) -> Result<(), CallError> {
    while let Some((what, length)) = session.objects.streams.at_mut(index)?.measured(gpu) {
        note_length(session, what, length);
    }
    Ok(())
}

fn note_length(session: &mut Session, what: Runs, length: Length) {
    let number = session.shared.info.session;
    tracing::trace!(session = number, ?what, ?length, "measured");
    // The function or graph may have been destroyed meanwhile.
    match what {
        Runs::Nothing => {}
        Runs::Function(handle) => {
            if let Ok(function) = session.objects.functions.get_mut(handle) {
                function.length = length;
            }
        }
        Runs::Graph(handle) => {
            if let Ok(exec) = session.objects.graphs.execs.get_mut(handle) {
                exec.length = length;
            }
        }
    }
}

/// Publishes how long the session's work has been in flight and is likely to continue, for the gate.
pub fn publish_pace(session: &mut Session, gpu: &Gpu, now: Instant) {
    let (mut waited, mut rest) = (Duration::ZERO, None);
    for stream in session
        .objects
        .streams
        .iter_mut()
        .chain(&mut session.objects.retired)
    {
        if stream.look_at_pace(gpu, now) {
            waited = waited.max(stream.pace.waited);
            rest = rest.max(stream.pace.rest());
        }
    }
    match rest {
        Some(_) => session.flow.had_kernel = Some(now),
        // Operations that wait for a kernel end shortly after it.
        None => {
            let since = session.flow.had_kernel.map(|then| now.duration_since(then));
            waited = waited.min(since.unwrap_or(Duration::MAX));
        }
    }
    let rest = rest.unwrap_or(Duration::MAX);
    let store = |to: &AtomicU32, time: Duration| {
        let milliseconds = time.as_millis().try_into().unwrap_or(u32::MAX);
        to.store(milliseconds, Ordering::Relaxed);
    };
    store(&session.shared.works_for.0, waited);
    store(&session.shared.works_for.1, rest);
}

impl SessionShared {
    /// Returns how long the session's work in flight has taken and, if known, how long it is likely to continue, as of
    /// the last poll; `None` if no work takes very long.
    pub fn long_work(&self, gpu: &Gpu) -> Option<(Duration, Option<Duration>)> {
        let load = |from: &AtomicU32| from.load(Ordering::Relaxed);
        let (waited, rest) = (load(&self.works_for.0), load(&self.works_for.1));
        let time = |milliseconds: u32| Duration::from_millis(milliseconds.into());
        let rest = (rest != u32::MAX).then(|| time(rest));
        let long = time(waited) >= VERY_LONG || rest.is_some_and(|rest| rest >= VERY_LONG);
        (long && self.is_at_work(gpu)).then(|| (time(waited), rest))
    }
}
