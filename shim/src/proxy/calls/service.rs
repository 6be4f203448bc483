//! Services of the driver that submit no work to a device: notifications, core dump settings, the
//! profiler, remote writes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdevice, CUresult};
use mpsshim_proto::handle::{Handle, Kind};
use parking_lot::Mutex;

use super::entries;
use crate::ffi::{In, Out, Status, Text, guard};
use crate::loader::genuine;
use crate::proxy::context;

entries! {
    cuDeviceRegisterAsyncNotification(_, _, _, _) => register_notification,
    cuDeviceUnregisterAsyncNotification(_, _) => unregister_notification,
    cuCoredumpGetAttribute(_, _, _) => core_dump_get,
    cuCoredumpSetAttribute(_, _, _) => core_dump_set,
    cuFlushGPUDirectRDMAWrites(_, _) => flush_remote_writes,
    cuProfilerInitialize(_, _, _) => profiler_initialize,
    cuProfilerStart() => profiler_switch,
    cuProfilerStop() => profiler_switch,
}

static NOTIFICATIONS: Mutex<(u32, BTreeSet<u64>)> = Mutex::new((0, BTreeSet::new()));

/// `cuDeviceRegisterAsyncNotification`. Its one event, that a device runs out of memory for this process's pools, does
/// not occur in a client: the callback is never called.
pub unsafe extern "C" fn register_notification(
    device: CUdevice,
    callback: *const c_void,
    _data: *mut c_void,
    out: Out<u64>,
) -> CUresult {
    guard(|| {
        if callback.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.required()?;
        context::device(device)?;
        let mut all = NOTIFICATIONS.lock();
        let handle = Handle::new(Kind::AsyncCallback, 0, all.0).0;
        all.0 = all.0.wrapping_add(1);
        all.1.insert(handle);
        out.set(handle)
    })
}

/// `cuDeviceUnregisterAsyncNotification`.
pub unsafe extern "C" fn unregister_notification(device: CUdevice, handle: u64) -> CUresult {
    guard(|| {
        context::device(device)?;
        if NOTIFICATIONS.lock().1.remove(&handle) {
            Ok(())
        } else {
            Err(CUDA_ERROR_INVALID_VALUE)
        }
    })
}

/// `CUcoredumpSettings`.
const ON_EXCEPTION: u32 = 1;
const TRIGGER_HOST: u32 = 2;
const LIGHTWEIGHT: u32 = 3;
const FILE: u32 = 5;
const GENERATION_FLAGS: u32 = 7;
/// `CU_COREDUMP_LIGHTWEIGHT_FLAGS`.
const LIGHTWEIGHT_FLAGS: u32 = 0xf;
/// Bytes of a path, the NUL included.
const PATH_MAX: usize = 1024;

/// Core dump settings of programs, by context and setting. No core dump is ever written for a client: a fault is the
/// server's.
static CORE_DUMPS: Mutex<BTreeMap<(u64, u32), Vec<u8>>> = Mutex::new(BTreeMap::new());

/// `cuCoredumpGetAttribute`: the value for the context, or else the global one.
pub unsafe extern "C" fn core_dump_get(id: u32, value: *mut u8, size: Out<usize>) -> CUresult {
    guard(|| {
        size.required()?;
        let context = context::current()?.handle;
        if !matches!(
            id,
            ON_EXCEPTION | TRIGGER_HOST | LIGHTWEIGHT | FILE | GENERATION_FLAGS
        ) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let Some(own) = CORE_DUMPS.lock().get(&(context, id)).cloned() else {
            type Get = unsafe extern "C" fn(u32, *mut u8, Out<usize>) -> CUresult;
            let address =
                genuine::symbol("cuCoredumpGetAttributeGlobal").ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
            // SAFETY: the driver's function of this name has this signature.
            let get = unsafe { std::mem::transmute::<*const (), Get>(address) };
            // SAFETY: the program's arguments, unchanged.
            return unsafe { get(id, value, size) }.ok();
        };
        if value.is_null() {
            return size.set(own.len());
        }
        let room = size.get()?;
        if id != FILE && room != own.len() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let len = own.len().min(room);
        // SAFETY: the program gave `room` writable bytes.
        unsafe { std::ptr::copy_nonoverlapping(own.as_ptr(), value, len) };
        Ok(())
    })
}

/// `cuCoredumpSetAttribute`.
pub unsafe extern "C" fn core_dump_set(id: u32, value: *const u8, size: In<usize>) -> CUresult {
    guard(|| {
        let len = size.get()?;
        let context = context::current()?.handle;
        let fits = match id {
            ON_EXCEPTION | TRIGGER_HOST | LIGHTWEIGHT => len == 1,
            GENERATION_FLAGS => len == 4,
            FILE => len <= PATH_MAX,
            _ => false,
        };
        if !fits || value.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the program gave `len` readable bytes.
        let value = unsafe { std::slice::from_raw_parts(value, len) }.to_vec();
        let mut all = CORE_DUMPS.lock();
        match id {
            LIGHTWEIGHT => {
                let flags = if value[0] != 0 { LIGHTWEIGHT_FLAGS } else { 0 };
                all.insert((context, GENERATION_FLAGS), flags.to_ne_bytes().to_vec());
            }
            GENERATION_FLAGS => {
                let flags = u32::from_ne_bytes([value[0], value[1], value[2], value[3]]);
                let light = flags & LIGHTWEIGHT_FLAGS == LIGHTWEIGHT_FLAGS;
                all.insert((context, LIGHTWEIGHT), vec![light.into()]);
            }
            _ => {}
        }
        all.insert((context, id), value);
        Ok(())
    })
}

/// `cuFlushGPUDirectRDMAWrites`: nothing writes into a client's memory from outside.
pub unsafe extern "C" fn flush_remote_writes(target: u32, scope: u32) -> CUresult {
    guard(|| {
        context::current()?;
        if target != 0 || !matches!(scope, 100 | 200) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    })
}

/// `cuProfilerInitialize`, which current drivers have no more.
pub unsafe extern "C" fn profiler_initialize(_config: Text, _output: Text, _mode: u32) -> CUresult {
    guard(|| Err(CUDA_ERROR_NOT_SUPPORTED))
}

/// `cuProfilerStart`, `cuProfilerStop`: a profiler sees none of a client's work.
pub unsafe extern "C" fn profiler_switch() -> CUresult {
    guard(|| -> Status { context::current().map(drop) })
}
