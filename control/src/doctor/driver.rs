//! The genuine driver and its devices, as a server sees them.

use super::{Finding, content, finish};
use crate::settings::Settings;
use crate::spawn::Launcher;
use mpsshim_model::device::{ComputeMode, DeviceInfo};
use mpsshim_model::driver::DriverInfo;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::time::Duration;

const CHECK: &str = "driver";
/// As long as the daemon waits for the devices.
const PATIENCE: Duration = Duration::from_secs(30);
/// Oldest version of CUDA that a driver must support.
const OLDEST: i32 = 12040;

/// The driver, and a line for each device. `server_runs`: the server's executable works.
pub fn check(settings: &Settings, server_runs: bool) -> Vec<Finding> {
    if !server_runs {
        return vec![Finding::warning(
            CHECK,
            "The driver was not checked, since that needs the server.",
            "Correct the error of the server, then check again.",
        )];
    }
    let driver = match describe(settings) {
        Ok(driver) => driver,
        Err(why) => return vec![failure(&why)],
    };
    let (major, minor) = (driver.version / 1000, driver.version % 1000 / 10);
    let found = format!(
        "{} supports CUDA {major}.{minor} and has {}.",
        driver.path,
        counted(driver.devices.len())
    );
    let first = if driver.version < OLDEST {
        Finding::error(
            CHECK,
            found,
            "Install a driver that supports CUDA 12.4 or later.",
        )
    } else {
        Finding::ok(CHECK, found)
    };
    let devices = driver.devices.iter().enumerate();
    let devices = devices.map(|(ordinal, device)| compute_mode(ordinal, device));
    std::iter::once(first).chain(devices).collect()
}

fn counted(devices: usize) -> String {
    match devices {
        1 => "1 device".into(),
        count => format!("{count} devices"),
    }
}

fn describe(settings: &Settings) -> Result<DriverInfo, String> {
    let log = memfd_create(c"doctor", MFdFlags::MFD_CLOEXEC).map_err(|error| error.to_string())?;
    let log = File::from(log);
    let said = log.try_clone().map_err(|error| error.to_string())?;
    let launcher = Launcher::new(settings.clone(), log);
    let child = launcher.describe_driver();
    let child = child.map_err(|error| error.to_string())?;
    let (status, text) = finish(child, PATIENCE)?;
    // The driver may print other lines first.
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(|_| {
        let said = content(said);
        let why = said.lines().last().unwrap_or_default();
        match why.strip_prefix("mps-server: ").unwrap_or(why) {
            "" => format!("mps-server --describe-driver ended with {status}"),
            why => why.to_owned(),
        }
    })
}

fn failure(why: &str) -> Finding {
    let hidden = std::env::var("CUDA_VISIBLE_DEVICES");
    match hidden {
        _ if !(why.contains("no device") || why.contains("NO_DEVICE")) => Finding::error(
            CHECK,
            format!("No CUDA driver can be used: {why}."),
            "Install NVIDIA's driver, or set MPSSHIM_CUDA_LIBRARY to its libcuda.so.1; in a container use --gpus all.",
        ),
        Ok(visible) => Finding::error(
            CHECK,
            format!("The driver has no device: {why}, with CUDA_VISIBLE_DEVICES={visible}."),
            "Correct or unset CUDA_VISIBLE_DEVICES, and see whether nvidia-smi lists devices.",
        ),
        Err(_) => Finding::error(
            CHECK,
            format!("The driver has no device: {why}."),
            "See whether nvidia-smi lists devices; in a container use --gpus all.",
        ),
    }
}

fn compute_mode(ordinal: usize, device: &DeviceInfo) -> Finding {
    let (check, uuid) = ("device", &device.uuid);
    let named = format!("Device {ordinal} is {} ({uuid})", device.name);
    match device.compute_mode {
        ComputeMode::Prohibited => Finding::error(
            check,
            format!("{named}, and its compute mode prohibits contexts."),
            format!("Change it: nvidia-smi -i {uuid} -c DEFAULT."),
        ),
        ComputeMode::ExclusiveProcess => Finding::ok(
            check,
            format!(
                "{named}, for one process at a time (compute mode exclusive process): the server in proxy mode, or one \
                 program in direct mode."
            ),
        ),
        ComputeMode::Default => Finding::ok(check, format!("{named}.")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn compute_modes_are_told() {
        let find = |compute_mode| {
            let device = DeviceInfo {
                name: "A device".into(),
                uuid: "GPU-aa".into(),
                pci: "0000:00:06.0".into(),
                memory: 1,
                compute_mode,
                chunks: Default::default(),
            };
            super::compute_mode(0, &device)
        };
        let usual = find(ComputeMode::Default);
        assert_eq!(usual.text, "Device 0 is A device (GPU-aa).");
        assert_eq!(find(ComputeMode::Prohibited).state, State::Error);
        let exclusive = find(ComputeMode::ExclusiveProcess);
        assert!(exclusive.text.contains("exclusive process"));
    }

    #[test]
    fn a_missing_driver_and_a_missing_device_are_told_apart() {
        let missing = failure("cannot open libcuda.so.1: no such file");
        assert!(missing.text.starts_with("No CUDA driver"), "{missing:?}");
        for why in [
            "the driver has no device",
            "cuInit: CUDA_ERROR_NO_DEVICE (100)",
        ] {
            let none = failure(why);
            assert!(
                none.text.starts_with("The driver has no device"),
                "{none:?}"
            );
        }
    }
}
