//! Answers to the commands of interface 3.

use super::Daemon;
use super::answering::Outcome;
use crate::listing::{Listing, ModuleRow, rows_of_clients, rows_of_devices};
use crate::modules::{CLIENT_FIELDS, Command, Form, SERVER_COLUMNS, SERVER_FIELDS};
use crate::servers::Server;
use crate::wire::Answer;
use mpsshim_model::amount;
use serde_json::{Value, json};

impl Daemon {
    /// Executes a command of interface 3 whose data is complete.
    pub(super) fn perform_module(&mut self, command: &Command) -> Outcome {
        match command {
            Command::Help(text) => Ok(Answer::done(text.clone())),
            Command::ServerList(name, form) => {
                let servers = match name {
                    Some(name) => vec![self.named(name)?],
                    None => self.servers.iter().collect(),
                };
                let rows = servers.into_iter().map(|server| {
                    let mut row = self.fields_of(server);
                    row.truncate(SERVER_COLUMNS);
                    row
                });
                let columns = &SERVER_FIELDS[..SERVER_COLUMNS];
                let text = Listing::of_module(columns, rows.collect(), *form);
                Ok(Answer::done(text))
            }
            Command::ServerGet(name, field) => {
                let row = self.fields_of(self.named(name)?);
                Ok(Answer::done(values(SERVER_FIELDS, &[row], field)))
            }
            Command::ClientList(server, form) => self.client_list(server.as_deref(), *form),
            Command::ClientGet(pid, field) => {
                let mut rows = self.rows_of_clients(self.servers.iter());
                rows.retain(|row| row[0] == json!(pid));
                if rows.is_empty() {
                    return Err(no_client(*pid));
                }
                Ok(Answer::done(values(CLIENT_FIELDS, &rows, field)))
            }
            Command::ClientTerminate(pid) => Err(no_client(*pid)),
            Command::DeviceList(form) => {
                let own = (None, self.devices.known().unwrap_or_default());
                let theirs = self.servers.iter().map(|server| {
                    let name = self.servers.name_of(server);
                    (Some(name), server.devices.as_slice())
                });
                let lists: Vec<_> = std::iter::once(own).chain(theirs).collect();
                Ok(Answer::done(rows_of_devices(&lists, *form)))
            }
        }
    }

    /// The server of this name.
    fn named(&self, name: &str) -> Result<&Server, Answer> {
        let found = self.servers.by_name(name);
        found.ok_or_else(|| {
            Answer::failed(format!(
                "Server \"{name}\" not found; server list lists the servers"
            ))
        })
    }

    /// The fields of a server, in the order of [`SERVER_FIELDS`].
    fn fields_of(&self, server: &Server) -> ModuleRow {
        let fields = SERVER_FIELDS.iter().map(|field| match *field {
            "name" => json!(self.servers.name_of(server)),
            "uid" => json!(server.uid),
            "pid" => json!(server.pid),
            "status" => json!(server.state.to_string()),
            "pipe-directory" => json!(self.settings.pipe_directory.display().to_string()),
            "allowed-devices" => json!("all"),
            "context-ids" => {
                let ids = server.sessions().map(|(session, _)| session);
                json!(ids.collect::<Vec<_>>())
            }
            "pinned-memory-limit" => {
                let limits = server.limits.memory.iter();
                let limits =
                    limits.map(|(device, bytes)| format!("{device}={}", amount::print(*bytes)));
                json!(limits.collect::<Vec<_>>().join(","))
            }
            "active-thread-percentage" => json!(server.limits.threads.to_string()),
            _ => json!(server.limits.priority),
        });
        fields.collect()
    }

    fn rows_of_clients<'a>(&self, servers: impl Iterator<Item = &'a Server>) -> Vec<ModuleRow> {
        let rows = servers.flat_map(|server| {
            let name = self.servers.name_of(server);
            rows_of_clients(server, &name)
        });
        rows.collect()
    }

    fn client_list(&self, server: Option<&str>, form: Form) -> Outcome {
        let rows = match server {
            Some(name) => self.rows_of_clients(std::iter::once(self.named(name)?)),
            None => self.rows_of_clients(self.servers.iter()),
        };
        let text = Listing::of_module(CLIENT_FIELDS, rows, form);
        Ok(Answer::done(text))
    }

    /// Tells each server that has the client to end it; returns the sessions, by the servers' process ids.
    pub(super) fn terminate_everywhere(&self, client: i32) -> Result<Vec<(i32, Vec<u64>)>, Answer> {
        let has_client = |server: &&Server| server.clients().any(|pid| pid == client);
        let mut all = Vec::new();
        for server in self.servers.all().filter(has_client) {
            let sessions = self.servers.terminate(server.pid, client);
            all.push((server.pid, sessions.map_err(Answer::failed)?));
        }
        match all.is_empty() {
            true => Err(no_client(client)),
            false => Ok(all),
        }
    }
}

fn no_client(pid: i32) -> Answer {
    Answer::failed(format!(
        "Client {pid} not found; client list lists the clients"
    ))
}

/// The different values of a field in these rows, one a line.
fn values(fields: &[&str], rows: &[ModuleRow], wanted: &str) -> String {
    let at = fields.iter().position(|field| *field == wanted);
    let values = rows.iter().filter_map(|row| row.get(at?));
    let mut lines: Vec<String> = Vec::new();
    for value in values {
        let line = match value {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            Value::Array(all) => {
                let texts = all.iter().map(Value::to_string);
                texts.collect::<Vec<_>>().join(" ")
            }
            other => other.to_string(),
        };
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.join("\n")
}
