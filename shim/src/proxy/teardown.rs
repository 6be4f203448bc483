//! Destruction of contexts, with the objects created in them.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_NOT_PERMITTED};
use mpsshim_proto::message::{Object, Op};

use crate::ffi::Status;
use crate::proxy::calls::reference;
use crate::proxy::context::{self, Context};
use crate::proxy::submit::{Session, session};
use crate::proxy::{array, capture, event, memory, module, stream};

/// Releases everything created in a context. Waits for its queued work first, as the driver does.
fn end(session: &Session, context: &'static Context) {
    let storage = std::mem::take(&mut *context.storage.lock());
    for (key, (value, destructor)) in storage {
        if let Some(destructor) = destructor {
            // SAFETY: the caller that stored the value passed this function for it.
            unsafe { destructor(context.handle, key as *mut c_void, value as *mut c_void) };
        }
    }
    context.alive.store(false, Ordering::Relaxed);
    // Errors mean that the server is gone, with the objects released here.
    let _ = stream::quiesce(session, Some(context));
    let contents = context.take_contents();
    for handle in contents.events {
        event::EVENTS.ends_with_context(handle);
        let _ = event::destroy(session, handle);
    }
    for handle in contents.streams {
        stream::STREAMS.ends_with_context(handle);
        let _ = capture::destroy_stream(session, handle);
    }
    reference::release_of_context(context);
    for handle in contents.images {
        module::ends_with_context(handle);
        let _ = module::end(session, handle);
    }
    array::release_of_context(session, context);
    memory::release_of_context(session, context);
    let part = context.take_back_part();
    if part != 0 {
        let _ = session.submit(Op::GreenDestroy, &Object { object: part });
    }
}

/// `cuCtxDestroy` of a context that the program made.
pub fn destroy(context: &'static Context) -> Status {
    if context.primary || context.green != 0 {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    context.usable()?;
    end(session()?, context);
    if context::is_current(context) {
        context::pop();
    }
    Ok(())
}

/// `cuGreenCtxDestroy`. Threads that have it current keep it, dead.
pub fn destroy_green(session: &Session, context: &'static Context) -> Status {
    context.usable()?;
    end(session, context);
    let body = Object {
        object: context.green,
    };
    session.submit(Op::GreenDestroy, &body)?;
    release(context.home())
}

/// `cuDevicePrimaryCtxRelease`.
pub fn release(context: &'static Context) -> Status {
    let mut retained = context.retained.lock();
    if *retained == 0 {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    *retained -= 1;
    // A reset may have ended it before.
    if *retained == 0 && context.alive.load(Ordering::Relaxed) {
        end(session()?, context);
    }
    Ok(())
}

/// `cuDevicePrimaryCtxReset`: everything in it goes, the retains stay. Until the next retain it is inactive and, where it is
/// current, as good as destroyed. `CUDA_ERROR_NOT_PERMITTED` while it has green contexts.
pub fn reset(context: &'static Context) -> Status {
    let _retained = context.retained.lock();
    if context.has_green() {
        return Err(CUDA_ERROR_NOT_PERMITTED);
    }
    if context.alive.load(Ordering::Relaxed) {
        end(session()?, context);
    }
    Ok(())
}
