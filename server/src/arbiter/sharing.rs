//! Whether turns pay: one client at a time on a device, or all at once with the driver's own time slices.
//!
//! Either can be better by a large factor. Clients that wait for each small kernel lose most of a device to the
//! driver's context switches, and lose nothing when they take turns. Clients that are slow to submit leave a device
//! idle during their turns, while others could use it. Therefore both kinds are tried: from time to time the clients of
//! a device are briefly served the other way, and each client's progress is compared with its own usual progress.
//! Progress is measured in submissions; each measured interval begins and ends with nothing in flight, so that all
//! submissions have completed.

use super::turns::Nanoseconds;
use std::collections::BTreeMap;

const MS: Nanoseconds = 1_000_000;

/// How long the usual progress is measured before a trial; the trial is compared with this measurement.
const USUAL: Nanoseconds = 100 * MS;
/// Minimum length of a trial. A time slice of the driver takes a few milliseconds.
const TRIAL: Nanoseconds = 20 * MS;
/// Quantum of turns during a trial.
pub const TRIAL_QUANTUM: Nanoseconds = 3 * MS;
/// How long a measurement waits for every client to have a turn, before the comparison ignores the missing clients.
const ROUND: Nanoseconds = 3_000 * MS;
/// Intervals between trials: after a trial that has changed the kind, possibly by chance; the shortest after a trial
/// that has changed nothing; and the longest, after repeated trials that have changed nothing.
const DOUBTFUL_INTERVAL: Nanoseconds = USUAL;
const LEAST_INTERVAL: Nanoseconds = 500 * MS;
const GREATEST_INTERVAL: Nanoseconds = 8_000 * MS;
/// Intervals between checks of the clients' pace, while they hold the device together, and in turns.
const LOOK_TOGETHER: Nanoseconds = 100 * MS;
const LOOK_IN_TURNS: Nanoseconds = 1_000 * MS;
/// Minimum number of turns of each client between two checks of the pace.
const TURNS_TO_COMPARE: u64 = 4;
/// The factor by which the pace must change to cause another trial.
const OTHER_PACE: f64 = 2.0;
/// Before a trial, clients may be kept waiting for others to drain for this fraction of the interval, and at least for
/// `LEAST_PATIENCE`.
const PATIENCE: u64 = 32;
const LEAST_PATIENCE: Nanoseconds = 100 * MS;
/// Clients that drain for this part of their turns have enough in flight to keep the device busy all the time.
const BUSY: f64 = 0.4;
/// Minimum gain for which the other kind is adopted.
const WORTH: f64 = 1.03;
/// Below this gain a trial is so clear and so costly that the next one is delayed even more.
const MUCH_WORSE: f64 = 0.5;
/// Limit of a single client's factor in the gain, in both directions.
const MOST: f64 = 8.0;

/// Number of clients that may hold a device at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One client.
    InTurns,
    /// All of them.
    Together,
}

impl Kind {
    fn other(self) -> Kind {
        match self {
            Kind::InTurns => Kind::Together,
            Kind::Together => Kind::InTurns,
        }
    }
}

/// The current state of a client of the device.
#[derive(Clone, Copy, Debug)]
pub struct User {
    /// Its number.
    pub client: u64,
    /// Total number of its submissions, as far as known: exact whenever it holds no turn.
    pub done: u64,
    /// When its last turn ended, drained.
    pub rested: Nanoseconds,
    /// Turns it has had.
    pub turns: u64,
    /// Total length of its completed turns.
    pub held: Nanoseconds,
    /// How long it drained in those turns because others waited: during this time the device was certainly busy with
    /// its work.
    pub drained: Nanoseconds,
    /// It waits for a turn.
    pub waits: bool,
    /// It holds one.
    pub holds: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The usual kind, until the next trial.
    Usual,
    /// The other kind is tried.
    Trial,
    /// Since this time turns are being given up and none are granted.
    Closing {
        since: Nanoseconds,
        trial_is_over: bool,
    },
    /// The same, before a change to another kind that the caller has requested.
    Changing,
}

/// A client's counters at the beginning of a measurement.
#[derive(Clone, Copy, Debug)]
struct Start {
    done: u64,
    turns: u64,
    held: Nanoseconds,
    drained: Nanoseconds,
}

impl Start {
    fn of(user: &User) -> (u64, Start) {
        let start = Start {
            done: user.done,
            turns: user.turns,
            held: user.held,
            drained: user.drained,
        };
        (user.client, start)
    }
}

/// A client's progress during a measurement.
#[derive(Clone, Copy, Debug)]
struct Rate {
    done: u64,
    time: Nanoseconds,
}

/// The clients' pace between the last two checks.
#[derive(Debug, Default)]
struct Pace {
    looked: Nanoseconds,
    /// Their counters at the last check.
    starts: BTreeMap<u64, Start>,
    rates: BTreeMap<u64, Rate>,
}

impl Pace {
    fn new(now: Nanoseconds, users: &[User], rates: BTreeMap<u64, Rate>) -> Pace {
        Pace {
            looked: now,
            starts: users.iter().map(Start::of).collect(),
            rates,
        }
    }

    /// Whether there have been so few turns that a single one would make a difference.
    fn is_early(&self, users: &[User]) -> bool {
        users.iter().any(|user| {
            let start = self.starts.get(&user.client);
            let turns = start.map_or(0, |start| user.turns.saturating_sub(start.turns));
            (user.waits || user.holds) && turns < TURNS_TO_COMPARE
        })
    }

    /// Checks the pace; returns whether clients have become much faster or slower.
    fn look(&mut self, now: Nanoseconds, users: &[User]) -> bool {
        let time = now.saturating_sub(self.looked).max(1);
        let rate = |user: &User| {
            let start = self.starts.get(&user.client)?;
            let done = user.done.saturating_sub(start.done);
            Some((user.client, Rate { done, time }))
        };
        let rates: BTreeMap<u64, Rate> = users.iter().filter_map(rate).collect();
        let factor = gain(&self.rates, &rates).unwrap_or(1.0);
        *self = Pace::new(now, users, rates);
        !(1.0 / OTHER_PACE..=OTHER_PACE).contains(&factor)
    }
}

/// How the clients of one device share it.
#[derive(Debug)]
pub struct Sharing {
    kind: Kind,
    stage: Stage,
    began: Nanoseconds,
    /// When the measurement ends, unless some client has not had a turn in it.
    ends: Nanoseconds,
    interval: Nanoseconds,
    /// The progress in this interval is not comparable: the interval is too long, or a client has joined in it.
    stale: bool,
    /// More than one client had work in this interval.
    contended: bool,
    starts: BTreeMap<u64, Start>,
    pace: Pace,
    usual: BTreeMap<u64, Rate>,
}

impl Default for Sharing {
    fn default() -> Sharing {
        Sharing {
            kind: Kind::InTurns,
            stage: Stage::Usual,
            began: 0,
            ends: 0,
            interval: LEAST_INTERVAL,
            stale: false,
            contended: false,
            starts: BTreeMap::new(),
            pace: Pace::default(),
            usual: BTreeMap::new(),
        }
    }
}

impl Sharing {
    /// Whether one client or all may hold the device.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether no turns are granted, and clients that hold one must give it up.
    pub fn is_closing(&self) -> bool {
        matches!(self.stage, Stage::Closing { .. } | Stage::Changing)
    }

    /// Whether the other kind is being tried.
    pub fn is_trial(&self) -> bool {
        self.stage == Stage::Trial
    }

    /// Whether several clients hold the device, so that their submissions must be reported.
    pub fn is_watched(&self) -> bool {
        self.kind == Kind::Together && self.contended && self.starts.len() > 1
    }

    /// Call this after every event, and at the [`Sharing::deadline`]. `kind`: the required kind, if any.
    pub fn review(&mut self, now: Nanoseconds, kind: Option<Kind>, users: &[User]) {
        let in_use = users.iter().any(|user| user.holds);
        if let Some(kind) = kind {
            self.become_kind(kind, in_use);
            self.starts.clear();
            return;
        }
        if users.len() < 2 {
            // The next client begins with turns, since from turns a trial can start soon, whatever is in flight.
            self.kind = Kind::InTurns;
            self.stage = Stage::Usual;
            self.starts.clear();
            return;
        }
        if self.stage == Stage::Changing {
            // The kind is no longer required.
            self.stage = Stage::Usual;
        }
        self.welcome(now, users);
        let was_contended = self.contended;
        self.contended |= is_contended(users);
        match self.stage {
            // There is nothing to compare, or measuring starts only now.
            Stage::Usual if !was_contended => {
                self.interval = LEAST_INTERVAL;
                self.begin_usual(now, USUAL, users);
            }
            Stage::Usual if now < self.ends => self.look(now, users),
            Stage::Usual | Stage::Trial if now < self.ends || self.misses_turns(now, users) => {}
            Stage::Usual if self.kept_busy(users) => {
                self.lengthen();
                self.begin_usual(now, self.interval, users);
            }
            Stage::Usual | Stage::Trial => {
                let trial_is_over = self.stage == Stage::Trial;
                self.close(now, trial_is_over, in_use, users);
            }
            Stage::Closing { trial_is_over, .. } if !in_use => self.next(now, trial_is_over, users),
            Stage::Closing {
                since,
                trial_is_over: false,
            } if self.kind == Kind::Together && now - since >= self.patience() => {
                // Turns end by themselves, time slices do not, and clients must not wait long for a mere trial.
                self.lengthen();
                self.begin_usual(now, self.interval, users);
            }
            Stage::Closing { .. } | Stage::Changing => {}
        }
    }

    /// If the clients' pace has changed, starts a new measurement soon, for another trial.
    fn look(&mut self, now: Nanoseconds, users: &[User]) {
        let early = self.kind == Kind::InTurns && self.pace.is_early(users);
        if now >= self.next_look() && !early && self.pace.look(now, users) {
            self.interval = LEAST_INTERVAL;
            self.ends = self.ends.min(now + USUAL);
            self.stale = true;
        }
    }

    fn next_look(&self) -> Nanoseconds {
        let pause = match self.kind {
            Kind::InTurns => LOOK_IN_TURNS,
            Kind::Together => LOOK_TOGETHER,
        };
        self.pace.looked + pause
    }

    fn become_kind(&mut self, kind: Kind, in_use: bool) {
        if self.kind != kind && in_use {
            self.stage = Stage::Changing;
            return;
        }
        (self.kind, self.stage) = (kind, Stage::Usual);
        self.interval = LEAST_INTERVAL;
    }

    /// If a client is new on the device, the earlier results are doubtful.
    fn welcome(&mut self, now: Nanoseconds, users: &[User]) {
        let begins = self.starts.is_empty();
        let is_new = |user: &User| !self.starts.contains_key(&user.client);
        if !users.iter().any(is_new) {
            return;
        }
        for user in users {
            let (client, start) = Start::of(user);
            self.starts.entry(client).or_insert(start);
        }
        self.interval = LEAST_INTERVAL;
        if begins {
            self.began = now;
        }
        if self.stage == Stage::Usual {
            let soon = now + USUAL;
            self.ends = if begins { soon } else { self.ends.min(soon) };
            self.stale = !begins;
        }
    }

    /// Whether a waiting client has not had a turn in this measurement.
    fn misses_turns(&self, now: Nanoseconds, users: &[User]) -> bool {
        let misses = |user: &User| {
            let start = self.starts.get(&user.client);
            user.waits && start.is_none_or(|start| start.turns == user.turns)
        };
        now < self.ends + ROUND && users.iter().any(misses)
    }

    /// Whether clients in turns have so much in flight that they hardly leave the device idle. Then a trial could gain
    /// nothing, since contexts never use the device at the same time.
    fn kept_busy(&self, users: &[User]) -> bool {
        let sum = |of: fn(&User, &Start) -> Nanoseconds| -> Nanoseconds {
            let since = |user: &User| Some(of(user, self.starts.get(&user.client)?));
            users.iter().filter_map(since).sum()
        };
        let held = sum(|user, start| user.held - start.held);
        let drained = sum(|user, start| user.drained - start.drained);
        self.kind == Kind::InTurns && held > 0 && drained as f64 >= BUSY * held as f64
    }

    fn close(&mut self, now: Nanoseconds, trial_is_over: bool, in_use: bool, users: &[User]) {
        if in_use {
            self.stage = Stage::Closing {
                since: now,
                trial_is_over,
            };
        } else {
            self.next(now, trial_is_over, users);
        }
    }

    /// Nothing is in flight: ends a measurement and begins the next one.
    fn next(&mut self, now: Nanoseconds, trial_is_over: bool, users: &[User]) {
        if self.stale && !trial_is_over {
            return self.begin_usual(now, USUAL, users);
        }
        let rates = self.rates(now, users);
        if !trial_is_over {
            self.kind = self.kind.other();
            self.usual = rates;
            return self.begin(now, Stage::Trial, TRIAL, users);
        }
        let gain = gain(&self.usual, &rates);
        tracing::debug!("Tried {:?} on a device: gain {gain:?}", self.kind);
        match gain {
            // The new kind stays, and is checked again soon.
            Some(gain) if gain > WORTH => self.interval = DOUBTFUL_INTERVAL,
            Some(gain) => {
                self.kind = self.kind.other();
                self.lengthen();
                if gain < MUCH_WORSE {
                    self.lengthen();
                }
            }
            None => self.kind = self.kind.other(),
        }
        self.begin_usual(now, self.interval, users);
    }

    fn begin_usual(&mut self, now: Nanoseconds, length: Nanoseconds, users: &[User]) {
        self.begin(now, Stage::Usual, length, users);
        self.stale = length > USUAL;
    }

    fn begin(&mut self, now: Nanoseconds, stage: Stage, length: Nanoseconds, users: &[User]) {
        (self.stage, self.began, self.ends) = (stage, now, now + length);
        self.contended = is_contended(users);
        self.starts = users.iter().map(Start::of).collect();
        self.pace = Pace::new(now, users, BTreeMap::new());
    }

    fn lengthen(&mut self) {
        self.interval = (self.interval * 2).clamp(LEAST_INTERVAL, GREATEST_INTERVAL);
    }

    fn patience(&self) -> Nanoseconds {
        (self.interval / PATIENCE).max(LEAST_PATIENCE)
    }

    /// Each client's progress since the measurement began. If clients hold the device together, each one's time ends
    /// when it has drained.
    fn rates(&self, now: Nanoseconds, users: &[User]) -> BTreeMap<u64, Rate> {
        let closed = match self.stage {
            Stage::Closing { since, .. } => since,
            _ => now,
        };
        let rate = |user: &User| {
            let start = self.starts.get(&user.client)?;
            if self.kind == Kind::InTurns && user.waits && start.turns == user.turns {
                // It has not had its turn yet, so its progress says nothing about turns.
                return None;
            }
            let until = match self.kind {
                Kind::Together => user.rested.max(closed),
                Kind::InTurns => now,
            };
            let rate = Rate {
                done: user.done.saturating_sub(start.done),
                time: until.saturating_sub(self.began).max(1),
            };
            Some((user.client, rate))
        };
        users.iter().filter_map(rate).collect()
    }

    /// When [`Sharing::review`] must be called next even without an event.
    pub fn deadline(&self, now: Nanoseconds) -> Option<Nanoseconds> {
        if self.starts.len() < 2 {
            return None;
        }
        match self.stage {
            Stage::Usual if !self.contended => None,
            // In turns, events occur all the time.
            Stage::Usual if now < self.ends && self.kind == Kind::Together => {
                Some(self.ends.min(self.next_look().max(now + 1)))
            }
            Stage::Usual if now < self.ends => Some(self.ends),
            Stage::Trial if now < self.ends => Some(self.ends),
            Stage::Usual | Stage::Trial => Some(self.ends + ROUND).filter(|at| *at > now),
            Stage::Closing {
                since,
                trial_is_over: false,
            } if self.kind == Kind::Together => {
                Some(since + self.patience()).filter(|at| *at > now)
            }
            Stage::Closing { .. } | Stage::Changing => None,
        }
    }
}

/// Whether more than one client waits or holds.
fn is_contended(users: &[User]) -> bool {
    let busy = users.iter().filter(|user| user.waits || user.holds);
    busy.count() > 1
}

/// The factor by which the clients made more progress in the trial: the geometric mean over the clients. One submission
/// is added on both sides, so that clients with few submissions do not dominate. `None`: no client has submitted
/// anything.
fn gain(usual: &BTreeMap<u64, Rate>, trial: &BTreeMap<u64, Rate>) -> Option<f64> {
    let of = |(client, trial): (&u64, &Rate)| {
        let usual = usual.get(client)?;
        if usual.done == 0 && trial.done == 0 {
            return None;
        }
        let expected = usual.done as f64 * trial.time as f64 / usual.time as f64;
        let ratio = (trial.done as f64 + 1.0) / (expected + 1.0);
        Some(ratio.clamp(1.0 / MOST, MOST).ln())
    };
    let logarithms: Vec<f64> = trial.iter().filter_map(of).collect();
    let mean = logarithms.iter().sum::<f64>() / logarithms.len() as f64;
    (!logarithms.is_empty()).then(|| mean.exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factor(usual: &[(u64, u64)], trial: &[(u64, u64)]) -> f64 {
        gain(&rates(usual), &rates(trial)).expect("submissions")
    }

    fn rates(of: &[(u64, u64)]) -> BTreeMap<u64, Rate> {
        let rate = |(client, (done, time)): (usize, &(u64, u64))| {
            let (done, time) = (*done, *time);
            (client as u64, Rate { done, time })
        };
        of.iter().enumerate().map(rate).collect()
    }

    #[test]
    fn each_client_is_compared_with_itself() {
        let usual = [(10_000, 10 * MS), (10, 10 * MS)];
        // One client is twice as fast, the other half as fast.
        let trial = [(20_001, 10 * MS), (4, 10 * MS)];
        assert!((factor(&usual, &trial) - 0.95).abs() < 0.01);
        assert!(factor(&usual, &[(10_000, 5 * MS), (10, 5 * MS)]) > 1.8);
    }

    #[test]
    fn who_submits_nothing_has_no_say() {
        let usual = [(0, MS), (1000, MS)];
        assert!((factor(&usual, &usual) - 1.0).abs() < 1e-9);
        assert_eq!(gain(&BTreeMap::new(), &rates(&usual)), None);
        assert_eq!(gain(&rates(&[(0, MS)]), &rates(&[(0, MS)])), None);
        // One submission more or less makes little difference, however short the trial.
        assert!(factor(&[(3, 1000 * MS)], &[(0, 30 * MS)]) > 0.9);
    }

    #[test]
    fn one_client_does_not_decide_for_many() {
        let usual = [(1, MS), (1000, MS), (1000, MS), (1000, MS)];
        assert!(factor(&usual, &[(1_000_000, MS), (300, MS), (300, MS), (300, MS)]) < 1.0);
    }
}
