//! `mps-control top`: a live view of the clients. The daemon is polled with `ps`; rates are differences between two
//! samples.

mod columns;
mod screen;

use crate::settings::Settings;
use crate::ui::Ui;
use clap::{Parser, ValueEnum};
use columns::WHOLE;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// The command for each sample. The daemon logs a command that is repeated on a connection only once.
const QUESTION: &str = "ps --format=json";
/// Maximum length of the first interval, so that rates appear soon.
const FIRST: Duration = Duration::from_millis(500);

/// Shows the activity of the clients.
///
/// Runs on a terminal until q is typed; h lists the other keys. If standard output is no terminal, prints a table for each
/// sample.
#[derive(Debug, Parser)]
#[command(name = "mps-control top", disable_version_flag = true)]
pub struct Options {
    /// Seconds between two samples, 0.1 to 3600
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub interval: Duration,
    /// Sort order of the clients
    #[arg(short, long, value_enum, value_name = "COLUMN", default_value_t)]
    pub sort: Sort,
    /// Print one table, of one interval, and exit
    #[arg(long)]
    pub once: bool,
    /// Print JSON instead of tables, one line per sample
    #[arg(long)]
    pub json: bool,
}

/// Parses a number of seconds, 0.1 to 3600.
///
/// # Errors
/// The text is something else.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok();
    let seconds = seconds.filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected a number from 0.1 to 3600".into())
}

/// Sort orders, greatest value first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Share of time with work on the device, or with a turn
    #[default]
    Gpu,
    /// Device memory
    Memory,
    /// Launches per second
    Launches,
    /// Operations not yet completed
    Queue,
    /// Share of time spent waiting
    Wait,
    /// Share of time spent waiting at the gate
    Gate,
    /// Share of time in which kernels waited for the device
    Dwait,
    /// Share of time spent waiting for device memory
    Mwait,
    /// Process id, lowest first
    Pid,
}

/// A client on a device, as the daemon lists it. Unknown values are `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Client {
    pid: i32,
    id: u64,
    server: i32,
    device: usize,
    user: Option<String>,
    uid: u32,
    command: String,
    mode: Option<String>,
    active_thread_percentage: Option<f64>,
    weight: Option<u32>,
    memory: Option<u64>,
    memory_limit: Option<u64>,
    launches: Option<u64>,
    copies: Option<u64>,
    queued: Option<u64>,
    held_ms: Option<f64>,
    waited_ms: Option<f64>,
    gate_ms: Option<f64>,
    gate_blockers: Option<String>,
    device_context: Option<u32>,
    /// 1 is served first; 0: in the order of submission.
    level: Option<u32>,
    /// Part of the device that it has had lately, estimated.
    device_share_percentage: Option<f64>,
    /// Time that its kernels waited for the device, and for which clients, estimated.
    device_wait_ms: Option<f64>,
    device_waited_for: Option<Vec<Awaited>>,
    /// Device memory that is never moved for other clients, that cannot move, and that is in host memory, bytes.
    #[serde(default)]
    memory_guarantee: Option<u64>,
    #[serde(default)]
    fixed_memory: Option<u64>,
    #[serde(default)]
    moved_out_memory: Option<u64>,
    /// Time that it had work and waited for device memory.
    #[serde(default)]
    memory_wait_ms: Option<f64>,
    /// Managed memory on its devices and in host memory, bytes.
    managed_device_memory: Option<u64>,
    managed_host_memory: Option<u64>,
    managed_to_host_bytes: Option<u64>,
    managed_to_host_copies: Option<u64>,
    managed_to_device_bytes: Option<u64>,
    managed_to_device_copies: Option<u64>,
    managed_faults: Option<u64>,
    managed_wait_ms: Option<f64>,
    /// Since the previous sample, like all fields below; `None` for a client that has just connected.
    #[serde(default)]
    launches_per_second: Option<f64>,
    /// Percentage of the time.
    #[serde(default)]
    held_percentage: Option<f64>,
    #[serde(default)]
    waited_percentage: Option<f64>,
    #[serde(default)]
    gate_percentage: Option<f64>,
    #[serde(default)]
    device_wait_percentage: Option<f64>,
    #[serde(default)]
    memory_wait_percentage: Option<f64>,
    /// Process ids of the clients that had the device meanwhile, longest first.
    #[serde(default)]
    device_waits_for: Option<Vec<i32>>,
    /// Managed memory copied to the host and to devices.
    #[serde(default)]
    managed_bytes_per_second: Option<f64>,
}

impl Client {
    /// Bytes of managed memory copied so far.
    fn managed_bytes(&self) -> Option<u64> {
        let to_host = self.managed_to_host_bytes?;
        Some(to_host.saturating_add(self.managed_to_device_bytes?))
    }
}

/// A client that waits for a server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Waiting {
    pid: i32,
    user: Option<String>,
    uid: u32,
    command: String,
    waits_for: String,
}

/// A row of the daemon's list.
#[derive(Deserialize)]
#[serde(untagged)]
enum Row {
    Waits(Waiting),
    Connected(Box<Client>),
}

/// Clients and clients that wait for a server, of the daemon's list.
fn read(list: &str) -> serde_json::Result<(Vec<Client>, Vec<Waiting>)> {
    let (mut clients, mut waiting) = (Vec::new(), Vec::new());
    for row in serde_json::from_str::<Vec<Row>>(list)? {
        match row {
            Row::Waits(client) => waiting.push(client),
            Row::Connected(client) => clients.push(*client),
        }
    }
    Ok((in_use(clients), waiting))
}

/// For how long a client has waited for another one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Awaited {
    pid: i32,
    ms: f64,
}

/// The clients for which the time has grown, most first.
fn grown(now: &[Awaited], then: &[Awaited]) -> Vec<i32> {
    let before = |pid: i32| {
        let known = then.iter().find(|known| known.pid == pid);
        known.map_or(0.0, |known| known.ms)
    };
    let mut all: Vec<(i32, f64)> = now
        .iter()
        .map(|one| (one.pid, one.ms - before(one.pid)))
        .filter(|(_, time)| *time > 0.0)
        .collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.into_iter().map(|(pid, _)| pid).collect()
}

/// One sample.
#[derive(Clone, Debug, Serialize)]
pub struct Look {
    /// Time of the day.
    time: String,
    /// Seconds since the previous sample.
    interval: f64,
    clients: Vec<Client>,
    waiting: Vec<Waiting>,
    #[serde(skip)]
    at: Option<Instant>,
}

impl Look {
    /// Takes a sample; `before`: the previous sample, from which the rates are computed.
    fn take(ui: &mut Ui, before: Option<&Look>) -> anyhow::Result<Look> {
        let answer = ui.command(QUESTION)?;
        anyhow::ensure!(answer.ok, "{}", answer.text.trim_end());
        let (clients, waiting) = read(&answer.text)?;
        let mut look = Look {
            time: chrono::Local::now().format("%H:%M:%S").to_string(),
            interval: 0.0,
            clients,
            waiting,
            at: Some(Instant::now()),
        };
        if let Some(before) = before
            && let (Some(then), Some(now)) = (before.at, look.at)
        {
            look.interval = now.duration_since(then).as_secs_f64();
            look.compare(before);
        }
        Ok(look)
    }

    fn compare(&mut self, before: &Look) {
        let key = |client: &Client| (client.server, client.id);
        let then: BTreeMap<_, _> = before.clients.iter().map(|old| (key(old), old)).collect();
        let interval = self.interval;
        for client in &mut self.clients {
            let Some(old) = then.get(&key(client)) else {
                continue;
            };
            let share = |now: Option<f64>, then: Option<f64>| {
                Some(((now? - then?) / interval / 10.0).clamp(0.0, 100.0))
            };
            client.held_percentage = share(client.held_ms, old.held_ms);
            client.waited_percentage = share(client.waited_ms, old.waited_ms);
            client.gate_percentage = share(client.gate_ms, old.gate_ms);
            client.device_wait_percentage = share(client.device_wait_ms, old.device_wait_ms);
            client.memory_wait_percentage = share(client.memory_wait_ms, old.memory_wait_ms);
            let awaited = client.device_waited_for.as_ref();
            let awaited = awaited.zip(old.device_waited_for.as_ref());
            client.device_waits_for = awaited.map(|(now, then)| grown(now, then));
            let rate = |now: Option<u64>, then: Option<u64>| {
                Some(now?.saturating_sub(then?) as f64 / interval)
            };
            client.launches_per_second = rate(client.launches, old.launches);
            client.managed_bytes_per_second = rate(client.managed_bytes(), old.managed_bytes());
        }
    }

    fn sort(&mut self, by: Sort, reversed: bool) {
        let value = |client: &Client| match by {
            Sort::Gpu => client.held_percentage,
            Sort::Memory => client.memory.map(|bytes| bytes as f64),
            Sort::Launches => client.launches_per_second,
            Sort::Queue => client.queued.map(|queued| queued as f64),
            Sort::Wait => client.waited_percentage,
            Sort::Gate => client.gate_percentage,
            Sort::Dwait => client.device_wait_percentage,
            Sort::Mwait => client.memory_wait_percentage,
            Sort::Pid => Some(-f64::from(client.pid)),
        };
        // The sort is stable: clients with equal values stay in order of arrival. Unknown values come last.
        let value = |client: &Client| value(client).unwrap_or(f64::MIN);
        self.clients.sort_by(|a, b| value(b).total_cmp(&value(a)));
        if reversed {
            self.clients.reverse();
        }
    }
}

/// For a client on several devices, keeps the rows with memory in use, or else the first row.
fn in_use(rows: Vec<Client>) -> Vec<Client> {
    let uses = |row: &Client| row.memory.is_some_and(|bytes| bytes > 0);
    let key = |row: &Client| (row.server, row.id);
    let using: BTreeSet<_> = rows.iter().filter(|row| uses(row)).map(key).collect();
    // A named server may lack the first device.
    let mut idle = BTreeSet::new();
    let shown = |row: &Client| match using.contains(&key(row)) {
        true => uses(row),
        false => idle.insert(key(row)),
    };
    rows.into_iter().filter(shown).collect()
}

/// Runs `top` with these options.
///
/// # Errors
/// No daemon, a lost connection, or an error of the terminal.
pub fn run(settings: &Settings, options: &Options) -> anyhow::Result<()> {
    let mut ui = Ui::connect(settings)?;
    let terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    if terminal && !options.once && !options.json {
        return screen::run(ui, settings, options);
    }
    let mut look = Look::take(&mut ui, None)?;
    let mut pause = match options.once {
        true => options.interval,
        false => options.interval.min(FIRST),
    };
    loop {
        std::thread::sleep(pause);
        look = Look::take(&mut ui, Some(&look))?;
        look.sort(options.sort, false);
        let written = print(&look, options.json);
        match written {
            // The reader has closed the pipe.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written?,
        }
        if options.once {
            return Ok(());
        }
        pause = options.interval;
    }
}

fn print(look: &Look, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, look)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{}", columns::summary(look))?;
        for line in columns::table(look, WHOLE) {
            writeln!(out, "{}", line.trim_end())?;
        }
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(pid: i32, held_ms: f64, launches: u64) -> Client {
        Client {
            pid,
            id: pid as u64,
            held_ms: Some(held_ms),
            waited_ms: Some(0.0),
            gate_ms: Some(0.0),
            launches: Some(launches),
            memory: Some(1),
            ..Client::default()
        }
    }

    fn look(clients: Vec<Client>) -> Look {
        Look {
            time: "12:00:00".into(),
            interval: 2.0,
            clients,
            waiting: Vec::new(),
            at: None,
        }
    }

    #[test]
    fn rates_are_of_the_time_between() {
        let mut before = look(vec![client(1, 0.0, 100), client(2, 50.0, 0)]);
        let new = client(3, 9.0, 9);
        let mut now = look(vec![client(1, 500.0, 1100), client(2, 50.0, 4), new]);
        now.clients[1].gate_ms = Some(1500.0);
        let awaited = |all: &[(i32, f64)]| {
            let one = |(pid, ms): &(i32, f64)| Awaited { pid: *pid, ms: *ms };
            Some(all.iter().map(one).collect())
        };
        let (first, old) = (&mut now.clients[0], &mut before.clients[0]);
        (first.device_wait_ms, old.device_wait_ms) = (Some(600.0), Some(100.0));
        (first.memory_wait_ms, old.memory_wait_ms) = (Some(1300.0), Some(300.0));
        first.device_waited_for = awaited(&[(4, 300.0), (2, 250.0), (5, 50.0)]);
        old.device_waited_for = awaited(&[(4, 200.0), (5, 50.0)]);
        (first.managed_to_host_bytes, old.managed_to_host_bytes) = (Some(700), Some(100));
        (first.managed_to_device_bytes, old.managed_to_device_bytes) = (Some(900), Some(500));
        now.compare(&before);
        assert_eq!(now.clients[0].managed_bytes_per_second, Some(500.0));
        assert_eq!(now.clients[1].managed_bytes_per_second, None);
        assert_eq!(now.clients[0].device_wait_percentage, Some(25.0));
        assert_eq!(now.clients[0].memory_wait_percentage, Some(50.0));
        assert_eq!(now.clients[0].device_waits_for, Some(vec![2, 4]));
        assert_eq!(now.clients[1].device_waits_for, None);
        let rates: Vec<_> = now
            .clients
            .iter()
            .map(|client| (client.held_percentage, client.launches_per_second))
            .collect();
        let expected = [
            (Some(25.0), Some(500.0)),
            (Some(0.0), Some(2.0)),
            (None, None),
        ];
        assert_eq!(rates, expected);
        let order = |now: &mut Look, by, reversed| {
            now.sort(by, reversed);
            now.clients
                .iter()
                .map(|client| client.pid)
                .collect::<Vec<_>>()
        };
        assert_eq!(order(&mut now, Sort::Gpu, false), [1, 2, 3]);
        assert_eq!(order(&mut now, Sort::Pid, true), [3, 2, 1]);
        assert_eq!(order(&mut now, Sort::Launches, false), [1, 2, 3]);
        assert_eq!(order(&mut now, Sort::Dwait, false), [1, 2, 3]);
        assert_eq!(order(&mut now, Sort::Mwait, false), [1, 2, 3]);
        assert_eq!(order(&mut now, Sort::Gate, false), [2, 1, 3]);
        assert_eq!(now.clients[0].gate_percentage, Some(75.0));
    }

    #[test]
    fn a_client_has_a_row_for_each_device_that_it_uses() {
        let row = |id, device, memory| Client {
            id,
            device,
            memory: Some(memory),
            ..Client::default()
        };
        let rows = vec![
            row(1, 0, 0),
            row(1, 1, 5),
            row(2, 0, 0),
            row(2, 1, 0),
            row(3, 0, 1),
            row(3, 1, 1),
            row(4, 1, 0),
        ];
        let shown: Vec<_> = in_use(rows)
            .iter()
            .map(|row| (row.id, row.device))
            .collect();
        assert_eq!(shown, [(1, 1), (2, 0), (3, 0), (3, 1), (4, 1)]);
    }

    #[test]
    fn intervals() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "3601", "nan", "soon", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
