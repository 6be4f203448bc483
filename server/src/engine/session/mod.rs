//! A client's session on the server.

pub mod bonds;
pub mod flow;
pub mod inbox;
pub mod lasting;
pub mod objects;
pub mod portable;
pub mod quiet;
pub mod repeating;
pub mod suspension;

use crate::engine::base::account::{Account, Memory};
use crate::engine::base::description::Description;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::own_server::OwnServer;
use crate::engine::base::rations::Holder;
use crate::engine::base::side::{self, Side};
use crate::engine::base::waits::Waits;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::client_segment::Segment;
use crate::engine::objects::activity::Published;
use crate::engine::objects::fairness::Standing;
use crate::engine::objects::streams::Point;
use crate::engine::objects::suspects::Launched;
use crate::engine::objects::trace::Tracer;
use flow::Flow;
use inbox::Inbox;
use lasting::Lasting;
use mpsshim_api::cuda::*;
use mpsshim_control::closers::Stranger;
use mpsshim_model::client::ClientInfo;
use mpsshim_model::limits::{Terms, Usage};
use mpsshim_model::mode::Mode;
use mpsshim_proto::segment::{self, Header};
use mpsshim_proto::shm::{self, Doorbell};
use objects::Objects;
use parking_lot::Mutex;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use suspension::Suspension;

/// State of a session that several threads use.
#[derive(Debug)]
pub struct SessionShared {
    /// Identity of the client.
    pub info: ClientInfo,
    /// The segment.
    pub segment: Segment,
    /// Doorbell that the client rings when it has written a message while the dispatch thread sleeps.
    pub bell: Doorbell,
    /// The client's connection.
    pub socket: Stranger,
    /// The client has closed the connection, or the session is to be ended.
    pub hung_up: AtomicBool,
    /// An operator has terminated the session.
    pub terminated: AtomicBool,
    /// It is at rest and goes on in another server: this one frees its objects, and its client notices nothing.
    pub departs: AtomicBool,
    /// Number of the attempt to bring sessions to rest in which this one is not asked.
    pub excused: AtomicU64,
    /// It has work in flight, or may have: see [`Session::may_work`].
    pub at_work: AtomicBool,
    /// How long its work has been in flight, and is likely to continue, when last published; milliseconds.
    pub works_for: (AtomicU32, AtomicU32),
    /// While the session's thread is away ([`Session::go_away`]): the last point of each stream that had work in
    /// flight.
    pub left: Mutex<Option<Vec<Point>>>,
    /// The devices on which it has streams, as a bit mask of ordinals.
    pub devices: AtomicU64,
    /// Number of its [`Side`].
    pub side: AtomicU8,
    /// Whether it has shared memory with other sessions, or opened memory of others.
    pub connected: AtomicBool,
    /// Its request for a server of its own.
    pub own_server: OwnServer,
    /// Bytes it holds and may hold.
    pub account: Account,
    /// Active-thread percentage and priority it came with.
    pub terms: Terms,
    /// Its server flags.
    pub flags: Holder,
    /// Memory files that the server holds for it.
    pub held_files: Holder,
    /// Descriptors that the keeper holds for it.
    pub kept: Holder,
    /// Its share of dispatch in relation to others.
    pub standing: Standing,
    /// Activity counters, for monitoring.
    pub activity: Published,
    /// Its waits at the gate.
    pub waits: Waits,
    /// Description of the session, for the next server.
    pub description: Arc<Description>,
    /// Number of the last attempt to bring all sessions to rest in which this session came to rest.
    pub rested: AtomicU64,
    /// Number of the last such attempt in which its thread tried to bring it to rest.
    pub asked_to_rest: AtomicU64,
    /// Its latest launches, to find the cause of a fault.
    pub launched: Launched,
    /// Whether its device memory is in host memory, or is to be.
    pub suspension: Suspension,
}

impl SessionShared {
    /// A session without objects, with its doorbell and the client's connection.
    pub fn new(
        info: ClientInfo,
        segment: Segment,
        (bell, socket): (Doorbell, Stranger),
        (terms, account): (Terms, Account),
        description: Arc<Description>,
    ) -> SessionShared {
        let uid = info.uid;
        SessionShared {
            info,
            segment,
            bell,
            socket,
            hung_up: AtomicBool::new(false),
            terminated: AtomicBool::new(false),
            departs: AtomicBool::new(false),
            excused: AtomicU64::new(0),
            at_work: AtomicBool::new(false),
            works_for: Default::default(),
            left: Mutex::default(),
            devices: AtomicU64::new(0),
            side: AtomicU8::new(Side::MAIN.index() as u8),
            connected: AtomicBool::new(false),
            own_server: OwnServer::default(),
            account,
            terms,
            flags: Holder::new(uid),
            held_files: Holder::new(uid),
            kept: Holder::new(uid),
            standing: Standing::default(),
            activity: Published::default(),
            waits: Waits::default(),
            description,
            rested: AtomicU64::new(0),
            asked_to_rest: AtomicU64::new(0),
            launched: Launched::default(),
            suspension: Suspension::default(),
        }
    }

    /// Resources and limits of the client.
    pub fn usage(&self) -> Usage {
        let (launches, activity) = self.activity();
        let memory = self.account.held_of_devices();
        let level = self
            .standing
            .level_usage(|device| memory.contains_key(&device));
        Usage {
            session: self.info.session,
            threads: self.terms.threads,
            priority: self.terms.priority,
            weight: self.standing.weight(),
            moves: Some(self.suspension.usage(&memory)),
            memory,
            memory_limit: self.account.limits_of_devices(),
            memory_guarantee: self.suspension.guarantees(),
            host: self.account.held(Memory::Host),
            mode: Mode::Proxy,
            turns: None,
            launches,
            activity: Some(activity),
            device_waits: self.standing.device_waits(&level),
            level: Some(level),
            gate: Some(self.waits.usage(self.side())),
            managed: Some(self.managed_usage()),
            bonds: Some(self.description.bonds()),
            moved_out: Some(self.suspension.moved()),
        }
    }
    /// Bytes on a device that go to host memory when another session needs room: its guarantee stays.
    pub fn beyond_guarantee(&self, device: Ordinal) -> u64 {
        let held = self.account.held(Memory::Device(device));
        self.suspension.beyond_guarantee(device, held)
    }
    fn base(&self) -> *mut u8 {
        self.segment.base()
    }
    /// The segment's header.
    pub fn header(&self) -> &Header {
        self.segment.header()
    }
    /// The value of a flag: see [`Segment::flag`].
    #[inline]
    pub fn flag(&self, slot: u32) -> u32 {
        self.segment.flag(slot)
    }
    /// Ends the session for the client: all its further calls return `status`, and its sleeping threads wake up.
    pub fn end(&self, status: CUresult) {
        segment::end(self.segment.registration.mapping(), status.0);
    }
    /// Whether it is being brought to rest, or is at rest, in the present attempt; 0: there is none.
    #[inline]
    pub fn is_to_rest(&self, attempt: u64) -> bool {
        attempt != 0 && self.excused.load(Ordering::SeqCst) != attempt
    }
    /// Whether the session continues in the next server after a context was lost. Waits for that decision.
    pub fn goes_on(&self, gpu: &Gpu) -> bool {
        gpu.health.await_decision();
        self.description.may_outlive()
    }
    /// Its side of the devices.
    pub fn side(&self) -> Side {
        Side::at(self.side.load(Ordering::SeqCst).into())
    }
    /// The client's connection.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Everything that a client owns on the server. Belongs to one thread at a time: its dispatch thread, the slow lane
/// while that executes a call that may block, and finally the reaper.
#[derive(Debug)]
pub struct Session {
    /// State shared with other threads.
    pub(in crate::engine) shared: Arc<SessionShared>,
    /// Bytes it holds.
    pub(in crate::engine) account: Account,
    /// Its side of the devices.
    pub(in crate::engine) side: Side,
    /// Its messages.
    pub(in crate::engine) inbox: Inbox,
    /// Its objects.
    pub(in crate::engine) objects: Objects,
    /// Its progress.
    pub(in crate::engine) flow: Flow,
    /// State of its description.
    pub(in crate::engine) lasting: Lasting,
    /// Its part of the present trace.
    pub(in crate::engine) tracer: Option<Tracer>,
}

impl Session {
    /// A session without objects, served by dispatch thread `home`.
    pub fn new(shared: Arc<SessionShared>, home: usize) -> Session {
        let side = shared.side();
        Session {
            account: shared.account.clone(),
            inbox: Inbox::new(shared.segment.ring(), shared.segment.express()),
            objects: Objects::new(),
            flow: Flow::new(home, &shared.kept),
            lasting: Lasting::new(),
            tracer: None,
            side,
            shared,
        }
    }

    /// Makes the calling thread work for this session, on the session's side of the devices.
    #[inline]
    pub fn enter(&self) {
        side::enter(self.side);
    }

    /// Answers a request, and wakes the client if it sleeps.
    pub fn answer(&self, status: Result<(), CUresult>, payload: &[u8]) {
        let header = self.shared.header();
        let payload = &payload[..payload.len().min(segment::ANSWER_LEN)];
        // SAFETY: the answer area is inside the mapping and has ANSWER_LEN bytes; the client reads it after `answers`.
        unsafe {
            let to = self.shared.base().add(segment::ANSWER);
            std::ptr::copy_nonoverlapping(payload.as_ptr(), to, payload.len());
        }
        header
            .answer_len
            .store(payload.len() as u32, Ordering::Relaxed);
        header
            .answer_status
            .store(status.err().unwrap_or(CUDA_SUCCESS).0, Ordering::Relaxed);
        header.answers.0.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if header.answer_sleeps.0.load(Ordering::Relaxed) != 0 {
            shm::futex_wake(&header.answers.0);
        }
    }

    /// Reports the error of an asynchronous command to the client's next synchronizing call, unless an earlier error is
    /// still pending.
    pub fn post_error(&self, status: CUresult) {
        let _ = self.shared.header().posted_error.compare_exchange(
            0,
            status.0,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }

    /// Whether it may execute a command that an earlier server has executed before: memory of a pool may have been freed
    /// behind it since.
    fn runs_again(&self) -> bool {
        self.flow.repeats && self.inbox.held.is_replaying()
    }

    /// Whether `[address, address + len)` is device memory the session may name in a call: inside its own
    /// mappings, or outside the arena (globals of modules) where the driver decides.
    #[inline]
    pub fn check_device(&self, address: u64, len: u64) -> Result<(), CUresult> {
        if !mpsshim_proto::arena::is_device(address) {
            // Pinned memory may be named where device memory is expected, but only the session's own.
            if mpsshim_proto::arena::is_host(address) {
                return self.check_reachable(address, len);
            }
            if self.objects.pools.contains(address, len)
                || self.runs_again() && self.objects.pools.has_memory(address, len)
            {
                return Ok(());
            }
            if mpsshim_proto::arena::is_virtual(address) {
                return self.check_mapped(address, len);
            }
            if self.is_file(address, len) {
                return Ok(());
            }
            let global = self.objects.globals.range(..=address).next_back();
            return match global {
                Some((start, global))
                    if address - start < global.len && len <= global.len - (address - start) =>
                {
                    self.note_variable(global);
                    Ok(())
                }
                _ if self.objects.graphs.owns(address, len) => Ok(()),
                _ => Err(CUDA_ERROR_INVALID_VALUE),
            };
        }
        let end = address.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut at = address;
        loop {
            match self.objects.grants.range(..=at).next_back() {
                Some((start, grant)) if at - start < grant.len => {
                    at = start + grant.len;
                    if end <= at {
                        return Ok(());
                    }
                }
                _ if self.objects.sharing.contains(address, len) => return Ok(()),
                // Managed memory that has become host memory.
                _ if self.is_file(address, len) => return Ok(()),
                _ => return Err(CUDA_ERROR_INVALID_VALUE),
            }
        }
    }

    /// Whether `[address, address + len)` is mapped by the session, and a device may use it.
    fn check_mapped(&self, address: u64, len: u64) -> Result<(), CUresult> {
        let end = address.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut at = address;
        while let Some(next) = self.objects.virtual_memory.usable_until(at) {
            if end <= next {
                return Ok(());
            }
            at = next;
        }
        Err(CUDA_ERROR_INVALID_VALUE)
    }

    /// Whether `[address, address + len)` is inside one block of the session's pinned memory, which this process too
    /// may touch.
    #[inline]
    pub fn check_host(&self, address: u64, len: u64) -> Result<(), CUresult> {
        match self.objects.host.range(..=address).next_back() {
            Some((start, block))
                if address - start <= block.len() && len <= block.len() - (address - start) =>
            {
                Ok(())
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// Whether `[address, address + len)` is inside a registered file of the session's. Devices reach it; this
    /// process must not touch it.
    fn is_file(&self, address: u64, len: u64) -> bool {
        self.objects
            .files
            .range(..=address)
            .next_back()
            .is_some_and(|(start, file)| {
                address - start <= file.len() && len <= file.len() - (address - start)
            })
    }

    /// Whether the session may write to `address`, which is known to be its own: not inside a file registered as
    /// read-only. A device that wrote there would lose the context of all clients.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    #[inline]
    pub fn check_writable(&self, address: u64) -> Result<(), CUresult> {
        match self.objects.files.range(..=address).next_back() {
            Some((start, file)) if address - start < file.len() && !file.is_writable() => {
                Err(CUDA_ERROR_INVALID_VALUE)
            }
            _ => Ok(()),
        }
    }

    /// Whether devices reach `[address, address + len)` as the session's host memory: pinned, or of a registered file.
    #[inline]
    pub fn check_reachable(&self, address: u64, len: u64) -> Result<(), CUresult> {
        match self.check_host(address, len) {
            Err(_) if self.is_file(address, len) => Ok(()),
            other => other,
        }
    }
}
