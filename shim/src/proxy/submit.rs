//! The session: how a message gets into the ring, and how an answer comes back.
//!
//! The ring has one producer, so its lock orders the client's threads, which is the order CUDA promises them.
//! Code that changes a stream's counts (`crate::proxy::stream`) holds that lock.
//!
//! The locks are the standard library's, which allocate nothing when a thread waits for one: handlers of faults use them.

use crate::proxy::wait::LOOK_AGAIN;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, Once, OnceLock};
use std::time::{Duration, Instant};

use mpsshim_api::cuda::{
    CUDA_ERROR_ASSERT, CUDA_ERROR_MPS_RPC_FAILURE, CUDA_ERROR_NOT_INITIALIZED,
    CUDA_ERROR_OPERATING_SYSTEM, CUresult,
};
use mpsshim_proto::handshake::{DescriptorNote, LAST_WORDS};
use mpsshim_proto::message::{Object, Op};
use mpsshim_proto::ring::{Producer, Reservation};
use mpsshim_proto::segment::{
    ANSWER, ANSWER_LEN, Header, RETURNED, RingMemory, STAGING, flag_offset, state,
};
use mpsshim_proto::shm::{self, Doorbell};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::ffi::Status;
use crate::proxy::sleepers::Sleepers;
use crate::proxy::slots::Slots;
use crate::proxy::{pages, printing};
use crate::thread::{self, Requesting, locked, try_locked};

/// Messages between two checks of the socket.
const MESSAGES_PER_LOOK: u32 = 256;
/// How long a thread that was told of a lost context waits for the end of the session, which comes at the same time.
const FATE: Duration = Duration::from_secs(1);

static SESSION: OnceLock<Session> = OnceLock::new();

/// The process's session. There is one whenever a handler runs.
#[inline]
pub fn session() -> Status<&'static Session> {
    SESSION.get().ok_or(CUDA_ERROR_NOT_INITIALIZED)
}

/// Makes this the process's session; it stays for the life of the process, exit handlers included.
pub fn install(session: Session) {
    if SESSION.set(session).is_err() {
        tracing::error!("a second session was opened and is not used");
    }
}

/// One client of one server.
#[derive(Debug)]
pub struct Session {
    base: *mut u8,
    socket: OwnedFd,
    /// The process whose session it is: not a child that inherits it.
    process: u32,
    /// Last output of its kernels, if it came over the socket during another wait; arguments of
    /// [`printing::write_last`].
    last_words: Mutex<Option<(OwnedFd, u64)>>,
    /// The last output is written before any call reports that the session has ended.
    parting: Once,
    doorbell: Doorbell,
    sender: Mutex<Sender>,
    /// The express ring, which managed memory uses ([`crate::proxy::pages`]).
    express: Mutex<Producer<RingMemory>>,
    /// Held from a request to its answer: there is one answer slot.
    requests: Mutex<u64>,
    /// Status of every further call, once the server is gone; 0 before.
    failed: AtomicU32,
    /// Operations ever given to streams; written under `sender`.
    pub operations: AtomicU64,
    /// How many of them are known to be complete.
    pub quiet: AtomicU64,
    /// Completion flags.
    slots: Mutex<Slots>,
    /// Threads that wait for flags or answers.
    pub sleepers: Sleepers,
}

// SAFETY: `base` is a mapping that lives as long as the process; everything in it is reached through atomics, or
// through raw copies that a lock or the protocol orders.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

#[derive(Debug)]
struct Sender {
    producer: Producer<RingMemory>,
    messages: u32,
}

/// The answer to a request.
#[derive(Debug)]
pub struct Answer {
    /// The server's status.
    pub status: CUresult,
    /// A copy of the payload.
    pub payload: Vec<u8>,
}

impl Answer {
    /// The payload's struct, when the status is success. A shorter payload is a defect of the server.
    pub fn read<T: FromBytes>(&self) -> Status<T> {
        self.status.ok()?;
        T::read_from_prefix(&self.payload)
            .map(|(value, _)| value)
            .map_err(|_| CUDA_ERROR_MPS_RPC_FAILURE)
    }
}

impl Session {
    /// A session over a segment mapped at `base`.
    ///
    /// # Safety
    /// `base` is a mapping of a whole segment that is never unmapped, and nothing else produces into its ring.
    pub unsafe fn new(base: *mut u8, socket: OwnedFd, doorbell: Doorbell) -> Session {
        // SAFETY: the caller's promise.
        let (memory, express) = unsafe { (RingMemory::new(base), RingMemory::express(base)) };
        Session {
            base,
            socket,
            process: std::process::id(),
            last_words: Mutex::default(),
            parting: Once::new(),
            doorbell,
            sender: Mutex::new(Sender {
                producer: Producer::new(memory),
                messages: 0,
            }),
            express: Mutex::new(Producer::new(express)),
            requests: Mutex::new(0),
            failed: AtomicU32::new(0),
            operations: AtomicU64::new(0),
            quiet: AtomicU64::new(0),
            slots: Mutex::new(Slots::default()),
            sleepers: Sleepers::default(),
        }
    }

    /// The segment's first page.
    #[inline]
    pub fn header(&self) -> &Header {
        // SAFETY: the mapping lives as long as self; Header is all atomics, valid for any bytes, page aligned.
        unsafe { &*self.base.cast::<Header>() }
    }

    /// The completion flag of a slot, or one of its flags for host functions. The GPU writes it after everything
    /// before it in the stream's order.
    #[inline]
    pub fn flag(&self, flag: u32) -> &AtomicU32 {
        let offset = flag_offset(flag).expect("flags are those of slots");
        // SAFETY: inside the mapping, just checked; aligned to a word; only ever used as an atomic.
        unsafe { &*self.base.add(offset).cast::<AtomicU32>() }
    }

    fn flag_value(&self, flag: u32) -> u32 {
        // Acquire: the GPU's writes before the flag are visible.
        self.flag(flag).load(Ordering::Acquire)
    }

    /// A completion flag for one use, and the value it holds; `None`: all are in use.
    pub fn take_slot(&self) -> Option<(u32, u32)> {
        locked(&self.slots).take(|slot| self.flag_value(slot))
    }

    /// Gives back a slot whose completion flag no submitted mark will write.
    pub fn put_back_slot(&self, slot: u32) {
        locked(&self.slots).put_back(slot, self.flag_value(slot));
    }

    /// A slot may be reused once the GPU has written `value`.
    pub fn retire_slot(&self, slot: u32, value: u32) {
        locked(&self.slots).retire(slot, value);
    }

    /// Retired slots that may not be used yet, with the values to come.
    pub fn retiring_slots(&self) -> Vec<(u32, u32)> {
        locked(&self.slots).retiring(|slot| self.flag_value(slot))
    }

    /// Whether work of destroyed streams may be in flight. Does not wait: true while another thread has the slots.
    pub fn may_have_retiring(&self) -> bool {
        let slots = try_locked(&self.slots);
        slots.is_none_or(|slots| slots.any_in_flight(|slot| self.flag_value(slot)))
    }

    /// Tells that the host function of this value has returned; the server then lets its stream continue.
    pub fn host_function_returned(&self, slot: u32, value: u32) {
        self.flag(slot + RETURNED).store(value, Ordering::Release);
        // Partner: the dispatch thread, which looks at the flag after it has said that it will sleep.
        fence(Ordering::SeqCst);
        self.wake_server();
    }

    /// Rings the doorbell if the server sleeps. Comes after a full fence behind the writes that the server must see.
    #[inline]
    fn wake_server(&self) {
        if self.header().server_sleeps.0.load(Ordering::Relaxed) != 0 {
            self.ring_doorbell();
        }
    }

    /// The staging area.
    pub fn staging(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.base.add(STAGING) }
    }

    /// Fails once calls are no longer served.
    #[inline]
    pub fn check(&self) -> Status {
        if self.failed.load(Ordering::Relaxed) != 0
            || self.header().state.0.load(Ordering::Acquire) != state::LIVE
        {
            return Err(self.ended());
        }
        Ok(())
    }

    /// Checks that the server still exists. A system call.
    pub fn look(&self) -> Status {
        self.check()?;
        if shm::is_hung_up(self.socket.as_fd()) {
            return Err(self.ended());
        }
        Ok(())
    }

    /// The status of all further calls; remembered.
    #[cold]
    fn ended(&self) -> CUresult {
        let header = self.header();
        let said = match header.state.0.load(Ordering::Acquire) {
            state::LIVE => 0,
            _ => header.error.load(Ordering::Relaxed),
        };
        let status = if said == 0 {
            CUDA_ERROR_MPS_RPC_FAILURE.0
        } else {
            said
        };
        if std::process::id() == self.process {
            self.parting.call_once(|| self.pass_on_last_words());
        }
        match self
            .failed
            .compare_exchange(0, status, Ordering::Relaxed, Ordering::Relaxed)
        {
            Ok(_) => {
                tracing::error!(status = %CUresult(status), "the server no longer serves this session");
                CUresult(status)
            }
            Err(earlier) => CUresult(earlier),
        }
    }

    /// Writes the last output of this program's kernels. Nothing else comes over the socket after the session has
    /// ended.
    fn pass_on_last_words(&self) {
        let mut words = locked(&self.last_words).take();
        loop {
            let mut note = DescriptorNote::new_zeroed();
            match shm::recv_packet(self.socket.as_fd(), note.as_mut_bytes(), false) {
                Ok((len, mut descriptors)) if len != 0 => {
                    if note.token == LAST_WORDS {
                        words = descriptors.pop().map(|file| (file, note.len));
                    }
                }
                _ => break,
            }
        }
        if let Some((file, printed)) = words {
            printing::write_last(file, printed);
        }
    }

    /// The error of an earlier asynchronous command, which the call that finds it returns.
    pub fn async_error(&self) -> Status {
        let error = &self.header().posted_error;
        if error.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let status = CUresult(error.swap(0, Ordering::AcqRel));
        self.hear_out(status);
        status.ok()
    }

    /// The server has answered with this status. If it reports a failed assertion, the text is written first, which the
    /// server sends before it ends the session.
    #[inline]
    fn hear_out(&self, status: CUresult) {
        if status == CUDA_ERROR_ASSERT {
            let began = Instant::now();
            while self.check().is_ok() && began.elapsed() < FATE {
                std::thread::yield_now();
            }
        }
    }

    /// The ring, for this thread alone until the guard is dropped.
    #[inline]
    pub fn ring(&self) -> Status<Ring<'_>> {
        self.check()?;
        Ok(Ring {
            session: self,
            sender: locked(&self.sender),
        })
    }

    /// As [`Session::ring`]; `None` if another thread has it.
    ///
    /// # Errors
    /// The session's, once it has ended.
    pub fn try_ring(&self) -> Status<Option<Ring<'_>>> {
        self.check()?;
        let sender = try_locked(&self.sender);
        Ok(sender.map(|sender| Ring {
            session: self,
            sender,
        }))
    }

    /// Whether this thread may wait for the locks of a request, in the handler of a fault: not if the code that it has
    /// interrupted holds them.
    pub fn may_request(&self) -> bool {
        /// Threads hold the ring for less, unless it is full.
        const PATIENCE: Duration = Duration::from_millis(20);
        if thread::is_requesting() {
            return false;
        }
        let began = Instant::now();
        while try_locked(&self.sender).is_none() {
            if began.elapsed() > PATIENCE {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Submits an asynchronous command that belongs to no stream.
    pub fn submit<T: IntoBytes + Immutable>(&self, op: Op, body: &T) -> Status {
        self.ring()?.put(op, 0, body, &[])
    }

    /// Writes one message into the express ring; waits while that is full.
    ///
    /// # Errors
    /// The session's, once it has ended.
    pub fn put_express<T: IntoBytes + Immutable>(&self, op: Op, body: &T) -> Status {
        let mut express = locked(&self.express);
        let body = body.as_bytes();
        let mut round = 0u32;
        let room = loop {
            self.check()?;
            if let Some(room) = express.reserve(body.len()) {
                break room;
            }
            round += 1;
            self.wake_server();
            match round {
                0..1_000 => std::hint::spin_loop(),
                _ => std::thread::sleep(Duration::from_micros(20)),
            }
            if round.is_multiple_of(4096) {
                self.look()?;
            }
        };
        express.fill(room, 0, body);
        express.publish(room, op as u16, 0, 0);
        drop(express);
        self.wake_server();
        Ok(())
    }

    /// Waits until the server has executed the work given to a stream: returns the error of a captured operation.
    #[cold]
    pub fn settle(&self, stream: u64) -> Status {
        let body = Object { object: stream };
        self.request(Op::Settle, &body, &[])?.status.ok()?;
        self.async_error()
    }

    /// Wakes the server.
    pub fn ring_doorbell(&self) {
        self.doorbell.ring();
    }

    /// Sends a request and waits for its answer.
    pub fn request<T: IntoBytes + Immutable>(
        &self,
        op: Op,
        body: &T,
        trailing: &[u8],
    ) -> Status<Answer> {
        let trailing = &*pages::own(trailing);
        let _requesting = Requesting::new();
        let mut requests = locked(&self.requests);
        *requests += 1;
        self.exchange(op, 0, body, trailing)
    }

    /// As [`Session::request`], with a descriptor of `len` bytes for the server.
    pub fn request_sending<T: IntoBytes + Immutable>(
        &self,
        op: Op,
        body: &T,
        trailing: &[u8],
        descriptor: BorrowedFd<'_>,
        len: u64,
    ) -> Status<Answer> {
        let trailing = &*pages::own(trailing);
        let _requesting = Requesting::new();
        let mut requests = locked(&self.requests);
        *requests += 1;
        let note = DescriptorNote {
            token: *requests,
            len,
        };
        self.check()?;
        shm::send_packet(self.socket.as_fd(), note.as_bytes(), &[descriptor])
            .map_err(|_| self.ended())?;
        self.exchange(op, note.token, body, trailing)
    }

    /// As [`Session::request`]; a successful answer comes with a descriptor.
    pub fn request_receiving<T: IntoBytes + Immutable>(
        &self,
        op: Op,
        body: &T,
    ) -> Status<(Answer, OwnedFd)> {
        let _requesting = Requesting::new();
        let mut requests = locked(&self.requests);
        *requests += 1;
        let answer = self.exchange(op, *requests, body, &[])?;
        answer.status.ok()?;
        // An earlier server may have sent a descriptor and ended before it answered: the last one belongs to the answer.
        let mut found = None;
        loop {
            let mut note = DescriptorNote::new_zeroed();
            let packet =
                shm::recv_packet(self.socket.as_fd(), note.as_mut_bytes(), found.is_none());
            let (len, mut descriptors) = match packet {
                Ok(packet) if packet.0 != 0 => packet,
                _ => {
                    let descriptor = found.ok_or_else(|| self.ended())?;
                    return Ok((answer, descriptor));
                }
            };
            if note.token == LAST_WORDS {
                // The session has ended by now; the thread that notices it writes the output.
                *locked(&self.last_words) = descriptors.pop().map(|file| (file, note.len));
                continue;
            }
            if len != size_of::<DescriptorNote>() || note.token != *requests {
                tracing::warn!(len, token = note.token, "packet that belongs to no call");
                continue;
            }
            found = Some(descriptors.pop().ok_or(CUDA_ERROR_OPERATING_SYSTEM)?);
        }
    }

    /// The caller holds `requests`.
    fn exchange<T: IntoBytes + Immutable>(
        &self,
        op: Op,
        token: u64,
        body: &T,
        trailing: &[u8],
    ) -> Status<Answer> {
        debug_assert!(op.is_request());
        let header = self.header();
        let before = header.answers.0.load(Ordering::Acquire);
        self.ring()?.put(op, token, body, trailing)?;
        self.await_answer(before)?;
        let len = (header.answer_len.load(Ordering::Relaxed) as usize).min(ANSWER_LEN);
        let mut payload = vec![0u8; len];
        // SAFETY: `len` bytes from ANSWER on are inside the mapping; the server wrote them before it published
        // `answers` and writes the next answer only to the next request, which waits for our lock.
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.add(ANSWER), payload.as_mut_ptr(), len);
        }
        let status = CUresult(header.answer_status.load(Ordering::Relaxed));
        self.hear_out(status);
        Ok(Answer { status, payload })
    }

    fn await_answer(&self, before: u32) -> Status {
        let header = self.header();
        // Acquire: pairs with the server's release after the payload.
        let arrived = || header.answers.0.load(Ordering::Acquire) != before;
        if let Some(_awake) = self.sleepers.stay_awake()
            && self.poll_for(arrived)
        {
            return Ok(());
        }
        loop {
            header.answer_sleeps.0.store(1, Ordering::Relaxed);
            // Partner: the server publishes `answers`, full fence, reads `answer_sleeps`.
            fence(Ordering::SeqCst);
            if !arrived() {
                shm::futex_wait(&header.answers.0, before, LOOK_AGAIN);
            }
            header.answer_sleeps.0.store(0, Ordering::Relaxed);
            if arrived() {
                return Ok(());
            }
            self.look()?;
        }
    }

    /// Spins, then yields, for a short time. Returns whether the answer has arrived.
    #[inline]
    fn poll_for(&self, arrived: impl Fn() -> bool) -> bool {
        let began = Instant::now();
        let spin = if self.header().crowded.load(Ordering::Relaxed) != 0 {
            Duration::from_micros(2)
        } else {
            Duration::from_micros(20)
        };
        loop {
            for _ in 0..64 {
                if arrived() {
                    return true;
                }
                std::hint::spin_loop();
            }
            let waited = began.elapsed();
            if waited > Duration::from_micros(300) {
                return false;
            }
            if waited > spin {
                std::thread::yield_now();
            }
        }
    }
}

/// The ring, held by one thread. Dropping it rings the doorbell if the server sleeps.
#[derive(Debug)]
pub struct Ring<'a> {
    session: &'a Session,
    sender: MutexGuard<'a, Sender>,
}

impl Ring<'_> {
    /// The session.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// Bytes put into the ring since the session began.
    pub fn position(&self) -> u64 {
        self.sender.producer.position()
    }

    /// Writes one message: a struct and trailing bytes.
    #[inline]
    pub fn put<T: IntoBytes + Immutable>(
        &mut self,
        op: Op,
        token: u64,
        body: &T,
        trailing: &[u8],
    ) -> Status {
        let body = body.as_bytes();
        let room = self.reserve(body.len() + trailing.len())?;
        self.fill(room, 0, body);
        if !trailing.is_empty() {
            self.fill(room, body.len(), trailing);
        }
        self.publish(room, op, token);
        Ok(())
    }

    /// As [`Ring::put`], if the ring has room: returns whether it had.
    pub fn try_put<T: IntoBytes + Immutable>(&mut self, op: Op, body: &T, trailing: &[u8]) -> bool {
        let body = body.as_bytes();
        let Some(room) = self.sender.producer.reserve(body.len() + trailing.len()) else {
            return false;
        };
        self.fill(room, 0, body);
        self.fill(room, body.len(), trailing);
        self.publish(room, op, 0);
        true
    }

    /// Room for a message of `len` bytes, at most [`mpsshim_proto::ring::MAX_MESSAGE`]; waits while the ring is full.
    #[inline]
    pub fn reserve(&mut self, len: usize) -> Status<Reservation> {
        self.sender.messages = self.sender.messages.wrapping_add(1);
        if self.sender.messages.is_multiple_of(MESSAGES_PER_LOOK) {
            self.session.look()?;
        }
        match self.sender.producer.reserve(len) {
            Some(room) => Ok(room),
            None => self.await_room(len),
        }
    }

    #[cold]
    fn await_room(&mut self, len: usize) -> Status<Reservation> {
        let mut round = 0u32;
        loop {
            if let Some(room) = self.sender.producer.reserve(len) {
                return Ok(room);
            }
            round += 1;
            match round {
                0..1_000 => std::hint::spin_loop(),
                1_000..1_200 => std::thread::yield_now(),
                _ => {
                    self.wake_server();
                    std::thread::sleep(Duration::from_micros(50));
                    if round.is_multiple_of(100) {
                        self.session.look()?;
                    } else {
                        self.session.check()?;
                    }
                }
            }
        }
    }

    /// Fills part of a reservation.
    #[inline]
    pub fn fill(&self, room: Reservation, at: usize, bytes: &[u8]) {
        self.sender.producer.fill(room, at, bytes);
    }

    /// Publishes a filled reservation.
    #[inline]
    pub fn publish(&mut self, room: Reservation, op: Op, token: u64) {
        self.sender.producer.publish(room, op as u16, 0, token);
    }

    #[inline]
    fn wake_server(&self) {
        // `publish` ended with a full fence: either we see the mark or the server sees the message.
        self.session.wake_server();
    }
}

impl Drop for Ring<'_> {
    #[inline]
    fn drop(&mut self) {
        self.wake_server();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::fake::Fake;
    use mpsshim_proto::message::HostAlloc;
    use mpsshim_proto::shm::sealed_memfd;
    use zerocopy::FromZeros;

    /// A server has sent the first one and was killed before it answered.
    #[test]
    fn the_last_descriptor_is_the_answer_s() {
        let fake = Fake::new();
        for (token, len) in [(1, 4096), (99, 8192), (1, 12_288)] {
            let file = sealed_memfd(c"memory", len).unwrap();
            fake.send_descriptor(token, &file);
        }
        let received = std::thread::scope(|scope| {
            let request = scope.spawn(|| {
                let body = HostAlloc::new_zeroed();
                fake.session.request_receiving(Op::HostAlloc, &body)
            });
            while !request.is_finished() {
                fake.serve();
                std::thread::yield_now();
            }
            request.join().unwrap()
        });
        let (_, file) = received.expect("a descriptor");
        assert_eq!(std::fs::File::from(file).metadata().unwrap().len(), 12_288);
    }
}
