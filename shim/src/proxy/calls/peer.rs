//! Peer access between devices, and batches of copies between any kinds of memory.

use std::collections::BTreeSet;

use mpsshim_api::cuda::*;
use mpsshim_proto::message::Op;
use mpsshim_proto::message::memory::Peers;
use parking_lot::Mutex;

use super::copy::{self, Said, When};
use super::entries;
use crate::ffi::{In, Out, Status, guard};
use crate::loader::genuine;
use crate::proxy::context::{self, Context};
use crate::proxy::default_stream;
use crate::proxy::stream;
use crate::proxy::submit::session;

entries! {
    cuCtxEnablePeerAccess(_, _) => enable,
    cuCtxDisablePeerAccess(_) => disable,
    cuMemcpyBatchAsync(_, _, _, _, _, _, _, _, _) => copy_batch_v1::<false>,
    cuMemcpyBatchAsync_ptsz(_, _, _, _, _, _, _, _, _) => copy_batch_v1::<true>,
    cuMemcpyBatchAsync_v2(_, _, _, _, _, _, _, _) => copy_batch::<false>,
    cuMemcpyBatchAsync_v2_ptsz(_, _, _, _, _, _, _, _) => copy_batch::<true>,
}

/// Contexts that may use another context's memory: user and owner, by handle.
static ENABLED: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

/// Whether the driver reports that a device can access another's memory.
fn can_access(user: i32, owner: i32) -> bool {
    type Can = unsafe extern "C" fn(*mut i32, CUdevice, CUdevice) -> CUresult;
    let Some(address) = genuine::symbol("cuDeviceCanAccessPeer") else {
        return false;
    };
    // SAFETY: the driver's function of this name has this signature.
    let can = unsafe { std::mem::transmute::<*const (), Can>(address) };
    let mut answer = 0;
    // SAFETY: writes one int.
    unsafe { can(&mut answer, user, owner) }.is_ok() && answer != 0
}

/// Whether a context may set memory of a device, given by the server's ordinal.
pub fn reaches(user: &Context, device: u32) -> bool {
    let owned_there = |owner: u64| {
        context::by_handle(owner)
            .and_then(Context::usable)
            .is_ok_and(|owner| owner.server_device == device)
    };
    user.server_device == device
        || ENABLED
            .lock()
            .iter()
            .any(|(by, owner)| *by == user.handle && owned_there(*owner))
}

fn tell(owner: &Context, user: &Context, enable: bool) -> Status {
    let body = Peers {
        owner: owner.server_device,
        user: user.server_device,
        enable: enable.into(),
        pad: 0,
    };
    session()?.request(Op::PeerAccess, &body, &[])?.status.ok()
}

/// `cuCtxEnablePeerAccess`.
pub unsafe extern "C" fn enable(peer: u64, flags: u32) -> CUresult {
    guard(|| {
        let user = context::current()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let owner = context::by_handle(peer)?.usable()?;
        if owner.device == user.device || !can_access(user.device, owner.device) {
            return Err(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        let mut enabled = ENABLED.lock();
        if enabled.contains(&(user.handle, owner.handle)) {
            return Err(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
        }
        tell(owner, user, true)?;
        enabled.insert((user.handle, owner.handle));
        Ok(())
    })
}

/// `cuCtxDisablePeerAccess`.
pub unsafe extern "C" fn disable(peer: u64) -> CUresult {
    guard(|| {
        let user = context::current()?;
        let owner = context::by_handle(peer)?;
        if !ENABLED.lock().remove(&(user.handle, owner.handle)) {
            return Err(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
        }
        tell(owner, user, false)
    })
}

/// Submits the copies of one batch in stream order, which is one of the orders permitted for a batch.
fn batch<const P: bool>(
    (to, from, lens): (In<CUdeviceptr>, In<CUdeviceptr>, In<usize>),
    count: usize,
    attributes: In<CUmemcpyAttributes>,
    first: In<usize>,
    kinds: usize,
    stream: u64,
    failed: impl Fn(usize),
) -> Status {
    // A default stream that is not named cannot take a batch.
    let default = stream == 0 && !P || stream == CU_STREAM_LEGACY.0;
    if default {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let resolved = default_stream::resolve_for_copy(stream, P)?;
    if count == 0 || kinds == 0 || kinds > count || first.at(0)? != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for kind in 0..kinds {
        let attributes = attributes.at(kind)?;
        let order = attributes.src_access_order;
        let known =
            (CU_MEMCPY_SRC_ACCESS_ORDER_STREAM..=CU_MEMCPY_SRC_ACCESS_ORDER_ANY).contains(&order);
        if !known || attributes.flags & !1 != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    let (mut kind, mut at_once) = (0, false);
    for at in 0..count {
        if kind + 1 < kinds && first.at(kind + 1)? == at {
            kind += 1;
        }
        let order = attributes.at(kind)?.src_access_order;
        at_once |= order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
        copy::transfer(
            resolved.handle(),
            P,
            (to.at(at)?, Said::Any),
            (from.at(at)?, Said::Any),
            lens.at(at)?,
            When::Async,
        )
        .inspect_err(|_| failed(at))?;
    }
    if at_once {
        // The program may reuse the sources when the call returns.
        stream::synchronize(session()?, resolved)?;
    }
    Ok(())
}

/// `cuMemcpyBatchAsync` before CUDA 13: says which copy failed.
pub unsafe extern "C" fn copy_batch_v1<const P: bool>(
    to: In<CUdeviceptr>,
    from: In<CUdeviceptr>,
    lens: In<usize>,
    count: usize,
    attributes: In<CUmemcpyAttributes>,
    first: In<usize>,
    kinds: usize,
    failed: Out<usize>,
    stream: u64,
) -> CUresult {
    guard(|| {
        let sides = (to, from, lens);
        batch::<P>(sides, count, attributes, first, kinds, stream, |at| {
            failed.set_if_wanted(at)
        })
    })
}

/// `cuMemcpyBatchAsync`.
pub unsafe extern "C" fn copy_batch<const P: bool>(
    to: In<CUdeviceptr>,
    from: In<CUdeviceptr>,
    lens: In<usize>,
    count: usize,
    attributes: In<CUmemcpyAttributes>,
    first: In<usize>,
    kinds: usize,
    stream: u64,
) -> CUresult {
    guard(|| {
        let sides = (to, from, lens);
        batch::<P>(sides, count, attributes, first, kinds, stream, |_| {})
    })
}
