//! `lspart`: the static partitions of the devices.

use super::Listing;
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::partitions::{Partitions, name};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// A row for each device, of its multiprocessors outside of partitions, and below it one for each of its partitions.
/// `is_in_use`: whether a partition of this name, or the rest of the device, has clients.
pub fn partitions(
    devices: &[DeviceInfo],
    partitions: &Partitions,
    is_in_use: impl Fn(&DeviceInfo, Option<&str>) -> bool,
) -> Listing {
    let mut rows = Vec::new();
    for device in devices {
        let (uuid, all) = (&device.uuid, device.chunks);
        let used = partitions.used(uuid).len() as u32;
        rows.push(vec![
            json!(uuid),
            Value::Null,
            json!(all.count.saturating_sub(used)),
            json!(used),
            json!(all.multiprocessors.saturating_sub(used * all.size)),
            json!(used * all.size),
            json!(is_in_use(device, None)),
        ]);
        for (id, chunks) in partitions.of(uuid) {
            let count = chunks.len() as u32;
            rows.push(vec![
                json!(uuid),
                json!(id),
                Value::Null,
                json!(count),
                Value::Null,
                json!(count * all.size),
                json!(is_in_use(device, Some(&name(uuid, id)))),
            ]);
        }
    }
    Listing {
        table: table(&rows),
        columns: &[
            "uuid",
            "partition",
            "free_chunks",
            "used_chunks",
            "free_multiprocessors",
            "used_multiprocessors",
            "in_use",
        ],
        rows,
    }
}

fn table(rows: &[Vec<Value>]) -> String {
    let text = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::Bool(true) => "Yes".to_owned(),
        Value::Bool(false) => "No".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let head = [
        "GPU",
        "PARTITION",
        "FREE CHUNKS",
        "USED CHUNKS",
        "FREE SMS",
        "USED SMS",
        "IN USE",
    ];
    let head = head.map(str::to_owned).to_vec();
    let lines = rows.iter().map(|row| row.iter().map(text).collect());
    let mut table = String::new();
    for line in std::iter::once(head).chain(lines) {
        let [uuid, partition, rest @ ..] = &line[..] else {
            continue;
        };
        let _ = write!(table, "{uuid:<42}{partition:<11}");
        let rest = rest.iter().map(|word| format!("{word:<13}"));
        let _ = writeln!(table, "{}", rest.collect::<String>().trim_end());
    }
    table
}
