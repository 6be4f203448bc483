//! Admission of new clients in both modes: version check, maximum number of clients, session number, and the users'
//! memory totals.

use crossbeam_channel::Sender;
use mpsshim_api::cuda::CUresult;
use mpsshim_control::user_memory::Users;
use mpsshim_model::client::{Credentials, EngineEvent};
use mpsshim_proto::handshake::{
    ClientHello, LONGEST_REASON, MAGIC_REFUSAL, MAGIC_WELCOME, PROTOCOL_VERSION, Welcome, Wire,
};
use mpsshim_proto::{shm, wire};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use zerocopy::{FromZeros, IntoBytes};

/// The clients of one server, of both modes.
#[derive(Debug)]
pub struct Admission {
    limit: usize,
    alive: AtomicUsize,
    next_session: AtomicU64,
    users: Users,
}

impl Admission {
    /// Admits at most `limit` clients at a time.
    pub fn new(limit: usize) -> Admission {
        Admission {
            limit,
            alive: AtomicUsize::new(0),
            next_session: AtomicU64::new(1),
            users: Users::default(),
        }
    }

    /// Maximum number of clients at a time.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// The users of the clients.
    pub fn users(&self) -> &Users {
        &self.users
    }

    /// Clients admitted and not yet gone.
    pub fn alive(&self) -> usize {
        self.alive.load(Ordering::Acquire)
    }

    /// The number of a new session, unless the maximum number of clients is reached.
    pub fn admit(&self) -> Option<u64> {
        let room = |alive: usize| (alive < self.limit).then_some(alive + 1);
        self.alive
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, room)
            .ok()?;
        Some(self.next_session.fetch_add(1, Ordering::Relaxed))
    }

    /// Counts a client that another server had admitted, with the number of its session.
    pub fn readmit(&self, session: u64) {
        self.alive.fetch_add(1, Ordering::AcqRel);
        self.next_session.fetch_max(session + 1, Ordering::Relaxed);
    }

    /// Takes an admission back.
    pub fn retract(&self) {
        self.alive.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether this server speaks the client's wire.
///
/// # Errors
/// How they differ, in words.
pub fn check_wire(spoken: Wire) -> Result<(), String> {
    if wire::is_spoken(spoken) {
        return Ok(());
    }
    Err(format!(
        "the client's library is of another release ({spoken}; here {})",
        wire::OWN
    ))
}

/// A welcome for a client that speaks this version of the protocol, which contains only its header and this status.
pub fn welcome(protocol: u32, status: CUresult) -> Welcome {
    let mut welcome = Welcome::new_zeroed();
    welcome.magic = MAGIC_WELCOME;
    welcome.protocol = protocol;
    welcome.status = status.0;
    welcome.server_pid = std::process::id();
    welcome
}

/// Gives a client that takes such packets the reason of the refusal that follows. The client may have ended already.
pub fn tell_reason(socket: &OwnedFd, hello: &ClientHello, why: &str) {
    if hello.notices == 1 {
        let mut end = why.len().min(LONGEST_REASON);
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        let packet = [&MAGIC_REFUSAL[..], &why.as_bytes()[..end]].concat();
        let _ = shm::send_packet(socket.as_fd(), &packet, &[]);
    }
}

/// Refuses a client and reports the reason. The client, and the receiver of `events`, may have ended already.
pub fn refuse(
    events: &Sender<EngineEvent>,
    socket: &OwnedFd,
    who: Credentials,
    status: CUresult,
    why: String,
) {
    let _ = shm::send_packet(
        socket.as_fd(),
        welcome(PROTOCOL_VERSION, status).as_bytes(),
        &[],
    );
    let _ = events.send(EngineEvent::Refused(who.pid, status.0, why));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_no_more_than_there_may_be() {
        let admission = Admission::new(2);
        assert_eq!((admission.admit(), admission.admit()), (Some(1), Some(2)));
        assert_eq!((admission.admit(), admission.alive()), (None, 2));
        admission.retract();
        assert_eq!(admission.admit(), Some(3));
        let next = Admission::new(2);
        next.readmit(3);
        assert_eq!((next.admit(), next.admit()), (Some(4), None));
    }
}
