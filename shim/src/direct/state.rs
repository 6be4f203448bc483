//! The session with a server, as the rest of direct mode sees it.

use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use mpsshim_proto::direct::Page;
use mpsshim_proto::shm::Doorbell;
use mpsshim_proto::user_memory::UserMemory;

/// A session with a server, in this process. Never freed: a thread may still read its page after the session's end.
#[derive(Debug)]
pub struct Direct {
    pub page: &'static Page,
    /// Memory held by all clients of this user.
    pub user: &'static UserMemory,
    pub doorbell: Doorbell,
    pub socket: OwnedFd,
    /// For each device of the program's the server's ordinal.
    pub devices: Vec<Option<u32>>,
}

static CURRENT: AtomicPtr<Direct> = AtomicPtr::new(ptr::null_mut());

/// The session of this process, even if its server has gone; `None` in any other mode.
pub fn direct() -> Option<&'static Direct> {
    // SAFETY: null, or a session that is never freed.
    unsafe { CURRENT.load(Ordering::SeqCst).as_ref() }
}

/// The session of this process from now on. Called while the gate is kept.
pub fn set_current(direct: &'static Direct) {
    CURRENT.store(ptr::from_ref(direct).cast_mut(), Ordering::SeqCst);
}

/// The server's ordinal of a device of the program's.
pub fn server_device(ordinal: i32) -> Option<usize> {
    let devices = &direct()?.devices;
    let server = devices.get(usize::try_from(ordinal).ok()?)?;
    server.map(|server| server as usize)
}
