//! State of a thread of the program: its default streams, and the stream on which it waits for events.

use std::cell::RefCell;

use crate::context::Context;
use crate::ffi::Status;
use crate::stream::{self, STREAMS, StreamRef};
use crate::submit::{Session, session};
use mpsshim_api::cuda::{CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_CONTEXT};

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
            let _ = stream::destroy(session, handle);
        }
    }
}

thread_local! {
    static STREAMS_OF_THREAD: RefCell<Streams> = const { RefCell::new(Streams { made: Vec::new() }) };
}

/// Does something, such as starting a thread, with all signals blocked: the program's signals are for the program's
/// threads, and a new thread has the mask of the one that starts it.
pub fn without_signals<T>(what: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are ours; the calling thread gets its own mask back.
    let before = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    let done = what();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    done
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
            context.own_stream(made);
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
pub fn default_stream(session: &Session, context: &'static Context) -> Status<StreamRef> {
    find_or_make(session, context, false)
}

/// The thread's stream for waiting for events of a context.
pub fn wait_stream(session: &Session, context: &'static Context) -> Status<StreamRef> {
    find_or_make(session, context, true)
}
