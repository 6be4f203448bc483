//! The ring and the sleeping handshakes under a model checker: every interleaving of a client and a server,
//! and every value that an atomic may return under the memory model.
//!
//!     RUSTFLAGS="--cfg loom" cargo test -p mpsshim-proto --test loom
//!
//! The ring is the very code of `ring.rs` over loom's cells. The handshakes are written out here as the shim and
//! the server have them, with a mutex and a condition variable in the place of the eventfd and the futex. Each
//! model has a twin with one ordering weakened that must fail, so that the models are known to look.

#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use mpsshim_proto::ring::{ALIGN, Consumer, Memory, Producer, Violation};

/// The ordering that a model lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Broken {
    Nothing,
    /// The head is published relaxed.
    Publish,
    /// The tail is published relaxed.
    GiveBack,
    /// There is no full fence between publishing and reading the peer's sleeping mark.
    Fence,
    /// The sleeper looks before it says that it sleeps.
    Look,
}

/// Blocks of [`ALIGN`] bytes in the model's ring.
const BLOCKS: usize = 4;

/// `segment::RingMemory` over loom's types, one cell for each [`ALIGN`] bytes: two threads at one cell at a time are
/// a torn message, and the model fails.
struct Ring {
    head: AtomicU64,
    tail: AtomicU64,
    blocks: [UnsafeCell<[u8; ALIGN as usize]>; BLOCKS],
    broken: Broken,
}

impl Ring {
    /// Calls `touch` for each piece of `len` bytes at `offset`: block, place in it, place in the bytes, length.
    fn pieces(offset: u64, len: usize, mut touch: impl FnMut(usize, usize, usize, usize)) {
        let mut done = 0;
        while done < len {
            let at = offset as usize + done;
            let place = at % ALIGN as usize;
            let piece = (ALIGN as usize - place).min(len - done);
            touch(at / ALIGN as usize, place, done, piece);
            done += piece;
        }
    }
}

#[derive(Clone)]
struct Shared(Arc<Ring>);

impl Shared {
    fn new(broken: Broken) -> Shared {
        let blocks = std::array::from_fn(|_| UnsafeCell::new([0; ALIGN as usize]));
        let (head, tail) = (AtomicU64::new(0), AtomicU64::new(0));
        Shared(Arc::new(Ring {
            head,
            tail,
            blocks,
            broken,
        }))
    }
}

impl Memory for Shared {
    fn capacity(&self) -> u64 {
        BLOCKS as u64 * u64::from(ALIGN)
    }
    fn head(&self) -> u64 {
        self.0.head.load(Ordering::Acquire)
    }
    fn publish_head(&self, head: u64) {
        match self.0.broken {
            Broken::Publish => self.0.head.store(head, Ordering::Relaxed),
            _ => self.0.head.store(head, Ordering::Release),
        }
        if self.0.broken != Broken::Fence && self.0.broken != Broken::Publish {
            fence(Ordering::SeqCst);
        }
    }
    fn tail(&self) -> u64 {
        match self.0.broken {
            Broken::GiveBack => self.0.tail.load(Ordering::Relaxed),
            _ => self.0.tail.load(Ordering::Acquire),
        }
    }
    fn publish_tail(&self, tail: u64) {
        self.0.tail.store(tail, Ordering::Release);
    }
    fn write(&self, offset: u64, bytes: &[u8]) {
        Ring::pieces(offset, bytes.len(), |block, place, at, len| {
            self.0.blocks[block].with_mut(|cell| {
                // SAFETY: loom fails the model when another thread is at this cell.
                let cell = unsafe { &mut *cell };
                cell[place..place + len].copy_from_slice(&bytes[at..at + len]);
            });
        });
    }
    fn read(&self, offset: u64, bytes: &mut [u8]) {
        Ring::pieces(offset, bytes.len(), |block, place, at, len| {
            self.0.blocks[block].with(|cell| {
                // SAFETY: as above; loom lets readers share a cell.
                let cell = unsafe { &*cell };
                bytes[at..at + len].copy_from_slice(&cell[place..place + len]);
            });
        });
    }
}

/// Payload sizes such that the second message meets a ring too short to its end (a filler), and the third a full one.
const SIZES: [usize; 3] = [16, 17, 16];

fn body(number: usize) -> Vec<u8> {
    (0..SIZES[number])
        .map(|i| (0x10 * (number + 1) + i) as u8)
        .collect()
}

fn send(producer: &mut Producer<Shared>, number: usize, mut wait: impl FnMut()) {
    let room = loop {
        match producer.reserve(SIZES[number]) {
            Some(room) => break room,
            None => wait(),
        }
    };
    producer.fill(room, 0, &body(number));
    producer.publish(room, 2, number as u16, number as u64);
}

/// The next message, checked, if there is one.
fn receive(consumer: &mut Consumer<Shared>, number: usize) -> Result<bool, Violation> {
    let Some(message) = consumer.peek()? else {
        return Ok(false);
    };
    assert_eq!((message.op, message.token), (2, number as u64), "reordered");
    let mut copy = vec![0; SIZES[number]];
    assert!(consumer.copy_out(&message, 0, &mut copy));
    assert_eq!(copy, body(number), "torn");
    consumer.consume(&message);
    Ok(true)
}

/// Checks a model with up to three preemptions a run: enough to find each weakened twin, and without a bound it
/// takes minutes.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// A client sends and a server receives, each yielding while it cannot proceed.
fn ring_model(broken: Broken) {
    check(move || {
        let ring = Shared::new(broken);
        let mut producer = Producer::new(ring.clone());
        let client = thread::spawn(move || {
            (0..SIZES.len()).for_each(|number| send(&mut producer, number, thread::yield_now));
        });
        let mut consumer = Consumer::new(ring);
        for number in 0..SIZES.len() {
            while !receive(&mut consumer, number).expect("an honest producer") {
                thread::yield_now();
            }
        }
        client.join().expect("client");
    });
}

/// An eventfd: once rung it stays rung until a thread has waited for it.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    change: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().expect("bell") = true;
        self.change.notify_all();
    }
    fn wait(&self) {
        let mut rung = self.rung.lock().expect("bell");
        while !*rung {
            rung = self.change.wait(rung).expect("bell");
        }
        *rung = false;
    }
}

/// A server that sleeps whenever the ring is empty, and a client that rings only when it sees the mark: a wake-up
/// that is lost leaves the server asleep, which loom reports as a deadlock.
fn doorbell_model(broken: Broken) {
    check(move || {
        let ring = Shared::new(broken);
        let sleeps = Arc::new(AtomicU32::new(0));
        let bell = Arc::new(Bell::default());
        let mut producer = Producer::new(ring.clone());
        let (mark, button) = (sleeps.clone(), bell.clone());
        let client = thread::spawn(move || {
            for _ in 0..2 {
                send(&mut producer, 0, || panic!("both messages fit"));
                if mark.load(Ordering::Relaxed) != 0 {
                    button.ring();
                }
            }
        });
        let mut consumer = Consumer::new(ring);
        let mut received = 0;
        while received < 2 {
            if receive(&mut consumer, 0).expect("an honest producer") {
                received += 1;
                continue;
            }
            let early = consumer.has_message();
            sleeps.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let pending = match broken {
                Broken::Look => early,
                _ => consumer.has_message(),
            };
            if !pending {
                bell.wait();
            }
            sleeps.store(0, Ordering::Relaxed);
        }
        client.join().expect("client");
    });
}

/// A session that its dispatch thread parks when it has been idle, and a client that rings only when it sees the mark.
/// After parking the thread serves other sessions and returns only for a doorbell. Between the last visit and the mark
/// the client may have posted without ringing.
fn parking_model(broken: Broken) {
    check(move || {
        let ring = Shared::new(broken);
        let sleeps = Arc::new(AtomicU32::new(0));
        let bell = Arc::new(Bell::default());
        let mut producer = Producer::new(ring.clone());
        let (mark, button) = (sleeps.clone(), bell.clone());
        let client = thread::spawn(move || {
            for _ in 0..2 {
                send(&mut producer, 0, || panic!("both messages fit"));
                if mark.load(Ordering::Relaxed) != 0 {
                    button.ring();
                }
            }
        });
        let mut consumer = Consumer::new(ring);
        let mut received = 0;
        while received < 2 {
            // A visit: all there is.
            while received < 2 && receive(&mut consumer, 0).expect("an honest producer") {
                received += 1;
            }
            if received == 2 {
                break;
            }
            // `Parked::park`.
            sleeps.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let stays = match broken {
                Broken::Look => true,
                _ => !consumer.has_message(),
            };
            if stays {
                // `Parked::take_rung`, which silences the bell.
                bell.wait();
            }
            sleeps.store(0, Ordering::Relaxed);
        }
        client.join().expect("client");
    });
}

/// A thread of the client that sleeps until a flag is written, the dispatch thread that hears its doorbell, and the
/// watcher, which parks while nothing sleeps. The sleeper looks again after 50 ms; here nothing does, so that a lost
/// wake-up is a deadlock.
fn watcher_model(broken: Broken) {
    check(move || {
        let sleeping = Arc::new(AtomicU32::new(0));
        let idle = Arc::new(AtomicU32::new(0));
        let (bell, parked) = (Arc::new(Bell::default()), Arc::new(Bell::default()));
        let (count, button) = (sleeping.clone(), bell.clone());
        let client = thread::spawn(move || {
            count.fetch_add(1, Ordering::Relaxed);
            if broken != Broken::Fence {
                fence(Ordering::SeqCst);
            }
            button.ring();
        });
        let (count, is_idle, unpark) = (sleeping.clone(), idle.clone(), parked.clone());
        let dispatch = thread::spawn(move || {
            bell.wait();
            if count.load(Ordering::Relaxed) != 0 && is_idle.load(Ordering::SeqCst) != 0 {
                unpark.ring();
            }
        });
        while sleeping.load(Ordering::Relaxed) == 0 {
            idle.store(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if broken == Broken::Look || sleeping.load(Ordering::Relaxed) == 0 {
                parked.wait();
            }
            idle.store(0, Ordering::SeqCst);
        }
        client.join().expect("client");
        dispatch.join().expect("dispatch thread");
    });
}

/// The answer slot: one word that counts answers and is slept on, the mark of the sleeper, and the payload.
struct Answers {
    answers: AtomicU32,
    sleeps: AtomicU32,
    payload: UnsafeCell<u32>,
    /// The kernel's queue of the futex `answers`.
    queue: Mutex<()>,
    wake: Condvar,
}

impl Answers {
    /// `FUTEX_WAIT`: sleeps unless the word has changed, seen under the queue's lock.
    fn futex_wait(&self, expected: u32) {
        let queue = self.queue.lock().expect("queue");
        if self.answers.load(Ordering::Relaxed) == expected {
            drop(self.wake.wait(queue).expect("queue"));
        }
    }
    fn futex_wake(&self) {
        let _queue = self.queue.lock().expect("queue");
        self.wake.notify_all();
    }
}

/// The client's `await_answer` against the server's `answer`. The shim's sleep has a time limit; here it has none,
/// so that a lost wake-up is a deadlock.
fn answer_model(broken: Broken) {
    check(move || {
        let slot = Arc::new(Answers {
            answers: AtomicU32::new(0),
            sleeps: AtomicU32::new(0),
            payload: UnsafeCell::new(0),
            queue: Mutex::new(()),
            wake: Condvar::new(),
        });
        let server = {
            let slot = slot.clone();
            thread::spawn(move || {
                slot.payload.with_mut(|payload| {
                    // SAFETY: loom fails the model when the client is at the cell.
                    unsafe { *payload = 42 }
                });
                let order = match broken {
                    Broken::Publish => Ordering::Relaxed,
                    _ => Ordering::Release,
                };
                slot.answers.fetch_add(1, order);
                if broken != Broken::Fence {
                    fence(Ordering::SeqCst);
                }
                if slot.sleeps.load(Ordering::Relaxed) != 0 {
                    slot.futex_wake();
                }
            })
        };
        let arrived = || slot.answers.load(Ordering::Acquire) != 0;
        while !arrived() {
            slot.sleeps.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if !arrived() {
                slot.futex_wait(0);
            }
            slot.sleeps.store(0, Ordering::Relaxed);
        }
        let answer = slot.payload.with(|payload| {
            // SAFETY: as above.
            unsafe { *payload }
        });
        assert_eq!(answer, 42);
        server.join().expect("server");
    });
}

#[test]
fn messages_come_out_whole_and_in_order_over_wraps() {
    ring_model(Broken::Nothing);
}

#[test]
#[should_panic]
fn a_relaxed_head_tears_messages() {
    ring_model(Broken::Publish);
}

#[test]
#[should_panic]
fn a_relaxed_tail_overwrites_what_is_being_read() {
    ring_model(Broken::GiveBack);
}

#[test]
fn a_parked_session_is_always_taken_back() {
    parking_model(Broken::Nothing);
}

#[test]
#[should_panic(expected = "deadlock")]
fn who_parks_without_looking_again_is_not_taken_back() {
    parking_model(Broken::Look);
}

#[test]
fn a_sleeping_server_is_always_woken() {
    doorbell_model(Broken::Nothing);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_fence_a_wake_up_is_lost() {
    doorbell_model(Broken::Fence);
}

#[test]
#[should_panic(expected = "deadlock")]
fn looking_before_the_mark_loses_a_wake_up() {
    doorbell_model(Broken::Look);
}

#[test]
fn the_watcher_always_learns_of_a_sleeper() {
    watcher_model(Broken::Nothing);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_watcher_that_parks_without_looking_again_misses_a_sleeper() {
    watcher_model(Broken::Look);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_fence_the_watcher_misses_a_sleeper() {
    watcher_model(Broken::Fence);
}

#[test]
fn a_sleeping_client_always_gets_its_answer() {
    answer_model(Broken::Nothing);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_fence_an_answer_is_slept_through() {
    answer_model(Broken::Fence);
}

#[test]
#[should_panic]
fn a_relaxed_answer_comes_before_its_payload() {
    answer_model(Broken::Publish);
}
