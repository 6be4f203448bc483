//! What each message does. The files have the names of the shim's.

mod array;
mod capture;
mod context;
mod copy;
mod event;
mod function;
mod graph;
mod green;
pub mod launch;
mod link;
mod memory;
mod module;
mod occupancy;
mod pool;
mod reference;
mod sharing;
mod stream;
mod tensor_map;
mod virtual_memory;

pub use link::LinkThread;

use super::Shared;
use super::session::{CallError, Session};
use super::trace;
use mpsshim_proto::message::{Op, Value};
use mpsshim_proto::ring::Message;
use zerocopy::IntoBytes;

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
            | Op::KernelAttribute
            | Op::GetManaged
            | Op::GreenCreate
            | Op::Confine
            | Op::ResourceJoin
            | Op::ResourceSplit
            | Op::LinkCreate
            | Op::LinkAdd
            | Op::LinkComplete
            | Op::LinkFetch
            | Op::LinkDestroy
            | Op::Printed
            | Op::AddressReserve
            | Op::AddressFree
            | Op::PhysicalCreate
            | Op::PhysicalRelease
            | Op::UnmapMemory
            | Op::SetAccess
            | Op::PhysicalExport
            | Op::PhysicalImport
            | Op::PhysicalRetain
            | Op::PoolCreate
            | Op::PoolDestroy
            | Op::PoolSetAccess
            | Op::PoolTrim
            | Op::ArrayCreate
            | Op::CaptureEnd
            | Op::GraphClone
            | Op::GraphDestroy
            | Op::GraphFindInClone
            | Op::GraphInstantiate
            | Op::GraphList
            | Op::GraphNodeDestroy
            | Op::GraphNodeGet
            | Op::GraphExecDestroy
            | Op::GraphExecUpdate
            | Op::GraphDot
            | Op::GraphMemory
            | Op::PoolExport
            | Op::PoolImport
            | Op::PoolExportPointer
            | Op::PoolImportPointer
            | Op::IpcClose
            | Op::IpcOpen
            | Op::FileRegister
            | Op::HostAlias
            | Op::PeerAccess
            | Op::RangeHandle
            | Op::GetReference
            | Op::ReferenceCall
    )
}

/// Whether a message that belongs on the slow lane may submit work.
pub fn submits(op: Op) -> bool {
    !matches!(
        op,
        Op::ImageLoad
            | Op::GetFunction
            | Op::GetGlobal
            | Op::EnumerateFunctions
            | Op::LinkCreate
            | Op::LinkAdd
            | Op::LinkComplete
            | Op::LinkFetch
            | Op::HostAlloc
    )
}

/// Payload of an answer that is one number.
fn value(value: u64) -> Vec<u8> {
    Value { value }.as_bytes().to_vec()
}

/// Why a message was not executed and stays where it is.
pub enum Undone {
    /// It has to wait for work in flight.
    Later,
    /// It has to be done while nothing is in flight.
    Alone,
    /// It breaks the protocol; the caller ends the session.
    Violation(String),
}

/// Executes one message and, if it is an ask, answers it.
///
/// # Errors
/// See [`Undone`].
#[inline]
pub fn execute(
    shared: &Shared,
    session: &mut Session,
    op: Op,
    message: &Message,
) -> Result<(), Undone> {
    if shared.is_tracing() {
        return trace::execute(shared, session, op, message);
    }
    perform(shared, session, op, message)
}

/// The same, traced or not.
///
/// # Errors
/// See [`Undone`].
#[inline]
pub fn perform(
    shared: &Shared,
    session: &mut Session,
    op: Op,
    message: &Message,
) -> Result<(), Undone> {
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
        Op::GreenDestroy => session.green_destroy(shared, message),
        Op::LimitMemory => session.limit_memory(shared, message),
        Op::LinkDestroy => session.link_destroy(shared, message),
        Op::ImageLeave => session.image_leave(shared, message),
        Op::HostFree => session.host_free(message),
        Op::AddressFree => session.address_free(shared, message),
        Op::PhysicalRelease => session.physical_release(shared, message),
        Op::PoolDestroy => session.pool_destroy(shared, message),
        Op::PoolFree => session.pool_free(shared, message),
        Op::CopyBox => session.copy_box(shared, message),
        Op::ArrayDestroy => session.array_destroy(shared, message),
        Op::TextureDestroy => session.texture_destroy(shared, message),
        Op::HostFunction => session.host_function(shared, message),
        Op::MemOp => session.mem_op(shared, message),
        Op::GraphLaunch => session.graph_launch(shared, message),
        Op::GraphUpload => session.graph_upload(shared, message),
        Op::IpcForget => session.ipc_forget(shared, message),
        Op::IpcClose => session.ipc_close(shared, message),
        Op::FileUnregister => session.file_unregister(shared, message),
        Op::StreamAttribute => session.stream_attribute(shared, message),
        Op::CaptureHost => session.capture_host(shared, message),
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
        Err(CallError::Full) => Err(Undone::Later),
        Err(CallError::Alone) => Err(Undone::Alone),
        Err(CallError::Violation(why)) => Err(Undone::Violation(why)),
    }
}

fn execute_ask(
    shared: &Shared,
    session: &mut Session,
    op: Op,
    message: &Message,
) -> Result<(), Undone> {
    let reply = match op {
        Op::Attach => session.attach(shared, message),
        Op::MemGrant => session.mem_grant(shared, message),
        Op::HostAlloc => session.host_alloc(shared, message),
        Op::MemInfo => session.mem_info(shared, message),
        Op::ImageLoad | Op::LinkAdd | Op::LinkComplete => {
            // The logs of a failure are wanted too.
            let outcome = match op {
                Op::ImageLoad => session.image_load(shared, message),
                Op::LinkAdd => session.link_add(shared, message),
                _ => session.link_complete(shared, message),
            };
            return match outcome {
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
                Err(CallError::Full) => Err(Undone::Later),
                Err(CallError::Alone) => Err(Undone::Alone),
                Err(CallError::Violation(why)) => Err(Undone::Violation(why)),
            };
        }
        Op::GetFunction => session.get_function(shared, message),
        Op::KernelAttribute => session.kernel_attribute(shared, message),
        Op::ResourceQuery => session.resource_query(shared, message),
        Op::ResourceSplit => session.resource_split(shared, message),
        Op::ResourceJoin => session.resource_join(shared, message),
        Op::GreenCreate => session.green_create(shared, message),
        Op::Confine => session.confine(shared, message),
        Op::LinkCreate => session.link_create(shared, message),
        Op::LinkFetch => session.link_fetch(message),
        Op::GetManaged => session.get_managed(shared, message),
        Op::GetGlobal => session.get_global(shared, message),
        Op::GetFunctionAttribute => session.get_function_attribute(shared, message),
        Op::SetFunctionAttribute => session.set_function_attribute(shared, message),
        Op::Occupancy => session.occupancy(shared, message),
        Op::Clusters => session.clusters(shared, message),
        Op::GetLimit => session.get_limit(shared, message),
        Op::SetLimit => session.set_limit(shared, message),
        Op::EventQuery => session.event_query(shared, message),
        Op::EventElapsed => session.event_elapsed(shared, message),
        Op::EventExport => session.event_export(shared, message),
        Op::EventImport => session.event_import(shared, message),
        Op::EnumerateFunctions => session.enumerate_functions(shared, message),
        Op::PointerAttribute => session.pointer_attribute(shared, message),
        Op::Printed => session.printed(shared),
        Op::AddressReserve => session.address_reserve(shared, message),
        Op::PhysicalCreate => session.physical_create(shared, message),
        Op::MapMemory => session.map_memory(shared, message),
        Op::UnmapMemory => session.unmap_memory(shared, message),
        Op::SetAccess => session.set_access(shared, message),
        Op::GetAccess => session.get_access(shared, message),
        Op::PhysicalExport => session.physical_export(shared, message),
        Op::PhysicalImport => session.physical_import(shared, message),
        Op::PhysicalRetain => session.physical_retain(shared, message),
        Op::Granularity => session.granularity(shared, message),
        Op::PoolCreate => session.pool_create(shared, message),
        Op::PoolAlloc => session.pool_alloc(shared, message),
        Op::PoolGetAttribute => session.pool_get_attribute(shared, message),
        Op::PoolSetAttribute => session.pool_set_attribute(shared, message),
        Op::PoolSetAccess => session.pool_set_access(shared, message),
        Op::PoolGetAccess => session.pool_get_access(shared, message),
        Op::PoolTrim => session.pool_trim(shared, message),
        Op::ArrayCreate => session.array_create(shared, message),
        Op::ArrayPart => session.array_part(shared, message),
        Op::ArrayQuery => session.array_query(shared, message),
        Op::TextureCreate => session.texture_create(shared, message),
        Op::CaptureBegin => session.capture_begin(shared, message),
        Op::CaptureEnd => session.capture_end(shared, message),
        Op::CaptureState => session.capture_state(shared, message),
        Op::CaptureUpdate => session.capture_update(shared, message),
        Op::CaptureBreak => session.capture_break(shared, message),
        Op::Settle => Ok(Vec::new()),
        Op::GraphCreate => session.graph_create(shared, message),
        Op::GraphDestroy => session.graph_destroy(shared, message),
        Op::GraphClone => session.graph_clone(shared, message),
        Op::GraphFindInClone => session.graph_find_in_clone(shared, message),
        Op::GraphList => session.graph_list(shared, message),
        Op::GraphDependencies => session.graph_dependencies(shared, message),
        Op::GraphNode => session.graph_node(shared, message),
        Op::GraphNodeGet => session.graph_node_get(shared, message),
        Op::GraphNodeKind => session.graph_node_kind(shared, message),
        Op::GraphNodeDestroy => session.graph_node_destroy(shared, message),
        Op::GraphAttribute => session.graph_attribute(shared, message),
        Op::GraphCopyAttributes => session.graph_copy_attributes(shared, message),
        Op::GraphInstantiate => session.graph_instantiate(shared, message),
        Op::GraphExecDestroy => session.graph_exec_destroy(shared, message),
        Op::GraphExecFlags => session.graph_exec_flags(shared, message),
        Op::GraphExecUpdate => session.graph_exec_update(shared, message),
        Op::GraphEnabled => session.graph_enabled(shared, message),
        Op::GraphDot => session.graph_dot(shared, message),
        Op::GraphMemory => session.graph_memory(shared, message),
        Op::GraphCondition => session.graph_condition(shared, message),
        Op::PoolExport => session.pool_export(shared, message),
        Op::PoolImport => session.pool_import(shared, message),
        Op::PoolExportPointer => session.pool_export_pointer(shared, message),
        Op::PoolImportPointer => session.pool_import_pointer(shared, message),
        Op::IpcShare => session.ipc_share(shared, message),
        Op::IpcOpen => session.ipc_open(shared, message),
        Op::FileRegister => session.file_register(shared, message),
        Op::HostAlias => session.host_alias(shared, message),
        Op::PeerAccess => session.peer_access(shared, message),
        Op::RangeHandle => session.range_handle(shared, message),
        Op::GetReference => session.get_reference(shared, message),
        Op::ReferenceCall => session.reference_call(shared, message),
        Op::TensorMap => session.tensor_map(shared, message),
        post => return Err(Undone::Violation(format!("{post:?} is not an ask"))),
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
        Err(CallError::Full) => Err(Undone::Later),
        Err(CallError::Alone) => Err(Undone::Alone),
        Err(CallError::Violation(why)) => Err(Undone::Violation(why)),
    }
}
