//! Dispatch threads: each takes messages from the rings of its sessions in turn and executes them.
//!
//! A session whose next message may block in the driver is handed over to the slow lane as a whole and returned when
//! that message is done; the order of its messages is preserved while the other sessions continue. An idle thread spins
//! for a while ([`crate::engine::scheduling::patience`]), then sleeps until a doorbell rings. While work is in flight
//! it probes the context every millisecond, since a fault would otherwise go unnoticed while clients wait for flags.

use crate::engine::base::call::Incoming;
use crate::engine::base::graph_turns::session::end_graph_turn;
use crate::engine::base::printing::session::stop_printing;
use crate::engine::calls::alone::must_be_alone;
use crate::engine::calls::graph::loops::end_loop_turn;
use crate::engine::calls::memory::finish_releases;
use crate::engine::calls::pool::trim_pools;
use crate::engine::calls::stream::reap_streams;
use crate::engine::calls::{Undone, is_slow};
use crate::engine::objects::activity::session::sample;
use crate::engine::objects::fairness;
use crate::engine::objects::held::Order as Deferral;
use crate::engine::objects::marks::session::count_marks;
use crate::engine::objects::trace::session::execute;
use crate::engine::scheduling::express::{Served, serve_express};
use crate::engine::scheduling::moving::leave;
use crate::engine::scheduling::own_context::awaits_own_context;
use crate::engine::scheduling::parking::{self, Parked, Sessions, wants_attention};
use crate::engine::scheduling::patience::{Next, Patience};
use crate::engine::scheduling::resting::come_to_rest;
use crate::engine::scheduling::suspending::{
    is_due_for_eviction, is_evicted, make_way, room_pause, visit_evicted, waits_for_memory,
};
use crate::engine::scheduling::visit::Visit;
use crate::engine::session::Session;
use crate::engine::session::suspension::Order;
use crate::engine::threads::lanes::Dispatcher;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::slow::SlowTask;
use crossbeam_channel::Receiver;
use mpsshim_api::cuda::{CUDA_ERROR_MPS_CLIENT_TERMINATED, CUDA_ERROR_MPS_RPC_FAILURE};
use mpsshim_control::panics;
use mpsshim_proto::message::Op;
use mpsshim_proto::ops::{Gate, Lane};
use mpsshim_proto::ring::Message;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// Most messages of one session per visit.
const BUDGET: usize = 64;
/// Why a session that departs is over here.
pub const GOES_ON_ELSEWHERE: &str = "it goes on in the next server";
/// Nice value of a dispatch thread, if the process may set it: a dispatch thread that is not scheduled delays every
/// client it serves.
const NICE: i32 = -10;
/// Interval at which the context is probed for faults while work is in flight and no message arrives.
pub const PROBE: Duration = Duration::from_millis(1);

/// Interval at which the synchronizing sessions are counted.
const COUNT: Duration = Duration::from_millis(1);
/// Longest sleep of a thread while clients wait at the gate for work in flight to end.
const URGENT: Duration = Duration::from_micros(50);

/// Sets [`NICE`] for the calling thread, and the smallest timer slack, so that its sleeps do not end late.
pub fn run_ahead() {
    // SAFETY: plain system calls on the calling thread; without permission, the first one has no effect.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, NICE);
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
    }
}

/// The body of dispatch thread `me`.
pub fn run(shared: &Arc<Shared>, me: usize, inbox: &Receiver<Box<Session>>) {
    let dispatcher = &shared.lanes.dispatchers[me];
    run_ahead();
    let mut sessions = Sessions::new();
    let mut parked = Parked::new();
    let mut patience = Patience::new(shared.config.max_spin);
    let mut probed = Instant::now();
    let mut counted = probed;
    let mut rounds = 0u32;
    loop {
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(64) && counted.elapsed() > COUNT {
            let over = counted.elapsed();
            counted += over;
            for session in &mut sessions {
                sample(session, &shared.gpu, counted, false);
            }
            shared.assign_levels(counted);
            let active = sessions
                .iter_mut()
                .filter_map(|s| count_marks(s, &shared.gpu, over).then_some(()))
                .count();
            dispatcher.active.store(active, Ordering::Relaxed);
            shared.count_synchronizing();
            parked.park_quiet(shared, &mut sessions);
        }
        parked.take_rung(shared, &mut sessions, false);
        sessions.extend(inbox.try_iter());
        if shared.gpu.is_lost()
            || shared.fate.is_resting()
            || shared.fate.stopping.load(Ordering::Relaxed)
        {
            parked.take_all(shared, &mut sessions);
        }
        if shared.fate.stopping.load(Ordering::Relaxed) {
            for session in sessions.drain(..) {
                end(shared, session, Some("the server is shutting down".into()));
            }
            return;
        }
        let (mut worked, mut full) = (false, false);
        let classes = shared.roster.fairness.has_classes();
        if classes {
            // The sort is stable: the order of sessions with the same priority is kept.
            sessions.sort_by_key(|session| session.shared.terms.priority);
        }
        shared.look_at_clocks(rounds);
        let mut at = 0;
        while at < sessions.len() {
            let session = &mut sessions[at];
            if classes {
                let low = session.shared.terms.priority > 0;
                if low && worked && !rounds.is_multiple_of(fairness::LOW_TURN) {
                    break;
                }
            }
            if !session.shared.is_to_rest(shared.fate.attempt()) && !shared.may_go(&session.shared)
            {
                // Other clients have fallen behind in dispatched messages; this one still has work.
                worked = true;
                at += 1;
                continue;
            }
            let before = session.flow.dispatched;
            let visited = visit(shared, session);
            shared.note_dispatched(&session.shared, session.flow.dispatched - before);
            match visited {
                Visit::Idle => {}
                Visit::Worked => worked = true,
                Visit::Full => full = true,
                Visit::Slow => {
                    let session = sessions.swap_remove(at);
                    shared.lanes.send_slow(SlowTask::Serve(session));
                    worked = true;
                    continue;
                }
                Visit::Snapshot => {
                    shared.lanes.snapshots.send(sessions.swap_remove(at));
                    worked = true;
                    continue;
                }
                Visit::Move(to) => {
                    let session = sessions.swap_remove(at);
                    shared.lanes.send_slow(SlowTask::Move(session, to));
                    worked = true;
                    continue;
                }
                Visit::Evict => {
                    let session = sessions.swap_remove(at);
                    shared.lanes.send_slow(SlowTask::Evict(session));
                    worked = true;
                    continue;
                }
                Visit::Refill => {
                    let session = sessions.swap_remove(at);
                    shared.lanes.send_slow(SlowTask::Refill(session));
                    worked = true;
                    continue;
                }
                Visit::Ended(why) => {
                    let session = sessions.swap_remove(at);
                    end(shared, session, why);
                    continue;
                }
            }
            at += 1;
        }
        if worked {
            patience.worked();
            continue;
        }
        let now = Instant::now();
        if full && now.duration_since(probed) > PROBE {
            probed = now;
            shared.gpu.probe();
        }
        let crowded = shared.roster.crowded.load(Ordering::Relaxed);
        let next = match patience.next(now, crowded, full) {
            _ if sessions.is_empty() => Next::Sleep,
            next => next,
        };
        let nap = match next {
            Next::Look => {
                std::hint::spin_loop();
                continue;
            }
            Next::Yield => {
                std::thread::yield_now();
                continue;
            }
            Next::Sleep if full => {
                // The GPU makes room without ringing a doorbell.
                std::thread::sleep(Duration::from_micros(20));
                continue;
            }
            Next::Sleep => Duration::MAX,
            Next::Nap(nap) => nap,
        };
        let all = (&mut sessions, &mut parked);
        if sleep(shared, dispatcher, all, inbox, &mut probed, nap) {
            patience.woke();
        }
    }
}

/// Sleeps until a doorbell rings, but no longer than `most`, or [`PROBE`] while work is in flight. Returns whether
/// spinning afterwards is worthwhile: not if only a poll interval has expired.
fn sleep(
    shared: &Arc<Shared>,
    dispatcher: &Dispatcher,
    (sessions, parked): (&mut Sessions, &mut Parked),
    inbox: &Receiver<Box<Session>>,
    probed: &mut Instant,
    most: Duration,
) -> bool {
    let mut rang = true;
    for session in sessions.iter() {
        session
            .shared
            .header()
            .server_sleeps
            .0
            .store(1, Ordering::Relaxed);
    }
    fence(Ordering::SeqCst);
    let mut in_flight = false;
    let now = Instant::now();
    for session in sessions.iter_mut() {
        session.say_whether_at_work(&shared.gpu);
        in_flight |= session.shared.at_work.load(Ordering::Relaxed);
        sample(session, &shared.gpu, now, true);
    }
    if in_flight {
        shared.assign_levels(now);
    }
    dispatcher.active.store(0, Ordering::Relaxed);
    shared.count_synchronizing();
    let pauses = |session: &Session| {
        [
            session.inbox.held.pause(),
            session.snapshot_pause(),
            room_pause(session),
        ]
    };
    let pause = sessions.iter().flat_map(|s| pauses(s)).flatten().min();
    if inbox.is_empty()
        && !shared.fate.stopping.load(Ordering::Relaxed)
        && !sessions
            .iter()
            .any(|session| wants_attention(session) && !waits_for_memory(session))
    {
        let poll = |fd: i32| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let mut bells: Vec<libc::pollfd> = sessions
            .iter()
            .map(|s| poll(s.shared.bell.fd().as_raw_fd()))
            .collect();
        bells.push(poll(dispatcher.bell.fd().as_raw_fd()));
        bells.extend(parked.fd().map(poll));
        let timeout = match in_flight {
            true if shared.gpu.is_urgent() => URGENT,
            true => PROBE,
            false => Duration::MAX,
        };
        let timeout = timeout.min(pause.unwrap_or(Duration::MAX)).min(most);
        let time = libc::timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let time = if timeout == Duration::MAX {
            std::ptr::null()
        } else {
            &raw const time
        };
        // SAFETY: the array is as long as said; it and the time live through the call.
        let bells_rung = unsafe {
            libc::ppoll(
                bells.as_mut_ptr(),
                bells.len() as libc::nfds_t,
                time,
                std::ptr::null(),
            )
        };
        rang = bells_rung != 0 || pause.is_none();
        dispatcher.bell.silence();
        for (session, bell) in sessions.iter().zip(&bells) {
            if bell.revents != 0 {
                session.shared.bell.silence();
            }
        }
        // Not after every wake-up: a client that waits for a kernel rings the doorbell for the next one.
        let now = Instant::now();
        if in_flight && now.duration_since(*probed) >= PROBE {
            *probed = now;
            shared.gpu.probe();
        }
    }
    for session in sessions.iter() {
        parking::awake(shared, session);
    }
    parked.take_rung(shared, sessions, true);
    rang
}

impl Shared {
    /// Sums up the synchronizing sessions of all dispatch threads.
    fn count_synchronizing(&self) {
        let active = |dispatcher: &Dispatcher| dispatcher.active.load(Ordering::Relaxed);
        let active: usize = self.lanes.dispatchers.iter().map(active).sum();
        self.gpu.synchronizing.store(active, Ordering::Relaxed);
    }
}

#[inline]
fn visit(shared: &Shared, session: &mut Session) -> Visit {
    panics::works_for(Some(session.shared.info.session));
    session.enter();
    if shared.gpu.is_lost() && session.shared.goes_on(&shared.gpu) {
        return Visit::Idle;
    }
    if session.shared.departs.load(Ordering::SeqCst) {
        return Visit::Ended(Some(GOES_ON_ELSEWHERE.into()));
    }
    if session.shared.hung_up.load(Ordering::Relaxed) {
        let terminated = session.shared.terminated.load(Ordering::SeqCst);
        return Visit::Ended(terminated.then(|| "terminated by the operator".into()));
    }
    if shared.gpu.printing.is_held() {
        shared.gpu.printing.contain();
    }
    if is_evicted(session) && !session.shared.is_to_rest(shared.fate.attempt()) {
        return visit_evicted(session);
    }
    if session.flow.loops.has {
        end_loop_turn(session, &shared.gpu);
    }
    let mut wrote = false;
    if !session.shared.is_to_rest(shared.fate.attempt()) {
        match serve_express(session, shared) {
            Ok(Served::Nothing) => {}
            Ok(Served::Some) => wrote = true,
            Ok(Served::Full) => return Visit::Full,
            Err(why) => return Visit::Ended(Some(why)),
        }
    }
    if session.inbox.held.any() {
        if !session.may_work(&shared.gpu) {
            return Visit::Full;
        }
        match session.replay(shared) {
            Ok(worked) => wrote |= worked,
            Err(why) => return Visit::Ended(Some(why)),
        }
        if !session.inbox.held.any() {
            session.shared.description.set_deferred(false);
        }
        if session.flow.wants_moment {
            return Visit::Slow;
        }
    }
    if session.shared.is_to_rest(shared.fate.attempt()) {
        return come_to_rest(session, shared);
    }
    if let Some(Order::MakeRoom(..)) = session.shared.suspension.order() {
        return make_way(session, shared);
    }
    if waits_for_memory(session) {
        return Visit::Idle;
    }
    if session.shared.standing.goes_to().is_some()
        && let Some(visit) = leave(session, shared)
    {
        return visit;
    }
    session.note_rest(&shared.gpu);
    let mut count = 0;
    while count < BUDGET {
        match step(shared, session, false) {
            Step::None | Step::Held => break,
            Step::Done => {
                count += 1;
                session.flow.dispatched += 1;
            }
            Step::Full if count == 0 && !wrote => return Visit::Full,
            Step::Slow | Step::Alone if count == 0 => return Visit::Slow,
            Step::Full | Step::Slow | Step::Alone => return Visit::Worked,
            Step::Violation(why) => return Visit::Ended(Some(why)),
        }
    }
    if count > 0 || wrote {
        return Visit::Worked;
    }
    if session.shared.header().sleeping.0.load(Ordering::Relaxed) != 0 {
        shared.lanes.wake_watcher();
    }
    stop_printing(session, &shared.gpu);
    end_graph_turn(session, &shared.gpu);
    reap_streams(session, shared);
    finish_releases(session, shared);
    trim_pools(session, shared);
    if shared.gpu.is_lost() && !session.shared.goes_on(&shared.gpu) {
        return Visit::Ended(Some("the context is lost".into()));
    }
    if shared.gpu.calm(session.side).is_wanted() && session.shared.at_work.load(Ordering::Relaxed) {
        session.say_whether_at_work(&shared.gpu);
    }
    if is_due_for_eviction(session, shared) {
        return Visit::Evict;
    }
    if session.is_due_for_snapshot(shared) && shared.lanes.snapshots.reserve() {
        return Visit::Snapshot;
    }
    Visit::Idle
}

/// Outcome of a session's next message.
pub enum Step {
    /// There is no message.
    None,
    /// It was executed.
    Done,
    /// It waits for work in flight.
    Full,
    /// It is deferred behind messages that wait for the client.
    Held,
    /// It belongs on the slow lane.
    Slow,
    /// It needs a quiescent point.
    Alone,
    /// The client broke the protocol.
    Violation(String),
}

/// Executes the next message of a session.
#[inline]
pub fn step(shared: &Shared, session: &mut Session, on_slow_lane: bool) -> Step {
    // The context is lost and the session will continue in the next server: executing more now would have no effect.
    if shared.gpu.is_lost() && session.shared.goes_on(&shared.gpu) {
        return Step::Full;
    }
    // Messages already on their way to the slow lane or the gate are still executed there.
    if !on_slow_lane && session.shared.is_to_rest(shared.fate.attempt()) {
        return Step::Full;
    }
    let found = match session.inbox.consumer.peek() {
        Ok(Some(found)) => found,
        Ok(None) => return Step::None,
        Err(violation) => return Step::Violation(violation.to_string()),
    };
    let Some(op) = Op::from_u16(found.op) else {
        return Step::Violation(format!("unknown opcode {}", found.op));
    };
    if !op.is_judged() {
        let message = Incoming::in_ring(op, *session.inbox.consumer.memory(), &found);
        return take_up(shared, session, &found, message, on_slow_lane);
    }
    // It is judged and executed by what it says now: its client may change it in the ring at any time.
    let mut copy = std::mem::take(&mut session.inbox.held.buffer);
    copy.resize(found.len as usize, 0);
    let _ = session.inbox.consumer.copy_out(&found, 0, &mut copy);
    let message = Incoming::copied(op, found.token, &copy);
    let done = take_up(shared, session, &found, message, on_slow_lane);
    session.inbox.held.buffer = copy;
    done
}

/// Executes, defers or leaves the message that was found in the ring.
#[inline]
fn take_up(
    shared: &Shared,
    session: &mut Session,
    found: &Message,
    message: Incoming<'_>,
    on_slow_lane: bool,
) -> Step {
    session.note_command(message);
    if session.inbox.held.any() {
        match session.order(message) {
            Deferral::Now => {}
            Deferral::Taken => {
                session.shared.description.set_deferred(true);
                session.inbox.consumer.consume(found);
                return Step::Done;
            }
            Deferral::Stays if session.inbox.held.is_full() => return Step::Full,
            Deferral::Stays => return Step::Held,
        }
    }
    // The message waits here, because a slow-lane thread must not wait for the end of a quiescent point: the sessions
    // making their calls at it need those threads.
    if session.is_hushed(&shared.gpu) {
        session.say_whether_at_work(&shared.gpu);
        return Step::Full;
    }
    if !on_slow_lane && is_slow(message) {
        return Step::Slow;
    }
    let alone = must_be_alone(session, shared, message);
    if message.op.gate() != Gate::Never && awaits_own_context(session, shared, message) {
        return Step::Full;
    }
    if alone {
        session.flow.wants = None;
        return Step::Alone;
    }
    if !session.may_work(&shared.gpu) {
        return Step::Full;
    }
    if on_slow_lane && message.op.lane() == Lane::Slow {
        session.go_away(&shared.gpu);
        let done = perform(shared, session, found, message, on_slow_lane);
        session.come_back();
        return done;
    }
    perform(shared, session, found, message, on_slow_lane)
}

/// Executes the message, as part of a launch batch if possible.
#[inline]
fn perform(
    shared: &Shared,
    session: &mut Session,
    found: &Message,
    message: Incoming<'_>,
    on_slow_lane: bool,
) -> Step {
    if matches!(message.op, Op::Launch | Op::ManagedMove) && !on_slow_lane {
        match session.launch_run(shared) {
            Ok(0) => {}
            Ok(launched) => {
                session.flow.dispatched += launched - 1;
                return Step::Done;
            }
            Err(violation) => return Step::Violation(violation.to_string()),
        }
    }
    match execute(shared, session, message) {
        Ok(()) => {
            if session.inbox.held.any() {
                session.shared.description.set_deferred(true);
            }
            session.inbox.consumer.consume(found);
            Step::Done
        }
        // Its stream may have been deferred just now.
        Err(Undone::Later) if session.inbox.held.any() => match session.order(message) {
            Deferral::Taken => {
                session.shared.description.set_deferred(true);
                session.inbox.consumer.consume(found);
                Step::Done
            }
            Deferral::Now | Deferral::Stays => Step::Full,
        },
        Err(Undone::Later) => Step::Full,
        Err(Undone::Alone) => Step::Alone,
        Err(Undone::Violation(why)) => Step::Violation(why),
    }
}

/// Ends a session: notifies its client and hands its objects over to the reaper.
///
/// A session that departs has no work in flight, and its segment and connection stay as they are.
pub fn end(shared: &Shared, mut session: Box<Session>, why: Option<String>) {
    let status = match session.shared.terminated.load(Ordering::SeqCst) {
        true => CUDA_ERROR_MPS_CLIENT_TERMINATED,
        false => CUDA_ERROR_MPS_RPC_FAILURE,
    };
    let departs = session.shared.departs.load(Ordering::SeqCst);
    if !departs {
        let status = shared.gpu.lost_status().unwrap_or(status);
        session.shared.end(status);
    }
    shared.lanes.owners.leave(session.shared.info.session);
    shared.room.leave(session.shared.info.session);
    // Must precede the removal from the list of sessions, so that its work is counted throughout.
    shared.gpu.calm(session.side).begin_dying();
    if !departs {
        // SAFETY: a plain system call on our own descriptor: the client sees the end even if it looks nowhere else.
        unsafe { libc::shutdown(session.shared.socket().as_raw_fd(), libc::SHUT_RDWR) };
    }
    shared.roster.note_leaving(&session.shared);
    shared.roster.forget(&session.shared);
    shared.share_guarantees();
    shared.lanes.dispatchers[session.flow.home]
        .load
        .fetch_sub(1, Ordering::Relaxed);
    session.flow.fault = why;
    shared.lanes.send_reaper(session);
}
