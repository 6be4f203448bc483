//! Servers that an operator has created under a name.

use crate::device::DeviceInfo;
use crate::limits::{Limits, Percentage};
use mpsshim_proto::handshake::MAX_DEVICES;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Longest name, bytes.
pub const LONGEST_NAME: usize = 64;
/// Longest UUID of a device, bytes.
const LONGEST_UUID: usize = 64;
/// Maximum number of named servers of a daemon.
pub const MOST_SERVERS: usize = 64;
/// Maximum number of namespaces of a named server.
pub const MOST_NAMESPACES: usize = 64;
/// The namespace of the clients that come by the server's own socket. It has the server's limits and is not in
/// [`Named::namespaces`].
pub const DEFAULT_NAMESPACE: &str = "default";

/// Whether a text can be the name of a server or a namespace.
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

/// Limits of the clients of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceLimits {
    /// Active-thread percentage; `None`: the server's.
    pub threads: Option<Percentage>,
    /// Client priority, 0 normal, 1 below normal; `None`: the server's.
    pub priority: Option<u32>,
    /// Maximum bytes of device memory of a client, by the server's ordinal; on other devices the server's limit applies.
    pub memory: BTreeMap<usize, u64>,
}

impl NamespaceLimits {
    /// Whether the daemon can have made this, for a server with that many devices.
    fn is_plausible(&self, devices: usize) -> bool {
        let threads = self.threads.map(Percentage::hundredths);
        let threads = threads.is_none_or(|one| Percentage::from_hundredths(one).is_some());
        let priority = self.priority.is_none_or(|priority| priority <= 1);
        threads && priority && self.memory.keys().all(|device| *device < devices)
    }
}

/// The server has no namespace of this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its namespace {0} has been deleted")]
pub struct UnknownNamespace(pub String);

/// A named server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// Its name.
    pub name: String,
    /// Its devices, by the server's ordinal; `None`: all of the daemon's.
    pub devices: Option<Vec<NamedDevice>>,
    /// Its namespaces, by name.
    #[serde(default)]
    pub namespaces: BTreeMap<String, NamespaceLimits>,
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
        let is_space = |(name, limits): (&String, &NamespaceLimits)| {
            let is_name = check_name(name).is_ok() && name != DEFAULT_NAMESPACE;
            is_name && limits.is_plausible(count)
        };
        let namespaces = &self.namespaces;
        let spaces_fit = namespaces.len() <= MOST_NAMESPACES && namespaces.iter().all(is_space);
        check_name(&self.name).is_ok() && all_fit && spaces_fit
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
            namespaces: BTreeMap::new(),
        }
    }

    fn space(memory: &[(usize, u64)]) -> NamespaceLimits {
        NamespaceLimits {
            memory: memory.iter().copied().collect(),
            ..NamespaceLimits::default()
        }
    }

    #[test]
    fn a_namespace_lowers_the_server_s_limits_only() {
        let mut server = named(&[0, 1, 2]);
        let half = Percentage::from_hundredths(5000);
        let strict = NamespaceLimits {
            threads: half,
            priority: Some(1),
            ..space(&[(0, 5), (1, 50)])
        };
        server.namespaces = [("strict".into(), strict), ("same".into(), space(&[]))].into();
        let mut limits = server.limits(&Limits {
            memory: [(1, 10), (2, 20)].into(),
            ..Limits::default()
        });
        let of = |limits: &Limits, name| {
            let limits = limits.in_namespace(name).expect("a namespace").into_owned();
            (limits.threads.hundredths(), limits.priority, limits.memory)
        };
        let own = (10_000, 0, limits.memory.clone());
        assert_eq!(
            (of(&limits, None), of(&limits, Some("same"))),
            (own.clone(), own)
        );
        let lowered = [(0, 5), (1, 10), (2, 20)].into();
        assert_eq!(of(&limits, Some("strict")), (5000, 1, lowered));
        limits.threads = Percentage::from_hundredths(2000).expect("a percentage");
        assert_eq!(of(&limits, Some("strict")).0, 2000);
        let gone = limits.in_namespace(Some("gone")).expect_err("no namespace");
        assert_eq!(gone.to_string(), "its namespace gone has been deleted");
        assert!(Limits::default().in_namespace(Some("same")).is_err());
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
        let with = |name: &str, limits: NamespaceLimits| {
            let mut server = named(&[0, 1]);
            server.namespaces.insert(name.into(), limits);
            server.is_plausible(Some(2))
        };
        assert!(with("a", space(&[(1, 5)])));
        assert!(!with("a", space(&[(2, 5)])));
        assert!(!with("../a", space(&[])) && !with(DEFAULT_NAMESPACE, space(&[])));
        let priority = NamespaceLimits {
            priority: Some(2),
            ..space(&[])
        };
        assert!(!with("a", priority));
        let mut many = named(&[0]);
        let names = (0..=MOST_NAMESPACES).map(|number| (format!("n{number}"), space(&[])));
        many.namespaces = names.collect();
        assert!(!many.is_plausible(None));
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
