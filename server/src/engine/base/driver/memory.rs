//! Pools, virtual memory, managed, shared and registered memory.

use crate::engine::base::driver::symbols::{DriverError, Find, unsupported};
use mpsshim_api::cuda::*;
use std::ffi::{c_int, c_void};

functions! {
    /// Pools, virtual memory, managed, shared and registered memory.
    /// A function that the driver lacks returns `CUDA_ERROR_NOT_SUPPORTED`.
    MemoryFunctions, |_| true;
    mem_address_free = "cuMemAddressFree" (address: CUdeviceptr, len: usize);
    mem_set_accesses = "cuMemSetAccess" (address: CUdeviceptr, len: usize, accesses: *const CUmemAccessDesc, count: usize);
    mem_get_access = "cuMemGetAccess" (flags: &mut u64, location: &CUmemLocation, address: CUdeviceptr);
    mem_export = "cuMemExportToShareableHandle" (descriptor: &mut c_int, handle: CUmemGenericAllocationHandle, kind: u32, flags: u64);
    mem_import = "cuMemImportFromShareableHandle" (handle: &mut CUmemGenericAllocationHandle, descriptor: usize, kind: u32);
    mem_get_properties = "cuMemGetAllocationPropertiesFromHandle" (properties: &mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle);
    pool_create = "cuMemPoolCreate" (pool: &mut CUmemoryPool, properties: &CUmemPoolProps);
    pool_destroy = "cuMemPoolDestroy" (pool: CUmemoryPool);
    pool_alloc = "cuMemAllocFromPoolAsync" (address: &mut CUdeviceptr, len: usize, pool: CUmemoryPool, stream: CUstream);
    pool_free = "cuMemFreeAsync" (address: CUdeviceptr, stream: CUstream);
    pool_get_attribute = "cuMemPoolGetAttribute" (pool: CUmemoryPool, attribute: u32, value: &mut u64);
    pool_set_attribute = "cuMemPoolSetAttribute" (pool: CUmemoryPool, attribute: u32, value: &mut u64);
    pool_set_access = "cuMemPoolSetAccess" (pool: CUmemoryPool, accesses: *const CUmemAccessDesc, count: usize);
    pool_get_access = "cuMemPoolGetAccess" (flags: &mut u32, pool: CUmemoryPool, location: &CUmemLocation);
    pool_trim_to = "cuMemPoolTrimTo" (pool: CUmemoryPool, keep: usize);
    pool_export = "cuMemPoolExportToShareableHandle" (descriptor: &mut c_int, pool: CUmemoryPool, kind: u32, flags: u64);
    pool_import = "cuMemPoolImportFromShareableHandle" (pool: &mut CUmemoryPool, descriptor: usize, kind: u32, flags: u64);
    pool_export_pointer = "cuMemPoolExportPointer" (data: &mut CUmemPoolPtrExportData, address: CUdeviceptr);
    pool_import_pointer = "cuMemPoolImportPointer" (address: &mut CUdeviceptr, pool: CUmemoryPool, data: &mut CUmemPoolPtrExportData);
    mem_get_handle_for_range = "cuMemGetHandleForAddressRange" (descriptor: &mut c_int, address: CUdeviceptr, len: usize, kind: u32, flags: u64);
    ctx_enable_peer_access = "cuCtxEnablePeerAccess" (peer: CUcontext, flags: u32);
    memcpy_peer_async = "cuMemcpyPeerAsync" (to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, len: usize, stream: CUstream);
    mem_get_address_range = "cuMemGetAddressRange_v2" (start: &mut CUdeviceptr, len: &mut usize, address: CUdeviceptr);
    mem_retain = "cuMemRetainAllocationHandle" (handle: &mut CUmemGenericAllocationHandle, address: CUdeviceptr);
}
