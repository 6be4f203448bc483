//! A stand-in for NVIDIA's management library that reports processes, for tests on machines without a GPU.
//!
//! Environment: SOFTNVML_PROCESSES, a file with a line `UUID PID BYTES [PERCENT]` for each process and device, or with `*`
//! for every existing process, read at each query; SOFTNVML_ASKED, a file to which each query appends a line.

#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs;
use std::io::Write;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 2;
const NOT_FOUND: c_int = 6;
const INSUFFICIENT_SIZE: c_int = 7;
/// `NVML_PROCESS_MODE_COMPUTE`
const COMPUTE: c_uint = 0;

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
pub struct ProcessV1 {
    pid: c_uint,
    used: u64,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
pub struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlProcessDetail_v1_t`.
#[repr(C)]
pub struct Detail {
    process: Process,
    protected: u64,
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
pub struct DetailList {
    version: c_uint,
    mode: c_uint,
    count: c_uint,
    entries: *mut Detail,
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
pub struct Sample {
    pid: c_uint,
    time: u64,
    multiprocessors: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

/// A process, the device that it uses, how much memory of it, and which percentage of its time.
struct Found {
    uuid: String,
    pid: c_uint,
    used: u64,
    percent: Option<c_uint>,
}

impl From<&Found> for ProcessV1 {
    fn from(found: &Found) -> ProcessV1 {
        ProcessV1 {
            pid: found.pid,
            used: found.used,
        }
    }
}

impl From<&Found> for Process {
    fn from(found: &Found) -> Process {
        Process {
            pid: found.pid,
            used: found.used,
            gpu_instance: c_uint::MAX,
            compute_instance: c_uint::MAX,
        }
    }
}

impl From<&Found> for Detail {
    fn from(found: &Found) -> Detail {
        Detail {
            process: found.into(),
            protected: 1,
        }
    }
}

impl From<&Found> for Sample {
    fn from(found: &Found) -> Sample {
        Sample {
            pid: found.pid,
            time: 1,
            multiprocessors: found.percent.unwrap_or(0),
            memory: 1,
            encoder: 0,
            decoder: 0,
        }
    }
}

/// Every process of this machine.
fn processes() -> Vec<c_uint> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pid = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    entries.filter_map(pid).collect()
}

fn read() -> Vec<Found> {
    let path = std::env::var_os("SOFTNVML_PROCESSES").unwrap_or_default();
    let text = fs::read_to_string(path).unwrap_or_default();
    let process = |line: &str| {
        let mut words = line.split_whitespace();
        let (uuid, pid) = (words.next()?.to_owned(), words.next()?);
        let pids = match pid {
            "*" => processes(),
            pid => vec![pid.parse().ok()?],
        };
        let used: u64 = words.next()?.parse().ok()?;
        let percent = words.next().and_then(|percent| percent.parse().ok());
        Some(pids.into_iter().map(move |pid| Found {
            uuid: uuid.clone(),
            pid,
            used,
            percent,
        }))
    };
    text.lines().filter_map(process).flatten().collect()
}

/// Writes the processes of a device, if there is room.
///
/// # Safety
/// `device` is null or comes from [`nvmlDeviceGetHandleByUUID`]; `entries` has room for `*count`.
unsafe fn list<T: for<'a> From<&'a Found>>(
    device: *mut c_void,
    count: *mut c_uint,
    entries: *mut T,
    wanted: impl Fn(&Found) -> bool,
) -> c_int {
    if device.is_null() || count.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: a handle that was made below and is never freed.
    let uuid = unsafe { &*device.cast::<String>() };
    if let Some(path) = std::env::var_os("SOFTNVML_ASKED") {
        let file = fs::OpenOptions::new().create(true).append(true).open(path);
        // A test that reads it sees that it is missing.
        let _ = file.and_then(|mut file| writeln!(file, "{uuid}"));
    }
    let mut found = read();
    found.retain(|found| found.uuid == *uuid && wanted(found));
    // SAFETY: as the caller promises.
    let room = unsafe { count.replace(found.len() as c_uint) } as usize;
    if room < found.len() {
        return INSUFFICIENT_SIZE;
    }
    for (at, found) in found.iter().enumerate() {
        // SAFETY: there is room for as many.
        unsafe { entries.add(at).write(found.into()) };
    }
    SUCCESS
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

/// `nvmlDeviceGetUUID`.
///
/// # Safety
/// `device` comes from [`nvmlDeviceGetHandleByUUID`]; `uuid` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(
    device: *mut c_void,
    uuid: *mut c_char,
    len: c_uint,
) -> c_int {
    if device.is_null() || uuid.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: a handle that was made above and is never freed.
    let text = unsafe { &*device.cast::<String>() };
    if text.len() >= len as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: there is room for the text and a NUL.
    unsafe {
        uuid.cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), text.len());
        uuid.add(text.len()).write(0);
    }
    SUCCESS
}

macro_rules! lists {
    ($($name:ident($entry:ty, $has:expr))*) => {
        $(
            /// NVML's function of this name.
            ///
            /// # Safety
            /// `device` comes from [`nvmlDeviceGetHandleByUUID`]; `entries` has room for `*count`.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                device: *mut c_void,
                count: *mut c_uint,
                entries: *mut $entry,
            ) -> c_int {
                // SAFETY: as the caller promises.
                unsafe { list(device, count, entries, |_| $has) }
            }
        )*
    };
}

lists! {
    nvmlDeviceGetComputeRunningProcesses(ProcessV1, true)
    nvmlDeviceGetComputeRunningProcesses_v2(Process, true)
    nvmlDeviceGetComputeRunningProcesses_v3(Process, true)
    nvmlDeviceGetMPSComputeRunningProcesses(ProcessV1, false)
    nvmlDeviceGetMPSComputeRunningProcesses_v2(Process, false)
    nvmlDeviceGetMPSComputeRunningProcesses_v3(Process, false)
}

/// `nvmlDeviceGetRunningProcessDetailList`.
///
/// # Safety
/// `device` comes from [`nvmlDeviceGetHandleByUUID`]; `list` has room for the entries that it counts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetRunningProcessDetailList(
    device: *mut c_void,
    list: *mut DetailList,
) -> c_int {
    // SAFETY: as the caller promises.
    let Some(asked) = (unsafe { list.as_mut() }) else {
        return INVALID_ARGUMENT;
    };
    let (mode, count, entries) = (asked.mode, &raw mut asked.count, asked.entries);
    // SAFETY: as the caller promises.
    unsafe { self::list(device, count, entries, |_| mode == COMPUTE) }
}

/// `nvmlDeviceGetProcessUtilization`.
///
/// # Safety
/// `device` comes from [`nvmlDeviceGetHandleByUUID`]; `samples` has room for `*count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    device: *mut c_void,
    samples: *mut Sample,
    count: *mut c_uint,
    last_seen: u64,
) -> c_int {
    let wanted = |found: &Found| found.percent.is_some() && last_seen < 1;
    // SAFETY: as the caller promises.
    match unsafe { list(device, count, samples, wanted) } {
        // SAFETY: the list has been written.
        SUCCESS if unsafe { count.read() } == 0 => NOT_FOUND,
        status => status,
    }
}
