//! Interface version 3: commands of the form `MODULE VERB [ARGUMENTS] [--key=value] [--flag]`, each declared once in
//! [`MODULES`].

use super::commands::{self, Format};
use super::defaults;
use super::server_file::ServerFile;
use clap::ValueEnum;
use mpsshim_model::amount;
use mpsshim_model::limits::Percentage;
use mpsshim_proto::{limits, nearest};
use std::fmt::Write as _;

/// The variable that selects the version of the interface, 2 or 3.
pub const PROTOCOL_VERSION: &str = "CUDA_MPS_PROTOCOL_VERSION";

/// Why an audit log cannot be switched on.
pub const NO_AUDIT_LOG: &str = "no log of each allocation is written; ps, top and the metrics show the device memory of each client";

/// A subject of commands.
pub struct Module {
    /// Name.
    pub name: &'static str,
    /// Description.
    pub meaning: &'static str,
    /// Its commands.
    pub verbs: &'static [Verb],
}

/// A command of a module.
pub struct Verb {
    /// Name.
    pub name: &'static str,
    /// Its arguments, in order; optional ones are in brackets.
    pub arguments: &'static [&'static str],
    /// Its options.
    pub options: &'static [ModuleOption],
    /// Description.
    pub meaning: &'static str,
    /// It changes something: reserved for the daemon's owner and root.
    pub acts: bool,
}

/// An option of a verb.
#[derive(Debug)]
pub struct ModuleOption {
    /// With its dashes.
    pub name: &'static str,
    /// Its value, in words; `None`: a flag.
    pub value: Option<&'static str>,
    /// Description.
    pub meaning: &'static str,
}

const FORMAT: ModuleOption = ModuleOption {
    name: commands::FORMAT_OPTION,
    value: Some("table|csv|json[,noheader]"),
    meaning: "output format; noheader leaves out the line with the names of the columns",
};

/// Options of `server set`.
const SERVER_SET: &[ModuleOption] = &[
    ModuleOption {
        name: "--uid",
        value: Some("UID"),
        meaning: "the user that it runs as and whose clients it serves; not while it has clients",
    },
    ModuleOption {
        name: "--pinned-memory-limit",
        value: Some("AMOUNT|DEVICE=AMOUNT,...|none"),
        meaning: "device memory that each client may hold, such as 3G, on every device or by device; replaces the earlier limits",
    },
    ModuleOption {
        name: "--active-thread-percentage",
        value: Some("PERCENTAGE"),
        meaning: "percentage of a device's multiprocessors that clients may use, above 0 and up to 100",
    },
    ModuleOption {
        name: "--client-priority",
        value: Some("PRIORITY"),
        meaning: "0 normal, 1 below normal",
    },
];

const NAMESPACE_LIMITS: &[ModuleOption] = &[
    ModuleOption {
        name: "--pinned-memory-limit",
        value: Some("AMOUNT|DEVICE=AMOUNT,...|none"),
        meaning: "device memory that each client may hold, at most the server's limit, which applies to other devices and with \
                  none; replaces the earlier limits",
    },
    ModuleOption {
        name: "--active-thread-percentage",
        value: Some("PERCENTAGE"),
        meaning: "percentage of a device's multiprocessors that clients may use, at most the server's; 100: the server's",
    },
    ModuleOption {
        name: "--client-priority",
        value: Some("PRIORITY"),
        meaning: "1 below normal; 0: the server's",
    },
];

/// A property of the daemon that NVIDIA's release 615 can switch.
pub struct Feature {
    /// Its name.
    pub name: &'static str,
    /// Description.
    pub meaning: &'static str,
    /// Why it cannot be disabled.
    fixed: &'static str,
}

/// Every feature; all are enabled.
pub const FEATURES: &[Feature] = &[
    Feature {
        name: "memacct",
        meaning: "device memory is accounted for each client, for limits, ps, top and the metrics",
        fixed: "limits of device memory need it",
    },
    Feature {
        name: "context-share",
        meaning: "clients in proxy mode share their server's context on each device",
        fixed: "start a program that needs a context of its own in direct mode (mps-run --mode direct)",
    },
];

/// Options without which their command is refused.
const REQUIRED: [&str; 2] = ["--device", "--chunks"];

/// Every module.
pub const MODULES: &[Module] = &[
    Module {
        name: "server",
        meaning: "servers, which execute the calls of their clients",
        verbs: &[
            Verb {
                name: "create",
                arguments: &["NAME"],
                options: &[
                    ModuleOption {
                        name: "--uid",
                        value: Some("UID"),
                        meaning: "the user that it runs as and whose clients it serves; the daemon's own by default",
                    },
                    ModuleOption {
                        name: "--allowed-devices",
                        value: Some("DEVICE,..."),
                        meaning: "its devices, by ordinal or UUID, in the order in which it numbers them; all by default",
                    },
                    ModuleOption {
                        name: "--locality-domains",
                        value: None,
                        meaning: "always refused: devices are not divided into locality domains",
                    },
                ],
                meaning: "create and start a server for the clients whose pipe directory is its folder NAME in the daemon's",
                acts: true,
            },
            Verb {
                name: "delete",
                arguments: &["NAME"],
                options: &[ModuleOption {
                    name: "--force",
                    value: None,
                    meaning: "end its clients; without this option a server with clients is not deleted",
                }],
                meaning: "end and delete a server that was created",
                acts: true,
            },
            Verb {
                name: "set",
                arguments: &["NAME"],
                options: SERVER_SET,
                meaning: "set the user of a server that was created, and limits of a server for clients that connect from now on",
                acts: true,
            },
            Verb {
                name: "list",
                arguments: &["[NAME]"],
                options: &[FORMAT],
                meaning: "list the servers, or one server",
                acts: false,
            },
            Verb {
                name: "get",
                arguments: &["NAME", "FIELD"],
                options: &[],
                meaning: "print a field of a server: name, uid, pid, status, pipe-directory, allowed-devices, context-ids, \
                          pinned-memory-limit, active-thread-percentage or client-priority",
                acts: false,
            },
        ],
    },
    Module {
        name: "namespace",
        meaning: "groups of clients of a server, with limits of their own",
        verbs: &[
            Verb {
                name: "create",
                arguments: &["SERVER/NAME"],
                options: NAMESPACE_LIMITS,
                meaning: "create a namespace for the clients whose pipe directory is its folder SERVER/NAME in the daemon's",
                acts: true,
            },
            Verb {
                name: "delete",
                arguments: &["SERVER/NAME"],
                options: &[ModuleOption {
                    name: "--force",
                    value: None,
                    meaning: "end its clients; without this option a namespace with clients is not deleted",
                }],
                meaning: "delete a namespace that was created",
                acts: true,
            },
            Verb {
                name: "set",
                arguments: &["SERVER/NAME"],
                options: NAMESPACE_LIMITS,
                meaning: "set limits of a namespace, for clients that connect from now on",
                acts: true,
            },
            Verb {
                name: "list",
                arguments: &["[SERVER]"],
                options: &[FORMAT],
                meaning: "list the namespaces of all servers that were created, or of one",
                acts: false,
            },
            Verb {
                name: "get",
                arguments: &["SERVER/NAME", "FIELD"],
                options: &[],
                meaning: "print a field of a namespace: name, server, pipe-directory, pinned-memory-limit, \
                          active-thread-percentage, client-priority or context-ids",
                acts: false,
            },
        ],
    },
    Module {
        name: "client",
        meaning: "programs that share a device",
        verbs: &[
            Verb {
                name: "list",
                arguments: &[],
                options: &[
                    ModuleOption {
                        name: "--server",
                        value: Some("NAME"),
                        meaning: "only the clients of this server",
                    },
                    ModuleOption {
                        name: "--all",
                        value: None,
                        meaning: "the clients of all servers, as without an option",
                    },
                    FORMAT,
                ],
                meaning: "list the clients, with a row for each of their devices",
                acts: false,
            },
            Verb {
                name: "get",
                arguments: &["PID", "FIELD"],
                options: &[],
                meaning: "print a field of a client: pid, server, device, pci-id, linux-ns, maws-ns or cmd; a line for each device if the \
                          devices differ in it",
                acts: false,
            },
            Verb {
                name: "terminate",
                arguments: &["PID"],
                options: &[],
                meaning: "end a client: its calls return CUDA_ERROR_MPS_CLIENT_TERMINATED and its resources are freed",
                acts: true,
            },
        ],
    },
    Module {
        name: "device",
        meaning: "the devices of the daemon and of each server",
        verbs: &[Verb {
            name: "list",
            arguments: &[],
            options: &[FORMAT],
            meaning: "list the devices; rows without a server are the daemon's own list",
            acts: false,
        }],
    },
    Module {
        name: "sm-partition",
        meaning: "static partitions: multiprocessors reserved for the clients that name them; the daemon needs -S",
        verbs: &[
            Verb {
                name: "create",
                arguments: &["NAME"],
                options: &[
                    ModuleOption {
                        name: "--device",
                        value: Some("DEVICE"),
                        meaning: "its device, by ordinal or UUID; the server must have no clients on it",
                    },
                    ModuleOption {
                        name: "--chunks",
                        value: Some("CHUNKS"),
                        meaning: "number of chunks; device list has the number of each device's",
                    },
                    ModuleOption {
                        name: "--server",
                        value: Some("NAME"),
                        meaning: "the named server whose clients can have it; otherwise it is for those of users' servers",
                    },
                    ModuleOption {
                        name: "--include-remainder",
                        value: None,
                        meaning: "refused if the device has multiprocessors in no chunk, which cannot be reserved",
                    },
                ],
                meaning: "reserve multiprocessors of a device; sm-partition list prints the value of CUDA_MPS_SM_PARTITION",
                acts: true,
            },
            Verb {
                name: "delete",
                arguments: &["NAME"],
                options: &[],
                meaning: "delete a partition, given by its name or visible UUID; its server must have no clients on the device",
                acts: true,
            },
            Verb {
                name: "list",
                arguments: &[],
                options: &[
                    ModuleOption {
                        name: "--all",
                        value: None,
                        meaning: "also the rest of each device of a server, which is in no partition",
                    },
                    FORMAT,
                ],
                meaning: "list the partitions; they are configured until a server that works has them, then created",
                acts: false,
            },
        ],
    },
    Module {
        name: "feature",
        meaning: "properties of the daemon, all of which are enabled: memacct, context-share",
        verbs: &[
            Verb {
                name: "enable",
                arguments: &["FEATURE"],
                options: &[],
                meaning: "has no effect, since all features are enabled",
                acts: true,
            },
            Verb {
                name: "disable",
                arguments: &["FEATURE"],
                options: &[],
                meaning: "always refused, with the reason",
                acts: true,
            },
            Verb {
                name: "describe",
                arguments: &["[FEATURE]"],
                options: &[FORMAT],
                meaning: "describe the features, or one feature",
                acts: false,
            },
        ],
    },
    Module {
        name: "memacct",
        meaning: "accounting of device memory",
        verbs: &[
            Verb {
                name: "set",
                arguments: &["audit_log=false"],
                options: &[],
                meaning: "audit_log=false has no effect, and audit_log=true is refused: allocations are not logged",
                acts: true,
            },
            Verb {
                name: "describe",
                arguments: &[],
                options: &[FORMAT],
                meaning: "describe the settings of the accounting",
                acts: false,
            },
        ],
    },
];

/// Fields of a server; the first [`SERVER_COLUMNS`] are the columns of the list.
pub const SERVER_FIELDS: &[&str] = &[
    "name",
    "uid",
    "pid",
    "status",
    "pipe-directory",
    "allowed-devices",
    "context-ids",
    "pinned-memory-limit",
    "active-thread-percentage",
    "client-priority",
];
/// Number of columns of `server list`.
pub const SERVER_COLUMNS: usize = 7;
/// Fields of a client, all of which are columns of the list.
pub const CLIENT_FIELDS: &[&str] = &[
    "pid", "server", "device", "pci-id", "linux-ns", "maws-ns", "cmd",
];
/// Fields of a namespace, all of which are columns of the list.
pub const NAMESPACE_FIELDS: &[&str] = &[
    "name",
    "server",
    "pipe-directory",
    "pinned-memory-limit",
    "active-thread-percentage",
    "client-priority",
    "context-ids",
];

/// The form of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Format.
    pub format: Format,
    /// With a line of the columns' names.
    pub header: bool,
}

impl Default for Form {
    fn default() -> Form {
        Form {
            format: Format::Table,
            header: true,
        }
    }
}

/// Device memory that each client may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// No limit.
    None,
    /// Bytes, on every device.
    Every(u64),
    /// Devices and bytes; no limit on other devices.
    Devices(Vec<(String, u64)>),
}

/// Limits to be set; `None`: unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetLimits {
    /// `--pinned-memory-limit`
    pub memory: Option<MemoryLimit>,
    /// `--active-thread-percentage`
    pub threads: Option<Percentage>,
    /// `--client-priority`
    pub priority: Option<u32>,
}

/// A namespace as an operator names it: `SERVER/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceName {
    /// Name of its server.
    pub server: String,
    /// Its own name.
    pub name: String,
}

/// A parsed command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `MODULE --help`, `MODULE VERB --help`: the text.
    Help(String),
    /// `-a`, with the path of the file, whose content comes with the command.
    Apply(String),
    /// The file of `-a`.
    ApplyFile(ServerFile),
    /// `server create NAME [--uid=UID] [--allowed-devices=DEVICE,...]`
    ServerCreate {
        /// Its name.
        name: String,
        /// Its user; `None`: the daemon's.
        uid: Option<u32>,
        /// Its devices; `None`: all.
        devices: Option<Vec<String>>,
    },
    /// `server delete NAME [--force]`
    ServerDelete {
        /// Its name.
        name: String,
        /// End its clients.
        force: bool,
    },
    /// `server set NAME OPTIONS`
    ServerSet {
        /// Its name.
        name: String,
        /// Its user; `None`: unchanged.
        uid: Option<u32>,
        /// Its limits.
        limits: SetLimits,
    },
    /// `server list [NAME]`
    ServerList(Option<String>, Form),
    /// `server get NAME FIELD`
    ServerGet(String, &'static str),
    /// `namespace create SERVER/NAME [OPTIONS]`
    NamespaceCreate(NamespaceName, SetLimits),
    /// `namespace delete SERVER/NAME [--force]`
    NamespaceDelete {
        /// Its name.
        name: NamespaceName,
        /// End its clients.
        force: bool,
    },
    /// `namespace set SERVER/NAME OPTIONS`
    NamespaceSet(NamespaceName, SetLimits),
    /// `namespace list [SERVER]`
    NamespaceList(Option<String>, Form),
    /// `namespace get SERVER/NAME FIELD`
    NamespaceGet(NamespaceName, &'static str),
    /// `client list [--server=NAME] [--all]`
    ClientList(Option<String>, Form),
    /// `client get PID FIELD`
    ClientGet(i32, &'static str),
    /// `client terminate PID`
    ClientTerminate(i32),
    /// `device list`
    DeviceList(Form),
    /// `sm-partition create NAME --device=DEVICE --chunks=CHUNKS [--server=NAME] [--include-remainder]`
    PartitionCreate {
        /// Its name.
        name: String,
        /// Its server; `None`: those of users.
        server: Option<String>,
        /// Its device.
        device: String,
        /// Number of its chunks.
        chunks: u32,
        /// With the multiprocessors in no chunk.
        remainder: bool,
    },
    /// `sm-partition delete NAME`
    PartitionDelete(String),
    /// `sm-partition list [--all]`
    PartitionList {
        /// With the rest of each device.
        all: bool,
        /// Output format.
        form: Form,
    },
    /// `feature enable FEATURE` and `memacct set audit_log=false`, which are so already.
    Unchanged,
    /// `feature describe [FEATURE]`
    FeatureDescribe(Option<&'static str>, Form),
    /// `memacct describe`
    AccountingDescribe(Form),
}

/// Why a line cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModuleError {
    /// No verb follows the module.
    #[error("{0}: a verb expected: {verbs}", verbs = verbs(.0))]
    NoVerb(&'static str),
    /// No such verb.
    #[error("{module}: unknown verb \"{verb}\"{near}; verbs: {verbs}", near = near_verb(module, verb), verbs = verbs(module))]
    UnknownVerb {
        /// The module.
        module: &'static str,
        /// The word in the place of the verb.
        verb: String,
    },
    /// Arguments that do not fit.
    #[error("{module} {verb}: {what}; usage: {usage}", verb = .verb.name, usage = usage(module, .verb))]
    Arguments {
        /// The module.
        module: &'static str,
        /// The verb.
        verb: &'static Verb,
        /// Description of the error.
        what: String,
    },
    /// Not permitted for this user.
    #[error("{module} {verb} is reserved for root and the user who runs the daemon")]
    NotPermitted {
        /// The module.
        module: &'static str,
        /// The verb.
        verb: &'static str,
    },
}

impl std::fmt::Debug for Verb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Verb {
    fn eq(&self, other: &Verb) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Verb {}

/// The module of this name.
pub fn find(name: &str) -> Option<&'static Module> {
    MODULES.iter().find(|module| module.name == name)
}

fn did_you_mean(near: Option<&str>) -> String {
    near.map_or_else(String::new, |near| format!("; did you mean {near}?"))
}

fn near_verb(module: &str, verb: &str) -> String {
    let all = find(module).into_iter().flat_map(|module| module.verbs);
    did_you_mean(nearest::of(verb, all.map(|verb| verb.name)))
}

fn verbs(module: &str) -> String {
    let all = find(module).into_iter().flat_map(|module| module.verbs);
    let names: Vec<&str> = all.map(|verb| verb.name).collect();
    format!("{}; \"{module} --help\" describes each", names.join(", "))
}

/// A verb with its arguments and options, as a line.
pub fn usage(module: &str, verb: &Verb) -> String {
    let mut text = format!("{module} {}", verb.name);
    for argument in verb.arguments {
        let _ = write!(text, " {argument}");
    }
    for option in verb.options {
        let _ = match option.value {
            Some(value) if REQUIRED.contains(&option.name) => {
                write!(text, " {}={value}", option.name)
            }
            Some(value) => write!(text, " [{}={value}]", option.name),
            None => write!(text, " [{}]", option.name),
        };
    }
    text
}

/// The help of a module, or of one of its verbs.
pub fn help(module: &Module, only: Option<&Verb>) -> String {
    let mut text = String::new();
    if only.is_none() {
        let _ = writeln!(text, "{}: {}\n", module.name, module.meaning);
    }
    let wanted = |verb: &&Verb| only.is_none_or(|only| only == *verb);
    for verb in module.verbs.iter().filter(wanted) {
        let _ = writeln!(text, "{}", usage(module.name, verb));
        let _ = writeln!(text, "    {}", verb.meaning);
        for option in verb.options {
            let _ = writeln!(text, "    {}: {}", option.name, option.meaning);
        }
    }
    text
}

/// The help of all modules, for the manual and `mps-control --help`.
pub fn help_of_all() -> String {
    let mut text =
        format!("Commands of interface 3 (-p 3, or {PROTOCOL_VERSION}=3), beside those above:\n");
    for module in MODULES {
        for verb in module.verbs {
            let _ = writeln!(text, "  {}", usage(module.name, verb));
            let _ = writeln!(text, "{:42}{}", "", verb.meaning);
        }
    }
    text.push_str("MODULE --help describes the options of a module's commands.");
    text
}

/// The help that a line with `--help` asks for.
pub fn help_asked(line: &str) -> Option<String> {
    match parse(line, true) {
        Some(Ok(Command::Help(text))) => Some(text),
        _ => None,
    }
}

/// Whether a command line changes nothing.
pub fn only_looks(line: &str) -> bool {
    parse(line, false).is_some_and(|parsed| parsed.is_ok())
}

/// Adds the option for this format to a line, if the command prints a list and the line has no such option.
pub fn in_format(line: &str, format: Format) -> String {
    let mut words = line.split_whitespace();
    let module = words.next().and_then(find);
    let verb = words.next().unwrap_or_default();
    let verb = module.and_then(|module| module.verbs.iter().find(|one| one.name == verb));
    let has_format = |verb: &Verb| verb.options.iter().any(|one| one.name == FORMAT.name);
    let asks = line
        .split_whitespace()
        .any(|word| commands::format_option(word).is_some());
    if format != Format::Table && !asks && verb.is_some_and(has_format) {
        format!("{} {}={}", line.trim_end(), FORMAT.name, format.name())
    } else {
        line.to_owned()
    }
}

/// The id of a user.
///
/// # Errors
/// The text is no user id, in words.
pub fn user_id(text: &str) -> Result<u32, String> {
    // The largest number means no user.
    let uid = text.parse().ok().filter(|uid| *uid != u32::MAX);
    uid.ok_or_else(|| format!("\"{text}\" is not a user id"))
}

/// A limit of device memory: an amount, amounts by device, or `none`.
///
/// # Errors
/// The text is no such limit, in words.
pub fn memory_limit(text: &str) -> Result<MemoryLimit, String> {
    if text.eq_ignore_ascii_case("none") {
        return Ok(MemoryLimit::None);
    }
    if !text.contains('=') {
        let bytes = amount::parse(text).map_err(|error| error.to_string())?;
        return Ok(MemoryLimit::Every(bytes));
    }
    let devices = limits::of_devices(text).map(|limit| match limit {
        Ok((device, bytes)) => Ok((device.to_owned(), bytes)),
        Err(part) => Err(format!("\"{part}\" is not DEVICE=AMOUNT")),
    });
    Ok(MemoryLimit::Devices(devices.collect::<Result<_, _>>()?))
}

/// An active-thread percentage.
///
/// # Errors
/// The text is none, in words.
pub fn percentage(text: &str) -> Result<Percentage, String> {
    let number = text.strip_suffix('%').unwrap_or(text);
    let parsed = number.parse::<Percentage>();
    parsed.map_err(|error| format!("\"{text}\": {error}"))
}

/// A priority of clients.
///
/// # Errors
/// The text is none, in words.
pub fn client_priority(text: &str) -> Result<u32, String> {
    let parsed = defaults::priority(text);
    parsed.ok_or_else(|| format!("\"{text}\": a priority is 0 or 1"))
}

/// The number of chunks of a partition.
///
/// # Errors
/// The text is none, in words.
pub fn number_of_chunks(text: &str) -> Result<u32, String> {
    let chunks = text.parse().ok().filter(|chunks| *chunks > 0);
    chunks.ok_or_else(|| format!("\"{text}\" is not a number of chunks"))
}

/// The words behind a verb.
struct Words<'a> {
    module: &'static str,
    verb: &'static Verb,
    arguments: Vec<&'a str>,
    options: Vec<(&'static str, &'a str)>,
}

impl<'a> Words<'a> {
    fn wrong(&self, what: impl Into<String>) -> ModuleError {
        ModuleError::Arguments {
            module: self.module,
            verb: self.verb,
            what: what.into(),
        }
    }

    fn read(&mut self, words: impl Iterator<Item = &'a str>) -> Result<(), ModuleError> {
        for word in words {
            if !word.starts_with('-') {
                self.arguments.push(word);
                continue;
            }
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (word, None),
            };
            let options = self.verb.options;
            let Some(option) = options.iter().find(|option| option.name == name) else {
                let near = nearest::of(name, options.iter().map(|option| option.name));
                let near = did_you_mean(near);
                return Err(self.wrong(format!("unknown option \"{name}\"{near}")));
            };
            let value = match (option.value, value) {
                (None, None) => "",
                (None, Some(_)) => return Err(self.wrong(format!("{name} takes no value"))),
                (Some(expected), None | Some("")) => {
                    return Err(self.wrong(format!("a value expected: {name}={expected}")));
                }
                (Some(_), Some(value)) => value,
            };
            if self.option(option.name).is_some() {
                return Err(self.wrong(format!("{name} is given twice")));
            }
            self.options.push((option.name, value));
        }
        let (given, known) = (&self.arguments, self.verb.arguments);
        if let Some(unexpected) = given.get(known.len()) {
            return Err(self.wrong(format!("unexpected \"{unexpected}\"")));
        }
        match known.get(given.len()) {
            Some(missing) if !missing.starts_with('[') => {
                return Err(self.wrong(format!("{missing} expected")));
            }
            _ => {}
        }
        let options = self.verb.options.iter();
        let mut required = options.filter(|option| REQUIRED.contains(&option.name));
        match required.find(|option| self.option(option.name).is_none()) {
            Some(missing) => Err(self.wrong(format!("{} expected", missing.name))),
            None => Ok(()),
        }
    }

    fn option(&self, name: &str) -> Option<&'a str> {
        let found = self.options.iter().find(|(option, _)| *option == name);
        found.map(|(_, value)| *value)
    }

    /// The argument at this place, which is there unless it is optional.
    fn argument(&self, at: usize) -> &'a str {
        self.arguments.get(at).copied().unwrap_or_default()
    }

    fn optional(&self, at: usize) -> Option<String> {
        self.arguments.get(at).map(|word| (*word).to_owned())
    }

    fn form(&self) -> Result<Form, ModuleError> {
        let mut form = Form::default();
        let Some(text) = self.option(FORMAT.name) else {
            return Ok(form);
        };
        let (name, header) = match text.split_once(',') {
            Some((name, "noheader")) => (name, false),
            Some(_) => ("", true),
            None => (text, true),
        };
        form.header = header;
        form.format = match Format::from_str(name, false) {
            Ok(Format::Json) if !header => {
                return Err(self.wrong("json has no header: noheader is for table and csv"));
            }
            Ok(format) => format,
            Err(_) => {
                return Err(self.wrong(format!(
                    "\"{text}\": a format is table, csv or json, and noheader may follow table and csv"
                )));
            }
        };
        Ok(form)
    }

    fn process(&self, at: usize) -> Result<i32, ModuleError> {
        let text = self.argument(at);
        let pid = text.parse().ok().filter(|pid| *pid > 0);
        pid.ok_or_else(|| self.wrong(format!("\"{text}\" is not a process id")))
    }

    /// The field at this place of the arguments.
    fn field(&self, at: usize, all: &[&'static str]) -> Result<&'static str, ModuleError> {
        let text = self.argument(at);
        let found = all.iter().find(|field| **field == text).copied();
        found.ok_or_else(|| {
            let near = did_you_mean(nearest::of(text, all.iter().copied()));
            let all = all.join(", ");
            self.wrong(format!("unknown field \"{text}\"{near}; fields: {all}"))
        })
    }

    fn feature(&self, at: usize) -> Result<&'static Feature, ModuleError> {
        let text = self.argument(at);
        let found = FEATURES.iter().find(|one| one.name == text);
        found.ok_or_else(|| {
            let names = FEATURES.iter().map(|one| one.name);
            let near = did_you_mean(nearest::of(text, names.clone()));
            let all = names.collect::<Vec<_>>().join(", ");
            self.wrong(format!("unknown feature \"{text}\"{near}; features: {all}"))
        })
    }

    fn partition(&self) -> Result<Command, ModuleError> {
        let chunks = number_of_chunks(self.option("--chunks").unwrap_or_default());
        let chunks = chunks.map_err(|why| self.wrong(why))?;
        Ok(Command::PartitionCreate {
            name: self.argument(0).to_owned(),
            server: self.option("--server").map(str::to_owned),
            device: self.option("--device").unwrap_or_default().to_owned(),
            chunks,
            remainder: self.option("--include-remainder").is_some(),
        })
    }

    fn namespace(&self, at: usize) -> Result<NamespaceName, ModuleError> {
        let text = self.argument(at);
        let parts = text.split_once('/');
        let (server, name) = parts.ok_or_else(|| {
            self.wrong(format!("\"{text}\" is not SERVER/NAME, such as train/eval"))
        })?;
        Ok(NamespaceName {
            server: server.to_owned(),
            name: name.to_owned(),
        })
    }

    fn user(&self) -> Result<Option<u32>, ModuleError> {
        let uid = self.option("--uid").map(user_id);
        uid.transpose().map_err(|why| self.wrong(why))
    }

    fn devices(&self) -> Option<Vec<String>> {
        let text = self.option("--allowed-devices")?;
        Some(text.split(',').map(str::to_owned).collect())
    }

    /// At least one option.
    fn limits(&self) -> Result<SetLimits, ModuleError> {
        if self.options.is_empty() {
            return Err(self.wrong("at least one option expected"));
        }
        self.optional_limits()
    }

    fn optional_limits(&self) -> Result<SetLimits, ModuleError> {
        let [memory, threads, priority] = [
            "--pinned-memory-limit",
            "--active-thread-percentage",
            "--client-priority",
        ];
        let memory = self.option(memory).map(memory_limit).transpose();
        let threads = self.option(threads).map(percentage).transpose();
        let priority = self.option(priority).map(client_priority).transpose();
        Ok(SetLimits {
            memory: memory.map_err(|why| self.wrong(why))?,
            threads: threads.map_err(|why| self.wrong(why))?,
            priority: priority.map_err(|why| self.wrong(why))?,
        })
    }

    fn command(&self) -> Result<Command, ModuleError> {
        let text = |at| self.argument(at).to_owned();
        Ok(match (self.module, self.verb.name) {
            ("server", "create") => {
                if self.option("--locality-domains").is_some() {
                    return Err(self.wrong(
                        "devices are not divided into locality domains here; leave out --locality-domains",
                    ));
                }
                Command::ServerCreate {
                    name: text(0),
                    uid: self.user()?,
                    devices: self.devices(),
                }
            }
            ("server", "delete") => Command::ServerDelete {
                name: text(0),
                force: self.option("--force").is_some(),
            },
            ("server", "set") => Command::ServerSet {
                name: text(0),
                uid: self.user()?,
                limits: self.limits()?,
            },
            ("server", "list") => Command::ServerList(self.optional(0), self.form()?),
            ("server", _) => Command::ServerGet(text(0), self.field(1, SERVER_FIELDS)?),
            ("namespace", "create") => {
                Command::NamespaceCreate(self.namespace(0)?, self.optional_limits()?)
            }
            ("namespace", "delete") => Command::NamespaceDelete {
                name: self.namespace(0)?,
                force: self.option("--force").is_some(),
            },
            ("namespace", "set") => Command::NamespaceSet(self.namespace(0)?, self.limits()?),
            ("namespace", "list") => Command::NamespaceList(self.optional(0), self.form()?),
            ("namespace", _) => {
                Command::NamespaceGet(self.namespace(0)?, self.field(1, NAMESPACE_FIELDS)?)
            }
            ("client", "list") => {
                let server = self.option("--server").map(str::to_owned);
                if server.is_some() && self.option("--all").is_some() {
                    return Err(self.wrong("--server and --all exclude each other"));
                }
                Command::ClientList(server, self.form()?)
            }
            ("client", "get") => {
                Command::ClientGet(self.process(0)?, self.field(1, CLIENT_FIELDS)?)
            }
            ("client", _) => Command::ClientTerminate(self.process(0)?),
            ("sm-partition", "create") => self.partition()?,
            ("sm-partition", "delete") => Command::PartitionDelete(text(0)),
            ("sm-partition", _) => Command::PartitionList {
                all: self.option("--all").is_some(),
                form: self.form()?,
            },
            ("feature", "describe") => {
                let feature = self.optional(0).map(|_| self.feature(0)).transpose()?;
                Command::FeatureDescribe(feature.map(|one| one.name), self.form()?)
            }
            ("feature", verb) => {
                let Feature { name, fixed, .. } = self.feature(0)?;
                if verb == "disable" {
                    return Err(self.wrong(format!("{name} cannot be disabled: {fixed}")));
                }
                Command::Unchanged
            }
            ("memacct", "set") => match self.argument(0) {
                "audit_log=false" => Command::Unchanged,
                "audit_log=true" => return Err(self.wrong(NO_AUDIT_LOG)),
                other => {
                    return Err(self.wrong(format!(
                        "\"{other}\": audit_log=true or audit_log=false expected"
                    )));
                }
            },
            ("memacct", _) => Command::AccountingDescribe(self.form()?),
            _ => Command::DeviceList(self.form()?),
        })
    }
}

/// The command that `-a` sends, with the path of the file behind it.
pub const APPLY: &str = "apply";

/// The path in the command of `-a`.
pub fn applied_path(line: &str) -> Option<&str> {
    let path = line.strip_prefix(APPLY)?.strip_prefix(' ')?;
    (!path.is_empty()).then_some(path)
}

/// Parses a line; `None`: its first word is no module.
pub fn parse(line: &str, privileged: bool) -> Option<Result<Command, ModuleError>> {
    let mut words = line.split_whitespace();
    let module = words.next().and_then(find)?;
    Some(parse_verb(module, words.collect(), privileged))
}

fn parse_verb(
    module: &'static Module,
    words: Vec<&str>,
    privileged: bool,
) -> Result<Command, ModuleError> {
    let asks_help = |word: &&str| matches!(*word, "--help" | "-h");
    let Some(name) = words.first() else {
        return Err(ModuleError::NoVerb(module.name));
    };
    if asks_help(name) {
        return Ok(Command::Help(help(module, None)));
    }
    let Some(verb) = module.verbs.iter().find(|verb| verb.name == *name) else {
        return Err(ModuleError::UnknownVerb {
            module: module.name,
            verb: (*name).to_owned(),
        });
    };
    let rest = &words[1..];
    if rest.iter().any(asks_help) {
        return Ok(Command::Help(help(module, Some(verb))));
    }
    if verb.acts && !privileged {
        return Err(ModuleError::NotPermitted {
            module: module.name,
            verb: verb.name,
        });
    }
    let mut words = Words {
        module: module.name,
        verb,
        arguments: Vec::new(),
        options: Vec::new(),
    };
    words.read(rest.iter().copied())?;
    words.command()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(line: &str) -> Command {
        parse(line, true).expect("a module").expect(line)
    }

    fn error(line: &str) -> String {
        let parsed = parse(line, true).expect("a module");
        parsed.expect_err(line).to_string()
    }

    #[test]
    fn commands_are_parsed() {
        let table = Form::default();
        let csv = Form {
            format: Format::Csv,
            header: false,
        };
        let name = |text: &str| Some(text.to_owned());
        for (line, expected) in [
            ("server list", Command::ServerList(None, table)),
            (
                "server list a --format=csv,noheader",
                Command::ServerList(name("a"), csv),
            ),
            ("server --help", Command::Help(help(&MODULES[0], None))),
            ("server get a pid", Command::ServerGet("a".into(), "pid")),
            ("client list --all", Command::ClientList(None, table)),
            (
                "client list --server=a",
                Command::ClientList(name("a"), table),
            ),
            ("client get 7 cmd", Command::ClientGet(7, "cmd")),
            ("client terminate 7", Command::ClientTerminate(7)),
            ("device list", Command::DeviceList(table)),
            (
                "server create a --allowed-devices=1,GPU-a --uid=7",
                Command::ServerCreate {
                    name: "a".into(),
                    uid: Some(7),
                    devices: Some(vec!["1".into(), "GPU-a".into()]),
                },
            ),
            (
                "server delete --force a",
                Command::ServerDelete {
                    name: "a".into(),
                    force: true,
                },
            ),
            (
                "namespace create a/b --active-thread-percentage=50%",
                Command::NamespaceCreate(
                    NamespaceName {
                        server: "a".into(),
                        name: "b".into(),
                    },
                    SetLimits {
                        threads: "50".parse().ok(),
                        ..SetLimits::default()
                    },
                ),
            ),
            ("namespace list a", Command::NamespaceList(name("a"), table)),
            (
                "server set a --pinned-memory-limit=0=1G,GPU-a=512M --client-priority=1",
                Command::ServerSet {
                    name: "a".into(),
                    uid: None,
                    limits: SetLimits {
                        memory: Some(MemoryLimit::Devices(vec![
                            ("0".into(), 1 << 30),
                            ("GPU-a".into(), 512 << 20),
                        ])),
                        priority: Some(1),
                        threads: None,
                    },
                },
            ),
            (
                "server set a --uid=7",
                Command::ServerSet {
                    name: "a".into(),
                    uid: Some(7),
                    limits: SetLimits::default(),
                },
            ),
        ] {
            assert_eq!(ok(line), expected, "{line}");
        }
        assert_eq!(parse("ps", true), None);
        assert_eq!(parse("", true), None);
    }

    #[test]
    fn errors_name_the_nearest_word() {
        let list = "usage: server list [NAME] [--format=table|csv|json[,noheader]]";
        for (line, expected) in [
            (
                "server",
                "server: a verb expected: create, delete, set, list, get; \"server --help\" describes each".to_owned(),
            ),
            (
                "server lst",
                "server: unknown verb \"lst\"; did you mean list?; verbs: create, delete, set, list, get; \"server --help\" describes each"
                    .to_owned(),
            ),
            (
                "server list --formt=csv",
                format!("server list: unknown option \"--formt\"; did you mean --format?; {list}"),
            ),
            (
                "server list --format",
                format!("server list: a value expected: --format=table|csv|json[,noheader]; {list}"),
            ),
            (
                "server list a b",
                format!("server list: unexpected \"b\"; {list}"),
            ),
            (
                "server list --format=json,noheader",
                format!("server list: json has no header: noheader is for table and csv; {list}"),
            ),
            (
                "server list --format=csv --format=csv",
                format!("server list: --format is given twice; {list}"),
            ),
            (
                "client get 7 cmdd",
                "client get: unknown field \"cmdd\"; did you mean cmd?; fields: pid, server, device, pci-id, linux-ns, maws-ns, cmd; \
                 usage: client get PID FIELD"
                    .to_owned(),
            ),
            (
                "namespace delete b",
                "namespace delete: \"b\" is not SERVER/NAME, such as train/eval; usage: namespace delete SERVER/NAME [--force]"
                    .to_owned(),
            ),
            (
                "client get",
                "client get: PID expected; usage: client get PID FIELD".to_owned(),
            ),
            (
                "client terminate x",
                "client terminate: \"x\" is not a process id; usage: client terminate PID".to_owned(),
            ),
        ] {
            assert_eq!(error(line), expected, "{line}");
        }
        assert!(
            error("server set a --uid=4294967295")
                .contains("\"4294967295\" is not a user id; usage: ")
        );
        assert!(
            error("server create a --locality-domains")
                .contains("leave out --locality-domains; usage: ")
        );
        assert!(error("client list --all=1").contains("--all takes no value"));
        assert!(error("client list --all --server=a").contains("exclude each other"));
    }

    #[test]
    fn changes_are_reserved() {
        let refused = parse("client terminate 7", false).expect("a module");
        assert_eq!(
            refused.expect_err("reserved").to_string(),
            "client terminate is reserved for root and the user who runs the daemon"
        );
        assert!(only_looks("device list") && !only_looks("client terminate 7"));
        assert!(!only_looks("ps"));
    }

    #[test]
    fn a_format_is_added_to_lists() {
        let json = |line: &str| in_format(line, Format::Json);
        assert_eq!(json("server list"), "server list --format=json");
        for line in ["server list --format=csv", "server get a pid", "server", ""] {
            assert_eq!(json(line), line);
        }
    }
}
