//! Restores the sessions of a server that has ended.
//!
//! The keeper holds their descriptions, segments, connections and memory. Each session is created again from the
//! messages that had created its objects, its memory is mapped at its old addresses, and execution resumes with the
//! message that the previous server had not executed. Clients notice only a pause. A session that had work in flight which
//! must not run again, or is bound to the lost context, ends as if its server had ended.

use crate::engine::base::account::Account;
use crate::engine::base::bounds::STACK;
use crate::engine::base::description::{Description, Record};
use crate::engine::base::journal::{Entry, is_behind};
use crate::engine::base::kinds::{Kind, SURFACE, Stage, for_each_kind};
use crate::engine::base::memory_file::MemoryFile;
use crate::engine::base::moment::Moment;
use crate::engine::base::side::{self, Side};
use crate::engine::calls::module::{MOST_LOADS, images_in_the_way, load_restored_elsewhere};
use crate::engine::gpu::client_segment::Segment;
use crate::engine::images::contents::Content;
use crate::engine::lasting::contents::take_files;
use crate::engine::lasting::messages::Client;
use crate::engine::lasting::resources::with_sizes;
use crate::engine::lasting::shares::{block_of, keep_in_place};
use crate::engine::lasting::{self, Left, Lost};
use crate::engine::objects::shared_events::session::recorded_in;
use crate::engine::scheduling::dispatch;
use crate::engine::scheduling::repeating::{InFlight, Restored, repeat_all};
use crate::engine::session::repeating::pending;
use crate::engine::session::{Session, SessionShared};
use crate::engine::threads::shared::Shared;
use crate::engine::threads::slow;
use crate::keeper::{self, Keeper, Name};
use mpsshim_api::cuda::*;
use mpsshim_control::closers::Stranger;
use mpsshim_control::panics;
use mpsshim_control::seqpacket;
use mpsshim_model::client::EngineEvent;
use mpsshim_proto::message::Op;
use mpsshim_proto::ops::Change;
use mpsshim_proto::ring::Consumer;
use mpsshim_proto::segment::{self, RingMemory, reached};
use mpsshim_proto::shm::{Doorbell, Mapping};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Most threads that restore sessions.
const MOST_THREADS: usize = 4;
/// Most servers that may end with the same message next in a session's ring: the message may be the cause.
const MOST_ATTEMPTS: u32 = 3;

/// Time spent on restoring sessions, by kind of record.
#[derive(Debug, Default)]
struct Spent(BTreeMap<String, Duration>);

impl Spent {
    /// Number of kinds named in the log, longest first.
    const NAMED: usize = 5;

    fn add(&mut self, record: &Record, began: Instant) {
        let what = match record.kind {
            Kind::Makes | Kind::Sets => Op::from_u16(record.op).map(|op| format!("{op:?}")),
            kind => Some(format!("{kind:?}")),
        };
        *self.0.entry(what.unwrap_or_default()).or_default() += began.elapsed();
    }

    fn merge(&mut self, other: Spent) {
        for (what, time) in other.0 {
            *self.0.entry(what).or_default() += time;
        }
    }
}

impl fmt::Display for Spent {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<_> = self.0.iter().collect();
        parts.sort_by_key(|(_, time)| std::cmp::Reverse(**time));
        let parts = parts.into_iter().take(Self::NAMED);
        let named: Vec<_> = parts
            .map(|(what, time)| format!("{what} {} ms", time.as_millis()))
            .collect();
        to.write_str(&named.join(", "))
    }
}

/// Restores all sessions that the keeper has, before clients connect.
///
/// # Errors
/// The error of the thread's creation.
pub fn run(shared: &Arc<Shared>) -> std::io::Result<()> {
    if !shared.gpu.keeping.is_on() {
        return Ok(());
    }
    let for_thread = Arc::clone(shared);
    // The driver compiles images on this thread's stack.
    let thread = std::thread::Builder::new()
        .name("adopt".into())
        .stack_size(STACK)
        .spawn(move || adopt(&for_thread))?;
    // A panic has already ended the process.
    let _ = thread.join();
    Ok(())
}

fn adopt(shared: &Arc<Shared>) {
    let Some(keeper) = shared.gpu.keeping.keeper() else {
        return;
    };
    let left = keeper.list().unwrap_or_else(|error| {
        tracing::error!("The keeper does not say what it holds: {error}");
        Left::new()
    });
    match left.is_empty() {
        true => shared.images.end_unclaimed(),
        false => adopt_all(shared, keeper, left),
    }
}

fn adopt_all(shared: &Arc<Shared>, keeper: &Keeper, mut left: Left) {
    let began = Instant::now();
    side::enter(Side::MAIN);
    let contents = adopt_contents(shared, &mut left);
    let of_description = |name: &Name| name.kind == keeper::Kind::Description;
    let sessions: Vec<u64> = left
        .keys()
        .filter(|name| of_description(name))
        .map(Name::number)
        .collect();
    let mut spent = Spent::default();
    let all = sessions.len();
    let begun = sessions.into_iter().filter_map(|id| {
        let begun = begin(shared, id, &mut left, &mut spent);
        begun.map_err(|why| note_lost(shared, id, &why)).ok()
    });
    let begun: Vec<Begun> = begun.collect();
    let begun = open_memory(shared, begun, &mut left, &mut spent);
    let mut begun = make_textures(shared, begun, &mut spent);
    // The next one is taken from the end: those with few objects first.
    begun.sort_by_key(|one| std::cmp::Reverse(one.records.len()));
    // No session executes messages before all are restored: loads of images wait for kernels that run.
    let restored = finish_all(shared, begun, &mut spent);
    shared.images.end_unclaimed();
    // Frees descriptors that no session has claimed.
    drop(contents);
    forget_all(shared, left);
    keeper.settle();
    shared.roster.shared_events.end_restoring();
    let restored: Vec<Box<Session>> = repeat_all(shared, restored).collect();
    let again = restored.len();
    let lost = all - again;
    for session in restored {
        shared.lanes.send_home(session);
    }
    tracing::info!(
        "Sessions of the server before: {again} go on, {lost} have ended, after {} ms ({spent})",
        began.elapsed().as_millis()
    );
}

fn adopt_contents(shared: &Shared, left: &mut Left) -> Vec<Content> {
    let of_content =
        |name: &&Name| [keeper::Kind::Content, keeper::Kind::Pack].contains(&name.kind);
    let names: Vec<Name> = left.keys().filter(of_content).copied().collect();
    let mut contents = Vec::new();
    for name in names {
        let Some(file) = left.remove(&name) else {
            continue;
        };
        let cache = &shared.images.cache;
        let adopted = match name.kind {
            keeper::Kind::Pack => cache.adopt_pack(file.as_fd(), name),
            _ => cache.adopt(file, &name.id).map(|content| vec![content]),
        };
        match adopted {
            Ok(adopted) => contents.extend(adopted),
            Err(error) => {
                tracing::warn!("An image of the server before cannot be read: {error}");
                shared.gpu.keeping.forget(name);
            }
        }
    }
    contents
}

/// The kept descriptors of one session.
struct Parts {
    description: Description,
    segment: Mapping,
    segment_file: OwnedFd,
    bell: OwnedFd,
    socket: OwnedFd,
}

impl Parts {
    fn take(id: u64, left: &mut Left) -> Result<Parts, Lost> {
        let mut part = |kind| {
            let found = left.remove(&Name::numbered(kind, id));
            found.ok_or_else(|| format!("its {kind:?} was not kept"))
        };
        let description = part(keeper::Kind::Description)?;
        let segment_file = part(keeper::Kind::Segment)?;
        let (bell, socket) = (part(keeper::Kind::Bell)?, part(keeper::Kind::Socket)?);
        let unreadable = |error: std::io::Error| format!("it cannot be read: {error}");
        Ok(Parts {
            description: Description::open(description).map_err(unreadable)?,
            segment: Mapping::new(segment_file.as_fd(), segment::SEGMENT_LEN)
                .map_err(unreadable)?,
            segment_file,
            bell,
            socket,
        })
    }
}

/// Makes the keeper close descriptors that no session has claimed.
fn forget_all(shared: &Shared, left: Left) {
    for name in left.into_keys() {
        shared.gpu.keeping.forget(name);
    }
}

fn note_lost(shared: &Shared, id: u64, why: &Lost) {
    shared.gpu.keeping.forget_session(id);
    tracing::warn!("Session {id} of the server before has ended: {why}");
}

/// A session whose memory is restored.
struct Begun {
    session: Box<Session>,
    /// The records of its other objects.
    records: Vec<Record>,
    /// Descriptors that these name.
    files: Left,
    commands: Option<InFlight>,
}

/// Restores the memory of a session.
fn begin(shared: &Arc<Shared>, id: u64, left: &mut Left, spent: &mut Spent) -> Result<Begun, Lost> {
    let parts = Parts::take(id, left)?;
    let (mut session, mut records, commands) = open(shared, id, parts)?;
    shared.roster.remember(&session.shared);
    shared.share_guarantees();
    let info = session.shared.info.clone();
    shared.roster.tell(EngineEvent::Connected(info));
    session.enter();
    records.sort_by_key(stage_of);
    let memory = records.partition_point(|record| stage_of(record) <= Stage::Memory);
    let others = records.split_off(memory);
    match realise(shared, &mut session, &records, left, spent) {
        Ok(()) => Ok(Begun {
            session,
            files: take_files(id, &others, left),
            records: others,
            commands,
        }),
        Err(why) => {
            dispatch::end(shared, session, Some(why.clone()));
            Err(why)
        }
    }
}

/// Opens the memory again that sessions have opened of others.
fn open_memory(
    shared: &Arc<Shared>,
    mut begun: Vec<Begun>,
    left: &mut Left,
    spent: &mut Spent,
) -> Vec<Begun> {
    let opened = take_records(&mut begun, Kind::Opened);
    if opened.is_empty() {
        return begun;
    }
    let blocks: BTreeSet<u64> = opened
        .iter()
        .filter_map(|(_, record)| block_of(record))
        .collect();
    for Begun { session, .. } in &begun {
        let grants = session.objects.grants.values();
        for grant in grants.filter(|grant| blocks.contains(&grant.start)) {
            keep_in_place(session, grant);
            shared.roster.shares.note_restored(grant);
        }
    }
    let begun = make_each(shared, begun, opened, left, spent);
    shared.roster.shares.end_restoring();
    begun
}

/// Restores the texture and surface objects of all sessions in the order of their numbers, in which the driver gives them in
/// a new context.
fn make_textures(shared: &Arc<Shared>, mut begun: Vec<Begun>, spent: &mut Spent) -> Vec<Begun> {
    let mut textures = take_records(&mut begun, Kind::Texture);
    textures.sort_by_key(|(_, record)| record.key & !SURFACE);
    // Only memory has descriptors.
    let begun = make_each(shared, begun, textures, &mut Left::new(), spent);
    shared.gpu.texture_numbers.clear(&shared.gpu);
    begun
}

/// Takes the records of a kind, with the positions of their sessions.
fn take_records(begun: &mut [Begun], kind: Kind) -> Vec<(usize, Record)> {
    let mut taken = Vec::new();
    for (at, one) in begun.iter_mut().enumerate() {
        let found = one.records.extract_if(.., |record| record.kind == kind);
        taken.extend(found.map(|record| (at, record)));
    }
    taken
}

/// Restores objects of several sessions, in this order. Returns the sessions that have all of theirs.
fn make_each(
    shared: &Arc<Shared>,
    mut begun: Vec<Begun>,
    records: Vec<(usize, Record)>,
    left: &mut Left,
    spent: &mut Spent,
) -> Vec<Begun> {
    let mut lost: BTreeMap<usize, Lost> = BTreeMap::new();
    for (at, record) in records {
        if lost.contains_key(&at) {
            continue;
        }
        let session = &mut begun[at].session;
        session.enter();
        let record = std::slice::from_ref(&record);
        if let Err(why) = realise(shared, session, record, left, spent) {
            lost.insert(at, why);
        }
    }
    let mut kept = Vec::new();
    for (at, one) in begun.into_iter().enumerate() {
        match lost.remove(&at) {
            None => kept.push(one),
            Some(why) => {
                let id = one.session.shared.info.session;
                forget_all(shared, one.files);
                dispatch::end(shared, one.session, Some(why.clone()));
                note_lost(shared, id, &why);
            }
        }
    }
    kept
}

/// Memory of a device needs its context, so that comes before.
fn stage_of(record: &Record) -> Stage {
    match (record.kind, Op::from_u16(record.op)) {
        (Kind::Makes, Some(Op::Attach)) => Stage::First,
        // A client may have more memory than it allows itself from now on.
        (Kind::Sets, Some(Op::LimitMemory)) => Stage::Last,
        _ => record.kind.stage(),
    }
}

/// Restores the other objects of the sessions, several sessions at a time. Returns the restored ones.
fn finish_all(shared: &Arc<Shared>, begun: Vec<Begun>, spent: &mut Spent) -> Vec<Restored> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = processors.min(MOST_THREADS).min(begun.len());
    let (queue, done) = (
        Mutex::new(begun),
        Mutex::new((Vec::new(), Spent::default())),
    );
    let work = || {
        let mut own = Spent::default();
        while let Some(begun) = { queue.lock().pop() } {
            let id = begun.session.shared.info.session;
            panics::works_for(Some(id));
            match finish(shared, begun, &mut own) {
                Ok(restored) => done.lock().0.push(restored),
                Err(why) => note_lost(shared, id, &why),
            }
        }
        done.lock().1.merge(own);
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // The driver compiles images on these threads' stacks.
            let builder = std::thread::Builder::new().name("adopt".into());
            if let Err(error) = builder.stack_size(STACK).spawn_scoped(scope, work) {
                tracing::warn!("Sessions are restored by fewer threads: {error}");
                break;
            }
        }
        work();
        panics::works_for(None);
    });
    let (mut restored, others) = done.into_inner();
    spent.merge(others);
    restored.sort_by_key(|(session, _): &Restored| session.shared.info.session);
    restored
}

/// Restores the other objects of a session.
fn finish(shared: &Arc<Shared>, begun: Begun, spent: &mut Spent) -> Result<Restored, Lost> {
    let Begun {
        mut session,
        records,
        mut files,
        commands,
    } = begun;
    // If it takes long, the last such lines name the client.
    tracing::info!("Restoring client {}", session.shared.info);
    session.enter();
    let objects = records.partition_point(|record| stage_of(record) <= Stage::Objects);
    let (objects, others) = records.split_at(objects);
    let made = realise(shared, &mut session, objects, &mut files, spent)
        .and_then(|()| make_room(shared, &mut session, objects, &mut files, spent))
        .and_then(|()| realise(shared, &mut session, others, &mut files, spent));
    forget_all(shared, files);
    let made = made.and_then(|()| {
        let watched = shared.roster.watch_socket(&session.shared);
        watched.map_err(|error| format!("its connection cannot be watched: {error}"))
    });
    session.objects.graphs.restored();
    session.lasting.times.restored();
    // If this server ends before it has executed them, the next one has to.
    let journal = session.shared.description.journal();
    journal.set_owed(commands.is_some());
    if commands.is_some() {
        session.objects.pools.withhold();
    }
    session.shared.description.reset();
    session.lasting.kept = true;
    session.note_bonds(&shared.images);
    match made {
        Ok(()) => Ok((session, commands)),
        Err(why) => {
            dispatch::end(shared, session, Some(why.clone()));
            Err(why)
        }
    }
}

/// Loads images again that have variables where the client knows others, before anything depends on their addresses.
fn make_room(
    shared: &Arc<Shared>,
    session: &mut Session,
    objects: &[Record],
    files: &mut Left,
    spent: &mut Spent,
) -> Result<(), Lost> {
    for _ in 0..MOST_LOADS {
        let images = images_in_the_way(session);
        if images.is_empty() {
            break;
        }
        for image in images {
            let known = objects.iter().filter(|one| one.kind == Kind::Variable);
            let again = load_restored_elsewhere(session, shared, image, known);
            // An image that can be loaded once only stays where it is.
            for record in again.unwrap_or_default() {
                realise(shared, session, std::slice::from_ref(record), files, spent)?;
            }
        }
    }
    Ok(())
}

/// Tells a client, through its segment, that its session has ended.
fn turn_away(parts: Parts, uid: u32, why: Lost) -> Lost {
    segment::end(&parts.segment, CUDA_ERROR_MPS_RPC_FAILURE.0);
    drop(Stranger::new(parts.socket, uid));
    why
}

/// A session in its initial state, the records of its objects, and the commands to execute again once it has these.
type Opened = (Box<Session>, Vec<Record>, Option<InFlight>);

/// Creates the session in its initial state.
fn open(shared: &Arc<Shared>, id: u64, parts: Parts) -> Result<Opened, Lost> {
    let mut records = Vec::new();
    let (mut client, mut ring) = (None, None);
    if parts.description.is_readable() {
        // Before the records are read, of which it may drop the last ones.
        ring = Some(resume(&parts));
        for record in parts.description.records() {
            tracing::trace!("record {record}");
            match record.kind {
                Kind::Client => client = record.state::<Client>(),
                _ => records.push(record),
            }
        }
    }
    let (Some(client), Some(ring)) = (client, ring) else {
        let why = "it is of another release".to_owned();
        return Err(turn_away(parts, 0, why));
    };
    let uid = client.info.uid;
    let (rings, commands) = match ring.and_then(|ring| may_go_on(&parts, ring)) {
        Ok(found) => found,
        Err(why) => {
            note_torn(shared, &parts);
            return Err(turn_away(parts, uid, why));
        }
    };
    let before = parts.description.take_over();
    let commands = commands.map(|commands| InFlight { commands, before });
    let account = match shared.roster.admission.users().place(uid) {
        Ok(place) => Account::of_user(place),
        Err(error) => {
            let why = format!("its user's memory cannot be counted: {error}");
            return Err(turn_away(parts, uid, why));
        }
    };
    let partitions = shared.roster.limits.lock().partitions.clone();
    let chosen = client.info.partition.as_deref();
    let places = (shared.gpu).places(client.terms.threads, partitions.as_ref(), chosen);
    let places = places.map_err(|why| why.to_string());
    let places = places.and_then(|places| with_sizes(places, &records));
    let places = match places {
        Ok(places) => places,
        Err(why) => {
            let why = format!("its part of the devices cannot be had: {why}");
            return Err(turn_away(parts, uid, why));
        }
    };
    // If that fails, the client sees its connection closed.
    let registration = slow::run::register_segment(shared, parts.segment)
        .map_err(|status| format!("its segment cannot be registered: {status}"))?;
    slow::run::limit_memory(shared, &account, &client.memory);
    shared.roster.admission.readmit(id);
    shared.roster.fairness.admit(client.terms.priority);
    let segment = Segment {
        registration,
        file: MemoryFile::adopt(parts.segment_file),
        pin: shared.gpu.pinned.add(uid, segment::SEGMENT_LEN as u64),
    };
    let _ = seqpacket::set_nonblocking(&parts.socket, true);
    let connection = (
        Doorbell::from_fd(parts.bell),
        Stranger::new(parts.socket, uid),
    );
    let description = Arc::new(parts.description);
    let own = SessionShared::new(
        client.info,
        segment,
        connection,
        (client.terms, account),
        description,
    );
    let guarantees = slow::run::of_devices(shared, &client.guarantee);
    own.suspension.ask_guarantees(guarantees.collect());
    let own = Arc::new(own);
    let weight = own.description.weight().unwrap_or(client.weight);
    shared.roster.fairness.set_weight(&own.standing, weight);
    let home = shared.lanes.least_loaded();
    let mut session = Box::new(Session::new(own, home));
    [session.inbox.consumer, session.inbox.express] = rings;
    session.objects.places = places;
    session.flow.repeats = session.shared.description.journal().is_on();
    Ok((session, records, commands))
}

/// Notes the shared events that a lost session with work in flight has recorded.
fn note_torn(shared: &Shared, parts: &Parts) {
    let flag = |slot: u32, value: u32| reached(segment::flag_of(&parts.segment, slot), value);
    if !parts.description.is_at_rest(flag) {
        let events = &shared.roster.shared_events;
        events.note_torn(recorded_in(&parts.description));
    }
}

/// Its command ring and its express ring, which are valid as long as the segment's mapping.
type Rings = [Consumer<RingMemory>; 2];

fn header_of(parts: &Parts) -> &segment::Header {
    // SAFETY: the mapping has SEGMENT_LEN bytes, and its first page is a header, which is all atomics.
    unsafe { &*parts.segment.base().cast() }
}

/// The command ring of a session, at the first message that its server had not executed.
fn resume(parts: &Parts) -> Result<Consumer<RingMemory>, Lost> {
    let (header, description) = (header_of(parts), &parts.description);
    // A request that was answered, but not taken from the ring any more.
    let taken = header.tail.0.load(Ordering::Acquire);
    let answers = header.answers.0.load(Ordering::Acquire);
    if let Some(position) = description.answered(taken, answers) {
        header.tail.0.store(position, Ordering::Release);
    }
    // SAFETY: the mapping has SEGMENT_LEN bytes and is kept by the session that gets the consumer.
    let ring = unsafe { RingMemory::new(parts.segment.base()) };
    let mut consumer = Consumer::resume(ring).map_err(|violation| violation.to_string())?;
    settle_change(description, &mut consumer)?;
    Ok(consumer)
}

/// Checks whether a session may be restored. Returns its rings, and the commands to execute again.
fn may_go_on(
    parts: &Parts,
    consumer: Consumer<RingMemory>,
) -> Result<(Rings, Option<Vec<Entry>>), Lost> {
    let header = header_of(parts);
    let rested = header.replay.0.rested.load(Ordering::Acquire);
    let (description, journal) = (&parts.description, parts.description.journal());
    let bonds = match journal.is_on() {
        true => description.bonds_at(rested),
        false => description.bonds(),
    };
    if !bonds.is_empty() {
        return Err(format!("it was bound to its context by {bonds}"));
    }
    let flag = |slot: u32, value: u32| reached(segment::flag_of(&parts.segment, slot), value);
    let mut commands = None;
    // Changes that are not saved are made by executing the commands again.
    if !description.is_at_rest(flag) || !description.bonds().is_empty() {
        commands = Some(pending(journal, header, flag)?);
        journal.note_attempt(rested)?;
    }
    let (taken, described) = (consumer.place().position(), parts.description.described());
    if is_behind(described, taken) {
        return Err("a call of its client was executed and not answered".into());
    }
    if parts.description.note_remake() > MOST_ATTEMPTS {
        return Err("servers end while they make it again".into());
    }
    if consumer.has_message() && parts.description.note_attempt(taken) > MOST_ATTEMPTS {
        return Err("servers end with its next call".into());
    }
    // SAFETY: as above.
    let express = unsafe { RingMemory::express(parts.segment.base()) };
    let express = Consumer::resume(express).map_err(|violation| violation.to_string())?;
    Ok(([consumer, express], commands))
}

/// Completes or undoes the changes by the message at the ring's tail, during which its server has ended.
fn settle_change(
    description: &Description,
    consumer: &mut Consumer<RingMemory>,
) -> Result<(), Lost> {
    let found = consumer.peek().map_err(|violation| violation.to_string())?;
    let taken = consumer.place().position();
    let (Some(found), Some(begun)) = (found, description.begun(taken)) else {
        return Ok(());
    };
    let is_described = !is_behind(begun.behind, description.described());
    // The release of memory appends one record, then makes the keeper drop the memory.
    let is_done = |op: Op| {
        let releases = op.change() == Change::Own && description.has_changed(&begun);
        !op.is_request() && (is_described || releases)
    };
    if Op::from_u16(found.op).is_some_and(is_done) {
        consumer.consume(&found);
        return Ok(());
    }
    let unbound = begun.bonds.0 & !description.bonds().0 != 0;
    if unbound || !description.undo(&begun, taken) {
        return Err("a call of its client was executed in part".into());
    }
    Ok(())
}

/// Restores objects of a session, in this order.
fn realise(
    shared: &Arc<Shared>,
    session: &mut Session,
    records: &[Record],
    left: &mut Left,
    spent: &mut Spent,
) -> Result<(), Lost> {
    session.flow.moment = Some(Moment::endless());
    let outcome = records.iter().try_for_each(|record| {
        let began = Instant::now();
        let made = make(shared, session, record, left);
        spent.add(record, began);
        made
    });
    session.flow.moment = None;
    outcome
}

/// The types of the kinds, by the names of their rows.
mod kinds {
    pub use crate::engine::calls::array::Texture;
    pub use crate::engine::calls::context::ClientLimit as Limit;
    pub use crate::engine::calls::graph::saved::{Graph, GraphExec};
    pub use crate::engine::calls::link::Linked;
    pub use crate::engine::calls::module::Variable;
    pub use crate::engine::calls::{Makes, Sets};
    pub use crate::engine::lasting::arrays::Array;
    pub use crate::engine::lasting::files::Registered;
    pub use crate::engine::lasting::memory::{Host, Memory};
    pub use crate::engine::lasting::messages::{Client, Leaves};
    pub use crate::engine::lasting::pools::{Pool, PoolMemory};
    pub use crate::engine::lasting::resources::{Confined, Resource};
    pub use crate::engine::lasting::shared_events::SharedEvent;
    pub use crate::engine::lasting::shares::{Given, Opened, Stays};
    pub use crate::engine::lasting::times::{Captured, Time};
    pub use crate::engine::lasting::virtual_memory::{
        Access, Exported, Mapping, Physical, Released, Reservation, Retained,
    };
    pub use crate::engine::objects::snapshot::session::Variables;
}

macro_rules! make_by_kind {
    ($($(#[$doc:meta])* $name:ident = $number:literal: $version:literal, $stage:ident, $end:ident $(($of:ident))?;)*) => {
        /// Makes the state of a record again.
        fn make(
            shared: &Shared,
            session: &mut Session,
            record: &Record,
            left: &mut Left,
        ) -> Result<(), Lost> {
            match record.kind {
                $(Kind::$name => lasting::make::<kinds::$name>(record, session, (shared, left)),)*
                Kind::Ends | Kind::Gone => Ok(()),
            }
        }
    };
}

for_each_kind!(make_by_kind);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lasting::Lasting;
    use mpsshim_model::bonds::Bonds;
    use mpsshim_proto::ring::Producer;
    use mpsshim_proto::shm::sealed_memfd;
    use mpsshim_proto::wire;

    /// A record of each kind, as written by a server: lines of [`Record`]'s `Display`. With
    /// `mpsshim_server::engine::scheduling::adopt=trace` in `MPSSHIM_LOG`, server.log has the records of each restored session.
    const RECORDED: &str = include_str!("../../recorded-session.txt");

    fn record(line: &str) -> Record {
        let fields: Vec<&str> = line.split(' ').collect();
        let [kind, op, key, bytes] = fields[..] else {
            panic!("{line}");
        };
        let kinds = (0..=u16::from(u8::MAX)).filter_map(Kind::of);
        let mut named = kinds.filter(|one| format!("{one:?}") == kind);
        let digits = bytes.as_bytes().as_chunks::<2>().0.iter();
        let byte = |pair: &[u8; 2]| {
            u8::from_str_radix(str::from_utf8(pair)?, 16).map_err(anyhow::Error::from)
        };
        Record {
            kind: named.next().expect(kind),
            op: op.parse().expect(op),
            key: key.parse().expect(key),
            bytes: digits.map(|pair| byte(pair).expect(bytes)).collect(),
        }
    }

    fn reads<K: Lasting>(record: &Record) {
        let state: K::State = record.state().unwrap_or_else(|| {
            panic!("{record}: cannot be read. A change of the encoding needs another version in kinds.rs, and another record here")
        });
        let again = Record::of(record.kind, record.op, record.key, &state);
        assert_eq!(
            again.bytes, record.bytes,
            "{record}: has changed its encoding; it needs another version"
        );
    }

    macro_rules! read_by_kind {
        ($($(#[$doc:meta])* $name:ident = $number:literal: $version:literal, $stage:ident, $end:ident $(($of:ident))?;)*) => {
            const KINDS: &[Kind] = &[$(Kind::$name),*];

            fn read(record: &Record) {
                match record.kind {
                    $(Kind::$name => reads::<kinds::$name>(record),)*
                    Kind::Ends | Kind::Gone => panic!("{record}: has no state"),
                }
            }
        };
    }

    for_each_kind!(read_by_kind);

    /// The next release has to read the records of this one.
    #[test]
    fn recorded_sessions_are_read() {
        let records: Vec<Record> = RECORDED.lines().map(record).collect();
        records.iter().for_each(read);
        let found: BTreeSet<u16> = records.iter().map(|one| one.kind as u16).collect();
        let missing: Vec<&Kind> = KINDS
            .iter()
            .filter(|kind| !found.contains(&(**kind as u16)))
            .collect();
        assert!(missing.is_empty(), "no record of {missing:?}");
    }

    /// A ring with one message, and the description of its session while the message is executed.
    struct Interrupted {
        ring: Mapping,
        description: Description,
        behind: u64,
    }

    impl Interrupted {
        fn new(op: Op) -> Interrupted {
            let file = sealed_memfd(c"segment", segment::SEGMENT_LEN as u64).expect("a file");
            let ring = Mapping::new(file.as_fd(), segment::SEGMENT_LEN).expect("a mapping");
            // SAFETY: the mapping has SEGMENT_LEN bytes and lives longer.
            let mut producer = Producer::new(unsafe { RingMemory::new(ring.base()) });
            let room = producer.reserve(16).expect("room");
            producer.publish(room, op as u16, 0, 1);
            let behind = producer.position();
            let description = Description::new(wire::OWN).expect("a description");
            assert!(description.append(&Record::ending(Kind::Gone, 0, 1)));
            description.set_bonds(Bonds::ARRAYS, 0);
            description.begin_change(behind);
            Interrupted {
                ring,
                description,
                behind,
            }
        }

        fn append(&self) {
            let record = Record::of(Kind::Sets, 502, 2, &());
            assert!(self.description.append(&record));
        }

        /// Whether the message was taken, and the number of records.
        fn settled(&self) -> Result<(bool, usize), Lost> {
            // SAFETY: the mapping has SEGMENT_LEN bytes and lives longer.
            let ring = unsafe { RingMemory::new(self.ring.base()) };
            let mut consumer = Consumer::resume(ring).expect("a ring");
            settle_change(&self.description, &mut consumer)?;
            let taken = consumer.place().position() == self.behind;
            assert!(taken || self.description.described() < self.behind);
            Ok((taken, self.description.records().len()))
        }
    }

    #[test]
    fn an_interrupted_change_is_completed_or_undone() {
        let ops = [
            Op::MemRelease,
            Op::FileUnregister,
            Op::UnmapMemory,
            Op::StreamCreate,
        ];
        for op in ops {
            let begun = Interrupted::new(op);
            assert_eq!(begun.settled(), Ok((false, 0)), "{op:?}: nothing was done");
            begun.append();
            let is_done = matches!(op, Op::MemRelease | Op::FileUnregister);
            let records = usize::from(is_done);
            assert_eq!(begun.settled(), Ok((is_done, records)), "{op:?}");
            let begun = Interrupted::new(op);
            begun.append();
            begun.description.set_described(begun.behind);
            let is_done = !op.is_request();
            let records = usize::from(is_done);
            assert_eq!(begun.settled(), Ok((is_done, records)), "{op:?}: described");
        }
        let begun = Interrupted::new(Op::UnmapMemory);
        begun.description.set_bonds(Bonds::default(), 0);
        assert!(begun.settled().is_err(), "it was bound before");
        begun.description.cancel_change();
        assert_eq!(begun.settled(), Ok((false, 0)), "it was left in the ring");
    }
}
