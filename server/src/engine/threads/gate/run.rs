//! The threads of the gates, and what waiting sessions need.

use super::{Gate, Waiting};
use crate::engine::base::call::Incoming;
use crate::engine::base::moment::{Moment, SHORT_LOOK, Want};
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::{self, Side};
use crate::engine::base::waits::{Blockers, LEFT};
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::host::SCRATCH;
use crate::engine::objects::pace::VERY_LONG;
use crate::engine::scheduling::dispatch::{self, Step};
use crate::engine::session::{Session, SessionShared};
use crate::engine::threads::shared::Shared;
use crate::engine::threads::slow::SlowTask;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::CUresult;
use mpsshim_control::panics;
use mpsshim_model::client::ClientInfo;
use mpsshim_model::limits::MOST_BLOCKERS;
use mpsshim_proto::message::image::KernelAttribute;
use mpsshim_proto::message::{FunctionAttribute, GetFunction, Named, Op, StreamCreate};
use mpsshim_proto::ops::Gate as Condition;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long all are held back for what is in flight to end, when it is tried first; then longer and longer.
const FIRST_MOMENT: Duration = Duration::from_millis(1);
/// The same at most.
const LONGEST_MOMENT: Duration = Duration::from_millis(128);
/// After a try in vain all go on for so many times as long as they were held back.
const AFTER_VAIN: u32 = 9;
/// The same after one in which calls were made: whoever loads all the time must not keep the others from their work.
const AFTER_CALLS: u32 = 4;
/// A moment that took longer is in the log.
const LONG_MOMENT: Duration = Duration::from_millis(5);
/// Pause between two looks whether anything long is left.
const LOOK: Duration = Duration::from_micros(100);
/// Nobody knows when something ends that has taken longer, and longer than ever before.
const UNSURE: Duration = Duration::from_millis(250);
/// Who has waited longer goes to another side, if something in flight goes on for as long.
const PATIENCE: Duration = Duration::from_millis(600);
/// The same where nobody knows when that ends, or it is known to go on for longer.
const PATIENCE_UNSURE: Duration = Duration::from_millis(50);
/// Whether a session could move is not looked at more often: that looks at all that it has.
const STAYS: Duration = Duration::from_millis(100);
/// An annex is not looked at more often.
const LEAST_UNUSED: Duration = Duration::from_millis(100);
/// Who waits longer is named in the log.
const TOLD: Duration = Duration::from_secs(1);

impl Gate {
    /// Has a session wait here.
    pub fn admit(&self, shared: &Shared, mut session: Box<Session>) {
        session.say_whether_at_work(&shared.gpu);
        session.begin_wait(shared);
        self.waiting.lock().push(Waiting {
            session,
            since: Instant::now(),
            stayed: None,
            told: false,
        });
        self.came.notify_one();
    }
}

/// The body of the thread of a side's gate.
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
            let unused = shared.config.further_context.max(LEAST_UNUSED);
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

/// When all may be held back again, and for how long.
struct Tries {
    moment: Duration,
    next: Instant,
    /// In the last one calls were made.
    made: bool,
}

impl Tries {
    /// All were held back for so long.
    fn note(&mut self, made: bool, time: Duration) {
        let (moment, pause) = match made {
            true => (FIRST_MOMENT, AFTER_CALLS),
            false => (LONGEST_MOMENT.min(2 * self.moment), AFTER_VAIN),
        };
        (self.moment, self.made) = (moment, made);
        self.next = Instant::now() + pause * time;
    }
}

/// Gives all that wait their moment.
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
            one.session.publish_pace(&shared.gpu, now);
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
            let may = one.session.may_move(shared);
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
        // Where nobody else works nobody is held back; nor, after a try in vain, where nobody works just now.
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

/// Holds all back; if what is in flight ends within `most`, those who wait make their calls. Whether they did.
fn try_moment(shared: &Arc<Shared>, side: Side, most: Duration) -> bool {
    let gate = shared.lanes.gate(side);
    let hush = shared.gpu.calm(side).hush();
    let began = Instant::now();
    while !shared.roster.is_quiet(&shared.gpu, side) {
        if began.elapsed() > most {
            tracing::debug!(?most, "nobody passes the gate: {}", shared.who_works(side));
            return false;
        }
        std::thread::sleep(SHORT_LOOK);
        for one in gate.waiting.lock().iter_mut() {
            one.session.say_whether_at_work(&shared.gpu);
        }
    }
    let (all, idle): (Vec<Waiting>, bool) = {
        let mut waiting = gate.waiting.lock();
        // Those for whom there is no thread wait for another moment.
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
        .partition(|one| one.session.wants_local().is_some());
    // Whoever has called may have submitted something.
    let quiet =
        calls.is_empty() || make(shared, calls) && shared.roster.is_quiet(&shared.gpu, side);
    if quiet {
        // What the greatest cannot have, others may.
        launches.sort_by_key(|one| one.session.wants_local().map(|(_, local)| local));
        for (device, local) in launches.iter().filter_map(|one| one.session.wants_local()) {
            shared.gpu.devices[device].want_local(local);
            shared.gpu.devices[device].meet_local(&shared.gpu.driver);
        }
        settle(shared);
        if shared.gpu.calm(side).is_overdue() {
            shared.lanes.graves(side).end_some(shared);
        }
    }
    let grows = |one: &mut Waiting| {
        let wanted = one.session.wants_local();
        wanted.is_some_and(|(device, local)| shared.gpu.devices[device].grows(local))
    };
    let mut must_grow: Vec<Waiting> = launches.extract_if(.., grows).collect();
    for one in launches {
        one.go_on(shared);
    }
    // What a launch begins is in the next one's way.
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

/// Has sessions make their calls; whether there were any, and all are made.
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
            wants = one.session.wants_to(),
            "passes the gate"
        );
        shared
            .lanes
            .send_slow(SlowTask::Pass(one.session, moment.clone()));
    }
    moment.await_calls()
}

/// Has the driver get ready for launches of what was found in a moment.
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

/// Has a session that cannot load anything where it is go to another side, and wait at the gate there.
pub fn move_on(shared: &Shared, mut session: Box<Session>, to: Side) {
    panics::works_for(Some(session.shared.info.session));
    session.enter();
    let info = session.shared.info.clone();
    let (from, there) = (session.side.number(), to.number());
    if !session.has_images_as_new(shared) {
        session.flow.stays = true;
        return shared.lanes.gate(session.side).admit(shared, session);
    }
    match session.move_to(shared, to) {
        Ok(()) => tracing::info!(
            "Client {info} works in context {there}: long kernels block context {from}"
        ),
        Err(status) => {
            tracing::warn!("Client {info} cannot work in context {there}: {status}");
            shared.gpu.note_status(status);
            session.flow.stays = true;
            // The context may have been made for it.
            shared.lanes.gate(to).knock();
        }
    }
    shared.lanes.gate(session.side).admit(shared, session);
}

/// Has a session make its call, in its moment; what follows it is done where it is at home.
pub fn pass(shared: &Shared, mut session: Box<Session>, moment: &Arc<Moment>) {
    panics::works_for(Some(session.shared.info.session));
    session.enter();
    if moment.is_over() {
        return shared.lanes.gate(session.side).admit(shared, session);
    }
    session.end_wait(shared);
    if session.flow.images_of.is_some() {
        let brought = session.bring_images(shared, moment);
        if brought.is_err() || moment.is_over() {
            moment.left.fetch_sub(1, Ordering::AcqRel);
            return match brought {
                Ok(()) => shared.lanes.gate(session.side).admit(shared, session),
                Err(status) => go_back(shared, session, status),
            };
        }
    }
    // What the client has written there meanwhile is another matter.
    let may =
        session.flow.wants.is_some() || session.flow.wants_moment || session.calls_next(shared);
    session.flow.moment = Some(moment.clone());
    // Whatever it does now, others are to find it at work.
    let _ = session.may_work(&shared.gpu);
    let mut violation = None;
    let ready = !may || session.get_ready(shared);
    if std::mem::take(&mut session.flow.wants_moment) {
        if !ready {
            violation = session.replay(shared).err();
            if !session.inbox.held.any() {
                session.shared.description.set_deferred(false);
            }
        }
    } else if ready {
        // The launch itself keeps nobody waiting.
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

/// Has a session whose images cannot be loaded where it is return to where they are.
fn go_back(shared: &Shared, mut session: Box<Session>, status: CUresult) {
    let (info, there) = (session.shared.info.clone(), session.side.number());
    tracing::warn!("Client {info} cannot work in context {there}: {status}");
    shared.gpu.note_status(status);
    session.flow.stays = true;
    let of = session.flow.images_of.unwrap_or(session.side);
    match session.move_to(shared, of) {
        Ok(()) => shared.lanes.gate(of).admit(shared, session),
        Err(status) => {
            let why = format!("it can work in no context of its devices ({status})");
            dispatch::end(shared, session, Some(why));
        }
    }
}

impl Waiting {
    /// Its launch need not wait any more.
    fn go_on(mut self, shared: &Shared) {
        self.session.end_wait(shared);
        (self.session.flow.wants, self.session.flow.wants_moment) = (None, false);
        shared.lanes.send_home(self.session);
    }

    /// It does not wait any longer: it is over, or all are.
    fn leave(mut self, shared: &Shared) {
        self.session.end_wait(shared);
        let why = match shared.fate.stopping.load(Ordering::Relaxed) {
            true => "the server is shutting down",
            false if shared.gpu.is_lost() && !self.session.shared.goes_on(&shared.gpu) => {
                "the context is lost"
            }
            false => return shared.lanes.send_home(self.session),
        };
        dispatch::end(shared, self.session, Some(why.into()));
    }

    /// Has the log say who waits for long, and for whom.
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
    /// Whether something in flight takes long, as far as is known.
    pub fn has_long_work(&self, side: Side) -> bool {
        self.has_work(side, VERY_LONG, |_, _| true)
    }

    /// Whether nobody knows when something in flight ends that has taken longer than this.
    fn is_unsure(&self, side: Side, time: Duration) -> bool {
        self.has_work(side, time, |waited, rest| waited > time && rest.is_none())
    }

    /// Whether something in flight is known to take longer than this from now on. Nobody knows that of what ended sessions
    /// have left.
    fn is_known_to_last(&self, side: Side, time: Duration) -> bool {
        self.has_work(side, Duration::MAX, |_, rest| {
            rest.is_some_and(|rest| rest > time)
        })
    }

    /// Whether something in flight has taken longer than this, and is likely to take as long again.
    pub fn is_blocked(&self, side: Side, time: Duration) -> bool {
        self.has_work(side, time, |waited, rest| {
            waited > time && rest.is_none_or(|rest| rest > time)
        })
    }

    /// Whether a session has such long work, by how long it has taken and is likely to take from now on; or one that has
    /// ended, for longer than `time`.
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

    /// Who has something in flight.
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
    /// Clients whose long work is in the way of those at a side's gate.
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

impl Session {
    /// Begins a wait at the gate, or continues the one that goes on.
    pub fn begin_wait(&mut self, shared: &Shared) {
        let next = self.inbox.consumer.next_op().and_then(Op::from_u16);
        let op = match self.flow.wants_moment {
            // Of deferred messages only launches and new streams come to the gate.
            true if self.flow.wants.is_none() => Op::StreamCreate,
            true => Op::Launch,
            false => next.unwrap_or(Op::Launch),
        };
        let traced = self.trace_point(shared);
        self.shared.waits.begin(op, traced);
    }

    /// Ends the wait at the gate, if there is one.
    pub fn end_wait(&mut self, shared: &Shared) {
        if let Some(wait) = self.shared.waits.end() {
            self.record_wait(shared, &wait);
        }
    }
}

impl Session {
    /// Whether a message asks the driver for something that waits for all work in flight and keeps everybody out.
    #[inline]
    pub fn must_be_alone(&mut self, shared: &Shared, message: Incoming<'_>) -> bool {
        if self.flow.moment.is_some() {
            return false;
        }
        match message.op.gate() {
            Condition::Never => false,
            Condition::Always => true,
            Condition::NewModule => self.loads_module(shared, message),
            Condition::NewFunction => !self.knows_function(shared, message),
            Condition::Variable(at) => self.loads_for_variable(message, at),
            Condition::NewImage => self.enumerates_unloaded(message),
            Condition::HigherLimit => self.raises_limit(shared, message),
            Condition::KernelAttribute => self.sets_of_unloaded(shared, message),
            Condition::FunctionAttribute => self.sets_of_other(shared, message),
            Condition::NewStream => self.creates_stream(shared, message),
        }
    }

    fn knows_function(&self, shared: &Shared, message: Incoming<'_>) -> bool {
        let Ok(body) = message.body::<GetFunction>() else {
            return true;
        };
        let Ok(image) = self.image(body.parent) else {
            return true;
        };
        if body.function == 0 {
            return image.is_loaded();
        }
        let name = message.name::<GetFunction>();
        let device = self.device_of(shared, body.parent, body.device);
        match (name, device) {
            (Ok(name), Ok(device)) => image.knows(&(name.into(), device)),
            _ => true,
        }
    }

    /// Who wants a variable has an instance of the image for itself from then on.
    fn loads_for_variable(&self, message: Incoming<'_>, handle_at: usize) -> bool {
        let image = self.image(message.word(handle_at));
        image.is_ok_and(|image| image.is_with_others() || !image.is_loaded())
    }

    fn sets_of_unloaded(&self, shared: &Shared, message: Incoming<'_>) -> bool {
        let Ok(body) = message.body::<KernelAttribute>() else {
            return false;
        };
        let Ok(library) = self.objects.libraries.get(body.library) else {
            return false;
        };
        if body.set == 0 || !library.is_loaded() {
            return body.set != 0;
        }
        let (name, device) = (
            message.name::<KernelAttribute>(),
            shared.gpu.device(body.device),
        );
        let (Ok(name), Ok(device)) = (name, device) else {
            return false;
        };
        let (key, set) = ((name.into(), device.ordinal), (body.attribute, body.value));
        library.is_tracked() && library.loads_to_take(&shared.images, &key, Some((set, true)))
    }

    /// What no instance of the image has as yet takes another one.
    fn sets_of_other(&self, shared: &Shared, message: Incoming<'_>) -> bool {
        let body = message.body::<FunctionAttribute>();
        let found = body.and_then(|body| {
            let function = self.objects.functions.get(body.function)?;
            let set = (body.attribute, body.value);
            Ok((self.image(function.image)?, &function.key, set))
        });
        found.is_ok_and(|(image, key, set)| {
            image.is_tracked() && image.loads_to_take(&shared.images, key, Some((set, false)))
        })
    }

    /// Most streams were made before; a new one may take the driver a further hardware queue.
    fn creates_stream(&self, shared: &Shared, message: Incoming<'_>) -> bool {
        let Ok(body) = message.body::<StreamCreate>() else {
            return false;
        };
        let priority = self.raw_priority_of(body.priority);
        let Ok(device) = shared.gpu.device(body.device) else {
            return false;
        };
        let part = self.objects.places.get(device.ordinal.index());
        !match (body.green, part.and_then(Option::as_ref)) {
            (0, None) => device.has_stream(priority),
            (0, Some(part)) => part.has_stream(priority),
            (green, _) => match self.objects.greens.get(green) {
                Ok(green) => green.has_stream(priority),
                Err(_) => true,
            },
        }
    }

    fn enumerates_unloaded(&self, message: Incoming<'_>) -> bool {
        let body = message.body::<Named>();
        let image = body.and_then(|body| Ok(self.image(body.parent)?));
        image.is_ok_and(|image| !image.is_loaded())
    }

    /// What it waits with.
    fn wants_to(&self) -> String {
        match self.flow.wants {
            Some(want) => format!("{want:?}"),
            None => {
                let op = self.inbox.consumer.next_op().and_then(Op::from_u16);
                op.map_or_else(String::new, |op| format!("{op:?}"))
            }
        }
    }

    /// The local memory that its next launch needs.
    fn wants_local(&self) -> Option<(Ordinal, u32)> {
        match self.flow.wants {
            Some(Want::Local(device, bytes)) if self.flow.images_of.is_none() => {
                Some((device, bytes))
            }
            _ => None,
        }
    }

    /// Whether its next message is a call that has to be made alone.
    fn calls_next(&mut self, shared: &Shared) -> bool {
        let Ok(Some(found)) = self.inbox.consumer.peek() else {
            return false;
        };
        Op::from_u16(found.op).is_some_and(|op| {
            let message = Incoming::in_ring(op, *self.inbox.consumer.memory(), &found);
            self.must_be_alone(shared, message)
        })
    }

    /// Makes what its next launch needs; whether that could be made.
    fn get_ready(&mut self, shared: &Shared) -> bool {
        match self.flow.wants.take() {
            Some(Want::Function(handle)) => self.take_function(shared, handle).is_ok(),
            // It has less in another context: the launch says so.
            Some(Want::Local(device, local)) => !shared.gpu.devices[device].grows(local),
            None => false,
        }
    }
}
