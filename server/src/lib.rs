//! The server side of mpsshim: the engine that executes clients' calls, and the control daemon.

pub mod engine;
