//! Clients.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Who is at the other end of a client's connection (`SO_PEERCRED` as the daemon read it).
#[derive(Clone, Copy, Debug)]
pub struct Credentials {
    /// Process id in the daemon's PID namespace.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// One connected client, as listed to an operator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientInfo {
    /// Number of the session.
    pub session: u64,
    /// Process id.
    pub pid: i32,
    /// User id.
    pub uid: u32,
}

impl fmt::Display for ClientInfo {
    /// As logs name it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pid, session) = (self.pid, self.session);
        write!(f, "{{PID: {pid}, Context ID: {session}}}")
    }
}

/// What a server's parts that have sessions tell its owner of their clients.
#[derive(Clone, Debug)]
pub enum EngineEvent {
    /// A session was set up; its client got its descriptors.
    Connected(ClientInfo),
    /// A client was refused with this status (`CUresult`) and reason.
    Refused(i32, u32, String),
    /// A session has ended, its resources are gone. The text says why when it was ended by the server.
    Gone(ClientInfo, Option<String>),
    /// A session has ended, but its work on the device goes on for long. It keeps its memory; [`EngineEvent::Gone`] follows
    /// if the work ever ends.
    Stuck(ClientInfo),
    /// The context is lost. Sessions that end have been told. The process must be replaced.
    Fault {
        /// The `CUresult`.
        status: u32,
        /// Sessions that go on in the next server.
        going_on: usize,
        /// Sessions that had something in flight; one alone has caused it.
        suspects: Vec<Suspect>,
    },
}

/// A client that had something in flight when the context was lost.
#[derive(Clone, Debug)]
pub struct Suspect {
    /// Who.
    pub client: ClientInfo,
    /// The kernel that it launched last, if the name is known.
    pub kernel: Option<String>,
}
