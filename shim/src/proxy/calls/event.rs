//! Events.

use std::collections::BTreeSet;

use mpsshim_api::cuda::{
    CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS,
    CU_EVENT_RECORD_EXTERNAL, CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_CONTEXT,
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUipcEventHandle, CUresult,
};
use mpsshim_proto::message::stream::{EventExport, EventToken};
use mpsshim_proto::message::{EventPair, Op, Value};
use parking_lot::Mutex;

use super::entries;
use crate::ffi::{Out, guard};
use crate::proxy::submit::session;
use crate::proxy::{context, default_stream, event};

entries! {
    cuEventCreate(_, _) => create,
    cuEventDestroy(_) => destroy,
    cuEventDestroy_v2(_) => destroy,
    cuEventRecord(_, _) => record::<false>,
    cuEventRecord_ptsz(_, _) => record::<true>,
    cuEventRecordWithFlags(_, _, _) => record_with_flags::<false>,
    cuEventRecordWithFlags_ptsz(_, _, _) => record_with_flags::<true>,
    cuEventSynchronize(_) => synchronize,
    cuEventQuery(_) => query,
    cuIpcGetEventHandle(_, _) => get_ipc_handle,
    cuIpcOpenEventHandle(_, _) => open_ipc_handle,
    cuEventElapsedTime(_, _, _) => elapsed_time,
    cuEventElapsedTime_v2(_, _, _) => elapsed_time,
}

/// `cuEventCreate`.
pub unsafe extern "C" fn create(out: Out<u64>, flags: u32) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let context = context::current()?;
        let known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
        let untimed = flags & CU_EVENT_DISABLE_TIMING != 0;
        if flags & !known != 0 || flags & CU_EVENT_INTERPROCESS != 0 && !untimed {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.set(event::create(session()?, context, flags)?.handle())
    })
}

/// `cuEventDestroy`.
pub unsafe extern "C" fn destroy(handle: u64) -> CUresult {
    guard(|| event::destroy(session()?, handle))
}

/// `cuEventRecord`.
pub unsafe extern "C" fn record<const PER_THREAD: bool>(event: u64, stream: u64) -> CUresult {
    guard(|| {
        let stream = default_stream::resolve(stream, PER_THREAD)?;
        event::record(session()?, event::resolve(event)?, stream, 0)
    })
}

/// `cuEventRecordWithFlags`.
pub unsafe extern "C" fn record_with_flags<const PER_THREAD: bool>(
    event: u64,
    stream: u64,
    flags: u32,
) -> CUresult {
    guard(|| {
        let stream = default_stream::resolve(stream, PER_THREAD)?;
        let event = event::resolve(event)?;
        if flags > 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if flags & CU_EVENT_RECORD_EXTERNAL != 0 && !stream.is_capturing() {
            return Err(CUDA_ERROR_ILLEGAL_STATE);
        }
        event::record(session()?, event, stream, flags)
    })
}

/// `cuIpcGetEventHandle`. The handle is a random number chosen by the server.
pub unsafe extern "C" fn get_ipc_handle(out: Out<CUipcEventHandle>, event: u64) -> CUresult {
    guard(|| {
        out.required()?;
        if event == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        context::current()?;
        let event = event::resolve(event)?;
        if event.flags() & CU_EVENT_INTERPROCESS == 0 {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let body = EventExport {
            event: event.handle(),
        };
        // Before another process can have the handle.
        event.is_open_elsewhere();
        let answer: EventToken = session()?.request(Op::EventExport, &body, &[])?.read()?;
        OWN.lock().insert(answer.token);
        out.set(CUipcEventHandle(zerocopy::transmute!(answer.token)))
    })
}

/// Handles of events that this process has exported. It cannot open them itself.
static OWN: Mutex<BTreeSet<[u64; 8]>> = Mutex::new(BTreeSet::new());

/// `cuIpcOpenEventHandle`. `CUDA_ERROR_INVALID_CONTEXT` in the process that made the event, as natively.
pub unsafe extern "C" fn open_ipc_handle(out: Out<u64>, handle: CUipcEventHandle) -> CUresult {
    guard(|| {
        out.required()?;
        let context = context::current()?;
        let token: [u64; 8] = zerocopy::transmute!(handle.0);
        if OWN.lock().contains(&token) {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        out.set(event::import(session()?, context, token)?.handle())
    })
}

/// `cuEventSynchronize`.
pub unsafe extern "C" fn synchronize(event: u64) -> CUresult {
    guard(|| event::synchronize(session()?, event::resolve(event)?))
}

/// `cuEventQuery`.
pub unsafe extern "C" fn query(event: u64) -> CUresult {
    guard(|| event::query(session()?, event::resolve(event)?))
}

/// `cuEventElapsedTime`.
pub unsafe extern "C" fn elapsed_time(out: Out<f32>, start: u64, end: u64) -> CUresult {
    guard(|| {
        // Without a place for the result too.
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let (first, last) = (event::resolve(start)?, event::resolve(end)?);
        for event in [first, last] {
            if event.flags() & CU_EVENT_DISABLE_TIMING != 0 || !event.is_recorded() {
                return Err(CUDA_ERROR_INVALID_HANDLE);
            }
        }
        if !std::ptr::eq(first.context(), last.context()) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let answer = session()?.request(Op::EventElapsed, &EventPair { start, end }, &[])?;
        let value: Value = answer.read()?;
        out.set(f32::from_bits(value.value as u32))
    })
}
