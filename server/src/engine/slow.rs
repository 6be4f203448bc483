//! The slow lane: calls that take long or wait inside the driver, and the setting up of sessions.

use super::Shared;
use super::account::{Account, Memory};
use super::activity::Published;
use super::dispatch::{self, Step};
use super::fairness::Standing;
use super::partition::Place;
use super::session::{Session, SessionShared};
use super::{ClientInfo, Credentials, EngineEvent};
use crate::admission;
use crate::limits::{Percentage, Terms};
use crate::mode::Mode;
use crate::seqpacket;
use crossbeam_channel::Receiver;
use mpsshim_proto::arena::{DEVICE_ARENA, DEVICE_ARENA_LEN, HOST_ARENA, HOST_ARENA_LEN};
use mpsshim_proto::cuda::*;
use mpsshim_proto::handshake::{ClientHello, MAX_DEVICES};
use mpsshim_proto::segment;
use mpsshim_proto::shm::{self, Doorbell, Mapping, sealed_memfd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zerocopy::IntoBytes;

/// Messages executed here before the session goes back to its dispatch thread.
const BUDGET: usize = 256;

/// Work for the slow lane.
pub enum SlowTask {
    /// Execute the next message of a session, and what follows it, then send the session home.
    Serve(Box<Session>),
    /// Set up a session for a new client.
    Setup(OwnedFd, Box<ClientHello>, Credentials),
}

/// The body of a slow-lane thread.
pub fn run(shared: &Arc<Shared>, tasks: &Receiver<SlowTask>) {
    for task in tasks.iter() {
        match task {
            SlowTask::Serve(session) => serve(shared, session),
            SlowTask::Setup(socket, hello, who) => setup(shared, socket, &hello, who),
        }
    }
}

fn serve(shared: &Arc<Shared>, mut session: Box<Session>) {
    shared.loads_waiting.fetch_add(1, Ordering::Relaxed);
    let mut violation = None;
    for _ in 0..BUDGET {
        match dispatch::step(shared, &mut session, true) {
            Step::Done => {}
            Step::None | Step::Full | Step::Held | Step::Slow => break,
            Step::Violation(why) => {
                violation = Some(why);
                break;
            }
        }
    }
    shared.loads_waiting.fetch_sub(1, Ordering::Relaxed);
    for block in session.take_surplus_host() {
        shared.bury(super::reaper::Buried::Host(block));
    }
    match violation {
        Some(why) => dispatch::end(shared, session, Some(why)),
        None => shared.send_home(session),
    }
}

fn refuse(shared: &Shared, socket: &OwnedFd, who: Credentials, status: CUresult, why: String) {
    admission::refuse(&shared.events, socket, who, status, why);
}

fn setup(shared: &Arc<Shared>, socket: OwnedFd, hello: &ClientHello, who: Credentials) {
    if let Err(why) = admission::check_version(hello) {
        return refuse(shared, &socket, who, CUDA_ERROR_MPS_CONNECTION_FAILED, why);
    }
    if let Some(status) = shared.lost_status() {
        let why = format!("the server's context is lost ({status})");
        return refuse(shared, &socket, who, CUDA_ERROR_MPS_SERVER_NOT_READY, why);
    }
    let Some(id) = shared.admission.admit() else {
        let why = format!("there are {} clients already", shared.admission.limit());
        return refuse(
            shared,
            &socket,
            who,
            CUDA_ERROR_MPS_MAX_CLIENTS_REACHED,
            why,
        );
    };
    let limits = shared.limits.lock().clone();
    let mut terms = Terms::new(&limits, hello);
    let places = (0..shared.devices.len()).map(|device| shared.place(device, terms.threads));
    let places = match places.collect::<Result<Vec<_>, _>>() {
        Ok(places) => places,
        Err(status) => {
            tracing::warn!(
                "Client process {} should have {} percent of the active threads, but the driver cannot part the \
                 device ({status}): it has all of them",
                who.pid,
                terms.threads
            );
            terms.threads = Percentage::ALL;
            Vec::new()
        }
    };
    let account = match shared.admission.users().place(who.uid) {
        Ok(place) => Account::of_user(place),
        Err(error) => {
            shared.admission.retract();
            let why = format!("its user's memory cannot be counted: {error}");
            return refuse(shared, &socket, who, CUDA_ERROR_OUT_OF_MEMORY, why);
        }
    };
    shared.fairness.admit(terms.priority);
    for (device, bytes) in limits.memory {
        if device < MAX_DEVICES {
            account.lower_limit(Memory::Device(device), bytes);
        }
    }
    match prepare(shared, id, socket, who, (terms, account, places)) {
        Ok(session) => {
            let info = session.shared.info.clone();
            if shared.watch_socket(&session.shared).is_err() {
                shared.tell(EngineEvent::Connected(info));
                return dispatch::end(shared, session, Some("no descriptors left".into()));
            }
            shared.tell(EngineEvent::Connected(info));
            shared.send_home(session);
        }
        Err((socket, status, why)) => {
            shared.admission.retract();
            shared.note_status(status);
            // A new server will do what one whose context is lost cannot.
            let status = match shared.lost_status() {
                Some(_) => CUDA_ERROR_MPS_SERVER_NOT_READY,
                None => status,
            };
            refuse(shared, &socket, who, status, why);
        }
    }
}

type Refusal = (OwnedFd, CUresult, String);

fn prepare(
    shared: &Arc<Shared>,
    id: u64,
    socket: OwnedFd,
    who: Credentials,
    (terms, account, places): (Terms, Account, Vec<Option<Place>>),
) -> Result<Box<Session>, Refusal> {
    let made = || -> std::io::Result<(OwnedFd, Mapping, Doorbell)> {
        let fd = sealed_memfd(c"mpsshim-segment", segment::SEGMENT_LEN as u64)?;
        let mapping = Mapping::new(fd.as_fd(), segment::SEGMENT_LEN)?;
        Ok((fd, mapping, Doorbell::new()?))
    };
    let (fd, mapping, bell) = match made() {
        Ok(made) => made,
        Err(error) => {
            return Err((
                socket,
                CUDA_ERROR_OUT_OF_MEMORY,
                format!("cannot make its segment: {error}"),
            ));
        }
    };
    // A client that takes no packets must not hold up the thread that sends it one.
    if let Err(error) = seqpacket::set_nonblocking(&socket, true) {
        let why = format!("its connection cannot be made non-blocking: {error}");
        return Err((socket, CUDA_ERROR_OPERATING_SYSTEM, why));
    }
    let registered = shared
        .any_device()
        .ok_or(CUDA_ERROR_NO_DEVICE)
        .and_then(|device| device.make_current(&shared.driver))
        .and_then(|()| {
            super::host::Registration::new(&shared.driver, mapping, segment::REGISTERED)
        });
    let registration = match registered {
        Ok(registration) => registration,
        Err(status) => {
            return Err((
                socket,
                status,
                format!("cannot register its segment: {status}"),
            ));
        }
    };
    let home = shared.least_loaded();
    let session_shared = Arc::new(SessionShared {
        info: ClientInfo {
            session: id,
            pid: who.pid,
            uid: who.uid,
        },
        registration,
        bell,
        socket,
        hung_up: AtomicBool::new(false),
        terminated: AtomicBool::new(false),
        account,
        terms,
        standing: Standing::default(),
        activity: Published::default(),
    });
    let mut welcome = admission::welcome(CUDA_SUCCESS);
    welcome.mode = Mode::Proxy.number();
    welcome.session = id;
    welcome.segment_len = segment::SEGMENT_LEN as u64;
    (welcome.host_arena, welcome.host_arena_len) = (HOST_ARENA, HOST_ARENA_LEN);
    (welcome.device_arena, welcome.device_arena_len) = (DEVICE_ARENA, DEVICE_ARENA_LEN);
    welcome.device_count = shared.devices.len().min(MAX_DEVICES) as u32;
    for (to, device) in welcome.devices.iter_mut().zip(&shared.devices) {
        *to = device.uuid.0;
    }
    for (to, place) in welcome.multiprocessors.iter_mut().zip(&places) {
        *to = place.as_ref().map_or(0, |place| place.count);
    }
    for (device, to) in welcome.memory.iter_mut().enumerate() {
        let limit = session_shared.account.limit(Memory::Device(device));
        *to = limit.unwrap_or(0);
    }
    let mut session = Box::new(Session::new(session_shared.clone(), home));
    session.places = places;
    // Listed before the client can act: whoever sees its first call served finds it in the list.
    shared.remember(&session_shared);
    if let Err(error) = shm::send_packet(
        session_shared.socket(),
        welcome.as_bytes(),
        &[fd.as_fd(), session_shared.bell.fd()],
    ) {
        tracing::debug!("client {} left before it was welcomed: {error}", who.pid);
        session_shared.hung_up.store(true, Ordering::Relaxed);
    }
    Ok(session)
}
