//! Lists that commands print: in the format of NVIDIA's daemon, or as rows with a name for each column.

mod modules;
mod partitions;
mod quarantine;
mod users;

pub use modules::{
    ModuleRow, PARTITION_COLUMNS, rows_of_clients, rows_of_devices, rows_of_partitions,
};
pub use partitions::partitions;
pub use quarantine::quarantine;
pub use users::users;

use super::commands::Format;
use super::servers::{Client, Server, Wait};
use super::usage::UsageBySession;
use crate::library;
use crate::settings::Settings;
use mpsshim_model::amount;
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::limits::{Limits, ManagedUsage, MemoryBound, MoveUsage, Percentage, Usage};
use mpsshim_model::mode::Modes;
use mpsshim_model::policy::{ByUser, UserWeights, Users};
use nix::unistd::{Uid, User};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::fs;

/// The answer to a command that prints a list.
#[derive(Debug, PartialEq)]
pub struct Listing {
    /// As NVIDIA's daemon prints it.
    table: String,
    columns: &'static [&'static str],
    rows: Vec<Vec<Value>>,
}

impl Listing {
    /// The text in a format.
    pub fn print(&self, format: Format) -> String {
        match format {
            Format::Table => self.table.clone(),
            Format::Csv => self.csv(true),
            Format::Json => {
                let object = |row: &Vec<Value>| {
                    let fields = self.columns.iter().map(|name| (*name).to_owned());
                    Value::Object(fields.zip(row.iter().cloned()).collect::<Map<_, _>>())
                };
                Value::Array(self.rows.iter().map(object).collect()).to_string()
            }
        }
    }

    fn csv(&self, header: bool) -> String {
        let mut writer = csv::Writer::from_writer(Vec::new());
        // Writing to memory cannot fail, and all rows are as long as the header.
        let mut written = match header {
            true => writer.write_record(self.columns),
            false => Ok(()),
        };
        for row in &self.rows {
            written = written.and_then(|()| writer.write_record(row.iter().map(field)));
        }
        let bytes = written.ok().and_then(|()| writer.into_inner().ok());
        String::from_utf8(bytes.unwrap_or_default()).unwrap_or_default()
    }

    /// A list whose table has these lines.
    pub fn of_lines(
        columns: &'static [&'static str],
        rows: Vec<Vec<Value>>,
        lines: impl Iterator<Item = String>,
    ) -> Listing {
        Listing {
            table: lines.collect::<Vec<_>>().join("\n"),
            columns,
            rows,
        }
    }
}

/// A field of a csv row. Lists of clients and times become `1:2.5 3:4`, process ids and milliseconds.
fn field(value: &Value) -> String {
    let joined = |values: &mut dyn Iterator<Item = &Value>, by: &str| {
        values.map(field).collect::<Vec<_>>().join(by)
    };
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(all) => joined(&mut all.iter(), " "),
        Value::Object(fields) => {
            let named = ["pid", "ms"].iter().filter_map(|name| fields.get(*name));
            joined(&mut named.into_iter(), ":")
        }
        other => other.to_string(),
    }
}

fn user_name(uid: u32) -> Value {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or(Value::Null, |user| user.name.into())
}

fn number(percentage: Percentage) -> f64 {
    // A percentage is printed as a number.
    percentage.to_string().parse().unwrap_or_default()
}

/// With one digit, as NVIDIA's daemon does.
fn tenths(percentage: Percentage) -> String {
    format!("{:.1}", number(percentage))
}

/// State of the daemon, for `info`.
pub struct Info<'a> {
    /// Settings of the daemon, with its directories.
    pub settings: &'a Settings,
    /// Modes of clients that do not request one.
    pub modes: Modes,
    /// Whose clients one server takes.
    pub users: Users,
    /// How many servers there are.
    pub servers: usize,
    /// How many clients they have.
    pub clients: usize,
    /// `None`: not known yet.
    pub devices: Option<&'a [DeviceInfo]>,
}

/// `info`
pub fn info(info: &Info<'_>) -> Listing {
    const COLUMNS: [&str; 13] = [
        "pipe_directory",
        "log_directory",
        "pid",
        "uid",
        "user",
        "version",
        "mode",
        "users",
        "multi_user",
        "servers",
        "clients",
        "devices",
        "library",
    ];
    let uid = nix::unistd::geteuid().as_raw();
    let devices = info.devices.map(|devices| {
        let names = devices.iter();
        let names = names.map(|device| format!("{} {}", device.uuid, device.name));
        names.collect::<Vec<_>>().join("; ")
    });
    let library = library::find(info.settings.library.as_deref()).ok();
    let row = vec![
        json!(info.settings.pipe_directory.display().to_string()),
        json!(info.settings.log_directory.display().to_string()),
        json!(std::process::id()),
        json!(uid),
        user_name(uid),
        json!(env!("CARGO_PKG_VERSION")),
        json!(info.modes.to_string()),
        json!(info.users.to_string()),
        json!(info.users == Users::Together),
        json!(info.servers),
        json!(info.clients),
        json!(devices),
        json!(library.map(|path| path.display().to_string())),
    ];
    let text = |value: &Value| match value {
        Value::Null => "unknown".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let lines = COLUMNS.iter().zip(&row);
    let lines = lines.map(|(name, value)| format!("{name}: {}", text(value)));
    let lines: Vec<String> = lines.collect();
    Listing::of_lines(&COLUMNS, vec![row], lines.into_iter())
}

/// `get_server_list`. `gate_moments`, by process id, is needed for the rows only.
pub fn servers<'a>(
    servers: impl Iterator<Item = &'a Server> + Clone,
    gate_moments: &BTreeMap<i32, u64>,
) -> Listing {
    let row = |server: &Server| {
        vec![
            json!(server.pid),
            json!(server.uid),
            user_name(server.uid),
            json!(server.state.to_string()),
            json!(server.clients().count()),
            json!(gate_moments.get(&server.pid)),
            json!(server.quarantined.as_ref().map(|program| &program.name)),
        ]
    };
    Listing::of_lines(
        &[
            "pid",
            "uid",
            "user",
            "state",
            "clients",
            "gate_moments",
            "quarantined",
        ],
        servers.clone().map(row).collect(),
        servers.map(|server| server.pid.to_string()),
    )
}

/// `get_server_status`
pub fn status(server: &Server) -> Listing {
    let state = server.state.to_string();
    Listing {
        columns: &["pid", "state"],
        rows: vec![vec![json!(server.pid), json!(state)]],
        table: state,
    }
}

/// Mode and turns of a client, each `null` where it does not apply or the server does not report it.
fn turns(usage: Option<&Usage>) -> [Value; 5] {
    let turns = usage.and_then(|usage| usage.turns);
    let times = usage.and_then(Usage::held_and_waited);
    let milliseconds = |nanoseconds: u64| nanoseconds as f64 / 1e6;
    [
        json!(usage.map(|usage| usage.mode.name())),
        json!(turns.map(|turns| turns.turns)),
        json!(times.map(|(held, _)| milliseconds(held))),
        json!(times.map(|(_, waited)| milliseconds(waited))),
        json!(turns.map(|turns| turns.not_draining)),
    ]
}

/// A client's operations done and queued, each `null` where it does not apply or the server does not report it.
fn activity(usage: Option<&Usage>) -> [Value; 5] {
    let activity = usage.and_then(|usage| usage.activity);
    [
        json!(usage.map(|usage| usage.launches)),
        json!(activity.map(|activity| activity.copies)),
        json!(activity.map(|activity| activity.messages)),
        json!(activity.map(|activity| activity.queued)),
        json!(activity.map(|activity| activity.ring)),
    ]
}

/// A client's time at the gate, the clients that it waits for there, and the context that it works in; each `null`
/// where it does not apply or the server does not report it.
fn gate(usage: Option<&Usage>) -> [Value; 3] {
    let gate = usage.and_then(|usage| usage.gate.as_ref());
    let blockers = gate.map(|gate| {
        let clients = gate.blockers.iter().map(i32::to_string);
        let left = gate.blockers_left.then(|| "left".to_owned());
        clients.chain(left).collect::<Vec<_>>().join(" ")
    });
    [
        json!(gate.map(|gate| gate.waited_ns as f64 / 1e6)),
        json!(blockers),
        json!(gate.map(|gate| gate.device_context)),
    ]
}

/// A client's level, 1 served first, and the part of its device that it has had lately, estimated, in percent; each `null`
/// where it does not apply or the server does not report it.
fn level(usage: Option<&Usage>) -> [Value; 2] {
    let level = usage.and_then(|usage| usage.level);
    let thousandths = level.and_then(|level| level.thousandths);
    [
        json!(level.map(|level| level.level)),
        json!(thousandths.map(|thousandths| f64::from(thousandths) / 10.0)),
    ]
}

/// The milliseconds that a client waited for its devices, estimated, and for which clients; each `null` where it does not
/// apply or the server does not report it.
fn device_waits(usage: Option<&Usage>) -> [Value; 2] {
    let waits = usage.and_then(|usage| usage.device_waits.as_ref());
    // Estimates: microseconds are exact enough.
    let milliseconds = |nanoseconds: u64| (nanoseconds / 1000) as f64 / 1e3;
    let awaited = waits.map(|waits| {
        let all = waits.awaited.iter();
        let entry = |(pid, time): &(i32, u64)| json!({"pid": pid, "ms": milliseconds(*time)});
        all.map(entry).collect::<Vec<Value>>()
    });
    [
        json!(waits.map(|waits| milliseconds(waits.waited_ns))),
        json!(awaited),
    ]
}

/// Bytes of a client's device memory that were moved to host memory and back, and the milliseconds in which it had work and
/// waited for device memory; each `null` where it does not apply or the server does not report it.
fn moved(moves: Option<&MoveUsage>) -> [Value; 3] {
    [
        json!(moves.map(|moves| moves.to_host)),
        json!(moves.map(|moves| moves.to_device)),
        json!(moves.map(|moves| (moves.waited_ns / 1000) as f64 / 1e3)),
    ]
}

/// A client's managed memory: bytes on its devices and in host memory, bytes and copies to the host and to the devices,
/// faults, and the milliseconds that its threads waited for them; each `null` where it does not apply or the server does
/// not report it.
fn managed(usage: Option<&Usage>) -> [Value; 8] {
    let managed = usage.and_then(|usage| usage.managed);
    let of = |value: fn(ManagedUsage) -> u64| json!(managed.map(value));
    [
        of(|managed| managed.device),
        of(|managed| managed.host),
        of(|managed| managed.to_host.bytes),
        of(|managed| managed.to_host.copies),
        of(|managed| managed.to_device.bytes),
        of(|managed| managed.to_device.copies),
        of(|managed| managed.faults),
        json!(managed.map(|managed| (managed.waited_ns / 1000) as f64 / 1e3)),
    ]
}

/// Whether a client's session survives an unexpected end of its server, and the reasons if not; each `null` where it
/// does not apply or the server does not report it.
fn bonds(usage: Option<&Usage>) -> [Value; 2] {
    let bonds = usage.and_then(|usage| usage.bonds);
    [
        json!(bonds.map(|bonds| u8::from(bonds.is_empty()))),
        json!(bonds.map(|bonds| bonds.to_string())),
    ]
}

/// Whether the clients of a server are processes of a quarantined program.
fn is_apart(server: &Server) -> Value {
    json!(u8::from(server.quarantined.is_some()))
}

/// `get_client_list`. `usage` is needed for the rows only.
pub fn clients(server: &Server, usage: &UsageBySession) -> Listing {
    let row = |(session, client): (u64, &Client)| {
        let mut row = vec![
            json!(client.pid),
            json!(session),
            json!(client.uid),
            json!(program(client)),
        ];
        row.extend(turns(usage.get(&(server.pid, session))));
        row.push(is_apart(server));
        let usage = usage.get(&(server.pid, session));
        row.push(json!(usage.and_then(|usage| usage.moved_out)));
        let guarantees = usage.map(|usage| usage.memory_guarantee.values().sum::<u64>());
        row.push(json!(guarantees.filter(|bytes| *bytes > 0)));
        let moves = usage.and_then(|usage| usage.moves.as_ref());
        row.push(json!(moves.map(|moves| moves.fixed.values().sum::<u64>())));
        row.extend(moved(moves));
        row
    };
    Listing::of_lines(
        &[
            "pid",
            "id",
            "uid",
            "command",
            "mode",
            "turns",
            "held_ms",
            "waited_ms",
            "not_draining",
            "quarantined",
            "moved_out_memory",
            "memory_guarantee",
            "fixed_memory",
            "moved_to_host_bytes",
            "moved_to_device_bytes",
            "memory_wait_ms",
        ],
        server.sessions().map(row).collect(),
        server.clients().map(|pid| pid.to_string()),
    )
}

/// `get_device_client_list`: each device, and under it `PID.CONTEXT` of each client.
pub fn device_clients(servers: &[&Server]) -> Listing {
    let mut devices: BTreeMap<usize, &DeviceInfo> = BTreeMap::new();
    for server in servers {
        for (own, device) in server.devices.iter().enumerate() {
            devices.entry(server.ordinal(own)).or_insert(device);
        }
    }
    let mut table = String::new();
    let mut rows = Vec::new();
    for (ordinal, device) in devices {
        // Without the domain.
        let bus = device.pci.split_once(':').map_or("", |(_, bus)| bus);
        let _ = writeln!(table, "[{ordinal}] {bus}, {}", device.name);
        for server in servers.iter().filter(|server| {
            let own = server.own_ordinal(ordinal);
            own.is_some_and(|own| own < server.devices.len())
        }) {
            for (session, client) in server.sessions() {
                let _ = writeln!(table, "{}.{session}", client.pid);
                rows.push(vec![
                    json!(ordinal),
                    json!(device.uuid),
                    json!(server.pid),
                    json!(client.pid),
                    json!(session),
                ]);
            }
        }
    }
    Listing {
        table,
        columns: &["device", "uuid", "server", "pid", "id"],
        rows,
    }
}

/// Columns of [`processes`].
const PROCESS_COLUMNS: &[&str] = &[
    "pid",
    "id",
    "server",
    "device",
    "uuid",
    "namespace",
    "command",
    "uid",
    "user",
    "active_thread_percentage",
    "priority",
    "weight",
    "memory",
    "memory_limit",
    "pinned_host_memory",
    "mode",
    "turns",
    "held_ms",
    "waited_ms",
    "not_draining",
    "launches",
    "copies",
    "messages",
    "queued",
    "ring_bytes",
    "gate_ms",
    "gate_blockers",
    "device_context",
    "level",
    "device_share_percentage",
    "device_wait_ms",
    "device_waited_for",
    "managed_device_memory",
    "managed_host_memory",
    "managed_to_host_bytes",
    "managed_to_host_copies",
    "managed_to_device_bytes",
    "managed_to_device_copies",
    "managed_faults",
    "managed_wait_ms",
    "portable",
    "bound_by",
    "quarantined",
    "state",
    "waits_for",
    "compute_mode",
    "moved_out_memory",
    "memory_guarantee",
    "fixed_memory",
    "moved_to_host_bytes",
    "moved_to_device_bytes",
    "memory_wait_ms",
];

/// `ps`: a row for each client of each device, then one for each client that waits for a server; nothing, not even a
/// header, without clients. `only`: a process id of clients. `usage` is needed for the rows only.
pub fn processes<'a>(
    servers: impl Iterator<Item = &'a Server>,
    only: Option<i32>,
    waits: impl Iterator<Item = Wait>,
    usage: &UsageBySession,
) -> Listing {
    let mut table = String::new();
    let mut rows = Vec::new();
    for server in servers {
        let clients = server
            .sessions()
            .filter(|(_, client)| only.is_none_or(|only| only == client.pid));
        for (session, client) in clients {
            let (namespace, program) = (namespace(client.pid), program(client));
            let usage = usage.get(&(server.pid, session));
            for (ordinal, device) in server.devices.iter().enumerate() {
                let _ = writeln!(
                    table,
                    "{:<10}{session:<10}{:<15}{:<26}{namespace:<15}{program}",
                    client.pid,
                    server.pid,
                    // As much of the UUID as fits.
                    device.uuid.get(..22).unwrap_or(&device.uuid),
                );
                let mut row = vec![
                    json!(client.pid),
                    json!(session),
                    json!(server.pid),
                    json!(server.ordinal(ordinal)),
                    json!(device.uuid),
                    json!(namespace.parse::<u64>().ok()),
                    json!(program),
                    json!(client.uid),
                    user_name(client.uid),
                    json!(usage.map(|usage| number(usage.threads))),
                    json!(usage.map(|usage| usage.priority)),
                    json!(usage.map(|usage| usage.weight)),
                    json!(usage.map(|usage| usage.memory.get(&ordinal).copied().unwrap_or(0))),
                    json!(usage.and_then(|usage| usage.memory_limit.get(&ordinal))),
                    json!(usage.map(|usage| usage.host)),
                ];
                row.extend(turns(usage));
                row.extend(activity(usage));
                row.extend(gate(usage));
                row.extend(level(usage));
                row.extend(device_waits(usage));
                row.extend(managed(usage));
                row.extend(bonds(usage));
                let moved_out = usage.and_then(|usage| usage.moved_out);
                let state = match moved_out {
                    Some(1..) => "suspended",
                    _ => "connected",
                };
                row.extend([is_apart(server), json!(state), Value::Null]);
                row.push(json!(device.compute_mode.to_string()));
                row.push(json!(moved_out));
                let guarantee = usage.and_then(|usage| usage.memory_guarantee.get(&ordinal));
                row.push(json!(guarantee));
                let moves = usage.and_then(|usage| usage.moves.as_ref());
                let fixed = moves.map(|moves| moves.fixed.get(&ordinal).copied().unwrap_or(0));
                row.push(json!(fixed));
                row.extend(moved(moves));
                rows.push(row);
            }
        }
    }
    for wait in waits {
        let (namespace, program) = (namespace(wait.pid), wait.command.as_deref().unwrap_or("-"));
        let _ = writeln!(
            table,
            "{:<10}{:<10}{:<15}{:<26}{namespace:<15}{program} ({})",
            wait.pid, "-", "-", "waiting", wait.reason
        );
        let known = [
            ("pid", json!(wait.pid)),
            ("namespace", json!(namespace.parse::<u64>().ok())),
            ("command", json!(program)),
            ("uid", json!(wait.uid)),
            ("user", user_name(wait.uid)),
            ("state", json!("waiting")),
            ("waits_for", json!(wait.reason)),
        ];
        let field = |name: &&str| known.iter().find(|(known, _)| known == name);
        let value = |name| field(name).map_or(Value::Null, |(_, value)| value.clone());
        rows.push(PROCESS_COLUMNS.iter().map(value).collect());
    }
    if !table.is_empty() {
        let header = format!(
            "{:<10}{:<10}{:<15}{:<26}{:<15}COMMAND\n",
            "PID", "ID", "SERVER", "DEVICE", "NAMESPACE"
        );
        table.insert_str(0, &header);
    }
    Listing {
        table,
        columns: PROCESS_COLUMNS,
        rows,
    }
}

/// `device_query`: the devices of the daemon and of servers, by process id; `commas`: as with its option `--csv`.
pub fn devices(lists: &[(Option<i32>, &[DeviceInfo])], commas: bool) -> Listing {
    let mut table = String::new();
    let mut rows = Vec::new();
    for (server, devices) in lists {
        let title = server.map_or_else(|| "Default".into(), |pid| format!("Server {pid}"));
        let between = if table.is_empty() { "" } else { "\n" };
        let _ = writeln!(table, "{between}{title}");
        let mut line = |[ordinal, pci, uuid, name, attributes]: [&str; 5]| {
            let _ = if commas {
                writeln!(table, "{ordinal},{pci},{uuid},{name},{attributes}")
            } else {
                writeln!(
                    table,
                    "{ordinal:<16}{pci:<15}{uuid:<42}{name:<34}{attributes}"
                )
            };
        };
        line(["Device Ordinal", "PCI IDs", "UUID", "Name", "Attributes"]);
        for (ordinal, device) in devices.iter().enumerate() {
            let (pci, uuid, name) = (bus_id(&device.pci), &device.uuid, &device.name);
            // NVIDIA's daemon prints N/A.
            let attributes = match device.is_exclusive() {
                true => device.compute_mode.to_string(),
                false => "N/A".to_owned(),
            };
            line([&ordinal.to_string(), &pci, uuid, name, &attributes]);
            rows.push(vec![
                json!(server),
                json!(ordinal),
                json!(device.pci),
                json!(uuid),
                json!(name),
                json!(device.memory),
                json!(device.compute_mode.to_string()),
            ]);
        }
    }
    Listing {
        table,
        columns: &[
            "server",
            "device",
            "pci",
            "uuid",
            "name",
            "memory",
            "compute_mode",
        ],
        rows,
    }
}

/// NVIDIA's daemon prints `0000:00.06.00` for the PCI address usually written as `0000:00:06.0`.
fn bus_id(pci: &str) -> String {
    match pci.rsplit_once(':') {
        Some((bus, device)) => match device.split_once('.') {
            Some((device, function)) => format!("{bus}.{device}.{function:0>2}"),
            None => pci.to_owned(),
        },
        None => pci.to_owned(),
    }
}

/// `get_default_active_thread_percentage`, `get_active_thread_percentage`
pub fn percentage(server: Option<i32>, limits: &Limits) -> Listing {
    Listing {
        table: tenths(limits.threads),
        columns: &["server", "active_thread_percentage"],
        rows: vec![vec![json!(server), json!(number(limits.threads))]],
    }
}

/// `get_active_thread_percentage_all`
pub fn percentages<'a>(servers: impl Iterator<Item = &'a Server> + Clone) -> Listing {
    let row = |server: &Server| vec![json!(server.pid), json!(number(server.limits.threads))];
    Listing::of_lines(
        &["server", "active_thread_percentage"],
        servers.clone().map(row).collect(),
        servers.map(|server| format!("{} {}", server.pid, tenths(server.limits.threads))),
    )
}

/// `get_default_device_pinned_mem_limit`, `get_device_pinned_mem_limit`, and the same of guarantees
pub fn memory(
    bound: MemoryBound,
    server: Option<i32>,
    bytes: Option<u64>,
    (ordinal, device): (usize, &DeviceInfo),
) -> Listing {
    Listing {
        table: bytes.map_or_else(String::new, amount::print),
        columns: match bound {
            MemoryBound::Limit => &["server", "device", "uuid", "memory_limit"],
            MemoryBound::Guarantee => &["server", "device", "uuid", "memory_guarantee"],
        },
        rows: vec![vec![
            json!(server),
            json!(ordinal),
            json!(device.uuid),
            json!(bytes),
        ]],
    }
}

/// `get_user_device_pinned_mem_limit`, `get_user_device_mem_guarantee`
pub fn user_memory(
    bound: MemoryBound,
    uid: u32,
    limits: &Limits,
    (ordinal, device): (usize, &DeviceInfo),
) -> Listing {
    let devices = limits.user_memory_of(bound).get(&uid);
    let bytes = devices.and_then(|devices| devices.get(&ordinal));
    Listing {
        table: bytes.map_or_else(String::new, |bytes| amount::print(*bytes)),
        columns: match bound {
            MemoryBound::Limit => &["uid", "user", "device", "uuid", "memory_limit"],
            MemoryBound::Guarantee => &["uid", "user", "device", "uuid", "memory_guarantee"],
        },
        rows: vec![vec![
            json!(uid),
            user_name(uid),
            json!(ordinal),
            json!(device.uuid),
            json!(bytes),
        ]],
    }
}

/// `get_default_client_priority`
pub fn priority(limits: &Limits) -> Listing {
    Listing {
        table: limits.priority.to_string(),
        columns: &["priority"],
        rows: vec![vec![json!(limits.priority)]],
    }
}

/// `get_default_quantum`, `get_quantum`
pub fn quantum(server: Option<i32>, limits: &Limits) -> Listing {
    Listing {
        table: limits.quantum.to_string(),
        columns: &["server", "quantum_ms"],
        rows: vec![vec![json!(server), json!(limits.quantum.milliseconds())]],
    }
}

/// `get_scheduling`, `get_oversubscription`: the choice of users without one of their own, then a row for each user with
/// one; or the one in force for one user. `column`: its name in csv and json.
pub fn policy<T: Copy + fmt::Display>(
    column: &'static [&'static str; 3],
    policy: &ByUser<T>,
    only: Option<u32>,
) -> Listing {
    let mut all = match only {
        Some(uid) => vec![(Some(uid), policy.of(uid))],
        None => vec![(None, policy.default)],
    };
    if only.is_none() {
        let users = policy.users.iter();
        all.extend(users.map(|(uid, choice)| (Some(*uid), *choice)));
    }
    let row = |(uid, choice): &(Option<u32>, T)| {
        let name = uid.map_or(Value::Null, user_name);
        vec![json!(uid), name, json!(choice.to_string())]
    };
    Listing::of_lines(
        column,
        all.iter().map(row).collect(),
        all.iter().map(|(uid, choice)| match uid {
            Some(uid) if only.is_none() => format!("{uid} {choice}"),
            _ => choice.to_string(),
        }),
    )
}

/// `get_user_weight`: as [`policy`], and in csv and json also users without a weight whose work was held back, and how often
/// each one's was.
pub fn user_weights(
    weights: &UserWeights,
    only: Option<u32>,
    holds: &BTreeMap<u32, u64>,
) -> Listing {
    let table = policy(&["uid", "user", "weight"], weights, only).table;
    let users: BTreeSet<u32> = match only {
        Some(uid) => [uid].into(),
        None => weights.users.keys().chain(holds.keys()).copied().collect(),
    };
    let default = vec![
        Value::Null,
        Value::Null,
        json!(u32::from(weights.default)),
        Value::Null,
    ];
    let of_user = |uid: u32| {
        let holds = holds.get(&uid).copied().unwrap_or(0);
        vec![
            json!(uid),
            user_name(uid),
            json!(u32::from(weights.of(uid))),
            json!(holds),
        ]
    };
    let default = only.is_none().then_some(default);
    Listing {
        table,
        columns: &["uid", "user", "weight", "holds"],
        rows: default
            .into_iter()
            .chain(users.into_iter().map(of_user))
            .collect(),
    }
}

/// Columns of `get_scheduling`.
pub const SCHEDULING: &[&str; 3] = &["uid", "user", "scheduling"];
/// Columns of `get_oversubscription`.
pub const OVERSUBSCRIPTION: &[&str; 3] = &["uid", "user", "oversubscription"];

/// `get_client_weight`: of each session of a process.
pub fn weights(server: i32, client: i32, weights: &[(u64, u32)]) -> Listing {
    let row = |(session, weight): &(u64, u32)| {
        vec![json!(server), json!(client), json!(session), json!(weight)]
    };
    Listing::of_lines(
        &["server", "pid", "id", "weight"],
        weights.iter().map(row).collect(),
        weights.iter().map(|(_, weight)| weight.to_string()),
    )
}

/// Number of a process's PID namespace; `-` if it cannot be read. Unlike the command line, the kernel does not read it
/// from the memory of the process, which therefore cannot delay it.
fn namespace(pid: i32) -> String {
    let link = fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap_or_default();
    let text = link.to_string_lossy();
    let number = text
        .strip_prefix("pid:[")
        .and_then(|rest| rest.strip_suffix(']'));
    number.unwrap_or("-").to_owned()
}

/// The program as it was called, without characters that would garble the table; `-` if it could not be read.
fn program(client: &Client) -> String {
    if client.stuck {
        return "(ended; its work goes on)".into();
    }
    client.command.clone().unwrap_or_else(|| "-".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_model::policy::{Scheduling, SchedulingPolicy};

    #[test]
    fn a_process_is_described() {
        let own = std::process::id() as i32;
        assert!(namespace(own).parse::<u64>().is_ok());
        // No process has this id.
        assert_eq!(namespace(0), "-");
    }

    #[test]
    fn schedulings_are_listed() {
        let mut policy = SchedulingPolicy::default();
        assert_eq!(
            super::policy(SCHEDULING, &policy, None).print(Format::Table),
            "auto"
        );
        // No user has this id.
        let uid = 4_000_000_000;
        policy.users.insert(uid, Scheduling::Fifo);
        let print = |only, format| super::policy(SCHEDULING, &policy, only).print(format);
        assert_eq!(print(None, Format::Table), "auto\n4000000000 fifo");
        assert_eq!(print(Some(uid), Format::Table), "fifo");
        assert_eq!(print(Some(uid - 1), Format::Table), "auto");
        assert_eq!(
            print(None, Format::Csv),
            "uid,user,scheduling\n,,auto\n4000000000,,fifo\n"
        );
    }

    #[test]
    fn devices_are_listed_as_nvidia_lists_them() {
        let device = DeviceInfo {
            name: "NVIDIA H200".into(),
            uuid: "GPU-eec5798d-7946-0e14-f51f-ded3e76748d0".into(),
            pci: "0000:00:06.0".into(),
            memory: 1 << 30,
            compute_mode: Default::default(),
            chunks: Default::default(),
        };
        let (default, server) = ([device], []);
        let listing = devices(&[(None, &default), (Some(7), &server)], false);
        let header = "Device Ordinal  PCI IDs        UUID                                      \
                      Name                              Attributes\n";
        let row = "0               0000:00.06.00  GPU-eec5798d-7946-0e14-f51f-ded3e76748d0  \
                   NVIDIA H200                       N/A\n";
        assert_eq!(
            listing.print(Format::Table),
            format!("Default\n{header}{row}\nServer 7\n{header}")
        );
        let listing = devices(&[(None, &default)], true);
        assert_eq!(
            listing.print(Format::Table),
            "Default\nDevice Ordinal,PCI IDs,UUID,Name,Attributes\n\
             0,0000:00.06.00,GPU-eec5798d-7946-0e14-f51f-ded3e76748d0,NVIDIA H200,N/A\n"
        );
    }

    #[test]
    fn lists_within_a_row_are_compact_in_csv() {
        let waited_for = json!([{"pid": 12, "ms": 3.5}, {"pid": 7, "ms": 1.0}]);
        let listing = Listing {
            table: String::new(),
            columns: &["pid", "device_waited_for"],
            rows: vec![
                vec![json!(1), waited_for],
                vec![json!(2), json!([])],
                vec![json!(3), Value::Null],
            ],
        };
        assert_eq!(
            listing.print(Format::Csv),
            "pid,device_waited_for\n1,12:3.5 7:1.0\n2,\n3,\n"
        );
    }

    #[test]
    fn rows_as_csv_and_json() {
        let listing = Listing {
            table: "as NVIDIA has it".into(),
            columns: &["pid", "command", "limit"],
            rows: vec![
                vec![json!(1), json!("a, \"b\""), Value::Null],
                vec![json!(2), json!("c"), json!(33.3)],
            ],
        };
        assert_eq!(listing.print(Format::Table), "as NVIDIA has it");
        assert_eq!(
            listing.print(Format::Csv),
            "pid,command,limit\n1,\"a, \"\"b\"\"\",\n2,c,33.3\n"
        );
        let json: Value = serde_json::from_str(&listing.print(Format::Json)).expect("JSON");
        assert_eq!(
            json,
            json!([
                {"pid": 1, "command": "a, \"b\"", "limit": null},
                {"pid": 2, "command": "c", "limit": 33.3}
            ])
        );
    }
}
