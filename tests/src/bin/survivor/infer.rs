//! Requests whose kernels may run again from the point where the program last waited, and only from there: later commands
//! overwrite what earlier ones of the same request read.

use super::{Status, WORDS, launch, memory};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Kernels of a request.
const STEPS: usize = 6;
const BYTES: usize = WORDS * 4;
/// Bytes that go through the staging area.
const STAGED: usize = 40 << 10;

/// Memory of the requests.
pub struct Infer {
    fill: CUfunction,
    streams: [CUstream; 2],
    events: [CUevent; 2],
    input: CUdeviceptr,
    staged: CUdeviceptr,
    work: CUdeviceptr,
    results: CUdeviceptr,
    pinned: *mut u32,
    requests: u32,
}

impl Infer {
    /// The results come to pinned memory, or to registered memory.
    pub fn new(fill: CUfunction, streams: [CUstream; 2], registers: bool) -> Status<Infer> {
        let mut pinned = null_mut::<c_void>();
        let bytes = (STEPS + 1) * BYTES;
        if registers {
            pinned = vec![0u32; bytes / 4].leak().as_mut_ptr().cast();
            cu!(cuMemHostRegister_v2, pinned, bytes, 0 as c_uint).ok()?;
        } else {
            cu!(cuMemHostAlloc, &mut pinned, bytes, 0 as c_uint).ok()?;
        }
        let mut events = [CUevent::NULL; 2];
        for event in &mut events {
            cu!(cuEventCreate, event, CU_EVENT_DISABLE_TIMING).ok()?;
        }
        Ok(Infer {
            fill,
            streams,
            events,
            input: memory(BYTES)?,
            staged: memory(STAGED)?,
            work: memory(BYTES)?,
            results: memory((STEPS + 1) * BYTES)?,
            pinned: pinned.cast(),
            requests: 0,
        })
    }

    fn seed(&self, step: usize) -> u32 {
        self.requests * 31 + step as u32 + 1
    }

    /// The kernels of a request take so many rounds of their loops.
    fn submit(&mut self, rounds: u32) -> Status {
        let [first, second] = self.streams;
        let [ready, done] = self.events;
        let input: Vec<u32> = (0..WORDS).map(|at| self.seed(at)).collect();
        let small = &raw const input[0];
        cu!(cuMemcpyHtoDAsync_v2, self.input, small, 4096usize, first).ok()?;
        let staged = vec![self.seed(0); STAGED / 4];
        let (from, to) = (staged.as_ptr(), self.staged);
        cu!(cuMemcpyHtoDAsync_v2, to, from, STAGED, first).ok()?;
        for step in 0..STEPS {
            launch(self.fill, first, (self.work, self.seed(step), rounds))?;
            let to = self.results + (step * BYTES) as u64;
            if step % 2 == 0 {
                cu!(cuMemcpyDtoDAsync_v2, to, self.work, BYTES, first).ok()?;
                continue;
            }
            // On the other stream, and back.
            cu!(cuEventRecord, ready, first).ok()?;
            cu!(cuStreamWaitEvent, second, ready, 0 as c_uint).ok()?;
            cu!(cuMemcpyDtoDAsync_v2, to, self.work, BYTES, second).ok()?;
            cu!(cuEventRecord, done, second).ok()?;
            cu!(cuStreamWaitEvent, first, done, 0 as c_uint).ok()?;
        }
        let last = self.results + (STEPS * BYTES) as u64;
        cu!(cuMemsetD32Async, last, self.seed(7), WORDS, first).ok()?;
        cu!(cuMemcpyDtoDAsync_v2, last, self.input, 4096usize, first).ok()?;
        let end = last + 4096;
        cu!(cuMemcpyDtoDAsync_v2, end, self.staged, 4096usize, first).ok()?;
        let (to, bytes) = (self.pinned, (STEPS + 1) * BYTES);
        cu!(cuMemcpyDtoHAsync_v2, to, self.results, bytes, first).ok()?;
        // What the copies from the program's memory have read.
        cu!(cuMemsetD32Async, self.input, 0u32, WORDS, first).ok()?;
        cu!(cuMemsetD32Async, self.staged, 0u32, STAGED / 4, first).ok()
    }

    fn is_right(&self, rounds: u32) -> bool {
        // SAFETY: the block has room for as many, and nothing is in flight.
        let all = unsafe { std::slice::from_raw_parts(self.pinned, (STEPS + 1) * WORDS) };
        let kernel = |at: usize, step: usize| {
            let word = rounds.wrapping_mul(at as u32);
            word.wrapping_mul(self.seed(step))
        };
        let (steps, last) = all.split_at(STEPS * WORDS);
        let steps = steps.chunks(WORDS).enumerate();
        let steps: Vec<bool> = steps
            .map(|(step, words)| {
                let mut words = words.iter().enumerate();
                words.all(|(at, word)| *word == kernel(at, step))
            })
            .collect();
        let copied = last.iter().enumerate().all(|(at, word)| {
            *word
                == match at {
                    0..1024 => self.seed(at),
                    1024..2048 => self.seed(0),
                    _ => self.seed(7),
                }
        });
        if !copied || steps.contains(&false) {
            eprintln!("kernels {steps:?}, copies {copied}");
        }
        copied && !steps.contains(&false)
    }

    /// Requests for so many milliseconds, at least one; how many there were, or `None`: a result was wrong.
    pub fn serve(&mut self, ms: u32, rounds: u32) -> Status<Option<u32>> {
        let began = Instant::now();
        let before = self.requests;
        // For what the program did before.
        cu!(cuCtxSynchronize).ok()?;
        loop {
            self.requests += 1;
            self.submit(rounds)?;
            cu!(cuCtxSynchronize).ok()?;
            if !self.is_right(rounds) {
                return Ok(None);
            }
            if began.elapsed() >= Duration::from_millis(ms.into()) {
                return Ok(Some(self.requests - before));
            }
        }
    }
}
