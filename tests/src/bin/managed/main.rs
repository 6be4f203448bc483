//! Managed memory that host and device use in all ways that CUDA allows where the device has the attribute
//! `CONCURRENT_MANAGED_ACCESS`: `managed MODE [--seconds N] [--seed N] [--most BYTES] [--blocks N] [--without CASE]`.
//!
//! The modes are in [`MODES`]; `all` is all of them. Each keeps a copy of every block in ordinary memory and compares every
//! byte that it reads. A mode without a difference prints `MODE: ok`; otherwise the program prints the address, what was
//! expected and what was there, and its exit status is 1.

mod calls;
mod copies;
mod edges;
mod exchange;
mod forks;
mod kernels;
mod many;
mod params;
mod prefetch;
mod remote;
mod sides;
mod signals;
mod turns;

use clap::Parser;
use kernels::{Kernels, Work};
use mpsshim_api::cuda::*;
use std::ffi::{c_int, c_uint, c_void};
use std::io::Write;
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Calls an entry point; another status than success ends the mode.
macro_rules! must {
    ($name:ident $(, $arg:expr)* $(,)?) => {{
        let status = mpsshim_tests::cu!($name $(, $arg)*);
        if !status.is_ok() {
            return Err(format!(
                concat!(stringify!($name), " at ", file!(), ":{}: {}"),
                line!(),
                status
            ));
        }
    }};
}
pub(crate) use must;

/// An error says what differs or which call has failed.
pub type Outcome<T = ()> = Result<T, String>;

type Mode = fn(&Setup, &mut Random, Instant) -> Outcome;

const MODES: [(&str, Mode); 13] = [
    ("turns", turns::turns),
    ("edges", edges::edges),
    ("sides", sides::sides),
    ("threads", turns::threads),
    ("calls", calls::calls),
    ("signals", signals::signals),
    ("fork", forks::forks),
    ("remote", remote::remote),
    ("copies", copies::copies),
    ("prefetch", prefetch::prefetch),
    ("params", params::params),
    ("many", many::many),
    ("exchange", exchange::exchange),
];

#[derive(Parser)]
struct Options {
    /// A mode, or `all`.
    mode: String,
    /// For how long.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Bytes of the largest block of the modes that choose sizes.
    #[arg(long, default_value_t = 64 << 20)]
    most: usize,
    /// Blocks of the mode `many`.
    #[arg(long, default_value_t = 5000)]
    blocks: usize,
    /// A case of the modes `calls` and `signals` to leave out, by its name; `disturbances` in `edges`, `writes` in
    /// `prefetch`; may be repeated.
    #[arg(long)]
    without: Vec<String>,
}

/// xorshift64*: the same sequence for a seed everywhere.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.number() % bound as u64) as usize
    }

    pub fn one_of(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// 1 to `most`; small numbers as often as large ones.
    pub fn size(&mut self, most: usize) -> usize {
        let bits = self.below(most.ilog2() as usize + 1);
        let least = 1usize << bits;
        (least + self.below(least)).min(most)
    }

    /// A range of 0..len with at least a byte: sometimes all, often a few bytes.
    pub fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let size = match self.below(8) {
            0 => len,
            1 | 2 => self.below(len) + 1,
            _ => self.size(len),
        };
        let at = self.below(len - size + 1);
        at..at + size
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.number().to_le_bytes()[..6]);
        }
        bytes.truncate(len);
        bytes
    }
}

/// What all threads use.
pub struct Setup {
    pub device: CUdevice,
    pub context: CUcontext,
    pub kernels: Kernels,
    pub most: usize,
    pub blocks: usize,
    pub without: Vec<String>,
}

impl Setup {
    fn new(options: &Options) -> Outcome<Setup> {
        must!(cuInit, 0 as c_uint);
        let mut device: CUdevice = 0;
        must!(cuDeviceGet, &mut device, 0 as c_int);
        let mut context = CUcontext::NULL;
        must!(cuDevicePrimaryCtxRetain, &mut context, device);
        must!(cuCtxSetCurrent, context);
        Ok(Setup {
            device,
            context,
            kernels: Kernels::load()?,
            most: options.most.max(16),
            blocks: options.blocks.max(2),
            without: options.without.clone(),
        })
    }

    /// Lets this thread call the driver.
    pub fn enter(&self) -> Outcome {
        must!(cuCtxSetCurrent, self.context);
        Ok(())
    }

    /// Writes bytes to managed memory by a kernel and waits for it: the device had the memory last.
    pub fn device_writes(&self, at: u64, bytes: &[u8]) -> Outcome {
        let mut from = 0u64;
        must!(cuMemAlloc_v2, &mut from, bytes.len());
        must!(cuMemcpyHtoD_v2, from, bytes.as_ptr(), bytes.len());
        let work = Work {
            to: at,
            from,
            count: bytes.len(),
            ..Work::default()
        };
        self.kernels
            .launch(self.kernels.copy_bytes, CUstream::NULL, &work)?;
        must!(cuStreamSynchronize, CUstream::NULL);
        must!(cuMemFree_v2, from);
        Ok(())
    }

    /// Managed memory as a kernel sees it.
    pub fn device_reads(&self, at: u64, len: usize) -> Outcome<Vec<u8>> {
        let mut to = 0u64;
        must!(cuMemAlloc_v2, &mut to, len);
        let work = Work {
            to,
            from: at,
            count: len,
            ..Work::default()
        };
        self.kernels
            .launch(self.kernels.copy_bytes, CUstream::NULL, &work)?;
        let mut found = vec![0u8; len];
        must!(cuMemcpyDtoH_v2, found.as_mut_ptr(), to, len);
        must!(cuMemFree_v2, to);
        Ok(found)
    }
}

pub fn stream() -> Outcome<CUstream> {
    let mut stream = CUstream::NULL;
    must!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING);
    Ok(stream)
}

pub fn allocate(len: usize) -> Outcome<u64> {
    let mut at = 0u64;
    must!(cuMemAllocManaged, &mut at, len, CU_MEM_ATTACH_GLOBAL);
    Ok(at)
}

pub fn free(at: u64) -> Outcome {
    must!(cuMemFree_v2, at);
    Ok(())
}

/// Memory that the host may use now, by its address. Bytes that another thread or the device changes meanwhile must be
/// accessed by [`load`] and [`store`] instead.
pub fn host<'a>(at: u64, len: usize) -> &'a mut [u8] {
    // SAFETY: callers pass ranges of blocks that they have allocated and not freed.
    unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) }
}

pub fn load(at: u64) -> u8 {
    // SAFETY: as `host`.
    unsafe { (at as *const u8).read_volatile() }
}

pub fn store(at: u64, byte: u8) {
    // SAFETY: as `host`.
    unsafe { (at as *mut u8).write_volatile(byte) }
}

/// Compares bytes that were read from `at` with what should be there.
pub fn same(what: &str, at: u64, expected: &[u8], got: &[u8]) -> Outcome {
    if expected == got {
        return Ok(());
    }
    if expected.len() != got.len() {
        return Err(format!(
            "{what} at {at:#x}: {} bytes expected, got {}",
            expected.len(),
            got.len()
        ));
    }
    let differing: Vec<usize> = (0..got.len()).filter(|i| expected[*i] != got[*i]).collect();
    let (first, last) = (differing[0], differing[differing.len() - 1]);
    let end = (first + 16).min(got.len());
    Err(format!(
        "{what}: {} of {} bytes from {at:#x} differ, the first at {:#x} (offset {first}), the last at offset {last}: \
         expected {:02x?}, got {:02x?}",
        differing.len(),
        got.len(),
        at + first as u64,
        &expected[first..end],
        &got[first..end]
    ))
}

/// Compares managed memory, as the host sees it, with what should be there.
pub fn compare(what: &str, at: u64, expected: &[u8]) -> Outcome {
    same(what, at, expected, host(at, expected.len()))
}

/// Adds to words as the kernels do.
pub fn add_words(bytes: &mut [u8], value: u32) {
    for word in bytes.chunks_exact_mut(4) {
        let sum = u32::from_le_bytes(word.try_into().expect("4 bytes")).wrapping_add(value);
        word.copy_from_slice(&sum.to_le_bytes());
    }
}

pub fn add_bytes(bytes: &mut [u8], value: u32) {
    for byte in bytes {
        *byte = byte.wrapping_add(value as u8);
    }
}

/// Waits for the work in a stream, by one of the ways that there are.
pub fn wait(random: &mut Random, stream: CUstream) -> Outcome {
    match random.below(5) {
        0 => must!(cuStreamSynchronize, stream),
        1 => {
            let mut event = CUevent::NULL;
            must!(cuEventCreate, &mut event, 2 as c_uint);
            must!(cuEventRecord, event, stream);
            must!(cuEventSynchronize, event);
            must!(cuEventDestroy_v2, event);
        }
        2 => loop {
            match mpsshim_tests::cu!(cuStreamQuery, stream) {
                CUDA_SUCCESS => break,
                CUDA_ERROR_NOT_READY => std::thread::yield_now(),
                status => return Err(format!("cuStreamQuery: {status}")),
            }
        },
        3 => must!(cuCtxSynchronize),
        _ => {
            let (told, heard) = std::sync::mpsc::channel::<()>();
            let told = Box::into_raw(Box::new(told));
            must!(
                cuLaunchHostFunc,
                stream,
                tell as HostFunction,
                told.cast::<c_void>()
            );
            heard.recv().map_err(|_| "the host function did not run")?;
        }
    }
    Ok(())
}

pub type HostFunction = unsafe extern "C" fn(*mut c_void);

unsafe extern "C" fn tell(told: *mut c_void) {
    // SAFETY: made by `wait` above for this call.
    let told = unsafe { Box::from_raw(told.cast::<std::sync::mpsc::Sender<()>>()) };
    // `wait` has gone if the launch failed.
    let _ = told.send(());
}

/// Runs threads; the first failure is that of all.
pub fn together(threads: Vec<Box<dyn FnOnce() -> Outcome + Send + '_>>) -> Outcome {
    std::thread::scope(|scope| {
        let all: Vec<_> = threads.into_iter().map(|run| scope.spawn(run)).collect();
        let outcomes: Vec<Outcome> = all
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err("a thread panicked".into()))
            })
            .collect();
        outcomes.into_iter().collect()
    })
}

fn run(options: &Options) -> Outcome<bool> {
    let chosen: Vec<_> = MODES
        .iter()
        .filter(|(name, _)| options.mode == "all" || options.mode == *name)
        .collect();
    if chosen.is_empty() {
        let names: Vec<&str> = MODES.iter().map(|(name, _)| *name).collect();
        return Err(format!("MODE is one of {}, all", names.join(", ")));
    }
    if options.mode == "signals" {
        signals::before_the_driver()?;
    }
    let setup = Setup::new(options)?;
    let each = Duration::from_secs_f64(options.seconds / chosen.len() as f64);
    let mut good = true;
    for (name, mode) in chosen {
        let outcome = mode(
            &setup,
            &mut Random::new(options.seed),
            Instant::now() + each,
        );
        match &outcome {
            Ok(()) => println!("{name}: ok"),
            Err(error) => println!("{name}: {error}"),
        }
        // Who reads it may have gone.
        let _ = std::io::stdout().flush();
        good &= outcome.is_ok();
    }
    Ok(good)
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A null pointer as an argument.
pub fn nothing() -> *mut *mut c_void {
    null_mut()
}
