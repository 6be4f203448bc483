//! Runs: launches that the server gives the driver as one graph. What comes of them is what would come of each by itself.

use mpsshim_api::cuda::*;
use mpsshim_proto::message::{Launch, Mark, Op};
use mpsshim_tests::control_daemon::Place;
use mpsshim_tests::peer::{Loaded, PTX, Peer, fill_params, launch, memset};
use mpsshim_tests::scene::{control, daemon_with};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::sync::atomic::Ordering;

/// As many launches are queued at a time.
const BURST: u32 = 40;
/// Words that a launch of one block of `fill` writes.
const WORDS: u32 = 32;

struct Client {
    on: Loaded,
    server: Pid,
}

impl Client {
    fn new(place: &Place) -> Client {
        let on = Loaded::connect(&control(place), PTX);
        let servers = place.control(&["get_server_list"]).out;
        let server = servers.trim().parse().expect("one server");
        Client {
            on,
            server: Pid::from_raw(server),
        }
    }

    /// The server stands still meanwhile, so that messages queue up.
    fn queue(&mut self, post: impl FnOnce(&mut Client)) {
        kill(self.server, Signal::SIGSTOP).expect("stop");
        post(self);
        kill(self.server, Signal::SIGCONT).expect("go on");
    }

    fn fill(&mut self, body: &Launch, to: u64, seed: u32) {
        let params = fill_params(to, seed, 1);
        self.on
            .peer
            .post(Op::Launch, body, &params)
            .expect("launch");
    }

    fn plain(&self) -> Launch {
        launch(
            self.on.function,
            self.on.stream,
            1,
            fill_params(0, 0, 0).len(),
        )
    }

    /// Many launches at once, each into the second half of what the one before it wrote, and what was written.
    fn burst(&mut self, first_seed: u32) {
        let body = self.plain();
        let half = u64::from(WORDS) / 2 * 4;
        self.queue(|client| {
            for at in 0..BURST {
                let to = client.on.memory.start + u64::from(at) * half;
                client.fill(&body, to, first_seed + at);
            }
        });
        self.on.peer.finish(self.on.stream).expect("the launches");
        let len = (BURST as usize + 1) * half as usize;
        let read = self.on.peer.read(self.on.stream, self.on.memory.start, len);
        let word = |word: u32| {
            let half = WORDS / 2;
            // Of the last launch that wrote it.
            let launch = (word / half).min(BURST - 1);
            (word - launch * half) * (first_seed + launch)
        };
        let expected = (0..(BURST + 1) * WORDS / 2).flat_map(|at| word(at).to_le_bytes());
        assert_eq!(read, Ok(expected.collect::<Vec<u8>>()));
    }
}

fn place() -> Place {
    daemon_with(&[("MPSSHIM_LOG", "debug")])
}

fn made(place: &Place) -> usize {
    place
        .log("server.log")
        .matches("a graph for runs: made")
        .count()
}

fn destroyed(place: &Place) -> usize {
    place
        .log("server.log")
        .matches("a graph for runs: destroyed")
        .count()
}

#[test]
fn launches_of_a_run_happen_in_order() {
    let place = place();
    let mut client = Client::new(&place);
    for round in 0..40 {
        client.burst(round * 100 + 1);
    }
    assert!(made(&place) > 0, "no run was launched");
    // In another stream there are other graphs.
    let before = made(&place);
    client.on.stream = client.on.peer.stream().expect("a stream");
    for round in 0..40 {
        client.burst(round * 100 + 7);
    }
    assert!(made(&place) > before);
}

#[test]
fn who_repeats_a_launch_has_it_executed_each_time() {
    let place = place();
    let mut client = Client::new(&place);
    for _ in 0..40 {
        let words = u64::from((BURST + 1) * WORDS / 2);
        let clear = memset(client.on.memory.start, 0, words, client.on.stream);
        let (peer, stream) = (&mut client.on.peer, client.on.stream);
        peer.post(Op::Memset, &clear, &[]).expect("memset");
        peer.finish(stream).expect("the memset");
        client.burst(1);
    }
    assert!(made(&place) > 0, "no run was launched");
}

#[test]
fn a_launch_that_cannot_be_is_refused_by_itself() {
    let place = place();
    let mut client = Client::new(&place);
    for round in 0..20 {
        client.burst(round + 1);
    }
    let good = client.plain();
    let mut too_large = good;
    too_large.block = [4096, 1, 1];
    let mut unknown = good;
    unknown.function ^= 1 << 20;
    for (bad, status) in [
        (too_large, CUDA_ERROR_INVALID_VALUE),
        (unknown, CUDA_ERROR_INVALID_HANDLE),
    ] {
        let first = client.on.memory.start;
        client.queue(|client| {
            for seed in 1..BURST {
                let body = if seed == BURST / 2 { &bad } else { &good };
                client.fill(body, first + u64::from(seed) * 128, seed);
            }
        });
        let (peer, stream) = (&mut client.on.peer, client.on.stream);
        assert_eq!(peer.finish(stream), Err(status));
        let last = peer.read(stream, first + u64::from(BURST - 1) * 128, 8);
        let expected = [0u32.to_le_bytes(), (BURST - 1).to_le_bytes()].concat();
        assert_eq!(last, Ok(expected), "what is behind it goes on");
    }
    // The function is as good as before.
    for round in 0..20 {
        client.burst(round + 3);
    }
}

#[test]
fn graphs_do_not_outlive_their_kernels() {
    let place = place();
    let mut client = Client::new(&place);
    for round in 0..20 {
        client.burst(round + 1);
    }
    assert!(destroyed(&place) < made(&place));
    for round in 0..5 {
        client.on.unload();
        client.on.module = client.on.peer.module(PTX.as_bytes()).expect("a module");
        assert_eq!(
            destroyed(&place),
            made(&place),
            "the kernels of the graphs have gone"
        );
        client.on.function = client
            .on
            .peer
            .function(client.on.module, "fill")
            .expect("a function");
        for burst in 0..12 {
            client.burst(round * 20 + burst + 1);
        }
    }
    drop(client);
    for _ in 0..100 {
        if destroyed(&place) == made(&place) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("graphs are left:\n{}", place.log("server.log"));
}

#[test]
fn a_mark_in_a_run_says_that_the_kernels_are_done() {
    for (kind, writer) in [("written", "operation"), ("kernel", "kernel")] {
        let settings = [("MPSSHIM_LOG", "debug"), ("MPSSHIM_MARKS", kind)];
        marks_in_runs(&daemon_with(&settings), writer);
    }
}

fn marks_in_runs(place: &Place, writer: &str) {
    let mut client = Client::new(place);
    let body = client.plain();
    for seed in 1..200u32 {
        client.queue(|client| {
            for part in 0..seed % 4 + 1 {
                client.fill(&body, client.on.memory.start + u64::from(part) * 128, seed);
            }
            let mark = Mark {
                stream: client.on.stream,
                slot: 1,
                value: seed,
            };
            client.on.peer.post(Op::Mark, &mark, &[]).expect("mark");
        });
        let peer = &mut client.on.peer;
        let written = |peer: &Peer| (peer.flag(1).load(Ordering::Acquire) == seed).then_some(());
        peer.wait(written).expect("the mark");
        let read = peer.read(client.on.stream, client.on.memory.start, 8);
        assert_eq!(read, Ok([0u32.to_le_bytes(), seed.to_le_bytes()].concat()));
    }
    let log = place.log("server.log");
    assert!(
        log.contains(&format!("mark=Some({writer:?})")),
        "no mark was in a graph:\n{log}"
    );
}

#[test]
fn a_trace_has_every_launch_of_a_run() {
    let place = place();
    let mut client = Client::new(&place);
    for round in 0..20 {
        client.burst(round + 1);
    }
    let path = place.path().join("trace.json");
    let text = path.to_str().expect("UTF-8");
    let started = place.control(&["trace", "start", text]);
    assert_eq!(started.code, 0, "{}", started.err);
    for round in 0..20 {
        client.burst(round + 1);
    }
    assert_eq!(place.control(&["trace", "stop"]).code, 0);
    let events: Vec<Value> =
        serde_json::from_str(&fs::read_to_string(&path).expect("a file")).expect("JSON");
    let submitted: Vec<f64> = events
        .iter()
        .filter(|event| event["cat"] == "submission" && event["name"] == "fill")
        .map(|event| event["ts"].as_f64().expect("a time"))
        .collect();
    assert_eq!(submitted.len(), 20 * BURST as usize);
    assert!(submitted.is_sorted(), "{submitted:?}");
    let waits = events.iter().filter(|event| event["cat"] == "wait");
    assert!(waits.count() >= 20);
}
