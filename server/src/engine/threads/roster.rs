//! The clients of the server, their limits, and the objects they share with each other.

use crate::admission::Admission;
use crate::engine::base::side::Side;
use crate::engine::gpu::Gpu;
use crate::engine::objects::fairness::Fairness;
use crate::engine::objects::shared_events::SharedEvents;
use crate::engine::objects::shares::Shares;
use crate::engine::session::SessionShared;
use crossbeam_channel::Sender;
use mpsshim_model::client::EngineEvent;
use mpsshim_model::limits::Limits;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The clients.
pub struct Roster {
    /// Live sessions by number.
    pub sessions: Mutex<HashMap<u64, Arc<SessionShared>>>,
    /// Ended sessions that may have work in flight.
    pub leaving: Mutex<HashMap<u64, Arc<SessionShared>>>,
    /// Limits of new clients, and the scheduling of all clients.
    pub limits: Mutex<Limits>,
    /// Priorities and weights.
    pub fairness: Fairness,
    /// Clients of both modes, counted.
    pub admission: Arc<Admission>,
    /// Memory that clients share with each other.
    pub shares: Shares,
    /// Events that clients share with each other.
    pub shared_events: SharedEvents,
    /// Receives events for the engine's owner.
    pub events: Sender<EngineEvent>,
    /// The epoll descriptor that reports closed client sockets.
    pub epoll: OwnedFd,
    /// Number of dispatch threads.
    pub threads: usize,
    /// Number of CPUs.
    pub cpus: usize,
    /// Whether more threads want to run than there are CPUs.
    pub crowded: AtomicBool,
}

impl Roster {
    /// Sends an event to the engine's owner.
    pub fn tell(&self, event: EngineEvent) {
        let _ = self.events.send(event);
    }

    /// Adds a session.
    pub fn remember(&self, session: &Arc<SessionShared>) {
        self.sessions
            .lock()
            .insert(session.info.session, session.clone());
        self.update_crowded();
    }

    /// Removes a session.
    pub fn forget(&self, session: &SessionShared) {
        // A closed socket would otherwise wake the socket thread again and again.
        self.unwatch_socket(session);
        self.sessions.lock().remove(&session.info.session);
        self.update_crowded();
    }

    fn update_crowded(&self) {
        let sessions = self.sessions.lock();
        let crowded = sessions.len() + self.threads.min(sessions.len()) > self.cpus;
        self.crowded.store(crowded, Ordering::Relaxed);
        for session in sessions.values() {
            session
                .header()
                .crowded
                .store(crowded.into(), Ordering::Relaxed);
        }
    }

    /// Returns the session with this number.
    pub fn session(&self, id: u64) -> Option<Arc<SessionShared>> {
        self.sessions.lock().get(&id).cloned()
    }

    /// All sessions.
    pub fn session_list(&self) -> Vec<Arc<SessionShared>> {
        self.sessions.lock().values().cloned().collect()
    }

    /// The descriptor that becomes readable when a client closes its socket.
    pub fn epoll(&self) -> i32 {
        self.epoll.as_raw_fd()
    }

    /// Watches for the client closing its socket.
    ///
    /// # Errors
    /// The system call's error.
    pub fn watch_socket(&self, session: &SessionShared) -> std::io::Result<()> {
        let mut event = libc::epoll_event {
            events: (libc::EPOLLRDHUP | libc::EPOLLHUP) as u32,
            u64: session.info.session,
        };
        // SAFETY: two open descriptors and an event that lives through the call.
        let result = unsafe {
            libc::epoll_ctl(
                self.epoll(),
                libc::EPOLL_CTL_ADD,
                session.socket.as_raw_fd(),
                &mut event,
            )
        };
        if result < 0 {
            Err(std::io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Stops watching a client's socket.
    pub fn unwatch_socket(&self, session: &SessionShared) {
        // SAFETY: two open descriptors.
        unsafe {
            libc::epoll_ctl(
                self.epoll(),
                libc::EPOLL_CTL_DEL,
                session.socket.as_raw_fd(),
                std::ptr::null_mut(),
            );
        }
    }

    /// Tells the engine's owner that a session's resources have been freed.
    pub fn gone(&self, session: &SessionShared, uncounted: bool, why: Option<String>) {
        if !uncounted {
            self.admission.retract();
        }
        self.tell(EngineEvent::Gone(session.info.clone(), why));
    }

    /// Whether nothing is in flight, as far as the sessions have reported.
    pub fn is_quiet(&self, gpu: &Gpu, side: Side) -> bool {
        let works = |session: &Arc<SessionShared>| session.is_at_work(gpu);
        gpu.calm(side).is_still() && !self.sessions_of(side).any(|session| works(&session))
    }

    /// The sessions of a side.
    pub fn sessions_of(&self, side: Side) -> impl Iterator<Item = Arc<SessionShared>> {
        let all = self.session_list().into_iter();
        all.filter(move |session| session.side() == side)
    }

    /// Records that a client is about to leave the list of sessions while its work may continue.
    pub fn note_leaving(&self, session: &Arc<SessionShared>) {
        let mut leaving = self.leaving.lock();
        leaving.insert(session.info.session, session.clone());
    }

    /// Records that none of the client's work is in flight any more.
    pub fn note_drained(&self, session: &SessionShared) {
        self.leaving.lock().remove(&session.info.session);
    }

    /// Returns the clients that have left with work in flight.
    pub fn leaving_at_work(&self) -> Vec<Arc<SessionShared>> {
        let leaving = self.leaving.lock();
        let at_work = leaving.values().filter(|session| !session.is_at_rest());
        at_work.cloned().collect()
    }
}
