//! The processes of a device, as NVIDIA's management library (NVML) reports them to tools, with mpsshim's clients among
//! them. nvidia-smi has its list from an internal interface of NVML and does not call the functions here.
//!
//! NVML sees the server's process, which holds all memory of its clients. The functions here have the names of NVML's
//! own. They call the genuine function, take the clients' memory off the server's entry and add an entry for each client
//! in proxy mode. Clients in direct mode have contexts of their own, so that NVML lists them itself. Tools that look a
//! function up get the address from [`symbol`], tools that are linked to NVML from the export of this library.
//!
//! The clients come from the daemon ([`clients`]). Without a daemon, or if it does not answer in time, the genuine
//! function alone answers.

mod clients;
mod connection;
mod library;
mod lists;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem;
use std::ptr;

use crate::loader::dlsym;
use crate::loader::symbols::Target;
use clients::Client;
use library::{Function, name};
use lists::{Detail, DetailList, Entry, Process, ProcessV1, Sample};

/// `nvmlDevice_t`
type Device = *mut c_void;

/// Values of `nvmlReturn_t`.
mod status {
    use std::ffi::c_int;

    pub const SUCCESS: c_int = 0;
    pub const INVALID_ARGUMENT: c_int = 2;
    pub const NOT_FOUND: c_int = 6;
    pub const INSUFFICIENT_SIZE: c_int = 7;
    pub const LIBRARY_NOT_FOUND: c_int = 12;
    pub const FUNCTION_NOT_FOUND: c_int = 13;
}

/// Entries of the first query of a genuine function, and of the last.
const FIRST: usize = 128;
const MOST: usize = 16 * 1024;
/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
const UUID_ROOM: usize = 96;

/// The answer to the lookup of a name that begins as NVML's do. The handle is not a pseudo-handle.
pub extern "C" fn symbol(handle: *mut c_void, name: *const c_char) -> *mut () {
    // SAFETY: dlsym's contract; the interposer has read the first characters.
    let name = unsafe { CStr::from_ptr(name) };
    let found = dlsym::look_up(handle, name);
    let Some((function, own)) = OWN.iter().find(|(function, _)| function.name == name) else {
        return found;
    };
    let own = own.address().cast_mut();
    // The handle of the program itself finds the export.
    if found.is_null() || found == own {
        return found;
    }
    library::adopt(found);
    let is_adopted = function.address() == Ok(found);
    // The program may look at dlerror, which is not to report lookups made here.
    // SAFETY: clears the thread's message.
    unsafe { libc::dlerror() };
    // Another copy of NVML has other handles of devices, and stays as it is.
    if is_adopted { own } else { found }
}

/// The genuine function behind one of this library, as a function of that type; without it, returns the status.
macro_rules! genuine_or_return {
    ($name:ident as $type:ty) => {
        match genuine::$name.address() {
            // SAFETY: NVML's function of this name has this type.
            Ok(address) => unsafe { mem::transmute::<*mut (), $type>(address) },
            Err(status) => return status,
        }
    };
}

macro_rules! functions {
    ($($running:ident($entry:ty))* ; $($other:ident)* ; $($used:ident)*) => {
        $(
            /// NVML's function of this name.
            ///
            /// # Safety
            /// As NVML's function: `entries` has room for `*count`.
            #[allow(non_snake_case, reason = "NVML's name")]
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C" fn $running(
                device: Device,
                count: *mut c_uint,
                entries: *mut $entry,
            ) -> c_int {
                type Genuine = unsafe extern "C" fn(Device, *mut c_uint, *mut $entry) -> c_int;
                let genuine = genuine_or_return!($running as Genuine);
                // SAFETY: the program's arguments, or room for as many entries as are counted.
                let query = |count, entries| unsafe { genuine(device, count, entries) };
                // SAFETY: as the caller promises.
                unsafe { running(device, count, entries, query) }
            }
        )*

        /// NVML's own functions.
        #[allow(non_upper_case_globals, reason = "they have the names of the functions")]
        mod genuine {
            use super::{Function, name};
            $(pub static $running: Function = Function::new(name(concat!(stringify!($running), "\0")));)*
            $(pub static $other: Function = Function::new(name(concat!(stringify!($other), "\0")));)*
            $(pub static $used: Function = Function::new(name(concat!(stringify!($used), "\0")));)*
        }

        /// NVML's functions that have one of this library in their place.
        static OWN: &[(&Function, Target)] = &[
            $((&genuine::$running, Target::new($running as *const ())),)*
            $((&genuine::$other, Target::new($other as *const ())),)*
        ];
    };
}

functions! {
    nvmlDeviceGetComputeRunningProcesses(ProcessV1)
    nvmlDeviceGetComputeRunningProcesses_v2(Process)
    nvmlDeviceGetComputeRunningProcesses_v3(Process)
    nvmlDeviceGetMPSComputeRunningProcesses(ProcessV1)
    nvmlDeviceGetMPSComputeRunningProcesses_v2(Process)
    nvmlDeviceGetMPSComputeRunningProcesses_v3(Process)
    ;
    nvmlDeviceGetRunningProcessDetailList
    nvmlDeviceGetProcessUtilization
    ;
    nvmlDeviceGetUUID
}

/// The list of processes for a mode, with the memory that confidential computing protects.
///
/// # Safety
/// As NVML's function: null, or a list with room for the entries that it counts.
#[allow(non_snake_case, reason = "NVML's name")]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn nvmlDeviceGetRunningProcessDetailList(
    device: Device,
    list: *mut DetailList,
) -> c_int {
    type Genuine = unsafe extern "C" fn(Device, *mut DetailList) -> c_int;
    let genuine = genuine_or_return!(nvmlDeviceGetRunningProcessDetailList as Genuine);
    // SAFETY: null, or the program's list.
    let asked = unsafe { list.as_ref() }.copied();
    let Some(asked) = asked.filter(DetailList::has_clients) else {
        // SAFETY: the program's arguments.
        return unsafe { genuine(device, list) };
    };
    let query = |count: *mut c_uint, entries: *mut Detail| {
        // SAFETY: in the program's list, or a variable of this library's.
        let room = unsafe { count.read() };
        let mut own = DetailList {
            count: room,
            entries,
            ..asked
        };
        // SAFETY: the list has room for as many entries as it counts.
        let status = unsafe { genuine(device, &raw mut own) };
        // SAFETY: as above.
        unsafe { count.write(own.count) };
        status
    };
    // SAFETY: not null, so the program's list.
    unsafe { running(device, &raw mut (*list).count, asked.entries, query) }
}

/// Recent use of the device by each process, in percent.
///
/// # Safety
/// As NVML's function: `samples` is null or has room for `*count`.
#[allow(non_snake_case, reason = "NVML's name")]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    device: Device,
    samples: *mut Sample,
    count: *mut c_uint,
    last_seen: u64,
) -> c_int {
    type Genuine = unsafe extern "C" fn(Device, *mut Sample, *mut c_uint, u64) -> c_int;
    let genuine = genuine_or_return!(nvmlDeviceGetProcessUtilization as Genuine);
    let query = |count: *mut c_uint, samples: *mut Sample| {
        // SAFETY: the program's arguments, or room for as many samples as are counted.
        unsafe { genuine(device, samples, count, last_seen) }
    };
    let merged = (!count.is_null()).then(|| {
        let (clients, time) = clients_of(device)?;
        let with_share = clients.iter().any(|client| client.share.is_some());
        let genuine = match with_share {
            true => all(query, status::NOT_FOUND)?,
            false => return None,
        };
        Some(lists::samples(genuine, &clients, time, last_seen))
    });
    match merged.flatten() {
        Some(merged) if merged.is_empty() => status::NOT_FOUND,
        // SAFETY: as the caller promises.
        Some(merged) => unsafe { hand_over(&merged, count, samples) },
        None => query(count, samples),
    }
}

/// Answers with the processes of a genuine list and the clients.
///
/// # Safety
/// `count` is null or may be read and written, and `entries` has room for `*count`.
unsafe fn running<T: Entry>(
    device: Device,
    count: *mut c_uint,
    entries: *mut T,
    query: impl Fn(*mut c_uint, *mut T) -> c_int,
) -> c_int {
    let merged = (!count.is_null()).then(|| {
        let (clients, _) = clients_of(device)?;
        Some(lists::processes(all(&query, status::SUCCESS)?, &clients))
    });
    match merged.flatten() {
        // SAFETY: as the caller promises.
        Some(merged) => unsafe { hand_over(&merged, count, entries) },
        None => query(count, entries),
    }
}

/// Writes the entries, if there is room.
///
/// # Safety
/// As [`running`]; `count` is not null.
unsafe fn hand_over<T: Copy>(merged: &[T], count: *mut c_uint, entries: *mut T) -> c_int {
    // SAFETY: as the caller promises.
    let room = unsafe { count.read() } as usize;
    // SAFETY: as above.
    unsafe { count.write(merged.len() as c_uint) };
    if room < merged.len() {
        return status::INSUFFICIENT_SIZE;
    }
    if entries.is_null() && !merged.is_empty() {
        return status::INVALID_ARGUMENT;
    }
    for (at, entry) in merged.iter().enumerate() {
        // SAFETY: there is room for as many.
        unsafe { entries.add(at).write(*entry) };
    }
    status::SUCCESS
}

/// All entries of a genuine function, which has none if it returns `none`. `None`: it fails.
fn all<T: Copy + Default>(
    query: impl Fn(*mut c_uint, *mut T) -> c_int,
    none: c_int,
) -> Option<Vec<T>> {
    let mut entries = vec![T::default(); FIRST];
    loop {
        let mut count = entries.len() as c_uint;
        match query(&raw mut count, entries.as_mut_ptr()) {
            status::SUCCESS => {
                entries.truncate(count as usize);
                return Some(entries);
            }
            status::INSUFFICIENT_SIZE if entries.len() < MOST => {
                // There may be more by the next call.
                let room = (count as usize).max(entries.len()) * 2;
                entries.resize(room.min(MOST), T::default());
            }
            status if status == none => return Some(Vec::new()),
            _ => return None,
        }
    }
}

/// The clients on a device, and when that was, in microseconds since 1970. `None`: there are none, or nothing is known.
fn clients_of(device: Device) -> Option<(Vec<Client>, u64)> {
    type Uuid = unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int;
    let snapshot = clients::snapshot()?;
    let address = genuine::nvmlDeviceGetUUID.address().ok()?;
    // SAFETY: NVML's function of this name has this type.
    let uuid_of = unsafe { mem::transmute::<*mut (), Uuid>(address) };
    let mut uuid: [c_char; UUID_ROOM] = [0; UUID_ROOM];
    // SAFETY: writes no more than the buffer has.
    let status = unsafe { uuid_of(device, uuid.as_mut_ptr(), UUID_ROOM as c_uint) };
    if status != status::SUCCESS {
        return None;
    }
    uuid[UUID_ROOM - 1] = 0;
    // SAFETY: ends with a NUL.
    let uuid = unsafe { CStr::from_ptr(ptr::from_ref(&uuid).cast()) };
    let clients = snapshot.on(uuid.to_str().ok()?);
    (!clients.is_empty()).then_some((clients, snapshot.time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_nvml_its_functions_say_so() {
        let mut count = 5;
        // SAFETY: there is no genuine function that could use the arguments.
        let status = unsafe {
            nvmlDeviceGetComputeRunningProcesses_v3(
                ptr::null_mut(),
                &raw mut count,
                ptr::null_mut(),
            )
        };
        assert_eq!((status, count), (status::LIBRARY_NOT_FOUND, 5));
    }

    #[test]
    fn entries_are_handed_over_if_there_is_room() {
        let merged = [1u32, 2, 3];
        let mut entries = [0u32; 4];
        let give = |mut count: c_uint, entries: *mut u32| {
            // SAFETY: the array has room for as many.
            let status = unsafe { hand_over(&merged, &raw mut count, entries) };
            (status, count)
        };
        assert_eq!(give(0, ptr::null_mut()), (status::INSUFFICIENT_SIZE, 3));
        assert_eq!(
            give(2, entries.as_mut_ptr()),
            (status::INSUFFICIENT_SIZE, 3)
        );
        assert_eq!(give(3, ptr::null_mut()), (status::INVALID_ARGUMENT, 3));
        assert_eq!(give(4, entries.as_mut_ptr()), (status::SUCCESS, 3));
        assert_eq!(entries, [1, 2, 3, 0]);
    }

    #[test]
    fn a_genuine_list_is_asked_for_until_it_fits() {
        let long = |count: *mut c_uint, entries: *mut u32| {
            // SAFETY: `all` gives a count, and room for as many entries.
            unsafe {
                if count.replace(300) < 300 {
                    return status::INSUFFICIENT_SIZE;
                }
                entries.add(299).write(7);
            }
            status::SUCCESS
        };
        let found = all(long, status::SUCCESS).unwrap();
        assert_eq!((found.len(), found[299]), (300, 7));
        let none = |_: *mut c_uint, _: *mut u32| status::NOT_FOUND;
        assert_eq!(all(none, status::NOT_FOUND), Some(vec![]));
        assert_eq!(all(none, status::SUCCESS), None);
    }
}
