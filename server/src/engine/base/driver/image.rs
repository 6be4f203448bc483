//! The linker, and other functions for code.

use crate::engine::base::driver::symbols::{DriverError, Find, unsupported};
use mpsshim_api::cuda::*;
use std::ffi::{c_char, c_void};

functions! {
    /// The linker, and other functions for code.
    /// A function that the driver lacks returns `CUDA_ERROR_NOT_SUPPORTED`.
    ImageFunctions, |_| true;
    kernel_get_attribute = "cuKernelGetAttribute" (value: &mut i32, attribute: CUfunction_attribute, kernel: CUkernel, device: CUdevice);
    kernel_set_attribute = "cuKernelSetAttribute" (attribute: CUfunction_attribute, value: i32, kernel: CUkernel, device: CUdevice);
    library_get_managed = "cuLibraryGetManaged" (address: &mut CUdeviceptr, len: &mut usize, library: CUlibrary, name: *const c_char);
    link_create = "cuLinkCreate_v2" (count: u32, options: *mut u32, values: *mut *mut c_void, link: &mut CUlinkState);
    link_add_data = "cuLinkAddData_v2" (link: CUlinkState, kind: u32, data: *mut u8, len: usize, name: *const c_char, count: u32, options: *mut u32, values: *mut *mut c_void);
    link_complete = "cuLinkComplete" (link: CUlinkState, cubin: &mut *const u8, len: &mut usize);
    link_destroy = "cuLinkDestroy" (link: CUlinkState);
}
