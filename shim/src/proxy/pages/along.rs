//! Copies of managed memory in the program's own streams, which save the thread a wait of its own: pieces that the host is
//! about to use, behind the work that it waits for, and pieces that it has changed, before the work that it launches.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use mpsshim_api::cuda::CUDA_ERROR_OUT_OF_MEMORY;
use mpsshim_proto::message::{ManagedMove, NO_FLAG, Op, PIECES_MAX, Piece, Side};
use mpsshim_proto::segment::reached;
use zerocopy::IntoBytes;

use super::guard::PAGE;
use super::habits::{Due, SLOTS};
use super::region::{Home, Open, PIECE};
use super::{
    ATTENDED, Direction, LAUNCHES, LAUNCHING, Part, STATE, State, apart, attend, guard, lock,
};

use crate::fault_heap::Inside;
use crate::ffi::Status;
use crate::proxy::memory;
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::{Ring, Session};
use crate::proxy::wait::{self, Policy};
use crate::thread::try_locked;

/// Some pieces are fetched along.
static EXPECTS: AtomicBool = AtomicBool::new(false);
/// Number of the device, plus 1, for which memory is wanted to fetch pieces to.
static WANTED_ON: AtomicU32 = AtomicU32::new(0);
/// Pieces have been fetched along and not looked at.
static FETCHED: AtomicBool = AtomicBool::new(false);

/// Most parts that are given to the device by messages between those of the program.
const MOST_PARTS: usize = 64;

/// Pieces that were fetched along.
#[derive(Debug)]
pub struct Fetched {
    /// Launches of the process before.
    launches: u64,
    pieces: Vec<Due>,
}

/// Changes of the host that are copied to the device in a stream of the program.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Handle of that stream.
    stream: u64,
    /// Value of the mark behind the copies.
    value: u32,
}

/// Allocates memory to fetch pieces to, if that is wanted. A fault cannot: its thread may have been interrupted with locks that
/// requests take. Without memory, pieces are fetched when they are used.
#[inline]
pub fn furnish(session: &Session) {
    if WANTED_ON.load(Ordering::Relaxed) != 0 {
        allocate(session);
    }
}

#[cold]
fn allocate(session: &Session) {
    let Some(device) = WANTED_ON.swap(0, Ordering::Relaxed).checked_sub(1) else {
        return;
    };
    let Ok(made) = memory::host_alloc_of_pages(session, device, SLOTS as u64 * PIECE) else {
        return;
    };
    let mut locked = lock();
    let surplus = match locked.state.place {
        Some(_) => Some(made),
        None => locked.state.place.replace(made),
    };
    locked.state.tell_waits();
    drop(locked);
    if let Some(surplus) = surplus {
        let _ = memory::host_give_back(session, surplus);
    }
}

/// To be called before the host waits for a stream that it has given work to.
#[inline]
pub fn before_wait(session: &Session, stream: StreamRef) {
    if EXPECTS.load(Ordering::Relaxed) {
        fetch(session, stream);
    }
}

#[cold]
fn fetch(session: &Session, stream: StreamRef) {
    let _inside = Inside::new();
    let Some(mut state) = try_locked(&STATE) else {
        return;
    };
    if let Ok(Some(mut ring)) = session.try_ring()
        && stream.is_busy()
    {
        state.fetch_along(&mut ring, stream, 0);
    }
}

/// To be called with the ring by which the last work was given to a stream, while that counts as launching: pieces that the
/// host uses after this launch are fetched behind it.
#[inline]
pub fn behind_work(ring: &mut Ring<'_>, stream: StreamRef) {
    if EXPECTS.load(Ordering::Relaxed) {
        fetch_behind(ring, stream);
    }
}

#[cold]
fn fetch_behind(ring: &mut Ring<'_>, stream: StreamRef) {
    let _inside = Inside::new();
    // A thread with this lock may wait for the ring.
    if let Some(mut state) = try_locked(&STATE) {
        state.fetch_along(ring, stream, 1);
    }
}

/// To be called when the host may have learned that work of the device has ended.
#[inline]
pub fn observe(session: &Session) {
    if FETCHED.load(Ordering::Relaxed) {
        admit(session);
    }
}

#[cold]
fn admit(session: &Session) {
    if session.check().is_ok() {
        lock().state.admit_fetched(session);
    }
}

/// The message for parts, at most [`PIECES_MAX`], and a mark with this flag and value behind them, if there is one.
fn message(
    stream: StreamRef,
    parts: &[Part],
    direction: Direction,
    flag: Option<(u32, u32)>,
) -> (ManagedMove, [Piece; PIECES_MAX]) {
    let mut pieces = [Piece::default(); PIECES_MAX];
    for ((device, host, len), piece) in parts.iter().copied().zip(&mut pieces) {
        *piece = Piece { device, host, len };
    }
    let (slot, value) = flag.unwrap_or((NO_FLAG, 0));
    let body = ManagedMove {
        stream: stream.handle(),
        len: parts.iter().map(|(_, _, len)| len).sum(),
        to: match direction {
            Direction::ToDevice => Side::Device as u32,
            Direction::ToHost => Side::Host as u32,
        },
        pieces: parts.len() as u32,
        slot,
        value,
    };
    (body, pieces)
}

impl State {
    /// The host has used a piece that was on the device, at this offset in it, or begins to write to a piece that it has read.
    pub fn note_use(&mut self, (start, piece): (u64, usize), offset: u64, write: bool) {
        let launches = LAUNCHES.load(Ordering::SeqCst);
        let page = offset / PAGE;
        self.habits.used((start, piece), page, write, launches);
        if self.habits.any() && self.place.is_none() {
            let device = memory::server_device_of(start).unwrap_or(0);
            WANTED_ON.store(device + 1, Ordering::Relaxed);
        }
        self.tell_waits();
    }

    /// Waits look for pieces to fetch along from now on, if there are any.
    pub fn tell_waits(&self) {
        let expects = self.habits.any() && self.place.is_some();
        EXPECTS.store(expects, Ordering::Relaxed);
    }

    /// Pieces that were fetched along are not used: a region has ended, or its content is new.
    pub fn forget_habits(&mut self, start: u64) {
        self.habits.drop_region(start);
        self.fetched = None;
        self.tell_waits();
    }

    /// Pieces are fetched or changed otherwise, so that their content that was fetched along is not the latest.
    pub fn use_apart(&mut self, start: u64, pieces: &Range<usize>) {
        if let Some(fetched) = &mut self.fetched {
            let is_used = |(region, piece)| region == start && pieces.contains(&piece);
            fetched.pieces.retain(|due| !is_used(due.piece));
        }
    }

    /// Fetches the pieces that are due, behind the work of a stream. `launching`: calls of this thread that count as launching.
    /// They come to memory that the program does not know, since it may use the pieces themselves meanwhile.
    fn fetch_along(&mut self, ring: &mut Ring<'_>, stream: StreamRef, launching: usize) {
        // In this order: a call that counts a launch later is seen below, or when the pieces are made accessible.
        let launches = LAUNCHES.load(Ordering::SeqCst);
        let Some(place) = self.place else {
            return;
        };
        let is_done = |fetched: &Fetched| fetched.launches == launches;
        if LAUNCHING.load(Ordering::SeqCst) != launching
            || self.fetched.as_ref().is_some_and(is_done)
        {
            return;
        }
        let due = self.habits.due(launches);
        self.tell_waits();
        if due.is_empty()
            || stream.is_capturing()
            || stream::any_busy_but(ring.session(), Some(stream))
        {
            return;
        }
        let part = |due: Due| {
            let home = self.regions.get(&due.piece.0)?.home(due.piece.1);
            let (first, len) = self.pages(&due).filter(|_| home == Home::Device)?;
            let to = place + due.slot as u64 * PIECE;
            Some((due, (first, to, len)))
        };
        let (mut pieces, parts): (Vec<Due>, Vec<Part>) = due.into_iter().filter_map(part).unzip();
        // A full ring may wait for a host function, which may wait for the lock that this thread has.
        let mut sent = 0;
        for parts in parts.chunks(PIECES_MAX) {
            let (body, all) = message(stream, parts, Direction::ToHost, None);
            if !ring.try_put(Op::ManagedMove, &body, all[..parts.len()].as_bytes()) {
                break;
            }
            stream.count(ring);
            sent += parts.len();
        }
        pieces.truncate(sent);
        if !pieces.is_empty() {
            self.fetched = Some(Fetched { launches, pieces });
            FETCHED.store(true, Ordering::Relaxed);
        }
    }

    /// Address and bytes of the pages that the host will use.
    fn pages(&self, due: &Due) -> Option<(u64, u64)> {
        let (start, piece) = due.piece;
        let (first, len) = self.regions.get(&start)?.addresses(&(piece..piece + 1));
        let end = (due.pages.end * PAGE).min(len);
        let begin = (due.pages.start * PAGE).min(end);
        Some((first + begin, end - begin)).filter(|(_, len)| *len != 0)
    }

    /// The accessible pages of a piece, if only some are, go back to the device, so that none is accessible.
    pub fn close_pages(&mut self, session: &Session, start: u64, piece: usize) -> Status {
        let Some(region) = self.regions.get(&start) else {
            return Ok(());
        };
        let Some(open) = region.open.get(&piece).copied() else {
            return Ok(());
        };
        if !guard::deny((open.start, open.len)) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let host = region.host(open.start).filter(|_| open.written);
        let part = host.map(|host| (open.start, host, open.len));
        let copied = self.copy(session, part.as_slice(), Direction::ToDevice);
        match (copied, self.regions.get_mut(&start)) {
            (Ok(()), Some(region)) => region.set(piece..piece + 1, Home::Device),
            (Err(_), _) => drop(guard::allow((open.start, open.len), false, open.written)),
            _ => {}
        }
        copied
    }

    /// Makes the pieces accessible that were fetched along, if the device cannot have changed them since.
    fn admit_fetched(&mut self, session: &Session) {
        FETCHED.store(false, Ordering::Relaxed);
        let (Some(fetched), Some(place)) = (self.fetched.take(), self.place) else {
            return;
        };
        for due in &fetched.pieces {
            if let Some(region) = self.regions.get_mut(&due.piece.0) {
                // Partner: `before_work`.
                attend(region);
            }
        }
        if LAUNCHES.load(Ordering::SeqCst) != fetched.launches {
            return;
        }
        if LAUNCHING.load(Ordering::SeqCst) != 0 || stream::any_busy(session) {
            // A later wait sees more.
            self.fetched = Some(fetched);
            FETCHED.store(true, Ordering::Relaxed);
            return;
        }
        for due in fetched.pieces {
            let (start, piece) = due.piece;
            let Some((first, len)) = self.pages(&due) else {
                continue;
            };
            let Some(region) = self.regions.get_mut(&start) else {
                continue;
            };
            let Some(host) = region
                .host(first)
                .filter(|_| region.home(piece) == Home::Device)
            else {
                continue;
            };
            let from = place + due.slot as u64 * PIECE;
            // SAFETY: memory of the host arena that belongs to this module, and to the region, whose pages are protected
            // at the addresses that the program knows.
            unsafe {
                std::ptr::copy_nonoverlapping(from as *const u8, host as *mut u8, len as usize);
            }
            if guard::allow((first, len), false, due.written) {
                let open = Open {
                    start: first,
                    len,
                    written: due.written,
                };
                region.open.insert(piece, open);
                region.set(piece..piece + 1, Home::Pages);
                self.habits.fetched(due.piece, fetched.launches);
            }
        }
    }

    /// Gives parts to the device before the next work of a stream, if nothing else is in flight: then the copies wait for
    /// nothing, and a thread that needs them done waits for a moment only. Returns whether it did.
    pub fn send(&mut self, session: &Session, parts: &[Part], stream: StreamRef) -> Status<bool> {
        let Some(own) = self.stream.filter(|_| parts.len() <= MOST_PARTS) else {
            return Ok(false);
        };
        if parts.is_empty() {
            return Ok(true);
        }
        if parts.iter().any(|(_, host, _)| apart::is_apart(*host)) {
            return Ok(false);
        }
        let Some(mut ring) = session.try_ring()? else {
            return Ok(false);
        };
        if self.sent.is_some() || stream.is_capturing() || stream::any_busy(session) {
            return Ok(false);
        }
        self.value = self.value.wrapping_add(1);
        let mark = Some((own.slot(), self.value));
        let mut chunks = parts.chunks(PIECES_MAX).peekable();
        while let Some(parts) = chunks.next() {
            let flag = mark.filter(|_| chunks.peek().is_none());
            let (body, pieces) = message(stream, parts, Direction::ToDevice, flag);
            ring.put(Op::ManagedMove, 0, &body, pieces[..parts.len()].as_bytes())?;
            stream.count(&ring);
        }
        self.sent = Some(Sent {
            stream: stream.handle(),
            value: self.value,
        });
        // Launches in other streams come after the copies.
        ATTENDED.fetch_add(1, Ordering::SeqCst);
        Ok(true)
    }

    /// Work in `stream` (`None`: in any) may follow the changes that were sent: waits if it would not, and forgets it once it is done.
    pub fn pass_sent(&mut self, session: &Session, stream: Option<StreamRef>) -> Status {
        let (Some(sent), Some(own)) = (self.sent, self.stream) else {
            return Ok(());
        };
        let flag = session.flag(own.slot()).load(Ordering::Acquire);
        if !reached(flag, sent.value) {
            if stream.is_some_and(|stream| stream.handle() == sent.stream) {
                return Ok(());
            }
            wait::wait(session, own.slot(), sent.value, Policy::Auto)?;
        }
        self.sent = None;
        ATTENDED.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}
