//! What a launch and the wait for it take with several streams in one process: how much of it is the way in which the end
//! is learnt, and the way in which data is copied. docs/design/0002-marks-and-waits.md has what it showed.
//!
//! It runs on the bare driver, where a server would be one process too, and prints one `name=value` per line.

mod device;
mod way;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use device::{Buffers, Kernels};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use way::{Mark, Round};

/// Measures rounds of a kernel launch and the wait for it, in several streams of one process
#[derive(Debug, Parser)]
struct Options {
    /// Number of streams, each with one round at a time
    #[arg(long, default_value_t = 8)]
    streams: usize,
    /// Number of threads that submit; each serves an equal part of the streams
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// How the end of a round is detected
    #[arg(long, value_enum, default_value_t = Mark::Operation)]
    mark: Mark,
    /// Length of a kernel, in microseconds of 1,700 clock cycles
    #[arg(long, default_value_t = 50)]
    us: u64,
    /// Number of blocks of a kernel, of 128 threads each
    #[arg(long, default_value_t = 8)]
    blocks: u32,
    /// Bytes of each of two pieces that are copied to the device before the kernel and from it afterwards; 0: none
    #[arg(long, default_value_t = 0)]
    copy: usize,
    /// Copy both pieces at once by a kernel instead of a copy engine
    #[arg(long)]
    copy_kernel: bool,
    /// Threads per block of a competing flood of kernels that fills the device; 0: no flood
    #[arg(long, default_value_t = 0)]
    flood: u32,
    /// Length of a block of the flood, in microseconds of 1,700 clock cycles
    #[arg(long, default_value_t = 1000)]
    flood_us: u64,
    /// How many times over a kernel of the flood fills the device
    #[arg(long, default_value_t = 1.0)]
    flood_waves: f64,
    /// How long to measure
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

/// Clock cycles of a microsecond, as in benches/cuda/microbench.cu.
const CYCLES_PER_US: u64 = 1700;

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(
        (1..=options.streams).contains(&options.threads),
        "--threads: from 1 to as many as --streams"
    );
    ensure!(
        options.copy == 0 || options.copy_kernel == options.mark.is_in_graph(),
        "--copy: with --copy-kernel all is one graph: --mark operation-node or kernel-node; without, none is: --mark \
         operation, kernel, memset or event"
    );
    ensure!(
        options.copy == 0 || options.mark != Mark::Itself,
        "--mark itself: the kernel ends before the copies"
    );
    ensure!(
        options.copy.is_multiple_of(4),
        "--copy: a multiple of 4 bytes"
    );
    ensure!(
        options.seconds > 0.0 && options.seconds < 3600.0,
        "--seconds: above 0, below an hour"
    );
    let context = device::open()?;
    let kernels = Kernels::load()?;
    let buffers = Buffers::new(options.streams, options.copy)?;
    let over = AtomicBool::new(false);
    let found = thread::scope(|scope| -> Result<Vec<Found>> {
        let flood = (options.flood > 0).then(|| {
            scope.spawn(|| {
                device::use_context(context)?;
                flood(&options, &kernels, &over)
            })
        });
        let workers: Vec<_> = (0..options.threads)
            .map(|me| {
                let (options, kernels, buffers, over) = (&options, &kernels, &buffers, &over);
                scope.spawn(move || {
                    device::use_context(context)?;
                    let mine = (me..options.streams).step_by(options.threads);
                    let mine = mine.map(|at| Round::new(options, kernels, buffers, context, at));
                    work(mine.collect::<Result<_>>()?, over)
                })
            })
            .collect();
        thread::sleep(Duration::from_secs_f64(options.seconds));
        over.store(true, Ordering::Relaxed);
        let mut found = Vec::new();
        for worker in workers {
            found.push(worker.join().expect("no panic")?);
        }
        if let Some(flood) = flood {
            let kernels = flood.join().expect("no panic")?;
            println!("flood_per_s={:.1}", kernels as f64 / options.seconds);
        }
        Ok(found)
    })?;
    report(found)
}

/// What a thread measured.
#[derive(Debug, Default)]
struct Found {
    /// How long each round took.
    rounds: Vec<Duration>,
    /// How long they took the thread in calls of the driver, together.
    calls: Duration,
    took: Duration,
}

/// Has each stream begin its next round when the last one has ended, until it is over.
fn work(mut streams: Vec<Round<'_>>, over: &AtomicBool) -> Result<Found> {
    let mut found = Found::default();
    let began = Instant::now();
    let mut since = Vec::new();
    for stream in &mut streams {
        since.push(Instant::now());
        stream.begin()?;
    }
    while !over.load(Ordering::Relaxed) {
        for (stream, since) in streams.iter_mut().zip(&mut since) {
            if !stream.has_ended()? {
                std::hint::spin_loop();
                continue;
            }
            let now = Instant::now();
            found.rounds.push(now - *since);
            *since = now;
            stream.begin()?;
            found.calls += now.elapsed();
        }
    }
    found.took = began.elapsed();
    for stream in &mut streams {
        stream.finish()?;
    }
    Ok(found)
}

/// Keeps the device full; how many kernels ended.
fn flood(options: &Options, kernels: &Kernels, over: &AtomicBool) -> Result<u64> {
    let cycles = options.flood_us * CYCLES_PER_US;
    let blocks = device::full_grid(options.flood)? as f64 * options.flood_waves;
    let mut kernel = kernels.busy(blocks as u32, options.flood, cycles, 0);
    let stream = device::stream()?;
    let mut ended = 0;
    while !over.load(Ordering::Relaxed) {
        const DEPTH: u64 = 4;
        for _ in 0..DEPTH {
            kernel.launch(stream)?;
        }
        device::synchronize(stream)?;
        ended += DEPTH;
    }
    Ok(ended)
}

fn report(found: Vec<Found>) -> Result<()> {
    let took = found.iter().map(|found| found.took).max();
    let calls: Duration = found.iter().map(|found| found.calls).sum();
    let mut rounds: Vec<Duration> = found.into_iter().flat_map(|found| found.rounds).collect();
    rounds.sort();
    let took = took.filter(|_| !rounds.is_empty());
    let took = took.context("no round ended in that time: --seconds")?;
    let count = rounds.len() as f64;
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    println!("rounds_per_s={:.0}", count / took.as_secs_f64());
    println!("p50_us={:.2}", us(rounds[rounds.len() / 2]));
    println!("p99_us={:.2}", us(rounds[rounds.len() * 99 / 100]));
    println!("calls_us={:.2}", us(calls) / count);
    Ok(())
}
