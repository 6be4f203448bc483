//! Copies of managed memory in the program's own streams, which save the thread a wait of its own: pieces that the host is
//! about to use, behind the work that it waits for, and pieces that it has changed, before the work that it launches.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use mpsshim_proto::message::{Copy, Mark, Op, SIDES_MANAGED};

use super::habits::{Due, SLOTS};
use super::region::{Home, PIECE};
use super::{
    ATTENDED, Blocked, Direction, LAUNCHES, LAUNCHING, Part, STATE, State, attend, guard, lock,
};
use crate::ffi::Status;
use crate::proxy::memory;
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::{Ring, Session};
use crate::proxy::wait::{self, Policy};

/// Some pieces are fetched along.
static EXPECTS: AtomicBool = AtomicBool::new(false);
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

/// To be called before the host waits for a stream that it has given work to.
#[inline]
pub fn before_wait(session: &Session, stream: StreamRef) {
    if EXPECTS.load(Ordering::Relaxed) {
        fetch(session, stream);
    }
}

#[cold]
fn fetch(session: &Session, stream: StreamRef) {
    let _signals = Blocked::new();
    let Some(mut state) = STATE.try_lock() else {
        return;
    };
    if let Err(status) = state.fetch_along(session, stream) {
        tracing::debug!(%status, "managed memory was not fetched along");
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
        lock().state.admit_fetched();
    }
}

/// Whether work was given to streams other than this one and is not known to be complete.
fn others_are_busy(stream: StreamRef) -> bool {
    let others = stream::all().into_iter();
    let mut others = others.filter(|other| other.handle() != stream.handle());
    others.any(|other| other.is_busy())
}

/// Puts copies into the ring, which a stream executes behind what it was given before.
fn put(ring: &mut Ring<'_>, stream: StreamRef, parts: &[Part], direction: Direction) -> Status {
    for part in parts {
        let body = Copy {
            stream: stream.handle(),
            ..direction.copy(*part, SIDES_MANAGED)
        };
        ring.put(Op::Copy, 0, &body, &[])?;
        stream.count(ring);
    }
    Ok(())
}

impl State {
    /// The host has used a piece that was on the device, or begins to write to one that it has read.
    pub fn note_use(&mut self, session: &Session, start: u64, piece: usize, write: bool) {
        let launches = LAUNCHES.load(Ordering::SeqCst);
        self.habits.used((start, piece), write, launches);
        if self.habits.any() && self.place.is_none() {
            let device = memory::server_device_of(start).unwrap_or(0);
            let len = SLOTS as u64 * PIECE;
            // Without memory pieces are fetched when they are used.
            self.place = memory::host_alloc_of_pages(session, device, len).ok();
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

    /// Fetches the pieces that are due, behind the work of a stream. They come to memory that the program does not know,
    /// since it may use the pieces themselves meanwhile.
    fn fetch_along(&mut self, session: &Session, stream: StreamRef) -> Status {
        // In this order: a call that counts a launch later is seen below, or when the pieces are made accessible.
        let launches = LAUNCHES.load(Ordering::SeqCst);
        let Some(place) = self.place else {
            return Ok(());
        };
        if LAUNCHING.load(Ordering::SeqCst) != 0
            || self
                .fetched
                .as_ref()
                .is_some_and(|it| it.launches == launches)
        {
            return Ok(());
        }
        let mut pieces = self.habits.due(launches);
        self.tell_waits();
        pieces.retain(|due| {
            let region = self.regions.get(&due.piece.0);
            region.is_some_and(|region| region.home(due.piece.1) == Home::Device)
        });
        let Some(mut ring) = session.try_ring()? else {
            return Ok(());
        };
        if pieces.is_empty()
            || stream.is_capturing()
            || !stream.is_busy()
            || others_are_busy(stream)
        {
            return Ok(());
        }
        let parts: Vec<Part> = pieces
            .iter()
            .filter_map(|due| {
                let (start, piece) = due.piece;
                let (first, len) = self.regions.get(&start)?.addresses(&(piece..piece + 1));
                Some((first, place + due.slot as u64 * PIECE, len))
            })
            .collect();
        put(&mut ring, stream, &parts, Direction::ToHost)?;
        self.fetched = Some(Fetched { launches, pieces });
        FETCHED.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the pieces accessible that were fetched along, if the device cannot have changed them since.
    fn admit_fetched(&mut self) {
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
        if LAUNCHES.load(Ordering::SeqCst) != fetched.launches
            || LAUNCHING.load(Ordering::SeqCst) != 0
            || stream::any_busy()
        {
            return;
        }
        for due in fetched.pieces {
            let (start, piece) = due.piece;
            let Some(region) = self.regions.get_mut(&start) else {
                continue;
            };
            let (first, len) = region.addresses(&(piece..piece + 1));
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
                let home = match due.written {
                    true => Home::Host,
                    false => Home::Both,
                };
                region.set(piece..piece + 1, home);
                self.habits.fetched(due.piece, fetched.launches);
            }
        }
    }

    /// Gives parts to the device before the next work of a stream, if nothing else is in flight: then the copies wait for
    /// nothing, and whoever needs them done waits for a moment only. Returns whether it did.
    pub fn send(&mut self, session: &Session, parts: &[Part], stream: StreamRef) -> Status<bool> {
        let Some(own) = self.stream.filter(|_| parts.len() <= MOST_PARTS) else {
            return Ok(false);
        };
        if parts.is_empty() {
            return Ok(true);
        }
        let Some(mut ring) = session.try_ring()? else {
            return Ok(false);
        };
        if self.sent.is_some() || stream.is_capturing() || stream::any_busy() {
            return Ok(false);
        }
        put(&mut ring, stream, parts, Direction::ToDevice)?;
        self.value = self.value.wrapping_add(1);
        let body = Mark {
            stream: stream.handle(),
            slot: own.slot(),
            value: self.value,
        };
        ring.put(Op::Mark, 0, &body, &[])?;
        self.sent = Some(Sent {
            stream: stream.handle(),
            value: self.value,
        });
        // Launches in other streams come after the copies.
        ATTENDED.fetch_add(1, Ordering::SeqCst);
        Ok(true)
    }

    /// Work in `stream` (`None`: in any) may follow what was sent: waits if it would not, and forgets it once it is done.
    pub fn pass_sent(&mut self, session: &Session, stream: Option<StreamRef>) -> Status {
        let (Some(sent), Some(own)) = (self.sent, self.stream) else {
            return Ok(());
        };
        let flag = session.flag(own.slot()).load(Ordering::Acquire);
        if !mpsshim_proto::segment::reached(flag, sent.value) {
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
