//! Functions and variables of a session's images.

use crate::engine::base::ordinal::Ordinal;
use crate::engine::images::instances::Key;
use crate::engine::objects::pace::Length;
use mpsshim_api::cuda::CUfunction;
use std::cell::Cell;

/// A function of a session: in a module, or of a library's kernel on a device.
#[derive(Debug)]
pub struct Function {
    /// The driver's function, loaded in the device's context.
    pub raw: CUfunction,
    /// The driver's function is the one to use: with the attributes that the session has set, and no others.
    pub taken: bool,
    /// Its name and device.
    pub key: Key,
    /// Bytes its parameters take when packed.
    pub param_bytes: u32,
    /// Handle of the module or library it is in, and dies with.
    pub image: u64,
    /// Server's ordinal.
    pub device: Ordinal,
    /// Launching it may print (see [`crate::engine::images::instances::Image::prints`]).
    pub prints: bool,
    /// Launching it may write variables of its image, which another server has to be told.
    pub keeps: bool,
    /// It was, since variables were saved last.
    pub launched: Cell<bool>,
    /// It may be launched in a run with others.
    pub in_runs: bool,
    /// How long it takes.
    pub length: Length,
    /// Bytes of local memory that each of its threads takes.
    pub local: u32,
    /// The trace that last had its name, and its number there.
    pub traced: (u32, u32),
}

/// A variable in a module of a session.
#[derive(Debug)]
pub struct Global {
    /// Bytes.
    pub len: u64,
    /// Handle of the module or library it is in, and dies with.
    pub image: u64,
    /// Server's ordinal.
    pub device: Ordinal,
    /// It was named by its address since variables were saved last.
    pub used: Cell<bool>,
}
