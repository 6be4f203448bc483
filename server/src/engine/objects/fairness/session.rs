//! Application of priorities, weights and levels to sessions.

use super::{Assigned, LOOK, LongBlocks};
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::Side;
use crate::engine::objects::levels::{Claim, INTERVAL, Level};
use crate::engine::session::SessionShared;
use crate::engine::threads::shared::Shared;
use mpsshim_model::policy::{Scheduling, SchedulingPolicy};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl Shared {
    /// Assigns levels to all sessions, if that is due. Called by every dispatch thread while work is in flight.
    pub fn assign_levels(self: &Arc<Shared>, now: Instant) {
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
        let (ranked, others): (Vec<_>, Vec<_>) = {
            let scheduling = &self.roster.limits.lock().scheduling;
            let is_ranked = |one: &Arc<SessionShared>| one.is_ranked(scheduling);
            sessions.iter().partition(|one| is_ranked(one))
        };
        for device in self
            .gpu
            .devices
            .iter()
            .filter(|device| device.is_attached())
        {
            let ordinal = device.ordinal;
            let device = ordinal.index();
            let mut here = sessions.iter().filter(|one| one.side() == Side::MAIN);
            let long = here.any(|one| one.standing.block_on(device) > LONG_BLOCK);
            self.roster.fairness.note_long_blocks(device, long);
            for session in &others {
                session.leave_unranked(device, classes, !ranked.is_empty());
            }
            let claims: Vec<Claim> = ranked.iter().map(|one| one.claim(device)).collect();
            let levels = &mut assigned.devices[device];
            let given = levels.assign(over, &claims, classes);
            let here = ranked.iter().zip(&claims);
            let here = here.filter(|(one, _)| one.side() == Side::MAIN);
            let here: Vec<Claim> = here.map(|(_, claim)| *claim).collect();
            let keeps = levels.keeps_reserve(over, &here, || self.has_reserve(ordinal));
            let reserve = &self.gpu.devices[ordinal].reserve;
            if reserve.set_active(keeps) {
                tracing::debug!(device, extent = ?keeps, "reserve for short kernels");
            }
            match levels.take_change_of_reserve() {
                Some(Some(extent)) => {
                    let (free, total) = reserve.multiprocessors(extent).unwrap_or_default();
                    tracing::info!(
                        "Device {device}: long work leaves {free} of {total} multiprocessors free for short kernels"
                    );
                }
                Some(None) => tracing::info!("Device {device}: all work uses all multiprocessors"),
                None => {}
            }
            for (session, given) in ranked.iter().zip(given) {
                let level = match sessions.len() {
                    1 => session.unranked(classes),
                    _ => given.level,
                };
                session.standing.set_level(device, level);
                session.standing.set_had(device, Some(given.had));
                if !given.waited.time.is_zero() {
                    let pid = |client: usize| ranked[client].info.pid;
                    session.standing.waited.lock().add(&given.waited, pid);
                }
            }
        }
        self.separate(&mut assigned, &ranked, now);
    }

    /// Whether the device can keep multiprocessors free for short kernels; if that is not known, a thread finds out.
    fn has_reserve(self: &Arc<Shared>, ordinal: Ordinal) -> bool {
        self.gpu.devices[ordinal].reserve.is_ready(|| {
            let shared = self.clone();
            let make = move || shared.gpu.devices[ordinal].make_reserve(&shared.gpu.driver);
            let started = std::thread::Builder::new()
                .name("reserve".into())
                .spawn(make);
            if let Err(error) = started {
                tracing::warn!(%error, "no thread to keep multiprocessors free for short kernels");
            }
        })
    }

    /// Gives a new session its first level on each device.
    pub fn give_first_level(&self, session: &Arc<SessionShared>) {
        let classes = self.roster.fairness.has_classes();
        let alone = self.roster.sessions.lock().len() <= 1;
        let ranked = session.is_ranked(&self.roster.limits.lock().scheduling);
        let level = match session.terms.priority {
            0 if ranked && !alone => Level::First,
            _ => session.unranked(classes),
        };
        for device in self.gpu.devices.iter() {
            session.standing.set_level(device.ordinal.index(), level);
        }
    }

    /// Applies the scheduling in force to the sessions whose scheduling was another one until now.
    pub fn change_scheduling(&self, before: &SchedulingPolicy) {
        // A thread that is assigning levels may still do so by the scheduling before.
        let _assigned = self.roster.fairness.levels.lock();
        let classes = self.roster.fairness.has_classes();
        let now = self.roster.limits.lock().scheduling.clone();
        for session in self.roster.session_list() {
            let ranked = session.is_ranked(&now);
            if ranked == session.is_ranked(before) {
                continue;
            }
            for device in self.gpu.devices.iter() {
                session.leave_unranked(device.ordinal.index(), classes, false);
            }
            if ranked {
                self.give_first_level(&session);
            }
        }
    }
}

/// A session whose blocks take longer than this, and fill the device, is to have a context apart from the others: they
/// would wait for the end of such a block, and in another context for a time slice of some milliseconds.
const LONG_BLOCK: Duration = Duration::from_millis(5);
/// Modest sessions gain only if its blocks take longer than this. In a context of their own they get as much time of the
/// device as it, and in its context they wait for one block at most.
const VERY_LONG_BLOCK: Duration = Duration::from_millis(20);
/// For how long its blocks must have been long.
const LONG_ENOUGH: Duration = Duration::from_millis(100);
/// Kernels that are shorter by this factor gain by a context apart from long ones, whatever the time of their blocks.
const SHORTER: u32 = 4;
/// After this time without long blocks, a session apart returns: contexts of short kernels would halve each other.
const RETURNS: Duration = Duration::from_secs(1);

impl Shared {
    /// Orders sessions with long blocks to move to a context of their own while others work beside them, and back.
    fn separate(&self, assigned: &mut Assigned, sessions: &[&Arc<SessionShared>], now: Instant) {
        let active = |session: &SessionShared| {
            let id = session.info.session;
            assigned.devices.iter().any(|levels| levels.is_active(id))
        };
        let working: Vec<_> = sessions.iter().copied().filter(|one| active(one)).collect();
        let is_long = |session: &SessionShared| session.standing.block().0 > LONG_BLOCK;
        let gains = |session: &SessionShared, beside: &SessionShared| {
            let ((_, kernel), (block, longer)) =
                (session.standing.block(), beside.standing.block());
            // Beside long blocks, a short kernel takes as long as one of them.
            let shorter = !is_long(session) || SHORTER * kernel < longer;
            let levels = session.standing.devices.iter();
            let mut levels = levels.map(|one| Level::of(one.level.load(Ordering::Relaxed)));
            shorter && (block > VERY_LONG_BLOCK || levels.any(Level::is_compared))
        };
        let mut known = std::mem::take(&mut assigned.long_blocks);
        known.retain(|id, _| sessions.iter().any(|one| one.info.session == *id));
        for session in &working {
            let (id, standing, side) = (session.info.session, &session.standing, session.side());
            let blocks = known.entry(id).or_insert_with(|| LongBlocks::new(now));
            let (long, lasted) = blocks.note(is_long(session), now);
            if standing.goes_to().is_some() {
                continue;
            }
            let beside = |side: Side| {
                let others = working.iter().filter(|one| one.info.session != id);
                others.filter(move |one| one.side() == side)
            };
            if long && side == Side::MAIN && lasted > LONG_ENOUGH {
                let gains = beside(side).any(|one| gains(one, session));
                let apart = sessions.iter().find(|one| one.standing.is_apart());
                let to = apart.map(|one| one.side()).or_else(|| self.way_out(side));
                standing.set_goes_to(to.filter(|to| gains && *to != side));
            } else if !long
                && standing.is_apart()
                && side != Side::MAIN
                && lasted > RETURNS
                && beside(Side::MAIN).next().is_some()
            {
                standing.set_goes_to(Some(Side::MAIN));
            }
        }
        assigned.long_blocks = known;
    }
}

impl SessionShared {
    /// Returns its demand since the previous call.
    fn claim(&self, device: usize) -> Claim {
        let (wanted, in_flight) = self.standing.take_wanted(device);
        Claim {
            session: self.info.session,
            weight: self.standing.weight(),
            normal: self.terms.priority == 0,
            wanted,
            in_flight,
            ended: self.standing.take_ended(device),
            long: self.standing.runs_long(device),
        }
    }

    /// Whether its kernels are served by levels.
    fn is_ranked(&self, scheduling: &SchedulingPolicy) -> bool {
        scheduling.of(self.info.uid) == Scheduling::Auto
    }

    /// Leaves it without a level of its own on a device: its kernels are served in the order of submission. Beside
    /// clients with levels they have the middle one.
    fn leave_unranked(&self, device: usize, classes: bool, beside_ranked: bool) {
        let level = match self.terms.priority {
            0 if beside_ranked => Level::Middle,
            _ => self.unranked(classes),
        };
        self.standing.set_level(device, level);
        self.standing.set_had(device, None);
        self.standing.take_wanted(device);
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
