//! Streams, and the completion markers (marks) by which threads wait for them.
//!
//! A stream counts its operations. A mark is a message that makes the GPU write a number into the stream's completion
//! flag once everything before it is done. The stream remembers which operations its last mark covers, so that a second
//! wait, or a query, needs no message. Counts and marks change under the ring's lock, so that a mark covers exactly the
//! operations before it in the ring, and the numbers rise in ring order.
//!
//! The legacy default stream is ordered after the work of its context's blocking streams: for it the context's count is
//! used.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use mpsshim_api::cuda::{
    CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUaccessPolicyWindow,
};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::{Mark, MarkEvent, Object, Op, StreamCreate, UNAWAITED};
use mpsshim_proto::segment::reached;
use parking_lot::Mutex;
use zerocopy::{Immutable, IntoBytes};

use crate::ffi::Status;
use crate::proxy::context::{self, Context};
use crate::proxy::objects::{Entry, Table};
use crate::proxy::pages;
use crate::proxy::replay;
use crate::proxy::submit::{Ring, Session};
use crate::proxy::wait::{self, Policy};
use crate::proxy::waited::{self, Seen};

/// Results of `cuCtxGetStreamPriorityRange` on devices of compute capability 7.0 and later.
pub const LEAST_PRIORITY: i32 = 0;
/// As above.
pub const GREATEST_PRIORITY: i32 = -5;

/// Every stream of the process.
pub static STREAMS: Table<Stream> = Table::new(Kind::Stream);

/// A stream and its handle.
pub type StreamRef = &'static Entry<Stream>;

/// Client-side state of a stream.
#[derive(Debug, Default)]
pub struct Stream {
    context: AtomicPtr<Context>,
    slot: AtomicU32,
    flags: AtomicU32,
    priority: AtomicI32,
    id: AtomicU64,
    legacy: AtomicBool,
    attributes: Mutex<Attributes>,
    /// Operations given to this stream.
    own: Progress,
    /// Legacy streams: operations given to all blocking streams of the context.
    joined: Progress,
    /// Value of the last mark.
    mark: AtomicU32,
    /// No thread waited for the last mark when it was submitted.
    unawaited: AtomicBool,
    /// The capture that it takes part in, or 0 ([`crate::proxy::capture`]).
    capture: AtomicU64,
}

/// `cuStreamSetAttribute`.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    pub window: CUaccessPolicyWindow,
    /// `CU_SYNC_POLICY_*`; -1: none was set.
    pub synchronization: i32,
    pub domain_map: [u8; 2],
    pub domain: u32,
}

impl Default for Attributes {
    fn default() -> Attributes {
        Attributes {
            window: CUaccessPolicyWindow::default(),
            synchronization: -1,
            domain_map: [0, 1],
            domain: 0,
        }
    }
}

/// Counts of operations: the last mark's, and the most that is known to be complete.
#[derive(Debug, Default)]
struct Progress {
    /// Not used for [`Stream::joined`]: the context counts.
    submitted: AtomicU64,
    marked: AtomicU64,
    reached: AtomicU64,
}

impl Progress {
    fn reset(&self) {
        self.submitted.store(0, Ordering::Relaxed);
        self.marked.store(0, Ordering::Relaxed);
        self.reached.store(0, Ordering::Relaxed);
    }
}

impl Stream {
    /// Its context.
    #[inline]
    pub fn context(&self) -> &'static Context {
        // SAFETY: set before the stream is published, to a context, none of which is ever freed.
        unsafe { &*self.context.load(Ordering::Acquire) }
    }

    /// `CU_STREAM_*`.
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    /// Its priority, clamped as the driver does.
    pub fn priority(&self) -> i32 {
        self.priority.load(Ordering::Relaxed)
    }

    /// Gives it another priority.
    pub fn set_priority(&self, priority: i32) {
        let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
        self.priority.store(priority, Ordering::Relaxed);
    }

    /// `cuStreamGetAttribute`.
    pub fn attributes(&self) -> Attributes {
        *self.attributes.lock()
    }

    /// `cuStreamSetAttribute`.
    pub fn set_attributes(&self, attributes: Attributes) {
        *self.attributes.lock() = attributes;
    }

    /// How threads wait for it.
    pub fn policy(&self) -> Policy {
        match self.attributes.lock().synchronization {
            1 => Policy::Auto,
            2 => Policy::Spin,
            3 => Policy::Yield,
            4 => Policy::Block,
            _ => self.context().policy(),
        }
    }

    /// `cuStreamGetId`: unique in the life of the process.
    pub fn id(&self) -> u64 {
        self.id.load(Ordering::Relaxed)
    }

    /// Its completion flag.
    pub fn slot(&self) -> u32 {
        self.slot.load(Ordering::Relaxed)
    }

    /// The capture that it takes part in, or 0.
    #[inline]
    pub fn capture(&self) -> u64 {
        self.capture.load(Ordering::Relaxed)
    }

    /// Whether its operations are captured into a graph.
    #[inline]
    pub fn is_capturing(&self) -> bool {
        self.capture() != 0
    }

    /// Sets the capture that it takes part in; 0: none.
    pub fn set_capture(&self, id: u64) {
        self.capture.store(id, Ordering::Relaxed);
    }

    /// Whether it is its context's legacy default stream.
    pub fn is_legacy(&self) -> bool {
        self.legacy.load(Ordering::Relaxed)
    }

    /// The position that a wait for this stream must reach.
    pub fn position(&self) -> u64 {
        if self.is_legacy() {
            self.context().joined.load(Ordering::Acquire)
        } else {
            self.own.submitted.load(Ordering::Acquire)
        }
    }

    /// The position that it is known to have reached, on the scale of [`Stream::position`].
    pub fn reached(&self) -> u64 {
        if self.is_legacy() {
            self.joined.reached.load(Ordering::Acquire)
        } else {
            self.own.reached.load(Ordering::Acquire)
        }
    }

    /// The position of its last mark, on the same scale.
    fn marked(&self) -> u64 {
        if self.is_legacy() {
            self.joined.marked.load(Ordering::Acquire)
        } else {
            self.own.marked.load(Ordering::Acquire)
        }
    }

    /// Whether it was given work of its own that is not known to be complete.
    pub fn is_busy(&self) -> bool {
        self.own.reached.load(Ordering::Acquire) < self.own.submitted.load(Ordering::Acquire)
    }

    /// Counts an operation that was just put into the ring, unless it is captured.
    #[inline]
    pub fn count(&self, ring: &Ring<'_>) {
        if self.is_capturing() {
            return;
        }
        let add = |counter: &AtomicU64| {
            // The ring's lock is held: there is no other writer.
            counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Release);
        };
        add(&self.own.submitted);
        if self.flags() & CU_STREAM_NON_BLOCKING == 0 {
            add(&self.context().joined);
        }
        add(&ring.session().operations);
    }

    /// The last mark, as something to wait for.
    fn last_mark(&self) -> Target {
        Target {
            slot: self.slot(),
            value: self.mark.load(Ordering::Relaxed),
            own: self.own.marked.load(Ordering::Relaxed),
            joined: self.joined.marked.load(Ordering::Relaxed),
        }
    }

    /// Records that a mark was reached.
    fn note(&self, target: Target) {
        self.own.reached.fetch_max(target.own, Ordering::AcqRel);
        self.joined
            .reached
            .fetch_max(target.joined, Ordering::AcqRel);
    }
}

/// A mark: the flag and the value to wait for, and the operations that it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub slot: u32,
    pub value: u32,
    own: u64,
    joined: u64,
}

impl Target {
    /// Whether the GPU has written it.
    pub fn is_reached(self, session: &Session) -> bool {
        reached(session.flag(self.slot).load(Ordering::Acquire), self.value)
    }
}

/// Makes a stream. `legacy`: it is its context's legacy default stream.
pub fn create(
    session: &Session,
    context: &'static Context,
    flags: u32,
    priority: i32,
    legacy: bool,
) -> Status<StreamRef> {
    static IDS: AtomicU64 = AtomicU64::new(1);
    if flags & !CU_STREAM_NON_BLOCKING != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let after = if legacy || flags & CU_STREAM_NON_BLOCKING != 0 {
        0
    } else {
        self::legacy(session, context)?.handle()
    };
    let (slot, value) = session.take_slot().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let Some(entry) = STREAMS.claim() else {
        session.put_back_slot(slot);
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    };
    let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
    entry
        .context
        .store(ptr::from_ref(context).cast_mut(), Ordering::Release);
    entry.slot.store(slot, Ordering::Relaxed);
    entry.flags.store(flags, Ordering::Relaxed);
    entry.priority.store(priority, Ordering::Relaxed);
    entry
        .id
        .store(IDS.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    entry.legacy.store(legacy, Ordering::Relaxed);
    entry.set_attributes(Attributes::default());
    entry.own.reset();
    entry.joined.reset();
    entry.mark.store(value, Ordering::Relaxed);
    entry.set_capture(0);
    let handle = STREAMS.handle_of(entry);
    session.submit(
        Op::StreamCreate,
        &StreamCreate {
            stream: handle,
            green: context.streams_in(),
            legacy: if legacy { handle } else { after },
            priority,
            device: context.server_device,
        },
    )?;
    STREAMS.publish(entry);
    Ok(entry)
}

/// The legacy default stream of a context, made on first use.
#[inline]
pub fn legacy(session: &Session, context: &'static Context) -> Status<StreamRef> {
    match made_legacy(context) {
        Some(stream) => Ok(stream),
        None => make_legacy(session, context),
    }
}

#[inline]
fn made_legacy(context: &Context) -> Option<StreamRef> {
    // SAFETY: null, or an entry of the table of streams, set by `make_legacy`; entries are never freed.
    unsafe { context.legacy().cast::<Entry<Stream>>().as_ref() }
}

#[cold]
fn make_legacy(session: &Session, context: &'static Context) -> Status<StreamRef> {
    let _making = context.making_legacy();
    if let Some(stream) = made_legacy(context) {
        return Ok(stream);
    }
    context.usable()?;
    let made = create(session, context, 0, 0, true)?;
    context.own_stream(made.handle());
    context.set_legacy(std::ptr::from_ref(made).cast());
    Ok(made)
}

/// The streams of a context.
pub fn of_context(context: &Context) -> Vec<StreamRef> {
    let handles = context.streams().into_iter();
    handles.filter_map(|handle| STREAMS.get(handle)).collect()
}

/// The streams of all contexts.
pub fn all() -> Vec<StreamRef> {
    let contexts = context::all();
    contexts
        .iter()
        .flat_map(|context| of_context(context))
        .collect()
}

/// Streams that are being destroyed.
static ENDING: AtomicU32 = AtomicU32::new(0);

/// Whether any stream but this one was given work that is not known to be complete. Destroyed streams count too. Takes no
/// lock, so that handlers of faults may ask.
pub fn any_busy_but(session: &Session, except: Option<StreamRef>) -> bool {
    let counts = |stream: &StreamRef| except.is_none_or(|other| !std::ptr::eq(other, *stream));
    let mut others = STREAMS.live().filter(counts);
    others.any(|stream| stream.is_busy())
        || ENDING.load(Ordering::SeqCst) != 0
        || session.may_have_retiring()
}

/// Whether any stream was given work that is not known to be complete. Destroyed streams count too.
pub fn any_busy(session: &Session) -> bool {
    any_busy_but(session, None)
}

/// Looks which streams have completed the work before their last mark, and puts marks behind the work of the others, so that the
/// next look tells: programs that wait for one stream leave the rest without marks.
pub fn look_at_busy(ring: &mut Ring<'_>) {
    for stream in STREAMS.live().filter(|stream| stream.is_busy()) {
        let target = stream.last_mark();
        if target.is_reached(ring.session()) {
            stream.note(target);
        }
        let submitted = stream.own.submitted.load(Ordering::Relaxed);
        let is_marked = stream.own.marked.load(Ordering::Relaxed) >= submitted;
        if !is_marked && stream.handle() != 0 && !stream.is_capturing() {
            // Without the mark, the stream counts as busy.
            let _ = mark_in(ring, stream, (stream.handle(), UNAWAITED));
        }
    }
}

/// Destroys a stream that [`crate::proxy::capture`] no longer knows; work already queued still runs.
pub fn destroy(session: &Session, handle: u64) -> Status {
    let entry = STREAMS.get(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let mut ring = session.ring()?;
    ENDING.fetch_add(1, Ordering::SeqCst);
    let done = destroy_with(session, &mut ring, entry);
    ENDING.fetch_sub(1, Ordering::SeqCst);
    done
}

fn destroy_with(session: &Session, ring: &mut Ring<'_>, entry: StreamRef) -> Status {
    let handle = entry.handle();
    let entry = STREAMS.retire(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let captured = entry.is_capturing();
    // The last mark tells when the slot may be reused, and lets other threads wait for work that still runs.
    let last = if !captured
        && entry.is_busy()
        && entry.own.marked.load(Ordering::Relaxed) < entry.own.submitted.load(Ordering::Relaxed)
    {
        mark_in(ring, entry, (handle, 0))?
    } else {
        entry.last_mark()
    };
    ring.put(Op::StreamDestroy, 0, &Object { object: handle }, &[])?;
    entry.set_capture(0);
    session.retire_slot(last.slot, last.value);
    STREAMS.recycle(entry);
    Ok(())
}

/// Puts one operation of a stream into the ring.
#[inline]
pub fn submit<T: IntoBytes + Immutable>(
    session: &Session,
    stream: StreamRef,
    op: Op,
    body: &T,
    trailing: &[u8],
) -> Status {
    let trailing = &*pages::own(trailing);
    let _work = pages::before_work_in(session, Some(stream))?;
    submit_apart(session, stream, op, body, trailing)
}

/// As [`submit`], for operations that touch no managed memory.
#[inline]
pub fn submit_apart<T: IntoBytes + Immutable>(
    session: &Session,
    stream: StreamRef,
    op: Op,
    body: &T,
    trailing: &[u8],
) -> Status {
    let mut ring = session.ring()?;
    ring.put(op, 0, body, trailing)?;
    stream.count(&ring);
    drop(ring);
    if stream.is_capturing() {
        return session.settle(stream.handle());
    }
    Ok(())
}

/// Puts a mark into the ring, one of those with this token that are waited for together, or 0.
fn mark_in(ring: &mut Ring<'_>, stream: &Stream, (handle, token): (u64, u64)) -> Status<Target> {
    let value = stream.mark.load(Ordering::Relaxed).wrapping_add(1);
    ring.put(
        Op::Mark,
        token,
        &Mark {
            stream: handle,
            slot: stream.slot(),
            value,
        },
        &[],
    )?;
    stream.mark.store(value, Ordering::Relaxed);
    stream
        .unawaited
        .store(token == UNAWAITED, Ordering::Relaxed);
    stream.own.marked.store(
        stream.own.submitted.load(Ordering::Relaxed),
        Ordering::Release,
    );
    if stream.is_legacy() {
        let joined = stream.context().joined.load(Ordering::Relaxed);
        stream.joined.marked.store(joined, Ordering::Release);
    }
    Ok(stream.last_mark())
}

/// Puts a mark into the ring that is written once an event is complete: the private stream of the waiting thread waits
/// for the event and writes its own flag.
pub fn mark_event(ring: &mut Ring<'_>, waiter: StreamRef, event: u64) -> Status<Target> {
    let value = waiter.mark.load(Ordering::Relaxed).wrapping_add(1);
    let body = MarkEvent {
        event,
        stream: waiter.handle(),
        slot: waiter.slot(),
        value,
    };
    ring.put(Op::MarkEvent, 0, &body, &[])?;
    waiter.mark.store(value, Ordering::Relaxed);
    Ok(waiter.last_mark())
}

/// A mark behind everything the stream was given so far: the last one if it covers that, else a new one.
pub fn mark(ring: &mut Ring<'_>, stream: StreamRef) -> Status<Target> {
    // The server has to know that a thread waits for the mark.
    if stream.marked() >= stream.position() && !stream.unawaited.load(Ordering::Relaxed) {
        return Ok(stream.last_mark());
    }
    mark_in(ring, stream, (stream.handle(), 0))
}

/// As [`mark`]; `None` when everything is known to be complete.
fn mark_unless_done(session: &Session, stream: StreamRef) -> Status<Option<Target>> {
    session.check()?;
    if stream.reached() >= stream.position() {
        return Ok(None);
    }
    let mut ring = session.ring()?;
    replay::mark_others(&mut ring);
    mark(&mut ring, stream).map(Some)
}

/// Waits for a mark of a stream and takes the error of an earlier message, if any.
pub fn wait_for(session: &Session, stream: &Stream, target: Target, policy: Policy) -> Status {
    wait::wait(session, target.slot, target.value, policy)?;
    stream.note(target);
    waited::done(session, Seen::Wait);
    session.async_error()
}

/// A capturing stream cannot be waited for: the attempt invalidates the capture.
#[cold]
pub fn forbid_wait(session: &Session, stream: StreamRef) -> Status {
    let body = Object {
        object: stream.handle(),
    };
    session.request(Op::CaptureBreak, &body, &[])?;
    Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
}

/// Waits until everything the stream was given is complete.
pub fn synchronize(session: &Session, stream: StreamRef) -> Status {
    if stream.is_capturing() {
        return forbid_wait(session, stream);
    }
    pages::before_wait(session, stream);
    match mark_unless_done(session, stream)? {
        Some(target) => wait_for(session, stream, target, stream.policy()),
        None => {
            waited::done(session, Seen::Wait);
            session.async_error()
        }
    }
}

/// Whether everything the stream was given is complete.
pub fn query(session: &Session, stream: StreamRef) -> Status<bool> {
    if stream.is_capturing() {
        return forbid_wait(session, stream).map(|()| false);
    }
    if let Some(target) = mark_unless_done(session, stream)? {
        if !target.is_reached(session) {
            return Ok(false);
        }
        stream.note(target);
    }
    waited::done(session, Seen::Query);
    session.async_error()?;
    Ok(true)
}

/// Whether the operation at `position` is known to be complete or can be seen to be, without a message.
pub fn has_reached(session: &Session, stream: &Stream, position: u64) -> bool {
    if stream.reached() >= position {
        return true;
    }
    if stream.marked() < position {
        return false;
    }
    let target = stream.last_mark();
    let done = target.is_reached(session);
    if done {
        stream.note(target);
    }
    done
}

/// Waits for all streams of a context (`None`: of every context), destroyed ones included.
pub fn quiesce(session: &Session, only: Option<&Context>) -> Status {
    session.check()?;
    let seen = if only.is_none() {
        Seen::All
    } else {
        Seen::Wait
    };
    let now = session.operations.load(Ordering::Acquire);
    if session.quiet.load(Ordering::Acquire) >= now {
        waited::done(session, seen);
        return session.async_error();
    }
    let streams = match only {
        Some(context) => of_context(context),
        None => all(),
    };
    // A legacy stream is complete with the streams that it is ordered against.
    let legacy = streams.iter().filter(|stream| stream.is_legacy());
    let legacy: Vec<(StreamRef, u64)> = legacy.map(|stream| (*stream, stream.position())).collect();
    let busy: Vec<StreamRef> = streams
        .into_iter()
        .filter(|stream| stream.is_busy())
        .collect();
    if let [stream] = busy[..]
        && stream.handle() != 0
    {
        pages::before_wait(session, stream);
    }
    let mut targets = Vec::with_capacity(busy.len());
    if !busy.is_empty() {
        let mut ring = session.ring()?;
        let token = replay::token(&ring);
        for stream in busy {
            if stream.handle() != 0 {
                let covered = stream.own.marked.load(Ordering::Relaxed)
                    >= stream.own.submitted.load(Ordering::Relaxed)
                    && !stream.unawaited.load(Ordering::Relaxed);
                let target = if covered {
                    stream.last_mark()
                } else {
                    mark_in(&mut ring, stream, (stream.handle(), token))?
                };
                targets.push((stream, target));
            }
        }
    }
    let policy = only.map_or(Policy::Auto, Context::policy);
    for (stream, target) in targets {
        wait::wait(session, target.slot, target.value, policy)?;
        stream.note(target);
    }
    for (slot, value) in session.retiring_slots() {
        wait::wait(session, slot, value, policy)?;
    }
    for (stream, position) in legacy {
        stream.joined.reached.fetch_max(position, Ordering::AcqRel);
    }
    if only.is_none() {
        session.quiet.fetch_max(now, Ordering::AcqRel);
    }
    waited::done(session, seen);
    session.async_error()
}
