//! `MPSSHIM_REPLAY=kernels`: the program promises that its kernels may run again from the point where it last waited.
//!
//! The library publishes that point in the segment, as a position in the ring: everything before it was complete when the
//! program had waited. It also publishes where the program last saw a part of its work complete while other work was in
//! flight: the program may have acted on that, so that the work must not run again. A host function that has run is seen, too:
//! some programs learn only by them that their work is complete.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use mpsshim_proto::message::REPLAYS;

use crate::proxy::stream;
use crate::proxy::submit::{Ring, Session};
use crate::proxy::waited::{self, Seen};
use crate::settings;

/// Flags of the messages by which the program's devices get their contexts.
pub fn wish() -> u32 {
    static WISH: OnceLock<u32> = OnceLock::new();
    *WISH.get_or_init(|| {
        if !settings::replays_kernels() {
            return 0;
        }
        waited::add(publish);
        REPLAYS
    })
}

/// The token of marks that a thread is about to submit and to wait for together: the program sees none of them before all
/// are written. 0: the server need not know.
pub fn token(ring: &Ring<'_>) -> u64 {
    match wish() {
        0 => 0,
        // Unique: the ring has one producer at a time.
        _ => ring.position() + 1,
    }
}

/// The program has seen that work is complete.
fn publish(session: &Session, _: Seen) {
    // No thread submits anything meanwhile.
    let Ok(mut ring) = session.ring() else {
        return;
    };
    if stream::any_busy(session) {
        stream::look_at_busy(&mut ring);
    }
    let progress = &session.header().replay.0;
    // If a part was still in flight, the server notes the point of rest when the rest is complete, and nothing came since.
    let point = match stream::any_busy(session) {
        true => &progress.seen,
        false => &progress.rested,
    };
    // Partner: the server, before it notes or repeats a command.
    point.fetch_max(ring.position(), Ordering::AcqRel);
}

/// Runs a host function. If nothing is in flight at its end, and no command comes behind those that were submitted before it
/// began, the server notes the point of rest.
///
/// Takes no lock: a thread that submits may keep the ring until the next function of the same stream has returned.
pub fn run_function(session: &Session, function: impl FnOnce()) {
    let header = session.header();
    // Read first: the program may submit more as soon as the function tells it to, and that may be complete when it returns.
    let position = header.head.0.load(Ordering::Acquire);
    function();
    if wish() != 0 {
        header.replay.0.seen.fetch_max(position, Ordering::AcqRel);
    }
}

/// Puts marks behind the work of other streams before a stream gets the mark that the program waits for: mostly they are
/// written before it, so that the wait is for all work.
pub fn mark_others(ring: &mut Ring<'_>) {
    if wish() != 0 {
        stream::look_at_busy(ring);
    }
}

/// Memory in which a copy found its data, submitted at this position in the ring, is about to be written again.
pub fn overwrites(session: &Session, sent: u64) {
    let progress = &session.header().replay.0;
    if wish() != 0 && sent > progress.rested.load(Ordering::Relaxed) {
        progress.seen.fetch_max(sent, Ordering::AcqRel);
    }
}
