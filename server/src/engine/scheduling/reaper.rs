//! Frees the resources of ended sessions.
//!
//! A session's work runs to completion, then its objects are freed. This thread does not block in the driver: objects
//! whose destruction would block go to the undertaker ([`crate::engine::threads::undertaker`]).
//!
//! Work that waits for words which the client was supposed to write is released ([`crate::engine::objects::awaited`]).
//! A kernel that never ends can only be stopped by destroying the whole context. Its session keeps all its memory until
//! then and no longer counts as a client; other sessions are freed as usual.

use crate::engine::base::graph_turns::session::leave_graph_turn;
use crate::engine::base::printing::session::surrender_printing;
use crate::engine::base::side::Side;
use crate::engine::calls::array::take_arrays;
use crate::engine::calls::capture::abandon_captures;
use crate::engine::calls::graph::loops::leave_loop_turn;
use crate::engine::calls::module::forget_offer;
use crate::engine::images::instances::Image;
use crate::engine::lasting::contents::forget_files;
use crate::engine::lasting::files::name_of_file;
use crate::engine::lasting::memory::forget_content;
use crate::engine::lasting::virtual_memory::name_of_physical;
use crate::engine::objects::awaited::release::Release;
use crate::engine::scheduling::moving::forget_brought;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use crate::keeper::{self, Name};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use mpsshim_control::panics;
use mpsshim_model::client::EngineEvent;
use mpsshim_proto::segment::RETURNED;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Poll interval for dying sessions.
const TICK: Duration = Duration::from_millis(1);
/// Poll interval if the work of all dying sessions appears not to end.
const SLOW_TICK: Duration = Duration::from_millis(50);
/// An ended session whose work continues for longer is stuck.
const STUCK: Duration = Duration::from_secs(5);
/// Most stuck sessions that do not count as clients; further ones take up client slots.
const MOST_STUCK: usize = 16;

/// An ended session that has or may have work in flight.
struct Dying {
    session: Box<Session>,
    since: Instant,
    look: Instant,
    release: Release,
    /// Whether its work has continued for longer than [`STUCK`].
    stuck: bool,
    /// Whether it no longer counts as a client.
    uncounted: bool,
}

impl Dying {
    fn new(shared: &Shared, mut session: Box<Session>) -> Dying {
        session.enter();
        abandon_captures(&mut session, shared, None);
        let since = Instant::now();
        Dying {
            session,
            since,
            look: since,
            release: Release::new(since),
            stuck: false,
            uncounted: false,
        }
    }

    /// Whether none of its work is in flight any more.
    fn is_over(&mut self, shared: &Shared) -> bool {
        let now = Instant::now();
        if now < self.look {
            return false;
        }
        self.session.enter();
        self.look = now + if self.stuck { SLOW_TICK } else { TICK };
        self.release.write(&shared.gpu, &self.session, self.stuck);
        self.session.forget_held(shared)
            && is_drained(shared, &self.session)
            && self.release.is_done(&shared.gpu)
    }

    /// Marks the session as stuck.
    fn note_stuck(&mut self, shared: &Shared, uncounted: usize) {
        self.stuck = true;
        if uncounted < MOST_STUCK {
            self.uncounted = true;
            shared.roster.admission.retract();
        }
        let info = self.session.shared.info.clone();
        shared.roster.tell(EngineEvent::Stuck(info));
    }
}

/// The reaper thread's body.
pub fn run(shared: &Arc<Shared>, ended: &Receiver<Box<Session>>) {
    let mut dying: Vec<Dying> = Vec::new();
    loop {
        let session = if dying.is_empty() {
            ended.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else if dying.iter().all(|one| one.stuck) {
            ended.recv_timeout(SLOW_TICK)
        } else {
            ended.recv_timeout(TICK)
        };
        match session {
            Ok(session) => dying.push(Dying::new(shared, session)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if shared.gpu.is_lost() {
            // The report of the fault may name these sessions, and precedes their ends.
            shared.gpu.health.await_decision();
            // Nothing can be freed any more; the process is about to be replaced.
            for mut one in dying.drain(..) {
                let why = one.session.flow.fault.take();
                shared.roster.gone(&one.session.shared, one.uncounted, why);
                std::mem::forget(one);
            }
            continue;
        }
        let mut at = 0;
        while at < dying.len() {
            // On a lost context every stream looks drained. The next turn handles it.
            if dying[at].is_over(shared) && !shared.gpu.is_lost() {
                let over = dying.swap_remove(at);
                // An annex must not close before all of its objects have been handed to the undertaker.
                let _annex_stays = shared.lanes.moving.read();
                shared.gpu.calm(over.session.side).end_dying();
                release(shared, *over.session, over.uncounted);
                continue;
            }
            if !dying[at].stuck && dying[at].since.elapsed() > STUCK {
                let uncounted = dying.iter().filter(|one| one.uncounted).count();
                dying[at].note_stuck(shared, uncounted);
            }
            at += 1;
        }
        for side in Side::ALL {
            let of_side = || dying.iter().filter(|one| one.session.side == side);
            let calm = shared.gpu.calm(side);
            calm.set_stuck(of_side().any(|one| one.stuck));
            let longest = of_side().map(|one| one.since.elapsed()).max();
            calm.set_dying_for(longest.unwrap_or_default());
        }
        panics::works_for(None);
    }
}

fn is_drained(shared: &Shared, session: &Session) -> bool {
    // A graph that waits for the client's host functions continues without them. The graphs and flags of a session that goes
    // on in another server are in use there.
    if !session.shared.departs.load(Ordering::SeqCst) {
        for slot in &session.objects.graphs.waits {
            session.shared.segment.set_flag(slot + RETURNED, 1);
        }
    }
    let mut streams = session
        .objects
        .streams
        .iter()
        .chain(&session.objects.retired);
    streams.all(|stream| stream.is_drained(&shared.gpu))
}

/// Frees the objects of an idle session; those whose destruction would block other clients go to the undertaker.
fn release(shared: &Arc<Shared>, mut session: Session, uncounted: bool) {
    panics::works_for(Some(session.shared.info.session));
    shared.roster.note_drained(&session.shared);
    session.enter();
    surrender_printing(&mut session, &shared.gpu);
    leave_graph_turn(&mut session, &shared.gpu);
    leave_loop_turn(&mut session, &shared.gpu);
    for (device, stream) in session.objects.helpers.drain(..) {
        let _ = shared.gpu.devices[device].make_current(&shared.gpu.driver);
        let _ = shared.gpu.driver.context.stream_destroy(stream);
    }
    for stream in session
        .objects
        .streams
        .drain()
        .chain(session.objects.retired.drain(..))
    {
        let _ = shared.gpu.devices[stream.device].make_current(&shared.gpu.driver);
        stream.release(&shared.gpu);
    }
    for event in session.objects.events.drain() {
        let _ = shared.gpu.devices[event.device].make_current(&shared.gpu.driver);
        let _ = shared.roster.shared_events.end(&shared.gpu.driver, event);
    }
    let grants = std::mem::take(&mut session.objects.grants).into_values();
    let opened = session.objects.sharing.clear(&shared.roster.shares);
    for grant in grants
        .chain(opened)
        .chain(session.objects.releasing.drain(..))
    {
        grant.left_by(&session.account);
        if let Err(status) = shared.gpu.revoke(grant) {
            tracing::error!(
                "device memory of session {} was not freed: {status}",
                session.shared.info.session
            );
        }
    }
    session.objects.graphs.free_memory(&shared.gpu);
    session.objects.pools.clear(&shared.gpu);
    forget_files(&mut session, &shared.images, |_| true);
    for key in session.objects.virtual_memory.keys() {
        shared.gpu.keeping.forget(name_of_physical(&session, key));
    }
    session.objects.virtual_memory.clear(&shared.gpu);
    let mut graves: Vec<Buried> = session.objects.greens.drain().map(Buried::Green).collect();
    forget_offer(&mut session, shared);
    forget_brought(&mut session, shared);
    for link in session.objects.links.drain() {
        link.end(shared);
    }
    let (images, events) = session.objects.graphs.release(&shared.gpu);
    let drained = |mut image: Image| {
        image.note_drained();
        Buried::Image(image)
    };
    graves.extend(images.into_iter().map(drained));
    for event in events {
        let _ = shared.gpu.driver.event_destroy(event.raw);
    }
    let images = session
        .objects
        .images
        .drain()
        .chain(session.objects.libraries.drain());
    graves.extend(images.map(drained));
    graves.extend(take_arrays(&mut session, &shared.gpu));
    let id = session.shared.info.session;
    shared.gpu.keeping.forget_session(id);
    for start in session.objects.host.keys() {
        shared
            .gpu
            .keeping
            .forget(Name::numbered(keeper::Kind::Host, *start));
    }
    for start in session.objects.files.keys() {
        shared.gpu.keeping.forget(name_of_file(*start));
    }
    if let Some(begun) = session.objects.host_begun.take() {
        shared.gpu.arena.abandon(begun);
    }
    for (start, content) in &session.objects.evicted {
        forget_content(&shared.gpu.keeping, *start, content);
    }
    let evicted = std::mem::take(&mut session.objects.evicted);
    let host = std::mem::take(&mut session.objects.host)
        .into_values()
        .chain(
            evicted
                .into_values()
                .flat_map(|content| content.into_blocks(&shared.gpu.arena)),
        )
        .chain(session.objects.host_spare.drain(..));
    let uid = session.shared.info.uid;
    graves.extend(host.map(|block| Buried::Host(block, uid)));
    let files = std::mem::take(&mut session.objects.files).into_values();
    graves.extend(files.map(|file| Buried::File(file.leave())));
    graves.push(Buried::Segment(session.shared.clone()));
    let why = session.flow.fault.take();
    let ended = session.shared.clone();
    // Drops the last references to the objects handed to the undertaker below.
    drop(session);
    shared.roster.shared_events.settle(&shared.gpu.driver);
    ended.account.retire();
    graves
        .into_iter()
        .for_each(|object| shared.lanes.bury(object));
    if !shared.gpu.move_pool.is_empty() {
        let others = shared.roster.session_list().into_iter();
        let others = others.filter(|other| other.info.uid == uid && !Arc::ptr_eq(other, &ended));
        // The user's other sessions could use as much.
        let movable = others.map(|other| other.suspension.movable_in_all()).sum();
        shared.release_move_pool(uid, movable);
    }
    shared.leave_own_context(ended.info.session);
    shared.roster.gone(&ended, uncounted, why);
}
