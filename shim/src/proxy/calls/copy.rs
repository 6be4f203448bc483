//! One-dimensional copies. The kinds of the addresses decide how a copy is done, not the name of the call.

use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdeviceptr, CUresult,
};
use mpsshim_proto::message::{Copy, CopyInline, INLINE_COPY_MAX, Op, SIDES_UNNAMED, Side};

use super::entries;
use crate::ffi::{Status, guard};
use crate::proxy::memory::{self, Place};
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::{Session, session};
use crate::proxy::{capture, context, default_stream, pages, shadow, staging};

entries! {
    cuMemcpy(_, _, _) => copy::<false>,
    cuMemcpy_ptds(_, _, _) => copy::<true>,
    cuMemcpyAsync(_, _, _, _) => copy_async::<false>,
    cuMemcpyAsync_ptsz(_, _, _, _) => copy_async::<true>,
    cuMemcpyHtoD_v2(_, _, _) => to_device::<false>,
    cuMemcpyHtoD_v2_ptds(_, _, _) => to_device::<true>,
    cuMemcpyHtoDAsync_v2(_, _, _, _) => to_device_async::<false>,
    cuMemcpyHtoDAsync_v2_ptsz(_, _, _, _) => to_device_async::<true>,
    cuMemcpyDtoH_v2(_, _, _) => from_device::<false>,
    cuMemcpyDtoH_v2_ptds(_, _, _) => from_device::<true>,
    cuMemcpyDtoHAsync_v2(_, _, _, _) => from_device_async::<false>,
    cuMemcpyDtoHAsync_v2_ptsz(_, _, _, _) => from_device_async::<true>,
    cuMemcpyDtoD_v2(_, _, _) => on_device::<false>,
    cuMemcpyDtoD_v2_ptds(_, _, _) => on_device::<true>,
    cuMemcpyDtoDAsync_v2(_, _, _, _) => on_device_async::<false>,
    cuMemcpyDtoDAsync_v2_ptsz(_, _, _, _) => on_device_async::<true>,
    cuMemcpyPeer(_, _, _, _, _) => peer::<false>,
    cuMemcpyPeer_ptds(_, _, _, _, _) => peer::<true>,
    cuMemcpyPeerAsync(_, _, _, _, _, _) => peer_async::<false>,
    cuMemcpyPeerAsync_ptsz(_, _, _, _, _, _) => peer_async::<true>,
}

/// The memory type of an address that the name of a call implies.
#[derive(Clone, Copy)]
pub enum Said {
    Device,
    Host,
    /// None: any address.
    Any,
}

fn place(address: u64, said: Said, len: u64) -> Status<Place> {
    if address == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match said {
        Said::Device => memory::device_place(address, len),
        Said::Host | Said::Any => memory::place(address, len),
    }
}

/// Where the server finds a side of a copy that it can reach.
fn reachable(place: Place) -> Option<(u64, Side)> {
    match place {
        Place::Device(address) => Some((address, Side::Device)),
        Place::Pinned(address) => Some((address, Side::Host)),
        Place::Pageable(_) => None,
    }
}

#[derive(Clone, Copy, PartialEq)]
pub enum When {
    /// The call returns when the copy is as complete as CUDA promises for it.
    Sync,
    Async,
}

/// Copies `len` bytes in the order of a stream.
pub fn transfer(
    stream: u64,
    per_thread: bool,
    to: (u64, Said),
    from: (u64, Said),
    len: usize,
    when: When,
) -> Status {
    copy_range(stream, per_thread, to, from, len, when)?;
    if when == When::Sync {
        // The program may have waited for earlier work of the stream.
        pages::observe(session()?);
    }
    Ok(())
}

fn copy_range(
    stream: u64,
    per_thread: bool,
    (to, to_said): (u64, Said),
    (from, from_said): (u64, Said),
    len: usize,
    when: When,
) -> Status {
    let session = session()?;
    let stream = default_stream::resolve_for_copy(stream, per_thread)?;
    let len = len as u64;
    if len == 0 {
        return session.check();
    }
    let work = match pages::is_in(to) || pages::is_in(from) {
        true => pages::before_work(session)?,
        false => None,
    };
    let (to, from) = (place(to, to_said, len)?, place(from, from_said, len)?);
    if stream.is_capturing() {
        if when == When::Sync {
            return capture::forbid_wait(session, stream);
        }
        let unnamed = matches!((to_said, from_said), (Said::Any, Said::Any));
        let kinds = if unnamed { SIDES_UNNAMED } else { 0 };
        return captured(session, stream, to, from, (len, kinds));
    }
    match (reachable(to), reachable(from)) {
        (Some(to), Some(from)) if to.1 == Side::Host && from.1 == Side::Host => {
            host_to_host(session, stream, to.0, from.0, len)
        }
        (Some(to), Some(from)) => {
            submit(session, stream, to, from, (len, 0))?;
            drop(work);
            // Copies within the device are not waited for; those that touch host memory are.
            let touches_host = to.1 == Side::Host || from.1 == Side::Host;
            if when == When::Sync && touches_host {
                stream::synchronize(session, stream)?;
            }
            Ok(())
        }
        (Some(to), None) => {
            let Place::Pageable(from) = from else {
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            };
            if to.1 == Side::Host {
                return host_to_host(session, stream, to.0, from, len);
            }
            if len <= INLINE_COPY_MAX as u64 {
                // SAFETY: the program vouches for `len` readable bytes at the source.
                let data = unsafe { std::slice::from_raw_parts(from as *const u8, len as usize) };
                let body = CopyInline {
                    to: to.0,
                    stream: stream.handle(),
                    len,
                };
                return stream::submit_apart(session, stream, Op::CopyInline, &body, data);
            }
            // SAFETY: as above.
            unsafe { staging::to_device(session, stream, to, from, len) }
        }
        (None, Some(from)) => {
            let Place::Pageable(to) = to else {
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            };
            if from.1 == Side::Host {
                return host_to_host(session, stream, to, from.0, len);
            }
            // SAFETY: the program vouches for `len` writable bytes at the target.
            unsafe { staging::from_device(session, stream, to, from, len) }
        }
        (None, None) => {
            let (Place::Pageable(to), Place::Pageable(from)) = (to, from) else {
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            };
            host_to_host(session, stream, to, from, len)
        }
    }
}

/// Captures a copy. Memory that the server cannot reach is registered or gets a bounce buffer, because the copy
/// accesses it each time that the graph runs.
fn captured(
    session: &Session,
    stream: StreamRef,
    to: Place,
    from: Place,
    (len, kinds): (u64, u32),
) -> Status {
    let mut shadows = Vec::new();
    let mut reach = |place: Place, written: bool| match place {
        Place::Pageable(address) => {
            let context = stream.context();
            let arena = shadow::reach(session, context, (address, len), written, &mut shadows)?;
            Ok((arena, Side::Host))
        }
        place => reachable(place).ok_or(CUDA_ERROR_NOT_SUPPORTED),
    };
    let (to, from) = (reach(to, true)?, reach(from, false)?);
    if !shadows.is_empty() {
        shadow::attach(capture::shadows_of(stream.capture()), 0, &shadows);
    }
    submit(session, stream, to, from, (len, kinds))
}

/// Submits a copy between two sides that the server can reach; `kinds`: [`SIDES_UNNAMED`] or 0.
fn submit(
    session: &Session,
    stream: StreamRef,
    to: (u64, Side),
    from: (u64, Side),
    (len, kinds): (u64, u32),
) -> Status {
    let body = Copy {
        to: to.0,
        from: from.0,
        len,
        stream: stream.handle(),
        sides: to.1 as u32 | (from.1 as u32) << 8 | kinds,
        pad: 0,
    };
    stream::submit_apart(session, stream, Op::Copy, &body, &[])
}

/// Host memory to host memory, by this thread once the stream has got there. The addresses may be the server's.
fn host_to_host(session: &Session, stream: StreamRef, to: u64, from: u64, len: u64) -> Status {
    stream::synchronize(session, stream)?;
    let (to, from) = (memory::program_address(to), memory::program_address(from));
    // SAFETY: the program vouches for `len` bytes on both sides; they may overlap.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len as usize) };
    Ok(())
}

/// `cuMemcpy`.
pub unsafe extern "C" fn copy<const P: bool>(to: u64, from: u64, len: usize) -> CUresult {
    guard(|| transfer(0, P, (to, Said::Any), (from, Said::Any), len, When::Sync))
}

/// `cuMemcpyAsync`.
pub unsafe extern "C" fn copy_async<const P: bool>(
    to: u64,
    from: u64,
    len: usize,
    stream: u64,
) -> CUresult {
    guard(|| {
        transfer(
            stream,
            P,
            (to, Said::Any),
            (from, Said::Any),
            len,
            When::Async,
        )
    })
}

/// `cuMemcpyHtoD`.
pub unsafe extern "C" fn to_device<const P: bool>(
    to: CUdeviceptr,
    from: u64,
    len: usize,
) -> CUresult {
    guard(|| {
        transfer(
            0,
            P,
            (to, Said::Device),
            (from, Said::Host),
            len,
            When::Sync,
        )
    })
}

/// `cuMemcpyHtoDAsync`.
pub unsafe extern "C" fn to_device_async<const P: bool>(
    to: CUdeviceptr,
    from: u64,
    len: usize,
    stream: u64,
) -> CUresult {
    guard(|| {
        transfer(
            stream,
            P,
            (to, Said::Device),
            (from, Said::Host),
            len,
            When::Async,
        )
    })
}

/// `cuMemcpyDtoH`.
pub unsafe extern "C" fn from_device<const P: bool>(
    to: u64,
    from: CUdeviceptr,
    len: usize,
) -> CUresult {
    guard(|| {
        transfer(
            0,
            P,
            (to, Said::Host),
            (from, Said::Device),
            len,
            When::Sync,
        )
    })
}

/// `cuMemcpyDtoHAsync`.
pub unsafe extern "C" fn from_device_async<const P: bool>(
    to: u64,
    from: CUdeviceptr,
    len: usize,
    stream: u64,
) -> CUresult {
    guard(|| {
        transfer(
            stream,
            P,
            (to, Said::Host),
            (from, Said::Device),
            len,
            When::Async,
        )
    })
}

/// `cuMemcpyDtoD`.
pub unsafe extern "C" fn on_device<const P: bool>(
    to: CUdeviceptr,
    from: CUdeviceptr,
    len: usize,
) -> CUresult {
    guard(|| {
        transfer(
            0,
            P,
            (to, Said::Device),
            (from, Said::Device),
            len,
            When::Sync,
        )
    })
}

/// `cuMemcpyDtoDAsync`.
pub unsafe extern "C" fn on_device_async<const P: bool>(
    to: CUdeviceptr,
    from: CUdeviceptr,
    len: usize,
    stream: u64,
) -> CUresult {
    guard(|| {
        transfer(
            stream,
            P,
            (to, Said::Device),
            (from, Said::Device),
            len,
            When::Async,
        )
    })
}

/// Checks the two contexts of a copy between contexts; 0 stands for the current one. The addresses determine the
/// devices of both sides.
fn contexts(to: u64, from: u64) -> Status {
    for context in [to, from] {
        context::given_or_current(context)?;
    }
    Ok(())
}

/// `cuMemcpyPeer`: ordered after all earlier and before all later work of any stream.
pub unsafe extern "C" fn peer<const P: bool>(
    to: CUdeviceptr,
    to_context: u64,
    from: CUdeviceptr,
    from_context: u64,
    len: usize,
) -> CUresult {
    guard(|| {
        contexts(to_context, from_context)?;
        let session = session()?;
        stream::quiesce(session, None)?;
        transfer(
            0,
            P,
            (to, Said::Device),
            (from, Said::Device),
            len,
            When::Sync,
        )?;
        stream::synchronize(session, default_stream::resolve(0, P)?)
    })
}

/// `cuMemcpyPeerAsync`.
pub unsafe extern "C" fn peer_async<const P: bool>(
    to: CUdeviceptr,
    to_context: u64,
    from: CUdeviceptr,
    from_context: u64,
    len: usize,
    stream: u64,
) -> CUresult {
    guard(|| {
        contexts(to_context, from_context)?;
        transfer(
            stream,
            P,
            (to, Said::Device),
            (from, Said::Device),
            len,
            When::Async,
        )
    })
}
