//! The launch calls of CUDA 3, in which a function stores its block shape, its shared memory and its parameters; and
//! the cooperative launch on several devices.

use std::collections::HashMap;

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUresult};
use mpsshim_proto::message::PARAMS_MAX;
use parking_lot::Mutex;

use super::entries;
use super::launch::{
    Pointers, Shape, check, cooperative_attribute, launch_packed, launch_pointers,
};
use crate::ffi::{In, Status, guard};
use crate::proxy::context;
use crate::proxy::{default_stream, module};

entries! {
    cuFuncSetBlockShape(_, _, _, _) => set_block_shape,
    cuFuncSetSharedSize(_, _) => set_shared_size,
    cuParamSetSize(_, _) => param_set_size,
    cuParamSeti(_, _, _) => param_set_int,
    cuParamSetf(_, _, _) => param_set_float,
    cuParamSetv(_, _, _, _) => param_set_bytes,
    cuLaunch(_) => launch,
    cuLaunchGrid(_, _, _) => launch_grid,
    cuLaunchGridAsync(_, _, _, _) => launch_grid_async,
    cuLaunchCooperativeKernelMultiDevice(_, _, _) => launch_on_devices,
}

/// Launch state stored with a function.
#[derive(Clone, Debug)]
struct Remembered {
    block: [u32; 3],
    shared: u32,
    /// Bytes of parameters requested by the program.
    size: usize,
    params: Vec<u8>,
}

/// By the function's handle.
static REMEMBERED: Mutex<Option<HashMap<u64, Remembered>>> = Mutex::new(None);

/// Changes a function's launch state, unless the function could not be launched with it.
fn remember(function: u64, change: impl FnOnce(&mut Remembered) -> Status) -> CUresult {
    guard(|| {
        context::current()?;
        let entry = module::function(function)?;
        let mut all = REMEMBERED.lock();
        let all = all.get_or_insert_default();
        let mut remembered = all.get(&function).cloned().unwrap_or_else(|| Remembered {
            block: [1; 3],
            shared: 0,
            size: 0,
            params: vec![0; entry.layout().len],
        });
        change(&mut remembered)?;
        let shape = Shape {
            grid: [1; 3],
            block: remembered.block,
            shared: remembered.shared,
        };
        check(entry, &shape)?;
        all.insert(function, remembered);
        Ok(())
    })
}

/// `cuFuncSetBlockShape`.
pub unsafe extern "C" fn set_block_shape(function: u64, x: i32, y: i32, z: i32) -> CUresult {
    remember(function, |remembered| {
        for (side, given) in remembered.block.iter_mut().zip([x, y, z]) {
            *side = u32::try_from(given).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        }
        Ok(())
    })
}

/// `cuFuncSetSharedSize`.
pub unsafe extern "C" fn set_shared_size(function: u64, bytes: u32) -> CUresult {
    remember(function, |remembered| {
        remembered.shared = bytes;
        Ok(())
    })
}

/// `cuParamSetSize`.
pub unsafe extern "C" fn param_set_size(function: u64, bytes: u32) -> CUresult {
    remember(function, |remembered| {
        if bytes as usize > PARAMS_MAX {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        remembered.size = bytes as usize;
        Ok(())
    })
}

fn set_bytes(function: u64, offset: i32, bytes: &[u8]) -> CUresult {
    remember(function, |remembered| {
        let end = usize::try_from(offset)
            .ok()
            .and_then(|offset| offset.checked_add(bytes.len()))
            .filter(|end| *end <= PARAMS_MAX)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if remembered.params.len() < end {
            remembered.params.resize(end, 0);
        }
        remembered.params[end - bytes.len()..end].copy_from_slice(bytes);
        Ok(())
    })
}

/// `cuParamSeti`.
pub unsafe extern "C" fn param_set_int(function: u64, offset: i32, value: u32) -> CUresult {
    set_bytes(function, offset, &value.to_ne_bytes())
}

/// `cuParamSetf`.
pub unsafe extern "C" fn param_set_float(function: u64, offset: i32, value: f32) -> CUresult {
    set_bytes(function, offset, &value.to_ne_bytes())
}

/// `cuParamSetv`.
pub unsafe extern "C" fn param_set_bytes(
    function: u64,
    offset: i32,
    from: In<u8>,
    count: u32,
) -> CUresult {
    if from.is_null() || count as usize > PARAMS_MAX {
        return guard(|| {
            context::current()?;
            Err(CUDA_ERROR_INVALID_VALUE)
        });
    }
    // SAFETY: the program gives `count` bytes with the pointer.
    let bytes = unsafe { std::slice::from_raw_parts(from.address(), count as usize) };
    set_bytes(function, offset, bytes)
}

/// Launches a function with its stored state.
fn run(function: u64, width: i32, height: i32, stream: u64) -> Status {
    let entry = module::function(function)?;
    let remembered = REMEMBERED
        .lock()
        .as_ref()
        .and_then(|all| all.get(&function).cloned());
    let mut remembered = remembered.unwrap_or_else(|| Remembered {
        block: [1; 3],
        shared: 0,
        size: 0,
        params: Vec::new(),
    });
    let side = |given: i32| u32::try_from(given).map_err(|_| CUDA_ERROR_INVALID_VALUE);
    let shape = Shape {
        grid: [side(width)?, side(height)?, 1],
        block: remembered.block,
        shared: remembered.shared,
    };
    // Parameters that were not set are 0.
    let len = entry.layout().len.max(remembered.size);
    remembered.params.resize(len, 0);
    launch_packed(function, shape, stream, &remembered.params, &[])
}

/// `cuLaunch`.
pub unsafe extern "C" fn launch(function: u64) -> CUresult {
    guard(|| {
        context::current()?;
        run(function, 1, 1, 0)
    })
}

/// `cuLaunchGrid`.
pub unsafe extern "C" fn launch_grid(function: u64, width: i32, height: i32) -> CUresult {
    guard(|| {
        context::current()?;
        run(function, width, height, 0)
    })
}

/// `cuLaunchGridAsync`.
pub unsafe extern "C" fn launch_grid_async(
    function: u64,
    width: i32,
    height: i32,
    stream: u64,
) -> CUresult {
    guard(|| {
        context::current()?;
        run(function, width, height, stream)
    })
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchParams {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    params: Pointers,
}

/// `CUDA_COOPERATIVE_LAUNCH_MULTI_DEVICE_NO_PRE_LAUNCH_SYNC` and `…_NO_POST_LAUNCH_SYNC`.
const NO_SYNC: u32 = 3;

/// `cuLaunchCooperativeKernelMultiDevice`: a cooperative launch on each device. The streams must be explicit, each on a
/// different device. The means by which such kernels synchronized across devices were removed in CUDA 13.
pub unsafe extern "C" fn launch_on_devices(
    list: In<LaunchParams>,
    count: u32,
    flags: u32,
) -> CUresult {
    guard(|| {
        let devices = crate::proxy::context::count();
        if list.is_null() || count == 0 || count as usize > devices || flags & !NO_SYNC != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let launches: Vec<LaunchParams> = (0..count as usize)
            .map(|index| list.at(index))
            .collect::<Status<_>>()?;
        let mut seen = Vec::new();
        for launch in &launches {
            // The default streams have no name of their own.
            if launch.stream <= 2 {
                return Err(CUDA_ERROR_INVALID_HANDLE);
            }
            let device = default_stream::resolve(launch.stream, false)?
                .context()
                .device;
            if seen.contains(&device) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            seen.push(device);
        }
        let attribute = cooperative_attribute();
        for launch in &launches {
            let shape = Shape {
                grid: launch.grid,
                block: launch.block,
                shared: launch.shared,
            };
            launch_pointers(
                launch.function,
                shape,
                launch.stream,
                launch.params,
                &attribute,
            )?;
        }
        Ok(())
    })
}
