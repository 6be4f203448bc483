//! Sessions that outlive their server: killed, or with its context lost.

use crate::restart::restart;
use mpsshim_api::cuda::{
    CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
    CU_STREAM_MEM_OP_WRITE_VALUE_32, CUDA_SUCCESS, CUresult,
};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::graph::{
    BatchNode, CaptureBegin, GraphCreate, GraphInstantiate, GraphInstantiated, GraphLaunch,
    GraphNode,
};
use mpsshim_proto::message::memory::Peers;
use mpsshim_proto::message::{
    Attach, EventCreate, EventOnStream, GetFunction, ImageLoad, Object, Op, StreamCreate,
};
use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Place, other_user, wait_until};
use mpsshim_tests::peer::{PTX, Peer, fill_params, launch, memory_file, memset};
use mpsshim_tests::programs::{client, succeed};
use mpsshim_tests::scene::{control, daemon, daemon_with, daemon_with_descriptors};
use mpsshim_tests::survivors::{
    ASSERT, ILLEGAL_ADDRESS, RPC_FAILURE, Survivor, clients, keepers, kill_server, portable,
    server, wait_until_portable,
};
use std::os::fd::AsFd;
use zerocopy::IntoBytes;

/// A daemon at which faulty programs share their server with the others again and again.
fn daemon_without_quarantine() -> Place {
    daemon_with(&[("MPSSHIM_QUARANTINE", "off")])
}

#[test]
fn clients_at_rest_go_on_when_their_server_is_killed() {
    let place = daemon();
    let mut survivors: Vec<Survivor> = (0..3).map(|_| Survivor::start(&place)).collect();
    for survivor in &mut survivors {
        survivor.round();
    }
    let before = clients(&place);
    for _ in 0..5 {
        let killed = kill_server(&place);
        // At once: the first finds no server, and waits.
        for survivor in &mut survivors {
            survivor.round();
        }
        wait_until("the server before has ended", || {
            server(&place).is_some_and(|pid| pid != killed)
        });
        assert_eq!(clients(&place), before, "the same clients and contexts");
    }
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    let log = place.log("server.log");
    let again = "Sessions of the server before: 3 go on, 0 have ended";
    assert_eq!(log.matches(again).count(), 5, "{log}");
    survivors.into_iter().for_each(Survivor::end);
    wait_until("the clients have gone", || clients(&place).is_empty());
}

#[test]
fn clients_of_another_device_than_the_first_go_on() {
    let devices = ("SOFTGPU_DEVICES", "2");
    let place = daemon_with(&[devices]);
    let env = [("CUDA_VISIBLE_DEVICES", "1"), devices];
    let mut survivor = Survivor::start_in(place.pipe(), &env);
    for round in 1..=3 {
        assert_eq!(survivor.ask("register"), format!("registered {round}"));
        assert_eq!(survivor.ask("pool"), format!("pooled {round}"));
        survivor.round();
        end_server(&place, 1, 0);
    }
    survivor.round();
    survivor.end();
}

#[test]
fn peer_access_and_a_graph_with_a_node_of_another_device_go_to_the_next_server() {
    let place = daemon_with(&[("SOFTGPU_DEVICES", "2")]);
    let mut peer = Peer::connect(&control(&place)).expect("a session");
    peer.attach().expect("attach");
    let there = Attach {
        device: 1,
        flags: 0,
    };
    peer.ask_as(0, Op::Attach, &there, &[]).expect("attach");
    let image = ImageLoad {
        device: 1,
        ..peer.image_load(PTX.as_bytes())
    };
    let file = memory_file(PTX.as_bytes()).expect("a file");
    let module = peer.load(&image, &[], file.as_fd()).expect("a module");
    let (stream, function) = (peer.handle(Kind::Stream), peer.handle(Kind::Function));
    let body = StreamCreate {
        stream,
        device: 1,
        ..StreamCreate::default()
    };
    peer.post(Op::StreamCreate, &body, &[]).expect("a stream");
    let body = GetFunction {
        parent: module,
        function,
        device: 1,
        pad: 0,
    };
    let get = peer.ask_as(0, Op::GetFunction, &body, b"fill\0");
    get.expect("a function");
    let memory = peer.memory(4096).expect("memory").start;
    let peers = Peers {
        owner: 0,
        user: 1,
        enable: 1,
        ..Peers::default()
    };
    peer.ask_as(0, Op::PeerAccess, &peers, &[]).expect("access");
    let params = fill_params(memory, 3, 1);
    let graph = new_graph(&mut peer);
    let begin = CaptureBegin {
        stream,
        graph,
        ..CaptureBegin::default()
    };
    peer.ask_as(0, Op::CaptureBegin, &begin, &[])
        .expect("a capture");
    let body = launch(function, stream, 1, params.len());
    peer.post(Op::Launch, &body, &params).expect("a node");
    let end = Object { object: stream };
    peer.ask_as(0, Op::CaptureEnd, &end, &[]).expect("an end");
    for _ in 0..2 {
        wait_until_portable(&place, 1);
        kill_server(&place);
        peer.finish(stream).expect("it goes on");
    }
    let exec = instantiate(&mut peer, graph);
    peer.post(Op::GraphLaunch, &GraphLaunch { exec, stream }, &[])
        .expect("a launch");
    peer.finish(stream).expect("done");
    let here = peer.stream().expect("a stream");
    let read = peer.read(here, memory, 128).expect("a copy");
    assert!(words(&read).eq((0..32).map(|at| 3 * at)));
}

#[test]
fn a_graph_with_memory_operations_goes_to_the_next_server() {
    let place = daemon();
    let mut peer = Peer::connect(&control(&place)).expect("a session");
    peer.attach().expect("attach");
    let (stream, memory) = (peer.stream().expect("a stream"), peer.memory(4096));
    let memory = memory.expect("memory").start;
    let graph = new_graph(&mut peer);
    let write = u64::from(CU_STREAM_MEM_OP_WRITE_VALUE_32);
    let operation: [u64; 6] = [write, memory, 77, 0, 0, 0];
    let batch = BatchNode { count: 1, flags: 0 };
    let body = GraphNode {
        object: graph,
        kind: CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
        ..GraphNode::default()
    };
    let behind = [batch.as_bytes(), operation.as_bytes()].concat();
    peer.ask_as(0, Op::GraphNode, &body, &behind)
        .expect("a node");
    let exec = instantiate(&mut peer, graph);
    for _ in 0..2 {
        wait_until_portable(&place, 1);
        kill_server(&place);
        peer.finish(stream).expect("it goes on");
    }
    peer.post(Op::GraphLaunch, &GraphLaunch { exec, stream }, &[])
        .expect("a launch");
    let word = peer.read(stream, memory, 4).expect("a copy");
    assert_eq!(word, 77u32.to_le_bytes());
}

/// The words of a copy.
fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    let words = bytes.as_chunks().0.iter();
    words.map(|word| u32::from_le_bytes(*word))
}

fn new_graph(peer: &mut Peer) -> u64 {
    let graph = peer.ask(Op::GraphCreate, &GraphCreate::default(), &[]);
    graph.expect("a graph")
}

fn instantiate(peer: &mut Peer, graph: u64) -> u64 {
    let body = GraphInstantiate {
        graph,
        ..GraphInstantiate::default()
    };
    let made: GraphInstantiated = peer.ask(Op::GraphInstantiate, &body, &[]).expect("made");
    assert_eq!(CUresult(made.status), CUDA_SUCCESS);
    made.exec
}

/// The next server makes the leaves of a captured graph last, so its driver has the nodes in another order.
#[test]
fn an_instance_of_a_graph_that_was_made_again_does_not_bind() {
    let place = daemon();
    let mut peer = Peer::connect(&control(&place)).expect("a session");
    peer.attach().expect("attach");
    let (stream, other) = (peer.stream().expect("one"), peer.stream().expect("other"));
    let memory = peer.memory(4096).expect("memory").start;
    let events = [(); 3].map(|()| {
        let event = peer.handle(Kind::Event);
        let body = EventCreate {
            event,
            ..EventCreate::default()
        };
        peer.post(Op::EventCreate, &body, &[]).expect("an event");
        event
    });
    let on = |event, stream| EventOnStream {
        event,
        stream,
        ..EventOnStream::default()
    };
    let begin = CaptureBegin {
        stream,
        ..CaptureBegin::default()
    };
    peer.ask_as(0, Op::CaptureBegin, &begin, &[])
        .expect("a capture");
    let set = |peer: &mut Peer, at: u64, stream| {
        let body = memset(memory + 4 * at, at as u32 + 1, 1, stream);
        peer.post(Op::Memset, &body, &[]).expect("a node");
    };
    let join = |peer: &mut Peer, event, from, to| {
        peer.post(Op::EventRecord, &on(event, from), &[])
            .expect("a record");
        peer.post(Op::StreamWaitEvent, &on(event, to), &[])
            .expect("a wait");
    };
    set(&mut peer, 0, stream);
    join(&mut peer, events[0], stream, other);
    set(&mut peer, 1, other);
    set(&mut peer, 2, stream);
    set(&mut peer, 3, stream);
    join(&mut peer, events[1], other, stream);
    let end = Object { object: stream };
    let graph: u64 = peer.ask(Op::CaptureEnd, &end, &[]).expect("a graph");
    let exec = instantiate(&mut peer, graph);
    // A graph that refers to an event, so that all graphs are read again once the event is destroyed.
    let refers = new_graph(&mut peer);
    let body = GraphNode {
        object: refers,
        kind: CU_GRAPH_NODE_TYPE_EVENT_RECORD,
        ..GraphNode::default()
    };
    peer.ask_as(0, Op::GraphNode, &body, &events[2].to_le_bytes())
        .expect("a node");
    for destroys in [true, false] {
        wait_until_portable(&place, 1);
        kill_server(&place);
        if destroys {
            let body = Object { object: refers };
            peer.ask_as(0, Op::GraphDestroy, &body, &[]).expect("gone");
            let body = Object { object: events[2] };
            peer.post(Op::EventDestroy, &body, &[]).expect("gone");
        }
        peer.finish(stream).expect("it goes on");
    }
    wait_until_portable(&place, 1);
    let body = GraphLaunch { exec, stream };
    peer.post(Op::GraphLaunch, &body, &[]).expect("a launch");
    let read = peer.read(stream, memory, 16).expect("a copy");
    assert!(words(&read).eq(1..=4), "{read:?}");
}

/// User and group of a server's process, with the groups that it has besides.
fn identity(place: &Place) -> [String; 3] {
    let pid = server(place).expect("a server");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    ["Uid:", "Gid:", "Groups:"].map(|name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.expect(name).trim().to_owned()
    })
}

/// The successors of a server, however they come, run as it did, for a user and group that no file names.
fn successors_run_as_the_first_server(place: &Place) {
    // As a container's user.
    const USER: u32 = 54321;
    const GROUP: u32 = 54322;
    let mut survivor = Survivor::start_as(place, USER, GROUP);
    survivor.round();
    let first = identity(place);
    assert!(first[0].starts_with("54321") && first[1].starts_with("54322"));
    let replace = |survivor: &mut Survivor, how: &str, act: &dyn Fn(i32)| {
        let old = server(place).expect("a server");
        act(old);
        survivor.round();
        wait_until(how, || server(place).is_some_and(|next| next != old));
        assert_eq!(identity(place), first, "{how}");
    };
    let is_killed = |_| _ = kill_server(place);
    let is_restarted = |old: i32| {
        let done = place.control(&["restart_server", &old.to_string(), "-t", "600"]);
        assert_eq!(done.code, 0, "{}", done.out);
    };
    for _ in 0..2 {
        replace(&mut survivor, "it is killed", &is_killed);
        replace(&mut survivor, "it is restarted", &is_restarted);
    }
    place.signal_daemon(nix::sys::signal::Signal::SIGKILL);
    wait_until("another daemon runs", || place.control(&["-d"]).code == 0);
    wait_until("the server is taken over", || clients(place).len() == 1);
    replace(&mut survivor, "killed, after a takeover", &is_killed);
    replace(&mut survivor, "restarted, after a takeover", &is_restarted);
    survivor.end();
}

#[test]
fn clients_of_a_user_without_a_name_go_on() {
    if other_user().is_none() {
        return eprintln!("not root: no other user is tested");
    }
    successors_run_as_the_first_server(&daemon());
    successors_run_as_the_first_server(&daemon_with(&[("MPSSHIM_STANDBY", "1")]));
}

#[test]
fn a_fault_ends_the_program_that_caused_it_and_no_other() {
    // Otherwise the second one would run apart from the others.
    let place = daemon_without_quarantine();
    let mut survivors: Vec<Survivor> = (0..3).map(|_| Survivor::start(&place)).collect();
    for _ in 0..5 {
        let mut faulty = Survivor::start(&place);
        faulty.round();
        assert_eq!(faulty.ask("stray"), ILLEGAL_ADDRESS);
        for survivor in &mut survivors {
            survivor.round();
        }
        // What is lost stays lost.
        assert_eq!(faulty.ask("round"), ILLEGAL_ADDRESS);
    }
    survivors.into_iter().for_each(Survivor::end);
    let log = place.log("server.log");
    assert_eq!(
        log.matches("of which 3 go on in the next server").count(),
        5
    );
}

/// What the driver says of these threads of `asserting_ptx`'s kernel.
fn failed(threads: std::ops::Range<u32>) -> String {
    let line = |thread| {
        format!(
            "assert.cu:7: void check(unsigned): block: [0,0,0], thread: [{thread},0,0] Assertion `thread < limit` failed.\n"
        )
    };
    threads.map(line).collect()
}

#[test]
fn the_text_of_a_failed_assertion_goes_to_the_program_whose_kernel_failed() {
    let place = daemon_without_quarantine();
    for _ in 0..5 {
        let [mut faulty, mut idle, mut other, mut same] = [(); 4].map(|()| Survivor::start(&place));
        // Code that the text could be of, but complete or of another name. Nothing is loaded beside kernels that do not end.
        for survivor in [&mut faulty, &mut idle, &mut same] {
            assert_eq!(survivor.ask("assert 8"), "CUDA_SUCCESS (0)");
        }
        wait_until_portable(&place, 4);
        assert_eq!(other.ask("launch 1000000"), "launched");
        assert_eq!(same.ask("endless"), "launched");
        assert_eq!(faulty.ask("assert 6"), ASSERT);
        // Said once.
        for survivor in [&mut faulty, &mut other, &mut same] {
            assert_eq!(survivor.ask("round"), ASSERT);
        }
        idle.round();
        let done = faulty.program.finish(PATIENCE);
        assert_eq!((done.code, done.err), (1, failed(6..8)));
        for survivor in [other, same] {
            let done = survivor.program.finish(PATIENCE);
            assert_eq!((done.code, done.err.as_str()), (1, ""));
        }
        idle.end();
    }
    let log = place.log("server.log");
    assert!(!log.contains("Assertion"), "{log}");
}

#[test]
fn memory_of_another_client_comes_without_what_was_in_it() {
    let place = daemon();
    let mut own = Survivor::start(&place);
    for _ in 0..3 {
        let mut other = Survivor::start(&place);
        assert_eq!(other.ask("look"), "found 0");
        assert_eq!(other.ask("taint"), "tainted");
        // Of a client that lives, and of one that has gone.
        assert_eq!(own.ask("look"), "found 0");
        other.end();
        assert_eq!(own.ask("look"), "found 0");
    }
    // A program may find what it left itself, as natively: the pattern is found where it is.
    assert_eq!(own.ask("taint"), "tainted");
    assert_ne!(own.ask("look"), "found 0");
    own.end();
}

#[test]
fn what_is_in_flight_or_bound_to_its_context_is_lost_and_the_others_go_on() {
    let place = daemon();
    let [mut idle, mut busy, mut bound] = [(); 3].map(|()| Survivor::start(&place));
    assert_eq!(bound.ask("graph"), "graph");
    // Longer than any patience.
    assert_eq!(busy.ask("launch 1000000"), "launched");
    wait_until("the kernel is seen", || {
        place.control(&["get_server_list"]).code == 0
    });
    kill_server(&place);
    assert_eq!(busy.ask("round"), RPC_FAILURE);
    assert_eq!(bound.ask("round"), RPC_FAILURE);
    idle.round();
    // The clients are told first.
    wait_until("the log says why", || {
        let log = place.log("server.log");
        let says = |why: &str| log.contains(why);
        says("it was bound to its context by graphs") && says("it had work in flight")
    });
    idle.end();
}

#[test]
fn kills_at_any_instant_lose_nobody_at_rest_and_corrupt_nothing() {
    let place = daemon();
    let [mut idle, mut other] = [(); 2].map(|()| Survivor::start(&place));
    let mut lost = 0;
    for round in 0..30u64 {
        // The other one is somewhere in its round when the server is killed: it goes on, or has an error.
        other.say("round");
        std::thread::sleep(std::time::Duration::from_micros(round * 397 % 5000));
        kill_server(&place);
        idle.round();
        let answer = other.program.line();
        if answer.starts_with("ok ") {
            other.rounds += 1;
        } else {
            assert_eq!(answer, RPC_FAILURE);
            lost += 1;
            other = Survivor::start(&place);
        }
    }
    assert!(lost < 30, "some rounds had ended, or not begun");
    idle.end();
    other.end();
}

/// When all clients are portable, ends their server: by a signal or, in odd rounds, by a fault. With quarantine, the
/// second faulty program would have another server.
fn end_server(place: &Place, clients: usize, round: u32) {
    wait_until_portable(place, clients);
    if round.is_multiple_of(2) {
        kill_server(place);
        return;
    }
    let mut faulty = Survivor::start(place);
    assert_eq!(faulty.ask("stray"), ILLEGAL_ADDRESS);
}

#[test]
fn variables_that_no_code_uses_are_memory_of_the_program() {
    let place = daemon_without_quarantine();
    let mut survivor = Survivor::start(&place);
    for round in 1..=5 {
        assert_eq!(survivor.ask("constant"), format!("constants {round}"));
        // While a host function is in flight nothing is saved.
        assert_eq!(survivor.ask("wait 1000"), "waits");
        assert_eq!(survivor.ask("constant 1"), "launched");
        let list = place.control(&["--format=json", "ps"]).out;
        assert!(list.contains("\"bound_by\":\"\""), "{list}");
        survivor.round();
        end_server(&place, 1, round);
    }
    assert_eq!(survivor.ask("constant"), "constants 6");
    wait_until_portable(&place, 1);
    let server = server(&place).expect("a server");
    let done = place.control(&["restart_server", &server.to_string(), "-t", "600"]);
    assert_eq!(done.code, 0, "{}", done.out);
    assert_eq!(survivor.ask("constant"), "constants 7");
    survivor.end();
}

#[test]
fn variables_are_in_their_image_where_the_program_may_have_no_memory_for_them() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    assert_eq!(survivor.ask("constant 2"), "in memory of the program");
    survivor.end();
    // For the image, but not for as much again.
    let limit = [("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=42M")];
    let mut survivor = Survivor::start_in(place.pipe(), &limit);
    assert_eq!(survivor.ask("constant 2"), "in the image");
    survivor.round();
    survivor.end();
}

#[test]
fn variables_go_on_from_where_they_were() {
    let place = daemon_without_quarantine();
    let mut survivors: Vec<Survivor> = (0..2).map(|_| Survivor::start(&place)).collect();
    let commands = ["count", "count 1"];
    for round in 1..=8 {
        for (survivor, command) in survivors.iter_mut().zip(commands) {
            assert_eq!(survivor.ask(command), format!("counted {}", round * 40));
        }
        end_server(&place, 2, round);
    }
    for survivor in &mut survivors {
        assert_eq!(survivor.ask("count"), "counted 360");
        survivor.round();
    }
    survivors.into_iter().for_each(Survivor::end);
}

/// Two clients whose requests are answered with their number go on over twelve ends of the server.
fn go_on_as_they_were(request: &str, answer: &str) {
    let place = daemon_without_quarantine();
    let mut survivors: Vec<Survivor> = (0..2).map(|_| Survivor::start(&place)).collect();
    for round in 1..=12 {
        for survivor in &mut survivors {
            assert_eq!(survivor.ask(request), format!("{answer} {round}"));
        }
        end_server(&place, 2, round);
    }
    for survivor in &mut survivors {
        assert_eq!(survivor.ask(request), format!("{answer} 13"));
        survivor.round();
    }
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn variables_that_are_saved_in_files_go_on_as_they_were() {
    go_on_as_they_were("table", "tabled");
}

#[test]
fn graphs_go_on_as_they_were() {
    go_on_as_they_were("replay", "replayed");
}

#[test]
fn a_graph_with_a_kernel_of_an_unloaded_image_binds_until_it_is_destroyed() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    assert_eq!(survivor.ask("unload"), "unload");
    wait_until("the client is bound by graphs", || {
        let list = place.control(&["--format=json", "ps"]).out;
        list.contains("\"bound_by\":\"graphs\"")
    });
    assert_eq!(survivor.ask("destroy"), "destroyed, 1 left");
    wait_until_portable(&place, 1);
    kill_server(&place);
    survivor.round();
    survivor.end();
}

#[test]
fn graphs_with_conditional_nodes_go_on_as_they_were() {
    go_on_as_they_were("loop", "looped");
}

#[test]
fn graphs_with_conditional_nodes_of_several_clients_do_not_run_at_a_time() {
    // Otherwise the driver ends their context.
    let place = daemon_with(&[("SOFTGPU_LOOPS", "fault"), ("MPSSHIM_OWN_SERVERS", "0")]);
    let survivors: Vec<Survivor> = (0..4).map(|_| Survivor::start(&place)).collect();
    std::thread::scope(|scope| {
        for mut survivor in survivors {
            scope.spawn(move || {
                for round in 1..=40 {
                    assert_eq!(survivor.ask("loop"), format!("looped {round}"));
                }
                survivor.end();
            });
        }
    });
}

#[test]
fn pools_and_memory_allocated_from_them_go_on_as_they_were() {
    go_on_as_they_were("pool", "pooled");
}

#[test]
fn registered_memory_goes_on_as_it_was() {
    go_on_as_they_were("register", "registered");
}

#[test]
fn handles_of_memory_that_is_mapped_nowhere_go_on_as_they_were() {
    go_on_as_they_were("hold", "held");
}

#[test]
fn arrays_and_textures_go_on_as_they_were() {
    go_on_as_they_were("texture", "textured");
}

#[test]
fn green_contexts_and_their_resources_go_on_as_they_were() {
    go_on_as_they_were("part", "parted");
}

#[test]
fn contexts_with_a_part_of_the_device_go_on_as_they_were() {
    let place = daemon_without_quarantine();
    let env = [
        (
            "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
            "1",
        ),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "75"),
    ];
    let mut survivor = Survivor::start_in(place.pipe(), &env);
    for round in 1..=4 {
        assert_eq!(survivor.ask("part"), format!("parted {round}"));
        end_server(&place, 1, round);
    }
    assert_eq!(survivor.ask("part"), "parted 5");
    survivor.round();
    survivor.end();
}

#[test]
fn memory_that_programs_share_goes_on_with_them() {
    let place = daemon_without_quarantine();
    let [mut owner, mut other] = [(); 2].map(|()| Survivor::start(&place));
    let handle = owner.ask("give");
    let open = format!("open {handle}");
    assert_eq!(other.ask(&open), "opened");
    for round in 1..=4 {
        for (writer, reader) in [(0, 1), (1, 0)] {
            let both = [&mut owner, &mut other];
            let value = 10 * round + writer as u32;
            assert_eq!(both[writer].ask(&format!("write {value}")), "written");
            end_server(&place, 2, round);
            let both = [&mut owner, &mut other];
            assert_eq!(both[reader].ask("read"), value.to_string());
        }
    }
    // Its handle is the same in each server.
    let mut third = Survivor::start(&place);
    assert_eq!(third.ask(&open), "opened");
    assert_eq!(other.ask("close"), "closed");
    assert_eq!(owner.ask("write 77"), "written");
    owner.round();
    owner.end();
    // Memory whose owner has ended.
    for round in 5..=6 {
        end_server(&place, 2, round);
        assert_eq!(third.ask("read"), "77");
    }
    other.round();
    third.round();
    other.end();
    third.end();
    wait_until("the clients have gone", || clients(&place).is_empty());
}

#[test]
fn memory_that_programs_have_by_descriptors_goes_on_with_them() {
    let place = daemon_without_quarantine();
    let [mut one, mut other] = [(); 2].map(|()| Survivor::start(&place));
    let path = place.pipe().join("descriptor");
    let path = path.to_str().expect("UTF-8");
    assert_eq!(one.ask(&format!("export {path}")), "exported");
    assert_eq!(other.ask(&format!("import {path}")), "imported");
    for round in 1..=6 {
        for (writer, reader) in [(0, 1), (1, 0)] {
            let both = [&mut one, &mut other];
            let value = 10 * round + writer as u32;
            assert_eq!(both[writer].ask(&format!("fill {value}")), "filled");
            end_server(&place, 2, round);
            let both = [&mut one, &mut other];
            assert_eq!(both[reader].ask("show"), value.to_string());
        }
        match round {
            2 => assert_eq!(one.ask("retain"), "retained"),
            3 => assert_eq!(other.ask("retain"), "retained"),
            4 => assert_eq!(one.ask("retain"), "retained"),
            5 => {
                restart(&place, &["-t", "600"]).expect("a restart");
            }
            _ => {}
        }
    }
    // The other one still has it by its descriptor.
    one.round();
    one.end();
    assert_eq!(other.ask("fill 77"), "filled");
    end_server(&place, 1, 2);
    assert_eq!(other.ask("show"), "77");
    other.round();
    other.end();
    wait_until("the clients have gone", || clients(&place).is_empty());
}

#[test]
fn events_that_programs_share_go_on_with_them() {
    let place = daemon_without_quarantine();
    let [mut one, mut other] = [(); 2].map(|()| Survivor::start(&place));
    let listen = format!("listen {}", one.ask("signal"));
    assert_eq!(other.ask(&listen), "listens");
    for round in 1..=4 {
        end_server(&place, 2, round);
        for (first, second) in [(0, 1), (1, 0)] {
            let both = [&mut one, &mut other];
            assert_eq!(both[first].ask("raise 3"), "raised");
            assert_eq!(both[second].ask("hear"), "heard");
            both[first].round();
        }
        if round == 3 {
            restart(&place, &["-t", "600"]).expect("a restart");
        }
    }
    // Its handle is the same in each server.
    let mut third = Survivor::start(&place);
    assert_eq!(third.ask(&listen), "listens");
    one.end();
    assert_eq!(third.ask("raise 3"), "raised");
    assert_eq!(other.ask("hear"), "heard");
    third.round();
    end_server(&place, 2, 5);
    assert_eq!(third.ask("hear"), "heard");
    other.end();
    third.end();
    wait_until("the clients have gone", || clients(&place).is_empty());
}

/// In the next server nothing would keep the other program from reading what the lost kernel was to write.
#[test]
fn a_program_is_lost_with_the_record_for_which_it_may_wait() {
    for by_fault in [false, true] {
        let place = daemon_without_quarantine();
        let [mut one, mut other, mut third] = [(); 3].map(|()| Survivor::start(&place));
        for listener in [&mut other, &mut third] {
            let listen = format!("listen {}", one.ask("signal"));
            assert_eq!(listener.ask(&listen), "listens");
        }
        // Of the event that the third program has opened.
        assert_eq!(one.ask("raise 100000000"), "raised");
        other.round();
        wait_until_portable(&place, 3);
        let lost = match by_fault {
            true => {
                let mut faulty = Survivor::start(&place);
                assert_eq!(faulty.ask("stray"), ILLEGAL_ADDRESS);
                ILLEGAL_ADDRESS
            }
            false => {
                kill_server(&place);
                RPC_FAILURE
            }
        };
        assert_eq!(one.ask("round"), lost, "by a fault: {by_fault}");
        assert_eq!(third.ask("round"), lost, "by a fault: {by_fault}");
        other.round();
        other.end();
    }
}

#[test]
fn new_clients_have_other_textures_than_those_that_go_on() {
    let place = daemon_without_quarantine();
    let mut survivors: Vec<Survivor> = Vec::new();
    for round in 1..=4 {
        survivors.push(Survivor::start(&place));
        for (began, survivor) in (1..).zip(&mut survivors) {
            let times = round - began;
            for time in [2 * times + 1, 2 * times + 2] {
                assert_eq!(survivor.ask("texture"), format!("textured {time}"));
            }
        }
        end_server(&place, survivors.len(), round);
    }
    survivors.iter_mut().for_each(Survivor::round);
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn events_say_when_they_were_recorded_by_the_server_before() {
    let place = daemon_without_quarantine();
    let mut survivors: Vec<Survivor> = (0..2).map(|_| Survivor::start(&place)).collect();
    for round in 1..=6 {
        for survivor in &mut survivors {
            let answer = survivor.ask("time");
            assert_eq!(answer, "time", "{}", place.log("server.log"));
        }
        end_server(&place, 2, round);
    }
    for survivor in &mut survivors {
        let answer = survivor.ask("time");
        assert_eq!(answer, "time", "{}", place.log("server.log"));
        survivor.round();
    }
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn variables_that_cannot_be_saved_bind_their_session() {
    let place = daemon();
    // One that holds an address of another; and more than is saved.
    for command in ["link", "large 20000000"] {
        let [mut bound, mut saved] = [(); 2].map(|()| Survivor::start(&place));
        bound.ask(command);
        // It comes to rest after the other one.
        saved.ask("count");
        wait_until("one is portable", || {
            portable(&place).values().any(|portable| *portable)
        });
        kill_server(&place);
        assert_eq!(bound.ask("count"), RPC_FAILURE);
        assert_eq!(saved.ask("count"), "counted 80");
        saved.end();
    }
    // A server that is killed at once finds them bound too.
    let mut survivor = Survivor::start(&place);
    survivor.say("count");
    kill_server(&place);
    let answer = survivor.program.line();
    assert!(["counted 40", RPC_FAILURE].contains(&&*answer), "{answer}");
}

#[test]
fn kills_at_any_instant_leave_variables_right_or_lose_them() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    let (mut counted, mut lost) = (0, 0);
    for round in 0..30u64 {
        survivor.say("count");
        let instant = std::time::Duration::from_micros(round * 1_009 % 12_000);
        if round % 2 == 0 {
            std::thread::sleep(instant);
            kill_server(&place);
        }
        let mut answer = survivor.program.line();
        if answer != RPC_FAILURE && round % 2 == 1 {
            // About the time when its variables are saved.
            counted += 40;
            assert_eq!(answer, format!("counted {counted}"));
            std::thread::sleep(instant);
            kill_server(&place);
            answer = survivor.ask("count");
        }
        if answer == RPC_FAILURE {
            lost += 1;
            counted = 0;
            survivor = Survivor::start(&place);
        } else {
            counted += 40;
            assert_eq!(answer, format!("counted {counted}"));
        }
        if round % 3 == 0 {
            // It may have been lost after its answer, which it has not noticed then.
            wait_until("what is left is portable", || {
                portable(&place).values().all(|portable| *portable)
            });
        }
    }
    println!("{lost} of 30 were lost");
    assert_eq!(survivor.ask("count"), format!("counted {}", counted + 40));
    survivor.end();
}

#[test]
fn a_server_that_is_told_to_end_has_no_successor_and_leaves_no_keeper() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    survivor.round();
    assert_eq!(keepers(&place), 1);
    let pid = server(&place).expect("a server").to_string();
    let done = place.control(&["shutdown_server", &pid, "-f"]);
    assert_eq!(done.code, 0, "{}", done.err);
    assert_eq!(survivor.ask("round"), RPC_FAILURE);
    assert_eq!(server(&place), None);
    wait_until("the keeper has ended", || keepers(&place) == 0);
    let next = Survivor::start(&place);
    assert_eq!(keepers(&place), 1);
    next.end();
}

#[test]
fn what_a_client_has_counts_for_it_in_the_next_server() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    survivor.round();
    let memory = |place: &Place| {
        let list = place.control(&["--format=json", "ps"]);
        let list: serde_json::Value = serde_json::from_str(&list.out).expect("a list");
        let client = &list[0];
        assert_eq!(client["portable"], 1, "{client}");
        (
            client["memory"].clone(),
            client["pinned_host_memory"].clone(),
        )
    };
    let without = memory(&place);
    assert_eq!(survivor.ask("limit"), "limit");
    let before = memory(&place);
    assert_ne!(before, without, "what a deeper stack takes is counted");
    assert!(before.0.as_u64().expect("bytes") > 24 << 20);
    kill_server(&place);
    survivor.round();
    assert_eq!(memory(&place), before);
    let bound_by = |what: &str| {
        let wanted = format!("\"bound_by\":\"{what}\"");
        wait_until(&wanted, || {
            let list = place.control(&["--format=json", "ps"]).out;
            list.contains(&wanted)
        });
    };
    assert_eq!(survivor.ask("graph"), "graph");
    bound_by("graphs");
    survivor.end();
}

/// An image of `len` bytes and more that no other has the content of.
fn image(number: usize, len: usize) -> Vec<u8> {
    format!("{PTX}\n// {number} {}\n", "x".repeat(len)).into_bytes()
}

/// How many of the peer's images the driver gets before something binds its session.
fn load_until_bound(place: &Place, peer: &mut Peer, most: usize, len: usize) -> usize {
    let pid = std::process::id().to_string();
    let is_bound = || {
        let rows = place.ps();
        let mut own = rows.iter().filter(|row| row["pid"] == pid);
        own.any(|row| row["bound_by"] == "unkept memory")
    };
    let loaded = (0..most).find(|number| {
        peer.module(&image(*number, len)).expect("a module");
        number % 8 == 7 && is_bound()
    });
    loaded.unwrap_or(most)
}

#[test]
fn a_client_with_many_small_images_goes_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = daemon_with_descriptors(folder.path(), 512);
    let mut peer = Peer::connect(&control(&place)).expect("a session");
    peer.attach().expect("attach");
    let modules: Vec<u64> = (0..1_000)
        .map(|number| peer.module(&image(number, 8)).expect("a module"))
        .collect();
    let mut survivor = Survivor::start(&place);
    for _ in 0..2 {
        wait_until_portable(&place, 2);
        kill_server(&place);
        survivor.round();
        // Of those before, again and anew.
        for number in [0, 499, 999] {
            peer.function(modules[number], "fill").expect("a function");
            peer.module(&image(number, 8)).expect("a module");
        }
        peer.module(&image(1_000, 8)).expect("a new module");
    }
    // What is not in use any more takes no room.
    for module in modules {
        let unload = Object { object: module };
        peer.post(Op::ImageUnload, &unload, &[]).expect("unload");
    }
    peer.module(&image(1_001, 8)).expect("a new module");
    wait_until_portable(&place, 2);
    kill_server(&place);
    survivor.round();
    peer.module(&image(1_002, 8)).expect("a new module");
    survivor.end();
}

#[test]
fn a_client_that_fills_the_keeper_leaves_room_for_the_next() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = daemon_with_descriptors(folder.path(), 256);
    let mut attackers: Vec<Peer> = (0..2)
        .map(|_| Peer::connect(&control(&place)).expect("a session"))
        .collect();
    for peer in &mut attackers {
        peer.attach().expect("attach");
        load_until_bound(&place, peer, 400, 70_000);
    }
    let mut survivors: Vec<Survivor> = (0..2).map(|_| Survivor::start(&place)).collect();
    let pids: Vec<i64> = survivors
        .iter()
        .map(|survivor| i64::from(survivor.program.pid()))
        .collect();
    for _ in 0..2 {
        wait_until("those that came later are portable", || {
            let portable = portable(&place);
            pids.iter().all(|pid| portable.get(pid) == Some(&true))
        });
        kill_server(&place);
        survivors.iter_mut().for_each(Survivor::round);
    }
    survivors.into_iter().for_each(Survivor::end);
}
