//! Streams and completion markers.

use crate::engine::base::call_error::CallError;
use crate::engine::base::driver::is_sticky;
use crate::engine::calls::capture::abandon_captures;
use crate::engine::gpu::Gpu;
use crate::engine::lasting::resources::part_of;
use crate::engine::objects::held::{Awaited, Phase, Word};
use crate::engine::objects::marks::session::queue_mark;
use crate::engine::objects::streams::{Role, Stream, clamped};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::stream::{HostFunction, MemOp, StreamAttribute};
use mpsshim_proto::message::{Mark, Object, StreamCreate};
use mpsshim_proto::segment::{ARRIVED, RETURNED};
use std::sync::atomic::Ordering;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// The first word of an attribute's value.
pub fn first_word(value: &[u8]) -> i32 {
    value.first_chunk().copied().map_or(0, i32::from_ne_bytes)
}

/// Sets the first word of an attribute's value.
pub fn set_first_word(value: &mut [u8], word: i32) {
    value[..4].copy_from_slice(&word.to_ne_bytes());
}

/// `cuStreamCreateWithPriority`, and the default streams of a context.
pub fn stream_create(
    session: &mut Session,
    shared: &Shared,
    body: StreamCreate,
) -> Result<(), CallError> {
    let device = shared.gpu.device(body.device)?;
    let role = match body.legacy {
        0 => Role::Independent,
        own if own == body.stream => Role::Legacy,
        legacy => {
            let index = session.objects.streams.index(legacy)?;
            let legacy = session.objects.streams.at(index)?;
            // Another stream may capture, and a stream that waits for it would join the capture.
            if legacy.role != Role::Legacy || legacy.device != device.ordinal {
                return Err(CUDA_ERROR_INVALID_HANDLE.into());
            }
            Role::Blocking(index)
        }
    };
    device.make_current(&shared.gpu.driver)?;
    let priority = clamped(body.priority);
    reap_streams(session, shared);
    let green = match body.green {
        0 => part_of(session, shared, device)?,
        green => Some(session.objects.greens.get(green)?.clone()),
    };
    let raw = match &green {
        None => device.take_stream(&shared.gpu.driver, priority)?,
        Some(green) if green.device == device.ordinal => {
            green.take_stream(&shared.gpu.driver, priority)?
        }
        Some(_) => return Err(CUDA_ERROR_INVALID_DEVICE.into()),
    };
    let mut stream = Stream::new(
        &shared.gpu,
        &session.shared.flags,
        raw,
        device.ordinal,
        priority,
        role,
    );
    stream.green = green;
    stream.part = body.green;
    if let Err((status, stream)) = session.objects.streams.insert(body.stream, stream) {
        stream.release(&shared.gpu);
        return Err(status.into());
    }
    let bit = 1 << (device.ordinal.index() % 64);
    session.shared.devices.fetch_or(bit, Ordering::Relaxed);
    let index = session.objects.streams.index(body.stream)?;
    if let Role::Blocking(legacy) = role {
        session.objects.streams.at_mut(legacy)?.members.push(index);
    }
    Ok(session.begin_progress(&shared.images, index)?)
}

/// A message that made a stream, for the next server: if its legacy default stream has been destroyed, it is ordered
/// against no other.
pub fn without_gone_legacy(session: &Session, message: Vec<u8>) -> Vec<u8> {
    match StreamCreate::read_from_prefix(&message) {
        Ok((mut body, _))
            if body.legacy != body.stream
                && session.objects.streams.index(body.legacy).is_err() =>
        {
            body.legacy = 0;
            body.as_bytes().to_vec()
        }
        _ => message,
    }
}

/// `cuStreamDestroy`: queued work still runs.
pub fn stream_destroy(
    session: &mut Session,
    shared: &Shared,
    body: Object,
) -> Result<(), CallError> {
    let index = session.objects.streams.index(body.object)?;
    abandon_captures(session, shared, Some(body.object));
    let mut stream = session.objects.streams.remove(body.object)?;
    if let Role::Blocking(legacy) = stream.role
        && let Ok(legacy) = session.objects.streams.at_mut(legacy)
    {
        legacy.members.retain(|member| *member != index);
    }
    // Its position may be another stream's next.
    for member in std::mem::take(&mut stream.members) {
        if let Ok(member) = session.objects.streams.at_mut(member)
            && member.role == Role::Blocking(index)
        {
            member.role = Role::Independent;
        }
    }
    let told = shared.gpu.devices[stream.device]
        .make_current(&shared.gpu.driver)
        .and_then(|()| stream.checkpoint(&shared.gpu));
    // The stream is kept, even if the driver reported an error.
    session.shared.description.set_retired(true);
    stream.progress = None;
    session.objects.retired.push(stream);
    reap_streams(session, shared);
    Ok(told?)
}

/// Releases streams that the client has destroyed and that have no work left.
pub fn reap_streams(session: &mut Session, shared: &Shared) {
    if session.objects.retired.is_empty() {
        return;
    }
    let mut at = 0;
    while at < session.objects.retired.len() {
        // Asks the driver, because the client can write the flags: the next session to get the stream must not wait
        // behind this session's work.
        let stream = &mut session.objects.retired[at];
        let _ = shared.gpu.devices[stream.device].make_current(&shared.gpu.driver);
        if !stream.capturing
            && stream.in_flight(&shared.gpu, &session.shared.segment) == 0
            && shared.gpu.driver.stream_query(stream.raw).is_ok()
        {
            session.objects.retired.swap_remove(at).release(&shared.gpu);
        } else {
            at += 1;
        }
    }
    if session.objects.retired.is_empty() {
        session.shared.description.set_retired(false);
    }
}

/// Writes a client's flag when its stream reaches this point.
pub fn mark(session: &mut Session, shared: &Shared, body: Mark) -> Result<(), CallError> {
    session.shared.segment.check_slot(body.slot)?;
    let (index, stream) = match session.prepare(&shared.gpu, body.stream) {
        Ok(ready) => ready,
        Err(error) => return mark_failed(session, &shared.gpu, &body, error),
    };
    if session.objects.streams.at(index)?.capturing {
        return mark_failed(
            session,
            &shared.gpu,
            &body,
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.into(),
        );
    }
    let expected = session.expect_mark(index, body.slot, body.value)?;
    if let Err(status) = queue_mark(session, &shared.gpu, stream, body.slot, body.value) {
        session.withdraw_mark(index, expected);
        return mark_failed(session, &shared.gpu, &body, status.into());
    }
    session.marked(&shared.gpu, index, 1, (body.slot, body.value))
}

/// `cuLaunchHostFunc`, `cuStreamAddCallback`: notifies the client when the stream reaches this point, and holds the
/// stream until the function has returned.
pub fn host_function(
    session: &mut Session,
    shared: &Shared,
    body: HostFunction,
) -> Result<(), CallError> {
    session.shared.segment.check_slot(body.slot)?;
    let mark = Mark {
        stream: body.stream,
        slot: body.slot + ARRIVED,
        value: body.value,
    };
    let (index, stream) = match session.prepare(&shared.gpu, body.stream) {
        Ok(ready) => ready,
        Err(error) => return mark_failed(session, &shared.gpu, &mark, error),
    };
    if session.objects.streams.at(index)?.capturing {
        return mark_failed(session, &shared.gpu, &mark, CUDA_ERROR_NOT_SUPPORTED.into());
    }
    let queued = queue_mark(session, &shared.gpu, stream, mark.slot, mark.value);
    session.hold(
        index,
        Awaited::Returned {
            flag: body.slot + RETURNED,
            value: body.value,
        },
    );
    if let Err(status) = queued {
        return mark_failed(session, &shared.gpu, &mark, status.into());
    }
    session.submitted(&shared.gpu, index, 1)
}

/// `cuStreamSetAttribute`.
pub fn stream_attribute(
    session: &mut Session,
    shared: &Shared,
    body: StreamAttribute,
) -> Result<(), CallError> {
    if body.id == CU_STREAM_ATTRIBUTE_PRIORITY {
        let stream = session.objects.streams.get_mut(body.stream)?;
        stream.priority = clamped(first_word(&body.value));
        shared.gpu.devices[stream.device].make_current(&shared.gpu.driver)?;
        stream.take_level(&shared.gpu, session.shared.standing.level(stream.device));
        return Ok(());
    }
    let stream = session.objects.streams.get_mut(body.stream)?;
    let len = match body.id {
        CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW => size_of::<CUaccessPolicyWindow>(),
        CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP => 2,
        CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN => 4,
        _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
    };
    shared.gpu.devices[stream.device].make_current(&shared.gpu.driver)?;
    if !stream.capturing {
        stream.set_confined(&shared.gpu, None)?;
    }
    stream.set_attribute(&shared.gpu, body.id, &body.value[..len]);
    Ok(())
}

/// One operation of `cuStreamWaitValue`, `cuStreamWriteValue`, `cuStreamBatchMemOp`.
pub fn mem_op(session: &mut Session, shared: &Shared, body: MemOp) -> Result<(), CallError> {
    let wide = match body.operation {
        CU_STREAM_MEM_OP_WAIT_VALUE_64 | CU_STREAM_MEM_OP_WRITE_VALUE_64 => true,
        CU_STREAM_MEM_OP_WAIT_VALUE_32 | CU_STREAM_MEM_OP_WRITE_VALUE_32 => false,
        CU_STREAM_MEM_OP_BARRIER | CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES => {
            let (index, stream) = session.prepare(&shared.gpu, body.stream)?;
            let mut operation = CUstreamBatchMemOpParams {
                operation: body.operation,
                flags: body.flags,
                ..Default::default()
            };
            let driver = &shared.gpu.driver.stream;
            driver.stream_batch_mem_op(stream, 1, &mut operation, 0)?;
            return session.submitted(&shared.gpu, index, 1);
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
    };
    let len = if wide { 8 } else { 4 };
    if !body.address.is_multiple_of(len) {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    let body = MemOp {
        address: session.lasting.place_of(body.address),
        ..body
    };
    session.check_device(body.address, len)?;
    if matches!(
        body.operation,
        CU_STREAM_MEM_OP_WRITE_VALUE_32 | CU_STREAM_MEM_OP_WRITE_VALUE_64
    ) {
        session.check_writable(body.address)?;
    }
    let (index, stream) = session.prepare(&shared.gpu, body.stream)?;
    if session.objects.streams.at(index)?.capturing {
        // Becomes a node of the graph; a wait then blocks on the GPU, not in the server.
        let device = session.objects.streams.at(index)?.device;
        let awaited = &mut session.objects.graphs.awaited;
        awaited.note(device, body.operation, body.address, body.value, body.flags)?;
        let mut operation = CUstreamBatchMemOpParams {
            operation: body.operation,
            value_flags: body.flags,
            address: body.address,
            value: body.value,
            ..Default::default()
        };
        let driver = &shared.gpu.driver.stream;
        driver.stream_batch_mem_op(stream, 1, &mut operation, 0)?;
        return session.submitted(&shared.gpu, index, 1);
    }
    match body.operation {
        CU_STREAM_MEM_OP_WRITE_VALUE_32 => shared.gpu.driver.stream_write_value32(
            stream,
            body.address,
            body.value as u32,
            body.flags,
        )?,
        CU_STREAM_MEM_OP_WRITE_VALUE_64 => shared.gpu.driver.stream.stream_write_value64(
            stream,
            body.address,
            body.value,
            body.flags,
        )?,
        _ => return wait_value(session, shared, index, &body, wide),
    }
    session.submitted(&shared.gpu, index, 1)
}

/// Holds a stream until a word of the client's memory has a value.
fn wait_value(
    session: &mut Session,
    shared: &Shared,
    index: usize,
    body: &MemOp,
    wide: bool,
) -> Result<(), CallError> {
    let stream = session.objects.streams.at(index)?;
    let (raw, device) = (stream.raw, stream.device);
    let (flag, value) = shared.gpu.flags.for_word(&session.shared.flags)?;
    let expected = value.wrapping_add(1);
    let address = shared.gpu.flags.device_address(flag.slot);
    if let Err(status) = shared
        .gpu
        .driver
        .stream_write_value32(raw, address, expected, 0)
    {
        shared.gpu.flags.give_back(flag);
        return Err(status.into());
    }
    let word = Word {
        address: body.address,
        wide,
        flags: body.flags,
        value: body.value,
        device,
        on_device: session.check_host(body.address, 1).is_err(),
        since: Instant::now(),
        flag: Some(flag),
        expected,
        phase: Phase::Arriving,
    };
    session.hold(index, Awaited::Word(word));
    session.submitted(&shared.gpu, index, 1)
}

/// Handles a completion marker that cannot be queued, so that its waiter does not wait forever: the server notes
/// the error, which the waiter then finds, and writes the flag itself. If the context is lost, the session has
/// ended before that, so that no call of the client succeeds after the call that returns the error. If the session
/// continues in the next server, that server executes the marker.
pub fn mark_failed(
    session: &mut Session,
    gpu: &Gpu,
    body: &Mark,
    error: CallError,
) -> Result<(), CallError> {
    if let CallError::Status(status) = &error {
        if is_sticky(*status) {
            // The driver refused the marker, so it is not in flight.
            session.take_back_begun();
        }
        gpu.note_status(*status);
        if !(gpu.is_lost() && session.shared.goes_on(gpu)) {
            session.post_error(*status);
            session.shared.segment.set_flag(body.slot, body.value);
        }
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::calls::Undone;
    use crate::engine::session::SessionShared;
    use crate::engine::testing::{Fixture, Function, counts, fails, small_memset, writes};
    use mpsshim_model::bonds::Bonds;
    use mpsshim_proto::handle::{Handle, Kind};
    use mpsshim_proto::message::Op;
    use std::cell::RefCell;
    use std::sync::Arc;
    use std::time::Duration;
    use zerocopy::FromZeros;
    use zerocopy::IntoBytes;

    #[test]
    fn a_value_begins_with_a_number() {
        let mut value = [7; 64];
        set_first_word(&mut value, -3);
        assert_eq!(first_word(&value), -3);
        assert_eq!(value[4..], [7; 60]);
        assert_eq!(first_word(&value[..3]), 0);
    }

    #[test]
    fn streams_have_the_priorities_of_the_driver() {
        let priorities = [i32::MIN, -17, -16, -3, 0, 1, i32::MAX];
        assert_eq!(priorities.map(clamped), [-16, -16, -16, -3, 0, 0, 0]);
    }

    const STREAM: Handle = Handle::new(Kind::Stream, 1, 0);

    fn creates(test: &mut Fixture) -> u64 {
        let body = StreamCreate {
            stream: STREAM.0,
            ..StreamCreate::new_zeroed()
        };
        assert_eq!(test.status(Op::StreamCreate, &body, &[]), CUDA_SUCCESS);
        STREAM.0
    }

    /// Submits work.
    fn work(test: &mut Fixture, stream: u64) {
        let body = small_memset(test.memory(4096), stream);
        assert_eq!(test.status(Op::Memset, &body, &[]), CUDA_SUCCESS);
    }

    /// A mark for a new stream.
    fn mark(test: &mut Fixture) -> Mark {
        Mark {
            stream: creates(test),
            slot: 3,
            value: 7,
        }
    }

    #[test]
    fn a_stream_is_refused_on_a_device_that_does_not_exist() {
        let mut test = Fixture::new(&[]);
        let body = StreamCreate {
            stream: STREAM.0,
            device: 1,
            ..StreamCreate::new_zeroed()
        };
        let status = test.status(Op::StreamCreate, &body, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(test.session.objects.streams.len(), 0);
    }

    #[test]
    fn a_mark_is_written_by_the_stream() {
        let mut test = Fixture::new(&[("cuStreamWriteValue32_v2", counts as Function)]);
        let mark = mark(&mut test);
        assert!(test.execute(Op::Mark, &mark, &[]).is_ok());
        assert_eq!(test.calls(), 1);
        assert_eq!(test.session.shared.flag(3), 0, "the device writes it");
        assert_eq!(test.posted_error(), CUDA_SUCCESS);
    }

    thread_local! {
        /// The session whose mark the driver gets, and whether it was at rest once the mark was written.
        static WRITTEN: RefCell<Option<(Arc<SessionShared>, bool)>> = const { RefCell::new(None) };
    }

    /// A device that reaches the mark at once.
    extern "C" fn reaches(_: u64, _: u64, value: u32) -> CUresult {
        WRITTEN.with_borrow_mut(|written| {
            if let Some((session, rests)) = written {
                session.segment.set_flag(3, value);
                *rests = session.is_at_rest();
            }
        });
        CUDA_SUCCESS
    }

    /// The server may be killed at the instant at which the client finds its results.
    #[test]
    fn a_session_is_at_rest_as_soon_as_its_mark_is_written() {
        let mut test = Fixture::new(&[("cuStreamWriteValue32_v2", reaches as Function)]);
        let mark = mark(&mut test);
        work(&mut test, mark.stream);
        assert!(!test.session.shared.is_at_rest());
        WRITTEN.set(Some((test.session.shared.clone(), false)));
        assert!(test.execute(Op::Mark, &mark, &[]).is_ok());
        let written = WRITTEN.take().map(|(_, rests)| rests);
        assert_eq!(
            (written, test.session.shared.is_at_rest()),
            (Some(true), true)
        );
    }

    /// Other users have their turn.
    #[test]
    fn held_back_work_waits_and_the_end_of_the_work_before_is_seen() {
        let mut test = Fixture::new(&[("cuStreamWriteValue32_v2", writes as Function)]);
        let stream = creates(&mut test);
        let body = small_memset(test.memory(4096), stream);
        test.orders(CUDA_ERROR_NOT_READY);
        assert_eq!(test.status(Op::Memset, &body, &[]), CUDA_SUCCESS);
        test.shared.gpu.hold.set_for_good();
        let waits = |test: &mut Fixture| {
            let outcome = test.execute(Op::Memset, &body, &[]);
            matches!(outcome, Err(Undone::Later))
        };
        assert!(waits(&mut test) && !test.session.shared.is_at_rest());
        test.orders(CUDA_SUCCESS);
        assert!(waits(&mut test) && test.session.shared.is_at_rest());
        assert_eq!(test.shared.gpu.hold.take_wanted(), 1);
        assert_eq!(test.session.shared.devices.load(Ordering::Relaxed), 1);
        test.shared.gpu.hold.set(Duration::ZERO);
        assert_eq!(test.status(Op::Memset, &body, &[]), CUDA_SUCCESS);
    }

    /// Nothing rings when the order to hold work back ends.
    #[test]
    fn deferred_work_that_is_held_back_is_looked_at_again() {
        let mut test = Fixture::new(&[]);
        let stream = creates(&mut test);
        let body = small_memset(test.memory(4096), stream);
        let bytes = body.as_bytes().to_vec();
        test.session.defer_again(Op::Memset, 0, bytes);
        test.shared.gpu.hold.set_for_good();
        for _ in 0..2 {
            assert_eq!(test.session.replay(&test.shared), Ok(false));
            assert!(test.session.inbox.held.pause().is_some());
        }
        test.shared.gpu.hold.set(Duration::ZERO);
        assert_eq!(test.session.replay(&test.shared), Ok(true));
        assert_eq!(test.session.inbox.held.pause(), None);
        assert!(!test.session.inbox.held.any());
    }

    #[test]
    fn work_is_in_flight_after_its_mark_was_refused() {
        let refuses = fails::<{ CUDA_ERROR_NOT_SUPPORTED.0 }>;
        let mut test = Fixture::new(&[("cuStreamWriteValue32_v2", refuses as Function)]);
        let mark = mark(&mut test);
        work(&mut test, mark.stream);
        assert!(test.execute(Op::Mark, &mark, &[]).is_ok());
        assert_eq!(
            test.session.shared.flag(3),
            7,
            "the client does not wait for it"
        );
        assert!(!test.session.shared.is_at_rest());
    }

    #[test]
    fn a_mark_that_fails_is_written_by_the_server_behind_its_error() {
        let refuses = fails::<{ CUDA_ERROR_NOT_SUPPORTED.0 }>;
        let mut test = Fixture::new(&[("cuStreamWriteValue32_v2", refuses as Function)]);
        let mark = mark(&mut test);
        assert!(test.execute(Op::Mark, &mark, &[]).is_ok());
        assert_eq!(test.session.shared.flag(3), 7);
        assert_eq!(test.posted_error(), CUDA_ERROR_NOT_SUPPORTED);
        assert!(!test.has_ended());
    }

    /// A client that finds the error of a lost context must not have another call succeed.
    #[test]
    fn the_session_has_ended_before_a_mark_tells_that_the_context_is_lost() {
        let faults = fails::<{ CUDA_ERROR_ILLEGAL_ADDRESS.0 }>;
        let mut test = Fixture::new(&[("cuStreamWriteValue32_v2", faults as Function)]);
        let mark = mark(&mut test);
        let gpu = test.shared.gpu.clone();
        let failed = CUDA_ERROR_ILLEGAL_ADDRESS.into();
        let error = mark_failed(&mut test.session, &gpu, &mark, failed);
        assert!(matches!(
            error,
            Err(CallError::Status(CUDA_ERROR_ILLEGAL_ADDRESS))
        ));
        assert!(test.has_ended(), "nothing else has told the client yet");
        assert_eq!(test.posted_error(), CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(test.session.shared.flag(3), 7);
    }

    #[test]
    fn a_session_that_goes_on_in_the_next_server_has_its_mark_executed_there() {
        let faults = fails::<{ CUDA_ERROR_ILLEGAL_ADDRESS.0 }>;
        let mut test = Fixture::new(&[("cuStreamWriteValue32_v2", faults as Function)]);
        let mark = mark(&mut test);
        // As with a keeper.
        test.session
            .shared
            .description
            .set_bonds(Bonds::default(), 0);
        let outcome = test.execute(Op::Mark, &mark, &[]);
        assert!(
            matches!(outcome, Err(Undone::Later)),
            "it stays in the ring"
        );
        assert!(!test.has_ended());
        assert_eq!(test.posted_error(), CUDA_SUCCESS);
        assert_eq!(test.session.shared.flag(3), 0);
    }
}
