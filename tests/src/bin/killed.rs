//! Programs for tests/gpu/kills.py, which see nothing but the driver API:
//!
//! - `killed measure`: prints how many rounds of the kernel take a millisecond;
//! - `killed victim SEED ROUNDS`: kernels of up to five milliseconds (ROUNDS is one), copies, allocations, loads, streams,
//!   events and pinned memory in random order, on and on, to be killed in the middle of any of them. Prints `started`
//!   when its context, module and stream are there;
//! - `killed verifier`: copies, computes, copies back and checks until its standard input ends, then prints its rounds,
//!   the wrong ones, and the times of a round as one line of JSON.
//!
//! A call that fails ends the program: the status is printed, and the exit status is 1.

use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use mpsshim_tests::peer::PTX;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

type Status<T = ()> = Result<T, CUresult>;

const BLOCK: u32 = 256;
/// Blocks of a kernel that leaves room for others.
const FEW: u32 = 8;
/// Blocks that fill the multiprocessors of any device there is.
const FULL: u32 = 2048;
const BYTES: usize = (FULL * BLOCK) as usize * 4;
/// What a victim holds of each kind at most, so that eight of them leave room for others.
const MOST: usize = 16;

/// xorshift64*: enough for choices, and the same sequence for a seed everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % bound
    }
}

fn context() -> Status {
    cu!(cuInit, 0 as c_uint).ok()?;
    let mut device: CUdevice = 0;
    cu!(cuDeviceGet, &mut device, 0 as c_int).ok()?;
    let mut context = CUcontext::NULL;
    cu!(cuDevicePrimaryCtxRetain, &mut context, device).ok()?;
    cu!(cuCtxSetCurrent, context).ok()
}

fn load() -> Status<(CUmodule, CUfunction)> {
    let image = CString::new(PTX).expect("no NUL");
    let mut module = CUmodule::NULL;
    cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
    let mut fill = CUfunction::NULL;
    cu!(cuModuleGetFunction, &mut fill, module, c"fill".as_ptr()).ok()?;
    Ok((module, fill))
}

fn stream() -> Status<CUstream> {
    let mut stream = CUstream::NULL;
    cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
    Ok(stream)
}

fn memory(bytes: usize) -> Status<CUdeviceptr> {
    let mut memory: CUdeviceptr = 0;
    cu!(cuMemAlloc_v2, &mut memory, bytes).ok()?;
    Ok(memory)
}

fn pinned(bytes: usize) -> Status<*mut c_void> {
    let mut pinned = null_mut::<c_void>();
    cu!(cuMemHostAlloc, &mut pinned, bytes, 0 as c_uint).ok()?;
    Ok(pinned)
}

/// out[i] = rounds * i * seed.
fn fill(
    function: CUfunction,
    stream: CUstream,
    blocks: u32,
    (mut out, mut seed, mut rounds): (CUdeviceptr, u32, u32),
) -> Status {
    let mut params: [*mut c_void; 3] = [
        (&raw mut out).cast(),
        (&raw mut seed).cast(),
        (&raw mut rounds).cast(),
    ];
    cu!(
        cuLaunchKernel,
        function,
        blocks,
        1u32,
        1u32,
        BLOCK,
        1u32,
        1u32,
        0u32,
        stream,
        params.as_mut_ptr(),
        null_mut::<*mut c_void>()
    )
    .ok()
}

/// Rounds of the kernel in a millisecond.
fn measure() -> Status<u32> {
    context()?;
    let ((_, function), stream, out) = (load()?, stream()?, memory(BYTES)?);
    let mut rounds = 64u32;
    loop {
        let began = Instant::now();
        fill(function, stream, FEW, (out, 1, rounds))?;
        cu!(cuStreamSynchronize, stream).ok()?;
        let took = began.elapsed();
        if took > Duration::from_millis(8) || rounds > u32::MAX / 4 {
            return Ok((f64::from(rounds) / took.as_secs_f64() / 1000.0) as u32);
        }
        rounds *= 2;
    }
}

fn victim(seed: u64, rounds: u32) -> Status {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    context()?;
    let (_, function) = load()?;
    let (mut streams, mut held, mut blocks, mut modules) =
        (vec![stream()?], Vec::new(), Vec::new(), Vec::new());
    let (out, page) = (memory(BYTES)?, pinned(BYTES)?);
    let mut pageable = vec![0u8; BYTES];
    say("started");
    loop {
        let on = streams[random.below(streams.len() as u64) as usize];
        let bytes = 4096 << random.below(9);
        match random.below(16) {
            // Long, beside whom there is room; and short, beside whom there is none.
            0..3 => {
                let rounds = random.below(u64::from(rounds) * 5).max(1) as u32;
                fill(function, on, FEW, (out, 3, rounds))?;
            }
            3 => fill(function, on, FULL, (out, 5, (rounds / 4).max(1)))?,
            4 => cu!(cuMemcpyHtoDAsync_v2, out, page.cast_const(), bytes, on).ok()?,
            5 => cu!(cuMemcpyDtoHAsync_v2, page, out, bytes, on).ok()?,
            6 => cu!(cuMemcpyHtoD_v2, out, pageable.as_ptr(), bytes).ok()?,
            7 => cu!(cuMemcpyDtoH_v2, pageable.as_mut_ptr(), out, bytes).ok()?,
            8 if held.len() < MOST => held.push(memory(bytes * 8)?),
            8 => cu!(cuMemFree_v2, held.swap_remove(0)).ok()?,
            9 if blocks.len() < MOST => blocks.push(pinned(bytes)?),
            9 => cu!(cuMemFreeHost, blocks.swap_remove(0)).ok()?,
            10 if modules.len() < MOST => modules.push(load()?.0),
            10 => cu!(cuModuleUnload, modules.swap_remove(0)).ok()?,
            11 if streams.len() < MOST => streams.push(stream()?),
            11 => cu!(cuStreamDestroy_v2, streams.pop().expect("one at least")).ok()?,
            12 => {
                let mut some: CUdeviceptr = 0;
                cu!(cuMemAllocAsync, &mut some, bytes, on).ok()?;
                cu!(cuMemsetD8Async, some, 7u8, bytes, on).ok()?;
                cu!(cuMemFreeAsync, some, on).ok()?;
            }
            13 => {
                let mut event = CUevent::NULL;
                cu!(cuEventCreate, &mut event, CU_EVENT_DISABLE_TIMING).ok()?;
                cu!(cuEventRecord, event, on).ok()?;
                cu!(cuStreamWaitEvent, streams[0], event, 0u32).ok()?;
                cu!(cuEventDestroy_v2, event).ok()?;
            }
            14 => cu!(cuMemsetD32Async, out, 11u32, bytes / 4, on).ok()?,
            _ => cu!(cuStreamSynchronize, on).ok()?,
        }
    }
}

fn verifier() -> Status {
    const WORDS: usize = (FEW * BLOCK) as usize;
    context()?;
    let ((_, function), stream) = (load()?, stream()?);
    let (sent, back) = (memory(WORDS * 4)?, memory(WORDS * 4)?);
    let page = pinned(WORDS * 8)?.cast::<u32>();
    // SAFETY: the block has room for twice as many words, and only this thread and the copies below touch it.
    let (given, found) =
        unsafe { std::slice::from_raw_parts_mut(page, WORDS * 2) }.split_at_mut(WORDS);
    static OVER: AtomicBool = AtomicBool::new(false);
    std::thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        OVER.store(true, Ordering::Relaxed);
    });
    say("started");
    let (mut times, mut wrong) = (Vec::new(), 0u64);
    let mut seed = 0u32;
    while !OVER.load(Ordering::Relaxed) {
        seed = seed.wrapping_add(1);
        for (at, word) in given.iter_mut().enumerate() {
            *word = seed ^ at as u32;
        }
        let began = Instant::now();
        cu!(
            cuMemcpyHtoDAsync_v2,
            sent,
            given.as_ptr(),
            WORDS * 4,
            stream
        )
        .ok()?;
        fill(function, stream, FEW, (back, seed, 7))?;
        let half = WORDS * 2;
        // One half of what it computes, the other of what it was given.
        cu!(cuMemcpyDtoDAsync_v2, back, sent, half, stream).ok()?;
        cu!(
            cuMemcpyDtoHAsync_v2,
            found.as_mut_ptr(),
            back,
            WORDS * 4,
            stream
        )
        .ok()?;
        cu!(cuStreamSynchronize, stream).ok()?;
        times.push(began.elapsed());
        let right = found.iter().enumerate().all(|(at, word)| {
            let computed = 7u32.wrapping_mul(at as u32).wrapping_mul(seed);
            *word
                == if at < WORDS / 2 {
                    seed ^ at as u32
                } else {
                    computed
                }
        });
        wrong += u64::from(!right);
        found.fill(0);
    }
    times.sort_unstable();
    let at = |share: f64| {
        let index = (times.len() as f64 * share) as usize;
        let time = times.get(index.min(times.len().saturating_sub(1)));
        time.map_or(0.0, |time| time.as_secs_f64() * 1000.0)
    };
    say(&format!(
        r#"{{"rounds": {}, "wrong": {wrong}, "p50_ms": {:.3}, "p99_9_ms": {:.3}, "longest_ms": {:.3}}}"#,
        times.len(),
        at(0.5),
        at(0.999),
        at(1.0)
    ));
    Ok(())
}

fn say(line: &str) {
    println!("{line}");
    // The reader may be gone.
    let _ = io::stdout().flush();
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| -> u64 {
        let text = arguments.get(at).map_or("", String::as_str);
        text.parse()
            .unwrap_or_else(|_| panic!("a number, not {text:?}"))
    };
    let done = match arguments.first().map(String::as_str) {
        Some("measure") => measure().map(|rounds| say(&rounds.to_string())),
        Some("victim") => victim(number(1), number(2) as u32),
        Some("verifier") => verifier(),
        _ => panic!("killed measure | victim SEED ROUNDS | verifier"),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(status) => {
            say(&format!("{status}"));
            ExitCode::FAILURE
        }
    }
}
