//! Events.

use super::reply::{Reply, number};
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::capture::look_whether_captures;
use crate::engine::calls::stream::mark_failed;
use crate::engine::objects::events::Event;
use crate::engine::objects::held::Awaited;
use crate::engine::objects::shared_events::session::{
    describe_first_record, describe_shared_event,
};
use crate::engine::objects::shared_events::{Record, SharedEvent, Standing, Taken};
use crate::engine::objects::streams::Role;
use crate::engine::objects::times::Time;
use crate::engine::objects::times::session::{elapsed, note_recorded, note_recorded_by_graphs};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::stream::{EventExport, EventImport, EventToken};
use mpsshim_proto::message::{EventCreate, EventOnStream, EventPair, Mark, MarkEvent, Object, Op};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// `cuEventCreate`.
pub fn event_create(
    session: &mut Session,
    shared: &Shared,
    body: EventCreate,
) -> Result<(), CallError> {
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
    if let Err((status, event)) = session.objects.events.insert(body.event, event) {
        let _ = shared.gpu.driver.event_destroy(event.raw);
        return Err(status.into());
    }
    Ok(())
}

/// `cuEventDestroy`: a record in flight still completes.
pub fn event_destroy(
    session: &mut Session,
    shared: &Shared,
    body: Object,
) -> Result<(), CallError> {
    let event = session.objects.events.remove(body.object)?;
    session.lasting.times.forget(&event);
    shared.gpu.devices[event.device].make_current(&shared.gpu.driver)?;
    match session.objects.graphs.keep_event(body.object, event) {
        Ok(()) => Ok(()),
        Err(event) => Ok(shared.roster.shared_events.end(&shared.gpu.driver, event)?),
    }
}

/// `cuEventRecord(WithFlags)`.
pub fn event_record(
    session: &mut Session,
    shared: &Shared,
    body: EventOnStream,
) -> Result<(), CallError> {
    let raw = session.objects.events.get(body.event)?.raw;
    let (index, stream) = prepare_record(session, shared, &body)?;
    let external = body.flags & CU_EVENT_RECORD_EXTERNAL != 0;
    let captured = session.objects.streams.at(index)?.capturing && !external;
    let event = session.objects.events.get(body.event)?;
    event.may_be_recorded(captured)?;
    match event.shared.clone() {
        Some(of_several) if !external => {
            session.note_work_of_several(Op::EventRecord);
            describe_first_record(session, body.event);
            let ticket = match session.inbox.held.taken.take() {
                Some(Taken::Record(ticket)) => Some(ticket),
                _ => None,
            };
            let device = session.objects.streams.at(index)?.device;
            of_several.record(&shared.gpu.driver, (device, stream), ticket)?;
        }
        _ => shared.gpu.driver.event_record(raw, stream, body.flags)?,
    }
    if external {
        session.objects.graphs.refer_to(body.event);
        note_recorded_by_graphs(session, body.event);
    }
    // An external record is a node of the graph: the event still belongs to the capture in which it was recorded
    // before.
    let captured = captured || external && session.objects.events.get(body.event)?.captured;
    note_recorded(session, body.event, captured)?;
    session.submitted(&shared.gpu, index, 1)
}

/// Like [`Session::prepare`]. If there is no room, a record of an event that other sessions may wait for does not
/// stay in the ring: its stream is held, and the record deferred.
fn prepare_record(
    session: &mut Session,
    shared: &Shared,
    body: &EventOnStream,
) -> Result<(usize, CUstream), CallError> {
    let prepared = session.prepare(&shared.gpu, body.stream);
    if matches!(prepared, Err(CallError::Full))
        && session.objects.events.get(body.event)?.shared.is_some()
        && let Ok(index) = session.objects.streams.index(body.stream)
        && !session.inbox.held.holds(index)
    {
        let stream = session.objects.streams.at(index)?;
        let room = shared.gpu.window().saturating_sub(1);
        let ops = stream.ops().saturating_sub(room);
        session.hold(index, Awaited::passed(ops));
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
    session: &mut Session,
    of_several: &SharedEvent,
    stream: u64,
) -> Result<Option<CUevent>, CallError> {
    let record = match &session.inbox.held.taken {
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
            let index = session.objects.streams.index(stream)?;
            session.hold(index, Awaited::record(record));
            Err(CallError::Full)
        }
    }
}

/// Makes a stream wait for an interprocess event. Returns the stream's position and the driver's stream.
///
/// # Errors
/// See [`record_to_await`]; driver errors.
fn await_shared(
    session: &mut Session,
    shared: &Shared,
    of_several: &Arc<SharedEvent>,
    stream: u64,
) -> Result<(usize, CUstream), CallError> {
    session.note_work_of_several(Op::StreamWaitEvent);
    let record = record_to_await(session, of_several, stream)?;
    let (index, stream) = session.prepare(&shared.gpu, stream)?;
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
    session: &mut Session,
    shared: &Shared,
    body: EventOnStream,
) -> Result<(), CallError> {
    let event = session.objects.events.get(body.event)?;
    let index = session.objects.streams.index(body.stream)?;
    let capturing = session.objects.streams.at(index)?.capturing;
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
        let (index, _) = await_shared(session, shared, &of_several, body.stream)?;
        return session.submitted(&shared.gpu, index, 1);
    }
    let (raw, captured) = (event.raw, event.captured);
    let (index, stream) = session.prepare(&shared.gpu, body.stream)?;
    if captured && !external {
        let joins = session.objects.streams.at_mut(index)?;
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
        session.objects.graphs.refer_to(body.event);
    }
    look_whether_captures(session, shared, index);
    session.submitted(&shared.gpu, index, 1)
}

/// Writes a flag once the event's last record is complete, regardless of later operations in that record's stream.
pub fn mark_event(
    session: &mut Session,
    shared: &Shared,
    body: MarkEvent,
) -> Result<(), CallError> {
    let mark = Mark {
        stream: body.stream,
        slot: body.slot,
        value: body.value,
    };
    session.shared.segment.check_slot(body.slot)?;
    let address = session.shared.segment.flag_address(body.slot)?;
    let (event, of_several) = match session.objects.events.get(body.event) {
        // The stream of the mark must not join the capture.
        Ok(event) if event.captured => {
            return mark_failed(
                session,
                &shared.gpu,
                &mark,
                CUDA_ERROR_CAPTURED_EVENT.into(),
            );
        }
        Ok(event) => (event.raw, event.shared.clone()),
        Err(status) => return mark_failed(session, &shared.gpu, &mark, status.into()),
    };
    let prepared = match &of_several {
        Some(of_several) => await_shared(session, shared, of_several, body.stream),
        None => session.prepare(&shared.gpu, body.stream),
    };
    let queued = prepared.and_then(|(index, stream)| {
        if session.objects.streams.at(index)?.capturing {
            return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.into());
        }
        if of_several.is_none() {
            shared.gpu.driver.stream_wait_event(stream, event, 0)?;
        }
        let expected = session.expect_mark(index, body.slot, body.value)?;
        let driver = &shared.gpu.driver;
        driver
            .stream_write_value32(stream, address, body.value, 0)
            .inspect_err(|_| session.withdraw_mark(index, expected))?;
        Ok(index)
    });
    match queued {
        Ok(index) => session.marked(&shared.gpu, index, 1, (body.slot, body.value)),
        Err(error) => mark_failed(session, &shared.gpu, &mark, error),
    }
}

/// `cuEventQuery`.
pub fn event_query(session: &mut Session, shared: &Shared, body: Object) -> Reply {
    let event = session.objects.events.get(body.object)?;
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
pub fn taken(_: &mut Session, _: &Shared, (): ()) -> Reply {
    Ok(Vec::new())
}

/// `cuIpcGetEventHandle`.
pub fn event_export(session: &mut Session, shared: &Shared, body: EventExport) -> Reply {
    let event = session.objects.events.get_mut(body.event)?;
    let (is_new, recorded) = (event.shared.is_none(), event.recorded);
    let token = shared
        .roster
        .shared_events
        .export(event, session.shared.info.uid)?;
    if is_new {
        let records = session.share_deferred(body.event);
        describe_shared_event(session, body.event, recorded || records);
    }
    Ok(EventToken { token }.as_bytes().to_vec())
}

/// `cuIpcOpenEventHandle`.
pub fn event_import(session: &mut Session, shared: &Shared, body: EventImport) -> Reply {
    shared.gpu.device(body.device)?;
    let uid = session.shared.info.uid;
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
    if let Err((status, event)) = session.objects.events.insert(body.event, event) {
        shared.gpu.devices[event.device].make_current(&shared.gpu.driver)?;
        let _ = shared.roster.shared_events.end(&shared.gpu.driver, event);
        return Err(status.into());
    }
    describe_shared_event(session, body.event, false);
    Ok(Vec::new())
}

/// `cuEventElapsedTime`, milliseconds.
pub fn event_elapsed(session: &mut Session, shared: &Shared, body: EventPair) -> Reply {
    let ms = elapsed(session, &shared.gpu, body.start, body.end)?;
    Ok(number(ms.to_bits().into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::base::description;
    use crate::engine::base::kinds::Kind as RecordKind;
    use crate::engine::objects::shared_events::session::{EventState, recorded_in};
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, fails, obeys, obeys_with_handle, others, records,
    };
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::Op;
    use mpsshim_proto::segment::FLAGS;

    fn on_stream(event: u64, stream: u64, flags: u32) -> EventOnStream {
        EventOnStream {
            event,
            stream,
            flags,
            pad: 0,
        }
    }

    fn records_it(test: &mut Fixture, event: u64, stream: u64) {
        let body = on_stream(event, stream, 0);
        assert_eq!(test.status(Op::EventRecord, &body, &[]), CUDA_SUCCESS);
    }

    /// A token with which other sessions open an event.
    fn shares(test: &mut Fixture, event: u64) -> [u64; 8] {
        let token = test.reply(Op::EventExport, &EventExport { event }, &[]);
        token.expect("a token")
    }

    #[test]
    fn an_event_of_no_device_is_not_created() {
        let mut test = Fixture::new(&[("cuEventCreate", counts as Function)]);
        let body = EventCreate {
            event: test.new_handle(Kind::Event),
            flags: 0,
            device: 1,
        };
        let status = test.status(Op::EventCreate, &body, &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_INVALID_DEVICE, 0));
        assert_eq!(test.session.objects.events.len(), 0);
    }

    #[test]
    fn an_event_whose_handle_cannot_be_is_destroyed_again() {
        let mut test = Fixture::new(&[("cuEventDestroy_v2", counts as Function)]);
        let known = test.event();
        let stream = test.new_handle(Kind::Stream);
        for event in [known, stream, 0] {
            let body = EventCreate {
                event,
                ..EventCreate::default()
            };
            let status = test.status(Op::EventCreate, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{event:#x}");
            assert_eq!(test.calls(), 1, "{event:#x}");
        }
        assert_eq!(test.session.objects.events.len(), 1);
    }

    #[test]
    fn an_event_that_the_driver_does_not_create_can_be_created_later() {
        let mut test = Fixture::new(&[("cuEventCreate", obeys_with_handle as Function)]);
        let body = EventCreate {
            event: test.new_handle(Kind::Event),
            ..EventCreate::default()
        };
        for (status, events) in [(CUDA_ERROR_OUT_OF_MEMORY, 0), (CUDA_SUCCESS, 1)] {
            test.orders(status);
            assert_eq!(test.told(Op::EventCreate, &body, &[]), status);
            assert_eq!(test.session.objects.events.len(), events);
        }
        test.orders(FAULT);
        let other = EventCreate {
            event: test.new_handle(Kind::Event),
            ..body
        };
        assert_eq!(test.told(Op::EventCreate, &other, &[]), FAULT);
        assert!(test.has_ended());
    }

    /// Each operation on an event, with a handle of an event and of a stream.
    fn refused(test: &mut Fixture, event: u64, stream: u64) -> [CUresult; 4] {
        let on = on_stream(event, stream, 0);
        let mark = MarkEvent {
            event,
            stream,
            slot: 3,
            value: 7,
        };
        [
            test.status(Op::EventRecord, &on, &[]),
            test.status(Op::StreamWaitEvent, &on, &[]),
            test.status(Op::MarkEvent, &mark, &[]),
            test.posted_error(),
        ]
    }

    #[test]
    fn an_event_is_recorded_and_awaited_in_a_stream_of_the_session() {
        let mut test = Fixture::new(&[
            ("cuEventRecordWithFlags", records as Function),
            ("cuStreamWaitEvent", records as Function),
            ("cuStreamWriteValue32_v2", records as Function),
        ]);
        let (event, stream) = (test.event(), test.stream());
        for event in others(event) {
            let all = refused(&mut test, event, stream);
            assert_eq!(all, [CUDA_ERROR_INVALID_HANDLE; 4], "{event:#x}");
        }
        for stream in others(stream) {
            let all = refused(&mut test, event, stream);
            assert_eq!(all, [CUDA_ERROR_INVALID_HANDLE; 4], "{stream:#x}");
        }
        assert_eq!(test.calls(), 0);
        let found = test.session.objects.events.get(event).expect("an event");
        assert!(!found.is_recorded());
        let raw = found.raw.0;
        records_it(&mut test, event, stream);
        assert_eq!(test.recorded()[0][0], raw);
    }

    #[test]
    fn a_stream_does_not_wait_for_an_event_that_was_never_recorded() {
        let mut test = Fixture::new(&[("cuStreamWaitEvent", counts as Function)]);
        let (event, stream) = (test.event(), test.stream());
        let body = on_stream(event, stream, 0);
        let status = test.status(Op::StreamWaitEvent, &body, &[]);
        assert_eq!((status, test.calls()), (CUDA_SUCCESS, 0));
        records_it(&mut test, event, stream);
        let status = test.status(Op::StreamWaitEvent, &body, &[]);
        assert_eq!((status, test.calls()), (CUDA_SUCCESS, 1));
    }

    #[test]
    fn an_external_wait_is_of_captures_only() {
        let mut test = Fixture::new(&[("cuStreamWaitEvent", counts as Function)]);
        let (event, stream) = (test.event(), test.stream());
        records_it(&mut test, event, stream);
        let body = on_stream(event, stream, CU_EVENT_WAIT_EXTERNAL);
        let status = test.status(Op::StreamWaitEvent, &body, &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_ILLEGAL_STATE, 0));
        test.captures(stream);
        let status = test.status(Op::StreamWaitEvent, &body, &[]);
        assert_eq!((status, test.calls()), (CUDA_SUCCESS, 1));
    }

    #[test]
    fn an_event_that_the_driver_does_not_record_is_as_before() {
        let mut test = Fixture::new(&[("cuEventRecordWithFlags", obeys as Function)]);
        let (event, stream) = (test.event(), test.stream());
        let body = on_stream(event, stream, 0);
        for (status, recorded) in [(CUDA_ERROR_NOT_SUPPORTED, false), (CUDA_SUCCESS, true)] {
            test.orders(status);
            assert_eq!(test.told(Op::EventRecord, &body, &[]), status);
            let found = test.session.objects.events.get(event);
            assert_eq!(found.expect("an event").is_recorded(), recorded);
        }
        test.orders(FAULT);
        assert_eq!(test.told(Op::EventRecord, &body, &[]), FAULT);
        assert!(test.has_ended());
    }

    #[test]
    fn a_wait_that_fails_is_the_clients_error_and_a_fault_its_end() {
        let mut test = Fixture::new(&[("cuStreamWaitEvent", obeys as Function)]);
        let (event, stream) = (test.event(), test.stream());
        records_it(&mut test, event, stream);
        let body = on_stream(event, stream, 0);
        for (status, ends) in [
            (CUDA_ERROR_NOT_SUPPORTED, false),
            (CUDA_SUCCESS, false),
            (FAULT, true),
        ] {
            test.orders(status);
            assert_eq!(test.told(Op::StreamWaitEvent, &body, &[]), status);
            assert_eq!(test.has_ended(), ends, "{status}");
        }
    }

    #[test]
    fn a_mark_of_an_event_needs_a_flag_of_the_table() {
        let mut test = Fixture::new(&[("cuStreamWriteValue32_v2", counts as Function)]);
        let (event, stream) = (test.event(), test.stream());
        for slot in [FLAGS as u32, u32::MAX] {
            let body = MarkEvent {
                event,
                stream,
                slot,
                value: 7,
            };
            assert!(test.is_violation(Op::MarkEvent, &body, &[]), "{slot}");
        }
        assert_eq!((test.calls(), test.posted_error()), (0, CUDA_SUCCESS));
    }

    #[test]
    fn a_mark_of_an_event_that_cannot_be_queued_is_written_behind_its_error() {
        for name in ["cuStreamWaitEvent", "cuStreamWriteValue32_v2"] {
            let refuses = fails::<{ CUDA_ERROR_NOT_SUPPORTED.0 }>;
            let mut test = Fixture::new(&[(name, refuses as Function)]);
            let body = MarkEvent {
                event: test.event(),
                stream: test.stream(),
                slot: 3,
                value: 7,
            };
            assert!(test.execute(Op::MarkEvent, &body, &[]).is_ok());
            assert_eq!(test.posted_error(), CUDA_ERROR_NOT_SUPPORTED, "{name}");
            assert_eq!(test.session.shared.flag(3), 7, "{name}");
            assert!(!test.has_ended(), "{name}");
        }
    }

    #[test]
    fn a_mark_does_not_join_a_capture() {
        let mut test = Fixture::new(&[("cuStreamWaitEvent", counts as Function)]);
        let (event, captured, stream) = (test.event(), test.event(), test.stream());
        let capturing = test.stream();
        test.captures(capturing);
        records_it(&mut test, captured, capturing);
        for (event, stream, status) in [
            (captured, stream, CUDA_ERROR_CAPTURED_EVENT),
            (event, capturing, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        ] {
            let body = MarkEvent {
                event,
                stream,
                slot: 3,
                value: 7,
            };
            assert_eq!(test.status(Op::MarkEvent, &body, &[]), status);
            assert_eq!(test.posted_error(), status);
            assert_eq!((test.calls(), test.session.shared.flag(3)), (0, 7));
        }
    }

    #[test]
    fn a_destroyed_event_is_named_no_more() {
        let mut test = Fixture::new(&[("cuEventDestroy_v2", obeys as Function)]);
        for status in [CUDA_SUCCESS, CUDA_ERROR_NOT_SUPPORTED, FAULT] {
            let body = Object {
                object: test.event(),
            };
            test.orders(status);
            assert_eq!(test.told(Op::EventDestroy, &body, &[]), status);
            let again = test.status(Op::EventDestroy, &body, &[]);
            assert_eq!(again, CUDA_ERROR_INVALID_HANDLE);
            assert_eq!(test.session.objects.events.len(), 0);
        }
        assert!(test.has_ended());
    }

    #[test]
    fn the_driver_is_asked_of_events_of_the_session_only() {
        let mut test = Fixture::new(&[
            ("cuEventQuery", obeys as Function),
            ("cuEventElapsedTime", counts as Function),
        ]);
        let event = test.event();
        test.orders(CUDA_ERROR_NOT_READY);
        for object in others(event) {
            let status = test.status(Op::EventQuery, &Object { object }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{object:#x}");
            for (start, end) in [(event, object), (object, event)] {
                let body = EventPair { start, end };
                let status = test.status(Op::EventElapsed, &body, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{object:#x}");
            }
        }
        assert_eq!(test.calls(), 0);
        for (status, ends) in [
            (CUDA_ERROR_NOT_READY, false),
            (CUDA_SUCCESS, false),
            (FAULT, true),
        ] {
            test.orders(status);
            let body = Object { object: event };
            assert_eq!(test.told(Op::EventQuery, &body, &[]), status);
            assert_eq!(test.has_ended(), ends, "{status}");
        }
    }

    #[test]
    fn only_an_event_of_the_session_is_exported() {
        let mut test = Fixture::new(&[]);
        let event = test.event();
        for event in others(event) {
            let status = test.status(Op::EventExport, &EventExport { event }, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{event:#x}");
        }
        let token = shares(&mut test, event);
        assert_eq!(shares(&mut test, event), token, "it is the same event");
    }

    #[test]
    fn an_event_is_opened_with_the_token_of_an_export_only() {
        let mut test = Fixture::new(&[("cuEventCreate", obeys_with_handle as Function)]);
        let event = test.event();
        let token = shares(&mut test, event);
        let import = |event, device, token| EventImport {
            event,
            device,
            pad: 0,
            token,
        };
        let new = test.new_handle(Kind::Event);
        let mut wrong = token;
        wrong[0] ^= 1;
        for (body, status) in [
            (import(new, 1, token), CUDA_ERROR_INVALID_DEVICE),
            (import(new, 0, wrong), CUDA_ERROR_MAP_FAILED),
            (import(new, 0, [0; 8]), CUDA_ERROR_MAP_FAILED),
            (import(event, 0, token), CUDA_ERROR_INVALID_HANDLE),
        ] {
            let refused = test.status(Op::EventImport, &body, &[]);
            assert_eq!(refused, status, "{:#x}", body.event);
            assert_eq!(test.session.objects.events.len(), 1);
        }
        let body = import(new, 0, token);
        assert_eq!(test.status(Op::EventImport, &body, &[]), CUDA_SUCCESS);
        assert_eq!(test.session.objects.events.len(), 2);
    }

    #[test]
    fn a_record_of_a_shared_event_that_fails_is_not_the_last_one() {
        let mut test = Fixture::new(&[
            ("cuEventRecordWithFlags", obeys as Function),
            ("cuStreamWaitEvent", counts as Function),
        ]);
        let (event, stream) = (test.event(), test.stream());
        shares(&mut test, event);
        let body = on_stream(event, stream, 0);
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let status = test.status(Op::EventRecord, &body, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        test.orders(CUDA_SUCCESS);
        records_it(&mut test, event, stream);
        let status = test.status(Op::StreamWaitEvent, &body, &[]);
        assert_eq!((status, test.calls()), (CUDA_SUCCESS, 1));
    }

    #[test]
    fn a_refused_export_shares_nothing() {
        let mut test = Fixture::new(&[]);
        let body = EventExport::default();
        assert_eq!(
            test.status(Op::EventExport, &body, &[]),
            CUDA_ERROR_INVALID_HANDLE
        );
        let records = test.session.shared.description.records();
        assert!(
            records
                .iter()
                .all(|one| one.kind != RecordKind::SharedEvent)
        );
    }

    #[test]
    fn a_shared_event_is_described_with_its_first_record() {
        let mut test = Fixture::with_keeper(&[("cuEventRecordWithFlags", obeys as Function)]);
        let (event, stream) = (test.event(), test.stream());
        shares(&mut test, event);
        let described = |test: &Fixture| {
            let records = test.session.shared.description.records();
            let of_kind = |one: &&description::Record| one.kind == RecordKind::SharedEvent;
            let all: Vec<EventState> = records
                .iter()
                .filter(of_kind)
                .filter_map(description::Record::state)
                .collect();
            all.iter().map(|one| one.recorded).collect::<Vec<_>>()
        };
        assert_eq!(described(&test), [false]);
        assert!(recorded_in(&test.session.shared.description).is_empty());
        records_it(&mut test, event, stream);
        assert_eq!(described(&test), [true]);
        assert_eq!(recorded_in(&test.session.shared.description).len(), 1);
        let end = Object { object: event };
        assert_eq!(test.told(Op::EventDestroy, &end, &[]), CUDA_SUCCESS);
        assert!(described(&test).is_empty());
    }
}
