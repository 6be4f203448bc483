//! Clients.

use crate::suspension::{Placement, Unmoved};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Identity of the process at the other end of a client's connection (`SO_PEERCRED` as the daemon read it).
#[derive(Clone, Copy, Debug)]
pub struct Credentials {
    /// Process id in the daemon's PID namespace.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// A client that a server gets.
#[derive(Clone, Debug)]
pub struct Newcomer {
    /// Its process.
    pub who: Credentials,
    /// The namespace by whose socket it came; `None`: the server's own limits apply.
    pub namespace: Option<String>,
}

impl From<Credentials> for Newcomer {
    /// A client without a namespace.
    fn from(who: Credentials) -> Newcomer {
        Newcomer {
            who,
            namespace: None,
        }
    }
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
    /// Name of the static partition that it has.
    pub partition: Option<String>,
    /// Its namespace.
    pub namespace: Option<String>,
}

impl fmt::Display for ClientInfo {
    /// As in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pid, session) = (self.pid, self.session);
        write!(f, "{{PID: {pid}, Context ID: {session}}}")
    }
}

/// Client events reported by the engine and the arbiter.
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
    /// The device memory of a session has been moved, or has not: number of the order, and of the session.
    MemoryMoved(u64, u64, Result<Placement, Unmoved>),
    /// The session with this number needs a server of its own, and waits for it.
    NeedsOwnServer(u64),
    /// The images of the sessions have changed since a standby got them.
    ImagesChanged,
    /// A client needs device memory that the images of a standby may take.
    MemoryShort,
    /// The devices, as bit masks of ordinals, on which clients have work in flight, and for which work was held back since
    /// the last report.
    Work(u64, u64),
    /// The context is lost. Clients of sessions that end have been notified. The process must be replaced.
    Fault {
        /// The `CUresult`.
        status: u32,
        /// Sessions that continue in the next server.
        going_on: usize,
        /// Sessions with work in flight; a single one has caused the fault.
        suspects: Vec<Suspect>,
    },
}

/// A client with work in flight when the context was lost.
#[derive(Clone, Debug)]
pub struct Suspect {
    /// The client.
    pub client: ClientInfo,
    /// The last kernel that it launched, if the name is known.
    pub kernel: Option<String>,
}
