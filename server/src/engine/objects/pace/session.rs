//! Applies the limit on a stream's work in flight to a session's messages ([`super`]).

use super::{Length, Runs, VERY_LONG};
use crate::engine::base::call_error::CallError;
use crate::engine::gpu::{Gpu, WINDOW};
use crate::engine::objects::held::Awaited;
use crate::engine::session::{Session, SessionShared};
use mpsshim_api::cuda::CUstream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

impl Session {
    /// As [`Session::prepare`], for an operation of any duration: defers the stream while long work is in flight or
    /// sessions wait at the gate.
    ///
    /// # Errors
    /// As [`Session::prepare`].
    #[inline]
    pub fn prepare_work(
        &mut self,
        gpu: &Gpu,
        handle: u64,
        runs: Runs,
    ) -> Result<(usize, CUstream), CallError> {
        let index = self.objects.streams.index(handle)?;
        let device = self.objects.streams.at(index)?.device;
        gpu.devices[device].make_current(&gpu.driver)?;
        if let Some(awaited) = self.must_await(gpu, index, runs)? {
            if !self.inbox.held.holds(index) {
                let session = self.shared.info.session;
                tracing::trace!(session, index, ?awaited, "holds a stream");
                self.hold(index, awaited);
            }
            return Err(CallError::Full);
        }
        self.prepare(gpu, handle)
    }

    /// As [`Session::submitted`], for an operation of any duration that runs this function or graph.
    ///
    /// # Errors
    /// As [`Session::submitted`].
    #[inline]
    pub fn submitted_work(&mut self, gpu: &Gpu, index: usize, runs: Runs) -> Result<(), CallError> {
        self.submitted(gpu, index, 1)?;
        let length = self.length(runs);
        let stream = self.objects.streams.at_mut(index)?;
        if length != Length::Short && !stream.capturing {
            stream.measure(gpu, runs, length)?;
        }
        Ok(())
    }

    fn length(&self, runs: Runs) -> Length {
        let known = match runs {
            Runs::Nothing => None,
            Runs::Function(handle) => self
                .objects
                .functions
                .get(handle)
                .ok()
                .map(|one| one.length),
            Runs::Graph(handle) => self
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
        &mut self,
        gpu: &Gpu,
        index: usize,
        runs: Runs,
    ) -> Result<Option<Awaited>, CallError> {
        let urgent = gpu.calm(self.side).is_urgent();
        let stream = self.objects.streams.at_mut(index)?;
        if stream.capturing {
            return Ok(None);
        }
        if stream.pace.measuring.is_some() {
            self.settle(gpu, index)?;
        }
        let stream = self.objects.streams.at_mut(index)?;
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
        if urgent && (late || self.length(runs).is_very_long()) {
            return Ok(gpu.calm(self.side).hold().map(Awaited::Gate));
        }
        Ok(None)
    }

    /// Stores the result of a stream's measurement, if it is over.
    fn settle(&mut self, gpu: &Gpu, index: usize) -> Result<(), CallError> {
        while let Some((what, length)) = self.objects.streams.at_mut(index)?.measured(gpu) {
            self.note_length(what, length);
        }
        Ok(())
    }

    fn note_length(&mut self, what: Runs, length: Length) {
        let session = self.shared.info.session;
        tracing::trace!(session, ?what, ?length, "measured");
        // The function or graph may have been destroyed meanwhile.
        match what {
            Runs::Nothing => {}
            Runs::Function(handle) => {
                if let Ok(function) = self.objects.functions.get_mut(handle) {
                    function.length = length;
                }
            }
            Runs::Graph(handle) => {
                if let Ok(exec) = self.objects.graphs.execs.get_mut(handle) {
                    exec.length = length;
                }
            }
        }
    }

    /// Publishes how long the session's work has been in flight and is likely to continue, for the gate.
    pub fn publish_pace(&mut self, gpu: &Gpu, now: Instant) {
        let (mut waited, mut rest) = (Duration::ZERO, None);
        for stream in self
            .objects
            .streams
            .iter_mut()
            .chain(&mut self.objects.retired)
        {
            if stream.look_at_pace(gpu, now) {
                waited = waited.max(stream.pace.waited);
                rest = rest.max(stream.pace.rest());
            }
        }
        match rest {
            Some(_) => self.flow.had_kernel = Some(now),
            // Operations that wait for a kernel end shortly after it.
            None => {
                let since = self.flow.had_kernel.map(|then| now.duration_since(then));
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
