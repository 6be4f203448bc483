//! A value of a setting, and the settings that are limits of clients.

use std::ffi::OsString;

/// Default active-thread percentage; a client's own.
pub const ACTIVE_THREAD_PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
/// Default limits of device memory; a client's own.
pub const PINNED_DEVICE_MEM_LIMIT: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// Default client priority; a client's own.
pub const CLIENT_PRIORITY: &str = "CUDA_MPS_CLIENT_PRIORITY";

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
