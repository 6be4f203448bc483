//! What the way between a client and the server costs without a GPU: the command ring, round trips over it, and waking
//! a side that sleeps. One `name=value` per line, as `benches/cuda/microbench.cu` prints.
//!
//! `transport [--quick] [--only NAME,...]`. The other side is a thread, then a process. Instructions per message are
//! counted where the kernel lets a process count its own (`perf_event_open(2)`); elsewhere, by hand:
//! `valgrind --tool=callgrind --toggle-collect='*produce_batch*' transport --only instructions`, and so for
//! `consume_batch`; divide by the number of messages that is printed.

mod instructions;
mod peer;
mod segment;

use clap::{Parser, ValueEnum};
use mpsshim_proto::shm::futex_wait;
use peer::{Peer, op};
use segment::{Segment, pause, spin};
use std::process::ExitCode;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// Bytes behind a message's header: an empty call, a launch with a few parameters, one with many, a small copy, and
/// the longest piece of a large one.
const PAYLOADS: [usize; 5] = [0, 48, 256, 4 << 10, 64 << 10];

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Throughput,
    RoundTrip,
    Wake,
    Instructions,
}

/// Measures the ring, round trips and wake-ups between two threads and two processes.
#[derive(Debug, Parser)]
struct Arguments {
    /// A hundredth of the work: whether it runs, not how fast.
    #[arg(long)]
    quick: bool,
    /// What to measure.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// The other side, started by this program itself.
    #[arg(long, hide = true)]
    peer: bool,
}

impl Arguments {
    fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
    fn rounds(&self, usual: usize) -> usize {
        if self.quick {
            (usual / 100).max(1)
        } else {
            usual
        }
    }
}

fn report(name: &str, value: f64) {
    println!("{name}={value:.1}");
}

/// Reports the median and the 99th percentile of nanoseconds.
fn report_times(name: &str, mut times: Vec<u64>) {
    times.sort_unstable();
    report(&format!("{name}_p50_ns"), times[times.len() / 2] as f64);
    let late = times.len() * 99 / 100;
    report(&format!("{name}_p99_ns"), times[late] as f64);
}

fn throughput(place: &str, peer: &mut Peer, arguments: &Arguments) {
    for payload in PAYLOADS {
        // As many bytes for each size, and no more messages than take about a second.
        let messages = ((4usize << 30) / (payload + 64)).min(5_000_000);
        let messages = arguments.rounds(messages);
        let body = vec![1u8; payload];
        let began = Instant::now();
        for _ in 0..messages {
            peer.send(op::DATA, 0, &body);
        }
        peer.drain();
        let took = began.elapsed().as_secs_f64();
        let name = format!("{place}_{payload}_bytes");
        report(&format!("{name}_messages_per_s"), messages as f64 / took);
        let bytes = (messages * payload) as f64;
        if payload > 0 {
            report(&format!("{name}_mb_per_s"), bytes / took / 1e6);
        }
    }
}

fn round_trip(place: &str, peer: &mut Peer, arguments: &Arguments) {
    let times = (0..arguments.rounds(200_000)).map(|_| {
        let began = Instant::now();
        let seen = peer.answers();
        peer.send(op::CALL, 0, &[0; 48]);
        spin(|| peer.answers() != seen);
        began.elapsed().as_nanos() as u64
    });
    report_times(&format!("{place}_round_trip"), times.collect());
}

/// From the moment before a message for a sleeping server until its thread has the message.
fn doorbell(place: &str, peer: &mut Peer, arguments: &Arguments) {
    peer.send(op::SLEEP, 1, &[]);
    let (mut rings, mut wakes) = (Vec::new(), Vec::new());
    for _ in 0..arguments.rounds(5_000) {
        spin(|| peer.sleeps());
        pause();
        let seen = peer.answers();
        let began = Instant::now();
        peer.send(op::STAMPED, segment::now(), &[]);
        rings.push(began.elapsed().as_nanos() as u64);
        spin(|| peer.answers() != seen);
        wakes.push(peer.answer());
    }
    peer.send(op::SLEEP, 0, &[]);
    peer.drain();
    report_times(&format!("{place}_doorbell_send"), rings);
    report_times(&format!("{place}_doorbell_wake"), wakes);
}

/// From the moment before the server's answer until the client's thread, which sleeps, has seen it.
fn futex(place: &str, peer: &mut Peer, arguments: &Arguments) {
    let wakes = (0..arguments.rounds(5_000)).map(|_| {
        let seen = peer.answers();
        peer.send(op::LATE, 0, &[]);
        let header = peer.header();
        while peer.answers() == seen {
            header.answer_sleeps.0.store(1, Ordering::Relaxed);
            // Partner: the peer publishes `answers`, full fence, reads `answer_sleeps`.
            fence(Ordering::SeqCst);
            futex_wait(&header.answers.0, seen, Duration::from_secs(1));
        }
        let woken = segment::now();
        header.answer_sleeps.0.store(0, Ordering::Relaxed);
        woken.saturating_sub(peer.answer())
    });
    report_times(&format!("{place}_futex_wake"), wakes.collect());
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.peer {
        return peer::serve_parent();
    }
    for place in ["thread", "process"] {
        if arguments.only == [Part::Instructions] {
            break;
        }
        let started = if place == "thread" {
            Peer::thread()
        } else {
            Peer::process()
        };
        let mut peer = match started {
            Ok(peer) => peer,
            Err(error) => {
                eprintln!("transport: cannot start the other side as a {place}: {error}");
                return ExitCode::FAILURE;
            }
        };
        if arguments.wants(Part::Throughput) {
            throughput(place, &mut peer, &arguments);
        }
        if arguments.wants(Part::RoundTrip) {
            round_trip(place, &mut peer, &arguments);
        }
        if arguments.wants(Part::Wake) {
            doorbell(place, &mut peer, &arguments);
            futex(place, &mut peer, &arguments);
        }
    }
    if arguments.wants(Part::Instructions) {
        let segment = match Segment::new() {
            Ok(segment) => segment,
            Err(error) => {
                eprintln!("transport: cannot make a segment: {error}");
                return ExitCode::FAILURE;
            }
        };
        instructions::measure(&segment, arguments.rounds(1_000));
    }
    ExitCode::SUCCESS
}
