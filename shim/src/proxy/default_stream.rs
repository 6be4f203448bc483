//! Resolves stream arguments: a stream that the program made, or the default stream of a context or of a thread. Each
//! thread also has a stream of its own on which it waits for events.

use std::cell::RefCell;

use mpsshim_api::cuda::{
    CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING, CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUDA_ERROR_INVALID_CONTEXT,
};

use crate::ffi::Status;
use crate::proxy::capture;
use crate::proxy::context::{self, Context};
use crate::proxy::stream::{self, STREAMS, StreamRef};
use crate::proxy::submit::{Session, session};

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
pub const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

/// The stream of a handle argument, in the calling thread's context. `per_thread`: the meaning of NULL.
#[inline]
pub fn resolve(raw: u64, per_thread: bool) -> Status<StreamRef> {
    let stream = named(raw, per_thread)?;
    if capture::any() && stream.is_legacy() {
        capture::admit_legacy(session()?, stream.context(), false)?;
    }
    Ok(stream)
}

/// As [`resolve`]; `CUDA_ERROR_CONTEXT_IS_DESTROYED`, as natively, for a stream that ended with its context.
#[inline]
pub fn resolve_for_launch(raw: u64, per_thread: bool) -> Status<StreamRef> {
    resolve(raw, per_thread).map_err(|status| {
        if STREAMS.absent(raw) == CUDA_ERROR_INVALID_CONTEXT {
            CUDA_ERROR_CONTEXT_IS_DESTROYED
        } else {
            status
        }
    })
}

/// As [`resolve`]; `CUDA_ERROR_CONTEXT_IS_DESTROYED`, as natively, where the current context was destroyed, whatever the
/// handle is.
#[inline]
pub fn resolve_for_copy(raw: u64, per_thread: bool) -> Status<StreamRef> {
    resolve(raw, per_thread).map_err(|status| context::none_or_usable().err().unwrap_or(status))
}

/// As [`resolve`], for a query that a capture permits.
pub fn resolve_for_query(raw: u64, per_thread: bool) -> Status<StreamRef> {
    let stream = named(raw, per_thread)?;
    if capture::any() && stream.is_legacy() {
        capture::admit_legacy(session()?, stream.context(), true)?;
    }
    Ok(stream)
}

#[inline]
fn named(raw: u64, per_thread: bool) -> Status<StreamRef> {
    match raw {
        LEGACY => stream::legacy(session()?, context::current()?),
        PER_THREAD => of_thread(session()?, context::current()?),
        0 if per_thread => of_thread(session()?, context::current()?),
        0 => stream::legacy(session()?, context::current()?),
        handle => STREAMS.find(handle),
    }
}

/// Streams made for this thread, destroyed with it.
struct Streams {
    /// By context and purpose; few, so a list.
    made: Vec<(&'static Context, bool, u64)>,
}

impl Drop for Streams {
    fn drop(&mut self) {
        let Ok(session) = session() else { return };
        for (context, _, handle) in self.made.drain(..) {
            // The context's end may have been faster, or the server's.
            context.forget_stream(handle);
            let _ = capture::destroy_stream(session, handle);
        }
    }
}

thread_local! {
    static STREAMS_OF_THREAD: RefCell<Streams> = const { RefCell::new(Streams { made: Vec::new() }) };
}

fn find_or_make(session: &Session, context: &'static Context, waits: bool) -> Status<StreamRef> {
    STREAMS_OF_THREAD
        .try_with(|streams| {
            let mut streams = streams.borrow_mut();
            let found = streams.made.iter().find(|(of, purpose, handle)| {
                std::ptr::eq(*of, context) && *purpose == waits && STREAMS.get(*handle).is_some()
            });
            if let Some(stream) = found.and_then(|(.., handle)| STREAMS.get(*handle)) {
                return Ok(stream);
            }
            let flags = if waits {
                CU_STREAM_NON_BLOCKING
            } else {
                CU_STREAM_DEFAULT
            };
            let made = stream::create(session, context, flags, 0, false)?;
            context.own_stream(made.handle());
            streams
                .made
                .retain(|(.., handle)| STREAMS.get(*handle).is_some());
            streams.made.push((context, waits, made.handle()));
            Ok(made)
        })
        // Only in the exit of a thread, after its streams are gone.
        .unwrap_or(Err(CUDA_ERROR_INVALID_CONTEXT))
}

/// The thread's default stream in a context (`CU_STREAM_PER_THREAD`).
fn of_thread(session: &Session, context: &'static Context) -> Status<StreamRef> {
    find_or_make(session, context, false)
}

/// The thread's stream for waiting for events of a context.
pub fn wait_stream(session: &Session, context: &'static Context) -> Status<StreamRef> {
    find_or_make(session, context, true)
}
