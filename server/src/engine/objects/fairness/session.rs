//! Application of priorities and weights to sessions.

use super::{GREATEST, LEAST, LOOK, in_class};
use crate::engine::session::{Session, SessionShared};
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use std::sync::atomic::Ordering;

impl Session {
    /// Returns the driver's priority for one that the client sets.
    pub fn raw_priority(&self, priority: i32) -> i32 {
        match self.flow.classed {
            true => in_class(self.shared.terms.priority, priority),
            false => priority,
        }
    }

    /// Returns the client's priority for one of the driver's.
    pub fn own_priority(&self, raw: i32) -> i32 {
        match self.flow.classed {
            true => (raw + 1).clamp(GREATEST, LEAST),
            false => raw,
        }
    }

    /// From now on, maps its stream priorities so that they rank its client class.
    pub fn join_class(&mut self, shared: &Shared) {
        self.enter();
        self.flow.classed = true;
        let client = self.shared.terms.priority;
        for stream in self
            .objects
            .streams
            .iter_mut()
            .filter(|stream| !stream.capturing)
        {
            let raw = in_class(client, stream.priority);
            if shared.gpu.devices[stream.device]
                .make_current(&shared.gpu.driver)
                .is_ok()
            {
                stream.set_attribute(
                    &shared.gpu,
                    CU_STREAM_ATTRIBUTE_PRIORITY,
                    &raw.to_ne_bytes(),
                );
            }
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
