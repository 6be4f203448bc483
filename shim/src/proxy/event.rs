//! Events: state kept in the client, so that most waits and queries need no request.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mpsshim_api::cuda::{
    CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS,
    CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL, CUDA_ERROR_INVALID_HANDLE,
    CUDA_ERROR_NOT_READY, CUDA_ERROR_OUT_OF_MEMORY,
};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::stream::EventImport;
use mpsshim_proto::message::{EventCreate, EventOnStream, Object, Op};
use parking_lot::Mutex;

use crate::ffi::Status;
use crate::proxy::capture;
use crate::proxy::context::Context;
use crate::proxy::default_stream;
use crate::proxy::objects::{Entry, Table};
use crate::proxy::shadow;
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::{Ring, Session};
use crate::proxy::wait::Policy;
use crate::proxy::waited::{self, Seen};

/// Every event of the process.
pub static EVENTS: Table<Event> = Table::new(Kind::Event);

/// An event and its handle.
pub type EventRef = &'static Entry<Event>;

/// Client-side state of an event.
#[derive(Debug, Default)]
pub struct Event {
    context: AtomicPtr<Context>,
    flags: AtomicU32,
    record: Mutex<Option<Record>>,
    /// Whether the last record is known to be complete.
    complete: AtomicBool,
    /// The capture that it was last recorded in, or 0.
    capture: AtomicU64,
    /// Whether a graph may record it, unseen from here.
    in_graph: AtomicBool,
    /// Whether another process may have it: it was exported or imported.
    open: AtomicBool,
}

/// Where an event was last recorded.
#[derive(Clone, Copy, Debug)]
struct Record {
    stream: StreamRef,
    /// The stream's handle then; by now the stream may have another.
    handle: u64,
    /// The stream's position just behind the record.
    at: u64,
}

impl Record {
    /// The stream, if it still exists.
    fn stream(&self) -> Option<StreamRef> {
        (self.stream.handle() == self.handle).then_some(self.stream)
    }
}

impl Event {
    /// `CU_EVENT_*`.
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    /// Its context.
    pub fn context(&self) -> &'static Context {
        // SAFETY: set before the event is published, to a context, none of which is ever freed.
        unsafe { &*self.context.load(Ordering::Acquire) }
    }

    /// Whether other processes may record it: then only the server knows its state.
    fn is_shared(&self) -> bool {
        self.flags() & CU_EVENT_INTERPROCESS != 0
    }

    /// Whether it was ever recorded, or may have been.
    pub fn is_recorded(&self) -> bool {
        self.record.lock().is_some() || self.is_elsewhere()
    }

    /// A graph may record it from now on: only the server knows its state.
    pub fn is_in_graph(&self) {
        self.in_graph.store(true, Ordering::Relaxed);
    }

    /// Whether the client-side state cannot answer a query.
    fn is_elsewhere(&self) -> bool {
        self.in_graph.load(Ordering::Relaxed)
            || self.capture.load(Ordering::Relaxed) != 0
            || self.is_shared()
    }

    /// Another process may have it from now on.
    pub fn is_open_elsewhere(&self) {
        self.open.store(true, Ordering::Release);
    }

    /// Whether another process may record it, or wait for it.
    #[inline]
    fn is_of_several(&self) -> bool {
        self.is_shared() && self.open.load(Ordering::Acquire)
    }

    fn policy(&self) -> Policy {
        if self.flags() & CU_EVENT_BLOCKING_SYNC != 0 {
            Policy::Block
        } else {
            self.context().policy()
        }
    }
}

/// The event of a handle.
pub fn resolve(handle: u64) -> Status<EventRef> {
    EVENTS.find(handle)
}

fn claim(context: &'static Context, flags: u32) -> Status<EventRef> {
    let event = EVENTS.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    event
        .context
        .store(ptr::from_ref(context).cast_mut(), Ordering::Release);
    event.flags.store(flags, Ordering::Relaxed);
    *event.record.lock() = None;
    event.complete.store(false, Ordering::Relaxed);
    event.capture.store(0, Ordering::Relaxed);
    event.in_graph.store(false, Ordering::Relaxed);
    event.open.store(false, Ordering::Relaxed);
    Ok(event)
}

/// Opens another process's event.
pub fn import(session: &Session, context: &'static Context, token: [u64; 8]) -> Status<EventRef> {
    let event = claim(context, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING)?;
    let body = EventImport {
        event: EVENTS.handle_of(event),
        device: context.server_device,
        pad: 0,
        token,
    };
    let answer = session.request(Op::EventImport, &body, &[])?;
    if let Err(status) = answer.status.ok() {
        EVENTS.recycle(event);
        return Err(status);
    }
    event.is_open_elsewhere();
    context.own_event(EVENTS.publish(event));
    Ok(event)
}

/// Returns when the server has taken all earlier messages out of the ring, although it may submit them later. From then
/// on other processes see each record of an event, and waits of this one refer to the present record.
fn await_taken(session: &Session) -> Status {
    session.request(Op::Taken, &(), &[])?.status.ok()
}

/// Makes an event; the caller has checked the flags.
pub fn create(session: &Session, context: &'static Context, flags: u32) -> Status<EventRef> {
    let event = claim(context, flags)?;
    let body = EventCreate {
        event: EVENTS.handle_of(event),
        flags,
        device: context.server_device,
    };
    session.submit(Op::EventCreate, &body)?;
    context.own_event(EVENTS.publish(event));
    Ok(event)
}

/// Destroys an event; a record that is queued still happens.
pub fn destroy(session: &Session, handle: u64) -> Status {
    let event = EVENTS.retire(handle).ok_or_else(|| EVENTS.absent(handle))?;
    event.context().forget_event(handle);
    let status = session.submit(Op::EventDestroy, &Object { object: handle });
    EVENTS.recycle(event);
    status
}

/// Records an event on a stream.
pub fn record(session: &Session, event: EventRef, stream: StreamRef, flags: u32) -> Status {
    if !ptr::eq(event.context(), stream.context()) {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    put_record(session, event, stream, flags)
}

/// Records an event on a stream, regardless of their contexts.
fn put_record(session: &Session, event: EventRef, stream: StreamRef, flags: u32) -> Status {
    let mut ring = session.ring()?;
    let body = EventOnStream {
        event: event.handle(),
        stream: stream.handle(),
        flags,
        pad: 0,
    };
    ring.put(Op::EventRecord, 0, &body, &[])?;
    if stream.is_capturing() {
        if flags & CU_EVENT_RECORD_EXTERNAL != 0 {
            event.is_in_graph();
        } else {
            *event.record.lock() = None;
            event.complete.store(false, Ordering::Release);
            event.capture.store(stream.capture(), Ordering::Relaxed);
        }
        drop(ring);
        return session.settle(stream.handle());
    }
    stream.count(&ring);
    event.capture.store(0, Ordering::Relaxed);
    // Under the ring's lock, so that the last record here is the last one in the ring.
    *event.record.lock() = Some(Record {
        stream,
        handle: body.stream,
        at: stream.position(),
    });
    event.complete.store(false, Ordering::Release);
    drop(ring);
    if event.is_of_several() {
        return await_taken(session);
    }
    Ok(())
}

/// Notes that a launch just put into the ring records an event. The event counts as complete when the launch is,
/// although it may be so earlier.
pub fn recorded_by_launch(event: EventRef, stream: StreamRef, _ring: &Ring<'_>) {
    if stream.is_capturing() {
        *event.record.lock() = None;
        event.capture.store(stream.capture(), Ordering::Relaxed);
        event.complete.store(false, Ordering::Release);
        return;
    }
    event.capture.store(0, Ordering::Relaxed);
    *event.record.lock() = Some(Record {
        stream,
        handle: stream.handle(),
        at: stream.position(),
    });
    event.complete.store(false, Ordering::Release);
}

/// Makes a stream wait for an event; an event that was never recorded is complete.
pub fn wait_in(session: &Session, stream: StreamRef, event: EventRef, flags: u32) -> Status {
    let captured = event.capture.load(Ordering::Relaxed);
    let known =
        !event.is_recorded() || event.complete.load(Ordering::Acquire) && !event.is_elsewhere();
    if known && captured == 0 && !stream.is_capturing() {
        return session.check();
    }
    if stream.is_capturing() && flags & CU_EVENT_WAIT_EXTERNAL != 0 {
        event.is_in_graph();
    }
    let body = EventOnStream {
        event: event.handle(),
        stream: stream.handle(),
        flags,
        pad: 0,
    };
    stream::submit_apart(session, stream, Op::StreamWaitEvent, &body, &[])?;
    if event.is_of_several() && !stream.is_capturing() {
        await_taken(session)?;
    }
    if captured != 0 {
        capture::join(session, stream, captured)?;
    }
    Ok(())
}

/// Records an event behind everything that all streams of a context were given. The event may be of another context of
/// the same device: those of the primary one are recorded in its green contexts.
pub fn record_context(session: &Session, context: &'static Context, event: EventRef) -> Status {
    if event.context().device != context.device {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    let gathering = default_stream::wait_stream(session, context)?;
    for stream in stream::of_context(context) {
        if stream.is_busy() && !ptr::eq(stream, gathering) {
            let part = create(session, context, CU_EVENT_DISABLE_TIMING)?;
            let gathered = record(session, part, stream, 0)
                .and_then(|()| wait_in(session, gathering, part, 0));
            destroy(session, part.handle())?;
            gathered?;
        }
    }
    put_record(session, event, gathering, 0)
}

/// Makes all streams that a context has now wait for an event.
pub fn wait_in_context(session: &Session, context: &'static Context, event: EventRef) -> Status {
    // The default stream may not have been needed so far.
    stream::legacy(session, context)?;
    stream::of_context(context)
        .into_iter()
        .try_for_each(|stream| wait_in(session, stream, event, 0))
}

/// The event's last record, unless that is known to be complete or can be seen to be without a message.
fn outstanding(session: &Session, event: EventRef) -> Status<Option<Record>> {
    session.check()?;
    let Some(record) = *event.record.lock() else {
        return Ok(None);
    };
    if event.complete.load(Ordering::Acquire) {
        return Ok(None);
    }
    if let Some(stream) = record.stream()
        && stream::has_reached(session, stream, record.at)
    {
        note_complete(event, record);
        return Ok(None);
    }
    Ok(Some(record))
}

/// Waits for an event.
pub fn synchronize(session: &Session, event: EventRef) -> Status {
    wait_until_complete(session, event)?;
    // It may have been known to be complete.
    waited::done(session, Seen::Wait);
    Ok(())
}

fn wait_until_complete(session: &Session, event: EventRef) -> Status {
    if event.capture.load(Ordering::Relaxed) != 0 {
        return poll(session, event);
    }
    capture::forbid(session)?;
    if event.in_graph.load(Ordering::Relaxed) {
        return poll(session, event);
    }
    if event.is_shared() {
        // For its present record, regardless of other processes.
        return match default_stream::wait_stream(session, event.context()) {
            Ok(waiter) => wait_by_mark(session, event, waiter),
            Err(_) => poll(session, event),
        };
    }
    let Some(record) = outstanding(session, event)? else {
        return session.async_error();
    };
    if let Some(stream) = record.stream()
        && stream.position() == record.at
    {
        // No work follows the record: a mark of its stream is equivalent.
        let target = stream::mark(&mut session.ring()?, stream)?;
        stream::wait_for(session, stream, target, event.policy())?;
        note_complete(event, record);
        return Ok(());
    }
    let waiter = match default_stream::wait_stream(session, event.context()) {
        Ok(waiter) => waiter,
        // No flag is left, or the thread is exiting.
        Err(_) => return poll(session, event),
    };
    wait_by_mark(session, event, waiter)?;
    note_complete(event, record);
    Ok(())
}

/// Waits until a stream has reached an event's last record.
fn wait_by_mark(session: &Session, event: EventRef, waiter: StreamRef) -> Status {
    let target = {
        let mut ring = session.ring()?;
        stream::mark_event(&mut ring, waiter, event.handle())?
    };
    stream::wait_for(session, waiter, target, event.policy())
}

/// Remembers that a record is complete, unless another one has taken its place.
fn note_complete(event: &Event, record: Record) {
    if let Some(stream) = record.stream() {
        shadow::collect_until(stream, record.at);
    }
    let now = event.record.lock();
    if now.is_some_and(|now| now.handle == record.handle && now.at == record.at) {
        event.complete.store(true, Ordering::Release);
    }
}

/// Waits by polling the server.
fn poll(session: &Session, event: EventRef) -> Status {
    let began = Instant::now();
    loop {
        let body = Object {
            object: event.handle(),
        };
        let status = session.request(Op::EventQuery, &body, &[])?.status;
        if status != CUDA_ERROR_NOT_READY {
            return status.ok().and_then(|()| session.async_error());
        }
        if began.elapsed() > Duration::from_millis(1) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Whether an event's last record is complete: `CUDA_ERROR_NOT_READY` when not.
pub fn query(session: &Session, event: EventRef) -> Status {
    check_complete(session, event)?;
    waited::done(session, Seen::Query);
    Ok(())
}

fn check_complete(session: &Session, event: EventRef) -> Status {
    if event.is_elsewhere() {
        if event.capture.load(Ordering::Relaxed) == 0 {
            capture::forbid(session)?;
        }
        let body = Object {
            object: event.handle(),
        };
        session.request(Op::EventQuery, &body, &[])?.status.ok()?;
        return session.async_error();
    }
    capture::forbid(session)?;
    let Some(record) = outstanding(session, event)? else {
        return session.async_error();
    };
    if let Some(stream) = record.stream()
        && stream.position() == record.at
    {
        return if stream::query(session, stream)? {
            note_complete(event, record);
            Ok(())
        } else {
            Err(CUDA_ERROR_NOT_READY)
        };
    }
    let body = Object {
        object: event.handle(),
    };
    session.request(Op::EventQuery, &body, &[])?.status.ok()?;
    note_complete(event, record);
    session.async_error()
}
