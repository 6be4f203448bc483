//! Default limits of the servers that the daemon starts, from its settings.

use crate::settings::given::{
    ACTIVE_THREAD_PERCENTAGE, CLIENT_PRIORITY, Given, PINNED_DEVICE_MEM_LIMIT,
};
use mpsshim_model::limits::{Limits, MemoryBound};
use mpsshim_proto::environment::DEVICE_MEM_GUARANTEE;
use mpsshim_proto::limits::of_devices;

/// Limits for servers that are started from now on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Defaults {
    /// Limits of devices with known ordinals, and limits that do not depend on a device.
    pub limits: Limits,
    /// Limits and guarantees of memory, in bytes, of devices whose ordinals are not known yet.
    pub by_uuid: Vec<(MemoryBound, String, u64)>,
    /// The default scheduling was set, in the settings or by a command: that of servers that are taken over is ignored.
    pub scheduling_is_set: bool,
    /// Likewise the default oversubscription.
    pub oversubscription_is_set: bool,
}

impl Defaults {
    /// The defaults from the values that `get` returns, and warnings about invalid values in the environment.
    ///
    /// # Errors
    /// A value in the file is invalid.
    pub fn from_given(
        get: impl Fn(&'static str) -> Option<Given>,
    ) -> Result<(Defaults, Vec<String>), String> {
        let mut defaults = Defaults::default();
        let mut ignored = Vec::new();
        let mut wrong = Ok(());
        let mut read = |name, take: &mut dyn FnMut(&str) -> Result<(), String>| {
            let Some(given) = get(name) else {
                return;
            };
            let Err(why) = take(given.value.to_string_lossy().trim()) else {
                return;
            };
            if given.in_file {
                wrong = Err(format!("{}: {why}", given.told));
            } else {
                ignored.push(format!("{} is ignored: {why}", given.told));
            }
        };
        let limits = &mut defaults.limits;
        read(ACTIVE_THREAD_PERCENTAGE, &mut |value| {
            limits.threads = value.parse().map_err(|error| format!("{error}"))?;
            Ok(())
        });
        read(CLIENT_PRIORITY, &mut |value| {
            limits.priority = priority(value).ok_or("it must be 0 or 1")?;
            Ok(())
        });
        for bound in MemoryBound::ALL {
            read(setting_of(bound), &mut |value| {
                for (device, bytes) in memory_of_devices(value)? {
                    match device.parse() {
                        Ok(ordinal) => drop(limits.memory_of_mut(bound).insert(ordinal, bytes)),
                        Err(_) => defaults.by_uuid.push((bound, device, bytes)),
                    }
                }
                Ok(())
            });
        }
        wrong.map(|()| (defaults, ignored))
    }
}

/// The setting that has the default.
pub fn setting_of(bound: MemoryBound) -> &'static str {
    match bound {
        MemoryBound::Limit => PINNED_DEVICE_MEM_LIMIT,
        MemoryBound::Guarantee => DEVICE_MEM_GUARANTEE,
    }
}

/// A client priority: 0 normal, 1 below normal.
pub fn priority(text: &str) -> Option<u32> {
    text.parse().ok().filter(|priority| *priority <= 1)
}

/// Devices and bytes of such as `0=1G,GPU-eec5798d=512MB`.
fn memory_of_devices(text: &str) -> Result<Vec<(String, u64)>, String> {
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
        Defaults::from_given(|name| given(values, name, false)).expect("ignored")
    }

    fn given(values: &[(&str, &str)], name: &str, in_file: bool) -> Option<Given> {
        let (_, value) = values.iter().find(|(given, _)| *given == name)?;
        Some(Given {
            value: value.into(),
            told: format!("{name}={value}"),
            in_file,
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
            ("MPSSHIM_DEVICE_MEM_GUARANTEE", "0=256M,GPU-ab=1M"),
        ]);
        assert_eq!(warnings, [""; 0]);
        assert_eq!(defaults.limits.threads.to_string(), "33.3");
        assert_eq!(defaults.limits.priority, 1);
        let memory: Vec<(usize, u64)> = defaults.limits.memory.into_iter().collect();
        assert_eq!(memory, [(0, 1 << 30), (1, 512 << 20)]);
        let guarantee: Vec<(usize, u64)> = defaults.limits.guarantee.into_iter().collect();
        assert_eq!(guarantee, [(0, 256 << 20)]);
        let by_uuid = [
            (MemoryBound::Limit, "GPU-aa".to_owned(), 3 << 20),
            (MemoryBound::Guarantee, "GPU-ab".to_owned(), 1 << 20),
        ];
        assert_eq!(defaults.by_uuid, by_uuid);
    }

    #[test]
    fn what_is_malformed_is_named_and_ignored_unless_in_the_file() {
        for (name, value, why) in [
            (
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
                "120",
                "above 0 and at most 100",
            ),
            ("CUDA_MPS_CLIENT_PRIORITY", "2", "must be 0 or 1"),
            (
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
                "0=1G,1",
                "\"1\" is not DEVICE=AMOUNT",
            ),
            (
                "MPSSHIM_DEVICE_MEM_GUARANTEE",
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
            let in_file = Defaults::from_given(|wanted| given(&[(name, value)], wanted, true));
            let error = in_file.expect_err(value).to_string();
            assert!(error.contains(name) && error.contains(why), "{error}");
        }
    }
}
