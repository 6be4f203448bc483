//! A session for unit tests of handlers, on a driver that consists of the test's functions.
//!
//! ```text
//! let mut test = Fixture::new(&[("cuMemcpyHtoDAsync_v2", fails::<{ CUDA_ERROR_OUT_OF_MEMORY.0 }> as Function)]);
//! let status = test.status(Op::CopyInline, &body, &data);
//! ```

use super::base::account::Account;
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
use super::session::{Session, SessionShared};
use super::threads::shared::{EngineConfig, Outlets, Shared};
use crate::admission::Admission;
use crossbeam_channel::{Receiver, unbounded};
use mpsshim_api::cuda::*;
use mpsshim_control::closers::Stranger;
use mpsshim_model::client::{ClientInfo, EngineEvent};
use mpsshim_model::limits::{Percentage, Terms};
use mpsshim_model::policy::{LAUNCH_RUN, MarkKind};
use mpsshim_proto::message::Op;
use mpsshim_proto::segment;
use mpsshim_proto::shm::{Doorbell, Mapping, sealed_memfd};
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use zerocopy::IntoBytes;

/// A function of any signature: in the C ABI the caller cleans up the arguments.
pub type Function = extern "C" fn() -> CUresult;

/// Pinned memory has fixed addresses in the process, so only one fixture may exist at a time.
static ONE: Mutex<()> = Mutex::new(());

thread_local! {
    static CALLS: Cell<u32> = const { Cell::new(0) };
    static HANDLES: Cell<u64> = const { Cell::new(0x1000) };
}

extern "C" fn succeeds() -> CUresult {
    CUDA_SUCCESS
}

/// Returns a status.
pub extern "C" fn fails<const STATUS: u32>() -> CUresult {
    CUresult(STATUS)
}

/// Counts its calls by this thread: see [`Fixture::calls`].
pub extern "C" fn counts() -> CUresult {
    CALLS.set(CALLS.get() + 1);
    CUDA_SUCCESS
}

/// Writes a new handle to its first argument.
pub extern "C" fn gives_handle(to: *mut u64) -> CUresult {
    HANDLES.set(HANDLES.get() + 0x10);
    // SAFETY: the driver functions replaced by this one write a handle there.
    unsafe { to.write(HANDLES.get()) };
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
            "cuDevicePrimaryCtxRetain"
            | "cuStreamCreateWithPriority"
            | "cuEventCreate"
            | "cuMemCreate"
            | "cuModuleLoadDataEx"
            | "cuModuleGetFunction"
            | "cuLibraryLoadData"
            | "cuGraphCreate" => gives_handle as *mut c_void,
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
    _client: UnixStream,
    _one: MutexGuard<'static, ()>,
}

impl Fixture {
    /// A new session whose driver has these functions, by their symbols.
    pub fn new(functions: &[(&'static str, Function)]) -> Fixture {
        let one = ONE.lock();
        CALLS.set(0);
        let driver = driver(functions);
        let devices = Devices::read(&driver, 1).expect("a device");
        let first = devices.first().expect("a device");
        first.attach(&driver).expect("a context");
        let arena = HostArena::new().expect("the arena");
        let file = sealed_memfd(c"mpsshim-test", 0).expect("a file");
        let config = EngineConfig {
            dispatch_threads: 1,
            marks: MarkKind::Written,
            launch_run: LAUNCH_RUN,
            max_spin: Duration::ZERO,
            further_context: Duration::from_secs(1),
        };
        let gpu = Gpu::new(
            (driver, devices, arena),
            Printing::of(File::from(file)),
            Keeping::new(None),
            (config.marks, config.launch_run),
        );
        let (tell, events) = unbounded();
        let admission = Arc::new(Admission::new(1));
        let gpu = gpu.expect("flags");
        let (shared, outlets) = Shared::new(gpu, config, None, admission, tell).expect("queues");
        shared.decide_on_loss();
        let (client, socket) = UnixStream::pair().expect("sockets");
        let file = MemoryFile::new(c"mpsshim-segment", segment::SEGMENT_LEN as u64);
        let file = file.expect("a file");
        let mapping = Mapping::new(file.as_fd(), segment::SEGMENT_LEN).expect("a mapping");
        let driver = &shared.gpu.driver;
        let registration = Registration::new(driver, mapping, segment::REGISTERED);
        let segment = Segment {
            registration: registration.expect("a registration"),
            file,
        };
        let info = ClientInfo {
            session: 1,
            pid: 1,
            uid: 0,
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
            Arc::new(Description::new().expect("a description")),
        );
        let session = Arc::new(session);
        shared.roster.remember(&session);
        let mut session = Box::new(Session::new(session, 0));
        // Without a keeper, no other server can continue the session.
        session.note_bonds(&shared.images);
        Fixture {
            session,
            shared,
            _outlets: outlets,
            _events: events,
            _client: client,
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
        let message = Incoming::copied(op, 0, &bytes);
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
        let message = Incoming::copied(op, 0, &bytes);
        calls::perform(&self.shared, &mut self.session, message)
    }

    /// Calls of [`counts`] since the fixture was made or asked last.
    pub fn calls(&self) -> u32 {
        CALLS.replace(0)
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
