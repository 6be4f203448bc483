//! Writes the words for which graphs of an ended session may wait.

use super::{BEFORE, PAUSE, PRIORITY, Place, STREAMS};
use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::host::write_word;
use crate::engine::session::Session;
use mpsshim_api::cuda::*;
use std::time::Instant;

/// State of writing for one ended session.
#[derive(Debug)]
pub struct Release {
    next: Instant,
    round: usize,
    streams: Vec<(Ordinal, CUstream)>,
}

impl Release {
    /// Creates the state for a session that ended at `since`.
    pub fn new(since: Instant) -> Release {
        Release {
            next: since + BEFORE,
            round: 0,
            streams: Vec::new(),
        }
    }

    /// Writes the words for which graphs of the session may wait, if the next round is due. Words in another session's
    /// memory are skipped unless `all` is set, since that session may still write them.
    pub fn write(&mut self, gpu: &Gpu, session: &Session, all: bool) {
        let began = Instant::now();
        let awaited = &session.objects.graphs.awaited;
        if awaited.words.is_empty() || began < self.next {
            return;
        }
        for (place, values) in &awaited.words {
            let value = values.iter().nth(self.round % values.len());
            let len = if place.wide { 8 } else { 4 };
            let others = session.objects.sharing.contains(place.address, len);
            let (Some(value), Ok(()), true) = (
                value,
                session.check_device(place.address, len),
                all || !others,
            ) else {
                continue;
            };
            if session.check_host(place.address, len).is_ok() {
                write_word(place.address, place.wide, *value);
            } else if let Err(status) = self.write_on_device(gpu, place, *value) {
                gpu.note_status(status);
            }
        }
        self.round += 1;
        // Leaves the thread time for other sessions, however many words there are.
        self.next = Instant::now() + PAUSE.max(10 * began.elapsed());
    }

    fn write_on_device(&mut self, gpu: &Gpu, place: &Place, value: u64) -> Result<(), CUresult> {
        let (device, driver) = (&gpu.devices[place.device], &gpu.driver);
        device.make_current(driver)?;
        let idle = |(of, stream): &&(Ordinal, CUstream)| {
            *of == place.device && driver.stream_query(*stream).is_ok()
        };
        let stream = match self.streams.iter().find(idle) {
            Some((_, stream)) => *stream,
            None if self.streams.len() >= STREAMS => return Ok(()),
            None => {
                let stream = device.take_stream(driver, PRIORITY)?;
                self.streams.push((place.device, stream));
                stream
            }
        };
        if place.wide {
            let driver = &driver.stream;
            driver.stream_write_value64(stream, place.address, value, 0)
        } else {
            driver.stream_write_value32(stream, place.address, value as u32, 0)
        }
    }

    /// Returns idle streams for reuse. Returns whether none is left.
    pub fn is_done(&mut self, gpu: &Gpu) -> bool {
        self.streams.retain(|(of, stream)| {
            let device = &gpu.devices[*of];
            let idle = device
                .make_current(&gpu.driver)
                .and_then(|()| gpu.driver.stream_query(*stream));
            match idle {
                Err(CUDA_ERROR_NOT_READY) => return true,
                Ok(()) => device.keep_stream(&gpu.driver, PRIORITY, *stream),
                Err(status) => gpu.note_status(status),
            }
            false
        });
        self.streams.is_empty()
    }
}
