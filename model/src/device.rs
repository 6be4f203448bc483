//! Descriptions of devices.

use crate::partitions::Chunks;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Which processes may have contexts on a device (`CUcomputemode`, `nvidia-smi -c`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputeMode {
    /// Any number of processes.
    #[default]
    Default,
    /// None.
    Prohibited,
    /// One at a time.
    ExclusiveProcess,
}

impl ComputeMode {
    /// From the value of `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`. Unknown values count as the default mode, in which the driver
    /// decides.
    pub fn from_attribute(value: i32) -> ComputeMode {
        match value {
            2 => ComputeMode::Prohibited,
            3 => ComputeMode::ExclusiveProcess,
            _ => ComputeMode::Default,
        }
    }
}

impl fmt::Display for ComputeMode {
    /// As `nvidia-smi -c` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ComputeMode::Default => "DEFAULT",
            ComputeMode::Prohibited => "PROHIBITED",
            ComputeMode::ExclusiveProcess => "EXCLUSIVE_PROCESS",
        })
    }
}

/// Description of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Such as `NVIDIA H200`.
    pub name: String,
    /// `GPU-…`.
    pub uuid: String,
    /// Domain, bus and device, such as `0000:00:06.0`.
    pub pci: String,
    /// Bytes of its memory.
    #[serde(default)]
    pub memory: u64,
    /// Its compute mode when the process that describes it opened the driver.
    #[serde(default)]
    pub compute_mode: ComputeMode,
    /// The chunks of its multiprocessors.
    #[serde(default)]
    pub chunks: Chunks,
}

impl DeviceInfo {
    /// Whether no second process can have a context on it while one has.
    pub fn is_exclusive(&self) -> bool {
        self.compute_mode != ComputeMode::Default
    }
}

/// The ordinal of a device named by its ordinal, its UUID, or a prefix of the UUID that only this device has.
///
/// # Errors
/// The device is unknown or the name ambiguous, in words.
pub fn find(devices: &[DeviceInfo], wanted: &str) -> Result<usize, String> {
    let unknown = || format!("Device {wanted} not found; device_query lists the devices");
    if !wanted.is_empty() && wanted.bytes().all(|byte| byte.is_ascii_digit()) {
        let ordinal = wanted.parse().ok();
        return ordinal
            .filter(|ordinal| *ordinal < devices.len())
            .ok_or_else(unknown);
    }
    let begins = |uuid: &str| {
        let start = uuid.get(..wanted.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(wanted))
    };
    let mut found = devices
        .iter()
        .enumerate()
        .filter(|(_, device)| !wanted.is_empty() && begins(&device.uuid))
        .map(|(ordinal, _)| ordinal);
    match (found.next(), found.next()) {
        (Some(ordinal), None) => Ok(ordinal),
        (Some(_), Some(_)) => Err(format!(
            "Device {wanted} is ambiguous: several UUIDs begin so"
        )),
        (None, _) => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(uuid: &str) -> DeviceInfo {
        DeviceInfo {
            name: "A device".into(),
            uuid: uuid.into(),
            pci: "0000:00:06.0".into(),
            memory: 1 << 30,
            compute_mode: Default::default(),
            chunks: Default::default(),
        }
    }

    #[test]
    fn a_device_is_named_by_ordinal_uuid_or_prefix() {
        let devices = [device("GPU-aa00"), device("GPU-ab00"), device("MIG-cc00")];
        for (wanted, ordinal) in [
            ("0", 0),
            ("2", 2),
            ("GPU-ab00", 1),
            ("GPU-aa", 0),
            ("gpu-AB", 1),
            ("MIG", 2),
        ] {
            assert_eq!(find(&devices, wanted), Ok(ordinal), "{wanted}");
        }
        for wanted in [
            "3",
            "-1",
            "99999999999999999999",
            "GPU-ac",
            "GPU-aa000",
            "",
            "é",
        ] {
            let why = find(&devices, wanted).expect_err(wanted);
            assert!(why.contains("not found"), "{why}");
        }
        for wanted in ["G", "GPU-a"] {
            assert!(
                find(&devices, wanted)
                    .expect_err(wanted)
                    .contains("ambiguous")
            );
        }
    }
}
