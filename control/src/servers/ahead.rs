//! Images that a standby loads ahead of a restart: it gets them from the server that it is going to replace, which works on
//! meanwhile. A restart waits for that for a limited time, and goes on without if anything fails.

use super::Servers;
use super::server::{Server, State};
use super::standby::{Rest, Step};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long a restart waits for images that are loaded ahead.
const AHEAD_PATIENCE: Duration = Duration::from_secs(20);

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
        let is_ready = |standby: &Server| standby.stands_by.is_some() && !standby.loaded_ahead;
        if standby.is_some_and(|standby| standby.stands_by.is_none()) {
            return None;
        }
        self.restarts[at].ahead = false;
        if !standby.is_some_and(is_ready) || !self.ask_for_images(pid) {
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
        let serves = |server: &Server| server.state == State::Active;
        if !self.by_pid(pid).is_some_and(serves) {
            return self.end_loading(at);
        }
        let Some(standby) = self.standby_of(pid) else {
            self.restarts[at].until = self.restarts[at].starts_by;
            return match self.start_next(pid) {
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
        // Without a context of its own, a standby can load nothing.
        let has_images = |server: &&mut Server| {
            let serves = server.state == State::Active && !server.sessions.is_empty();
            serves && !server.is_exclusive()
        };
        let Some(server) = self.by_pid_mut(pid).filter(has_images) else {
            return false;
        };
        server.images = None;
        let asked = server.link.as_ref().map(|link| link.ask_images());
        matches!(asked, Some(Ok(())))
    }

    /// Passes the images of a server on to its standby, at this index, if they have come. Returns whether the standby is done
    /// with them, or will not get any.
    fn has_loaded_ahead(&mut self, pid: i32, standby: usize) -> bool {
        let images = self.by_pid_mut(pid).and_then(|server| server.images.take());
        let standby = &self.running[standby];
        match images {
            None => standby.loaded_ahead,
            Some(None) => true,
            Some(Some(images)) => {
                let link = standby.link.as_ref();
                let ordered = link.map(|link| link.order_images(images.as_fd()));
                !matches!(ordered, Some(Ok(())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::standby::REST_PATIENCE;
    use super::*;

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
