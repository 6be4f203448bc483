//! `cuMemPrefetchAsync` and `cuMemDiscardBatchAsync`.
//!
//! A prefetch to the device copies the host's changes at once. One to the host is remembered, and done when the program has
//! waited and no work is in flight: then it comes behind the work before it, as natively.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::region::Home;
use super::{
    ATTENDED, Direction, LAUNCHING, Part, State, any, attend, clear_provisional, guard, is_in, lock,
};
use crate::ffi::Status;
use crate::proxy::stream::{self, StreamRef};
use crate::proxy::submit::Session;

/// Prefetches to the host are remembered.
static REMEMBERED: AtomicBool = AtomicBool::new(false);
/// Most of them. Further ones are not done: the pages are fetched when they are used.
const MOST: usize = 256;

/// Pieces of a region: its first address, and their numbers.
pub type Pieces = (u64, Range<usize>);

/// A range of managed memory goes to the device, behind the work of a stream.
///
/// # Errors
/// Those of the session.
pub fn to_device(session: &Session, stream: StreamRef, address: u64, len: u64) -> Status {
    if !is_in(address) || !any() || ATTENDED.load(Ordering::SeqCst) == 0 || stream.is_capturing() {
        return Ok(());
    }
    let mut locked = lock();
    let state = &mut *locked.state;
    let Some(pieces) = state.pieces(address, len) else {
        return Ok(());
    };
    state.pass_sent(session, Some(stream))?;
    let changed = |home| matches!(home, Home::Host | Home::Pages);
    state.give(session, changed, Some(&pieces), Some(stream))
}

/// A range of managed memory goes to the host, behind the work given to streams so far.
pub fn to_host(address: u64, len: u64) {
    if !is_in(address) || !any() {
        return;
    }
    let mut locked = lock();
    let state = &mut *locked.state;
    let Some(pieces) = state.pieces(address, len) else {
        return;
    };
    if let Some(region) = state.regions.get_mut(&pieces.0) {
        // The host may use them before it has waited.
        region.expect(pieces.1.clone());
    }
    if state.wanted.len() < MOST && !state.wanted.contains(&pieces) {
        state.wanted.push(pieces);
        REMEMBERED.store(true, Ordering::Relaxed);
    }
}

/// To be called when the host may have learned that work of the device has ended.
#[inline]
pub fn observe(session: &Session) {
    if REMEMBERED.load(Ordering::Relaxed) {
        fetch(session);
    }
}

#[cold]
fn fetch(session: &Session) {
    if session.check().is_err() {
        return;
    }
    if let Err(status) = lock().state.fetch_wanted(session) {
        tracing::debug!(%status, "managed memory was not prefetched");
    }
}

/// The content of a range is not used any more.
pub fn discard(session: &Session, address: u64, len: u64) {
    if is_in(address) && any() {
        lock().state.discard(session, address, len);
    }
}

impl State {
    /// The pieces of a range that begins in a region.
    fn pieces(&mut self, address: u64, len: u64) -> Option<Pieces> {
        let region = self.region(address).filter(|_| len != 0)?;
        let last = (address + len - 1).min(region.start + region.len - 1);
        let pieces = region.piece_of(address)..region.piece_of(last) + 1;
        Some((region.start, pieces))
    }

    /// Fetches the pieces of prefetches to the host, if no work is in flight; otherwise a later wait does.
    fn fetch_wanted(&mut self, session: &Session) -> Status {
        REMEMBERED.store(false, Ordering::Relaxed);
        let wanted = std::mem::take(&mut self.wanted);
        for (start, _) in &wanted {
            if let Some(region) = self.regions.get_mut(start) {
                // Partner: `before_work`.
                attend(region);
            }
        }
        if LAUNCHING.load(Ordering::SeqCst) != 0 || stream::any_busy(session) {
            self.wanted = wanted;
            REMEMBERED.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let mut parts: Vec<Part> = Vec::new();
        let mut runs: Vec<Pieces> = Vec::new();
        for (start, pieces) in wanted {
            let Some(region) = self.regions.get_mut(&start) else {
                continue;
            };
            for (run, home) in region.runs_in(&pieces) {
                if home != Home::Device || runs.contains(&(start, run.clone())) {
                    continue;
                }
                Self::furnish(region, session, region.chunk_of(run.start))?;
                let (first, len) = region.addresses(&run);
                parts.extend(region.host(first).map(|host| (first, host, len)));
                runs.push((start, run));
            }
        }
        self.copy(session, &parts, Direction::ToHost)?;
        for (start, run) in runs {
            self.use_apart(start, &run);
            let Some(region) = self.regions.get_mut(&start) else {
                continue;
            };
            // Without it, as when the process has too many mappings, the pages are fetched when they are used.
            if guard::allow(region.addresses(&run), false, false) {
                region.set(run, Home::Both);
            }
        }
        Ok(())
    }

    /// Forgets the content of the pieces that lie in a range, unless work may be using them.
    fn discard(&mut self, session: &Session, address: u64, len: u64) {
        let Some((start, mut pieces)) = self.pieces(address, len) else {
            return;
        };
        let Some(region) = self.regions.get_mut(&start).filter(|region| !region.shared) else {
            return;
        };
        let whole = region.addresses(&pieces);
        if whole.0 < address {
            pieces.start += 1;
        }
        if whole.0 + whole.1 > address + len {
            pieces.end -= 1;
        }
        // Partner: `before_work`.
        attend(region);
        if pieces.is_empty() || LAUNCHING.load(Ordering::SeqCst) != 0 || stream::any_busy(session) {
            return;
        }
        for (run, home) in region.runs_in(&pieces) {
            if home == Home::Nowhere || !guard::deny(region.addresses(&run)) {
                continue;
            }
            clear_provisional(region, &run);
            region.set(run, Home::Nowhere);
        }
        self.use_apart(start, &pieces);
    }
}

#[cfg(test)]
mod tests {
    use super::super::region::{PIECE, Region};
    use super::*;

    const START: u64 = 0x2cc0_0000_0000;

    #[test]
    fn a_range_has_the_pieces_that_it_touches() {
        let mut state = State::new();
        let region = Region::new(START, 2 << 20, 0);
        state.regions.insert(START, region);
        let of = |state: &mut State, address, len| state.pieces(address, len);
        assert_eq!(of(&mut state, START, 1), Some((START, 0..1)));
        assert_eq!(of(&mut state, START + PIECE - 1, 2), Some((START, 0..2)));
        assert_eq!(of(&mut state, START + 5, 100 << 20), Some((START, 0..32)));
        assert_eq!(of(&mut state, START, 0), None);
        assert_eq!(of(&mut state, START + (2 << 20), 1), None);
    }
}
