//! Brings sessions to rest, so that the next server can continue with them: no message of theirs is executed any more, and
//! the work submitted to the device is done. Sessions that cannot be handed over stay, and go on in this server.
//!
//! Each dispatch thread brings its own sessions to rest. Work that a session still owes its client (marks, deferred
//! messages, an image being loaded) is completed first; the next message stays in the ring.

use crate::engine::base::graph_turns::session::end_graph_turn;
use crate::engine::base::printing::session::stop_printing;
use crate::engine::calls::graph::loops::end_loop_turn;
use crate::engine::calls::memory::finish_releases;
use crate::engine::calls::stream::reap_streams;
use crate::engine::images::packs;
use crate::engine::objects::shared_events::session::take_torn;
use crate::engine::scheduling::express::serve_express;
use crate::engine::scheduling::visit::Visit;
use crate::engine::session::bonds::UNTIL_AT_REST;
use crate::engine::session::{Session, SessionShared};
use crate::engine::threads::shared::Shared;
use crate::keeper::{self, Keeper, Name};
use mpsshim_api::cuda::CUDA_ERROR_MPS_RPC_FAILURE;
use mpsshim_control::link::{HandOver, Others};
use mpsshim_model::bonds::Bonds;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Poll interval for whether sessions are at rest.
const LOOK: Duration = Duration::from_millis(1);
/// Additional time that a thread may take to visit its sessions.
const GRACE: Duration = Duration::from_secs(5);
/// How long sessions stand while others come to rest: beyond it, those with long work rest first, while the others work.
const WINDOW: Duration = Duration::from_millis(300);
/// How long sessions whose long work is done wait for others with long work.
const LONG_WINDOW: Duration = Duration::from_secs(1);
/// Most attempts to bring all sessions to rest at the same time.
const ATTEMPTS: usize = 4;
/// Why no client may stay while others leave.
const ONE_SERVER: &str = "a device that is not in DEFAULT compute mode admits one server, so no client can stay (-f ends it)";
/// Most clients named if some cannot be handed over.
const NAMED: usize = 8;

/// The sessions at rest, or a text that says why there are none.
pub type Rested = Result<Leaving, String>;

/// The sessions that the next server continues.
#[derive(Debug, Default)]
pub struct Leaving {
    /// Their numbers.
    pub sessions: Vec<u64>,
    /// `None` if no client stays with this server.
    pub parting: Option<Parting>,
}

/// Sessions have left this server, while others stay.
#[derive(Debug)]
pub struct Parting {
    /// The clients that stay, with reasons.
    pub stay: String,
    /// The keeper with which the next server continues the sessions that have left.
    pub keeper: Keeper,
}

/// Why a session cannot be handed over to a server that does not restore its format.
const OTHER_RELEASE: &str = "is of a release whose sessions the next server cannot restore";

/// A session that cannot be handed over, and the reason.
struct Stays(Arc<SessionShared>, String);

impl Shared {
    /// Brings all sessions or a single one to rest, for the next server. Sessions that cannot be handed over are treated as the
    /// request says; if they stay, the rest leave.
    ///
    /// # Errors
    /// The context is lost, it was called off, or there is no keeper for the sessions that leave; with
    /// [`Others::Refuse`], some cannot be handed over; the only one cannot. All sessions then go on here.
    pub fn hand_over(&self, request: &HandOver) -> Rested {
        let patience = Duration::from_millis(request.patience_ms);
        let (others, formats) = (request.others, &request.formats);
        if let Some(only) = request.only {
            return self.hand_over_one(only, patience, formats);
        }
        let (sessions, stay) = self.come_to_rest(patience, others == Others::End, formats)?;
        let parting = match stay {
            Some(stay) if others == Others::Refuse => {
                self.call_off();
                return Err(format!("{stay}; {ONE_SERVER}"));
            }
            Some(stay) => {
                let keeper = self.part(&sessions)?;
                Some(Parting { stay, keeper })
            }
            None => None,
        };
        Ok(Leaving { sessions, parting })
    }

    /// All sessions go on here.
    fn call_off(&self) {
        self.fate.call_off();
        self.lanes.wake_dispatchers();
    }

    /// Brings one session to rest, which leaves. The others work meanwhile.
    fn hand_over_one(&self, number: u64, patience: Duration, formats: &[u64]) -> Rested {
        let session = self.roster.session(number);
        let rested = match &session {
            Some(session) => self.rest_one(session, patience, formats),
            None => Err("it has ended".into()),
        };
        let keeper = rested
            .and_then(|()| self.part(&[number]))
            .inspect_err(|_| {
                if let Some(session) = session {
                    session.own_server.stays();
                }
                self.call_off();
            })?;
        Ok(Leaving {
            sessions: vec![number],
            parting: Some(Parting {
                stay: "the request is for one client".into(),
                keeper,
            }),
        })
    }

    /// Brings one session to rest.
    ///
    /// # Errors
    /// Why it cannot be handed over, in words.
    fn rest_one(
        &self,
        session: &SessionShared,
        patience: Duration,
        formats: &[u64],
    ) -> Result<(), String> {
        let number = session.info.session;
        let attempt = self.ask_to_rest(|other| other.info.session != number)?;
        self.await_rest(attempt, Instant::now() + patience, formats)?;
        let rests = session.rested.load(Ordering::Acquire) == attempt && session.is_at_rest();
        let why = if let Some(why) = bond_of(session, Bonds::default(), formats) {
            why
        } else if session.connected.load(Ordering::SeqCst) {
            "shares memory with other clients".into()
        } else if !rests {
            "has not come to rest, or has ended".into()
        } else {
            return Ok(());
        };
        Err(format!("client {} {why}", session.info.pid))
    }

    /// Brings the sessions to rest. Returns the numbers of the leaving ones, which execute nothing any more, and the
    /// clients that stay, with reasons.
    fn come_to_rest(
        &self,
        patience: Duration,
        force: bool,
        formats: &[u64],
    ) -> Result<(Vec<u64>, Option<String>), String> {
        let until = Instant::now() + patience;
        let busy = |session| {
            let why = format!("has not come to rest within {} s", patience.as_secs());
            Stays(session, why)
        };
        let mut stay = self.bound(UNTIL_AT_REST, formats);
        let number = match force {
            true => {
                let bound = numbers(&stay);
                let number = self.ask_to_rest(|session| bound.contains(&session.info.session))?;
                let mut awake = self.await_rest(number, until, formats)?;
                stay.extend(take_bound(&mut awake, formats));
                stay.extend(awake.into_iter().map(busy));
                number
            }
            false => self.rest_or_stay(until, busy, formats, &mut stay)?,
        };
        let rests = |session: &Arc<SessionShared>| {
            session.rested.load(Ordering::Acquire) == number
                && session.excused.load(Ordering::SeqCst) != number
        };
        // A message executed in the meantime may have bound its session.
        stay.extend(
            self.bound(Bonds::default(), formats)
                .into_iter()
                .filter(|Stays(session, _)| rests(session)),
        );
        if force {
            let torn = self.torn_by(&stay, rests);
            stay.extend(torn);
        } else {
            self.stay_together(&mut stay, rests);
        }
        for Stays(session, why) in &stay {
            if force {
                tracing::warn!("Ending client {}: it {why}", session.info);
                session.end(CUDA_ERROR_MPS_RPC_FAILURE);
                self.gpu.keeping.forget_session(session.info.session);
            } else {
                session.excused.store(number, Ordering::SeqCst);
            }
        }
        self.lanes.wake_dispatchers();
        let goes_on = |session: &Arc<SessionShared>| {
            let is_bound = session.description.bonds() != Bonds::default()
                || !formats.contains(&session.description.format());
            rests(session) && !is_bound && session.is_at_rest()
        };
        let mut going_on = self.roster.session_list();
        going_on.retain(goes_on);
        let stay = Some(stay).filter(|stay| !force && !stay.is_empty());
        let going_on = going_on.iter().map(|one| one.info.session);
        Ok((going_on.collect(), stay.map(name)))
    }

    /// Brings all sessions but those of `stay` to rest at the same time, and adds to these the ones that have not come to
    /// rest by `until`. Sessions with long work rest first: the others work meanwhile, and stand for [`WINDOW`] at most,
    /// if the work lasts no longer. Returns the number of the attempt.
    fn rest_or_stay(
        &self,
        until: Instant,
        busy: impl Fn(Arc<SessionShared>) -> Stays,
        formats: &[u64],
        stay: &mut Vec<Stays>,
    ) -> Result<u64, String> {
        let id = |session: &Arc<SessionShared>| session.info.session;
        let mut attempt = 1;
        loop {
            let staying = numbers(stay);
            let number = self.ask_to_rest(|session| staying.contains(&session.info.session))?;
            let window = (Instant::now() + WINDOW).min(until);
            let mut awake = self.await_rest(number, window, formats)?;
            stay.extend(take_bound(&mut awake, formats));
            let is_last = attempt == ATTEMPTS || Instant::now() >= until;
            if awake.is_empty() || is_last {
                for session in &awake {
                    session.excused.store(number, Ordering::SeqCst);
                }
                stay.extend(awake.into_iter().map(&busy));
                return Ok(number);
            }
            attempt += 1;
            while !awake.is_empty() && Instant::now() < until {
                let slow: BTreeSet<u64> = awake.iter().map(id).collect();
                let number = self.ask_to_rest(|session| !slow.contains(&session.info.session))?;
                let some = self.await_rest_of(number, until, slow.len() - 1, formats)?;
                let window = (Instant::now() + LONG_WINDOW).min(until);
                awake = match some.is_empty() {
                    true => some,
                    false => self.await_rest(number, window, formats)?,
                };
                stay.extend(take_bound(&mut awake, formats));
            }
            stay.extend(awake.into_iter().map(&busy));
        }
    }

    /// Begins an attempt to bring all sessions to rest but the excused ones, which go on. Returns its number.
    ///
    /// # Errors
    /// It was called off.
    fn ask_to_rest(&self, is_excused: impl Fn(&SessionShared) -> bool) -> Result<u64, String> {
        let number = self.fate.rests.fetch_add(1, Ordering::Relaxed) + 1;
        for session in self.roster.session_list() {
            if is_excused(&session) {
                session.excused.store(number, Ordering::SeqCst);
            }
        }
        let is_asked = self.fate.ask_to_rest(number);
        self.lanes.wake_dispatchers();
        is_asked.then_some(number).ok_or_else(called_off)
    }

    /// Waits until all sessions of this attempt are at rest or bound: messages executed meanwhile may bind them, as a capture
    /// does, and nothing is executed that could end it. Returns sessions that are not at rest, also when `until` has passed
    /// and each has been asked.
    fn await_rest(
        &self,
        number: u64,
        until: Instant,
        formats: &[u64],
    ) -> Result<Vec<Arc<SessionShared>>, String> {
        self.await_rest_of(number, until, 0, formats)
    }

    /// As [`Shared::await_rest`], until no more than `most` of them are neither at rest nor bound.
    fn await_rest_of(
        &self,
        number: u64,
        until: Instant,
        most: usize,
        formats: &[u64],
    ) -> Result<Vec<Arc<SessionShared>>, String> {
        loop {
            self.lanes.wake_dispatchers();
            let now = Instant::now();
            let mut awake = self.roster.session_list();
            awake.retain(|session| session.excused.load(Ordering::SeqCst) != number);
            // Read before `rested`: a session that has been asked is by now at rest or has work.
            let asked = awake
                .iter()
                .all(|session| session.asked_to_rest.load(Ordering::Acquire) == number);
            awake.retain(|session| session.rested.load(Ordering::Acquire) != number);
            let is_awaited = |session: &&Arc<SessionShared>| {
                let is_asked = session.asked_to_rest.load(Ordering::Acquire) == number;
                !is_asked || bond_of(session, UNTIL_AT_REST, formats).is_none()
            };
            let awaited = awake.iter().filter(is_awaited).count();
            if awaited <= most || now >= until && asked || now >= until + GRACE {
                return Ok(awake);
            }
            if self.gpu.is_lost() {
                self.call_off();
                return Err("the context is lost".into());
            }
            if self.fate.resting.load(Ordering::SeqCst) != number {
                return Err(called_off());
            }
            sleep(LOOK);
        }
    }

    /// Gives sessions that are at rest to another keeper, with which the next server continues them, and frees their
    /// objects here. The other sessions go on. Returns the other keeper.
    ///
    /// # Errors
    /// A keeper fails, in words, or it was called off. All sessions then go on here.
    fn part(&self, sessions: &[u64]) -> Result<Keeper, String> {
        if !self.fate.begin_parting() {
            return Err(called_off());
        }
        let kept = self.copy_of_keeper(sessions);
        if kept.is_ok() {
            let leaving = || {
                let all = self.roster.session_list().into_iter();
                all.filter(|one| sessions.contains(&one.info.session))
            };
            for session in leaving() {
                session.departs.store(true, Ordering::SeqCst);
            }
            // A thread that visits one of them now must still see that it is to rest.
            while leaving().next().is_some() && !self.gpu.is_lost() {
                self.lanes.wake_dispatchers();
                sleep(LOOK);
            }
        }
        self.fate.end_parting();
        self.lanes.wake_dispatchers();
        kept
    }

    fn copy_of_keeper(&self, sessions: &[u64]) -> Result<Keeper, String> {
        // Memory and images of the sessions that stay are not claimed by the next server, which drops them.
        let is_wanted = |name: &Name| {
            let of_session = keeper::Kind::OF_SESSION.contains(&name.kind);
            !of_session || sessions.contains(&name.number())
        };
        // Both servers drop contents of their packs.
        let copy = |name: &Name, file: OwnedFd| match name.kind {
            keeper::Kind::Pack => packs::copy(file.as_fd()),
            _ => Ok(file),
        };
        self.new_keeper(|name| !sessions.is_empty() && is_wanted(name), copy)
    }

    /// A temporary keeper with the images of all sessions and the sessions' descriptions.
    ///
    /// # Errors
    /// A keeper fails, in words.
    pub fn images_in_use(&self) -> Result<Keeper, String> {
        let kinds = [
            keeper::Kind::Description,
            keeper::Kind::Content,
            keeper::Kind::Pack,
        ];
        self.images.changes.watch();
        self.new_keeper(|name| kinds.contains(&name.kind), |_, file| Ok(file))
    }

    /// Another keeper with descriptors of these names, as `copy` returns them.
    fn new_keeper(
        &self,
        is_wanted: impl Fn(&Name) -> bool,
        copy: impl Fn(&Name, OwnedFd) -> std::io::Result<OwnedFd>,
    ) -> Result<Keeper, String> {
        let failed =
            |error: std::io::Error| format!("there is no keeper for the next server: {error}");
        let other = Keeper::start_for_next().map_err(failed)?;
        let copied = match self.gpu.keeping.keeper() {
            Some(keeper) => keeper.copy_to(&other, is_wanted, copy).map_err(failed)?,
            None => true,
        };
        match copied {
            true => Ok(other),
            false => Err("the keeper for the next server is full".into()),
        }
    }

    /// Adds the sessions that are at rest and share memory with others of their user, if one of these stays.
    fn stay_together(&self, stay: &mut Vec<Stays>, rests: impl Fn(&Arc<SessionShared>) -> bool) {
        let is_connected = |session: &SessionShared| session.connected.load(Ordering::Relaxed);
        let connected = stay
            .iter()
            .filter(|Stays(session, _)| is_connected(session));
        let users: BTreeSet<u32> = connected
            .map(|Stays(session, _)| session.info.uid)
            .collect();
        let staying = numbers(stay);
        for session in self.roster.session_list() {
            let is_new = !staying.contains(&session.info.session);
            if is_new
                && is_connected(&session)
                && users.contains(&session.info.uid)
                && rests(&session)
            {
                stay.push(Stays(
                    session,
                    "shares memory with a client that stays".into(),
                ));
            }
        }
    }

    /// The sessions at rest that cannot go on if these end.
    fn torn_by(&self, ending: &[Stays], rests: impl Fn(&Arc<SessionShared>) -> bool) -> Vec<Stays> {
        let lost = ending.iter().map(|Stays(session, _)| session.clone());
        let lost: Vec<_> = lost.filter(|session| !session.is_at_rest()).collect();
        let numbers = numbers(ending);
        let mut others = self.roster.session_list();
        others.retain(|session| rests(session) && !numbers.contains(&session.info.session));
        let torn = take_torn(&mut others, &lost).into_iter();
        torn.map(|session| Stays(session, "shares events with a client that ends".into()))
            .collect()
    }

    /// Returns the sessions that are bound to their context by bonds other than these, and those of other formats.
    fn bound(&self, but_for: Bonds, formats: &[u64]) -> Vec<Stays> {
        let sessions = self.roster.session_list().into_iter();
        let bound = sessions.filter_map(|session| {
            let why = bond_of(&session, but_for, formats)?;
            Some(Stays(session, why))
        });
        bound.collect()
    }
}

/// Why a session cannot be handed over: bonds other than these, or another format.
fn bond_of(session: &SessionShared, but_for: Bonds, formats: &[u64]) -> Option<String> {
    let bonds = Bonds(session.description.bonds().0 & !but_for.0);
    if bonds != Bonds::default() {
        return Some(format!("is bound by {bonds}"));
    }
    let is_readable = formats.contains(&session.description.format());
    (!is_readable).then(|| OTHER_RELEASE.to_owned())
}

/// Takes the sessions that are bound even when they rest.
fn take_bound(sessions: &mut Vec<Arc<SessionShared>>, formats: &[u64]) -> Vec<Stays> {
    let mut bound = Vec::new();
    sessions.retain(|session| {
        let why = bond_of(session, UNTIL_AT_REST, formats);
        let is_free = why.is_none();
        bound.extend(why.map(|why| Stays(session.clone(), why)));
        is_free
    });
    bound
}

fn called_off() -> String {
    "it was called off".to_owned()
}

/// The numbers of these sessions.
fn numbers(stay: &[Stays]) -> BTreeSet<u64> {
    let number = |Stays(session, _): &Stays| session.info.session;
    stay.iter().map(number).collect()
}

/// The clients with reasons.
fn name(mut stay: Vec<Stays>) -> String {
    stay.sort_by_key(|Stays(session, _)| session.info.session);
    let count = stay.len();
    let name = |Stays(session, why): Stays| format!("client {} {why}", session.info.pid);
    let mut named: Vec<String> = stay.into_iter().take(NAMED).map(name).collect();
    if count > NAMED {
        named.push(format!("{} others", count - NAMED));
    }
    named.join(", ")
}

/// Does as much as is possible now of the work that must be done before the session is at rest.
pub fn come_to_rest(session: &mut Session, shared: &Shared) -> Visit {
    // Between the check of the caller and this one the attempt may have ended, or another one begun.
    let number = shared.fate.resting.load(Ordering::SeqCst);
    if number == 0 || session.shared.excused.load(Ordering::SeqCst) == number {
        return Visit::Worked;
    }
    if session.shared.rested.load(Ordering::Relaxed) == number {
        return Visit::Idle;
    }
    let visit = rest_as_far_as_possible(session, shared, number);
    session
        .shared
        .asked_to_rest
        .store(number, Ordering::Release);
    visit
}

fn rest_as_far_as_possible(session: &mut Session, shared: &Shared, number: u64) -> Visit {
    // An image already received over the client's connection cannot be received again.
    if session.flow.wants_moment || session.flow.prepared.is_some() {
        return Visit::Slow;
    }
    if let Some(visit) = finish_work(session, shared) {
        return visit;
    }
    for stream in session.objects.streams.iter_mut() {
        stream.settle_progress();
    }
    if session.wants_snapshot() {
        let may = !shared.gpu.calm(session.side).is_hushed() && shared.lanes.snapshots.reserve();
        return if may { Visit::Snapshot } else { Visit::Full };
    }
    if session.shared.is_at_rest() {
        session.shared.rested.store(number, Ordering::Release);
    }
    Visit::Full
}

/// Completes work that has been submitted, and submits no new work. `None`: the session owes nothing any more.
pub fn finish_work(session: &mut Session, shared: &Shared) -> Option<Visit> {
    stop_printing(session, &shared.gpu);
    end_graph_turn(session, &shared.gpu);
    end_loop_turn(session, &shared.gpu);
    reap_streams(session, shared);
    finish_releases(session, shared);
    if shared.gpu.calm(session.side).is_wanted() && session.shared.at_work.load(Ordering::Relaxed) {
        session.say_whether_at_work(&shared.gpu);
    }
    if owes_nothing(session, shared) {
        return None;
    }
    // A host function that the work waits for may be waiting for a page of managed memory.
    Some(match serve_express(session, shared) {
        Ok(_) => Visit::Full,
        Err(why) => Visit::Ended(Some(why)),
    })
}

/// Whether nothing of it is in flight, deferred, or to be freed.
pub fn owes_nothing(session: &mut Session, shared: &Shared) -> bool {
    let owes = session.inbox.held.any()
        || !session.objects.retired.is_empty()
        || !session.objects.releasing.is_empty()
        || !session.objects.leaving.is_empty();
    !owes && session.is_drained(&shared.gpu)
}
