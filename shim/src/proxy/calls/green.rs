//! Green contexts, and the multiprocessors they are made of.
//!
//! A resource in the program has the fields that CUDA documents and, in the internal ones, its index in the server's
//! list: the driver's own structure stays in the server.

use mpsshim_proto::message::context::MAX_GROUPS;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::context::{
    GreenCreate, Resource, ResourceGroups, ResourceJoin, ResourceQuery, ResourceSplit,
};
use mpsshim_proto::message::{Op, Value};
use parking_lot::RwLock;
use zerocopy::{FromBytes, IntoBytes};

use super::entries;
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::context::{self, Context};
use crate::proxy::submit::session;
use crate::proxy::{default_stream, event, stream, teardown};

entries! {
    cuDeviceGetDevResource(_, _, _) => device_get_resource,
    cuCtxGetDevResource(_, _, _) => ctx_get_resource,
    cuGreenCtxGetDevResource(_, _, _) => green_get_resource,
    cuDevSmResourceSplitByCount(_, _, _, _, _, _) => split_by_count,
    cuDevResourceGenerateDesc(_, _, _) => generate_desc,
    cuGreenCtxCreate(_, _, _, _) => create,
    cuGreenCtxDestroy(_) => destroy,
    cuCtxFromGreenCtx(_, _) => from_green,
    cuGreenCtxGetId(_, _) => get_id,
    cuGreenCtxStreamCreate(_, _, _, _) => stream_create,
    cuStreamGetGreenCtx(_, _) => stream_get_green,
    cuGreenCtxRecordEvent(_, _) => green_record,
    cuGreenCtxWaitEvent(_, _) => green_wait,
}

/// Every green context of the process, those that ended included.
static GREENS: RwLock<BTreeMap<u64, &'static Context>> = RwLock::new(BTreeMap::new());

/// Identifies a resource that we returned; its index follows.
const MARK: [u8; 8] = *b"mpsshim\x01";

fn green(handle: u64) -> Status<&'static Context> {
    let found = GREENS.read().get(&handle).copied();
    found.ok_or(CUDA_ERROR_INVALID_CONTEXT)
}

/// A resource in the form that the program receives.
fn shown(resource: &Resource) -> CUdevResource {
    let mut shown = CUdevResource {
        kind: CU_DEV_RESOURCE_TYPE_SM,
        sm: [resource.count, resource.least, resource.alignment],
        ..CUdevResource::INVALID
    };
    shown.internal[..8].copy_from_slice(&MARK);
    shown.internal[8..12].copy_from_slice(&resource.token.to_ne_bytes());
    shown
}

/// The index of a resource that we returned.
fn token_of(resource: &CUdevResource) -> Status<u32> {
    if resource.kind != CU_DEV_RESOURCE_TYPE_SM || resource.internal[..8] != MARK {
        return Err(CUDA_ERROR_INVALID_RESOURCE_TYPE);
    }
    let mut token = [0; 4];
    token.copy_from_slice(&resource.internal[8..12]);
    Ok(u32::from_ne_bytes(token))
}

fn query(out: Out<CUdevResource>, green: u64, ordinal: i32, kind: u32) -> Status {
    out.required()?;
    if kind != CU_DEV_RESOURCE_TYPE_SM {
        return Err(CUDA_ERROR_INVALID_RESOURCE_TYPE);
    }
    let session = session()?;
    let body = ResourceQuery {
        green,
        device: context::device(ordinal)?.attach(session)?,
        kind,
    };
    let resource: Resource = session.request(Op::ResourceQuery, &body, &[])?.read()?;
    out.set(shown(&resource))
}

/// `cuDeviceGetDevResource`.
pub unsafe extern "C" fn device_get_resource(
    device: CUdevice,
    out: Out<CUdevResource>,
    kind: u32,
) -> CUresult {
    guard(|| {
        context::device(device)?;
        query(out, 0, device, kind)
    })
}

/// `cuCtxGetDevResource`.
pub unsafe extern "C" fn ctx_get_resource(
    handle: u64,
    out: Out<CUdevResource>,
    kind: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        let context = context::by_handle(handle)?.usable()?;
        query(out, context.streams_in(), context.device, kind)
    })
}

/// `cuGreenCtxGetDevResource`.
pub unsafe extern "C" fn green_get_resource(
    handle: u64,
    out: Out<CUdevResource>,
    kind: u32,
) -> CUresult {
    guard(|| {
        let context = green(handle)?.usable()?;
        query(out, handle, context.device, kind)
    })
}

/// `cuDevSmResourceSplitByCount`.
pub unsafe extern "C" fn split_by_count(
    result: Out<CUdevResource>,
    groups: Out<u32>,
    input: In<CUdevResource>,
    remaining: Out<CUdevResource>,
    flags: u32,
    least: u32,
) -> CUresult {
    guard(|| {
        groups.required()?;
        let from = input.get()?;
        let body = ResourceSplit {
            token: token_of(&from)?,
            count: from.sm[0],
            groups: groups.get()?.min(MAX_GROUPS),
            wanted: u32::from(!result.is_null()) | u32::from(!remaining.is_null()) << 1,
            flags,
            least,
        };
        let answer = session()?.request(Op::ResourceSplit, &body, &[])?;
        let head: ResourceGroups = answer.read()?;
        let told = &answer.payload[size_of::<ResourceGroups>()..];
        for (index, group) in told.chunks_exact(size_of::<Resource>()).enumerate() {
            let group = Resource::read_from_bytes(group).map_err(|_| CUDA_ERROR_UNKNOWN)?;
            if index < body.groups as usize {
                result.set_at(index, shown(&group))?;
            }
        }
        remaining.set_if_wanted(match head.remaining.count {
            0 => CUdevResource::INVALID,
            _ => shown(&head.remaining),
        });
        groups.set(head.groups)
    })
}

/// `cuDevResourceGenerateDesc`.
pub unsafe extern "C" fn generate_desc(
    out: Out<u64>,
    resources: In<CUdevResource>,
    count: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        if resources.is_null() || count == 0 || count > MAX_GROUPS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut tokens = Vec::new();
        for index in 0..count as usize {
            tokens.push(token_of(&resources.at(index)?)?);
        }
        let body = ResourceJoin { count, device: 0 };
        let value: Value = session()?
            .request(Op::ResourceJoin, &body, tokens.as_bytes())?
            .read()?;
        out.set(Handle::new(Kind::ResourceDescriptor, 0, value.value as u32).0)
    })
}

/// `cuGreenCtxCreate`.
pub unsafe extern "C" fn create(
    out: Out<u64>,
    description: u64,
    device: CUdevice,
    flags: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        let server = context::device(device)?;
        if flags != CU_GREEN_CTX_DEFAULT_STREAM {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let description = match (description, Handle(description).kind()) {
            (0, _) => 0,
            (_, Some(Kind::ResourceDescriptor)) => Handle(description).index() + 1,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        let session = session()?;
        let handle = context::next_green_handle();
        let body = GreenCreate {
            green: handle,
            description,
            device: server.attach(session)?,
            flags,
            pad: 0,
        };
        session.request(Op::GreenCreate, &body, &[])?.status.ok()?;
        let context = context::create_green(device, handle)?;
        GREENS.write().insert(handle, context);
        out.set(handle)
    })
}

/// `cuGreenCtxDestroy`.
pub unsafe extern "C" fn destroy(handle: u64) -> CUresult {
    guard(|| teardown::destroy_green(session()?, green(handle)?))
}

/// `cuCtxFromGreenCtx`.
pub unsafe extern "C" fn from_green(out: Out<u64>, handle: u64) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(green(handle)?.usable()?.handle)
    })
}

/// `cuGreenCtxGetId`.
pub unsafe extern "C" fn get_id(handle: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(green(handle)?.id.load(Ordering::Relaxed))
    })
}

/// `cuGreenCtxStreamCreate`.
pub unsafe extern "C" fn stream_create(
    out: Out<u64>,
    handle: u64,
    flags: u32,
    priority: i32,
) -> CUresult {
    guard(|| {
        out.required()?;
        let context = green(handle)?.usable()?;
        if flags != CU_STREAM_NON_BLOCKING {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let made = stream::create(session()?, context, flags, priority, false)?;
        context.own_stream(made.handle());
        out.set(made.handle())
    })
}

/// `cuStreamGetGreenCtx`: NULL for a stream of no green context.
pub unsafe extern "C" fn stream_get_green(handle: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(default_stream::resolve(handle, false)?.context().green)
    })
}

/// `cuGreenCtxRecordEvent`.
pub unsafe extern "C" fn green_record(handle: u64, event: u64) -> CUresult {
    guard(|| {
        let context = green(handle)?.usable()?;
        event::record_context(session()?, context, event::resolve(event)?)
    })
}

/// `cuGreenCtxWaitEvent`.
pub unsafe extern "C" fn green_wait(handle: u64, event: u64) -> CUresult {
    guard(|| {
        let context = green(handle)?.usable()?;
        event::wait_in_context(session()?, context, event::resolve(event)?)
    })
}
