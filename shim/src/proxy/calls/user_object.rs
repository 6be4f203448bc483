//! User objects.

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUresult};
use mpsshim_proto::message::graph::list;

use super::entries;
use crate::ffi::{Out, Status, guard};
use crate::proxy::graph;
use crate::proxy::submit::session;
use crate::proxy::user_object::{self, Destroy};

entries! {
    cuUserObjectCreate(_, _, _, _, _) => create,
    cuUserObjectRetain(_, _) => retain,
    cuUserObjectRelease(_, _) => release,
    cuGraphRetainUserObject(_, _, _, _) => graph_retain,
    cuGraphReleaseUserObject(_, _, _) => graph_release,
}

/// `cuUserObjectCreate`.
pub unsafe extern "C" fn create(
    out: Out<u64>,
    data: usize,
    destroy: Option<Destroy>,
    references: u32,
    flags: u32,
) -> CUresult {
    guard(|| {
        out.required()?;
        let destroy = destroy.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        out.set(user_object::create(data, destroy, references, flags)?)
    })
}

/// `cuUserObjectRetain`.
pub unsafe extern "C" fn retain(object: u64, count: u32) -> CUresult {
    guard(|| user_object::retain(object, count))
}

/// `cuUserObjectRelease`.
pub unsafe extern "C" fn release(object: u64, count: u32) -> CUresult {
    guard(|| user_object::release(object, count))
}

fn exists(graph: u64) -> Status {
    graph::list(session()?, graph, list::NODES, true).map(drop)
}

/// `cuGraphRetainUserObject`.
pub unsafe extern "C" fn graph_retain(graph: u64, object: u64, count: u32, flags: u32) -> CUresult {
    guard(|| {
        exists(graph)?;
        user_object::graph_retains(graph, object, count, flags)
    })
}

/// `cuGraphReleaseUserObject`.
pub unsafe extern "C" fn graph_release(graph: u64, object: u64, count: u32) -> CUresult {
    guard(|| {
        exists(graph)?;
        user_object::graph_releases(graph, object, count)
    })
}
