//! NVIDIA's management library, reduced to queries of the device memory of processes.

use libloading::Library;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;

/// File name of the library.
const NAME: &str = "libnvidia-ml.so.1";
const SUCCESS: c_int = 0;
const INSUFFICIENT_SIZE: c_int = 7;
/// Value that NVML writes if it does not know the memory of a process.
const NOT_AVAILABLE: u64 = u64::MAX;
/// Maximum number of processes, above the number on any device.
const MOST: usize = 16 * 1024;

type Handle = *mut c_void;
type Init = unsafe extern "C" fn() -> c_int;
type ByUuid = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
type Processes = unsafe extern "C" fn(Handle, *mut c_uint, *mut Process) -> c_int;

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    /// Bytes.
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Why NVML is not available.
#[derive(Debug, thiserror::Error)]
pub enum NvmlError {
    /// It cannot be loaded, or lacks a function.
    #[error("{0}")]
    Load(#[from] libloading::Error),
    /// A function fails.
    #[error("{0} fails with status {1}")]
    Status(&'static str, c_int),
}

/// The library, opened and initialised, for as long as the process lives.
pub struct Nvml {
    by_uuid: ByUuid,
    processes: Processes,
}

/// A device that NVML knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device(Handle);

// SAFETY: NVML's functions may be called from any thread with any handle.
unsafe impl Send for Device {}

fn check(function: &'static str, status: c_int) -> Result<(), NvmlError> {
    match status {
        SUCCESS => Ok(()),
        status => Err(NvmlError::Status(function, status)),
    }
}

impl Nvml {
    /// Opens the library at `path`, or the one the loader finds. Takes some milliseconds.
    ///
    /// # Errors
    /// There is none, it is too old, or it finds no driver.
    pub fn open(path: Option<&Path>) -> Result<Nvml, NvmlError> {
        let name = path.unwrap_or(Path::new(NAME));
        // SAFETY: the driver's library; its initialisers are trusted as those of the driver itself.
        let library = unsafe { Library::new(name)? };
        // SAFETY: the exported functions of these names have these signatures (nvml.h).
        let (init, by_uuid, processes) = unsafe {
            (
                *library.get::<Init>(b"nvmlInit_v2\0")?,
                *library.get::<ByUuid>(b"nvmlDeviceGetHandleByUUID\0")?,
                *library.get::<Processes>(b"nvmlDeviceGetComputeRunningProcesses_v3\0")?,
            )
        };
        // The functions are used for as long as the process lives.
        std::mem::forget(library);
        // SAFETY: takes nothing.
        check("nvmlInit_v2", unsafe { init() })?;
        Ok(Nvml { by_uuid, processes })
    }

    /// The device with this UUID, `GPU-…` or `MIG-…`.
    ///
    /// # Errors
    /// NVML does not know the device.
    pub fn device(&self, uuid: &str) -> Result<Device, NvmlError> {
        const NAME: &str = "nvmlDeviceGetHandleByUUID";
        let text = CString::new(uuid).map_err(|_| NvmlError::Status(NAME, -1))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a NUL-ended text and a place for the handle.
        let status = unsafe { (self.by_uuid)(text.as_ptr(), &mut handle) };
        check(NAME, status)?;
        Ok(Device(handle))
    }

    /// Bytes that each process holds of a device, by process id as NVML sees it.
    ///
    /// # Errors
    /// NVML fails.
    pub fn held(&self, device: Device) -> Result<HashMap<u32, u64>, NvmlError> {
        const NAME: &str = "nvmlDeviceGetComputeRunningProcesses_v3";
        let mut processes = vec![Process::default(); 64];
        loop {
            let mut count = processes.len() as c_uint;
            // SAFETY: the array has `count` elements.
            let status = unsafe { (self.processes)(device.0, &mut count, processes.as_mut_ptr()) };
            if status == INSUFFICIENT_SIZE && processes.len() < MOST {
                // There may be more by the next call.
                let room = (count as usize).max(processes.len()) * 2;
                processes.resize(room.min(MOST), Process::default());
                continue;
            }
            check(NAME, status)?;
            processes.truncate(count as usize);
            break;
        }
        let known = processes
            .iter()
            .filter(|process| process.used != NOT_AVAILABLE);
        let mut held = HashMap::new();
        for process in known {
            let sum: &mut u64 = held.entry(process.pid).or_default();
            *sum = sum.saturating_add(process.used);
        }
        Ok(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_nvml_is_an_error() {
        let missing = Nvml::open(Some(Path::new("/nowhere/libnvidia-ml.so.1")));
        assert!(matches!(missing, Err(NvmlError::Load(_))));
        // It has none of the functions.
        let other = Nvml::open(Some(Path::new("libc.so.6")));
        assert!(matches!(other, Err(NvmlError::Load(_))));
        assert_eq!(size_of::<Process>(), 24);
    }
}
