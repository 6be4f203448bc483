//! The rows of the table, one line for each base name, in the order of `driver-api.csv`.

/// Hands all rows to a macro. A row is
///
/// ```text
/// base name: [Class submits|idle after_fork?] { since: legacy symbol [/ per-thread symbol], … }
/// ```
///
/// `since` is 1000 * major + 10 * minor, or `EXPORT_ONLY`; the second symbol, that of the per-thread default stream, is
/// the first if it is omitted, and `-` stands for no symbol. `submits`: it submits work to the device, or something
/// that waits for the device. `after_fork`: it works in a forked child.
macro_rules! for_each_entry_point {
    ($callback:ident) => {
        $callback! {
            cuArray3DCreate: [Request idle] { 2000: cuArray3DCreate, 3020: cuArray3DCreate_v2 }
            cuArray3DGetDescriptor: [Local idle] { 2000: cuArray3DGetDescriptor, 3020: cuArray3DGetDescriptor_v2 }
            cuArrayCreate: [Request idle] { 2000: cuArrayCreate, 3020: cuArrayCreate_v2 }
            cuArrayDestroy: [Async idle] { 2000: cuArrayDestroy }
            cuArrayGetDescriptor: [Local idle] { 2000: cuArrayGetDescriptor, 3020: cuArrayGetDescriptor_v2 }
            cuArrayGetMemoryRequirements: [Request idle] { 11060: cuArrayGetMemoryRequirements }
            cuArrayGetPlane: [Request idle] { 11020: cuArrayGetPlane }
            cuArrayGetSparseProperties: [Request idle] { 11010: cuArrayGetSparseProperties }
            cuCheckpointProcessCheckpoint: [Absent(Checkpoints) idle] { 12080: cuCheckpointProcessCheckpoint }
            cuCheckpointProcessGetRestoreThreadId: [Absent(Checkpoints) idle] { 12080: cuCheckpointProcessGetRestoreThreadId }
            cuCheckpointProcessGetState: [Absent(Checkpoints) idle] { 12080: cuCheckpointProcessGetState }
            cuCheckpointProcessLock: [Absent(Checkpoints) idle] { 12080: cuCheckpointProcessLock }
            cuCheckpointProcessRestore: [Absent(Checkpoints) idle] { 12080: cuCheckpointProcessRestore }
            cuCheckpointProcessUnlock: [Absent(Checkpoints) idle] { 12080: cuCheckpointProcessUnlock }
            cuCoredumpGetAttribute: [Local idle] { 12010: cuCoredumpGetAttribute }
            cuCoredumpGetAttributeGlobal: [Genuine idle] { 12010: cuCoredumpGetAttributeGlobal }
            cuCoredumpSetAttribute: [Local idle] { 12010: cuCoredumpSetAttribute }
            cuCoredumpSetAttributeGlobal: [Genuine idle] { 12010: cuCoredumpSetAttributeGlobal }
            cuCtxAttach: [Local idle] { 2000: cuCtxAttach }
            cuCtxCreate: [Request idle] { 2000: cuCtxCreate, 3020: cuCtxCreate_v2, 11040: cuCtxCreate_v3, 12050: cuCtxCreate_v4 }
            cuCtxDestroy: [Async idle] { 2000: cuCtxDestroy, 4000: cuCtxDestroy_v2 }
            cuCtxDetach: [Custom idle] { 2000: cuCtxDetach }
            cuCtxDisablePeerAccess: [Request idle] { 4000: cuCtxDisablePeerAccess }
            cuCtxEnablePeerAccess: [Request idle] { 4000: cuCtxEnablePeerAccess }
            cuCtxFromGreenCtx: [Local idle] { 12040: cuCtxFromGreenCtx }
            cuCtxGetApiVersion: [Local idle] { 3020: cuCtxGetApiVersion }
            cuCtxGetCacheConfig: [Local idle] { 3020: cuCtxGetCacheConfig }
            cuCtxGetCurrent: [Local idle] { 4000: cuCtxGetCurrent }
            cuCtxGetDevResource: [Request idle] { 12040: cuCtxGetDevResource }
            cuCtxGetDevice: [Local idle] { 2000: cuCtxGetDevice, 13000: cuCtxGetDevice_v2 }
            cuCtxGetExecAffinity: [Local idle] { 11040: cuCtxGetExecAffinity }
            cuCtxGetFlags: [Local idle] { 7000: cuCtxGetFlags }
            cuCtxGetId: [Local idle] { 12000: cuCtxGetId }
            cuCtxGetLimit: [Request idle] { 3010: cuCtxGetLimit }
            cuCtxGetSharedMemConfig: [Local idle] { 4020: cuCtxGetSharedMemConfig }
            cuCtxGetStreamPriorityRange: [Local idle] { 5050: cuCtxGetStreamPriorityRange }
            cuCtxPopCurrent: [Local idle] { 2000: cuCtxPopCurrent, 4000: cuCtxPopCurrent_v2 }
            cuCtxPushCurrent: [Local idle] { 2000: cuCtxPushCurrent, 4000: cuCtxPushCurrent_v2 }
            cuCtxRecordEvent: [Async idle] { 12050: cuCtxRecordEvent }
            cuCtxResetPersistingL2Cache: [Local idle] { 11000: cuCtxResetPersistingL2Cache }
            cuCtxSetCacheConfig: [Local idle] { 3020: cuCtxSetCacheConfig }
            cuCtxSetCurrent: [Local idle] { 4000: cuCtxSetCurrent }
            cuCtxSetFlags: [Local idle] { 12010: cuCtxSetFlags }
            cuCtxSetLimit: [Request idle] { 3010: cuCtxSetLimit }
            cuCtxSetSharedMemConfig: [Local idle] { 4020: cuCtxSetSharedMemConfig }
            cuCtxSynchronize: [Custom idle] { 2000: cuCtxSynchronize, 13000: cuCtxSynchronize_v2 }
            cuCtxWaitEvent: [Async idle] { 12050: cuCtxWaitEvent }
            cuDestroyExternalMemory: [Absent(External) idle] { 10000: cuDestroyExternalMemory }
            cuDestroyExternalSemaphore: [Absent(External) idle] { 10000: cuDestroyExternalSemaphore }
            cuDevResourceGenerateDesc: [Request idle] { 12040: cuDevResourceGenerateDesc }
            cuDevSmResourceSplitByCount: [Request idle] { 12040: cuDevSmResourceSplitByCount }
            cuDeviceCanAccessPeer: [Genuine idle] { 4000: cuDeviceCanAccessPeer }
            cuDeviceComputeCapability: [Genuine idle] { 2000: cuDeviceComputeCapability }
            cuDeviceGet: [Genuine idle] { 2000: cuDeviceGet }
            cuDeviceGetAttribute: [Local idle] { 2000: cuDeviceGetAttribute }
            cuDeviceGetByPCIBusId: [Genuine idle] { 4010: cuDeviceGetByPCIBusId }
            cuDeviceGetCount: [Genuine idle] { 2000: cuDeviceGetCount }
            cuDeviceGetDefaultMemPool: [Local idle] { 11020: cuDeviceGetDefaultMemPool }
            cuDeviceGetDevResource: [Request idle] { 12040: cuDeviceGetDevResource }
            cuDeviceGetExecAffinitySupport: [Genuine idle] { 11040: cuDeviceGetExecAffinitySupport }
            cuDeviceGetGraphMemAttribute: [Request idle] { 11040: cuDeviceGetGraphMemAttribute }
            cuDeviceGetHostAtomicCapabilities: [Genuine idle] { 13000: cuDeviceGetHostAtomicCapabilities }
            cuDeviceGetLuid: [Genuine idle] { 10000: cuDeviceGetLuid }
            cuDeviceGetMemPool: [Local idle] { 11020: cuDeviceGetMemPool }
            cuDeviceGetName: [Genuine idle] { 2000: cuDeviceGetName }
            cuDeviceGetNvSciSyncAttributes: [Genuine idle] { 10020: cuDeviceGetNvSciSyncAttributes }
            cuDeviceGetP2PAtomicCapabilities: [Genuine idle] { 13000: cuDeviceGetP2PAtomicCapabilities }
            cuDeviceGetP2PAttribute: [Genuine idle] { 8000: cuDeviceGetP2PAttribute }
            cuDeviceGetPCIBusId: [Genuine idle] { 4010: cuDeviceGetPCIBusId }
            cuDeviceGetProperties: [Genuine idle] { 2000: cuDeviceGetProperties }
            cuDeviceGetTexture1DLinearMaxWidth: [Genuine idle] { 11010: cuDeviceGetTexture1DLinearMaxWidth }
            cuDeviceGetUuid: [Genuine idle] { 9020: cuDeviceGetUuid, 11040: cuDeviceGetUuid_v2 }
            cuDeviceGraphMemTrim: [Request idle] { 11040: cuDeviceGraphMemTrim }
            cuDevicePrimaryCtxGetState: [Local idle] { 7000: cuDevicePrimaryCtxGetState }
            cuDevicePrimaryCtxRelease: [Async idle] { 7000: cuDevicePrimaryCtxRelease, 11000: cuDevicePrimaryCtxRelease_v2 }
            cuDevicePrimaryCtxReset: [Async idle] { 7000: cuDevicePrimaryCtxReset, 11000: cuDevicePrimaryCtxReset_v2 }
            cuDevicePrimaryCtxRetain: [Request idle] { 7000: cuDevicePrimaryCtxRetain }
            cuDevicePrimaryCtxSetFlags: [Local idle] { 7000: cuDevicePrimaryCtxSetFlags, 11000: cuDevicePrimaryCtxSetFlags_v2 }
            cuDeviceRegisterAsyncNotification: [Local idle] { 12040: cuDeviceRegisterAsyncNotification }
            cuDeviceSetGraphMemAttribute: [Request idle] { 11040: cuDeviceSetGraphMemAttribute }
            cuDeviceSetMemPool: [Local idle] { 11020: cuDeviceSetMemPool }
            cuDeviceTotalMem: [Local idle] { 2000: cuDeviceTotalMem, 3020: cuDeviceTotalMem_v2 }
            cuDeviceUnregisterAsyncNotification: [Local idle] { 12040: cuDeviceUnregisterAsyncNotification }
            cuDriverGetVersion: [Genuine idle after_fork] { 2020: cuDriverGetVersion }
            cuEGLStreamConsumerAcquireFrame: [Absent(Graphics) submits] { 7000: cuEGLStreamConsumerAcquireFrame }
            cuEGLStreamConsumerConnect: [Absent(Graphics) idle] { 7000: cuEGLStreamConsumerConnect }
            cuEGLStreamConsumerConnectWithFlags: [Absent(Graphics) idle] { 8000: cuEGLStreamConsumerConnectWithFlags }
            cuEGLStreamConsumerDisconnect: [Absent(Graphics) idle] { 7000: cuEGLStreamConsumerDisconnect }
            cuEGLStreamConsumerReleaseFrame: [Absent(Graphics) submits] { 7000: cuEGLStreamConsumerReleaseFrame }
            cuEGLStreamProducerConnect: [Absent(Graphics) idle] { 7000: cuEGLStreamProducerConnect }
            cuEGLStreamProducerDisconnect: [Absent(Graphics) idle] { 7000: cuEGLStreamProducerDisconnect }
            cuEGLStreamProducerPresentFrame: [Absent(Graphics) submits] { 7000: cuEGLStreamProducerPresentFrame }
            cuEGLStreamProducerReturnFrame: [Absent(Graphics) submits] { 7000: cuEGLStreamProducerReturnFrame }
            cuEventCreate: [Async idle] { 2000: cuEventCreate }
            cuEventDestroy: [Async idle] { 2000: cuEventDestroy, 4000: cuEventDestroy_v2 }
            cuEventElapsedTime: [Request idle] { 2000: cuEventElapsedTime, 12080: cuEventElapsedTime_v2 }
            cuEventQuery: [Custom idle] { 2000: cuEventQuery }
            cuEventRecord: [Async idle] { 2000: cuEventRecord / -, 7000: cuEventRecord / cuEventRecord_ptsz }
            cuEventRecordWithFlags: [Async idle] { 11010: cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz }
            cuEventSynchronize: [Custom idle] { 2000: cuEventSynchronize }
            cuExternalMemoryGetMappedBuffer: [Absent(External) idle] { 10000: cuExternalMemoryGetMappedBuffer }
            cuExternalMemoryGetMappedMipmappedArray: [Absent(External) idle] { 10000: cuExternalMemoryGetMappedMipmappedArray }
            cuFlushGPUDirectRDMAWrites: [Local idle] { 11030: cuFlushGPUDirectRDMAWrites }
            cuFuncGetAttribute: [Request idle] { 2020: cuFuncGetAttribute }
            cuFuncGetModule: [Local idle] { 11000: cuFuncGetModule }
            cuFuncGetName: [Local idle] { 12030: cuFuncGetName }
            cuFuncGetParamInfo: [Local idle] { 12040: cuFuncGetParamInfo }
            cuFuncIsLoaded: [Local idle] { 12040: cuFuncIsLoaded }
            cuFuncLoad: [Local idle] { 12040: cuFuncLoad }
            cuFuncSetAttribute: [Request idle] { 9000: cuFuncSetAttribute }
            cuFuncSetBlockShape: [Local idle] { 2000: cuFuncSetBlockShape }
            cuFuncSetCacheConfig: [Local idle] { 3000: cuFuncSetCacheConfig }
            cuFuncSetSharedMemConfig: [Local idle] { 4020: cuFuncSetSharedMemConfig }
            cuFuncSetSharedSize: [Local idle] { 2000: cuFuncSetSharedSize }
            cuGLCtxCreate: [Absent(Graphics) idle] { 2000: cuGLCtxCreate, 3020: cuGLCtxCreate_v2 }
            cuGLGetDevices: [Absent(Graphics) idle] { 4010: cuGLGetDevices, 6050: cuGLGetDevices_v2 }
            cuGLInit: [Absent(Graphics) idle] { 2000: cuGLInit }
            cuGLMapBufferObject: [Absent(Graphics) submits] { 2000: cuGLMapBufferObject / -, 3020: cuGLMapBufferObject_v2 / -, 7000: cuGLMapBufferObject_v2 / cuGLMapBufferObject_v2_ptds }
            cuGLMapBufferObjectAsync: [Absent(Graphics) submits] { 2030: cuGLMapBufferObjectAsync / -, 3020: cuGLMapBufferObjectAsync_v2 / -, 7000: cuGLMapBufferObjectAsync_v2 / cuGLMapBufferObjectAsync_v2_ptsz }
            cuGLRegisterBufferObject: [Absent(Graphics) idle] { 2000: cuGLRegisterBufferObject }
            cuGLSetBufferObjectMapFlags: [Absent(Graphics) idle] { 2030: cuGLSetBufferObjectMapFlags }
            cuGLUnmapBufferObject: [Absent(Graphics) submits] { 2000: cuGLUnmapBufferObject }
            cuGLUnmapBufferObjectAsync: [Absent(Graphics) submits] { 2030: cuGLUnmapBufferObjectAsync }
            cuGLUnregisterBufferObject: [Absent(Graphics) idle] { 2000: cuGLUnregisterBufferObject }
            cuGetErrorName: [Genuine idle after_fork] { 6000: cuGetErrorName }
            cuGetErrorString: [Genuine idle after_fork] { 6000: cuGetErrorString }
            cuGetExportTable: [Local idle] { 3000: cuGetExportTable }
            cuGetProcAddress: [Local idle after_fork] { 11030: cuGetProcAddress, 12000: cuGetProcAddress_v2 }
            cuGraphAddBatchMemOpNode: [Request idle] { 11070: cuGraphAddBatchMemOpNode }
            cuGraphAddChildGraphNode: [Request idle] { 10000: cuGraphAddChildGraphNode }
            cuGraphAddDependencies: [Request idle] { 10000: cuGraphAddDependencies, 12030: cuGraphAddDependencies_v2 }
            cuGraphAddEmptyNode: [Request idle] { 10000: cuGraphAddEmptyNode }
            cuGraphAddEventRecordNode: [Request idle] { 11010: cuGraphAddEventRecordNode }
            cuGraphAddEventWaitNode: [Request idle] { 11010: cuGraphAddEventWaitNode }
            cuGraphAddExternalSemaphoresSignalNode: [Absent(External) idle] { 11020: cuGraphAddExternalSemaphoresSignalNode }
            cuGraphAddExternalSemaphoresWaitNode: [Absent(External) idle] { 11020: cuGraphAddExternalSemaphoresWaitNode }
            cuGraphAddHostNode: [Request idle] { 10000: cuGraphAddHostNode }
            cuGraphAddKernelNode: [Request idle] { 10000: cuGraphAddKernelNode, 12000: cuGraphAddKernelNode_v2 }
            cuGraphAddMemAllocNode: [Request idle] { 11040: cuGraphAddMemAllocNode }
            cuGraphAddMemFreeNode: [Request idle] { 11040: cuGraphAddMemFreeNode }
            cuGraphAddMemcpyNode: [Request idle] { 10000: cuGraphAddMemcpyNode }
            cuGraphAddMemsetNode: [Request idle] { 10000: cuGraphAddMemsetNode }
            cuGraphAddNode: [Request idle] { 12020: cuGraphAddNode, 12030: cuGraphAddNode_v2 }
            cuGraphBatchMemOpNodeGetParams: [Request idle] { 11070: cuGraphBatchMemOpNodeGetParams }
            cuGraphBatchMemOpNodeSetParams: [Request idle] { 11070: cuGraphBatchMemOpNodeSetParams }
            cuGraphChildGraphNodeGetGraph: [Request idle] { 10000: cuGraphChildGraphNodeGetGraph }
            cuGraphClone: [Request idle] { 10000: cuGraphClone }
            cuGraphConditionalHandleCreate: [Request idle] { 12030: cuGraphConditionalHandleCreate }
            cuGraphCreate: [Request idle] { 10000: cuGraphCreate }
            cuGraphDebugDotPrint: [Request idle] { 11030: cuGraphDebugDotPrint }
            cuGraphDestroy: [Request idle] { 10000: cuGraphDestroy }
            cuGraphDestroyNode: [Request idle] { 10000: cuGraphDestroyNode }
            cuGraphEventRecordNodeGetEvent: [Request idle] { 11010: cuGraphEventRecordNodeGetEvent }
            cuGraphEventRecordNodeSetEvent: [Request idle] { 11010: cuGraphEventRecordNodeSetEvent }
            cuGraphEventWaitNodeGetEvent: [Request idle] { 11010: cuGraphEventWaitNodeGetEvent }
            cuGraphEventWaitNodeSetEvent: [Request idle] { 11010: cuGraphEventWaitNodeSetEvent }
            cuGraphExecBatchMemOpNodeSetParams: [Request idle] { 11070: cuGraphExecBatchMemOpNodeSetParams }
            cuGraphExecChildGraphNodeSetParams: [Request idle] { 11010: cuGraphExecChildGraphNodeSetParams }
            cuGraphExecDestroy: [Request idle] { 10000: cuGraphExecDestroy }
            cuGraphExecEventRecordNodeSetEvent: [Request idle] { 11010: cuGraphExecEventRecordNodeSetEvent }
            cuGraphExecEventWaitNodeSetEvent: [Request idle] { 11010: cuGraphExecEventWaitNodeSetEvent }
            cuGraphExecExternalSemaphoresSignalNodeSetParams: [Absent(External) idle] { 11020: cuGraphExecExternalSemaphoresSignalNodeSetParams }
            cuGraphExecExternalSemaphoresWaitNodeSetParams: [Absent(External) idle] { 11020: cuGraphExecExternalSemaphoresWaitNodeSetParams }
            cuGraphExecGetFlags: [Request idle] { 12000: cuGraphExecGetFlags }
            cuGraphExecHostNodeSetParams: [Request idle] { 10020: cuGraphExecHostNodeSetParams }
            cuGraphExecKernelNodeSetParams: [Request idle] { 10010: cuGraphExecKernelNodeSetParams, 12000: cuGraphExecKernelNodeSetParams_v2 }
            cuGraphExecMemcpyNodeSetParams: [Request idle] { 10020: cuGraphExecMemcpyNodeSetParams }
            cuGraphExecMemsetNodeSetParams: [Request idle] { 10020: cuGraphExecMemsetNodeSetParams }
            cuGraphExecNodeSetParams: [Request idle] { 12020: cuGraphExecNodeSetParams }
            cuGraphExecUpdate: [Request idle] { 10020: cuGraphExecUpdate, 12000: cuGraphExecUpdate_v2 }
            cuGraphExternalSemaphoresSignalNodeGetParams: [Absent(External) idle] { 11020: cuGraphExternalSemaphoresSignalNodeGetParams }
            cuGraphExternalSemaphoresSignalNodeSetParams: [Absent(External) idle] { 11020: cuGraphExternalSemaphoresSignalNodeSetParams }
            cuGraphExternalSemaphoresWaitNodeGetParams: [Absent(External) idle] { 11020: cuGraphExternalSemaphoresWaitNodeGetParams }
            cuGraphExternalSemaphoresWaitNodeSetParams: [Absent(External) idle] { 11020: cuGraphExternalSemaphoresWaitNodeSetParams }
            cuGraphGetEdges: [Request idle] { 10000: cuGraphGetEdges, 12030: cuGraphGetEdges_v2 }
            cuGraphGetNodes: [Request idle] { 10000: cuGraphGetNodes }
            cuGraphGetRootNodes: [Request idle] { 10000: cuGraphGetRootNodes }
            cuGraphHostNodeGetParams: [Request idle] { 10000: cuGraphHostNodeGetParams }
            cuGraphHostNodeSetParams: [Request idle] { 10000: cuGraphHostNodeSetParams }
            cuGraphInstantiate: [Request idle] { 10000: cuGraphInstantiate, 11000: cuGraphInstantiate_v2 }
            cuGraphInstantiateWithFlags: [Request idle] { 11040: cuGraphInstantiateWithFlags }
            cuGraphInstantiateWithParams: [Request submits] { 12000: cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz }
            cuGraphKernelNodeCopyAttributes: [Request idle] { 11000: cuGraphKernelNodeCopyAttributes }
            cuGraphKernelNodeGetAttribute: [Request idle] { 11000: cuGraphKernelNodeGetAttribute }
            cuGraphKernelNodeGetParams: [Request idle] { 10000: cuGraphKernelNodeGetParams, 12000: cuGraphKernelNodeGetParams_v2 }
            cuGraphKernelNodeSetAttribute: [Request idle] { 11000: cuGraphKernelNodeSetAttribute }
            cuGraphKernelNodeSetParams: [Request idle] { 10000: cuGraphKernelNodeSetParams, 12000: cuGraphKernelNodeSetParams_v2 }
            cuGraphLaunch: [Async submits] { 10000: cuGraphLaunch / cuGraphLaunch_ptsz }
            cuGraphMemAllocNodeGetParams: [Request idle] { 11040: cuGraphMemAllocNodeGetParams }
            cuGraphMemFreeNodeGetParams: [Request idle] { 11040: cuGraphMemFreeNodeGetParams }
            cuGraphMemcpyNodeGetParams: [Request idle] { 10000: cuGraphMemcpyNodeGetParams }
            cuGraphMemcpyNodeSetParams: [Request idle] { 10000: cuGraphMemcpyNodeSetParams }
            cuGraphMemsetNodeGetParams: [Request idle] { 10000: cuGraphMemsetNodeGetParams }
            cuGraphMemsetNodeSetParams: [Request idle] { 10000: cuGraphMemsetNodeSetParams }
            cuGraphNodeFindInClone: [Request idle] { 10000: cuGraphNodeFindInClone }
            cuGraphNodeGetDependencies: [Request idle] { 10000: cuGraphNodeGetDependencies, 12030: cuGraphNodeGetDependencies_v2 }
            cuGraphNodeGetDependentNodes: [Request idle] { 10000: cuGraphNodeGetDependentNodes, 12030: cuGraphNodeGetDependentNodes_v2 }
            cuGraphNodeGetEnabled: [Request idle] { 11060: cuGraphNodeGetEnabled }
            cuGraphNodeGetType: [Request idle] { 10000: cuGraphNodeGetType }
            cuGraphNodeSetEnabled: [Request idle] { 11060: cuGraphNodeSetEnabled }
            cuGraphNodeSetParams: [Request idle] { 12020: cuGraphNodeSetParams }
            cuGraphReleaseUserObject: [Local idle] { 11030: cuGraphReleaseUserObject }
            cuGraphRemoveDependencies: [Request idle] { 10000: cuGraphRemoveDependencies, 12030: cuGraphRemoveDependencies_v2 }
            cuGraphRetainUserObject: [Local idle] { 11030: cuGraphRetainUserObject }
            cuGraphUpload: [Async submits] { 11010: cuGraphUpload / cuGraphUpload_ptsz }
            cuGraphicsEGLRegisterImage: [Absent(Graphics) idle] { 7000: cuGraphicsEGLRegisterImage }
            cuGraphicsGLRegisterBuffer: [Absent(Graphics) idle] { 3000: cuGraphicsGLRegisterBuffer }
            cuGraphicsGLRegisterImage: [Absent(Graphics) idle] { 3000: cuGraphicsGLRegisterImage }
            cuGraphicsMapResources: [Absent(Graphics) submits] { 3000: cuGraphicsMapResources / -, 7000: cuGraphicsMapResources / cuGraphicsMapResources_ptsz }
            cuGraphicsResourceGetMappedEglFrame: [Absent(Graphics) idle] { 7000: cuGraphicsResourceGetMappedEglFrame }
            cuGraphicsResourceGetMappedMipmappedArray: [Absent(Graphics) idle] { 5000: cuGraphicsResourceGetMappedMipmappedArray }
            cuGraphicsResourceGetMappedPointer: [Absent(Graphics) idle] { 3000: cuGraphicsResourceGetMappedPointer, 3020: cuGraphicsResourceGetMappedPointer_v2 }
            cuGraphicsResourceSetMapFlags: [Absent(Graphics) idle] { 3000: cuGraphicsResourceSetMapFlags, 6050: cuGraphicsResourceSetMapFlags_v2 }
            cuGraphicsSubResourceGetMappedArray: [Absent(Graphics) idle] { 3000: cuGraphicsSubResourceGetMappedArray }
            cuGraphicsUnmapResources: [Absent(Graphics) submits] { 3000: cuGraphicsUnmapResources / -, 7000: cuGraphicsUnmapResources / cuGraphicsUnmapResources_ptsz }
            cuGraphicsUnregisterResource: [Absent(Graphics) idle] { 3000: cuGraphicsUnregisterResource }
            cuGraphicsVDPAURegisterOutputSurface: [Absent(Graphics) idle] { 3010: cuGraphicsVDPAURegisterOutputSurface }
            cuGraphicsVDPAURegisterVideoSurface: [Absent(Graphics) idle] { 3010: cuGraphicsVDPAURegisterVideoSurface }
            cuGreenCtxCreate: [Request idle] { 12040: cuGreenCtxCreate }
            cuGreenCtxDestroy: [Async idle] { 12040: cuGreenCtxDestroy }
            cuGreenCtxGetDevResource: [Request idle] { 12040: cuGreenCtxGetDevResource }
            cuGreenCtxGetId: [Local idle] { 12090: cuGreenCtxGetId }
            cuGreenCtxRecordEvent: [Async idle] { 12040: cuGreenCtxRecordEvent }
            cuGreenCtxStreamCreate: [Async idle] { 12050: cuGreenCtxStreamCreate }
            cuGreenCtxWaitEvent: [Async idle] { 12040: cuGreenCtxWaitEvent }
            cuImportExternalMemory: [Absent(External) idle] { 10000: cuImportExternalMemory }
            cuImportExternalSemaphore: [Absent(External) idle] { 10000: cuImportExternalSemaphore }
            cuInit: [Custom idle] { 2000: cuInit }
            cuIpcCloseMemHandle: [Async idle] { 4010: cuIpcCloseMemHandle }
            cuIpcGetEventHandle: [Request idle] { 4010: cuIpcGetEventHandle }
            cuIpcGetMemHandle: [Request idle] { 4010: cuIpcGetMemHandle }
            cuIpcOpenEventHandle: [Request idle] { 4010: cuIpcOpenEventHandle }
            cuIpcOpenMemHandle: [Request idle] { 4010: cuIpcOpenMemHandle, 11000: cuIpcOpenMemHandle_v2 }
            cuKernelGetAttribute: [Request idle] { 12000: cuKernelGetAttribute }
            cuKernelGetFunction: [Request idle] { 12000: cuKernelGetFunction }
            cuKernelGetLibrary: [Local idle] { 12050: cuKernelGetLibrary }
            cuKernelGetName: [Local idle] { 12030: cuKernelGetName }
            cuKernelGetParamInfo: [Request idle] { 12040: cuKernelGetParamInfo }
            cuKernelSetAttribute: [Request idle] { 12000: cuKernelSetAttribute }
            cuKernelSetCacheConfig: [Local idle] { 12000: cuKernelSetCacheConfig }
            cuLaunch: [Custom submits] { 2000: cuLaunch }
            cuLaunchCooperativeKernel: [Custom submits] { 9000: cuLaunchCooperativeKernel / cuLaunchCooperativeKernel_ptsz }
            cuLaunchCooperativeKernelMultiDevice: [Custom submits] { 9000: cuLaunchCooperativeKernelMultiDevice }
            cuLaunchGrid: [Custom submits] { 2000: cuLaunchGrid }
            cuLaunchGridAsync: [Custom submits] { 2000: cuLaunchGridAsync }
            cuLaunchHostFunc: [Custom submits] { 10000: cuLaunchHostFunc / cuLaunchHostFunc_ptsz }
            cuLaunchKernel: [Custom submits] { 4000: cuLaunchKernel / -, 7000: cuLaunchKernel / cuLaunchKernel_ptsz }
            cuLaunchKernelEx: [Custom submits] { 11060: cuLaunchKernelEx / cuLaunchKernelEx_ptsz }
            cuLibraryEnumerateKernels: [Request idle] { 12040: cuLibraryEnumerateKernels }
            cuLibraryGetGlobal: [Request idle] { 12000: cuLibraryGetGlobal }
            cuLibraryGetKernel: [Request idle] { 12000: cuLibraryGetKernel }
            cuLibraryGetKernelCount: [Request idle] { 12040: cuLibraryGetKernelCount }
            cuLibraryGetManaged: [Request idle] { 12000: cuLibraryGetManaged }
            cuLibraryGetModule: [Custom idle] { 12000: cuLibraryGetModule }
            cuLibraryGetUnifiedFunction: [Local idle] { 12000: cuLibraryGetUnifiedFunction }
            cuLibraryLoadData: [Custom idle] { 12000: cuLibraryLoadData }
            cuLibraryLoadFromFile: [Custom idle] { 12000: cuLibraryLoadFromFile }
            cuLibraryUnload: [Async idle] { 12000: cuLibraryUnload }
            cuLinkAddData: [Custom idle] { 5050: cuLinkAddData, 6050: cuLinkAddData_v2 }
            cuLinkAddFile: [Custom idle] { 5050: cuLinkAddFile, 6050: cuLinkAddFile_v2 }
            cuLinkComplete: [Custom idle] { 5050: cuLinkComplete }
            cuLinkCreate: [Request idle] { 5050: cuLinkCreate, 6050: cuLinkCreate_v2 }
            cuLinkDestroy: [Async idle] { 5050: cuLinkDestroy }
            cuLogsCurrent: [Genuine idle] { 12090: cuLogsCurrent }
            cuLogsDumpToFile: [Genuine idle] { 12090: cuLogsDumpToFile }
            cuLogsDumpToMemory: [Genuine idle] { 12090: cuLogsDumpToMemory }
            cuLogsRegisterCallback: [Genuine idle] { 12090: cuLogsRegisterCallback }
            cuLogsUnregisterCallback: [Genuine idle] { 12090: cuLogsUnregisterCallback }
            cuMemAddressFree: [Async idle] { 10020: cuMemAddressFree }
            cuMemAddressReserve: [Request idle] { 10020: cuMemAddressReserve }
            cuMemAdvise: [Local idle] { 8000: cuMemAdvise, 12020: cuMemAdvise_v2 }
            cuMemAlloc: [Request idle] { 2000: cuMemAlloc, 3020: cuMemAlloc_v2 }
            cuMemAllocAsync: [Request submits] { 11020: cuMemAllocAsync / cuMemAllocAsync_ptsz }
            cuMemAllocFromPoolAsync: [Request submits] { 11020: cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz }
            cuMemAllocHost: [Request idle] { 2000: cuMemAllocHost, 3020: cuMemAllocHost_v2 }
            cuMemAllocManaged: [Request idle] { 6000: cuMemAllocManaged }
            cuMemAllocPitch: [Request idle] { 2000: cuMemAllocPitch, 3020: cuMemAllocPitch_v2 }
            cuMemBatchDecompressAsync: [Absent(Decompression) submits] { 12060: cuMemBatchDecompressAsync / cuMemBatchDecompressAsync_ptsz }
            cuMemCreate: [Request idle] { 10020: cuMemCreate }
            cuMemDiscardAndPrefetchBatchAsync: [Local submits] { 13000: cuMemDiscardAndPrefetchBatchAsync / cuMemDiscardAndPrefetchBatchAsync_ptsz }
            cuMemDiscardBatchAsync: [Local submits] { 13000: cuMemDiscardBatchAsync / cuMemDiscardBatchAsync_ptsz }
            cuMemExportToShareableHandle: [Request idle] { 10020: cuMemExportToShareableHandle }
            cuMemFree: [Async idle] { 2000: cuMemFree, 3020: cuMemFree_v2 }
            cuMemFreeAsync: [Async submits] { 11020: cuMemFreeAsync / cuMemFreeAsync_ptsz }
            cuMemFreeHost: [Async idle] { 2000: cuMemFreeHost }
            cuMemGetAccess: [Request idle] { 10020: cuMemGetAccess }
            cuMemGetAddressRange: [Local idle] { 2000: cuMemGetAddressRange, 3020: cuMemGetAddressRange_v2 }
            cuMemGetAllocationGranularity: [Request idle] { 10020: cuMemGetAllocationGranularity }
            cuMemGetAllocationPropertiesFromHandle: [Local idle] { 10020: cuMemGetAllocationPropertiesFromHandle }
            cuMemGetDefaultMemPool: [Local idle] { 13000: cuMemGetDefaultMemPool }
            cuMemGetHandleForAddressRange: [Request idle] { 11070: cuMemGetHandleForAddressRange }
            cuMemGetInfo: [Request idle] { 2000: cuMemGetInfo, 3020: cuMemGetInfo_v2 }
            cuMemGetMemPool: [Local idle] { 13000: cuMemGetMemPool }
            cuMemHostAlloc: [Request idle] { 2020: cuMemHostAlloc }
            cuMemHostGetDevicePointer: [Local idle] { 2020: cuMemHostGetDevicePointer, 3020: cuMemHostGetDevicePointer_v2 }
            cuMemHostGetFlags: [Local idle] { 2030: cuMemHostGetFlags }
            cuMemHostRegister: [Request idle] { 4000: cuMemHostRegister, 6050: cuMemHostRegister_v2 }
            cuMemHostUnregister: [Async idle] { 4000: cuMemHostUnregister }
            cuMemImportFromShareableHandle: [Request idle] { 10020: cuMemImportFromShareableHandle }
            cuMemMap: [Request idle] { 10020: cuMemMap }
            cuMemMapArrayAsync: [Absent(SparseArrays) submits] { 11010: cuMemMapArrayAsync / cuMemMapArrayAsync_ptsz }
            cuMemPoolCreate: [Request idle] { 11020: cuMemPoolCreate }
            cuMemPoolDestroy: [Async idle] { 11020: cuMemPoolDestroy }
            cuMemPoolExportPointer: [Request idle] { 11020: cuMemPoolExportPointer }
            cuMemPoolExportToShareableHandle: [Request idle] { 11020: cuMemPoolExportToShareableHandle }
            cuMemPoolGetAccess: [Request idle] { 11020: cuMemPoolGetAccess }
            cuMemPoolGetAttribute: [Request idle] { 11020: cuMemPoolGetAttribute }
            cuMemPoolImportFromShareableHandle: [Request idle] { 11020: cuMemPoolImportFromShareableHandle }
            cuMemPoolImportPointer: [Request idle] { 11020: cuMemPoolImportPointer }
            cuMemPoolSetAccess: [Request idle] { 11020: cuMemPoolSetAccess }
            cuMemPoolSetAttribute: [Request idle] { 11020: cuMemPoolSetAttribute }
            cuMemPoolTrimTo: [Request idle] { 11020: cuMemPoolTrimTo }
            cuMemPrefetchAsync: [Local submits] { 8000: cuMemPrefetchAsync / cuMemPrefetchAsync_ptsz, 12020: cuMemPrefetchAsync_v2 / cuMemPrefetchAsync_v2_ptsz }
            cuMemPrefetchBatchAsync: [Local submits] { 13000: cuMemPrefetchBatchAsync / cuMemPrefetchBatchAsync_ptsz }
            cuMemRangeGetAttribute: [Local idle] { 8000: cuMemRangeGetAttribute }
            cuMemRangeGetAttributes: [Local idle] { 8000: cuMemRangeGetAttributes }
            cuMemRelease: [Async idle] { 10020: cuMemRelease }
            cuMemRetainAllocationHandle: [Local idle] { 11000: cuMemRetainAllocationHandle }
            cuMemSetAccess: [Request idle] { 10020: cuMemSetAccess }
            cuMemSetMemPool: [Local idle] { 13000: cuMemSetMemPool }
            cuMemUnmap: [Request idle] { 10020: cuMemUnmap }
            cuMemcpy: [Custom submits] { 4000: cuMemcpy / -, 7000: cuMemcpy / cuMemcpy_ptds }
            cuMemcpy2D: [Custom submits] { 2000: cuMemcpy2D / -, 3020: cuMemcpy2D_v2 / -, 7000: cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds }
            cuMemcpy2DAsync: [Custom submits] { 2000: cuMemcpy2DAsync / -, 3020: cuMemcpy2DAsync_v2 / -, 7000: cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz }
            cuMemcpy2DUnaligned: [Custom submits] { 2000: cuMemcpy2DUnaligned / -, 3020: cuMemcpy2DUnaligned_v2 / -, 7000: cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds }
            cuMemcpy3D: [Custom submits] { 2000: cuMemcpy3D / -, 3020: cuMemcpy3D_v2 / -, 7000: cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds }
            cuMemcpy3DAsync: [Custom submits] { 2000: cuMemcpy3DAsync / -, 3020: cuMemcpy3DAsync_v2 / -, 7000: cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz }
            cuMemcpy3DBatchAsync: [Custom submits] { 12080: cuMemcpy3DBatchAsync / cuMemcpy3DBatchAsync_ptsz, 13000: cuMemcpy3DBatchAsync_v2 / cuMemcpy3DBatchAsync_v2_ptsz }
            cuMemcpy3DPeer: [Custom submits] { 4000: cuMemcpy3DPeer / -, 7000: cuMemcpy3DPeer / cuMemcpy3DPeer_ptds }
            cuMemcpy3DPeerAsync: [Custom submits] { 4000: cuMemcpy3DPeerAsync / -, 7000: cuMemcpy3DPeerAsync / cuMemcpy3DPeerAsync_ptsz }
            cuMemcpyAsync: [Custom submits] { 4000: cuMemcpyAsync / -, 7000: cuMemcpyAsync / cuMemcpyAsync_ptsz }
            cuMemcpyAtoA: [Custom submits] { 2000: cuMemcpyAtoA / -, 3020: cuMemcpyAtoA_v2 / -, 7000: cuMemcpyAtoA_v2 / cuMemcpyAtoA_v2_ptds }
            cuMemcpyAtoD: [Custom submits] { 2000: cuMemcpyAtoD / -, 3020: cuMemcpyAtoD_v2 / -, 7000: cuMemcpyAtoD_v2 / cuMemcpyAtoD_v2_ptds }
            cuMemcpyAtoH: [Custom submits] { 2000: cuMemcpyAtoH / -, 3020: cuMemcpyAtoH_v2 / -, 7000: cuMemcpyAtoH_v2 / cuMemcpyAtoH_v2_ptds }
            cuMemcpyAtoHAsync: [Custom submits] { 2000: cuMemcpyAtoHAsync / -, 3020: cuMemcpyAtoHAsync_v2 / -, 7000: cuMemcpyAtoHAsync_v2 / cuMemcpyAtoHAsync_v2_ptsz }
            cuMemcpyBatchAsync: [Custom submits] { 12080: cuMemcpyBatchAsync / cuMemcpyBatchAsync_ptsz, 13000: cuMemcpyBatchAsync_v2 / cuMemcpyBatchAsync_v2_ptsz }
            cuMemcpyDtoA: [Custom submits] { 2000: cuMemcpyDtoA / -, 3020: cuMemcpyDtoA_v2 / -, 7000: cuMemcpyDtoA_v2 / cuMemcpyDtoA_v2_ptds }
            cuMemcpyDtoD: [Custom submits] { 2000: cuMemcpyDtoD / -, 3020: cuMemcpyDtoD_v2 / -, 7000: cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds }
            cuMemcpyDtoDAsync: [Custom submits] { 3000: cuMemcpyDtoDAsync / -, 3020: cuMemcpyDtoDAsync_v2 / -, 7000: cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz }
            cuMemcpyDtoH: [Custom submits] { 2000: cuMemcpyDtoH / -, 3020: cuMemcpyDtoH_v2 / -, 7000: cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds }
            cuMemcpyDtoHAsync: [Custom submits] { 2000: cuMemcpyDtoHAsync / -, 3020: cuMemcpyDtoHAsync_v2 / -, 7000: cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz }
            cuMemcpyHtoA: [Custom submits] { 2000: cuMemcpyHtoA / -, 3020: cuMemcpyHtoA_v2 / -, 7000: cuMemcpyHtoA_v2 / cuMemcpyHtoA_v2_ptds }
            cuMemcpyHtoAAsync: [Custom submits] { 2000: cuMemcpyHtoAAsync / -, 3020: cuMemcpyHtoAAsync_v2 / -, 7000: cuMemcpyHtoAAsync_v2 / cuMemcpyHtoAAsync_v2_ptsz }
            cuMemcpyHtoD: [Custom submits] { 2000: cuMemcpyHtoD / -, 3020: cuMemcpyHtoD_v2 / -, 7000: cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds }
            cuMemcpyHtoDAsync: [Custom submits] { 2000: cuMemcpyHtoDAsync / -, 3020: cuMemcpyHtoDAsync_v2 / -, 7000: cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz }
            cuMemcpyPeer: [Custom submits] { 4000: cuMemcpyPeer / -, 7000: cuMemcpyPeer / cuMemcpyPeer_ptds }
            cuMemcpyPeerAsync: [Custom submits] { 4000: cuMemcpyPeerAsync / -, 7000: cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz }
            cuMemsetD16: [Async submits] { 2000: cuMemsetD16 / -, 3020: cuMemsetD16_v2 / -, 7000: cuMemsetD16_v2 / cuMemsetD16_v2_ptds }
            cuMemsetD16Async: [Async submits] { 3020: cuMemsetD16Async / -, 7000: cuMemsetD16Async / cuMemsetD16Async_ptsz }
            cuMemsetD2D16: [Async submits] { 2000: cuMemsetD2D16 / -, 3020: cuMemsetD2D16_v2 / -, 7000: cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds }
            cuMemsetD2D16Async: [Async submits] { 3020: cuMemsetD2D16Async / -, 7000: cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz }
            cuMemsetD2D32: [Async submits] { 2000: cuMemsetD2D32 / -, 3020: cuMemsetD2D32_v2 / -, 7000: cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds }
            cuMemsetD2D32Async: [Async submits] { 3020: cuMemsetD2D32Async / -, 7000: cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz }
            cuMemsetD2D8: [Async submits] { 2000: cuMemsetD2D8 / -, 3020: cuMemsetD2D8_v2 / -, 7000: cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds }
            cuMemsetD2D8Async: [Async submits] { 3020: cuMemsetD2D8Async / -, 7000: cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz }
            cuMemsetD32: [Async submits] { 2000: cuMemsetD32 / -, 3020: cuMemsetD32_v2 / -, 7000: cuMemsetD32_v2 / cuMemsetD32_v2_ptds }
            cuMemsetD32Async: [Async submits] { 3020: cuMemsetD32Async / -, 7000: cuMemsetD32Async / cuMemsetD32Async_ptsz }
            cuMemsetD8: [Async submits] { 2000: cuMemsetD8 / -, 3020: cuMemsetD8_v2 / -, 7000: cuMemsetD8_v2 / cuMemsetD8_v2_ptds }
            cuMemsetD8Async: [Async submits] { 3020: cuMemsetD8Async / -, 7000: cuMemsetD8Async / cuMemsetD8Async_ptsz }
            cuMipmappedArrayCreate: [Request idle] { 5000: cuMipmappedArrayCreate }
            cuMipmappedArrayDestroy: [Async idle] { 5000: cuMipmappedArrayDestroy }
            cuMipmappedArrayGetLevel: [Request idle] { 5000: cuMipmappedArrayGetLevel }
            cuMipmappedArrayGetMemoryRequirements: [Request idle] { 11060: cuMipmappedArrayGetMemoryRequirements }
            cuMipmappedArrayGetSparseProperties: [Request idle] { 11010: cuMipmappedArrayGetSparseProperties }
            cuModuleEnumerateFunctions: [Request idle] { 12040: cuModuleEnumerateFunctions }
            cuModuleGetFunction: [Request idle] { 2000: cuModuleGetFunction }
            cuModuleGetFunctionCount: [Request idle] { 12040: cuModuleGetFunctionCount }
            cuModuleGetGlobal: [Request idle] { 2000: cuModuleGetGlobal, 3020: cuModuleGetGlobal_v2 }
            cuModuleGetLoadingMode: [Genuine idle] { 11070: cuModuleGetLoadingMode }
            cuModuleGetSurfRef: [Request idle] { 3000: cuModuleGetSurfRef }
            cuModuleGetTexRef: [Request idle] { 2000: cuModuleGetTexRef }
            cuModuleLoad: [Custom idle] { 2000: cuModuleLoad }
            cuModuleLoadData: [Custom idle] { 2000: cuModuleLoadData }
            cuModuleLoadDataEx: [Custom idle] { 2010: cuModuleLoadDataEx }
            cuModuleLoadFatBinary: [Custom idle] { 2000: cuModuleLoadFatBinary }
            cuModuleUnload: [Async idle] { 2000: cuModuleUnload }
            cuMulticastAddDevice: [Absent(Multicast) idle] { 12010: cuMulticastAddDevice }
            cuMulticastBindAddr: [Absent(Multicast) idle] { 12010: cuMulticastBindAddr }
            cuMulticastBindMem: [Absent(Multicast) idle] { 12010: cuMulticastBindMem }
            cuMulticastCreate: [Absent(Multicast) idle] { 12010: cuMulticastCreate }
            cuMulticastGetGranularity: [Absent(Multicast) idle] { 12010: cuMulticastGetGranularity }
            cuMulticastUnbind: [Absent(Multicast) idle] { 12010: cuMulticastUnbind }
            cuOccupancyAvailableDynamicSMemPerBlock: [Request idle] { 10020: cuOccupancyAvailableDynamicSMemPerBlock }
            cuOccupancyMaxActiveBlocksPerMultiprocessor: [Request idle] { 6050: cuOccupancyMaxActiveBlocksPerMultiprocessor }
            cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags: [Request idle] { 7000: cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags }
            cuOccupancyMaxActiveClusters: [Request idle] { 11070: cuOccupancyMaxActiveClusters }
            cuOccupancyMaxPotentialBlockSize: [Request idle] { 6050: cuOccupancyMaxPotentialBlockSize }
            cuOccupancyMaxPotentialBlockSizeWithFlags: [Request idle] { 7000: cuOccupancyMaxPotentialBlockSizeWithFlags }
            cuOccupancyMaxPotentialClusterSize: [Request idle] { 11070: cuOccupancyMaxPotentialClusterSize }
            cuParamSetSize: [Local idle] { 2000: cuParamSetSize }
            cuParamSetTexRef: [Local idle] { 2000: cuParamSetTexRef }
            cuParamSetf: [Local idle] { 2000: cuParamSetf }
            cuParamSeti: [Local idle] { 2000: cuParamSeti }
            cuParamSetv: [Local idle] { 2000: cuParamSetv }
            cuPointerGetAttribute: [Local idle] { 4000: cuPointerGetAttribute }
            cuPointerGetAttributes: [Local idle] { 7000: cuPointerGetAttributes }
            cuPointerSetAttribute: [Local idle] { 6000: cuPointerSetAttribute }
            cuProfilerInitialize: [Local idle] { 4000: cuProfilerInitialize }
            cuProfilerStart: [Local idle] { 4000: cuProfilerStart }
            cuProfilerStop: [Local idle] { 4000: cuProfilerStop }
            cuSignalExternalSemaphoresAsync: [Absent(External) submits] { 10000: cuSignalExternalSemaphoresAsync / cuSignalExternalSemaphoresAsync_ptsz }
            cuStreamAddCallback: [Custom submits] { 5000: cuStreamAddCallback / -, 7000: cuStreamAddCallback / cuStreamAddCallback_ptsz }
            cuStreamAttachMemAsync: [Local submits] { 6000: cuStreamAttachMemAsync / -, 7000: cuStreamAttachMemAsync / cuStreamAttachMemAsync_ptsz }
            cuStreamBatchMemOp: [Async submits] { 8000: cuStreamBatchMemOp / cuStreamBatchMemOp_ptsz, 11070: cuStreamBatchMemOp_v2 / cuStreamBatchMemOp_v2_ptsz }
            cuStreamBeginCapture: [Request idle] { 10000: cuStreamBeginCapture / cuStreamBeginCapture_ptsz, 10010: cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz }
            cuStreamBeginCaptureToGraph: [Request idle] { 12030: cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz }
            cuStreamCopyAttributes: [Async idle] { 11000: cuStreamCopyAttributes / cuStreamCopyAttributes_ptsz }
            cuStreamCreate: [Async idle] { 2000: cuStreamCreate }
            cuStreamCreateWithPriority: [Async idle] { 5050: cuStreamCreateWithPriority }
            cuStreamDestroy: [Async idle] { 2000: cuStreamDestroy, 4000: cuStreamDestroy_v2 }
            cuStreamEndCapture: [Request idle] { 10000: cuStreamEndCapture / cuStreamEndCapture_ptsz }
            cuStreamGetAttribute: [Local idle] { 11000: cuStreamGetAttribute / cuStreamGetAttribute_ptsz }
            cuStreamGetCaptureInfo: [Custom idle] { 10010: cuStreamGetCaptureInfo / cuStreamGetCaptureInfo_ptsz, 11030: cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz, 12030: cuStreamGetCaptureInfo_v3 / cuStreamGetCaptureInfo_v3_ptsz }
            cuStreamGetCtx: [Local idle] { 9020: cuStreamGetCtx / cuStreamGetCtx_ptsz, 12050: cuStreamGetCtx_v2 / cuStreamGetCtx_v2_ptsz }
            cuStreamGetDevice: [Local idle] { 12080: cuStreamGetDevice / cuStreamGetDevice_ptsz }
            cuStreamGetFlags: [Local idle] { 5050: cuStreamGetFlags / -, 7000: cuStreamGetFlags / cuStreamGetFlags_ptsz }
            cuStreamGetGreenCtx: [Local idle] { 12040: cuStreamGetGreenCtx }
            cuStreamGetId: [Local idle] { 12000: cuStreamGetId / cuStreamGetId_ptsz }
            cuStreamGetPriority: [Local idle] { 5050: cuStreamGetPriority / -, 7000: cuStreamGetPriority / cuStreamGetPriority_ptsz }
            cuStreamIsCapturing: [Custom idle] { 10000: cuStreamIsCapturing / cuStreamIsCapturing_ptsz }
            cuStreamQuery: [Custom idle] { 2000: cuStreamQuery / -, 7000: cuStreamQuery / cuStreamQuery_ptsz }
            cuStreamSetAttribute: [Async idle] { 11000: cuStreamSetAttribute / cuStreamSetAttribute_ptsz }
            cuStreamSynchronize: [Custom idle] { 2000: cuStreamSynchronize / -, 7000: cuStreamSynchronize / cuStreamSynchronize_ptsz }
            cuStreamUpdateCaptureDependencies: [Request idle] { 11030: cuStreamUpdateCaptureDependencies / cuStreamUpdateCaptureDependencies_ptsz, 12030: cuStreamUpdateCaptureDependencies_v2 / cuStreamUpdateCaptureDependencies_v2_ptsz }
            cuStreamWaitEvent: [Async idle] { 3020: cuStreamWaitEvent / -, 7000: cuStreamWaitEvent / cuStreamWaitEvent_ptsz }
            cuStreamWaitValue32: [Async submits] { 8000: cuStreamWaitValue32 / cuStreamWaitValue32_ptsz, 11070: cuStreamWaitValue32_v2 / cuStreamWaitValue32_v2_ptsz }
            cuStreamWaitValue64: [Async submits] { 9000: cuStreamWaitValue64 / cuStreamWaitValue64_ptsz, 11070: cuStreamWaitValue64_v2 / cuStreamWaitValue64_v2_ptsz }
            cuStreamWriteValue32: [Async submits] { 8000: cuStreamWriteValue32 / cuStreamWriteValue32_ptsz, 11070: cuStreamWriteValue32_v2 / cuStreamWriteValue32_v2_ptsz }
            cuStreamWriteValue64: [Async submits] { 9000: cuStreamWriteValue64 / cuStreamWriteValue64_ptsz, 11070: cuStreamWriteValue64_v2 / cuStreamWriteValue64_v2_ptsz }
            cuSurfObjectCreate: [Request idle] { 5000: cuSurfObjectCreate }
            cuSurfObjectDestroy: [Async idle] { 5000: cuSurfObjectDestroy }
            cuSurfObjectGetResourceDesc: [Local idle] { 5000: cuSurfObjectGetResourceDesc }
            cuSurfRefGetArray: [Request idle] { 3000: cuSurfRefGetArray }
            cuSurfRefSetArray: [Request idle] { 3000: cuSurfRefSetArray }
            cuTensorMapEncodeIm2col: [Request idle] { 12000: cuTensorMapEncodeIm2col }
            cuTensorMapEncodeIm2colWide: [Request idle] { 12080: cuTensorMapEncodeIm2colWide }
            cuTensorMapEncodeTiled: [Request idle] { 12000: cuTensorMapEncodeTiled }
            cuTensorMapReplaceAddress: [Request idle] { 12000: cuTensorMapReplaceAddress }
            cuTexObjectCreate: [Request idle] { 5000: cuTexObjectCreate }
            cuTexObjectDestroy: [Async idle] { 5000: cuTexObjectDestroy }
            cuTexObjectGetResourceDesc: [Local idle] { 5000: cuTexObjectGetResourceDesc }
            cuTexObjectGetResourceViewDesc: [Local idle] { 5000: cuTexObjectGetResourceViewDesc }
            cuTexObjectGetTextureDesc: [Local idle] { 5000: cuTexObjectGetTextureDesc }
            cuTexRefCreate: [Request idle] { 2000: cuTexRefCreate }
            cuTexRefDestroy: [Request idle] { 2000: cuTexRefDestroy }
            cuTexRefGetAddress: [Request idle] { 2000: cuTexRefGetAddress, 3020: cuTexRefGetAddress_v2 }
            cuTexRefGetAddressMode: [Request idle] { 2000: cuTexRefGetAddressMode }
            cuTexRefGetArray: [Request idle] { 2000: cuTexRefGetArray }
            cuTexRefGetBorderColor: [Request idle] { 8000: cuTexRefGetBorderColor }
            cuTexRefGetFilterMode: [Request idle] { 2000: cuTexRefGetFilterMode }
            cuTexRefGetFlags: [Request idle] { 2000: cuTexRefGetFlags }
            cuTexRefGetFormat: [Request idle] { 2000: cuTexRefGetFormat }
            cuTexRefGetMaxAnisotropy: [Request idle] { 5000: cuTexRefGetMaxAnisotropy }
            cuTexRefGetMipmapFilterMode: [Request idle] { 5000: cuTexRefGetMipmapFilterMode }
            cuTexRefGetMipmapLevelBias: [Request idle] { 5000: cuTexRefGetMipmapLevelBias }
            cuTexRefGetMipmapLevelClamp: [Request idle] { 5000: cuTexRefGetMipmapLevelClamp }
            cuTexRefGetMipmappedArray: [Request idle] { 5000: cuTexRefGetMipmappedArray }
            cuTexRefSetAddress: [Request idle] { 2000: cuTexRefSetAddress, 3020: cuTexRefSetAddress_v2 }
            cuTexRefSetAddress2D: [Request idle] { 2020: cuTexRefSetAddress2D, 3020: cuTexRefSetAddress2D_v2, 4010: cuTexRefSetAddress2D_v3 }
            cuTexRefSetAddressMode: [Request idle] { 2000: cuTexRefSetAddressMode }
            cuTexRefSetArray: [Request idle] { 2000: cuTexRefSetArray }
            cuTexRefSetBorderColor: [Request idle] { 8000: cuTexRefSetBorderColor }
            cuTexRefSetFilterMode: [Request idle] { 2000: cuTexRefSetFilterMode }
            cuTexRefSetFlags: [Request idle] { 2000: cuTexRefSetFlags }
            cuTexRefSetFormat: [Request idle] { 2000: cuTexRefSetFormat }
            cuTexRefSetMaxAnisotropy: [Request idle] { 5000: cuTexRefSetMaxAnisotropy }
            cuTexRefSetMipmapFilterMode: [Request idle] { 5000: cuTexRefSetMipmapFilterMode }
            cuTexRefSetMipmapLevelBias: [Request idle] { 5000: cuTexRefSetMipmapLevelBias }
            cuTexRefSetMipmapLevelClamp: [Request idle] { 5000: cuTexRefSetMipmapLevelClamp }
            cuTexRefSetMipmappedArray: [Request idle] { 5000: cuTexRefSetMipmappedArray }
            cuThreadExchangeStreamCaptureMode: [Local idle] { 10010: cuThreadExchangeStreamCaptureMode }
            cuUserObjectCreate: [Local idle] { 11030: cuUserObjectCreate }
            cuUserObjectRelease: [Local idle] { 11030: cuUserObjectRelease }
            cuUserObjectRetain: [Local idle] { 11030: cuUserObjectRetain }
            cuVDPAUCtxCreate: [Absent(Graphics) idle] { 3010: cuVDPAUCtxCreate, 3020: cuVDPAUCtxCreate_v2 }
            cuVDPAUGetDevice: [Absent(Graphics) idle] { 3010: cuVDPAUGetDevice }
            cuWaitExternalSemaphoresAsync: [Absent(External) submits] { 10000: cuWaitExternalSemaphoresAsync / cuWaitExternalSemaphoresAsync_ptsz }
            cuEGLApiInit: [Absent(Graphics) idle] { EXPORT_ONLY: cuEGLApiInit }
            cuMemGetAttribute: [Absent(Undocumented) idle] { EXPORT_ONLY: cuMemGetAttribute }
            cuMemGetAttribute_v2: [Absent(Undocumented) idle] { EXPORT_ONLY: cuMemGetAttribute_v2 }
            cudbgApiAttach: [Absent(Debugging) idle] { EXPORT_ONLY: cudbgApiAttach }
            cudbgApiDetach: [Absent(Debugging) idle] { EXPORT_ONLY: cudbgApiDetach }
            cudbgApiInit: [Absent(Debugging) idle] { EXPORT_ONLY: cudbgApiInit }
            cudbgGetAPI: [Absent(Debugging) idle] { EXPORT_ONLY: cudbgGetAPI }
            cudbgGetAPIVersion: [Absent(Debugging) idle] { EXPORT_ONLY: cudbgGetAPIVersion }
            cudbgMain: [Absent(Debugging) idle] { EXPORT_ONLY: cudbgMain }
            cudbgReportDriverApiError: [Absent(Debugging) idle] { EXPORT_ONLY: cudbgReportDriverApiError }
            cudbgReportDriverInternalError: [Absent(Debugging) idle] { EXPORT_ONLY: cudbgReportDriverInternalError }
        }
    };
}
pub(super) use for_each_entry_point;
