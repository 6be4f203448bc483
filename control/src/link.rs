//! Messages between the control daemon and a server: one JSON object per packet, over a socket pair whose other end the
//! server inherits. A client's connection travels with its [`ToServer::NewClient`].
//!
//! Neither side answers the other directly, so neither can wait for the other: the daemon gives orders, the server
//! reports events.

use crate::closers::Stranger;
use crate::logging::one_line;
use crate::seqpacket;
use crate::trace::Totals;
use mpsshim_model::client::{ClientInfo, Credentials};
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::limits::{Limits, Usage};
use mpsshim_model::suspension::{Placement, Unmoved};
use mpsshim_proto::handshake::ClientHello;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use strum::VariantNames;

/// Version of these messages, raised with any change to them.
///
/// Daemon and server may be of different releases. Messages and their fields are therefore only added: a field that is added
/// has a default, and a message that the other side does not know is ignored. The same holds for the command line of
/// `mps-server`: a new option is given only to an executable whose link is recent enough. A change of any other kind
/// raises [`OLDEST_LINK`] too.
pub const LINK_VERSION: u32 = 22;
/// The oldest version of the other side with which these messages work.
pub const OLDEST_LINK: u32 = 19;
/// Longest packet, bytes: limits of as many namespaces and users as there may be, on all devices.
pub(crate) const PACKET_LIMIT: usize = 112 * 1024;

/// Maximum number of suspects reported for one fault.
pub const MOST_SUSPECTS: usize = 128;
/// Longest kernel name in a report, bytes.
pub const LONGEST_KERNEL: usize = 200;

/// A session with work in flight when the context was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspect {
    /// Number of the session.
    pub session: u64,
    /// The last kernel that it launched, if the name is known.
    pub kernel: Option<String>,
}

/// Daemon to server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, VariantNames)]
pub enum ToServer {
    /// Take over the client whose connection comes with this packet.
    NewClient {
        /// The bytes of its [`ClientHello`].
        hello: Vec<u8>,
        /// Process id, 0 when the daemon cannot see it.
        pid: i32,
        /// User id.
        uid: u32,
        /// Group id.
        gid: u32,
        /// Its namespace; `None`: the server's own limits apply.
        namespace: Option<String>,
    },
    /// End when the last client has gone; at once with `force`.
    Shutdown {
        /// Do not wait for clients.
        force: bool,
    },
    /// End a client.
    Terminate {
        /// Number of its session.
        session: u64,
    },
    /// New limits for future clients.
    Limits(Limits),
    /// Give a client this share of dispatch or turns.
    Weight {
        /// Number of its session.
        session: u64,
        /// Its weight.
        weight: u32,
    },
    /// Write server.log into the file that comes with this packet.
    Log,
    /// An operator has queried the devices. The server only logs this: the daemon answers the query.
    DeviceQuery,
    /// Trace into the file that comes with this packet.
    Trace,
    /// End the trace.
    StopTrace,
    /// Report the clients' usage.
    Usage {
        /// Number of the query, repeated in the report.
        question: u64,
    },
    /// Bring the sessions to rest and leave them to the next server; end, unless some stay.
    HandOver(HandOver),
    /// Report the images of the sessions ([`ToDaemon::Images`]), for the next server, and then their next change
    /// ([`ToDaemon::ImagesChanged`]).
    Images,
    /// Load the images of the sessions ahead that the keeper has whose connection comes with this packet, and unload those of
    /// earlier orders that it does not have; only for a standby.
    LoadAhead,
    /// Unload the images that were loaded ahead; only for a standby.
    UnloadAhead,
    /// Go on with the sessions of the keeper whose connection comes with this packet.
    Adopt,
    /// Move the device memory of a session.
    MoveMemory(MoveMemory),
    /// Report on which devices clients have work in flight ([`ToDaemon::Work`]), or no longer.
    ReportWork {
        /// From now on; otherwise no longer.
        on: bool,
    },
    /// Hold new work of all clients back for this time from now on, so that other users get their shares of the devices.
    Hold {
        /// Microseconds; 0: let it through.
        us: u64,
    },
    /// Ask for a server of its own for each session that needs one ([`ToDaemon::NeedsOwnServer`]), or no longer.
    Separate {
        /// From now on; otherwise no longer.
        on: bool,
    },
    /// A session that has asked for a server of its own gets none for now.
    ShareServer {
        /// Number of the session.
        session: u64,
    },
}

/// Order to move the device memory of a session to host memory, or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveMemory {
    /// Number of the order, repeated in the report.
    pub number: u64,
    /// Number of the session.
    pub session: u64,
    /// To host memory; otherwise back.
    pub out: bool,
    /// How long the session may take to be idle, in milliseconds.
    pub patience_ms: u64,
}

/// Request to hand over the sessions to a new server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandOver {
    /// Formats of the sessions that the next server can restore.
    pub formats: Vec<u64>,
    /// How long the sessions may take to come to rest, in milliseconds.
    pub patience_ms: u64,
    /// The sessions that cannot be handed over.
    pub others: Others,
    /// The only session to hand over; `None`: all.
    #[serde(default)]
    pub only: Option<u64>,
}

/// Treatment of sessions that cannot be handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Others {
    /// They stay with this server.
    #[default]
    Stay,
    /// They are ended.
    End,
    /// All sessions stay: the devices admit one process, so that no two servers can work.
    Refuse,
}

/// Server to daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, VariantNames)]
pub enum ToDaemon {
    /// The server accepts clients.
    Ready {
        /// Devices of the server, by ordinal.
        devices: Vec<DeviceInfo>,
    },
    /// A client that was handed over has a session.
    Connected {
        /// Number of the session.
        session: u64,
        /// Process id.
        pid: i32,
        /// User id.
        uid: u32,
        /// Name of the static partition that it has.
        partition: Option<String>,
        /// Its namespace.
        namespace: Option<String>,
    },
    /// A client that was handed over was refused.
    Refused {
        /// Process id.
        pid: i32,
        /// The `CUresult` that the client received.
        status: u32,
        /// The reason.
        reason: String,
    },
    /// A session is over and its resources are free.
    Gone {
        /// Number of the session.
        session: u64,
        /// Process id.
        pid: i32,
        /// Why the server ended it, if it did.
        reason: Option<String>,
    },
    /// A session is over, but its work on the device goes on, and its resources are not free.
    Stuck {
        /// Number of the session.
        session: u64,
    },
    /// The context is lost with this `CUresult`; the server is about to end.
    Fault {
        /// The `CUresult`.
        status: u32,
        /// Sessions with work in flight, up to [`MOST_SUSPECTS`]; a single suspect has caused the fault.
        suspects: Vec<Suspect>,
    },
    /// A trace has started, or failed to start.
    TraceStarted {
        /// The reason of the failure.
        error: Option<String>,
    },
    /// A trace has ended.
    TraceEnded(Totals),
    /// The connection to the keeper of the server's sessions comes with this packet; the next server gets it.
    Keeper,
    /// A connection comes with this packet whose other end is closed as soon as the server's threads end, before the kernel
    /// has released the memory and the devices of the process.
    Life,
    /// The server is ending as it was told to.
    Stopping,
    /// A standby has created its context and waits for sessions.
    Standby {
        /// Formats of the sessions that it can restore.
        formats: Vec<u64>,
    },
    /// The connection to a temporary keeper with the images of the sessions comes with this packet; without it, no images
    /// can be loaded ahead.
    Images,
    /// The images of the sessions have changed since the last report of them.
    ImagesChanged,
    /// A client of the server needs device memory that the images of its standby may take.
    MemoryShort,
    /// The devices, as bit masks of the server's ordinals, on which clients have work in flight, and for which work was held
    /// back since the last report.
    Work {
        /// In flight.
        busy: u64,
        /// Held back.
        wanted: u64,
    },
    /// A session launches graphs with conditional nodes, which may end the context if other sessions work in it: it waits for
    /// a server of its own ([`HandOver::only`]), or for [`ToServer::ShareServer`].
    NeedsOwnServer {
        /// Number of the session.
        session: u64,
    },
    /// A standby has carried out an order to load images ahead, as far as possible, or to unload them.
    LoadedAhead,
    /// A standby has received the order to go on with sessions.
    Adopts,
    /// The server does not hand over its sessions, and continues to serve them.
    Stays {
        /// The reason.
        why: String,
    },
    /// All sessions are at rest, for the next server; this one ends now.
    HandsOver {
        /// Number of sessions.
        sessions: usize,
    },
    /// Some sessions have left for the next server, which continues them with the keeper whose connection comes with this
    /// packet. The others stay.
    Parts {
        /// Number of sessions that have left.
        sessions: usize,
        /// The clients that stay, with reasons.
        stay: String,
    },
    /// The device memory of a session has been moved, or has not.
    MemoryMoved {
        /// Number of the order.
        number: u64,
        /// Number of the session.
        session: u64,
        /// Where the memory is, or why it is not moved.
        outcome: Result<Placement, Unmoved>,
    },
    /// Usage of clients. The answer to one query may take several reports.
    Usage {
        /// Number of the query.
        question: u64,
        /// Some of the clients.
        clients: Vec<Usage>,
        /// Number of moments without work in flight that the gate has opened for clients' calls.
        #[serde(default)]
        gate_moments: Option<u64>,
        /// Whether this is the last report for the query.
        last: bool,
    },
}

/// Errors of the link.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The socket failed.
    #[error("the link between daemon and server failed: {0}")]
    Io(#[from] io::Error),
    /// A packet that is not a valid message.
    #[error("the link between daemon and server carried no valid message: {0}")]
    Malformed(#[from] serde_json::Error),
    /// A packet that is too long.
    #[error(
        "the link between daemon and server carried a packet of over {PACKET_LIMIT} bytes or descriptors too many"
    )]
    TooLong,
    /// A message that this release does not know, with this name; the next packets can be received.
    #[error(
        "the link between daemon and server carried a message of another release, which is ignored: {0}"
    )]
    Unknown(String),
    /// A message without its descriptor, or a hello of a wrong length.
    #[error("the link between daemon and server carried a message without {0}")]
    Incomplete(&'static str),
}

impl LinkError {
    /// Whether a non-blocking link just has no packet, or no room for one, now.
    pub fn would_block(&self) -> bool {
        matches!(self, LinkError::Io(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// A client that has sent its hello and waits for a session.
#[derive(Debug)]
pub struct Arrival {
    /// Its connection.
    pub connection: Stranger,
    /// Its hello, as far as this release knows it.
    pub hello: ClientHello,
    /// The same as it came: a later release's may be longer.
    pub packet: Vec<u8>,
    /// Its credentials.
    pub who: Credentials,
    /// The namespace of a named server by whose socket it came.
    pub namespace: Option<String>,
}

/// An order as the server receives it.
#[derive(Debug)]
pub enum Order {
    /// Take over this client.
    NewClient(Box<Arrival>),
    /// End, at once with `force`.
    Shutdown {
        /// Do not wait for clients.
        force: bool,
    },
    /// End the client with this session.
    Terminate(u64),
    /// New limits for future clients.
    Limits(Box<Limits>),
    /// The weight of the client with this session.
    Weight(u64, u32),
    /// Write server.log into this file.
    Log(OwnedFd),
    /// An operator has asked for the devices.
    DeviceQuery,
    /// Trace into this file.
    Trace(OwnedFd),
    /// End the trace.
    StopTrace,
    /// Report the clients' usage, with this query number.
    Usage(u64),
    /// Leave the sessions to the next server.
    HandOver(HandOver),
    /// Report the images of the sessions.
    Images,
    /// Load the images ahead that the keeper behind this connection has.
    LoadAhead(OwnedFd),
    /// Unload the images that were loaded ahead.
    UnloadAhead,
    /// Go on with the sessions of the keeper behind this connection.
    Adopt(OwnedFd),
    /// Move the device memory of a session.
    MoveMemory(MoveMemory),
    /// Report where clients have work in flight, or no longer.
    ReportWork(bool),
    /// Hold new work back for this time.
    Hold(Duration),
    /// Ask for servers for single sessions, or no longer.
    Separate(bool),
    /// A session that has asked for a server of its own stays.
    ShareServer(u64),
}

/// A packet, and the descriptor that came with it.
type Received = (Vec<u8>, Option<Stranger>);

/// One end of the link.
#[derive(Debug)]
pub struct Link {
    socket: Stranger,
    /// User of the process at the other end.
    uid: u32,
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Link {
    /// The server's end of a link to the daemon, from its descriptor.
    pub fn new(socket: OwnedFd) -> Link {
        let uid = nix::unistd::geteuid().as_raw();
        Link::to_user(Stranger::new(socket, uid), uid)
    }

    /// The daemon's end of a link to a server that runs as this user and is not trusted beyond this user's rights.
    pub fn to_user(socket: Stranger, uid: u32) -> Link {
        Link { socket, uid }
    }

    /// Sends one packet.
    ///
    /// # Errors
    /// It is too long, or the other end has gone.
    pub fn send(
        &self,
        message: &impl Serialize,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), LinkError> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > PACKET_LIMIT {
            return Err(LinkError::TooLong);
        }
        Ok(seqpacket::send(self.as_fd(), &bytes, descriptor)?)
    }

    /// Receives one packet. `None`: the other end is closed.
    pub(crate) fn receive<T: DeserializeOwned>(
        &self,
    ) -> Result<Option<(T, Option<Stranger>)>, LinkError> {
        let Some((bytes, descriptor)) = self.receive_packet()? else {
            return Ok(None);
        };
        Ok(Some((serde_json::from_slice(&bytes)?, descriptor)))
    }

    /// As [`Link::receive`], for messages of which the other side may know more.
    fn receive_known<T: DeserializeOwned + VariantNames>(
        &self,
    ) -> Result<Option<(T, Option<Stranger>)>, LinkError> {
        let Some((bytes, descriptor)) = self.receive_packet()? else {
            return Ok(None);
        };
        match serde_json::from_slice(&bytes) {
            Ok(message) => Ok(Some((message, descriptor))),
            Err(error) => match name_of(&bytes).filter(|name| !T::VARIANTS.contains(&&name[..])) {
                Some(name) => Err(LinkError::Unknown(one_line(&name))),
                None => Err(error.into()),
            },
        }
    }

    fn receive_packet(&self) -> Result<Option<Received>, LinkError> {
        let mut buffer = vec![0; PACKET_LIMIT];
        let mut packet = seqpacket::receive_with_descriptor(self.as_fd(), &mut buffer, self.uid);
        // A peer that dies with packets unread causes one `ECONNRESET`; packets that it sent before can still be read.
        if packet
            .as_ref()
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
        {
            packet = seqpacket::receive_with_descriptor(self.as_fd(), &mut buffer, self.uid);
        }
        let packet = packet?;
        match packet {
            packet if packet.cut => Err(LinkError::TooLong),
            packet if packet.len == 0 => Ok(None),
            packet => {
                buffer.truncate(packet.len);
                Ok(Some((buffer, packet.descriptor)))
            }
        }
    }

    /// Hands a client to the server. The daemon keeps its own descriptor of the connection.
    pub fn hand_over(&self, client: &Arrival) -> Result<(), LinkError> {
        let Credentials { pid, uid, gid } = client.who;
        let order = ToServer::NewClient {
            hello: client.packet.clone(),
            pid,
            uid,
            gid,
            namespace: client.namespace.clone(),
        };
        self.send(&order, Some(client.connection.as_fd()))
    }

    /// Tells the server to end.
    pub fn order_shutdown(&self, force: bool) -> Result<(), LinkError> {
        self.send(&ToServer::Shutdown { force }, None)
    }

    /// Tells the server to end a client.
    pub fn order_termination(&self, session: u64) -> Result<(), LinkError> {
        self.send(&ToServer::Terminate { session }, None)
    }

    /// Sends the limits of future clients to the server.
    pub fn order_limits(&self, limits: &Limits) -> Result<(), LinkError> {
        self.send(&ToServer::Limits(limits.clone()), None)
    }

    /// Gives a client a share of dispatch.
    pub fn order_weight(&self, session: u64, weight: u32) -> Result<(), LinkError> {
        self.send(&ToServer::Weight { session, weight }, None)
    }

    /// Tells the server to report where its clients have work in flight, or no longer.
    pub fn order_work_reports(&self, on: bool) -> Result<(), LinkError> {
        self.send(&ToServer::ReportWork { on }, None)
    }

    /// Tells the server to hold new work back for this time; zero: to let it through.
    pub fn order_hold(&self, time: Duration) -> Result<(), LinkError> {
        let us = time.as_micros() as u64;
        self.send(&ToServer::Hold { us }, None)
    }

    /// Tells the server to ask for servers for single sessions, or no longer.
    pub fn order_separation(&self, on: bool) -> Result<(), LinkError> {
        self.send(&ToServer::Separate { on }, None)
    }

    /// Tells the server that a session gets no server of its own for now.
    pub fn order_sharing(&self, session: u64) -> Result<(), LinkError> {
        self.send(&ToServer::ShareServer { session }, None)
    }

    /// Hands the server another server.log.
    pub fn hand_log(&self, log: BorrowedFd<'_>) -> Result<(), LinkError> {
        self.send(&ToServer::Log, Some(log))
    }

    /// Tells the server to trace into a file.
    pub fn order_trace(&self, file: BorrowedFd<'_>) -> Result<(), LinkError> {
        self.send(&ToServer::Trace, Some(file))
    }

    /// Tells the server to end its trace.
    pub fn order_trace_end(&self) -> Result<(), LinkError> {
        self.send(&ToServer::StopTrace, None)
    }

    /// Tells the server that an operator has asked for the devices.
    pub fn tell_device_query(&self) -> Result<(), LinkError> {
        self.send(&ToServer::DeviceQuery, None)
    }

    /// Queries the clients' usage; [`ToDaemon::Usage`] reports follow.
    pub fn ask_usage(&self, question: u64) -> Result<(), LinkError> {
        self.send(&ToServer::Usage { question }, None)
    }

    /// Tells the server to leave its sessions to the next server.
    pub fn order_hand_over(&self, request: HandOver) -> Result<(), LinkError> {
        self.send(&ToServer::HandOver(request), None)
    }

    /// Tells the server to move the device memory of a session.
    pub fn order_move(&self, order: MoveMemory) -> Result<(), LinkError> {
        self.send(&ToServer::MoveMemory(order), None)
    }

    /// Asks the server for the images of its sessions; [`ToDaemon::Images`] follows.
    pub fn ask_images(&self) -> Result<(), LinkError> {
        self.send(&ToServer::Images, None)
    }

    /// Tells a standby to load the images ahead that a keeper has; [`ToDaemon::LoadedAhead`] follows.
    pub fn order_images(&self, keeper: BorrowedFd<'_>) -> Result<(), LinkError> {
        self.send(&ToServer::LoadAhead, Some(keeper))
    }

    /// Tells a standby to unload the images that it has loaded ahead; [`ToDaemon::LoadedAhead`] follows.
    pub fn order_unload(&self) -> Result<(), LinkError> {
        self.send(&ToServer::UnloadAhead, None)
    }

    /// Tells a standby to continue the sessions of a keeper.
    pub fn order_adoption(&self, keeper: BorrowedFd<'_>) -> Result<(), LinkError> {
        self.send(&ToServer::Adopt, Some(keeper))
    }

    /// Sends a report to the daemon.
    pub fn report(&self, report: &ToDaemon) -> Result<(), LinkError> {
        self.send(report, None)
    }

    /// The next order, for the server. `None`: the daemon is gone.
    pub fn next_order(&self) -> Result<Option<Order>, LinkError> {
        match self.receive_known()? {
            None => Ok(None),
            Some((ToServer::Shutdown { force }, _)) => Ok(Some(Order::Shutdown { force })),
            Some((ToServer::Terminate { session }, _)) => Ok(Some(Order::Terminate(session))),
            Some((ToServer::Limits(limits), _)) => Ok(Some(Order::Limits(Box::new(limits)))),
            Some((ToServer::Weight { session, weight }, _)) => {
                Ok(Some(Order::Weight(session, weight)))
            }
            Some((ToServer::Log, log)) => Ok(Some(Order::Log(
                log.ok_or(LinkError::Incomplete("the log"))?.into(),
            ))),
            Some((ToServer::Trace, file)) => Ok(Some(Order::Trace(
                file.ok_or(LinkError::Incomplete("the trace"))?.into(),
            ))),
            Some((ToServer::StopTrace, _)) => Ok(Some(Order::StopTrace)),
            Some((ToServer::DeviceQuery, _)) => Ok(Some(Order::DeviceQuery)),
            Some((ToServer::Usage { question }, _)) => Ok(Some(Order::Usage(question))),
            Some((ToServer::HandOver(request), _)) => Ok(Some(Order::HandOver(request))),
            Some((ToServer::MoveMemory(order), _)) => Ok(Some(Order::MoveMemory(order))),
            Some((ToServer::ReportWork { on }, _)) => Ok(Some(Order::ReportWork(on))),
            Some((ToServer::Hold { us }, _)) => Ok(Some(Order::Hold(Duration::from_micros(us)))),
            Some((ToServer::Separate { on }, _)) => Ok(Some(Order::Separate(on))),
            Some((ToServer::ShareServer { session }, _)) => Ok(Some(Order::ShareServer(session))),
            Some((ToServer::Images, _)) => Ok(Some(Order::Images)),
            Some((ToServer::UnloadAhead, _)) => Ok(Some(Order::UnloadAhead)),
            Some((ToServer::LoadAhead, keeper)) => Ok(Some(Order::LoadAhead(
                keeper.ok_or(LinkError::Incomplete("the keeper"))?.into(),
            ))),
            Some((ToServer::Adopt, keeper)) => Ok(Some(Order::Adopt(
                keeper.ok_or(LinkError::Incomplete("the keeper"))?.into(),
            ))),
            Some((
                ToServer::NewClient {
                    hello,
                    pid,
                    uid,
                    gid,
                    namespace,
                },
                descriptor,
            )) => {
                let connection =
                    descriptor.ok_or(LinkError::Incomplete("the client's connection"))?;
                let connection = Stranger::new(connection.into(), uid);
                let packet = hello;
                let hello =
                    ClientHello::read(&packet).ok_or(LinkError::Incomplete("a whole hello"))?;
                let who = Credentials { pid, uid, gid };
                Ok(Some(Order::NewClient(Box::new(Arrival {
                    connection,
                    hello,
                    packet,
                    who,
                    namespace,
                }))))
            }
        }
    }

    /// The next report, for the daemon. `None`: the server is gone.
    pub fn next_report(&self) -> Result<Option<ToDaemon>, LinkError> {
        Ok(self
            .next_report_with_descriptor()?
            .map(|(report, _)| report))
    }

    /// As [`Link::next_report`], with the descriptor sent with the report.
    pub fn next_report_with_descriptor(
        &self,
    ) -> Result<Option<(ToDaemon, Option<Stranger>)>, LinkError> {
        self.receive_known()
    }
}

/// The name of a message: a string, or the key of an object with one.
fn name_of(bytes: &[u8]) -> Option<String> {
    match serde_json::from_slice(bytes).ok()? {
        Value::String(name) => Some(name),
        Value::Object(fields) if fields.len() == 1 => {
            fields.into_iter().next().map(|(name, _)| name)
        }
        _ => None,
    }
}

impl From<&ClientInfo> for ToDaemon {
    fn from(client: &ClientInfo) -> ToDaemon {
        ToDaemon::Connected {
            session: client.session,
            pid: client.pid,
            uid: client.uid,
            partition: client.partition.clone(),
            namespace: client.namespace.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::user_memory::MOST_LIMITS;
    use mpsshim_model::limits::Percentage;
    use mpsshim_model::named::{LONGEST_NAME, MOST_NAMESPACES, Named, NamespaceLimits};
    use mpsshim_model::policy::{MOST_USERS, Scheduling};
    use mpsshim_proto::handshake::{MAGIC_CLIENT, MAX_DEVICES, PROTOCOL_VERSION};
    use std::collections::BTreeMap;
    use zerocopy::{FromZeros, IntoBytes};

    fn links() -> (Link, Link) {
        let (left, right) = seqpacket::pair().expect("pair");
        (Link::new(left), Link::new(right))
    }

    fn hello() -> ClientHello {
        ClientHello {
            magic: MAGIC_CLIENT,
            protocol: PROTOCOL_VERSION,
            table_hash: 0x1234_5678_9abc_def0,
            pid: 77,
            mode: 0,
            active_thread_centipercent: 3300,
            priority: -1,
            ..ClientHello::new_zeroed()
        }
    }

    #[test]
    fn a_client_is_handed_over_with_its_connection() {
        let (daemon, server) = links();
        let (theirs, ours) = seqpacket::pair().expect("pair");
        let who = Credentials {
            pid: 12,
            uid: 34,
            gid: 56,
        };
        daemon
            .hand_over(&Arrival {
                connection: Stranger::new(ours, who.uid),
                hello: hello(),
                packet: [hello().as_bytes(), b"of a later release"].concat(),
                who,
                namespace: Some("train".into()),
            })
            .expect("hand over");
        let Some(Order::NewClient(arrived)) = server.next_order().expect("order") else {
            panic!("no client")
        };
        assert_eq!(arrived.hello.as_bytes(), hello().as_bytes());
        assert_eq!(
            (arrived.who.pid, arrived.who.uid, arrived.who.gid),
            (12, 34, 56)
        );
        assert_eq!(arrived.namespace.as_deref(), Some("train"));
        seqpacket::send(arrived.connection.as_fd(), b"welcome", None).expect("send");
        let mut buffer = [0; 16];
        assert_eq!(
            seqpacket::receive(theirs.as_fd(), &mut buffer).expect("receive"),
            7
        );
    }

    #[test]
    fn the_most_limits_fit_into_a_packet() {
        let devices: BTreeMap<usize, u64> = (0..MAX_DEVICES).map(|at| (at, 1 << 39)).collect();
        let named = Named {
            name: "n".repeat(LONGEST_NAME),
            devices: None,
            namespaces: (0..MOST_NAMESPACES)
                .map(|number| {
                    let own = NamespaceLimits {
                        threads: Percentage::from_hundredths(3333),
                        priority: Some(1),
                        memory: devices.clone(),
                    };
                    (format!("{number:x>LONGEST_NAME$}"), own)
                })
                .collect(),
        };
        let mut limits = Limits {
            memory: devices,
            named: Some(Box::new(named)),
            ..Limits::default()
        };
        for user in 0..MOST_LIMITS as u32 {
            let own = [(MAX_DEVICES - 1, 1 << 39)].into();
            limits.user_memory.insert(u32::MAX - 1 - user, own);
        }
        for user in 0..MOST_USERS as u32 {
            let user = u32::MAX - 1 - user;
            limits.scheduling.users.insert(user, Scheduling::Fifo);
        }
        let bytes = serde_json::to_vec(&ToServer::Limits(limits)).expect("JSON");
        assert!(bytes.len() < PACKET_LIMIT, "{} bytes", bytes.len());
        let (daemon, server) = links();
        seqpacket::send(daemon.as_fd(), &bytes, None).expect("room");
        assert!(matches!(server.next_order(), Ok(Some(Order::Limits(_)))));
    }

    #[test]
    fn what_a_dying_server_had_said_is_heard() {
        let (daemon, server) = links();
        let ready = ToDaemon::Ready {
            devices: Vec::new(),
        };
        server.report(&ready).expect("report");
        // It dies with an order unread, so the socket reports a connection reset, once.
        daemon.order_shutdown(false).expect("order");
        drop(server);
        assert!(matches!(
            daemon.next_report(),
            Ok(Some(ToDaemon::Ready { .. }))
        ));
        assert!(matches!(daemon.next_report(), Ok(None)));
    }

    #[test]
    fn reports_come_back_as_they_were_sent() {
        let (daemon, server) = links();
        let reports = [
            ToDaemon::Ready {
                devices: vec![DeviceInfo {
                    name: "NVIDIA H200".into(),
                    uuid: "GPU-0".into(),
                    pci: "0000:00:06.0".into(),
                    memory: 1 << 30,
                    compute_mode: Default::default(),
                    chunks: Default::default(),
                }],
            },
            ToDaemon::Connected {
                session: u64::MAX,
                pid: 5,
                uid: 6,
                partition: Some("GPU-0/1".into()),
                namespace: Some("train".into()),
            },
            ToDaemon::Refused {
                pid: 5,
                status: 808,
                reason: "full".into(),
            },
            ToDaemon::Gone {
                session: 3,
                pid: 5,
                reason: Some("wrote \"nonsense\"\n".into()),
            },
            ToDaemon::Gone {
                session: 4,
                pid: 5,
                reason: None,
            },
            ToDaemon::Fault {
                status: 700,
                suspects: vec![Suspect {
                    session: 3,
                    kernel: Some("stray".into()),
                }],
            },
            ToDaemon::Stopping,
            ToDaemon::Images,
            ToDaemon::ImagesChanged,
            ToDaemon::MemoryShort,
            ToDaemon::Work {
                busy: 5,
                wanted: 1 << 63,
            },
            ToDaemon::LoadedAhead,
            ToDaemon::Adopts,
            ToDaemon::Standby {
                formats: vec![u64::MAX, 0],
            },
            ToDaemon::Stays { why: "busy".into() },
            ToDaemon::HandsOver { sessions: 9 },
        ];
        for report in &reports {
            server.report(report).expect("report");
        }
        for report in &reports {
            assert_eq!(
                daemon.next_report().expect("receive").as_ref(),
                Some(report)
            );
        }
        drop(server);
        assert_eq!(daemon.next_report().expect("end"), None);
    }

    #[test]
    fn nonsense_is_an_error_not_a_panic() {
        let (daemon, server) = links();
        for bytes in [
            &b"{}"[..],
            b"\xff\xfe",
            b"\"Readyy\"",
            b"{\"Gone\":{\"session\":-1,\"pid\":1}}",
        ] {
            seqpacket::send(server.as_fd(), bytes, None).expect("send");
            assert!(matches!(
                daemon.next_report(),
                Err(LinkError::Malformed(_) | LinkError::Unknown(_))
            ));
        }
        let bare = ToServer::NewClient {
            hello: hello().as_bytes().to_vec(),
            pid: 1,
            uid: 2,
            gid: 3,
            namespace: None,
        };
        daemon.send(&bare, None).expect("send");
        assert!(matches!(
            server.next_order(),
            Err(LinkError::Incomplete("the client's connection"))
        ));
        let short = ToServer::NewClient {
            hello: vec![1, 2, 3],
            pid: 1,
            uid: 2,
            gid: 3,
            namespace: None,
        };
        daemon.send(&short, Some(daemon.as_fd())).expect("send");
        assert!(matches!(
            server.next_order(),
            Err(LinkError::Incomplete("a whole hello"))
        ));
    }

    #[test]
    fn a_message_of_a_later_release_is_ignored() {
        let (daemon, server) = links();
        for message in ["\"Later\"", "{\"Later\\n\":{\"a\":1}}"] {
            seqpacket::send(daemon.as_fd(), message.as_bytes(), None).expect("send");
            let ignored = server.next_order().expect_err("an unknown message");
            assert!(
                matches!(&ignored, LinkError::Unknown(name) if name.starts_with("Later") && !name.contains('\n')),
                "{ignored}"
            );
        }
        // A field that this release does not know; and a known message that is none.
        seqpacket::send(
            daemon.as_fd(),
            b"{\"Shutdown\":{\"force\":true,\"in\":5}}",
            None,
        )
        .expect("send");
        assert!(matches!(
            server.next_order(),
            Ok(Some(Order::Shutdown { force: true }))
        ));
        seqpacket::send(daemon.as_fd(), b"{\"Shutdown\":{}}", None).expect("send");
        assert!(matches!(server.next_order(), Err(LinkError::Malformed(_))));
    }

    #[test]
    fn an_empty_non_blocking_link_would_block() {
        let (daemon, _server) = links();
        seqpacket::set_nonblocking(&daemon, true).expect("non-blocking");
        assert!(
            daemon
                .next_report()
                .expect_err("nothing there")
                .would_block()
        );
    }
}
