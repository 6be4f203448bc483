//! The session with a server, and its replacement when the server has ended.
//!
//! A program does not end with its server. A thread waits for the end of the connection; then it opens the gate and
//! requests a session with the next server from the daemon. The program's memory and devices are entered in the new page.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mpsshim_proto::direct::{PAGE_LEN, Page};
use mpsshim_proto::shm::{self, Doorbell, Mapping};
use mpsshim_proto::user_memory::{PLACES, USER_MEMORY_LEN, UserMemory};

use super::state::{self, Direct, direct};
use super::{memory, turn};
use crate::thread;

/// If a server lasts no longer than this, the next one is not requested at once.
const SHORT: Duration = Duration::from_secs(1);

/// Takes the page of a new session, the first one or the next, and the memory of its user.
///
/// # Errors
/// They cannot be mapped, or are invalid; the server has other devices than the one before.
pub fn begin(
    (page, user): (&OwnedFd, &OwnedFd),
    doorbell: OwnedFd,
    socket: OwnedFd,
    devices: Vec<Option<u32>>,
) -> Result<(), String> {
    // Memory and turns are counted by the server's ordinals.
    if direct().is_some_and(|before| before.devices != devices) {
        return Err("the next server has other devices".into());
    }
    let page = map(page, PAGE_LEN).map_err(|error| format!("the page {error}"))?;
    let user = map(user, USER_MEMORY_LEN).map_err(|error| format!("the user's memory {error}"))?;
    // SAFETY: a mapping of PAGE_LEN bytes, sealed against shrinking and never unmapped; Page is all atomics.
    let page = unsafe { &*page.base().cast::<Page>() };
    if page.place.load(Ordering::Relaxed) as usize >= PLACES {
        return Err("there is no such place among the user's clients".into());
    }
    let direct: &Direct = Box::leak(Box::new(Direct {
        page,
        // SAFETY: as above, of USER_MEMORY_LEN bytes; UserMemory is all atomics.
        user: unsafe { &*user.base().cast::<UserMemory>() },
        doorbell: Doorbell::from_fd(doorbell),
        socket,
        devices,
    }));
    memory::count_in(direct.page, direct.user);
    turn::take_up(direct);
    Ok(())
}

/// Maps a file of the server's for as long as the process lives.
fn map(file: &OwnedFd, len: usize) -> Result<ManuallyDrop<Mapping>, String> {
    if !shm::is_sealed(file.as_fd(), len as u64) {
        return Err("is not as it should be".into());
    }
    let mapping = Mapping::new(file.as_fd(), len);
    let mapping = mapping.map_err(|error| format!("cannot be mapped: {error}"))?;
    Ok(ManuallyDrop::new(mapping))
}

/// Starts the thread that notices the server's end and calls `renew` for the next session.
pub fn watch(direct: &'static Direct, renew: fn() -> Result<(), String>) {
    let spawned = thread::without_signals(|| {
        std::thread::Builder::new()
            .name("mpsshim-server".into())
            .spawn(move || keep_sessions(direct, renew))
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "no thread to watch the server; no turns are taken");
        turn::lost(direct);
    }
}

/// Returns when there is no other server, or the operator has ended the session.
fn keep_sessions(mut direct: &'static Direct, renew: fn() -> Result<(), String>) {
    loop {
        let began = Instant::now();
        wait_for_end(direct);
        if !turn::lost(direct) {
            return;
        }
        tracing::warn!("the server has gone; no turns are taken until there is another one");
        if began.elapsed() < SHORT {
            std::thread::sleep(SHORT);
        }
        direct = match renew().map(|()| state::direct()) {
            Ok(Some(next)) => next,
            Ok(None) => return,
            Err(reason) => {
                tracing::warn!("no turns are taken from now on: {reason}");
                return;
            }
        };
        turn::start(direct);
    }
}

/// Blocks until the connection has ended: nothing else happens on it.
fn wait_for_end(direct: &Direct) {
    let mut poll = libc::pollfd {
        fd: direct.socket.as_raw_fd(),
        events: libc::POLLRDHUP,
        revents: 0,
    };
    // SAFETY: one pollfd of ours.
    while unsafe { libc::poll(&raw mut poll, 1, -1) } < 1 {
        // A signal, though this thread takes none, or no memory at the moment.
        std::thread::yield_now();
    }
}
