//! Marks: how a client's flag comes to be written when its stream gets to a point.
//!
//! The GPU writes it (`cuStreamWriteValue32`), which needs no thread of the server. That call takes 0.9 µs under the
//! context's lock, where recording an event takes 0.2 µs: the mark can as well be an event that the dispatch thread, which
//! spins anyway, asks about, and the thread writes the flag. Which is better depends on the host, and written flags are
//! never much worse (docs/design/0002-marks-and-waits.md), so they are what is used unless somebody says otherwise.

use super::runs::FEW;
use super::session::Session;
use super::{Dispatcher, Shared};
use mpsshim_proto::cuda::*;
use mpsshim_proto::segment::reached;
use std::sync::atomic::Ordering;

/// How a mark is made; `auto` chooses by the number of clients that synchronize.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MarkKind {
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

    /// Whether the GPU may write a flag: behind a mark of it that is asked about, it would write first and be overwritten.
    pub fn may_write(&self, slot: u32) -> bool {
        !self.asked.iter().any(|asked| asked.slot == slot)
    }

    /// Notes that there was a mark.
    pub fn note(&mut self) {
        self.lately = true;
    }

    /// Whether there was a mark since this was last asked.
    pub fn take_lately(&mut self) -> bool {
        std::mem::take(&mut self.lately)
    }
}

impl Shared {
    /// Adds up how many sessions synchronize.
    pub fn count_synchronizing(&self) {
        let active = |dispatcher: &Dispatcher| dispatcher.active.load(Ordering::Relaxed);
        let active: usize = self.dispatchers.iter().map(active).sum();
        self.many_synchronize.store(active > FEW, Ordering::Relaxed);
    }

    /// Whether so few sessions synchronize that their marks may be in the graphs of runs.
    #[inline]
    pub fn few_synchronize(&self) -> bool {
        self.config.marks == MarkKind::Written && !self.many_synchronize.load(Ordering::Relaxed)
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
        self.marks.note();
        let ask = shared.config.marks == MarkKind::Asked && self.marks.asked.len() < MOST;
        if !ask && self.marks.may_write(slot) {
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
