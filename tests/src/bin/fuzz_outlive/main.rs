//! Random sessions under kills and restarts: a daemon with real servers on softgpu, sessions that send structured random
//! messages, and servers that are killed or replaced meanwhile. Sessions at rest that are portable must go on as they were.
//!
//! A run is a row of cases, each with a daemon of its own. docs/fuzzing.md says what must hold and how to see a failure
//! again.

mod case;
mod daemon;
mod tally;
mod view;

use anyhow::Context;
use case::Case;
use clap::{Parser, ValueEnum};
use mpsshim_tests::fuzzing::images::Images;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tally::Tally;

/// How long nothing may happen at all. Longer than any single wait.
const STANDSTILL: Duration = Duration::from_secs(300);
/// Between two lines about the run.
const REPORT: Duration = Duration::from_secs(10);

/// Steps that the run has made.
static STEPS: AtomicU64 = AtomicU64::new(0);

/// Fuzzes real servers on softgpu while they are killed and replaced.
#[derive(Parser, Debug)]
#[command(disable_version_flag = true)]
pub struct Options {
    /// Seed of everything random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The first case
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Sessions, at least
    #[arg(long, default_value_t = 100)]
    sessions: u64,
    /// Cases at most
    #[arg(long)]
    cases: Option<u64>,
    /// How servers end
    #[arg(long, value_enum, default_value_t = Events::Both)]
    events: Events,
    /// Seconds after which a message that is not taken or answered counts as a hang
    #[arg(long, default_value_t = 120)]
    patience: u64,
    /// Print each message and event
    #[arg(long)]
    verbose: bool,
}

/// How servers end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Events {
    /// By `kill -9`
    Kills,
    /// By `restart_server`
    Restarts,
    /// By either
    Both,
}

/// Notes that the run goes on.
fn step() {
    STEPS.fetch_add(1, Ordering::Relaxed);
}

fn main() -> ExitCode {
    let options = Options::parse();
    let mut tally = Tally::default();
    let outcome = run(&options, &mut tally);
    print!("{tally}");
    match outcome {
        Ok(()) => {
            println!("fuzz_outlive: passed");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("fuzz_outlive: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options, tally: &mut Tally) -> anyhow::Result<()> {
    let images = Images::read().context("images of the repository")?;
    let mut told = Instant::now();
    let mut number = options.from;
    let is_short = |cases: u64| options.cases.is_none_or(|most| cases < most);
    while tally.sessions < options.sessions && is_short(number - options.from) {
        watch(options.seed, number);
        let again = format!(
            "to see it again: --seed {} --from {number} --cases 1",
            options.seed
        );
        Case::run(options, number, &images, tally).context(again)?;
        number += 1;
        if told.elapsed() > REPORT {
            told = Instant::now();
            println!(
                "fuzz_outlive: seed {}, cases up to {number}, {} sessions, {} kills, {} restarts, {} made again",
                options.seed, tally.sessions, tally.kills, tally.restarts, tally.made_again
            );
        }
    }
    Ok(())
}

/// Ends the process if the run stands still.
fn watch(seed: u64, case: u64) {
    static CASE: AtomicU64 = AtomicU64::new(u64::MAX);
    if CASE.swap(case, Ordering::Relaxed) != u64::MAX {
        return;
    }
    std::thread::spawn(move || {
        let mut last = (0, Instant::now());
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let steps = STEPS.load(Ordering::Relaxed);
            if steps != last.0 {
                last = (steps, Instant::now());
            }
            if last.1.elapsed() > STANDSTILL {
                let case = CASE.load(Ordering::Relaxed);
                eprintln!("fuzz_outlive: nothing happens in --seed {seed} --from {case} --cases 1");
                std::process::exit(1);
            }
        }
    });
}
