//! The driver without contexts, for queries before, or without, starting an engine.

use crate::engine::base::driver::Driver;
use crate::engine::gpu::devices::{Device, Devices};
use crate::engine::gpu::host::HostArena;
use anyhow::Context;
use mpsshim_api::cuda::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE;
use mpsshim_model::device::DeviceInfo;
use mpsshim_model::driver::DriverInfo;
use std::path::Path;

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
        let arena = HostArena::new().context("cannot reserve the host arena's addresses")?;
        let (driver, devices) = open(cuda_library)?;
        Ok(OpenDriver {
            arena,
            driver,
            devices,
        })
    }

    /// Creates the context of the first device, which an engine then reuses. Takes some hundred milliseconds on a GPU.
    ///
    /// # Errors
    /// Driver errors.
    pub fn attach(&self) -> anyhow::Result<()> {
        let first = self.devices.first();
        let first = first.context("the driver has no device")?;
        Ok(first.attach(&self.driver)?)
    }

    /// The devices, by ordinal.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.devices.iter().map(DeviceInfo::from).collect()
    }

    /// The devices' UUIDs.
    pub fn uuids(&self) -> Vec<[u8; 16]> {
        self.devices.iter().map(|device| device.uuid.0).collect()
    }
}

impl From<&Device> for DeviceInfo {
    fn from(device: &Device) -> DeviceInfo {
        DeviceInfo {
            name: device.name.clone(),
            uuid: device.uuid.to_string(),
            pci: device.pci.clone(),
            memory: device.memory,
        }
    }
}

/// The devices that a server here would serve, by ordinal.
///
/// # Errors
/// If there is no driver or no device, or the driver refuses.
pub fn list_devices(cuda_library: Option<&Path>) -> anyhow::Result<Vec<DeviceInfo>> {
    let (_, devices) = open(cuda_library)?;
    Ok(devices.iter().map(DeviceInfo::from).collect())
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
    let compute_mode = |device: &Device| {
        let mut mode = 0;
        driver.device_get_attribute(&mut mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device.raw)?;
        Ok(mode)
    };
    Ok(DriverInfo {
        path: file_of(driver.path()),
        version,
        devices: devices.iter().map(DeviceInfo::from).collect(),
        compute_modes: devices
            .iter()
            .map(compute_mode)
            .collect::<anyhow::Result<_>>()?,
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
