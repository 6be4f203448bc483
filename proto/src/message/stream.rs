//! Stream memory operations, stream attributes, host functions.

use super::*;
use mpsshim_api::plain_structs;

/// Bytes that the longest attribute of a stream has.
pub const STREAM_ATTRIBUTE_LEN: usize = 32;

plain_structs! {
    /// `cuLaunchHostFunc`, `cuStreamAddCallback`: flag `slot + ARRIVED` gets `value` when the stream gets here, and
    /// the stream goes on when the client has written it into flag `slot + RETURNED`.
    HostFunction { stream: u64, slot: u32, value: u32, }
    /// One operation of `cuStreamBatchMemOp`.
    MemOp {
        stream: u64,
        /// Device address, or address of pinned memory.
        address: u64,
        value: u64,
        /// `CU_STREAM_MEM_OP_*`.
        operation: u32,
        /// `CU_STREAM_WAIT_VALUE_*`, `CU_STREAM_WRITE_VALUE_*`, `CU_STREAM_MEMORY_BARRIER_TYPE_*`.
        flags: u32,
    }
    /// `cuStreamSetAttribute`, for attributes that affect the device.
    StreamAttribute {
        stream: u64,
        /// `CU_STREAM_ATTRIBUTE_*`.
        id: u32,
        pad: u32,
        /// As `CUlaunchAttributeValue` has it.
        value: [u8; STREAM_ATTRIBUTE_LEN],
    }
    /// `cuIpcGetEventHandle` (-> [`EventToken`]).
    EventExport { event: u64, }
    /// The token of `cuIpcGetEventHandle`, opaque to the client.
    EventToken { token: [u64; 8], }
    /// `cuIpcOpenEventHandle`.
    EventImport {
        /// Handle of kind event, chosen by the client.
        event: u64,
        /// Server's ordinal of the current context's device.
        device: u32,
        pad: u32,
        token: [u64; 8],
    }
}
