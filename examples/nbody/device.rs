//! The CUDA driver API calls that this program needs, with their errors turned into messages. All unsafe code is here.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;

use anyhow::{Result, bail};
use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;

/// The kernels, NUL-terminated as the driver wants PTX.
const PTX: &str = concat!(include_str!("kernels/nbody.ptx"), "\0");

/// Calls a driver function; an error names the function and CUDA's code.
macro_rules! cuda {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: every pointer argument below refers to a live local, buffer or handle of the type that the
        // function's declaration asks for; each call site adds what else its function needs.
        let status = unsafe { sys::$function($($argument),*) };
        check(status, stringify!($function))
    }};
}

fn check(status: sys::CUresult, function: &str) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name: *const c_char = ptr::null();
    // SAFETY: the driver writes a pointer to a static string, or leaves null for a code that it does not know.
    let name = unsafe {
        sys::cuGetErrorName(status, &mut name);
        if name.is_null() {
            "unknown error".into()
        } else {
            CStr::from_ptr(name).to_string_lossy()
        }
    };
    bail!("{function} failed: {name} ({})", status as u32)
}

/// Loads and initialises the driver; the number of devices.
pub fn count() -> Result<usize> {
    // SAFETY: only loads the library.
    if !unsafe { sys::is_culib_present() } {
        bail!("no CUDA driver: neither libcuda.so nor libcuda.so.1 can be loaded");
    }
    let mut count = 0;
    cuda!(cuInit(0))?;
    cuda!(cuDeviceGetCount(&mut count))?;
    Ok(usize::try_from(count)?)
}

/// What a device says of itself.
pub struct About {
    pub name: String,
    pub major: i32,
    pub minor: i32,
    pub multiprocessors: usize,
}

pub fn describe(ordinal: usize) -> Result<About> {
    let device = handle(ordinal)?;
    let mut name = [0u8; 256];
    cuda!(cuDeviceGetName(
        name.as_mut_ptr().cast(),
        name.len() as i32,
        device
    ))?;
    let attribute = |which| {
        let mut value = 0;
        cuda!(cuDeviceGetAttribute(&mut value, which, device)).map(|()| value)
    };
    Ok(About {
        name: CStr::from_bytes_until_nul(&name)?
            .to_string_lossy()
            .into_owned(),
        major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        multiprocessors: usize::try_from(attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )?)?,
    })
}

fn handle(ordinal: usize) -> Result<sys::CUdevice> {
    let mut device = 0;
    cuda!(cuDeviceGet(&mut device, i32::try_from(ordinal)?))?;
    Ok(device)
}

/// A device with its primary context retained and one kernel loaded.
pub struct Device {
    device: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    kernel: sys::CUfunction,
}

impl Device {
    pub fn open(ordinal: usize, kernel: &str) -> Result<Self> {
        let device = handle(ordinal)?;
        let mut context = ptr::null_mut();
        cuda!(cuDevicePrimaryCtxRetain(&mut context, device))?;
        // From here on Drop releases what has been made.
        let mut this = Self {
            device,
            context,
            module: ptr::null_mut(),
            kernel: ptr::null_mut(),
        };
        this.enter()?;
        cuda!(cuModuleLoadData(&mut this.module, PTX.as_ptr().cast()))?;
        let name = CString::new(kernel)?;
        cuda!(cuModuleGetFunction(
            &mut this.kernel,
            this.module,
            name.as_ptr()
        ))?;
        Ok(this)
    }

    /// Makes the device's context current on this thread.
    pub fn enter(&self) -> Result<()> {
        cuda!(cuCtxSetCurrent(self.context))
    }

    /// Launches the kernel on the default stream.
    ///
    /// # Safety
    /// `parameters` point to values of the kernel's parameter types, in their order, and the kernel may touch only
    /// live memory with them.
    pub unsafe fn launch(
        &self,
        blocks: usize,
        threads: usize,
        shared_bytes: usize,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let (blocks, threads) = (u32::try_from(blocks)?, u32::try_from(threads)?);
        let shared = u32::try_from(shared_bytes)?;
        let (stream, extra) = (ptr::null_mut(), ptr::null_mut());
        let parameters = parameters.as_mut_ptr();
        cuda!(cuLaunchKernel(
            self.kernel,
            blocks,
            1,
            1,
            threads,
            1,
            1,
            shared,
            stream,
            parameters,
            extra
        ))
    }

    /// Waits for everything launched on the device.
    pub fn synchronize(&self) -> Result<()> {
        self.enter()?;
        cuda!(cuCtxSynchronize())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Errors are of no use here: the process is about to leave the device.
        if self.enter().is_ok() && !self.module.is_null() {
            let _ = cuda!(cuModuleUnload(self.module));
        }
        let _ = cuda!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

/// Device memory for `len` values of `T`, in the context that was current when it was made.
pub struct Memory<T> {
    pub address: sys::CUdeviceptr,
    context: sys::CUcontext,
    len: usize,
    values: std::marker::PhantomData<T>,
}

impl<T: Copy> Memory<T> {
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        device.enter()?;
        let mut address = 0;
        cuda!(cuMemAlloc_v2(&mut address, len * size_of::<T>()))?;
        Ok(Self {
            address,
            context: device.context,
            len,
            values: std::marker::PhantomData,
        })
    }

    /// Copies `from` into the memory, the first of them to place `at`.
    pub fn write(&self, at: usize, from: &[T]) -> Result<()> {
        assert!(
            at + from.len() <= self.len,
            "write past the end of device memory"
        );
        let address = self.address + (at * size_of::<T>()) as u64;
        cuda!(cuCtxSetCurrent(self.context))?;
        cuda!(cuMemcpyHtoD_v2(
            address,
            from.as_ptr().cast(),
            size_of_val(from)
        ))
    }

    /// Copies `into.len()` values from place `at` on; waits for the work before it.
    pub fn read(&self, at: usize, into: &mut [T]) -> Result<()> {
        assert!(
            at + into.len() <= self.len,
            "read past the end of device memory"
        );
        let address = self.address + (at * size_of::<T>()) as u64;
        cuda!(cuCtxSetCurrent(self.context))?;
        cuda!(cuMemcpyDtoH_v2(
            into.as_mut_ptr().cast(),
            address,
            size_of_val(into)
        ))
    }
}

impl<T> Drop for Memory<T> {
    fn drop(&mut self) {
        // As in Device::drop.
        if cuda!(cuCtxSetCurrent(self.context)).is_ok() {
            let _ = cuda!(cuMemFree_v2(self.address));
        }
    }
}

/// A point in a device's default stream.
pub struct Event(sys::CUevent);

impl Event {
    /// Makes an event and records it now.
    pub fn record(device: &Device) -> Result<Self> {
        device.enter()?;
        let mut event = ptr::null_mut();
        cuda!(cuEventCreate(
            &mut event,
            sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32
        ))?;
        let event = Self(event);
        cuda!(cuEventRecord(event.0, ptr::null_mut()))?;
        Ok(event)
    }

    /// Waits for this event; the milliseconds since `earlier`.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32> {
        let mut milliseconds = 0.0;
        cuda!(cuEventSynchronize(self.0))?;
        cuda!(cuEventElapsedTime(&mut milliseconds, earlier.0, self.0))?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = cuda!(cuEventDestroy_v2(self.0));
    }
}
