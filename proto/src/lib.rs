//! The contract between the shim, the server and the control daemon.

pub mod classes;
pub mod cuda;
pub mod handshake;
pub mod table;
