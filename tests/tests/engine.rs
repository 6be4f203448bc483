//! What the fuzzer of the engine has found (docs/fuzzing.md), each by itself: an engine in this process, on softgpu.

use mpsshim_proto::cuda::*;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::graph::{GraphCreate, GraphInstantiate};
use mpsshim_proto::message::memory::FileRegister;
use mpsshim_proto::message::stream::MemOp;
use mpsshim_proto::message::{Op, Range, Side, Value};
use mpsshim_server::engine::MarkKind;
use mpsshim_tests::artifacts::driver;
use mpsshim_tests::in_process::{Counts, InProcess};
use mpsshim_tests::peer::{Peer, copy, memory_file, memset};
use std::os::fd::AsFd;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// The process's engine, and what it had given out before the test.
fn engine() -> (MutexGuard<'static, InProcess>, Counts) {
    static ENGINE: LazyLock<Mutex<InProcess>> = LazyLock::new(|| {
        let engine = InProcess::start(&driver(), MarkKind::Auto).expect("an engine");
        Mutex::new(engine)
    });
    let engine = ENGINE.lock().unwrap_or_else(PoisonError::into_inner);
    let counts = engine.counts();
    (engine, counts)
}

/// Ends a session and waits until everything has come back.
fn end(engine: &InProcess, peer: Peer, before: &Counts) {
    drop(peer);
    let back = engine.await_counts(before, PATIENCE);
    assert_eq!(back, Ok(()), "kind, before, now");
}

#[test]
fn an_instance_for_a_stream_that_is_none_is_not_lost() {
    let (engine, before) = engine();
    let mut peer = engine.connect().expect("a session");
    peer.attach().expect("attach");
    let create = GraphCreate {
        flags: 0,
        device: 0,
    };
    let graph: Value = peer.ask(Op::GraphCreate, &create, &[]).expect("a graph");
    for with_params in [0, 1] {
        let body = GraphInstantiate {
            graph: graph.value,
            flags: 0,
            stream: Handle::new(Kind::Stream, 9, 999).0,
            with_params,
            slots: 0,
        };
        let refused = peer.ask_as(0, Op::GraphInstantiate, &body, &[]);
        assert_eq!(refused, Err(CUDA_ERROR_INVALID_HANDLE));
    }
    end(&engine, peer, &before);
}

#[test]
fn a_file_registered_for_reading_is_not_written() {
    let (engine, before) = engine();
    let mut peer = engine.connect().expect("a session");
    peer.attach().expect("attach");
    let stream = peer.stream().expect("a stream");
    let memory = peer.memory(4096).expect("memory").start;
    let file = memory_file(&[7; 4096]).expect("a file");
    let register = FileRegister {
        offset: 0,
        len: 4096,
        address: 0,
        flags: CU_MEMHOSTREGISTER_READ_ONLY,
        device: 0,
    };
    peer.send_descriptor(1, file.as_fd()).expect("sent");
    let made = peer.ask_as(1, Op::FileRegister, &register, &[]);
    let made = made.expect("registered");
    let start = <Range as zerocopy::FromBytes>::read_from_bytes(&made[..])
        .expect("a range")
        .start;
    peer.post(
        Op::Copy,
        &copy(Side::Device, memory, Side::Host, start, 64, stream),
        &[],
    )
    .expect("posted");
    assert_eq!(peer.finish(stream), Ok(()), "it can be read");
    for side in [Side::Host, Side::Device] {
        let body = copy(side, start, Side::Device, memory, 64, stream);
        peer.post(Op::Copy, &body, &[]).expect("posted");
        assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE));
    }
    peer.post(Op::Memset, &memset(start, 0, 16, stream), &[])
        .expect("posted");
    assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE));
    peer.write(stream, start, b"text").expect("posted");
    assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE));
    let write = MemOp {
        stream,
        address: start,
        value: 1,
        operation: CU_STREAM_MEM_OP_WRITE_VALUE_32,
        flags: 0,
    };
    peer.post(Op::MemOp, &write, &[]).expect("posted");
    assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_VALUE));
    end(&engine, peer, &before);
}

#[test]
fn of_many_streams_some_are_kept() {
    let (engine, before) = engine();
    let mut peer = engine.connect().expect("a session");
    peer.attach().expect("attach");
    for _ in 0..1000 {
        peer.stream().expect("a stream");
    }
    let last = peer.stream().expect("a stream");
    peer.finish(last).expect("made");
    end(&engine, peer, &before);
    let kept = engine.kept().streams;
    assert!(kept < 400, "{kept} streams are kept");
}
