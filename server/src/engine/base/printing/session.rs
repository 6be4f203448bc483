//! A session's turn to print, and its text ([`super`]).

use crate::engine::gpu::Gpu;
use crate::engine::session::Session;
use mpsshim_api::cuda::{CUDA_ERROR_NOT_READY, CUresult};
use std::time::{Duration, Instant};

/// How long a client that asks for its text is held up at most while its streams still work.
const SETTLING: Duration = Duration::from_millis(1);

impl Session {
    /// Whether this session may launch a kernel that prints now; takes the turn if it is free.
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

    /// Gives the turn back if nothing is in flight, after fetching what was printed.
    pub fn stop_printing(&mut self, gpu: &Gpu) {
        if self.flow.printed.holds && !self.has_work_in_flight(gpu) && self.is_idle(gpu) {
            self.surrender_printing(gpu);
        }
    }

    /// Gives the turn back for a session that is over and whose streams are idle. What is known of its work does
    /// not matter: work that no flag covers would count as being in flight for ever.
    pub fn surrender_printing(&mut self, gpu: &Gpu) {
        if !self.flow.printed.holds {
            return gpu.printing.drop_unclaimed();
        }
        // What it has printed nobody will ask for, and it must not be taken for the next holder's.
        if let Err(status) = self.fetch_printed(gpu) {
            gpu.note_status(status);
        }
        self.flow.printed.holds = false;
        gpu.printing.end_turn();
    }

    /// Whether the driver says that all streams are idle. What [`Session::has_work_in_flight`] goes by may be known
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

    /// The next `room` bytes of what its kernels printed, and how many are left after them.
    pub fn take_printed(&mut self, gpu: &Gpu, room: usize) -> Result<(Vec<u8>, usize), CUresult> {
        if self.flow.printed.holds {
            // The driver may learn a moment after the client that its work is done.
            let began = Instant::now();
            while !self.is_idle(gpu) && began.elapsed() < SETTLING {
                std::thread::yield_now();
            }
            if self.has_work_in_flight(gpu) {
                // Work of other streams still runs; the text of what the client waited for is complete nevertheless.
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
