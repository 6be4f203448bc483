//! What waits until nothing is in flight, beside clients with long kernels: against the real daemon and server, on a softgpu
//! that holds the driver's lock as the genuine one does.

use crate::alone;
use mpsshim_api::cuda::{
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_OUT_OF_MEMORY,
};
use mpsshim_control::seqpacket;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::handshake::ClientHello;
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::message::image::KernelAttribute;
use mpsshim_proto::message::stream::HostFunction;
use mpsshim_proto::message::{
    EventCreate, EventOnStream, Launch, MarkEvent, Object, Op, StreamCreate,
};
use mpsshim_proto::segment::{ARRIVED, RETURNED};
use mpsshim_proto::shm::{self, Mapping};
use mpsshim_tests::control_daemon::wait_until;
use mpsshim_tests::peer::{
    Loaded, PTX, Peer, Worker, counting_ptx, deep_ptx, hello, launch, memory_file, new_ptx,
    spinning_ptx,
};
use mpsshim_tests::scene::{Bystander, Scene, control, server_with};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use zerocopy::IntoBytes;

/// So many blocks fill the device of softgpu if each has [`HALF`] bytes of shared memory.
const FILLING: u32 = 16;
const HALF: u32 = 48 << 10;

/// A client whose kernels run until a word says that so many of them have ended.
struct Spinner {
    client: Loaded,
    function: u64,
    event: u64,
    waiting: u64,
    word: u64,
    memory: Mapping,
    _file: OwnedFd,
    launched: u32,
}

impl Spinner {
    fn start(scene: &Scene) -> Spinner {
        Spinner::with(scene, &spinning_ptx())
    }

    /// One whose image is this text.
    fn with(scene: &Scene, text: &str) -> Spinner {
        let mut client = Loaded::connect(&control(&scene.place), text);
        let function = client.peer.function(client.module, "spin").expect("it");
        let waiting = client.peer.stream().expect("another stream");
        let event = client.peer.handle(Kind::Event);
        let create = EventCreate {
            event,
            ..EventCreate::default()
        };
        let posted = client.peer.post(Op::EventCreate, &create, &[]);
        posted.expect("an event");
        let (range, file) = client.peer.pinned(4096).expect("pinned memory");
        let memory = Mapping::new(file.as_fd(), range.len as usize).expect("mapping");
        Spinner {
            client,
            function,
            event,
            waiting,
            word: range.start,
            memory,
            _file: file,
            launched: 0,
        }
    }

    /// One whose first kernel runs.
    fn running(scene: &Scene) -> Spinner {
        let mut spinner = Spinner::start(scene);
        spinner.launch();
        spinner.await_begun(1);
        spinner
    }

    /// Two words: how many kernels may end, and how many have begun.
    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: inside the mapping and aligned; everybody reads and writes it as an atomic.
        unsafe { &*self.memory.base().cast::<AtomicU32>().add(at) }
    }

    /// Launches the next kernel, which ends when [`Spinner::end`] has been told its number.
    fn launch(&mut self) {
        self.launch_with(1, 0);
    }

    /// The same with this many blocks and bytes of shared memory for each.
    fn launch_with(&mut self, blocks: u32, shared: u32) {
        self.launched += 1;
        let params = [self.word.as_bytes(), self.launched.as_bytes()].concat();
        let body = Launch {
            shared,
            ..launch(self.function, self.client.stream, blocks, params.len())
        };
        let peer = &mut self.client.peer;
        peer.post(Op::Launch, &body, &params).expect("launch");
        let record = EventOnStream {
            stream: self.client.stream,
            event: self.event,
            ..EventOnStream::default()
        };
        peer.post(Op::EventRecord, &record, &[]).expect("record");
        // As a thread that waits for the event does.
        let mark = MarkEvent {
            event: self.event,
            stream: self.waiting,
            slot: 11,
            value: self.launched,
        };
        peer.post(Op::MarkEvent, &mark, &[]).expect("mark");
        peer.mem_info().expect("the launch is there");
    }

    fn end(&self, number: u32) {
        self.word(0).store(number, Ordering::Release);
    }

    fn begun(&self) -> u32 {
        self.word(1).load(Ordering::Acquire)
    }

    fn await_begun(&self, number: u32) {
        wait_until("the kernel has begun", || self.begun() >= number);
    }
}

/// A new client on a thread, which loads what nobody has and computes.
fn newcomer(scene: &Scene) -> std::thread::JoinHandle<Worker> {
    newcomer_with(scene, new_ptx())
}

/// The same with this text.
fn newcomer_with(scene: &Scene, text: String) -> std::thread::JoinHandle<Worker> {
    let control = control(&scene.place);
    std::thread::spawn(move || {
        let peer = Peer::connect(&control).expect("a newcomer");
        let mut worker = Worker::with_text(peer, &text).expect("its image");
        worker.round().expect("its first round");
        worker
    })
}

/// A client with a part of the device, which cannot go to the second context.
fn bound(scene: &Scene) -> Worker {
    let hello = ClientHello {
        active_thread_centipercent: 5000,
        ..hello()
    };
    let socket = seqpacket::connect(&control(&scene.place)).expect("connect");
    shm::send_packet(socket.as_fd(), hello.as_bytes(), &[]).expect("hello");
    Worker::with(Peer::over(socket).expect("a session")).expect("a worker")
}

fn log_has(scene: &Scene, text: &str) -> bool {
    scene.place.log("server.log").contains(text)
}

/// What a command prints as JSON.
fn said(scene: &Scene, arguments: &[&str]) -> Value {
    let done = scene.place.control(arguments);
    assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
    serde_json::from_str(&done.out).expect("JSON")
}

/// A client by its session, in a list of clients.
fn of_session(clients: &Value, session: u64) -> Value {
    let clients = clients.as_array().expect("clients");
    let client = clients.iter().find(|client| client["id"] == session);
    client.expect("it is listed").clone()
}

/// What `ps` says of a client.
fn row(scene: &Scene, session: u64) -> Value {
    of_session(&said(scene, &["--format", "json", "ps"]), session)
}

/// For [`metric`].
const METRICS: [(&str, &str); 1] = [("MPSSHIM_METRICS", "127.0.0.1:0")];

/// The sample of a metric with this label.
fn metric(scene: &Scene, name: &str, label: &str) -> f64 {
    let log = scene.place.log("control.log");
    let (_, rest) = log.split_once("http://").expect("an address");
    let (address, _) = rest.split_once("/metrics").expect("a path");
    let mut stream = TcpStream::connect(address).expect("connect");
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\n\r\n")
        .expect("send");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("UTF-8");
    let begins = format!("{name}{{");
    let line = text
        .lines()
        .find(|line| line.starts_with(&begins) && line.contains(label));
    let line = line.unwrap_or_else(|| panic!("{name} {label} in {text}"));
    let (_, value) = line.rsplit_once(' ').expect("a value");
    value.parse().expect("a number")
}

/// A session's waits at the gate in a trace that is over.
fn waits_in(trace: &str, session: u64) -> Vec<Value> {
    let events: Vec<Value> = serde_json::from_str(trace).expect("JSON");
    let fits = |event: &Value| event["cat"] == "gate" && event["tid"] == session * 4096;
    events.into_iter().filter(fits).collect()
}

#[test]
fn who_waits_at_the_gate_is_seen() {
    let _alone = alone();
    let scene = Scene::with(&METRICS);
    let path = scene.place.path().join("trace.json");
    let path = path.to_str().expect("UTF-8");
    let trace = |what: &[&str]| {
        let done = scene.place.control(&[&["trace"], what].concat());
        assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
    };
    let mut loads = bound(&scene);
    let session = loads.peer.welcome.session;
    let pid = std::process::id();
    trace(&["start", path]);
    let spinner = Spinner::running(&scene);
    let spins = spinner.client.peer.welcome.session;
    let done = std::thread::spawn(move || {
        let text = new_ptx();
        loads.peer.module(text.as_bytes()).expect("a module");
        loads
    });
    let line = format!(
        "Client {{PID: {pid}, Context ID: {session}}} waits to load: long kernels of \
         {{PID: {pid}, Context ID: {spins}}} have to end first"
    );
    wait_until("the log names both", || log_has(&scene, &line));

    let waits = row(&scene, session);
    assert!(waits["gate_ms"].as_f64() >= Some(1000.0), "{waits}");
    assert_eq!(waits["gate_blockers"], pid.to_string());
    let blocks = row(&scene, spins);
    assert_eq!(blocks["gate_blockers"], "", "{blocks}");
    assert!(waits["gate_ms"].as_f64() > blocks["gate_ms"].as_f64());
    for row in [waits, blocks] {
        assert_eq!(row["device_context"], 1, "{row}");
    }
    let look = said(&scene, &["top", "--once", "--interval", "0.3", "--json"]);
    let share = |session| of_session(&look["clients"], session)["gate_percentage"].as_f64();
    // How much of the interval it is depends on when the server publishes its numbers.
    assert!(share(session) > Some(0.0), "{look}");
    assert_eq!(share(spins), Some(0.0), "{look}");
    let label = format!("session=\"{session}\"");
    let seconds = metric(&scene, "mpsshim_client_gate_wait_seconds_total", &label);
    assert!(seconds >= 1.0, "{seconds}");
    let context = metric(&scene, "mpsshim_client_device_context", &label);
    assert_eq!(context, 1.0);
    // At least one for each of the two that have loaded something.
    let label = format!("server=\"{}\"", scene.server());
    let moments = metric(&scene, "mpsshim_server_gate_moments_total", &label);
    assert!(moments >= 2.0, "{moments}");
    let servers = said(&scene, &["--format", "json", "get_server_list"]);
    assert!(servers[0]["gate_moments"].as_f64() >= Some(moments));

    // Of a wait that goes on when the trace ends, and of one that began before it.
    trace(&["stop"]);
    let first = fs::read_to_string(path).expect("a trace");
    trace(&["start", path]);
    std::thread::sleep(Duration::from_millis(200));
    spinner.end(1);
    let _loads = done.join().expect("the load");
    trace(&["stop"]);
    let second = fs::read_to_string(path).expect("another");
    let unfinished = json!({"blockers": [pid], "unfinished": true});
    for (text, args, at_least) in [
        (&first, unfinished, 1e6),
        (&second, json!({"blockers": [pid]}), 0.2e6),
    ] {
        let waits = waits_in(text, session);
        assert_eq!(waits.len(), 1, "{text}");
        assert_eq!(
            (&waits[0]["name"], &waits[0]["args"]),
            (&json!("gate: ImageLoad"), &args)
        );
        assert!(waits[0]["dur"].as_f64() >= Some(at_least), "{waits:?}");
    }
    let after = row(&scene, session);
    assert_eq!(after["gate_blockers"], "", "{after}");
    assert_eq!(row(&scene, session)["gate_ms"], after["gate_ms"]);
}

#[test]
fn who_loads_waits_for_a_long_kernel_and_nobody_else_does() {
    let _alone = alone();
    let scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let mut spinner = Spinner::running(&scene);
    let waits = newcomer(&scene);
    // Its next kernels would keep the newcomer waiting.
    spinner.launch();
    spinner.launch();
    std::thread::sleep(Duration::from_millis(300));
    assert!(
        !waits.is_finished(),
        "a load beside a kernel has not waited"
    );
    bystander.goes_on();
    spinner.end(1);
    wait_until("the newcomer has computed", || waits.is_finished());
    bystander.stop();
    // What was held back goes on.
    spinner.end(3);
    spinner.await_begun(3);
    waits.join().expect("the newcomer");
}

#[test]
fn beside_a_kernel_without_end_newcomers_work_in_a_second_context() {
    let _alone = alone();
    let scene = Scene::with(&METRICS);
    let bystander = Bystander::start(scene.worker());
    let spinner = Spinner::running(&scene);
    let mut first = newcomer(&scene).join().expect("a newcomer");
    assert!(log_has(&scene, "works in context 2"), "nothing is said");
    let mut second = newcomer(&scene).join().expect("another");
    for _ in 0..20 {
        first.round().expect("a round");
        second.round().expect("a round");
    }
    let clients = [&first.peer, &second.peer, &spinner.client.peer];
    for (client, expected) in clients.into_iter().zip([2, 2, 1]) {
        let session = client.welcome.session;
        assert_eq!(row(&scene, session)["device_context"], expected);
        let label = format!("session=\"{session}\"");
        let value = metric(&scene, "mpsshim_client_device_context", &label);
        assert_eq!(value, f64::from(expected));
    }
    bystander.goes_on();
    bystander.stop();
    // When the way is free again, clients come to where they came before.
    spinner.end(1);
    drop((first, second));
    let moved = || {
        scene
            .place
            .log("server.log")
            .matches("works in context")
            .count()
    };
    wait_until("a newcomer works in the first context", || {
        let before = moved();
        newcomer(&scene).join().expect("a newcomer");
        moved() == before
    });
}

#[test]
fn long_blocks_that_fill_the_device_get_a_context_apart_while_others_work() {
    let _alone = alone();
    let scene = Scene::with(&[]);
    let mut spinner = Spinner::start(&scene);
    let session = spinner.client.peer.welcome.session;
    // A kernel of one wave, as long as several time slices of the device.
    let mut kernel = || {
        spinner.launch_with(FILLING, HALF);
        let number = spinner.launched;
        spinner.await_begun(number);
        std::thread::sleep(Duration::from_millis(60));
        spinner.end(number);
    };
    for _ in 0..20 {
        kernel();
    }
    assert_eq!(row(&scene, session)["device_context"], 1, "nobody gains");
    let bystander = Bystander::start(scene.worker());
    wait_until("it has a context apart", || {
        kernel();
        row(&scene, session)["device_context"] == 2
    });
    assert!(log_has(&scene, "its blocks take long"));
    for _ in 0..5 {
        kernel();
    }
    bystander.goes_on();
    bystander.stop();
}

#[test]
fn a_second_context_goes_when_nobody_uses_it_and_comes_back() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let server = server_with(folder.path(), "--further-context-ms 200");
    let scene = Scene::with(&[("MPSSHIM_SERVER", &server)]);
    let destroyed = || {
        let log = scene.place.log("server.log");
        log.matches("Destroying context 2").count()
    };
    for time in 1..=2 {
        let mut spinner = Spinner::running(&scene);
        let mut first = newcomer(&scene).join().expect("a newcomer");
        spinner.end(1);
        // It stays as long as somebody is there, and works.
        std::thread::sleep(Duration::from_secs(1));
        first.round().expect("a round");
        assert_eq!(destroyed(), time - 1);
        drop(first);
        wait_until("the second context has gone", || destroyed() == time);
        spinner.launch();
        spinner.end(2);
        spinner.await_begun(2);
        newcomer(&scene).join().expect("one in the first context");
    }
}

#[test]
fn a_kernel_may_wait_for_what_a_newcomer_loads() {
    let _alone = alone();
    let scene = Scene::new();
    let mut spinner = Spinner::running(&scene);
    // It ends only after the newcomer's work.
    newcomer(&scene).join().expect("the newcomer");
    spinner.end(1);
    spinner.launch();
    spinner.end(2);
    spinner.await_begun(2);
}

/// A stream that has to be made waits at the gate also where its message was held back behind another one.
#[test]
fn a_stream_that_was_held_back_waits_at_the_gate() {
    let _alone = alone();
    const SLOT: u32 = 40;
    /// Of which nobody has left a stream.
    const PRIORITY: i32 = -5;
    let scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let mut client = bound(&scene);
    let (session, stream) = (client.peer.welcome.session, client.stream);
    let spinner = Spinner::running(&scene);
    let function = HostFunction {
        stream,
        slot: SLOT,
        value: 1,
    };
    let peer = &mut client.peer;
    peer.post(Op::HostFunction, &function, &[]).expect("post");
    peer.wait(|peer| (peer.flag(SLOT + ARRIVED).load(Ordering::Acquire) == 1).then_some(()))
        .expect("the stream waits");
    let destroy = Object { object: stream };
    peer.post(Op::StreamDestroy, &destroy, &[]).expect("post");
    let before = Handle(stream);
    let create = StreamCreate {
        stream: Handle::new(Kind::Stream, before.generation() + 1, before.index()).0,
        priority: PRIORITY,
        ..StreamCreate::default()
    };
    peer.post(Op::StreamCreate, &create, &[]).expect("post");
    peer.mem_info().expect("what is held back keeps nobody");
    peer.flag(SLOT + RETURNED).store(1, Ordering::Release);
    peer.ring();
    wait_until("the stream waits at the gate", || {
        row(&scene, session)["gate_ms"].as_f64() > Some(0.0)
    });
    bystander.goes_on();
    spinner.end(1);
    client.peer.mem_info().expect("it goes on");
    client.peer.posted_error().expect("the stream is there");
    bystander.stop();
}

#[test]
fn who_loads_gets_in_between_long_kernels() {
    let _alone = alone();
    let scene = Scene::new();
    // It cannot go elsewhere.
    let mut loads = bound(&scene);
    // The first kernel is measured: such a kernel takes that long.
    let mut spinner = Spinner::running(&scene);
    std::thread::sleep(Duration::from_secs(1));
    spinner.end(1);
    for _ in 0..10 {
        spinner.launch();
    }
    spinner.await_begun(2);
    let done = std::thread::spawn(move || {
        let text = new_ptx();
        loads.peer.module(text.as_bytes()).expect("a module");
    });
    std::thread::sleep(Duration::from_millis(500));
    assert!(!done.is_finished(), "a load beside a kernel has not waited");
    spinner.end(2);
    wait_until("the module is loaded", || done.is_finished());
    assert!(
        spinner.begun() <= 3,
        "{} kernels came before it",
        spinner.begun()
    );
    done.join().expect("the load");
    spinner.end(u32::MAX);
    spinner.await_begun(11);
}

#[test]
fn what_others_have_or_had_is_there_at_once() {
    let _alone = alone();
    let scene = Scene::new();
    let others = scene.worker();
    let left = new_ptx();
    drop(newcomer_with(&scene, left.clone()).join());
    wait_until("it has left", || log_has(&scene, "contexts is 1."));
    let spinner = Spinner::running(&scene);
    for text in [PTX.to_owned(), left] {
        newcomer_with(&scene, text).join().expect("a newcomer");
    }
    assert!(!log_has(&scene, "works in context"), "somebody has waited");
    assert_eq!(spinner.begun(), 1);
    spinner.end(1);
    drop(others);
}

/// A kernel that writes a word to the client's memory; the word.
fn result(client: &mut Loaded, kernel: u64) -> u32 {
    let params = client.memory.start.as_bytes().to_vec();
    let body: Launch = launch(kernel, client.stream, 1, params.len());
    let peer = &mut client.peer;
    peer.post(Op::Launch, &body, &params).expect("launch");
    let found = peer.read(client.stream, client.memory.start, 4);
    u32::from_le_bytes(found.expect("a word").try_into().expect("four bytes"))
}

/// A client that has launched a kernel, and the kernel.
fn worker(scene: &Scene) -> (Loaded, u64) {
    let control = control(&scene.place);
    let mut client = Loaded::connect(&control, &format!("{}// here", deep_ptx(6000)));
    let deep = client.peer.function(client.module, "deep").expect("it");
    assert_eq!(result(&mut client, deep), 7);
    (client, deep)
}

/// The client loads an image beside a kernel that does not end, and works in a further context from then on. Returns the
/// kernel and the module.
fn loads_elsewhere(scene: &Scene, client: &mut Loaded) -> (Spinner, u64) {
    let spinner = Spinner::running(scene);
    let module = client.peer.module(new_ptx().as_bytes()).expect("another");
    assert!(log_has(scene, "works in context 2"));
    (spinner, module)
}

#[test]
fn a_client_that_has_loaded_something_goes_on_in_another_context() {
    let _alone = alone();
    let scene = Scene::new();
    let (mut client, deep) = worker(&scene);
    let (spinner, module) = loads_elsewhere(&scene, &mut client);
    client.peer.function(module, "fill").expect("its function");
    for _ in 0..3 {
        assert_eq!(result(&mut client, deep), 7);
    }
    spinner.end(1);
}

#[test]
fn a_client_that_has_unloaded_an_image_goes_on_in_another_context() {
    let _alone = alone();
    let scene = Scene::new();
    let (mut client, deep) = worker(&scene);
    // One of which no function was asked for, and one whose kernels have written what ends with it.
    let unused = format!("{}// .callprototype", new_ptx());
    let unused = client.peer.module(unused.as_bytes()).expect("a module");
    let used = client.peer.module(counting_ptx().as_bytes());
    let used = used.expect("a module");
    let count = client.peer.function(used, "count").expect("its function");
    result(&mut client, count);
    for module in [unused, used] {
        let unload = Object { object: module };
        let posted = client.peer.post(Op::ImageUnload, &unload, &[]);
        posted.expect("unload");
    }
    client.peer.mem_info().expect("they are unloaded");
    let (spinner, _) = loads_elsewhere(&scene, &mut client);
    assert_eq!(result(&mut client, deep), 7);
    spinner.end(1);
}

#[test]
fn what_kernels_of_an_unloaded_image_have_left_stays_where_it_is() {
    let _alone = alone();
    let scene = Scene::new();
    // As far as its text says, its kernels may have stored addresses of its functions.
    let mut client = Loaded::connect(
        &control(&scene.place),
        &format!("{}// .callprototype", deep_ptx(8)),
    );
    let deep = client.peer.function(client.module, "deep").expect("it");
    assert_eq!(result(&mut client, deep), 7);
    client.unload();
    client.peer.mem_info().expect("it is unloaded");
    let spinner = Spinner::running(&scene);
    let loads = std::thread::spawn(move || client.peer.module(new_ptx().as_bytes()));
    wait_until("it waits", || log_has(&scene, "waits to load"));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!loads.is_finished() && !log_has(&scene, "works in context"));
    spinner.end(1);
    loads.join().expect("no panic").expect("the load");
}

#[test]
fn what_kernels_keep_stays_where_it_is() {
    let _alone = alone();
    let scene = Scene::new();
    let mut client = Loaded::connect(&control(&scene.place), &counting_ptx());
    let count = client.peer.function(client.module, "count").expect("it");
    let before = result(&mut client, count);
    let spinner = Spinner::running(&scene);
    let loads = std::thread::spawn(move || {
        client.peer.module(new_ptx().as_bytes()).expect("another");
        client
    });
    wait_until("it waits", || log_has(&scene, "waits to load"));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!loads.is_finished() && !log_has(&scene, "works in context"));
    spinner.end(1);
    let mut client = loads.join().expect("the load");
    assert!(result(&mut client, count) > before);
}

#[test]
fn a_program_with_a_variable_is_started_again_beside_a_long_kernel() {
    let _alone = alone();
    let scene = Scene::with(&[("MPSSHIM_LOG", "debug")]);
    let text = counting_ptx();
    let start = || {
        let mut client = Loaded::connect(&control(&scene.place), &text);
        let count = client.peer.function(client.module, "count").expect("it");
        [(); 3].map(|()| result(&mut client, count))
    };
    let first = start();
    wait_until("its image is kept", || {
        log_has(&scene, "an image: kept for the next client")
    });
    let spinner = Spinner::running(&scene);
    // It waits for nobody, and counts from the beginning.
    assert_eq!(start(), first);
    assert!(!log_has(&scene, "works in context"));
    assert_eq!(spinner.begun(), 1);
    spinner.end(1);
}

#[test]
fn local_memory_is_there_before_the_launch() {
    let _alone = alone();
    let scene = Scene::new();
    let mut spinner = Spinner::running(&scene);
    let control = control(&scene.place);
    let waits = std::thread::spawn(move || {
        let mut client = Loaded::connect(&control, &deep_ptx(6000));
        let deep = client.peer.function(client.module, "deep").expect("it");
        let params = client.memory.start.as_bytes().to_vec();
        let body: Launch = launch(deep, client.stream, 1, params.len());
        client
            .peer
            .post(Op::Launch, &body, &params)
            .expect("launch");
        let found = client.peer.read(client.stream, client.memory.start, 4);
        assert_eq!(found.expect("its result"), 7u32.to_le_bytes());
    });
    spinner.launch();
    std::thread::sleep(Duration::from_millis(100));
    assert!(
        !waits.is_finished(),
        "a load beside a kernel has not waited"
    );
    spinner.end(1);
    spinner.await_begun(2);
    wait_until("the newcomer has computed", || waits.is_finished());
    waits.join().expect("the newcomer");
    assert_eq!(spinner.begun(), 2);
    spinner.end(2);
}

#[test]
fn beside_long_kernels_in_two_contexts_there_is_a_third() {
    let _alone = alone();
    let scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let first = Spinner::running(&scene);
    let mut second = Spinner::with(&scene, &format!("{}// another\n", spinning_ptx()));
    assert!(log_has(&scene, "works in context 2"));
    second.launch();
    second.await_begun(1);
    let mut third = newcomer(&scene).join().expect("a newcomer");
    assert!(log_has(&scene, "works in context 3"));
    third.round().expect("a round");
    bystander.goes_on();
    // Where nothing long runs any more, newcomers need no other.
    second.end(1);
    first.end(1);
    bystander.stop();
    drop((first, second, third));
    wait_until("a newcomer works in the first context", || {
        let text = scene.place.log("server.log");
        let before = text.matches("works in context").count();
        newcomer(&scene).join().expect("a newcomer");
        let text = scene.place.log("server.log");
        text.matches("works in context").count() == before
    });
}

/// A session with a library whose kernels `fill` and `count` nobody has asked for; the library.
fn with_library(scene: &Scene, text: &str) -> (Peer, u64) {
    let mut peer = scene.peer();
    peer.attach().expect("attach");
    let mut body = peer.image_load(text.as_bytes());
    body.image = peer.handle(Kind::Library);
    let file = memory_file(text.as_bytes()).expect("a file");
    let library = peer.load(&body, &[], file.as_fd()).expect("a library");
    (peer, library)
}

#[test]
fn functions_of_another_clients_instance_are_not_ones_own() {
    let _alone = alone();
    let scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    // Kernels write a variable: each client has the library for itself. They are too many to be all asked for at once.
    let many = (0..10_000).map(|n| format!(".visible .entry k{n}() {{ ret; }}\n"));
    let many = format!(".global .u32 runs;\n{}", many.collect::<String>());
    let text = counting_ptx().replace(".global .u32 runs;\n", &many);
    let (mut first, of_first) = with_library(&scene, &text);
    let (mut second, of_second) = with_library(&scene, &text);
    first.function(of_first, "count").expect("its function");
    second.function(of_second, "stray").expect("another one");
    let spinner = Spinner::running(&scene);
    let session = second.welcome.session;
    let sets = std::thread::spawn(move || {
        let body = KernelAttribute {
            library: of_second,
            attribute: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            value: 60_000,
            device: 0,
            set: 1,
        };
        let done = second.ask_as(0, Op::KernelAttribute, &body, b"count\0");
        done.expect("an attribute");
        second
    });
    let line = format!("Context ID: {session}}} waits to load");
    wait_until("it waits", || log_has(&scene, &line));
    assert!(!sets.is_finished(), "it has not waited");
    assert_eq!(spinner.begun(), 1);
    bystander.goes_on();
    spinner.end(1);
    sets.join().expect("the attribute");
    bystander.stop();
}

#[test]
fn an_unloaded_image_counts_until_the_driver_has_its_memory() {
    let _alone = alone();
    const MIB: u64 = 1 << 20;
    let scene = Scene::new();
    // What kernels keep, and what is too large to be kept for others.
    for variable in ["big", "$str"] {
        let declared = format!(".visible .global .align 4 .b8 {variable}[671088640];\n");
        let text = new_ptx().replace(
            ".visible .entry fill",
            &format!("{declared}.visible .entry fill"),
        );
        let mut client = Loaded::connect(&control(&scene.place), &new_ptx());
        let bytes = 1024 * MIB;
        let limit = LimitMemory {
            device: 0,
            pad: 0,
            bytes,
        };
        client
            .peer
            .post(Op::LimitMemory, &limit, &[])
            .expect("a limit");
        let module = client.peer.module(text.as_bytes()).expect("a module");
        let spinner = Spinner::running(&scene);
        let unload = Object { object: module };
        client
            .peer
            .post(Op::ImageUnload, &unload, &[])
            .expect("unload");
        let refused = client.peer.memory(512 * MIB);
        assert_eq!(refused.err(), Some(CUDA_ERROR_OUT_OF_MEMORY), "{variable}");
        spinner.end(1);
        client.peer.memory(512 * MIB).expect("what was given back");
    }
}
