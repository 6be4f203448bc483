//! The commands of the control daemon, each declared once in [`TABLE`].

use std::fmt::Write as _;
use std::time::Duration;

/// One row of [`TABLE`].
pub struct Row {
    /// Name.
    pub name: &'static str,
    /// What follows the name.
    pub arguments: &'static str,
    /// What it does.
    pub meaning: &'static str,
    /// Only for the daemon's owner and root.
    pub privileged: bool,
}

/// Every command.
pub const TABLE: &[Row] = &[
    Row {
        name: "get_server_list",
        arguments: "",
        meaning: "process ids of the servers, one a line",
        privileged: false,
    },
    Row {
        name: "get_server_status",
        arguments: "PID",
        meaning: "state of a server: INITIALIZING, ACTIVE or FAULT",
        privileged: false,
    },
    Row {
        name: "get_client_list",
        arguments: "PID",
        meaning: "process ids of a server's clients, one a line",
        privileged: false,
    },
    Row {
        name: "get_device_client_list",
        arguments: "[PID]",
        meaning: "per device the clients, process id and context id, of one server or of all",
        privileged: false,
    },
    Row {
        name: "ps",
        arguments: "[-p PID]",
        meaning: "a row for each client: process, context, server, device, PID namespace and program",
        privileged: false,
    },
    Row {
        name: "start_server",
        arguments: "-uid UID",
        meaning: "start a server for a user before its first client comes",
        privileged: true,
    },
    Row {
        name: "shutdown_server",
        arguments: "PID [-f]",
        meaning: "end a server when its clients have gone, with -f at once",
        privileged: true,
    },
    Row {
        name: "terminate_client",
        arguments: "SERVER_PID CLIENT_PID",
        meaning: "end a client: its calls return CUDA_ERROR_MPS_CLIENT_TERMINATED, what it had is freed; prints 0",
        privileged: true,
    },
    Row {
        name: "quit",
        arguments: "[-t SECONDS]",
        meaning: "end the servers when their clients have gone, after SECONDS at the latest, then the daemon",
        privileged: true,
    },
    Row {
        name: "help",
        arguments: "",
        meaning: "this list",
        privileged: false,
    },
];

/// A command, understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
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
        /// Only this client process.
        pid: Option<i32>,
    },
    /// `shutdown_server PID [-f]`
    ShutdownServer {
        /// Which one.
        server: Server,
        /// Do not wait for its clients.
        force: bool,
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
    /// `quit`
    Quit {
        /// How long clients are waited for; `None`: until they have gone.
        patience: Option<Duration>,
    },
    /// `help`
    Help,
}

/// A server as named by the operator: a process id, or whatever was given in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server(String);

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

/// Why a line is no command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// No such name.
    #[error("Unknown command \"{0}\"")]
    Unknown(String),
    /// Arguments that do not fit.
    #[error("{name}: {what}; usage: {name} {usage}")]
    Arguments {
        /// The command.
        name: &'static str,
        /// What is wrong.
        what: String,
        /// Its arguments.
        usage: &'static str,
    },
    /// Not for this user.
    #[error("{0} is for root and the user who runs the daemon only")]
    NotPermitted(&'static str),
}

fn row(name: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.name == name)
}

/// Understands a line. `None`: it is empty.
pub fn parse(line: &str, privileged: bool) -> Result<Option<Command>, CommandError> {
    let mut words = line.split_whitespace();
    let Some(name) = words.next() else {
        return Ok(None);
    };
    let row = row(name).ok_or_else(|| CommandError::Unknown(name.to_owned()))?;
    if row.privileged && !privileged {
        return Err(CommandError::NotPermitted(row.name));
    }
    let arguments: Vec<&str> = words.collect();
    let wrong = |what: String| CommandError::Arguments {
        name: row.name,
        what,
        usage: row.arguments,
    };
    // NVIDIA's daemon takes a missing process id for 0.
    let server = |arguments: &[&str]| match arguments {
        [] => Ok(Server("0".into())),
        [pid] => Ok(Server((*pid).to_owned())),
        _ => Err(wrong("one process id expected".into())),
    };
    let process = |text: &str| -> Result<i32, CommandError> {
        let pid: Option<i32> = text.parse().ok().filter(|pid| *pid > 0);
        pid.ok_or_else(|| wrong(format!("\"{text}\" is not a process id")))
    };
    let command = match (row.name, arguments.as_slice()) {
        ("get_server_status", arguments) => Command::ServerStatus(server(arguments)?),
        ("get_client_list", arguments) => Command::ClientList(server(arguments)?),
        ("get_device_client_list", []) => Command::DeviceClientList(None),
        ("get_device_client_list", arguments) => {
            Command::DeviceClientList(Some(server(arguments)?))
        }
        ("ps", []) => Command::Processes { pid: None },
        ("ps", ["-p", pid]) => Command::Processes {
            pid: Some(process(pid)?),
        },
        ("ps", _) => return Err(wrong("-p and a process id expected".into())),
        ("shutdown_server", [pid]) => Command::ShutdownServer {
            server: server(&[*pid])?,
            force: false,
        },
        ("shutdown_server", [pid, "-f"] | ["-f", pid]) => Command::ShutdownServer {
            server: server(&[*pid])?,
            force: true,
        },
        ("shutdown_server", _) => return Err(wrong("one process id expected".into())),
        ("terminate_client", [of, pid]) => Command::TerminateClient {
            server: server(&[*of])?,
            client: process(pid)?,
        },
        ("terminate_client", _) => {
            return Err(wrong(
                "the server's process id and the client's expected".into(),
            ));
        }
        ("start_server", ["-uid", uid]) => Command::StartServer {
            uid: uid
                .parse()
                .map_err(|_| wrong(format!("\"{uid}\" is not a user id")))?,
        },
        ("start_server", _) => return Err(wrong("a user id is missing".into())),
        ("quit", []) => Command::Quit { patience: None },
        ("quit", ["-t", seconds]) => {
            let seconds: u32 = seconds
                .parse()
                .map_err(|_| wrong(format!("\"{seconds}\" is not a number of seconds")))?;
            Command::Quit {
                patience: Some(Duration::from_secs(seconds.into())),
            }
        }
        (_, [unexpected, ..]) => return Err(wrong(format!("unexpected \"{unexpected}\""))),
        ("get_server_list", []) => Command::ServerList,
        // The one row that is left.
        (_, []) => Command::Help,
    };
    Ok(Some(command))
}

/// What `help` prints; also the last part of `mps-control --help`.
pub fn help() -> String {
    let mut text = String::from("Commands:\n");
    for row in TABLE {
        let _ = writeln!(
            text,
            "  {:<39} {}",
            format!("{} {}", row.name, row.arguments),
            row.meaning
        );
    }
    text.truncate(text.trim_end().len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(line: &str) -> Command {
        parse(line, true).expect(line).expect("a command")
    }

    fn error(line: &str) -> String {
        parse(line, true).expect_err(line).to_string()
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
        assert_eq!(ok("ps -p 9"), Command::Processes { pid: Some(9) });
        assert_eq!(
            ok("get_device_client_list"),
            Command::DeviceClientList(None)
        );
        assert_eq!(ok("help"), Command::Help);
        assert_eq!(parse(" \t", true), Ok(None));
    }

    #[test]
    fn mistakes_are_named() {
        assert_eq!(error("frobnicate now"), "Unknown command \"frobnicate\"");
        assert_eq!(
            error("quit -t soon"),
            "quit: \"soon\" is not a number of seconds; usage: quit [-t SECONDS]"
        );
        assert_eq!(
            error("start_server"),
            "start_server: a user id is missing; usage: start_server -uid UID"
        );
        assert!(error("start_server -uid -1").contains("\"-1\" is not a user id"));
        assert!(error("get_server_list 1").contains("unexpected \"1\""));
        assert!(error("terminate_client 1 x").contains("\"x\" is not a process id"));
        assert!(error("ps -p 0").contains("\"0\" is not a process id"));
        assert!(error("shutdown_server 1 2").contains("one process id expected"));
        assert!(error("quit now").contains("unexpected \"now\""));
    }

    #[test]
    fn every_row_is_understood_and_helped() {
        for row in TABLE {
            let arguments = match row.arguments {
                "-uid UID" => "-uid 1",
                "PID [-f]" => "1 -f",
                "SERVER_PID CLIENT_PID" => "1 2",
                _ => "",
            };
            let command = ok(&format!("{} {arguments}", row.name));
            assert_eq!(command == Command::Help, row.name == "help");
            assert!(help().contains(row.name));
            assert_eq!(
                parse(&format!("{} {arguments}", row.name), false).is_err(),
                row.privileged
            );
        }
    }
}
