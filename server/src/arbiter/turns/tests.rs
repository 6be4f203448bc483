use super::*;

const MS: Nanoseconds = 1_000_000;
const QUANTUM: Nanoseconds = 10 * MS;

/// Clients that always want a turn, and how long each takes to give one up once asked.
struct Simulation {
    turns: Turns,
    now: Nanoseconds,
    /// By number: devices, and time to drain.
    clients: BTreeMap<u64, (DeviceSet, Nanoseconds)>,
    /// When clients that were asked give up their turns.
    giving: BTreeMap<u64, Nanoseconds>,
    /// A client's progress per millisecond, when it holds a device alone and together with others.
    speeds: BTreeMap<u64, (f64, f64)>,
    done: BTreeMap<u64, f64>,
}

impl Simulation {
    fn new() -> Simulation {
        Simulation {
            turns: Turns::new(QUANTUM, TurnPolicy::Always),
            now: 0,
            clients: BTreeMap::new(),
            giving: BTreeMap::new(),
            speeds: BTreeMap::new(),
            done: BTreeMap::new(),
        }
    }

    /// With this policy.
    fn with(policy: TurnPolicy) -> Simulation {
        let turns = Turns::new(QUANTUM, policy);
        Simulation {
            turns,
            ..Simulation::new()
        }
    }

    /// Adds a client that works at these speeds on the first device.
    fn add_worker(&mut self, client: u64, alone: f64, together: f64) {
        self.speeds.insert(client, (alone, together));
        self.add(client, FULL_SHARE, 1, MS / 5);
    }

    fn pass(&mut self, time: Nanoseconds) {
        let held = |client: &u64| self.turns.standing(*client) == Standing::Holds;
        let holders: Vec<u64> = self.clients.keys().copied().filter(held).collect();
        for client in &holders {
            let (alone, together) = self.speeds.get(client).copied().unwrap_or_default();
            let speed = if holders.len() == 1 { alone } else { together };
            *self.done.entry(*client).or_default() += speed * time as f64 / MS as f64;
        }
        self.now += time;
    }

    /// Total progress of all clients in this time.
    fn work(&mut self, time: Nanoseconds) -> f64 {
        let before: f64 = self.done.values().sum();
        self.run(time);
        self.done.values().sum::<f64>() - before
    }

    fn add(&mut self, client: u64, share: u64, devices: DeviceSet, drain: Nanoseconds) {
        self.turns.join(client, share);
        self.turns.wants(client, devices, self.now);
        self.clients.insert(client, (devices, drain));
    }

    fn decide(&mut self) -> Vec<Decision> {
        if self.turns.wants_reports() {
            for (client, done) in &self.done {
                self.turns.has_done(*client, *done as u64);
            }
        }
        let decisions = self.turns.decide(self.now);
        for decision in &decisions {
            if let Decision::Ask(client, Asked::Now) | Decision::Grant(client, Asked::Now) =
                decision
            {
                let (_, drain) = self.clients[client];
                self.giving.insert(*client, self.now + drain);
            }
        }
        self.check();
        decisions
    }

    /// No exclusive device is held twice.
    fn check(&self) {
        let mut held = 0;
        let exclusive = self.turns.exclusive();
        for client in self.turns.clients.values() {
            if let Phase::Holds(hold) = client.phase {
                assert_eq!(held & hold.devices & exclusive, 0);
                held |= hold.devices;
            }
        }
    }

    fn run(&mut self, time: Nanoseconds) {
        let until = self.now + time;
        loop {
            self.decide();
            let given = self.giving.iter().map(|(client, at)| (*at, *client)).min();
            let deadline = self.turns.deadline(self.now);
            let next = given.map(|(at, _)| at).into_iter().chain(deadline).min();
            let Some(next) = next.filter(|next| *next <= until) else {
                self.pass(until - self.now);
                return;
            };
            assert!(
                next > self.now || given.is_some_and(|(at, _)| at <= self.now),
                "no progress"
            );
            self.pass(next.saturating_sub(self.now));
            if let Some((at, client)) = given
                && at <= self.now
            {
                self.giving.remove(&client);
                let (devices, _) = self.clients[&client];
                let done = self.done.get(&client).copied().unwrap_or_default();
                self.turns.has_done(client, done as u64);
                self.turns.wants_again(client, devices, self.now);
            }
        }
    }

    fn held(&self, client: u64) -> Nanoseconds {
        self.turns.account(client, self.now).held
    }
}

fn about(found: u64, expected: u64, percent: u64) {
    let off = found.abs_diff(expected) * 100;
    assert!(off <= expected * percent, "{found} is not about {expected}");
}

#[test]
fn equal_clients_have_equal_time() {
    for count in [2, 8] {
        let mut simulation = Simulation::new();
        for client in 0..count {
            simulation.add(client, FULL_SHARE, 1, 50_000);
        }
        simulation.run(8_000 * MS);
        for client in 0..count {
            about(simulation.held(client), 8_000 * MS / count, 2);
        }
    }
}

#[test]
fn shares_are_kept_with_few_turns() {
    let mut simulation = Simulation::new();
    simulation.add(1, FULL_SHARE * 3 / 4, 1, MS / 10);
    simulation.add(2, FULL_SHARE / 4, 1, MS / 10);
    simulation.run(10_000 * MS);
    about(simulation.held(1), 7_500 * MS, 1);
    about(simulation.held(2), 2_500 * MS, 1);
    // A holder that would get the turn right back is not asked to give it up.
    let turns = simulation.turns.account(1, simulation.now).turns;
    about(turns, simulation.turns.account(2, simulation.now).turns, 2);
}

#[test]
fn a_share_is_changed_while_a_turn_is_held() {
    let mut simulation = Simulation::new();
    simulation.add(1, FULL_SHARE, 1, 0);
    simulation.add(2, FULL_SHARE, 1, 0);
    simulation.run(1_003 * MS);
    let before = (simulation.held(1), simulation.held(2));
    simulation
        .turns
        .set_share(1, FULL_SHARE * 4, simulation.now);
    simulation.run(5_000 * MS);
    about(simulation.held(1) - before.0, 4_000 * MS, 2);
    about(simulation.held(2) - before.1, 1_000 * MS, 2);
}

#[test]
fn who_overruns_pays_for_it() {
    let mut simulation = Simulation::new();
    // Kernels of 200 ms against a quantum of 10 ms.
    simulation.add(1, FULL_SHARE, 1, 200 * MS);
    simulation.add(2, FULL_SHARE, 1, 0);
    simulation.run(10_000 * MS);
    about(simulation.held(1), 5_000 * MS, 3);
    about(simulation.held(2), 5_000 * MS, 3);
}

#[test]
fn who_was_idle_has_saved_nothing_up() {
    let mut simulation = Simulation::new();
    simulation.add(1, FULL_SHARE, 1, 0);
    simulation.turns.join(2, FULL_SHARE);
    simulation.run(5_000 * MS);
    simulation.turns.wants(2, 1, simulation.now);
    simulation.clients.insert(2, (1, 0));
    simulation.run(1_000 * MS);
    about(simulation.held(2), 500 * MS, 3);
    // Nor does the time that a client spent alone count against it when another client joins while none is active.
    let now = simulation.now;
    for client in [1, 2] {
        simulation.turns.rests(client, now);
    }
    simulation.giving.clear();
    simulation.turns.decide(now);
    simulation.add(3, FULL_SHARE, 1, 0);
    simulation.turns.wants(1, 1, now);
    let before = simulation.held(1);
    simulation.run(1_000 * MS);
    about(simulation.held(3), 500 * MS, 3);
    about(simulation.held(1) - before, 500 * MS, 3);
}

#[test]
fn a_lone_client_is_never_asked_and_needs_no_timer() {
    let mut turns = Turns::new(QUANTUM, TurnPolicy::Always);
    turns.join(1, FULL_SHARE);
    turns.join(2, FULL_SHARE);
    turns.wants(1, 1, 0);
    assert_eq!(turns.decide(0), [Decision::Grant(1, Asked::Not)]);
    assert_eq!(
        (turns.decide(QUANTUM * 9), turns.deadline(QUANTUM * 9)),
        (vec![], None)
    );
    // Nor do clients of other devices disturb it.
    turns.wants(2, 2, QUANTUM * 10);
    assert_eq!(turns.decide(QUANTUM * 10), [Decision::Grant(2, Asked::Not)]);
    assert_eq!(turns.deadline(QUANTUM * 10), None);
}

#[test]
fn a_holder_is_asked_at_once_and_again_when_its_quantum_is_over() {
    let mut turns = Turns::new(QUANTUM, TurnPolicy::Always);
    for client in [1, 2] {
        turns.join(client, FULL_SHARE);
        turns.wants(client, 1, 0);
    }
    assert_eq!(turns.decide(0), [Decision::Grant(1, Asked::WhenIdle)]);
    assert_eq!(turns.deadline(0), Some(QUANTUM));
    assert_eq!(turns.decide(QUANTUM - 1), []);
    assert_eq!(turns.decide(QUANTUM), [Decision::Ask(1, Asked::Now)]);
    // It does not drain: this is reported once, and no other client gets the turn.
    assert_eq!(turns.deadline(QUANTUM), Some(QUANTUM + DRAIN_PATIENCE));
    let late = QUANTUM + DRAIN_PATIENCE;
    assert_eq!(turns.decide(late), [Decision::NotDraining(1)]);
    assert!(turns.account(1, late).not_draining);
    assert_eq!(
        (turns.decide(late + 1), turns.deadline(late + 1)),
        (vec![], None)
    );
    turns.rests(1, late + 2);
    assert!(!turns.account(1, late + 2).not_draining);
    assert_eq!(turns.decide(late + 2), [Decision::Grant(2, Asked::Not)]);
}

#[test]
fn nothing_is_asked_for_when_the_only_waiter_has_gone() {
    for leaves in [true, false] {
        let mut turns = Turns::new(QUANTUM, TurnPolicy::Always);
        for client in [1, 2] {
            turns.join(client, FULL_SHARE);
            turns.wants(client, 1, 0);
        }
        turns.decide(0);
        turns.decide(QUANTUM);
        match leaves {
            true => turns.leave(2, QUANTUM + 1),
            false => turns.rests(2, QUANTUM + 1),
        }
        assert_eq!(turns.decide(QUANTUM + 1), [Decision::Ask(1, Asked::Not)]);
        assert_eq!(turns.deadline(QUANTUM + 1), None);
    }
}

#[test]
fn a_turn_whose_holder_is_gone_is_passed_on() {
    let mut turns = Turns::new(QUANTUM, TurnPolicy::Always);
    for client in [1, 2, 3] {
        turns.join(client, FULL_SHARE);
        turns.wants(client, 1, client);
    }
    turns.decide(3);
    // A waiting client, the holder, and a client that was just asked.
    turns.leave(2, 4);
    assert_eq!(turns.decide(4), []);
    turns.leave(1, 5);
    assert_eq!(turns.decide(5), [Decision::Grant(3, Asked::Not)]);
    turns.leave(3, 6);
    assert_eq!((turns.decide(6), turns.deadline(6)), (vec![], None));
    assert_eq!(turns.standing(3), Standing::Idle);
}

#[test]
fn a_turn_that_is_not_wanted_any_more_is_the_next_ones() {
    let mut turns = Turns::new(QUANTUM, TurnPolicy::Always);
    for client in [1, 2] {
        turns.join(client, FULL_SHARE);
        turns.wants(client, 1, client);
    }
    assert_eq!(turns.decide(2), [Decision::Grant(1, Asked::WhenIdle)]);
    turns.ungrant(1);
    assert_eq!(turns.account(1, 2).turns, 0);
    assert_eq!(turns.decide(2), [Decision::Grant(2, Asked::Not)]);
}

#[test]
fn who_wants_several_devices_is_not_overtaken_for_ever() {
    let mut simulation = Simulation::new();
    // Each device has two clients of its own, so that the two devices are never free at the same time.
    simulation.add(1, FULL_SHARE, 0b01, 0);
    simulation.add(2, FULL_SHARE, 0b01, 0);
    simulation.run(5 * MS);
    simulation.add(3, FULL_SHARE, 0b10, 0);
    simulation.add(4, FULL_SHARE, 0b10, 0);
    simulation.run(100 * MS);
    simulation.add(5, FULL_SHARE, 0b11, 0);
    simulation.run(9_000 * MS);
    about(simulation.held(5), 3_000 * MS, 10);
    for client in 1..5 {
        about(simulation.held(client), 3_000 * MS, 12);
    }
}

#[test]
fn devices_that_are_not_equally_sought_after_leave_no_debts() {
    let mut simulation = Simulation::new();
    simulation.add(1, FULL_SHARE, 0b01, 0);
    simulation.add(2, FULL_SHARE, 0b10, 0);
    simulation.add(3, FULL_SHARE, 0b10, 0);
    simulation.run(10_000 * MS);
    // The first one's clock is far ahead of the others' now.
    simulation.add(4, FULL_SHARE, 0b01, 0);
    let before = simulation.held(1);
    simulation.run(1_000 * MS);
    about(simulation.held(1) - before, 500 * MS, 3);
    about(simulation.held(4), 500 * MS, 3);
}

#[test]
fn a_shorter_quantum_holds_for_the_turn_that_is_held() {
    let mut turns = Turns::new(1_000 * MS, TurnPolicy::Always);
    for client in [1, 2] {
        turns.join(client, FULL_SHARE);
        turns.wants(client, 1, 0);
    }
    turns.decide(0);
    turns.set_quantum(MS);
    assert_eq!(turns.deadline(0), Some(MS));
    assert_eq!(turns.decide(MS), [Decision::Ask(1, Asked::Now)]);
}

#[test]
fn the_smallest_share_overflows_nothing() {
    let mut simulation = Simulation::new();
    simulation.add(1, 1, 1, 0);
    simulation.add(2, 10_000 * 10_000, 1, 0);
    simulation.run(3_600_000 * MS);
    assert!(simulation.held(1) >= QUANTUM);
}

/// Clients that wait for each small kernel: together with others, each makes a thirtieth of its progress alone.
const SMALL: (f64, f64) = (20.0, 0.7);
/// Clients that are slow to submit: together with others, each makes nearly the same progress as alone.
const SLOW: (f64, f64) = (20.0, 12.0);

#[test]
fn turns_are_taken_where_they_pay() {
    let mut simulation = Simulation::with(TurnPolicy::Auto);
    for client in 0..8 {
        simulation.add_worker(client, SMALL.0, SMALL.1);
    }
    // From the start, at most a few percent are lost to trials.
    let done = simulation.work(5_000 * MS);
    assert!(done > 0.97 * 5_000.0 * SMALL.0, "{done}");
    for client in 0..8 {
        let share = simulation.done[&client] * 8.0 / done;
        assert!(share > 0.95, "{client} got {share} of its share");
    }
    let later = simulation.work(60_000 * MS);
    assert!(later > 0.975 * 60_000.0 * SMALL.0, "{later}");
}

#[test]
fn where_turns_do_not_pay_all_go_on_together() {
    let mut simulation = Simulation::with(TurnPolicy::Auto);
    for client in 0..8 {
        simulation.add_worker(client, SLOW.0, SLOW.1);
    }
    let done = simulation.work(5_000 * MS);
    assert!(done > 0.9 * 5_000.0 * 8.0 * SLOW.1, "{done}");
    let later = simulation.work(60_000 * MS);
    assert!(later > 0.97 * 60_000.0 * 8.0 * SLOW.1, "{later}");
}

#[test]
fn what_was_found_out_is_found_out_anew() {
    let mut simulation = Simulation::with(TurnPolicy::Auto);
    for client in 0..4 {
        simulation.add_worker(client, SLOW.0, SLOW.1);
    }
    simulation.run(10_000 * MS);
    assert_eq!(simulation.turns.exclusive() & 1, 0);
    for speed in simulation.speeds.values_mut() {
        *speed = SMALL;
    }
    // A new client causes a trial soon.
    simulation.add_worker(4, SMALL.0, SMALL.1);
    simulation.run(2_000 * MS);
    assert_eq!(simulation.turns.exclusive() & 1, 1);
    for speed in simulation.speeds.values_mut() {
        *speed = SLOW;
    }
    simulation.run(10_000 * MS);
    assert_eq!(simulation.turns.exclusive() & 1, 0);
}

#[test]
fn shares_that_differ_need_turns() {
    let mut simulation = Simulation::with(TurnPolicy::Auto);
    simulation.add_worker(1, SLOW.0, SLOW.1);
    simulation.add_worker(2, SLOW.0, SLOW.1);
    simulation.run(5_000 * MS);
    assert_eq!(simulation.turns.exclusive() & 1, 0);
    let now = simulation.now;
    simulation.turns.set_share(1, FULL_SHARE / 3, now);
    simulation.run(100 * MS);
    let before = (simulation.held(1), simulation.held(2));
    simulation.run(8_000 * MS);
    about(simulation.held(1) - before.0, 2_000 * MS, 3);
    about(simulation.held(2) - before.1, 6_000 * MS, 3);
    simulation.turns.set_share(1, FULL_SHARE, simulation.now);
    simulation.run(10_000 * MS);
    assert_eq!(simulation.turns.exclusive() & 1, 0);
}

#[test]
fn a_trial_does_not_wait_long_for_who_does_not_drain() {
    let mut simulation = Simulation::with(TurnPolicy::Auto);
    for client in [1, 2] {
        simulation.add_worker(client, SLOW.0, SLOW.1);
    }
    simulation.run(3_000 * MS);
    assert_eq!(simulation.turns.exclusive() & 1, 0);
    // From now on one client takes ten seconds to drain.
    simulation.clients.insert(2, (1, 10_000 * MS));
    let before = simulation.done[&1];
    simulation.run(20_000 * MS);
    let done = simulation.done[&1] - before;
    assert!(done > 0.9 * 20_000.0 * SLOW.1, "{done}");
}

#[test]
fn with_turns_never_taken_nobody_waits() {
    let mut simulation = Simulation::with(TurnPolicy::Never);
    simulation.add(1, FULL_SHARE, 1, 0);
    simulation.add(2, FULL_SHARE / 2, 1, 0);
    simulation.run(1_000 * MS);
    assert_eq!(
        (simulation.held(1), simulation.held(2)),
        (1_000 * MS, 1_000 * MS)
    );
    assert_eq!(simulation.turns.deadline(simulation.now), None);
}

#[test]
fn clients_without_work_need_no_timer() {
    let mut simulation = Simulation::with(TurnPolicy::Auto);
    for client in [1, 2] {
        simulation.add_worker(client, SLOW.0, SLOW.1);
    }
    simulation.run(3_000 * MS);
    let now = simulation.now;
    for client in [1, 2] {
        simulation.turns.rests(client, now);
    }
    simulation.giving.clear();
    simulation.run(20_000 * MS);
    assert_eq!(simulation.turns.deadline(simulation.now), None);
    // Their progress long ago is not compared with their progress now.
    for speed in simulation.speeds.values_mut() {
        *speed = SMALL;
    }
    for client in [1, 2] {
        simulation.turns.wants(client, 1, simulation.now);
    }
    simulation.run(3_000 * MS);
    assert_eq!(simulation.turns.exclusive() & 1, 1);
}

#[test]
fn who_begins_to_work_is_looked_at_soon() {
    let mut simulation = Simulation::with(TurnPolicy::Auto);
    for client in 0..8 {
        simulation.add_worker(client, SLOW.0, SLOW.1);
    }
    simulation.run(10_000 * MS);
    // They hold the device together and submit nothing.
    for speed in simulation.speeds.values_mut() {
        *speed = (0.0, 0.0);
    }
    simulation.run(1_000 * MS);
    for speed in simulation.speeds.values_mut() {
        *speed = SMALL;
    }
    let done = simulation.work(5_000 * MS);
    assert!(done > 0.9 * 5_000.0 * SMALL.0, "{done}");
}

#[test]
fn turns_that_take_long_to_drain_are_compared_too() {
    // Time slices cost these clients a third or a fifteenth of their progress.
    for together in [4.5, 6.2] {
        let mut simulation = Simulation::with(TurnPolicy::Auto);
        for client in 0..3 {
            simulation.add_worker(client, 20.0, together);
            simulation.clients.insert(client, (1, 500 * MS));
        }
        let done = simulation.work(10_000 * MS);
        assert_eq!(simulation.turns.exclusive() & 1, 1);
        // There is nothing to try: they keep the device busy.
        assert!(done > 0.99 * 10_000.0 * 20.0, "{done}");
        let later = simulation.work(50_000 * MS);
        assert!(later > 0.97 * 50_000.0 * 20.0, "{later}");
    }
}

#[test]
fn the_next_clients_begin_anew() {
    let mut simulation = Simulation::with(TurnPolicy::Auto);
    for client in 0..2 {
        simulation.add_worker(client, SLOW.0, SLOW.1);
    }
    simulation.run(3_000 * MS);
    assert_eq!(simulation.turns.exclusive() & 1, 0);
    for client in 0..2 {
        simulation.turns.leave(client, simulation.now);
        simulation.clients.remove(&client);
        simulation.giving.remove(&client);
    }
    simulation.decide();
    assert_eq!(simulation.turns.exclusive() & 1, 1);
}

#[test]
fn what_was_before_they_began_does_not_count() {
    let mut simulation = Simulation::with(TurnPolicy::Auto);
    // All have contexts and work alone, one after the other. The last one keeps its turn.
    for client in 0..8 {
        for before in 0..client {
            simulation.turns.rests(before, simulation.now);
        }
        simulation.add_worker(client, SMALL.0, SMALL.1);
        simulation.run(10 * MS);
    }
    simulation.speeds.insert(7, (0.0, 0.0));
    simulation.run(1_000 * MS);
    simulation.speeds.insert(7, SMALL);
    for client in 0..7 {
        simulation.turns.wants(client, 1, simulation.now);
    }
    let done = simulation.work(500 * MS);
    assert!(done > 0.93 * 500.0 * SMALL.0, "{done}");
}
