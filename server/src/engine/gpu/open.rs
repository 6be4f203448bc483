//! The driver without contexts, for queries before, or without, starting an engine.

use crate::engine::base::driver::Driver;
use crate::engine::gpu::devices::{Device, Devices};
use crate::engine::gpu::host::HostArena;
use anyhow::Context;
use mpsshim_model::device::DeviceInfo;
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
