//! An all-pairs n-body benchmark that uses only the CUDA driver API, with the options and the result lines of the
//! benchmark mode of NVIDIA's `nbody` sample.
//!
//! It opens the driver as other programs do, by `dlopen("libcuda.so")`, so it runs on a GPU, on softgpu and, with the
//! shim preloaded, on a shared server without knowing which.

mod bodies;
mod device;
mod options;
mod simulation;

use std::process::ExitCode;

use anyhow::{Result, bail};

use bodies::{Real, State};
use options::{Action, Options};
use simulation::{BLOCK, Simulation};

/// Bodies for `-compare` when no number is given: a CPU checks them within a second.
const COMPARE_BODIES: usize = 4096;

fn main() -> ExitCode {
    let action = match options::parse(std::env::args().skip(1)) {
        Ok(action) => action,
        Err(message) => {
            eprintln!("nbody: {message} (nbody -help lists the options)");
            return ExitCode::FAILURE;
        }
    };
    let result = match &action {
        Action::Help => {
            print!("{}", options::HELP);
            return ExitCode::SUCCESS;
        }
        Action::Run(options) if options.fp64 => run::<f64>(options),
        Action::Run(options) => run::<f32>(options),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("nbody: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what was asked for; false means that `-compare` found a difference.
fn run<T: Real>(options: &Options) -> Result<bool> {
    let available = device::count()?;
    let ordinals = ordinals(options, available)?;

    println!("> Windowed mode");
    println!("> Simulation data stored in video memory");
    println!("> {} precision floating point simulation", T::PRECISION);
    println!("> {} Devices used for simulation", ordinals.len());
    let mut multiprocessors = 0;
    for &ordinal in &ordinals {
        let about = device::describe(ordinal)?;
        println!(
            "> Compute {}.{} CUDA device: [{}]",
            about.major, about.minor, about.name
        );
        multiprocessors += about.multiprocessors;
    }

    let count = body_count(options, multiprocessors);
    let mut simulation = Simulation::<T>::new(&ordinals, &State::ball(count))?;
    if options.compare {
        return compare(&mut simulation, options.iterations.unwrap_or(1));
    }
    benchmark(&mut simulation, options.iterations.unwrap_or(10))?;
    Ok(true)
}

/// The devices to use. One `-device`, or the first `-numdevices`.
fn ordinals(options: &Options, available: usize) -> Result<Vec<usize>> {
    let wanted = options.num_devices.unwrap_or(1);
    if let Some(wanted) = options.num_devices {
        println!("number of CUDA devices  = {wanted}");
    }
    if available < wanted {
        bail!("only {available} Devices available, {wanted} requested");
    }
    match options.device {
        Some(device) if device >= available => {
            bail!(
                "-device={device}: the devices here are 0 to {}",
                available - 1
            )
        }
        Some(device) => Ok(vec![device]),
        None => Ok((0..wanted).collect()),
    }
}

/// The number of bodies: as given, rounded up to whole blocks, else four blocks for each multiprocessor.
fn body_count(options: &Options, multiprocessors: usize) -> usize {
    let Some(given) = options.num_bodies else {
        return if options.compare {
            COMPARE_BODIES
        } else {
            4 * BLOCK * multiprocessors.max(1)
        };
    };
    let rounded = given.next_multiple_of(BLOCK);
    if rounded == given {
        println!("number of bodies = {given}");
    } else {
        println!("Warning: \"number of bodies\" specified {given} is not a multiple of {BLOCK}.");
        println!("Rounding up to the nearest multiple: {rounded}.");
    }
    rounded
}

fn benchmark<T: Real>(simulation: &mut Simulation<T>, iterations: usize) -> Result<()> {
    simulation.step()?; // Once untimed: the first launch loads the kernel.
    let milliseconds = simulation.timed_steps(iterations)?;
    let bodies = simulation.bodies() as f64;
    let interactions = bodies * bodies * iterations as f64;
    let billions_per_second = interactions / (f64::from(milliseconds) * 1e6);
    println!(
        "{} bodies, total time for {iterations} iterations: {milliseconds:.3} ms",
        simulation.bodies()
    );
    println!("= {billions_per_second:.3} billion interactions per second");
    println!(
        "= {:.3} {}-precision GFLOP/s at {} flops per interaction",
        billions_per_second * f64::from(T::FLOPS),
        T::PRECISION.to_lowercase(),
        T::FLOPS
    );
    Ok(())
}

fn compare<T: Real>(simulation: &mut Simulation<T>, iterations: usize) -> Result<bool> {
    let mut reference = simulation.state()?.widen();
    for _ in 0..iterations {
        simulation.step()?;
        bodies::reference_step::<T>(&mut reference);
    }
    let result = simulation.state()?.widen();
    let difference = result.difference(&reference);
    let tolerance = T::TOLERANCE * iterations.max(1) as f64;
    if difference <= tolerance {
        println!("  OK (largest difference {difference:.1e} after {iterations} steps)");
        return Ok(true);
    }
    println!(
        "  FAILED: largest difference {difference:.1e} after {iterations} steps, allowed {tolerance:.1e}"
    );
    Ok(false)
}
