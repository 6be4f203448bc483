//! For tests: a session over a segment on the heap, in which the test acts as the server.

use std::alloc::{Layout, alloc_zeroed};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::stream::HostFunction;
use mpsshim_proto::message::{Copy, Mark, MarkEvent, Op};
use mpsshim_proto::ring::Consumer;
use mpsshim_proto::segment::{ANSWER, ARRIVED, RingMemory, SEGMENT_LEN};
use mpsshim_proto::shm::{self, Doorbell};
use parking_lot::Mutex;
use zerocopy::{FromBytes, IntoBytes};

use crate::proxy::submit::Session;

/// The server's side.
pub struct Fake {
    pub session: &'static Session,
    base: *mut u8,
    consumer: Mutex<Consumer<RingMemory>>,
    express: Mutex<Consumer<RingMemory>>,
    /// Operations received so far.
    seen: Mutex<Vec<Op>>,
    /// Marks received but not written: slot and value.
    held: Mutex<Vec<(u32, u32)>>,
    hold: AtomicBool,
    peer: Mutex<Option<OwnedFd>>,
}

// SAFETY: `base` is memory that is never freed and is reached as the protocol says.
unsafe impl Sync for Fake {}

impl Fake {
    pub fn new() -> Fake {
        let layout = Layout::from_size_align(SEGMENT_LEN, 4096).unwrap();
        // SAFETY: the layout has a size; the memory is never freed.
        let base = unsafe { alloc_zeroed(layout) };
        let mut ends = [0; 2];
        // SAFETY: two new descriptors, taken once.
        let (ours, peer) = unsafe {
            let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
            assert_eq!(
                libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()),
                0
            );
            (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
        };
        // SAFETY: the memory is a whole segment, never freed; only this session produces into it.
        let session = unsafe { Session::new(base, ours, Doorbell::new().unwrap()) };
        Fake {
            session: Box::leak(Box::new(session)),
            base,
            // SAFETY: as above.
            consumer: Mutex::new(Consumer::new(unsafe { RingMemory::new(base) })),
            // SAFETY: as above.
            express: Mutex::new(Consumer::new(unsafe { RingMemory::express(base) })),
            seen: Mutex::new(Vec::new()),
            held: Mutex::new(Vec::new()),
            hold: AtomicBool::new(false),
            peer: Mutex::new(Some(peer)),
        }
    }

    /// Takes all messages of the express ring: copies between addresses of this process, and writes the flags of marks.
    fn serve_express(&self) {
        let mut consumer = self.express.lock();
        while let Some(message) = consumer.peek().unwrap() {
            let mut body = vec![0; message.len as usize];
            assert!(consumer.copy_out(&message, 0, &mut body));
            consumer.consume(&message);
            match Op::from_u16(message.op).unwrap() {
                Op::Copy => {
                    let (copy, _) = Copy::read_from_prefix(&body).unwrap();
                    let (from, to) = (copy.from as *const u8, copy.to as *mut u8);
                    // SAFETY: the test's own memory.
                    unsafe { std::ptr::copy_nonoverlapping(from, to, copy.len as usize) };
                }
                Op::Mark => {
                    let (mark, _) = Mark::read_from_prefix(&body).unwrap();
                    self.write((mark.slot, mark.value));
                }
                other => panic!("{other:?} in the express ring"),
            }
        }
    }

    /// Sends a descriptor that belongs to the request with this number.
    pub fn send_descriptor(&self, token: u64, descriptor: &OwnedFd) {
        let note = DescriptorNote { token, len: 0 };
        let peer = self.peer.lock();
        let peer = peer.as_ref().expect("a connection").as_fd();
        shm::send_packet(peer, note.as_bytes(), &[descriptor.as_fd()]).expect("sent");
    }

    /// Takes all messages: writes the flags of marks, answers requests with success and an empty payload.
    pub fn serve(&self) {
        self.serve_express();
        let mut consumer = self.consumer.lock();
        while let Some(message) = consumer.peek().unwrap() {
            let op = Op::from_u16(message.op).unwrap();
            let mut body = vec![0; message.len as usize];
            assert!(consumer.copy_out(&message, 0, &mut body));
            consumer.consume(&message);
            self.seen.lock().push(op);
            let mark = match op {
                Op::Mark => Mark::read_from_prefix(&body)
                    .map(|(m, _)| (m.slot, m.value))
                    .ok(),
                Op::HostFunction => HostFunction::read_from_prefix(&body)
                    .map(|(m, _)| (m.slot + ARRIVED, m.value))
                    .ok(),
                Op::MarkEvent => MarkEvent::read_from_prefix(&body)
                    .map(|(m, _)| (m.slot, m.value))
                    .ok(),
                _ => None,
            };
            match mark {
                Some(mark) if self.hold.load(Ordering::Relaxed) => self.held.lock().push(mark),
                Some(mark) => self.write(mark),
                None => {}
            }
            if op.is_request() {
                self.answer(&[]);
            }
        }
    }

    fn write(&self, (slot, value): (u32, u32)) {
        self.session.flag(slot).store(value, Ordering::Release);
    }

    fn answer(&self, payload: &[u8]) {
        // SAFETY: inside the segment; the client reads it after `answers`.
        unsafe {
            std::ptr::copy_nonoverlapping(payload.as_ptr(), self.base.add(ANSWER), payload.len());
        }
        let header = self.session.header();
        header
            .answer_len
            .store(payload.len() as u32, Ordering::Relaxed);
        header.answers.0.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if header.answer_sleeps.0.load(Ordering::Relaxed) != 0 {
            shm::futex_wake(&header.answers.0);
        }
    }

    /// From now on marks are received but not written.
    pub fn hold(&self) {
        self.hold.store(true, Ordering::Relaxed);
    }

    /// Writes the marks received meanwhile, and all later ones.
    pub fn let_go(&self) {
        self.hold.store(false, Ordering::Relaxed);
        let held = std::mem::take(&mut *self.held.lock());
        for mark in held {
            self.write(mark);
        }
    }

    /// Operations received since the last call.
    pub fn seen(&self) -> Vec<Op> {
        self.serve();
        std::mem::take(&mut *self.seen.lock())
    }

    /// Runs a client's call while the server serves.
    pub fn during<R>(&self, call: impl FnOnce() -> R) -> R {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    self.serve();
                    std::thread::yield_now();
                }
            });
            let result = call();
            done.store(true, Ordering::Release);
            result
        })
    }

    /// The server's process ends.
    pub fn hang_up(&self) {
        self.peer.lock().take();
    }
}
