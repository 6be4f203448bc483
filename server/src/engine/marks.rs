//! Marks: how a client's flag comes to be written when its stream gets to a point.
//!
//! The GPU writes it (`cuStreamWriteValue32`), which needs no thread of the server and is quickest for a few
//! clients. Under load that call is the dearest part of a small kernel's way: 0.9 µs, under the context's lock,
//! where recording an event takes 0.2 µs. So while a medium number of clients synchronize all the time, the mark is
//! an event that the dispatch thread, which spins anyway, asks about, and the thread writes the flag. Measured in
//! one process, 50 µs kernels on 16 streams: 263,000/s with written flags, 281,000/s with asked events; 8: 147,000
//! and 150,000; 32: 368,000 and 356,000 (H200, driver 580.159.04, 4 threads).

use super::Shared;
use super::session::Session;
use mpsshim_proto::cuda::*;
use mpsshim_proto::segment::reached;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;

/// Numbers of synchronizing clients with which marks are events.
const ASKED: RangeInclusive<usize> = 6..=12;
/// How a mark is made; `auto` chooses by the number of clients that synchronize.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MarkKind {
    /// As suits the number of clients.
    Auto,
    /// The GPU writes the client's flag.
    Written,
    /// The dispatch thread asks about an event and writes the flag.
    Asked,
}

/// Marks of one session that may be asked about at a time.
const MOST: usize = 256;

/// A mark that a dispatch thread asks about.
#[derive(Debug)]
struct Asked {
    event: CUevent,
    device: usize,
    slot: u32,
    value: u32,
}

/// A session's marks.
#[derive(Debug, Default)]
pub struct Marks {
    asked: Vec<Asked>,
    /// Events for further marks, by device.
    spare: Vec<(usize, CUevent)>,
    /// There was one since the last count.
    lately: bool,
}

impl Marks {
    /// Whether some mark waits to be asked about.
    pub fn is_waiting(&self) -> bool {
        !self.asked.is_empty()
    }

    /// Whether there was a mark since this was last asked.
    pub fn take_lately(&mut self) -> bool {
        std::mem::take(&mut self.lately)
    }
}

impl Shared {
    /// Chooses the kind of the marks to come by how many sessions synchronize.
    pub fn choose_marks(&self) {
        let active = self
            .dispatchers
            .iter()
            .map(|dispatcher| dispatcher.active.load(Ordering::Relaxed))
            .sum();
        let ask = match self.config.marks {
            MarkKind::Auto => ASKED.contains(&active),
            MarkKind::Written => false,
            MarkKind::Asked => true,
        };
        self.ask_marks.store(ask, Ordering::Relaxed);
    }
}

impl Session {
    /// Queues a mark on a stream whose device's context is current.
    ///
    /// # Errors
    /// The driver's.
    #[inline]
    pub fn queue_mark(
        &mut self,
        shared: &Shared,
        device: usize,
        stream: CUstream,
        slot: u32,
        value: u32,
    ) -> Result<(), CUresult> {
        self.marks.lately = true;
        // Behind a mark of the same flag that is asked about, the GPU would write first and be overwritten.
        let ask = shared.ask_marks.load(Ordering::Relaxed) && self.marks.asked.len() < MOST;
        if !ask && !self.marks.asked.iter().any(|asked| asked.slot == slot) {
            let address = self
                .shared
                .flag_address(slot)
                .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
            return shared
                .driver
                .stream_write_value32(stream, address, value, 0);
        }
        let event = match self.marks.spare.iter().position(|(of, _)| *of == device) {
            Some(at) => self.marks.spare.swap_remove(at).1,
            None => {
                let mut event = CUevent::NULL;
                shared
                    .driver
                    .event_create(&mut event, CU_EVENT_DISABLE_TIMING)?;
                event
            }
        };
        if let Err(status) = shared.driver.event_record(event, stream, 0) {
            self.marks.spare.push((device, event));
            return Err(status);
        }
        self.marks.asked.push(Asked {
            event,
            device,
            slot,
            value,
        });
        Ok(())
    }

    /// Asks about the marks that wait; returns whether some flag was written.
    #[inline]
    pub fn ask_marks(&mut self, shared: &Shared) -> bool {
        let mut any = false;
        let mut at = 0;
        while at < self.marks.asked.len() {
            let mark = &self.marks.asked[at];
            let _ = shared.devices[mark.device].make_current(&shared.driver);
            match shared.driver.event_query(mark.event) {
                Err(CUDA_ERROR_NOT_READY) => {
                    at += 1;
                    continue;
                }
                Err(status) => shared.note_status(status),
                Ok(()) => {}
            }
            // Marks of a flag complete in order; a later one may have been seen first.
            if !reached(self.shared.flag(mark.slot), mark.value) {
                self.shared.set_flag(mark.slot, mark.value);
            }
            any = true;
            let done = self.marks.asked.remove(at);
            self.marks.spare.push((done.device, done.event));
        }
        any
    }

    /// Destroys the events of a session that is over.
    pub fn release_marks(&mut self, shared: &Shared) {
        let asked = self
            .marks
            .asked
            .drain(..)
            .map(|mark| (mark.device, mark.event));
        for (device, event) in asked.chain(self.marks.spare.drain(..)) {
            let _ = shared.devices[device].make_current(&shared.driver);
            let _ = shared.driver.event_destroy(event);
        }
    }
}
