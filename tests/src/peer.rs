//! A client made by hand, as a test double: it speaks the handshake and the ring directly, so that it can break
//! every rule. What a well-behaved client does is there too ([`Worker`]), without any of the shim.

use crate::PATIENCE;
use mpsshim_api::cuda::{
    CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    CUDA_ERROR_MPS_RPC_FAILURE, CUDA_ERROR_TIMEOUT, CUresult,
};
use mpsshim_control::seqpacket;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::handshake::{
    ClientHello, DescriptorNote, MAGIC_CLIENT, PROTOCOL_VERSION, WELCOME_DESCRIPTORS, Welcome,
};
use mpsshim_proto::message::memory::{Location, PoolCreate, Properties};
use mpsshim_proto::message::{
    Attach, Copy, CopyInline, FunctionInfo, GetFunction, HostAlloc, ImageLoad, Launch, Mark,
    MemGrant, MemInfo, Memset, Object, Op, Range, Side, StreamCreate,
};
use mpsshim_proto::ring::{Memory, Producer};
use mpsshim_proto::segment::{
    ANSWER, ANSWER_LEN, Header, RING, RingMemory, SEGMENT_LEN, STAGING, STAGING_LEN, flag_offset,
    state,
};
use mpsshim_proto::shm::{self, Doorbell, Mapping, sealed_memfd};
use mpsshim_proto::wire;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// A status of the server, or of the session's end, as the error.
pub type Status<T = ()> = Result<T, CUresult>;

/// The hello of a proper client.
pub fn hello() -> ClientHello {
    ClientHello {
        magic: MAGIC_CLIENT,
        protocol: PROTOCOL_VERSION,
        table_hash: wire::fingerprint(),
        pid: std::process::id(),
        mode: 0,
        active_thread_centipercent: 0,
        priority: -1,
        ..ClientHello::new_zeroed()
    }
}

/// A welcome and the descriptors that came with it.
pub type Welcomed = (Welcome, Vec<OwnedFd>);

/// Says `hello` to the daemon behind the socket `control`. `None`: the connection was closed without a welcome.
///
/// # Errors
/// Those of the socket.
pub fn greet(control: &Path, hello: &[u8]) -> io::Result<(OwnedFd, Option<Welcomed>)> {
    let socket = seqpacket::connect(control)?;
    shm::send_packet(socket.as_fd(), hello, &[])?;
    let welcomed = await_welcome(socket.as_fd())?;
    Ok((socket, welcomed))
}

fn await_welcome(socket: BorrowedFd<'_>) -> io::Result<Option<Welcomed>> {
    let mut welcome = Welcome::new_zeroed();
    let (len, descriptors) = shm::recv_packet(socket, welcome.as_mut_bytes(), true)?;
    let whole = len == size_of::<Welcome>();
    Ok(whole.then_some((welcome, descriptors)))
}

/// A memory file with this content, sealed as the server demands.
///
/// # Errors
/// When there is no memory or no descriptor.
pub fn memory_file(content: &[u8]) -> io::Result<OwnedFd> {
    let file = File::from(sealed_memfd(c"peer", content.len() as u64)?);
    (&file).write_all(content)?;
    Ok(file.into())
}

/// A client with a session.
pub struct Peer {
    /// What the server welcomed it with.
    pub welcome: Welcome,
    /// The connection.
    pub socket: OwnedFd,
    /// The segment's descriptor, which a proper client closes once it has mapped it.
    pub segment: OwnedFd,
    mapping: Mapping,
    bell: Doorbell,
    producer: Producer<RingMemory>,
    handles: u32,
    token: u64,
    marks: u32,
    /// How long it waits for what has to come.
    pub patience: Duration,
}

impl Peer {
    /// Connects to the daemon behind the socket `control` and waits for a session.
    ///
    /// # Errors
    /// Those of the socket and the mapping; a refusal, with its status.
    pub fn connect(control: &Path) -> io::Result<Peer> {
        let (socket, answer) = greet(control, hello().as_bytes())?;
        Peer::welcomed(socket, answer)
    }

    /// Waits for a session on a connection that a server was given by other means than a daemon.
    ///
    /// # Errors
    /// As [`Peer::connect`].
    pub fn over(socket: OwnedFd) -> io::Result<Peer> {
        let answer = await_welcome(socket.as_fd())?;
        Peer::welcomed(socket, answer)
    }

    fn welcomed(socket: OwnedFd, answer: Option<Welcomed>) -> io::Result<Peer> {
        let (welcome, descriptors) =
            answer.ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionReset))?;
        if welcome.status != 0 {
            return Err(io::Error::other(CUresult(welcome.status)));
        }
        let [segment, bell]: [OwnedFd; WELCOME_DESCRIPTORS.len()] = descriptors
            .try_into()
            .map_err(|_| io::Error::other("a welcome with other descriptors"))?;
        let mapping = Mapping::new(segment.as_fd(), SEGMENT_LEN)?;
        // SAFETY: a mapping of SEGMENT_LEN bytes, which the peer keeps as long as its producer.
        let memory = unsafe { RingMemory::new(mapping.base()) };
        Ok(Peer {
            welcome,
            socket,
            segment,
            mapping,
            bell: Doorbell::from_fd(bell),
            producer: Producer::new(memory),
            handles: 0,
            token: 0,
            marks: 0,
            patience: PATIENCE,
        })
    }

    /// The segment's first page.
    pub fn header(&self) -> &Header {
        // SAFETY: the mapping has SEGMENT_LEN bytes and lives as long as self; Header is all atomics.
        unsafe { &*self.mapping.base().cast::<Header>() }
    }

    /// The completion flag of a slot, or one of its others.
    pub fn flag(&self, slot: u32) -> &AtomicU32 {
        let at = flag_offset(slot).expect("a flag");
        // SAFETY: inside the mapping, just checked, and aligned; only ever used as an atomic.
        unsafe { &*self.mapping.base().add(at).cast::<AtomicU32>() }
    }

    /// Rings the doorbell.
    pub fn ring(&self) {
        self.bell.ring();
    }

    fn read_segment(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at <= SEGMENT_LEN && len <= SEGMENT_LEN - at);
        let mut bytes = vec![0; len];
        // SAFETY: the range is inside the mapping, just checked; the server has written it before it said so.
        unsafe {
            std::ptr::copy_nonoverlapping(self.mapping.base().add(at), bytes.as_mut_ptr(), len);
        }
        bytes
    }

    /// Writes into the segment, whatever lies there.
    pub fn scribble(&self, at: usize, bytes: &[u8]) {
        assert!(at <= SEGMENT_LEN && bytes.len() <= SEGMENT_LEN - at);
        // SAFETY: the range is inside the mapping, just checked; the server copes with any bytes at any time.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.mapping.base().add(at), bytes.len());
        }
    }

    /// Writes a message's header where the next message begins, and publishes `published` bytes more.
    pub fn put_header(&mut self, len: u32, op: u16, published: u64) {
        let at = self.producer.position();
        let mut header = len.to_le_bytes().to_vec();
        header.extend_from_slice(&op.to_le_bytes());
        header.resize(16, 0);
        self.scribble(
            RING + (at % self.producer.memory().capacity()) as usize,
            &header,
        );
        self.publish_head(at.wrapping_add(published));
    }

    /// Tells the server that the ring is filled up to `head`.
    pub fn publish_head(&self, head: u64) {
        self.producer.memory().publish_head(head);
        self.bell.ring();
    }

    /// Why the session is over; `None` while it is not. A server that is gone counts as
    /// `CUDA_ERROR_MPS_RPC_FAILURE`.
    pub fn ended(&self) -> Option<CUresult> {
        let header = self.header();
        if header.state.0.load(Ordering::Acquire) != state::LIVE {
            return Some(CUresult(header.error.load(Ordering::Relaxed)));
        }
        shm::is_hung_up(self.socket.as_fd()).then_some(CUDA_ERROR_MPS_RPC_FAILURE)
    }

    /// Polls until `done` gives something, the session ends, or its patience is over.
    pub fn wait<T>(&self, mut done: impl FnMut(&Peer) -> Option<T>) -> Status<T> {
        let began = Instant::now();
        loop {
            if let Some(found) = done(self) {
                return Ok(found);
            }
            if let Some(status) = self.ended() {
                // What came just before the end still counts.
                return done(self).ok_or(status);
            }
            if began.elapsed() > self.patience {
                return Err(CUDA_ERROR_TIMEOUT);
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Waits until the server has ended the session; returns the status it ended with.
    ///
    /// # Errors
    /// `CUDA_ERROR_TIMEOUT` when it has not.
    pub fn await_end(&self) -> Status<CUresult> {
        match self.wait::<()>(|_| None) {
            Err(CUDA_ERROR_TIMEOUT) => Err(CUDA_ERROR_TIMEOUT),
            Err(status) => Ok(status),
            Ok(()) => Err(CUDA_ERROR_TIMEOUT),
        }
    }

    /// Has the server make the first device ready.
    ///
    /// # Errors
    /// The server's status.
    pub fn attach(&mut self) -> Status {
        self.ask_as(0, Op::Attach, &Attach::default(), &[])
            .map(drop)
    }

    /// Writes any message. A long one waits for room.
    ///
    /// # Errors
    /// The session's end.
    pub fn put(&mut self, op: u16, token: u64, payload: &[&[u8]]) -> Status {
        let began = Instant::now();
        while !self.try_put(op, token, payload) {
            self.bell.ring();
            if let Some(status) = self.ended() {
                return Err(status);
            }
            if began.elapsed() > self.patience {
                return Err(CUDA_ERROR_TIMEOUT);
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }

    /// Writes any message if there is room for it; whether there was.
    pub fn try_put(&mut self, op: u16, token: u64, payload: &[&[u8]]) -> bool {
        let len = payload.iter().map(|part| part.len()).sum();
        let Some(room) = self.producer.reserve(len) else {
            return false;
        };
        let mut at = 0;
        for part in payload {
            self.producer.fill(room, at, part);
            at += part.len();
        }
        self.producer.publish(room, op, 0, token);
        if self.header().server_sleeps.0.load(Ordering::Relaxed) != 0 {
            self.bell.ring();
        }
        true
    }

    /// Answers that there were since the session began, modulo 2^32.
    pub fn answers(&self) -> u32 {
        self.header().answers.0.load(Ordering::Acquire)
    }

    /// Status and payload of the last answer.
    pub fn answer(&self) -> (CUresult, Vec<u8>) {
        let header = self.header();
        let len = header.answer_len.load(Ordering::Relaxed) as usize;
        (
            CUresult(header.answer_status.load(Ordering::Relaxed)),
            self.read_segment(ANSWER, len.min(ANSWER_LEN)),
        )
    }

    /// Bytes that the client has put into the ring and the server has not taken yet.
    pub fn pending(&self) -> u64 {
        let memory = self.producer.memory();
        self.producer.position().wrapping_sub(memory.tail())
    }

    /// A message that awaits no answer.
    ///
    /// # Errors
    /// The session's end.
    pub fn post<T: IntoBytes + Immutable>(&mut self, op: Op, body: &T, behind: &[u8]) -> Status {
        self.put(op as u16, 0, &[body.as_bytes(), behind])
    }

    /// The same with a token, of which an answer may come.
    ///
    /// # Errors
    /// The session's end.
    pub fn post_as<T: IntoBytes + Immutable>(&mut self, token: u64, op: Op, body: &T) -> Status {
        self.put(op as u16, token, &[body.as_bytes()])
    }

    /// A message with this token, and its answer's status and payload.
    ///
    /// # Errors
    /// The answer's status, or the session's end.
    pub fn ask_as<T: IntoBytes + Immutable>(
        &mut self,
        token: u64,
        op: Op,
        body: &T,
        behind: &[u8],
    ) -> Status<Vec<u8>> {
        let before = self.answers();
        self.put(op as u16, token, &[body.as_bytes(), behind])?;
        self.wait(|peer| (peer.answers() != before).then_some(()))?;
        let (status, payload) = self.answer();
        status.ok()?;
        Ok(payload)
    }

    /// An ask that answers with a `R`.
    ///
    /// # Errors
    /// As [`Peer::ask_as`].
    pub fn ask<T: IntoBytes + Immutable, R: FromBytes>(
        &mut self,
        op: Op,
        body: &T,
        behind: &[u8],
    ) -> Status<R> {
        let payload = self.ask_as(0, op, body, behind)?;
        let (reply, _) = R::read_from_prefix(&payload).map_err(|_| CUDA_ERROR_MPS_RPC_FAILURE)?;
        Ok(reply)
    }

    /// Sends a descriptor ahead of the message of that token.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn send_descriptor(&self, token: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        let note = DescriptorNote { token, len: 0 };
        shm::send_packet(self.socket.as_fd(), note.as_bytes(), &[fd])
    }

    /// The first error of a post since the last call.
    pub fn posted_error(&self) -> Status {
        CUresult(self.header().posted_error.swap(0, Ordering::AcqRel)).ok()
    }

    /// A handle that was never used.
    pub fn handle(&mut self, kind: Kind) -> u64 {
        self.handles += 1;
        Handle::new(kind, 1, self.handles).0
    }

    /// A stream of the first device, ordered against no other.
    ///
    /// # Errors
    /// The session's end.
    pub fn stream(&mut self) -> Status<u64> {
        let stream = self.handle(Kind::Stream);
        let body = StreamCreate {
            stream,
            green: 0,
            legacy: 0,
            priority: 0,
            device: 0,
        };
        self.post(Op::StreamCreate, &body, &[])?;
        Ok(stream)
    }

    /// Waits until everything given to a stream is done, then for the error of a post if there was one.
    ///
    /// # Errors
    /// That error, or the session's end.
    pub fn finish(&mut self, stream: u64) -> Status {
        self.marks += 1;
        let value = self.marks;
        let mark = Mark {
            stream,
            slot: 0,
            value,
        };
        self.post(Op::Mark, &mark, &[])?;
        self.wait(|peer| (peer.flag(0).load(Ordering::Acquire) == value).then_some(()))?;
        fence(Ordering::SeqCst);
        self.posted_error()
    }

    /// Device memory of the first device.
    ///
    /// # Errors
    /// The server's status.
    pub fn memory(&mut self, len: u64) -> Status<Range> {
        let body = MemGrant {
            len,
            ..MemGrant::default()
        };
        self.ask(Op::MemGrant, &body, &[])
    }

    /// Pinned memory, and the file that the client maps.
    ///
    /// # Errors
    /// The server's status.
    ///
    /// # Panics
    /// When no descriptor comes with the answer.
    pub fn pinned(&mut self, len: u64) -> Status<(Range, OwnedFd)> {
        let body = HostAlloc {
            len,
            ..HostAlloc::default()
        };
        let range: Range = self.ask(Op::HostAlloc, &body, &[])?;
        let mut note = DescriptorNote::new_zeroed();
        let (_, mut descriptors) = shm::recv_packet(self.socket.as_fd(), note.as_mut_bytes(), true)
            .expect("its descriptor");
        Ok((range, descriptors.remove(0)))
    }

    /// A memory pool on the first device.
    ///
    /// # Errors
    /// The server's status.
    pub fn pool(&mut self) -> Status<u64> {
        self.pool_for(0)
    }

    /// A memory pool of which allocations can be exported in these kinds of handles.
    fn pool_for(&mut self, handle_types: u32) -> Status<u64> {
        let handle = self.handle(Kind::MemPool);
        let body = PoolCreate {
            handle,
            max_size: 0,
            properties: Properties {
                kind: CU_MEM_ALLOCATION_TYPE_PINNED,
                handle_types,
                location: Location { kind: 1, id: 0 },
                ..Properties::default()
            },
        };
        self.ask_as(0, Op::PoolCreate, &body, &[])?;
        Ok(handle)
    }

    /// Makes a memory pool that can be exported: from then on the session cannot be made again in another server.
    ///
    /// # Errors
    /// The server's status.
    pub fn bind(&mut self) -> Status {
        self.pool_for(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
            .map(drop)
    }

    /// Bytes free and in all on the first device.
    ///
    /// # Errors
    /// The server's status.
    pub fn mem_info(&mut self) -> Status<MemInfo> {
        self.ask(Op::MemInfo, &Attach::default(), &[])
    }

    /// What an [`Op::ImageLoad`] of `content` says, for a new module.
    pub fn image_load(&mut self, content: &[u8]) -> ImageLoad {
        ImageLoad {
            image: self.handle(Kind::Module),
            hash: Sha256::digest(content).into(),
            len: content.len() as u64,
            ..ImageLoad::default()
        }
    }

    /// Loads an image that lies in `fd`.
    ///
    /// # Errors
    /// The server's status.
    pub fn load(&mut self, body: &ImageLoad, behind: &[u8], fd: BorrowedFd<'_>) -> Status<u64> {
        self.token += 1;
        let token = self.token;
        self.send_descriptor(token, fd)
            .map_err(|_| CUDA_ERROR_MPS_RPC_FAILURE)?;
        self.ask_as(token, Op::ImageLoad, body, behind)?;
        Ok(body.image)
    }

    /// Loads a module.
    ///
    /// # Errors
    /// The server's status.
    pub fn module(&mut self, content: &[u8]) -> Status<u64> {
        let body = self.image_load(content);
        let fd = memory_file(content).map_err(|_| CUDA_ERROR_MPS_RPC_FAILURE)?;
        self.load(&body, &[], fd.as_fd())
    }

    /// A function of a module.
    ///
    /// # Errors
    /// The server's status.
    pub fn function(&mut self, module: u64, name: &str) -> Status<u64> {
        let function = self.handle(Kind::Function);
        let body = GetFunction {
            parent: module,
            function,
            device: 0,
            pad: 0,
        };
        let name = [name.as_bytes(), b"\0"].concat();
        self.ask::<_, FunctionInfo>(Op::GetFunction, &body, &name)?;
        Ok(function)
    }

    /// Copies from the device through the staging area.
    ///
    /// # Errors
    /// The error of a post, or the session's end.
    pub fn read(&mut self, stream: u64, from: u64, len: usize) -> Status<Vec<u8>> {
        assert!(len <= STAGING_LEN);
        let body = copy(Side::Staging, 0, Side::Device, from, len as u64, stream);
        self.post(Op::Copy, &body, &[])?;
        self.finish(stream)?;
        Ok(self.read_segment(STAGING, len))
    }

    /// Copies a few bytes to the device.
    ///
    /// # Errors
    /// The session's end.
    pub fn write(&mut self, stream: u64, to: u64, bytes: &[u8]) -> Status {
        let len = bytes.len() as u64;
        self.post(Op::CopyInline, &CopyInline { to, stream, len }, bytes)
    }
}

/// A session's ring, mapped once more, to change messages that the server is about to read.
pub struct PublishedRing {
    memory: RingMemory,
    _mapping: Mapping,
}

impl PublishedRing {
    /// The ring of this client.
    ///
    /// # Errors
    /// Those of the mapping.
    pub fn of(peer: &Peer) -> io::Result<PublishedRing> {
        let mapping = Mapping::new(peer.segment.as_fd(), SEGMENT_LEN)?;
        // SAFETY: a mapping of SEGMENT_LEN bytes, which is kept as long as the memory.
        let memory = unsafe { RingMemory::new(mapping.base()) };
        Ok(PublishedRing {
            memory,
            _mapping: mapping,
        })
    }

    /// Where the bytes begin and end that are published and not taken, counted from the session's beginning.
    pub fn pending(&self) -> std::ops::Range<u64> {
        self.memory.tail()..self.memory.head()
    }

    /// Flips these bits of the 32-bit word at a position, which is rounded down.
    pub fn flip(&self, position: u64, bits: u32) {
        let offset = position % self.memory.capacity() / 4 * 4;
        let word = self.memory.address(offset).cast::<AtomicU32>();
        // SAFETY: inside the mapping and aligned; the server copes with any bytes at any time.
        unsafe { &*word }.fetch_xor(bits, Ordering::Relaxed);
    }
}

/// An [`Op::Copy`].
pub fn copy(to_side: Side, to: u64, from_side: Side, from: u64, len: u64, stream: u64) -> Copy {
    Copy {
        to,
        from,
        len,
        stream,
        sides: to_side as u32 | (from_side as u32) << 8,
        pad: 0,
    }
}

/// `cuMemsetD32`.
pub fn memset(to: u64, value: u32, words: u64, stream: u64) -> Memset {
    Memset {
        to,
        stream,
        width: words,
        height: 1,
        pitch: 0,
        value,
        element: 4,
    }
}

/// `blocks` of 32 threads with `param_len` bytes of parameters.
pub fn launch(function: u64, stream: u64, blocks: u32, param_len: usize) -> Launch {
    Launch {
        function,
        stream,
        grid: [blocks, 1, 1],
        block: [32, 1, 1],
        param_len: param_len as u32,
        ..Launch::default()
    }
}

/// `fill(out, seed, rounds)`: out[i] = i * seed, added up `rounds` times. `stray(address)`: writes to that address.
pub const PTX: &str = "
.version 7.0
.target sm_70
.address_size 64

.visible .entry fill(.param .u64 out, .param .u32 seed, .param .u32 rounds)
{
    .reg .pred %p;
    .reg .b32 %r<9>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [seed];
    ld.param.u32 %r2, [rounds];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    mul.wide.u32 %rd3, %r6, 4;
    add.s64 %rd4, %rd2, %rd3;
    mov.u32 %r7, 0;
    mov.u32 %r8, 0;
again:
    mad.lo.s32 %r7, %r6, %r1, %r7;
    add.u32 %r8, %r8, 1;
    setp.lt.u32 %p, %r8, %r2;
    @%p bra again;
    st.global.u32 [%rd4], %r7;
    ret;
}

.visible .entry stray(.param .u64 address)
{
    .reg .b32 %r1;
    .reg .b64 %rd1;
    ld.param.u64 %rd1, [address];
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
";

/// [`PTX`], and a kernel `endless` that never ends.
pub fn endless_ptx() -> String {
    format!(
        "{PTX}
.visible .entry endless()
{{
again:
    bra again;
    ret;
}}
"
    )
}

/// [`PTX`] as nobody has loaded it before.
pub fn new_ptx() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("{PTX}// {} {number}\n", std::process::id())
}

/// Kernels `check(limit)`, whose threads of a number from `limit` on fail the assertion `thread < limit` of
/// `void check(unsigned)` in `assert.cu`, line 7; and `endless()`, which does not end.
pub fn asserting_ptx() -> String {
    let literal = |name: &str, text: &str| {
        let bytes: Vec<String> = text.bytes().chain([0]).map(|b| b.to_string()).collect();
        let (len, bytes) = (bytes.len(), bytes.join(", "));
        format!(".global .align 1 .b8 {name}[{len}] = {{{bytes}}};\n")
    };
    let literals = [
        literal("expression", "thread < limit"),
        literal("file", "assert.cu"),
        literal("function", "void check(unsigned)"),
    ];
    format!(
        "
.version 7.0
.target sm_70
.address_size 64
.extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
{}
.visible .entry check(.param .u32 limit)
{{
    .reg .pred %p;
    .reg .b32 %r<4>;
    .reg .b64 %rd<8>;
    ld.param.u32 %r1, [limit];
    mov.u32 %r2, %tid.x;
    setp.lt.u32 %p, %r2, %r1;
    @%p bra good;
    mov.u64 %rd1, expression;
    cvta.global.u64 %rd2, %rd1;
    mov.u64 %rd3, file;
    cvta.global.u64 %rd4, %rd3;
    mov.u64 %rd5, function;
    cvta.global.u64 %rd6, %rd5;
    mov.u32 %r3, 7;
    mov.u64 %rd7, 1;
    {{
    .param .b64 a;
    st.param.b64 [a], %rd2;
    .param .b64 b;
    st.param.b64 [b], %rd4;
    .param .b32 c;
    st.param.b32 [c], %r3;
    .param .b64 d;
    st.param.b64 [d], %rd6;
    .param .b64 e;
    st.param.b64 [e], %rd7;
    call.uni __assertfail, (a, b, c, d, e);
    }}
good:
    ret;
}}
.visible .entry endless()
{{
    .reg .pred %p;
    .reg .b32 %r1;
again:
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p, %r1, 2000;
    @%p bra again;
    ret;
}}
",
        literals.concat()
    )
}

/// [`PTX`], and a kernel `count(out)` whose threads count in a variable of the image and write how far they are.
pub fn counting_ptx() -> String {
    format!(
        "{}
.global .u32 runs;
.visible .entry count(.param .u64 out)
{{
    .reg .u64 %rd<3>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [out];
    mov.u64 %rd2, runs;
    ld.global.u32 %r1, [%rd2];
    add.u32 %r1, %r1, 1;
    st.global.u32 [%rd2], %r1;
    st.global.u32 [%rd1], %r1;
    ret;
}}
",
        new_ptx()
    )
}

/// Variables `runs`, `table` (64 bytes), `taken` that begins as 7, `link` (8 bytes) and `large` with so many bytes. Kernels
/// `count(out)`, which counts in `runs` and writes how far it is; `take(out, at)`, which writes what is at an address, and
/// counts there; `touch()`, which writes to `large`.
pub fn variables_ptx(large: usize) -> String {
    format!(
        "
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 runs;
.visible .global .align 4 .b8 table[64];
.visible .global .align 4 .u32 taken = 7;
.visible .global .align 8 .u64 link;
.visible .global .align 4 .b8 large[{large}];
.visible .entry count(.param .u64 out)
{{
    .reg .u64 %rd<3>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [out];
    mov.u64 %rd2, runs;
    ld.global.u32 %r1, [%rd2];
    add.u32 %r1, %r1, 1;
    st.global.u32 [%rd2], %r1;
    st.global.u32 [%rd1], %r1;
    ret;
}}
.visible .entry take(.param .u64 out, .param .u64 at)
{{
    .reg .u64 %rd<3>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [at];
    ld.global.u32 %r1, [%rd2];
    st.global.u32 [%rd1], %r1;
    add.u32 %r1, %r1, 1;
    st.global.u32 [%rd2], %r1;
    ret;
}}
.visible .entry touch()
{{
    .reg .u64 %rd<2>;
    .reg .u32 %r<2>;
    mov.u64 %rd1, large;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}}
"
    )
}

/// A kernel `where(out)`, each thread of which writes 1 to the word of its multiprocessor.
pub const WHERE_PTX: &str = "
.version 7.0
.target sm_70
.address_size 64

.visible .entry where(.param .u64 out)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %smid;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    mov.u32 %r2, 1;
    st.global.u32 [%rd3], %r2;
    ret;
}
";

/// Variables `weights`, with so many words, and `limits`, words 7 and 9, and no code.
pub fn data_ptx(words: usize) -> String {
    format!(
        "
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 256 .b8 weights[{}];
.visible .global .align 4 .u32 limits[2] = {{7, 9}};
",
        4 * words
    )
}

/// A kernel `take(out, at)`, which writes the word at an address to another one, and counts there. No variables.
pub fn take_ptx() -> &'static str {
    "
.version 7.0
.target sm_70
.address_size 64
.visible .entry take(.param .u64 out, .param .u64 at)
{
    .reg .u64 %rd<3>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [at];
    ld.global.u32 %r1, [%rd2];
    st.global.u32 [%rd1], %r1;
    add.u32 %r1, %r1, 1;
    st.global.u32 [%rd2], %r1;
    ret;
}
"
}

/// [`PTX`], and a kernel `deep(out)` that needs so many bytes of local memory for each thread.
pub fn deep_ptx(local: u32) -> String {
    format!(
        "{PTX}
.visible .entry deep(.param .u64 out)
{{
    .local .align 4 .b8 depot[{local}];
    .reg .u64 %rd<4>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [out];
    mov.u64 %rd2, depot;
    mov.u32 %r1, 7;
    st.local.u32 [%rd2+{last}], %r1;
    ld.local.u32 %r1, [%rd2+{last}];
    st.global.u32 [%rd1], %r1;
    ret;
}}
",
        last = local - 4
    )
}

/// [`PTX`], and a kernel `spin(words, number)`: it writes its number to the second of the words, and runs until the first is
/// as large.
pub fn spinning_ptx() -> String {
    format!(
        "{PTX}
.visible .entry spin(.param .u64 words, .param .u32 number)
{{
    .reg .u64 %rd<2>;
    .reg .u32 %r<3>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [number];
    st.volatile.global.u32 [%rd1+4], %r1;
again:
    ld.volatile.global.u32 %r2, [%rd1];
    setp.lt.u32 %p1, %r2, %r1;
    @%p1 bra again;
    ret;
}}
"
    )
}

/// Parameters of `fill`, packed.
pub fn fill_params(out: u64, seed: u32, rounds: u32) -> Vec<u8> {
    let mut params = out.to_le_bytes().to_vec();
    params.extend_from_slice(&seed.to_le_bytes());
    params.extend_from_slice(&rounds.to_le_bytes());
    params
}

/// A peer with a module, the function `fill` of it, memory and a stream.
pub struct Loaded {
    /// The peer.
    pub peer: Peer,
    /// The module.
    pub module: u64,
    /// `fill`.
    pub function: u64,
    /// 2 MiB.
    pub memory: Range,
    /// Its stream.
    pub stream: u64,
}

impl Loaded {
    /// Connects, and loads a text that has `fill`.
    ///
    /// # Panics
    /// Where the server refuses anything of it.
    pub fn connect(control: &Path, text: &str) -> Loaded {
        let mut peer = Peer::connect(control).expect("a session");
        peer.attach().expect("attach");
        let module = peer.module(text.as_bytes()).expect("a module");
        let function = peer.function(module, "fill").expect("a function");
        let memory = peer.memory(2 << 20).expect("memory");
        let stream = peer.stream().expect("a stream");
        Loaded {
            peer,
            module,
            function,
            memory,
            stream,
        }
    }

    /// Unloads the module.
    ///
    /// # Panics
    /// When the session is over.
    pub fn unload(&mut self) {
        let unload = Object {
            object: self.module,
        };
        let posted = self.peer.post(Op::ImageUnload, &unload, &[]);
        posted.expect("unload");
    }
}

/// A peer that computes and checks what comes of it.
pub struct Worker {
    /// The peer.
    pub peer: Peer,
    /// Its stream.
    pub stream: u64,
    /// `fill`.
    pub fill: u64,
    /// `stray`.
    pub stray: u64,
    /// Its memory.
    pub memory: Range,
    round: u32,
}

impl Worker {
    /// Connects, and loads [`PTX`].
    ///
    /// # Errors
    /// The refusal or the server's status.
    pub fn connect(control: &Path) -> io::Result<Worker> {
        Worker::with(Peer::connect(control)?)
    }

    /// Loads [`PTX`].
    ///
    /// # Errors
    /// The server's status.
    pub fn with(peer: Peer) -> io::Result<Worker> {
        Worker::with_text(peer, PTX)
    }

    /// Loads a text that has what [`PTX`] has.
    ///
    /// # Errors
    /// The server's status.
    pub fn with_text(mut peer: Peer, text: &str) -> io::Result<Worker> {
        let made = || -> Status<Worker> {
            peer.attach()?;
            let stream = peer.stream()?;
            let module = peer.module(text.as_bytes())?;
            let fill = peer.function(module, "fill")?;
            let stray = peer.function(module, "stray")?;
            let memory = peer.memory(1 << 20)?;
            Ok(Worker {
                peer,
                stream,
                fill,
                stray,
                memory,
                round: 0,
            })
        };
        made().map_err(io::Error::other)
    }

    /// One round: allocates, clears, launches, copies to, within and from the device, and frees.
    ///
    /// # Errors
    /// The error of a call, or the session's end.
    ///
    /// # Panics
    /// When a result is wrong.
    pub fn round(&mut self) -> Status {
        const WORDS: u32 = 1024;
        self.round += 1;
        let (round, stream, memory, bytes) = (
            self.round,
            self.stream,
            self.memory.start,
            u64::from(WORDS) * 4,
        );
        let peer = &mut self.peer;
        let extra = peer.memory(bytes)?;
        peer.post(Op::Memset, &memset(memory, !0, 2 * bytes / 4, stream), &[])?;
        let params = fill_params(memory, round, 3);
        let body = launch(self.fill, stream, WORDS / 32, params.len());
        peer.post(Op::Launch, &body, &params)?;
        let there = copy(
            Side::Device,
            extra.start,
            Side::Device,
            memory,
            bytes,
            stream,
        );
        peer.post(Op::Copy, &there, &[])?;
        peer.write(stream, extra.start, b"head")?;
        let result = peer.read(stream, extra.start, bytes as usize)?;
        for (i, word) in result.chunks_exact(4).enumerate().skip(1) {
            let found = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            let expected = (i as u32).wrapping_mul(round).wrapping_mul(3);
            assert_eq!(found, expected, "word {i} of round {round}");
        }
        assert_eq!(&result[..4], b"head");
        let beyond = peer.read(stream, memory + bytes, 4)?;
        assert_eq!(beyond, [0xff; 4], "round {round}");
        peer.post(Op::MemRelease, &extra, &[])
    }

    /// Rounds until the session ends; returns what it ended with.
    pub fn run(mut self) -> CUresult {
        loop {
            if let Err(status) = self.round() {
                return status;
            }
        }
    }
}

/// Cuts a memory file down; whether that was possible.
pub fn truncate(fd: BorrowedFd<'_>, len: i64) -> io::Result<()> {
    // SAFETY: a plain system call on a borrowed descriptor.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
