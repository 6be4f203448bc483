//! Processes in a ring, each of which reads what the one before it has written, ordered by events between processes alone:
//! `event-ring PROCESSES ROUNDS WAY BEHIND [SEED]`.
//!
//! In its turn a process waits for the event of the one before it, copies that one's buffer, writes its own one and records
//! its own event; then it passes a byte through a pipe. `WAY` is how it waits: `wait` (on its stream), `query`,
//! `synchronize`, or `any`, another one in each turn. `BEHIND` is what stands before its record: `kernel` (of some
//! milliseconds), `function` (a host function that sleeps) or `any`: these and other things that take the messages of a
//! process another way or make them late. Nothing is read back before the end of four rounds, so that turns overlap.
//!
//! Prints `PASS` when each copy had what it should, else what was wrong.

use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use mpsshim_tests::peer::{PTX, new_ptx};
use std::env;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::io::{self, Read, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::ptr::null_mut;
use std::time::Duration;

const WORDS: usize = 1024;
const BYTES: usize = WORDS * 4;
/// Rounds between two looks at what was copied.
const SLACK: usize = 4;
/// The number of a process, in the environment of all but the first.
const NUMBER: &str = "MPSSHIM_TEST_NUMBER";

/// What a process says of itself to the next one.
#[derive(Clone, Copy)]
struct Handles {
    memory: CUipcMemHandle,
    event: CUipcEventHandle,
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % end
    }
}

macro_rules! must {
    ($($call:tt)*) => {{
        let status = cu!($($call)*);
        assert!(status.is_ok(), "{}: {status}", stringify!($($call)*));
    }};
}

struct Process {
    fill: CUfunction,
    stream: CUstream,
    /// What the next one reads.
    memory: CUdeviceptr,
    /// Nobody reads it.
    scratch: CUdeviceptr,
    event: CUevent,
    /// `SLACK` copies of what the one before has written.
    copies: *mut u32,
    random: Random,
}

impl Process {
    fn new(seed: u64) -> Process {
        must!(cuInit, 0 as c_uint);
        let mut device: CUdevice = 0;
        must!(cuDeviceGet, &mut device, 0 as c_int);
        let mut context = CUcontext::NULL;
        must!(cuDevicePrimaryCtxRetain, &mut context, device);
        must!(cuCtxSetCurrent, context);
        let image = CString::new(PTX).expect("no NUL");
        let mut module = CUmodule::NULL;
        must!(cuModuleLoadData, &mut module, image.as_ptr());
        let mut fill = CUfunction::NULL;
        must!(cuModuleGetFunction, &mut fill, module, c"fill".as_ptr());
        let mut stream = CUstream::NULL;
        must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
        let (mut memory, mut scratch): (CUdeviceptr, CUdeviceptr) = (0, 0);
        must!(cuMemAlloc_v2, &mut memory, BYTES);
        must!(cuMemAlloc_v2, &mut scratch, BYTES);
        must!(cuMemsetD32_v2, memory, u32::MAX, WORDS);
        let mut event = CUevent::NULL;
        let flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
        must!(cuEventCreate, &mut event, flags);
        let mut copies: *mut c_void = null_mut();
        must!(cuMemHostAlloc, &mut copies, SLACK * BYTES, 0u32);
        must!(cuCtxSynchronize);
        Process {
            fill,
            stream,
            memory,
            scratch,
            event,
            copies: copies.cast(),
            random: Random(seed | 1),
        }
    }

    /// out[i] = i * seed * rounds.
    fn fill(&self, mut out: CUdeviceptr, mut seed: u32, mut rounds: u32) {
        let params: &mut [*mut c_void] = &mut [
            (&raw mut out).cast(),
            (&raw mut seed).cast(),
            (&raw mut rounds).cast(),
        ];
        must!(
            cuLaunchKernel,
            self.fill,
            WORDS as u32 / 32,
            1u32,
            1u32,
            32u32,
            1u32,
            1u32,
            0u32,
            self.stream,
            params.as_mut_ptr(),
            null_mut::<*mut c_void>()
        );
    }

    fn function(&self, microseconds: u64) {
        unsafe extern "C" fn sleep(microseconds: *mut c_void) {
            std::thread::sleep(Duration::from_micros(microseconds as u64));
        }
        let function: unsafe extern "C" fn(*mut c_void) = sleep;
        must!(
            cuLaunchHostFunc,
            self.stream,
            function,
            microseconds as *mut c_void
        );
    }

    fn handles(&self) -> Handles {
        let mut memory = CUipcMemHandle([0; 64]);
        must!(cuIpcGetMemHandle, &mut memory, self.memory);
        let mut event = CUipcEventHandle([0; 64]);
        must!(cuIpcGetEventHandle, &mut event, self.event);
        Handles { memory, event }
    }

    /// What stands before the record in this turn.
    fn delay(&mut self, behind: &str) {
        match behind {
            "kernel" => self.fill(self.scratch, 1, 100),
            "function" => self.function(3000),
            _ => match self.random.below(256) {
                0..32 => {
                    let microseconds = self.random.below(300);
                    self.function(microseconds);
                }
                32..64 => self.fill(self.scratch, 1, 20),
                // Loading one that nobody has loaded waits at the gate, unloading goes by the slow lane.
                64..66 => {
                    let image = CString::new(new_ptx()).expect("no NUL");
                    let mut module = CUmodule::NULL;
                    must!(cuModuleLoadData, &mut module, image.as_ptr());
                    must!(cuModuleUnload, module);
                }
                66..74 => {
                    let mut more: CUdeviceptr = 0;
                    must!(cuMemAlloc_v2, &mut more, 4 << 20);
                    must!(cuMemFree_v2, more);
                }
                // Many messages, so that the ring is long.
                74..84 => (0..200).for_each(|_| self.fill(self.scratch, 1, 1)),
                84..100 => std::thread::sleep(Duration::from_micros(self.random.below(200))),
                _ => {}
            },
        }
    }

    fn wait_for(&mut self, event: CUevent, way: &str) {
        let way = match way {
            "any" => ["wait", "wait", "query", "synchronize"][self.random.below(4) as usize],
            way => way,
        };
        match way {
            "wait" => must!(cuStreamWaitEvent, self.stream, event, 0u32),
            "synchronize" => must!(cuEventSynchronize, event),
            "query" => loop {
                match cu!(cuEventQuery, event) {
                    CUDA_SUCCESS => break,
                    CUDA_ERROR_NOT_READY => std::thread::yield_now(),
                    status => panic!("cuEventQuery: {status}"),
                }
            },
            way => panic!("no way to wait: {way}"),
        }
    }

    /// Looks at the copies of the rounds up to `end`, `from` on.
    fn look(&self, rounds: std::ops::Range<usize>, number: usize) {
        must!(cuStreamSynchronize, self.stream);
        for round in rounds {
            // The first one reads what the last one has written in the round before.
            let Some(seed) = round.checked_sub(usize::from(number == 0)) else {
                continue;
            };
            // SAFETY: as many words as there are in a copy; the stream writes there no more.
            let copy = unsafe {
                std::slice::from_raw_parts(self.copies.add(round % SLACK * WORDS), WORDS)
            };
            let seed = seed as u32 + 1;
            let bad = (0..WORDS).filter(|i| copy[*i] != (*i as u32).wrapping_mul(seed));
            let bad: Vec<_> = bad.map(|i| (i, copy[i])).collect();
            assert!(
                bad.is_empty(),
                "process {number}, round {round}: {} of {WORDS} words are not those of seed {seed}, first {:?}",
                bad.len(),
                bad[0]
            );
        }
    }
}

fn pass(mut to: impl Write, bytes: &[u8]) {
    to.write_all(bytes)
        .and_then(|()| to.flush())
        .expect("the next process");
}

fn take<const BYTES: usize>(mut from: impl Read) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    from.read_exact(&mut bytes).expect("the process before");
    bytes
}

fn run(number: usize, arguments: &[String], from: &mut dyn Read, to: &mut dyn Write) {
    let [_, rounds, way, behind, rest @ ..] = arguments else {
        panic!("event-ring PROCESSES ROUNDS WAY BEHIND [SEED]");
    };
    let rounds: usize = rounds.parse().expect("a number of rounds");
    let seed: u64 = rest.first().map_or(1, |seed| seed.parse().expect("a seed"));
    let mut process = Process::new(seed.wrapping_mul(1000) + number as u64 * 7919 + 1);
    let own = process.handles();
    pass(&mut *to, &own.memory.0);
    pass(&mut *to, &own.event.0);
    let memory = CUipcMemHandle(take(&mut *from));
    let event = CUipcEventHandle(take(&mut *from));
    let mut before: CUdeviceptr = 0;
    must!(
        cuIpcOpenMemHandle_v2,
        &mut before,
        memory,
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    );
    let mut written = CUevent::NULL;
    must!(cuIpcOpenEventHandle, &mut written, event);
    for round in 0..rounds {
        if number > 0 || round > 0 {
            let _: [u8; 1] = take(&mut *from);
        }
        process.wait_for(written, way);
        // SAFETY: inside the copies.
        let copy = unsafe { process.copies.add(round % SLACK * WORDS) };
        must!(cuMemcpyDtoHAsync_v2, copy, before, BYTES, process.stream);
        process.delay(behind);
        process.fill(process.memory, round as u32 + 1, 1);
        must!(cuEventRecord, process.event, process.stream);
        pass(&mut *to, b"t");
        if round % SLACK == SLACK - 1 {
            process.look(round + 1 - SLACK..round + 1, number);
        }
    }
    process.look(rounds - rounds % SLACK..rounds, number);
    // Nobody leaves before all have read what was written for them.
    let turns = if number == 0 { 3 } else { 2 };
    for turn in 0..turns {
        let _: [u8; 1] = take(&mut *from);
        if turn < 2 {
            pass(&mut *to, b"t");
        }
    }
}

/// Starts the other processes, each with the pipe of the one before it; the ends of the first one's pipes.
fn start(processes: usize, arguments: &[String]) -> (Vec<Child>, io::PipeReader, io::PipeWriter) {
    let own = env::current_exe().expect("a running program has a file");
    let (mut reader, first) = io::pipe().expect("a pipe");
    let mut children = Vec::new();
    for number in 1..processes {
        let (next, writer) = io::pipe().expect("a pipe");
        let child = Command::new(&own)
            .args(arguments)
            .env(NUMBER, number.to_string())
            .stdin(Stdio::from(reader))
            .stdout(Stdio::from(writer))
            .spawn();
        children.push(child.expect("another process"));
        reader = next;
    }
    (children, reader, first)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let Ok(number) = env::var(NUMBER) {
        let number = number.parse().expect("a number");
        run(
            number,
            &arguments,
            &mut io::stdin().lock(),
            &mut io::stdout().lock(),
        );
        return ExitCode::SUCCESS;
    }
    let processes = arguments.first().and_then(|text| text.parse().ok());
    let (children, mut from, mut to) = start(processes.expect("a number of processes"), &arguments);
    run(0, &arguments, &mut from, &mut to);
    for mut child in children {
        assert!(
            child.wait().expect("a child").success(),
            "another process failed"
        );
    }
    println!("PASS");
    ExitCode::SUCCESS
}
