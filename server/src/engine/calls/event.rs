//! Events.

use super::Reply;
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::objects::events::Event;
use crate::engine::objects::held::Awaited;
use crate::engine::objects::shared_events::{Record, SharedEvent, Standing, Taken};
use crate::engine::objects::streams::Role;
use crate::engine::objects::times::Time;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::stream::{EventExport, EventImport, EventToken};
use mpsshim_proto::message::{EventCreate, EventOnStream, EventPair, Mark, MarkEvent, Object};
use std::sync::Arc;
use zerocopy::IntoBytes;

impl Session {
    /// `cuEventCreate`.
    pub fn event_create(&mut self, shared: &Shared, body: EventCreate) -> Result<(), CallError> {
        let device = shared.gpu.device(body.device)?;
        device.make_current(&shared.gpu.driver)?;
        let mut raw = CUevent::NULL;
        // Of the flags only this one is passed on: interprocess events have handles of the server's, and threads that
        // wait do not block in the driver.
        shared
            .gpu
            .driver
            .event_create(&mut raw, body.flags & CU_EVENT_DISABLE_TIMING)?;
        let event = Event {
            raw,
            device: device.ordinal,
            flags: body.flags,
            recorded: false,
            time: Time::default(),
            captured: false,
            shared: None,
        };
        if let Err((status, event)) = self.objects.events.insert(body.event, event) {
            let _ = shared.gpu.driver.event_destroy(event.raw);
            return Err(status.into());
        }
        Ok(())
    }

    /// `cuEventDestroy`: a record in flight still completes.
    pub fn event_destroy(&mut self, shared: &Shared, body: Object) -> Result<(), CallError> {
        let event = self.objects.events.remove(body.object)?;
        self.lasting.times.forget(&event);
        shared.gpu.devices[event.device].make_current(&shared.gpu.driver)?;
        match self.objects.graphs.keep_event(body.object, event) {
            Ok(()) => Ok(()),
            Err(event) => Ok(shared.roster.shared_events.end(&shared.gpu.driver, event)?),
        }
    }

    /// `cuEventRecord(WithFlags)`.
    pub fn event_record(&mut self, shared: &Shared, body: EventOnStream) -> Result<(), CallError> {
        let raw = self.objects.events.get(body.event)?.raw;
        let (index, stream) = self.prepare_record(shared, &body)?;
        let external = body.flags & CU_EVENT_RECORD_EXTERNAL != 0;
        let captured = self.objects.streams.at(index)?.capturing && !external;
        let event = self.objects.events.get(body.event)?;
        event.may_be_recorded(captured)?;
        match &event.shared {
            Some(of_several) if !external => {
                let ticket = match self.inbox.held.taken.take() {
                    Some(Taken::Record(ticket)) => Some(ticket),
                    _ => None,
                };
                let device = self.objects.streams.at(index)?.device;
                of_several.record(&shared.gpu.driver, (device, stream), ticket)?;
            }
            _ => shared.gpu.driver.event_record(raw, stream, body.flags)?,
        }
        if external {
            self.objects.graphs.refer_to(body.event);
            self.note_recorded_by_graphs(body.event);
        }
        // An external record is a node of the graph: the event still belongs to the capture in which it was recorded
        // before.
        let captured = captured || external && self.objects.events.get(body.event)?.captured;
        self.note_recorded(body.event, captured)?;
        self.submitted(&shared.gpu, index, 1)
    }

    /// Like [`Session::prepare`]. If there is no room, a record of an event that other sessions may wait for does not
    /// stay in the ring: its stream is held, and the record deferred.
    fn prepare_record(
        &mut self,
        shared: &Shared,
        body: &EventOnStream,
    ) -> Result<(usize, CUstream), CallError> {
        let prepared = self.prepare(&shared.gpu, body.stream);
        if matches!(prepared, Err(CallError::Full))
            && self.objects.events.get(body.event)?.shared.is_some()
            && let Ok(index) = self.objects.streams.index(body.stream)
            && !self.inbox.held.holds(index)
        {
            let stream = self.objects.streams.at(index)?;
            let room = shared.gpu.window().saturating_sub(1);
            let ops = stream.ops().saturating_sub(room);
            self.hold(index, Awaited::passed(ops));
        }
        prepared
    }

    /// The record for which a stream that waits for an interprocess event has to wait: the last record when the message
    /// arrived. `None` if there is nothing to wait for.
    ///
    /// # Errors
    /// [`CallError::Full`] if that record is still deferred in its session; the stream is then held until the record is
    /// submitted.
    fn record_to_await(
        &mut self,
        of_several: &SharedEvent,
        stream: u64,
    ) -> Result<Option<CUevent>, CallError> {
        let record = match &self.inbox.held.taken {
            Some(Taken::Wait(record)) => record.clone(),
            _ => of_several.latest(),
        };
        let Some(record) = record else {
            return Ok(None);
        };
        match Record::standing(&record) {
            Standing::None => Ok(None),
            Standing::Made(raw) => Ok(Some(raw)),
            Standing::Pending => {
                let index = self.objects.streams.index(stream)?;
                self.hold(index, Awaited::record(record));
                Err(CallError::Full)
            }
        }
    }

    /// Makes a stream wait for an interprocess event. Returns the stream's position and the driver's stream.
    ///
    /// # Errors
    /// See [`Session::record_to_await`]; driver errors.
    fn await_shared(
        &mut self,
        shared: &Shared,
        of_several: &Arc<SharedEvent>,
        stream: u64,
    ) -> Result<(usize, CUstream), CallError> {
        let record = self.record_to_await(of_several, stream)?;
        let (index, stream) = self.prepare(&shared.gpu, stream)?;
        if let Some(raw) = record {
            shared.gpu.driver.stream_wait_event(stream, raw, 0)?;
        }
        if of_several.is_by_graphs() {
            let raw = of_several.raw();
            shared.gpu.driver.stream_wait_event(stream, raw, 0)?;
        }
        Ok((index, stream))
    }

    /// `cuStreamWaitEvent`; does not wait for an event that was never recorded.
    pub fn stream_wait_event(
        &mut self,
        shared: &Shared,
        body: EventOnStream,
    ) -> Result<(), CallError> {
        let event = self.objects.events.get(body.event)?;
        let index = self.objects.streams.index(body.stream)?;
        let capturing = self.objects.streams.at(index)?.capturing;
        let external = body.flags & CU_EVENT_WAIT_EXTERNAL != 0;
        if external && !capturing {
            return Err(CUDA_ERROR_ILLEGAL_STATE.into());
        }
        if !event.is_recorded() && !capturing {
            return Ok(());
        }
        if let Some(of_several) = &event.shared
            && !capturing
        {
            let of_several = of_several.clone();
            let (index, _) = self.await_shared(shared, &of_several, body.stream)?;
            return self.submitted(&shared.gpu, index, 1);
        }
        let (raw, captured) = (event.raw, event.captured);
        let (index, stream) = self.prepare(&shared.gpu, body.stream)?;
        if captured && !external {
            let joins = self.objects.streams.at_mut(index)?;
            if joins.role == Role::Legacy {
                return Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.into());
            }
            joins.ready_for_capture(&shared.gpu)?;
        }
        shared
            .gpu
            .driver
            .stream_wait_event(stream, raw, body.flags)?;
        if external {
            self.objects.graphs.refer_to(body.event);
        }
        self.look_whether_captures(shared, index);
        self.submitted(&shared.gpu, index, 1)
    }

    /// Writes a flag once the event's last record is complete, regardless of later operations in that record's stream.
    pub fn mark_event(&mut self, shared: &Shared, body: MarkEvent) -> Result<(), CallError> {
        let mark = Mark {
            stream: body.stream,
            slot: body.slot,
            value: body.value,
        };
        self.shared.segment.check_slot(body.slot)?;
        let address = self.shared.segment.flag_address(body.slot)?;
        let (event, of_several) = match self.objects.events.get(body.event) {
            // The stream of the mark must not join the capture.
            Ok(event) if event.captured => {
                return self.mark_failed(&shared.gpu, &mark, CUDA_ERROR_CAPTURED_EVENT.into());
            }
            Ok(event) => (event.raw, event.shared.clone()),
            Err(status) => return self.mark_failed(&shared.gpu, &mark, status.into()),
        };
        let prepared = match &of_several {
            Some(of_several) => self.await_shared(shared, of_several, body.stream),
            None => self.prepare(&shared.gpu, body.stream),
        };
        let queued = prepared.and_then(|(index, stream)| {
            if self.objects.streams.at(index)?.capturing {
                return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.into());
            }
            if of_several.is_none() {
                shared.gpu.driver.stream_wait_event(stream, event, 0)?;
            }
            shared
                .gpu
                .driver
                .stream_write_value32(stream, address, body.value, 0)?;
            Ok(index)
        });
        match queued {
            Ok(index) => {
                self.submitted(&shared.gpu, index, 1)?;
                self.note_mark(index, body.slot, body.value)?;
                Ok(())
            }
            Err(error) => self.mark_failed(&shared.gpu, &mark, error),
        }
    }

    /// `cuEventQuery`.
    pub fn event_query(&mut self, shared: &Shared, body: Object) -> Reply {
        let event = self.objects.events.get(body.object)?;
        shared.gpu.devices[event.device].make_current(&shared.gpu.driver)?;
        let Some(of_several) = &event.shared else {
            shared.gpu.driver.event_query(event.raw)?;
            return Ok(Vec::new());
        };
        match of_several.latest().as_ref().map(Record::standing) {
            None | Some(Standing::None) => {}
            Some(Standing::Made(raw)) => shared.gpu.driver.event_query(raw)?,
            Some(Standing::Pending) => return Err(CUDA_ERROR_NOT_READY.into()),
        }
        if of_several.is_by_graphs() {
            shared.gpu.driver.event_query(of_several.raw())?;
        }
        Ok(Vec::new())
    }

    /// No-op: when it is answered, all earlier messages have been executed, or deferred in order.
    pub fn taken(&mut self, _: &Shared, (): ()) -> Reply {
        Ok(Vec::new())
    }

    /// `cuIpcGetEventHandle`.
    pub fn event_export(&mut self, shared: &Shared, body: EventExport) -> Reply {
        self.lasting.shares = true;
        let event = self.objects.events.get_mut(body.event)?;
        let is_new = event.shared.is_none();
        let token = shared
            .roster
            .shared_events
            .export(event, self.shared.info.uid)?;
        if is_new {
            self.share_deferred(body.event);
        }
        Ok(EventToken { token }.as_bytes().to_vec())
    }

    /// `cuIpcOpenEventHandle`.
    pub fn event_import(&mut self, shared: &Shared, body: EventImport) -> Reply {
        self.lasting.shares = true;
        shared.gpu.device(body.device)?;
        let uid = self.shared.info.uid;
        let create = |device: Ordinal| {
            let mut raw = CUevent::NULL;
            shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
            let flags = CU_EVENT_DISABLE_TIMING;
            shared
                .gpu
                .driver
                .event_create(&mut raw, flags)
                .map(|()| raw)
        };
        let event = shared
            .roster
            .shared_events
            .import(&body.token, uid, create)?;
        if let Err((status, event)) = self.objects.events.insert(body.event, event) {
            shared.gpu.devices[event.device].make_current(&shared.gpu.driver)?;
            let _ = shared.roster.shared_events.end(&shared.gpu.driver, event);
            return Err(status.into());
        }
        Ok(Vec::new())
    }

    /// `cuEventElapsedTime`, milliseconds.
    pub fn event_elapsed(&mut self, shared: &Shared, body: EventPair) -> Reply {
        let ms = self.elapsed(&shared.gpu, body.start, body.end)?;
        Ok(super::value(ms.to_bits().into()))
    }
}
