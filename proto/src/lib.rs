//! The contract between the shim, the server and the control daemon.

pub mod cuda;
pub mod handshake;
