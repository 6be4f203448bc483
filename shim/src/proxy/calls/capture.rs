//! Stream capture.

use mpsshim_api::cuda::{
    CU_STREAM_CAPTURE_MODE_GLOBAL, CUDA_ERROR_INVALID_VALUE, CUgraphEdgeData, CUresult,
};

use super::entries;
use crate::ffi::{In, Out, Status, guard};
use crate::proxy::submit::session;
use crate::proxy::{capture, default_stream};

entries! {
    cuStreamBeginCapture(_) => begin_v1::<false>,
    cuStreamBeginCapture_ptsz(_) => begin_v1::<true>,
    cuStreamBeginCapture_v2(_, _) => begin::<false>,
    cuStreamBeginCapture_v2_ptsz(_, _) => begin::<true>,
    cuStreamBeginCaptureToGraph(_, _, _, _, _, _) => begin_to_graph::<false>,
    cuStreamBeginCaptureToGraph_ptsz(_, _, _, _, _, _) => begin_to_graph::<true>,
    cuStreamEndCapture(_, _) => end::<false>,
    cuStreamEndCapture_ptsz(_, _) => end::<true>,
    cuStreamIsCapturing(_, _) => is_capturing::<false>,
    cuStreamIsCapturing_ptsz(_, _) => is_capturing::<true>,
    cuStreamGetCaptureInfo(_, _, _) => get_info_v1::<false>,
    cuStreamGetCaptureInfo_ptsz(_, _, _) => get_info_v1::<true>,
    cuStreamGetCaptureInfo_v2(_, _, _, _, _, _) => get_info_v2::<false>,
    cuStreamGetCaptureInfo_v2_ptsz(_, _, _, _, _, _) => get_info_v2::<true>,
    cuStreamGetCaptureInfo_v3(_, _, _, _, _, _, _) => get_info_v3::<false>,
    cuStreamGetCaptureInfo_v3_ptsz(_, _, _, _, _, _, _) => get_info_v3::<true>,
    cuStreamUpdateCaptureDependencies(_, _, _, _) => update_v1::<false>,
    cuStreamUpdateCaptureDependencies_ptsz(_, _, _, _) => update_v1::<true>,
    cuStreamUpdateCaptureDependencies_v2(_, _, _, _, _) => update::<false>,
    cuStreamUpdateCaptureDependencies_v2_ptsz(_, _, _, _, _) => update::<true>,
    cuThreadExchangeStreamCaptureMode(_) => exchange_mode,
}

/// The elements of an array that a program gave.
pub fn elements<T: Copy>(array: In<T>, count: usize) -> Status<Vec<T>> {
    if count > 0 && array.is_null() || count > 1 << 24 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    (0..count).map(|index| array.at(index)).collect()
}

/// As [`elements`], of an array that may be left out.
pub fn elements_if_any<T: Copy>(array: In<T>, count: usize) -> Status<Vec<T>> {
    if array.is_null() {
        return Ok(Vec::new());
    }
    elements(array, count)
}

/// `cuStreamBeginCapture` as of CUDA 10.0.
pub unsafe extern "C" fn begin_v1<const P: bool>(stream: u64) -> CUresult {
    guard(|| {
        let stream = default_stream::resolve(stream, P)?;
        capture::begin(
            session()?,
            stream,
            CU_STREAM_CAPTURE_MODE_GLOBAL,
            0,
            &[],
            &[],
        )
    })
}

/// `cuStreamBeginCapture`.
pub unsafe extern "C" fn begin<const P: bool>(stream: u64, mode: u32) -> CUresult {
    guard(|| {
        capture::begin(
            session()?,
            default_stream::resolve(stream, P)?,
            mode,
            0,
            &[],
            &[],
        )
    })
}

/// `cuStreamBeginCaptureToGraph`.
pub unsafe extern "C" fn begin_to_graph<const P: bool>(
    stream: u64,
    graph: u64,
    nodes: In<u64>,
    edges: In<CUgraphEdgeData>,
    count: usize,
    mode: u32,
) -> CUresult {
    guard(|| {
        if graph == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let stream = default_stream::resolve(stream, P)?;
        let (nodes, edges) = (elements(nodes, count)?, elements_if_any(edges, count)?);
        capture::begin(session()?, stream, mode, graph, &nodes, &edges)
    })
}

/// `cuStreamEndCapture`.
pub unsafe extern "C" fn end<const P: bool>(stream: u64, graph: Out<u64>) -> CUresult {
    guard(|| {
        let ended = capture::end(session()?, default_stream::resolve(stream, P)?);
        graph.set_if_wanted(*ended.as_ref().unwrap_or(&0));
        ended.map(drop)
    })
}

/// `cuStreamIsCapturing`.
pub unsafe extern "C" fn is_capturing<const P: bool>(stream: u64, out: Out<u32>) -> CUresult {
    guard(|| {
        out.required()?;
        out.set(capture::status(
            session()?,
            default_stream::resolve_for_query(stream, P)?,
        )?)
    })
}

/// `cuStreamGetCaptureInfo` as of CUDA 10.1.
pub unsafe extern "C" fn get_info_v1<const P: bool>(
    stream: u64,
    status: Out<u32>,
    id: Out<u64>,
) -> CUresult {
    // SAFETY: the program's arguments, and null for those that this version lacks.
    unsafe { get_info_v2::<P>(stream, status, id, Out::none(), Out::none(), Out::none()) }
}

/// `cuStreamGetCaptureInfo` as of CUDA 11.3.
pub unsafe extern "C" fn get_info_v2<const P: bool>(
    stream: u64,
    status: Out<u32>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<u64>,
    count: Out<usize>,
) -> CUresult {
    // SAFETY: as above.
    unsafe { get_info_v3::<P>(stream, status, id, graph, nodes, Out::none(), count) }
}

/// `cuStreamGetCaptureInfo` as of CUDA 12.3: with edge data.
pub unsafe extern "C" fn get_info_v3<const P: bool>(
    stream: u64,
    status: Out<u32>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<u64>,
    edges: Out<u64>,
    count: Out<usize>,
) -> CUresult {
    guard(|| {
        status.required()?;
        let info = capture::info(session()?, default_stream::resolve_for_query(stream, P)?)?;
        id.set_if_wanted(info.id);
        graph.set_if_wanted(info.graph);
        nodes.set_if_wanted(info.nodes);
        edges.set_if_wanted(info.edges);
        count.set_if_wanted(info.count);
        status.set(info.status)
    })
}

/// `cuStreamUpdateCaptureDependencies` as of CUDA 11.3.
pub unsafe extern "C" fn update_v1<const P: bool>(
    stream: u64,
    nodes: In<u64>,
    count: usize,
    flags: u32,
) -> CUresult {
    // SAFETY: the program's arguments, and no edge data.
    unsafe { update::<P>(stream, nodes, In::none(), count, flags) }
}

/// `cuStreamUpdateCaptureDependencies` as of CUDA 12.3: with edge data.
pub unsafe extern "C" fn update<const P: bool>(
    stream: u64,
    nodes: In<u64>,
    edges: In<CUgraphEdgeData>,
    count: usize,
    flags: u32,
) -> CUresult {
    guard(|| {
        let stream = default_stream::resolve(stream, P)?;
        let (nodes, edges) = (elements(nodes, count)?, elements_if_any(edges, count)?);
        capture::update(session()?, stream, &nodes, &edges, flags)
    })
}

/// `cuThreadExchangeStreamCaptureMode`.
pub unsafe extern "C" fn exchange_mode(mode: Out<u32>) -> CUresult {
    guard(|| mode.set(capture::exchange_mode(mode.get()?)))
}
