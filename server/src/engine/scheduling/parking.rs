//! Removes sessions that have been idle for a while from a dispatch thread's polling loop.
//!
//! A dispatch thread polls each of its sessions in every round, which takes 25 ns for an idle one: with 250 on a
//! thread, a client's launch and wait took 6 µs longer. On a thread with many sessions, idle ones are therefore parked:
//! as before a sleep, their clients are told to ring the doorbell, and only those doorbells are polled, all at once and
//! at intervals.

use crate::engine::base::printing::session::prints;
use crate::engine::objects::activity::session::sample;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// A thread with at most this many sessions polls all of them in every round.
const CROWD: usize = 16;
/// Number of consecutive counts without a new message before a session may be parked; counts are about 1 ms apart.
const QUIET: u32 = 32;
/// Poll interval for the doorbells.
const PAUSE: Duration = Duration::from_micros(20);

/// Sessions of a dispatch thread.
pub type Sessions = Vec<Box<Session>>;

/// The parked sessions of a dispatch thread.
pub struct Parked {
    /// Watches their doorbells. `None` if no descriptors are left; then no session is parked.
    epoll: Option<Epoll>,
    places: Vec<Option<Box<Session>>>,
    count: usize,
    asked: Instant,
}

impl Parked {
    /// Creates the state of a thread without parked sessions.
    pub fn new() -> Parked {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC);
        let epoll = epoll
            .inspect_err(|error| tracing::warn!(%error, "cannot park idle clients; they stay in the polling loop"));
        Parked {
            epoll: epoll.ok(),
            places: Vec::new(),
            count: 0,
            asked: Instant::now(),
        }
    }

    /// Returns a descriptor that becomes readable when one of their doorbells rings.
    pub fn fd(&self) -> Option<RawFd> {
        let epoll = self.epoll.as_ref().filter(|_| self.count > 0)?;
        Some(epoll.0.as_raw_fd())
    }

    /// Parks idle sessions while there are more than [`CROWD`]. Must be called once per count of their messages.
    pub fn park_quiet(&mut self, shared: &Shared, sessions: &mut Sessions) {
        let mut at = 0;
        while at < sessions.len() {
            let quiet = count_quiet(&mut sessions[at]);
            if quiet && sessions.len() > CROWD && can_park(&mut sessions[at], shared) {
                let session = sessions.swap_remove(at);
                if let Err(session) = self.park(shared, session) {
                    sessions.push(session);
                    at += 1;
                }
            } else {
                at += 1;
            }
        }
    }

    fn park(&mut self, shared: &Shared, mut session: Box<Session>) -> Result<(), Box<Session>> {
        let Some(epoll) = &self.epoll else {
            return Err(session);
        };
        let place = match self.places.iter().position(Option::is_none) {
            Some(place) => place,
            None => {
                self.places.push(None);
                self.places.len() - 1
            }
        };
        let event = EpollEvent::new(EpollFlags::EPOLLIN, place as u64);
        if let Err(error) = epoll.add(session.shared.bell.fd(), event) {
            tracing::debug!(%error, "a quiet client is looked at like others");
            return Err(session);
        }
        sample(&mut session, &shared.gpu, Instant::now(), true);
        // It can only be parked because nothing is in flight.
        session.shared.at_work.store(false, Ordering::Release);
        let sleeps = &session.shared.header().server_sleeps.0;
        sleeps.store(1, Ordering::Relaxed);
        // Partner: the client, which reads `server_sleeps` after it has written its message.
        fence(Ordering::SeqCst);
        if wants_attention(&session) {
            let _ = epoll.delete(session.shared.bell.fd());
            sleeps.store(0, Ordering::Relaxed);
            return Err(session);
        }
        self.places[place] = Some(session);
        self.count += 1;
        Ok(())
    }

    /// Moves the sessions whose doorbell has rung back to the polling loop, unless polled within the last [`PAUSE`].
    pub fn take_rung(&mut self, shared: &Shared, sessions: &mut Sessions, at_once: bool) {
        let Some(epoll) = self.epoll.as_ref().filter(|_| self.count > 0) else {
            return;
        };
        let now = Instant::now();
        if !at_once && now.duration_since(self.asked) < PAUSE {
            return;
        }
        self.asked = now;
        let mut events = [EpollEvent::empty(); 64];
        // An error means that no doorbell is known to have rung; the next poll repeats the question.
        let count = epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            if let Some(session) = self.take(event.data() as usize) {
                session.shared.bell.silence();
                sessions.push(unparked(shared, session));
            }
        }
    }

    /// Moves all sessions back to the polling loop.
    pub fn take_all(&mut self, shared: &Shared, sessions: &mut Sessions) {
        for place in 0..self.places.len() {
            sessions.extend(self.take(place).map(|session| unparked(shared, session)));
        }
    }

    fn take(&mut self, place: usize) -> Option<Box<Session>> {
        let session = self.places.get_mut(place)?.take()?;
        self.count -= 1;
        if let Some(epoll) = &self.epoll {
            let _ = epoll.delete(session.shared.bell.fd());
        }
        Some(session)
    }
}

fn unparked(shared: &Shared, mut session: Box<Session>) -> Box<Session> {
    session.flow.quiet = Default::default();
    awake(shared, &session);
    session
}

/// Tells a session's client that its doorbell need not be rung any more.
pub fn awake(shared: &Shared, session: &Session) {
    let header = session.shared.header();
    header.server_sleeps.0.store(0, Ordering::Relaxed);
    if header.sleeping.0.load(Ordering::Relaxed) != 0 {
        shared.lanes.wake_watcher();
    }
}

/// Counts how long it has been idle. Returns whether that is long enough to park it.
fn count_quiet(session: &mut Session) -> bool {
    if session.flow.quiet.dispatched != session.flow.dispatched {
        session.flow.quiet.dispatched = session.flow.dispatched;
        session.flow.quiet.counts = 0;
    }
    session.flow.quiet.counts = session.flow.quiet.counts.saturating_add(1);
    session.flow.quiet.counts > QUIET
}

/// Whether it needs no service until its doorbell rings.
fn can_park(session: &mut Session, shared: &Shared) -> bool {
    !session.inbox.held.any()
        && session.objects.releasing.is_empty()
        && !session.objects.pools.is_untrimmed()
        && !prints(session)
        && !session.flow.has_graph_turn
        && !session.flow.loops.has
        && session.snapshot_pause().is_none()
        && session.flow.room_at.is_none()
        && session.shared.header().sleeping.0.load(Ordering::Relaxed) == 0
        && !session.has_work_in_flight(&shared.gpu)
}

/// Whether it needs service now.
pub fn wants_attention(session: &Session) -> bool {
    session.inbox.express.has_message()
        || session.inbox.consumer.has_message() && !session.inbox.held.is_stalled()
        || session.inbox.held.is_released(&session.shared.segment)
        || session.shared.hung_up.load(Ordering::Relaxed)
}
