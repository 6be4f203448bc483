//! One copy of the n-body example alone, then two at once, without mpsshim and sharing one device through it; a small
//! table and a verdict say how that went. On the GPU when there is one, else on softgpu.
//!
//! Whatever it starts or makes is gone when it ends, also after an error or Ctrl-C.

mod copies;
mod daemon;
mod driver;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use copies::{Manner, Run};
use daemon::Daemon;
use driver::Driver;

const HELP: &str = "\
usage: demo [--softgpu]

Runs one copy of the n-body example alone and two together, sharing a device through mpsshim, and prints a table. Then
it compares that with two copies without mpsshim.

  --softgpu    use softgpu, the CUDA driver for the CPU, even if there is a GPU
  -h, --help   show this text
";

/// Makes the process a client that prints the bytes in use on device 0: its own view is the server's.
const MEMORY: &str = "--memory-in-use";

fn main() -> ExitCode {
    let mut softgpu = false;
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--softgpu" => softgpu = true,
            MEMORY => {
                return report(driver::memory_in_use().map(|bytes| println!("{bytes}")));
            }
            "-h" | "--help" => {
                print!("{HELP}");
                return ExitCode::SUCCESS;
            }
            other => {
                eprintln!("demo: unknown argument {other:?}\n{HELP}");
                return ExitCode::FAILURE;
            }
        }
    }
    report(demo(softgpu))
}

fn report(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The built programs and libraries, which lie beside this one.
#[derive(Debug)]
pub struct Build {
    directory: PathBuf,
}

impl Build {
    fn find() -> Result<Build> {
        let own = std::env::current_exe().context("where this program is")?;
        let directory = own
            .parent()
            .context("a program has a directory")?
            .to_owned();
        let build = Build { directory };
        for name in [
            "mps-control",
            "mps-server",
            "mps-run",
            "nbody",
            "libmpsshim.so",
        ] {
            build.path(name)?;
        }
        Ok(build)
    }

    /// The path of one of them.
    ///
    /// # Errors
    /// When it was not built.
    pub fn path(&self, name: &str) -> Result<PathBuf> {
        let path = self.directory.join(name);
        if !path.is_file() {
            bail!("{} is missing; scripts/demo.sh builds it", path.display());
        }
        Ok(path)
    }
}

/// Fails once the user has asked to stop.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    fn listen() -> Result<Interrupt> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&flag)).context("signal handlers")?;
        }
        Ok(Interrupt(flag))
    }

    /// # Errors
    /// When a signal has come.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}

fn demo(softgpu: bool) -> Result<()> {
    let interrupt = Interrupt::listen()?;
    let build = Build::find()?;
    let driver = Driver::choose(&build, softgpu)?;
    println!("device: {}", driver.about);
    let daemon = Daemon::start(&build, &driver)?;
    let arguments = driver.nbody_arguments();
    println!("each copy: mps-run nbody {}\n", arguments.join(" "));
    let run = |copies, manner| copies::run(&daemon, &arguments, (copies, manner), &interrupt);
    let all = || {
        let runs = [run(1, Manner::Shared)?, run(2, Manner::Shared)?];
        Ok::<_, anyhow::Error>((runs, run(2, Manner::Natively)?))
    };
    let (runs, native) = all().inspect_err(|_| eprint!("{}", daemon.log_tail()))?;
    daemon.quit()?;
    print!("{}", table(&runs));
    let totals = Totals {
        alone: runs[0].total(),
        native: native.total(),
        shared: runs[1].total(),
    };
    print!("\n{}", verdict(&totals, driver.is_softgpu()));
    Ok(())
}

/// Work done per second, 10^9 interactions.
struct Totals {
    /// By one copy.
    alone: f64,
    /// By two copies without mpsshim.
    native: f64,
    /// By two copies with it.
    shared: f64,
}

/// The totals in words, and their meaning.
fn verdict(totals: &Totals, softgpu: bool) -> String {
    let Totals {
        alone,
        native,
        shared,
    } = totals;
    let mut text = format!(
        "verdict: one copy alone does {alone:.3} billion interactions per second, two copies without mpsshim\n\
         {native:.3} together, two with it {shared:.3}. "
    );
    text += &if softgpu {
        "softgpu computes on the CPU,\n\
         so these speeds mean nothing; on a GPU they show the gain from sharing.\n"
            .to_owned()
    } else {
        meaning(shared / native)
    };
    text
}

/// The meaning of the ratio of the work done with mpsshim to that without.
fn meaning(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    if percent.abs() < 3.0 {
        "mpsshim makes no difference here: each copy fills the GPU by itself.\n".to_owned()
    } else if percent > 0.0 {
        format!("Sharing through mpsshim, two copies get {percent:.0} % more done.\n")
    } else {
        format!(
            "Sharing through mpsshim, two copies get {:.0} % less done: compare the modes in docs/modes.md.\n",
            -percent
        )
    }
}

fn table(runs: &[Run; 2]) -> String {
    let mut text = format!("{:32}{:>14}{:>14}\n", "", "one alone", "two together");
    let mut row = |name: &str, cells: [String; 2]| {
        text += &format!("{name:32}{:>14}{:>14}\n", cells[0], cells[1]);
    };
    let cell = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    for copy in 0..runs[1].copies.len() {
        let of = |run: &Run| {
            cell(
                run.copies
                    .get(copy)
                    .map(|c| format!("{:.1}", c.milliseconds)),
            )
        };
        row(
            &format!("copy {}, ms", copy + 1),
            [of(&runs[0]), of(&runs[1])],
        );
        let of = |run: &Run| cell(run.copies.get(copy).map(|c| format!("{:.3}", c.rate)));
        let name = format!("copy {}, 10^9 interactions/s", copy + 1);
        row(&name, [of(&runs[0]), of(&runs[1])]);
    }
    let both = |of: &dyn Fn(&Run) -> String| [of(&runs[0]), of(&runs[1])];
    row(
        "total, 10^9 interactions/s",
        both(&|run| format!("{:.3}", run.total())),
    );
    row(
        "server's process id",
        both(&|run| cell(run.server.map(|pid| pid.to_string()))),
    );
    row("clients seen at once", both(&|run| run.clients.to_string()));
    let memory = |run: &Run| cell(run.memory.map(|bytes| (bytes >> 20).to_string()));
    row("device memory in use, MiB", both(&memory));
    text
}

/// The last lines of a file, for a message.
pub fn tail(path: &Path, lines: usize) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let skipped = text.lines().count().saturating_sub(lines);
    text.lines()
        .skip(skipped)
        .map(|line| format!("{line}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use copies::Copy;

    #[test]
    fn the_verdict_compares_and_says_where_speed_means_nothing() {
        let totals = |shared| Totals {
            alone: 1.0,
            native: 2.0,
            shared,
        };
        for (shared, said) in [
            (3.0, "two copies get 50 % more done"),
            (1.0, "two copies get 50 % less done"),
            (2.02, "makes no difference here"),
        ] {
            let text = verdict(&totals(shared), false);
            assert!(text.contains(said), "{text}");
        }
        let text = verdict(&totals(3.0), true);
        for said in [
            "alone does 1.000",
            "2.000 together",
            "with it 3.000",
            "mean nothing",
        ] {
            assert!(text.contains(said), "{text}");
        }
        assert!(!text.contains('%'), "{text}");
    }

    #[test]
    fn the_table_has_a_cell_for_everything() {
        let copy = |rate| Copy {
            milliseconds: 12.34,
            rate,
        };
        let run = |copies: Vec<Copy>| Run {
            clients: copies.len(),
            copies,
            server: Some(4711),
            memory: Some(3 << 20),
        };
        let text = table(&[run(vec![copy(2.0)]), run(vec![copy(1.0), copy(1.25)])]);
        assert!(
            text.contains("total, 10^9 interactions/s               2.000         2.250"),
            "{text}"
        );
        assert!(
            text.contains("copy 2, ms                                   -          12.3"),
            "{text}"
        );
        assert_eq!(text.matches("4711").count(), 2);
    }
}
