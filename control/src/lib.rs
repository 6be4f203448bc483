//! The control daemon, the programs that talk to it, and the code shared by servers and the daemon.
//!
//! [`daemon`] waits on its sockets in one thread and dispatches packets: clients to [`servers`], commands to
//! [`commands`]. [`directory`] is its pipe directory, [`files`] opens files there safely, [`greeting`] classifies the
//! first packet of a connection, [`process`] is a server's process, started here or taken over, [`wire`] is the format
//! of commands and answers, [`parse`] parses command lines, [`modules`] those of interface 3, [`server_file`] the file of `-a`, [`listing`] formats the answers that are lists, [`usage`]
//! queries servers for their clients' usage, [`devices`] knows the devices. [`launch`] starts a daemon, [`environment`] is that of programs under the library, [`ui`] is the
//! client side of a command, [`target`] is the file of a trace, [`prompt`] reads commands from a terminal, [`top`] and
//! [`metrics`] present the clients' usage.
//!
//! [`quarantine`] is the list of programs that get servers of their own after a fault, [`program`] identifies a
//! program.
//!
//! [`link`] defines the messages between daemon and server, [`takeover`] those exchanged after a daemon has died.

pub mod cdi;
pub mod cli;
pub mod closers;
pub mod commands;
pub mod daemon;
pub mod defaults;
mod devices;
pub mod directory;
pub mod doctor;
pub mod elf;
pub mod environment;
pub mod files;
pub mod greeting;
pub mod launch;
pub mod library;
pub mod link;
mod listing;
pub mod logging;
pub mod metrics;
pub mod modules;
pub mod nvidia_names;
pub mod panics;
pub mod parse;
mod process;
pub mod program;
pub mod prompt;
pub mod quarantine;
pub mod releases;
pub mod seqpacket;
pub mod server_file;
pub mod servers;
pub mod settings;
pub mod spawn;
pub mod takeover;
pub mod target;
pub mod top;
pub mod trace;
pub mod ui;
mod usage;
pub mod user_memory;
pub mod wire;
