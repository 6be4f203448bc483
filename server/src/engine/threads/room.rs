//! Room on demand: device memory of clients that do not use it goes to host memory when another client needs it.
//!
//! A session that finds no room joins a queue. The first one in it makes room: others are ordered to move their memory to
//! host memory. Sessions that wait in the queue come first, since they execute nothing; then idle ones, the longest idle
//! first; then busy ones that have had their memory on the device for long enough. Among equals, those come first that have
//! most beyond their guarantees, if one of them has a guarantee; then those of lower priority.
//! No session makes room with memory that it is guaranteed.
//! Only the first of the queue takes memory, so that no two sessions wait for each other's.
//!
//! A session that has got its memory keeps it for [`SHARE`] times as long as the moves took, so that clients that are all
//! busy and do not fit together take turns, and copies take a bounded part of the time.

use crate::engine::base::account::Memory;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::session::SessionShared;
use crate::engine::session::suspension::{Contradiction, Order};
use crate::engine::threads::shared::Shared;
use mpsshim_model::policy::Oversubscription;
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Interval at which a session asks again for which room is being made.
pub const ASKS: Duration = Duration::from_millis(1);
/// For how long a session must have been without work to count as idle.
const IDLE: Duration = Duration::from_millis(100);
/// A session keeps memory that it waited for at least this many times as long as the moves for it took.
const SHARE: u32 = 10;
/// Shortest and longest time for which it does.
const KEEPS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// How long a session may take to come to rest for another one, before others are ordered to make room.
const YIELDS: Duration = Duration::from_secs(2);

/// The sessions that wait for device memory, in the order in which they get it.
#[derive(Debug, Default)]
pub struct Room {
    queue: Mutex<VecDeque<Waiting>>,
    /// Held while guarantees are shared out.
    sharing: Mutex<()>,
}

#[derive(Debug)]
struct Waiting {
    session: u64,
    /// How long the moves for it have taken.
    moves: Duration,
}

impl Room {
    /// Queues a session, unless it is queued. Returns whether it is the first.
    fn join(&self, session: u64) -> bool {
        let mut queue = self.queue.lock();
        if !queue.iter().any(|waiting| waiting.session == session) {
            queue.push_back(Waiting {
                session,
                moves: Duration::ZERO,
            });
        }
        queue.front().is_some_and(|first| first.session == session)
    }

    /// Removes a session that waits no more. Returns how long the moves for it have taken, if it waited.
    pub fn leave(&self, session: u64) -> Option<Duration> {
        let mut queue = self.queue.lock();
        let at = queue
            .iter()
            .position(|waiting| waiting.session == session)?;
        Some(queue.remove(at)?.moves)
    }

    /// Counts the time of a move, which is for the first of the queue.
    pub fn note_move(&self, took: Duration) {
        if let Some(first) = self.queue.lock().front_mut() {
            first.moves += took;
        }
    }

    /// Whether a session waits.
    fn has(&self, session: u64) -> bool {
        let queue = self.queue.lock();
        queue.iter().any(|waiting| waiting.session == session)
    }
}

/// Whether room is being made for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Making {
    /// It is to ask again.
    Waits,
    /// Nothing can be moved for it.
    Nothing,
}

/// A session whose memory can be moved.
struct Candidate {
    session: Arc<SessionShared>,
    /// Bytes beyond its guarantee.
    bytes: u64,
    /// Whether it has a guarantee.
    is_guaranteed: bool,
    /// Lower ones come first.
    rank: u8,
    /// Since when it has done nothing, or has had its memory.
    since: Instant,
}

impl Shared {
    /// Whether a user's clients make room for others, and get room.
    pub fn oversubscribes(&self, uid: u32) -> bool {
        let limits = self.roster.limits.lock();
        limits.oversubscription.of(uid) == Oversubscription::On
    }

    /// Makes room for memory of a device that a session needs: for as much of the `bytes` as the driver has not free.
    pub fn make_room(&self, asks: &SessionShared, device: Ordinal, bytes: u64) -> Making {
        let (now, own) = (Instant::now(), asks.info.session);
        if !self.oversubscribes(asks.info.uid) {
            return Making::Nothing;
        }
        if !self.room.join(own) {
            return Making::Waits;
        }
        let free = self.gpu.devices[device].free_memory(&self.gpu.driver);
        let need = (asks.info.clone(), bytes);
        let bytes = bytes.saturating_sub(free).max(1);
        let mut others = self.roster.session_list();
        others.retain(|other| {
            let suspension = &other.suspension;
            let makes_room = !suspension.resists(now) && other.beyond_guarantee(device) > 0;
            let is_asked = suspension.is_ordered();
            other.info.session != own
                && (makes_room || is_asked)
                && self.oversubscribes(other.info.uid)
        });
        if others.is_empty() {
            self.room.leave(own);
            return Making::Nothing;
        }
        let mut expected: u64 = 0;
        let mut candidates = Vec::new();
        for session in others {
            if let Some(since) = session.suspension.ordered_since() {
                if now.duration_since(since) < YIELDS || session.suspension.is_moving() {
                    expected += match session.suspension.order() {
                        Some(Order::Out) => session.suspension.movable(device),
                        _ => session.beyond_guarantee(device),
                    };
                    continue;
                }
                // Its work does not end.
                session.suspension.resist(now);
                continue;
            }
            candidates.extend(self.candidate(session, device, now));
        }
        let weighs = candidates.iter().any(|one| one.is_guaranteed);
        candidates.sort_by_key(|one| {
            let priority = one.session.terms.priority;
            let beyond = if weighs { one.bytes } else { 0 };
            (one.rank, Reverse(beyond), Reverse(priority), one.since)
        });
        for Candidate {
            session,
            bytes: has,
            ..
        } in candidates
        {
            if expected >= bytes {
                break;
            }
            let needed = has.min(bytes - expected);
            let order = Order::MakeRoom(device, needed);
            if session.suspension.give_for(order, Some(need.clone())) {
                tracing::debug!(
                    "Client {} makes room for {needed} bytes of client {}",
                    session.info,
                    asks.info
                );
                session.bell.ring();
                expected += needed;
            }
        }
        Making::Waits
    }

    /// Whether and when a session's memory can be moved.
    fn candidate(
        &self,
        session: Arc<SessionShared>,
        device: Ordinal,
        now: Instant,
    ) -> Option<Candidate> {
        let suspension = &session.suspension;
        let bytes = session.beyond_guarantee(device);
        let idle = suspension.idle_since();
        let (rank, since) = if self.room.has(session.info.session) {
            (0, now)
        } else if now.duration_since(idle) >= IDLE && !session.at_work.load(Ordering::Relaxed) {
            (1, idle)
        } else if suspension.keeps_until() <= now {
            (2, suspension.keeps_until())
        } else {
            return None;
        };
        let is_guaranteed = suspension.guaranteed(device) > 0;
        (bytes > 0 && !suspension.resists(now)).then_some(Candidate {
            session,
            bytes,
            is_guaranteed,
            rank,
            since,
        })
    }

    /// Bytes of a device that others hold and that would go to host memory for a session.
    pub fn movable_for(&self, asks: &SessionShared, device: Ordinal) -> u64 {
        if !self.oversubscribes(asks.info.uid) {
            return 0;
        }
        let others = self.roster.session_list().into_iter();
        let others = others.filter(|other| {
            other.info.session != asks.info.session && self.oversubscribes(other.info.uid)
        });
        others.map(|other| other.beyond_guarantee(device)).sum()
    }

    /// Determines the guarantees of all sessions anew, in the order in which they came: a guarantee counts up to the
    /// client's limit, and up to the memory that the guarantees before it leave of the device. To be called when sessions
    /// come and go and when limits or guarantees change.
    pub fn share_guarantees(&self) {
        let _sharing = self.room.sharing.lock();
        let of_users = self.roster.limits.lock().user_guarantee.clone();
        let mut sessions = self.roster.session_list();
        sessions.sort_by_key(|session| session.info.session);
        for device in self.gpu.devices.iter() {
            let ordinal = device.ordinal;
            let mut left = device.memory;
            for session in &sessions {
                let of_user = of_users.get(&session.info.uid);
                let of_user = of_user.and_then(|user| user.get(&ordinal.index()));
                let limit = session.account.limit(Memory::Device(ordinal));
                let bounds = (limit.unwrap_or(u64::MAX), left);
                let (guarantee, new) =
                    (session.suspension).guarantee(ordinal, of_user.copied(), bounds);
                left -= guarantee.given;
                for why in new {
                    let why = match why {
                        Contradiction::Limit => "its limit is less",
                        Contradiction::Device => {
                            "the guarantees of other clients leave no more of the device"
                        }
                    };
                    tracing::warn!(
                        "Client {}: of its guarantee of {} bytes of device {ordinal} only {} count: {why}",
                        session.info,
                        guarantee.asked,
                        guarantee.given
                    );
                }
            }
        }
    }

    /// A session has the memory that it waited for.
    pub fn has_room(&self, session: &SessionShared) {
        session.suspension.end_wait(Instant::now());
        if let Some(moves) = self.room.leave(session.info.session) {
            let keeps = (moves * SHARE).clamp(KEEPS.0, KEEPS.1);
            session.suspension.keep_until(Instant::now() + keeps);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_in_the_queue_stays_the_first() {
        let room = Room::default();
        assert!(room.join(1) && !room.join(2) && room.join(1));
        assert_eq!(room.leave(3), None);
        let second = Duration::from_secs(1);
        room.note_move(second);
        assert_eq!(room.leave(1), Some(second));
        assert!(!room.has(1) && room.has(2));
        assert!(room.join(2) && !room.join(1));
        assert_eq!(room.leave(2), Some(Duration::ZERO));
        room.note_move(second);
        assert_eq!(room.leave(1), Some(second));
        room.note_move(second);
        assert!(!room.has(1));
    }
}
