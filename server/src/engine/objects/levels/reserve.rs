//! When a part of a device is kept free for short kernels.
//!
//! A client of the first level waits for the end of a block with each of its kernels. If these are much shorter than the
//! blocks, it gains by a part of the device without such blocks ([`crate::engine::gpu::reserve`]), which costs the other
//! clients that part. How long the kernels of a client would take otherwise is not known, so the reserve is tried: it
//! stays if a client's operations then end [`GAIN`] times as fast: first a small one, then a large one. It ends if the
//! others keep too little.

use super::{Claim, Level, Use};
use crate::engine::gpu::reserve::Extent;
use std::collections::HashMap;

/// The reserve stays if a client's operations end faster with it by this factor.
const GAIN: f32 = 1.6;
/// It ends if the factor falls below this one.
const STILL_GAIN: f32 = 1.3;
/// A factor that is believed sooner.
const GREAT_GAIN: f32 = 6.0;
/// Time with operations in flight that a client's rate is averaged over, and after which it is known, in seconds: longer
/// than a training step, whose kernels hold others up for times that differ.
const MEMORY: f32 = 0.4;
const ENOUGH: f32 = 0.2;
/// After this time a great gain is known, in seconds.
const SOON: f32 = 0.004;
/// Kernels of others submitted before the reserve became active still run for a while: a trial takes at least so long
/// before it can fail, and at most so long, in seconds.
const TRIAL: (f32, f32) = (0.2, 2.0);
/// Time until the reserve is tried again, which doubles with each failure, in seconds.
const AGAIN: (f32, f32) = (4.0, 60.0);
/// Time after which the rate without the reserve is measured again, which doubles each time that the reserve proves
/// useful, in seconds.
const CHECKED: (f32, f32) = (10.0, 80.0);
/// The same after a gain that is not great, in seconds.
const CONFIRMED: f32 = 0.4;
/// The reserve ends when no client has gained by it for this time, in seconds.
const LATELY: f32 = 0.5;
/// Clients that want more than this part of the device make others wait for room.
const FILLS: f32 = 0.5;
/// It ends if the others keep less than this part of their rate.
const KEEPS: f32 = 0.7;
/// Time that the rate of the others is averaged over, and after which it is known, in seconds.
const LONG_MEMORY: f32 = 0.5;
const LONG: f32 = 0.2;
/// Their rate is not known from fewer operations.
const MANY: f32 = 20.0;

/// Operations that have ended while some were in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    ended: f32,
    /// Seconds.
    time: f32,
}

impl Rate {
    fn add(&mut self, ended: u32, time: f32, memory: f32) {
        let stays = (-time / memory).exp();
        self.ended = self.ended * stays + ended as f32;
        self.time = self.time * stays + time;
    }

    /// Operations for each second; `None` until they have been counted for `enough` seconds.
    fn get(&self, enough: f32) -> Option<f32> {
        (self.time >= enough).then(|| self.ended / self.time)
    }
}

/// Rates without the reserve and with it.
#[derive(Clone, Copy, Debug, Default)]
struct Rates {
    without: Rate,
    with: Rate,
}

impl Rates {
    fn gains(&self, times: f32) -> bool {
        let Some(without) = self.without.get(ENOUGH) else {
            return false;
        };
        let with = |enough| self.with.get(enough).filter(|with| *with > 0.0);
        let is = |with: Option<f32>, times| with.is_some_and(|with| with >= times * without);
        is(with(ENOUGH), times) || is(with(SOON), GREAT_GAIN)
    }

    /// Whether the others lose more than they may, as far as that is known.
    fn loses(&self) -> bool {
        let many = |rate: &Rate| rate.ended >= MANY;
        match (self.without.get(LONG), self.with.get(LONG)) {
            (Some(without), Some(with)) if many(&self.without) && many(&self.with) => {
                with < KEEPS * without
            }
            _ => false,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// Not active.
    #[default]
    Off,
    /// Active for `time` seconds, to find out whether it is useful.
    Tried { extent: Extent, time: f32 },
    /// Active for `since` seconds, last useful `useful` seconds ago.
    On {
        extent: Extent,
        since: f32,
        useful: f32,
    },
    /// Not active for `time` seconds, to find out whether it still is useful.
    Checked { extent: Extent, time: f32 },
}

impl State {
    /// Active from now on.
    fn on(extent: Extent) -> State {
        State::On {
            extent,
            since: 0.0,
            useful: 0.0,
        }
    }
}

/// Whether a device keeps a part free, and why.
#[derive(Debug, Default)]
pub struct Decision {
    state: State,
    /// Seconds until it may be tried again, and until then the next time.
    wait: (f32, f32),
    /// Seconds until the next check.
    check: f32,
    /// Rates of the clients of the first level.
    clients: HashMap<u64, Rates>,
    /// Rates of all clients that fill the device, together.
    others: Rates,
    /// The reserve that [`Decision::take_change`] has returned.
    reported: Option<Extent>,
}

/// A client of the device's main context, at an assignment of levels.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Number of its session.
    pub session: u64,
    /// Whether its kernels are short and few: the reserve is for it.
    pub modest: bool,
    /// Whether its kernels fill the device and can be confined.
    pub fills: bool,
    /// Its operations that have ended since the latest assignment.
    pub ended: u32,
    /// Seconds for which it had some in flight since then.
    pub in_flight: f32,
}

impl Member {
    /// A client by its claim, level and average demand.
    pub(super) fn of(claim: &Claim, one: &Use) -> Member {
        Member {
            session: claim.session,
            modest: claim.normal && one.level == Level::First,
            fills: (one.is_ranked() || !claim.normal) && one.wants > FILLS,
            ended: claim.ended,
            in_flight: claim.in_flight.as_secs_f32(),
        }
    }
}

impl Decision {
    /// Takes note of the progress of all clients in the last `over` seconds. Returns the reserve that is to be active.
    /// `ready`: whether one can be.
    pub fn note(
        &mut self,
        over: f32,
        members: &[Member],
        ready: impl FnOnce() -> bool,
    ) -> Option<Extent> {
        self.count(over, members);
        let works = members.iter().any(|one| one.modest && one.in_flight > 0.0);
        let needed = works && members.iter().any(|one| one.fills);
        self.wait.0 = (self.wait.0 - over).max(0.0);
        self.state = match self.state {
            State::Off if needed && self.wait.0 <= 0.0 && self.is_known() && ready() => {
                self.try_out(Extent::Small)
            }
            State::Off => State::Off,
            State::Tried { extent, time } => self.judge(extent, time + over),
            State::On {
                extent,
                since,
                useful,
            } => {
                let useful = match needed && self.gain(STILL_GAIN) {
                    true => 0.0,
                    false => useful + over,
                };
                self.go_on(extent, since + over, useful, needed)
            }
            State::Checked { extent, time } => self.check(extent, time + over),
        };
        self.active()
    }

    /// The reserve that proved useful, or none, if that has changed since the previous call.
    pub fn take_change(&mut self) -> Option<Option<Extent>> {
        let now = match self.state {
            State::On { extent, .. } | State::Checked { extent, .. } => Some(extent),
            State::Off | State::Tried { .. } => None,
        };
        (std::mem::replace(&mut self.reported, now) != now).then_some(now)
    }

    fn count(&mut self, over: f32, members: &[Member]) {
        let with = self.active().is_some();
        let side = |rates: &mut Rates, ended, time, memory| match with {
            true => rates.with.add(ended, time, memory),
            false => rates.without.add(ended, time, memory),
        };
        self.clients
            .retain(|id, _| members.iter().any(|one| one.session == *id));
        for one in members.iter().filter(|one| one.modest) {
            let rates = self.clients.entry(one.session).or_default();
            side(rates, one.ended, one.in_flight, MEMORY);
        }
        let fill = || members.iter().filter(|one| one.fills);
        if fill().next().is_some() {
            let ended = fill().map(|one| one.ended).sum();
            side(&mut self.others, ended, over, LONG_MEMORY);
        } else if matches!(self.state, State::Off) {
            // Rates beside long work count.
            self.forget(false);
            self.others = Rates::default();
        }
    }

    fn active(&self) -> Option<Extent> {
        match self.state {
            State::Tried { extent, .. } | State::On { extent, .. } => Some(extent),
            State::Off | State::Checked { .. } => None,
        }
    }

    /// Whether the operations of any client end faster by this factor.
    fn gain(&self, times: f32) -> bool {
        self.clients.values().any(|one| one.gains(times))
    }

    /// Whether the rate of any client without the reserve is known.
    fn is_known(&self) -> bool {
        let mut all = self.clients.values();
        all.any(|one| one.without.get(ENOUGH).is_some())
    }

    fn forget(&mut self, with: bool) {
        for one in self.clients.values_mut() {
            match with {
                true => one.with = Rate::default(),
                false => one.without = Rate::default(),
            }
        }
    }

    fn try_out(&mut self, extent: Extent) -> State {
        self.forget(true);
        self.others.with = Rate::default();
        State::Tried { extent, time: 0.0 }
    }

    /// Decides whether it stays active after a trial of `time` seconds.
    fn judge(&mut self, extent: Extent, time: f32) -> State {
        if self.gain(GAIN) {
            self.check = match self.gain(GREAT_GAIN) {
                true => CHECKED.0,
                false => CONFIRMED,
            };
            return State::on(extent);
        }
        let mut all = self.clients.values();
        let measured = all.any(|one| one.with.get(ENOUGH).is_some());
        let (least, most) = TRIAL;
        match (time > most || time > least && measured, extent) {
            (false, _) => State::Tried { extent, time },
            (true, extent) => self.try_more(extent),
        }
    }

    /// Decides whether it stays active after `since` seconds, last useful `useful` seconds ago.
    fn go_on(&mut self, extent: Extent, since: f32, useful: f32, needed: bool) -> State {
        if self.others.loses() || useful > LATELY && needed {
            return self.fail();
        }
        if useful > LATELY {
            self.wait.1 = AGAIN.0;
            return State::Off;
        }
        if since > self.check {
            self.forget(false);
            return State::Checked { extent, time: 0.0 };
        }
        State::On {
            extent,
            since,
            useful,
        }
    }

    /// After a reserve of this extent proved useless.
    fn try_more(&mut self, extent: Extent) -> State {
        match extent {
            Extent::Large => self.fail(),
            Extent::Small if self.others.without.get(LONG).is_some() => self.try_out(Extent::Large),
            Extent::Small => {
                // To find out how much the others lose.
                self.wait.0 = LONG;
                State::Off
            }
        }
    }

    fn fail(&mut self) -> State {
        let wait = self.wait.1.max(AGAIN.0);
        self.wait = (wait, (2.0 * wait).min(AGAIN.1));
        self.check = CHECKED.0;
        State::Off
    }

    /// Decides whether it becomes active again after `time` seconds without it.
    fn check(&mut self, extent: Extent, time: f32) -> State {
        if self.gain(GAIN) {
            self.check = (2.0 * self.check).clamp(CHECKED.0, CHECKED.1);
            return State::on(extent);
        }
        match time > TRIAL.1 || time > TRIAL.0 && self.is_known() {
            true => self.try_more(extent),
            false => State::Checked { extent, time },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: f32 = 0.002;

    /// A client with requests whose operations end at one of two rates, and a client that fills the device.
    struct Pair {
        decision: Decision,
        /// Operations for each second without the reserve and with it.
        rates: (f32, f32),
        /// The smallest reserve that takes effect, and its delay in seconds.
        takes: (Extent, f32),
        /// Operations of a request, and seconds from one to the next.
        requests: (f32, f32),
        /// Operations of the other client in each step, without the reserve and with it.
        long: (u32, u32),
        extent: Option<Extent>,
        active_for: f32,
        /// Seconds until the next request.
        next: f32,
        /// Operations in flight, and the ended part of the first.
        left: f32,
        part: f32,
    }

    impl Pair {
        fn new(without: f32, with: f32) -> Pair {
            Pair {
                decision: Decision::default(),
                rates: (without, with),
                takes: (Extent::Small, 0.05),
                requests: (1e9, 0.0),
                long: (1, 1),
                extent: None,
                active_for: 0.0,
                next: 0.0,
                left: 0.0,
                part: 0.0,
            }
        }

        /// Returns the number of the short client's operations that end in a step.
        fn short(&mut self) -> (u32, f32) {
            if self.left <= 0.0 && self.next <= 0.0 {
                (self.left, self.next) = self.requests;
            }
            self.next -= STEP;
            if self.left <= 0.0 {
                return (0, 0.0);
            }
            let takes = self
                .extent
                .is_some_and(|it| it.index() >= self.takes.0.index());
            let rate = match takes && self.active_for > self.takes.1 {
                true => self.rates.1,
                false => self.rates.0,
            };
            let ended = (rate * STEP).min(self.left);
            self.left -= ended;
            self.part += ended;
            let whole = self.part as u32;
            self.part -= whole as f32;
            (whole, ended / rate)
        }

        /// Returns the part of the time for which the reserve was active.
        fn run(&mut self, seconds: f32, full: bool) -> f32 {
            let steps = (seconds / STEP) as u32;
            let mut active = 0;
            for _ in 0..steps {
                let (ended, in_flight) = self.short();
                let short = Member {
                    session: 1,
                    modest: true,
                    fills: false,
                    ended,
                    in_flight,
                };
                let long = Member {
                    session: 2,
                    modest: false,
                    fills: full,
                    ended: match self.extent {
                        Some(_) => self.long.1,
                        None => self.long.0,
                    },
                    in_flight: STEP,
                };
                let is = self.decision.note(STEP, &[short, long], || true);
                active += u32::from(is.is_some());
                self.active_for = match is {
                    Some(_) if is == self.extent => self.active_for + STEP,
                    _ => 0.0,
                };
                self.extent = is;
            }
            active as f32 / steps as f32
        }
    }

    #[test]
    fn it_stays_where_operations_end_much_faster() {
        for (operations, period) in [(1e9, 0.0), (150.0, 0.005), (150.0, 0.2), (10.0, 0.05)] {
            let mut pair = Pair::new(1000.0, 60_000.0);
            pair.requests = (operations, period);
            pair.run(5.0, true);
            let part = pair.run(60.0, true);
            assert!(part > 0.95, "{operations} {period}: {part}");
        }
    }

    #[test]
    fn a_gain_that_is_not_great_counts_once_it_is_confirmed() {
        let mut pair = Pair::new(20_000.0, 40_000.0);
        pair.takes.0 = Extent::Large;
        pair.run(5.0, true);
        assert!(pair.run(60.0, true) > 0.9);
        assert_eq!(pair.extent, Some(Extent::Large));
        // The rate before the first trial was an exception.
        let mut pair = Pair::new(5000.0, 20_000.0);
        pair.run(0.6, true);
        assert_eq!(pair.extent, Some(Extent::Small));
        pair.rates = (20_000.0, 20_000.0);
        pair.run(3.0, true);
        assert_eq!(pair.extent, None);
        pair.run(60.0, true);
        assert!(pair.run(120.0, true) < 0.02);
    }

    #[test]
    fn it_costs_little_where_they_do_not() {
        for (without, with) in [(1000.0, 1000.0), (700.0, 1000.0), (1000.0, 500.0)] {
            let mut pair = Pair::new(without, with);
            let part = pair.run(4.0, true);
            assert!(part < 0.2, "{without} {with}: {part}");
            pair.run(60.0, true);
            assert!(pair.run(120.0, true) < 0.02, "{without} {with}");
        }
    }

    #[test]
    fn a_large_one_is_tried_after_a_small_one_and_ends_if_it_costs_too_much() {
        let mut pair = Pair::new(1000.0, 60_000.0);
        pair.takes.0 = Extent::Large;
        pair.long = (10, 8);
        pair.run(3.0, true);
        assert_eq!(pair.extent, Some(Extent::Large));
        assert_eq!(pair.decision.take_change(), Some(Some(Extent::Large)));
        assert!(pair.run(60.0, true) > 0.95);
        assert_eq!(pair.decision.take_change(), None);
        pair.long.1 = 5;
        pair.run(60.0, true);
        let part = pair.run(60.0, true);
        assert!(part < 0.1, "{part} {:?}", pair.decision);
    }

    #[test]
    fn it_ends_with_its_clients_and_with_the_long_work() {
        let mut pair = Pair::new(1000.0, 60_000.0);
        pair.run(3.0, true);
        assert_eq!(pair.run(1.0, true), 1.0);
        pair.run(1.0, false);
        assert_eq!(pair.run(10.0, false), 0.0);
        pair.run(3.0, true);
        assert_eq!(pair.run(1.0, true), 1.0);
        pair.requests.0 = 0.0;
        pair.left = 0.0;
        pair.run(1.0, true);
        assert_eq!(pair.run(10.0, true), 0.0);
    }

    #[test]
    fn it_ends_when_it_is_of_no_use_any_more() {
        let mut pair = Pair::new(1000.0, 60_000.0);
        pair.run(5.0, true);
        pair.rates.0 = 60_000.0;
        pair.run(100.0, true);
        assert!(pair.run(60.0, true) < 0.02);
    }

    #[test]
    fn it_is_not_tried_beside_free_room_or_before_it_can_be() {
        let mut pair = Pair::new(1000.0, 60_000.0);
        assert_eq!(pair.run(10.0, false), 0.0);
        let one = Member {
            session: 1,
            modest: true,
            fills: false,
            ended: 1,
            in_flight: STEP,
        };
        let flood = Member {
            session: 2,
            modest: false,
            fills: true,
            ..one
        };
        for _ in 0..1000 {
            assert_eq!(pair.decision.note(STEP, &[one, flood], || false), None);
        }
    }
}
