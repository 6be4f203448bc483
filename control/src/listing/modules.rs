//! Lists of interface 3: tables with a column for each field.

use super::{Listing, field, namespace, program};
use crate::commands::Format;
use crate::modules::{CLIENT_FIELDS, Form};
use crate::servers::Server;
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::named::DEFAULT_NAMESPACE;
use mpsshim_model::partitions::{Partitions, name};
use serde_json::{Value, json};

/// A row of a list; the values are in the order of its columns.
pub type ModuleRow = Vec<Value>;

/// Columns of `device list`.
const DEVICE_COLUMNS: &[&str] = &[
    "ordinal",
    "server",
    "pci-id",
    "uuid",
    "name",
    "total-sms",
    "total-chunks",
    "attributes",
];

/// Columns of `sm-partition list`.
pub const PARTITION_COLUMNS: &[&str] = &[
    "name",
    "device",
    "state",
    "chunks",
    "sm-count",
    "visible-uuid",
    "server",
];

impl Listing {
    /// Prints rows with these columns.
    pub fn of_module(columns: &'static [&'static str], rows: Vec<ModuleRow>, form: Form) -> String {
        let listing = Listing {
            table: String::new(),
            columns,
            rows,
        };
        match form.format {
            Format::Table => listing.aligned(form.header),
            Format::Csv => listing.csv(form.header),
            Format::Json => listing.print(Format::Json),
        }
    }

    /// Columns as wide as their longest cell. A cell without a value is `-`.
    fn aligned(&self, header: bool) -> String {
        let names = self.columns.iter().map(|name| name.to_uppercase());
        let cells = |row: &ModuleRow| -> Vec<String> {
            let texts = row.iter().map(field);
            let filled = texts.map(|text| if text.is_empty() { "-".into() } else { text });
            filled.collect()
        };
        let header = header.then(|| names.collect());
        let lines: Vec<Vec<String>> = header
            .into_iter()
            .chain(self.rows.iter().map(cells))
            .collect();
        let width = |at: usize| lines.iter().map(|line| line[at].chars().count()).max();
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|at| width(at).unwrap_or(0))
            .collect();
        let print = |line: &Vec<String>| {
            let cells = line.iter().zip(&widths);
            let cells: Vec<String> = cells
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            cells.join("  ").trim_end().to_owned()
        };
        let lines: Vec<String> = lines.iter().map(print).collect();
        lines.join("\n")
    }
}

/// `client list`: a row for each client and device of a server, which has this name.
pub fn rows_of_clients(server: &Server, name: &str) -> Vec<ModuleRow> {
    let mut rows = Vec::new();
    for (_, client) in server.sessions() {
        for device in &server.devices {
            let row = CLIENT_FIELDS.iter().map(|field| match *field {
                "pid" => json!(client.pid),
                "server" => json!(name),
                "device" => json!(device.uuid),
                "pci-id" => json!(device.pci),
                "maws-ns" => {
                    let default = server.named.map(|_| DEFAULT_NAMESPACE);
                    json!(client.namespace.as_deref().or(default))
                }
                "linux-ns" => json!(namespace(client.pid).parse::<u64>().ok()),
                _ => json!(program(client)),
            });
            rows.push(row.collect());
        }
    }
    rows
}

/// `sm-partition list`: a row for each partition of a table and, with `all`, for the rest of each device. The table is that
/// of users' servers unless its server has a name. `is_created`: whether a server has the partitions of a device.
pub fn rows_of_partitions<'a>(
    devices: impl IntoIterator<Item = &'a DeviceInfo>,
    (server, partitions): (Option<&str>, &Partitions),
    is_created: impl Fn(&DeviceInfo) -> bool,
    all: bool,
) -> Vec<ModuleRow> {
    let mut rows = Vec::new();
    for device in devices {
        let (uuid, chunks) = (&device.uuid, device.chunks);
        let state = if is_created(device) {
            "created"
        } else {
            "configured"
        };
        for (id, own) in partitions.of(uuid) {
            let count = own.len() as u32;
            rows.push(vec![
                json!(partitions.name_of(uuid, id)),
                json!(uuid),
                json!(state),
                json!(count),
                json!(count * chunks.size),
                json!(name(uuid, id)),
                json!(server),
            ]);
        }
        let used = partitions.used(uuid).len() as u32;
        if all {
            rows.push(vec![
                Value::Null,
                json!(uuid),
                json!("unallocated"),
                json!(chunks.count.saturating_sub(used)),
                json!(chunks.multiprocessors.saturating_sub(used * chunks.size)),
                Value::Null,
                json!(server),
            ]);
        }
    }
    rows
}

/// `device list`: the devices of each list, which is a server's unless it has no name.
pub fn rows_of_devices(lists: &[(Option<String>, &[DeviceInfo])], form: Form) -> String {
    let row = |server: &Option<String>, ordinal: usize, device: &DeviceInfo| {
        let attributes = device.is_exclusive();
        let attributes = attributes.then(|| device.compute_mode.to_string());
        vec![
            json!(ordinal),
            json!(server),
            json!(device.pci),
            json!(device.uuid),
            json!(device.name),
            json!(device.chunks.multiprocessors),
            json!(device.chunks.count),
            json!(attributes.unwrap_or_else(|| "N/A".to_owned())),
        ]
    };
    let rows = lists.iter().flat_map(|(server, devices)| {
        let devices = devices.iter().enumerate();
        devices.map(move |(ordinal, device)| row(server, ordinal, device))
    });
    Listing::of_module(DEVICE_COLUMNS, rows.collect(), form)
}
