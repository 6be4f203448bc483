//! Copies between pageable memory and the device, through memory that the server has registered.
//!
//! Staging is cut into chunks of four sizes: two in the session's segment, two in pinned buffers that are allocated with
//! the first copy of that size. A chunk that a copy to the device reads is reused
//! once a completion marker behind that copy is reached; markers are sent only when chunks run short, or every few chunks
//! of one long copy, since each costs the server more than the copy's message.

use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use mpsshim_proto::message::{Copy, Op, Side};
use mpsshim_proto::segment::STAGING_LEN;
use parking_lot::Mutex;

use crate::ffi::Status;
use crate::proxy::copying::{self, Given, Helpers};
use crate::proxy::memory;
use crate::proxy::replay;
use crate::proxy::stream::{self, StreamRef, Target};
use crate::proxy::submit::{Ring, Session};

const SMALL: u64 = 4 << 10;
const SMALL_COUNT: u64 = 16;
const MEDIUM: u64 = 128 << 10;
const MEDIUM_COUNT: u64 = 7;
/// Copies from this many bytes on use chunks in pinned buffers, for which the segment has no room: with fewer bytes a
/// chunk, the server's calls for them take longer than the copying.
const PINNED_FROM: u64 = 512 << 10;
const PINNED: u64 = 256 << 10;
const PINNED_COUNT: u64 = 16;
/// Copies from this many bytes on use large chunks, and all helpers: for less, those sleep for too long.
const LARGE_FROM: u64 = 4 << 20;
const LARGE: u64 = 2 << 20;
const LARGE_COUNT: u64 = 8;
/// Copies from the device from this many bytes on have helpers and go past the caches: less is read from the caches.
const PAST_CACHES_FROM: u64 = 2 << 20;
/// Chunks of a copy to the device between two marks.
const UNMARKED: usize = 2;
/// Chunks of a copy from the device that are under way at a time.
const IN_FLIGHT: usize = 3;

const _: () = assert!(SMALL * SMALL_COUNT + MEDIUM * MEDIUM_COUNT == STAGING_LEN as u64);

/// Chunks of one size.
#[derive(Debug)]
struct Chunks {
    size: u64,
    side: Side,
    /// Offset in the staging area, or address in the host arena, of the first.
    first: u64,
    count: u64,
    states: Mutex<Vec<State>>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Free,
    /// A thread fills it, or waits to empty it.
    Taken,
    /// A copy reads it.
    Read {
        stream: StreamRef,
        handle: u64,
        /// Position just behind the copy.
        at: u64,
        /// A mark behind the copy, if one was submitted for it.
        mark: Option<Target>,
        /// Order in which chunks were used.
        sequence: u64,
        /// Position in the ring just behind the copy.
        sent: u64,
    },
}

impl Chunks {
    const fn new(size: u64, side: Side, first: u64, count: u64) -> Chunks {
        Chunks {
            size,
            side,
            first,
            count,
            states: Mutex::new(Vec::new()),
        }
    }

    fn offset(&self, chunk: usize) -> u64 {
        self.first + chunk as u64 * self.size
    }

    /// Where a chunk lies in this process.
    fn address(&self, session: &Session, chunk: usize) -> *mut u8 {
        let offset = self.offset(chunk);
        match self.side {
            Side::Host => offset as *mut u8,
            // SAFETY: the chunks of the staging area lie inside it, by the assertion above.
            _ => unsafe { session.staging().add(offset as usize) },
        }
    }

    /// Takes a chunk that is free, or whose copy is done.
    fn try_take(&self, session: &Session) -> Option<usize> {
        let mut states = self.states.lock();
        if states.is_empty() {
            states.resize(self.count as usize, State::Free);
        }
        let found = states.iter().position(|state| match *state {
            State::Free => true,
            State::Taken => false,
            State::Read {
                stream,
                handle,
                at,
                mark,
                ..
            } => {
                mark.is_some_and(|mark| mark.is_reached(session))
                    || stream.handle() == handle && stream::has_reached(session, stream, at)
            }
        })?;
        // The server keeps a copy of the data that came through the staging area.
        if let State::Read { sent, .. } = states[found]
            && self.side == Side::Host
        {
            replay::overwrites(session, sent);
        }
        states[found] = State::Taken;
        Some(found)
    }

    /// Takes a chunk, waiting for one if need be. The caller must hold none.
    fn take(&self, session: &Session) -> Status<usize> {
        loop {
            if let Some(chunk) = self.try_take(session) {
                return Ok(chunk);
            }
            let oldest = {
                let states = self.states.lock();
                states
                    .iter()
                    .enumerate()
                    .filter_map(|(chunk, state)| match *state {
                        State::Read {
                            stream,
                            handle,
                            mark,
                            sequence,
                            ..
                        } => Some((sequence, chunk, stream, handle, mark)),
                        _ => None,
                    })
                    .min_by_key(|found| found.0)
            };
            match oldest {
                Some((sequence, chunk, stream, handle, mark)) => {
                    if stream.handle() == handle {
                        let mark = match mark {
                            Some(mark) => mark,
                            None => stream::mark(&mut session.ring()?, stream)?,
                        };
                        stream::wait_for(session, stream, mark, stream.context().policy())?;
                    } else {
                        // The stream was destroyed: its work is waited for with all other work.
                        stream::quiesce(session, None)?;
                    }
                    let mut states = self.states.lock();
                    if matches!(states[chunk], State::Read { sequence: now, .. } if now == sequence)
                    {
                        states[chunk] = State::Free;
                    }
                }
                // Other threads hold all chunks.
                None => {
                    session.check()?;
                    std::thread::yield_now();
                }
            }
        }
    }

    fn give_back(&self, chunk: usize) {
        self.states.lock()[chunk] = State::Free;
    }

    fn set(&self, chunk: usize, state: State) {
        self.states.lock()[chunk] = state;
    }

    /// Submits the copy of a filled chunk; submits a mark when `limit` chunks have none.
    fn submit_full(
        &self,
        session: &Session,
        stream: StreamRef,
        chunk: usize,
        limit: usize,
        submit: impl Fn(&mut Ring<'_>, (u64, Side)) -> Status,
    ) -> Status {
        let handle = stream.handle();
        let submitted = session.ring().and_then(|mut ring| {
            submit(&mut ring, (self.offset(chunk), self.side))?;
            stream.count(&ring);
            Ok((stream.position(), ring.position()))
        });
        let (at, sent) = match submitted {
            Ok(submitted) => submitted,
            Err(status) => {
                self.give_back(chunk);
                return Err(status);
            }
        };
        let state = State::Read {
            stream,
            handle,
            at,
            mark: None,
            sequence: sequence(),
            sent,
        };
        self.set(chunk, state);
        self.mark_unmarked(session, stream, limit)
    }

    /// Submits a mark for the chunks of a stream that have none.
    fn mark_unmarked(&self, session: &Session, stream: StreamRef, limit: usize) -> Status {
        let unmarked = |state: &State| matches!(*state, State::Read { handle, mark: None, .. } if handle == stream.handle());
        if self.states.lock().iter().filter(|s| unmarked(s)).count() < limit {
            return Ok(());
        }
        // Chunks submitted meanwhile may be behind the mark: it covers only those before it.
        let (target, position) = {
            let mut ring = session.ring()?;
            (stream::mark(&mut ring, stream)?, stream.position())
        };
        for state in self.states.lock().iter_mut().filter(|s| unmarked(s)) {
            if let State::Read { at, mark, .. } = state
                && *at <= position
            {
                *mark = Some(target);
            }
        }
        Ok(())
    }
}

static SMALL_CHUNKS: Chunks = Chunks::new(SMALL, Side::Staging, 0, SMALL_COUNT);
static MEDIUM_CHUNKS: Chunks =
    Chunks::new(MEDIUM, Side::Staging, SMALL * SMALL_COUNT, MEDIUM_COUNT);
static PINNED_CHUNKS: Pinned = Pinned::new(PINNED, PINNED_COUNT);
static LARGE_CHUNKS: Pinned = Pinned::new(LARGE, LARGE_COUNT);

/// Chunks in a pinned buffer, once there is one.
struct Pinned {
    size: u64,
    count: u64,
    chunks: Mutex<Option<&'static Chunks>>,
}

impl Pinned {
    const fn new(size: u64, count: u64) -> Pinned {
        Pinned {
            size,
            count,
            chunks: Mutex::new(None),
        }
    }

    /// `None`: the server grants no memory for it.
    fn get(&self, session: &Session, stream: StreamRef) -> Option<&'static Chunks> {
        let mut chunks = self.chunks.lock();
        if chunks.is_none() {
            // Owned by no context, so that it outlives each.
            let bytes = self.size * self.count;
            match memory::host_alloc_unowned(session, stream.context(), bytes) {
                Ok(start) => {
                    let made = Chunks::new(self.size, Side::Host, start, self.count);
                    *chunks = Some(Box::leak(Box::new(made)));
                }
                Err(status) => {
                    tracing::warn!(%status, bytes, "no pinned memory for copies; they go through the segment");
                }
            }
        }
        *chunks
    }
}

/// The chunks that suit a copy of `len` bytes.
fn chunks_for(session: &Session, stream: StreamRef, len: u64) -> &'static Chunks {
    if len <= SMALL {
        return &SMALL_CHUNKS;
    }
    let pinned = match len {
        ..PINNED_FROM => return &MEDIUM_CHUNKS,
        PINNED_FROM..LARGE_FROM => &PINNED_CHUNKS,
        LARGE_FROM.. => &LARGE_CHUNKS,
    };
    pinned.get(session, stream).unwrap_or(&MEDIUM_CHUNKS)
}

fn sequence() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Copies pageable memory to the device (or to pinned memory: `side`). Returns when all of it is staged.
///
/// # Safety
/// `[from, from + len)` is readable.
pub unsafe fn to_device(
    session: &Session,
    stream: StreamRef,
    (to, side): (u64, Side),
    from: u64,
    len: u64,
) -> Status {
    let mut cut = Cut::new(len);
    send(
        session,
        stream,
        len,
        |most| cut.next(most),
        // SAFETY: the source is the caller's promise; a chunk has room for a piece.
        |(at, part), chunk| unsafe {
            let (from, part) = ((from + at) as *const u8, part as usize);
            match len < PINNED_FROM {
                true => ptr::copy_nonoverlapping(from, chunk, part),
                false => copying::copy_past_caches(from, chunk, part),
            }
        },
        |ring, (at, part), (chunk, chunk_side)| {
            let body = Copy {
                to: to + at,
                from: chunk,
                len: part,
                stream: stream.handle(),
                sides: side as u32 | (chunk_side as u32) << 8,
                pad: 0,
            };
            ring.put(Op::Copy, 0, &body, &[])
        },
    )
}

/// Copies from the device (or from pinned memory: `side`) to pageable memory and waits for it.
///
/// # Safety
/// `[to, to + len)` is writable.
pub unsafe fn from_device(
    session: &Session,
    stream: StreamRef,
    to: u64,
    (from, side): (u64, Side),
    len: u64,
) -> Status {
    let mut cut = Cut::new(len);
    fetch(
        session,
        stream,
        len,
        |most| cut.next(most),
        // SAFETY: the target is the caller's promise; a chunk has a piece's bytes.
        |(at, part), chunk| unsafe {
            let (to, part) = ((to + at) as *mut u8, part as usize);
            match len < PAST_CACHES_FROM {
                true => ptr::copy_nonoverlapping(chunk, to, part),
                false => copying::copy_past_caches(chunk, to, part),
            }
        },
        |ring, (at, part), (chunk, chunk_side)| {
            let body = Copy {
                to: chunk,
                from: from + at,
                len: part,
                stream: stream.handle(),
                sides: chunk_side as u32 | (side as u32) << 8,
                pad: 0,
            };
            ring.put(Op::Copy, 0, &body, &[])
        },
    )
}

/// Cuts a range into pieces: offset and bytes.
struct Cut {
    at: u64,
    len: u64,
}

impl Cut {
    fn new(len: u64) -> Cut {
        Cut { at: 0, len }
    }

    fn next(&mut self, most: u64) -> Option<(u64, u64)> {
        let (at, part) = (self.at, (self.len - self.at).min(most));
        self.at += part;
        (part > 0).then_some((at, part))
    }
}

/// Helpers for a copy of `len` bytes; none for fewer than `from` bytes.
fn helpers(session: &Session, len: u64, from: u64) -> Helpers {
    let crowded = session.header().crowded.load(Ordering::Relaxed) != 0;
    let most = if len < LARGE_FROM { 1 } else { usize::MAX };
    Helpers::find(len >= from && !crowded, most)
}

/// A chunk that is being filled.
struct Filling<'a, P> {
    chunk: usize,
    piece: P,
    given: Given<'a>,
}

/// Sends `len` bytes in pieces through staging: `next` returns a piece of at most the given number of bytes, `fill`
/// puts it into a chunk, `submit` submits its copy from there. Returns when all of it is staged.
pub fn send<P: core::marker::Copy + Send>(
    session: &Session,
    stream: StreamRef,
    len: u64,
    mut next: impl FnMut(u64) -> Option<P>,
    fill: impl Fn(P, *mut u8) + Sync,
    submit: impl Fn(&mut Ring<'_>, P, (u64, Side)) -> Status,
) -> Status {
    let chunks = chunks_for(session, stream, len);
    let limit = if len > chunks.size {
        UNMARKED
    } else {
        chunks.count as usize / 2
    };
    let submit_full = |chunk: usize, piece: P| {
        chunks.submit_full(session, stream, chunk, limit, |ring, chunk| {
            submit(ring, piece, chunk)
        })
    };
    let (fill, helpers) = (&fill, helpers(session, len, PINNED_FROM));
    let mut filling: VecDeque<Filling<'_, P>> = VecDeque::new();
    let mut status = Ok(());
    while status.is_ok()
        && let Some(piece) = next(chunks.size)
    {
        // Wait for a chunk only while holding none: two threads must not wait for each other.
        let taken = loop {
            match chunks.try_take(session) {
                Some(chunk) => break Ok(chunk),
                None => match filling.pop_front() {
                    Some(Filling {
                        chunk,
                        piece,
                        given,
                    }) => {
                        drop(given);
                        if let Err(error) = submit_full(chunk, piece) {
                            break Err(error);
                        }
                    }
                    None => break chunks.take(session),
                },
            }
        };
        let chunk = match taken {
            Ok(chunk) => chunk,
            Err(error) => {
                status = Err(error);
                break;
            }
        };
        if filling.len() < helpers.count {
            let address = chunks.address(session, chunk) as usize;
            // SAFETY: `filling` is dropped before the memory that it reads.
            let given = unsafe { helpers.give(move || fill(piece, address as *mut u8)) };
            filling.push_back(Filling {
                chunk,
                piece,
                given,
            });
        } else {
            fill(piece, chunks.address(session, chunk));
            status = submit_full(chunk, piece);
        }
        while status.is_ok() && filling.front().is_some_and(|first| first.given.is_done()) {
            if let Some(full) = filling.pop_front() {
                status = submit_full(full.chunk, full.piece);
            }
        }
    }
    for Filling {
        chunk,
        piece,
        given,
    } in filling
    {
        drop(given);
        match status {
            Ok(()) => status = submit_full(chunk, piece),
            Err(_) => chunks.give_back(chunk),
        }
    }
    status
}

/// Fetches `len` bytes in pieces through staging, as [`send`] in the other direction, and waits for them: `submit`
/// submits the copy of a piece to a chunk, `empty` takes it from there.
pub fn fetch<P: core::marker::Copy + Send>(
    session: &Session,
    stream: StreamRef,
    len: u64,
    mut next: impl FnMut(u64) -> Option<P>,
    empty: impl Fn(P, *const u8) + Sync,
    submit: impl Fn(&mut Ring<'_>, P, (u64, Side)) -> Status,
) -> Status {
    let chunks = chunks_for(session, stream, len);
    let (empty, helpers) = (&empty, helpers(session, len, PAST_CACHES_FROM));
    // Pieces that arrive no faster than one thread empties them need no helper.
    let next_is_there = |under_way: &VecDeque<(usize, Target, P)>| {
        let next = under_way.front();
        len >= LARGE_FROM || next.is_some_and(|(_, target, _)| target.is_reached(session))
    };
    // Chunks being emptied by helpers.
    let mut emptying: VecDeque<Given<'_>> = VecDeque::new();
    let mut under_way: VecDeque<(usize, Target, P)> = VecDeque::new();
    let mut status = Ok(());
    let mut coming = next(chunks.size);
    loop {
        while status.is_ok() && under_way.len() < IN_FLIGHT {
            let Some(piece) = coming else {
                break;
            };
            // Wait for a chunk only while holding none: two threads must not wait for each other.
            let chunk = loop {
                match chunks.try_take(session) {
                    Some(chunk) => break Some(Ok(chunk)),
                    None if !under_way.is_empty() => break None,
                    None => match emptying.pop_front() {
                        Some(given) => drop(given),
                        None => break Some(chunks.take(session)),
                    },
                }
            };
            let chunk = match chunk {
                Some(Ok(chunk)) => chunk,
                Some(Err(error)) => {
                    status = Err(error);
                    break;
                }
                None => break,
            };
            let submitted = session.ring().and_then(|mut ring| {
                submit(&mut ring, piece, (chunks.offset(chunk), chunks.side))?;
                stream.count(&ring);
                stream::mark(&mut ring, stream)
            });
            match submitted {
                Ok(target) => under_way.push_back((chunk, target, piece)),
                Err(error) => {
                    chunks.give_back(chunk);
                    status = Err(error);
                }
            }
            coming = next(chunks.size);
        }
        let Some((chunk, target, piece)) = under_way.pop_front() else {
            break;
        };
        let waited = stream::wait_for(session, stream, target, stream.context().policy());
        emptying.retain(|given| !given.is_done());
        if waited.is_err() {
            chunks.give_back(chunk);
        } else if emptying.len() < helpers.count && next_is_there(&under_way) {
            // The GPU is done with the chunk, which is ours.
            let address = chunks.address(session, chunk) as usize;
            // SAFETY: `emptying` is dropped before the memory that it writes.
            emptying.push_back(unsafe {
                helpers.give(move || {
                    empty(piece, address as *const u8);
                    chunks.give_back(chunk);
                })
            });
        } else {
            empty(piece, chunks.address(session, chunk));
            chunks.give_back(chunk);
        }
        status = status.and(waited);
    }
    status
}
