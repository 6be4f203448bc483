//! Pools, virtual memory, managed, shared and registered memory. Values and layouts of `cuda.h`, CUDA 13.0.

use super::CUmemLocation;

handles! {
    CUmemoryPool;
}

// CUmemLocationType; devices are CU_MEM_LOCATION_TYPE_DEVICE
pub const CU_MEM_LOCATION_TYPE_INVALID: u32 = 0;
pub const CU_MEM_LOCATION_TYPE_HOST: u32 = 2;
pub const CU_MEM_LOCATION_TYPE_HOST_NUMA: u32 = 3;
pub const CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: u32 = 4;

// CUmemAllocationType
pub const CU_MEM_ALLOCATION_TYPE_MANAGED: u32 = 2;

// CUmemAllocationHandleType
pub const CU_MEM_HANDLE_TYPE_NONE: u32 = 0;
pub const CU_MEM_HANDLE_TYPE_FABRIC: u32 = 8;

// CUmemAccess_flags
pub const CU_MEM_ACCESS_FLAGS_PROT_NONE: u32 = 0;
pub const CU_MEM_ACCESS_FLAGS_PROT_READ: u32 = 1;

// CUmemAllocationGranularity_flags
pub const CU_MEM_ALLOC_GRANULARITY_MINIMUM: u32 = 0;
pub const CU_MEM_ALLOC_GRANULARITY_RECOMMENDED: u32 = 1;

// CUmemRangeHandleType
pub const CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: u32 = 1;

// CUmemPool_attribute
pub const CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES: u32 = 1;
pub const CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: u32 = 2;
pub const CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: u32 = 3;
pub const CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: u32 = 4;
pub const CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: u32 = 5;
pub const CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: u32 = 6;
pub const CU_MEMPOOL_ATTR_USED_MEM_CURRENT: u32 = 7;
pub const CU_MEMPOOL_ATTR_USED_MEM_HIGH: u32 = 8;

// CUmemAttach_flags
pub const CU_MEM_ATTACH_GLOBAL: u32 = 1;
pub const CU_MEM_ATTACH_HOST: u32 = 2;
pub const CU_MEM_ATTACH_SINGLE: u32 = 4;

// CUmem_advise
pub const CU_MEM_ADVISE_SET_READ_MOSTLY: u32 = 1;
pub const CU_MEM_ADVISE_UNSET_READ_MOSTLY: u32 = 2;
pub const CU_MEM_ADVISE_SET_PREFERRED_LOCATION: u32 = 3;
pub const CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: u32 = 4;
pub const CU_MEM_ADVISE_SET_ACCESSED_BY: u32 = 5;
pub const CU_MEM_ADVISE_UNSET_ACCESSED_BY: u32 = 6;

// CUmem_range_attribute
pub const CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: u32 = 1;
pub const CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: u32 = 2;
pub const CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: u32 = 3;
pub const CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: u32 = 4;
pub const CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE: u32 = 5;
pub const CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: u32 = 6;
pub const CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE: u32 = 7;
pub const CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: u32 = 8;

// CUipcMem_flags
pub const CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: u32 = 1;

// CUmemcpySrcAccessOrder
pub const CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: u32 = 1;
pub const CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL: u32 = 2;
pub const CU_MEMCPY_SRC_ACCESS_ORDER_ANY: u32 = 3;

/// A device's ordinal where the processor is meant.
pub const CU_DEVICE_CPU: i32 = -1;
/// A device's ordinal where none is meant.
pub const CU_DEVICE_INVALID: i32 = -2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemPoolProps {
    pub kind: u32,
    pub handle_types: u32,
    pub location: CUmemLocation,
    pub win32_security_attributes: u64,
    pub max_size: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

impl Default for CUmemPoolProps {
    fn default() -> Self {
        CUmemPoolProps {
            kind: 0,
            handle_types: 0,
            location: CUmemLocation::default(),
            win32_security_attributes: 0,
            max_size: 0,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

const _: () = assert!(size_of::<CUmemPoolProps>() == 88);

/// `CUmemPoolPtrExportData`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUmemPoolPtrExportData(pub [u8; 64]);

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUipcMemHandle(pub [u8; 64]);

/// `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUipcEventHandle(pub [u8; 64]);

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmemcpyAttributes {
    pub src_access_order: u32,
    pub src_location_hint: CUmemLocation,
    pub dst_location_hint: CUmemLocation,
    pub flags: u32,
}

const _: () = assert!(size_of::<CUmemcpyAttributes>() == 24);
