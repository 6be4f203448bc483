//! Requests whose kernels may run again from the point where the program last waited, and only from there: later commands
//! overwrite what earlier ones of the same request read.

use super::registered::mapping;
use super::{Status, WORDS, launch, memory};
use crate::hosts::await_function;
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Kernels of a request.
const STEPS: usize = 6;
const BYTES: usize = WORDS * 4;
/// Results of a request: of each kernel, of the copies, and of the kernels with memory from a pool.
const RESULTS: usize = STEPS + 1 + POOLED;
/// Kernels with memory from a pool.
const POOLED: usize = 3;
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
    /// Pinned memory that requests read which wait by functions: a copy of pageable memory is a wait.
    source: *mut u32,
    requests: u32,
}

impl Infer {
    /// The results come to pinned memory, or to registered memory.
    pub fn new(fill: CUfunction, streams: [CUstream; 2], registers: bool) -> Status<Infer> {
        let mut pinned = null_mut::<c_void>();
        let bytes = RESULTS * BYTES;
        if registers {
            pinned = mapping(9, bytes).cast();
            cu!(cuMemHostRegister_v2, pinned, bytes, 0 as c_uint).ok()?;
        } else {
            cu!(cuMemHostAlloc, &mut pinned, bytes, 0 as c_uint).ok()?;
        }
        let mut source = null_mut::<c_void>();
        cu!(cuMemHostAlloc, &mut source, STAGED, 0 as c_uint).ok()?;
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
            results: memory(RESULTS * BYTES)?,
            pinned: pinned.cast(),
            source: source.cast(),
            requests: 0,
        })
    }

    fn seed(&self, step: usize) -> u32 {
        self.requests * 31 + step as u32 + 1
    }

    /// The kernels of a request take so many rounds of their loops.
    fn submit(&mut self, rounds: u32, from_pinned: bool) -> Status {
        let [first, second] = self.streams;
        let [ready, done] = self.events;
        let input: Vec<u32> = (0..WORDS).map(|at| self.seed(at)).collect();
        let small = &raw const input[0];
        cu!(cuMemcpyHtoDAsync_v2, self.input, small, 4096usize, first).ok()?;
        let staged = vec![self.seed(0); STAGED / 4];
        let (mut from, to) = (staged.as_ptr(), self.staged);
        if from_pinned {
            // SAFETY: the block has room for as many, and nothing is in flight.
            unsafe { self.source.copy_from(from, staged.len()) };
            from = self.source;
        }
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
        self.submit_pooled(rounds)?;
        let (to, bytes) = (self.pinned, RESULTS * BYTES);
        cu!(cuMemcpyDtoHAsync_v2, to, self.results, bytes, first).ok()?;
        // What the copies from the program's memory have read.
        cu!(cuMemsetD32Async, self.input, 0u32, WORDS, first).ok()?;
        cu!(cuMemsetD32Async, self.staged, 0u32, STAGED / 4, first).ok()
    }

    /// Kernels with memory that is freed behind them: the next block of the stream has the same addresses.
    fn submit_pooled(&self, rounds: u32) -> Status {
        let [first, second] = self.streams;
        let [ready, done] = self.events;
        for at in 0..POOLED {
            // On the other stream, and back.
            let stream = [first, second][at % 2];
            cu!(cuEventRecord, ready, first).ok()?;
            cu!(cuStreamWaitEvent, stream, ready, 0 as c_uint).ok()?;
            let mut block: CUdeviceptr = 0;
            cu!(cuMemAllocAsync, &mut block, BYTES, stream).ok()?;
            launch(self.fill, stream, (block, self.seed(10 + at), rounds))?;
            let to = self.results + ((STEPS + 1 + at) * BYTES) as u64;
            cu!(cuMemcpyDtoDAsync_v2, to, block, BYTES, stream).ok()?;
            cu!(cuMemFreeAsync, block, stream).ok()?;
            cu!(cuEventRecord, done, stream).ok()?;
            cu!(cuStreamWaitEvent, first, done, 0 as c_uint).ok()?;
        }
        Ok(())
    }

    fn is_right(&self, rounds: u32) -> bool {
        // SAFETY: the block has room for as many, and nothing is in flight.
        let all = unsafe { std::slice::from_raw_parts(self.pinned, RESULTS * WORDS) };
        let kernel = |at: usize, step: usize| {
            let word = rounds.wrapping_mul(at as u32);
            word.wrapping_mul(self.seed(step))
        };
        let rows: Vec<&[u32]> = all.chunks(WORDS).collect();
        let (steps, last, pooled) = (&rows[..STEPS], rows[STEPS], &rows[STEPS + 1..]);
        let is_of = |words: &[u32], step: usize| {
            let mut words = words.iter().enumerate();
            words.all(|(at, word)| *word == kernel(at, step))
        };
        let steps = steps.iter().zip(0..).chain(pooled.iter().zip(10..));
        let steps: Vec<bool> = steps.map(|(words, step)| is_of(words, step)).collect();
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

    /// Requests for so many milliseconds, at least one; how many there were, or `None`: a result was wrong. `by_functions`: waits
    /// for none of them but by host functions.
    pub fn serve(&mut self, ms: u32, rounds: u32, by_functions: bool) -> Status<Option<u32>> {
        let began = Instant::now();
        let before = self.requests;
        // For what the program did before.
        if !by_functions || self.requests == 0 {
            cu!(cuCtxSynchronize).ok()?;
        }
        loop {
            self.requests += 1;
            self.submit(rounds, by_functions)?;
            match by_functions {
                true => await_function(self.streams[0])?,
                false => cu!(cuCtxSynchronize).ok()?,
            }
            if !self.is_right(rounds) {
                return Ok(None);
            }
            if began.elapsed() >= Duration::from_millis(ms.into()) {
                return Ok(Some(self.requests - before));
            }
        }
    }
}
