//! A session's turn with graphs that have conditional nodes ([`crate::engine::base::loops`]).

use crate::engine::base::graph_turns::Answer;
use crate::engine::base::printing::session::is_idle;
use crate::engine::gpu::Gpu;
use crate::engine::session::bonds::{Destination, UNTIL_AT_REST};
use crate::engine::session::flow::LoopHold;
use crate::engine::session::{Session, SessionShared};
use crate::engine::threads::shared::Shared;
use mpsshim_model::client::EngineEvent;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the others are held back while their work in flight ends. After that, the graph runs beside it.
const ENDS: Duration = Duration::from_millis(20);
/// How long they are held back while the graph runs. After that, they run beside it.
const RUNS: Duration = Duration::from_millis(10);
/// How long a session waits for its graph in another stream. The host may have to do something before that ends.
const OTHER_STREAM: Duration = Duration::from_secs(1);

/// Whether an instance of a graph may be launched or uploaded now in this stream; takes the turn if it has conditional nodes.
pub fn may_launch_loop(session: &mut Session, shared: &Shared, exec: u64, stream: u64) -> bool {
    let exec = session.objects.graphs.execs.get(exec);
    if !exec.is_ok_and(|exec| exec.is_conditional) {
        return true;
    }
    if !ends_in_other_stream(session, &shared.gpu, stream) {
        return false;
    }
    let has_others = others(session, shared).next().is_some();
    // Work of a session that has ended may go on.
    let is_alone = !has_others && shared.gpu.calm(session.side).is_still();
    let may = !(has_others && awaits_own_server(session, shared))
        && may_take_turn(session, &shared.gpu)
        && (is_alone || has_side(session, shared));
    if may {
        session.flow.loops.stream = Some(stream);
    }
    may
}

/// Whether its last such graph was launched in this stream, or is complete.
fn ends_in_other_stream(session: &mut Session, gpu: &Gpu, stream: u64) -> bool {
    let last = session.flow.loops.stream.filter(|last| *last != stream);
    let index = last.and_then(|last| session.objects.streams.index(last).ok());
    let works = index.is_some_and(|index| {
        let stream = session.objects.streams.at_mut(index);
        stream.is_ok_and(|stream| stream.ops() != stream.take_notice(gpu))
    });
    // For its end to be known.
    let works = works && session.has_work_in_flight(gpu);
    let waits = works.then(|| *session.flow.loops.waits.get_or_insert_with(Instant::now));
    let ends = waits.is_none_or(|since| since.elapsed() > OTHER_STREAM);
    if ends {
        session.flow.loops.waits = None;
    }
    ends
}

/// The other sessions of its side.
fn others(session: &Session, shared: &Shared) -> impl Iterator<Item = Arc<SessionShared>> {
    let own = session.shared.info.session;
    let all = shared.roster.sessions_of(session.side);
    all.filter(move |other| other.info.session != own)
}

/// Whether the session, which shares its side with others, is to move to a server of its own first.
fn awaits_own_server(session: &Session, shared: &Shared) -> bool {
    if !shared.fate.separates.load(Ordering::Relaxed) {
        return false;
    }
    session.shared.own_server.waits(|| {
        let can_move = can_move(session, shared);
        if can_move {
            let number = session.shared.info.session;
            shared.roster.tell(EngineEvent::NeedsOwnServer(number));
        }
        can_move
    })
}

/// Whether another server could go on with it once it is at rest.
fn can_move(session: &Session, shared: &Shared) -> bool {
    let bonds = session.bonds(&shared.images, Destination::NextServer);
    bonds.0 & !UNTIL_AT_REST.0 == 0 && !session.shared.connected.load(Ordering::Relaxed)
}

fn may_take_turn(session: &mut Session, gpu: &Gpu) -> bool {
    let loops = &gpu.calm(session.side).loops;
    match loops.ask(session.shared.info.session) {
        Answer::Goes | Answer::Trims => session.flow.loops.has = true,
        Answer::Waits => return false,
        Answer::Yields => {
            end_loop_turn(session, gpu);
            return false;
        }
    }
    true
}

/// Whether nothing of other sessions is in flight, or has not ended for long. Holds them back.
fn has_side(session: &mut Session, shared: &Shared) -> bool {
    let (number, side) = (session.shared.info.session, session.side);
    let loops = &shared.gpu.calm(side).loops;
    let hold = match session.flow.loops.hold {
        Some(hold) if hold.launched && hold.since.elapsed() < hold.most => return true,
        Some(hold) if hold.launched => {
            release(session, &shared.gpu);
            return false;
        }
        Some(hold) => hold,
        None => {
            if !loops.is_due() && !is_quiet(session, shared) {
                return loops.is_vain();
            }
            if !loops.hold(number, ENDS) {
                return true;
            }
            let now = Instant::now();
            *session.flow.loops.hold.insert(LoopHold {
                began: now,
                since: now,
                most: ENDS,
                launched: false,
            })
        }
    };
    if is_quiet(session, shared) {
        loops.note_launch(RUNS);
        session.flow.loops.hold = Some(LoopHold {
            since: Instant::now(),
            most: RUNS,
            launched: true,
            ..hold
        });
        return true;
    }
    let waited = hold.since.elapsed() >= hold.most;
    if waited {
        release(session, &shared.gpu);
    }
    waited
}

/// Whether no other session of its side has work in flight.
fn is_quiet(session: &Session, shared: &Shared) -> bool {
    let works = |other: Arc<SessionShared>| other.is_at_work(&shared.gpu);
    shared.gpu.calm(session.side).is_still() && !others(session, shared).any(works)
}

/// Lets the others continue.
fn release(session: &mut Session, gpu: &Gpu) {
    if let Some(hold) = session.flow.loops.hold.take() {
        let loops = &gpu.calm(session.side).loops;
        loops.release(session.shared.info.session, hold.began.elapsed());
    }
}

/// Lets the others continue once the graph is complete or has run for long, and releases the turn if nothing is in flight.
pub fn end_loop_turn(session: &mut Session, gpu: &Gpu) {
    if !session.flow.loops.has {
        return;
    }
    // The server's marks may come a little before the graph has ended for the driver.
    let works = session.has_work_in_flight(gpu) || !is_idle(session, gpu);
    let hold = session.flow.loops.hold;
    if hold.is_some_and(|hold| hold.launched && !works || hold.since.elapsed() >= hold.most) {
        release(session, gpu);
    }
    if !works && session.flow.loops.hold.is_none() {
        leave_loop_turn(session, gpu);
    }
}

/// Releases the turn for a session whose streams are idle.
pub fn leave_loop_turn(session: &mut Session, gpu: &Gpu) {
    release(session, gpu);
    session.flow.loops.stream = None;
    if std::mem::take(&mut session.flow.loops.has) {
        let loops = &gpu.calm(session.side).loops;
        loops.leave(session.shared.info.session);
    }
}
