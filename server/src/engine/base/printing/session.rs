//! A session's turn to print, and its printed text ([`super`]).

use crate::engine::gpu::Gpu;
use crate::engine::session::Session;
use mpsshim_api::cuda::{CUDA_ERROR_NOT_READY, CUresult};
use std::time::{Duration, Instant};

/// Maximum time for which a request for printed text waits for the session's streams to become idle.
const SETTLING: Duration = Duration::from_millis(1);

impl Session {
    /// Whether this session may launch a printing kernel now; takes the turn if it is free.
    pub fn may_print(&mut self, gpu: &Gpu) -> bool {
        if !self.flow.printed.holds {
            self.flow.printed.holds = gpu.printing.take_turn(self.shared.info.session);
        }
        self.flow.printed.holds
    }

    /// Whether it has the turn.
    pub fn prints(&self) -> bool {
        self.flow.printed.holds
    }

    /// Fetches the printed text and releases the turn if nothing is in flight.
    pub fn stop_printing(&mut self, gpu: &Gpu) {
        if self.flow.printed.holds && !self.has_work_in_flight(gpu) && self.is_idle(gpu) {
            self.surrender_printing(gpu);
        }
    }

    /// Releases the turn for an ended session whose streams are idle. Its count of work in flight is ignored, because
    /// work not covered by a flag would count as in flight forever.
    pub fn surrender_printing(&mut self, gpu: &Gpu) {
        if !self.flow.printed.holds {
            return gpu.printing.drop_unclaimed();
        }
        // Its text is fetched even though it will never be requested, so that it is not attributed to the next holder.
        if let Err(status) = self.fetch_printed(gpu) {
            gpu.note_status(status);
        }
        self.flow.printed.holds = false;
        gpu.printing.end_turn();
    }

    /// Whether the driver reports all streams as idle. The flags that [`Session::has_work_in_flight`] reads may change
    /// a moment before the driver notices, and synchronizing must not wait.
    pub fn is_idle(&self, gpu: &Gpu) -> bool {
        let works = self.objects.streams.iter().chain(&self.objects.retired);
        works.filter(|stream| !stream.capturing).all(|stream| {
            let _ = gpu.devices[stream.device].make_current(&gpu.driver);
            gpu.driver.stream_query(stream.raw) != Err(CUDA_ERROR_NOT_READY)
        })
    }

    fn fetch_printed(&mut self, gpu: &Gpu) -> Result<(), CUresult> {
        let works = self.objects.streams.iter().chain(&self.objects.retired);
        for stream in works.filter(|stream| !stream.capturing) {
            gpu.devices[stream.device].make_current(&gpu.driver)?;
            gpu.driver.stream_synchronize(stream.raw)?;
        }
        self.flow.printed.add(&gpu.printing.take_output());
        Ok(())
    }

    /// Takes the next `room` bytes printed by its kernels. Returns them and the number of remaining bytes.
    pub fn take_printed(&mut self, gpu: &Gpu, room: usize) -> Result<(Vec<u8>, usize), CUresult> {
        // The driver may notice the completion a moment later than the client.
        if self.flow.printed.holds {
            let began = Instant::now();
            while !self.is_idle(gpu) && began.elapsed() < SETTLING {
                std::thread::yield_now();
            }
            if self.has_work_in_flight(gpu) {
                // Other streams are still working, but the text of the work that the client waited for is complete.
                self.flow.printed.add(&gpu.printing.take_output());
            } else {
                self.stop_printing(gpu);
            }
        }
        let count = self.flow.printed.text.len().min(room);
        let text = self.flow.printed.text.drain(..count).collect();
        Ok((text, self.flow.printed.text.len()))
    }
}
