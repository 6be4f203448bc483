//! The commands in order against what is expected, as fixtures/control/transcript.txt has it.

use mpsshim_tests::control_daemon::{Done, Place, wait_until};
use mpsshim_tests::programs::{Running, client};
use mpsshim_tests::scene::daemon_with;
use serde_json::Value;
use std::collections::BTreeMap;

const TRANSCRIPT: &str = include_str!("../../fixtures/control/transcript.txt");

/// Whether a line is as expected, where `{*}` stands for anything and space for any space.
fn fits(expected: &str, line: &str) -> bool {
    let (start, rest) = match expected.split_once("{*}") {
        None => return expected == line,
        Some(parts) => parts,
    };
    let Some(tail) = line.strip_prefix(start) else {
        return false;
    };
    (0..=tail.len())
        .filter(|at| tail.is_char_boundary(*at))
        .any(|at| fits(rest, &tail[at..]))
}

fn squeezed(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A run of the transcript.
struct Run {
    place: Place,
    names: BTreeMap<&'static str, String>,
    client: Option<Running>,
    /// Lines of each log that were looked at.
    seen: BTreeMap<String, usize>,
}

impl Run {
    fn start() -> Run {
        let place = daemon_with(&[("SOFTGPU_DEVICES", "1")]);
        let devices = place.control(&["device_query", "--format=json"]).out;
        let device: Value = serde_json::from_str(&devices).expect("JSON");
        let text = |name: &str| device[0][name].as_str().expect(name).to_owned();
        let (uuid, pci) = (text("uuid"), text("pci"));
        let bus = pci.split_once(':').expect("a domain").1.to_owned();
        let names = BTreeMap::from([
            ("short", uuid[..22].to_owned()),
            ("pci", format!("{}.00", bus_id(&pci))),
            ("name", text("name")),
            ("uid", place.uid().to_string()),
            ("uuid", uuid),
            ("bus", bus),
        ]);
        Run {
            place,
            names,
            client: None,
            seen: BTreeMap::new(),
        }
    }

    fn fill(&self, line: &str) -> String {
        let fill = |line: String, (name, value): (&&str, &String)| {
            line.replace(&format!("{{{name}}}"), value)
        };
        self.names.iter().fold(line.to_owned(), fill)
    }

    fn ask(&self, command: &str) -> Done {
        self.place.control_stdin(&format!("{command}\n"))
    }

    fn clients(&self) -> String {
        self.ask(&format!("get_client_list {}", self.names["server"]))
            .out
    }

    fn perform(&mut self, directive: &str) {
        match directive.split_once(' ').unwrap_or((directive, "")) {
            ("@server", uid) => {
                assert_eq!(self.ask(&format!("start_server -uid {uid}")).out, "");
                let server = self.ask("get_server_list").out.trim().to_owned();
                wait_until("the server is ready", || {
                    self.ask(&format!("get_server_status {server}")).out == "ACTIVE\n"
                });
                self.names.insert("server", server);
            }
            ("@client", _) => {
                let run = Running::start_until(&mut client(&self.place, &["work"]), "busy");
                self.names.insert("client", run.pid().to_string());
                self.client = Some(run);
                wait_until("the client is listed", || !self.clients().is_empty());
            }
            ("@end", _) => {
                drop(self.client.take());
                wait_until("no client is listed", || self.clients().is_empty());
            }
            _ => panic!("{directive}?"),
        }
    }

    /// Looks for the next line of a log.
    fn expect_log(&mut self, name: &str, expected: &str) {
        // The daemon's last line comes after its last answer.
        let mut found = None;
        let from = self.seen.get(name).copied().unwrap_or(0);
        let place = &self.place;
        wait_until(
            &format!("{name} has {expected:?} after line {from}"),
            || {
                let lines = place.log_after_stamp(name);
                let fits = |line: &String| {
                    let text = line.split_once("] ").map_or("", |(_, text)| text);
                    fits(expected, text)
                };
                found = lines.iter().skip(from).position(fits);
                found.is_some()
            },
        );
        let next = from + found.expect("found") + 1;
        self.seen.insert(name.to_owned(), next);
    }
}

/// As `device_query` writes `0000:00:06.0`, without the function's second digit.
fn bus_id(pci: &str) -> String {
    let (bus, device) = pci.rsplit_once(':').expect("a bus");
    format!("{bus}.{}", device.trim_end_matches(".0"))
}

#[test]
fn the_transcript() {
    let mut run = Run::start();
    let lines = TRANSCRIPT.lines().filter(|line| !line.starts_with('#'));
    let mut lines = lines.filter(|line| !line.is_empty()).peekable();
    let mut commands = 0;
    while let Some(line) = lines.next() {
        let line = run.fill(line);
        if let Some(command) = line.strip_prefix("> ") {
            commands += 1;
            let done = run.ask(command);
            assert_eq!(done.code, 0, "{command}: {}", done.err);
            // Empty lines only set parts apart.
            let mut answer = done.out.lines().filter(|line| !line.is_empty());
            let follows = |line: &&str| !line.starts_with(['>', '@']) && !line.starts_with("log ");
            while let Some(expected) = lines.next_if(follows) {
                let expected = run.fill(expected);
                let said = answer.next().unwrap_or("nothing");
                let same = fits(&expected, said) || fits(&squeezed(&expected), &squeezed(said));
                assert!(same, "{command}: {said:?} instead of {expected:?}");
            }
            assert_eq!(answer.next(), None, "{command}");
        } else if let Some((name, text)) = line
            .strip_prefix("log ")
            .and_then(|rest| rest.split_once(' '))
        {
            run.expect_log(name, text);
        } else {
            run.perform(&line);
        }
    }
    assert!(commands > 70);
}

#[test]
fn every_command_is_in_the_transcript() {
    use mpsshim_control::commands::TABLE;
    // Of NVIDIA's daemon only release 615 has the last two.
    let ours = [
        "get_active_thread_percentage_all",
        "set_active_thread_percentage_all",
        "get_client_weight",
        "set_client_weight",
        "users",
        "top",
        "trace",
        "help",
        "info",
        "reopen_logs",
        "restart_server",
        "suspend_client",
        "resume_client",
        "quarantine",
        "get_quantum",
        "set_quantum",
        "get_default_quantum",
        "set_default_quantum",
        "get_user_device_pinned_mem_limit",
        "set_user_device_pinned_mem_limit",
        "get_default_device_mem_guarantee",
        "set_default_device_mem_guarantee",
        "get_device_mem_guarantee",
        "set_device_mem_guarantee",
        "get_user_device_mem_guarantee",
        "set_user_device_mem_guarantee",
        "get_oversubscription",
        "set_oversubscription",
        "get_scheduling",
        "get_user_weight",
        "set_user_weight",
        "set_scheduling",
        "sm_partition",
        "lspart",
    ];
    for row in TABLE.iter().filter(|row| !ours.contains(&row.name)) {
        let given = |line: &str| {
            line.strip_prefix("> ")?
                .split_whitespace()
                .next()
                .map(str::to_owned)
        };
        let found = TRANSCRIPT
            .lines()
            .filter_map(given)
            .any(|name| name == row.name);
        assert!(found, "{}", row.name);
    }
}
