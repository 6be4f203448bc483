//! As many clients as a server takes, again and again: nothing is left of them, and the one too many is refused.

use crate::alone;
use mpsshim_api::cuda::CUDA_ERROR_MPS_RPC_FAILURE;
use mpsshim_proto::message::Op;
use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{raise_descriptor_limit, wait_until};
use mpsshim_tests::peer::{Peer, Worker, memset};
use mpsshim_tests::programs::{Running, client, finish, well};
use mpsshim_tests::scene::{Scene, control, daemon_with, server_with};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// What `MPSSHIM_MAX_CLIENTS` is by default.
const MOST: usize = 256;
/// Programs among them, with the shim.
const PROGRAMS: usize = 4;
/// Peers that one thread connects and has work.
const A_THREAD: usize = 21;
const ROUNDS: usize = 10;

/// Threads, and kilobytes of memory, of a process.
fn threads_and_memory(pid: u32) -> (usize, usize) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let value = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        number.unwrap_or_else(|| panic!("{name} in {status}"))
    };
    (value("Threads:"), value("VmRSS:"))
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("descriptors")
        .count()
}

/// So many clients that have worked and are there.
fn workers(scene: &Scene, count: usize) -> Vec<Worker> {
    let some = |count: usize| {
        move || -> Vec<Worker> {
            let one = |_| {
                let mut worker = Worker::connect(&control(&scene.place)).expect("there is room");
                worker.round().expect("it works");
                worker
            };
            (0..count).map(one).collect()
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .step_by(A_THREAD)
            .map(|begin| scope.spawn(some(A_THREAD.min(count - begin))))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().expect("no panic"))
            .collect()
    })
}

#[test]
fn clients_come_work_and_leave_ten_times_over() {
    let _alone = alone();
    raise_descriptor_limit();
    let mut scene = Scene::new();
    let (server, daemon) = (scene.server(), scene.place.daemon_pid());
    let (threads, _) = threads_and_memory(server);
    let mut before = None;
    for round in 0..ROUNDS {
        let mut programs: Vec<Running> = (0..PROGRAMS)
            .map(|_| Running::start_until(&mut client(&scene.place, &["idle"]), "ready"))
            .collect();
        // The observer is a client too.
        let mut all = workers(&scene, MOST - PROGRAMS - 1);
        // The last one may have its session before the daemon has read that.
        wait_until("all are listed", || {
            let pid = server.to_string();
            let listed = scene.place.control(&["get_client_list", &pid]);
            listed.out.lines().count() == MOST
        });
        let refused = Peer::connect(&control(&scene.place))
            .err()
            .expect("too many");
        assert!(refused.to_string().contains("(808)"), "{refused}");
        let refused = finish(&mut client(&scene.place, &["work", "1"]));
        let status = "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED (808)\n";
        assert_eq!((refused.code, refused.out.as_str()), (1, status));
        // They are all served on.
        for worker in all.iter_mut().step_by(16) {
            worker.round().expect("it works");
        }
        // Some leave as they came, some the other way round, programs by themselves or by force.
        let later = all.split_off(all.len() / 2);
        drop(all);
        if let Some(killed) = programs.pop() {
            killed.kill();
        }
        for program in programs {
            well(&program.finish(PATIENCE));
        }
        later.into_iter().rev().for_each(drop);

        scene.is_as_before();
        let number = scene
            .place
            .control(&["get_client_list", &server.to_string()]);
        assert_eq!(number.out, format!("{}\n", std::process::id()));
        // What is made once and kept is there after the first rounds.
        if round == 2 {
            before = Some((threads_and_memory(server).1, descriptors(daemon)));
        }
    }
    let (memory, opened) = before.expect("a third round");
    wait_until("threads have ended", || {
        threads_and_memory(server).0 <= threads
    });
    // One client takes some hundred kilobytes; 1,792 came meanwhile.
    let grown = threads_and_memory(server).1.saturating_sub(memory);
    assert!(
        grown < 16 << 10,
        "{grown} KiB more, with {memory} KiB before"
    );
    wait_until("the daemon has closed what it had", || {
        descriptors(daemon) <= opened
    });
    let log = scene.place.log("control.log");
    assert_eq!(log.matches("refused client ").count(), 2 * ROUNDS);
    assert_eq!(log.matches("Starting new server").count(), 1);
}

/// So many sessions of a dispatch thread are never parked (`CROWD` in the server's engine/scheduling/parking.rs).
const NEVER_PARKED: usize = 16;

/// Has a client send work without a pause until it is dropped.
struct Busy {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Busy {
    fn start(mut worker: Worker) -> Busy {
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                let (start, stream) = (worker.memory.start, worker.stream);
                for value in 0..200 {
                    let body = memset(start, value, 4, stream);
                    worker.peer.post(Op::Memset, &body, &[]).expect("it works");
                }
                worker.peer.finish(stream).expect("it works");
            }
        });
        Busy {
            over,
            thread: Some(thread),
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))));
    }
}

#[test]
fn quiet_clients_are_parked_and_served_all_the_same() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let server = server_with(folder.path(), "--dispatch-threads 1");
    let place = daemon_with(&[("MPSSHIM_SERVER", &server)]);
    let connect = || {
        let mut worker = Worker::connect(&control(&place)).expect("there is room");
        worker.round().expect("it works");
        worker
    };
    let mut quiet: Vec<Worker> = (0..40).map(|_| connect()).collect();
    let busy = Busy::start(connect());
    let parked = |workers: &[Worker]| {
        let asks_for_bell = |worker: &&Worker| {
            let sleeps = &worker.peer.header().server_sleeps.0;
            sleeps.load(Ordering::Relaxed) == 1
        };
        workers.iter().filter(asks_for_bell).count()
    };
    // All of them also ask for their bells while the thread sleeps.
    let all_but_some = |workers: &[Worker]| {
        wait_until("quiet clients are parked", || {
            parked(workers) == workers.len() + 1 - NEVER_PARKED
        });
    };
    for _ in 0..3 {
        all_but_some(&quiet);
        for worker in &mut quiet {
            worker.round().expect("it works");
        }
    }
    all_but_some(&quiet);
    // Some leave, and are noticed.
    quiet.truncate(30);
    let pid = quiet[0].peer.welcome.server_pid.to_string();
    wait_until("those that left are forgotten", || {
        let listed = place.control(&["get_client_list", &pid]).out;
        listed.lines().count() == quiet.len() + 1
    });
    drop(busy);
    // The end of the server is everybody's.
    let ended = place.control(&["shutdown_server", &pid, "-f"]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    for worker in &quiet {
        let status = worker.peer.await_end().expect("an end");
        assert_eq!(status, CUDA_ERROR_MPS_RPC_FAILURE);
    }
}
