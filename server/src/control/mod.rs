//! The control daemon and what speaks to it.
//!
//! [`daemon`] waits on its sockets in one thread and passes on what it hears: a client to [`servers`], a
//! command to [`commands`]. [`directory`] is its place in the file system, [`greeting`] tells the first packet
//! of a connection, [`wire`] is how a command and its answer travel, [`listing`] what some of them list. [`launch`]
//! starts a daemon, [`ui`] is the other side of a command.

pub mod commands;
pub mod daemon;
pub mod directory;
pub mod greeting;
pub mod launch;
mod listing;
pub mod servers;
pub mod spawn;
pub mod ui;
pub mod wire;
