//! The part of the server that executes clients' calls: sessions, dispatch, driver.
//!
//! `mps-server` (the binary) owns the link to the control daemon and drives an [`Engine`].

use crossbeam_channel::Receiver;
use mpsshim_proto::handshake::ClientHello;
use std::os::fd::OwnedFd;

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
#[derive(Clone, Debug)]
pub struct ClientInfo {
    /// Number of the session.
    pub session: u64,
    /// Process id.
    pub pid: i32,
    /// User id.
    pub uid: u32,
}

/// What the engine tells its owner.
#[derive(Clone, Debug)]
pub enum EngineEvent {
    /// A session was set up; its client got its descriptors.
    Connected(ClientInfo),
    /// A client was refused with this status (`CUresult`) and reason.
    Refused(i32, u32, String),
    /// A session has ended, its resources are gone. The text says why when it was ended by the server.
    Gone(ClientInfo, Option<String>),
    /// The context is lost with this status (`CUresult`); every session has been told. The process must be replaced.
    Fault(u32),
}

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The genuine driver, when not the one the loader finds.
    pub cuda_library: Option<std::path::PathBuf>,
    /// Dispatch threads; 0: chosen from the number of CPUs.
    pub dispatch_threads: usize,
    /// Sessions at a time; one more is refused with `CUDA_ERROR_MPS_MAX_CLIENTS_REACHED`.
    pub max_clients: usize,
}

/// A running engine.
pub struct Engine {}

impl Engine {
    /// Opens the driver, makes the contexts, starts the threads. Blocks until ready.
    pub fn start(_config: EngineConfig) -> anyhow::Result<(Engine, Receiver<EngineEvent>)> {
        anyhow::bail!("the engine is not built yet")
    }
    /// Takes over a client's connection. Never blocks; the outcome comes as an event.
    pub fn add_client(&self, _socket: OwnedFd, _hello: ClientHello, _who: Credentials) {}
    /// Sessions that are alive.
    pub fn clients(&self) -> Vec<ClientInfo> {
        Vec::new()
    }
    /// Names of the devices served, by ordinal, with their UUIDs (`GPU-…`).
    pub fn devices(&self) -> Vec<(String, String)> {
        Vec::new()
    }
    /// Ends every session (clients get `CUDA_ERROR_MPS_RPC_FAILURE`) and frees the contexts.
    pub fn shutdown(self) {}
}
