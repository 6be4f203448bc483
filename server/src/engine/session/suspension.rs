//! Suspended clients: their device memory is in host memory until their next call.

use crate::engine::base::ordinal::Ordinal;
use mpsshim_model::client::ClientInfo;
use mpsshim_model::limits::MoveUsage;
use mpsshim_model::suspension::{Placement, Unmoved};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// For how long a session is not asked again to make room after its work has not ended.
const RESISTS: Duration = Duration::from_secs(10);

/// Where a session's device memory is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In host memory, as far as possible, once the session is idle: an operator wants it.
    Out,
    /// On the devices: an operator wants it.
    In,
    /// This many bytes of this device in host memory, once its work in flight is done: another session needs the device.
    MakeRoom(Ordinal, u64),
}

/// Bytes of a device that are never moved for other sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guarantee {
    /// Bytes that the operator has set.
    pub asked: u64,
    /// Bytes that count: not more than the limit of the client, and than the guarantees of sessions before it leave.
    pub given: u64,
    /// The limit is less, which has been logged.
    below_limit: bool,
    /// The device has not so much left, which has been logged.
    is_short: bool,
}

/// Reasons for which a guarantee counts only in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contradiction {
    /// The limit of the client is less.
    Limit,
    /// The guarantees of the sessions before it leave less of the device.
    Device,
}

impl Guarantee {
    /// The guarantee that follows on this one, and reasons for which it counts in part that have not been logged.
    fn next(self, asked: u64, limit: u64, left: u64) -> (Guarantee, Vec<Contradiction>) {
        let before = match asked == self.asked {
            true => self,
            false => Guarantee::default(),
        };
        let wanted = asked.min(limit);
        let (below_limit, is_short) = (wanted < asked, left < wanted);
        let new = [
            (below_limit && !before.below_limit).then_some(Contradiction::Limit),
            (is_short && !before.is_short).then_some(Contradiction::Device),
        ];
        let next = Guarantee {
            asked,
            given: wanted.min(left),
            below_limit: before.below_limit || below_limit,
            is_short: before.is_short || is_short,
        };
        (next, new.into_iter().flatten().collect())
    }
}

/// Of these grants as many as fit into the bytes, the largest first. Grants that are larger than the rest of the bytes are
/// left out.
pub fn fitting<T>(mut grants: Vec<T>, len: impl Fn(&T) -> u64, mut bytes: u64) -> Vec<T> {
    grants.sort_by_key(|grant| std::cmp::Reverse(len(grant)));
    grants.retain(|grant| {
        let left = bytes.checked_sub(len(grant));
        bytes = left.unwrap_or(bytes);
        left.is_some()
    });
    grants
}

/// Order to move a session's device memory, and its outcome. At most one order at a time.
#[derive(Debug)]
pub struct Suspension {
    /// Whether there is an order.
    is_ordered: AtomicBool,
    /// The memory is being copied.
    moving: AtomicBool,
    /// Bytes of device memory that are in host memory.
    moved: AtomicU64,
    /// When it last worked, in milliseconds since `began`.
    active: AtomicU64,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    order: Option<(Order, Instant)>,
    outcome: Option<Result<Placement, Unmoved>>,
    /// Lengths of the grants on each device that can be moved.
    movable: BTreeMap<Ordinal, Vec<u64>>,
    /// Bytes of each device that are in host memory.
    moved: BTreeMap<Ordinal, u64>,
    /// Guarantees that the server had set when the session connected, in bytes.
    asked: BTreeMap<Ordinal, u64>,
    /// Guarantees in force.
    guarantees: BTreeMap<Ordinal, Guarantee>,
    /// Who needs the room that the order is for, and how many bytes.
    needed: Option<(ClientInfo, u64)>,
    /// Bytes moved to host memory and back so far.
    moved_bytes: [u64; 2],
    /// For how long it had work and waited for device memory, and since when it does.
    waited: Duration,
    waits: Option<Instant>,
    /// Until when it keeps its memory, although it is busy.
    keeps: Instant,
    /// Until when it is not asked to make room.
    resists: Option<Instant>,
}

impl Default for Suspension {
    fn default() -> Suspension {
        let began = Instant::now();
        Suspension {
            is_ordered: AtomicBool::new(false),
            moving: AtomicBool::new(false),
            moved: AtomicU64::new(0),
            active: AtomicU64::new(0),
            began,
            state: Mutex::new(State {
                order: None,
                outcome: None,
                movable: BTreeMap::new(),
                moved: BTreeMap::new(),
                asked: BTreeMap::new(),
                guarantees: BTreeMap::new(),
                needed: None,
                moved_bytes: [0; 2],
                waited: Duration::ZERO,
                waits: None,
                keeps: began,
                resists: None,
            }),
        }
    }
}

impl Suspension {
    /// Gives an order. `false`: another one is being carried out.
    pub fn give(&self, order: Order) -> bool {
        self.give_for(order, None)
    }

    /// Gives an order for a client that needs room. `false`: there is an order already.
    pub fn give_for(&self, order: Order, needed: Option<(ClientInfo, u64)>) -> bool {
        let mut state = self.state.lock();
        if state.order.is_some() {
            return false;
        }
        state.order = Some((order, Instant::now()));
        state.needed = needed;
        state.outcome = None;
        self.is_ordered.store(true, Ordering::SeqCst);
        true
    }

    /// Whether there is an order that is being carried out.
    #[inline]
    pub fn is_ordered(&self) -> bool {
        self.is_ordered.load(Ordering::Relaxed)
    }

    /// The order that is being carried out.
    #[inline]
    pub fn order(&self) -> Option<Order> {
        if !self.is_ordered() {
            return None;
        }
        self.state.lock().order.map(|(order, _)| order)
    }

    /// Why memory moves now, for the log.
    pub fn reason(&self) -> String {
        let state = self.state.lock();
        match (state.order, &state.needed) {
            (Some((Order::MakeRoom(..), _)), Some((client, bytes))) => {
                format!("for client {client}, which needs {bytes} bytes")
            }
            (Some((Order::MakeRoom(..), _)), None) => "for another client".into(),
            (Some((Order::Out, _)), _) => "for suspend_client".into(),
            (Some((Order::In, _)), _) => "for resume_client".into(),
            (None, _) => "for its own call".into(),
        }
    }

    /// Whether there is an order to move memory to host memory.
    pub fn wants_host_memory(&self) -> bool {
        matches!(self.order(), Some(Order::Out | Order::MakeRoom(..)))
    }

    /// When an order to make room was given that is being carried out.
    pub fn ordered_since(&self) -> Option<Instant> {
        self.state.lock().order.map(|(_, since)| since)
    }

    /// Counts bytes of an order to make room that are in host memory now.
    pub fn count_room(&self, bytes: u64) {
        if let Some((Order::MakeRoom(_, left), _)) = &mut self.state.lock().order {
            *left = left.saturating_sub(bytes);
        }
    }

    /// The order has been carried out, or cannot be.
    pub fn settle(&self, outcome: Result<Placement, Unmoved>) {
        let mut state = self.state.lock();
        if state.order.take().is_some() {
            state.outcome = Some(outcome);
        }
        self.is_ordered.store(false, Ordering::SeqCst);
    }

    /// Takes an order back, unless it has been carried out meanwhile. Returns the outcome then.
    pub fn withdraw(&self) -> Option<Result<Placement, Unmoved>> {
        let mut state = self.state.lock();
        let outcome = state.outcome.take();
        if outcome.is_none() {
            state.order = None;
            self.is_ordered.store(false, Ordering::SeqCst);
        }
        outcome
    }

    /// The outcome of the order, once.
    pub fn take_outcome(&self) -> Option<Result<Placement, Unmoved>> {
        self.state.lock().outcome.take()
    }

    /// Its work does not end: an order to make room is taken back, and it gets no other one for [`RESISTS`].
    pub fn resist(&self, now: Instant) {
        let mut state = self.state.lock();
        if matches!(state.order, Some((Order::MakeRoom(..), _))) {
            state.order = None;
            self.is_ordered.store(false, Ordering::SeqCst);
            state.resists = Some(now + RESISTS);
        }
    }

    /// Whether it is not asked to make room now.
    pub fn resists(&self, now: Instant) -> bool {
        self.state.lock().resists.is_some_and(|until| now < until)
    }

    /// Keeps its memory until then, although others wait for room and it is busy.
    pub fn keep_until(&self, until: Instant) {
        self.state.lock().keeps = until;
    }

    /// Until when it keeps its memory.
    pub fn keeps_until(&self) -> Instant {
        self.state.lock().keeps
    }

    /// Notes whether its memory is being copied.
    pub fn set_moving(&self, moving: bool) {
        self.moving.store(moving, Ordering::Relaxed);
    }

    /// Whether its memory is being copied.
    pub fn is_moving(&self) -> bool {
        self.moving.load(Ordering::Relaxed)
    }

    /// Bytes on a device that can be moved to host memory.
    pub fn movable(&self, device: Ordinal) -> u64 {
        let state = self.state.lock();
        let grants = state.movable.get(&device).into_iter().flatten();
        grants.sum()
    }

    /// Bytes on all devices that can be moved to host memory.
    pub fn movable_in_all(&self) -> u64 {
        let state = self.state.lock();
        state.movable.values().flatten().sum()
    }

    /// Counts a grant on a device that can be moved to host memory.
    pub fn add_movable(&self, device: Ordinal, bytes: u64) {
        let mut state = self.state.lock();
        state.movable.entry(device).or_default().push(bytes);
    }

    /// Uncounts a grant that is freed, moved, or cannot be moved any more.
    pub fn take_movable(&self, device: Ordinal, bytes: u64) {
        if let Some(grants) = self.state.lock().movable.get_mut(&device)
            && let Some(at) = grants.iter().position(|len| *len == bytes)
        {
            grants.swap_remove(at);
        }
    }

    /// Bytes of device memory that are in host memory.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Publishes the number of bytes of each device that are in host memory.
    pub fn note_moved(&self, moved: BTreeMap<Ordinal, u64>) {
        self.moved.store(moved.values().sum(), Ordering::Relaxed);
        self.state.lock().moved = moved;
    }

    /// Counts bytes that have been moved to host memory, and back.
    pub fn count_moved(&self, to_host: u64, to_device: u64) {
        let [host, device] = &mut self.state.lock().moved_bytes;
        *host += to_host;
        *device += to_device;
    }

    /// Bytes that have been moved to host memory, and back.
    pub fn moved_bytes(&self) -> [u64; 2] {
        self.state.lock().moved_bytes
    }

    /// Notes that it has work, and lacks device memory since then, unless it does so already.
    pub fn begin_wait(&self, since: Instant) {
        self.state.lock().waits.get_or_insert(since);
    }

    /// Notes that it has its memory.
    pub fn end_wait(&self, now: Instant) {
        let mut state = self.state.lock();
        if let Some(since) = state.waits.take() {
            state.waited += now.saturating_duration_since(since);
        }
    }

    /// For how long it had work and waited for device memory.
    pub fn waited(&self, now: Instant) -> Duration {
        let state = self.state.lock();
        let present = state
            .waits
            .map(|since| now.saturating_duration_since(since));
        state.waited + present.unwrap_or_default()
    }

    /// Moves and waits of a session that holds these bytes of each device, by ordinal.
    pub fn usage(&self, held: &BTreeMap<usize, u64>) -> MoveUsage {
        let waited_ns = self.waited(Instant::now()).as_nanos() as u64;
        let state = self.state.lock();
        let moved = state.moved.iter().map(|(device, bytes)| (device, *bytes));
        let movable = state.movable.iter();
        let movable = movable.map(|(device, grants)| (device, grants.iter().sum()));
        let mut fixed = held.clone();
        for (device, bytes) in moved.chain(movable) {
            if let Some(fixed) = fixed.get_mut(&device.index()) {
                *fixed = fixed.saturating_sub(bytes);
            }
        }
        fixed.retain(|_, bytes| *bytes > 0);
        let [to_host, to_device] = state.moved_bytes;
        MoveUsage {
            fixed,
            to_host,
            to_device,
            waited_ns,
        }
    }

    /// Sets the guarantees that the session has unless its user has others, in bytes.
    pub fn ask_guarantees(&self, bytes: BTreeMap<Ordinal, u64>) {
        self.state.lock().asked = bytes;
    }

    /// The guarantees that the session has unless its user has others, in bytes by ordinal.
    pub fn asked_guarantees(&self) -> BTreeMap<usize, u64> {
        let state = self.state.lock();
        let asked = state.asked.iter();
        asked
            .map(|(device, bytes)| (device.index(), *bytes))
            .collect()
    }

    /// Determines the guarantee for a device: that of the user (`of_user`), else the session's own, up to the client's
    /// `limit` and to the `left` bytes of the device. Returns it, and reasons for which it counts in part that have not been
    /// logged.
    pub fn guarantee(
        &self,
        device: Ordinal,
        of_user: Option<u64>,
        (limit, left): (u64, u64),
    ) -> (Guarantee, Vec<Contradiction>) {
        let mut state = self.state.lock();
        let asked = of_user.or_else(|| state.asked.get(&device).copied());
        let before = state.guarantees.get(&device).copied();
        let (next, new) = (before.unwrap_or_default()).next(asked.unwrap_or_default(), limit, left);
        state.guarantees.insert(device, next);
        (next, new)
    }

    /// Bytes of a device that are never moved for other sessions.
    pub fn guaranteed(&self, device: Ordinal) -> u64 {
        let state = self.state.lock();
        let guarantee = state.guarantees.get(&device);
        guarantee.map_or(0, |guarantee| guarantee.given)
    }

    /// Bytes of each device that are never moved for other sessions, for devices with a guarantee.
    pub fn guarantees(&self) -> BTreeMap<usize, u64> {
        let state = self.state.lock();
        let all = state.guarantees.iter();
        let asked = all.filter(|(_, guarantee)| guarantee.asked > 0);
        asked
            .map(|(device, guarantee)| (device.index(), guarantee.given))
            .collect()
    }

    /// Bytes that the session has on a device beyond its guarantee, if it holds `held` bytes of it. Some may not be movable.
    pub fn resident_beyond(&self, device: Ordinal, held: u64) -> u64 {
        let state = self.state.lock();
        let moved = state.moved.get(&device).copied().unwrap_or_default();
        let guarantee = state.guarantees.get(&device);
        let given = guarantee.map_or(0, |guarantee| guarantee.given);
        held.saturating_sub(moved).saturating_sub(given)
    }

    /// Bytes on a device that go to host memory when another session needs room, if the session holds `held` bytes of it:
    /// whole grants, beyond its guarantee.
    pub fn beyond_guarantee(&self, device: Ordinal, held: u64) -> u64 {
        let beyond = self.resident_beyond(device, held);
        let all = self.movable(device);
        if all <= beyond {
            return all;
        }
        let grants = self.state.lock().movable.get(&device).cloned();
        let grants = fitting(grants.unwrap_or_default(), |len| *len, beyond);
        grants.into_iter().sum()
    }

    /// Notes that the session works now.
    pub fn note_active(&self, now: Instant) {
        let since = now.saturating_duration_since(self.began).as_millis() as u64;
        self.active.store(since, Ordering::Relaxed);
    }

    /// When it last worked.
    pub fn idle_since(&self) -> Instant {
        self.began + Duration::from_millis(self.active.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn with_guarantee(bytes: u64) -> (Suspension, Ordinal) {
        let (suspension, device) = (Suspension::default(), Ordinal::of_test(0));
        suspension.ask_guarantees([(device, bytes)].into());
        let all = (u64::MAX, u64::MAX);
        let (guarantee, new) = suspension.guarantee(device, None, all);
        assert_eq!((guarantee.given, new.len()), (bytes, 0));
        (suspension, device)
    }

    #[test]
    fn whole_grants_beyond_the_guarantee_are_moved() {
        let (suspension, device) = with_guarantee(10 * MIB);
        for len in [8, 4, 2] {
            suspension.add_movable(device, len * MIB);
        }
        let beyond = |held: u64| suspension.beyond_guarantee(device, held * MIB) / MIB;
        // The grant of 8 MiB would take it below.
        assert_eq!(beyond(14), 4);
        assert_eq!([beyond(10), beyond(9), beyond(11)], [0, 0, 0]);
        assert_eq!([beyond(12), beyond(16), beyond(18)], [2, 6, 8]);
        // Memory that cannot be moved counts towards the guarantee.
        assert_eq!([beyond(24), beyond(1000)], [14, 14]);
        suspension.take_movable(device, 4 * MIB);
        suspension.note_moved([(device, 4 * MIB)].into());
        assert_eq!([beyond(14), beyond(16)], [0, 2]);
        assert_eq!(suspension.moved(), 4 * MIB);
        let other = Ordinal::of_test(1);
        suspension.add_movable(other, MIB);
        assert_eq!(suspension.beyond_guarantee(other, MIB), MIB);
        assert_eq!(suspension.movable(device), 10 * MIB);
    }

    #[test]
    fn time_without_memory_is_counted() {
        let (suspension, device) = with_guarantee(0);
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        suspension.begin_wait(at(0));
        suspension.begin_wait(at(1));
        assert_eq!(suspension.waited(at(2)), Duration::from_secs(2));
        suspension.end_wait(at(3));
        suspension.end_wait(at(4));
        assert_eq!(suspension.waited(at(5)), Duration::from_secs(3));
        suspension.begin_wait(at(6));
        assert_eq!(suspension.waited(at(7)), Duration::from_secs(4));
        suspension.add_movable(device, 4);
        suspension.note_moved([(device, 3)].into());
        suspension.count_moved(5, 2);
        let usage = suspension.usage(&[(0, 9), (1, 8)].into());
        assert_eq!(usage.fixed, [(0, 2), (1, 8)].into());
        assert_eq!((usage.to_host, usage.to_device), (5, 2));
    }

    #[test]
    fn moves_have_a_reason() {
        let (suspension, device) = with_guarantee(0);
        assert_eq!(suspension.reason(), "for its own call");
        let client = ClientInfo {
            session: 7,
            pid: 8,
            uid: 9,
            partition: None,
            namespace: None,
        };
        let expected = format!("for client {client}, which needs 5 bytes");
        let order = Order::MakeRoom(device, 3);
        assert!(suspension.give_for(order, Some((client, 5))));
        assert_eq!(suspension.reason(), expected);
        suspension.withdraw();
        for (order, reason) in [
            (Order::Out, "for suspend_client"),
            (Order::In, "for resume_client"),
        ] {
            assert!(suspension.give(order));
            assert_eq!(suspension.reason(), reason);
            suspension.withdraw();
        }
    }

    #[test]
    fn contradictions_are_reported_once() {
        let (suspension, device) = with_guarantee(10);
        let set = |of_user, limit, left| {
            let (guarantee, new) = suspension.guarantee(device, of_user, (limit, left));
            (guarantee.given, new)
        };
        assert_eq!(set(None, 8, 100), (8, vec![Contradiction::Limit]));
        assert_eq!(set(None, 8, 100), (8, vec![]));
        assert_eq!(set(None, 8, 5), (5, vec![Contradiction::Device]));
        assert_eq!(set(None, 8, 4), (4, vec![]));
        assert_eq!(set(None, 100, 100), (10, vec![]));
        // Another amount is another contradiction.
        let both = vec![Contradiction::Limit, Contradiction::Device];
        assert_eq!(set(Some(20), 18, 17), (17, both));
        assert_eq!(suspension.guarantees(), [(0, 17)].into());
        assert_eq!(set(Some(0), 18, 17), (0, vec![]));
        assert_eq!(suspension.guarantees(), [].into());
        assert_eq!(suspension.asked_guarantees(), [(0, 10)].into());
    }
}
