//! A program that makes random valid calls of the driver API, which follow from a seed, and compares memory, addresses and
//! attributes with a model of its own.
//!
//! `wander --seed S --steps N` makes N steps, and compares after each 50. Without `--steps` it reads commands, a line each,
//! and answers each with a line:
//!
//! - `walk N`: makes N steps, waits for everything and compares everything; `ok STEPS OBJECTS`, with the steps made so far;
//! - `rest`: waits for everything; `rests`.
//!
//! `--bound` adds objects that bind a session to its server: managed memory, graphs with addresses of variables or host
//! functions in child graphs. `--trace` prints each step on standard error.
//!
//! A call that fails ends the program: the step, the call and the status are printed, and the exit status is 1. A difference
//! from the model is printed as `wrong` and ends it with status 2. The steps follow from the seed alone, not from commands.

mod acts;
mod arrays;
mod calls;
mod graphs;
mod images;
mod memory;
mod random;
mod streams;
mod walk;

use calls::{Status, Trouble};
use clap::Parser;
use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use walk::Walk;

/// Steps between two comparisons of a program without commands.
const STRIDE: u64 = 50;

/// Random valid calls of the driver API, compared with a model.
#[derive(Parser)]
struct Options {
    /// The seed that all steps follow from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Makes this many steps and ends.
    #[arg(long)]
    steps: Option<u64>,
    /// Also makes objects that bind a session to its server.
    #[arg(long)]
    bound: bool,
    /// Prints each step on standard error.
    #[arg(long)]
    trace: bool,
}

fn say(line: &str) {
    println!("{line}");
    // The reader may be gone.
    let _ = io::stdout().flush();
}

fn walk(walk: &mut Walk, steps: u64) -> Status {
    walk.walk(steps)?;
    walk.check()
}

fn obey(state: &mut Walk) -> Status {
    say("started");
    for line in io::stdin().lock().lines() {
        let line = line.unwrap_or_default();
        match line.split_once(' ') {
            Some(("walk", steps)) => {
                walk(state, steps.parse().expect("a number"))?;
                say(&format!("ok {} {}", state.steps, state.objects()));
            }
            None if line == "rest" => {
                state.rest()?;
                say("rests");
            }
            _ => panic!("unknown command {line:?}"),
        }
    }
    Ok(())
}

fn run(state: &mut Walk, steps: Option<u64>) -> Status {
    let Some(steps) = steps else {
        return obey(state);
    };
    while state.steps < steps {
        walk(state, STRIDE.min(steps - state.steps))?;
    }
    say(&format!("ok {} {}", state.steps, state.objects()));
    Ok(())
}

fn report(seed: u64, step: u64, trouble: Trouble) -> ExitCode {
    match trouble {
        Trouble::Call(call, status) => {
            say(&format!("seed {seed} step {step}: {call}: {status}"));
            ExitCode::FAILURE
        }
        Trouble::Wrong(what) => {
            say(&format!("wrong: seed {seed} step {step}: {what}"));
            ExitCode::from(2)
        }
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let mut state = match Walk::new(options.seed, options.bound, options.trace) {
        Ok(state) => state,
        Err(trouble) => return report(options.seed, 0, trouble),
    };
    match run(&mut state, options.steps) {
        Ok(()) => ExitCode::SUCCESS,
        Err(trouble) => report(options.seed, state.steps, trouble),
    }
}
