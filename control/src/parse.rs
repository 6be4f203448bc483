//! The parser of command lines.

use super::commands::{
    Command, FORMAT_OPTION, Format, Kind, Request, Row, Server, TABLE, Whose, find, format_option,
    nearest as nearest_command,
};
use super::defaults;
use super::modules::{self, MODULES, ModuleError, PROTOCOL_VERSION};
use super::wire::Interface;
use clap::ValueEnum;
use mpsshim_model::amount;
use mpsshim_model::limits::{MemoryBound, Quantum};
use mpsshim_model::policy::Weight;
#[cfg(test)]
use mpsshim_model::policy::{Oversubscription, Scheduling};
use mpsshim_proto::nearest;
use std::time::Duration;

/// How long they may be given at most, seconds.
const LONGEST_PATIENCE: u64 = 3600;
/// How long a client may take to be idle, if the command does not say.
const IDLE_PATIENCE: Duration = Duration::from_secs(10);

/// Why a line cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// No such name.
    #[error("Unknown command \"{0}\"{suggestion}", suggestion = suggestion(.0))]
    Unknown(String),
    /// Arguments that do not fit.
    #[error("{name}: {what}; usage: {name} {usage}")]
    Arguments {
        /// The command.
        name: &'static str,
        /// Description of the error.
        what: String,
        /// Its arguments.
        usage: &'static str,
    },
    /// Not permitted for this user.
    #[error("{0} is reserved for root and the user who runs the daemon")]
    NotPermitted(&'static str),
    /// Not a command of the daemon.
    #[error("{0} is a command of mps-control, not of the daemon")]
    NotHere(&'static str),
    /// In NVIDIA's words.
    #[error("Invalid priority value - must be 0 or 1!")]
    Priority,
    /// In NVIDIA's words.
    #[error("A server PID is required")]
    NoServer,
    /// In NVIDIA's words.
    #[error("A user id (UID) is required to start a new server")]
    NoUser,
    /// A command of interface 3.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// No such name in interface 3.
    #[error("Unknown module \"{0}\"{suggestion}", suggestion = suggestion_of_3(.0))]
    UnknownModule(String),
}

impl CommandError {
    /// Whether the user lacks the permission.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            CommandError::NotPermitted(_) | CommandError::Module(ModuleError::NotPermitted { .. })
        )
    }
}

fn suggestion(name: &str) -> String {
    if modules::find(name).is_some() {
        return format!("; it is a module of interface 3: give -p 3, or set {PROTOCOL_VERSION}=3");
    }
    nearest_command(name).map_or_else(String::new, |near| format!("; did you mean {near}?"))
}

fn suggestion_of_3(name: &str) -> String {
    let modules = MODULES.iter().map(|module| module.name);
    let all = modules.clone().chain(TABLE.iter().map(|row| row.name));
    match nearest::of(name, all) {
        Some(near) => format!("; did you mean {near}?"),
        None => format!("; modules: {}", modules.collect::<Vec<_>>().join(", ")),
    }
}

/// The arguments of a command.
struct Arguments<'a> {
    row: &'static Row,
    words: Vec<&'a str>,
}

impl Arguments<'_> {
    fn wrong(&self, what: impl Into<String>) -> CommandError {
        CommandError::Arguments {
            name: self.row.name,
            what: what.into(),
            usage: self.row.arguments,
        }
    }

    /// Takes `--format=…` and `--format …`.
    fn take_format(&mut self) -> Result<Format, CommandError> {
        let mut format = Format::default();
        if self.row.kind != Kind::Lists {
            return Ok(format);
        }
        let mut words = std::mem::take(&mut self.words).into_iter();
        while let Some(word) = words.next() {
            let name = match format_option(word) {
                Some(Some(attached)) => attached,
                Some(None) => words.next().ok_or_else(|| {
                    self.wrong(format!("{FORMAT_OPTION} takes table, csv or json"))
                })?,
                None => {
                    self.words.push(word);
                    continue;
                }
            };
            format = Format::from_str(name, false).map_err(|_| {
                self.wrong(format!(
                    "\"{FORMAT_OPTION}={name}\": a format is table, csv or json"
                ))
            })?;
        }
        Ok(format)
    }

    fn none(&self) -> Result<(), CommandError> {
        match self.words.first() {
            None => Ok(()),
            Some(unexpected) => Err(self.wrong(format!("unexpected \"{unexpected}\""))),
        }
    }

    /// Exactly `N` words.
    fn exactly<const N: usize>(&self, expected: &str) -> Result<[&str; N], CommandError> {
        let words = <[&str; N]>::try_from(self.words.as_slice());
        words.map_err(|_| self.wrong(format!("{expected} expected")))
    }

    /// A server; NVIDIA's daemon takes a missing process id for 0.
    fn server(&self) -> Result<Server, CommandError> {
        match self.words.as_slice() {
            [] => Ok(Server("0".into())),
            [pid] => Ok(Server((*pid).to_owned())),
            _ => Err(self.wrong("one process id expected")),
        }
    }

    fn optional_server(&self) -> Result<Option<Server>, CommandError> {
        if self.words.is_empty() {
            return Ok(None);
        }
        self.server().map(Some)
    }

    fn process(&self, text: &str) -> Result<i32, CommandError> {
        let pid: Option<i32> = text.parse().ok().filter(|pid| *pid > 0);
        pid.ok_or_else(|| self.wrong(format!("\"{text}\" is not a process id")))
    }

    /// Bytes; `None`: none.
    fn amount(&self, text: &str) -> Result<Option<u64>, CommandError> {
        if text.eq_ignore_ascii_case("none") {
            return Ok(None);
        }
        let bytes = amount::parse(text).map_err(|error| self.wrong(error.to_string()))?;
        Ok(Some(bytes))
    }

    fn user(&self, text: &str) -> Result<u32, CommandError> {
        // The largest number means no user.
        let uid = text.parse().ok().filter(|uid| *uid != u32::MAX);
        uid.ok_or_else(|| self.wrong(format!("\"{text}\" is not a user id")))
    }

    fn processes(&self) -> Result<Command, CommandError> {
        match self.words.as_slice() {
            [] => Ok(Command::Processes { pid: None }),
            ["-p", pid] => Ok(Command::Processes {
                pid: Some(Server((*pid).to_owned())),
            }),
            _ => Err(self.wrong("-p and a process id expected")),
        }
    }

    fn device_query(&self) -> Result<Command, CommandError> {
        let (options, servers): (Vec<&str>, Vec<&str>) =
            self.words.iter().partition(|word| **word == "--csv");
        let server = match servers.as_slice() {
            [] => None,
            [pid] => Some(Server((*pid).to_owned())),
            _ => return Err(self.wrong("one process id expected")),
        };
        let commas = !options.is_empty();
        Ok(Command::DeviceQuery { server, commas })
    }

    fn status(&self) -> Result<Command, CommandError> {
        let server = self.server()?;
        match server.0.parse::<i32>() {
            Ok(1..) => Ok(Command::ServerStatus(server)),
            _ => Err(CommandError::NoServer),
        }
    }

    fn shutdown(&self) -> Result<Command, CommandError> {
        let (pid, force) = match self.words.as_slice() {
            [] => (&"0", false),
            [pid] => (pid, false),
            [pid, "-f"] | ["-f", pid] => (pid, true),
            _ => return Err(self.wrong("one process id expected")),
        };
        Ok(Command::ShutdownServer {
            server: Server((*pid).to_owned()),
            force,
        })
    }

    /// The argument of `-t`.
    fn patience(&self, word: Option<&&str>) -> Result<Duration, CommandError> {
        let seconds = word.and_then(|word| word.parse().ok());
        let seconds = seconds.filter(|seconds| *seconds <= LONGEST_PATIENCE);
        let wrong = || self.wrong(format!("-t takes seconds, up to {LONGEST_PATIENCE}"));
        seconds.map(Duration::from_secs).ok_or_else(wrong)
    }

    fn move_memory(&self, out: bool) -> Result<Command, CommandError> {
        let (mut ids, mut patience) = (Vec::new(), IDLE_PATIENCE);
        let mut words = self.words.iter();
        while let Some(word) = words.next() {
            match *word {
                "-t" => patience = self.patience(words.next())?,
                word => ids.push(word),
            }
        }
        let [server, client] = ids[..] else {
            return Err(self.wrong("the server's process id and the client's expected"));
        };
        let (server, client) = self.client([server, client])?;
        Ok(Command::MoveMemory {
            server,
            client,
            out,
            patience,
        })
    }

    fn restart(&self) -> Result<Command, CommandError> {
        let (mut pid, mut patience, mut force) = (None, None, false);
        let mut words = self.words.iter();
        while let Some(word) = words.next() {
            match *word {
                "-f" => force = true,
                "-t" => patience = Some(self.patience(words.next())?),
                _ if pid.is_none() => pid = Some(*word),
                _ => return Err(self.wrong("one process id expected")),
            }
        }
        let pid = pid.ok_or_else(|| self.wrong("the server's process id expected"))?;
        Ok(Command::RestartServer {
            server: Server(pid.to_owned()),
            patience,
            force,
        })
    }

    fn start(&self) -> Result<Command, CommandError> {
        let ["-uid", uid] = self.words.as_slice() else {
            return Err(CommandError::NoUser);
        };
        let uid = uid.parse().map_err(|_| CommandError::NoUser)?;
        Ok(Command::StartServer { uid })
    }

    /// A server and one of its clients.
    fn client(&self, words: [&str; 2]) -> Result<(Server, i32), CommandError> {
        let [server, client] = words;
        Ok((Server(server.to_owned()), self.process(client)?))
    }

    fn weight(&self) -> Result<Command, CommandError> {
        let [server, client, weight] =
            self.exactly("the server's process id, the client's and a weight")?;
        let (server, client) = self.client([server, client])?;
        let weight = self.weight_of(weight)?.into();
        Ok(Command::SetWeight {
            server,
            client,
            weight,
        })
    }

    fn weight_of(&self, text: &str) -> Result<Weight, CommandError> {
        let weight = Weight::try_from(text.parse::<u32>().unwrap_or(0));
        weight.map_err(|why| self.wrong(why))
    }

    fn user_weight(&self) -> Result<Command, CommandError> {
        let [uid, weight] = self.exactly("a user id, and a weight or none")?;
        let uid = self.user(uid)?;
        let weight = match weight {
            "none" => None,
            weight => Some(self.weight_of(weight)?),
        };
        Ok(Command::SetUserWeight(uid, weight))
    }

    fn quantum(&self, text: &str) -> Result<Quantum, CommandError> {
        let quantum = text.parse();
        quantum.map_err(|error| self.wrong(format!("\"{text}\": {error}")))
    }

    /// One of two words of `T` or none, and perhaps a user id.
    fn policy<T: ValueEnum>(
        &self,
        words: [&str; 2],
    ) -> Result<(Option<T>, Option<u32>), CommandError> {
        let [one, other] = words;
        let (word, uid) = match self.words.as_slice() {
            [word] => (*word, None),
            [word, uid] => (*word, Some(self.user(uid)?)),
            _ => {
                return Err(self.wrong(format!(
                    "{one}, {other} or none, and perhaps a user id, expected"
                )));
            }
        };
        let choice = match word {
            "none" => None,
            word => Some(T::from_str(word, false).map_err(|_| {
                self.wrong(format!("\"{word}\" is not one of {one}, {other}, none"))
            })?),
        };
        match (choice, uid) {
            (None, None) => Err(self.wrong("none needs a user id")),
            both => Ok(both),
        }
    }

    fn scheduling(&self) -> Result<Command, CommandError> {
        Ok(match self.policy(["auto", "fifo"])? {
            (scheduling, Some(uid)) => Command::SetUserScheduling(uid, scheduling),
            (scheduling, None) => Command::SetScheduling(scheduling.unwrap_or_default()),
        })
    }

    fn oversubscription(&self) -> Result<Command, CommandError> {
        Ok(match self.policy(["on", "off"])? {
            (choice, Some(uid)) => Command::SetUserOversubscription(uid, choice),
            (choice, None) => Command::SetOversubscription(choice.unwrap_or_default()),
        })
    }

    /// At most a user id.
    fn optional_user(&self) -> Result<Option<u32>, CommandError> {
        match self.words.as_slice() {
            [] => Ok(None),
            _ => {
                let [uid] = self.exactly("one user id")?;
                Ok(Some(self.user(uid)?))
            }
        }
    }

    fn trace(&self) -> Result<Command, CommandError> {
        match self.words.as_slice() {
            ["stop"] => Ok(Command::TraceStop),
            ["start", file @ ..] if !file.is_empty() => Ok(Command::TraceStart(file.join(" "))),
            _ => Err(self.wrong("start and a file, or stop, expected")),
        }
    }

    fn quarantine(&self) -> Result<Command, CommandError> {
        let (verb, rest) = match self.words.as_slice() {
            ["list"] => return Ok(Command::QuarantineList),
            [verb @ ("add" | "release"), rest @ ..] => (*verb, rest),
            _ => return Err(self.wrong("list, add or release expected")),
        };
        let (uid, words) = match rest {
            ["-uid", uid, words @ ..] => (Some(self.user(uid)?), words),
            words => (None, words),
        };
        if verb == "release" && words == ["all"] {
            return Ok(Command::QuarantineRelease { uid, program: None });
        }
        let is_path = words.first().is_some_and(|path| path.starts_with('/'));
        if !is_path {
            return Err(self.wrong("the absolute path of a program expected"));
        }
        let program = words.join(" ");
        Ok(match verb {
            "add" => Command::QuarantineAdd { uid, program },
            _ => Command::QuarantineRelease {
                uid,
                program: Some(program),
            },
        })
    }

    /// Whether the command is about limits of device memory or about guarantees.
    fn bound(&self) -> MemoryBound {
        match self.row.name.ends_with("_guarantee") {
            true => MemoryBound::Guarantee,
            false => MemoryBound::Limit,
        }
    }

    fn partition(&self) -> Result<Command, CommandError> {
        let number = |chunks: &str| {
            let chunks = chunks.parse().ok().filter(|chunks| *chunks > 0);
            chunks.ok_or_else(|| self.wrong("a number of chunks, at least 1, expected"))
        };
        match self.words.as_slice() {
            ["add", device, chunks] => {
                Ok(Command::AddPartition((*device).to_owned(), number(chunks)?))
            }
            ["rm", device, partition] => Ok(Command::RemovePartition(
                (*device).to_owned(),
                (*partition).to_owned(),
            )),
            ["add", ..] => Err(self.wrong("a device and a number of chunks expected")),
            ["rm", ..] => Err(self.wrong("a device and a partition expected")),
            _ => Err(self.wrong("add or rm expected")),
        }
    }

    fn quit(&self) -> Result<Command, CommandError> {
        let ["-t", seconds] = self.words.as_slice() else {
            self.none()?;
            return Ok(Command::Quit { patience: None });
        };
        let seconds: u32 = seconds
            .parse()
            .map_err(|_| self.wrong(format!("\"{seconds}\" is not a number of seconds")))?;
        Ok(Command::Quit {
            patience: Some(Duration::from_secs(seconds.into())),
        })
    }

    fn command(&self) -> Result<Command, CommandError> {
        let both = "the server's process id and the client's";
        let text = |word: &str| word.to_owned();
        Ok(match self.row.name {
            "get_server_status" => self.status()?,
            "get_client_list" => Command::ClientList(self.server()?),
            "get_device_client_list" => Command::DeviceClientList(self.optional_server()?),
            "ps" => self.processes()?,
            "users" => {
                self.none()?;
                Command::Users
            }
            "device_query" => self.device_query()?,
            "quarantine" => self.quarantine()?,
            "shutdown_server" => self.shutdown()?,
            "restart_server" => self.restart()?,
            "suspend_client" => self.move_memory(true)?,
            "resume_client" => self.move_memory(false)?,
            "terminate_client" => {
                let (server, client) = self.client(self.exactly(both)?)?;
                Command::TerminateClient { server, client }
            }
            "start_server" => self.start()?,
            "set_default_active_thread_percentage" => {
                // Without an argument it prints the value in force, as NVIDIA's daemon does.
                let value = match self.words.as_slice() {
                    [] => "",
                    _ => self.exactly::<1>("a percentage")?[0],
                };
                Command::SetPercentage(Whose::Default, text(value))
            }
            "get_active_thread_percentage" => Command::Percentage(Whose::Server(self.server()?)),
            "set_active_thread_percentage" => {
                let [pid, value] = self.exactly("a process id and a percentage")?;
                Command::SetPercentage(Whose::Server(Server(text(pid))), text(value))
            }
            "set_active_thread_percentage_all" => {
                let [value] = self.exactly("a percentage")?;
                Command::SetPercentage(Whose::All, text(value))
            }
            "get_default_device_pinned_mem_limit" | "get_default_device_mem_guarantee" => {
                let [device] = self.exactly("a device")?;
                Command::Memory(self.bound(), Whose::Default, text(device))
            }
            "set_default_device_pinned_mem_limit" | "set_default_device_mem_guarantee" => {
                let [device, amount] = self.exactly("a device and an amount")?;
                let amount = self.amount(amount)?;
                Command::SetMemory(self.bound(), Whose::Default, text(device), amount)
            }
            "get_device_pinned_mem_limit" | "get_device_mem_guarantee" => {
                let [pid, device] = self.exactly("a process id and a device")?;
                let whose = Whose::Server(Server(text(pid)));
                Command::Memory(self.bound(), whose, text(device))
            }
            "set_device_pinned_mem_limit" | "set_device_mem_guarantee" => {
                let [pid, device, amount] = self.exactly("a process id, a device and an amount")?;
                let whose = Whose::Server(Server(text(pid)));
                Command::SetMemory(self.bound(), whose, text(device), self.amount(amount)?)
            }
            "get_user_device_pinned_mem_limit" | "get_user_device_mem_guarantee" => {
                let [uid, device] = self.exactly("a user id and a device")?;
                Command::UserMemory(self.bound(), self.user(uid)?, text(device))
            }
            "set_user_device_pinned_mem_limit" | "set_user_device_mem_guarantee" => {
                let [uid, device, amount] = self.exactly("a user id, a device and an amount")?;
                let amount = self.amount(amount)?;
                Command::SetUserMemory(self.bound(), self.user(uid)?, text(device), amount)
            }
            "set_default_client_priority" => {
                let [value] = self.exactly("a priority")?;
                Command::SetPriority(defaults::priority(value).ok_or(CommandError::Priority)?)
            }
            "get_scheduling" => Command::Scheduling(self.optional_user()?),
            "get_oversubscription" => Command::Oversubscription(self.optional_user()?),
            "set_oversubscription" => self.oversubscription()?,
            "set_scheduling" => self.scheduling()?,
            "get_user_weight" => Command::UserWeight(self.optional_user()?),
            "set_user_weight" => self.user_weight()?,
            "get_client_weight" => {
                let (server, client) = self.client(self.exactly(both)?)?;
                Command::Weight { server, client }
            }
            "set_client_weight" => self.weight()?,
            "set_default_quantum" => {
                let [value] = self.exactly("a number of milliseconds")?;
                Command::SetQuantum(Whose::Default, self.quantum(value)?)
            }
            "get_quantum" => Command::Quantum(Whose::Server(self.server()?)),
            "set_quantum" => {
                let [pid, value] = self.exactly("a process id and a number of milliseconds")?;
                Command::SetQuantum(Whose::Server(Server(text(pid))), self.quantum(value)?)
            }
            "trace" => self.trace()?,
            "sm_partition" => self.partition()?,
            "quit" => self.quit()?,
            without_arguments => {
                self.none()?;
                match without_arguments {
                    "info" => Command::Info,
                    "get_server_list" => Command::ServerList,
                    "get_default_active_thread_percentage" => Command::Percentage(Whose::Default),
                    "get_active_thread_percentage_all" => Command::Percentage(Whose::All),
                    "get_default_client_priority" => Command::Priority,
                    "get_default_quantum" => Command::Quantum(Whose::Default),
                    "lspart" => Command::Partitions,
                    "reopen_logs" => Command::ReopenLogs,
                    // The one row that is left.
                    _ => Command::Help,
                }
            }
        })
    }
}

/// Whether a line would end the daemon.
pub fn ends_daemon(line: &str) -> bool {
    let parsed = parse(line, true).ok().flatten();
    parsed.is_some_and(|request| matches!(request.command, Command::Quit { .. }))
}

/// Parses a line of this interface. `None`: it is empty.
pub fn parse_in(
    interface: Interface,
    line: &str,
    privileged: bool,
) -> Result<Option<Request>, CommandError> {
    if interface == Interface::Two {
        return parse(line, privileged);
    }
    if let Some(path) = modules::applied_path(line) {
        if !privileged {
            return Err(CommandError::NotPermitted("-a"));
        }
        return Ok(Some(Request {
            command: Command::Module(modules::Command::Apply(path.to_owned())),
            format: Format::default(),
        }));
    }
    match modules::parse(line, privileged) {
        Some(command) => Ok(Some(Request {
            command: Command::Module(command?),
            format: Format::default(),
        })),
        None => parse(line, privileged).map_err(|error| match error {
            CommandError::Unknown(name) => CommandError::UnknownModule(name),
            other => other,
        }),
    }
}

/// Parses a line. `None`: it is empty.
pub fn parse(line: &str, privileged: bool) -> Result<Option<Request>, CommandError> {
    let mut words = line.split_whitespace();
    let Some(name) = words.next() else {
        return Ok(None);
    };
    let row = find(name).ok_or_else(|| CommandError::Unknown(name.to_owned()))?;
    if row.kind == Kind::Acts && !privileged {
        return Err(CommandError::NotPermitted(row.name));
    }
    if row.kind == Kind::Shows {
        return Err(CommandError::NotHere(row.name));
    }
    let mut arguments = Arguments {
        row,
        words: words.collect(),
    };
    let format = arguments.take_format()?;
    let command = arguments.command()?;
    Ok(Some(Request { command, format }))
}

#[cfg(test)]
mod tests {
    use super::super::commands::help;
    use super::*;

    fn ok(line: &str) -> Command {
        parse(line, true).expect(line).expect("a command").command
    }

    fn format(line: &str) -> Format {
        parse(line, true).expect(line).expect("a command").format
    }

    fn error(line: &str) -> String {
        parse(line, true).expect_err(line).to_string()
    }

    fn server(pid: i32) -> Server {
        Server(pid.to_string())
    }

    #[test]
    fn commands_are_understood() {
        assert_eq!(ok("get_server_list"), Command::ServerList);
        assert!(
            matches!(ok("  get_server_status  42 "), Command::ServerStatus(server) if server.is(42))
        );
        assert!(
            matches!(ok("get_client_list"), Command::ClientList(server) if server.to_string() == "0")
        );
        assert!(matches!(ok("get_client_list abc"), Command::ClientList(server) if !server.is(0)));
        assert_eq!(
            ok("start_server -uid 1000"),
            Command::StartServer { uid: 1000 }
        );
        let restart = |patience: Option<u64>, force| Command::RestartServer {
            server: server(7),
            patience: patience.map(Duration::from_secs),
            force,
        };
        assert_eq!(ok("restart_server 7"), restart(None, false));
        assert_eq!(ok("restart_server -t 0 7"), restart(Some(0), false));
        assert_eq!(ok("restart_server 7 -f -t 60"), restart(Some(60), true));
        assert_eq!(ok("quit"), Command::Quit { patience: None });
        assert_eq!(
            ok("quit -t 5"),
            Command::Quit {
                patience: Some(Duration::from_secs(5))
            }
        );
        assert!(
            matches!(ok("shutdown_server 7"), Command::ShutdownServer { server, force: false } if server.is(7))
        );
        for line in ["shutdown_server 7 -f", "shutdown_server -f 7"] {
            assert!(
                matches!(ok(line), Command::ShutdownServer { server, force: true } if server.is(7))
            );
        }
        assert!(
            matches!(ok("terminate_client 7 8"), Command::TerminateClient { server, client: 8 } if server.is(7))
        );
        assert_eq!(ok("ps"), Command::Processes { pid: None });
        assert_eq!(
            ok("ps -p 9"),
            Command::Processes {
                pid: Some(server(9))
            }
        );
        assert_eq!(
            ok("get_device_client_list"),
            Command::DeviceClientList(None)
        );
        for line in ["device_query 7 --csv", "device_query --csv 7"] {
            let (server, commas) = (Some(server(7)), true);
            assert_eq!(ok(line), Command::DeviceQuery { server, commas });
        }
        assert_eq!(ok("help"), Command::Help);
        assert_eq!(parse(" \t", true), Ok(None));
    }

    #[test]
    fn limits_are_understood() {
        assert_eq!(
            ok("get_default_active_thread_percentage"),
            Command::Percentage(Whose::Default)
        );
        assert_eq!(
            ok("set_active_thread_percentage 7 abc"),
            Command::SetPercentage(Whose::Server(server(7)), "abc".into())
        );
        assert_eq!(
            ok("set_active_thread_percentage_all 40"),
            Command::SetPercentage(Whose::All, "40".into())
        );
        for (bound, name) in [
            (MemoryBound::Limit, "device_pinned_mem_limit"),
            (MemoryBound::Guarantee, "device_mem_guarantee"),
        ] {
            assert_eq!(
                ok(&format!("get_default_{name} 0")),
                Command::Memory(bound, Whose::Default, "0".into())
            );
            assert_eq!(
                ok(&format!("set_default_{name} 0 3G")),
                Command::SetMemory(bound, Whose::Default, "0".into(), Some(3 << 30))
            );
            let whose = || Whose::Server(server(7));
            assert_eq!(
                ok(&format!("get_{name} 7 0")),
                Command::Memory(bound, whose(), "0".into())
            );
            assert_eq!(
                ok(&format!("set_{name} 7 GPU-aa none")),
                Command::SetMemory(bound, whose(), "GPU-aa".into(), None)
            );
            assert_eq!(
                ok(&format!("get_user_{name} 1000 GPU-aa")),
                Command::UserMemory(bound, 1000, "GPU-aa".into())
            );
            for (amount, bytes) in [("2G", Some(2 << 30)), ("none", None)] {
                assert_eq!(
                    ok(&format!("set_user_{name} 0 1 {amount}")),
                    Command::SetUserMemory(bound, 0, "1".into(), bytes)
                );
            }
        }
        assert_eq!(ok("set_default_client_priority 1"), Command::SetPriority(1));
        assert_eq!(
            ok("set_client_weight 7 8 10000"),
            Command::SetWeight {
                server: server(7),
                client: 8,
                weight: 10_000
            }
        );
    }

    #[test]
    fn the_quarantine_is_understood() {
        assert_eq!(ok("quarantine list"), Command::QuarantineList);
        assert_eq!(format("quarantine list --format=csv"), Format::Csv);
        let program = "/usr/bin/python3.11 /home/ada/x.py".to_owned();
        for (option, uid) in [("", None), ("-uid 7 ", Some(7))] {
            assert_eq!(
                ok(&format!("quarantine add {option}{program}")),
                Command::QuarantineAdd {
                    uid,
                    program: program.clone()
                }
            );
            assert_eq!(
                ok(&format!("quarantine release {option}{program}")),
                Command::QuarantineRelease {
                    uid,
                    program: Some(program.clone())
                }
            );
            assert_eq!(
                ok(&format!("quarantine release {option}all")),
                Command::QuarantineRelease { uid, program: None }
            );
        }
        for line in ["quarantine", "quarantine lists", "quarantine list /a"] {
            assert!(error(line).contains("list, add or release expected"));
        }
        for line in ["add", "add all", "release", "release x", "add -uid 7"] {
            let wrong = error(&format!("quarantine {line}"));
            assert!(wrong.contains("the absolute path of a program expected"));
        }
        let wrong = error("quarantine add -uid ada /a");
        assert!(wrong.contains("\"ada\" is not a user id"), "{wrong}");
        // Which users' programs a user may change is checked later, where the user is known.
        assert!(parse("quarantine release all", false).is_ok());
    }

    #[test]
    fn partitions_are_understood() {
        assert_eq!(
            ok("sm_partition add GPU-aa 7"),
            Command::AddPartition("GPU-aa".into(), 7)
        );
        assert_eq!(
            ok("sm_partition rm GPU-aa 1"),
            Command::RemovePartition("GPU-aa".into(), "1".into())
        );
        assert_eq!(ok("lspart"), Command::Partitions);
        assert_eq!(format("lspart --format=csv"), Format::Csv);
        for (arguments, why) in [
            ("", "add or rm expected"),
            ("list", "add or rm expected"),
            ("add GPU-aa", "a device and a number of chunks expected"),
            ("add GPU-aa 0", "a number of chunks, at least 1, expected"),
            ("add GPU-aa -1", "a number of chunks, at least 1, expected"),
            ("rm GPU-aa", "a device and a partition expected"),
            ("rm GPU-aa 1 2", "a device and a partition expected"),
        ] {
            assert_eq!(
                error(&format!("sm_partition {arguments}")),
                format!(
                    "sm_partition: {why}; usage: sm_partition add UUID CHUNKS|rm UUID PARTITION"
                )
            );
        }
    }

    #[test]
    fn quanta_are_understood() {
        assert_eq!(ok("get_default_quantum"), Command::Quantum(Whose::Default));
        let quantum = "2.5".parse().expect("a quantum");
        assert_eq!(
            ok("set_default_quantum 2.5"),
            Command::SetQuantum(Whose::Default, quantum)
        );
        let whose = Whose::Server(server(7));
        assert_eq!(ok("get_quantum 7"), Command::Quantum(whose.clone()));
        assert_eq!(ok("set_quantum 7 2.5"), Command::SetQuantum(whose, quantum));
        for value in ["0", "0.01", "10001", "-3", "1e99", "soon", "10ms"] {
            assert_eq!(
                error(&format!("set_default_quantum {value}")),
                format!(
                    "set_default_quantum: \"{value}\": a quantum is a number of milliseconds from 0.1 to 10000; \
                     usage: set_default_quantum MILLISECONDS"
                )
            );
        }
    }

    #[test]
    fn oversubscriptions_are_understood() {
        let set = |line| ok(&format!("set_oversubscription {line}"));
        assert_eq!(
            ok("get_oversubscription 7"),
            Command::Oversubscription(Some(7))
        );
        assert_eq!(
            set("on"),
            Command::SetOversubscription(Oversubscription::On)
        );
        let user = |choice| Command::SetUserOversubscription(7, choice);
        assert_eq!(set("off 7"), user(Some(Oversubscription::Off)));
        assert_eq!(set("none 7"), user(None));
        let error = |line| parse(line, true).expect_err(line).to_string();
        assert!(error("set_oversubscription none").contains("none needs a user id"));
        assert!(
            error("set_oversubscription maybe").contains("\"maybe\" is not one of on, off, none")
        );
    }

    #[test]
    fn weights_of_users_are_understood() {
        assert_eq!(ok("get_user_weight"), Command::UserWeight(None));
        assert_eq!(ok("get_user_weight 7"), Command::UserWeight(Some(7)));
        let heavy = Weight::try_from(300).expect("a weight");
        let set = Command::SetUserWeight(1000, Some(heavy));
        assert_eq!(ok("set_user_weight 1000 300"), set);
        let none = Command::SetUserWeight(1000, None);
        assert_eq!(ok("set_user_weight 1000 none"), none);
        for weight in ["0", "10001", "-1", "x", "1.5", "4294967297"] {
            let wrong = error(&format!("set_user_weight 1000 {weight}"));
            assert!(wrong.contains("a weight is 1 to 10000"), "{wrong}");
        }
        assert!(error("set_user_weight root 1").contains("\"root\" is not a user id"));
        let short = error("set_user_weight 1000");
        assert!(
            short.ends_with("usage: set_user_weight UID WEIGHT|none"),
            "{short}"
        );
    }

    #[test]
    fn schedulings_are_understood() {
        assert_eq!(ok("get_scheduling"), Command::Scheduling(None));
        assert_eq!(ok("get_scheduling 7"), Command::Scheduling(Some(7)));
        for (word, scheduling) in [("auto", Scheduling::Auto), ("fifo", Scheduling::Fifo)] {
            let all = ok(&format!("set_scheduling {word}"));
            assert_eq!(all, Command::SetScheduling(scheduling));
            let one = ok(&format!("set_scheduling {word} 0"));
            assert_eq!(one, Command::SetUserScheduling(0, Some(scheduling)));
        }
        let none = Command::SetUserScheduling(7, None);
        assert_eq!(ok("set_scheduling none 7"), none);
        for (arguments, why) in [
            ("", "auto, fifo or none, and perhaps a user id, expected"),
            ("fifo 7 8", "auto, fifo or none, and perhaps a user id"),
            ("lifo", "\"lifo\" is not one of auto, fifo, none"),
            ("7 fifo", "\"fifo\" is not a user id"),
            ("fifo ada", "\"ada\" is not a user id"),
            ("fifo 4294967295", "\"4294967295\" is not a user id"),
            ("none", "none needs a user id"),
        ] {
            let wrong = error(&format!("set_scheduling {arguments}"));
            assert!(wrong.contains(why), "{wrong}");
            assert!(wrong.ends_with("usage: set_scheduling auto|fifo|none [UID]"));
        }
        assert!(error("get_scheduling ada").contains("\"ada\" is not a user id"));
        assert!(error("get_scheduling 1 2").contains("one user id expected"));
    }

    #[test]
    fn formats_are_understood() {
        assert_eq!(format("ps"), Format::Table);
        assert_eq!(format("ps -p 7 --format=json"), Format::Json);
        assert_eq!(format("get_server_list --format=csv"), Format::Csv);
        assert_eq!(format("device_query --csv 7 --format=json"), Format::Json);
        let processes = Command::Processes {
            pid: Some(server(7)),
        };
        for line in ["ps --format json -p 7", "ps -p 7 --format json"] {
            assert_eq!((format(line), ok(line)), (Format::Json, processes.clone()));
        }
        assert!(error("ps --format xml").contains("\"--format=xml\": a format is table, csv"));
        assert!(error("ps --format").contains("--format takes table, csv or json"));
        assert!(error("ps --format= json").contains("\"--format=\": a format is table"));
        assert!(error("quit --format csv").contains("unexpected \"--format\""));
        assert!(error("ps --format=xml").contains("\"--format=xml\": a format is table, csv"));
        assert!(error("quit --format=csv").contains("unexpected \"--format=csv\""));
        assert!(error("get_server_list --csv").contains("unexpected \"--csv\""));
    }

    #[test]
    fn mistakes_are_named() {
        assert_eq!(error("frobnicate now"), "Unknown command \"frobnicate\"");
        assert_eq!(
            error("get_server_lst"),
            "Unknown command \"get_server_lst\"; did you mean get_server_list?"
        );
        assert_eq!(
            error("quit -t soon"),
            "quit: \"soon\" is not a number of seconds; usage: quit [-t SECONDS]"
        );
        for line in ["start_server", "start_server -uid", "start_server -uid -1"] {
            let required = "A user id (UID) is required to start a new server";
            assert_eq!(error(line), required);
        }
        for line in ["get_server_status", "get_server_status abc"] {
            assert_eq!(error(line), "A server PID is required");
        }
        assert!(error("get_server_list 1").contains("unexpected \"1\""));
        assert!(
            matches!(ok("suspend_client 7 -t 3 8"), Command::MoveMemory { server, client: 8, out: true, patience } if server.is(7) && patience.as_secs() == 3)
        );
        assert!(
            matches!(ok("resume_client 7 8"), Command::MoveMemory { client: 8, out: false, patience, .. } if patience == IDLE_PATIENCE)
        );
        assert!(
            error("suspend_client 7").contains("the server's process id and the client's expected")
        );
        assert!(error("suspend_client 7 8 -t").contains("-t takes seconds, up to 3600"));
        assert!(error("terminate_client 1 x").contains("\"x\" is not a process id"));
        assert!(error("ps -p").contains("-p and a process id expected"));
        assert!(error("shutdown_server 1 2").contains("one process id expected"));
        assert!(error("quit now").contains("unexpected \"now\""));
        assert!(error("set_active_thread_percentage_all").contains("a percentage expected"));
        for name in ["device_pinned_mem_limit", "device_mem_guarantee"] {
            let wrong = |arguments: &str| error(&format!("set_default_{name} {arguments}"));
            assert!(wrong("0 lots").contains("not an amount of memory"));
            assert!(wrong("0").contains("a device and an amount"));
            let wrong = error(&format!("set_user_{name} root 0 1G"));
            assert!(wrong.contains("\"root\" is not a user id"));
        }
        for uid in ["root", "-1", "4294967295", "1.5", "50%"] {
            let wrong = error(&format!("set_user_device_pinned_mem_limit {uid} 0 1G"));
            assert!(wrong.contains(&format!("\"{uid}\" is not a user id")));
        }
        for amount in ["50%", "lots", "0", "-1G", "1e9"] {
            let wrong = error(&format!("set_user_device_pinned_mem_limit 0 0 {amount}"));
            assert!(wrong.contains("is not an amount of memory"), "{wrong}");
        }
        for arguments in ["", "0", "0 0", "0 0 1G 1"] {
            let wrong = error(&format!("set_user_device_pinned_mem_limit {arguments}"));
            assert!(wrong.contains("a user id, a device and an amount expected"));
        }
        for value in ["2", "-1", "abc", "0.5"] {
            assert_eq!(
                error(&format!("set_default_client_priority {value}")),
                "Invalid priority value - must be 0 or 1!"
            );
        }
        for weight in ["0", "10001", "-5", "many"] {
            assert!(error(&format!("set_client_weight 1 2 {weight}")).contains("1 to 10000"));
        }
    }

    #[test]
    fn every_row_is_understood_and_helped() {
        for row in TABLE.iter().filter(|row| row.kind != Kind::Shows) {
            let arguments = match row.arguments {
                "-uid UID" => "-uid 1",
                "PID" => "1",
                "PID [-f]" => "1 -f",
                "PID [-t SECONDS] [-f]" => "1 -t 5",
                "start FILE|stop" => "stop",
                "add UUID CHUNKS|rm UUID PARTITION" => "add GPU-aa 1",
                text if text.starts_with("list|") => "list",
                "auto|fifo|none [UID]" => "fifo 1",
                "on|off|none [UID]" => "on 1",
                "UID WEIGHT|none" => "1 300",
                "PID DEVICE"
                | "UID DEVICE"
                | "SERVER_PID CLIENT_PID"
                | "SERVER_PID CLIENT_PID [-t SECONDS]"
                | "DEVICE AMOUNT"
                | "PID PERCENTAGE"
                | "PID MILLISECONDS" => "1 2",
                "SERVER_PID CLIENT_PID WEIGHT" | "PID DEVICE AMOUNT" | "UID DEVICE AMOUNT" => {
                    "1 2 3"
                }
                "DEVICE" | "PERCENTAGE" | "PRIORITY" | "MILLISECONDS" => "1",
                _ => "",
            };
            let line = format!("{} {arguments}", row.name);
            assert_eq!(ok(&line) == Command::Help, row.name == "help");
            assert!(help().contains(format!("  {} {}", row.name, row.arguments).trim_end()));
            assert_eq!(parse(&line, false).is_err(), row.kind == Kind::Acts);
            let listed = parse(&format!("{line} --format=json"), true);
            assert_eq!(listed.is_ok(), row.kind == Kind::Lists);
        }
    }
}
