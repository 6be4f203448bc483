//! What the daemon's environment says of the limits of every server that it starts.

use crate::limits::Limits;
use crate::settings;
use mpsshim_proto::limits::of_devices;
use std::ffi::OsString;

/// Limits for servers that are started from now on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Defaults {
    /// What is known.
    pub limits: Limits,
    /// Memory limits in bytes of devices whose ordinals are not known yet.
    pub by_uuid: Vec<(String, u64)>,
}

impl Defaults {
    /// Those that `lookup` names, and what could not be understood.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> (Defaults, Vec<String>) {
        let mut defaults = Defaults::default();
        let mut warnings = Vec::new();
        let mut read = |name: &str, take: &mut dyn FnMut(&str) -> Result<(), String>| {
            let value = lookup(name).filter(|value| !value.is_empty());
            let value = value.map(|value| value.to_string_lossy().into_owned());
            if let Some(value) = value
                && let Err(why) = take(value.trim())
            {
                warnings.push(format!("{name}={value} is ignored: {why}"));
            }
        };
        let limits = &mut defaults.limits;
        read(settings::ACTIVE_THREAD_PERCENTAGE, &mut |value| {
            limits.threads = value.parse().map_err(|error| format!("{error}"))?;
            Ok(())
        });
        read(settings::CLIENT_PRIORITY, &mut |value| {
            limits.priority = priority(value).ok_or("it must be 0 or 1")?;
            Ok(())
        });
        read(settings::PINNED_DEVICE_MEM_LIMIT, &mut |value| {
            for (device, bytes) in memory_limits(value)? {
                match device.parse() {
                    Ok(ordinal) => drop(limits.memory.insert(ordinal, bytes)),
                    Err(_) => defaults.by_uuid.push((device, bytes)),
                }
            }
            Ok(())
        });
        (defaults, warnings)
    }
}

/// A client priority: 0 normal, 1 below normal.
pub fn priority(text: &str) -> Option<u32> {
    text.parse().ok().filter(|priority| *priority <= 1)
}

/// Devices and bytes of such as `0=1G,GPU-eec5798d=512MB`.
fn memory_limits(text: &str) -> Result<Vec<(String, u64)>, String> {
    of_devices(text)
        .map(|limit| match limit {
            Ok((device, bytes)) => Ok((device.to_owned(), bytes)),
            Err(part) => Err(format!("\"{part}\" is not DEVICE=AMOUNT")),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(values: &[(&str, &str)]) -> (Defaults, Vec<String>) {
        Defaults::from_lookup(|name| {
            let found = values.iter().find(|(given, _)| *given == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_environment_sets_defaults() {
        assert_eq!(read(&[]), (Defaults::default(), Vec::new()));
        let (defaults, warnings) = read(&[
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "33.3"),
            ("CUDA_MPS_CLIENT_PRIORITY", "1"),
            (
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
                "0=1G, 1=512MB,GPU-aa=3M",
            ),
        ]);
        assert_eq!(warnings, [""; 0]);
        assert_eq!(defaults.limits.threads.to_string(), "33.3");
        assert_eq!(defaults.limits.priority, 1);
        let memory: Vec<(usize, u64)> = defaults.limits.memory.into_iter().collect();
        assert_eq!(memory, [(0, 1 << 30), (1, 512 << 20)]);
        assert_eq!(defaults.by_uuid, [("GPU-aa".to_owned(), 3 << 20)]);
    }

    #[test]
    fn what_is_malformed_is_named_and_ignored() {
        for (name, value, why) in [
            (
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
                "120",
                "over 0 and at most 100",
            ),
            ("CUDA_MPS_CLIENT_PRIORITY", "2", "must be 0 or 1"),
            (
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
                "0=1G,1",
                "\"1\" is not DEVICE=AMOUNT",
            ),
            (
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
                "0=lots",
                "\"0=lots\" is not DEVICE=AMOUNT",
            ),
        ] {
            let (defaults, warnings) = read(&[(name, value)]);
            assert_eq!(defaults, Defaults::default());
            assert_eq!(warnings.len(), 1);
            assert!(
                warnings[0].contains(name) && warnings[0].contains(why),
                "{warnings:?}"
            );
        }
    }
}
