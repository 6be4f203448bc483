//! A program whose state outlives its server, or not; it sees nothing but the driver API. It reads commands, a line each, and
//! answers each with a line:
//!
//! - `round`: looks whether everything holds what it held after the last round, then changes it; `ok N MS` with the number of
//!   rounds and the milliseconds that this one took;
//! - `launch MS`: launches a kernel that takes some milliseconds and does not wait; `launched`;
//! - `stray`: launches a kernel that writes where nothing is, and waits; the status. `stray N`: among N kernels of
//!   some milliseconds each before it, and as many behind it;
//! - `assert LIMIT`: launches a kernel of one block in which threads from this number on fail an assertion, and waits; the
//!   status;
//! - `endless`: launches a kernel of the same image that does not end; `launched`;
//! - `taint`: allocates memory of several kinds, writes a pattern all over it and frees it; `tainted`;
//! - `look`: allocates such memory once more; `found N` with the number of words of the pattern in it;
//! - `time`: records events with times; again: looks whether they say what they said, and how long ago that was; `time`;
//! - `limit`: raises the limit of the stack; `limit`;
//! - `graph`: begins to capture a graph; `graph`;
//! - `unload`: unloads an image of which a graph has a kernel; `unload`; `destroy`: destroys that graph; `destroyed, 1 left`, the
//!   number of nodes in another one;
//! - `replay`: launches instances of graphs, looks whether they do what they should, and changes them; `replayed N` with the
//!   number of times;
//! - `loop`: the same with graphs that have conditional nodes; `looped N`;
//! - `host`: the same with graphs and streams that call functions of the program; `hosted N`;
//! - `pool`: looks whether pools, their settings and what was allocated from them are what they were, and changes them;
//!   `pooled N` with the number of times;
//! - `register`: looks whether registered memory holds what it held at the addresses that it had, changes it, and registers
//!   some of it anew; `registered N` with the number of times;
//! - `texture`: looks, by copies and through textures and a surface, whether arrays and memory hold what they held, and changes
//!   them; `textured N` with the number of times;
//! - `part`: looks whether green contexts, resources and a further context have the multiprocessors that they had, and makes
//!   one anew; `parted N` with the number of times;
//! - `count`: looks whether variables of an image hold what they held after the last time, then has kernels count in them and
//!   copies to one; `counted N` with the number of kernels that have counted. `count 1`: by a graph from now on;
//! - `constant`: looks whether variables of an image without code hold what they held after the last time, then has kernels of
//!   another image count in them, and looks what the driver says of their addresses; `constants N` with the number of times. `constant 1`:
//!   only launches such a kernel; `launched`. `constant 2`: uses a variable of 8 MiB; where it is;
//! - `library`, `module`: loads a text of its own as a library or a module, and looks up its kernels; `library`, `module`;
//! - `link`: leaves the address of a variable in another one; `linked`;
//! - `share`: offers a block of device memory to other processes; `shared`;
//! - `give`: allocates memory that other processes may open; its handle. `open HANDLE`: opens it; `opened`. `close`: closes it;
//!   `closed`. `write N`: writes a value to such memory; `written`. `read`: the value in it;
//! - `infer MS`: serves requests for some milliseconds and looks at their results; always has kernels in flight;
//!   `inferred N` with the number of requests. `infer-registered MS`, at first: the results come to registered memory;
//!   `infer-call MS`: waits for each request by a host function only;
//! - `hold`: looks at memory that is mapped nowhere between two rounds, by a retained handle and a descriptor, and changes it;
//!   `held N` with the number of the round;
//! - `step ROUNDS`: has kernels count in variables and an instance of a graph launched with other parameters, looks at the
//!   results; `stepped N` with the number of times. `step-call ROUNDS`: waits by a host function only;
//! - `wait MS`: launches a host function that takes some milliseconds; `waits`;
//! - `later ROUNDS`: launches a kernel with so many rounds, a host function behind it, and another kernel, and waits; the status,
//!   and how often the function was called;
//! - `call MS`: launches a kernel that takes some milliseconds, and in another stream a host function that prints `called`, and
//!   waits for the kernel; the status;
//! - `sparse BYTES`: allocates so many bytes of device memory, zero but for one word; again: looks whether they are what they
//!   were, and changes the word; `sparse`;
//! - `large BYTES`: has a kernel write to a variable with so many bytes; `touched`.
//!
//! A call that fails ends the program: the status is printed, and the exit status is 1. Wrong content ends it with status 2.
//!
//! With arguments, a number of times and lists of commands with `;` between them, it reads nothing: each list is carried out
//! so many times in a thread of its own, all in one context.

mod constants;
mod exported;
mod graphs;
mod hosts;
mod infer;
mod lent;
mod loops;
mod parts;
mod pools;
mod registered;
mod remains;
mod signals;
mod sparse;
mod steps;
mod tables;
mod textures;

use constants::Constants;
use exported::{Exported, Held};
use graphs::{Graphs, Unloaded};
use hosts::Hosts;
use infer::Infer;
use lent::Lent;
use loops::Loops;
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use mpsshim_tests::peer::{PTX, asserting_ptx, new_ptx, variables_ptx};
use parts::Parts;
use pools::Pools;
use registered::Registered;
use signals::Signal;
use sparse::Sparse;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::{Duration, Instant};
use steps::Steps;
use tables::Tables;
use textures::Textures;

type Status<T = ()> = Result<T, CUresult>;

const BLOCK: u32 = 256;
const BLOCKS: u32 = 16;
const WORDS: usize = (BLOCK * BLOCKS) as usize;
/// More than a grant, so that there are several.
const LARGE: usize = 24 << 20;

fn context() -> Status {
    cu!(cuInit, 0 as c_uint).ok()?;
    let mut device: CUdevice = 0;
    cu!(cuDeviceGet, &mut device, 0 as c_int).ok()?;
    let mut context = CUcontext::NULL;
    cu!(cuDevicePrimaryCtxRetain, &mut context, device).ok()?;
    cu!(cuCtxSetCurrent, context).ok()
}

fn load(text: &str) -> Status<(CUmodule, CUfunction, CUfunction)> {
    let image = CString::new(text).expect("no NUL");
    let mut module = CUmodule::NULL;
    cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
    let (mut fill, mut stray) = (CUfunction::NULL, CUfunction::NULL);
    cu!(cuModuleGetFunction, &mut fill, module, c"fill".as_ptr()).ok()?;
    cu!(cuModuleGetFunction, &mut stray, module, c"stray".as_ptr()).ok()?;
    Ok((module, fill, stray))
}

fn memory(bytes: usize) -> Status<CUdeviceptr> {
    let mut memory: CUdeviceptr = 0;
    cu!(cuMemAlloc_v2, &mut memory, bytes).ok()?;
    Ok(memory)
}

fn launch(
    function: CUfunction,
    stream: CUstream,
    (mut out, mut seed, mut rounds): (CUdeviceptr, u32, u32),
) -> Status {
    let mut params: [*mut c_void; 3] = [
        (&raw mut out).cast(),
        (&raw mut seed).cast(),
        (&raw mut rounds).cast(),
    ];
    submit(function, (BLOCKS, BLOCK), stream, &mut params)
}

/// `cuLaunchKernel` of so many blocks of so many threads, in one dimension.
fn submit(
    function: CUfunction,
    (grid, block): (u32, u32),
    stream: CUstream,
    params: &mut [*mut c_void],
) -> Status {
    cu!(
        cuLaunchKernel,
        function,
        grid,
        1u32,
        1u32,
        block,
        1u32,
        1u32,
        0u32,
        stream,
        params.as_mut_ptr(),
        null_mut::<*mut c_void>()
    )
    .ok()
}

/// A text of this process's own.
fn own_text() -> CString {
    CString::new(format!("{PTX}\n// {}\n", std::process::id())).expect("no NUL")
}

/// Loads a text as a library.
fn load_library(image: &CStr) -> Status<CUlibrary> {
    let mut library = CUlibrary::NULL;
    let none = null_mut::<c_void>();
    cu!(
        cuLibraryLoadData,
        &mut library,
        image.as_ptr(),
        none,
        none,
        0u32,
        none,
        none,
        0u32
    )
    .ok()?;
    Ok(library)
}

/// A kernel of the image whose kernels may fail assertions, which is loaded once.
fn asserting(name: &CStr) -> Status<CUfunction> {
    thread_local!(static MODULE: Cell<Option<CUmodule>> = const { Cell::new(None) });
    let module = match MODULE.get() {
        Some(module) => module,
        None => {
            let image = CString::new(asserting_ptx()).expect("no NUL");
            let mut module = CUmodule::NULL;
            cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
            MODULE.set(Some(module));
            module
        }
    };
    let mut function = CUfunction::NULL;
    cu!(cuModuleGetFunction, &mut function, module, name.as_ptr()).ok()?;
    Ok(function)
}

/// One block of eight threads with one parameter.
fn launch_small(function: CUfunction, stream: CUstream, mut value: u32) -> Status {
    submit(function, (1, 8), stream, &mut [(&raw mut value).cast()])
}

/// What was submitted is with the driver: an answer comes after it.
fn arrive() -> Status {
    let (mut free, mut total) = (0usize, 0usize);
    cu!(cuMemGetInfo_v2, &mut free, &mut total).ok()
}

/// What it has, and what that should hold.
struct State {
    fill: CUfunction,
    stray: CUfunction,
    /// One more, loaded anew now and then.
    module: CUmodule,
    other: CUfunction,
    streams: [CUstream; 2],
    event: CUevent,
    /// What a kernel writes.
    computed: CUdeviceptr,
    /// What is copied.
    copied: CUdeviceptr,
    large: CUdeviceptr,
    /// One more, allocated anew each round.
    changing: CUdeviceptr,
    pinned: *mut u32,
    round: u32,
}

impl State {
    fn new() -> Status<State> {
        context()?;
        let (_, fill, stray) = load(PTX)?;
        let (module, other, _) = load(&new_ptx())?;
        let mut streams = [CUstream::NULL; 2];
        cu!(cuStreamCreate, &mut streams[0], CU_STREAM_NON_BLOCKING).ok()?;
        cu!(cuStreamCreate, &mut streams[1], CU_STREAM_DEFAULT).ok()?;
        let mut event = CUevent::NULL;
        cu!(cuEventCreate, &mut event, CU_EVENT_DISABLE_TIMING).ok()?;
        let mut pinned = null_mut::<c_void>();
        cu!(cuMemHostAlloc, &mut pinned, WORDS * 4, 0 as c_uint).ok()?;
        let mut state = State {
            fill,
            stray,
            module,
            other,
            streams,
            event,
            computed: memory(WORDS * 4)?,
            copied: memory(WORDS * 4)?,
            large: memory(LARGE)?,
            changing: memory(4 << 20)?,
            pinned: pinned.cast(),
            round: 0,
        };
        state.change()?;
        // The last memset is asynchronous, and a program that has started is at rest.
        cu!(cuCtxSynchronize).ok()?;
        Ok(state)
    }

    fn given(&self, at: usize) -> u32 {
        self.round.wrapping_mul(0x9e37_79b9) ^ at as u32
    }

    fn words(&mut self) -> &mut [u32] {
        // SAFETY: the block has room for as many, and only this thread touches it.
        unsafe { std::slice::from_raw_parts_mut(self.pinned, WORDS) }
    }

    /// Everything of the next round.
    fn change(&mut self) -> Status {
        self.round += 1;
        let given: Vec<u32> = (0..WORDS).map(|at| self.given(at)).collect();
        self.words().copy_from_slice(&given);
        let [first, second] = self.streams;
        cu!(
            cuMemcpyHtoDAsync_v2,
            self.copied,
            self.pinned.cast_const(),
            WORDS * 4,
            first
        )
        .ok()?;
        launch(self.fill, first, (self.computed, self.round, 3))?;
        cu!(cuEventRecord, self.event, first).ok()?;
        cu!(cuStreamWaitEvent, second, self.event, 0 as c_uint).ok()?;
        let end = self.large + (LARGE - WORDS * 4) as u64;
        cu!(cuMemsetD32Async, self.large, self.round, WORDS, second).ok()?;
        cu!(cuMemcpyDtoDAsync_v2, end, self.computed, WORDS * 4, second).ok()?;
        launch(self.other, second, (self.changing, self.round, 5))?;
        cu!(cuStreamSynchronize, second).ok()?;
        cu!(cuMemsetD32_v2, self.changing, self.round, 16usize).ok()
    }

    /// Whether everything holds what the last round left.
    fn is_right(&mut self) -> Status<bool> {
        let round = self.round;
        let end = self.large + (LARGE - WORDS * 4) as u64;
        let kernel =
            move |at: usize, rounds: u32| rounds.wrapping_mul(at as u32).wrapping_mul(round);
        let pinned: Vec<u32> = self.words().to_vec();
        let mut right = (0..WORDS).all(|at| pinned[at] == self.given(at));
        cu!(cuEventSynchronize, self.event).ok()?;
        let mut look = |from: CUdeviceptr, expected: &dyn Fn(usize) -> u32| -> Status {
            let mut found = vec![0u32; WORDS];
            cu!(cuMemcpyDtoH_v2, found.as_mut_ptr(), from, WORDS * 4).ok()?;
            let same = found
                .iter()
                .enumerate()
                .all(|(at, word)| *word == expected(at));
            right &= same;
            Ok(())
        };
        look(self.computed, &|at| kernel(at, 3))?;
        look(self.copied, &|at| {
            round.wrapping_mul(0x9e37_79b9) ^ at as u32
        })?;
        look(self.large, &|_| round)?;
        look(end, &|at| kernel(at, 3))?;
        look(self.changing, &|at| match at {
            0..16 => round,
            _ => kernel(at, 5),
        })?;
        Ok(right)
    }

    fn round(&mut self) -> Status<bool> {
        if !self.is_right()? {
            return Ok(false);
        }
        cu!(cuMemFree_v2, self.changing).ok()?;
        self.changing = memory(4 << 20)?;
        if self.round.is_multiple_of(4) {
            cu!(cuModuleUnload, self.module).ok()?;
            (self.module, self.other, _) = load(&new_ptx())?;
            cu!(cuEventDestroy_v2, self.event).ok()?;
            cu!(cuEventCreate, &mut self.event, CU_EVENT_DISABLE_TIMING).ok()?;
            cu!(cuStreamDestroy_v2, self.streams[0]).ok()?;
            cu!(cuStreamCreate, &mut self.streams[0], CU_STREAM_NON_BLOCKING).ok()?;
        }
        self.change()?;
        self.is_right()
    }
}

/// Launches of a kernel that counts, each time: enough for the server to give some of them to the driver together.
const COUNTS: usize = 40;
/// Bytes of the variable that is copied to.
const TABLE: usize = 64;

/// Variables of an image, and what they should hold.
struct Counter {
    module: CUmodule,
    count: CUfunction,
    take: CUfunction,
    stream: CUstream,
    out: CUdeviceptr,
    table: CUdeviceptr,
    taken: CUdeviceptr,
    /// What a round launches, if it does that by an instance of a graph.
    exec: CUgraphExec,
    rounds: u32,
}

fn run_one(function: CUfunction, stream: CUstream, words: &mut [u64]) -> Status {
    let mut params: Vec<*mut c_void> = words
        .iter_mut()
        .map(|word| std::ptr::from_mut(word).cast())
        .collect();
    launch_one(function, stream, params.as_mut_ptr())
}

/// Launches one thread with these parameters, each the address of a value.
fn launch_one(function: CUfunction, stream: CUstream, params: *mut *mut c_void) -> Status {
    cu!(
        cuLaunchKernel,
        function,
        1u32,
        1u32,
        1u32,
        1u32,
        1u32,
        1u32,
        0u32,
        stream,
        params,
        null_mut::<*mut c_void>()
    )
    .ok()
}

impl Counter {
    fn new(stream: CUstream, large: usize) -> Status<Counter> {
        let image = CString::new(variables_ptx(large)).expect("no NUL");
        let mut module = CUmodule::NULL;
        cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
        let (mut count, mut take) = (CUfunction::NULL, CUfunction::NULL);
        cu!(cuModuleGetFunction, &mut count, module, c"count".as_ptr()).ok()?;
        cu!(cuModuleGetFunction, &mut take, module, c"take".as_ptr()).ok()?;
        let mut counter = Counter {
            module,
            count,
            take,
            stream,
            out: memory((COUNTS + 1) * 4)?,
            table: 0,
            taken: 0,
            exec: CUgraphExec::NULL,
            rounds: 0,
        };
        (counter.table, counter.taken) = (counter.place(c"table")?, counter.place(c"taken")?);
        counter.write_table()?;
        Ok(counter)
    }

    fn place(&self, name: &CStr) -> Status<CUdeviceptr> {
        let (mut place, mut len): (CUdeviceptr, usize) = (0, 0);
        let (place_at, len_at, name) = (&mut place, &mut len, name.as_ptr());
        cu!(cuModuleGetGlobal_v2, place_at, len_at, self.module, name).ok()?;
        Ok(place)
    }

    fn pattern(&self) -> [u8; TABLE] {
        std::array::from_fn(|at| (self.rounds as u8).wrapping_mul(31) ^ at as u8)
    }

    fn write_table(&self) -> Status {
        let (pattern, to) = (self.pattern(), self.table);
        cu!(cuMemcpyHtoD_v2, to, pattern.as_ptr(), TABLE).ok()
    }

    fn read<const N: usize>(&self, from: CUdeviceptr) -> Status<[u8; N]> {
        let mut found = [0; N];
        cu!(cuMemcpyDtoH_v2, found.as_mut_ptr(), from, N).ok()?;
        Ok(found)
    }

    /// What a round launches.
    fn work(&self) -> Status {
        for at in 0..COUNTS {
            run_one(self.count, self.stream, &mut [self.out + 4 * at as u64])?;
        }
        let last = self.out + 4 * COUNTS as u64;
        // Its address as the program has known it all the time.
        run_one(self.take, self.stream, &mut [last, self.taken])
    }

    /// That is captured, and launched as a graph from now on, which has ended.
    fn capture(&mut self) -> Status {
        let (stream, mut graph) = (self.stream, CUgraph::NULL);
        cu!(
            cuStreamBeginCapture_v2,
            stream,
            CU_STREAM_CAPTURE_MODE_RELAXED
        )
        .ok()?;
        self.work()?;
        cu!(cuStreamEndCapture, stream, &mut graph).ok()?;
        cu!(cuGraphInstantiateWithFlags, &mut self.exec, graph, 0u64).ok()?;
        cu!(cuGraphDestroy, graph).ok()
    }

    /// So many kernels have counted; `None`: something does not hold what it should.
    fn round(&mut self) -> Status<Option<u32>> {
        let before = self.rounds * COUNTS as u32;
        let mut right = self.read::<TABLE>(self.table)? == self.pattern();
        self.rounds += 1;
        if self.exec.is_null() {
            self.work()?;
        } else {
            cu!(cuGraphLaunch, self.exec, self.stream).ok()?;
        }
        cu!(cuStreamSynchronize, self.stream).ok()?;
        self.write_table()?;
        let out: [u8; (COUNTS + 1) * 4] = self.read(self.out)?;
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| out[4 * at + byte]));
        right &= (0..COUNTS).all(|at| word(at) == before + at as u32 + 1);
        right &= word(COUNTS) == 7 + self.rounds - 1;
        if self.rounds.is_multiple_of(3) {
            // As a program would that asks again.
            self.table = self.place(c"table")?;
        }
        right &= self.read::<TABLE>(self.table)? == self.pattern();
        Ok(right.then_some(before + COUNTS as u32))
    }
}

/// Events that were recorded, and when.
struct Timer {
    events: [CUevent; 2],
    /// Between the two, in ms, as the driver said at first.
    between: f32,
    /// The first was recorded between these two.
    since: [Instant; 2],
}

impl Timer {
    /// By how much the clocks of host and device may differ. A server takes some tenths of a second to come after another.
    const TOLERANCE: f64 = 100.0;

    fn record(state: &State) -> Status<CUevent> {
        let mut event = CUevent::NULL;
        cu!(cuEventCreate, &mut event, CU_EVENT_DEFAULT).ok()?;
        cu!(cuEventRecord, event, state.streams[0]).ok()?;
        cu!(cuStreamSynchronize, state.streams[0]).ok()?;
        Ok(event)
    }

    fn elapsed(start: CUevent, end: CUevent) -> Status<f32> {
        let mut ms = 0.0;
        cu!(cuEventElapsedTime, &mut ms, start, end).ok()?;
        Ok(ms)
    }

    fn new(state: &State) -> Status<Timer> {
        let before = Instant::now();
        let start = Timer::record(state)?;
        let since = [before, Instant::now()];
        std::thread::sleep(Duration::from_millis(5));
        let end = Timer::record(state)?;
        Ok(Timer {
            events: [start, end],
            between: Timer::elapsed(start, end)?,
            since,
        })
    }

    /// Whether the events say what they said, and how long ago they were recorded.
    fn is_right(&self, state: &State) -> Status<bool> {
        let [start, end] = self.events;
        let between = Timer::elapsed(start, end)?;
        let least = self.since[1].elapsed().as_secs_f64() * 1e3;
        let now = Timer::record(state)?;
        let most = self.since[0].elapsed().as_secs_f64() * 1e3;
        let ago = f64::from(Timer::elapsed(start, now)?);
        cu!(cuEventDestroy_v2, now).ok()?;
        let known = least - Timer::TOLERANCE..most + Timer::TOLERANCE;
        let is_right = (between - self.between).abs() < 1e-3 && known.contains(&ago);
        if !is_right {
            eprintln!(
                "{between} ms, not {}; {ago} ms ago, not {known:?}",
                self.between
            );
        }
        Ok(is_right)
    }
}

/// A handle for other processes in hexadecimal digits.
fn to_digits(handle: &[u8; 64]) -> String {
    handle.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_digits(digits: &str) -> [u8; 64] {
    std::array::from_fn(|at| {
        let digits = digits.get(2 * at..2 * at + 2).expect("two digits");
        u8::from_str_radix(digits, 16).expect("a byte")
    })
}

fn say(line: &str) {
    println!("{line}");
    // The reader may be gone.
    let _ = io::stdout().flush();
}

/// Does a round with objects that are made for the first one. `None`: something was not as it was left.
fn again<T>(
    kept: &mut Option<T>,
    make: impl FnOnce() -> Status<T>,
    round: impl FnOnce(&mut T) -> Status<Option<u32>>,
) -> Status<Option<u32>> {
    let own = match kept {
        Some(own) => own,
        None => kept.insert(make()?),
    };
    round(own)
}

/// Carries out commands, and says what came of each.
fn run(lines: impl Iterator<Item = String>, say: impl Fn(&str)) -> Status<bool> {
    // What came of a round: its number, or nothing if something was wrong.
    let says = |what: &str, done: Status<Option<u32>>| -> Status<bool> {
        let done = done?;
        if let Some(number) = done {
            say(&format!("{what} {number}"));
        }
        Ok(done.is_some())
    };
    let mut state = State::new()?;
    let mut sparse: Option<Sparse> = None;
    let mut timed: Option<Timer> = None;
    let mut unloaded: Option<Unloaded> = None;
    let mut counter: Option<Counter> = None;
    let mut constants: Option<Constants> = None;
    let mut graphs: Option<Graphs> = None;
    let mut loops: Option<Loops> = None;
    let mut hosts: Option<Hosts> = None;
    let mut infer: Option<Infer> = None;
    let mut pools: Option<Pools> = None;
    let mut steps: Option<Steps> = None;
    let mut registered: Option<Registered> = None;
    let mut textures: Option<Textures> = None;
    let mut parts: Option<Parts> = None;
    let mut lent: Option<Lent> = None;
    let mut signal: Option<Signal> = None;
    let mut tables: Option<Tables> = None;
    let mut exported: Option<Exported> = None;
    let mut held: Option<Held> = None;
    say("started");
    for line in lines {
        let (command, text) = line.split_once(' ').unwrap_or((&line, "0"));
        let argument: u32 = text.parse().unwrap_or(0);
        match command {
            "round" => {
                let began = Instant::now();
                if !state.round()? {
                    return Ok(false);
                }
                let took = began.elapsed().as_millis();
                say(&format!("ok {} {took}", state.round));
            }
            "launch" => {
                let rounds = argument.saturating_mul(100_000);
                launch(state.fill, state.streams[0], (state.computed, 1, rounds))?;
                arrive()?;
                say("launched");
            }
            "stray" => {
                // Refused once the fault is known.
                let others = || {
                    for _ in 0..argument {
                        let _ = launch(state.fill, state.streams[0], (state.computed, 1, 100));
                    }
                };
                others();
                // Its first parameter is the address.
                launch(state.stray, state.streams[0], (0x10, 0, 0))?;
                others();
                let status = cu!(cuStreamSynchronize, state.streams[0]);
                say(&format!("{status}"));
            }
            "assert" => {
                let kernel = asserting(c"check")?;
                launch_small(kernel, state.streams[0], argument)?;
                let status = cu!(cuStreamSynchronize, state.streams[0]);
                say(&format!("{status}"));
            }
            "endless" => {
                let kernel = asserting(c"endless")?;
                launch_small(kernel, state.streams[0], 0)?;
                arrive()?;
                say("launched");
            }
            "taint" => {
                remains::each(|word| *word = remains::PATTERN)?;
                say("tainted");
            }
            "look" => {
                let mut found = 0;
                remains::each(|word| found += u32::from(*word == remains::PATTERN))?;
                say(&format!("found {found}"));
            }
            "time" => {
                let is_right = match &timed {
                    Some(timer) => timer.is_right(&state)?,
                    None => {
                        timed = Some(Timer::new(&state)?);
                        true
                    }
                };
                if !is_right {
                    return Ok(false);
                }
                say("time");
            }
            "limit" => {
                cu!(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 4096usize).ok()?;
                say("limit");
            }
            "graph" => {
                graphs::bound()?;
                say("graph");
            }
            "unload" => {
                let own = own_text();
                let load_own = || load(own.to_str().expect("a text"));
                let of_unloaded = || load_own().map(|(module, fill, _)| (module, fill));
                unloaded = Some(Unloaded::new(of_unloaded)?);
                say("unload");
            }
            "destroy" => {
                let one = unloaded.as_ref().expect("a graph");
                say(&format!("destroyed, {} left", one.destroy()?));
            }
            "replay" => {
                let done = again(&mut graphs, || Graphs::new(state.fill), |own| own.round());
                if !says("replayed", done)? {
                    return Ok(false);
                }
            }
            "loop" => {
                let done = again(
                    &mut loops,
                    || Loops::new(state.streams[0]),
                    |own| own.round(),
                );
                if !says("looped", done)? {
                    return Ok(false);
                }
            }
            "host" => {
                let done = again(
                    &mut hosts,
                    || Hosts::new(state.streams[0]),
                    |own| own.round(),
                );
                if !says("hosted", done)? {
                    return Ok(false);
                }
            }
            "pool" => {
                let done = again(
                    &mut pools,
                    || Pools::new(state.streams[1]),
                    |own| own.round(),
                );
                if !says("pooled", done)? {
                    return Ok(false);
                }
            }
            "register" => {
                let done = again(
                    &mut registered,
                    || Registered::new(state.fill, state.streams[0]),
                    |own| own.round(),
                );
                if !says("registered", done)? {
                    return Ok(false);
                }
            }
            "texture" => {
                let done = again(&mut textures, Textures::new, |own| own.round());
                if !says("textured", done)? {
                    return Ok(false);
                }
            }
            "part" => {
                let done = again(&mut parts, Parts::new, |own| own.round());
                if !says("parted", done)? {
                    return Ok(false);
                }
            }
            "table" => {
                let done = again(
                    &mut tables,
                    || Tables::new(state.streams[1]),
                    |own| own.round(),
                );
                if !says("tabled", done)? {
                    return Ok(false);
                }
            }
            "infer" | "infer-registered" | "infer-call" => {
                let (registers, calls) = (command == "infer-registered", command == "infer-call");
                let done = again(
                    &mut infer,
                    || Infer::new(state.fill, state.streams, registers),
                    |own| own.serve(argument, 100, calls),
                );
                if !says("inferred", done)? {
                    return Ok(false);
                }
            }
            "hold" => {
                if !says("held", again(&mut held, Held::new, Held::round))? {
                    return Ok(false);
                }
            }
            "step" | "step-call" => {
                let calls = command == "step-call";
                let done = again(
                    &mut steps,
                    || Steps::new(state.fill, state.streams[0]),
                    |own| own.step(argument, calls),
                );
                if !says("stepped", done)? {
                    return Ok(false);
                }
            }
            "count" => {
                let mut counting = match counter.take() {
                    Some(counting) => counting,
                    None => Counter::new(state.streams[1], 4)?,
                };
                if argument == 1 && counting.exec.is_null() {
                    counting.capture()?;
                }
                let Some(counted) = counting.round()? else {
                    return Ok(false);
                };
                counter = Some(counting);
                say(&format!("counted {counted}"));
            }
            "constant" if argument == 2 => say(Constants::large()?),
            "constant" => {
                let mut own = match constants.take() {
                    Some(own) => own,
                    None => Constants::new()?,
                };
                if argument == 1 {
                    own.launch()?;
                    arrive()?;
                    say("launched");
                } else {
                    let Some(round) = own.round()? else {
                        return Ok(false);
                    };
                    say(&format!("constants {round}"));
                }
                constants = Some(own);
            }
            "library" => {
                let (library, mut kernel) = (load_library(&own_text())?, CUkernel::NULL);
                cu!(cuLibraryGetKernel, &mut kernel, library, c"fill".as_ptr()).ok()?;
                say("library");
            }
            "module" => {
                load(own_text().to_str().expect("a text"))?;
                say("module");
            }
            "link" => {
                let linked = Counter::new(state.streams[1], 4)?;
                let (at, to) = (linked.place(c"link")?, linked.taken);
                cu!(cuMemcpyHtoD_v2, at, &raw const to, 8usize).ok()?;
                say("linked");
            }
            "share" => {
                let mut handle = CUipcMemHandle([0; 64]);
                cu!(cuIpcGetMemHandle, &mut handle, state.large).ok()?;
                say("shared");
            }
            "give" => {
                let (memory, handle) = Lent::new()?;
                lent = Some(memory);
                say(&handle);
            }
            "open" => {
                lent = Some(Lent::open(text)?);
                say("opened");
            }
            "close" => {
                lent.take().expect("memory").close()?;
                say("closed");
            }
            "write" => {
                lent.expect("memory").write(argument)?;
                say("written");
            }
            "read" => match lent.expect("memory").read()? {
                Some(value) => say(&value.to_string()),
                None => return Ok(false),
            },
            "export" => {
                exported = Some(Exported::new(text)?);
                say("exported");
            }
            "import" => {
                exported = Some(Exported::import(text)?);
                say("imported");
            }
            "retain" => {
                exported.as_mut().expect("memory").retain()?;
                say("retained");
            }
            "fill" => {
                exported.as_ref().expect("memory").write(argument)?;
                say("filled");
            }
            "show" => match exported.as_ref().expect("memory").read()? {
                Some(value) => say(&value.to_string()),
                None => return Ok(false),
            },
            "signal" => {
                let (event, handle) = Signal::new()?;
                signal = Some(event);
                say(&handle);
            }
            "listen" => {
                signal = Some(Signal::open(text)?);
                say("listens");
            }
            "raise" => {
                signal.expect("an event").raise(&state, argument)?;
                arrive()?;
                say("raised");
            }
            "hear" => {
                let signal = signal.expect("an event");
                signal.wait(&state)?;
                if !signal.is_complete()? {
                    return Ok(false);
                }
                say("heard");
            }
            "wait" => {
                extern "C" fn wait(ms: *mut c_void) {
                    std::thread::sleep(Duration::from_millis(ms as u64));
                }
                let wait: extern "C" fn(*mut c_void) = wait;
                let ms = argument as usize as *mut c_void;
                cu!(cuLaunchHostFunc, state.streams[1], wait, ms).ok()?;
                arrive()?;
                say("waits");
            }
            "later" => {
                extern "C" fn call(count: *mut c_void) {
                    // SAFETY: the word below, which lives until the function has run.
                    unsafe { *count.cast::<u32>() += 1 }
                }
                let call: extern "C" fn(*mut c_void) = call;
                let mut count = 0u32;
                // For what the program did before.
                cu!(cuCtxSynchronize).ok()?;
                launch(state.fill, state.streams[0], (state.computed, 1, argument))?;
                let data = (&raw mut count).cast::<c_void>();
                cu!(cuLaunchHostFunc, state.streams[0], call, data).ok()?;
                launch(state.fill, state.streams[0], (state.computed, 2, 1))?;
                let status = cu!(cuStreamSynchronize, state.streams[0]);
                // SAFETY: the function has run, or never does.
                let count = unsafe { (&raw const count).read_volatile() };
                say(&format!("{status}, called {count}"));
                status.ok()?;
            }
            "call" => {
                extern "C" fn call(_: *mut c_void) {
                    crate::say("called");
                }
                let call: extern "C" fn(*mut c_void) = call;
                let nothing = null_mut::<c_void>();
                let rounds = argument.saturating_mul(100_000);
                launch(state.fill, state.streams[1], (state.computed, 1, rounds))?;
                cu!(cuLaunchHostFunc, state.streams[0], call, nothing).ok()?;
                let status = cu!(cuStreamSynchronize, state.streams[1]);
                say(&format!("{status}"));
            }
            "sparse" => {
                let block = match &mut sparse {
                    Some(block) => block,
                    None => sparse.insert(Sparse::new(argument as usize)?),
                };
                if !block.round()? {
                    return Ok(false);
                }
                say("sparse");
            }
            "large" => {
                let image = Counter::new(state.streams[1], argument as usize)?.module;
                let mut touch = CUfunction::NULL;
                cu!(cuModuleGetFunction, &mut touch, image, c"touch".as_ptr()).ok()?;
                run_one(touch, state.streams[1], &mut [])?;
                cu!(cuStreamSynchronize, state.streams[1]).ok()?;
                say("touched");
            }
            _ => panic!("unknown command {line:?}"),
        }
    }
    Ok(true)
}

/// Carries out each list of commands, with `;` between them, so many times, in a thread of its own.
fn run_together(times: usize, lists: &[String]) -> Status<bool> {
    std::thread::scope(|scope| {
        let start = |list: &String| {
            let commands: Vec<String> = list.split(';').map(str::to_owned).collect();
            let count = times * commands.len();
            scope.spawn(move || run(commands.into_iter().cycle().take(count), |_| ()))
        };
        let threads: Vec<_> = lists.iter().map(start).collect();
        let ends: Vec<_> = { threads.into_iter() }
            .map(|thread| thread.join().expect("no panic"))
            .collect();
        ends.into_iter().try_fold(true, |all, end| Ok(all & end?))
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((times, lists)) => run_together(times.parse().expect("a number of times"), lists),
        None => run(io::stdin().lock().lines().map_while(Result::ok), say),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            say("wrong");
            ExitCode::from(2)
        }
        Err(status) => {
            say(&format!("{status}"));
            ExitCode::FAILURE
        }
    }
}
