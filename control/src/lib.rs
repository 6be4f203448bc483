//! The control daemon, what speaks to it, and what servers and the daemon have in common.
//!
//! [`daemon`] waits on its sockets in one thread and passes on what it hears: a client to [`servers`], a command to
//! [`commands`]. [`directory`] is its place in the file system, [`files`] opens what is there, [`greeting`] tells the first
//! packet of a connection, [`process`] is a server's process, started here or taken over, [`wire`] is how a command and its
//! answer travel, [`parse`] understands a command line, [`listing`] is what some commands list, [`usage`] asks servers for
//! what their clients have, [`devices`] knows the devices. [`launch`] starts a daemon, [`ui`] is the other side of a command,
//! [`target`] is the file of a trace, [`prompt`] reads commands from a terminal, [`top`] and [`metrics`] show what servers
//! say of their clients.
//!
//! [`quarantine`] is the list of programs that get servers of their own after a fault, [`program`] what a program is.
//!
//! [`link`] is what daemon and server say to each other, [`takeover`] what they say when a daemon has died.

pub mod cdi;
pub mod cli;
pub mod closers;
pub mod commands;
pub mod daemon;
pub mod defaults;
mod devices;
pub mod directory;
pub mod elf;
pub mod files;
pub mod greeting;
pub mod launch;
pub mod library;
pub mod link;
mod listing;
pub mod logging;
pub mod metrics;
pub mod panics;
pub mod parse;
mod process;
pub mod program;
pub mod prompt;
pub mod quarantine;
pub mod seqpacket;
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
