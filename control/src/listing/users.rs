//! `users`: the resources of each user, summed over all clients and servers.

use super::{Listing, user_name};
use crate::servers::Server;
use crate::usage::UsageBySession;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Totals of a user.
#[derive(Default)]
struct Sum {
    clients: usize,
    waiting: usize,
    /// Bytes of device memory by UUID of the device.
    memory: BTreeMap<String, u64>,
    pinned: u64,
    /// The usage of some client is unknown: its server does not answer.
    unknown: bool,
}

impl Sum {
    fn add(&mut self, server: &Server, session: u64, usage: &UsageBySession) {
        self.clients += 1;
        for device in &server.devices {
            self.memory.entry(device.uuid.clone()).or_default();
        }
        let Some(usage) = usage.get(&(server.pid, session)) else {
            self.unknown = true;
            return;
        };
        self.pinned += usage.host;
        for (ordinal, bytes) in &usage.memory {
            if let Some(device) = server.devices.get(*ordinal) {
                *self.memory.entry(device.uuid.clone()).or_default() += bytes;
            }
        }
    }
}

/// A row for each user and device, one without a device for a user whose clients only wait; nothing, not even a
/// header, without users. `waiting`: the user of each client that waits for a server.
pub fn users<'a>(
    servers: impl Iterator<Item = &'a Server>,
    waiting: impl Iterator<Item = u32>,
    usage: &UsageBySession,
) -> Listing {
    let mut sums: BTreeMap<u32, Sum> = BTreeMap::new();
    for server in servers {
        for (session, client) in server.sessions() {
            let sum = sums.entry(client.uid).or_default();
            sum.add(server, session, usage);
        }
    }
    for user in waiting {
        sums.entry(user).or_default().waiting += 1;
    }
    let mut table = String::new();
    let mut rows = Vec::new();
    for (user, sum) in &sums {
        let name = user_name(*user);
        let known = |bytes: u64| (!sum.unknown).then_some(bytes);
        let mut row = |device: Option<&String>, memory: u64| {
            let (memory, pinned) = (known(memory), known(sum.pinned));
            let _ = writeln!(
                table,
                "{user:<12}{:<17}{:<9}{:<9}{:<26}{:<14}{}",
                name.as_str().unwrap_or("-"),
                sum.clients,
                sum.waiting,
                // As much of the UUID as fits.
                device.map_or("-", |uuid| uuid.get(..22).unwrap_or(uuid)),
                mebibytes(memory),
                mebibytes(pinned)
            );
            rows.push(vec![
                json!(user),
                name.clone(),
                json!(sum.clients),
                json!(sum.waiting),
                json!(device),
                json!(memory),
                json!(pinned),
            ]);
        };
        for (uuid, bytes) in &sum.memory {
            row(Some(uuid), *bytes);
        }
        if sum.memory.is_empty() {
            row(None, 0);
        }
    }
    if !table.is_empty() {
        let header = format!(
            "{:<12}{:<17}{:<9}{:<9}{:<26}{:<14}PINNED\n",
            "UID", "USER", "CLIENTS", "WAITING", "DEVICE", "MEMORY"
        );
        table.insert_str(0, &header);
    }
    Listing {
        table,
        columns: &[
            "uid",
            "user",
            "clients",
            "waiting",
            "uuid",
            "memory",
            "pinned_host_memory",
        ],
        rows,
    }
}

fn mebibytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(
        || "-".into(),
        |bytes| format!("{:.1}M", bytes as f64 / f64::from(1 << 20)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::Format;

    #[test]
    fn who_only_waits_is_listed_without_a_device() {
        let none = UsageBySession::new();
        let listed = |waiting: &[u32]| users(std::iter::empty(), waiting.iter().copied(), &none);
        assert_eq!(listed(&[]).print(Format::Table), "");
        // No user has these ids.
        let both = listed(&[4_000_000_001, 4_000_000_000, 4_000_000_001]);
        let table = both.print(Format::Table);
        let words = |line: usize| -> Vec<&str> {
            let line = table.lines().nth(line).expect("a line");
            line.split_whitespace().collect()
        };
        let head = [
            "UID", "USER", "CLIENTS", "WAITING", "DEVICE", "MEMORY", "PINNED",
        ];
        assert_eq!(words(0), head);
        assert_eq!(words(1), ["4000000000", "-", "0", "1", "-", "0.0M", "0.0M"]);
        assert_eq!(words(2), ["4000000001", "-", "0", "2", "-", "0.0M", "0.0M"]);
        assert_eq!(both.print(Format::Csv).lines().count(), 3);
    }

    #[test]
    fn amounts_are_in_mebibytes() {
        assert_eq!(mebibytes(Some(3 << 19)), "1.5M");
        assert_eq!(mebibytes(None), "-");
    }
}
