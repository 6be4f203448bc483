//! Descriptions of devices.

use serde::{Deserialize, Serialize};

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
