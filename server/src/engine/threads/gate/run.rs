//! The gate threads, one per side, and the sessions' calls at quiescent points.

use super::{Gate, Waiting};
use crate::engine::base::call::Incoming;
use crate::engine::base::moment::{Moment, SHORT_LOOK, Want};
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::{self, Side};
use crate::engine::base::waits::{Blockers, LEFT};
use crate::engine::calls::alone::must_be_alone;
use crate::engine::calls::function::take_function;
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::host::SCRATCH;
use crate::engine::objects::pace::VERY_LONG;
use crate::engine::objects::pace::session::publish_pace;
use crate::engine::scheduling::dispatch::{self, Step};
use crate::engine::scheduling::moving::{bring_images, has_images_as_new, may_move, move_to};
use crate::engine::scheduling::own_context::stay_in_shared_context;
use crate::engine::session::flow::OwnContext;
use crate::engine::session::{Session, SessionShared};
use crate::engine::threads::shared::Shared;
use crate::engine::threads::slow::SlowTask;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::CUresult;
use mpsshim_control::panics;
use mpsshim_model::client::ClientInfo;
use mpsshim_model::limits::MOST_BLOCKERS;
use mpsshim_proto::message::Op;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long submissions are held back by the first attempt to reach a quiescent point; doubled after each failure.
const FIRST_MOMENT: Duration = Duration::from_millis(1);
/// Longest time for which one attempt holds submissions back.
const LONGEST_MOMENT: Duration = Duration::from_millis(128);
/// After a failed attempt, submissions run for this multiple of the time they were held back.
const AFTER_VAIN: u32 = 9;
/// After a successful attempt, submissions run for this multiple of the time they were held back, so that a client that
/// loads continuously cannot starve the others.
const AFTER_CALLS: u32 = 4;
/// Quiescent points that took longer are logged.
const LONG_MOMENT: Duration = Duration::from_millis(5);
/// Poll interval for long work in flight.
const LOOK: Duration = Duration::from_micros(100);
/// Work in flight for longer than this, and longer than in any previous run, has an unpredictable end.
const UNSURE: Duration = Duration::from_millis(250);
/// A session that has waited longer moves to another side if work in flight continues for this long, too.
const PATIENCE: Duration = Duration::from_millis(600);
/// How long a session waits before it moves to another side if the end of the work in flight is unpredictable or known
/// to be further away than [`PATIENCE`].
const PATIENCE_UNSURE: Duration = Duration::from_millis(50);
/// Minimum interval between checks of whether a session can move: a check examines all of its objects.
const STAYS: Duration = Duration::from_millis(100);
/// Minimum interval between checks of whether an annex is unused.
const LEAST_UNUSED: Duration = Duration::from_millis(100);
/// Sessions that wait longer are logged.
const TOLD: Duration = Duration::from_secs(1);

impl Gate {
    /// Queues a session at the gate.
    pub fn admit(&self, shared: &Shared, mut session: Box<Session>) {
        session.say_whether_at_work(&shared.gpu);
        begin_wait(&mut session, shared);
        self.waiting.lock().push(Waiting {
            session,
            since: Instant::now(),
            stayed: None,
            told: false,
        });
        self.came.notify_one();
    }
}

/// The body of a side's gate thread.
pub fn run(shared: &Arc<Shared>, side: Side) {
    side::enter(side);
    let gate = shared.lanes.gate(side);
    let mut tries = Tries {
        moment: FIRST_MOMENT,
        next: Instant::now(),
        made: false,
    };
    loop {
        let mut waiting = gate.waiting.lock();
        while waiting.is_empty() && !shared.gpu.calm(side).is_overdue() {
            let unused = match shared.lanes.owners.is_left(side) {
                true => LEAST_UNUSED,
                false => shared.config.further_context.max(LEAST_UNUSED),
            };
            let has_it = |device: &Device| device.has(side);
            if side == Side::MAIN || !shared.gpu.devices.iter().any(has_it) {
                gate.came.wait(&mut waiting);
            } else if gate.came.wait_for(&mut waiting, unused).timed_out() {
                shared.lanes.bury(Buried::UnusedAnnex(side));
            }
        }
        drop(waiting);
        shared.gpu.calm(side).set_gate_waits(true);
        open(shared, side, &mut tries);
        shared.gpu.calm(side).set_gate_waits(false);
    }
}

/// When submissions may be held back again, and for how long.
struct Tries {
    moment: Duration,
    next: Instant,
    /// Whether sessions made their calls in the last attempt.
    made: bool,
}

impl Tries {
    /// Records an attempt that held submissions back for this time.
    fn note(&mut self, made: bool, time: Duration) {
        let (moment, pause) = match made {
            true => (FIRST_MOMENT, AFTER_CALLS),
            false => (LONGEST_MOMENT.min(2 * self.moment), AFTER_VAIN),
        };
        (self.moment, self.made) = (moment, made);
        self.next = Instant::now() + pause * time;
    }
}

/// Runs quiescent points until no session waits at the gate.
fn open(shared: &Arc<Shared>, side: Side, tries: &mut Tries) {
    let (gate, calm) = (shared.lanes.gate(side), shared.gpu.calm(side));
    loop {
        let now = Instant::now();
        let mut waiting = std::mem::take(&mut *gate.waiting.lock());
        let over = |one: &mut Waiting| {
            let ends = shared.gpu.is_lost() || shared.fate.stopping.load(Ordering::Relaxed);
            ends || one.session.shared.hung_up.load(Ordering::Relaxed)
        };
        for one in waiting.extract_if(.., over) {
            one.leave(shared);
        }
        let unsure = shared.is_unsure(side, PATIENCE);
        let certain = shared.is_known_to_last(side, PATIENCE);
        let blocked = certain || shared.is_blocked(side, PATIENCE);
        for one in &mut waiting {
            one.session.say_whether_at_work(&shared.gpu);
            publish_pace(&mut one.session, &shared.gpu, now);
        }
        let blockers = shared.blockers(side);
        for one in &mut waiting {
            one.session.shared.waits.note(&blockers);
            one.tell(shared, now);
        }
        let moves = |one: &mut Waiting| {
            let waited = now.duration_since(one.since);
            let late = waited > PATIENCE || (unsure || certain) && waited > PATIENCE_UNSURE;
            let stayed = one
                .stayed
                .is_some_and(|stayed| now.duration_since(stayed) < STAYS);
            if !blocked || !late || stayed || one.session.flow.stays {
                return false;
            }
            let may = may_move(&mut one.session, shared);
            one.stayed = (!may).then_some(now);
            may
        };
        let way_out = blocked.then(|| shared.way_out(side)).flatten();
        if let Some(to) = way_out {
            for one in waiting.extract_if(.., moves) {
                shared.lanes.send_slow(SlowTask::Move(one.session, to));
            }
        }
        let mut all = gate.waiting.lock();
        all.append(&mut waiting);
        let idle = all.is_empty();
        let only = match &all[..] {
            [one] => Some(one.session.shared.info.session),
            _ => None,
        };
        let nobody_else = calm.is_left_to(only);
        if idle && !calm.is_overdue() {
            return;
        }
        drop(all);
        let busy = shared.lanes.slow.free() == 0 && !idle;
        if busy {
            shared.lanes.slow.ring();
        }
        let may = !busy && !shared.has_long_work(side);
        // The pause between attempts is skipped if nothing is in flight and either no other session works or the last
        // attempt failed: no session is held back then.
        let free = nobody_else || !tries.made;
        if may && (now >= tries.next || free && shared.roster.is_quiet(&shared.gpu, side)) {
            let made = try_moment(shared, side, tries.moment);
            tries.note(made, now.elapsed());
            if made {
                continue;
            }
            if idle {
                calm.set_overdue(false);
            }
        }
        let unsure = shared.is_unsure(side, UNSURE);
        if idle && unsure {
            calm.set_overdue(false);
        }
        calm.set_holds(!unsure);
        std::thread::sleep(LOOK);
    }
}

/// Holds all submissions back. If the work in flight ends within `most`, the waiting sessions make their calls. Returns
/// whether they did.
fn try_moment(shared: &Arc<Shared>, side: Side, most: Duration) -> bool {
    let gate = shared.lanes.gate(side);
    let hush = shared.gpu.calm(side).hush();
    let began = Instant::now();
    while !shared.roster.is_quiet(&shared.gpu, side) {
        if began.elapsed() > most {
            tracing::debug!(
                ?most,
                "no quiescent point at the gate: {}",
                shared.who_works(side)
            );
            return false;
        }
        std::thread::sleep(SHORT_LOOK);
        for one in gate.waiting.lock().iter_mut() {
            one.session.say_whether_at_work(&shared.gpu);
        }
    }
    let (all, idle): (Vec<Waiting>, bool) = {
        let mut waiting = gate.waiting.lock();
        // Sessions beyond the number of free slow-lane threads wait for the next quiescent point.
        let most = waiting.len().min(shared.lanes.slow.free());
        let idle = waiting.is_empty();
        (waiting.drain(..most).collect(), idle)
    };
    if all.is_empty() {
        shared.lanes.graves(side).end_some(shared);
        return idle;
    }
    let (mut launches, calls): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|one| wants_local(&one.session).is_some());
    // The calls may have submitted work.
    let quiet =
        calls.is_empty() || make(shared, calls) && shared.roster.is_quiet(&shared.gpu, side);
    if quiet {
        // In ascending order: if the largest request fails, smaller ones may still succeed.
        launches.sort_by_key(|one| wants_local(&one.session).map(|(_, local)| local));
        for (device, local) in launches.iter().filter_map(|one| wants_local(&one.session)) {
            shared.gpu.devices[device].want_local(local);
            shared.gpu.devices[device].meet_local(&shared.gpu.driver);
        }
        settle(shared);
        if shared.gpu.calm(side).is_overdue() {
            shared.lanes.graves(side).end_some(shared);
        }
    }
    let grows = |one: &mut Waiting| {
        let wanted = wants_local(&one.session);
        wanted.is_some_and(|(device, local)| shared.gpu.devices[device].grows(local))
    };
    let mut must_grow: Vec<Waiting> = launches.extract_if(.., grows).collect();
    for one in launches {
        one.go_on(shared);
    }
    // Work that one of these launches submits would block the next, so only the first runs now.
    let first = (!must_grow.is_empty()).then(|| must_grow.remove(0));
    gate.waiting.lock().append(&mut must_grow);
    if quiet {
        make(shared, first.into_iter().collect());
    } else {
        gate.waiting.lock().extend(first);
    }
    drop(hush);
    gate.opened.fetch_add(1, Ordering::Relaxed);
    let took = began.elapsed();
    if took > LONG_MOMENT {
        tracing::debug!(?took, "a long moment");
    }
    true
}

/// Sends sessions to the slow lane to make their calls. Returns whether there were any and all of them finished in
/// time.
fn make(shared: &Shared, calls: Vec<Waiting>) -> bool {
    if calls.is_empty() {
        return false;
    }
    let moment = Moment::of(calls.len());
    for one in calls {
        let waited = one.since.elapsed();
        tracing::debug!(
            session = one.session.shared.info.session,
            ?waited,
            wants = wants_to(&one.session),
            "passes the gate"
        );
        shared
            .lanes
            .send_slow(SlowTask::Pass(one.session, moment.clone()));
    }
    moment.await_calls()
}

/// Reserves local memory and launches a kernel on each device: after a function was loaded, the driver makes the next
/// launch in the context wait until nothing is in flight.
fn settle(shared: &Shared) {
    let scratch = shared.gpu.flags.device_address(SCRATCH);
    for device in shared
        .gpu
        .devices
        .iter()
        .filter(|device| device.is_attached())
    {
        device.meet_local(&shared.gpu.driver);
        if let Err(status) = device.launch_something(&shared.gpu.driver, scratch) {
            shared.gpu.note_status(status);
        }
    }
}

/// Moves a session that cannot load anything on its side to another one, and queues it at the gate there.
pub fn move_on(shared: &Shared, mut session: Box<Session>, to: Side) {
    panics::works_for(Some(session.shared.info.session));
    session.enter();
    let info = session.shared.info.clone();
    let (from, there) = (session.side.number(), to.number());
    if !shared.lanes.owners.may_use(to, info.session) {
        // It has become another session's since the order.
        session.shared.standing.set_apart(false);
        return shared.lanes.gate(session.side).admit(shared, session);
    }
    let own = session.flow.own.granted() == Some(to);
    if !has_images_as_new(&session, shared) {
        session.flow.stays = true;
        session.shared.standing.set_apart(false);
        if own {
            stay_in_shared_context(
                &mut session,
                shared,
                "its kernels may have stored addresses",
            );
        }
        return shared.lanes.gate(session.side).admit(shared, session);
    }
    match move_to(&mut session, shared, to) {
        Ok(()) if own => {
            session.flow.own = OwnContext::Owned;
            tracing::info!("Client {info} has context {there} and its heap for malloc to itself");
        }
        Ok(()) if session.shared.standing.is_apart() => {
            tracing::info!("Client {info} works in context {there}: its blocks take long");
        }
        Ok(()) if to == Side::MAIN => {
            tracing::info!("Client {info} works in context {there} again");
        }
        Ok(()) => tracing::info!(
            "Client {info} works in context {there}: long kernels block context {from}"
        ),
        Err(status) => {
            tracing::warn!("Client {info} cannot work in context {there}: {status}");
            shared.gpu.note_status(status);
            session.flow.stays = true;
            session.shared.standing.set_apart(false);
            if own {
                stay_in_shared_context(&mut session, shared, &status.to_string());
            }
            // The context may have been made for it.
            shared.lanes.gate(to).knock();
        }
    }
    shared.lanes.gate(session.side).admit(shared, session);
}

/// Lets a session make its call at a quiescent point and returns it to its dispatch thread.
pub fn pass(shared: &Shared, mut session: Box<Session>, moment: &Arc<Moment>) {
    panics::works_for(Some(session.shared.info.session));
    session.enter();
    if moment.is_over() {
        return shared.lanes.gate(session.side).admit(shared, session);
    }
    end_wait(&mut session, shared);
    if session.flow.images_of.is_some() {
        let brought = bring_images(&mut session, shared, moment);
        if brought != Ok(true) || moment.is_over() {
            moment.left.fetch_sub(1, Ordering::AcqRel);
            return match brought {
                Ok(_) => shared.lanes.gate(session.side).admit(shared, session),
                Err(status) => go_back(shared, session, status),
            };
        }
    }
    // The client may have changed the message in the ring, so whether it needs a quiescent point is checked again.
    let may = session.flow.wants.is_some()
        || session.flow.wants_moment
        || calls_next(&mut session, shared);
    session.flow.moment = Some(moment.clone());
    // Mark it as at work before it submits anything, so that other threads count its work as in flight.
    let _ = session.may_work(&shared.gpu);
    let mut violation = None;
    let ready = !may || get_ready(&mut session, shared);
    if std::mem::take(&mut session.flow.wants_moment) {
        if !ready {
            violation = session.replay(shared).err();
            if !session.inbox.held.any() {
                session.shared.description.set_deferred(false);
            }
        }
    } else if ready {
        // The launch itself blocks no other session, so it is left to the dispatch thread.
    } else if let Step::Violation(why) = dispatch::step(shared, &mut session, true) {
        violation = Some(why);
    }
    session.flow.moment = None;
    session.say_whether_at_work(&shared.gpu);
    moment.left.fetch_sub(1, Ordering::AcqRel);
    match violation {
        Some(why) => dispatch::end(shared, session, Some(why)),
        None => shared.lanes.send_home(session),
    }
}

/// Returns a session whose images could not be loaded on its new side to the side where they are.
fn go_back(shared: &Shared, mut session: Box<Session>, status: CUresult) {
    let (info, there) = (session.shared.info.clone(), session.side.number());
    tracing::warn!("Client {info} cannot work in context {there}: {status}");
    shared.gpu.note_status(status);
    session.flow.stays = true;
    session.shared.standing.set_apart(false);
    let of = session.flow.images_of.unwrap_or(session.side);
    match move_to(&mut session, shared, of) {
        Ok(()) => {
            if session.flow.own == OwnContext::Owned {
                stay_in_shared_context(&mut session, shared, &status.to_string());
            }
            shared.lanes.gate(of).admit(shared, session);
        }
        Err(status) => {
            let why = format!("it can work in no context of its devices ({status})");
            dispatch::end(shared, session, Some(why));
        }
    }
}

impl Waiting {
    /// Returns a session to its dispatch thread when its launch no longer has to wait.
    fn go_on(mut self, shared: &Shared) {
        end_wait(&mut self.session, shared);
        (self.session.flow.wants, self.session.flow.wants_moment) = (None, false);
        shared.lanes.send_home(self.session);
    }

    /// Removes a session from the gate: it has ended, or the server is ending.
    fn leave(mut self, shared: &Shared) {
        end_wait(&mut self.session, shared);
        let why = match shared.fate.stopping.load(Ordering::Relaxed) {
            true => "the server is shutting down",
            false if shared.gpu.is_lost() && !self.session.shared.goes_on(&shared.gpu) => {
                "the context is lost"
            }
            false => return shared.lanes.send_home(self.session),
        };
        dispatch::end(shared, self.session, Some(why.into()));
    }

    /// Logs a session that has waited long, with the clients it waits for.
    fn tell(&mut self, shared: &Shared, now: Instant) {
        if self.told || now.duration_since(self.since) < TOLD {
            return;
        }
        self.told = true;
        let (side, client) = (self.session.side, &self.session.shared);
        let what = match client.waits.whom() {
            Some(whom) => format!("long kernels of {whom} have to end first"),
            None => match shared.who_works(side).as_str() {
                "" => "calls of other clients have to end first".into(),
                busy => format!("work of {busy} has to end first"),
            },
        };
        tracing::info!("Client {} waits to load: {what}", client.info);
    }
}

impl Shared {
    /// Whether any work in flight is known to be long.
    pub fn has_long_work(&self, side: Side) -> bool {
        self.has_work(side, VERY_LONG, |_, _| true)
    }

    /// Whether work in flight has taken longer than this and its end is unpredictable.
    fn is_unsure(&self, side: Side, time: Duration) -> bool {
        self.has_work(side, time, |waited, rest| waited > time && rest.is_none())
    }

    /// Whether work in flight is known to take longer than this from now on. For work left by ended sessions that is
    /// never known.
    fn is_known_to_last(&self, side: Side, time: Duration) -> bool {
        self.has_work(side, Duration::MAX, |_, rest| {
            rest.is_some_and(|rest| rest > time)
        })
    }

    /// Whether work in flight has taken longer than this and is likely to take as long again.
    pub fn is_blocked(&self, side: Side, time: Duration) -> bool {
        self.has_work(side, time, |waited, rest| {
            waited > time && rest.is_none_or(|rest| rest > time)
        })
    }

    /// Whether `such` holds for the long work of any session, given how long it has taken and how long it is likely to
    /// take from now on; or whether work of an ended session has been in flight for longer than `time`.
    fn has_work(
        &self,
        side: Side,
        time: Duration,
        such: impl Fn(Duration, Option<Duration>) -> bool,
    ) -> bool {
        let has = |session: Arc<SessionShared>| {
            let work = session.long_work(&self.gpu);
            work.is_some_and(|(waited, rest)| such(waited, rest))
        };
        self.gpu.calm(side).dying_for() > time || self.roster.sessions_of(side).any(has)
    }

    /// Names the clients that have work in flight.
    fn who_works(&self, side: Side) -> String {
        let mut all: Vec<String> = self
            .roster
            .sessions_of(side)
            .filter(|session| session.is_at_work(&self.gpu))
            .map(|session| session.info.to_string())
            .collect();
        if !self.gpu.calm(side).is_still() {
            all.push(LEFT.into());
        }
        all.join(", ")
    }
}

impl Shared {
    /// Returns the clients whose long work delays the sessions at a side's gate.
    pub fn blockers(&self, side: Side) -> Blockers {
        let busy = self
            .roster
            .sessions_of(side)
            .filter(|session| session.long_work(&self.gpu).is_some());
        let mut clients: Vec<ClientInfo> = busy.map(|session| session.info.clone()).collect();
        clients.sort_by_key(|client| client.session);
        clients.truncate(MOST_BLOCKERS);
        let left = self.gpu.calm(side).dying_for() > VERY_LONG;
        Blockers { clients, left }
    }
}

/// Starts to record a wait at the gate, or continues the current one.
pub fn begin_wait(session: &mut Session, shared: &Shared) {
    let next = session.inbox.consumer.next_op().and_then(Op::from_u16);
    let op = match session.flow.wants_moment {
        // Of the deferred messages, only launches and stream creations wait at the gate.
        true if session.flow.wants.is_none() => Op::StreamCreate,
        true => Op::Launch,
        false => next.unwrap_or(Op::Launch),
    };
    let traced = session.trace_point(shared);
    session.shared.waits.begin(op, traced);
}

/// Ends the record of the session's wait at the gate, if there is one.
pub fn end_wait(session: &mut Session, shared: &Shared) {
    if let Some(wait) = session.shared.waits.end() {
        session.record_wait(shared, &wait);
    }
}

/// Names the call for which it waits, for the log.
fn wants_to(session: &Session) -> String {
    match session.flow.wants {
        Some(want) => format!("{want:?}"),
        None => {
            let op = session.inbox.consumer.next_op().and_then(Op::from_u16);
            op.map_or_else(String::new, |op| format!("{op:?}"))
        }
    }
}

/// Returns the device and the local memory, in bytes per thread, that its next launch needs.
fn wants_local(session: &Session) -> Option<(Ordinal, u32)> {
    match session.flow.wants {
        Some(Want::Local(device, bytes)) if session.flow.images_of.is_none() => {
            Some((device, bytes))
        }
        _ => None,
    }
}

/// Whether its next message is a call that needs a quiescent point.
fn calls_next(session: &mut Session, shared: &Shared) -> bool {
    let Ok(Some(found)) = session.inbox.consumer.peek() else {
        return false;
    };
    Op::from_u16(found.op).is_some_and(|op| {
        let message = Incoming::in_ring(op, *session.inbox.consumer.memory(), &found);
        must_be_alone(session, shared, message)
    })
}

/// Prepares the driver for its next launch. Returns whether that succeeded.
fn get_ready(session: &mut Session, shared: &Shared) -> bool {
    match session.flow.wants.take() {
        Some(Want::Function(handle)) => take_function(session, shared, handle).is_ok(),
        // On another side the limit may be lower; the launch then reports the error.
        Some(Want::Local(device, local)) => !shared.gpu.devices[device].grows(local),
        None => false,
    }
}
