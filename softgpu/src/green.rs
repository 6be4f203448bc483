//! Green contexts: parts of a device, whose streams' kernels see the part's multiprocessors as theirs (`%smid`).
//!
//! In all other respects a part uses its device's primary context. With `SOFTGPU_GREEN=0` the driver has no green contexts.

use std::sync::Arc;

use mpsshim_api::cuda::*;

use crate::api::{In, Out, R, api};
use crate::context::Context;
use crate::device::{ALL_SMS, SM_COUNT};
use crate::driver::{device, driver, new_handle, start};
use crate::driver_locks::Wait;
use crate::stream;

/// Multiprocessors that a group has at the least, and whose multiple it has.
const UNIT: u32 = 1;

/// Multiprocessors put together (`CUdevResourceDesc`).
pub struct Description(u64);

/// A green context.
pub struct Green {
    device: CUdevice,
    sms: u64,
}

fn resource(sms: u64) -> CUdevResource {
    let mut resource = CUdevResource {
        kind: CU_DEV_RESOURCE_TYPE_SM,
        sm: [sms.count_ones(), UNIT, UNIT],
        ..CUdevResource::INVALID
    };
    resource.internal[..8].copy_from_slice(&sms.to_ne_bytes());
    resource
}

fn sms_of(resource: &CUdevResource) -> R<u64> {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&resource.internal[..8]);
    let sms = u64::from_ne_bytes(bytes);
    if resource.kind != CU_DEV_RESOURCE_TYPE_SM || sms == 0 || sms & !ALL_SMS != 0 {
        return Err(CUDA_ERROR_INVALID_RESOURCE_TYPE);
    }
    Ok(sms)
}

fn whole(ordinal: CUdevice, kind: u32) -> R<CUdevResource> {
    if std::env::var_os("SOFTGPU_GREEN").is_some_and(|value| value == "0") {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    device(ordinal)?;
    if kind != CU_DEV_RESOURCE_TYPE_SM {
        return Err(CUDA_ERROR_INVALID_RESOURCE_TYPE);
    }
    Ok(resource(ALL_SMS))
}

/// The context that a device's parts have.
fn primary(ordinal: CUdevice) -> R<Arc<Context>> {
    let primary = device(ordinal)?.primary.lock();
    primary.context.clone().ok_or(CUDA_ERROR_INVALID_CONTEXT)
}

fn green(handle: u64) -> R<Arc<Green>> {
    driver()?.greens.get(handle)
}

fn split(
    groups: Out<CUdevResource>,
    count: Out<u32>,
    from: In<CUdevResource>,
    remaining: Out<CUdevResource>,
    least: u32,
) -> R<()> {
    let sms: Vec<u32> = {
        let sms = sms_of(&from.get(0)?)?;
        (0..SM_COUNT).filter(|sm| sms & 1 << sm != 0).collect()
    };
    let size = least.max(1).next_multiple_of(UNIT) as usize;
    let possible = sms.len() / size;
    let made = match groups.is_null() {
        true => possible,
        false => possible.min(count.get()? as usize),
    };
    let mask = |sms: &[u32]| sms.iter().map(|sm| 1 << sm).sum::<u64>();
    for (at, group) in sms.chunks_exact(size).take(made).enumerate() {
        groups.at(at).put(resource(mask(group)));
    }
    remaining.put(match mask(&sms[made * size..]) {
        0 => CUdevResource::INVALID,
        rest => resource(rest),
    });
    count.set(made as u32)
}

api! { TABLE;
    fn cuDeviceGetDevResource(device: CUdevice, out: Out<CUdevResource>, kind: u32) { out.set(whole(device, kind)?) }
    fn cuGreenCtxGetDevResource(handle: u64, out: Out<CUdevResource>, kind: u32) {
        let green = green(handle)?;
        whole(green.device, kind)?;
        out.set(resource(green.sms))
    }
    fn cuDevSmResourceSplitByCount(
        groups: Out<CUdevResource>, count: Out<u32>, from: In<CUdevResource>, remaining: Out<CUdevResource>,
        _flags: u32, least: u32,
    ) {
        split(groups, count, from, remaining, least)
    }
    fn cuDevResourceGenerateDesc(out: Out<u64>, resources: In<CUdevResource>, count: u32) {
        let mut sms = 0;
        for resource in resources.list(count as usize)? {
            sms |= sms_of(&resource)?;
        }
        if sms == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let handle = new_handle();
        start().descriptions.insert(handle, Arc::new(Description(sms)));
        out.set(handle)
    }
    fn cuGreenCtxCreate(out: Out<u64>, description: u64, ordinal: CUdevice, flags: u32) {
        device(ordinal)?;
        if flags != CU_GREEN_CTX_DEFAULT_STREAM {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let sms = match description {
            0 => ALL_SMS,
            handle => driver()?.descriptions.get(handle)?.0,
        };
        drop(primary(ordinal)?.waits_for_all(Wait::Holds));
        let handle = new_handle();
        start().greens.insert(handle, Arc::new(Green { device: ordinal, sms }));
        out.set(handle)
    }
    fn cuGreenCtxDestroy(handle: u64) {
        driver()?.greens.remove(handle).map(drop)
    }
    fn cuCtxFromGreenCtx(out: Out<u64>, handle: u64) { out.set(primary(green(handle)?.device)?.handle) }
    fn cuGreenCtxStreamCreate(out: Out<CUstream>, handle: u64, flags: u32, priority: i32) {
        let green = green(handle)?;
        if flags != CU_STREAM_NON_BLOCKING {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let primary = primary(green.device)?;
        drop(primary.waits_for_all(Wait::Holds));
        stream::create(out, &primary, flags, priority, green.sms)
    }
}
