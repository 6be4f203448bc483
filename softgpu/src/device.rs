//! Devices: number, identity, attributes; primary contexts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::api::{Out, R, api, put_text};
use crate::compute_mode::{self, Contexts};
use crate::context::Context;
use crate::driver::{device, driver, new_handle, start};
use crate::pool::Pools;

pub const SM_COUNT: u32 = 4;
/// A bit for each.
pub const ALL_SMS: u64 = (1 << SM_COUNT) - 1;
pub const MAX_THREADS: u32 = 1024;
pub const THREADS_PER_SM: u32 = 2048;
pub const BLOCKS_PER_SM: u32 = 32;
/// Shared memory that a block gets unasked, that it gets on request, and that an SM has; bytes.
pub const SHARED_DEFAULT: u32 = 48 << 10;
pub const SHARED_OPTIN: u32 = 227 << 10;
pub const SHARED_PER_SM: u32 = 228 << 10;

pub struct Device {
    /// Its number on the machine; the caller's ordinal is its place among the visible ones.
    pub number: u32,
    pub total: u64,
    pub used: Arc<AtomicU64>,
    pub primary: Mutex<Primary>,
    pub pools: Pools,
    pub contexts: Contexts,
}

pub struct Primary {
    pub handle: u64,
    pub context: Option<Arc<Context>>,
    pub retained: u32,
    pub flags: u32,
    /// The error that the context was lost with; the device has none for this process any more.
    pub lost: u32,
}

fn uuid(number: u32) -> CUuuid {
    let mut bytes = *b"\x50\xf7\x69\x75softgpu\0\0\0\0\0";
    bytes[12..].copy_from_slice(&number.to_be_bytes());
    CUuuid(bytes)
}

fn uuid_text(number: u32) -> String {
    let hex: Vec<String> = uuid(number).0.iter().map(|b| format!("{b:02x}")).collect();
    format!(
        "GPU-{}-{}-{}-{}-{}",
        hex[..4].concat(),
        hex[4..6].concat(),
        hex[6..8].concat(),
        hex[8..10].concat(),
        hex[10..].concat()
    )
}

/// A size such as `512M`.
fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The devices that `SOFTGPU_DEVICES` makes and `CUDA_VISIBLE_DEVICES` leaves, in the latter's order.
pub fn visible() -> Vec<Device> {
    let count = std::env::var("SOFTGPU_DEVICES")
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(1u32)
        .min(64);
    let total = std::env::var("SOFTGPU_MEMORY")
        .ok()
        .and_then(|v| size(&v))
        .unwrap_or(4 << 30);
    let numbers = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => {
            let mut numbers = Vec::new();
            // As with the genuine driver the first entry that names no device ends the list.
            for entry in list.split(',').map(str::trim) {
                let found = match entry.parse::<u32>() {
                    Ok(n) => Some(n).filter(|&n| n < count),
                    Err(_) => {
                        (0..count).find(|&n| entry.len() > 4 && uuid_text(n).starts_with(entry))
                    }
                };
                match found {
                    Some(n) if !numbers.contains(&n) => numbers.push(n),
                    _ => break,
                }
            }
            numbers
        }
        Err(_) => (0..count).collect(),
    };
    let device = |number| Device {
        number,
        total,
        used: Arc::default(),
        primary: Mutex::new(Primary {
            handle: new_handle(),
            context: None,
            retained: 0,
            flags: 0,
            lost: 0,
        }),
        pools: Pools::default(),
        contexts: Contexts::default(),
    };
    numbers.into_iter().map(device).collect()
}

impl Device {
    /// Takes `bytes` of the device's memory.
    pub fn take(&self, bytes: u64) -> R<()> {
        let taken = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                used.checked_add(bytes).filter(|&sum| sum <= self.total)
            });
        taken.map(|_| ()).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
    }

    pub fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::AcqRel);
    }
}

/// The value of a device attribute; zero for what a CPU has none of.
fn attribute(device: &Device, attribute: CUdevice_attribute) -> i32 {
    match attribute {
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => MAX_THREADS as i32,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X | CU_DEVICE_ATTRIBUTE_MAX_PITCH => i32::MAX,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65535,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => SHARED_DEFAULT as i32,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => SHARED_OPTIN as i32,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => SHARED_PER_SM as i32,
        CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK => 1024,
        CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY => 65536,
        CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK
        | CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR => 65536,
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE | CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE => 1_000_000,
        CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT | CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT => 512,
        CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT => 32,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => SM_COUNT as i32,
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => device.number as i32 + 1,
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH => 128,
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 4 << 20,
        CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE => 128 << 20,
        CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT => 4,
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => THREADS_PER_SM as i32,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => BLOCKS_PER_SM as i32,
        CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 2,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
        CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO => 2,
        CU_DEVICE_ATTRIBUTE_COMPUTE_MODE => compute_mode::attribute(),
        CU_DEVICE_ATTRIBUTE_NUMA_ID | CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID => -1,
        CU_DEVICE_ATTRIBUTE_GPU_OVERLAP
        | CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
        | CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1
        | CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1
        | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1
        | CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR
        | CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        | CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED => 1,
        _ => 0,
    }
}

fn release(ordinal: CUdevice) -> R<()> {
    let device = device(ordinal)?;
    let mut primary = device.primary.lock();
    if primary.retained == 0 {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    primary.retained -= 1;
    let ended = if primary.retained == 0 {
        primary.context.take()
    } else {
        None
    };
    if let Some(context) = &ended {
        primary.lost = context.status();
    }
    drop(primary);
    if let Some(context) = ended {
        context.destroy();
    }
    Ok(())
}

/// Success even for a lost context; but the next retain fails with what it was lost with, as natively. Until the next retain
/// the context is inactive, though its handle may be made current.
fn reset(ordinal: CUdevice) -> R<()> {
    let device = device(ordinal)?;
    let mut primary = device.primary.lock();
    let Some(context) = primary.context.take() else {
        return Ok(());
    };
    primary.lost = context.status();
    drop(primary);
    context.end();
    Ok(())
}

fn set_flags(ordinal: CUdevice, flags: u32) -> R<()> {
    if flags & !CU_CTX_FLAGS_MASK != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    device(ordinal)?.primary.lock().flags = flags;
    Ok(())
}

api! { TABLE;
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if start().devices.is_empty() { Err(CUDA_ERROR_NO_DEVICE) } else { Ok(()) }
    }
    fn cuDriverGetVersion(version: Out<i32>) { version.set(13000) }
    fn cuDeviceGet(out: Out<CUdevice>, ordinal: i32) {
        device(ordinal)?;
        out.set(ordinal)
    }
    fn cuDeviceGetCount(count: Out<i32>) { count.set(driver()?.devices.len() as i32) }
    fn cuDeviceGetName(name: Out<u8>, room: i32, ordinal: CUdevice) {
        device(ordinal)?;
        put_text(name, usize::try_from(room).unwrap_or(0), "Software GPU")
    }
    fn cuDeviceCanAccessPeer(out: Out<i32>, user: CUdevice, owner: CUdevice) {
        device(user)?;
        device(owner)?;
        out.set((user != owner).into())
    }
    fn cuDeviceGetUuid_v2(out: Out<CUuuid>, ordinal: CUdevice) { out.set(uuid(device(ordinal)?.number)) }
    fn cuDeviceGetTexture1DLinearMaxWidth(most: Out<usize>, format: u32, channels: u32, ordinal: CUdevice) {
        device(ordinal)?;
        crate::array::element(format, channels)?;
        most.set(1 << 28)
    }
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, ordinal: CUdevice) { bytes.set(device(ordinal)?.total as usize) }
    fn cuDeviceGetAttribute(value: Out<i32>, which: CUdevice_attribute, ordinal: CUdevice) {
        if which == 0 || which > 255 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        value.set(attribute(device(ordinal)?, which))
    }
    fn cuDevicePrimaryCtxRetain(out: Out<CUcontext>, ordinal: CUdevice) {
        let mut primary = device(ordinal)?.primary.lock();
        let status = primary.context.as_ref().map_or(primary.lost, |c| c.status());
        if status != 0 {
            return Err(CUresult(status));
        }
        if primary.context.is_none() {
            primary.context = Some(Context::new(ordinal, primary.flags, Some(primary.handle))?);
        }
        primary.retained += 1;
        out.set(CUcontext(primary.handle))
    }
    fn cuDevicePrimaryCtxRelease_v2(ordinal: CUdevice) { release(ordinal) }
    fn cuDevicePrimaryCtxReset_v2(ordinal: CUdevice) { reset(ordinal) }
    fn cuDevicePrimaryCtxSetFlags_v2(ordinal: CUdevice, flags: u32) { set_flags(ordinal, flags) }
    fn cuDevicePrimaryCtxGetState(ordinal: CUdevice, flags: Out<u32>, active: Out<i32>) {
        let primary = device(ordinal)?.primary.lock();
        flags.set(primary.flags)?;
        active.set(i32::from(primary.context.is_some()))
    }
}
