//! The settings of the product: environment variables and keys of the configuration file, declared once in [`TABLE`].
//!
//! `--help` of the programs and docs/settings.md are generated from the table.

pub mod file;
pub mod given;

pub use given::{
    ACTIVE_THREAD_PERCENTAGE, CLIENT_PRIORITY, Given, PINNED_DEVICE_MEM_LIMIT, SM_PARTITION,
};
pub use mpsshim_proto::environment::{
    CONFIG, COPY_THREADS, CUDA_LIBRARY, DEVICE_MEM_GUARANTEE, DISABLE, HOST_MEMORY, LIBRARY, LOG,
    LOG_DIRECTORY, MANAGED_FAULTS, MARKS, MAX_CLIENTS, MAX_SPIN, METRICS, MODE, MOVE_LATER,
    MOVED_MEMORY_DIRECTORY, NOTICES, NVML_LIBRARY, OVERSUBSCRIPTION, OWN_SERVERS, PIPE_DIRECTORY,
    QUARANTINE, REPLAY, REQUIRED, SCHEDULING, SERVER, STANDBY, STATIC_PARTITIONING, TURNS, USERS,
};

use crate::defaults::Defaults;
use crate::modules::PROTOCOL_VERSION;
use crate::quarantine::QuarantinePolicy;
use crate::seqpacket;
use clap::ValueEnum;
use mpsshim_model::host_memory::{HostMemory, NoHostMemory};
use mpsshim_model::mode::{Modes, NoModes};
use mpsshim_model::partitions::Partitions;
use mpsshim_model::policy::{MarkKind, TurnPolicy, Users};
use mpsshim_proto::{directory, environment};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

/// Longest path of a Unix socket, bytes: `sun_path` holds 108 with its terminator.
pub const SOCKET_PATH_LIMIT: usize = 107;

/// Folder of a user's logs in the pipe directory.
const LOGS: &str = "logs";
/// Where a session's sockets and the like are.
const RUNTIME: &str = "XDG_RUNTIME_DIR";

/// One row of [`TABLE`].
pub struct Setting {
    /// Environment variable.
    pub name: &'static str,
    /// Key in the file; `None`: it cannot be set in the file.
    pub key: Option<&'static str>,
    /// Default, in words.
    pub default: &'static str,
    /// Description.
    pub meaning: &'static str,
}

/// Default of [`MAX_CLIENTS`].
pub const DEFAULT_MAX_CLIENTS: usize = 256;
/// Default of [`MAX_SPIN`].
pub const DEFAULT_MAX_SPIN_US: u64 = 10_000;
const MOST_SPIN_US: u64 = 1_000_000;
/// Longest time between two attempts to move clients, seconds.
const MOST_SECONDS: u64 = 86_400;
const DEFAULT_MOVE_LATER: Duration = Duration::from_secs(60);
const DEFAULT_OWN_SERVERS: usize = 8;
/// Most servers for single clients.
const MOST_OWN_SERVERS: usize = 256;

/// Every setting.
pub const TABLE: &[Setting] = &[
    Setting {
        name: CONFIG,
        key: None,
        default: "/etc/mpsshim/config.toml, if it exists",
        meaning: "Configuration file of mps-control and mps-run. The environment takes precedence over it.",
    },
    Setting {
        name: PIPE_DIRECTORY,
        key: Some("pipe_directory"),
        default: "/run/mpsshim for root; `$XDG_RUNTIME_DIR/mpsshim` or else /tmp/mpsshim-UID for other users",
        meaning: "Directory of the daemon's sockets, by which programs find the daemon. Without this setting a program \
                  looks for its user's daemon first, then for root's. Daemons in different directories are independent. \
                  The directory must belong to root or the user and must not be writable by others. At most 88 bytes.",
    },
    Setting {
        name: LOG_DIRECTORY,
        key: Some("log_directory"),
        default: "/var/log/mpsshim for root, else `logs` in the pipe directory",
        meaning: "Directory of control.log and server.log.",
    },
    Setting {
        name: CUDA_LIBRARY,
        key: Some("cuda_library"),
        default: "the one that the loader finds",
        meaning: "Absolute path of the genuine CUDA driver (libcuda.so.1), for server and programs.",
    },
    Setting {
        name: NVML_LIBRARY,
        key: Some("nvml_library"),
        default: "the one that the loader finds",
        meaning: "Absolute path of NVIDIA's management library (libnvidia-ml.so.1), which tells the server how much device \
                  memory a client's process holds in direct mode. Without it the memory of contexts is not counted.",
    },
    Setting {
        name: LOG,
        key: Some("log"),
        default: "`info` for daemon and server; programs log nothing",
        meaning: "Log level (error, warn, info, debug, trace), or a filter such as `info,mpsshim_control::link=trace`. In a \
                  program the library logs only if this is set: to standard error, or with `FILTER:/path` to a file.",
    },
    Setting {
        name: DISABLE,
        key: None,
        default: "0",
        meaning: "1: the shim passes every call to the genuine driver, as if it were not loaded.",
    },
    Setting {
        name: REQUIRED,
        key: Some("required"),
        default: "0",
        meaning: "1: a program must not run unshared or without its limits. If there is no daemon or no server, or a limit \
                  cannot be enforced, `cuInit` fails with CUDA_ERROR_MPS_CONNECTION_FAILED (805) and a line on standard \
                  error. Read by the program; mps-run passes it on from the configuration file.",
    },
    Setting {
        name: COPY_THREADS,
        key: None,
        default: "a quarter of the processors that the program may use, at most 3",
        meaning: "Helper threads for copies of 512 KiB and more of pageable memory, in a program in proxy mode: 0 to 15. \
                  They start with the first such copy. Read by the program.",
    },
    Setting {
        name: MANAGED_FAULTS,
        key: None,
        default: "auto",
        meaning: "How a program in proxy mode learns that its host code uses managed memory that is on the device. \
                  userfaultfd: the access waits in the kernel, also in any system call; needs Linux 6.4 and access to \
                  /dev/userfaultfd, root, or the sysctl vm.unprivileged_userfaultfd. signal: by SIGSEGV, which the library \
                  handles; system calls work through the C library's functions. auto: userfaultfd where the kernel allows \
                  it. Read by the program.",
    },
    Setting {
        name: NOTICES,
        key: None,
        default: "off; mps-run sets stderr",
        meaning: "stderr: the library says on standard error why the program is refused, or waits for more than a second \
                  before it is served. Read by the program.",
    },
    Setting {
        name: REPLAY,
        key: None,
        default: "off",
        meaning: "kernels: the program promises that its kernels may run again from the point where it last waited for all \
                  of its work, as in inference. If its server ends or loses its context, what the program has in flight runs \
                  again in the next server instead of ending the program with an error. In proxy mode. Read by the program.",
    },
    Setting {
        name: SERVER,
        key: Some("server"),
        default: "mps-server next to mps-control",
        meaning: "Executable that the daemon starts as its server. Read by the daemon.",
    },
    Setting {
        name: LIBRARY,
        key: Some("library"),
        default: "libmpsshim.so next to mps-run, in ../lib/mpsshim or ../lib",
        meaning: "Library that mps-run preloads.",
    },
    Setting {
        name: MAX_CLIENTS,
        key: Some("max_clients"),
        default: "256",
        meaning: "Maximum number of clients of a server at a time; further ones are refused with \
                  CUDA_ERROR_MPS_MAX_CLIENTS_REACHED (808). Read by the daemon.",
    },
    Setting {
        name: MAX_SPIN,
        key: Some("max_spin_us"),
        default: "10000",
        meaning: "How long an idle thread of the server polls for calls before it sleeps, at most, in microseconds, 0 to \
                  1000000. It polls for as long as its clients usually pause between two calls, and naps through most \
                  of a long pause, so that clients do not wait some 30 µs for it to wake up. 0 saves the most processor \
                  time. Read by the daemon.",
    },
    Setting {
        name: HOST_MEMORY,
        key: Some("host_memory"),
        default: "75%",
        meaning: "Pinned host memory that all clients of a user at a server in proxy mode may have together: an amount such \
                  as 64G, or a percentage of the machine's memory, or of the limit of the server's memory cgroup if that is \
                  less; also by user, as in `75%,1000=64G`. It includes registered memory, managed memory that is in host \
                  memory, and segments. Beyond it, allocations fail with CUDA_ERROR_OUT_OF_MEMORY. Read by the daemon.",
    },
    Setting {
        name: MOVED_MEMORY_DIRECTORY,
        key: Some("moved_memory_directory"),
        default: "none",
        meaning: "Directory for device memory of suspended clients and of clients that make room (see `oversubscription`) that \
                  finds no room within `host_memory`. The server writes it to files without names, which take no space any \
                  more when the memory is back or the client has ended. Choose a local disk: a server that is replaced opens \
                  the files again, and reading them back takes as long as the disk needs. Not set: such memory stays on the \
                  device. Read by the daemon.",
    },
    Setting {
        name: MARKS,
        key: Some("marks"),
        default: "auto",
        meaning: "How a waiting client in proxy mode is told that its stream has reached a completion marker. written: by a \
                  memory write operation in the stream. kernel: by a small kernel of the server's behind the client's, if \
                  both fit into one graph. auto: by such a kernel if several clients wait often and briefly, in one stream \
                  each, and the device has room; otherwise as with written. A \
                  program that waits for one stream while a kernel in another stream fills the device and waits for the \
                  program needs written. Read by the daemon.",
    },
    Setting {
        name: MODE,
        key: Some("mode"),
        default: "proxy",
        meaning: "proxy or direct. In the daemon's environment: the mode of clients that do not request one, also by device \
                  as in `proxy,1=direct` (see `--mode`). In a program's environment: the mode that it requests; any \
                  other value makes `cuInit` fail.",
    },
    Setting {
        name: USERS,
        key: Some("users"),
        default: "serial",
        meaning: "How root's daemon serves the clients of several users. serial: one user at a time; the clients of other users \
                  wait. apart: all users at the same time, each with a server of its own, so that memory and faults are \
                  apart; the devices take turns between the servers. together: all users at the same time, with one server \
                  that runs as root (see `--users`). In the file it applies to root's daemon only. Read by the daemon.",
    },
    Setting {
        name: TURNS,
        key: Some("turns"),
        default: "auto",
        meaning: "When clients in direct mode take turns on a device: always, never, or auto: if clients get more done in \
                  turns than with the driver's time slices, or if their shares differ. Read by the daemon.",
    },
    Setting {
        name: SCHEDULING,
        key: Some("scheduling"),
        default: "auto",
        meaning: "In which order the kernels of clients in proxy mode are served. auto: short work does not wait behind long \
                  work, and clients that have had more than their share come last. fifo: in the order of submission, as under \
                  NVIDIA MPS. The default of the daemon, which `set_scheduling` changes, for all clients or those of a \
                  user. Not set: that of the servers that the daemon takes over, or auto. Read by the daemon.",
    },
    Setting {
        name: OVERSUBSCRIPTION,
        key: Some("oversubscription"),
        default: "off",
        meaning: "on: clients in proxy mode may have more device memory together than the device has. Memory of idle clients \
                  goes to host memory when another client needs room, and comes back before their next call; busy clients that do not fit together take \
                  turns. The default of the daemon, which `set_oversubscription` changes, for all clients or those of a user. Not \
                  set: that of the servers that the daemon takes over, or off. Read by the daemon.",
    },
    Setting {
        name: DEVICE_MEM_GUARANTEE,
        key: Some("device_mem_guarantee"),
        default: "none",
        meaning: "Device memory of each client that is never moved to host memory for other clients, with oversubscription, such as \
                  `0=1G,1=512MB`; a device is an ordinal or a UUID. The default of servers, which `set_default_device_mem_guarantee` changes. A \
                  guarantee for a device that does not exist is an error: the daemon does not start. Read by the daemon.",
    },
    Setting {
        name: STANDBY,
        key: Some("standby"),
        default: "0",
        meaning: "1: each server with clients has a standby, a process with a context made and the clients' images loaded \
                  ahead. If the server ends unexpectedly, its clients go on there after a shorter pause. Costs the device memory of \
                  one more context and of these images. Read by the daemon.",
    },
    Setting {
        name: MOVE_LATER,
        key: Some("move_later"),
        default: "60",
        meaning: "Seconds, at most 86,400. Clients that `restart_server` has left with the old server, because they could not \
                  move, move by themselves once all of them can: the daemon checks this often. After each attempt that \
                  fails, it waits twice as long as before, up to an hour. 0: only another `restart_server` moves them. Read by \
                  the daemon.",
    },
    Setting {
        name: OWN_SERVERS,
        key: Some("own_servers"),
        default: "8",
        meaning: "Maximum number of servers that serve a single program; beyond it, each user can still have one. Graphs with \
                  conditional nodes (CUDA 12.3 and later, loops of JAX) can end a context in which other programs work (driver \
                  580), so a program that launches such graphs beside others moves to a server of its own, which ends with it. \
                  Such a server uses the device memory of one more context, and shares the device with the others by time \
                  slices. 0: such programs share a server and take turns. Read by the daemon.",
    },
    Setting {
        name: QUARANTINE,
        key: Some("quarantine"),
        default: "auto",
        meaning: "auto: a program that had work in flight when a kernel faulted gets a server of its own from its next \
                  start on, until three of its processes in a row have ended without a fault. off: no program does. \
                  Read by the daemon.",
    },
    Setting {
        name: STATIC_PARTITIONING,
        key: Some("static_partitioning"),
        default: "0",
        meaning: "1: multiprocessors can be reserved for clients by `sm_partition`, and clients get proxy mode only (see `-S`). \
                  Read by the daemon.",
    },
    Setting {
        name: METRICS,
        key: Some("metrics"),
        default: "none",
        meaning: "Address and port, such as `127.0.0.1:9400`, at which the daemon serves metrics for Prometheus, under \
                  /metrics (see `--metrics`). Anyone who can connect sees clients and users. Read by the daemon.",
    },
    Setting {
        name: ACTIVE_THREAD_PERCENTAGE,
        key: Some("active_thread_percentage"),
        default: "100",
        meaning: "Percentage of a device's multiprocessors that a client may use. In the daemon's environment: the default \
                  of servers, which commands can change. In a program's environment: can only lower that.",
    },
    Setting {
        name: PINNED_DEVICE_MEM_LIMIT,
        key: Some("pinned_device_mem_limit"),
        default: "none",
        meaning: "Device memory that a client may hold, such as `0=1G,1=512MB`; a device is an ordinal or a UUID. In \
                  daemon and program as above. A limit for a device that does not exist is an error: the daemon does not \
                  start, or `cuInit` fails.",
    },
    Setting {
        name: CLIENT_PRIORITY,
        key: Some("client_priority"),
        default: "0",
        meaning: "0: normal, 1: below normal. In daemon and program as above.",
    },
    Setting {
        name: PROTOCOL_VERSION,
        key: None,
        default: "2",
        meaning: "Version of the interface of mps-control, 2 or 3, as its option -p.",
    },
    Setting {
        name: SM_PARTITION,
        key: None,
        default: "none",
        meaning: "Static partition of a program, as `GPU-eec5798d-…/1`. If it does not exist, or there is no daemon, `cuInit` \
                  fails. Read by the program.",
    },
];

/// Errors of the settings.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SettingsError {
    /// A socket in this pipe directory could not be bound or reached.
    #[error(
        "the pipe directory {path} is too long: the socket {socket} in it would be {length} bytes and a Unix \
         socket may have {SOCKET_PATH_LIMIT}; set {PIPE_DIRECTORY} to a shorter path"
    )]
    PipeDirectoryTooLong {
        /// The directory.
        path: String,
        /// File name of the socket.
        socket: &'static str,
        /// Bytes of the socket's path.
        length: usize,
    },
    /// Not a positive integer.
    #[error("{0} must be a positive integer")]
    Number(String),
    /// Not a number of microseconds, or too large.
    #[error("{0} is not a number from 0 to {MOST_SPIN_US}")]
    Spin(String),
    #[error("{0} is not a number of seconds from 0 to {MOST_SECONDS}")]
    Seconds(String),
    /// Not a number of servers, or too large.
    #[error("{0} is not a number from 0 to {MOST_OWN_SERVERS}")]
    Servers(String),
    /// Not a list of modes.
    #[error("{given}: {why}")]
    Mode {
        /// The setting and its value.
        given: String,
        /// Description of the error.
        why: NoModes,
    },
    /// Not a list of amounts.
    #[error("{given}: {why}")]
    HostMemory {
        /// The setting and its value.
        given: String,
        /// Description of the error.
        why: NoHostMemory,
    },
    /// Not an address.
    #[error("{0} is not an address and a port, such as 127.0.0.1:9400")]
    Metrics(String),
    /// Not one of the words allowed.
    #[error("{0} is not one of {1}")]
    NoneOf(String, String),
    /// The file cannot be parsed.
    #[error("{0}")]
    File(String),
    /// A relative path in the file.
    #[error("{0} is not an absolute path")]
    NotAbsolute(String),
    /// The working directory is gone, so that a relative path means nothing.
    #[error("{0} is relative and the working directory cannot be read; give an absolute path")]
    Relative(String),
}

/// The settings in force in one process. Paths are absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// [`CONFIG`], where it was named.
    pub config: Option<PathBuf>,
    /// [`PIPE_DIRECTORY`], or where a daemon of this user would be.
    pub pipe_directory: PathBuf,
    /// Whether [`PIPE_DIRECTORY`] is set.
    pub pipe_directory_is_named: bool,
    /// [`LOG_DIRECTORY`].
    pub log_directory: PathBuf,
    /// [`CUDA_LIBRARY`].
    pub cuda_library: Option<PathBuf>,
    /// [`NVML_LIBRARY`].
    pub nvml_library: Option<PathBuf>,
    /// [`LOG`].
    pub log: Option<String>,
    /// [`DISABLE`].
    pub disable: bool,
    /// [`REQUIRED`].
    pub required: bool,
    /// [`SERVER`].
    pub server: Option<PathBuf>,
    /// [`LIBRARY`].
    pub library: Option<PathBuf>,
    /// [`MAX_CLIENTS`].
    pub max_clients: usize,
    /// [`MAX_SPIN`], in microseconds.
    pub max_spin_us: u64,
    /// [`HOST_MEMORY`].
    pub host_memory: HostMemory,
    /// [`MOVED_MEMORY_DIRECTORY`].
    pub moved_memory_directory: Option<PathBuf>,
    /// [`MARKS`].
    pub marks: MarkKind,
    /// [`MODE`].
    pub mode: Option<Modes>,
    /// [`USERS`].
    pub users: Users,
    /// [`TURNS`].
    pub turns: TurnPolicy,
    /// [`MOVE_LATER`]; zero: never.
    pub move_later: Duration,
    /// [`OWN_SERVERS`].
    pub own_servers: usize,
    /// [`QUARANTINE`].
    pub quarantine: QuarantinePolicy,
    /// [`ACTIVE_THREAD_PERCENTAGE`], [`PINNED_DEVICE_MEM_LIMIT`], [`CLIENT_PRIORITY`], [`SCHEDULING`] and
    /// [`STATIC_PARTITIONING`].
    pub defaults: Defaults,
    /// Warnings about values of these in the environment that could not be parsed.
    pub ignored: Vec<String>,
    /// [`STANDBY`].
    pub standby: bool,
    /// [`METRICS`].
    pub metrics: Option<SocketAddr>,
}

impl Settings {
    /// The settings that `lookup` finds, which stands for options and environment, completed from the file.
    ///
    /// # Errors
    /// A value or the file is invalid.
    pub fn load(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Settings, SettingsError> {
        Settings::load_or(lookup, |_| None)
    }

    /// As [`Settings::load`]; `otherwise` has values for settings that neither `lookup` nor the file has.
    ///
    /// # Errors
    /// A value or the file is invalid.
    pub fn load_or(
        lookup: impl Fn(&str) -> Option<OsString>,
        otherwise: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Settings, SettingsError> {
        let environment = |name: &'static str| from_environment(&lookup, name);
        let config = environment(CONFIG).as_ref().map(absolute).transpose()?;
        let file = file::read(config.as_deref())?;
        let is_root = nix::unistd::geteuid().is_root();
        let get = |name: &'static str| {
            let given = environment(name).or_else(|| file.get(name).cloned());
            given.or_else(|| from_environment(&otherwise, name))
        };
        let settings = Settings::from_given(get, is_root)?;
        Ok(Settings { config, ..settings })
    }

    /// The settings of this process's environment, without a file.
    pub fn from_env() -> Result<Settings, SettingsError> {
        Settings::from_lookup(
            |name| std::env::var_os(name),
            nix::unistd::geteuid().is_root(),
        )
    }

    /// The settings that `lookup` names. An empty variable counts as not set.
    pub fn from_lookup(
        lookup: impl Fn(&str) -> Option<OsString>,
        is_root: bool,
    ) -> Result<Settings, SettingsError> {
        Settings::from_given(|name| from_environment(&lookup, name), is_root)
    }

    fn from_given(
        get: impl Fn(&'static str) -> Option<Given>,
        is_root: bool,
    ) -> Result<Settings, SettingsError> {
        let path = |name: &'static str| get(name).as_ref().map(absolute).transpose();
        let text = |given: Given| given.value.to_string_lossy().into_owned();

        let named = path(PIPE_DIRECTORY)?;
        let pipe_directory_is_named = named.is_some();
        let pipe_directory = named.unwrap_or_else(|| own_pipe_directory(is_root));
        check_socket_length(&pipe_directory)?;
        let log_directory = match path(LOG_DIRECTORY)? {
            Some(directory) => directory,
            None if is_root => PathBuf::from("/var/log/mpsshim"),
            None => pipe_directory.join(LOGS),
        };
        let (mut defaults, ignored) = Defaults::from_given(&get).map_err(SettingsError::File)?;
        if let Some(scheduling) = get(SCHEDULING) {
            defaults.limits.scheduling.default = word(scheduling)?;
            defaults.scheduling_is_set = true;
        }
        if let Some(oversubscription) = get(OVERSUBSCRIPTION) {
            defaults.limits.oversubscription.default = word(oversubscription)?;
            defaults.oversubscription_is_set = true;
        }
        if get(STATIC_PARTITIONING).map_or(Ok(false), flag)? {
            defaults.limits.partitions = Some(Partitions::default());
        }
        let users = get(USERS);
        // The file is for the daemons of all users, and only root's serves several.
        let is_for_root = users.as_ref().is_some_and(|given| given.in_file);
        let users = users.map_or(Ok(Users::default()), word)?;
        let users = match is_for_root && !is_root {
            true => Users::default(),
            false => users,
        };
        Ok(Settings {
            config: None,
            pipe_directory,
            pipe_directory_is_named,
            log_directory,
            cuda_library: path(CUDA_LIBRARY)?,
            nvml_library: path(NVML_LIBRARY)?,
            log: get(LOG).map(text),
            disable: get(DISABLE).is_some_and(|given| given.value != "0"),
            required: get(REQUIRED).map_or(Ok(false), flag)?,
            standby: get(STANDBY).map_or(Ok(false), flag)?,
            server: path(SERVER)?,
            library: path(LIBRARY)?,
            max_clients: get(MAX_CLIENTS).map_or(Ok(DEFAULT_MAX_CLIENTS), positive)?,
            max_spin_us: get(MAX_SPIN).map_or(Ok(DEFAULT_MAX_SPIN_US), spin)?,
            host_memory: get(HOST_MEMORY).map_or(Ok(HostMemory::default()), host_memory)?,
            moved_memory_directory: path(MOVED_MEMORY_DIRECTORY)?,
            marks: get(MARKS).map_or(Ok(MarkKind::default()), word)?,
            mode: get(MODE).map(mode).transpose()?,
            users,
            turns: get(TURNS).map_or(Ok(TurnPolicy::default()), word)?,
            move_later: get(MOVE_LATER).map_or(Ok(DEFAULT_MOVE_LATER), seconds)?,
            own_servers: get(OWN_SERVERS).map_or(Ok(DEFAULT_OWN_SERVERS), servers)?,
            quarantine: get(QUARANTINE).map_or(Ok(QuarantinePolicy::default()), word)?,
            metrics: get(METRICS).map(metrics).transpose()?,
            defaults,
            ignored,
        })
    }

    /// For clients of the daemon: if no directory is set, uses that of the first daemon that listens, the user's own or
    /// root's.
    pub fn at_daemon(mut self) -> Settings {
        if self.pipe_directory_is_named {
            return self;
        }
        let uid = nix::unistd::geteuid().as_raw();
        let logs_are_there = self.log_directory == self.pipe_directory.join(LOGS);
        for candidate in directory::candidates(uid, std::env::var_os(RUNTIME).as_deref()) {
            let is_trusted = directory::of_client(&candidate, false, false).is_ok();
            if is_trusted && seqpacket::connect(&candidate.join("control")).is_ok() {
                if logs_are_there {
                    self.log_directory = candidate.join(LOGS);
                }
                self.pipe_directory = candidate;
                break;
            }
        }
        self
    }

    /// Passes configuration file and paths on to another program of the product, whatever its working directory.
    pub fn hand_on<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env(PIPE_DIRECTORY, &self.pipe_directory);
        command.env(LOG_DIRECTORY, &self.log_directory);
        let paths = [
            (CONFIG, &self.config),
            (CUDA_LIBRARY, &self.cuda_library),
            (NVML_LIBRARY, &self.nvml_library),
            (SERVER, &self.server),
        ];
        for (name, path) in paths {
            if let Some(path) = path {
                command.env(name, path);
            }
        }
        command
    }

    /// Socket of clients and of status commands.
    pub fn control_socket(&self) -> PathBuf {
        self.pipe_directory.join("control")
    }

    /// Socket of commands that change something.
    pub fn privileged_socket(&self) -> PathBuf {
        self.pipe_directory.join("control_privileged")
    }
}

/// The default pipe directory of this user's daemon.
pub fn own_pipe_directory(is_root: bool) -> PathBuf {
    let uid = if is_root {
        0
    } else {
        nix::unistd::geteuid().as_raw()
    };
    let own = directory::own(uid, std::env::var_os(RUNTIME).as_deref());
    own.into_iter().next().unwrap_or_default()
}

fn from_environment(
    lookup: impl Fn(&str) -> Option<OsString>,
    name: &'static str,
) -> Option<Given> {
    let value = lookup(name).filter(|value| !value.is_empty())?;
    Some(Given {
        told: format!("{name}={}", value.to_string_lossy()),
        value,
        in_file: false,
    })
}

fn absolute(given: &Given) -> Result<PathBuf, SettingsError> {
    let path = Path::new(&given.value);
    if given.in_file && !path.is_absolute() {
        return Err(SettingsError::NotAbsolute(given.told.clone()));
    }
    std::path::absolute(path).map_err(|_| SettingsError::Relative(given.told.clone()))
}

fn metrics(given: Given) -> Result<SocketAddr, SettingsError> {
    let address = given.value.to_str().and_then(|text| text.parse().ok());
    address.ok_or(SettingsError::Metrics(given.told))
}

/// A number that fits.
fn number<N: FromStr>(
    given: Given,
    fits: impl FnOnce(&N) -> bool,
    wrong: fn(String) -> SettingsError,
) -> Result<N, SettingsError> {
    let number = given.value.to_str().and_then(|text| text.parse().ok());
    number.filter(fits).ok_or_else(|| wrong(given.told))
}

fn flag(given: Given) -> Result<bool, SettingsError> {
    // In the environment any value other than 0 is true, as in the shim.
    match (given.value.to_str(), given.in_file) {
        (Some("0"), _) | (Some("false"), true) => Ok(false),
        (Some("1" | "true"), _) | (_, false) => Ok(true),
        _ => Err(SettingsError::NoneOf(given.told, "0 and 1".into())),
    }
}

fn positive(given: Given) -> Result<usize, SettingsError> {
    number(given, |number| *number > 0, SettingsError::Number)
}

fn spin(given: Given) -> Result<u64, SettingsError> {
    number(given, |number| *number <= MOST_SPIN_US, SettingsError::Spin)
}

fn seconds(given: Given) -> Result<Duration, SettingsError> {
    let found = number(
        given,
        |number| *number <= MOST_SECONDS,
        SettingsError::Seconds,
    );
    found.map(Duration::from_secs)
}

fn servers(given: Given) -> Result<usize, SettingsError> {
    number(
        given,
        |number| *number <= MOST_OWN_SERVERS,
        SettingsError::Servers,
    )
}

fn mode(given: Given) -> Result<Modes, SettingsError> {
    let modes = given.value.to_string_lossy().parse();
    modes.map_err(|why| SettingsError::Mode {
        given: given.told,
        why,
    })
}

fn host_memory(given: Given) -> Result<HostMemory, SettingsError> {
    let bounds = given.value.to_string_lossy().parse();
    bounds.map_err(|why| SettingsError::HostMemory {
        given: given.told,
        why,
    })
}

fn word<T: ValueEnum>(given: Given) -> Result<T, SettingsError> {
    T::from_str(&given.value.to_string_lossy(), false).map_err(|_| {
        let names: Vec<String> = T::value_variants().iter().map(name_of).collect();
        SettingsError::NoneOf(given.told, names.join(", "))
    })
}

/// The name of a value in settings and options.
pub fn name_of(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("none is skipped");
    value.get_name().to_owned()
}

fn check_socket_length(directory: &Path) -> Result<(), SettingsError> {
    // The longer of the two names decides.
    let socket = "control_privileged";
    let length = directory.join(socket).as_os_str().len();
    if length > SOCKET_PATH_LIMIT {
        return Err(SettingsError::PipeDirectoryTooLong {
            path: directory.display().to_string(),
            socket,
            length,
        });
    }
    Ok(())
}

/// Begins the lines on standard error that warn about this process's environment, behind the program's name.
pub const WARNING: &str = "warning: ";

/// Warns on standard error about unknown names and invalid values in this process's environment. Nothing else depends
/// on the lines: the settings keep their defaults.
pub fn warn_of_environment(program: &str) {
    for warning in environment::warnings(std::env::vars_os()) {
        // If standard error is closed, the warning is lost.
        let _ = writeln!(io::stderr(), "{program}: {WARNING}{warning}");
    }
}

/// The table as the last part of a `--help` text.
pub fn help_text() -> String {
    let mut text = String::from("Environment:\n");
    for setting in TABLE {
        let _ = writeln!(text, "  {}", setting.name);
        let _ = writeln!(
            text,
            "          {} [default: {}]",
            setting.meaning, setting.default
        );
    }
    text
}

/// The table as docs/settings.md.
pub fn markdown() -> String {
    let mut text = String::from(
        "# Settings\n\n\
         Generated from `control/src/settings.rs`; `UPDATE_DOCS=1 cargo test -p mpsshim-control settings` \
         rewrites it.\n\n\
         All settings are environment variables. A relative path is relative to the working directory of the \
         process that reads it; an empty value counts as not set. The variables `CUDA_MPS_*` and \
         `CUDA_VISIBLE_DEVICES` have the meaning that NVIDIA gives them, see [operations](operations.md).\n\n\
         Settings with a key can also be in the configuration file, /etc/mpsshim/config.toml or the one that \
         `--config` or `MPSSHIM_CONFIG` names, which mps-control and mps-run read. It is TOML, one line \
         `key = value` for each; paths are absolute, and an invalid value is an error. The environment takes \
         precedence over the file. Programs do not read the file: if it sets `pipe_directory` or `cuda_library`, \
         start them with mps-run, which passes these on, or set the variables for them. \
         `packaging/config.toml` is a sample.\n\n\
         | variable | key | default | meaning |\n|---|---|---|---|\n",
    );
    for setting in TABLE {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            setting.name,
            setting.key.unwrap_or_default(),
            setting.default,
            setting.meaning
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_model::policy::Scheduling;

    fn settings(values: &[(&str, &str)], is_root: bool) -> Result<Settings, SettingsError> {
        Settings::from_lookup(
            |name| {
                values
                    .iter()
                    .find(|(n, _)| *n == name)
                    .map(|(_, v)| OsString::from(v))
            },
            is_root,
        )
    }

    #[test]
    fn defaults() {
        let root = settings(&[], true).expect("defaults");
        assert_eq!(root.pipe_directory, Path::new("/run/mpsshim"));
        assert!(!root.pipe_directory_is_named);
        assert_eq!(root.log_directory, Path::new("/var/log/mpsshim"));
        assert!(!root.disable);
        let user = settings(&[(PIPE_DIRECTORY, "/run/x"), (LOG, "")], false).expect("defaults");
        assert_eq!(user.log_directory, Path::new("/run/x/logs"));
        assert_eq!(user.log, None);
    }

    #[test]
    fn a_number_of_clients_is_over_zero() {
        let clients =
            |value| settings(&[(MAX_CLIENTS, value)], true).map(|found| found.max_clients);
        assert_eq!(
            (clients(""), clients("3")),
            (Ok(DEFAULT_MAX_CLIENTS), Ok(3))
        );
        for value in ["0", "-1", "many", "2.5"] {
            let error = clients(value).expect_err(value).to_string();
            assert_eq!(
                error,
                format!("MPSSHIM_MAX_CLIENTS={value} must be a positive integer")
            );
        }
        let row = TABLE.iter().find(|row| row.name == MAX_CLIENTS);
        assert_eq!(row.expect("row").default, DEFAULT_MAX_CLIENTS.to_string());
    }

    #[test]
    fn a_time_to_look_for_calls_is_bounded() {
        let spin = |value| settings(&[(MAX_SPIN, value)], true).map(|found| found.max_spin_us);
        let spins = ["", "0", "1000000"].map(spin);
        assert_eq!(spins, [Ok(DEFAULT_MAX_SPIN_US), Ok(0), Ok(1_000_000)]);
        for value in ["-1", "1000001", "2ms"] {
            let error = spin(value).expect_err(value).to_string();
            let said = format!("MPSSHIM_MAX_SPIN_US={value} is not a number from 0 to 1000000");
            assert_eq!(error, said);
        }
        let row = TABLE.iter().find(|row| row.name == MAX_SPIN);
        assert_eq!(row.expect("row").default, DEFAULT_MAX_SPIN_US.to_string());
    }

    #[test]
    fn pinned_host_memory_is_an_amount_or_a_percentage() {
        let bounds = |value| settings(&[(HOST_MEMORY, value)], true).map(|found| found.host_memory);
        assert_eq!(bounds(""), Ok(HostMemory::default()));
        for text in ["64G", "50%", "75%,1000=64G"] {
            assert_eq!(bounds(text), Ok(text.parse().expect(text)));
        }
        let error = bounds("much").expect_err("no amount").to_string();
        assert_eq!(
            error,
            "MPSSHIM_HOST_MEMORY=much: \"much\" is neither an amount (such as 64G, or 50% of the machine's memory) nor \
             UID=AMOUNT"
        );
        let row = TABLE.iter().find(|row| row.name == HOST_MEMORY);
        assert_eq!(row.expect("row").default, HostMemory::default().to_string());
    }

    #[test]
    fn a_mode_is_one_of_two_or_by_device() {
        let mode = |value| settings(&[(MODE, value)], true).map(|found| found.mode);
        assert_eq!(mode(""), Ok(None));
        for text in ["proxy", "direct", "proxy,1=direct"] {
            assert_eq!(mode(text), Ok(Some(text.parse().expect(text))));
        }
        let error = mode("both").expect_err("no mode").to_string();
        assert_eq!(
            error,
            "MPSSHIM_MODE=both: \"both\" is neither a mode (proxy, direct) nor DEVICE=MODE"
        );
    }

    #[test]
    fn turns_are_taken_by_one_of_three_policies() {
        let turns = |value| settings(&[(TURNS, value)], true).map(|found| found.turns);
        assert_eq!(turns(""), Ok(TurnPolicy::Auto));
        assert_eq!(turns("always"), Ok(TurnPolicy::Always));
        let error = turns("1").expect_err("no policy").to_string();
        assert_eq!(error, "MPSSHIM_TURNS=1 is not one of auto, always, never");
    }

    #[test]
    fn users_are_served_in_one_of_three_ways() {
        fn users(value: &str, is_root: bool) -> Result<Users, SettingsError> {
            settings(&[(USERS, value)], is_root).map(|found| found.users)
        }
        assert_eq!(users("", true), Ok(Users::Serial));
        for way in Users::value_variants() {
            assert_eq!(users(&name_of(way), true), Ok(*way));
            assert_eq!(name_of(way), way.to_string());
            // The daemon refuses it, and says why.
            assert_eq!(users(&name_of(way), false), Ok(*way));
        }
        let error = users("all", true).expect_err("no way").to_string();
        let said = "MPSSHIM_USERS=all is not one of serial, apart, together";
        assert_eq!(error, said);
    }

    #[test]
    fn in_the_file_users_are_those_of_root_s_daemon() {
        let users = |value: &str, is_root| {
            let given = |name| {
                (name == USERS).then(|| Given {
                    value: value.into(),
                    told: format!("users = {value}"),
                    in_file: true,
                })
            };
            Settings::from_given(given, is_root).map(|found| found.users)
        };
        assert_eq!(users("together", true), Ok(Users::Together));
        assert_eq!(users("together", false), Ok(Users::Serial));
        assert!(users("all", false).is_err());
    }

    #[test]
    fn kernels_are_served_in_one_of_two_orders() {
        let scheduling = |value| {
            let found = settings(&[(SCHEDULING, value)], true);
            found.map(|found| {
                let Defaults {
                    limits,
                    scheduling_is_set,
                    ..
                } = found.defaults;
                (limits.scheduling.default, scheduling_is_set)
            })
        };
        assert_eq!(scheduling(""), Ok((Scheduling::Auto, false)));
        assert_eq!(scheduling("auto"), Ok((Scheduling::Auto, true)));
        assert_eq!(scheduling("fifo"), Ok((Scheduling::Fifo, true)));
        let error = scheduling("none").expect_err("no scheduling").to_string();
        assert_eq!(error, "MPSSHIM_SCHEDULING=none is not one of auto, fifo");
    }

    #[test]
    fn clients_that_could_not_move_do_so_after_a_time_or_never() {
        let found = |value| settings(&[(MOVE_LATER, value)], true).map(|found| found.move_later);
        for (value, seconds) in [("", 60), ("0", 0), ("86400", 86_400)] {
            assert_eq!(found(value), Ok(Duration::from_secs(seconds)), "{value}");
        }
        let error = found("86401").expect_err("too long").to_string();
        let why = "is not a number of seconds from 0 to 86400";
        assert_eq!(error, format!("MPSSHIM_MOVE_LATER=86401 {why}"));
        assert!(found("1m").is_err());
    }

    #[test]
    fn the_number_of_servers_for_single_programs_is_bounded() {
        let found = |value| settings(&[(OWN_SERVERS, value)], true).map(|found| found.own_servers);
        for (value, servers) in [("", 8), ("0", 0), ("256", 256)] {
            assert_eq!(found(value), Ok(servers), "{value}");
        }
        for value in ["257", "-1", "some"] {
            let error = found(value).expect_err("no number of servers").to_string();
            let expected = format!("MPSSHIM_OWN_SERVERS={value} is not a number from 0 to 256");
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn programs_are_quarantined_or_not() {
        let found = |value| settings(&[(QUARANTINE, value)], true).map(|found| found.quarantine);
        assert_eq!(found(""), Ok(QuarantinePolicy::Auto));
        assert_eq!(found("off"), Ok(QuarantinePolicy::Off));
        let error = found("on").expect_err("no policy").to_string();
        assert_eq!(error, "MPSSHIM_QUARANTINE=on is not one of auto, off");
    }

    #[test]
    fn marks_are_made_in_one_of_three_ways() {
        fn marks(value: &str) -> Result<MarkKind, SettingsError> {
            settings(&[(MARKS, value)], true).map(|found| found.marks)
        }
        assert_eq!(marks(""), Ok(MarkKind::Auto));
        for kind in MarkKind::value_variants() {
            assert_eq!(marks(&name_of(kind)), Ok(*kind));
        }
        let error = marks("no").expect_err("no kind").to_string();
        let said = "MPSSHIM_MARKS=no is not one of auto, written, kernel";
        assert_eq!(error, said);
    }

    #[test]
    fn relative_paths_become_absolute() {
        let found = settings(&[(PIPE_DIRECTORY, "here"), (DISABLE, "1")], true).expect("relative");
        assert!(found.pipe_directory.is_absolute());
        assert!(found.pipe_directory.ends_with("here"));
        assert!(found.disable);
        assert!(!settings(&[(DISABLE, "0")], true).expect("disable").disable);
    }

    #[test]
    fn the_longest_pipe_directory() {
        let longest = SOCKET_PATH_LIMIT - "/control_privileged".len();
        let path = format!("/{}", "x".repeat(longest - 1));
        assert!(settings(&[(PIPE_DIRECTORY, &path)], true).is_ok());
        let path = format!("{path}x");
        let error = settings(&[(PIPE_DIRECTORY, &path)], true)
            .expect_err("one byte more")
            .to_string();
        assert!(
            error.contains(&path) && error.contains("107") && error.contains("108 bytes"),
            "{error}"
        );
        let said = TABLE
            .iter()
            .find(|s| s.name == PIPE_DIRECTORY)
            .expect("row")
            .meaning;
        assert!(said.contains(&format!("At most {longest} bytes")));
    }

    #[test]
    fn every_name_is_in_the_table() {
        let names = TABLE.iter().map(|row| row.name);
        let mut named: Vec<&str> = names
            .filter(|name| name.starts_with(environment::PREFIX))
            .collect();
        let mut declared = environment::NAMES.to_vec();
        named.sort_unstable();
        declared.sort_unstable();
        assert_eq!(named, declared);
    }

    #[test]
    fn every_setting_is_in_the_help() {
        for setting in TABLE {
            assert!(help_text().contains(setting.name));
            assert!(!setting.meaning.contains('|') && !setting.default.contains('|'));
        }
    }

    #[test]
    fn settings_md_is_up_to_date() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/settings.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, markdown()).expect("write docs/settings.md");
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == markdown(),
            "docs/settings.md differs from the table: run UPDATE_DOCS=1 cargo test -p mpsshim-control settings"
        );
    }
}
