//! The control daemon and what speaks to it.
//!
//! [`daemon`] waits on its sockets in one thread and passes on what it hears: a client to [`servers`], a
//! command to [`commands`]. [`directory`] is its place in the file system, [`files`] opens
//! what is there, [`greeting`] tells the first packet
//! of a connection, [`process`] is a server's process, started here or taken over, [`wire`] is how a command and its
//! answer travel, [`parse`] understands a command line, [`listing`] is what some commands list, [`usage`] asks servers
//! for what their clients have, [`devices`] knows the devices. [`launch`] starts a daemon, [`ui`] is the other side of
//! a command, [`target`] is the file of a trace, [`prompt`] reads commands from a terminal.

pub mod commands;
pub mod daemon;
pub mod defaults;
mod devices;
pub mod directory;
pub mod files;
pub mod greeting;
pub mod launch;
mod listing;
pub mod parse;
mod process;
pub mod prompt;
pub mod servers;
pub mod spawn;
pub mod target;
pub mod ui;
mod usage;
pub mod wire;

pub use devices::find as find_device;
