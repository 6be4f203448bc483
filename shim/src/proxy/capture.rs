//! Stream capture: which streams capture, and which calls are forbidden meanwhile.
//!
//! The captures are made by the driver in the server, in relaxed mode. The restrictions of other modes are checked here,
//! where the threads are known; a forbidden call invalidates the capture in the server too. While no stream captures, all
//! this costs one relaxed load. Calls on a capturing stream wait for the server, so that each returns its own error, as
//! natively.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use mpsshim_api::cuda::{
    CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_STATUS_NONE,
    CU_STREAM_NON_BLOCKING, CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, CUgraphEdgeData,
};
use mpsshim_proto::message::graph::{CaptureBegin, CaptureState, CaptureUpdate, NODES_MOST};
use mpsshim_proto::message::{Object, Op, Value};
use parking_lot::Mutex;
use zerocopy::{FromBytes, IntoBytes};

use crate::ffi::Status;
use crate::proxy::context::Context;
use crate::proxy::shadow;
use crate::proxy::stream::{self, STREAMS, StreamRef};
use crate::proxy::submit::Session;

/// Number of captures in progress.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);
static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());
/// Nodes and edges that a program was given pointers to, by stream.
static SHOWN: Mutex<Option<HashMap<u64, Shown>>> = Mutex::new(None);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(CU_STREAM_CAPTURE_MODE_GLOBAL) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

/// A capture in progress, valid or not.
#[derive(Clone, Copy, Debug)]
struct Capture {
    id: u64,
    /// Handle of the stream that it began on.
    stream: u64,
    mode: u32,
    thread: u64,
    context: &'static Context,
}

#[derive(Debug)]
struct Shown {
    nodes: Box<[u64]>,
    edges: Box<[CUgraphEdgeData]>,
}

/// State of a stream's capture.
#[derive(Debug, Default)]
pub struct Info {
    pub status: u32,
    pub id: u64,
    pub graph: u64,
    /// Addresses of arrays of `count` entries; that of the edges may be 0.
    pub nodes: u64,
    pub edges: u64,
    pub count: usize,
}

/// Whether anything captures.
#[inline]
pub fn any() -> bool {
    ACTIVE.load(Ordering::Relaxed) != 0
}

fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    THREAD.with(|thread| {
        if thread.get() == 0 {
            thread.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        thread.get()
    })
}

/// `cuThreadExchangeStreamCaptureMode`.
pub fn exchange_mode(mode: u32) -> u32 {
    // The driver takes any number.
    MODE.replace(mode)
}

/// Invalidates captures, as a forbidden call does.
fn spoil(session: &Session, streams: impl Iterator<Item = u64>) -> Status {
    let streams: Vec<u64> = streams.collect();
    for object in streams {
        session.request(Op::CaptureBreak, &Object { object }, &[])?;
    }
    Ok(())
}

/// Refuses a call that a capture may forbid, such as an allocation or a wait.
#[inline]
pub fn forbid(session: &Session) -> Status {
    if any() { forbid_now(session) } else { Ok(()) }
}

#[cold]
fn forbid_now(session: &Session) -> Status {
    let (mode, thread) = (MODE.get(), this_thread());
    if mode >= CU_STREAM_CAPTURE_MODE_RELAXED {
        return Ok(());
    }
    let captures = CAPTURES.lock().clone();
    let in_the_way: Vec<Capture> = captures
        .into_iter()
        .filter(|capture| {
            let own = capture.thread == thread && capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
            let global = [mode, capture.mode] == [CU_STREAM_CAPTURE_MODE_GLOBAL; 2];
            own || global
        })
        .collect();
    if in_the_way.is_empty() {
        return Ok(());
    }
    spoil(session, in_the_way.iter().map(|capture| capture.stream))?;
    Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// Refuses a wait for all streams of a context while one of them captures.
#[inline]
pub fn forbid_wait_for_all(session: &Session, context: &Context) -> Status {
    if !any() {
        return Ok(());
    }
    let captures = CAPTURES.lock().clone();
    let of_context = |capture: &&Capture| std::ptr::eq(capture.context, context);
    let in_the_way: Vec<&Capture> = captures.iter().filter(of_context).collect();
    if in_the_way.is_empty() {
        return forbid_now(session);
    }
    spoil(session, in_the_way.iter().map(|capture| capture.stream))?;
    Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// Refuses a use of a context's legacy default stream while a blocking stream of it captures. `harmless`: the call is a
/// query, which leaves the captures valid.
#[cold]
pub fn admit_legacy(session: &Session, context: &Context, harmless: bool) -> Status {
    let in_the_way: Vec<u64> = stream::of_context(context)
        .iter()
        .filter(|stream| stream.is_capturing() && stream.flags() & CU_STREAM_NON_BLOCKING == 0)
        .map(|stream| stream.handle())
        .collect();
    if in_the_way.is_empty() {
        return Ok(());
    }
    if !harmless {
        spoil(session, in_the_way.into_iter())?;
    }
    Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
}

/// Refuses a wait for a stream, or a query of its progress, if it captures or another capture forbids it.
#[inline]
pub fn forbid_wait(session: &Session, stream: StreamRef) -> Status {
    if !any() {
        return Ok(());
    }
    if stream.is_capturing() {
        return stream::forbid_wait(session, stream);
    }
    forbid_now(session)
}

/// The bytes of nodes and edges as they travel; `None` when there are too many.
pub fn behind(nodes: &[u64], edges: &[CUgraphEdgeData]) -> Status<Vec<u8>> {
    if nodes.len() > NODES_MOST {
        tracing::warn!(count = nodes.len(), "more nodes than a message holds");
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok([nodes.as_bytes(), edges.as_bytes()].concat())
}

/// Begins a capture; with `graph` 0 into a new graph.
pub fn begin(
    session: &Session,
    stream: StreamRef,
    mode: u32,
    graph: u64,
    nodes: &[u64],
    edges: &[CUgraphEdgeData],
) -> Status {
    static IDS: AtomicU64 = AtomicU64::new(1);
    if mode > CU_STREAM_CAPTURE_MODE_RELAXED {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if stream.is_legacy() {
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    if stream.is_capturing() {
        return Err(CUDA_ERROR_ILLEGAL_STATE);
    }
    // The stream cannot be queried while it captures: this mark covers its earlier work.
    stream::mark(&mut session.ring()?, stream)?;
    let body = CaptureBegin {
        stream: stream.handle(),
        graph,
        nodes: nodes.len() as u32,
        edges: u32::from(!edges.is_empty()),
    };
    session
        .request(Op::CaptureBegin, &body, &behind(nodes, edges)?)?
        .status
        .ok()?;
    let id = IDS.fetch_add(1, Ordering::Relaxed);
    CAPTURES.lock().push(Capture {
        id,
        stream: stream.handle(),
        mode,
        thread: this_thread(),
        context: stream.context(),
    });
    ACTIVE.fetch_add(1, Ordering::Relaxed);
    stream.set_capture(id);
    Ok(())
}

/// Ends the capture of a stream; returns its graph.
pub fn end(session: &Session, stream: StreamRef) -> Status<u64> {
    if !stream.is_capturing() {
        return Err(CUDA_ERROR_ILLEGAL_STATE);
    }
    let id = stream.capture();
    let capture = CAPTURES.lock().iter().find(|c| c.id == id).copied();
    let wrong_thread = capture.is_some_and(|capture| {
        capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture.thread != this_thread()
    });
    let object = stream.handle();
    if wrong_thread {
        // The capture ends nevertheless, and its graph is lost.
        spoil(session, std::iter::once(object))?;
    }
    let answer = session.request(Op::CaptureEnd, &Object { object }, &[])?;
    // Ending a forked stream does not end the capture, unless the driver does so.
    let over = match capture {
        Some(capture) if capture.stream != object => !still_captures(session, capture.stream)?,
        _ => true,
    };
    if over {
        forget(id);
    }
    if wrong_thread {
        shadow::forget(shadows_of(id));
        return Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    let graph: Status<Value> = answer.read();
    if over {
        if let Ok(graph) = &graph {
            shadow::share(shadows_of(id), graph.value);
        }
        shadow::forget(shadows_of(id));
    }
    Ok(graph?.value)
}

fn still_captures(session: &Session, stream: u64) -> Status<bool> {
    let answer = session.request(Op::CaptureState, &Object { object: stream }, &[])?;
    let state: CaptureState = answer.read()?;
    Ok(state.status != CU_STREAM_CAPTURE_STATUS_NONE)
}

/// The key of a capture's shadows, which differs from every handle of a graph.
pub fn shadows_of(id: u64) -> u64 {
    id
}

/// A capture is over.
fn forget(id: u64) {
    let mut captures = CAPTURES.lock();
    let Some(at) = captures.iter().position(|capture| capture.id == id) else {
        return;
    };
    captures.remove(at);
    for stream in stream::all() {
        if stream.capture() == id {
            stream.set_capture(0);
            if let Some(shown) = SHOWN.lock().as_mut() {
                shown.remove(&stream.handle());
            }
        }
    }
    ACTIVE.fetch_sub(1, Ordering::Relaxed);
}

/// Destroys a stream, and with it the capture that began on it.
pub fn destroy_stream(session: &Session, handle: u64) -> Status {
    let id = STREAMS.get(handle).map_or(0, |stream| stream.capture());
    stream::destroy(session, handle)?;
    let began_here = |capture: &Capture| capture.id == id && capture.stream == handle;
    if id != 0 && CAPTURES.lock().iter().any(began_here) {
        forget(id);
    }
    Ok(())
}

/// A stream has waited for an event of a capture: it takes part in that now, if the driver agrees.
pub fn join(session: &Session, stream: StreamRef, id: u64) -> Status {
    session.settle(stream.handle())?;
    let goes_on = CAPTURES.lock().iter().any(|capture| capture.id == id);
    if goes_on && !stream.is_capturing() && still_captures(session, stream.handle())? {
        stream.set_capture(id);
    }
    Ok(())
}

/// `CU_STREAM_CAPTURE_STATUS_*` of a stream.
pub fn status(session: &Session, stream: StreamRef) -> Status<u32> {
    if !any() || !stream.is_capturing() {
        return Ok(CU_STREAM_CAPTURE_STATUS_NONE);
    }
    Ok(info(session, stream)?.status)
}

/// The result of `cuStreamGetCaptureInfo`.
pub fn info(session: &Session, stream: StreamRef) -> Status<Info> {
    if !any() || !stream.is_capturing() {
        return Ok(Info::default());
    }
    let object = stream.handle();
    let answer = session.request(Op::CaptureState, &Object { object }, &[])?;
    let state: CaptureState = answer.read()?;
    let rest = answer
        .payload
        .get(size_of::<CaptureState>()..)
        .unwrap_or(&[]);
    let count = state.nodes as usize;
    let part = |from: usize| rest.get(from * 8..(from + count) * 8).unwrap_or(&[]);
    let shown = Shown {
        nodes: read_all(part(0)).into(),
        edges: if state.edges != 0 {
            read_all(part(count)).into()
        } else {
            Box::default()
        },
    };
    let info = Info {
        status: state.status,
        id: state.id,
        graph: state.graph,
        nodes: shown.nodes.as_ptr() as u64,
        edges: if shown.edges.is_empty() {
            0
        } else {
            shown.edges.as_ptr() as u64
        },
        count: shown.nodes.len(),
    };
    // Arrays returned to the program before are no longer valid.
    SHOWN.lock().get_or_insert_default().insert(object, shown);
    Ok(info)
}

/// All structs that follow each other in some bytes.
pub fn read_all<T: FromBytes>(bytes: &[u8]) -> Vec<T> {
    let read = |chunk| T::read_from_bytes(chunk).ok();
    bytes
        .chunks_exact(size_of::<T>())
        .filter_map(read)
        .collect()
}

/// `cuStreamUpdateCaptureDependencies`.
pub fn update(
    session: &Session,
    stream: StreamRef,
    nodes: &[u64],
    edges: &[CUgraphEdgeData],
    flags: u32,
) -> Status {
    if !stream.is_capturing() {
        return Err(CUDA_ERROR_ILLEGAL_STATE);
    }
    let body = CaptureUpdate {
        stream: stream.handle(),
        flags,
        nodes: nodes.len() as u32,
        edges: u32::from(!edges.is_empty()),
        pad: 0,
    };
    session
        .request(Op::CaptureUpdate, &body, &behind(nodes, edges)?)?
        .status
        .ok()
}
