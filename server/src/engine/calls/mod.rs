//! What each message does. The files have the names of the shim's.

mod context;
mod copy;
mod event;
mod function;
mod launch;
mod memory;
mod module;
mod occupancy;
mod stream;

use super::Shared;
use super::session::{CallError, Session};
use mpsshim_proto::message::Op;
use mpsshim_proto::ring::Message;

/// Payload of an answer.
pub type Reply = Result<Vec<u8>, CallError>;

/// Whether a message may take long or wait inside the driver, so that it belongs on the slow lane.
pub fn is_slow(op: Op) -> bool {
    matches!(
        op,
        Op::Attach
            | Op::MemGrant
            | Op::MemRelease
            | Op::HostAlloc
            | Op::ImageLoad
            | Op::ImageUnload
            | Op::GetFunction
            | Op::GetGlobal
            | Op::SetLimit
            | Op::EnumerateFunctions
            | Op::Printed
    )
}

/// Whether a message launches a kernel that may print.
pub fn prints(session: &Session, op: Op, message: &Message) -> bool {
    op == Op::Launch
        && session
            .body::<mpsshim_proto::message::Launch>(message)
            .is_ok_and(|body| {
                session
                    .function(body.function)
                    .is_ok_and(|function| function.prints)
            })
}

/// Whether a message puts work on a stream, so that it must wait while that stream is full. All of these begin
/// with or contain the stream's handle.
pub fn stream_of(session: &Session, op: Op, message: &Message) -> Result<Option<u64>, CallError> {
    use mpsshim_proto::message as m;
    Ok(match op {
        Op::Launch => Some(session.body::<m::Launch>(message)?.stream),
        Op::CopyInline => Some(session.body::<m::CopyInline>(message)?.stream),
        Op::Copy => Some(session.body::<m::Copy>(message)?.stream),
        Op::Memset => Some(session.body::<m::Memset>(message)?.stream),
        Op::Mark => Some(session.body::<m::Mark>(message)?.stream),
        Op::MarkEvent => Some(session.body::<m::MarkEvent>(message)?.stream),
        Op::EventRecord | Op::StreamWaitEvent => {
            Some(session.body::<m::EventOnStream>(message)?.stream)
        }
        _ => None,
    })
}

/// Executes one message and, if it is an ask, answers it.
///
/// # Errors
/// A violation ends the session; the caller sees to that.
#[inline]
pub fn execute(
    shared: &Shared,
    session: &mut Session,
    op: Op,
    message: &Message,
) -> Result<(), String> {
    let outcome = match op {
        Op::Launch => session.launch(shared, message),
        Op::Mark => session.mark(shared, message),
        Op::CopyInline => session.copy_inline(shared, message),
        Op::Copy => session.copy(shared, message),
        Op::Memset => session.memset(shared, message),
        Op::StreamCreate => session.stream_create(shared, message),
        Op::StreamDestroy => session.stream_destroy(shared, message),
        Op::EventCreate => session.event_create(shared, message),
        Op::EventDestroy => session.event_destroy(shared, message),
        Op::EventRecord => session.event_record(shared, message),
        Op::StreamWaitEvent => session.stream_wait_event(shared, message),
        Op::MarkEvent => session.mark_event(shared, message),
        Op::MemRelease => session.mem_release(shared, message),
        Op::ImageUnload => session.image_unload(shared, message),
        Op::HostFree => session.host_free(message),
        ask => return execute_ask(shared, session, ask, message),
    };
    match outcome {
        Ok(()) => Ok(()),
        Err(CallError::Status(status)) => {
            tracing::debug!(session = session.shared.info.session, ?op, %status, "post failed");
            shared.note_status(status);
            session.post_error(status);
            Ok(())
        }
        Err(CallError::Violation(why)) => Err(why),
    }
}

fn execute_ask(
    shared: &Shared,
    session: &mut Session,
    op: Op,
    message: &Message,
) -> Result<(), String> {
    let reply = match op {
        Op::Attach => session.attach(shared, message),
        Op::MemGrant => session.mem_grant(shared, message),
        Op::HostAlloc => session.host_alloc(shared, message),
        Op::MemInfo => session.mem_info(shared, message),
        Op::ImageLoad => {
            // The logs of a failed load are wanted too.
            return match session.image_load(shared, message) {
                Ok((status, payload)) => {
                    if let Err(status) = status {
                        shared.note_status(status);
                    }
                    session.answer(status, &payload);
                    Ok(())
                }
                Err(CallError::Status(status)) => {
                    session.answer(Err(status), &[]);
                    Ok(())
                }
                Err(CallError::Violation(why)) => Err(why),
            };
        }
        Op::GetFunction => session.get_function(shared, message),
        Op::GetGlobal => session.get_global(shared, message),
        Op::GetFunctionAttribute => session.get_function_attribute(shared, message),
        Op::SetFunctionAttribute => session.set_function_attribute(shared, message),
        Op::Occupancy => session.occupancy(shared, message),
        Op::Clusters => session.clusters(shared, message),
        Op::GetLimit => session.get_limit(shared, message),
        Op::SetLimit => session.set_limit(shared, message),
        Op::EventQuery => session.event_query(shared, message),
        Op::EventElapsed => session.event_elapsed(shared, message),
        Op::EnumerateFunctions => session.enumerate_functions(shared, message),
        Op::PointerAttribute => session.pointer_attribute(shared, message),
        Op::Printed => session.printed(shared),
        post => return Err(format!("{post:?} is not an ask")),
    };
    match reply {
        Ok(payload) => {
            session.answer(Ok(()), &payload);
            Ok(())
        }
        Err(CallError::Status(status)) => {
            tracing::debug!(session = session.shared.info.session, ?op, %status, "ask failed");
            shared.note_status(status);
            session.answer(Err(status), &[]);
            Ok(())
        }
        Err(CallError::Violation(why)) => Err(why),
    }
}
