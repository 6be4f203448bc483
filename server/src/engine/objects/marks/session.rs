//! Completion markers of a session.

use super::{FEW, FEWEST, Writer, are_quick, only};
use crate::engine::gpu::Gpu;
use crate::engine::objects::streams::Stream;
use crate::engine::session::Session;
use mpsshim_api::cuda::*;
use mpsshim_model::policy::MarkKind;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Session {
    /// Finds out how often there were marks in the time since the last count; whether there were any.
    pub fn count_marks(&mut self, gpu: &Gpu, over: Duration) -> bool {
        let marks = std::mem::take(&mut self.flow.marks.lately);
        let quick = are_quick(marks, over);
        self.flow.marks.quick_in = quick.then(|| self.only_used(gpu)).flatten();
        marks > 0
    }

    /// The only stream that was used since this was last asked, by number. Where there are others, a kernel of one that fills
    /// the device and waits for the program to go on would keep the server's from it.
    fn only_used(&mut self, gpu: &Gpu) -> Option<u32> {
        let streams = self
            .objects
            .streams
            .iter_mut()
            .chain(&mut self.objects.retired);
        let used = |stream: &mut Stream| {
            let used = stream.was_used(gpu, &self.shared.segment);
            used.then_some(stream.number)
        };
        only(streams.filter_map(used))
    }

    /// What writes a mark behind a run in this stream whose largest kernel has so many threads; `None`: the mark is not to
    /// be in the run's graph.
    #[inline]
    pub fn writer(&self, gpu: &Gpu, stream: &Stream, threads: u64) -> Option<Writer> {
        let device = &gpu.devices[stream.device];
        let synchronizing = gpu.synchronizing.load(Ordering::Relaxed);
        let quick = self.flow.marks.quick_in == Some(stream.number);
        // Where the device is full, a kernel of the server's takes room that another's would have.
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

    /// Queues a mark on a stream whose device's context is current.
    ///
    /// # Errors
    /// The driver's.
    #[inline]
    pub fn queue_mark(
        &mut self,
        gpu: &Gpu,
        stream: CUstream,
        slot: u32,
        value: u32,
    ) -> Result<(), CUresult> {
        self.flow.marks.note();
        let address = self
            .shared
            .segment
            .flag_address(slot)
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        gpu.driver.stream_write_value32(stream, address, value, 0)
    }
}
