//! A session for unit tests of handlers, on a driver that consists of the test's functions.
//!
//! ```text
//! let mut test = Fixture::new(&[("cuMemcpyHtoDAsync_v2", fails::<{ CUDA_ERROR_OUT_OF_MEMORY.0 }> as Function)]);
//! let status = test.status(Op::CopyInline, &body, &data);
//! ```
//!
//! The function [`obeys`] fails when the test orders it, for example after it has made the objects that it needs:
//!
//! ```text
//! let mut test = Fixture::new(&[("cuEventRecordWithFlags", obeys as Function)]);
//! let event = test.event();
//! test.orders(CUDA_ERROR_NOT_SUPPORTED);
//! ```

use super::base::account::{Account, Memory};
use super::base::bounds;
use super::base::call::Incoming;
use super::base::call_error::CallError;
use super::base::description::Description;
use super::base::driver::Driver;
use super::base::keeping::Keeping;
use super::base::memory_file::MemoryFile;
use super::base::printing::Printing;
use super::calls::{self, Undone};
use super::gpu::Gpu;
use super::gpu::client_segment::Segment;
use super::gpu::devices::Devices;
use super::gpu::host::{HostArena, Registration};
use super::lasting::messages::begin_description;
use super::session::{Session, SessionShared};
use super::threads::shared::{EngineConfig, Outlets, Shared};
use crate::admission::Admission;
use crate::keeper::{self, Keeper};
use crossbeam_channel::{Receiver, unbounded};
use mpsshim_api::cuda::*;
use mpsshim_control::closers::Stranger;
use mpsshim_control::seqpacket;
use mpsshim_model::client::{ClientInfo, EngineEvent};
use mpsshim_model::host_memory::{HostMemory, Share};
use mpsshim_model::limits::{Percentage, Terms};
use mpsshim_model::policy::{LAUNCH_RUN, MarkKind};
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::graph::{CaptureBegin, GraphCreate, GraphNode};
use mpsshim_proto::message::memory::{Location, PoolAttribute, PoolCreate, Properties};
use mpsshim_proto::message::{
    CopyInline, EventCreate, GetFunction, HostAlloc, ImageLoad, MemGrant, Memset, Op, StreamCreate,
};
use mpsshim_proto::segment;
use mpsshim_proto::shm::{self, Doorbell, Mapping, sealed_memfd};
use parking_lot::{Mutex, MutexGuard};
use sha2::{Digest, Sha256};
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A function of the C ABI, of the signature of the driver's function or without the arguments: the caller cleans them up.
pub type Function = *const c_void;

/// A status that means that the context is lost.
pub const FAULT: CUresult = CUDA_ERROR_ILLEGAL_ADDRESS;

/// Addresses of pinned memory are the process's: one fixture at a time. The numbers below are that fixture's.
static ONE: Mutex<()> = Mutex::new(());
static CALLS: AtomicU32 = AtomicU32::new(0);
static HANDLES: AtomicU64 = AtomicU64::new(0x1000);
static ORDERED: AtomicU32 = AtomicU32::new(0);
static RECORDED: Mutex<Vec<[u64; 6]>> = Mutex::new(Vec::new());
/// Addresses and values that [`writes`] writes later.
static UNWRITTEN: Mutex<Vec<(u64, u32)>> = Mutex::new(Vec::new());

extern "C" fn succeeds() -> CUresult {
    CUDA_SUCCESS
}

/// Returns a status.
pub extern "C" fn fails<const STATUS: u32>() -> CUresult {
    CUresult(STATUS)
}

/// Counts its calls: see [`Fixture::calls`].
pub extern "C" fn counts() -> CUresult {
    CALLS.fetch_add(1, Ordering::Relaxed);
    CUDA_SUCCESS
}

/// Counts its calls and keeps its first arguments, as far as they are numbers or addresses: see [`Fixture::recorded`].
pub extern "C" fn records(a: u64, b: u64, c: u64, d: u64, e: u64, f: u64) -> CUresult {
    RECORDED.lock().push([a, b, c, d, e, f]);
    counts()
}

/// Writes a new handle to its first argument.
pub extern "C" fn gives_handle(to: *mut u64) -> CUresult {
    // SAFETY: the driver's functions that this stands for write a handle there.
    unsafe { to.write(HANDLES.fetch_add(0x10, Ordering::Relaxed)) };
    CUDA_SUCCESS
}

/// A memset of one word.
pub fn small_memset(to: u64, stream: u64) -> Memset {
    Memset {
        to,
        stream,
        width: 1,
        height: 1,
        element: 4,
        ..Memset::default()
    }
}

/// Returns the status that [`Fixture::orders`] named.
pub extern "C" fn obeys() -> CUresult {
    CUresult(ORDERED.load(Ordering::Relaxed))
}

/// The same; writes a new handle to its first argument if it succeeds.
pub extern "C" fn obeys_with_handle(to: *mut u64) -> CUresult {
    match obeys() {
        CUDA_SUCCESS => gives_handle(to),
        status => status,
    }
}

/// `cuStreamWriteValue32` of a device that has work in flight from [`Fixture::orders`] with an error to the one with success.
pub extern "C" fn writes(_: u64, address: u64, value: u32) -> CUresult {
    UNWRITTEN.lock().push((address, value));
    if obeys() == CUDA_SUCCESS {
        complete();
    }
    CUDA_SUCCESS
}

fn complete() {
    for (address, value) in UNWRITTEN.lock().drain(..) {
        // SAFETY: a flag of the server's or the session's, which the fixture's device knows by the same address.
        unsafe { &*(address as *const AtomicU32) }.store(value, Ordering::Release);
    }
}

/// Writes a new handle to its second argument.
extern "C" fn gives_second(_: u64, to: *mut u64) -> CUresult {
    gives_handle(to)
}

/// Writes a new handle to its fourth argument.
extern "C" fn gives_fourth(_: u64, _: u64, _: u64, to: *mut u64) -> CUresult {
    gives_handle(to)
}

/// `cuModuleGetGlobal`: a variable of 64 bytes.
extern "C" fn variable(start: *mut u64, len: *mut u64) -> CUresult {
    // SAFETY: as the driver's function.
    unsafe { len.write(64) };
    HANDLES.fetch_add(0x1000, Ordering::Relaxed);
    gives_handle(start)
}

/// `cuFuncGetParamInfo`: one parameter of 8 bytes.
extern "C" fn parameter(_: u64, index: usize, offset: *mut usize, size: *mut usize) -> CUresult {
    if index > 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: as the driver's function.
    unsafe {
        offset.write(0);
        size.write(8);
    }
    CUDA_SUCCESS
}

/// `cuMemHostGetDevicePointer`: the same address.
extern "C" fn device_pointer(device: *mut u64, host: u64) -> CUresult {
    // SAFETY: as the driver's function.
    unsafe { device.write(host) };
    CUDA_SUCCESS
}

extern "C" fn device_get(raw: *mut CUdevice, ordinal: c_int) -> CUresult {
    // SAFETY: as the driver's function.
    unsafe { raw.write(ordinal) };
    CUDA_SUCCESS
}

extern "C" fn total_mem(bytes: *mut usize, _: CUdevice) -> CUresult {
    // SAFETY: as the driver's function.
    unsafe { bytes.write(1 << 30) };
    CUDA_SUCCESS
}

extern "C" fn attribute(value: *mut c_int, _: u32, _: CUdevice) -> CUresult {
    // SAFETY: as the driver's function.
    unsafe { value.write(9) };
    CUDA_SUCCESS
}

extern "C" fn reserve(at: *mut u64, _: usize, _: usize, hint: u64, _: u64) -> CUresult {
    // SAFETY: as the driver's function.
    unsafe { at.write(hint) };
    CUDA_SUCCESS
}

extern "C" fn granularity(bytes: *mut usize, _: *const c_void, _: u32) -> CUresult {
    // SAFETY: as the driver's function.
    unsafe { bytes.write(2 << 20) };
    CUDA_SUCCESS
}

/// A driver of these functions. All others succeed without effect, or return a new handle if they create an object.
fn driver(functions: &[(&'static str, Function)]) -> Driver {
    let find = |name: &str| -> *mut c_void {
        if let Some((_, function)) = functions.iter().find(|(known, _)| *known == name) {
            return *function as *mut c_void;
        }
        match name {
            "cuDeviceTotalMem_v2" => total_mem as *mut c_void,
            "cuDeviceGetAttribute" => attribute as *mut c_void,
            "cuMemAddressReserve" => reserve as *mut c_void,
            "cuMemGetAllocationGranularity" => granularity as *mut c_void,
            "cuDeviceGet" => device_get as *mut c_void,
            "cuMemHostGetDevicePointer_v2" => device_pointer as *mut c_void,
            "cuFuncGetParamInfo" | "cuKernelGetParamInfo" => parameter as *mut c_void,
            "cuModuleGetGlobal_v2" | "cuLibraryGetGlobal" => variable as *mut c_void,
            "cuStreamEndCapture" => gives_second as *mut c_void,
            "cuLinkCreate_v2" => gives_fourth as *mut c_void,
            "cuDevicePrimaryCtxRetain"
            | "cuStreamCreateWithPriority"
            | "cuEventCreate"
            | "cuMemCreate"
            | "cuModuleLoadDataEx"
            | "cuModuleGetFunction"
            | "cuLibraryLoadData"
            | "cuLibraryGetKernel"
            | "cuKernelGetFunction"
            | "cuGraphCreate"
            | "cuGraphClone"
            | "cuGraphAddNode_v2"
            | "cuGraphNodeFindInClone"
            | "cuGraphInstantiateWithFlags"
            | "cuGraphInstantiateWithParams"
            | "cuGraphConditionalHandleCreate"
            | "cuMemPoolCreate"
            | "cuMemAllocFromPoolAsync"
            | "cuMemPoolImportFromShareableHandle"
            | "cuMemImportFromShareableHandle"
            | "cuMemRetainAllocationHandle"
            | "cuMemPoolImportPointer"
            | "cuArray3DCreate_v2"
            | "cuMipmappedArrayCreate"
            | "cuMipmappedArrayGetLevel"
            | "cuArrayGetPlane"
            | "cuTexObjectCreate"
            | "cuSurfObjectCreate"
            | "cuModuleGetTexRef"
            | "cuModuleGetSurfRef"
            | "cuTexRefCreate"
            | "cuGreenCtxCreate"
            | "cuGreenCtxStreamCreate" => gives_handle as *mut c_void,
            _ => succeeds as *mut c_void,
        }
    };
    Driver::of(&find, "a driver for tests").expect("no function is missing")
}

/// A session on one device, and the engine's state without its threads.
pub struct Fixture {
    /// The session.
    pub session: Box<Session>,
    /// State shared by all threads.
    pub shared: Arc<Shared>,
    /// Receiving ends of the threads' queues, kept open.
    pub _outlets: Outlets,
    /// Receives the events for the engine's owner.
    pub _events: Receiver<EngineEvent>,
    client: Option<UnixStream>,
    /// Token of the next message.
    token: u64,
    /// Handles made.
    made: u32,
    _one: MutexGuard<'static, ()>,
}

impl Fixture {
    /// A new session whose driver has these functions, by their symbols.
    pub fn new(functions: &[(&'static str, Function)]) -> Fixture {
        Fixture::with_devices(1, functions)
    }

    /// The same on several devices, with a context on each.
    pub fn with_devices(count: usize, functions: &[(&'static str, Function)]) -> Fixture {
        let usual = (HostMemory::default(), Keeping::new(None));
        Fixture::with(count, functions, usual)
    }

    /// A new session whose user may have this many bytes of pinned memory beside the session's segment.
    pub fn with_host_memory(bytes: u64, functions: &[(&'static str, Function)]) -> Fixture {
        let bound = HostMemory {
            usual: Share::Bytes(bytes + segment::SEGMENT_LEN as u64),
            ..HostMemory::default()
        };
        Fixture::with(1, functions, (bound, Keeping::new(None)))
    }

    /// A new session that the next server can continue: a thread is the keeper.
    pub fn with_keeper(functions: &[(&'static str, Function)]) -> Fixture {
        let (own, others) = seqpacket::pair().expect("a pair");
        std::thread::spawn(move || keeper::run(others));
        let keeper = Arc::new(Keeper::on(own).expect("a keeper"));
        let usual = (HostMemory::default(), Keeping::new(Some(keeper)));
        let mut test = Fixture::with(1, functions, usual);
        begin_description(&mut test.session, &test.shared.images);
        test
    }

    fn with(
        count: usize,
        functions: &[(&'static str, Function)],
        (host_memory, keeping): (HostMemory, Keeping),
    ) -> Fixture {
        let one = ONE.lock();
        ORDERED.store(0, Ordering::Relaxed);
        UNWRITTEN.lock().clear();
        let driver = driver(functions);
        let devices = Devices::read(&driver, count).expect("devices");
        for device in devices.iter() {
            device.attach(&driver).expect("a context");
        }
        let arena = HostArena::new().expect("the arena");
        let file = sealed_memfd(c"mpsshim-test", 0).expect("a file");
        let config = EngineConfig {
            partitions: None,
            dispatch_threads: 1,
            marks: MarkKind::Written,
            launch_run: LAUNCH_RUN,
            host_memory,
            moved_memory_directory: None,
            max_spin: Duration::ZERO,
            further_context: Duration::from_secs(1),
        };
        let gpu = Gpu::new(
            (driver, devices, arena),
            Printing::of(File::from(file)),
            keeping,
            (config.marks, config.launch_run),
            config.host_memory.clone(),
        );
        let (tell, events) = unbounded();
        let admission = Arc::new(Admission::new(1));
        let gpu = gpu.expect("flags");
        let (shared, outlets) = Shared::new(gpu, config, admission, tell).expect("queues");
        shared.decide_on_loss();
        let (client, socket) = UnixStream::pair().expect("sockets");
        socket.set_nonblocking(true).expect("a socket");
        let file = MemoryFile::new(c"mpsshim-segment", segment::SEGMENT_LEN as u64);
        let file = file.expect("a file");
        let mapping = Mapping::new(file.as_fd(), segment::SEGMENT_LEN).expect("a mapping");
        let driver = &shared.gpu.driver;
        let registration = Registration::new(driver, mapping, segment::REGISTERED);
        let segment = Segment {
            registration: registration.expect("a registration"),
            file,
            pin: shared.gpu.pinned.add(0, segment::SEGMENT_LEN as u64),
        };
        let info = ClientInfo {
            session: 1,
            pid: 1,
            uid: 0,
            partition: None,
            namespace: None,
        };
        let terms = Terms {
            threads: Percentage::ALL,
            priority: 0,
        };
        let session = SessionShared::new(
            info,
            segment,
            (
                Doorbell::new().expect("a doorbell"),
                Stranger::new(socket.into(), 0),
            ),
            (terms, Account::default()),
            Arc::new(Description::new(mpsshim_proto::wire::OWN).expect("a description")),
        );
        let session = Arc::new(session);
        shared.roster.remember(&session);
        let mut session = Box::new(Session::new(session, 0));
        // Without a keeper, no other server can continue the session.
        session.note_bonds(&shared.images);
        CALLS.store(0, Ordering::Relaxed);
        RECORDED.lock().clear();
        Fixture {
            session,
            shared,
            _outlets: outlets,
            _events: events,
            client: Some(client),
            token: 0,
            made: 0,
            _one: one,
        }
    }

    /// Handles a message of this body followed by these bytes, without notifying the client.
    ///
    /// # Errors
    /// Errors of the handler.
    pub fn handle<T: IntoBytes + zerocopy::Immutable>(
        &mut self,
        op: Op,
        body: &T,
        rest: &[u8],
    ) -> Result<(), CallError> {
        let bytes = [body.as_bytes(), rest].concat();
        let message = Incoming::copied(op, std::mem::take(&mut self.token), &bytes);
        calls::replay(&self.shared, &mut self.session, message)
    }

    /// The status with which a message is refused; `CUDA_SUCCESS` if it succeeds.
    ///
    /// # Panics
    /// If it has to wait, or breaks the protocol.
    pub fn status<T: IntoBytes + zerocopy::Immutable>(
        &mut self,
        op: Op,
        body: &T,
        rest: &[u8],
    ) -> CUresult {
        match self.handle(op, body, rest) {
            Ok(()) => CUDA_SUCCESS,
            Err(CallError::Status(status)) => status,
            Err(other) => panic!("{op:?}: {other}"),
        }
    }

    /// Whether a message breaks the protocol.
    pub fn is_violation<T: IntoBytes + zerocopy::Immutable>(
        &mut self,
        op: Op,
        body: &T,
        rest: &[u8],
    ) -> bool {
        matches!(self.handle(op, body, rest), Err(CallError::Violation(_)))
    }

    /// Executes a message and notifies the client, as a dispatch thread does.
    ///
    /// # Errors
    /// The reason why it was not executed.
    pub fn execute<T: IntoBytes + zerocopy::Immutable>(
        &mut self,
        op: Op,
        body: &T,
        rest: &[u8],
    ) -> Result<(), Undone> {
        let bytes = [body.as_bytes(), rest].concat();
        let message = Incoming::copied(op, std::mem::take(&mut self.token), &bytes);
        calls::perform(&self.shared, &mut self.session, message)
    }

    /// Has a message executed and the client told; the status of the answer to a request, the error that the client's
    /// next wait finds otherwise.
    ///
    /// # Panics
    /// If it has to wait, or breaks the protocol.
    pub fn told<T: IntoBytes + zerocopy::Immutable>(
        &mut self,
        op: Op,
        body: &T,
        rest: &[u8],
    ) -> CUresult {
        let done = self.execute(op, body, rest);
        assert!(done.is_ok(), "{op:?} is not executed");
        match op.is_request() {
            true => CUresult(
                self.session
                    .shared
                    .header()
                    .answer_status
                    .load(Ordering::Relaxed),
            ),
            false => self.posted_error(),
        }
    }

    /// The struct that the answer to a request begins with.
    ///
    /// # Errors
    /// The status of the answer.
    pub fn reply<A: FromBytes>(
        &mut self,
        op: Op,
        body: &(impl IntoBytes + zerocopy::Immutable),
        rest: &[u8],
    ) -> Result<A, CUresult> {
        match self.told(op, body, rest) {
            CUDA_SUCCESS => {
                let answer = self.answer();
                let (head, _) = A::read_from_prefix(&answer).expect("a whole answer");
                Ok(head)
            }
            status => Err(status),
        }
    }

    /// Bytes of the last answer.
    pub fn answer(&self) -> Vec<u8> {
        let shared = &self.session.shared;
        let len = shared.header().answer_len.load(Ordering::Relaxed) as usize;
        // SAFETY: the area of answers, which nothing writes meanwhile.
        unsafe { std::slice::from_raw_parts(shared.segment.base().add(segment::ANSWER), len) }
            .to_vec()
    }

    /// Calls of [`counts`] and [`records`] since the fixture was made or asked last.
    pub fn calls(&self) -> u32 {
        CALLS.swap(0, Ordering::Relaxed)
    }

    /// Arguments of the calls of [`records`] since the fixture was made or asked last.
    pub fn recorded(&self) -> Vec<[u64; 6]> {
        std::mem::take(&mut *RECORDED.lock())
    }

    /// Objects that were queued since for destruction when all is quiet. They are then gone, what counts of them too.
    pub fn buried(&self) -> usize {
        self._outlets.buried.try_iter().count()
    }

    /// Sets the status that [`obeys`] and [`obeys_with_handle`] return from now on.
    pub fn orders(&self, status: CUresult) {
        ORDERED.store(status.0, Ordering::Relaxed);
        if status == CUDA_SUCCESS {
            complete();
        }
    }

    /// The client sends a descriptor that belongs to its next message.
    pub fn sends(&mut self, descriptor: impl AsFd) {
        self.token = 7;
        let note = DescriptorNote { token: 7, len: 0 };
        let socket = self.client.as_ref().expect("a client").as_fd();
        shm::send_packet(socket, note.as_bytes(), &[descriptor.as_fd()]).expect("sent");
    }

    /// The client's next message claims to have a descriptor.
    pub fn claims_descriptor(&mut self) {
        self.token = 7;
    }

    /// The client closes its connection: it takes no descriptors any more.
    pub fn hangs_up(&mut self) {
        self.client = None;
    }

    /// Bytes of the first device's memory that count for the session.
    pub fn held(&self) -> u64 {
        let first = self.shared.gpu.devices.first().expect("a device");
        self.session.account.held(Memory::Device(first.ordinal))
    }

    /// Bytes of pinned memory that count for the session.
    pub fn held_host(&self) -> u64 {
        self.session.account.held(Memory::Host)
    }

    /// Limits the memory of the first device that the session may have.
    pub fn limit(&self, bytes: u64) {
        let first = self.shared.gpu.devices.first().expect("a device");
        let memory = Memory::Device(first.ordinal);
        self.session.account.lower_limit(memory, bytes);
    }

    /// A handle of this kind that has no object yet.
    pub fn new_handle(&mut self, kind: Kind) -> u64 {
        self.made += 1;
        Handle::new(kind, 1, self.made).0
    }

    /// Creates a plain memory pool of at most `max_size` bytes on the first device; 0: as the driver allows.
    pub fn pool(&mut self, max_size: u64) -> u64 {
        let body = PoolCreate {
            handle: self.new_handle(Kind::MemPool),
            max_size,
            properties: Properties {
                kind: CU_MEM_ALLOCATION_TYPE_PINNED,
                location: Location {
                    kind: CU_MEM_LOCATION_TYPE_DEVICE,
                    id: 0,
                },
                ..Properties::default()
            },
        };
        assert_eq!(self.status(Op::PoolCreate, &body, &[]), CUDA_SUCCESS);
        body.handle
    }

    /// An attribute of a memory pool.
    pub fn pool_attribute(&mut self, pool: u64, attribute: u32) -> u64 {
        let body = PoolAttribute {
            pool,
            attribute,
            ..PoolAttribute::default()
        };
        self.reply(Op::PoolGetAttribute, &body, &[])
            .expect("a value")
    }

    /// Creates a stream.
    pub fn stream(&mut self) -> u64 {
        let body = StreamCreate {
            stream: self.new_handle(Kind::Stream),
            ..StreamCreate::new_zeroed()
        };
        assert_eq!(self.status(Op::StreamCreate, &body, &[]), CUDA_SUCCESS);
        body.stream
    }

    /// Creates an event.
    pub fn event(&mut self) -> u64 {
        let body = EventCreate {
            event: self.new_handle(Kind::Event),
            ..EventCreate::new_zeroed()
        };
        assert_eq!(self.status(Op::EventCreate, &body, &[]), CUDA_SUCCESS);
        body.event
    }

    /// Creates a graph.
    pub fn graph(&mut self) -> u64 {
        let made = self.reply::<u64>(Op::GraphCreate, &GraphCreate::new_zeroed(), &[]);
        made.expect("a graph")
    }

    /// Adds a node that does nothing to a graph.
    pub fn node(&mut self, graph: u64) -> u64 {
        let body = GraphNode {
            object: graph,
            kind: CU_GRAPH_NODE_TYPE_EMPTY,
            ..GraphNode::new_zeroed()
        };
        let added = self.reply::<u64>(Op::GraphNode, &body, &[]);
        added.expect("a node")
    }

    /// Whether the session's graphs and instances count none of the nodes and edges that it may have.
    pub fn has_no_graph_parts(&mut self) -> bool {
        let graphs = &mut self.session.objects.graphs;
        let all = bounds::GRAPHS_PARTS;
        graphs.hold(all).map(|()| graphs.let_go(all)).is_ok()
    }

    /// Begins a capture of a stream.
    pub fn captures(&mut self, stream: u64) {
        let body = CaptureBegin {
            stream,
            ..CaptureBegin::new_zeroed()
        };
        assert_eq!(self.status(Op::CaptureBegin, &body, &[]), CUDA_SUCCESS);
    }

    /// Whether the session may write 8 bytes at an address: by a copy, which stays in flight.
    pub fn owns(&mut self, to: u64) -> bool {
        let body = CopyInline {
            to,
            stream: self.stream(),
            len: 8,
        };
        self.status(Op::CopyInline, &body, &[0; 8]) == CUDA_SUCCESS
    }

    /// Where new memory of a device begins.
    pub fn memory_of(&mut self, device: u32, len: u64) -> u64 {
        let body = MemGrant {
            len,
            device,
            flags: 0,
        };
        let granted = self.reply::<u64>(Op::MemGrant, &body, &[]);
        granted.expect("memory")
    }

    /// The same of the first device.
    pub fn memory(&mut self, len: u64) -> u64 {
        self.memory_of(0, len)
    }

    /// Where new pinned memory begins.
    pub fn pinned(&mut self, len: u64) -> u64 {
        let body = HostAlloc {
            len,
            ..HostAlloc::new_zeroed()
        };
        self.reply::<u64>(Op::HostAlloc, &body, &[])
            .expect("pinned memory")
    }

    /// A load of a text of which the client has sent the descriptor. It wants logs, so that no other client shares the image.
    pub fn load(&mut self, kind: Kind) -> ImageLoad {
        const TEXT: &[u8] = b".version 8.0";
        self.sends(sealed(TEXT));
        ImageLoad {
            image: self.new_handle(kind),
            hash: Sha256::digest(TEXT).into(),
            len: TEXT.len() as u64,
            info_log: 1,
            ..ImageLoad::new_zeroed()
        }
    }

    /// Loads a module or a library.
    pub fn image(&mut self, kind: Kind) -> u64 {
        let body = self.load(kind);
        assert_eq!(self.status(Op::ImageLoad, &body, &[]), CUDA_SUCCESS);
        body.image
    }

    /// A function, with one parameter of 8 bytes, of an image.
    pub fn function_of(&mut self, parent: u64) -> u64 {
        let body = GetFunction {
            parent,
            function: self.new_handle(Kind::Function),
            ..GetFunction::new_zeroed()
        };
        let found = self.status(Op::GetFunction, &body, b"kernel\0");
        assert_eq!(found, CUDA_SUCCESS);
        body.function
    }

    /// A function of a new module.
    pub fn function(&mut self) -> u64 {
        let module = self.image(Kind::Module);
        self.function_of(module)
    }

    /// Takes the error of an asynchronous command that the client's next synchronizing call would return.
    pub fn posted_error(&self) -> CUresult {
        let header = self.session.shared.header();
        CUresult(header.posted_error.swap(0, Ordering::AcqRel))
    }

    /// Whether the session has ended for the client.
    pub fn has_ended(&self) -> bool {
        let state = &self.session.shared.header().state.0;
        state.load(Ordering::Acquire) == segment::state::ENDED
    }
}

/// Handles that are not this one, and name nothing: null, a stale one, one of another kind.
pub fn others(handle: u64) -> [u64; 3] {
    let Handle(of_context) = Handle::new(Kind::Context, 1, Handle(handle).index());
    [0, handle + (1 << 32), of_context]
}

/// A memory file with this content, as clients send them.
pub fn sealed(content: &[u8]) -> OwnedFd {
    let file = File::from(sealed_memfd(c"mpsshim-test", content.len() as u64).expect("a file"));
    file.write_all_at(content, 0).expect("a file");
    file.into()
}
