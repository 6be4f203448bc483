//! What waits until nothing is in flight, beside clients with long kernels: against the real daemon and server, on a softgpu
//! that holds the driver's lock as the genuine one does.

mod control_daemon;
mod scene;

use control_daemon::wait_until;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::{EventCreate, EventOnStream, Launch, MarkEvent, Op};
use mpsshim_proto::shm::Mapping;
use mpsshim_tests::peer::{Loaded, PTX, Peer, Worker, deep_ptx, launch, new_ptx, spinning_ptx};
use scene::{Bystander, Scene, control};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use zerocopy::IntoBytes;

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
        let mut client = Loaded::connect(&control(&scene.place), &spinning_ptx());
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
        self.launched += 1;
        let params = [self.word.as_bytes(), self.launched.as_bytes()].concat();
        let body: Launch = launch(self.function, self.client.stream, 1, params.len());
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

/// One at a time: each has a kernel that takes a whole processor.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
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

fn log_has(scene: &Scene, text: &str) -> bool {
    scene.place.log("server.log").contains(text)
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
    spinner.end(1);
    wait_until("the newcomer has computed", || waits.is_finished());
    let rounds = bystander.stop();
    assert!(!rounds.stood_still(), "{rounds:?}");
    // What was held back goes on.
    spinner.end(3);
    spinner.await_begun(3);
    waits.join().expect("the newcomer");
}

#[test]
fn beside_a_kernel_without_end_newcomers_work_in_a_second_context() {
    let _alone = alone();
    let scene = Scene::new();
    let bystander = Bystander::start(scene.worker());
    let spinner = Spinner::running(&scene);
    let mut first = newcomer(&scene).join().expect("a newcomer");
    assert!(
        log_has(&scene, "works in a second context"),
        "nothing is said"
    );
    let mut second = newcomer(&scene).join().expect("another");
    for _ in 0..20 {
        first.round().expect("a round");
        second.round().expect("a round");
    }
    let rounds = bystander.stop();
    assert!(!rounds.stood_still(), "{rounds:?}");
    // When the way is free again, clients come to where they came before.
    spinner.end(1);
    drop((first, second));
    let moved = || {
        scene
            .place
            .log("server.log")
            .matches("second context")
            .count()
    };
    wait_until("a newcomer works in the first context", || {
        let before = moved();
        newcomer(&scene).join().expect("a newcomer");
        moved() == before
    });
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

#[test]
fn who_loads_gets_in_between_long_kernels() {
    let _alone = alone();
    let scene = Scene::new();
    let mut loads = scene.worker();
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
    assert!(!log_has(&scene, "second context"), "somebody has waited");
    assert_eq!(spinner.begun(), 1);
    spinner.end(1);
    drop(others);
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
