//! Who goes first: client priorities, and weights when there is not dispatch enough for all.
//!
//! **Priority.** As long as all clients have the normal one, streams have the priorities that the clients give them. From
//! the first client below normal on, a normal client's streams are one step above what it gave them and those of a client
//! below normal all at the least: the GPU then begins a normal client's blocks first. A dispatch thread visits clients below
//! normal when no other had anything to do, and every [`LOW_TURN`]th round.
//!
//! **Weights.** Each client has a clock that goes on by what was dispatched for it over its weight. While weights differ, a
//! client whose clock is ahead of the last one's who has work waits (virtual time, as in weighted fair queueing). A client
//! that waits for the GPU, or has nothing to do, holds nobody up.

mod session;

use mpsshim_model::limits::DEFAULT_WEIGHT;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Every so many rounds clients below normal priority have a turn, whatever the others do.
pub const LOW_TURN: u32 = 16;
/// Least and greatest priority of a stream (`cuCtxGetStreamPriorityRange` of the devices that there are).
const LEAST: i32 = 0;
pub const GREATEST: i32 = -5;
/// What one message adds to the clock of a client of weight 1.
const TICK: u64 = 10_000;
/// How far a clock may be ahead: what a client of the usual weight is given in one visit.
const SLACK: u64 = 64 * TICK / DEFAULT_WEIGHT as u64;
/// Rounds between two looks at all clocks.
const LOOK: u32 = 16;

/// What all dispatch threads know.
#[derive(Debug, Default)]
pub struct Fairness {
    /// A client below normal priority is there, or was.
    classes: AtomicBool,
    /// Some weight is not the usual one, or was.
    weighted: AtomicBool,
    /// The clock of the last client that has work.
    floor: AtomicU64,
}

/// A client's part in it.
#[derive(Debug)]
pub struct Standing {
    weight: AtomicU32,
    clock: AtomicU64,
    /// It had work for dispatch at the last visit.
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

    /// Whether it may be visited; if not, it waits for others.
    fn may_go(&self, floor: u64) -> bool {
        self.clock.load(Ordering::Relaxed) <= floor.saturating_add(SLACK)
    }

    /// So many messages were dispatched. One that comes back after a while has saved nothing up.
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

/// What a stream's priority is to the driver, of a client of this priority (0 normal, 1 below normal).
fn in_class(client: u32, priority: i32) -> i32 {
    match client {
        0 => (priority - 1).clamp(GREATEST, LEAST),
        _ => LEAST,
    }
}

impl Fairness {
    /// A client of this priority is about to come.
    pub fn admit(&self, priority: u32) {
        if priority != 0 {
            self.classes.store(true, Ordering::SeqCst);
        }
    }

    /// Whether clients of two priorities are told apart.
    #[inline]
    pub fn has_classes(&self) -> bool {
        self.classes.load(Ordering::Relaxed)
    }

    /// Whether weights differ.
    #[inline]
    pub fn is_weighted(&self) -> bool {
        self.weighted.load(Ordering::Relaxed)
    }

    /// Gives a client its weight.
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

    /// Has clients that always have work be visited in turn, and gives how many messages each got.
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
