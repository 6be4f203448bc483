//! Metrics for Prometheus: clients, users, servers and devices in the OpenMetrics text format.
//!
//! A thread of the daemon's process with a socket of its own. It queries the daemon like any user interface, so that
//! the daemon's main thread neither waits for a scrape nor handles HTTP, and a scrape exposes only data that every user
//! may see.

mod http;

use crate::settings::{METRICS, Settings};
use crate::ui::{Ui, UiError};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long to wait before devices that were not found are queried again.
const AGAIN: Duration = Duration::from_secs(60);

/// Why there are no metrics.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for metrics at {address} ({METRICS} or --metrics): {source}")]
pub struct MetricsError {
    address: SocketAddr,
    source: io::Error,
}

/// A socket for scrapes.
#[derive(Debug)]
pub struct Endpoint {
    listener: TcpListener,
    address: SocketAddr,
}

impl Endpoint {
    /// Listens. Port 0 selects a free port.
    ///
    /// # Errors
    /// The address is in use, or not an address of this machine.
    pub fn bind(address: SocketAddr) -> Result<Endpoint, MetricsError> {
        let failed = |source| MetricsError { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Endpoint { listener, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers scrapes from now on, in a separate thread, with the lists of the daemon of these settings and its count
    /// of faults.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn serve(self, settings: &Settings, faults: Arc<AtomicU64>) -> io::Result<()> {
        let mut exporter = Exporter {
            settings: settings.clone(),
            faults,
            ui: None,
            devices: Value::Null,
            asked: None,
        };
        let serve = move || http::serve(&self.listener, move || exporter.scrape());
        std::thread::Builder::new()
            .name("metrics".into())
            .spawn(serve)?;
        Ok(())
    }
}

/// Names and values of labels.
type Labels = Vec<(&'static str, String)>;

/// Queries the daemon and prints the metrics.
struct Exporter {
    settings: Settings,
    /// Number of server faults, counted by the daemon.
    faults: Arc<AtomicU64>,
    ui: Option<Ui>,
    /// Rows of `device_query`, which do not change, once they are known.
    devices: Value,
    /// When they were last queried.
    asked: Option<Instant>,
}

/// Answers of the daemon's list commands, each an array of rows.
struct Lists {
    clients: Value,
    users: Value,
    servers: Value,
    quarantine: Value,
    devices: Value,
    faults: u64,
}

impl Exporter {
    /// The text of one scrape.
    fn scrape(&mut self) -> anyhow::Result<String> {
        if self.devices.is_null() && self.asked.is_none_or(|at| at.elapsed() > AGAIN) {
            self.find_devices();
        }
        let lists = Lists {
            clients: self.ask("ps")?,
            users: self.ask("users")?,
            servers: self.ask("get_server_list")?,
            quarantine: self.ask("quarantine list")?,
            faults: self.faults.load(Ordering::Relaxed),
            devices: self.devices.clone(),
        };
        let mut text = String::new();
        encode(&mut text, &registry(&lists))?;
        Ok(text)
    }

    /// Queries the devices; without devices this may take long and is an error.
    fn find_devices(&mut self) {
        match self.ask("device_query") {
            Ok(devices) => self.devices = devices,
            Err(error) => tracing::debug!("no devices for metrics: {error}"),
        }
        self.asked = Some(Instant::now());
    }

    /// Runs a list command and returns its rows.
    fn ask(&mut self, command: &str) -> anyhow::Result<Value> {
        let line = format!("{command} --format=json");
        let mut ui = match self.ui.take() {
            Some(ui) => ui,
            None => Ui::connect(&self.settings)?,
        };
        let answer = match ui.command(&line) {
            // The daemon may have closed the idle connection to make room for others.
            Err(UiError::Gone) => {
                ui = Ui::connect(&self.settings)?;
                ui.command(&line)?
            }
            answer => answer?,
        };
        self.ui = Some(ui);
        anyhow::ensure!(answer.ok, "{}", answer.text.trim_end());
        Ok(serde_json::from_str(&answer.text)?)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
}
use Kind::{Counter as C, Gauge as G};

/// A metric that is one column of a list.
struct Metric {
    kind: Kind,
    /// Without prefix, unit and `_total`.
    name: &'static str,
    unit: Option<&'static str>,
    column: &'static str,
    /// Divisor that converts the column's unit to the metric's.
    divisor: f64,
    help: &'static str,
}

const fn metric(
    kind: Kind,
    name: &'static str,
    unit: Option<&'static str>,
    (column, divisor): (&'static str, f64),
    help: &'static str,
) -> Metric {
    Metric {
        kind,
        name,
        unit,
        column,
        divisor,
        help,
    }
}

const BYTES: Option<&str> = Some("bytes");
const SECONDS: Option<&str> = Some("seconds");
const RATIO: Option<&str> = Some("ratio");

/// Of a client, from `ps`.
const OF_CLIENT: &[Metric] = &[
    metric(
        C,
        "client_launches",
        None,
        ("launches", 1.0),
        "Launches of kernels and graphs; in direct mode whatever was submitted",
    ),
    metric(
        C,
        "client_copies",
        None,
        ("copies", 1.0),
        "Copies and memsets, in proxy mode",
    ),
    metric(
        C,
        "client_messages",
        None,
        ("messages", 1.0),
        "Messages that the server has executed, in proxy mode",
    ),
    metric(
        C,
        "client_turns",
        None,
        ("turns", 1.0),
        "Turns had, in direct mode",
    ),
    metric(
        C,
        "client_held",
        SECONDS,
        ("held_ms", 1e3),
        "Time with work on the device, sampled; in direct mode with a turn",
    ),
    metric(
        C,
        "client_waited",
        SECONDS,
        ("waited_ms", 1e3),
        "Time in which a message waited for dispatch, sampled; in direct mode a turn was waited for",
    ),
    metric(
        C,
        "client_gate_wait",
        SECONDS,
        ("gate_ms", 1e3),
        "Time in which a call waited at the gate until nothing is in flight, in proxy mode",
    ),
    metric(
        G,
        "client_device_context",
        None,
        ("device_context", 1.0),
        "The context of its devices that the client works in, in proxy mode; 1: the first, where clients usually are",
    ),
    metric(
        G,
        "client_level",
        None,
        ("level", 1.0),
        "Level by which the client's kernels are served, in proxy mode; 1: first, 0: in the order of submission",
    ),
    metric(
        G,
        "client_device_share",
        RATIO,
        ("device_share_percentage", 1e2),
        "Part of a device that the client has had in the last second, estimated, in proxy mode",
    ),
    metric(
        C,
        "client_device_wait",
        SECONDS,
        ("device_wait_ms", 1e3),
        "Time for which kernels got less of the device than they could fill, estimated, in proxy mode",
    ),
    metric(
        G,
        "client_moved_out_memory",
        BYTES,
        ("moved_out_memory", 1.0),
        "Device memory that is in host memory, in proxy mode",
    ),
    metric(
        C,
        "client_moved_to_host",
        BYTES,
        ("moved_to_host_bytes", 1.0),
        "Device memory moved to host memory, in proxy mode",
    ),
    metric(
        C,
        "client_moved_to_device",
        BYTES,
        ("moved_to_device_bytes", 1.0),
        "Device memory moved back to a device, in proxy mode",
    ),
    metric(
        C,
        "client_memory_wait",
        SECONDS,
        ("memory_wait_ms", 1e3),
        "Time in which the client had work and its device memory, or room for more, was lacking, in proxy mode",
    ),
    metric(
        G,
        "client_managed_device_memory",
        BYTES,
        ("managed_device_memory", 1.0),
        "Managed memory with home on a device, in proxy mode",
    ),
    metric(
        G,
        "client_managed_host_memory",
        BYTES,
        ("managed_host_memory", 1.0),
        "Managed memory in host memory, in proxy mode",
    ),
    metric(
        C,
        "client_managed_to_host",
        BYTES,
        ("managed_to_host_bytes", 1.0),
        "Managed memory copied to the host, where the program used it, in proxy mode",
    ),
    metric(
        C,
        "client_managed_to_host_copies",
        None,
        ("managed_to_host_copies", 1.0),
        "Copies of managed memory to the host, in proxy mode",
    ),
    metric(
        C,
        "client_managed_to_device",
        BYTES,
        ("managed_to_device_bytes", 1.0),
        "Managed memory copied to a device, since the program has changed it, in proxy mode",
    ),
    metric(
        C,
        "client_managed_to_device_copies",
        None,
        ("managed_to_device_copies", 1.0),
        "Copies of managed memory to a device, in proxy mode",
    ),
    metric(
        C,
        "client_managed_faults",
        None,
        ("managed_faults", 1.0),
        "Faults of the program's threads in managed memory, counted by the client, in proxy mode",
    ),
    metric(
        C,
        "client_managed_wait",
        SECONDS,
        ("managed_wait_ms", 1e3),
        "Time that the program's threads waited for faults in managed memory, counted by the client, in proxy mode",
    ),
    metric(
        G,
        "client_portable",
        None,
        ("portable", 1.0),
        "1: the client's session goes on in the next server if its server ends unexpectedly; proxy mode",
    ),
    metric(
        G,
        "client_queued_operations",
        None,
        ("queued", 1.0),
        "Operations on the device that are not known to be done, and messages held back, in proxy mode",
    ),
    metric(
        G,
        "client_ring",
        BYTES,
        ("ring_bytes", 1.0),
        "Messages that the server has not taken, in proxy mode",
    ),
    metric(
        G,
        "client_pinned_host_memory",
        BYTES,
        ("pinned_host_memory", 1.0),
        "Pinned host memory held, in proxy mode",
    ),
    metric(
        G,
        "client_active_threads",
        RATIO,
        ("active_thread_percentage", 1e2),
        "Share of the multiprocessors that the client may use",
    ),
    metric(
        G,
        "client_weight",
        None,
        ("weight", 1.0),
        "Share of dispatch, or of turns, in relation to the others'",
    ),
    metric(
        G,
        "client_priority",
        None,
        ("priority", 1.0),
        "0: normal, 1: below normal",
    ),
];
/// Of a client on a device, from `ps`.
const OF_CLIENT_ON_DEVICE: &[Metric] = &[
    metric(
        G,
        "client_memory",
        BYTES,
        ("memory", 1.0),
        "Device memory held",
    ),
    metric(
        G,
        "client_memory_limit",
        BYTES,
        ("memory_limit", 1.0),
        "Device memory that may be held; none without a limit",
    ),
    metric(
        G,
        "client_memory_guarantee",
        BYTES,
        ("memory_guarantee", 1.0),
        "Device memory that is never moved to host memory for other clients; none without a guarantee",
    ),
    metric(
        G,
        "client_fixed_memory",
        BYTES,
        ("fixed_memory", 1.0),
        "Device memory that cannot be moved to host memory, in proxy mode",
    ),
];
/// Of a user, from `users`.
const OF_USER: &[Metric] = &[
    metric(G, "user_clients", None, ("clients", 1.0), "Clients"),
    metric(
        G,
        "user_waiting_clients",
        None,
        ("waiting", 1.0),
        "Clients that wait for a server",
    ),
    metric(
        G,
        "user_pinned_host_memory",
        BYTES,
        ("pinned_host_memory", 1.0),
        "Pinned host memory of all clients, in proxy mode",
    ),
];
/// Of a user on a device, from `users`.
const OF_USER_ON_DEVICE: &[Metric] = &[metric(
    G,
    "user_memory",
    BYTES,
    ("memory", 1.0),
    "Device memory of all clients",
)];
/// Of a server, from `get_server_list`.
const OF_SERVER: &[Metric] = &[metric(
    G,
    "server_clients",
    None,
    ("clients", 1.0),
    "Clients",
)];
/// Of a server whatever its state, from `get_server_list`.
const OF_SERVER_GATE: &[Metric] = &[metric(
    C,
    "server_gate_moments",
    None,
    ("gate_moments", 1.0),
    "Moments with nothing in flight that the gate has opened for clients' calls",
)];
/// Of a device, from `device_query`.
const OF_DEVICE: &[Metric] = &[metric(
    G,
    "device_size",
    BYTES,
    ("memory", 1.0),
    "Memory of the device",
)];

type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;
type Counters = Family<Labels, Counter<f64, AtomicU64>>;

fn registry(lists: &Lists) -> Registry {
    let mut registry = Registry::with_prefix("mpsshim");
    let build = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    add(
        &mut registry,
        (G, "build_info", None, "Always 1"),
        [(build, 1.0)],
    );
    let rows = |list: &Value| list.as_array().cloned().unwrap_or_default();
    let programs = rows(&lists.quarantine).len();
    add(
        &mut registry,
        (
            G,
            "quarantined_programs",
            None,
            "Programs that have servers of their own since they may have caused a fault",
        ),
        [(Labels::new(), programs as f64)],
    );
    add(
        &mut registry,
        (
            C,
            "faults",
            None,
            "Contexts of servers that were lost because a kernel faulted",
        ),
        [(Labels::new(), lists.faults as f64)],
    );
    let clients = rows(&lists.clients);
    // Values of the client as a whole are repeated in each of its rows.
    let once = first_of_each(&clients, &["server", "id"]);
    columns(&mut registry, OF_CLIENT, &once, client);
    columns(&mut registry, OF_CLIENT_ON_DEVICE, &clients, |row| {
        [client(row), device(row)].concat()
    });
    let users = rows(&lists.users);
    let once = first_of_each(&users, &["uid"]);
    columns(&mut registry, OF_USER, &once, user);
    let on_device: Vec<Value> = users
        .into_iter()
        .filter(|row| !row["uuid"].is_null())
        .collect();
    columns(&mut registry, OF_USER_ON_DEVICE, &on_device, |row| {
        [user(row), vec![("uuid", text(&row["uuid"]))]].concat()
    });
    columns(&mut registry, OF_SERVER, &rows(&lists.servers), |row| {
        let labels = vec![
            ("server", text(&row["pid"])),
            ("state", text(&row["state"])),
        ];
        [labels, user(row)].concat()
    });
    columns(
        &mut registry,
        OF_SERVER_GATE,
        &rows(&lists.servers),
        |row| [vec![("server", text(&row["pid"]))], user(row)].concat(),
    );
    // The daemon's own devices; the servers' devices are among them.
    let devices: Vec<Value> = rows(&lists.devices)
        .into_iter()
        .filter(|row| row["server"].is_null())
        .collect();
    let named = |row: &Value| [device(row), vec![("name", text(&row["name"]))]].concat();
    columns(&mut registry, OF_DEVICE, &devices, named);
    of_devices(&mut registry, &devices, &clients);
    registry
}

/// Totals of all clients for each device.
fn of_devices(registry: &mut Registry, devices: &[Value], clients: &[Value]) {
    let all = [devices, clients].concat();
    let devices = first_of_each(&all, &["device", "uuid"]);
    let sum = |of: &Value, value: &dyn Fn(&Value) -> f64| {
        let on = clients.iter().filter(|client| client["uuid"] == of["uuid"]);
        (
            device(of),
            on.map(value).fold(0.0, |sum, value| sum + value),
        )
    };
    let memory = |client: &Value| client["memory"].as_f64().unwrap_or_default();
    let uses = |client: &Value| f64::from(memory(client) > 0.0);
    let held = devices.iter().map(|of| sum(of, &memory));
    let using = devices.iter().map(|of| sum(of, &uses));
    let help = "Device memory held by all clients";
    add(registry, (G, "device_memory", BYTES, help), held);
    let help = "Clients that hold memory of the device";
    add(registry, (G, "device_clients", None, help), using);
}

/// The first row for each combination of values in these columns.
fn first_of_each(rows: &[Value], columns: &[&str]) -> Vec<Value> {
    let mut seen = BTreeSet::new();
    let key = |row: &Value| {
        columns
            .iter()
            .map(|name| row[name].to_string())
            .collect::<Vec<_>>()
    };
    let first = rows.iter().filter(|row| seen.insert(key(row)));
    first.cloned().collect()
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn user(row: &Value) -> Labels {
    vec![("uid", text(&row["uid"])), ("user", text(&row["user"]))]
}

fn client(row: &Value) -> Labels {
    let columns = [
        ("server", "server"),
        ("session", "id"),
        ("pid", "pid"),
        ("program", "command"),
        ("mode", "mode"),
    ];
    let labels = columns.map(|(name, column)| (name, text(&row[column])));
    [labels.to_vec(), user(row)].concat()
}

fn device(row: &Value) -> Labels {
    ["device", "uuid"]
        .map(|name| (name, text(&row[name])))
        .to_vec()
}

/// Adds these metrics for these rows. Empty fields are left out: the value does not apply, or the server did not
/// answer.
fn columns(
    registry: &mut Registry,
    metrics: &[Metric],
    rows: &[Value],
    labels: impl Fn(&Value) -> Labels,
) {
    for metric in metrics {
        let value = |row: &Value| {
            let found = &row[metric.column];
            let found = match found.as_bool() {
                Some(is_so) => f64::from(is_so),
                None => found.as_f64()?,
            };
            Some((labels(row), found / metric.divisor))
        };
        let named = (metric.kind, metric.name, metric.unit, metric.help);
        add(registry, named, rows.iter().filter_map(value));
    }
}

fn add(
    registry: &mut Registry,
    (kind, name, unit, help): (Kind, &str, Option<&str>, &str),
    values: impl IntoIterator<Item = (Labels, f64)>,
) {
    let unit = unit.map(|unit| Unit::Other(unit.to_owned()));
    let (gauges, counters) = (Gauges::default(), Counters::default());
    for (labels, value) in values {
        match kind {
            Kind::Gauge => gauges.get_or_create(&labels).set(value),
            Kind::Counter => counters.get_or_create(&labels).inc_by(value),
        };
    }
    match (kind, unit) {
        (Kind::Gauge, Some(unit)) => registry.register_with_unit(name, help, unit, gauges),
        (Kind::Gauge, None) => registry.register(name, help, gauges),
        (Kind::Counter, Some(unit)) => registry.register_with_unit(name, help, unit, counters),
        (Kind::Counter, None) => registry.register(name, help, counters),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lists() -> Lists {
        let client = |id: u64, device: u64, memory: u64| {
            json!({"server": 10, "id": id, "pid": 100 + id, "command": "a \"b\"\\", "mode": "proxy", "uid": 0,
                   "user": "root", "device": device, "uuid": format!("GPU-{device}"), "memory": memory,
                   "memory_limit": null, "launches": 5, "held_ms": 1500.0, "turns": null,
                   "active_thread_percentage": 50.0, "gate_ms": 250.0, "device_context": id, "portable": 2 - id,
                   "managed_device_memory": 4096 * id, "managed_host_memory": 0, "managed_to_host_bytes": 10 * id,
                   "managed_to_device_copies": id, "memory_guarantee": (id == 2).then_some(64), "fixed_memory": 3, "moved_out_memory": 5,
                   "moved_to_host_bytes": 9, "moved_to_device_bytes": 4, "memory_wait_ms": 750.0, "managed_faults": 3, "managed_wait_ms": (id == 2).then_some(250.0),
                   "device_wait_ms": (id == 2).then_some(500.0), "level": id - 1, "device_share_percentage": (id == 2).then_some(25.0)})
        };
        Lists {
            clients: json!([client(1, 0, 7), client(1, 1, 0), client(2, 0, 1)]),
            users: json!([{"uid": 0, "user": "root", "clients": 2, "waiting": 1, "uuid": "GPU-0", "memory": 8}]),
            quarantine: json!([{"uid": 0, "program": "/opt/nbody"}]),
            faults: 3,
            servers: json!([{"pid": 10, "uid": 0, "user": "root", "state": "ACTIVE", "clients": 2,
                             "gate_moments": 4}]),
            devices: json!([{"server": null, "device": 1, "uuid": "GPU-1", "name": "X", "memory": 1024},
                            {"server": 10, "device": 1, "uuid": "GPU-1", "name": "X", "memory": 1024}]),
        }
    }

    #[test]
    fn lists_become_metrics() {
        let mut text = String::new();
        encode(&mut text, &registry(&lists())).expect("memory");
        let line = |name: &str, labels: &[&str]| {
            let mut found = text.lines().filter(|line| {
                line.starts_with(&format!("{name}{{"))
                    && labels.iter().all(|label| line.contains(label))
            });
            let line = found
                .next()
                .unwrap_or_else(|| panic!("{name} {labels:?} in {text}"));
            assert_eq!(found.next(), None, "{name}");
            line.rsplit(' ').next().expect("a value").to_owned()
        };
        let first = [
            "session=\"1\"",
            "pid=\"101\"",
            "program=\"a \\\"b\\\"\\\\\"",
            "uid=\"0\"",
        ];
        assert_eq!(line("mpsshim_client_launches_total", &first), "5.0");
        assert_eq!(line("mpsshim_client_held_seconds_total", &first), "1.5");
        assert_eq!(line("mpsshim_client_active_threads_ratio", &first), "0.5");
        assert_eq!(
            line(
                "mpsshim_client_memory_bytes",
                &["session=\"1\"", "device=\"0\""]
            ),
            "7.0"
        );
        assert_eq!(
            line("mpsshim_device_memory_bytes", &["device=\"0\""]),
            "8.0"
        );
        assert_eq!(
            line("mpsshim_device_memory_bytes", &["device=\"1\""]),
            "0.0"
        );
        assert_eq!(line("mpsshim_device_clients", &["device=\"0\""]), "2.0");
        assert_eq!(line("mpsshim_device_size_bytes", &["name=\"X\""]), "1024.0");
        assert_eq!(
            line("mpsshim_user_memory_bytes", &["uuid=\"GPU-0\""]),
            "8.0"
        );
        assert_eq!(
            line("mpsshim_user_waiting_clients", &["user=\"root\""]),
            "1.0"
        );
        assert_eq!(line("mpsshim_server_clients", &["state=\"ACTIVE\""]), "2.0");
        assert_eq!(line("mpsshim_quarantined_programs", &[]), "1.0");
        assert_eq!(line("mpsshim_faults_total", &[]), "3.0");
        assert_eq!(
            line("mpsshim_client_gate_wait_seconds_total", &first),
            "0.25"
        );
        let second = ["session=\"2\""];
        assert_eq!(line("mpsshim_client_level", &first), "0.0");
        assert_eq!(line("mpsshim_client_level", &second), "1.0");
        assert_eq!(line("mpsshim_client_device_share_ratio", &second), "0.25");
        let waited = line("mpsshim_client_device_wait_seconds_total", &second);
        assert_eq!(waited, "0.5");
        for (name, value) in [
            ("memory_guarantee_bytes", "64.0"),
            ("fixed_memory_bytes", "3.0"),
            ("moved_out_memory_bytes", "5.0"),
            ("moved_to_host_bytes_total", "9.0"),
            ("moved_to_device_bytes_total", "4.0"),
            ("memory_wait_seconds_total", "0.75"),
        ] {
            let name = format!("mpsshim_client_{name}");
            assert_eq!(line(&name, &second), value, "{name}");
        }
        for (name, value) in [
            ("device_memory_bytes", "8192.0"),
            ("host_memory_bytes", "0.0"),
            ("to_host_bytes_total", "20.0"),
            ("to_device_copies_total", "2.0"),
            ("faults_total", "3.0"),
            ("wait_seconds_total", "0.25"),
        ] {
            let name = format!("mpsshim_client_managed_{name}");
            assert_eq!(line(&name, &second), value, "{name}");
        }
        assert_eq!(line("mpsshim_client_portable", &first), "1.0");
        assert_eq!(line("mpsshim_client_portable", &second), "0.0");
        assert_eq!(line("mpsshim_client_device_context", &first), "1.0");
        assert_eq!(line("mpsshim_client_device_context", &second), "2.0");
        assert_eq!(
            line("mpsshim_server_gate_moments_total", &["server=\"10\""]),
            "4.0"
        );
        assert!(
            !text.contains("mpsshim_client_turns_total{"),
            "there is none"
        );
        assert!(text.contains("# TYPE mpsshim_client_launches counter\n"));
        assert!(text.contains("# UNIT mpsshim_client_memory_bytes bytes\n"));
        assert!(text.ends_with("# EOF\n"));
    }
}
