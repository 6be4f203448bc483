//! The control daemon and its clients.
//!
//! [`daemon`] waits on its sockets in one thread and passes on what arrives: clients to [`servers`], commands to
//! [`commands`]. [`directory`] has the daemon's files in the pipe directory, [`files`] opens them safely, [`greeting`]
//! parses the first packet of a connection, [`process`] is a server's process, started here or taken over, [`wire`] is the
//! format of commands and answers, [`parse`] parses command lines, [`listing`] formats lists, [`usage`] queries servers for
//! the resources of their clients, [`devices`] knows the devices. [`launch`] starts a daemon, [`ui`] sends it commands,
//! [`target`] is the file of a trace, [`prompt`] reads commands from a terminal.

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
