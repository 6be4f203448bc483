//! A value of a setting, and the settings that are limits of clients.

use std::ffi::OsString;

pub use mpsshim_proto::handshake::{
    ACTIVE_THREAD_PERCENTAGE, CLIENT_PRIORITY, PINNED_DEVICE_MEM_LIMIT, SM_PARTITION,
};

/// A value that was given for a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// The value.
    pub value: OsString,
    /// Setting and value as the user finds them: `NAME=VALUE`, or `FILE:LINE: KEY = VALUE`.
    pub told: String,
    /// Not in the environment.
    pub in_file: bool,
}
