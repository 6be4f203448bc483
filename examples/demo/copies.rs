//! Copies of the n-body example, run at once as clients, and what is seen of them meanwhile.

use std::io::Read;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::Interrupt;
use crate::daemon::Daemon;

/// Longer than any machine should take.
const PATIENCE: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(20);
/// Pause between two questions for the device's memory, each of which is a client of its own.
const MEMORY_EVERY: Duration = Duration::from_millis(300);

/// What one copy has printed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Copy {
    pub milliseconds: f64,
    /// Billion interactions per second.
    pub rate: f64,
}

/// One run of one or more copies.
#[derive(Debug)]
pub struct Run {
    pub copies: Vec<Copy>,
    pub server: Option<i32>,
    /// The most copies that the server listed as clients at one time.
    pub clients: usize,
    /// The most bytes of device memory in use.
    pub memory: Option<u64>,
}

impl Run {
    /// Billion interactions per second of all copies.
    pub fn total(&self) -> f64 {
        self.copies.iter().map(|copy| copy.rate).sum()
    }
}

/// Processes that do not outlive this value.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that has ended already cannot be killed, which is as good.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// How copies get the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// As clients of the daemon's server.
    Shared,
    /// Each on the driver itself.
    Natively,
}

/// Starts the copies at once and waits for all.
pub fn run(
    daemon: &Daemon<'_>,
    arguments: &[&str],
    (copies, manner): (usize, Manner),
    interrupt: &Interrupt,
) -> Result<Run> {
    let mut children = Children(Vec::new());
    for _ in 0..copies {
        let mut command = daemon.command("mps-run")?;
        if manner == Manner::Natively {
            command.env("MPSSHIM_DISABLE", "1");
        }
        command.arg(daemon.build().path("nbody")?).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        children
            .0
            .push(command.spawn().context("cannot start mps-run")?);
    }
    let mut run = Run {
        copies: Vec::new(),
        server: None,
        clients: 0,
        memory: None,
    };
    let began = Instant::now();
    let mut asked = began;
    loop {
        interrupt.check()?;
        let mut running = 0;
        for child in &mut children.0 {
            match child.try_wait()? {
                None => running += 1,
                Some(status) if status.success() => {}
                Some(status) => bail!("a copy of nbody failed: {status}"),
            }
        }
        if running == 0 {
            break;
        }
        if began.elapsed() > PATIENCE {
            bail!("not done after {} s", PATIENCE.as_secs());
        }
        if manner == Manner::Shared
            && let Some(server) = daemon.server()
        {
            run.server = Some(server);
            // mps-run has become nbody: its process id is the client's.
            let ours = |pid: &i32| children.0.iter().any(|child| child.id() as i32 == *pid);
            let listed = daemon
                .clients(server)
                .iter()
                .filter(|pid| ours(pid))
                .count();
            run.clients = run.clients.max(listed);
            if listed == copies && asked.elapsed() > MEMORY_EVERY {
                run.memory = run.memory.max(daemon.memory_in_use());
                asked = Instant::now();
            }
        }
        sleep(POLL);
    }
    for child in &mut children.0 {
        let mut text = String::new();
        let output = child.stdout.as_mut().context("piped")?;
        output
            .read_to_string(&mut text)
            .context("the output of nbody")?;
        let copy = read(&text).with_context(|| format!("nbody printed\n{text}"))?;
        run.copies.push(copy);
    }
    Ok(run)
}

/// Finds the results in what nbody prints.
fn read(text: &str) -> Option<Copy> {
    let number = |before: &str, after: &str| -> Option<f64> {
        let line = text.lines().find(|line| line.ends_with(after))?;
        let value = line.strip_suffix(after)?.rsplit_once(before)?.1;
        value.trim().parse().ok()
    };
    Some(Copy {
        milliseconds: number(":", " ms")?,
        rate: number("=", " billion interactions per second")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_found() {
        let text = "> Windowed mode\n256 bodies, total time for 2 iterations: 4.500 ms\n\
            = 0.029 billion interactions per second\n\
            = 0.583 single-precision GFLOP/s at 20 flops per interaction\n";
        let expected = Copy {
            milliseconds: 4.5,
            rate: 0.029,
        };
        assert_eq!(read(text), Some(expected));
        assert_eq!(read("nothing"), None);
    }
}
