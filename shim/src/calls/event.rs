//! Events.

use mpsshim_proto::cuda::{
    CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS,
    CU_EVENT_RECORD_EXTERNAL, CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_HANDLE,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUresult,
};
use mpsshim_proto::message::{EventPair, Op, Value};

use super::entries;
use crate::ffi::{Out, guard};
use crate::submit::session;
use crate::{context, event, stream};

entries! {
    cuEventCreate => create,
    cuEventDestroy => destroy,
    cuEventDestroy_v2 => destroy,
    cuEventRecord => record::<false>,
    cuEventRecord_ptsz => record::<true>,
    cuEventRecordWithFlags => record_with_flags::<false>,
    cuEventRecordWithFlags_ptsz => record_with_flags::<true>,
    cuEventSynchronize => synchronize,
    cuEventQuery => query,
    cuEventElapsedTime => elapsed_time,
    cuEventElapsedTime_v2 => elapsed_time,
}

/// `cuEventCreate`.
pub unsafe extern "C" fn create(out: Out<u64>, flags: u32) -> CUresult {
    guard(|| {
        out.required()?;
        let context = context::current()?;
        let known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
        if flags & !known != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if flags & CU_EVENT_INTERPROCESS != 0 {
            tracing::warn!("an event for other processes was asked for; not served");
            return Err(CUDA_ERROR_NOT_SUPPORTED);
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
        let event = event::resolve(event)?;
        event::record(session()?, event, stream::resolve(stream, PER_THREAD)?, 0)
    })
}

/// `cuEventRecordWithFlags`.
pub unsafe extern "C" fn record_with_flags<const PER_THREAD: bool>(
    event: u64,
    stream: u64,
    flags: u32,
) -> CUresult {
    guard(|| {
        let event = event::resolve(event)?;
        if flags > 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let stream = stream::resolve(stream, PER_THREAD)?;
        if flags & CU_EVENT_RECORD_EXTERNAL != 0 && !stream.is_capturing() {
            return Err(CUDA_ERROR_ILLEGAL_STATE);
        }
        event::record(session()?, event, stream, flags)
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
        out.required()?;
        for event in [event::resolve(start)?, event::resolve(end)?] {
            if event.flags() & CU_EVENT_DISABLE_TIMING != 0 || !event.is_recorded() {
                return Err(CUDA_ERROR_INVALID_HANDLE);
            }
        }
        let answer = session()?.ask(Op::EventElapsed, &EventPair { start, end }, &[])?;
        let value: Value = answer.read()?;
        out.set(f32::from_bits(value.value as u32))
    })
}
