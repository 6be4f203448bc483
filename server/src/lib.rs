//! The server: the engine, which executes calls of clients in proxy mode, and the arbiter of clients in direct mode.

pub mod admission;
pub mod arbiter;
pub mod driver_locks;
pub mod engine;
pub mod hosting;
pub mod keeper;
pub mod life;
pub mod nvml;
pub mod release;
pub mod serve;
pub mod standby;
