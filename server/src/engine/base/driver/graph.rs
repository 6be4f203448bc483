//! Graphs and stream capture.

use crate::engine::base::driver::symbols::{DriverError, Find, unsupported};
use mpsshim_api::cuda::*;
use std::ffi::{c_char, c_void};

functions! {
    /// Graphs and stream capture.
    /// A function that the driver lacks returns `CUDA_ERROR_NOT_SUPPORTED`.
    GraphFunctions, |_| true;
    begin_capture = "cuStreamBeginCapture_v2" (stream: CUstream, mode: u32);
    begin_capture_to = "cuStreamBeginCaptureToGraph" (stream: CUstream, graph: CUgraph, nodes: *const CUgraphNode, edges: *const CUgraphEdgeData, count: usize, mode: u32);
    end_capture = "cuStreamEndCapture" (stream: CUstream, graph: &mut CUgraph);
    is_capturing = "cuStreamIsCapturing" (stream: CUstream, status: &mut u32);
    capture_info = "cuStreamGetCaptureInfo_v2" (stream: CUstream, status: &mut u32, id: &mut u64, graph: &mut CUgraph, nodes: &mut *const CUgraphNode, count: &mut usize);
    capture_info_with_edges = "cuStreamGetCaptureInfo_v3" (stream: CUstream, status: &mut u32, id: &mut u64, graph: &mut CUgraph, nodes: &mut *const CUgraphNode, edges: &mut *const CUgraphEdgeData, count: &mut usize);
    update_capture = "cuStreamUpdateCaptureDependencies_v2" (stream: CUstream, nodes: *const CUgraphNode, edges: *const CUgraphEdgeData, count: usize, flags: u32);
    memcpy_async = "cuMemcpyAsync" (to: u64, from: u64, len: usize, stream: CUstream);
    create = "cuGraphCreate" (graph: &mut CUgraph, flags: u32);
    destroy = "cuGraphDestroy" (graph: CUgraph);
    duplicate = "cuGraphClone" (clone: &mut CUgraph, graph: CUgraph);
    find_in_clone = "cuGraphNodeFindInClone" (found: &mut CUgraphNode, node: CUgraphNode, clone: CUgraph);
    nodes = "cuGraphGetNodes" (graph: CUgraph, nodes: *mut CUgraphNode, count: &mut usize);
    roots = "cuGraphGetRootNodes" (graph: CUgraph, nodes: *mut CUgraphNode, count: &mut usize);
    edges = "cuGraphGetEdges_v2" (graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, edges: *mut CUgraphEdgeData, count: &mut usize);
    dependencies = "cuGraphNodeGetDependencies_v2" (node: CUgraphNode, nodes: *mut CUgraphNode, edges: *mut CUgraphEdgeData, count: &mut usize);
    dependents = "cuGraphNodeGetDependentNodes_v2" (node: CUgraphNode, nodes: *mut CUgraphNode, edges: *mut CUgraphEdgeData, count: &mut usize);
    add_dependencies = "cuGraphAddDependencies_v2" (graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, edges: *const CUgraphEdgeData, count: usize);
    remove_dependencies = "cuGraphRemoveDependencies_v2" (graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, edges: *const CUgraphEdgeData, count: usize);
    node_kind = "cuGraphNodeGetType" (node: CUgraphNode, kind: &mut u32);
    node_destroy = "cuGraphDestroyNode" (node: CUgraphNode);
    add_node = "cuGraphAddNode_v2" (node: &mut CUgraphNode, graph: CUgraph, nodes: *const CUgraphNode, edges: *const CUgraphEdgeData, count: usize, params: &mut CUgraphNodeParams);
    node_set = "cuGraphNodeSetParams" (node: CUgraphNode, params: &mut CUgraphNodeParams);
    exec_node_set = "cuGraphExecNodeSetParams" (exec: CUgraphExec, node: CUgraphNode, params: &mut CUgraphNodeParams);
    kernel_get = "cuGraphKernelNodeGetParams_v2" (node: CUgraphNode, params: &mut CUDA_KERNEL_NODE_PARAMS);
    exec_kernel_set = "cuGraphExecKernelNodeSetParams_v2" (exec: CUgraphExec, node: CUgraphNode, params: &CUDA_KERNEL_NODE_PARAMS);
    exec_batch_set = "cuGraphExecBatchMemOpNodeSetParams" (exec: CUgraphExec, node: CUgraphNode, params: &CUDA_BATCH_MEM_OP_NODE_PARAMS);
    memcpy_get = "cuGraphMemcpyNodeGetParams" (node: CUgraphNode, params: &mut CUDA_MEMCPY3D);
    memset_get = "cuGraphMemsetNodeGetParams" (node: CUgraphNode, params: &mut CUDA_MEMSET_NODE_PARAMS);
    child_get = "cuGraphChildGraphNodeGetGraph" (node: CUgraphNode, graph: &mut CUgraph);
    event_record_get = "cuGraphEventRecordNodeGetEvent" (node: CUgraphNode, event: &mut CUevent);
    event_wait_get = "cuGraphEventWaitNodeGetEvent" (node: CUgraphNode, event: &mut CUevent);
    mem_alloc_get = "cuGraphMemAllocNodeGetParams" (node: CUgraphNode, params: &mut CUDA_MEM_ALLOC_NODE_PARAMS);
    mem_free_get = "cuGraphMemFreeNodeGetParams" (node: CUgraphNode, address: &mut CUdeviceptr);
    batch_get = "cuGraphBatchMemOpNodeGetParams" (node: CUgraphNode, params: &mut CUDA_BATCH_MEM_OP_NODE_PARAMS);
    kernel_attribute_get = "cuGraphKernelNodeGetAttribute" (node: CUgraphNode, id: u32, value: &mut [u64; 8]);
    kernel_attribute_set = "cuGraphKernelNodeSetAttribute" (node: CUgraphNode, id: u32, value: &[u64; 8]);
    kernel_attributes_copy = "cuGraphKernelNodeCopyAttributes" (to: CUgraphNode, from: CUgraphNode);
    instantiate = "cuGraphInstantiateWithFlags" (exec: &mut CUgraphExec, graph: CUgraph, flags: u64);
    instantiate_with = "cuGraphInstantiateWithParams" (exec: &mut CUgraphExec, graph: CUgraph, params: &mut CUDA_GRAPH_INSTANTIATE_PARAMS);
    launch = "cuGraphLaunch" (exec: CUgraphExec, stream: CUstream);
    upload = "cuGraphUpload" (exec: CUgraphExec, stream: CUstream);
    exec_destroy = "cuGraphExecDestroy" (exec: CUgraphExec);
    exec_flags = "cuGraphExecGetFlags" (exec: CUgraphExec, flags: &mut u64);
    exec_update = "cuGraphExecUpdate_v2" (exec: CUgraphExec, graph: CUgraph, result: &mut CUgraphExecUpdateResultInfo);
    enabled = "cuGraphNodeGetEnabled" (exec: CUgraphExec, node: CUgraphNode, enabled: &mut u32);
    set_enabled = "cuGraphNodeSetEnabled" (exec: CUgraphExec, node: CUgraphNode, enabled: u32);
    dot = "cuGraphDebugDotPrint" (graph: CUgraph, path: *const c_char, flags: u32);
    memory_trim = "cuDeviceGraphMemTrim" (device: CUdevice);
    memory_get = "cuDeviceGetGraphMemAttribute" (device: CUdevice, attribute: u32, value: &mut u64);
    memory_set = "cuDeviceSetGraphMemAttribute" (device: CUdevice, attribute: u32, value: &mut u64);
    condition_create = "cuGraphConditionalHandleCreate" (handle: &mut u64, graph: CUgraph, context: CUcontext, default: u32, flags: u32);
}

impl GraphFunctions {
    /// Sets the priority of a kernel node (`cuGraphKernelNodeSetAttribute`).
    ///
    /// # Errors
    /// Driver errors.
    pub fn set_priority(&self, node: CUgraphNode, priority: i32) -> Result<(), CUresult> {
        // The value is the first word of a union.
        let mut value = [0; 8];
        value[0] = u64::from(priority.cast_unsigned());
        self.kernel_attribute_set(node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &value)
    }
}
