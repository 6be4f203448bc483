//! Whether turns pay: one client at a time on a device, or all at once with the driver's own time slices.
//!
//! Either can be better by a multiple. Clients that wait for each small kernel lose most of a device to the driver's
//! context switches, and nothing when they take turns. Clients that are slow to submit leave a device idle in their turn,
//! which others could use meanwhile. Therefore both are tried: from time to time the clients of a device are served the
//! other way for a moment, and their progress is compared, each client's with its own. Progress is measured in
//! submissions; each measured stretch begins and ends with nothing in flight, so that all submissions have completed.

use super::turns::Nanoseconds;
use std::collections::BTreeMap;

const MS: Nanoseconds = 1_000_000;

/// How long clients share a device as usual before the other way is tried: what they get done then is what the trial is
/// compared with.
const USUAL: Nanoseconds = 100 * MS;
/// How long the other way is tried at least. A time slice of the driver takes a few milliseconds.
const TRIAL: Nanoseconds = 20 * MS;
/// How long turns are in a trial.
pub const TRIAL_QUANTUM: Nanoseconds = 3 * MS;
/// How long is waited until every client has had its turn, before the comparison goes on without it.
const ROUND: Nanoseconds = 3_000 * MS;
/// Between two trials: after one that has changed something, which may have been chance; after the next; and at most, after
/// trials that have changed nothing.
const DOUBTFUL_INTERVAL: Nanoseconds = USUAL;
const LEAST_INTERVAL: Nanoseconds = 500 * MS;
const GREATEST_INTERVAL: Nanoseconds = 8_000 * MS;
/// How often is looked whether clients go on as before, while they have the device together, and in turns.
const LOOK_TOGETHER: Nanoseconds = 100 * MS;
const LOOK_IN_TURNS: Nanoseconds = 1_000 * MS;
/// As many turns everybody is to have had between two looks.
const TURNS_TO_COMPARE: u64 = 4;
/// By this factor their pace has to change to be a reason for another trial.
const OTHER_PACE: f64 = 2.0;
/// A trial may keep clients waiting for those who drain as long as this part of the interval, and at least so long.
const PATIENCE: u64 = 32;
const LEAST_PATIENCE: Nanoseconds = 100 * MS;
/// Clients that drain for this part of their turns have so much in flight that they kept the device busy before that too.
const BUSY: f64 = 0.4;
/// By so much the other way has to be better.
const WORTH: f64 = 1.03;
/// A trial that gets done less than that is so clear, and so dear, that the next one comes still later.
const MUCH_WORSE: f64 = 0.5;
/// By how much at most one client counts for or against it.
const MOST: f64 = 8.0;

/// Who may hold a device.
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

/// A client of the device, as it stands.
#[derive(Clone, Copy, Debug)]
pub struct User {
    /// Its number.
    pub client: u64,
    /// What it has submitted in its life, as far as known: exact whenever it holds no turn.
    pub done: u64,
    /// When its last turn ended, drained.
    pub rested: Nanoseconds,
    /// Turns it has had.
    pub turns: u64,
    /// How long it held those that have ended.
    pub held: Nanoseconds,
    /// How long of that it drained because others waited: so long the device was certainly busy with it.
    pub drained: Nanoseconds,
    /// It waits for a turn.
    pub waits: bool,
    /// It has one.
    pub holds: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// As usual, up to the next trial.
    Usual,
    /// The other way is tried.
    Trial,
    /// Turns are given up, none granted, since then.
    Closing {
        since: Nanoseconds,
        trial_is_over: bool,
    },
    /// As before, so that another kind can begin, which somebody has asked for.
    Changing,
}

/// What a client had done when a stretch began.
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

/// What a client got done in a stretch.
#[derive(Clone, Copy, Debug)]
struct Rate {
    done: u64,
    time: Nanoseconds,
}

/// How fast the clients went on between the last two looks.
#[derive(Debug, Default)]
struct Pace {
    looked: Nanoseconds,
    /// What each had done then.
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

    /// Whether there have been so few turns that one more or less makes a difference.
    fn is_early(&self, users: &[User]) -> bool {
        users.iter().any(|user| {
            let start = self.starts.get(&user.client);
            let turns = start.map_or(0, |start| user.turns.saturating_sub(start.turns));
            (user.waits || user.holds) && turns < TURNS_TO_COMPARE
        })
    }

    /// Looks; whether they go on much faster or slower than before.
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
    /// When the stretch ends, unless somebody has not had a turn in it.
    ends: Nanoseconds,
    interval: Nanoseconds,
    /// What is got done in this stretch counts for nothing: it is long, or somebody has come in it.
    stale: bool,
    /// More than one client had something to do in this stretch.
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
    /// Who may hold the device.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Nobody is granted a turn, and who has one is to give it up.
    pub fn is_closing(&self) -> bool {
        matches!(self.stage, Stage::Closing { .. } | Stage::Changing)
    }

    /// The other way is tried.
    pub fn is_trial(&self) -> bool {
        self.stage == Stage::Trial
    }

    /// Several hold the device, and what they submit is to be known.
    pub fn is_watched(&self) -> bool {
        self.kind == Kind::Together && self.contended && self.starts.len() > 1
    }

    /// Something has happened, or the [`Sharing::deadline`] has come. `kind`: the one that it has to be.
    pub fn review(&mut self, now: Nanoseconds, kind: Option<Kind>, users: &[User]) {
        let in_use = users.iter().any(|user| user.holds);
        if let Some(kind) = kind {
            self.become_kind(kind, in_use);
            self.starts.clear();
            return;
        }
        if users.len() < 2 {
            // Whoever comes begins with turns: from those it is not far to a trial, whatever is in flight.
            self.kind = Kind::InTurns;
            self.stage = Stage::Usual;
            self.starts.clear();
            return;
        }
        if self.stage == Stage::Changing {
            // Nobody asks for it any more.
            self.stage = Stage::Usual;
        }
        self.welcome(now, users);
        let was_contended = self.contended;
        self.contended |= is_contended(users);
        match self.stage {
            // There is nothing to compare, or only from now on.
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
                // Turns end by themselves; time slices do not, and nobody shall wait long for a mere trial.
                self.lengthen();
                self.begin_usual(now, self.interval, users);
            }
            Stage::Closing { .. } | Stage::Changing => {}
        }
    }

    /// Who goes on differently than before is to be tried anew, from here on.
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

    /// A client that is new here makes what was found out doubtful.
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

    /// Whether somebody waits who has not had a turn in this stretch.
    fn misses_turns(&self, now: Nanoseconds, users: &[User]) -> bool {
        let misses = |user: &User| {
            let start = self.starts.get(&user.client);
            user.waits && start.is_none_or(|start| start.turns == user.turns)
        };
        now < self.ends + ROUND && users.iter().any(misses)
    }

    /// Whether clients in turns have so much in flight that they hardly leave the device idle. There is nothing to gain then:
    /// contexts never use it at the same time.
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

    /// Nothing is in flight: a stretch is over, the next one begins.
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
            // It stays, and is to stand the test soon.
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

    /// What each client got done since the stretch began. Together, the time of each ends when it has drained.
    fn rates(&self, now: Nanoseconds, users: &[User]) -> BTreeMap<u64, Rate> {
        let closed = match self.stage {
            Stage::Closing { since, .. } => since,
            _ => now,
        };
        let rate = |user: &User| {
            let start = self.starts.get(&user.client)?;
            if self.kind == Kind::InTurns && user.waits && start.turns == user.turns {
                // It has not had its turn yet, which says nothing about turns.
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

    /// When [`Sharing::review`] is to be called although nothing has happened.
    pub fn deadline(&self, now: Nanoseconds) -> Option<Nanoseconds> {
        if self.starts.len() < 2 {
            return None;
        }
        match self.stage {
            Stage::Usual if !self.contended => None,
            // In turns something happens all the time.
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

/// Whether more than one of them has something to do.
fn is_contended(users: &[User]) -> bool {
    let busy = users.iter().filter(|user| user.waits || user.holds);
    busy.count() > 1
}

/// By which factor the clients got more done in the trial: the geometric mean. One submission more on both sides keeps
/// those who submit seldom from deciding it. `None`: nobody has submitted anything.
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
        // One is twice as fast, the other half as fast.
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
        // One submission more or less says little, however short the trial.
        assert!(factor(&[(3, 1000 * MS)], &[(0, 30 * MS)]) > 0.9);
    }

    #[test]
    fn one_client_does_not_decide_for_many() {
        let usual = [(1, MS), (1000, MS), (1000, MS), (1000, MS)];
        assert!(factor(&usual, &[(1_000_000, MS), (300, MS), (300, MS), (300, MS)]) < 1.0);
    }
}
