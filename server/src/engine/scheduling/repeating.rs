//! Executes commands again that sessions of the server before had in flight, for clients that allow it
//! (docs/design/0022-replay.md).

use crate::engine::base::assertions;
use crate::engine::base::journal::Entry;
use crate::engine::objects::streams::Stream;
use crate::engine::scheduling::dispatch::{self, PROBE, Step, step};
use crate::engine::session::Session;
use crate::engine::session::repeating::without_marks;
use crate::engine::threads::shared::Shared;
use mpsshim_proto::message::Op;
use mpsshim_proto::segment::reached;
use std::borrow::Cow;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long other sessions wait for one session's work to complete; four times as long at each further attempt. If a kernel
/// faults meanwhile, it is known whose.
const ALONE: Duration = Duration::from_secs(1);
/// How long all other sessions wait for such sessions together. The work of further ones runs beside that of others.
const ALL_ALONE: Duration = Duration::from_secs(20);
/// How long a client may take to see that its work is complete.
const SEEN: Duration = Duration::from_millis(50);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_micros(50);

/// How long the process of a server may take to end once its threads have ended.
const ENDING: Duration = Duration::from_secs(10);

/// Work in flight of a session.
pub struct InFlight {
    /// The commands to execute again. The last of the work may still be in the ring.
    pub commands: Vec<Entry>,
    /// Process id of the server that had submitted it.
    pub before: i32,
}

/// A restored session, for its dispatch thread, with the work to execute again, if it had any in flight.
pub type Restored = (Box<Session>, Option<InFlight>);

/// Executes the commands of restored sessions, one session after the other: if a kernel faults once more, it is known whose.
/// Returns the sessions that go on.
pub fn repeat_all(shared: &Shared, restored: Vec<Restored>) -> impl Iterator<Item = Box<Session>> {
    let (until, ending) = (Instant::now() + ALL_ALONE, Instant::now() + ENDING);
    restored
        .into_iter()
        .filter_map(move |(session, work)| match work {
            Some(work) => {
                let ended = await_end(work.before, ending);
                // Until then, the device may have written further flags.
                let has = |slot, value| reached(session.shared.flag(slot), value);
                match ended.and_then(|()| without_marks(work.commands, has)) {
                    Ok(commands) => repeat(shared, session, commands, until),
                    Err(why) => {
                        dispatch::end(shared, session, Some(why.into_owned()));
                        None
                    }
                }
            }
            None => Some(session),
        })
}

/// Waits until the process of an earlier server has ended, `until` at most: until then, the device may execute its work.
///
/// # Errors
/// It does not end.
fn await_end(pid: i32, until: Instant) -> Result<(), Cow<'static, str>> {
    while is_ending(pid) {
        if Instant::now() >= until {
            return Err("the process of the server before does not end".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Whether a process exists and has not released its devices: it is no zombie yet.
fn is_ending(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    // The state comes behind the name, which is in parentheses and may contain any character.
    let state = stat.ok().and_then(|stat| {
        let (_, behind) = stat.rsplit_once(')')?;
        behind.trim_start().chars().next()
    });
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Executes these commands of a restored session, and waits for them for a while, `until` at most. Returns the session unless
/// it has ended.
fn repeat(
    shared: &Shared,
    mut session: Box<Session>,
    commands: Vec<Entry>,
    until: Instant,
) -> Option<Box<Session>> {
    // The next server then does it.
    if shared.gpu.is_lost() {
        return Some(session);
    }
    let (began, count) = (Instant::now(), commands.len());
    session.enter();
    for command in commands {
        let Some(op) = Op::from_u16(command.op) else {
            continue;
        };
        session.defer_again(op, command.token, command.bytes);
    }
    session.shared.description.set_deferred(true);
    session.shared.description.journal().set_owed(false);
    match work(shared, &mut session, until) {
        Ok(()) => {
            await_saved(shared, &mut session, until);
            tracing::info!(
                "{count} commands of client {} ran again, in {} ms",
                session.shared.info,
                began.elapsed().as_millis()
            );
            Some(session)
        }
        Err(why) => {
            dispatch::end(shared, session, Some(why));
            None
        }
    }
}

/// Saves a session whose work is complete, as soon as its client has seen that, `until` at most: the work of the next one may
/// fault.
fn await_saved(shared: &Shared, session: &mut Session, until: Instant) {
    let until = until.min(Instant::now() + SEEN);
    while !session.inbox.held.any()
        && !shared.gpu.is_lost()
        && !session.save_if_awaited(shared)
        && Instant::now() < until
    {
        // A client that has waited for a part of its work puts marks behind the rest.
        if session.has_next_without_work() && matches!(step(shared, session, false), Step::Done) {
            continue;
        }
        if session.shared.header().sleeping.0.load(Ordering::Relaxed) != 0 {
            shared.lanes.wake_watcher();
        }
        std::thread::sleep(PAUSE);
    }
}

/// Executes deferred messages until all are done, or another thread has to go on with them, `until` at most.
fn work(shared: &Shared, session: &mut Session, until: Instant) -> Result<(), String> {
    let attempts = session.shared.description.journal().attempts();
    let alone = ALONE * 4u32.pow(attempts.saturating_sub(1).min(2));
    let until = until.min(Instant::now() + alone);
    let mut probed = Instant::now();
    while Instant::now() < until && !shared.gpu.is_lost() && !session.flow.wants_moment {
        if session.inbox.held.any() && session.may_work(&shared.gpu) {
            session.replay(shared)?;
        }
        // Commands that were noted and are still in the ring may have been submitted too.
        let noted = session.shared.description.journal();
        let taken = session.inbox.consumer.place().position();
        if noted.is_noted_behind(taken) {
            match step(shared, session, false) {
                Step::Done => continue,
                Step::Violation(why) => return Err(why),
                Step::Full | Step::Held => {}
                Step::None | Step::Slow | Step::Alone => break,
            }
        }
        if !session.inbox.held.any() {
            session.shared.description.set_deferred(false);
            // A query interrupts the driver's writing of assertions.
            let is_drained =
                |stream: &Stream| !assertions::are_coming() && stream.is_drained(&shared.gpu);
            if session.objects.streams.iter().all(is_drained) {
                // Marks that were written before are not written again, so that none may cover the work.
                if !shared.gpu.is_lost() {
                    let streams = session.objects.streams.iter_mut();
                    streams.for_each(Stream::settle_progress);
                }
                break;
            }
        }
        // No query of a stream tells of a fault while further commands wait for room.
        if probed.elapsed() >= PROBE {
            probed = Instant::now();
            shared.gpu.probe();
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
