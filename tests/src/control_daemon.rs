//! A control daemon in a directory of its own, and a client that only shakes hands.

use crate::PATIENCE;
use crate::artifacts::artifact;
use mpsshim_api::cuda::CUDA_ERROR_MPS_SERVER_NOT_READY;
use mpsshim_control::seqpacket;
use mpsshim_proto::handshake::{ClientHello, MAGIC_CLIENT, PROTOCOL_VERSION, Welcome, Wire};
use mpsshim_proto::wire;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

pub const SERVER_NOT_READY: u32 = CUDA_ERROR_MPS_SERVER_NOT_READY.0;

/// A wire that no release speaks, except for the fake server.
pub const OTHER_WIRE: Wire = Wire {
    protocol: 99,
    fingerprint: 0x99,
};

/// Polls until it is so; panics when it is not within [`PATIENCE`].
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process has ended, so that others can have its locks.
pub fn has_ended(pid: u32) -> bool {
    // A zombie without other threads has closed all its descriptors.
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    threads <= 1
        && std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| {
            stat.rsplit_once(") ")
                .is_none_or(|(_, rest)| rest.starts_with('Z'))
        })
}

/// A user to test permissions with; `None` where this process is not root and cannot change its user.
pub fn other_user() -> Option<u32> {
    nix::unistd::geteuid().is_root().then_some(65534)
}

/// Two users beside root.
pub fn two_users() -> Option<[u32; 2]> {
    if other_user().is_none() {
        eprintln!("not root: two users are not tested");
    }
    other_user().map(|user| [user, user - 1])
}

/// Does something as that user and group, in a thread of its own: the kernel keeps credentials by thread.
pub fn as_user<T: Send>(user: u32, work: impl FnOnce() -> T + Send) -> T {
    let become_and_work = || {
        // SAFETY: plain system calls, which change the credentials of this thread alone.
        let refused = unsafe {
            libc::syscall(libc::SYS_setresgid, user, user, user)
                | libc::syscall(libc::SYS_setresuid, user, user, user)
        };
        assert_eq!(refused, 0, "cannot become user {user}");
        work()
    };
    std::thread::scope(|scope| scope.spawn(become_and_work).join().expect("no panic"))
}

/// This process may have as many descriptors as the system lets it.
pub fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: plain system calls on a structure that lives through them.
    let failed = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) != 0 || {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit) != 0
        }
    };
    assert!(!failed, "{}", std::io::Error::last_os_error());
}

/// What a program has printed and returned.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Done {
        use std::os::unix::process::ExitStatusExt;
        let code = output.status.code();
        Done {
            code: code.unwrap_or_else(|| 128 + output.status.signal().unwrap_or(0)),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// A directory with a pipe directory in it. A daemon there ends with the value.
pub struct Place {
    directory: TempDir,
    pipe: PathBuf,
    env: Vec<(String, String)>,
    user: Option<u32>,
}

impl Place {
    pub fn new() -> Place {
        let directory = TempDir::with_prefix("mps-").expect("directory");
        open_to_all(directory.path());
        let pipe = directory.path().join("pipe");
        let server = artifact("fake-server").into_os_string();
        let server = server.into_string().expect("UTF-8");
        Place {
            directory,
            pipe,
            env: vec![("MPSSHIM_SERVER".into(), server)],
            user: None,
        }
    }

    pub fn with_daemon() -> Place {
        Place::with_daemon_env(&[])
    }

    pub fn with_daemon_env(env: &[(&str, &str)]) -> Place {
        Place::with_daemon_options(&["-d"], env)
    }

    pub fn with_daemon_options(options: &[&str], env: &[(&str, &str)]) -> Place {
        let (place, said) = Place::with_warned_daemon(options, env);
        assert_eq!(said, "");
        place
    }

    /// A daemon, and what its start has printed on standard error.
    pub fn with_warned_daemon(options: &[&str], env: &[(&str, &str)]) -> (Place, String) {
        let mut place = Place::new();
        place.env.extend(
            env.iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned())),
        );
        let result = place.control(options);
        assert_eq!(
            (result.code, result.out.as_str()),
            (0, ""),
            "{}",
            result.err
        );
        (place, result.err)
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn pipe(&self) -> &Path {
        &self.pipe
    }

    pub fn set_pipe(&mut self, pipe: &Path) {
        self.pipe = pipe.to_owned();
    }

    /// In the environment of every program from here on.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.env.push((name.to_owned(), value.to_owned()));
    }

    /// Every program from here on runs as that user.
    pub fn become_user(&mut self, user: u32) {
        self.user = Some(user);
    }

    pub fn uid(&self) -> u32 {
        self.user.unwrap_or_else(|| nix::unistd::geteuid().as_raw())
    }

    /// A program of the product in this place.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(artifact(name));
        command.env("MPSSHIM_PIPE_DIRECTORY", &self.pipe);
        command
            .env_remove("LD_PRELOAD")
            .env_remove("MPSSHIM_LOG")
            .env_remove("MPSSHIM_DISABLE")
            // On a slow machine a server takes longer to start.
            .env("MPSSHIM_NOTICES", "off")
            // As the genuine driver: where one client's call would keep all others waiting, it does.
            .env("SOFTGPU_DRIVER_LOCKS", "1");
        match self.user {
            // Where a user's logs are by default is under test.
            Some(user) => command
                .env_remove("MPSSHIM_LOG_DIRECTORY")
                .uid(user)
                .gid(user),
            None => command.env("MPSSHIM_LOG_DIRECTORY", self.pipe.join("logs")),
        };
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Another program with the environment of this one.
    pub fn command_like(&self, command: &Command, program: &str) -> Command {
        let mut other = Command::new(program);
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => other.env(name, value),
                None => other.env_remove(name),
            };
        }
        other
    }

    pub fn control(&self, arguments: &[&str]) -> Done {
        self.command("mps-control")
            .args(arguments)
            .output()
            .expect("run")
            .into()
    }

    pub fn control_as(&self, user: u32, arguments: &[&str]) -> Done {
        self.command("mps-control")
            .args(arguments)
            .uid(user)
            .gid(user)
            .output()
            .expect("run")
            .into()
    }

    /// A program of the product, as root in a place of another user.
    pub fn command_of_root(&self, name: &str, arguments: &[&str]) -> Done {
        let mut command = self.command(name);
        let output = command.args(arguments).uid(0).gid(0).output();
        output.expect("run").into()
    }

    pub fn control_stdin(&self, text: &str) -> Done {
        let mut command = self.command("mps-control");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("run");
        // It may end without having read anything.
        let _ = child
            .stdin
            .take()
            .expect("piped")
            .write_all(text.as_bytes());
        child.wait_with_output().expect("wait").into()
    }

    pub fn daemon_pid(&self) -> u32 {
        let text = fs::read_to_string(self.pipe.join("mps-control.pid")).expect("pid file");
        text.trim().parse().expect("a process id")
    }

    pub fn signal_daemon(&self, signal: Signal) {
        kill(Pid::from_raw(self.daemon_pid() as i32), signal).expect("signal");
    }

    /// Names in the pipe directory, sorted.
    pub fn list(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.pipe).expect("list");
        let mut names: Vec<String> = entries
            .map(|entry| {
                entry
                    .expect("entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        names
    }

    /// The rows of `ps` by the names of the columns, but for clients that wait for a server. Asks again while a server that
    /// has much to do leaves fields empty.
    pub fn ps(&self) -> Vec<HashMap<String, String>> {
        let mut rows = self.ps_with_waiting();
        rows.retain(|row| row["state"] != "waiting");
        rows
    }

    /// All rows of `ps`, as [`Place::ps`].
    pub fn ps_with_waiting(&self) -> Vec<HashMap<String, String>> {
        let mut done = self.control(&["ps", "--format=csv"]);
        wait_until("all servers have answered", || {
            if !done.err.is_empty() {
                done = self.control(&["ps", "--format=csv"]);
            }
            done.err.is_empty()
        });
        let table = done.out;
        let mut lines = table.lines();
        let names: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
        let row = |line: &str| -> HashMap<String, String> {
            let names = names.iter().map(|name| name.to_string());
            names.zip(line.split(',').map(str::to_owned)).collect()
        };
        lines.map(row).collect()
    }

    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.pipe.join("logs").join(name)).expect(name)
    }

    /// The lines of a log without their time.
    pub fn log_after_stamp(&self, name: &str) -> Vec<String> {
        self.log(name)
            .lines()
            .map(|line| line[25..].to_owned())
            .collect()
    }

    /// The process id in the first line of a log.
    pub fn stamped_pid(&self, name: &str) -> u32 {
        self.log(name)[32..38]
            .trim()
            .trim_end_matches(']')
            .parse()
            .expect("a process id")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.pipe.join("mps-control.pid").exists() {
            self.control(&["quit", "-t", "0"]);
        }
    }
}

fn open_to_all(directory: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mode = if other_user().is_some() {
        0o1777
    } else {
        0o755
    };
    fs::set_permissions(directory, fs::Permissions::from_mode(mode)).expect("permissions");
}

/// The bytes of a hello of that protocol version.
pub fn hello(protocol: u32) -> Vec<u8> {
    hello_in(Wire {
        protocol,
        ..wire::OWN
    })
}

/// The bytes of a hello with this wire.
pub fn hello_in(wire: Wire) -> Vec<u8> {
    let hello = ClientHello {
        magic: MAGIC_CLIENT,
        protocol: wire.protocol,
        table_hash: wire.fingerprint,
        pid: std::process::id(),
        mode: 0,
        active_thread_centipercent: 0,
        priority: -1,
        ..ClientHello::new_zeroed()
    };
    hello.as_bytes().to_vec()
}

/// A client that has said hello.
pub struct Client {
    connection: OwnedFd,
}

impl Client {
    pub fn connect(place: &Place) -> Client {
        Client::at(&place.pipe().join("control"))
    }

    /// One with the library of another release.
    pub fn with_wire(place: &Place, wire: Wire) -> Client {
        let connection = seqpacket::connect(&place.pipe().join("control")).expect("connect");
        seqpacket::send(connection.as_fd(), &hello_in(wire), None).expect("hello");
        Client { connection }
    }

    /// One that connects to this socket.
    pub fn at(control: &Path) -> Client {
        let connection = seqpacket::connect(control).expect("connect");
        seqpacket::send(connection.as_fd(), &hello(PROTOCOL_VERSION), None).expect("hello");
        Client { connection }
    }

    /// Whether no answer comes for a while.
    pub fn is_kept_waiting(&self) -> bool {
        std::thread::sleep(Duration::from_millis(200));
        self.is_connected()
    }

    /// Waits for the welcome. `None`: the connection was closed instead.
    pub fn welcome(&self) -> Option<Welcome> {
        let mut buffer = [0; size_of::<Welcome>()];
        let len = seqpacket::receive(self.connection.as_fd(), &mut buffer).ok()?;
        Welcome::read_from_bytes(&buffer[..len]).ok()
    }

    pub fn say(&self, text: &str) {
        seqpacket::send(self.connection.as_fd(), text.as_bytes(), None).expect("send");
    }

    /// Whether the other side still holds the connection.
    pub fn is_connected(&self) -> bool {
        seqpacket::set_nonblocking(&self.connection, true).expect("non-blocking");
        let result = seqpacket::receive(self.connection.as_fd(), &mut [0; 8]);
        seqpacket::set_nonblocking(&self.connection, false).expect("blocking");
        matches!(result, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    }
}

/// The status with which the daemon answers this first packet.
pub fn refused_status(place: &Place, packet: &[u8]) -> Option<u32> {
    let connection = seqpacket::connect(&place.pipe().join("control")).expect("connect");
    seqpacket::send(connection.as_fd(), packet, None).expect("send");
    Some(Client { connection }.welcome()?.status)
}
