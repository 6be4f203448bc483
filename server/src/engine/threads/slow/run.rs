//! The threads of the slow lane, and the setup of sessions.

use super::SlowTask;
use crate::admission;
use crate::engine::base::account::{Account, Memory};
use crate::engine::base::bounds::STACK;
use crate::engine::base::description::Description;
use crate::engine::base::memory_file::MemoryFile;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::{self, Side};
use crate::engine::calls::memory::take_surplus_host;
use crate::engine::gpu::NoPlace;
use crate::engine::gpu::client_segment::Segment;
use crate::engine::gpu::host::Registration;
use crate::engine::gpu::partition::Place;
use crate::engine::lasting::messages::begin_description;
use crate::engine::scheduling::dispatch::{self, Step};
use crate::engine::scheduling::suspending;
use crate::engine::session::{Session, SessionShared};
use crate::engine::threads::gate;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::*;
use mpsshim_control::closers::Stranger;
use mpsshim_control::panics;
use mpsshim_control::seqpacket;
use mpsshim_model::client::{ClientInfo, Credentials, EngineEvent, Newcomer};
use mpsshim_model::limits::{Percentage, Terms};
use mpsshim_model::mode::Mode;
use mpsshim_model::partitions;
use mpsshim_proto::arena::{DEVICE_ARENA, DEVICE_ARENA_LEN, HOST_ARENA, HOST_ARENA_LEN};
use mpsshim_proto::handshake::{ClientHello, MAX_DEVICES, Wire};
use mpsshim_proto::segment;
use mpsshim_proto::shm::{self, Doorbell, Mapping};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Most messages executed here before the session returns to its dispatch thread.
const BUDGET: usize = 256;
/// Number of threads that always exist.
pub const THREADS: usize = 3;
/// Most threads: this many tasks that do not end stop the slow lane. A session has one task at a time.
pub const MOST_THREADS: usize = 16;
/// How long no task has been started, while some wait, before another thread is started.
const STALL: Duration = Duration::from_secs(1);

/// Starts a slow-lane thread.
///
/// # Errors
/// The error of the thread's creation.
pub fn start_thread(shared: &Arc<Shared>) -> std::io::Result<()> {
    let number = shared.lanes.slow.threads.fetch_add(1, Ordering::Relaxed);
    let running = Arc::clone(shared);
    let started = std::thread::Builder::new()
        .name(format!("slow-{number}"))
        .stack_size(STACK)
        .spawn(move || run(&running, number >= THREADS));
    started.map(drop).inspect_err(|_| {
        shared.lanes.slow.threads.fetch_sub(1, Ordering::Relaxed);
    })
}

/// The body of a slow-lane thread. A spare thread ends after it has had no work for a while.
fn run(shared: &Arc<Shared>, spare: bool) {
    while let Some(task) = shared.lanes.slow.next(spare) {
        panics::works_for(None);
        side::enter(Side::MAIN);
        match task {
            SlowTask::Serve(session) => serve(shared, session),
            SlowTask::Pass(session, moment) => gate::run::pass(shared, session, &moment),
            SlowTask::Move(session, to) => gate::run::move_on(shared, session, to),
            SlowTask::Evict(session) => suspending::evict(shared, session),
            SlowTask::Refill(session) => suspending::refill(shared, session),
            SlowTask::Setup(socket, hello, newcomer) => setup(shared, socket, &hello, newcomer),
        }
    }
    shared.lanes.slow.threads.fetch_sub(1, Ordering::Relaxed);
}

/// The body of the thread that starts more slow-lane threads when the slow lane stalls.
pub fn watch(shared: &Arc<Shared>) {
    let lane = &shared.lanes.slow;
    while lane.alarm.1.recv().is_ok() {
        let mut taken = lane.taken.load(Ordering::Relaxed);
        let wanted = || !lane.tasks.is_empty() || shared.gpu.is_urgent() && lane.free() == 0;
        while wanted() {
            std::thread::sleep(STALL);
            let now = lane.taken.load(Ordering::Relaxed);
            let stalled = now == taken && wanted();
            taken = now;
            let threads = lane.threads.load(Ordering::Relaxed);
            if !stalled || threads >= MOST_THREADS {
                continue;
            }
            tracing::info!("All {threads} threads of the slow lane are busy; starting another");
            if let Err(error) = start_thread(shared) {
                tracing::warn!("No further thread for the slow lane: {error}");
            }
        }
    }
}

fn serve(shared: &Arc<Shared>, mut session: Box<Session>) {
    panics::works_for(Some(session.shared.info.session));
    session.enter();
    let mut violation = None;
    let mut alone = session.flow.wants_moment;
    for _ in 0..BUDGET {
        if alone {
            break;
        }
        match dispatch::step(shared, &mut session, true) {
            Step::Done => {}
            Step::Alone => alone = true,
            Step::None | Step::Full | Step::Held | Step::Slow => break,
            Step::Violation(why) => {
                violation = Some(why);
                break;
            }
        }
    }
    for block in take_surplus_host(&mut session, shared) {
        shared
            .lanes
            .bury(Buried::Host(block, session.shared.info.uid));
    }
    match violation {
        Some(why) => dispatch::end(shared, session, Some(why)),
        None if alone => shared.lanes.gate(session.side).admit(shared, session),
        None => shared.lanes.send_home(session),
    }
}

fn refuse(shared: &Shared, socket: &Stranger, who: Credentials, status: CUresult, why: String) {
    admission::refuse(&shared.roster.events, socket, who, status, why);
}

fn setup(shared: &Arc<Shared>, socket: Stranger, hello: &ClientHello, newcomer: Newcomer) {
    let Newcomer { who, namespace } = newcomer;
    let wire = hello.wire();
    if let Err(why) = admission::check_wire(wire) {
        return refuse(shared, &socket, who, CUDA_ERROR_MPS_CONNECTION_FAILED, why);
    }
    if let Some(status) = shared.gpu.lost_status() {
        let why = format!("the server's context is lost ({status})");
        return refuse(shared, &socket, who, CUDA_ERROR_MPS_SERVER_NOT_READY, why);
    }
    let limits = shared.roster.limits.lock().clone();
    let limits = match limits.in_namespace(namespace.as_deref()) {
        Ok(limits) => limits,
        Err(error) => {
            let why = error.to_string();
            admission::tell_reason(&socket, hello, &why);
            return refuse(shared, &socket, who, CUDA_ERROR_MPS_CONNECTION_FAILED, why);
        }
    };
    let Some(id) = shared.roster.admission.admit() else {
        let why = format!(
            "there are {} clients already",
            shared.roster.admission.limit()
        );
        return refuse(
            shared,
            &socket,
            who,
            CUDA_ERROR_MPS_MAX_CLIENTS_REACHED,
            why,
        );
    };
    let mut terms = Terms::new(&limits, hello);
    let chosen = hello.partition();
    let partitions = limits.partitions.as_ref();
    let places = match (shared.gpu).places(terms.threads, partitions, chosen.as_deref()) {
        Ok(places) => places,
        Err(NoPlace::Percentage(status)) if hello.required != 0 => {
            shared.roster.admission.retract();
            let why = format!(
                "it needs its limits, and the driver cannot give it {} percent of the active threads ({status})",
                terms.threads
            );
            return refuse(shared, &socket, who, CUDA_ERROR_MPS_CONNECTION_FAILED, why);
        }
        Err(NoPlace::Percentage(status)) => {
            tracing::warn!(
                "Client process {} should have {} percent of the active threads, but the driver cannot part the \
                 device ({status}): it has all of them",
                who.pid,
                terms.threads
            );
            terms.threads = Percentage::ALL;
            Vec::new()
        }
        Err(why) => {
            shared.roster.admission.retract();
            let (status, why) = (CUDA_ERROR_INVALID_VALUE, why.to_string());
            admission::tell_reason(&socket, hello, &why);
            return refuse(shared, &socket, who, status, why);
        }
    };
    let partition = partitions.zip(chosen).and_then(|(partitions, name)| {
        let (uuid, id, _) = partitions.find(&name)?;
        Some(partitions::name(uuid, id))
    });
    let account = match shared.roster.admission.users().place(who.uid) {
        Ok(place) => Account::of_user(place),
        Err(error) => {
            shared.roster.admission.retract();
            let why = format!("its user's memory cannot be counted: {error}");
            return refuse(shared, &socket, who, CUDA_ERROR_OUT_OF_MEMORY, why);
        }
    };
    shared.roster.fairness.admit(terms.priority);
    limit_memory(shared, &account, &limits.memory);
    match prepare(
        shared,
        (id, wire, partition),
        socket,
        Newcomer { who, namespace },
        (terms, account, places),
        &limits.guarantee,
    ) {
        Ok(session) => {
            let info = session.shared.info.clone();
            if shared.roster.watch_socket(&session.shared).is_err() {
                shared.roster.tell(EngineEvent::Connected(info));
                return dispatch::end(shared, session, Some("no descriptors left".into()));
            }
            shared.roster.tell(EngineEvent::Connected(info));
            shared.give_first_level(&session.shared);
            shared.lanes.send_home(session);
        }
        Err((socket, status, why)) => {
            shared.roster.admission.retract();
            shared.gpu.note_status(status);
            // The next server can serve the client if this one's context is lost.
            let status = match shared.gpu.lost_status() {
                Some(_) => CUDA_ERROR_MPS_SERVER_NOT_READY,
                None => status,
            };
            refuse(shared, &socket, who, status, why);
        }
    }
}

/// Limits the device memory of a client, in bytes by device ordinal.
pub fn limit_memory(shared: &Shared, account: &Account, limits: &BTreeMap<usize, u64>) {
    for (device, bytes) in of_devices(shared, limits) {
        account.lower_limit(Memory::Device(device), bytes);
    }
}

/// Limits or guarantees of memory, except for devices that the server does not have.
pub fn of_devices(
    shared: &Shared,
    bytes: &BTreeMap<usize, u64>,
) -> impl Iterator<Item = (Ordinal, u64)> {
    bytes.iter().filter_map(|(device, bytes)| {
        let device = shared.gpu.device(*device as u32).ok()?;
        Some((device.ordinal, *bytes))
    })
}

/// Registers a segment with the driver, from byte [`segment::REGISTERED`] on (`cuMemHostRegister`).
///
/// # Errors
/// The driver's status.
pub fn register_segment(shared: &Shared, mapping: Mapping) -> Result<Registration, CUresult> {
    let device = shared.gpu.any_device().ok_or(CUDA_ERROR_NO_DEVICE)?;
    device.make_current(&shared.gpu.driver)?;
    Registration::new(&shared.gpu.driver, mapping, segment::REGISTERED)
}

/// Returns a segment for a client of this user, and the descriptor for the client.
fn take_segment(shared: &Shared, uid: u32) -> Result<(Segment, OwnedFd), (CUresult, String)> {
    let impossible = |error: std::io::Error| {
        let why = format!("cannot make its segment: {error}");
        (CUDA_ERROR_OUT_OF_MEMORY, why)
    };
    if let Some(segment) = shared.gpu.spare.take_segment(uid) {
        return match segment.file.description() {
            Ok(file) => Ok((segment, file)),
            Err(error) => {
                shared.gpu.spare.put_segment(uid, segment);
                Err(impossible(error))
            }
        };
    }
    let made = || -> std::io::Result<(OwnedFd, MemoryFile, Mapping)> {
        let own = MemoryFile::new(c"mpsshim-segment", segment::SEGMENT_LEN as u64)?;
        let mapping = Mapping::new(own.as_fd(), segment::SEGMENT_LEN)?;
        Ok((own.description()?, own, mapping))
    };
    let (file, own, mapping) = made().map_err(impossible)?;
    let registration = register_segment(shared, mapping)
        .map_err(|status| (status, format!("cannot register its segment: {status}")))?;
    let segment = Segment {
        registration,
        file: own,
        pin: shared.gpu.pinned.add(uid, segment::SEGMENT_LEN as u64),
    };
    Ok((segment, file))
}

fn prepare(
    shared: &Arc<Shared>,
    (id, wire, partition): (u64, Wire, Option<String>),
    socket: Stranger,
    Newcomer { who, namespace }: Newcomer,
    (terms, account, places): (Terms, Account, Vec<Option<Place>>),
    guarantees: &BTreeMap<usize, u64>,
) -> Result<Box<Session>, Refusal> {
    // A client that does not read from its socket must not block the thread that sends to it.
    if let Err(error) = seqpacket::set_nonblocking(&socket, true) {
        let why = format!("its connection cannot be made non-blocking: {error}");
        return Err((socket, CUDA_ERROR_OPERATING_SYSTEM, why));
    }
    let made = Doorbell::new().map_err(|error| {
        let why = format!("cannot make its doorbell: {error}");
        (CUDA_ERROR_OUT_OF_MEMORY, why)
    });
    let made = made.and_then(|bell| Ok((take_segment(shared, who.uid)?, bell)));
    let ((segment, file), bell) = match made {
        Ok(made) => made,
        Err((status, why)) => return Err((socket, status, why)),
    };
    let description = match Description::new(wire) {
        Ok(description) => Arc::new(description),
        Err(error) => {
            let why = format!("cannot make its description: {error}");
            return Err((socket, CUDA_ERROR_OUT_OF_MEMORY, why));
        }
    };
    let home = shared.lanes.least_loaded();
    let info = ClientInfo {
        session: id,
        pid: who.pid,
        uid: who.uid,
        partition,
        namespace,
    };
    let session_shared = Arc::new(SessionShared::new(
        info,
        segment,
        (bell, socket),
        (terms, account),
        description,
    ));
    let guarantees = of_devices(shared, guarantees);
    session_shared
        .suspension
        .ask_guarantees(guarantees.collect());
    let mut welcome = admission::welcome(wire.protocol, CUDA_SUCCESS);
    welcome.mode = Mode::Proxy.number();
    welcome.session = id;
    welcome.segment_len = segment::SEGMENT_LEN as u64;
    (welcome.host_arena, welcome.host_arena_len) = (HOST_ARENA, HOST_ARENA_LEN);
    (welcome.device_arena, welcome.device_arena_len) = (DEVICE_ARENA, DEVICE_ARENA_LEN);
    welcome.device_count = shared.gpu.devices.len().min(MAX_DEVICES) as u32;
    for (to, device) in welcome.devices.iter_mut().zip(shared.gpu.devices.iter()) {
        *to = device.uuid.0;
    }
    for (to, place) in welcome.multiprocessors.iter_mut().zip(&places) {
        *to = place.as_ref().map_or(0, |place| place.count);
    }
    for (device, limit) in session_shared.account.limits_of_devices() {
        welcome.memory[device] = limit;
    }
    let mut session = Box::new(Session::new(session_shared.clone(), home));
    session.objects.places = places;
    // Added before the client can act, so that any client whose first call was served is in the list.
    shared.roster.remember(&session_shared);
    shared.share_guarantees();
    if let Err(error) = shm::send_packet(
        session_shared.socket(),
        welcome.as_bytes(),
        &[file.as_fd(), session_shared.bell.fd()],
    ) {
        tracing::debug!("client {} left before it was welcomed: {error}", who.pid);
        session_shared.hung_up.store(true, Ordering::Relaxed);
    }
    // Not earlier: the next server would wait for a client that is waiting for its welcome.
    begin_description(&mut session, &shared.images);
    Ok(session)
}

type Refusal = (Stranger, CUresult, String);
