//! Sessions that are quiet for a while, out of a dispatch thread's way.
//!
//! A dispatch thread looks at each of its sessions in every round, which takes 25 ns for one that is idle: with 250 on a
//! thread, a client's launch and wait took 6 µs longer. With many on a thread those that send nothing are parked: told, as before a sleep, that
//! their doorbell has to be rung, and only those bells are asked about, all at once and now and then.

use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// So many sessions of a thread are looked at in every round, whatever they do.
const CROWD: usize = 16;
/// How often a session's messages are counted without a new one, until it may be parked: about once a millisecond.
const QUIET: u32 = 32;
/// Between two questions about the bells.
const PAUSE: Duration = Duration::from_micros(20);

/// Sessions of a dispatch thread.
pub type Sessions = Vec<Box<Session>>;

/// The sessions of a thread that are parked.
pub struct Parked {
    /// Of their bells. `None`: there are no descriptors left, and nobody is parked.
    epoll: Option<Epoll>,
    places: Vec<Option<Box<Session>>>,
    count: usize,
    asked: Instant,
}

impl Parked {
    /// None yet.
    pub fn new() -> Parked {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC);
        let epoll = epoll
            .inspect_err(|error| tracing::warn!(%error, "quiet clients are looked at like others"));
        Parked {
            epoll: epoll.ok(),
            places: Vec::new(),
            count: 0,
            asked: Instant::now(),
        }
    }

    /// Readable when a bell of theirs was rung.
    pub fn fd(&self) -> Option<RawFd> {
        let epoll = self.epoll.as_ref().filter(|_| self.count > 0)?;
        Some(epoll.0.as_raw_fd())
    }

    /// Parks those that are quiet, as long as there is a crowd. To be called once for each count of their messages.
    pub fn park_quiet(&mut self, shared: &Shared, sessions: &mut Sessions) {
        let mut at = 0;
        while at < sessions.len() {
            let quiet = sessions[at].count_quiet();
            if quiet && sessions.len() > CROWD && sessions[at].can_park(shared) {
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
        session.sample(&shared.gpu, Instant::now(), true);
        // It may be parked because nothing is in flight.
        session.shared.at_work.store(false, Ordering::Release);
        let sleeps = &session.shared.header().server_sleeps.0;
        sleeps.store(1, Ordering::Relaxed);
        // Partner: the client, which looks at `server_sleeps` after it has posted.
        fence(Ordering::SeqCst);
        if session.wants_attention() {
            let _ = epoll.delete(session.shared.bell.fd());
            sleeps.store(0, Ordering::Relaxed);
            return Err(session);
        }
        self.places[place] = Some(session);
        self.count += 1;
        Ok(())
    }

    /// Takes those whose bell was rung, if it is time to ask.
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
        // An error means that none is known to have rung; it is asked again.
        let count = epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            if let Some(session) = self.take(event.data() as usize) {
                session.shared.bell.silence();
                sessions.push(unparked(shared, session));
            }
        }
    }

    /// Takes all.
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

impl Session {
    /// Counts how long it has been quiet; whether it was for long enough.
    fn count_quiet(&mut self) -> bool {
        if self.flow.quiet.dispatched != self.flow.dispatched {
            self.flow.quiet.dispatched = self.flow.dispatched;
            self.flow.quiet.counts = 0;
        }
        self.flow.quiet.counts = self.flow.quiet.counts.saturating_add(1);
        self.flow.quiet.counts > QUIET
    }

    /// Whether nothing has to be done for it until its bell rings.
    fn can_park(&mut self, shared: &Shared) -> bool {
        !self.inbox.held.any()
            && self.objects.releasing.is_empty()
            && !self.objects.pools.is_untrimmed()
            && !self.prints()
            && !self.flow.has_graph_turn
            && self.snapshot_pause().is_none()
            && self.shared.header().sleeping.0.load(Ordering::Relaxed) == 0
            && !self.has_work_in_flight(&shared.gpu)
    }

    /// Whether there is something to do for it.
    pub fn wants_attention(&self) -> bool {
        self.inbox.consumer.has_message() && !self.inbox.held.is_stalled()
            || self.inbox.held.is_released(&self.shared.segment)
            || self.shared.hung_up.load(Ordering::Relaxed)
    }
}
