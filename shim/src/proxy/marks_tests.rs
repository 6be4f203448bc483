//! Tests of the number of messages that streams and events cost, and that no wait hangs.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mpsshim_api::cuda::{
    CU_STREAM_NON_BLOCKING, CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_HANDLE,
    CUDA_ERROR_MPS_RPC_FAILURE, CUDA_ERROR_NOT_READY,
};
use mpsshim_proto::message::{Attach, Memset, Op};
use mpsshim_proto::segment::{FLAGS, state};
use zerocopy::FromZeros;

use crate::proxy::context::Context;
use crate::proxy::event;
use crate::proxy::fake::Fake;
use crate::proxy::stream::{self, StreamRef};

fn work(fake: &Fake, stream: StreamRef) {
    stream::submit(fake.session, stream, Op::Memset, &Memset::new_zeroed(), &[]).unwrap();
}

fn make(fake: &Fake, context: &'static Context, flags: u32) -> StreamRef {
    let made = stream::create(fake.session, context, flags, 0, false).unwrap();
    context.own_stream(made.handle());
    made
}

#[test]
fn one_mark_serves_every_wait_for_the_same_work() {
    let (fake, context) = (Fake::new(), Context::for_test());
    let stream = make(&fake, context, CU_STREAM_NON_BLOCKING);
    fake.seen();
    stream::synchronize(fake.session, stream).unwrap();
    assert_eq!(fake.seen(), [], "nothing was sent");
    work(&fake, stream);
    work(&fake, stream);
    fake.during(|| stream::synchronize(fake.session, stream).unwrap());
    assert_eq!(fake.seen(), [Op::Memset, Op::Memset, Op::Mark]);
    stream::synchronize(fake.session, stream).unwrap();
    assert!(stream::query(fake.session, stream).unwrap());
    stream::quiesce(fake.session, Some(context)).unwrap();
    assert_eq!(fake.seen(), [], "everything is known to be complete");
}

#[test]
fn a_query_submits_one_mark_and_then_reads_the_flag() {
    let (fake, context) = (Fake::new(), Context::for_test());
    let stream = make(&fake, context, CU_STREAM_NON_BLOCKING);
    fake.seen();
    fake.hold();
    work(&fake, stream);
    for _ in 0..5 {
        assert!(!stream::query(fake.session, stream).unwrap());
    }
    assert_eq!(fake.seen(), [Op::Memset, Op::Mark]);
    fake.let_go();
    assert!(stream::query(fake.session, stream).unwrap());
    assert_eq!(fake.seen(), []);
}

#[test]
fn a_stream_that_is_never_waited_for_is_looked_at() {
    let (fake, context) = (Fake::new(), Context::for_test());
    let [waited, other] = [(); 2].map(|()| make(&fake, context, CU_STREAM_NON_BLOCKING));
    let look = || stream::look_at_busy(&mut fake.session.ring().unwrap());
    fake.seen();
    work(&fake, other);
    work(&fake, waited);
    fake.during(|| stream::synchronize(fake.session, waited).unwrap());
    fake.seen();
    assert!(stream::any_busy(fake.session));
    fake.hold();
    look();
    assert_eq!(fake.seen(), [Op::Mark]);
    look();
    assert!(stream::any_busy(fake.session));
    fake.let_go();
    look();
    assert!(!stream::any_busy(fake.session));
    assert_eq!(fake.seen(), [], "one mark");
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_only() {
    let (fake, context) = (Fake::new(), Context::for_test());
    let blocking = make(&fake, context, 0);
    let other = make(&fake, context, CU_STREAM_NON_BLOCKING);
    let legacy = stream::legacy(fake.session, context).unwrap();
    fake.seen();
    work(&fake, other);
    stream::synchronize(fake.session, legacy).unwrap();
    assert_eq!(fake.seen(), [Op::Memset]);
    work(&fake, blocking);
    fake.during(|| stream::synchronize(fake.session, legacy).unwrap());
    assert_eq!(fake.seen(), [Op::Memset, Op::Mark]);
}

#[test]
fn a_flag_is_used_again_only_after_its_last_write() {
    let (fake, context) = (Fake::new(), Context::for_test());
    let stream = make(&fake, context, CU_STREAM_NON_BLOCKING);
    let (slot, handle) = (stream.slot(), stream.handle());
    fake.seen();
    fake.hold();
    work(&fake, stream);
    stream::destroy(fake.session, handle).unwrap();
    assert_eq!(
        stream::destroy(fake.session, handle),
        Err(CUDA_ERROR_INVALID_HANDLE)
    );
    assert_eq!(fake.seen(), [Op::Memset, Op::Mark, Op::StreamDestroy]);
    let during = make(&fake, context, CU_STREAM_NON_BLOCKING);
    assert_ne!(during.slot(), slot);
    fake.serve();
    fake.let_go();
    let after = make(&fake, context, CU_STREAM_NON_BLOCKING);
    assert_eq!(after.slot(), slot);
    fake.seen();
    work(&fake, after);
    fake.during(|| stream::synchronize(fake.session, after).unwrap());
}

#[test]
fn there_are_as_many_streams_as_flags() {
    let (fake, context) = (Fake::new(), Context::for_test());
    for _ in 0..FLAGS {
        make(&fake, context, CU_STREAM_NON_BLOCKING);
        fake.serve();
    }
    assert!(stream::create(fake.session, context, CU_STREAM_NON_BLOCKING, 0, false).is_err());
}

#[test]
fn an_event_needs_no_message_where_its_stream_tells() {
    let (fake, context) = (Fake::new(), Context::for_test());
    let stream = make(&fake, context, CU_STREAM_NON_BLOCKING);
    let event = event::create(fake.session, context, 0).unwrap();
    fake.seen();
    event::synchronize(fake.session, event).unwrap();
    assert_eq!(fake.seen(), [], "never recorded");
    work(&fake, stream);
    event::record(fake.session, event, stream, 0).unwrap();
    fake.hold();
    assert_eq!(event::query(fake.session, event), Err(CUDA_ERROR_NOT_READY));
    assert_eq!(fake.seen(), [Op::Memset, Op::EventRecord, Op::Mark]);
    fake.let_go();
    event::query(fake.session, event).unwrap();
    event::synchronize(fake.session, event).unwrap();
    assert_eq!(fake.seen(), []);
    // With work behind the record only the event itself can tell.
    event::record(fake.session, event, stream, 0).unwrap();
    work(&fake, stream);
    fake.during(|| event::synchronize(fake.session, event).unwrap());
    assert_eq!(
        fake.seen(),
        [Op::EventRecord, Op::Memset, Op::StreamCreate, Op::MarkEvent]
    );
    event::wait_in(fake.session, stream, event, 0).unwrap();
    assert_eq!(fake.seen(), [], "a complete event is waited for by nobody");
}

#[test]
fn an_error_of_an_asynchronous_command_is_returned_once_by_a_wait() {
    let (fake, context) = (Fake::new(), Context::for_test());
    let stream = make(&fake, context, CU_STREAM_NON_BLOCKING);
    work(&fake, stream);
    let header = fake.session.header();
    header.posted_error.store(1, Ordering::Release);
    let first = fake.during(|| stream::synchronize(fake.session, stream));
    assert!(first.is_err());
    stream::synchronize(fake.session, stream).unwrap();
}

#[test]
fn a_sleeping_wait_ends_when_the_flag_comes() {
    let (fake, context) = (Fake::new(), Context::for_test());
    context.flags.store(4, Ordering::Relaxed);
    let stream = make(&fake, context, CU_STREAM_NON_BLOCKING);
    work(&fake, stream);
    fake.hold();
    std::thread::scope(|scope| {
        scope.spawn(|| stream::synchronize(fake.session, stream).unwrap());
        let sleeping = &fake.session.header().sleeping.0;
        while sleeping.load(Ordering::Acquire) == 0 {
            fake.serve();
            std::thread::yield_now();
        }
        // No watcher here: the sleeper finds the flag when it looks again.
        fake.serve();
        fake.let_go();
    });
    assert_eq!(fake.session.header().sleeping.0.load(Ordering::Relaxed), 0);
}

#[test]
fn nothing_hangs_when_the_server_goes() {
    for queries in [false, true] {
        let (fake, context) = (Fake::new(), Context::for_test());
        let stream = make(&fake, context, CU_STREAM_NON_BLOCKING);
        work(&fake, stream);
        fake.hang_up();
        let began = Instant::now();
        let status = if queries {
            fake.session
                .request(Op::Attach, &Attach::new_zeroed(), &[])
                .map(drop)
        } else {
            stream::synchronize(fake.session, stream)
        };
        assert_eq!(status, Err(CUDA_ERROR_MPS_RPC_FAILURE));
        assert!(began.elapsed() < Duration::from_secs(2));
        let began = Instant::now();
        assert_eq!(
            stream::synchronize(fake.session, stream),
            Err(CUDA_ERROR_MPS_RPC_FAILURE)
        );
        assert!(began.elapsed() < Duration::from_millis(20), "remembered");
    }
}

#[test]
fn an_ended_session_gives_the_servers_reason() {
    let (fake, context) = (Fake::new(), Context::for_test());
    let stream = make(&fake, context, CU_STREAM_NON_BLOCKING);
    work(&fake, stream);
    let header = fake.session.header();
    header
        .error
        .store(CUDA_ERROR_ILLEGAL_ADDRESS.0, Ordering::Relaxed);
    header.state.0.store(state::ENDED, Ordering::Release);
    for _ in 0..2 {
        assert_eq!(
            stream::synchronize(fake.session, stream),
            Err(CUDA_ERROR_ILLEGAL_ADDRESS)
        );
    }
}

#[test]
fn a_full_ring_waits_for_room() {
    let (fake, context) = (Fake::new(), Context::for_test());
    let stream = make(&fake, context, CU_STREAM_NON_BLOCKING);
    fake.during(|| {
        for _ in 0..100_000 {
            work(&fake, stream);
        }
        stream::synchronize(fake.session, stream).unwrap();
    });
    let seen = fake.seen();
    assert_eq!(seen.iter().filter(|op| **op == Op::Memset).count(), 100_000);
}
