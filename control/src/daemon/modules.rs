//! Answers to the commands of interface 3.

use super::Daemon;
use super::answering::Outcome;
use crate::listing::{
    Listing, ModuleRow, PARTITION_COLUMNS, rows_of_clients, rows_of_devices, rows_of_partitions,
};
use crate::modules::{
    CLIENT_FIELDS, Command, FEATURES, Form, MemoryLimit, NAMESPACE_FIELDS, NO_AUDIT_LOG,
    NamespaceName, SERVER_COLUMNS, SERVER_FIELDS, SetLimits,
};
use crate::servers::{Definition, NamespacePath, OwnLimits, Server, Wanted, not_found};
use crate::wire::Answer;
use mpsshim_model::amount;
use mpsshim_model::device::{self, DeviceInfo};
use mpsshim_model::limits::Limits;
use mpsshim_model::named::Named;
use nix::unistd::geteuid;
use serde_json::{Value, json};
use std::collections::BTreeMap;

impl Daemon {
    /// Executes a command of interface 3 whose data is complete.
    pub(super) fn perform_module(&mut self, command: &Command) -> Outcome {
        match command {
            Command::Help(text) => Ok(Answer::done(text.clone())),
            Command::ApplyFile(file) => match self.apply(file) {
                Ok(()) => Ok(Answer::done("")),
                Err(mistakes) => Err(Answer::failed(mistakes.to_string())),
            },
            // Its file has been read, or the command was refused.
            Command::Apply(_) => Ok(Answer::done("")),
            Command::ServerCreate { name, uid, devices } => {
                let created = self.create_server(name, *uid, devices.as_deref());
                created.map_err(|why| Answer::failed(format!("server create: {why}")))?;
                Ok(Answer::done(""))
            }
            Command::ServerList(name, form) => {
                let mut rows = match name {
                    Some(name) => vec![self.fields_of(self.named(name)?)],
                    None => self.all_named().map(|one| self.fields_of(one)).collect(),
                };
                rows.iter_mut().for_each(|row| row.truncate(SERVER_COLUMNS));
                let columns = &SERVER_FIELDS[..SERVER_COLUMNS];
                Ok(Answer::done(Listing::of_module(columns, rows, *form)))
            }
            Command::ServerGet(name, field) => {
                let row = self.fields_of(self.named(name)?);
                Ok(Answer::done(values(SERVER_FIELDS, &[row], field)))
            }
            Command::NamespaceCreate(name, limits) => {
                let created = self.change_namespace(name, limits, true);
                created.map_err(|why| Answer::failed(format!("namespace create: {why}")))?;
                Ok(Answer::done(""))
            }
            Command::NamespaceSet(name, limits) => {
                let set = self.change_namespace(name, limits, false);
                set.map_err(|why| Answer::failed(format!("namespace set: {why}")))?;
                Ok(Answer::done(""))
            }
            Command::NamespaceList(server, form) => {
                let servers: Vec<&Definition> = match server {
                    None => self.servers.definitions().collect(),
                    Some(name) => {
                        let found = self.servers.created(name).map_err(Answer::failed)?;
                        vec![found]
                    }
                };
                let rows = servers.into_iter().flat_map(|server| {
                    let names = server.spaces().map(|space| space.name.as_str());
                    names.map(|name| self.fields_of_namespace(server, name))
                });
                let text = Listing::of_module(NAMESPACE_FIELDS, rows.collect(), *form);
                Ok(Answer::done(text))
            }
            Command::NamespaceGet(name, field) => {
                let server = self.servers.server_of(path_of(name));
                let server = server.map_err(Answer::failed)?;
                let row = self.fields_of_namespace(server, &name.name);
                Ok(Answer::done(values(NAMESPACE_FIELDS, &[row], field)))
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
            // These are answered when their processes and sessions have ended.
            Command::NamespaceDelete { name, force } => {
                self.delete_namespace(name, *force)?;
                Ok(Answer::done(""))
            }
            Command::ServerDelete { name, force } => {
                self.delete_server(name, *force)?;
                Ok(Answer::done(""))
            }
            Command::ServerSet { name, uid, limits } => {
                self.set_server(name, *uid, limits)?;
                Ok(Answer::done(""))
            }
            Command::ClientTerminate(pid) => {
                self.terminate_everywhere(*pid)?;
                Ok(Answer::done(""))
            }
            Command::Unchanged => Ok(Answer::done("")),
            Command::FeatureDescribe(only, form) => {
                let wanted = FEATURES
                    .iter()
                    .filter(|one| only.is_none_or(|only| only == one.name));
                let rows =
                    wanted.map(|one| vec![json!(one.name), json!("enabled"), json!(one.meaning)]);
                let columns = &["feature", "state", "description"];
                let text = Listing::of_module(columns, rows.collect(), *form);
                Ok(Answer::done(text))
            }
            Command::AccountingDescribe(form) => {
                let row = vec![json!("audit_log"), json!(false), json!(NO_AUDIT_LOG)];
                let columns = &["setting", "value", "description"];
                Ok(Answer::done(Listing::of_module(columns, vec![row], *form)))
            }
            Command::PartitionCreate {
                name,
                server,
                device,
                chunks,
                remainder,
            } => {
                let of = (name.as_str(), server.as_deref());
                let made = self.create_partition(of, (device, *chunks), *remainder);
                made.map_err(|why| Answer::failed(format!("sm-partition create: {why}")))?;
                Ok(Answer::done(""))
            }
            Command::PartitionDelete(name) => {
                let deleted = self.delete_partition(name);
                deleted.map_err(|why| Answer::failed(format!("sm-partition delete: {why}")))?;
                Ok(Answer::done(""))
            }
            Command::PartitionList { all, form } => {
                let rows = self.partition_rows(*all).map_err(Answer::failed)?;
                let text = Listing::of_module(PARTITION_COLUMNS, rows, *form);
                Ok(Answer::done(text))
            }
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

    fn create_partition(
        &mut self,
        (name, server): (&str, Option<&str>),
        (device, chunks): (&str, u32),
        remainder: bool,
    ) -> Result<(), String> {
        self.servers.partitions()?;
        let of = match server {
            Some(name) => self.servers.table_of(name)?,
            None => None,
        };
        let known = self.devices.known().unwrap_or_default();
        let device = known[find_device(known, device)?].clone();
        if remainder {
            check_remainder(&device)?;
        }
        (self.servers).add_partition(of, (&device, chunks), Some(name))?;
        Ok(())
    }

    fn delete_partition(&mut self, name: &str) -> Result<(), String> {
        self.servers.partitions()?;
        let found = self.servers.find_partition(name);
        let (of, uuid, id) = found.ok_or_else(|| {
            format!("Partition \"{name}\" not found; sm-partition list lists the partitions")
        })?;
        let id = id.to_string();
        let known = self.devices.known().unwrap_or_default();
        let device = known[find_device(known, uuid)?].clone();
        self.servers.remove_partition(of, &device, &id)
    }

    /// The rows of all tables of partitions.
    fn partition_rows(&self, all: bool) -> Result<Vec<ModuleRow>, String> {
        let known = self.devices.known().unwrap_or_default();
        let mut rows = Vec::new();
        for (server, partitions) in self.servers.tables()? {
            let has = |device: &&DeviceInfo| server.is_none_or(|one| one.named.has(device));
            let name = server.map(|one| one.named.name.as_str());
            let is_created = |device: &DeviceInfo| self.servers.has_partitions_of(server, device);
            let devices = known.iter().filter(has);
            rows.extend(rows_of_partitions(
                devices,
                (name, partitions),
                is_created,
                all,
            ));
        }
        Ok(rows)
    }

    /// Every server: the processes, then the servers that were created and have none now.
    fn all_named(&self) -> impl Iterator<Item = Known<'_>> {
        let processes = self.servers.iter().map(Known::Process);
        let stopped = self.servers.definitions().filter(|one| {
            let process = self.servers.by_name(&one.named.name);
            process.is_none()
        });
        processes.chain(stopped.map(Known::Stopped))
    }

    /// The server of this name.
    fn named(&self, name: &str) -> Result<Known<'_>, Answer> {
        let process = self.servers.by_name(name).map(Known::Process);
        let found = process.or_else(|| self.servers.defined(name).map(Known::Stopped));
        found.ok_or_else(|| Answer::failed(not_found(name)))
    }

    /// The fields of a server, in the order of [`SERVER_FIELDS`].
    fn fields_of(&self, known: Known<'_>) -> ModuleRow {
        let (name, limits) = match known {
            Known::Process(server) => (self.servers.name_of(server), server.limits.clone()),
            Known::Stopped(one) => (one.named.name.clone(), self.servers.limits_of(one)),
        };
        let process = match known {
            Known::Process(server) => Some(server),
            Known::Stopped(_) => None,
        };
        let pipe = &self.settings.pipe_directory;
        let pipe = match &limits.named {
            Some(named) => pipe.join(&named.name),
            None => pipe.clone(),
        };
        let named = limits.named.as_deref();
        let fields = SERVER_FIELDS.iter().map(|field| match *field {
            "name" => json!(name),
            "uid" => match known {
                Known::Process(server) => json!(server.uid),
                Known::Stopped(one) => json!(one.uid),
            },
            "pid" => json!(process.map(|server| server.pid)),
            "status" => {
                let status = process.map(|server| server.state.to_string());
                json!(status.unwrap_or_else(|| "STOPPED".to_owned()))
            }
            "pipe-directory" => json!(pipe.display().to_string()),
            "allowed-devices" => {
                let devices = named.and_then(Named::visible_devices);
                json!(devices.unwrap_or_else(|| "all".to_owned()))
            }
            "context-ids" => {
                let sessions = process.into_iter().flat_map(Server::sessions);
                let ids = sessions.map(|(session, _)| session);
                json!(ids.collect::<Vec<_>>())
            }
            "pinned-memory-limit" => json!(memory_text(&limits)),
            "active-thread-percentage" => json!(limits.threads.to_string()),
            _ => json!(limits.priority),
        });
        fields.collect()
    }

    fn create_server(
        &mut self,
        name: &str,
        uid: Option<u32>,
        devices: Option<&[String]>,
    ) -> Result<(), String> {
        let known = self.devices.known().unwrap_or_default();
        let devices = chosen_devices(known, devices)?;
        let used = devices.clone();
        let used = used.unwrap_or_else(|| known.iter().enumerate().collect());
        check_shared(used.into_iter())?;
        let wanted = Wanted {
            name,
            uid: uid.unwrap_or_else(|| geteuid().as_raw()),
            devices,
        };
        self.servers.create(wanted, self.directory.folder())
    }

    /// Whether a named server can share its devices with other servers.
    pub(super) fn check_shared(&self, named: &Named) -> Result<(), String> {
        let known = self.devices.known().unwrap_or_default();
        check_shared(
            known
                .iter()
                .enumerate()
                .filter(|(_, device)| named.has(device)),
        )
    }

    /// Sets user and limits of a server; returns the processes that end, with no sessions.
    pub(super) fn set_server(
        &mut self,
        name: &str,
        uid: Option<u32>,
        limits: &SetLimits,
    ) -> Result<Vec<(i32, Vec<u64>)>, Answer> {
        let ended = self.try_set_server(name, uid, limits);
        let ended = ended.map_err(|why| Answer::failed(format!("server set: {why}")))?;
        Ok(ended.into_iter().map(|pid| (pid, Vec::new())).collect())
    }

    fn try_set_server(
        &mut self,
        name: &str,
        uid: Option<u32>,
        limits: &SetLimits,
    ) -> Result<Vec<i32>, String> {
        let known = self
            .named(name)
            .map_err(|answer| answer.text.trim_end().to_owned())?;
        let named = match known {
            Known::Process(server) => server.limits.named.as_deref(),
            Known::Stopped(one) => Some(&one.named),
        };
        let new = self.own_limits(named, limits)?;
        if let Some(uid) = uid {
            self.servers.check_new_user(name, uid)?;
        }
        self.servers.set_limits_of(name, &new)?;
        Ok(uid.map_or_else(Vec::new, |uid| self.servers.change_user(name, uid)))
    }

    /// The fields of a namespace, in the order of [`NAMESPACE_FIELDS`].
    fn fields_of_namespace(&self, server: &Definition, name: &str) -> ModuleRow {
        let path = NamespacePath {
            server: &server.named.name,
            name,
        };
        let limits = self.servers.limits_of_namespace(server, path);
        let pipe = &self.settings.pipe_directory;
        let fields = NAMESPACE_FIELDS.iter().map(|field| match *field {
            "name" => json!(name),
            "server" => json!(path.server),
            "pipe-directory" => {
                let folder = pipe.join(path.server).join(name);
                json!(folder.display().to_string())
            }
            "pinned-memory-limit" => json!(memory_text(&limits)),
            "active-thread-percentage" => json!(limits.threads.to_string()),
            "client-priority" => json!(limits.priority),
            _ => json!(self.servers.sessions_in(server, path)),
        });
        fields.collect()
    }

    /// Creates a namespace, or sets its limits.
    fn change_namespace(
        &mut self,
        name: &NamespaceName,
        limits: &SetLimits,
        is_new: bool,
    ) -> Result<(), String> {
        let path = path_of(name);
        let server = match is_new {
            true => self.servers.created(path.server)?,
            false => self.servers.server_of(path)?,
        };
        let new = self.own_limits(Some(&server.named), limits)?;
        match is_new {
            true => self.servers.create_namespace(path, &new),
            false => self.servers.set_namespace(path, &new),
        }
    }

    /// Deletes a namespace; returns the sessions that end, by their servers' processes.
    pub(super) fn delete_namespace(
        &mut self,
        name: &NamespaceName,
        force: bool,
    ) -> Result<Vec<(i32, Vec<u64>)>, Answer> {
        let deleted = self.servers.delete_namespace(path_of(name), force);
        deleted.map_err(|why| Answer::failed(format!("namespace delete: {why}")))
    }

    pub(super) fn own_limits(
        &self,
        named: Option<&Named>,
        limits: &SetLimits,
    ) -> Result<OwnLimits, String> {
        let memory = limits.memory.as_ref();
        let memory = memory.map(|memory| self.memory_of(named, memory));
        Ok(OwnLimits {
            threads: limits.threads,
            priority: limits.priority,
            memory: memory.transpose()?,
        })
    }

    /// A limit of memory in bytes, by the ordinals of a server.
    fn memory_of(
        &self,
        named: Option<&Named>,
        limit: &MemoryLimit,
    ) -> Result<BTreeMap<usize, u64>, String> {
        let known = self.devices.known().unwrap_or_default();
        let own = |ordinal| match named {
            Some(named) => named.own_ordinal(ordinal),
            None => Some(ordinal),
        };
        match limit {
            MemoryLimit::None => Ok(BTreeMap::new()),
            MemoryLimit::Every(bytes) => {
                let devices = (0..known.len()).filter_map(own);
                Ok(devices.map(|device| (device, *bytes)).collect())
            }
            MemoryLimit::Devices(devices) => {
                let mut memory = BTreeMap::new();
                for (device, bytes) in devices {
                    let ordinal = own(find_device(known, device)?);
                    let ordinal =
                        ordinal.ok_or_else(|| format!("the server has no device {device}"))?;
                    if memory.insert(ordinal, *bytes).is_some() {
                        return Err(format!("device {device} is given twice"));
                    }
                }
                Ok(memory)
            }
        }
    }

    /// Deletes a server; returns its processes, with no sessions.
    pub(super) fn delete_server(
        &mut self,
        name: &str,
        force: bool,
    ) -> Result<Vec<(i32, Vec<u64>)>, Answer> {
        let deleted = self.servers.delete(name, force);
        let deleted = deleted.map_err(|why| Answer::failed(format!("server delete: {why}")))?;
        Ok(deleted.into_iter().map(|pid| (pid, Vec::new())).collect())
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
            Some(name) => match self.named(name)? {
                Known::Process(server) => self.rows_of_clients(std::iter::once(server)),
                Known::Stopped(_) => Vec::new(),
            },
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

/// A server, with or without a process.
#[derive(Clone, Copy)]
enum Known<'a> {
    Process(&'a Server),
    /// A named server, which starts with its next client.
    Stopped(&'a Definition),
}

fn path_of(name: &NamespaceName) -> NamespacePath<'_> {
    NamespacePath {
        server: &name.server,
        name: &name.name,
    }
}

/// The devices that are named, with the daemon's ordinals; `None`: none are.
pub(super) fn chosen_devices<'a>(
    known: &'a [DeviceInfo],
    devices: Option<&[String]>,
) -> Result<Option<Vec<(usize, &'a DeviceInfo)>>, String> {
    let Some(devices) = devices else {
        return Ok(None);
    };
    let mut chosen: Vec<(usize, &DeviceInfo)> = Vec::new();
    for wanted in devices {
        let ordinal = find_device(known, wanted)?;
        if chosen.iter().any(|(other, _)| *other == ordinal) {
            return Err(format!("device {wanted} is given twice"));
        }
        chosen.push((ordinal, &known[ordinal]));
    }
    Ok(Some(chosen))
}

/// Whether all multiprocessors of a device are in chunks.
fn check_remainder(device: &DeviceInfo) -> Result<(), String> {
    let all = device.chunks;
    match all.multiprocessors.saturating_sub(all.count * all.size) {
        0 => Ok(()),
        rest => Err(format!(
            "Device {} has {rest} multiprocessors in no chunk, which cannot be reserved; leave out --include-remainder",
            device.uuid
        )),
    }
}

/// Whether several servers can share these devices.
fn check_shared<'a>(
    mut devices: impl Iterator<Item = (usize, &'a DeviceInfo)>,
) -> Result<(), String> {
    match devices.find(|(_, info)| info.is_exclusive()) {
        Some((device, info)) => Err(format!(
            "device {device} is in {} mode, in which several servers cannot share it; set DEFAULT mode \
             (nvidia-smi -c DEFAULT)",
            info.compute_mode
        )),
        None => Ok(()),
    }
}

/// The ordinal of a device of the daemon.
pub(super) fn find_device(known: &[DeviceInfo], wanted: &str) -> Result<usize, String> {
    let found = device::find(known, wanted);
    found.map_err(|why| why.replace("device_query lists", "device list lists"))
}

/// Limits of memory in the form of `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`, by the daemon's ordinals.
fn memory_text(limits: &Limits) -> String {
    let named = limits.named.as_deref();
    let ordinal = |own: usize| named.and_then(|named| named.ordinal(own)).unwrap_or(own);
    let memory: BTreeMap<usize, u64> = limits
        .memory
        .iter()
        .map(|(own, bytes)| (ordinal(*own), *bytes))
        .collect();
    let texts = memory
        .iter()
        .map(|(device, bytes)| format!("{device}={}", amount::print(*bytes)));
    texts.collect::<Vec<_>>().join(",")
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

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_model::partitions::Chunks;

    #[test]
    fn multiprocessors_in_no_chunk_are_not_reserved() {
        let device = |multiprocessors| DeviceInfo {
            name: "A device".into(),
            uuid: "GPU-aa".into(),
            pci: "0000:00:06.0".into(),
            memory: 1 << 30,
            compute_mode: Default::default(),
            chunks: Chunks {
                multiprocessors,
                size: 8,
                count: 15,
            },
        };
        let why = check_remainder(&device(132)).expect_err("12 more");
        assert_eq!(
            why,
            "Device GPU-aa has 12 multiprocessors in no chunk, which cannot be reserved; leave out --include-remainder"
        );
        assert_eq!(check_remainder(&device(120)), Ok(()));
    }
}
