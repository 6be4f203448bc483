//! Stream memory operations, stream attributes, host functions.

use super::*;

wire! {
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
}
