//! Streams.

use mpsshim_api::cuda::{
    CU_EVENT_WAIT_EXTERNAL, CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_READY, CUresult,
};

use super::entries;
use crate::ffi::{Out, Status, guard};
use crate::proxy::hostfn::{self, Work};
use crate::proxy::stream::{self, STREAMS};
use crate::proxy::submit::session;
use crate::proxy::{capture, context, default_stream, event, graph_host};

entries! {
    cuStreamCreate(_, _) => create,
    cuStreamCreateWithPriority(_, _, _) => create_with_priority,
    cuStreamDestroy(_) => destroy,
    cuStreamDestroy_v2(_) => destroy,
    cuStreamSynchronize(_) => synchronize::<false>,
    cuStreamSynchronize_ptsz(_) => synchronize::<true>,
    cuStreamQuery(_) => query::<false>,
    cuStreamQuery_ptsz(_) => query::<true>,
    cuStreamWaitEvent(_, _, _) => wait_event::<false>,
    cuStreamWaitEvent_ptsz(_, _, _) => wait_event::<true>,
    cuStreamGetFlags(_, _) => get_flags::<false>,
    cuStreamGetFlags_ptsz(_, _) => get_flags::<true>,
    cuStreamGetPriority(_, _) => get_priority::<false>,
    cuStreamGetPriority_ptsz(_, _) => get_priority::<true>,
    cuStreamGetId(_, _) => get_id::<false>,
    cuStreamGetId_ptsz(_, _) => get_id::<true>,
    cuStreamGetCtx(_, _) => get_ctx::<false>,
    cuStreamGetCtx_ptsz(_, _) => get_ctx::<true>,
    cuStreamGetCtx_v2(_, _, _) => get_ctx_v2::<false>,
    cuStreamGetCtx_v2_ptsz(_, _, _) => get_ctx_v2::<true>,
    cuStreamGetDevice(_, _) => get_device::<false>,
    cuStreamGetDevice_ptsz(_, _) => get_device::<true>,
    cuLaunchHostFunc(_, _, _) => launch_host_func::<false>,
    cuLaunchHostFunc_ptsz(_, _, _) => launch_host_func::<true>,
    cuStreamAddCallback(_, _, _, _) => add_callback::<false>,
    cuStreamAddCallback_ptsz(_, _, _, _) => add_callback::<true>,
}

fn make(out: Out<u64>, flags: u32, priority: i32) -> Status {
    out.required()?;
    let context = context::current()?;
    let made = stream::create(session()?, context, flags, priority, false)?;
    context.own_stream(made.handle());
    out.set(made.handle())
}

/// `cuStreamCreate`.
pub unsafe extern "C" fn create(out: Out<u64>, flags: u32) -> CUresult {
    guard(|| make(out, flags, 0))
}

/// `cuStreamCreateWithPriority`.
pub unsafe extern "C" fn create_with_priority(
    out: Out<u64>,
    flags: u32,
    priority: i32,
) -> CUresult {
    guard(|| make(out, flags, priority))
}

/// `cuStreamDestroy`. The default streams cannot be destroyed.
pub unsafe extern "C" fn destroy(handle: u64) -> CUresult {
    guard(|| {
        let stream = STREAMS.find(handle)?;
        stream.context().forget_stream(handle);
        capture::destroy_stream(session()?, handle)
    })
}

/// `cuStreamSynchronize`.
pub unsafe extern "C" fn synchronize<const PER_THREAD: bool>(handle: u64) -> CUresult {
    guard(|| {
        let (session, stream) = (session()?, default_stream::resolve(handle, PER_THREAD)?);
        capture::forbid_wait(session, stream)?;
        stream::synchronize(session, stream)
    })
}

/// `cuStreamQuery`.
pub unsafe extern "C" fn query<const PER_THREAD: bool>(handle: u64) -> CUresult {
    guard(|| {
        let (session, stream) = (session()?, default_stream::resolve(handle, PER_THREAD)?);
        capture::forbid_wait(session, stream)?;
        if stream::query(session, stream)? {
            Ok(())
        } else {
            Err(CUDA_ERROR_NOT_READY)
        }
    })
}

/// `cuStreamWaitEvent`.
pub unsafe extern "C" fn wait_event<const PER_THREAD: bool>(
    handle: u64,
    event: u64,
    flags: u32,
) -> CUresult {
    guard(|| {
        let stream = default_stream::resolve(handle, PER_THREAD)?;
        if flags > CU_EVENT_WAIT_EXTERNAL {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if flags != 0 && !stream.is_capturing() {
            return Err(CUDA_ERROR_ILLEGAL_STATE);
        }
        event::wait_in(session()?, stream, event::resolve(event)?, flags)
    })
}

/// `cuStreamGetFlags`.
pub unsafe extern "C" fn get_flags<const PER_THREAD: bool>(handle: u64, out: Out<u32>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(default_stream::resolve(handle, PER_THREAD)?.flags())
    })
}

/// `cuStreamGetPriority`.
pub unsafe extern "C" fn get_priority<const PER_THREAD: bool>(
    handle: u64,
    out: Out<i32>,
) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(default_stream::resolve(handle, PER_THREAD)?.priority())
    })
}

/// `cuStreamGetId`.
pub unsafe extern "C" fn get_id<const PER_THREAD: bool>(handle: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(default_stream::resolve(handle, PER_THREAD)?.id())
    })
}

/// `cuStreamGetCtx`.
pub unsafe extern "C" fn get_ctx<const PER_THREAD: bool>(handle: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(
            default_stream::resolve(handle, PER_THREAD)?
                .context()
                .handle,
        )
    })
}

/// `cuStreamGetCtx` as of CUDA 12.5: with the green context, if it is in one.
pub unsafe extern "C" fn get_ctx_v2<const PER_THREAD: bool>(
    handle: u64,
    out: Out<u64>,
    green: Out<u64>,
) -> CUresult {
    guard(|| {
        if out.is_null() && green.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let context = default_stream::resolve(handle, PER_THREAD)?.context();
        out.set_if_wanted(context.home().handle);
        green.set_if_wanted(context.green);
        Ok(())
    })
}

/// `cuStreamGetDevice`.
pub unsafe extern "C" fn get_device<const PER_THREAD: bool>(
    handle: u64,
    out: Out<i32>,
) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(
            default_stream::resolve(handle, PER_THREAD)?
                .context()
                .device,
        )
    })
}

/// `cuLaunchHostFunc`.
pub unsafe extern "C" fn launch_host_func<const PER_THREAD: bool>(
    handle: u64,
    function: Option<hostfn::Function>,
    data: usize,
) -> CUresult {
    guard(|| {
        let function = function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let stream = default_stream::resolve(handle, PER_THREAD)?;
        if stream.is_capturing() {
            return graph_host::capture(session()?, stream, function, data);
        }
        hostfn::enqueue(session()?, stream, Work::Function(function, data))
    })
}

/// `cuStreamAddCallback`.
pub unsafe extern "C" fn add_callback<const PER_THREAD: bool>(
    handle: u64,
    callback: Option<hostfn::Callback>,
    data: usize,
    flags: u32,
) -> CUresult {
    guard(|| {
        let callback = callback.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let stream = default_stream::resolve(handle, PER_THREAD)?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // Only functions can be captured.
        if stream.is_capturing() {
            return capture::forbid_wait(session()?, stream);
        }
        hostfn::enqueue(session()?, stream, Work::Callback(callback, handle, data))
    })
}
