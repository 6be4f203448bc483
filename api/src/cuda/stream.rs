//! Stream memory operations, stream attributes, host functions. Values and layouts of `cuda.h`, CUDA 13.0.

use super::CUdeviceptr;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

handles! {
    CUasyncCallbackHandle;
}

pub const CU_STREAM_MEM_OP_WAIT_VALUE_32: u32 = 1;
pub const CU_STREAM_MEM_OP_WRITE_VALUE_32: u32 = 2;
pub const CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES: u32 = 3;
pub const CU_STREAM_MEM_OP_WAIT_VALUE_64: u32 = 4;
pub const CU_STREAM_MEM_OP_WRITE_VALUE_64: u32 = 5;
pub const CU_STREAM_MEM_OP_BARRIER: u32 = 6;

/// Beside one of `CU_STREAM_WAIT_VALUE_*`.
pub const CU_STREAM_WAIT_VALUE_FLUSH: u32 = 1 << 30;

/// `CUstreamBatchMemOpParams`, 48 bytes. For waits and writes: padding, address, value, flags, a word of the
/// driver's; for the others the flags stand in the place of the padding.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUstreamBatchMemOpParams {
    pub operation: u32,
    /// Barriers and flushes.
    pub flags: u32,
    pub address: CUdeviceptr,
    /// The low half for 32-bit operations.
    pub value: u64,
    /// Waits and writes.
    pub value_flags: u32,
    pub pad: u32,
    pub alias: u64,
    pub rest: u64,
}

/// Ids of `CUlaunchAttribute` that streams have.
pub const CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW: u32 = 1;
pub const CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY: u32 = 3;
pub const CU_STREAM_ATTRIBUTE_PRIORITY: u32 = 8;
pub const CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP: u32 = 9;
pub const CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN: u32 = 10;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct CUaccessPolicyWindow {
    pub base: u64,
    pub bytes: u64,
    pub hit_ratio: f32,
    pub hit: u32,
    pub miss: u32,
    pub pad: u32,
}
