//! Connecting to the daemon: the socket, the handshake, and the setup of a session in this process.

use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_MPS_CONNECTION_FAILED,
    CUDA_ERROR_MPS_SERVER_NOT_READY, CUresult, CUuuid,
};
use mpsshim_proto::arena::{
    DEVICE_ARENA, DEVICE_ARENA_LEN, DEVICE_ARENA_STRIDE, HOST_ARENA, HOST_ARENA_LEN, VIRTUAL_ARENA,
    VIRTUAL_ARENA_LEN,
};
use mpsshim_proto::direct::{DIRECT, PROXY};
use mpsshim_proto::handshake::{
    ClientHello, DIRECT_DESCRIPTORS, MAGIC_CLIENT, MAGIC_WELCOME, MAX_DEVICES, PROTOCOL_VERSION,
    WELCOME_DESCRIPTORS, Welcome,
};
use mpsshim_proto::message::Op;
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::segment::SEGMENT_LEN;
use mpsshim_proto::shm::{self, Doorbell, Mapping, Reservation};
use mpsshim_proto::wire;
use parking_lot::Mutex;
use zerocopy::{FromZeros, IntoBytes};

use crate::loader::genuine;
use crate::notices::Notices;
use crate::proxy::calls::launch;
use crate::proxy::submit::{self, Session};
use crate::proxy::{context, memory};
use crate::{daemon, direct, nvidia_mps, refusal, settings};

/// How long a client retries while the server that it was handed to is ending.
const REPLACEMENT: Duration = Duration::from_secs(5);
/// Pause between attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// The same for a client in direct mode, which runs without a server meanwhile.
const LONG_REPLACEMENT: Duration = Duration::from_secs(60);
const LONG_PAUSE: Duration = Duration::from_millis(100);

/// How this process gets a session.
struct Way {
    socket: PathBuf,
    hello: ClientHello,
    /// How long it retries, and the pause before each attempt.
    tries: (Duration, Duration),
}

/// How a process in direct mode gets its next session: as it got the first one, regardless of its environment, which
/// the program may be changing at that moment.
static WAY: OnceLock<Way> = OnceLock::new();

impl Way {
    /// `None`: there is no daemon.
    fn first() -> Option<Way> {
        let directory = daemon::directory()?;
        tracing::info!(directory = %directory.display(), "connecting to the daemon");
        if settings::is_direct_for_a_tool() {
            tracing::info!(
                "CUDA_INJECTION64_PATH is set: asking for direct mode, as a tool sees nothing of a program in proxy mode"
            );
        }
        Some(Way {
            socket: directory.join("control"),
            hello: hello(),
            tries: (REPLACEMENT, PAUSE),
        })
    }

    /// Requests direct mode, whatever the next server's setting is: a process cannot change its mode.
    fn next(self) -> Way {
        let hello = ClientHello {
            mode: DIRECT,
            // The program runs without a session meanwhile.
            notices: 0,
            ..self.hello
        };
        Way {
            hello,
            tries: (LONG_REPLACEMENT, LONG_PAUSE),
            ..self
        }
    }
}

/// The mode of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Served {
    ByProxy,
    Directly,
}

/// Opens a session. `None`: there is no daemon after all, and the program runs on the genuine driver.
///
/// # Errors
/// A daemon is there, but the session is refused or cannot be used.
pub fn connect() -> Result<Option<Served>, CUresult> {
    let Some((socket, (welcome, segment, doorbell, user))) = early_or_new()? else {
        return Ok(None);
    };
    // A defect of the shim is for its log, not for the program's standard error.
    std::panic::set_hook(Box::new(|info| tracing::error!("{info}")));
    let count = (welcome.device_count as usize).min(MAX_DEVICES);
    let own = own_devices();
    let limits = own_limits(&welcome.devices[..count], own.as_deref(), welcome.mode)
        .map_err(|(status, why)| refusal::refuse(status, why))?;
    if settings::required() {
        check_percentage(&welcome)?;
    }
    if welcome.mode == DIRECT {
        let welcomed = (welcome, segment, doorbell, user);
        begin_direct(socket, welcomed, own.as_deref())
            .map_err(|reason| refuse(format_args!("{reason}")))?;
        for (ordinal, bytes) in limits {
            direct::lower_limit(ordinal, bytes);
        }
        return Ok(Some(Served::Directly));
    }
    let mapping = Mapping::new(segment.as_fd(), SEGMENT_LEN)
        .map_err(|error| refuse(format_args!("the segment cannot be mapped: {error}")))?;
    reserve_arenas(&welcome);
    let base = mapping.base();
    // The session lives as long as the process.
    mem::forget(mapping);
    // SAFETY: a mapping of a whole segment, sealed against shrinking, that is never unmapped; it is new to us.
    let session = unsafe { Session::new(base, socket, Doorbell::from_fd(doorbell)) };
    context::set_devices(
        device_map(&welcome.devices[..count], own.as_deref()),
        &welcome,
    );
    limit_memory(&session, &limits);
    launch::wait_for_kernels(settings::launch_blocking());
    tracing::info!(
        session = welcome.session,
        server = welcome.server_pid,
        devices = count,
        "connected"
    );
    submit::install(session);
    Ok(Some(Served::ByProxy))
}

/// Takes a session in direct mode.
fn begin_direct(
    socket: OwnedFd,
    (welcome, page, doorbell, user): Welcomed,
    own: Option<&[CUuuid]>,
) -> Result<(), String> {
    let count = (welcome.device_count as usize).min(MAX_DEVICES);
    let devices = device_map(&welcome.devices[..count], own);
    let user = user.ok_or("descriptors are missing from the welcome")?;
    direct::begin((&page, &user), doorbell, socket, devices)?;
    tracing::info!(
        session = welcome.session,
        server = welcome.server_pid,
        "connected, in direct mode"
    );
    Ok(())
}

/// Opens the next session of a process in direct mode whose server has gone. The daemon starts another one.
///
/// # Errors
/// A description of the failure: there is no daemon, or it refuses.
pub fn renew() -> Result<(), String> {
    let way = WAY.get().ok_or("there was none before")?;
    match welcomed(way) {
        Ok(Some((_, (welcome, ..)))) if welcome.mode != DIRECT => {
            Err("the next server has no direct mode".into())
        }
        Ok(Some((socket, welcomed))) => begin_direct(socket, welcomed, own_devices().as_deref()),
        Ok(None) => Err("there is no daemon".into()),
        Err(status) => Err(format!("no session: {status}")),
    }
}

/// A session that was opened before `cuInit`, and the process that did: a forked child must not use it.
static EARLY: Mutex<Option<(u32, OwnedFd, Welcomed)>> = Mutex::new(None);

/// Whether a program that will have a session runs on the genuine driver: the driver's export tables are requested
/// before `cuInit`, and differ between the modes. The server has the last word, so the session is opened now.
pub fn will_be_direct() -> bool {
    let mut early = EARLY.lock();
    let own = std::process::id();
    if early.as_ref().is_none_or(|(process, ..)| *process != own) {
        *early = match first() {
            Ok(Some((socket, welcomed))) => Some((own, socket, welcomed)),
            // cuInit will return the error.
            Ok(None) | Err(_) => None,
        };
    }
    let mode = early.as_ref().map(|(_, _, (welcome, ..))| welcome.mode);
    mode == Some(DIRECT)
}

/// Passes on the server's limits to NVIDIA's MPS, if that will serve this process. Called before the genuine `cuInit`.
pub fn hand_over_to_nvidia() {
    if nvidia_mps::listens()
        && will_be_direct()
        && let Some((_, _, (welcome, ..))) = &*EARLY.lock()
    {
        nvidia_mps::hand_over(welcome);
    }
}

/// The first session of this process.
fn first() -> Result<Option<(OwnedFd, Welcomed)>, CUresult> {
    let Some(way) = Way::first() else {
        return Ok(None);
    };
    let opened = welcomed(&way)?;
    if let Some((_, (welcome, ..))) = &opened
        && welcome.mode == DIRECT
    {
        WAY.get_or_init(|| way.next());
    }
    Ok(opened)
}

fn early_or_new() -> Result<Option<(OwnedFd, Welcomed)>, CUresult> {
    match EARLY.lock().take() {
        Some((process, socket, early)) if process == std::process::id() => {
            Ok(Some((socket, early)))
        }
        _ => first(),
    }
}

/// A connection and its welcome; `None` when there is no listener. If the server is just ending, asks the daemon again,
/// which will start another one.
fn welcomed(way: &Way) -> Result<Option<(OwnedFd, Welcomed)>, CUresult> {
    let (patience, pause) = way.tries;
    let began = Instant::now();
    let directory = way.socket.parent().unwrap_or(&way.socket);
    let mut notices = Notices::new(directory, way.hello.notices == 1);
    loop {
        let socket = match daemon::open(&way.socket) {
            Ok(Some(socket)) => socket,
            Ok(None) => return Ok(None),
            Err(error) => {
                tracing::error!(%error, "the daemon cannot be reached");
                return Err(CUDA_ERROR_MPS_CONNECTION_FAILED);
            }
        };
        match greet(&socket, &way.hello, &mut notices) {
            Ok(welcomed) => return Ok(Some((socket, welcomed))),
            Err(Unwelcome::ServerEnding(status)) if began.elapsed() < patience => {
                tracing::info!(%status, "the server is ending; trying again");
                thread::sleep(pause);
            }
            Err(Unwelcome::ServerEnding(status) | Unwelcome::Final(status)) => {
                tracing::error!(%status, "no session");
                notices.refused(status);
                return Err(status);
            }
        }
    }
}

/// The welcome, the segment or page, the doorbell, and in direct mode the memory of the user.
type Welcomed = (Welcome, OwnedFd, OwnedFd, Option<OwnedFd>);

/// Why there is no session.
enum Unwelcome {
    /// The connection was closed without a welcome, or the server said that its context is lost.
    ServerEnding(CUresult),
    /// The server's refusal is final.
    Final(CUresult),
}

impl Unwelcome {
    fn new(reason: std::fmt::Arguments<'_>) -> Unwelcome {
        Unwelcome::Final(refuse(reason))
    }

    /// An error of the socket while the server was to be talked to.
    fn of_socket(error: &io::Error) -> Unwelcome {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                Unwelcome::ServerEnding(CUDA_ERROR_MPS_CONNECTION_FAILED)
            }
            io::ErrorKind::WouldBlock => Unwelcome::Final(CUDA_ERROR_MPS_SERVER_NOT_READY),
            _ => Unwelcome::new(format_args!("the handshake failed: {error}")),
        }
    }
}

fn refuse(reason: std::fmt::Arguments<'_>) -> CUresult {
    tracing::error!("no session: {reason}");
    CUDA_ERROR_MPS_CONNECTION_FAILED
}

/// The hello of this process.
fn hello() -> ClientHello {
    ClientHello {
        magic: MAGIC_CLIENT,
        protocol: PROTOCOL_VERSION,
        table_hash: wire::fingerprint(),
        pid: std::process::id(),
        // cuInit refuses an invalid mode.
        mode: settings::mode().unwrap_or(0),
        required: settings::required().into(),
        active_thread_centipercent: match settings::percentage_per_context() {
            true => 0,
            false => settings::active_thread_centipercent(),
        },
        priority: settings::client_priority(),
        nvidia_mps: nvidia_mps::listens().into(),
        // The program is refused if the partition does not exist, and says so.
        notices: (settings::notices() || settings::sm_partition().is_some()).into(),
        ..ClientHello::new_zeroed()
    }
    .with_visible(settings::visible_devices().as_deref())
    .with_partition(settings::sm_partition().as_deref())
}

/// Sends the hello and takes the welcome with its descriptors.
fn greet(
    socket: &OwnedFd,
    hello: &ClientHello,
    notices: &mut Notices<'_>,
) -> Result<Welcomed, Unwelcome> {
    shm::send_packet(socket.as_fd(), hello.as_bytes(), &[])
        .map_err(|error| Unwelcome::of_socket(&error))?;
    let mut welcome = Welcome::new_zeroed();
    let (len, descriptors) = loop {
        notices.wait(socket);
        let (len, descriptors) = shm::recv_packet(socket.as_fd(), welcome.as_mut_bytes(), true)
            .map_err(|error| Unwelcome::of_socket(&error))?;
        if !notices.take(&welcome.as_bytes()[..len]) {
            break (len, descriptors);
        }
    };
    if len == 0 {
        return Err(Unwelcome::ServerEnding(CUDA_ERROR_MPS_CONNECTION_FAILED));
    }
    if len != size_of::<Welcome>() || welcome.magic != MAGIC_WELCOME {
        return Err(Unwelcome::new(format_args!("the answer is no welcome")));
    }
    if welcome.status != 0 {
        let status = CUresult(welcome.status);
        // A refusal by the daemon itself, which names no server, is final.
        return Err(match (status, welcome.server_pid) {
            (CUDA_ERROR_MPS_SERVER_NOT_READY, 1..) => Unwelcome::ServerEnding(status),
            _ => Unwelcome::Final(status),
        });
    }
    if welcome.protocol != PROTOCOL_VERSION || !matches!(welcome.mode, PROXY | DIRECT) {
        return Err(Unwelcome::new(format_args!(
            "the server speaks version {} and mode {}",
            welcome.protocol, welcome.mode
        )));
    }
    let lacks = |_| Unwelcome::new(format_args!("descriptors are missing from the welcome"));
    if welcome.mode == DIRECT {
        let descriptors: [OwnedFd; DIRECT_DESCRIPTORS.len()] =
            descriptors.try_into().map_err(lacks)?;
        let [page, doorbell, user] = descriptors;
        return Ok((welcome, page, doorbell, Some(user)));
    }
    let descriptors: [OwnedFd; WELCOME_DESCRIPTORS.len()] =
        descriptors.try_into().map_err(lacks)?;
    let [segment, doorbell] = descriptors;
    let arenas = (
        welcome.host_arena,
        welcome.host_arena_len,
        welcome.device_arena,
        welcome.device_arena_len,
    );
    if arenas != (HOST_ARENA, HOST_ARENA_LEN, DEVICE_ARENA, DEVICE_ARENA_LEN) {
        return Err(Unwelcome::new(format_args!(
            "the server's arenas lie elsewhere: {arenas:x?}"
        )));
    }
    let sound = welcome.segment_len == SEGMENT_LEN as u64
        && shm::is_sealed(segment.as_fd(), SEGMENT_LEN as u64);
    if !sound {
        return Err(Unwelcome::new(format_args!(
            "the segment has a wrong size or is not sealed"
        )));
    }
    Ok((welcome, segment, doorbell, None))
}

/// Keeps the arenas' addresses free of anything else. Without the host arena there is no pinned memory; without
/// the device arena a host pointer might be taken for device memory, which an address-space limit makes unlikely.
fn reserve_arenas(welcome: &Welcome) {
    match Reservation::at(HOST_ARENA, HOST_ARENA_LEN) {
        Ok(reservation) => {
            memory::host_arena_reserved();
            mem::forget(reservation);
        }
        Err(error) => tracing::warn!(%error, "no host arena: pinned memory is not available"),
    }
    let devices = (welcome.device_count as u64).min(MAX_DEVICES as u64);
    match Reservation::at(DEVICE_ARENA, devices * DEVICE_ARENA_STRIDE) {
        Ok(reservation) => {
            memory::device_arena_reserved();
            mem::forget(reservation);
        }
        Err(error) => tracing::warn!(%error, "no device arena"),
    }
    match Reservation::at(VIRTUAL_ARENA, VIRTUAL_ARENA_LEN) {
        Ok(reservation) => mem::forget(reservation),
        Err(error) => tracing::warn!(%error, "no virtual arena"),
    }
}

/// For each device of the program, in the order of its own `CUDA_VISIBLE_DEVICES`, the server's ordinal.
fn device_map(server: &[[u8; 16]], own: Option<&[CUuuid]>) -> Vec<Option<u32>> {
    let Some(own) = own else {
        // Without a genuine driver the server's order is all there is.
        return (0..server.len() as u32).map(Some).collect();
    };
    own.iter()
        .map(|uuid| {
            let found = server.iter().position(|other| *other == uuid.0);
            if found.is_none() {
                tracing::warn!(?uuid, "the server does not have this device");
            }
            found.map(|ordinal| ordinal as u32)
        })
        .collect()
}

/// Tells the server of `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`.
fn limit_memory(session: &Session, limits: &[(i32, u64)]) {
    for (ordinal, bytes) in limits {
        let Ok(device) = context::device(*ordinal) else {
            continue;
        };
        device.lower_memory(*bytes);
        if let Some(server) = device.server {
            let body = LimitMemory {
                device: server,
                pad: 0,
                bytes: *bytes,
            };
            // An error means that the server is gone.
            let _ = session.submit(Op::LimitMemory, &body);
        }
    }
}

/// The limits of `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` by the program's ordinal. Devices are numbered there as the program
/// numbers them, or named by the beginning of their UUID.
///
/// # Errors
/// A message naming an entry that is not a limit or names no device.
fn own_limits(
    server: &[[u8; 16]],
    own: Option<&[CUuuid]>,
    mode: u32,
) -> Result<Vec<(i32, u64)>, (CUresult, String)> {
    let given = settings::memory_limits().unwrap_or_default();
    if given.is_empty() {
        return Ok(Vec::new());
    }
    let map = device_map(server, own);
    let servers: Vec<CUuuid> = server.iter().map(|uuid| CUuuid(*uuid)).collect();
    limits_of(&given, own.unwrap_or(&servers), &servers, |ordinal| {
        // In direct mode, memory of a device that the server does not have is not counted.
        mode != DIRECT || map[ordinal].is_some()
    })
    .map_err(|(status, why)| {
        (
            status,
            format!("{}={given}: {why}", settings::PINNED_DEVICE_MEM_LIMIT),
        )
    })
}

/// `can_be_held` says whether a limit of one of the program's `own` devices means anything.
fn limits_of(
    given: &str,
    own: &[CUuuid],
    servers: &[CUuuid],
    can_be_held: impl Fn(usize) -> bool,
) -> Result<Vec<(i32, u64)>, (CUresult, String)> {
    let mut limits = Vec::new();
    for limit in mpsshim_proto::limits::of_devices(given) {
        let (name, bytes) = limit.map_err(|part| {
            let why = format!("\"{part}\" is not DEVICE=AMOUNT");
            (CUDA_ERROR_INVALID_VALUE, why)
        })?;
        let absent = || {
            let why = format!("the program has no device {name}");
            (CUDA_ERROR_INVALID_DEVICE, why)
        };
        let begins =
            |uuid: &CUuuid| name.len() > "GPU-".len() && uuid.to_string().starts_with(name);
        let ordinal = match name.parse::<usize>() {
            Ok(ordinal) if ordinal < own.len() => ordinal,
            Ok(_) => return Err(absent()),
            Err(_) => match own.iter().position(begins) {
                Some(ordinal) => ordinal,
                // The program does not see it, so there is nothing to limit.
                None if servers.iter().any(begins) => continue,
                None => return Err(absent()),
            },
        };
        if !can_be_held(ordinal) {
            let why = format!("the server does not have device {name}");
            return Err((CUDA_ERROR_INVALID_DEVICE, why));
        }
        limits.push((ordinal as i32, bytes));
    }
    Ok(limits)
}

/// Checks that the session has at most the percentage that the program requested.
fn check_percentage(welcome: &Welcome) -> Result<(), CUresult> {
    let asked = match settings::percentage_per_context() {
        true => 0,
        false => settings::active_thread_centipercent(),
    };
    if asked != 0 && welcome.active_thread_centipercent > asked {
        let why = format_args!(
            "the server does not hold {}, and MPSSHIM_REQUIRED is set",
            settings::ACTIVE_THREAD_PERCENTAGE
        );
        return Err(refusal::refuse(CUDA_ERROR_MPS_CONNECTION_FAILED, why));
    }
    Ok(())
}

/// The program's devices.
fn own_devices() -> Option<Vec<CUuuid>> {
    type Count = unsafe extern "C" fn(*mut i32) -> CUresult;
    type Uuid = unsafe extern "C" fn(*mut CUuuid, i32) -> CUresult;
    let count = genuine::symbol("cuDeviceGetCount")?;
    let uuid =
        genuine::symbol("cuDeviceGetUuid_v2").or_else(|| genuine::symbol("cuDeviceGetUuid"))?;
    // SAFETY: the driver's functions of these names have these signatures.
    let (count, uuid) = unsafe {
        (
            mem::transmute::<*const (), Count>(count),
            mem::transmute::<*const (), Uuid>(uuid),
        )
    };
    let mut devices = 0;
    // SAFETY: writes one int.
    if !unsafe { count(&mut devices) }.is_ok() {
        return None;
    }
    (0..devices)
        .map(|ordinal| {
            let mut found = CUuuid::default();
            // SAFETY: writes one UUID.
            unsafe { uuid(&mut found, ordinal) }
                .is_ok()
                .then_some(found)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_for_devices_that_there_are() {
        let [one, two, hidden] = [1, 2, 3].map(|byte| CUuuid([byte; 16]));
        let (own, servers) = ([two, one], [one, two, hidden]);
        let read = |given: &str| {
            let limits = limits_of(given, &own, &servers, |ordinal| ordinal == 0);
            limits.map_err(|(status, _)| status)
        };
        assert_eq!(read(""), Ok(vec![]));
        assert_eq!(read("0=1G"), Ok(vec![(0, 1 << 30)]));
        assert_eq!(read("GPU-02=1G,GPU-03=1G"), Ok(vec![(0, 1 << 30)]));
        for absent in [
            "2=1G",
            "0=1G,-1=1G",
            "GPU-=1G",
            "GPU-04=1G",
            "=1G",
            "1=1G",
            "GPU-01=1G",
        ] {
            assert_eq!(read(absent), Err(CUDA_ERROR_INVALID_DEVICE), "{absent}");
        }
        for nonsense in ["0", "0=abc", "0=0G", "0=1G,x"] {
            assert_eq!(read(nonsense), Err(CUDA_ERROR_INVALID_VALUE), "{nonsense}");
        }
    }
}
