//! Brings all sessions to rest, so that the next server can continue with them: no message of theirs is executed any
//! more, and the work submitted to the device is done.
//!
//! Each dispatch thread brings its own sessions to rest. Work that a session still owes its client (marks, deferred
//! messages, an image being loaded) is completed first; the next message stays in the ring.

use crate::engine::scheduling::dispatch::Visit;
use crate::engine::session::bonds::UNTIL_AT_REST;
use crate::engine::session::{Session, SessionShared};
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::CUDA_ERROR_MPS_RPC_FAILURE;
use mpsshim_model::bonds::Bonds;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Poll interval for whether all sessions are at rest.
const LOOK: Duration = Duration::from_millis(1);
/// Additional time that a thread may take to visit its sessions.
const GRACE: Duration = Duration::from_secs(5);
/// Most clients named if some cannot be handed over.
const NAMED: usize = 8;

/// The number of sessions at rest, or a text that says why some are not.
pub type Rested = Result<usize, String>;

/// A session that cannot be handed over, and the reason.
struct Stays(Arc<SessionShared>, String);

impl Shared {
    /// Brings all sessions to rest within `patience`. Returns the number of sessions that the next server can continue.
    /// With `force`, ends the sessions that cannot be handed over.
    ///
    /// # Errors
    /// The clients that cannot be handed over, with reasons.
    pub fn come_to_rest(&self, patience: Duration, force: bool) -> Rested {
        if !force {
            refuse(self.bound(UNTIL_AT_REST))?;
        }
        let until = Instant::now() + patience;
        let number = self.fate.rests.fetch_add(1, Ordering::Relaxed) + 1;
        self.fate.resting.store(number, Ordering::SeqCst);
        let rests = |session: &Arc<SessionShared>| session.rested.load(Ordering::Acquire) == number;
        let awake = loop {
            self.lanes.wake_dispatchers();
            let now = Instant::now();
            let mut awake = self.roster.session_list();
            // Read before `rested`: a session that has been asked is by now at rest or has work.
            let asked = awake
                .iter()
                .all(|session| session.asked_to_rest.load(Ordering::Acquire) == number);
            awake.retain(|session| !rests(session));
            if awake.is_empty() || now >= until && asked || now >= until + GRACE {
                break awake;
            }
            if self.gpu.is_lost() {
                self.end_rest(number);
                return Err("the context is lost".into());
            }
            if self.fate.resting.load(Ordering::SeqCst) != number {
                return Err("it was called off".into());
            }
            sleep(LOOK);
        };
        let busy = |session| {
            let why = format!("has not come to rest within {} s", patience.as_secs());
            Stays(session, why)
        };
        let mut stay: Vec<Stays> = awake.into_iter().map(busy).collect();
        // A message executed in the meantime may have bound its session.
        stay.extend(
            self.bound(Bonds::default())
                .into_iter()
                .filter(|Stays(session, _)| rests(session)),
        );
        if force {
            for Stays(session, why) in &stay {
                tracing::warn!("Ending client {}: it {why}", session.info);
                session.end(CUDA_ERROR_MPS_RPC_FAILURE);
                self.gpu.keeping.forget_session(session.info.session);
            }
        } else if let Err(why) = refuse(stay) {
            self.end_rest(number);
            return Err(why);
        }
        let mut going_on = 0;
        for session in self.roster.session_list() {
            let is_bound = session.description.bonds() != Bonds::default();
            if rests(&session) && !is_bound && session.is_at_rest() {
                going_on += 1;
            }
        }
        Ok(going_on)
    }

    /// Resumes service, unless another attempt has begun.
    fn end_rest(&self, number: u64) {
        let ended =
            (self.fate.resting).compare_exchange(number, 0, Ordering::SeqCst, Ordering::Relaxed);
        if ended.is_ok() {
            self.lanes.wake_dispatchers();
        }
    }

    /// Returns the sessions that are bound to their context by bonds other than these.
    fn bound(&self, but_for: Bonds) -> Vec<Stays> {
        let sessions = self.roster.session_list().into_iter();
        let bonds = sessions.map(|session| {
            let bonds = session.description.bonds().0 & !but_for.0;
            (Bonds(bonds), session)
        });
        bonds
            .filter(|(bonds, _)| *bonds != Bonds::default())
            .map(|(bonds, session)| Stays(session, format!("is bound by {bonds}")))
            .collect()
    }
}

fn refuse(mut stay: Vec<Stays>) -> Result<(), String> {
    if stay.is_empty() {
        return Ok(());
    }
    stay.sort_by_key(|Stays(session, _)| session.info.session);
    let count = stay.len();
    let name = |Stays(session, why): Stays| format!("client {} {why}", session.info.pid);
    let mut named: Vec<String> = stay.into_iter().take(NAMED).map(name).collect();
    if count > NAMED {
        named.push(format!("{} others", count - NAMED));
    }
    Err(named.join(", "))
}

impl Session {
    /// Does as much as is possible now of the work that must be done before the session is at rest.
    pub fn come_to_rest(&mut self, shared: &Shared) -> Visit {
        let number = shared.fate.resting.load(Ordering::SeqCst);
        if self.shared.rested.load(Ordering::Relaxed) == number {
            return Visit::Idle;
        }
        let visit = self.rest_as_far_as_possible(shared, number);
        self.shared.asked_to_rest.store(number, Ordering::Release);
        visit
    }

    fn rest_as_far_as_possible(&mut self, shared: &Shared, number: u64) -> Visit {
        // An image already received over the client's connection cannot be received again.
        if self.flow.wants_moment || self.flow.prepared.is_some() {
            return Visit::Slow;
        }
        self.stop_printing(&shared.gpu);
        self.end_graph_turn(&shared.gpu);
        self.reap_streams(shared);
        self.finish_releases(shared);
        let owes = self.inbox.held.any()
            || !self.objects.retired.is_empty()
            || !self.objects.releasing.is_empty()
            || !self.objects.leaving.is_empty();
        if shared.gpu.calm(self.side).is_wanted() && self.shared.at_work.load(Ordering::Relaxed) {
            self.say_whether_at_work(&shared.gpu);
        }
        let drained = self.is_drained(&shared.gpu);
        if owes || !drained {
            // A host function that the work waits for may be waiting for a page of managed memory.
            return match self.serve_express(shared) {
                Ok(_) => Visit::Full,
                Err(why) => Visit::Ended(Some(why)),
            };
        }
        for stream in self.objects.streams.iter_mut() {
            stream.settle_progress();
        }
        if self.wants_snapshot() {
            let may = !shared.gpu.calm(self.side).is_hushed() && shared.lanes.snapshots.reserve();
            return if may { Visit::Snapshot } else { Visit::Full };
        }
        if self.shared.is_at_rest() {
            self.shared.rested.store(number, Ordering::Release);
        }
        Visit::Full
    }
}
