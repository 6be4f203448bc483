//! Streams and marks.

use super::super::Shared;
use super::super::session::{CallError, Session};
use super::super::streams::{Role, Stream};
use mpsshim_proto::message::{Mark, Object, StreamCreate};
use mpsshim_proto::ring::Message;

/// Priorities the driver has at most; a client cannot make the server keep streams of endless kinds.
const PRIORITIES: std::ops::RangeInclusive<i32> = -16..=0;

impl Session {
    /// `cuStreamCreateWithPriority`, and the default streams of a context.
    pub fn stream_create(&mut self, shared: &Shared, message: &Message) -> Result<(), CallError> {
        let body: StreamCreate = self.body(message)?;
        let device = shared.device(body.device)?;
        let ordinal = body.device as usize;
        let role = match body.legacy {
            0 => Role::Independent,
            own if own == body.stream => Role::Legacy,
            legacy => Role::Blocking(self.streams.index(legacy)?),
        };
        device.make_current(&shared.driver)?;
        let priority = body.priority.clamp(*PRIORITIES.start(), *PRIORITIES.end());
        self.reap_streams(shared);
        let raw = device.take_stream(&shared.driver, priority)?;
        let stream = Stream::new(shared, raw, ordinal, priority, role);
        if let Err((status, stream)) = self.streams.insert(body.stream, stream) {
            stream.release(shared);
            return Err(status.into());
        }
        if let Role::Blocking(legacy) = role {
            let index = self.streams.index(body.stream)?;
            self.streams.at_mut(legacy)?.members.push(index);
        }
        Ok(())
    }

    /// `cuStreamDestroy`: what is queued still runs.
    pub fn stream_destroy(&mut self, shared: &Shared, message: &Message) -> Result<(), CallError> {
        let body: Object = self.body(message)?;
        let index = self.streams.index(body.object)?;
        let mut stream = self.streams.remove(body.object)?;
        if let Role::Blocking(legacy) = stream.role
            && let Ok(legacy) = self.streams.at_mut(legacy)
        {
            legacy.members.retain(|member| *member != index);
        }
        shared.devices[stream.device].make_current(&shared.driver)?;
        stream.checkpoint(shared)?;
        self.retired.push(stream);
        self.reap_streams(shared);
        Ok(())
    }

    fn reap_streams(&mut self, shared: &Shared) {
        let mut at = 0;
        while at < self.retired.len() {
            // The driver's word, not a flag that the client can write: the next session to get the stream must not wait
            // behind this one's work.
            let stream = &mut self.retired[at];
            if stream.in_flight(shared, &self.shared) == 0
                && shared.driver.stream_query(stream.raw).is_ok()
            {
                self.retired.swap_remove(at).release(shared);
            } else {
                at += 1;
            }
        }
    }

    /// Writes a client's flag when its stream gets here.
    pub fn mark(&mut self, shared: &Shared, message: &Message) -> Result<(), CallError> {
        let body: Mark = self.body(message)?;
        self.shared.flag_address(body.slot)?;
        let (index, stream) = match self.prepare(shared, body.stream) {
            Ok(ready) => ready,
            Err(error) => return self.mark_failed(&body, error),
        };
        let device = self.streams.at(index)?.device;
        if let Err(status) = self.queue_mark(shared, device, stream, body.slot, body.value) {
            return self.mark_failed(&body, status.into());
        }
        self.submitted(shared, index)?;
        self.streams.at_mut(index)?.note_mark(body.slot, body.value);
        Ok(())
    }

    /// A mark that cannot be queued must not leave its waiter waiting: the server writes the flag itself after it
    /// has noted the error, which the waiter finds when it looks.
    pub fn mark_failed(&mut self, body: &Mark, error: CallError) -> Result<(), CallError> {
        if let CallError::Status(status) = &error {
            self.post_error(*status);
            self.shared.set_flag(body.slot, body.value);
        }
        Err(error)
    }
}
