//! Client priorities, and weights for when dispatch capacity is scarce.
//!
//! **Priority.** While all clients have normal priority, streams have the priorities that the clients set. Once there
//! has been a client below normal, streams of normal clients are raised by one level and streams of clients below
//! normal all get the lowest one, so that the GPU starts blocks of normal clients first. A dispatch thread visits
//! clients below normal when no other client had messages, and in every [`LOW_TURN`]th round.
//!
//! **Weights.** Each client has a clock that advances by the number of messages dispatched for it divided by its
//! weight. While weights differ, a client is not visited while its clock is more than [`SLACK`] ahead of the slowest
//! clock among the clients with work (virtual time, as in weighted fair queueing). A client that waits for the GPU or
//! is idle does not delay others.

mod session;

use mpsshim_model::limits::DEFAULT_WEIGHT;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Number of rounds after which clients below normal priority are visited regardless of the others.
pub const LOW_TURN: u32 = 16;
/// Lowest and highest stream priority (`cuCtxGetStreamPriorityRange` on the supported devices).
const LEAST: i32 = 0;
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
}

/// A client's scheduling state.
#[derive(Debug)]
pub struct Standing {
    weight: AtomicU32,
    clock: AtomicU64,
    /// Whether messages were dispatched at the last visit.
    has_work: AtomicBool,
}

impl Default for Standing {
    fn default() -> Standing {
        Standing {
            weight: AtomicU32::new(DEFAULT_WEIGHT),
            clock: AtomicU64::new(0),
            has_work: AtomicBool::new(false),
        }
    }
}

impl Standing {
    /// Its weight.
    pub fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
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

/// Maps the stream priority set by a client of this priority (0 normal, 1 below normal) to the driver's.
fn in_class(client: u32, priority: i32) -> i32 {
    match client {
        0 => (priority - 1).clamp(GREATEST, LEAST),
        _ => LEAST,
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
    fn normal_streams_are_above_those_below_normal() {
        let normal: Vec<i32> = (GREATEST..=LEAST).map(|p| in_class(0, p)).collect();
        assert_eq!(normal, [-5, -5, -4, -3, -2, -1]);
        assert!((GREATEST..=LEAST).all(|p| in_class(1, p) == LEAST));
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
    fn who_was_idle_has_saved_nothing_up() {
        let client = Standing::default();
        client.note(0, 1_000_000);
        client.note(64, 1_000_000);
        assert_eq!(client.clock.load(Ordering::Relaxed), 1_000_000 + 64 * 100);
    }
}
