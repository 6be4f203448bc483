//! The genuine driver: located, opened, and with typed entry points for every function that the server uses.
//!
//! All foreign calls of the server go through here. Functions that take host addresses take them as `u64`: the
//! callers pass only addresses inside mappings the server made itself, with lengths they have checked.

use mpsshim_api::cuda::*;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
pub use symbols::DriverError;
use symbols::{Find, symbol, unsupported};

/// Functions that an older or reduced driver may lack; calls of them then return `CUDA_ERROR_NOT_SUPPORTED`.
const OPTIONAL: &[&str] = &[
    "cuOccupancyMaxActiveClusters",
    "cuOccupancyMaxPotentialClusterSize",
    "cuModuleGetFunctionCount",
    "cuModuleEnumerateFunctions",
    "cuLibraryGetKernelCount",
    "cuLibraryEnumerateKernels",
    "cuKernelGetName",
    "cuKernelGetParamInfo",
    "cuFuncGetName",
];

#[macro_use]
mod symbols;
mod array;
mod context;
mod graph;
mod image;
mod memory;
mod stream;

/// The driver's functions. Required functions are methods of this type; optional subjects have a table each.
#[derive(Debug)]
pub struct Driver {
    path: String,
    core: Core,
    /// Arrays, textures, two- and three-dimensional copies.
    pub array: array::ArrayFunctions,
    /// Green contexts, peers, device-wide settings.
    pub context: context::ContextFunctions,
    /// Graphs and capture.
    pub graph: graph::GraphFunctions,
    /// The linker, and other functions for code.
    pub image: image::ImageFunctions,
    /// Pools, virtual memory, managed memory.
    pub memory: memory::MemoryFunctions,
    /// Stream memory operations and attributes.
    pub stream: stream::StreamFunctions,
}

impl std::ops::Deref for Driver {
    type Target = Core;
    fn deref(&self) -> &Core {
        &self.core
    }
}

functions! {
    /// The driver's functions. The method names follow the entry points'.
    Core, |name| OPTIONAL.contains(&name);
    init = "cuInit" (flags: u32);
    device_get_count = "cuDeviceGetCount" (count: &mut c_int);
    device_get = "cuDeviceGet" (device: &mut CUdevice, ordinal: c_int);
    device_get_name = "cuDeviceGetName" (name: *mut c_char, len: c_int, device: CUdevice);
    driver_get_version = "cuDriverGetVersion" (version: &mut c_int);
    device_get_attribute = "cuDeviceGetAttribute" (value: &mut c_int, attribute: u32, device: CUdevice);
    device_total_mem = "cuDeviceTotalMem_v2" (bytes: &mut usize, device: CUdevice);
    device_get_uuid = "cuDeviceGetUuid_v2" (uuid: &mut CUuuid, device: CUdevice);
    primary_ctx_set_flags = "cuDevicePrimaryCtxSetFlags_v2" (device: CUdevice, flags: u32);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain" (context: &mut CUcontext, device: CUdevice);
    ctx_set_current = "cuCtxSetCurrent" (context: CUcontext);
    ctx_get_limit = "cuCtxGetLimit" (value: &mut usize, limit: CUlimit);
    ctx_set_limit = "cuCtxSetLimit" (limit: CUlimit, value: usize);
    mem_get_info = "cuMemGetInfo_v2" (free: &mut usize, total: &mut usize);
    mem_address_reserve = "cuMemAddressReserve" (address: &mut CUdeviceptr, len: usize, alignment: usize, hint: CUdeviceptr, flags: u64);
    mem_create = "cuMemCreate" (handle: &mut CUmemGenericAllocationHandle, len: usize, properties: &CUmemAllocationProp, flags: u64);
    mem_release = "cuMemRelease" (handle: CUmemGenericAllocationHandle);
    mem_map = "cuMemMap" (address: CUdeviceptr, len: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64);
    mem_unmap = "cuMemUnmap" (address: CUdeviceptr, len: usize);
    mem_set_access = "cuMemSetAccess" (address: CUdeviceptr, len: usize, access: &CUmemAccessDesc, count: usize);
    mem_get_granularity = "cuMemGetAllocationGranularity" (bytes: &mut usize, properties: &CUmemAllocationProp, option: u32);
    mem_host_register = "cuMemHostRegister_v2" (address: u64, len: usize, flags: u32);
    mem_host_unregister = "cuMemHostUnregister" (address: u64);
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2" (device: &mut CUdeviceptr, host: u64, flags: u32);
    memcpy_htod_async = "cuMemcpyHtoDAsync_v2" (to: CUdeviceptr, from: u64, len: usize, stream: CUstream);
    memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2" (to: u64, from: CUdeviceptr, len: usize, stream: CUstream);
    memcpy_dtod_async = "cuMemcpyDtoDAsync_v2" (to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream);
    memset_d8_async = "cuMemsetD8Async" (to: CUdeviceptr, value: u8, count: usize, stream: CUstream);
    memset_d16_async = "cuMemsetD16Async" (to: CUdeviceptr, value: u16, count: usize, stream: CUstream);
    memset_d32_async = "cuMemsetD32Async" (to: CUdeviceptr, value: u32, count: usize, stream: CUstream);
    memset_d2d8_async = "cuMemsetD2D8Async" (to: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize, stream: CUstream);
    memset_d2d16_async = "cuMemsetD2D16Async" (to: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize, stream: CUstream);
    memset_d2d32_async = "cuMemsetD2D32Async" (to: CUdeviceptr, pitch: usize, value: u32, width: usize, height: usize, stream: CUstream);
    stream_create = "cuStreamCreateWithPriority" (stream: &mut CUstream, flags: u32, priority: c_int);
    stream_query = "cuStreamQuery" (stream: CUstream);
    stream_synchronize = "cuStreamSynchronize" (stream: CUstream);
    stream_wait_event = "cuStreamWaitEvent" (stream: CUstream, event: CUevent, flags: u32);
    stream_write_value32 = "cuStreamWriteValue32_v2" (stream: CUstream, address: CUdeviceptr, value: u32, flags: u32);
    event_create = "cuEventCreate" (event: &mut CUevent, flags: u32);
    event_destroy = "cuEventDestroy_v2" (event: CUevent);
    event_record = "cuEventRecordWithFlags" (event: CUevent, stream: CUstream, flags: u32);
    event_query = "cuEventQuery" (event: CUevent);
    event_elapsed_time = "cuEventElapsedTime" (ms: &mut f32, start: CUevent, end: CUevent);
    module_load_data_ex = "cuModuleLoadDataEx" (module: &mut CUmodule, image: *const u8, count: u32, options: *mut u32, values: *mut *mut c_void);
    module_unload = "cuModuleUnload" (module: CUmodule);
    module_get_function = "cuModuleGetFunction" (function: &mut CUfunction, module: CUmodule, name: *const c_char);
    module_get_global = "cuModuleGetGlobal_v2" (address: &mut CUdeviceptr, len: &mut usize, module: CUmodule, name: *const c_char);
    module_get_function_count = "cuModuleGetFunctionCount" (count: &mut u32, module: CUmodule);
    module_enumerate_functions = "cuModuleEnumerateFunctions" (functions: *mut CUfunction, count: u32, module: CUmodule);
    library_load_data = "cuLibraryLoadData" (library: &mut CUlibrary, image: *const u8, jit_options: *mut u32, jit_values: *mut *mut c_void, jit_count: u32, options: *mut u32, values: *mut *mut c_void, count: u32);
    library_unload = "cuLibraryUnload" (library: CUlibrary);
    library_get_kernel = "cuLibraryGetKernel" (kernel: &mut CUkernel, library: CUlibrary, name: *const c_char);
    library_get_global = "cuLibraryGetGlobal" (address: &mut CUdeviceptr, len: &mut usize, library: CUlibrary, name: *const c_char);
    library_get_kernel_count = "cuLibraryGetKernelCount" (count: &mut u32, library: CUlibrary);
    library_enumerate_kernels = "cuLibraryEnumerateKernels" (kernels: *mut CUkernel, count: u32, library: CUlibrary);
    kernel_get_function = "cuKernelGetFunction" (function: &mut CUfunction, kernel: CUkernel);
    kernel_get_param_info = "cuKernelGetParamInfo" (kernel: CUkernel, index: usize, offset: &mut usize, size: &mut usize);
    kernel_get_name = "cuKernelGetName" (name: &mut *const c_char, kernel: CUkernel);
    func_get_name = "cuFuncGetName" (name: &mut *const c_char, function: CUfunction);
    func_get_attribute = "cuFuncGetAttribute" (value: &mut c_int, attribute: CUfunction_attribute, function: CUfunction);
    func_set_attribute = "cuFuncSetAttribute" (function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    func_get_param_info = "cuFuncGetParamInfo" (function: CUfunction, index: usize, offset: &mut usize, size: &mut usize);
    launch_kernel = "cuLaunchKernel" (function: CUfunction, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void);
    launch_kernel_ex = "cuLaunchKernelEx" (config: &CUlaunchConfig, function: CUfunction, params: *mut *mut c_void, extra: *mut *mut c_void);
    occupancy_max_active_blocks = "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags" (blocks: &mut c_int, function: CUfunction, block: c_int, shared: usize, flags: u32);
    occupancy_available_shared = "cuOccupancyAvailableDynamicSMemPerBlock" (bytes: &mut usize, function: CUfunction, blocks: c_int, block: c_int);
    occupancy_max_active_clusters = "cuOccupancyMaxActiveClusters" (clusters: &mut c_int, function: CUfunction, config: &CUlaunchConfig);
    occupancy_max_cluster_size = "cuOccupancyMaxPotentialClusterSize" (size: &mut c_int, function: CUfunction, config: &CUlaunchConfig);
    pointer_get_attribute = "cuPointerGetAttribute" (value: *mut c_void, attribute: CUpointer_attribute, pointer: CUdeviceptr);
}

fn open(path: &Path) -> Result<Driver, DriverError> {
    let text = path.display().to_string();
    let name = CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|_| DriverError::Open(text.clone(), "the path has a NUL".into()))?;
    // SAFETY: a NUL-terminated name; the driver's initializers are trusted as in any CUDA program.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: dlerror returns a NUL-terminated string or null, valid until the next dl call of this thread.
        let why = unsafe {
            let message = libc::dlerror();
            if message.is_null() {
                "unknown".into()
            } else {
                std::ffi::CStr::from_ptr(message)
                    .to_string_lossy()
                    .into_owned()
            }
        };
        return Err(DriverError::Open(text, why));
    }
    if !symbol(handle, "mpsshim_version").is_null() {
        return Err(DriverError::Shim(text));
    }
    Driver::of(&|name| symbol(handle, name), &text)
}

impl Driver {
    /// Opens the driver at `path`, or the one the loader finds as `libcuda.so.1`.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn open(path: Option<&Path>) -> Result<Driver, DriverError> {
        open(path.unwrap_or(&PathBuf::from("libcuda.so.1")))
    }
    /// The driver whose functions `find` returns; `path` is for errors.
    ///
    /// # Errors
    /// [`DriverError::Missing`].
    pub fn of(find: &Find<'_>, path: &str) -> Result<Driver, DriverError> {
        Ok(Driver {
            core: Core::load(find, path)?,
            array: array::ArrayFunctions::load(find, path)?,
            context: context::ContextFunctions::load(find, path)?,
            graph: graph::GraphFunctions::load(find, path)?,
            image: image::ImageFunctions::load(find, path)?,
            memory: memory::MemoryFunctions::load(find, path)?,
            stream: stream::StreamFunctions::load(find, path)?,
            path: path.to_owned(),
        })
    }
    /// Path of the opened library.
    pub fn path(&self) -> &str {
        &self.path
    }
    /// Whether a stream is capturing, with an invalidated capture included (`cuStreamIsCapturing`).
    pub fn is_capturing(&self, stream: CUstream) -> bool {
        let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
        let asked = self.graph.is_capturing(stream, &mut status);
        asked.is_ok() && status != CU_STREAM_CAPTURE_STATUS_NONE
    }
}

/// Whether a status means that the context is lost for good (the "sticky" errors of the CUDA manual).
pub fn is_sticky(status: CUresult) -> bool {
    matches!(
        status,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_CONTAINED
    )
}

/// The `extra` argument of a launch whose packed parameters are `size` bytes at `params`. Valid for as long as `size`.
pub fn packed(params: *mut u8, size: &mut usize) -> [*mut c_void; 5] {
    [
        CU_LAUNCH_PARAM_BUFFER_POINTER as *mut c_void,
        params.cast(),
        CU_LAUNCH_PARAM_BUFFER_SIZE as *mut c_void,
        std::ptr::from_mut(size).cast(),
        CU_LAUNCH_PARAM_END as *mut c_void,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_the_signatures_of_the_driver() {
        let all = [
            Core::signatures(),
            array::ArrayFunctions::signatures(),
            context::ContextFunctions::signatures(),
            graph::GraphFunctions::signatures(),
            image::ImageFunctions::signatures(),
            memory::MemoryFunctions::signatures(),
            stream::StreamFunctions::signatures(),
        ];
        let found = mpsshim_signatures::differences(all.concat());
        assert!(found.is_empty(), "{}", found.join("\n"));
    }
}
