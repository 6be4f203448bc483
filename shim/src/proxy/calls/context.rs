//! Contexts and the calling thread's stack of them.

use std::sync::atomic::Ordering;

use mpsshim_api::cuda::{
    CU_CTX_COREDUMP_ENABLE, CU_CTX_FLAGS_MASK, CU_CTX_MAP_HOST, CU_CTX_SCHED_MASK,
    CU_CTX_USER_COREDUMP_ENABLE, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, CUdevice, CUlimit, CUresult,
};
use mpsshim_proto::message::{Limit, Op, Value};

use super::entries;
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::capture;
use crate::proxy::context::{self, Context};
use crate::proxy::event;
use crate::proxy::stream::{self, GREATEST_PRIORITY, LEAST_PRIORITY};
use crate::proxy::submit::session;
use crate::proxy::teardown;

entries! {
    cuCtxCreate(_, _, _) => create_v2,
    cuCtxCreate_v2(_, _, _) => create_v2,
    cuCtxCreate_v3(_, _, _, _, _) => create_v3,
    cuCtxCreate_v4(_, _, _, _) => create_v4,
    cuCtxDestroy(_) => destroy,
    cuCtxDestroy_v2(_) => destroy,
    cuCtxPushCurrent(_) => push_current,
    cuCtxPushCurrent_v2(_) => push_current,
    cuCtxPopCurrent(_) => pop_current,
    cuCtxPopCurrent_v2(_) => pop_current,
    cuCtxSetCurrent(_) => set_current,
    cuCtxGetCurrent(_) => get_current,
    cuCtxGetDevice(_) => get_device,
    cuCtxGetDevice_v2(_, _) => get_device_v2,
    cuCtxGetFlags(_) => get_flags,
    cuCtxSetFlags(_) => set_flags,
    cuCtxGetId(_, _) => get_id,
    cuCtxGetApiVersion(_, _) => get_api_version,
    cuCtxGetStreamPriorityRange(_, _) => get_stream_priority_range,
    cuCtxGetCacheConfig(_) => get_cache_config,
    cuCtxSetCacheConfig(_) => set_cache_config,
    cuCtxGetSharedMemConfig(_) => get_shared_config,
    cuCtxSetSharedMemConfig(_) => set_shared_config,
    cuCtxAttach(_, _) => attach,
    cuCtxDetach(_) => detach,
    cuCtxGetExecAffinity(_, _) => get_exec_affinity,
    cuCtxGetLimit(_, _) => get_limit,
    cuCtxSetLimit(_, _) => set_limit,
    cuCtxRecordEvent(_, _) => record_event,
    cuCtxWaitEvent(_, _) => wait_event,
    cuCtxSynchronize() => synchronize,
    cuCtxSynchronize_v2(_) => synchronize_v2,
    cuCtxResetPersistingL2Cache() => reset_persisting_l2,
}

/// Flags without unknown ones and with at most one way of waiting.
pub fn valid_flags(flags: u32) -> Status<u32> {
    let schedule = flags & CU_CTX_SCHED_MASK;
    if flags & !CU_CTX_FLAGS_MASK != 0 || !(schedule == 0 || schedule.is_power_of_two()) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(flags)
}

fn make(out: Out<u64>, flags: u32, device: CUdevice, version: u32) -> Status {
    out.required()?;
    let mut flags = valid_flags(flags)?;
    if flags & CU_CTX_USER_COREDUMP_ENABLE != 0 {
        // The genuine driver reports the one as the other.
        flags = flags & !CU_CTX_USER_COREDUMP_ENABLE | CU_CTX_COREDUMP_ENABLE;
    }
    out.set(context::create(device, flags, version)?.handle)
}

/// `cuCtxCreate` as of CUDA 3.2.
pub unsafe extern "C" fn create_v2(out: Out<u64>, flags: u32, device: CUdevice) -> CUresult {
    guard(|| make(out, flags, device, 3020))
}

/// `cuCtxCreate` as of CUDA 11.4: with execution affinity, which a shared context cannot give.
pub unsafe extern "C" fn create_v3(
    out: Out<u64>,
    affinity: In<[u32; 2]>,
    count: i32,
    flags: u32,
    device: CUdevice,
) -> CUresult {
    guard(|| {
        if count != 0 && affinity.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if count != 0 || !affinity.is_null() {
            return Err(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
        }
        make(out, flags, device, 3020)
    })
}

/// `CUctxCreateParams`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CreateParams {
    affinity: *const u64,
    affinity_count: i32,
    graphics: *const u64,
}

/// `cuCtxCreate` as of CUDA 12.5.
pub unsafe extern "C" fn create_v4(
    out: Out<u64>,
    params: In<CreateParams>,
    flags: u32,
    device: CUdevice,
) -> CUresult {
    guard(|| {
        if !params.is_null() {
            let params = params.get()?;
            if params.affinity_count != 0 || !params.graphics.is_null() {
                return Err(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
            }
        }
        make(out, flags, device, 3020)
    })
}

/// `cuCtxDestroy`.
pub unsafe extern "C" fn destroy(context: u64) -> CUresult {
    guard(|| {
        if context == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        context::permitted()?;
        teardown::destroy(context::by_handle(context)?)
    })
}

/// `cuCtxRecordEvent`.
pub unsafe extern "C" fn record_event(context: u64, event: u64) -> CUresult {
    guard(|| {
        let context = context::by_handle(context)?.usable()?;
        event::record_context(session()?, context, event::resolve(event)?)
    })
}

/// `cuCtxWaitEvent`.
pub unsafe extern "C" fn wait_event(context: u64, event: u64) -> CUresult {
    guard(|| {
        let context = context::by_handle(context)?.usable()?;
        event::wait_in_context(session()?, context, event::resolve(event)?)
    })
}

/// `cuCtxPushCurrent`.
pub unsafe extern "C" fn push_current(context: u64) -> CUresult {
    guard(|| {
        context::permitted()?;
        if context == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        context::push(context::by_handle(context)?);
        Ok(())
    })
}

/// `cuCtxPopCurrent`.
pub unsafe extern "C" fn pop_current(out: Out<u64>) -> CUresult {
    guard(|| {
        context::permitted()?;
        let top = context::top().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        context::pop();
        out.set_if_wanted(top.handle);
        Ok(())
    })
}

/// `cuCtxSetCurrent`.
pub unsafe extern "C" fn set_current(context: u64) -> CUresult {
    guard(|| {
        context::permitted()?;
        let context = if context == 0 {
            None
        } else {
            Some(context::by_handle(context)?)
        };
        context::set(context);
        Ok(())
    })
}

/// `cuCtxGetCurrent`.
pub unsafe extern "C" fn get_current(out: Out<u64>) -> CUresult {
    guard(|| {
        context::permitted()?;
        out.set(context::top().map_or(0, |context| context.handle))
    })
}

/// `cuCtxGetDevice`.
pub unsafe extern "C" fn get_device(out: Out<CUdevice>) -> CUresult {
    guard(|| {
        out.required()?;
        context::permitted()?;
        // Also if it was destroyed.
        out.set(context::top().ok_or(CUDA_ERROR_INVALID_CONTEXT)?.device)
    })
}

/// `cuCtxGetDevice` as of CUDA 13: of any context.
pub unsafe extern "C" fn get_device_v2(out: Out<CUdevice>, context: u64) -> CUresult {
    if context == 0 {
        // SAFETY: the caller's pointer.
        return unsafe { get_device(out) };
    }
    guard(|| {
        out.required()?;
        out.set(context::by_handle(context)?.device)
    })
}

/// `cuCtxGetFlags`. A primary context always maps host memory, though `cuDevicePrimaryCtxGetState` leaves that out.
pub unsafe extern "C" fn get_flags(out: Out<u32>) -> CUresult {
    guard(|| {
        out.required()?;
        context::permitted()?;
        // Also if it was destroyed.
        let context = context::top().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        let mapped = if context.home().primary {
            CU_CTX_MAP_HOST
        } else {
            0
        };
        out.set(context.flags.load(Ordering::Relaxed) | mapped)
    })
}

/// `cuCtxSetFlags`.
pub unsafe extern "C" fn set_flags(flags: u32) -> CUresult {
    guard(|| {
        let context = context::current()?;
        let flags = valid_flags(flags)?;
        // Mapped host memory cannot be taken back.
        let kept = context.flags.load(Ordering::Relaxed) & CU_CTX_MAP_HOST;
        context.flags.store(flags | kept, Ordering::Relaxed);
        Ok(())
    })
}

/// `cuCtxGetId`.
pub unsafe extern "C" fn get_id(context: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        let context = context::given_or_current(context)?.usable()?;
        out.set(context.id.load(Ordering::Relaxed))
    })
}

/// `cuCtxGetApiVersion`.
pub unsafe extern "C" fn get_api_version(context: u64, out: Out<u32>) -> CUresult {
    guard(|| {
        let context = context::given_or_current(context)?;
        out.required()?;
        let gone = |_| CUDA_ERROR_INVALID_CONTEXT;
        out.set(context.usable().map_err(gone)?.version)
    })
}

/// `cuCtxGetStreamPriorityRange`: the range of devices of compute capability 7.0 and later.
pub unsafe extern "C" fn get_stream_priority_range(
    least: Out<i32>,
    greatest: Out<i32>,
) -> CUresult {
    guard(|| {
        context::current()?;
        least.set_if_wanted(LEAST_PRIORITY);
        greatest.set_if_wanted(GREATEST_PRIORITY);
        Ok(())
    })
}

/// `cuCtxAttach`: requires one more detach before the current context ends.
pub unsafe extern "C" fn attach(out: Out<u64>, flags: u32) -> CUresult {
    guard(|| {
        let context = context::current()?;
        out.required()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        context.attached.fetch_add(1, Ordering::Relaxed);
        out.set(context.handle)
    })
}

/// `cuCtxDetach`.
pub unsafe extern "C" fn detach(context: u64) -> CUresult {
    guard(|| {
        context::current()?;
        if context == 0 {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        // A destroyed context is invalid here, whereas other calls distinguish the two.
        let gone = |_| CUDA_ERROR_INVALID_CONTEXT;
        let context = context::by_handle(context)?.usable().map_err(gone)?;
        let fewer = |count: u32| count.checked_sub(1);
        let attached = &context.attached;
        match attached.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer) {
            Ok(_) => Ok(()),
            Err(_) => teardown::destroy(context),
        }
    })
}

/// `CUexecAffinityParam`: a type and its value.
pub type ExecAffinity = [u32; 2];

/// `cuCtxGetExecAffinity`: the number of multiprocessors.
pub unsafe extern "C" fn get_exec_affinity(out: Out<ExecAffinity>, kind: u32) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let context = context::current()?;
        if kind != 0 {
            return Err(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
        }
        let count = context::multiprocessors(context);
        out.set([0, count.unwrap_or(1) as u32])
    })
}

/// `cuCtxGetCacheConfig`.
pub unsafe extern "C" fn get_cache_config(out: Out<u32>) -> CUresult {
    guard(|| out.set(context::current()?.cache_config.load(Ordering::Relaxed)))
}

/// `cuCtxSetCacheConfig`: a preference that devices with one cache for both do not need.
pub unsafe extern "C" fn set_cache_config(config: u32) -> CUresult {
    guard(|| {
        let context = context::current()?;
        if config > 3 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        context.cache_config.store(config, Ordering::Relaxed);
        Ok(())
    })
}

/// `cuCtxGetSharedMemConfig`.
pub unsafe extern "C" fn get_shared_config(out: Out<u32>) -> CUresult {
    guard(|| {
        context::current()?;
        // Four-byte banks, whatever was set.
        out.set(1)
    })
}

/// `cuCtxSetSharedMemConfig`: without effect on current devices.
pub unsafe extern "C" fn set_shared_config(config: u32) -> CUresult {
    guard(|| {
        context::current()?;
        if config > 2 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    })
}

fn limit_body(context: &Context, limit: CUlimit, value: u64) -> Limit {
    Limit {
        value,
        limit,
        device: context.server_device,
    }
}

/// `cuCtxGetLimit`.
pub unsafe extern "C" fn get_limit(out: Out<usize>, limit: CUlimit) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let context = context::current()?;
        let session = session()?;
        session.check()?;
        if let Some(known) = context.known_limit(limit) {
            return out.set(known as usize);
        }
        let body = limit_body(context, limit, 0);
        let value: Value = session.request(Op::GetLimit, &body, &[])?.read()?;
        context.know_limit(limit, value.value);
        out.set(value.value as usize)
    })
}

/// `cuCtxSetLimit`. The context is shared: the server's limit grows to the largest that any client has set, and each
/// client reads its own value.
pub unsafe extern "C" fn set_limit(limit: CUlimit, value: usize) -> CUresult {
    guard(|| {
        capture::forbid(session()?)?;
        let context = context::current()?;
        let body = limit_body(context, limit, value as u64);
        let value: Value = session()?.request(Op::SetLimit, &body, &[])?.read()?;
        context.know_limit(limit, value.value);
        Ok(())
    })
}

/// `cuCtxSynchronize`.
pub unsafe extern "C" fn synchronize() -> CUresult {
    guard(|| {
        let (session, context) = (session()?, context::current()?);
        capture::forbid_wait_for_all(session, context)?;
        stream::quiesce(session, Some(context))
    })
}

/// `cuCtxSynchronize` as of CUDA 13: of any context.
pub unsafe extern "C" fn synchronize_v2(context: u64) -> CUresult {
    guard(|| {
        let context = context::given_or_current(context)?;
        let (session, context) = (session()?, context.usable()?);
        capture::forbid_wait_for_all(session, context)?;
        stream::quiesce(session, Some(context))
    })
}

/// `cuCtxResetPersistingL2Cache`: the cache is shared, so one client must not reset it.
pub unsafe extern "C" fn reset_persisting_l2() -> CUresult {
    guard(|| context::current().map(drop))
}
