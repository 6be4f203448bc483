//! Application of priorities, weights and levels to sessions.

use super::LOOK;
use crate::engine::objects::levels::{Claim, INTERVAL, Level};
use crate::engine::session::SessionShared;
use crate::engine::threads::shared::Shared;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl Shared {
    /// Assigns levels to all sessions, if that is due. Called by every dispatch thread while work is in flight.
    pub fn assign_levels(&self, now: Instant) {
        let Some(mut assigned) = self.roster.fairness.levels.try_lock() else {
            return;
        };
        let over = assigned.at.map(|at| now.saturating_duration_since(at));
        if over.is_some_and(|over| over < INTERVAL) {
            return;
        }
        assigned.at = Some(now);
        let over = over.unwrap_or(INTERVAL);
        let sessions = self.roster.session_list();
        let classes = self.roster.fairness.has_classes();
        for device in self
            .gpu
            .devices
            .iter()
            .filter(|device| device.is_attached())
        {
            let device = device.ordinal.index();
            let claims: Vec<Claim> = sessions.iter().map(|one| one.claim(device)).collect();
            let given = assigned.devices[device].assign(over, &claims, classes);
            for (session, given) in sessions.iter().zip(given) {
                let level = match sessions.len() {
                    1 => session.unranked(classes),
                    _ => given.level,
                };
                session.standing.set_level(device, level);
                let had = (given.had * 1000.0) as u32;
                session.standing.devices[device]
                    .had
                    .store(had, Ordering::Relaxed);
            }
        }
    }

    /// Gives a new session its first level on each device.
    pub fn give_first_level(&self, session: &Arc<SessionShared>) {
        let classes = self.roster.fairness.has_classes();
        let alone = self.roster.sessions.lock().len() <= 1;
        let level = match session.terms.priority {
            0 if !alone => Level::First,
            _ => session.unranked(classes),
        };
        for device in self.gpu.devices.iter() {
            session.standing.set_level(device.ordinal.index(), level);
        }
    }
}

impl SessionShared {
    /// Returns its demand since the previous call.
    fn claim(&self, device: usize) -> Claim {
        let one = &self.standing.devices[device];
        let wanted = one.wanted.load(Ordering::Relaxed);
        let counted = one.counted.swap(wanted, Ordering::Relaxed);
        Claim {
            session: self.info.session,
            weight: self.standing.weight(),
            normal: self.terms.priority == 0,
            wanted: Duration::from_nanos(wanted.saturating_sub(counted)),
            moved: one.moved.swap(false, Ordering::Relaxed),
            long: one.long.load(Ordering::Relaxed),
        }
    }

    /// Its level where clients are served in the order of submission.
    fn unranked(&self, classes: bool) -> Level {
        match (self.terms.priority, classes) {
            (0, false) => Level::Own,
            (0, true) => Level::Raised,
            _ => Level::Below,
        }
    }
}

impl Shared {
    /// Whether a session may be visited now.
    #[inline]
    pub fn may_go(&self, session: &SessionShared) -> bool {
        let fairness = &self.roster.fairness;
        !fairness.is_weighted()
            || session
                .standing
                .may_go(fairness.floor.load(Ordering::Relaxed))
    }

    /// Records the number of messages dispatched in a visit.
    #[inline]
    pub fn note_dispatched(&self, session: &SessionShared, messages: u64) {
        if self.roster.fairness.is_weighted() {
            let floor = self.roster.fairness.floor.load(Ordering::Relaxed);
            session.standing.note(messages, floor);
        }
    }

    /// Updates `floor` in every [`LOOK`]th round.
    #[inline]
    pub fn look_at_clocks(&self, round: u32) {
        if !self.roster.fairness.is_weighted() || !round.is_multiple_of(LOOK) {
            return;
        }
        let sessions = self.roster.sessions.lock();
        let working = sessions
            .values()
            .filter(|session| session.standing.has_work.load(Ordering::Relaxed));
        let last = working
            .map(|session| session.standing.clock.load(Ordering::Relaxed))
            .min();
        if let Some(last) = last {
            self.roster
                .fairness
                .floor
                .fetch_max(last, Ordering::Relaxed);
        }
    }
}
