//! The server side of mpsshim: the engine that executes clients' calls, and the control daemon.

pub mod control;
pub mod engine;
pub mod link;
pub mod logging;
pub mod seqpacket;
pub mod serve;
pub mod settings;
