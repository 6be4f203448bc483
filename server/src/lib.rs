//! The server: the engine that executes clients' calls in proxy mode, the arbiter of those in direct mode.

pub mod admission;
pub mod arbiter;
pub mod driver_locks;
pub mod engine;
pub mod hosting;
pub mod keeper;
pub mod nvml;
pub mod serve;
pub mod standby;
