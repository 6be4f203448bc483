//! Completion markers of a session.

use super::{FEW, FEWEST, Writer, are_quick, only};
use crate::engine::gpu::Gpu;
use crate::engine::objects::streams::Stream;
use crate::engine::session::Session;
use mpsshim_api::cuda::*;
use mpsshim_model::policy::MarkKind;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Evaluates the marks in the time `over` since the last count. Returns whether there were any.
pub fn count_marks(session: &mut Session, gpu: &Gpu, over: Duration) -> bool {
    let marks = std::mem::take(&mut session.flow.marks.lately);
    let quick = are_quick(marks, over);
    session.flow.marks.quick_in = quick.then(|| only_used(session, gpu)).flatten();
    marks > 0
}

/// Returns the number of the only stream used since the last call, if there was exactly one. With several streams,
/// a kernel of another stream that fills the device while it waits for the program could block the server's kernel.
fn only_used(session: &mut Session, gpu: &Gpu) -> Option<u32> {
    let streams = session
        .objects
        .streams
        .iter_mut()
        .chain(&mut session.objects.retired);
    let used = |stream: &mut Stream| {
        let used = stream.was_used(gpu, &session.shared.segment);
        used.then_some(stream.number)
    };
    only(streams.filter_map(used))
}

/// Returns the method for writing a mark after a launch batch in this stream whose largest kernel has this many
/// threads; `None` if the mark must not be in the batch's graph.
#[inline]
pub fn writer(session: &Session, gpu: &Gpu, stream: &Stream, threads: u64) -> Option<Writer> {
    let device = &gpu.devices[stream.device];
    let synchronizing = gpu.synchronizing.load(Ordering::Relaxed);
    let quick = session.flow.marks.quick_in == Some(stream.number);
    // On a full device, the server's kernel would take room from kernels of other clients.
    let room = threads.saturating_mul(synchronizing as u64) <= device.threads;
    let prefers = match gpu.marks {
        MarkKind::Written => false,
        MarkKind::Kernel => true,
        MarkKind::Auto => quick && room && synchronizing > FEWEST,
    };
    let kernel = prefers.then(|| device.flag_kernel()).flatten();
    let operation = (synchronizing <= FEW).then_some(Writer::Operation);
    kernel.map(Writer::Kernel).or(operation)
}

/// Queues a mark on a stream whose device's context is current (`cuStreamWriteValue32`).
///
/// # Errors
/// The driver's status, or `CUDA_ERROR_INVALID_VALUE` for an invalid slot.
#[inline]
pub fn queue_mark(
    session: &mut Session,
    gpu: &Gpu,
    stream: CUstream,
    slot: u32,
    value: u32,
) -> Result<(), CUresult> {
    session.flow.marks.note();
    let address = session
        .shared
        .segment
        .flag_address(slot)
        .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    gpu.driver.stream_write_value32(stream, address, value, 0)
}
