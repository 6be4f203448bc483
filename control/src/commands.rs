//! The commands of the control daemon, each declared once in [`TABLE`]; [`super::parse`] parses them.

use crate::modules;
use mpsshim_model::limits::{MemoryBound, Quantum};
use mpsshim_model::policy::{Oversubscription, Scheduling, Weight};
use mpsshim_proto::nearest;
use std::fmt::Write as _;
use std::time::Duration;

/// Kinds of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Prints text.
    Tells,
    /// Prints a list, in a format that can be chosen.
    Lists,
    /// Changes something: reserved for the daemon's owner and root.
    Acts,
    /// Displays something continuously: mps-control does this itself.
    Shows,
}

/// One row of [`TABLE`].
pub struct Row {
    /// Name.
    pub name: &'static str,
    /// Its arguments.
    pub arguments: &'static str,
    /// Description.
    pub meaning: &'static str,
    /// Kind of the command.
    pub kind: Kind,
}

const fn row(
    kind: Kind,
    name: &'static str,
    arguments: &'static str,
    meaning: &'static str,
) -> Row {
    Row {
        name,
        arguments,
        meaning,
        kind,
    }
}

/// Every command.
pub const TABLE: &[Row] = &[
    row(
        Kind::Lists,
        "info",
        "",
        "the daemon itself: its directories, process, user, version, mode, devices and library",
    ),
    row(
        Kind::Lists,
        "get_server_list",
        "",
        "process ids of the servers, one per line",
    ),
    row(
        Kind::Lists,
        "get_server_status",
        "PID",
        "state of a server: INITIALIZING, ACTIVE or FAULT",
    ),
    row(
        Kind::Lists,
        "get_client_list",
        "PID",
        "process ids of a server's clients, one per line",
    ),
    row(
        Kind::Lists,
        "get_device_client_list",
        "[PID]",
        "the clients of each device, with process id and context id, of one server or of all",
    ),
    row(
        Kind::Lists,
        "ps",
        "[-p PID]",
        "a row for each client, or for those of the server or client with this process id: process, context, server, device, PID namespace and program; as csv or json also \
         user, mode, limits, memory and turns",
    ),
    row(
        Kind::Lists,
        "users",
        "",
        "a row for each user and device: clients, clients waiting for a server, and the device and pinned host memory of all of them",
    ),
    row(
        Kind::Shows,
        "top",
        "[--interval SECONDS] [--sort COLUMN] [--once] [--json]",
        "show continuously what the clients do: time on the device, memory, launches, queue, waits; see top --help",
    ),
    row(
        Kind::Lists,
        "device_query",
        "[PID] [--csv]",
        "the devices of the daemon and of each server, or of one server",
    ),
    row(
        Kind::Lists,
        "quarantine",
        "list|add [-uid UID] PROGRAM|release [-uid UID] PROGRAM|all",
        "list the programs that have servers of their own since they may have caused a fault; add one, or release one or all. Without -uid, add \
         means your own; a user who does not run the daemon may change only his own",
    ),
    row(
        Kind::Acts,
        "start_server",
        "-uid UID",
        "start a server for a user before its first client comes",
    ),
    row(
        Kind::Acts,
        "shutdown_server",
        "PID [-f]",
        "end a server once its clients have gone, or at once with -f",
    ),
    row(
        Kind::Acts,
        "restart_server",
        "PID [-t SECONDS] [-f]",
        "replace a server by a new one that goes on with its clients; prints the new process id. Clients that are not portable, or \
         whose work does not end within 10 s, stay on the old server until they end or can move, and a second line lists them; -t bounds the \
         start of the new server and this wait together (0: no wait); -f ends such clients",
    ),
    row(
        Kind::Acts,
        "suspend_client",
        "SERVER_PID CLIENT_PID [-t SECONDS]",
        "move the device memory of an idle client to host memory, until its next call or resume_client; prints the bytes moved and \
         those that stay on the devices. Refused if the client is not idle within 10 s, or SECONDS",
    ),
    row(
        Kind::Acts,
        "resume_client",
        "SERVER_PID CLIENT_PID [-t SECONDS]",
        "bring the device memory of a suspended client back before it makes a call",
    ),
    row(
        Kind::Acts,
        "terminate_client",
        "SERVER_PID CLIENT_PID",
        "end a client: its calls return CUDA_ERROR_MPS_CLIENT_TERMINATED and its resources are freed; prints 0",
    ),
    row(
        Kind::Lists,
        "get_default_active_thread_percentage",
        "",
        "percentage of a device's multiprocessors that clients may use, for servers started from now on",
    ),
    row(
        Kind::Acts,
        "set_default_active_thread_percentage",
        "PERCENTAGE",
        "set the percentage of a device's multiprocessors that clients may use, above 0 and up to 100, for servers started from now on; prints the value in force",
    ),
    row(
        Kind::Lists,
        "get_active_thread_percentage",
        "PID",
        "percentage of a device's multiprocessors that clients of a running server may use",
    ),
    row(
        Kind::Acts,
        "set_active_thread_percentage",
        "PID PERCENTAGE",
        "set the percentage of a device's multiprocessors for clients of a running server that connect from now on; prints the value in force",
    ),
    row(
        Kind::Lists,
        "get_active_thread_percentage_all",
        "",
        "percentage of a device's multiprocessors that clients may use, of each running server, preceded by its process id",
    ),
    row(
        Kind::Acts,
        "set_active_thread_percentage_all",
        "PERCENTAGE",
        "set the percentage of a device's multiprocessors for clients that connect from now on, of each running server",
    ),
    row(
        Kind::Acts,
        "sm_partition",
        "add UUID CHUNKS|rm UUID PARTITION",
        "reserve this number of chunks of a device's multiprocessors for the clients with CUDA_MPS_SM_PARTITION=UUID/PARTITION, or end \
         that. For daemons started with -S, and while the device has no clients",
    ),
    row(
        Kind::Lists,
        "lspart",
        "",
        "the static partitions of each device: free and used chunks and multiprocessors, and whether clients use them",
    ),
    row(
        Kind::Lists,
        "get_default_device_pinned_mem_limit",
        "DEVICE",
        "device memory that a client may hold, for servers started from now on; prints nothing if there is no limit",
    ),
    row(
        Kind::Acts,
        "set_default_device_pinned_mem_limit",
        "DEVICE AMOUNT",
        "set the device memory that a client may hold, such as 3G or 512M (a number alone is MiB), for servers started from now on; none removes the limit. A device is an ordinal, a UUID or the beginning of one",
    ),
    row(
        Kind::Lists,
        "get_device_pinned_mem_limit",
        "PID DEVICE",
        "device memory that a client of a running server may hold; prints nothing if there is no limit",
    ),
    row(
        Kind::Acts,
        "set_device_pinned_mem_limit",
        "PID DEVICE AMOUNT",
        "set the device memory limit of a running server, for clients that connect from now on; none removes the limit",
    ),
    row(
        Kind::Lists,
        "get_user_device_pinned_mem_limit",
        "UID DEVICE",
        "device memory that all clients of a user together may hold; prints nothing if there is no limit",
    ),
    row(
        Kind::Acts,
        "set_user_device_pinned_mem_limit",
        "UID DEVICE AMOUNT",
        "set the device memory that all clients of a user together may hold, at once, for running and later servers; none removes the limit",
    ),
    row(
        Kind::Lists,
        "get_default_device_mem_guarantee",
        "DEVICE",
        "device memory of each client that is never moved to host memory for other clients, for servers started from now on; prints nothing if there is no guarantee",
    ),
    row(
        Kind::Acts,
        "set_default_device_mem_guarantee",
        "DEVICE AMOUNT",
        "with oversubscription: set the device memory of each client that is never moved to host memory for other clients, such as 3G or 512M \
         (a number alone is MiB), for servers started from now on; none removes the guarantee",
    ),
    row(
        Kind::Lists,
        "get_device_mem_guarantee",
        "PID DEVICE",
        "device memory of each client of a running server that is never moved to host memory for other clients; prints nothing if there is no guarantee",
    ),
    row(
        Kind::Acts,
        "set_device_mem_guarantee",
        "PID DEVICE AMOUNT",
        "set the device memory guarantee of a running server, for clients that connect from now on; none removes the guarantee",
    ),
    row(
        Kind::Lists,
        "get_user_device_mem_guarantee",
        "UID DEVICE",
        "device memory of each client of a user that is never moved to host memory for other clients; prints nothing if there is no guarantee",
    ),
    row(
        Kind::Acts,
        "set_user_device_mem_guarantee",
        "UID DEVICE AMOUNT",
        "set the device memory guarantee of each client of a user, instead of the server's, at once, for running and later servers; none removes \
         the user's",
    ),
    row(
        Kind::Lists,
        "get_default_client_priority",
        "",
        "priority of clients, for servers started from now on: 0 normal, 1 below normal",
    ),
    row(
        Kind::Acts,
        "set_default_client_priority",
        "PRIORITY",
        "set the priority of clients, for servers started from now on: 0 normal, 1 below normal",
    ),
    row(
        Kind::Lists,
        "get_scheduling",
        "[UID]",
        "scheduling of clients in proxy mode: the daemon's default and the users' own, or the one that applies to UID",
    ),
    row(
        Kind::Acts,
        "set_scheduling",
        "auto|fifo|none [UID]",
        "set the scheduling of one user's clients, or the default of all users, at once, for running and later servers. auto: short work does not wait \
         behind long work; fifo: order of submission; none UID: removes the user's",
    ),
    row(
        Kind::Lists,
        "get_oversubscription",
        "[UID]",
        "whether clients in proxy mode may have more device memory together than the device has: the daemon's default and the users' own, or the one that applies to UID",
    ),
    row(
        Kind::Acts,
        "set_oversubscription",
        "on|off|none [UID]",
        "set this for one user's clients, or the default of all users, at once, for running and later servers. on: memory of clients that \
         do not use it goes to host memory when another one needs room, and busy clients take turns; none UID: removes the user's",
    ),
    row(
        Kind::Lists,
        "get_user_weight",
        "[UID]",
        "weights of users (--users apart): the default and the users' own, or the one that applies to UID",
    ),
    row(
        Kind::Acts,
        "set_user_weight",
        "UID WEIGHT|none",
        "set the weight of a user (--users apart): users with work share a device in proportion to their weights, 1 to 10000; \
         none: 100, the default. Takes effect at once",
    ),
    row(
        Kind::Lists,
        "get_client_weight",
        "SERVER_PID CLIENT_PID",
        "weight of a running client relative to the others: its share of dispatch, in direct mode of turns",
    ),
    row(
        Kind::Acts,
        "set_client_weight",
        "SERVER_PID CLIENT_PID WEIGHT",
        "set the weight of a running client, 1 to 10000; the default is 100",
    ),
    row(
        Kind::Lists,
        "get_default_quantum",
        "",
        "milliseconds that a client in direct mode keeps its turn while others wait, for servers started from now on",
    ),
    row(
        Kind::Acts,
        "set_default_quantum",
        "MILLISECONDS",
        "set the milliseconds that a client in direct mode keeps its turn while others wait, 0.1 to 10000, for servers started from now on",
    ),
    row(
        Kind::Lists,
        "get_quantum",
        "PID",
        "milliseconds that a client in direct mode of a running server keeps its turn while others wait",
    ),
    row(
        Kind::Acts,
        "set_quantum",
        "PID MILLISECONDS",
        "set the milliseconds that a client in direct mode of a running server keeps its turn, connected clients included, 0.1 to 10000",
    ),
    row(
        Kind::Acts,
        "quit",
        "[-t SECONDS]",
        "end the servers once their clients have gone, after SECONDS at the latest, then the daemon",
    ),
    row(
        Kind::Acts,
        "trace",
        "start FILE|stop",
        "record the launches, copies and waits of all clients in a file for Perfetto",
    ),
    row(
        Kind::Acts,
        "reopen_logs",
        "",
        "open new log files, after the old ones have been renamed",
    ),
    row(Kind::Tells, "help", "", "this list"),
];

/// The row of a command.
pub fn find(name: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.name == name)
}

/// The command whose name is nearest to a mistyped one, if one is near.
pub fn nearest(name: &str) -> Option<&'static str> {
    nearest::of(name, TABLE.iter().map(|row| row.name))
}

/// Option that selects the format of a list.
pub const FORMAT_OPTION: &str = "--format";

/// Whether a word is this option: with its value, if that is in the same word.
pub fn format_option(word: &str) -> Option<Option<&str>> {
    match word.strip_prefix(FORMAT_OPTION)? {
        "" => Some(None),
        rest => rest.strip_prefix('=').map(Some),
    }
}

/// Output formats of lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// As NVIDIA's daemon prints it
    #[default]
    Table,
    /// A header and one line per row, comma-separated
    Csv,
    /// An array with one object per row
    Json,
}

impl Format {
    /// Its name in a command line.
    pub fn name(self) -> &'static str {
        match self {
            Format::Table => "table",
            Format::Csv => "csv",
            Format::Json => "json",
        }
    }
}

/// Adds the option for this format to a command line, if the command prints a list and the line has no such option.
pub fn in_format(line: &str, format: Format) -> String {
    let lists = |name: &str| find(name).is_some_and(|row| row.kind == Kind::Lists);
    let asks = line
        .split_whitespace()
        .any(|word| format_option(word).is_some());
    let name = line.split_whitespace().next();
    if format != Format::Table && !asks && name.is_some_and(lists) {
        format!("{} {FORMAT_OPTION}={}", line.trim_end(), format.name())
    } else {
        line.to_owned()
    }
}

/// Whether a command line changes nothing.
pub fn only_looks(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let row = words.next().and_then(find);
    let changes_list =
        row.is_some_and(|row| row.name == "quarantine") && words.next() != Some("list");
    row.is_some_and(|row| row.kind != Kind::Acts) && !changes_list
}

/// A command and the form of its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// Output format, if it prints a list.
    pub format: Format,
}

/// A parsed command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `info`
    Info,
    /// `get_server_list`
    ServerList,
    /// `get_server_status PID`
    ServerStatus(Server),
    /// `get_client_list PID`
    ClientList(Server),
    /// `get_device_client_list [PID]`
    DeviceClientList(Option<Server>),
    /// `ps [-p PID]`
    Processes {
        /// Only this server, or this client process.
        pid: Option<Server>,
    },
    /// `trace start FILE`: the path as given by the operator; the open file comes with the command.
    TraceStart(String),
    /// `trace stop`
    TraceStop,
    /// `users`
    Users,
    /// `quarantine list`
    QuarantineList,
    /// `quarantine add [-uid UID] PROGRAM`
    QuarantineAdd {
        /// User of the program; `None`: the requesting user.
        uid: Option<u32>,
        /// Its name.
        program: String,
    },
    /// `quarantine release [-uid UID] PROGRAM|all`
    QuarantineRelease {
        /// User of the program; `None`: every user whose programs the requesting user may release.
        uid: Option<u32>,
        /// Its name; `None`: all.
        program: Option<String>,
    },
    /// `device_query [PID] [--csv]`
    DeviceQuery {
        /// Only the devices of this server.
        server: Option<Server>,
        /// In comma-separated form, instead of the table.
        commas: bool,
    },
    /// `shutdown_server PID [-f]`
    ShutdownServer {
        /// The server.
        server: Server,
        /// Do not wait for its clients.
        force: bool,
    },
    /// `restart_server PID [-t SECONDS] [-f]`
    RestartServer {
        /// The server.
        server: Server,
        /// How long the next server may take to start and the clients to come to rest, together; zero: the clients must
        /// be at rest. `None`: the default of each.
        patience: Option<Duration>,
        /// End clients that cannot continue.
        force: bool,
    },
    /// `suspend_client SERVER_PID CLIENT_PID [-t SECONDS]`, `resume_client SERVER_PID CLIENT_PID [-t SECONDS]`
    MoveMemory {
        /// Whose client.
        server: Server,
        /// Its process id.
        client: i32,
        /// To host memory; otherwise back.
        out: bool,
        /// How long the client may take to be idle.
        patience: Duration,
    },
    /// `terminate_client SERVER_PID CLIENT_PID`
    TerminateClient {
        /// Whose client.
        server: Server,
        /// Its process id.
        client: i32,
    },
    /// `start_server -uid UID`
    StartServer {
        /// Whose server.
        uid: u32,
    },
    /// `sm_partition add UUID CHUNKS`
    AddPartition(String, u32),
    /// `sm_partition rm UUID PARTITION`
    RemovePartition(String, String),
    /// `lspart`
    Partitions,
    /// `get_[default_]active_thread_percentage[_all]`
    Percentage(Whose),
    /// `set_[default_]active_thread_percentage[_all]`; an invalid percentage changes nothing.
    SetPercentage(Whose, String),
    /// `get_[default_]device_pinned_mem_limit`, `get_[default_]device_mem_guarantee`
    Memory(MemoryBound, Whose, String),
    /// `set_[default_]device_pinned_mem_limit`, `set_[default_]device_mem_guarantee`; bytes, `None`: none.
    SetMemory(MemoryBound, Whose, String, Option<u64>),
    /// `get_user_device_pinned_mem_limit UID DEVICE`, `get_user_device_mem_guarantee UID DEVICE`
    UserMemory(MemoryBound, u32, String),
    /// `set_user_device_pinned_mem_limit UID DEVICE AMOUNT`, `set_user_device_mem_guarantee UID DEVICE AMOUNT`; bytes,
    /// `None`: none.
    SetUserMemory(MemoryBound, u32, String, Option<u64>),
    /// `get_default_client_priority`
    Priority,
    /// `set_default_client_priority PRIORITY`
    SetPriority(u32),
    /// `get_[default_]quantum`
    Quantum(Whose),
    /// `set_[default_]quantum`
    SetQuantum(Whose, Quantum),
    /// `get_oversubscription [UID]`
    Oversubscription(Option<u32>),
    /// `set_oversubscription on|off`: for users without one of their own.
    SetOversubscription(Oversubscription),
    /// `set_oversubscription on|off|none UID`; `None`: the user has none of its own.
    SetUserOversubscription(u32, Option<Oversubscription>),
    /// `get_scheduling [UID]`
    Scheduling(Option<u32>),
    /// `set_scheduling auto|fifo`: for users without one of their own.
    SetScheduling(Scheduling),
    /// `set_scheduling auto|fifo|none UID`; `None`: the user has none of its own.
    SetUserScheduling(u32, Option<Scheduling>),
    /// `get_user_weight [UID]`
    UserWeight(Option<u32>),
    /// `set_user_weight UID WEIGHT|none`; `None`: the user has none of its own.
    SetUserWeight(u32, Option<Weight>),
    /// `get_client_weight SERVER_PID CLIENT_PID`
    Weight {
        /// Whose client.
        server: Server,
        /// Its process id.
        client: i32,
    },
    /// `set_client_weight SERVER_PID CLIENT_PID WEIGHT`
    SetWeight {
        /// Whose client.
        server: Server,
        /// Its process id.
        client: i32,
        /// The new weight.
        weight: u32,
    },
    /// `quit`
    Quit {
        /// Time limit for clients to end; `None`: no limit.
        patience: Option<Duration>,
    },
    /// `reopen_logs`
    ReopenLogs,
    /// `help`
    Help,
    /// A command of interface 3.
    Module(modules::Command),
}

/// The servers whose limits a command concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The defaults for new servers.
    Default,
    /// One server's.
    Server(Server),
    /// Every server's.
    All,
}

/// A server as named by the operator: a process id, or whatever was given in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server(pub(super) String);

impl Server {
    /// Whether this names the server of that process id.
    pub fn is(&self, pid: i32) -> bool {
        self.0.parse() == Ok(pid)
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The text of `help`; also the last part of `mps-control --help`.
pub fn help() -> String {
    let call = |row: &Row| {
        format!("{} {}", row.name, row.arguments)
            .trim_end()
            .to_owned()
    };
    let mut text = String::from("Commands:\n");
    for row in TABLE {
        // The description of a command that is too long for its column starts on a new line.
        let call = call(row);
        let gap = if call.len() > 38 {
            format!("\n{:42}", "")
        } else {
            " ".repeat(40 - call.len())
        };
        let _ = writeln!(text, "  {call}{gap}{}", row.meaning);
    }
    text.push_str(
        "A command that lists (get_…, ps, device_query) takes --format table, csv or json. At the prompt, exit leaves \
         mps-control, and quit asks before it ends the daemon.",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_change_nothing_are_known() {
        for line in ["ps", "quarantine list", "quarantine list --format=json"] {
            assert!(only_looks(line), "{line}");
        }
        for line in ["quit", "quarantine add /a", "quarantine release all", "x"] {
            assert!(!only_looks(line), "{line}");
        }
    }

    #[test]
    fn the_nearest_command_is_found() {
        for (name, expected) in [
            ("get_server_lst", "get_server_list"),
            ("get_clientlist", "get_client_list"),
            ("quti", "quit"),
            ("pss", "ps"),
            ("device-query", "device_query"),
        ] {
            assert_eq!(nearest(name), Some(expected));
        }
        for name in [
            "frobnicate",
            "exit",
            "ab",
            "x",
            "\u{1}\u{2}",
            &"x".repeat(4096),
        ] {
            assert_eq!(nearest(name), None, "{name}");
        }
    }

    #[test]
    fn a_form_is_asked_for_where_there_is_one() {
        let json = |line: &str| in_format(line, Format::Json);
        assert_eq!(json("ps -p 7"), "ps -p 7 --format=json");
        for line in ["ps --format=csv", "ps --format csv"] {
            assert_eq!(json(line), line);
        }
        for line in ["quit", "", "frobnicate", "set_default_client_priority 1"] {
            assert_eq!(json(line), line);
        }
        assert_eq!(in_format("ps", Format::Table), "ps");
    }
}
