//! Handlers of all messages. The files have the names of the shim's.

pub mod alone;
pub mod array;
pub mod capture;
pub mod context;
pub mod copy;
mod event;
pub mod function;
pub mod graph;
mod green;
pub mod launch;
pub mod link;
pub mod memory;
pub mod module;
mod occupancy;
pub mod pool;
mod reference;
mod reply;
mod sharing;
pub mod stream;
mod tensor_map;
mod virtual_memory;

use crate::engine::base::call::Incoming;
use crate::engine::base::call_error::CallError;
use crate::engine::base::description::Record;
use crate::engine::base::driver::is_sticky;
use crate::engine::base::kinds::Kind;
use crate::engine::lasting::messages::note_change;
use crate::engine::lasting::{Lasting, Lost, Making, failed};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use array::{
    array_create, array_destroy, array_part, array_query, copy_box, texture_create, texture_destroy,
};
use capture::{
    capture_begin, capture_break, capture_end, capture_host, capture_state, capture_update,
    show_failure,
};
use context::{attach, get_limit, set_limit};
use copy::{copy, copy_inline, managed_move, memset};
use event::{
    event_create, event_destroy, event_elapsed, event_export, event_import, event_query,
    event_record, mark_event, stream_wait_event, taken,
};
use function::{
    get_function, get_function_attribute, kernel_attribute, printed, set_function_attribute,
};
use graph::exec::{
    graph_enabled, graph_exec_destroy, graph_exec_flags, graph_exec_update, graph_instantiate,
    graph_launch, graph_upload,
};
use graph::node::{graph_node, puts_graph_into_graph};
use graph::shown::graph_node_get;
use graph::{
    graph_attribute, graph_clone, graph_condition, graph_copy_attributes, graph_create,
    graph_dependencies, graph_destroy, graph_dot, graph_find_in_clone, graph_list, graph_memory,
    graph_node_destroy, graph_node_kind,
};
use green::{confine, green_create, green_destroy, resource_join, resource_query, resource_split};
use launch::launch;
use link::{link_add, link_complete, link_create, link_destroy, link_fetch};
use memory::{
    host_alloc, host_free, limit_memory, mem_grant, mem_info, mem_release, pointer_attribute,
};
use module::{
    enumerate_functions, get_global, get_managed, image_leave, image_load, image_unload,
    place_global,
};
use mpsshim_api::cuda::CUresult;
use mpsshim_proto::for_each_op;
use mpsshim_proto::message::Op;
use mpsshim_proto::ops::{Body, Change, Lane};
use occupancy::{clusters, occupancy};
use pool::{
    pool_alloc, pool_create, pool_destroy, pool_free, pool_get_access, pool_get_attribute,
    pool_set_access, pool_set_attribute, pool_trim,
};
use reference::{get_reference, reference_call};
use reply::{Logged, Reply};
use sharing::{
    file_register, file_unregister, ipc_close, ipc_forget, ipc_open, ipc_share, peer_access,
    pool_export, pool_export_pointer, pool_import, pool_import_pointer, range_handle,
};
use stream::{host_function, mark, mem_op, stream_attribute, stream_create, stream_destroy};
use tensor_map::tensor_map;
use virtual_memory::{
    address_free, address_reserve, get_access, granularity, map_memory, physical_create,
    physical_export, physical_import, physical_release, physical_retain, set_access, unmap_memory,
};

/// Whether a message may take long or wait inside the driver, so that it belongs on the slow lane.
#[inline]
pub fn is_slow(message: Incoming<'_>) -> bool {
    match message.op.lane() {
        Lane::Dispatch => false,
        Lane::Slow | Lane::SlowSubmits => true,
        Lane::SlowForGraphs => puts_graph_into_graph(message),
    }
}

/// Reason why a message was not executed and stays where it is.
pub enum Undone {
    /// It has to wait for work in flight.
    Later,
    /// It needs a quiescent point.
    Alone,
    /// It breaks the protocol; the caller ends the session.
    Violation(String),
}

/// A handler takes the body, or the whole call if the row says that data follows the body.
macro_rules! argument {
    ($call:ident, $rest:ident) => {
        $call
    };
    ($call:ident) => {
        $call.body
    };
}

/// One match arm for each row of the table: calls `$before`, decodes the body, calls the handler, and passes the result to
/// `$then`.
macro_rules! handle_by_table {
    (
        ($shared:ident, $session:ident, $message:ident, $before:ident, $then:ident)
        $(
            #[doc = $doc:literal]
            $name:ident = $number:literal: $kind:ident $handler:ident($body:ty $(, $rest:ident)?) $(-> $answer:ty)?;
            $lane:ident, $ordering:tt, $gate:tt, $traced:tt, $change:tt;
        )*
    ) => {
        match $message.op {
            $(Op::$name => {
                $before!($name, $session, $message);
                let call = $message.decode::<Body<$number>>();
                let outcome = call.and_then(|call| $handler($session, $shared, argument!(call $(, $rest)?)));
                $then!($name, $kind, outcome, $shared, $session, $message)
            })*
        }
    };
}

/// Whether an operation may change the session's description.
const fn changes(op: Op) -> bool {
    !matches!(op.change(), Change::Nothing)
}

/// Notes that a message may change the session.
macro_rules! begin {
    ($name:ident, $session:ident, $message:ident) => {
        if const { changes(Op::$name) } {
            $session.begin_change($message);
        }
    };
}

/// Notes nothing.
macro_rules! begin_silently {
    ($name:ident, $session:ident, $message:ident) => {};
}

/// Describes an executed message, and notifies the client.
macro_rules! conclude {
    ($name:ident, $kind:ident, $outcome:ident, $shared:ident, $session:ident, $message:ident) => {{
        if const { changes(Op::$name) } && Outcome::<$kind>::is_done(&$outcome) {
            note_change($session, &$shared.images, $message);
        } else if const { Op::$name.is_request() } && Outcome::<$kind>::is_done(&$outcome) {
            $session.note_executed($message);
        }
        if const { Op::$name.is_request() } {
            $session.note_answering($message);
        } else if const { matches!(Op::$name, Op::PoolFree) } {
            // Its memory may have been allocated again.
            $session.note_done($message);
        }
        let done = Outcome::<$kind>::conclude($outcome, $shared, $session, Op::$name);
        if const { changes(Op::$name) } && done.is_err() {
            $session.shared.description.cancel_change();
        }
        done
    }};
}

/// Returns the status without notifying the client.
macro_rules! status_only {
    ($name:ident, $kind:ident, $outcome:ident, $shared:ident, $session:ident, $message:ident) => {
        Outcome::<$kind>::status($outcome)
    };
}

/// Executes one message and, if it is a request, answers it.
///
/// # Errors
/// See [`Undone`].
#[inline]
pub fn perform(
    shared: &Shared,
    session: &mut Session,
    message: Incoming<'_>,
) -> Result<(), Undone> {
    for_each_op!(handle_by_table(shared, session, message, begin, conclude))
}

/// Executes a message of which the client already knows the result.
///
/// # Errors
/// Errors of the handler.
pub fn replay(
    shared: &Shared,
    session: &mut Session,
    message: Incoming<'_>,
) -> Result<(), CallError> {
    for_each_op!(handle_by_table(
        shared,
        session,
        message,
        begin_silently,
        status_only
    ))
}

/// Result of a handler for this kind of operation.
trait Outcome<Kind> {
    /// Whether the operation was executed.
    fn is_done(&self) -> bool;

    /// The status, without the payload for the client.
    ///
    /// # Errors
    /// The reason why it was not executed.
    fn status(self) -> Result<(), CallError>;

    /// Notifies the client: answers a request, or reports the error of an asynchronous command.
    ///
    /// # Errors
    /// See [`Undone`].
    fn conclude(self, shared: &Shared, session: &mut Session, op: Op) -> Result<(), Undone>;
}

/// Marker of [`Outcome`]: [`mpsshim_proto::ops::Kind::Async`].
enum Async {}
/// Marker of [`Outcome`]: [`mpsshim_proto::ops::Kind::Request`].
enum Request {}

impl Outcome<Async> for Result<(), CallError> {
    fn is_done(&self) -> bool {
        self.is_ok()
    }

    fn status(self) -> Result<(), CallError> {
        self
    }

    #[inline]
    fn conclude(self, shared: &Shared, session: &mut Session, op: Op) -> Result<(), Undone> {
        let Err(error) = self else {
            return Ok(());
        };
        let status = error.status()?;
        tracing::debug!(session = session.shared.info.session, ?op, %status, "an asynchronous operation failed");
        note_failure(session, shared, status)?;
        session.post_error(status);
        Ok(())
    }
}

impl Outcome<Request> for Reply {
    fn is_done(&self) -> bool {
        self.is_ok()
    }

    fn status(self) -> Result<(), CallError> {
        self.map(drop)
    }

    fn conclude(self, shared: &Shared, session: &mut Session, op: Op) -> Result<(), Undone> {
        let (status, payload) = match self {
            Ok(payload) => (Ok(()), payload),
            Err(error) => {
                let status = error.status()?;
                tracing::debug!(session = session.shared.info.session, ?op, %status, "a request failed");
                session.note_failed_request(op);
                note_failure(session, shared, status)?;
                (Err(status), Vec::new())
            }
        };
        session.answer(status, &payload);
        Ok(())
    }
}

impl Outcome<Request> for Logged {
    fn is_done(&self) -> bool {
        matches!(self, Ok((Ok(()), _)))
    }

    fn status(self) -> Result<(), CallError> {
        Ok(self?.0?)
    }

    fn conclude(self, shared: &Shared, session: &mut Session, op: Op) -> Result<(), Undone> {
        match self {
            Ok((Err(status), payload)) => {
                note_failure(session, shared, status)?;
                session.answer(Err(status), &payload);
                Ok(())
            }
            other => other
                .map(|(_, payload)| payload)
                .conclude(shared, session, op),
        }
    }
}

/// Handles an error of the driver. If the context is lost and the session continues in the next server, the message
/// is left for that server.
fn note_failure(session: &mut Session, shared: &Shared, status: CUresult) -> Result<(), Undone> {
    if is_sticky(status) {
        session.take_back_begun();
    }
    shared.gpu.note_status(status);
    match shared.gpu.is_lost() && session.shared.goes_on(&shared.gpu) {
        true => Err(Undone::Later),
        false => Ok(()),
    }
}

impl CallError {
    /// The driver's status, for the client.
    fn status(self) -> Result<CUresult, Undone> {
        match self {
            CallError::Status(status) => Ok(status),
            CallError::Full => Err(Undone::Later),
            CallError::Alone => Err(Undone::Alone),
            CallError::Violation(why) => Err(Undone::Violation(why)),
        }
    }
}

/// Executes a described message again.
fn replay_described(
    record: &Record,
    message: &[u8],
    session: &mut Session,
    making: &mut Making<'_>,
) -> Result<(), Lost> {
    let op = Op::from_u16(record.op).ok_or("its description cannot be read")?;
    let message = Incoming::copied(op, 0, message);
    let replayed = replay(making.shared, session, message);
    replayed.map_err(|error| match error {
        CallError::Status(status) => failed(&format!("{op:?}"), record)(status),
        error => format!("{op:?}: {error}"),
    })
}

/// State of a message that creates an object.
pub struct Makes;

/// State of a message that changes an object.
pub struct Sets;

impl Lasting for Makes {
    const KIND: Kind = Kind::Makes;
    type State = Vec<u8>;

    fn make(
        record: &Record,
        message: Vec<u8>,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let message = match Op::from_u16(record.op) {
            Some(Op::StreamCreate) => stream::without_gone_legacy(session, message),
            _ => message,
        };
        replay_described(record, &message, session, making)
    }
}

impl Lasting for Sets {
    const KIND: Kind = Kind::Sets;
    type State = Vec<u8>;

    fn make(
        record: &Record,
        message: Vec<u8>,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        replay_described(record, &message, session, making)
    }
}
