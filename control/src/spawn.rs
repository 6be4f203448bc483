//! Starting a server process.

use crate::closers::Stranger;
use crate::link::Link;
use crate::program::Program;
use crate::quarantine::QuarantinePolicy;
use crate::releases::Executable;
use crate::seqpacket;
use crate::servers::NamedId;
use crate::settings::{self, Settings};
use mpsshim_model::limits::Limits;
use mpsshim_model::mode::Modes;
use mpsshim_model::named::Named;
use mpsshim_model::policy::Users;
use nix::unistd::{Uid, User, geteuid};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The executable cannot be run.
    #[error(
        "cannot start the server {path}: {source}; put mps-server next to mps-control or set {}",
        settings::SERVER
    )]
    Execute {
        /// The executable.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No such user.
    #[error("there is no user with id {0}")]
    NoUser(u32),
    /// A system call failed, for example for lack of descriptors.
    #[error("cannot prepare a server: {0}")]
    Prepare(#[from] io::Error),
}

/// The user or users that a server serves.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id; `None`: the user's own.
    pub gid: Option<u32>,
    /// The named server; `None`: the user's own server.
    pub named: Option<NamedId>,
}

impl Owner {
    /// Whether both are the same server's, whichever group it has.
    pub fn is(&self, other: Owner) -> bool {
        (self.uid, self.named) == (other.uid, other.named)
    }
}

/// Starts servers, all with the same settings and log.
pub struct Launcher {
    settings: Settings,
    log: File,
}

/// The sessions that a server starts with.
#[derive(Debug)]
pub enum Start {
    /// No sessions.
    Anew,
    /// The sessions held by this keeper.
    With {
        /// The keeper.
        keeper: Stranger,
        /// It holds a single session.
        single: bool,
    },
    /// The sessions of another server, when it ends.
    Standby {
        /// Process id of that server.
        of: i32,
        /// Create the context only then: the devices admit one process.
        without_context: bool,
        /// A single session of that server, at once.
        single: bool,
    },
}

impl Start {
    /// Whether the server is for a single client.
    pub fn is_single(&self) -> bool {
        match self {
            Start::Anew => false,
            Start::With { single, .. } | Start::Standby { single, .. } => *single,
        }
    }
}

impl Launcher {
    /// Servers log to `log`, which is opened for appending.
    pub fn new(settings: Settings, log: File) -> Launcher {
        Launcher { settings, log }
    }

    /// The path of the installed executable.
    pub fn executable(&self) -> PathBuf {
        server_executable(&self.settings)
    }

    /// Servers that are started from now on log to this file.
    pub fn set_log(&mut self, log: File) {
        self.log = log;
    }

    /// Where servers log.
    pub fn log(&self) -> BorrowedFd<'_> {
        self.log.as_fd()
    }

    /// Whether this daemon may start servers for that user.
    pub fn serves(&self, uid: u32) -> bool {
        geteuid().is_root() || geteuid().as_raw() == uid
    }

    /// Whether processes of this user are trusted: the user is allowed to command this daemon anyway.
    pub fn trusts(&self, uid: u32) -> bool {
        uid == 0 || uid == geteuid().as_raw()
    }

    /// The user or users that the server of this user's clients must serve.
    pub fn owner(&self, uid: u32, gid: Option<u32>) -> Owner {
        match self.settings.users {
            Users::Serial | Users::Apart => Owner {
                uid,
                gid,
                named: None,
            },
            Users::Together => Owner {
                uid: geteuid().as_raw(),
                gid: None,
                named: None,
            },
        }
    }

    /// The users served by that owner's server, in words.
    pub fn served(&self, owner: Owner) -> String {
        match self.settings.users {
            Users::Serial | Users::Apart => format!("user {}", owner.uid),
            Users::Together => "all users".to_owned(),
        }
    }

    /// Whether each server with clients has a standby.
    pub fn keeps_standbys(&self) -> bool {
        self.settings.standby
    }

    /// How long after a restart a server that was left with clients is asked whether they can move by now; zero: never.
    pub fn move_later(&self) -> Duration {
        self.settings.move_later
    }

    /// Most servers for single clients.
    pub fn own_servers(&self) -> usize {
        self.settings.own_servers
    }

    /// How the clients of several users are served.
    pub fn users(&self) -> Users {
        self.settings.users
    }

    /// Whether programs are quarantined.
    pub fn quarantine(&self) -> QuarantinePolicy {
        self.settings.quarantine
    }

    /// Modes of clients that ask for none.
    pub fn modes(&self) -> Modes {
        self.settings.mode.clone().unwrap_or_default()
    }

    /// Starts a server and keeps the daemon's end of the link, which does not block. The server is told the quarantined
    /// program that it is for. It has no supplementary groups, unless it runs as the daemon's own user. Also returns the
    /// owner with the group that the server runs with, if that is not the daemon's own.
    pub fn start(
        &self,
        executable: &Executable,
        (owner, quarantined): (Owner, Option<&Program>),
        limits: &Limits,
        start: &Start,
    ) -> Result<(Child, Link, Owner), SpawnError> {
        let (ours, theirs) = seqpacket::pair()?;
        seqpacket::set_nonblocking(&ours, true)?;
        let mut command = self.prepare(executable.command())?;
        let visible = limits.named.as_deref().and_then(Named::visible_devices);
        if let Some(visible) = visible {
            command.env("CUDA_VISIBLE_DEVICES", visible);
        }
        let limits = serde_json::to_string(limits).map_err(io::Error::from)?;
        let modes = self.modes().to_string();
        // The link is the server's standard input: an inheritable descriptor that no other child gets.
        command
            .args(["--link-fd", "0", "--limits", &limits, "--max-clients"])
            .arg(self.settings.max_clients.to_string())
            .args(["--mode", &modes])
            .args(["--turns", &settings::name_of(&self.settings.turns)])
            .args(["--max-spin-us", &self.settings.max_spin_us.to_string()])
            .args(["--host-memory", &self.settings.host_memory.to_string()])
            .args(["--marks", &settings::name_of(&self.settings.marks)])
            .stdin(theirs);
        if let Some(directory) = &self.settings.moved_memory_directory {
            command.arg("--moved-memory-directory").arg(directory);
        }
        if let Some(program) = quarantined {
            let program = serde_json::to_string(program).map_err(io::Error::from)?;
            command.args(["--quarantined", &program]);
        }
        // Likewise, the connection to the keeper is its standard output, until the server has taken it.
        match start {
            Start::With { keeper, .. } => command
                .args(["--keeper-fd", "1"])
                .stdout(keeper.as_fd().try_clone_to_owned()?),
            Start::Standby {
                without_context, ..
            } => {
                command.arg("--standby").stdout(self.log.try_clone()?);
                if *without_context {
                    command.arg("--without-context");
                }
                &mut command
            }
            Start::Anew => command.stdout(self.log.try_clone()?),
        };
        // A single program has the driver's own number, with which a context is created sooner.
        if !start.is_single() && std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
            // The maximum number of hardware queues, so that clients' streams seldom wait for each other.
            command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
        }
        let uid = owner.uid;
        let mut gid = None;
        if geteuid().as_raw() != uid {
            let group = match owner.gid {
                Some(gid) => gid,
                None => group_of(uid)?,
            };
            // As root this also drops the supplementary groups.
            command.gid(group).uid(uid);
            gid = Some(group);
        }
        let link = Link::to_user(Stranger::new(ours, uid), uid);
        let owner = Owner { gid, ..owner };
        Ok((spawn(&mut command, executable.path())?, link, owner))
    }

    /// Starts a process that prints the devices as one line of JSON.
    pub fn list_devices(&self) -> Result<Child, SpawnError> {
        self.describe("--list-devices")
    }

    /// Starts a process that prints the driver and its devices as one line of JSON.
    pub fn describe_driver(&self) -> Result<Child, SpawnError> {
        self.describe("--describe-driver")
    }

    fn describe(&self, option: &str) -> Result<Child, SpawnError> {
        let path = self.executable();
        let mut command = self.prepare(Command::new(&path))?;
        command
            .arg(option)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        spawn(&mut command, &path)
    }

    /// Adds the settings that are common to all processes of servers' executables.
    fn prepare(&self, mut command: Command) -> io::Result<Command> {
        command.stderr(self.log.try_clone()?);
        command.current_dir("/").process_group(0);
        self.settings.hand_on(&mut command);
        if let Some(filter) = &self.settings.log {
            command.env(settings::LOG, filter);
        }
        // The server needs the genuine driver, regardless of LD_PRELOAD here, and gets its limits from the daemon.
        for name in [
            "LD_PRELOAD",
            // Set by the user for the program that mps-run starts the daemon for: in the server they would apply to the
            // launches of many clients, and a tool would observe all of them.
            "CUDA_LAUNCH_BLOCKING",
            "CUDA_INJECTION64_PATH",
            // The daemon's supervisor must not get notifications from its children.
            "NOTIFY_SOCKET",
            settings::MODE,
            settings::ACTIVE_THREAD_PERCENTAGE,
            settings::PINNED_DEVICE_MEM_LIMIT,
            settings::CLIENT_PRIORITY,
        ] {
            command.env_remove(name);
        }
        Ok(command)
    }
}

fn spawn(command: &mut Command, path: &Path) -> Result<Child, SpawnError> {
    command.spawn().map_err(|source| SpawnError::Execute {
        path: path.to_owned(),
        source,
    })
}

/// The executable of servers.
pub fn server_executable(settings: &Settings) -> PathBuf {
    let named = settings.server.clone();
    named.unwrap_or_else(|| beside_this_executable("mps-server"))
}

fn group_of(uid: u32) -> Result<u32, SpawnError> {
    let user = User::from_uid(Uid::from_raw(uid)).map_err(io::Error::from)?;
    Ok(user.ok_or(SpawnError::NoUser(uid))?.gid.as_raw())
}

/// Connects `stdin`, `stdout` and `stderr` of a process to /dev/null.
pub fn without_terminal(command: &mut Command) -> &mut Command {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
}

/// The path of a file that is installed in the directory of the running executable.
pub fn beside_this_executable(name: &str) -> PathBuf {
    std::env::current_exe()
        .ok()
        .and_then(|executable| executable.parent().map(Path::to_owned))
        .map_or_else(|| PathBuf::from(name), |directory| directory.join(name))
}
