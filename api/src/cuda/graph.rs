//! Graphs and stream capture. Values and layouts of `cuda.h`, CUDA 13.0.
//!
//! Reserved words and the gaps that C leaves are fields, so that a struct can be read from bytes and written as bytes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

handles! {
    CUgraphNode; CUuserObject; CUgraphDeviceNode;
}

plain_structs! {
    /// Of CUDA 12.0 and later. That of CUDA 10.0 ends before `kernel`.
    CUDA_KERNEL_NODE_PARAMS {
        function: u64,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        pad: u32,
        params: u64,
        extra: u64,
        kernel: u64,
        context: u64,
    }
    CUDA_MEMSET_NODE_PARAMS {
        to: u64,
        pitch: u64,
        value: u32,
        element: u32,
        width: u64,
        height: u64,
    }
    CUDA_MEM_ALLOC_NODE_PARAMS {
        kind: u32,
        handle_types: u32,
        location_kind: u32,
        location: u32,
        security: u64,
        max_size: u64,
        usage: u16,
        reserved: [u16; 3],
        more_reserved: [u64; 6],
        access: u64,
        access_count: u64,
        bytes: u64,
        address: u64,
    }
    CUDA_BATCH_MEM_OP_NODE_PARAMS {
        context: u64,
        count: u32,
        pad0: u32,
        operations: u64,
        flags: u32,
        pad1: u32,
    }
    CUDA_CONDITIONAL_NODE_PARAMS {
        handle: u64,
        kind: u32,
        size: u32,
        graphs: u64,
        context: u64,
    }
    CUDA_CHILD_GRAPH_NODE_PARAMS {
        graph: u64,
        ownership: u32,
        pad: u32,
    }
    CUDA_HOST_NODE_PARAMS {
        function: u64,
        data: u64,
    }
    /// The content of `words` depends on the kind: one of the structs above, an event, or an address.
    CUgraphNodeParams {
        kind: u32,
        reserved0: [u32; 3],
        words: [u64; 29],
        reserved2: u64,
    }
    CUgraphEdgeData {
        from_port: u8,
        to_port: u8,
        kind: u8,
        reserved: [u8; 5],
    }
    CUDA_GRAPH_INSTANTIATE_PARAMS {
        flags: u64,
        upload_stream: u64,
        error_node: u64,
        result: u32,
        pad: u32,
    }
    CUgraphExecUpdateResultInfo {
        result: u32,
        pad: u32,
        error_node: u64,
        error_from: u64,
    }
}

const _: () = {
    assert!(size_of::<CUDA_KERNEL_NODE_PARAMS>() == 72);
    assert!(size_of::<CUDA_MEMSET_NODE_PARAMS>() == 40);
    assert!(size_of::<CUDA_MEM_ALLOC_NODE_PARAMS>() == 120);
    assert!(size_of::<CUgraphNodeParams>() == 256);
    assert!(size_of::<CUgraphEdgeData>() == 8);
};

// CUgraphNodeType
pub const CU_GRAPH_NODE_TYPE_KERNEL: u32 = 0;
pub const CU_GRAPH_NODE_TYPE_MEMCPY: u32 = 1;
pub const CU_GRAPH_NODE_TYPE_MEMSET: u32 = 2;
pub const CU_GRAPH_NODE_TYPE_HOST: u32 = 3;
pub const CU_GRAPH_NODE_TYPE_GRAPH: u32 = 4;
pub const CU_GRAPH_NODE_TYPE_EMPTY: u32 = 5;
pub const CU_GRAPH_NODE_TYPE_WAIT_EVENT: u32 = 6;
pub const CU_GRAPH_NODE_TYPE_EVENT_RECORD: u32 = 7;
pub const CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL: u32 = 8;
pub const CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT: u32 = 9;
pub const CU_GRAPH_NODE_TYPE_MEM_ALLOC: u32 = 10;
pub const CU_GRAPH_NODE_TYPE_MEM_FREE: u32 = 11;
pub const CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: u32 = 12;
pub const CU_GRAPH_NODE_TYPE_CONDITIONAL: u32 = 13;

// CUstreamCaptureStatus
pub const CU_STREAM_CAPTURE_STATUS_NONE: u32 = 0;
pub const CU_STREAM_CAPTURE_STATUS_ACTIVE: u32 = 1;
pub const CU_STREAM_CAPTURE_STATUS_INVALIDATED: u32 = 2;

// CUstreamCaptureMode
pub const CU_STREAM_CAPTURE_MODE_GLOBAL: u32 = 0;
pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: u32 = 1;
pub const CU_STREAM_CAPTURE_MODE_RELAXED: u32 = 2;

/// Of `cuEventRecordWithFlags` in a capture: the record becomes a node instead of a dependency.
pub const CU_EVENT_RECORD_EXTERNAL: u32 = 1;
/// Of `cuStreamWaitEvent` in a capture: the wait becomes a node instead of a dependency.
pub const CU_EVENT_WAIT_EXTERNAL: u32 = 1;

/// Kernel nodes have priorities of their own.
pub const CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY: u32 = 8;

pub const CU_GRAPH_COND_ASSIGN_DEFAULT: u32 = 1;
pub const CU_GRAPH_COND_TYPE_SWITCH: u32 = 2;
pub const CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE: u32 = 1;
pub const CU_GRAPH_USER_OBJECT_MOVE: u32 = 1;
pub const CU_USER_OBJECT_NO_DESTRUCTOR_SYNC: u32 = 1;
