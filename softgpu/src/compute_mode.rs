//! The compute mode of all devices (`nvidia-smi -c`), from `SOFTGPU_COMPUTE_MODE`: `DEFAULT`, `PROHIBITED`, or
//! `EXCLUSIVE_PROCESS=FILE`. Processes that name the same file are on the same machine, and one of them at a time has
//! contexts on a device.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::api::R;

#[derive(Debug)]
enum ComputeMode {
    Default,
    Prohibited,
    /// The file, if it can be opened.
    ExclusiveProcess(Option<File>),
}

/// Opened once: a process loses its locks when it closes any descriptor of the file.
fn mode() -> &'static ComputeMode {
    static MODE: OnceLock<ComputeMode> = OnceLock::new();
    MODE.get_or_init(|| {
        let text = std::env::var("SOFTGPU_COMPUTE_MODE").unwrap_or_default();
        match text.split_once('=') {
            Some(("EXCLUSIVE_PROCESS", path)) => {
                let mut options = OpenOptions::new();
                let options = options.read(true).write(true).create(true).truncate(false);
                ComputeMode::ExclusiveProcess(options.open(path).ok())
            }
            None if text == "PROHIBITED" => ComputeMode::Prohibited,
            _ => ComputeMode::Default,
        }
    })
}

/// The value of `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`.
pub fn attribute() -> i32 {
    match mode() {
        ComputeMode::Default => 0,
        ComputeMode::Prohibited => 2,
        ComputeMode::ExclusiveProcess(_) => 3,
    }
}

/// Sets or removes this process's lock on the byte of a device. A forked child does not inherit it.
fn lock(file: &File, device: u32, kind: i32) -> bool {
    let mut range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: i64::from(device),
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the structure is a valid one.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &mut range) == 0 }
}

/// Number of contexts that this process has on a device.
#[derive(Default)]
pub struct Contexts(Mutex<usize>);

impl Contexts {
    /// Counts one more context.
    ///
    /// # Errors
    /// `CUDA_ERROR_DEVICE_UNAVAILABLE` if the mode does not permit it.
    pub fn enter(&self, device: u32) -> R<()> {
        let mut count = self.0.lock();
        let permitted = match mode() {
            ComputeMode::Default => true,
            ComputeMode::Prohibited => false,
            ComputeMode::ExclusiveProcess(file) => {
                let locks = |file| lock(file, device, libc::F_WRLCK);
                *count > 0 || file.as_ref().is_some_and(locks)
            }
        };
        if !permitted {
            return Err(CUDA_ERROR_DEVICE_UNAVAILABLE);
        }
        *count += 1;
        Ok(())
    }

    /// Counts one context less.
    pub fn leave(&self, device: u32) {
        let mut count = self.0.lock();
        *count -= 1;
        if let ComputeMode::ExclusiveProcess(Some(file)) = mode()
            && *count == 0
        {
            lock(file, device, libc::F_UNLCK);
        }
    }
}
