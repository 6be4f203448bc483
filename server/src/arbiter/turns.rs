//! The policy of turns, without clocks and descriptors of its own.
//!
//! Virtual time, as in start-time fair queueing. Each client has a clock for each device, which advances by the time it
//! held a turn there, divided by its share. The waiting client that is least ahead of its devices' [`Turns::floor`]
//! goes first. The floor is the least clock of the clients that wait or hold there: it only rises, and a client that
//! begins to wait is lifted to it, so that idle clients do not save up time. Clocks are per device because demand
//! differs between devices: on a device with a single client, its clock runs at full speed, and would mean nothing on
//! another device.
//!
//! If turns do not pay (see [`super::sharing`]), all clients that wait for a device get it at once and keep it.

use super::sharing::{Kind, Sharing, TRIAL_QUANTUM, User};
use mpsshim_model::policy::TurnPolicy;
use mpsshim_proto::handshake::MAX_DEVICES;
use std::collections::BTreeMap;

/// A point in time since some fixed moment, or a duration, nanoseconds.
pub type Nanoseconds = u64;

/// A set of devices, one bit each by the server's ordinal.
pub type DeviceSet = u32;

/// Share of a client with the default weight and all active threads: its clock advances by one per nanosecond.
pub const FULL_SHARE: u64 = 100 * 10_000;

/// How long a client may take to give up a turn before it is reported as not draining.
pub const DRAIN_PATIENCE: Nanoseconds = 1_000_000_000;

/// Minimum sleep until a holder's clock has caught up with a waiter's.
const LEAST_SLEEP: Nanoseconds = 50_000;

/// How urgently a holder is asked for its turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Asked {
    /// Not asked: no client waits for it.
    #[default]
    Not,
    /// Give it up when idle.
    WhenIdle,
    /// Give it up now.
    Now,
    /// Not asked to give it up, but others hold the device too: report submissions from time to time.
    Report,
}

/// A message for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It gets the turn. Call [`Turns::ungrant`] if it does not want the turn any more.
    Grant(u64, Asked),
    /// It is asked for its turn in this way from now on.
    Ask(u64, Asked),
    /// It was asked [`DRAIN_PATIENCE`] ago and still holds its turn. Decided once per turn.
    NotDraining(u64),
}

/// A client's turns so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Number of turns.
    pub turns: u64,
    /// Total time of holding turns.
    pub held: Nanoseconds,
    /// Total time of waiting for turns.
    pub waited: Nanoseconds,
    /// It was asked long ago for the turn that it holds.
    pub not_draining: bool,
}

/// State of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Wants no turn.
    Idle,
    /// Waits for a turn.
    Waits,
    /// Holds a turn.
    Holds,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Idle,
    Waits {
        devices: DeviceSet,
        since: Nanoseconds,
    },
    Holds(Hold),
}

#[derive(Clone, Copy, Debug)]
struct Hold {
    devices: DeviceSet,
    since: Nanoseconds,
    /// The time up to which its clocks have been advanced.
    charged_to: Nanoseconds,
    asked: Asked,
    /// Since when it has been asked in this way.
    asked_since: Nanoseconds,
    not_draining: bool,
}

impl Hold {
    /// How long it has been asked with `Asked::Now`.
    fn drains(&self, now: Nanoseconds) -> Nanoseconds {
        match self.asked {
            Asked::Now => now.saturating_sub(self.asked_since),
            _ => 0,
        }
    }
}

#[derive(Debug)]
struct Client {
    share: u64,
    clocks: [u128; MAX_DEVICES],
    phase: Phase,
    account: Account,
    /// The devices it has ever wanted.
    used: DeviceSet,
    /// Number of its submissions, as last reported.
    done: u64,
    /// When its last turn ended.
    rested: Nanoseconds,
    /// Total time from being asked until the end, over its turns.
    drained: Nanoseconds,
}

impl Client {
    /// The devices it waits for or holds.
    fn devices(&self) -> DeviceSet {
        match self.phase {
            Phase::Idle => 0,
            Phase::Waits { devices, .. } => devices,
            Phase::Holds(hold) => hold.devices,
        }
    }

    /// The current value of a clock.
    fn clock(&self, device: usize, now: Nanoseconds) -> u128 {
        let running = match self.phase {
            Phase::Holds(hold) if hold.devices & (1 << device) != 0 => {
                self.passed(now.saturating_sub(hold.charged_to))
            }
            _ => 0,
        };
        self.clocks[device] + running
    }

    /// Converts a duration to an advance of its clocks.
    fn passed(&self, time: Nanoseconds) -> u128 {
        u128::from(time) * u128::from(FULL_SHARE) / u128::from(self.share)
    }

    /// The time in which its clocks advance by this amount.
    fn time(&self, passed: u128) -> Nanoseconds {
        let time = (passed * u128::from(self.share)).div_ceil(u128::from(FULL_SHARE));
        Nanoseconds::try_from(time).unwrap_or(Nanoseconds::MAX)
    }

    fn charge(&mut self, now: Nanoseconds) {
        for device in each(self.devices()) {
            self.clocks[device] = self.clock(device, now);
        }
        if let Phase::Holds(hold) = &mut self.phase {
            hold.charged_to = now;
        }
    }
}

fn each(devices: DeviceSet) -> impl Iterator<Item = usize> {
    (0..MAX_DEVICES).filter(move |device| devices & (1 << device) != 0)
}

/// All clients, and which of them hold a turn.
#[derive(Debug)]
pub struct Turns {
    quantum: Nanoseconds,
    policy: TurnPolicy,
    clients: BTreeMap<u64, Client>,
    floor: [u128; MAX_DEVICES],
    sharing: [Sharing; MAX_DEVICES],
}

impl Turns {
    /// Without clients.
    pub fn new(quantum: Nanoseconds, policy: TurnPolicy) -> Turns {
        Turns {
            quantum,
            policy,
            clients: BTreeMap::new(),
            floor: [0; MAX_DEVICES],
            sharing: Default::default(),
        }
    }

    /// Sets how long a turn is held while others wait.
    pub fn set_quantum(&mut self, quantum: Nanoseconds) {
        self.quantum = quantum;
    }

    /// Adds a client. `share`: its weight times its percentage, [`FULL_SHARE`] by default.
    pub fn join(&mut self, client: u64, share: u64) {
        let new = Client {
            share: share.max(1),
            clocks: [0; MAX_DEVICES],
            phase: Phase::Idle,
            account: Account::default(),
            used: 0,
            done: 0,
            rested: 0,
            drained: 0,
        };
        self.clients.insert(client, new);
    }

    /// Removes a client, together with its turn.
    pub fn leave(&mut self, client: u64, now: Nanoseconds) {
        // Its clocks must still count for the floor on devices without other clients.
        self.end_turn(client, now);
        self.raise_floor(now);
        self.clients.remove(&client);
    }

    /// Changes a client's share.
    pub fn set_share(&mut self, client: u64, share: u64, now: Nanoseconds) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.charge(now);
            client.share = share.max(1);
        }
    }

    /// Whether the submissions of clients that hold a turn currently matter, so that they must be reported to this.
    pub fn wants_reports(&self) -> bool {
        self.sharing.iter().any(Sharing::is_watched)
    }

    /// Sets the total number of a client's submissions.
    pub fn has_done(&mut self, client: u64, submissions: u64) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.done = submissions;
        }
    }

    /// State of a client.
    pub fn standing(&self, client: u64) -> Standing {
        match self.clients.get(&client).map(|client| client.phase) {
            None | Some(Phase::Idle) => Standing::Idle,
            Some(Phase::Waits { .. }) => Standing::Waits,
            Some(Phase::Holds(_)) => Standing::Holds,
        }
    }

    /// How many turns a client has had.
    pub fn turns_had(&self, client: u64) -> u64 {
        let client = self.clients.get(&client);
        client.map_or(0, |client| client.account.turns)
    }

    /// A client's turns so far, including the current wait or turn.
    pub fn account(&self, client: u64, now: Nanoseconds) -> Account {
        let Some(client) = self.clients.get(&client) else {
            return Account::default();
        };
        let mut account = client.account;
        match client.phase {
            Phase::Idle => {}
            Phase::Waits { since, .. } => account.waited += now.saturating_sub(since),
            Phase::Holds(hold) => {
                account.held += now.saturating_sub(hold.since);
                account.not_draining = hold.not_draining;
            }
        }
        account
    }

    /// A client that has no turn waits for one, of these devices.
    pub fn wants(&mut self, client: u64, devices: DeviceSet, now: Nanoseconds) {
        self.raise_floor(now);
        let Some(client) = self.clients.get_mut(&client) else {
            return;
        };
        let (before, since) = match client.phase {
            Phase::Waits { devices, since } => (devices, since),
            _ => (0, now),
        };
        client.phase = Phase::Waits { devices, since };
        client.used |= devices;
        for device in each(devices & !before) {
            client.clocks[device] = client.clocks[device].max(self.floor[device]);
        }
    }

    /// A client has given up its turn, or no longer waits.
    pub fn rests(&mut self, client: u64, now: Nanoseconds) {
        self.end_turn(client, now);
    }

    /// A client has given up its turn and waits for the next one.
    pub fn wants_again(&mut self, client: u64, devices: DeviceSet, now: Nanoseconds) {
        let held = self.clients.get(&client).map_or(0, Client::devices);
        self.end_turn(client, now);
        if let Some(client) = self.clients.get_mut(&client) {
            // It was never idle, so its clocks are not lifted.
            client.phase = Phase::Waits {
                devices: devices & held,
                since: now,
            };
        }
        self.wants(client, devices, now);
    }

    /// A turn just granted was not wanted any more.
    pub fn ungrant(&mut self, client: u64) {
        if let Some(client) = self.clients.get_mut(&client)
            && let Phase::Holds(_) = client.phase
        {
            client.phase = Phase::Idle;
            client.account.turns -= 1;
        }
    }

    fn end_turn(&mut self, client: u64, now: Nanoseconds) {
        let Some(client) = self.clients.get_mut(&client) else {
            return;
        };
        client.charge(now);
        match client.phase {
            Phase::Idle => {}
            Phase::Waits { since, .. } => client.account.waited += now.saturating_sub(since),
            Phase::Holds(hold) => {
                client.account.held += now.saturating_sub(hold.since);
                client.rested = now;
                client.drained += hold.drains(now);
            }
        }
        client.phase = Phase::Idle;
    }

    fn raise_floor(&mut self, now: Nanoseconds) {
        for device in 0..MAX_DEVICES {
            let present = self.clients.values();
            let present = present.filter(|client| client.devices() & (1 << device) != 0);
            let least = present.map(|client| client.clock(device, now)).min();
            // On a device without waiting or holding clients, all start equal.
            let all = self.clients.values().map(|client| client.clocks[device]);
            let least = least.or_else(|| all.max()).unwrap_or(0);
            self.floor[device] = self.floor[device].max(least);
        }
    }

    /// A client's lead on the device where it is greatest.
    fn lead(&self, client: &Client, now: Nanoseconds) -> u128 {
        let lead = |device: usize| client.clock(device, now).saturating_sub(self.floor[device]);
        each(client.devices()).map(lead).max().unwrap_or(0)
    }

    /// The waiting clients, in the order in which they get turns.
    fn waiting(&self, now: Nanoseconds) -> Vec<Waiting> {
        let waits = |(number, client): (&u64, &Client)| match client.phase {
            Phase::Waits { devices, since } => Some(Waiting {
                lead: self.lead(client, now),
                since,
                client: *number,
                devices,
            }),
            _ => None,
        };
        let mut waiting: Vec<Waiting> = self.clients.iter().filter_map(waits).collect();
        waiting.sort_unstable();
        waiting
    }

    /// Grants free turns and determines which holders are asked for theirs.
    pub fn decide(&mut self, now: Nanoseconds) -> Vec<Decision> {
        self.review(now);
        self.raise_floor(now);
        let mut waiting = self.waiting(now);
        let granted = self.grant(&mut waiting, now);
        let mut decisions = Vec::new();
        let contended = self.holders(&waiting, now);
        let trials = self.devices_that(Sharing::is_trial);
        let closing = self.devices_that(Sharing::is_closing);
        let shared = self.devices_that(Sharing::is_watched);
        for (number, least, lead) in contended {
            let Some(Phase::Holds(hold)) = self.clients.get_mut(&number).map(|c| &mut c.phase)
            else {
                continue;
            };
            let closing = hold.devices & closing != 0;
            let shared = hold.devices & shared != 0;
            // A holder that is behind the waiting clients would get the turn right back.
            let quantum = quantum_of(self.quantum, hold.devices & trials);
            let over = least
                .is_some_and(|least| now.saturating_sub(hold.since) >= quantum && lead >= least);
            let asked = match least {
                _ if closing => Asked::Now,
                None if shared => Asked::Report,
                None => Asked::Not,
                Some(_) if over || hold.asked == Asked::Now => Asked::Now,
                Some(_) => Asked::WhenIdle,
            };
            let changed = asked != hold.asked;
            if changed {
                (hold.asked, hold.asked_since) = (asked, now);
                hold.not_draining = false;
            }
            if granted.contains(&number) {
                decisions.push(Decision::Grant(number, asked));
            } else if changed {
                decisions.push(Decision::Ask(number, asked));
            }
            let late = now.saturating_sub(hold.asked_since) >= DRAIN_PATIENCE;
            if asked == Asked::Now && late && !hold.not_draining {
                hold.not_draining = true;
                decisions.push(Decision::NotDraining(number));
            }
        }
        decisions
    }

    /// The set of devices for which `is_so` holds.
    fn devices_that(&self, is_so: impl Fn(&Sharing) -> bool) -> DeviceSet {
        let of = |(device, sharing)| DeviceSet::from(is_so(sharing)) << device;
        self.sharing.iter().enumerate().map(of).sum()
    }

    /// The devices that only one client at a time may hold.
    fn exclusive(&self) -> DeviceSet {
        self.devices_that(|sharing| sharing.kind() == Kind::InTurns)
    }

    /// Checks for each device whether its clients should share it in another way.
    fn review(&mut self, now: Nanoseconds) {
        for device in 0..MAX_DEVICES {
            let uses = |client: &&Client| client.used & (1 << device) != 0;
            let mut shares = self.clients.values().filter(uses).map(|user| user.share);
            let first = shares.next();
            let kind = match self.policy {
                TurnPolicy::Always => Some(Kind::InTurns),
                TurnPolicy::Never => Some(Kind::Together),
                TurnPolicy::Auto if shares.any(|share| Some(share) != first) => Some(Kind::InTurns),
                TurnPolicy::Auto => None,
            };
            let user = |(number, client): (&u64, &Client)| User {
                client: *number,
                done: client.done,
                rested: client.rested,
                held: client.account.held,
                drained: client.drained,
                turns: client.account.turns,
                waits: matches!(client.phase, Phase::Waits { devices, .. } if devices & (1 << device) != 0),
                holds: matches!(client.phase, Phase::Holds(hold) if hold.devices & (1 << device) != 0),
            };
            let users = self.clients.iter().filter(|(_, client)| uses(client));
            let users: Vec<User> = users.map(user).collect();
            self.sharing[device].review(now, kind, &users);
        }
    }

    /// Grants turns, in order, to clients whose devices are all free. A waiting client reserves its devices if no
    /// client before it wants any of them, so that clients of one device do not forever overtake a client that wants
    /// several.
    fn grant(&mut self, waiting: &mut Vec<Waiting>, now: Nanoseconds) -> Vec<u64> {
        let holds = |client: &Client| matches!(client.phase, Phase::Holds(_));
        let held = self.clients.values().filter(|client| holds(client));
        let exclusive = self.exclusive();
        let held = held.fold(0, |all, client| all | client.devices());
        let mut taken = held & exclusive | self.devices_that(Sharing::is_closing);
        let mut seen = 0;
        let mut granted = Vec::new();
        waiting.retain(|waits| {
            let free = waits.devices & taken == 0;
            if free || waits.devices & seen == 0 {
                taken |= waits.devices & exclusive;
            }
            seen |= waits.devices & exclusive;
            if free {
                granted.push(waits.client);
            }
            !free
        });
        for number in &granted {
            let Some(client) = self.clients.get_mut(number) else {
                continue;
            };
            if let Phase::Waits { devices, since } = client.phase {
                client.account.turns += 1;
                client.account.waited += now.saturating_sub(since);
                client.phase = Phase::Holds(Hold {
                    devices,
                    since: now,
                    charged_to: now,
                    asked: Asked::Not,
                    asked_since: now,
                    not_draining: false,
                });
            }
        }
        granted
    }

    /// The holders, each with the least lead among the clients waiting for one of its devices, if any, and its own
    /// lead.
    fn holders(&self, waiting: &[Waiting], now: Nanoseconds) -> Vec<(u64, Option<u128>, u128)> {
        let exclusive = self.exclusive();
        let holders = self.clients.iter();
        let holders = holders.filter(|(_, client)| matches!(client.phase, Phase::Holds(_)));
        let with_waiter = |(number, client): (&u64, &Client)| {
            let first = waiting
                .iter()
                .find(|waits| waits.devices & client.devices() & exclusive != 0);
            (
                *number,
                first.map(|waits| waits.lead),
                self.lead(client, now),
            )
        };
        holders.map(with_waiter).collect()
    }

    /// When [`Turns::decide`] must be called next even without an event. Call this right after it.
    pub fn deadline(&self, now: Nanoseconds) -> Option<Nanoseconds> {
        let waiting = self.waiting(now);
        let trials = self.devices_that(Sharing::is_trial);
        let next = |(number, least, lead): (u64, Option<u128>, u128)| {
            let client = self.clients.get(&number)?;
            let Phase::Holds(hold) = client.phase else {
                return None;
            };
            match (hold.asked, least) {
                (Asked::Now, _) if hold.not_draining => None,
                (Asked::Now, _) => Some(hold.asked_since.saturating_add(DRAIN_PATIENCE)),
                (_, None) => None,
                (_, Some(least)) => {
                    let quantum = quantum_of(self.quantum, hold.devices & trials);
                    let over = hold.since.saturating_add(quantum);
                    let level = match client.time(least.saturating_sub(lead)) {
                        0 => now,
                        time => now.saturating_add(time.max(LEAST_SLEEP)),
                    };
                    Some(over.max(level))
                }
            }
        };
        let holders = self.holders(&waiting, now);
        let reviews = self.sharing.iter().filter_map(|s| s.deadline(now));
        holders.into_iter().filter_map(next).chain(reviews).min()
    }
}

/// How long a turn is held; short in a trial, so that every client gets a turn soon.
fn quantum_of(quantum: Nanoseconds, trials: DeviceSet) -> Nanoseconds {
    match trials {
        0 => quantum,
        _ => quantum.min(TRIAL_QUANTUM),
    }
}

/// A waiting client; sorted by the order of turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    lead: u128,
    since: Nanoseconds,
    client: u64,
    devices: DeviceSet,
}

#[cfg(test)]
mod tests;
