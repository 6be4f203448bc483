//! The server side of mpsshim: the engine that executes clients' calls, and the control daemon.

pub mod admission;
pub mod amount;
pub mod arbiter;
pub mod cdi;
pub mod cli;
pub mod closers;
pub mod control;
pub mod driver_locks;
pub mod elf;
pub mod engine;
pub mod hosting;
pub mod library;
pub mod limits;
pub mod link;
pub mod logging;
pub mod metrics;
pub mod mode;
pub mod nvml;
pub mod panics;
pub mod seqpacket;
pub mod serve;
pub mod settings;
pub mod takeover;
pub mod top;
pub mod trace;
pub mod user_memory;
