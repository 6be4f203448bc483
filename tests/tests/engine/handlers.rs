//! What comes of operations that are accepted, field by field: an engine in this process, on two devices of softgpu. What is
//! refused is in the tables of `refusals/`.

use crate::{PATIENCE, end, engine, session};
use mpsshim_api::cuda::*;
use mpsshim_model::limits::Usage;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::message::graph::{
    CaptureBegin, GraphInstantiate, GraphInstantiated, GraphLaunch,
};
use mpsshim_proto::message::stream::{HostFunction, MemOp};
use mpsshim_proto::message::{
    Attach, EventCreate, EventOnStream, HostAlloc, MANAGED, MarkEvent, MemGrant, Memset, Object,
    Op, PointerQuery, Range, Side, StreamCreate, Value,
};
use mpsshim_proto::segment::{ARRIVED, RETURNED};
use mpsshim_tests::in_process::InProcess;
use mpsshim_tests::peer::{Peer, copy, fill_params, launch, memset, new_ptx, spinning_ptx};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a test looks at what must not happen. A busy machine makes it see less; it never fails for that.
const GLANCE: Duration = Duration::from_millis(100);

fn event(peer: &mut Peer) -> u64 {
    let event = peer.handle(Kind::Event);
    let create = EventCreate {
        event,
        ..EventCreate::default()
    };
    peer.post(Op::EventCreate, &create, &[]).expect("posted");
    event
}

/// Records an event in a stream, or has the stream wait for it.
fn on_stream(peer: &mut Peer, op: Op, event: u64, stream: u64) {
    let body = EventOnStream {
        event,
        stream,
        ..EventOnStream::default()
    };
    peer.post(op, &body, &[]).expect("posted");
}

/// A kernel that occupies a stream until it is told to end.
struct Spin {
    words: u64,
    function: u64,
    /// A stream of its own for what the test looks at meanwhile.
    beside: u64,
}

impl Spin {
    fn new(peer: &mut Peer) -> Spin {
        let module = peer.module(spinning_ptx().as_bytes()).expect("a module");
        let function = peer.function(module, "spin").expect("a function");
        let words = peer.memory(4096).expect("memory").start;
        let beside = peer.stream().expect("a stream");
        Spin {
            words,
            function,
            beside,
        }
    }

    /// Has it run in a stream, and waits until it does.
    fn begin(&self, peer: &mut Peer, stream: u64) {
        let clear = memset(self.words, 0, 2, self.beside);
        peer.post(Op::Memset, &clear, &[]).expect("posted");
        peer.finish(self.beside).expect("cleared");
        let params = [&self.words.to_le_bytes()[..], &1u32.to_le_bytes()].concat();
        let body = launch(self.function, stream, 1, params.len());
        peer.post(Op::Launch, &body, &params).expect("posted");
        while peer.read(self.beside, self.words + 4, 4) != Ok(vec![1, 0, 0, 0]) {}
    }

    fn end(&self, peer: &mut Peer) {
        let word = 1u32.to_le_bytes();
        peer.write(self.beside, self.words, &word).expect("posted");
    }

    /// The 32-bit word that streams of the test write.
    fn word(&self) -> u64 {
        self.words + 64
    }

    /// What is there.
    fn read(&self, peer: &mut Peer) -> u32 {
        let bytes = peer.read(self.beside, self.word(), 4).expect("read");
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    /// Writes a number there, in a stream.
    fn write(&self, peer: &mut Peer, stream: u64, value: u32) {
        let body = memset(self.word(), value, 1, stream);
        peer.post(Op::Memset, &body, &[]).expect("posted");
    }

    /// That `last` waits for what `first` does, a stream that is given the kernel.
    fn is_waited_for(&self, peer: &mut Peer, first: u64, last: impl FnOnce(&mut Peer) -> u64) {
        self.write(peer, self.beside, 0);
        self.begin(peer, first);
        let last = last(peer);
        self.write(peer, last, 7);
        let began = Instant::now();
        while began.elapsed() < GLANCE {
            assert_eq!(self.read(peer), 0, "it did not wait");
        }
        self.end(peer);
        for stream in [first, last] {
            assert_eq!(peer.finish(stream), Ok(()));
        }
        assert_eq!(self.read(peer), 7);
    }
}

#[test]
fn a_memset_fills_its_rows_with_elements_of_its_width() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let (memory, stream) = (peer.memory(4096).expect("memory").start, peer.stream());
    let stream = stream.expect("a stream");
    const VALUE: u32 = 0x0403_0201;
    const PITCH: usize = 32;
    for element in [1, 2, 4] {
        for height in [1, 3] {
            let clear = memset(memory, 0, 32, stream);
            peer.post(Op::Memset, &clear, &[]).expect("posted");
            let body = Memset {
                to: memory,
                stream,
                width: 3,
                height,
                pitch: PITCH as u64,
                value: VALUE,
                element,
            };
            peer.post(Op::Memset, &body, &[]).expect("posted");
            let found = peer.read(stream, memory, 4 * PITCH).expect("read");
            let mut expected = vec![0; 4 * PITCH];
            let row = VALUE.to_le_bytes()[..element as usize].repeat(3);
            for at in (0..height as usize).map(|row| row * PITCH) {
                expected[at..at + row.len()].copy_from_slice(&row);
            }
            assert_eq!(found, expected, "{height} rows, {element}-byte elements");
        }
    }
    end(&engine, peer, &before);
}

/// Memory of a device.
fn memory_on(peer: &mut Peer, device: u32) -> u64 {
    let attach = Attach { device, flags: 0 };
    peer.ask_as(0, Op::Attach, &attach, &[]).expect("attach");
    let body = MemGrant {
        len: 4096,
        device,
        flags: 0,
    };
    let range: Range = peer.ask(Op::MemGrant, &body, &[]).expect("memory");
    range.start
}

#[test]
fn a_stream_copies_between_host_memory_and_any_device() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let stream = peer.stream().expect("a stream");
    let (host, _) = peer.pinned(4096).expect("pinned memory");
    let (host, back) = (host.start, host.start + 64);
    for device in [0, 1] {
        let memory = memory_on(&mut peer, device);
        let text = format!("device {device}");
        let len = text.len() as u64;
        peer.write(stream, memory, text.as_bytes()).expect("posted");
        for body in [
            copy(Side::Host, host, Side::Device, memory, len, stream),
            copy(Side::Device, memory + 64, Side::Host, host, len, stream),
            copy(Side::Host, back, Side::Device, memory + 64, len, stream),
            copy(Side::Device, memory + 128, Side::Host, back, len, stream),
        ] {
            peer.post(Op::Copy, &body, &[]).expect("posted");
        }
        let found = peer.read(stream, memory + 128, text.len());
        assert_eq!(found, Ok(text.into_bytes()));
    }
    // Between two devices, and on either.
    let (one, other) = (memory_on(&mut peer, 0), memory_on(&mut peer, 1));
    peer.write(stream, one, b"from one device to the other")
        .expect("posted");
    for (to, from) in [(other, one), (other + 64, other), (one + 64, other + 64)] {
        let body = copy(Side::Device, to, Side::Device, from, 28, stream);
        peer.post(Op::Copy, &body, &[]).expect("posted");
    }
    let found = peer.read(stream, one + 64, 28);
    assert_eq!(found, Ok(b"from one device to the other".to_vec()));
    end(&engine, peer, &before);
}

#[test]
fn a_copy_of_the_streams_own_device_needs_no_other_stream() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let streams = || engine.counts()["streams"];
    let (stream, memory) = (peer.stream().expect("a stream"), memory_on(&mut peer, 0));
    let elsewhere = memory_on(&mut peer, 1);
    peer.finish(stream).expect("made");
    let plain = streams();
    peer.write(stream, memory, b"text").expect("posted");
    peer.read(stream, memory, 4).expect("read");
    assert_eq!(streams(), plain);
    peer.write(stream, elsewhere, b"text").expect("posted");
    peer.read(stream, elsewhere, 4).expect("read");
    assert_eq!(streams(), plain + 1);
    end(&engine, peer, &before);
}

#[test]
fn copies_and_launches_are_counted() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let (stream, memory) = (peer.stream().expect("a stream"), memory_on(&mut peer, 0));
    let spin = Spin::new(&mut peer);
    let counted = |copies, launches| {
        let began = Instant::now();
        loop {
            let usage = usage(&engine);
            let activity = usage.activity.expect("proxy mode");
            if (activity.copies, usage.launches) == (copies, launches) {
                return;
            }
            let late = began.elapsed() > PATIENCE;
            assert!(!late, "{usage:?}, not {copies} copies, {launches} launches");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    counted(0, 0);
    peer.write(stream, memory, b"text").expect("posted");
    counted(1, 0);
    peer.read(stream, memory, 4).expect("read");
    counted(2, 0);
    let clear = memset(spin.words, !0, 1, stream);
    peer.post(Op::Memset, &clear, &[]).expect("posted");
    counted(3, 0);
    let params = [&spin.words.to_le_bytes()[..], &1u32.to_le_bytes()].concat();
    let body = launch(spin.function, stream, 1, params.len());
    peer.post(Op::Launch, &body, &params).expect("posted");
    counted(3, 1);
    peer.finish(stream).expect("done");
    end(&engine, peer, &before);
}

/// A default stream, or one that blocks it.
fn stream_with(peer: &mut Peer, stream: u64, legacy: u64) {
    let body = StreamCreate {
        stream,
        legacy,
        ..StreamCreate::default()
    };
    peer.post(Op::StreamCreate, &body, &[]).expect("posted");
}

#[test]
fn the_legacy_stream_and_those_that_block_it_wait_for_each_other() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let spin = Spin::new(&mut peer);
    let [legacy, one, other] = [0; 3].map(|_| peer.handle(Kind::Stream));
    stream_with(&mut peer, legacy, legacy);
    stream_with(&mut peer, one, legacy);
    stream_with(&mut peer, other, legacy);
    spin.is_waited_for(&mut peer, one, |_| legacy);
    spin.is_waited_for(&mut peer, legacy, |_| one);
    spin.is_waited_for(&mut peer, other, |_| legacy);
    // One that is destroyed no longer counts, and neither does what takes its place.
    peer.post(Op::StreamDestroy, &Object { object: one }, &[])
        .expect("posted");
    spin.is_waited_for(&mut peer, other, |_| legacy);
    let was = Handle(one);
    let plain = Handle::new(Kind::Stream, was.generation() + 1, was.index()).0;
    stream_with(&mut peer, plain, 0);
    spin.begin(&mut peer, plain);
    spin.write(&mut peer, legacy, 9);
    while spin.read(&mut peer) != 9 {}
    assert_eq!(peer.finish(legacy), Ok(()));
    spin.end(&mut peer);
    assert_eq!(peer.finish(plain), Ok(()));
    end(&engine, peer, &before);
}

#[test]
fn an_event_is_complete_when_what_was_before_it_is() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let spin = Spin::new(&mut peer);
    let (first, last) = (peer.stream().unwrap(), peer.stream().unwrap());
    let event = event(&mut peer);
    spin.is_waited_for(&mut peer, first, |peer| {
        on_stream(peer, Op::EventRecord, event, first);
        on_stream(peer, Op::StreamWaitEvent, event, last);
        last
    });
    spin.begin(&mut peer, first);
    on_stream(&mut peer, Op::EventRecord, event, first);
    let query = |peer: &mut Peer| {
        let object = Object { object: event };
        peer.ask_as(0, Op::EventQuery, &object, &[]).map(drop)
    };
    assert_eq!(query(&mut peer), Err(CUDA_ERROR_NOT_READY));
    // A flag that is written when the event is complete, by a stream that has nothing to do.
    const FLAG: u32 = 5;
    let body = MarkEvent {
        event,
        stream: last,
        slot: FLAG,
        value: 3,
    };
    peer.post(Op::MarkEvent, &body, &[]).expect("posted");
    let began = Instant::now();
    while began.elapsed() < GLANCE {
        assert_eq!(peer.flag(FLAG).load(Ordering::Acquire), 0);
    }
    spin.end(&mut peer);
    let written = peer.wait(|peer| (peer.flag(FLAG).load(Ordering::Acquire) == 3).then_some(()));
    assert_eq!(written, Ok(()));
    assert_eq!(query(&mut peer), Ok(()));
    end(&engine, peer, &before);
}

/// Waits until softgpu has so many streams of sessions. `peer` tries to make a stream anew, for which the server looks
/// through those that were destroyed.
fn await_streams(engine: &InProcess, peer: &mut Peer, taken: u64, expected: u64) {
    let began = Instant::now();
    loop {
        stream_with(peer, taken, 0);
        peer.ask_as(0, Op::Settle, &Object { object: taken }, &[])
            .expect("settled");
        assert_eq!(peer.posted_error(), Err(CUDA_ERROR_INVALID_HANDLE));
        let streams = engine.counts()["streams"];
        if streams == expected {
            return;
        }
        let late = began.elapsed() > PATIENCE;
        assert!(!late, "{streams} streams, not {expected}");
    }
}

#[test]
fn a_stream_that_is_destroyed_comes_back_when_it_is_idle() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let spin = Spin::new(&mut peer);
    peer.finish(spin.beside).expect("made");
    let kept = engine.counts()["streams"];
    let [busy, idle, captures] = [0; 3].map(|_| peer.stream().expect("a stream"));
    spin.begin(&mut peer, busy);
    spin.write(&mut peer, idle, 1);
    capture(&mut peer, captures);
    for object in [busy, idle, captures] {
        peer.post(Op::StreamDestroy, &Object { object }, &[])
            .expect("posted");
    }
    await_streams(&engine, &mut peer, spin.beside, kept + 1);
    let began = Instant::now();
    while began.elapsed() < GLANCE {
        await_streams(&engine, &mut peer, spin.beside, kept + 1);
    }
    spin.end(&mut peer);
    await_streams(&engine, &mut peer, spin.beside, kept);
    end(&engine, peer, &before);
}

/// A write or a wait, in a stream.
fn operation(peer: &mut Peer, stream: u64, operation: u32, address: u64, value: u64) {
    let body = MemOp {
        stream,
        address,
        value,
        operation,
        flags: match operation {
            CU_STREAM_MEM_OP_WAIT_VALUE_32 | CU_STREAM_MEM_OP_WAIT_VALUE_64 => {
                CU_STREAM_WAIT_VALUE_EQ
            }
            _ => 0,
        },
    };
    peer.post(Op::MemOp, &body, &[]).expect("posted");
}

/// Launches what a stream has captured, once, in the same stream.
fn launch_captured(peer: &mut Peer, stream: u64) -> GraphInstantiated {
    let object = Object { object: stream };
    let graph: Value = peer.ask(Op::CaptureEnd, &object, &[]).expect("a graph");
    launch_graph(peer, stream, graph.value)
}

fn launch_graph(peer: &mut Peer, stream: u64, graph: u64) -> GraphInstantiated {
    let body = GraphInstantiate {
        graph,
        ..GraphInstantiate::default()
    };
    let made: GraphInstantiated = peer
        .ask(Op::GraphInstantiate, &body, &[])
        .expect("an instance");
    let exec = made.exec;
    peer.post(Op::GraphLaunch, &GraphLaunch { exec, stream }, &[])
        .expect("posted");
    made
}

fn capture(peer: &mut Peer, stream: u64) {
    let begin = CaptureBegin {
        stream,
        ..CaptureBegin::default()
    };
    peer.ask_as(0, Op::CaptureBegin, &begin, &[])
        .expect("a capture");
}

#[test]
fn words_of_either_width_are_written_at_once_and_by_graphs() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let (stream, memory) = (peer.stream().expect("a stream"), memory_on(&mut peer, 0));
    const VALUE: u64 = 0x0807_0605_0403_0201;
    for captured in [false, true] {
        let clear = memset(memory, !0, 16, stream);
        peer.post(Op::Memset, &clear, &[]).expect("posted");
        if captured {
            capture(&mut peer, stream);
        }
        let (narrow, wide) = (
            CU_STREAM_MEM_OP_WRITE_VALUE_32,
            CU_STREAM_MEM_OP_WRITE_VALUE_64,
        );
        operation(&mut peer, stream, narrow, memory + 4, VALUE);
        operation(&mut peer, stream, wide, memory + 16, VALUE);
        if captured {
            let unchanged = peer
                .stream()
                .and_then(|beside| peer.read(beside, memory, 32));
            assert_eq!(unchanged, Ok(vec![0xff; 32]));
            launch_captured(&mut peer, stream);
        }
        let mut expected = vec![0xff; 32];
        expected[4..8].copy_from_slice(&VALUE.to_le_bytes()[..4]);
        expected[16..24].copy_from_slice(&VALUE.to_le_bytes());
        assert_eq!(peer.read(stream, memory, 32), Ok(expected), "{captured}");
    }
    end(&engine, peer, &before);
}

#[test]
fn a_stream_waits_for_words_of_either_width() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let spin = Spin::new(&mut peer);
    let waits = peer.stream().expect("a stream");
    let (host, _) = peer.pinned(4096).expect("pinned memory");
    let memory = memory_on(&mut peer, 0);
    for address in [memory, host.start] {
        for (width, wait) in [
            (4, CU_STREAM_MEM_OP_WAIT_VALUE_32),
            (8, CU_STREAM_MEM_OP_WAIT_VALUE_64),
        ] {
            let value = (5u64 << 32 | 5).to_le_bytes();
            // Its other half is right already.
            let mut word = value;
            word[width - 4..width].fill(0);
            peer.write(spin.beside, address, &word).expect("posted");
            spin.write(&mut peer, spin.beside, 0);
            peer.finish(spin.beside).expect("written");
            let awaited = u64::from_le_bytes(value);
            operation(&mut peer, waits, wait, address, awaited);
            spin.write(&mut peer, waits, 7);
            let began = Instant::now();
            while began.elapsed() < GLANCE {
                assert_eq!(spin.read(&mut peer), 0, "it did not wait");
            }
            peer.write(spin.beside, address, &value).expect("posted");
            assert_eq!(peer.finish(waits), Ok(()));
            assert_eq!(spin.read(&mut peer), 7);
        }
    }
    end(&engine, peer, &before);
}

#[test]
fn a_host_function_is_awaited_in_the_flags_of_its_slot() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let spin = Spin::new(&mut peer);
    let stream = peer.stream().expect("a stream");
    const SLOT: u32 = 3;
    let body = HostFunction {
        stream,
        slot: SLOT,
        value: 1,
    };
    spin.write(&mut peer, spin.beside, 0);
    peer.finish(spin.beside).expect("cleared");
    peer.post(Op::HostFunction, &body, &[]).expect("posted");
    spin.write(&mut peer, stream, 7);
    let arrived = |peer: &Peer| peer.flag(SLOT + ARRIVED).load(Ordering::Acquire) == 1;
    assert_eq!(peer.wait(|peer| arrived(peer).then_some(())), Ok(()));
    let began = Instant::now();
    while began.elapsed() < GLANCE {
        assert_eq!(spin.read(&mut peer), 0, "it did not wait");
    }
    peer.flag(SLOT + RETURNED).store(1, Ordering::Release);
    peer.ring();
    assert_eq!(peer.finish(stream), Ok(()));
    assert_eq!(spin.read(&mut peer), 7);
    end(&engine, peer, &before);
}

#[test]
fn who_waits_for_a_flag_of_no_stream_is_told() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let unknown = peer.handle(Kind::Stream);
    let refused = Err(CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(peer.finish(unknown), refused);
    const SLOT: u32 = 3;
    let body = HostFunction {
        stream: unknown,
        slot: SLOT,
        value: 1,
    };
    peer.post(Op::HostFunction, &body, &[]).expect("posted");
    let arrived = |peer: &Peer| peer.flag(SLOT + ARRIVED).load(Ordering::Acquire) == 1;
    assert_eq!(peer.wait(|peer| arrived(peer).then_some(())), Ok(()));
    assert_eq!(peer.posted_error(), refused);
    end(&engine, peer, &before);
}

#[test]
fn a_graph_keeps_the_image_of_a_kernel_that_it_captured() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let (stream, memory) = (peer.stream().expect("a stream"), memory_on(&mut peer, 0));
    let module = peer.module(new_ptx().as_bytes()).expect("a module");
    let function = peer.function(module, "fill").expect("a function");
    capture(&mut peer, stream);
    let params = fill_params(memory, 3, 1);
    let body = launch(function, stream, 1, params.len());
    peer.post(Op::Launch, &body, &params).expect("posted");
    let object = Object { object: stream };
    let graph: Value = peer.ask(Op::CaptureEnd, &object, &[]).expect("a graph");
    peer.post(Op::ImageUnload, &Object { object: module }, &[])
        .expect("posted");
    peer.finish(stream).expect("unloaded");
    // The engine unloads what nobody has.
    engine.counts();
    launch_graph(&mut peer, stream, graph.value);
    assert_eq!(peer.read(stream, memory + 8, 4), Ok(vec![6, 0, 0, 0]));
    end(&engine, peer, &before);
}

/// What the operator reads of the one client.
fn usage(engine: &InProcess) -> Usage {
    engine.usage().pop().expect("a client")
}

/// Waits until a client is bound to its server by this, or no longer is.
fn await_bond(engine: &InProcess, bond: &str, expected: bool) {
    let began = Instant::now();
    loop {
        let bonds = usage(engine).bonds.expect("proxy mode");
        if bonds.names().any(|name| name == bond) == expected {
            return;
        }
        let late = began.elapsed() > PATIENCE;
        assert!(!late, "bound by {bond}: not {expected}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_time_of_an_event_binds_a_client_while_the_event_is_there() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let spin = Spin::new(&mut peer);
    let (busy, stream) = (peer.stream().unwrap(), peer.stream().unwrap());
    // A session with work in flight is not at rest, so that no time is saved meanwhile.
    spin.begin(&mut peer, busy);
    let events = [0; 2].map(|_| event(&mut peer));
    for event in events {
        on_stream(&mut peer, Op::EventRecord, event, stream);
        await_bond(&engine, "recorded times", true);
    }
    for (left, object) in [(true, events[0]), (false, events[1])] {
        peer.post(Op::EventDestroy, &Object { object }, &[])
            .expect("posted");
        peer.finish(stream).expect("destroyed");
        await_bond(&engine, "recorded times", left);
    }
    spin.end(&mut peer);
    peer.finish(busy).expect("ended");
    end(&engine, peer, &before);
}

#[test]
fn an_event_that_no_capture_recorded_is_waited_for_by_any_stream() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let (stream, captures) = (peer.stream().unwrap(), peer.stream().unwrap());
    let legacy = peer.handle(Kind::Stream);
    stream_with(&mut peer, legacy, legacy);
    let (plain, external) = (event(&mut peer), event(&mut peer));
    on_stream(&mut peer, Op::EventRecord, plain, stream);
    on_stream(&mut peer, Op::StreamWaitEvent, plain, legacy);
    assert_eq!(peer.finish(legacy), Ok(()));
    // Both are nodes of the graph, and nothing joins it for them.
    capture(&mut peer, captures);
    for (op, flags) in [
        (Op::EventRecord, CU_EVENT_RECORD_EXTERNAL),
        (Op::StreamWaitEvent, CU_EVENT_WAIT_EXTERNAL),
    ] {
        let body = EventOnStream {
            event: external,
            stream: captures,
            flags,
            pad: 0,
        };
        peer.post(op, &body, &[]).expect("posted");
    }
    const FLAG: u32 = 5;
    let body = MarkEvent {
        event: external,
        stream,
        slot: FLAG,
        value: 3,
    };
    peer.post(Op::MarkEvent, &body, &[]).expect("posted");
    let written = peer.wait(|peer| (peer.flag(FLAG).load(Ordering::Acquire) == 3).then_some(()));
    assert_eq!(written.and_then(|()| peer.posted_error()), Ok(()));
    launch_captured(&mut peer, captures);
    assert_eq!(peer.finish(captures), Ok(()));
    end(&engine, peer, &before);
}

#[test]
fn kernels_that_print_are_launched_and_their_graphs_print() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let (stream, memory) = (peer.stream().expect("a stream"), memory_on(&mut peer, 0));
    let texts = [format!("{}// vprintf\n", new_ptx()), new_ptx()];
    let modules = texts.map(|text| peer.module(text.as_bytes()).expect("a module"));
    let [prints, plain] = modules.map(|module| peer.function(module, "fill").expect("it"));
    let params = fill_params(memory, 3, 1);
    let launched = |peer: &mut Peer, function| {
        let body = launch(function, stream, 1, params.len());
        peer.post(Op::Launch, &body, &params).expect("posted");
    };
    launched(&mut peer, prints);
    assert_eq!(peer.read(stream, memory + 8, 4), Ok(vec![6, 0, 0, 0]));
    capture(&mut peer, stream);
    for function in [prints, prints, plain] {
        launched(&mut peer, function);
    }
    assert_eq!(launch_captured(&mut peer, stream).prints, 1);
    assert_eq!(peer.finish(stream), Ok(()));
    end(&engine, peer, &before);
}

fn mem_info(peer: &mut Peer) -> (u64, u64) {
    let info = peer.mem_info().expect("bytes");
    (info.free, info.total)
}

/// Waits until so much is free, of so much in all.
fn await_left(peer: &mut Peer, expected: (u64, u64)) {
    let began = Instant::now();
    while mem_info(peer) != expected {
        let late = began.elapsed() > PATIENCE;
        assert!(!late, "{:?}, not {expected:?}", mem_info(peer));
    }
}

/// Pinned memory, or managed memory.
fn host_memory(peer: &mut Peer, len: u64, flags: u32) -> Range {
    let body = HostAlloc {
        len,
        flags,
        device: 0,
    };
    peer.ask(Op::HostAlloc, &body, &[]).expect("host memory")
}

#[test]
fn what_is_left_of_a_clients_limit_is_what_it_does_not_have() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    const LIMIT: u64 = 32 << 20;
    const PART: u64 = 8 << 20;
    assert!(mem_info(&mut peer).1 > LIMIT);
    let limit = LimitMemory {
        bytes: LIMIT,
        ..LimitMemory::default()
    };
    peer.post(Op::LimitMemory, &limit, &[]).expect("posted");
    assert_eq!(mem_info(&mut peer), (LIMIT, LIMIT));
    let memory = peer.memory(PART).expect("memory");
    assert_eq!(mem_info(&mut peer), (LIMIT - PART, LIMIT));
    host_memory(&mut peer, PART, 0);
    assert_eq!(mem_info(&mut peer), (LIMIT - PART, LIMIT));
    let managed = host_memory(&mut peer, PART, MANAGED);
    assert_eq!(mem_info(&mut peer), (LIMIT - PART, LIMIT));
    peer.post(Op::HostFree, &managed, &[]).expect("posted");
    peer.post(Op::MemRelease, &memory, &[]).expect("posted");
    await_left(&mut peer, (LIMIT, LIMIT));
    // All of it, and no more.
    assert!(peer.memory(LIMIT).is_ok());
    assert_eq!(peer.memory(4096).map(drop), Err(CUDA_ERROR_OUT_OF_MEMORY));
    end(&engine, peer, &before);
}

#[test]
fn pinned_memory_is_given_again_for_the_same_length() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    assert_eq!(host_memory(&mut peer, 0, 0).len, 4096);
    let first = host_memory(&mut peer, 8192, 0);
    peer.post(Op::HostFree, &first, &[]).expect("posted");
    let other = host_memory(&mut peer, 12288, 0);
    assert_ne!(other.start, first.start);
    assert_eq!(host_memory(&mut peer, 8191, 0), first);
    end(&engine, peer, &before);
}

#[test]
fn a_pointers_attributes_are_the_drivers() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    for device in [0, 1] {
        let memory = memory_on(&mut peer, device);
        let mut attribute = |attribute| -> u64 {
            let body = PointerQuery {
                pointer: memory + 64,
                attribute,
                pad: 0,
            };
            let value: Value = peer.ask(Op::PointerAttribute, &body, &[]).expect("it");
            value.value
        };
        let found = [
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        ]
        .map(&mut attribute);
        let expected = [CU_MEMORYTYPE_DEVICE.into(), device.into(), memory];
        assert_eq!(found, expected);
        assert!(attribute(CU_POINTER_ATTRIBUTE_RANGE_SIZE) >= 4096);
    }
    end(&engine, peer, &before);
}

#[test]
fn memory_given_back_beside_a_kernel_goes_when_the_kernel_has_ended() {
    let (engine, before) = engine();
    let mut peer = session(&engine);
    let spin = Spin::new(&mut peer);
    let stream = peer.stream().expect("a stream");
    const PART: u64 = 8 << 20;
    let memory = peer.memory(PART).expect("memory");
    let bytes = engine.counts()["bytes-of-device-0"];
    spin.begin(&mut peer, stream);
    peer.post(Op::MemRelease, &memory, &[]).expect("posted");
    let began = Instant::now();
    while began.elapsed() < GLANCE {
        spin.read(&mut peer);
        assert_eq!(engine.counts()["bytes-of-device-0"], bytes);
    }
    spin.end(&mut peer);
    peer.finish(stream).expect("ended");
    let began = Instant::now();
    while engine.counts()["bytes-of-device-0"] > bytes - PART {
        peer.finish(stream).expect("asked");
        assert!(began.elapsed() < PATIENCE, "it does not come back");
    }
    end(&engine, peer, &before);
}
