//! The driver without contexts, for queries before, or without, starting an engine.

use crate::engine::base::client_addresses;
use crate::engine::base::driver::Driver;
use crate::engine::gpu::devices::{Device, Devices};
use crate::engine::gpu::host::HostArena;
use anyhow::Context;
use mpsshim_api::cuda::{CUDA_ERROR_DEVICE_UNAVAILABLE, CUresult};
use mpsshim_model::device::{ComputeMode, DeviceInfo};
use mpsshim_model::driver::DriverInfo;
use mpsshim_model::partitions::Chunks;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long [`OpenDriver::attach`] waits for a device that another process uses.
const RELEASE_PATIENCE: Duration = Duration::from_secs(5);
/// Interval at which it asks again meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// An opened driver and its devices, without any context.
pub struct OpenDriver {
    pub(in crate::engine) arena: HostArena,
    pub(in crate::engine) driver: Driver,
    pub(in crate::engine) devices: Devices,
}

impl OpenDriver {
    /// Opens `cuda_library`, or the driver that the loader finds.
    ///
    /// # Errors
    /// If there is no driver or no device, or the driver refuses.
    pub fn open(cuda_library: Option<&Path>) -> anyhow::Result<OpenDriver> {
        // Before the driver lays out its own address space.
        client_addresses::hold();
        let arena = HostArena::new().context("cannot reserve the host arena's addresses")?;
        let (driver, devices) = open(cuda_library)?;
        Ok(OpenDriver {
            arena,
            driver,
            devices,
        })
    }

    /// Creates the context of the first device, which an engine then reuses. Takes some hundred milliseconds on a GPU. Waits
    /// up to [`RELEASE_PATIENCE`] for a device in EXCLUSIVE_PROCESS mode: the driver may not have released it yet for a
    /// process that has just ended.
    ///
    /// # Errors
    /// Driver errors.
    pub fn attach(&self) -> anyhow::Result<()> {
        let first = self.devices.first();
        let first = first.context("the driver has no device")?;
        let until = Instant::now() + RELEASE_PATIENCE;
        loop {
            let status = match first.attach(&self.driver) {
                Ok(()) => return Ok(()),
                Err(status) => status,
            };
            let is_busy = status == CUDA_ERROR_DEVICE_UNAVAILABLE
                && first.compute_mode == ComputeMode::ExclusiveProcess;
            if !is_busy || Instant::now() >= until {
                return Err(status).context(why_unavailable(first, status));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The devices, by ordinal.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        described(&self.driver, &self.devices)
    }

    /// The devices' UUIDs.
    pub fn uuids(&self) -> Vec<[u8; 16]> {
        self.devices.iter().map(|device| device.uuid.0).collect()
    }
}

/// The device and the remedy, if its compute mode explains the status.
fn why_unavailable(device: &Device, status: CUresult) -> String {
    let Device {
        ordinal,
        name,
        compute_mode: mode,
        ..
    } = device;
    let subject = format!("device {ordinal} ({name})");
    match mode {
        _ if status != CUDA_ERROR_DEVICE_UNAVAILABLE => subject,
        ComputeMode::Default => subject,
        ComputeMode::Prohibited => format!(
            "{subject} is in {mode} mode, in which no process can use it; an administrator can change that with \
             nvidia-smi -c DEFAULT, or -c EXCLUSIVE_PROCESS"
        ),
        ComputeMode::ExclusiveProcess => format!(
            "{subject} is in {mode} mode, and another process uses it, which nvidia-smi shows; end that process, or have \
             an administrator set the mode with nvidia-smi -c DEFAULT"
        ),
    }
}

/// The devices as the daemon knows them, by ordinal.
fn described(driver: &Driver, devices: &Devices) -> Vec<DeviceInfo> {
    let describe = |device: &Device| DeviceInfo {
        name: device.name.clone(),
        uuid: device.uuid.to_string(),
        pci: device.pci.clone(),
        memory: device.memory,
        compute_mode: device.compute_mode,
        chunks: device
            .partition(driver)
            .map_or_else(|_| Chunks::default(), |partition| partition.chunks()),
    };
    devices.iter().map(describe).collect()
}

/// The devices that a server here would serve, by ordinal.
///
/// # Errors
/// If there is no driver or no device, or the driver refuses.
pub fn list_devices(cuda_library: Option<&Path>) -> anyhow::Result<Vec<DeviceInfo>> {
    let (driver, devices) = open(cuda_library)?;
    Ok(described(&driver, &devices))
}

/// The driver that a server here would use, and its devices.
///
/// # Errors
/// As of [`list_devices`].
pub fn describe_driver(cuda_library: Option<&Path>) -> anyhow::Result<DriverInfo> {
    let (driver, devices) = open(cuda_library)?;
    let mut version = 0;
    driver
        .driver_get_version(&mut version)
        .context("cuDriverGetVersion")?;
    Ok(DriverInfo {
        path: file_of(driver.path()),
        version,
        devices: described(&driver, &devices),
    })
}

/// The file of a library that the loader found by its name.
fn file_of(name: &str) -> String {
    if name.contains('/') {
        return name.to_owned();
    }
    // Without /proc the name remains.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let stem = name.split(".so").next().unwrap_or(name);
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    let is_it = |path: &&str| {
        let file = path.rsplit('/').next();
        file.is_some_and(|file| file.starts_with(&format!("{stem}.so")))
    };
    paths.into_iter().find(is_it).unwrap_or(name).to_owned()
}

fn open(cuda_library: Option<&Path>) -> anyhow::Result<(Driver, Devices)> {
    let driver = Driver::open(cuda_library)?;
    driver
        .init(0)
        .with_context(|| format!("cuInit of {}", driver.path()))?;
    let mut count = 0;
    driver
        .device_get_count(&mut count)
        .context("cuDeviceGetCount")?;
    anyhow::ensure!(count > 0, "the driver has no device");
    let devices = Devices::read(&driver, count as usize).context("devices")?;
    Ok((driver, devices))
}
