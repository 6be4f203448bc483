//! Words that graphs wait for on the GPU, and their release when nobody is left to write them.
//!
//! A stream's own waits never get to the GPU ([`super::held`]); those in graphs do. When their client ends, whoever was to
//! write the words may be gone, and the graph, with all that it is in the way of, would wait for ever. So what each such
//! wait asks for is noted when its node is made, and written on the session's behalf when it is over.

use super::bounds::GRAPH_WAITS;
use super::gpu::Gpu;
use super::host::write_word;
use super::ordinal::Ordinal;
use super::session::Session;
use mpsshim_api::cuda::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long an ended session's work may take by itself before words are written for it.
const BEFORE: Duration = Duration::from_millis(100);
/// Pause between two rounds of writing: several values of one word are written in turn, and the GPU has to see each.
const PAUSE: Duration = Duration::from_millis(10);
/// Streams for writing, at a time: one may share its hardware queue with a stream that waits.
const STREAMS: usize = 4;
/// Their priority, the greatest, for a queue that few others share.
const PRIORITY: i32 = -16;

/// A word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    address: u64,
    wide: bool,
    /// Server's ordinal.
    device: Ordinal,
}

/// What the graphs of a session may wait for.
#[derive(Debug, Default)]
pub struct Awaited {
    /// Values that end a wait for each word.
    words: BTreeMap<Place, BTreeSet<u64>>,
    count: usize,
}

/// The value that ends a wait; `None`: nothing does.
fn ends(wide: bool, flags: u32, value: u64) -> Option<u64> {
    let ones = if wide { u64::MAX } else { u32::MAX.into() };
    let value = value & ones;
    match flags & 3 {
        CU_STREAM_WAIT_VALUE_AND => (value != 0).then_some(value),
        CU_STREAM_WAIT_VALUE_GEQ | CU_STREAM_WAIT_VALUE_EQ => Some(value),
        _ => (value != ones).then_some(0),
    }
}

impl Awaited {
    /// Notes an operation that becomes part of a graph; of one that does not wait nothing.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a wait that nothing ends, `CUDA_ERROR_OUT_OF_MEMORY` when there are too many.
    pub fn note(
        &mut self,
        device: Ordinal,
        operation: u32,
        address: u64,
        value: u64,
        flags: u32,
    ) -> Result<(), CUresult> {
        let wide = match operation {
            CU_STREAM_MEM_OP_WAIT_VALUE_32 => false,
            CU_STREAM_MEM_OP_WAIT_VALUE_64 => true,
            _ => return Ok(()),
        };
        let value = ends(wide, flags, value).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let place = Place {
            address,
            wide,
            device,
        };
        let known = |values: &BTreeSet<u64>| values.contains(&value);
        if self.words.get(&place).is_some_and(known) {
            return Ok(());
        }
        if self.count >= GRAPH_WAITS {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.count += 1;
        self.words.entry(place).or_default().insert(value);
        Ok(())
    }
}

/// The writing for one ended session.
#[derive(Debug)]
pub struct Release {
    next: Instant,
    round: usize,
    streams: Vec<(Ordinal, CUstream)>,
}

impl Release {
    /// Of a session that is over since `since`.
    pub fn new(since: Instant) -> Release {
        Release {
            next: since + BEFORE,
            round: 0,
            streams: Vec::new(),
        }
    }

    /// Writes the words that graphs of the session may wait for, if it is time. Words in memory of another session's are
    /// left out unless `all`: it may be about to write them.
    pub fn write(&mut self, gpu: &Gpu, session: &Session, all: bool) {
        let began = Instant::now();
        let awaited = &session.graphs.awaited;
        if awaited.words.is_empty() || began < self.next {
            return;
        }
        for (place, values) in &awaited.words {
            let value = values.iter().nth(self.round % values.len());
            let len = if place.wide { 8 } else { 4 };
            let others = session.sharing.contains(place.address, len);
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
        // Whatever there is to write, the thread has time for other sessions.
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

    /// Gives its streams back once they are idle; whether none is left.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_a_wait_is_known_or_the_wait_refused() {
        let geq = CU_STREAM_WAIT_VALUE_GEQ;
        assert_eq!(ends(false, geq, 7 | 1 << 40), Some(7));
        assert_eq!(ends(true, CU_STREAM_WAIT_VALUE_EQ, 7 << 40), Some(7 << 40));
        assert_eq!(ends(true, CU_STREAM_WAIT_VALUE_AND, 6), Some(6));
        assert_eq!(ends(false, CU_STREAM_WAIT_VALUE_AND, 1 << 32), None);
        let nor = CU_STREAM_WAIT_VALUE_NOR;
        assert_eq!(ends(false, nor, 5), Some(0));
        assert_eq!(ends(false, nor, u32::MAX.into()), None);
        assert_eq!(ends(true, nor, u32::MAX.into()), Some(0));
    }

    #[test]
    fn waits_are_counted_once_and_bounded() {
        let mut awaited = Awaited::default();
        let wait = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        for _ in 0..2 {
            for value in 0..GRAPH_WAITS as u64 {
                let noted = awaited.note(Ordinal::of_test(0), wait, 64, value, 0);
                assert_eq!(noted, Ok(()));
            }
        }
        let write = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        assert_eq!(awaited.note(Ordinal::of_test(0), write, 128, 1, 0), Ok(()));
        let more = awaited.note(Ordinal::of_test(0), wait, 128, 1, 0);
        assert_eq!(more, Err(CUDA_ERROR_OUT_OF_MEMORY));
    }
}
