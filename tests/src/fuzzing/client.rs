//! A client that is fuzzed with, and what it knows to name in its messages.

use crate::fuzzing::images::SAFE;
use crate::fuzzing::message::{Draft, Gives};
use crate::peer::{Peer, Status, memory_file};
use mpsshim_api::cuda::{
    CU_STREAM_CAPTURE_STATUS_NONE, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_TIMEOUT, CUresult,
};
use mpsshim_control::seqpacket;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::array::TextureInfo;
use mpsshim_proto::message::context::{Resource, ResourceGroups};
use mpsshim_proto::message::graph::{CaptureState, GraphInstantiated, GraphNodeAdded};
use mpsshim_proto::message::memory::{IpcOpened, Opaque};
use mpsshim_proto::message::stream::EventToken;
use mpsshim_proto::message::{Mark, Object, Op, Range, Value};
use mpsshim_proto::segment::{FLAGS, reached};
use mpsshim_proto::shm;
use rand::RngExt;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Objects of a kind, ranges and the like that are remembered. Older ones are forgotten at random: they stay the server's.
const KNOWN: usize = 64;
/// Handles below are of modules and functions that may be launched ([`crate::fuzzing::images::SAFE`]).
pub const SAFE_INDICES: u32 = 16;

/// What clients of a case know of each other.
#[derive(Default)]
pub struct Common {
    /// Handles of any of them.
    pub handles: Vec<u64>,
    /// Ranges of any of them.
    pub ranges: Vec<Range>,
    /// What stands for shared memory and pointers.
    pub opaque: Vec<[u64; 8]>,
    /// Descriptors that the server has sent.
    pub descriptors: Vec<OwnedFd>,
}

fn remember<T>(list: &mut Vec<T>, item: T, rng: &mut SmallRng) {
    if list.len() < KNOWN {
        list.push(item);
    } else {
        let at = rng.random_range(0..list.len());
        list[at] = item;
    }
}

/// How a message went.
#[derive(Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is in the ring, and answered if the answer was waited for.
    Fine,
    /// The session is over.
    Ended(CUresult),
    /// No room in the ring, or no answer, for as long as was waited.
    Stuck,
}

/// One session.
pub struct Client {
    pub peer: Peer,
    live: HashMap<Kind, Vec<u64>>,
    stale: Vec<u64>,
    pub ranges: Vec<Range>,
    pub tokens: Vec<u32>,
    pub conditions: Vec<u64>,
    pub textures: Vec<u64>,
    /// Whether other sessions may write to device memory of it, or it has opened memory of others.
    pub shares_memory: bool,
    /// Whether other sessions may record events of it, or it has opened events of others.
    pub shares_events: bool,
    /// Address of memory that it does not free, although another session may have told the same address.
    pub spared: Option<u64>,
    next: u32,
    token: u64,
    /// How long a message may wait.
    patience: Duration,
    /// Waits for words that only this client writes.
    pub waits: bool,
    /// Names mostly live objects, and knows what it has in flight ([`Client::wait_for_all`]).
    correct: bool,
    /// Streams that it has created and not destroyed.
    streams: Vec<u64>,
    /// The flag in which it marks each stream.
    flags: HashMap<u64, u32>,
    /// The last value that it has given to a flag.
    marks: u32,
    /// Marks of streams that it has destroyed since.
    unawaited: Vec<(u32, u32)>,
}

/// What a stream is to a client that is about to wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Concluded {
    /// The server does not have it.
    Missing,
    /// It captures.
    Captures,
    /// This flag and value are behind all that it has been given.
    Marked(u32, u32),
}

impl Client {
    pub fn new(peer: Peer, patience: Duration) -> io::Result<Client> {
        seqpacket::set_nonblocking(&peer.socket, true)?;
        Ok(Client {
            peer,
            live: HashMap::new(),
            stale: Vec::new(),
            ranges: Vec::new(),
            tokens: Vec::new(),
            conditions: Vec::new(),
            textures: Vec::new(),
            shares_memory: false,
            shares_events: false,
            spared: None,
            next: SAFE_INDICES,
            token: 0,
            patience,
            waits: false,
            correct: false,
            streams: Vec::new(),
            flags: HashMap::new(),
            marks: 0,
            unawaited: Vec::new(),
        })
    }

    /// One that is used as by a correct program ([`crate::fuzzing::message::Rules::correct`]).
    ///
    /// # Errors
    /// Those of the socket.
    pub fn correct(peer: Peer, patience: Duration) -> io::Result<Client> {
        let mut client = Client::new(peer, patience)?;
        client.correct = true;
        Ok(client)
    }

    /// The live handles of this kind that it remembers.
    pub fn all(&self, kind: Kind) -> &[u64] {
        self.live.get(&kind).map_or(&[], Vec::as_slice)
    }

    /// A live handle of this kind, if there is one.
    pub fn own(&self, kind: Kind, rng: &mut SmallRng) -> Option<u64> {
        self.live.get(&kind)?.choose(rng).copied()
    }

    /// A handle where one of this kind is wanted: mostly a live one, else a stale or wrong one.
    pub fn handle(&self, kind: Kind, common: &Common, rng: &mut SmallRng) -> u64 {
        if self.is_right(rng) {
            return self.own(kind, rng).unwrap_or(0);
        }
        match rng.random_range(0..100) {
            0..3 => 0,
            3..8 => self.stale.choose(rng).copied().unwrap_or(0),
            8..12 => common.handles.choose(rng).copied().unwrap_or(0),
            12..14 => Handle::new(kind, rng.random(), rng.random()).0,
            14 => rng.random(),
            _ => self.own(kind, rng).unwrap_or(0),
        }
    }

    /// Whether it does not make a mistake this time.
    fn is_right(&self, rng: &mut SmallRng) -> bool {
        self.correct && !rng.random_ratio(1, 16)
    }

    /// The same where a kernel is named that is going to run: nothing but what is known to do no harm, or no kernel at all.
    pub fn kernel(&self, common: &Common, rng: &mut SmallRng) -> u64 {
        let handle = match rng.random_range(0..40) {
            0 => self.stale.choose(rng).copied().unwrap_or(0),
            1 => common.handles.choose(rng).copied().unwrap_or(0),
            _ => Handle::new(Kind::Function, 1, rng.random_range(0..2)).0,
        };
        let known = Handle(handle);
        match known.kind() {
            Some(Kind::Function | Kind::Kernel) if known.index() >= SAFE_INDICES => 0,
            _ => handle,
        }
    }

    /// A handle for a new object: mostly one that was never used.
    pub fn fresh(&mut self, kind: Kind, common: &Common, rng: &mut SmallRng) -> u64 {
        if self.is_right(rng) {
            self.next += 1;
            return Handle::new(kind, 1, self.next).0;
        }
        let index = match rng.random_range(0..100) {
            0..4 => {
                let handle = Handle(self.handle(kind, common, rng));
                if handle.index() >= SAFE_INDICES {
                    return handle.0;
                }
                u32::MAX
            }
            4 => rng.random_range(SAFE_INDICES..1 << 12),
            5 if rng.random_ratio(1, 100) => rng.random_range(SAFE_INDICES..1 << 20),
            6 => u32::MAX,
            _ => {
                self.next += 1;
                self.next
            }
        };
        let kind = match rng.random_range(0..200) {
            0 => Kind::from_u8(rng.random_range(1..26)).unwrap_or(kind),
            _ => kind,
        };
        Handle::new(kind, rng.random_range(1..4), index).0
    }

    /// Counts a handle as live.
    pub fn keep(&mut self, handle: u64, common: &mut Common, rng: &mut SmallRng) {
        let Some(kind) = Handle(handle).kind() else {
            return;
        };
        remember(self.live.entry(kind).or_default(), handle, rng);
        remember(&mut common.handles, handle, rng);
    }

    fn forget(&mut self, handle: u64, rng: &mut SmallRng) {
        if let Some(live) = Handle(handle)
            .kind()
            .and_then(|kind| self.live.get_mut(&kind))
        {
            live.retain(|known| *known != handle);
        }
        self.ranges.retain(|range| range.start != handle);
        remember(&mut self.stale, handle, rng);
    }

    /// A token for a message with a descriptor, or with one that comes back.
    pub fn token(&mut self) -> u64 {
        self.token += 1;
        self.token
    }

    /// Sends a message, waits for its answer if that tells something, and remembers what it does. The
    /// answer's status, if it was awaited.
    pub fn send(
        &mut self,
        draft: Draft,
        common: &mut Common,
        rng: &mut SmallRng,
    ) -> (Sent, Option<CUresult>) {
        self.take_descriptors(common, rng);
        if self.correct {
            match self.before(&draft) {
                Ok(true) => {}
                Ok(false) => return (Sent::Fine, None),
                Err(sent) => return (sent, None),
            }
        }
        if let Some(fd) = &draft.descriptor {
            let note = DescriptorNote {
                token: draft.token,
                len: 0,
            };
            if shm::send_packet(self.peer.socket.as_fd(), note.as_bytes(), &[fd.as_fd()]).is_err() {
                // Full, or gone: the message would be one without its descriptor.
                return match self.peer.ended() {
                    Some(status) => (Sent::Ended(status), None),
                    None => (Sent::Fine, None),
                };
            }
        }
        self.waits |= draft.waits;
        self.shares_events |= matches!(draft.op, Op::EventExport | Op::EventImport);
        let descriptors = [Op::PhysicalExport, Op::PhysicalImport, Op::RangeHandle];
        self.shares_memory |= descriptors.contains(&draft.op);
        let waits = draft.op.is_request()
            && draft.sent_as.is_none()
            && (!matches!(draft.gives, Gives::Nothing | Gives::Own(_)) || rng.random_ratio(1, 8));
        // What earlier asks are still to be answered would be taken for this one's answer.
        if waits && self.settle() == Sent::Stuck {
            return (Sent::Stuck, None);
        }
        let before = self.peer.answers();
        let number = draft.sent_as.unwrap_or(draft.op as u16);
        match self.within(|peer| {
            peer.try_put(number, draft.token, &[&draft.body])
                .then_some(())
        }) {
            Ok(()) => {}
            Err(sent) => return (sent, None),
        }
        if let Some(handle) = draft.drops {
            self.forget(handle, rng);
        }
        if !waits {
            if let Gives::Own(handle) = draft.gives {
                self.keep(handle, common, rng);
            }
            return (Sent::Fine, None);
        }
        match self.within(|peer| (peer.answers() != before).then_some(())) {
            Ok(()) => {}
            Err(sent) => return (sent, None),
        }
        let (status, payload) = self.peer.answer();
        if status.is_ok() {
            self.learn(&draft.gives, &payload, common, rng);
        }
        (Sent::Fine, Some(status))
    }

    /// Notes what a message does to streams. Returns whether it may be sent now.
    fn before(&mut self, draft: &Draft) -> Result<bool, Sent> {
        match (draft.op, &draft.gives, draft.drops) {
            (Op::StreamCreate, Gives::Own(stream), _) if !self.streams.contains(stream) => {
                self.streams.push(*stream);
            }
            (Op::StreamDestroy, _, Some(stream)) => {
                match self.conclude(stream)? {
                    Concluded::Captures => return Ok(false),
                    Concluded::Marked(slot, value) => self.unawaited.push((slot, value)),
                    Concluded::Missing => {}
                }
                self.streams.retain(|known| *known != stream);
            }
            (Op::MemRelease, _, Some(start)) => return Ok(self.spared != Some(start)),
            _ => {}
        }
        Ok(true)
    }

    /// The next value of a stream's flag, and the flag. Values of a flag only rise; the first flag is the peer's own.
    pub fn mark(&mut self, stream: u64) -> (u32, u32) {
        self.marks += 1;
        let next = 1 + self.flags.len() as u32 % (FLAGS as u32 - 1);
        (*self.flags.entry(stream).or_insert(next), self.marks)
    }

    /// Sends a request and waits for its answer's status and payload.
    ///
    /// # Errors
    /// The session's end, or no answer.
    pub fn ask(&mut self, op: Op, body: &[u8]) -> Result<(CUresult, Vec<u8>), Sent> {
        let settled = self.settle();
        if settled != Sent::Fine {
            return Err(settled);
        }
        let before = self.peer.answers();
        self.within(|peer| peer.try_put(op as u16, 0, &[body]).then_some(()))?;
        self.within(|peer| (peer.answers() != before).then_some(()))?;
        Ok(self.peer.answer())
    }

    /// Ends the capture of a stream, if it captures, and puts a mark behind all that it has been given.
    fn conclude(&mut self, stream: u64) -> Result<Concluded, Sent> {
        let named = Object { object: stream };
        for ended in [false, true] {
            let (status, state) = self.ask(Op::CaptureState, named.as_bytes())?;
            if status == CUDA_ERROR_INVALID_HANDLE {
                return Ok(Concluded::Missing);
            }
            // The state of an invalidated capture is an error.
            let state = CaptureState::read_from_prefix(&state);
            let is_free = |state: &CaptureState| state.status == CU_STREAM_CAPTURE_STATUS_NONE;
            if status.is_ok() && state.is_ok_and(|(state, _)| is_free(&state)) {
                break;
            }
            if ended {
                return Ok(Concluded::Captures);
            }
            // Only the stream that began the capture ends it.
            let _ = self.ask(Op::CaptureEnd, named.as_bytes())?;
        }
        let (slot, value) = self.mark(stream);
        let mark = Mark {
            stream,
            slot,
            value,
        };
        self.within(|peer| {
            let put = peer.try_put(Op::Mark as u16, 0, &[mark.as_bytes()]);
            put.then_some(())
        })?;
        Ok(Concluded::Marked(slot, value))
    }

    /// Waits, as `cuCtxSynchronize`, for all that a correct client has submitted. Returns whether nothing is in flight:
    /// not if a stream captures whose capture cannot be ended.
    ///
    /// # Errors
    /// The session's end, or a stream that does not finish.
    pub fn wait_for_all(&mut self) -> Result<bool, Sent> {
        let mut marks = std::mem::take(&mut self.unawaited);
        let mut captures = false;
        // A stream that has joined a capture is free once the capture's own stream has ended it.
        for _ in 0..2 {
            captures = false;
            for stream in self.streams.clone() {
                match self.conclude(stream)? {
                    Concluded::Missing => self.streams.retain(|known| *known != stream),
                    Concluded::Captures => captures = true,
                    Concluded::Marked(slot, value) => marks.push((slot, value)),
                }
            }
            if !captures {
                break;
            }
        }
        for (slot, value) in marks {
            let there = |peer: &mut Peer| reached(peer.flag(slot).load(Ordering::Acquire), value);
            self.within(|peer| there(peer).then_some(()))?;
        }
        Ok(!captures)
    }

    /// Waits until the server has taken all that there is in the ring.
    pub fn settle(&mut self) -> Sent {
        match self.within(|peer| (peer.pending() == 0).then_some(())) {
            Ok(()) => Sent::Fine,
            Err(sent) => sent,
        }
    }

    fn within<T>(&mut self, mut done: impl FnMut(&mut Peer) -> Option<T>) -> Result<T, Sent> {
        let began = Instant::now();
        let mut rounds = 0u32;
        loop {
            if let Some(found) = done(&mut self.peer) {
                return Ok(found);
            }
            if let Some(status) = self.peer.ended() {
                return Err(Sent::Ended(status));
            }
            rounds += 1;
            if rounds > 32 {
                if began.elapsed() > self.patience {
                    let flags = self.flags.values();
                    let flags = flags.map(|slot| (*slot, self.peer.flag(*slot)));
                    let flags: Vec<_> = flags.collect();
                    let pending = self.peer.pending();
                    eprintln!("stuck: {pending} bytes in the ring, flags {flags:?}");
                    return Err(Sent::Stuck);
                }
                self.peer.ring();
                std::thread::sleep(Duration::from_micros(20));
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn learn(&mut self, gives: &Gives, payload: &[u8], common: &mut Common, rng: &mut SmallRng) {
        let words = |from: usize| {
            let words = payload.get(from..).unwrap_or_default().chunks_exact(8);
            words.map(|word| u64::from_le_bytes(std::array::from_fn(|i| word[i])))
        };
        let value = || Value::read_from_prefix(payload).map_or(0, |(value, _)| value.value);
        match gives {
            Gives::Nothing => {}
            Gives::Own(handle) => self.keep(*handle, common, rng),
            Gives::Handle => self.keep(value(), common, rng),
            Gives::Handles(at) => {
                for handle in words(*at).take(64) {
                    self.keep(handle, common, rng);
                }
            }
            Gives::Node => {
                if let Ok((added, _)) = GraphNodeAdded::read_from_prefix(payload) {
                    self.keep(added.node, common, rng);
                    for graph in words(size_of::<GraphNodeAdded>()) {
                        self.keep(graph, common, rng);
                    }
                }
            }
            Gives::Instance => {
                if let Ok((made, _)) = GraphInstantiated::read_from_prefix(payload) {
                    self.keep(made.exec, common, rng);
                }
            }
            Gives::Condition => remember(&mut self.conditions, value(), rng),
            Gives::Range => {
                if let Ok((range, _)) = Range::read_from_prefix(payload) {
                    remember(&mut self.ranges, range, rng);
                    remember(&mut common.ranges, range, rng);
                }
            }
            Gives::Opened => {
                if let Ok((opened, _)) = IpcOpened::read_from_prefix(payload) {
                    self.shares_memory = true;
                    let (start, len) = (opened.start, opened.len);
                    remember(&mut self.ranges, Range { start, len }, rng);
                }
            }
            Gives::Opaque => {
                self.shares_memory = true;
                let found = Opaque::read_from_prefix(payload).map(|(found, _)| found.words);
                remember(&mut common.opaque, found.unwrap_or_default(), rng);
            }
            Gives::Event => {
                let found = EventToken::read_from_prefix(payload).map(|(found, _)| found.token);
                remember(&mut common.opaque, found.unwrap_or_default(), rng);
            }
            Gives::Texture => {
                if let Ok((texture, _)) = TextureInfo::read_from_prefix(payload) {
                    remember(&mut self.textures, texture.object, rng);
                }
            }
            Gives::Resource => {
                if let Ok((resource, _)) = Resource::read_from_prefix(payload) {
                    remember(&mut self.tokens, resource.token, rng);
                }
            }
            Gives::Groups => {
                let groups = payload.get(size_of::<ResourceGroups>()..);
                for group in groups.unwrap_or_default().chunks_exact(16).take(8) {
                    if let Ok(group) = Resource::read_from_bytes(group) {
                        remember(&mut self.tokens, group.token, rng);
                    }
                }
            }
        }
    }

    /// Takes what the server has sent over the socket.
    fn take_descriptors(&mut self, common: &mut Common, rng: &mut SmallRng) {
        if !rng.random_ratio(1, 16) {
            return;
        }
        let mut note = DescriptorNote::new_zeroed();
        while let Ok((len, descriptors)) =
            shm::recv_packet(self.peer.socket.as_fd(), note.as_mut_bytes(), false)
        {
            if len == 0 {
                return;
            }
            for descriptor in descriptors {
                remember(&mut common.descriptors, descriptor, rng);
            }
        }
    }

    /// The safe module with its functions, memory, streams and an event, as a proper client has them.
    pub fn prepare(&mut self, common: &mut Common, rng: &mut SmallRng) -> Status {
        use mpsshim_proto::message::{EventCreate, FunctionInfo, GetFunction};
        self.peer.attach()?;
        let mut body = self.peer.image_load(SAFE.as_bytes());
        body.image = Handle::new(Kind::Module, 1, 0).0;
        let content = memory_file(SAFE.as_bytes()).map_err(|_| CUDA_ERROR_TIMEOUT)?;
        let token = self.token();
        self.peer
            .send_descriptor(token, content.as_fd())
            .map_err(|_| CUDA_ERROR_TIMEOUT)?;
        self.peer.ask_as(token, Op::ImageLoad, &body, &[])?;
        self.keep(body.image, common, rng);
        for (index, name) in ["safe\0", "idle\0"].into_iter().enumerate() {
            let function = Handle::new(Kind::Function, 1, index as u32).0;
            let get = GetFunction {
                parent: body.image,
                function,
                device: 0,
                pad: 0,
            };
            self.peer
                .ask::<_, FunctionInfo>(Op::GetFunction, &get, name.as_bytes())?;
            self.keep(function, common, rng);
        }
        let memory = self.peer.memory(64 << 10)?;
        remember(&mut self.ranges, memory, rng);
        for _ in 0..2 {
            let stream = self.peer.stream()?;
            // Peer counts its handles from 1.
            self.keep(stream, common, rng);
            self.streams.push(stream);
        }
        let event = EventCreate {
            event: Handle::new(Kind::Event, 1, SAFE_INDICES).0,
            flags: 0,
            device: 0,
        };
        self.peer.post(Op::EventCreate, &event, &[])?;
        self.keep(event.event, common, rng);
        Ok(())
    }

    /// What else waits for a word of the client's gets it: flags of host functions all over the page.
    pub fn release_waits(&self, rng: &mut SmallRng) {
        use mpsshim_proto::segment::{FLAGS, RETURNED};
        for slot in 0..FLAGS as u32 {
            let value = if rng.random_ratio(1, 64) {
                rng.random()
            } else {
                1
            };
            self.peer
                .flag(slot + RETURNED)
                .store(value, std::sync::atomic::Ordering::Release);
        }
        self.peer.ring();
    }
}
