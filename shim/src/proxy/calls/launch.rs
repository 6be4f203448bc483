//! Kernel launches: one asynchronous message each.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use mpsshim_api::cuda::{
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE,
    CU_LAUNCH_PARAM_END, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, CUlaunchAttribute, CUlaunchConfig, CUresult,
};
use mpsshim_proto::message::{ATTRIBUTES_MAX, Launch, Op, PARAMS_MAX};
use zerocopy::IntoBytes;

use super::attributes::{self, Recorded, check_cluster};
use super::entries;
use crate::ffi::{In, Status, guard};
use crate::proxy::module::{self, Function, FunctionRef};
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::session;
use crate::proxy::{context, default_stream, event, pages, printing};

entries! {
    cuLaunchKernel(_, _, _, _, _, _, _, _, _, _, _) => launch_kernel::<false>,
    cuLaunchKernel_ptsz(_, _, _, _, _, _, _, _, _, _, _) => launch_kernel::<true>,
    cuLaunchKernelEx(_, _, _, _) => launch_kernel_ex::<false>,
    cuLaunchKernelEx_ptsz(_, _, _, _) => launch_kernel_ex::<true>,
    cuLaunchCooperativeKernel(_, _, _, _, _, _, _, _, _, _) => launch_cooperative::<false>,
    cuLaunchCooperativeKernel_ptsz(_, _, _, _, _, _, _, _, _, _) => launch_cooperative::<true>,
}

/// Launches return when their kernels have ended, as `CUDA_LAUNCH_BLOCKING` asks.
static BLOCKING: AtomicBool = AtomicBool::new(false);

/// From now on launches wait for their kernels, or not. Captured launches never do.
pub fn wait_for_kernels(wait: bool) {
    BLOCKING.store(wait, Ordering::Relaxed);
}

/// How a launch gives its parameters: one pointer each.
pub type Pointers = In<*const u8>;
/// Or a list of names and values that leads to a packed buffer.
pub type Extra = In<usize>;

/// Grid and block dimensions of a launch, and its dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
}

/// `cuLaunchKernel`.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn launch_kernel<const PER_THREAD: bool>(
    function: u64,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: u64,
    params: Pointers,
    extra: Extra,
) -> CUresult {
    let shape = Shape {
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        shared,
    };
    guard(|| launch(function, shape, (stream, PER_THREAD), params, extra, &[]))
}

/// `cuLaunchKernelEx`.
pub unsafe extern "C" fn launch_kernel_ex<const PER_THREAD: bool>(
    config: In<CUlaunchConfig>,
    function: u64,
    params: Pointers,
    extra: Extra,
) -> CUresult {
    guard(|| {
        let config = config.get()?;
        // SAFETY: the program's configuration, as CUDA documents it.
        let attributes = unsafe { attributes(&config)? };
        launch(
            function,
            shape_of(&config),
            (config.stream.0, PER_THREAD),
            params,
            extra,
            attributes,
        )
    })
}

/// `cuLaunchCooperativeKernel`.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn launch_cooperative<const PER_THREAD: bool>(
    function: u64,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: u64,
    params: Pointers,
) -> CUresult {
    let shape = Shape {
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        shared,
    };
    guard(|| {
        let extra = Extra::none();
        launch(
            function,
            shape,
            (stream, PER_THREAD),
            params,
            extra,
            &cooperative_attribute(),
        )
    })
}

/// The attribute that makes a launch cooperative, as it travels.
pub fn cooperative_attribute() -> [u8; size_of::<CUlaunchAttribute>()] {
    let mut attribute = [0; size_of::<CUlaunchAttribute>()];
    attribute[..4].copy_from_slice(&CU_LAUNCH_ATTRIBUTE_COOPERATIVE.to_ne_bytes());
    attribute[8..12].copy_from_slice(&1u32.to_ne_bytes());
    attribute
}

/// The shape that a configuration asks for.
pub fn shape_of(config: &CUlaunchConfig) -> Shape {
    Shape {
        grid: config.grid,
        block: config.block,
        shared: config.shared_mem_bytes,
    }
}

/// The attributes of a configuration, as the bytes that travel.
///
/// # Safety
/// `config.attrs` is null or leads to `config.num_attrs` attributes.
pub unsafe fn attributes<'a>(config: &CUlaunchConfig) -> Status<&'a [u8]> {
    if config.num_attrs == 0 {
        return Ok(&[]);
    }
    if config.attrs.is_null() || config.num_attrs as usize > ATTRIBUTES_MAX {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let len = config.num_attrs as usize * size_of::<CUlaunchAttribute>();
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(config.attrs.cast(), len) })
}

/// The parameters of a launch.
#[derive(Clone, Copy)]
enum Params {
    /// One pointer for each parameter of the layout.
    Each(Pointers),
    /// A packed buffer.
    Packed(*const u8, usize),
    None,
}

/// The form in which the parameters come, and their length in bytes.
#[inline]
fn params_of(function: &Function, params: Pointers, extra: Extra) -> Status<(Params, usize)> {
    let layout = function.layout();
    if !params.is_null() {
        if !extra.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        return Ok((Params::Each(params), layout.len));
    }
    if extra.is_null() {
        return if layout.params.is_empty() {
            Ok((Params::None, 0))
        } else {
            Err(CUDA_ERROR_INVALID_VALUE)
        };
    }
    let (mut buffer, mut len) = (ptr::null::<u8>(), 0);
    let mut at = 0;
    loop {
        match extra.at(at)? {
            CU_LAUNCH_PARAM_END => break,
            CU_LAUNCH_PARAM_BUFFER_POINTER => buffer = extra.at(at + 1)? as *const u8,
            CU_LAUNCH_PARAM_BUFFER_SIZE => {
                let size = extra.at(at + 1)? as *const usize;
                if size.is_null() {
                    return Err(CUDA_ERROR_INVALID_VALUE);
                }
                // SAFETY: the value that goes with this name is a pointer to the size.
                len = unsafe { size.read() };
            }
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        at += 2;
        // There are only two names.
        if at > 8 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    if len > PARAMS_MAX || buffer.is_null() && len != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // The buffer may be shorter than the parameters: NCCL's kernels take 4 KiB of which it fills the beginning.
    Ok((Params::Packed(buffer, len), len.max(layout.len)))
}

/// Hands out the parameters piece by piece: offset in the packed buffer, and bytes. Returns the end of the last piece;
/// the caller must clear the rest if the program's buffer is shorter.
#[inline]
fn each_param(
    function: &Function,
    params: Params,
    mut put: impl FnMut(usize, &[u8]),
) -> Status<usize> {
    let layout = function.layout();
    match params {
        Params::Each(pointers) => {
            for (index, param) in layout.params.iter().enumerate() {
                let from = pointers.at(index)?;
                if from.is_null() {
                    return Err(CUDA_ERROR_INVALID_VALUE);
                }
                // SAFETY: parameter `index` has this size, and the program gave a pointer to it.
                let bytes = unsafe { std::slice::from_raw_parts(from, param.size as usize) };
                put(param.offset as usize, bytes);
            }
            Ok(layout.len)
        }
        Params::Packed(buffer, given) => {
            if given > 0 {
                // SAFETY: the program gave a buffer of this size.
                put(0, unsafe { std::slice::from_raw_parts(buffer, given) });
            }
            Ok(given)
        }
        Params::None => Ok(0),
    }
}

/// Parameters that can be read while the ring is held.
enum Own {
    As(Params),
    Packed(Vec<u8>),
}

/// Packs parameters of which some lie in managed memory.
#[cold]
fn own_params(function: &Function, params: Params) -> Status<Own> {
    let managed = match params {
        Params::Each(pointers) => {
            let mut any = false;
            for index in 0..function.layout().params.len() {
                any |= pages::is_in(pointers.at(index)?.addr() as u64);
            }
            any
        }
        Params::Packed(buffer, _) => pages::is_in(buffer.addr() as u64),
        Params::None => false,
    };
    if !managed {
        return Ok(Own::As(params));
    }
    let mut packed = vec![0; PARAMS_MAX];
    let len = each_param(function, params, |at, bytes| {
        packed[at..][..bytes.len()].copy_from_slice(bytes);
    })?;
    packed.truncate(len);
    Ok(Own::Packed(packed))
}

/// Checks the limits that the driver checks in the call itself.
#[inline]
pub fn check(function: &Function, shape: &Shape) -> Status {
    let limits = &context::device(function.context().device)?.limits;
    let inside = |size: &[u32; 3], most: &[u32; 3]| {
        size.iter()
            .zip(most)
            .all(|(size, most)| *size != 0 && size <= most)
    };
    let threads = shape.block.iter().map(|n| *n as u64).product::<u64>();
    if !inside(&shape.grid, &limits.grid)
        || !inside(&shape.block, &limits.block)
        || threads > limits.block_threads as u64
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if let Some(most) = function.known(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        && threads > most as u64
    {
        return Err(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    }
    if let Some(most) = function.known(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        && shape.shared > most as u32
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

/// A launch with a pointer to each parameter.
pub fn launch_pointers(
    function: u64,
    shape: Shape,
    stream: u64,
    params: Pointers,
    attributes: &[u8],
) -> Status {
    let extra = Extra::none();
    launch(function, shape, (stream, false), params, extra, attributes)
}

/// A launch with packed parameters: of no more bytes than [`PARAMS_MAX`], and no fewer than the kernel has.
pub fn launch_packed(
    function: u64,
    shape: Shape,
    stream: u64,
    params: &[u8],
    attributes: &[u8],
) -> Status {
    let stream = default_stream::resolve_for_launch(stream, false)?;
    let function = module::function_in(function, stream.context())?;
    let params = (Params::Packed(params.as_ptr(), params.len()), params.len());
    submit(function, shape, stream, params, attributes)
}

#[inline]
fn launch(
    function: u64,
    shape: Shape,
    (stream, per_thread): (u64, bool),
    params: Pointers,
    extra: Extra,
    attributes: &[u8],
) -> Status {
    let stream = default_stream::resolve_for_launch(stream, per_thread)?;
    let function: FunctionRef = module::function_in(function, stream.context())?;
    let params = params_of(function, params, extra)?;
    submit(function, shape, stream, params, attributes)
}

#[inline]
fn submit(
    function: FunctionRef,
    shape: Shape,
    stream: StreamRef,
    (params, len): (Params, usize),
    attributes: &[u8],
) -> Status {
    let session = session()?;
    if !ptr::eq(function.context(), stream.context().home()) {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    check(function, &shape)?;
    let recorded = if attributes.is_empty() {
        check_cluster(function, &shape, None)?;
        Recorded::default()
    } else {
        attributes::check(function, &shape, attributes)?
    };
    let body = Launch {
        function: function.handle(),
        stream: stream.handle(),
        grid: shape.grid,
        block: shape.block,
        shared: shape.shared,
        param_len: len as u32,
        attributes: (attributes.len() / size_of::<CUlaunchAttribute>()) as u32,
        flags: 0,
    };
    let behind = size_of::<Launch>() + len.next_multiple_of(8);
    if function.layout().system_scope() {
        pages::share(session, stream.is_capturing())?;
    }
    let own;
    let (params, attributes) = match pages::any() {
        true => {
            own = (own_params(function, params)?, pages::own(attributes));
            let params = match &own.0 {
                Own::Packed(packed) => Params::Packed(packed.as_ptr(), packed.len()),
                Own::As(params) => *params,
            };
            (params, &*own.1)
        }
        false => (params, attributes),
    };
    let work = pages::before_work_in(session, Some(stream))?;
    let mut ring = session.ring()?;
    let room = ring.reserve(behind + attributes.len())?;
    ring.fill(room, 0, body.as_bytes());
    let given = each_param(function, params, |at, bytes| {
        ring.fill(room, size_of::<Launch>() + at, bytes);
    })?;
    if given < len {
        ring.fill(
            room,
            size_of::<Launch>() + given,
            &[0; PARAMS_MAX][..len - given],
        );
    }
    if !attributes.is_empty() {
        ring.fill(room, behind, attributes);
    }
    ring.publish(room, Op::Launch, 0);
    stream.count(&ring);
    for event in recorded.into_iter().flatten() {
        event::recorded_by_launch(event, stream, &ring);
    }
    if work.is_some() {
        pages::behind_work(&mut ring, stream);
    }
    drop(ring);
    drop(work);
    if function.layout().prints() {
        printing::expect();
    }
    if stream.is_capturing() {
        return session.settle(stream.handle());
    }
    if BLOCKING.load(Ordering::Relaxed) {
        return stream::synchronize(session, stream);
    }
    Ok(())
}

/// The parameters of a kernel, packed.
pub fn packed(function: &Function, params: Pointers, extra: Extra) -> Status<Vec<u8>> {
    let (params, len) = params_of(function, params, extra)?;
    let mut packed = vec![0; len];
    each_param(function, params, |at, bytes| {
        packed[at..][..bytes.len()].copy_from_slice(bytes);
    })?;
    Ok(packed)
}
