//! Description of a driver, for diagnosis.

use crate::device::DeviceInfo;
use serde::{Deserialize, Serialize};

/// A genuine driver and its devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverInfo {
    /// The file that was opened.
    pub path: String,
    /// Version of CUDA that it supports, `1000 * major + 10 * minor`.
    pub version: i32,
    /// The devices, by ordinal.
    pub devices: Vec<DeviceInfo>,
}
