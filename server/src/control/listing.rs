//! What commands list, in the form that NVIDIA's daemon gives it.

use super::servers::Server;
use std::fmt::Write as _;
use std::fs;

/// `get_device_client_list`: each device, and under it `PID.CONTEXT` of each client.
pub fn device_clients(servers: &[&Server]) -> String {
    let devices = servers
        .iter()
        .map(|server| &server.devices)
        .max_by_key(|devices| devices.len());
    let mut text = String::new();
    for (ordinal, device) in devices.into_iter().flatten().enumerate() {
        // Without the domain.
        let bus = device.pci.split_once(':').map_or("", |(_, bus)| bus);
        let _ = writeln!(text, "[{ordinal}] {bus}, {}", device.name);
        for server in servers
            .iter()
            .filter(|server| server.devices.len() > ordinal)
        {
            for (session, pid) in server.sessions() {
                let _ = writeln!(text, "{pid}.{session}");
            }
        }
    }
    text.truncate(text.trim_end().len());
    text
}

/// `ps`: a row for each client of each device; nothing, not even a header, without clients.
pub fn processes<'a>(servers: impl Iterator<Item = &'a Server>, only: Option<i32>) -> String {
    let mut text = String::new();
    for server in servers {
        let clients = server
            .sessions()
            .filter(|(_, pid)| only.is_none_or(|only| only == *pid));
        for (session, pid) in clients {
            for device in &server.devices {
                let _ = writeln!(
                    text,
                    "{pid:<10}{session:<10}{:<15}{:<26}{:<15}{}",
                    server.pid,
                    // As much of a UUID as there is room for.
                    device.uuid.get(..22).unwrap_or(&device.uuid),
                    namespace(pid),
                    program(pid)
                );
            }
        }
    }
    if !text.is_empty() {
        let header = format!(
            "{:<10}{:<10}{:<15}{:<26}{:<15}COMMAND\n",
            "PID", "ID", "SERVER", "DEVICE", "NAMESPACE"
        );
        text.insert_str(0, &header);
    }
    text.truncate(text.trim_end().len());
    text
}

/// Number of a process's PID namespace; `-` where it cannot be seen.
fn namespace(pid: i32) -> String {
    let link = fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap_or_default();
    let text = link.to_string_lossy();
    let number = text
        .strip_prefix("pid:[")
        .and_then(|rest| rest.strip_suffix(']'));
    number.unwrap_or("-").to_owned()
}

/// The program as it was called; `-` where it cannot be seen. What would spoil the table is left out.
fn program(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
    let text: String = String::from_utf8_lossy(first)
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    if text.is_empty() { "-".into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_described() {
        let own = std::process::id() as i32;
        assert!(namespace(own).parse::<u64>().is_ok());
        assert_eq!(program(own), std::env::args().next().unwrap_or_default());
        // Nobody has this number.
        assert_eq!((namespace(0).as_str(), program(0).as_str()), ("-", "-"));
    }
}
