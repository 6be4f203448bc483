//! The contract between the shim, the server and the control daemon.

pub mod answer;
pub mod arena;
pub mod direct;
pub mod directory;
pub mod environment;
pub mod graph_memory;
pub mod handle;
pub mod handshake;
pub mod limits;
pub mod message;
pub mod nearest;
pub mod ops;
pub mod release;
pub mod ring;
pub mod segment;
pub mod shm;
pub mod user_memory;
pub mod wire;
