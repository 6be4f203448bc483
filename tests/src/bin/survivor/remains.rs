//! What is in memory that was just allocated.

use super::{Status, memory};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;
use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;

/// Nothing else writes it.
pub const PATTERN: u32 = 0xA5C3_F00D;
/// Bytes of each block: less than a grant, and more.
const LENS: [usize; 2] = [64 << 10, 33 << 20];

/// Allocates a block of each kind and length, has `change` see and change each word, and frees them.
pub fn each(mut change: impl FnMut(&mut u32)) -> Status {
    for len in LENS {
        let mut on_host = vec![0u32; len / 4];
        let mut on_device = |address: CUdeviceptr| -> Status {
            let bytes = on_host.as_mut_ptr().cast::<c_void>();
            cu!(cuMemcpyDtoH_v2, bytes, address, len).ok()?;
            on_host.iter_mut().for_each(&mut change);
            cu!(cuMemcpyHtoD_v2, address, bytes, len).ok()
        };
        let block = memory(len)?;
        on_device(block)?;
        cu!(cuMemFree_v2, block).ok()?;

        let mut block: CUdeviceptr = 0;
        cu!(cuMemAllocAsync, &mut block, len, CUstream::NULL).ok()?;
        cu!(cuCtxSynchronize).ok()?;
        on_device(block)?;
        cu!(cuMemFreeAsync, block, CUstream::NULL).ok()?;
        cu!(cuCtxSynchronize).ok()?;

        let mut on_host = |block: *mut c_void| {
            // SAFETY: the block has so many bytes, and nobody else knows it.
            let words = unsafe { std::slice::from_raw_parts_mut(block.cast::<u32>(), len / 4) };
            words.iter_mut().for_each(&mut change);
        };
        let mut pinned = null_mut::<c_void>();
        cu!(cuMemHostAlloc, &mut pinned, len, 0 as c_uint).ok()?;
        on_host(pinned);
        cu!(cuMemFreeHost, pinned).ok()?;

        let mut managed: CUdeviceptr = 0;
        cu!(cuMemAllocManaged, &mut managed, len, CU_MEM_ATTACH_GLOBAL).ok()?;
        on_host(managed as *mut c_void);
        cu!(cuMemFree_v2, managed).ok()?;
    }
    Ok(())
}
