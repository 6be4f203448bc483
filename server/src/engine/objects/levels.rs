//! Levels: whose kernels a device starts first.
//!
//! A device serves kernels of equal priority in the order of their submission, so a short kernel would wait until all
//! blocks of all kernels before it have been started. With a higher priority it waits for the end of one block. So each
//! client has a level on each device, assigned every [`INTERVAL`] by its recent demand. The
//! level is set as the priority of the client's streams (`CU_STREAM_ATTRIBUTE_PRIORITY`), two priorities for each level:
//! one for streams with the client's lowest priority, one for its other streams.
//!
//! **Demand** is the part of the device that a client's kernels in flight can fill, measured every millisecond: the
//! blocks of its latest kernels, divided by the number of blocks that the device can hold. Kernels that wait count as
//! kernels that run. docs/design/0020-levels.md describes the errors of this estimate and their consequences.
//!
//! **Shares.** A client with a demand below its fair share is modest and has the first level. Fair shares are computed by
//! max-min fairness: the part that modest clients leave is divided among the others by their weights. These take turns:
//! one client has the middle level until it is ahead of the client with the least use, the others have the last level.
//! Kernels keep the priority with which they were submitted, so a client whose kernels take long never has the middle
//! level: when its turn comes, the others have the last level too, where its kernels were submitted before theirs.

pub mod reserve;
pub mod session;
mod waits;

pub use waits::{Total, Waited};

use self::reserve::{Decision, Member};
use crate::engine::gpu::reserve::Extent;
use crate::engine::objects::activity::LONGEST;
use crate::engine::objects::fairness::{GREATEST, LEAST};
use std::collections::HashMap;
use std::time::Duration;

/// Interval between two assignments of levels.
pub const INTERVAL: Duration = Duration::from_millis(2);
/// Time constant of the average of a client's demand, in seconds.
const MEMORY: f32 = 0.008;
/// A client becomes modest when its demand is less than this part of its fair share.
const MODEST: f32 = 0.7;
/// It stays modest up to this part.
const STILL_MODEST: f32 = 0.9;
/// Greatest demand of a modest client, however few others there are.
const MOST: f32 = 0.5;
/// Clients with a smaller demand count for no share and get no turn.
const NOTHING: f32 = 0.001;
/// A turn ends when the client is ahead by this much time of the whole device, in seconds.
const AHEAD: f32 = 0.004;
/// Most time by which a client may be ahead; its debt to the others is limited to this.
const MOST_AHEAD: f32 = 1.0;
/// A client without kernels in flight for longer than this is not active, in seconds.
const LATELY: f32 = 0.1;
/// Number of turns that a client gets although its kernels count as long: they may only have waited for others.
const TRIES: u32 = 3;
/// For how long the kernels of a client count as long after the latest long kernel, in seconds.
const STAYS_LONG: f32 = 0.5;

/// The priorities of a client's kernels on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Level {
    /// The priorities that the client chose.
    #[default]
    Own,
    /// Before all others.
    First,
    /// Between the first and the last.
    Middle,
    /// After the others.
    Last,
    /// The priorities that the client chose, above those of clients below normal priority.
    Raised,
    /// After the others, but above clients below normal priority.
    LastRaised,
    /// The lowest priority: the client has a priority below normal.
    Below,
}

impl Level {
    const ALL: [Level; 7] = [
        Level::Own,
        Level::First,
        Level::Middle,
        Level::Last,
        Level::Raised,
        Level::LastRaised,
        Level::Below,
    ];

    /// The level with this number; any number is accepted.
    #[inline]
    pub fn of(number: u8) -> Level {
        Level::ALL[usize::from(number) % Level::ALL.len()]
    }

    /// The driver's priority for the client's own priority of a stream.
    #[inline]
    pub fn priority(self, own: i32) -> i32 {
        let higher = i32::from(own < LEAST);
        match self {
            Level::Own => own,
            Level::First => -4 - higher,
            Level::Middle => -2 - higher,
            Level::Last => -higher,
            Level::Raised => (own - 1).clamp(GREATEST, LEAST),
            Level::LastRaised => -1,
            Level::Below => LEAST,
        }
    }

    /// Whether kernels of the first level go first.
    pub fn gives_way(self) -> bool {
        self.is_compared() || self == Level::Below
    }

    /// Whether the client takes turns with others.
    pub fn is_compared(self) -> bool {
        matches!(self, Level::Middle | Level::Last | Level::LastRaised)
    }

    /// Its number for users, 1 is served first; 0 if the client's kernels are served in the order of their submission.
    pub fn rank(self) -> u32 {
        match self {
            Level::Own | Level::Raised => 0,
            Level::First => 1,
            Level::Middle => 2,
            Level::Last | Level::LastRaised => 3,
            Level::Below => 4,
        }
    }
}

/// A client on a device, when levels are assigned.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// Number of its session.
    pub session: u64,
    /// Its weight.
    pub weight: u32,
    /// Whether it has normal priority.
    pub normal: bool,
    /// Time of the whole device that its kernels in flight could have filled since the last assignment.
    pub wanted: Duration,
    /// Time for which it had kernels in flight since then.
    pub in_flight: Duration,
    /// Number of its operations that have ended since then.
    pub ended: u32,
    /// Whether a kernel that is known to take long is in flight.
    pub long: bool,
}

/// State of a client on a device.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// Its demand, on average over [`MEMORY`].
    wants: f32,
    /// Part of the device that it has had, on average over a second.
    had: f32,
    /// By how much it is ahead of the client with the least use, in seconds of the whole device divided by its
    /// weight in relation to the average.
    ahead: f32,
    /// For how long its kernels will still count as long, in seconds.
    long: f32,
    /// Time since it last had kernels in flight, in seconds.
    idle: f32,
    /// Number of turns that it has had although its kernels count as long.
    tried: u32,
    level: Level,
}

impl Use {
    /// Whether it takes turns with the other clients whose demand exceeds their share.
    fn is_ranked(&self) -> bool {
        matches!(self.level, Level::Middle | Level::Last) && self.wants > NOTHING
    }
}

/// The level that a client has been given.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// Its level.
    pub level: Level,
    /// Part of the device that it has had, on average over the last second.
    pub had: f32,
    /// For how long it has waited since the last assignment.
    pub waited: Waited,
}

/// The clients of a device.
#[derive(Debug, Default)]
pub struct Levels {
    clients: HashMap<u64, Use>,
    reserve: Decision,
}

impl Levels {
    /// Assigns levels after the time `time` since the last assignment, in the order of `claims`. Clients that are not named
    /// are forgotten. `classes`: there are clients below normal priority.
    pub fn assign(&mut self, time: Duration, claims: &[Claim], classes: bool) -> Vec<Given> {
        let over = time.as_secs_f32().max(1e-6);
        let mut all: Vec<(Claim, Use)> = claims
            .iter()
            .map(|claim| (*claim, self.known(claim)))
            .collect();
        let fresh = 1.0 - (-over / MEMORY).exp();
        // The time between two samples counts up to this.
        let counted = over.min(LONGEST.as_secs_f32());
        for (claim, one) in &mut all {
            let wanted = (claim.wanted.as_secs_f32() / counted).min(1.0);
            one.wants += fresh * (wanted - one.wants);
            one.idle = if wanted > 0.0 { 0.0 } else { one.idle + over };
            one.long = if claim.long {
                STAYS_LONG
            } else {
                (one.long - over).max(0.0)
            };
        }
        rank(&mut all);
        let got = serve(&all);
        let waits = waits::waits(&all, &got, time);
        let lasting = 1.0 - (-over).exp();
        let average = average_weight(&all);
        for ((claim, one), got) in all.iter_mut().zip(got) {
            one.had += lasting * (got - one.had);
            match one.is_ranked() {
                true => one.ahead += got * over * average / claim.weight.max(1) as f32,
                false => one.ahead = 0.0,
            }
        }
        catch_up(&mut all);
        self.clients = all
            .iter()
            .map(|(claim, one)| (claim.session, *one))
            .collect();
        let given = all.iter().zip(waits).map(|((claim, one), waited)| Given {
            level: in_class(one.level, claim.normal, classes),
            had: one.had,
            waited,
        });
        given.collect()
    }

    /// The part of the device that is to be kept free for clients of the first level, after the latest assignment for the
    /// same `claims`. `ready`: whether it can be.
    pub fn keeps_reserve(
        &mut self,
        time: Duration,
        claims: &[Claim],
        ready: impl FnOnce() -> bool,
    ) -> Option<Extent> {
        let member = |claim: &Claim| Member::of(claim, &self.known(claim));
        let members: Vec<Member> = claims.iter().map(member).collect();
        self.reserve.note(time.as_secs_f32(), &members, ready)
    }

    /// The reserve that proved useful, or none, if that has changed since the previous call.
    pub fn take_change_of_reserve(&mut self) -> Option<Option<Extent>> {
        self.reserve.take_change()
    }

    /// Whether a client has had kernels in flight lately.
    pub fn is_active(&self, session: u64) -> bool {
        self.clients
            .get(&session)
            .is_some_and(|one| one.idle < LATELY)
    }

    /// State of a client; a new one is modest.
    fn known(&self, claim: &Claim) -> Use {
        let new = Use {
            level: Level::First,
            ..Use::default()
        };
        self.clients.get(&claim.session).copied().unwrap_or(new)
    }
}

/// The level of a client where there are clients below normal priority.
fn in_class(level: Level, normal: bool, classes: bool) -> Level {
    match level {
        _ if !normal => Level::Below,
        Level::Last if classes => Level::LastRaised,
        level => level,
    }
}

fn average_weight(all: &[(Claim, Use)]) -> f32 {
    let working = all.iter().filter(|(_, one)| one.wants > NOTHING);
    let (sum, count) = working.fold((0.0, 0u32), |(sum, count), (claim, _)| {
        (sum + claim.weight.max(1) as f32, count + 1)
    });
    if count == 0 { 1.0 } else { sum / count as f32 }
}

/// Fair share for each unit of weight, by max-min fairness: the lesser of share and demand, summed over all clients, is
/// the whole device. Infinite if the demands of all can be met.
fn fair_part(all: &[(Claim, Use)]) -> f32 {
    let mut rising: Vec<(f32, f32)> = all
        .iter()
        .filter(|(_, one)| one.wants > NOTHING)
        .map(|(claim, one)| (one.wants, claim.weight.max(1) as f32))
        .collect();
    rising.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
    let mut weights: f32 = rising.iter().map(|(_, weight)| weight).sum();
    let mut left = 1.0;
    for (wants, weight) in rising {
        if wants * weights > left * weight {
            return left / weights;
        }
        left -= wants;
        weights -= weight;
    }
    f32::INFINITY
}

/// Gives each client its level.
fn rank(all: &mut [(Claim, Use)]) {
    let part = fair_part(all);
    for (claim, one) in all.iter_mut() {
        let share = (part * claim.weight.max(1) as f32).min(MOST);
        let below = match one.level {
            Level::First => STILL_MODEST,
            _ => MODEST,
        };
        let modest = one.wants < below * share || one.wants <= NOTHING;
        one.level = match (modest, one.level) {
            (true, _) => Level::First,
            (false, Level::First) => Level::Last,
            (false, level) => level,
        };
    }
    give_turn(all);
}

/// Gives the turn to one of the clients whose demand exceeds their share.
fn give_turn(all: &mut [(Claim, Use)]) {
    let may = |one: &Use| one.is_ranked() && (one.long <= 0.0 || one.tried < TRIES);
    let least = all.iter().filter(|(_, one)| one.is_ranked());
    let least = least
        .map(|(_, one)| one.ahead)
        .fold(f32::INFINITY, f32::min);
    let has = |(_, one): &(Claim, Use)| one.level == Level::Middle;
    let goes_on = |(_, one): &(Claim, Use)| may(one) && one.ahead <= AHEAD;
    let now = all.iter().position(|one| has(one) && goes_on(one));
    // If a client with long kernels has had the least, no client has the middle level.
    let next = all
        .iter()
        .position(|(_, one)| may(one) && one.ahead <= least);
    if now.is_none()
        && let Some(at) = all.iter().position(has)
    {
        let one = &mut all[at].1;
        one.tried = if one.long > 0.0 { one.tried + 1 } else { 0 };
    }
    let turn = now.or(next);
    for (at, (_, one)) in all.iter_mut().enumerate() {
        if one.is_ranked() {
            one.level = if turn == Some(at) {
                Level::Middle
            } else {
                Level::Last
            };
        }
    }
}

/// Estimates the use of each client: the levels are served one after the other, the clients of one level in proportion to
/// their demands. A client without long kernels, none of whose kernels has ended, is waiting for blocks of others.
fn serve(all: &[(Claim, Use)]) -> Vec<f32> {
    let mut got = vec![0.0; all.len()];
    share_out(all, 1.0, &mut got, moves);
    got
}

/// Whether kernels of a client have ended, or may take longer than the interval.
fn moves((claim, one): &(Claim, Use)) -> bool {
    claim.ended > 0 || one.long > 0.0
}

/// Divides a part of the device among some of the clients.
fn share_out(
    all: &[(Claim, Use)],
    mut left: f32,
    got: &mut [f32],
    takes: impl Fn(&(Claim, Use)) -> bool,
) {
    let level = |(claim, one): &(Claim, Use)| match claim.normal {
        true => one.level,
        false => Level::Below,
    };
    for served in [Level::First, Level::Middle, Level::Last, Level::Below] {
        let clients = || {
            let all = all.iter().enumerate();
            all.filter(|(_, client)| level(client) == served && takes(client))
        };
        let wanted: f32 = clients().map(|(_, (_, one))| one.wants).sum();
        let part = if wanted > left { left / wanted } else { 1.0 };
        for (at, (_, one)) in clients() {
            got[at] = one.wants * part;
        }
        left = (left - wanted).max(0.0);
    }
}

/// Counts from the client with the least use.
fn catch_up(all: &mut [(Claim, Use)]) {
    let ranked = |(_, one): &&(Claim, Use)| one.is_ranked();
    let least = all.iter().filter(ranked).map(|(_, one)| one.ahead);
    let least = least.fold(f32::INFINITY, f32::min);
    for (_, one) in all.iter_mut().filter(|(_, one)| one.is_ranked()) {
        one.ahead = (one.ahead - least).min(MOST_AHEAD);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpsshim_model::limits::DeviceWaits;

    /// The kernels of a client of [`Device`].
    #[derive(Clone, Copy)]
    struct Work {
        /// Time of a block, in units of 0.1 ms; a wave of them fills the device.
        block: u32,
        /// Waves of a kernel.
        waves: u32,
        /// Kernels that it keeps submitted.
        depth: usize,
        weight: u32,
        normal: bool,
        /// Pause before each kernel, in units of 0.1 ms.
        pause: u32,
        /// Part of the device that a wave can fill.
        fill: f32,
    }

    const FLOOD: Work = Work {
        block: 10,
        waves: 40,
        depth: 1,
        weight: 100,
        normal: true,
        pause: 0,
        fill: 1.0,
    };
    const SHORT: Work = Work {
        block: 1,
        waves: 1,
        depth: 64,
        ..FLOOD
    };

    /// A kernel that was submitted.
    struct Kernel {
        client: usize,
        priority: i32,
        waves: u32,
    }

    /// A device that runs one wave of blocks at a time, of the earliest kernel of the highest priority.
    struct Device {
        levels: Levels,
        clients: Vec<Work>,
        given: Vec<Level>,
        queue: Vec<Kernel>,
        /// The client whose wave runs, and for how long it still does.
        runs: Option<(usize, u32)>,
        ran: Vec<u32>,
        moved: Vec<bool>,
        /// For how long each client has had nothing in flight, and for how long it had since the last assignment.
        idle: Vec<u32>,
        in_flight: Vec<u32>,
        waited: Vec<Total>,
    }

    impl Device {
        fn new(clients: &[Work]) -> Device {
            Device {
                levels: Levels::default(),
                clients: clients.to_vec(),
                given: vec![Level::First; clients.len()],
                queue: Vec::new(),
                runs: None,
                ran: vec![0; clients.len()],
                moved: vec![false; clients.len()],
                idle: vec![0; clients.len()],
                in_flight: vec![0; clients.len()],
                waited: clients.iter().map(|_| Total::default()).collect(),
            }
        }

        /// Each client submits kernels up to its depth, then 0.1 ms pass.
        fn step(&mut self) {
            for (client, work) in self.clients.iter().enumerate() {
                let queued = self.queue.iter().filter(|one| one.client == client).count();
                self.idle[client] = if queued > 0 { 0 } else { self.idle[client] + 1 };
                if queued == 0 && self.idle[client] <= work.pause {
                    continue;
                }
                self.in_flight[client] += u32::from(work.depth > 0);
                for _ in queued..work.depth {
                    self.queue.push(Kernel {
                        client,
                        priority: self.given[client].priority(0),
                        waves: work.waves,
                    });
                }
            }
            let first = self.queue.iter().map(|one| one.priority).min();
            if self.runs.is_none()
                && let Some(at) = self
                    .queue
                    .iter()
                    .position(|one| Some(one.priority) == first)
            {
                let kernel = &mut self.queue[at];
                self.runs = Some((kernel.client, self.clients[kernel.client].block));
                kernel.waves -= 1;
                if kernel.waves == 0 {
                    self.moved[kernel.client] = true;
                    self.queue.remove(at);
                }
            }
            if let Some((client, left)) = &mut self.runs {
                self.ran[*client] += 1;
                *left -= 1;
                if *left == 0 {
                    self.runs = None;
                }
            }
        }

        /// Lets this many assignments of levels pass. Returns the part of the device that each client had.
        fn run(&mut self, assignments: u32) -> Vec<f32> {
            self.ran.fill(0);
            for _ in 0..assignments {
                for _ in 0..20 {
                    self.step();
                }
                let claims: Vec<Claim> = self.claims();
                let given = self.levels.assign(INTERVAL, &claims, false);
                self.given = given.iter().map(|given| given.level).collect();
                for (total, given) in self.waited.iter_mut().zip(&given) {
                    total.add(&given.waited, |client| client as i32);
                }
                self.moved.fill(false);
                self.in_flight.fill(0);
            }
            let all = (assignments * 20) as f32;
            self.ran.iter().map(|ran| *ran as f32 / all).collect()
        }

        fn claims(&self) -> Vec<Claim> {
            let claim = |(client, work): (usize, &Work)| Claim {
                session: client as u64,
                weight: work.weight,
                normal: work.normal,
                wanted: (INTERVAL * self.in_flight[client] / 20).mul_f32(work.fill),
                in_flight: INTERVAL * self.in_flight[client] / 20,
                ended: self.moved[client].into(),
                long: work.block * work.waves > 50,
            };
            self.clients.iter().enumerate().map(claim).collect()
        }
    }

    /// A claim of a client whose kernels can fill this part of the device.
    fn claim(session: u64, part: f32) -> Claim {
        Claim {
            session,
            weight: 100,
            normal: true,
            wanted: INTERVAL.mul_f32(part),
            in_flight: INTERVAL,
            ended: 1,
            long: false,
        }
    }

    /// The levels after this many assignments with the same claims.
    fn after(levels: &mut Levels, assignments: u32, claims: &[Claim]) -> Vec<Level> {
        let mut given = Vec::new();
        for _ in 0..assignments {
            given = levels.assign(INTERVAL, claims, false);
        }
        given.iter().map(|given| given.level).collect()
    }

    #[test]
    fn levels_have_priorities_of_their_own_in_order() {
        let of = |level: Level| (GREATEST..=LEAST).map(move |own| level.priority(own));
        assert!(of(Level::Own).eq(GREATEST..=LEAST));
        let ordered = [Level::First, Level::Middle, Level::Last];
        for pair in ordered.windows(2) {
            assert!(of(pair[0]).max() < of(pair[1]).min(), "{pair:?}");
        }
        for level in ordered {
            assert!(level.priority(-1) < level.priority(0), "{level:?}");
            assert!(of(level).all(|one| (GREATEST..=LEAST).contains(&one)));
        }
        let raised: Vec<i32> = of(Level::Raised).collect();
        assert_eq!(raised, [-5, -5, -4, -3, -2, -1]);
        assert!(of(Level::LastRaised).max() < of(Level::Below).min());
        assert!(of(Level::Below).all(|one| one == LEAST));
        for level in Level::ALL {
            assert_eq!(Level::of(level as u8), level);
        }
    }

    #[test]
    fn who_wants_little_is_first_and_who_floods_is_not() {
        let mut levels = Levels::default();
        let claims = [claim(1, 0.12), claim(2, 1.0), claim(3, 1.0), claim(4, 1.0)];
        let given = after(&mut levels, 50, &claims);
        assert_eq!(given[0], Level::First);
        assert!(
            given[1..].iter().all(|level| *level != Level::First),
            "{given:?}"
        );
    }

    #[test]
    fn who_floods_stays_so_where_no_levels_were_assigned_for_long() {
        let mut levels = Levels::default();
        let flood = [claim(1, 1.0), claim(2, 1.0)];
        after(&mut levels, 50, &flood);
        for time in [LONGEST, 2 * LONGEST, 10 * LONGEST] {
            let late = flood.map(|one| Claim {
                wanted: LONGEST,
                in_flight: LONGEST,
                ..one
            });
            let given = levels.assign(time, &late, false);
            assert!(given.iter().all(|one| one.level != Level::First));
            let waited: Duration = given.iter().map(|one| one.waited.time).sum();
            let error = waited.abs_diff(LONGEST);
            assert!(error < LONGEST / 100, "{time:?}: {waited:?}");
        }
    }

    #[test]
    fn who_becomes_modest_is_first_within_20_ms() {
        let mut levels = Levels::default();
        let flood = [claim(1, 1.0), claim(2, 1.0), claim(3, 1.0), claim(4, 1.0)];
        assert_ne!(after(&mut levels, 500, &flood)[0], Level::First);
        let modest = [claim(1, 0.1), claim(2, 1.0), claim(3, 1.0), claim(4, 1.0)];
        assert_eq!(after(&mut levels, 10, &modest)[0], Level::First);
    }

    #[test]
    fn a_client_that_comes_is_first_and_one_that_goes_is_forgotten() {
        let mut levels = Levels::default();
        after(&mut levels, 500, &[claim(1, 1.0)]);
        let given = levels.assign(INTERVAL, &[claim(1, 1.0), claim(2, 0.0)], false);
        assert_eq!(
            (given[0].level, given[1].level),
            (Level::Middle, Level::First)
        );
        after(&mut levels, 1, &[claim(2, 0.0)]);
        let given = levels.assign(INTERVAL, &[claim(1, 0.0)], false);
        assert_eq!(given[0].level, Level::First);
    }

    #[test]
    fn clients_below_normal_priority_are_last_of_all() {
        let mut levels = Levels::default();
        let below = Claim {
            normal: false,
            ..claim(1, 0.01)
        };
        let claims = [below, claim(2, 1.0), claim(3, 1.0)];
        for _ in 0..50 {
            let given = levels.assign(INTERVAL, &claims, true);
            assert_eq!(given[0].level, Level::Below);
            assert!(given[1..].iter().all(|one| one.level != Level::Last));
        }
    }

    #[test]
    fn short_kernels_and_long_ones_share_the_device() {
        for block in [10, 100] {
            let long = Work { block, ..FLOOD };
            let mut device = Device::new(&[SHORT, long]);
            device.run(1000);
            let parts = device.run(2000);
            assert!((0.4..0.6).contains(&parts[0]), "{block}: {parts:?}");
            assert!((0.4..0.6).contains(&parts[1]), "{block}: {parts:?}");
        }
    }

    #[test]
    fn equal_clients_have_equal_parts() {
        for work in [SHORT, FLOOD] {
            let mut device = Device::new(&[work; 4]);
            device.run(500);
            let parts = device.run(2000);
            assert!(parts.iter().all(|part| *part > 0.2), "{parts:?}");
        }
    }

    #[test]
    fn shares_go_by_weight() {
        let heavy = Work {
            weight: 300,
            ..SHORT
        };
        let mut device = Device::new(&[SHORT, heavy]);
        device.run(500);
        let parts = device.run(2000);
        assert!((0.2..0.3).contains(&parts[0]), "{parts:?}");
    }

    #[test]
    fn two_hundred_clients_all_work() {
        let work = Work { depth: 4, ..SHORT };
        let mut device = Device::new(&[work; 200]);
        device.run(500);
        let parts = device.run(2000);
        // Some had a turn more than others.
        assert!(parts.iter().all(|part| *part > 0.5 / 200.0), "{parts:?}");
    }

    /// Parts of the time that each client waited during the second half of a run: in all, and for each of the clients.
    fn waited(clients: &[Work]) -> Vec<(f64, Vec<f64>)> {
        let mut device = Device::new(clients);
        device.run(1000);
        let before: Vec<_> = device.waited.iter().map(Total::usage).collect();
        device.run(2000);
        let all = (INTERVAL * 2000).as_nanos() as f64;
        let waited = device.waited.iter().zip(before).map(|(total, before)| {
            let now = total.usage();
            let of = |waits: &DeviceWaits, client: i32| {
                let found = waits.awaited.iter().find(|(pid, _)| *pid == client);
                found.map_or(0, |(_, time)| *time)
            };
            let of = |client| (of(&now, client) - of(&before, client)) as f64 / all;
            let parts = (0..clients.len() as i32).map(of).collect();
            ((now.waited_ns - before.waited_ns) as f64 / all, parts)
        });
        waited.collect()
    }

    #[test]
    fn equal_floods_wait_for_each_other_half_of_the_time() {
        let of_3_ms = Work { waves: 3, ..FLOOD };
        for work in [SHORT, FLOOD, of_3_ms] {
            for (client, (time, awaited)) in waited(&[work; 2]).into_iter().enumerate() {
                assert!((0.4..0.6).contains(&time), "{time}");
                let other = awaited[1 - client];
                assert!((other - time).abs() < 1e-3 && awaited[client] == 0.0);
            }
        }
        for (client, (time, awaited)) in waited(&[SHORT; 4]).into_iter().enumerate() {
            assert!((0.65..0.85).contains(&time), "{time}");
            let others = (0..4).filter(|other| *other != client);
            for other in others {
                assert!((0.15..0.35).contains(&awaited[other]), "{awaited:?}");
            }
        }
    }

    #[test]
    fn a_modest_client_waits_little_and_a_flood_waits_for_its_part() {
        let modest = Work {
            depth: 1,
            pause: 15,
            fill: 0.2,
            ..SHORT
        };
        let flood = Work { block: 5, ..FLOOD };
        let found = waited(&[modest, flood]);
        assert!(found[0].0 < 0.1, "{found:?}");
        assert!(found[1].0 < 0.3, "{found:?}");
    }

    #[test]
    fn a_client_that_is_alone_does_not_wait() {
        for (block, waves) in [(1, 1), (10, 3), (10, 40), (100, 4)] {
            let work = Work {
                block,
                waves,
                ..FLOOD
            };
            assert_eq!(waited(&[work])[0].0, 0.0, "{block} {waves}");
        }
    }

    #[test]
    fn what_modest_clients_leave_is_divided_by_weight() {
        let one = |part: f32, weight: u32| {
            let claim = Claim {
                weight,
                ..claim(0, part)
            };
            let one = Use {
                wants: part,
                ..Use::default()
            };
            (claim, one)
        };
        let part = fair_part(&[one(0.1, 1), one(1.0, 1), one(1.0, 2)]);
        assert!((part - 0.3).abs() < 1e-6, "{part}");
        assert_eq!(fair_part(&[one(0.1, 1), one(0.5, 1)]), f32::INFINITY);
    }
}
