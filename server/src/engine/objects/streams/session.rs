//! Order between a session's streams, and their work in flight.

use super::{Expected, Role};
use crate::engine::base::call_error::CallError;
use crate::engine::gpu::Gpu;
use crate::engine::session::Session;
use mpsshim_api::cuda::*;

impl Session {
    /// Notes that the client's own flag will be written after all work submitted to the stream at this index, which is
    /// the next that the driver gets. [`Session::marked`] or [`Session::withdraw_mark`] must follow.
    pub fn expect_mark(
        &mut self,
        index: usize,
        slot: u32,
        value: u32,
    ) -> Result<Expected, CUresult> {
        Ok(self.objects.streams.at_mut(index)?.expect_mark(slot, value))
    }

    /// Undoes [`Session::expect_mark`], because the driver has refused the flag.
    pub fn withdraw_mark(&mut self, index: usize, expected: Expected) {
        if let Ok(stream) = self.objects.streams.at_mut(index) {
            stream.withdraw_mark(expected);
        }
    }

    /// Counts operations just submitted, of which the last writes the client's flag that was expected, and adds a
    /// checkpoint if too many are not covered by one.
    pub fn marked(
        &mut self,
        gpu: &Gpu,
        index: usize,
        operations: u64,
        (slot, value): (u32, u32),
    ) -> Result<(), CallError> {
        self.shared.launched.note_mark(slot, value, index);
        let stream = self.objects.streams.at_mut(index)?;
        stream.note_mark(operations, slot, value);
        Ok(stream.checkpoint_if_due(gpu)?)
    }

    /// Prepares the next operation on a stream: makes the device's context current and queues the waits that the legacy
    /// default-stream order requires. Returns the stream's index and the driver's stream.
    ///
    /// # Errors
    /// [`CallError::Full`] if too much is in flight, `CUDA_ERROR_INVALID_HANDLE`, or the driver's status.
    #[inline]
    pub fn prepare(&mut self, gpu: &Gpu, handle: u64) -> Result<(usize, CUstream), CallError> {
        let index = self.objects.streams.index(handle)?;
        let stream = self.objects.streams.at(index)?;
        let role = stream.role;
        gpu.devices[stream.device].make_current(&gpu.driver)?;
        if stream.capturing {
            let raw = stream.raw;
            // A node, and the edge to it.
            self.objects.graphs.capture(2)?;
            return Ok((index, raw));
        }
        if self.is_full(gpu, index)? {
            return Err(CallError::Full);
        }
        let stream = self.objects.streams.at(index)?;
        match role {
            Role::Independent => {}
            Role::Legacy if stream.members.is_empty() => {}
            Role::Legacy => self.join_members(gpu, index)?,
            Role::Blocking(legacy) => self.join_legacy(gpu, index, legacy)?,
        }
        let stream = self.objects.streams.at_mut(index)?;
        stream.take_level(gpu, self.shared.standing.level(stream.device));
        stream.begin_work();
        Ok((index, stream.raw))
    }

    /// Counts operations just submitted and adds a checkpoint if too many are not covered by one.
    #[inline]
    pub fn submitted(&mut self, gpu: &Gpu, index: usize, operations: u64) -> Result<(), CallError> {
        let stream = self.objects.streams.at_mut(index)?;
        if stream.capturing {
            return Ok(());
        }
        stream.ops += operations;
        stream.begin_work();
        Ok(stream.checkpoint_if_due(gpu)?)
    }

    /// Whether other streams have work in flight that the next operation on the stream at this index comes behind (legacy
    /// default-stream order).
    pub fn waits_for_others(&mut self, gpu: &Gpu, index: usize) -> Result<bool, CUresult> {
        let stream = self.objects.streams.at(index)?;
        let others = match stream.role {
            Role::Independent => return Ok(false),
            Role::Legacy => stream.members.clone(),
            Role::Blocking(legacy) => vec![legacy],
        };
        let segment = &self.shared.segment;
        Ok(others.into_iter().any(|other| {
            let other = self.objects.streams.at_mut(other);
            other.is_ok_and(|other| !other.capturing && other.in_flight(gpu, segment) != 0)
        }))
    }

    fn join_members(&mut self, gpu: &Gpu, index: usize) -> Result<(), CallError> {
        let legacy = self.objects.streams.at(index)?;
        let raw = legacy.raw;
        for at in 0..legacy.members.len() {
            let member = self.objects.streams.at(index)?.members[at];
            let Ok(stream) = self.objects.streams.at_mut(member) else {
                continue;
            };
            if stream.capturing
                || stream.ops == stream.joined
                || stream.in_flight(gpu, &self.shared.segment) == 0
            {
                continue;
            }
            let event = stream.record_join(gpu)?;
            stream.joined = stream.ops;
            gpu.driver.stream_wait_event(raw, event, 0)?;
        }
        Ok(())
    }

    fn join_legacy(&mut self, gpu: &Gpu, index: usize, legacy: usize) -> Result<(), CallError> {
        let Ok(other) = self.objects.streams.at_mut(legacy) else {
            return Ok(());
        };
        let ops = other.ops;
        let stream = self.objects.streams.at(index)?;
        if stream.seen_legacy == ops {
            return Ok(());
        }
        let raw = stream.raw;
        let other = self.objects.streams.at_mut(legacy)?;
        if other.in_flight(gpu, &self.shared.segment) != 0 {
            let event = other.record_join(gpu)?;
            gpu.driver.stream_wait_event(raw, event, 0)?;
        }
        self.objects.streams.at_mut(index)?.seen_legacy = ops;
        Ok(())
    }

    /// Whether any stream has work that is not known to be done. Adds missing checkpoints, so that its end will be
    /// known. The client's own marks are not trusted, since the result affects other clients.
    pub fn has_work_in_flight(&mut self, gpu: &Gpu) -> bool {
        self.enter();
        let mut any = self.inbox.held.is_reading(gpu);
        let (tracing, mut points) = (gpu.is_tracing(), Vec::new());
        for stream in self
            .objects
            .streams
            .iter_mut()
            .chain(self.objects.retired.iter_mut())
        {
            if stream.ops == stream.take_notice(gpu) {
                continue;
            }
            any = true;
            if stream.uncovered() > 0
                && gpu.devices[stream.device].make_current(&gpu.driver).is_ok()
            {
                match stream.checkpoint(gpu) {
                    Ok(()) if tracing => {
                        let point = stream.last_point();
                        points.extend(point.map(|point| (stream.number, point)));
                    }
                    Ok(()) => {}
                    Err(status) => gpu.note_status(status),
                }
            }
        }
        if tracing {
            self.trace_points(&points);
        }
        any
    }

    /// Whether the driver reports all work of the session as done. A capture in progress is not.
    pub fn is_drained(&self, gpu: &Gpu) -> bool {
        let mut streams = self.objects.streams.iter().chain(&self.objects.retired);
        !self.inbox.held.any() && streams.all(|stream| !stream.capturing && stream.is_drained(gpu))
    }

    /// Synchronizes streams known to be idle, which does not block, so that their memory pools are trimmed.
    pub fn synchronize_idle(&mut self, gpu: &Gpu) {
        for stream in self
            .objects
            .streams
            .iter_mut()
            .filter(|stream| !stream.capturing)
        {
            if stream.ops == 0 || stream.ops != stream.take_notice(gpu) {
                continue;
            }
            let synchronized = gpu.devices[stream.device]
                .make_current(&gpu.driver)
                .and_then(|()| gpu.driver.stream_synchronize(stream.raw));
            if let Err(status) = synchronized {
                gpu.note_status(status);
            }
        }
    }

    /// Whether a stream, whose context is current, has reached its limit of operations in flight. Only the server's own
    /// flags count: when its queue is full, the driver blocks the dispatch thread inside a launch.
    #[inline]
    fn is_full(&mut self, gpu: &Gpu, index: usize) -> Result<bool, CallError> {
        let stream = self.objects.streams.at_mut(index)?;
        Ok(stream.is_beyond(gpu, gpu.window())?)
    }
}
