//! Events.

use std::sync::Arc;
use std::time::Instant;

use mpsshim_api::cuda::*;
use parking_lot::{Condvar, Mutex};

use crate::api::{Out, R, api, api_streams};
use crate::context::live;
use crate::driver::{driver, new_handle, start};
use crate::driver_locks;
use crate::graph::{self, Does};
use crate::stream::resolve;

/// One recording of an event: done when its stream has come to it.
#[derive(Default)]
pub struct Record {
    reached: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Record {
    pub fn reach(&self) {
        self.reached.lock().get_or_insert_with(Instant::now);
        self.changed.notify_all();
    }
    fn time(&self) -> Option<Instant> {
        *self.reached.lock()
    }
    pub fn wait(&self) {
        let mut reached = self.reached.lock();
        while reached.is_none() {
            self.changed.wait(&mut reached);
        }
    }
}

pub struct Event {
    /// The id of its context.
    pub context: u64,
    context_handle: u64,
    flags: u32,
    record: Mutex<Option<Arc<Record>>>,
    /// What it has of the capture that it was last recorded in.
    part: Mutex<Option<graph::Part>>,
}

fn find(event: CUevent) -> R<Arc<Event>> {
    let event = driver()?.events.get(event.0)?;
    driver()?
        .contexts
        .get(event.context_handle)
        .map_err(|_| CUDA_ERROR_CONTEXT_IS_DESTROYED)?
        .sound()?;
    Ok(event)
}

fn record(event: CUevent, stream: CUstream, own: bool, flags: u32) -> R<()> {
    let handle = event.0;
    let event = find(event)?;
    let (context, stream) = resolve(stream, own)?;
    if context.id != event.context {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    if flags & CU_EVENT_RECORD_EXTERNAL != 0 {
        return match graph::captured(&stream, || Does::Record(handle))? {
            true => Ok(()),
            false => Err(CUDA_ERROR_ILLEGAL_STATE),
        };
    }
    let part = graph::part_of(&stream)?;
    let mut record = None;
    if part.is_none() {
        let made = Arc::new(Record::default());
        record = Some(made.clone());
        stream.submit_always(&context, move |_| made.reach());
    }
    // Not before: a call that is kept out has changed nothing.
    *event.part.lock() = part;
    *event.record.lock() = record;
    Ok(())
}

/// What a wait node of a graph that is being launched waits for: the event's latest record now, as for a call.
pub fn latest(event: u64) -> Option<Arc<Record>> {
    find(CUevent(event)).ok()?.record.lock().clone()
}

/// A record that is done.
pub fn made() -> Arc<Record> {
    let record = Record::default();
    record.reach();
    Arc::new(record)
}

/// The record of a record node of a graph that is being launched: the event's latest from now on, as for a call.
pub fn begun(event: u64) -> Option<Arc<Record>> {
    let record = Arc::new(Record::default());
    let event = find(CUevent(event)).ok()?;
    *event.record.lock() = Some(record.clone());
    Some(record)
}

/// Refuses a question about an event of a capture.
fn refuse_captured(event: &Event) -> R<()> {
    if let Some(part) = event.part.lock().as_ref() {
        return Err(part.refuse());
    }
    Ok(())
}

fn destroy(event: CUevent) -> R<()> {
    if driver_locks::on()
        && let Ok(context) = driver()?
            .contexts
            .get(driver()?.events.get(event.0)?.context_handle)
    {
        context.waits_its_turn();
    }
    driver()?.events.remove(event.0).map(drop)
}

fn elapsed(out: Out<f32>, from: CUevent, to: CUevent) -> R<()> {
    let (from, to) = (find(from)?, find(to)?);
    if (from.flags | to.flags) & CU_EVENT_DISABLE_TIMING != 0 {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    let time = |event: &Event| -> R<Instant> {
        let record = event
            .record
            .lock()
            .clone()
            .ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        record.time().ok_or(CUDA_ERROR_NOT_READY)
    };
    let (from, to) = (time(&from)?, time(&to)?);
    let forward = to.saturating_duration_since(from).as_secs_f64();
    out.set(((forward - from.saturating_duration_since(to).as_secs_f64()) * 1e3) as f32)
}

api! { TABLE;
    fn cuEventCreate(out: Out<CUevent>, flags: u32) {
        if out.is_null() || flags > 7 || flags & CU_EVENT_INTERPROCESS != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let context = live()?;
        context.waits_its_turn();
        let handle = new_handle();
        let event = Event { context: context.id, context_handle: context.handle, flags, record: Mutex::new(None), part: Mutex::new(None) };
        start().events.insert(handle, Arc::new(event));
        out.set(CUevent(handle))
    }
    fn cuEventDestroy_v2(event: CUevent) { destroy(event) }
    fn cuEventQuery(event: CUevent) {
        refuse_captured(&*find(event)?)?;
        let record = find(event)?.record.lock().clone();
        if record.is_none_or(|r| r.time().is_some()) { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) }
    }
    fn cuEventSynchronize(event: CUevent) {
        refuse_captured(&*find(event)?)?;
        let found = find(event)?.record.lock().clone();
        if let Some(record) = found {
            record.wait();
        }
        find(event).map(drop)
    }
    fn cuEventElapsedTime(out: Out<f32>, from: CUevent, to: CUevent) { elapsed(out, from, to) }
    fn cuEventElapsedTime_v2(out: Out<f32>, from: CUevent, to: CUevent) { elapsed(out, from, to) }
}

api_streams! { TABLE_STREAMS;
    fn cuEventRecord / cuEventRecord_ptsz [own] (event: CUevent, stream: CUstream) { record(event, stream, own, 0) }
    fn cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz [own] (event: CUevent, stream: CUstream, flags: u32) {
        if flags > 1 { Err(CUDA_ERROR_INVALID_VALUE) } else { record(event, stream, own, flags) }
    }
    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz [own] (stream: CUstream, event: CUevent, flags: u32) {
        let (context, stream) = resolve(stream, own)?;
        if flags > 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let found = find(event)?;
        if flags & CU_EVENT_WAIT_EXTERNAL != 0 {
            return match graph::captured(&stream, || Does::Wait(event.0))? {
                true => Ok(()),
                false => Err(CUDA_ERROR_ILLEGAL_STATE),
            };
        }
        if let Some(part) = found.part.lock().as_ref() {
            return graph::join(&stream, part);
        }
        let record = found.record.lock().clone();
        if record.is_some() && graph::isolated(&stream)? {
            return Ok(());
        }
        match record.filter(|r| r.time().is_none()) {
            Some(record) => stream.submit_always(&context, move |_| record.wait()),
            None => context.waits_its_turn(),
        }
        Ok(())
    }
}
