//! The file of `-a`: servers, their namespaces and limits. It has the form that NVIDIA's release 615 reads.

use super::modules::{self, SetLimits};
use mpsshim_model::named::check_name;
use mpsshim_proto::nearest;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Longest file, bytes.
pub const FILE_LIMIT: usize = 1 << 20;
/// The form of the file that this program reads.
const VERSION: &str = "1.0";

/// Keys of limits, which servers and namespaces have.
pub const MEMORY: &str = "pinned_memory_limit";
/// Active-thread percentage.
pub const THREADS: &str = "active_thread_percentage";
/// Priority of clients.
pub const PRIORITY: &str = "client_priority";
/// The user of a server.
pub const UID: &str = "uid";
/// Devices of a server.
pub const DEVICES: &str = "allowed_devices";

const TOP_KEYS: &[&str] = &["schema_version", "servers", "features"];
const SERVER_KEYS: &[&str] = &[
    DEVICES,
    UID,
    MEMORY,
    THREADS,
    PRIORITY,
    "namespaces",
    "devices",
];
const NAMESPACE_KEYS: &[&str] = &[MEMORY, THREADS, PRIORITY];
/// The device of a `devices` table.
pub const UUID: &str = "uuid";
/// Static partitions of a device.
pub const PARTITIONS: &str = "sm_partitions";
const DEVICE_KEYS: &[&str] = &[UUID, PARTITIONS];
const PARTITION_KEYS: &[&str] = &["name", "chunks"];
const FEATURE_KEYS: &[&str] = &["memacct", "context-share"];

/// An error in the file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mistake {
    /// Line of the file, from 1.
    pub line: usize,
    /// The key, with those of its tables; empty: the file is not TOML.
    pub key: String,
    /// Description of the error.
    pub what: String,
}

/// All errors of a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Mistakes {
    /// Path of the file, as the user has given it.
    pub path: String,
    /// The errors; at least one.
    pub all: Vec<Mistake>,
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sorted: Vec<&Mistake> = self.all.iter().collect();
        sorted.sort();
        for (at, Mistake { line, key, what }) in sorted.into_iter().enumerate() {
            let end = if at == 0 { "" } else { "\n" };
            write!(f, "{end}{}:{line}: ", self.path)?;
            match key.is_empty() {
                true => write!(f, "{what}")?,
                false => write!(f, "{key}: {what}")?,
            }
        }
        Ok(())
    }
}

/// A table of the file: its name with those of the tables around it, and the lines of its keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Such as `servers.train`.
    pub name: String,
    /// Line of its name.
    line: usize,
    keys: BTreeMap<String, usize>,
}

impl Place {
    /// An error about a key, or about the whole table if it has no such key.
    pub fn mistake(&self, key: &str, what: impl Into<String>) -> Mistake {
        let (line, key) = match self.keys.get(key) {
            Some(line) => (*line, join(&self.name, key)),
            None => (self.line, self.name.clone()),
        };
        let what = what.into();
        Mistake { line, key, what }
    }
}

/// A namespace of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceEntry {
    /// Its name.
    pub name: String,
    /// Where it is in the file.
    pub place: Place,
    /// Its limits; absent ones stay as they are.
    pub limits: SetLimits,
}

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerEntry {
    /// Its name.
    pub name: String,
    /// Where it is in the file.
    pub place: Place,
    /// Its user; `None`: the daemon's for a new server, otherwise as it is.
    pub uid: Option<u32>,
    /// Its devices; `None`: all for a new server, otherwise as they are.
    pub devices: Option<Vec<String>>,
    /// Its limits; absent ones stay as they are.
    pub limits: SetLimits,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceEntry>,
    /// Its `devices` tables.
    pub device_tables: Vec<DeviceTable>,
}

/// `[[servers.NAME.devices]]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceTable {
    /// Where it is in the file.
    pub place: Place,
    /// The device.
    pub uuid: String,
    /// Its static partitions; `None`: none for a new server, otherwise as they are.
    pub partitions: Option<Vec<PartitionEntry>>,
}

/// A static partition of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionEntry {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Number of its chunks.
    pub chunks: u32,
}

/// A file without errors that can be found without a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerFile {
    /// Path, as the user has given it.
    pub path: String,
    /// Its servers, by name.
    pub servers: Vec<ServerEntry>,
}

fn join(table: &str, key: &str) -> String {
    match table.is_empty() {
        true => key.to_owned(),
        false => format!("{table}.{key}"),
    }
}

impl ServerFile {
    /// Parses a file.
    ///
    /// # Errors
    /// All errors that can be found without a daemon.
    pub fn parse(text: &str, path: &str) -> Result<ServerFile, Mistakes> {
        let mut reader = Reader {
            text,
            mistakes: Vec::new(),
            partition_names: BTreeSet::new(),
        };
        let servers = match DeTable::parse(text) {
            Ok(table) => reader.file(table.into_inner()),
            Err(error) => {
                let line = reader.line(error.span().unwrap_or_default());
                reader.mistakes.push(Mistake {
                    line,
                    key: String::new(),
                    what: error.message().to_owned(),
                });
                Vec::new()
            }
        };
        let path = path.to_owned();
        match reader.mistakes {
            all if all.is_empty() => Ok(ServerFile { path, servers }),
            all => Err(Mistakes { path, all }),
        }
    }
}

/// A value with its key.
type Entry<'a> = (String, Spanned<DeValue<'a>>);

struct Reader<'a> {
    text: &'a str,
    mistakes: Vec<Mistake>,
    /// Names of partitions in the file.
    partition_names: BTreeSet<String>,
}

impl<'a> Reader<'a> {
    fn line(&self, place: Range<usize>) -> usize {
        self.text[..place.start].matches('\n').count() + 1
    }

    /// The entries of a table, and its place. Entries that are not among these keys are mistakes.
    fn entries(
        &mut self,
        (name, line): (String, usize),
        table: DeTable<'a>,
        known: Option<&[&str]>,
    ) -> (Place, Vec<Entry<'a>>) {
        let mut place = Place {
            name,
            line,
            keys: BTreeMap::new(),
        };
        let mut entries = Vec::new();
        for (key, value) in table {
            let line = self.line(key.span());
            let key = key.into_inner().into_owned();
            place.keys.insert(key.clone(), line);
            if let Some(known) = known.filter(|known| !known.contains(&key.as_str())) {
                let what = match (nearest::of(&key, known.iter().copied()), known) {
                    (Some(near), _) => format!("unknown key; did you mean {near}?"),
                    (None, []) => "unknown key; this table has none".to_owned(),
                    (None, known) => format!("unknown key; keys: {}", known.join(", ")),
                };
                self.mistakes.push(place.mistake(&key, what));
                continue;
            }
            entries.push((key, value));
        }
        (place, entries)
    }

    /// The tables in a table, such as the servers in `servers`.
    fn tables(
        &mut self,
        place: &Place,
        (key, value): Entry<'a>,
    ) -> Vec<(String, usize, DeTable<'a>)> {
        let DeValue::Table(table) = value.into_inner() else {
            let name = join(&place.name, &key);
            let what = format!("a table expected, such as [{name}.NAME]");
            self.mistakes.push(place.mistake(&key, what));
            return Vec::new();
        };
        let line = place.keys.get(&key).copied().unwrap_or(place.line);
        let (place, entries) = self.entries((join(&place.name, &key), line), table, None);
        let mut tables = Vec::new();
        for (name, value) in entries {
            match value.into_inner() {
                DeValue::Table(table) => {
                    let line = place.keys.get(&name).copied().unwrap_or(place.line);
                    tables.push((name, line, table));
                }
                _ => {
                    let what = format!("a table expected: [{}]", join(&place.name, &name));
                    self.mistakes.push(place.mistake(&name, what));
                }
            }
        }
        tables
    }

    fn file(&mut self, table: DeTable<'a>) -> Vec<ServerEntry> {
        let (place, entries) = self.entries((String::new(), 1), table, Some(TOP_KEYS));
        let mut servers = Vec::new();
        if !place.keys.contains_key("schema_version") {
            self.mistakes.push(Mistake {
                line: 1,
                key: "schema_version".to_owned(),
                what: format!("is missing; schema_version = \"{VERSION}\" expected"),
            });
        }
        for entry in entries {
            match entry.0.as_str() {
                "schema_version" => {
                    let is_known =
                        matches!(entry.1.get_ref(), DeValue::String(text) if *text == VERSION);
                    if !is_known {
                        let what = format!("\"{VERSION}\" expected");
                        self.mistakes.push(place.mistake(&entry.0, what));
                    }
                }
                "servers" => {
                    for (name, line, table) in self.tables(&place, entry) {
                        servers.push(self.server(name, line, table));
                    }
                }
                _ => {
                    for (name, line, table) in self.tables(&place, entry) {
                        self.feature(&name, line, table);
                    }
                }
            }
        }
        servers
    }

    fn server(&mut self, name: String, line: usize, table: DeTable<'a>) -> ServerEntry {
        let table_name = format!("servers.{name}");
        let (place, entries) = self.entries((table_name, line), table, Some(SERVER_KEYS));
        let mut server = ServerEntry {
            name,
            place,
            uid: None,
            devices: None,
            limits: SetLimits::default(),
            namespaces: Vec::new(),
            device_tables: Vec::new(),
        };
        let place = server.place.clone();
        for entry in entries {
            match entry.0.as_str() {
                UID => server.uid = self.read(&place, entry, modules::user_id),
                DEVICES => server.devices = self.devices(&place, entry),
                "namespaces" => {
                    for (name, line, table) in self.tables(&place, entry) {
                        let space = self.namespace(&place, name, line, table);
                        server.namespaces.push(space);
                    }
                }
                "devices" => server.device_tables = self.device_tables(&place, entry),
                _ => self.limit(&place, entry, &mut server.limits),
            }
        }
        server
    }

    fn namespace(
        &mut self,
        server: &Place,
        name: String,
        line: usize,
        table: DeTable<'a>,
    ) -> NamespaceEntry {
        let table_name = format!("{}.namespaces.{name}", server.name);
        let (place, entries) = self.entries((table_name, line), table, Some(NAMESPACE_KEYS));
        let mut limits = SetLimits::default();
        for entry in entries {
            self.limit(&place, entry, &mut limits);
        }
        NamespaceEntry {
            name,
            place,
            limits,
        }
    }

    fn limit(&mut self, place: &Place, entry: Entry<'a>, limits: &mut SetLimits) {
        match entry.0.as_str() {
            MEMORY => limits.memory = self.read(place, entry, modules::memory_limit),
            THREADS => limits.threads = self.read(place, entry, modules::percentage),
            _ => limits.priority = self.read(place, entry, modules::client_priority),
        }
    }

    /// A value that is text or a number.
    fn read<T>(
        &mut self,
        place: &Place,
        (key, value): Entry<'a>,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        let text = scalar(value.get_ref());
        let text = text.ok_or_else(|| "text or a number expected".to_owned());
        match text.and_then(|text| parse(&text)) {
            Ok(value) => Some(value),
            Err(what) => {
                self.mistakes.push(place.mistake(&key, what));
                None
            }
        }
    }

    fn devices(&mut self, place: &Place, (key, value): Entry<'a>) -> Option<Vec<String>> {
        let texts = match value.get_ref() {
            DeValue::Array(all) => all.iter().map(|one| scalar(one.get_ref())).collect(),
            DeValue::String(text) => {
                Some(text.split(',').map(|one| one.trim().to_owned()).collect())
            }
            _ => None,
        };
        let found = texts.filter(|all: &Vec<String>| !all.is_empty());
        if found.is_none() {
            let what =
                "a list of devices expected, by ordinal or UUID, such as [0, \"GPU-12345678\"]";
            self.mistakes.push(place.mistake(&key, what));
        }
        found
    }

    /// `[[servers.NAME.devices]]`
    fn device_tables(&mut self, place: &Place, (key, value): Entry<'a>) -> Vec<DeviceTable> {
        let name = join(&place.name, &key);
        let DeValue::Array(all) = value.into_inner() else {
            let what = format!("[[{name}]] expected");
            self.mistakes.push(place.mistake(&key, what));
            return Vec::new();
        };
        let mut found = Vec::new();
        for one in all {
            let line = self.line(one.span());
            let DeValue::Table(table) = one.into_inner() else {
                let what = format!("[[{name}]] expected");
                self.mistakes.push(place.mistake(&key, what));
                continue;
            };
            let (place, entries) = self.entries((name.clone(), line), table, Some(DEVICE_KEYS));
            if !place.keys.contains_key(UUID) {
                self.mistakes.push(place.mistake(UUID, "uuid is missing"));
            }
            let (mut uuid, mut partitions) = (None, None);
            for entry in entries {
                match entry.0.as_str() {
                    UUID => uuid = self.read(&place, entry, |text| Ok(text.to_owned())),
                    _ => partitions = self.partitions(&place, entry),
                }
            }
            found.extend(uuid.map(|uuid| DeviceTable {
                place,
                uuid,
                partitions,
            }));
        }
        found
    }

    /// `sm_partitions` of a device.
    fn partitions(
        &mut self,
        place: &Place,
        (key, value): Entry<'a>,
    ) -> Option<Vec<PartitionEntry>> {
        let DeValue::Array(all) = value.into_inner() else {
            let what = "a list of partitions expected, such as [4, { name = \"a\", chunks = 2 }]";
            self.mistakes.push(place.mistake(&key, what));
            return None;
        };
        let name = join(&place.name, &key);
        let mut found = Vec::new();
        for one in all {
            let line = self.line(one.span());
            found.extend(self.partition((name.clone(), line), one.into_inner()));
        }
        Some(found)
    }

    /// A partition: a number of chunks, or a table.
    fn partition(
        &mut self,
        (key, line): (String, usize),
        value: DeValue<'a>,
    ) -> Option<PartitionEntry> {
        match value {
            DeValue::Table(table) => self.partition_table((key, line), table),
            DeValue::Integer(number) => match modules::number_of_chunks(&number.to_string()) {
                Ok(chunks) => Some(PartitionEntry { name: None, chunks }),
                Err(what) => {
                    self.mistakes.push(Mistake { line, key, what });
                    None
                }
            },
            _ => {
                let what =
                    "a number of chunks or a table expected, such as { name = \"a\", chunks = 2 }";
                let what = what.to_owned();
                self.mistakes.push(Mistake { line, key, what });
                None
            }
        }
    }

    fn partition_table(
        &mut self,
        place: (String, usize),
        table: DeTable<'a>,
    ) -> Option<PartitionEntry> {
        let (place, entries) = self.entries(place, table, Some(PARTITION_KEYS));
        if !place.keys.contains_key("chunks") {
            self.mistakes
                .push(place.mistake("chunks", "chunks is missing"));
        }
        let (mut name, mut chunks) = (None, None);
        for entry in entries {
            match entry.0.as_str() {
                "chunks" => chunks = self.read(&place, entry, modules::number_of_chunks),
                _ => name = self.partition_name(&place, entry),
            }
        }
        chunks.map(|chunks| PartitionEntry { name, chunks })
    }

    /// A name that no other partition of the file has.
    fn partition_name(&mut self, place: &Place, entry: Entry<'a>) -> Option<String> {
        let known = std::mem::take(&mut self.partition_names);
        let name = self.read(place, entry, |text| {
            check_name(text)?;
            match known.contains(text) {
                true => Err(format!("the file has another partition {text}")),
                false => Ok(text.to_owned()),
            }
        });
        self.partition_names = known;
        self.partition_names.extend(name.clone());
        name
    }

    fn feature(&mut self, name: &str, line: usize, table: DeTable<'a>) {
        if !FEATURE_KEYS.contains(&name) {
            self.mistakes.push(Mistake {
                line,
                key: format!("features.{name}"),
                what: format!("unknown feature; features: {}", FEATURE_KEYS.join(", ")),
            });
            return;
        }
        let keys: &[&str] = match name {
            "memacct" => &["audit_log"],
            _ => &[],
        };
        let (place, entries) = self.entries((format!("features.{name}"), line), table, Some(keys));
        for (key, value) in entries {
            let what = match value.get_ref() {
                DeValue::Boolean(false) => continue,
                DeValue::Boolean(true) => modules::NO_AUDIT_LOG,
                _ => "true or false expected",
            };
            self.mistakes.push(place.mistake(&key, what));
        }
    }
}

/// Text or a number.
fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => Some(number.to_string()),
        DeValue::Float(number) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes(text: &str) -> String {
        let parsed = ServerFile::parse(text, "f.toml");
        parsed.expect_err(text).to_string()
    }

    #[test]
    fn servers_namespaces_and_limits_are_read() {
        let text = "schema_version = \"1.0\"\n\
                    [servers.train]\n\
                    uid = 7\n\
                    allowed_devices = [1, \"GPU-a\"]\n\
                    active_thread_percentage = 12.5\n\
                    [servers.train.namespaces.eval]\n\
                    pinned_memory_limit = \"0=2G\"\n\
                    client_priority = 1\n\
                    [[servers.train.devices]]\n\
                    uuid = \"GPU-a\"\n\
                    sm_partitions = [4, { name = \"a\", chunks = 2 }]\n\
                    [[servers.train.devices]]\n\
                    uuid = \"GPU-b\"\n\
                    sm_partitions = []\n\
                    [[servers.train.devices]]\n\
                    uuid = \"GPU-c\"\n\
                    [features.memacct]\n\
                    audit_log = false\n\
                    [features.context-share]\n";
        let file = ServerFile::parse(text, "f.toml").expect("no mistakes");
        let [train] = &file.servers[..] else {
            panic!("one server: {file:?}");
        };
        assert_eq!((train.name.as_str(), train.uid), ("train", Some(7)));
        let devices = ["1".to_owned(), "GPU-a".to_owned()];
        assert_eq!(train.devices.as_deref(), Some(&devices[..]));
        assert_eq!(train.limits.threads, "12.5".parse().ok());
        let [eval] = &train.namespaces[..] else {
            panic!("one namespace: {file:?}");
        };
        let memory = modules::memory_limit("0=2G").expect("a limit");
        let limits = SetLimits {
            memory: Some(memory),
            threads: None,
            priority: Some(1),
        };
        assert_eq!((eval.name.as_str(), &eval.limits), ("eval", &limits));
        let tables = train.device_tables.iter();
        let tables: Vec<_> = tables
            .map(|one| (one.uuid.as_str(), one.partitions.clone()))
            .collect();
        let partition = |name: Option<&str>, chunks| PartitionEntry {
            name: name.map(str::to_owned),
            chunks,
        };
        let own = vec![partition(None, 4), partition(Some("a"), 2)];
        let expected = [
            ("GPU-a", Some(own)),
            ("GPU-b", Some(vec![])),
            ("GPU-c", None),
        ];
        assert_eq!(tables, expected);
    }

    #[test]
    fn mistakes_have_line_and_key() {
        for (text, expected) in [
            (
                "",
                "f.toml:1: schema_version: is missing; schema_version = \"1.0\" expected",
            ),
            (
                "schema_version = \"2.0\"\n",
                "f.toml:1: schema_version: \"1.0\" expected",
            ),
            (
                "schema_version = \"1.0\"\n\nserver = 3\n",
                "f.toml:3: server: unknown key; did you mean servers?",
            ),
            (
                "schema_version = \"1.0\"\nservers = 3\n",
                "f.toml:2: servers: a table expected, such as [servers.NAME]",
            ),
            (
                "schema_version = \"1.0\"\n[servers]\na = 3\n",
                "f.toml:3: servers.a: a table expected: [servers.a]",
            ),
            (
                "schema_version = \"1.0\"\n[servers.a]\nclient_priority = 2\nfrobnicate = 1\nuid = true\n",
                "f.toml:3: servers.a.client_priority: \"2\": a priority is 0 or 1\n\
                 f.toml:4: servers.a.frobnicate: unknown key; keys: allowed_devices, uid, pinned_memory_limit, \
                 active_thread_percentage, client_priority, namespaces, devices\n\
                 f.toml:5: servers.a.uid: text or a number expected",
            ),
            (
                "schema_version = \"1.0\"\n[servers.a]\nallowed_devices = []\n",
                "f.toml:3: servers.a.allowed_devices: a list of devices expected, by ordinal or UUID, such as [0, \
                 \"GPU-12345678\"]",
            ),
            (
                "schema_version = \"1.0\"\n[servers.a.namespaces.b]\nuid = 3\n",
                "f.toml:3: servers.a.namespaces.b.uid: unknown key; keys: pinned_memory_limit, \
                 active_thread_percentage, client_priority",
            ),
            (
                "schema_version = \"1.0\"\n[[servers.a.devices]]\nsm_partitions = 2\n",
                "f.toml:2: servers.a.devices: uuid is missing\n\
                 f.toml:3: servers.a.devices.sm_partitions: a list of partitions expected, such as [4, { name = \"a\", \
                 chunks = 2 }]",
            ),
            (
                "schema_version = \"1.0\"\n[[servers.a.devices]]\nuuid = \"GPU-a\"\nsm_partitions = [\n1,\n0,\n-1, \"2\",\n\
                 { name = \"A\", chunks = 0 },\n{ name = \"a\", chunk = 1 },\n{ name = \"a\", chunks = 1 }]\n",
                "f.toml:6: servers.a.devices.sm_partitions: \"0\" is not a number of chunks\n\
                 f.toml:7: servers.a.devices.sm_partitions: \"-1\" is not a number of chunks\n\
                 f.toml:7: servers.a.devices.sm_partitions: a number of chunks or a table expected, such as { name = \
                 \"a\", chunks = 2 }\n\
                 f.toml:8: servers.a.devices.sm_partitions.chunks: \"0\" is not a number of chunks\n\
                 f.toml:8: servers.a.devices.sm_partitions.name: \"A\" is no name: a name has 1 to 64 of the \
                 characters a-z, 0-9 and _\n\
                 f.toml:9: servers.a.devices.sm_partitions: chunks is missing\n\
                 f.toml:9: servers.a.devices.sm_partitions.chunk: unknown key; did you mean chunks?\n\
                 f.toml:10: servers.a.devices.sm_partitions.name: the file has another partition a",
            ),
            (
                "schema_version = \"1.0\"\n[servers.a]\ndevices = 1\n",
                "f.toml:3: servers.a.devices: [[servers.a.devices]] expected",
            ),
            (
                "schema_version = \"1.0\"\n[features.memacct]\naudit_log = true\n[features.x]\n[features.context-share]\ny = 1\n",
                "f.toml:3: features.memacct.audit_log: no log of each allocation is written; ps, top and the metrics \
                 show the device memory of each client\n\
                 f.toml:4: features.x: unknown feature; features: memacct, context-share\n\
                 f.toml:6: features.context-share.y: unknown key; this table has none",
            ),
        ] {
            assert_eq!(mistakes(text), expected, "{text}");
        }
        assert!(mistakes("schema_version = \"1.0\"\nx = y\n").starts_with("f.toml:2: "));
    }
}
