//! The server's own kernel that writes a client's flag.
//!
//! The stream operation that writes a word (`cuStreamWriteValue32`) is delayed more the more streams use it: with 8
//! streams that each wait for a kernel of 50 µs, a round takes 6 µs longer than with one stream; with 32 streams, 40
//! µs. A kernel that follows a kernel in a graph is not delayed (docs/design/0002-marks-and-waits.md).

use crate::engine::base::driver::{Driver, packed};
use mpsshim_api::cuda::*;
use std::ffi::CStr;

/// Writes the word after all preceding work of the stream. The barrier is cumulative and has system scope, so that an
/// observer of the word also sees the writes of the preceding kernels in the stream (PTX ISA, Memory Consistency
/// Model).
const PTX: &CStr = c".version 7.0
.target sm_50
.address_size 64
.visible .entry mpsshim_flag(.param .u64 address, .param .u32 value)
{
    .reg .b64 %address;
    .reg .b32 %value;
    ld.param.u64 %address, [address];
    ld.param.u32 %value, [value];
    membar.sys;
    st.volatile.global.u32 [%address], %value;
    ret;
}
";

/// The kernel, loaded on a device; its module is destroyed with the device's context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagKernel(CUfunction);

#[repr(C)]
struct Params {
    address: CUdeviceptr,
    value: u32,
}

/// Size of the parameters in bytes, without the structure's padding at the end.
const PARAMS: usize = size_of::<CUdeviceptr>() + size_of::<u32>();

/// Loads kernels of the server's into the current context, so that no later use has to load them.
///
/// # Errors
/// Driver errors, such as when they cannot compile.
pub fn load<const N: usize>(
    driver: &Driver,
    text: &CStr,
    names: [&CStr; N],
) -> Result<[CUfunction; N], CUresult> {
    let mut module = CUmodule::NULL;
    let (options, values) = (std::ptr::null_mut(), std::ptr::null_mut());
    driver.module_load_data_ex(&mut module, text.as_ptr().cast(), 0, options, values)?;
    let mut functions = [CUfunction::NULL; N];
    for (function, name) in functions.iter_mut().zip(names) {
        driver.module_get_function(function, module, name.as_ptr())?;
        // The driver loads a function at the first query of it.
        let mut registers = 0;
        driver.func_get_attribute(&mut registers, CU_FUNC_ATTRIBUTE_NUM_REGS, *function)?;
    }
    Ok(functions)
}

impl FlagKernel {
    /// Loads it into the current context, so that no later use has to load it.
    ///
    /// # Errors
    /// Driver errors, such as when it cannot compile.
    pub fn load(driver: &Driver) -> Result<FlagKernel, CUresult> {
        load(driver, PTX, [c"mpsshim_flag"]).map(|[function]| FlagKernel(function))
    }

    /// Launches it.
    ///
    /// # Errors
    /// Driver errors.
    pub fn launch(
        self,
        driver: &Driver,
        stream: CUstream,
        address: CUdeviceptr,
        value: u32,
    ) -> Result<(), CUresult> {
        let mut params = Params { address, value };
        let mut size = PARAMS;
        let mut extra = packed((&raw mut params).cast(), &mut size);
        let (none, extra) = (std::ptr::null_mut(), extra.as_mut_ptr());
        driver.launch_kernel(self.0, 1, 1, 1, 1, 1, 1, 0, stream, none, extra)
    }

    /// Calls `give` with the driver's description of a launch that writes `value` at `address`.
    pub fn with<R>(
        self,
        address: CUdeviceptr,
        value: u32,
        give: impl FnOnce(&CUDA_KERNEL_NODE_PARAMS) -> R,
    ) -> R {
        let mut params = Params { address, value };
        let mut size = PARAMS;
        let extra = packed((&raw mut params).cast(), &mut size);
        give(&CUDA_KERNEL_NODE_PARAMS {
            function: self.0.0,
            grid: [1; 3],
            block: [1; 3],
            extra: extra.as_ptr() as u64,
            ..CUDA_KERNEL_NODE_PARAMS::default()
        })
    }
}
