//! Device memory.

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUdeviceptr, CUresult};
use mpsshim_proto::message::{Attach, MemInfo, Op};

use super::entries;
use crate::ffi::{Out, guard};
use crate::proxy::submit::session;
use crate::proxy::{capture, context, extents, managed, memory, pools, stream};

entries! {
    cuMemAlloc_v2(_, _) => alloc,
    cuMemAllocPitch_v2(_, _, _, _, _) => alloc_pitch,
    cuMemFree_v2(_) => free,
    cuMemGetInfo_v2(_, _) => get_info,
    cuMemGetAddressRange_v2(_, _, _) => get_address_range,
}

/// Rows begin at multiples of this many bytes (`cuMemAllocPitch`).
const PITCH: usize = 512;

/// `cuMemAlloc`.
pub unsafe extern "C" fn alloc(out: Out<CUdeviceptr>, len: usize) -> CUresult {
    guard(|| {
        let context = context::current()?;
        out.required()?;
        capture::forbid(session()?)?;
        out.set(memory::alloc(session()?, context, len as u64)?)
    })
}

/// `cuMemAllocPitch`.
pub unsafe extern "C" fn alloc_pitch(
    out: Out<CUdeviceptr>,
    pitch_out: Out<usize>,
    width: usize,
    height: usize,
    element: u32,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        pitch_out.required()?;
        capture::forbid(session()?)?;
        if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let pitch = width
            .checked_add(PITCH - 1)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?
            / PITCH
            * PITCH;
        let len = pitch.checked_mul(height).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        out.set(memory::alloc(session()?, context::current()?, len as u64)?)?;
        pitch_out.set(pitch)
    })
}

/// `cuMemFree`. Freeing NULL does nothing.
pub unsafe extern "C" fn free(address: CUdeviceptr) -> CUresult {
    guard(|| {
        // Also where no context is current.
        context::none_or_usable()?;
        if address == 0 {
            return Ok(());
        }
        context::current()?;
        let session = session()?;
        capture::forbid(session)?;
        if memory::is_graph_memory(address) {
            stream::quiesce(session, None)?;
            let stream = stream::legacy(session, context::current()?)?;
            pools::free(session, address, stream)?;
            return stream::synchronize(session, stream);
        }
        if memory::device_of(address).is_some() {
            return memory::free(session, address);
        }
        if managed::block(address).is_some() {
            return managed::free(session, address);
        }
        // Memory from a pool goes in the order of the default stream, behind all work.
        stream::quiesce(session, None)?;
        let stream = stream::legacy(session, context::current()?)?;
        match pools::free(session, address, stream)? {
            true => Ok(()),
            false => Err(CUDA_ERROR_INVALID_VALUE),
        }
    })
}

/// `cuMemGetInfo`. Memory that this client has been granted and does not use counts as free.
pub unsafe extern "C" fn get_info(free: Out<usize>, total: Out<usize>) -> CUresult {
    guard(|| {
        let context = context::current()?;
        let body = Attach {
            device: context.server_device,
            flags: 0,
        };
        let info: MemInfo = session()?.request(Op::MemInfo, &body, &[])?.read()?;
        let unused = memory::unused(context.server_device);
        free.set_if_wanted((info.free + unused).min(info.total) as usize);
        total.set_if_wanted(info.total as usize);
        Ok(())
    })
}

/// `cuMemGetAddressRange`.
pub unsafe extern "C" fn get_address_range(
    start: Out<CUdeviceptr>,
    len: Out<usize>,
    address: CUdeviceptr,
) -> CUresult {
    guard(|| {
        if start.is_null() && len.is_null() {
            return Ok(());
        }
        context::current()?;
        let found = memory::device_block(address)
            .map(|(start, block, _)| (start, block.len))
            .or_else(|| memory::host_block(address).map(|(start, block)| (start, block.len)))
            .or_else(|| extents::find(address).map(|(start, extent)| (start, extent.len)))
            .or_else(|| memory::global(address).map(|(start, global)| (start, global.len)));
        let (first, bytes) = found.ok_or(CUDA_ERROR_NOT_FOUND)?;
        start.set_if_wanted(first);
        len.set_if_wanted(bytes as usize);
        Ok(())
    })
}
