//! A stand-in for NVIDIA's management library that reports processes, for tests on machines without a GPU.
//!
//! Environment: SOFTNVML_PROCESSES, a file with a line `UUID PID BYTES` for each process and device, or with `*` for every
//! existing process, read at each query; SOFTNVML_ASKED, a file to which each query appends a line.

#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs;
use std::io::Write;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 2;
const INSUFFICIENT_SIZE: c_int = 7;

/// `nvmlProcessInfo_t`.
#[repr(C)]
pub struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Every process of this machine.
fn processes() -> Vec<c_uint> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pid = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    entries.filter_map(pid).collect()
}

fn read() -> Vec<(String, c_uint, u64)> {
    let path = std::env::var_os("SOFTNVML_PROCESSES").unwrap_or_default();
    let text = fs::read_to_string(path).unwrap_or_default();
    let process = |line: &str| {
        let mut words = line.split_whitespace();
        let (uuid, pid) = (words.next()?.to_owned(), words.next()?);
        let pids = match pid {
            "*" => processes(),
            pid => vec![pid.parse().ok()?],
        };
        let bytes: u64 = words.next()?.parse().ok()?;
        Some(pids.into_iter().map(move |pid| (uuid.clone(), pid, bytes)))
    };
    text.lines().filter_map(process).flatten().collect()
}

/// `nvmlInit_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    SUCCESS
}

/// `nvmlDeviceGetHandleByUUID`: any device, which it never forgets.
///
/// # Safety
/// `uuid` ends with a NUL; `device` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(
    uuid: *const c_char,
    device: *mut *mut c_void,
) -> c_int {
    if uuid.is_null() || device.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: as the caller promises.
    let uuid = unsafe { CStr::from_ptr(uuid) }
        .to_string_lossy()
        .into_owned();
    // SAFETY: as the caller promises.
    unsafe { device.write(Box::into_raw(Box::new(uuid)).cast()) };
    SUCCESS
}

/// `nvmlDeviceGetComputeRunningProcesses_v3`.
///
/// # Safety
/// `device` comes from [`nvmlDeviceGetHandleByUUID`]; `processes` has room for `*count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: *mut c_void,
    count: *mut c_uint,
    processes: *mut Process,
) -> c_int {
    if device.is_null() || count.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: a handle that was made above and is never freed.
    let uuid = unsafe { &*device.cast::<String>() };
    if let Some(path) = std::env::var_os("SOFTNVML_ASKED") {
        let file = fs::OpenOptions::new().create(true).append(true).open(path);
        // A test that reads it sees that it is missing.
        let _ = file.and_then(|mut file| writeln!(file, "{uuid}"));
    }
    let found: Vec<_> = read().into_iter().filter(|(of, ..)| of == uuid).collect();
    // SAFETY: as the caller promises.
    let room = unsafe { count.replace(found.len() as c_uint) } as usize;
    if room < found.len() {
        return INSUFFICIENT_SIZE;
    }
    for (at, (_, pid, used)) in found.into_iter().enumerate() {
        let process = Process {
            pid,
            used,
            gpu_instance: c_uint::MAX,
            compute_instance: c_uint::MAX,
        };
        // SAFETY: there is room for so many.
        unsafe { processes.add(at).write(process) };
    }
    SUCCESS
}
