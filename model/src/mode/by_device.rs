//! The modes of a server's devices, and the resulting mode of a client from the devices that it sees.

use super::{Mode, Modes};
use crate::device::{self, DeviceInfo};
use std::collections::BTreeSet;

/// How the machine's ordinals in a client's `CUDA_VISIBLE_DEVICES` map to the server's.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Numbering {
    /// The server sees all devices.
    Same,
    /// The server sees these ordinals.
    Listed(Vec<usize>),
    /// The server sees some devices by UUID.
    Unknown,
}

impl Numbering {
    fn new(visible: Option<&str>) -> Numbering {
        let Some(list) = visible else {
            return Numbering::Same;
        };
        // CUDA ignores a list from its first invalid entry on.
        let entries = list
            .split(',')
            .map(str::trim)
            .take_while(|entry| names_device(entry));
        let ordinals: Option<_> = entries.map(|entry| entry.parse().ok()).collect();
        ordinals.map_or(Numbering::Unknown, Numbering::Listed)
    }
}

/// Whether this is a valid entry of `CUDA_VISIBLE_DEVICES`; the first invalid entry ends the list.
fn names_device(entry: &str) -> bool {
    let by_uuid = ["GPU-", "MIG-"]
        .iter()
        .any(|begin| entry.starts_with(begin));
    by_uuid || entry.parse::<usize>().is_ok()
}

/// The modes of a server's devices.
#[derive(Clone, Debug)]
pub struct DeviceModes {
    usual: Mode,
    /// UUID and mode by ordinal.
    devices: Vec<(String, Mode)>,
    numbering: Numbering,
}

impl DeviceModes {
    /// Resolves the named devices and returns errors, in words: a missing device is ignored, and a device with two
    /// modes gets direct mode. `visible`: the `CUDA_VISIBLE_DEVICES` that the server was started with.
    pub fn new(
        modes: &Modes,
        devices: &[DeviceInfo],
        visible: Option<&str>,
    ) -> (DeviceModes, Vec<String>) {
        let mut wrong = Vec::new();
        let mut named = vec![None; devices.len()];
        for (device, mode) in &modes.devices {
            match device::find(devices, device) {
                Ok(ordinal) => match named[ordinal].replace(*mode) {
                    None => {}
                    Some(before) => {
                        wrong.push(format!("Device {device} has two modes"));
                        if before == Mode::Direct {
                            named[ordinal] = Some(before);
                        }
                    }
                },
                Err(why) => wrong.push(why),
            }
        }
        let named = named.into_iter().map(|mode| mode.unwrap_or(modes.usual));
        let uuids = devices.iter().map(|device| device.uuid.clone());
        let modes = DeviceModes {
            usual: modes.usual,
            devices: uuids.zip(named).collect(),
            numbering: Numbering::new(visible),
        };
        (modes, wrong)
    }

    /// The mode of the device on which the engine makes its first context.
    pub fn of_first(&self) -> Mode {
        self.devices.first().map_or(self.usual, |(_, mode)| *mode)
    }

    /// The mode of a client that requests none and has this `CUDA_VISIBLE_DEVICES`: direct if any device that it sees
    /// has direct mode, since in proxy mode it would share a context there.
    pub fn of_client(&self, visible: Option<&str>) -> Mode {
        let all = || (0..self.devices.len()).collect();
        let seen: BTreeSet<usize> = visible.and_then(|list| self.seen(list)).unwrap_or_else(all);
        let mut modes = seen.iter().map(|device| self.devices[*device].1);
        match seen.is_empty() {
            true => self.usual,
            false if modes.any(|mode| mode == Mode::Direct) => Mode::Direct,
            false => Mode::Proxy,
        }
    }

    /// The devices in a client's list; `None`: they cannot be determined.
    fn seen(&self, list: &str) -> Option<BTreeSet<usize>> {
        let mut seen = BTreeSet::new();
        for entry in list.split(',').map(str::trim) {
            if !names_device(entry) {
                break;
            }
            let Ok(ordinal) = entry.parse::<usize>() else {
                let before = seen.len();
                let of_that_name = self.devices.iter().enumerate();
                let of_that_name = of_that_name.filter(|(_, (uuid, _))| uuid.starts_with(entry));
                seen.extend(of_that_name.map(|(device, _)| device));
                // A MIG partition of some device.
                if entry.starts_with("MIG-") && seen.len() == before {
                    return None;
                }
                continue;
            };
            let device = match &self.numbering {
                Numbering::Same => Some(ordinal),
                Numbering::Listed(list) => list.iter().position(|listed| *listed == ordinal),
                Numbering::Unknown => return None,
            };
            seen.extend(device.filter(|device| *device < self.devices.len()));
        }
        Some(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(uuids: &[&str]) -> Vec<DeviceInfo> {
        let device = |uuid: &&str| DeviceInfo {
            name: "A device".into(),
            uuid: (*uuid).into(),
            pci: "0000:00:06.0".into(),
            memory: 1 << 30,
            compute_mode: Default::default(),
            chunks: Default::default(),
        };
        uuids.iter().map(device).collect()
    }

    fn two(modes: &str, visible: Option<&str>) -> DeviceModes {
        let modes = modes.parse().expect("modes");
        let (modes, wrong) = DeviceModes::new(&modes, &devices(&["GPU-aa00", "GPU-bb00"]), visible);
        assert_eq!(wrong, [""; 0]);
        modes
    }

    #[test]
    fn one_device_in_direct_mode_decides() {
        let modes = two("1=direct", None);
        for (visible, mode) in [
            (None, Mode::Direct),
            (Some("0"), Mode::Proxy),
            (Some("1"), Mode::Direct),
            (Some("0, 1"), Mode::Direct),
            (Some("GPU-aa"), Mode::Proxy),
            (Some("GPU-bb00"), Mode::Direct),
            (Some("GPU-"), Mode::Direct),
            // As CUDA reads it.
            (Some("0,-1,1"), Mode::Proxy),
            (Some("0,x,1"), Mode::Proxy),
            (Some("0,7,GPU-cc,1"), Mode::Direct),
            // It may belong to either device.
            (Some("MIG-123"), Mode::Direct),
            // None of the server's devices.
            (Some(""), Mode::Proxy),
            (Some("7"), Mode::Proxy),
            (Some("99999999999999999999999"), Mode::Proxy),
        ] {
            assert_eq!(modes.of_client(visible), mode, "{visible:?}");
        }
        assert_eq!(modes.of_first(), Mode::Proxy);
        let modes = two("direct,GPU-bb=proxy", None);
        assert_eq!(modes.of_first(), Mode::Direct);
        for (visible, mode) in [
            (None, Mode::Direct),
            (Some("1"), Mode::Proxy),
            (Some(""), Mode::Direct),
        ] {
            assert_eq!(modes.of_client(visible), mode, "{visible:?}");
        }
    }

    #[test]
    fn ordinals_are_the_machine_s() {
        let modes = two("1=direct", Some("3,2"));
        for (visible, mode) in [
            ("3", Mode::Proxy),
            ("2", Mode::Direct),
            ("0,1", Mode::Proxy),
            ("GPU-aa", Mode::Proxy),
        ] {
            assert_eq!(modes.of_client(Some(visible)), mode, "{visible}");
        }
        // The ordinals of devices given by UUID are unknown.
        let modes = two("1=direct", Some("GPU-aa,GPU-bb"));
        assert_eq!(modes.of_client(Some("0")), Mode::Direct);
        assert_eq!(modes.of_client(Some("GPU-aa")), Mode::Proxy);
    }

    #[test]
    fn what_is_named_and_not_there_is_told() {
        let modes = "7=direct,GPU-=direct,0=direct,GPU-aa=proxy"
            .parse()
            .expect("modes");
        let (modes, wrong) = DeviceModes::new(&modes, &devices(&["GPU-aa", "GPU-bb"]), None);
        assert_eq!(wrong.len(), 3, "{wrong:?}");
        assert!(wrong[0].contains("Device 7 not found"), "{wrong:?}");
        assert!(wrong[1].contains("ambiguous"), "{wrong:?}");
        assert_eq!(wrong[2], "Device GPU-aa has two modes");
        assert_eq!(modes.of_client(Some("0")), Mode::Direct);
        assert_eq!(modes.of_client(Some("1")), Mode::Proxy);
    }
}
