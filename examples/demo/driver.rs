//! Which CUDA driver the demo uses, and the few driver calls it makes itself.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::ptr;

use anyhow::{Context, Result, anyhow, bail};
use cudarc::driver::sys;

use crate::Build;

/// The driver behind server and clients.
#[derive(Debug)]
pub struct Driver {
    /// What to tell the user.
    pub about: String,
    /// Its path, when it is not the one that the loader finds.
    pub library: Option<PathBuf>,
    softgpu: bool,
}

impl Driver {
    /// The one that MPSSHIM_CUDA_LIBRARY names; else the GPU's, when there is a GPU; else softgpu.
    pub fn choose(build: &Build, softgpu: bool) -> Result<Driver> {
        let named = std::env::var_os("MPSSHIM_CUDA_LIBRARY").filter(|name| !name.is_empty());
        if let Some(path) = named.filter(|_| !softgpu) {
            let path = PathBuf::from(path);
            let softgpu = path.file_name() == Some("libsoftgpu.so".as_ref());
            let about = format!("as {} (MPSSHIM_CUDA_LIBRARY) has it", path.display());
            return Ok(Driver {
                about,
                library: Some(std::path::absolute(path)?),
                softgpu,
            });
        }
        let gpu = if softgpu {
            Err(anyhow!("--softgpu was given"))
        } else {
            gpu_name()
        };
        match gpu {
            Ok(name) => Ok(Driver {
                about: format!("{name} (GPU)"),
                library: None,
                softgpu: false,
            }),
            Err(why) => Ok(Driver {
                about: format!("softgpu, a CUDA driver for the CPU ({why:#})"),
                library: Some(build.path("libsoftgpu.so")?),
                softgpu: true,
            }),
        }
    }

    /// Whether it computes on the CPU.
    pub fn is_softgpu(&self) -> bool {
        self.softgpu
    }

    /// Options of nbody that take a few seconds on the device.
    pub fn nbody_arguments(&self) -> [&'static str; 3] {
        if self.softgpu {
            ["-benchmark", "-numbodies=1024", "-i=12"]
        } else {
            ["-benchmark", "-numbodies=14336", "-i=4000"]
        }
    }
}

/// Calls a driver function; an error names it.
macro_rules! cuda {
    ($function:ident($($argument:expr),*)) => {{
        // SAFETY: every pointer argument below is to a live local of the type that the function writes, or to a
        // buffer whose length is given with it.
        let status = unsafe { sys::$function($($argument),*) };
        match status {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            status => Err(anyhow!("{} failed with status {}", stringify!($function), status as u32)),
        }
    }};
}

/// Initialises the driver that this process finds. A machine without a GPU has none, or a stub of one.
fn init() -> Result<()> {
    // SAFETY: only loads the library.
    if !unsafe { sys::is_culib_present() } {
        bail!("no CUDA driver found");
    }
    cuda!(cuInit(0))?;
    let mut count = 0;
    cuda!(cuDeviceGetCount(&mut count))?;
    if count == 0 {
        bail!("the driver has no device");
    }
    Ok(())
}

/// The name of the first GPU. Makes no context and takes no device memory.
fn gpu_name() -> Result<String> {
    // NVIDIA's kernel module, or the GPU of the host under WSL.
    if !Path::new("/dev/nvidiactl").exists() && !Path::new("/dev/dxg").exists() {
        bail!("no GPU found");
    }
    init()?;
    let mut device = 0;
    let mut name = [0u8; 256];
    cuda!(cuDeviceGet(&mut device, 0))?;
    cuda!(cuDeviceGetName(
        name.as_mut_ptr().cast(),
        name.len() as i32,
        device
    ))?;
    let name = CStr::from_bytes_until_nul(&name).context("the device's name")?;
    Ok(name.to_string_lossy().into_owned())
}

/// `cuMemGetInfo` on device 0: the bytes in use by whomever.
pub fn memory_in_use() -> Result<u64> {
    init()?;
    let mut device = 0;
    let mut context = ptr::null_mut();
    let (mut free, mut total) = (0usize, 0usize);
    cuda!(cuDeviceGet(&mut device, 0))?;
    // The context is the device's own; it stays until the process ends.
    cuda!(cuDevicePrimaryCtxRetain(&mut context, device))?;
    cuda!(cuCtxSetCurrent(context))?;
    cuda!(cuMemGetInfo_v2(&mut free, &mut total))?;
    Ok(total.saturating_sub(free) as u64)
}
