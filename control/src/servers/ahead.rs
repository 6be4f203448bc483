//! Images that a standby loads ahead: it gets them from its server, which works on meanwhile.
//!
//! A standby that is kept ready gets them when it is ready, and again a moment after the server has said that they have
//! changed. A restart gives them to its standby once more, waits for a limited time until they are loaded, and goes on without
//! if anything fails.

use super::Servers;
use super::server::{Server, State};
use super::standby::{Rest, Step};
use crate::closers::Stranger;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long a restart waits for images that are loaded ahead.
const AHEAD_PATIENCE: Duration = Duration::from_secs(20);
/// How long after a change a standby gets the images: programs load many one after the other.
const SETTLING: Duration = Duration::from_secs(1);
/// How long after a client has needed the memory of its images a standby gets images again.
const SHORT_PAUSE: Duration = Duration::from_secs(30);
/// How long a standby may take to load images. It begins none after 20 s.
const LOAD_PATIENCE: Duration = Duration::from_secs(60);

/// The images of a server's sessions, for its standby.
#[derive(Debug, Default)]
pub(super) struct InUse {
    /// Number of requests that the server has not answered.
    asked: usize,
    /// Its last answer: a connection to a temporary keeper, or `None` in the answer.
    answer: Option<Option<Stranger>>,
    /// The standby that has got them, or gets them.
    of_standby: Option<i32>,
    /// When the standby gets them again.
    again_at: Option<Instant>,
    /// A client needs the memory that the standby's images take.
    pub(super) short: bool,
    /// A standby has ended while it loaded images: the next ones load none.
    failed: bool,
}

impl InUse {
    /// An answer that was not requested is dropped.
    pub(super) fn note_answer(&mut self, images: Option<Stranger>) {
        if self.asked > 0 {
            self.asked -= 1;
            self.answer = Some(images);
        }
    }

    /// The images have changed, or may have.
    pub(super) fn note_change(&mut self, now: Instant) {
        self.again_at.get_or_insert(now + SETTLING);
    }

    /// A standby has ended while it loaded images.
    pub(super) fn note_failure(&mut self) {
        self.failed = true;
    }

    /// When a standby gets the images; `None`: not before they change.
    fn due_at(&self, standby: i32, now: Instant) -> Option<Instant> {
        match self.of_standby == Some(standby) {
            true => self.again_at,
            false => Some(self.again_at.filter(|at| *at > now).unwrap_or(now)),
        }
    }

    fn begin(&mut self, standby: i32) {
        self.asked += 1;
        self.of_standby = Some(standby);
        self.again_at = None;
    }

    fn put_off(&mut self, until: Instant) {
        self.again_at = Some(until);
    }
}

/// Orders to a standby to load images ahead, or to unload them.
#[derive(Debug, Default)]
pub(super) struct Loads {
    /// Number of orders that it has not carried out.
    pending: usize,
    /// When it must have carried out the first of them.
    by: Option<Instant>,
}

impl Loads {
    pub(super) fn note_end(&mut self) {
        self.pending = self.pending.saturating_sub(1);
        self.by = match self.pending {
            0 => None,
            _ => Some(Instant::now() + LOAD_PATIENCE),
        };
    }

    fn note_order(&mut self, now: Instant) {
        self.pending += 1;
        self.by.get_or_insert(now + LOAD_PATIENCE);
    }

    pub(super) fn is_pending(&self) -> bool {
        self.pending > 0
    }
}

/// How long the next server, which must have started by `starts_by`, may take to load images ahead from now on. Half of the
/// time until the clients must be at rest is left to them.
fn ahead_bound(starts_by: Instant, rest: Rest, now: Instant) -> Duration {
    let left = starts_by.saturating_duration_since(now).min(AHEAD_PATIENCE);
    match rest {
        Rest::Within(_) => left,
        Rest::By(_) => left.min(rest.left(now) / 2),
    }
}

impl Servers {
    /// Has the standby of a restart, at this index, load images ahead, once it is ready.
    pub(super) fn load_ahead(&mut self, at: usize) -> Option<Step> {
        let pid = self.restarts[at].server;
        let standby = self.standby_of(pid).map(|standby| &self.running[standby]);
        if standby.is_some_and(|standby| standby.stands_by.is_none()) {
            return None;
        }
        self.restarts[at].ahead = false;
        let has_images = |server: &Server| !server.sessions.is_empty();
        let asked = self.by_pid(pid).is_some_and(has_images) && self.ask_for_images(pid);
        if !asked {
            return self.end_loading(at);
        }
        let restart = &mut self.restarts[at];
        let now = Instant::now();
        restart.until = now + ahead_bound(restart.starts_by, restart.rest, now);
        Some(Step::LoadsAhead)
    }

    /// Goes on when images are loaded ahead. If the standby has ended meanwhile, another one is started, which loads none.
    pub(super) fn look_whether_loaded(&mut self, at: usize) -> Option<Step> {
        let pid = self.restarts[at].server;
        if !self.by_pid(pid).is_some_and(Server::may_hand_over) {
            return self.end_loading(at);
        }
        let Some(standby) = self.standby_of(pid) else {
            self.restarts[at].until = self.restarts[at].starts_by;
            let single = self
                .by_pid(pid)
                .is_some_and(|server| server.single.is_some());
            return match self.start_next(pid, single) {
                Ok(()) => Some(Step::Prepares),
                Err(why) => Some(Step::Over(Err(why))),
            };
        };
        self.has_loaded_ahead(pid, standby)
            .then(|| self.end_loading(at))
            .flatten()
    }

    /// Asks a server for the images of its sessions, for its standby. Returns whether that may load images ahead.
    fn ask_for_images(&mut self, pid: i32) -> bool {
        let standby = self.standby_of(pid).map(|standby| &self.running[standby]);
        let Some(standby) = standby.filter(|standby| standby.stands_by.is_some()) else {
            return false;
        };
        let standby = standby.pid;
        // Without a context of its own, a standby can load nothing.
        let may_ask = |server: &&mut Server| {
            let serves = server.state == State::Active && !server.is_exclusive();
            serves && !server.images.failed
        };
        let Some(server) = self.by_pid_mut(pid).filter(may_ask) else {
            return false;
        };
        let asked = server.link.as_ref().map(|link| link.ask_images());
        let is_asked = matches!(asked, Some(Ok(())));
        if is_asked {
            server.images.begin(standby);
        }
        is_asked
    }

    /// Passes the images of a server on to its standby, at this index, if they have come. Returns whether the standby is done
    /// with them, or will not get any.
    fn has_loaded_ahead(&mut self, pid: i32, standby: usize) -> bool {
        let Some(server) = self.by_pid_mut(pid) else {
            return true;
        };
        let (answer, awaited) = (server.images.answer.take(), server.images.asked > 0);
        if let Some(Some(images)) = answer {
            let now = Instant::now();
            let standby = &mut self.running[standby];
            let link = standby.link.as_ref();
            let ordered = link.map(|link| link.order_images(images.as_fd()));
            let is_ordered = matches!(ordered, Some(Ok(())));
            if is_ordered {
                standby.loads.note_order(now);
            } else if let Some(server) = self.by_pid_mut(pid) {
                server.images.note_change(now);
            }
        }
        !awaited && !self.running[standby].loads.is_pending()
    }

    /// The servers whose standbys are kept ready, with the index of the standby, unless a restart does the same.
    fn kept_ready<'a>(&'a self) -> impl Iterator<Item = (&'a Server, usize)> {
        let serves = |server: &&Server| {
            let restarts = |pid| !self.is_restarted(pid);
            let works = server.state == State::Active && !server.is_exclusive();
            works && server.standby_of.is_none() && !restarts(server.pid)
        };
        let with_standby = |server: &'a Server| {
            let standby = self.standby_of(server.pid)?;
            let is_ready = self.running[standby].stands_by.is_some();
            is_ready.then_some((server, standby))
        };
        let keeps = self.launcher.keeps_standbys() && !self.closing;
        let servers = self.running.iter().filter(move |_| keeps);
        servers.filter(serves).filter_map(with_standby)
    }

    /// When a standby gets images, unless it, or its server, is busy with earlier ones.
    fn images_due(&self, server: &Server, standby: usize, now: Instant) -> Option<Instant> {
        let standby = &self.running[standby];
        let is_busy = server.images.asked > 0 || standby.loads.is_pending();
        let waits = is_busy || server.images.failed;
        (!waits).then(|| server.images.due_at(standby.pid, now))?
    }

    /// When [`Servers::keep_images`] has something to do next.
    pub(super) fn images_deadline(&self) -> Option<Instant> {
        let now = Instant::now();
        let due = self
            .kept_ready()
            .filter_map(|(server, standby)| self.images_due(server, standby, now));
        let late = self.running.iter().filter_map(|server| server.loads.by);
        due.chain(late).min()
    }

    /// Passes images of servers on to the standbys that are kept ready, and asks for them where they have changed.
    pub(super) fn keep_images(&mut self) {
        let now = Instant::now();
        let kept: Vec<(i32, usize)> = self
            .kept_ready()
            .map(|(server, standby)| (server.pid, standby))
            .collect();
        for (pid, standby) in kept {
            self.has_loaded_ahead(pid, standby);
            self.free_memory_of(pid, standby, now);
            let due = self
                .by_pid(pid)
                .and_then(|server| self.images_due(server, standby, now));
            if due.is_some_and(|at| at <= now)
                && !self.ask_for_images(pid)
                && let Some(server) = self.by_pid_mut(pid)
            {
                // The server's link has no room, or is closed.
                server.images.put_off(now + SETTLING);
            }
        }
        self.end_late_standbys(now);
    }

    /// Has a standby unload its images if a client needs the memory.
    fn free_memory_of(&mut self, pid: i32, standby: usize, now: Instant) {
        let Some(server) = self.by_pid_mut(pid) else {
            return;
        };
        if !std::mem::take(&mut server.images.short) {
            return;
        }
        server.images.put_off(now + SHORT_PAUSE);
        let standby = &mut self.running[standby];
        let ordered = standby.link.as_ref().map(|link| link.order_unload());
        if matches!(ordered, Some(Ok(()))) {
            standby.loads.note_order(now);
            tracing::info!(
                "Standby {} unloads its images: a client of server {pid} needs the memory",
                standby.pid
            );
        }
    }

    /// Kills standbys that do not get on with images: others, which load none, replace them.
    fn end_late_standbys(&mut self, now: Instant) {
        for server in &mut self.running {
            if server.loads.by.take_if(|at| *at <= now).is_some() && server.standby_of.is_some() {
                tracing::error!(
                    "Standby {} has loaded images for {} s, killing it",
                    server.pid,
                    LOAD_PATIENCE.as_secs()
                );
                server.kill();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::standby::REST_PATIENCE;
    use super::*;

    #[test]
    fn a_standby_gets_images_when_it_is_ready_and_a_moment_after_each_change() {
        let now = Instant::now();
        let mut images = InUse::default();
        assert_eq!(images.due_at(1, now), Some(now));
        images.begin(1);
        assert_eq!(images.due_at(1, now), None);
        images.note_change(now);
        images.note_change(now + SETTLING / 2);
        assert_eq!(images.due_at(1, now), Some(now + SETTLING));
        images.begin(1);
        // Another standby.
        assert_eq!(images.due_at(2, now), Some(now));
        // Changes do not shorten the pause after a lack of memory.
        images.begin(2);
        images.put_off(now + SHORT_PAUSE);
        images.note_change(now);
        assert_eq!(images.due_at(2, now), Some(now + SHORT_PAUSE));
    }

    #[test]
    fn only_answers_to_requests_are_kept() {
        let mut images = InUse::default();
        images.note_answer(None);
        assert!(images.answer.is_none());
        images.begin(1);
        images.note_answer(None);
        assert!(images.answer.is_some() && images.asked == 0);
    }

    #[test]
    fn a_standby_has_a_limited_time_for_each_order() {
        let now = Instant::now();
        let mut loads = Loads::default();
        loads.note_end();
        assert!(!loads.is_pending() && loads.by.is_none());
        loads.note_order(now);
        loads.note_order(now + SETTLING);
        assert_eq!(loads.by, Some(now + LOAD_PATIENCE));
        loads.note_end();
        assert!(loads.is_pending() && loads.by.is_some_and(|by| by >= now + LOAD_PATIENCE));
        loads.note_end();
        assert!(!loads.is_pending() && loads.by.is_none());
    }

    #[test]
    fn images_are_loaded_ahead_within_the_bound_of_a_restart() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let bound = |starts_by, rest| ahead_bound(starts_by, rest, now).as_secs();
        let usual = Rest::Within(REST_PATIENCE);
        assert_eq!(bound(after(50), usual), AHEAD_PATIENCE.as_secs());
        assert_eq!(bound(after(7), usual), 7);
        assert_eq!(bound(now, Rest::Within(Duration::ZERO)), 0);
        assert_eq!(bound(after(10), Rest::By(after(10))), 5);
        assert_eq!(
            bound(after(60), Rest::By(after(3600))),
            AHEAD_PATIENCE.as_secs()
        );
    }
}
