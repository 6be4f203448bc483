//! Graphs: creation, queries, instantiation, launches. The parameters of nodes are in `graph_node`.

use std::ffi::c_char;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_LOSSY_QUERY, CUDA_ERROR_OPERATING_SYSTEM,
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUgraphEdgeData, CUgraphExecUpdateResultInfo, CUresult,
};
use mpsshim_proto::message::graph::{
    GraphCreate, GraphDependencies, GraphDot, GraphEnabled, GraphInstantiate, GraphMemory,
    GraphPair, NODES_MOST, graph_memory, list,
};
use mpsshim_proto::message::{Op, Value};
use zerocopy::IntoBytes;

use super::capture::{elements, elements_if_any};
use super::entries;
use crate::ffi::{In, Out, Status, Text, guard};
use crate::proxy::graph::{self, Listed};
use crate::proxy::submit::session;
use crate::proxy::{context, default_stream};

entries! {
    cuGraphCreate(_, _) => create,
    cuGraphDestroy(_) => destroy,
    cuGraphClone(_, _) => clone,
    cuGraphNodeFindInClone(_, _, _) => find_in_clone,
    cuGraphNodeGetType(_, _) => node_kind,
    cuGraphDestroyNode(_) => destroy_node,
    cuGraphGetNodes(_, _, _) => get_nodes,
    cuGraphGetRootNodes(_, _, _) => get_roots,
    cuGraphGetEdges(_, _, _, _) => get_edges_v1,
    cuGraphGetEdges_v2(_, _, _, _, _) => get_edges,
    cuGraphNodeGetDependencies(_, _, _) => get_dependencies_v1,
    cuGraphNodeGetDependencies_v2(_, _, _, _) => get_dependencies,
    cuGraphNodeGetDependentNodes(_, _, _) => get_dependents_v1,
    cuGraphNodeGetDependentNodes_v2(_, _, _, _) => get_dependents,
    cuGraphAddDependencies(_, _, _, _) => add_dependencies_v1,
    cuGraphAddDependencies_v2(_, _, _, _, _) => add_dependencies,
    cuGraphRemoveDependencies(_, _, _, _) => remove_dependencies_v1,
    cuGraphRemoveDependencies_v2(_, _, _, _, _) => remove_dependencies,
    cuGraphInstantiate(_, _, _, _, _) => instantiate_v1,
    cuGraphInstantiate_v2(_, _, _, _, _) => instantiate_v1,
    cuGraphInstantiateWithFlags(_, _, _) => instantiate,
    cuGraphInstantiateWithParams(_, _, _) => instantiate_with_params::<false>,
    cuGraphInstantiateWithParams_ptsz(_, _, _) => instantiate_with_params::<true>,
    cuGraphLaunch(_, _) => launch::<false>,
    cuGraphLaunch_ptsz(_, _) => launch::<true>,
    cuGraphUpload(_, _) => upload::<false>,
    cuGraphUpload_ptsz(_, _) => upload::<true>,
    cuGraphExecDestroy(_) => destroy_exec,
    cuGraphExecGetFlags(_, _) => exec_flags,
    cuGraphExecUpdate(_, _, _, _) => update_v1,
    cuGraphExecUpdate_v2(_, _, _) => update,
    cuGraphNodeGetEnabled(_, _, _) => get_enabled,
    cuGraphNodeSetEnabled(_, _, _) => set_enabled,
    cuGraphDebugDotPrint(_, _, _) => print_dot,
    cuDeviceGraphMemTrim(_) => memory_trim,
    cuDeviceGetGraphMemAttribute(_, _, _) => memory_get,
    cuDeviceSetGraphMemAttribute(_, _, _) => memory_set,
}

/// `cuGraphCreate`.
pub unsafe extern "C" fn create(out: Out<u64>, flags: u32) -> CUresult {
    guard(|| {
        out.required()?;
        // A graph belongs to no context; its nodes say where they run.
        let device = graph::device(session()?)?;
        let body = GraphCreate { flags, device };
        let made: Value = session()?.request(Op::GraphCreate, &body, &[])?.read()?;
        out.set(made.value)
    })
}

/// `cuGraphDestroy`.
pub unsafe extern "C" fn destroy(graph: u64) -> CUresult {
    guard(|| graph::destroy(session()?, graph))
}

/// `cuGraphClone`.
pub unsafe extern "C" fn clone(out: Out<u64>, graph: u64) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(graph::clone(session()?, graph)?)
    })
}

/// `cuGraphNodeFindInClone`.
pub unsafe extern "C" fn find_in_clone(out: Out<u64>, node: u64, clone: u64) -> CUresult {
    guard(|| {
        out.required()?;
        let body = GraphPair {
            first: node,
            second: clone,
        };
        let found: Value = session()?
            .request(Op::GraphFindInClone, &body, &[])?
            .read()?;
        out.set(found.value)
    })
}

/// `cuGraphNodeGetType`.
pub unsafe extern "C" fn node_kind(node: u64, out: Out<u32>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(graph::request_value(session()?, Op::GraphNodeKind, node)? as u32)
    })
}

/// `cuGraphDestroyNode`.
pub unsafe extern "C" fn destroy_node(node: u64) -> CUresult {
    guard(|| graph::destroy_node(session()?, node))
}

/// Returns a list: its length if there is no buffer, else as many entries as fit, followed by null handles.
fn give(
    object: u64,
    what: u32,
    (nodes, to): (Out<u64>, Option<Out<u64>>),
    edges: Out<CUgraphEdgeData>,
    count: Out<usize>,
) -> Status {
    count.required()?;
    let session = session()?;
    if nodes.is_null() {
        if to.is_some_and(|to| !to.is_null()) || !edges.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        return count.set(graph::list(session, object, what, true)?.0);
    }
    if to.is_some_and(Out::is_null) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let room = count.get()?;
    if room == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let (_, all): (usize, Listed) = graph::list(session, object, what, false)?;
    // Without a buffer for them, non-default edges would be lost.
    if edges.is_null() && all.edges.iter().any(|e| *e != CUgraphEdgeData::default()) {
        return Err(CUDA_ERROR_LOSSY_QUERY);
    }
    for index in 0..room {
        nodes.set_at(index, all.nodes.get(index).copied().unwrap_or(0))?;
        if let Some(to) = to {
            to.set_at(index, all.to.get(index).copied().unwrap_or(0))?;
        }
        if !edges.is_null() {
            edges.set_at(index, all.edges.get(index).copied().unwrap_or_default())?;
        }
    }
    count.set(room.min(all.nodes.len()))
}

/// `cuGraphGetNodes`.
pub unsafe extern "C" fn get_nodes(graph: u64, nodes: Out<u64>, count: Out<usize>) -> CUresult {
    guard(|| give(graph, list::NODES, (nodes, None), Out::none(), count))
}

/// `cuGraphGetRootNodes`.
pub unsafe extern "C" fn get_roots(graph: u64, nodes: Out<u64>, count: Out<usize>) -> CUresult {
    guard(|| give(graph, list::ROOTS, (nodes, None), Out::none(), count))
}

/// `cuGraphGetEdges` as of CUDA 10.0.
pub unsafe extern "C" fn get_edges_v1(
    graph: u64,
    from: Out<u64>,
    to: Out<u64>,
    count: Out<usize>,
) -> CUresult {
    guard(|| give(graph, list::EDGES, (from, Some(to)), Out::none(), count))
}

/// `cuGraphGetEdges` as of CUDA 12.3: with edge data.
pub unsafe extern "C" fn get_edges(
    graph: u64,
    from: Out<u64>,
    to: Out<u64>,
    edges: Out<CUgraphEdgeData>,
    count: Out<usize>,
) -> CUresult {
    guard(|| give(graph, list::EDGES, (from, Some(to)), edges, count))
}

/// `cuGraphNodeGetDependencies` as of CUDA 10.0.
pub unsafe extern "C" fn get_dependencies_v1(
    node: u64,
    nodes: Out<u64>,
    count: Out<usize>,
) -> CUresult {
    guard(|| give(node, list::DEPENDENCIES, (nodes, None), Out::none(), count))
}

/// `cuGraphNodeGetDependencies` as of CUDA 12.3: with edge data.
pub unsafe extern "C" fn get_dependencies(
    node: u64,
    nodes: Out<u64>,
    edges: Out<CUgraphEdgeData>,
    count: Out<usize>,
) -> CUresult {
    guard(|| give(node, list::DEPENDENCIES, (nodes, None), edges, count))
}

/// `cuGraphNodeGetDependentNodes` as of CUDA 10.0.
pub unsafe extern "C" fn get_dependents_v1(
    node: u64,
    nodes: Out<u64>,
    count: Out<usize>,
) -> CUresult {
    guard(|| give(node, list::DEPENDENTS, (nodes, None), Out::none(), count))
}

/// `cuGraphNodeGetDependentNodes` as of CUDA 12.3: with edge data.
pub unsafe extern "C" fn get_dependents(
    node: u64,
    nodes: Out<u64>,
    edges: Out<CUgraphEdgeData>,
    count: Out<usize>,
) -> CUresult {
    guard(|| give(node, list::DEPENDENTS, (nodes, None), edges, count))
}

/// Adds or removes dependencies; many of them in several messages.
fn depend(
    graph: u64,
    (from, to): (In<u64>, In<u64>),
    edges: In<CUgraphEdgeData>,
    count: usize,
    remove: bool,
) -> Status {
    let (from, to) = (elements(from, count)?, elements(to, count)?);
    let edges = elements_if_any(edges, count)?;
    send_dependencies(graph, (&from, &to), &edges, remove)
}

fn send_dependencies(
    graph: u64,
    (from, to): (&[u64], &[u64]),
    edges: &[CUgraphEdgeData],
    remove: bool,
) -> Status {
    let session = session()?;
    let (mut first, count) = (0, from.len());
    loop {
        let part = (count - first).min(NODES_MOST);
        let range = first..first + part;
        let body = GraphDependencies {
            graph,
            count: part as u32,
            remove: u32::from(remove),
        };
        let edges = edges.get(range.clone()).unwrap_or(&[]);
        let behind = [
            from[range.clone()].as_bytes(),
            to[range].as_bytes(),
            edges.as_bytes(),
        ]
        .concat();
        session
            .request(Op::GraphDependencies, &body, &behind)?
            .status
            .ok()?;
        first += part;
        if first >= count {
            return Ok(());
        }
    }
}

/// Adds the dependencies of a node that did not fit the message that added it.
pub fn add_late(graph: u64, from: &[u64], node: u64, edges: &[CUgraphEdgeData]) -> Status {
    let first = edges.len().saturating_sub(from.len());
    let to = vec![node; from.len()];
    send_dependencies(graph, (from, &to), edges.get(first..).unwrap_or(&[]), false)
}

/// `cuGraphAddDependencies` as of CUDA 10.0.
pub unsafe extern "C" fn add_dependencies_v1(
    graph: u64,
    from: In<u64>,
    to: In<u64>,
    count: usize,
) -> CUresult {
    guard(|| depend(graph, (from, to), In::none(), count, false))
}

/// `cuGraphAddDependencies` as of CUDA 12.3: with edge data.
pub unsafe extern "C" fn add_dependencies(
    graph: u64,
    from: In<u64>,
    to: In<u64>,
    edges: In<CUgraphEdgeData>,
    count: usize,
) -> CUresult {
    guard(|| depend(graph, (from, to), edges, count, false))
}

/// `cuGraphRemoveDependencies` as of CUDA 10.0.
pub unsafe extern "C" fn remove_dependencies_v1(
    graph: u64,
    from: In<u64>,
    to: In<u64>,
    count: usize,
) -> CUresult {
    guard(|| depend(graph, (from, to), In::none(), count, true))
}

/// `cuGraphRemoveDependencies` as of CUDA 12.3: with edge data.
pub unsafe extern "C" fn remove_dependencies(
    graph: u64,
    from: In<u64>,
    to: In<u64>,
    edges: In<CUgraphEdgeData>,
    count: usize,
) -> CUresult {
    guard(|| depend(graph, (from, to), edges, count, true))
}

/// `cuGraphInstantiateWithFlags`, which is also the newest `cuGraphInstantiate`.
pub unsafe extern "C" fn instantiate(out: Out<u64>, graph: u64, flags: u64) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let body = GraphInstantiate {
            graph,
            flags,
            ..GraphInstantiate::default()
        };
        let made = graph::instantiate(session()?, &body)?;
        CUresult(made.status).ok()?;
        out.set(made.exec)
    })
}

/// `cuGraphInstantiate` as of CUDA 10.0 and 11.0. There is no log, as with newer drivers.
pub unsafe extern "C" fn instantiate_v1(
    out: Out<u64>,
    graph: u64,
    error_node: Out<u64>,
    log: Out<c_char>,
    log_len: usize,
) -> CUresult {
    guard(|| {
        context::current()?;
        out.required()?;
        let body = GraphInstantiate {
            graph,
            ..GraphInstantiate::default()
        };
        let made = graph::instantiate(session()?, &body)?;
        error_node.set_if_wanted(made.error_node);
        if log_len > 0 {
            log.set_if_wanted(0);
        }
        CUresult(made.status).ok()?;
        out.set(made.exec)
    })
}

/// `cuGraphInstantiateWithParams`.
pub unsafe extern "C" fn instantiate_with_params<const P: bool>(
    out: Out<u64>,
    graph: u64,
    params: Out<CUDA_GRAPH_INSTANTIATE_PARAMS>,
) -> CUresult {
    const UPLOAD: u64 = 2;
    guard(|| {
        let mut with = params.get()?;
        context::current()?;
        out.required()?;
        let stream = if with.flags & UPLOAD != 0 {
            default_stream::resolve(with.upload_stream, P)?.handle()
        } else {
            0
        };
        let body = GraphInstantiate {
            graph,
            flags: with.flags,
            stream,
            with_params: 1,
            slots: 0,
        };
        let made = graph::instantiate(session()?, &body)?;
        (with.error_node, with.result) = (made.error_node, made.result);
        params.set(with)?;
        CUresult(made.status).ok()?;
        out.set(made.exec)
    })
}

/// `cuGraphLaunch`.
pub unsafe extern "C" fn launch<const P: bool>(exec: u64, stream: u64) -> CUresult {
    guard(|| {
        graph::launch(
            session()?,
            Op::GraphLaunch,
            exec,
            default_stream::resolve(stream, P)?,
        )
    })
}

/// `cuGraphUpload`.
pub unsafe extern "C" fn upload<const P: bool>(exec: u64, stream: u64) -> CUresult {
    guard(|| {
        graph::launch(
            session()?,
            Op::GraphUpload,
            exec,
            default_stream::resolve(stream, P)?,
        )
    })
}

/// `cuGraphExecDestroy`.
pub unsafe extern "C" fn destroy_exec(exec: u64) -> CUresult {
    guard(|| graph::destroy_exec(session()?, exec))
}

/// `cuGraphExecGetFlags`.
pub unsafe extern "C" fn exec_flags(exec: u64, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(graph::request_value(session()?, Op::GraphExecFlags, exec)?)
    })
}

/// `cuGraphExecUpdate` as of CUDA 10.2.
pub unsafe extern "C" fn update_v1(
    exec: u64,
    graph: u64,
    error_node: Out<u64>,
    result: Out<u32>,
) -> CUresult {
    guard(|| {
        let updated = graph::update(session()?, exec, graph)?;
        error_node.set_if_wanted(updated.error_node);
        // Here the driver reports a changed topology as not supported.
        let (changed, unsupported) = (2, 6);
        result.set_if_wanted(if updated.result == changed {
            unsupported
        } else {
            updated.result
        });
        CUresult(updated.status).ok()
    })
}

/// `cuGraphExecUpdate` as of CUDA 12.0.
pub unsafe extern "C" fn update(
    exec: u64,
    graph: u64,
    info: Out<CUgraphExecUpdateResultInfo>,
) -> CUresult {
    guard(|| {
        let updated = graph::update(session()?, exec, graph)?;
        info.set_if_wanted(CUgraphExecUpdateResultInfo {
            result: updated.result,
            pad: 0,
            error_node: updated.error_node,
            error_from: updated.error_from,
        });
        CUresult(updated.status).ok()
    })
}

/// `cuGraphNodeGetEnabled`.
pub unsafe extern "C" fn get_enabled(exec: u64, node: u64, out: Out<u32>) -> CUresult {
    guard(|| {
        out.required()?;
        let body = GraphEnabled {
            exec,
            node,
            set: 0,
            enabled: 0,
        };
        let is: GraphEnabled = session()?.request(Op::GraphEnabled, &body, &[])?.read()?;
        out.set(is.enabled)
    })
}

/// `cuGraphNodeSetEnabled`.
pub unsafe extern "C" fn set_enabled(exec: u64, node: u64, enabled: u32) -> CUresult {
    guard(|| {
        let body = GraphEnabled {
            exec,
            node,
            set: 1,
            enabled,
        };
        session()?
            .request(Op::GraphEnabled, &body, &[])?
            .status
            .ok()
    })
}

/// `cuGraphDebugDotPrint`: the text comes from the server, the file is written here.
pub unsafe extern "C" fn print_dot(graph: u64, path: Text, flags: u32) -> CUresult {
    guard(|| {
        let path = path.get()?;
        let body = GraphDot {
            graph,
            flags,
            pad: 0,
        };
        let (answer, file) = session()?.request_receiving(Op::GraphDot, &body)?;
        let len: Value = answer.read()?;
        let mut text = Vec::new();
        let mut file = std::fs::File::from(file);
        let unreadable = |_| CUDA_ERROR_OPERATING_SYSTEM;
        std::io::Seek::rewind(&mut file).map_err(unreadable)?;
        file.take(len.value)
            .read_to_end(&mut text)
            .map_err(unreadable)?;
        let path = Path::new(std::ffi::OsStr::from_bytes(path.to_bytes()));
        std::fs::File::create(path)
            .and_then(|mut file| file.write_all(&text))
            .map_err(|error| {
                tracing::warn!(%error, ?path, "the text of a graph cannot be written");
                CUDA_ERROR_OPERATING_SYSTEM
            })
    })
}

fn memory(device: i32, attribute: u32, what: u32, value: u64) -> Status<u64> {
    let device = context::device(device)?.attach(session()?)?;
    let body = GraphMemory {
        value,
        device,
        attribute,
        what,
        pad: 0,
    };
    let value: Value = session()?.request(Op::GraphMemory, &body, &[])?.read()?;
    Ok(value.value)
}

/// `cuDeviceGraphMemTrim`.
pub unsafe extern "C" fn memory_trim(device: i32) -> CUresult {
    guard(|| memory(device, 0, graph_memory::TRIM, 0).map(drop))
}

/// `cuDeviceGetGraphMemAttribute`.
pub unsafe extern "C" fn memory_get(device: i32, attribute: u32, out: Out<u64>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(memory(device, attribute, graph_memory::GET, 0)?)
    })
}

/// `cuDeviceSetGraphMemAttribute`.
pub unsafe extern "C" fn memory_set(device: i32, attribute: u32, value: In<u64>) -> CUresult {
    guard(|| memory(device, attribute, graph_memory::SET, value.get()?).map(drop))
}
