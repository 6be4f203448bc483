//! The server's side, in a thread or in a process of its own, and the client's end towards it.

use crate::segment::{Segment, now, pause, spin};
use mpsshim_proto::ring::{Consumer, Producer};
use mpsshim_proto::segment::{Header, RingMemory};
use mpsshim_proto::shm::{Doorbell, futex_wake, is_hung_up, recv_packet, send_packet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::thread::JoinHandle;

/// What the benchmark's messages ask for.
pub mod op {
    /// Nothing: bytes to take.
    pub const DATA: u16 = 16;
    /// An answer.
    pub const CALL: u16 = 17;
    /// Token 1: sleep when there is no message from now on; 0: spin.
    pub const SLEEP: u16 = 18;
    /// An answer that says how many nanoseconds ago the token was.
    pub const STAMPED: u16 = 19;
    /// An answer, once the client sleeps, that says when it was given.
    pub const LATE: u16 = 20;
    /// The end.
    pub const END: u16 = 21;
}

#[derive(Debug)]
enum Place {
    Thread(JoinHandle<()>),
    /// The process, and the socket whose end tells it that this one has gone.
    Process(Child, UnixStream),
    Ended,
}

/// The client's end.
#[derive(Debug)]
pub struct Peer {
    producer: Producer<RingMemory>,
    segment: Arc<Segment>,
    place: Place,
}

impl Peer {
    /// A server in a thread.
    ///
    /// # Errors
    /// No memory, descriptors or threads.
    pub fn thread() -> io::Result<Peer> {
        let segment = Arc::new(Segment::new()?);
        let theirs = segment.clone();
        let thread = std::thread::Builder::new().spawn(move || serve(&theirs, None))?;
        Ok(Peer::new(segment, Place::Thread(thread)))
    }

    /// A server in a process.
    ///
    /// # Errors
    /// No memory or descriptors, or this program cannot be started again.
    pub fn process() -> io::Result<Peer> {
        let segment = Arc::new(Segment::new()?);
        let (ours, theirs) = UnixStream::pair()?;
        let child = Command::new(std::env::current_exe()?)
            .arg("--peer")
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .spawn()?;
        let mut peer = Peer::new(segment, Place::Ended);
        let descriptors = [peer.segment.memory(), peer.segment.bell.fd()];
        send_packet(ours.as_fd(), b"segment", &descriptors)?;
        peer.place = Place::Process(child, ours);
        // What the process does at its start is not part of any measurement.
        let seen = peer.answers();
        peer.send(op::CALL, 0, &[]);
        peer.wait(|peer| peer.answers() != seen);
        Ok(peer)
    }

    fn new(segment: Arc<Segment>, place: Place) -> Peer {
        Peer {
            producer: Producer::new(segment.ring()),
            segment,
            place,
        }
    }

    /// # Panics
    /// When the process has ended, which it never does by itself.
    fn wait(&mut self, done: impl Fn(&Peer) -> bool) {
        let mut turns = 0u32;
        while !done(self) {
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(1024) {
                std::thread::yield_now();
                if let Place::Process(child, _) = &mut self.place {
                    let status = child.try_wait().expect("our own child");
                    assert!(status.is_none(), "the other side has ended: {status:?}");
                }
            }
        }
    }

    /// Puts a message into the ring, waiting for room, and wakes the server if it sleeps.
    #[inline]
    pub fn send(&mut self, op: u16, token: u64, payload: &[u8]) {
        let room = loop {
            if let Some(room) = self.producer.reserve(payload.len()) {
                break room;
            }
            std::thread::yield_now();
        };
        self.producer.fill(room, 0, payload);
        self.producer.publish(room, op, 0, token);
        // `publish` ends with a full fence. Partner: the server stores 1, full fence, looks for a message.
        if self.sleeps() {
            self.segment.bell.ring();
        }
    }

    /// Waits until the server has taken everything.
    pub fn drain(&mut self) {
        while !self.producer.is_drained() {
            std::thread::yield_now();
        }
    }
    /// Whether the server has said that it sleeps.
    #[inline]
    pub fn sleeps(&self) -> bool {
        self.header().server_sleeps.0.load(Ordering::Relaxed) != 0
    }
    /// The segment's header.
    pub fn header(&self) -> &Header {
        self.segment.header()
    }
    /// How often the server has answered.
    #[inline]
    pub fn answers(&self) -> u32 {
        self.segment.answers()
    }
    /// What the last answer said.
    pub fn answer(&self) -> u64 {
        self.segment.answer().load(Ordering::Relaxed)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.place, Place::Ended) {
            Place::Thread(thread) => {
                self.send(op::END, 0, &[]);
                // A panic of the thread has been printed.
                let _ = thread.join();
            }
            Place::Process(mut child, socket) => {
                self.send(op::END, 0, &[]);
                drop(socket);
                let _ = child.wait();
            }
            Place::Ended => {}
        }
    }
}

/// The server's side of a process that a [`Peer`] started, with the socket as its standard input.
pub fn serve_parent() -> ExitCode {
    let stdin = io::stdin();
    let socket = stdin.as_fd();
    let mut packet = [0; 16];
    let segment = recv_packet(socket, &mut packet, true).and_then(|(_, mut descriptors)| {
        let bell = descriptors.pop();
        let memory = descriptors.pop();
        let (Some(memory), Some(bell)) = (memory, bell) else {
            return Err(io::Error::other("no descriptors came"));
        };
        Segment::open(memory, Doorbell::from_fd(bell))
    });
    match segment {
        Ok(segment) => {
            serve(&segment, Some(socket));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("transport: no segment from the parent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Takes messages until [`op::END`], or until the client at the socket's other end has gone.
fn serve(segment: &Segment, client: Option<BorrowedFd<'_>>) {
    let mut consumer = Consumer::new(segment.ring());
    let mut payload = vec![0; mpsshim_proto::ring::MAX_MESSAGE as usize];
    let (mut may_sleep, mut idle) = (false, 0u32);
    loop {
        let Some(message) = consumer.peek().expect("our own client keeps the rules") else {
            idle = idle.wrapping_add(1);
            if idle.is_multiple_of(1024) {
                std::thread::yield_now();
            }
            if idle.is_multiple_of(1 << 20) && client.is_some_and(is_hung_up) {
                return;
            }
            if may_sleep {
                sleep(segment, &consumer);
                if client.is_some_and(is_hung_up) {
                    return;
                }
            }
            continue;
        };
        idle = 0;
        let came = if message.op == op::STAMPED { now() } else { 0 };
        assert!(consumer.copy_out(&message, 0, &mut payload[..message.len as usize]));
        consumer.consume(&message);
        match message.op {
            op::DATA => {
                std::hint::black_box(&payload);
            }
            op::CALL => answer(segment, || 0),
            op::SLEEP => may_sleep = message.token == 1,
            op::STAMPED => answer(segment, || came.saturating_sub(message.token)),
            op::LATE => {
                spin(|| segment.header().answer_sleeps.0.load(Ordering::Relaxed) != 0);
                pause();
                answer(segment, now);
            }
            _ => return,
        }
    }
}

fn answer(segment: &Segment, value: impl FnOnce() -> u64) {
    let header = segment.header();
    segment.answer().store(value(), Ordering::Relaxed);
    // Partner: the client's acquire in `answers`.
    header.answers.0.fetch_add(1, Ordering::Release);
    // Partner: the client stores 1 to `answer_sleeps`, full fence, reads `answers` (in the kernel).
    fence(Ordering::SeqCst);
    if header.answer_sleeps.0.load(Ordering::Relaxed) != 0 {
        futex_wake(&header.answers.0);
    }
}

/// Sleeps until the doorbell rings, a second at most.
fn sleep(segment: &Segment, consumer: &Consumer<RingMemory>) {
    let sleeps = &segment.header().server_sleeps.0;
    sleeps.store(1, Ordering::Relaxed);
    // Partner: the client publishes `head`, full fence, reads `server_sleeps`.
    fence(Ordering::SeqCst);
    if !consumer.has_message() {
        let mut poll = libc::pollfd {
            fd: segment.bell.fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd.
        unsafe { libc::poll(&mut poll, 1, 1000) };
    }
    sleeps.store(0, Ordering::Relaxed);
    segment.bell.silence();
}
