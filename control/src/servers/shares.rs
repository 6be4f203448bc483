//! Shares of users whose servers work at the same time (`set_user_weight`, docs/design/0024-shares.md).
//!
//! A device gives contexts with work time slices of equal length. Where the weights of users differ, their servers report
//! when they have work in flight, the ledger counts the time of each user, and the servers of a user who is ahead of the
//! others hold new work back.

use super::{Server, Servers, State};
use mpsshim_model::policy::Weight;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How far ahead a user may be: about two time slices of the device.
const AHEAD: Duration = Duration::from_millis(4);
/// Seconds by which sums of floating-point numbers may be wrong.
const ROUNDING: f64 = 1e-6;
/// How long a user keeps its place without work: a program that waits for each kernel is idle for moments.
const KEPT: Duration = Duration::from_millis(50);
/// Longest time counted between two reports; servers with work report every 5 ms.
const BETWEEN: Duration = Duration::from_millis(50);
/// For how long one order holds work back, and after how long it is repeated.
const HOLD: Duration = Duration::from_millis(60);
const REPEAT: Duration = Duration::from_millis(20);

/// Where a server's clients have work, as bit masks of the daemon's ordinals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Work in flight.
    pub busy: u64,
    /// Work that was held back.
    pub wanted: u64,
}

impl Work {
    fn demands(&self, device: usize) -> bool {
        (self.busy | self.wanted) >> device & 1 != 0
    }
}

/// A server's part in the shares.
#[derive(Debug, Default)]
pub(super) struct Part {
    /// It was told to report its work.
    reports: bool,
    /// Its last report but for those in `reported`.
    work: Work,
    /// A report that is not counted yet.
    pub reported: Option<Work>,
    /// When it was last told to hold work back; `None`: it holds none back.
    held: Option<Instant>,
}

impl Part {
    /// Takes up the latest report. A server is believed to want a device only while it has to hold work back: its user could
    /// otherwise have it ask for ever for time that it does not use, and others would wait.
    fn take_up(&mut self) {
        if let Some(mut work) = self.reported.take() {
            if self.held.is_none() {
                work.wanted = 0;
            }
            self.work = work;
        }
    }
}

/// A server with clients.
#[derive(Clone, Copy, Debug)]
struct Party {
    uid: u32,
    weight: u32,
    work: Work,
}

/// The time that users have had of the devices.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Seconds by device and user.
    had: BTreeMap<(usize, u32), f64>,
    /// When a user last had or wanted work on a device.
    seen: BTreeMap<(usize, u32), Instant>,
    counted: Option<Instant>,
    held: BTreeSet<u32>,
    /// How often each user's servers had to begin to hold work back.
    holds: BTreeMap<u32, u64>,
}

/// Devices that any party has work on, or wants.
fn devices(parties: &[Party]) -> impl Iterator<Item = usize> + use<> {
    let all = parties
        .iter()
        .fold(0, |all, party| all | party.work.busy | party.work.wanted);
    (0..64).filter(move |device| all >> device & 1 != 0)
}

impl Ledger {
    /// Counts the time since the last call for parties with this work: contexts with work in flight have equal parts.
    fn count(&mut self, now: Instant, parties: &[Party]) {
        let since = self.counted.replace(now).unwrap_or(now);
        let over = now.saturating_duration_since(since).min(BETWEEN);
        for device in devices(parties) {
            let busy = parties
                .iter()
                .filter(|party| party.work.busy >> device & 1 != 0);
            let part = over.as_secs_f64() / busy.clone().count().max(1) as f64;
            for party in busy {
                *self.had.entry((device, party.uid)).or_default() += part;
            }
        }
    }

    /// The users whose servers have to hold new work back.
    fn decide(&mut self, now: Instant, parties: &[Party]) -> &BTreeSet<u32> {
        let before = std::mem::take(&mut self.held);
        for device in devices(parties) {
            let demand = parties.iter().filter(|party| party.work.demands(device));
            let users: BTreeMap<u32, u32> = demand.map(|party| (party.uid, party.weight)).collect();
            self.admit(now, device, &users);
            let progress = |(uid, weight): (&u32, &u32)| self.of(device, *uid) / f64::from(*weight);
            let least = users.iter().map(progress).fold(f64::INFINITY, f64::min);
            for (uid, weight) in &users {
                let ahead = self.of(device, *uid) - least * f64::from(*weight);
                // Until it has fallen back: each change costs a part of a time slice.
                let bound = match before.contains(uid) {
                    true => ROUNDING,
                    false => AHEAD.as_secs_f64(),
                };
                if users.len() > 1 && ahead > bound {
                    self.held.insert(*uid);
                }
            }
        }
        for uid in self.held.difference(&before) {
            *self.holds.entry(*uid).or_default() += 1;
        }
        &self.held
    }

    /// Seconds that a user has had of a device.
    fn of(&self, device: usize, uid: u32) -> f64 {
        self.had.get(&(device, uid)).copied().unwrap_or(0.0)
    }

    /// Gives users that come to a device the place of the user with the least time by weight: no time is saved for later.
    fn admit(&mut self, now: Instant, device: usize, users: &BTreeMap<u32, u32>) {
        let is_kept = |uid: &u32| {
            let seen = self.seen.get(&(device, *uid));
            seen.is_some_and(|at| now.saturating_duration_since(*at) <= KEPT)
        };
        let (there, come): (Vec<u32>, Vec<u32>) = users.keys().partition(|uid| is_kept(uid));
        let progress = |uid: &u32| self.of(device, *uid) / f64::from(users[uid]);
        let least = there.iter().map(progress).reduce(f64::min);
        for uid in come {
            let place = least.map_or(0.0, |least| {
                self.of(device, uid).max(least * f64::from(users[&uid]))
            });
            self.had.insert((device, uid), place);
        }
        for uid in users.keys() {
            self.seen.insert((device, *uid), now);
        }
    }
}

impl Servers {
    /// Sets a user's weight. `None`: the default again.
    ///
    /// # Errors
    /// Users do not have servers at the same time, or too many users have a weight; nothing is changed then.
    pub fn set_user_weight(&mut self, uid: u32, weight: Option<Weight>) -> Result<(), String> {
        if !self.users_are_apart() {
            return Err(format!(
                "weights of users apply with --users apart, and this daemon has --users {}; set_client_weight sets those of \
                 a server's clients",
                self.launcher.users()
            ));
        }
        let set = self.defaults.limits.user_weights.set_user(uid, weight);
        set.map_err(|error| error.to_string())?;
        self.tell_policies();
        self.review_shares();
        Ok(())
    }

    fn is_sharing(server: &Server) -> bool {
        server.standby_of.is_none()
            && server.link.is_some()
            && matches!(server.state, State::Active | State::HandingOver)
            && !server.is_idle()
    }

    /// Has the servers report their work, or no longer: it matters while several users with different weights have clients.
    pub(super) fn review_shares(&mut self) {
        let weights = &self.defaults.limits.user_weights;
        let sharing = self
            .running
            .iter()
            .filter(|server| Self::is_sharing(server));
        let users: BTreeMap<u32, Weight> = sharing
            .map(|server| (server.uid, weights.of(server.uid)))
            .collect();
        let differ = users.values().collect::<BTreeSet<_>>().len() > 1;
        let is_on = self.users_are_apart() && differ;
        for server in &mut self.running {
            let wanted = is_on && Self::is_sharing(server);
            let is_stray = !server.share.reports && server.share.reported.is_some();
            if server.share.reports == wanted && !is_stray {
                continue;
            }
            // If its link has no room now, it is told later.
            let link = server.link.as_ref();
            if link.is_some_and(|link| link.order_work_reports(wanted).is_ok()) {
                server.share = Part {
                    reports: wanted,
                    ..Part::default()
                };
            }
        }
        if !is_on {
            self.ledger = Ledger {
                holds: std::mem::take(&mut self.ledger.holds),
                ..Ledger::default()
            };
        }
    }

    /// How often each user's servers had to begin to hold work back, since the daemon started.
    pub fn holds(&self) -> &BTreeMap<u32, u64> {
        &self.ledger.holds
    }

    fn parties(&self) -> Vec<Party> {
        let weights = &self.defaults.limits.user_weights;
        let reporting = self.running.iter().filter(|server| server.share.reports);
        let party = |server: &Server| Party {
            uid: server.uid,
            weight: weights.of(server.uid).into(),
            work: server.share.work,
        };
        reporting.map(party).collect()
    }

    /// Counts the reports that have come, and tells the servers who goes on.
    pub(super) fn share_out(&mut self, now: Instant) {
        if !self
            .running
            .iter()
            .any(|server| server.share.reported.is_some())
        {
            return;
        }
        let parties = self.parties();
        self.ledger.count(now, &parties);
        for server in self
            .running
            .iter_mut()
            .filter(|server| server.share.reports)
        {
            server.share.take_up();
        }
        let parties = self.parties();
        let held = self.ledger.decide(now, &parties);
        tracing::trace!(?parties, ?held, "shares");
        for server in self
            .running
            .iter_mut()
            .filter(|server| server.share.reports)
        {
            let wanted = held.contains(&server.uid);
            let is_due = match server.share.held {
                Some(at) if wanted => now.saturating_duration_since(at) >= REPEAT,
                held => held.is_some() != wanted,
            };
            let time = if wanted { HOLD } else { Duration::ZERO };
            let link = server.link.as_ref().filter(|_| is_due);
            if link.is_some_and(|link| link.order_hold(time).is_ok()) {
                server.share.held = wanted.then_some(now);
            }
        }
    }
}

impl Server {
    /// It has reported its work, by its own ordinals.
    pub(super) fn note_work(&mut self, busy: u64, wanted: u64) {
        let at_daemon = |mask: u64| {
            let own = (0..64).filter(|own| mask >> own & 1 != 0);
            own.fold(0, |all, own| all | 1 << (self.ordinal(own) % 64))
        };
        let before = self.share.reported.map_or(0, |work| work.wanted);
        self.share.reported = Some(Work {
            busy: at_daemon(busy),
            wanted: at_daemon(wanted) | before,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Users on one device, each with a program that always has work, whose kernels end some time after they were
    /// submitted.
    struct Simulation {
        ledger: Ledger,
        start: Instant,
        now: Duration,
        parties: Vec<Party>,
        /// For how long each user's work in flight goes on without new work.
        in_flight: Vec<Duration>,
        had: Vec<f64>,
    }

    impl Simulation {
        fn new(weights: &[u32]) -> Simulation {
            let party = |(uid, weight): (usize, &u32)| Party {
                uid: uid as u32,
                weight: *weight,
                work: Work::default(),
            };
            Simulation {
                ledger: Ledger::default(),
                start: Instant::now(),
                now: Duration::ZERO,
                parties: weights.iter().enumerate().map(party).collect(),
                in_flight: vec![Duration::ZERO; weights.len()],
                had: vec![0.0; weights.len()],
            }
        }

        /// Runs for this time; `depth`: device time of the work that each user has in flight; `wants`: the users with work.
        fn run(&mut self, seconds: f64, depth: Duration, wants: &dyn Fn(usize, Duration) -> bool) {
            let step = Duration::from_millis(1);
            let mut held = BTreeSet::new();
            let end = self.now + Duration::from_secs_f64(seconds);
            while self.now < end {
                let users = 0..self.parties.len();
                let busy: Vec<usize> = users
                    .filter(|user| !self.in_flight[*user].is_zero())
                    .collect();
                for user in &busy {
                    let part = step / busy.len() as u32;
                    self.in_flight[*user] = self.in_flight[*user].saturating_sub(part);
                    self.had[*user] += part.as_secs_f64();
                }
                for user in 0..self.parties.len() {
                    let (is_held, wants) = (held.contains(&(user as u32)), wants(user, self.now));
                    if wants && !is_held {
                        self.in_flight[user] = self.in_flight[user].max(depth);
                    }
                }
                self.now += step;
                let busy = |user: usize| u64::from(!self.in_flight[user].is_zero());
                let mut parties = self.parties.iter().enumerate();
                let changed = parties.any(|(user, party)| party.work.busy != busy(user));
                if !changed && !self.now.as_millis().is_multiple_of(5) {
                    continue;
                }
                let now = self.start + self.now;
                self.ledger.count(now, &self.parties);
                for (user, party) in self.parties.iter_mut().enumerate() {
                    let is_held = held.contains(&party.uid);
                    party.work = Work {
                        busy: u64::from(!self.in_flight[user].is_zero()),
                        wanted: u64::from(is_held && wants(user, self.now)),
                    };
                }
                held = self.ledger.decide(now, &self.parties).clone();
            }
        }

        fn shares(&self) -> Vec<f64> {
            let all: f64 = self.had.iter().sum();
            self.had.iter().map(|had| had / all).collect()
        }
    }

    fn is_near(found: &[f64], expected: &[f64]) -> bool {
        found
            .iter()
            .zip(expected)
            .all(|(found, expected)| (found - expected).abs() < 0.03)
    }

    #[test]
    fn users_have_the_device_by_their_weights_and_it_is_never_idle() {
        for (weights, expected) in [
            (&[100, 100][..], &[0.5, 0.5][..]),
            (&[300, 100], &[0.75, 0.25]),
            (&[200, 100, 100], &[0.5, 0.25, 0.25]),
            (&[1000, 100], &[0.909, 0.091]),
        ] {
            for depth in [1, 5, 20].map(Duration::from_millis) {
                let mut users = Simulation::new(weights);
                users.run(20.0, depth, &|_, _| true);
                let shares = users.shares();
                assert!(
                    is_near(&shares, expected),
                    "{weights:?} {depth:?}: {shares:?}"
                );
                let all: f64 = users.had.iter().sum();
                assert!(all > 19.5, "{all} s of 20");
            }
        }
    }

    #[test]
    fn time_without_work_is_neither_saved_nor_lost_to_others() {
        let mut users = Simulation::new(&[300, 100]);
        let depth = Duration::from_millis(5);
        users.run(10.0, depth, &|user, _| user == 1);
        assert!(users.had[1] > 9.9, "alone, it has the whole device");
        users.had = vec![0.0; 2];
        users.run(10.0, depth, &|_, _| true);
        assert!(
            is_near(&users.shares(), &[0.75, 0.25]),
            "{:?}",
            users.shares()
        );
        // A user keeps its place during short pauses.
        users.had = vec![0.0; 2];
        users.run(10.0, depth, &|user, at| {
            user == 1 || at.as_millis() % 20 < 15
        });
        assert!(users.shares()[0] > 0.6, "{:?}", users.shares());
        let all: f64 = users.had.iter().sum();
        assert!(all > 9.0, "{all} s of 10");
    }

    #[test]
    fn a_server_that_holds_nothing_back_wants_nothing() {
        let wants = Work { busy: 0, wanted: 1 };
        let mut part = Part {
            reported: Some(wants),
            ..Part::default()
        };
        part.take_up();
        assert_eq!((part.work, part.reported), (Work::default(), None));
        part.held = Some(Instant::now());
        part.reported = Some(wants);
        part.take_up();
        assert_eq!(part.work, wants);
        part.take_up();
        assert_eq!(part.work, wants, "until the next report");
    }

    #[test]
    fn users_on_different_devices_do_not_wait_for_each_other() {
        let mut ledger = Ledger::default();
        let start = Instant::now();
        let on = |uid, device: u32| Party {
            uid,
            weight: 1 + uid,
            work: Work {
                busy: 1 << device,
                wanted: 0,
            },
        };
        let parties = [on(0, 0), on(1, 1)];
        for at in 0..100 {
            let now = start + Duration::from_millis(5 * at);
            ledger.count(now, &parties);
            assert!(ledger.decide(now, &parties).is_empty());
        }
    }
}
