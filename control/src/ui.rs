//! The client side of commands, for mps-control and mps-run.

use super::wire::{self, Answer, Interface, Mark};
use crate::seqpacket;
use crate::settings::Settings;
use mpsshim_model::client::Credentials;
use mpsshim_proto::directory::{self, Refused};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Why a command has no answer.
#[derive(Debug, thiserror::Error)]
pub enum UiError {
    /// No daemon listens in the pipe directory.
    #[error("Cannot find MPS control daemon process")]
    NoDaemon,
    /// The socket exists, but access is denied.
    #[error("cannot connect to the control daemon at {path}: {source}")]
    Connect {
        /// The socket.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Another user could have placed the socket there.
    #[error("the pipe directory {path} is not used: {why}")]
    Untrusted {
        /// The directory.
        path: String,
        /// Why the directory is not trusted.
        why: Refused,
    },
    /// The line is too long.
    #[error("a command line may have {} bytes", wire::COMMAND_LIMIT)]
    TooLong,
    /// The connection was lost before the answer was complete.
    #[error("the control daemon closed the connection without an answer")]
    Gone,
}

/// A connection to the daemon.
#[derive(Debug)]
pub struct Ui {
    connection: OwnedFd,
    interface: Interface,
}

impl Ui {
    /// Connects to the owner's socket or, without permission for it or in the folder of a named server, which has none, to
    /// the socket for all users.
    pub fn connect(settings: &Settings) -> Result<Ui, UiError> {
        let directory = &settings.pipe_directory;
        // Root may query any user's daemon that it names.
        let named = settings.pipe_directory_is_named;
        match directory::of_client(directory, named, named) {
            Ok(_) => {}
            Err(refused) if refused.is_absent() => return Err(UiError::NoDaemon),
            Err(why) => {
                return Err(UiError::Untrusted {
                    path: directory.display().to_string(),
                    why,
                });
            }
        }
        let privileged = settings.privileged_socket();
        let (path, result) = match seqpacket::connect(&privileged) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound
                ) =>
            {
                let control = settings.control_socket();
                let result = seqpacket::connect(&control);
                (control, result)
            }
            result => (privileged, result),
        };
        match result {
            Ok(connection) => Ok(Ui {
                connection,
                interface: Interface::default(),
            }),
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::NotADirectory => Err(UiError::NoDaemon),
                _ => Err(UiError::Connect {
                    path: path.display().to_string(),
                    source: error,
                }),
            },
        }
    }

    /// The same connection, for commands of this version of the interface.
    pub fn with_interface(self, interface: Interface) -> Ui {
        Ui { interface, ..self }
    }

    /// From now on an answer that does not come within this time counts as a lost connection.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        let limit = TimeVal::milliseconds(patience.as_millis() as i64);
        Ok(setsockopt(
            &self.connection,
            sockopt::ReceiveTimeout,
            &limit,
        )?)
    }

    /// The daemon's process, as this PID namespace knows it.
    ///
    /// # Errors
    /// Those of the system call.
    pub fn daemon(&self) -> io::Result<Credentials> {
        seqpacket::peer(self.connection.as_fd())
    }

    /// Executes one command; waits for its answer.
    pub fn command(&mut self, line: &str) -> Result<Answer, UiError> {
        self.command_with(line, None)
    }

    /// As [`Ui::command`], with a descriptor.
    pub fn command_with(
        &mut self,
        line: &str,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Answer, UiError> {
        let packet = wire::command_packet(self.interface, line).ok_or(UiError::TooLong)?;
        seqpacket::send(self.connection.as_fd(), &packet, descriptor).map_err(|_| UiError::Gone)?;
        let (mut text, mut note) = (Vec::new(), Vec::new());
        let mut buffer = vec![0; wire::PACKET_LIMIT];
        loop {
            let len = seqpacket::receive(self.connection.as_fd(), &mut buffer)
                .map_err(|_| UiError::Gone)?;
            let (mark, part) = wire::parse_answer(&buffer[..len]).ok_or(UiError::Gone)?;
            if mark == Mark::Note {
                note.extend_from_slice(part);
                continue;
            }
            text.extend_from_slice(part);
            if mark != Mark::More {
                return Ok(Answer {
                    ok: mark == Mark::Done,
                    text: String::from_utf8_lossy(&text).into_owned(),
                    note: String::from_utf8_lossy(&note).into_owned(),
                });
            }
        }
    }
}
