//! Client priorities, and weights for when dispatch capacity is scarce.
//!
//! **Priority.** Clients below normal priority have the lowest priority on the GPU ([`crate::engine::objects::levels`]).
//! A dispatch thread visits them when no other client had messages, and in every [`LOW_TURN`]th round.
//!
//! **Weights.** Each client has a clock that advances by the number of messages dispatched for it divided by its
//! weight. While weights differ, a client is not visited while its clock is more than [`SLACK`] ahead of the slowest
//! clock among the clients with work (virtual time, as in weighted fair queueing). A client that waits for the GPU or
//! is idle does not delay others.

mod session;

use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::Side;
use crate::engine::objects::levels::{Level, Levels, Total};
use mpsshim_model::limits::{DEFAULT_WEIGHT, DeviceWaits, LevelUsage};
use mpsshim_proto::handshake::MAX_DEVICES;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of rounds after which clients below normal priority are visited regardless of the others.
pub const LOW_TURN: u32 = 16;
/// Lowest and highest stream priority (`cuCtxGetStreamPriorityRange` on the supported devices).
pub const LEAST: i32 = 0;
pub const GREATEST: i32 = -5;
/// Advance of the clock per message for a client of weight 1.
const TICK: u64 = 10_000;
/// How far a clock may be ahead: the advance of a client of default weight in one visit of 64 messages.
const SLACK: u64 = 64 * TICK / DEFAULT_WEIGHT as u64;
/// Interval between updates of `floor`, in rounds.
const LOOK: u32 = 16;

/// Scheduling state shared by all dispatch threads.
#[derive(Debug, Default)]
pub struct Fairness {
    /// Whether there has been a client below normal priority.
    classes: AtomicBool,
    /// Whether any weight has ever been set.
    weighted: AtomicBool,
    /// The slowest clock among the clients with work.
    floor: AtomicU64,
    /// The clients of each device, and when they were given their levels.
    levels: Mutex<Assigned>,
    /// Whether kernels with long blocks that fill the device are in flight in the main context of each device.
    long_blocks: [AtomicBool; MAX_DEVICES],
}

/// The latest assignment of levels.
#[derive(Debug, Default)]
struct Assigned {
    at: Option<Instant>,
    devices: [Levels; MAX_DEVICES],
    /// The long blocks of each session.
    long_blocks: HashMap<u64, LongBlocks>,
}

/// Whether a session has long blocks that fill a device, and since when it has, or has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongBlocks {
    has: bool,
    since: Instant,
    /// When such a kernel was last in flight.
    seen: Option<Instant>,
}

impl LongBlocks {
    /// A session between two kernels still has long blocks for this time.
    const BETWEEN: Duration = Duration::from_millis(100);

    fn new(now: Instant) -> LongBlocks {
        LongBlocks {
            has: false,
            since: now,
            seen: None,
        }
    }

    /// Notes whether a kernel with such blocks is in flight. Returns whether long blocks are the session's, and the time
    /// since that changed.
    fn note(&mut self, in_flight: bool, now: Instant) -> (bool, Duration) {
        if in_flight {
            self.seen = Some(now);
        }
        let lately = |seen| now.saturating_duration_since(seen) < LongBlocks::BETWEEN;
        let has = self.seen.is_some_and(lately);
        if has != self.has {
            (self.has, self.since) = (has, now);
        }
        (has, now.saturating_duration_since(self.since))
    }
}

/// A client's scheduling state.
#[derive(Debug)]
pub struct Standing {
    weight: AtomicU32,
    clock: AtomicU64,
    /// Whether messages were dispatched at the last visit.
    has_work: AtomicBool,
    devices: [OnDevice; MAX_DEVICES],
    /// Number of the side to which it is to move, plus 1; 0: it stays.
    goes_to: AtomicU8,
    /// It has a context apart from the other clients, because its blocks take long.
    apart: AtomicBool,
    /// For how long it has waited for its devices.
    waited: Mutex<Total>,
}

/// A client's level on a device, and its demand.
#[derive(Debug, Default)]
struct OnDevice {
    level: AtomicU8,
    /// Time of the whole device that its kernels in flight could have filled, in nanoseconds.
    wanted: AtomicU64,
    /// Time for which it had kernels in flight, in nanoseconds.
    in_flight: AtomicU64,
    /// `wanted` and `in_flight` at the latest assignment of levels.
    counted: (AtomicU64, AtomicU64),
    /// Number of operations that have ended since then.
    ended: AtomicU32,
    /// Whether a kernel that is known to take long is in flight.
    long: AtomicBool,
    /// Part of the device that it has had lately, in thousandths; [`NOT_KNOWN`] if that is not counted.
    had: AtomicU32,
    /// Times of a block of its long kernel in flight that fills the device, and of that kernel, in microseconds; 0: there
    /// is none.
    block: (AtomicU32, AtomicU32),
}

const NOT_KNOWN: u32 = u32::MAX;

impl Default for Standing {
    fn default() -> Standing {
        Standing {
            weight: AtomicU32::new(DEFAULT_WEIGHT),
            clock: AtomicU64::new(0),
            has_work: AtomicBool::new(false),
            devices: Default::default(),
            goes_to: AtomicU8::new(0),
            apart: AtomicBool::new(false),
            waited: Mutex::default(),
        }
    }
}

impl Standing {
    /// Its weight.
    pub fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// Its level on a device.
    #[inline]
    pub fn level(&self, device: Ordinal) -> Level {
        let one = self.devices.get(device.index());
        one.map_or(Level::Own, |one| {
            Level::of(one.level.load(Ordering::Relaxed))
        })
    }

    /// Sets its level on a device.
    pub fn set_level(&self, device: usize, level: Level) {
        if let Some(one) = self.devices.get(device) {
            one.level.store(level as u8, Ordering::Relaxed);
        }
    }

    /// Adds time for which its kernels in flight could have filled a device, and for which there were some. Called by the
    /// thread that serves the session.
    pub fn add_wanted(&self, device: usize, wanted: Duration, in_flight: Duration) {
        let Some(one) = self.devices.get(device) else {
            return;
        };
        let add = |to: &AtomicU64, time: Duration| {
            let sum = to.load(Ordering::Relaxed) + time.as_nanos() as u64;
            to.store(sum, Ordering::Relaxed);
        };
        add(&one.wanted, wanted);
        add(&one.in_flight, in_flight);
    }

    /// Notes how many operations have ended on a device since the latest call, and whether a long kernel is in flight.
    pub fn note_progress(&self, device: usize, ended: u64, long: bool) {
        if let Some(one) = self.devices.get(device) {
            let ended = ended.try_into().unwrap_or(u32::MAX / 2);
            one.ended.fetch_add(ended, Ordering::Relaxed);
            one.long.store(long, Ordering::Relaxed);
        }
    }

    /// Number of operations that have ended on a device since the previous call.
    fn take_ended(&self, device: usize) -> u32 {
        let one = self.devices.get(device);
        one.map_or(0, |one| one.ended.swap(0, Ordering::Relaxed))
    }

    /// Whether a kernel that is known to take long is in flight.
    fn runs_long(&self, device: usize) -> bool {
        let one = self.devices.get(device);
        one.is_some_and(|one| one.long.load(Ordering::Relaxed))
    }

    /// Notes the times of a block of its long kernel in flight and of that kernel, zero if there is none.
    pub fn note_block(&self, device: usize, (block, kernel): (Duration, Duration)) {
        let store = |to: &AtomicU32, time: Duration| {
            let time = time.as_micros().try_into().unwrap_or(u32::MAX);
            to.store(time, Ordering::Relaxed);
        };
        if let Some(one) = self.devices.get(device) {
            store(&one.block.0, block);
            store(&one.block.1, kernel);
        }
    }

    /// The time of a block of its long kernel in flight on a device, zero if there is none.
    fn block_on(&self, device: usize) -> Duration {
        let one = self.devices.get(device);
        let micros = one.map_or(0, |one| one.block.0.load(Ordering::Relaxed));
        Duration::from_micros(micros.into())
    }

    /// The times of a block of its long kernels in flight that fill a device, and of those kernels; zero if there are
    /// none.
    fn block(&self) -> (Duration, Duration) {
        let time = |from: &AtomicU32| Duration::from_micros(from.load(Ordering::Relaxed).into());
        let all = self.devices.iter();
        all.map(|one| (time(&one.block.0), time(&one.block.1)))
            .max()
            .unwrap_or_default()
    }

    /// The side to which it is to move.
    #[inline]
    pub fn goes_to(&self) -> Option<Side> {
        let number = self.goes_to.load(Ordering::Relaxed);
        number.checked_sub(1).map(|at| Side::at(at.into()))
    }

    /// Orders it to move to a side, or to stay.
    pub fn set_goes_to(&self, side: Option<Side>) {
        let number = side.map_or(0, |side| side.index() as u8 + 1);
        self.goes_to.store(number, Ordering::Relaxed);
    }

    /// Whether it has a context apart from the other clients.
    pub fn is_apart(&self) -> bool {
        self.apart.load(Ordering::Relaxed)
    }

    /// Notes whether it has a context apart from the other clients.
    pub fn set_apart(&self, apart: bool) {
        self.apart.store(apart, Ordering::Relaxed);
    }

    /// Returns the time for which its kernels in flight could have filled a device since the previous call, and for which
    /// there were some. Called by one thread at a time.
    fn take_wanted(&self, device: usize) -> (Duration, Duration) {
        let Some(one) = self.devices.get(device) else {
            return (Duration::ZERO, Duration::ZERO);
        };
        let take = |from: &AtomicU64, counted: &AtomicU64| {
            let now = from.load(Ordering::Relaxed);
            let counted = counted.swap(now, Ordering::Relaxed);
            Duration::from_nanos(now.saturating_sub(counted))
        };
        let (wanted, in_flight) = &one.counted;
        (take(&one.wanted, wanted), take(&one.in_flight, in_flight))
    }

    /// For how long it has waited for its devices.
    pub fn device_wait(&self) -> Duration {
        self.waited.lock().time()
    }

    /// Its waits for its devices; `None` if they are not estimated, since its kernels are served in the order of
    /// submission.
    pub fn device_waits(&self, level: &LevelUsage) -> Option<DeviceWaits> {
        level.thousandths.map(|_| self.waited.lock().usage())
    }

    /// Part of a device that it has had lately, in thousandths. `None`: that is not counted, since its kernels are served
    /// in the order of submission.
    pub fn had(&self, device: usize) -> Option<u32> {
        let had = self.devices.get(device)?.had.load(Ordering::Relaxed);
        (had != NOT_KNOWN).then_some(had)
    }

    /// Its last level, and the greatest part that it has had, over the devices that it uses: those where it holds memory
    /// or has had kernels in flight, or else the first one.
    pub fn level_usage(&self, holds: impl Fn(usize) -> bool) -> LevelUsage {
        let all = self.devices.iter().enumerate();
        let used = all.filter(|(at, one)| holds(*at) || one.wanted.load(Ordering::Relaxed) > 0);
        let mut used: Vec<usize> = used.map(|(at, _)| at).collect();
        if used.is_empty() {
            used.push(0);
        }
        let level = |at: &usize| Level::of(self.devices[*at].level.load(Ordering::Relaxed));
        LevelUsage {
            level: used.iter().map(|at| level(at).rank()).max().unwrap_or(0),
            thousandths: used.iter().filter_map(|at| self.had(*at)).max(),
        }
    }

    /// Sets the part of a device that it has had lately, 0 to 1.
    fn set_had(&self, device: usize, part: Option<f32>) {
        if let Some(one) = self.devices.get(device) {
            let had = part.map_or(NOT_KNOWN, |part| (part * 1000.0) as u32);
            one.had.store(had, Ordering::Relaxed);
        }
    }

    /// Whether it may be visited now, or has to wait for others.
    fn may_go(&self, floor: u64) -> bool {
        self.clock.load(Ordering::Relaxed) <= floor.saturating_add(SLACK)
    }

    /// Advances the clock by this many dispatched messages. A client that was idle continues from `floor`, so that it
    /// has not accumulated credit.
    fn note(&self, messages: u64, floor: u64) {
        let working = messages > 0;
        if working {
            let clock = self.clock.load(Ordering::Relaxed);
            let from = match self.has_work.load(Ordering::Relaxed) {
                true => clock,
                false => clock.max(floor),
            };
            let passed = messages * TICK / u64::from(self.weight().max(1));
            self.clock.store(from + passed, Ordering::Relaxed);
        }
        self.has_work.store(working, Ordering::Relaxed);
    }
}

impl Fairness {
    /// Records the priority of a client that is about to be added.
    pub fn admit(&self, priority: u32) {
        if priority != 0 {
            self.classes.store(true, Ordering::SeqCst);
        }
    }

    /// Whether stream priorities rank clients by their priority.
    #[inline]
    pub fn has_classes(&self) -> bool {
        self.classes.load(Ordering::Relaxed)
    }

    /// Whether a kernel of the first level may have to wait for a long block on a device.
    #[inline]
    pub fn has_long_blocks(&self, device: Ordinal) -> bool {
        let one = self.long_blocks.get(device.index());
        one.is_some_and(|long| long.load(Ordering::Relaxed))
    }

    /// Notes whether kernels with long blocks are in flight in the main context of a device.
    pub fn note_long_blocks(&self, device: usize, long: bool) {
        if let Some(one) = self.long_blocks.get(device) {
            one.store(long, Ordering::Relaxed);
        }
    }

    /// Whether weights have to be considered.
    #[inline]
    pub fn is_weighted(&self) -> bool {
        self.weighted.load(Ordering::Relaxed)
    }

    /// Sets a client's weight.
    pub fn set_weight(&self, standing: &Standing, weight: u32) {
        standing.weight.store(weight, Ordering::Relaxed);
        self.weighted.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_long_blocks_between_its_kernels_too() {
        const MS: Duration = Duration::from_millis(1);
        let began = Instant::now();
        let mut blocks = LongBlocks::new(began);
        // Kernels of 60 ms, 20 ms apart.
        for ms in 0..400u32 {
            let (has, lasted) = blocks.note(ms % 80 < 60, began + ms * MS);
            assert_eq!((has, lasted), (true, ms * MS));
        }
        // The last one ended at 380 ms.
        assert!(blocks.note(false, began + 478 * MS).0);
        let ended = began + 479 * MS;
        assert_eq!(blocks.note(false, ended), (false, Duration::ZERO));
        assert_eq!(blocks.note(false, ended + 10 * MS), (false, 10 * MS));
        assert_eq!(blocks.note(true, ended + 20 * MS), (true, Duration::ZERO));
    }

    /// Visits clients that always have work in turn and returns the number of messages dispatched for each.
    fn share(weights: &[u32], visits: usize) -> Vec<u64> {
        let clients: Vec<Standing> = weights.iter().map(|_| Standing::default()).collect();
        let fairness = Fairness::default();
        for (client, weight) in clients.iter().zip(weights) {
            fairness.set_weight(client, *weight);
        }
        let mut got = vec![0; weights.len()];
        let mut floor = 0;
        for _ in 0..visits {
            for (client, got) in clients.iter().zip(&mut got) {
                if client.may_go(floor) {
                    client.note(64, floor);
                    *got += 64;
                }
            }
            let clocks = clients
                .iter()
                .map(|client| client.clock.load(Ordering::Relaxed));
            floor = floor.max(clocks.min().unwrap_or(0));
        }
        got
    }

    #[test]
    fn dispatch_goes_by_weight() {
        let got = share(&[100, 300, 50], 20_000);
        let ratio = |a: usize, b: usize| got[a] as f64 / got[b] as f64;
        assert!((ratio(1, 0) - 3.0).abs() < 0.05, "{got:?}");
        assert!((ratio(0, 2) - 2.0).abs() < 0.05, "{got:?}");
        let got = share(&[1, 10_000], 200_000);
        assert!(got[0] > 0 && got[1] / got[0] > 5_000, "{got:?}");
    }

    #[test]
    fn a_weight_that_is_set_is_looked_at() {
        let (fairness, client) = (Fairness::default(), Standing::default());
        assert!(!fairness.is_weighted());
        fairness.set_weight(&client, 300);
        assert!(fairness.is_weighted());
        assert_eq!(client.weight(), 300);
    }

    #[test]
    fn the_last_level_is_shown_of_the_devices_in_use() {
        let client = Standing::default();
        let shown = |holds: &[usize]| {
            let usage = client.level_usage(|device| holds.contains(&device));
            (usage.level, usage.thousandths)
        };
        assert_eq!(shown(&[]), (0, Some(0)));
        client.set_level(0, Level::First);
        client.set_level(1, Level::Last);
        client.set_level(2, Level::Below);
        client.set_had(0, Some(0.5));
        client.set_had(1, Some(0.25));
        assert_eq!(shown(&[]), (1, Some(500)));
        assert_eq!(shown(&[1]), (3, Some(250)));
        assert_eq!(shown(&[0, 1]), (3, Some(500)));
        let time = Duration::from_millis(1);
        client.add_wanted(0, time, time);
        assert_eq!(shown(&[1]), (3, Some(500)));
        client.set_had(0, None);
        assert_eq!(shown(&[]), (1, None));
    }

    #[test]
    fn who_was_idle_has_saved_nothing_up() {
        let client = Standing::default();
        client.note(0, 1_000_000);
        client.note(64, 1_000_000);
        assert_eq!(client.clock.load(Ordering::Relaxed), 1_000_000 + 64 * 100);
    }
}
