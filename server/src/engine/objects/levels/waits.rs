//! Waits for a device: for how long kernels in flight got less of it than they could fill, and which clients had it
//! meanwhile. An estimate by the same numbers as the levels; docs/design/0020-levels.md describes its errors.

use super::{Claim, NOTHING, Use, moves, share_out};
use mpsshim_model::limits::{DeviceWaits, MOST_AWAITED};
use std::time::Duration;

/// Number of clients for which a session's waiting times are kept; of these the longest are shown.
const KEPT: usize = 4 * MOST_AWAITED;
/// A client that lacks less than this part of its demand does not wait: errors of rounding.
const LITTLE: f32 = 0.01;

/// The time for which a client waited between two assignments of levels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Waited {
    /// Time that it waited.
    pub time: Duration,
    /// Its parts by the clients that had the device, as indices of the claims. Only clients with the greatest parts of the
    /// device are named.
    pub awaited: Vec<(usize, Duration)>,
}

/// Estimates for how long each client waited, by the part of the device that each got.
pub(super) fn waits(all: &[(Claim, Use)], got: &[f32], over: Duration) -> Vec<Waited> {
    let mut got = got.to_vec();
    // Kernels that run for longer than the interval do not end in it. They have the part that the others leave.
    let left = (1.0 - got.iter().sum::<f32>()).max(0.0);
    share_out(all, left, &mut got, |client| !moves(client));
    let lacks = |at: usize| {
        let (claim, one) = &all[at];
        let part = match one.wants > NOTHING && !claim.wanted.is_zero() {
            true => (1.0 - got[at] / one.wants).clamp(0.0, 1.0),
            false => 0.0,
        };
        if part < LITTLE { 0.0 } else { part }
    };
    let mut waits = vec![Waited::default(); all.len()];
    if (0..all.len()).all(|at| lacks(at) == 0.0) {
        return waits;
    }
    let sum: f32 = got.iter().sum();
    let mut served: Vec<usize> = (0..all.len()).filter(|at| got[*at] > 0.0).collect();
    served.sort_by(|a, b| got[*b].total_cmp(&got[*a]));
    served.truncate(MOST_AWAITED + 1);
    for (at, waited) in waits.iter_mut().enumerate() {
        let others = sum - got[at];
        let time = all[at].0.in_flight.min(over).mul_f32(lacks(at));
        if others < LITTLE || time.is_zero() {
            continue;
        }
        let part = |one: &usize| (*one, time.mul_f32((got[*one] / others).min(1.0)));
        waited.time = time;
        let named = served.iter().filter(|one| **one != at).take(MOST_AWAITED);
        waited.awaited = named.map(part).collect();
    }
    waits
}

/// The times that a session has waited for its devices so far.
#[derive(Debug, Default)]
pub struct Total {
    time: Duration,
    /// By process id of the clients that had the device. They stay when they have ended.
    awaited: Vec<(i32, Duration)>,
}

impl Total {
    /// Adds waits. `pid`: the process id of a client by the index of its claim.
    pub fn add(&mut self, waited: &Waited, pid: impl Fn(usize) -> i32) {
        self.time += waited.time;
        for (client, time) in &waited.awaited {
            let pid = pid(*client);
            if let Some(known) = self.awaited.iter_mut().find(|known| known.0 == pid) {
                known.1 += *time;
                continue;
            }
            if self.awaited.len() == KEPT {
                let least = self.awaited.iter().enumerate();
                let least = least.min_by_key(|(_, known)| known.1).map(|(at, _)| at);
                self.awaited.swap_remove(least.unwrap_or(0));
            }
            self.awaited.push((pid, *time));
        }
    }

    /// Time waited so far.
    pub fn time(&self) -> Duration {
        self.time
    }

    /// For operators: the clients for which it waited longest, longest first.
    pub fn usage(&self) -> DeviceWaits {
        let mut awaited: Vec<(i32, u64)> = self
            .awaited
            .iter()
            .map(|(pid, time)| (*pid, time.as_nanos() as u64))
            .collect();
        awaited.sort_by_key(|(pid, time)| (std::cmp::Reverse(*time), *pid));
        awaited.truncate(MOST_AWAITED);
        DeviceWaits {
            waited_ns: self.time.as_nanos() as u64,
            awaited,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_waits_are_kept() {
        let mut total = Total::default();
        let wait = |awaited: Vec<(usize, u64)>| Waited {
            time: Duration::from_nanos(awaited.iter().map(|(_, time)| time).sum()),
            awaited: awaited
                .into_iter()
                .map(|(client, time)| (client, Duration::from_nanos(time)))
                .collect(),
        };
        let pid = |client: usize| 1000 + client as i32;
        for _ in 0..2 {
            total.add(&wait(vec![(1, 50), (2, 100)]), pid);
        }
        (10..200).for_each(|client| total.add(&wait(vec![(client, 1)]), pid));
        let usage = total.usage();
        assert_eq!(usage.waited_ns, 2 * 150 + 190);
        assert_eq!(usage.awaited[..2], [(1002, 200), (1001, 100)]);
        assert_eq!(usage.awaited.len(), MOST_AWAITED);
        assert_eq!(total.awaited.len(), KEPT);
    }
}
