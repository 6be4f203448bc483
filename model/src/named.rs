//! Servers that an operator has created under a name.

use crate::device::DeviceInfo;
use crate::limits::Limits;
use mpsshim_proto::handshake::MAX_DEVICES;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Longest name, bytes.
pub const LONGEST_NAME: usize = 64;
/// Longest UUID of a device, bytes.
const LONGEST_UUID: usize = 64;
/// Maximum number of named servers of a daemon.
pub const MOST_SERVERS: usize = 64;

/// Whether a text can be the name of a server.
///
/// # Errors
/// Why not, in words.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    if name.is_empty() || name.len() > LONGEST_NAME || !name.bytes().all(is_letter) {
        return Err(format!(
            "\"{name}\" is no name: a name has 1 to {LONGEST_NAME} of the characters a-z, 0-9 and _"
        ));
    }
    Ok(())
}

/// A device of a named server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedDevice {
    /// Its ordinal at the daemon.
    pub ordinal: usize,
    /// Its UUID.
    pub uuid: String,
}

/// A named server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// Its name.
    pub name: String,
    /// Its devices, by the server's ordinal; `None`: all of the daemon's.
    pub devices: Option<Vec<NamedDevice>>,
}

impl Named {
    /// Whether the daemon can have made this. `devices`: the number of its devices, if known.
    pub fn is_plausible(&self, devices: Option<usize>) -> bool {
        let count = devices.unwrap_or(MAX_DEVICES);
        let fits = |device: &NamedDevice| {
            let text = &device.uuid;
            let is_text =
                text.len() <= LONGEST_UUID && text.bytes().all(|byte| byte.is_ascii_graphic());
            device.ordinal < count && is_text && !text.contains(',')
        };
        let all_fit = self.devices.as_ref().is_none_or(|devices| {
            let different: BTreeSet<usize> = devices.iter().map(|one| one.ordinal).collect();
            let is_set = different.len() == devices.len() && !devices.is_empty();
            is_set && devices.iter().all(fits)
        });
        check_name(&self.name).is_ok() && all_fit
    }

    /// The server's ordinal of a device of the daemon, if the server has it.
    pub fn own_ordinal(&self, ordinal: usize) -> Option<usize> {
        match &self.devices {
            None => Some(ordinal),
            Some(devices) => devices.iter().position(|device| device.ordinal == ordinal),
        }
    }

    /// The daemon's ordinal of a device of the server, if there is such a device.
    pub fn ordinal(&self, own: usize) -> Option<usize> {
        match &self.devices {
            None => Some(own),
            Some(devices) => devices.get(own).map(|device| device.ordinal),
        }
    }

    /// The value of `CUDA_VISIBLE_DEVICES` for the server; `None`: the daemon's own.
    pub fn visible_devices(&self) -> Option<String> {
        let devices = self.devices.as_ref()?;
        let uuids: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
        Some(uuids.join(","))
    }

    /// Limits of the daemon, which has its own ordinals, as the server numbers its devices.
    pub fn limits(&self, daemons: &Limits) -> Limits {
        let translate = |ordinal| self.own_ordinal(ordinal);
        Limits {
            named: Some(Box::new(self.clone())),
            ..renumbered(daemons, translate)
        }
    }

    /// Limits of the server as the daemon numbers the devices.
    pub fn limits_at_daemon(&self, limits: &Limits) -> Limits {
        Limits {
            named: None,
            ..renumbered(limits, |own| self.ordinal(own))
        }
    }

    /// Whether it has this device of the daemon.
    pub fn has(&self, device: &DeviceInfo) -> bool {
        let devices = self.devices.as_ref();
        devices.is_none_or(|devices| devices.iter().any(|one| one.uuid == device.uuid))
    }
}

/// Limits with other ordinals of the devices; those of devices without an ordinal are left out.
fn renumbered(limits: &Limits, ordinal: impl Fn(usize) -> Option<usize>) -> Limits {
    let devices = |bytes: &BTreeMap<usize, u64>| -> BTreeMap<usize, u64> {
        let entries = bytes.iter();
        let entries = entries.filter_map(|(device, bytes)| Some((ordinal(*device)?, *bytes)));
        entries.collect()
    };
    let users = |users: &BTreeMap<u32, BTreeMap<usize, u64>>| {
        let users = users.iter().map(|(uid, bytes)| (*uid, devices(bytes)));
        users.filter(|(_, bytes)| !bytes.is_empty()).collect()
    };
    Limits {
        memory: devices(&limits.memory),
        guarantee: devices(&limits.guarantee),
        user_memory: users(&limits.user_memory),
        user_guarantee: users(&limits.user_guarantee),
        ..limits.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(ordinals: &[usize]) -> Named {
        let device = |ordinal: &usize| NamedDevice {
            ordinal: *ordinal,
            uuid: format!("GPU-{ordinal}"),
        };
        Named {
            name: "a".into(),
            devices: Some(ordinals.iter().map(device).collect()),
        }
    }

    #[test]
    fn names_have_few_characters() {
        for name in ["a", "0", "_", "train_2", &"x".repeat(64)] {
            assert_eq!(check_name(name), Ok(()));
        }
        for name in ["", "A", "a-b", "a/b", "..", "é", "a.1", &"x".repeat(65)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn limits_follow_their_devices() {
        let daemons = Limits {
            memory: [(0, 10), (1, 11), (2, 12)].into(),
            user_memory: [(7, [(2, 5)].into()), (8, [(1, 6)].into())].into(),
            ..Limits::default()
        };
        let server = named(&[2, 0]);
        let limits = server.limits(&daemons);
        assert_eq!(limits.memory, [(0, 12), (1, 10)].into());
        assert_eq!(limits.user_memory, [(7, [(0, 5)].into())].into());
        assert_eq!(limits.named.as_deref(), Some(&server));
        let back = server.limits_at_daemon(&limits);
        assert_eq!(back.memory, [(2, 12), (0, 10)].into());
        assert_eq!(server.visible_devices().as_deref(), Some("GPU-2,GPU-0"));
        assert_eq!((server.own_ordinal(1), server.ordinal(2)), (None, None));
        let all = Named {
            devices: None,
            ..server
        };
        assert_eq!(all.limits(&daemons).memory, daemons.memory);
        assert_eq!(all.visible_devices(), None);
    }

    #[test]
    fn a_server_s_description_is_checked() {
        assert!(named(&[1, 0]).is_plausible(Some(2)));
        assert!(!named(&[1, 0]).is_plausible(Some(1)));
        assert!(!named(&[1, 1]).is_plausible(None));
        assert!(!named(&[]).is_plausible(None));
        let mut odd = named(&[0]);
        odd.devices = Some(vec![NamedDevice {
            ordinal: 0,
            uuid: "GPU-1,GPU-2".into(),
        }]);
        assert!(!odd.is_plausible(None));
        odd = Named {
            name: "../x".into(),
            ..named(&[0])
        };
        assert!(!odd.is_plausible(None));
    }
}
